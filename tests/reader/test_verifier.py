"""What came is compared with the index while it comes, and what is sound is not compared again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wdstrain as wt
from tests.conftest import picture, write_shards
from tests.support.servers import serving, small_and_quick
from wdstrain.loader import task_blocks
from wdstrain.memory.scatter import Bools, Ints
from wdstrain.memory.shared import Memory
from wdstrain.native import kernels
from wdstrain.reader.verifier import PackedChecksums, ReadVerifier, VerifiedRing
from wdstrain.shards.offsets import Offsets

COUNT = 60
FIELDS = {"image": wt.image(size=16), "label": wt.label()}


@pytest.fixture
def doubtful(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many members of each batch its decoder has to compare."""
    found: list[int] = []
    original = task_blocks.TaskBlock.task

    def recorded(self: task_blocks.TaskBlock, *words: Any, **named: Any) -> Any:
        task = original(self, *words, **named)
        found.append(len(task.members.unverified))
        return task

    monkeypatch.setattr(task_blocks.TaskBlock, "task", recorded)
    return found


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """Samples of one to three fields."""
    samples = (
        {"__key__": f"k{i:03d}", "png": picture(i), "cls": i % 7}
        | ({"txt": "words " * 20 * i} if i % 3 else {})
        for i in range(COUNT)
    )
    wt.pack(samples, str(tmp_path / "set"), shuffle=False, shard_samples=20)
    return tmp_path / "set"


def flip(folder: Path, number: int, field: str) -> None:
    """Change a byte of a field."""
    index = wt.index(folder)
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
    found = sorted(key for batch in loader for key in batch["__key__"])
    loader.close()
    return found


@pytest.mark.parametrize(
    "fields", [None, FIELDS, {"label": wt.label()}], ids=["bytes", "pictures", "labels"]
)
@pytest.mark.parametrize("workers", [0, 2])
def test_decoders_compare_nothing_of_what_was_read_sound(
    made: Path, doubtful: list[int], fields: Any, workers: int
) -> None:
    loader = wt.Loader(made, fields, batch_size=8, num_workers=workers, tail="keep")
    assert len(keys(loader)) == COUNT
    assert len(doubtful) >= 8
    assert not any(doubtful)


