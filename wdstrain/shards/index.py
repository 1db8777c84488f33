"""The index in memory: shards, labels, and the offset of every field of every sample.

`Index` describes a set of shards in order; sample ids count through them from 0. Its `offsets` say
where each field lies, its `columns` hold labels and other scalars. `index_io` writes, reads and
makes indexes.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from itertools import islice
from typing import Any, ClassVar, cast

import numpy as np
import pyarrow as pa
from isal.isal_zlib import crc32

from wdstrain.errors import DamageError, UsageError
from wdstrain.report.printing import counted, printable
from wdstrain.runtime.cached import cached_property
from wdstrain.shards.columns import Column
from wdstrain.shards.joining import as_cells, joined
from wdstrain.shards.kinds import ColumnInfo, joined_labels
from wdstrain.shards.offsets import (
    Ints,
    Members,
    Offsets,
    as_arrow,
    firsts,
    table_names,
    utf8_text,
)
from wdstrain.shards.selection import fold_ids, number_of, sample_ids, split_ids
from wdstrain.shards.where import ids_where
from wdstrain.storage.files import open_source
from wdstrain.storage.remote import File, is_remote, name_of, shown_path

_GAP = 1 << 20  # bytes between two values that a server sends and nobody needs


@dataclass(frozen=True)
class Shard:
    """One tar shard: address, number of samples, size in bytes and split.

    sha256: of its bytes; empty if only its headers were read. tag: its state when it was last
    examined: the server's ETag (empty if there is none), or `storage.files.state_of` for a file.
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
        return shown_path(self.path)


