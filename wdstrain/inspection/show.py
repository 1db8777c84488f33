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

from wdstrain.augment.gpu import IMAGENET, RNG
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
    Array,
    SampleView,
    display_range,
    is_image_shape,
    is_mask,
    is_shown,
    thumbnail,
    to_image,
    value_range,
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

Normalization = str | tuple[Sequence[float], Sequence[float]] | None

_MAX_BAD = 3  # bad samples that are named


class Peek(Sequence[SampleView]):
    """Samples to look at. Prints as a table, shows pictures in a notebook; a slice is a Peek.

    title: where the samples come from and how they were chosen. notes: sentences about samples that
    were not found, and about the scale of float images. lines: number of samples in each line of a
    sheet; empty: as many as fit.
    """

    def __init__(
        self,
        samples: Sequence[SampleView],
        title: str,
        notes: Sequence[str] = (),
        lines: Sequence[int] = (),
    ) -> None:
        self._samples, self.title, self.notes = tuple(samples), title, tuple(notes)
        self._lines = tuple(lines)

    def __len__(self) -> int:
        return len(self._samples)

    @overload
    def __getitem__(self, place: int) -> SampleView: ...
    @overload
    def __getitem__(self, place: slice) -> Peek: ...
    def __getitem__(self, place: int | slice) -> SampleView | Peek:
        if isinstance(place, slice):
            return Peek(self._samples[place], self.title, self.notes)
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

    def _all_notes(self) -> list[str]:
        return [*self.notes, *[f"{self.broken} samples have an error"] * (self.broken > 0)]

    def __repr__(self) -> str:
        notes = "".join(f"\n({printable(note)})" for note in self._all_notes())
        return f"{printable(self.title)}{notes}\n{text_table(self._samples)}"

    def _repr_png_(self) -> bytes:
        stops = np.cumsum(self._lines or [len(self)]).tolist()
        rows = [self._samples[a:b] for a, b in zip([0, *stops], stops, strict=False)]
        return png_sheet(rows, self.title, self._all_notes())


@takes(PeekOptions)
def peek(options: PeekOptions) -> Peek:
    """Return samples, decoded to look at. A sample that cannot be decoded has an `error`.

    All but the first samples of shards need an index, which is made if there is none. A Loader is
    not moved: its samples are those of its next `for`, after augmentation. Samples of classes have
    a line of a sheet for each class. Raises UsageError for keys, classes and labels that do not
    exist; of a Loader what its loop would raise.
    """
    source, n = options.source, options.n
    if isinstance(source, (Mapping, Loader)):
        _check_first(options)
        if isinstance(source, Loader):
            return _peek_loader(source, n, options.normalize)
        views, notes = _batch_views(source, n, options.classes, {}, options.normalize)
        return Peek(views, f"the first {len(views)} rows of a batch", notes)
    if isinstance(source, Iterator):
        raise UsageError(
            f"{type(source).__name__} is used up by looking at it. Give one of its batches, "
            f"next(...), or the Loader."
        )
    if options.is_augmented:  # as by a Loader, which takes shards of one split
        source = open_shards(source)
    if options.where is not None:
        source = open_index(source).where(options.where)
    chosen = select(source, options)
    field = _augmented(chosen, options) if options.is_augmented else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Pillow, about odd images that it can show
        views = [_view(chosen, i, field, options) for i in chosen.ids.tolist()]
    return Peek(views, chosen.description, chosen.notes, chosen.lines)


def _check_first(options: PeekOptions) -> None:
    """Raise UsageError if samples of a loader or of a batch are chosen."""
    plain = PeekOptions(options.source, options.n, normalize=options.normalize)
    if isinstance(options.source, Mapping):  # its classes are names of class numbers
        plain = replace(plain, classes=options.classes)
    if vars(options) != vars(plain):
        raise UsageError(
            f"a {type(options.source).__name__} has an order of its own, and its first rows are "
            f"shown. To choose samples, give its shards: loader.index."
        )


# --- samples of shards ----------------------------------------------------------------------------


def _augmented(chosen: Selected, options: PeekOptions) -> Image:
    """Return the field that augments the images. Adds a note about it to `chosen`."""
    size, epochs = options.image_size or 224, _epochs(options)
    field = image_field(size=size, augment=options.augment)
    if not any(name in chosen.index.fields for name in field.names):
        names = ", ".join(chosen.index.fields)
        raise UsageError(f"these shards hold no image, but {names}.")
    chosen.notes.append(
        f"images of {size} pixels as a Loader with seed {options.seed} delivers them in epochs "
        f"{epochs[0]} to {epochs[-1]}, augmentation: {options.augment or 'none'}"
    )
    return field


def _epochs(options: PeekOptions) -> range:
    first = options.epoch or 0
    return range(first, first + (options.copies or 1))


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
    labels = [index.label_in_sample(label, number) for label in chosen.labels]
    for name in sorted(values, key=is_mask):  # a mask is drawn over its image
        view.add_bytes(name, values[name], labels)
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
    for epoch in _epochs(options):
        draws = uniform(np.array([number]), DRAWS, "sample", options.seed, epoch)[0]
        out = np.empty(example.shape, example.dtype)
        try:
            field.read(name, memoryview(values[name]), out, draws)
        except Exception as error:  # decoders raise errors of many types
            view.add_error(name, error)
            return
        view.pictures[f"epoch {epoch}"] = thumbnail(out)


