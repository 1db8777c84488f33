"""A run that is killed at any moment resumes and ends in the same weights, bit for bit."""

from __future__ import annotations

import errno
import io
import json
import os
import random
import re
import signal
import threading
import zipfile
from collections.abc import Callable, Iterator
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

import wdstrain as wt
from tests.conftest import flags, picture
from tests.support.children import ended
from tests.support.os_faults import watched_calls
from tests.support.outcomes import result_or_refusal
from tests.support.servers import fine, serving, small_and_quick, status
from tests.support.small_runs import SMALL, Linear, Lines, last, two_classes
from wdstrain.cli import main
from wdstrain.errors import StorageError, UsageError, WdstrainError
from wdstrain.training.checkpoint import read_checkpoint, read_last
from wdstrain.training.distributed import Stopped
from wdstrain.training.train import train

# Every part with a state of its own: dropout, momentum, an average, mixed images, accumulated
# gradients, batch norms.
OPTIONS: dict[str, Any] = {"model": "tests.training.test_resuming:dropping", "epochs": 2}
OPTIONS |= {"batch_size": 8, "accumulate": 2, "image_size": 16, "checkpoint_every": 2}
OPTIONS |= {"augment": "rrc+flip+trivialaugment", "mixup": 0.2, "deterministic": True}
OPTIONS |= {"optimizer": "sgd", "lr": 0.05, "schedule": "cosine", "warmup": 0.5, "clip_norm": 1.0}
OPTIONS |= {"ema": 0.9}
TIMED = ("seconds", "samples_per_second", "stall", "verdict")
# a function is called only if the command line names it
RESUME = ("--resume", "--model", str(OPTIONS["model"]))


def dropping(outputs: int) -> nn.Module:
    """A small model with batch norm and dropout."""
    first = (nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU())
    return nn.Sequential(*first, nn.Flatten(), nn.Dropout(0.3), nn.Linear(8 * 7 * 7, outputs))


@pytest.fixture(scope="module")
def pets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of 73 images for training and 23 for validation."""
    out = tmp_path_factory.mktemp("pets") / "shards"
    return two_classes(out, 96, split={"train": 0.8, "val": 0.2})


@pytest.fixture(scope="module")
def undisturbed(pets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run without interruption."""
    out = tmp_path_factory.mktemp("runs") / "undisturbed"
    train(str(pets), out, **OPTIONS)
    return out


def same(out: Path, undisturbed: Path) -> None:
    """Check that weights, averages, optimizer, metrics and lines are equal, except seconds."""
    actual, expected = (read_checkpoint(str(last(folder))) for folder in (out, undisturbed))
    for name in ("model", "raw", "optimizer"):
        torch.testing.assert_close(actual[name], expected[name], rtol=0, atol=0)
    histories = (
        [{n: line[n] for n in line if not n.endswith(TIMED)} for line in state["state"]["history"]]
        for state in (actual, expected)
    )
    assert next(histories) == next(histories)
    metrics, steps = (
        [json.loads(line) for line in (out / name).read_text().splitlines()]
        for name in ("metrics.jsonl", "steps.jsonl")
    )
    assert metrics == actual["state"]["history"]
    places = [(line["epoch"], line["step"]) for line in steps]
    assert places == sorted(set(places))
    assert not [name for name in os.listdir(out / "checkpoints") if name.endswith(".tmp")]


def position(out: Path) -> dict[str, int]:
    """Return the position where a run would resume."""
    state, refused = read_last(str(out / "checkpoints"))
    assert state is not None
    assert not refused
    return {name: state["state"][name] for name in ("epoch", "step")}


