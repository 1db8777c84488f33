"""Samples are verified against the checksums of the index while they are read."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wdstrain as wt
from tests.conftest import picture
from tests.support.indexes import with_column
from tests.support.readers import collected_batches
from tests.support.servers import serving
from wdstrain.memory import Memory
from wdstrain.reader.fetch import damaged_samples
from wdstrain.shards.index import Index
from wdstrain.shards.offsets import Ints
from wdstrain.storage.cache import Cache
from wdstrain.storage.remote import range_size

COUNT = 60
WEIGHTS = [number % 3 for number in range(COUNT)]


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """A folder of samples of one to three fields."""
    texts = ({"txt": "words " * 20 * i} if i % 3 else {} for i in range(COUNT))
    samples = (
        {"__key__": f"k{i:03d}", "png": picture(i), "cls": i % 7} | text
        for i, text in enumerate(texts)
    )
    wt.pack(samples, str(tmp_path / "set"), shuffle=False, max_shard_samples=20)
    return tmp_path / "set"


def flip(folder: Path, number: int, field: str) -> None:
    """Flip a byte of a field."""
    index = wt.open(folder)
    shard = index.shards[int(index.shard_of(np.array([number]))[0])]
    offset = next(start + size - 1 for name, start, size in index.members(number) if name == field)
    with open(shard.path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def damaged_ids(urls: Any, step: int = 0, weights: Any = None, **options: Any) -> list[int]:
    """Return the ids of the samples of an epoch that the reader calls damaged."""
    loader = wt.Loader(urls, batch_size=4, shuffle_buffer=8, weights=weights)
    damaged = list[int]()
    for _, _, batch in collected_batches(loader.index, loader.plan, step, **options):
        damaged += batch.ids[list(batch.bad)].tolist()
        assert all("crc32" in reason for _, reason in batch.bad.values())
    return sorted(damaged)


def test_damaged_samples_are_found_when_they_are_read_and_no_others(packed: Path) -> None:
    """Reads that skip samples, because of weights or a resume, verify too."""
    for step, weights, fields in product((0, 7), (None, WEIGHTS), (None, {"png", "cls"}, {"cls"})):
        assert damaged_ids(packed, step, weights, needed_fields=fields) == []
    for number in (7, 8, 41):
        flip(packed, number, "cls")
    flip(packed, 20, "png")
    assert damaged_ids(packed) == [7, 8, 20, 41]
    assert damaged_ids(packed, needed_fields={"cls"}) == [7, 8, 41]
    assert damaged_ids(packed, weights=WEIGHTS) == [7, 8, 8, 20, 20, 41, 41]


def test_samples_that_are_larger_than_a_request_are_verified(tmp_path: Path) -> None:
    sizes = [1 << 20, 1 << 20, range_size(0) + 5000, *[1 << 20] * 9]
    samples = ({"__key__": f"k{i:02d}", "bin": bytes(size)} for i, size in enumerate(sizes))
    wt.pack(samples, str(tmp_path / "set"), shuffle=False)
    for number in (2, 5):
        flip(tmp_path / "set", number, "bin")
    with serving(tmp_path / "set") as server:
        assert damaged_ids(server.url) == [2, 5]
        for _ in range(2):  # the second pass reads from the cache
            assert damaged_ids(server.url, cache=Cache(str(tmp_path / "cache"))) == [2, 5]


@pytest.mark.parametrize("gap", [False, True], ids=["whole reads", "reads with gaps"])
def test_bytes_that_are_intact_when_they_are_read_again_are_delivered(
    packed: Path, gap: bool
) -> None:
    served_once = set[str]()

    def damaged(handler: Any, path: Path, start: int, stop: int) -> bool:
        if path.suffix != ".tar" or path.name in served_once:
            return False
        served_once.add(path.name)
        data = bytearray(path.read_bytes()[start:stop])
        data[::1000] = bytes(byte ^ 1 for byte in data[::1000])
        handler.send_response(206)
        handler.send_header("Content-Range", f"bytes {start}-{stop - 1}/{path.stat().st_size}")
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)
        return True

    weights = WEIGHTS if gap else None
    index = wt.open(packed)
    expected = {number: index[number] for number in range(COUNT)}
    with serving(packed) as server:
        server.faults += [damaged] * 1000
        loader = wt.Loader(server.url, batch_size=4, weights=weights, tail="keep", shuffle=not gap)
        delivered = 0
        for batch in loader.epoch(0, until=1):
            for row, key in enumerate(batch["__key__"]):
                sample = expected[int(key[1:])]
                assert {name: batch[name][row] for name in sample} == sample
                delivered += 1
        assert delivered == (sum(WEIGHTS) if gap else COUNT)
        assert loader.report()["reread"] > 0
        assert loader.report()["bad"] == 0
        loader.close()


@pytest.mark.parametrize("fields", [None, {"image": wt.image(size=16), "cls": wt.text("cls")}])
@pytest.mark.parametrize("is_remote", [False, True])
def test_a_changed_byte_of_a_needed_field_raises_at_any_step(
    packed: Path, fields: Any, is_remote: bool
) -> None:
    for number in range(COUNT):
        flip(packed, number, "cls")
    with serving(packed) as server:
        urls = server.url if is_remote else packed
        with wt.Loader(urls, fields, batch_size=8, shuffle_buffer=16) as loader:
            for step in range(0, len(loader), 2):
                with pytest.raises(wt.SampleError, match=r"'cls' at offset \d+: .*crc32"):
                    next(loader.epoch(0, start=step))
        with wt.Loader(urls, {"image": wt.image(size=16)}, batch_size=8, tail="keep") as others:
            assert sum(len(batch["image"]) for batch in others) == COUNT


def first_shard(index: Index) -> tuple[Memory, Ints]:
    """Return a memory with the bytes of the first shard, and the offsets of its samples."""
    memory, shard = Memory(100_000), Path(index.shards[0].path).read_bytes()
    memory.view[: len(shard)] = shard
    return memory, index.offsets.start[:20].copy()


def lying(index: Index, number: int, column: str, change: int) -> Index:
    """Return an index whose first field of one sample has another offset or size."""
    field = index.fields[0]
    offset, size, _ = index.offsets.extents[field]
    values = (offset if column == "offset" else size).to_pylist()
    values[number] += change
    return with_column(index, field, column, values)


@pytest.mark.parametrize(
    ("column", "change"),
    [("size", 1_000_000), ("size", -1_000_000), ("offset", -1_000_000), ("offset", 1_000_000)],
)
def test_a_field_beyond_the_memory_is_refused(packed: Path, column: str, change: int) -> None:
    """An index may claim any offset, and checksums read the memory by address."""
    index = wt.index(packed)
    memory, place = first_shard(index)
    with pytest.raises(ValueError, match="beyond its memory"):
        damaged_samples(lying(index, 3, column, change), None, memory, np.arange(20), place)
    place[7] = memory.size - 10
    with pytest.raises(ValueError, match="beyond its memory"):
        damaged_samples(index, None, memory, np.arange(20), place)
