""".npy and .npz arrays to shards.

    .venv/bin/python scripts/convert_arrays.py shards/data --field png=images.npy --field cls=labels.npy

The same as `wdstrain convert arrays`; --help lists the options.
"""

import sys

from wdstrain.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", "arrays", *sys.argv[1:]]))
