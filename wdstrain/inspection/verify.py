"""`wt.verify`: read every shard once and compare it with its index and with the other shards.

Nothing is repaired, and nothing stops at the first finding. For each sample its key and some 50
bytes are kept until the end. A key that occurs in two shards is a note, since many sets number anew
in each shard; equal bytes with it are a finding.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import chain, combinations
from typing import Any

import numpy as np

from wdstrain.conversion.listing import split_of
from wdstrain.decode.fields import mask
from wdstrain.decode.formats import EXTENSIONS, is_image
from wdstrain.decode.labels import field_of
from wdstrain.errors import UsageError
from wdstrain.inspection.options import VerifyOptions
from wdstrain.inspection.result import Result, Size, rows_of
from wdstrain.inspection.scan import (
    MOST,
    ShardCheck,
    ShardScan,
    compared,
    each_shard,
    field_kind,
    limited,
    shards_at,
)
from wdstrain.inspection.values import parsed
from wdstrain.loader.stats import Finding
from wdstrain.report.printing import counted
from wdstrain.runtime.options import takes
from wdstrain.shards.columns import Column, ColumnBuilder, as_label
from wdstrain.shards.index import Index, join
from wdstrain.shards.kinds import ColumnInfo, scalar
from wdstrain.shards.offsets import Bools, Ints
from wdstrain.shards.resolve import open_index
from wdstrain.shards.selection import group_codes
from wdstrain.shards.tar import LINK

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
        own = {"bytes": Size(self.bytes), "findings": len(self.findings), "notes": ""}
        return rows_of({**self.as_dict(), **own})


@dataclass(repr=False)
class Verification(ShardsRead):
    """Result of `wt.verify`: counts and findings.

    unindexed: shards without checksums, of which only the structure was checked. fields: samples
    that have each field. columns: samples whose value in the index was compared, by column.
    decoded: members by field, with `decode`; those of unknown types and of more than 1 GiB are not
    decoded. ignored: members that belong to no sample, by reason. groups: number of groups that
    were compared between splits, by column. notes: what could not be checked, and keys that two
    shards share.
    """

    unindexed: int = 0
    fields: dict[str, int] = field(default_factory=dict)
    columns: dict[str, int] = field(default_factory=dict)
    decoded: dict[str, int] = field(default_factory=dict)
    ignored: dict[str, int] = field(default_factory=dict)
    groups: dict[str, int] = field(default_factory=dict)


@takes(VerifyOptions)
def verify(options: VerifyOptions) -> Verification:
    """Read shards, each once, and compare them with their index and with each other.

    Raises UsageError for addresses without shards. What is wrong with shards is in `findings`.
    """
    need = _needed(options.need)
    shards, findings = shards_at(options.urls)
    if options.where is not None:
        chosen = {shard.path for shard in open_index(options.urls).where(options.where).shards}
        shards = {path: index for path, index in shards.items() if path in chosen}
    work, progress = partial(_check, options.decode), options.progress
    checks, size = each_shard(shards, work, "verifying", progress, options.num_workers)
    counts = sum((check.counts for check in checks), Counter[tuple[str, str]]())
    result = Verification(
        shards=len(shards),
        bytes=size,
        findings=[*findings, *chain.from_iterable(check.findings for check in checks)],
        unindexed=counts["unindexed", ""],
        columns=_of(counts, "columns"),
        decoded=_of(counts, "decoded"),
        ignored=_of(counts, "ignored"),
    )
    if result.unindexed:
        part = f"{result.unindexed} of {counted(result.shards, 'shard')} have no checksums"
        result.notes.append(f"{part}: only their structure was checked")
    labels = {label.field for index in shards.values() for label in index.labels}
    _compare_samples(checks, [*need, *sorted(labels - {*need})], result)
    _check_groups(result, [index for index in shards.values() if len(index)], options.group_by)
    return result


def _of(counts: Counter[tuple[str, str]], kind: str) -> dict[str, int]:
    return {name: count for (of, name), count in counts.items() if of == kind and count}


# --- one shard ------------------------------------------------------------------------------------


def _check(decode: bool, scan: ShardScan, expected: Index) -> ShardCheck:
    """Read a shard once and compare it. Raises StorageError or ShardError if it cannot be read."""
    check, listed, labels = ShardCheck([]), expected.shards[0], expected.labels
    columns, faults = ColumnBuilder([column.place for column in expected.columns]), scan.faults

    def wants(name: str, size: int) -> bool:
        is_decoded = decode and size <= _LARGEST and _can_decode(name, labels)
        check.counts["decoded", name] += is_decoded
        return is_decoded or (size <= _LARGEST and (name in EXTENSIONS or columns.reads(name)))

    for key, members, values in scan.samples(wants):
        columns.add(values.items())
        contents = sorted((name, size, crc) for name, _, size, crc in members.values())
        pictures = (data for name, data in values.items() if name in EXTENSIONS and data)
        images = tuple(sorted(map(hash, pictures)))
        check.hashes.extend((hash((key, images, *contents)), hash(images) if images else 0))
        for name, offset, size, _ in members.values():
            reason = ""
            if not size and _is_needed(name, labels):
                reason = "it has 0 bytes"
            elif decode and name in values:
                reason = _decode_error(name, values[name], labels)
            if reason:
                faults.append(scan.finding(reason, key, name, offset))
    check.found = scan.index(listed)
    if links := scan.ignored[LINK]:
        reason = (
            f"holds {links} links or devices, whose data no sample has. Pack the files that they "
            "name: tar --hard-dereference"
        )
        faults.insert(0, scan.finding(reason))
    changes = _changes(scan, check.found, expected, columns.finish(), check.counts)
    check.findings = limited([*scan.damages, *faults, *changes])
    check.counts["unindexed", ""] = not (listed.sha256 or expected.offsets.has_checksums)
    check.counts.update({("ignored", reason): count for reason, count in scan.ignored.items()})
    return check


def _is_needed(field: str, labels: Sequence[ColumnInfo]) -> bool:
    """Return whether a field must not be empty: images and labels."""
    return field == "cls" or is_image(field) or any(label.field == field for label in labels)


def _changes(
    scan: ShardScan,
    found: Index,
    expected: Index,
    stored: Sequence[Column],
    counts: Counter[tuple[str, str]],
) -> Iterator[Finding]:
    """Yield what differs between a shard and its index: samples, checksums, and columns.

    counts: receives the number of values that were compared, by column.
    """
    listed, lost = expected.shards[0], list[Finding]()
    if 0 < listed.bytes != scan.size:
        yield scan.finding(f"has {scan.size} bytes, its index says {listed.bytes}")
    differing = found.offsets.differences(expected.offsets) if len(expected) else []
    if differing and not scan.damages:
        others = f"holds other samples than its index says ({', '.join(differing)})"
        yield scan.finding(f"{others}. Run: wdstrain index on it")
        return
    has_checksums = expected.offsets.has_checksums
    if listed.sha256 != scan.sha256 and (differing or has_checksums):
        lost = [fault for _, _, wrong in compared(scan, found, expected) for fault in wrong]
    if listed.sha256 not in ("", scan.sha256) and not (lost or scan.damages):
        note = ", though every field is as packed" if has_checksums else ""
        yield scan.finding(f"has another sha256 than its index says{note}")
    yield from lost
    changed = {(fault.key, fault.field) for fault in lost}
    faults = () if differing else _column_changes(scan, expected, stored, counts)
    yield from (fault for fault in faults if (fault.key, fault.field) not in changed)


def _column_changes(
    scan: ShardScan, expected: Index, stored: Sequence[Column], counts: Counter[tuple[str, str]]
) -> Iterator[Finding]:
    """Yield the values of columns that differ from those that were read from the shard."""
    for column, other in zip(expected.columns, stored, strict=True):
        if column.field not in expected.fields or not len(expected):
            continue  # its values do not come from the samples, or are lost
        held = expected.offsets.extents[column.field][0]
        counts["columns", column.stored_as] += len(held) - held.null_count
        for number, indexed, value in _differences(column, other):
            if held[number].is_valid:
                yield scan.finding(
                    f"the index has {indexed!r:.80} in its column {column.name}, the shard "
                    f"{value!r:.80}. Run: wdstrain index FOLDER --columns {column.stored_as}",
                    expected.key(number),
                    column.field,
                    held[number].as_py(),
                )


def _differences(indexed: Column, stored: Column) -> list[tuple[int, Any, Any]]:
    """Return (number of the sample, value in the index, value in the shard) where they differ."""
    if indexed.kind == "text" and stored.kind in ("integer", "number"):
        # Other shards hold texts. A number may have several spellings, such as 2 and 2.0.
        indexed = as_label(indexed, replace(indexed.info, kind="number"))
    values = as_label(stored, indexed).values.to_pylist()
    rows = enumerate(zip(indexed.values.to_pylist(), values, strict=True))
    # NaN equals NaN by its text.
    return [(number, *pair) for number, pair in rows if repr(pair[0]) != repr(pair[1])]


# --- decoding -------------------------------------------------------------------------------------


def _can_decode(field: str, labels: Sequence[ColumnInfo]) -> bool:
    """Return whether bytes of a field may be wrong for training. labels: of the index."""
    is_known = is_image(field) or field.rpartition(".")[2] in _DECODED
    return is_known or any(label.field == field for label in labels)


def _decode_error(field: str, data: bytes, labels: Sequence[ColumnInfo]) -> str:
    """Return the reason that training cannot use a field; "" if it can. Nothing is unpickled.

    labels: of the index.
    """
    mine = [label for label in labels if label.field == field]
    try:
        for label in mine:
            if label.kind == "mask":
                mask(field, classes=len(label.classes), ignore=label.ignored).numbers(data)
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
    checks: Sequence[ShardCheck], required: list[str], result: Verification
) -> None:
    """Compare the samples of all shards: missing fields, duplicates, images in two splits."""
    whole = join([check.found for check in checks] or [Index()])
    hashes = np.frombuffer(b"".join(check.hashes for check in checks), np.int64)
    contents, images = hashes.reshape(-1, 2).T
    has = {name: view[3] for name, view in zip(whole.fields, whole.offsets.views, strict=True)}
    result.samples, counts = len(whole), {name: int(held.sum()) for name, held in has.items()}
    result.fields = dict(Counter(counts).most_common())
    result.findings += _lacking(whole, has, required)
    earlier, later = _in_two_shards(whole, contents)
    for number, other in zip(later[:MOST].tolist(), earlier[:MOST].tolist(), strict=True):
        where = f"{whole.shard_with(other).shown} at offset {whole.offsets.start[other]}"
        reason = f"the same sample, byte for byte, is in {where}"
        result.findings.append(_finding(whole, number, reason))
    keys = np.asarray(whole.offsets.rows.column(0).dictionary_encode().indices)
    first, second = _in_two_shards(whole, keys)
    others = np.flatnonzero(~np.isin(second, later))
    if len(others):
        pair = int(first[others[0]]), int(second[others[0]])
        shards = " and ".join(whole.shard_with(number).shown for number in pair)
        known = f"{len(np.unique(keys[second[others]]))} keys are in several shards"
        result.notes.append(f"{known}, such as {whole.key(pair[1])!r} in {shards}")
    result.findings += _leaks(whole, images, np.setdiff1d(np.flatnonzero(images), later), "image")


def _finding(index: Index, number: int, reason: str) -> Finding:
    """Return the finding of a sample."""
    start = int(index.offsets.start[number])
    return Finding(index.shard_with(number).shown, index.key(number), "", start, reason)


def _in_two_shards(index: Index, codes: Ints) -> Ints:
    """Return (earlier, later) of pairs of samples of different shards with equal codes. int64[2, n]

    They ascend by the later sample.
    """
    shard = index.shard_of(np.arange(len(index)))
    order = np.lexsort((shard, codes))
    pairs = np.stack([order[:-1], order[1:]])
    is_pair = (np.diff(codes[pairs], axis=0) == 0) & (np.diff(shard[pairs], axis=0) != 0)
    pairs = pairs[:, is_pair[0]]
    return pairs[:, np.argsort(pairs[1])]


def _lacking(whole: Index, has: Mapping[str, Bools], required: list[str]) -> Iterator[Finding]:
    """Yield the samples that lack a field which is required, or which nearly all samples have.

    has: whether each sample has a field, by field. required: of "jpg;png" one is enough.
    """
    nothing, kinds = np.zeros(len(whole), np.bool_), dict[str, list[str]]()
    for name in sorted(has):
        kinds.setdefault(field_kind(name), []).append(name)
    rules = {some: some.split(";") for some in required}
    for kind, names in ({**kinds, **rules}).items():
        lacks = ~np.any([has.get(name, nothing) for name in names], axis=0)
        ids, reason = np.flatnonzero(lacks).tolist(), f"it has no {' or '.join(names)}"
        if kind not in rules:
            count = len(whole) - len(ids)
            ids = ids if count >= _NEARLY_ALL * len(whole) else []
            reason += f", which {count} of {counted(len(whole), 'sample')} have"
        yield from (_finding(whole, number, reason) for number in ids[:MOST])
        if len(ids) > MOST:
            more = f"holds the first of {counted(len(ids) - MOST, 'more sample')}: {reason}"
            yield Finding(whole.shard_with(ids[MOST]).shown, "", "", 0, more)


def _leaks(index: Index, codes: Ints, ids: Ints, what: str) -> Iterator[Finding]:
    """Yield a finding for each two splits with equal `codes`.

    ids: the samples that are compared. what: the codes stand for.
    """
    names = [shard.split or split_of(shard.name) for shard in index.shards]
    splits = np.array(names, object)[index.shard_of(ids)]
    for split, other in combinations(sorted(set(filter(None, names))), 2):
        inside, outside = ids[splits == split], ids[splits == other]
        shared = outside[np.isin(codes[outside], codes[inside])]
        if len(shared):
            match = int(inside[codes[inside] == codes[shared[0]]][0])
            where = f"key {index.key(match)!r} in {index.shard_with(match).shown}"
            count = len(np.unique(codes[shared])) - 1
            more = f"; so are {count} more of split {other!r}" if count else ""
            reason = f"its {what} is also in split {split!r}: {where}{more}"
            yield _finding(index, int(shared[0]), reason)


def _check_groups(result: Verification, indexes: list[Index], group_by: str | None) -> None:
    """Find groups that are in two splits. group_by: a column; None: as the conversions recorded."""
    if group_by and not indexes:
        raise UsageError("these shards have no index, so no groups.", "Run: wdstrain index")
    recorded = [(index.info.get("split") or {}).get("group_by") for index in indexes]
    for column in [group_by] if group_by else dict.fromkeys(filter(None, recorded)):
        whole = join(indexes)
        try:
            codes = group_codes(whole, column)
        except UsageError as error:
            if group_by:
                raise
            result.notes.append(f"groups of {column!r} cannot be compared between splits: {error}")
            continue
        result.groups[column] = len(np.unique(codes))
        result.findings += _leaks(whole, codes, np.arange(len(whole)), f"group of {column!r}")


def _needed(need: str | Sequence[str]) -> list[str]:
    """Return the needed fields; alternatives are separated by ";"."""
    groups = need.split(",") if isinstance(need, str) and need else list(need)
    cleaned = [";".join(filter(None, map(str.strip, group.lower().split(";")))) for group in groups]
    if not all(cleaned):
        raise UsageError(
            "a field is empty.", "Write for example 'jpg;png,cls'.", option="need", value=need
        )
    return cleaned
