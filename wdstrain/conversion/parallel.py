"""Who does the work of a conversion: this process, a few more, or a Ray cluster. Results come in the order of the work.

Work is a picklable object that is called with a number and a way to tell how far it is. Under fork it is inherited, not
pickled, so that a list of millions of items is not copied.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent import futures
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from wdstrain.errors import UsageError, WdstrainError
from wdstrain.memory.shared import Memory
from wdstrain.runtime import child_process

_RAY_RETRIES = 5  # of a shard whose node or worker process was lost
_LOOK = 0.2  # seconds between looks at what worker processes have done

R = TypeVar("R", covariant=True)
Tick = Callable[[int, int], None]
Told = Callable[[int, int], None]  # sums of what all ticks said


class Work(Protocol[R]):
    def __call__(self, number: int, tick: Tick) -> R: ...


def run(
    work: Work[R], count: int, jobs: int, told: Told, *, engine: str = "local"
) -> Generator[R, None, None]:
    """The results of work 0 to count - 1, in order. Raises what the work raises."""
    if engine == "ray":
        return _on_ray(work, count, told)
    if jobs == 1 or count <= 1:
        return _here(work, count, told)
    return _in_processes(work, count, min(jobs, count), told)


def _here(work: Work[R], count: int, told: Told) -> Generator[R, None, None]:
    sums = np.zeros((count, 2), np.int64)
    for number in range(count):
        line = sums[number]
        before = sums.sum(axis=0)

        def tick(samples: int, size: int, line: Any = line, before: Any = before) -> None:
            line[:] = samples, size
            told(int(before[0]) + samples, int(before[1]) + size)

        with _one_thread():
            result = work(number, tick)
        yield result


@contextmanager
def _one_thread() -> Iterator[None]:
    """One job is one core; for a picture, more threads of torch's wait for each other longer than they work."""
    torch = sys.modules.get("torch")  # what works with it imported it before it was run
    threads = torch.get_num_threads() if torch is not None else 1
    try:
        if torch is not None:
            torch.set_num_threads(1)
        yield
    finally:
        if torch is not None:
            torch.set_num_threads(threads)


def _in_processes(work: Work[R], count: int, jobs: int, told: Told) -> Generator[R, None, None]:
    board = Memory(
        16 * count
    )  # samples and bytes of each piece of work so far, written by whoever does it
    sums = np.frombuffer(board.view, np.int64).reshape(-1, 2)
    workers: list[BaseProcess] = []
    context = child_process.recording_context(
        multiprocessing.get_context("fork" if sys.platform == "linux" else None), workers
    )
    pool = ProcessPoolExecutor(jobs, context, _begin, (work, board))
    waiting: deque[Future[Any]] = deque()  # few, so that an interruption has little to wait for
    try:
        for number in range(count):
            with (
                warnings.catch_warnings()
            ):  # threads of libraries are idle; the children use none of them
                warnings.simplefilter("ignore", DeprecationWarning)
                waiting.append(pool.submit(_do, number))
            if len(waiting) > 2 * jobs:
                yield _awaited(waiting.popleft(), sums, told)
        while waiting:
            yield _awaited(waiting.popleft(), sums, told)
    except BrokenProcessPool as error:
        raise WdstrainError(
            "a process that wrote shards was killed, perhaps for its memory. Lower num_workers."
        ) from error
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        _see_off(workers)
        pool.shutdown(wait=True)


def _see_off(workers: list[BaseProcess]) -> None:
    """Wait for processes that were told to end.

    One that is killed now, while it waits for its work, takes a lock along for which the others would wait for ever, and the pool,
    which looks after that as long as there is work, for them.
    """
    while any(worker.is_alive() for worker in workers):
        wait([worker.sentinel for worker in workers if worker.is_alive()], timeout=_LOOK)
        if any(worker.exitcode for worker in workers):
            for worker in workers:
                if worker.is_alive():  # also not one that could not be started
                    worker.kill()


def _awaited(future: Future[Any], sums: npt.NDArray[Any], told: Told) -> Any:
    while not future.done():
        futures.wait([future], timeout=_LOOK)
        told(int(sums[:, 0].sum()), int(sums[:, 1].sum()))
    result = future.result()
    told(int(sums[:, 0].sum()), int(sums[:, 1].sum()))
    return result


_mine: tuple[Any, Memory] | None = None  # in a worker: its work and the parent's board


def _begin(work: Any, board: Memory) -> None:
    global _mine
    _mine = work, board
    child_process.set_up_worker()
    os.environ["OMP_NUM_THREADS"] = "1"  # for torch, if it is imported from now on
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(
            1
        )  # a process is a core's worth; and torch's threads do not outlive a fork


def _do(number: int) -> Any:
    assert _mine is not None
    work, board = _mine
    line = np.frombuffer(board.view, np.int64)[2 * number : 2 * number + 2]

    def tick(samples: int, size: int) -> None:
        line[:] = samples, size

    return work(number, tick)


def _on_ray(work: Work[R], count: int, told: Told) -> Generator[R, None, None]:
    try:
        import ray
    except ImportError:
        raise UsageError("engine=ray needs Ray. Install it: pip install 'wdstrain[ray]'") from None
    if not ray.is_initialized():
        ray.init(log_to_driver=False)  # the cluster of RAY_ADDRESS, or one on this machine
    shared = ray.put(work)

    @ray.remote(max_retries=_RAY_RETRIES)
    def do(work: Any, number: int, place: str) -> tuple[Any, int, int]:
        os.chdir(place)  # what is named relative to the caller's folder is found on every node
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
                    f"a task of the Ray cluster was lost {_RAY_RETRIES + 1} times: {reason} Check the "
                    f"nodes and their memory, then run it again with resume=True."
                ) from error
            waiting.popleft()
            samples, size = samples + some, size + more
            told(samples, size)
            yield result
    finally:
        for one in waiting:
            ray.cancel(one, force=True)
