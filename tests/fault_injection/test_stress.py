"""Samples stay exact and memory flat under random faults, kills, breaks and a small cache (`stress.py`)."""

from __future__ import annotations

import re
import signal
import subprocess
import sys

import pytest


def load(**words: object) -> str:
    """The table that the load prints. It has ended, and so has everything it started."""
    command = [
        sys.executable,
        "-m",
        "tests.fault_injection.stress",
        *(f"--{name}={value}" for name, value in words.items()),
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            found, _ = process.communicate()
        except (
            BaseException
        ):  # the patience of a test is over: it ends what it started, as on Ctrl-C
            process.send_signal(signal.SIGINT)
            process.wait(60)
            raise
    assert process.returncode == 0, found
    assert found.rstrip().endswith("exact, and flat")
    assert max(map(len, found.splitlines())) <= 80
    return found


def number(found: str, name: str) -> int:
    row = re.search(rf"^ *{name}[^\d]* (\d+)", found, re.MULTILINE)
    assert row, found
    return int(row[1])


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(600)
def test_readers_that_are_killed_or_break_off_are_exact_and_flat_for_half_a_minute() -> None:
    found = load(minutes=0.5, processes=4, workers=2)
    assert number(found, "epochs from their first batch to their last") > 4
    assert number(found, "readers killed and started again") > 0
    assert number(found, "passes that began within an epoch") > 0
    assert number(found, "faults") > 10
    assert number(found, "wrong epochs") == 0
    assert re.search(r"all readers +\d+ +\d+ +\d+ \d+ +\d+ \d+ +\d+ \d+", found)
