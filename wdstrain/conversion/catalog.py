"""Catalogs of numbered samples, from which shards are planned before bytes are read.

A catalog holds arrays of integers, and fetches the bytes of a group of samples in the order in
which they lie on the disk. A `FileCatalog` holds samples of files. An `IndexCatalog` holds samples
that lie in tars: existing shards, the files of an external shuffle, re-encoded images. Both have

* sizes: int64[n], bytes of each sample in a shard
* renamed: by number, {"key": ..., "name": ...} of a sample whose key is not its name in the source
* fetch_bytes: bytes to fetch at a time
* identity(numbers): a hash of what samples consist of, without reading it
* fetch(numbers): key and parts of samples, or the error of a sample that cannot be read
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from wdstrain.conversion.listing import BadSample, Part, Piece, Sample
from wdstrain.errors import SampleError
from wdstrain.order.rng import bits
from wdstrain.shards.index import Index
from wdstrain.shards.offsets import Ints
from wdstrain.shards.tar_headers import member_size

U64 = npt.NDArray[np.uint64]
Renamed = dict[int, dict[str, str]]
Fetched = tuple[str, list[Part] | SampleError]


# --- properties that are known before bytes are copied -------------------------------------------


class SampleMeta(NamedTuple):
    """Properties of n samples, as arrays.

    rank: position in a shuffle. side: hash that decides the split, equal for samples of one group
    and for samples of equal images. split, stratum: places in `splits` and `strata`. grouped: the
    user named groups.
    """

    rank: U64
    side: U64
    split: npt.NDArray[np.int32]
    stratum: npt.NDArray[np.int32]
    splits: Sequence[str]
    strata: Sequence[str]
    grouped: bool

    @property
    def arrays(self) -> tuple[npt.NDArray[Any], ...]:
        return self[:4]

    def take(self, numbers: Ints) -> SampleMeta:
        """Return the properties of some samples."""
        pairs = zip(self._fields, self.arrays, strict=False)
        chosen: dict[str, Any] = {name: values[numbers] for name, values in pairs}
        return self._replace(**chosen)


def text_hash(seed: int, text: str) -> int:
    """Return a seeded 64-bit hash of a string."""
    data = f"pack\x1f{seed}\x1f{text}".encode("utf-8", "surrogateescape")
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")


class MetaBuilder:
    """Collects the properties of samples that are added one after another."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._rank, self._groups = array("Q"), array("Q")
        self._split, self._stratum = array("i"), array("i")
        self._splits, self._strata = dict[str, int](), dict[str, int]()  # numbers of names
        self._grouped = False

    def add(self, key: str, sample: Sample) -> int:
        """Add a sample and return its rank."""
        rank, group = text_hash(self._seed, key), sample.group or sample.identity
        self._rank.append(rank)
        self._groups.append(rank if group in ("", key) else text_hash(self._seed, group))
        self._grouped = self._grouped or bool(sample.group)
        self._split.append(self._splits.setdefault(sample.split, len(self._splits)))
        self._stratum.append(self._strata.setdefault(sample.stratum, len(self._strata)))
        return rank

    def finish(self) -> SampleMeta:
        """Return the properties of all samples that were added.

        The side is independent of the shuffle's rank. Without groups it also depends on the split
        that the sample comes from. The samples of `train` were chosen by this very hash, so without
        that a second split of them would be uneven.
        """
        groups, split = np.array(self._groups, np.uint64), np.array(self._split, np.int32)
        side = np.zeros(len(groups), np.uint64)
        for name, code in self._splits.items():
            mine = split == code
            side[mine] = bits(groups[mine], "side", "" if self._grouped else name)
        rank, stratum = np.array(self._rank, np.uint64), np.array(self._stratum, np.int32)
        names = tuple(self._splits), tuple(self._strata)
        return SampleMeta(rank, side, split, stratum, *names, self._grouped)


