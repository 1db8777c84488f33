"""Interrupted conversions end soon, and resume without reading their source again."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import wdstrain as wt
from tests.conftest import ROOT

# --- archives ---

# Each archive is converted with other options. The arguments of a run: the folder, and its step.
VARIANTS: dict[str, dict[str, Any]] = {
    "no options": {},
    "rename": {"rename": {"txt": "said"}},
    "keep": {"keep": ["txt", "cls", *(f"field{n}" for n in range(8))]},
    "drop": {"drop": [f"field{n}" for n in range(8)]},
    "keys": {"keys": "keys.txt"},
}
RUN = """
import json, os, sys
import wdstrain as wt
def stop(step):
    if step.title == "packing" and step.done:
        raise KeyboardInterrupt
variants, resume = json.loads(sys.argv[1]), sys.argv[2] == "resume"
for name, options in variants.items():
    more = {"resume": True} if resume else {"progress": stop}
    try:
        wt.convert_tars(f"{name}.tar.gz", name, max_shard_samples=2, num_workers=1, **options, **more)
    except KeyboardInterrupt:
        pass
"""


def _write_archive(path: Path, text: str) -> None:
    with tarfile.open(path, "w:gz", compresslevel=0) as archive:
        for number in range(8):
            for field, data in (("cls", b"1"), ("txt", text.encode())):
                member = tarfile.TarInfo(f"k{number}.{field}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    os.utime(path, (1e9, 1e9))


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sets of archives whose conversions another process began.

    The second process finds other bytes in the archives, of the same size and time: samples that
    hold them were read again.
    """
    folder = tmp_path_factory.mktemp("archives")
    (folder / "keys.txt").write_text("".join(f"k{n}\n" for n in range(8)))
    for step, text in (("begin", "first"), ("resume", "later")):
        for name in VARIANTS:
            _write_archive(folder / f"{name}.tar.gz", text)
        subprocess.run(
            [sys.executable, "-c", RUN, json.dumps(VARIANTS), step],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": str(len(step))},
            check=True,
            timeout=60,
        )
    return folder


@pytest.mark.parametrize("name", VARIANTS)
def test_a_resumed_conversion_uses_what_was_unpacked(resumed: Path, name: str) -> None:
    index = wt.open(resumed / name)
    assert len(index) == 8
    field = "said" if name == "rename" else "txt"
    assert {sample[field] for sample in map(index.__getitem__, range(8))} == {b"first"}


# --- Ctrl-C ---


@pytest.mark.parametrize("workers", [1, 2])
def test_ctrl_c_does_not_wait_for_the_shards_that_are_being_written(
    tmp_path: Path, workers: int
) -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (500, 500, 3), np.uint8)
    (tmp_path / "in" / "a").mkdir(parents=True)
    first = tmp_path / "in" / "a" / "0.png"
    Image.fromarray(pixels).save(first, compress_level=1)
    for number in range(1, 800):
        os.link(first, tmp_path / "in" / "a" / f"{number}.png")

    out = tmp_path / "out"

    def interrupt() -> None:
        while not any(path.stat().st_size for path in out.rglob("*.tar.*.tmp")):  # a part
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)

    with ThreadPoolExecutor(1) as threads:
        threads.submit(interrupt)
        options: dict[str, Any] = {"num_workers": workers, "max_shard_samples": 400}
        with pytest.raises(KeyboardInterrupt):
            wt.convert_folder(tmp_path / "in", out, check="decode", **options)  # takes its time
    assert not list(out.rglob("*.tar"))
