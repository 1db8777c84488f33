"""Written shards of a plan, made by this process, by worker processes, or on a Ray cluster.

Shards that an earlier run wrote are kept. Results come in the order of the tasks. A `Work` is
picklable and is called with the number of a task. Forked workers inherit it, so that a list of
millions of samples is not copied.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from wdstrain.conversion.catalog import Catalog
from wdstrain.conversion.images import Recipe
from wdstrain.conversion.listing import BadSamples
from wdstrain.conversion.options import Options
from wdstrain.conversion.shard_plan import PlannedShard
from wdstrain.conversion.shard_writer import Packed, identity, kept, write_shard
from wdstrain.errors import UsageError, WdstrainError
from wdstrain.memory import Memory
from wdstrain.runtime import child_process
from wdstrain.runtime.options import as_bytes

_RAY_RETRIES = 5  # of a task whose node or worker process was lost
_POLL = 0.2  # seconds between reports of progress

R = TypeVar("R", covariant=True)
Tick = Callable[[int, int], None]  # receives samples and bytes of one task so far
Progress = Callable[[int, int], None]  # receives samples and bytes of all tasks so far
Report = Callable[[int, int, int], None]  # receives samples written, samples in all, bytes


@dataclass(frozen=True)
class ShardJob:
    """Samples to write into shards. write=False: shards are indexed but not written."""

    catalog: Catalog
    recipe: Recipe
    folder: str
    write: bool = True

    def run(
        self, plan: Sequence[PlannedShard], options: Options, bad: BadSamples, report: Report
    ) -> Generator[Packed, None, None]:
        """Yield the shards in order as they are written; with `resume`, existing ones are kept."""
        marks = [identity(shard, self.catalog, self.recipe, bad.collect) for shard in plan]
        existing = [
            kept(self.folder, shard, mark) if options.resume else None
            for shard, mark in zip(plan, marks, strict=True)
        ]
        missing = [number for number, part in enumerate(existing) if part is None]
        total = sum(len(shard.numbers) for shard in plan)
        before = sum(len(part.numbers) for part in existing if part is not None)
        workers = options.processes(int(self.catalog.sizes.sum()))
        work = _WriteShards(
            self,
            [(plan[number], marks[number] if self.write else None) for number in missing],
            bad.collect,
            max(1 << 20, as_bytes(options.memory) // (8 * workers)),
        )

        def progress(done: int, size: int) -> None:
            report(before + done, total, size)

        done = run(work, len(missing), workers, progress, engine=options.engine)
        with closing(done) as results:
            for part in existing:
                packed = next(results) if part is None else part
                for sample in packed.bad:
                    bad.put(sample)
                yield packed
            next(results, None)  # waits for the worker processes to end


@dataclass(frozen=True)
class _WriteShards:
    """Task of the workers. shards: with the identity of each; None: it is only indexed."""

    job: ShardJob
    shards: list[tuple[PlannedShard, str | None]]
    collect: bool
    memory: int

    def __call__(self, number: int, tick: Tick) -> Packed:
        shard, mark = self.shards[number]
        return write_shard(
            self.job.folder,
            shard,
            self.job.catalog,
            self.job.recipe,
            collect=self.collect,
            memory=self.memory,
            mark=mark,
            tick=tick,
        )


# --- tasks, here or in worker processes or on a Ray cluster --------------------------------------


class Work(Protocol[R]):
    def __call__(self, number: int, tick: Tick) -> R: ...


def run(
    work: Work[R], count: int, jobs: int, report: Progress, *, engine: str = "local"
) -> Generator[R, None, None]:
    """Yield the results of tasks 0 to count - 1, in order. Raises what a task raises."""
    if engine == "ray":
        return _on_ray(work, count, report)
    if jobs == 1 or count <= 1:
        return _here(work, count, report)
    return _in_processes(work, count, min(jobs, count), report)


def _here(work: Work[R], count: int, report: Progress) -> Generator[R, None, None]:
    sums = np.zeros((count, 2), np.int64)
    for number in range(count):
        line = sums[number]
        before = sums.sum(axis=0)

        def tick(samples: int, size: int, line: Any = line, before: Any = before) -> None:
            line[:] = samples, size
            report(int(before[0]) + samples, int(before[1]) + size)

        with _one_thread():
            result = work(number, tick)
        yield result


@contextmanager
def _one_thread() -> Iterator[None]:
    """Limit torch to one thread. Each task has one core, and images are too small for more."""
    torch = sys.modules.get("torch")  # a task that uses torch has imported it
    threads = torch.get_num_threads() if torch is not None else 1
    try:
        if torch is not None:
            torch.set_num_threads(1)
        yield
    finally:
        if torch is not None:
            torch.set_num_threads(threads)


def _in_processes(
    work: Work[R], count: int, jobs: int, report: Progress
) -> Generator[R, None, None]:
    board = Memory(16 * count)  # samples and bytes of each task so far, written by the workers
    sums = np.frombuffer(board.view, np.int64).reshape(-1, 2)
    workers: list[BaseProcess] = []
    context = child_process.recording_context(multiprocessing.get_context("fork"), workers)
    pool = ProcessPoolExecutor(jobs, context, _begin, (work, board))
    waiting: deque[Future[Any]] = deque()  # few, so that an interrupt waits for few tasks
    try:
        for number in range(count):
            # Python warns of forks beside threads. Those of libraries are idle, and workers use
            # none.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                waiting.append(pool.submit(_do, number))
            if len(waiting) > 2 * jobs:
                yield _awaited(waiting.popleft(), sums, report)
        while waiting:
            yield _awaited(waiting.popleft(), sums, report)
    except BrokenProcessPool as error:
        raise WdstrainError(
            "a worker process was killed, perhaps because memory ran out. Lower num_workers, then "
            "run this again with resume=True."
        ) from error
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        _wait_for_end(workers)
        pool.shutdown(wait=True)


def _wait_for_end(workers: list[BaseProcess]) -> None:
    """Wait for workers that end, and kill all of them if one was killed.

    A worker that is killed while it waits for a task keeps the queue's lock. The others, and the
    pool, would wait for it forever.
    """
    while any(worker.is_alive() for worker in workers):
        wait([worker.sentinel for worker in workers if worker.is_alive()], timeout=_POLL)
        if any(worker.exitcode for worker in workers):
            for worker in workers:
                if worker.is_alive():  # False also for one that was not started
                    worker.kill()


def _awaited(future: Future[Any], sums: npt.NDArray[Any], report: Progress) -> Any:
    while not future.done():
        futures.wait([future], timeout=_POLL)
        report(int(sums[:, 0].sum()), int(sums[:, 1].sum()))
    result = future.result()
    report(int(sums[:, 0].sum()), int(sums[:, 1].sum()))
    return result


_mine: tuple[Any, Memory] | None = None  # in a worker: its work, and the parent's progress


def _begin(work: Any, board: Memory) -> None:
    global _mine
    _mine = work, board
    child_process.set_up_worker()
    os.environ["OMP_NUM_THREADS"] = "1"  # for torch, if it is imported from now on
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)  # each worker has one core, and a fork loses torch's threads


def _do(number: int) -> Any:
    assert _mine is not None
    work, board = _mine
    line = np.frombuffer(board.view, np.int64)[2 * number : 2 * number + 2]

    def tick(samples: int, size: int) -> None:
        line[:] = samples, size

    return work(number, tick)


def _on_ray(work: Work[R], count: int, report: Progress) -> Generator[R, None, None]:
    try:
        import ray
    except ImportError:
        raise UsageError("engine=ray needs Ray. Install it: pip install 'wdstrain[ray]'") from None
    if not ray.is_initialized():
        ray.init(log_to_driver=False)  # the cluster of RAY_ADDRESS, or one on this machine
    shared = ray.put(work)

    @ray.remote(max_retries=_RAY_RETRIES)
    def do(work: Any, number: int, place: str) -> tuple[Any, int, int]:
        os.chdir(place)  # relative paths mean the same file on every node
        last = (0, 0)

        def tick(samples: int, size: int) -> None:
            nonlocal last
            last = (samples, size)

        with _one_thread():
            return work(number, tick), *last

    waiting = deque(do.remote(shared, number, os.getcwd()) for number in range(count))
    samples = size = 0
    try:
        while waiting:
            try:
                result, some, more = ray.get(waiting[0])
            except ray.exceptions.RayTaskError as error:
                raise error.cause from None
            except ray.exceptions.RayError as error:
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                raise WdstrainError(
                    f"a task of the Ray cluster was lost {_RAY_RETRIES + 1} times: {reason} Check "
                    "the nodes and their memory, then run it again with resume=True."
                ) from error
            waiting.popleft()
            samples, size = samples + some, size + more
            report(samples, size)
            yield result
    finally:
        for task in waiting:
            ray.cancel(task, force=True)
