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
from difflib import get_close_matches

import numpy as np
import pyarrow.compute as pc

from wdstrain.errors import UsageError
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
_FIRST_HEADERS = "first headers only"  # provenance of an index that lists the first samples

_log = logging.getLogger("wdstrain")


@dataclass
class Selected:
    """Samples to show, in this order. description: what they are; notes: what was not found."""

    index: Index
    ids: Ints
    description: str
    labels: list[ColumnInfo]
    notes: list[str] = field(default_factory=list)


def select(source: Urls | Index, wanted: PeekOptions) -> Selected:
    """Return the wanted samples.

    Raises UsageError for classes, keys and labels that do not exist, and what `open_index` raises.
    """
    index, place = (
        (source, place_of(source)) if isinstance(source, Index) else _open(source, wanted)
    )
    labels = _labels(index, wanted.label)
    if not len(index):
        raise UsageError(f"{place}: these shards hold no samples. Check the address.")
    if wanted.classes or wanted.order == "classes":
        chosen = _by_class(index, wanted, _class_label(labels))
        return Selected(index, chosen.ids, f"{place}: {chosen.description}", labels, chosen.notes)
    total = f"of {len(index)} samples"
    if index.info.get("made") == _FIRST_HEADERS:
        total = "samples (their number is unknown without an index)"
    count = min(wanted.n, len(index))
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


# --- opening --------------------------------------------------------------------------------------


def _open(urls: Urls, wanted: PeekOptions) -> tuple[Index, str]:
    """Return (index, address for messages). The index may list the first samples only."""
    paths = expand(urls)
    given = [urls] if isinstance(urls, (str, os.PathLike)) else list(urls)
    names = [os.fspath(address) for address in given]
    shown = [shown_path(name) for name in names]
    place = ", ".join(shown[:2]) + (f" and {len(shown) - 2} more" if len(shown) > 2 else "")
    is_first = wanted.order == "first" and not wanted.classes and not wanted.keys
    index = _first_samples(paths, wanted.n) if is_first else None
    return index or open_index(paths, note=_log.warning), place


def _first_samples(paths: Sequence[str], n: int) -> Index | None:
    """Return the index of the first n samples, from their headers; None if there is an index."""
    parts, missing = list[Index](), n
    for shards, index in groups_of(paths):
        if missing <= 0:
            break
        if index is not None:
            return None
        for path in shards:
            if missing > 0:
                parts.append(scan_shard(path, most=missing))
                missing -= len(parts[-1])
    return replace(join(parts), info={"made": _FIRST_HEADERS})


def _labels(index: Index, name: str | None) -> list[ColumnInfo]:
    """Return the labels to show; of an index without labels, the field `cls`."""
    known = list(index.labels)
    # A class number has no meaning if the sets number their classes differently.
    if not known and "cls" in index.fields and not index.shard_labels:
        known = [ColumnInfo("cls", "class", "cls")]
    if name is None:
        return known
    mine = [label for label in known if label.name == name]
    mine = mine or [ColumnInfo(field, "class", field) for field in index.fields if field == name]
    if not mine:
        names = list(dict.fromkeys([*(label.name for label in known), *index.fields]))
        raise UsageError(f"there is no label {name!r}.{_choices(name, names)}")
    return mine


# --- choosing -------------------------------------------------------------------------------------


def _by_class(index: Index, wanted: PeekOptions, label: ColumnInfo) -> Selected:
    """Return n samples of each wanted class, or n samples evenly over all classes."""
    names = [_class_name(name, label) for name in wanted.classes]
    ids_of, looked_at = _class_ids(index, label)
    for name in names:
        if name not in ids_of and not label.classes:
            raise UsageError(
                f"no label {label.name!r} is {name!r}.{_choices(name, sorted(ids_of))}"
            )
    order = names or list(label.classes) or sorted(ids_of, key=lambda name: (len(name), name))
    shuffled = {
        name: _shuffled(ids_of[name], wanted.seed, name) for name in order if name in ids_of
    }
    total = f"of {len(index)} samples"
    part = f" (by {looked_at} of {len(index)} labels)" if looked_at < len(index) else ""
    notes = []
    if missing := [name for name in order if name not in ids_of]:
        notes.append(f"no samples of {_listed(missing)}{part}")
    if names:
        chosen = [np.sort(ids[: wanted.n]) for ids in shuffled.values()]
        if few := [name for name, ids in shuffled.items() if len(ids) < wanted.n]:
            notes.append(f"fewer than {wanted.n} samples of {_listed(few)}{part}")
        how = f"{wanted.n} of each of {_listed(names)}"
    else:
        chosen = _evenly(list(shuffled.values()), wanted.n, wanted.seed)
        how = f"evenly over {len(shuffled)} classes"
    ids = np.concatenate([np.zeros(0, np.int64), *chosen])
    how = f"{len(ids)} {total}, {how} (seed {wanted.seed}){part}"
    return Selected(index, ids, how, [label], notes)


