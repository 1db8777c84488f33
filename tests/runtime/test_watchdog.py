"""Stalls are logged with stage, samples and stacks; reports have the time of each stage."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import wdstrain as wt
from tests.conftest import write_picture_shards, write_shards
from tests.support.servers import Handler, serving
from wdstrain.loader.stats import EpochStats, Finding

STUCK = "s000009"  # key of the sample where a stage stalls


class Listener(logging.Handler):
    """Log handler that collects messages and calls `then` at its first warning."""

    def __init__(self, then: Callable[[str], None]) -> None:
        super().__init__(logging.INFO)
        self.messages: list[str] = []
        self.lines: list[str] = []
        self._then = then

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.levelno >= logging.WARNING and text.startswith("no batch"):
            self.messages.append(text)
            self._then(text)
        elif record.levelno == logging.INFO:
            self.lines.append(text)


@pytest.fixture
def listen() -> Iterator[Callable[..., Listener]]:
    logger, listeners = logging.getLogger("wdstrain"), list[Listener]()
    level = logger.level
    logger.setLevel(logging.INFO)

    def begin(then: Callable[[str], None] = lambda _: None) -> Listener:
        listeners.append(Listener(then))
        logger.addHandler(listeners[-1])
        return listeners[-1]

    yield begin
    logger.setLevel(level)
    for listener in listeners:
        logger.removeHandler(listener)


class WaitsForGate:
    """A transform that waits at one sample until a file exists, in a line of its own."""

    def __init__(self, gate: Path) -> None:
        self.gate = gate

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        if sample["__key__"] == STUCK:
            self.wait_at_the_gate()
        return {"length": len(sample["txt"])}

    def wait_at_the_gate(self) -> None:
        (self.gate.parent / "waits").touch()
        until = time.monotonic() + 60
        while not self.gate.exists() and time.monotonic() < until:
            time.sleep(0.01)


@pytest.mark.parametrize(
    ("workers", "context"),
    [(0, None), (2, "fork"), pytest.param(2, "spawn", marks=pytest.mark.slow), (1, "forkserver")],
)
def test_a_stall_is_logged_with_stage_samples_and_stack(
    shards: Path,
    tmp_path: Path,
    listen: Callable[..., Listener],
    capfd: pytest.CaptureFixture[str],
    workers: int,
    context: Any,
) -> None:
    gate = WaitsForGate(tmp_path / "gate")

    def open_gate(text: str) -> None:
        if not (gate.gate.parent / "waits").exists():  # a worker may still be starting
            return
        for pid in text.partition("kill -USR2 ")[2].partition("\n")[0].split():
            os.kill(int(pid), signal.SIGUSR2)
        gate.gate.touch()

    log = listen(open_gate)
    options: dict[str, Any] = {"num_workers": workers, "multiprocessing_context": context}
    with wt.Loader(shards, transform=gate, batch_size=3, patience=0.3, **options) as loader:
        assert sum(len(b["__key__"]) for b in loader) == 21  # the slow batch is delivered
    message = log.messages[-1]
    assert "Stage decode: the awaited samples are " in message
    assert STUCK in message
    assert re.search(r"the first is in \S+part-00\d\.tar at offset \d+", message)
    if context == "forkserver":  # its workers write where the server of this process writes
        return
    stack = capfd.readouterr().err
    assert "wait_at_the_gate" in stack
    assert "test_watchdog.py" in stack


def lengths(sample: dict[str, Any]) -> dict[str, int]:
    return {"length": len(sample["txt"])}


@pytest.mark.slow
@pytest.mark.parametrize("context", ["spawn", "forkserver"])
@pytest.mark.usefixtures("capfd")  # the stacks go to the descriptor
def test_a_request_for_stacks_does_not_kill_a_worker_that_is_starting(
    shards: Path, context: str
) -> None:
    done = threading.Event()

    def request_stacks() -> None:
        while not done.wait(0.01):
            for worker in multiprocessing.active_children():
                with suppress(ProcessLookupError):
                    os.kill(worker.pid or 0, signal.SIGUSR2)

    asking = threading.Thread(target=request_stacks)
    options: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": context}
    asking.start()
    try:
        with wt.Loader(shards, transform=lengths, batch_size=3, **options) as loader:
            assert sum(len(batch["__key__"]) for batch in loader) == 21
            done.set()
            asking.join()
    finally:
        done.set()


@pytest.mark.slow
def test_a_stopped_worker_does_not_outlive_its_loader(
    shards: Path, listen: Callable[..., Listener]
) -> None:
    taken = shards / "taken"  # the first batch; a worker that is already stopped could not send it

    def transform(sample: dict[str, Any]) -> dict[str, int]:
        if sample["__key__"] == STUCK:
            while not taken.exists():
                time.sleep(0.005)
            os.kill(os.getpid(), signal.SIGSTOP)
        return {"length": len(sample["txt"])}

    options: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "fork"}
    loader = wt.Loader(shards, transform=transform, batch_size=3, shuffle=False, **options)
    next(iter(loader))
    (worker,) = multiprocessing.active_children()
    taken.touch()
    stat, end = Path(f"/proc/{worker.pid}/stat"), time.monotonic() + 30
    while ") T " not in stat.read_text() and time.monotonic() < end:
        time.sleep(0.005)
    loader.close()  # torch waits 5 s and kills the worker; the fixture checks for leftovers


def test_silent_storage_is_logged_with_shard_and_offset(
    tmp_path: Path, listen: Callable[..., Listener], capfd: pytest.CaptureFixture[str]
) -> None:
    write_shards(tmp_path / "far", [7, 13])
    wt.index(tmp_path / "far")
    gate = threading.Event()
    log = listen(lambda _: gate.set())

    def silent(handler: Handler, path: Path, start: int, stop: int) -> bool:
        gate.wait(60)
        return False

    with serving(tmp_path / "far") as served:
        served.faults += [silent]
        with wt.Loader(f"{served.url}/index.json", batch_size=5, patience=0.3) as loader:
            assert sum(len(batch["__key__"]) for batch in loader) == 20
    (message,) = [text for text in log.messages if "Stage read" in text][:1]
    assert ".tar is being read at offset 0" in message
    assert "http.py" in capfd.readouterr().err  # the thread that waits for the server


def test_no_stall_is_logged_while_batches_arrive_or_the_loop_is_busy(
    shards: Path, listen: Callable[..., Listener]
) -> None:
    log, busy = listen(), threading.Event()
    for batch in wt.Loader(shards, batch_size=5, patience=0.05):
        busy.wait(0.2)  # four times the stall limit, in the loop itself
        del batch
    with wt.Loader(shards, batch_size=5, patience=0) as silent:
        next(iter(silent))
        assert "wdstrain-watch" not in [thread.name for thread in threading.enumerate()]
    assert log.messages == []
    with pytest.raises(wt.UsageError, match="patience=-1: must be a number of seconds >= 0"):
        wt.Loader(shards, patience=-1)


# --- time of the stages of an epoch ---


class SlowField:
    """A slow field of the user that sleeps, so that decoders do not compete for a core."""

    names, example = ("txt",), None

    def read(self, name: str, data: memoryview, out: Any, draws: Any) -> str:
        time.sleep(0.004)
        return bytes(data).decode()


class SlowToStack:
    """A slow transform whose output takes long to become a batch."""

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        return {"part": SlowPart({"length": len(sample["txt"])})}


class SlowPart(dict[str, int]):
    def __getitem__(self, name: str) -> int:
        time.sleep(0.004)
        return super().__getitem__(name)


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
            "collate_seconds": seconds(transform=SlowToStack(), num_workers=workers),
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


def passed(batches: Any) -> None:
    for _ in batches:
        pass


def test_an_epoch_is_one_line_of_the_log(shards: Path, listen: Callable[..., Listener]) -> None:
    log = listen()
    with wt.Loader(shards, batch_size=5) as loader:
        for batches in (loader, loader, wt.to_device(loader, "cpu")):
            passed(batches)
        for _batch in loader:
            break  # an interrupted epoch is not logged
    titles = [line.partition(",")[0] for line in log.lines]
    assert titles == [f"epoch {i}: 20 samples" for i in range(3)]
    for line in log.lines:
        assert "\n" not in line
        assert len(line) <= 120
        assert all(word in line for word in ("MB", "samples/s", "waited"))
        assert "bound" in line or "no bottleneck" in line


def test_the_log_line_and_the_report_name_bad_samples(
    tmp_path: Path, listen: Callable[..., Listener]
) -> None:
    write_picture_shards(tmp_path, [20], bad=[3])
    log, options = listen(), {"on_error": "replace", "max_errors": 0.5}
    with wt.Loader(tmp_path, {"image": wt.image(size=8)}, batch_size=5, **options) as loader:
        passed(loader)
    report = loader.report()
    line, bad_line = log.lines
    assert ", 1 bad; " in line
    assert bad_line == "epoch 0: bad samples: 1 x png: no image of a known format"
    assert report["bad_samples"][0]["key"] == "s003"
    assert json.loads(json.dumps(report)) == report


def test_waiting_and_computing_decoders_are_distinguished(tmp_path: Path) -> None:
    write_shards(tmp_path, [40])
    with wt.Loader(tmp_path, {"txt": SlowField()}, batch_size=10) as loader:
        passed(loader)
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
    meter.epoch = meter.retries = 10**6
    meter.samples, meter.batches, meter.bytes = 10**12, 10**10, 10**18
    meter.wait_seconds = meter.decode_seconds = 1e7
    assert len(meter.line) <= 120
    assert len(meter.bad_line) <= 120


def test_a_slow_transfer_is_the_bottleneck() -> None:
    seconds = {"handoff_seconds": 3.0, "parse_seconds": 1.0, "wait_seconds": 5.0}
    meter = EpochStats(samples=100, batches=100, loop_seconds=1.0, **seconds)
    assert meter.verdict.startswith(
        "input bound: hand-off 67%; the loop waited for data 83.3% of the time. Larger batches"
    )
    meter.bad_samples.append(Finding("a.tar", "k", "png", 0, "bad"))
    assert meter.report()["bad_samples"] == [
        {"shard": "a.tar", "key": "k", "field": "png", "offset": 0, "reason": "bad"}
    ]
