"""Random conversions: the contents of the shards are compared with a model of the source.

Every case is a function of its seed, which pytest prints as the name of the test:

    pytest tests/oracle/test_converting.py -k 17
"""

from __future__ import annotations

import multiprocessing
import random
import re
import tarfile
import time
from collections import Counter
from dataclasses import dataclass
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
HALVES = {"a": 0.5, "b": 0.5}
SPLITS: tuple[dict[str, float], ...] = (
    {"train": 0.8, "val": 0.2},
    {"a": 0.5, "b": 0.3, "c": 0.2},
    {"a": 0.9, "b": 0.1},
    {"a": 0.5, "b": 0.25, "c": 0.15, "d": 0.1},
)
# Least numbers of default cases with each feature
LEAST = {"stratified": 4, "grouped": 2, "hash": 2, "no split": 2, "stratified table": 1}
LEAST |= {"check_kill": 6, "check_jobs": 3, "check_change": 3, "refused": 1}
LEAST |= dict.fromkeys(("folder", "table", "arrays", "iterable", "tars"), 2)


@pytest.mark.parametrize("seed", range(DEFAULT))
def test_shards_of_a_random_source_contain_every_item_once(seed: int, tmp_path: Path) -> None:
    """This holds for bytes and labels, and after a killed conversion was resumed."""
    check_case(seed, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("block", range(BLOCKS))
def test_shards_of_more_random_sources_contain_every_item_once(block: int, tmp_path: Path) -> None:
    check_block(check_case, block, BLOCK, tmp_path)


def test_the_default_cases_cover_every_feature(tmp_path: Path) -> None:
    """Every case that the model accepts must succeed, so what is counted here is tested."""
    counts = Counter[str]()
    for seed in range(DEFAULT):
        case = draw_case(seed, tmp_path / str(seed))
        if case.refusal():
            counts["refused"] += 1
            continue
        kind = "stratified" if case.stratify else "hash" if case.split else "no split"
        kind = "grouped" if case.is_grouped else kind
        check = CHECKS[seed % len(CHECKS)].__name__
        counts.update({case.source.kind, kind, f"{kind} {case.source.kind}", check})
    missing = {name: counts[name] for name in LEAST if counts[name] < LEAST[name]}
    assert not missing, f"too few of the default cases: {missing}"


@dataclass
class Case:
    """A random source, and the options of its conversion into folder/out."""

    rng: random.Random
    source: Source
    options: dict[str, Any]
    folder: Path
    seconds: float = 0.0  # that the conversion took

    def __post_init__(self) -> None:
        self.split: dict[str, float] = self.options.get("split", {})
        self.stratify: str | None = self.options.get("stratify")
        self.is_grouped = "group" in self.options or "group_by" in self.options
        # Without a group, no option asks for a split.
        self.has_groups = self.is_grouped and any(item.group for item in self.source.items)
        self.packed = packed(self.source, self.options)  # samples, if it is not refused

    def convert(self, name: str = "out", **more: Any) -> wt.Index:
        return self.source.convert(str(self.folder / name), **self.options | more)

    def contents(self, name: str = "out") -> dict[str, bytes]:
        folder = self.folder / name
        return {
            path.name: path.read_bytes() for path in [*folder.glob("*.tar"), folder / "index.json"]
        }

    def refusal(self) -> str | None:
        """Return the words of the error that the documented rules expect; None if there is none."""
        if self.source.refused:
            return self.source.refused
        if self.stratify == "nothing" and self.source.kind == "table":
            return "no column 'nothing'"
        if not self.source.items:
            return "no samples|were skipped|no row has"
        if self.stratify == "nothing":
            return "no such label of classes"
        if self.is_grouped and not self.split:
            return "group(_by)?=? (needs|requires) .*split" if self.has_groups else None
        if not self.split:
            return None
        empty = "|".join(set(self.split) - set(self.expected_splits().values()))
        return f"the split '({empty})' gets none of {self.packed} samples" if empty else None

    def expected_splits(self) -> dict[Any, str]:
        """Return the split of each sample, or group, or place of a stratified set."""
        if self.has_groups:
            assigned = splits_of_groups(groups_of(self.source), self.split)
            assert assigned is not None, "draw_split draws no such case"
            return dict(assigned)
        if self.stratify:
            empty = empty_stratified_splits(self.packed, self.split)
            assert empty is not None, "draw_split draws no such case"
            return {name: name for name in self.split if name not in empty}
        return self.splits_of_keys()

    def splits_of_keys(self) -> dict[str, str]:
        """Return the split of the key of each sample: "a sample stays in it when others are added".

        The keys are those of the same conversion without a split. They are packed once more, with
        other contents and among so many other keys that every split has samples.
        """
        whole, out = self.folder / "whole", self.folder / "keys"
        if not whole.exists():
            plain = {name: value for name, value in self.options.items() if name != "split"}
            self.source.convert(str(whole), **plain)
        # The key that decides: 7 of the repeated key 7-2 of a stream
        is_stream = self.source.kind in ("iterable", "tars")
        given = {
            key: re.sub(r"(?<=\d)-\d+$", "", key) if is_stream else key
            for key in keys_and_splits(whole)
        }
        assert len(given) == self.packed
        if not out.exists():
            keys = dict.fromkeys([*given.values(), *(f"other-{number}" for number in range(200))])
            how: dict[str, Any] = {name: self.options[name] for name in ("split", "seed")}
            if self.source.kind == "tars":  # as the source: the split of its shards counts, too
                with tarfile.open(self.folder / "part-000.tar", "w") as tar:
                    for key in keys:
                        add(tar, f"{key}.txt", b"text")
                wt.convert_tars(self.folder / "part-000.tar", out, **how)
            else:
                wt.pack(({"__key__": key, "txt": b"text"} for key in keys), out, **how)
        split_of = keys_and_splits(out)
        return {key: split_of[name] for key, name in given.items()}


def draw_case(seed: int, folder: Path) -> Case:
    """Return a random case. The model knows of each whether it is refused."""
    rng = random.Random(seed)
    source = draw_source(rng, folder / "source")
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
    return Case(rng, source, options, folder)


def draw_split(rng: random.Random, source: Source, count: int) -> dict[str, Any]:
    """Options of a split of `count` samples: by a hash, stratified, or by groups."""
    split = rng.choice(SPLITS)
    kind = rng.choice(("hash", "stratify", "stratify", "group", "both"))
    if kind in ("group", "both") and source.grouping and count == len(source.items):
        if splits_of_groups(groups_of(source), split) is None:
            split = HALVES
        more = {"stratify": source.classes} if kind == "both" else {}
        return {"split": split, **more, **source.grouping}
    if kind == "hash":
        return {"split": split}
    if empty_stratified_splits(count, split) is None:
        split = HALVES
    wrong = source.classes is None or rng.random() < 0.1
    return {"split": split, "stratify": "nothing" if wrong else source.classes}


def packed(source: Source, options: dict[str, Any]) -> int:
    return min(len(source.items), options.get("limit") or len(source.items))


def groups_of(source: Source) -> dict[str, Counter[str]]:
    groups = dict[str, Counter[str]]()
    for item in source.items:
        name = str(item.labels[source.classes]) if source.classes else ""
        groups.setdefault(item.group, Counter())[name] += 1
    return groups


def split_of(path: Path) -> str:
    return path.name.rpartition("-")[0]


def keys_and_splits(out: Path) -> dict[str, str]:
    return {key: split_of(path) for path, key, _ in read_tars(sorted(out.glob("*.tar")))}


def check_case(seed: int, folder: Path) -> None:
    case, out = draw_case(seed, folder), folder / "out"
    if (expected := case.refusal()) is not None:
        with pytest.raises(wt.WdstrainError, match=expected):
            case.convert()
        left = [path.name for path in out.glob("[!.]*") if path.name != "skipped.jsonl"]
        assert not left, f"a refused conversion left {left}"
        return
    began = time.monotonic()
    index = case.convert()
    case.seconds = time.monotonic() - began
    check_shards(case, index)
    check_labels(case, index)
    CHECKS[seed % len(CHECKS)](case)


def check_shards(case: Case, index: wt.Index) -> None:
    """Compare all samples of the shards with the items of the source, and check the split."""
    seen, keys, parts = Counter[bytes](), Counter[tuple[str, str]](), dict[str, list[Item]]()
    for path, key, fields in read_tars(sorted((case.folder / "out").glob("*.tar"))):
        keys[path.name, key] += 1
        item = case.source.item(fields)
        seen[item.identity] += 1
        parts.setdefault(split_of(path), []).append(item)
        for name, data in item.fields.items():
            assert fields.get(name) == data, f"{path.name}: {key}.{name} differs"
    assert max(keys.values(), default=1) == 1, "a key comes twice in one shard"
    assert max(seen.values(), default=1) == 1, "an item was packed twice"
    assert seen.total() == len(index) == case.packed
    if not case.options.get("limit"):
        assert index.info["skipped"] == case.source.bad
    if most := case.options.get("max_shard_samples"):
        assert max(Counter(name for name, _ in keys).values()) <= most
    if not case.split:
        return
    assert set(parts) == set(case.split)
    if case.has_groups:
        expected = case.expected_splits()
        assert all(expected[item.group] == name for name, part in parts.items() for item in part)
    elif case.stratify:
        classes = {
            name: [str(i.labels[case.stratify]) for i in part] for name, part in parts.items()
        }
        check_stratified(classes, case.split)
    else:
        assert keys_and_splits(case.folder / "out") == case.splits_of_keys()


def check_labels(case: Case, index: wt.Index) -> None:
    """Read every split with a loader and compare the labels by name."""
    expected = {name for item in case.source.items for name in item.labels}
    assert not expected or {label.name for label in index.labels} == expected
    fields: dict[str, Any] = {
        label.name: (wt.number if label.kind == "number" else wt.label)(label.stored_as)
        for label in index.labels
    }
    out, options = case.folder / "out", {"batch_size": 16, "shuffle": False, "tail": "keep"}
    for split in {split_of(path) for path in out.glob("*.tar")} if expected else ():
        pattern = f"{out}/{split}-*.tar"
        with wt.Loader(pattern, fields, **options) as named, wt.Loader(pattern, **options) as plain:
            for batch, raw in zip(named, plain, strict=True):
                for row in range(len(raw["__key__"])):
                    item = case.source.item(raw, row)
                    for label in index.labels:
                        value, meant = batch[label.name][row].item(), item.labels[label.name]
                        if label.kind == "number":
                            assert abs(value - float(meant)) < 1e-6
                        else:
                            assert label.classes[value] == meant


def check_kill(case: Case) -> None:
    """Check that a conversion killed at a random moment and resumed writes the same bytes.

    If its source changes meanwhile, it writes the bytes of a new conversion.
    """
    rng, other, expected = case.rng, case.folder / "killed", "out"
    fork = multiprocessing.get_context("fork")
    for _ in range(rng.choice((1, 1, 2))):
        process = fork.Process(target=case.convert, args=("killed",), kwargs={"resume": True})
        process.start()
        process.join(rng.random() * case.seconds)
        process.kill()
        process.join()
        if (other / ".unfinished").exists() and not list(other.glob("*.tar")):
            with pytest.raises(wt.ShardError, match="resume=True"):
                wt.Loader(str(other))
    # Once it is decided what to commit, or an index is in place, the next call finishes that.
    is_decided = any((other / name).exists() for name in ("index.json", ".unfinished/commit.json"))
    if case.source.change is not None and not is_decided and rng.random() < 0.4:
        case.source.change()
        expected = "changed"
        case.convert(expected)
    parts = other.glob(".unfinished/shards/*.tar.part")  # written when their shard is complete
    shards = [path.with_suffix("") for path in parts]
    finished = {path.name: path.stat().st_ino for path in shards if path.exists()}
    case.convert("killed", resume=True)
    assert case.contents("killed") == case.contents(expected)
    kept = {path.name: path.stat().st_ino for path in other.glob("*.tar")}
    assert expected == "changed" or finished.items() <= kept.items(), "a shard was written again"


def check_jobs(case: Case) -> None:
    case.convert("jobs", num_workers=2)
    assert case.contents("jobs") == case.contents()


def check_change(case: Case) -> None:
    """Check that `resume` returns a finished set without reading its source again."""
    before = case.contents()
    for change in (None, case.source.change):
        if change is not None:
            change()
        assert len(case.convert(resume=True)) == case.packed
        assert case.contents() == before


CHECKS = (check_kill, check_kill, check_jobs, check_change)
