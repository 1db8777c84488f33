"""Decoding of a batch by the user's transform and collate function."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from wdstrain.decode.batch_bytes import BatchBytes
from wdstrain.decode.task import (
    BadSample,
    Collate,
    DecodedRows,
    DecoderSettings,
    Task,
    is_incomplete,
    reason_of,
    substitute,
)
from wdstrain.order.rng import key

_DEFAULT_COLLATE = (None, default_collate)
_NO_EXAMPLE = (
    "transform returned None, and each sample must give an example; "
    "filter samples when they are packed (wdstrain convert tars --where)"
)


def run_transform(
    settings: DecoderSettings,
    task: Task,
    data: BatchBytes,
    *,
    own_process: bool,
) -> DecodedRows:
    """Run the transform on every sample of a batch and collate the examples.

    own_process: seed the global random generators for each sample. Threads share them, and must
    leave them alone.
    """
    examples: list[Any] = [None] * len(task.ids)
    bad = data.find_damaged()
    for row, members in enumerate(data.samples()):
        if row in bad:
            continue
        sample: dict[str, Any] = {"__key__": task.keys[row]}
        sample |= {name: bytes(member) for name, member in members.items()}
        random_key = key("sample", settings.seed, task.epoch, int(task.draws[row]))
        if own_process:
            _seed_globals(random_key)
        try:
            examples[row] = _transform(settings, sample, random_key)
            reason = _rejection(examples[row], settings.collate_fn)
        except Exception as error:
            reason = f"transform raised {type(error).__name__}: {reason_of(error)}"
        if reason:
            bad[row] = BadSample(row, "", reason)
    rows_done = time.perf_counter()
    replaced = substitute(sorted(bad.values()), task.ids, [examples], settings.on_error)
    if is_incomplete(replaced):
        return DecodedRows({}, replaced, rows_done)
    try:
        return DecodedRows(_collate(examples, settings.collate_fn), replaced, rows_done)
    except _CollateError as error:
        return DecodedRows({}, [BadSample(0, "", str(error), whole_batch=True)], rows_done)


def _seed_globals(random_key: int) -> None:
    """Seed the global random generators of this process."""
    random.seed(random_key)
    np.random.seed(random_key & 0xFFFFFFFF)
    # not torch.manual_seed: it records a call stack for each kind of device, and would seed the
    # devices of a training process in which a batch is decoded again
    torch.default_generator.manual_seed(random_key)


def _transform(settings: DecoderSettings, sample: dict[str, Any], random_key: int) -> Any:
    """Return the example of a sample. The user's function may raise anything."""
    assert settings.transform is not None
    if not settings.takes_rng:
        return settings.transform(sample)
    return settings.transform(sample, np.random.Generator(np.random.Philox(key=random_key)))


def _rejection(example: Any, collate_fn: Collate | None) -> str:
    """Return the reason why an example cannot be collated; empty if it can."""
    if example is None:
        return _NO_EXAMPLE
    if collate_fn in _DEFAULT_COLLATE and not isinstance(example, Mapping):
        return (
            f"transform returned {type(example).__name__}; an example must be a dict of values by "
            "name, or a value that your own collate_fn takes"
        )
    return ""


class _CollateError(Exception):
    """The examples of a batch cannot be collated. The message gives the reason."""


def _collate(examples: list[Any], collate_fn: Collate | None) -> dict[str, Any]:
    """Return the batch of these examples. Raises _CollateError."""
    try:
        batch = (collate_fn or default_collate)(examples)
        if not isinstance(batch, Mapping):
            raise TypeError(
                f"it returned {type(batch).__name__}; a batch must be a dict of values by name"
            )
        return dict(batch)
    except Exception as error:
        if collate_fn not in _DEFAULT_COLLATE:
            raise _CollateError(
                f"collate_fn raised {type(error).__name__}: {reason_of(error)}"
            ) from error
        raise _CollateError(
            f"the examples of this batch cannot be stacked: {reason_of(error).rstrip('. ')}. "
            "Return values of one shape, or give the Loader a collate_fn, which makes a batch of "
            "the list of its examples"
        ) from error
