"""The task: which labels of an index are learned, with one head for each.

The model returns one row of outputs per image, and each head has its columns of it, so any model
with a number of outputs fits. For masks it returns a row of outputs per pixel. Losses are per
sample. The loss of a batch is their mean, so processes that share a batch get the same gradient as
one process that has it whole.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wdstrain.errors import UsageError
from wdstrain.shards.index import Index
from wdstrain.shards.kinds import ColumnInfo
from wdstrain.training.config import IMAGE_OPTIONS, Config, TrainArguments, is_made, refuse
from wdstrain.training.heads import HEADS, Criterion, Head


@dataclass(frozen=True)
class Task:
    """Learning of some labels from images."""

    heads: tuple[Head, ...]

    @classmethod
    def of(cls, index: Index, labels: str | None = None) -> Task:
        """Return the task of an index.

        labels: NAME or NAME:KIND with a comma between; None: the only label of the index. Raises
        UsageError if the index has no such label, or several and none is named.
        """
        known = {label.name: label for label in index.labels}
        differing = {own.name: why for own, why in index.differing.items() if own.name not in known}
        default = "" if known else next(iter(differing), "")
        asked = default if labels is None else labels.strip()
        refuse(
            asked in differing, f"{differing.get(asked)}.", "Pack them together, or leave some out."
        )
        refuse(
            not known,
            "the index declares no labels.",
            "Name the field or the JSON entry that holds them, such as {label} or json.kind, or "
            "declare it once: wdstrain index URL --label cls",
            label="cls",
        )
        refuse(
            labels is None and len(known) > 1,
            f"the index has several labels: {', '.join(known)}.",
            "Name those to learn, such as {label}.",
            label=",".join(known),
        )
        words = (labels or next(iter(known))).split(",")
        heads = tuple(_make_head(known, word.strip()) for word in words)
        refuse(
            len({head.name for head in heads}) < len(heads),
            "{label} names a label twice.",
            label=labels,
        )
        refuse(
            len(heads) > 1 and any(head.kind == "mask" for head in heads),
            "{label}: masks must be the only label that is learned.",
            label=labels,
        )
        return cls(heads)

    @property
    def outputs(self) -> int:
        """Number of outputs of the model."""
        return sum(head.outputs for head in self.heads)

    def output_shape(self, image: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the model's output for an image of this shape, without the batch."""
        return (self.outputs, *image[1:]) if self.is_dense else (self.outputs,)

    @property
    def is_dense(self) -> bool:
        """Whether the model has outputs for each pixel."""
        return self.heads[0].kind == "mask"

    @property
    def has_several(self) -> bool:
        """Whether there are several heads; then metrics are named HEAD/METRIC."""
        return len(self.heads) > 1

    @property
    def main_metric(self) -> str:
        """The metric that chooses the best epoch without the option monitor."""
        return "loss" if self.has_several else self.heads[0].main_metric

    def metric_name(self, head: Head, name: str) -> str:
        """Return the name of a head's metric."""
        return f"{head.name}/{name}" if self.has_several else name

    def head_of(self, metric: str) -> int:
        """Return the number of the head that a metric of the user's is for: HEAD/NAME, or 0."""
        name = metric.partition("/")[0]
        return next((n for n, head in enumerate(self.heads) if head.name == name), 0)

    @property
    def label_names(self) -> dict[str, Head]:
        """The heads by the names that a user may give labels; a single one is also "label"."""
        stored = {h.target.stored_as: h for h in self.heads if h.kind == "mask"}
        heads = stored | {head.name: head for head in self.heads}
        return heads if self.has_several else {"label": self.heads[0]} | heads

    def targets(self, batch: Mapping[str, Any]) -> list[Tensor]:
        """Return the target of each head."""
        return [batch[f"target {head.name}"] for head in self.heads]

    def split(self, outputs: Tensor) -> list[Tensor]:
        """Return the scores of each head."""
        columns = torch.split(outputs.float(), [head.outputs for head in self.heads], 1)
        return [head.scores(own) for head, own in zip(self.heads, columns, strict=True)]

    def losses(
        self,
        outputs: Tensor,
        targets: Sequence[Tensor],
        *,
        smoothing: float = 0.0,
        weights: Sequence[Tensor | None] = (),
        criterion: Criterion | Mapping[str, Criterion] | None = None,
    ) -> Tensor:
        """Return the sum of the heads' losses for each sample, float[b].

        weights: of classes, by head. criterion: of the user's, in place of the heads' own losses.
        """
        total = torch.zeros(len(outputs), device=outputs.device)
        weights = weights or [None] * len(self.heads)
        parts = zip(self.heads, self.split(outputs), targets, weights, strict=True)
        for head, scores, target, weight in parts:
            own = criterion.get(head.name) if isinstance(criterion, Mapping) else criterion
            if own is None:
                losses = head.losses(scores, target, smoothing=smoothing, weights=weight)
            else:
                losses = own(scores, head.aim(target))
            total = total + (losses.flatten(1).mean(1) if losses.ndim > 1 else losses)
        return total

    def check(self, index: Index) -> None:
        """Raise UsageError for shards whose labels are not among the learned ones.

        Classes are compared by name. Other numbers for the same names are no error.
        """
        given = {label.name: label for label in index.labels}
        for head in self.heads:
            other, learned = given.get(head.name), head.target.numbering
            if other is None and (reason := index.disagreement(*head.target.place)):
                raise UsageError(
                    f"{reason}. The model learns: {learned}.", "Pack the sets with one numbering."
                )
            if other is None:
                raise UsageError(
                    f"these shards have no label {head.name!r}, but "
                    f"{', '.join(given) or 'none'}. The model learns: {learned}.",
                    "Convert them with this label.",
                )
            refuse(
                other.task != head.target.task or not set(other.classes) <= set(head.classes),
                f"the classes of these shards are {other.numbering}, the model learns {learned}: "
                "every class must be learned.",
                "Convert the shards with the same class names.",
            )

    def equals(self, other: Task) -> bool:
        """Return whether the same is learned; the scale of numbers may differ."""
        return [(head.target, head.kind) for head in self.heads] == [
            (head.target, head.kind) for head in other.heads
        ]

    def state(self) -> list[dict[str, Any]]:
        """Return plain values, for a checkpoint."""
        return [
            {
                "target": {**head.target.row, "classes": list(head.classes)},
                "kind": head.kind,
                "mean": head.mean,
                "deviation": head.deviation,
            }
            for head in self.heads
        ]

    @classmethod
    def from_state(cls, state: Sequence[Mapping[str, Any]]) -> Task:
        """Return the task that `state` describes."""
        return cls(
            tuple(
                HEADS[row["kind"]](ColumnInfo.of_row(row["target"]), row["mean"], row["deviation"])
                for row in state
            )
        )

    def __str__(self) -> str:
        texts = ((head.name, _ABOUT[head.kind].format(len(head.classes))) for head in self.heads)
        return ", ".join(f"{name} ({about})" for name, about in texts)


