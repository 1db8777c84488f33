"""`wt.peek`: samples of shards, of a loader or of a batch, decoded to look at.

A `Peek` prints as a table, shows pictures in a notebook, and is saved as PNG.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

from torch import Tensor

from wdstrain.augment.gpu import RNG
from wdstrain.decode.labels import LabelField
from wdstrain.errors import DamageError, UsageError
from wdstrain.inspection.choose import Selected, place_of, select
from wdstrain.inspection.options import PeekOptions, check_ending
from wdstrain.inspection.views import (
    SampleView,
    is_mask,
    is_shown,
    png_sheet,
)
from wdstrain.loader.loader import Loader
from wdstrain.loader.stats import Finding
from wdstrain.report.printing import counted, printable
from wdstrain.report.terminal import table_text
from wdstrain.runtime.options import format_size, takes
from wdstrain.shards.index import Index
from wdstrain.shards.kinds import ColumnInfo
from wdstrain.shards.resolve import open_index
from wdstrain.storage.files import write_whole

_MAX_BAD = 3  # bad samples that are named
_MAX_BYTES = 64 << 20  # of a member that is read
_MAX_ROWS = 20  # of the table in a terminal
_WIDTH = 80  # columns of a table


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
    def broken(self) -> int:
        """Number of samples with an error."""
        return sum(bool(view.error) for view in self)

    def save(self, path: str | os.PathLike[str]) -> str:
        """Write a picture (.png). Returns the path.

        Raises UsageError for another ending, StorageError if it cannot be written.
        """
        name = os.fspath(path)
        check_ending(name)
        write_whole(name, self._repr_png_())
        return name

    def as_dict(self) -> dict[str, Any]:
        """Return everything but the pixels as JSON-able values."""
        counts = {"shown": len(self), "broken": self.broken, "notes": [*self.notes]}
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
    if isinstance(source, (Mapping, Loader)):
        names = options.classes if isinstance(source, Mapping) else ()  # of its class numbers
        if vars(options) != vars(PeekOptions(source, options.n, classes=names)):
            raise UsageError(
                f"a {type(source).__name__} has an order of its own, and its first rows are shown.",
                "To choose samples, give its shards: loader.index.",
            )
        if isinstance(source, Loader):
            return _peek_loader(source, options.n)
        return _peek_batch(source, options)
    if isinstance(source, Iterator):
        raise UsageError(
            f"{type(source).__name__} is used up by looking at it.",
            "Give one of its batches, next(...), or the Loader.",
        )
    if options.where is not None:
        source = open_index(source).where(options.where)
    chosen = select(source, options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Pillow, about odd images that it can show
        lines = [[_view(chosen, i) for i in ids.tolist()] for ids in chosen.lines]
    return Peek(lines, chosen.title, chosen.notes)


def _view(chosen: Selected, number: int) -> SampleView:
    """Return a sample. Only members that can be shown are read; near ones in one request."""
    index, view = chosen.index, _stored(chosen.index, number)
    labelled, names = {label.field for label in chosen.labels}, list[str]()
    for name, _, size in index.members(number):
        view.fields[name] = format_size(size)
        if size <= _MAX_BYTES and (name in labelled or is_shown(name)):
            names.append(name)
    try:
        values = dict(index.read([number], names))[number]
    except DamageError as error:
        view.add_error("", error)
        return view
    for name in sorted(values, key=is_mask):  # a mask is drawn over its image
        view.fields.pop(name)
        view.add_bytes(name, values[name], chosen.labels)
    # The bytes of sets that number their classes differently count in other classes.
    places = [label.place for label in index.differing]
    for column in index.columns:
        if column.name in view.labels and column.place in places:
            view.labels[column.name] = str(column.values[number])
    return view


def _stored(index: Index, number: int) -> SampleView:
    """Return an empty view that says where a sample is stored."""
    shard, start = index.shard_with(number), int(index.offsets.start[number])
    return SampleView(index.key(number), shard.shown, start, shard.split)


# --- rows of a loader and of a batch --------------------------------------------------------------


def _peek_loader(loader: Loader, n: int) -> Peek:
    """Return the first n rows that the next `for` over a loader gives. The loader is not moved."""
    index, views = loader.index, list[SampleView]()
    fields = (loader.fields or {}).items()
    names = {name: field.classes for name, field in fields if isinstance(field, LabelField)}
    with closing(loader.copy_with_threads()) as copy:
        batches = iter(copy)
        while len(views) < n and (batch := next(batches, None)) is not None:
            new = [
                _stored(index, number)
                for number in batches.delivered.ids.tolist()[: n - len(views)]
            ]
            _add_rows(new, batch, names, index.labels)
            for view, is_own in zip(new, batches.delivered.own, strict=False):
                if not is_own:
                    view.add_error("", "it replaces a bad sample")
            views += new
        bad = copy.report()["bad_samples"][:_MAX_BAD]
    epoch, step = loader.next_position
    start = f" from step {step} on" if step else ""
    title = f"the first {counted(len(views), 'sample')} of epoch {epoch}{start} of a Loader"
    notes = [f"bad: {Finding(**finding).sentence}" for finding in bad]
    return Peek([views], f"{place_of(index)}: {title}", notes)


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
