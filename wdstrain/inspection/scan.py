"""One forward pass over a shard, for `verify` and `repair`: its samples, its damage, its checksums.

A reader must not guess, so `tar.walk` raises at the first fault. Here the damage is recorded, and
the walk goes on at the next block of 512 bytes that is a header: with the ustar magic and a valid
checksum. A tar inside damaged bytes is taken for the shard's own headers.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

from isal.isal_zlib import crc32

from wdstrain.decode.formats import EXTENSIONS, is_image
from wdstrain.errors import ShardError, WdstrainError
from wdstrain.loader.stats import Finding
from wdstrain.shards.index import Index, Shard
from wdstrain.shards.index_io import TABLE_NAME, changed, find_index, load, remains
from wdstrain.shards.resolve import picked
from wdstrain.shards.tar import Member as TarMember
from wdstrain.shards.tar import SkippedMembers, Window, by_key, check_plain, walk
from wdstrain.shards.tar_headers import BLOCK, Fault, size_in
from wdstrain.shards.tar_headers import EXTENSIONS as EXTENSION_HEADERS
from wdstrain.storage.addresses import (
    INDEX_NAME,
    Urls,
    beside,
    check_finished,
    expand,
    is_json,
    tars_of,
)
from wdstrain.storage.remote import File, is_remote, name_of, shown_path

MOST = 1000  # findings of one shard, or of one kind, that are listed
_READ = 4 << 20  # bytes of one read
_BEHIND = 2 << 20  # bytes that are kept behind what is asked for
_KINDS = b"0\x007" + EXTENSION_HEADERS  # of headers at which a walk goes on: files, and extensions

Member = tuple[str, int, int, int]  # field, offset, size, crc32


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


@dataclass
class Found:
    """A sample in the bytes [start, stop) of a shard.

    members: by field, in order. values: bytes of the members that were asked for. images: a hash of
    each image, valid within this process, and 0 of other members. twice: members whose field the sample already has.
    """

    key: str
    start: int = 0
    stop: int = 0
    members: dict[str, Member] = field(default_factory=dict)
    values: dict[str, bytes] = field(default_factory=dict)
    images: list[int] = field(default_factory=list)
    twice: list[Member] = field(default_factory=list)


class ShardScan(Window):
    """Reads a shard once from its first byte to its last, in large blocks, and hashes it meanwhile.

    Files are not mapped: a file that is truncated meanwhile would kill the process. tick: called
    with the number of bytes of each read. damages, ignored and sha256 are complete after `samples`.
    """

    def __init__(self, source: File, tick: Callable[[int], None]) -> None:
        super().__init__(self._hashed, source.size, ahead=_READ, behind=_BEHIND, skips=False)
        self.shown, self.source, self._tick = shown_path(source.path), source, tick
        self.damages, self.ignored = list[Damage](), SkippedMembers()
        self.sha256, self._hash = "", hashlib.sha256()

    def _hashed(self, offset: int, length: int) -> bytes:
        data = self.source.read(offset, min(length, _READ))
        self._hash.update(data)
        self._tick(len(data))
        return data

    def samples(
        self, wants: Callable[[str, int], bool] = lambda field, size: False
    ) -> Iterator[Found]:
        """Yield the samples in order, and read to the end of the shard.

        wants: called with field and size of each member, returns whether its bytes are needed.
        Raises StorageError or ShardError if the shard cannot be read, or is compressed.
        """
        check_plain(self.read(0, BLOCK), self.shown)
        for key, group in by_key(self._members(), self.ignored):
            found = Found(key)
            for _, name, member in group:
                crc, hashed, parts, is_wanted = 0, 0, list[bytes](), wants(name, member.size)
                end = member.offset + member.size
                for at in range(member.offset, end, _READ):
                    part = self.read(at, min(_READ, end - at))
                    crc = crc32(part, crc)
                    hashed = hash((hashed, part)) if name in EXTENSIONS else 0
                    if is_wanted:
                        parts.append(part)
                if not found.members:
                    found.start = member.start
                found.stop = min(self.size, member.stop)  # a cut may take padding alone
                if name in found.members:
                    found.twice.append((name, member.offset, member.size, crc))
                    continue
                found.members[name] = (name, member.offset, member.size, crc)
                found.images.append(hashed)
                if is_wanted:
                    found.values[name] = b"".join(parts)
            yield found
        self.read(self.size, 0)
        self.sha256 = self._hash.hexdigest()

    def _members(self) -> Iterator[TarMember]:
        """Yield the members. The damage before each is recorded when it is yielded."""
        damages, offset = self.damages, 0
        while offset + BLOCK <= self.size or not damages:
            try:
                for member in walk(self, self.ignored, offset):
                    if damages and damages[-1].stop == self.size:
                        damages[-1] = damages[-1]._replace(stop=member.start)
                    yield member
                return
            except Fault as fault:
                if not damages or damages[-1].stop < self.size:
                    damages.append(Damage(fault.start, self.size, fault.reason))
                offset = fault.offset + BLOCK
            while offset + BLOCK <= self.size and not is_header(self.read(offset, BLOCK)):
                offset += BLOCK


def is_header(block: bytes) -> bool:
    """Return whether a block of 512 bytes is the header of a file."""
    if block[257:262] != b"ustar" or len(block) < BLOCK or block[156] not in _KINDS:
        return False
    try:
        return size_in(block, 0) >= 0
    except Fault:
        return False


# --- findings -------------------------------------------------------------------------------------


def finding_of(shown: str, error: WdstrainError) -> Finding:
    """Return a finding with the text of an error, which mostly starts with the shard's name."""
    text = str(error).removesuffix(".")
    if text.startswith(f"{shown} "):
        return Finding(shown, "", "", 0, text[len(shown) + 1 :])
    return Finding(shown, "", "", 0, f"cannot be checked: {text.removeprefix(f'{shown}: ')}")


