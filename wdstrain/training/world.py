"""The processes of a run: one, or as many as torchrun started, which share every batch.

Processes must do the same thing at the same step, also when only one of them was told to stop. So each says at every step what it
would like (nothing, a checkpoint, the end), and all do what the most urgent of them said one step later: the exchange runs
beside the step's work, over the processors, and a GPU never waits for it.
"""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from wdstrain.errors import UsageError, WdstrainError

GO_ON, SAVE, STOP = 0, 1, 2  # what a process would like; the largest wins

# how the errors of collectives begin or what they hold, of gloo and of nccl
_LOST = (
    "Connection closed by peer",
    "Connection reset",
    "Broken pipe",
    "connectFullMesh",
    "NCCL",
    "Timed out waiting",
    "Timeout",
)


class World:
    """This process and the others. Alone, every method is free and does nothing."""

    def __init__(self) -> None:
        self.rank, self.size, self.local = (
            _number(name, default) for name, default in _VARIABLES.items()
        )
        if (
            dist.is_available() and dist.is_initialized()
        ):  # by the caller, who may have met the others without the environment
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
            if "LOCAL_RANK" not in os.environ and torch.cuda.is_available():
                self.local = self.rank % torch.cuda.device_count()
        self._control: Any = None
        self._asked: tuple[Any, Tensor] | None = None
        self._owns = False

    @contextmanager
    def joined(self, device: torch.device) -> Iterator[World]:
        """Meet the others, and part at the end. Raises WdstrainError where another process ended first."""
        try:
            with self.explained():
                self._join(device)
                yield self
        finally:
            self._asked = self._control = None
            if self._owns and dist.is_initialized():
                dist.destroy_process_group()

    @contextmanager
    def explained(self) -> Iterator[None]:
        """What a collective says in here when another process ended, as a WdstrainError.

        A launcher ends the others as soon as one is gone (SIGTERM, and some time later SIGKILL). A process that ends with the run
        (`last_words`) lets SIGTERM pass from here on: what it knows is said first.
        """
        try:
            yield
        except RuntimeError as error:
            if self.size == 1 or not any(word in str(error) for word in _LOST):
                raise
            if _ENDS_WITH_RUN.get() and threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            first = re.sub(r"^\[[^]]*\] ", "", str(error).strip().splitlines()[0])[
                :200
            ]  # without torch's own file and line
            raise WdstrainError(
                f"rank {self.rank} of {self.size}: another process of this job is gone ({first}). "
                f"What it said stands above. Start the job again with --resume to go on from the last checkpoint."
            ) from error

    def _join(self, device: torch.device) -> None:
        if self.size == 1:
            return
        if not dist.is_initialized():
            dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo", timeout=timedelta(minutes=30)
            )
            self._owns = True
        if dist.get_world_size() != self.size:
            raise UsageError(
                f"WORLD_SIZE={self.size}, and torch.distributed knows {dist.get_world_size()} processes."
            )
        self._control = dist.new_group(backend="gloo")

    @property
    def leads(self) -> bool:
        """Whether this is the process that speaks and writes."""
        return self.rank == 0

    def spread(self, model: nn.Module, device: torch.device) -> nn.Module:
        """The model as all processes train it together."""
        if self.size == 1:
            return model
        return DistributedDataParallel(
            model, device_ids=[device.index] if device.type == "cuda" else None
        )

    def shared_buffers(self, model: nn.Module) -> None:
        """Give all processes the buffers of the first: each has seen other pictures in its batch norms."""
        if self.size > 1:
            for buffer in model.buffers():
                dist.broadcast(buffer, 0)

    def reduce(self, values: Tensor) -> Tensor:
        """The sum over all processes, in a new tensor."""
        found = values.clone()
        if self.size > 1:
            dist.all_reduce(found)
        return found

    def gather(self, value: Any) -> list[Any]:
        """What each process gives, by rank. Plain values and tensors on the processor."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self._control)
        return found

    def agreed(self, wish: int) -> int:
        """The most urgent wish of all processes at the step before; alone, one's own at once."""
        if self.size == 1:
            return wish
        before = self._asked
        flag = torch.tensor([wish])
        self._asked = (
            dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._control, async_op=True),
            flag,
        )
        if before is None:
            return GO_ON
        before[0].wait()
        return int(before[1].item())


def device_of(name: str, world: World) -> torch.device:
    """The device of this process. Raises UsageError for one that is not here."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device("cuda", world.local) if name == "cuda" else torch.device(name)
        torch.zeros(1, device=device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(
            f"device={name!r} cannot be used here ({str(error).splitlines()[0]}). Use cpu, cuda or auto."
        ) from error
    return device


_ENDS_WITH_RUN = ContextVar("ends_with_run", default=False)


@contextmanager
def last_words() -> Iterator[None]:
    """In here a run is all that this process does, and where it fails, the process says why and ends."""
    token = _ENDS_WITH_RUN.set(True)
    try:
        yield
    finally:
        _ENDS_WITH_RUN.reset(token)


_VARIABLES = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0}  # as torchrun sets them


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, str(default)) if "MASTER_ADDR" in os.environ else str(default)
    if not text.isdigit():
        raise UsageError(
            f"{name}={text!r} in the environment is no number. Start the processes with torchrun."
        )
    return int(text)