# --- rows of a loader and of a batch --------------------------------------------------------------


def _peek_loader(loader: Loader, n: int, normalize: Normalization) -> Peek:
    """Return the first n rows that the next `for` over a loader gives. The loader is not moved."""
    index, views, notes = loader.index, list[SampleView](), list[str]()
    names = {
        name: field.classes
        for name, field in (loader.fields or {}).items()
        if isinstance(field, LabelField)
    }
    with closing(loader.copy_with_threads()) as copy:
        batches = iter(copy)
        for batch in batches:
            ids, own = batches.ids.tolist(), batches.own
            empty = {row: _empty_view(index, number) for row, number in enumerate(ids)}
            new, found = _batch_views(batch, n - len(views), names, empty, normalize, index.labels)
            for row, view in enumerate(new):
                if not own[row]:
                    view.add_error("", "it replaces a bad sample")
            views, notes = [*views, *new], [*notes, *found]
            if len(views) >= n:
                break
        bad = copy.report()["bad_samples"][:_MAX_BAD]
        notes += [f"bad: {Finding(**finding).sentence}" for finding in bad]
    epoch, step = loader.next_position
    start = f" from step {step} on" if step else ""
    title = f"the first {len(views)} samples of epoch {epoch}{start} of a Loader"
    return Peek(views, f"{place_of(index)}: {title}", list(dict.fromkeys(notes)))


def _batch_views(
    batch: Mapping[str, Any],
    n: int,
    classes: Sequence[str] | Mapping[str, Sequence[str]],
    empty: Mapping[int, SampleView],
    normalize: Normalization,
    labels: Sequence[ColumnInfo] = (),
) -> tuple[list[SampleView], list[str]]:
    """Return the first n rows of a batch, and notes on how they are shown.

    classes: names of class numbers or class shares, of each field or of all. empty: views by row,
    if it is known where they are stored. labels: that fields of bytes hold.
    """
    count = min(n, _row_count(batch))
    keys = batch.get("__key__") or [f"row {row}" for row in range(count)]
    views = [empty.get(row) or SampleView(str(keys[row])) for row in range(count)]
    notes = []
    for name, column in batch.items():
        if name in ("__key__", RNG):
            continue
        values, note = _values(column, count, normalize)
        notes += [f"{name}: {note}"] if note else []
        of_field = classes.get(name, ()) if isinstance(classes, Mapping) else classes
        for view, value in zip(views, values, strict=False):
            if name == "__source__":
                view.labels["source"] = str(value)
            elif name == "__valid__":
                view.fields |= {} if value else {"padding": "this row is not a sample"}
            elif isinstance(value, (bytes, memoryview)):
                view.add_bytes(name, bytes(value), labels)
            else:
                view.add_value(name, value, of_field)
    return views, notes


def _row_count(batch: Mapping[str, Any]) -> int:
    for column in (batch.get("__key__"), *batch.values()):
        is_array = isinstance(column, (Tensor, np.ndarray)) and column.ndim
        if is_array or isinstance(column, (list, tuple)):
            return len(column)
    raise UsageError(
        "this batch has no column with a row for each sample. Give a batch of a loader: a dict of "
        "tensors and lists."
    )


def _values(column: Any, count: int, normalize: Normalization) -> tuple[Sequence[Any], str]:
    """Return the first values of a column, images as uint8, and how float images are shown."""
    column = _plain(column)
    shape = column.shape if isinstance(column, np.ndarray) else ()
    if len(shape) == 4 and column.dtype.kind == "f" and is_image_shape(shape[1:]):
        return _float_images(column, count, normalize)
    is_column = isinstance(column, (list, tuple)) or len(shape) > 0
    return [_plain(v) for v in column[:count]] if is_column else [column] * count, ""


def _plain(value: Any) -> Any:
    """Return a tensor as an array; other values as they are."""
    if not isinstance(value, Tensor):
        return value
    return (value.float() if value.is_floating_point() else value).detach().cpu().numpy()


def _float_images(batch: Array, count: int, normalize: Normalization) -> tuple[Sequence[Any], str]:
    """Return images as uint8, and their linear scale; a normalization is undone, never guessed."""
    rows, (low, high) = batch[:count], value_range(batch)
    note = f"floats from {low:.3g} to {high:.3g}"
    if normalize is None:
        low, high = display_range(low, high)
        note = f"{note}; shown with {low:.3g} as black and {high:.3g} as white"
        return [to_image(row, low, high) for row in rows], note
    if normalize == "imagenet":
        normalize = IMAGENET
    if not isinstance(normalize, tuple) or len(normalize) != 2:
        raise UsageError(
            f'normalize={normalize!r}: must be "imagenet" or (mean, standard deviation) of the '
            "planes, as in wt.Augmentation."
        )
    is_planes = rows.shape[1] in (1, 3) and rows.shape[3] not in (1, 3)
    mean, deviation = (
        np.reshape(numbers, (-1, 1, 1) if is_planes else (-1,)) for numbers in normalize
    )
    images = [to_image(row, 0.0, 1.0) for row in rows * deviation + mean]
    return images, f"{note}; the normalization is undone"
