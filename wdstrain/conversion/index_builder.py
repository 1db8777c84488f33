"""Tar members of samples, and the offsets where they lie."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
from isal.isal_zlib import crc32

from wdstrain.conversion.listing import Part
from wdstrain.shards.offsets import Members, Offsets, check_field_count, firsts
from wdstrain.shards.tar import BLOCK, header

_PADDING = [bytes(-size % BLOCK) for size in range(BLOCK)]  # by the size modulo a block


class IndexBuilder:
    """Offsets of samples that are written one after another. stop: offset of the next sample."""

    def __init__(self) -> None:
        self.stop = 0
        self.fields: dict[str, int] = {}
        self._starts = array("q")
        self._samples = array("q")  # end, length of the key, members: of each sample
        self._members = array("q")  # offset, size, crc32, number of the field: of each member
        self._keys: list[bytes] = []

    def __len__(self) -> int:
        return len(self._starts)

    def add(self, key: str, parts: Sequence[Part], start: int | None = None) -> list[bytes]:
        """Return the bytes of a sample: header, data and padding of each member.

        start: its offset (default: after the last sample).
        """
        stop = self.stop if start is None else start
        self._starts.append(stop)
        made: list[bytes] = []
        for field, data in parts:
            size = len(data)
            head = header(f"{key}.{field}", size)
            fill = _PADDING[size % BLOCK]
            made += (head, data, fill)
            stop += len(head)
            number = self.fields.get(field)
            self._members.extend(
                (stop, size, crc32(data), self._new(field) if number is None else number)
            )
            stop += size + len(fill)
        raw = key.encode("utf-8", "surrogateescape")
        self._keys.append(raw)
        self._samples.extend((stop, len(raw), len(parts)))
        self.stop = stop
        return made

    def reserve(self, key: str, sizes: Sequence[tuple[str, int]]) -> None:
        """Add a sample whose bytes are not known: (field, size) of each member, without crc32."""
        self._starts.append(self.stop)
        for field, size in sizes:
            self.stop += len(header(f"{key}.{field}", size))
            number = self.fields.get(field)
            self._members.extend(
                (self.stop, size, 0, self._new(field) if number is None else number)
            )
            self.stop += size + -size % BLOCK
        raw = key.encode("utf-8", "surrogateescape")
        self._keys.append(raw)
        self._samples.extend((self.stop, len(raw), len(sizes)))

    def offsets(self) -> Offsets:
        """Return the offsets of all samples."""
        samples = np.array(self._samples, np.int64).reshape(-1, 3)
        members = np.array(self._members, np.int64).reshape(-1, 4)
        return Offsets(
            start=np.array(self._starts, np.int64),
            stop=samples[:, 0].copy(),
            key_first=firsts(samples[:, 1]),
            keys=np.frombuffer(b"".join(self._keys), np.uint8),
            members=Members(
                first=firsts(samples[:, 2]),
                field=members[:, 3].astype(np.uint16),
                offset=members[:, 0].copy(),
                size=members[:, 1].copy(),
                crc=members[:, 2].astype(np.uint32),
            ),
        )

    def _new(self, field: str) -> int:
        check_field_count(len(self.fields) + 1)
        number = self.fields[field] = len(self.fields)
        return number
