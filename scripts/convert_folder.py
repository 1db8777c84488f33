"""Class folders to shards.

    .venv/bin/python scripts/convert_folder.py photos/ shards/photos --split train=0.9,val=0.1

The same as `wdstrain convert folder`; --help lists the options.
"""

import sys

from wdstrain.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", "folder", *sys.argv[1:]]))
