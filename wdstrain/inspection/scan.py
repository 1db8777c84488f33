"""One forward pass over shards, for `verify` and `repair`: samples, damage, checksums.

A reader must not guess, so `tar.walk` raises at the first fault. Here the damage is recorded, and
the walk goes on at the next block of 512 bytes that is a header: with the ustar magic and a valid
checksum. A tar inside damaged bytes is taken for the shard's own headers. Shards are read in
parallel threads, because reading, hashing and decoding release the GIL.
"""

from __future__ import annotations

import hashlib
import os
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import islice, pairwise
from multiprocessing.pool import ThreadPool

import numpy as np
from isal.isal_zlib import crc32

from wdstrain.errors import ShardError, StorageError, WdstrainError
from wdstrain.loader.stats import Finding
from wdstrain.report.printing import counted
from wdstrain.report.terminal import Reporter, reporting
from wdstrain.runtime.machine import cores
from wdstrain.shards.formats import is_image
from wdstrain.shards.index import Index, Shard
from wdstrain.shards.index_io import TABLE_NAME, changed, find_index, remains
from wdstrain.shards.offsets import Offsets, Row
from wdstrain.shards.resolve import picked, places_at
from wdstrain.shards.tar import Member, SkippedMembers, Window, by_key, check_plain, walk
from wdstrain.shards.tar_headers import BLOCK, EXTENSIONS, Fault, size_in
from wdstrain.storage.addresses import (
    INDEX_NAME,
    Urls,
    beside,
    check_finished,
    expand,
    is_json,
    tars_of,
)
from wdstrain.storage.files import open_source
from wdstrain.storage.remote import File, is_remote, name_of, shown_path

MOST = 1000  # findings of one shard, or of one kind, that are listed
_READ = 4 << 20  # bytes of one read
_BEHIND = 2 << 20  # bytes that are kept behind what is asked for
_POLL = 0.1  # seconds between reports of progress
_KINDS = b"0\x007" + EXTENSIONS  # of headers at which a walk goes on: files, and extensions

Entry = tuple[str, int, int, int]  # of a member: field, offset, size, crc32


@dataclass
class ShardCheck:
    """What a pass over one shard found.

    found: its samples, or the intact ones for `repair`; no shard if it could not be read to its
    end. hashes: of the contents and of the images (0: none) of each sample, valid within this
    process.
    """

    findings: list[Finding]
    found: Index = field(default_factory=Index)
    hashes: array[int] = field(default_factory=lambda: array("q"))


