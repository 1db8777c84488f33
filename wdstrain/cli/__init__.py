"""The command line `wdstrain VERB ...`: one file for each verb, with common.py, flags.py and errors.py."""

from wdstrain.cli.main import main

__all__ = ["main"]
