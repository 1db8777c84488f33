"""Members and samples of tar shards: the only walk over tar headers.

`walk` yields regular files and raises Fault at the first broken rule. Directories, links and devices
are skipped and counted. `tarfile` is not used: in stream mode it accepts a tar that was cut at a
record boundary, which would lose samples without an error. Three readers use the walk: `samples` by
position, `tar_stream` forward, and `inspection.scan`, which continues after faults.

Names follow webdataset's rule. The key is the path up to the first dot of its base name; the field
is the rest, in lower case. Consecutive members with the same key are one sample.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

from wdstrain.errors import ShardError
from wdstrain.report.printing import printable
from wdstrain.shards.tar_headers import (
    ADVICE,
    BLOCK,
    END,
    EXTENSIONS,
    REPACK,
    Fault,
    extension,
    name_in,
    padding,
    size_in,
)

_WINDOW = 128 * 1024  # bytes of one read while walking headers
_EXTENSION_LIMIT = 1 << 20  # bytes; a larger PAX or long-name header is refused as an attack
# Zero bytes that may end any tar: the end marker may begin in the last block of a record of 20
# blocks, and the record is filled up.
RECORD = 21 * BLOCK
_LARGEST_RECORD = 1 << 20  # bytes of the largest record that `tar -b` writes
_LONGEST_END = 2 * _LARGEST_RECORD + 2 * BLOCK  # bytes; more zeros than tar ever adds
_PACK_OR_COPY = "Pack it again, or copy its intact samples: wdstrain repair"
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
# Numbers of members that were not read as part of a sample, by reason.
SkippedMembers = Counter[str]


class CompressedError(ShardError):
    """A shard is no plain tar, but a compressed file."""


class Member(NamedTuple):
    """A regular file of a tar. data: its bytes, if the tar is read forward."""

    name: str
    start: int  # first byte of its first header
    offset: int  # of its data
    size: int
    data: bytes = b""

    @property
    def stop(self) -> int:
        """Byte after its padding."""
        return self.offset + self.size + padding(self.size)


Sample = tuple[str, dict[str, Member]]  # its key, and its members by field, in order


class Window:
    """Bytes of a tar over a function that returns those at an offset, at least one before the end.

    size: of all bytes; a larger number while a stream has not ended.
    """

    def __init__(
        self, read: Read, size: int, *, ahead: int = _WINDOW, behind: int = 0, skips: bool = True
    ) -> None:
        """ahead: least bytes of a call of `read`. behind: bytes that are kept before the last offset.

        skips: whether bytes that nobody asks for are passed over without a call.
        """
        self.size, self._read, self._skips = size, read, skips
        self._ahead, self._behind = ahead, behind
        self._base, self._held = 0, bytearray()  # the bytes from `_base` on

    def read(self, offset: int, length: int) -> bytes:
        """Return bytes [offset, offset + length), fewer only at the end."""
        end = self._base + len(self._held)
        if self._skips and not self._base <= offset <= end:
            self._base, self._held, end = offset, bytearray(), offset
        while end < min(offset + length, self.size):
            passed = max(0, min(offset, end) - self._behind - self._base)
            del self._held[:passed]
            self._base += passed
            wanted = max(self._ahead, offset + length - end)
            data = self._read(end, min(wanted, self.size - end))
            self._held += data
            end += len(data)
            self.size = self.size if data else end
        at = offset - self._base
        return bytes(memoryview(self._held)[at : at + length])


# --- samples --------------------------------------------------------------------------------------


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
_DIRECTORY, LINK = "a directory", "a link or device"


def skipped_text(skipped: Mapping[str, int]) -> str:
    """Return how many members were skipped for which reason, without directories; "" if none."""
    counts = {reason: n for reason, n in skipped.items() if reason != _DIRECTORY}
    return ", ".join(f"{n} times {reason}" for reason, n in counts.items())


def samples(
    read: Read, size: int, shard: str, skipped: SkippedMembers | None = None
) -> Iterator[Sample]:
    """Return the samples of a shard of `size` bytes, in order. Only headers are read.

    `shard` is its name in errors; `skipped` counts the skipped members. Raises ShardError with the
    offset for a shard that ends inside a member or a header, lacks the end marker, has a wrong
    header checksum, has the same key in two places, or has two members of the same name.
    """
    source, skipped = Window(read, size), SkippedMembers() if skipped is None else skipped
    check_plain(source.read(0, BLOCK), shard)
    return grouped(walk(source, skipped), shard, skipped)


def is_sample(data: memoryview, key: str, fields: Sequence[tuple[str, int, int]]) -> bool:
    """Return whether the headers in `data` are those of the sample `key` with these fields.

    `fields`: (name, offset of its data within `data`, size) in order. The data is not compared.
    """

    def read(offset: int, length: int) -> bytes | memoryview:
        return data[offset : offset + length] if offset < len(data) else END[:length]

    try:
        held = list(samples(read, len(data) + len(END), ""))
    except ShardError:
        return False
    places = [(k, [(name, m.offset, m.size) for name, m in of.items()]) for k, of in held]
    return places == [(key, list(fields))]


def reraise(error: Exception) -> None:
    """Raise an error: the default of functions that get errors."""
    raise error


def grouped(
    members: Iterable[Member],
    shard: str,
    skipped: SkippedMembers,
    reserved: Collection[str] = (),
    on_error: Callable[[ShardError], Any] = reraise,
) -> Iterator[Sample]:
    """Yield (key, member by field) of each sample. Raises ShardError for a fault of the tar.

    shard: its name in errors. skipped: counts the members without a sample. reserved: names that no
    field may have. on_error: gets the error for a key in two places, and for two members of one
    name, the second of which is left out.
    """
    keys, also = set[str](), ", or a reserved name" if reserved else ""
    try:
        for key, group in by_key(members, skipped):
            fields = dict[str, Member]()
            for _, name, member in group:
                if name in fields or name in reserved:
                    on_error(
                        ShardError(
                            f"{shard} holds two members named '{printable(member.name)}'{also}, the "
                            f"second at offset {member.start}.",
                            "Repack it.",
                        )
                    )
                else:
                    fields[name] = member
            if key in keys:
                first = next(iter(fields.values()), member)
                on_error(
                    ShardError(
                        f"{shard} holds members of '{printable(key)}' in two places, the second "
                        f"('{printable(first.name)}') at offset {first.start}; the fields of a "
                        "sample must be adjacent.",
                        "Repack it from a sorted list.",
                    )
                )
            keys.add(key)
            yield key, fields
    except Fault as fault:
        raise ShardError(f"{shard} {fault.reason}.", f"{fault.advice}.") from None


def by_key(
    members: Iterable[Member], skipped: SkippedMembers
) -> Iterator[tuple[str, Iterator[tuple[str, str, Member]]]]:
    """Yield (key, (key, field, member) of each consecutive member with this key).

    skipped: counts the members without a sample.
    """
    return groupby(_named(members, skipped), key=itemgetter(0))


def _named(members: Iterable[Member], skipped: SkippedMembers) -> Iterator[tuple[str, str, Member]]:
    """Yield (key, field, member) of the members that belong to a sample."""
    for member in members:
        parts = split_name(member.name)
        if parts is None or is_not_sample(member.name):
            skipped[NO_KEY if parts is None else NOT_A_SAMPLE] += 1
        else:
            yield *parts, member


# --- members --------------------------------------------------------------------------------------


def walk(source: Window, skipped: SkippedMembers, offset: int = 0) -> Iterator[Member]:
    """Yield the regular files of a tar whose next header is at `offset`. Counts other members.

    The source is read at ascending offsets; after a zero block, to the end and at the block before
    it. Raises Fault where the tar breaks a rule, with the offset. A member of a stream may end early.
    """
    start, extra = offset, dict[bytes, bytes]()  # of the next member, from extension headers
    try:
        while True:
            block = source.read(offset, BLOCK)
            if len(block) < BLOCK:
                end = min(source.size, offset + len(block))
                raise Fault(
                    f"ends at byte {end} without the two zero blocks that end a tar: it was cut"
                )
            if not block[0] and block == bytes(BLOCK):
                _check_end(source, offset, is_extended=start < offset)
                return
            length, kind, data = size_in(block, offset), block[156:157], offset + BLOCK
            if kind in EXTENSIONS:
                records = extension(kind, _payload(source, length, offset), length, offset)
                if b"path" in records and b"path" in extra:  # readers disagree which applies
                    raise Fault(
                        f"has a second header for the name of one member at offset {offset}",
                        REPACK,
                    )
                extra |= records
                offset = data + length + padding(length)
                continue
            length = int(extra.get(b"size", length))
            path = extra.get(b"path", b"").decode("utf-8", "surrogateescape")
            member = Member(path or name_in(block), start, data, length)
            if data + length > source.size:
                raise _cut_inside(source, f"'{printable(member.name)}'", data, length)
            if kind == b"S" or any(
                name.startswith(b"GNU.sparse") for name in extra
            ):  # its data is shorter than its size
                raise Fault(
                    f"holds the sparse file '{printable(member.name)}' at offset {offset}",
                    "Repack it without --sparse",
                )
            if kind in b"0\x007" and not member.name.endswith("/"):
                yield member
            else:
                is_directory = kind == b"5" or member.name.endswith("/")
                skipped[_DIRECTORY if is_directory else LINK] += 1
                length = 0 if kind in b"123456" else length
            start = offset = data + length + padding(length)
            extra = {}
    except Fault as fault:
        fault.start, fault.offset = min(start, source.size), offset
        raise


def _payload(source: Window, length: int, offset: int) -> bytes:
    """Return the data of the extension header at `offset`, with its padding."""
    if length > _EXTENSION_LIMIT:
        raise Fault(
            f"claims an extension header of {length} bytes at offset {offset}; 1 MiB is the limit",
            REPACK,
        )
    payload = source.read(offset + BLOCK, length + padding(length))
    if len(payload) < length:
        raise _cut_inside(source, "an extension header", offset + BLOCK, length)
    return payload


def _cut_inside(source: Window, described: str, data: int, length: int) -> Fault:
    """Return the fault of a member that runs beyond the end.

    described: its name in the error. data, length: offset and size of its data.
    """
    return Fault(
        f"ends inside {described}: {length} bytes promised at offset {data}, "
        f"{max(0, source.size - data)} found"
    )


def _check_end(source: Window, offset: int, *, is_extended: bool) -> None:
    """Raise Fault unless the zero block at `offset` begins a valid end of the tar.

    Concatenated tars and shards that lost a part to zeros are refused. is_extended: the block
    follows an extension header.
    """
    end = source.read(offset, _LONGEST_END)
    zeros = len(end) - len(end.lstrip(b"\0"))
    faults = (
        (
            len(end) < len(END),
            f"ends at byte {source.size} within the two zero blocks that end a tar: it was cut",
            ADVICE,
        ),
        (
            zeros < len(END),
            f"has a zero block at offset {offset} that is not the end: it is damaged",
            ADVICE,
        ),
        (
            zeros < len(end),
            f"has data after its end at offset {offset}: several tars in one, or zeroed in part",
            _PACK_OR_COPY,
        ),
        (
            is_extended,
            f"ends at offset {offset} after an extension header without its member",
            REPACK,
        ),
        (
            not _is_padding(source, offset, zeros),
            f"ends at offset {offset}, at least {zeros} bytes before the file does, which is more "
            f"than tar adds: it is damaged, or several tars in one",
            _PACK_OR_COPY,
        ),
    )
    for is_at_fault, reason, advice in faults:
        if is_at_fault:
            raise Fault(reason, advice)


def _is_padding(source: Window, offset: int, zeros: int) -> bool:
    """Return whether tar may have written the zeros from `offset` to the end of a shard.

    Tar fills up its last record. A record has 20 blocks, or the number given to `tar -b`; `tar -A`
    adds the record of the previous archive. A shard that lost its end to zeros rarely has whole
    records, and its zeros rarely begin at the end of a member.
    """
    size, usual = offset + zeros, RECORD - BLOCK
    record = max(usual * (size % usual == 0), min(size & -size, _LARGEST_RECORD))
    is_record = record >= usual and zeros <= 2 * record + BLOCK and offset > 0
    return zeros <= RECORD or (is_record and any(source.read(offset - BLOCK, BLOCK)))


def compression_of(head: bytes) -> str:
    """Return the kind of compression that the first bytes of a file show; "" for a plain tar."""
    if head[257:262] == b"ustar":  # a tar whose first name looks like a magic number
        return ""
    return next((kind for magic, kind in _COMPRESSED.items() if head.startswith(magic)), "")


def check_plain(head: bytes, shard: str) -> None:
    """Raise CompressedError if `head`, the first bytes of a file, are those of a compressed one."""
    if kind := compression_of(head):
        raise CompressedError(
            f"{shard} is a {kind} file, not a plain tar; shards must be plain, because members "
            f"are read at their offsets. Unpack it first."
        )
