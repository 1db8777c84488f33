"""Samples are compared with the checksums of the index while they are read."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wdstrain as wt
from tests.conftest import picture, write_shards
from tests.support.servers import serving
from wdstrain.memory.shared import Memory
from wdstrain.native import kernels
from wdstrain.order.plan import Plan
from wdstrain.reader.reader import Reader
from wdstrain.reader.resources import ReadOptions
from wdstrain.reader.step_blocks import step_blocks
from wdstrain.reader.verifier import ReadVerifier, VerifiedRing
from wdstrain.shards.index import Index
from wdstrain.shards.resolve import open_index
from wdstrain.storage.block_map import BLOCK
from wdstrain.storage.shard_cache import Cache

COUNT = 60
FIELDS = {"image": wt.image(size=16), "label": wt.label()}


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A folder of samples of one to three fields."""
    samples = (
        {"__key__": f"k{i:03d}", "png": picture(i), "cls": i % 7}
        | ({"txt": "words " * 20 * i} if i % 3 else {})
        for i in range(COUNT)
    )
    wt.pack(samples, str(tmp_path / "set"), shuffle=False, shard_samples=20)
    return tmp_path / "set"


def flip(folder: Path, number: int, field: str) -> None:
    """Change a byte of a field."""
    index = open_index(folder)
    shard = index.shards[int(index.shard_of(np.array([number]))[0])]
    offset = next(
        offset + size - 1 for name, offset, size in index.members(number) if name == field
    )
    with open(shard.path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def keys(loader: wt.Loader) -> list[str]:
    """Return the sorted keys of an epoch."""
    delivered = sorted(key for batch in loader for key in batch["__key__"])
    loader.close()
    return delivered


def unverified_ids(index: Index, step: int = 0, **options: Any) -> list[int]:
    """Return the ids of the samples of an epoch that the reader does not verify. options: its."""
    plans = partial(Plan, counts=index.counts, seed=0, batch_size=4, window=8)
    reader = Reader(
        index, lambda epoch: plans(epoch=epoch), 0, ReadOptions(ahead=1, in_flight=1, **options)
    )
    reader.start(0, 0, step, until=1)
    unverified, batch_number = list[int](), 0
    try:
        for block in step_blocks(plans(epoch=0), 0, step):
            for number in range(len(block)):
                batch = reader.collect(block, number)
                if batch.unverified is not None:
                    unverified += batch.ids[batch.unverified].tolist()
                reader.release(batch_number)
                batch_number += 1
    finally:
        reader.close()
    return sorted(unverified)


@pytest.mark.parametrize(
    "fields", [None, {"png", "cls"}, {"cls"}], ids=["bytes", "pictures", "labels"]
)
def test_sound_samples_are_verified_while_they_are_read(
    made: Path, fields: set[str] | None
) -> None:
    assert unverified_ids(open_index(made), needed_fields=fields) == []


def test_samples_of_damaged_bytes_are_not_verified(made: Path) -> None:
    for number in (7, 8, 41):
        flip(made, number, "cls")
    flip(made, 20, "png")
    assert unverified_ids(open_index(made)) == [7, 8, 20, 41]
    assert unverified_ids(open_index(made), needed_fields={"cls"}) == [7, 8, 41]


def test_samples_in_two_remote_requests_are_not_verified(tmp_path: Path) -> None:
    """Samples larger than a request, and those across a block of the cache."""
    sizes = [1 << 20, 1 << 20, BLOCK + 5000, *[1 << 20] * 9]
    samples = ({"__key__": f"k{i:02d}", "bin": bytes(size)} for i, size in enumerate(sizes))
    wt.pack(samples, str(tmp_path / "set"), shuffle=False)
    with serving(tmp_path / "set") as server:
        index = open_index(server.url)
        assert unverified_ids(index) == [2]
        members = [index.members(number)[0] for number in range(len(index))]
        crossing = [
            number
            for number, (_, offset, size) in enumerate(members)
            if offset // BLOCK != (offset + size - 1) // BLOCK
        ]
        assert len(crossing) > 2
        for _ in range(2):  # the second time from the cache
            assert unverified_ids(index, cache=Cache(str(tmp_path / "cache"))) == crossing


@pytest.mark.parametrize("fields", [None, FIELDS], ids=["bytes", "pictures"])
@pytest.mark.parametrize("start", [0, 3])
@pytest.mark.parametrize("far", [False, True])
def test_a_changed_byte_is_an_error_at_any_step(
    made: Path, fields: Any, start: int, far: bool
) -> None:
    """Also in the middle of an epoch, where some samples of a read were delivered before."""
    for number in range(COUNT):
        flip(made, number, "cls")
    with serving(made) as server:
        loader = wt.Loader(server.url if far else made, fields, batch_size=8, shuffle_buffer=16)
        for step in range(start, len(loader)):
            with pytest.raises(wt.SampleError, match=r"'cls' at offset \d+: .*crc32"):
                next(loader.epoch(0, start=step))
        loader.close()


def test_only_needed_fields_are_verified(made: Path) -> None:
    for number in range(COUNT):
        flip(made, number, "png")
    assert len(keys(wt.Loader(made, {"label": wt.label()}, batch_size=8, tail="keep"))) == COUNT
    loader = wt.Loader(made, FIELDS, batch_size=8)
    with pytest.raises(wt.SampleError, match=r"'png' at offset \d+"):
        next(iter(loader))
    loader.close()


def test_an_index_without_checksums_verifies_nothing(tmp_path: Path) -> None:
    shards = write_shards(tmp_path, [COUNT])
    assert unverified_ids(open_index(shards)) == []
    assert len(keys(wt.Loader(shards, batch_size=8, tail="keep"))) == COUNT


# --- the verifier of one read -----------------------------------------------------------------------


@pytest.fixture(params=["in C", "in Python"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "in Python":
        monkeypatch.setattr(kernels, "library", None)
    elif kernels.library is None:
        pytest.skip("kernels.c was not compiled")


def verifier_of(
    index: Index, memory: Memory, number: int, offsets: Any, fields: Any = None
) -> ReadVerifier:
    """Return the verifier of a read of samples from `number` on, at these offsets of the memory."""
    mask, places = index.field_mask(fields), np.arange(len(offsets))
    return ReadVerifier(index.table, mask, memory, number, offsets, places)


def first_shard(index: Index) -> tuple[Memory, Any]:
    """Return a memory with the bytes of the first shard, and the offsets of its samples."""
    memory, shard = Memory(100_000), Path(index.shards[0].path).read_bytes()
    memory.view[: len(shard)] = shard
    return memory, index.table.start[:20].copy()


@pytest.mark.parametrize(
    ("column", "change"),
    [
        ("member_size", 1_000_000),
        ("member_size", -1_000_000),
        ("member_offset", -1_000_000),
        ("member_offset", 1_000_000),
    ],
)
@pytest.mark.usefixtures("way")
def test_a_field_beyond_the_memory_is_refused(made: Path, column: str, change: int) -> None:
    """An index may claim any offset; checksums read the memory by address."""
    index = open_index(made)
    memory, offsets = first_shard(index)
    changed = getattr(index.table, column).copy()
    changed[3] += change
    lying = replace(index, table=replace(index.table, **{column: changed}))
    with pytest.raises(ValueError, match="beyond its memory"):
        verifier_of(lying, memory, 0, offsets)
    offsets[7] = memory.size - 10
    with pytest.raises(ValueError, match="beyond its memory"):
        verifier_of(index, memory, 0, offsets)


@pytest.mark.usefixtures("way")
def test_a_field_outside_its_sample_is_not_verified(made: Path) -> None:
    index = open_index(made)
    memory, offsets = first_shard(index)
    changed = index.table.member_offset.copy()
    changed[3] += 700
    lying = replace(index, table=replace(index.table, member_offset=changed))
    verifier = verifier_of(lying, memory, 0, offsets)
    verifier.job.update()
    sample = int(np.searchsorted(index.table.member_first, 3, side="right")) - 1
    assert sample in verifier.unverified_rows()


@pytest.mark.parametrize("names", [["png", "cls", "txt"], ["txt"], ["cls"], []])
@pytest.mark.usefixtures("way")
def test_samples_are_verified_if_all_needed_fields_are_sound(made: Path, names: list[str]) -> None:
    """Samples with different fields, in reverse order in the memory."""
    index = open_index(made)
    whole = Path(index.shards[0].path).read_bytes()
    number, count, table, memory = 5, 12, index.table, Memory(100_000)
    sizes = (table.stop - table.start)[number : number + count][::-1]
    offsets = (sizes.cumsum() - sizes)[::-1]
    for i, offset in zip(range(number, number + count), offsets.tolist(), strict=True):
        memory.view[offset : offset + table.stop[i] - table.start[i]] = whole[
            table.start[i] : table.stop[i]
        ]
    extent = int(table.stop[number + count - 1] - table.start[number])
    verifier = verifier_of(index, memory, number, offsets, names)
    verifier.job.update(0, extent)
    assert verifier.unverified_rows().tolist() == []
    for name, offset, size in index.members(9):
        position = int(offsets[9 - number] + offset - table.start[9]) + size // 2
        memory.view[position] ^= 255
        verifier = verifier_of(index, memory, number, offsets, names)
        verifier.job.update(0, extent)
        assert verifier.unverified_rows().tolist() == ([4] if name in names else [])
        memory.view[position] ^= 255


@pytest.mark.usefixtures("way")
def test_a_sample_is_verified_when_it_is_complete(made: Path) -> None:
    """A field that comes in two parts is not verified."""
    index = open_index(made)
    memory, offsets = first_shard(index)
    ends = (index.table.stop[:20] - index.table.start[0]).tolist()
    verifier = verifier_of(index, memory, 0, offsets)

    def unverified() -> list[int]:
        return sorted(set(verifier.unverified_rows().tolist()))

    verifier.job.update(0, ends[3] - 1024)  # of padding and a part of the last field
    assert unverified() == list(range(3, 20))
    verifier.job.update(ends[3] - 1024, ends[9] + 5)
    assert unverified() == list(range(10, 20))
    verifier = verifier_of(index, memory, 0, offsets)
    _, field_offset, size = index.members(10)[0]
    middle = field_offset + size // 2 - int(index.table.start[0])
    first, second = verifier.job.within(0, middle), verifier.job.within(middle, ends[19])
    second.update(0, ends[19] - middle)
    first.update(0, middle)
    assert unverified() == [10]


def test_a_ring_keeps_the_last_record_of_each_place() -> None:
    ring = VerifiedRing(20)
    ring.record(np.arange(10), np.zeros(0, np.int64))
    assert not ring.any_unverified
    ring.record(np.arange(10, 14), np.array([1, 3]))
    ring.record(np.arange(4, 7))
    assert ring.any_unverified
    assert np.flatnonzero(ring.unverified(np.arange(20))).tolist() == [4, 5, 6, 11, 13]
    assert ring.unverified(np.array([24, 33, 34])).tolist() == [True, True, False]
    ring.record(np.arange(4, 12), np.array([0]))
    assert np.flatnonzero(ring.unverified(np.arange(20))).tolist() == [4, 13]
