"""A loader, stream or cache that several threads, or a parent and forked children, use."""

from __future__ import annotations

import copy
import multiprocessing
import os
import random
import signal
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
import webdataset as wds
from torch.utils.data import DataLoader

import wdstrain as wt
from tests.conftest import ROOT, keys_of, write_shards
from tests.support.servers import serving
from wdstrain.runtime.cached import cached_property

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

COUNT = 240


def pack(folder: Path, count: int, per_shard: int, size: int = 3000) -> Path:
    """Write samples whose bytes all encode their number."""
    numbers = range(count)
    rows = ({"__key__": f"k{n:06d}", "bin": bytes([n]) * size, "cls": n % 7} for n in numbers)
    wt.pack(rows, str(folder), max_shard_samples=per_shard)
    return folder


@pytest.fixture(scope="module")
def numbered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pack(tmp_path_factory.mktemp("numbered") / "s", COUNT, 50)


class Child:
    """A forked child that runs a function; `result` is the returned value or the error as text."""

    def __init__(self, function: Callable[[], Any]) -> None:
        context = multiprocessing.get_context("fork")
        self._answer, child_end = context.Pipe(False)
        self._process = context.Process(target=self._run, args=(function, child_end))
        with warnings.catch_warnings():  # Python warns of a fork beside threads
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process.start()
        child_end.close()

    def _run(self, function: Callable[[], Any], answer: Any) -> None:
        try:
            answer.send(function())
        except BaseException as error:
            answer.send(f"{type(error).__name__}: {error}")

    def result(self) -> Any:
        try:
            return self._answer.recv() if self._answer.poll(30) else "nothing came"
        finally:
            self.end()

    def end(self) -> None:
        self._process.kill()
        self._process.join()


@pytest.mark.parametrize("is_moved", [False, True])
def test_a_child_has_no_pass_of_its_parent(numbered: Path, is_moved: bool) -> None:
    workers = 0 if is_moved else 1
    loader = wt.Loader(numbered, {"number": wt.label()}, batch_size=20, num_workers=workers)
    begun = loader.epoch(0)
    batches = wt.to_device(begun, "meta") if is_moved else begun
    first = next(batches)["__key__"]

    def take() -> list[Any]:
        keys = keys_of(loader.epoch(0))
        with pytest.raises(wt.WdstrainError) as refused:
            next(batches)
        loader.close()
        return [str(refused.value), keys]

    error, keys = Child(take).result()
    began = f"this pass over the loader began in process {os.getpid()}, which alone can go on with"
    assert error == f"{began} it. Begin a pass in this process: for batch in loader."
    assert [first, *keys_of(batches)] == keys
    loader.close()


@pytest.mark.parametrize(("num_workers", "begun"), [(0, True), (2, False)])
def test_threads_share_a_pass_without_repeats(
    tmp_path: Path, num_workers: int, begun: bool
) -> None:
    fields = {"text": wt.text("txt")} if num_workers else None
    folder = write_shards(tmp_path / "s", [70, 30, 100])
    loader = wt.Loader(folder, fields, batch_size=2, num_workers=num_workers)
    for number in range(3):
        batches, delivered = loader.epoch(number), list[str]()
        if begun:
            delivered += next(batches)["__key__"]

        def take(batches: Any = batches, delivered: list[str] = delivered) -> bool:
            for batch in batches:
                delivered.extend(batch["__key__"])
            return True

        with ThreadPoolExecutor(4) as threads:
            takers = [threads.submit(take) for _ in range(4)]
            assert all(taker.result(60) for taker in takers)
        assert sorted(delivered) == [f"s{i:06d}" for i in range(200)]
        state = loader.state_dict()
        assert (state["epoch"], state["step"]) == (number + 1, 0)
        assert loader.report()["samples"] == 200
    loader.close()


def dying(sample: dict[str, Any]) -> dict[str, Any]:
    """Kill this worker process at a sample in the middle."""
    if sample["cls"] == b"10":
        os.kill(os.getpid(), signal.SIGKILL)
    return {"n": 1}


@pytest.mark.parametrize("through", [None, "cpu"])
def test_a_killed_worker_raises_a_clear_error_in_every_way_to_iterate(
    shards: Path, through: str | None
) -> None:
    with wt.Loader(shards, transform=dying, batch_size=1, num_workers=1) as loader:
        batches = wt.to_device(loader, through) if through else iter(loader)
        with pytest.raises(wt.WdstrainError, match="a worker process of the loader died"):
            list(batches)


