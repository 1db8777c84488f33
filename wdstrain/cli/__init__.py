"""The command line `wdstrain VERB ...`."""

from wdstrain.cli.main import main

__all__ = ["main"]
