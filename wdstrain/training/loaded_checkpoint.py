"""A trained model, loaded from its checkpoint. Imports neither metrics nor the training loop.

A checkpoint is data, never code. It may name a function that makes its model, but the function is
imported and called only if the caller names it too. Otherwise `evaluate stranger.pt` would run
functions that its author chose.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from wdstrain.decode.fields import Field
from wdstrain.errors import UsageError
from wdstrain.training.checkpoint import read_checkpoint
from wdstrain.training.config import Config, is_made
from wdstrain.training.images import ImageInput, shape_of
from wdstrain.training.models import ModelFactory, build, call_factory
from wdstrain.training.tasks import Task

# Options of the machine that trained, which need not fit this one.
_OF_MACHINE = ("device", "num_workers", "cache_dir", "cache_limit", "on_error", "max_errors")


@dataclass
class LoadedCheckpoint:
    """A model with its weights, its task, its options and the images that it takes."""

    model: nn.Module
    task: Task
    config: Config
    path: str
    image: ImageInput

    @classmethod
    def of(
        cls,
        path: str | os.PathLike[str],
        *,
        model: ModelFactory | nn.Module | str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> LoadedCheckpoint:
        """Load a checkpoint.

        model: makes the model, where the checkpoint names neither "small" nor a model of
        torchvision or timm. options: in place of those of training. Raises UsageError for a file
        that is no checkpoint, and for weights of another model.
        """
        state = read_checkpoint(os.fspath(path))
        trained = {
            name: value for name, value in state["config"].items() if name not in _OF_MACHINE
        }
        config = Config.of({**trained, **(options or {})})
        task = Task.from_state(state["task"])
        if model is None and is_made(config.model):
            raise UsageError(
                f"{path} holds a model that a function made ({config.model}), and functions that a "
                f"checkpoint names are not called. Give it: model=module:function."
            )
        if callable(model):
            net = call_factory(model, "model", task.outputs)
        else:
            name = model if isinstance(model, str) else config.model
            net = build(name, task.outputs, config.image_size, is_dense=task.is_dense)
        try:
            net.load_state_dict(state["model"])
        except RuntimeError as error:
            cause = " ".join(str(error).split())[:300]
            raise UsageError(
                f"the weights of {path} are of another model than {config.model}: {cause}"
            ) from error
        image = ImageInput.from_state(state["image"])
        return cls(net.eval(), task, config, os.fspath(path), image)

    def image_source(self, given: Field | None) -> Field:
        """Return the field of the images: as validation had it in training, or the given one.

        Raises UsageError for a given field with other shapes, and for a missing one of the user's.
        """
        source = given or self.image.to_field()
        if source is None:
            raise UsageError(
                f"{self.path} was trained on a field of your own, {self.image.field}(...). "
                f"Give it again: fields=."
            )
        example = source.example
        wanted = f"{self.image.dtype}{list(self.image.shape)}"
        if example is None or (shape_of(example), example.dtype) != (
            self.image.shape,
            self.image.dtype,
        ):
            shape = (
                "images of any size"
                if example is None
                else f"{example.dtype}{list(shape_of(example))}"
            )
            raise UsageError(
                f"fields= gives {shape}, and {self.path} was trained on {wanted}. Give the field that "
                f"was given to train, or none."
            )
        return source
