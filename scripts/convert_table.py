"""A table (CSV, TSV, JSON lines, parquet) with a column of pictures to shards.

    .venv/bin/python scripts/convert_table.py log.csv shards/log --image path --label angle

The same as `wdstrain convert table`; --help lists the options.
"""

import sys

from wdstrain.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", "table", *sys.argv[1:]]))
