"""One forward pass over a shard, for `verify` and `repair`: its samples, its damage, its checksums.

A reader must not guess, so `tar.walk` raises at the first fault. Here the damage is recorded, and
the walk goes on at the next block of 512 bytes that is a header: with the ustar magic and a valid
checksum. A tar inside damaged bytes is taken for the shard's own headers. A sample takes some dozens
of bytes of memory, so a shard that consists of headers only does no harm.
"""

from __future__ import annotations

import hashlib
import os
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from isal.isal_zlib import crc32

from wdstrain.decode.formats import EXTENSIONS, is_image
from wdstrain.errors import ShardError, StorageError, WdstrainError
from wdstrain.loader.stats import Finding
from wdstrain.shards.index import Index
from wdstrain.shards.index_io import TABLE_NAME, changed, find_index, load, remains
from wdstrain.shards.offsets import Offsets, OffsetsBuilder
from wdstrain.shards.resolve import picked, tars_of
from wdstrain.shards.tar import Member as TarMember
from wdstrain.shards.tar import SkippedMembers, Window, by_key, check_plain, walk
from wdstrain.shards.tar_headers import BLOCK, Fault, size_in
from wdstrain.shards.tar_headers import EXTENSIONS as EXTENSION_HEADERS
from wdstrain.storage.addresses import INDEX_NAME, Urls, beside, check_finished, expand, is_json
from wdstrain.storage.files import open_source
from wdstrain.storage.remote import is_remote, name_of, shown_path

MOST = 1000  # findings of one shard, or of one kind, that are listed
_READ = 4 << 20  # bytes of one read
_BEHIND = 2 << 20  # bytes that are kept behind what is asked for
_KINDS = b"0\x007" + EXTENSION_HEADERS  # of headers at which a walk goes on: files, and extensions

Fields = frozenset[str]
Member = tuple[str, int, int, int]  # field, offset, size, crc32
Shards = list[tuple[str, Index | None]]  # (path, index of this shard)


class ShardReader(Window):
    """Reads a shard once from its first byte to its last, in large blocks, and hashes it meanwhile.

    Files are not mapped: a file that is truncated meanwhile would kill the process. stopping: set by
    another thread to end it. tick: called with the number of bytes of each read. Raises StorageError
    or ShardError if the shard cannot be read.
    """

    def __init__(self, path: str, stopping: threading.Event, tick: Callable[[int], None]) -> None:
        self.shown = shown_path(path)
        self._source = open_source(path, state="", stopping=stopping)
        super().__init__(self._source.read, self._source.size)
        self._stopping, self._tick, self._sha256 = stopping, tick, hashlib.sha256()

    def read(self, offset: int, length: int) -> bytes:
        """Return bytes, fewer only at the end. offset: at most 2 MiB before the last call's."""
        end = self._base + len(self._held)
        while end < min(offset + length, self.size):
            data = self._next(end, min(_READ, self.size - end))
            self._sha256.update(data)
            self._tick(len(data))
            kept = memoryview(self._held)[max(0, offset - _BEHIND - self._base) :]
            self._base, self._held = end - len(kept), memoryview(b"".join((kept, data)))
            end += len(data)
        at = offset - self._base
        return bytes(self._held[at : at + length])

    def parts(self, offset: int, length: int) -> Iterator[bytes]:
        """Yield the bytes of a member in blocks."""
        for start in range(offset, offset + length, _READ):
            yield self.read(start, min(_READ, offset + length - start))

    def reread_crc32(self, offset: int, length: int) -> int:
        """Return the crc32 of bytes that were passed; they are read again."""
        crc = 0
        for start in range(offset, offset + length, _READ):
            crc = crc32(self._next(start, min(_READ, offset + length - start)), crc)
        return crc

    def finish(self) -> str:
        """Read to the end and return the sha256 of the shard."""
        self.read(self.size, 0)
        return self._sha256.hexdigest()

    def _next(self, offset: int, length: int) -> bytes:
        if self._stopping.is_set():
            raise StorageError(f"{self.shown}: reading was stopped.")
        data = self._source.read(offset, length)
        if len(data) < length:
            raise ShardError(
                f"{self.shown} was cut while it was read.",
                "Run this again.",
            )
        return data

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._source.close()


class Damage(NamedTuple):
    """Bytes [start, stop) of a shard that hold no sample; empty if only the end marker is missing."""

    start: int
    stop: int
    fault: str

    @property
    def reason(self) -> str:
        """Continues a sentence that starts with the shard's name."""
        hold = f"; bytes {self.start} to {self.stop} hold no sample"
        return self.fault + (hold if self.stop > self.start else "")


