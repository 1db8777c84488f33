"""One pass over samples without learning: metrics of a model, and some of its predictions.

Also here: the sums of an epoch of training, and predicted masks as pictures.
"""

from __future__ import annotations

import math
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain, compress, islice
from typing import Any, ClassVar, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor, nn

from wdstrain.decode.codecs import FIRST_TRANSPOSED, IGNORED, open_picture
from wdstrain.decode.fields import Example
from wdstrain.decode.formats import EXTENSIONS
from wdstrain.decode.transforms import center_crop
from wdstrain.loader.batch_assembly import TakenBatch
from wdstrain.loader.device import to_device
from wdstrain.loader.loader import Loader
from wdstrain.report.terminal import Reporter
from wdstrain.storage.files import put_whole
from wdstrain.training.config import Config, refuse
from wdstrain.training.distributed import DistributedContext, is_sharded
from wdstrain.training.heads import Criterion, TrainingStep
from wdstrain.training.inputs import ModelInputs
from wdstrain.training.metrics import Metrics
from wdstrain.training.tasks import Task

Pixels = npt.NDArray[np.uint8]

_KEPT = 24  # worst samples

# Colors of classes 0 to 254 and of pixels without a class, those of Pascal VOC: neighboring numbers
# differ much. uint8[256, 3]
_BITS = np.arange(8)[:, None]
_COLOR_BITS = np.arange(256)[:, None, None] >> (3 * _BITS + np.arange(3)) & 1
PALETTE: Pixels = (_COLOR_BITS << (7 - _BITS)).sum(1).astype(np.uint8)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What training and evaluation of one task share.

    criterion: of the user's, in place of the heads' losses; for each head by name, if there are
    several. training_step: of the user's, in place of the call of the model and its losses.
    metrics: torchmetrics by name.
    """

    task: Task
    config: Config
    inputs: ModelInputs
    device: torch.device
    distributed: DistributedContext
    reporter: Reporter
    criterion: Criterion | Mapping[str, Criterion] | None = None
    training_step: TrainingStep | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def criterion_modules(self) -> nn.ModuleList:
        """Criteria and training step of the user's that are modules, with parameters and buffers."""
        own = self.criterion
        given = [*(own.values() if isinstance(own, Mapping) else [own]), self.training_step]
        return nn.ModuleList(one for one in given if isinstance(one, nn.Module)).to(self.device)

    def autocast(self) -> torch.autocast:
        """Return the context of 16-bit arithmetic, if the run has it."""
        dtype = torch.bfloat16 if self.config.amp == "bf16" else torch.float16
        return torch.autocast(self.device.type, dtype, enabled=self.config.amp != "none")

    def call(self, model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        """Return the outputs of a model for a batch."""
        with self.autocast():
            return self.inputs.call(model, batch, channels_last=self.config.channels_last)

    def step_losses(self, model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        """Return the losses [b] that the user's training step gives.

        It gets inputs as the model takes them, targets under the names of their labels, and keys.
        """
        inputs = self.inputs.prepared(batch, channels_last=self.config.channels_last)
        labels = {head.name: batch[f"target {head.name}"] for head in self.task.heads}
        with self.autocast():
            step = cast(TrainingStep, self.training_step)
            losses = step({**labels, **inputs, "__key__": batch["__key__"]}, model)
        return losses.float().expand(len(batch["__key__"]))


Scored = tuple[dict[str, Any], Tensor, TakenBatch]  # batch, outputs, its ids and bad samples
drain = partial(deque[Any], maxlen=0)  # exhausts an iterator


def run_model(
    model: nn.Module, loader: Loader, setup: Setup, title: str, limit: int | None = None
) -> Iterator[Scored]:
    """Yield each batch of a pass over a loader, with the outputs [b, ...] of the model, float32.

    Call it without gradients. limit: most batches. FSDP needs all processes for a call, so a
    process whose last batch holds no sample calls the model with a blank one.
    """
    model.eval()
    total, batches = len(loader), loader.epoch(0, until=1)
    steps = min(limit or total, total)
    # a pass that is not cut short goes on to its end, where planned and delivered are compared
    some = islice(to_device(batches, setup.device), steps if steps < total else None)
    for step, batch in enumerate(some, 1):
        rows = len(batch["__key__"])
        outputs = setup.call(model, batch if rows else setup.inputs.blank(1, setup.device))
        yield batch, outputs.float()[:rows], batches.delivered
        setup.reporter.step(title, step, steps)


def evaluate_pass(
    model: nn.Module,
    loader: Loader,
    setup: Setup,
    title: str,
    *,
    limit: int | None = None,
    consume: Callable[[Iterator[Scored]], object] = drain,
) -> tuple[dict[str, float], dict[str, Any]]:
    """Return (metrics, details) of one pass over a loader, of all processes together.

    Each sample counts once. A sample that cannot be read counts as bad, and its substitute not at
    all. details: "heads" with confusion matrices and the like, "worst" with predictions. limit:
    most batches. consume: takes all batches, as they are.
    """
    task, distributed = setup.task, setup.distributed
    setup.criterion_modules.eval()
    metrics = EvalMetrics(task, setup.device, setup.metrics)
    worst: list[Preview] = []

    def measured() -> Iterator[Scored]:
        for scored in run_model(model, loader, setup, title, limit):
            own = _select_rows(*scored)
            if len(own["__key__"]):
                outputs, targets = own["__outputs__"], task.targets(own)
                losses = task.losses(outputs, targets, criterion=setup.criterion)
                metrics.update(outputs, targets, losses)
                worst[:] = _with_worst(worst, setup, own, outputs, losses)
            yield scored

    # FSDP reuses the memory of completed tensors in training, which must not be of inference mode.
    with torch.no_grad() if is_sharded(model) else torch.inference_mode():
        consume(measured())
    values, details = metrics.compute(distributed.reduce)
    values["bad"] = sum(distributed.gather(loader.report()["bad"]))
    return values, {"heads": details, "worst": _largest(chain(*distributed.gather(worst)))}


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


class EvalMetrics:
    """Metrics of one pass over samples.

    user_metrics: torchmetrics by name, updated with (predictions, target): probabilities of classes
    or numbers. With several heads, by HEAD/NAME.
    """

    def __init__(
        self, task: Task, device: torch.device, user_metrics: Mapping[str, Any] | None = None
    ) -> None:
        self._task = task
        zeros = partial(torch.zeros, dtype=torch.float64, device=device)
        self._loss = zeros(2)  # sum of losses, samples
        self._sums = [{name: zeros(s) for name, s in head.sums().items()} for head in task.heads]
        self._user = {name: metric.to(device) for name, metric in (user_metrics or {}).items()}
        for metric in self._user.values():
            metric.reset()

    @torch.no_grad()
    def update(self, outputs: Tensor, targets: Sequence[Tensor], losses: Tensor) -> None:
        """Add a batch of one sample or more. losses: [b]."""
        self._loss += torch.stack([losses.double().sum(), torch.ones_like(losses).sum()])
        heads, scores = self._task.heads, self._task.split(outputs)
        for head, sums, own, target in zip(heads, self._sums, scores, targets, strict=True):
            head.add(sums, own.double(), target)
        for name, metric in self._user.items():
            n = self._task.head_of(name)
            metric.update(*heads[n].for_metric(scores[n], targets[n]))

    def compute(self, reduce: Callable[[Tensor], Tensor]) -> tuple[Metrics, dict[str, Any]]:
        """Return (metrics, details of each head). Undefined metrics are left out.

        reduce: returns the sum of a tensor over all processes.
        """
        loss, samples = reduce(self._loss).tolist()
        metrics: Metrics = {"samples": int(samples), "loss": loss / max(1.0, samples)}
        details: dict[str, Any] = {}
        for head, sums in zip(self._task.heads, self._sums, strict=True):
            total = {name: reduce(value) for name, value in sums.items()}
            values, details[head.name] = head.results(total, max(1, int(samples)))
            for name, value in values.items():
                if not (head.classes and value.isnan()):
                    metrics[self._task.metric_name(head, name)] = value.item()
        metrics |= {name: float(metric.compute()) for name, metric in self._user.items()}
        return metrics, details


def _select_rows(batch: dict[str, Any], outputs: Tensor, delivered: TakenBatch) -> dict[str, Any]:
    """Return a batch with its outputs, without substitutes of bad samples."""
    batch, own = batch | {"__outputs__": outputs}, delivered.own
    if own.all():
        return batch
    rows, keys = torch.from_numpy(own), compress(batch["__key__"], own)
    tensors = ((name, value) for name, value in batch.items() if isinstance(value, Tensor))
    return {name: value[rows.to(value.device)] for name, value in tensors} | {"__key__": list(keys)}


# --- samples for the report -----------------------------------------------------------------------


class Preview(NamedTuple):
    """A sample with its loss. pixels: uint8[h, w, 3].

    said: (prediction, truth, whether it is wrong) by label, in words.
    """

    loss: float
    key: str
    said: dict[str, tuple[str, str, bool]]
    pixels: Pixels | None


def _largest(samples: Iterable[Preview]) -> list[Preview]:
    """Return the samples with the largest losses."""
    return sorted(samples, key=lambda sample: (-sample.loss, sample.key))[:_KEPT]


def _with_worst(
    worst: Sequence[Preview],
    setup: Setup,
    batch: Mapping[str, Any],
    outputs: Tensor,
    losses: Tensor,
) -> list[Preview]:
    """Return the worst samples so far, of these and of a batch. losses: [b]."""
    ranks = losses.nan_to_num(nan=math.inf).tolist()
    least = worst[-1].loss if len(worst) == _KEPT else -math.inf
    rows = (row for row, loss in enumerate(ranks) if loss >= least)
    some = sorted(rows, key=lambda row: (-ranks[row], batch["__key__"][row]))[:_KEPT]
    new = [_preview(setup, batch, row, outputs[row : row + 1], ranks[row]) for row in some]
    return _largest([*worst, *new])


def _preview(
    setup: Setup, batch: Mapping[str, Any], row: int, outputs: Tensor, loss: float
) -> Preview:
    """Return the preview of a row. outputs: of this row alone."""
    said, panels, task, picture = {}, [], setup.task, setup.inputs.picture
    if picture is not None:
        panels.append(batch[picture][row].permute(1, 2, 0).cpu().numpy())
    for head, scores, targets in zip(
        task.heads, task.split(outputs), task.targets(batch), strict=True
    ):
        (predicted,), (true,) = head.predicted(scores), head.true(targets[row : row + 1])
        if head.kind == "mask":
            panels += [_colored(panels[0], mask) for mask in (predicted, true) if panels]
            continue
        is_name = isinstance(predicted, str)
        share = f" {float(head.probabilities(scores).max()):.0%}" if is_name else ""
        is_wrong = isinstance(predicted, (str, list)) and predicted != true
        said[head.name] = (head.text(predicted) + share, head.text(true), is_wrong)
    pixels = np.concatenate(panels, axis=1) if panels else None
    return Preview(loss, batch["__key__"][row], said, pixels)


def _colored(image: Pixels, mask: Tensor) -> Pixels:
    """Return a mask in colors over its picture, after a white line."""
    colored = (image.astype(np.uint16) + PALETTE[mask.numpy()]) // 2
    return np.pad(colored, ((0, 0), (1, 0), (0, 0)), constant_values=255).astype(np.uint8)


# --- masks ----------------------------------------------------------------------------------------


class MaskFolder:
    """Folder of predicted masks, named by the keys of their pictures: PNGs in colors of the classes."""

    def __init__(self, inputs: ModelInputs, path: str) -> None:
        self._folder, self._names, self._image = os.path.splitext(path)[0], set[str](), inputs.image
        refuse(
            (
                os.path.isfile(self._folder)
                or (os.path.isdir(self._folder) and os.listdir(self._folder)),
                f"{self._folder} has files already, and predicted masks would be written there.",
                "Name another out, or empty the folder.",
            )
        )
        os.makedirs(self._folder, exist_ok=True)

    def write(self, mask: Tensor, key: str, size: tuple[int, int] | None) -> str:
        """Write a mask, uint8[h, w], in the size of the picture, of which the model saw the center.

        Returns its path from the folder of the table.
        """
        numbers: Pixels = mask.numpy()
        if size is not None and self._image is not None:
            aspect = numbers.shape[1] / numbers.shape[0]
            top, left, h, w = center_crop(*size, aspect, self._image.augment["crop_pct"])
            seen = Image.fromarray(numbers).resize((w, h), Image.Resampling.NEAREST)
            numbers = np.full(size, IGNORED, np.uint8)
            numbers[top : top + h, left : left + w] = np.asarray(seen)
        stem, ending = os.path.splitext(key)
        stem = stem if ending[1:].lower() in EXTENSIONS else key
        name = re.sub(r"[^\w. -]", "_", stem.lstrip("."))[:60] or "_"
        while name.lower() in self._names:
            name += f"-{len(self._names)}"
        self._names.add(name.lower())
        picture = Image.fromarray(numbers, "L")
        picture.putpalette(PALETTE.tobytes())
        with put_whole(os.path.join(self._folder, f"{name}.png")) as file:
            picture.save(file, "PNG")
        return f"{os.path.basename(self._folder)}/{name}.png"


@dataclass(frozen=True)
class PictureSize:
    """Field of height and width of a picture, upright. int64[2]"""

    names: tuple[str, ...]
    example: ClassVar[Example] = Example((2,), "int64")

    def read(self, name: str, data: memoryview, out: Any, draws: Any) -> None:
        image = open_picture(bytes(data))
        is_turned = image.getexif().get(0x0112, 1) >= FIRST_TRANSPOSED
        out[...] = image.size if is_turned else image.size[::-1]
