"""The processes of a run: one, or those that torchrun or srun started, which share every batch.

All processes must do the same at the same step, also when only one of them got a signal. So each
sends a wish at every step (nothing, a checkpoint, the end), and all follow the most urgent wish one
step later. The exchange runs on the CPU beside the step, and a GPU never waits for it.
"""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from types import FrameType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from wdstrain.errors import WdstrainError
from wdstrain.runtime.launch import Launch
from wdstrain.training.config import refusing
from wdstrain.training.tasks import Task

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
        self.leads, self.local = self.rank == 0, launch.local or 0
        devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
        # SLURM may show each task only its own GPU, which is number 0 then
        if devices and (launch.local is None or (launch.is_slurm and devices == 1)):
            self.local = self.rank % devices
        self._control: Any = None
        self._asked: tuple[Any, Tensor] | None = None

    @contextmanager
    def joined(self, device: torch.device) -> Iterator[None]:
        """Join the process group, and leave it at the end.

        Raises WdstrainError for errors of collectives after the end of another process.
        """
        starts = self.size > 1 and not dist.is_initialized()
        try:
            if starts:
                dist.init_process_group(
                    "nccl" if device.type == "cuda" else "gloo",
                    init_method=self._address,
                    rank=self.rank,
                    world_size=self.size,
                    timeout=timedelta(minutes=30),
                )
            if self.size > 1:
                self._control = dist.new_group(backend="gloo")
            yield
        except RuntimeError as error:
            if self.size == 1 or not any(word in str(error) for word in _LOST):
                raise
            # without torch's own file and line
            cause = re.sub(r"^\[[^]]*\] ", "", str(error).strip().splitlines()[0])[:200]
            raise WdstrainError(
                f"rank {self.rank} of {self.size}: another process of this job ended ({cause}). "
                f"Its own message stands above.",
                "Run the job again with {resume}.",
            ) from error
        finally:
            self._asked = self._control = None
            if starts and dist.is_initialized():
                dist.destroy_process_group()

    def place(self, model: nn.Module, device: torch.device, *, shards: bool) -> nn.Module:
        """Return the model on the device; with `shards` its parameters are split over processes."""
        if not shards or self.size == 1:
            return model.to(device)
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        values = model.cpu().state_dict().values()  # all start from those of rank 0
        self.broadcast(value for value in values if isinstance(value, Tensor))
        mesh = init_device_mesh(device.type, (self.size,))
        # Blocks of sequences only: they are known to be called as modules. Attention, for example,
        # reads the weights of its layers without calling them.
        for block in [*blocks_in(model), model]:
            fully_shard(block, mesh=mesh)
        return model

    def spread(self, model: nn.Module, device: torch.device) -> nn.Module:
        """Return the model as all processes train it together."""
        if self.size == 1 or is_sharded(model):
            return model
        return DistributedDataParallel(
            model, device_ids=[device.index] if device.type == "cuda" else None
        )

    @contextmanager
    def accumulating(self, model: Any) -> Iterator[None]:
        """Add gradients up without an exchange in this context. model: as `spread` returned it."""
        if is_sharded(model):
            model.set_requires_gradient_sync(False)
            yield
            model.set_requires_gradient_sync(True)
        else:
            with nullcontext() if self.size == 1 else model.no_sync():
                yield

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Copy these tensors of rank 0 to all processes."""
        if self.size > 1:
            for tensor in tensors:
                is_local = tensor.device.type == "cpu"  # nccl sends none from there
                dist.broadcast(tensor, 0, group=self._control if is_local else None)

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
    with refusing(
        f"{{device}} cannot be used by local rank {world.local}",
        "Use cpu, cuda or auto, and start one process per GPU.",
        device=name,
    ):
        device = torch.device("cuda", world.local) if name == "cuda" else torch.device(name)
        torch.zeros(1, device=device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
    return device


# --- sums of an epoch -----------------------------------------------------------------------------


class EpochSums:
    """Sums of the epoch so far on this process. values: of `names`, in float64.

    They stay on the device, so that a step does not wait for it. Names: loss (of finite losses),
    samples, overflowed (losses that are not finite), "head NAME", skipped (steps whose gradient 16
    bits could not hold), bad (samples that cannot be read).
    """

    def __init__(self, task: Task, device: torch.device, *, has_outputs: bool = True) -> None:
        """has_outputs: `add` gets outputs, so there are sums of heads."""
        self._task = task
        heads = [
            f"head {head.name}"
            for head in task.heads
            if has_outputs and head.main_metric == "accuracy"
        ]
        self.names = ["loss", "samples", "overflowed", *heads, "skipped", "bad"]
        self.values = torch.zeros(len(self.names), dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, outputs: Tensor | None, targets: Sequence[Tensor], losses: Tensor) -> None:
        """Add a batch."""
        is_finite = losses.isfinite()
        # len(losses) would be copied from the host, which waits for the device
        parts = [losses.masked_fill(~is_finite, 0.0), torch.ones_like(losses), ~is_finite]
        if outputs is not None:
            heads = zip(self._task.heads, self._task.split(outputs.detach()), targets, strict=True)
            parts += [
                head.right(own, true) for head, own, true in heads if head.main_metric == "accuracy"
            ]
        sums = torch.stack([part.sum(dtype=torch.float64) for part in parts])
        self.values[: len(sums)] += sums

    def count(self, name: str, number: int | Tensor) -> None:
        """Add to "bad" or "skipped". number: on the device, or 0 as a rule."""
        if isinstance(number, Tensor) or number:
            self.values[self.names.index(name)] += number

    def read(self, distributed: DistributedContext | None = None) -> dict[str, float]:
        """Return the sums by name, of this process or of all. Waits for the device."""
        values = self.values if distributed is None else distributed.reduce(self.values)
        return dict(zip(self.names, values.tolist(), strict=True))

    def load(self, sums: Mapping[str, float]) -> None:
        """Set the sums, of all processes together, on one of them."""
        values = [sums.get(name, 0.0) for name in self.names]
        self.values.copy_(torch.tensor(values, dtype=torch.float64))


# --- FSDP2 ----------------------------------------------------------------------------------------
# Parameters, gradients and optimizer state are split over the processes: each keeps an even part of
# every tensor. Checkpoints hold whole tensors, so a run resumes on any number of processes, and also
# without FSDP. All processes call these functions.


def is_sharded(model: nn.Module) -> bool:
    """Return whether the parameters of a model are split, also while its tensors are complete.

    Names of methods tell: importing the classes of torch takes half a second.
    """
    return any(hasattr(module, "set_requires_gradient_sync") for module in model.modules())


def blocks_in(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost members of sequences and module lists that consist of several layers."""
    for child in module.children():
        layers = list(child.children())
        is_list = type(child) is nn.ModuleList
        is_nested = type(child) is nn.Sequential and any(list(layer.children()) for layer in layers)
        if (
            type(module) in (nn.Sequential, nn.ModuleList)
            and layers
            and not is_list
            and not is_nested
        ):
            yield child
        else:
            yield from blocks_in(child)


