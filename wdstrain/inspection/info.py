"""`wt.info`: what some shards hold.

What an index knows is exact and costs no read: samples, sizes of fields, splits, and statistics of
its columns. Shards without an index are scanned, and the result is stored for the next time. Values
and labels without a column are read from some samples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from wdstrain.errors import logger
from wdstrain.inspection.options import InfoOptions
from wdstrain.inspection.result import Result, rows_of, text_of
from wdstrain.inspection.values import (
    described,
    known_labels,
    quantiles,
    with_values,
)
from wdstrain.report.printing import counted, printable
from wdstrain.runtime.options import format_size, takes
from wdstrain.shards.columns import Column
from wdstrain.shards.columns import counted as value_counts
from wdstrain.shards.index import Index, join
from wdstrain.shards.index_io import check_sizes
from wdstrain.shards.kinds import NOT_A_COLUMN, ColumnInfo
from wdstrain.shards.offsets import Ints
from wdstrain.shards.resolve import groups_of, join_once, open_index, recall_or_scan
from wdstrain.storage.addresses import expand
from wdstrain.storage.remote import is_remote

_VALUES, _SHARDS = 200, 8  # samples whose values are looked at, and shards that hold them
_LABELS = 2_000  # samples whose labels are read, if the index has no columns
_VALUE_BYTES = 8 << 20  # of the values of a shard that are read
_BINS = 10  # of a histogram of numbers
_MAX_VALUES = 1000  # different texts that are counted one by one
_ALONE = "For its classes, look at each set alone"


@dataclass(frozen=True)
class FieldSummary:
    """A field: the number of samples that have it, what its values are, and their sizes in bytes.

    what: by some values, as text. kinds: the number of these values of each type. total: of all.
    """

    name: str
    samples: int
    what: str
    kinds: dict[str, int]
    smallest: int
    median: int
    percentile_99: int
    largest: int
    total: int

    def __str__(self) -> str:
        return (
            f"{self.what}\n{counted(self.samples, 'sample')} of {format_size(self.smallest)} to "
            f"{format_size(self.largest)}, median {format_size(self.median)}, 99 % at most "
            f"{format_size(self.percentile_99)}, {format_size(self.total)} in all"
        )


@dataclass(frozen=True)
class ColumnSummary:
    """Statistics of one column, of the `looked_at` samples.

    kind: as of `shards.kinds`. missing: samples looked at that have no value, or none that fits.
    classes: samples of each class, or of each value of a flag, text or multi-label column, of which
    at most 1000 different ones are listed. distinct: number of different values. empty: classes
    without samples. imbalance: samples of the largest class / of the smallest that has any.

    numbers: mean, deviation, smallest, quartiles, largest of the finite numbers; not_finite: how
    many others there are; bins: (low, high, samples) of 10 intervals of equal width.
    """

    name: str
    kind: str
    is_label: bool
    looked_at: int
    missing: int
    classes: dict[str, int]
    distinct: int
    empty: tuple[str, ...]
    imbalance: float | None
    numbers: dict[str, Any] | None

    def __str__(self) -> str:
        shown = {name: value for name, value in (self.numbers or {}).items() if name != "bins"}
        texts = {
            counted(self.looked_at, "sample"): True,
            "; ".join(map(" ".join, rows_of(shown))): self.numbers is not None,
            counted(self.distinct, "different value"): self.numbers is None
            and not (self.is_label or self.kind == "vector"),
            f"the largest class has {self.imbalance or 0:.3g} times the samples of the smallest": (
                (self.imbalance or 0) > 1
            ),
            f"{counted(len(self.empty), 'class')} without samples: {text_of(self.empty)}": (
                bool(self.empty)
            ),
            f"{self.missing} without a valid value": bool(self.missing),
        }
        return "; ".join(text for text, is_said in texts.items() if is_said)

    def bars(self, most: int) -> dict[str, int]:
        """Return samples by class or by interval: at most `most` classes, and the rest as one."""
        if self.numbers is not None:
            return {f"{low:.4g} to {high:.4g}": count for low, high, count in self.numbers["bins"]}
        if len(self.classes) <= most:
            return self.classes
        shown = dict(Counter(self.classes).most_common(most))
        rest = sum(self.classes.values()) - sum(shown.values())
        return {**shown, f"{self.distinct - most} others": rest}


@dataclass(frozen=True, repr=False)
class Info(Result):
    """Contents of some shards. Prints as text; `as_dict()` is JSON-able.

    exact: no label was left unread. bytes: of all shards.
    made: how the set was made, in words; info: the same as the index has it. keys: the first keys. contents: each field. columns: statistics
    of labels, then of other columns. disagreements: labels that cannot be joined, because they
    differ between the sets, by field.
    """

    samples: int
    shards: int
    bytes: int
    splits: dict[str, int]
    fields: tuple[str, ...]
    labels: tuple[ColumnInfo, ...]
    info: dict[str, Any]
    exact: bool
    made: tuple[str, ...]
    keys: tuple[str, ...]
    contents: tuple[FieldSummary, ...]
    columns: tuple[ColumnSummary, ...]
    disagreements: dict[str, str]

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON-able values."""
        return {**super().as_dict(), "labels": [label.row for label in self.labels]}

    def rows(self) -> list[tuple[str, str]]:
        """Return names and values as text."""
        named = {
            "samples": self.samples,
            "shards": f"{self.shards}, {format_size(self.bytes)}",
            "splits": self.splits if any(self.splits) else "",
            "fields": self.fields,
            **{f"label {label.name}": label.summary for label in self.labels},
            **{f"label {place}": why for place, why in self.disagreements.items()},
            "made": "; ".join(self.made),
            "first keys": self.keys,
            **{f"field {part.name}": part for part in self.contents},
            **{f"column {part.name}": part for part in self.columns},
            "not exact": "" if self.exact else "some labels were read; to read all: --exact",
        }
        return rows_of(named)


