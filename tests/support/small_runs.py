"""Runs that take a fraction of a second: small sets, small models and quiet progress displays."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

import wdstrain as wt
from tests.conftest import picture
from tests.support.outcomes import result_or_refusal

# A learning rate of the given value in every step, so that weights can be computed by hand.
PLAIN: dict[str, Any] = {"epochs": 1, "batch_size": 8, "device": "cpu", "schedule": "constant"}
SMALL: dict[str, Any] = {**PLAIN, "image_size": 8}

T = TypeVar("T")


class Lines:
    """Progress display that keeps its lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def step(self, *values: Any) -> None: ...

    def line(self, text: str) -> None:
        self.lines.append(" ".join(text.split()))

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


class Linear(torch.nn.Sequential):
    """A linear model of images of 8 x 8 pixels, or of other inputs with as many values."""

    def __init__(self, outputs: int, inputs: int = 192) -> None:
        super().__init__(torch.nn.Flatten(), torch.nn.Linear(inputs, outputs))


class Constant(torch.nn.Module):
    """A model that returns the same outputs for every input."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.zeros(outputs))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.bias.expand(len(image), -1) + 0 * image.sum()


class Bias(wt.Callback):
    """Callback that gives the model `Constant` these outputs, by epoch."""

    def __init__(self, values: Sequence[float]) -> None:
        self._values = values

    def on_step_end(self, trainer: Any) -> None:
        trainer.model.bias.data[:] = self._values[trainer.state.epoch]


class Stop(wt.Callback):
    """Callback that ends a run after a step of an epoch, both counted as in `trainer.state`."""

    def __init__(self, epoch: int, step: int) -> None:
        self._position = (epoch, step)

    def on_step_end(self, trainer: Any) -> None:
        if (trainer.state.epoch, trainer.state.step) == self._position:
            trainer.stop("stopped by the test")


def small_image(number: int) -> bytes:
    """Return a PNG of 8 x 8 pixels."""
    return picture(number, size=(8, 8))


def write_set(out: Path, fields: Iterable[dict[str, Any]], **options: Any) -> Path:
    """Write a set of small images with these fields, and return its folder."""
    samples = ({"__key__": f"k{i:03d}", "png": small_image(i), **f} for i, f in enumerate(fields))
    wt.pack(samples, out, **options)
    return out


def two_classes(out: Path, count: int = 40, **options: Any) -> Path:
    """Write a set of small images of the classes a and b."""
    return write_set(out, ({"cls": i % 2} for i in range(count)), classes=["a", "b"], **options)


def numbers(out: Path, values: Sequence[float], name: str = "y") -> Path:
    """Write a set of small images with the label `name`."""
    labels = [wt.Label(name, "number", "json", name)]
    return write_set(out, ({"json": {name: value}} for value in values), labels=labels)


# A label y of each kind, and its value for each sample
BIRDS, WEATHER = ("heron", "finch", "eagle"), ("wet", "cold", "dark")
KINDS: dict[str, tuple[wt.Label, Callable[[int], Any]]] = {
    "binary": (wt.Label("y", "class", "json", "y", ("no", "yes")), lambda i: ("no", "yes")[i % 2]),
    "class": (wt.Label("y", "class", "json", "y", BIRDS), lambda i: BIRDS[i % 3]),
    "multi": (wt.Label("y", "multi", "json", "y", WEATHER), lambda i: list(WEATHER[i % 3 :])),
    "number": (wt.Label("y", "number", "json", "y"), lambda i: i % 5),
}


def of_kind(out: Path, kind: str) -> Path:
    """Write a set of 16 small images with a label y of a kind, if it is not there yet."""
    label, value = KINDS[kind]
    fields = ({"json": {"y": value(i)}} for i in range(16))
    return out if out.exists() else write_set(out, fields, labels=[label])


def last(run: Path) -> Path:
    """Return the path of the last checkpoint of a run."""
    return run / "checkpoints" / "last.pt"


def saved(run: Path) -> dict[str, torch.Tensor]:
    """Return the weights of the last checkpoint of a run."""
    weights: dict[str, torch.Tensor] = torch.load(last(run), weights_only=True)["model"]
    return weights


def rows_of(table: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file."""
    return list(csv.DictReader(table.read_text(encoding="utf-8").splitlines()))


def unless_refused(call: Callable[[], T], *words: str) -> T | None:
    """Return the result of a call; None if it was refused with an error that has these words.

    For promises that may be kept in two ways: do what the options say, or refuse them.
    """
    outcome = result_or_refusal(call)
    if not isinstance(outcome, str):
        return outcome
    assert all(word in outcome for word in words), outcome
    return None
