"""On a CUDA device, training steps do not synchronize; only the occasional read of sums does."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import wdstrain as wt
from tests.support.small_runs import two_classes
from wdstrain.training.run import Run as TrainingRun

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="there is no CUDA device here"
)

LOOKS = "validation.py"  # reads the sums for the progress about twice per second


class ReportWaits(wt.Callback):
    """Enable torch's warnings of synchronizing operations between the first and last steps."""

    def on_step_end(self, trainer: TrainingRun) -> None:
        if trainer.state.step == 4:
            torch.cuda.set_sync_debug_mode("warn")
        elif trainer.state.step == 20:
            torch.ones(1, device="cuda").item()  # shows that torch does warn
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": "adamw", "amp": "bf16", "clip_norm": 1.0, "ema": 0.9, "accumulate": 2},
        {"optimizer": "sgd", "amp": "fp16", "clip_norm": 1.0},
        {"optimizer": "sgd", "clip_value": 0.1, "channels_last": True},
        {"mixup": 0.2, "cutmix": 1.0, "label_smoothing": 0.1, "class_weights": "balanced"},
    ],
)
def test_steps_do_not_wait_for_the_device(tmp_path: Path, options: dict[str, Any]) -> None:
    two_classes(tmp_path / "shards", 180)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            wt.train(
                tmp_path / "shards",
                tmp_path / "run",
                callbacks=[ReportWaits()],
                **{"epochs": 1, "batch_size": 8, "image_size": 16, "device": "cuda", **options},
            )
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [w for w in caught if "synchronizing CUDA operation" in str(w.message)]
    expected = [w for w in waits if w.filename == __file__]
    assert len(expected) == 1
    others = [w for w in waits if w not in expected and not w.filename.endswith(LOOKS)]
    assert [f"{w.filename}:{w.lineno}" for w in others] == []


def test_a_process_without_a_gpu_of_its_own_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = two_classes(tmp_path / "shards", 12)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "99"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(wt.UsageError, match="local rank 99.*start one process per GPU"):
        wt.train(shards, tmp_path / "run", epochs=1, device="auto")
