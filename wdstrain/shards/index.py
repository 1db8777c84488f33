"""What is known of a set of shards without reading them: names, sizes, labels, and where each field of each sample lies.

Plain arrays, so that a million samples are nine arrays and not a million objects; sample ids count through the shards in
order. How an index is written, read and made is in `index_files`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from wdstrain.errors import ShardError
from wdstrain.report import charts
from wdstrain.report.printing import printable
from wdstrain.runtime.cached import cached_property
from wdstrain.shards.tar import Sample
from wdstrain.storage.local import ShardFile
from wdstrain.storage.remote import is_remote, name_of, redacted

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

    @property
    def place(self) -> tuple[str, str | None]:
        """Where its value lies."""
        return self.field, self.column

    @property
    def has_names(self) -> bool:
        """Whether the classes have names, and not only their numbers for names."""
        return self.classes != tuple(map(str, range(len(self.classes))))

    @property
    def numbering(self) -> str:
        """The classes with their numbers, as an error shows them."""
        if self.kind == "number":
            return "numbers, no classes"
        if not self.has_names:
            return f"{len(self.classes)} classes without names"
        some = ", ".join(f"{number} {name}" for number, name in enumerate(self.classes[:6]))
        return some + (f", ... ({len(self.classes)} classes)" if len(self.classes) > 6 else "")


@dataclass(frozen=True)
class Table:
    """Offsets of the samples of some shards. For n samples with m members in all:

    start, stop: int64[n], extent in the shard, headers included; key_first: int64[n + 1] into keys: uint8[...];
    member_first: int64[n + 1] into member_field: uint16[m], member_offset, member_size: int64[m]; member_crc: uint32[m], 0 for
    members of shards whose data was never read, and of length 0 where none was. A member whose crc32 is 0 is not compared either.
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
        """Tables one after another. Each keeps its checksums."""
        if len(tables) == 1:
            return tables[0]
        if any(len(t.member_crc) for t in tables):
            blank = [np.zeros(len(t.member_field), np.uint32) for t in tables]
            tables = [t if len(t.member_crc) else replace(t, member_crc=no) for t, no in zip(tables, blank, strict=True)]
        parts = {name: np.concatenate([getattr(t, name) for t in tables]) for name in ARRAYS if "first" not in name}
        for name in ("key_first", "member_first"):
            parts[name] = firsts(np.concatenate([np.diff(getattr(t, name)) for t in tables]))
        return cls(**parts)

    def cut(self, start: int, stop: int) -> Table:
        """The rows of samples [start, stop)."""
        k0, k1 = int(self.key_first[start]), int(self.key_first[stop])
        m0, m1 = int(self.member_first[start]), int(self.member_first[stop])
        crcs = self.member_crc[m0:m1]
        return Table(
            start=self.start[start:stop],
            stop=self.stop[start:stop],
            key_first=self.key_first[start : stop + 1] - k0,
            member_first=self.member_first[start : stop + 1] - m0,
            member_field=self.member_field[m0:m1],
            member_offset=self.member_offset[m0:m1],
            member_size=self.member_size[m0:m1],
            member_crc=crcs if crcs.any() else crcs[:0],
            keys=self.keys[k0:k1],
        )


