"""A loader over several sources: the order of a mixture in the place of a plan's, everything else as it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import partial
from itertools import accumulate
from math import inf
from numbers import Integral
from typing import Any

from wdstrain.decode.fields import Field
from wdstrain.decode.settings import Transform
from wdstrain.errors import UsageError
from wdstrain.loader.loader import Loader, open_shards
from wdstrain.order.mixture import TURNS, Mixture
from wdstrain.order.plan import Order, is_number
from wdstrain.shards.index import Index, join
from wdstrain.storage.addresses import Urls


class MixedLoader(Loader):
    """A loader over several sources with fixed shares; see `mix`."""

    def __init__(
        self,
        sources: Mapping[str, Index],
        shares: tuple[Fraction, ...],
        *words: Any,
        **options: Any,
    ) -> None:
        self._indexes, self._shares = dict(sources), shares
        firsts = [0, *accumulate(len(index) for index in sources.values())]
        self._sources = dict(zip(sources, firsts, strict=False))
        super().__init__(join(list(sources.values())), *words, **options)

    def _planner(self, **sizes: Any) -> Callable[..., Order]:
        tail = sizes.pop("tail")
        if tail != "drop":
            raise UsageError(
                f'tail="{tail}": a mixture ends with the first source that cannot fill a step. Use tail="drop".'
            )
        counts = [index.counts for index in self._indexes.values()]
        return partial(
            Mixture, counts=counts, names=list(self._indexes), shares=self._shares, **sizes
        )

    @property
    def _sets(self) -> tuple[Any, ...]:
        return self._indexes, self._shares

    def _identity(self) -> dict[str, Any]:
        shares = {name: str(share) for name, share in zip(self._indexes, self._shares, strict=True)}
        return {**super()._identity(), "shares": shares, "turns": TURNS}


def mix(
    sources: Mapping[str, Urls | Index],
    fields: Mapping[str, Field] | None = None,
    transform: Transform | None = None,
    *,
    weights: Mapping[str, float] | None = None,
    **options: Any,
) -> Loader:
    """A loader over several sets of shards; each batch says where its samples are from, as "__source__".

    weights: samples of each source relative to the others; default their sizes. At any step each source has given its
    share within one sample per lane. The epoch ends before the first step that a source cannot fill; nothing is repeated
    in it. Everything else is as in `Loader`, `options` its keywords; tail is "drop".
    Raises UsageError for weights that do not fit the sources.
    """
    if not sources:
        raise UsageError(
            "there are no sources to mix. Give for example {'a': 'shards/a', 'b': 'shards/b'}."
        )
    if options.get("balance") is not None:
        raise UsageError("balance: a mixture takes from each source by its weight. Leave it away.")
    cut = options.get("on_bad", "raise") != "raise"
    indexes = {
        name: urls if isinstance(urls, Index) else open_shards(urls, cut=cut)
        for name, urls in sources.items()
    }
    where = options.pop("where", None)
    if where is not None:
        indexes = {name: index.where(where) for name, index in indexes.items()}
    given = {name: len(index) for name, index in indexes.items()} if weights is None else weights
    numbers = isinstance(given, Mapping) and all(
        is_number(one) and 0 < one < inf for one in given.values()
    )
    if not numbers or set(given) != set(indexes):
        raise UsageError(
            f"weights={given!r}: each of the sources {', '.join(indexes)} needs one above 0, below infinity, and no other."
        )
    return MixedLoader(
        indexes, _shares([_number(given[name]) for name in indexes]), fields, transform, **options
    )


def _number(weight: Any) -> int | float:
    """Return a weight of any type of numbers as Python's own: others overflow."""
    return int(weight) if isinstance(weight, Integral) else float(weight)


def _shares(weights: list[float]) -> tuple[Fraction, ...]:
    """Weights as fractions of 1 in steps of 1/65536, so that all arithmetic with them is exact."""
    total = sum(Fraction(weight) for weight in weights)
    edges = [
        Fraction(round(65536 * edge / total), 65536) for edge in accumulate(map(Fraction, weights))
    ]
    shares = tuple(high - low for low, high in zip([Fraction(0), *edges], edges, strict=False))
    if min(shares) <= 0:
        raise UsageError(
            f"weights={weights}: the smallest is below 1/65536 of all. Raise it, or leave that source away."
        )
    return shares
