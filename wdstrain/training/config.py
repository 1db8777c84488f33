"""Options of runs and of trained models, from flags, from a TOML or YAML file, or from Python.

`wdstrain.training.options` declares the options. Here they become the arguments of the public
functions, and are checked. This module does not import torch, which takes seconds.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wdstrain.errors import UsageError, WdstrainError
from wdstrain.report.printing import counted
from wdstrain.report.terminal import Reporter
from wdstrain.runtime.options import REQUIRED, help_text, option
from wdstrain.runtime.options import refuse as refuse
from wdstrain.training.options import LIMITS, RunOptions

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from wdstrain.decode.fields import Field
    from wdstrain.shards.index import Index
    from wdstrain.storage.addresses import Urls
    from wdstrain.training.heads import Criterion, TrainingStep

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CONFIG, METRICS = "config.toml", "metrics.jsonl"  # in the folder of a run
_DATA = ("train", "val")  # keys of a file's table [data]: where the shards are
_OPTIMIZERS = ("adamw", "sgd")
IMAGE_OPTIONS = ("augment", "scale", "ratio", "crop_pct")  # of the default input

# Stages of a step, and what they are in the report.
STAGES = {
    "data": "waiting for data",
    "copy": "copy to the device",
    "compute": "forward and backward",
    "optimizer": "optimizer",
    "other": "other",
}


@dataclass(frozen=True, kw_only=True)
class Config(RunOptions):
    """Checked options of a training run. Raises UsageError for a value that an option cannot have."""

    model: str = option(
        "small",
        "small, a model of torchvision such as resnet18, timm:NAME, or module:function, which is "
        "called with the number of outputs",
        metavar="NAME",
    )
    optimizer: str = option(
        "adamw",
        "adamw, sgd, or module:function, which is called with parameter groups",
        metavar="NAME",
    )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, _checked(field, getattr(self, field.name)))
        is_own = is_made(self.optimizer)  # which has its own rate
        mixes, mixing = bool(self.mixup or self.cutmix), {"mixup": ..., "cutmix": ...}
        needs: tuple[tuple[str, bool, dict[str, Any]], ...] = (
            ("step_epochs", self.schedule == "step", {"schedule": "step"}),
            ("plateau_epochs", self.schedule == "plateau", {"schedule": "plateau"}),
            ("momentum", self.optimizer == "sgd", {"optimizer": "sgd"}),
            ("max_errors", self.on_error == "replace", {"on_error": "replace"}),
            ("unfreeze_epoch", self.freeze is not None, {"freeze": ...}),
            ("mixup_prob", mixes, mixing),
            ("mixup_switch_prob", mixes, mixing),
            ("mixup_off_epoch", mixes, mixing),
        )
        refuse(
            self.warmup >= self.epochs,
            f"{{warmup}}: must be shorter than the {counted(self.epochs, 'epoch')}.",
            warmup=self.warmup,
        )
        refuse(
            self.warmup and self.schedule == "onecycle",
            "{schedule} has its own warm-up.",
            "Leave {warmup} out, or use the schedule cosine.",
            schedule="onecycle",
            warmup=...,
        )
        refuse(
            self.min_lr > self.lr and not is_own,
            "{min_lr}: must be at most {lr}.",
            min_lr=self.min_lr,
            lr=self.lr,
        )
        for one, other in (("clip_norm", "clip_value"), ("grad_checkpointing", "compile")):
            refuse(
                getattr(self, one) and getattr(self, other),
                f"{{{one}}} and {{{other}}} exclude each other.",
                "Give one of them.",
                **{one: ..., other: ...},
            )
        refuse(
            self.optimizer not in _OPTIMIZERS and not is_own,
            f"{{optimizer}}: must be {', '.join(_OPTIMIZERS)} or module:function.",
            optimizer=self.optimizer,
        )
        for name, is_used, owners in needs:
            refuse(
                not is_used and not self.has_default(name),
                f"{{{name}}} needs {' or '.join(map('{{{}}}'.format, owners))}.",
                **owners,
                **{name: getattr(self, name)},
            )
        refuse(
            self.record and mixes,
            "{record} needs a loss of each sample, and {mixup} and {cutmix} mix several.",
            "Leave one of them out.",
            **{name: getattr(self, name) for name in ("record", "mixup", "cutmix")},
        )
        from wdstrain.decode.transforms import Augment  # only now: it loads NumPy and Pillow

        Augment.parse(self.augment, scale=self.scale, ratio=self.ratio, crop_pct=self.crop_pct)

    def has_default(self, name: str) -> bool:
        """Return whether an option has its default value."""
        return bool(getattr(self, name) == OPTIONS[name].default)

    @property
    def image_shape(self) -> tuple[int, int]:
        """Height and width of the images."""
        height, _, width = str(self.image_size).partition("x")
        return int(height), int(width or height)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Config:
        """Return the options with these values. Raises UsageError for a name that is no option."""
        for name in values:
            if name not in OPTIONS:
                near = get_close_matches(name, OPTIONS, 1, 0.5)
                hint = f"Did you mean {near[0]}?" if near else f"Use one of: {', '.join(OPTIONS)}."
                raise UsageError(f"{name!r} is none of the options of a training run.", hint)
        return cls(**values)

    def toml(self, data: Mapping[str, Any]) -> str:
        """Return the text of a file for `read_config`. data: addresses of the shards."""
        return "\n[data]\n".join(
            "".join(
                f"{name} = {json.dumps(value, ensure_ascii=False)}\n"  # as TOML writes values
                for name, value in table.items()
                if value is not None
            )
            for table in (vars(self), data)
        )

    def differing(self, other: Config) -> list[str]:
        """Return the differences that forbid to resume a run with `other`, in words.

        A function without a name that can be imported may have one now: the weights decide whether
        it makes the same model.
        """
        unnamed = any(config.model.startswith("<") for config in (self, other))
        both_made = is_made(self.model) and is_made(other.model)
        return [
            f"{name} was {getattr(self, name)!r}, is {getattr(other, name)!r}"
            for name, field in OPTIONS.items()
            if not field.metadata.get("free")
            and getattr(self, name) != getattr(other, name)
            and not (name == "model" and unnamed and both_made)
        ]


OPTIONS = {field.name: field for field in dataclasses.fields(Config)}


def is_made(name: str) -> bool:
    """Return whether a function of the user's makes it: module:function, or <name>."""
    return ":" in name or name.startswith("<")


