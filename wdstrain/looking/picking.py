"""Which samples are looked at: the first, some at random, some of each class, or those of given keys.

The first of shards that no index lists are found by walking over the headers of these alone: whoever looks at five samples of
somebody else's terabyte on a server must not walk over the terabyte. Everything else needs an index, which is then made and
remembered, and what that cost is told. Random is by keyed bits: the same seed shows the same samples.
"""

from __future__ import annotations

import heapq
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import islice
from typing import Literal, get_args

import numpy as np

from wdstrain.errors import UsageError
from wdstrain.order.plan import integer
from wdstrain.order.rng import below, bits
from wdstrain.shards.index import Index, Label, Shard
from wdstrain.shards.index_io import is_wdstrain_index
from wdstrain.shards.labels import classes_in, even_part, label_bytes
from wdstrain.shards.offsets import Ints, Offsets
from wdstrain.shards.resolve import open_index, shard_index, tars_of
from wdstrain.shards.tar import samples
from wdstrain.storage.addresses import Urls, check_finished, expand, folder_of, is_json
from wdstrain.storage.local import open_source
from wdstrain.storage.remote import is_remote, redacted

Order = Literal["first", "random", "classes"]

MOST = 1000  # samples that are looked at at a time

_LABELS = 10_000  # that are read to find samples of classes
_BLOCK = 1 << 16  # keys at a time
_NEAR = 200  # keys that are compared letter by letter with one that is not there

_log = logging.getLogger("wdstrain")


@dataclass
class Picked:
    """Samples of an index in the order to show them, where they are from and how they were picked, in words."""

    index: Index
    ids: Ints
    place: str
    how: str
    labels: list[Label]
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Wanted:
    """What is asked for. classes: n of each of these; keys: these samples, whatever n is. Raises UsageError for what does not go together."""

    n: int = 5
    order: Order = "first"
    classes: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    label: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("n", "seed"):
            object.__setattr__(self, name, integer(name, getattr(self, name)))
        if self.order not in get_args(Order):
            raise UsageError(f"order={self.order!r} is none of {', '.join(get_args(Order))}.")
        if self.n < 1 or max(self.n * max(1, len(self.classes)), len(self.keys)) > MOST:
            raise UsageError(
                f"n={self.n}: 1 to {MOST} samples are looked at at a time. Ask for as many."
            )
        if self.keys and (self.classes or self.order != "first"):
            raise UsageError(
                "samples are picked by key, by class or at random. Ask for one of these."
            )

    @property
    def is_first(self) -> bool:
        return self.order == "first" and not self.classes and not self.keys


def pick(source: Urls | Index, wanted: Wanted) -> Picked:
    """The samples that are wanted. Raises UsageError for classes, keys and labels that are not there, naming near ones, and what opening shards raises."""
    index, place = (
        (source, place_of(source)) if isinstance(source, Index) else _opened(source, wanted)
    )
    labels = _labels(index, wanted.label)
    if not len(index):
        raise UsageError(f"{place}: there is no sample in these shards. Check the address.")
    total = (
        f"of {len(index)} samples"
        if index.info.get("made") != _BEGUN
        else "samples (no index says of how many)"
    )
    if wanted.keys:
        ids = _by_key(index, wanted.keys)
        return Picked(index, ids, place, f"{len(ids)} {total}, by key", labels)
    if wanted.classes or wanted.order == "classes":
        return _by_class(index, wanted, place, labels)
    count = min(wanted.n, len(index))
    if wanted.order == "random":
        return Picked(
            index,
            _random(len(index), count, wanted.seed),
            place,
            f"{count} {total}, at random (seed {wanted.seed})",
            labels,
        )
    return Picked(index, np.arange(count), place, f"the first {count} {total}", labels)


# --- opening ---------------------------------------------------------------------------------------------------------

_BEGUN = "walked over the first headers"


def _opened(urls: Urls, wanted: Wanted) -> tuple[Index, str]:
    """The index of what is asked for, or of the first samples alone; and its address as it may be shown."""
    listed = expand(urls)
    given = [
        os.fspath(one) for one in ([urls] if isinstance(urls, (str, os.PathLike)) else urls)
    ] or listed
    shown = [redacted(one) if is_remote(one) else one for one in given]
    place = ", ".join(shown[:2]) + (f" and {len(shown) - 2} more" if len(shown) > 2 else "")
    begun = _begun(listed, wanted.n) if wanted.is_first else None
    return begun or open_index(listed, note=_log.warning), place


