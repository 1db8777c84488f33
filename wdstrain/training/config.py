"""How to train: every choice with its default, from flags, from one TOML or YAML file, or from Python.

The fields of `Config` are the only list of options there is: flags, keys of a file, keyword arguments of `wt.train` and the
lines of a run's config.toml are all made from them. A key that is none of them is refused with the one that it resembles.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

import numpy as np

from wdstrain.decode.transforms import Augment
from wdstrain.errors import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_DATA = ("train", "val")  # keys of a file's table [data]: where the shards are
OF_PREDICTING = (
    "batch_size",
    "num_workers",
    "device",
    "amp",
    "cache_dir",
    "cache_limit",
)  # the checkpoint says the others
OF_EVALUATING = (*OF_PREDICTING, "on_error")


def _option(
    default: Any, text: str, *, metavar: str = "", choices: tuple[str, ...] = (), free: bool = False
) -> Any:
    """free: it may change when a run goes on, for it does not touch what is learnt."""
    return field(
        default=default,
        metadata={"text": text, "metavar": metavar, "choices": choices, "free": free},
    )


_RANGES: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (
        (
            "epochs",
            "batch_size",
            "accumulate",
            "image_size",
            "keep",
            "lanes",
            "shuffle_buffer",
            "step_epochs",
            "plateau_epochs",
            "limit_train_batches",
            "limit_val_batches",
        ),
        lambda value: value >= 1,
        ">= 1",
    ),
    (
        ("num_workers", "checkpoint_every", "patience", "unfreeze_epoch"),
        lambda value: value >= 0,
        ">= 0",
    ),
    (
        (
            "weight_decay",
            "warmup",
            "clip_norm",
            "clip_value",
            "mixup",
            "cutmix",
            "checkpoint_minutes",
            "min_lr",
            "min_delta",
            "backbone_lr",
        ),
        lambda value: 0 <= value < math.inf,
        "a finite number >= 0",
    ),
    (
        ("label_smoothing", "momentum", "ema"),
        lambda value: 0 <= value < 1,
        ">= 0 and below 1",
    ),
    (("layer_decay",), lambda value: 0 < value <= 1, "above 0 and at most 1"),
    (("lr",), lambda value: 0 < value < math.inf, "a finite number above 0"),
    (("seed",), lambda value: 0 <= value < 2**63, ">= 0 and below 2**63"),
)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Options of a training run."""

    # task and model
    label: str | None = _option(None, "labels to learn, as NAME or NAME:KIND with a comma between; KIND is class, binary, multi or number; for shards that declare no labels, the field or JSON entry that holds it, such as cls or json.kind (default: the only label)", metavar="NAME")  # fmt: skip
    classes: str | None = _option(None, "for such a field, names of its classes in the order of their numbers (default: sorted)", metavar="FILE|A,B,...")  # fmt: skip
    model: str = _option("small", "small, a model of torchvision such as resnet18, timm:NAME, or module:function, which is called with the number of outputs", metavar="NAME")  # fmt: skip
    weights: str | None = _option(None, "weights to start from: DEFAULT or another name of the model's weights in torchvision, DEFAULT for timm, or a file with a state dict or a checkpoint", metavar="NAME|FILE")  # fmt: skip
    freeze: str | None = _option(None, "parameters that are not trained: parts of names with a comma between, such as layer1, or backbone for all but the last layer", metavar="PATTERN")  # fmt: skip
    unfreeze_epoch: int | None = _option(None, "train the frozen parameters too after this many epochs", metavar="N")  # fmt: skip
    image_size: int = _option(64, "width and height of the images in pixels", metavar="N")
    augment: str | None = _option(None, "augmentation: rrc, flip, trivialaugment, randaugment, with + between", metavar="A")  # fmt: skip
    mixup: float = _option(0.0, "alpha of mixup; 0: off", metavar="X")
    cutmix: float = _option(0.0, "alpha of CutMix; 0: off", metavar="X")
    where: str | None = _option(None, "condition on the index's columns that samples for training and validation must meet, such as \"label != 'Other'\"", metavar="EXPR")  # fmt: skip
    balance: str | None = _option(None, "column, such as label, each value of which gets the same number of samples per epoch", metavar="COLUMN")  # fmt: skip
    # optimization
    epochs: int = _option(10, "passes over the training data", metavar="N", free=True)
    batch_size: int = _option(64, "images per step, of all processes together", metavar="N")
    accumulate: int = _option(1, "batches whose gradients are added up for one step of the optimizer", metavar="N")  # fmt: skip
    optimizer: str = _option("adamw", "adamw, sgd, lion, or module:function, which is called with parameter groups", metavar="NAME")  # fmt: skip
    lr: float = _option(2e-3, "peak learning rate", metavar="X", free=True)
    min_lr: float = _option(0.0, "lowest learning rate of the schedule", metavar="X", free=True)
    backbone_lr: float = _option(1.0, "factor on the learning rate of all layers but the last", metavar="X")  # fmt: skip
    layer_decay: float = _option(1.0, "factor on the learning rate from each block to the block before it", metavar="X")  # fmt: skip
    momentum: float = _option(0.9, "momentum of sgd", metavar="X")
    weight_decay: float = _option(0.05, "weight decay of matrices; norms and biases have none", metavar="X")  # fmt: skip
    schedule: str = _option("onecycle", "learning rate by step", choices=("onecycle", "cosine", "step", "plateau", "constant"))  # fmt: skip
    warmup: float = _option(0.0, "epochs in which the learning rate rises to its peak, before the schedule", metavar="X")  # fmt: skip
    step_epochs: int | None = _option(None, "epochs after which the schedule step divides the rate by 10 (default: a third of all)", metavar="N")  # fmt: skip
    plateau_epochs: int = _option(3, "epochs without a better validation after which the schedule plateau divides the rate by 10", metavar="N")  # fmt: skip
    label_smoothing: float = _option(0.0, "share of a label that is spread over all classes", metavar="X")  # fmt: skip
    class_weights: str = _option("none", "balanced: rare classes count as much as frequent ones", choices=("none", "balanced"))  # fmt: skip
    clip_norm: float = _option(0.0, "largest norm of the gradient; 0: no limit", metavar="X")
    clip_value: float = _option(0.0, "largest absolute value in the gradient; 0: no limit", metavar="X")  # fmt: skip
    ema: float = _option(0.0, "decay of a moving average of the weights, such as 0.999, which is validated beside them; 0: off", metavar="X")  # fmt: skip
    monitor: str | None = _option(None, "metric of validation that chooses the best checkpoint (default: accuracy, mAP or mse; with several labels the loss)", metavar="METRIC")  # fmt: skip
    patience: int = _option(0, "epochs without a better validation after which training ends; 0: never", metavar="N", free=True)  # fmt: skip
    min_delta: float = _option(0.0, "least improvement of the metric that counts", metavar="X", free=True)  # fmt: skip
    seed: int = _option(0, "seed of order, augmentation and initial weights", metavar="N")
    deterministic: bool = _option(False, "the same bits in every run on the same machine; slower on a GPU")  # fmt: skip
    # machine
    device: str = _option("auto", "cpu, cuda or auto", free=True)
    amp: str = _option("none", "16-bit arithmetic", choices=("none", "bf16", "fp16"))
    tf32: bool = _option(False, "TensorFloat-32 for matrix products on CUDA", free=True)
    channels_last: bool = _option(False, "channels last memory format, faster on GPUs", free=True)
    compile: bool = _option(False, "torch.compile the model", free=True)
    num_workers: int = _option(0, "decoding processes; 0: threads", metavar="N", free=True)
    lanes: int | None = _option(None, "forward runs through the shards; set it to resume with another number of processes (default: one per process)", metavar="N")  # fmt: skip
    shuffle_buffer: int | None = _option(None, "samples that a sample may be delivered after it was read (default: 256 MB of samples)", metavar="N")  # fmt: skip
    limit_train_batches: int | None = _option(None, "batches of each epoch of training (default: all)", metavar="N")  # fmt: skip
    limit_val_batches: int | None = _option(None, "batches of each validation (default: all)", metavar="N", free=True)  # fmt: skip
    on_error: str = _option("raise", "sample that cannot be read: raise ends the run, replace takes another sample", choices=("raise", "replace"), free=True)  # fmt: skip
    cache_dir: str | None = _option(None, "folder that keeps remote shards (default: no cache)", metavar="DIR", free=True)  # fmt: skip
    cache_limit: str | None = _option(None, "most bytes in it, such as 200GB (default: no limit)", metavar="SIZE", free=True)  # fmt: skip
    # checkpoints
    checkpoint_every: int = _option(0, "steps between checkpoints; 0: only at the end of epochs", metavar="STEPS", free=True)  # fmt: skip
    checkpoint_minutes: float = _option(10.0, "minutes between checkpoints; 0: not by the clock", metavar="X", free=True)  # fmt: skip
    keep: int = _option(2, "latest checkpoints that are kept, beside the best", metavar="N", free=True)  # fmt: skip

    def __post_init__(self) -> None:
        for option in dataclasses.fields(self):
            value = _typed(option.name, getattr(self, option.name))
            object.__setattr__(self, option.name, value)
        for names, is_valid, rule in _RANGES:
            for name in names:
                if (value := getattr(self, name)) is not None and not is_valid(value):
                    raise UsageError(f"{name}={value}: must be {rule}.")
        self._check_combinations()
        Augment.parse(self.augment)

    def _check_combinations(self) -> None:
        """Raise UsageError for options that do not go together."""
        if self.warmup >= self.epochs:
            raise UsageError(
                f"warmup={self.warmup}: must be shorter than the {self.epochs} epochs."
            )
        if self.warmup and self.schedule == "onecycle":
            raise UsageError(
                "schedule=onecycle has its own warm-up. Leave warmup out, or use schedule=cosine."
            )
        if self.min_lr > self.lr:
            raise UsageError(f"min_lr={self.min_lr}: must be at most lr={self.lr}.")
        if self.clip_norm and self.clip_value:
            raise UsageError("clip_norm and clip_value: give one of them.")
        if self.unfreeze_epoch is not None and self.freeze is None:
            raise UsageError("unfreeze_epoch needs freeze.")
        builtin = ("adamw", "sgd", "lion")
        if (
            self.optimizer not in builtin
            and ":" not in self.optimizer
            and self.optimizer[:1] != "<"
        ):
            raise UsageError(
                f"optimizer={self.optimizer!r}: must be {', '.join(builtin)} or module:function."
            )
        for name, option, owner in (
            ("step_epochs", "schedule", "step"),
            ("plateau_epochs", "schedule", "plateau"),
            ("momentum", "optimizer", "sgd"),
        ):
            is_default = getattr(self, name) == OPTIONS[name].default
            if not is_default and getattr(self, option) != owner:
                raise UsageError(
                    f"{name}={getattr(self, name)} needs {option}={owner}, and it is "
                    f"{getattr(self, option)}."
                )

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Config:
        """From names and values. Raises UsageError for a name that is no option, with the one that it resembles."""
        for name in values:
            check_known(name, OPTIONS, "options of a training run")
        return cls(**values)

    def toml(self, data: Mapping[str, Any]) -> str:
        """The lines of a file that `read_config` reads. data: where the shards are."""
        lines = [
            f"{name} = {_toml(value)}" for name, value in vars(self).items() if value is not None
        ]
        lines += [
            "",
            "[data]",
            *(f"{name} = {_toml(value)}" for name, value in data.items() if value is not None),
        ]
        return "\n".join(lines) + "\n"

    def differing(self, other: Config) -> list[str]:
        """What other has otherwise than this one and must not have when a run goes on, in words.

        A function without a name that can be imported may have one now: whether it makes the same model, the weights tell.
        """
        unnamed = any(one.model.startswith("<") for one in (self, other))
        return [
            f"{name} was {getattr(self, name)!r}, is {getattr(other, name)!r}"
            for name, option in OPTIONS.items()
            if not option.metadata["free"]
            and getattr(self, name) != getattr(other, name)
            and not (
                name == "model" and unnamed and all(is_made(one.model) for one in (self, other))
            )
        ]