@dataclass(frozen=True, eq=False)
class Index:
    """A set of shards in order. Sample ids are counted through them from 0.

    own: for each shard the labels of its own index, where joined indexes have different labels; else empty. A class number in a
    shard counts in the classes of its own label. `labels` are then those that could be joined by the names of their classes.
    versions: by path, what a server called a shard when it was first read, of those that `needs_headers`.
    """

    shards: tuple[Shard, ...]
    fields: tuple[str, ...]
    table: Table
    labels: tuple[Label, ...] = ()
    info: dict[str, Any] = field(default_factory=dict)
    own: tuple[tuple[Label, ...], ...] = ()
    versions: dict[str, str] = field(default_factory=dict, repr=False)

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

    def state(self, shard: ShardFile) -> str:
        """The state in which a shard has to be; "" where checksums tell of each sample whether it is what it was."""
        return "" if shard.path in self._with_checksums else shard.tag

    def needs_headers(self, shard: ShardFile) -> bool:
        """Whether nothing but the headers of its samples tells a shard of a server for sure from another of the same size."""
        return is_remote(shard.path) and shard.path not in self._with_checksums and not shard.tag.startswith('"')

    @cached_property
    def _with_checksums(self) -> frozenset[str]:
        """Paths of the shards whose samples have checksums."""
        if not len(self.table.member_crc):
            return frozenset()
        edges = self.table.member_first[self.first].tolist()
        parts = zip(self.shards, pairwise(edges), strict=True)
        return frozenset(shard.path for shard, edge in parts if self.table.member_crc[slice(*edge)].any())

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

    def own_label(self, label: Label, number: int) -> Label:
        """A label with its classes in the order in which the shard of a sample numbers them."""
        if not self.own:
            return label
        shard = int(np.searchsorted(self.first, number, side="right") - 1)
        return next((one for one in self.own[shard] if one.place == label.place), label)

    def disagreement(self, field: str, column: str | None) -> str:
        """Why the labels of one place in the samples cannot be joined, with their numberings; "" where they can."""
        if not self.own or any(label.place == (field, column) for label in self.labels):
            return ""
        found: dict[str, str] = {}
        for shard, labels in zip(self.shards, self.own, strict=True):
            mine = next((label.numbering for label in labels if label.place == (field, column)), "no label")
            found.setdefault(mine, shard.shown)
        if set(found) == {"no label"}:
            return ""
        parts = "; ".join(f"{numbering} ({shown})" for numbering, shown in found.items())
        return (
            f"the label in {field}{f', column {column!r},' if column is not None else ''} differs between these sets: {parts}"
        )

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(shard.split for shard in self.shards))

    @cached_property
    def fingerprint(self) -> str:
        """Short hash of the shards in order: what the order of an epoch depends on. Of shards whose bytes nobody read, their keys
        and sizes count."""
        rows = [
            (shard.name, shard.samples, shard.bytes, shard.sha256 or self._headers(number))
            for number, shard in enumerate(self.shards)
        ]
        return blake2b(json.dumps(rows).encode(), digest_size=8).hexdigest()

    def _headers(self, number: int) -> str:
        """Short hash of what the headers of a shard say."""
        table, found = self.table.cut(int(self.first[number]), int(self.first[number + 1])), blake2b(digest_size=8)
        for array in (table.key_first, table.keys, table.member_offset, table.member_size):
            found.update(np.ascontiguousarray(array).tobytes())
        return found.hexdigest()

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
        own = tuple(self.own[i] for i in wanted) if self.own else ()
        labels, own = _joined_labels(own) if own else (self.labels, own)
        if wanted == list(range(wanted[0], wanted[-1] + 1)) if wanted else False:  # a run is a view, not a copy
            table = self.table.cut(int(self.first[wanted[0]]), int(self.first[wanted[-1] + 1]))
        else:
            tables = [self.table.cut(int(self.first[i]), int(self.first[i + 1])) for i in wanted]
            table = Table.join(tables or [self.table.cut(0, 0)])
        return replace(self, shards=tuple(self.shards[i] for i in wanted), table=table, labels=labels, own=own)


def join(parts: Sequence[Index]) -> Index:
    """Several indexes as one, in order. Labels are joined by the names of their classes; see `Index.own`."""
    if len(parts) == 1:
        return parts[0]
    fields = list(dict.fromkeys(name for part in parts for name in part.fields))
    tables = []
    for part in parts:
        numbers = np.array([fields.index(name) for name in part.fields] or [0], np.uint16)
        tables.append(replace(part.table, member_field=numbers[part.table.member_field]))
    own = tuple(labels for part in parts for labels in part.own or [part.labels] * len(part.shards))
    labels, own = _joined_labels(own or (parts[0].labels,))
    return Index(
        shards=tuple(shard for part in parts for shard in part.shards),
        fields=tuple(fields),
        table=Table.join(tables),
        labels=labels,
        info=parts[0].info,
        own=own,
    )


def _joined_labels(own: tuple[tuple[Label, ...], ...]) -> tuple[tuple[Label, ...], tuple[tuple[Label, ...], ...]]:
    """(labels of shards together, their own labels where these differ). own: labels of each shard, one at least"""
    different = list(dict.fromkeys(own))
    if len(different) == 1:
        return different[0], ()
    found = []
    for place in dict.fromkeys(label.place for labels in different for label in labels):
        mine = [next((label for label in labels if label.place == place), None) for labels in different]
        there = [label for label in mine if label is not None]
        # without names, 0 of one set and 0 of another may be two classes; a list of classes has names for values
        apart = there[0].kind == "class" and len({label.has_names for label in there}) > 1
        if len(there) == len(mine) and len({label.kind for label in there}) == 1 and not apart:
            classes = dict.fromkeys(name for label in there for name in label.classes)
            found.append(replace(there[0], classes=tuple(classes)))
    return tuple(found), own


def firsts(counts: Sequence[int] | Ints) -> Ints:
    """Where each of several runs begins, and where the last ends. int64[n + 1]"""
    out = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=out[1:])
    return out
