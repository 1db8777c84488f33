"""`wt.verify`: read every shard once and compare it with its index and with the other shards.

Shards are read in parallel threads, because reading, hashing and decoding release the GIL. Nothing
is repaired, and nothing stops at the first finding. For each sample its key and some 50 bytes are
kept until the end. A key that occurs in two shards is no finding, since many sets number anew in each
shard; equal bytes with it are one.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import combinations
from multiprocessing.pool import ThreadPool
from typing import Any

import numpy as np

from wdstrain.conversion.listing import split_of
from wdstrain.decode.codecs import decode_image
from wdstrain.decode.formats import is_image
from wdstrain.decode.labels import field_of
from wdstrain.errors import SampleError, UsageError, WdstrainError
from wdstrain.inspection.options import VerifyOptions
from wdstrain.inspection.scan import (
    MOST,
    Fields,
    Member,
    Scan,
    ShardReader,
    Shards,
    compared,
    field_kind,
    finding_of,
    limited,
    scan_shard,
    shards_at,
    total_bytes,
)
from wdstrain.loader.stats import Finding
from wdstrain.runtime.machine import cores
from wdstrain.runtime.options import takes
from wdstrain.shards.columns import Column, ColumnBuilder, as_label
from wdstrain.shards.index import Index, Shard, join
from wdstrain.shards.kinds import ColumnInfo, npy_array, parsed_json, scalar
from wdstrain.shards.offsets import Ints, Offsets
from wdstrain.shards.resolve import open_index
from wdstrain.shards.selection import group_codes
from wdstrain.shards.tar import LINK
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
    were compared between splits, by column. notes: what could not be checked.
    """

    shards: int = 0
    samples: int = 0
    bytes: int = 0
    unindexed: int = 0
    findings: list[Finding] = field(default_factory=list)
    fields: dict[str, int] = field(default_factory=dict)
    columns: dict[str, int] = field(default_factory=dict)
    decoded: dict[str, int] = field(default_factory=dict)
    ignored: dict[str, int] = field(default_factory=dict)
    groups: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@takes(VerifyOptions)
def verify(options: VerifyOptions) -> Verification:
    """Read shards, each once, and compare them with their index and with each other.

    Raises UsageError for addresses without shards. What is wrong with shards is in `findings`.
    """
    need, result = _needed(options.need), Verification()
    shards, before = shards_at(options.urls)
    result.findings = before
    if options.where is not None:
        chosen = {shard.path for shard in open_index(options.urls).where(options.where).shards}
        shards = [(path, index) for path, index in shards if path in chosen]
    checks = _run(shards, options, result)
    result.findings = before + [finding for check in checks for finding in check.findings]
    scanned = [check for check in checks if check.found is not None]
    for name in ("columns", "decoded", "ignored"):
        counts = sum((getattr(check, name) for check in scanned), Counter[str]())
        setattr(result, name, dict(counts))
    result.unindexed = sum(not check.is_compared for check in scanned)
    if result.unindexed:
        part = f"{result.unindexed} of {result.shards} shards have no checksums"
        result.notes.append(f"{part}: only their structure was checked")
    indexes = [index for _, index in shards if index is not None]
    if scanned:
        labels = {label.field for index in indexes for label in index.labels}
        _compare_samples(scanned, [*need, *sorted(labels - {*need})], result)
    _check_groups(result, indexes, options.group_by)
    return result


# --- one shard ------------------------------------------------------------------------------------


@dataclass
class ShardCheck:
    """Result of checking a shard.

    found: its samples, without their fields; None if it could not be read to its end. hashes and
    kinds: as in `Scan`. is_compared: the index has checksums. columns, decoded, ignored: counts of
    `Verification`.
    """

    findings: Sequence[Finding]
    found: Index | None = None
    hashes: Sequence[int] = ()
    kinds: Iterable[Fields] = ()
    is_compared: bool = False
    columns: Counter[str] = field(default_factory=Counter)
    decoded: Counter[str] = field(default_factory=Counter)
    ignored: Counter[str] = field(default_factory=Counter)