def local(value: Tensor) -> Tensor:
    """Return the part of a tensor that this process has; the tensor itself if it is not split."""
    return cast(Tensor, cast(Any, value).to_local()) if hasattr(value, "to_local") else value


def whole(value: Any) -> Any:
    """Return a state dict with whole tensors, as a model or an optimizer that is not split has it.

    Tensors that are split become whole on the CPU of rank 0, and None on other ranks. torch's
    get_optimizer_state_dict fails for groups that hold frozen parameters.
    """
    if isinstance(value, Mapping):
        return {name: whole(part) for name, part in value.items()}
    if not hasattr(value, "full_tensor"):
        return value
    tensor = value.full_tensor()
    return tensor.cpu() if dist.get_rank() == 0 else None


def load_model_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Load a state dict with whole tensors, which each process has.

    Raises RuntimeError if it is of another model.
    """
    own = model.state_dict()
    model.load_state_dict(
        {name: _split_like(value, own.get(name)) for name, value in state.items()}
    )


def load_optimizer_state(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load a state dict with whole tensors, which each process has.

    Raises ValueError if it is of another optimizer.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    split = {
        i: {name: _split_like(value, parameters[i]) for name, value in of.items()}
        for i, of in state["state"].items()
        if i < len(parameters)
    }
    optimizer.load_state_dict({**state, "state": split})


def _split_like(value: Any, like: Any) -> Any:
    """Return a tensor of the same shape as a split one split as that is; others as they are."""
    if (
        not isinstance(value, Tensor)
        or not hasattr(like, "placements")
        or value.shape != like.shape
    ):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements)


# --- signals --------------------------------------------------------------------------------------
# Schedulers send SIGTERM or SIGUSR1. A signal is recorded, the step is finished, a checkpoint is
# written, and the run ends with the status of the signal. A single process that waits for data ends
# at once, because no step is in progress. A second Ctrl-C ends the run immediately.

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class Stopped(KeyboardInterrupt):
    """A signal stopped the run, and a checkpoint was written. status: exit status of a command."""

    def __init__(self, number: int) -> None:
        self.name, self.status = signal.Signals(number).name, 128 + number
        super().__init__(
            f"stopped by {self.name}; a checkpoint was written, resume continues from it"
        )


class SignalHandler:
    """Records signals. number: of the last one, 0 if there was none."""

    number, _may_raise = 0, False

    @contextmanager
    def watched(self) -> Iterator[SignalHandler]:
        """Record signals in this context. Does nothing outside the main thread."""
        is_main = threading.current_thread() is threading.main_thread()
        before = {number: signal.signal(number, self._record) for number in _SIGNALS if is_main}
        try:
            yield self
        finally:
            for number, handler in before.items():
                if signal.getsignal(number) == self._record:  # other code may have replaced it
                    signal.signal(number, handler)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Let a signal raise Stopped in this context, where no step is in progress."""
        self._may_raise = True
        try:
            if self.number:  # it came before the context
                raise Stopped(self.number)
            yield
        finally:
            self._may_raise = False

    def _record(self, number: int, frame: FrameType | None) -> None:
        if self.number == number == signal.SIGINT:
            raise KeyboardInterrupt
        self.number = number
        if self._may_raise:
            self._may_raise = False  # a checkpoint is written
            raise Stopped(number)


def raise_stopped(
    signals: SignalHandler, distributed: DistributedContext, wish: int = GO_ON
) -> int:
    """Return the most urgent wish. Raises Stopped if any process got a signal. Collective."""
    wish = distributed.agreed(STOP if signals.number else wish)
    if wish == STOP:
        raise Stopped(signals.number or signal.SIGTERM)
    return wish
