"""The processes of a run: one, or those that torchrun or srun started, which share every batch.

All processes must do the same at the same step, also when only one of them got a signal. So each
sends a wish at every step (nothing, a checkpoint, the end), and all follow the most urgent wish one
step later. The exchange runs on the CPU beside the step, and a GPU never waits for it.
"""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from wdstrain.errors import UsageError, WdstrainError
from wdstrain.runtime.launch import Launch
from wdstrain.training import fsdp

GO_ON, SAVE, STOP = 0, 1, 2  # wishes; the largest wins

# parts of the errors of collectives of gloo and nccl when a process is gone
_LOST = (
    "Connection closed by peer",
    "Connection reset",
    "Broken pipe",
    "connectFullMesh",
    "NCCL",
    "Timed out waiting",
    "Timeout",
)


class DistributedContext:
    """The processes of the run. With a single one, every method returns at once.

    rank, size: of the run. local: rank on this machine. leads: whether this process writes.
    """

    def __init__(self) -> None:
        launch = Launch.of()
        self._address = launch.address
        self.rank, self.size = (launch.rank, launch.size) if launch.address else (0, 1)
        # the caller may have met the others without the environment
        if dist.is_available() and dist.is_initialized():
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.local = launch.local or 0
        devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
        # SLURM may show each task only its own GPU, which is number 0 then
        if devices and (launch.local is None or (launch.is_slurm and devices == 1)):
            self.local = self.rank % devices
        self._control: Any = None
        self._asked: tuple[Any, Tensor] | None = None
        self._owns = False

    @contextmanager
    def joined(self, device: torch.device) -> Iterator[DistributedContext]:
        """Join the process group, and leave it at the end. Raises WdstrainError if a process ended."""
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
        """Raise errors of collectives after the end of another process as WdstrainError.

        A launcher ends all processes when one is gone (SIGTERM, later SIGKILL). A process that ends
        with the run (`last_words`) ignores SIGTERM from then on, to report its error first.
        """
        try:
            yield
        except RuntimeError as error:
            if self.size == 1 or not any(word in str(error) for word in _LOST):
                raise
            if _ENDS_WITH_RUN.get() and threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            line = str(error).strip().splitlines()[0]
            cause = re.sub(r"^\[[^]]*\] ", "", line)[:200]  # without torch's own file and line
            raise WdstrainError(
                f"rank {self.rank} of {self.size}: another process of this job ended ({cause}). "
                f"Its own message stands above. Run the job again with resume=True."
            ) from error

    def _join(self, device: torch.device) -> None:
        if self.size == 1:
            return
        if not dist.is_initialized():
            dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                init_method=self._address,
                rank=self.rank,
                world_size=self.size,
                timeout=timedelta(minutes=30),
            )
            self._owns = True
        if dist.get_world_size() != self.size:
            raise UsageError(
                f"WORLD_SIZE={self.size}, and torch.distributed knows {dist.get_world_size()} processes."
            )
        self._control = dist.new_group(backend="gloo")

    @property
    def leads(self) -> bool:
        """Whether this process writes and reports: rank 0."""
        return self.rank == 0

    def place(self, model: nn.Module, device: torch.device, *, shards: bool) -> nn.Module:
        """Return the model on the device; with `shards` its parameters are split over processes."""
        if not shards or self.size == 1:
            return model.to(device)
        fsdp.shard_model(model.cpu(), device, self._control)
        return model

    def spread(self, model: nn.Module, device: torch.device) -> nn.Module:
        """Return the model as all processes train it together."""
        if self.size == 1 or fsdp.is_sharded(model):
            return model
        return DistributedDataParallel(
            model, device_ids=[device.index] if device.type == "cuda" else None
        )

    def accumulating(self, model: Any) -> AbstractContextManager[None]:
        """Add gradients up without an exchange in this context. model: as `spread` returned it."""
        if self.size == 1:
            return nullcontext()
        return fsdp.gradients_kept(model) if fsdp.is_sharded(model) else model.no_sync()

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Copy these tensors of rank 0 to all processes."""
        if self.size > 1:
            for tensor in tensors:
                dist.broadcast(tensor, 0)

    def reduce(self, values: Tensor) -> Tensor:
        """Return the sum over all processes, in a new tensor."""
        total = values.clone()
        if self.size > 1:
            dist.all_reduce(total)
        return total

    def gather(self, value: Any) -> list[Any]:
        """Return the value of each process, by rank. Plain values and CPU tensors."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._control)
        return values

    def wait(self) -> None:
        """Wait until all processes are here."""
        if self.size > 1:
            dist.barrier(group=self._control)

    def agreed(self, wish: int) -> int:
        """Return the most urgent wish of all processes at the step before."""
        if self.size == 1:
            return wish
        before, flag = self._asked, torch.tensor([wish])
        work = dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._control, async_op=True)
        self._asked = work, flag
        if before is None:
            return GO_ON
        before[0].wait()
        return int(before[1].item())


def device_of(name: str, world: DistributedContext) -> torch.device:
    """Return the device of this process. Raises UsageError if the machine has no such device."""
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
    """Mark that the process ends with the run, so that errors are reported before it is killed."""
    token = _ENDS_WITH_RUN.set(True)
    try:
        yield
    finally:
        _ENDS_WITH_RUN.reset(token)


# --- batch norms over the batches of all processes ------------------------------------------------


def synchronize_batch_norms(model: nn.Module, device: torch.device, processes: int) -> nn.Module:
    """Return the model with synchronized batch norms; names and shapes of its state stay the same.

    A single process needs no change. Raises UsageError for a model without batch norms.
    """
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    if not norms:
        raise UsageError("sync_batchnorm=True: the model has no batch norm. Leave it out.")
    if processes == 1:
        return model
    if device.type == "cpu":
        raise UsageError("sync_batchnorm=True: torch synchronizes batch norms on GPUs only.")
    convert: Any = nn.SyncBatchNorm.convert_sync_batchnorm
    return cast(nn.Module, convert(model))
