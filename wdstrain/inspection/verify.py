"""`wt.verify`: read every shard once and compare it with its index and with the other shards.

Nothing is repaired, and nothing stops at the first finding. For each sample its key and some 50
bytes are kept until the end. A key may occur in two shards, since many sets number anew in each
shard; equal bytes with it are a finding.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import chain, repeat
from typing import Any

import numpy as np

from wdstrain.conversion.listing import split_of
from wdstrain.decode.boxes import boxes
from wdstrain.decode.fields import mask
from wdstrain.decode.labels import field_of
from wdstrain.inspection.options import VerifyOptions
from wdstrain.inspection.result import Result, rows_of
from wdstrain.inspection.scan import (
    ShardCheck,
    ShardScan,
    as_packed,
    each_shard,
    field_kind,
    limited,
    missing,
    shards_at,
)
from wdstrain.inspection.values import parsed
from wdstrain.loader.stats import Finding
from wdstrain.report.printing import counted
from wdstrain.runtime.options import format_size, takes
from wdstrain.shards.columns import Column, ColumnBuilder, as_label
from wdstrain.shards.formats import EXTENSIONS, is_image
from wdstrain.shards.index import Index, join
from wdstrain.shards.kinds import ColumnInfo, scalar
from wdstrain.shards.offsets import Bools, Ints
from wdstrain.shards.resolve import open_index
from wdstrain.shards.selection import group_codes
from wdstrain.shards.tar import LINK
from wdstrain.shards.where import column_named

_NEARLY_ALL = 0.99  # share of the samples from which on a field counts as required
_LARGEST = 1 << 30  # bytes of a field that is decoded or compared
_DECODED = ("cls", "json", "npy", "text", "txt")  # fields that are decoded, besides images


@dataclass(repr=False)
class ShardsRead(Result):
    """Result of a verb that reads shards: how much it read, findings, and notes.

    findings: each with shard, key, field, offset, reason and `sentence`, which is its `str`. notes:
    sentences that report no damage.
    """

    shards: int = 0
    samples: int = 0
    bytes: int = 0
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON-able values."""
        findings = [{**one._asdict(), "sentence": one.sentence} for one in self.findings]
        return {**vars(self), "findings": findings, "ok": self.ok}

    def rows(self) -> list[tuple[str, str]]:
        """Return names and values as text."""
        own = {"bytes": format_size(self.bytes), "findings": len(self.findings), "notes": ""}
        return rows_of({**self.as_dict(), **own})


@dataclass(repr=False)
class Verification(ShardsRead):
    """Result of `wt.verify`: counts and findings.

    unindexed: shards without checksums, of which only the structure was checked. fields: samples
    that have each field. groups: number of groups that were compared between splits, by column.
    notes: what could not be checked.
    """

    unindexed: int = 0
    fields: dict[str, int] = field(default_factory=dict)
    groups: dict[str, int] = field(default_factory=dict)


@takes(VerifyOptions)
def verify(options: VerifyOptions) -> Verification:
    """Read shards, each once, and compare them with their index and with each other.

    Raises UsageError for addresses without shards. What is wrong with shards is in `findings`.
    """
    shards, findings = shards_at(options.urls)
    if options.where is not None:
        chosen = {shard.path for shard in open_index(options.urls).where(options.where).shards}
        shards = {path: index for path, index in shards.items() if path in chosen}
    work, progress = partial(_check, options.decode), options.progress
    checks, size = each_shard(shards, work, "verifying", progress, options.num_workers)
    result = Verification(
        shards=len(shards),
        bytes=size,
        findings=[*findings, *chain.from_iterable(check.findings for check in checks)],
        unindexed=sum(
            not (index.shards[0].sha256 or index.offsets.has_checksums) for index in shards.values()
        ),
    )
    if result.unindexed:
        result.notes.append(
            f"{result.unindexed} of {counted(result.shards, 'shard')} have no checksums: only "
            "their structure was checked"
        )
    labels = {
        label.field for index in shards.values() for label in index.labels if not label.is_joined
    }
    _compare_samples(checks, {*options.need, *labels}, result)
    _check_groups(result, [index for index in shards.values() if len(index)], options.group_by)
    return result


# --- one shard ------------------------------------------------------------------------------------


