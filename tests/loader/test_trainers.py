"""Loaders with other trainers: Lightning's Trainer and the example scripts."""

from __future__ import annotations

import os
import re
import runpy
import socket
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import wdstrain as wt
from tests.conftest import ROOT, write_class_folder, write_shards

EXAMPLES = ROOT / "scripts" / "examples"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
LABEL = {"label": wt.label()}


def converted(folder: Path, count: int, **options: Any) -> Path:
    """Write a set of `count` pictures, half of them cats."""
    write_class_folder(folder / "photos", {"cat": count // 2, "dog": count // 2})
    wt.convert_folder(folder / "photos", folder / "shards", **options)
    return folder / "shards"


def ran(*words: Any, **options: Any) -> str:
    """Return what a program prints that ends well."""
    line = [sys.executable, *map(str, words)]
    done = subprocess.run(line, capture_output=True, text=True, env=ENVIRONMENT, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lightning", "keras", "transformers"])
def test_the_examples_train_with_other_trainers(tmp_path: Path, name: str) -> None:
    if find_spec(name) is None:  # importing Keras needs the name of its backend
        pytest.skip(f"{name} is not installed: pip install {name}")
    shards = converted(tmp_path, 80, split={"train": 0.8, "val": 0.2})
    sets = [shards / f"{split}-*.tar" for split in ("train", "val")]
    out = ran(EXAMPLES / f"{name}_fit.py", *sets, cwd=tmp_path)
    assert re.search(r"accuracy \d+\.\d\d%; (\w+ bound|no bottleneck)", out), out


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_example_of_hard_samples_lists_them_and_writes_a_table_for_join(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shards = converted(tmp_path, 40, split={"train": 0.8, "val": 0.2})
    table = tmp_path / "t.parquet"
    words = [shards, "--out", table, "--epochs", 3, "--batch-size", 8, "--image-size", 32]
    monkeypatch.setattr(sys, "argv", ["hard_examples.py", *map(str, words)])
    runpy.run_path(str(EXAMPLES / "hard_examples.py"), run_name="__main__")
    out = capsys.readouterr().out
    assert len(re.findall(r"^epoch \d: loss \d", out, re.MULTILINE)) == 3
    listed = re.findall(r"^(\S+): loss (\d+\.\d\d), shown (\d+) times$", out, re.MULTILINE)
    assert len(listed) == 10
    assert [loss for _, loss, _ in listed] == sorted((loss for _, loss, _ in listed), reverse=True)
    assert re.search(r"^32 of 32 samples were shown; \d+ predicted right$", out, re.MULTILINE)
    assert wt.join(shards, table, on="key").matched == 32
    assert len(wt.open(shards).where(f"key == {listed[0][0]!r} and times > 0 and loss > 0")) == 1


@pytest.mark.slow
@pytest.mark.alone  # beside other tests, the processes of Ray may wait for each other for minutes
@pytest.mark.timeout(600)
def test_the_example_for_ray_resumes_with_another_number_of_workers(tmp_path: Path) -> None:
    pytest.importorskip("ray.train", reason="Ray is not installed: pip install 'wdstrain[ray]'")
    shards, storage = converted(tmp_path, 80), tmp_path / "storage"
    words = [EXAMPLES / "ray_train.py", shards / "*.tar", "--storage", storage]
    for workers, epochs in ((2, 1), (1, 2)):
        out = ran(*words, "--workers", workers, "--epochs", epochs)
        assert re.search(rf"^epoch {epochs}, step 5: loss", out, re.MULTILINE), out
    states = [torch.load(path, weights_only=True) for path in sorted(storage.rglob("state.pt"))]
    assert [state["loader"]["epoch"] for state in states] == [1, 2]  # no epoch was trained twice


OFF = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
QUIET: dict[str, Any] = {"accelerator": "cpu", "use_distributed_sampler": False}
QUIET |= dict.fromkeys(OFF, False)


def lightning_fit(
    shards: Path, out: Path, *, resume: Path | None = None, save_at: int = 0, **options: Any
) -> tuple[list[list[str]], torch.Tensor]:
    """Return the keys of each batch and the weights of a run of Lightning's Trainer.

    save_at: step after which the run is saved as `out`; 0: at its end.
    """
    lightning = pytest.importorskip("lightning", reason="Lightning is not installed")

    class Module(lightning.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer, self.seen = torch.nn.Linear(1, 1), list[list[str]]()

        def training_step(self, batch: dict[str, Any], step: int) -> torch.Tensor:
            self.seen.append(batch["__key__"])
            return self.layer(batch["label"].float()[:, None] / 32).mean()

        def validation_step(self, batch: dict[str, Any], step: int) -> None:
            validated.update(batch["__key__"])

        def on_train_batch_end(self, *_: Any) -> None:
            if save_at and self.trainer.global_step == save_at:
                self.trainer.save_checkpoint(out)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    validated, module = Counter[str](), Module()
    with (
        wt.Loader(shards, LABEL, batch_size=4) as train,
        wt.Loader(shards, LABEL, batch_size=4, shuffle=False, tail="keep") as val,
    ):
        trainer = lightning.Trainer(**QUIET, **options)
        trainer.fit(module, train, val, ckpt_path=resume)
        if not save_at:
            trainer.save_checkpoint(out)
    assert set(validated) == {f"s{i:06d}" for i in range(32)}
    return module.seen, module.layer.weight.detach()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("options", "steps", "at"),
    [
        ({}, 8, 16),
        ({"limit_train_batches": 0.5}, 4, 8),
        ({"num_sanity_val_steps": 2, "val_check_interval": 3}, 8, 11),
        ({"limit_train_batches": 5}, 5, 8),
    ],
    ids=str,
)
def test_lightning_resumes_with_the_batches_of_an_undisturbed_run(
    tmp_path: Path, options: dict[str, Any], steps: int, at: int
) -> None:
    """At an epoch or within one. at: updates of the part that is resumed."""
    shards = write_shards(tmp_path / "shards", [20, 12])
    part, is_whole = tmp_path / "part.ckpt", at % steps == 0
    files = {"max_epochs": 3, "save_at": 0 if is_whole else at}
    whole, expected = lightning_fit(shards, part, **files, **options)
    if is_whole:
        lightning_fit(shards, part, max_epochs=at // steps, **options)
    resume = {"resume": part, "max_epochs": 3}
    seen, weights = lightning_fit(shards, tmp_path / "end.ckpt", **resume, **options)
    assert len(whole) == 3 * steps
    assert seen == whole[at:]
    assert torch.equal(weights, expected)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_plain_loop_is_killed_in_mid_epoch_and_ends_with_the_same_weights(
    tmp_path: Path, ranks: int
) -> None:
    words = [str(EXAMPLES / "train_loop.py"), str(converted(tmp_path, 96))]
    words += ["--epochs=2", "--batch-size=8", "--image-size=32", "--checkpoint-every=2", "--out"]
    outs = [tmp_path / "whole", tmp_path / "killed"]

    def started(out: Path) -> list[subprocess.Popen[str]]:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
        line, pipe = [sys.executable, *words, str(out)], subprocess.PIPE
        jobs = [{**ENVIRONMENT, **job, "RANK": str(rank)} for rank in range(ranks)]
        return [
            subprocess.Popen(line, env=env, stdout=pipe, stderr=pipe, text=True) for env in jobs
        ]

    def finish(out: Path) -> str:
        done = [(process, *process.communicate()) for process in started(out)]
        assert [process.returncode for process, _, _ in done] == [0] * ranks, done
        return done[0][1]

    assert "epoch 0, step 2:" in finish(outs[0])
    killed = started(outs[1])
    assert killed[0].stdout is not None
    assert any(line.startswith("epoch 1, step 2:") for line in killed[0].stdout)
    for process in killed:
        process.kill()
        process.communicate()
    assert "epoch 0" not in finish(outs[1])
    first, second = (torch.load(out / "last.pt", weights_only=True) for out in outs)
    assert first["loader"] == second["loader"]
    torch.testing.assert_close(first["model"], second["model"], rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_example_for_keras_reports_the_accuracy_of_the_validation_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if find_spec("keras") is None:
        pytest.skip("keras is not installed: pip install keras")
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    import keras

    keras.utils.set_random_seed(1)
    rng = np.random.default_rng(0)
    for split, count in (("train", 48), ("val", 41)):
        samples = (
            {"png": rng.integers(0, 256, (32, 32, 3), np.uint8), "cls": int(rng.integers(3))}
            for _ in range(count)
        )
        wt.pack(samples, tmp_path / split, classes=["a", "b", "c"])
    options: dict[str, Any] = {"shuffle": False, "tail": "keep", "batch_size": 41}
    with wt.Loader(tmp_path / "val", {"image": wt.image(size=32), **LABEL}, **options) as loader:
        batch = next(loader.epoch(0, until=1))
    images = batch["image"].permute(0, 2, 3, 1).float() / 255
    compared: list[int] = []

    class Score(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_end(self, epoch: int, logs: Any) -> None:
            right = (self.model(images, training=False).argmax(1).cpu() == batch["label"]).float()
            assert logs["val_accuracy"] == pytest.approx(float(right.mean()), abs=1e-4)
            compared.append(epoch)

    fit = keras.Sequential.fit

    def scored_fit(*words: Any, callbacks: Any = (), **named: Any) -> Any:
        return fit(*words, callbacks=[*callbacks, Score()], **named)

    monkeypatch.setattr(keras.Sequential, "fit", scored_fit)
    example = str(EXAMPLES / "keras_fit.py")
    words = [example, f"{tmp_path}/train/*.tar", f"{tmp_path}/val/*.tar", "--epochs", "4"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(example, run_name="__main__")
    assert ended.value.code == 0
    assert compared == [0, 1, 2, 3]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_trainer_of_hugging_face_resumes_in_mid_epoch(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    shards = write_shards(tmp_path / "shards", [40, 24])
    example = runpy.run_path(str(EXAMPLES / "transformers_fit.py"))

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer, self.seen = torch.nn.Linear(1, 1), list[list[int]]()

        def forward(self, label: torch.Tensor, **rest: Any) -> dict[str, torch.Tensor]:
            self.seen.append(label.tolist())
            return {"loss": self.layer(label.float()[:, None]).mean()}

    def fit(resume: Path | None, *, skips: bool = False) -> Model:
        with wt.Loader(shards, LABEL, batch_size=8) as loader:
            if resume is not None:
                loader.load_state_dict(torch.load(resume / "loader.pt"))
            options: dict[str, Any] = {"use_cpu": True, "report_to": [], "disable_tqdm": True}
            options |= {"save_steps": 3, "num_train_epochs": 2, "ignore_data_skip": not skips}
            arguments = transformers.TrainingArguments(str(tmp_path / "out"), **options)
            model = Model()
            trainer = example["LoaderTrainer"](loader, model=model, args=arguments)
            trainer.train(resume_from_checkpoint=resume and str(resume))
        return model

    whole = fit(None)
    assert len(whole.seen) == 16
    for step in (3, 9):
        resumed = fit(tmp_path / "out" / f"checkpoint-{step}")
        assert resumed.seen == whole.seen[step:]
        assert torch.equal(resumed.layer.weight, whole.layer.weight)
    with pytest.raises(AttributeError, match="ignore_data_skip=True"):
        fit(tmp_path / "out" / "checkpoint-3", skips=True)
