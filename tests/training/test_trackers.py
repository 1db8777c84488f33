"""The callback of scripts/examples logs a run to W&B, offline."""

from __future__ import annotations

import runpy
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import wdstrain as wt
from tests.conftest import ROOT

pytestmark = pytest.mark.slow


def run_with(callback: Any, folder: Path) -> Any:
    """Train for two epochs with a callback."""
    rng = np.random.default_rng(0)
    samples = (
        {"__key__": f"{i:02d}", "x.npy": rng.normal(i % 2, 1, 4).astype(np.float32), "cls": i % 2}
        for i in range(40)
    )
    wt.pack(samples, folder / "shards", split={"train": 0.5, "val": 0.5})
    return wt.train(
        folder / "shards",
        folder / "run",
        model=lambda outputs: torch.nn.Linear(4, outputs),
        fields={"image": wt.array("x.npy", shape=(4,), dtype="float32")},
        callbacks=[callback],
        epochs=2,
        batch_size=8,
    )


def example(name: str) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the tracker's own imports
        return runpy.run_path(str(ROOT / "scripts" / "examples" / f"{name}.py"))


@pytest.mark.filterwarnings("ignore")
def test_wandb_gets_options_and_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    callback = example("wandb_callback")["WandbCallback"](project="test", dir=str(tmp_path))
    done = run_with(callback, tmp_path)
    assert callback.run.config["epochs"] == 2
    (log,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    end, texts = time.monotonic() + 60, (b"val/accuracy", done.stop_reason.encode())
    while not all(text in log.read_bytes() for text in texts):  # W&B's process writes it later
        assert time.monotonic() < end, log.read_bytes()
        time.sleep(0.05)
