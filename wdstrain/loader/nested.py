"""Tensors in nested mappings, lists and tuples, whose types stay as they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from copy import copy
from typing import Any

import torch


def map_tensors(change: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Return a value with each of its tensors changed. Other parts stay as they are."""
    if isinstance(value, torch.Tensor):
        return change(value)
    return _rebuilt(value, lambda part: map_tensors(change, part))


def without_rows(value: Any) -> Any:
    """Return a collated value without its rows.

    A sequence that holds tensors has a column for each position of an example, as default_collate
    makes it. Any other sequence has an entry for each row.
    """
    if isinstance(value, torch.Tensor):
        return value[:0]
    has_columns = hasattr(value, "_fields") or _has_tensors(value)
    if isinstance(value, (list, tuple)) and not has_columns:
        return value[:0]
    return _rebuilt(value, without_rows)


def _has_tensors(value: Any) -> bool:
    """Return whether a tensor is anywhere in a value."""
    if isinstance(value, (Mapping, list, tuple)):
        parts = value.values() if isinstance(value, Mapping) else value
        return any(_has_tensors(part) for part in parts)
    return isinstance(value, torch.Tensor)


def _rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a container of the same type with each part changed; any other value as it is."""
    if isinstance(value, Mapping):
        parts = {name: change(part) for name, part in value.items()}
        if type(value) is dict or not isinstance(value, MutableMapping):
            return parts
        rebuilt = copy(value)
        rebuilt.update(parts)
        return rebuilt
    if isinstance(value, (list, tuple)):
        changed = map(change, value)
        return type(value)(*changed) if hasattr(value, "_fields") else type(value)(changed)
    return value
