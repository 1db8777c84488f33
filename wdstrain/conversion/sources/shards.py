"""Samples of existing shards, in one forward pass.

Samples may be filtered, and fields dropped or renamed. Splits and labels of the index are kept. A
sample whose bytes differ from the checksums of the index is bad. Sets that number their classes
differently are not merged: a number would mean two classes.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any

import numpy as np

from wdstrain.conversion.encode import encode
from wdstrain.conversion.listing import (
    BadSample,
    Sample,
    Source,
    check_there,
    field_name,
    readable,
    reject,
    split_of,
)
from wdstrain.conversion.options import Path, TarsOptions
from wdstrain.errors import DamageError, SampleError, SourceError, UsageError
from wdstrain.runtime.options import refuse
from wdstrain.shards.columns import Column
from wdstrain.shards.declare import with_columns_of
from wdstrain.shards.index import Index
from wdstrain.shards.index_io import find_document
from wdstrain.shards.kinds import parsed_json
from wdstrain.shards.offsets import Ints
from wdstrain.shards.resolve import open_index
from wdstrain.storage.addresses import INDEX_NAME, beside, folder_of
from wdstrain.storage.remote import is_remote


def stream_tars(options: TarsOptions, note: Callable[[str], None] | None = None) -> Source:
    """Return the chosen samples of shards in their order.

    Raises UsageError for fields that no shard has, for sets whose labels differ, and for shards
    that lie in the output folder; SourceError for keys that no shard has.
    """
    given = options.urls
    urls = [os.fspath(u) for u in ([given] if isinstance(given, (str, os.PathLike)) else given)]
    index = open_index(urls, note=note)
    _check_apart(index, os.fspath(options.out))
    names = _kept_fields(index, options)
    refuse(
        any(label.field in names for label in index.differing),
        "these sets have different labels, or some have none: a class number would mean two "
        "classes.",
        "Convert each set by itself, or drop the field of the label.",
    )
    labels = [label for label in index.labels if label.is_joined or label.field in names]
    ignored = Counter[str](index.info.get("ignored", {}) if "made" in index.info else {})
    index = _chosen(index, options, ignored)
    splits = {shard.name: shard.split or split_of(shard.name) for shard in index.shards}
    joined = [column for column in index.columns if column.is_joined]
    renamed = tuple(replace(label, field=names.get(label.field, "json")) for label in labels)
    stratum = next((label for label in labels if label.is_class), None)

    def entries() -> Iterator[Sample | BadSample]:
        column = next((c for c in index.columns if stratum and c.place == stratum.place), None)
        for number, fields in _read(index):
            shard, key = index.shard_with(number), index.key(number)
            if isinstance(fields, str):
                yield BadSample(shard.shown, 0, key, fields)
                continue
            kept = [(names[field], data) for field, data in fields.items() if field in names]
            try:
                kept = _with_joined(kept, joined, number)
            except (SampleError, ValueError) as error:  # ValueError: JSON that cannot be parsed
                yield BadSample(shard.shown, 0, key, str(error))
                continue
            value = None if column is None else column.values[number].as_py()
            yield Sample(key, kept, splits[shard.name], stratum="" if value is None else str(value))

    folders = sorted({folder_of(shard.path) or "." for shard in index.shards})
    source = _stated(options, index)
    own = ", ".join(dict.fromkeys(filter(None, splits.values())))
    if options.split and "," in own:
        source["decided"] = [f"splits: those of the source ({own}) are drawn again"]
    source |= {"fields": dict(names), "data": index.fingerprint, "origin": _origin(index)}
    return Source(
        urls[0] if len(urls) == 1 and not is_remote(urls[0]) else ", ".join(folders),
        entries,
        lambda: renamed,
        source,
        len(index),
        +ignored,
        resplit=True,
        stratum=stratum.name if stratum else "",
    )


def _with_joined(
    parts: list[tuple[str, Any]], joined: Sequence[Column], number: int
) -> list[tuple[str, Any]]:
    """Return the fields of a sample and its values in joined columns.

    Lists of numbers are NAME.npy, and other values entries of the field json. Raises SampleError for
    a value whose place the sample uses.
    """
    values = [(column, column.take([number])[0].as_py()) for column in joined]
    values = [(column, value) for column, value in values if value is not None]
    added = [
        encode(f"{column.name}.npy", np.array(value, "f4"))
        for column, value in values
        if column.kind == "vector"
    ]
    entries = {column.name: value for column, value in values if column.kind != "vector"}
    document = parsed_json(dict(parts).get("json", b"{}")) if entries else {}
    if not isinstance(document, dict):
        raise SampleError(f"its json is no object that could hold the columns {[*entries]}")
    taken = sorted((dict(parts).keys() & dict(added)) | (document.keys() & entries.keys()))
    if taken:
        raise SampleError(
            f"it holds {', '.join(taken)}, and so does a joined column: drop the field, or join the "
            "column under another name"
        )
    if entries:
        parts = [part for part in parts if part[0] != "json"]
        added.append(encode("json", document | entries))
    return [*parts, *added]


def _chosen(index: Index, options: TarsOptions, ignored: Counter[str]) -> Index:
    """Return the samples that meet the condition and have a wanted key; count the others."""
    if options.where is not None:
        everything = len(index)
        index = with_columns_of(index, options.where).where(options.where)
        ignored["samples that do not meet the condition"] += everything - len(index)
    if options.keys is None:
        return index
    chosen = ids_of_keys(index, np.arange(len(index)), options.keys)
    ignored["keys that were not asked for"] += len(index) - len(chosen)
    return index.take(chosen)


def _read(index: Index) -> Iterator[tuple[int, dict[str, bytes] | str]]:
    """Yield (id, fields) of all samples, or the reason why a sample is bad."""
    first = 0
    while first < len(index):
        try:
            for number, fields in index.read(np.arange(first, len(index))):
                first = number + 1
                yield number, fields
        except DamageError as error:
            yield first, str(error).rpartition(". ")[0]
            first += 1


def _kept_fields(index: Index, options: TarsOptions) -> dict[str, str]:
    """Return {field: new name} of the fields that stay."""
    for field in [*options.keep, *options.drop, *(options.rename or {})]:
        refuse(
            field not in index.fields,
            f"no shard has a field '{field}'.",
            f"Use one of: {', '.join(index.fields)}",
        )
    keep, drop, rename = options.keep, options.drop, options.rename or {}
    kept = [field for field in index.fields if (field in keep if keep else field not in drop)]
    try:
        names = {field: field_name(rename.get(field, field)) for field in kept}
    except SampleError as error:
        raise UsageError(
            f"the samples cannot be packed: {error}.",
            "Choose others.",
        ) from None
    refuse(
        not names or len(set(names.values())) < len(names),
        f"the samples would have the fields {', '.join(names.values()) or '(none)'}, but need "
        "one or more, each once.",
        "Choose others.",
    )
    return names


def _stated(options: TarsOptions, index: Index) -> dict[str, Any]:
    """Return the arguments of a conversion of shards, as its provenance has them."""
    text = "\n".join(sorted(set(index.keys(np.arange(len(index))))) if options.keys else ())
    return {
        "kind": "tars",
        "keep": list(options.keep),
        "drop": list(options.drop),
        "rename": dict(options.rename or {}),
        "keys": None if options.keys is None else blake2b(text.encode(), digest_size=8).hexdigest(),
        **({} if options.where is None else {"where": options.where}),
        "in_place": [],  # older versions replaced their source
    }


def _origin(index: Index) -> list[dict[str, Any]]:
    """Return the provenance in the indexes beside the shards."""
    places = dict.fromkeys(beside(shard.path, INDEX_NAME) for shard in index.shards)
    infos = [document.info for document in map(find_document, places) if document is not None]
    names = ("source", "options", "split", "appended", "removed", "repaired")
    return [{name: info[name] for name in names if name in info} for info in infos]


def _check_apart(index: Index, out: str) -> None:
    """Raise UsageError if a shard lies in the output folder."""
    real, *others = (
        folder.rstrip("/") if is_remote(folder) else os.path.realpath(folder)
        for folder in (out, *(folder_of(shard.path) or "." for shard in index.shards))
    )
    if real in others:
        raise UsageError(
            f"{out} holds {index.shards[others.index(real)].name}, which is being converted.",
            "Put the shards into another folder.",
        )


def ids_of_keys(index: Index, among: Ints, keys: Path | Sequence[str]) -> Ints:
    """Return those of the ids `among` whose samples have one of the keys.

    keys: a list, or a file with one key on each line. Raises SourceError for keys that none has.
    """
    wanted = _read_keys(os.fspath(keys)) if isinstance(keys, (str, os.PathLike)) else set(keys)
    found = index.keys(among)
    if missing := wanted.difference(found):
        raise SourceError(
            f"{len(missing)} of {len(wanted)} keys are in no shard, such as '{min(missing)}'. A "
            "key is the name of a member up to its first dot.",
            "Take out the keys that do not exist.",
        )
    return np.asarray(among[np.array([key in wanted for key in found], bool)])


def _read_keys(path: str) -> set[str]:
    check_there(path)
    try:
        with readable(path), open(path, encoding="utf-8") as file:
            keys = {line.strip() for line in file if line.strip()}
    except UnicodeDecodeError as error:
        raise SourceError(
            f"{path} is not UTF-8.",
            "Write one key on each line, in UTF-8.",
        ) from error
    reject(
        not keys,
        f"{path} holds no keys.",
        "Write one key on each line.",
    )
    return keys
