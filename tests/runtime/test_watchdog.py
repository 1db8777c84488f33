"""Stalls are logged with stage, samples and stacks; reports have the time of each stage."""

from __future__ import annotations

import gc
import json
import logging
import multiprocessing
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import wdstrain as wt
from tests.conftest import picture, write_shards, write_tar
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
    logger, listeners, level = (
        logging.getLogger("wdstrain"),
        list[Listener](),
        logging.getLogger("wdstrain").level,
    )
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
    loader = wt.Loader(
        shards,
        transform=gate,
        batch_size=3,
        num_workers=workers,
        multiprocessing_context=context,
        patience=0.3,
    )
    assert sum(len(batch["__key__"]) for batch in loader) == 21  # the slow batch is delivered
    loader.close()
    message = log.messages[-1]
    assert "Stage decode: the awaited samples are " in message
    assert STUCK in message
    assert re.search(r"the first is in \S+part-00\d\.tar at offset \d+", message)
    if context == "forkserver":  # its workers write where the server of this process writes
        return
    stack = capfd.readouterr().err
    assert "wait_at_the_gate" in stack
    assert "test_watchdog.py" in stack


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

    loader = wt.Loader(
        shards,
        transform=transform,
        batch_size=3,
        num_workers=1,
        multiprocessing_context="fork",
        shuffle=False,
    )
    next(iter(loader))
    (worker,) = multiprocessing.active_children()
    taken.touch()
    end = time.monotonic() + 30
    while (
        Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T"
        and time.monotonic() < end
    ):
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
        loader = wt.Loader(f"{served.url}/index.json", batch_size=5, patience=0.3)
        assert sum(len(batch["__key__"]) for batch in loader) == 20
        loader.close()
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
    silent = wt.Loader(shards, batch_size=5, patience=0)
    next(iter(silent))
    assert "wdstrain-watch" not in [thread.name for thread in threading.enumerate()]
    silent.close()
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

    def seconds(loader: wt.Loader, pause: float = 0) -> dict[str, float]:
        for batch in loader:
            time.sleep(pause)
            del batch
        loader.close()
        report = loader.report()
        assert (
            report["wait_seconds"] + 0.005
            > report["parse_seconds"] + report["shuffle_seconds"] + report["handoff_seconds"]
        )
        return {
            name: value
            for name, value in report.items()
            if name.endswith("_seconds") and name != "wait_seconds"
        }

    for workers in (0, 1):
        measured = {
            "decode_seconds": seconds(
                wt.Loader(shards, {"txt": SlowField()}, batch_size=5, num_workers=workers)
            ),
            "collate_seconds": seconds(
                wt.Loader(shards, transform=SlowToStack(), batch_size=5, num_workers=workers)
            ),
            "loop_seconds": seconds(wt.Loader(shards, batch_size=5, num_workers=workers), 0.03),
        }
        for stage, took in measured.items():
            assert took[stage] >= 0.08, (workers, stage, took)
            others = {
                "read_seconds",
                "decode_seconds",
                "collate_seconds",
                "copy_seconds",
                "loop_seconds",
            } - {stage}
            assert max(took[name] for name in others) < took[stage] / 2, (workers, stage, took)

    with serving(shards) as served:
        served.delay = 0.1
        took = seconds(wt.Loader(f"{served.url}/index.json", batch_size=5))
    assert min(took["read_seconds"], took["shuffle_seconds"]) >= 0.08
    assert took["decode_seconds"] + took["collate_seconds"] + took["handoff_seconds"] < 0.08


def test_an_epoch_is_one_line_of_the_log(shards: Path, listen: Callable[..., Listener]) -> None:
    log = listen()
    loader = wt.Loader(shards, batch_size=5)
    for _ in range(2):
        for _batch in loader:
            pass
    for _batch in wt.to_device(loader, "cpu"):
        pass
    for _batch in loader:
        break  # an interrupted epoch is not logged
    loader.close()
    assert [line.partition(",")[0] for line in log.lines] == [
        f"epoch {i}: 20 samples" for i in range(3)
    ]
    for line in log.lines:
        assert "\n" not in line
        assert len(line) <= 120
        for word in ("MB", "samples/s", "waited"):
            assert word in line
        assert "bound" in line or "no bottleneck" in line