OPTIONS = {one.name: one for one in dataclasses.fields(Config)}


def is_made(model: str) -> bool:
    """Whether a model is what a function of the user's makes: module:function, or <name> where it cannot be imported by that."""
    return ":" in model or model.startswith("<")


def read_config(path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(options, data) of a TOML or YAML file: what it says of a training run, and its table `data` with train and val.

    Raises UsageError for a file that cannot be read, for keys that are no options, and for values of another kind.
    """
    kind = os.path.splitext(path)[1].lower()
    try:
        with open(path, "rb") as file:
            raw = file.read()
        if kind == ".toml":
            found = tomllib.loads(raw.decode())
        elif kind in (".yaml", ".yml"):
            import yaml  # webdataset needs it, so it is there

            found = yaml.safe_load(raw) or {}
        else:
            raise UsageError(
                f"{path} is neither .toml nor .yaml. Name a file of options such as config.toml."
            )
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from None
    except UsageError:
        raise
    except Exception as error:  # each parser has errors of its own
        raise UsageError(
            f"{path} is no {kind[1:].upper()}: {' '.join(str(error).split())}."
        ) from None
    if not isinstance(found, dict):
        raise UsageError(f"{path} holds no table of options. Write for example: epochs = 10")
    data = found.pop("data", {})
    if not isinstance(data, dict):
        raise UsageError(
            f"{path}: data={data!r} is no table. Write for example: [data] train = 'shards/train-*.tar'"
        )
    options: dict[str, Any] = {}
    for name, value in found.items():
        plain = str(name).replace("-", "_")
        try:
            check_known(plain, OPTIONS, "options of a training run")
            if kind != ".toml" and isinstance(value, str) and kinds()[plain][0] is float:
                value = _number(value)  # YAML takes 1e-3 for a text
            options[plain] = _typed(plain, value)
        except UsageError as error:
            raise UsageError(f"{path}: {error}") from None
    for name, value in data.items():
        try:
            check_known(str(name), _DATA, "keys of [data]")
        except UsageError as error:
            raise UsageError(f"{path}: {error}") from None
        if not isinstance(value, str) and not (
            isinstance(value, list) and all(isinstance(one, str) for one in value)
        ):
            raise UsageError(
                f"{path}: data.{name}={value!r} is neither an address nor a list of them."
            )
    return options, data


def _toml(value: Any) -> str:
    """A value as TOML writes it, which is as JSON does, but for letters beyond 16 bits."""
    return json.dumps(value, ensure_ascii=False)


def check_known(name: str, known: typing.Collection[str], what: str) -> None:
    """Raise UsageError for a name that is none of those known, with the nearest."""
    if name in known:
        return
    near = get_close_matches(name, known, 1, 0.5)
    hint = f"Did you mean {near[0]}?" if near else f"There are: {', '.join(known)}."
    raise UsageError(f"{name!r} is none of the {what}. {hint}")


def _number(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text


def _as_plain(name: str, kind: type, value: Any) -> Any:
    """A value as Python's own kinds have it: numbers of numpy, whole floats, paths, devices of torch, a size in bytes."""
    if isinstance(value, np.generic):
        value = value.item()
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if kind is str and isinstance(value, os.PathLike):
        return os.fspath(value)
    if name == "device" and isinstance(getattr(value, "type", None), str):
        return str(value)
    if name == "cache_limit" and isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return value


@lru_cache(maxsize=1)
def kinds() -> dict[str, tuple[type, bool]]:
    """(type, whether it may be None) of every option."""
    found = {}
    for name, hint in typing.get_type_hints(Config).items():
        parts = [part for part in typing.get_args(hint) if part is not type(None)] or [hint]
        found[name] = (parts[0], len(typing.get_args(hint)) > 1)
    return found


def _typed(name: str, value: Any) -> Any:
    """A value of an option as its own kind. Raises UsageError for one that is of another."""
    kind, may_be_none = kinds()[name]
    if value is None and may_be_none:
        return None
    value = _as_plain(name, kind, value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not kind:
        wanted = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}[
            kind
        ]
        raise UsageError(f"{name}={value!r} is not {wanted}.")
    if (choices := OPTIONS[name].metadata["choices"]) and value not in choices:
        raise UsageError(f"{name}={value!r} is none of {', '.join(choices)}.")
    return value
