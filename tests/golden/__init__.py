"""Values that must stay equal from one version to the next, in the files of `expected/`.

`python -m tests.golden.rewrite` writes these files anew.
"""
