"""Exact and flat under load: random faults, kills, breaks and a cache that is too small, all at once (`scripts/load.py`)."""

from __future__ import annotations

import re
import signal
import subprocess
import sys

import pytest

from tests.conftest import ROOT


def load(**words: object) -> str:
    """The table that the load prints. It has ended, and so has everything it started."""
    command = [
        sys.executable,
        str(ROOT / "scripts" / "load.py"),
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
@pytest.mark.timeout(600)
def test_a_reader_that_is_killed_and_one_that_breaks_off_get_what_is_planned_from_a_server_that_fails() -> (
    None
):
    found = load(minutes=0.1, processes=2, workers=1)
    assert number(found, "epochs from their first batch to their last") > 0
    assert number(found, "readers killed and started again") > 0
    assert number(found, "faults") > 0
    assert number(found, "wrong epochs") == 0


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(900)
def test_eight_readers_with_four_workers_each_are_exact_and_flat_for_a_minute() -> None:
    found = load(minutes=1, processes=8, workers=4)
    assert number(found, "epochs from their first batch to their last") > 8
    assert number(found, "readers killed and started again") > 2
    assert number(found, "passes that began within an epoch") > 2
    assert number(found, "faults") > 100
    assert re.search(r"all readers +\d+ +\d+ +\d+ \d+ +\d+ \d+ +\d+ \d+", found)
