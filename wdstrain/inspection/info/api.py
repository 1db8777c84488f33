"""`wt.info`: what some shards hold.

What an index knows is exact and costs no read: samples, sizes of fields, splits, and statistics of
its columns. Shards without an index are estimated from excerpts (`excerpt`), or read with `exact`.
A damaged shard is reported and left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from wdstrain.errors import WdstrainError
from wdstrain.inspection.info.contents import FieldDescriber, range_of
from wdstrain.inspection.info.excerpt import Estimate, ValueReader, estimate, remote_heads
from wdstrain.inspection.info.result import (
    Excerpt,
    FieldSummary,
    Info,
    Sizes,
    ignored_members,
    provenance_text,
)
from wdstrain.inspection.info.statistics import ColumnSummary, summarize, weighted_quantiles
from wdstrain.inspection.options import InfoOptions
from wdstrain.report.printing import printable
from wdstrain.runtime.options import takes
from wdstrain.shards.columns import Column, ColumnBuilder, join_columns, typed
from wdstrain.shards.header_scans import Note, recall, recall_or_scan
from wdstrain.shards.index import Index, Shard, join
from wdstrain.shards.index_io import check_size
from wdstrain.shards.kinds import NOT_A_COLUMN, ColumnInfo, Place
from wdstrain.shards.label_values import read_columns
from wdstrain.shards.offsets import Ints, Offsets
from wdstrain.shards.resolve import groups_of, join_once, open_index
from wdstrain.storage.addresses import expand
from wdstrain.storage.remote import name_of

Progress = Callable[[str, int, int], None]  # (work, finished samples, all samples)
Floats = npt.NDArray[np.float64]

_VALUES = 200  # samples whose values are looked at
_LABELS = 2_000  # samples whose labels are read, if the index has no columns
_CLASS_FIELDS = ("cls", "cls2")  # fields with class numbers, if no index names labels
_KEYS = 3


@takes(InfoOptions)
def info(options: InfoOptions) -> Info:
    """Return the contents of shards: samples, fields, images, labels, splits, provenance.

    Shards with an index cost no read. Of others, at most 3 MB of each of 8 shards are read, unless
    `exact` is given; then `Info.exact` is False. Raises UsageError for addresses without shards,
    ShardError or StorageError if no shard can be read. What is wrong with some of them is in
    `Info.findings`.
    """
    urls, exact, note = options.urls, options.exact, options.note
    parts = _Parts(exact, note)
    if options.where is not None:
        urls = open_index(urls, note=note).where(options.where)
    if isinstance(urls, Index):
        index = urls
        parts.has_columns |= {shard.path for shard in urls.shards if urls.columns}
    else:
        index = join_once([parts.of(*group) for group in groups_of(expand(urls))])
    known = index.pick(i for i, shard in enumerate(index.shards) if shard.path not in parts.fresh)
    estimated = estimate(list(parts.fresh)) if parts.fresh else None
    errors = parts.errors + (estimated.errors if estimated else [])
    both = [known, estimated.index] if estimated else [known]
    index = join([part for part in both if part.shards] or [known])
    if not index.shards and errors:
        raise _no_shard_is_readable(errors)
    heads = remote_heads(known, errors) | (estimated.heads if estimated else {})
    reader = ValueReader(index, heads)
    weights = None
    if estimated is not None and not estimated.exact:  # samples that each row stands for
        each = estimated.samples / max(1, len(estimated.index))
        weights = np.repeat([1.0, each], [len(known), len(estimated.index)])
    contents = _contents(index, reader, weights)
    columns = _columns(index, parts.has_columns, reader, weights, exact, options.progress)
    counts = [*known.counts.tolist(), *(estimated.counts if estimated else [])]
    size, samples = sum(shard.bytes for shard in index.shards), sum(counts)
    if index.is_selection:  # its shards hold other samples too
        size = int(index.offsets.size.sum())
    splits = Counter[str]()
    for shard, count in zip(index.shards, counts, strict=True):
        splits[shard.split] += count
    ignored = Counter(estimated.ignored if estimated else {})
    for provenance in parts.infos:
        ignored.update(ignored_members(provenance))
    findings = (printable(str(error)) for error in [*errors, *reader.errors])
    return Info(
        samples=samples,
        shards=len(index.shards),
        bytes=size,
        splits=dict(splits),
        fields=tuple(map(printable, index.fields)),
        labels=index.labels,
        info={name: value for name, value in index.info.items() if name != "states"},
        exact=weights is None,
        overhead=max(0, size - sum(field.sizes.total for field in contents)),
        per_shard=range_of(counts),
        split_shards=dict(Counter(shard.split for shard in index.shards)),
        made=tuple(dict.fromkeys(map(provenance_text, parts.infos or [index.info]))),
        ignored=dict(ignored),
        keys=tuple(printable(index.key(i)) for i in range(min(_KEYS, len(index)))),
        contents=contents,
        columns=columns,
        excerpt=_excerpt(estimated),
        disagreements=_disagreements(index),
        findings=tuple(dict.fromkeys(findings)),
    )


class _Parts:
    """Collects the parts of a set while its addresses are resolved.

    infos: provenance of each index. errors: what is wrong with shards. fresh: shards without an
    index that were not scanned. has_columns: paths of shards whose index has columns.
    """

    def __init__(self, exact: bool, note: Note | None) -> None:
        self._exact, self._note = exact, note
        self.infos: list[dict[str, Any]] = []
        self.errors: list[WdstrainError] = []
        self.fresh: dict[str, None] = {}
        self.has_columns: set[str] = set()

    def of(self, paths: list[str], index: Index | None) -> Index:
        """Return the index of some shards of the set. index: of the file that lists them, if any."""
        return self._unindexed(paths) if index is None else self._indexed(index)

    def _indexed(self, part: Index) -> Index:
        """Return the shards of an index that have the sizes that it says."""
        self.infos.append(part.info)
        if part.columns:
            self.has_columns |= {shard.path for shard in part.shards}
        good = []
        for number, shard in enumerate(part.shards):
            try:
                check_size(shard)
                good.append(number)
            except WdstrainError as error:
                self.errors.append(error)
        return part.pick(good)

    def _unindexed(self, paths: list[str]) -> Index:
        """Return shards of one folder that no index lists; without samples if not yet scanned."""
        part = recall_or_scan(paths, self._note, self.errors) if self._exact else recall(paths)
        self.infos.append(part.info)
        if self._exact:
            return part
        fresh = [path for path in paths if name_of(path) not in part.shard_numbers]
        self.fresh |= dict.fromkeys(fresh)
        empty = Index(tuple(Shard(path, 0, 0) for path in fresh), Offsets.of([]))
        return join([part, empty]) if fresh else part


def _contents(
    index: Index, reader: ValueReader, weights: Floats | None
) -> tuple[FieldSummary, ...]:
    """Return sizes and contents of each field."""
    fields = {name: FieldDescriber(name) for name in index.fields}
    for _, members in reader.members(reader.ids(_VALUES)):
        for name, value in members:
            fields[name].add(value)
    each = np.ones(len(index)) if weights is None else weights
    summaries = []
    for name in index.fields:
        size = index.offsets.extents[name][1]
        sizes, stands_for = size.drop_null().to_numpy(), each[np.asarray(size.is_valid())]
        if not len(sizes):
            continue  # a field of other shards of the set
        low, median, high, top = weighted_quantiles(sizes, stands_for, (0.0, 0.5, 0.99, 1.0))
        total = round(float((sizes * stands_for).sum()))
        content = fields[name].content()
        samples = round(float(stands_for.sum()))
        summaries.append(
            FieldSummary(printable(name), samples, Sizes(low, median, high, top, total), content)
        )
    return tuple(summaries)


def _columns(
    index: Index,
    has_columns: set[str],
    reader: ValueReader,
    weights: Floats | None,
    exact: bool,
    progress: Progress | None,
) -> tuple[ColumnSummary, ...]:
    """Return statistics of labels, then of the other columns.

    Columns of an index are used as they are. Of shards whose index has none, all labels are read if
    `exact`, else those of some samples, which stand for the others.
    """
    columns, rows, complete = index.columns, np.arange(len(index)), weights is None
    each = np.ones(len(index)) if weights is None else weights
    listed = np.repeat([shard.path in has_columns for shard in index.shards], index.counts)
    rest = np.flatnonzero(~listed)
    if len(rest):
        chosen = reader.ids(_LABELS, whole=True, among=~listed)
        built = _read_some(index, chosen, reader)
        if exact and len(chosen) < len(rest):
            places = [column.place for column in built]
            chosen, built = rest, _read_all(index, ~listed, places, reader.errors, progress)
        rows = np.flatnonzero(listed)
        kept = index.take(rows).columns
        columns = join_columns([(len(rows), kept), (len(chosen), built)])
        complete = complete and len(chosen) == len(rest)
        scale = each[rest].sum() / max(1.0, each[chosen].sum())
        each = np.concatenate([each[rows], each[chosen] * scale])
    labels = list(index.labels)
    if not labels and not index.shard_labels:  # else the numbers mean different classes
        labels = [ColumnInfo(name, "class", name) for name in _CLASS_FIELDS if name in index.fields]
    by_place = {label.place: label for label in labels}
    shown = [_as_classes(column, by_place.get(column.place)) for column in columns]
    order = {place: number for number, place in enumerate(by_place)}
    shown.sort(key=lambda column: order.get(column.place, len(order)))
    return tuple(
        summarize(column, by_place.get(column.place), None if complete else each)
        for column in shown
        if column.kind != NOT_A_COLUMN
    )


def _as_classes(column: Column, label: ColumnInfo | None) -> Column:
    """Return the column of a class label without class names as texts, which are counted."""
    if label is None or label.kind != "class" or column.kind == "class":
        return column
    return replace(column, kind="class", values=pc.cast(column.values, pa.string()))


def _read_some(index: Index, ids: Ints, reader: ValueReader) -> tuple[Column, ...]:
    """Return the columns of samples that lie in local files or in excerpts of remote shards."""
    parts = []
    shards = index.shard_of(ids)
    for number in np.unique(shards).tolist():
        builder, mine = ColumnBuilder(), ids[shards == number]
        for _, members in reader.members(mine):
            builder.add([(name, v.data) for name, v in members if len(v.data) == v.size])
        parts.append((len(mine), _typed(index, number, builder.finish())))
    return join_columns(parts) if parts else ()


def _read_all(
    index: Index,
    wanted: npt.NDArray[np.bool_],
    places: list[Place],
    errors: list[WdstrainError],
    progress: Progress | None,
) -> tuple[Column, ...]:
    """Return columns of the wanted samples (whole shards), read forward.

    A shard that cannot be read is reported in `errors`; its samples have no values.
    """
    parts: list[tuple[int, tuple[Column, ...]]] = []
    for number, first in enumerate(index.first[:-1].tolist()):
        count = int(index.counts[number])
        if not count or not wanted[first]:
            continue
        if progress is not None:
            progress("reading labels", first, len(index))
        try:
            columns = read_columns(index.pick([number]), places).columns
            parts.append((count, _typed(index, number, columns)))
        except WdstrainError as error:
            errors.append(error)
            parts.append((count, ()))
    return join_columns(parts)


def _typed(index: Index, shard: int, columns: tuple[Column, ...]) -> tuple[Column, ...]:
    """Return columns of one shard, typed by its labels."""
    return typed(columns, index.shard_labels[shard] if index.shard_labels else index.labels)


def _excerpt(estimated: Estimate | None) -> Excerpt | None:
    if estimated is None:
        return None
    return Excerpt(
        shards=estimated.looked_into,
        samples=len(estimated.index),
        requests=estimated.requests,
        bytes=estimated.bytes_read,
    )


def _disagreements(index: Index) -> dict[str, str]:
    """Return the reasons that labels cannot be joined, by place: a loader refuses these too."""
    places = dict.fromkeys(label.place for labels in index.shard_labels for label in labels)
    reasons = {"/".join(filter(None, place)): index.disagreement(*place) for place in places}
    return {printable(place): printable(reason) for place, reason in reasons.items() if reason}


def _no_shard_is_readable(errors: list[WdstrainError]) -> WdstrainError:
    more = f" None of the other {len(errors) - 1} can be read either." if len(errors) > 1 else ""
    return type(errors[0])(f"{errors[0]}{more}")
