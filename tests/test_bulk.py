"""Many runs of memory at once: the same bytes and checksums with the compiled library and without it."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import wdstrain as wt
from tests.conftest import ROOT, picture
from wdstrain import bulk
from wdstrain.bulk import ALONE, JOINED, UNCHECKED, Places, checksums, of_samples
from wdstrain.memory import Memory

WAYS = [
    pytest.param(True, id="compiled", marks=pytest.mark.skipif(not bulk.COMPILED, reason="there was no C compiler")),
    pytest.param(False, id="piece by piece"),
]


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if not request.param:
        monkeypatch.setattr(bulk, "_library", None)
    return bool(request.param)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, bytes]]:
    data = np.random.default_rng(0).bytes(3_000_000)
    path = tmp_path_factory.mktemp("bulk") / "file"
    path.write_bytes(data)
    fd = os.open(path, os.O_RDONLY)
    yield fd, data
    os.close(fd)


def ints(*values: int) -> Any:
    return np.array(values, np.int64)


def filled(places: Places, fd: int, offset: int) -> int:
    """How many bytes came until there was no more to fill or to read."""
    before = places.left
    while places.left and (count := places.read(fd, offset + before - places.left)):
        assert count > 0
    return before - places.left


sizes = st.lists(st.one_of(st.integers(0, 700), st.sampled_from([0, 1, 262_143, 262_144, 262_145, 500_000])), max_size=40)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes=sizes, offset=st.integers(0, 3_000_100), order=st.randoms(use_true_random=False), data=st.data())
def test_runs_are_filled_in_order_and_compared(
    way: bool, file: tuple[int, bytes], sizes: list[int], offset: int, order: Any, data: st.DataObject
) -> None:
    """Wherever they lie, however large, up to the end of the file; nothing beside them is written to."""
    fd, whole = file
    laid = list(range(len(sizes)))
    order.shuffle(laid)
    start, upto = np.zeros(len(sizes), np.int64), [0, 0]
    of = ints(*(order.randrange(2) for _ in sizes))
    for i in laid:
        start[i] = upto[of[i]] + order.randrange(9)
        upto[of[i]] = int(start[i]) + sizes[i]
    memories = [Memory(upto[0] + 10), Memory(upto[1] + 10)]
    kinds = [data.draw(st.sampled_from([UNCHECKED, ALONE, JOINED] if i else [UNCHECKED, ALONE])) for i in range(len(sizes))]
    places = Places(memories, of, start, ints(*sizes), np.array(kinds, np.uint8))
    there = whole[offset : offset + sum(sizes)]
    assert filled(places, fd, offset) == len(there)
    at, expected, image = 0, list[int](), [bytearray(one.size) for one in memories]
    for i, size in enumerate(sizes):
        mine = there[at : at + size]
        at += size
        image[of[i]][start[i] : start[i] + len(mine)] = mine
        assert bytes(places.run(i))[: len(mine)] == mine
        before = expected[-1] if kinds[i] == JOINED else 0
        expected.append(zlib.crc32(mine, before) if kinds[i] != UNCHECKED and len(mine) == size else 0)
    assert [bytes(one.view) for one in memories] == [bytes(one) for one in image]
    if len(there) == sum(sizes):
        assert places.crc.tolist() == expected


def test_more_runs_than_one_call_of_the_system_takes(way: bool, file: tuple[int, bytes]) -> None:
    fd, whole = file
    memory, count = Memory(100_000), 20_000
    size = np.full(count, 5)
    places = Places([memory], np.zeros(count, np.int64), np.arange(count)[::-1] * 5, size, np.full(count, ALONE, np.uint8))
    assert filled(places, fd, 17) == 100_000
    assert bytes(memory.view) == b"".join(whole[17 + at : 22 + at] for at in range(99_995, -1, -5))
    assert places.crc.tolist() == [zlib.crc32(whole[17 + at : 22 + at]) for at in range(0, 100_000, 5)]


def test_parts_of_places_are_filled_apart(way: bool, file: tuple[int, bytes]) -> None:
    fd, whole = file
    memory = Memory(400)
    places = Places([memory], ints(0, 0, 0, 0), ints(300, 200, 100, 0), np.full(4, 100), np.full(4, ALONE, np.uint8))
    parts = places.part(2, 4), places.part(0, 2)
    for part, offset in zip(parts, (200, 0), strict=True):
        assert filled(part, fd, offset) == 200
    assert bytes(memory.view) == whole[300:400] + whole[200:300] + whole[100:200] + whole[:100]
    assert parts[0].crc.tolist() == [zlib.crc32(whole[200:300]), zlib.crc32(whole[300:400])]


@pytest.mark.parametrize("gaps", [[0, 0], [5, 0], [0, 1000], [1024, 2500]])
def test_what_lies_between_samples_is_for_nobody(way: bool, file: tuple[int, bytes], gaps: list[int]) -> None:
    fd, whole = file
    arena, rows, nobody = Memory(1000), Memory(1000), Memory(1000)
    lie = ints(0, 50 + gaps[0], 100 + gaps[0] + gaps[1]) + 7
    start = np.stack((np.arange(3) * 20, np.arange(3)[::-1] * 30), axis=1)
    places, first = of_samples(
        (arena, rows, nobody), [0, 1], start, np.tile([20, 30], (3, 1)), lie, checked=[UNCHECKED, JOINED]
    )
    assert filled(places, fd, 7) == 150 + sum(gaps)
    samples = [whole[at : at + 50] for at in lie.tolist()]
    assert bytes(arena.view[:60]) == b"".join(one[:20] for one in samples)
    assert bytes(rows.view[:90]) == b"".join(one[20:] for one in reversed(samples))
    assert not any(arena.view[60:])
    assert not any(rows.view[90:])
    assert [bytes(places.run(i)) for i in first.tolist()] == [one[:20] for one in samples]
    assert [bytes(places.run(i + 1)) for i in first.tolist()] == [one[20:] for one in samples]


def test_checksums_are_those_of_zlib(way: bool) -> None:
    memory = Memory(3_000_000)
    memory.view[:] = np.random.default_rng(1).bytes(memory.size)
    start, size = ints(0, 5, 9, 2_999_999, 3_000_000, 100), ints(0, 1, 70_001, 1, 0, 2_000_000)
    for rows in (slice(0, 0), slice(0, 5), slice(0, 6)):  # of small ones and of large ones
        runs = zip(start[rows].tolist(), size[rows].tolist(), strict=True)
        assert checksums(memory, start[rows], size[rows]).tolist() == [zlib.crc32(memory.view[a : a + n]) for a, n in runs]
    strided = np.repeat(start, 2)[::2]
    assert checksums(memory, strided, np.repeat(size, 2)[::2]).tolist() == checksums(memory, start, size).tolist()


@pytest.mark.parametrize(
    ("start", "size"), [(-1, 5), (0, -1), (96, 5), (101, 0), (1 << 62, 1 << 62), ((1 << 63) - 1,) * 2, (1, -1 << 63)]
)
def test_no_run_leads_out_of_its_memory(way: bool, start: int, size: int) -> None:
    """What an index claims is an address to the system: it is refused before it is believed."""
    memory = Memory(100)
    run = ints(start), ints(size)
    with pytest.raises(ValueError, match="beyond the end"):
        checksums(memory, *run)
    with pytest.raises(ValueError, match="beyond the end"):
        Places([memory], ints(0), *run)


def test_what_cannot_be_read_is_an_error_of_the_system(way: bool, tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(IsADirectoryError):
            Places([Memory(10)], ints(0), ints(0), ints(10)).read(fd, 0)
    finally:
        os.close(fd)


def test_a_loader_gives_the_same_with_the_library_and_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays, pictures and bytes; sound, damaged, and where a shard ends too soon."""
    values = np.random.default_rng(2).integers(0, 255, (60, 40, 40), np.uint8)
    for name in ("sound", "damaged", "short"):
        samples = ({"__key__": f"k{i:03d}", "x.npy": values[i], "jpg": picture(i), "cls": i % 7} for i in range(60))
        wt.pack(samples, str(tmp_path / name), shuffle=False, shard_samples=20)
        shard = tmp_path / name / "train-000001.tar"
        data = bytearray(shard.read_bytes())
        for at in range(5000, len(data), 1997):
            data[at] ^= name == "damaged"
        shard.write_bytes(data[: len(data) // 2 if name == "short" else None])
    fields = {"x": wt.array("x.npy", shape=(40, 40), dtype="uint8"), "image": wt.image(size=16), "label": wt.label()}
    found = []
    for library in (bulk._library, None):
        monkeypatch.setattr(bulk, "_library", library)
        for name in ("sound", "damaged", "short"):
            for what in (fields, {"x": fields["x"]}, None):
                loader = wt.Loader(tmp_path / name, what, batch_size=7, on_bad="replace", max_bad=1.0, tail="drop")
                batches = [
                    {key: value if isinstance(value, list) else value.tolist() for key, value in b.items()} for b in loader
                ]
                found.append((batches, loader.report()["bad"], loader.report()["bad_reasons"]))
                loader.close()
    half = len(found) // 2
    assert found[:half] == found[half:]
    assert [bad > 0 for _, bad, _ in found[:half]] == [False] * 3 + [True] * 6


# --- the library -----------------------------------------------------------------------------------------------------


def test_a_library_of_another_source_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clone that was updated and not installed again has one whose functions may take other things."""
    if not bulk.COMPILED:
        pytest.skip("there was no C compiler")
    assert bulk._compiled(ctypes.CDLL) is not None
    (tmp_path / "bulk.c").write_text(Path(bulk.SOURCE).read_text() + "\n")
    monkeypatch.setattr(bulk, "SOURCE", str(tmp_path / "bulk.c"))
    assert bulk._compiled(ctypes.CDLL) is None


@pytest.mark.parametrize(("compiler", "why"), [("/nowhere/cc", "no C compiler was found"), ("false", "false failed")])
def test_without_a_compiler_nothing_is_compiled_and_it_is_said_why(tmp_path: Path, compiler: str, why: str) -> None:
    code = (
        "import sys; sys.path.insert(0, 'scripts'); from pathlib import Path; from compile import PACKAGE, compiled;"
        f"print(compiled(PACKAGE / 'bulk.c', Path({str(tmp_path / 'lib.so')!r})))"
    )
    (tmp_path / "lib.so").write_bytes(b"of before")
    environment = {**os.environ, "CC": compiler}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.startswith(why)
    assert os.listdir(tmp_path) == []