@takes(InfoOptions)
def info(options: InfoOptions) -> Info:
    """Return the contents of shards: samples, fields, images, labels, splits, provenance.

    Shards with an index cost no read beside those of a few values. The headers of others are
    scanned once, as `wt.open` does; of their labels, at most 2000 are read unless `exact` is given.
    Raises UsageError for addresses without shards, and ShardError or StorageError for a shard that
    is missing or damaged, as `wt.open` does.
    """
    urls = options.urls
    if options.where is not None:
        urls = open_index(urls, note=logger.warning).where(options.where)
    if isinstance(urls, Index):
        parts = [urls]
    else:
        parts = [
            recall_or_scan(shards, logger.warning) if index is None else check_sizes(index)
            for shards, index in groups_of(expand(urls))
        ]
    index = join_once(parts)
    labeled = join([_with_labels(part, options.exact) for part in parts])
    labels = {label.place: label for label in known_labels(index)}
    columns = sorted(labeled.columns, key=lambda column: column.place not in labels)
    return Info(
        samples=len(index),
        shards=len(index.shards),
        bytes=round(index.megabytes * 1e6),
        splits={
            split: sum(shard.samples for shard in index.shards if shard.split == split)
            for split in index.splits
        },
        fields=tuple(map(printable, index.fields)),
        labels=index.labels,
        info={name: value for name, value in index.info.items() if name != "states"},
        exact=len(labeled) == len(index),
        made=tuple(dict.fromkeys(_provenance(part.info) for part in parts)),
        keys=tuple(map(printable, index.keys(np.arange(min(3, len(index)))))),
        contents=_contents(index),
        columns=tuple(
            _summary(column, labels.get(column.place), len(labeled) == len(index))
            for column in columns
            if column.kind != NOT_A_COLUMN
        ),
        disagreements={  # a loader refuses these, too
            printable(label.stored_as): printable(f"{index.disagreement(*label.place)}. {_ALONE}")
            for label in index.differing
        },
    )


# --- reading --------------------------------------------------------------------------------------


def _contents(index: Index) -> tuple[FieldSummary, ...]:
    """Return sizes and contents of each field."""
    sizes = {
        name: size.drop_null().to_numpy() for name, (_, size, _) in index.offsets.extents.items()
    }
    ranges = {  # a field without values is one of other shards
        name: quantiles(own, (0, 0.5, 0.99, 1)) for name, own in sizes.items() if len(own)
    }
    small = [name for name, (_, median, *_) in ranges.items() if median <= _VALUE_BYTES]
    samples = [fields for _, fields in index.read(_looked_at(index), small)]
    return tuple(
        FieldSummary(
            printable(name),
            len(sizes[name]),
            *described(name, [fields[name] for fields in samples if name in fields]),
            *(*extremes, int(sizes[name].sum())),
        )
        for name, extremes in ranges.items()
    )


