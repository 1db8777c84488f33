"""The index in memory: shards, labels, and the offset of every field of every sample.

`Index` describes a set of shards in order; sample ids count through them from 0. `Table` holds the
offsets in nine arrays, so a million samples need no million objects. `index_io` writes, reads and
makes indexes.
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

MOST_FIELDS = 65_535  # different fields of one index: `member_field` is uint16

# Arrays of a table and their dtypes, in the order in which index.bin stores them.
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
    """One tar shard: address, number of samples, size in bytes and split.

    sha256: of its bytes; empty if only its headers were read. tag: its state when it was last
    examined: the server's ETag (empty if there is none), or `storage.local.state_of` for a file.
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
        """The path for messages: without secrets in an address, and with printable characters."""
        return printable(redacted(self.path) if is_remote(self.path) else self.path)


@dataclass(frozen=True)
class Label:
    """A label: a training target that is stored in `field`, in the entry `column` if it is JSON.

    kind: "class": the value is a class number or one of `classes`; "number": a float; "multi": a
    list of `classes`.
    """

    name: str
    kind: str
    field: str
    column: str | None = None
    classes: tuple[str, ...] = ()

    @property
    def place(self) -> tuple[str, str | None]:
        """(field, column) of its value."""
        return self.field, self.column

    @property
    def has_names(self) -> bool:
        """Whether the classes have names other than their numbers."""
        return self.classes != tuple(map(str, range(len(self.classes))))

    @property
    def numbering(self) -> str:
        """The first classes with their numbers, for error messages."""
        if self.kind == "number":
            return "numbers, no classes"
        if not self.has_names:
            return f"{len(self.classes)} classes without names"
        shown = ", ".join(f"{number} {name}" for number, name in enumerate(self.classes[:6]))
        return shown + (f", ... ({len(self.classes)} classes)" if len(self.classes) > 6 else "")