class Scan:
    """Samples of a shard, in order.

    first: number of the first sample with each key. faults: (number, field, offset, reason) of
    members whose name the sample already has, and of samples whose key came before. kinds: numbers
    of the sets of fields that samples have. hashes: key and fields with their bytes, images (0:
    none), and number of the kind, of each sample; hashes are valid within this process.
    """

    def __init__(self) -> None:
        self.damages: list[Damage] = []
        self.first: dict[str, int] = {}
        self.faults: list[tuple[int, str, int, str]] = []
        self.kinds: dict[Fields, int] = {}
        self.hashes, self.ignored, self.sha256 = array("q"), SkippedMembers(), ""
        self.offsets = Offsets.of([])


def scan_shard(
    reader: ShardReader,
    wants: Callable[[str, int], bool] = lambda field, size: False,
    visit: Callable[[str, list[Member], dict[str, bytes]], None] = lambda key, members, values: (
        None
    ),
) -> Scan:
    """Read a shard to its end and return what it holds.

    wants: called with field and size of each member, returns whether its bytes are needed. visit:
    called with the key of each sample, its members, and these bytes. Raises StorageError if the
    shard cannot be read, ShardError if it cannot be a set of samples.
    """
    check_plain(reader.read(0, BLOCK), reader.shown)
    scan, rows, starts = Scan(), OffsetsBuilder(), array("q")
    for key, group in by_key(_members(reader, scan), scan.ignored):
        number, stop, values = len(rows), 0, dict[str, bytes]()
        members, hashes = dict[str, Member](), list[tuple[str, int, int]]()
        for _, field, member in group:
            crc, hashed, parts = 0, 0, list[bytes]()
            is_wanted = wants(field, member.size)
            for part in reader.parts(member.offset, member.size):
                crc, hashed = crc32(part, crc), hash((hashed, part))
                if is_wanted:
                    parts.append(part)
            if not members:
                starts.append(member.start)
            stop = min(reader.size, member.stop)  # a cut may take padding alone
            if field in members:
                reason = "it is the second member of this name. Pack the shard again"
                scan.faults.append((number, field, member.offset, reason))
                continue
            members[field] = (field, member.offset, member.size, crc)
            hashes.append((field, member.size, hashed))
            if is_wanted:
                values[field] = b"".join(parts)
        if scan.first.setdefault(key, number) < number:
            reason = "its members are in two places; the fields of a sample must be adjacent"
            scan.faults.append(
                (number, "", starts[-1], f"{reason}, the first at offset {starts[scan.first[key]]}")
            )
        images = sorted(one[1:] for one in hashes if one[1] and one[0] in EXTENSIONS)
        kind = scan.kinds.setdefault(frozenset(members), len(scan.kinds))
        whole = hash((key, *sorted(hashes)))
        scan.hashes.extend((whole, hash(tuple(images)) if images else 0, kind))
        rows.put(key, starts[-1], stop, list(members.values()))
        visit(key, list(members.values()), values)
    scan.sha256, scan.offsets = reader.finish(), rows.offsets()
    return scan


def members_of(offsets: Offsets) -> list[list[Member]]:
    """Return (field, offset, size, crc32 or 0) of the members of each sample."""
    found = offsets.members
    columns = (array.tolist() for array in (found.offset, found.size, found.crc))
    names = map(offsets.fields.__getitem__, found.field.tolist())
    rows = list(zip(names, *columns, strict=True))
    return [rows[first:stop] for first, stop in pairwise(found.first.tolist())]


def compared(
    scan: Scan, expected: Index, reader: ShardReader
) -> Iterator[tuple[str, list[Member], list[Finding]]]:
    """Yield (key, members, findings) of each sample of an index with checksums.

    members: as they lie in the shard: where the scan found a sample of this key with these bytes, or
    where the index says. findings: of those whose bytes have another crc32 than the index says.
    """
    found, keys = members_of(scan.offsets), expected.keys(np.arange(len(expected)))
    for key, wanted in zip(keys, members_of(expected.offsets), strict=True):
        there = found[scan.first[key]] if key in scan.first else []
        known = {(name, size, crc): (name, at, size, crc) for name, at, size, crc in there}
        members, findings = list[Member](), list[Finding]()
        for member in wanted:
            name, offset, size, crc = member
            members.append(known.get((name, size, crc), member))
            if (name, size, crc) not in known and (why := _change(scan, expected, reader, member)):
                findings.append(Finding(reader.shown, key, name, offset, why))
        yield key, members, findings


