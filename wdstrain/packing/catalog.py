"""Samples by number, before a byte of them is copied: what order, splits and shard boundaries are planned on.

A catalog is arrays of integers beside a way to fetch the bytes of any samples, in the order that is kind to the disk: files
as they were listed, spans of tars by their offset. So a shard of shuffled samples is fetched a group at a time, forward, and
ordered in memory. Listings become catalogs of items; streams, and pictures that were encoded anew, catalogs of spans.
"""

from __future__ import annotations

import os
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

import numpy as np
import numpy.typing as npt

from wdstrain.errors import SampleError, ShardError
from wdstrain.order.rng import bits
from wdstrain.packing.listing import Bad, Item, Listing, Part, Quarantine
from wdstrain.shards.offsets import Ints, Offsets
from wdstrain.shards.tar import BLOCK, member_size
from wdstrain.storage.local import open_source

U64 = npt.NDArray[np.uint64]

_GAP = 64 << 10  # bytes between two spans that are read over rather than jumped
_RUN = 8 << 20  # bytes of one read


@dataclass(frozen=True)
class Marks:
    """What is known of each of n samples. Codes are places in the names.

    rank: uint64[n], where a shuffle puts it; side: uint64[n], where a split puts it; split, stratum: int32[n]. grouped: some
    samples are to come to one side together.
    """

    rank: U64
    side: U64
    split: npt.NDArray[np.int32]
    stratum: npt.NDArray[np.int32]
    splits: tuple[str, ...]
    strata: tuple[str, ...]
    grouped: bool = False

    def take(self, numbers: Ints) -> Marks:
        arrays = (
            self.rank[numbers],
            self.side[numbers],
            self.split[numbers],
            self.stratum[numbers],
        )
        return Marks(*arrays, self.splits, self.strata, self.grouped)


class Catalog(Protocol):
    """n samples. sizes: int64[n], the bytes each takes in a shard; together: the most bytes that are fetched at a time.

    names: number -> what the source calls it, of those whose key is another.
    """

    together: int
    names: dict[int, str]

    @property
    def marks(self) -> Marks: ...
    @property
    def sizes(self) -> Ints: ...
    def key(self, number: int) -> str: ...
    def identity(self, numbers: Ints) -> bytes: ...
    def bad(self, number: int, reason: str) -> Bad: ...
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


class ItemCatalog:
    """The items of a listing. Files that are missing or empty go to the quarantine here, before anything is written.

    alike: number -> its picture, of the items whose picture is that of another item too.
    """

    together = (
        512 << 10
    )  # what stays in the processor's cache until it is written: a third faster than 256 MB

    def __init__(self, listing: Listing, seed: int, quarantine: Quarantine) -> None:
        self._name = listing.name
        self._items: list[Item] = []
        self._lengths: list[int] = []  # of each item's file
        times, sizes = array("q"), array("q")
        for item in listing.items:
            try:
                length, time, size = _sizes(item)
                self._lengths.append(length)
                times.append(time)
                sizes.append(size)
                self._items.append(item)
            except SampleError as error:
                quarantine.put(Bad(listing.name, item.row, _path(item), str(error)))
        self.sizes, self._times = np.array(sizes, np.int64), np.array(times, np.int64)
        self.names = {number: item.name for number, item in enumerate(self._items) if item.name}
        rows = ((item.key, item.split, item.group, item.stratum) for item in self._items)
        self.marks = marks_of(rows, seed, [item.picture for item in self._items])
        counts = Counter(item.picture for item in self._items if item.picture)
        self.alike = {
            number: item.picture
            for number, item in enumerate(self._items)
            if counts[item.picture] > 1
        }

    def key(self, number: int) -> str:
        return self._items[number].key

    def identity(self, numbers: Ints) -> bytes:
        """Hash of what will be packed for these samples, as far as it is known without reading them."""
        hashed = blake2b(
            self.sizes[numbers].tobytes() + self._times[numbers].tobytes(), digest_size=16
        )
        hashed.update(self.marks.rank[numbers].tobytes())  # a rank is the hash of a key
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

    def bad(self, number: int, reason: str) -> Bad:
        item = self._items[number]
        return Bad(self._name, item.row, _path(item), reason)

    def fetch(self, numbers: Ints) -> list[list[Part] | SampleError]:
        """The parts of these samples, read in the order of the listing; an error in the place of one that cannot be read."""
        found: list[list[Part] | SampleError] = [[]] * len(numbers)
        asked, items, lengths = numbers.tolist(), self._items, self._lengths
        for place in np.argsort(numbers, kind="stable").tolist():
            number = asked[place]
            try:
                found[place] = [
                    (field, part if isinstance(part, bytes) else _contents(part, lengths[number]))
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
        marks: Marks,
        renamed: dict[int, str] | None = None,
        names: dict[int, str] | None = None,
    ) -> None:
        self.paths, self.file, self.offsets, self.fields, self.marks = (
            paths,
            file,
            table,
            fields,
            marks,
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

    def bad(self, number: int, reason: str) -> Bad:
        return Bad(self._name, 0, self.names.get(number) or self.key(number), reason)

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


def marks_of(
    rows: Iterable[tuple[str, str, str, str]], seed: int, pictures: Sequence[str] = ()
) -> Marks:
    """Marks of samples from (key, split, group, stratum) of each; a group "" is the sample alone.

    pictures: of each sample, the key of the first with the same picture; those that have no group come to its side.
    """
    ranks, groups = array("Q"), array("Q")
    split, stratum = array("i"), array("i")
    hashes, splits, strata, grouped = Hashes(seed), Codes(), Codes(), False
    for number, (key, split_name, group, stratum_name) in enumerate(rows):
        rank = hashes.of(key)
        ranks.append(rank)
        together = group or (pictures[number] if pictures else "")
        groups.append(hashes.of(together) if together and together != key else rank)
        grouped = grouped or bool(group)
        split.append(splits.of(split_name))
        stratum.append(strata.of(stratum_name))
    codes, names = np.array(split, np.int32), tuple(splits.numbers)
    return Marks(
        np.array(ranks, np.uint64),
        sides_of(np.array(groups, np.uint64), codes, names, grouped),
        codes,
        np.array(stratum, np.int32),
        names,
        tuple(strata.numbers),
        grouped,
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


def _sizes(item: Item) -> tuple[int, int, int]:
    """The bytes of an item's file, the time of its last change in ns, and the bytes the item takes in a shard."""
    length = total = time = 0
    key, plain = item.key, item.key.isascii()
    for field, part in item.parts:
        if isinstance(part, bytes):
            size = len(part)
        else:
            size, time = _file_size(part)
            length = size
        if plain and len(key) + len(field) < 99:
            total += BLOCK + size + -size % BLOCK  # what member_size says of a short name
        else:
            total += member_size(f"{key}.{field}", size)
    return length, time, total


def _path(item: Item) -> str:
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
