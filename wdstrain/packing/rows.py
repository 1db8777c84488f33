"""Samples as they become members of a tar, and the numbers of where they lie, kept as arrays and not as objects."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from wdstrain.checksum import crc32
from wdstrain.errors import ShardError
from wdstrain.indexing import MOST_FIELDS, Table
from wdstrain.packing.listing import Part
from wdstrain.tar import BLOCK, header

_PADDING = [bytes(-size % BLOCK) for size in range(BLOCK)]  # by the size modulo a block


class Rows:
    """The table of samples being written one after another. `stop`: where the next begins."""

    def __init__(self) -> None:
        self.stop = 0
        self.fields: dict[str, int] = {}
        self._keys = bytearray()
        self._starts, self._stops, self._offsets, self._sizes = array("q"), array("q"), array("q"), array("q")
        self._lengths, self._members, self._names, self._crcs = array("i"), array("i"), array("H"), array("I")

    def __len__(self) -> int:
        return len(self._starts)

    def add(self, key: str, parts: Sequence[Part], start: int | None = None) -> list[bytes]:
        """The bytes of a sample, header, data and padding of each member, to lie at `start` (default: after the last)."""
        stop = self.stop if start is None else start
        self._starts.append(stop)
        made: list[bytes] = []
        for field, data in parts:
            size = len(data)
            head = header(f"{key}.{field}", size)
            padding = _PADDING[size % BLOCK]
            made += (head, data, padding)
            stop += len(head)
            self._offsets.append(stop)
            self._sizes.append(size)
            self._crcs.append(crc32(data))
            self._names.append(self._number(field))
            stop += size + len(padding)
        raw = key.encode("utf-8", "surrogateescape")
        self._keys += raw
        self._lengths.append(len(raw))
        self._members.append(len(parts))
        self._stops.append(stop)
        self.stop = stop
        return made

    def table(self) -> Table:
        return Table(
            start=np.array(self._starts, np.int64),
            stop=np.array(self._stops, np.int64),
            key_first=_firsts(self._lengths),
            member_first=_firsts(self._members),
            member_field=np.array(self._names, np.uint16),
            member_offset=np.array(self._offsets, np.int64),
            member_size=np.array(self._sizes, np.int64),
            member_crc=np.array(self._crcs, np.uint32),
            keys=np.frombuffer(bytes(self._keys), np.uint8),
        )

    def _number(self, field: str) -> int:
        number = self.fields.get(field)
        if number is None:
            if len(self.fields) == MOST_FIELDS:
                raise ShardError(f"these samples have more than {MOST_FIELDS} different fields. Are they samples?")
            number = self.fields[field] = len(self.fields)
        return number


def _firsts(counts: array[int]) -> np.ndarray:
    out = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(np.array(counts, np.int64), out=out[1:])
    return out
