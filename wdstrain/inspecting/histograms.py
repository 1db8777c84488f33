"""What the labels of a set come to: samples by class, or the spread of a number.

Said by the index where its conversion counted, else told from the labels that were read, scaled to the whole where those are a
part; then a class that was not seen may still be there, and is not called empty.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from wdstrain.errors import WdstrainError
from wdstrain.inspecting.dimensions import Range, of_all
from wdstrain.report.printing import printable
from wdstrain.shards.index import Index, Label
from wdstrain.shards.labels import class_names, complete_column, recorded_counts
from wdstrain.shards.values import scalar

SHOWN = 20  # classes of a histogram
_TELLING = 20  # samples of each class that are looked at on average, for a word on which is larger
_COMMON = 0.05  # share of a value from which on it is worth a word


@dataclass(frozen=True)
class Numbers:
    """The spread of a number: of those that are finite, and how many are not numbers (NaN) or infinite.

    commonest: the value that most of them have, and the share of them that do.
    """

    mean: float
    deviation: float
    smallest: float
    quartiles: tuple[float, float, float]
    largest: float
    commonest: tuple[float, float]
    not_finite: int


@dataclass(frozen=True)
class Histogram:
    """What a label comes to. exact: every label was counted; else `classes` is scaled from the `looked_at` that were.

    classes: samples of each, in the order of the classes, or of their numbers where nobody names them. imbalance: the largest
    over the smallest that has samples. empty: classes without a sample. per_sample: labels of a sample that may have several.
    unknown: labels that are none of the classes; unreadable: labels that say nothing; without: samples that have none.
    """

    label: str
    kind: str
    exact: bool
    looked_at: int
    classes: dict[str, int] = field(default_factory=dict)
    imbalance: float | None = None
    empty: tuple[str, ...] = ()
    per_sample: Range | None = None
    numbers: Numbers | None = None
    unknown: int = 0
    unreadable: int = 0
    without: int = 0


def recorded(index: Index, label: Label) -> Histogram | None:
    """Return the histogram of all labels from the index, without reading any; None if it has none."""
    column, counts = complete_column(index, label), recorded_counts(index, label)
    if column is not None and label.kind == "number":
        bars = _classes(label, {}, len(index), True)
        return replace(bars, numbers=_numbers(np.asarray(column.values)))
    if not counts:
        return None
    bars = _classes(label, counts, len(index), True)
    if column is None or label.kind != "multi":
        return bars
    return replace(bars, per_sample=of_all(pc.list_value_length(column.values).to_pylist()))


class Counting:
    """Counts the labels of some samples, one after another."""

    def __init__(self, label: Label) -> None:
        self._label, self._known = label, frozenset(label.classes)
        self._counts: defaultdict[str, float] = defaultdict(float)
        self._numbers: list[float] = []
        self._many: list[int] = []
        self._seen = self._unreadable = self._unknown = 0

    def add(self, data: bytes | memoryview, weight: float, label: Label) -> None:
        """The bytes of the field in which the label of a sample lies. weight: samples that it stands for.

        label: with its classes as the shard of the sample numbers them.
        """
        self._seen += 1
        try:
            value = scalar(memoryview(data), label.column)
            if label.kind == "number":
                self._numbers.append(float(value))
                return
            names = class_names(value, label.column, label.classes)
        except (WdstrainError, ValueError, TypeError, OverflowError, RecursionError):
            self._unreadable += 1
            return
        self._many.append(len(names))
        for name in names:
            if self._known and name not in self._known:
                self._unknown += 1
            else:
                self._counts[name] += weight

    def histogram(self, looked_at: int, *, exact: bool) -> Histogram:
        """What they come to, by so many samples, some of which may have none."""
        return replace(
            _classes(self._label, self._counts, looked_at, exact),
            per_sample=of_all(self._many) if self._label.kind == "multi" else None,
            numbers=_numbers(self._numbers),
            unknown=self._unknown,
            unreadable=self._unreadable,
            without=looked_at - self._seen,
        )


def notes(one: Histogram) -> list[str]:
    """What is to be said of a histogram beside its bars."""
    found = [f"{'all' if one.exact else 'about, by'} {plural(one.looked_at, 'sample')}"]
    if (
        one.imbalance is not None
        and one.imbalance > 1
        and (one.exact or one.looked_at >= _TELLING * len(one.classes))
    ):
        found.append(f"the largest class has {one.imbalance:.3g} times the samples of the smallest")
    if one.empty:
        some = ", ".join(one.empty[:5]) + (", ..." if len(one.empty) > 5 else "")
        found.append(f"{len(one.empty)} without a sample: {some}")
    if one.per_sample is not None:
        low, middle, high = map(int, one.per_sample)
        found.append(f"{low} to {high} classes a sample, median {middle}")
    wrong = {
        "of none of the classes": one.unknown,
        "cannot be read": one.unreadable,
        "samples have none": one.without,
    }
    return found + [f"{count} {what}" for what, count in wrong.items() if count]


def shown(one: Histogram) -> dict[str, int]:
    """The classes of a histogram that are shown: all in their order, or the largest and the sum of the rest."""
    if len(one.classes) <= SHOWN:
        return one.classes
    ranked = sorted(one.classes.items(), key=lambda item: -item[1])
    rest = ranked[SHOWN:]
    return {**dict(ranked[:SHOWN]), f"{len(rest)} others": sum(count for _, count in rest)}


def spread(one: Histogram) -> list[tuple[str, str]]:
    """Names and values of a number."""
    if one.numbers is None:
        return [("values", "none that is a number")]
    found = one.numbers
    rows = [
        ("mean", f"{found.mean:.5g}, deviation {found.deviation:.5g}"),
        ("smallest", f"{found.smallest:.5g}"),
    ]
    rows.append(("quartiles", ", ".join(f"{value:.5g}" for value in found.quartiles)))
    rows.append(("largest", f"{found.largest:.5g}"))
    value, share = found.commonest
    rows += [("commonest", f"{value:.5g}, {share:.0%} of all")] * (share >= _COMMON)
    return rows + [("not finite", str(found.not_finite))] * (found.not_finite > 0)


def plural(count: int, word: str) -> str:
    """A number of things."""
    return f"{count} {word}{'' if count == 1 else 'es' if word.endswith('s') else 's'}"


# --- parts -----------------------------------------------------------------------------------------------------------


def _classes(label: Label, counts: Mapping[str, float], looked_at: int, exact: bool) -> Histogram:
    order = label.classes or sorted(
        counts, key=lambda name: (not name.isdecimal(), int(name) if name.isdecimal() else 0, name)
    )
    classes = {printable(name): round(counts.get(name, 0)) for name in order}
    some = [count for count in classes.values() if count]
    return Histogram(
        label=printable(label.name),
        kind=label.kind,
        exact=exact,
        looked_at=looked_at,
        classes=classes,
        imbalance=max(some) / min(some) if some else None,
        empty=tuple(name for name, count in classes.items() if not count) if exact else (),
    )


def _numbers(values: list[float] | npt.NDArray[np.float64]) -> Numbers | None:
    finite = np.array(values, np.float64)[np.isfinite(np.array(values, np.float64))]
    if not len(finite):
        return None
    low, first, middle, third, high = map(float, np.quantile(finite, (0, 0.25, 0.5, 0.75, 1)))
    found, counts = np.unique(finite, return_counts=True)
    commonest = float(found[counts.argmax()]), float(counts.max() / len(finite))
    lost = len(values) - len(finite)
    return Numbers(
        float(finite.mean()),
        float(finite.std()),
        low,
        (first, middle, third),
        high,
        commonest,
        lost,
    )