class ShardScan(Window):
    """Reads a shard once from its first byte to its last, in large blocks, and hashes it meanwhile.

    Files are not mapped: a file that is truncated meanwhile would kill the process. tick: called
    with the number of bytes of each read. rows (of the index), damages (bytes without samples),
    faults (members of one name, samples in two places), ignored and sha256 are complete after
    `samples`.
    """

    def __init__(self, source: File, tick: Callable[[int], None]) -> None:
        super().__init__(self._hashed, source.size, ahead=_READ, behind=_BEHIND, skips=False)
        self.shown, self.source, self._tick = shown_path(source.path), source, tick
        self.rows, self.ignored = list[Row](), SkippedMembers()
        self.damages, self.faults = list[Finding](), list[Finding]()
        self.sha256, self._hash = "", hashlib.sha256()

    def _hashed(self, offset: int, length: int) -> bytes:
        data = self.source.bytes_at(offset, min(length, _READ))
        self._hash.update(data)
        self._tick(len(data))
        return data

    def samples(
        self, wants: Callable[[str, int], bool] = lambda field, size: False
    ) -> Iterator[tuple[str, dict[str, Entry], dict[str, bytes]]]:
        """Yield key, members and wanted bytes of the samples in order, and read to the end.

        wants: called with field and size of each member, returns whether its bytes are needed.
        Raises StorageError or ShardError if the shard cannot be read, or is compressed.
        """
        check_plain(self.read(0, BLOCK), self.shown)
        first = dict[str, int]()
        for key, group in by_key(self._members(), self.ignored):
            members, values, start, stop = dict[str, Entry](), dict[str, bytes](), 0, 0
            for _, name, member in group:
                offset, size = member.offset, member.size
                value = self.read(offset, size) if wants(name, size) else None
                crc = self._checksum(member) if value is None else crc32(value)
                stop = min(self.size, member.stop)  # a cut may take padding alone
                if name in members:
                    self.faults.append(
                        self.finding(
                            "it is the second member of this name. Pack the shard again",
                            key,
                            name,
                            offset,
                        )
                    )
                    continue
                start = start if members else member.start
                members[name] = (name, offset, size, crc)
                if value is not None:
                    values[name] = value
            before = first.setdefault(key, start)
            if before != start:
                reason = (
                    "its members are in two places; the fields of a sample must be adjacent, the "
                    f"first at offset {before}"
                )
                self.faults.append(self.finding(reason, key, offset=start))
            self.rows.append((key, start, stop, list(members.values())))
            yield key, members, values
        self.read(self.size, 0)
        self.sha256 = self._hash.hexdigest()

    def finding(self, reason: str, key: str = "", field: str = "", offset: int = 0) -> Finding:
        """Return a finding of a field, a sample or the shard."""
        return Finding(self.shown, key, field, offset, reason)

    def index(self, listed: Shard) -> Index:
        """Return the index of the samples. listed: the shard in the former index."""
        shard = replace(listed, path=self.source.path, samples=len(self.rows))
        return Index((shard,), Offsets.of_samples(self.rows))

    def _checksum(self, member: Member) -> int:
        """Return the crc32 of a member, which may be larger than the memory."""
        crc, stop = 0, member.offset + member.size
        for at in range(member.offset, stop, _READ):
            crc = crc32(self.read(at, min(_READ, stop - at)), crc)
        return crc

    def _members(self) -> Iterator[Member]:
        """Yield the members. The damage before each is recorded when it is yielded."""
        offset, fault = 0, None
        while fault is None or offset + BLOCK <= self.size:
            try:
                for member in walk(self, self.ignored, offset):
                    self._record(fault, member.start)
                    fault = None
                    yield member
                break
            except Fault as error:
                fault, offset = fault or error, error.offset + BLOCK
            while offset + BLOCK <= self.size and not is_header(self.read(offset, BLOCK)):
                offset += BLOCK
        self._record(fault, self.size)

    def _record(self, fault: Fault | None, stop: int) -> None:
        """Record a fault, because of which the bytes to `stop` hold no sample."""
        if fault is not None:
            hold = f"; bytes {fault.start} to {stop} hold no sample" if stop > fault.start else ""
            self.damages.append(self.finding(fault.reason + hold, offset=fault.start))


def is_header(block: bytes) -> bool:
    """Return whether a block of 512 bytes is the header of a file."""
    is_file = len(block) == BLOCK and block[257:262] == b"ustar" and block[156] in _KINDS
    try:
        return is_file and size_in(block, 0) >= 0
    except Fault:
        return False


