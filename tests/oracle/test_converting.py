"""Random conversions: the contents of the shards are compared with a model of the source.

Every case is a function of its seed, which pytest prints as the name of the test:

    pytest tests/oracle/test_converting.py -k 17
"""

from __future__ import annotations

import hashlib
import multiprocessing
import random
import re
import tarfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import wdstrain as wt
from tests.oracle.data_set import add, read_tars
from tests.oracle.sources import Item, Source, draw_source
from tests.oracle.splits import check_stratified, empty_stratified_splits, splits_of_groups
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
    options = draw_options(rng, source)
    expected = refusal(source, options, folder)
    out = folder / "out"
    if expected is not None:
        with pytest.raises(wt.WdstrainError, match=expected):
            source.convert(str(out), **options)
        left = [path.name for path in out.glob("[!.]*") if path.name != "skipped.jsonl"]
        assert not left, f"a refused conversion left {left}"
        return
    began = time.monotonic()
    index = source.convert(str(out), **options)
    took = time.monotonic() - began
    check_shards(source, out, index, options)
    after = rng.choice((check_kill, check_kill, check_jobs, check_change))
    after(rng, source, out, options, took)


def draw_options(rng: random.Random, source: Source) -> dict[str, Any]:
    """Options of a conversion. The model knows of each whether it is refused."""
    options: dict[str, Any] = {"seed": rng.choice((0, 7)), "shuffle": rng.random() < 0.7}
    if rng.random() < 0.5:
        options["max_shard_samples"] = rng.choice((1, 3, 10, 1000))
    if rng.random() < 0.3:
        options["max_shard_size"] = rng.choice((2_000, 20_000))
    if rng.random() < 0.1:
        options["limit"] = rng.randrange(1, 20)
    if rng.random() < 0.6:
        options |= draw_split(rng, source, packed(source, options))
    elif rng.random() < 0.1:
        options |= source.grouping  # refused
    return options


SPLITS: tuple[dict[str, float], ...] = (
    {"train": 0.8, "val": 0.2},
    {"a": 0.5, "b": 0.3, "c": 0.2},
    {"a": 0.9, "b": 0.1},
    {"a": 0.5, "b": 0.25, "c": 0.15, "d": 0.1},
)


def draw_split(rng: random.Random, source: Source, count: int) -> dict[str, Any]:
    """Options of a split of `count` samples: by a hash, stratified, or by groups."""
    split = rng.choice(SPLITS)
    kind = rng.choice(("hash", "stratify", "stratify", "group", "both"))
    if kind in ("group", "both") and source.grouping and count == len(source.items):
        if splits_of_groups(groups_of(source), split) is None:
            split = {"a": 0.5, "b": 0.5}
        more = {"stratify": source.classes} if kind == "both" else {}
        return {"split": split, **more, **source.grouping}
    if kind == "hash":
        return {"split": split}
    if empty_stratified_splits(count, split) is None:
        split = {"a": 0.5, "b": 0.5}
    wrong = source.classes is None or rng.random() < 0.1
    return {"split": split, "stratify": "nothing" if wrong else source.classes}


def packed(source: Source, options: dict[str, Any]) -> int:
    """Number of samples that a conversion packs, if it is not refused."""
    return min(len(source.items), options.get("limit") or len(source.items))


def is_grouped(options: dict[str, Any]) -> bool:
    return "group" in options or "group_by" in options


def refusal(source: Source, options: dict[str, Any], folder: Path) -> str | None:
    """Return the words of the error that the documented rules expect; None if there is none."""
    split, stratify = options.get("split"), options.get("stratify")
    if source.refused:
        return source.refused
    if stratify == "nothing" and source.kind == "table":
        return "no column 'nothing'"
    if not source.items:
        return "no samples|were skipped|no row has"
    if stratify == "nothing":
        return "no such label of classes"
    if is_grouped(options) and not split:
        return "group(_by)? (needs|requires) .*split" if any_group(source) else None
    if not split:
        return None
    empty = set(split) - set(expected_splits(source, options, folder).values())
    count = packed(source, options)
    return f"the split '({'|'.join(empty)})' gets none of {count} samples" if empty else None


def any_group(source: Source) -> bool:
    """Return whether an item has a group; without that, no option asks for a split."""
    return any(item.group for item in source.items)


