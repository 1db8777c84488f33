"""Samples by number, before a byte of them is copied: what order, splits and shard boundaries are planned on.

A catalog is arrays of integers beside a way to fetch the bytes of any samples, in the order that is kind to the disk: files
as they were listed, spans of tars by their offset. So a shard of shuffled samples is fetched a group at a time, forward, and
ordered in memory. Listings become catalogs of items; streams, and pictures that were encoded anew, catalogs of spans.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

import numpy as np
import numpy.typing as npt

from wdstrain.conversion.listing import BadSample, BadSamples, FileSample, Listing, Part
from wdstrain.errors import SampleError, ShardError
from wdstrain.order.rng import bits
from wdstrain.shards.offsets import Ints, Offsets
from wdstrain.shards.tar import BLOCK, member_size
from wdstrain.storage.local import open_source

U64 = npt.NDArray[np.uint64]

_GAP = 64 << 10  # bytes between two spans that are read over rather than jumped
_RUN = 8 << 20  # bytes of one read


@dataclass(frozen=True)
class SampleMeta:
    """What is known of each of n samples. Codes are places in the names.

    rank: uint64[n], where a shuffle puts it. side: uint64[n], where a split puts it; equal for samples of one group.
    image: uint64[n], equal for equal images, 0 where that is not known. split, stratum: int32[n]. grouped: the user
    named groups.
    """

    rank: U64
    side: U64
    image: U64
    split: npt.NDArray[np.int32]
    stratum: npt.NDArray[np.int32]
    splits: tuple[str, ...]
    strata: tuple[str, ...]
    grouped: bool = False

    def take(self, numbers: Ints) -> SampleMeta:
        arrays = (
            self.rank[numbers],
            self.side[numbers],
            self.image[numbers],
            self.split[numbers],
            self.stratum[numbers],
        )
        return SampleMeta(*arrays, self.splits, self.strata, self.grouped)


class Catalog(Protocol):
    """n samples. sizes: int64[n], the bytes each takes in a shard; together: the most bytes that are fetched at a time.

    names: number -> what the source calls it, of those whose key is another.
    """

    together: int
    names: dict[int, str]

    @property
    def meta(self) -> SampleMeta: ...
    @property
    def sizes(self) -> Ints: ...
    def key(self, number: int) -> str: ...
    def identity(self, numbers: Ints) -> bytes: ...
    def member_sizes(self, number: int) -> list[tuple[str, int]]: ...
    def bad(self, number: int, reason: str) -> BadSample: ...
    def fetch(self, numbers: Ints) -> list[list[Part] | SampleError]: ...


class Hashes:
    """Seeded 64-bit hashes of strings."""

    def __init__(self, seed: int) -> None:
        self._base = blake2b(f"pack\x1f{seed}\x1f".encode(), digest_size=8)

    def of(self, text: str) -> int:
        hashed = self._base.copy()
        hashed.update(text.encode("utf-8", "surrogateescape"))
        return int.from_bytes(hashed.digest(), "little")


class Codes:
    """Names to small numbers, in the order of their first coming."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def of(self, name: str) -> int:
        return self.numbers.setdefault(name, len(self.numbers))


class FileCatalog:
    """The samples of a listing. Files that are missing or empty become bad samples before anything is written."""

    together = (
        512 << 10
    )  # what stays in the processor's cache until it is written: a third faster than 256 MB

    def __init__(self, listing: Listing, seed: int, quarantine: BadSamples) -> None:
        self._name = listing.name
        self._items: list[FileSample] = []
        # bytes of the files of all items; an item's begin at _first
        self._lengths, self._first = array("q"), array("q", [0])
        times, sizes = array("q"), array("q")
        for item in listing.items:
            try:
                lengths, time, size = _sizes(item)
                self._lengths.extend(lengths)
                self._first.append(len(self._lengths))
                times.append(time)
                sizes.append(size)
                self._items.append(item)
            except SampleError as error:
                quarantine.put(BadSample(listing.name, item.row, _path(item), str(error)))
        self.sizes, self._times = np.array(sizes, np.int64), np.array(times, np.int64)
        self.names = {number: item.name for number, item in enumerate(self._items) if item.name}
        columns = ((i.key, i.split, i.group, i.stratum, i.identity) for i in self._items)
        self.meta = sample_meta(columns, seed)

    def key(self, number: int) -> str:
        return self._items[number].key

    def identity(self, numbers: Ints) -> bytes:
        """Hash of what will be packed for these samples, as far as it is known without reading them."""
        hashed = blake2b(
            self.sizes[numbers].tobytes() + self._times[numbers].tobytes(), digest_size=16
        )
        hashed.update(self.meta.rank[numbers].tobytes())  # a rank is the hash of a key
        parts = [part for number in numbers.tolist() for part in self._items[number].parts]
        hashed.update(
            array("q", [len(content) for _, content in parts]).tobytes()
        )  # so that no two lists run together alike
        hashed.update(b"\0".join([content for _, content in parts if isinstance(content, bytes)]))
        hashed.update(
            "\0".join([f for f, _ in parts] + [p for _, p in parts if isinstance(p, str)]).encode(
                "utf-8", "surrogateescape"
            )
        )
        return hashed.digest()

    def member_sizes(self, number: int) -> list[tuple[str, int]]:
        """Return (field, bytes) of each member of a sample."""
        lengths = self._file_lengths(number)
        return [
            (field, len(part) if isinstance(part, bytes) else next(lengths))
            for field, part in self._items[number].parts
        ]

    def _file_lengths(self, number: int) -> Iterator[int]:
        """Return an iterator over the bytes of a sample's files."""
        return iter(self._lengths[self._first[number] : self._first[number + 1]])

    def bad(self, number: int, reason: str) -> BadSample:
        item = self._items[number]
        return BadSample(self._name, item.row, _path(item), reason)

    def fetch(self, numbers: Ints) -> list[list[Part] | SampleError]:
        """The parts of these samples, read in the order of the listing; an error in the place of one that cannot be read."""
        found: list[list[Part] | SampleError] = [[]] * len(numbers)
        asked, items = numbers.tolist(), self._items
        for place in np.argsort(numbers, kind="stable").tolist():
            number = asked[place]
            lengths = self._file_lengths(number)
            try:
                found[place] = [
                    (field, part if isinstance(part, bytes) else _contents(part, next(lengths)))
                    for field, part in items[number].parts
                ]
            except SampleError as error:
                found[place] = error
        return found


