"""Damage of tars by disks, copies, faulty programs and attackers, by the name of its kind.

Each function of `KINDS` takes the bytes of a well-formed tar and a random generator and returns
other bytes. A kind either keeps the checksum of a changed header, so that the tar itself reveals
the change, or computes a new one ("summed"), so that only an index can. `mutated_tars.py` counts
what readers make of them. The fuzzer uses them as its mutations, because it would hardly ever guess
a checksum.
"""

from __future__ import annotations

import tarfile
from collections.abc import Callable
from random import Random

BLOCK = 512

Mutation = Callable[[bytes, Random], bytes]


def size_at(data: bytes, at: int) -> int:
    """Return the size in the header at an offset, by an independent parser."""
    return tarfile.TarInfo.frombuf(data[at : at + BLOCK], "utf-8", "surrogateescape").size


def headers_in(data: bytes) -> list[int]:
    """Return the offsets of all headers of a well-formed tar."""
    starts, offset = [], 0
    while offset + BLOCK <= len(data) and data[offset : offset + BLOCK].strip(b"\0"):
        try:
            size = size_at(data, offset)
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


def a_header(data: bytes, random: Random) -> int:
    return random.choice(headers_in(data))


def a_byte(data: bytes, random: Random) -> int:
    return random.randrange(len(data))


