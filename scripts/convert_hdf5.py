"""Data sets of an HDF5 or PyTables file to shards.

    .venv/bin/python scripts/convert_hdf5.py data.h5 shards/data --field image=/images --field cls=/labels

The same as `wdstrain convert hdf5`; --help lists the options.
"""

import sys

from wdstrain.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", "hdf5", *sys.argv[1:]]))
