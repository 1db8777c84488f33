"""Choice of samples to show: the first, random ones, some of each class, or given keys.

The first samples of shards without an index are found in the headers of these samples alone, so
that looking at five samples of a terabyte takes a few requests. Everything else needs an index.
Random choices are the same for the same seed.
"""

from __future__ import annotations

import logging
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
from wdstrain.shards.selection import number_of
from wdstrain.storage.addresses import Urls, expand, folder_of

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
    is_plain = wanted.order == "first" and not is_by_class and not wanted.keys
    first = None
    if is_plain and not isinstance(source, Index):
        first = _first_samples(expand(source), wanted.n)
    index = first or open_index(source, note=_log.warning)
    if not len(index):
        raise UsageError("these shards hold no samples.", "Check the address.")
    labels, count = known_labels(index, wanted.label), min(wanted.n, len(index))
    if is_by_class:
        return _by_class(index, wanted, labels)
    title = f"the first {count} of {len(index)} samples"
    ids = np.arange(count)
    if wanted.keys:
        ids = _by_key(index, wanted.keys)
        title = f"{len(ids)} of {len(index)} samples, by key"
    elif wanted.order == "random":
        ids = np.sort(_shuffled(np.arange(len(index)), wanted.seed)[:count])
        title = f"{count} of {len(index)} samples, at random (seed {wanted.seed})"
    elif first is not None:
        title = f"the first {count} samples (their number is unknown without an index)"
    return Selected(index, [ids], f"{place_of(index)}: {title}", labels)


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


def _by_class(index: Index, wanted: PeekOptions, labels: Sequence[ColumnInfo]) -> Selected:
    """Return n samples of each wanted class, or n samples evenly over all classes."""
    mine, n = [label for label in labels if label.kind != "number"], wanted.n
    if len(mine) != 1:
        names = ", ".join(label.name for label in mine) or "none of these shards"
        raise UsageError(f"choose the label with the classes (label): {names}.")
    ids_of, looked_at = _class_ids(index, mine[0])
    known = mine[0].classes or sorted(ids_of, key=lambda name: (len(name), name))
    order, least = wanted.classes or known, n if wanted.classes else 1
    for name in order:
        if name not in known:
            label = mine[0].name
            raise UsageError(f"the label {label!r} has no class {name!r}.", choices(name, known))
    none = np.zeros(0, np.int64)
    classes = [_shuffled(ids_of.get(name, none), wanted.seed, name) for name in order]
    few = [
        f"{name} ({len(ids)})" for name, ids in zip(order, classes, strict=True) if len(ids) < least
    ]
    notes = [f"too few samples of {listed(few)}, of {looked_at} labels"] if few else []
    taken, how = np.full(len(order), n), f"{n} of each of {listed(order)}"
    if not wanted.classes:  # one of each class, then a second of each, and so on
        places = _shuffled(np.arange(len(order)), wanted.seed, "classes").tolist()
        turns = (at for turn in range(n) for at in places if turn < len(classes[at]))
        taken = np.bincount(list(islice(turns, n)), minlength=len(order))
        how = f"evenly over {len(order)} classes"
    lines = [np.sort(ids[:most]) for ids, most in zip(classes, taken, strict=True)]
    lines = [ids for ids in lines if len(ids)]
    count = sum(map(len, lines))
    title = f"{count} of {len(index)} samples, {how} (seed {wanted.seed})"
    lines = lines if count > len(lines) else [np.concatenate([none, *lines])]
    return Selected(index, lines, f"{place_of(index)}: {title}", mine, notes)


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
    coded = values.dictionary_encode()  # of classes, as it is
    codes, names = np.asarray(pc.fill_null(coded.indices, -1)), coded.dictionary.to_pylist()
    order = np.argsort(codes, kind="stable")
    parts = np.split(rows[order], np.searchsorted(codes[order], np.arange(len(names))))[1:]
    return {str(name): of for name, of in zip(names, parts, strict=True) if len(of)}, len(ids)


def _shuffled(ids: Ints, *words: int | str) -> Ints:
    return np.asarray(ids[np.argsort(bits(ids, "look", *words), kind="stable")])


def _by_key(index: Index, keys: Sequence[str]) -> Ints:
    """Return the samples with these keys, in their order. Raises UsageError for a missing key."""
    try:
        return np.array([number_of(index, key) for key in keys], np.int64)
    except KeyError as error:
        raise UsageError(error.args[0], f"Use a key such as {index.key(0)!r}.") from None
