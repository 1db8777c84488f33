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

from wdstrain.decode.decoder import Transform
from wdstrain.decode.fields import Field
from wdstrain.errors import UsageError
from wdstrain.shards.index import Index
from wdstrain.training.checkpoint import read_checkpoint
from wdstrain.training.config import Config, is_made
from wdstrain.training.inputs import ModelInputs
from wdstrain.training.models import ModelFactory, build
from wdstrain.training.sources import (
    FieldSource,
    InputSource,
    check_same_inputs,
    given_source,
)
from wdstrain.training.tasks import Task

# Options of the machine that trained, which need not fit this one.
_OF_MACHINE = ("device", "num_workers", "cache_dir", "cache_limit", "on_error", "max_errors")


@dataclass
class LoadedCheckpoint:
    """A model with its weights, its task, its options and the inputs that it takes."""

    model: nn.Module
    task: Task
    config: Config
    path: str
    inputs: ModelInputs

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
        task, inputs = Task.from_state(state["task"]), ModelInputs.from_state(state["inputs"])
        if model is None and is_made(config.model):
            raise UsageError(
                f"{path} holds a model that a function made ({config.model}), and functions that a "
                f"checkpoint names are not called. Give it: model=module:function."
            )
        given = config.model if model is None else model
        size = inputs.image_size or max(config.image_shape)
        net = build(given, task.outputs, size, is_dense=task.is_dense)
        try:
            net.load_state_dict(state["model"])
        except RuntimeError as error:
            cause = " ".join(str(error).split())[:300]
            raise UsageError(
                f"the weights of {path} are of another model than {config.model}: {cause}"
            ) from error
        return cls(net.eval(), task, config, os.fspath(path), inputs)

    def source(
        self,
        fields: Mapping[str, Field] | None,
        transform: Transform | None,
        index: Index | None,
    ) -> InputSource:
        """Return the source of the inputs: the given one, or as validation had it in training.

        index: the shards; None for image files. Raises UsageError for fields with other inputs, and
        for a missing source of the user's.
        """
        given = given_source(fields, transform, self.task, index, known=self.inputs.specs)
        if given is not None:
            check_same_inputs(self.inputs.specs, given, f"{self.path} was trained on", sizes=True)
            return given
        found: dict[str, Field] = {}
        for name, spec in self.inputs.specs.items():
            field = spec.to_field()
            if field is None:
                kind, argument = f"a field of your own, {spec.source}(...)", "fields"
                if spec.source == "transform":
                    kind, argument = "a transform of your own", "transform"
                raise UsageError(f"{self.path} was trained on {kind}. Give it again: {argument}=.")
            found[name] = field
        return FieldSource(found)
