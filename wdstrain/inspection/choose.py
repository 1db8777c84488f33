"""Choice of samples to show: the first, random ones, some of each class, or given keys.

The first samples of shards without an index are found in the headers of these samples alone, so
that looking at five samples of a terabyte takes a few requests. Everything else needs an index.
Random choices are the same for the same seed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from wdstrain.errors import UsageError
from wdstrain.inspection.labels import choices, known_labels, listed
from wdstrain.inspection.options import PeekOptions
from wdstrain.order.rng import bits
from wdstrain.shards.header_scans import scan_shard
from wdstrain.shards.index import Index, join
from wdstrain.shards.kinds import ColumnInfo
from wdstrain.shards.label_values import classes_in, even_part, label_bytes
from wdstrain.shards.offsets import Ints
from wdstrain.shards.resolve import groups_of, open_index
from wdstrain.storage.addresses import Urls, expand, folder_of
from wdstrain.storage.remote import shown_path

_MAX_LABELS = 10_000  # that are read to find samples of classes, if the index has no column

_log = logging.getLogger("wdstrain")


@dataclass
class Selected:
    """Samples to show, in this order.

    description: what they are. notes: sentences about what was not found. lines: number of samples
    in each line of a sheet.
    """

    index: Index
    ids: Ints
    description: str
    labels: list[ColumnInfo]
    notes: list[str] = field(default_factory=list)
    lines: Sequence[int] = ()


def select(source: Urls | Index, wanted: PeekOptions) -> Selected:
    """Return the wanted samples.

    Raises UsageError for classes, keys and labels that do not exist, and what `open_index` raises.
    """
    index, place, is_part = _opened(source, wanted)
    labels = known_labels(index, wanted.label)
    if not len(index):
        raise UsageError(f"{place}: these shards hold no samples. Check the address.")
    total, count = f"of {len(index)} samples", min(wanted.n, len(index))
    if is_part:
        total = "samples (their number is unknown without an index)"
    if wanted.classes or wanted.order == "classes":
        chosen = _by_class(index, wanted, _class_label(labels))
        return replace(chosen, description=f"{place}: {chosen.description}")
    ids, description = np.arange(count), f"the first {count} {total}"
    if wanted.keys:
        ids = _by_key(index, wanted.keys)
        description = f"{len(ids)} {total}, by key"
    elif wanted.order == "random":
        ids = np.sort(_shuffled(np.arange(len(index)), wanted.seed)[:count])
        description = f"{count} {total}, at random (seed {wanted.seed})"
    return Selected(index, ids, f"{place}: {description}", labels)


def place_of(index: Index) -> str:
    """Return the folder of an index, for messages."""
    return folder_of(index.shards[0].path) or "." if index.shards else "no shards"


def _opened(source: Urls | Index, wanted: PeekOptions) -> tuple[Index, str, bool]:
    """Return (index, address for messages, whether it lists the first samples only)."""
    if isinstance(source, Index):
        return source, place_of(source), False
    paths = expand(source)
    given = [source] if isinstance(source, (str, os.PathLike)) else list(source)
    place = listed([shown_path(os.fspath(address)) for address in given])
    is_first = wanted.order == "first" and not wanted.classes and not wanted.keys
    index = _first_samples(paths, wanted.n) if is_first else None
    return index or open_index(paths, note=_log.warning), place, index is not None


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


def _by_class(index: Index, wanted: PeekOptions, label: ColumnInfo) -> Selected:
    """Return n samples of each wanted class, or n samples evenly over all classes."""
    names = [_class_name(name, label) for name in wanted.classes]
    ids_of, looked_at = _class_ids(index, label)
    for name in names:
        if name not in ids_of and not label.classes:
            raise UsageError(f"no label {label.name!r} is {name!r}.{choices(name, sorted(ids_of))}")
    order = names or list(label.classes) or sorted(ids_of, key=lambda name: (len(name), name))
    missing = [name for name in order if name not in ids_of]
    ids_of = {name: _shuffled(ids_of[name], wanted.seed, name) for name in order if name in ids_of}
    part = f" (by {looked_at} of {len(index)} labels)" * (looked_at < len(index))
    notes = [f"no samples of {listed(missing)}{part}"] * bool(missing)
    if names:
        chosen = [np.sort(ids[: wanted.n]) for ids in ids_of.values()]
        few = [name for name, ids in ids_of.items() if len(ids) < wanted.n]
        notes += [f"fewer than {wanted.n} samples of {listed(few)}{part}"] * bool(few)
        how = f"{wanted.n} of each of {listed(names)}"
    else:
        chosen = _evenly(list(ids_of.values()), wanted.n, wanted.seed)
        how = f"evenly over {len(ids_of)} classes"
    counts = [len(ids) for ids in chosen]
    how = f"{sum(counts)} of {len(index)} samples, {how} (seed {wanted.seed}){part}"
    ids = np.concatenate([np.zeros(0, np.int64), *chosen])
    lines = counts if max(counts, default=0) > 1 else ()
    return Selected(index, ids, how, [label], notes, lines)


def _class_ids(index: Index, label: ColumnInfo) -> tuple[dict[str, Ints], int]:
    """Return (ids of each class that has samples, ascending; number of labels looked at)."""
    column = next((known for known in index.columns if known.place == label.place), None)
    rows, looked_at = np.arange(len(index)), len(index)
    if column is None:
        ids = even_part(index, _MAX_LABELS)
        pairs = [
            (i, name)
            for i, data in label_bytes(index, label.field, ids)
            for name in classes_in(data, label.entry, index.label_in_sample(label, i).classes)
        ]
        rows, looked_at = np.array([i for i, _ in pairs], np.int64), len(ids)
        values = pa.array([name for _, name in pairs], pa.string())
    elif pa.types.is_list(column.values.type):
        rows = np.asarray(pc.list_parent_indices(column.values), np.int64)
        values = column.values.flatten()
    else:
        values = column.values
    coded = values if pa.types.is_dictionary(values.type) else values.dictionary_encode()
    codes, names = np.asarray(pc.fill_null(coded.indices, -1)), coded.dictionary.to_pylist()
    order = np.argsort(codes, kind="stable")
    edges = np.searchsorted(codes[order], np.arange(len(names) + 1))
    ids_of = {str(name): rows[order[edges[i] : edges[i + 1]]] for i, name in enumerate(names)}
    return {name: ids for name, ids in ids_of.items() if len(ids)}, looked_at


def _class_label(labels: Sequence[ColumnInfo]) -> ColumnInfo:
    """Return the one label that has classes."""
    mine = [label for label in labels if label.kind != "number"]
    if len(mine) == 1:
        return mine[0]
    if mine:
        names = ", ".join(label.name for label in mine)
        raise UsageError(f"several labels have classes: {names}. Choose one: label.")
    raise UsageError("these shards have no label with classes. Choose samples by key or at random.")


def _class_name(name: str, label: ColumnInfo) -> str:
    """Return a class by its name or its number."""
    if not label.classes or name in label.classes:
        return name
    if name.isdecimal() and int(name) < len(label.classes):
        return label.classes[int(name)]
    hint = choices(name, label.classes)
    raise UsageError(f"the label {label.name!r} has no class {name!r}.{hint}")


def _shuffled(ids: Ints, *words: int | str) -> Ints:
    return np.asarray(ids[np.argsort(bits(ids, "look", *words), kind="stable")])


def _evenly(classes: list[Ints], n: int, seed: int) -> list[Ints]:
    """Return n ids: one of each class, then a second of each, and so on."""
    if len(classes) > n:
        some = _shuffled(np.arange(len(classes)), seed, "classes")[:n]
        classes = [classes[number] for number in np.sort(some).tolist()]
    counts = [len(ids) for ids in classes]
    number = np.repeat(np.arange(len(classes)), counts)
    turn = np.concatenate([np.zeros(0, np.int64), *map(np.arange, counts)])
    chosen = np.bincount(number[np.lexsort((number, turn))[:n]], minlength=len(classes))
    return [np.sort(ids[:count]) for ids, count in zip(classes, chosen.tolist(), strict=True)]


def _by_key(index: Index, keys: Sequence[str]) -> Ints:
    """Return the samples with these keys, in their order. Raises UsageError for a missing key."""
    ids_of: dict[str, list[int]] = {key: [] for key in keys}
    for i, key in enumerate(index.keys(np.arange(len(index)))):
        if key in ids_of:
            ids_of[key].append(i)
    for key, ids in ids_of.items():
        if not ids:
            examples = ", ".join(map(repr, index.keys(np.arange(min(3, len(index))))))
            raise UsageError(
                f"there is no sample {key!r} in these shards. Use a key such as {examples}."
            )
    return np.array([i for ids in ids_of.values() for i in ids], np.int64)
