"""`wt.info`: what some shards hold.

What an index knows is exact and costs no read: samples, sizes of fields, splits, and statistics of
its columns. Shards without an index are scanned, and the result is stored for the next time. Values
and labels without a column are read from some samples. A damaged shard is reported and left out.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from wdstrain.errors import WdstrainError
from wdstrain.inspection.contents import Content, Range, described, range_of
from wdstrain.inspection.labels import known_labels
from wdstrain.inspection.options import InfoOptions
from wdstrain.report.printing import counted, printable
from wdstrain.runtime.options import format_size, takes
from wdstrain.shards.columns import PLAIN_FIELDS, Column, ColumnBuilder, is_json, typed
from wdstrain.shards.header_scans import Note, recall_or_scan
from wdstrain.shards.index import Index, join
from wdstrain.shards.index_io import check_size
from wdstrain.shards.kinds import NOT_A_COLUMN, ColumnInfo
from wdstrain.shards.offsets import Ints
from wdstrain.shards.resolve import groups_of, join_once, open_index
from wdstrain.storage.addresses import expand
from wdstrain.storage.remote import is_remote

Progress = Callable[[str, int, int], None]  # (work, finished samples, all samples)

FIELD_HEAD = ("field", "samples", "smallest", "median", "99 %", "largest", "total")
BARS = 20  # of a chart of classes; the other classes are added up

_VALUES = 200  # samples whose values are looked at
_LABELS = 2_000  # samples whose labels are read, if the index has no columns
_VALUE_BYTES = 8 << 20  # of the values of a sample that are read
_ALL_BYTES = 64 << 20  # of all values that are read
_SHARDS, _FIRST_BYTES = 8, 1 << 20  # remote shards whose beginning is read
_BINS = 10  # of a histogram of numbers
_MAX_VALUES = 1000  # different texts that are counted one by one
_COMMON = 0.05  # share of a number from which on it is reported
_DEFAULTS = {"check": "magic", "max_shard_size": 256_000_000, "on_error": "raise", "shuffle": True}


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


@dataclass(frozen=True)
class Numbers:
    """Distribution of the finite numbers of a column.

    quartiles: values that occur. commonest: (value, its share). not_finite: NaN or infinite values.
    bins: (low, high, samples) of 10 intervals of equal width.
    """

    mean: float
    deviation: float
    smallest: float
    quartiles: tuple[float, ...]
    largest: float
    commonest: tuple[float, float]
    not_finite: int
    bins: tuple[tuple[float, float, int], ...]


@dataclass(frozen=True)
class ColumnSummary:
    """Statistics of one column, of the `looked_at` samples; exact: these are all samples.

    kind: as of `shards.kinds`. missing: samples looked at that have no value, or none that fits.
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
    classes: dict[str, int]
    distinct: int
    empty: tuple[str, ...]
    imbalance: float | None
    per_sample: Range | None
    numbers: Numbers | None

    def notes(self) -> list[str]:
        """Return remarks besides counts and numbers."""
        some = "" if self.exact else ", which were read; to read all: --exact"
        notes = [f"{self.looked_at} samples{some}"]
        if self.is_label and self.imbalance is not None and self.imbalance > 1:
            ratio = f"{self.imbalance:.3g}"
            notes.append(f"the largest class has {ratio} times the samples of the smallest")
        if self.empty:
            names = ", ".join(self.empty[:5]) + (", ..." if len(self.empty) > 5 else "")
            notes.append(f"classes without samples ({len(self.empty)}): {names}")
        if self.per_sample is not None:
            low, median, high = self.per_sample
            notes.append(f"{low} to {high} classes per sample, median {median}")
        return [*notes, *[f"{self.missing} without a valid value"] * (self.missing > 0)]

    def bars(self) -> dict[str, int]:
        """Return samples by class or by interval: at most 20 bars, the rest as one."""
        if self.numbers is not None:
            return {f"{low:.4g} to {high:.4g}": count for low, high, count in self.numbers.bins}
        if len(self.classes) <= BARS:
            return self.classes
        ranked = Counter(self.classes).most_common()
        rest = sum(count for _, count in ranked[BARS:])
        return {**dict(ranked[:BARS]), f"{self.distinct - BARS} others": rest}

    def facts(self) -> list[tuple[str, str]]:
        """Return (name, value) pairs for a column of numbers."""
        n = self.numbers
        if n is None:
            return []
        value, share = n.commonest
        return [
            ("mean", f"{n.mean:.5g}, standard deviation {n.deviation:.5g}"),
            ("range", f"{n.smallest:.5g} to {n.largest:.5g}"),
            ("quartiles", ", ".join(f"{value:.5g}" for value in n.quartiles)),
            *[("most common", f"{value:.5g} ({share:.0%})")] * (share >= _COMMON),
            *[("not finite", str(n.not_finite))] * (n.not_finite > 0),
        ]

    def line(self) -> str:
        """Return the statistics as a short line."""
        n, ranked = self.numbers, Counter(self.classes).most_common(3)
        if n is not None:
            return f"{n.smallest:.5g} to {n.largest:.5g}, mean {n.mean:.5g}"
        shown = ", ".join(f"{name[:24]} {count}" for name, count in ranked)
        if self.distinct <= 3:
            return shown or "no values"
        common = f"; most common: {shown}" * (ranked[0][1] > 1)
        return f"{self.distinct} different{common}"


