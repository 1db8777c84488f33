"""Buckets of a loader: which samples may share a batch, and how many of them a batch holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import pyarrow as pa

from wdstrain.errors import UsageError
from wdstrain.loader.options import LoaderOptions
from wdstrain.report.printing import counted
from wdstrain.runtime.cached import cached_property
from wdstrain.shards.index import Index
from wdstrain.shards.offsets import Ints
from wdstrain.shards.selection import group_codes
from wdstrain.shards.where import complete_values

_MOST = 1000  # buckets; each leaves out a part of a batch


@dataclass(frozen=True, eq=False)
class Bucketing:
    """The buckets of a loader, as `Buckets` takes them: codes, names, and samples from each lane."""

    codes: Ints
    names: Sequence[str]
    per_lane: Ints

    @cached_property
    def fingerprint(self) -> str:
        """Short hash of all values, which the order of an epoch depends on."""
        digest = blake2b(np.ascontiguousarray(self.codes, "<i8").data, digest_size=8)
        digest.update(np.ascontiguousarray(self.per_lane, "<i8").data)
        return digest.hexdigest()


def bucketing(index: Index, options: LoaderOptions) -> Bucketing:
    """Return the buckets that the options of a loader give the samples of an index.

    Raises UsageError for options that do not fit the index.
    """
    lanes = max(1, (options.lanes or options.world_size) // options.world_size)  # of a rank
    if isinstance(options.buckets, Mapping):
        ((column, edges),) = options.buckets.items()
        codes, used = _between(complete_values(index, column, "buckets"), list(edges), index)
        names = [f"{column} <= {edge:g}" for edge in used]
        return Bucketing(codes, names, np.array([_per_lane(edge, options, lanes) for edge in used]))
    column = str(options.buckets)
    values, codes = complete_values(index, column, "buckets"), group_codes(index, column)
    first = np.unique(codes, return_index=True)[1]
    if len(first) > _MOST:
        raise UsageError(
            f"the column has {len(first)} values, and each would be a bucket; {_MOST} is the limit.",
            "Give the largest value of each bucket: {buckets}",
            {"buckets": {column: [64, 128, 256]}},
        )
    names = [f"{column} {value}" for value in values.take(pa.array(first)).to_pylist()]
    return Bucketing(codes, names, np.full(len(first), options.batch_size // lanes))


def _between(values: pa.Array, edges: list[Any], index: Index) -> tuple[Ints, list[float]]:
    """Return the bucket of each sample, and the edges of the buckets that have samples."""
    if not (pa.types.is_integer(values.type) or pa.types.is_floating(values.type)):
        raise UsageError(
            f"edges need a column of numbers; this one holds {values.type}.",
            "Give the name of the column alone, so that each value is a bucket.",
            option="buckets",
            value=edges,
        )
    numbers = np.asarray(values, np.float64)
    codes = np.searchsorted(np.array(edges, np.float64), numbers, side="left")
    above = np.flatnonzero((codes == len(edges)) | np.isnan(numbers)).tolist()
    if above:
        raise UsageError(
            f"{len(above)} samples are above the last edge {edges[-1]:g}, the first of them "
            f"{index.key(above[0])!r} with {numbers[above[0]]:g}.",
            "Add a larger edge, or leave them out with {where}.",
            {"where": ...},
            option="buckets",
            value=edges,
        )
    used, codes = np.unique(codes, return_inverse=True)
    return codes.reshape(-1).astype(np.int64), [float(edges[bucket]) for bucket in used]


def _per_lane(edge: float, options: LoaderOptions, lanes: int) -> int:
    """Return the samples that a batch of a bucket takes from each of the lanes of a rank."""
    if options.budget is None or edge <= 0:
        return options.batch_size // lanes
    count = int(min(options.batch_size, options.budget // edge)) // lanes
    if count < 1:
        raise UsageError(
            f"a batch needs {counted(lanes, 'sample')} at least, of up to {edge:g} each.",
            "Raise it, or leave the long samples out with {where}.",
            {"where": ...},
            option="budget",
            value=options.budget,
        )
    return count