def _looked_at(index: Index) -> Ints:
    """Return the first samples of a few shards, which a server sends in one answer each. int64[n]

    Samples beyond the first bytes of a shard are left out, but not the first sample.
    """
    filled = np.flatnonzero(index.counts)
    some = filled[np.linspace(0, len(filled) - 1, min(len(filled), _SHARDS)).astype(np.int64)]
    most = _VALUES // max(1, len(some))
    blocks = [np.arange(min(most, index.counts[n])) + index.first[n] for n in some]
    ids = np.concatenate([np.zeros(0, np.int64), *blocks])
    first_bytes = 1 << 20 if any(is_remote(shard.path) for shard in index.shards) else _VALUE_BYTES
    return np.asarray(ids[(index.offsets.stop[ids] <= first_bytes) | np.isin(ids, index.first)])


def _with_labels(index: Index, exact: bool) -> Index:
    """Return the samples whose labels are counted, with columns that are read if there are none."""
    labels = [] if index.columns else [c for c in known_labels(index) if c.has_column]
    return with_values(index, labels, None if exact else _LABELS)


# --- statistics -----------------------------------------------------------------------------------


def _summary(column: Column, label: ColumnInfo | None, exact: bool) -> ColumnSummary:
    """Return the statistics of a column. label: that it holds. exact: of all samples."""
    values = column.stored[:0] if column.kind == "vector" else column.values  # lists: not counted
    present, numbers = values.drop_null(), None
    is_class = label is not None and label.kind == "class"
    if column.kind in ("integer", "number") and not is_class:
        numbers, present = _numbers(np.asarray(present, np.float64)), present[:0]
    counts = Counter({str(value): count for value, count in value_counts(present).items()})
    names = [name for name, _ in counts.most_common(_MAX_VALUES)]
    if label is not None:
        names = list(label.classes) or sorted(counts, key=lambda name: (len(name), name))
    classes = {printable(name): counts[name] for name in names}
    used = [count for count in classes.values() if count]
    return ColumnSummary(
        name=printable(column.name if label is None else label.name),
        kind="class" if is_class else column.kind,
        is_label=label is not None,
        looked_at=len(column),
        missing=column.stored.null_count,
        classes=classes,
        distinct=len(names) if label is not None else len(counts),
        empty=tuple(name for name, count in classes.items() if exact and not count),
        imbalance=max(used) / min(used) if used else None,
        numbers=numbers,
    )


def _numbers(values: Any) -> dict[str, Any] | None:
    """Return the distribution of numbers; see `ColumnSummary`. values: float64[n]"""
    finite = values[np.isfinite(values)]
    if not len(finite):
        return None
    low, *quartiles, high = quantiles(finite, (0, 0.25, 0.5, 0.75, 1))
    bins = list[tuple[float, float, int]]()
    with np.errstate(over="ignore", invalid="ignore"):  # huge numbers
        mean, deviation = float(finite.mean()), float(finite.std())
        if 0 < high - low < np.inf:
            counts, edges = np.histogram(finite, _BINS)
            bins = list(zip(edges[:-1].tolist(), edges[1:].tolist(), counts.tolist(), strict=True))
    return {
        "mean": mean,
        "deviation": deviation,
        "smallest": low,
        "quartiles": tuple(quartiles),
        "largest": high,
        "not_finite": len(values) - len(finite),
        "bins": tuple(bins),
    }


def _provenance(info: Mapping[str, Any]) -> str:
    """Return how a set was made, as its index says: source and options."""
    known = [part for part in map(info.get, ("source", "options")) if isinstance(part, Mapping)]
    facts = [(name, value) for part in known for name, value in part.items()]
    parts = [f"{name} {text_of(value)}" for name, value in facts if value or value is False]
    return "; ".join(parts) if known else "by another program, its index does not say how"
