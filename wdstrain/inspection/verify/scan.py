"""One forward pass over a shard: its samples, its damage, and checksums of everything read.

`verify` and `repair` use the same scan. A sample takes some dozens of bytes of memory, so a shard
that consists of headers only does no harm.
"""

from __future__ import annotations

from array import array
from collections import Counter
from typing import Any

import numpy as np

from wdstrain.conversion.shard_writer import IndexBuilder
from wdstrain.decode.formats import EXTENSIONS
from wdstrain.inspection.verify.damaged_tar import Damage, FoundSample, walk_damaged
from wdstrain.inspection.verify.decode_check import MOST, DecodeCheck, FieldReaders
from wdstrain.inspection.verify.forward_reader import ForwardReader, checksums
from wdstrain.runtime.cached import cached_property
from wdstrain.shards.columns import ColumnBuilder
from wdstrain.shards.kinds import Place
from wdstrain.shards.offsets import Ints, Members, Offsets
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
        self.damages: list[Damage] = []
        self.suspects: set[int] = set()
        self.twice: list[tuple[int, str, int]] = []
        self.field_sets: Counter[Fields] = Counter()
        self.examples: dict[Fields, list[tuple[str, int]]] = {}
        self.decoded: Counter[str] = Counter()
        self.not_decoded: Counter[str] = Counter()
        self.skipped_members, self.sha256 = SkippedMembers(), ""
        self.values: dict[int, list[tuple[Place, Any]]] = {}  # of columns, by offset of the member
        self._rows, self._hashes = IndexBuilder(), array("q")

    def __len__(self) -> int:
        return len(self._rows)

    @cached_property
    def fields(self) -> list[str]:
        """Names of the fields by their numbers, when all samples are added."""
        return list(self._rows.fields)

    def add(self, sample: FoundSample) -> None:
        """Add a sample. Raises ShardError if there are more fields than an index can hold."""
        key, place = sample.key, len(self)
        if sample.is_suspect:
            self.suspects.add(place)
        self.twice += [(place, name, offset) for name, offset in sample.twice]
        members = [(*field, crc) for field, crc in zip(sample.fields, sample.crcs, strict=True)]
        self._rows.put(key, sample.start, sample.stop, members)
        contents = sorted(
            (name, size, hashed)
            for (name, _, size), hashed in zip(sample.fields, sample.hashes, strict=True)
        )
        picture = [(size, hashed) for name, size, hashed in contents if name in EXTENSIONS and size]
        self._hashes.extend(
            (hash(key), hash(tuple(contents)), hash(tuple(picture)) if picture else 0)
        )
        kind = frozenset([name for name, _, _ in sample.fields])
        self.field_sets[kind] += 1
        some = self.examples.setdefault(kind, [])
        if len(some) < EXAMPLES:
            some.append((key, sample.start))

    def offsets(self) -> Offsets:
        """Return keys, offsets and checksums of the samples, as an index has them."""
        return self._rows.offsets()

    @property
    def key_hashes(self) -> Ints:
        return np.array(self._hashes[::3], np.int64)

    @property
    def content_hashes(self) -> Ints:
        return np.array(self._hashes[1::3], np.int64)

    @property
    def image_hashes(self) -> Ints:
        return np.array(self._hashes[2::3], np.int64)


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
    scan = ShardScan()

    def look(key: str, field: str, offset: int, size: int) -> tuple[int, int]:
        values = columns if columns is not None and columns.reads(field) and size <= MOST else None
        read = readers.of(field) if readers is not None else None
        if decode_check is None or read is None or size > MOST:
            if decode_check is not None:
                scan.not_decoded[field] += 1
            if values is None:
                return reader.checksums(offset, size)
            data = b"".join(reader.parts(offset, size))
            scan.values[offset] = values.read(field, data)
            return checksums([data], size)
        data = b"".join(reader.parts(offset, size))
        if values is not None:
            scan.values[offset] = values.read(field, data)
        scan.decoded[field] += 1
        decode_check.put(key, field, offset, data, read)
        return checksums([data], size)

    for part in walk_damaged(reader.read, reader.size, look, scan.skipped_members):
        if isinstance(part, Damage):
            scan.damages.append(part)
        else:
            scan.add(part)
    scan.sha256 = reader.finish()
    if decode_check is not None:
        decode_check.finish()
    return scan


def crcs_at(expected: Members, scanned: Members, reader: ForwardReader) -> Ints:
    """Return the crc32 of the bytes at the offsets of an index; -1 beyond the end of the shard.

    int64[members]. scanned: members that the scan passed; the others are read again.
    """
    crcs = np.full(len(expected.offset), -1, np.int64)
    same = np.zeros(len(crcs), bool)
    if len(scanned.offset):
        at = np.searchsorted(scanned.offset, expected.offset)
        at = np.minimum(at, len(scanned.offset) - 1)
        same = (scanned.offset[at] == expected.offset) & (scanned.size[at] == expected.size)
        crcs[same] = scanned.crc[at][same]
    inside = expected.offset + expected.size <= reader.size
    for row in np.flatnonzero(inside & ~same).tolist():
        crcs[row] = reader.reread_crc32(int(expected.offset[row]), int(expected.size[row]))
    return crcs
