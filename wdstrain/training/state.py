"""Position of a run, the metric that chooses the best, and the objects of the user: callbacks, losses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from wdstrain.errors import UsageError
from wdstrain.training.config import IMAGE_OPTIONS, Config, TrainArguments, is_made, refuse
from wdstrain.training.tasks import Task

# Stages of a step: data, copy to the device, forward and backward, optimizer, other.
STAGES = ("data", "copy", "compute", "optimizer", "other")

_OF_LOSSES = ("label_smoothing", "class_weights")
_MINIMIZED = ("loss", "mse", "mae", "ece")  # metrics of which less is better


@dataclass
class TrainerState:
    """Position and history of a run.

    step: in the epoch, of batches. best: validation of the best epoch. since_best: epochs
    that did not improve on it by more than min_delta. seconds: of the epoch so far, by stage.
    """

    epoch: int = 0
    step: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)
    best: dict[str, float] | None = None
    since_best: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    verdict: str = ""

    def finish_epoch(self, metrics: dict[str, Any]) -> None:
        """Add an epoch to the history, and go to the start of the next."""
        self.history.append(metrics)
        self.epoch, self.step = self.epoch + 1, 0
        self.seconds = dict.fromkeys(STAGES, 0.0)


class Monitor:
    """Metric of validation that chooses the best epoch, and ends a run that improves no longer."""

    def __init__(self, config: Config, task: Task, metrics: Mapping[str, Any]) -> None:
        """metrics: of the user's. Raises UsageError for one without a direction."""
        self._config = config
        self.name = config.monitor or ("loss" if task.has_several else task.heads[0].main_metric)
        name, _, direction = self.name.rpartition(":")
        maximizes: bool | None = self.name.rpartition("/")[2] not in _MINIMIZED
        if direction in ("min", "max"):
            self.name, maximizes = name, direction == "max"
        elif self.name in metrics:
            maximizes = getattr(metrics[self.name], "higher_is_better", None)
        if maximizes is None:
            raise UsageError(
                "the metric has no higher_is_better.",
                f"Say whether less or more is better: {self.name}:min or {self.name}:max.",
                option="monitor",
                value=self.name,
            )
        self.maximizes = maximizes

    def improves(self, value: float, best: float, min_delta: float = 0.0) -> bool:
        """Return whether a value improves on the best by more than min_delta.

        NaN never does, and every number improves on NaN.
        """
        gain = value - best if self.maximizes else best - value
        return gain > min_delta or (math.isnan(best) and not math.isnan(value))

    def is_best(self, val: Mapping[str, float] | None, best: Mapping[str, float] | None) -> bool:
        """Return whether an epoch is the best so far. Without validation every epoch is."""
        if val is None or best is None:
            return True
        return self.improves(val.get(self.name, math.nan), best.get(self.name, math.nan))

    def waits(self, history: Sequence[Mapping[str, Any]], min_delta: float = 0.0) -> list[int]:
        """Return for each epoch how many epochs up to it did not improve on the best before."""
        best, waited, waits = math.nan, 0, []
        for line in history:
            value = line.get("val", {}).get(self.name, math.nan)
            waited += 1
            if self.improves(value, best, min_delta):
                best, waited = value, 0
            waits.append(waited)
        return waits

    def plateaus(self, history: Sequence[Mapping[str, Any]]) -> int:
        """Return how often the schedule "plateau" dropped the learning rate."""
        every = self._config.plateau_epochs
        return sum(waited > 0 and waited % every == 0 for waited in self.waits(history))

    def stop_reason(self, since_best: int) -> str:
        """Return why training ends early; "" if it goes on. since_best: epochs."""
        if not 0 < self._config.patience <= since_best:
            return ""
        return (
            f"{self.name} did not improve for {since_best} epochs "
            f"(patience={self._config.patience}). Raise patience, or set it to 0, to go on."
        )

    def check(self, val: Mapping[str, float]) -> None:
        """Raise UsageError if validation lacks the metric that the option names."""
        if self._config.monitor is not None and self.name not in val:
            raise UsageError(
                "{monitor} is not among the metrics of validation.",
                f"Use one of: {', '.join(sorted(val))}.",
                {"monitor": self.name},
            )


# --- objects of the user ---------------------------------------------------------------------------


