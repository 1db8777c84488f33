"""`wt.verify`: read every shard once and compare it with its index and with the other shards.

Shards are read in parallel threads, because reading, hashing and decoding release the GIL. Nothing
is repaired, nothing stops at the first finding, and what could not be checked is counted. For each
sample its key and some 60 bytes are kept until the end. A key that occurs in two shards is no
finding, since many sets number anew in each shard; equal bytes with it are one.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import combinations
from multiprocessing.pool import ThreadPool
from typing import Any

import numpy as np

from wdstrain.conversion.listing import split_of
from wdstrain.decode.formats import is_image
from wdstrain.errors import UsageError, WdstrainError
from wdstrain.inspection.options import VerifyOptions
from wdstrain.inspection.scan import (
    LARGEST,
    NOT_FINITE,
    Fields,
    Part,
    Scan,
    ShardReader,
    can_decode,
    compared,
    decode_error,
    field_kind,
    finding_of,
    limited,
    scan_shard,
)
from wdstrain.loader.stats import Finding
from wdstrain.runtime.machine import cores
from wdstrain.runtime.options import takes
from wdstrain.shards.columns import Column, ColumnBuilder, as_label, join_columns
from wdstrain.shards.index import Index, Shard, join
from wdstrain.shards.index_io import TABLE_NAME, changed
from wdstrain.shards.kinds import KINDS
from wdstrain.shards.offsets import Ints, Offsets
from wdstrain.shards.resolve import IndexFiles, open_index, tars_of
from wdstrain.shards.selection import group_codes
from wdstrain.storage.addresses import INDEX_NAME, Urls, beside, expand, is_json
from wdstrain.storage.remote import is_remote, shown_path

_POLL = 0.1  # seconds between reports of progress
_NEARLY_ALL = 0.99  # share of the samples from which on a field counts as required
_EXAMPLES = 100  # samples of one shard with the same missing fields that are listed

Shards = list[tuple[str, Index | None]]  # (path, index of this shard)


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
    decoded, not_decoded: members by field, with `decode`. ignored: members that belong to no
    sample, by reason. repeated: samples whose key another shard has with other bytes (no finding).
    groups: number of groups that were compared between splits, by column. notes: what could not be
    checked.
    """

    shards: int = 0
    samples: int = 0
    bytes: int = 0
    unindexed: int = 0
    findings: list[Finding] = field(default_factory=list)
    fields: dict[str, int] = field(default_factory=dict)
    columns: dict[str, int] = field(default_factory=dict)
    decoded: dict[str, int] = field(default_factory=dict)
    not_decoded: dict[str, int] = field(default_factory=dict)
    ignored: dict[str, int] = field(default_factory=dict)
    repeated: int = 0
    groups: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@takes(VerifyOptions)
def verify(options: VerifyOptions) -> Verification:
    """Read shards, each once, and compare them with their index and with each other.

    Labels that are NaN or infinite are one finding per shard. Raises UsageError for addresses
    without shards. What is wrong with shards is in `findings`.
    """
    need, result = _needed(options.need), Verification()
    shards, result.findings = _listed(options.urls)
    if options.where is not None:
        chosen = {shard.path for shard in open_index(options.urls).where(options.where).shards}
        shards = [(path, index) for path, index in shards if path in chosen]
    indexes, before = [index for _, index in shards if index is not None], result.findings
    checks = _run(shards, options, result)
    result.findings = before + [finding for check in checks for finding in check.findings]
    scanned = [check for check in checks if check.found is not None]
    for name in ("columns", "decoded", "not_decoded", "ignored"):
        counts = sum((check.counts[name] for check in scanned), Counter[str]())
        setattr(result, name, dict(counts))
    result.unindexed = sum(not check.is_compared for check in scanned)
    if scanned:
        labels = {label.field for index in indexes for label in index.labels}
        _compare_samples(scanned, [*need, *sorted(labels - {*need})], result)
    _check_groups(result, indexes, options.group_by)
    return result


