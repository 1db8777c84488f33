"""Arguments of the public functions of training: options of a run, and objects of the user's."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from torch import nn

from wdstrain.decode.fields import Field
from wdstrain.errors import UsageError
from wdstrain.report.terminal import Reporter
from wdstrain.runtime.options import REQUIRED, option
from wdstrain.shards.index import Index
from wdstrain.storage.addresses import Urls
from wdstrain.training.config import (
    OPTIONS,
    Config,
    EvaluateOptions,
    PredictOptions,
    is_file,
    is_made,
)
from wdstrain.training.models import ModelFactory
from wdstrain.training.optim import OptimizerFactory
from wdstrain.training.options import RunOptions
from wdstrain.training.tasks import Criterion, Task, TrainingStep


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


Path = str | os.PathLike[str]
Fields = Mapping[str, Field] | None
Criteria = Criterion | Mapping[str, Criterion] | None

_PROGRESS = (
    "object with step(title, done, total, text, unit) and line(text) that shows progress "
    "(default: stderr, or the notebook)"
)
_CHECKPOINT = "file of a run, such as RUN/checkpoints/best.pt"
_MODEL = (
    "as it was given to train. A function that the checkpoint names is not imported unless it is "
    "named here"
)


@dataclass(frozen=True)
class TrainArguments(RunOptions):
    """Arguments of `wt.train`."""

    urls: Urls | Index = option(
        REQUIRED, "shards to train on. A set with the splits train and val is both"
    )
    out: Path = option(REQUIRED, "folder of the run")
    _: KW_ONLY
    val: Urls | Index | None = option(None, "shards to validate on")
    model: str | ModelFactory | nn.Module = option(
        "small",
        "small, a torchvision model by name, timm:NAME, module:function, a function of the number "
        "of outputs that returns a model, or a torch.nn.Module, of which a copy is trained",
    )
    fields: Fields = option(
        None,
        "fields by name, as for wt.Loader: labels under their names (a single one also as label), "
        "which may be left out; all others are inputs of the model, several as keyword arguments. "
        "Default: an input of wt.image(size=image_size, augment=augment). uint8[3, h, w] is "
        "normalized as the weights expect it (by default as ImageNet), other uint8 is divided by "
        "255, int64 without height and width keeps its type, other numbers become float32",
    )
    val_fields: Fields = option(
        None, "the same for validation (default: fields without augmentation)"
    )
    criterion: Criteria = option(
        None,
        "loss, (outputs, target) -> scalar or [b], with several labels a dict by label. Numbers are "
        "standardized (default: the loss of the kind of label)",
    )
    training_step: TrainingStep | None = option(
        None,
        "function (batch, model) -> scalar or [b] that calls the model and returns the loss, in "
        "place of the criterion: for distillation or contrastive losses. The batch has the inputs "
        "as the model takes them, targets under the names of their labels, and __key__. Validation "
        "is as without it",
    )
    optimizer: str | OptimizerFactory = option(
        "adamw", "adamw, sgd, or a function of parameter groups that returns an optimizer"
    )
    metrics: Mapping[str, Any] | None = option(
        None,
        "torchmetrics by name, with several labels LABEL/NAME, for validation: updated with "
        "probabilities of classes or with numbers",
    )
    callbacks: Sequence[Callback] = option((), "objects like wt.Callback")
    resume: bool = option(
        False,
        "continue from the last checkpoint in `out`, or start if there is none. On a CPU with "
        "deterministic=True the weights get the same bits as in a run that was never stopped",
    )
    overwrite: bool = option(False, "replace an earlier run in `out`")
    progress: Reporter | None = option(None, _PROGRESS)

    @property
    def own_losses(self) -> dict[str, str]:
        """Names of an own criterion and an own training step, as checkpoints keep them."""
        given = {"criterion": self.criterion, "training_step": self.training_step}
        return {name: _name(value) for name, value in given.items() if value is not None}

    def config(self) -> Config:
        """Return the checked options of the run; functions and modules as their names."""
        options = {
            field.name: getattr(self, field.name) for field in dataclasses.fields(RunOptions)
        }
        options["classes"] = _class_names(self.classes)
        for name in ("cache_dir", "weights"):  # absolute: a run is resumed from any folder
            path = options[name]
            is_path = isinstance(path, (str, os.PathLike))
            if is_path and (name == "cache_dir" or is_file(os.fspath(path))):
                options[name] = os.path.abspath(path)
        return Config(**options, model=_name(self.model), optimizer=_name(self.optimizer))


@dataclass(frozen=True)
class EvaluateArguments(EvaluateOptions):
    """Arguments of `wt.evaluate`."""

    checkpoint: Path = option(REQUIRED, _CHECKPOINT)
    urls: Urls | Index = option(REQUIRED, "shards of one split")
    _: KW_ONLY
    model: ModelFactory | nn.Module | str | None = option(None, _MODEL)
    fields: Fields = option(
        None, "as for train (for validation), if an input is a field of your own"
    )
    criterion: Criteria = option(None, "as it was given to train")
    metrics: Mapping[str, Any] | None = option(None, "as for train")
    progress: Reporter | None = option(None, _PROGRESS)


@dataclass(frozen=True)
class PredictArguments(PredictOptions):
    """Arguments of `wt.predict`."""

    checkpoint: Path = option(REQUIRED, _CHECKPOINT)
    urls: Urls | Index = option(
        REQUIRED, "shards of one split, a folder of images, or an image file"
    )
    out: Path = option(REQUIRED, "file to write, .csv or .parquet")
    _: KW_ONLY
    model: ModelFactory | nn.Module | str | None = option(None, _MODEL)
    fields: Fields = option(
        None, "as for train (for validation), if an input is a field of your own"
    )
    probabilities: bool = option(False, "one more column for each class")
    embeddings: bool = option(
        False, "a column with the input of the last layer: lists, or JSON in a CSV file"
    )
    progress: Reporter | None = option(None, _PROGRESS)


def given_options(arguments: PredictOptions) -> dict[str, Any]:
    """Return the options of `arguments` that are not None, without its other fields."""
    kind = EvaluateOptions if isinstance(arguments, EvaluateOptions) else PredictOptions
    values = {field.name: getattr(arguments, field.name) for field in dataclasses.fields(kind)}
    return {name: value for name, value in values.items() if value is not None}


def check_objects(arguments: TrainArguments, config: Config, task: Task, *, has_val: bool) -> None:
    """Raise UsageError for objects of the user's that are none, and for options without effect."""
    criterion, metrics, optimizer = arguments.criterion, arguments.metrics, arguments.optimizer
    if not has_val and (
        config.patience
        or config.monitor
        or config.schedule == "plateau"
        or arguments.val_fields is not None
    ):
        raise UsageError(
            "patience, monitor, val_fields and the schedule plateau need validation data.",
            "Give val=.",
        )
    own = criterion if isinstance(criterion, Mapping) else {task.heads[0].name: criterion}
    labels = [head.name for head in task.heads]
    functions = (
        *(
            ("criterion", f, "(outputs, target) -> loss, such as torch.nn.CrossEntropyLoss()")
            for f in own.values()
        ),
        ("training_step", arguments.training_step, "(batch, model) -> loss"),
        (
            "optimizer",
            None if isinstance(optimizer, str) else optimizer,
            "of parameter groups, such as lambda groups: torch.optim.Adam(groups, lr=1e-3)",
        ),
    )
    for name, value, form in functions:
        if value is not None and not callable(value):
            raise UsageError(f"{name}={value!r}: must be a function {form}.")
    if unknown := own.keys() - set(labels):
        raise UsageError(
            f"criterion names {min(unknown)!r}, and the labels are {', '.join(labels)}."
        )
    if config.class_weights != "none" and config.balance in task.label_names:
        raise UsageError(
            f"class_weights={config.class_weights} and balance={config.balance} both correct for "
            "rare classes.",
            "Give one of them.",
        )
    if metrics is not None and not isinstance(metrics, Mapping):
        raise UsageError(
            'must be a dict of torchmetrics by name, such as {"kappa": '
            "torchmetrics.CohenKappa(...)}.",
            option="metrics",
            value=metrics,
        )
    is_only_criterion = criterion is not None and (
        not isinstance(criterion, Mapping) or len(own) >= len(labels)
    )
    of_losses = ("label_smoothing", "class_weights")
    replaced = (
        ("training_step", arguments.training_step is not None, of_losses),
        ("criterion", is_only_criterion, of_losses),
        ("optimizer", is_made(config.optimizer), ("lr", "weight_decay")),
    )
    for owner, is_given, names in replaced:
        for name in names:
            if is_given and getattr(config, name) != OPTIONS[name].default:
                raise UsageError(
                    f"{name} has no effect with {owner}=.",
                    f"Give it to your {owner} instead.",
                )
    for callback in arguments.callbacks:
        check_callback(callback)