def limited(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings of a shard; of very many the first, and how many more there are."""
    more = f"has {len(findings) - MOST} more findings than the {MOST} that are listed"
    rest = [Finding(one.shard, "", "", 0, more) for one in findings[MOST : MOST + 1]]
    return [*findings[:MOST], *rest]


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
    shards, findings, index_at = dict[str, Index](), dict[str, Finding](), cache(_index_at)
    for path in expand(urls):
        is_list = is_json(path)
        where = path if is_list else beside(path, INDEX_NAME)
        index, fault = index_at(where)
        if fault is not None:
            findings[where] = fault
        if is_list and is_remote(path) and not index.shards:
            load(path)  # raises the error
        tars = [shard.path for shard in index.shards] if is_list else [path]
        if is_list and not is_remote(path):
            tars += tars_of(os.path.dirname(path))
        for tar in dict.fromkeys(tars):
            if name_of(tar) in index.shard_numbers:
                shards[tar] = picked(index, [tar])
                continue
            if index.shards:
                reason = "lies beside the index, which does not list it"
                findings[tar] = Finding(shown_path(tar), "", "", 0, reason)
            if not (is_list and index.shards):
                shards[tar] = Index((Shard(tar, 0, 0),))
    return shards, list(findings.values())


def _index_at(path: str) -> tuple[Index, Finding | None]:
    """Return the index at `path`, or what remains of a damaged one, and what is wrong with it.

    An index without shards if there is none.
    """
    shown, nothing = shown_path(path), Index()
    if not is_remote(path):
        check_finished(os.path.dirname(path))
    try:
        index = find_index(path)
        reason = "" if index is None else changed(path)
        if index is None and os.path.exists(beside(path, TABLE_NAME)):
            reason = f"is missing or damaged, but its {TABLE_NAME} is there"
        if reason:
            raise ShardError(f"{shown} {reason}.")
        return nothing if index is None else index, None
    except ShardError as error:
        index = remains(path)
        return nothing if index is None else index, finding_of(shown, error)


def total_bytes(shards: dict[str, Index]) -> int | None:
    """Return the bytes of all shards; None if that is not known."""
    unknown = [path for path, index in shards.items() if not index.shards[0].bytes]
    if any(map(is_remote, unknown)):
        return None
    known = sum(index.shards[0].bytes for index in shards.values())
    return known + sum(os.path.getsize(path) for path in unknown if os.path.exists(path))