def test_the_log_line_and_the_report_name_bad_samples(
    tmp_path: Path, listen: Callable[..., Listener]
) -> None:
    bad = {"<b>k03</b>": b"no picture"}
    samples = [(f"k{i:02d}", {"png": picture(i), "cls": b"0"}) for i in range(20)]
    samples[3] = ("<b>k03</b>", {"png": bad["<b>k03</b>"], "cls": b"0"})
    write_tar(tmp_path / "shards" / "a.tar", samples)
    log = listen()
    loader = wt.Loader(
        tmp_path / "shards",
        {"image": wt.image(size=8)},
        batch_size=5,
        on_error="replace",
        max_errors=0.5,
    )
    for _batch in loader:
        pass
    loader.close()
    report = loader.report()
    line, bad_line = log.lines
    assert ", 1 bad; " in line
    assert bad_line == "epoch 0: bad samples: 1 x png: no image of a known format"
    assert report["bad_samples"][0]["key"] == "<b>k03</b>"
    assert json.loads(json.dumps(report)) == report


def test_waiting_and_computing_decoders_are_distinguished(tmp_path: Path) -> None:
    write_shards(tmp_path / "shards", [40])
    loader = wt.Loader(tmp_path / "shards", {"txt": SlowField()}, batch_size=10)
    for _batch in loader:
        pass
    loader.close()
    report = loader.report()
    assert report["compute_seconds"] < 0.4 * report["decode_seconds"]
    assert "Decoding waits: it computes in" in report["verdict"]
    assert "A field or transform that waits for less would help" in report["verdict"]
    assert "cores" not in report["verdict"]


def test_reasons_that_differ_in_quoted_values_are_counted_together() -> None:
    meter = EpochStats()
    meter.add_bad(
        [
            Finding("a.tar", f"k{i}", "cls", i, f"'label {i}' is not a whole number")
            for i in range(500)
        ]
    )
    assert meter.bad_reasons == {"cls: is not a whole number": 500}
    meter.add_bad([Finding("a.tar", f"k{i}", "jpg", i, "x" * (i + 1)) for i in range(500)])
    assert len(meter.bad_reasons) <= 21
    assert sum(meter.bad_reasons.values()) == 1000
    meter.epoch, meter.samples, meter.batches, meter.bytes, meter.retries = (
        10**6,
        10**12,
        10**10,
        10**18,
        10**6,
    )
    meter.wait_seconds = meter.decode_seconds = 1e7
    assert len(meter.line) <= 120
    assert len(meter.bad_line) <= 120


def test_descriptors_are_closed_with_the_loader(shards: Path) -> None:
    def count() -> int:
        for _ in range(3):
            loader = wt.Loader(
                shards,
                batch_size=3,
                num_workers=1,
                transform=Short(),
                multiprocessing_context="fork",
            )
            next(iter(loader))
            loader.close()
            del loader
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    if not os.path.exists("/proc/self/fd"):
        pytest.skip("this system does not list descriptors")
    assert count() == count()


class Short:
    def __call__(self, sample: dict[str, Any]) -> dict[str, int]:
        return {"length": len(sample["txt"])}


def test_a_slow_transfer_is_the_bottleneck() -> None:
    meter = EpochStats(
        samples=100,
        batches=100,
        handoff_seconds=3.0,
        parse_seconds=1.0,
        wait_seconds=5.0,
        loop_seconds=1.0,
    )
    assert meter.verdict.startswith(
        "input bound: hand-off 67%; the loop waited for data 83.3% of the time. Larger batches"
    )
    meter.bad_samples.append(Finding("a.tar", "k", "png", 0, "bad"))
    assert meter.report()["bad_samples"] == [
        {"shard": "a.tar", "key": "k", "field": "png", "offset": 0, "reason": "bad"}
    ]