@dataclass(frozen=True)
class Table:
    """Offsets of n samples with m members in total.

    start, stop: int64[n], extent of a sample in its shard, headers included.
    key_first: int64[n + 1]; key i is keys[key_first[i] : key_first[i + 1]]. keys: uint8[...].
    member_first: int64[n + 1]; sample i has the members member_first[i] to member_first[i + 1].
    member_field: uint16[m], number of the field. member_offset, member_size: int64[m], bytes.
    member_crc: uint32[m], crc32 of the data; empty if no data was read. A member with crc32 0 is
    not verified: its data was not read, or its crc32 happens to be 0.
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
    def of(cls, samples: Sequence[Sample], fields: list[str], crcs: Sequence[int] = ()) -> Table:
        """Return the table of `samples`, in order. New field names are appended to `fields`.

        crcs: crc32 of each member, in order. Raises ShardError for too many different fields.
        """
        numbers = {name: i for i, name in enumerate(fields)}
        for sample in samples:
            for name, _, _ in sample.fields:
                if name not in numbers:
                    numbers[name] = len(fields)
                    fields.append(name)
        if len(fields) > MOST_FIELDS:
            raise ShardError(
                f"these samples have {len(fields)} different fields; {MOST_FIELDS} is the limit. "
                f"Check that the shards hold samples with repeating field names."
            )
        raw = [sample.key.encode("utf-8", "surrogateescape") for sample in samples]
        members = [member for sample in samples for member in sample.fields]
        return cls(
            start=np.array([s.start for s in samples], np.int64),
            stop=np.array([s.stop for s in samples], np.int64),
            key_first=firsts([len(key) for key in raw]),
            member_first=firsts([len(s.fields) for s in samples]),
            member_field=np.array([numbers[name] for name, _, _ in members], np.uint16),
            member_offset=np.array([offset for _, offset, _ in members], np.int64),
            member_size=np.array([size for _, _, size in members], np.int64),
            member_crc=np.array(crcs, np.uint32),
            keys=np.frombuffer(b"".join(raw), np.uint8),
        )

    def members_of(self, ids: Ints) -> tuple[Ints, Ints]:
        """Return (rows, members) of all members of these samples, int64[k] each.

        rows: position in `ids` of the member's sample; members: number of the member in the table.
        """
        first = self.member_first[ids]
        counts = self.member_first[ids + 1] - first
        rows = np.repeat(np.arange(len(ids)), counts)
        return rows, np.arange(len(rows)) + (first - counts.cumsum() + counts)[rows]

    @classmethod
    def join(cls, tables: Sequence[Table]) -> Table:
        """Return the concatenation of tables. A table without checksums gets zeros."""
        if len(tables) == 1:
            return tables[0]
        if any(len(t.member_crc) for t in tables):
            tables = [
                t
                if len(t.member_crc)
                else replace(t, member_crc=np.zeros(len(t.member_field), np.uint32))
                for t in tables
            ]
        parts = {
            name: np.concatenate([getattr(t, name) for t in tables])
            for name in ARRAYS
            if "first" not in name
        }
        for name in ("key_first", "member_first"):
            parts[name] = firsts(np.concatenate([np.diff(getattr(t, name)) for t in tables]))
        return cls(**parts)

    def cut(self, start: int, stop: int) -> Table:
        """Return the table of the samples [start, stop); arrays are views where possible."""
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
    """A set of shards in order. Sample ids count through them from 0.

    labels: the labels of all shards. info: how the set was made (JSON values).
    shard_labels: if joined indexes have different labels, the labels of each shard in its own
    index; else empty. A class number in a shard counts in the classes of its own label, and
    `labels` are then the ones whose classes could be joined by name.
    versions: by path, the ETag that the server gave when a shard was first read, for the shards
    that `needs_headers` names.
    """

    shards: tuple[Shard, ...]
    fields: tuple[str, ...]
    table: Table
    labels: tuple[Label, ...] = ()
    info: dict[str, Any] = field(default_factory=dict)
    shard_labels: tuple[tuple[Label, ...], ...] = ()
    versions: dict[str, str] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return len(self.table)

    def field_mask(self, names: Collection[str] | None) -> npt.NDArray[np.bool_]:
        """Return bool[fields]: True for the fields with these names; None: all fields."""
        return np.array([names is None or name in names for name in self.fields], bool)

    def __repr__(self) -> str:
        size = sum(shard.bytes for shard in self.shards)
        return f"Index({len(self)} samples, {len(self.shards)} shards, {size / 1e6:.1f} MB, fields {', '.join(self.fields)})"

    def _repr_html_(self) -> str:
        splits = {
            split: sum(shard.samples for shard in self.shards if shard.split == split)
            for split in self.splits
        }
        rows = {
            "samples": len(self),
            "shards": len(self.shards),
            "MB": f"{sum(shard.bytes for shard in self.shards) / 1e6:.1f}",
            "splits": ", ".join(
                f"{name or 'without a name'} {count}" for name, count in splits.items()
            ),
            "fields": ", ".join(self.fields),
            "labels": ", ".join(label.name for label in self.labels) or "none are known",
        }
        return charts.fragment("Index", charts.table(rows))

    def expected_state(self, shard: ShardFile) -> str:
        """Return the state that a shard must still have when it is read.

        "" for a shard with checksums: each of its samples is verified instead.
        """
        return "" if shard.path in self._with_checksums else shard.tag

    def needs_headers(self, shard: ShardFile) -> bool:
        """Return whether only headers can prove that a remote shard was not replaced.

        It has neither checksums nor a strong ETag, so a new shard of the same size looks equal.
        """
        return (
            is_remote(shard.path)
            and shard.path not in self._with_checksums
            and not shard.tag.startswith('"')
        )

    @cached_property
    def _with_checksums(self) -> frozenset[str]:
        """Paths of the shards whose members have checksums."""
        if not len(self.table.member_crc):
            return frozenset()
        edges = self.table.member_first[self.first].tolist()
        parts = zip(self.shards, pairwise(edges), strict=True)
        return frozenset(
            shard.path for shard, edge in parts if self.table.member_crc[slice(*edge)].any()
        )

    @cached_property
    def counts(self) -> Ints:
        """Number of samples of each shard. int64[shards]"""
        return np.array([shard.samples for shard in self.shards], np.int64)

    @cached_property
    def first(self) -> Ints:
        """Id of the first sample of each shard, then the total number. int64[shards + 1]"""
        return firsts(self.counts)

    @cached_property
    def shard_numbers(self) -> dict[str, int]:
        """Position of each shard, by name."""
        return {shard.name: i for i, shard in enumerate(self.shards)}

    def label_in_sample(self, label: Label, number: int) -> Label:
        """Return `label` with its classes numbered as in the shard of sample `number`."""
        if not self.shard_labels:
            return label
        shard = int(np.searchsorted(self.first, number, side="right") - 1)
        return next(
            (other for other in self.shard_labels[shard] if other.place == label.place), label
        )

    def disagreement(self, field: str, column: str | None) -> str:
        """Return why the labels in this field and column cannot be joined; "" if they can.

        The text names each class numbering and the first shard that has it.
        """
        if not self.shard_labels or any(label.place == (field, column) for label in self.labels):
            return ""
        first_shards: dict[str, str] = {}  # by numbering
        for shard, labels in zip(self.shards, self.shard_labels, strict=True):
            numberings = (label.numbering for label in labels if label.place == (field, column))
            first_shards.setdefault(next(numberings, "no label"), shard.shown)
        if set(first_shards) == {"no label"}:
            return ""
        parts = "; ".join(f"{numbering} ({shown})" for numbering, shown in first_shards.items())
        place = field if column is None else f"{field}, column {column!r},"
        return f"the label in {place} differs between these sets: {parts}"

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(shard.split for shard in self.shards))

    @cached_property
    def fingerprint(self) -> str:
        """Short hash of the shards in order, on which the order of an epoch depends.

        A shard without sha256 is represented by the keys, offsets and sizes of its samples.
        """
        rows = [
            (shard.name, shard.samples, shard.bytes, shard.sha256 or self._header_hash(number))
            for number, shard in enumerate(self.shards)
        ]
        return blake2b(json.dumps(rows).encode(), digest_size=8).hexdigest()

    def _header_hash(self, number: int) -> str:
        """Return a short hash of the keys, offsets and sizes in shard `number`."""
        table = self.table.cut(int(self.first[number]), int(self.first[number + 1]))
        digest = blake2b(digest_size=8)
        for array in (table.key_first, table.keys, table.member_offset, table.member_size):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()

    def key(self, number: int) -> str:
        """Return the key of sample `number`."""
        first, stop = self.table.key_first[number : number + 2]
        return self.table.keys[first:stop].tobytes().decode("utf-8", "surrogateescape")

    def keys(self, ids: Ints) -> list[str]:
        """Return the keys of samples. ids: int64[n]"""
        starts = self.table.key_first[ids]
        sizes = self.table.key_first[ids + 1] - starts
        # Most keys are ASCII of one length: numpy splits them all at once. The loader calls this
        # for every batch.
        if len(ids) and (size := int(sizes[0])) and (sizes == size).all():
            letters = self.table.keys[starts[:, None] + np.arange(size)]
            if letters.max() < 128 and letters[:, -1].all():  # numpy drops a NUL at the end
                keys: list[str] = letters.astype(np.uint32).view(f"U{size}")[:, 0].tolist()
                return keys
        first = firsts(sizes)
        joined = self.table.keys[
            np.arange(first[-1]) + np.repeat(starts - first[:-1], sizes)
        ].tobytes()
        if joined.isascii():  # decode once: faster than once per key
            text = joined.decode("ascii")
            return [text[a:b] for a, b in pairwise(first.tolist())]
        return [str(joined[a:b], "utf-8", "surrogateescape") for a, b in pairwise(first.tolist())]

    def shard_of(self, ids: Ints) -> Ints:
        """Return the shard number of each sample, int64 in the shape of `ids`."""
        return np.asarray(np.searchsorted(self.first, ids, side="right") - 1)

    def members(self, number: int) -> list[tuple[str, int, int]]:
        """Return (field, offset in the shard, size) of each member of sample `number`."""
        rows = range(*self.table.member_first[number : number + 2])
        table = self.table
        return [
            (
                self.fields[table.member_field[m]],
                int(table.member_offset[m]),
                int(table.member_size[m]),
            )
            for m in rows
        ]

    def pick(self, numbers: Iterable[int]) -> Index:
        """Return the index of only these shards, in this order."""
        wanted = list(numbers)
        if wanted == list(range(len(self.shards))):
            return self
        shard_labels = tuple(self.shard_labels[i] for i in wanted) if self.shard_labels else ()
        labels = self.labels
        if shard_labels:
            labels, shard_labels = _joined_labels(shard_labels)
        if wanted and wanted == list(range(wanted[0], wanted[-1] + 1)):  # views, no copies
            table = self.table.cut(int(self.first[wanted[0]]), int(self.first[wanted[-1] + 1]))
        else:
            tables = [self.table.cut(int(self.first[i]), int(self.first[i + 1])) for i in wanted]
            table = Table.join(tables or [self.table.cut(0, 0)])
        shards = tuple(self.shards[i] for i in wanted)
        return replace(self, shards=shards, table=table, labels=labels, shard_labels=shard_labels)


def join(parts: Sequence[Index]) -> Index:
    """Return several indexes as one, in order.

    Labels are joined by the names of their classes; see `Index.shard_labels`.
    """
    if len(parts) == 1:
        return parts[0]
    fields = list(dict.fromkeys(name for part in parts for name in part.fields))
    tables = []
    for part in parts:
        numbers = np.array([fields.index(name) for name in part.fields] or [0], np.uint16)
        tables.append(replace(part.table, member_field=numbers[part.table.member_field]))
    shard_labels = tuple(
        labels for part in parts for labels in part.shard_labels or [part.labels] * len(part.shards)
    )
    labels, shard_labels = _joined_labels(shard_labels or (parts[0].labels,))
    return Index(
        shards=tuple(shard for part in parts for shard in part.shards),
        fields=tuple(fields),
        table=Table.join(tables),
        labels=labels,
        info=parts[0].info,
        shard_labels=shard_labels,
    )


def _joined_labels(
    shard_labels: tuple[tuple[Label, ...], ...],
) -> tuple[tuple[Label, ...], tuple[tuple[Label, ...], ...]]:
    """Return (labels of all shards together, labels of each shard or () if they are all equal).

    shard_labels: labels of each shard; at least one shard.
    """
    different = list(dict.fromkeys(shard_labels))
    if len(different) == 1:
        return different[0], ()
    joined = []
    for place in dict.fromkeys(label.place for labels in different for label in labels):
        by_set = [
            next((label for label in labels if label.place == place), None) for labels in different
        ]
        present = [label for label in by_set if label is not None]
        # Class numbers without names must not be joined: 0 may be another class in another set.
        # Multi-labels store names, so they can always be joined.
        is_ambiguous = (
            present[0].kind == "class" and len({label.has_names for label in present}) > 1
        )
        same_kind = len({label.kind for label in present}) == 1
        if len(present) == len(by_set) and same_kind and not is_ambiguous:
            classes = dict.fromkeys(name for label in present for name in label.classes)
            joined.append(replace(present[0], classes=tuple(classes)))
    return tuple(joined), shard_labels


def firsts(counts: Sequence[int] | Ints) -> Ints:
    """Return the position of the first element of each of n runs, then the end. int64[n + 1]"""
    out = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=out[1:])
    return out
