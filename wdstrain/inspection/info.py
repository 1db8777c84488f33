"""`wt.info`: what some shards hold.

What an index knows is exact and costs no read: samples, sizes of fields, splits, and statistics of
its columns. Shards without an index are scanned, and the result is stored for the next time. Values
and labels without a column are read from some samples. A damaged shard is reported and left out.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from wdstrain.errors import WdstrainError
from wdstrain.inspection.contents import Content, described, quantiles
from wdstrain.inspection.labels import known_labels, listed
from wdstrain.inspection.options import InfoOptions
from wdstrain.report.printing import printable
from wdstrain.runtime.options import format_size, takes
from wdstrain.shards.columns import PLAIN_FIELDS, Column, ColumnBuilder, is_json, typed
from wdstrain.shards.index import Index, join
from wdstrain.shards.index_io import check_size
from wdstrain.shards.kinds import NOT_A_COLUMN, ColumnInfo
from wdstrain.shards.offsets import Ints
from wdstrain.shards.resolve import Note, groups_of, join_once, open_index, recall_or_scan
from wdstrain.storage.addresses import expand
from wdstrain.storage.remote import is_remote

Progress = Callable[[str, int, int], None]  # (work, finished samples, all samples)

BARS = 20  # of a chart of classes; the other classes are added up

_VALUES = 200  # samples whose values are looked at
_LABELS = 2_000  # samples whose labels are read, if the index has no columns
_VALUE_BYTES = 8 << 20  # of the values of a sample that are read
_ALL_BYTES = 64 << 20  # of all values that are read
_SHARDS, _FIRST_BYTES = 8, 1 << 20  # remote shards whose beginning is read
_BINS = 10  # of a histogram of numbers
_MAX_VALUES = 1000  # different texts that are counted one by one


@dataclass(frozen=True)
class Sizes:
    """Sizes of the values of a field, in bytes. total: of all values."""

    smallest: int
    median: int
    percentile_99: int
    largest: int
    total: int


@dataclass(frozen=True)
class FieldSummary:
    """A field: the number of samples that have it, the sizes of its values, and what they are."""

    name: str
    samples: int
    sizes: Sizes
    content: Content

    def __str__(self) -> str:
        sizes = {name: format_size(size) for name, size in asdict(self.sizes).items()}
        return (
            f"{self.content.what}\n{self.samples} samples of {sizes['smallest']} to "
            f"{sizes['largest']}, median {sizes['median']}, 99 % at most {sizes['percentile_99']}, "
            f"{sizes['total']} in all"
        )


@dataclass(frozen=True)
class Numbers:
    """Distribution of the finite numbers of a column.

    quartiles: values that occur. not_finite: NaN or infinite values. bins: (low, high, samples) of
    10 intervals of equal width.
    """

    mean: float
    deviation: float
    smallest: float
    quartiles: tuple[float, ...]
    largest: float
    not_finite: int
    bins: tuple[tuple[float, float, int], ...]

    def __str__(self) -> str:
        bad = f", {self.not_finite} not finite" if self.not_finite else ""
        spread = f"mean {self.mean:.5g}, deviation {self.deviation:.5g}"
        return f"{self.smallest:.5g} to {self.largest:.5g}, {spread}{bad}"


@dataclass(frozen=True)
class ColumnSummary:
    """Statistics of one column, of the `looked_at` samples; exact: these are all samples.

    kind: as of `shards.kinds`. missing: samples looked at that have no value, or none that fits.
    classes: samples of each class, or of each value of a flag, text or multi-label column, of which
    at most 1000 different ones are listed. distinct: number of different values. empty: classes
    without samples. imbalance: samples of the largest class / of the smallest that has any.
    numbers: for numbers and integers.
    """

    name: str
    kind: str
    is_label: bool
    exact: bool
    looked_at: int
    missing: int
    classes: dict[str, int]
    distinct: int
    empty: tuple[str, ...]
    imbalance: float | None
    numbers: Numbers | None

    def __str__(self) -> str:
        """The statistics besides the counts of classes."""
        some = "" if self.exact else ", which were read; to read all: --exact"
        parts = [f"{self.looked_at} samples{some}"]
        if self.numbers is not None:
            parts.append(str(self.numbers))
        elif not self.is_label:
            parts.append(f"{self.distinct} different values")
        if self.imbalance is not None and self.imbalance > 1:
            parts.append(
                f"the largest class has {self.imbalance:.3g} times the samples of the smallest"
            )
        if self.empty:
            parts.append(f"classes without samples ({len(self.empty)}): {listed(self.empty)}")
        if self.missing:
            parts.append(f"{self.missing} without a valid value")
        return "; ".join(parts)

    def bars(self) -> dict[str, int]:
        """Return samples by class or by interval: at most 20 bars, the rest as one."""
        if self.numbers is not None:
            return {f"{low:.4g} to {high:.4g}": count for low, high, count in self.numbers.bins}
        ranked = Counter(self.classes).most_common()
        if len(ranked) <= BARS:
            return self.classes
        rest = sum(count for _, count in ranked[BARS:])
        return {**dict(ranked[:BARS]), f"{self.distinct - BARS} others": rest}


@dataclass(frozen=True)
class Info:
    """Contents of some shards. Prints as text; `as_dict()` is JSON-able.

    exact: no label was left unread. bytes: of all shards. made: how the set was made, in words;
    info: the same as the index has it. ignored: members that belong to no sample, by reason. keys:
    the first keys. contents: each field. columns: statistics of labels, then of other columns.
    disagreements: labels that cannot be joined, because they differ between the sets, by field.
    findings: what is wrong with shards that are left out.
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
    ignored: dict[str, int]
    keys: tuple[str, ...]
    contents: tuple[FieldSummary, ...]
    columns: tuple[ColumnSummary, ...]
    disagreements: dict[str, str] = field(default_factory=dict)
    findings: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong with the shards."""
        return not self.findings

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON-able values."""
        labels = [label.row for label in self.labels]
        text = json.dumps({**asdict(self), "labels": labels, "ok": self.ok})
        return dict(json.loads(text))

    def __repr__(self) -> str:
        rows = [*self.rows(), *(("finding", finding) for finding in self.findings)]
        return "\n".join(f"{name}: {value}" for name, value in rows)

    def rows(self) -> list[tuple[str, str]]:
        """Return (name, value) pairs of everything but the counts of classes."""
        splits = [f"{name or 'without a split'} {count}" for name, count in self.splits.items()]
        hint = "For its classes, look at each set alone"
        rows = {
            "samples": str(self.samples),
            "shards": f"{self.shards}, {format_size(self.bytes)}",
            "splits": ", ".join(splits) if any(self.splits) else "",
            "fields": ", ".join(self.fields),
            **{f"label {label.name}": label.summary for label in self.labels},
            **{f"label {at}": f"{why}. {hint}" for at, why in self.disagreements.items()},
            "made": "\n".join(self.made),
            "ignored members": ", ".join(f"{n} x {reason}" for reason, n in self.ignored.items()),
            "first keys": ", ".join(self.keys),
            **{f"field {part.name}": str(part) for part in self.contents},
            **{f"column {part.name}": str(part) for part in self.columns},
        }
        return [(name, value) for name, value in rows.items() if value]


