"""A read error ends a loop before the first batch that needs unreadable bytes, and not earlier."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wdstrain as wt
from tests.conftest import keys_of, write_shards

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


@contextmanager
def cut(index: wt.Index, number: int) -> Iterator[set[str]]:
    """Cut a shard in the middle of a sample for a while. Yields the keys beyond."""
    shard = Path(index.shards[number // 60].path)
    whole = shard.read_bytes()
    os.truncate(shard, int(index.offsets.start[number]) + 700)
    yield {f"k{i:04d}" for i in range(number, number - number % 60 + 60)}
    shard.write_bytes(whole)


def cases() -> list[Any]:
    """Return random settings with every kind and number of workers."""
    bits, settings = random.Random(1), []
    for number in range(14):
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
        kind, start = list(KINDS)[number // 3 % 4], bits.choice([0, 0, 1, 3])
        settings.append((kind, options, bits.randrange(COUNT), start))
    return settings


@pytest.mark.parametrize(("kind", "options", "at", "start"), cases())
def test_every_batch_before_a_read_error_is_delivered_and_a_resume_delivers_the_others(
    packed: Path, kind: str, options: dict[str, Any], at: int, start: int
) -> None:
    """Equal for any workers, fields, lanes and window; the state counts delivered batches."""
    with wt.Loader(packed, **options) as whole:
        epochs = keys_of(whole.epoch(0, start=start)) + keys_of(whole.epoch(1))
    loader, delivered, error = wt.Loader(packed, **options, **KINDS[kind]), list[list[str]](), ""
    with cut(loader.index, at) as lost:
        expected = list(takewhile(lambda keys: not lost & set(keys), epochs))
        try:
            for batch in chain(loader.epoch(0, start=start), loader.epoch(1)):
                delivered.append(batch["__key__"])
        except wt.ShardError as problem:
            error = str(problem)
        state = loader.state_dict()
        loader.close()
    assert delivered == expected
    assert ("ends at offset" in error) == (len(expected) < len(epochs))
    assert (state["epoch"], state["step"]) == divmod(start + len(delivered), len(whole))
    with wt.Loader(packed, **options, **KINDS[kind]) as rest:  # the shard is complete again
        rest.load_state_dict(state)
        after = keys_of(rest)
    assert len(after) == len(whole) - state["step"]
    assert not error or after == epochs[len(delivered) :][: len(after)]


def test_an_unexpected_error_of_a_reading_thread_raises_where_samples_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
