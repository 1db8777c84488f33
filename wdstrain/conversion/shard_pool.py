"""Tasks in this process, in worker processes, or on a Ray cluster, with their results in order."""

from __future__ import annotations

import multiprocessing
import os
import sys
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from wdstrain.errors import UsageError, WdstrainError
from wdstrain.runtime.workers import recording_context, set_up_worker

_POLL = 0.5  # seconds of each wait for a worker
_RAY_RETRIES = 5  # of a task whose node or worker process was lost

T = TypeVar("T")
R = TypeVar("R")
Calls = tuple[Callable[[Any], Any], Callable[[Any], Any]]  # (begin a task, wait for its result)


def run(
    work: Callable[[T], R], tasks: Iterable[T], jobs: int, *, engine: str = "local"
) -> Generator[R, None, None]:
    """Yield the results of tasks, in order. It raises what a task raises.

    jobs: worker processes, which inherit `work`, so that a list of millions of samples is not
    copied. Tasks are pickled, and few of them are taken before their results.
    """
    if engine == "local" and jobs == 1:
        yield from map(work, tasks)
        return
    waiting = deque[Any]()
    with _ray(work, waiting) if engine == "ray" else _processes(work, jobs) as (begin, result_of):
        for task in tasks:
            waiting.append(begin(task))
            if len(waiting) > 2 * jobs and engine == "local":  # so that an error comes early
                yield result_of(waiting.popleft())
        while waiting:
            result = result_of(waiting[0])
            waiting.popleft()
            yield result


@contextmanager
def _processes(work: Any, jobs: int) -> Iterator[Calls]:
    workers: list[BaseProcess] = []
    context = recording_context(multiprocessing.get_context("fork"), workers)
    pool = ProcessPoolExecutor(jobs, context, _set_up, (work,))

    def begin(task: Any) -> Future[Any]:
        # Python warns of forks beside threads. Those of libraries are idle, and workers use none.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return pool.submit(_do, task)

    try:
        yield begin, _result
    except BrokenProcessPool as error:
        raise WdstrainError(
            "a worker process was killed, perhaps because memory ran out.",
            "Lower {num_workers}, then run this again with {resume}.",
            {"num_workers": ...},
        ) from error
    finally:
        # A shard that is being written may take minutes, and is written again. A worker that was
        # killed may hold a lock of the pool, for which the others and the pool would wait.
        for worker in workers:
            if worker.is_alive():  # False also for one that was not started
                worker.kill()
        pool.shutdown(cancel_futures=True)


def _result(task: Future[Any]) -> Any:
    """Return the result of a task.

    Python can miss a Ctrl-C that comes just before an endless wait, so each wait has an end.
    """
    while not wait([task], _POLL).done:
        pass
    return task.result()


_mine: Any = None  # in a worker: its work


def _set_up(work: Any) -> None:
    global _mine
    _mine = work
    set_up_worker()
    os.environ["OMP_NUM_THREADS"] = "1"  # for torch, if it is imported from now on
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)  # each worker has one core, and a fork loses torch's threads


def _do(task: Any) -> Any:
    return _mine(task)


@contextmanager
def _ray(work: Any, waiting: deque[Any]) -> Iterator[Calls]:
    try:
        import ray
    except ImportError:
        raise UsageError(
            "{engine} needs Ray.",
            "Install it: pip install 'wdstrain[ray]'",
            {"engine": "ray"},
        ) from None
    if not ray.is_initialized():
        ray.init(log_to_driver=False)  # the cluster of RAY_ADDRESS, or one on this machine
    do, shared = ray.remote(max_retries=_RAY_RETRIES)(_on_node), ray.put(work)
    try:
        yield lambda task: do.remote(shared, task, os.getcwd()), ray.get
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except ray.exceptions.RayError as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise WdstrainError(
            f"a task of the Ray cluster was lost {_RAY_RETRIES + 1} times: {reason}",
            "Check the nodes and their memory, then run it again with {resume}.",
        ) from error
    finally:
        for task in waiting:
            ray.cancel(task, force=True)


def _on_node(work: Any, task: Any, place: str) -> Any:
    """Return the result of a task on a node. place: the working folder."""
    os.chdir(place)  # relative paths mean the same file on every node
    return work(task)