def total_bytes(shards: Shards) -> int | None:
    """Return the bytes of all shards; None if that is not known."""
    total = 0
    for path, expected in shards:
        if expected is not None:
            total += expected.shards[0].bytes
        elif is_remote(path):
            return None
        elif os.path.exists(path):
            total += os.path.getsize(path)
    return total


# --- one shard ------------------------------------------------------------------------------------


@dataclass
class ShardCheck:
    """Result of checking a shard.

    found: its samples, without their fields; None if it could not be read to its end. hashes and
    kinds: as in `Scan`. is_compared: the index has checksums. counts: of `Verification`, by name.
    """

    findings: list[Finding]
    found: Index | None = None
    hashes: Sequence[int] = ()
    kinds: Iterable[Fields] = ()
    is_compared: bool = False
    counts: dict[str, Counter[str]] = field(default_factory=dict)


def _run(shards: Shards, options: VerifyOptions, result: Verification) -> list[ShardCheck]:
    """Check shards in threads and return the results in order. Counts bytes, shards and findings.

    An exception, also one of `progress`, ends all reads.
    """
    stopping, lock, total = threading.Event(), threading.Lock(), total_bytes(shards)

    def tick(size: int) -> None:
        with lock:
            result.bytes += size

    def check(shard: tuple[int, tuple[str, Index | None]]) -> tuple[int, ShardCheck]:
        number, (path, expected) = shard
        try:
            with ShardReader(path, stopping, tick) as reader:
                return number, _check(reader, path, expected, options.decode)
        except WdstrainError as error:
            return number, ShardCheck([finding_of(shown_path(path), error)])

    checks = dict[int, ShardCheck]()
    # Unlike an executor, a pool that is left after an interrupt waits for no stalled server.
    with ThreadPool(options.num_workers or cores()) as threads:
        done = threads.imap_unordered(check, enumerate(shards))
        try:
            while len(checks) < len(shards):
                with suppress(multiprocessing.TimeoutError):
                    number, checks[number] = done.next(_POLL)
                    result.shards += 1
                    result.findings = [*result.findings, *checks[number].findings]
                if options.progress is not None:
                    options.progress(result, total)
        finally:
            stopping.set()
    return [checks[number] for number in range(len(shards))]


class _Values:
    """Reads the values of one shard: those of columns, and with `decode` all that can be decoded."""

    def __init__(self, expected: Index | None, decode: bool) -> None:
        self._labels, columns = (
            ((), ()) if expected is None else (expected.labels, expected.columns)
        )
        self.columns = ColumnBuilder([column.place for column in columns])
        self.counts = {name: Counter[str]() for name in ("columns", "decoded", "not_decoded")}
        self.failures: list[tuple[str, str, int, str]] = []  # key, field, offset, reason
        self._decode = decode

    def may_be_empty(self, field: str) -> bool:
        is_label = field == "cls" or any(label.field == field for label in self._labels)
        return not is_label and not is_image(field)

    def wants(self, field: str, size: int) -> bool:
        """Return whether the bytes of a member are needed, and count it."""
        is_decoded = self._decode and size <= LARGEST and can_decode(field, self._labels)
        if self._decode:
            self.counts["decoded" if is_decoded else "not_decoded"][field] += 1
        return is_decoded or (size <= LARGEST and self.columns.reads(field))

    def visit(self, key: str, parts: list[Part]) -> None:
        """Read the values of a sample."""
        self.columns.add((name, data) for name, _, data in parts)
        for name, offset, data in parts if self._decode else ():
            reason = decode_error(name, data, self._labels, is_finite=True)
            if reason and (data or self.may_be_empty(name)):
                self.failures.append((key, name, offset, reason))


