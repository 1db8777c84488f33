"""`wt.peek`: samples of shards, of a loader or of a batch, decoded to look at.

A `Peek` prints as a table, shows pictures in a notebook, and is saved as PNG.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any, overload

import numpy as np
from torch import Tensor

from wdstrain.augment.gpu import RNG
from wdstrain.decode.fields import Image
from wdstrain.decode.fields import image as image_field
from wdstrain.decode.formats import is_image
from wdstrain.decode.labels import LabelField
from wdstrain.decode.transforms import DRAWS
from wdstrain.errors import DamageError, UsageError
from wdstrain.inspection.choose import Selected, place_of, select
from wdstrain.inspection.options import PeekOptions, check_ending
from wdstrain.inspection.sheets import png_sheet, text_table
from wdstrain.inspection.views import (
    SampleView,
    display_range,
    is_image_shape,
    is_mask,
    is_shown,
    thumbnail,
    to_image,
)
from wdstrain.loader.loader import Loader
from wdstrain.loader.stats import Finding
from wdstrain.order.rng import uniform
from wdstrain.report.printing import printable
from wdstrain.runtime.options import format_size, takes
from wdstrain.shards.index import Index
from wdstrain.shards.kinds import ColumnInfo
from wdstrain.shards.resolve import open_index, open_shards
from wdstrain.storage.files import write_whole

_MAX_BAD = 3  # bad samples that are named


class Peek(Sequence[SampleView]):
    """Samples to look at. Prints as a table, shows pictures in a notebook; a slice is a Peek.

    title: where the samples come from and how they were chosen. notes: sentences about samples that
    were not found, and about the scale of float images.
    """

    def __init__(
        self, lines: Sequence[Sequence[SampleView]], title: str, notes: Sequence[str] = ()
    ) -> None:
        """lines: the samples, each of which begins on a new line of a sheet."""
        self._lines, self.title, self.notes = lines, title, tuple(notes)
        self._samples = [view for line in lines for view in line]

    def __len__(self) -> int:
        return len(self._samples)

    @overload
    def __getitem__(self, place: int) -> SampleView: ...
    @overload
    def __getitem__(self, place: slice) -> Peek: ...
    def __getitem__(self, place: int | slice) -> SampleView | Peek:
        if isinstance(place, slice):
            return Peek([self._samples[place]], self.title, self.notes)
        return self._samples[place]

    @property
    def broken(self) -> int:
        """Number of samples with an error."""
        return sum(bool(view.error) for view in self._samples)

    def save(self, path: str | os.PathLike[str]) -> str:
        """Write a picture (.png). Returns the path.

        Raises UsageError for another ending, StorageError if it cannot be written.
        """
        name = os.fspath(path)
        check_ending(name)
        write_whole(name, self._repr_png_())
        return name

    def __repr__(self) -> str:
        notes = "".join(f"\n({printable(note)})" for note in self.notes)
        return f"{printable(self.title)}{notes}\n{text_table(self._samples)}"

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
                f"a {type(source).__name__} has an order of its own, and its first rows are shown. "
                f"To choose samples, give its shards: loader.index."
            )
        if isinstance(source, Loader):
            return _peek_loader(source, options.n)
        views, notes = _batch_views(source, options.n, options.classes, {})
        return Peek([views], f"the first {len(views)} rows of a batch", notes)
    if isinstance(source, Iterator):
        raise UsageError(
            f"{type(source).__name__} is used up by looking at it.",
            "Give one of its batches, next(...), or the Loader.",
        )
    if options.is_augmented:  # as by a Loader, which takes shards of one split
        source = open_shards(source)
    if options.where is not None:
        source = open_index(source).where(options.where)
    chosen = select(source, options)
    field = _augmented(chosen, options) if options.is_augmented else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Pillow, about odd images that it can show
        lines = [[_view(chosen, i, field, options) for i in ids.tolist()] for ids in chosen.lines]
    return Peek(lines, chosen.title, chosen.notes)


# --- samples of shards ----------------------------------------------------------------------------


def _augmented(chosen: Selected, options: PeekOptions) -> Image:
    """Return the field that augments the images. Adds a note about it to `chosen`."""
    size, epochs = options.image_size or 224, options.epochs
    field = image_field(size=size, augment=options.augment)
    if not any(name in chosen.index.fields for name in field.names):
        names = ", ".join(chosen.index.fields)
        raise UsageError(f"these shards hold no image, but {names}.")
    chosen.notes.append(
        f"images of {size} pixels as a Loader with seed {options.seed} delivers them in epochs "
        f"{epochs[0]} to {epochs[-1]}, augmentation: {options.augment or 'none'}"
    )
    return field


def _view(chosen: Selected, number: int, field: Image | None, options: PeekOptions) -> SampleView:
    """Return a sample. Only members that can be shown are read; near ones in one request."""
    index, view = chosen.index, _empty_view(chosen.index, number)
    names = []
    for name, _, size in index.members(number):
        view.fields[name] = format_size(size)
        if is_shown(name, size):
            names.append(name)
        elif is_image(name):
            view.add_error(name, f"{format_size(size)} are too many to show")
    try:
        values = dict(index.read([number], names))[number]
    except DamageError as error:
        view.add_error("", error)
        return view
    if field is not None:  # other images are left out
        _add_variants(view, values, field, options, number)
        values = {name: data for name, data in values.items() if not is_image(name)}
    for name in sorted(values, key=is_mask):  # a mask is drawn over its image
        view.fields.pop(name)
        view.add_bytes(name, values[name], chosen.labels)
    # The bytes of sets that number their classes differently count in other classes.
    places = [label.place for label in index.differing]
    for column in index.columns:
        if column.name in view.labels and column.place in places:
            view.labels[column.name] = str(column.values[number])
    return view


def _empty_view(index: Index, number: int) -> SampleView:
    shard, start = index.shard_with(number), int(index.offsets.start[number])
    return SampleView(index.key(number), shard.shown, start, shard.split)


def _add_variants(
    view: SampleView, values: Mapping[str, bytes], field: Image, options: PeekOptions, number: int
) -> None:
    """Add the image of a sample as a loader delivers it in each epoch."""
    name = next((name for name in field.names if name in values), None)
    if name is None:  # a loader takes the first of its names that the sample has
        view.add_error("", f"it has none of {', '.join(field.names)}")
        return
    example = field.example
    assert example is not None  # its size is fixed
    for epoch in options.epochs:
        draws = uniform(np.array([number]), DRAWS, "sample", options.seed, epoch)[0]
        out = np.empty(example.shape, example.dtype)
        try:
            field.read(name, memoryview(values[name]), out, draws)
        except Exception as error:  # decoders raise errors of many types
            view.add_error(name, error)
            return
        view.pictures[f"epoch {epoch}"] = thumbnail(out)


# --- rows of a loader and of a batch --------------------------------------------------------------


def _peek_loader(loader: Loader, n: int) -> Peek:
    """Return the first n rows that the next `for` over a loader gives. The loader is not moved."""
    index, views, notes = loader.index, list[SampleView](), list[str]()
    fields = (loader.fields or {}).items()
    names = {name: field.classes for name, field in fields if isinstance(field, LabelField)}
    with closing(loader.copy_with_threads()) as copy:
        batches = iter(copy)
        for batch in batches:
            empty = {row: _empty_view(index, i) for row, i in enumerate(batches.ids.tolist())}
            new, found = _batch_views(batch, n - len(views), names, empty, index.labels)
            for view, is_own in zip(new, batches.own, strict=False):
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
    empty: Mapping[int, SampleView],
    labels: Sequence[ColumnInfo] = (),
) -> tuple[list[SampleView], list[str]]:
    """Return the first n rows of a batch, and notes on how they are shown.

    classes: names of class numbers or class shares, of each field or of all. empty: views by row,
    if it is known where they are stored. labels: that fields of bytes hold.
    """
    columns = {name: _plain(column) for name, column in batch.items() if name != RNG}
    rows = [len(column) for column in columns.values() if np.ndim(column) or _is_list(column)]
    if not rows:
        raise UsageError(
            "this batch has no column with a row for each sample.",
            "Give a batch of a loader: a dict of tensors and lists.",
        )
    keys = columns.pop("__key__", None) or [f"row {row}" for row in range(rows[0])]
    views = [empty.get(row) or SampleView(str(key)) for row, key in enumerate(keys[:n])]
    notes = []
    for name, column in columns.items():
        of_field = classes.get(name, ()) if isinstance(classes, Mapping) else classes
        is_array = isinstance(column, np.ndarray) and column.ndim > 0
        if is_array and column.dtype.kind == "f" and is_image_shape(column.shape[1:]):
            low, high = display_range(column)
            notes.append(f"{name}: {low:.3g} as black and {high:.3g} as white")
            column = [to_image(row, column) for row in column[: len(views)]]
        for row, view in enumerate(views):
            value = _plain(column[row]) if is_array or _is_list(column) else column
            if name == "__source__":
                view.labels["source"] = str(value)
            elif name == "__valid__":
                view.fields |= {} if value else {"padding": "this row is not a sample"}
            elif isinstance(value, (bytes, memoryview)):
                view.add_bytes(name, bytes(value), labels)
            else:
                view.add_value(name, value, of_field)
    return views, notes


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def _plain(value: Any) -> Any:
    """Return a tensor as an array; other values as they are."""
    if not isinstance(value, Tensor):
        return value
    return (value.float() if value.is_floating_point() else value).detach().cpu().numpy()