class SpanCatalog:
    """Samples that lie in tars, or in files of the same shape without an end: file: int32[n], extents and members in table.

    renamed: number -> the key it is packed under instead of its own; names: number -> what the source calls it, if not so.
    """

    together = 1 << 62  # all that memory allows: the more, the fewer times a bucket is gone through

    def __init__(
        self,
        name: str,
        paths: Sequence[str],
        file: npt.NDArray[np.int32],
        table: Offsets,
        fields: Sequence[str],
        meta: SampleMeta,
        renamed: dict[int, str] | None = None,
        names: dict[int, str] | None = None,
    ) -> None:
        self.paths, self.file, self.offsets, self.fields, self.meta = (
            paths,
            file,
            table,
            fields,
            meta,
        )
        self.renamed, self._name = renamed or {}, name
        self.names = {number: self.own_key(number) for number in self.renamed} | (names or {})
        self.sizes = np.asarray(table.stop - table.start, np.int64)

    def key(self, number: int) -> str:
        return self.renamed.get(number) or self.own_key(number)

    def own_key(self, number: int) -> str:
        first, stop = self.offsets.key_first[number : number + 2]
        return self.offsets.keys[first:stop].tobytes().decode("utf-8", "surrogateescape")

    def identity(self, numbers: Ints) -> bytes:
        hashed = blake2b(self.sizes[numbers].tobytes(), digest_size=16)
        first = self.offsets.member_first
        members = [number for n in numbers.tolist() for number in range(*first[n : n + 2].tolist())]
        hashed.update(
            self.offsets.member_crc[members].tobytes() + self.offsets.member_size[members].tobytes()
        )
        words = [
            *map(self.key, numbers.tolist()),
            "",
            *(self.fields[one] for one in self.offsets.member_field[members].tolist()),
        ]
        hashed.update("\0".join(words).encode("utf-8", "surrogateescape"))
        hashed.update(np.diff(first)[numbers].tobytes())
        return hashed.digest()

    def member_sizes(self, number: int) -> list[tuple[str, int]]:
        """Return (field, bytes) of each member of a sample."""
        members = range(*self.offsets.member_first[number : number + 2].tolist())
        return [
            (self.fields[self.offsets.member_field[m]], int(self.offsets.member_size[m]))
            for m in members
        ]

    def bad(self, number: int, reason: str) -> BadSample:
        return BadSample(self._name, 0, self.names.get(number) or self.key(number), reason)

    def fetch(self, numbers: Ints) -> list[list[Part] | SampleError]:
        """The parts of these samples, read forward file by file. Raises ShardError where a file has changed."""
        found: list[list[Part] | SampleError] = [[]] * len(numbers)
        order = np.lexsort((self.offsets.start[numbers], self.file[numbers]))
        for file in np.unique(self.file[numbers]).tolist():
            places = order[self.file[numbers[order]] == file]
            with open_source(self.paths[file]) as source:
                for run in self._runs(numbers, places):
                    start = int(self.offsets.start[numbers[run[0]]])
                    stop = int(self.offsets.stop[numbers[run[-1]]])
                    data = source.read(start, stop - start)
                    if len(data) < stop - start:
                        raise ShardError(
                            f"{self.paths[file]} ends before offset {stop}: it was cut while it was read."
                        )
                    for place in run.tolist():
                        found[place] = self._parts(int(numbers[place]), memoryview(data), start)
        return found

    def _runs(self, numbers: Ints, places: Ints) -> Iterable[Ints]:
        """Places whose spans lie close to each other, of `_RUN` bytes in all at most, or of one span that is longer."""
        start, stop = self.offsets.start[numbers[places]], self.offsets.stop[numbers[places]]
        cuts, begun = [], int(start[0])
        for i in range(1, len(places)):
            if start[i] - stop[i - 1] > _GAP or stop[i] - begun > _RUN:
                cuts.append(i)
                begun = int(start[i])
        return np.split(places, cuts)

    def _parts(self, number: int, data: memoryview, start: int) -> list[Part]:
        table = self.offsets
        parts = []
        for m in range(*table.member_first[number : number + 2].tolist()):
            offset = int(table.member_offset[m]) - start
            parts.append(
                (
                    self.fields[table.member_field[m]],
                    bytes(data[offset : offset + int(table.member_size[m])]),
                )
            )
        return parts


