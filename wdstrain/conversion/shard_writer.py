"""Writer of one shard: under a temporary name, flushed to the disk, then renamed.

File bytes are copied verbatim. The crc32 of each member is computed here, the sha256 of the shard
in a second thread. Beside each shard its part of the index is stored with the identity of its
samples, so that `resume` recognizes the shards that need not be written again.
"""

from __future__ import annotations

import hashlib
import os
import uuid
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from time import perf_counter

import numpy as np
from isal.isal_zlib import crc32

from wdstrain.conversion.catalog import Catalog, Fetched
from wdstrain.conversion.images import Recipe
from wdstrain.conversion.listing import BadSample, BadSamples, Part
from wdstrain.conversion.shard_plan import PlannedShard
from wdstrain.errors import SampleError, ShardError, StorageError
from wdstrain.runtime.machine import collector_paused
from wdstrain.shards.columns import ColumnBuilder
from wdstrain.shards.index import Index, Shard
from wdstrain.shards.index_io import pack_part, unpack_part
from wdstrain.shards.offsets import Ints, OffsetsBuilder
from wdstrain.shards.tar_headers import BLOCK, END, header
from wdstrain.storage.files import disk_errors, publish, sync_folder, write_whole

_PADDING = [bytes(-size % BLOCK) for size in range(BLOCK)]  # by the size modulo a block

_CHUNK = 2 << 20  # bytes collected before they are written and hashed
_SLOW = 40e6  # bytes/s; files of 7 KB: 250e6 from memory, 70e6 from an SSD, 1e6 from a hard disk
TEMPORARY = ".tmp"  # ending of a shard that is being written
PART = ".part"  # ending of the file with a shard's part of the index, until the conversion ends

Tick = Callable[[int, int], None]  # samples and bytes of this shard so far


class IndexBuilder(OffsetsBuilder):
    """Offsets of samples that are written one after another."""

    def add(self, key: str, parts: Sequence[Part], start: int | None = None) -> list[bytes]:
        """Return the bytes of a sample: header, data and padding of each member.

        start: its offset (default: after the last sample).
        """
        first = stop = self.stop if start is None else start
        made: list[bytes] = []
        members = []
        for field, data in parts:
            size = len(data)
            head = header(f"{key}.{field}", size)
            fill = _PADDING[size % BLOCK]
            made += (head, data, fill)
            stop += len(head)
            members.append((field, stop, size, crc32(data)))
            stop += size + len(fill)
        self.put(key, first, stop, members)
        return made


@dataclass(frozen=True)
class Packed:
    """A written shard: its index, the numbers of its samples, and the samples that were skipped.

    is_kept: an earlier run wrote it.
    """

    index: Index
    numbers: Ints
    bad: list[BadSample]
    is_kept: bool = False


def identity(shard: PlannedShard, catalog: Catalog, recipe: Recipe, collect: bool) -> str:
    """Return a hash of everything that the bytes of a shard depend on."""
    words = f"2 {shard.name} {recipe} {collect}".encode()
    return hashlib.blake2b(catalog.identity(shard.numbers) + words, digest_size=16).hexdigest()


def kept(folder: str, shard: PlannedShard, mark: str) -> Packed | None:
    """Return a shard that an earlier run wrote, if it is complete and of the same samples."""
    path = os.path.join(folder, shard.name)
    try:
        with open(path + PART, "rb") as file:
            index, extra = unpack_part(file.read(), path)
        if extra["identity"] != mark or os.stat(path).st_size != index.shards[0].bytes:
            return None
        bad = [BadSample(*row) for row in extra["bad"]]
        numbers = shard.numbers[np.array(extra["places"], np.int64)]
        return Packed(index, numbers, bad, is_kept=True)
    except (OSError, ShardError, ValueError, KeyError, TypeError, IndexError, OverflowError):
        return None  # it is written again


def write_shard(
    folder: str,
    catalog: Catalog,
    recipe: Recipe,
    shard: PlannedShard,
    tick: Tick,
    *,
    collect: bool,
    memory: int,
    resume: bool,
) -> Packed:
    """Write a shard. collect: skip bad samples; otherwise the first one ends the shard.

    memory: bytes of samples held at a time to put them in order. resume: keep the shard if an
    earlier run wrote it of the same samples.
    """
    mark = identity(shard, catalog, recipe, collect)
    part = kept(folder, shard, mark) if resume else None
    if part is not None:
        tick(len(part.numbers), int(catalog.sizes[part.numbers].sum()))
        return part
    path, bad = os.path.join(folder, shard.name), BadSamples(collect=collect)
    advice = "Free some space or choose another folder, then continue with resume=True."
    with disk_errors(path, advice), collector_paused():
        with suppress(FileNotFoundError):  # it describes the shard that is about to be replaced
            os.unlink(path + PART)
            sync_folder(folder)
        with ShardFile(path, shard.split, tick) as file:
            for place, (key, parts) in enumerate(_fetched(shard.numbers, catalog, memory)):
                try:
                    if isinstance(parts, SampleError):
                        raise parts
                    file.add(key, recipe.apply(parts), place)
                except SampleError as error:
                    bad.put(catalog.bad(int(shard.numbers[place]), str(error)))
            index = file.finish()
    places = file.places.tolist()
    extra = {"identity": mark, "places": places, "bad": bad.bad}
    write_whole(path + PART, pack_part(index, extra))
    return Packed(index, shard.numbers[places], bad.bad)


