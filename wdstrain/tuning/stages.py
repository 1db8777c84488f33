"""What each stage of a loader could do by itself, on this data and this machine, in samples a second.

Each is measured with the loader's own parts while the others have nothing to do: the reader with nobody who decodes, the decoder over
batches that lie in memory, the hand-off with fields that decode nothing. A model of hardware would be guessed; these are the
same lines of code that run in training. Decoding and hand-off are measured on an excerpt: some hundred samples in a tar of their own
on this machine, so that a slow server is no part of what they show.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import torch

from wdstrain.decode.batch_slots import Layout
from wdstrain.decode.decoder import Collate, Decoder, Task, Transform
from wdstrain.decode.fields import Example, Field, read_field
from wdstrain.decode.transforms import Draws
from wdstrain.decode.workers import OneCorePerThread
from wdstrain.errors import SampleError, WdstrainError
from wdstrain.loader.task_blocks import TaskBuilder
from wdstrain.memory.shared import Memory
from wdstrain.order.plan import Plan
from wdstrain.reader.reader import Reader
from wdstrain.reader.resources import ReadOptions
from wdstrain.reader.step_blocks import StepBlock, step_blocks
from wdstrain.runtime.machine import cores
from wdstrain.runtime.watchdog import ProgressCell
from wdstrain.shards.index import Index
from wdstrain.shards.index_io import scan
from wdstrain.shards.tar import END, header, padding
from wdstrain.shards.values import Array
from wdstrain.storage.local import open_source
from wdstrain.storage.remote import is_remote

_RUNS = 4  # places of the set from which samples are taken
_MOST_BYTES = 64 << 20  # of an excerpt
_AHEAD = 32 << 20
_PATIENCE = 60.0  # seconds in which processes that decode have begun

Parts = list[tuple[str, bytes]]  # the fields of a sample


def excerpt(
    index: Index, count: int, path: str, change: Callable[[Parts], Parts] | None = None
) -> Index:
    """About `count` samples from several places of a set, written as a tar of their own; its index, with the set's labels.

    change: makes other parts of those of a sample, such as a smaller picture.
    """
    count = max(
        1,
        min(
            count,
            len(index),
            int(_MOST_BYTES * len(index) / max(1, sum(shard.bytes for shard in index.shards))),
        ),
    )
    run = -(-count // _RUNS)
    starts = np.linspace(0, max(0, len(index) - run), _RUNS).astype(np.int64)
    ids = np.unique(
        np.concatenate([np.arange(start, start + run) for start in starts]).clip(0, len(index) - 1)
    )
    shards = index.shard_of(ids)
    runs = np.split(ids, np.flatnonzero((np.diff(ids) != 1) | (np.diff(shards) != 0)) + 1)
    with open(path, "wb") as file:
        for some in runs:
            shard = index.shards[int(index.shard_of(some[:1])[0])]
            start, stop = int(index.table.start[some[0]]), int(index.table.stop[some[-1]])
            with open_source(shard.path, shard.bytes) as source:
                data = memoryview(bytearray(stop - start))
                source.read_into([data], start)  # at once: of a server each read is a request
                for i in some.tolist():
                    parts = [
                        (field, bytes(data[at - start : at - start + size]))
                        for field, at, size in index.members(i)
                    ]
                    with suppress(SampleError):  # a bad sample stays as it is
                        parts = change(parts) if change is not None else parts
                    for field, kept in parts:
                        # keys of several shards may be the same; these are for nobody to read
                        file.write(
                            header(f"{i:012d}.{field}", len(kept))
                            + kept
                            + bytes(padding(len(kept)))
                        )
        file.write(END)
    return replace(scan([path]), labels=index.labels)


# --- storage ---------------------------------------------------------------------------------------------------------


def storage_rate(index: Index, batch_size: int, seconds: float) -> float:
    """Bytes a second that the reader of one rank brings, and compares with their checksums, while nobody decodes."""
    plan = Plan(counts=index.counts, seed=0, epoch=0, batch_size=min(batch_size, len(index)))
    options = ReadOptions(ahead=_AHEAD, in_flight=2)
    reader = Reader(index, lambda epoch: replace(plan, epoch=epoch), 0, options)
    try:
        reader.start(0, 0, 0)
        begun = before = 0.0
        for batch_number, (stretch, number) in enumerate(_steps(plan)):
            reader.collect(stretch, number)
            reader.release(batch_number)
            if not batch_number:  # the first round trip is not the pace
                begun, before = time.perf_counter(), reader.stats.bytes
            elif time.perf_counter() - begun >= seconds and reader.stats.bytes > before:
                break
        return (reader.stats.bytes - before) / (time.perf_counter() - begun)
    finally:
        reader.close()


def _steps(plan: Plan) -> Iterator[tuple[StepBlock, int]]:
    """The steps of epoch after epoch."""
    for epoch in count():
        for stretch in step_blocks(replace(plan, epoch=epoch), 0):
            yield from ((stretch, number) for number in range(len(stretch)))


def in_memory(index: Index) -> float | None:
    """The share of the shards that the system has in memory, 0 to 1, looked at in 64 places; None where it does not say."""
    if any(is_remote(shard.path) for shard in index.shards) or not hasattr(os, "RWF_NOWAIT"):
        return None
    rows = np.linspace(0, len(index) - 1, 64).astype(np.int64)
    found = 0
    for number, shard in zip(rows.tolist(), index.shard_of(rows).tolist(), strict=True):
        fd = os.open(index.shards[shard].path, os.O_RDONLY)
        try:
            found += os.preadv(fd, [bytearray(1)], int(index.table.start[number]), os.RWF_NOWAIT)
        except OSError as error:
            if not isinstance(error, BlockingIOError):
                return None  # this file system does not know
        finally:
            os.close(fd)
    return found / len(rows)


def forget(index: Index) -> None:
    """Ask the system not to keep local shards in memory, so that they come from the disk again."""
    for shard in index.shards:
        if not is_remote(shard.path) and hasattr(os, "posix_fadvise"):
            fd = os.open(shard.path, os.O_RDONLY)
            with suppress(OSError):
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


# --- decoding --------------------------------------------------------------------------------------------------------


class Ran(NamedTuple):
    """What a decoder did, and when, by time.perf_counter."""

    samples: int
    begun: float
    ended: float


class Bare:
    """The decoder by itself: batches that lie in memory are decoded over and over. index: of one tar on this machine."""

    def __init__(
        self,
        index: Index,
        fields: Mapping[str, Field] | None,
        transform: Transform | None,
        batch_size: int,
        takes_rng: bool,
        collate_fn: Collate | None,
    ) -> None:
        self.size = min(batch_size, len(index))
        examples = {
            name: field.example
            for name, field in (fields or {}).items()
            if field.example is not None
        }
        layout = Layout.of(examples, self.size)
        arena, self._slots = Memory(index.shards[0].bytes), Memory(max(1, layout.size * cores()))
        with open_source(index.shards[0].path) as source:
            source.read_into([arena.view], 0)
        wanted = (
            None if fields is None else {name for field in fields.values() for name in field.names}
        )
        self._tasks = self._of(TaskBuilder(index, wanted, with_keys=transform is not None), index)
        self._decoder = Decoder(
            names=index.fields,
            fields=fields,
            transform=transform,
            takes_rng=takes_rng,
            collate_fn=collate_fn,
            marks=False,
            replace=True,  # a bad sample is for the loader to tell
            seed=0,
            arena=arena,
            slots=self._slots,
            layout=layout,
        )

    def _of(self, tasks: TaskBuilder, index: Index) -> list[Task]:
        rounds = [
            np.arange(first, first + self.size)
            for first in range(0, len(index) - self.size + 1, self.size)
        ]
        return [
            tasks.make(n, 0, 0, ids, index.table.start[ids], {}) for n, ids in enumerate(rounds)
        ]

    def run(self, number: int, seconds: float) -> Ran:
        """What one decoder does in this time, the `number`th of several that run at a time."""
        desk, done = ProgressCell.unwatched(), 0
        self._decoder(
            self._tasks[0]._replace(slot=number), desk
        )  # the first takes longer: libraries begin, memory is mapped
        begun = time.perf_counter()
        while (spent := time.perf_counter() - begun) < seconds or not done:
            task = self._tasks[(number + done) % len(self._tasks)]
            self._decoder(task._replace(slot=number, epoch=done), desk)
            done += 1
        return Ran(done * self.size, begun, begun + spent)

    def threads(self, count: int, seconds: float) -> float:
        """Samples a second of so many threads."""
        one_each = OneCorePerThread(count)
        with ThreadPoolExecutor(count, "wdstrain-decoder", one_each) as pool:
            with one_each:
                ran = pool.map(self.run, range(count), [seconds] * count)
            return _together(list(ran))

    def processes(self, count: int, seconds: float, context: str | None) -> float:
        """Samples a second of so many processes."""
        if count == 1:
            return self.threads(1, seconds)
        with ProcessPoolExecutor(
            count, multiprocessing.get_context(context), _begin_alone, (self, Memory(8 * count))
        ) as pool:
            try:
                ran = list(pool.map(_run_alone, range(count), [count] * count, [seconds] * count))
            except BrokenProcessPool:
                raise WdstrainError(
                    "a process that decoded by itself died. If the system killed it for memory, lower batch_size; dmesg tells. "
                    "wdstrain verify --decode names pictures that break a decoder."
                ) from None
        return _together(ran)


def _together(ran: list[Ran]) -> float:
    """Samples a second of decoders of which one may have waited until another was done: for the interpreter's lock."""
    return sum(one.samples for one in ran) / (
        max(one.ended for one in ran) - min(one.begun for one in ran)
    )


