"""Exact samples and flat memory under random faults, kills and a small cache (`stress.py`)."""

from __future__ import annotations

import re
import signal
import subprocess
import sys

import pytest


def load(**words: object) -> str:
    """Return the printed table of a load that has ended with all its processes."""
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
            table, _ = process.communicate()
        except (
            BaseException
        ):  # the patience of a test is over: it ends what it started, as on Ctrl-C
            process.send_signal(signal.SIGINT)
            process.wait(60)
            raise
    assert process.returncode == 0, table
    assert table.rstrip().endswith("exact, and flat")
    assert max(map(len, table.splitlines())) <= 80
    return table


def number(table: str, name: str) -> int:
    row = re.search(rf"^ *{name}[^\d]* (\d+)", table, re.MULTILINE)
    assert row, table
    return int(row[1])


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(600)
def test_readers_that_are_killed_or_break_off_are_exact_and_flat_for_half_a_minute() -> None:
    table = load(minutes=0.5, processes=4, workers=2)
    assert number(table, "epochs from their first batch to their last") > 4
    assert number(table, "readers killed and started again") > 0
    assert number(table, "passes that began within an epoch") > 0
    assert number(table, "faults") > 10
    assert number(table, "wrong epochs") == 0
    assert re.search(r"all readers +\d+ +\d+ +\d+ \d+ +\d+ \d+ +\d+ \d+", table)
