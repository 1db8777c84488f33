"""Epoch numbers that this process and the worker processes of a DataLoader count together."""

from __future__ import annotations

import multiprocessing
import os
import re
from collections.abc import Callable
from multiprocessing.context import get_spawning_popen
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import get_worker_info

from wdstrain.errors import UsageError
from wdstrain.memory.shared import Memory

_WORKERS = 4096  # most worker processes of a DataLoader
_PASSES = 4096  # passes of worker processes that are remembered, the last ones


def worker_share() -> tuple[int, int]:
    """Return (worker, workers): the share of this worker process; (0, 1) in other processes.

    WORKER and NUM_WORKERS in the environment come first, as in webdataset.
    """
    if "WORKER" in os.environ and "NUM_WORKERS" in os.environ:
        return int(os.environ["WORKER"]), int(os.environ["NUM_WORKERS"])
    info = get_worker_info()
    return (info.id, info.num_workers) if info is not None else (0, 1)


class SharedEpochs:
    """The number of the next epoch, in memory that worker processes share.

    The worker processes of a DataLoader begin a pass one after another, and their parent does not
    say which pass it is. The first worker of a pass takes the next number. The others recognize the
    pass by the seed that torch gives to all its workers, and by the number of earlier passes of
    their process. Three more facts separate passes with equal seeds: a worker begins a pass once,
    Python numbers processes, and the worker that began the pass is alive.
    """

    def __init__(self, epoch: int = 0) -> None:
        self._attach(Memory(8 * (2 + 6 * _PASSES) + _PASSES * _WORKERS // 8))
        self.set(epoch)

    def _attach(self, memory: Memory) -> None:
        self._memory = memory
        self._process: int | None = None
        self._calls = 0  # passes that this process began

    def set(self, number: int) -> None:
        """Make `number` the next epoch, in every worker process."""
        with self._memory.exclusive():
            self._counts[0] = number

    def begin(self) -> int:
        """Return the epoch of the pass that begins, in this process or over all worker processes."""
        if self._process != os.getpid():  # a forked child counts its own passes
            self._process, self._calls = os.getpid(), 0
        call, self._calls = self._calls, self._calls + 1
        info = get_worker_info()
        if info is None:
            with self._memory.exclusive():
                self._counts[0] += 1
                return int(self._counts[0]) - 1
        return self._join(info.seed - info.id, call, info.id, info.num_workers)

    def _join(self, seed: int, call: int, worker: int, workers: int) -> int:
        """Return the epoch of the pass that a worker process begins.

        seed: common to all worker processes of the pass. call: number of passes that the worker
        began before.
        """
        if workers > _WORKERS:
            raise UsageError(
                f"num_workers={workers} of the DataLoader: must be <= {_WORKERS} for a stream."
            )
        # Number of the pass's first process, unless other processes started in between.
        first = _process_number() - worker
        with self._memory.exclusive():
            passes, counts = self._passes, self._counts
            begun = int(counts[1])
            same = np.flatnonzero(
                (passes[: min(begun, _PASSES), :3] == (seed, call, workers)).all(axis=1)
            )
            free = [i for i in same.tolist() if not self._has(i, worker)]
            # The pass of its own process group comes first, then the latest.
            free.sort(key=lambda i: (passes[i, 4] == first, (i - begun) % _PASSES), reverse=True)
            if free and (passes[free[0], 4] == first or _is_alive(int(passes[free[0], 5]))):
                number = free[0]
            else:
                number = begun % _PASSES
                passes[number] = seed, call, workers, counts[0], first, os.getpid()
                self._workers[number] = 0
                counts += 1
            self._workers[number, worker // 8] |= 1 << worker % 8
            return int(passes[number, 3])

    def _has(self, number: int, worker: int) -> bool:
        return bool(self._workers[number, worker // 8] >> (worker % 8) & 1)

    @property
    def _counts(self) -> npt.NDArray[np.int64]:
        """int64[2]: the next epoch, and the number of passes that worker processes began."""
        return np.frombuffer(self._memory.view, np.int64, 2)

    @property
    def _passes(self) -> npt.NDArray[np.int64]:
        """int64[_PASSES, 6]: seed, call, workers, epoch, number and id of the first process."""
        return np.frombuffer(self._memory.view, np.int64, 6 * _PASSES, 16).reshape(_PASSES, 6)

    @property
    def _workers(self) -> npt.NDArray[np.uint8]:
        """uint8[_PASSES, _WORKERS / 8]: a bit for each worker process that began the pass."""
        return np.frombuffer(self._memory.view, np.uint8, offset=16 + 48 * _PASSES).reshape(
            _PASSES, _WORKERS // 8
        )

    def __reduce__(self) -> tuple[Callable[..., SharedEpochs], tuple[Any]]:
        """A worker process that starts shares the memory. Any other copy counts by itself."""
        if get_spawning_popen() is not None:
            return _attached, (self._memory,)
        return SharedEpochs, (int(self._counts[0]),)


def _attached(memory: Memory) -> SharedEpochs:
    epochs = object.__new__(SharedEpochs)
    epochs._attach(memory)
    return epochs


def _process_number() -> int:
    """Return n of the n-th child of its parent, from the default name such as "Process-1:n".

    Returns 0 in a process with another name.
    """
    ending = re.search(r"\d+$", multiprocessing.current_process().name)
    return int(ending[0]) if ending else 0


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
