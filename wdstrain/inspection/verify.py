"""`wt.verify`: read every shard once and compare it with its index and with the other shards.

Shards are read in parallel threads, because reading, hashing and decoding release the GIL. Nothing
is repaired, and nothing stops at the first finding. For each sample its key and some 50 bytes are
kept until the end. A key that occurs in two shards is a note, since many sets number anew in each
shard; equal bytes with it are a finding.
"""

from __future__ import annotations

import math
import threading
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import combinations
from multiprocessing.pool import ThreadPool
from typing import Any

import numpy as np
import pyarrow.compute as pc

from wdstrain.conversion.listing import split_of
from wdstrain.decode.codecs import decode_image
from wdstrain.decode.formats import is_image
from wdstrain.decode.labels import field_of
from wdstrain.errors import SampleError, StorageError, UsageError, WdstrainError
from wdstrain.inspection.options import VerifyOptions
from wdstrain.inspection.scan import (
    MOST,
    Found,
    ShardScan,
    field_kind,
    finding_of,
    limited,
    shards_at,
    total_bytes,
)
from wdstrain.loader.stats import Finding
from wdstrain.report.terminal import reporting
from wdstrain.runtime.machine import cores
from wdstrain.runtime.options import takes
from wdstrain.shards.columns import Column, ColumnBuilder, as_label
from wdstrain.shards.index import Index, join
from wdstrain.shards.kinds import ColumnInfo, npy_array, parsed_json, scalar
from wdstrain.shards.offsets import Ints, OffsetsBuilder
from wdstrain.shards.resolve import open_index
from wdstrain.shards.selection import group_codes
from wdstrain.shards.tar import LINK
from wdstrain.storage.files import open_source
from wdstrain.storage.remote import shown_path

_POLL = 0.1  # seconds between reports of progress
_NEARLY_ALL = 0.99  # share of the samples from which on a field counts as required
_LARGEST = 1 << 30  # bytes of a field that is decoded or compared


class HasFindings:
    """Base class of results with findings."""

    findings: list[Finding]

    @property
    def ok(self) -> bool:
        """Whether there are no findings."""
        return not self.findings

    def report(self) -> dict[str, Any]:
        """Return everything as JSON-able values."""
        findings = [
            {**finding._asdict(), "sentence": finding.sentence} for finding in self.findings
        ]
        return {**vars(self), "findings": findings, "ok": self.ok}


@dataclass
class Verification(HasFindings):
    """Result of `wt.verify`: counts and findings.

    findings: each with shard, key, field, offset, reason and `sentence`, which is its `str`.
    unindexed: shards without checksums, of which only the structure was checked. fields: samples
    that have each field. columns: samples whose value in the index was compared, by column.
    decoded: members by field, with `decode`; those of unknown types and of more than 1 GiB are not
    decoded. ignored: members that belong to no sample, by reason. groups: number of groups that
    were compared between splits, by column. notes: what could not be checked, and keys that two
    shards share.
    """

    shards: int = 0
    samples: int = 0
    bytes: int = 0
    unindexed: int = 0
    findings: list[Finding] = field(default_factory=list)
    fields: dict[str, int] = field(default_factory=dict)
    columns: Counter[str] = field(default_factory=Counter)
    decoded: Counter[str] = field(default_factory=Counter)
    ignored: Counter[str] = field(default_factory=Counter)
    groups: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass
class ShardCheck(Verification):
    """Verification of one shard.

    found: its samples; None if it could not be read to its end. hashes: of the contents and of the
    images (0: none) of each sample, valid within this process.
    """

    found: Index | None = None
    hashes: array[int] = field(default_factory=lambda: array("q"))


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
    result = Verification(len(shards), findings=findings)
    checks = _run(shards, options, result)
    for check in checks:
        result.findings += check.findings
        result.unindexed += check.unindexed
        result.columns += check.columns
        result.decoded += check.decoded
        result.ignored += check.ignored
    if result.unindexed:
        part = f"{result.unindexed} of {result.shards} shards have no checksums"
        result.notes.append(f"{part}: only their structure was checked")
    whole = [check for check in checks if check.found is not None]
    if whole:
        labels = {label.field for index in shards.values() for label in index.labels}
        _compare_samples(whole, [*need, *sorted(labels - {*need})], result)
    _check_groups(result, [index for index in shards.values() if len(index)], options.group_by)
    return result


