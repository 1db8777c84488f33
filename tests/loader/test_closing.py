"""Closing a loader at any moment, from any thread: no thread waits forever."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import wdstrain as wt
from tests.conftest import write_shards
from tests.support.servers import Handler, serving, stall
from wdstrain.decode import workers
from wdstrain.errors import WdstrainError
from wdstrain.reader import run as reader_run
from wdstrain.reader.run import Reader

RANGE = 64 << 10  # bytes: about 32 samples


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the range requests small, so that a request covers few samples."""
    monkeypatch.setenv("WDSTRAIN_RANGE_SIZE", str(RANGE))


def checked(batch: dict[str, Any]) -> int:
    """Return the number of samples of a batch after a check that each one matches its key."""
    assert [int(bytes(data)) for data in batch["cls"]] == [int(key[1:]) for key in batch["__key__"]]
    return len(batch["__key__"])


def drained(batches: Iterable[dict[str, Any]]) -> int:
    return sum(map(checked, batches))


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("wdstrain-")]


def fetching() -> int:
    return sum(name.startswith("wdstrain-fetch-") for name in threads())


@contextmanager
def switching_often() -> Iterator[None]:
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(usual)


@pytest.mark.parametrize(
    ("where", "workers", "closers"),
    [("disk", 0, 1), ("disk", 0, 3), ("disk", 2, 1), ("server", 0, 1)],
)
def test_other_threads_may_close_a_loader_at_any_moment(
    tmp_path: Path, where: str, workers: int, closers: int
) -> None:
    """A pass delivers all batches or ends in an error with the reason; no thread remains."""
    write_shards(tmp_path, [50] * 4)
    wt.index(tmp_path)
    done, ends, wrong = threading.Event(), list[str](), list[Exception]()
    before = threads()
    with serving(tmp_path) as server, switching_often():
        loader = wt.Loader(
            server.url if where == "server" else tmp_path,
            batch_size=4,
            shuffle_buffer=10,
            num_workers=workers,
        )

        def close() -> None:
            while not done.wait(0.003):
                try:
                    loader.close()
                except Exception as error:
                    wrong.append(error)

        closing = [threading.Thread(target=close) for _ in range(closers)]
        for closer in closing:
            closer.start()
        for epoch in range(150):
            count = 0
            try:
                for batch in loader.epoch(epoch):
                    count += checked(batch)
            except WdstrainError as error:
                ends.append(str(error))
            else:
                assert count == 200
        done.set()
        for closer in closing:
            closer.join()
        loader.close()
    assert threads() == before
    assert not wrong
    assert ends
    assert all("closed" in end or "stopped" in end for end in ends)


def test_passes_in_several_threads_do_not_share_batches(tmp_path: Path) -> None:
    """Each pass delivers its batches until the next one replaces it; the last delivers all."""
    write_shards(tmp_path, [40, 20])
    loader = wt.Loader(tmp_path, transform=lambda sample: {"cls": int(sample["cls"])}, batch_size=1)
    expected = [[batch["__key__"] for batch in loader.epoch(number)] for number in range(2)]
    passes: list[tuple[int, int, list[list[str]], str]] = []

    def run(number: int) -> None:
        for start in (0, 7, 0, 3, 0, 30):
            keys: list[list[str]] = []
            end = ""
            try:
                for batch in loader.epoch(number, start=start):
                    keys.append(batch["__key__"])
            except WdstrainError as error:
                end = str(error)
            passes.append((number, start, keys, end))

    with switching_often():
        loops = [threading.Thread(target=run, args=(number,)) for number in range(2)]
        for loop in loops:
            loop.start()
        for loop in loops:
            loop.join()
    loader.close()
    assert not passes[-1][3]
    for number, start, keys, end in passes:
        assert not end or "another loop over the same loader" in end
        assert keys == expected[number][start:][: len(keys) if end else None]


