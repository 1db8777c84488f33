"""Config: the checked options of a training run, from flags, from a TOML or YAML file, or from Python.

`wdstrain.training.options` declares the options. A name that is no option is refused with the
nearest one. Evaluation and prediction take some options again; a checkpoint has all others.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from wdstrain.errors import UsageError
from wdstrain.runtime.options import help_text, option
from wdstrain.training.options import RunOptions

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
            value = _typed(field, getattr(self, field.name))
            object.__setattr__(self, field.name, value)
            rule = field.metadata.get("rule")
            if rule is not None and value is not None and not rule.holds(value):
                raise UsageError(f"{field.name}={value}: must be {rule.text}.")
        self._check_combinations()
        from wdstrain.decode.transforms import Augment  # only now: it loads NumPy and Pillow

        Augment.parse(self.augment, scale=self.scale, ratio=self.ratio, crop_pct=self.crop_pct)

    def _check_combinations(self) -> None:
        """Raise UsageError for options that do not go together."""
        is_own = is_made(self.optimizer)  # which has its own rate
        for is_broken, *texts in (
            (
                self.warmup >= self.epochs,
                f"warmup={self.warmup}: must be shorter than the {self.epochs} epochs.",
            ),
            (
                self.warmup and self.schedule == "onecycle",
                "schedule=onecycle has its own warm-up.",
                "Leave warmup out, or use schedule=cosine.",
            ),
            (
                self.min_lr > self.lr and not is_own,
                f"min_lr={self.min_lr}: must be at most lr={self.lr}.",
            ),
            (
                self.clip_norm and self.clip_value,
                "clip_norm and clip_value: give one of them.",
            ),
            (
                self.grad_checkpointing and self.compile,
                "grad_checkpointing and compile: give one of them.",
            ),
            (
                self.optimizer not in _OPTIMIZERS and not is_own,
                f"optimizer={self.optimizer!r}: must be {', '.join(_OPTIMIZERS)} or "
                f"module:function.",
            ),
        ):
            if is_broken:
                raise UsageError(*texts)
        mixes = bool(self.mixup or self.cutmix)
        for name, is_used, owner in (
            ("step_epochs", self.schedule == "step", "schedule=step"),
            ("plateau_epochs", self.schedule == "plateau", "schedule=plateau"),
            ("momentum", self.optimizer == "sgd", "optimizer=sgd"),
            ("max_errors", self.on_error == "replace", "on_error=replace"),
            ("unfreeze_epoch", self.freeze is not None, "freeze"),
            ("mixup_prob", mixes, "mixup or cutmix"),
            ("mixup_switch_prob", mixes, "mixup or cutmix"),
            ("mixup_off_epoch", mixes, "mixup or cutmix"),
        ):
            value = getattr(self, name)
            if not is_used and value != OPTIONS[name].default:
                raise UsageError(f"{name}={value} needs {owner}.")

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
        tables = [
            "".join(
                f"{name} = {json.dumps(value, ensure_ascii=False)}\n"  # as TOML writes values
                for name, value in table.items()
                if value is not None
            )
            for table in (vars(self), data)
        ]
        return "\n[data]\n".join(tables)

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


# ends of names of files of weights
_FILE_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".tar", ".safetensors")


def is_file(weights: str) -> bool:
    """Return whether weights name a file, and not a member of an enumeration such as DEFAULT."""
    return os.path.exists(weights) or os.sep in weights or weights.endswith(_FILE_SUFFIXES)


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

    Raises UsageError for a file that cannot be read, and for keys that are no options.
    """
    table = _read_table(path)
    data = table.pop("data", {})
    options = {str(name).replace("-", "_"): value for name, value in table.items()}
    for name in options:
        check_known(name, OPTIONS, f"options of a training run, in {path}")
    lists = [urls if isinstance(urls, list) else [urls] for urls in dict(data).values()]
    if not set(data) <= set(_DATA) or not all(isinstance(u, str) for urls in lists for u in urls):
        raise UsageError(
            f"{path}: data must have addresses of shards under {' and '.join(_DATA)} only.",
            "Write for example: [data] train = 'shards/train-*.tar'",
        )
    return options, data


def _read_table(path: str) -> dict[Any, Any]:
    """Return the table of a file."""
    kind = os.path.splitext(path)[1].lower()
    if kind not in (".toml", ".yaml", ".yml"):
        raise UsageError(
            f"{path} is neither .toml nor .yaml.",
            "Name a file of options such as config.toml.",
        )
    try:
        with open(path, "rb") as file:
            raw = file.read()
        if kind == ".toml":
            return dict(tomllib.loads(raw.decode()))
        import yaml

        return dict(yaml.safe_load(raw) or {})
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read: {error.strerror}.",
            "Check the path.",
        ) from None
    except Exception as error:  # each parser has errors of its own
        cause = " ".join(str(error).split())
        raise UsageError(f"{path} is no {kind[1:].upper()} table of options: {cause}.") from None


# --- names and types ------------------------------------------------------------------------------


def check_known(name: str, known: Collection[str], title: str) -> None:
    """Raise UsageError for a name that is not known, with the nearest one."""
    if name in known:
        return
    near = get_close_matches(name, known, 1, 0.5)
    hint = f"Did you mean {near[0]}?" if near else f"Use one of: {', '.join(known)}."
    raise UsageError(
        f"{name!r} is none of the {title}.",
        hint,
    )


# Types of options by the first word of their annotation, and their names in errors.
_KINDS: dict[str, tuple[type, str]] = {
    "int": (int, "a whole number"),
    "float": (float, "a number"),
    "bool": (bool, "true or false"),
    "str": (str, "a text"),
}


def _typed(field: dataclasses.Field[Any], value: Any) -> Any:
    """Return a value in the type of its option. Raises UsageError for another type."""
    name, annotation, parse = field.name, str(field.type), field.metadata["parse"]
    if value is None and annotation.endswith("None"):
        return None
    if parse is not None:
        try:
            return parse(value)
        except (TypeError, ValueError) as error:
            raise UsageError(f"{name}={value!r}: {error}.") from None
    kind, words = _KINDS[annotation.partition(" ")[0]]
    plain = value
    if type(value).__module__ == "numpy" and not getattr(value, "ndim", 1):
        plain = value.item()
    if kind is int and isinstance(plain, float) and plain.is_integer():
        plain = int(plain)
    elif kind is float and type(plain) in (int, str):  # YAML takes 1e-3 for a text
        with suppress(ValueError):
            plain = float(plain)
    elif kind is str and (isinstance(plain, os.PathLike) or name in ("device", "cache_limit")):
        plain = str(plain)
    if type(plain) is not kind:
        raise UsageError(f"{name}={value!r} is not {words}.")
    choices = field.metadata.get("choices")
    if choices and plain not in choices:
        raise UsageError(
            f"{name}={plain!r} is none of the choices.",
            f"Use {' or '.join(choices)}.",
        )
    return plain