def test_of_a_server_nothing_is_compared_again_but_what_lies_in_two_requests(
    made: Path, doubtful: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request brings whole samples; but for those that are larger than it may be, and where a cache's blocks end."""
    with serving(made) as server:
        assert len(keys(wt.Loader(server.url, batch_size=8, tail="keep"))) == COUNT
        assert len(doubtful) >= 8
        assert not any(doubtful)
        small_and_quick(monkeypatch, 1 << 14)
        for options in ({}, {"cache_dir": made.parent / "cache"}):
            doubtful.clear()
            assert len(keys(wt.Loader(server.url, batch_size=8, tail="keep", **options))) == COUNT
            assert 0 < sum(doubtful) < COUNT


@pytest.mark.parametrize(
    "fields", [None, {"image": wt.image(size=16), "cls": wt.text("cls")}], ids=["bytes", "pictures"]
)
@pytest.mark.parametrize("start", [0, 3])
@pytest.mark.parametrize("far", [False, True])
def test_a_changed_byte_is_found_wherever_reading_begins(
    made: Path, fields: Any, start: int, far: bool
) -> None:
    """Also in the middle of an epoch, where some of what lies together was delivered before."""
    for number in range(COUNT):
        flip(made, number, "cls")
    with serving(made) as server:
        loader = wt.Loader(server.url if far else made, fields, batch_size=8, shuffle_buffer=16)
        for step in range(start, len(loader)):
            with pytest.raises(wt.SampleError, match=r"'cls' at offset \d+: .*crc32"):
                next(loader.epoch(0, start=step))
        loader.close()


def test_only_what_is_decoded_is_compared(made: Path) -> None:
    """A field that nobody asked for may be damaged."""
    for number in range(COUNT):
        flip(made, number, "png")
    assert len(keys(wt.Loader(made, {"label": wt.label()}, batch_size=8, tail="keep"))) == COUNT
    loader = wt.Loader(made, FIELDS, batch_size=8)
    with pytest.raises(wt.SampleError, match=r"'png' at offset \d+"):
        next(iter(loader))
    loader.close()


def test_an_index_without_checksums_compares_nothing(tmp_path: Path, doubtful: list[int]) -> None:
    shards = write_shards(tmp_path, [COUNT])
    assert len(keys(wt.Loader(shards, batch_size=8, tail="keep"))) == COUNT
    assert not any(doubtful)


def compared(
    table: Offsets,
    fields: Bools,
    memory: Memory,
    where: Ints,
    number: int,
    count: int,
    place: int = 0,
) -> tuple[VerifiedRing, ReadVerifier]:
    """Samples from `number` on that are compared, with places from `place` on and these offsets in the memory."""
    found = VerifiedRing(PackedChecksums(table, fields, memory), where)
    return found, found.compared(place, number, count)


def doubts(found: VerifiedRing, place: int, count: int) -> list[int]:
    """Which of them are not known to be sound, and whether this was to be expected."""
    doubtful = np.flatnonzero(found.unverified(np.arange(place, place + count))).tolist()
    assert found.any_unverified or not doubtful
    return doubtful


@pytest.fixture(params=["in C", "in Python"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "in Python":
        monkeypatch.setattr(kernels, "library", None)
    elif kernels.library is None:
        pytest.skip("kernels.c was not compiled")


@pytest.mark.parametrize(
    ("part", "by"),
    [
        ("member_size", 1_000_000),
        ("member_size", -1_000_000),
        ("member_offset", -1_000_000),
        ("member_offset", 1_000_000),
    ],
)
@pytest.mark.usefixtures("way")
def test_no_index_leads_out_of_the_memory_of_what_is_compared(
    made: Path, part: str, by: int
) -> None:
    index = wt.index(made)
    lying = getattr(index.offsets, part).copy()
    lying[3] += by
    memory, where = Memory(100_000), index.offsets.start[:20] - index.offsets.start[0]
    of = int(np.searchsorted(index.offsets.member_first, 3, side="right")) - 1
    shard = Path(index.shards[0].path).read_bytes()
    memory.view[: len(shard)] = shard
    found, comparison = compared(
        index.offsets.replaced(**{part: lying}), index.field_mask(None), memory, where, 0, 20
    )
    comparison.update(0, len(shard))
    comparison.settle()
    assert doubts(found, 0, 20) == [of]
    where[7] = memory.size - 10  # nor where it would be
    found, comparison = compared(index.offsets, index.field_mask(None), memory, where, 0, 20)
    comparison.update(0, len(shard))
    comparison.settle()
    assert doubts(found, 0, 20) == [7]


@pytest.mark.parametrize("names", [["png", "cls", "txt"], ["txt"], ["cls"], []])
@pytest.mark.usefixtures("way")
def test_samples_are_sound_where_all_that_is_compared_is(made: Path, names: list[str]) -> None:
    """Whatever fields they have, in whatever order they were put down, around the end of the ring."""
    index = wt.index(made)
    whole = Path(index.shards[0].path).read_bytes()
    number, count, place, table, memory = 5, 12, 17, index.offsets, Memory(100_000)
    sizes = (table.stop - table.start)[number : number + count][::-1]
    offsets = (sizes.cumsum() - sizes)[::-1]
    where = np.full(20, -1)
    where[np.arange(place, place + count) % 20] = offsets
    for i, offset in zip(range(number, number + count), offsets.tolist(), strict=True):
        memory.view[offset : offset + table.stop[i] - table.start[i]] = whole[
            table.start[i] : table.stop[i]
        ]
    extent = int(table.stop[number + count - 1] - table.start[number])
    found, comparison = compared(
        table, index.field_mask(names), memory, where, number, count, place
    )
    assert found.unverified(np.arange(place, place + count)).all()
    comparison.update(0, extent)
    comparison.settle()
    assert (doubts(found, place, count), found.any_unverified) == ([], False)
    for name, offset, size in index.members(9):
        at = int(offsets[9 - number] + offset - table.start[9]) + size // 2
        memory.view[at] ^= 255
        found, comparison = compared(
            table, index.field_mask(names), memory, where, number, count, place
        )
        comparison.update(0, extent)
        comparison.settle()
        assert doubts(found, place, count) == ([4] if name in names else [])
        memory.view[at] ^= 255


@pytest.mark.usefixtures("way")
def test_a_sample_is_compared_when_it_is_whole_and_not_where_it_comes_in_parts(made: Path) -> None:
    index, memory = wt.index(made), Memory(100_000)
    shard, table = Path(index.shards[0].path).read_bytes(), index.offsets
    memory.view[: len(shard)] = shard
    where = table.start[:20].copy()
    found, comparison = compared(table, index.field_mask(None), memory, where, 0, 20)
    ends = (table.stop[:20] - table.start[0]).tolist()
    comparison.update(0, ends[3] - 1)
    assert doubts_so_far(found) == list(range(3, 20))
    comparison.update(ends[3] - 1, ends[9] + 5)
    assert doubts_so_far(found) == list(range(10, 20))
    found, comparison = compared(table, index.field_mask(None), memory, where, 0, 20)
    middle = (ends[9] + ends[10]) // 2  # of the eleventh
    first, second = comparison.within(0, middle), comparison.within(middle, ends[19])
    second.update(0, ends[19] - middle)
    first.update(0, middle)
    assert doubts_so_far(found) == [10]
    comparison.settle()
    assert found.any_unverified


def doubts_so_far(found: VerifiedRing) -> list[int]:
    return np.flatnonzero(found.unverified(np.arange(20))).tolist()


@pytest.mark.usefixtures("way")
def test_what_is_read_once_more_into_the_same_places_is_not_believed(made: Path) -> None:
    index, memory = wt.index(made), Memory(100_000)
    shard = Path(index.shards[0].path).read_bytes()
    memory.view[: len(shard)] = shard
    found, comparison = compared(
        index.offsets, index.field_mask(None), memory, index.offsets.start[:20].copy(), 0, 20
    )
    comparison.update(0, len(shard))
    comparison.settle()
    assert not found.any_unverified
    found.not_compared(4, 3)
    assert doubts(found, 0, 20) == [4, 5, 6]