class ShardFile:
    """A shard that is written sample by sample. It is complete, or missing after an error.

    Leaving the `with` block without `finish` removes what was written.
    """

    def __init__(self, path: str, split: str, tick: Tick | None = None) -> None:
        """tick: is called whenever samples were written to the disk. Raises OSError."""
        self._path, self._split, self._tick = path, split, tick
        self.places = array("q")
        # A unique name: on a cluster, a node that was given up may still write the same shard.
        name = f".{os.path.basename(path)}.{uuid.uuid4().hex[:12]}{TEMPORARY}"
        self._temporary = os.path.join(os.path.dirname(path), name)
        self._rows, self._columns = IndexBuilder(), ColumnBuilder(own_names=True)
        self._chunk: list[bytes] = []
        self._written = 0
        self._file = FileIO(self._temporary, "w")
        self._hash, self._hasher = hashlib.sha256(), ThreadPoolExecutor(1)
        self._hashed: Future[None] | None = None  # of the last chunk that was written

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def bytes(self) -> int:
        """Bytes of its samples so far."""
        return self._rows.stop

    def add(self, key: str, parts: Sequence[Part], place: int = 0) -> None:
        """Add a sample. place: its number for the caller, kept in `places`."""
        self._chunk += self._rows.add(key, parts)
        self._columns.add(parts)
        self.places.append(place)
        if self._rows.stop - self._written >= _CHUNK:
            self._flush()

    def finish(self) -> Index:
        """Give the shard its name and return its index. Raises OSError."""
        self._chunk.append(END)
        self._flush()
        self._wait_for_hash()
        self._file.close()
        publish(self._temporary, self._path)
        size = self._rows.stop + len(END)
        return Index(
            (Shard(self._path, len(self._rows), size, self._split, self._hash.hexdigest()),),
            self._rows.offsets().with_columns(self._columns.finish()),
        )

    def __enter__(self) -> ShardFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._hasher.shutdown(wait=True)
        with suppress(OSError):
            os.unlink(self._temporary)

    def _flush(self) -> None:
        data = memoryview(b"".join(self._chunk))
        self._chunk, self._written = [], self._rows.stop
        self._wait_for_hash()
        self._hashed = self._hasher.submit(self._hash.update, data)
        while data:
            data = data[self._file.write(data) :]
        if self._tick is not None:
            self._tick(len(self), self._written)

    def _wait_for_hash(self) -> None:
        """Wait for the thread that computes the sha256, which is at most one chunk behind."""
        if self._hashed is not None:
            self._hashed.result()


def write_samples(
    path: str,
    split: str,
    samples: Iterable[tuple[str, list[Part]]],
    tick: Tick,
) -> Index:
    """Write a shard of these samples, (key, parts) each, and return its index. Raises OSError."""
    with ShardFile(path, split, tick) as shard:
        for key, parts in samples:
            shard.add(key, parts)
        return shard.finish()


def _fetched(numbers: Ints, catalog: Catalog, memory: int) -> Iterator[Fetched]:
    """Yield key and parts of each sample, in order, or its error.

    Samples are fetched in groups, within a group as they lie on the disk. Groups are small while
    bytes come from the page cache, and grow up to the memory limit where a disk is slow.
    """
    stops, place, filled = np.cumsum(catalog.sizes[numbers]), 0, 0
    together = min(memory, catalog.fetch_bytes)
    while place < len(numbers):
        stop = max(place + 1, int(np.searchsorted(stops, filled + together, side="right")))
        begun = perf_counter()
        try:
            fetched = catalog.fetch(numbers[place:stop])
        except OSError as error:  # of the source, not of the disk that is written to
            raise StorageError(
                f"{error.filename or 'the source'} cannot be read: {error.strerror}."
            ) from error
        before, filled = filled, int(stops[stop - 1])
        if filled - before < _SLOW * (perf_counter() - begun):
            together = min(memory, 4 * together)
        yield from fetched
        place = stop
