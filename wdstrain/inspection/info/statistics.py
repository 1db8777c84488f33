"""Statistics of label columns: samples of each class, and the distribution of numbers.

A column of the index gives exact statistics. A column that was read from some of the samples gives
estimates: each of its rows has a weight, the number of samples that it stands for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from wdstrain.inspection.info.contents import Range, range_of
from wdstrain.report.printing import printable
from wdstrain.shards.columns import Column
from wdstrain.shards.kinds import ColumnInfo

BARS = 20  # of a chart of classes; the other classes are added up
_BINS = 10  # of a histogram of numbers
_MAX_VALUES = 1000  # different texts that are counted one by one
_SAMPLES_PER_CLASS = 20  # on average, from which on an estimated imbalance is reported
_COMMON = 0.05  # share of a number from which on it is reported

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Numbers:
    """Distribution of the finite numbers of a column.

    quartiles: values that occur. commonest: (value, its share). not_finite: NaN or infinite values.
    bins: (low, high, samples) of 10 intervals of equal width.
    """

    mean: float
    deviation: float
    smallest: float
    quartiles: tuple[float, float, float]
    largest: float
    commonest: tuple[float, float]
    not_finite: int
    bins: tuple[tuple[float, float, int], ...]


@dataclass(frozen=True)
class ColumnSummary:
    """Statistics of one column.

    kind: as of `shards.columns`. exact: all samples were counted; else they are estimated from
    `looked_at` samples. missing: samples looked at that have no value, or none that fits.
    classes: samples of each class, or of each value of a flag, text or multi-label column, of which
    at most 1000 different ones are listed. distinct: number of different values. empty: classes
    without samples. imbalance: samples of the largest class / of the smallest that has any.
    per_sample: classes of a sample, for multi-labels. numbers: for numbers and integers.
    """

    name: str
    kind: str
    is_label: bool
    exact: bool
    looked_at: int
    missing: int
    classes: dict[str, int] = field(default_factory=dict)
    distinct: int = 0
    empty: tuple[str, ...] = ()
    imbalance: float | None = None
    per_sample: Range | None = None
    numbers: Numbers | None = None

    def notes(self) -> list[str]:
        """Return remarks besides counts and numbers."""
        notes = [f"{'' if self.exact else 'estimated from '}{plural(self.looked_at, 'sample')}"]
        is_sure = self.exact or self.looked_at >= _SAMPLES_PER_CLASS * len(self.classes)
        if self.is_label and self.imbalance is not None and self.imbalance > 1 and is_sure:
            ratio = f"{self.imbalance:.3g}"
            notes.append(f"the largest class has {ratio} times the samples of the smallest")
        if self.empty:
            names = ", ".join(self.empty[:5]) + (", ..." if len(self.empty) > 5 else "")
            notes.append(f"{plural(len(self.empty), 'class')} without samples: {names}")
        if self.per_sample is not None:
            low, median, high = map(int, self.per_sample)
            notes.append(f"{low} to {high} classes per sample, median {median}")
        if self.missing:
            notes.append(f"{self.missing} without a valid value")
        return notes

    def bars(self) -> dict[str, int]:
        """Return samples by class or by interval: at most 20 bars, the rest as one."""
        if self.numbers is not None:
            return {f"{low:.4g} to {high:.4g}": count for low, high, count in self.numbers.bins}
        if len(self.classes) <= BARS:
            return self.classes
        ranked = sorted(self.classes.items(), key=lambda item: -item[1])
        rest = sum(count for _, count in ranked[BARS:])
        return {**dict(ranked[:BARS]), f"{self.distinct - BARS} others": rest}

    def facts(self) -> list[tuple[str, str]]:
        """Return (name, value) pairs for a column of numbers."""
        if self.numbers is None:
            return []
        n = self.numbers
        rows = [
            ("mean", f"{n.mean:.5g}, standard deviation {n.deviation:.5g}"),
            ("range", f"{n.smallest:.5g} to {n.largest:.5g}"),
            ("quartiles", ", ".join(f"{value:.5g}" for value in n.quartiles)),
        ]
        value, share = n.commonest
        rows += [("most common", f"{value:.5g} ({share:.0%})")] * (share >= _COMMON)
        return rows + [("not finite", str(n.not_finite))] * (n.not_finite > 0)

    def line(self) -> str:
        """Return the statistics as a short line."""
        about = "" if self.exact else "~"
        if self.numbers is not None:
            n = self.numbers
            return f"{n.smallest:.5g} to {n.largest:.5g}, mean {n.mean:.5g}"
        ranked = sorted(self.classes.items(), key=lambda item: -item[1])
        shown = [f"{name[:24]} {about}{count}" for name, count in ranked[:3]]
        if self.distinct > 3 and ranked[0][1] == 1:
            return f"{self.distinct} different"
        if self.distinct <= 3:
            return ", ".join(shown) or "no values"
        return f"{self.distinct} different; most common: {', '.join(shown)}"


def summarize(
    column: Column, label: ColumnInfo | None, weights: Floats | None = None
) -> ColumnSummary:
    """Return the statistics of a column. label: that it holds, typed as such.

    weights: samples that each row stands for; None: the column has a row for every sample.
    """
    values, exact = column.values, weights is None
    each = np.ones(len(column)) if weights is None else weights
    valid = np.asarray(values.is_valid())
    present = values.drop_null()
    numbers, counts, per_sample = None, dict[str, float](), None
    if column.kind in ("integer", "number"):
        numbers = _numbers(np.asarray(present, np.float64), each[valid])
    elif pa.types.is_list(values.type):
        rows = np.asarray(pc.list_parent_indices(values))
        counts = _counts(values.flatten(), each[rows])
        sizes = pc.list_value_length(present)
        per_sample = range_of(sizes.to_pylist())
    else:
        counts = _counts(present, each[valid])
    distinct = len(counts)
    if label is not None and label.classes:
        counts = {name: counts.get(name, 0.0) for name in label.classes}
    elif label is not None:  # class numbers without names
        counts = dict(sorted(counts.items(), key=_by_number))
    elif distinct > _MAX_VALUES:
        counts = dict(sorted(counts.items(), key=lambda item: -item[1])[:_MAX_VALUES])
    classes = {printable(name): round(count) for name, count in counts.items()}
    used = [count for count in classes.values() if count]
    return ColumnSummary(
        name=printable(label.name if label is not None else column.name),
        kind=column.kind,
        is_label=label is not None,
        exact=exact,
        looked_at=len(column),
        missing=int(len(column) - valid.sum()),
        classes=classes,
        distinct=len(classes) if label is not None else distinct,
        empty=tuple(name for name, count in classes.items() if not count) if exact else (),
        imbalance=max(used) / min(used) if used else None,
        per_sample=per_sample,
        numbers=numbers,
    )


def plural(count: int, word: str) -> str:
    """Return a count with its noun."""
    return f"{count} {word}{'' if count == 1 else 'es' if word.endswith('s') else 's'}"


def weighted_quantiles(values: Any, weights: Floats, shares: Sequence[float]) -> list[Any]:
    """Return, for each share, the smallest value that so much of the weight does not exceed."""
    order = np.argsort(values, kind="stable")
    below = np.cumsum(weights[order])
    places = np.searchsorted(below, below[-1] * np.array(shares) - 1e-9)
    return [values[order[place]].item() for place in places]


def _by_number(item: tuple[str, float]) -> tuple[bool, int, str]:
    name = item[0]
    return not name.isdecimal(), int(name) if name.isdecimal() else 0, name


def _counts(values: pa.Array, weights: Floats) -> dict[str, float]:
    """Return the weight of each different value, by its text."""
    if not pa.types.is_dictionary(values.type):
        values = values.dictionary_encode()
    sums = np.bincount(
        np.asarray(values.indices), weights=weights, minlength=len(values.dictionary)
    )
    names = map(str, values.dictionary.to_pylist())
    return {name: float(total) for name, total in zip(names, sums, strict=True) if total}


def _numbers(values: Floats, weights: Floats) -> Numbers | None:
    is_finite = np.isfinite(values)
    finite, weights = values[is_finite], weights[is_finite]
    if not len(finite):
        return None
    with np.errstate(over="ignore", invalid="ignore"):  # huge numbers
        mean = float(np.average(finite, weights=weights))
        deviation = float(np.average((finite - mean) ** 2, weights=weights) ** 0.5)
    different, where = np.unique(finite, return_inverse=True)
    totals = np.bincount(where.reshape(-1), weights=weights)
    low, *quartiles, high = weighted_quantiles(finite, weights, (0, 0.25, 0.5, 0.75, 1))
    bins: list[tuple[float, float, int]] = []
    if 0 < high - low < np.inf:
        counts, edges = np.histogram(finite, _BINS, weights=weights)
        ends = edges.tolist()
        bins = list(zip(ends[:-1], ends[1:], np.rint(counts).astype(int).tolist(), strict=True))
    return Numbers(
        mean=mean,
        deviation=deviation,
        smallest=low,
        quartiles=(quartiles[0], quartiles[1], quartiles[2]),
        largest=high,
        commonest=(float(different[totals.argmax()]), float(totals.max() / totals.sum())),
        not_finite=len(values) - len(finite),
        bins=tuple(bins),
    )
