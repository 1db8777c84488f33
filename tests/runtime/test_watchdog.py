"""Stalls are logged with stage, samples and stacks; reports have the time of each stage."""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import wdstrain as wt
from tests.conftest import write_picture_shards, write_shards
from tests.support.servers import Handler, serving
from wdstrain.loader.stats import EpochStats, Finding

STUCK = "s000009"  # key of the sample where a stage stalls


class Listener(logging.Handler):
    """Log handler that collects messages and calls `then` at each stall."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.stalls, self.lines = list[str](), list[str]()
        self.then: Callable[[str], object] = len

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.levelno >= logging.WARNING and text.startswith("no batch"):
            self.stalls.append(text)
            self.then(text)
        elif record.levelno == logging.INFO:
            self.lines.append(text)


@pytest.fixture
def log() -> Iterator[Listener]:
    logger, listener = logging.getLogger("wdstrain"), Listener()
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(listener)
    yield listener
    logger.setLevel(level)
    logger.removeHandler(listener)


def wait_at_the_gate(folder: Path, sample: dict[str, Any]) -> dict[str, Any]:
    """A transform that waits at one sample until a file exists."""
    if sample["__key__"] == STUCK:
        (folder / "waits").touch()
        until = time.monotonic() + 60
        while not (folder / "gate").exists() and time.monotonic() < until:
            time.sleep(0.01)
    return {"length": len(sample["txt"])}


@pytest.mark.parametrize(
    ("workers", "context"),
    [(0, None), (2, "fork"), pytest.param(2, "spawn", marks=pytest.mark.slow), (1, "forkserver")],
)
def test_a_stall_is_logged_with_stage_samples_and_stack(
    shards: Path,
    tmp_path: Path,
    log: Listener,
    capfd: pytest.CaptureFixture[str],
    workers: int,
    context: Any,
) -> None:
    def open_gate(text: str) -> None:
        if (tmp_path / "waits").exists():  # otherwise a worker may still be starting
            for pid in text.partition("kill -USR2 ")[2].partition("\n")[0].split():
                os.kill(int(pid), signal.SIGUSR2)
            (tmp_path / "gate").touch()

    log.then, gate = open_gate, partial(wait_at_the_gate, tmp_path)
    options: dict[str, Any] = {"num_workers": workers, "multiprocessing_context": context}
    with wt.Loader(shards, transform=gate, batch_size=3, patience=0.3, **options) as loader:
        assert sum(len(b["__key__"]) for b in loader) == 21  # the slow batch is delivered
    message = log.stalls[-1]
    assert "Stage decode: the awaited samples are " in message
    assert STUCK in message
    assert re.search(r"the first is in \S+part-00\d\.tar at offset \d+", message)
    if context == "forkserver":  # its workers write where the server of this process writes
        return
    stack = capfd.readouterr().err
    assert "wait_at_the_gate" in stack


def test_silent_storage_is_logged_with_shard_and_offset(
    tmp_path: Path, log: Listener, capfd: pytest.CaptureFixture[str]
) -> None:
    wt.index(write_shards(tmp_path / "far", [7, 13]))
    gate = threading.Event()
    log.then = lambda _: gate.set()

    def silent(handler: Handler, path: Path, start: int, stop: int) -> bool:
        gate.wait(60)
        return False

    with (
        serving(tmp_path / "far", faults=[silent]) as served,
        wt.Loader(f"{served.url}/index.json", batch_size=5, patience=0.3) as loader,
    ):
        assert sum(len(batch["__key__"]) for batch in loader) == 20
    (message,) = [text for text in log.stalls if "Stage read" in text][:1]
    assert ".tar is being read at offset 0" in message
    assert "http.py" in capfd.readouterr().err  # the thread that waits for the server


def test_no_stall_is_logged_while_batches_arrive_or_the_loop_is_busy(
    shards: Path, log: Listener
) -> None:
    busy = threading.Event()
    for batch in wt.Loader(shards, batch_size=5, patience=0.05):
        busy.wait(0.2)  # four times the stall limit, in the loop itself
        del batch
    with wt.Loader(shards, batch_size=5, patience=0) as silent:
        next(iter(silent))
        assert "wdstrain-watch" not in [thread.name for thread in threading.enumerate()]
    assert log.stalls == []


class SlowField:
    """A slow field of the user that sleeps, so that decoders do not compete for a core."""

    names, example = ("txt",), None

    def read(self, name: str, data: memoryview, out: Any, draws: Any) -> str:
        time.sleep(0.004)
        return bytes(data).decode()


class SlowPart(dict[str, int]):
    """A value of an example that takes long to become a batch."""

    def __getitem__(self, name: str) -> int:
        time.sleep(0.004)
        return super().__getitem__(name)


def slow_to_stack(sample: dict[str, Any]) -> dict[str, Any]:
    return {"part": SlowPart({"length": len(sample["txt"])})}


@pytest.mark.alone
def test_seconds_are_counted_for_the_stage_that_took_them(tmp_path: Path) -> None:
    """20 samples at 4 ms each are 80 ms of the stage, and the other stages are far below."""
    shards = write_shards(tmp_path / "shards", [20])
    wt.index(shards)

    def seconds(pause: float = 0, urls: Any = shards, **options: Any) -> dict[str, float]:
        with wt.Loader(urls, batch_size=5, **options) as loader:
            for batch in loader:
                time.sleep(pause)
                del batch
        took = {n: v for n, v in loader.report().items() if n.endswith("_seconds")}
        parts = ("parse_seconds", "shuffle_seconds", "handoff_seconds")
        assert took.pop("wait_seconds") + 0.005 > sum(took[name] for name in parts)
        return took

    stages = {f"{name}_seconds" for name in ("read", "decode", "collate", "copy", "loop")}
    for workers in (0, 1):
        measured = {
            "decode_seconds": seconds(fields={"txt": SlowField()}, num_workers=workers),
            "collate_seconds": seconds(transform=slow_to_stack, num_workers=workers),
            "loop_seconds": seconds(0.03, num_workers=workers),
        }
        for stage, took in measured.items():
            assert took[stage] >= 0.08, (workers, stage, took)
            others = max(took[name] for name in stages - {stage})
            assert others < took[stage] / 2, (workers, stage, took)

    with serving(shards) as served:
        served.delay = 0.1
        took = seconds(urls=f"{served.url}/index.json")
    assert min(took["read_seconds"], took["shuffle_seconds"]) >= 0.08
    assert took["decode_seconds"] + took["collate_seconds"] + took["handoff_seconds"] < 0.08


def test_an_epoch_is_one_line_of_the_log(shards: Path, log: Listener) -> None:
    with wt.Loader(shards, batch_size=5) as loader:
        for batches in (loader, loader, wt.to_device(loader, "cpu")):
            list(batches)
        next(iter(loader))  # an interrupted epoch is not logged
    titles = [line.partition(",")[0] for line in log.lines]
    assert titles == [f"epoch {i}: 20 samples" for i in range(3)]
    for line in log.lines:
        assert "\n" not in line
        assert len(line) <= 120
        assert all(word in line for word in ("MB", "samples/s", "waited"))
        assert "bound" in line or "no bottleneck" in line


def test_the_log_line_and_the_report_name_bad_samples(tmp_path: Path, log: Listener) -> None:
    write_picture_shards(tmp_path, [20], bad=[3])
    options: dict[str, Any] = {"on_error": "replace", "max_errors": 0.5}
    with wt.Loader(tmp_path, {"image": wt.image(size=8)}, batch_size=5, **options) as loader:
        list(loader)
    report = loader.report()
    line, bad_line = log.lines
    assert ", 1 bad; " in line
    assert bad_line == "epoch 0: bad samples: 1 x png: no image of a known format"
    assert report["bad_samples"][0]["key"] == "s003"


def test_waiting_and_computing_decoders_are_distinguished(tmp_path: Path) -> None:
    write_shards(tmp_path, [40])
    with wt.Loader(tmp_path, {"txt": SlowField()}, batch_size=10) as loader:
        list(loader)
    report = loader.report()
    assert report["compute_seconds"] < 0.4 * report["decode_seconds"]
    assert "Decoding waits: it computes in" in report["verdict"]
    assert "A field or transform that waits for less would help" in report["verdict"]
    assert "cores" not in report["verdict"]


def test_reasons_that_differ_in_quoted_values_are_counted_together() -> None:
    meter = EpochStats()
    quoted = (f"'label {i}' is not a whole number" for i in range(500))
    meter.add_bad([Finding("a.tar", f"k{i}", "cls", i, text) for i, text in enumerate(quoted)])
    assert meter.bad_reasons == {"cls: is not a whole number": 500}
    meter.add_bad([Finding("a.tar", f"k{i}", "jpg", i, "x" * (i + 1)) for i in range(500)])
    assert len(meter.bad_reasons) <= 21
    assert sum(meter.bad_reasons.values()) == 1000
    assert len(meter.bad_line) <= 120
