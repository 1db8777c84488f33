"""Ctrl-C at any moment of a loop: no hang, a complete next epoch, no leftovers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wdstrain as wt
from tests.conftest import ROOT, write_shards
from tests.support.servers import serving

CASES: dict[str, tuple[dict[str, Any], int]] = {
    "bytes": ({"kind": "bytes"}, 60),
    "threads": ({"kind": "transform"}, 100),
    "server": ({"kind": "transform"}, 25),
    "arrays": ({"kind": "array"}, 100),
    "workers": ({"kind": "transform", "num_workers": 2}, 15),
}
TWICE = ("bytes", "threads", "workers")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "times"), [*((case, "once") for case in CASES), *((case, "twice") for case in TWICE)]
)
def test_after_an_interrupt_at_any_moment_the_next_epoch_is_complete(
    tmp_path: Path, case: str, times: str
) -> None:
    """twice: a second Ctrl-C comes within two milliseconds, during the handling of the first."""
    if case == "arrays":
        samples = ({"__key__": f"n{n:04d}", "x.npy": np.full(2048, n, np.int32)} for n in range(21))
        wt.pack(samples, tmp_path / "s", shuffle=False)
    else:
        wt.index(write_shards(tmp_path / "s", [7, 13, 1]))
    options, count = CASES[case]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with serving(tmp_path / "s") as served:
        urls = f"{served.url}/index.json" if case == "server" else str(tmp_path / "s")
        words = [sys.executable, "-m", "tests.support.interrupting", urls, json.dumps(options)]
        words += [str(count), "7", times]
        done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["moments"] > 1000
    # The others come while Python drops the loader, or after the loop.
    assert result["interrupted"] > count / 3
