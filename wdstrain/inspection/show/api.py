"""`wt.peek`: samples of shards, of a loader or of a batch, decoded to look at.

A `Peek` prints as a table, shows pictures in a notebook, and is saved as PNG or HTML.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, overload

from wdstrain.decode.fields import Image
from wdstrain.errors import UsageError
from wdstrain.inspection.show.batch_view import Normalization, batch_views, loader_views
from wdstrain.inspection.show.render import html_figures, html_page, png_sheet, text_table
from wdstrain.inspection.show.sample_view import SampleView, Variants, read_views
from wdstrain.inspection.show.select import Order, Selection, place_of, select
from wdstrain.loader.loader import Loader
from wdstrain.loader.planning import open_shards
from wdstrain.report.printing import printable
from wdstrain.shards.index import Index
from wdstrain.shards.resolve import open_index
from wdstrain.storage.addresses import Urls
from wdstrain.storage.files import write_whole

_ENDINGS = (".png", ".html")


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


def peek(
    source: Urls | Index | Loader | Mapping[str, Any],
    n: int = 5,
    *,
    order: Order = "first",
    classes: Iterable[str] | None = None,
    keys: Iterable[str] | None = None,
    label: str | None = None,
    where: str | None = None,
    seed: int = 0,
    normalize: Normalization = None,
) -> Peek:
    """Return n samples, decoded to look at. A sample that cannot be decoded has an `error`.

    source     shards by any address, or an Index; a Loader: the samples of its next `for`, after
               augmentation (the loader is not moved); a batch of a loader or of `to_device`
    order      "first", "random" (by the seed) or "classes": evenly over all classes. All but the
               first samples of shards need an index, which is made if there is none
    classes    n samples of each of these; of a batch: the names of its classes
    keys       these samples; n is ignored
    label      the label to show and to choose classes of; default: all, and the only one
    where      only samples for which this condition on the columns holds
    normalize  of a batch: "imagenet" or (mean, standard deviation), as given to `wt.Augmentation`:
               it is undone. Default: float images are scaled linearly, and the scale is in `notes`

    Raises UsageError for keys, classes and labels that do not exist; of a Loader what its loop
    would raise.
    """
    names = _strings("classes", classes)
    is_batch = isinstance(source, Mapping)
    wanted = Selection(n, order, () if is_batch else names, _strings("keys", keys), label, seed)
    if isinstance(source, (Mapping, Loader)):
        if wanted != Selection(wanted.n) or where is not None:
            raise UsageError(
                f"a {'batch' if is_batch else 'Loader'} has an order of its own, and its first rows "
                f"are shown. To choose samples, give its shards: loader.index."
            )
        if isinstance(source, Loader):
            return _peek_loader(source, n, normalize)
        views, notes = batch_views(source, n, names, normalize)
        return Peek(views, f"the first {len(views)} rows of a batch", notes)
    if isinstance(source, Iterator):
        raise UsageError(
            f"{type(source).__name__} is used up by looking at it. Give one of its batches, "
            f"next(...), or the Loader."
        )
    if where is not None:
        source = (source if isinstance(source, Index) else open_index(source)).where(where)
    return _peek_shards(source, wanted, None)


def peek_augmented(
    urls: Urls | Index, wanted: Selection, image: Image, epochs: Sequence[int]
) -> Peek:
    """Return samples with their image as a Loader with this field and seed delivers it.

    Each image is shown once per epoch. Raises as `peek`, and UsageError for shards of several
    splits.
    """
    index = urls if isinstance(urls, Index) else open_shards(urls)
    if not any(name in index.fields for name in image.names):
        raise UsageError(f"these shards hold no image, but {', '.join(index.fields)}.")
    found = _peek_shards(index, wanted, Variants(image, epochs, wanted.seed))
    augment = image.augment
    names = ["rrc" * augment.rrc, "flip" * augment.flip, augment.policy or ""]
    size = f" of {image.size[1]} x {image.size[0]}" if image.size else ""
    which = f"epoch {epochs[0]}" if len(epochs) == 1 else f"epochs {epochs[0]} to {epochs[-1]}"
    note = (
        f"images{size} as a Loader with seed {wanted.seed} delivers them in {which}, "
        f"augmentation: {'+'.join(filter(None, names)) or 'none'}"
    )
    return Peek(found, found.title, [*found.notes, note])


def check_ending(path: str) -> None:
    """Raise UsageError for a path that does not end in .png or .html."""
    if not path.lower().endswith(_ENDINGS):
        raise UsageError(f"{path}: the file must end in .png or .html.")


def _peek_shards(source: Urls | Index, wanted: Selection, variants: Variants | None) -> Peek:
    chosen = select(source, wanted)
    views = read_views(chosen.index, chosen.ids, chosen.labels, variants)
    return Peek(views, chosen.description, chosen.notes)


def _peek_loader(loader: Loader, n: int, normalize: Normalization) -> Peek:
    views, notes = loader_views(loader, n, normalize)
    epoch, step = loader.next_position
    start = f" from step {step} on" if step else ""
    title = f"the first {len(views)} samples of epoch {epoch}{start} of a Loader"
    return Peek(views, f"{place_of(loader.index)}: {title}", notes)


def _strings(name: str, given: Iterable[str] | None) -> tuple[str, ...]:
    if isinstance(given, str):
        raise UsageError(f"{name}={given!r}: must be a list. Write {name}=[{given!r}].")
    return tuple(dict.fromkeys(map(str, given))) if given is not None else ()
