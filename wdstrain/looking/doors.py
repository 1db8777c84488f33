"""Looking at samples: what lies in shards, what a loader delivers, what is in a batch.

`peek` picks and decodes; what it gives is a sequence of samples that shows itself: as a table in a terminal, as figures in a
notebook, as a contact sheet in a file. It reads what it shows and little more, of any shards and wherever they lie.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, overload

from wdstrain.decode.fields import Image
from wdstrain.errors import UsageError
from wdstrain.loader.loader import Loader, open_shards
from wdstrain.looking.delivered import of_batch, of_loader
from wdstrain.looking.figures import figures, page, text_table
from wdstrain.looking.picking import Order, Wanted, pick, place_of
from wdstrain.looking.seeing import Seen, Variants, seen_at
from wdstrain.looking.sheets import sheet
from wdstrain.report.printing import printable
from wdstrain.shards.index import Index
from wdstrain.storage.addresses import Urls
from wdstrain.storage.files import write_whole

_ENDINGS = (".png", ".html")


class Peek(Sequence[Seen]):
    """Samples to be looked at. It prints as a table, and shows pictures in a notebook; a part of it is another.

    title: where they are from and how they were picked; notes: what could not be found, or was done to see them.
    """

    def __init__(self, samples: Sequence[Seen], title: str, notes: Sequence[str] = ()) -> None:
        self._samples, self.title, self.notes = tuple(samples), title, tuple(notes)

    def __len__(self) -> int:
        return len(self._samples)

    @overload
    def __getitem__(self, place: int) -> Seen: ...
    @overload
    def __getitem__(self, place: slice) -> Peek: ...
    def __getitem__(self, place: int | slice) -> Seen | Peek:
        if isinstance(place, slice):
            return Peek(self._samples[place], self.title, self.notes)
        return self._samples[place]

    @property
    def broken(self) -> int:
        """How many of them have something wrong."""
        return sum(bool(one.error) for one in self._samples)

    def save(self, path: str | os.PathLike[str]) -> str:
        """Write a contact sheet: one picture (.png), or one page that needs no network (.html). The path.

        Raises UsageError for another ending, StorageError where it cannot be written.
        """
        name = os.fspath(path)
        check_ending(name)
        if name.lower().endswith(".png"):
            write_whole(name, sheet(self._samples, self.title, self._said()))
        else:
            write_whole(
                name, page(self._samples, self.title, self._said()).encode("utf-8", "replace")
            )
        return name

    def _said(self) -> list[str]:
        return [
            *self.notes,
            *([f"{self.broken} of them have something wrong"] if self.broken else []),
        ]

    def __repr__(self) -> str:
        said = "".join(f"\n({printable(note)})" for note in self._said())
        return f"{printable(self.title)}{said}\n{text_table(self._samples)}"

    def _repr_html_(self) -> str:
        return figures(self._samples, self.title, self._said())


def peek(
    source: Urls | Index | Loader | Mapping[str, Any],
    n: int = 5,
    *,
    order: Order = "first",
    classes: Iterable[str] | None = None,
    keys: Iterable[str] | None = None,
    label: str | None = None,
    seed: int = 0,
) -> Peek:
    """Samples decoded for looking at; in a notebook they show their pictures. A sample that cannot be decoded says why in its place.

    source      shards by any address, or an Index; a Loader: what its next `for` will give, after augmentation, without moving or
                disturbing it; a batch of a loader or of `to_device`
    order       "first", "random" (by the seed), or "classes": evenly over all classes. The first of shards without an index are found by
                a walk over the headers of these alone; everything else indexes such shards
    classes     n samples of each of these; of a batch: names for its classes
    keys        these samples, whatever n is
    label       the label to show, and whose classes are meant; default: all, and the only one that has classes

    Raises UsageError for keys, classes and labels that are not there, naming near ones; for a Loader what its loop would raise.
    """
    named = _words("classes", classes)
    wanted = Wanted(
        n, order, () if isinstance(source, Mapping) else named, _words("keys", keys), label, seed
    )
    if isinstance(source, Mapping):
        _check_rows(wanted, "a batch")
        samples, notes = of_batch(source, n, named)
        return Peek(samples, f"the first {len(samples)} rows of a batch", notes)
    if isinstance(source, Loader):
        _check_rows(wanted, "a Loader")
        samples, notes = of_loader(source, n)
        epoch, step = source.begins
        which = f"the first {len(samples)} samples of epoch {epoch}" + (
            f" from step {step} on" if step else ""
        )
        return Peek(samples, f"{place_of(source.index)}: {which} of a Loader", notes)
    if isinstance(source, Iterator):
        raise UsageError(
            f"{type(source).__name__} is used up by looking at it. Give one of its batches, next(...), or the Loader."
        )
    return _looked(source, wanted, None)


def peek_varied(urls: Urls | Index, wanted: Wanted, image: Image, epochs: Sequence[int]) -> Peek:
    """Samples with their pictures as a Loader with this field and seed delivers them, once for each epoch.

    Raises as `peek`, and UsageError for shards of several splits, which no loader takes together.
    """
    index = urls if isinstance(urls, Index) else open_shards(urls)
    if not any(name in index.fields for name in image.names):
        raise UsageError(
            f"these shards hold {', '.join(index.fields)}, and none of them is a picture that could be varied."
        )
    found = _looked(index, wanted, Variants(image, epochs, wanted.seed))
    varied = "+".join(
        filter(None, ["rrc" * image.augment.rrc, "flip" * image.augment.flip, image.augment.policy])
    )
    size = f" of {image.size[1]} x {image.size[0]}" if image.size else ""
    which = f"epoch {epochs[0]}" if len(epochs) == 1 else f"epochs {epochs[0]} to {epochs[-1]}"
    note = f"pictures{size} as a Loader with seed {wanted.seed} delivers them in {which}, {varied or 'not'} varied"
    return Peek(found, found.title, [*found.notes, note])


def check_ending(path: str) -> None:
    """Raise UsageError for a file that is no contact sheet by its name."""
    if not path.lower().endswith(_ENDINGS):
        raise UsageError(
            f"{path}: a contact sheet is a picture or a page. Name a file that ends in .png or .html."
        )


def _looked(source: Urls | Index, wanted: Wanted, variants: Variants | None) -> Peek:
    picked = pick(source, wanted)
    samples = seen_at(picked.index, picked.ids, picked.labels, variants)
    return Peek(samples, f"{picked.place}: {picked.how}", picked.notes)


def _words(name: str, given: Iterable[str] | None) -> tuple[str, ...]:
    if isinstance(given, str):
        raise UsageError(f"{name}={given!r} is one word. Give a list: {name}=[{given!r}].")
    return tuple(dict.fromkeys(map(str, given))) if given is not None else ()


def _check_rows(wanted: Wanted, what: str) -> None:
    if wanted != Wanted(wanted.n):
        raise UsageError(
            f"{what} has an order of its own, and its first rows are shown. To pick samples, give its shards: loader.index."
        )
