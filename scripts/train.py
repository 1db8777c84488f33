"""Train a model on shards.

    .venv/bin/python scripts/train.py shards/photos --out runs/photos --epochs 10

The same as `wdstrain train`; --help lists the options.
"""

import sys

from wdstrain.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