def a_block(data: bytes, random: Random) -> int:
    return random.randrange(len(data) // BLOCK) * BLOCK


def a_member(data: bytes, random: Random) -> tuple[int, int]:
    """Return [start, stop) of a member, with the extension headers before it."""
    places = [at for at in headers_in(data) if data[at + 156 : at + 157] not in b"xgLK"]
    number = random.randrange(len(places))
    stops = [at + BLOCK + size_at(data, at) + -size_at(data, at) % BLOCK for at in places]
    return (stops[number - 1] if number else 0), stops[number]


def a_body(data: bytes, random: Random) -> tuple[int, int]:
    """Return [start, stop) of the data of a member or an extension header that has data."""
    bodies = [(at + BLOCK, at + BLOCK + size_at(data, at)) for at in headers_in(data)]
    return random.choice([(start, stop) for start, stop in bodies if start < stop])


def flipped(data: bytes, at: int, random: Random) -> bytes:
    return data[:at] + bytes([data[at] ^ 1 << random.randrange(8)]) + data[at + 1 :]


def zeroed(data: bytes, start: int, count: int) -> bytes:
    stop = min(len(data), start + count)
    return data[:start] + bytes(stop - start) + data[stop:]


def cut_at_a_record(data: bytes, random: Random) -> bytes:
    """Truncate at a multiple of 10 240 bytes, as tar writes, or of 512."""
    step = random.choice([BLOCK, 20 * BLOCK])
    return data[: random.randrange(1 + len(data) // step) * step]


def cut_in_padding(data: bytes, random: Random) -> bytes:
    start, stop = a_body(data, random)
    return data[: random.randrange(stop, stop + -(stop - start) % BLOCK + 1)]


def end_removed(data: bytes, random: Random) -> bytes:
    """Remove both zero blocks at the end, or one of them."""
    end = len(data.rstrip(b"\0"))
    return data[: end + -end % BLOCK + random.choice([0, BLOCK])]


def blocks_swapped(data: bytes, random: Random) -> bytes:
    first, second = sorted(random.sample(range(len(data) // BLOCK), 2))
    blocks = [data[at : at + BLOCK] for at in range(0, len(data), BLOCK)]
    blocks[first], blocks[second] = blocks[second], blocks[first]
    return b"".join(blocks)


def garbage_inserted(data: bytes, random: Random) -> bytes:
    at = random.choice([a_byte(data, random), a_header(data, random)])
    return data[:at] + random.randbytes(random.choice([1, 100, BLOCK, 2 * BLOCK])) + data[at:]


def members_swapped(data: bytes, random: Random) -> bytes:
    (a, b), (c, d) = sorted([a_member(data, random), a_member(data, random)])
    return data if a == c else data[:a] + data[c:d] + data[b:c] + data[a:b] + data[d:]


def two_tars(data: bytes, random: Random) -> bytes:
    """Join two tars, as `cat` does; with the zeros between them, or only the end marker."""
    end = len(data.rstrip(b"\0"))
    first = data if random.random() < 0.5 else data[:end] + bytes(-end % BLOCK + 2 * BLOCK)
    return first + data


def changed(
    place: Callable[[Random], int], value: Callable[[Random], bytes], sums: bool
) -> Mutation:
    """Return a function that changes a value in a header. sums: with a new checksum."""

    def change(data: bytes, random: Random) -> bytes:
        offset, new = place(random), value(random)
        at = a_header(data, random)
        block = data[at : at + offset] + new + data[at + offset + len(new) : at + BLOCK]
        return data[:at] + (summed(block) if sums else block) + data[at + BLOCK :]

    return change


def some_size(random: Random) -> bytes:
    small = b"%011o\0" % random.choice([0, 1, 511, 512, 513, 1024, random.randrange(5000)])
    huge, garbage = b"%011o\0" % (8**11 - 1), b"\x80" + random.randbytes(11)
    large = random.choice([huge, garbage, b"\x80" + bytes(9) + b"\x02\x00", b"-0000000012\0"])
    return small if random.random() < 0.7 else large


def some_checksum(random: Random) -> bytes:
    octal = b"%06o\0 " % random.randrange(1 << 17)
    return random.choice([octal, b" " * 8, bytes(8), b"-0012345", random.randbytes(8)])


def one_of(values: bytes) -> Callable[[Random], bytes]:
    return lambda random: bytes([random.choice(values)])


NAME_SIZE_OR_TYPE = [*range(12), *range(124, 136), 156]
TYPES, LETTERS = b"\0001234567xgLKSXDVA\xff", b"az09./_\0\xff"

KINDS: dict[str, Mutation] = {
    "bit in header": lambda d, r: flipped(d, a_header(d, r) + r.randrange(BLOCK), r),
    "bit in name, size or type": lambda d, r: flipped(
        d, a_header(d, r) + r.choice(NAME_SIZE_OR_TYPE), r
    ),
    "bit in data": lambda d, r: flipped(d, r.randrange(*a_body(d, r)), r),
    "bit anywhere": lambda d, r: flipped(d, a_byte(d, r), r),
    "zeroed run": lambda d, r: zeroed(d, a_byte(d, r), r.choice([1, 16, 512, 4096])),
    "zeroed blocks": lambda d, r: zeroed(d, a_block(d, r), BLOCK * r.choice([1, 2, 8])),
    "cut anywhere": lambda d, r: d[: a_byte(d, r)],
    "cut between members": lambda d, r: d[: a_header(d, r)],
    "cut at a record": cut_at_a_record,
    "cut in a header": lambda d, r: d[: a_header(d, r) + r.randrange(1, BLOCK)],
    "cut in padding": cut_in_padding,
    "no end": end_removed,
    "blocks removed": lambda d, r: (
        d[: (at := a_block(d, r))] + d[at + BLOCK * r.choice([1, 1, 2, 5]) :]
    ),
    "blocks doubled": lambda d, r: (
        d[: (at := a_block(d, r)) + BLOCK * r.choice([1, 1, 2, 5])] + d[at:]
    ),
    "blocks swapped": blocks_swapped,
    "bytes removed": lambda d, r: d[: (at := a_byte(d, r))] + d[at + r.randrange(1, 1000) :],
    "garbage inserted": garbage_inserted,
    "member removed": lambda d, r: d[: (at := a_member(d, r))[0]] + d[at[1] :],
    "member doubled": lambda d, r: d[: (at := a_member(d, r))[1]] + d[at[0] :],
    "members swapped": members_swapped,
    "spliced": lambda d, r: d[: a_header(d, r)] + d[a_header(d, r) :],
    "two tars": two_tars,
    "size changed": changed(lambda r: 124, some_size, False),
    "size changed and summed": changed(lambda r: 124, some_size, True),
    "type changed": changed(lambda r: 156, one_of(TYPES), False),
    "type changed and summed": changed(lambda r: 156, one_of(TYPES), True),
    "name changed": changed(lambda r: r.randrange(8), one_of(LETTERS), False),
    "name changed and summed": changed(lambda r: r.randrange(8), one_of(LETTERS), True),
    "checksum changed": changed(lambda r: 148, some_checksum, False),
}
