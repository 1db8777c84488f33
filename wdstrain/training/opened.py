"""A trained model, opened from its checkpoint. What only predicts or exports brings neither metrics nor the training loop with it.

A checkpoint is data, never code: it may name a function that makes its model, but only whoever opens it says that this function is
imported and called. Otherwise `evaluate stranger.pt` would run whatever the stranger names of all that Python can import.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from wdstrain.decode.fields import Field
from wdstrain.errors import UsageError
from wdstrain.training.checkpoints import read_checkpoint
from wdstrain.training.configuration import Config, check_known, is_made
from wdstrain.training.models import Maker, build, made_by
from wdstrain.training.task import Task, picture_from, shape_of

_OF_MACHINE = (
    "device",
    "num_workers",
    "cache_dir",
    "cache_limit",
    "on_bad",
)  # where it was trained, which need not be here


@dataclass
class Opened:
    """A checkpoint that was read: its model with its weights, what it learnt, and how."""

    model: nn.Module
    task: Task
    config: Config
    path: str
    picture: Mapping[str, Any]  # what the model was trained on, as `picture_state` tells it

    @classmethod
    def of(
        cls,
        path: str | os.PathLike[str],
        *,
        model: Maker | nn.Module | str | None = None,
        options: Mapping[str, Any] | None = None,
        known: Collection[str] = (),
    ) -> Opened:
        """model: what makes the model, where the checkpoint does not name "small" or one of torchvision's. known: options there are.

        Raises UsageError for a file that is no checkpoint, or whose weights are not those of its model.
        """
        for name in options or {}:
            check_known(
                name,
                known,
                "options here; what was learnt, and from which pictures, the checkpoint says",
            )
        state = read_checkpoint(os.fspath(path))
        learnt = {name: value for name, value in state["config"].items() if name not in _OF_MACHINE}
        config = Config.of({**learnt, **(options or {})})
        task = Task.from_state(state["task"])
        if model is None and (is_made(config.model)):
            raise UsageError(
                f"{path} is of a model that a function made ({config.model}), and what a checkpoint names is not run. "
                f"Give it yourself: --model module:function, or model= in Python."
            )
        if callable(model):
            made = made_by(model, "model", task.outputs)
        else:
            made = build(
                model if isinstance(model, str) else config.model, task.outputs, config.image_size
            )
        try:
            made.load_state_dict(state["model"])
        except RuntimeError as error:
            what = " ".join(str(error).split())[:300]
            raise UsageError(
                f"the weights of {path} are of another model than {config.model}: {what}"
            ) from error
        return cls(made.eval(), task, config, os.fspath(path), state["picture"])

    @property
    def shape(self) -> tuple[int, ...]:
        """What the model takes: channels, height, width."""
        return tuple(self.picture["shape"])

    def field(self, image: Field | None) -> Field:
        """What becomes of the pictures: as it was validated in training. Raises UsageError for a field that gives others."""
        mine = image or picture_from(self.picture)
        if mine is None:
            raise UsageError(
                f"{self.path} was trained with image={self.picture['field']}(...), a field of your own. Give it again: image=."
            )
        gives = mine.example
        if gives is None or (shape_of(gives), gives.dtype) != (self.shape, self.picture["dtype"]):
            given = (
                f"{gives.dtype}{list(shape_of(gives))}"
                if gives is not None
                else "pictures of any size"
            )
            raise UsageError(
                f"image= gives {given}, and {self.path} was trained on {self.picture['dtype']}{list(self.shape)}. "
                f"Give the field that was given to train, or none."
            )
        return mine
