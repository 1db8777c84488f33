"""Tar headers: written with fixed metadata, and read strictly.

Writing: plain ustar with fixed mtime, uid, gid and mode, so the same input gives the same bytes. A
PAX header is added only where the name or the size does not fit ustar.

Reading: ustar, V7, PAX and GNU long names. Sparse files are refused.
"""

from __future__ import annotations

import re
from zlib import adler32

from wdstrain.errors import UsageError

BLOCK = 512
END = bytes(2 * BLOCK)  # two zero blocks end an archive
# Type flags of headers that describe the next member: PAX, Solaris' PAX, global PAX, GNU long name
# and GNU long link.
EXTENSIONS = b"xXgLK"
ADVICE = "Copy or pack it again, or copy its intact samples: wdstrain repair"  # of damaged shards
_RECORD = re.compile(rb"([0-9]{1,11}) ([^=]+)=")  # the head of a PAX record, with its own length
REPACK = "Repack it"  # advice for well-formed shards that readers understand in different ways


# --- writing --------------------------------------------------------------------------------------


def padding(size: int) -> int:
    """Return the number of zero bytes that follow `size` bytes of data."""
    return -size % BLOCK


def header(name: str, size: int) -> bytes:
    """Return the header blocks of a regular file.

    512 bytes; at least 1536 where ustar cannot hold the name or the size. Raises UsageError for an
    empty name and for one with a NUL character.
    """
    raw = name.encode("utf-8", "surrogateescape")
    if not raw or b"\0" in raw:
        raise UsageError(
            f"{name!r} cannot be a member name: it must have at least one character and no NUL."
        )
    split = _ustar_name(raw)
    if split is not None and size < 8**11:
        return _ustar(split[0], split[1], size, b"0")
    records = b"" if split is not None else _record(b"path", raw)
    records += b"" if size < 8**11 else _record(b"size", str(size).encode())
    extension = (
        _ustar(b"././@PaxHeader", b"", len(records), b"x") + records + bytes(padding(len(records)))
    )
    return extension + _ustar(*(split or (raw[:100], b"")), size if size < 8**11 else 0, b"0")


def member_size(name: str, size: int) -> int:
    """Return the bytes of a member in a shard: headers, data and padding."""
    if len(name) <= 100 and name.isascii() and size < 8**11:
        return BLOCK + size + padding(size)
    return len(header(name, size)) + size + padding(size)


def _ustar_name(raw: bytes) -> tuple[bytes, bytes] | None:
    """Return a path as ustar's (name, prefix), or None if it fits in neither."""
    if len(raw) <= 100:
        return raw, b""
    cut = raw.find(b"/", max(0, len(raw) - 101), 156)
    return (raw[cut + 1 :], raw[:cut]) if 0 < cut < len(raw) - 1 else None


def _ustar(name: bytes, prefix: bytes, size: int, kind: bytes) -> bytes:
    """Return one header block. Its parts are constants, because this runs once per member."""
    digits = b"%011o" % size
    checksum = _SUM + sum(name) + sum(prefix) + sum(digits) + kind[0]
    tail = _TAIL if not prefix else _MAGIC + prefix + bytes(167 - len(prefix))
    return b"%b%b%b%b%06o\0 %b%b" % (name, _FILL[len(name)], digits, _TIME, checksum, kind, tail)


# By length of the name: its padding, then mode, uid and gid.
_FILL = [bytes(100 - length) + b"0000644\x000000000\x000000000\x00" for length in range(101)]
_TIME = b"\x0000000000000\x00"  # the NUL that ends the size, then mtime
# An empty link name; magic and version; empty owner, group and device.
_MAGIC = bytes(100) + b"ustar\x0000" + bytes(64) + bytes(16)
_TAIL = _MAGIC + bytes(167)  # with an empty prefix
# Checksum of the bytes that are the same in every header.
_SUM = sum(_FILL[100]) + sum(_TIME) + 8 * ord(" ") + sum(_MAGIC)


def _record(name: bytes, value: bytes) -> bytes:
    """Return a PAX record: its own length in decimal, a blank, name=value, a newline."""
    body = b" %b=%b\n" % (name, value)
    length = len(body) + len(str(len(body)))
    return b"%d%b" % (len(body) + len(str(length)), body)


