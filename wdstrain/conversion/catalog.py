"""Catalogs of numbered samples, from which shards are planned before bytes are read.

A catalog holds arrays of integers, and fetches the bytes of a group of samples in the order in
which they lie on the disk. A `FileCatalog` holds the samples of a listing. A `SpanCatalog` holds
samples that lie in tars: existing shards, the files of an external shuffle, re-encoded images.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import Protocol

import numpy as np
import numpy.typing as npt

from wdstrain.conversion.listing import BadSample, BadSamples, FileSample, Listing, Part
from wdstrain.conversion.sample_meta import SampleMeta, sample_meta
from wdstrain.errors import SampleError, ShardError
from wdstrain.shards.offsets import Ints, Offsets
from wdstrain.shards.tar_headers import BLOCK, member_size
from wdstrain.storage.local import open_source

_GAP = 64 << 10  # bytes between two samples that are read and dropped, not skipped
_RUN = 8 << 20  # bytes of one read


class Catalog(Protocol):
    """n numbered samples.

    sizes: int64[n], bytes of each sample in a shard. fetch_bytes: bytes to fetch at a time.
    names: name in the source of each sample whose key differs from it, by number.
    """

    fetch_bytes: int
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


class FileCatalog:
    """The samples of a listing. Missing and empty files become bad samples when it is made."""

    # Stays in the processor's cache until it is written: a third faster than 256 MB.
    fetch_bytes = 512 << 10

    def __init__(self, listing: Listing, seed: int, bad_samples: BadSamples) -> None:
        self._name = listing.name
        self._items: list[FileSample] = []
        # Bytes and modification times (ns) of the files of all items; an item's begin at _first.
        self._lengths, self._times, self._first = array("q"), array("q"), array("q", [0])
        sizes = array("q")
        for item in listing.items:
            try:
                lengths, times, size = _sizes(item)
                self._lengths.extend(lengths)
                self._times.extend(times)
                self._first.append(len(self._lengths))
                sizes.append(size)
                self._items.append(item)
            except SampleError as error:
                bad_samples.put(BadSample(listing.name, item.row, _path(item), str(error)))
        self.sizes = np.array(sizes, np.int64)
        self.names = {number: item.name for number, item in enumerate(self._items) if item.name}
        columns = ((i.key, i.split, i.group, i.stratum, i.identity) for i in self._items)
        self.meta = sample_meta(columns, seed)

    def key(self, number: int) -> str:
        return self._items[number].key

    def identity(self, numbers: Ints) -> bytes:
        """Return a hash of the samples: keys, fields, size and time of each file, but no bytes."""
        hashed = blake2b(self.sizes[numbers].tobytes(), digest_size=16)
        hashed.update(self.meta.rank[numbers].tobytes())  # a rank is the hash of a key
        parts: list[tuple[str, bytes | str]] = []
        for number in numbers.tolist():
            files = slice(self._first[number], self._first[number + 1])
            hashed.update(self._lengths[files].tobytes() + self._times[files].tobytes())
            parts += self._items[number].parts
        # Lengths first: without them, two different lists could give the same bytes.
        hashed.update(array("q", [len(content) for _, content in parts]).tobytes())
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
        """Return the parts of samples, read in the order of the listing.

        A sample that cannot be read is returned as its error.
        """
        fetched: list[list[Part] | SampleError] = [[]] * len(numbers)
        asked, items = numbers.tolist(), self._items
        for place in np.argsort(numbers, kind="stable").tolist():
            number = asked[place]
            lengths = self._file_lengths(number)
            try:
                fetched[place] = [
                    (field, part if isinstance(part, bytes) else _contents(part, next(lengths)))
                    for field, part in items[number].parts
                ]
            except SampleError as error:
                fetched[place] = error
        return fetched


class SpanCatalog:
    """Samples that lie in tars, or in files like tars without an end marker.

    file: int32[n], place in `paths` of each sample's file. renamed: keys that replace the samples'
    own, by number. names: as in Catalog, of the renamed samples; callers add others.
    """

    fetch_bytes = 1 << 62  # as much as memory allows: fewer passes over each file

    def __init__(
        self,
        name: str,
        paths: Sequence[str],
        file: npt.NDArray[np.int32],
        table: Offsets,
        meta: SampleMeta,
        renamed: dict[int, str] | None = None,
    ) -> None:
        self.paths, self.file, self.offsets = paths, file, table
        self.meta, self.renamed, self._name = meta, renamed or {}, name
        self.names = {number: self.own_key(number) for number in self.renamed}
        self.sizes = table.size

    def key(self, number: int) -> str:
        return self.renamed.get(number) or self.own_key(number)

    def own_key(self, number: int) -> str:
        return self.offsets.keys_of(np.array([number]))[0]

    def identity(self, numbers: Ints) -> bytes:
        hashed = blake2b(self.sizes[numbers].tobytes(), digest_size=16)
        members = self.offsets.members_of(numbers)
        hashed.update(members.crc.tobytes() + members.size.tobytes())
        words = [
            *map(self.key, numbers.tolist()),
            "",
            *(self.offsets.fields[field] for field in members.field.tolist()),
        ]
        hashed.update("\0".join(words).encode("utf-8", "surrogateescape"))
        hashed.update(np.diff(members.first).tobytes())
        return hashed.digest()

    def member_sizes(self, number: int) -> list[tuple[str, int]]:
        """Return (field, bytes) of each member of a sample."""
        return [(name, size) for name, _, size in self.offsets.members_at(number)]

    def bad(self, number: int, reason: str) -> BadSample:
        return BadSample(self._name, 0, self.names.get(number) or self.key(number), reason)

    def fetch(self, numbers: Ints) -> list[list[Part] | SampleError]:
        """Return the parts of samples, read forward, file by file.

        Raises ShardError if a file is shorter than expected.
        """
        fetched: list[list[Part] | SampleError] = [[]] * len(numbers)
        order = np.lexsort((self.offsets.start[numbers], self.file[numbers]))
        for file in np.unique(self.file[numbers]).tolist():
            places = order[self.file[numbers[order]] == file]
            is_verified = self.offsets.members_of(numbers[places]).crc.all()  # by their source
            with open_source(self.paths[file], state="" if is_verified else None) as source:
                for run in self._runs(numbers, places):
                    start = int(self.offsets.start[numbers[run[0]]])
                    stop = int(self.offsets.stop[numbers[run[-1]]])
                    data = source.read(start, stop - start)
                    if len(data) < stop - start:
                        raise ShardError(
                            f"{self.paths[file]} ends before offset {stop}: it was cut while it "
                            f"was read. Start again."
                        )
                    for place in run.tolist():
                        fetched[place] = self._parts(int(numbers[place]), memoryview(data), start)
        return fetched

    def _runs(self, numbers: Ints, places: Ints) -> Iterable[Ints]:
        """Return groups of places to read at once: close together, and at most `_RUN` bytes."""
        start, stop = self.offsets.start[numbers[places]], self.offsets.stop[numbers[places]]
        cuts, begun = [], int(start[0])
        for i in range(1, len(places)):
            if start[i] - stop[i - 1] > _GAP or stop[i] - begun > _RUN:
                cuts.append(i)
                begun = int(start[i])
        return np.split(places, cuts)

    def _parts(self, number: int, data: memoryview, start: int) -> list[Part]:
        return [
            (name, bytes(data[offset - start : offset - start + size]))
            for name, offset, size in self.offsets.members_at(number)
        ]


def _sizes(item: FileSample) -> tuple[list[int], list[int], int]:
    """Return (bytes of each file, modification times in ns, bytes in a shard) of a sample."""
    lengths: list[int] = []
    times: list[int] = []
    total = 0
    key, plain = item.key, item.key.isascii()
    for field, part in item.parts:
        if isinstance(part, bytes):
            size = len(part)
        else:
            size, changed = _file_size(part)
            times.append(changed)
            lengths.append(size)
        if plain and len(key) + len(field) < 99:
            total += BLOCK + size + -size % BLOCK  # as `member_size` does for a short name
        else:
            total += member_size(f"{key}.{field}", size)
    return lengths, times, total


def _path(item: FileSample) -> str:
    return next((part for _, part in item.parts if isinstance(part, str)), item.key)


def _file_size(path: str) -> tuple[int, int]:
    """Return (bytes, modification time in ns) of a file."""
    try:
        status = os.stat(path)
    except OSError as error:
        raise SampleError(f"it cannot be read ({error.strerror})") from error
    if status.st_size == 0:
        raise SampleError("it has 0 bytes")
    return status.st_size, status.st_mtime_ns


def _contents(path: str, size: int) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY)
        try:
            data = os.read(fd, size + 1)
            # One call returns at most 2 GB, and less from a network file system.
            while len(data) < size and (more := os.read(fd, size - len(data))):
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