@takes(InfoOptions)
def info(options: InfoOptions) -> Info:
    """Return the contents of shards: samples, fields, images, labels, splits, provenance.

    Shards with an index cost no read beside those of a few values. The headers of others are
    scanned once, as `wt.open` does; of their labels, at most 2000 are read unless `exact` is given.
    Raises UsageError for addresses without shards, ShardError or StorageError if no shard can be
    read. What is wrong with some of them is in `Info.findings`.
    """
    urls, errors = options.urls, list[WdstrainError]()
    if options.where is not None:
        urls = open_index(urls, note=options.note).where(options.where)
    parts = [urls] if isinstance(urls, Index) else _parts(expand(urls), options.note, errors)
    index = join_once(parts)
    if not index.shards and errors:
        others = f" None of the other {len(errors) - 1} can be read either." * (len(errors) > 1)
        raise type(errors[0])(f"{errors[0]}{others}")
    contents = _contents(index, errors)
    counted = join([_with_columns(part, options, errors) for part in parts])
    splits, ignored = dict.fromkeys(index.splits, 0), Counter[str]()
    for shard in index.shards:
        splits[shard.split] += shard.samples
    for part in parts:
        ignored.update(_mapping(part.info.get("ignored")))
    return Info(
        samples=len(index),
        shards=len(index.shards),
        bytes=round(index.megabytes * 1e6),
        splits=splits,
        fields=tuple(map(printable, index.fields)),
        labels=index.labels,
        info={name: value for name, value in index.info.items() if name != "states"},
        exact=len(counted) == len(index),
        made=tuple(dict.fromkeys(_provenance(part.info) for part in parts)),
        ignored=dict(ignored),
        keys=tuple(map(printable, index.keys(np.arange(min(3, len(index)))))),
        contents=contents,
        columns=_columns(index, counted),
        disagreements=_disagreements(index),
        findings=tuple(dict.fromkeys(printable(str(error)) for error in errors)),
    )


