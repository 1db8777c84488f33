"""Samples of a source as a catalog, from which shards are planned before their bytes are copied.

A catalog holds arrays of integers, and samples whose parts are pieces of files. The files of a
source are such pieces. The bytes of a stream are written into a spool first, which is the first
pass of an external shuffle: each of its files holds a range of shuffle ranks, or of the order of the
source. A shard is then read from one of them or two, forward. Data is written twice in all,
sequentially. Memory holds the write buffers, within `memory`, and about 300 bytes per sample.

A shuffle buffer is not used: its order would depend on its size, and a small one mixes badly.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from copy import copy
from functools import partial
from hashlib import blake2b
from itertools import chain, count, islice
from time import perf_counter
from typing import Any

import numpy as np
from isal.isal_zlib import crc32

from wdstrain.conversion.encode import Pixels, encoded_pixels
from wdstrain.conversion.listing import (
    BadSample,
    BadSamples,
    Keys,
    Part,
    Sample,
    SampleStore,
    Source,
    piece_of,
    tidy,
)
from wdstrain.conversion.options import Options
from wdstrain.conversion.shard_pool import run
from wdstrain.errors import SampleError, StorageError
from wdstrain.order.rng import bits
from wdstrain.runtime.machine import cores
from wdstrain.shards.index import Index
from wdstrain.shards.offsets import Ints
from wdstrain.shards.tar_headers import member_size
from wdstrain.storage.files import disk_errors

_RUN = 256 << 20  # bytes of a file of the spool if the order of the source is kept
_ADVICE = "Free some space, then run this again with {resume}."
_OPTIMAL_FETCH = 512 << 10  # bytes that stay in the processor's cache until they are written
_SLOW = 40e6  # bytes/s; files of 7 KB: 250e6 from memory, 70e6 from an SSD, 1e6 from a hard disk
_BATCH_BYTES, _BATCH = 1 << 20, 256  # bytes and samples that one task encodes
_FEW = 4  # batches; a stream with fewer is encoded by this process

Entry = Sample | BadSample
Fetched = tuple[str, list[Part] | SampleError]


def text_hash(seed: int, text: str) -> int:
    """Return a seeded 64-bit hash of a string."""
    data = f"pack\x1f{seed}\x1f{text}".encode("utf-8", "surrogateescape")
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")


# --- catalogs ------------------------------------------------------------------------------------


class Catalog:
    """Numbered samples, whose parts are bytes and pieces. All are added, then `finish` is called.

    Arrays have a value for each of them. sizes: bytes in a shard, int64. rank: position in a
    shuffle, uint64. side: hash that decides the split, uint64, equal for samples of one group and
    for samples of equal images. split, stratum: numbers in `splits` and `strata`, int32. grouped:
    the user named groups. renamed: by number, {"key": ..., "name": ...} of a sample whose key is
    not its name in the source. has_files: the pieces are the files of the source; otherwise they
    lie in files of the conversion.
    """

    def __init__(self, name: str, seed: int, *, has_files: bool) -> None:
        self.name, self.has_files, self.grouped, self._seed = name, has_files, False, seed
        self.items, self._numbers = SampleStore(), array("Q")  # five numbers of each sample
        self.splits, self.strata = dict[str, int](), dict[str, int]()
        self.renamed = dict[int, dict[str, str]]()

    def add(self, rank: int, sample: Sample, parts: list[tuple[str, Any]]) -> None:
        """Add a sample. rank: hash of its key. parts: bytes and pieces."""
        key, group, size = str(sample.key), sample.group or sample.identity, 0
        if sample.name:
            self.renamed[len(self.items)] = {"key": key, "name": sample.name}
        for field, part in parts:
            size += member_size(f"{key}.{field}", part[1] if isinstance(part, tuple) else len(part))
        side = rank if group in ("", key) else text_hash(self._seed, group)
        split = self.splits.setdefault(sample.split, len(self.splits))
        stratum = self.strata.setdefault(sample.stratum, len(self.strata))
        self._numbers.extend((size, rank, side, split, stratum))
        self.grouped = self.grouped or bool(sample.group)
        self.items.append(Sample(key, parts, row=sample.row, name=sample.name))

    def finish(self) -> Catalog:
        """Make the arrays, and return the catalog.

        The side is independent of the shuffle's rank. Without groups it also depends on the split
        that the sample comes from. The samples of `train` were chosen by this very hash, so without
        that a second split of them would be uneven.
        """
        sizes, rank, side, split, stratum = np.asarray(self._numbers).reshape(-1, 5).T
        for name, code in self.splits.items():
            mine = split == code
            side[mine] = bits(side[mine], "side", "" if self.grouped else name)
        self.sizes, self.rank, self.side = sizes.astype(np.int64), rank.copy(), side.copy()
        self.split, self.stratum = split.astype(np.int32), stratum.astype(np.int32)
        self._numbers = array("Q")
        return self

    def keys(self, numbers: Ints) -> list[str]:
        return [str(self.items[number].key) for number in numbers.tolist()]

    def identity(self, numbers: Ints) -> bytes:
        """Return a hash of what samples consist of, without reading it.

        A file is known by its size and time, bytes in a spool by their size and crc32.
        """
        items = map(self.items.__getitem__, numbers.tolist())
        rows = [
            (
                item.key,
                [(field, part if self.has_files else part[1:3]) for field, part in item.parts],
            )
            for item in items
        ]
        return blake2b(repr(rows).encode(), digest_size=16).digest()

    def fetch(self, numbers: Ints, memory: int) -> Iterator[Fetched]:
        """Yield key and parts of each sample in order, or its error. memory: bytes held at a time.

        Samples are read in groups, within a group as they lie on the disk. Groups are small while
        bytes come from the page cache, and grow up to the memory limit where a disk is slow. Raises
        StorageError for a damaged spool.
        """
        # Of a spool as many as fit: fewer passes over it.
        together = min(memory, _OPTIMAL_FETCH) if self.has_files else memory
        while len(numbers):
            stops = np.cumsum(self.sizes[numbers])
            count = max(1, int(np.searchsorted(stops, together, side="right")))
            begun = perf_counter()
            items = [(number, self.items[number]) for number in np.sort(numbers[:count]).tolist()]
            if not self.has_files:  # each file of the spool is read forward
                items.sort(key=lambda item: item[1].parts[0][1][::3])
            fetched = {number: self._read(item) for number, item in items}
            if stops[count - 1] < _SLOW * (perf_counter() - begun):
                together = min(memory, 4 * together)
            yield from map(fetched.__getitem__, numbers[:count].tolist())
            numbers = numbers[count:]

    def _read(self, item: Sample) -> Fetched:
        """Return key and parts of a sample, or the error of a file that has changed."""
        parts = item.parts
        try:
            return str(item.key), (
                [(f, part if isinstance(part, bytes) else _file(*part)) for f, part in parts]
                if self.has_files
                else _from_spool(parts)
            )
        except SampleError as error:
            return str(item.key), error

    def moved(self, parts: Sequence[Index], at: Ints) -> Catalog:
        """Return the samples after they were written into shards. at: their numbers before."""
        made = copy(self)
        made.items, made.has_files = SampleStore(), False
        for part in parts:
            first, _, field, offset, size, crc = part.offsets.members
            rows = zip(field.tolist(), size.tolist(), crc.tolist(), offset.tolist(), strict=True)
            pieces = [(part.fields[f], (part.shards[0].path, *piece)) for f, *piece in rows]
            for row, key in enumerate(part.keys(np.arange(len(part)))):
                made.items.append(Sample(key, pieces[first[row] : first[row + 1]]))
        made.sizes = np.concatenate([part.offsets.size for part in parts])
        for name in ("rank", "side", "split", "stratum"):
            setattr(made, name, getattr(self, name)[at])
        old = enumerate(at.tolist())
        made.renamed = {n: self.renamed[number] for n, number in old if number in self.renamed}
        return made


def bad_sample(source: str, item: Sample, reason: str, *, has_files: bool) -> BadSample:
    """Return a sample that cannot be packed; one of files is named by its row and first file."""
    if not has_files:
        return BadSample(source, 0, item.name or str(item.key), reason)
    first = next((part for _, part in item.parts if not isinstance(part, bytes)), str(item.key))
    return BadSample(source, item.row, first if isinstance(first, str) else first[0], reason)


def _file(path: str, size: int, mtime_ns: int) -> bytes:
    try:
        data = _read(path, 0, size, beyond=1)  # a file may have grown
        now = os.stat(path)
    except OSError as error:
        raise SampleError(f"it cannot be read ({error.strerror})") from error
    if len(data) != size:
        raise SampleError(f"it had {size} bytes when it was listed and has {now.st_size} now")
    if now.st_mtime_ns != mtime_ns:
        raise SampleError("it was changed since it was listed")
    return data


def _from_spool(pieces: Sequence[tuple[str, Any]]) -> list[Part]:
    """Return the parts of a sample, which lie side by side. Raises StorageError."""
    path, _, _, first = pieces[0][1]
    _, size, _, last = pieces[-1][1]
    try:
        data = _read(path, first, last + size - first)
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror}.", _ADVICE) from error
    parts = [(f, data[at - first : at - first + size]) for f, (_, size, _, at) in pieces]
    if [crc32(part) for _, part in parts] != [piece[2] for _, piece in pieces]:
        raise StorageError(f"{path} has changed since it was written.", _ADVICE)
    return parts


def _read(path: str, start: int, size: int, beyond: int = 0) -> bytes:
    """Return bytes of a file. beyond: of those after them to read, too."""
    fd = os.open(path, os.O_RDONLY)
    try:
        data = os.pread(fd, size + beyond, start)
        # One call returns at most 2 GB, and less from a network file system.
        while len(data) < size and (more := os.pread(fd, size - len(data), start + len(data))):
            data += more
        return data
    finally:
        os.close(fd)


# --- collecting ----------------------------------------------------------------------------------


def collect(
    source: Source,
    spool: str | None,
    options: Options,
    bad: BadSamples,
    progress: Callable[[int, int], None],
    first_key: int = 0,
) -> Catalog:
    """Return the samples of a source, or the first `limit` ones of a source that is read once.

    spool: folder for the bytes of a stream; None: they are not written. first_key: key, as a
    number, of the first sample without a key. progress: receives samples and bytes so far.
    """
    files, keys, numbers = _Spool(spool, options), Keys(), count(first_key)
    catalog = Catalog(source.name, options.seed, has_files=source.has_files)
    firsts: dict[int, str] = {}  # hash of an identity -> key of the first sample that has it
    for entry in source.samples() if source.has_files else _streamed(source, options):
        if isinstance(entry, BadSample):
            bad.put(entry)
            continue
        number = next(numbers)
        name = f"{number:09d}" if entry.key is None else entry.key
        key = keys.key(name)
        sample = entry._replace(key=key, name="" if key == name else entry.name or name)
        rank = text_hash(options.seed, key)
        if source.has_files:
            if sample.identity:
                sample = sample._replace(identity=firsts.setdefault(hash(sample.identity), key))
            try:
                parts = [
                    (field, piece_of(part) if isinstance(part, str) else part)
                    for field, part in sample.parts
                ]
            except SampleError as error:
                bad.put(bad_sample(source.name, sample, str(error), has_files=True))
                continue
        else:
            # A repeated key gets the split of its first sample, as its stored form would.
            sample = sample._replace(identity=sample.identity or tidy(name))
            parts = files.put(rank, sample.parts)
            progress(len(catalog.items) + 1, files.bytes)
        catalog.add(rank, sample, parts)
    files.flush()
    return catalog.finish()


class _Spool:
    """Files for the bytes of a stream. bytes: put so far. folder: None writes nothing."""

    def __init__(self, folder: str | None, options: Options) -> None:
        self._folder, self._shuffle = folder, options.shuffle
        self._most = int(options.memory) // 6  # bytes of all buffers
        self._buffers, self._stops = dict[str, list[bytes]](), dict[str, int]()
        self._held = self.bytes = 0
        for name in os.listdir(folder) if folder is not None else ():
            os.unlink(os.path.join(folder or "", name))

    def put(self, rank: int, parts: Sequence[Part]) -> list[tuple[str, Any]]:
        """Return the parts of a sample as pieces. Raises StorageError."""
        # 256 files: each fits in memory if the stream is below 256 times `memory`.
        number = rank >> 56 if self._shuffle else self.bytes // _RUN
        path, pieces = os.path.join(self._folder or "", f"{number:03d}"), []
        buffer, stop = self._buffers.setdefault(path, []), self._stops.get(path, 0)
        for field, data in parts:
            pieces.append((field, (path, len(data), crc32(data), stop)))
            buffer.append(data)
            stop += len(data)
            self.bytes += len(data)
        self._stops[path] = stop
        if self.bytes - self._held > self._most:
            self.flush()
        return pieces

    def flush(self) -> None:
        """Write all buffers."""
        for path, buffer in sorted(self._buffers.items()) if self._folder is not None else ():
            with disk_errors(path, _ADVICE), open(path, "ab") as file:
                file.writelines(buffer)
        self._buffers.clear()
        self._held = self.bytes


# --- streams -------------------------------------------------------------------------------------


def _streamed(source: Source, options: Options) -> Iterator[Entry]:
    """Yield the entries of a stream in order, as bytes. Worker processes encode its `Pixels`."""
    batches = _batches(source, options.limit)
    head = list(islice(batches, _FEW))
    has_pixels = any(isinstance(part, Pixels) for batch in head for _, part in _parts_of(batch))
    jobs = options.num_workers or (cores() if len(head) == _FEW else 1)
    work = partial(_encode, source.name)
    with closing(run(work, chain(head, batches), jobs if has_pixels else 1)) as results:
        yield from chain.from_iterable(results)


def _batches(source: Source, limit: int | None) -> Iterator[list[Entry]]:
    """Yield the entries up to the good sample number `limit`; the next one is not asked for."""
    batch, size, good = list[Entry](), 0, 0
    for entry in source.samples():
        batch.append(entry)
        good += isinstance(entry, Sample)
        if good == limit:
            break
        size += sum(p.size if isinstance(p, Pixels) else len(p) for _, p in _parts_of([entry]))
        if size >= _BATCH_BYTES or len(batch) == _BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _parts_of(batch: Sequence[Entry]) -> Iterator[tuple[str, Any]]:
    return (part for entry in batch if isinstance(entry, Sample) for part in entry.parts)


def _encode(source: str, batch: list[Entry]) -> list[Entry]:
    """Return samples with bytes in place of `Pixels`; one that its format cannot hold is bad."""
    made = list[Entry]()
    for entry in batch:
        try:
            if isinstance(entry, Sample):
                entry = entry._replace(parts=encoded_pixels(entry.parts))
        except SampleError as error:
            entry = BadSample(source, entry.row, "", str(error))
        made.append(entry)
    return made
