"""One forward pass over a shard, for `verify` and `repair`: its samples, its damage, its checksums.

A reader must not guess, so `tar.walk` raises at the first fault. Here the damage is recorded, and
the walk goes on at the next block of 512 bytes that is a header: with the ustar magic and a valid
checksum. A tar inside damaged bytes is taken for the shard's own headers. A sample takes some dozens
of bytes of memory, so a shard that consists of headers only does no harm.
"""

from __future__ import annotations

import hashlib
import math
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from isal.isal_zlib import crc32

from wdstrain.decode.codecs import decode_image
from wdstrain.decode.formats import EXTENSIONS, is_image
from wdstrain.decode.labels import field_of
from wdstrain.errors import SampleError, ShardError, StorageError, WdstrainError
from wdstrain.loader.stats import Finding
from wdstrain.shards.index import Index
from wdstrain.shards.kinds import ColumnInfo
from wdstrain.shards.offsets import Offsets, OffsetsBuilder
from wdstrain.shards.tar import Member as TarMember
from wdstrain.shards.tar import SkippedMembers, Window, by_key, check_plain, walk
from wdstrain.shards.tar_headers import BLOCK, Fault, size_in
from wdstrain.shards.tar_headers import EXTENSIONS as EXTENSION_HEADERS
from wdstrain.shards.values import npy_array, parsed_json, scalar
from wdstrain.storage.local import LocalFile, Source
from wdstrain.storage.remote import ALL_BYTES, RemoteFile, is_remote, shown_path

LARGEST = 1 << 30  # bytes of a field that is decoded or compared
NOT_FINITE = "is NaN or infinite"
_READ = 4 << 20  # bytes of one read
_BEHIND = 2 << 20  # bytes that are kept behind what is asked for
_MOST = 1000  # findings of one shard that are listed
_KINDS = b"0\x007" + EXTENSION_HEADERS  # of headers at which a walk goes on: files, and extensions

Fields = frozenset[str]
Member = tuple[str, int, int, int]  # field, offset, size, crc32
Part = tuple[str, int, bytes]  # field, offset, bytes