def _run(shards: Shards, options: VerifyOptions, result: Verification) -> list[ShardCheck]:
    """Check shards in threads and return the results in order. Counts bytes, shards and findings.

    An exception, also one of `progress`, ends all reads.
    """
    stopping, lock, total = threading.Event(), threading.Lock(), total_bytes(shards)

    def tick(size: int) -> None:
        with lock:
            result.bytes += size

    def check(shard: tuple[str, Index | None]) -> ShardCheck:
        try:
            with ShardReader(shard[0], stopping, tick) as reader:
                checked = _check(reader, *shard, options.decode)
        except WdstrainError as error:
            checked = ShardCheck([finding_of(shown_path(shard[0]), error)])
        with lock:
            result.shards += 1
            result.findings = [*result.findings, *checked.findings]
        return checked

    # Unlike an executor, a pool that is left after an interrupt waits for no stalled server.
    with ThreadPool(options.num_workers or cores()) as threads:
        checks, is_done = threads.map_async(check, shards, chunksize=1), False
        try:
            while not is_done:
                checks.wait(_POLL)
                is_done = checks.ready()
                if options.progress is not None:
                    options.progress(result, total)
        finally:
            stopping.set()
        return checks.get()


class _Values:
    """Checks the values of one shard, and reads those of the columns of its index."""

    def __init__(self, expected: Index | None, decode: bool) -> None:
        self._labels = () if expected is None else expected.labels
        columns = () if expected is None else expected.columns
        self.columns = ColumnBuilder([column.place for column in columns])
        self.decoded, self._decode = Counter[str](), decode
        self.faults: list[tuple[str, str, int, str]] = []  # key, field, offset, reason

    def wants(self, field: str, size: int) -> bool:
        """Return whether the bytes of a member are needed, and count it."""
        is_decoded = self._decode and size <= _LARGEST and _can_decode(field, self._labels)
        self.decoded[field] += is_decoded
        return is_decoded or (size <= _LARGEST and self.columns.reads(field))

    def visit(self, key: str, members: list[Member], values: dict[str, bytes]) -> None:
        """Check a sample: images and labels are not empty, and what can be decoded is decoded."""
        self.columns.add(values.items())
        for name, offset, size, _ in members:
            reason = ""
            is_label = name == "cls" or any(label.field == name for label in self._labels)
            if not size and (is_label or is_image(name)):
                reason = "it has 0 bytes"
            elif self._decode and name in values:
                reason = decode_error(name, values[name], self._labels, is_finite=True)
            if reason:
                self.faults.append((key, name, offset, reason))


def _check(reader: ShardReader, path: str, expected: Index | None, decode: bool) -> ShardCheck:
    """Read a shard once and compare it. Raises StorageError or ShardError if it cannot be read."""
    if expected is not None and len(expected) < expected.shards[0].samples:
        expected = None  # nothing remains of the rows of a damaged index
    values, findings = _Values(expected, decode), list[Finding]()
    scan = scan_shard(reader, values.wants, values.visit)
    keys = scan.offsets.keys_of(np.arange(len(scan.offsets)))
    samples = Offsets.of_arrays((), scan.offsets.rows.columns[:3])
    check = ShardCheck(
        [], hashes=scan.hashes, kinds=scan.kinds, decoded=+values.decoded, ignored=scan.ignored
    )
    whole = [(damage.start, damage.reason) for damage in scan.damages]
    listed = Shard(path, 0, 0)
    if expected is not None:
        listed = expected.shards[0]
        check.is_compared = bool(listed.sha256) or expected.offsets.has_checksums
        if reader.size != listed.bytes:
            whole.insert(0, (0, f"has {reader.size} bytes, its index says {listed.bytes}"))
    if links := scan.ignored[LINK]:
        reason = f"holds {links} links or devices, whose data no sample has"
        whole.append((0, f"{reason}. Pack the files that they name: tar --hard-dereference"))
    findings += [Finding(reader.shown, "", "", start, reason) for start, reason in whole]
    faults = [(keys[number], *fault) for number, *fault in scan.faults] + values.faults
    findings += [Finding(reader.shown, *fault) for fault in faults]
    if expected is not None:
        findings += _changes(reader, scan, expected, values, check.columns)
    check.found = Index((replace(listed, samples=len(samples)),), samples)
    check.findings = limited(findings)
    return check


