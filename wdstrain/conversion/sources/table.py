"""A table as a source: images, label columns, and all other columns as JSON.

Labels are decided from all rows before the first is packed (`labels`). A single class column is
stored as `cls`, as all readers expect; others are read from the JSON by their column. Images that
are files make a stored list; images whose bytes are in the table make a stream, so that memory does
not grow with them.

A column holds the paths of images, or a template such as `images/{id}.jpg` makes them of columns.
Relative paths begin at the root. Backslashes are slashes, as tables of Windows have them.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from hashlib import blake2b
from itertools import chain, compress, count, repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from wdstrain.conversion.encode import field_of
from wdstrain.conversion.labels import KINDS, Decision, decide, fixed_classes, stated_classes
from wdstrain.conversion.listing import (
    BadSample,
    BadSamples,
    Sample,
    Source,
    image_field,
    piece_of,
    reject,
)
from wdstrain.conversion.options import TableOptions
from wdstrain.conversion.sources.table_data import (
    Table,
    distinct,
    each,
    json_fields,
    read_table,
    values_of,
)
from wdstrain.errors import SampleError, SourceError
from wdstrain.runtime.machine import collector_paused
from wdstrain.runtime.options import as_list, refuse
from wdstrain.shards.columns import as_label, inferred
from wdstrain.shards.kinds import ColumnInfo
from wdstrain.shards.where import TableRows, matching
from wdstrain.storage.remote import shown_path

_COLUMN = re.compile(r"\{([^{}]+)\}")  # in a template


@collector_paused()
def open_table(options: TableOptions) -> Source:
    """Return the rows of a table as a source.

    options.table: a file, folder or glob, an address hf://datasets/OWNER/NAME, several of them, or
    a frame. Decisions about labels and images are in `source["decided"]`. Raises UsageError for
    columns that are missing or ambiguous, SourceError for a table that cannot be read.
    """
    bad = BadSamples(collect=options.on_error == "skip")
    return _Rows(read_table(options, bad), options).source(bad)


class _Rows:
    """The rows of a table that meet the condition, with what was decided for all of them."""

    def __init__(self, table: Table, options: TableOptions) -> None:
        self._table, self._options = table, options
        self._apart = [options.image] if options.image in table.columns else []
        # The columns of a template are data of their own: they stay beside the image.
        self._images = self._apart or list(dict.fromkeys(_COLUMN.findall(options.image)))
        asked = _asked_labels(table, options, self._apart)
        others = (options.group_by, options.split_by, options.stratify, options.text)
        named = (*(self._images or [options.image]), *asked, *filter(None, others))
        missing = [name for name in named if name not in table.columns]
        refuse(
            missing,
            f"{table.files.name} has no column '{', '.join(missing[:1])}'.",
            f"Use one of its columns: {', '.join(table.columns)}.",
        )
        self._chosen = _chosen_rows(table, options.where)
        fixed = fixed_classes(options.classes, options.like, list(asked.items()))
        self._labels = {name: self._decide(name, asked[name], fixed.get(name)) for name in asked}
        labels = [decision.label for decision in self._labels.values()]
        classes = next((label for label in labels if label.is_class), None)
        self._cls: dict[str, bytes] | None = None  # numbers of classes of the only label
        if classes is not None and len(labels) == 1:
            self._cls = {name: b"%d" % number for number, name in enumerate(classes.classes)}
            labels = [replace(classes, field="cls", entry=None)]
        self.labels: tuple[ColumnInfo, ...] = tuple(labels)
        self._stratum = options.stratify or ("" if classes is None else classes.name)
        self._has_files = not self._holds_bytes()
        base = table.files.base if options.root is None else os.fspath(options.root)
        self._base = base or ""
        # keys do not say where the folder is
        self._prefix = "/" if base is None else os.path.join(os.path.abspath(base), "")
        self._file_splits = {} if options.split_by else table.files.splits()

    def _decide(self, name: str, kind: str | None, fixed: ColumnInfo | None) -> Decision:
        table = self._table
        # 1.1 and 1.10 are one number, but two names
        codes, values = distinct(table.column(name, written=self._options.decimal == "."))
        return decide(
            table.files.name,
            name,
            kind or (fixed.kind if fixed else None),
            codes,
            values,
            np.bincount(codes[self._chosen], minlength=len(values)),
            table.classes.get(name, ()),
            fixed.classes if fixed else (),
        )

    # --- sources ----------------------------------------------------------------------------------

    def source(self, bad: BadSamples) -> Source:
        """Return the rows as a source. bad: rows that could not be read."""
        options, files, labels = self._options, self._table.files, self.labels
        images = (
            f"files; relative paths begin at {self._base or '.'}"
            if self._has_files
            else f"bytes in the column '{self._images[0]}'"
        )
        stated = {n: getattr(options, n) for n in ("group_by", "split_by", "where", "text")}
        about = {
            "kind": "table",
            "image": options.image,
            "labels": [label.name for label in labels],
            **{name: value for name, value in stated.items() if value is not None},
            **stated_classes(options.classes),
            "decided": [f"images: {images}", *self._lines()],
        }
        count = int(self._chosen.sum())
        left_out = len(self._chosen) - count
        return Source(
            files.name,
            lambda: chain(bad.bad, self._samples()),
            lambda: labels,
            about,
            count,
            ignored={"rows that do not meet the condition": left_out} if left_out else {},
            stratum=self._stratum,
            has_files=self._has_files,
        )

    def _holds_bytes(self) -> bool:
        """Return whether the images themselves are in the table."""
        return any(
            isinstance(cell.get("bytes") if isinstance(cell, dict) else cell, bytes)
            for _, _, columns in self._table.batches(self._apart)
            for cells in columns.values()
            for cell in cells
        )

    def _paths(self) -> Iterator[str]:
        """Return the path of each chosen row; "" if there is none. Numbers are as a CSV has them."""
        columns = [self._table.column(name, written=True) for name in self._images]
        return map(self._path, compress(zip(*map(each, columns), strict=True), self._chosen))

    def _path(self, cells: tuple[Any, ...]) -> str:
        texts = [
            _stripped(cell.get("path") if isinstance(cell, dict) else cell).replace("\\", "/")
            for cell in cells
        ]
        if self._apart or not all(texts):
            return texts[0] if self._apart else ""
        by_name = dict(zip(self._images, texts, strict=True))
        return _COLUMN.sub(lambda match: by_name[match[1]], self._options.image)

    def _lines(self) -> list[str]:
        """Return decisions and changes, except for the images."""
        lines = [line for decision in self._labels.values() for line in decision.lines]
        if self._file_splits:
            counts = Counter(self._file_splits.values()).items()
            some = ", ".join(f"{split} ({count})" for split, count in counts)
            again = ", drawn again" if self._options.split else ""
            lines.append(f"splits: those in the names of the files, {some}{again}")
        return lines + [
            f"column {name}: {change} in json ({count} value{'s' * (count > 1)})"
            for name, counts in self._table.changes.items()
            if name not in {*self._labels, *self._apart}
            for change, count in counts.items()
        ]

    # --- rows -------------------------------------------------------------------------------------

    def _samples(self) -> Iterator[Sample | BadSample]:
        """Yield the chosen rows as samples, whose name is that of the image."""
        paths, rows = self._paths() if self._has_files else repeat(""), count()
        for file, lines, columns in self._table.batches(self._table.columns):
            for line, row, *values in zip(lines, rows, *columns.values(), strict=False):
                if not self._chosen[row]:
                    continue
                cells, path = dict(zip(columns, values, strict=True)), next(paths)
                try:
                    yield self._sample(path, cells, file, line, row)
                except (SourceError, SampleError, ValueError) as error:
                    # ValueError: for a NUL or a lone surrogate in a path
                    yield BadSample(shown_path(file), line, path, str(error))

    def _sample(
        self,
        path: str,
        cells: dict[str, Any],
        file: str,
        line: int,
        row: int,
    ) -> Sample:
        """Return a sample of an image with the other columns of its row. Raises SampleError."""
        options = self._options
        split = _stripped(cells[options.split_by]) if options.split_by else ""
        group = _stripped(cells[options.group_by]) if options.group_by else ""
        for name, label in self._labels.items():
            code = label.codes[row]
            if code in label.bad:
                raise SampleError(label.bad[code])
            cells[name] = label.values[code]
        if options.split_by is not None and not split:
            raise SampleError(f"the split column '{options.split_by}' is empty")
        stratum = str(cells[self._stratum]) if self._stratum else ""
        cell = cells.pop(options.image, None)  # None: a template
        if self._has_files:
            sample = self._file_image(path)
        else:
            sample = _bytes_image(cell, f"{self._table.files.key_prefix(file)}row-{line:09d}")
        parts = list(sample.parts)
        if self._cls is not None:
            parts.append(("cls", self._cls[str(cells.pop(next(iter(self._labels))))]))
        if options.text is not None and (text := cells.pop(options.text)) is not None:
            parts.append(("txt", str(text).encode()))
        parts += json_fields(cells) if cells else []
        if len(dict(parts)) < len(parts):
            raise SampleError(
                f"two of its columns would be one field: {', '.join(field for field, _ in parts)}; "
                "rename one of them"
            )
        return Sample(
            sample.key,
            parts,
            split=split or ("" if options.split else self._file_splits.get(file, "")),
            group=f"{options.group_by}={group}" if group else "",
            stratum=stratum,
            row=line,
            name=sample.name,
            identity=sample.identity,
        )

    def _file_image(self, path: str) -> Sample:
        """Return a sample of the image at a path. Raises SourceError."""
        if not path:
            raise SourceError("there is no path of an image")
        field, file = image_field(path), os.path.join(self._base, path)
        if field is None:
            raise SourceError("the path has no extension of an image")
        if not os.path.isfile(file):
            raise SourceError(
                "the image is not there; check the option root, which says where relative paths "
                "begin, and the permissions"
            )
        name = os.path.normpath(path).removeprefix(self._prefix) if path[0] == "/" else path
        key, parts = os.path.splitext(name)[0], [(field, piece_of(file))]
        return Sample(key, parts, name=name, identity=os.path.abspath(file))


def _asked_labels(table: Table, options: TableOptions, image: list[str]) -> dict[str, str | None]:
    """Return {column: kind or None} of each label."""
    asked: dict[str, str | None] = {}
    names = [*image, *filter(None, [options.text])]
    for label in as_list(options.label):
        name, _, kind = label.rpartition(":")
        is_stated = name in table.columns and label not in table.columns
        refuse(
            is_stated and kind not in KINDS,
            f"{{label}}: the kind must be one of {', '.join(KINDS)}.",
            label=label,
        )
        names.append(name if is_stated else label)
        asked[names[-1]] = kind if is_stated else None
    refuse(
        len(set(names)) < len(names),
        f"a column is named twice: {', '.join(names)}. The image and each label must be "
        "different columns.",
    )
    return asked


def _chosen_rows(table: Table, where: str | None) -> npt.NDArray[np.bool_]:
    """Return which rows meet a condition: bool[n]."""
    if where is None:
        return np.ones(len(table), np.bool_)
    named = [name for name in table.cells if name in where]  # a superset of the columns in it
    columns = [inferred(("json", name), values_of(table.cells[name])) for name in named]
    for place, name in enumerate(named):
        column, classes = columns[place], table.classes.get(name)
        if classes is not None and column.kind == "integer":
            columns[place] = as_label(column, replace(column, kind="class", classes=classes))
    chosen = matching(TableRows(tuple(columns), len(table), tuple(table.columns)), where)
    reject(
        not chosen.any(),
        f"{table.files.name}: none of {len(table)} rows meets {{where}}.",
        "Change the condition.",
        where=where,
    )
    return chosen


def _stripped(value: Any) -> str:
    value = value + 0.0 if isinstance(value, float) else value  # -0.0 equals 0.0
    return "" if value is None else str(value).strip()


# --- images ---------------------------------------------------------------------------------------


def _bytes_image(cell: Any, name: str) -> Sample:
    """Return a sample of the image in a cell. name: of the image, if the cell has no path.

    Raises SourceError if it is no image.
    """
    if isinstance(cell, dict):
        name, cell = str(cell.get("path") or name), cell.get("bytes")
    if not isinstance(cell, bytes):
        raise SourceError("there are no bytes of an image")
    identity = blake2b(cell, digest_size=16).hexdigest()
    return Sample(os.path.splitext(name)[0], [(field_of(cell), cell)], identity=identity)