def workers_of(dataset: Any, count: int, context: str = "fork", **options: Any) -> Any:
    options |= {"num_workers": count, "multiprocessing_context": context}
    return DataLoader(dataset, batch_size=None, collate_fn=copy.copy, **options)


def epoch_of(samples: Any) -> int:
    """Return the epoch of samples after a check that each sample of the set occurs once, intact."""
    actual = [(sample["__key__"], sample["__epoch__"], sample["bin"]) for sample in samples]
    assert sorted(key for key, _, _ in actual) == [f"k{number:06d}" for number in range(COUNT)]
    assert all(data == bytes([int(key[1:])]) * 3000 for key, _, data in actual)
    (epoch,) = {epoch for _, epoch, _ in actual}
    return int(epoch)


def test_a_pass_of_all_workers_is_an_epoch_after_partial_ones(numbered: Path) -> None:
    stream = wt.stream(numbered, shuffle_buffer=60)
    data = wds.DataPipeline(stream)
    lasting = workers_of(data, 2, persistent_workers=True)

    def passed(samples: Callable[[], Any], whole: bool = True) -> int:
        return epoch_of(samples()) if whole else int(next(iter(samples()))["__epoch__"])

    assert passed(lambda: data, whole=False) == 0
    for expected, workers in enumerate((2, 3, 1, 3, 3, 2), 1):
        is_whole = expected != 4
        assert passed(partial(workers_of, data, workers), is_whole) == expected
    assert [passed(lambda: lasting) for _ in range(2)] == [7, 8]
    assert passed(lambda: data) == 9
    assert passed(lambda: lasting, whole=False) == 10
    assert passed(lambda: workers_of(data, 2)) == 11
    assert [passed(lambda: lasting) for _ in range(2)] == [12, 13]
    stream.set_epoch(3)
    assert passed(lambda: lasting) == 3
    assert passed(lambda: workers_of(data, 3)) == 4
    for _ in range(2):  # the same seed of torch is the same epoch
        torch.manual_seed(5)
        assert passed(lambda: workers_of(data, 2)) == 5


def test_a_child_and_its_parent_share_a_stream(numbered: Path) -> None:
    stream = wt.stream(numbered)
    samples = iter(stream)
    first = next(samples)
    child = Child(lambda: epoch_of(stream))
    assert epoch_of([first, *samples]) == 0
    assert child.result() == 1
    assert epoch_of(stream) == 2


def waits() -> None:
    threading.Event().wait()


def test_a_forked_child_does_not_keep_shards_in_a_cache(tmp_path: Path) -> None:
    """The child lives while its parent releases the shards of the fork and caches others."""
    for name in ("old", "new"):
        pack(tmp_path / "far" / name, COUNT // 2, 4, size=5000)
    sizes = [path.stat().st_size for path in (tmp_path / "far" / "old").glob("*.tar")]
    limit = sum(sizes) + 4 * max(sizes)
    options: dict[str, Any] = {"cache_dir": tmp_path / "cache", "cache_limit": limit}
    options |= {"batch_size": 4, "shuffle": False}
    with serving(tmp_path / "far") as server:
        loader = wt.Loader(f"{server.url}/old/index.json", **options)
        batches = iter(loader)
        next(batches)
        child = Child(waits)
        list(batches)
        loader.close()
        other = wt.Loader(f"{server.url}/new/index.json", **options)
        list(other)
        list(other)
        assert other.report()["fetched"] == 0
        other.close()
        child.end()


def test_a_child_and_its_parent_continue_reading_a_remote_file(tmp_path: Path) -> None:
    data = random.Random(0).randbytes(12 << 20)
    (tmp_path / "file.tar").write_bytes(data)
    with serving(tmp_path) as server, wt.gopen(f"{server.url}/file.tar") as file:
        begin = file.read(100)
        child = Child(lambda: sha256(begin + file.read()).hexdigest())
        digest = sha256(begin + file.read()).hexdigest()
        assert (digest, child.result()) == (sha256(data).hexdigest(),) * 2


def test_cached_properties_have_no_lock_that_a_fork_would_inherit() -> None:
    """Those of functools have one before Python 3.12."""
    begun, released = threading.Event(), threading.Event()

    class Slow:
        @cached_property
        def value(self) -> bool:
            begun.set()
            return released.wait(30)

        other = cached_property(lambda _: True)

    with ThreadPoolExecutor(2) as threads:
        threads.submit(lambda: Slow().value)
        assert begun.wait(30)
        assert threads.submit(lambda: Slow().other).result(30)
        released.set()
    modules = [path.read_text() for path in (ROOT / "wdstrain/decode").glob("*.py")]
    assert not [text for text in modules if "from functools import cached_property" in text]
