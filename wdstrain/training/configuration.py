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
from collections.abc import Mapping
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
OF_EVALUATING = (*OF_PREDICTING, "on_bad")


def _option(
    default: Any, text: str, *, metavar: str = "", choices: tuple[str, ...] = (), free: bool = False
) -> Any:
    """free: it may change when a run goes on, for it does not touch what is learnt."""
    return field(
        default=default,
        metadata={"text": text, "metavar": metavar, "choices": choices, "free": free},
    )


@dataclass(frozen=True, kw_only=True)
class Config:
    """How to train."""

    # what is learnt
    label: str | None = _option(None, "labels to learn, as NAME or NAME:KIND with a comma between; KIND is class, binary, multi or number; or, in shards that declare none, the field or entry that holds it, such as cls or json.kind (default: the only one)", metavar="NAME")  # fmt: skip
    classes: str | None = _option(
        None,
        "with such a label, names of its classes in the order of their numbers (default: sorted)",
        metavar="FILE|A,B,...",
    )
    model: str = _option("small", "small, a torchvision model such as resnet18, or module:function of yours, called with the number of outputs", metavar="NAME")  # fmt: skip
    weights: str | None = _option(
        None,
        "file of weights to begin with: a state dict, or a checkpoint of a run",
        metavar="FILE",
    )
    freeze: bool = _option(False, "learn the last layer alone")
    image_size: int = _option(64, "side of the pictures", metavar="N")
    augment: str | None = _option(
        None, "rrc, flip, trivialaugment, randaugment, with + between", metavar="A"
    )
    mixup: float = _option(0.0, "alpha of mixup", metavar="X")
    cutmix: float = _option(0.0, "alpha of CutMix", metavar="X")
    where: str | None = _option(
        None,
        "learn from and validate on only the samples for which this holds, such as \"label != 'Other'\"",
        metavar="EXPR",
    )
    balance: str | None = _option(
        None,
        "column, such as label, each value of which gives the same number of samples of an epoch",
        metavar="COLUMN",
    )
    # how
    epochs: int = _option(10, "passes over the data", metavar="N", free=True)
    batch_size: int = _option(64, "pictures per step, of all processes together", metavar="N")
    accumulate: int = _option(
        1, "batches whose gradients are added up for one step of the optimiser", metavar="N"
    )
    optimiser: str = _option("adamw", "adamw or sgd", choices=("adamw", "sgd"))
    lr: float = _option(2e-3, "learning rate at its peak", metavar="X")
    momentum: float = _option(0.9, "of sgd", metavar="X")
    weight_decay: float = _option(0.05, "not for norms and biases", metavar="X")
    schedule: str = _option(
        "onecycle",
        "of the learning rate, step by step",
        choices=("onecycle", "cosine", "step", "constant"),
    )
    warmup: float = _option(
        0.0, "epochs in which the learning rate rises to its peak, before the schedule", metavar="X"
    )
    step_epochs: int | None = _option(None, "of the schedule step: epochs until the rate is a tenth (default: a third of all)", metavar="N")  # fmt: skip
    label_smoothing: float = _option(
        0.0, "share of a label that is spread over all classes", metavar="X"
    )
    class_weights: str = _option(
        "none",
        "balanced: rare classes count as much as frequent ones",
        choices=("none", "balanced"),
    )
    clip: float = _option(0.0, "longest gradient; 0: any", metavar="X")
    ema: float = _option(0.0, "decay of a moving average of the weights, such as 0.999, which is then what is validated; 0: none", metavar="X")  # fmt: skip
    patience: int = _option(
        0,
        "epochs without a better validation after which training ends; 0: never",
        metavar="N",
        free=True,
    )
    seed: int = _option(0, "of order, pictures and weights", metavar="N")
    deterministic: bool = _option(
        False, "the same bits in every run on the same machine; slower on a GPU"
    )
    # with what
    device: str = _option("auto", "cpu, cuda or auto", free=True)
    amp: str = _option("none", "16-bit arithmetic", choices=("none", "bf16", "fp16"))
    channels_last: bool = _option(
        False, "lay pictures and weights down as GPUs like them", free=True
    )
    compile: bool = _option(False, "torch.compile the model", free=True)
    num_workers: int = _option(0, "decoding processes; 0: threads", metavar="N", free=True)
    lanes: int | None = _option(None, "forward runs through the shards; fix it to go on with another number of processes (default: one per process)", metavar="N")  # fmt: skip
    shuffle_buffer: int | None = _option(None, "samples: how far one may be taken from its place (default: 256 MB of them)", metavar="N")  # fmt: skip
    on_bad: str = _option("raise", "a sample that cannot be read ends the run, or another takes its place", choices=("raise", "replace"), free=True)  # fmt: skip
    cache_dir: str | None = _option(None, "keep shards of servers here while they stream (default: do not)", metavar="DIR", free=True)  # fmt: skip
    cache_limit: str | None = _option(
        None, "most bytes in it, such as 200GB (default: no limit)", metavar="SIZE", free=True
    )
    # checkpoints
    checkpoint_every: int = _option(0, "steps between checkpoints; 0: none but at the ends of epochs", metavar="STEPS", free=True)  # fmt: skip
    checkpoint_minutes: float = _option(
        10.0, "minutes between checkpoints; 0: none by the clock", metavar="X", free=True
    )
    keep: int = _option(
        2, "how many of the last checkpoints are kept, beside the best", metavar="N", free=True
    )

    def __post_init__(self) -> None:
        for one in dataclasses.fields(self):
            object.__setattr__(self, one.name, _typed(one.name, getattr(self, one.name)))
        for name in (
            "epochs",
            "batch_size",
            "accumulate",
            "image_size",
            "keep",
            "lanes",
            "shuffle_buffer",
            "step_epochs",
        ):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UsageError(f"{name}={value} is below 1.")
        for name in ("num_workers", "checkpoint_every", "patience"):
            if getattr(self, name) < 0:
                raise UsageError(f"{name}={getattr(self, name)} is below 0.")
        for name in ("weight_decay", "warmup", "clip", "mixup", "cutmix", "checkpoint_minutes"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UsageError(f"{name}={getattr(self, name)} is no number from 0 on.")
        for name in ("label_smoothing", "momentum", "ema"):
            if not 0 <= getattr(self, name) < 1:
                raise UsageError(f"{name}={getattr(self, name)} is not between 0 and 1.")
        if not 0 < self.lr < math.inf:
            raise UsageError(f"lr={self.lr} is no number above 0.")
        if not 0 <= self.seed < 2**63:
            raise UsageError(f"seed={self.seed} is not between 0 and 2**63.")
        if self.warmup >= self.epochs:
            raise UsageError(
                f"warmup={self.warmup} is not shorter than the {self.epochs} epochs. Lower it."
            )
        if self.warmup and self.schedule == "onecycle":
            raise UsageError(
                "the schedule onecycle rises by itself. Leave warmup away, or use --schedule cosine."
            )
        if self.step_epochs is not None and self.schedule != "step":
            raise UsageError(
                f"step_epochs={self.step_epochs} belongs to the schedule step, and this is {self.schedule}."
            )
        if self.momentum != 0.9 and self.optimiser != "sgd":
            raise UsageError(
                f"momentum={self.momentum} belongs to the optimiser sgd, and this is {self.optimiser}."
            )
        Augment.parse(self.augment)

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