# --- reading --------------------------------------------------------------------------------------


def _parts(paths: list[str], note: Note | None, errors: list[WdstrainError]) -> list[Index]:
    """Return the index of the intact shards of each folder. errors: receives those of others."""
    parts = []
    for shards, index in groups_of(paths):
        if index is None:
            parts.append(recall_or_scan(shards, note, errors))
            continue
        good = []
        for number, shard in enumerate(index.shards):
            try:
                check_size(shard)
                good.append(number)
            except WdstrainError as error:
                errors.append(error)
        parts.append(index.pick(good))
    return parts


def _sample_ids(index: Index, names: Sequence[str], most: int) -> Ints:
    """Return ids of at most `most` samples whose values of these fields are read. int64[n]

    They are spread evenly; on servers, over the beginnings of 8 shards, a request for each.
    """
    sizes = np.zeros(len(index), np.int64)
    for name in names:
        sizes += np.asarray(index.offsets.extents[name][1].fill_null(0), np.int64)
    ids = np.flatnonzero(sizes <= _VALUE_BYTES)
    if any(is_remote(shard.path) for shard in index.shards):
        shard = index.shard_of(ids)
        filled = np.unique(shard)
        is_near = index.offsets.stop[ids] <= _FIRST_BYTES
        is_near |= np.diff(shard, prepend=-1) != 0
        ids = ids[is_near & np.isin(shard, filled[_evenly(len(filled), _SHARDS)])]
    fitting = _ALL_BYTES // max(1, int(sizes[ids].mean())) if len(ids) else 0
    return ids[_evenly(len(ids), min(most, max(1, fitting)))]


