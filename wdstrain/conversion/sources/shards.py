"""Samples of existing shards as a stream, in one forward pass.

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
from isal.isal_zlib import crc32

from wdstrain.conversion.catalog import SpanCatalog
from wdstrain.conversion.listing import (
    BadSample,
    BadSamples,
    Part,
    Stream,
    StreamSample,
    check_there,
    count_ignored,
    field_name,
    file_mark,
    split_of,
)
from wdstrain.conversion.sample_meta import sample_meta
from wdstrain.conversion.shard_plan import batches
from wdstrain.conversion.source_options import TarsOptions
from wdstrain.conversion.sources.archives import ArchiveFields, archives_in, stream_archives
from wdstrain.errors import SampleError, SourceError, UsageError
from wdstrain.shards.declare import with_columns_of, with_label
from wdstrain.shards.index import Index
from wdstrain.shards.index_document import find_document
from wdstrain.shards.kinds import ColumnInfo
from wdstrain.shards.label_values import classes_in
from wdstrain.shards.offsets import Ints
from wdstrain.shards.resolve import open_index
from wdstrain.storage.addresses import INDEX_NAME, beside, folder_of
from wdstrain.storage.remote import is_remote

_BLOCK = 16 << 20  # bytes read at a time


def stream_tars(options: TarsOptions, note: Callable[[str], None] | None = None) -> Stream:
    """Return the chosen samples of shards in their order.

    Raises UsageError for fields that no shard has and for sets whose labels differ, SourceError for
    keys that no shard has.
    """
    urls = addresses_of(options)
    if options.classes is not None and options.label is None:
        raise UsageError("classes=... needs label=..., whose values it names. Give both.")
    if options.keep and options.drop:
        raise UsageError("keep names the fields that stay, drop those that go. Give one of them.")
    if archives := archives_in(urls):
        return _stream_archives(archives, options)
    index = open_index(urls, note=note)
    names = _kept_fields(index, options)
    _check_replaced(index, os.fspath(options.out))
    everything = len(index)
    if options.where is not None:
        index = with_columns_of(index, options.where).where(options.where)
    wanted = _wanted_keys(index, options)
    labels = _labels(index, names)
    if options.label is not None:
        labels = _with_declared(index, labels, options)
    renamed = tuple(
        replace(label, field=names[label.field]) for label in labels if label.field in names
    )
    stratum = next((label for label in labels if label.is_class), None)
    title = (
        urls[0]
        if len(urls) == 1 and not is_remote(urls[0])
        else ", ".join(sorted({folder_of(s.path) or "." for s in index.shards}))
    )
    ignored: dict[str, int] = dict(index.info.get("ignored", {})) if "made" in index.info else {}
    if len(index) < everything:
        ignored["samples that do not meet the condition"] = everything - len(index)

    def entries(bad_samples: BadSamples) -> Iterator[StreamSample]:
        for number, parts in stored_samples(index, np.arange(len(index))):
            key, shard = index.key(number), index.shard_with(number)
            split = shard.split or split_of(shard.name)
            try:
                if wanted is not None and key not in wanted:
                    count_ignored(ignored, "keys that were not asked for")
                    continue
                if changed := changed_field(index, number, parts):
                    raise SampleError(
                        f"the bytes of its {changed} differ from what was packed (crc32)"
                    )
                kept = [(names[field], data) for field, data in parts if field in names]
                if not kept:
                    raise SampleError(f"it has none of the fields {', '.join(names)}")
                data = dict(parts).get(stratum.field) if stratum is not None else None
                kind = ""
                if stratum is not None and data is not None:
                    named = classes_in(memoryview(data), stratum.entry, stratum.classes)
                    kind = next(iter(named), "")
            except SampleError as error:
                bad_samples.put(BadSample(shard.shown, 0, key, str(error)))
                continue
            yield StreamSample(key, kept, split, stratum=kind)

    source = stated(options)
    source |= {"fields": dict(names), "data": index.fingerprint, "origin": _origin(index)}
    total = None if wanted is not None else len(index)
    files = file_mark(*(shard.path for shard in index.shards))
    mark = f"{index.fingerprint} {files} {sorted(wanted or ())} {labels}"
    mark += repr([shard.split for shard in index.shards])
    return Stream(
        str(title),
        entries,
        lambda: renamed,
        source,
        total,
        mark,
        ignored,
        resplit=True,
        stratum=stratum.name if stratum else "",
    )


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


def _stream_archives(paths: list[str], options: TarsOptions) -> Stream:
    """Return the samples of compressed tars and zip archives.

    where is refused: the type of a column is known after the last sample only, so a condition could
    not be evaluated in one forward pass.
    """
    if options.where is not None or options.label is not None:
        raise UsageError(
            "where and label need the columns of an index, and archives have none. Convert the "
            "archives first, then the new shards: wdstrain convert tars OUT NEW --where CONDITION"
        )
    fields = ArchiveFields(
        keep=frozenset(options.keep),
        drop=frozenset(options.drop),
        rename=dict(options.rename or {}),
        keys=read_keys(options.keys) if options.keys is not None else None,
    )
    return stream_archives(paths, fields, stated(options))


def addresses_of(options: TarsOptions) -> list[str]:
    """Return the addresses of the shards as texts."""
    urls = options.urls
    return [os.fspath(url) for url in ([urls] if isinstance(urls, (str, os.PathLike)) else urls)]


def stated(options: TarsOptions) -> dict[str, Any]:
    """Return the arguments of a conversion of shards, without opening the shards.

    in_place: the addresses that lie in `out`; [] if none does.
    """
    keys = None
    if options.keys is not None:
        keys = blake2b(
            "\n".join(sorted(read_keys(options.keys))).encode(), digest_size=8
        ).hexdigest()
    addresses, out = addresses_of(options), os.fspath(options.out)
    inside = [address for address in addresses if _within(address, out)] if out else []
    places = (
        [address if is_remote(address) else os.path.relpath(address, out) for address in addresses]
        if inside
        else []
    )
    arguments: dict[str, Any] = {
        "keep": list(options.keep),
        "drop": list(options.drop),
        "rename": dict(options.rename or {}),
        "keys": keys,
    }
    for name in ("where", "label", "classes"):
        if (value := getattr(options, name)) is not None:
            arguments[name] = value if isinstance(value, str) else list(value)
    return {"kind": "tars", **arguments, "in_place": places}


def _origin(index: Index) -> list[dict[str, Any]]:
    """Return the provenance in the indexes beside the shards."""
    places = dict.fromkeys(beside(shard.path, INDEX_NAME) for shard in index.shards)
    infos = [document.info for document in map(find_document, places) if document is not None]
    names = ("source", "options", "split", "appended", "removed", "repaired")
    return [{name: info[name] for name in names if name in info} for info in infos]


def _check_replaced(index: Index, out: str) -> None:
    """Raise UsageError if the set in `out` has shards that are no sources: they would be lost."""
    place = f"{out.rstrip('/')}/{INDEX_NAME}"
    mine = {_real(shard.path) for shard in index.shards}
    if not out or not mine & {
        _real(f"{out.rstrip('/')}/{os.path.basename(path)}") for path in mine
    }:
        return
    document = find_document(place)
    rows = [shard.name for shard in document.shards] if document is not None else []
    left = [name for name in rows if _real(f"{out.rstrip('/')}/{name}") not in mine]
    if left:
        raise UsageError(
            f"{out} also holds {left[0]}{f' and {len(left) - 1} more' if len(left) > 1 else ''}, "
            "which would be lost: the result replaces all shards of that folder. Name all of its "
            "shards as sources, or choose another folder."
        )


def _real(path: str) -> str:
    return path if is_remote(path) else os.path.realpath(path)


def _within(address: str, folder: str) -> bool:
    """Return whether an address means a folder, its index, or shards in it."""
    if is_remote(address) or is_remote(folder):
        return folder.rstrip("/") in (address.rstrip("/"), address.rpartition("/")[0])
    real = os.path.realpath(folder)
    return real in (os.path.realpath(address), os.path.realpath(os.path.dirname(address) or "."))


def stored_samples(index: Index, ids: Ints) -> Iterator[tuple[int, list[Part]]]:
    """Yield (id, parts) of samples of shards, read forward. ids: ascending."""
    file = index.shard_of(np.arange(len(index))).astype(np.int32)
    catalog = SpanCatalog(
        "", [s.path for s in index.shards], file, index.offsets, sample_meta((), 0)
    )
    for group in batches(ids, catalog.sizes[ids], _BLOCK):
        for number, parts in zip(group.tolist(), catalog.fetch(group), strict=True):
            assert not isinstance(parts, SampleError)
            yield number, parts


def changed_field(index: Index, number: int, parts: list[Part]) -> str | None:
    """Return the first field whose bytes have another crc32 than the index says."""
    crcs = index.offsets.members_of(np.array([number])).crc.tolist()
    for crc, (field, data) in zip(crcs, parts, strict=True):
        if crc and crc32(data) != crc:
            return field
    return None


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
        with open(path, encoding="utf-8") as file:
            keys = {line.strip() for line in file if line.strip()}
    except OSError as error:
        raise SourceError(
            f"{path}: the file of keys cannot be read: {error.strerror}. Check its permissions."
        ) from error
    except UnicodeDecodeError as error:
        raise SourceError(f"{path} is not UTF-8. Write one key on each line, in UTF-8.") from error
    if not keys:
        raise SourceError(f"{path} holds no keys. Write one key on each line.")
    return keys