def sample_meta(rows: Iterable[tuple[str, str, str, str, str]], seed: int) -> SampleMeta:
    """Return the meta data of samples from (key, split, group, stratum, identity) of each.

    A sample without a group is grouped with those of its identity, or else alone.
    """
    builder = MetaBuilder(seed)
    for row in rows:
        builder.add(*row)
    return builder.finish()


class MetaBuilder:
    """The meta data of samples that are added one after another."""

    def __init__(self, seed: int) -> None:
        self.hashes = Hashes(seed)
        self._rank, self._groups, self._image = array("Q"), array("Q"), array("Q")
        self._split, self._stratum = array("i"), array("i")
        self._splits, self._strata, self._grouped = Codes(), Codes(), False

    def add(self, key: str, split: str, group: str, stratum: str, identity: str) -> int:
        """Add a sample and return its rank."""
        rank = self.hashes.of(key)
        image = rank if identity == key else self.hashes.of(identity) if identity else 0
        self._rank.append(rank)
        self._image.append(image)
        self._groups.append(self.hashes.of(group) if group else image or rank)
        self._grouped = self._grouped or bool(group)
        self._split.append(self._splits.of(split))
        self._stratum.append(self._strata.of(stratum))
        return rank

    def finish(self) -> SampleMeta:
        """Return the meta data of all samples that were added."""
        codes, splits = np.array(self._split, np.int32), tuple(self._splits.numbers)
        return SampleMeta(
            np.array(self._rank, np.uint64),
            sides_of(np.array(self._groups, np.uint64), codes, splits, self._grouped),
            np.array(self._image, np.uint64),
            codes,
            np.array(self._stratum, np.int32),
            splits,
            tuple(self._strata.numbers),
            self._grouped,
        )


def sides_of(
    groups: U64, split: npt.NDArray[np.int32], splits: Sequence[str], grouped: bool
) -> U64:
    """Where a split puts samples, from the hash of each one's group: not where a shuffle would.

    The splits that samples come from count too: those of `train` were chosen by this hash, and are drawn anew evenly.
    """
    sides = np.zeros(len(groups), np.uint64)
    for code, name in enumerate(splits):
        mine = split == code
        sides[mine] = bits(groups[mine], "side", "" if grouped else name)
    return sides


def _sizes(item: FileSample) -> tuple[list[int], int, int]:
    """Return (bytes of each file, time of the last change in ns, bytes in a shard) of an item."""
    lengths: list[int] = []
    total = time = 0
    key, plain = item.key, item.key.isascii()
    for field, part in item.parts:
        if isinstance(part, bytes):
            size = len(part)
        else:
            size, changed = _file_size(part)
            time = max(time, changed)
            lengths.append(size)
        if plain and len(key) + len(field) < 99:
            total += BLOCK + size + -size % BLOCK  # what member_size says of a short name
        else:
            total += member_size(f"{key}.{field}", size)
    return lengths, time, total


def _path(item: FileSample) -> str:
    return next((part for _, part in item.parts if isinstance(part, str)), item.key)


def _file_size(path: str) -> tuple[int, int]:
    """The bytes of a file and the time of its last change in ns."""
    try:
        found = os.stat(path)
    except OSError as error:
        raise SampleError(f"it cannot be read ({error.strerror})") from error
    if found.st_size == 0:
        raise SampleError("it has 0 bytes")
    return found.st_size, found.st_mtime_ns


def _contents(path: str, size: int) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        try:
            data = os.read(fd, size + 1)
            while len(data) < size and (
                more := os.read(fd, size - len(data))
            ):  # 2 GB at a time; fewer over a network
                data += more
            if len(data) == size:
                return data
            raise SampleError(
                f"it had {size} bytes when it was listed and has {os.fstat(fd).st_size} now"
            )
        finally:
            os.close(fd)
    except OSError as error:
        raise SampleError(f"it cannot be read ({error.strerror})") from error
