"""A read error ends a loop before the first batch that needs unreadable bytes, and not earlier."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wdstrain as wt
from tests.conftest import write_shards

COUNT = 240  # samples, in 4 shards


def double(sample: dict[str, Any]) -> dict[str, Any]:
    return {"number": int(sample["id"])}


KINDS: dict[str, dict[str, Any]] = {
    "bytes": {},
    "fields": {"fields": {"text": wt.text("id")}},
    "transform": {"transform": double},
    "arrays": {
        "fields": {"x": wt.array("x.npy", shape=(40, 40), dtype="float32"), "text": wt.text("id")}
    },
}


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed")
    rows = (
        {"__key__": f"k{i:04d}", "id": str(i), "x.npy": np.full((40, 40), i, np.float32)}
        for i in range(COUNT)
    )
    wt.pack(rows, str(folder), max_shard_samples=60, shuffle=False)
    return folder


class Cut:
    """Context in which a shard ends in the middle of a sample."""

    def __init__(self, index: wt.Index, number: int) -> None:
        """number: the first sample that is incomplete."""
        self._shard = index.shards[number // 60]
        self._at = int(index.offsets.start[number]) + 700
        self.keys = {f"k{i:04d}" for i in range(number, number - number % 60 + 60)}

    def __enter__(self) -> Cut:
        with open(self._shard.path, "rb") as file:
            self._whole = file.read()
        os.truncate(self._shard.path, self._at)
        return self

    def __exit__(self, *_: object) -> None:
        with open(self._shard.path, "r+b") as file:
            file.write(self._whole)


def taken(batches: Iterator[dict[str, Any]], into: list[list[str]]) -> None:
    for batch in batches:
        into.append(batch["__key__"])


def cases(count: int, seed: int) -> list[Any]:
    """Return random settings with every kind and number of workers."""
    bits, settings = random.Random(seed), []
    for number in range(count):
        shuffle = bits.random() < 0.7
        lanes = bits.choice([1, 1, 2, 5])
        options = {
            "batch_size": bits.choice([1, 5, 10]) * lanes,
            "num_workers": number % 3,
            "shuffle": shuffle,
            "shuffle_buffer": bits.choice([1, 20, 100]) if shuffle else None,
            "tail": bits.choice(["drop", "pad", "keep"]),
            "lanes": lanes,
            "seed": number,
        }
        kind, cut, start = (
            list(KINDS)[number // 3 % 4],
            bits.randrange(COUNT),
            bits.choice([0, 0, 1, 3]),
        )
        settings.append(pytest.param(kind, options, cut, start, id=f"{number}-{kind}-{cut}"))
    return settings


def check(packed: Path, kind: str, options: dict[str, Any], cut: int, start: int) -> None:
    uninterrupted = wt.Loader(packed, **options)
    epochs = [
        batch["__key__"]
        for number, step in ((0, start), (1, 0))
        for batch in uninterrupted.epoch(number, start=step)
    ]
    uninterrupted.close()
    loader, delivered, error = wt.Loader(packed, **options, **KINDS[kind]), list[list[str]](), ""
    with Cut(loader.index, cut) as damage:
        expected = list(takewhile(lambda keys: not damage.keys & set(keys), epochs))
        try:
            taken(loader.epoch(0, start=start), delivered)
            taken(loader.epoch(1), delivered)
        except wt.ShardError as problem:
            error = str(problem)
        state = loader.state_dict()
        loader.close()
    assert delivered == expected
    assert ("ends at offset" in error) == (len(expected) < len(epochs))
    assert (state["epoch"], state["step"]) == divmod(start + len(delivered), len(uninterrupted))
    rest = wt.Loader(packed, **options, **KINDS[kind])  # the shard is complete again
    rest.load_state_dict(state)
    after = [batch["__key__"] for batch in rest]
    rest.close()
    assert len(after) == len(uninterrupted) - state["step"]
    assert not error or after == epochs[len(delivered) :][: len(after)]


@pytest.mark.parametrize(("kind", "options", "cut", "start"), cases(14, 1))
def test_every_batch_before_a_read_error_is_delivered(
    packed: Path, kind: str, options: dict[str, Any], cut: int, start: int
) -> None:
    """Equal for any workers, fields, lanes and window; the state counts delivered batches."""
    check(packed, kind, options, cut, start)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "options", "cut", "start"), cases(300, 2))
def test_every_batch_before_a_read_error_is_delivered_in_many_cases(
    packed: Path, kind: str, options: dict[str, Any], cut: int, start: int
) -> None:
    check(packed, kind, options, cut, start)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_mixture_delivers_every_batch_before_a_read_error(
    packed: Path, tmp_path: Path, num_workers: int
) -> None:
    rows = (
        {"__key__": f"o{i:04d}", "id": str(i), "x.npy": np.zeros((40, 40), np.float32)}
        for i in range(100)
    )
    wt.pack(rows, str(tmp_path / "other"))
    sets, options = (
        {"a": packed, "b": tmp_path / "other"},
        {"batch_size": 7, "shuffle_buffer": 50, "weights": {"a": 2, "b": 1}},
    )
    epoch = [batch["__key__"] for batch in wt.mix(sets, **options)]
    loader, delivered = (
        wt.mix(sets, {"text": wt.text("id")}, num_workers=num_workers, **options),
        list[list[str]](),
    )
    with Cut(loader.index, 150) as damage:
        with pytest.raises(wt.ShardError, match="ends at offset"):
            taken(iter(loader), delivered)
        loader.close()
    assert delivered == list(takewhile(lambda keys: not damage.keys & set(keys), epoch))


def test_an_unexpected_error_of_a_reading_thread_raises_where_samples_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batches of the shards before it have arrived and are delivered."""
    wt.index(write_shards(tmp_path, [40] * 4))
    loader, preadv, count = wt.Loader(tmp_path, batch_size=4, shuffle=False), os.preadv, 0

    def failing(fd: int, *arguments: Any) -> int:
        if os.readlink(f"/proc/self/fd/{fd}").endswith("part-002.tar"):
            raise RuntimeError("odd")
        return preadv(fd, *arguments)

    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(wt.WdstrainError, match="reading failed: RuntimeError"):
        for count, _ in enumerate(loader, 1):  # noqa: B007
            pass
    assert count == 20
    loader.close()
