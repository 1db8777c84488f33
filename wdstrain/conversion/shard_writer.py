"""Writers of shards: one shard, or many in worker processes or on a Ray cluster.

A shard is written under a temporary name, flushed to the disk, then renamed. File bytes are copied
verbatim. The crc32 of each member is computed here, the sha256 of the shard in a second thread.
Beside each shard its part of the index is stored with the identity of its samples, so that `resume`
recognizes the shards that need not be written again.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import sys
import uuid
import warnings
from array import array
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from time import perf_counter
from typing import Any, TypeVar

import numpy as np
from isal.isal_zlib import crc32

from wdstrain.conversion.catalog import Catalog, Fetched
from wdstrain.conversion.images import Recipe
from wdstrain.conversion.listing import BadSample, BadSamples, Part
from wdstrain.conversion.options import Options
from wdstrain.conversion.shard_plan import PlannedShard
from wdstrain.errors import SampleError, ShardError, UsageError, WdstrainError
from wdstrain.runtime import child_process
from wdstrain.runtime.machine import collector_paused
from wdstrain.runtime.options import as_bytes
from wdstrain.shards.columns import ColumnBuilder
from wdstrain.shards.index import Index, Shard
from wdstrain.shards.index_io import pack_part, unpack_part
from wdstrain.shards.offsets import Ints, OffsetsBuilder
from wdstrain.shards.tar_headers import BLOCK, END, header
from wdstrain.storage.files import disk_errors, publish, sync_folder, write_whole

_PADDING = [bytes(-size % BLOCK) for size in range(BLOCK)]  # by the size modulo a block

_CHUNK = 2 << 20  # bytes collected before they are written and hashed
_SLOW = 40e6  # bytes/s; files of 7 KB: 250e6 from memory, 70e6 from an SSD, 1e6 from a hard disk
_TEMPORARY = ".tmp"  # ending of a file that is being written
_PART = ".part"  # ending of the file with a shard's part of the index, until the conversion ends
_RAY_RETRIES = 5  # of a task whose node or worker process was lost
FULL = "Free some space or choose another folder, then continue with resume=True."

T = TypeVar("T")
R = TypeVar("R")
Tick = Callable[[int, int], None]  # receives samples and bytes done since its last call
Progress = Callable[[int, int], None]  # receives samples and bytes of all tasks so far
Work = Callable[[T, Tick], R]

# --- one shard ------------------------------------------------------------------------------------


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


class ShardFile(ExitStack):
    """A shard that is written sample by sample; the file gets its name when it is finished.

    tick: is called after each write. Raises StorageError with this advice for a full disk.
    """

    def __init__(self, path: str, split: str, tick: Tick, advice: str = FULL) -> None:
        super().__init__()
        self.rows, self._columns = IndexBuilder(), ColumnBuilder(own_names=True)
        self._path, self._split, self._tick = path, split, tick
        self._errors = partial(disk_errors, path, advice)
        # A unique name: on a cluster, a node that was given up may still write the same shard.
        self._temporary = f"{path}.{uuid.uuid4().hex[:12]}{_TEMPORARY}"
        with self._errors():
            self._file = self.enter_context(open(self._temporary, "wb"))  # noqa: SIM115
        self._chunk, self._count, self._written = list[bytes](), 0, 0
        self._digest, self._hasher = hashlib.sha256(), self.enter_context(ThreadPoolExecutor(1))
        self._hashed = self._hasher.submit(self._digest.update, b"")

    def add(self, key: str, parts: Sequence[Part]) -> None:
        """Add a sample."""
        self._chunk += self.rows.add(key, parts)
        self._columns.add(parts)
        if self.rows.stop - self._written >= _CHUNK:
            self._write()

    def finish(self) -> Index:
        """Return the index of the shard, which has its name from now on."""
        self._chunk.append(END)
        self._write()
        with self._errors():
            self.close()
            publish(self._temporary, self._path)
        size, digest = self.rows.stop + len(END), self._digest.hexdigest()
        shard = Shard(self._path, len(self.rows), size, self._split, digest)
        return Index((shard,), self.rows.offsets().with_columns(self._columns.finish()))

    def _write(self) -> None:
        chunk = b"".join(self._chunk)
        self._hashed.result()  # the thread is at most one chunk behind
        self._hashed = self._hasher.submit(self._digest.update, chunk)
        with self._errors():
            self._file.write(chunk)
        self._tick(len(self.rows) - self._count, self.rows.stop - self._written)
        self._chunk, self._count, self._written = [], len(self.rows), self.rows.stop


def write_samples(
    path: str,
    split: str,
    samples: Iterable[tuple[str, list[Part]]],
    tick: Tick,
    advice: str = "Free some space, or choose another folder.",
) -> Index:
    """Write a shard of these samples, (key, parts) each, and return its index.

    tick, advice: see `ShardFile`.
    """
    with ShardFile(path, split, tick, advice) as shard:
        for key, parts in samples:
            shard.add(key, parts)
        return shard.finish()


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
        clear_temporary(folder)  # of a worker that was killed


def clear_temporary(folder: str) -> None:
    """Remove the files of shards that were not finished."""
    for name in os.listdir(folder):
        if name.endswith(_TEMPORARY):
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

    with disk_errors(path, FULL), collector_paused():
        with suppress(FileNotFoundError):  # it describes the shard that is about to be replaced
            os.unlink(path + _PART)
            sync_folder(folder)
        index = write_samples(path, shard.split, good(), tick, FULL)
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


# --- tasks --------------------------------------------------------------------------------------


# --- tasks ----------------------------------------------------------------------------------------


def run(
    work: Work[T, R], tasks: Iterable[T], jobs: int, report: Progress, *, engine: str = "local"
) -> Generator[R, None, None]:
    """Return an iterator over the results of tasks, in order. It raises what a task raises.

    jobs: worker processes, which inherit `work`, so that a list of millions of samples is not
    copied. Tasks are pickled, and few of them are taken before their results. The progress of a
    worker is reported with its result.
    """
    tick = summing(report)
    if engine == "ray":
        return _on_ray(work, tasks, tick)
    if jobs > 1:
        return _in_processes(work, tasks, jobs, tick)
    return (work(task, tick) for task in tasks)


def summing(report: Progress) -> Tick:
    """Return a function that reports the sums of its calls."""
    sums = [0, 0]

    def tick(samples: int, size: int) -> None:
        sums[0] += samples
        sums[1] += size
        report(*sums)

    return tick


def _ticked(work: Work[T, R], task: T) -> tuple[R, list[tuple[int, int]]]:
    """Return the result of a task and its calls of tick."""
    ticks = list[tuple[int, int]]()
    return work(task, lambda *counts: ticks.append(counts)), ticks


def _reported(done: tuple[R, list[tuple[int, int]]], tick: Tick) -> R:
    """Report the progress of a task in another process, and return its result."""
    for counts in done[1]:
        tick(*counts)
    return done[0]


def _in_processes(
    work: Work[T, R], tasks: Iterable[T], jobs: int, tick: Tick
) -> Generator[R, None, None]:
    workers: list[BaseProcess] = []
    context = child_process.recording_context(multiprocessing.get_context("fork"), workers)
    pool = ProcessPoolExecutor(jobs, context, _begin, (work,))
    waiting = deque[Future[Any]]()
    try:
        for task in tasks:
            # Python warns of forks beside threads. Those of libraries are idle, and workers use
            # none.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                waiting.append(pool.submit(_do, task))
            if len(waiting) > 2 * jobs:  # few tasks wait, so that an error comes early
                yield _reported(waiting.popleft().result(), tick)
        while waiting:
            yield _reported(waiting.popleft().result(), tick)
    except BrokenProcessPool as error:
        raise WdstrainError(
            "a worker process was killed, perhaps because memory ran out.",
            "Lower num_workers=, then run this again with resume=True.",
        ) from error
    finally:
        # A shard that is being written may take minutes, and is written again. A worker that was
        # killed may hold a lock of the pool, for which the others and the pool would wait.
        for worker in workers:
            if worker.is_alive():  # False also for one that was not started
                worker.kill()
        pool.shutdown(cancel_futures=True)


_mine: Any = None  # in a worker: its work


def _begin(work: Any) -> None:
    global _mine
    _mine = work
    child_process.set_up_worker()
    os.environ["OMP_NUM_THREADS"] = "1"  # for torch, if it is imported from now on
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)  # each worker has one core, and a fork loses torch's threads


def _do(task: Any) -> Any:
    return _ticked(_mine, task)


def _on_ray(work: Work[T, R], tasks: Iterable[T], tick: Tick) -> Generator[R, None, None]:
    try:
        import ray
    except ImportError:
        raise UsageError(
            "engine=ray needs Ray.",
            "Install it: pip install 'wdstrain[ray]'",
        ) from None
    if not ray.is_initialized():
        ray.init(log_to_driver=False)  # the cluster of RAY_ADDRESS, or one on this machine
    do, shared = ray.remote(max_retries=_RAY_RETRIES)(_on_node), ray.put(work)
    waiting = deque(do.remote(shared, task, os.getcwd()) for task in tasks)
    try:
        while waiting:
            done = ray.get(waiting[0])
            waiting.popleft()
            yield _reported(done, tick)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except ray.exceptions.RayError as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise WdstrainError(
            f"a task of the Ray cluster was lost {_RAY_RETRIES + 1} times: {reason}",
            "Check the nodes and their memory, then run it again with resume=True.",
        ) from error
    finally:
        for task in waiting:
            ray.cancel(task, force=True)


def _on_node(work: Any, task: Any, place: str) -> Any:
    """Return the result of a task on a node, and its progress. place: the working folder."""
    os.chdir(place)  # relative paths mean the same file on every node
    return _ticked(work, task)