def _evenly(count: int, most: int) -> Ints:
    """Return at most `most` of the numbers below `count`, ascending, evenly spread."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(np.int64))


def _read(
    index: Index, ids: Ints, names: Sequence[str], errors: list[WdstrainError]
) -> Iterator[dict[str, bytes]]:
    """Yield {field: bytes} of samples. errors: receives what is wrong; later values are missing."""
    shards = index.shard_of(ids)
    for number in np.unique(shards).tolist():
        mine, values = ids[shards == number], dict[int, dict[str, bytes]]()
        try:
            for i, fields in index.read(mine, names):
                values[i] = fields
        except WdstrainError as error:
            errors.append(error)
        for i in mine.tolist():
            yield values.get(i, {})


def _contents(index: Index, errors: list[WdstrainError]) -> tuple[FieldSummary, ...]:
    """Return sizes and contents of each field."""
    sizes = {name: index.offsets.extents[name][1].drop_null().to_numpy() for name in index.fields}
    ranges = {  # a field without values is one of other shards
        name: Sizes(*[*quantiles(size, (0, 0.5, 0.99, 1)), int(size.sum())])
        for name, size in sizes.items()
        if len(size)
    }
    names = [name for name, of in ranges.items() if of.median <= _VALUE_BYTES]
    values: dict[str, list[bytes]] = {name: [] for name in ranges}
    for fields in _read(index, _sample_ids(index, names, _VALUES), names, errors):
        for name, data in fields.items():
            values[name].append(data)
    return tuple(
        FieldSummary(printable(name), len(sizes[name]), of, described(name, values[name]))
        for name, of in ranges.items()
    )


def _with_columns(index: Index, options: InfoOptions, errors: list[WdstrainError]) -> Index:
    """Return the samples whose labels are counted, with columns that are read if there are none."""
    names = [name for name in index.fields if _may_hold_labels(index, name)]
    if index.columns or not names:
        return index
    most = len(index) if options.exact else _LABELS
    ids = np.arange(most) if options.exact else _sample_ids(index, names, most)
    counted, builder = index.take(ids), ColumnBuilder()
    for number, fields in enumerate(_read(index, ids, names, errors)):
        builder.add(fields.items())
        if options.progress is not None and not number % 100:
            options.progress("reading labels", number, len(ids))
    labels = () if index.differing else index.labels  # else numbers mean different classes
    return counted.with_columns(typed(builder.finish(), labels))


def _may_hold_labels(index: Index, name: str) -> bool:
    is_array = name.endswith("npy") and (pc.max(index.offsets.extents[name][1]).as_py() or 0) < 300
    is_label = any(label.field == name for label in index.labels)
    return is_json(name) or name in PLAIN_FIELDS or is_array or is_label


# --- statistics -----------------------------------------------------------------------------------


def _columns(index: Index, counted: Index) -> tuple[ColumnSummary, ...]:
    """Return statistics of labels, then of the other columns."""
    labels = {label.place: label for label in known_labels(index)}
    order = {place: number for number, place in enumerate(labels)}
    columns = sorted(counted.columns, key=lambda column: order.get(column.place, len(order)))
    return tuple(
        _summary(column, labels.get(column.place), len(counted) == len(index))
        for column in columns
        if column.kind != NOT_A_COLUMN
    )


def _summary(column: Column, label: ColumnInfo | None, exact: bool) -> ColumnSummary:
    """Return the statistics of a column. label: that it holds. exact: of all samples."""
    present, numbers = column.values.drop_null(), None
    if pa.types.is_list(present.type):
        present = present.flatten()
    is_class = label is not None and label.kind == "class"
    if column.kind in ("integer", "number") and not is_class:
        numbers, present = _numbers(np.asarray(present, np.float64)), present[:0]
    pairs = pc.value_counts(present).to_pylist()
    counts = Counter({str(pair["values"]): int(pair["counts"]) for pair in pairs})
    names = [name for name, _ in counts.most_common(_MAX_VALUES)]
    if label is not None:
        names = list(label.classes) or sorted(counts, key=lambda name: (len(name), name))
    classes = {printable(name): counts[name] for name in names}
    used = [count for count in classes.values() if count]
    return ColumnSummary(
        name=printable(column.name if label is None else label.name),
        kind="class" if is_class else column.kind,
        is_label=label is not None,
        exact=exact,
        looked_at=len(column),
        missing=column.values.null_count,
        classes=classes,
        distinct=len(names) if label is not None else len(counts),
        empty=tuple(name for name, count in classes.items() if exact and not count),
        imbalance=max(used) / min(used) if used else None,
        numbers=numbers,
    )


def _numbers(values: Any) -> Numbers | None:
    """Return the distribution of numbers. values: float64[n]"""
    finite = values[np.isfinite(values)]
    if not len(finite):
        return None
    low, *quartiles, high = quantiles(finite, (0, 0.25, 0.5, 0.75, 1))
    with np.errstate(over="ignore", invalid="ignore"):  # huge numbers
        mean, deviation = float(finite.mean()), float(finite.std())
        bins = list[tuple[float, float, int]]()
        if 0 < high - low < np.inf:
            counts, edges = np.histogram(finite, _BINS)
            bins = list(zip(edges[:-1].tolist(), edges[1:].tolist(), counts.tolist(), strict=True))
    bad = len(values) - len(finite)
    return Numbers(mean, deviation, low, tuple(quartiles), high, bad, tuple(bins))


# --- the set as a whole ---------------------------------------------------------------------------


def _disagreements(index: Index) -> dict[str, str]:
    """Return the reasons that labels cannot be joined, by place: a loader refuses these too."""
    places = [label.place for label in index.differing]
    reasons = {"/".join(filter(None, place)): index.disagreement(*place) for place in places}
    return {printable(place): printable(reason) for place, reason in reasons.items() if reason}


def _provenance(info: Mapping[str, Any]) -> str:
    """Return how a set was made, as its index says: source, options, counts."""
    source = dict(_mapping(info.get("source")))
    if not source:
        return "by another program, its index does not say how"
    kind, options = source.pop("kind", None), _mapping(info.get("options"))
    counts = {name: info.get(name) for name in ("listed", "skipped", "renamed")}
    facts = {**source, **options, **counts}
    parts = [f"{name} {_text(value)}" for name, value in facts.items() if value or value is False]
    return "; ".join([f"from {kind}", *parts])


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        value = [f"{name}={item}" for name, item in value.items()]
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