def _begun(listed: Sequence[str], n: int) -> Index | None:
    """The index of the first n samples of shards, by their headers alone; None where an index tells of them."""
    if (
        is_json(listed[0]) and not is_remote(listed[0]) and not is_wdstrain_index(listed[0])
    ):  # somebody else's: the shards speak for themselves
        paths = [*tars_of(os.path.dirname(listed[0])), *listed[1:]]
    elif is_json(listed[0]) or shard_index(listed[0], {}) is not None:
        return None
    else:
        paths = list(listed)
    fields: list[str] = []
    shards, tables, missing = [], [], n
    for path in paths:
        if missing <= 0:
            break
        if is_json(path):
            return None
        if not is_remote(path):
            check_finished(os.path.dirname(path))
        with open_source(path) as source:
            found = list(
                islice(
                    samples(source.read, source.size, redacted(path) if is_remote(path) else path),
                    missing,
                )
            )
            shards.append(Shard(path, len(found), source.size, tag=source.version or ""))
            tables.append(Offsets.of(found, fields))
            missing -= len(found)
    return Index(tuple(shards), tuple(fields), Offsets.join(tables), info={"made": _BEGUN})


def place_of(index: Index) -> str:
    """Where the shards of an index lie, as it may be shown."""
    return folder_of(index.shards[0].path) or "." if index.shards else "no shards"


def _labels(index: Index, asked: str | None) -> list[Label]:
    """Labels of an index; of one that speaks of none, what webdataset calls so."""
    # of sets whose numbers mean different classes, a number says nothing
    usual = ["cls"] if "cls" in index.fields and not index.shard_labels else []
    known = list(index.labels) or [Label(name, "class", name) for name in usual]
    if asked is None:
        return known
    mine = [one for one in known if one.name == asked]
    mine = mine or [Label(name, "class", name) for name in index.fields if name == asked]
    if not mine:
        names = [*(one.name for one in known), *index.fields]
        raise UsageError(
            f"there is no label {asked!r}{_near(asked, names)} These shards have: {', '.join(dict.fromkeys(names))}."
        )
    return mine


# --- picking ---------------------------------------------------------------------------------------------------------


def _random(count: int, n: int, *words: int | str) -> Ints:
    """n different numbers below count, by keyed bits, ascending; for n up to some thousands. int64[n]"""
    if n >= count:
        return np.arange(count)
    many = 2 * n
    while True:
        drawn, firsts = np.unique(below(count, np.arange(many), "look", *words), return_index=True)
        if len(drawn) >= n:
            return np.sort(drawn[np.argsort(firsts)[:n]])
        many *= 2


def _by_class(index: Index, wanted: Wanted, place: str, labels: list[Label]) -> Picked:
    """Samples of classes, found by their labels: n of each that is named, or n evenly over all."""
    label = _class_label(labels)
    names = [_class_name(name, label) for name in wanted.classes]
    looked = even_part(index, _LABELS)
    found: dict[str, list[int]] = {}
    for i, data in label_bytes(index, label.field, looked):
        for name in classes_in(data, label.column, index.label_in_sample(label, i).classes):
            found.setdefault(name, []).append(i)
    everything = (
        names
        or list(label.classes)
        or sorted(found, key=lambda one: (len(one) * one.isdecimal(), one))
    )
    for name in names:
        if name not in found and not label.classes:
            near = _near(name, list(found))
            raise UsageError(
                f"no label {label.name!r} of these shards is {name!r}{near} Some are: {', '.join(sorted(found)[:10])}."
            )
    missing = [name for name in everything if name not in found]
    shuffled = {
        name: _shuffled(found[name], wanted.seed, name) for name in everything if name in found
    }
    if names:
        taken = [(name, i) for name, ids in shuffled.items() for i in sorted(ids[: wanted.n])]
    else:
        taken = _evenly(shuffled, wanted.n, wanted.seed)
    part = f", found by the labels of {len(looked)} of them" if len(looked) < len(index) else ""
    how = f"{len(taken)} of {len(index)} samples, " + (
        f"{wanted.n} of each of {_some(names)}" if names else f"evenly over {len(shuffled)} classes"
    )
    notes = []
    if missing:
        notes.append(
            f"no sample was found of {_some(missing)}{f', by {len(looked)} of {len(index)} labels' if part else ''}"
        )
    few = [name for name, ids in shuffled.items() if names and len(ids) < wanted.n]
    if few:
        notes.append(f"fewer than {wanted.n} were found of {_some(few)}")
    return Picked(
        index,
        np.array([i for _, i in taken], np.int64),
        place,
        f"{how} (seed {wanted.seed}){part}",
        labels,
        notes,
    )


