"""What is known of a set of shards without reading them.

Two files beside the shards. `index.json` is for people and other tools (a superset of the `wids-shard-index-v1` list):
per shard its name, split, samples, bytes and sha256; per set the fields, labels with their classes, and how it was
made. `index.bin` holds, for each sample, its key and where each field lies, as plain little-endian arrays that are
memory-mapped, so that a million samples open in milliseconds. Both carry the same `id`; a pair that does not belong
together is refused. The JSON is written last.

Shards without an index are indexed by a walk over their headers when they are opened (`scan`). Offsets are never
trusted: whatever the arrays say is checked against the size of the shard before a byte is read.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from wdstrain.errors import ShardError, UsageError
from wdstrain.storage import INDEX_NAME, Urls, check_finished, expand, open_source, write_whole
from wdstrain.tar import Sample, Walk, samples

Ints = npt.NDArray[np.int64]

BIN_NAME = "index.bin"
_MAGIC = b"WDSTRAIN-INDEX-1\n"
# name, dtype, and whether its length follows the samples (n), samples + 1, members or key bytes
_ARRAYS = {
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
    """One tar: where it is and what it holds. `sha256` is empty where the shard was only walked over, not read."""

    path: str
    samples: int
    bytes: int
    split: str = ""
    sha256: str = ""

    @property
    def name(self) -> str:
        return os.path.basename(self.path)


@dataclass(frozen=True)
class Label:
    """A column that training can aim at, and where its value lies: `field`, and `column` in it if that is JSON."""

    name: str
    kind: str  # "class": value is a number or one of `classes`; "number": a float
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
        raw = [sample.key.encode("utf-8", "surrogateescape") for sample in found]
        members = [member for sample in found for member in sample.fields]
        return cls(
            start=np.array([s.start for s in found], np.int64),
            stop=np.array([s.stop for s in found], np.int64),
            key_first=_firsts([len(key) for key in raw]),
            member_first=_firsts([len(s.fields) for s in found]),
            member_field=np.array([numbers[name] for name, _, _ in members], np.uint16),
            member_offset=np.array([offset for _, offset, _ in members], np.int64),
            member_size=np.array([size for _, _, size in members], np.int64),
            member_crc=np.array(crcs, np.uint32),
            keys=np.frombuffer(b"".join(raw), np.uint8),
        )

    @classmethod
    def join(cls, tables: Sequence[Table]) -> Table:
        """Tables one after another. Checksums are kept only if all have them."""
        if len(tables) == 1:
            return tables[0]
        parts = {name: np.concatenate([getattr(t, name) for t in tables]) for name in _ARRAYS if "first" not in name}
        for name in ("key_first", "member_first"):
            parts[name] = _firsts(np.concatenate([np.diff(getattr(t, name)) for t in tables]))
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

    def __repr__(self) -> str:
        size = sum(shard.bytes for shard in self.shards)
        return f"Index({len(self)} samples, {len(self.shards)} shards, {size / 1e6:.1f} MB, fields {', '.join(self.fields)})"

    @cached_property
    def counts(self) -> Ints:
        """Samples of each shard. int64[shards]"""
        return np.array([shard.samples for shard in self.shards], np.int64)

    @cached_property
    def first(self) -> Ints:
        """Id of the first sample of each shard, and the number of samples. int64[shards + 1]"""
        return _firsts(self.counts)

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
        tables = [self.table.cut(int(self.first[i]), int(self.first[i + 1])) for i in wanted]
        return replace(self, shards=tuple(self.shards[i] for i in wanted), table=Table.join(tables or [self.table.cut(0, 0)]))

    def save(self, folder: str) -> None:
        """Write index.bin and then index.json into the folder of the shards."""
        arrays = {name: np.ascontiguousarray(getattr(self.table, name), dtype) for name, dtype in _ARRAYS.items()}
        body = b"".join(array.tobytes() for array in arrays.values())
        layout = {name: len(array) for name, array in arrays.items()}
        head = {"id": blake2b(body, digest_size=8).hexdigest(), "lengths": layout}
        document = {
            "__kind__": "wids-shard-index-v1",
            "wids_version": 1,
            "shardlist": [
                {"url": s.name, "nsamples": s.samples, "filesize": s.bytes, "split": s.split, "sha256": s.sha256}
                for s in self.shards
            ],
            "wdstrain": {
                "version": 1,
                "id": head["id"],
                "offsets": BIN_NAME,
                "samples": len(self),
                "fields": list(self.fields),
                "labels": [asdict(label) for label in self.labels],
                "info": self.info,
            },
        }
        line = json.dumps(head).encode() + b"\n"
        line = line[:-1] + b" " * (-(len(_MAGIC) + len(line)) % 64) + b"\n"  # arrays start aligned for the mapping
        write_whole(os.path.join(folder, BIN_NAME), _MAGIC + line + body)
        write_whole(os.path.join(folder, INDEX_NAME), (json.dumps(document, indent=1, ensure_ascii=False) + "\n").encode())


# --- opening ---------------------------------------------------------------------------------------------------------


def open_index(urls: Urls, *, note: Callable[[str], None] | None = None) -> Index:
    """The index of the shards that `urls` mean: read where it lies beside them, made by a walk over headers elsewhere.

    Raises UsageError for addresses that mean nothing, ShardError for shards that are cut, damaged, unfinished or not
    what their index says. `note` is told what a walk costs.
    """
    parts: list[Index] = []
    known: dict[str, Index | None] = {}
    for path in expand(urls):
        folder = os.path.dirname(path)
        check_finished(folder)
        if os.path.basename(path).endswith(".json"):
            parts.append(load(path))
            continue
        if folder not in known:
            beside = os.path.join(folder, INDEX_NAME)
            known[folder] = load(beside, check=False) if os.path.exists(beside) else None
        index = known[folder]
        names = {shard.name: i for i, shard in enumerate(index.shards)} if index else {}
        if index and os.path.basename(path) in names:
            one = index.pick([names[os.path.basename(path)]])
            _check_sizes(one)
            parts.append(one)
        else:
            parts.append(scan([path], note=note))
    return join(parts)


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


def load(path: str, *, check: bool = True) -> Index:
    """Read an index.json and map the offsets beside it. `check` compares the shards' sizes on disk."""
    folder = os.path.dirname(path)
    try:
        with open(path, "rb") as file:
            document = json.load(file)
        ours = document["wdstrain"]
        index = Index(
            shards=tuple(
                Shard(_beside(folder, row["url"]), int(row["nsamples"]), int(row["filesize"]), row["split"], row["sha256"])
                for row in document["shardlist"]
            ),
            fields=tuple(map(str, ours["fields"])),
            table=_map(os.path.join(folder, BIN_NAME), ours["id"]),
            labels=tuple(Label(**{**row, "classes": tuple(row["classes"])}) for row in ours["labels"]),
            info=ours["info"],
        )
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ShardError(
            f"{path} is no index of this package ({type(error).__name__}: {error}). Make one: wdstrain index {folder or '.'}"
        ) from error
    except OSError as error:
        raise ShardError(f"{error.filename or path} cannot be read: {error.strerror}.") from error
    _check_table(index, path)
    if check:
        _check_sizes(index)
    return index


