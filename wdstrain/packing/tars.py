"""Existing tars to a stream: re-shard, shuffle, filter, merge, split, drop and rename fields. One forward pass.

What the index knows of the shards (splits, labels, checksums) goes along: bytes that are not those that were packed are bad
samples. Sets that number their classes differently are not merged, since the same number would mean two things.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from wdstrain.checksum import crc32
from wdstrain.errors import SampleError, SourceError, UsageError
from wdstrain.indexing import Index, Label
from wdstrain.opening import open_index
from wdstrain.packing.catalog import SpanCatalog, marks_of
from wdstrain.packing.expression import Expression
from wdstrain.packing.listing import Bad, Entry, Part, Quarantine, Stream, file_mark
from wdstrain.packing.planning import batches
from wdstrain.storage import Urls, expand

_BLOCK = 16 << 20  # bytes read at a time


def stream_tars(
    urls: Urls,
    *,
    keep: Sequence[str] = (),
    drop: Sequence[str] = (),
    rename: Mapping[str, str] | None = None,
    select: str | None = None,
    keys: str | None = None,
    note: Callable[[str], None] | None = None,
) -> Stream:
    """The samples of shards in their order. keep or drop: fields; rename: {field: new name}; select: a condition
    (`expression`); keys: a file with a key on each line, of the samples that are taken.

    Raises UsageError for fields that no shard has, for sets whose labels differ, and for keys that are not there (when the
    last shard was read).
    """
    index = open_index(urls, note=note)
    labels = _labels(urls, index)
    if keep and drop:
        raise UsageError("keep names the fields that stay, drop those that go. Give one of them.")
    for field in [*keep, *drop, *(rename or {})]:
        if field not in index.fields:
            raise UsageError(f"no shard has a field '{field}'. Fields are: {', '.join(index.fields)}")
    condition = Expression(select) if select is not None else None
    wanted = _keys(keys) if keys is not None else None
    names = {
        field: (rename or {}).get(field, field) for field in index.fields if (field in keep if keep else field not in drop)
    }
    if not names or len(set(names.values())) < len(names):
        raise UsageError(f"these samples would have the fields {', '.join(names.values()) or '(none)'}. Name each once.")
    renamed = tuple(
        Label(label.name, label.kind, names[label.field], label.column, label.classes)
        for label in labels
        if label.field in names
    )
    stratum = next((label for label in labels if label.kind == "class" and label.field == "cls"), None)
    title = urls if isinstance(urls, str) else ", ".join(sorted({os.path.dirname(shard.path) or "." for shard in index.shards}))

    def entries(quarantine: Quarantine) -> Iterator[Entry]:
        seen: set[str] = set()
        for number, parts in _read(index):
            key, shard = index.key(number), index.shards[int(index.shard_of(np.array([number]))[0])]
            try:
                _check(index, number, parts)
                if wanted is not None and key not in wanted:
                    continue
                seen.add(key)
                if condition is not None and not condition.holds(dict(parts), key=key, shard=shard.name, split=shard.split):
                    continue
                kept = [(names[field], data) for field, data in parts if field in names]
                if not kept:
                    raise SampleError(f"it has none of the fields {', '.join(names)}")
            except SampleError as error:
                quarantine.put(Bad(shard.path, 0, key, str(error)))
                continue
            yield Entry(key, kept, shard.split, stratum=_class(parts, stratum))
        missing = set() if wanted is None else wanted - seen
        if missing:
            raise SourceError(f"{keys}: {len(missing)} of {len(wanted or ())} keys are in no shard, such as '{min(missing)}'.")

    source = {"kind": "tars", "fields": dict(names), "select": select, "keys": wanted is not None}
    total = None if condition or wanted is not None else len(index)
    mark = f"{index.fingerprint} {file_mark(*(shard.path for shard in index.shards))} {sorted(wanted or ())}"
    return Stream(str(title), entries, lambda: renamed, source, total, mark, resplit=True)


def _read(index: Index) -> Iterator[tuple[int, list[Part]]]:
    numbers = np.arange(len(index))
    file = index.shard_of(numbers).astype(np.int32)
    catalog = SpanCatalog("", [s.path for s in index.shards], file, index.table, index.fields, marks_of([], 0))
    for group in batches(numbers, catalog.sizes, _BLOCK):
        for number, parts in zip(group.tolist(), catalog.fetch(group), strict=True):
            assert not isinstance(parts, SampleError)
            yield number, parts


def _check(index: Index, number: int, parts: list[Part]) -> None:
    if len(index.table.member_crc):
        first = int(index.table.member_first[number])
        for place, (field, data) in enumerate(parts):
            if crc32(data) != index.table.member_crc[first + place]:
                raise SampleError(f"the bytes of its {field} are not those that were packed (crc32)")


def _labels(urls: Urls, index: Index) -> tuple[Label, ...]:
    """The labels that all sets agree on. `join` drops labels that differ; here that is refused."""
    if index.labels:
        return index.labels
    for path in expand(urls):
        if path.endswith(".json") and open_index(path).labels:
            raise UsageError(
                f"these sets differ in their labels, or some have none: a class number would mean two things. Convert each by "
                f"itself, or drop the label's field. One that has labels: {path}"
            )
    return ()


def _class(parts: list[Part], label: Label | None) -> str:
    if label is None:
        return ""
    text = next((data.decode("utf-8", "replace").strip() for field, data in parts if field == label.field), "")
    return label.classes[int(text)] if text.isdecimal() and int(text) < len(label.classes) else text


def _keys(path: str) -> set[str]:
    try:
        with open(path, encoding="utf-8") as file:
            found = {line.strip() for line in file if line.strip()}
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"{path} cannot be read as a list of keys ({error}).") from error
    if not found:
        raise SourceError(f"{path} holds no keys; one on each line is expected.")
    return found
