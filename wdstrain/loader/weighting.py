"""How often each sample occurs in an epoch, from an array, from a column, or to balance classes."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from wdstrain.errors import UsageError
from wdstrain.runtime.cached import cached_property
from wdstrain.shards.conditions import column_values
from wdstrain.shards.index import Index
from wdstrain.shards.offsets import Ints
from wdstrain.shards.selection import group_codes


@dataclass(frozen=True, eq=False)
class Weighting:
    """Weights of the samples of an index, and their strata; see `WeightedPlan`."""

    weights: npt.NDArray[np.float64]
    strata: Ints

    @cached_property
    def fingerprint(self) -> str:
        """Short hash of all values, which the order of an epoch depends on."""
        digest = blake2b(np.ascontiguousarray(self.weights, "<f8").data, digest_size=8)
        digest.update(np.ascontiguousarray(self.strata, "<i8").data)
        return digest.hexdigest()


def choose(
    index: Index, where: str | None, weights: Any, balance: str | None
) -> tuple[Index, Weighting | None]:
    """Return the samples that the options of a loader choose, and their weights if there are any.

    The options are those of `Loader`; at most one of weights and balance is given. Raises
    UsageError for options that do not fit the index.
    """
    ids = None if where is None else index.ids_where(where)
    selection = index if ids is None else index.take(ids)
    if balance is not None:
        return selection, _balanced(selection, balance)
    if weights is None or isinstance(weights, Weighting):  # a copy of a loader passes its own
        return selection, weights
    if isinstance(weights, str):
        values = _column(selection, weights)
    else:
        values = _array(index, weights)
        values = values if ids is None else values[ids]
    invalid = np.flatnonzero(~(np.isfinite(values) & (values >= 0)))
    if len(invalid):
        raise UsageError(
            f"weights: {values[invalid[0]]} for sample {selection.key(int(invalid[0]))!r} "
            f"({len(invalid)} such weights). Must be >= 0; 0 leaves a sample out."
        )
    return selection, Weighting(values, np.unique(values, return_inverse=True)[1].reshape(-1))


def _balanced(index: Index, column: str) -> Weighting:
    """Return weights that give each value of a column the same total.

    Together they add up to the number of samples.
    """
    missing = column_values(index, column).null_count
    if missing:
        raise UsageError(
            f"balance={column!r}: {missing} of {len(index)} samples have no value. "
            f"Leave them out: where={f'`{column}` is not None'!r}"
        )
    strata = group_codes(index, column)
    counts = np.bincount(strata)
    return Weighting((len(strata) / len(counts) / counts)[strata], strata)


def _column(index: Index, name: str) -> npt.NDArray[np.float64]:
    """Return the weights in a column."""
    values = column_values(index, name)
    kind = values.type
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        raise UsageError(
            f"weights={name!r}: must be a column of numbers; this one holds other values."
        )
    if values.null_count:
        raise UsageError(
            f"weights={name!r}: {values.null_count} of {len(index)} samples have no value. "
            f"Leave them out: where={f'`{name}` is not None'!r}"
        )
    return np.asarray(pc.cast(values, pa.float64()))


def _array(index: Index, weights: Any) -> npt.NDArray[np.float64]:
    """Return the weights in an array or list."""
    rule = f"must be {len(index)} numbers, one for each sample of the index"
    try:
        values = np.array(weights, np.float64)
    except (TypeError, ValueError):
        raise UsageError(f"weights of type {type(weights).__name__}: {rule}.") from None
    if values.shape != (len(index),):
        raise UsageError(f"weights of shape {list(values.shape)}: {rule}.")
    return values