def _make_head(known: Mapping[str, ColumnInfo], word: str) -> Head:
    """Return the head that NAME or NAME:KIND describes; without KIND the one that fits best.

    Raises UsageError for an unknown name, and for a kind that cannot learn the label.
    """
    name, kind = (word, "") if word in known else map(str.strip, word.partition(":")[::2])
    refuse(
        name not in known, f"the index has no label {name!r}.", f"Use one of: {', '.join(known)}."
    )
    target, count = known[name], len(known[name].classes)
    has_two = target.is_class and count == 2
    excluded = set() if has_two else {"binary"}
    if target.kind != "number" and target.entry is None:
        excluded.add("number")
    possible = [own for own in _KINDS[target.task] if own not in excluded]
    needed = 1 if target.kind == "multi" else 2
    reason = f"one of {count} classes" if target.is_class else f"of kind {target.kind}"
    refuse(
        not possible or (kind and kind not in possible),
        f"label {name!r} cannot be learned{f' as {kind!r}' if kind else ''}: it is {reason}.",
        f"Use {' or '.join(possible) or 'another label'}. Kinds are {', '.join(HEADS)}.",
    )
    refuse(
        "number" not in (target.kind, kind) and count < needed,
        f"label {name!r} has {count} class: must have {needed} or more.",
    )
    return HEADS[kind or ("binary" if has_two else possible[0])](target)


_ABOUT = {
    "class": "one of {} classes",
    "binary": "one of two classes",
    "multi": "any of {} classes",
    "number": "a number",
    "mask": "one of {} classes per pixel",
}

# Kinds of heads that can learn a kind of label; the first is the default.
_KINDS = {
    "class": ("class", "binary", "number"),
    "multi": ("multi",),
    "number": ("number",),
    "mask": ("mask",),
    "boxes": (),
}


# --- the best epoch -------------------------------------------------------------------------------

_MINIMIZED = ("loss", "mse", "mae", "ece")  # metrics of which less is better