def each_shard(
    shards: Mapping[str, Index],
    work: Callable[[ShardScan, Index], ShardCheck],
    title: str,
    progress: Reporter | bool | None,
    num_workers: int | None = None,
) -> tuple[list[ShardCheck], int]:
    """Return (results of the work on each shard in order, bytes read). Shards are read in threads.

    shards: what the index says of each, by path. A shard that cannot be read is a finding. An
    exception, also one of `progress`, ends all reads.
    """
    stopping, total, reads = threading.Event(), _total_megabytes(shards), list[int]()

    def tick(size: int) -> None:
        reads.append(size)
        if stopping.is_set():
            raise StorageError(f"{title} was stopped.")

    def attempt(shard: tuple[str, Index]) -> ShardCheck:
        path, expected = shard
        try:
            with open_source(path, state="", stopping=stopping) as source:
                return work(ShardScan(source, tick), expected)
        except WdstrainError as error:
            return ShardCheck([finding_of(shown_path(path), error)])

    # Unlike an executor, a pool that is left after an interrupt waits for no stalled server.
    with reporting(progress, True) as reporter, ThreadPool(num_workers or cores()) as threads:
        results, is_done = threads.map_async(attempt, shards.items(), chunksize=1), False
        try:
            while not is_done:
                results.wait(_POLL)
                is_done = results.ready()
                reporter.step(title, sum(reads) // 10**6, total, unit="MB")
        finally:
            stopping.set()
        return results.get(), sum(reads)


# --- comparing with an index ----------------------------------------------------------------------


def as_packed(scan: ShardScan, expected: Index) -> tuple[dict[str, list[Entry]], list[Finding]]:
    """Return the members of each sample that is as an index with checksums says, and other members.

    A member lies where the scan found its bytes with this key, or else where the index says.
    """
    places = {
        (key, name, size, crc): offset
        for key, _, _, members in scan.rows
        for name, offset, size, crc in members
    }
    intact, lost = dict[str, list[Entry]](), list[Finding]()
    for key, wanted in _members_in(expected):
        members = list[Entry]()
        for name, offset, size, crc in wanted:
            place = places.get((key, name, size, crc))
            if place is None and crc32(scan.source.bytes_at(offset, size)) == crc:
                place = offset  # only its header is damaged
            if place is None:
                reason = "the bytes are not those that were packed"
                lost.append(scan.finding(reason, key, name, offset))
            else:
                members.append((name, place, size, crc))
        if len(members) == len(wanted):
            intact[key] = members
    return intact, lost


def missing(scan: ShardScan, expected: Index) -> list[Finding]:
    """Return a finding for each sample of an index that a shard does not have."""
    known, starts = {key for key, *_ in scan.rows}, expected.offsets.start.tolist()
    return [
        scan.finding("it is not there, as the index says", key, offset=start)
        for key, start in zip(expected.keys(np.arange(len(expected))), starts, strict=True)
        if key not in known
    ]


def _members_in(index: Index) -> Iterator[tuple[str, list[Entry]]]:
    """Yield (key, (field, offset, size, crc32 or 0) of each member) of the samples of an index."""
    found = index.offsets.members
    columns = (array.tolist() for array in (found.offset, found.size, found.crc))
    names = map(index.fields.__getitem__, found.field.tolist())
    rows = list(zip(names, *columns, strict=True))
    keys, edges = index.keys(np.arange(len(index))), pairwise(found.first.tolist())
    for key, (first, stop) in zip(keys, edges, strict=True):
        yield key, rows[first:stop]


# --- findings -------------------------------------------------------------------------------------


def finding_of(shown: str, error: WdstrainError) -> Finding:
    """Return a finding with the text of an error, which mostly starts with the shard's name."""
    text = str(error).removesuffix(".")
    reason = text.removeprefix(f"{shown} ")
    if reason == text:
        reason = f"cannot be checked: {text.removeprefix(f'{shown}: ')}"
    return Finding(shown, "", "", 0, reason)


def limited(findings: Iterable[Finding], count: int, what: str) -> Iterator[Finding]:
    """Yield findings; of very many the first, and how many more of this name there are."""
    listed = list(islice(findings, MOST + 1))
    yield from listed[:MOST]
    for first in listed[MOST:]:
        more = f"holds the first of {counted(count - MOST, f'more {what}')}: {first.reason}"
        yield Finding(first.shard, "", "", 0, more)


def field_kind(field: str) -> str:
    """Return the name of a field with one word for all image extensions."""
    before, dot, _ = field.rpartition(".")
    return f"{before}{dot}image" if is_image(field) else field


# --- addresses ------------------------------------------------------------------------------------


def shards_at(urls: Urls) -> tuple[dict[str, Index], list[Finding]]:
    """Return what the index says of each shard, by path, and what is wrong with indexes.

    Of a shard without an index nothing is known but its path. What remains of a damaged index takes
    its place. Tars that an index does not list are a finding.
    """
    shards, findings = dict[str, Index](), dict[str, Finding]()
    index_at = cache(partial(_index_at, findings))
    for path in expand(urls):
        for tar, index in places_at(path, index_at):
            shards[tar] = Index((Shard(tar, 0, 0),)) if index is None else picked(index, [tar])
        listed, tars = index_at(path if is_json(path) else beside(path, INDEX_NAME)), [path]
        if is_json(path):
            tars = [] if is_remote(path) else tars_of(os.path.dirname(path))
        for tar in tars:
            if listed is not None and name_of(tar) not in listed.shard_numbers:
                findings[tar] = Finding(
                    shown_path(tar), "", "", 0, "lies beside the index, which does not list it"
                )
    return shards, list(findings.values())


def _index_at(findings: dict[str, Finding], path: str) -> Index | None:
    """Return the index at `path`, or what remains of a damaged one; None if there is none.

    findings: receives what is wrong with it.
    """
    if not is_remote(path):
        check_finished(os.path.dirname(path))
    try:
        index = find_index(path)
        reason = "" if index is None else changed(path)
        if index is None and os.path.exists(beside(path, TABLE_NAME)):
            reason = f"is missing or damaged, but its {TABLE_NAME} is there"
        if reason:
            raise ShardError(f"{shown_path(path)} {reason}.")
    except ShardError as error:
        index = remains(path)
        findings[path] = finding_of(shown_path(path), error)
    return index


def _total_megabytes(shards: Mapping[str, Index]) -> int | None:
    """Return the size of all shards; None if that is not known."""
    sizes = [
        index.shards[0].bytes or (os.path.exists(path) and os.path.getsize(path))
        for path, index in shards.items()
    ]
    return sum(sizes) // 10**6 if all(sizes) else None
