"""Writer of one shard: under a temporary name, flushed to the disk, then renamed.

File bytes are copied verbatim. The crc32 of each member is computed here, the sha256 of the shard
in a second thread. Beside each shard its part of the index is stored with the identity of its
samples, so that `resume` recognizes the shards that need not be written again.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import numpy as np
from isal.isal_zlib import crc32

from wdstrain.conversion.catalog import Catalog, Fetched
from wdstrain.conversion.images import Recipe
from wdstrain.conversion.listing import BadSample, BadSamples, Part
from wdstrain.conversion.options import Options
from wdstrain.conversion.shard_plan import PlannedShard
from wdstrain.conversion.shard_pool import Progress, Tick, run
from wdstrain.errors import SampleError, ShardError
from wdstrain.runtime.machine import collector_paused
from wdstrain.runtime.options import as_bytes
from wdstrain.shards.columns import ColumnBuilder
from wdstrain.shards.index import Index, Shard
from wdstrain.shards.index_io import pack_part, unpack_part
from wdstrain.shards.offsets import Ints, OffsetsBuilder
from wdstrain.shards.tar_headers import BLOCK, END, header
from wdstrain.storage.files import disk_errors, put_whole, sync_folder, write_whole

_PADDING = [bytes(-size % BLOCK) for size in range(BLOCK)]  # by the size modulo a block

_CHUNK = 2 << 20  # bytes collected before they are written and hashed
_SLOW = 40e6  # bytes/s; files of 7 KB: 250e6 from memory, 70e6 from an SSD, 1e6 from a hard disk
_TEMPORARY = ".tmp"  # ending of a file that is being written
_PART = ".part"  # ending of the file with a shard's part of the index, until the conversion ends


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


def write_shards(
    catalog: Catalog,
    recipe: Recipe,
    folder: str,
    plan: Sequence[PlannedShard],
    options: Options,
    bad: BadSamples,
    report: Progress,
) -> Generator[Packed, None, None]:
    """Yield the shards in order as they are written; with `resume`, existing ones are kept."""
    jobs = min(max(1, len(plan)), options.processes(int(catalog.sizes.sum())))
    memory = max(1 << 20, as_bytes(options.memory) // (8 * jobs))
    collect, resume = bad.collect, options.resume
    write = partial(
        _write_shard, folder, catalog, recipe, collect=collect, memory=memory, resume=resume
    )
    try:
        with closing(run(write, plan, jobs, report, engine=options.engine)) as results:
            for packed in results:
                bad.bad += packed.bad
                yield packed
    finally:
        for name in os.listdir(folder):
            if name.endswith(_TEMPORARY):  # of a worker that was killed
                os.unlink(os.path.join(folder, name))


def _write_shard(
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
    path, bad = os.path.join(folder, shard.name), BadSamples(collect=collect)
    # Everything that the bytes of the shard depend on.
    words = f"2 {shard.name} {recipe} {collect}".encode()
    mark = hashlib.blake2b(catalog.identity(shard.numbers) + words, digest_size=16).hexdigest()
    if resume and (part := _kept(path, shard, mark)) is not None:
        tick(len(part.numbers), int(catalog.sizes[part.numbers].sum()))
        return part
    places = array("q")

    def good() -> Iterator[tuple[str, list[Part]]]:
        for place, (key, parts) in enumerate(_fetched(shard.numbers, catalog, memory)):
            try:
                if isinstance(parts, SampleError):
                    raise parts
                packed = recipe.apply(parts)
            except SampleError as error:
                bad.put(catalog.bad(int(shard.numbers[place]), str(error)))
            else:
                places.append(place)
                yield key, packed

    advice = "Free some space or choose another folder, then continue with resume=True."
    with disk_errors(path, advice), collector_paused():
        with suppress(FileNotFoundError):  # it describes the shard that is about to be replaced
            os.unlink(path + _PART)
            sync_folder(folder)
        index = write_samples(path, shard.split, good(), tick, advice)
    extra = {"identity": mark, "places": places.tolist(), "bad": bad.bad}
    write_whole(path + _PART, pack_part(index, extra))
    return Packed(index, shard.numbers[places], bad.bad)


def _kept(path: str, shard: PlannedShard, mark: str) -> Packed | None:
    """Return a shard that an earlier run wrote, if it is complete and of the same samples."""
    with suppress(OSError, ShardError, ValueError, KeyError, TypeError, IndexError, OverflowError):
        with open(path + _PART, "rb") as file:
            index, extra = unpack_part(file.read(), path)
        if extra["identity"] == mark and os.stat(path).st_size == index.shards[0].bytes:
            numbers = shard.numbers[np.array(extra["places"], np.int64)]
            return Packed(index, numbers, [BadSample(*row) for row in extra["bad"]], is_kept=True)
    return None  # it is written again


def write_samples(
    path: str,
    split: str,
    samples: Iterable[tuple[str, list[Part]]],
    tick: Tick,
    advice: str = "Free some space, or choose another folder.",
) -> Index:
    """Write a shard of these samples, (key, parts) each, and return its index.

    tick: is called after each write. Raises StorageError with this advice for a full disk.
    """
    rows, columns, digest = IndexBuilder(), ColumnBuilder(own_names=True), hashlib.sha256()
    with put_whole(path, advice) as file, ThreadPoolExecutor(1) as hasher:
        hashed = hasher.submit(digest.update, b"")
        for chunk in _chunks(samples, rows, columns, tick):
            hashed.result()  # the thread is at most one chunk behind
            hashed = hasher.submit(digest.update, chunk)
            file.write(chunk)
    shard = Shard(path, len(rows), rows.stop + len(END), split, digest.hexdigest())
    return Index((shard,), rows.offsets().with_columns(columns.finish()))


def _chunks(
    samples: Iterable[tuple[str, list[Part]]],
    rows: IndexBuilder,
    columns: ColumnBuilder,
    tick: Tick,
) -> Iterator[bytes]:
    """Yield the bytes of a shard, and add its samples to rows and columns."""
    chunk, count, written = list[bytes](), 0, 0
    for key, parts in samples:
        chunk += rows.add(key, parts)
        columns.add(parts)
        if rows.stop - written >= _CHUNK:
            yield b"".join(chunk)
            tick(len(rows) - count, rows.stop - written)
            chunk, count, written = [], len(rows), rows.stop
    yield b"".join([*chunk, END])
    tick(len(rows) - count, rows.stop - written)


def _fetched(numbers: Ints, catalog: Catalog, memory: int) -> Iterator[Fetched]:
    """Yield key and parts of each sample, in order, or its error.

    Samples are fetched in groups, within a group as they lie on the disk. Groups are small while
    bytes come from the page cache, and grow up to the memory limit where a disk is slow.
    """
    together = min(memory, catalog.fetch_bytes)
    while len(numbers):
        stops = np.cumsum(catalog.sizes[numbers])
        count = max(1, int(np.searchsorted(stops, together, side="right")))
        begun = perf_counter()
        fetched = catalog.fetch(numbers[:count])
        if stops[count - 1] < _SLOW * (perf_counter() - begun):
            together = min(memory, 4 * together)
        yield from fetched
        numbers = numbers[count:]
