"""What is to be learnt, told by the labels of an index: a class or a number.

A task knows the fields of a batch, the number of outputs, the loss, and how predictions are scored. Scores are sums over
samples, so they are exact whatever the sizes of the batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from wdstrain.augmentation import IMAGENET
from wdstrain.errors import UsageError
from wdstrain.fields import Field, image, label, number
from wdstrain.indexing import Index, Label


@dataclass(frozen=True)
class Task:
    """Learning one label from images."""

    target: Label

    @classmethod
    def of(cls, index: Index, name: str | None = None) -> Task:
        """The task of an index: its label called `name`, or its only one."""
        labels = {label.name: label for label in index.labels}
        if name is not None and name not in labels:
            raise UsageError(f"there is no label {name!r} in the index; it has: {', '.join(labels) or 'none'}.")
        if name is None and len(labels) != 1:
            if labels:
                raise UsageError(f"the index has several labels: {', '.join(labels)}. Name one with --label.")
            raise UsageError(
                "the index says nothing of labels. Convert with `wdstrain convert folder` or `convert table --label`."
            )
        target = labels[name] if name is not None else next(iter(labels.values()))
        if target.kind == "multi":
            raise UsageError(f"the label {target.name!r} holds several classes at once, which train cannot learn yet.")
        return cls(target)

    @property
    def is_class(self) -> bool:
        return self.target.kind == "class"

    @property
    def outputs(self) -> int:
        """Outputs of the model."""
        return len(self.target.classes) if self.is_class else 1

    def fields(self, size: int, augment: str | None = None) -> dict[str, Field]:
        """The fields of a batch: "image" and "target"."""
        column = self.target.column
        target: Field
        if self.is_class:
            target = label(self.target.field, column=column, classes=self.target.classes)
        else:
            target = number(self.target.field, column=column)
        return {"image": image(size=size, augment=augment), "target": target}

    def loss(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Mean loss of a batch: cross entropy, or squared error. outputs: [b, outputs]; target: [b]."""
        if self.is_class:
            return functional.cross_entropy(outputs, target)
        return functional.mse_loss(outputs[:, 0], target)

    def score(self, outputs: Tensor, target: Tensor) -> dict[str, float]:
        """Sums over a batch, by metric."""
        if self.is_class:
            right = outputs.argmax(1) == target
            return {"loss": float(functional.cross_entropy(outputs, target, reduction="sum")), "accuracy": float(right.sum())}
        error = outputs[:, 0] - target
        return {"mse": float((error**2).sum()), "mae": float(error.abs().sum()), "mean": float(target.sum())}

    def better(self, metrics: Mapping[str, float], best: Mapping[str, float] | None) -> bool:
        """Whether validation metrics are better than the best so far."""
        if best is None:
            return True
        return metrics["accuracy"] > best["accuracy"] if self.is_class else metrics["mse"] < best["mse"]

    def text(self, metrics: Mapping[str, float]) -> str:
        """The metrics in a few words."""
        if self.is_class:
            return f"accuracy {metrics['accuracy']:.2%}, loss {metrics['loss']:.4f}"
        baseline = f" (predicting the mean gives {metrics['mse_of_mean']:.4f})" if "mse_of_mean" in metrics else ""
        return f"mse {metrics['mse']:.4f}{baseline}, mae {metrics['mae']:.4f}"

    def short(self, metrics: Mapping[str, float]) -> str:
        """The metric that counts, in a word."""
        return f"accuracy {metrics['accuracy']:.2%}" if self.is_class else f"mse {metrics['mse']:.4f}"

    def check(self, index: Index) -> None:
        """Raise UsageError if these shards label their samples otherwise than those the task comes from."""
        mine = {label.name: label for label in index.labels}.get(self.target.name)
        if index.labels and mine is None:
            raise UsageError(
                f"these shards have no label {self.target.name!r}, but {', '.join(one.name for one in index.labels)}."
            )
        if mine is not None and mine.classes != self.target.classes:
            raise UsageError(
                f"the classes of these shards are {_some(mine.classes)}; those that are learnt are {_some(self.target.classes)}. "
                f"Convert both together, so that classes have the same numbers."
            )

    def state(self) -> dict[str, Any]:
        """The task as plain values, for a checkpoint."""
        return {**vars(self.target), "classes": list(self.target.classes)}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Task:
        return cls(Label(**{**state, "classes": tuple(state["classes"])}))


def _some(classes: tuple[str, ...]) -> str:
    return ", ".join(classes[:6]) + (f", ... ({len(classes)})" if len(classes) > 6 else "")


def normalised(pixels: Tensor) -> Tensor:
    """uint8 [b, 3, h, w] to float32, by ImageNet's mean and standard deviation."""
    mean, std = (torch.tensor(one, device=pixels.device).view(3, 1, 1) * 255 for one in IMAGENET)
    return (pixels.float() - mean) / std
