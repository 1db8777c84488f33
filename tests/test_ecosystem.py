"""A loader is used where people use a DataLoader: Lightning's Trainer, accelerate's scripts."""

from __future__ import annotations

import multiprocessing
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
def test_lightning_trains_on_a_loader_and_validates_every_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert sorted(key for keys in seen["val"][:6] for key in keys) == [f"s{i:06d}" for i in range(21)]
    train.close()
    val.close()


NOTEBOOK = [
    "import wdstrain as wt, time, multiprocessing",
    "loader = wt.Loader(FOLDER, transform=lambda sample: {'n': int(sample['cls'])}, batch_size=2, num_workers=WORKERS)",
    "print('begun', flush=True)\nwhile True:\n    for batch in loader:\n        time.sleep(0.01)",
    "print(sum(len(batch['n']) for batch in loader.epoch(0)))",
    "loader.close(); print(len(multiprocessing.active_children()))",
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_cell_can_be_interrupted_and_run_again(
    shards: Path, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a real kernel, with a lambda from a cell: an endless loop is interrupted twice, then the loader works on."""
    jupyter_client = pytest.importorskip("jupyter_client", reason="jupyter-client is not installed")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed")
    if workers and multiprocessing.get_start_method() != "fork":
        pytest.skip("a lambda travels to worker processes only by fork")
    for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path / name))  # nothing in the home folder
    manager = jupyter_client.KernelManager(kernel_name="python3")
    manager.start_kernel(extra_arguments=["--quiet"])
    client = manager.client()
    try:
        client.start_channels()
        client.wait_for_ready(timeout=60)

        def run(code: str, *, interrupt: bool = False) -> str:
            code = code.replace("FOLDER", repr(str(shards))).replace("WORKERS", str(workers))
            printed = []

            def hook(message: dict[str, Any]) -> None:
                if message["msg_type"] == "stream":
                    printed.append(message["content"]["text"])
                    if interrupt and "begun" in message["content"]["text"]:
                        manager.interrupt_kernel()

            reply = client.execute_interactive(code, output_hook=hook, timeout=60, store_history=False)
            assert reply["content"]["status"] == ("error" if interrupt else "ok"), reply["content"]
            assert not interrupt or reply["content"]["ename"] == "KeyboardInterrupt"
            return "".join(printed)

        run(NOTEBOOK[0])
        run(NOTEBOOK[1])
        for _ in range(2):
            run(NOTEBOOK[2], interrupt=True)
        assert run(NOTEBOOK[3]) == "20\n"
        assert run(NOTEBOOK[4]) == "0\n"
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lightning", "keras"])
def test_the_examples_train_with_other_trainers(tmp_path: Path, name: str) -> None:
    if find_spec(name) is None:  # Keras itself is only imported with its backend named
        pytest.skip(f"{name} is not installed: pip install {name}")
    write_class_folder(tmp_path / "photos", {"cat": 40, "dog": 40})
    wt.pack_folder(str(tmp_path / "photos"), str(tmp_path / "shards"), split={"train": 0.8, "val": 0.2})
    words = [str(ROOT / "scripts" / f"example_{name}.py"), *(f"{tmp_path}/shards/{split}-*.tar" for split in ("train", "val"))]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"accuracy \d+\.\d\d%; \w+ bound", done.stdout), done.stdout
