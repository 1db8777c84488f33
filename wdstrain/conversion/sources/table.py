"""A table as a source: images, label columns, and all other columns as JSON.

Labels are decided from all rows before the first is packed (`labels`). A single class column is
stored as `cls`, as all readers expect; others are read from the JSON by their column. Images that
are files make a `Listing`; images whose bytes are in the table make a `Stream`, so that memory does
not grow with them.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import compress
from typing import Any

import numpy as np
import numpy.typing as npt

from wdstrain.conversion.classes import check_classes, fixed_classes, look_alikes, stated_classes
from wdstrain.conversion.labels import KINDS, Decision, decide
from wdstrain.conversion.listing import (
    BadSample,
    BadSamples,
    Keys,
    Part,
    Sample,
    Source,
    file_mark,
)
from wdstrain.conversion.source_options import TableOptions
from wdstrain.conversion.sources.table_cells import distinct, json_fields, plain
from wdstrain.conversion.sources.table_files import TableFiles, find_files
from wdstrain.conversion.sources.table_images import ImageColumn, PathRule, bytes_image
from wdstrain.conversion.sources.table_read import Table, is_frame, read_files, read_frame
from wdstrain.errors import SampleError, SourceError, UsageError
from wdstrain.runtime.machine import collector_paused
from wdstrain.runtime.options import as_list
from wdstrain.shards.columns import as_label, inferred
from wdstrain.shards.kinds import ColumnInfo
from wdstrain.shards.where import TableRows, matching
from wdstrain.storage.remote import is_remote, shown_path

# options that decide the bytes of samples
_OF_SAMPLES = ("image", "label", "root", "header", "where", "classes", "group_by", "split_by",
               "text", "decimal", "escape", "encoding")  # fmt: skip


@collector_paused()
def open_table(options: TableOptions) -> Source:
    """Return the rows of a table as a source.

    options.table: a file, folder or glob, an address hf://datasets/OWNER/NAME, several of them, or
    a frame. Decisions about labels and images are in `source["decided"]`. Raises UsageError for
    columns that are missing or ambiguous, SourceError for a table that cannot be read.
    """
    bad_samples = BadSamples(collect=options.on_error == "skip")
    files = None if is_frame(options.table) else find_files(options.table)
    table = read_frame(options.table) if files is None else read_files(files, options, bad_samples)
    rows = _Rows(table, files, options)
    return rows.stream(bad_samples) if rows.images.holds_bytes else rows.listing(bad_samples)


class _Rows:
    """The rows of a table that meet the condition, with what was decided for all of them."""

    def __init__(self, table: Table, files: TableFiles | None, options: TableOptions) -> None:
        self._table, self._files, self._options = table, files, options
        self.images = ImageColumn(table, options.image)
        asked = _asked_labels(table, options, [] if self.images.kept else self.images.columns)
        others = (options.group_by, options.split_by, options.stratify, options.text)
        for name in (*(name for name, _ in asked), *filter(None, others)):
            table.check_column(name)
        self._chosen = _chosen_rows(table, options.where)
        decisions = self._decide(asked)
        labels = [decision.label for decision in decisions]
        self._labels = {label.name: d for label, d in zip(labels, decisions, strict=True)}
        classes = [label for label in labels if label.is_class]
        self._as_cls = classes[0].name if len(classes) == len(labels) == 1 else None
        if self._as_cls is not None:
            labels = [replace(classes[0], field="cls", entry=None)]
        self.labels: tuple[ColumnInfo, ...] = tuple(labels)
        self._numbers = {
            name: str(number).encode()
            for number, name in enumerate(classes[0].classes if classes else ())
        }
        self._stratum = options.stratify or (classes[0].name if classes else None)
        file_splits = files.splits() if files is not None and not options.split_by else {}
        self._file_splits = {} if options.split else file_splits
        self._decided = [line for decision in decisions for line in decision.lines]
        if file_splits:
            counts = Counter(file_splits.values()).items()
            some = ", ".join(f"{split} ({count})" for split, count in counts)
            again = ", drawn again" * bool(options.split)
            self._decided.append(f"splits: those in the names of the files, {some}{again}")
        self._splits = self._texts(options.split_by, _stripped)
        self._groups = self._texts(options.group_by, _stripped)
        self._strata = self._texts(self._stratum, str)

    def _decide(self, asked: Sequence[tuple[str, str | None]]) -> list[Decision]:
        table, options, decisions = self._table, self._options, []
        fixed = fixed_classes(options.classes, options.like, asked)
        for name, kind in asked:
            known = fixed.get(name)
            codes, values = distinct(table.column(name))
            if kind == "class":  # 1.1 and 1.10 are one number, but two names
                texts = distinct(table.column(name, written=True))
                codes, values = max((codes, values), texts, key=lambda column: len(column[1]))
            decisions.append(
                decide(
                    table.name,
                    name,
                    kind or (known.kind if known else None),
                    codes[self._chosen],
                    values,
                    table.classes.get(name, ()),
                    known.classes if known else (),
                )
            )
        if decisions and np.any([np.isin(d.codes, list(d.bad)) for d in decisions], axis=0).all():
            raise SourceError(
                f"{table.name}: no row has values for all labels "
                f"({', '.join(decision.label.name for decision in decisions)}). Name other columns."
            )
        return decisions

    def _texts(self, name: str | None, text: Callable[[Any], str]) -> Callable[[int], str]:
        """Return a function from the number of a row to the text of its value in a column."""
        if name is None:
            return lambda place: ""
        label = self._labels.get(name) if text is str else None  # strata are classes
        codes, values = distinct(self._table.column(name))
        rows = codes[self._chosen] if label is None else label.codes
        texts = list(map(text, values if label is None else label.values))
        return lambda place: texts[rows[place]]

    # --- sources ----------------------------------------------------------------------------------

    def listing(self, bad_samples: BadSamples) -> Source:
        """Return the rows whose images are files."""
        files, root = self._files, self._options.root
        base = root if root is not None else files.base if files is not None else ""
        paths = list(compress(self.images.paths(self._table), self._chosen))
        has_root, is_file = root is not None, files is not None
        rule = PathRule(base, list(filter(None, paths)), has_root=has_root, is_file=is_file)
        keys, items = Keys(), list[Sample]()
        firsts: dict[str, str] = {}  # an image -> the key of the first row that has it
        for entry in self._samples(lambda row, *_: rule.image(paths[row]), paths):
            if isinstance(entry, BadSample):
                bad_samples.put(entry)
                continue
            stem = os.path.splitext(entry.name)[0]
            key = keys.key(stem)
            identity = firsts.setdefault(entry.identity, key)
            name = entry.name if key != stem else ""
            items.append(entry._replace(key=key, name=name, identity=identity))
        decided = [rule.decision(), *self._lines()]
        if twice := len(items) - len(firsts):
            decided.append(f"images: {twice} rows name an image that an earlier row names too")
        return self._source(lambda: [*bad_samples.bad, *items], decided, has_files=True)

    def stream(self, bad_samples: BadSamples) -> Source:
        """Return the rows whose images are bytes in the table."""
        files = self._files

        def find(row: int, cell: Any, file: str, line: int) -> Sample:
            prefix = "" if files is None else files.key_prefix(file)
            return bytes_image(cell, f"{prefix}row-{line:09d}")

        def samples() -> Iterator[Sample | BadSample]:
            yield from bad_samples.bad
            for entry in self._samples(find):
                if isinstance(entry, Sample):
                    entry = entry._replace(key=os.path.splitext(entry.name)[0], name="")
                yield entry

        local = files is not None and not any(map(is_remote, files.paths))
        asked = [getattr(self._options, name) for name in _OF_SAMPLES]
        return self._source(
            samples,
            [f"images: bytes in the column '{self.images.columns[0]}'", *self._lines()],
            total=int(self._chosen.sum()),
            mark=f"{file_mark(*files.paths)} {asked} {self.labels}" if files and local else None,
        )

    def _source(
        self,
        samples: Callable[[], Iterable[Sample | BadSample]],
        decided: list[str],
        **known: Any,
    ) -> Source:
        options = self._options
        asked = {"group_by": options.group_by, "split_by": options.split_by}
        asked |= {"where": options.where, "text": options.text}
        source = {
            "kind": "table",
            "image": options.image,
            "labels": [label.name for label in self.labels],
            **{name: value for name, value in asked.items() if value is not None},
            **stated_classes(check_classes(options.classes)),
            "decided": decided,
        }
        left = int((~self._chosen).sum())
        return Source(
            self._table.name,
            samples,
            lambda: self.labels,
            source,
            ignored={"rows that do not meet the condition": left} if left else {},
            stratum=self._stratum or "",
            **known,
        )

    def _lines(self) -> list[str]:
        """Return decisions and changes, except for the images."""
        lines = list(self._decided)
        split_by, images = self._options.split_by, self.images
        if split_by is not None:
            splits = dict.fromkeys(map(self._splits, range(int(self._chosen.sum()))))
            lines += [
                f"split {split_by}: the splits {alike} look alike" for alike in look_alikes(splits)
            ]
        apart = {*self._labels, *([] if images.kept else images.columns)}
        return lines + [
            f"column {name}: {change} in json ({count} value{'s' * (count > 1)})"
            for name, counts in self._table.changes.items()
            if name not in apart
            for change, count in counts.items()
        ]

    # --- rows -------------------------------------------------------------------------------------

    def _samples(
        self, find: Callable[[int, Any, str, int], Sample], paths: Sequence[str] = ()
    ) -> Iterator[Sample | BadSample]:
        """Yield the rows as samples, whose name is that of the image, without keys.

        find: returns a sample of the image, from the row, its cell, its file, and its line there.
        """
        images, table = self.images, self._table
        apart = [] if images.kept else images.columns
        columns = [name for name in table.columns if name not in apart or images.holds_bytes]
        number = place = -1  # of all rows, and of those that meet the condition
        for file, lines, columns_of in table.batches(columns):
            for i, line in enumerate(lines):
                number += 1
                if not self._chosen[number]:
                    continue
                place += 1
                cells = {name: values[i] for name, values in columns_of.items()}
                cell = cells.pop(apart[0]) if images.holds_bytes else None
                if reason := self._reason(place):
                    yield BadSample(shown_path(file), line, "", reason)
                    continue
                try:
                    sample = find(place, cell, file, line)
                    parts = [*sample.parts, *self._parts(sample.parts[0][0], cells, place)]
                except (SourceError, SampleError, ValueError) as error:
                    # ValueError: for a NUL or a lone surrogate in a path
                    shown = paths[place] if paths else ""
                    yield BadSample(shown_path(file), line, shown, str(error))
                    continue
                group = self._groups(place)
                yield sample._replace(
                    parts=parts,
                    split=self._file_splits.get(file) or self._splits(place),
                    group=f"{self._options.group_by}={group}" if group else "",
                    stratum=self._strata(place),
                    row=line,
                )

    def _reason(self, place: int) -> str:
        """Return why a row cannot be used, or ""."""
        for decision in self._labels.values():
            if decision.bad and (reason := decision.bad.get(decision.codes[place])):
                return reason
        split_by = self._options.split_by
        empty = split_by is not None and not self._splits(place)
        return f"the split column '{split_by}' is empty" if empty else ""

    def _parts(self, image: str, cells: dict[str, Any], place: int) -> list[Part]:
        """Return the fields beside the image, which must have other names than its own."""
        cells |= {name: d.values[d.codes[place]] for name, d in self._labels.items()}
        parts: list[Part] = []
        if self._as_cls is not None:
            parts.append(("cls", self._numbers[str(cells.pop(self._as_cls))]))
        if self._options.text is not None and (text := cells.pop(self._options.text)) is not None:
            parts.append(("txt", str(text).encode()))
        parts += json_fields(cells)
        fields = [image, *(name for name, _ in parts)]
        if len(set(fields)) < len(fields):
            raise SampleError(
                f"two of its columns would be one field: {', '.join(fields)}; rename one of them"
            )
        return parts


def _asked_labels(
    table: Table, options: TableOptions, image: list[str]
) -> list[tuple[str, str | None]]:
    """Return (column, kind or None) of each label."""
    asked: list[tuple[str, str | None]] = []
    for label in as_list(options.label):
        name, _, kind = label.rpartition(":")
        is_stated = name in table.columns and label not in table.columns
        if is_stated and kind not in KINDS:
            raise UsageError(f"label={label!r}: the kind must be one of {', '.join(KINDS)}.")
        asked.append((name, kind) if is_stated else (label, None))
    names = [*image, *filter(None, [options.text]), *(name for name, _ in asked)]
    if len(set(names)) < len(names):
        raise UsageError(
            f"a column is named twice: {', '.join(names)}. The image and each label must be "
            "different columns."
        )
    return asked


def _chosen_rows(table: Table, where: str | None) -> npt.NDArray[np.bool_]:
    """Return which rows meet a condition: bool[n]."""
    if where is None:
        return np.ones(len(table), np.bool_)
    named = [name for name in table.cells if name in where]  # a superset of the columns in it
    columns = [inferred(("json", name), plain(table.cells[name])) for name in named]
    columns = [
        as_label(column, replace(column, kind="class", classes=table.classes[str(column.entry)]))
        if column.entry in table.classes and column.kind == "integer"
        else column
        for column in columns
    ]
    chosen = matching(TableRows(tuple(columns), len(table), tuple(table.columns)), where)
    if not chosen.any():
        raise SourceError(
            f"{table.name}: none of {len(table)} rows meets where={where!r}. Change the condition."
        )
    return chosen


def _stripped(value: Any) -> str:
    value = value + 0.0 if isinstance(value, float) else value  # -0.0 equals 0.0
    return "" if value is None else str(value).strip()
