"""I/O threads fill memory without the GIL, and report every read once."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import threading
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

from tests.conftest import ROOT
from wdstrain.memory.scatter import ChecksumJob, ScatterList
from wdstrain.memory.shared import Memory
from wdstrain.native import kernels
from wdstrain.storage.io_pool import IOThreadPool

BEFORE: set[threading.Thread] = set()
DATA = np.random.default_rng(0).bytes(1_000_000)

pytestmark = pytest.mark.skipif(kernels.library is None, reason="there was no C compiler")


@pytest.fixture
def pool(other_threads: None) -> Iterator[IOThreadPool]:
    new_pool = IOThreadPool(3)
    yield new_pool
    new_pool.stop()
    assert pool_threads() == []


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    (tmp_path / "file").write_bytes(DATA)
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    yield fd
    os.close(fd)


@pytest.fixture(autouse=True)
def other_threads() -> None:
    """Record the threads that ran before, such as those of uncollected loaders of other tests."""
    BEFORE.clear()
    BEFORE.update(threading.enumerate())


def pool_threads() -> list[str]:
    return [
        item.name
        for item in threading.enumerate()
        if item.name.startswith("wdstrain-io") and item not in BEFORE
    ]


def ints(*values: int) -> Any:
    return np.array(values, np.int64)


def whole(memory: Memory) -> ScatterList:
    return ScatterList([memory], ints(0), ints(0), ints(memory.size))


def test_every_read_is_filled_verified_and_reported_once(pool: IOThreadPool, file: int) -> None:
    reported: SimpleQueue[int] = SimpleQueue()
    memory, size = Memory(1_000_000), 2000
    starts = np.random.default_rng(1).permutation(500) * size
    sums = [ChecksumJob([memory], ints(0), ints(at), ints(size), ints(size)) for at in starts]
    for number, at in enumerate(starts.tolist()):
        places = ScatterList([memory], ints(0), ints(at), ints(size), sums[number])
        pool.fill(file, at, places, partial(reported.put, number))
    assert sorted(reported.get(timeout=30) for _ in starts) == list(range(500))
    assert bytes(memory.view) == DATA
    assert [int(part.checksums[0]) for part in sums] == [
        zlib.crc32(DATA[at : at + size]) for at in starts
    ]
    assert sorted(pool_threads()) == [
        "wdstrain-io-0",
        "wdstrain-io-1",
        "wdstrain-io-2",
        "wdstrain-io-done",
    ]


def test_partly_filled_ranges_are_completed(pool: IOThreadPool, file: int) -> None:
    memory, done = Memory(300_000), threading.Event()
    sums = ChecksumJob(
        [memory], ints(0, 0, 0), ints(0, 900, 5000), ints(900, 4100, 7000), ints(900, 5000, 12_000)
    )
    places = ScatterList([memory], ints(0), ints(0), ints(memory.size), sums)
    places.write(DATA[:1000])
    pool.fill(file, 1000, places, done.set)
    assert done.wait(30)
    assert places.left == 0
    assert bytes(memory.view) == DATA[:300_000]
    assert sums.checksums.tolist() == [
        zlib.crc32(DATA[begin:end]) for begin, end in ((0, 900), (900, 5000), (5000, 12_000))
    ]


def test_bytes_beyond_eof_are_reported_as_missing(pool: IOThreadPool, file: int) -> None:
    memory, done = Memory(5000), threading.Event()
    places = whole(memory)
    pool.fill(file, len(DATA) - 3000, places, done.set)
    assert done.wait(30)
    assert (places.left, places.filled) == (2000, 3000)
    assert bytes(memory.view[:3000]) == DATA[-3000:]


def test_an_unreadable_file_leaves_all_bytes_missing(pool: IOThreadPool, tmp_path: Path) -> None:
    fd, done, places = os.open(tmp_path, os.O_RDONLY), threading.Event(), whole(Memory(5000))
    try:
        pool.fill(fd, 0, places, done.set)
        assert done.wait(30)
        assert places.left == 5000
    finally:
        os.close(fd)


def test_stop_waits_for_running_reads_and_reports_none_after_it(
    pool: IOThreadPool, file: int
) -> None:
    for _ in range(30):
        reported: list[int] = []
        for number in range(200):
            pool.fill(file, 0, whole(Memory(50_000)), partial(reported.append, number))
        pool.stop()
        count = len(reported)
        assert pool_threads() == []
        assert len(reported) == count
    done = threading.Event()
    pool.fill(file, 0, whole(Memory(50_000)), done.set)  # the threads can be started again
    assert done.wait(30)


def test_a_pool_without_references_ends_its_threads(file: int) -> None:
    output, done = IOThreadPool(2), threading.Event()
    output.fill(file, 0, whole(Memory(50_000)), done.set)
    assert done.wait(30)
    del output
    gc.collect()
    assert pool_threads() == []


LEFT = """
    import gc, multiprocessing, os, sys
    import numpy as np
    from wdstrain.memory.scatter import ScatterList
    from wdstrain.memory.shared import Memory
    from wdstrain.storage.io_pool import IOThreadPool

    def child():
        global pool
        pool = None
        gc.collect()  # they are not here: nothing is waited for
        print("child", flush=True)

    zero = np.zeros(1, np.int64)
    pool, fd = IOThreadPool(2), os.open(sys.argv[1], os.O_RDONLY)
    for _ in range(300):
        memory = Memory(1_000_000)
        pool.fill(fd, 0, ScatterList([memory], zero, zero, zero + memory.size), lambda: None)
    other = multiprocessing.get_context("fork").Process(target=child)
    other.start()
    other.join(20)
    print("parent", other.exitcode, flush=True)
"""


def test_a_program_and_its_forked_child_can_exit_during_reads(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").write_bytes(DATA)
    words = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(LEFT), str(tmp_path / "file")]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr, done.returncode) == ("child\nparent 0\n", "", 0)
