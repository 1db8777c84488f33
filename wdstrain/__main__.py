"""The console script `wdstrain`, also `python -m wdstrain VERB ...`."""

import os
import sys
from typing import NoReturn


def entry() -> NoReturn:
    """Run the command line. Imports are inside, so that Ctrl-C while they run shows no traceback."""
    try:
        for name in ("stdout", "stderr"):
            if getattr(sys, name) is None:  # closed by the caller; a file must not take its number
                setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        from wdstrain.cli.main import main

        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.stderr.write("\nerror: interrupted\n")
        sys.exit(130)


if __name__ == "__main__":
    entry()