def _check(reader: ShardReader, path: str, expected: Index | None, decode: bool) -> ShardCheck:
    """Read a shard once and compare it. Raises StorageError or ShardError if it cannot be read."""
    values, findings = _Values(expected, decode), list[Finding]()
    scan = scan_shard(reader, values.wants, values.visit)
    keys, starts = scan.offsets.keys_of(np.arange(len(scan.offsets))), scan.offsets.start

    def add(key: str, name: str, offset: int, reason: str) -> None:
        findings.append(Finding(reader.shown, key, name, offset, reason))

    if expected is not None and reader.size != expected.shards[0].bytes:
        add("", "", 0, f"has {reader.size} bytes, its index says {expected.shards[0].bytes}")
    for damage in scan.damages:
        add("", "", damage.start, damage.reason)
    for number, name, offset in scan.twice:
        add(
            keys[number], name, offset, "it is the second member of this name. Pack the shard again"
        )
    for number in scan.again:
        first = starts[scan.first[keys[number]]]
        reason = f"its members are in two places, the first at offset {first}; the fields of a "
        add(keys[number], "", int(starts[number]), f"{reason}sample must be adjacent")
    for number, name, offset in scan.empty:
        if not values.may_be_empty(name):
            add(keys[number], name, offset, "it has 0 bytes")
    if expected is not None:
        findings += _changes(reader, scan, expected, values)
    alike = Counter(reason for *_, reason in values.failures if reason.endswith(NOT_FINITE))
    for key, name, offset, reason in values.failures:
        if not reason.endswith(NOT_FINITE):
            add(key, name, offset, reason)
        elif count := alike.pop(reason, 0):  # one finding for all of them
            more = f"; so is that of {count - 1} more in this shard" if count > 1 else ""
            add(key, name, offset, f"{reason}, and cannot be trained on{more}")
    listed = Shard(path, 0, 0) if expected is None else expected.shards[0]
    samples = Offsets.of_arrays((), scan.offsets.rows.columns[:3])
    return ShardCheck(
        limited(reader.shown, findings),
        Index((replace(listed, samples=len(samples)),), samples),
        scan.hashes,
        scan.kinds,
        is_compared=bool(listed.sha256)
        or (expected is not None and expected.offsets.has_checksums),
        counts=values.counts | {"ignored": scan.ignored},
    )


def _changes(
    reader: ShardReader, scan: Scan, expected: Index, values: _Values
) -> Iterator[Finding]:
    """Yield what differs between a shard and its index: checksums, samples, and columns."""
    changes = compared(scan, expected, reader) if expected.offsets.has_checksums else ()
    damaged = {(one.key, one.field): one for _, _, findings in changes for one in findings}
    yield from damaged.values()
    differing, sha256 = scan.offsets.differences(expected.offsets), expected.shards[0].sha256
    if not scan.damages and differing:
        others = f"holds other samples than its index says ({', '.join(differing)})"
        yield Finding(reader.shown, "", "", 0, f"{others}. Run: wdstrain index on it")
    elif not scan.damages and not damaged and sha256 not in ("", scan.sha256):
        note = ", though every field is as packed" if expected.offsets.has_checksums else ""
        yield Finding(reader.shown, "", "", 0, f"has another sha256 than its index says{note}")
    if differing:
        return
    stored = {column.place: column for column in values.columns.finish()}
    extents = expected.offsets.extents
    for column in expected.columns:
        if column.field not in extents:  # its values do not come from the samples
            continue
        held = extents[column.field][0]
        values.counts["columns"][column.stored_as] += len(held) - held.null_count
        for number, indexed, value in _differences(column, stored[column.place]):
            key, extent = expected.key(number), held[number]
            if extent.is_valid and (key, column.field) not in damaged:
                reason = (
                    f"the index has {_shown(indexed)} in its column {column.name}, the shard "
                    f"{_shown(value)}. Run: wdstrain index FOLDER --columns {column.stored_as}"
                )
                yield Finding(reader.shown, key, column.field, extent.as_py(), reason)


def _differences(indexed: Column, stored: Column) -> Iterator[tuple[int, Any, Any]]:
    """Yield (number of the sample, value in the index, value in the shard) where they differ."""
    if KINDS[indexed.kind].can_be_label:
        stored = as_label(stored, indexed)
    elif indexed.kind == "text" and stored.kind in ("integer", "number"):
        # Other shards hold texts. A number may have several spellings, such as 2 and 2.0.
        indexed, stored = (as_label(one, replace(one, kind="number")) for one in (indexed, stored))
    both = join_columns([(len(one), [one]) for one in (indexed, stored)])
    if both and both[0].kind == indexed.kind:
        values = both[0].values.to_pylist()
    else:  # values of other types
        values = [*indexed.values.to_pylist(), *stored.values.to_pylist()]
    pairs = zip(values[: len(indexed)], values[len(indexed) :], strict=True)
    for number, (left, other) in enumerate(pairs):
        if left != other and not (left != left and other != other):  # NaN equals NaN here
            yield number, left, other


