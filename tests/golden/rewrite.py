"""Write the files of expected values anew, from what the code gives now.

    python -m tests.golden.rewrite              # all files
    python -m tests.golden.rewrite orders       # one file

Look at the difference with `git diff tests/golden/expected`, and give its reason in the commit.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from tests.golden import expected


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the files of expected values anew.")
    parser.add_argument("file", nargs="*", help=f"{', '.join(expected.TRAILERS)}; default: all")
    files = parser.parse_args().file or list(expected.TRAILERS)
    for file in files:
        if file not in expected.TRAILERS:
            parser.error(f"{file!r}: must be one of {', '.join(expected.TRAILERS)}")
    expected.rewriting = True
    tests = [str(Path(__file__).parent / f"test_{file}.py") for file in files]
    return int(pytest.main([*tests, "-p", "no:xdist"]))


if __name__ == "__main__":
    raise SystemExit(main())
