"""Choice of samples to show: the first, random ones, some of each class, or given keys.

The first samples of shards without an index are found in the headers of these samples alone, so
that looking at five samples of a terabyte takes a few requests. Everything else needs an index.
Random choices are the same for the same seed.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from wdstrain.errors import UsageError
from wdstrain.inspection.labels import choices, known_labels, listed
from wdstrain.inspection.options import PeekOptions
from wdstrain.order.rng import bits
from wdstrain.shards.columns import typed
from wdstrain.shards.declare import even_part, read_columns
from wdstrain.shards.index import Index, join
from wdstrain.shards.kinds import ColumnInfo
from wdstrain.shards.offsets import Ints
from wdstrain.shards.resolve import groups_of, open_index, scan_shard
from wdstrain.storage.addresses import Urls, expand, folder_of
from wdstrain.storage.remote import shown_path

_MAX_LABELS = 10_000  # that are read to find samples of classes, if the index has no column

_log = logging.getLogger("wdstrain")


@dataclass
class Selected:
    """Samples to show: `lines` has their ids, in an array for each line of a sheet.

    title: what they are. notes: sentences about what was not found.
    """

    index: Index
    lines: list[Ints]
    title: str
    labels: list[ColumnInfo]
    notes: list[str] = field(default_factory=list)


def select(source: Urls | Index, wanted: PeekOptions) -> Selected:
    """Return the wanted samples.

    Raises UsageError for classes, keys and labels that do not exist, and what `open_index` raises.
    """
    is_by_class = bool(wanted.classes) or wanted.order == "classes"
    is_first = wanted.order == "first" and not is_by_class and not wanted.keys
    index, place, first = source, "", None
    if not isinstance(source, Index):
        given = [source] if isinstance(source, (str, os.PathLike)) else list(source)
        place, paths = listed([shown_path(os.fspath(address)) for address in given]), expand(source)
        first = _first_samples(paths, wanted.n) if is_first else None
        index = first or open_index(paths, note=_log.warning)
    assert isinstance(index, Index)
    place = place or place_of(index)
    labels = known_labels(index, wanted.label)
    if not len(index):
        raise UsageError(
            f"{place}: these shards hold no samples.",
            "Check the address.",
        )
    if is_by_class:
        return _by_class(index, wanted, labels, place)
    ids, total, how = np.arange(min(wanted.n, len(index))), f"of {len(index)} samples", ""
    if wanted.keys:
        ids, how = _by_key(index, wanted.keys), ", by key"
    elif wanted.order == "random":
        ids = np.sort(_shuffled(np.arange(len(index)), wanted.seed)[: len(ids)])
        how = f", at random (seed {wanted.seed})"
    if first is not None:
        total = "samples (their number is unknown without an index)"
    title = f"{place}: {'' if how else 'the first '}{len(ids)} {total}{how}"
    return Selected(index, [ids], title, labels)


def place_of(index: Index) -> str:
    """Return the folder of an index, for messages."""
    return folder_of(index.shards[0].path) or "." if index.shards else "no shards"


def _first_samples(paths: Sequence[str], n: int) -> Index | None:
    """Return the index of the first n samples, from their headers; None if there is an index."""
    parts, missing = list[Index](), n
    for shards, index in groups_of(paths):
        if index is not None and missing > 0:
            return None
        for path in shards:
            if missing > 0:
                parts.append(scan_shard(path, most=missing))
                missing -= len(parts[-1])
    return join(parts)


def _by_class(
    index: Index, wanted: PeekOptions, labels: Sequence[ColumnInfo], place: str
) -> Selected:
    """Return n samples of each wanted class, or n samples evenly over all classes."""
    mine, n = [label for label in labels if label.kind != "number"], wanted.n
    if len(mine) != 1:
        names = ", ".join(label.name for label in mine) or "none of these shards"
        raise UsageError(f"choose the label with the classes (label): {names}.")
    ids_of, looked_at = _class_ids(index, mine[0])
    known = mine[0].classes or sorted(ids_of, key=lambda name: (len(name), name))
    order = [_class_name(name, mine[0], known) for name in wanted.classes] or known
    classes = {name: _shuffled(ids_of[name], wanted.seed, name) for name in order if name in ids_of}
    part = f" (by {looked_at} of {len(index)} labels)" * (looked_at < len(index))
    absent = [name for name in order if name not in classes]
    few = [name for name, ids in classes.items() if wanted.classes and len(ids) < n]
    notes = [f"no samples of {listed(absent)}{part}"] if absent else []
    notes += [f"fewer than {n} samples of {listed(few)}{part}"] if few else []
    taken, how = Counter(dict.fromkeys(classes, n)), f"{n} of each of {listed(order)}"
    if not wanted.classes:  # one of each class, then a second of each, and so on
        order = list(classes)
        if len(order) > n:
            places = _shuffled(np.arange(len(order)), wanted.seed, "classes").tolist()
            order = [order[place] for place in places]
        turns = (name for turn in range(n) for name in order if turn < len(classes[name]))
        taken, how = Counter(islice(turns, n)), f"evenly over {len(classes)} classes"
    lines = [np.sort(ids[: taken[name]]) for name, ids in classes.items() if taken[name]]
    count = sum(map(len, lines))
    how = f"{count} of {len(index)} samples, {how} (seed {wanted.seed}){part}"
    lines = lines if count > len(lines) else [np.concatenate([np.zeros(0, np.int64), *lines])]
    return Selected(index, lines, f"{place}: {how}", mine, notes)


def _class_ids(index: Index, label: ColumnInfo) -> tuple[dict[str, Ints], int]:
    """Return (ids of each class that has samples, ascending; number of labels looked at)."""
    ids = np.arange(len(index))
    columns = [known for known in index.columns if known.place == label.place]
    if not columns:
        ids = even_part(index, _MAX_LABELS)
        read = read_columns(index.take(ids), [label.place]).columns
        # Class numbers count in the classes of each shard, which may differ.
        columns = list(typed(read, [label] if label.classes and not index.differing else []))
    values, rows = columns[0].values, ids
    if pa.types.is_list(values.type):
        rows = ids[np.asarray(pc.list_parent_indices(values), np.int64)]
        values = values.flatten()
    coded = values if pa.types.is_dictionary(values.type) else values.dictionary_encode()
    codes, names = np.asarray(pc.fill_null(coded.indices, -1)), coded.dictionary.to_pylist()
    order = np.argsort(codes, kind="stable")
    parts = np.split(rows[order], np.searchsorted(codes[order], np.arange(len(names))))[1:]
    return {str(name): of for name, of in zip(names, parts, strict=True) if len(of)}, len(ids)


def _class_name(name: str, label: ColumnInfo, known: Sequence[str]) -> str:
    """Return a class by its name or its number."""
    if name not in known and name.isdecimal() and int(name) < len(label.classes):
        return label.classes[int(name)]
    if name not in known:
        raise UsageError(f"the label {label.name!r} has no class {name!r}.", choices(name, known))
    return name


def _shuffled(ids: Ints, *words: int | str) -> Ints:
    return np.asarray(ids[np.argsort(bits(ids, "look", *words), kind="stable")])


def _by_key(index: Index, keys: Sequence[str]) -> Ints:
    """Return the samples with these keys, in their order. Raises UsageError for a missing key."""
    every, ids_of = index.keys(np.arange(len(index))), {key: list[int]() for key in keys}
    for i, key in enumerate(every):
        if key in ids_of:
            ids_of[key].append(i)
    for key, ids in ids_of.items():
        if not ids:
            raise UsageError(
                f"there is no sample {key!r} in these shards.",
                f"Use a key such as {', '.join(map(repr, every[:3]))}.",
            )
    return np.array([i for ids in ids_of.values() for i in ids], np.int64)