def _shown(value: Any) -> str:
    return "nothing" if value is None else repr(value)[:80]


# --- all shards -----------------------------------------------------------------------------------


def _compare_samples(checks: list[ShardCheck], required: list[str], result: Verification) -> None:
    """Compare the samples of all shards: missing fields, duplicates, images in two splits."""
    kinds: dict[Fields, int] = {}
    parts = []
    for check in checks:
        hashes = np.array(check.hashes, np.int64).reshape(-1, 4)
        numbers = [kinds.setdefault(kind, len(kinds)) for kind in check.kinds]
        hashes[:, 3] = np.array(numbers, np.int64)[hashes[:, 3]]
        parts.append(hashes)
    whole = join([check.found for check in checks if check.found is not None])
    keys, contents, images, kind = np.concatenate(parts).T
    result.samples, counts = len(whole), np.bincount(kind, minlength=len(kinds)).tolist()
    fields = Counter[str]()
    for names, count in zip(kinds, counts, strict=True):
        fields.update(dict.fromkeys(sorted(names), count))
    result.fields = dict(fields.most_common())
    for names, reason in _lacks(dict(zip(kinds, counts, strict=True)), required):
        result.findings += _listed_by_shard(whole, np.flatnonzero(kind == kinds[names]), reason)
    shard = whole.shard_of(np.arange(len(whole)))
    order = np.lexsort((shard, contents, keys))
    first, second = order[:-1], order[1:]
    has_key = (keys[first] == keys[second]) & (shard[first] != shard[second])
    is_same = has_key & (contents[first] == contents[second])
    result.repeated = int((has_key & ~is_same).sum())
    result.findings += _duplicates(whole, first[is_same], second[is_same])
    unique = np.setdiff1d(np.flatnonzero(images), second[is_same])
    for split, other, number, match, shared in _leaks(whole, images, unique):
        count = len(np.unique(images[shared])) - 1
        more = f"; so are {count} more images of {other!r}" if count else ""
        where = f"key {whole.key(match)!r} in {whole.shard_with(match).shown}{more}"
        reason = f"its image is also in split {split!r}: {where}"
        result.findings.append(_finding(whole, number, reason))


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


def _listed_by_shard(index: Index, ids: Ints, reason: str) -> Iterator[Finding]:
    """Yield the findings of samples that have `reason`; of many in one shard the first."""
    for run in np.split(ids, np.flatnonzero(np.diff(index.shard_of(ids))) + 1):
        for number in run[:_EXAMPLES].tolist():
            yield _finding(index, number, f"it has {reason}")
        if len(run) > _EXAMPLES:
            more = f"holds {len(run) - _EXAMPLES} more samples that have {reason}"
            yield Finding(index.shard_with(int(run[0])).shown, "", "", 0, more)


def _duplicates(index: Index, first: Ints, second: Ints) -> Iterator[Finding]:
    """Yield samples that another shard has, too: one for each pair of shards.

    first, second: numbers of equal samples, int64[n] each.
    """
    order = np.argsort(second)
    first, second = first[order], second[order]
    shards = np.stack([index.shard_of(first), index.shard_of(second)])
    _, places, counts = np.unique(shards, axis=1, return_index=True, return_counts=True)
    for place, count in zip(places.tolist(), counts.tolist(), strict=True):
        number, other = int(second[place]), int(first[place])
        more = f"; so are {count - 1} more of this shard" if count > 1 else ""
        where = f"{index.shard_with(other).shown} at offset {index.offsets.start[other]}{more}"
        yield _finding(index, number, f"the same sample, byte for byte, is in {where}")


