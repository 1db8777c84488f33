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


def interrupt(urls: str, case: str, times: str = "once") -> None:
    options, count = CASES[case]
    words = [sys.executable, "-m", "tests.support.interrupting", urls, json.dumps(options)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    words += [str(count), "7", times]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["moments"] > 1000
    # The others come while Python drops the loader, or after the loop.
    assert result["interrupted"] > count / 3


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    write_shards(tmp_path / "s", [7, 13, 1])
    wt.index(tmp_path / "s")
    return tmp_path / "s"


@pytest.mark.slow
@pytest.mark.parametrize("times", ["once", "twice"])
@pytest.mark.parametrize("case", ["bytes", "threads", "workers"])
def test_after_an_interrupt_at_any_moment_the_next_epoch_is_complete(
    shards: Path, case: str, times: str
) -> None:
    """twice: a second Ctrl-C comes within two milliseconds, during the handling of the first."""
    interrupt(str(shards), case, times)


@pytest.mark.slow
def test_arrays_can_be_interrupted_at_any_moment(tmp_path: Path) -> None:
    samples = ({"__key__": f"n{n:04d}", "x.npy": np.full(2048, n, np.int32)} for n in range(21))
    wt.pack(samples, str(tmp_path / "s"), shuffle=False)
    interrupt(str(tmp_path / "s"), "arrays")


@pytest.mark.slow
def test_reading_from_a_server_can_be_interrupted_at_any_moment(shards: Path) -> None:
    with serving(shards) as served:
        interrupt(f"{served.url}/index.json", "server")