def _check(decode: bool, scan: ShardScan, expected: Index) -> ShardCheck:
    """Read a shard once and compare it. Raises StorageError or ShardError if it cannot be read."""
    check, labels = ShardCheck([]), expected.labels
    columns = ColumnBuilder([column.place for column in expected.columns])

    def wants(name: str, size: int) -> bool:
        is_read = name in EXTENSIONS or columns.reads(name)
        return size <= _LARGEST and (is_read or (decode and _can_decode(name, labels)))

    for key, members, values in scan.samples(wants):
        columns.add(values.items())
        contents = sorted((name, size, crc) for name, _, size, crc in members.values())
        pictures = (data for name, data in values.items() if name in EXTENSIONS and data)
        images = tuple(sorted(map(hash, pictures)))
        check.hashes.extend((hash((key, images, *contents)), hash(images) if images else 0))
        for name in values if decode else ():
            reason = _decode_error(name, values, labels)
            if reason:
                scan.faults.append(scan.finding(reason, key, name, members[name][1]))
    check.found = scan.index(expected.shards[0])
    if links := scan.ignored[LINK]:
        reason = (
            f"holds {links} links or devices, whose data no sample has. Pack the files that they "
            "name: tar --hard-dereference"
        )
        scan.faults.insert(0, scan.finding(reason))
    found = [*scan.damages, *scan.faults, *_changes(scan, check.found, expected, columns.finish())]
    check.findings = [*limited(found, len(found), "finding")]
    return check


def _changes(
    scan: ShardScan, found: Index, expected: Index, stored: Sequence[Column]
) -> Iterator[Finding]:
    """Yield what differs between a shard and its index: samples, checksums, and columns."""
    listed, lost = expected.shards[0], list[Finding]()
    if 0 < listed.bytes != scan.size:
        yield scan.finding(f"has {scan.size} bytes, its index says {listed.bytes}")
    differing = found.offsets.differences(expected.offsets) if len(expected) else []
    if differing and not scan.damages:
        yield scan.finding(
            f"holds other samples than its index says ({', '.join(differing)}). Run: wdstrain "
            "index on it"
        )
        return
    if listed.sha256 != scan.sha256 and expected.offsets.has_checksums:
        _, lost = as_packed(scan, expected)
    elif differing:
        lost = missing(scan, expected)
    if listed.sha256 not in ("", scan.sha256) and not (lost or scan.damages):
        note = ", though every field is as packed" if expected.offsets.has_checksums else ""
        yield scan.finding(f"has another sha256 than its index says{note}")
    yield from lost
    if len(expected) and not differing:
        changed = {(fault.key, fault.field) for fault in lost}
        faults = _column_changes(scan, expected, stored)
        yield from (fault for fault in faults if (fault.key, fault.field) not in changed)


def _column_changes(
    scan: ShardScan, expected: Index, stored: Sequence[Column]
) -> Iterator[Finding]:
    """Yield the values of columns that differ from those that were read from the shard."""
    for indexed, other in zip(expected.columns, stored, strict=True):
        if indexed.field not in expected.fields:
            continue  # its values do not come from the samples
        places = expected.offsets.extents[indexed.field][0]
        if indexed.kind == "text" and other.kind in ("integer", "number"):
            # Other shards hold texts. A number may have several spellings, such as 2 and 2.0.
            indexed = as_label(indexed, replace(indexed.info, kind="number"))
        values = as_label(other, indexed).values.to_pylist()
        rows = zip(places.to_pylist(), indexed.values.to_pylist(), values, strict=True)
        for number, (place, known, value) in enumerate(rows):
            if place is not None and repr(known) != repr(value):  # NaN equals NaN by its text
                reason = (
                    f"the index has {known!r:.80} in its column {indexed.name}, the shard "
                    f"{value!r:.80}. Run: wdstrain index FOLDER --columns {indexed.stored_as}"
                )
                yield scan.finding(reason, expected.key(number), indexed.field, place)


# --- decoding -------------------------------------------------------------------------------------


def _can_decode(field: str, labels: Sequence[ColumnInfo]) -> bool:
    """Return whether bytes of a field may be wrong for training. labels: of the index."""
    is_known = is_image(field) or field.rpartition(".")[2] in _DECODED
    return is_known or any(label.field == field for label in labels)


def _decode_error(field: str, values: Mapping[str, bytes], labels: Sequence[ColumnInfo]) -> str:
    """Return the reason that training cannot use a field; "" if it can. Nothing is unpickled.

    values: of the sample. labels: of the index.
    """
    mine, data = [label for label in labels if label.field == field], values[field]
    try:
        for label in mine:
            if label.kind == "mask":
                mask(field, classes=len(label.classes), ignore=label.ignored).numbers(data)
                continue
            if label.kind == "boxes":
                boxes(field, classes=label.classes).check(values)
                continue
            value = _field_of(label).delivered(scalar(memoryview(data), label.entry))
            if label.kind == "number" and not math.isfinite(value):
                return f"its {label.entry or field} is NaN or infinite, and cannot be trained on"
        if not mine and field.rpartition(".")[2] == "cls":
            return "" if str(scalar(memoryview(data), None)) else "it is empty"
        if not mine and _can_decode(field, ()):
            parsed(field, data)
    except Exception as error:  # parsers raise whatever they meet
        return str(error).split("\n")[0].strip().rstrip(".") or type(error).__name__
    return ""


