"""Sets whose samples differ in size and share fit into the memory of a loader, for any settings."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wdstrain as wt
from tests.support.drawn_cases import check_block
from wdstrain.shards.offsets import Offsets


def sparse(folder: Path, name: str, sizes: Sequence[int]) -> wt.Index:
    """Write a sparse shard of samples of these sizes. Some end with their number in 8 bytes."""
    (folder / name).mkdir(parents=True)
    path, count = folder / name / "a.tar", len(sizes)
    size = np.array(sizes, np.int64)
    stop = np.cumsum(512 + -(-size // 512) * 512)
    start = stop - 512 - -(-size // 512) * 512
    with open(path, "wb") as file:
        every = 1 + count // 1000  # a hole takes no disk block
        for number, end in list(enumerate((start + 512 + size).tolist()))[::every]:
            os.pwrite(file.fileno(), b"%08d" % number, end - 8)
        file.truncate(int(stop[-1]) + 1024)
    extents = zip(start.tolist(), stop.tolist(), size.tolist(), strict=True)
    samples = (
        (f"{name}{number:06d}", first, last, [("bin", first + 512, length, 0)])
        for number, (first, last, length) in enumerate(extents)
    )
    shard = wt.Shard(str(path), count, path.stat().st_size)
    return wt.Index((shard,), Offsets.of_samples(samples))


def check(loader: wt.Loader, steps: int | None = None) -> None:
    """Check that every delivered sample is intact and occurs once."""
    seen = set[str]()
    for step, batch in enumerate(loader):
        assert len(batch["__key__"]) == loader.batch_size
        assert not seen.intersection(batch["__key__"])
        seen.update(batch["__key__"])
        for key, data in zip(batch["__key__"], batch["bin"], strict=True):
            assert data[-8:] in (bytes(8), b"%08d" % int(key[1:]))
        if step == steps:
            break
    loader.close()


def drawn(seed: int) -> tuple[dict[str, list[int]], dict[str, Any], int]:
    """Return (sizes of the samples of each source, options, steps) of one case."""
    bits = random.Random(seed)
    sets = dict[str, list[int]]()
    for name in "abcd"[: bits.choice([1, 2, 2, 3, 4])]:
        scale = bits.choice([10, 1000, 20_000, 200_000])
        kind, count = bits.choice(["alike", "wide", "two"]), bits.choice([3, 40, 400, 3000])
        count = min(count, 100_000_000 // scale)
        sets[name] = {
            "alike": [scale] * count,
            "wide": [int(scale * 2 ** bits.uniform(-3, 3)) + 8 for _ in range(count)],
            "two": [scale] * (count // 2) + [20 * scale] * min(40, count // 2),
        }[kind]
    lanes, world = bits.choice([1, 1, 2, 4]), bits.choice([1, 1, 2])
    options: dict[str, Any] = {
        "batch_size": lanes * bits.choice([1, 3, 8, 20]),
        "lanes": lanes * world,
        "rank": bits.randrange(world),
        "world_size": world,
        "shuffle": bits.random() < 0.8,
        "shuffle_buffer": bits.choice([1, 10, 100, 2000, None]),
        "seed": seed,
    }
    if len(sets) > 1 and bits.random() < 0.7:
        options["weights"] = {name: bits.choice([1, 1, 5, 50, 400]) for name in sets}
    return sets, options, bits.choice([20, 300])


def check_drawn(folder: Path, seed: int) -> None:
    sets, options, steps = drawn(seed)
    folders = {name: sparse(folder, name, sizes) for name, sizes in sets.items()}
    try:
        loader = (
            wt.mix(folders, **options) if len(folders) > 1 else wt.Loader(folders["a"], **options)
        )
    except wt.UsageError as error:
        if not any(words in str(error) for words in ("cannot", "gives no sample", "below 1/65536")):
            raise
        return
    check(loader, steps)


@pytest.mark.parametrize("seed", range(12))
def test_random_sets_and_settings_fit_into_memory(tmp_path: Path, seed: int) -> None:
    check_drawn(tmp_path, seed)


@pytest.mark.slow
def test_many_random_sets_and_settings_fit_into_memory(tmp_path: Path) -> None:
    check_block(lambda seed, folder: check_drawn(folder, seed), 0, 50, tmp_path)
