"""`wt.peek`: samples of shards, of a loader or of a batch, decoded to look at.

A `Peek` prints as a table, shows pictures in a notebook, and is saved as PNG. The first samples of
shards without an index are found in the headers of these samples alone, so that looking at five
samples of a terabyte takes a few requests. Everything else needs an index. Random choices are the
same for the same seed.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from difflib import get_close_matches
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from torch import Tensor

from wdstrain.augment.gpu import RNG
from wdstrain.decode.labels import LabelField
from wdstrain.errors import DamageError, UsageError
from wdstrain.inspection.options import PeekOptions
from wdstrain.inspection.result import text_of
from wdstrain.inspection.values import known_labels, with_values
from wdstrain.inspection.views import SampleView, is_mask, is_shown, png_sheet
from wdstrain.loader.loader import Loader
from wdstrain.loader.stats import Finding
from wdstrain.order.rng import bits
from wdstrain.report.printing import counted, printable
from wdstrain.report.terminal import table_text
from wdstrain.runtime.options import format_size, takes
from wdstrain.shards.index import Index, join
from wdstrain.shards.kinds import ColumnInfo
from wdstrain.shards.offsets import Ints
from wdstrain.shards.resolve import groups_of, open_index, scan_shard
from wdstrain.shards.selection import number_of
from wdstrain.storage.addresses import Urls, expand, folder_of
from wdstrain.storage.files import write_whole

_MAX_BAD = 3  # bad samples that are named
_MAX_BYTES = 64 << 20  # of a member that is read
_MAX_LABELS = 10_000  # that are read to find samples of classes, if the index has no column
_MAX_ROWS = 20  # of the table in a terminal
_WIDTH = 80  # columns of a table

_log = logging.getLogger("wdstrain")


class Peek(list[SampleView]):
    """Samples to look at. Prints as a table, shows pictures in a notebook.

    title: where the samples come from and how they were chosen. notes: sentences about samples that
    were not found or are bad.
    """

    def __init__(
        self, lines: Sequence[Sequence[SampleView]], title: str, notes: Sequence[str] = ()
    ) -> None:
        """lines: the samples, each of which begins on a new line of a sheet."""
        super().__init__(view for line in lines for view in line)
        self._lines, self.title, self.notes = lines, title, tuple(notes)

    @property
    def bad(self) -> list[SampleView]:
        """Samples with an error."""
        return [view for view in self if view.error]

    def save(self, path: str | os.PathLike[str]) -> str:
        """Write a picture (.png). Returns the path.

        Raises UsageError for another ending, StorageError if it cannot be written.
        """
        name = os.fspath(path)
        if not name.lower().endswith(".png"):
            raise UsageError(f"{name}: the file must end in .png.")
        write_whole(name, self._repr_png_())
        return name

    def as_dict(self) -> dict[str, Any]:
        """Return everything but the pixels as JSON-able values."""
        counts = {"shown": len(self), "broken": len(self.bad), "notes": [*self.notes]}
        return {"title": self.title, **counts, "samples": [view.as_dict() for view in self]}

    def __repr__(self) -> str:
        """Return a row for each sample: its key, which is complete, and what fits of its texts."""
        rows = [(view.key, view.lines[0], "; ".join(filter(None, view.lines[1:]))) for view in self]
        width = max([_WIDTH, *(len(printable(key)) + 4 for key, *_ in rows[:_MAX_ROWS])])
        head = [printable(self.title), *(f"({printable(note)})" for note in self.notes)]
        more = [f"... and {len(rows) - _MAX_ROWS} more"] * (len(rows) > _MAX_ROWS)
        return "\n".join([*head, table_text(rows[:_MAX_ROWS], width=width), *more])

    def _repr_png_(self) -> bytes:
        return png_sheet(self._lines, self.title, self.notes)


@takes(PeekOptions)
def peek(options: PeekOptions) -> Peek:
    """Return samples, decoded to look at. A sample that cannot be decoded has an `error`.

    All but the first samples of shards need an index, which is made if there is none. A Loader is
    not moved: its samples are those of its next `for`, after augmentation. Samples of classes have
    a line of a sheet for each class. Raises UsageError for keys, classes and labels that do not
    exist; of a Loader what its loop would raise.
    """
    source = options.source
    if isinstance(source, Iterator):
        raise UsageError(
            f"{type(source).__name__} is used up by looking at it.",
            "Give one of its batches, next(...), or the Loader.",
        )
    if not isinstance(source, (Mapping, Loader)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Pillow, about odd images that it can show
            return _peek_shards(source, options)
    names = options.classes if isinstance(source, Mapping) else ()  # of its class numbers
    if vars(options) != vars(PeekOptions(source, options.n, classes=names)):
        raise UsageError(
            f"a {type(source).__name__} has an order of its own, and its first rows are shown.",
            "To choose samples, give its shards: loader.index.",
        )
    if isinstance(source, Loader):
        return _peek_loader(source, options.n)
    return _peek_batch(source, options)


def _peek_shards(source: Urls | Index, options: PeekOptions) -> Peek:
    """Return the chosen samples of shards."""
    by_class, first = bool(options.classes) or options.order == "classes", None
    if options.where is not None:
        source = open_index(source).where(options.where)
    if not (isinstance(source, Index) or by_class or options.keys or options.order == "random"):
        first = _first_samples(source, options.n)
    index = first or open_index(source, note=_log.warning)
    if not len(index):
        raise UsageError("these shards hold no samples.", "Check the address.")
    labels = known_labels(index) if options.label is None else [_label(index, options.label)]
    total = len(index)
    if by_class:
        labels = [label for label in labels if label.kind not in ("number", "mask")]
        index = with_values(index, labels[:1], _MAX_LABELS)
        lines, how = _by_class(index, options, labels)
        how += f", found among {len(index)} of them" if len(index) < total else ""
    elif options.keys:
        lines, how = [_by_key(index, options.keys)], "by key"
    elif options.order == "random":
        mixed = _shuffled(np.arange(len(index)), options.seed)
        lines, how = [np.sort(mixed[: options.n])], f"at random (seed {options.seed})"
    else:
        lines, how = [np.arange(min(options.n, len(index)))], "the first"
    views = [[_view(index, labels, number) for number in ids.tolist()] for ids in lines]
    amount = f"{sum(map(len, lines))} of {counted(total, 'sample')}"
    if first is not None:
        amount = f"{counted(len(index), 'sample')} of a number that is unknown without an index"
    return Peek(views, f"{_place_of(index)}: {amount}, {how}")


def _view(index: Index, labels: Sequence[ColumnInfo], number: int) -> SampleView:
    """Return a sample. Only members that can be shown are read; near ones in one request."""
    view, sizes = _stored(index, number), {name: size for name, _, size in index.members(number)}
    names, fields = {label.place: label.name for label in labels}, {label.field for label in labels}
    for column in index.columns:
        value = column.values[number].as_py() if column.place in names else None
        if value is not None:
            view.labels[names[column.place]] = text_of(value)
    view.fields.update((name, format_size(size)) for name, size in sizes.items())
    shown = [n for n in sizes if sizes[n] <= _MAX_BYTES and (n in fields or is_shown(n))]
    try:
        values = dict(index.read([number], shown))[number]
    except DamageError as error:
        view.add_error("", error)
        return view
    for name in sorted(values, key=is_mask):  # a mask is drawn over its image
        view.fields.pop(name)
        view.add_bytes(name, values[name], labels)
    return view


def _stored(index: Index, number: int) -> SampleView:
    """Return an empty view that says where a sample is stored."""
    shard, start = index.shard_with(number), int(index.offsets.start[number])
    return SampleView(index.key(number), shard.shown, start, shard.split)


def _place_of(index: Index) -> str:
    """Return the folder of an index, for messages."""
    return folder_of(index.shards[0].path) or "." if index.shards else "no shards"


# --- choice of samples ----------------------------------------------------------------------------


def _first_samples(urls: Urls, n: int) -> Index | None:
    """Return the index of the first n samples, from their headers; None if there is an index."""
    parts, missing = list[Index](), n
    for shards, index in groups_of(expand(urls)):
        if index is not None and missing > 0:
            return None
        for path in shards:
            if missing > 0:
                parts.append(scan_shard(path, most=missing))
                missing -= len(parts[-1])
    return join(parts)


def _label(index: Index, name: str) -> ColumnInfo:
    """Return a label, or a field as one. Raises UsageError for a name that is neither."""
    known = [*known_labels(index), *(ColumnInfo(f, "class", f) for f in index.fields)]
    chosen = [label for label in known if label.name == name]
    if not chosen:
        names = list(dict.fromkeys(label.name for label in known))
        raise UsageError(f"there is no label {name!r}.", _choices(name, names))
    return chosen[0]


def _by_class(
    index: Index, wanted: PeekOptions, labels: Sequence[ColumnInfo]
) -> tuple[list[Ints], str]:
    """Return (n samples of each wanted class, or n samples evenly over all classes; how).

    labels: the only label with classes.
    """
    if len(labels) != 1:
        names = ", ".join(label.name for label in labels) or "none of these shards"
        raise UsageError(f"choose the label with the classes (label): {names}.")
    ids_of, n = _class_ids(index, labels[0]), wanted.n
    known = labels[0].classes or sorted(ids_of, key=lambda name: (len(name), name))
    for name in wanted.classes:
        if name not in known:
            problem = f"the label {labels[0].name!r} has no class {name!r}."
            raise UsageError(problem, _choices(name, known))
    chosen = {
        name: _shuffled(ids_of[name], wanted.seed, name)[:n]
        for name in wanted.classes or known
        if name in ids_of
    }
    how = f"{n} of each of {_listed(wanted.classes)}"
    if not wanted.classes:  # one of each class, then a second of each, and so on
        how = f"evenly over {counted(len(known), 'class')}"
        places = _shuffled(np.arange(len(chosen)), wanted.seed, "classes").tolist()
        turns = [
            (turn, place, name)
            for place, (name, ids) in zip(places, chosen.items(), strict=True)
            for turn in range(len(ids))
        ]
        taken = Counter(name for *_, name in sorted(turns)[:n])
        chosen = {name: ids[: taken[name]] for name, ids in chosen.items() if taken[name]}
    lines = [np.sort(ids) for ids in chosen.values()]
    least = n if wanted.classes else 1
    counts = {name: len(ids_of.get(name, ())) for name in wanted.classes or known}
    few = [f"{name} ({count})" for name, count in counts.items() if count < least]
    how += f"; there are fewer of {_listed(few)}" if few else ""
    if all(len(ids) == 1 for ids in lines):  # they share a line of the sheet
        lines = [np.concatenate([np.zeros(0, np.int64), *lines])]
    return lines, f"{how} (seed {wanted.seed})"


def _class_ids(index: Index, label: ColumnInfo) -> dict[str, Ints]:
    """Return the ids of each class that has samples, ascending. label: has a column."""
    values = next(column.values for column in index.columns if column.place == label.place)
    rows = np.arange(len(index))
    if pa.types.is_list(values.type):
        rows, values = np.asarray(pc.list_parent_indices(values), np.int64), values.flatten()
    coded = values.dictionary_encode()  # of classes, as it is
    rows, codes = rows[np.asarray(coded.is_valid())], np.asarray(coded.indices.drop_null())
    starts = np.cumsum(np.bincount(codes, minlength=len(coded.dictionary)))[:-1]
    parts = np.split(rows[np.argsort(codes, kind="stable")], starts)
    names = map(str, coded.dictionary.to_pylist())
    return {name: ids for name, ids in zip(names, parts, strict=True) if len(ids)}


def _shuffled(ids: Ints, *words: int | str) -> Ints:
    return np.asarray(ids[np.argsort(bits(ids, "look", *words), kind="stable")])


def _by_key(index: Index, keys: Sequence[str]) -> Ints:
    """Return the samples with these keys, in their order. Raises UsageError for a missing key."""
    try:
        return np.array([number_of(index, key) for key in keys], np.int64)
    except KeyError as error:
        raise UsageError(error.args[0], f"Use a key such as {index.key(0)!r}.") from None


def _choices(name: str, names: Sequence[str]) -> str:
    """Return a sentence with a name that resembles `name`, and the names there are."""
    near = get_close_matches(name, names, 1, 0.5)
    guess = f"Did you mean {near[0]!r}? " if near else ""
    return f"{guess}Use one of: {_listed(names) or 'none'}."


def _listed(names: Sequence[str]) -> str:
    """Return the first ten names."""
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")


# --- rows of a loader and of a batch --------------------------------------------------------------


def _peek_loader(loader: Loader, n: int) -> Peek:
    """Return the first n rows that the next `for` over a loader gives. The loader is not moved."""
    index, views, fields = loader.index, list[SampleView](), (loader.fields or {}).items()
    names = {name: field.classes for name, field in fields if isinstance(field, LabelField)}
    with closing(loader.copy_with_threads()) as copy:
        batches = iter(copy)
        while len(views) < n and (batch := next(batches, None)) is not None:
            new = [
                _stored(index, number)
                for number in batches.delivered.ids.tolist()[: n - len(views)]
            ]
            _add_rows(new, batch, names, index.labels)
            views += new
        bad = copy.report()["bad_samples"][:_MAX_BAD]
    epoch, step = loader.next_position
    start = f" from step {step} on" if step else ""
    title = f"the first {counted(len(views), 'sample')} of epoch {epoch}{start} of a Loader"
    notes = [f"bad: {Finding(**finding).sentence}" for finding in bad]
    return Peek([views], f"{_place_of(index)}: {title}", notes)


def _peek_batch(batch: Mapping[str, Any], options: PeekOptions) -> Peek:
    """Return the first rows of a batch. options.classes: names of its class numbers."""
    rows = [len(column) for column in batch.values() if _has_rows(column)]
    if not rows:
        raise UsageError(
            "this batch has no column with a row for each sample.",
            "Give a batch of a loader: a dict of tensors and lists.",
        )
    keys = batch.get("__key__") or [f"row {row}" for row in range(rows[0])]
    views = [SampleView(str(key)) for key in keys[: options.n]]
    _add_rows(views, batch, dict.fromkeys(batch, options.classes), ())
    return Peek([views], f"the first {counted(len(views), 'row')} of a batch")


def _add_rows(
    views: Sequence[SampleView],
    batch: Mapping[str, Any],
    classes: Mapping[str, Sequence[str]],
    labels: Sequence[ColumnInfo],
) -> None:
    """Add the rows of a batch to the views of its samples.

    classes: names of class numbers or class shares, by field. labels: that fields of bytes hold.
    """
    for name in (name for name in batch if _has_rows(batch[name]) and name not in (RNG, "__key__")):
        for view, value in zip(views, batch[name], strict=False):
            if isinstance(value, (bytes, memoryview)):
                view.add_bytes(name, bytes(value), labels)
            else:
                view.add(name.strip("_"), _plain(value), classes.get(name, ()))


def _has_rows(column: Any) -> bool:
    return isinstance(column, (list, tuple)) or getattr(column, "ndim", 0) > 0


def _plain(value: Any) -> Any:
    """Return a tensor as an array; other values as they are."""
    if not isinstance(value, Tensor):
        return value
    return (value.float() if value.is_floating_point() else value).detach().cpu().numpy()
