"""Where each sample and each of its fields lies in its shard: arrays of integers.

A million samples are nine arrays, not a million objects. The arrays of a mapped index file are made
from its columns when they are first used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from wdstrain.errors import ShardError
from wdstrain.runtime.cached import cached_property
from wdstrain.shards.tar import Sample

Ints = npt.NDArray[np.int64]

MOST_FIELDS = 4096  # different fields of one index: each is three columns of index.arrow

ARRAYS = {  # arrays of `Offsets` and their dtypes
    "start": "<i8",
    "stop": "<i8",
    "key_first": "<i8",
    "member_first": "<i8",
    "member_field": "<u2",
    "member_offset": "<i8",
    "member_size": "<i8",
    "member_crc": "<u4",
    "keys": "<u1",
}


@dataclass(frozen=True)
class Members:
    """The members of n samples, m in total, in the order in which they lie in the shards.

    first: int64[n + 1]; sample i has the members first[i] to first[i + 1]. field: uint16[m], number
    of the field. offset, size: int64[m], bytes. crc: uint32[m], crc32 of the data; empty if no data
    was read. A member with crc32 0 is not verified: its data was not read, or its crc32 happens to
    be 0.
    """

    first: Ints
    field: npt.NDArray[np.uint16]
    offset: Ints
    size: Ints
    crc: npt.NDArray[np.uint32]


class Offsets:
    """Offsets of n samples with m members in total.

    start, stop: int64[n], extent of a sample in its shard, headers included.
    key_first: int64[n + 1]; key i is keys[key_first[i] : key_first[i + 1]]. keys: uint8[...].
    member_first, member_field, member_offset, member_size, member_crc: see `Members`.
    """

    def __init__(
        self,
        *,
        start: Ints,
        stop: Ints,
        key_first: Ints,
        keys: npt.NDArray[np.uint8],
        members: Members | Callable[[], Members],
    ) -> None:
        """members: the members, or a function that returns them when they are first needed."""
        self.start, self.stop, self.key_first, self.keys = start, stop, key_first, keys
        self._source = members

    def __len__(self) -> int:
        return len(self.start)

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ARRAYS}

    def __setstate__(self, arrays: dict[str, Any]) -> None:
        vars(self).update(vars(Offsets.of_arrays(arrays)))

    @cached_property
    def _members(self) -> Members:
        return self._source if isinstance(self._source, Members) else self._source()

    @property
    def member_first(self) -> Ints:
        return self._members.first

    @property
    def member_field(self) -> npt.NDArray[np.uint16]:
        return self._members.field

    @property
    def member_offset(self) -> Ints:
        return self._members.offset

    @property
    def member_size(self) -> Ints:
        return self._members.size

    @property
    def member_crc(self) -> npt.NDArray[np.uint32]:
        return self._members.crc

    def keys_of(self, ids: Ints) -> list[str]:
        """Return the keys of samples. ids: int64[n]"""
        starts = self.key_first[ids]
        sizes = self.key_first[ids + 1] - starts
        # Most keys are ASCII of one length: numpy splits them all at once. The loader calls this
        # for every batch.
        if len(ids) and (size := int(sizes[0])) and (sizes == size).all():
            letters = self.keys[starts[:, None] + np.arange(size)]
            if letters.max() < 128 and letters[:, -1].all():  # numpy drops a NUL at the end
                keys: list[str] = letters.astype(np.uint32).view(f"U{size}")[:, 0].tolist()
                return keys
        first = firsts(sizes)
        joined = self.keys[np.arange(first[-1]) + np.repeat(starts - first[:-1], sizes)].tobytes()
        if joined.isascii():  # decode once: faster than once per key
            text = joined.decode("ascii")
            return [text[a:b] for a, b in pairwise(first.tolist())]
        return [str(joined[a:b], "utf-8", "surrogateescape") for a, b in pairwise(first.tolist())]

    @classmethod
    def of_arrays(cls, arrays: dict[str, Any]) -> Offsets:
        """Return the offsets in arrays by name; see ARRAYS."""
        parts = ("first", "field", "offset", "size", "crc")
        return cls(
            start=arrays["start"],
            stop=arrays["stop"],
            key_first=arrays["key_first"],
            keys=arrays["keys"],
            members=Members(*(arrays[f"member_{name}"] for name in parts)),
        )

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return all arrays by name, little-endian; see ARRAYS."""
        return {
            name: np.ascontiguousarray(getattr(self, name), dtype) for name, dtype in ARRAYS.items()
        }

    def replaced(self, **arrays: npt.NDArray[Any]) -> Offsets:
        """Return the same offsets with other arrays under these names."""
        return Offsets.of_arrays({name: getattr(self, name) for name in ARRAYS} | arrays)

    @classmethod
    def of(cls, samples: Sequence[Sample], fields: list[str], crcs: Sequence[int] = ()) -> Offsets:
        """Return the offsets of `samples`, in order. New field names are appended to `fields`.

        crcs: crc32 of each member, in order. Raises ShardError for too many different fields.
        """
        numbers = {name: i for i, name in enumerate(fields)}
        for sample in samples:
            for name, _, _ in sample.fields:
                if name not in numbers:
                    numbers[name] = len(fields)
                    fields.append(name)
        check_field_count(len(fields))
        raw = [sample.key.encode("utf-8", "surrogateescape") for sample in samples]
        members = [member for sample in samples for member in sample.fields]
        return cls(
            start=np.array([s.start for s in samples], np.int64),
            stop=np.array([s.stop for s in samples], np.int64),
            key_first=firsts([len(key) for key in raw]),
            keys=np.frombuffer(b"".join(raw), np.uint8),
            members=Members(
                first=firsts([len(s.fields) for s in samples]),
                field=np.array([numbers[name] for name, _, _ in members], np.uint16),
                offset=np.array([offset for _, offset, _ in members], np.int64),
                size=np.array([size for _, _, size in members], np.int64),
                crc=np.array(crcs, np.uint32),
            ),
        )

    def members_of(self, ids: Ints) -> tuple[Ints, Ints]:
        """Return (rows, members) of all members of these samples, int64[k] each.

        rows: position in `ids` of the member's sample; members: number of the member.
        """
        first = self.member_first[ids]
        counts = self.member_first[ids + 1] - first
        return _runs(first, counts)

    @classmethod
    def join(cls, parts: Sequence[Offsets]) -> Offsets:
        """Return the concatenation of offsets. A part without checksums gets zeros."""
        if len(parts) == 1:
            return parts[0]
        if any(len(part.member_crc) for part in parts):
            parts = [
                part
                if len(part.member_crc)
                else part.replaced(member_crc=np.zeros(len(part.member_field), np.uint32))
                for part in parts
            ]
        arrays = {
            name: np.concatenate([getattr(part, name) for part in parts])
            for name in ARRAYS
            if "first" not in name
        }
        for name in ("key_first", "member_first"):
            arrays[name] = firsts(np.concatenate([np.diff(getattr(part, name)) for part in parts]))
        return cls.of_arrays(arrays)

    def cut(self, start: int, stop: int) -> Offsets:
        """Return the offsets of the samples [start, stop); arrays are views where possible."""
        k0, k1 = int(self.key_first[start]), int(self.key_first[stop])

        def members() -> Members:
            m0, m1 = int(self.member_first[start]), int(self.member_first[stop])
            crc = self.member_crc[m0:m1]
            return Members(
                first=self.member_first[start : stop + 1] - m0,
                field=self.member_field[m0:m1],
                offset=self.member_offset[m0:m1],
                size=self.member_size[m0:m1],
                crc=crc if crc.any() else crc[:0],
            )

        return Offsets(
            start=self.start[start:stop],
            stop=self.stop[start:stop],
            key_first=self.key_first[start : stop + 1] - k0,
            keys=self.keys[k0:k1],
            members=members,
        )

    def digest(self, start: int, stop: int) -> str:
        """Return a short hash of the keys, offsets and sizes of the samples [start, stop)."""
        part, digest = self.cut(start, stop), blake2b(digest_size=8)
        for array in (part.key_first, part.keys, part.member_offset, part.member_size):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()

    def take(self, ids: Ints) -> Offsets:
        """Return the offsets of these samples, in the order of `ids` (int64[k])."""
        sizes = np.diff(self.key_first)[ids]
        _, letters = _runs(self.key_first[ids], sizes)

        def members() -> Members:
            counts = np.diff(self.member_first)[ids]
            _, rows = _runs(self.member_first[ids], counts)
            return Members(
                first=firsts(counts),
                field=self.member_field[rows],
                offset=self.member_offset[rows],
                size=self.member_size[rows],
                crc=self.member_crc[rows] if len(self.member_crc) else self.member_crc,
            )

        return Offsets(
            start=self.start[ids],
            stop=self.stop[ids],
            key_first=firsts(sizes),
            keys=self.keys[letters],
            members=members,
        )


def check_field_count(count: int) -> None:
    """Raise ShardError if samples have more different fields than an index can have."""
    if count > MOST_FIELDS:
        raise ShardError(
            f"these samples have {count} different fields; {MOST_FIELDS} is the limit. "
            f"Check that the shards hold samples with repeating field names."
        )


def firsts(counts: Sequence[int] | Ints) -> Ints:
    """Return the position of the first element of each of n runs, then the end. int64[n + 1]"""
    out = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=out[1:])
    return out


def _runs(first: Ints, counts: Ints) -> tuple[Ints, Ints]:
    """Return (run, position) of every element of runs that start at `first`, int64[k] each."""
    rows = np.repeat(np.arange(len(first)), counts)
    return rows, np.arange(len(rows)) + (first - counts.cumsum() + counts)[rows]