def groups_of(source: Source) -> dict[str, Counter[str]]:
    """Return the number of samples of each class, by group."""
    groups = dict[str, Counter[str]]()
    for item in source.items:
        name = str(item.labels[source.classes]) if source.classes else ""
        groups.setdefault(item.group, Counter())[name] += 1
    return groups


def expected_splits(source: Source, options: dict[str, Any], folder: Path) -> dict[Any, str]:
    """Return the split of each sample, or group, or place of a stratified set."""
    split = options["split"]
    if is_grouped(options) and any_group(source):
        assigned = splits_of_groups(groups_of(source), split)
        assert assigned is not None, "draw_split draws no such case"
        return dict(assigned)
    if options.get("stratify"):
        empty = empty_stratified_splits(packed(source, options), split)
        assert empty is not None, "draw_split draws no such case"
        return {name: name for name in split if name not in empty}
    return splits_of_keys(source, options, folder)


def splits_of_keys(source: Source, options: dict[str, Any], folder: Path) -> dict[str, str]:
    """Return the split of the key of each sample: "a sample stays in it when others are added".

    The keys are those of the same conversion without a split. They are packed once more, with
    other contents and among so many other keys that every split has samples.
    """
    if not (folder / "whole").exists():
        plain = {name: value for name, value in options.items() if name != "split"}
        source.convert(str(folder / "whole"), **plain)
    keys = keys_and_splits(folder / "whole")
    assert len(keys) == packed(source, options)
    if not (folder / "keys").exists():
        others = [f"other-{number}" for number in range(200)]
        pack_keys(
            [*dict.fromkeys(given_key(source, key) for key in keys), *others],
            source,
            options,
            folder,
        )
    split_of = keys_and_splits(folder / "keys")
    return {key: split_of[given_key(source, key)] for key in keys}


def given_key(source: Source, key: str) -> str:
    """Return the key that decides the split: 7 of the repeated key 7-2 of a stream."""
    repeated = re.fullmatch(r"(.*\d)-\d+", key)
    return repeated[1] if repeated and source.kind in ("iterable", "tars") else key


def pack_keys(keys: Sequence[str], source: Source, options: dict[str, Any], folder: Path) -> None:
    """Pack samples with these keys, of other contents, into the splits of a conversion."""
    how: dict[str, Any] = {name: options[name] for name in ("split", "seed")}
    if source.kind != "tars":
        wt.pack(({"__key__": key, "txt": b"text"} for key in keys), str(folder / "keys"), **how)
        return
    shard = folder / "part-000.tar"  # as the source: the split of its shards counts, too
    with tarfile.open(shard, "w") as tar:
        for key in keys:
            add(tar, f"{key}.txt", b"text")
    wt.convert_tars(str(shard), str(folder / "keys"), **how)


def keys_and_splits(out: Path) -> dict[str, str]:
    """Return the split of each key of a set."""
    return {
        key: path.name.rpartition("-")[0] for path, key, _ in read_tars(sorted(out.glob("*.tar")))
    }


def check_split(source: Source, out: Path, options: dict[str, Any], folder: Path) -> None:
    """Check what the documentation promises of a split."""
    by_identity = {item.identity: item for item in source.items}
    parts: dict[str, list[Item]] = {}
    for path, _, fields in read_tars(sorted(out.glob("*.tar"))):
        identity = next(fields[name] for name in source.field.split(";") if name in fields)
        parts.setdefault(path.name.rpartition("-")[0], []).append(by_identity[identity])
    if "split" not in options:
        return
    assert set(parts) == set(options["split"])
    if is_grouped(options) and any_group(source):
        expected = expected_splits(source, options, folder)
        for split, items in parts.items():
            assert {expected[item.group] for item in items} == {split}
    elif stratify := options.get("stratify"):
        classes = {
            split: [str(item.labels[stratify]) for item in items] for split, items in parts.items()
        }
        check_stratified(classes, options["split"])
    else:
        assert keys_and_splits(out) == splits_of_keys(source, options, folder)