def _class_names(classes: Any) -> Any:
    """Return the option `classes` as text, for a list of names or a number of classes."""
    if classes is None or isinstance(classes, str):
        return classes
    names = [str(name) for name in (classes if isinstance(classes, (list, tuple)) else [classes])]
    if any("," in name for name in names):
        raise UsageError(
            "classes: a name holds a comma.",
            "Give a file with a name on each line.",
        )
    return ",".join(names)


def _name(value: Any) -> str:
    """Return a name as options have it: module:function if it can be imported by that, else <name>."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return ", ".join(f"{label}: {_name(one)}" for label, one in value.items())
    module = getattr(value, "__module__", None)
    name = getattr(value, "__qualname__", type(value).__name__)
    is_importable = (
        module != "__main__" and getattr(sys.modules.get(str(module)), name, None) is value
    )
    return f"{module}:{name}" if is_importable else f"<{name.rpartition('.')[2].strip('<>')}>"


def check_callback(callback: object) -> None:
    """Raise UsageError for a method on_... that no run calls."""
    known = [name for name in vars(Callback) if name.startswith("on_")]
    for name in dir(callback):
        if name.startswith("on_") and name not in known and callable(getattr(callback, name)):
            raise UsageError(
                f"{type(callback).__name__}.{name} is never called. Methods of callbacks are "
                f"{', '.join(known)}."
            )
