"""Written shards of a plan, made by this process, by worker processes, or on a Ray cluster.

Shards that an earlier run wrote are kept. Results come in the order of the tasks.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any, Protocol, TypeVar

import numpy as np

from wdstrain.conversion.catalog import Catalog
from wdstrain.conversion.images import Recipe
from wdstrain.conversion.listing import BadSamples
from wdstrain.conversion.options import Options
from wdstrain.conversion.shard_plan import PlannedShard
from wdstrain.conversion.shard_writer import TEMPORARY, Packed, write_shard
from wdstrain.errors import UsageError, WdstrainError
from wdstrain.memory import Memory
from wdstrain.runtime import child_process
from wdstrain.runtime.options import as_bytes

_RAY_RETRIES = 5  # of a task whose node or worker process was lost
_POLL = 0.05  # seconds between reports of progress

T = TypeVar("T", contravariant=True)
R = TypeVar("R", covariant=True)
Tick = Callable[[int, int], None]  # receives samples and bytes of one task so far
Progress = Callable[[int, int], None]  # receives samples and bytes of all tasks so far
Report = Callable[[int, int, int], None]  # receives samples written, bytes, samples in all


def write_shards(
    catalog: Catalog,
    recipe: Recipe,
    folder: str,
    plan: Sequence[PlannedShard],
    options: Options,
    bad: BadSamples,
    report: Report,
) -> Generator[Packed, None, None]:
    """Yield the shards in order as they are written; with `resume`, existing ones are kept."""
    total = sum(len(shard.numbers) for shard in plan)
    workers = min(max(1, len(plan)), options.processes(int(catalog.sizes.sum())))
    memory = max(1 << 20, as_bytes(options.memory) // (8 * workers))
    write = partial(
        write_shard,
        folder,
        catalog,
        recipe,
        collect=bad.collect,
        memory=memory,
        resume=options.resume,
    )

    def progress(done: int, size: int) -> None:
        report(done, size, total)

    try:
        with closing(run(write, plan, workers, progress, engine=options.engine)) as results:
            for packed in results:
                bad.bad += packed.bad
                yield packed
    finally:
        for name in os.listdir(folder):
            if name.endswith(TEMPORARY):  # of a worker that was killed
                os.unlink(os.path.join(folder, name))


# --- tasks, here or in worker processes or on a Ray cluster --------------------------------------


class Work(Protocol[T, R]):
    def __call__(self, task: T, tick: Tick, /) -> R: ...


def run(
    work: Work[T, R], tasks: Iterable[T], jobs: int, report: Progress, *, engine: str = "local"
) -> Generator[R, None, None]:
    """Yield the results of tasks in order. Raises what a task raises.

    jobs: worker processes, which inherit `work`, so that a list of millions of samples is not
    copied. Tasks are pickled, and few of them are taken before their results.
    """
    if engine == "ray":
        return _on_ray(work, tasks, report)
    return _here(work, tasks, report) if jobs == 1 else _in_processes(work, tasks, jobs, report)


def _here(work: Work[T, R], tasks: Iterable[T], report: Progress) -> Generator[R, None, None]:
    done = last = (0, 0)

    def tick(samples: int, size: int) -> None:
        nonlocal last
        last = done[0] + samples, done[1] + size
        report(*last)

    for task in tasks:
        with _one_thread():
            result = work(task, tick)
        yield result
        done = last


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
    work: Work[T, R], tasks: Iterable[T], jobs: int, report: Progress
) -> Generator[R, None, None]:
    most = 2 * jobs + 1  # few tasks wait, so that an error or an interrupt comes early
    board = Memory(16 * most)  # samples and bytes of each waiting task so far, by the workers
    sums, done = np.frombuffer(board.view, np.int64).reshape(-1, 2), np.zeros(2, np.int64)
    workers: list[BaseProcess] = []
    context = child_process.recording_context(multiprocessing.get_context("fork"), workers)
    pool = ProcessPoolExecutor(jobs, context, _begin, (work, board))
    waiting: deque[tuple[int, Future[Any]]] = deque()

    def awaited() -> Any:
        line, future = waiting.popleft()
        while not future.done():
            futures.wait([future], timeout=_POLL)
            report(*(done + sums.sum(axis=0)).tolist())
        result = future.result()
        report(*(done + sums.sum(axis=0)).tolist())
        done[:] += sums[line]
        sums[line] = 0
        return result

    try:
        for number, task in enumerate(tasks):
            # Python warns of forks beside threads. Those of libraries are idle, and workers use
            # none.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                waiting.append((number % most, pool.submit(_do, number % most, task)))
            if len(waiting) == most:
                yield awaited()
        while waiting:
            yield awaited()
    except BrokenProcessPool as error:
        raise WdstrainError(
            "a worker process was killed, perhaps because memory ran out. Lower num_workers, then "
            "run this again with resume=True."
        ) from error
    except BaseException:
        for worker in workers:  # a shard may take minutes, and is written again
            worker.kill()
        raise
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


_mine: tuple[Any, Memory] | None = None  # in a worker: its work, and the parent's progress


def _begin(work: Any, board: Memory) -> None:
    global _mine
    _mine = work, board
    child_process.set_up_worker()
    os.environ["OMP_NUM_THREADS"] = "1"  # for torch, if it is imported from now on
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)  # each worker has one core, and a fork loses torch's threads


def _do(line: int, task: Any) -> Any:
    assert _mine is not None
    work, board = _mine
    sums = np.frombuffer(board.view, np.int64).reshape(-1, 2)

    def tick(samples: int, size: int) -> None:
        sums[line] = samples, size

    return work(task, tick)


def _on_ray(work: Work[T, R], tasks: Iterable[T], report: Progress) -> Generator[R, None, None]:
    try:
        import ray
    except ImportError:
        raise UsageError("engine=ray needs Ray. Install it: pip install 'wdstrain[ray]'") from None
    if not ray.is_initialized():
        ray.init(log_to_driver=False)  # the cluster of RAY_ADDRESS, or one on this machine
    shared = ray.put(work)

    @ray.remote(max_retries=_RAY_RETRIES)
    def do(work: Any, task: Any, place: str) -> tuple[Any, int, int]:
        os.chdir(place)  # relative paths mean the same file on every node
        last = (0, 0)

        def tick(samples: int, size: int) -> None:
            nonlocal last
            last = (samples, size)

        with _one_thread():
            return work(task, tick), *last

    waiting = deque(do.remote(shared, task, os.getcwd()) for task in tasks)
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