def _run(
    shards: dict[str, Index], options: VerifyOptions, result: Verification
) -> list[ShardCheck]:
    """Check shards in threads and return the results in order. Counts bytes.

    An exception, also one of `progress`, ends all reads.
    """
    stopping, lock, total = threading.Event(), threading.Lock(), total_bytes(shards)

    def tick(size: int) -> None:
        with lock:
            result.bytes += size
        if stopping.is_set():
            raise StorageError("verifying was stopped.")

    def check(shard: tuple[str, Index]) -> ShardCheck:
        path, expected = shard
        try:
            with open_source(path, state="", stopping=stopping) as source:
                return _check(ShardScan(source, tick), expected, options.decode)
        except WdstrainError as error:
            return ShardCheck(findings=[finding_of(shown_path(path), error)])

    # Unlike an executor, a pool that is left after an interrupt waits for no stalled server.
    with (
        reporting(options.progress, True) as reporter,
        ThreadPool(options.num_workers or cores()) as threads,
    ):
        checks, is_done = threads.map_async(check, shards.items(), chunksize=1), False
        try:
            while not is_done:
                checks.wait(_POLL)
                is_done = checks.ready()
                megabytes = None if total is None else total // 10**6
                reporter.step("verifying", result.bytes // 10**6, megabytes, unit="MB")
        finally:
            stopping.set()
        return checks.get()


# --- one shard ------------------------------------------------------------------------------------


def _check(scan: ShardScan, expected: Index, decode: bool) -> ShardCheck:
    """Read a shard once and compare it. Raises StorageError or ShardError if it cannot be read."""
    check, rows, first = ShardCheck(), OffsetsBuilder(), dict[str, int]()
    columns, labels = ColumnBuilder([column.place for column in expected.columns]), expected.labels
    faults = list[Finding]()

    def wants(name: str, size: int) -> bool:
        is_decoded = decode and size <= _LARGEST and _can_decode(name, labels)
        check.decoded[name] += is_decoded
        return is_decoded or (size <= _LARGEST and columns.reads(name))

    for found in scan.samples(wants):
        members = list(found.members.values())
        rows.put(found.key, found.start, found.stop, members)
        columns.add(found.values.items())
        images = tuple(sorted(filter(None, found.images)))
        sums = sorted((name, size, crc) for name, _, size, crc in members)
        contents = hash((found.key, images, *sums))
        check.hashes.extend((contents, hash(images) if images else 0))
        before = first.setdefault(found.key, found.start)
        for fault in _faults(found, before, labels, decode):
            faults.append(Finding(scan.shown, found.key, *fault))
    listed = expected.shards[0]
    shard = replace(listed, path=scan.source.path, samples=len(rows))
    check.found = Index((shard,), rows.offsets())
    damages = [Finding(scan.shown, "", "", one.start, one.reason) for one in scan.damages]
    if links := scan.ignored[LINK]:
        reason = f"holds {links} links or devices, whose data no sample has"
        advice = "Pack the files that they name: tar --hard-dereference"
        damages.append(Finding(scan.shown, "", "", 0, f"{reason}. {advice}"))
    changes = _changes(scan, check.found, expected, columns.finish(), check.columns)
    check.findings, check.ignored = limited([*damages, *faults, *changes]), scan.ignored
    check.unindexed = int(not (listed.sha256 or expected.offsets.has_checksums))
    return check


def _faults(
    found: Found, before: int, labels: Sequence[ColumnInfo], decode: bool
) -> Iterator[tuple[str, int, str]]:
    """Yield (field, offset, reason) of what is wrong with a sample.

    before: offset of the first sample with its key. Images and labels must not be empty. decode:
    what can be decoded is.
    """
    if before != found.start:
        reason = "its members are in two places; the fields of a sample must be adjacent"
        yield "", found.start, f"{reason}, the first at offset {before}"
    for name, offset, _, _ in found.twice:
        yield name, offset, "it is the second member of this name. Pack the shard again"
    for name, offset, size, _ in found.members.values():
        is_label = name == "cls" or any(label.field == name for label in labels)
        reason = ""
        if not size and (is_label or is_image(name)):
            reason = "it has 0 bytes"
        elif decode and name in found.values:
            reason = decode_error(name, found.values[name], labels, is_finite=True)
        if reason:
            yield name, offset, reason


def _changes(
    scan: ShardScan,
    found: Index,
    expected: Index,
    stored: Sequence[Column],
    counts: Counter[str],
) -> Iterator[Finding]:
    """Yield what differs between a shard and its index: samples, checksums, and columns.

    counts: receives the number of values that were compared, by column.
    """
    listed, offsets = expected.shards[0], expected.offsets
    if 0 < listed.bytes != scan.size:
        reason = f"has {scan.size} bytes, its index says {listed.bytes}"
        yield Finding(scan.shown, "", "", 0, reason)
    differing = found.offsets.differences(offsets) if len(expected) else []
    if differing and not scan.damages:
        others = f"holds other samples than its index says ({', '.join(differing)})"
        yield Finding(scan.shown, "", "", 0, f"{others}. Run: wdstrain index on it")
        return
    places = pc.index_in(offsets.rows.column(0), value_set=found.offsets.rows.column(0))
    is_there = np.asarray(places.is_valid())
    for number in np.flatnonzero(~is_there).tolist():
        start = int(offsets.start[number])
        yield Finding(scan.shown, expected.key(number), "", start, "it is not there")
    ids, changed = np.flatnonzero(is_there), set[tuple[int, str]]()
    theirs = found.offsets.take(np.asarray(places.drop_null(), np.int64))
    views = dict(zip(theirs.fields, theirs.views, strict=True))
    reason = "the bytes are not those that were packed"
    if scan.sha256 == listed.sha256:
        reason = "the bytes are those that were packed, but the index has another crc32"
    for name, (offset, _, crc, has) in zip(offsets.fields, offsets.take(ids).views, strict=True):
        _, _, actual, is_held = views.get(name, (0, 0, crc, False))
        for row in np.flatnonzero(has & is_held & (crc > 0) & (crc != actual)).tolist():
            number = int(ids[row])
            changed.add((number, name))
            yield Finding(scan.shown, expected.key(number), name, int(offset[row]), reason)
    if differing:
        return
    if not (scan.damages or changed) and listed.sha256 not in ("", scan.sha256):
        note = ", though every field is as packed" if offsets.has_checksums else ""
        yield Finding(scan.shown, "", "", 0, f"has another sha256 than its index says{note}")
    for column, other in zip(expected.columns, stored, strict=True):
        if column.field not in offsets.extents or not len(expected):
            continue  # its values do not come from the samples, or are lost
        held = offsets.extents[column.field][0]
        counts[column.stored_as] += len(held) - held.null_count
        for number, indexed, value in _differences(column, other):
            if held[number].is_valid and (number, column.field) not in changed:
                reason = (
                    f"the index has {indexed!r:.80} in its column {column.name}, the shard "
                    f"{value!r:.80}. Run: wdstrain index FOLDER --columns {column.stored_as}"
                )
                key, at = expected.key(number), held[number].as_py()
                yield Finding(scan.shown, key, column.field, at, reason)


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


def _class_text(data: bytes) -> None:
    if not str(scalar(memoryview(data), None)):
        raise SampleError("it is empty")


_PARSERS: dict[str, Callable[[Any], object]] = {
    "cls": _class_text,
    "json": parsed_json,
    "npy": npy_array,
    "text": bytes.decode,
    "txt": bytes.decode,
}


def _can_decode(field: str, labels: Sequence[ColumnInfo]) -> bool:
    """Return whether bytes of a field may be wrong for training. labels: of the index."""
    is_known = is_image(field) or field.rpartition(".")[2] in _PARSERS
    return is_known or any(label.field == field for label in labels)


def decode_error(
    field: str, data: bytes, labels: Sequence[ColumnInfo], *, is_finite: bool = False
) -> str:
    """Return the reason that training cannot use a field; "" if it can. Nothing is unpickled.

    labels: of the index. is_finite: NaN and infinite labels are refused.
    """
    mine = [label for label in labels if label.field == field]
    parse = decode_image if is_image(field) else _PARSERS.get(field.rpartition(".")[2], bytes)
    try:
        for label in mine:
            value = _field_of(label).delivered(scalar(memoryview(data), label.entry))
            if is_finite and label.kind == "number" and not math.isfinite(value):
                return f"its {label.entry or field} is NaN or infinite, and cannot be trained on"
        if not mine:
            parse(data)
    except Exception as error:  # parsers raise whatever they meet
        return str(error).split("\n")[0].strip().rstrip(".") or type(error).__name__
    return ""


_field_of = lru_cache(maxsize=256)(field_of)


# --- all shards -----------------------------------------------------------------------------------


def _compare_samples(checks: list[ShardCheck], required: list[str], result: Verification) -> None:
    """Compare the samples of all shards: missing fields, duplicates, images in two splits."""
    whole = join([check.found for check in checks if check.found is not None])
    hashes = np.concatenate([np.array(check.hashes, np.int64) for check in checks])
    contents, images = hashes.reshape(-1, 2).T
    counts = {name: int(view[3].sum()) for name, view in _views(whole).items()}
    result.samples, result.fields = len(whole), dict(Counter(counts).most_common())
    result.findings += _lacking(whole, required)
    others, again = _in_two_shards(whole, contents)
    reasons = {
        number: f"the same sample, byte for byte, is in {whole.shard_with(other).shown} at offset "
        f"{whole.offsets.start[other]}"
        for number, other in zip(again.tolist(), others.tolist(), strict=True)
    }
    result.findings += [
        _finding(whole, number, reasons[number]) for number in sorted(reasons)[:MOST]
    ]
    keys = np.asarray(whole.offsets.rows.column(0).dictionary_encode().indices)
    _, second = _in_two_shards(whole, keys)
    second = second[~np.isin(second, again)]
    if len(second):
        number = int(second[0])
        places = [whole.shard_with(int(i)).shown for i in np.flatnonzero(keys == keys[number])[:2]]
        result.notes.append(
            f"{len(np.unique(keys[second]))} keys are in several shards, such as "
            f"{whole.key(number)!r} in {' and '.join(places)}"
        )
    result.findings += _leaks(whole, images, np.setdiff1d(np.flatnonzero(images), again), "image")


def _views(index: Index) -> dict[str, tuple[Any, ...]]:
    return dict(zip(index.fields, index.offsets.views, strict=True))


def _finding(index: Index, number: int, reason: str) -> Finding:
    """Return the finding of a sample."""
    start = int(index.offsets.start[number])
    return Finding(index.shard_with(number).shown, index.key(number), "", start, reason)


def _in_two_shards(index: Index, codes: Ints) -> tuple[Ints, Ints]:
    """Return (earlier, later) of pairs of samples of different shards with equal codes."""
    shard = index.shard_of(np.arange(len(index)))
    order = np.lexsort((shard, codes))
    first, second = order[:-1], order[1:]
    is_pair = (codes[first] == codes[second]) & (shard[first] != shard[second])
    return first[is_pair], second[is_pair]


def _lacking(whole: Index, required: list[str]) -> Iterator[Finding]:
    """Yield the samples that lack a field which is required, or which nearly all samples have.

    required: of "jpg;png" one is enough.
    """
    has = {name: view[3] for name, view in _views(whole).items()}
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
            reason += f", which {count} of {len(whole)} samples have"
        yield from (_finding(whole, number, reason) for number in ids[:MOST])
        if len(ids) > MOST:
            more = f"holds the first of {len(ids) - MOST} more samples: {reason}"
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