def _changes(
    reader: ShardReader, scan: Scan, expected: Index, values: _Values, counts: Counter[str]
) -> Iterator[Finding]:
    """Yield what differs between a shard and its index: checksums, samples, and columns.

    counts: receives the number of values that were compared, by column.
    """
    has_checksums = expected.offsets.has_checksums
    changes = compared(scan, expected, reader) if has_checksums else ()
    damaged = {(one.key, one.field): one for _, _, findings in changes for one in findings}
    yield from damaged.values()
    differing, sha256 = scan.offsets.differences(expected.offsets), expected.shards[0].sha256
    if differing and not scan.damages:
        others = f"holds other samples than its index says ({', '.join(differing)})"
        yield Finding(reader.shown, "", "", 0, f"{others}. Run: wdstrain index on it")
    if differing:
        return
    if not scan.damages and not damaged and sha256 not in ("", scan.sha256):
        note = ", though every field is as packed" if has_checksums else ""
        yield Finding(reader.shown, "", "", 0, f"has another sha256 than its index says{note}")
    stored, extents = values.columns.finish(), expected.offsets.extents
    for column, other in zip(expected.columns, stored, strict=True):
        if column.field not in extents:  # its values do not come from the samples
            continue
        held = extents[column.field][0]
        counts[column.stored_as] += len(held) - held.null_count
        for number, indexed, value in _differences(column, other):
            key, offset = expected.key(number), held[number].as_py()
            if offset is not None and (key, column.field) not in damaged:
                reason = (
                    f"the index has {indexed!r:.80} in its column {column.name}, the shard "
                    f"{value!r:.80}. Run: wdstrain index FOLDER --columns {column.stored_as}"
                )
                yield Finding(reader.shown, key, column.field, offset, reason)


def _differences(indexed: Column, stored: Column) -> Iterator[tuple[int, Any, Any]]:
    """Yield (number of the sample, value in the index, value in the shard) where they differ."""
    if indexed.kind == "text" and stored.kind in ("integer", "number"):
        # Other shards hold texts. A number may have several spellings, such as 2 and 2.0.
        indexed = as_label(indexed, replace(indexed.info, kind="number"))
    stored = as_label(stored, indexed)
    pairs = zip(indexed.values.to_pylist(), stored.values.to_pylist(), strict=True)
    for number, (left, other) in enumerate(pairs):
        if left != other and not (left != left and other != other):  # NaN equals NaN here
            yield number, left, other


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
    parse = _PARSERS.get(field.rpartition(".")[2], bytes)
    if is_image(field):
        parse = decode_image
    try:
        for label in mine:
            value = _field_of(label).delivered(scalar(memoryview(data), label.entry))
            if is_finite and label.kind == "number" and not math.isfinite(value):
                raise SampleError(
                    f"its {label.entry or field} is NaN or infinite, and cannot be trained on"
                )
        if not mine:
            parse(data)
    except Exception as error:  # parsers raise whatever they meet
        return str(error).split("\n")[0].strip().rstrip(".") or type(error).__name__
    return ""


_field_of = lru_cache(maxsize=256)(field_of)


# --- all shards -----------------------------------------------------------------------------------


