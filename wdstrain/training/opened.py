"""A trained model, opened from its checkpoint. What only predicts or exports brings neither metrics nor the training loop with it.

A checkpoint is data, never code: it may name a function that makes its model, but only whoever opens it says that this function is
imported and called. Otherwise `evaluate stranger.pt` would run whatever the stranger names of all that Python can import.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from wdstrain.errors import UsageError
from wdstrain.training.checkpoints import read_checkpoint
from wdstrain.training.configuration import Config
from wdstrain.training.models import Maker, build, made_by
from wdstrain.training.task import Task

_OF_MACHINE = ("device", "num_workers", "cache_dir", "cache_limit", "on_bad")  # where it was trained, which need not be here


@dataclass
class Opened:
    """A checkpoint that was read: its model with its weights, what it learnt, and how."""

    model: nn.Module
    task: Task
    config: Config
    picture: tuple[int, ...]  # what the model takes: channels, height, width
    is_uint8: bool  # and whether that is normalised first

    @classmethod
    def of(
        cls, path: str | os.PathLike[str], *, model: Maker | str | None = None, options: Mapping[str, Any] | None = None
    ) -> Opened:
        """model: what makes the model, where the checkpoint does not name "small" or one of torchvision's.

        Raises UsageError for a file that is no checkpoint, or whose weights are not those of its model.
        """
        state = read_checkpoint(os.fspath(path))
        learnt = {name: value for name, value in state["config"].items() if name not in _OF_MACHINE}
        config = Config.of({**learnt, **(options or {})})
        task = Task.from_state(state["task"])
        if model is None and (config.model.startswith("<") or ":" in config.model):
            raise UsageError(
                f"{path} is of a model that a function made ({config.model}), and what a checkpoint names is not run. "
                f"Give it yourself: --model module:function, or model= in Python."
            )
        if callable(model):
            made = made_by(model, "model", task.outputs)
        else:
            made = build(model or config.model, task.outputs, config.image_size)
        try:
            made.load_state_dict(state["model"])
        except RuntimeError as error:
            what = " ".join(str(error).split())[:300]
            raise UsageError(f"the weights of {path} are of another model than {config.model}: {what}") from error
        return cls(made.eval(), task, config, tuple(state["picture"]["shape"]), state["picture"]["dtype"] == "uint8")
