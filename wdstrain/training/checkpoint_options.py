"""Options of evaluation and prediction; the checkpoint has all others."""

from __future__ import annotations

from dataclasses import Field, dataclass
from typing import Any

from wdstrain.runtime.options import help_text, option
from wdstrain.training.options import DataOptions, MachineOptions, OptimizationOptions


def _as_trained(base: type[Any], name: str) -> Any:
    """Return an option of a run whose default is the value that the checkpoint has."""
    field = base.__dataclass_fields__[name]
    text = str(field.metadata["help"])
    return _again(field, f"{text} (default: as in training)")


def _as_in_a_run(base: type[Any], name: str) -> Any:
    """Return an option of a run that no checkpoint decides."""
    field = base.__dataclass_fields__[name]
    return _again(field, help_text(field))


def _again(field: Field[Any], help: str) -> Any:
    about = field.metadata
    return option(None, help, metavar=about["metavar"], choices=about["choices"])


@dataclass(frozen=True, kw_only=True)
class PredictOptions:
    """Options of predictions; the checkpoint has all others. None: see the help text."""

    batch_size: int | None = _as_trained(OptimizationOptions, "batch_size")
    amp: str | None = _as_trained(MachineOptions, "amp")
    device: str | None = _as_in_a_run(MachineOptions, "device")
    num_workers: int | None = _as_in_a_run(MachineOptions, "num_workers")
    cache_dir: str | None = _as_in_a_run(MachineOptions, "cache_dir")
    cache_limit: str | None = _as_in_a_run(MachineOptions, "cache_limit")


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(PredictOptions):
    """Options of evaluation; the checkpoint has all others. None: see the help text."""

    on_error: str | None = _as_in_a_run(DataOptions, "on_error")
    max_errors: float | None = _as_in_a_run(DataOptions, "max_errors")