def _leaks(index: Index, codes: Ints, ids: Ints) -> Iterator[tuple[str, str, int, int, Ints]]:
    """Yield (split, other split, sample of the other, its match, all such samples of the other).

    For each two splits with equal `codes`. ids: the samples that are compared.
    """
    names = [shard.split or split_of(shard.name) for shard in index.shards]
    splits = np.array(names, object)[index.shard_of(ids)]
    for split, other in combinations(sorted(set(filter(None, names))), 2):
        inside, outside = ids[splits == split], ids[splits == other]
        shared = outside[np.isin(codes[outside], codes[inside])]
        if len(shared):
            match = inside[codes[inside] == codes[shared[0]]][0]
            yield split, other, int(shared[0]), int(match), shared


def _check_groups(result: Verification, indexes: list[Index], group_by: str | None) -> None:
    """Find groups that are in two splits. group_by: a column; None: as the conversions recorded."""
    splits = [index.info.get("split") for index in indexes]
    recorded = [split.get("group_by") for split in splits if isinstance(split, dict)]
    for column in [group_by] if group_by else dict.fromkeys(filter(None, recorded)):
        try:
            if not indexes:
                raise UsageError("these shards have no index.")
            whole = join(indexes)
            codes = group_codes(whole, column)
        except UsageError as error:
            if group_by:
                raise
            result.notes.append(f"groups of {column!r} cannot be compared between splits: {error}")
            continue
        result.groups[column] = len(np.unique(codes))
        for split, other, number, match, shared in _leaks(whole, codes, np.arange(len(whole))):
            count = len(np.unique(codes[shared]))
            groups = (
                f"{count} groups of {column!r} are" if count > 1 else f"a group of {column!r} is"
            )
            reason = (
                f"{groups} in both splits {split!r} and {other!r} ({len(shared)} samples of "
                f"{other!r}): it has the same {column!r} as key {whole.key(match)!r} of {split!r}"
            )
            result.findings.append(_finding(whole, number, reason))


# --- addresses ------------------------------------------------------------------------------------


def _listed(urls: Urls) -> tuple[Shards, list[Finding]]:
    """Return the shards with what their index says, each once, and what is wrong with indexes."""
    shards, files, checked = dict[str, Index | None](), IndexFiles(), set[str]()
    findings: dict[str, Finding] = {}  # by reason: one for all shards of a damaged index
    for path in expand(urls):
        where = path if is_json(path) else beside(path, INDEX_NAME)
        try:
            listed = dict(files.each(path))
            shards.update(listed)
            is_indexed, has_files = (
                files.at(where) is not None,
                is_json(path) and not is_remote(path),
            )
            for tar in (
                (tars_of(os.path.dirname(path)) if has_files else listed) if is_indexed else ()
            ):
                if listed.get(tar) is None:
                    reason = "lies beside the index, which does not list it"
                    findings[tar] = Finding(shown_path(tar), "", "", 0, reason)
            if where not in checked and (reason := _index_fault(where, is_indexed)):
                findings[where] = Finding(shown_path(where), "", "", 0, reason)
            checked.add(where)
        except WdstrainError as error:
            finding = finding_of(shown_path(path), error)
            findings.setdefault(finding.reason, finding)
    return list(shards.items()), list(findings.values())


def _index_fault(path: str, is_indexed: bool) -> str:
    """Return what is wrong with the files of the index at `path`; "" if nothing is."""
    if is_indexed:
        return changed(path)
    is_alone = not is_remote(path) and os.path.exists(beside(path, TABLE_NAME))
    return f"is missing or damaged, but its {TABLE_NAME} is there" if is_alone else ""


def _needed(need: str | Sequence[str]) -> list[str]:
    """Return the needed fields; alternatives are separated by ";"."""
    groups = need.split(",") if isinstance(need, str) else list(need)
    cleaned = [
        ";".join(name.strip().lower() for name in group.split(";") if name.strip())
        for group in groups
    ]
    if need and not all(cleaned):
        raise UsageError(f"need={need!r}: a field is empty. Write for example 'jpg;png,cls'.")
    return [group for group in cleaned if group]
