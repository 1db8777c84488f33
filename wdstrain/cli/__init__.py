"""What is typed: `wdstrain VERB ...`.

words.py     what verbs have in common: their help, their results, sizes and shares as people write them
convert.py   the verbs that make shards
main.py      the others, errors and exit statuses
"""

from wdstrain.cli.main import entry, main

__all__ = ["entry", "main"]
