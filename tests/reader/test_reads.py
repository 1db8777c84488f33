"""The list of reads: each sample is read once for each row, in reads that go forward in a shard."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import wdstrain as wt
from tests.conftest import write_tar
from wdstrain.reader import reads as module
from wdstrain.reader.reads import GAP, Read, reads

COUNT = 300


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> wt.Index:
    """Shards of samples of some bytes, and a few large ones."""
    folder, number = tmp_path_factory.mktemp("set"), 0
    for shard, count in enumerate([90, 1, 150, 59]):
        samples = []
        for _ in range(count):
            size = 1_200_000 if number % 40 == 7 else number % 900
            samples.append((f"k{number:04d}", {"bin": b"%d," % number * (size // 4 + 1)}))
            number += 1
        write_tar(folder / f"s-{shard}.tar", samples)
    return wt.index(folder)


def test_a_loader_of_300_megabytes_per_second_sends_3000_requests_in_5_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Hugging Face Hub allows no more. A loader reads 90 GB in this time: 900 shards of 100 MB."""
    monkeypatch.delenv("WDSTRAIN_RANGE_SIZE", raising=False)
    samples = [(f"k{number:03d}", {"bin": bytes(999_000)}) for number in range(100)]
    write_tar(tmp_path / "s.tar", samples)
    index = wt.index(tmp_path)
    far = replace(index.shards[0], path="http://server/s.tar")
    loader = wt.Loader(replace(index, shards=(far,)), batch_size=4)
    planned = list(reads(loader.index, loader.plan, 0, 0, 0, until=900))
    assert sum(read.stop - read.start for read in planned) > 89e9
    assert len(planned) < 3000
    # The first batch waits for no other range than before: six are in flight.
    assert max(read.stop - read.start for read in planned[:6]) < 5_000_000


def check_read(index: wt.Index, read: Read) -> None:
    """Check places, sizes and gaps of one read."""
    start, stop = index.offsets.start[read.ids], index.offsets.stop[read.ids]
    assert (read.start, read.stop) == (start[0], stop[-1])
    assert (read.size == stop - start).all()
    assert {index.shard_with(number) for number in read.ids.tolist()} == {read.shard}
    places = dict(zip(read.ids.tolist(), read.place.tolist(), strict=True))
    assert [places[number] for number in read.ids.tolist()] == read.place.tolist()
    end = 0
    for number, place in places.items():
        assert place == end
        end += int(index.offsets.size[number])
    assert end == read.nbytes
    assert read.has_gaps == (read.nbytes < read.stop - read.start)
    for before, after in pairwise(places):
        assert 0 <= index.offsets.start[after] - index.offsets.stop[before] <= GAP
    assert read.first_batch <= read.batch.min()


def settings(seed: int) -> dict[str, Any]:
    bits = random.Random(seed)
    return {
        "batch_size": bits.choice([1, 4, 12]),
        "lanes": bits.choice([2, 4]),
        "shuffle": bits.random() < 0.8,
        "shuffle_buffer": bits.choice([1, 7, 50, 1000]),
        "tail": bits.choice(["drop", "pad", "keep"]),
        "seed": seed,
        "rank": bits.randrange(2),
        "world_size": 2,
    } | ({"weights": [bits.choice([0, 0.4, 1, 3]) for _ in range(COUNT)]} if seed % 3 == 0 else {})


@pytest.mark.parametrize("seed", range(12))
def test_every_row_of_an_epoch_is_read_once(
    index: wt.Index, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = settings(seed)
    if options["batch_size"] * 2 % options["lanes"]:
        options["lanes"] = 2
    monkeypatch.setattr(module, "READ_SAMPLES", random.Random(seed).choice([3, 20, 4096]))
    loader = wt.Loader(index, **options)
    rank, step = options["rank"], random.Random(seed).randrange(len(loader))
    planned = reads(index, loader.plan, rank, 0, step, until=2)
    rows: dict[tuple[int, int], int] = {}
    for read in planned:
        check_read(index, read)
        assert len(set(read.ids.tolist())) <= module.READ_SAMPLES
        for number, batch, row in zip(read.ids, read.batch, read.row, strict=True):
            assert (batch, row) not in rows
            rows[int(batch), int(row)] = int(number)
    batch = 0
    for epoch, first in ((0, step), (1, 0)):
        for own in range(first, len(loader)):
            ids = loader.plan(epoch).delivery(rank, own, own + 1).ids.tolist()
            assert [rows.pop((batch, row)) for row in range(len(ids))] == ids
            batch += 1
    assert not rows
    loader.close()
