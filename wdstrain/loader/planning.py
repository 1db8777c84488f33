"""From shards and options to epoch plans: which samples an epoch has, how often, in which order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache, partial
from hashlib import blake2b
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from wdstrain.decode.fields import Field, Image
from wdstrain.decode.labels import reader_of, with_classes
from wdstrain.errors import UsageError, logger
from wdstrain.loader.buckets import bucketing
from wdstrain.loader.options import LoaderOptions
from wdstrain.loader.recording import RECORDED, Recording
from wdstrain.order.buckets import Buckets
from wdstrain.order.mixture import TURNS, Mixture
from wdstrain.order.order import Order
from wdstrain.order.plan import ORDER, Plan
from wdstrain.order.weighted_plan import WEIGHTED_ORDER, WeightedPlan
from wdstrain.runtime.cached import cached_property
from wdstrain.runtime.options import refuse
from wdstrain.shards.index import Index, join
from wdstrain.shards.joining import can_join
from wdstrain.shards.offsets import Ints
from wdstrain.shards.resolve import open_shards
from wdstrain.shards.selection import group_codes
from wdstrain.shards.where import column_named, complete_values, ids_where
from wdstrain.storage.addresses import Urls

# The default window has this many bytes; the shuffle buffer holds half of them on average.
_WINDOW_BYTES = 256 << 20
_WIDEST_WINDOW = 8  # times the longest lane; a wider window does not change the order any more
_NARROW_WINDOW = 32  # samples; a default window below is reported
_KEPT_PLANS = 4


@dataclass(frozen=True)
class MixedSources:
    """Sources of a mixture by name, with their shares, which add up to 1."""

    indexes: dict[str, Index]
    shares: tuple[Fraction, ...]

    @property
    def first_ids(self) -> dict[str, int]:
        """The first sample id of each source in the index of all sources."""
        starts = accumulate((len(index) for index in self.indexes.values()), initial=0)
        return dict(zip(self.indexes, starts, strict=False))


class EpochPlans:
    """Plans of the epochs of a loader.

    source: the chosen samples; a loader over them needs no `where` and no `balance`.
    index: the same samples as one index. weighting, bucketing: of these samples, if any. A weighting
    may be the name of values that the loop records. recording: these values.
    shuffle_buffer: the window, in samples of a lane.
    plan: returns the plan of an epoch. Raises PlanError for sizes that do not fit together, and
    UsageError for an epoch whose weights are not known.
    """

    def __init__(
        self,
        source: Urls | Index | MixedSources,
        options: LoaderOptions,
        recording: Recording | None = None,
    ) -> None:
        """recording: that of a copied loader. Raises UsageError or ShardError."""
        if isinstance(source, MixedSources):
            index = join(list(source.indexes.values()))
        else:
            index = open_shards(source, options.split, may_be_short=options.on_error != "raise")
        self.index, self.weighting = _choose(index, options.where, options.weights, options.balance)
        self.recording = recording or Recording(
            self.index,
            self.weighting.removeprefix(RECORDED) if isinstance(self.weighting, str) else None,
            options.weights,
            options.rank,
            options.world_size,
        )
        self.source = source if isinstance(source, MixedSources) else self.index
        self.bucketing = None if options.buckets is None else bucketing(self.index, options)
        _check_field_names(self.index, options.fields or {})
        self.shuffle_buffer = self._window(options)
        make = self._factory(options)
        self.plan = lru_cache(maxsize=2 if self.recording.name else _KEPT_PLANS)(
            lambda epoch: make(epoch=epoch)
        )

    def _window(self, options: LoaderOptions) -> int:
        """Return the window in samples of a lane.

        By default a rank with one lane has the whole of _WINDOW_BYTES. Lanes that the user fixes
        share them: the window must not depend on the world size, and one rank may have all lanes.
        """
        lanes = options.lanes or options.world_size
        window = options.shuffle_buffer
        if window is None:
            window = int(_WINDOW_BYTES / max(1.0, self._mean_bytes)) // (options.lanes or 1)
            if options.shuffle and window < min(_NARROW_WINDOW, len(self.index) // lanes):
                logger.warning(
                    "the default shuffle buffer mixes little: it holds %d samples of %.1f MB of "
                    "each lane. Give a larger shuffle_buffer, in samples, or fewer lanes.",
                    max(1, window),
                    self._mean_bytes / 1e6,
                )
        widest = _WIDEST_WINDOW * -(-len(self.index) // lanes)
        return max(1, min(window, widest))

    @cached_property
    def _mean_bytes(self) -> float:
        """Mean size of a sample of an epoch in its shard."""
        sizes = self.index.offsets.size
        weights = self.weighting.weights if isinstance(self.weighting, Weighting) else None
        if isinstance(self.source, MixedSources):
            counts = [len(index) for index in self.source.indexes.values()]
            shares = np.array(self.source.shares, np.float64) / np.maximum(1, counts)
            weights = np.repeat(shares, counts)
        is_empty = not len(sizes) or (weights is not None and not weights.any())
        return 0.0 if is_empty else float(np.average(sizes, weights=weights))

    def _factory(self, options: LoaderOptions) -> Callable[..., Order]:
        """Return a function that makes the plan of an epoch."""
        arguments: dict[str, Any] = {
            "seed": options.seed,
            "batch_size": options.batch_size,
            "world_size": options.world_size,
            "lanes": options.lanes,
            "window": self.shuffle_buffer if options.shuffle else 1,
            "shuffle": options.shuffle,
        }
        if isinstance(self.source, MixedSources):
            refuse(
                options.buckets is not None,
                "a mixture has no buckets.",
                "Leave {buckets} out.",
                buckets=...,
            )
            if options.tail != "drop":
                raise UsageError(
                    "a mixture ends with the first source that cannot fill a step.",
                    "Use drop.",
                    option="tail",
                    value=options.tail,
                )
            counts = [index.counts for index in self.source.indexes.values()]
            names, shares = list(self.source.indexes), self.source.shares
            return partial(Mixture, counts=counts, names=names, shares=shares, **arguments)
        arguments |= {"counts": self.index.counts, "tail": options.tail}
        if self.bucketing is not None:
            Plan(**arguments, epoch=0)  # raises PlanError if the sizes do not fit together
            del arguments["batch_size"], arguments["tail"]
            codes, titles, per_lane, _ = self.bucketing
            return partial(Buckets, codes=codes, names=titles, per_lane=per_lane, **arguments)
        if self.weighting is None:
            return partial(Plan, **arguments)
        if isinstance(self.weighting, str):
            return partial(self.recording.plan, arguments)
        return partial(WeightedPlan, **self.weighting._asdict(), **arguments)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """The values that the order depends on, JSON-able, by name."""
        plan = self.plan(0)
        values: dict[str, Any] = {
            "order": ORDER if self.weighting is None else WEIGHTED_ORDER,
            "data": self.index.fingerprint,
            "seed": plan.seed,
            "global_batch": plan.global_batch,
            "lanes": plan.lane_count,
            "shuffle": plan.shuffle,
            "window": plan.window,
            "tail": plan.tail,
        }
        if self.weighting is not None:
            is_recorded = isinstance(self.weighting, str)
            values["weights"] = self.weighting if is_recorded else _fingerprint(*self.weighting)
        if self.bucketing is not None:
            values["buckets"] = _fingerprint(self.bucketing.codes, self.bucketing.per_lane)
        if isinstance(self.source, MixedSources):
            shares = zip(self.source.indexes, self.source.shares, strict=True)
            values |= {"shares": {name: str(share) for name, share in shares}, "turns": TURNS}
        return values

    def check_identity(self, state: Mapping[str, Any]) -> None:
        """Raise UsageError if a loader's state belongs to another order."""
        differences = [
            f"{name} was {state.get(name)!r}, is {value!r}"
            for name, value in self.identity.items()
            if state.get(name) != value
        ]
        for name in ("weights", "buckets"):
            if name in state and name not in self.identity:
                differences.append(f"{name} were given, now there are none")
        refuse(
            differences,
            f"this state belongs to another order: {'; '.join(differences)}.",
            "Use the same values, or start anew.",
        )

    def buffered_megabytes(self, rank: int) -> float:
        """Return how many MB of samples the shuffle buffer of a rank holds on average."""
        plan = self.plan(0)
        return plan.shuffle * plan.max_delay / 2 * self._mean_bytes / 1e6