def _begin_alone(bare: Bare, ready: Memory) -> None:
    torch.set_num_threads(1)
    _alone.extend((bare, ready))


_alone: list[
    Any
] = []  # of a process that decodes by itself: what, and where it says that it is there


def _run_alone(number: int, count: int, seconds: float) -> Ran:
    bare, ready = _alone
    there = ready.view.cast("q")
    there[number] = 1
    until = time.monotonic() + _PATIENCE
    while (
        sum(there) < count and time.monotonic() < until
    ):  # all at a time, or they would not be in each other's way
        time.sleep(0.002)
    ran: Ran = bare.run(number, seconds)
    return ran


# --- hand-off --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Idle:
    """A field that decodes nothing: its place in the batch stays as it is, or it gives the same value for every sample."""

    names: tuple[str, ...]
    example: Example | None
    value: Any = None

    @classmethod
    def like(cls, field: Field, index: Index) -> Idle:
        """A field that takes the place of another. index: of one tar on this machine, of whose samples one is decoded."""
        if field.example is not None:
            return cls(tuple(field.names), field.example)
        with open_source(index.shards[0].path) as source:
            for number in range(len(index)):
                for name, offset, size in index.members(number):
                    if name in field.names:
                        with suppress(
                            Exception
                        ):  # whatever a field of the user raises: the next sample may be better
                            data = memoryview(bytearray(source.read(offset, size)))
                            return cls(
                                tuple(field.names),
                                None,
                                read_field(field, name, data, None, np.full(64, 0.5)),
                            )
        return cls(tuple(field.names), None)

    def read(self, name: str, data: memoryview, out: Array | None, draws: Draws) -> Any:
        return self.value


@dataclass(frozen=True)
class Same:
    """A transform that computes nothing: the same example for every sample."""

    example: Mapping[str, Any]

    def __call__(self, sample: dict[str, Any]) -> Mapping[str, Any]:
        return self.example