@pytest.mark.usefixtures("small")
def test_a_closed_loader_delivers_no_batch_that_had_not_arrived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request has delivered its bytes, one a part; the others wait for an answer."""
    monkeypatch.setattr(reader_run, "STOP_PATIENCE", 0.5)
    write_shards(tmp_path, [400])
    wt.index(tmp_path)
    released = threading.Event()

    def answer(handler: Handler, path: Path, start: int, stop: int) -> bool:
        if start < RANGE:
            return False
        if start < 2 * RANGE:
            return stall(1000, released)(handler, path, start, stop)
        return not released.wait(20)

    with serving(tmp_path, faults=[answer] * 100) as server:
        loader = wt.Loader(server.url, batch_size=4, shuffle=False)
        batches = loader.epoch(0)
        checked(next(batches))
        begun = fetching()
        closer = threading.Thread(target=loader.close)
        closer.start()
        end = time.monotonic() + 20
        while fetching() == begun and time.monotonic() < end:  # until the request is broken off
            time.sleep(0.001)
        with pytest.raises(WdstrainError, match=r"stopped|closed"):
            drained(batches)
        closer.join()
        unfinished = [
            thread for thread in threading.enumerate() if thread.name.startswith("wdstrain-fetch-")
        ]
        released.set()
        for (
            thread
        ) in unfinished:  # a thread that waits for the first byte ends when that byte arrives
            thread.join(20)
        assert not fetching()


@pytest.mark.parametrize("which", ["wdstrain-fetch-0", "wdstrain-fetch-3"])
def test_a_failed_thread_start_raises_in_the_loop_and_the_loader_stays_usable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    write_shards(tmp_path, [40])
    wt.index(tmp_path)
    original = threading.Thread.start

    def start(self: threading.Thread) -> None:
        if self.name == which:
            raise RuntimeError("can't start new thread")
        original(self)

    with serving(tmp_path) as server:
        loader = wt.Loader(server.url, batch_size=4)
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", start)
            with pytest.raises((RuntimeError, WdstrainError), match="can't start new thread"):
                drained(loader)
            loader.close()
        assert drained(loader) == 40
        loader.close()


def stops_of_readers(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Return an event that is set when a reader is closed."""
    original, event = Reader.close, threading.Event()

    def close(self: Reader) -> None:
        original(self)
        event.set()

    monkeypatch.setattr(Reader, "close", close)
    return event