def _class_label(labels: Sequence[Label]) -> Label:
    """The label whose classes are meant."""
    mine = [one for one in labels if one.kind != "number"]
    if len(mine) == 1:
        return mine[0]
    if mine:
        raise UsageError(
            f"there are several labels with classes: {', '.join(one.name for one in mine)}. Name one of them: label."
        )
    numbers = f"; {', '.join(one.name for one in labels)}: a number" if labels else ""
    raise UsageError(
        f"these shards have no label with classes{numbers}. Pick samples by key or at random."
    )


def _class_name(asked: str, label: Label) -> str:
    """A class as its label has it, by name or by number."""
    if not label.classes or asked in label.classes:
        return asked
    if asked.isdecimal() and int(asked) < len(label.classes):
        return label.classes[int(asked)]
    classes = list(label.classes)
    raise UsageError(
        f"there is no class {asked!r}{_near(asked, classes)} The label {label.name!r} has "
        f"{len(classes)} classes: {_some(classes)}."
    )


def _shuffled(ids: list[int], *words: int | str) -> list[int]:
    drawn = bits(np.array(ids, np.int64), "look", *words)
    return [ids[place] for place in np.argsort(drawn, kind="stable").tolist()]


def _evenly(found: dict[str, list[int]], n: int, seed: int) -> list[tuple[str, int]]:
    """One of each class, then another of each, until there are n; of more classes than n, some. By class."""
    names = list(found)
    if len(names) > n:
        names = [names[i] for i in _random(len(names), n, "classes", seed).tolist()]
    taken: dict[str, list[int]] = {name: [] for name in names}
    left, turn = n, 0
    while left and any(len(found[name]) > turn for name in names):
        for name in [one for one in names if len(found[one]) > turn][:left]:
            taken[name].append(found[name][turn])
            left -= 1
        turn += 1
    return [(name, i) for name in names for i in sorted(taken[name])]


def _by_key(index: Index, keys: Sequence[str]) -> Ints:
    """Samples of these keys, in their order. Raises UsageError for one that is not there."""
    found: dict[str, list[int]] = {key: [] for key in keys}
    for first in range(0, len(index), _BLOCK):
        ids = np.arange(first, min(first + _BLOCK, len(index)))
        block = index.keys(ids)
        for place in [place for place, key in enumerate(block) if key in found]:
            found[block[place]].append(first + place)
    for key in keys:
        if not found[key]:
            near = _near(key, _alike(index, key))
            known = f" Keys are such as {index.key(0)!r}." if near == "." else ""
            raise UsageError(f"there is no sample {key!r} in these shards{near}{known}")
    return np.array([i for key in found for i in found[key]], np.int64)


def _alike(index: Index, key: str) -> list[str]:
    """Keys that begin and end as this one does, or hold it: so few that they can be compared letter by letter."""

    def alike(other: str) -> int:
        return _shared(key, other) + _shared(key[::-1], other[::-1]) + len(key) * (key in other)

    blocks = (
        index.keys(np.arange(first, min(first + _BLOCK, len(index))))
        for first in range(0, len(index), _BLOCK)
    )
    return heapq.nlargest(_NEAR, (one for block in blocks for one in block), key=alike)


def _shared(one: str, other: str) -> int:
    """Letters that both begin with."""
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )


def _near(asked: str, names: Sequence[str]) -> str:
    """Ends a sentence with the names that resemble what was asked for."""
    holding = [name for name in names if asked in name][:3]
    near = holding or get_close_matches(asked, names, 3, 0.5)
    return f"; near are {', '.join(near)}." if near else "."


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
