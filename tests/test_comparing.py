"""What came is compared with the index while it comes, and what is sound is not compared again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wdstrain as wt
from tests.conftest import picture, write_shards
from tests.servers import serving, small_and_quick
from wdstrain import tasks
from wdstrain.comparing import Expected
from wdstrain.memory import Memory

COUNT = 60
FIELDS = {"image": wt.image(size=16), "label": wt.label()}


@pytest.fixture
def doubtful(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many members of each batch its decoder has to compare."""
    found: list[int] = []
    original = tasks.Laid.task

    def recorded(self: tasks.Laid, *words: Any, **named: Any) -> Any:
        task = original(self, *words, **named)
        found.append(len(task.doubtful))
        return task

    monkeypatch.setattr(tasks.Laid, "task", recorded)
    return found


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """Samples of one to three fields."""
    samples = (
        {"__key__": f"k{i:03d}", "png": picture(i), "cls": i % 7} | ({"txt": "words " * 20 * i} if i % 3 else {})
        for i in range(COUNT)
    )
    wt.pack(samples, str(tmp_path / "set"), shuffle=False, shard_samples=20)
    return tmp_path / "set"


def flip(folder: Path, number: int, field: str) -> None:
    """Change a byte of a field."""
    index = wt.index(folder)
    shard = index.shards[int(index.shard_of(np.array([number]))[0])]
    offset = next(offset + size - 1 for name, offset, size in index.members(number) if name == field)
    with open(shard.path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def keys(loader: wt.Loader) -> list[str]:
    found = sorted(key for batch in loader for key in batch["__key__"])
    loader.close()
    return found


@pytest.mark.parametrize("fields", [None, FIELDS, {"label": wt.label()}], ids=["bytes", "pictures", "labels"])
@pytest.mark.parametrize("workers", [0, 2])
def test_decoders_compare_nothing_of_what_was_read_sound(made: Path, doubtful: list[int], fields: Any, workers: int) -> None:
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


@pytest.mark.parametrize("fields", [None, FIELDS], ids=["bytes", "pictures"])
@pytest.mark.parametrize("start", [0, 3])
@pytest.mark.parametrize("far", [False, True])
def test_a_changed_byte_is_found_wherever_reading_begins(made: Path, fields: Any, start: int, far: bool) -> None:
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


def test_fields_that_do_not_follow_one_another_are_left_to_decoders(made: Path) -> None:
    """No writer of ours makes such an index; when all of a field came would not be known in time."""
    index, ids = wt.index(made), np.arange(20)
    offsets, memory = index.table.start[:20], Memory(1_000_000)
    assert Expected(index.table, index.among(None), ids, memory).at(0, 20, offsets) is not None
    swapped = index.table.member_offset.copy()
    swapped[[3, 4]], sizes = swapped[[4, 3]], index.table.member_size.copy()
    sizes[[3, 4]] = sizes[[4, 3]]
    odd = Expected(replace(index.table, member_offset=swapped, member_size=sizes), index.among(None), ids, memory)
    number = int(np.searchsorted(index.table.member_first, 4, side="right")) - 1  # the sample in which they are
    assert odd.at(0, 20, offsets) is None
    assert odd.at(number + 1, 20, offsets[number + 1 :]) is not None


@pytest.mark.parametrize(
    ("part", "by"), [("member_size", 1_000_000), ("member_size", -1_000_000), ("member_offset", -1_000_000)]
)
def test_no_index_leads_out_of_the_memory_of_what_is_compared(made: Path, part: str, by: int) -> None:
    index = wt.index(made)
    lying = getattr(index.table, part).copy()
    lying[3] += by
    with pytest.raises(ValueError, match="beyond its sample"):
        Expected(replace(index.table, **{part: lying}), index.among(None), np.arange(20), Memory(1_000_000))


@pytest.mark.parametrize("compared", [["png", "cls", "txt"], ["txt"], ["cls"], []])
def test_samples_are_sound_where_all_that_is_compared_is(made: Path, compared: list[str]) -> None:
    """Whatever fields they have, in whatever order they were put down."""
    index = wt.index(made)
    whole = b"".join(Path(shard.path).read_bytes() for shard in index.shards[:1])
    ids, first = np.arange(COUNT), 5
    stop, table, memory = 17, index.table, Memory(100_000)
    expected = Expected(table, index.among(compared), ids, memory)
    sizes = (table.stop - table.start)[first:stop][::-1]
    offsets = (sizes.cumsum() - sizes)[::-1].copy()
    comparison = expected.at(first, stop, offsets)
    assert comparison is not None
    assert comparison.sound.tolist() == [not any(n in compared for n, _, _ in index.members(i)) for i in range(first, stop)]
    for i, offset in zip(range(first, stop), offsets.tolist(), strict=True):
        memory.view[offset : offset + table.stop[i] - table.start[i]] = whole[table.start[i] : table.stop[i]]
    comparison.sums.take()
    assert comparison.sound.all()
    for name, offset, size in index.members(9):
        where = int(offsets[9 - first] + offset - table.start[9]) + size // 2
        memory.view[where] ^= 255
        comparison.sums.take()
        assert np.flatnonzero(~comparison.sound).tolist() == ([4] if name in compared else [])
        memory.view[where] ^= 255
