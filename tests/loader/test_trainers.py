"""Loaders with other trainers: Lightning's Trainer and the example scripts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import wdstrain as wt
from tests.conftest import ROOT, write_class_folder, write_shards


@pytest.mark.filterwarnings("ignore")
def test_lightning_trains_on_a_loader_and_validates_every_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lightning = pytest.importorskip("lightning", reason="Lightning is not installed")
    monkeypatch.chdir(tmp_path)
    folder = write_shards(tmp_path / "shards", [7, 13, 1])
    seen: dict[str, list[list[str]]] = {"train": [], "val": []}

    class Model(lightning.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch: dict[str, Any], step: int) -> torch.Tensor:
            seen["train"].append(batch["__key__"])
            return torch.nn.functional.mse_loss(
                self.layer(batch["label"].float()[:, None]), torch.zeros(len(batch["label"]), 1)
            )

        def validation_step(self, batch: dict[str, Any], step: int) -> None:
            seen["val"].append(batch["__key__"])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-5)

    fields = {"label": wt.label()}
    train = wt.Loader(folder, fields, batch_size=4)
    val = wt.Loader(folder, fields, batch_size=4, shuffle=False, tail="keep")
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(Model(), train, val)
    assert len(seen["train"]) == 2 * len(train) == 10
    assert seen["train"][:5] != seen["train"][5:]
    assert len(seen["val"]) == 2 * len(val) == 12
    assert sorted(key for keys in seen["val"][:6] for key in keys) == [
        f"s{i:06d}" for i in range(21)
    ]
    train.close()
    val.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lightning", "keras"])
def test_the_examples_train_with_other_trainers(tmp_path: Path, name: str) -> None:
    if find_spec(name) is None:  # importing Keras needs the name of its backend
        pytest.skip(f"{name} is not installed: pip install {name}")
    write_class_folder(tmp_path / "photos", {"cat": 40, "dog": 40})
    wt.convert_folder(
        str(tmp_path / "photos"), str(tmp_path / "shards"), split={"train": 0.8, "val": 0.2}
    )
    words = [
        str(ROOT / "scripts" / "examples" / f"{name}_fit.py"),
        *(f"{tmp_path}/shards/{split}-*.tar" for split in ("train", "val")),
    ]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"accuracy \d+\.\d\d%; (\w+ bound|no bottleneck)", done.stdout), done.stdout


@pytest.mark.slow
def test_the_example_for_ray_resumes_with_another_number_of_workers(tmp_path: Path) -> None:
    pytest.importorskip("ray.train", reason="Ray is not installed: pip install 'wdstrain[ray]'")
    write_class_folder(tmp_path / "photos", {"cat": 40, "dog": 40})
    wt.convert_folder(tmp_path / "photos", tmp_path / "shards")
    script, storage = str(ROOT / "scripts" / "examples" / "ray_train.py"), tmp_path / "storage"
    words = [sys.executable, script, f"{tmp_path}/shards/*.tar", "--storage", str(storage)]
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(ROOT)}
    for workers, epochs in ((2, 1), (1, 2)):
        more = ["--workers", str(workers), "--epochs", str(epochs)]
        done = subprocess.run([*words, *more], capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        assert re.search(rf"^epoch {epochs}, step 5: loss", done.stdout, re.MULTILINE), done.stdout
    states = [torch.load(path, weights_only=True) for path in sorted(storage.rglob("state.pt"))]
    assert [state["loader"]["epoch"] for state in states] == [1, 2]  # no epoch was trained twice
