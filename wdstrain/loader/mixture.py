"""Loaders over several sets of shards: each step has samples of all of them."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from itertools import accumulate
from math import inf
from typing import Any

from wdstrain.decode.decoder import Transform
from wdstrain.decode.fields import Field
from wdstrain.errors import UsageError
from wdstrain.loader.loader import Loader
from wdstrain.loader.planning import MixedSources
from wdstrain.runtime.options import is_number, refuse
from wdstrain.shards.index import Index
from wdstrain.shards.resolve import open_shards
from wdstrain.storage.addresses import Urls

_SHARE_UNITS = 65536  # shares are multiples of 1/65536, so that arithmetic with them is exact


def mix(
    sources: Mapping[str, Urls | Index],
    fields: Mapping[str, Field] | None = None,
    transform: Transform | None = None,
    *,
    weights: Mapping[str, float] | None = None,
    **options: Any,
) -> Loader:
    """Return a loader over several sets of shards; batches name each sample's set in "__source__".

    weights: relative share of each set; default: their sizes. options: keywords of `Loader`, except
    `balance`; `tail` must be "drop".
    At every step each set has delivered its share within one sample per lane. The epoch ends before
    the first step that a set cannot fill, so no sample occurs twice.
    Raises UsageError for weights that do not fit the sets.
    """
    refuse(
        not (sources and isinstance(sources, Mapping)),
        f"sources is {type(sources).__name__ if sources else 'empty'}: must name a set at least.",
        "Give for example {'a': 'shards/a', 'b': 'shards/b'}.",
    )
    refuse(
        options.get("balance") is not None,
        "balance was given for a mixture, whose sets have weights.",
        "Leave it out.",
    )
    where, split = options.pop("where", None), options.pop("split", None)
    may_be_short = options.get("on_error", "raise") != "raise"
    indexes = {
        name: open_shards(urls, split, may_be_short=may_be_short) for name, urls in sources.items()
    }
    if where is not None:
        indexes = {name: index.where(where) for name, index in indexes.items()}
    if weights is None:
        weights = {name: len(index) for name, index in indexes.items()}
    if not (
        isinstance(weights, Mapping)
        and set(weights) == set(indexes)
        and all(is_number(weight) and 0 < weight < inf for weight in weights.values())
    ):
        raise UsageError(
            f"must have a finite number above 0 for each of the sources {', '.join(indexes)}, "
            "and no other.",
            option="weights",
            value=weights,
        )
    shares = _shares([float(weights[name]) for name in indexes])
    return Loader(MixedSources(indexes, shares), fields, transform, **options)


def _shares(weights: list[float]) -> tuple[Fraction, ...]:
    """Return the weights as shares that add up to 1. Raises UsageError if one would be 0."""
    total = sum(Fraction(weight) for weight in weights)
    edges = [
        Fraction(round(_SHARE_UNITS * edge / total), _SHARE_UNITS)
        for edge in accumulate(map(Fraction, weights))
    ]
    shares = tuple(high - low for low, high in zip([Fraction(0), *edges], edges, strict=False))
    if min(shares) <= 0:
        raise UsageError(
            f"each must be at least 1/{_SHARE_UNITS} of their sum.",
            "Raise the smallest, or leave that source out.",
            option="weights",
            value=weights,
        )
    return shares
