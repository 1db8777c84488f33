"""Writers of shards: one shard of given samples, or the shards of a plan.

A shard is written under a temporary name, flushed to the disk, then renamed. File bytes are copied
verbatim. The crc32 of each member is computed here, the sha256 of the shard in a second thread.
Beside each shard its part of the index is stored with the identity of its samples, so that `resume`
recognizes the shards that need not be written again.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial

import numpy as np
from isal.isal_zlib import crc32

from wdstrain.conversion.collect import Catalog, bad_sample
from wdstrain.conversion.encode import Recipe
from wdstrain.conversion.listing import BadSample, BadSamples, Part
from wdstrain.conversion.options import Options
from wdstrain.conversion.shard_plan import PlannedShard
from wdstrain.conversion.shard_pool import run
from wdstrain.errors import SampleError, ShardError
from wdstrain.runtime.machine import collector_paused
from wdstrain.shards.columns import ColumnBuilder
from wdstrain.shards.index import Index, Shard
from wdstrain.shards.index_io import pack_part, unpack_part
from wdstrain.shards.offsets import Ints, Offsets, Row
from wdstrain.shards.tar_headers import BLOCK, END, header
from wdstrain.storage.files import disk_errors, put_whole, sync, write_whole

_PADDING = [bytes(-size % BLOCK) for size in range(BLOCK)]  # by the size modulo a block

_CHUNK = 2 << 20  # bytes collected before they are written and hashed
_PART = ".part"  # ending of the file with a shard's part of the index, until the conversion ends
_FULL = "Free some space or choose another folder, then continue with {resume}."

Samples = Iterable[tuple[str, Sequence[Part]]]  # key and parts
Progress = Callable[[int, int], None]  # receives samples and bytes so far

# --- one shard ------------------------------------------------------------------------------------


def write_samples(
    path: str,
    split: str,
    samples: Samples,
    advice: str = "Free some space, or choose another folder.",
) -> Index:
    """Write a shard of these samples and return its index.

    Raises StorageError with this advice for a full disk.
    """
    rows, columns, digest = list[Row](), ColumnBuilder(own_names=True), hashlib.sha256()
    with put_whole(path, advice) as file, ThreadPoolExecutor(1) as hasher:
        hashed = hasher.submit(digest.update, b"")
        for chunk in _chunks(samples, rows, columns):
            hashed.result()  # the thread is at most one chunk behind
            hashed = hasher.submit(digest.update, chunk)
            file.write(chunk)
    offsets, end = Offsets.of_samples(rows, columns.finish()), rows[-1][2] if rows else 0
    return Index((Shard(path, len(rows), end + len(END), split, digest.hexdigest()),), offsets)


def _chunks(samples: Samples, rows: list[Row], columns: ColumnBuilder) -> Iterator[bytes]:
    """Yield the bytes of a shard, and add its samples to the rows and columns of its index."""
    chunk, written, stop = list[bytes](), 0, 0
    for key, parts in samples:
        start, members = stop, []
        for field, data in parts:
            size = len(data)
            head, fill = header(f"{key}.{field}", size), _PADDING[size % BLOCK]
            chunk += (head, data, fill)
            stop += len(head)
            members.append((field, stop, size, crc32(data)))
            stop += size + len(fill)
        rows.append((key, start, stop, members))
        columns.add(parts)
        if stop - written >= _CHUNK:
            yield b"".join(chunk)
            chunk, written = [], stop
    yield b"".join([*chunk, END])


# --- planned shards -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Packed:
    """A written shard: its index, the numbers of its samples, and the samples that were skipped.

    is_kept: an earlier run wrote it.
    """

    index: Index
    numbers: Ints
    bad: Sequence[BadSample] = ()
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
    samples = size = 0
    write = partial(
        _write_shard,
        folder,
        catalog,
        recipe,
        collect=bad.collect,
        memory=max(1 << 20, int(options.memory) // (8 * jobs)),
        resume=options.resume,
    )
    try:
        with closing(run(write, plan, jobs, engine=options.engine)) as results:
            for packed in results:
                samples, size = samples + len(packed.numbers), size + packed.index.shards[0].bytes
                report(samples, size)
                bad.bad += packed.bad
                yield packed
    finally:
        for name in os.listdir(folder):  # of a worker that was killed
            if name.endswith(".tmp"):
                os.unlink(os.path.join(folder, name))


def _write_shard(
    folder: str,
    catalog: Catalog,
    recipe: Recipe,
    shard: PlannedShard,
    *,
    collect: bool,
    memory: int,
    resume: bool,
) -> Packed:
    """Write a shard. collect: skip bad samples; otherwise the first one ends the shard.

    memory: bytes of samples held at a time to put them in order. resume: keep the shard if an
    earlier run wrote it of the same samples.
    """
    path, bad, places = os.path.join(folder, shard.name), BadSamples(collect=collect), array("q")
    # Everything that the bytes of the shard depend on.
    words = f"2 {shard.name} {recipe} {collect}".encode()
    mark = hashlib.blake2b(catalog.identity(shard.numbers) + words, digest_size=16).hexdigest()
    if resume and (part := _kept(path, shard, mark)) is not None:
        return part

    def good() -> Iterator[tuple[str, list[Part]]]:
        for place, (key, parts) in enumerate(catalog.fetch(shard.numbers, memory)):
            try:
                if isinstance(parts, SampleError):
                    raise parts
                packed = recipe.apply(parts)
            except SampleError as error:
                item = catalog.items[int(shard.numbers[place])]
                bad.put(bad_sample(catalog.name, item, str(error), has_files=catalog.has_files))
            else:
                places.append(place)
                yield key, packed

    with disk_errors(path, _FULL), suppress(FileNotFoundError):
        os.unlink(path + _PART)  # it describes the shard that is about to be replaced
        sync(folder)
    with collector_paused():
        index = write_samples(path, shard.split, good(), _FULL)
    extra = {"identity": mark, "places": places.tolist(), "bad": bad.bad}
    write_whole(path + _PART, pack_part(index, extra))
    return Packed(index, shard.numbers[places], bad.bad)


def _kept(path: str, shard: PlannedShard, mark: str) -> Packed | None:
    """Return a shard that an earlier run wrote, if it is complete and of the same samples."""
    with suppress(OSError, ShardError, ValueError, KeyError, TypeError, IndexError, OverflowError):
        with open(path + _PART, "rb") as file:
            index, extra = unpack_part(file.read(), path)
        # A shard that is in the bucket already has no file.
        size = os.stat(path).st_size if os.path.exists(path) else index.shards[0].bytes
        if extra["identity"] == mark and size == index.shards[0].bytes:
            numbers = shard.numbers[np.array(extra["places"], np.int64)]
            return Packed(index, numbers, [BadSample(*row) for row in extra["bad"]], is_kept=True)
    return None  # it is written again