def test_close_does_not_wait_for_the_first_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first batch may never arrive from a server that does not answer."""
    write_shards(tmp_path, [40])
    wt.index(tmp_path)
    original, closers = Reader.start, list[threading.Thread]()

    def start(self: Reader, *words: Any) -> Any:
        if not closers:
            closers.append(threading.Thread(target=loader.close))
            closers[0].start()
            assert stopped.wait(20)
        return original(self, *words)

    stopped = stops_of_readers(monkeypatch)
    monkeypatch.setattr(Reader, "start", start)
    released = threading.Event()
    with serving(tmp_path, faults=[lambda *_: not released.wait(20)] * 10) as server:
        loader = wt.Loader(server.url, batch_size=4)
        with pytest.raises(WdstrainError, match="stopped"):
            next(iter(loader))
        closers[0].join(20)
        assert not closers[0].is_alive()
        released.set()
        server.faults.clear()
        assert drained(loader) == 40
        loader.close()


def test_the_next_pass_closes_a_reader_that_ctrl_c_left_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_shards(tmp_path, [40])
    wt.index(tmp_path)
    before = threads()
    loader = wt.Loader(tmp_path, {"label": wt.label("cls")}, batch_size=4, patience=60)
    for _ in range(3):
        next(iter(loader))
        with monkeypatch.context() as patched:

            def close(self: workers.DecoderThreads) -> None:
                raise KeyboardInterrupt

            patched.setattr(workers.DecoderThreads, "close", close)
            with pytest.raises(KeyboardInterrupt):
                loader.close()
        assert sum(len(batch["__key__"]) for batch in loader) == 40
        assert threads().count("wdstrain-watch") == 1
    loader.close()
    assert threads() == before


class Hangs:
    """A transform that waits at one sample until it is released."""

    def __init__(self, number: int) -> None:
        self.number, self.begun, self.released = number, threading.Event(), threading.Event()

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        number = int(sample["cls"])
        if number == self.number:
            self.begun.set()
            assert self.released.wait(60)
        return {"number": number}


def test_close_ends_the_wait_of_a_loop_for_a_transform_that_hangs(tmp_path: Path) -> None:
    write_shards(tmp_path, [50])
    hanging, ends = Hangs(6), list[str]()
    loader = wt.Loader(tmp_path, transform=hanging, batch_size=4, shuffle=False)

    def loop() -> None:
        try:
            drained_rows = sum(len(batch["__key__"]) for batch in loader)
            ends.append(f"{drained_rows} samples")
        except WdstrainError as error:
            ends.append(str(error))

    looping, closing = threading.Thread(target=loop), threading.Thread(target=loader.close)
    looping.start()
    assert hanging.begun.wait(30)
    try:
        closing.start()
        looping.join(15)
        is_over = not looping.is_alive()
    finally:
        hanging.released.set()
    closing.join()
    looping.join()
    for thread in threading.enumerate():
        if thread.name.startswith("wdstrain-decoder"):
            thread.join(30)  # ends with the transform
    assert is_over
    assert "was closed" in ends[0] or "stopped" in ends[0]


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_close_ends_the_wait_of_a_loop_for_worker_processes_that_hang(tmp_path: Path) -> None:
    shards, notes, ends = write_shards(tmp_path / "s", [50]), tmp_path / "notes", list[str]()
    notes.mkdir()
    transform = HangsForever(notes)
    delivered = threading.Event()
    loader = wt.Loader(shards, transform=transform, batch_size=4, num_workers=2, shuffle=False)

    def loop() -> None:
        try:
            for _ in loader:
                delivered.set()
        except WdstrainError as error:
            ends.append(str(error))

    looping = threading.Thread(target=loop)
    looping.start()
    end = time.monotonic() + 60
    assert delivered.wait(60)
    while len(list(notes.iterdir())) < 2:
        assert time.monotonic() < end
    loader.close()
    looping.join(15)
    assert not looping.is_alive()
    assert "was closed" in ends[0] or "stopped" in ends[0]
    for path in notes.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.name), 0)


@pytest.mark.slow
def test_close_ends_though_a_transform_hangs(tmp_path: Path) -> None:
    """The transform may wait for a server of the user that never answers."""
    write_shards(tmp_path, [50])
    hanging = Hangs(6)
    loader = wt.Loader(tmp_path, transform=hanging, batch_size=4, shuffle=False)
    closing = threading.Thread(target=loader.close)
    try:
        next(iter(loader))
        assert hanging.begun.wait(30)
        closing.start()
        closing.join(15)
        is_closed = not closing.is_alive()
    finally:
        hanging.released.set()
        loader.close()
    closing.join()
    assert is_closed


class HangsForever:
    """A transform that never returns after the first batch, once it has noted its process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        if int(sample["cls"]) >= 4:
            (self.folder / str(os.getpid())).touch()
            threading.Event().wait()
        return {"number": 0}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_close_ends_all_workers_together_though_their_transforms_hang(tmp_path: Path) -> None:
    shards, notes = write_shards(tmp_path / "s", [50]), tmp_path / "notes"
    notes.mkdir()
    transform = HangsForever(notes)
    loader = wt.Loader(shards, transform=transform, batch_size=4, num_workers=6, shuffle=False)
    next(iter(loader))
    end = time.monotonic() + 60
    while len(list(notes.iterdir())) < 6:
        assert time.monotonic() < end
    begun = time.monotonic()
    loader.close()
    assert time.monotonic() - begun < 20  # one after another they would take 30 s
    for path in notes.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.name), 0)