def scan(paths: Iterable[str], *, note: Callable[[str], None] | None = None) -> Index:
    """An index made by walking over the headers of local tars; nothing is known of checksums and labels."""
    fields: list[str] = []
    shards, tables, walk = [], [], Walk()
    for path in paths:
        if path.endswith(".tmp"):
            raise UsageError(f"{path} is a shard that was not finished. Run the conversion again.")
        with open_source(path) as source:
            found = list(samples(source.read, source.size, path, walk))
            shards.append(Shard(path, len(found), source.size))
            tables.append(Table.of(found, fields))
    if note:
        note(f"no index beside {shards[0].name}: walked over the headers of {sum(map(len, tables))} samples")
    info = {"made": "walked over headers", **({"ignored": walk.ignored} if walk.ignored else {})}
    return Index(tuple(shards), tuple(fields), Table.join(tables), info=info)


def one_split(index: Index, urls: Urls) -> Index:
    """The index itself, unless it mixes splits: then UsageError, because training data must not swallow the rest."""
    if len(index.splits) > 1 and isinstance(urls, (str, os.PathLike)):
        folder = os.path.dirname(index.shards[0].path) or "."
        choices = ", ".join(f"{folder}/{split}-*.tar" for split in index.splits)
        raise UsageError(f"{os.fspath(urls)} holds several splits: {', '.join(index.splits)}. Name one of: {choices}")
    return index


