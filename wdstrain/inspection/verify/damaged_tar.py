"""Walk over a damaged shard: its samples, and the byte ranges that hold none.

`tar.samples` raises at the first fault, since a reader must not guess. This walk reports the
damage, finds the next header and continues. It reads forward, searches each byte once, and needs a
few MB of memory for any header.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from wdstrain.errors import ShardError
from wdstrain.inspection.verify.header_search import Search
from wdstrain.shards.tar import (
    NO_KEY,
    NOT_A_SAMPLE,
    Read,
    SkippedMembers,
    check_plain,
    is_not_sample,
    is_padding,
    other_kind,
    split_name,
)
from wdstrain.shards.tar_headers import (
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

_ZEROS = 1 << 20  # bytes that are read at once to skip zeros

# (key, field, offset, size) of a member -> its crc32, and a 64-bit hash of its bytes
Look = Callable[[str, str, int, int], tuple[int, int]]


class Damage(NamedTuple):
    """Bytes [start, stop) of a shard that hold no sample; empty if only the end marker is missing.

    reason: continues a sentence that starts with the shard's name. is_join: the bytes are an end
    marker that is followed by more samples.
    """

    start: int
    stop: int
    reason: str
    is_join: bool = False


@dataclass
class FoundSample:
    """A sample; start, stop and fields as in `tar.Sample`.

    crcs, hashes: of its members. is_suspect: it is next to damage and may have lost members.
    twice: (field, offset) of members whose name the sample already has.
    """

    key: str
    start: int
    stop: int = 0
    fields: list[tuple[str, int, int]] = field(default_factory=list)
    crcs: list[int] = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)
    is_suspect: bool = False
    twice: list[tuple[str, int]] = field(default_factory=list)


def walk_damaged(
    read: Read, size: int, look: Look, skipped: SkippedMembers
) -> Iterator[FoundSample | Damage]:
    """Yield samples and damage of a shard, by offset; damage comes before the sample that it ends.

    read: called with offsets that ascend, except for steps back of less than 2 MiB. look: called
    for each member, returns its crc32 and a hash. skipped: counts ignored members.
    """
    current: FoundSample | None = None
    after = False
    named: set[str] = set()
    for item in _members(read, size, skipped):
        if isinstance(item, Damage):
            yield item
            after = True
            if current is not None:
                current.is_suspect = True
            continue
        name, start, data, length = item
        parts = split_name(name)
        if parts is None or is_not_sample(name):
            skipped.add(NO_KEY if parts is None else NOT_A_SAMPLE)
            continue
        key, field_name = parts
        if current is None or current.key != key:
            if current is not None:
                yield current
            current, named = FoundSample(key, start, is_suspect=after), set()
        after = False
        current.stop = min(
            size, data + length + padding(length)
        )  # a cut may have taken padding alone
        crc, hashed = look(key, field_name, data, length)
        if field_name in named:
            current.twice.append((field_name, data))
            continue
        named.add(field_name)
        current.fields.append((field_name, data, length))
        current.crcs.append(crc)
        current.hashes.append(hashed)
    if current is not None:
        yield current


# --- headers --------------------------------------------------------------------------------------


def _members(
    read: Read, size: int, skipped: SkippedMembers
) -> Iterator[tuple[str, int, int, int] | Damage]:
    """Yield (name, offset of the header, offset of the data, size) of each file, and damage."""
    try:
        check_plain(read(0, min(size, BLOCK)), "")
    except ShardError as error:
        yield Damage(0, size, _reason(error))
        return
    search = Search(read, size)
    offset, start, extra = 0, None, Extra()
    fault: Damage | None = None  # it ends where the next valid member begins
    while True:
        begun = offset if start is None else start
        try:
            if offset + BLOCK > size:
                yield _beyond(fault, offset, begun, size)
                return
            block = bytes(read(offset, BLOCK))
            if not block[0] and block == bytes(BLOCK):
                ended = _end(read, offset, begun, size)
                if ended is None and fault is None:
                    return
                if ended is None or ended.stop == size:
                    yield _until(fault or ended or Damage(offset, size, ""), size)
                    return
                fault = fault or ended
                offset, start, extra = ended.stop, None, Extra()
                continue
            length = size_in(block, "", offset)
            kind, data = block[156:157], offset + BLOCK
            if kind in EXTENSIONS:
                check_extension("", offset, length, size)
                extra.read(
                    kind,
                    bytes(read(data, min(length + padding(length), size - data))),
                    length,
                    "",
                    offset,
                )
                start, offset = begun, data + length + padding(length)
                continue
            length = extra.size if extra.size is not None else length
            name = extra.path or name_in(block)
            check_inside("", f"'{name}'", data, length, size)
            if kind == b"S" or extra.sparse:
                raise sparse_error("", name, offset)
        except ShardError as error:
            fault = fault or Damage(begun, size, _reason(error))
            following = search.after(offset + 1)
            if following is None:
                yield _until(fault, size)
                return
            offset, start, extra = following, None, Extra()
            continue
        if fault is not None:
            yield _until(fault, begun)
            fault = None
        if kind in (b"0", b"\0", b"7") and not name.endswith("/"):
            yield name, begun, data, length
        else:
            skipped.add(other_kind(kind, name))
            length = 0 if kind in b"123456" else length
        offset, start, extra = data + length + padding(length), None, Extra()


def _until(fault: Damage, stop: int) -> Damage:
    return fault._replace(stop=stop)


def _beyond(fault: Damage | None, offset: int, begun: int, size: int) -> Damage:
    """Return the damage of a shard that ends where a header should be."""
    if fault is not None:
        return _until(fault, size)
    if begun < offset:
        return Damage(
            begun,
            size,
            f"ends at byte {size} after an extension header without its member: it was cut",
        )
    if offset < size:
        return Damage(offset, size, f"ends at byte {size} inside a header: it was cut")
    return Damage(
        size, size, f"ends at byte {size} without the two zero blocks that end a tar: it was cut"
    )


def _end(read: Read, offset: int, begun: int, size: int) -> Damage | None:
    """Return the damage at a zero block; None if it begins a valid end marker.

    Damage that stops before the end of the shard stops where other bytes follow.
    """
    padding_fits = is_padding(read, offset, size)  # before what lies ahead is read
    stop = _zeros_until(read, offset, size)
    if stop < size:
        stop -= (stop - offset) % BLOCK
        if stop - offset < len(END):
            return Damage(
                begun,
                stop,
                f"has a zero block at offset {offset} that is not the end: it is damaged",
            )
        reason = (
            f"ends at offset {offset}, and more follows at offset {stop}: several tars in one, "
            "or zeroed in part"
        )
        return Damage(begun, stop, reason, is_join=True)
    if begun < offset:
        return Damage(
            begun, size, f"ends at offset {offset} after an extension header without its member"
        )
    if size - offset < len(END):
        return Damage(
            offset,
            size,
            f"ends at byte {size} within the two zero blocks that end a tar: it was cut",
        )
    if not padding_fits:
        reason = (
            f"ends at offset {offset}, {size - offset} bytes before the file does, more than tar "
            "adds: it was zeroed in part"
        )
        return Damage(offset, size, reason)
    return None


def _zeros_until(read: Read, offset: int, size: int) -> int:
    """Return the offset of the first byte that is not zero, or the size."""
    while offset < size:
        data = read(offset, min(size - offset, _ZEROS))
        if bytes(data).count(0) < len(data):
            return offset + int(np.flatnonzero(np.frombuffer(data, np.uint8))[0])
        offset += max(1, len(data))
    return size


def _reason(error: ShardError) -> str:
    """Return the text of an error without its last sentence, which is advice."""
    return str(error).strip().rpartition(". ")[0]
