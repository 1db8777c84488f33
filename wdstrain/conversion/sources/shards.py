"""Samples of existing shards, in one forward pass.

Samples may be filtered, and fields dropped or renamed. Splits and labels of the index are kept. A
sample whose bytes differ from the checksums of the index is bad. Sets that number their classes
differently are not merged: a number would mean two classes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from hashlib import blake2b
from typing import Any

import numpy as np

from wdstrain.conversion.listing import (
    BadSample,
    Sample,
    Source,
    check_there,
    count_ignored,
    drawn_again,
    field_name,
    file_mark,
    readable,
    split_of,
)
from wdstrain.conversion.source_options import TarsOptions
from wdstrain.conversion.sources.archives import archives_in, stream_archives
from wdstrain.errors import DamageError, SampleError, SourceError, UsageError
from wdstrain.shards.declare import with_columns_of, with_label
from wdstrain.shards.index import Index
from wdstrain.shards.index_document import find_document
from wdstrain.shards.kinds import ColumnInfo
from wdstrain.shards.label_values import classes_in
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
    if options.classes is not None and options.label is None:
        raise UsageError("classes=... needs label=..., whose values it names. Give both.")
    if options.keep and options.drop:
        raise UsageError("keep names the fields that stay, drop those that go. Give one of them.")
    if archives := archives_in(urls):
        return _stream_archives(archives, options)
    index = open_index(urls, note=note)
    _check_apart(index, os.fspath(options.out))
    names = _kept_fields(index, options)
    ignored: dict[str, int] = dict(index.info.get("ignored", {})) if "made" in index.info else {}
    everything = len(index)
    if options.where is not None:
        index = with_columns_of(index, options.where).where(options.where)
    count_ignored(ignored, "samples that do not meet the condition", everything - len(index))
    wanted = _wanted_keys(index, options)
    if wanted is not None:
        keys = index.keys(np.arange(len(index)))
        is_wanted = np.array([key in wanted for key in keys], np.bool_)
        count_ignored(ignored, "keys that were not asked for", int((~is_wanted).sum()))
        index = index.take(np.flatnonzero(is_wanted))
    splits = {shard.name: shard.split or split_of(shard.name) for shard in index.shards}
    labels = _labels(index, names)
    if options.label is not None:
        labels = _with_declared(index, labels, options)
    renamed = tuple(
        replace(label, field=names[label.field]) for label in labels if label.field in names
    )
    stratum = next((label for label in labels if label.is_class), None)

    def entries() -> Iterator[Sample | BadSample]:
        for number, fields in _read(index):
            shard = index.shard_with(number)
            if isinstance(fields, str):
                yield BadSample(shard.shown, 0, index.key(number), fields)
                continue
            kept = [(names[field], data) for field, data in fields.items() if field in names]
            kinds = []
            if stratum is not None and stratum.field in fields:
                data = memoryview(fields[stratum.field])
                kinds = classes_in(data, stratum.entry, stratum.classes)
            yield Sample(
                index.key(number),
                kept,
                splits[shard.name],
                stratum=next(iter(kinds), ""),
            )

    folders = sorted({folder_of(shard.path) or "." for shard in index.shards})
    source = stated(options)
    source |= {"fields": dict(names), "data": index.fingerprint, "origin": _origin(index)}
    source |= drawn_again(splits.values(), options)
    mark = (
        f"{index.fingerprint} {file_mark(*(shard.path for shard in index.shards))} "
        f"{sorted(wanted or ())} {labels} {[shard.split for shard in index.shards]!r}"
    )
    return Source(
        urls[0] if len(urls) == 1 and not is_remote(urls[0]) else ", ".join(folders),
        entries,
        lambda: renamed,
        source,
        len(index),
        mark,
        ignored,
        resplit=True,
        stratum=stratum.name if stratum else "",
    )


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
    keep, drop, rename = options.keep, options.drop, options.rename or {}
    for field in [*keep, *drop, *rename]:
        if field not in index.fields:
            raise UsageError(
                f"no shard has a field '{field}'. Use one of: {', '.join(index.fields)}"
            )
    kept = [field for field in index.fields if (field in keep if keep else field not in drop)]
    gone = [field for field in rename if field not in kept]
    if gone:
        raise UsageError(
            f"the field '{gone[0]}' is renamed and would not stay. Rename it, or leave it out."
        )
    try:
        names = {field: field_name(rename.get(field, field)) for field in kept}
    except SampleError as error:
        raise UsageError(f"{error}. Choose another name.") from None
    if not names or len(set(names.values())) < len(names):
        raise UsageError(
            f"these samples would have the fields {', '.join(names.values()) or '(none)'}. They "
            "need one or more fields with different names."
        )
    return names


def _wanted_keys(index: Index, options: TarsOptions) -> set[str] | None:
    """Return the keys in the file of keys; None if all samples are wanted."""
    if options.keys is None:
        return None
    wanted = read_keys(options.keys)
    if missing := wanted.difference(index.keys(np.arange(len(index)))):
        raise SourceError(
            f"{options.keys}: {len(missing)} of {len(wanted)} keys are in no shard, such as "
            f"'{min(missing)}'. A key is the name of a member up to its first dot. Remove the keys "
            "that do not exist."
        )
    return wanted


def _stream_archives(paths: list[str], options: TarsOptions) -> Source:
    """Return the samples of compressed tars and zip archives.

    where is refused: the type of a column is known after the last sample only, so a condition could
    not be evaluated in one forward pass.
    """
    if options.where is not None or options.label is not None:
        raise UsageError(
            "where and label need the columns of an index, and archives have none. Convert the "
            "archives first, then the new shards: wdstrain convert tars OUT NEW --where CONDITION"
        )
    keys = read_keys(options.keys) if options.keys is not None else None
    return stream_archives(paths, options, keys, stated(options))


def stated(options: TarsOptions) -> dict[str, Any]:
    """Return the arguments of a conversion of shards, without opening the shards."""
    keys = None
    if options.keys is not None:
        text = "\n".join(sorted(read_keys(options.keys)))
        keys = blake2b(text.encode(), digest_size=8).hexdigest()
    arguments: dict[str, Any] = {
        "keep": list(options.keep),
        "drop": list(options.drop),
        "rename": dict(options.rename or {}),
        "keys": keys,
    }
    for name in ("where", "label", "classes"):
        if (value := getattr(options, name)) is not None:
            arguments[name] = value if isinstance(value, str) else list(value)
    return {"kind": "tars", **arguments, "in_place": []}  # older versions replaced their source


def _origin(index: Index) -> list[dict[str, Any]]:
    """Return the provenance in the indexes beside the shards."""
    places = dict.fromkeys(beside(shard.path, INDEX_NAME) for shard in index.shards)
    infos = [document.info for document in map(find_document, places) if document is not None]
    names = ("source", "options", "split", "appended", "removed", "repaired")
    return [{name: info[name] for name in names if name in info} for info in infos]


def _check_apart(index: Index, out: str) -> None:
    """Raise UsageError if a shard lies in the output folder."""
    for shard in index.shards:
        if _real(folder_of(shard.path) or ".") == _real(out):
            raise UsageError(
                f"{out} holds {shard.name}, which is being converted. Put the shards into another "
                f"folder."
            )


def _real(folder: str) -> str:
    return folder.rstrip("/") if is_remote(folder) else os.path.realpath(folder)


def _labels(index: Index, names: Mapping[str, str]) -> tuple[ColumnInfo, ...]:
    """Return the labels whose fields are kept. Raises UsageError if the sets differ in them."""
    by_labels: dict[tuple[ColumnInfo, ...], str] = {}
    for place in dict.fromkeys(beside(shard.path, INDEX_NAME) for shard in index.shards):
        document = find_document(place)
        known = document.labels if document is not None else ()
        labels = tuple(label for label in known if label.field in names)
        by_labels.setdefault(labels, place)
    if len(by_labels) > 1 and any(by_labels):
        raise UsageError(
            "these sets have different labels, or some have none: a class number would mean two "
            "classes. Convert each set by itself, or drop the field of the label. A set with "
            f"labels: {folder_of(next(place for labels, place in by_labels.items() if labels))}"
        )
    return next(iter(by_labels), ())


def _with_declared(
    index: Index, labels: tuple[ColumnInfo, ...], options: TarsOptions
) -> tuple[ColumnInfo, ...]:
    """Return the labels with the one that the options declare. It replaces a label of its name."""
    assert options.label is not None
    declared = with_label(index, options.label, options.classes).labels[-1]
    stays = declared.field in options.keep if options.keep else declared.field not in options.drop
    if not stays:
        raise UsageError(
            f"label={options.label!r}: its field would be left out. Keep the field "
            f"{declared.field!r}."
        )
    others = [
        label for label in labels if declared.place != label.place and declared.name != label.name
    ]
    return (*others, declared)


def read_keys(path: str) -> set[str]:
    """Return the keys in a file with one key on each line."""
    check_there(path)
    try:
        with readable(path), open(path, encoding="utf-8") as file:
            keys = {line.strip() for line in file if line.strip()}
    except UnicodeDecodeError as error:
        raise SourceError(f"{path} is not UTF-8. Write one key on each line, in UTF-8.") from error
    if not keys:
        raise SourceError(f"{path} holds no keys. Write one key on each line.")
    return keys