_field_of = lru_cache(maxsize=256)(field_of)


# --- all shards -----------------------------------------------------------------------------------


def _compare_samples(
    checks: Sequence[ShardCheck], required: Collection[str], result: Verification
) -> None:
    """Compare the samples of all shards: missing fields, duplicates, images in two splits."""
    whole = join([check.found for check in checks] or [Index()])
    hashes = np.frombuffer(b"".join(check.hashes for check in checks), np.int64)
    contents, images = hashes.reshape(-1, 2).T
    has = {name: view[3] for name, view in zip(whole.fields, whole.offsets.views, strict=True)}
    counts = Counter({name: int(held.sum()) for name, held in has.items()})
    result.samples, result.fields = len(whole), dict(counts.most_common())
    result.findings += _lacking(whole, has, required)
    shards = whole.shard_of(np.arange(len(whole)))
    earlier, later = _pairs(contents, shards)
    places = (f"{whole.shard_with(n).shown} at offset {whole.offsets.start[n]}" for n in earlier)
    reasons = (f"the same sample, byte for byte, is in {place}" for place in places)
    result.findings += _findings(whole, later, reasons)
    result.findings += _leaks(whole, images, np.setdiff1d(np.flatnonzero(images), later), "image")


def _findings(index: Index, ids: Ints, reasons: Iterator[str]) -> Iterator[Finding]:
    """Return the findings of samples; of very many the first, and how many more there are."""
    found = (
        Finding(index.shard_with(n).shown, index.key(n), "", int(index.offsets.start[n]), reason)
        for n, reason in zip(ids.tolist(), reasons, strict=False)
    )
    return limited(found, len(ids), "sample")


def _pairs(codes: Ints, places: Ints) -> Ints:
    """Return (earlier, later) of samples with equal codes in different places. int64[2, n]

    A sample is later than one of them. places: of the samples, such as the numbers of their shards.
    """
    order = np.lexsort((places, codes))
    pairs = np.stack([order[:-1], order[1:]])
    is_pair = (np.diff(codes[pairs], axis=0) == 0) & (np.diff(places[pairs], axis=0) != 0)
    pairs = pairs[:, is_pair[0]]
    return pairs[:, np.argsort(pairs[1])]


def _lacking(
    whole: Index, has: Mapping[str, Bools], required: Collection[str]
) -> Iterator[Finding]:
    """Yield the samples that lack a field which is required, or which nearly all samples have.

    has: whether each sample has a field, by field. required: of "jpg;png" one is enough.
    """
    nothing, kinds = np.zeros(len(whole), np.bool_), dict[str, list[str]]()
    for name in sorted(has):
        kinds.setdefault(field_kind(name), []).append(name)
    rules = {some: [*map(str.strip, some.lower().split(";"))] for some in sorted(required)}
    for kind, names in ({**kinds, **rules}).items():
        ids = np.flatnonzero(~np.any([has.get(name, nothing) for name in names], axis=0))
        reason, count = f"it has no {' or '.join(names)}", len(whole) - len(ids)
        if kind not in rules:
            reason += f", which {count} of {counted(len(whole), 'sample')} have"
        if kind in rules or count >= _NEARLY_ALL * len(whole):
            yield from _findings(whole, ids, repeat(reason))


def _leaks(index: Index, codes: Ints, ids: Ints, what: str) -> Iterator[Finding]:
    """Yield a finding for each value of `codes` in another split, at its first sample there.

    ids: the samples that are compared. what: the codes stand for.
    """
    splits = np.array([s.split or split_of(s.name) for s in index.shards], object)
    ids = ids[splits[index.shard_of(ids)] != ""]
    names, places = np.unique(splits[index.shard_of(ids)], return_inverse=True)
    earlier, later = _pairs(codes[ids], places)
    reasons = (
        f"its {what} is also in split {names[places[n]]!r}: key {index.key(ids[n])!r} in "
        f"{index.shard_with(ids[n]).shown}"
        for n in earlier
    )
    yield from _findings(index, ids[later], reasons)


def _check_groups(result: Verification, indexes: list[Index], group_by: str | None) -> None:
    """Find groups that are in two splits. group_by: a column; None: as the conversions recorded."""
    whole = join(indexes or [Index()])
    recorded = dict.fromkeys((i.info.get("split") or {}).get("group_by") or "" for i in indexes)
    known = [name for name in recorded if column_named(whole, name) is not None]
    for column in [group_by] if group_by else known:
        codes = group_codes(whole, column)
        result.groups[column] = len(np.unique(codes))
        result.findings += _leaks(whole, codes, np.arange(len(whole)), f"group of {column!r}")
