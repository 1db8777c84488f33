"""A table as a source: images, label columns, and all other columns as JSON.

Labels are decided from all rows before the first is packed (`label_kinds`). A single class column
is stored as `cls`, as all readers expect; others are read from the JSON by their column. Images
that are files make a `Listing`; images whose bytes are in the table make a `Stream`, so that memory
does not grow with them.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from wdstrain.conversion.classes import check_classes, fixed_classes, look_alikes, stated_classes
from wdstrain.conversion.label_kinds import decide
from wdstrain.conversion.listing import (
    BadSample,
    BadSamples,
    Keys,
    Sample,
    Source,
    file_mark,
)
from wdstrain.conversion.source_options import TableOptions
from wdstrain.conversion.sources.table_cells import Changes, Table
from wdstrain.conversion.sources.table_columns import (
    asked_labels,
    check_column,
    check_spellings,
    chosen_rows,
    json_fields,
)
from wdstrain.conversion.sources.table_files import FrameTable, read_files
from wdstrain.conversion.sources.table_images import Image, ImageColumn, PathRule, bytes_image
from wdstrain.conversion.sources.table_paths import TableFiles, find_files
from wdstrain.errors import SampleError, SourceError
from wdstrain.runtime.machine import collector_paused
from wdstrain.shards.kinds import ColumnInfo
from wdstrain.storage.remote import is_remote

# options that decide the bytes of samples
_OF_SAMPLES = ("image", "label", "root", "header", "where", "classes", "group_by", "split_by")


@collector_paused()
def open_table(options: TableOptions) -> Source:
    """Return the rows of a table as a source.

    options.table: a file, folder or glob, an address hf://datasets/OWNER/NAME, several of them, or
    a pandas DataFrame. Decisions about labels and images are in `source["decided"]`. Raises
    UsageError for columns that are missing or ambiguous, SourceError for a table that cannot be
    read.
    """
    table = options.table
    bad_samples = BadSamples(collect=options.on_error == "skip")
    files = None if _is_frame(table) else find_files(table)
    opened = (
        FrameTable(table)
        if files is None
        else read_files(files.name, files.paths, bad_samples, header=options.header)
    )
    reading = _Rows(opened, files, options)
    if reading.images.holds_bytes:
        return reading.stream()
    return reading.listing(bad_samples)


def _is_frame(table: Any) -> bool:
    return hasattr(table, "columns") and hasattr(table, "to_dict")


class _Rows:
    """The rows of a table that meet the condition, with what was decided for all of them."""

    def __init__(self, table: Table, files: TableFiles | None, options: TableOptions) -> None:
        self._table, self._files, self._options = table, files, options
        self.images = ImageColumn(table, options.image)
        asked = asked_labels(table, options, [] if self.images.kept else self.images.columns)
        stratify = options.stratify
        deciding = (*(name for name, _ in asked), options.group_by, options.split_by, stratify)
        for name in deciding:
            if name is not None:
                check_column(table, name)
        self._read(asked, stratify)
        self.labels = self._decide(asked)
        classes = [label for label in self.labels if label.is_class]
        self._as_cls = classes[0].name if len(classes) == len(self.labels) == 1 else None
        if self._as_cls is not None:
            self.labels = (replace(classes[0], field="cls", entry=None),)
        self._stratum = stratify or (classes[0].name if classes else None)
        self._numbers = {
            name: str(number).encode()
            for number, name in enumerate(classes[0].classes if classes else ())
        }
        has_file_splits = files is not None and not options.split_by and not options.split
        self._file_splits = files.splits() if files is not None and has_file_splits else {}
        self._decided += _split_lines(self._file_splits)

    def _read(self, asked: list[tuple[str, str | None]], stratify: str | None) -> None:
        """Read the columns of labels, splits, groups and conditions.

        The others are read too, to count the values that JSON cannot hold.
        """
        table, options, images = self._table, self._options, self.images
        paths = [] if images.holds_bytes else images.columns
        deciding = (*(name for name, _ in asked), options.group_by, options.split_by, stratify)
        kept = {name for name in deciding if name is not None}
        if options.where is not None:  # a superset of the columns that it names
            kept |= {name for name in table.columns if name in options.where} - table.binary
        columns = [name for name in table.columns if name not in table.binary or name in kept]
        if images.holds_bytes and not table.binary:  # of a DataFrame
            columns = [name for name in columns if name not in images.columns]
        self._changes: Changes = {}
        self._cells: dict[str, list[Any]] = {name: [] for name in columns if name in kept}
        self._paths: list[str] = []
        count = 0
        for batch in table.batches(columns, changes=self._changes):
            count += len(batch.rows)
            for name, cells in self._cells.items():
                cells += batch.cells[name]
        for batch in table.batches(paths, raw=paths) if paths else ():
            cells = [batch.cells[name] for name in paths]
            self._paths += [
                images.path(dict(zip(paths, row, strict=True))) for row in zip(*cells, strict=True)
            ]
        if not count:
            raise SourceError(f"{table.name} has no rows that can be read. Check the file.")
        self._chosen = np.ones(count, np.bool_)
        if options.where is not None:
            self._chosen = chosen_rows(table, self._cells, options.where, count)
            if not self._chosen.any():
                raise SourceError(
                    f"{table.name}: none of {count} rows meets where={options.where!r}. Change the "
                    f"condition."
                )
            places = np.flatnonzero(self._chosen).tolist()
            self._cells = {c: [cells[i] for i in places] for c, cells in self._cells.items()}
            self._paths = [self._paths[i] for i in places] if paths else []

    def _decide(self, asked: list[tuple[str, str | None]]) -> tuple[ColumnInfo, ...]:
        """Return the labels of all rows; their values and bad rows are kept."""
        table, options = self._table, self._options
        fixed = fixed_classes(options.classes, options.like, asked)
        for name, kind in asked:
            if kind == "class":
                check_spellings(table, name, self._chosen)
        decisions = [
            decide(
                table.name,
                name,
                kind or (fixed[name].kind if name in fixed else None),
                self._cells[name],
                table.classes.get(name, ()),
                fixed[name].classes if name in fixed else (),
            )
            for name, kind in asked
        ]
        self.labels = tuple([decision.label for decision in decisions])
        self._values = {decision.label.name: decision.values for decision in decisions}
        self._bad: dict[int, str] = {}
        for decision in decisions:
            self._bad = {**decision.bad, **self._bad}
        if len(self._bad) == int(self._chosen.sum()):
            raise SourceError(
                f"{table.name}: no row has values for all labels ({', '.join(self._values)}). Name "
                "other columns."
            )
        self._decided = [line for decision in decisions for line in decision.lines]
        return tuple(decision.label for decision in decisions)

    # --- sources ----------------------------------------------------------------------------------

    def listing(self, bad_samples: BadSamples) -> Source:
        """Return the rows whose images are files."""
        files, root = self._files, self._options.root
        base = root if root is not None else files.base if files is not None else ""
        paths = [path for path in self._paths if path]
        rule = PathRule(base, paths, has_root=root is not None, is_file=files is not None)
        keys, items = Keys(), list[Sample]()
        firsts: dict[str, str] = {}  # an image -> the key of the first row that has it
        find = lambda place, cell, file, row: rule.image(self._paths[place])  # noqa: E731
        for entry in self._samples(find):
            if isinstance(entry, BadSample):
                bad_samples.put(entry)
                continue
            image, sample = entry
            stem = os.path.splitext(image.name)[0]
            key = keys.key(stem)
            name = image.name if key != stem else ""
            identity = firsts.setdefault(image.identity, key)
            items.append(sample._replace(key=key, name=name, identity=identity))
        twice = len(items) - len(firsts)
        again = [f"images: {twice} rows name an image that an earlier row names too"]
        decided = [rule.decision(), *self._lines(), *(again if twice else [])]
        return Source(
            self._table.name,
            lambda: [*bad_samples.bad, *items],
            lambda: self.labels,
            _source(self._options, self.labels, decided),
            ignored=self._ignored(),
            stratum=self._stratum or "",
            has_files=True,
        )

    def stream(self) -> Source:
        """Return the rows whose images are bytes in the table."""
        files, column = self._files, self.images.columns[0]

        def find(place: int, cell: Any, file: str, row: int) -> Image:
            prefix = "" if files is None else files.key_prefix(file)
            return bytes_image(cell, f"{prefix}row-{row:09d}")

        def samples() -> Iterator[Sample | BadSample]:
            for entry in self._samples(find):
                if isinstance(entry, BadSample):
                    yield entry
                else:
                    image, sample = entry
                    key = os.path.splitext(image.name)[0]
                    yield sample._replace(key=key, identity=image.identity)

        local = files is not None and not any(map(is_remote, files.paths))
        asked = [getattr(self._options, name) for name in _OF_SAMPLES]
        return Source(
            self._table.name,
            samples,
            lambda: self.labels,
            _source(
                self._options,
                self.labels,
                [f"images: bytes in the column '{column}'", *self._lines()],
            ),
            total=int(self._chosen.sum()),
            mark=f"{file_mark(*files.paths)} {asked} {self.labels}" if files and local else None,
            ignored=self._ignored(),
            stratum=self._stratum or "",
        )

    def _ignored(self) -> dict[str, int]:
        left = len(self._chosen) - int(self._chosen.sum())
        return {"rows that do not meet the condition": left} if left else {}

    def _lines(self) -> list[str]:
        """Return decisions and changes, except for the images."""
        lines = list(self._decided)
        split_by, images = self._options.split_by, self.images
        if split_by is not None:
            splits = dict.fromkeys(map(_text, self._cells[split_by]))
            lines += [
                f"split {split_by}: the splits {alike} look alike" for alike in look_alikes(splits)
            ]
        for name, counts in self._changes.items():
            if name not in self._values and (images.kept or name not in images.columns):
                lines += [
                    f"column {name}: {change} in json ({count} value{'s' * (count > 1)})"
                    for change, count in counts.items()
                ]
        return lines

    # --- rows -------------------------------------------------------------------------------------

    def _samples(self, find: _Find) -> Iterator[tuple[Image, Sample] | BadSample]:
        """Yield (image, sample without a key) of the rows that can be used, and the others."""
        images, table = self.images, self._table
        apart = [] if images.kept else images.columns
        columns = [name for name in table.columns if name not in apart or images.holds_bytes]
        image_column = apart[0] if images.holds_bytes else None
        number = place = -1  # of all rows, and of those that meet the condition
        for batch in table.batches(columns):
            for i, row in enumerate(batch.rows):
                number += 1
                if not self._chosen[number]:
                    continue
                place += 1
                cells = {name: values[i] for name, values in batch.cells.items()}
                reason = self._bad.get(place)
                cell = None if image_column is None else cells.pop(image_column)
                split = self._split(place, batch.file)
                if reason is None and self._options.split_by and not split:
                    reason = f"the split column '{self._options.split_by}' is empty"
                if reason is not None:
                    yield BadSample(batch.file, row, "", reason)
                    continue
                try:
                    image = find(place, cell, batch.file, row)
                    parts = self._parts(image, cells, place)
                except (SourceError, SampleError, ValueError) as error:
                    # ValueError: for a NUL or a lone surrogate in a path
                    shown = self._paths[place] if self._paths else _path_shown(cell)
                    yield BadSample(batch.file, row, shown, str(error))
                    continue
                of = (self._group(place), self._stratum_of(place))
                yield image, Sample(None, parts, split, *of, row)

    def _parts(self, image: Image, cells: dict[str, Any], place: int) -> list[Any]:
        cells |= {name: values[place] for name, values in self._values.items()}
        parts: list[Any] = [(image.field, image.content)]
        if self._as_cls is not None:
            parts.append(("cls", self._numbers[str(cells.pop(self._as_cls))]))
        parts += json_fields(cells)
        fields = [name for name, _ in parts]
        if len(set(fields)) < len(fields):
            raise SampleError(
                f"two of its columns would be one field: {', '.join(fields)}; rename one of them"
            )
        return parts

    def _split(self, place: int, file: str) -> str:
        if self._options.split_by is not None:
            return _text(self._cells[self._options.split_by][place])
        return self._file_splits.get(file, "")

    def _group(self, place: int) -> str:
        """Return the group of a row; "" for a row without one, which is a group by itself."""
        column = self._options.group_by
        value = None if column is None else self._cells[column][place]
        text = _text(value + 0.0 if isinstance(value, float) else value)  # -0.0 equals 0.0
        return f"{column}={text}" if text else ""

    def _stratum_of(self, place: int) -> str:
        name = self._stratum
        if name is None:
            return ""
        return str((self._values[name] if name in self._values else self._cells[name])[place])


_Find = Callable[[int, Any, str, int], Image]  # (place, cell, file, row) -> the image of a row


def _source(
    options: TableOptions, labels: Sequence[ColumnInfo], decided: list[str]
) -> dict[str, Any]:
    """Return the provenance of a set that is made of a table."""
    asked = {"group_by": options.group_by, "split_by": options.split_by, "where": options.where}
    return {
        "kind": "table",
        "image": options.image,
        "labels": [label.name for label in labels],
        **{name: value for name, value in asked.items() if value is not None},
        **stated_classes(check_classes(options.classes)),
        "decided": decided,
    }


def _split_lines(splits: dict[str, str]) -> list[str]:
    if not splits:
        return []
    counts = ", ".join(f"{split} ({count})" for split, count in Counter(splits.values()).items())
    return [f"splits: those in the names of the files, {counts}"]


def _text(value: Any) -> str:
    return "" if value is None else str(value).strip()


def _path_shown(cell: Any) -> str:
    """Return the path or value in a cell without an image, for an error."""
    cell = cell.get("path") if isinstance(cell, dict) else cell
    return str(cell)[:200] if isinstance(cell, (str, int, float)) else ""
