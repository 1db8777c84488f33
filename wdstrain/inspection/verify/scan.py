"""One forward pass over a shard: its samples, its damage, and checksums of everything read.

`verify` and `repair` use the same scan. A sample takes some dozens of bytes of memory, so a shard
that consists of headers only does no harm.
"""

from __future__ import annotations

from array import array
from collections import Counter
from typing import Any

import numpy as np

from wdstrain.decode.image_formats import EXTENSIONS
from wdstrain.inspection.verify.damaged_tar import Damage, FoundSample, walk_damaged
from wdstrain.inspection.verify.decode_check import MOST, DecodeCheck, FieldReaders
from wdstrain.inspection.verify.forward_reader import ForwardReader, checksums
from wdstrain.shards.columns import ColumnBuilder, Place
from wdstrain.shards.offsets import Ints, Members, Offsets, check_field_count, firsts
from wdstrain.shards.tar import SkippedMembers

EXAMPLES = 100  # keys that are kept of samples with the same fields

Fields = frozenset[str]


class ShardScan:
    """Samples of a shard, in order.

    suspects: numbers of samples next to damage. twice: (number, field, offset) of members whose
    name the sample already has. field_sets: number of samples with exactly these fields; examples:
    (key, offset) of the first of them. decoded, not_decoded: members by field.
    key_hashes, content_hashes, image_hashes: 64-bit hashes of each sample's key, of its fields with
    their bytes, and of its images (0: none), valid within this process.
    """

    def __init__(self) -> None:
        self.fields: list[str] = []
        self.damages: list[Damage] = []
        self.suspects: set[int] = set()
        self.twice: list[tuple[int, str, int]] = []
        self.field_sets: Counter[Fields] = Counter()
        self.examples: dict[Fields, list[tuple[str, int]]] = {}
        self.decoded: Counter[str] = Counter()
        self.not_decoded: Counter[str] = Counter()
        self.skipped_members, self.sha256 = SkippedMembers(), ""
        self.values: dict[int, list[tuple[Place, Any]]] = {}  # of columns, by offset of the member
        self._numbers: dict[str, int] = {}
        self._samples, self._members = array("q"), array("q")
        self._keys = bytearray()
        self._hashes = array("q")

    def __len__(self) -> int:
        return len(self._samples) // 4

    def add(self, found: FoundSample) -> None:
        """Add a sample. Raises ShardError if there are more fields than an index can hold."""
        key, start, stop, fields = found.key, found.start, found.stop, found.fields
        place, raw = len(self), key.encode("utf-8", "surrogateescape")
        if found.is_suspect:
            self.suspects.add(place)
        self.twice += [(place, name, offset) for name, offset in found.twice]
        contents = []
        for (name, offset, size), crc, hashed in zip(fields, found.crcs, found.hashes, strict=True):
            number = self._numbers.get(name)
            self._members.extend((self._new(name) if number is None else number, offset, size, crc))
            contents.append((name, size, hashed))
        self._samples.extend((start, stop, len(raw), len(fields)))
        self._keys += raw
        contents.sort()
        picture = [(size, hashed) for name, size, hashed in contents if name in EXTENSIONS and size]
        self._hashes.extend(
            (hash(key), hash(tuple(contents)), hash(tuple(picture)) if picture else 0)
        )
        kind = frozenset([name for name, _, _ in fields])
        self.field_sets[kind] += 1
        some = self.examples.setdefault(kind, [])
        if len(some) < EXAMPLES:
            some.append((key, start))

    def offsets(self) -> Offsets:
        """Return keys, offsets and checksums of the samples, as an index has them."""
        samples, members = (
            np.array(self._samples, np.int64).reshape(-1, 4),
            np.array(self._members, np.int64).reshape(-1, 4),
        )
        return Offsets(
            start=samples[:, 0].copy(),
            stop=samples[:, 1].copy(),
            key_first=firsts(samples[:, 2]),
            keys=np.frombuffer(bytes(self._keys), np.uint8),
            members=Members(
                first=firsts(samples[:, 3]),
                field=members[:, 0].astype(np.uint16),
                offset=members[:, 1].copy(),
                size=members[:, 2].copy(),
                crc=members[:, 3].astype(np.uint32),
            ),
        )

    @property
    def key_hashes(self) -> Ints:
        return np.array(self._hashes[::3], np.int64)

    @property
    def content_hashes(self) -> Ints:
        return np.array(self._hashes[1::3], np.int64)

    @property
    def image_hashes(self) -> Ints:
        return np.array(self._hashes[2::3], np.int64)

    def _new(self, name: str) -> int:
        check_field_count(len(self.fields) + 1)
        self._numbers[name] = len(self.fields)
        self.fields.append(name)
        return self._numbers[name]


def scan_shard(
    reader: ForwardReader,
    readers: FieldReaders | None = None,
    decode_check: DecodeCheck | None = None,
    columns: ColumnBuilder | None = None,
) -> ShardScan:
    """Read a shard to its end.

    decode_check: decodes the fields that `readers` know. columns: reads the values to keep.
    Raises StorageError if the shard cannot be read, ShardError if it cannot be a set of samples.
    """
    found = ShardScan()

    def look(key: str, field: str, offset: int, size: int) -> tuple[int, int]:
        values = columns if columns is not None and columns.reads(field) and size <= MOST else None
        read = readers.of(field) if readers is not None else None
        if decode_check is None or read is None or size > MOST:
            if decode_check is not None:
                found.not_decoded[field] += 1
            if values is None:
                return reader.checksums(offset, size)
            data = b"".join(reader.parts(offset, size))
            found.values[offset] = values.read(field, data)
            return checksums([data], size)
        data = b"".join(reader.parts(offset, size))
        if values is not None:
            found.values[offset] = values.read(field, data)
        found.decoded[field] += 1
        decode_check.put(key, field, offset, data, read)
        return checksums([data], size)

    for one in walk_damaged(reader.read, reader.size, look, found.skipped_members):
        if isinstance(one, Damage):
            found.damages.append(one)
        else:
            found.add(one)
    found.sha256 = reader.finish()
    if decode_check is not None:
        decode_check.finish()
    return found


def crcs_at(expected: Offsets, found: Offsets, reader: ForwardReader) -> Ints:
    """Return the crc32 of the bytes at the offsets of an index; -1 beyond the end of the shard.

    int64[members]. found: members that the scan passed; the others are read again.
    """
    crcs = np.full(len(expected.member_offset), -1, np.int64)
    if len(found.member_offset):
        at = np.minimum(
            np.searchsorted(found.member_offset, expected.member_offset),
            len(found.member_offset) - 1,
        )
        same = (found.member_offset[at] == expected.member_offset) & (
            found.member_size[at] == expected.member_size
        )
        crcs[same] = found.member_crc[at][same]
    else:
        same = np.zeros(len(crcs), bool)
    inside = expected.member_offset + expected.member_size <= reader.size
    for row in np.flatnonzero(inside & ~same).tolist():
        crcs[row] = reader.reread_crc32(
            int(expected.member_offset[row]), int(expected.member_size[row])
        )
    return crcs
