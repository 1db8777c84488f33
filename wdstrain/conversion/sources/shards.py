"""Samples of existing shards, in one forward pass; also of compressed tars.

Samples may be filtered, and fields dropped or renamed. Splits and labels of the index are kept. A
sample whose bytes differ from the checksums of the index is bad. Sets that number their classes
differently are not merged: a number would mean two classes.

Members of compressed tars are grouped into samples by webdataset's rule: the key is the name up to
the first dot of its last part. They are not trusted: their unpacked size is limited.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from hashlib import blake2b
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from wdstrain.conversion.listing import (
    BadSample,
    Part,
    Sample,
    Source,
    check_there,
    count_ignored,
    drawn_again,
    field_name,
    readable,
    split_of,
)
from wdstrain.conversion.source_options import TarsOptions
from wdstrain.errors import DamageError, SampleError, ShardError, SourceError, UsageError
from wdstrain.shards.declare import with_columns_of, with_label
from wdstrain.shards.index import Index
from wdstrain.shards.index_io import find_document
from wdstrain.shards.kinds import ColumnInfo
from wdstrain.shards.resolve import open_index
from wdstrain.shards.tar import Member, SkippedMembers
from wdstrain.shards.tar_stream import members, open_tar, samples
from wdstrain.storage.addresses import COMPRESSED, INDEX_NAME, beside, expand, folder_of
from wdstrain.storage.files import open_source
from wdstrain.storage.remote import is_remote, name_of, shown_path

_MOST_RATIO = 1000  # unpacked bytes for each byte of an archive, beyond the first _FREE
_FREE = 1 << 30  # bytes that any archive may unpack to


def stream_tars(options: TarsOptions, note: Callable[[str], None] | None = None) -> Source:
    """Return the chosen samples of shards in their order.

    Raises UsageError for fields that no shard has, for sets whose labels differ, and for shards
    that lie in the output folder; SourceError for keys that no shard has.
    """
    given = options.urls
    urls = [os.fspath(u) for u in ([given] if isinstance(given, (str, os.PathLike)) else given)]
    if options.classes is not None and options.label is None:
        raise UsageError(
            "classes=... needs label=..., whose values it names.",
            "Give both.",
        )
    wanted = None if options.keys is None else read_keys(options.keys)
    source = _stated(options, wanted)
    paths = [path for url in urls for path in _paths(url)]
    if any(COMPRESSED.search(name_of(path)) for path in paths):
        return _stream_compressed(paths, options, wanted, source)
    index = open_index(urls, note=note)
    _check_apart(index, os.fspath(options.out))
    names = _kept_fields(index, options)
    index, labels = _labels(index, names, options)
    ignored: dict[str, int] = dict(index.info.get("ignored", {})) if "made" in index.info else {}
    everything = len(index)
    if options.where is not None:
        index = with_columns_of(index, options.where).where(options.where)
    count_ignored(ignored, "samples that do not meet the condition", everything - len(index))
    if wanted is not None:
        keys = index.keys(np.arange(len(index)))
        _check_keys(options, wanted, keys)
        is_wanted = np.array([key in wanted for key in keys], np.bool_)
        count_ignored(ignored, "keys that were not asked for", int((~is_wanted).sum()))
        index = index.take(np.flatnonzero(is_wanted))
    splits = {shard.name: shard.split or split_of(shard.name) for shard in index.shards}
    renamed = tuple(replace(label, field=names[label.field]) for label in labels)
    stratum = next((label for label in labels if label.is_class), None)

    def entries() -> Iterator[Sample | BadSample]:
        codes, classes = _strata(index, stratum)
        for number, fields in _read(index):
            shard = index.shard_with(number)
            if isinstance(fields, str):
                yield BadSample(shard.shown, 0, index.key(number), fields)
                continue
            kept = [(names[field], data) for field, data in fields.items() if field in names]
            split, kind = splits[shard.name], classes[codes[number]]
            yield Sample(index.key(number), kept, split, stratum=kind)

    folders = sorted({folder_of(shard.path) or "." for shard in index.shards})
    source |= {"fields": dict(names), "data": index.fingerprint, "origin": _origin(index)}
    source |= drawn_again(splits.values(), options)
    return Source(
        urls[0] if len(urls) == 1 and not is_remote(urls[0]) else ", ".join(folders),
        entries,
        lambda: renamed,
        source,
        len(index),
        ignored,
        resplit=True,
        stratum=stratum.name if stratum else "",
    )


def _strata(index: Index, label: ColumnInfo | None) -> tuple[Any, list[str]]:
    """Return (place of each sample's class: int[n], the classes), from the column of a label."""
    column = next((c for c in index.columns if label and c.place == label.place), None)
    values = pa.nulls(len(index), pa.string()) if column is None else column.values
    coded = values if pa.types.is_dictionary(values.type) else values.dictionary_encode()
    classes = [*map(str, coded.dictionary.to_pylist()), ""]
    return pc.fill_null(coded.indices, len(classes) - 1).to_numpy(), classes


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
        if field not in index.fields:
            raise UsageError(
                f"no shard has a field '{field}'.",
                f"Use one of: {', '.join(index.fields)}",
            )
    try:
        return _new_names(index.fields, options)
    except SampleError as error:
        raise UsageError(
            f"the samples cannot be packed: {error}.",
            "Choose others.",
        ) from None


def _new_names(fields: Iterable[str], options: TarsOptions) -> dict[str, str]:
    """Return {field: new name} of the fields that stay. Raises SampleError if they do not fit."""
    keep, drop, rename = options.keep, options.drop, options.rename or {}
    kept = [field for field in fields if (field in keep if keep else field not in drop)]
    names = {field: field_name(rename.get(field, field)) for field in kept}
    if not names or len(set(names.values())) < len(names):
        some = ", ".join(names.values()) or "(none)"
        raise SampleError(f"it would have the fields {some}, but needs one or more, each once")
    return names


def _check_keys(options: TarsOptions, wanted: set[str], keys: Iterable[str]) -> None:
    """Raise SourceError if the shards lack a key that is wanted."""
    if missing := wanted.difference(keys):
        raise SourceError(
            f"{options.keys}: {len(missing)} of {len(wanted)} keys are in no shard, such as "
            f"'{min(missing)}'. A key is the name of a member up to its first dot.",
            "Remove the keys that do not exist.",
        )


def _stated(options: TarsOptions, keys: set[str] | None) -> dict[str, Any]:
    """Return the arguments of a conversion of shards, as its provenance has them."""
    text = "\n".join(sorted(keys or ()))
    arguments: dict[str, Any] = {
        "keep": list(options.keep),
        "drop": list(options.drop),
        "rename": dict(options.rename or {}),
        "keys": None if keys is None else blake2b(text.encode(), digest_size=8).hexdigest(),
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
                f"{out} holds {shard.name}, which is being converted.",
                "Put the shards into another folder.",
            )


def _real(folder: str) -> str:
    return folder.rstrip("/") if is_remote(folder) else os.path.realpath(folder)


def _labels(
    index: Index, names: Iterable[str], options: TarsOptions
) -> tuple[Index, tuple[ColumnInfo, ...]]:
    """Return the index with the label that the options declare, and the labels of kept fields.

    It replaces a label of its name. Raises UsageError if the sets differ in their labels.
    """
    kept = set(names)
    if any(label.field in kept for label in index.differing):
        raise UsageError(
            "these sets have different labels, or some have none: a class number would mean two "
            "classes.",
            "Convert each set by itself, or drop the field of the label.",
        )
    labels = tuple(label for label in index.labels if label.field in kept)
    if options.label is None:
        return index, labels
    index = with_label(index, options.label, options.classes)
    declared = index.labels[-1]
    if declared.field not in names:
        raise UsageError(
            "its field would be left out.",
            f"Keep the field {declared.field!r}.",
            option="label",
            value=options.label,
        )
    others = (o for o in labels if declared.place != o.place and declared.name != o.name)
    return index, (*others, declared)


def read_keys(path: str) -> set[str]:
    """Return the keys in a file with one key on each line."""
    check_there(path)
    try:
        with readable(path), open(path, encoding="utf-8") as file:
            keys = {line.strip() for line in file if line.strip()}
    except UnicodeDecodeError as error:
        raise SourceError(
            f"{path} is not UTF-8.",
            "Write one key on each line, in UTF-8.",
        ) from error
    if not keys:
        raise SourceError(
            f"{path} holds no keys.",
            "Write one key on each line.",
        )
    return keys


# --- compressed tars ------------------------------------------------------------------------------


def _paths(address: str) -> list[str]:
    """Return the compressed tars of a folder that has neither an index nor a tar; else its shards."""
    if is_remote(address) and COMPRESSED.search(name_of(address)):
        return [address]
    if os.path.isdir(address):
        with readable(address, "the permissions of the folder"):
            names = sorted(os.listdir(address))
        if not any(name == INDEX_NAME or name.endswith(".tar") for name in names):
            return [os.path.join(address, name) for name in names if COMPRESSED.search(name)]
    return expand(address)


def _stream_compressed(
    paths: list[str], options: TarsOptions, keys: set[str] | None, source: dict[str, Any]
) -> Source:
    """Return the samples of compressed tars, in their order. keys: None: all.

    where is refused: the type of a column is known after the last sample only, so a condition could
    not be evaluated in one forward pass.
    """
    if options.where is not None or options.label is not None:
        raise UsageError(
            "where and label need the columns of an index, and archives have none.",
            "Convert the archives first, then the new shards: wdstrain convert tars OUT NEW "
            "--where CONDITION",
        )
    ignored: dict[str, int] = {}

    def entries() -> Iterator[Sample | BadSample]:
        for path in paths:
            split, skipped = split_of(name_of(path)), SkippedMembers()
            for sample in samples(_unpacked(path, skipped), shown_path(path), skipped):
                key = sample.pop("__key__")
                if keys is not None and key not in keys:
                    count_ignored(ignored, "keys that were not asked for")
                    continue
                try:
                    names = _new_names(sample, options)
                    kept: list[Part] = [(name, sample[field]) for field, name in names.items()]
                    yield Sample(key, kept, split)
                except SampleError as error:
                    yield BadSample(shown_path(path), 0, key, str(error))
            for reason, count in skipped.items():
                count_ignored(ignored, reason, count)

    name = ", ".join(map(shown_path, paths[:3])) + ", ..." * (len(paths) > 3)
    source |= drawn_again(map(split_of, map(name_of, paths)), options)
    return Source(name, entries, tuple, source, None, ignored, resplit=True)


def _unpacked(path: str, skipped: SkippedMembers) -> Iterator[Member]:
    """Yield the members of a tar, up to a limit for all of them together."""
    with open_source(path) as file:
        left = max(_FREE, _MOST_RATIO * file.size)
    with open_tar(path) as (stream, _):
        for member in members(stream, shown_path(path), skipped):
            left -= member.size
            if left < 0:
                raise ShardError(
                    f"{shown_path(path)} unpacks to more than {_MOST_RATIO} times its size: it may be "
                    "made to fill a disk. If you trust it, unpack it and convert the result."
                )
            yield member
