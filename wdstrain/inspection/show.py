"""`wt.peek`: samples of shards, decoded to look at.

A `Peek` prints as a table, shows pictures in a notebook, and is saved as PNG. The first samples of
shards without an index are found in the headers of these samples alone, so that looking at five
samples of a terabyte takes a few requests. Everything else needs an index. Random choices are the
same for the same seed.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from wdstrain.errors import DamageError, logger
from wdstrain.inspection.options import PeekOptions
from wdstrain.inspection.result import text_of
from wdstrain.inspection.values import known_labels, with_values
from wdstrain.inspection.views import SampleView, is_mask, is_shown, png_sheet
from wdstrain.loader.loader import Loader
from wdstrain.order.rng import bits
from wdstrain.report.printing import counted, printable
from wdstrain.report.terminal import table_text
from wdstrain.runtime.options import format_size, refuse, takes
from wdstrain.shards.declare import is_boxes
from wdstrain.shards.index import Index, join
from wdstrain.shards.kinds import ColumnInfo
from wdstrain.shards.offsets import Ints
from wdstrain.shards.resolve import groups_of, open_index, scan_shard
from wdstrain.storage.addresses import Urls, expand, folder_of
from wdstrain.storage.files import write_whole

_MAX_BYTES = 64 << 20  # of a member that is read
_MAX_LABELS = 10_000  # that are read to find samples of classes, if the index has no column
_WIDTH = 80  # columns of a table
_UNKNOWN = "samples of a number that is unknown without an index"


class Peek(list[SampleView]):
    """Samples to look at. Prints as a table, shows pictures in a notebook.

    title: where the samples come from and how they were chosen. notes: what else is to be known.
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
        refuse(not name.lower().endswith(".png"), f"{name}: the file must end in .png.")
        write_whole(name, self._repr_png_())
        return name

    def as_dict(self) -> dict[str, Any]:
        """Return everything but the pixels as JSON-able values."""
        return {
            "title": self.title,
            "shown": len(self),
            "broken": len(self.bad),
            "notes": [*self.notes],
            "samples": [view.as_dict() for view in self],
        }

    def __repr__(self) -> str:
        """Return a row for each sample: its key, which is complete, and what fits of its texts."""
        rows = [(view.key, view.lines[0], "; ".join(filter(None, view.lines[1:]))) for view in self]
        width = max([_WIDTH, *(len(printable(view.key)) + 4 for view in self)])
        head = map(printable, (self.title, *self.notes))
        return "\n".join([*head, table_text(rows, width=width)])

    def _repr_png_(self) -> bytes:
        return png_sheet(self._lines, self.title)


