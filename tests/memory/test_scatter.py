"""Scatter lists: equal bytes and checksums with the compiled library and without it."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import wdstrain as wt
from tests.conftest import ROOT, picture
from wdstrain.memory.scatter import ChecksumJob, ScatterList, scatter_samples
from wdstrain.memory.shared import Memory
from wdstrain.native import kernels


class File(NamedTuple):
    """An open file. Its repr has no bytes, because hypothesis would print megabytes."""

    fd: int
    data: bytes

    def __repr__(self) -> str:
        return f"File(fd={self.fd})"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[File]:
    data = np.random.default_rng(0).bytes(3_000_000)
    path = tmp_path_factory.mktemp("bulk") / "file"
    path.write_bytes(data)
    fd = os.open(path, os.O_RDONLY)
    yield File(fd, data)
    os.close(fd)


def ints(*values: int) -> Any:
    return np.array(values, np.int64)


def filled(places: ScatterList, fd: int, offset: int) -> int:
    """Fill until the list is full or the file ends, and return the number of bytes."""
    before = places.left
    while places.left and (count := places.read(fd, offset + before - places.left)):
        assert count > 0
    return before - places.left


run_sizes = st.lists(
    st.one_of(st.integers(0, 700), st.sampled_from([0, 1, 262_143, 262_144, 262_145, 500_000])),
    max_size=40,
)
few_sizes = run_sizes.map(
    lambda sizes: [
        size for size, upto in zip(sizes, np.cumsum(sizes), strict=True) if upto <= 3_000_000
    ]
)
randoms = st.integers(0, 1 << 32).map(Random)
thorough = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


class Laid(NamedTuple):
    """Runs over two memories in the order of filling, and the runs that have checksums."""

    memories: list[Memory]
    places: ScatterList
    summed: list[int]
    sums: ChecksumJob


def laid(sizes: list[int], order: Random) -> Laid:
    start, of, upto = (
        np.zeros(len(sizes), np.int64),
        ints(*(order.randrange(2) for _ in sizes)),
        [0, 0],
    )
    for i in order.sample(range(len(sizes)), len(sizes)):
        start[i] = upto[of[i]] + order.randrange(9)
        upto[of[i]] = int(start[i]) + sizes[i]
    memories = [Memory(upto[0] + 10), Memory(upto[1] + 10)]
    summed = [i for i, size in enumerate(sizes) if size and order.randrange(2)]
    size, rows = ints(*sizes), ints(*summed)
    sums = ChecksumJob(memories, of[rows], start[rows], size[rows], size.cumsum()[rows])
    return Laid(memories, ScatterList(memories, of, start, size, sums), summed, sums)


def received_runs(sizes: list[int], there: bytes) -> list[bytes]:
    """Return the received bytes of each run."""
    ends = np.cumsum([0, *sizes]).tolist()
    return [there[begin:end] for begin, end in pairwise(ends)]


def check_places(laid_out: Laid, sizes: list[int], data: bytes) -> None:
    """Check that received bytes are in place and that no other byte was written."""
    received = received_runs(sizes, data)
    assert [
        bytes(laid_out.places.run(i))[: len(data)] for i, data in enumerate(received)
    ] == received
    written = sum(
        len(bytes(memory.view)) - bytes(memory.view).count(0) for memory in laid_out.memories
    )
    assert written == len(data) - data.count(0)


@thorough
@given(sizes=run_sizes, offset=st.integers(0, 3_000_100), order=randoms)
def test_runs_are_filled_in_order_and_verified(
    file: File, sizes: list[int], offset: int, order: Random
) -> None:
    """Runs of any place and size, up to the end of the file."""
    fd, content = file
    laid_out, data = laid(sizes, order), content[offset : offset + sum(sizes)]
    assert filled(laid_out.places, fd, offset) == len(data)
    check_places(laid_out, sizes, data)
    received = received_runs(sizes, data)
    for k, i in enumerate(laid_out.summed):
        if len(received[i]) < sizes[i]:
            assert not laid_out.sums.checksums[k:].any()
            break
        assert laid_out.sums.checksums[k] == zlib.crc32(received[i])


@thorough
@given(sizes=few_sizes, bounds=st.lists(st.floats(0, 1), max_size=4), order=randoms)
def test_parts_are_filled_separately_and_shared_samples_are_not_verified(
    file: File, sizes: list[int], bounds: list[float], order: Random
) -> None:
    fd, content = file
    laid_out, total = laid(sizes, order), sum(sizes)
    places, ends = (
        laid_out.places,
        sorted({0, total, *(int(fraction * total) for fraction in bounds)}),
    )
    parts = [(begin, places.split_off(end - begin)) for begin, end in pairwise(ends)]
    assert places.left == 0
    for begin, part in order.sample(parts, len(parts)):
        size = part.left
        if order.randrange(3):
            assert filled(part, fd, begin) == size
        else:
            part.write(content[begin : begin + size])
            assert part.left == 0
    check_places(laid_out, sizes, content[:total])
    for k, i in enumerate(laid_out.summed):
        begin, end = sum(sizes[:i]), sum(sizes[: i + 1])
        together = any(low <= begin and end <= high for low, high in pairwise(ends))
        assert laid_out.sums.checksums[k] == (zlib.crc32(content[begin:end]) if together else 0)
    laid_out.sums.update()
    assert laid_out.sums.checksums.tolist() == [
        zlib.crc32(data)
        for i, data in enumerate(received_runs(sizes, content))
        if i in laid_out.summed
    ]


@settings(thorough, max_examples=30)
@given(
    sizes=few_sizes,
    missing=st.integers(0, 700),
    head=st.one_of(st.integers(0, 5000), st.integers(0, 900_000)),
    order=randoms,
)
def test_a_response_is_received_in_parts(
    file: File, sizes: list[int], missing: int, head: int, order: Random
) -> None:
    """The body comes in two halves and may end early; bytes after it stay in the socket."""
    laid_out = laid(sizes, order)
    sent = file.data[: max(0, sum(sizes) - missing)]
    rest = sent[head:]
    for at in range(0, min(head, len(sent)), 16_000):
        laid_out.places.write(sent[at : min(at + 16_000, head)])
    receiver, sender = socket.socketpair()
    more = threading.Event()

    def send() -> None:
        with sender:
            sender.sendall(rest[: len(rest) // 2])
            more.wait(30)
            sender.sendall(rest[len(rest) // 2 :] + b"of another answer")

    thread = threading.Thread(target=send)
    thread.start()
    with receiver:
        left = len(rest)
        receiver.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 1000))
        while left:
            with suppress(BlockingIOError):
                count = laid_out.places.receive(receiver, left)
                assert 0 < count <= left
                left -= count
            more.set()
        more.set()
        assert laid_out.places.left == sum(sizes) - len(sent)
        receiver.setsockopt(
            socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 30, 0)
        )  # the sending thread may not have run yet
        # Read the rest: the sender may still be sending, and would fail on a closed connection.
        after = b"of another answer"
        assert receiver.recv(len(after), socket.MSG_WAITALL) == after
    thread.join()
    check_places(laid_out, sizes, sent)
    received = received_runs(sizes, sent)
    laid_out.places.advance(0)  # checksum all received bytes
    complete = [i for i in laid_out.summed if len(received[i]) == sizes[i]]
    assert laid_out.sums.checksums.tolist() == [
        zlib.crc32(received[i]) if i in complete else 0 for i in laid_out.summed
    ]


def test_bytes_before_a_pause_are_returned_at_once() -> None:
    """A second timeout of the same length would delay the report of a stall."""
    receiver, sender = socket.socketpair()
    places = ScatterList([Memory(10)], ints(0), ints(0), ints(10))
    with receiver, sender:
        receiver.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 1000))
        sender.sendall(b"four")
        assert places.receive(receiver, 10) == 4
        with pytest.raises(BlockingIOError):
            places.receive(receiver, 6)
        assert places.left == 6


def test_a_closed_connection_returns_no_bytes() -> None:
    receiver, sender = socket.socketpair()
    places = ScatterList([Memory(10)], ints(0), ints(0), ints(10))
    with receiver:
        with sender:
            sender.sendall(b"four")
        assert places.receive(receiver, 10) == 4
        assert places.receive(receiver, 6) == 0
        assert places.left == 6


def test_more_runs_than_one_system_call_takes_are_filled(file: File) -> None:
    fd, content = file
    memory, count = Memory(100_000), 20_000
    size, start, of = np.full(count, 5), np.arange(count)[::-1] * 5, np.zeros(count, np.int64)
    sums = ChecksumJob([memory], of, start, size, size.cumsum())
    assert filled(ScatterList([memory], of, start, size, sums), fd, 17) == 100_000
    assert bytes(memory.view) == b"".join(
        content[17 + at : 22 + at] for at in range(99_995, -1, -5)
    )
    assert sums.checksums.tolist() == [
        zlib.crc32(content[17 + at : 22 + at]) for at in range(0, 100_000, 5)
    ]


def test_writable_buffers_are_filled_in_order(file: File) -> None:
    """More buffers than one system call takes, some of them empty, read in two parts."""
    fd, content = file
    buffers = [bytearray(size) for size in [0, 3, 0, 70_000, *[1, 2] * 1500, 0]]
    scatter_list = ScatterList.from_buffers(map(memoryview, buffers))
    assert scatter_list.left == 74_503
    part = scatter_list.split_off(40_000)
    assert filled(part, fd, 5) == 40_000
    assert filled(scatter_list, fd, 40_005) == 34_503
    assert b"".join(buffers) == content[5:74_508]


def test_no_buffers_make_an_empty_scatter_list() -> None:
    assert (
        ScatterList.from_buffers([]).left == ScatterList.from_buffers([memoryview(b"")]).left == 0
    )


def test_a_read_only_buffer_is_refused() -> None:
    with pytest.raises(TypeError, match="not writable"):
        ScatterList.from_buffers([memoryview(b"constant")])


@pytest.mark.parametrize("gaps", [[0, 0], [5, 0], [0, 1000], [1024, 2500]])
def test_bytes_between_samples_are_skipped(file: File, gaps: list[int]) -> None:
    fd, content = file
    arena, nobody = Memory(1000), Memory(1000)
    starts = ints(0, 50 + gaps[0], 100 + gaps[0] + gaps[1]) + 7
    places, sizes = np.arange(3)[::-1] * 60, ints(50, 50, 50)
    sums = ChecksumJob([arena], np.zeros(3, np.int64), places, sizes, starts - starts[0] + 50)
    target = scatter_samples((arena, nobody), places, sizes, starts, starts + 50, sums)
    assert filled(target, fd, 7) == 150 + sum(gaps)
    samples = [content[at : at + 50] for at in starts.tolist()]
    assert bytes(arena.view[:170]) == bytes(10).join(reversed(samples))
    assert not any(arena.view[170:])
    assert sums.checksums.tolist() == [zlib.crc32(sample) for sample in samples]


@pytest.mark.parametrize(
    ("start", "size"),
    [(-1, 5), (0, -1), (96, 5), (101, 0), (1 << 62, 1 << 62), ((1 << 63) - 1,) * 2, (1, -1 << 63)],
)
def test_runs_outside_their_memory_are_refused(start: int, size: int) -> None:
    """Offsets come from an index and become addresses, so they are validated."""
    memory = Memory(100)
    run = ints(start), ints(size)
    with pytest.raises(ValueError, match="beyond its memory"):
        ChecksumJob([memory], ints(0), *run, ints(0))
    with pytest.raises(ValueError, match="beyond its memory"):
        ScatterList([memory, memory], ints(1), *run)


def test_a_failed_read_is_an_os_error(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(IsADirectoryError):
            ScatterList([Memory(10)], ints(0), ints(0), ints(10)).read(fd, 0)
    finally:
        os.close(fd)


def epochs(folder: Path) -> list[Any]:
    """Return the batches and bad samples of each set, read in three ways."""
    fields = {
        "x": wt.array("x.npy", shape=(40, 40), dtype="uint8"),
        "image": wt.image(size=16),
        "label": wt.label(),
    }
    epochs_ = []
    for name in ("sound", "damaged", "short"):
        for chosen in (fields, {"x": fields["x"]}, None):
            loader = wt.Loader(
                folder / name, chosen, batch_size=7, on_error="replace", max_errors=1.0
            )
            batches = [
                {
                    key: str(value) if isinstance(value, list) else value.tolist()
                    for key, value in batch.items()
                }
                for batch in loader
            ]
            epochs_.append([batches, loader.report()["bad"], loader.report()["bad_reasons"]])
            loader.close()
    return epochs_


EPOCHS = """
import json, sys
from pathlib import Path
from tests.memory.test_scatter import epochs
print(json.dumps(epochs(Path(sys.argv[1]))))
"""


def test_a_loader_delivers_equal_batches_without_the_library(tmp_path: Path) -> None:
    """Arrays, images and bytes; intact, damaged, and in a truncated shard."""
    values = np.random.default_rng(2).integers(0, 255, (60, 40, 40), np.uint8)
    for name in ("sound", "damaged", "short"):
        samples = (
            {"__key__": f"k{i:03d}", "x.npy": values[i], "jpg": picture(i), "cls": i % 7}
            for i in range(60)
        )
        wt.pack(samples, str(tmp_path / name), shuffle=False, max_shard_samples=20)
        shard = tmp_path / name / "train-000001.tar"
        data = bytearray(shard.read_bytes())
        for at in range(5000, len(data), 1997):
            data[at] ^= name == "damaged"
        shard.write_bytes(data[: len(data) // 2 if name == "short" else None])
    run = [sys.executable, "-c", EPOCHS, str(tmp_path)]
    environment = {**os.environ, kernels.DISABLE: "0"}
    done = subprocess.run(
        run, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    output = epochs(tmp_path)
    assert json.loads(done.stdout) == output
    assert [bad > 0 for _, bad, _ in output] == [False] * 3 + [True] * 6


@pytest.mark.slow
def test_the_generic_code_passes_the_tests_of_the_compiled_code(tmp_path: Path) -> None:
    """The tests of scatter lists, checksums and forward reads, in a process without the library."""
    files = ["memory/test_scatter.py", "reader/test_checksums.py"]
    forward = "test_shards_are_read_forward_in_turn_with_large_reads"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", f"--basetemp={tmp_path / 'tests'}"),
            *("-m", "not slow and not alone", f"tests/loader/test_loader.py::{forward}"),
            *(f"tests/{name}" for name in files),
        ],
        cwd=ROOT,
        env={**os.environ, kernels.DISABLE: "0"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout


# --- the library ---


def test_a_library_of_another_source_is_not_used(tmp_path: Path) -> None:
    """An updated checkout may have a library built from older sources, with other signatures."""
    if kernels.library is None:
        pytest.skip("there was no C compiler")
    assert kernels.load_library() is not None
    (tmp_path / "kernels.c").write_text(Path(kernels.SOURCE).read_text() + "\n")
    assert kernels.load_library(source=str(tmp_path / "kernels.c")) is None


@pytest.mark.parametrize(
    ("compiler", "why"), [("/nowhere/cc", "no C compiler was found"), ("false", "false failed")]
)
def test_without_a_compiler_the_build_logs_it_and_compiles_no_library(
    tmp_path: Path, compiler: str, why: str
) -> None:
    code = (
        "import sys; sys.path.insert(0, 'scripts'); from pathlib import Path; from compile import NATIVE, compile_library;"
        f"print(compile_library(NATIVE / 'kernels.c', Path({str(tmp_path / 'lib.so')!r})))"
    )
    (tmp_path / "lib.so").write_bytes(b"of before")
    environment = {**os.environ, "CC": compiler}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.startswith(why)
    assert os.listdir(tmp_path) == []
