"""Tar headers: written with fixed metadata, and read strictly.

Writing: plain ustar with fixed mtime, uid, gid and mode, so the same input gives the same bytes. A
PAX header is added only where the name or the size does not fit ustar.

Reading: ustar, V7, PAX and GNU long names. Sparse files are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from wdstrain.errors import ShardError, UsageError

BLOCK = 512
END = bytes(2 * BLOCK)  # two zero blocks end an archive
# Type flags of headers that describe the next member: PAX, Solaris' PAX, global PAX, GNU long name
# and GNU long link.
EXTENSIONS = b"xXgLK"
ADVICE = "Copy or pack it again, or copy its intact samples: wdstrain repair"  # of damaged shards
EXTENSION_LIMIT = 1024 * 1024  # bytes; a larger PAX or long-name header is refused as an attack


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
    body = b" " + name + b"=" + value + b"\n"
    length = len(body) + 1
    while length != len(body) + len(str(length)):
        length = len(body) + len(str(length))
    return str(length).encode() + body


# --- reading --------------------------------------------------------------------------------------


def size_in(block: bytes, shard: str, offset: int) -> int:
    """Return the size of the member whose header is `block`. Checks the header's checksum first.

    Raises ShardError for a wrong checksum and for an impossible size.
    """
    stored = block[148:156].strip(b"\0 ")
    summed = block[:148] + b"        " + block[156:]
    total = signed = sum(summed)
    if not block.isascii():  # old tars sum signed bytes
        signed = total - 256 * sum(byte > 127 for byte in summed)
    if not stored or stored.strip(b"01234567") or int(stored, 8) not in (total, signed):
        raise ShardError(
            f"{shard} has no valid tar header at offset {offset}: it is damaged or not a tar. {ADVICE}"
        )
    raw = block[124:136]
    if raw[0] & 0x80:  # base 256, for sizes from 8 GiB on
        value = int.from_bytes(raw, "big") & ~(0x80 << 88)
        if raw[0] & 0x40 or value >= 1 << 62:
            raise ShardError(
                f"{shard} claims an impossible size at offset {offset}. Copy or pack it again."
            )
        return value
    digits = raw.strip(b"\0 ") or b"0"
    if digits.strip(b"01234567"):
        raise ShardError(
            f"{shard} claims a size of {raw!r} at offset {offset}; it must be an octal number. Repack it."
        )
    return int(digits, 8)


def name_in(block: bytes) -> str:
    """Return the member's name in its header block."""
    name = block[:100].split(b"\0", 1)[0]
    prefix = block[345:500].split(b"\0", 1)[0] if block[257:263] == b"ustar\0" else b""
    return (prefix + b"/" + name if prefix else name).decode("utf-8", "surrogateescape")


@dataclass
class Extra:
    """Properties of the next member that its extension headers give."""

    path: str | None = None
    size: int | None = None
    sparse: bool = False

    def read(self, kind: bytes, padded: bytes, length: int, shard: str, offset: int) -> None:
        """Read one extension header of type `kind` at `offset` of `shard`.

        padded: its data of `length` bytes and the padding after it. Raises ShardError.
        """
        payload, had_path, gives_path = padded[:length], self.path is not None, kind == b"L"
        if kind == b"L":
            if b"\0" not in payload and any(padded[length:]):  # tarfile would read into the padding
                raise ShardError(
                    f"{shard} claims a name of {length} bytes that is longer at offset {offset}. Repack it."
                )
            self.path = payload.split(b"\0", 1)[0].decode("utf-8", "surrogateescape")
        elif kind == b"g":
            for name, _ in _records(payload, shard, offset):
                if name in (b"path", b"size"):  # readers disagree whether it applies
                    raise ShardError(
                        f"{shard} claims one {name.decode()} for all its members at offset {offset}. Repack it."
                    )
        elif kind in (b"x", b"X"):
            for name, value in _records(payload, shard, offset):
                if name == b"path":
                    gives_path = True
                    self.path = value.decode("utf-8", "surrogateescape")
                elif name == b"size":
                    if not value.isdigit() or len(value) > 20:
                        raise ShardError(
                            f"{shard} claims a size of {value[:40]!r} at offset {offset}; it must "
                            f"be a decimal number. Repack it."
                        )
                    self.size = int(value)
                elif name.startswith(b"GNU.sparse"):
                    self.sparse = True
        if had_path and gives_path:  # readers disagree which of the two applies
            raise ShardError(
                f"{shard} has a second header for the name of one member at offset {offset}. Repack it."
            )


def _records(payload: bytes, shard: str, offset: int) -> Iterator[tuple[bytes, bytes]]:
    """Yield (name, value) of each record of a PAX header at `offset`. Raises ShardError."""
    start = 0
    while start < len(payload) and payload[start]:
        digits, blank, _ = payload[start : start + 12].partition(b" ")
        length = int(digits) if digits.isdigit() and blank else 0
        stop = start + length
        name, equals, value = payload[start + len(digits) + 1 : stop - 1].partition(b"=")
        if length < 5 or stop > len(payload) or not equals or payload[stop - 1 : stop] != b"\n":
            raise ShardError(f"{shard} has a malformed PAX header at offset {offset}. Repack it.")
        yield name, value
        start = stop


def check_extension(shard: str, offset: int, length: int, size: int) -> None:
    """Raise ShardError for an extension header that is too large or runs beyond the shard."""
    if length > EXTENSION_LIMIT:
        raise ShardError(
            f"{shard} claims an extension header of {length} bytes at offset {offset}; 1 MiB is the limit. Repack it."
        )
    check_inside(shard, "an extension header", offset + BLOCK, length, size)


def sparse_error(shard: str, name: str, offset: int) -> ShardError:
    """Return the error for a sparse file: its data is shorter than its size, so offsets fail."""
    return ShardError(
        f"{shard} holds the sparse file '{name}' at offset {offset}. Repack it without --sparse."
    )


def check_inside(shard: str, described: str, data: int, length: int, size: int) -> None:
    """Raise ShardError for a member that runs beyond the end of the shard.

    described: the member's name in the error; data, length: offset and size of its data;
    size: bytes of the shard.
    """
    if data + length > size:
        raise ShardError(
            f"{shard} ends inside {described}: {length} bytes promised at offset {data}, "
            f"{max(0, size - data)} found. {ADVICE}"
        )