# --- options of a trained model -------------------------------------------------------------------


def _override(name: str, *, trained: bool = False) -> Any:
    """Return an option of a run for a trained model. trained: the checkpoint has the default."""
    field = RunOptions.__dataclass_fields__[name]
    default = f"{field.metadata['help']} (default: as in training)"
    return option(None, default if trained else help_text(field), metavar=field.metadata["metavar"])


# --- arguments of the public functions -------------------------------------------------------------


_PROGRESS = (
    "object with step(title, done, total, text, unit) and line(text) that shows progress "
    "(default: stderr, or the notebook)"
)


@dataclass(frozen=True)
class TrainArguments(RunOptions):
    """Arguments of `wt.train`."""

    urls: Urls | Index = option(
        REQUIRED, "shards to train on. A set with the splits train and val is both"
    )
    out: str | os.PathLike[str] = option(REQUIRED, "folder of the run")
    _: KW_ONLY
    val: Urls | Index | None = option(None, "shards to validate on")
    model: str | Callable[[int], nn.Module] | nn.Module = option(
        "small",
        "small, a torchvision model by name, timm:NAME, module:function, a function of the number "
        "of outputs that returns a model, or a torch.nn.Module, of which a copy is trained",
    )
    fields: Mapping[str, Field] | None = option(
        None,
        "fields by name, as for wt.Loader: labels under their names (a single one also as label), "
        "which may be left out; all others are inputs of the model, several as keyword arguments. "
        "Default: an input of wt.image(size=image_size, augment=augment). uint8[3, h, w] is "
        "normalized as the weights expect it (by default as ImageNet), other uint8 is divided by "
        "255, int64 without height and width keeps its type, other numbers become float32",
    )
    val_fields: Mapping[str, Field] | None = option(
        None, "the same for validation (default: fields without augmentation)"
    )
    criterion: Criterion | Mapping[str, Criterion] | None = option(
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
    optimizer: str | Callable[[list[dict[str, Any]]], Optimizer] = option(
        "adamw", "adamw, sgd, or a function of parameter groups that returns an optimizer"
    )
    metrics: Mapping[str, Any] | None = option(
        None,
        "torchmetrics by name, with several labels LABEL/NAME, for validation: updated with "
        "probabilities of classes or with numbers",
    )
    callbacks: Sequence[object] = option((), "objects like wt.Callback")
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
        return Config(
            **{name: getattr(self, name) for name in RunOptions.__dataclass_fields__},
            model=_name(self.model),
            optimizer=_name(self.optimizer),
        )


@dataclass(frozen=True)
class CheckpointArguments:
    """A trained model, for all functions that take one."""

    checkpoint: str | os.PathLike[str] = option(
        REQUIRED, "file of a run, such as RUN/checkpoints/best.pt"
    )
    _: KW_ONLY
    model: Callable[[int], nn.Module] | nn.Module | str | None = option(
        None,
        "as it was given to train: a function that the checkpoint names is called only if it is "
        "named here",
        metavar="MODULE:FUNCTION",
    )


@dataclass(frozen=True)
class ExportArguments(CheckpointArguments):
    """Arguments of `wt.export`."""

    out: str | os.PathLike[str] = option(
        REQUIRED, "file to write: .pt (state dict), .pt2 (torch.export) or .onnx", metavar="FILE"
    )


@dataclass(frozen=True)
class TrainedArguments(CheckpointArguments):
    """Arguments of `wt.evaluate` and `wt.predict`; the checkpoint has all others.

    None: see the help text.
    """

    urls: Urls | Index = option(
        REQUIRED,
        "shards of one split; for predict also a folder of images, or an image file",
        metavar="URL",
        several=True,
    )
    _: KW_ONLY
    fields: Mapping[str, Field] | None = option(
        None, "as for train (for validation), if an input is a field of your own", flag=None
    )
    progress: Reporter | None = option(None, _PROGRESS, flag=None)
    batch_size: int | None = _override("batch_size", trained=True)
    amp: str | None = _override("amp", trained=True)
    device: str | None = _override("device")
    num_workers: int | None = _override("num_workers")
    cache_dir: str | None = _override("cache_dir")
    cache_limit: str | None = _override("cache_limit")
    probabilities: bool = option(False, "add a column of predictions for each class")
    embeddings: bool = option(
        False, "add a column with the input of the last layer: lists, or JSON in a CSV file"
    )


@dataclass(frozen=True, kw_only=True)
class EvaluateArguments(TrainedArguments):
    """Arguments of `wt.evaluate`."""

    on_error: str | None = _override("on_error")
    max_errors: float | None = _override("max_errors")
    report: str | os.PathLike[str] | None = option(
        None,
        "page to write: all metrics, numbers of each class, confusion matrix, worst samples",
        metavar="FILE",
    )
    predictions: str | os.PathLike[str] | None = option(
        None, "table to write, .csv or .parquet, as of predict", metavar="FILE"
    )
    criterion: Criterion | Mapping[str, Criterion] | None = option(
        None, "as it was given to train", flag=None
    )
    metrics: Mapping[str, Any] | None = option(None, "as for train", flag=None)


@dataclass(frozen=True)
class PredictArguments(TrainedArguments):
    """Arguments of `wt.predict`."""

    out: str | os.PathLike[str] = option(
        REQUIRED,
        "table to write, .csv or .parquet, one row per image",
        metavar="FILE",
        flag="-o --out",
    )


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


@contextmanager
def refusing(
    problem: str,
    hint: str = "",
    /,
    errors: tuple[type[Exception], ...] = (Exception,),
    **options: Any,
) -> Iterator[None]:
    """Raise UsageError for these errors in the block, with their text after the problem.

    hint, options: as `refuse` takes them. Errors of this package stay as they are.
    """
    try:
        yield
    except WdstrainError:
        raise
    except errors as error:
        text = " ".join(str(getattr(error, "strerror", None) or error).split())[:300]
        cause = text.rstrip(".") or type(error).__name__
        raise UsageError(f"{problem}: {cause}.", hint, options) from error


# --- files of options -----------------------------------------------------------------------------


def read_config(path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (options, data) of a TOML or YAML file. data: its table [data], with train and val.

    Raises UsageError for a file that cannot be read.
    """
    table = _read_table(path)
    data = table.pop("data", {})
    options = {str(name).replace("-", "_"): value for name, value in table.items()}
    lists = [urls if isinstance(urls, list) else [urls] for urls in dict(data).values()]
    refuse(
        not set(data) <= set(_DATA)
        or not all(isinstance(own, str) for urls in lists for own in urls),
        f"{path}: data must have addresses of shards under {' and '.join(_DATA)} only.",
        "Write for example: [data] train = 'shards/train-*.tar'",
    )
    return options, data


def read_lines(path: str) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl or steps.jsonl, without one that a kill cut off."""
    lines = []
    with suppress(FileNotFoundError), open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            with suppress(ValueError):
                lines.append(json.loads(line))
    return lines


def _read_table(path: str) -> dict[Any, Any]:
    """Return the table of a file."""
    kind = os.path.splitext(path)[1].lower()
    refuse(
        kind not in (".toml", ".yaml", ".yml"),
        f"{path} is neither .toml nor .yaml.",
        "Name a file of options such as config.toml.",
    )
    with refusing(f"{path} cannot be read", "Check the path."):
        raw = Path(path).read_bytes()
    with refusing(f"{path} is no {kind[1:].upper()} table of options"):
        if kind == ".toml":
            return dict(tomllib.loads(raw.decode()))
        import yaml

        return dict(yaml.safe_load(raw) or {})


# --- names and types ------------------------------------------------------------------------------


# Types of options by the first word of their annotation, and their names in errors.
_KINDS: dict[str, tuple[type, str]] = {
    "int": (int, "a whole number"),
    "float": (float, "a number"),
    "bool": (bool, "true or false"),
    "str": (str, "a text"),
}


def _checked(field: dataclasses.Field[Any], value: Any) -> Any:
    """Return a value in the type of its option. Raises UsageError for another type or value."""
    name, about = field.name, field.metadata
    if value is None and field.default is None:
        return None
    try:
        plain = about["parse"](value) if about["parse"] else _plain(field, value)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{error}.", option=name, value=value) from None
    choices, rule = about.get("choices", (plain,)), about.get("rule")
    low, high = LIMITS[rule] if rule else (plain, plain)
    refuse(
        plain not in choices or not low <= plain <= high,
        f"{{{name}}}: must be {rule or ' or '.join(map(str, choices))}.",
        **{name: plain},
    )
    return plain


def _plain(field: dataclasses.Field[Any], value: Any) -> Any:
    """Return a whole number, a number, true or false, or a text. Raises ValueError for others."""
    kind, words = _KINDS[str(field.type).partition(" ")[0]]
    with suppress(TypeError, ValueError):
        plain = kind(value)  # YAML takes 1e-3 for a text
        is_bool = type(value).__name__.startswith("bool")  # also of NumPy
        if is_bool == (kind is bool) and (kind is not int or plain == value):
            return plain
    raise ValueError(f"must be {words}")
