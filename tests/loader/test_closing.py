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
from wdstrain.decode import worker_processes, workers
from wdstrain.errors import WdstrainError
from wdstrain.reader import run as reader_run

RANGE = 64 << 10  # bytes: about 32 samples


def checked(batch: dict[str, Any]) -> int:
    """Return the number of samples of a batch after a check that each one matches its key."""
    assert [int(bytes(data)) for data in batch["cls"]] == [int(key[1:]) for key in batch["__key__"]]
    return len(batch["__key__"])


def drained(batches: Iterable[dict[str, Any]]) -> int:
    return sum(map(checked, batches))


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("wdstrain-")]


@contextmanager
def switching_often() -> Iterator[None]:
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(usual)


@pytest.mark.parametrize(
    ("where", "workers", "closers"), [("disk", 0, 3), ("disk", 2, 1), ("server", 0, 1)]
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
        urls = server.url if where == "server" else tmp_path
        loader = wt.Loader(urls, batch_size=4, shuffle_buffer=10, num_workers=workers)

        def close() -> None:
            while not done.wait(0.003):
                try:
                    loader.close()
                except Exception as error:
                    wrong.append(error)

        closing = [threading.Thread(target=close) for _ in range(closers)]
        for closer in closing:
            closer.start()
        for epoch in range(30):
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


@pytest.fixture
def ends() -> list[str]:
    """The errors that ended loops in other threads."""
    return []


def looping(loader: wt.Loader, ends: list[str], delivered: threading.Event) -> threading.Thread:
    """Start a loop in another thread."""

    def loop() -> None:
        try:
            for batch in loader:
                if "cls" in batch:
                    checked(batch)
                delivered.set()
        except WdstrainError as error:
            ends.append(str(error))

    thread = threading.Thread(target=loop)
    thread.start()
    return thread


def join_all(name: str) -> None:
    """Wait for the threads of the package with this name, which nothing holds any more."""
    for thread in threading.enumerate():
        if thread.name.startswith(f"wdstrain-{name}"):
            thread.join(30)
            assert not thread.is_alive()


@pytest.mark.parametrize("silent_from", [0, RANGE])
def test_close_ends_a_loop_that_waits_for_a_silent_server(
    tmp_path: Path, ends: list[str], silent_from: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request has a part of its bytes; later ones wait for an answer. No partial batch comes."""
    monkeypatch.setenv("WDSTRAIN_RANGE_SIZE", str(RANGE))
    monkeypatch.setattr(reader_run, "STOP_PATIENCE", 0.5)
    write_shards(tmp_path, [400])
    wt.index(tmp_path)
    asked, released = threading.Event(), threading.Event()

    def answer(handler: Handler, path: Path, start: int, stop: int) -> bool:
        if start < silent_from or released.is_set():
            return False
        asked.set()
        if start == silent_from:
            return stall(1000, released)(handler, path, start, stop)
        return not released.wait(20)

    with serving(tmp_path, faults=[answer] * 100) as server:
        loader = wt.Loader(server.url, batch_size=4, shuffle=False)
        thread = looping(loader, ends, threading.Event())
        assert asked.wait(20)
        loader.close()
        thread.join(20)
        assert not thread.is_alive()
        assert "closed" in ends[0] or "stopped" in ends[0]
        released.set()
        join_all("fetch-")
        server.faults.clear()
        assert drained(loader) == 400
        loader.close()


class Hangs:
    """A transform that notes its process and waits, from the second batch on."""

    def __init__(self, folder: Path, pipe: int) -> None:
        self.folder, self.pipe = folder, pipe

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        if int(sample["cls"]) >= 4:
            (self.folder / f"{os.getpid()}-{threading.get_ident()}").touch()
            os.read(self.pipe, 1)
        return {"number": 0}


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("num_workers", [0, 2, pytest.param(6, marks=pytest.mark.slow)])
def test_close_ends_a_loop_though_transforms_hang(
    tmp_path: Path, ends: list[str], num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may wait for a server of the user that never answers."""
    for module in (workers, worker_processes):
        monkeypatch.setattr(module, "END_SECONDS", 1.0 if num_workers < 6 else 5.0)
    shards, notes = write_shards(tmp_path / "s", [50]), tmp_path / "notes"
    notes.mkdir()
    reading, writing = os.pipe()
    options: dict[str, Any] = {"batch_size": 4, "num_workers": num_workers, "shuffle": False}
    options |= {"multiprocessing_context": "fork"} if num_workers else {}
    loader = wt.Loader(shards, transform=Hangs(notes, reading), **options)
    delivered = threading.Event()
    thread = looping(loader, ends, delivered)
    assert delivered.wait(60)
    end = time.monotonic() + 60
    while len(list(notes.iterdir())) < max(1, num_workers):
        assert time.monotonic() < end
        time.sleep(0.01)
    begun = time.monotonic()
    loader.close()
    assert num_workers < 6 or time.monotonic() - begun < 20  # one after another they take 30 s
    thread.join(15)
    is_over = not thread.is_alive()
    os.write(writing, bytes(100))
    thread.join()
    assert is_over
    assert "was closed" in ends[0] or "stopped" in ends[0]
    join_all("decoder")
    os.close(reading)
    os.close(writing)
    for path in notes.iterdir() if num_workers else ():
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.name.partition("-")[0]), 0)
