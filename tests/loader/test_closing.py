"""Closing a loader at any moment, from any thread: no thread waits forever."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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
    write_shards(tmp_path, [50] * 4)
    wt.index(tmp_path)
    done, ends, wrong = threading.Event(), list[str](), list[Exception]()
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
            try:
                assert sum(map(checked, loader.epoch(epoch))) == 200
            except WdstrainError as error:
                ends.append(str(error))
        done.set()
        for closer in closing:
            closer.join()
        loader.close()
    assert ends
    assert not wrong
    assert all("closed" in end or "stopped" in end for end in ends)


def test_passes_in_several_threads_do_not_share_batches(tmp_path: Path) -> None:
    write_shards(tmp_path, [40, 20])
    loader = wt.Loader(tmp_path, transform=lambda sample: {"cls": int(sample["cls"])}, batch_size=1)
    expected = [[batch["__key__"] for batch in loader.epoch(number)] for number in range(2)]
    passes: list[tuple[int, int, list[list[str]], list[str]]] = []

    def run(number: int) -> None:
        for start in (0, 7, 0, 3, 0, 30):
            keys, ends = list[list[str]](), list[str]()
            passes.append((number, start, keys, ends))
            try:
                keys.extend(batch["__key__"] for batch in loader.epoch(number, start=start))
            except WdstrainError as error:
                ends.append(str(error))

    with switching_often(), ThreadPoolExecutor(2) as threads:
        list(threads.map(run, range(2)))
    loader.close()
    for number, start, keys, ends in passes:
        assert not ends or "another loop over the same loader" in ends[0]
        assert keys == expected[number][start:][: len(keys) if ends else None]


def test_a_failed_thread_start_raises_in_the_loop_and_the_loader_stays_usable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_shards(tmp_path, [40])
    wt.index(tmp_path)
    original = threading.Thread.start

    def start(self: threading.Thread) -> None:
        if self.name == "wdstrain-fetch-3":
            raise RuntimeError("can't start new thread")
        original(self)

    with serving(tmp_path) as server:
        loader = wt.Loader(server.url, batch_size=4)
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", start)
            with pytest.raises((RuntimeError, WdstrainError), match="can't start new thread"):
                list(loader)
            loader.close()
        assert sum(map(checked, loader)) == 40
        loader.close()


class Loop(threading.Thread):
    """A loop in another thread. end: the error that ended it."""

    end = ""

    def __init__(self, loader: wt.Loader) -> None:
        super().__init__()
        self._loader, self.delivered = loader, threading.Event()
        self.start()

    def run(self) -> None:
        try:
            for _ in self._loader:
                self.delivered.set()
        except WdstrainError as error:
            self.end = str(error)


@pytest.mark.parametrize("silent_from", [0, RANGE])
def test_close_ends_a_loop_that_waits_for_a_silent_server(
    tmp_path: Path, silent_from: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request has a part of its bytes; later ones wait for an answer."""
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
        loop = Loop(loader)
        assert asked.wait(20)
        loader.close()
        loop.join(20)
        assert not loop.is_alive()
        assert "closed" in loop.end or "stopped" in loop.end
        released.set()
        server.faults.clear()
        assert sum(map(checked, loader)) == 400
        loader.close()


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_close_ends_a_loop_though_transforms_hang(
    tmp_path: Path, num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (workers, worker_processes):
        monkeypatch.setattr(module, "END_SECONDS", 1.0)
    shards, notes = write_shards(tmp_path / "s", [50]), tmp_path / "notes"
    notes.mkdir()
    reading, writing = os.pipe()

    def hang(sample: dict[str, Any]) -> dict[str, Any]:
        """Note the process and wait, from the second batch on."""
        if int(sample["cls"]) >= 4:
            (notes / f"{os.getpid()}-{threading.get_ident()}").touch()
            os.read(reading, 1)
        return {"number": 0}

    options: dict[str, Any] = {"multiprocessing_context": "fork"} if num_workers else {}
    options |= {"batch_size": 4, "num_workers": num_workers, "shuffle": False}
    loader = wt.Loader(shards, transform=hang, **options)
    loop = Loop(loader)
    assert loop.delivered.wait(60)
    end = time.monotonic() + 60
    while len(list(notes.iterdir())) < max(1, num_workers):
        assert time.monotonic() < end
        time.sleep(0.01)
    loader.close()
    loop.join(15)
    is_over = not loop.is_alive()
    os.write(writing, bytes(100))
    loop.join()
    assert is_over
    assert "was closed" in loop.end or "stopped" in loop.end
    os.close(writing)
    for path in notes.iterdir() if num_workers else ():
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.name.partition("-")[0]), 0)
