"""Tar headers: written, read strictly, and grouped into samples.

Writing: plain ustar with fixed mtime, uid, gid and mode, so the same input gives the same bytes. A
PAX header is added only where the name or the size does not fit ustar.

Reading: ustar, V7, PAX and GNU long names. Regular files are members. Directories, links and
devices are skipped and counted; sparse files are refused. `tarfile` is not used: in stream mode it
accepts a tar that was cut at a record boundary, which would lose samples without an error.

Names follow webdataset's rule. The key is the path up to the first dot of its base name; the field
is the rest, in lower case. Consecutive members with the same key are one sample.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from wdstrain.errors import ShardError, UsageError

BLOCK = 512
END = bytes(2 * BLOCK)  # two zero blocks end an archive
# Type flags of headers that describe the next member: PAX, Solaris' PAX, global PAX, GNU long name
# and GNU long link.
EXTENSIONS = b"xXgLK"

_WINDOW = 128 * 1024  # bytes of one read while walking headers
# Zero bytes that may end any tar: the end marker may begin in the last block of a record of 20
# blocks, and the record is filled up.
RECORD = 21 * BLOCK
_LARGEST_RECORD = 1 << 20  # bytes of the largest record that `tar -b` writes
EXTENSION_LIMIT = 1024 * 1024  # bytes; a larger PAX or long-name header is refused as an attack
_NAME_PATTERN = re.compile(r"^((?:.*/|)[^./]+)[.]([^/]*)$", re.DOTALL)
_NOTE_PATTERN = re.compile(r"__[^/]*__(\Z|/)")
_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5": "zstd",
    b"BZ": "bzip2",
    b"\xfd7": "xz",
    b"\x04\x22": "lz4",
    b"PK": "zip",
}

# (offset, length) -> `length` bytes; fewer only at the end of the shard
Read = Callable[[int, int], bytes | memoryview]


class Sample(NamedTuple):
    """Position of one sample in its shard. `fields`: (name, offset of the data, size) in order."""

    key: str
    start: int  # first byte of its first header
    stop: int  # byte after the padding of its last member
    fields: list[tuple[str, int, int]]


@dataclass
class SkippedMembers:
    """Numbers of members that were not read as part of a sample, by reason."""

    reasons: dict[str, int] = field(default_factory=dict)

    def add(self, reason: str) -> None:
        self.reasons[reason] = self.reasons.get(reason, 0) + 1


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
    if len(raw) <= 100 and size < 8**11:
        return _ustar(raw, b"", size, b"0")
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


def split_name(path: str) -> tuple[str, str] | None:
    """Return (key, field) of a member name.

    None for a base name without a dot or with a leading dot, where webdataset finds no key.
    """
    match = _NAME_PATTERN.match(path)
    return (match.group(1), match.group(2).lower()) if match else None


def is_not_sample(name: str) -> bool:
    """Return whether a member with this name belongs to no sample.

    True for metadata of the data set (`__*__` and `__*__/...`, as in webdataset) and for the files
    that macOS adds (`._*`).
    """
    return bool(_NOTE_PATTERN.match(name)) or name.rpartition("/")[2].startswith("._")


NO_KEY, NOT_A_SAMPLE = "no key in the name", "not a sample"  # reasons to skip a member


def other_kind(kind: bytes, name: str) -> str:
    """Return the reason to skip a member that is not a regular file."""
    return "a directory" if kind == b"5" or name.endswith("/") else "a link or device"


def samples(
    read: Read, size: int, shard: str, skipped: SkippedMembers | None = None
) -> Iterator[Sample]:
    """Yield the samples of a shard of `size` bytes, in order. Only headers are read.

    `shard` is its name in errors; `skipped` counts the skipped members. Raises ShardError with the
    offset for a shard that ends inside a member or a header, lacks the end marker, has a wrong
    header checksum, has the same key in two places, or has two members of the same name.
    """
    skipped = skipped or SkippedMembers()
    seen_keys: set[str] = set()
    field_names: set[str] = set()  # of the current sample
    current: Sample | None = None
    for name, start, data, length in _members(read, size, shard, skipped):
        parts = split_name(name)
        if parts is None or is_not_sample(name):
            skipped.add(NO_KEY if parts is None else NOT_A_SAMPLE)
            continue
        key, field_name = parts
        stop = data + length + padding(length)
        if current is not None and current.key == key:
            if field_name in field_names:
                raise ShardError(
                    f"{shard} holds two members named '{name}', the second at offset {start}. Repack it."
                )
            field_names.add(field_name)
            current.fields.append((field_name, data, length))
            current = current._replace(stop=stop)
            continue
        if current is not None:
            yield current
        if key in seen_keys:
            raise ShardError(
                f"{shard} holds members of '{key}' in two places, the second ('{name}') at offset "
                f"{start}; the fields of a sample must be adjacent. Repack it from a sorted list."
            )
        seen_keys.add(key)
        field_names = {field_name}
        current = Sample(key, start, stop, [(field_name, data, length)])
    if current is not None:
        yield current


def is_sample(data: memoryview, key: str, fields: Sequence[tuple[str, int, int]]) -> bool:
    """Return whether the headers in `data` are those of the sample `key` with these fields.

    `fields`: (name, offset of its data within `data`, size) in order. The data is not compared.
    """

    def read(offset: int, length: int) -> bytes | memoryview:
        return data[offset : offset + length] if offset < len(data) else END[:length]

    try:
        members = list(_members(read, len(data) + len(END), "", SkippedMembers(), is_first=False))
    except ShardError:
        return False
    named = [
        (split_name(name), offset, size)
        for name, _, offset, size in members
        if not is_not_sample(name)
    ]
    return [(parts, offset, size) for parts, offset, size in named if parts is not None] == [
        ((key, name), offset, size) for name, offset, size in fields
    ]


def _members(
    read: Read, size: int, shard: str, skipped: SkippedMembers, *, is_first: bool = True
) -> Iterator[tuple[str, int, int, int]]:
    """Yield (name, offset of its first header block, offset of its data, size) of each member.

    Members are regular files. is_first: offset 0 is the start of a file, which must not be
    compressed.
    """
    window, base = read(0, min(size, _WINDOW)), 0
    if is_first:
        check_plain(window, shard)
    offset, start, extra = 0, None, Extra()
    while True:
        if offset + BLOCK > size:
            raise ShardError(
                f"{shard} ends at byte {size} without the two zero blocks that end a tar: it was cut. Copy or pack it again."
            )
        if not base <= offset <= base + len(window) - BLOCK:
            window, base = read(offset, min(size - offset, _WINDOW)), offset
            if len(window) < BLOCK:
                raise ShardError(
                    f"{shard} gave {len(window)} bytes at offset {offset} instead of {BLOCK}. Copy or pack it again."
                )
        block = bytes(window[offset - base : offset - base + BLOCK])
        if not block[0] and block == bytes(BLOCK):
            if size - offset < 2 * BLOCK or bytes(read(offset, 2 * BLOCK)) != END:
                raise ShardError(
                    f"{shard} has a zero block at offset {offset} that is not the end: it is damaged. Copy it again."
                )
            _check_zeros(read, offset, size, shard)
            if start is not None:
                raise ShardError(
                    f"{shard} ends at offset {offset} after an extension header without its member. Repack it."
                )
            return
        length = size_in(block, shard, offset)
        kind = block[156:157]
        start = offset if start is None else start
        data = offset + BLOCK
        if kind in EXTENSIONS:
            check_extension(shard, offset, length, size)
            padded = min(length + padding(length), size - data)
            # Use the window where it has the payload: another read would be another request.
            inside = data - base + padded <= len(window)
            payload = window[data - base : data - base + padded] if inside else read(data, padded)
            extra.read(kind, bytes(payload), length, shard, offset)
            offset = data + length + padding(length)
            continue
        length = extra.size if extra.size is not None else length
        name = extra.path or name_in(block)
        check_inside(shard, f"'{name}'", data, length, size)
        if kind == b"S" or extra.sparse:
            raise sparse_error(shard, name, offset)
        if kind in (b"0", b"\0", b"7") and not name.endswith("/"):
            yield name, start, data, length
        else:
            skipped.add(other_kind(kind, name))
            length = 0 if kind in b"123456" else length
        offset, start, extra = data + length + padding(length), None, Extra()


def _check_zeros(read: Read, offset: int, size: int, shard: str) -> None:
    """Raise ShardError unless zeros of a plausible number fill the shard from its end marker on.

    Concatenated tars and shards that lost a part to zeros are refused.
    """
    if not is_padding(read, offset, size):
        raise ShardError(
            f"{shard} ends at offset {offset}, {size - offset} bytes before the file does, which "
            f"is more than tar adds. It is damaged, or several tars in one. Pack it again, or copy "
            f"its intact samples: wdstrain repair"
        )
    if any(bytes(read(offset, size - offset))):
        raise ShardError(
            f"{shard} has data after its end at offset {offset}: several tars in one? Pack it "
            f"again, or copy its intact samples: wdstrain repair"
        )


def is_padding(read: Read, offset: int, size: int) -> bool:
    """Return whether tar may have written the zeros from `offset` to the end of a shard.

    Tar fills up its last record. A record has 20 blocks, or the number given to `tar -b`; `tar -A`
    adds the record of the previous archive. A shard that lost its end to zeros rarely has whole
    records, and its zeros rarely begin at the end of a member.
    """
    zeros = size - offset
    if zeros <= RECORD:
        return True
    record = max(
        RECORD - BLOCK if size % (RECORD - BLOCK) == 0 else 0, min(size & -size, _LARGEST_RECORD)
    )
    if record < RECORD - BLOCK or zeros > 2 * record + BLOCK or offset <= 0:
        return False
    return any(bytes(read(offset - BLOCK, BLOCK)))


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
            f"{shard} has no valid tar header at offset {offset}: it is damaged or not a tar. Copy "
            f"or pack it again."
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


def check_plain(window: bytes | memoryview, shard: str) -> None:
    """Raise ShardError if `window`, the first bytes of a file, are those of a compressed file."""
    for magic, kind in _COMPRESSED.items():
        if bytes(window[: len(magic)]) == magic and bytes(window[257:262]) != b"ustar":
            raise ShardError(
                f"{shard} is a {kind} file, not a plain tar; shards must be plain, because members "
                f"are read at their offsets. Unpack it first."
            )


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
            f"{max(0, size - data)} found. Copy or pack it again."
        )


def name_in(block: bytes) -> str:
    """Return the member's name in its header block."""
    name = block[:100].split(b"\0", 1)[0]
    prefix = block[345:500].split(b"\0", 1)[0] if block[257:263] == b"ustar\0" else b""
    return (prefix + b"/" + name if prefix else name).decode("utf-8", "surrogateescape")
