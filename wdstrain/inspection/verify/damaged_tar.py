"""Walk over a damaged shard: its samples, and the byte ranges that hold none.

A reader must not guess, so `tar.walk` raises at the first fault. Here the damage is reported, and the
walk continues at the next header. It reads forward, searches each byte once, and needs a few MB of
memory for any header.

A header may begin at any byte, because a shard may have lost bytes in its middle. It is recognized
by the ustar magic and its checksum. A tar inside a member is taken for the shard's own headers. Old
tars without the magic (V7) cannot be searched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from wdstrain.errors import ShardError
from wdstrain.shards.tar import Member, Read, SkippedMembers, Window, by_key, check_plain, walk
from wdstrain.shards.tar_headers import BLOCK, EXTENSIONS, Fault, size_in

_SEARCHED = 1 << 20  # bytes that are searched at a time
_KINDS = b"0\x007" + EXTENSIONS  # of headers at which a search stops: files, and extensions of them

# (key, field, offset, size) of a member -> its crc32, and a 64-bit hash of its bytes
Look = Callable[[str, str, int, int], tuple[int, int]]


class Damage(NamedTuple):
    """Bytes [start, stop) of a shard that hold no sample; empty if only the end marker is missing.

    reason: continues a sentence that starts with the shard's name.
    """

    start: int
    stop: int
    reason: str


class FoundSample(NamedTuple):
    """A sample; key, start, stop and fields as in `tar.Sample`.

    crcs, hashes: of its members. twice: (field, offset) of members whose name the sample already
    has. is_suspect: it is next to damage and may have lost members.
    """

    key: str
    start: int
    stop: int
    fields: list[tuple[str, int, int]]
    crcs: list[int]
    hashes: list[int]
    twice: list[tuple[str, int]]
    is_suspect: bool


def walk_damaged(
    read: Read, size: int, look: Look, skipped: SkippedMembers
) -> Iterator[FoundSample | Damage]:
    """Yield samples and damage of a shard, by offset; damage comes before the sample that it ends.

    read: called with offsets that ascend, except for steps back of less than 2 MiB. look: called
    for each member, returns its crc32 and a hash. skipped: counts ignored members.
    """
    damages: list[Damage] = []
    before = reported = 0  # damages before the sample, and those that were yielded
    for key, group in by_key(_members(read, size, skipped, damages), skipped):
        found, twice = dict[str, tuple[Member, tuple[int, int]]](), list[tuple[str, int]]()
        for _, name, member in group:
            looked = look(key, name, member.offset, member.size)
            stop, known = min(size, member.stop), len(damages)  # a cut may take padding alone
            if name in found:
                twice.append((name, member.offset))
            else:
                found[name] = member, looked
        # The next member has been passed, so that damage behind this sample is known, too.
        yield from damages[reported:]
        yield FoundSample(
            key,
            next(iter(found.values()))[0].start,
            stop,
            [(name, member.offset, member.size) for name, (member, _) in found.items()],
            [crc for _, (crc, _) in found.values()],
            [hashed for _, (_, hashed) in found.values()],
            twice,
            is_suspect=len(damages) > before,
        )
        before, reported = known, len(damages)
    yield from damages[reported:]


def _members(
    read: Read, size: int, skipped: SkippedMembers, damages: list[Damage]
) -> Iterator[Member]:
    """Yield the members of a shard. damages: receives the damage before each member, and the last."""
    source, search = Window(read, size), _Search(read, size)
    damage: Damage | None = None  # it ends where the next member begins
    offset: int | None = 0
    try:
        check_plain(source.read(0, BLOCK), "")
    except ShardError as error:
        damage, offset = (
            Damage(0, size, str(error).strip().removesuffix(". Unpack it first.")),
            None,
        )
    while offset is not None:
        try:
            for member in walk(source, skipped, offset):
                if damage is not None:
                    damages.append(damage._replace(stop=member.start))
                    damage = None
                yield member
            break
        except Fault as fault:
            damage = damage or Damage(fault.start, size, fault.reason)
            offset = search.after(fault.offset + 1)
    if damage is not None:
        damages.append(damage)


class _Search:
    """Finds headers. The bytes that were read last are kept."""

    def __init__(self, read: Read, size: int) -> None:
        self._read, self._size = read, size
        self._base, self._held = 0, b""

    def after(self, offset: int) -> int | None:
        """Return the first offset >= `offset` where a header begins; None if there is none."""
        while offset + BLOCK <= self._size:
            if not self._base <= offset <= self._base + len(self._held) - BLOCK:
                length = min(self._size - offset, _SEARCHED + BLOCK)
                self._base, self._held = offset, bytes(self._read(offset, length))
            at = _header_in(self._held, offset - self._base)
            if at is not None:
                return self._base + at
            offset = self._base + len(self._held) - BLOCK + 1
        return None


def holds_header(data: bytes) -> bool:
    """Return whether a field contains a tar header: then bytes before it are missing."""
    return _header_in(data, 0) is not None


def _header_in(data: bytes, start: int) -> int | None:
    """Return the first place from `start` on where a header lies in some bytes; None if none does."""
    place = data.find(b"ustar", start + 257)
    while 0 <= place <= len(data) - BLOCK + 257:
        block = data[place - 257 : place - 257 + BLOCK]
        if block[156] in _KINDS and _is_valid(block):
            return place - 257
        place = data.find(b"ustar", place + 1)
    return None


def _is_valid(block: bytes) -> bool:
    try:
        size_in(block, 0)
    except Fault:
        return False
    return True