# --- reading --------------------------------------------------------------------------------------


class Fault(Exception):
    """A tar breaks a rule. `members_at` raises it, and its callers report it.

    reason: continues a sentence that starts with the shard's name. advice: the next step.
    start: first byte of the headers of the member that is lost. offset: of the header at fault.
    """

    def __init__(self, reason: str, advice: str = ADVICE) -> None:
        super().__init__(reason)
        self.reason, self.advice = reason, advice
        self.start = self.offset = 0


def size_in(block: bytes, offset: int) -> int:
    """Return the size of the member whose header is `block`. Checks the header's checksum first.

    Raises Fault for a wrong checksum and for an impossible size. offset: of the block, for errors.
    """
    stored = block[148:156].strip(b"\0 ")
    # The lower half of adler32 is 1 + the sum of up to 256 bytes: faster than `sum`.
    halves = (adler32(block[:256]) & 0xFFFF) + (adler32(block[256:]) & 0xFFFF)
    total = signed = halves - 2 - sum(block[148:156]) + 8 * ord(" ")
    if not block.isascii():  # old tars sum signed bytes
        signed = total - 256 * sum(byte > 127 for byte in block[:148] + block[156:])
    if not stored or stored.strip(b"01234567") or int(stored, 8) not in (total, signed):
        raise Fault(f"has no valid tar header at offset {offset}: it is damaged or not a tar")
    raw = block[124:136]
    if raw[0] & 0x80:  # base 256, for sizes from 8 GiB on
        value = int.from_bytes(raw, "big") & ~(0x80 << 88)
        if raw[0] & 0x40 or value >= 1 << 62:
            raise Fault(f"claims an impossible size at offset {offset}", "Copy or pack it again")
        return value
    digits = raw.strip(b"\0 ") or b"0"
    if digits.strip(b"01234567"):
        raise Fault(
            f"claims a size of {raw!r} at offset {offset}; it must be an octal number",
            REPACK,
        )
    return int(digits, 8)


def name_in(block: bytes) -> str:
    """Return the member's name in its header block."""
    name = block[:100].split(b"\0", 1)[0]
    prefix = block[345:500].split(b"\0", 1)[0] if block[257:263] == b"ustar\0" else b""
    return (prefix + b"/" + name if prefix else name).decode("utf-8", "surrogateescape")


def extension(kind: bytes, padded: bytes, length: int, offset: int) -> dict[bytes, bytes]:
    """Return the records of an extension header of type `kind`, as those of a PAX header.

    padded: its data of `length` bytes and the padding after it. offset: of the header, for errors.
    Raises Fault.
    """
    payload = padded[:length]
    if kind == b"L":
        if b"\0" not in payload and any(padded[length:]):  # tarfile would read into the padding
            raise Fault(
                f"claims a name of {length} bytes that is longer at offset {offset}",
                REPACK,
            )
        return {b"path": payload.split(b"\0", 1)[0]}
    values = {} if kind == b"K" else _records(payload, offset)
    if kind == b"g":
        for name in values.keys() & {b"path", b"size"}:  # readers disagree whether it applies
            raise Fault(
                f"claims one {name.decode()} for all its members at offset {offset}",
                REPACK,
            )
        return {}
    size = values.get(b"size", b"0")
    if not size.isdigit() or len(size) > 20:
        raise Fault(
            f"claims a size of {size[:40]!r} at offset {offset}; it must be a decimal number",
            REPACK,
        )
    return values


def _records(payload: bytes, offset: int) -> dict[bytes, bytes]:
    """Return the records of a PAX header at `offset`; the last of a name counts. Raises Fault."""
    values, start = dict[bytes, bytes](), 0
    while start < len(payload) and payload[start]:
        head = _RECORD.match(payload, start)
        stop = start + int(head[1]) if head else 0
        if not head or stop > len(payload) or payload[head.end() : stop][-1:] != b"\n":
            raise Fault(f"has a malformed PAX header at offset {offset}", REPACK)
        values[head[2]] = payload[head.end() : stop - 1]
        start = stop
    return values