class ShardReader(Window):
    """Reads a shard once from its first byte to its last, in large blocks, and hashes it meanwhile.

    Files are not mapped: a file that is truncated meanwhile would kill the process. stopping: set by
    another thread to end it. tick: called with the number of bytes of each read. Raises StorageError
    or ShardError if the shard cannot be read.
    """

    def __init__(self, path: str, stopping: threading.Event, tick: Callable[[int], None]) -> None:
        self.shown = shown_path(path)
        self._source: Source = (
            RemoteFile(path, tag="", stopping=stopping, first_bytes=ALL_BYTES)
            if is_remote(path)
            else LocalFile(path)
        )
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
            raise ShardError(f"{self.shown} was cut while it was read. Run this again.")
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

    first: number of the first sample with each key. again: numbers of the others. twice: (number,
    field, offset) of members whose name the sample already has. empty: the same of members of 0
    bytes. kinds: numbers of the sets of fields that samples have. hashes: key, fields with their
    bytes, images (0: none), and number of the kind, of each sample; hashes are valid within this process.
    """

    def __init__(self) -> None:
        self.damages: list[Damage] = []
        self.first: dict[str, int] = {}
        self.again: list[int] = []
        self.twice: list[tuple[int, str, int]] = []
        self.empty: list[tuple[int, str, int]] = []
        self.kinds: dict[Fields, int] = {}
        self.hashes, self.ignored, self.sha256 = array("q"), SkippedMembers(), ""
        self.offsets = Offsets.of([])


def scan_shard(
    reader: ShardReader,
    wants: Callable[[str, int], bool] = lambda field, size: False,
    visit: Callable[[str, list[Part]], None] = lambda key, parts: None,
) -> Scan:
    """Read a shard to its end and return what it holds.

    wants: called with field and size of each member, returns whether its bytes are needed. visit:
    called with the key of each sample and those members. Raises StorageError if the shard cannot be
    read, ShardError if it cannot be a set of samples.
    """
    check_plain(reader.read(0, BLOCK), reader.shown)
    scan, rows = Scan(), OffsetsBuilder()
    for key, group in by_key(_members(reader, scan), scan.ignored):
        number, wanted = len(rows), list[Part]()
        start, stop, members = 0, 0, dict[str, tuple[int, int, int, int]]()
        for _, field, member in group:
            crc, hashed, parts = 0, 0, list[bytes]()
            is_wanted = wants(field, member.size)
            for part in reader.parts(member.offset, member.size):
                crc, hashed = crc32(part, crc), hash((hashed, part))
                if is_wanted:
                    parts.append(part)
            if is_wanted:
                wanted.append((field, member.offset, b"".join(parts)))
            if field in members:
                scan.twice.append((number, field, member.offset))
            if not member.size:
                scan.empty.append((number, field, member.offset))
            if not members:
                start = member.start
            members.setdefault(field, (member.offset, member.size, crc, hashed))
            stop = min(reader.size, member.stop)  # a cut may take padding alone
        if scan.first.setdefault(key, number) < number:
            scan.again.append(number)
        contents = sorted((field, size, hashed) for field, (_, size, _, hashed) in members.items())
        images = [one[1:] for one in contents if one[0] in EXTENSIONS and one[1]]
        kind = scan.kinds.setdefault(frozenset(members), len(scan.kinds))
        image = hash(tuple(images)) if images else 0
        scan.hashes.extend((hash(key), hash(tuple(contents)), image, kind))
        rows.put(key, start, stop, [(name, *row[:3]) for name, row in members.items()])
        visit(key, wanted)
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
    """Yield (key, members, findings) of each sample of an index.

    members: as they lie in the shard: where the scan found a sample of this key with these bytes, or
    where the index says. findings: of those whose bytes have another crc32 than the index says, or
    without checksums: of a sample that the scan did not find.
    """
    found, has_checksums = members_of(scan.offsets), expected.offsets.has_checksums
    keys = expected.keys(np.arange(len(expected)))
    for key, wanted in zip(keys, members_of(expected.offsets), strict=True):
        there = found[scan.first[key]] if key in scan.first else []
        known = {(name, size, crc * has_checksums): at for name, at, size, crc in there}
        lacking = [one for one in wanted if (one[0], one[2], one[3]) not in known]
        if not has_checksums and lacking:
            reason = "it is not there with the fields and sizes that the index says"
            yield key, [], [Finding(reader.shown, key, "", wanted[0][1], reason)]
        elif not has_checksums:
            yield key, there, []
        else:
            places = [
                (name, known.get((name, size, crc), at), size, crc)
                for name, at, size, crc in wanted
            ]
            yield key, places, list(_changed(scan, expected, reader, key, lacking))


def _changed(
    scan: Scan, expected: Index, reader: ShardReader, key: str, members: list[Member]
) -> Iterator[Finding]:
    """Yield the members of a sample whose bytes are not where the index says. They are read again."""
    for name, offset, size, crc in members:
        reason = "the bytes are not those that were packed"
        if scan.sha256 == expected.shards[0].sha256:
            reason = "the bytes are those that were packed, but the index has another crc32"
        elif offset + size > reader.size:
            reason = f"the shard has ended before byte {offset + size}, where it should"
        if offset + size > reader.size or reader.reread_crc32(offset, size) != crc:
            yield Finding(reader.shown, key, name, offset, reason)


def finding_of(shown: str, error: WdstrainError) -> Finding:
    """Return a finding with the text of an error, which mostly starts with the shard's name."""
    text = str(error).removesuffix(".")
    if text.startswith(f"{shown} "):
        return Finding(shown, "", "", 0, text[len(shown) + 1 :])
    return Finding(shown, "", "", 0, f"cannot be checked: {text.removeprefix(f'{shown}: ')}")


def limited(shown: str, findings: list[Finding]) -> list[Finding]:
    """Return the findings of a shard; of very many the first, and how many more there are."""
    more = len(findings) - _MOST
    if more <= 0:
        return findings
    reason = f"has {more} more findings than the {_MOST} that are listed"
    return [*findings[:_MOST], Finding(shown, "", "", 0, reason)]


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


# --- decoding -------------------------------------------------------------------------------------


def can_decode(field: str, labels: Sequence[ColumnInfo]) -> bool:
    """Return whether bytes of a field may be wrong for training. labels: of the index."""
    is_known = field.rpartition(".")[2] in ("cls", "json", "npy", "text", "txt")
    return is_known or is_image(field) or any(label.field == field for label in labels)


def decode_error(
    field: str, data: bytes, labels: Sequence[ColumnInfo], *, is_finite: bool = False
) -> str:
    """Return the reason that training cannot use a field; "" if it can. Nothing is unpickled.

    labels: of the index. is_finite: NaN and infinite labels are refused, with a reason that ends
    with NOT_FINITE.
    """
    mine, extension = [label for label in labels if label.field == field], field.rpartition(".")[2]
    try:
        for label in mine:
            value = _field_of(label).delivered(scalar(memoryview(data), label.entry))
            if is_finite and label.kind == "number" and not math.isfinite(value):
                raise SampleError(f"its {label.entry or field} {NOT_FINITE}")
        if mine:
            return ""
        if is_image(field):
            decode_image(data)
        elif extension == "json":
            parsed_json(data.decode("utf-8-sig"))
        elif extension == "npy":
            npy_array(memoryview(data))
        elif extension == "cls" and not str(scalar(memoryview(data), None)):
            raise SampleError("it is empty")
        elif extension in ("text", "txt"):
            data.decode("utf-8-sig")
    except Exception as error:  # parsers raise whatever they meet
        return str(error).split("\n")[0].strip().rstrip(".") or type(error).__name__
    return ""


_field_of = lru_cache(maxsize=256)(field_of)
