"""Config: the checked options of a training run, from flags, from a TOML or YAML file, or from Python.

`wdstrain.training.options` declares the options. A name that is no option is refused with the
nearest one. Evaluation and prediction take some options again; a checkpoint has all others.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import typing
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

from wdstrain.errors import UsageError
from wdstrain.runtime.options import help_text, option
from wdstrain.training.options import RunOptions, parse_size

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_DATA = ("train", "val")  # keys of a file's table [data]: where the shards are
_OPTIMIZERS = ("adamw", "sgd")


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
            value = _typed(field.name, getattr(self, field.name))
            object.__setattr__(self, field.name, value)
            rule = field.metadata.get("rule")
            if rule is not None and value is not None and not rule.holds(value):
                raise UsageError(f"{field.name}={value}: must be {rule.text}.")
        self._check_combinations()
        from wdstrain.decode.transforms import Augment  # only now: it loads NumPy and Pillow

        Augment.parse(self.augment, scale=self.scale, ratio=self.ratio, crop_pct=self.crop_pct)

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
        if self.min_lr > self.lr and not is_made(self.optimizer):  # which has its own rate
            raise UsageError(f"min_lr={self.min_lr}: must be at most lr={self.lr}.")
        if self.clip_norm and self.clip_value:
            raise UsageError("clip_norm and clip_value: give one of them.")
        if self.grad_checkpointing and self.compile:
            raise UsageError("grad_checkpointing and compile: give one of them.")
        if self.unfreeze_epoch is not None and self.freeze is None:
            raise UsageError("unfreeze_epoch needs freeze.")
        if self.optimizer not in _OPTIMIZERS and not is_made(self.optimizer):
            raise UsageError(
                f"optimizer={self.optimizer!r}: must be {', '.join(_OPTIMIZERS)} or "
                f"module:function."
            )
        if not self.mixup and not self.cutmix:
            for name in ("mixup_prob", "mixup_switch_prob", "mixup_off_epoch"):
                if getattr(self, name) != OPTIONS[name].default:
                    raise UsageError(f"{name} needs mixup or cutmix.")
        for name, parent, owner in (
            ("step_epochs", "schedule", "step"),
            ("plateau_epochs", "schedule", "plateau"),
            ("momentum", "optimizer", "sgd"),
            ("max_errors", "on_error", "replace"),
        ):
            is_default = getattr(self, name) == OPTIONS[name].default
            if not is_default and getattr(self, parent) != owner:
                raise UsageError(
                    f"{name}={getattr(self, name)} needs {parent}={owner}, and it is "
                    f"{getattr(self, parent)}."
                )

    @property
    def image_shape(self) -> tuple[int, int]:
        """Height and width of the images."""
        height, _, width = str(self.image_size).partition("x")
        return int(height), int(width or height)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Config:
        """Return the options with these values. Raises UsageError for a name that is no option."""
        for name in values:
            check_known(name, OPTIONS, "options of a training run")
        return cls(**values)

    def toml(self, data: Mapping[str, Any]) -> str:
        """Return the text of a file for `read_config`. data: addresses of the shards."""
        lines = [
            f"{name} = {_toml(value)}" for name, value in vars(self).items() if value is not None
        ]
        lines += ["", "[data]"]
        lines += [f"{name} = {_toml(value)}" for name, value in data.items() if value is not None]
        return "\n".join(lines) + "\n"

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
    help = default if trained else help_text(field)
    return option(None, help, metavar=field.metadata["metavar"])


@dataclass(frozen=True, kw_only=True)
class PredictOptions:
    """Options of predictions; the checkpoint has all others. None: see the help text."""

    batch_size: int | None = _override("batch_size", trained=True)
    amp: str | None = _override("amp", trained=True)
    device: str | None = _override("device")
    num_workers: int | None = _override("num_workers")
    cache_dir: str | None = _override("cache_dir")
    cache_limit: str | None = _override("cache_limit")


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(PredictOptions):
    """Options of evaluation; the checkpoint has all others. None: see the help text."""

    on_error: str | None = _override("on_error")
    max_errors: float | None = _override("max_errors")


# --- files of options -----------------------------------------------------------------------------


def read_config(path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (options, data) of a TOML or YAML file. data: its table [data], with train and val.

    Raises UsageError for a file that cannot be read, for keys that are no options, and for values
    of another type.
    """
    kind = os.path.splitext(path)[1].lower()
    table = _read_table(path, kind)
    data = table.pop("data", {})
    try:
        options = {
            name.replace("-", "_"): _from_file(name.replace("-", "_"), value, kind)
            for name, value in ((str(name), value) for name, value in table.items())
        }
        _check_data(data)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None
    return options, data


