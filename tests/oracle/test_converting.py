"""Random conversions: the contents of the shards are compared with a model of the source.

Every case is a function of its seed, which pytest prints as the name of the test:

    pytest tests/oracle/test_converting.py -k 17
"""

from __future__ import annotations

import hashlib
import multiprocessing
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import wdstrain as wt
from tests.oracle.data_set import read_tars
from tests.oracle.sources import Source, draw_source
from tests.support.drawn_cases import check_block

DEFAULT = 25  # cases of the default suite
BLOCK, BLOCKS = 60, 3  # cases of the slow part


@pytest.mark.parametrize("seed", range(DEFAULT))
def test_shards_of_a_random_source_contain_every_item_once(seed: int, tmp_path: Path) -> None:
    """This holds for bytes and labels, and after a killed conversion was resumed."""
    check_case(seed, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("block", range(BLOCKS))
def test_shards_of_more_random_sources_contain_every_item_once(block: int, tmp_path: Path) -> None:
    check_block(check_case, block, BLOCK, tmp_path)


def check_case(seed: int, folder: Path) -> None:
    rng = random.Random(seed)
    source = draw_source(rng, folder / "source")
    options = draw_options(rng)
    out = folder / "out"
    began = time.monotonic()
    try:
        index = source.convert(str(out), **options)
    except wt.WdstrainError:
        if source.items and "split" not in options:  # too few samples for a split, or none at all
            raise
        return
    took = time.monotonic() - began
    check_shards(source, out, index, options)
    after = rng.choice((check_kill, check_kill, check_jobs, check_change))
    after(rng, source, out, options, took)


def draw_options(rng: random.Random) -> dict[str, Any]:
    """Options of a conversion."""
    options: dict[str, Any] = {"seed": rng.choice((0, 7)), "shuffle": rng.random() < 0.7}
    if rng.random() < 0.5:
        options["max_shard_samples"] = rng.choice((1, 3, 10, 1000))
    if rng.random() < 0.3:
        options["max_shard_size"] = rng.choice((2_000, 20_000))
    if rng.random() < 0.4:
        options["split"] = rng.choice(({"train": 0.8, "val": 0.2}, {"a": 0.5, "b": 0.3, "c": 0.2}))
        options["stratify"] = "label" if rng.random() < 0.5 else None
    if rng.random() < 0.1:
        options["limit"] = rng.randrange(1, 20)
    return options


def check_shards(source: Source, out: Path, index: wt.Index, options: dict[str, Any]) -> None:
    """Compare all samples of the shards with the items of the source."""
    tars = sorted(out.glob("*.tar"))
    by_identity = {item.identity: item for item in source.items}
    assert len(by_identity) == len(source.items)
    seen, keys = Counter[bytes](), Counter[tuple[str, str]]()
    for path, key, fields in read_tars(tars):
        keys[path.name, key] += 1
        identity = next(fields[name] for name in source.field.split(";") if name in fields)
        assert identity in by_identity, f"{path.name}: {key} holds bytes which the source has not"
        seen[identity] += 1
        for name, data in by_identity[identity].fields.items():
            assert fields.get(name) == data, f"{path.name}: {key}.{name} differs"
    assert not keys or max(keys.values()) == 1, "a key comes twice in one shard"
    assert not seen or max(seen.values()) == 1, "an item was packed twice"
    expected = min(len(source.items), options.get("limit") or len(source.items))
    assert seen.total() == expected, f"{seen.total()} of {expected} items were packed"
    assert len(index) == expected
    if not options.get("limit"):
        assert index.info["skipped"] == source.bad
    if "max_shard_samples" in options:
        per_shard = Counter(name for name, _ in keys)
        assert max(per_shard.values()) <= options["max_shard_samples"]
    check_labels(source, out, index)


def check_labels(source: Source, out: Path, index: wt.Index) -> None:
    """Read every split with a loader and compare the labels by name."""
    by_identity = {item.identity: item for item in source.items}
    expected = {name for item in source.items for name in item.labels}
    if not expected:
        return
    assert {label.name for label in index.labels} == expected
    fields: dict[str, Any] = {}
    for label in index.labels:
        make = wt.number if label.kind == "number" else wt.label
        fields[label.name] = make(label.field, column=label.column)
    for split in {path.name.rpartition("-")[0] for path in out.glob("*.tar")}:
        pattern = str(out / f"{split}-*.tar")
        named = wt.Loader(pattern, fields, batch_size=16, shuffle=False, tail="keep")
        plain = wt.Loader(pattern, batch_size=16, shuffle=False, tail="keep")
        for batch, raw in zip(named, plain, strict=True):
            for row in range(len(raw["__key__"])):
                names = [name for name in source.field.split(";") if name in raw]
                identity = next(raw[name][row] for name in names if raw[name][row] is not None)
                for label in index.labels:
                    value = batch[label.name][row].item()
                    meant = by_identity[identity].labels[label.name]
                    if label.kind == "number":
                        assert abs(value - float(meant)) < 1e-6
                    else:
                        assert label.classes[value] == meant
        named.close()
        plain.close()


def contents(out: Path) -> dict[str, str]:
    """SHA-256 of the shards and the index, by name."""
    paths = [*out.glob("*.tar"), out / "index.json"]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def check_kill(
    rng: random.Random, source: Source, out: Path, options: dict[str, Any], took: float
) -> None:
    """Check that a conversion killed at a random moment and resumed writes the same bytes."""
    other = out.with_name("killed")
    fork = multiprocessing.get_context("fork")
    for _ in range(rng.choice((1, 1, 2))):
        process = fork.Process(
            target=source.convert, args=(str(other),), kwargs={**options, "resume": True}
        )
        process.start()
        process.join(rng.random() * took)
        process.kill()
        process.join()
    source.convert(str(other), **options, resume=True)
    assert contents(other) == contents(out)


def check_jobs(
    rng: random.Random, source: Source, out: Path, options: dict[str, Any], took: float
) -> None:
    """Check that two processes write the same bytes as one."""
    other = out.with_name("jobs")
    source.convert(str(other), **options, num_workers=2)
    assert contents(other) == contents(out)


def check_change(
    rng: random.Random, source: Source, out: Path, options: dict[str, Any], took: float
) -> None:
    """Check that `resume` returns a finished set for the same source, not for a changed one."""
    before = contents(out)
    resumed = source.convert(str(out), **options, resume=True)
    assert contents(out) == before
    assert len(resumed) > 0
    if source.change is None or "limit" in options:  # a change may be beyond the limit
        return
    source.change()
    with pytest.raises(wt.WdstrainError):
        source.convert(str(out), **options, resume=True)
    assert contents(out) == before
