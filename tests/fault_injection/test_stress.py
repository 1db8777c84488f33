"""Exact samples and flat memory under random faults, kills and a small cache (`stress.py`)."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from typing import Any

import pytest

ROWS = {  # least counts
    "epochs from their first batch to their last": 5,
    "readers killed and started again": 1,
    "passes that began within an epoch": 1,
    "faults": 11,
}


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(600)
def test_readers_that_are_killed_or_break_off_are_exact_and_flat_for_half_a_minute() -> None:
    command = [sys.executable, "-m", "tests.fault_injection.stress", "--minutes", "0.5"]
    command += ["--processes", "4", "--workers", "2"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        try:
            table, _ = process.communicate()
        except BaseException:  # such as the time limit: the command must end its processes
            process.send_signal(signal.SIGINT)
            process.wait(60)
            raise
    assert process.returncode == 0, table
    assert table.rstrip().endswith("exact, and flat")
    assert max(map(len, table.splitlines())) <= 80
    for name, least in ROWS.items():
        row = re.search(rf"^ *{name}[^\d]* (\d+)", table, re.MULTILINE)
        assert row is not None and int(row[1]) >= least, table  # noqa: PT018
    assert re.search(r"wrong epochs +0$", table, re.MULTILINE)
    assert len(re.findall(r"all readers: \w+, first and last third +\d+, \d+", table)) == 3