def _change(scan: Scan, expected: Index, reader: ShardReader, member: Member) -> str:
    """Return how the bytes where an index has a member differ, "" if not. They are read again."""
    _, offset, size, crc = member
    if offset + size > reader.size:
        return f"the shard has ended before byte {offset + size}, where it should"
    if reader.reread_crc32(offset, size) == crc:
        return ""
    if scan.sha256 == expected.shards[0].sha256:
        return "the bytes are those that were packed, but the index has another crc32"
    return "the bytes are not those that were packed"


def finding_of(shown: str, error: WdstrainError) -> Finding:
    """Return a finding with the text of an error, which mostly starts with the shard's name."""
    text = str(error).removesuffix(".")
    if text.startswith(f"{shown} "):
        return Finding(shown, "", "", 0, text[len(shown) + 1 :])
    return Finding(shown, "", "", 0, f"cannot be checked: {text.removeprefix(f'{shown}: ')}")


def limited(findings: Sequence[Finding]) -> Sequence[Finding]:
    """Return the findings of a shard; of very many the first, and how many more there are."""
    if len(findings) <= MOST:
        return findings
    reason = f"has {len(findings) - MOST} more findings than the {MOST} that are listed"
    return [*findings[:MOST], Finding(findings[0].shard, "", "", 0, reason)]


def field_kind(field: str) -> str:
    """Return the name of a field with one word for all image extensions."""
    before, dot, _ = field.rpartition(".")
    return f"{before}{dot}image" if is_image(field) else field


def is_header(block: bytes) -> bool:
    """Return whether a block of 512 bytes is the header of a file."""
    if block[257:262] != b"ustar" or len(block) < BLOCK or block[156] not in _KINDS:
        return False
    try:
        size_in(block, 0)
    except Fault:
        return False
    return True


def _members(reader: ShardReader, scan: Scan) -> Iterator[TarMember]:
    """Yield the members of a shard. The damage before each is recorded when it is yielded."""
    damages, offset = scan.damages, 0
    while offset + BLOCK <= reader.size or not damages:
        try:
            for member in walk(reader, scan.ignored, offset):
                if damages and damages[-1].stop == reader.size:
                    damages[-1] = damages[-1]._replace(stop=member.start)
                yield member
            return
        except Fault as fault:
            if not damages or damages[-1].stop < reader.size:
                damages.append(Damage(fault.start, reader.size, fault.reason))
            offset = fault.offset + BLOCK
        while offset + BLOCK <= reader.size and not is_header(reader.read(offset, BLOCK)):
            offset += BLOCK


# --- addresses ------------------------------------------------------------------------------------


def shards_at(urls: Urls) -> tuple[Shards, list[Finding]]:
    """Return the shards with what their index says, each once, and what is wrong with indexes.

    What remains of a damaged index takes its place. Tars that an index does not list are a finding.
    """
    shards, findings, index_at = dict[str, Index | None](), dict[str, Finding](), cache(_index_at)
    for path in expand(urls):
        is_list, tars = is_json(path), [path]
        where = path if is_list else beside(path, INDEX_NAME)
        index, fault = index_at(where)
        if fault is not None:
            findings[where] = fault
        if is_list and index is not None:
            shards |= {shard.path: picked(index, [shard.path]) for shard in index.shards}
        elif is_list and is_remote(path):
            load(path)  # raises the error
        if is_list:
            tars = [] if is_remote(path) else tars_of(os.path.dirname(path))
        for tar in tars:
            is_listed = index is not None and name_of(tar) in index.shard_numbers
            if index is None or not is_list:
                shards[tar] = picked(index, [tar]) if index is not None and is_listed else None
            if index is not None and not is_listed:
                reason = "lies beside the index, which does not list it"
                findings[tar] = Finding(shown_path(tar), "", "", 0, reason)
    return list(shards.items()), list(findings.values())


def _index_at(path: str) -> tuple[Index | None, Finding | None]:
    """Return the index at `path`, or what remains of a damaged one, and what is wrong with it."""
    shown, is_local = shown_path(path), not is_remote(path)
    if is_local:
        check_finished(os.path.dirname(path))
    try:
        index, reason = find_index(path), ""
        if index is not None:
            reason = changed(path)
        elif is_local and os.path.exists(beside(path, TABLE_NAME)):
            reason = f"is missing or damaged, but its {TABLE_NAME} is there"
        if not reason:
            return index, None
        fault = Finding(shown, "", "", 0, reason)
    except ShardError as error:
        fault = finding_of(shown, error)
    return remains(path), fault


def total_bytes(shards: Shards) -> int | None:
    """Return the bytes of all shards; None if that is not known."""
    total = 0
    for path, index in shards:
        if index is not None:
            total += index.shards[0].bytes
        elif is_remote(path):
            return None
        elif os.path.exists(path):
            total += os.path.getsize(path)
    return total
