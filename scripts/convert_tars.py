"""Existing shards to new ones: other sizes, another order, merged, split, filtered.

    .venv/bin/python scripts/convert_tars.py 'old/*.tar' shards/new --select 'cls < 3'

The same as `wdstrain convert tars`; --help lists the options.
"""

import sys

from wdstrain.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", "tars", *sys.argv[1:]]))