# --- catalogs ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FileCatalog:
    """Samples whose parts are bytes and files. items: with the `Piece` of each file."""

    name: str
    items: Sequence[Sample]
    meta: SampleMeta
    sizes: Ints
    renamed: Renamed
    # Stays in the processor's cache until it is written: a third faster than 256 MB.
    fetch_bytes: ClassVar = 512 << 10

    def keys(self, numbers: Ints) -> list[str]:
        return [str(self.items[number].key) for number in numbers.tolist()]

    def identity(self, numbers: Ints) -> bytes:
        hashed = blake2b(digest_size=16)
        for item in map(self.items.__getitem__, numbers.tolist()):
            hashed.update(repr(item[:2]).encode())
        return hashed.digest()

    def bad(self, number: int, reason: str) -> BadSample:
        return bad_file(self.name, self.items[number], reason)

    def fetch(self, numbers: Ints) -> list[Fetched]:
        fetched = {number: _fetched(self.items[number]) for number in np.sort(numbers).tolist()}
        return [fetched[number] for number in numbers.tolist()]


def _fetched(item: Sample) -> Fetched:
    try:
        parts = [(f, p if isinstance(p, bytes) else _contents(*p)) for f, p in item.parts]
    except SampleError as error:
        return str(item.key), error
    return str(item.key), parts


def bad_file(source: str, item: Sample, reason: str) -> BadSample:
    """Return a sample of files that cannot be packed; it is named by its first file."""
    contents = [part for _, part in item.parts if not isinstance(part, bytes)]
    path = contents[0] if contents else str(item.key)
    return BadSample(source, item.row, path if isinstance(path, str) else path[0], reason)


def with_pieces(item: Sample) -> tuple[Sample, int]:
    """Return the sample with its files as pieces, and its bytes in a shard.

    Raises SampleError for a file that is empty or cannot be read.
    """
    parts, total = [], 0
    for field, part in item.parts:
        content = _piece(part) if isinstance(part, str) else part
        size = content[1] if isinstance(content, tuple) else len(content)
        total += member_size(f"{item.key}.{field}", size)
        parts.append((field, content))
    return item._replace(parts=parts), total


def _piece(path: str) -> Piece:
    try:
        status = os.stat(path)
    except OSError as error:
        raise SampleError(f"it cannot be read ({error.strerror})") from error
    if status.st_size == 0:
        raise SampleError("it has 0 bytes")
    return path, status.st_size, status.st_mtime_ns


def _contents(path: str, size: int, mtime_ns: int) -> bytes:
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


@dataclass(frozen=True)
class IndexCatalog:
    """Samples that lie in shards, or in files like shards without an end marker."""

    name: str
    index: Index
    meta: SampleMeta
    renamed: Renamed
    fetch_bytes: ClassVar = 1 << 62  # as much as memory allows: fewer passes over each file

    @property
    def sizes(self) -> Ints:
        return self.index.offsets.size

    def bad(self, number: int, reason: str) -> BadSample:
        row = self.renamed.get(number)
        return BadSample(self.name, 0, row["name"] if row else self.index.key(number), reason)

    def keys(self, numbers: Ints) -> list[str]:
        return self.index.keys(numbers)

    def identity(self, numbers: Ints) -> bytes:
        members, fields = self.index.offsets.members_of(numbers), self.index.fields
        hashed = blake2b(repr((self.index.keys(numbers), fields)).encode(), digest_size=16)
        for values in (members.first, members.field, members.size, members.crc):
            hashed.update(values.tobytes())
        return hashed.digest()

    def fetch(self, numbers: Ints) -> list[Fetched]:
        fetched = {n: list(parts.items()) for n, parts in self.index.read(np.sort(numbers))}
        pairs = zip(self.index.keys(numbers), numbers.tolist(), strict=True)
        return [(key, fetched[number]) for key, number in pairs]


Catalog = FileCatalog | IndexCatalog