# --- parts -----------------------------------------------------------------------------------------------------------


def _firsts(counts: Sequence[int] | Ints) -> Ints:
    out = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=out[1:])
    return out


def _beside(folder: str, name: str) -> str:
    if not isinstance(name, str) or os.path.basename(name) != name or name in ("", ".", ".."):
        raise ValueError(f"a shard named {name!r}; shards lie beside their index")
    return os.path.join(folder, name)


def _map(path: str, wanted: str) -> Table:
    with open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    end = mapped.find(b"\n", len(_MAGIC))
    if mapped[: len(_MAGIC)] != _MAGIC or end < 0:
        raise ValueError(f"{path} does not start as an index")
    head = json.loads(mapped[len(_MAGIC) : end])
    if head["id"] != wanted:
        raise ValueError(f"{path} belongs to another index.json")
    arrays, offset = {}, end + 1
    for name, dtype in _ARRAYS.items():
        arrays[name] = np.frombuffer(mapped, dtype, int(head["lengths"][name]), offset)
        offset += arrays[name].nbytes
    if offset != len(mapped):
        raise ValueError(f"{path} has {len(mapped)} bytes where {offset} were promised")
    return Table(**arrays)


def _check_table(index: Index, path: str) -> None:
    """Refuse offsets that would read outside a shard or an array; numbers from a file are not trusted."""
    t, n = index.table, len(index.table)
    sound = bool((index.counts >= 0).all()) and int(index.counts.sum()) == n
    sound = sound and n == len(t.stop) == len(t.key_first) - 1 == len(t.member_first) - 1
    for firsts, length in ((t.key_first, len(t.keys)), (t.member_first, len(t.member_field))):
        sound = sound and firsts[0] == 0 and firsts[-1] == length and bool((np.diff(firsts) >= 0).all())
    sound = sound and len(t.member_offset) == len(t.member_size) == len(t.member_field)
    sound = sound and len(t.member_crc) in (0, len(t.member_field))
    if sound and n:
        size = np.repeat(np.array([s.bytes for s in index.shards], np.int64), index.counts)
        members = np.diff(t.member_first)
        low, high = np.repeat(t.start, members), np.repeat(t.stop, members)
        sound = bool((t.start >= 0).all() and (t.start < t.stop).all() and (t.stop <= size).all())
        sound = sound and bool((t.member_size >= 0).all() and (t.member_offset >= low).all())
        sound = sound and bool((t.member_size <= high - t.member_offset).all())
        sound = sound and bool((t.member_field < len(index.fields)).all())
    if not sound:
        folder = os.path.dirname(path) or "."
        raise ShardError(
            f"{path} says what cannot be true of its shards; it is damaged. Make it again: wdstrain index {folder}"
        )


def _check_sizes(index: Index) -> None:
    for shard in index.shards:
        try:
            size = os.stat(shard.path).st_size
        except OSError as error:
            raise ShardError(f"{shard.path} is in the index but cannot be found: {error.strerror}. Copy it again.") from error
        if size != shard.bytes:
            folder = os.path.dirname(shard.path) or "."
            raise ShardError(
                f"{shard.path} has {size} bytes, its index says {shard.bytes}: it was cut or changed. Copy or pack it again, "
                f"or accept it as it is: wdstrain index {folder}"
            )