def _compare_samples(checks: list[ShardCheck], required: list[str], result: Verification) -> None:
    """Compare the samples of all shards: missing fields, duplicates, images in two splits."""
    kinds: dict[Fields, int] = {}
    parts = []
    for check in checks:
        hashes = np.array(check.hashes, np.int64).reshape(-1, 3)
        numbers = [kinds.setdefault(kind, len(kinds)) for kind in check.kinds]
        hashes[:, 2] = np.array(numbers, np.int64)[hashes[:, 2]]
        parts.append(hashes)
    whole = join([check.found for check in checks if check.found is not None])
    contents, images, kind = np.concatenate(parts).T
    counts = dict(zip(kinds, np.bincount(kind, minlength=len(kinds)).tolist(), strict=True))
    fields = Counter[str]()
    for names, count in counts.items():
        fields.update(dict.fromkeys(sorted(names), count))
    result.samples, result.fields = len(whole), dict(fields.most_common())
    for names, reason in _lacks(counts, required):
        ids = np.flatnonzero(kind == kinds[names]).tolist()
        result.findings += [_finding(whole, number, f"it has {reason}") for number in ids[:MOST]]
        if len(ids) > MOST:
            more = f"holds the first of {len(ids) - MOST} more samples that have {reason}"
            holder = whole.shard_with(ids[MOST]).shown
            result.findings.append(Finding(holder, "", "", 0, more))
    shard = whole.shard_of(np.arange(len(whole)))
    order = np.lexsort((shard, contents))
    first, second = order[:-1], order[1:]
    is_same = (contents[first] == contents[second]) & (shard[first] != shard[second])
    same = np.stack([second[is_same], first[is_same]], axis=1)
    for number, other in sorted(same.tolist())[:MOST]:
        where = f"{whole.shard_with(other).shown} at offset {whole.offsets.start[other]}"
        reason = f"the same sample, byte for byte, is in {where}"
        result.findings.append(_finding(whole, number, reason))
    unique = np.setdiff1d(np.flatnonzero(images), second[is_same])
    result.findings += _leaks(whole, images, unique, "image")


def _finding(index: Index, number: int, reason: str) -> Finding:
    """Return the finding of a sample."""
    start = int(index.offsets.start[number])
    return Finding(index.shard_with(number).shown, index.key(number), "", start, reason)


def _lacks(counts: dict[Fields, int], required: list[str]) -> Iterator[tuple[Fields, str]]:
    """Yield the sets of fields that lack one which is required, or which nearly all samples have.

    counts: number of samples with these fields. required: of "jpg;png" one is enough.
    """
    samples, names, common = sum(counts.values()), dict[str, set[str]](), Counter[str]()
    for fields, count in counts.items():
        for name in fields:
            names.setdefault(field_kind(name), set()).add(name)
        common.update(dict.fromkeys({*map(field_kind, fields)}, count))
    usual = {
        kind: f"no {' or '.join(sorted(names[kind]))}, which {count} of {samples} samples have"
        for kind, count in common.items()
        if _NEARLY_ALL * samples <= count < samples and kind not in required
    }
    for fields in counts:
        lacks = [
            f"no {some.replace(';', ' or ')}"
            for some in required
            if fields.isdisjoint(some.split(";"))
        ]
        lacks += [usual[kind] for kind in usual.keys() - {*map(field_kind, fields)}]
        if lacks:
            yield fields, " and ".join(lacks)


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
        raise UsageError(
            "these shards have no index, so no groups.",
            "Run: wdstrain index",
        )
    splits = [index.info.get("split") for index in indexes]
    recorded = [split.get("group_by") for split in splits if isinstance(split, dict)]
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
    groups = need.split(",") if isinstance(need, str) else list(need)
    cleaned = [
        ";".join(name.strip().lower() for name in group.split(";") if name.strip())
        for group in groups
    ]
    if need and not all(cleaned):
        raise UsageError(
            "a field is empty.",
            "Write for example 'jpg;png,cls'.",
            option="need",
            value=need,
        )
    return [group for group in cleaned if group]
