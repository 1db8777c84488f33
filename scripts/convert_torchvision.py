"""A torchvision data set to shards.

    .venv/bin/python scripts/convert_torchvision.py FashionMNIST shards/fashion --root data

The same as `wdstrain convert torchvision`; --help lists the options.
"""

import sys

from wdstrain.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", "torchvision", *sys.argv[1:]]))