def features(seed: int, folder: Path) -> set[str]:
    """Return what is drawn for a case that the model does not expect to be refused."""
    rng = random.Random(seed)
    source = draw_source(rng, folder / "source")
    options = draw_options(rng, source)
    if refusal(source, options, folder):
        return {"refused"}
    kind = "no split" if "split" not in options else "hash"
    kind = "stratified" if options.get("stratify") else kind
    kind = "grouped" if is_grouped(options) else kind
    after = rng.choice((check_kill, check_kill, check_jobs, check_change))
    several = {"several " + word for word in ("limit", "max_shard_samples") if word in options}
    return {source.kind, kind, f"{kind} {source.kind}", after.__name__, *several}


def test_the_default_cases_cover_every_feature(tmp_path: Path) -> None:
    """Every case that the model accepts must succeed, so what is counted here is tested."""
    counts = Counter[str]()
    for seed in range(DEFAULT):
        counts.update(features(seed, tmp_path / str(seed)))
    least = {"stratified": 4, "grouped": 2, "hash": 2, "no split": 2, "stratified table": 1}
    least |= {"check_kill": 6, "check_jobs": 3, "check_change": 3, "refused": 1}
    least |= dict.fromkeys(("folder", "table", "arrays", "iterable", "tars"), 2)
    missing = {name: counts[name] for name in least if counts[name] < least[name]}
    assert not missing, f"too few of the default cases: {missing}"


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
    check_split(source, out, options, out.parent)


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
        fields[label.name] = make(label.stored_as)
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
    """Check that a conversion killed at a random moment and resumed writes the same bytes.

    If its source changes meanwhile, it writes the bytes of a new conversion.
    """
    other, is_changed = out.with_name("killed"), False
    fork = multiprocessing.get_context("fork")
    for _ in range(rng.choice((1, 1, 2))):
        process = fork.Process(
            target=source.convert, args=(str(other),), kwargs={**options, "resume": True}
        )
        process.start()
        process.join(rng.random() * took)
        process.kill()
        process.join()
        check_unfinished(other)
    # Once it is decided what to commit, or an index is in place, the next call finishes that.
    is_decided = any((other / name).exists() for name in ("index.json", ".unfinished/commit.json"))
    if source.change is not None and not is_decided and rng.random() < 0.4:
        source.change()
        out, is_changed = out.with_name("changed"), True
        source.convert(str(out), **options)
    parts = other.glob(".unfinished/shards/*.tar.part")  # written when their shard is complete
    shards = [path.with_suffix("") for path in parts]
    finished = {path.name: path.stat().st_ino for path in shards if path.exists()}
    source.convert(str(other), **options, resume=True)
    assert contents(other) == contents(out)
    kept = {path.name: path.stat().st_ino for path in other.glob("*.tar")}
    assert is_changed or finished.items() <= kept.items(), "a complete shard was written again"


def check_unfinished(out: Path) -> None:
    """Check that a killed conversion left nothing that reads as a set before it is resumed."""
    if (out / ".unfinished").exists() and not list(out.glob("*.tar")):
        with pytest.raises(wt.ShardError, match="resume=True"):
            wt.Loader(str(out))


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
    """Check that `resume` returns a finished set without reading its source again."""
    before = contents(out)
    resumed = source.convert(str(out), **options, resume=True)
    assert contents(out) == before
    assert len(resumed) > 0
    if source.change is None:
        return
    source.change()
    assert len(source.convert(str(out), **options, resume=True)) == len(resumed)
    assert contents(out) == before


def test_the_model_of_splits_detects_a_moved_sample() -> None:
    """An eleventh sample of a class of twenty in one half does not pass."""
    shares = {"a": 0.5, "b": 0.5}
    halves = {split: ["ant"] * 10 + ["bee"] * 3 for split in shares}
    check_stratified(halves, shares)
    with pytest.raises(AssertionError, match="a has 11 of 20 samples of ant"):
        check_stratified({"a": ["ant", *halves["a"][:-1]], "b": ["bee", *halves["b"][1:]]}, shares)


def test_the_model_of_splits_assigns_large_groups_first() -> None:
    """Groups of 4, 3, 2 and 1 samples of one class give two splits of 5 each."""
    groups = {str(size): {"ant": size} for size in (1, 2, 3, 4)}
    assigned = splits_of_groups(groups, {"a": 0.5, "b": 0.5})
    assert assigned == {"4": "a", "3": "b", "2": "b", "1": "a"}
    assert splits_of_groups(groups | {"x": {"ant": 4}}, {"a": 0.5, "b": 0.5}) is None
