"""What is known of a set of shards without reading them: names, sizes, labels, and where each field of each sample lies.

Plain arrays, so that a million samples are nine arrays and not a million objects; sample ids count through the shards in
order. How an index is written, read and made is in `index_files`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import blake2b
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from wdstrain import charts
from wdstrain.errors import ShardError
from wdstrain.printing import printable
from wdstrain.remote import is_remote, name_of, redacted
from wdstrain.tar import Sample

Ints = npt.NDArray[np.int64]

MOST_FIELDS = 65_535

# the arrays of a table and their dtypes, in the order in which they are stored
ARRAYS = {
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
class Shard:
    """One tar: where it is and what it holds.

    `sha256` is empty where the shard was only walked over, not read. `tag` is the state in which it was found: what a server calls
    it (ETag), empty where it says nothing; of a file here, what `storage.state_of` says.
    """

    path: str
    samples: int
    bytes: int
    split: str = ""
    sha256: str = ""
    tag: str = field(default="", compare=False)

    @property
    def name(self) -> str:
        return name_of(self.path)

    @property
    def shown(self) -> str:
        """The path as it may be printed: without what may be secret in an address, and of characters that any log can hold."""
        return printable(redacted(self.path) if is_remote(self.path) else self.path)


@dataclass(frozen=True)
class Label:
    """A column that training can aim at, and where its value lies: `field`, and `column` in it if that is JSON."""

    name: str
    kind: str  # "class": value is a number or one of `classes`; "number": a float; "multi": a list of `classes`
    field: str
    column: str | None = None
    classes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Table:
    """Offsets of the samples of some shards. For n samples with m members in all:

    start, stop: int64[n], extent in the shard, headers included; key_first: int64[n + 1] into keys: uint8[...];
    member_first: int64[n + 1] into member_field: uint16[m], member_offset, member_size: int64[m]; member_crc: uint32[m],
    or of length 0 where the data was never read.
    """

    start: Ints
    stop: Ints
    key_first: Ints
    member_first: Ints
    member_field: npt.NDArray[np.uint16]
    member_offset: Ints
    member_size: Ints
    member_crc: npt.NDArray[np.uint32]
    keys: npt.NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.start)

    @classmethod
    def of(cls, found: Sequence[Sample], fields: list[str], crcs: Sequence[int] = ()) -> Table:
        """A table of samples in order; new field names are appended to `fields`."""
        numbers = {name: i for i, name in enumerate(fields)}
        for sample in found:
            for name, _, _ in sample.fields:
                if name not in numbers:
                    numbers[name] = len(fields)
                    fields.append(name)
        if len(fields) > MOST_FIELDS:
            raise ShardError(
                f"these samples have {len(fields)} different fields; {MOST_FIELDS} are the most. Are they samples?"
            )
        raw = [sample.key.encode("utf-8", "surrogateescape") for sample in found]
        members = [member for sample in found for member in sample.fields]
        return cls(
            start=np.array([s.start for s in found], np.int64),
            stop=np.array([s.stop for s in found], np.int64),
            key_first=firsts([len(key) for key in raw]),
            member_first=firsts([len(s.fields) for s in found]),
            member_field=np.array([numbers[name] for name, _, _ in members], np.uint16),
            member_offset=np.array([offset for _, offset, _ in members], np.int64),
            member_size=np.array([size for _, _, size in members], np.int64),
            member_crc=np.array(crcs, np.uint32),
            keys=np.frombuffer(b"".join(raw), np.uint8),
        )

    def members_of(self, ids: Ints) -> tuple[Ints, Ints]:
        """The numbers of all members of some samples, and before them in which of those each is. int64[k] each."""
        low = self.member_first[ids]
        counts = self.member_first[ids + 1] - low
        of = np.repeat(np.arange(len(ids)), counts)
        return of, np.arange(len(of)) + (low - counts.cumsum() + counts)[of]

    @classmethod
    def join(cls, tables: Sequence[Table]) -> Table:
        """Tables one after another. Checksums are kept only if all have them."""
        if len(tables) == 1:
            return tables[0]
        parts = {name: np.concatenate([getattr(t, name) for t in tables]) for name in ARRAYS if "first" not in name}
        for name in ("key_first", "member_first"):
            parts[name] = firsts(np.concatenate([np.diff(getattr(t, name)) for t in tables]))
        if not all(len(t.member_crc) == len(t.member_field) for t in tables):
            parts["member_crc"] = np.zeros(0, np.uint32)
        return cls(**parts)

    def cut(self, start: int, stop: int) -> Table:
        """The rows of samples [start, stop)."""
        k0, k1 = int(self.key_first[start]), int(self.key_first[stop])
        m0, m1 = int(self.member_first[start]), int(self.member_first[stop])
        return Table(
            start=self.start[start:stop],
            stop=self.stop[start:stop],
            key_first=self.key_first[start : stop + 1] - k0,
            member_first=self.member_first[start : stop + 1] - m0,
            member_field=self.member_field[m0:m1],
            member_offset=self.member_offset[m0:m1],
            member_size=self.member_size[m0:m1],
            member_crc=self.member_crc[m0:m1],
            keys=self.keys[k0:k1],
        )


@dataclass(frozen=True, eq=False)
class Index:
    """A set of shards in order. Sample ids are counted through them from 0."""

    shards: tuple[Shard, ...]
    fields: tuple[str, ...]
    table: Table
    labels: tuple[Label, ...] = ()
    info: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.table)

    def among(self, names: Collection[str] | None) -> npt.NDArray[np.bool_]:
        """Which of the fields have one of these names; all if it is None. bool[fields]"""
        return np.array([names is None or name in names for name in self.fields], bool)

    def __repr__(self) -> str:
        size = sum(shard.bytes for shard in self.shards)
        return f"Index({len(self)} samples, {len(self.shards)} shards, {size / 1e6:.1f} MB, fields {', '.join(self.fields)})"

    def _repr_html_(self) -> str:
        splits = {split: sum(shard.samples for shard in self.shards if shard.split == split) for split in self.splits}
        rows = {
            "samples": len(self),
            "shards": len(self.shards),
            "MB": f"{sum(shard.bytes for shard in self.shards) / 1e6:.1f}",
            "splits": ", ".join(f"{name or 'without a name'} {count}" for name, count in splits.items()),
            "fields": ", ".join(self.fields),
            "labels": ", ".join(label.name for label in self.labels) or "none are known",
        }
        return charts.part("Index", charts.table(rows))

    def state(self, shard: Shard) -> str:
        """The state in which a shard on a disk here has to be; "" where checksums tell of each sample whether it is what it was."""
        return "" if len(self.table.member_crc) or is_remote(shard.path) else shard.tag

    @cached_property
    def counts(self) -> Ints:
        """Samples of each shard. int64[shards]"""
        return np.array([shard.samples for shard in self.shards], np.int64)

    @cached_property
    def first(self) -> Ints:
        """Id of the first sample of each shard, and the number of samples. int64[shards + 1]"""
        return firsts(self.counts)

    @cached_property
    def numbers(self) -> dict[str, int]:
        """The place of each shard, by name."""
        return {shard.name: i for i, shard in enumerate(self.shards)}

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(shard.split for shard in self.shards))

    @cached_property
    def fingerprint(self) -> str:
        """Short hash of the shards in order: what the order of an epoch depends on."""
        rows = [(shard.name, shard.samples, shard.bytes, shard.sha256) for shard in self.shards]
        return blake2b(json.dumps(rows).encode(), digest_size=8).hexdigest()

    def key(self, number: int) -> str:
        """The key of a sample."""
        first, stop = self.table.key_first[number : number + 2]
        return self.table.keys[first:stop].tobytes().decode("utf-8", "surrogateescape")

    def keys(self, ids: Ints) -> list[str]:
        """The keys of samples."""
        starts = self.table.key_first[ids]
        sizes = self.table.key_first[ids + 1] - starts
        # numbered, mostly: cut all at once, in a fifth of the time
        if len(ids) and (size := int(sizes[0])) and (sizes == size).all():
            letters = self.table.keys[starts[:, None] + np.arange(size)]
            if letters.max() < 128 and letters[:, -1].all():  # numpy drops a NUL at the end
                found: list[str] = letters.astype(np.uint32).view(f"U{size}")[:, 0].tolist()
                return found
        first = firsts(sizes)
        joined = self.table.keys[np.arange(first[-1]) + np.repeat(starts - first[:-1], sizes)].tobytes()
        if joined.isascii():  # cut as text, which takes half the time of making one text after another
            text = joined.decode("ascii")
            return [text[a:b] for a, b in pairwise(first.tolist())]
        return [str(joined[a:b], "utf-8", "surrogateescape") for a, b in pairwise(first.tolist())]

    def shard_of(self, ids: Ints) -> Ints:
        """Number of the shard each sample lies in. int64, as `ids`."""
        return np.asarray(np.searchsorted(self.first, ids, side="right") - 1)

    def members(self, number: int) -> list[tuple[str, int, int]]:
        """(field, offset, size) of each field of a sample."""
        rows = range(*self.table.member_first[number : number + 2])
        table = self.table
        return [(self.fields[table.member_field[m]], int(table.member_offset[m]), int(table.member_size[m])) for m in rows]

    def pick(self, numbers: Iterable[int]) -> Index:
        """The index of these shards alone, in this order."""
        wanted = list(numbers)
        if wanted == list(range(len(self.shards))):
            return self
        if wanted == list(range(wanted[0], wanted[-1] + 1)) if wanted else False:  # a run is a view, not a copy
            tables = [self.table.cut(int(self.first[wanted[0]]), int(self.first[wanted[-1] + 1]))]
            return replace(self, shards=tuple(self.shards[i] for i in wanted), table=tables[0])
        tables = [self.table.cut(int(self.first[i]), int(self.first[i + 1])) for i in wanted]
        return replace(self, shards=tuple(self.shards[i] for i in wanted), table=Table.join(tables or [self.table.cut(0, 0)]))


def join(parts: Sequence[Index]) -> Index:
    """Several indexes as one, in order. Labels are kept if all agree on them."""
    if len(parts) == 1:
        return parts[0]
    fields = list(dict.fromkeys(name for part in parts for name in part.fields))
    tables = []
    for part in parts:
        numbers = np.array([fields.index(name) for name in part.fields] or [0], np.uint16)
        tables.append(replace(part.table, member_field=numbers[part.table.member_field]))
    return Index(
        shards=tuple(shard for part in parts for shard in part.shards),
        fields=tuple(fields),
        table=Table.join(tables),
        labels=parts[0].labels if all(part.labels == parts[0].labels for part in parts) else (),
        info=parts[0].info,
    )


def firsts(counts: Sequence[int] | Ints) -> Ints:
    """Where each of several runs begins, and where the last ends. int64[n + 1]"""
    out = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=out[1:])
    return out