# Sends a signal to itself, and to its worker processes, when its second checkpoint is complete but
# has not its name yet.
SIGNALED = """
import os, signal, sys
import torch
from wdstrain.cli import main

save, paths = torch.save, []

def saved(state, path):
    save(state, path)
    paths.append(path)
    if len(paths) == 2:
        os.killpg(0, signal.Signals[sys.argv[1]])

os.setsid()
torch.save = saved
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize(
    ("name", "workers"),
    [("SIGKILL", 0), ("SIGTERM", 0), ("SIGTERM", 1)],
)
def test_a_killed_or_terminated_run_resumes_to_the_same_bits(
    pets: Path, undisturbed: Path, tmp_path: Path, name: str, workers: int
) -> None:
    """Worker processes live until the last checkpoint is written."""
    out = tmp_path / "run"
    words = ["train", str(pets), "--out", str(out), *flags(OPTIONS), "--num-workers", str(workers)]
    done = ended(SIGNALED, name, *words)
    if name == "SIGKILL":
        assert done.status == -signal.SIGKILL, done.err
        assert [path for path in os.listdir(out / "checkpoints") if path.endswith(".tmp")]
        assert position(out) == {"epoch": 0, "step": 2}
    else:
        assert done.status == 128 + signal.SIGTERM, done.err
        assert "stopped by SIGTERM; a checkpoint is written. Run it again with --resume" in done.err
    assert main(["train", *RESUME, "--out", str(out)]) == 0  # its options are in its folder
    same(out, undisturbed)


class At(Lines):
    """Progress display that calls a function at one point of a run."""

    def __init__(self, title: str, done: int, act: Callable[[], Any]) -> None:
        super().__init__()
        self.at, self.act = (title, done), act

    def step(self, *values: Any) -> None:
        if values[:2] == self.at:
            self.at = ("", 0)
            self.act()


def test_a_finished_run_is_trained_again_only_for_more_epochs(pets: Path, tmp_path: Path) -> None:
    out, options = tmp_path / "run", {**OPTIONS, "epochs": 1}
    train(str(pets), out, **options)
    before = last(out).read_bytes()
    assert len(train(str(pets), out, resume=True, **options).epochs) == 1
    assert last(out).read_bytes() == before
    more = train(str(pets), out, resume=True, **OPTIONS)
    assert [line["epoch"] for line in more.epochs] == [0, 1]


def test_other_options_data_and_models_are_not_resumed(
    pets: Path, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = two_classes(tmp_path / "shards", 96, split={"train": 0.8, "val": 0.2}, seed=1)
    files = [path for path in undisturbed.rglob("*") if path.name != ".lock"]
    before = [path.stat().st_mtime_ns for path in files]
    val = f"{pets}/val-*.tar"
    for urls, changed, words in (
        (pets, {"model": "small"}, "was 'tests.training.test_resuming:dropping', is 'small'"),
        (pets, {"lr": 0.1, "seed": 3}, "seed was 0, is 3"),
        (other, {}, "the validation data differ"),
        (f"{other}/train-*.tar", {"val": val}, "another order: data was"),
    ):
        with pytest.raises(UsageError, match=words):
            train(urls, undisturbed, resume=True, **{**OPTIONS, **changed})
    make = lambda outputs: nn.Sequential(nn.Flatten(), nn.Linear(768, outputs))  # noqa: E731
    monkeypatch.setattr("tests.training.test_resuming.dropping", make)
    with pytest.raises(UsageError, match="the checkpoint is of another model: .*Unexpected key"):
        train(str(pets), undisturbed, resume=True, **OPTIONS)
    assert [path.stat().st_mtime_ns for path in files] == before


def test_a_damaged_checkpoint_is_skipped_for_the_previous_one(
    pets: Path, undisturbed: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    display = At("training", 15, lambda: os.kill(os.getpid(), signal.SIGUSR1))
    with pytest.raises(Stopped) as raised:
        train(str(pets), out, progress=display, **OPTIONS)
    assert raised.value.status == 128 + signal.SIGUSR1
    for name in ("last.pt", sorted(os.listdir(out / "checkpoints"))[-1]):
        (out / "checkpoints" / name).unlink()
        (out / "checkpoints" / name).write_bytes(b"PK nothing")
    seen = Lines()
    train(str(pets), out, resume=True, progress=seen, **OPTIONS)
    assert [line for line in seen.lines if "is no checkpoint of a run" in line]
    same(out, undisturbed)


def test_a_failed_checkpoint_is_a_warning_and_the_last_an_error(pets: Path, tmp_path: Path) -> None:
    def failing(fails: Iterator[bool]) -> Callable[[], None]:
        def replaced() -> None:
            if next(fails, False):
                raise OSError(errno.ENOSPC, "No space left on device")

        return replaced

    seen, options = Lines(), {**OPTIONS, "epochs": 1}
    with watched_calls("replace", r"step-\d+\.pt", failing(iter([True, False, True, False]))):
        train(str(pets), tmp_path / "run", progress=seen, **options)
    warning = "cannot be written: No space left on device. Earlier checkpoints are intact."
    assert sum(warning in line for line in seen.lines) == 2
    with (
        watched_calls("replace", r"\.pt", failing(repeat(True))),
        pytest.raises(StorageError, match="No space left on device"),
    ):
        train(str(pets), tmp_path / "full", **options)


def test_two_processes_do_not_train_into_one_folder(pets: Path, tmp_path: Path) -> None:
    def second() -> None:
        with pytest.raises(UsageError, match="another process is training into"):
            train(str(pets), tmp_path / "run", resume=True, **OPTIONS)

    display = At("training", 4, second)
    done = train(str(pets), tmp_path / "run", progress=display, **{**OPTIONS, "epochs": 1})
    assert len(done.epochs) == 1


def test_checkpoints_are_written_at_intervals_and_only_the_last_and_the_best_are_kept(
    pets: Path, undisturbed: Path, tmp_path: Path
) -> None:
    options = {**OPTIONS, "checkpoint_every": 0, "checkpoint_minutes": 1e-9}
    ends = (2, 4, 6, 8, 9, 11, 13, 15, 17, 18)  # of steps of the optimizer
    steps = [f"step-{step:08d}.pt" for step in ends]
    for keep, kept in ((100, steps), (3, steps[-3:])):
        out = tmp_path / str(keep)
        train(str(pets), out, keep=keep, **options)
        assert sorted(os.listdir(out / "checkpoints")) == ["best.pt", "last.pt", *kept]
        same(out, undisturbed)


def test_checkpoints_of_another_format_are_refused_and_never_unpickled(
    undisturbed: Path, tmp_path: Path
) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "ran"),)

    state = read_checkpoint(str(last(undisturbed)))
    for value, words in (
        ({**state, "format": 0}, "has the checkpoint format 0: must be 3"),
        ({"model": {}, "config": {}, "task": Evil()}, "is no checkpoint of a run"),
    ):
        torch.save(value, tmp_path / "c.pt")
        with pytest.raises(UsageError, match=words):
            read_checkpoint(str(tmp_path / "c.pt"))
    assert not (tmp_path / "ran").exists()
    with pytest.raises(UsageError, match="Give one of them"):
        train("nowhere", tmp_path / "run", resume=True, overwrite=True)


def test_a_folder_with_unknown_files_is_neither_overwritten_nor_resumed(
    pets: Path, tmp_path: Path
) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "mine.txt").write_text("mine")
    for how in ({}, {"overwrite": True}, {"resume": True}):
        with pytest.raises(UsageError, match="holds files that are not of a run"):
            train(str(pets), tmp_path, **how, **OPTIONS)
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == [
        "checkpoints",
        "checkpoints/mine.txt",
    ]


def test_a_nan_loss_ends_the_run_without_a_checkpoint(pets: Path, tmp_path: Path) -> None:
    plain = {"clip_norm": 0.0, "schedule": "constant", "warmup": 0.0, "checkpoint_every": 0}
    with pytest.raises(
        WdstrainError, match="the loss is not finite at step .* of epoch 1/2. Lower lr="
    ):
        train(str(pets), tmp_path / "run", **{**OPTIONS, **plain, "lr": 1e30})
    names = os.listdir(tmp_path / "run" / "checkpoints")
    assert not [name for name in names if name.endswith(".pt")]


def test_a_run_that_loses_its_server_writes_a_checkpoint_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    bits, out = random.Random(0), tmp_path / "run"
    rows = (
        {"__key__": f"{n:03d}", "png": picture(n), "cls": n % 3, "pad": bits.randbytes(20_000)}
        for n in range(72)
    )
    wt.pack(rows, tmp_path / "shards", max_shard_samples=24)
    options = {**OPTIONS, "shuffle_buffer": 8, "checkpoint_every": 0, "accumulate": 1}
    train(str(tmp_path / "shards"), tmp_path / "undisturbed", **options)
    small_and_quick(monkeypatch, 16 << 10)
    monkeypatch.setenv("WDSTRAIN_NETWORK_TIMEOUT", "0.5")
    with serving(tmp_path / "shards") as server:
        server.faults += [*[fine()] * 43, *[status(503)] * 100_000]  # of about 75 in an epoch
        words = ["train", f"{server.url}/index.json", "--out", str(out), *flags(options)]
        assert main(words) == 1
        at, stderr = position(out), capsys.readouterr().err
        assert at["step"] > 0
        place = f"epoch {at['epoch'] + 1}/2, step {at['step']}"
        assert f"A checkpoint of {place}, was written. Resume continues from it." in stderr
        assert re.search("did not arrive in .* status 503", stderr)
        server.faults.clear()
        monkeypatch.setenv("WDSTRAIN_NETWORK_TIMEOUT", "60")
        assert main([*words, *RESUME]) == 0
    assert f"resuming at epoch {at['epoch'] + 1}, step {at['step']}" in capsys.readouterr().err
    same(out, tmp_path / "undisturbed")


def test_a_signal_ends_a_run_that_waits_for_a_silent_server(tmp_path: Path) -> None:
    rows = ({"__key__": f"{n}", "png": picture(n), "cls": n % 3} for n in range(24))
    wt.pack(rows, tmp_path / "shards")
    out, is_sent, is_saved = tmp_path / "run", threading.Lock(), threading.Event()

    class Display(Lines):
        def line(self, text: str) -> None:
            if "checkpoint" in text:
                is_saved.set()

    def silent(handler: object, path: Path, start: int, stop: int) -> bool:
        if path.suffix == ".tar":  # the first batch is requested
            if is_sent.acquire(blocking=False):  # once: a later one would end this process
                os.kill(os.getpid(), signal.SIGTERM)
            is_saved.wait(60)
        return False

    options = {**OPTIONS, "progress": Display()}
    with serving(tmp_path / "shards") as server:
        server.faults += [silent] * 100
        with pytest.raises(Stopped, match="SIGTERM"):
            train(f"{server.url}/index.json", out, **options)
    assert position(out) == {"epoch": 0, "step": 0}


# --- files of a run ---


def test_rate_and_patience_may_change_when_a_run_is_resumed(pets: Path, tmp_path: Path) -> None:
    options = {**SMALL, "model": Linear}
    first = wt.train(pets, tmp_path / "run", **{**options, "lr": 1e-9, "patience": 1, "epochs": 9})
    assert len(first.epochs) < 9
    assert "did not improve" in first.stop_reason
    again = {**options, "lr": 0.01, "patience": 0, "epochs": 5, "resume": True}
    resumed = wt.train(pets, tmp_path / "run", **again)
    assert resumed.stop_reason == "all 5 epochs are done"
    count = len(first.epochs)
    assert [line["lr"] for line in resumed.epochs] == [1e-9] * count + [0.01] * (5 - count)


def flip_bits(path: Path, member: str) -> None:
    """Change ten bytes of the largest member of a checkpoint whose name has this part."""
    with zipfile.ZipFile(path) as file:
        members = [entry for entry in file.infolist() if member in entry.filename]
        entry = max(members, key=lambda one: one.file_size)
    data = bytearray(path.read_bytes())
    lengths = data[entry.header_offset + 26 : entry.header_offset + 30]
    begin = entry.header_offset + 30 + sum(np.frombuffer(lengths, "<u2").tolist())
    for place in range(begin + 3, begin + 43, 4):  # the highest bytes of float32
        data[place] ^= 2
    path.write_bytes(data)


@pytest.mark.parametrize("verb", ["evaluate", "predict", "export", "resume", "weights"])
def test_a_checkpoint_with_changed_bytes_is_refused_by_name(
    pets: Path, tmp_path: Path, verb: str
) -> None:
    out, lines, val = tmp_path / "run", Lines(), f"{pets}/val-*.tar"
    path, again = last(out), {**SMALL, "model": Linear, "epochs": 2, "progress": lines}
    calls: dict[str, Callable[[], Any]] = {
        "evaluate": lambda: wt.evaluate(path, val, model=Linear),
        "predict": lambda: wt.predict(path, val, tmp_path / "p.csv", model=Linear),
        "export": lambda: wt.export(path, tmp_path / "m.pt", model=Linear),
        "resume": lambda: wt.train(pets, out, resume=True, **again),
        "weights": lambda: wt.train(pets, tmp_path / "new", weights=str(path), **again),
    }
    for member in ("/data/", "data.pkl"):  # weights and names
        wt.train(pets, out, model=Linear, overwrite=True, **SMALL)
        for name in {name.resolve() for name in path.parent.iterdir()}:
            flip_bits(name, member)
        refusal = result_or_refusal(calls[verb])
        said = (refusal if isinstance(refusal, str) else "") + lines.text  # which may start anew
        assert re.search(r"(step-\d+|last)\.pt", said)


class Switch(wt.Callback):
    """Callback that makes a fault begin at the end of an epoch, and end an epoch later."""

    def __init__(self, begin: Callable[[], object], end: Callable[[], object]) -> None:
        self._acts = {0: begin, 1: end}

    def on_epoch_end(self, trainer: Any, metrics: dict[str, Any]) -> None:
        self._acts.get(metrics["epoch"], lambda: None)()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_events_and_the_report_go_on_after_a_full_disk(
    pets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file of events cannot be opened, and the report not written, in the second epoch."""
    out, is_full, original = tmp_path / "run", list[bool](), io.open
    report, lines = out / "report.html", Lines()

    def opened(path: Any, *arguments: Any, **options: Any) -> Any:
        if is_full and "tfevents" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(path, *arguments, **options)

    def begin() -> None:
        is_full.append(True)
        report.unlink()
        report.mkdir()

    def end() -> None:
        is_full.clear()
        report.rmdir()

    options = {**SMALL, "model": Linear, "epochs": 5, "progress": lines}
    monkeypatch.setattr(io, "open", opened)
    wt.train(pets, out, callbacks=[Switch(begin, end)], **options)
    assert "No space left" in lines.text
    assert re.search(r"report.html cannot be written: Is a directory\..* Training goes", lines.text)
    steps = set[int]()
    for path in (out / "tensorboard").iterdir():  # a directory is read in the order of its names
        events = EventAccumulator(str(path)).Reload()
        if "val/accuracy" in events.Tags()["scalars"]:
            steps |= {event.step for event in events.Scalars("val/accuracy")}
    assert max(steps) == 5 * 9
    assert report.is_file()
