"""Samples of tar shards: headers are walked strictly, and grouped by their names.

Regular files are members. Directories, links and devices are skipped and counted. `tarfile` is not
used: in stream mode it accepts a tar that was cut at a record boundary, which would lose samples
without an error. `tar_headers` reads each header.

Names follow webdataset's rule. The key is the path up to the first dot of its base name; the field
is the rest, in lower case. Consecutive members with the same key are one sample.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from wdstrain.errors import ShardError
from wdstrain.shards.tar_headers import (
    ADVICE,
    BLOCK,
    END,
    EXTENSIONS,
    Extra,
    check_extension,
    check_inside,
    name_in,
    padding,
    size_in,
    sparse_error,
)

_WINDOW = 128 * 1024  # bytes of one read while walking headers
# Zero bytes that may end any tar: the end marker may begin in the last block of a record of 20
# blocks, and the record is filled up.
RECORD = 21 * BLOCK
_LARGEST_RECORD = 1 << 20  # bytes of the largest record that `tar -b` writes
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


class CompressedError(ShardError):
    """A shard is no plain tar, but a compressed file."""


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
                f"{shard} ends at byte {size} without the two zero blocks that end a tar: it was cut. {ADVICE}"
            )
        if not base <= offset <= base + len(window) - BLOCK:
            window, base = read(offset, min(size - offset, _WINDOW)), offset
            if len(window) < BLOCK:
                raise ShardError(
                    f"{shard} gave {len(window)} bytes at offset {offset} instead of {BLOCK}. {ADVICE}"
                )
        block = bytes(window[offset - base : offset - base + BLOCK])
        if not block[0] and block == bytes(BLOCK):
            if size - offset < 2 * BLOCK or bytes(read(offset, 2 * BLOCK)) != END:
                raise ShardError(
                    f"{shard} has a zero block at offset {offset} that is not the end: it is damaged. {ADVICE}"
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


def check_plain(window: bytes | memoryview, shard: str) -> None:
    """Raise ShardError if `window`, the first bytes of a file, are those of a compressed file."""
    for magic, kind in _COMPRESSED.items():
        if bytes(window[: len(magic)]) == magic and bytes(window[257:262]) != b"ustar":
            raise CompressedError(
                f"{shard} is a {kind} file, not a plain tar; shards must be plain, because members "
                f"are read at their offsets. Unpack it first."
            )
