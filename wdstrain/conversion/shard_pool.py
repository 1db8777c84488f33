"""Results of tasks in order, from this process, worker processes, or a Ray cluster.

Tasks report the samples and bytes that they have done while they run.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent import futures
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any, Protocol, TypeVar

from wdstrain.errors import UsageError, WdstrainError
from wdstrain.runtime import child_process

_RAY_RETRIES = 5  # of a task whose node or worker process was lost
_POLL = 0.05  # seconds between reports of progress

T = TypeVar("T", contravariant=True)
R = TypeVar("R", covariant=True)
Tick = Callable[[int, int], None]  # receives samples and bytes done since its last call
Progress = Callable[[int, int], None]  # receives samples and bytes of all tasks so far


class Work(Protocol[T, R]):
    def __call__(self, task: T, tick: Tick, /) -> R: ...


class _Counts:
    """Samples and bytes so far, as a `Tick` that reports them."""

    def __init__(self, report: Progress) -> None:
        self._report, self.samples, self.size = report, 0, 0

    def __call__(self, samples: int, size: int) -> None:
        self.samples += samples
        self.size += size
        self._report(self.samples, self.size)


def run(
    work: Work[T, R], tasks: Iterable[T], jobs: int, report: Progress, *, engine: str = "local"
) -> Generator[R, None, None]:
    """Return an iterator over the results of tasks, in order. It raises what a task raises.

    jobs: worker processes, which inherit `work`, so that a list of millions of samples is not
    copied. Tasks are pickled, and few of them are taken before their results.
    """
    if engine == "ray":
        return _on_ray(work, tasks, _Counts(report))
    if jobs > 1:
        return _in_processes(work, tasks, jobs, report)
    tick = _Counts(report)
    return (work(task, tick) for task in tasks)


def _in_processes(
    work: Work[T, R], tasks: Iterable[T], jobs: int, report: Progress
) -> Generator[R, None, None]:
    workers: list[BaseProcess] = []
    fork = multiprocessing.get_context("fork")
    counts = fork.Array("q", 2)  # samples and bytes so far, by all workers
    context = child_process.recording_context(fork, workers)
    pool = ProcessPoolExecutor(jobs, context, _begin, (work, counts))
    waiting = deque[Future[Any]]()

    def first() -> Any:
        while waiting[0] in futures.wait([waiting[0]], timeout=_POLL).not_done:
            report(*counts.get_obj())  # without its lock, which a killed worker may hold
        report(*counts.get_obj())
        return waiting.popleft().result()

    try:
        for task in tasks:
            # Python warns of forks beside threads. Those of libraries are idle, and workers use
            # none.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                waiting.append(pool.submit(_do, task))
            if len(waiting) > 2 * jobs:  # few tasks wait, so that an error comes early
                yield first()
        while waiting:
            yield first()
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


_mine: tuple[Any, Any] | None = None  # in a worker: its work, and the counts of all workers


def _begin(work: Any, counts: Any) -> None:
    global _mine
    _mine = work, counts
    child_process.set_up_worker()
    os.environ["OMP_NUM_THREADS"] = "1"  # for torch, if it is imported from now on
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)  # each worker has one core, and a fork loses torch's threads


def _do(task: Any) -> Any:
    assert _mine is not None
    work, counts = _mine

    def tick(samples: int, size: int) -> None:
        with counts.get_lock():
            counts[0] += samples
            counts[1] += size

    return work(task, tick)


def _on_ray(work: Work[T, R], tasks: Iterable[T], tick: _Counts) -> Generator[R, None, None]:
    try:
        import ray
    except ImportError:
        raise UsageError("engine=ray needs Ray. Install it: pip install 'wdstrain[ray]'") from None
    if not ray.is_initialized():
        ray.init(log_to_driver=False)  # the cluster of RAY_ADDRESS, or one on this machine
    do, shared = ray.remote(max_retries=_RAY_RETRIES)(_on_node), ray.put(work)
    waiting = deque(do.remote(shared, task, os.getcwd()) for task in tasks)
    try:
        while waiting:
            result, samples, size = ray.get(waiting[0])
            waiting.popleft()
            tick(samples, size)
            yield result
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except ray.exceptions.RayError as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise WdstrainError(
            f"a task of the Ray cluster was lost {_RAY_RETRIES + 1} times: {reason} Check the "
            "nodes and their memory, then run it again with resume=True."
        ) from error
    finally:
        for task in waiting:
            ray.cancel(task, force=True)


def _on_node(work: Any, task: Any, place: str) -> tuple[Any, int, int]:
    """Return the result of a task on a node, and its samples and bytes. place: the folder."""
    os.chdir(place)  # relative paths mean the same file on every node
    tick = _Counts(lambda *_: None)
    return work(task, tick), tick.samples, tick.size