class Callback:
    """Base class of callbacks. Override the methods that you need; each is called on every rank.

    `trainer` is the run (`wdstrain.training.run.Run`). A callback may read `trainer.model`,
    `trainer.optimizer`, `trainer.config`, `trainer.state` and `trainer.is_leader`, call
    `trainer.stop(reason)`, and set `trainer.lr_scale`, a factor on the learning rate of all further
    steps. What `state_dict()` of a callback returns is kept in checkpoints, and given to its
    `load_state_dict` on a resume.
    """

    def on_train_start(self, trainer: Any) -> None:
        """Before the first step, also of a resumed run."""

    def on_step_end(self, trainer: Any) -> None:
        """After each step of the optimizer. Reading a loss here would wait for the GPU."""

    def on_epoch_end(self, trainer: Any, metrics: dict[str, Any]) -> None:
        """After the validation of an epoch. metrics: the line of metrics.jsonl."""

    def on_checkpoint(self, trainer: Any, path: str) -> None:
        """After a checkpoint was written, on the rank that wrote it."""

    def on_train_end(self, trainer: Any) -> None:
        """After the last epoch, or when the run ended early; not after an error."""


def check_objects(arguments: TrainArguments, config: Config, task: Task, *, has_val: bool) -> None:
    """Raise UsageError for objects of the user's that are none, and for options without effect."""
    criterion, metrics, optimizer = arguments.criterion, arguments.metrics, arguments.optimizer
    own = criterion if isinstance(criterion, Mapping) else {task.heads[0].name: criterion}
    labels = [head.name for head in task.heads]
    loss = "(outputs, target) -> loss, such as torch.nn.CrossEntropyLoss()"
    groups = "of parameter groups, such as lambda groups: torch.optim.Adam(groups, lr=1e-3)"
    functions = [
        *(("criterion", function, loss) for function in own.values()),
        ("training_step", arguments.training_step, "(batch, model) -> loss"),
        ("optimizer", None if isinstance(optimizer, str) else optimizer, groups),
    ]
    for name, value, form in functions:
        if value is not None and not callable(value):
            raise UsageError(f"must be a function {form}.", option=name, value=value)
    has_losses = criterion is not None and (own is not criterion or len(own) >= len(labels))
    replaced = (
        ("training_step", arguments.training_step is not None, _OF_LOSSES),
        ("criterion", has_losses, _OF_LOSSES),
        ("optimizer", is_made(config.optimizer), ("lr", "weight_decay")),
        ("fields", arguments.fields is not None, IMAGE_OPTIONS),
    )
    needs_val = config.patience or config.monitor or config.schedule == "plateau"
    refuse(
        (
            not has_val and (needs_val or arguments.val_fields is not None),
            "patience, monitor, val_fields and the schedule plateau need validation data.",
            "Give {val}.",
            {"val": ...},
        ),
        (
            own.keys() - set(labels),
            f"criterion names {', '.join(map(repr, own))}, and the labels are {', '.join(labels)}.",
        ),
        (
            config.class_weights != "none" and config.balance in task.label_names,
            "{class_weights} and {balance} both correct for rare classes.",
            "Give one of them.",
            {"class_weights": config.class_weights, "balance": config.balance},
        ),
        (
            metrics is not None and not isinstance(metrics, Mapping),
            f"metrics={metrics!r}: must be a dict of torchmetrics by name, such as "
            f'{{"kappa": torchmetrics.CohenKappa(...)}}.',
        ),
        *(
            (
                is_given and not config.has_default(name),
                f"{{{name}}} has no effect with {{{owner}}}.",
                f"Leave it out, and let your {owner} do it.",
                {name: getattr(config, name), owner: ...},
            )
            for owner, is_given, names in replaced
            for name in names
        ),
    )
    for callback in arguments.callbacks:
        check_callback(callback)


def check_callback(callback: object) -> None:
    """Raise UsageError for a method on_... that no run calls."""
    known = [name for name in vars(Callback) if name.startswith("on_")]
    for name in dir(callback):
        if name.startswith("on_") and name not in known and callable(getattr(callback, name)):
            raise UsageError(
                f"{type(callback).__name__}.{name} is never called. Methods of callbacks are "
                f"{', '.join(known)}."
            )
