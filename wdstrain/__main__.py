"""`python -m wdstrain VERB ...`"""

from wdstrain.cli import entry

if __name__ == "__main__":
    entry()
