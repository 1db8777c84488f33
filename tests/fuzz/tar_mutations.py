"""Damage of tars by disks, copies, faulty programs and attackers; one function per kind.

Each function takes the bytes of a well-formed tar and a random generator and returns other bytes.
`KINDS` names them. A kind either keeps the checksum of a changed header, so that the tar itself
reveals the change, or computes a new one, so that only an index can. `mutated_tars.py` counts what
readers make of them. The fuzzer uses them as its mutations, because it would hardly ever guess a
checksum.
"""

from __future__ import annotations

import tarfile
from collections.abc import Callable
from random import Random

BLOCK = 512

Mutation = Callable[[bytes, Random], bytes]


def headers_in(data: bytes) -> list[int]:
    """Return the offsets of all headers of a well-formed tar, by an independent parser."""
    starts, offset = [], 0
    while offset + BLOCK <= len(data) and data[offset : offset + BLOCK].strip(b"\0"):
        try:
            size = tarfile.TarInfo.frombuf(
                data[offset : offset + BLOCK], "utf-8", "surrogateescape"
            ).size
        except tarfile.HeaderError:
            break
        starts.append(offset)
        offset += BLOCK + size + -size % BLOCK
    return starts


def summed(block: bytes) -> bytes:
    """Return a header with a valid checksum."""
    total = sum(block[:148]) + 8 * ord(" ") + sum(block[156:])
    return block[:148] + b"%06o\0 " % total + block[156:]


def with_sums(data: bytes) -> bytes:
    """Return the same bytes with a valid checksum in each block that claims to be a header."""
    blocks = [data[at : at + BLOCK] for at in range(0, len(data), BLOCK)]
    return b"".join(
        summed(block) if len(block) == BLOCK and block[257:262] == b"ustar" else block
        for block in blocks
    )


# --- bits and runs ---


def bit_in_header(data: bytes, random: Random) -> bytes:
    at = random.choice(headers_in(data)) + random.randrange(BLOCK)
    return _flipped(data, at, random)


def bit_in_name_size_or_type(data: bytes, random: Random) -> bytes:
    at = random.choice(headers_in(data)) + random.choice([*range(12), *range(124, 136), 156])
    return _flipped(data, at, random)


def bit_in_data(data: bytes, random: Random) -> bytes:
    start, stop = _body(data, random)
    return _flipped(data, random.randrange(start, stop), random)


def bit_anywhere(data: bytes, random: Random) -> bytes:
    return _flipped(data, random.randrange(len(data)), random)


def zeroed_run(data: bytes, random: Random) -> bytes:
    start = random.randrange(len(data))
    stop = min(len(data), start + random.choice([1, 16, 512, 4096]))
    return data[:start] + bytes(stop - start) + data[stop:]