@dataclass(frozen=True)
class Info:
    """Contents of some shards. Prints as text; `as_dict()` is JSON-able.

    exact: no label was left unread. bytes: of all shards. overhead: bytes of headers and padding.
    per_shard: samples per shard. split_shards: shards of each split. made: how the set was made, in
    words; info: the same as the index has it. ignored: members that belong to no sample, by reason.
    keys: the first keys. contents: each field. columns: statistics of labels, then of other
    columns. disagreements: labels that cannot be joined, because they differ between the sets, by
    field. findings: what is wrong with shards that are left out.
    """

    samples: int
    shards: int
    bytes: int
    splits: dict[str, int]
    fields: tuple[str, ...]
    labels: tuple[ColumnInfo, ...]
    info: dict[str, Any]
    exact: bool
    overhead: int
    per_shard: Range | None
    split_shards: dict[str, int]
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
        values: dict[str, Any] = json.loads(text)
        return values

    def __repr__(self) -> str:
        lines = [f"{name}: {value}" for name, value in self.summary()]
        lines += [f"field {part.name}: {part.content.what}" for part in self.contents]
        lines += [f"column {part.name}: {part.line()}" for part in self.columns]
        return "\n".join(lines + [f"finding: {finding}" for finding in self.findings])

    def summary(self) -> list[tuple[str, str]]:
        """Return (name, value) pairs about the set as a whole."""
        each = ""
        if self.per_shard is not None and self.shards > 1:
            low, median, high = self.per_shard
            each = f", {low} to {high} samples each, median {median}"
        per_sample, share = (
            self.overhead // max(1, self.samples),
            self.overhead / max(1, self.bytes),
        )
        splits = (
            f"{name or 'without a split'} {count} ({counted(self.split_shards[name], 'shard')})"
            for name, count in self.splits.items()
        )
        ignored = (f"{count} x {reason}" for reason, count in self.ignored.items())
        rows = [
            ("samples", str(self.samples)),
            ("shards", f"{self.shards}{each}"),
            ("size", format_size(self.bytes)),
            ("headers, padding", f"{share:.1%}, {per_sample} bytes per sample"),
            ("splits", ", ".join(splits) if any(self.splits) else ""),
            ("fields", ", ".join(self.fields)),
            *((f"label {label.name}", label.summary) for label in self.labels),
            *(
                (f"label {place}", f"{reason}. For its classes, look at each set alone")
                for place, reason in self.disagreements.items()
            ),
            *(("made", text) for text in self.made),
            ("ignored members", ", ".join(ignored)),
            ("first keys", ", ".join(self.keys)),
        ]
        return [(name, value) for name, value in rows if value]

    def field_rows(self) -> list[list[str]]:
        """Return the rows of a table of fields, under FIELD_HEAD."""
        return [
            [part.name, str(part.samples), *map(format_size, asdict(part.sizes).values())]
            for part in self.contents
        ]

    def charted(self) -> list[ColumnSummary]:
        """Return the columns that are shown as bar charts: labels."""
        return [column for column in self.columns if column.is_label]

    def other_columns(self) -> list[list[str]]:
        """Return the rows of a table of the other columns: name, kind, missing, values."""
        return [
            [column.name, column.kind, str(column.missing), column.line()]
            for column in self.columns
            if not column.is_label
        ]


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
    size = sum(shard.bytes for shard in index.shards)
    if index.is_selection:  # its shards hold other samples too
        size = int(index.offsets.size.sum())
    splits, ignored = dict.fromkeys(index.splits, 0), Counter[str]()
    for shard in index.shards:
        splits[shard.split] += shard.samples
    for part in parts:
        ignored.update(_mapping(part.info.get("ignored")))
    return Info(
        samples=len(index),
        shards=len(index.shards),
        bytes=size,
        splits=splits,
        fields=tuple(map(printable, index.fields)),
        labels=index.labels,
        info={name: value for name, value in index.info.items() if name != "states"},
        exact=len(counted) == len(index),
        overhead=max(0, size - sum(summary.sizes.total for summary in contents)),
        per_shard=range_of(index.counts.tolist()),
        split_shards=dict(Counter(shard.split for shard in index.shards)),
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
    sizes = {name: size for name, size in sizes.items() if len(size)}  # else of other shards
    quantiles = {name: _quantiles(size) for name, size in sizes.items()}
    names = [name for name, of in quantiles.items() if of["median"] <= _VALUE_BYTES]
    values: dict[str, list[bytes]] = {name: [] for name in sizes}
    for fields in _read(index, _sample_ids(index, names, _VALUES), names, errors):
        for name, data in fields.items():
            values[name].append(data)
    return tuple(
        FieldSummary(
            printable(name),
            len(size),
            Sizes(**quantiles[name], total=int(size.sum())),
            described(name, values[name]),
        )
        for name, size in sizes.items()
    )


def _quantiles(sizes: Ints) -> dict[str, int]:
    values = np.quantile(sizes, (0, 0.5, 0.99, 1), method="inverted_cdf").tolist()
    return dict(zip(("smallest", "median", "percentile_99", "largest"), values, strict=True))


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
    labels = () if index.shard_labels else index.labels  # else numbers mean different classes
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
    if label is not None and label.kind == "class" and column.kind != "class":
        column = replace(column, kind="class", values=pc.cast(column.values, pa.string()))
    present, numbers, per_sample = column.values.drop_null(), None, None
    if pa.types.is_list(present.type):
        per_sample = range_of(pc.list_value_length(present).to_pylist())
        present = present.flatten()
    if column.kind in ("integer", "number"):
        numbers, present = _numbers(np.asarray(present, np.float64)), present[:0]
    pairs = pc.value_counts(present).to_pylist()
    counts = Counter({str(pair["values"]): int(pair["counts"]) for pair in pairs})
    distinct, listed = len(counts), dict(counts.most_common(_MAX_VALUES))
    if label is not None:
        names = label.classes or sorted(counts, key=lambda name: (len(name), name))
        listed = {name: counts[name] for name in names}
        distinct = len(listed)
    classes = {printable(name): count for name, count in listed.items()}
    used = [count for count in classes.values() if count]
    return ColumnSummary(
        name=printable(column.name if label is None else label.name),
        kind=column.kind,
        is_label=label is not None,
        exact=exact,
        looked_at=len(column),
        missing=column.values.null_count,
        classes=classes,
        distinct=distinct,
        empty=tuple(name for name, count in classes.items() if exact and not count),
        imbalance=max(used) / min(used) if used else None,
        per_sample=per_sample,
        numbers=numbers,
    )


def _numbers(values: Any) -> Numbers | None:
    """Return the distribution of numbers. values: float64[n]"""
    finite = values[np.isfinite(values)]
    if not len(finite):
        return None
    quantiles = np.quantile(finite, (0, 0.25, 0.5, 0.75, 1), method="inverted_cdf")
    low, *quartiles, high = quantiles.tolist()
    commonest = pc.mode(pa.array(finite))[0].as_py()
    bins: list[tuple[float, float, int]] = []
    if 0 < high - low < np.inf:
        counts, edges = np.histogram(finite, _BINS)
        ends = edges.tolist()
        bins = list(zip(ends[:-1], ends[1:], counts.tolist(), strict=True))
    with np.errstate(over="ignore", invalid="ignore"):  # huge numbers
        mean, deviation = float(finite.mean()), float(finite.std())
    return Numbers(
        mean=mean,
        deviation=deviation,
        smallest=low,
        quartiles=tuple(quartiles),
        largest=high,
        commonest=(commonest["mode"], commonest["count"] / len(finite)),
        not_finite=len(values) - len(finite),
        bins=tuple(bins),
    )


# --- the set as a whole ---------------------------------------------------------------------------


def _disagreements(index: Index) -> dict[str, str]:
    """Return the reasons that labels cannot be joined, by place: a loader refuses these too."""
    places = dict.fromkeys(label.place for labels in index.shard_labels for label in labels)
    reasons = {"/".join(filter(None, place)): index.disagreement(*place) for place in places}
    return {printable(place): printable(reason) for place, reason in reasons.items() if reason}


def _provenance(info: Mapping[str, Any]) -> str:
    """Return how a set was made, as its index says: source, changed options, counts."""
    source, options = _mapping(info.get("source")), _mapping(info.get("options"))
    if not source:
        return "by another program, its index does not say how"
    changed = {name: value for name, value in options.items() if value != _DEFAULTS.get(name)}
    about = _pairs({name: value for name, value in source.items() if name != "kind"})
    parts = [f"from {source.get('kind')}{about and f' ({about})'}"]
    parts += [f"with {text}" for text in [_pairs(changed)] if text]
    parts += ["not shuffled"] * (options.get("shuffle") is False)
    if isinstance(info.get("listed"), int):
        counts = [f"{info[name]} {name}" for name in ("skipped", "renamed") if info.get(name)]
        parts.append(", ".join([f"{info['listed']} samples listed", *counts]))
    parts += ["index made again from the headers"] * (info.get("made") == "scanned from headers")
    return "; ".join(parts)


def _pairs(values: Mapping[str, Any]) -> str:
    """Return these values as text: "name value, ..."; empty values are left out."""
    return ", ".join(f"{name} {_value_text(value)}" for name, value in values.items() if value)


def _value_text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ",".join(f"{name}={item}" for name, item in value.items())
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