def _class_ids(index: Index, label: ColumnInfo) -> tuple[dict[str, Ints], int]:
    """Return (ids of each class that has samples, ascending; number of labels looked at)."""
    columns = [column for column in index.columns if column.place == label.place]
    rows, names, looked_at = np.zeros(0, np.int64), list[str](), len(index)
    if columns and columns[0].kind in ("class", "multi"):
        values = columns[0].values
        if columns[0].kind == "multi":
            rows = np.asarray(pc.list_parent_indices(values), np.int64)
            values = values.flatten().dictionary_encode()
        else:
            rows = np.flatnonzero(values.is_valid())
            values = values.drop_null()
        names, codes = values.dictionary.to_pylist(), np.asarray(values.indices)
    else:
        ids, numbers = even_part(index, _MAX_LABELS), dict[str, int]()
        pairs = [
            (i, numbers.setdefault(name, len(numbers)))
            for i, data in label_bytes(index, label.field, ids)
            for name in classes_in(data, label.entry, index.label_in_sample(label, i).classes)
        ]
        rows, codes = np.array(pairs, np.int64).reshape(-1, 2).T
        names, looked_at = list(numbers), len(ids)
    order = np.argsort(codes, kind="stable")
    edges = np.searchsorted(codes[order], np.arange(len(names) + 1))
    ids_of = {name: rows[order[edges[n] : edges[n + 1]]] for n, name in enumerate(names)}
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
    raise UsageError(
        f"the label {label.name!r} has no class {name!r}.{_choices(name, label.classes)}"
    )


def _shuffled(ids: Ints, *words: int | str) -> Ints:
    return np.asarray(ids[np.argsort(bits(ids, "look", *words), kind="stable")])


def _evenly(classes: list[Ints], n: int, seed: int) -> list[Ints]:
    """Return n ids: one of each class, then a second of each, and so on."""
    if len(classes) > n:
        some = _shuffled(np.arange(len(classes)), seed, "classes")[:n]
        classes = [classes[number] for number in np.sort(some).tolist()]
    counts = np.zeros(len(classes), int)
    sizes = np.array([len(ids) for ids in classes], int)
    while counts.sum() < min(n, sizes.sum()):
        free = np.flatnonzero(counts < sizes)[: n - counts.sum()]
        counts[free] += 1
    return [np.sort(ids[:count]) for ids, count in zip(classes, counts.tolist(), strict=True)]


def _by_key(index: Index, keys: Sequence[str]) -> Ints:
    """Return the samples with these keys, in their order. Raises UsageError for a missing key."""
    ids_of: dict[str, list[int]] = {key: [] for key in keys}
    for i, key in enumerate(index.keys(np.arange(len(index)))):
        if key in ids_of:
            ids_of[key].append(i)
    for key, ids in ids_of.items():
        if not ids:
            examples = ", ".join(repr(index.key(i)) for i in range(min(3, len(index))))
            raise UsageError(
                f"there is no sample {key!r} in these shards. Use a key such as {examples}."
            )
    return np.array([i for ids in ids_of.values() for i in ids], np.int64)


def _choices(name: str, names: Sequence[str]) -> str:
    """Return a sentence with a name that resembles `name`, and the names there are."""
    near = get_close_matches(name, names, 1, 0.5)
    guess = f" Did you mean {near[0]!r}?" if near else ""
    return f"{guess} Use one of: {_listed(names)}."


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
