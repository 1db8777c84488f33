"""What one pass over a shard found in it: its samples as arrays, its damages, the checksums of all that went by.

Whoever checks a shard and whoever saves the rest of it look at the same survey. A million samples are a few arrays of some
dozens of bytes each, so that a shard of nothing but headers is no attack on the memory.
"""

from __future__ import annotations

from array import array
from collections import Counter
from typing import Any

import numpy as np

from wdstrain.decode.image_formats import EXTENSIONS
from wdstrain.shards.columns import ColumnBuilder, Place
from wdstrain.shards.offsets import Ints, Members, Offsets, check_field_count, firsts
from wdstrain.shards.tar import Walk
from wdstrain.verifying.passage import Passage, sums
from wdstrain.verifying.salvage import Damage, Found, salvage
from wdstrain.verifying.trial import MOST, Readers, Trials

EXAMPLES = 100  # samples that are remembered by name of those that have the same fields

Fields = frozenset[str]


class Survey:
    """Samples of a shard in order, whole and doubtful ones.

    doubtful: places of samples beside a damage. twice: (place, field, offset) of members whose name was there before.
    kinds: how many samples have these fields and no others; examples: the first of them, (key, offset). names, contents,
    pictures: a 64-bit hash of each key, of each sample's fields with their bytes, and of the bytes of its picture (jpg, png,
    ...; 0: it has none), good within this process.
    """

    def __init__(self) -> None:
        self.fields: list[str] = []
        self.damages: list[Damage] = []
        self.doubtful: set[int] = set()
        self.twice: list[tuple[int, str, int]] = []
        self.kinds: Counter[Fields] = Counter()
        self.examples: dict[Fields, list[tuple[str, int]]] = {}
        self.tried: Counter[str] = Counter()  # fields that were decoded, by name
        self.untried: Counter[str] = Counter()  # fields that nothing here can decode
        self.walk, self.sha256 = Walk(), ""
        self.values: dict[int, list[tuple[Place, Any]]] = {}  # of columns, by offset of the member
        self._numbers: dict[str, int] = {}
        self._samples, self._members = array("q"), array("q")
        self._keys = bytearray()
        self._hashes = array("q")

    def __len__(self) -> int:
        return len(self._samples) // 4

    def add(self, found: Found) -> None:
        """Take a sample in. Raises ShardError where there are more fields than a set can have."""
        key, start, stop, fields = found.key, found.start, found.stop, found.fields
        place, raw = len(self), key.encode("utf-8", "surrogateescape")
        if found.doubtful:
            self.doubtful.add(place)
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
        self.kinds[kind] += 1
        some = self.examples.setdefault(kind, [])
        if len(some) < EXAMPLES:
            some.append((key, start))

    def offsets(self) -> Offsets:
        """The samples as an index has them, checksums with them."""
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
    def names(self) -> Ints:
        return np.array(self._hashes[::3], np.int64)

    @property
    def contents(self) -> Ints:
        return np.array(self._hashes[1::3], np.int64)

    @property
    def pictures(self) -> Ints:
        return np.array(self._hashes[2::3], np.int64)

    def _new(self, name: str) -> int:
        check_field_count(len(self.fields) + 1)
        self._numbers[name] = len(self.fields)
        self.fields.append(name)
        return self._numbers[name]


def survey(
    passage: Passage,
    readers: Readers | None = None,
    trials: Trials | None = None,
    columns: ColumnBuilder | None = None,
) -> Survey:
    """Pass over a shard to its end. With readers, every field that they know is tried.

    columns: reads the values to keep. Raises StorageError where it cannot be read, ShardError
    where its samples cannot be ones.
    """
    found = Survey()

    def look(key: str, field: str, offset: int, size: int) -> tuple[int, int]:
        values = columns if columns is not None and columns.reads(field) and size <= MOST else None
        read = readers.of(field) if readers is not None else None
        if trials is None or read is None or size > MOST:
            if trials is not None:
                found.untried[field] += 1
            if values is None:
                return passage.sums(offset, size)
            data = b"".join(passage.parts(offset, size))
            found.values[offset] = values.read(field, data)
            return sums([data], size)
        data = b"".join(passage.parts(offset, size))
        if values is not None:
            found.values[offset] = values.read(field, data)
        found.tried[field] += 1
        trials.put(key, field, offset, data, read)
        return sums([data], size)

    for one in salvage(passage.read, passage.size, look, found.walk):
        if isinstance(one, Damage):
            found.damages.append(one)
        else:
            found.add(one)
    found.sha256 = passage.finish()
    if trials is not None:
        trials.finish()
    return found


def crcs_at(promised: Offsets, found: Offsets, passage: Passage) -> Ints:
    """The crc32 of what lies in a shard where an index says that members lie; -1 where the shard has ended. int64[members]

    found: what the pass came by; the rest, whose headers are damaged, is read again.
    """
    crcs = np.full(len(promised.member_offset), -1, np.int64)
    if len(found.member_offset):
        at = np.minimum(
            np.searchsorted(found.member_offset, promised.member_offset),
            len(found.member_offset) - 1,
        )
        same = (found.member_offset[at] == promised.member_offset) & (
            found.member_size[at] == promised.member_size
        )
        crcs[same] = found.member_crc[at][same]
    else:
        same = np.zeros(len(crcs), bool)
    inside = promised.member_offset + promised.member_size <= passage.size
    for row in np.flatnonzero(inside & ~same).tolist():
        crcs[row] = passage.again(int(promised.member_offset[row]), int(promised.member_size[row]))
    return crcs