def zeroed_blocks(data: bytes, random: Random) -> bytes:
    """Zero aligned blocks, like a disk that lost a page."""
    start = random.randrange(len(data) // BLOCK) * BLOCK
    stop = min(len(data), start + BLOCK * random.choice([1, 2, 8]))
    return data[:start] + bytes(stop - start) + data[stop:]


# --- truncation ---


def cut_anywhere(data: bytes, random: Random) -> bytes:
    return data[: random.randrange(len(data))]


def cut_between_members(data: bytes, random: Random) -> bytes:
    return data[: random.choice(headers_in(data))]


def cut_at_a_record(data: bytes, random: Random) -> bytes:
    """Truncate at a multiple of 10 240 bytes, as tar writes, or of 512."""
    step = random.choice([BLOCK, 20 * BLOCK])
    return data[: random.randrange(1 + len(data) // step) * step]


def cut_in_a_header(data: bytes, random: Random) -> bytes:
    return data[: random.choice(headers_in(data)) + random.randrange(1, BLOCK)]


def cut_in_padding(data: bytes, random: Random) -> bytes:
    start, stop = _body(data, random)
    return data[: random.randrange(stop, stop + -(stop - start) % BLOCK + 1)]


def no_end(data: bytes, random: Random) -> bytes:
    """Remove both zero blocks at the end, or one of them."""
    end = len(data.rstrip(b"\0"))
    return data[: end + -end % BLOCK + random.choice([0, BLOCK])]


# --- blocks and members ---


def blocks_removed(data: bytes, random: Random) -> bytes:
    at, count = random.randrange(len(data) // BLOCK) * BLOCK, random.choice([1, 1, 2, 5])
    return data[:at] + data[at + count * BLOCK :]


def blocks_doubled(data: bytes, random: Random) -> bytes:
    at, count = random.randrange(len(data) // BLOCK) * BLOCK, random.choice([1, 1, 2, 5])
    return data[: at + count * BLOCK] + data[at:]


def blocks_swapped(data: bytes, random: Random) -> bytes:
    first, second = sorted(random.sample(range(len(data) // BLOCK), 2))
    blocks = [data[at : at + BLOCK] for at in range(0, len(data), BLOCK)]
    blocks[first], blocks[second] = blocks[second], blocks[first]
    return b"".join(blocks)


def bytes_removed(data: bytes, random: Random) -> bytes:
    at = random.randrange(len(data))
    return data[:at] + data[at + random.randrange(1, 1000) :]


def garbage_inserted(data: bytes, random: Random) -> bytes:
    at = random.choice([random.randrange(len(data)), random.choice(headers_in(data))])
    return data[:at] + random.randbytes(random.choice([1, 100, BLOCK, 2 * BLOCK])) + data[at:]


def member_removed(data: bytes, random: Random) -> bytes:
    start, stop = _member(data, random)
    return data[:start] + data[stop:]


def member_doubled(data: bytes, random: Random) -> bytes:
    start, stop = _member(data, random)
    return data[:stop] + data[start:]


def members_swapped(data: bytes, random: Random) -> bytes:
    (a, b), (c, d) = sorted([_member(data, random), _member(data, random)])
    return data if a == c else data[:a] + data[c:d] + data[b:c] + data[a:b] + data[d:]


def spliced(data: bytes, random: Random) -> bytes:
    """Join the beginning of the tar with its end from another member, before or after."""
    places = headers_in(data)
    return data[: random.choice(places)] + data[random.choice(places) :]


def two_tars(data: bytes, random: Random) -> bytes:
    """Join two tars, as `cat` does; with the zeros between them, or only the end marker."""
    first = (
        data
        if random.random() < 0.5
        else data.rstrip(b"\0") + bytes(-len(data.rstrip(b"\0")) % BLOCK + 2 * BLOCK)
    )
    return first + data


# --- changed headers ---


def size_changed(data: bytes, random: Random) -> bytes:
    return _told(data, random, 124, _size(random))


def size_changed_and_summed(data: bytes, random: Random) -> bytes:
    return _told(data, random, 124, _size(random), sums=True)


def type_changed(data: bytes, random: Random) -> bytes:
    return _told(data, random, 156, bytes([random.choice(b"\0001234567xgLKSXDVA\xff")]))


def type_changed_and_summed(data: bytes, random: Random) -> bytes:
    return _told(data, random, 156, bytes([random.choice(b"\0001234567xgLKSXDVA\xff")]), sums=True)


def name_changed(data: bytes, random: Random) -> bytes:
    return _told(data, random, random.randrange(8), bytes([random.choice(b"az09./_\0\xff")]))


def name_changed_and_summed(data: bytes, random: Random) -> bytes:
    return _told(
        data, random, random.randrange(8), bytes([random.choice(b"az09./_\0\xff")]), sums=True
    )


def checksum_changed(data: bytes, random: Random) -> bytes:
    octal = b"%06o\0 " % random.randrange(1 << 17)
    wrong = random.choice([octal, b" " * 8, bytes(8), b"-0012345", random.randbytes(8)])
    return _told(data, random, 148, wrong)


KINDS: tuple[Mutation, ...] = (
    bit_in_header,
    bit_in_name_size_or_type,
    bit_in_data,
    bit_anywhere,
    zeroed_run,
    zeroed_blocks,
    cut_anywhere,
    cut_between_members,
    cut_at_a_record,
    cut_in_a_header,
    cut_in_padding,
    no_end,
    blocks_removed,
    blocks_doubled,
    blocks_swapped,
    bytes_removed,
    garbage_inserted,
    member_removed,
    member_doubled,
    members_swapped,
    spliced,
    two_tars,
    size_changed,
    size_changed_and_summed,
    type_changed,
    type_changed_and_summed,
    name_changed,
    name_changed_and_summed,
    checksum_changed,
)


# --- helpers ---


def _flipped(data: bytes, at: int, random: Random) -> bytes:
    return data[:at] + bytes([data[at] ^ 1 << random.randrange(8)]) + data[at + 1 :]


def _told(data: bytes, random: Random, place: int, value: bytes, *, sums: bool = False) -> bytes:
    """Return the tar with another value in this place of a header."""
    at = random.choice(headers_in(data))
    block = data[at : at + place] + value + data[at + place + len(value) : at + BLOCK]
    return data[:at] + (summed(block) if sums else block) + data[at + BLOCK :]


def _size(random: Random) -> bytes:
    small = b"%011o\0" % random.choice([0, 1, 511, 512, 513, 1024, random.randrange(5000)])
    large = random.choice(
        [
            b"%011o\0" % (8**11 - 1),
            b"\x80" + random.randbytes(11),
            b"\x80" + bytes(9) + b"\x02\x00",
            b"-0000000012\0",
        ]
    )
    return small if random.random() < 0.7 else large


def _member(data: bytes, random: Random) -> tuple[int, int]:
    """[start, stop) of a member, with the extension headers before it."""
    places = [
        at for at in headers_in(data) if data[at + 156 : at + 157] not in (b"x", b"g", b"L", b"K")
    ]
    number = random.randrange(len(places))
    stops = [_stop(data, at) for at in places]
    return (stops[number - 1] if number else 0), stops[number]


def _body(data: bytes, random: Random) -> tuple[int, int]:
    """[start, stop) of the data of a member or an extension header that has data."""
    bodies = [
        (at + BLOCK, at + BLOCK + size) for at in headers_in(data) if (size := _size_at(data, at))
    ]
    return random.choice(bodies)


def _size_at(data: bytes, at: int) -> int:
    return tarfile.TarInfo.frombuf(data[at : at + BLOCK], "utf-8", "surrogateescape").size


def _stop(data: bytes, at: int) -> int:
    size = _size_at(data, at)
    return at + BLOCK + size + -size % BLOCK