@takes(PeekOptions)
def peek(options: PeekOptions) -> Peek:
    """Return samples, decoded to look at. A sample that cannot be decoded has an `error`.

    All but the first samples of shards need an index, which is made if there is none. Samples of
    classes have a line of a sheet for each class. Raises UsageError for classes and labels that do
    not exist.
    """
    source = options.source
    refuse(
        isinstance(source, (Iterator, Mapping, Loader)),
        f"samples of shards are shown, not those of a {type(source).__name__}.",
        "Give their address, or the index of a loader: loader.index.",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Pillow, about odd images that it can show
        return _peek_shards(source, options)


def _peek_shards(source: Urls | Index, options: PeekOptions) -> Peek:
    """Return the chosen samples of shards."""
    by_class, first = bool(options.classes) or options.order == "classes", None
    if options.where is not None:
        source = open_index(source).where(options.where)
    if not (isinstance(source, Index) or by_class or options.order == "random"):
        first = _first_samples(source, options.n)
    index = first or open_index(source, note=logger.warning)
    refuse(not len(index), "these shards hold no samples.", "Check the address.")
    labels = known_labels(index) if options.label is None else [_label(index, options.label)]
    total = len(index)
    if by_class:
        labels = [label for label in labels if label.kind not in ("number", "mask", "boxes")]
        index = with_values(index, labels[:1], _MAX_LABELS)
        lines, how = _by_class(index, options, labels)
    elif options.order == "random":
        mixed = np.argsort(bits(np.arange(len(index)), "look", options.seed))
        lines, how = [np.sort(mixed[: options.n])], f"at random (seed {options.seed})"
    else:
        lines, how = [np.arange(min(options.n, len(index)))], "the first"
    views = [[_view(index, labels, number) for number in ids.tolist()] for ids in lines]
    amount = f"of {counted(total, 'sample')}" if first is None else _UNKNOWN
    notes = [f"labels were read of {len(index)} of {total} samples"] if len(index) < total else []
    place = folder_of(index.shards[0].path) or "."
    return Peek(views, f"{place}: {sum(map(len, lines))} {amount}, {how}", notes)


def _view(index: Index, labels: Sequence[ColumnInfo], number: int) -> SampleView:
    """Return a sample. Only members that can be shown are read; near ones in one request."""
    view = SampleView(
        index.key(number), index.shard_with(number).shown, int(index.offsets.start[number])
    )
    names = {label.place: label.name for label in labels}
    values = {
        names.get(column.place, column.name): column.take([number])[0].as_py()
        for column in index.columns
        if column.place in names or column.is_joined
    }
    view.labels = {name: text_of(value) for name, value in values.items() if value is not None}
    fields = {label.field for label in labels}
    sizes = {name: size for name, _, size in index.members(number)}
    view.fields |= {name: format_size(size) for name, size in sizes.items()}
    shown = [n for n in sizes if sizes[n] <= _MAX_BYTES and (n in fields or is_shown(n))]
    try:
        sample = dict(index.read([number], shown))[number]
    except DamageError as error:
        view.error = str(error)
        return view
    # masks and boxes are drawn over their image
    for name in sorted(sample, key=lambda name: is_mask(name) or is_boxes(name)):
        view.fields.pop(name)
        view.add(name, sample, labels)
    return view


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
    known = {label.name: label for label in known_labels(index)}
    fields = {field: ColumnInfo(field, "class", field) for field in index.fields}
    _check_name(f"there is no label {name!r}", name, [*(known | fields)])
    return (fields | known)[name]


def _by_class(
    index: Index, wanted: PeekOptions, labels: Sequence[ColumnInfo]
) -> tuple[list[Ints], str]:
    """Return (samples of each class, how): n of each wanted class, or n evenly over all classes.

    labels: the only label with classes. Evenly: one of each class, then a second of each, and so on.
    """
    names = ", ".join(label.name for label in labels) or "none of these shards"
    refuse(len(labels) != 1, f"choose the label with the classes (label): {names}.")
    ids, codes, held = _class_codes(index, labels[0])
    known = labels[0].classes or sorted(held, key=lambda name: (len(name), name))
    for name in wanted.classes:
        _check_name(f"the label {labels[0].name!r} has no class {name!r}", name, known)
    draws = bits(ids, "look", wanted.seed)
    order = np.lexsort((draws, codes))
    ids, codes, draws = ids[order], codes[order], draws[order]
    turns = np.arange(len(codes)) - np.searchsorted(codes, codes)  # of a sample in its class
    if wanted.classes:
        chosen = np.flatnonzero(turns < wanted.n)
        how = f"{wanted.n} of each of {text_of(wanted.classes)}"
    else:
        chosen = np.lexsort((draws, turns))[: wanted.n]
        how = f"evenly over {counted(len(known), 'class')}"
    ids, codes = ids[chosen], codes[chosen]
    present = [held.index(name) for name in wanted.classes or known if name in held]
    lines = [np.sort(ids[codes == code]) for code in present if code in codes]
    if all(len(own) == 1 for own in lines):  # they share a line of the sheet
        lines = [np.concatenate([np.zeros(0, np.int64), *lines])]
    return lines, f"{how} (seed {wanted.seed})"


def _class_codes(index: Index, label: ColumnInfo) -> tuple[Ints, Ints, list[str]]:
    """Return (ids of samples, codes of their classes, names of codes). label: has a column.

    A sample of several classes occurs once for each.
    """
    values = next(column.values for column in index.columns if column.place == label.place)
    ids = np.arange(len(index))
    if pa.types.is_list(values.type):
        ids, values = np.asarray(pc.list_parent_indices(values), np.int64), values.flatten()
    coded = values.dictionary_encode()  # of classes, as it is
    codes = np.asarray(coded.indices.drop_null(), np.int64)
    return ids[np.asarray(coded.is_valid())], codes, list(map(str, coded.dictionary.to_pylist()))


def _check_name(problem: str, name: str, known: Sequence[str]) -> None:
    """Raise UsageError for a name that is not known, with one that resembles it."""
    near = "".join(f"Did you mean {word!r}? " for word in get_close_matches(name, known, 1, 0.5))
    refuse(name not in known, f"{problem}.", f"{near}Use one of: {text_of(known) or 'none'}.")
