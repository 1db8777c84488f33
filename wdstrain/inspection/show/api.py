"""`wt.peek`: samples of shards, of a loader or of a batch, decoded to look at.

A `Peek` prints as a table, shows pictures in a notebook, and is saved as PNG or HTML.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import overload

from wdstrain.decode.fields import image as image_field
from wdstrain.errors import UsageError
from wdstrain.inspection.options import PeekOptions, check_ending
from wdstrain.inspection.show.batch_view import Normalization, batch_views, loader_views
from wdstrain.inspection.show.render import html_figures, html_page, png_sheet, text_table
from wdstrain.inspection.show.sample_view import SampleView, Variants, read_views
from wdstrain.inspection.show.select import place_of, select
from wdstrain.loader.loader import Loader
from wdstrain.report.printing import printable
from wdstrain.runtime.options import takes
from wdstrain.shards.index import Index
from wdstrain.shards.resolve import open_index, open_shards
from wdstrain.storage.addresses import Urls
from wdstrain.storage.files import write_whole


class Peek(Sequence[SampleView]):
    """Samples to look at. Prints as a table, shows pictures in a notebook; a slice is a Peek.

    title: where the samples come from and how they were chosen. notes: what was not found, and how
    numbers are shown.
    """

    def __init__(
        self, samples: Sequence[SampleView], title: str, notes: Sequence[str] = ()
    ) -> None:
        self._samples, self.title, self.notes = tuple(samples), title, tuple(notes)

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
        """Write a picture (.png) or a page in one file (.html). Returns the path.

        Raises UsageError for another ending, StorageError if it cannot be written.
        """
        name = os.fspath(path)
        check_ending(name)
        if name.lower().endswith(".png"):
            data = png_sheet(self._samples, self.title, self._all_notes())
        else:
            page = html_page(self._samples, self.title, self._all_notes())
            data = page.encode("utf-8", "replace")
        write_whole(name, data)
        return name

    def _all_notes(self) -> list[str]:
        return [*self.notes, *([f"{self.broken} samples have an error"] if self.broken else [])]

    def __repr__(self) -> str:
        notes = "".join(f"\n({printable(note)})" for note in self._all_notes())
        return f"{printable(self.title)}{notes}\n{text_table(self._samples)}"

    def _repr_html_(self) -> str:
        return html_figures(self._samples, self.title, self._all_notes())


@takes(PeekOptions)
def peek(options: PeekOptions) -> Peek:
    """Return samples, decoded to look at. A sample that cannot be decoded has an `error`.

    All but the first samples of shards need an index, which is made if there is none. A Loader is
    not moved: its samples are those of its next `for`, after augmentation. Raises UsageError for
    keys, classes and labels that do not exist; of a Loader what its loop would raise.
    """
    source, n = options.source, options.n
    if isinstance(source, (Mapping, Loader)):
        _check_first(options)
        if isinstance(source, Loader):
            return _peek_loader(source, n, options.normalize)
        views, notes = batch_views(source, n, tuple(options.classes), options.normalize)
        return Peek(views, f"the first {len(views)} rows of a batch", notes)
    if isinstance(source, Iterator):
        raise UsageError(
            f"{type(source).__name__} is used up by looking at it. Give one of its batches, "
            f"next(...), or the Loader."
        )
    if options.is_augmented:
        return _peek_augmented(options)
    if options.where is not None:
        source = open_index(source).where(options.where)
    return _peek_shards(source, options, None)


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


def _peek_augmented(options: PeekOptions) -> Peek:
    """Return samples with their image as a Loader delivers it, once per epoch."""
    source = options.source
    index = open_shards(source)
    index = index if options.where is None else index.where(options.where)
    image = image_field(size=options.image_size or 224, augment=options.augment)
    if not any(name in index.fields for name in image.names):
        raise UsageError(f"these shards hold no image, but {', '.join(index.fields)}.")
    first = options.epoch or 0
    epochs = range(first, first + (options.copies or 1))
    peeked = _peek_shards(index, options, Variants(image, epochs, options.seed))
    augment = image.augment
    names = ["rrc" * augment.rrc, "flip" * augment.flip, augment.policy or ""]
    size = f" of {image.size[1]} x {image.size[0]}" if image.size else ""
    which = f"epoch {first}" if len(epochs) == 1 else f"epochs {first} to {epochs[-1]}"
    note = (
        f"images{size} as a Loader with seed {options.seed} delivers them in {which}, "
        f"augmentation: {'+'.join(filter(None, names)) or 'none'}"
    )
    return Peek(peeked, peeked.title, [*peeked.notes, note])


def _peek_shards(source: Urls | Index, wanted: PeekOptions, variants: Variants | None) -> Peek:
    chosen = select(source, wanted)
    views = read_views(chosen.index, chosen.ids, chosen.labels, variants)
    return Peek(views, chosen.description, chosen.notes)


def _peek_loader(loader: Loader, n: int, normalize: Normalization) -> Peek:
    views, notes = loader_views(loader, n, normalize)
    epoch, step = loader.next_position
    start = f" from step {step} on" if step else ""
    title = f"the first {len(views)} samples of epoch {epoch}{start} of a Loader"
    return Peek(views, f"{place_of(loader.index)}: {title}", notes)