def _check_field_names(index: Index, fields: Mapping[str, Field]) -> None:
    """Raise UsageError if a field looks for names of which the index has none."""
    for name, field in fields.items():
        if any(member in ("", *index.fields) for member in with_classes(field, index).names):
            continue
        readers = ", ".join(reader_of(label) for label in index.labels)
        hint = f" Their labels are read with {readers}." if readers else ""
        raise UsageError(
            f"field {name!r} looks for {', '.join(field.names)}; these shards hold "
            f"{', '.join(index.fields)}.",
            f"Name one of those.{'' if isinstance(field, Image) else hint}",
        )


def warn_of_class_numbers(index: Index) -> None:
    """Log a warning if raw class numbers mean different classes in different sets of shards."""
    for label, why in index.differing.items():
        if label.is_class and label.entry is None:
            logger.warning(
                "%s. Batches hold its bytes as they were packed. "
                "fields={'label': wt.label('%s')} gives one numbering.",
                why,
                label.field,
            )


def _fingerprint(*arrays: npt.NDArray[Any]) -> str:
    """Return a short hash of the values of arrays, which the order of an epoch depends on."""
    digest = blake2b(digest_size=8)
    for array in arrays:
        digest.update(np.ascontiguousarray(array, array.dtype.newbyteorder("<")).data)
    return digest.hexdigest()


# --- weights --------------------------------------------------------------------------------------


class Weighting(NamedTuple):
    """Weights of the samples of an index, and their strata; see `WeightedPlan`."""

    weights: npt.NDArray[np.float64]
    strata: Ints


def _choose(
    index: Index, where: str | None, weights: Any, balance: str | None
) -> tuple[Index, Weighting | str | None]:
    """Return the samples that the options of a loader choose, and their weights if there are any.

    The options are those of `Loader`; at most one of weights and balance is given. Weights that no
    column of the index holds are the name of recorded values. Raises UsageError for options that do
    not fit the index.
    """
    ids = None if where is None else ids_where(index, where)
    selection = index if ids is None else index.take(ids)
    if balance is not None:
        return selection, _balanced(selection, balance)
    if weights is None or isinstance(weights, Weighting):  # a copy of a loader passes its own
        return selection, weights
    if isinstance(weights, str):
        is_name = can_join(index, weights) and weights.isidentifier()
        if weights.startswith(RECORDED) or (is_name and column_named(index, weights) is None):
            return selection, f"{RECORDED}{weights.removeprefix(RECORDED)}"
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
    complete_values(index, column, "balance")
    strata = group_codes(index, column)
    counts = np.bincount(strata)
    return Weighting((len(strata) / len(counts) / counts)[strata], strata)


def _column(index: Index, name: str) -> npt.NDArray[np.float64]:
    """Return the weights in a column."""
    values = complete_values(index, name, "weights")
    kind = values.type
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        raise UsageError(
            "must be a column of numbers; this one holds other values.",
            option="weights",
            value=name,
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
