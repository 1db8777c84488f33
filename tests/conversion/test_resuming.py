"""Interrupted conversions end soon."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import wdstrain as wt


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