def _read_table(path: str, kind: str) -> dict[Any, Any]:
    """Return the table of a file. kind: its ending."""
    if kind not in (".toml", ".yaml", ".yml"):
        raise UsageError(
            f"{path} is neither .toml nor .yaml. Name a file of options such as config.toml."
        )
    try:
        with open(path, "rb") as file:
            raw = file.read()
        if kind == ".toml":
            table: Any = tomllib.loads(raw.decode())
        else:
            import yaml

            table = yaml.safe_load(raw) or {}
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}. Check the path.") from None
    except Exception as error:  # each parser has errors of its own
        cause = " ".join(str(error).split())
        raise UsageError(f"{path} is no {kind[1:].upper()}: {cause}.") from None
    if not isinstance(table, dict):
        raise UsageError(f"{path} holds no table of options. Write for example: epochs = 10")
    return table


def _from_file(name: str, value: Any, kind: str) -> Any:
    """Return the value of an option in a file."""
    check_known(name, OPTIONS, "options of a training run")
    if kind != ".toml" and isinstance(value, str) and kinds()[name][0] is float:
        with suppress(ValueError):  # YAML takes 1e-3 for a text
            value = float(value)
    return _typed(name, value)


def _check_data(data: Any) -> None:
    """Raise UsageError for a table [data] that does not hold addresses."""
    if not isinstance(data, dict):
        raise UsageError(
            f"data={data!r} is no table. Write for example: [data] train = 'shards/train-*.tar'"
        )
    for name, value in data.items():
        check_known(str(name), _DATA, "keys of [data]")
        urls = value if isinstance(value, list) else [value]
        if not all(isinstance(url, str) for url in urls):
            raise UsageError(f"data.{name}={value!r} is neither an address nor a list of them.")


def _toml(value: Any) -> str:
    """Return a value as TOML writes it: as JSON does, but letters beyond 16 bits stay."""
    return json.dumps(value, ensure_ascii=False)


# --- names and types ------------------------------------------------------------------------------


def check_known(name: str, known: Collection[str], title: str) -> None:
    """Raise UsageError for a name that is not known, with the nearest one."""
    if name in known:
        return
    near = get_close_matches(name, known, 1, 0.5)
    hint = f"Did you mean {near[0]}?" if near else f"Use one of: {', '.join(known)}."
    raise UsageError(f"{name!r} is none of the {title}. {hint}")


@lru_cache(maxsize=1)
def kinds() -> dict[str, tuple[type, bool]]:
    """Return (type, whether it may be None) of every option."""
    kinds_by_name = {}
    for name, hint in typing.get_type_hints(Config).items():
        members = typing.get_args(hint)
        is_optional = type(None) in members
        kind = members[0] if is_optional else hint
        kinds_by_name[name] = (typing.get_origin(kind) or kind, is_optional)
    return kinds_by_name


_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    tuple: "a list of numbers",
}


def _typed(name: str, value: Any) -> Any:
    """Return a value in the type of its option. Raises UsageError for another type."""
    kind, may_be_none = kinds()[name]
    if value is None and may_be_none:
        return None
    if name == "image_size":
        try:
            return parse_size(value)
        except ValueError as error:
            raise UsageError(f"image_size={value!r}: {error}.") from None
    value = _as_plain(name, kind, value)
    if kind is tuple and all(type(number) in (int, float) for number in value):
        return tuple(map(float, value))
    if type(value) is not kind or kind is tuple:
        raise UsageError(f"{name}={value!r} is not {_WORDS[kind]}.")
    choices = OPTIONS[name].metadata.get("choices")
    if choices and value not in choices:
        raise UsageError(f"{name}={value!r} is none of the choices. Use {' or '.join(choices)}.")
    return value


def _as_plain(name: str, kind: type, value: Any) -> Any:
    """Return numbers of NumPy, paths, devices of torch and sizes in bytes as plain values."""
    if type(value).__module__ == "numpy" and not getattr(value, "ndim", 1):
        value = value.item()
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if kind is float and type(value) is int:
        return float(value)
    if kind is tuple:
        return tuple(value) if isinstance(value, (list, tuple)) else (value,)
    if kind is str and isinstance(value, os.PathLike):
        return os.fspath(value)
    if name == "device" and isinstance(getattr(value, "type", None), str):
        return str(value)
    if name == "cache_limit" and type(value) is int:
        return str(value)
    return value