class Monitor:
    """Metric of validation that chooses the best epoch, and ends a run that improves no longer."""

    def __init__(self, config: Config, main: str, metrics: Mapping[str, Any]) -> None:
        """main: the metric without the option monitor. metrics: of the user's.

        Raises UsageError for one without a direction.
        """
        self._config, self.name = config, config.monitor or main
        name, _, direction = self.name.rpartition(":")
        maximizes: bool | None = self.name.rpartition("/")[2] not in _MINIMIZED
        if direction in ("min", "max"):
            self.name, maximizes = name, direction == "max"
        elif self.name in metrics:
            maximizes = getattr(metrics[self.name], "higher_is_better", None)
        refuse(
            maximizes is None,
            "{monitor}: the metric has no higher_is_better.",
            f"Say whether less or more is better: {self.name}:min or {self.name}:max.",
            monitor=self.name,
        )
        self.maximizes = bool(maximizes)

    def improves(self, value: float, best: float, min_delta: float = 0.0) -> bool:
        """Return whether a value improves on the best by more than min_delta.

        NaN never does, and every number improves on NaN.
        """
        gain = value - best if self.maximizes else best - value
        return gain > min_delta or (math.isnan(best) and not math.isnan(value))

    def is_best(self, val: Mapping[str, float] | None, best: Mapping[str, float] | None) -> bool:
        """Return whether an epoch is the best so far. Without validation every epoch is."""
        return (
            val is None
            or best is None
            or self.improves(val.get(self.name, math.nan), best.get(self.name, math.nan))
        )

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

    def check(self, val: Mapping[str, float]) -> None:
        """Raise UsageError if validation lacks the metric that the option names."""
        refuse(
            self._config.monitor is not None and self.name not in val,
            "{monitor} is not among the metrics of validation.",
            f"Use one of: {', '.join(sorted(val))}.",
            monitor=self.name,
        )


# --- objects of the user --------------------------------------------------------------------------

_OF_LOSSES = ("label_smoothing", "class_weights")


def check_objects(arguments: TrainArguments, config: Config, task: Task, *, has_val: bool) -> None:
    """Raise UsageError for objects of the user's that are none, and for options without effect."""
    criterion, metrics, optimizer = arguments.criterion, arguments.metrics, arguments.optimizer
    own = criterion if isinstance(criterion, Mapping) else {task.heads[0].name: criterion}
    labels = [head.name for head in task.heads]
    functions = [
        ("training_step", arguments.training_step, "(batch, model) -> loss"),
        (
            "optimizer",
            None if isinstance(optimizer, str) else optimizer,
            "of parameter groups, such as lambda groups: torch.optim.Adam(groups, lr=1e-3)",
        ),
        *(
            (
                "criterion",
                function,
                "(outputs, target) -> loss, such as torch.nn.CrossEntropyLoss()",
            )
            for function in own.values()
        ),
    ]
    has_losses = criterion is not None and (own is not criterion or len(own) >= len(labels))
    replaced = (
        ("training_step", arguments.training_step is not None, _OF_LOSSES),
        ("criterion", has_losses, _OF_LOSSES),
        ("optimizer", is_made(config.optimizer), ("lr", "weight_decay")),
        ("fields", arguments.fields is not None, IMAGE_OPTIONS),
    )
    needs_val = config.patience or config.monitor or config.schedule == "plateau"
    for name, value, form in functions:
        refuse(
            value is not None and not callable(value),
            f"{{{name}}}: must be a function {form}.",
            **{name: value},
        )
    refuse(
        not has_val and (needs_val or arguments.val_fields is not None),
        "patience, monitor, val_fields and the schedule plateau need validation data.",
        "Give {val}.",
        val=...,
    )
    refuse(
        own.keys() - set(labels),
        f"criterion names {', '.join(map(repr, own))}, and the labels are {', '.join(labels)}.",
    )
    refuse(
        config.class_weights != "none" and config.balance in task.label_names,
        "{class_weights} and {balance} both correct for rare classes.",
        "Give one of them.",
        class_weights=config.class_weights,
        balance=config.balance,
    )
    refuse(
        metrics is not None and not isinstance(metrics, Mapping),
        f"metrics={metrics!r}: must be a dict of torchmetrics by name, such as "
        f'{{"kappa": torchmetrics.CohenKappa(...)}}.',
    )
    for owner, is_given, names in replaced:
        for name in names:
            refuse(
                is_given and not config.has_default(name),
                f"{{{name}}} has no effect with {{{owner}}}.",
                f"Leave it out, and let your {owner} do it.",
                **{name: getattr(config, name), owner: ...},
            )
