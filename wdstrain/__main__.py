"""`python -m wdstrain VERB ...`"""

import sys

if __name__ == "__main__":
    try:
        from wdstrain.cli import entry

        entry()
    except KeyboardInterrupt:  # before there is a verb, which would say how to go on
        sys.stderr.write("\nwdstrain: interrupted.\n")
        sys.exit(130)
