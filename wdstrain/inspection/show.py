"""`wt.peek`: samples of shards, of a loader or of a batch, decoded to look at.

A `Peek` prints as a table, shows pictures in a notebook, and is saved as PNG.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from wdstrain.augment.gpu import RNG
from wdstrain.decode.labels import LabelField
from wdstrain.errors import DamageError, UsageError
from wdstrain.inspection.choose import Selected, place_of, select
from wdstrain.inspection.options import PeekOptions, check_ending
from wdstrain.inspection.views import (
    SampleView,
    display_range,
    is_image_shape,
    is_mask,
    is_shown,
    png_sheet,
    to_image,
)
from wdstrain.loader.loader import Loader
from wdstrain.loader.stats import Finding
from wdstrain.report.printing import printable
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
    were not found, and about the scale of float images.
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
        plain = PeekOptions(source, options.n)
        if isinstance(source, Mapping):  # its classes are names of class numbers
            plain = replace(plain, classes=options.classes)
        if vars(options) != vars(plain):
            raise UsageError(
                f"a {type(source).__name__} has an order of its own, and its first rows are shown.",
                "To choose samples, give its shards: loader.index.",
            )
        if isinstance(source, Loader):
            return _peek_loader(source, options.n)
        views, notes = _batch_views(source, options.n, options.classes)
        return Peek([views], f"the first {len(views)} rows of a batch", notes)
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
    index, view = chosen.index, SampleView(chosen.index.key(number))
    _locate(view, index, number)
    members, labelled = index.members(number), {label.field for label in chosen.labels}
    view.fields = {name: format_size(size) for name, _, size in members}
    names = [
        name
        for name, _, size in members
        if size <= _MAX_BYTES and (name in labelled or is_shown(name))
    ]
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


def _locate(view: SampleView, index: Index, number: int) -> None:
    """Set where a sample is stored."""
    shard = index.shard_with(number)
    view.shard, view.split = shard.shown, shard.split
    view.offset = int(index.offsets.start[number])


# --- rows of a loader and of a batch --------------------------------------------------------------


def _peek_loader(loader: Loader, n: int) -> Peek:
    """Return the first n rows that the next `for` over a loader gives. The loader is not moved."""
    index, views, notes = loader.index, list[SampleView](), list[str]()
    fields = (loader.fields or {}).items()
    names = {name: field.classes for name, field in fields if isinstance(field, LabelField)}
    with closing(loader.copy_with_threads()) as copy:
        batches = iter(copy)
        for batch in batches:
            new, found = _batch_views(batch, n - len(views), names, index.labels)
            for view, number, is_own in zip(new, batches.ids.tolist(), batches.own, strict=False):
                _locate(view, index, number)
                if not is_own:
                    view.add_error("", "it replaces a bad sample")
            views, notes = [*views, *new], [*notes, *found]
            if len(views) >= n:
                break
        bad = copy.report()["bad_samples"][:_MAX_BAD]
        notes += [f"bad: {Finding(**finding).sentence}" for finding in bad]
    epoch, step = loader.next_position
    start = f" from step {step} on" if step else ""
    title = f"the first {len(views)} samples of epoch {epoch}{start} of a Loader"
    return Peek([views], f"{place_of(index)}: {title}", list(dict.fromkeys(notes)))


def _batch_views(
    batch: Mapping[str, Any],
    n: int,
    classes: Sequence[str] | Mapping[str, Sequence[str]],
    labels: Sequence[ColumnInfo] = (),
) -> tuple[list[SampleView], list[str]]:
    """Return the first n rows of a batch, and notes on how they are shown.

    classes: names of class numbers or class shares, of each field or of all. labels: that fields of
    bytes hold.
    """
    plain = {name: _plain(column) for name, column in batch.items() if name != RNG}
    columns = {
        name: column
        for name, column in plain.items()
        if isinstance(column, (list, tuple)) or np.ndim(column)
    }
    if not columns:
        raise UsageError(
            "this batch has no column with a row for each sample.",
            "Give a batch of a loader: a dict of tensors and lists.",
        )
    rows = len(next(iter(columns.values())))
    keys = columns.pop("__key__", [f"row {row}" for row in range(rows)])
    views, notes = [SampleView(str(key)) for key in keys[:n]], []
    for name, column in columns.items():
        of_field = classes.get(name, ()) if isinstance(classes, Mapping) else classes
        is_float = isinstance(column, np.ndarray) and column.dtype.kind == "f"
        if is_float and is_image_shape(column.shape[1:]):
            low, high = display_range(column)
            notes.append(f"{name}: {low:.3g} as black and {high:.3g} as white")
            column = [to_image(row, column) for row in column[: len(views)]]
        for view, value in zip(views, column, strict=False):
            if isinstance(value, (bytes, memoryview)):
                view.add_bytes(name, bytes(value), labels)
            else:
                view.add(name.strip("_"), _plain(value), of_field)
    return views, notes


def _plain(value: Any) -> Any:
    """Return a tensor as an array; other values as they are."""
    if not isinstance(value, Tensor):
        return value
    return (value.float() if value.is_floating_point() else value).detach().cpu().numpy()