@dataclass(frozen=True, eq=False)
class Index:
    """A set of shards in order. Sample ids count through them from 0.

    offsets: the rows of the samples, with their columns. labels: the labels of all shards. info:
    how the set was made (JSON values). differing: labels that joined indexes have and do not have
    alike, with the numbering of each. A class number in a shard of theirs may mean another class
    than in `labels`, which could be joined by the names of classes; columns hold these classes.
    is_selection: samples of its shards may be left out.
    versions: by path, the ETag that the server gave when a shard was first read, for the shards
    that `needs_headers` names.
    """

    shards: tuple[Shard, ...] = ()
    offsets: Offsets = field(default_factory=partial(Offsets.of_samples, ()))
    labels: tuple[ColumnInfo, ...] = ()
    info: dict[str, Any] = field(default_factory=dict)
    differing: dict[ColumnInfo, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict, repr=False)
    is_selection: bool = False

    def __len__(self) -> int:
        return len(self.offsets)

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the fields of the samples, by field number."""
        return self.offsets.fields

    @property
    def columns(self) -> tuple[Column, ...]:
        """Labels and other scalars, one value per sample each."""
        return self.offsets.columns

    def with_columns(self, columns: Sequence[Column]) -> Index:
        """Return the index with these columns instead."""
        arrays = self.offsets.rows.columns[: 3 + 3 * len(self.fields)]
        return replace(self, offsets=Offsets.of_arrays(self.fields, arrays, columns))

    def __repr__(self) -> str:
        labels = [label.name for label in self.labels]
        names = {"splits": self.splits, "fields": self.fields, "labels": labels}
        shown = [f"{title} {', '.join(words)}" for title, words in names.items() if any(words)]
        counts = f"{counted(len(self), 'sample')}, {counted(len(self.shards), 'shard')}"
        return printable(f"Index({'; '.join([f'{counts}, {self.megabytes:.1f} MB', *shown])})")

    @property
    def megabytes(self) -> float:
        """Size of the shards; of a selection, of its samples only."""
        size = self.offsets.size.sum() if self.is_selection else sum(s.bytes for s in self.shards)
        return float(size) / 1e6

    @cached_property
    def with_checksums(self) -> frozenset[str]:
        """Paths of the shards whose members have checksums."""
        return frozenset(
            shard.path for i, shard in enumerate(self.shards) if self._rows_of(i).has_checksums
        )

    def _rows_of(self, first: int, last: int | None = None) -> Offsets:
        """Return the rows of a shard, or of the shards `first` to `last`."""
        stop = self.first[(first if last is None else last) + 1]
        return self.offsets.slice(int(self.first[first]), int(stop))

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

    def disagreement(self, field: str, entry: str | None) -> str:
        """Return why the labels in this field and entry cannot be joined; "" if they can."""
        joined = [label.place for label in self.labels]
        whys = (why for label, why in self.differing.items() if label.place == (field, entry))
        return "" if (field, entry) in joined else next(whys, "")

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(shard.split for shard in self.shards))

    @cached_property
    def fingerprint(self) -> str:
        """Short hash of the shards in order, on which the order of an epoch depends.

        A shard without sha256 is represented by the keys, offsets and sizes of its samples.
        """
        rows = [
            (
                shard.name,
                shard.samples,
                shard.bytes,
                (not self.is_selection and shard.sha256) or self._rows_of(number).digest(),
            )
            for number, shard in enumerate(self.shards)
        ]
        return blake2b(json.dumps(rows).encode(), digest_size=8).hexdigest()

    def key(self, number: int) -> str:
        """Return the key of sample `number`."""
        return self.keys(np.array([number]))[0]

    def keys(self, ids: Ints) -> list[str]:
        """Return the keys of samples. ids: int64[n]"""
        keys = self.offsets.rows.column(0).take(as_arrow(ids)).to_pylist()
        return [key.decode("utf-8", "surrogateescape") for key in keys]

    def shard_of(self, ids: Ints) -> Ints:
        """Return the shard number of each sample, int64 in the shape of `ids`."""
        return np.asarray(np.searchsorted(self.first, ids, side="right") - 1)

    def shard_with(self, number: int) -> Shard:
        """Return the shard of sample `number`."""
        return self.shards[int(self.shard_of(np.array(number)))]

    def members(self, number: int) -> list[tuple[str, int, int]]:
        """Return (field, offset in the shard, size) of each member of sample `number`."""
        members = self.offsets.members_of(np.array([number]))
        names = [self.fields[n] for n in members.field.tolist()]
        return list(zip(names, members.offset.tolist(), members.size.tolist(), strict=True))

    def pick(self, numbers: Iterable[int]) -> Index:
        """Return the index of only these shards, in this order."""
        wanted = list(numbers)
        # Shards that follow each other are one view, without a copy.
        runs = np.split(np.array(wanted, np.int64), np.flatnonzero(np.diff(wanted) != 1) + 1)
        parts = [self._rows_of(run[0], run[-1]) for run in runs if len(run)]
        return replace(
            self,
            shards=tuple(self.shards[i] for i in wanted),
            offsets=Offsets.join(parts or [self.offsets.slice(0, 0)]),
        )

    def take(self, ids: Ints) -> Index:
        """Return the index of only these samples. ids: int64[k], ascending; others raise UsageError.

        Shards without a chosen sample are left out, so they are never read.
        """
        ids = np.asarray(ids)
        if (ids[1:] <= ids[:-1]).any() or (ids[:1] < 0).any() or (ids[-1:] >= len(self)).any():
            raise UsageError(f"ids of samples must be ascending, different and below {len(self)}.")
        counts = np.bincount(self.shard_of(ids), minlength=len(self.shards))
        kept = np.flatnonzero(counts).tolist()
        return replace(
            self,
            shards=tuple(replace(self.shards[i], samples=int(counts[i])) for i in kept),
            offsets=self.offsets.take(ids),
            is_selection=True,
        )

    def where(self, condition: str) -> Index:
        """Return the samples for which a condition on the columns holds; see `conditions`.

        Raises UsageError for a condition that is not valid, or that holds for no sample.
        """
        return self.take(ids_where(self, condition))

    def join(self, table: Any, *, on: str = "key") -> Index:
        """Return the index with the columns of a table in memory; see `wt.join`."""
        return cast(Index, joined(self, as_cells(table), on)[0])

    def sample(self, amount: float, *, seed: int = 0) -> Index:
        """Return a random choice: a share (float in (0, 1]) or a number of samples (int)."""
        return self.take(sample_ids(len(self), amount, seed))

    def split(
        self,
        shares: Mapping[str, float],
        *,
        by: str | None = None,
        stratify: str | None = None,
        seed: int = 0,
    ) -> dict[str, Index]:
        """Return a random part of the samples for each name; together they are all samples.

        shares: share of each part; they add up to 1. by: a column; samples with the same value stay
        in one part, and the shares are met as nearly as whole groups allow. stratify: a column;
        each of its values is shared out alike.
        """
        parts = split_ids(self, shares, by, stratify, seed)
        return {name: self.take(ids) for name, ids in parts.items()}

    def folds(
        self, count: int, *, by: str | None = None, stratify: str | None = None, seed: int = 0
    ) -> Iterator[tuple[Index, Index]]:
        """Return `count` pairs (training, validation) for cross-validation; see `split`.

        Each sample is in the validation part of one pair, and in the training part of the others.
        """
        return (
            (self.take(outside), self.take(inside))
            for outside, inside in fold_ids(self, count, by, stratify, seed)
        )

    def __getitem__(self, key: str | int) -> dict[str, Any]:
        """Return one sample: {"__key__": key, field: bytes}. key: its key, or its number.

        Raises KeyError for an unknown key, IndexError for a number out of range, and ShardError if
        its shard has changed or its bytes are damaged.
        """
        number = number_of(self, key)
        return {"__key__": self.key(number), **dict(self.read([number]))[number]}

    def read(
        self, ids: Sequence[int] | Ints, fields: Collection[str] | None = None
    ) -> Iterator[tuple[int, dict[str, bytes]]]:
        """Yield (id, {field: bytes}) of samples, in the order of `ids` (int64[n]).

        Ascending ids are read forward, and values that lie close together in one request. fields:
        names of those to read; None: all. Raises ShardError for a shard that has changed and for
        bytes with another crc32 than the index says, StorageError for a shard that cannot be read.
        """
        return _read(self, np.asarray(ids, np.int64), fields)

    # Without this, Python would iterate by __getitem__: `list(index)` would read every sample.
    __iter__: ClassVar[None] = None

    @cached_property
    def table(self) -> pa.Table:
        """One row per sample: key, shard, offset and size, those of each field, and the columns."""
        batch, values = self.batch(), [column.values for column in self.columns]
        return pa.Table.from_arrays(
            [*batch.columns[: 4 + 3 * len(self.fields)], *values], batch.schema.names
        )

    def batch(self) -> pa.RecordBatch:
        """Return `table` as one record batch, with the rows of values that lie in files."""
        key, *others = self.offsets.rows.columns
        with suppress(pa.ArrowInvalid):  # some key is not UTF-8, and the column stays binary
            key = key.cast(pa.large_string())
        names = table_names(self.fields, self.offsets.infos)
        return pa.RecordBatch.from_arrays([key, self.words("name"), *others], names=names)

    def words(self, attribute: str) -> pa.DictionaryArray:
        """Return the name, or another attribute, of the shard of each sample."""
        words = pa.array([utf8_text(getattr(s, attribute)) for s in self.shards], pa.string())
        places = pa.array(np.repeat(np.arange(len(self.shards), dtype=np.int32), self.counts))
        return words.dictionary_encode().take(places)

    def to_pandas(self) -> Any:
        """Return `table` as a pandas.DataFrame; classes are categories. Needs pandas."""
        return self.table.to_pandas()


def expected_state(index: Index, shard: Shard) -> str | None:
    """Return the state that a shard must still have when it is read; None if it is unknown.

    "" for a shard with checksums: each of its samples is verified instead.
    """
    return "" if shard.path in index.with_checksums else shard.tag or None


def needs_headers(index: Index, shard: Shard) -> bool:
    """Return whether only headers can prove that a remote shard was not replaced.

    It has neither checksums nor a strong ETag, so a new shard of the same size looks equal.
    """
    return (
        is_remote(shard.path)
        and shard.path not in index.with_checksums
        and not shard.tag.startswith('"')
    )


def join(parts: Sequence[Index]) -> Index:
    """Return several indexes as one, in order.

    Labels are joined by the names of their classes; see `Index.differing`.
    """
    if len(parts) == 1:
        return parts[0]
    sets = [(part.shards[0].shown, part.labels) for part in parts if part.shards]
    labels, differing = joined_labels(sets or [("", parts[0].labels)])
    before = {label: why for part in parts for label, why in part.differing.items()}
    return Index(
        shards=tuple(shard for part in parts for shard in part.shards),
        offsets=Offsets.join([part.offsets for part in parts]),
        labels=labels,
        info=parts[0].info,
        differing=before | differing,
        is_selection=any(part.is_selection for part in parts),
    )


def _read(
    index: Index, numbers: Ints, fields: Collection[str] | None
) -> Iterator[tuple[int, dict[str, bytes]]]:
    """Yield the fields of samples, shard by shard; see `Index.read`."""
    edges = np.flatnonzero(np.diff(index.shard_of(numbers))) + 1
    for part in np.split(numbers, edges) if len(numbers) else ():
        shard, members = index.shard_with(int(part[0])), index.offsets.members_of(part, fields)
        with open_source(shard.path, shard.bytes, expected_state(index, shard)) as source:
            verified = _verified(index, shard, part, members, source)
            counts = np.diff(members.first).tolist()
            for number, count in zip(part.tolist(), counts, strict=True):
                yield number, dict(islice(verified, count))


def _verified(
    index: Index, shard: Shard, ids: Ints, members: Members, source: File
) -> Iterator[tuple[str, bytes]]:
    """Yield (field, bytes) of members of a shard. Raises DamageError for another crc32.

    Members with at most 1 MiB between them come by one request to a server.
    """
    stop = members.offset + members.size
    between = members.offset[1:] - stop[:-1]
    is_last = np.append((between < 0) | (between > _GAP), True)[: len(stop)]  # of a request
    lasts = stop[is_last].repeat(np.diff(np.flatnonzero(is_last), prepend=-1))
    columns = (ids[members.row], members.field, members.offset, members.size, members.crc, lasts)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    for number, field_number, offset, size, crc, last in rows:
        name, value = index.fields[field_number], bytearray(size)
        source.read_into(memoryview(value), offset, last=last)
        if crc and crc32(value) != crc:
            raise DamageError(
                f"{shard.shown}: the field {name} of sample {printable(index.key(number))} at "
                f"offset {offset} has another crc32 than the index says.",
                "Run: wdstrain verify",
            )
        yield name, bytes(value)
