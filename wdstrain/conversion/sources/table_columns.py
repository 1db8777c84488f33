"""Columns of a table: which are labels, which rows meet a condition, and fields of the others."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from wdstrain.conversion.label_kinds import KINDS
from wdstrain.conversion.listing import Part, field_name, tidy
from wdstrain.conversion.source_options import TableOptions
from wdstrain.conversion.sources.table_cells import Table, joined_column
from wdstrain.decode.formats import format_of
from wdstrain.errors import UsageError
from wdstrain.runtime.options import as_list
from wdstrain.shards.columns import as_label, inferred
from wdstrain.shards.where import TableRows, matching

_JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False)


def asked_labels(
    table: Table, options: TableOptions, image: list[str]
) -> list[tuple[str, str | None]]:
    """Return (column, kind or None) of each label."""
    asked = [_name_and_kind(label, table.columns) for label in as_list(options.label)]
    names = [*image, *(name for name, _ in asked)]
    if len(set(names)) < len(names):
        raise UsageError(
            f"a column is named twice: {', '.join(names)}. The image and each label must be "
            "different columns."
        )
    return asked


def _name_and_kind(label: str, columns: list[str]) -> tuple[str, str | None]:
    name, colon, kind = label.rpartition(":")
    if not colon or label in columns or name not in columns:
        return label, None
    if kind not in KINDS:
        raise UsageError(f"label={label!r}: the kind must be one of {', '.join(KINDS)}.")
    return name, kind


def check_column(table: Table, name: str) -> None:
    """Raise UsageError if a table lacks a column."""
    if name not in table.columns:
        raise UsageError(
            f"{table.name} has no column '{name}'. Use one of its columns: "
            f"{', '.join(table.columns)}.{joined_column(name, table.columns)}"
        )


def check_spellings(table: Table, name: str, chosen: npt.NDArray[np.bool_]) -> None:
    """Raise UsageError if two texts of a class column are one fraction, such as 1.1 and 1.10."""
    first: dict[float, str] = {}
    number = 0
    for texts, values in zip(table.batches([name], raw=[name]), table.batches([name]), strict=True):
        for cell, value in zip(texts.cells[name], values.cells[name], strict=True):
            number += 1
            if not isinstance(value, float) or not isinstance(cell, str) or value.is_integer():
                continue
            text = cell.strip()
            if chosen[number - 1] and first.setdefault(value, text) != text:
                raise UsageError(
                    f"{table.name}: the column '{name}' holds {first[value]} and {text}, which are "
                    "the same number but different names. Write both the same way if they are one "
                    f"class, or put a letter before each, such as v{text}."
                )


def chosen_rows(
    table: Table, cells: dict[str, list[Any]], where: str, count: int
) -> npt.NDArray[np.bool_]:
    """Return which of `count` rows meet a condition: bool[count]. cells: by column."""
    columns = [inferred(("json", name), values) for name, values in cells.items()]
    columns = [
        as_label(column, replace(column, kind="class", classes=table.classes[str(column.entry)]))
        if column.entry in table.classes and column.kind == "integer"
        else column
        for column in columns
    ]
    return matching(TableRows(tuple(columns), count, tuple(table.columns)), where)


# --- fields of columns that are neither image nor class ------------------------------------------


def json_fields(cells: dict[str, Any]) -> list[Part]:
    """Return the fields of columns: one json, and a field for each bytes value, which JSON lacks.

    In lists and dicts, bytes are replaced by the name of their field.
    """
    fields: list[Part] = []
    kept: dict[str, Any] = {}
    for name, value in cells.items():
        is_file = isinstance(value, dict) and set(value) == {"bytes", "path"}
        data = value.get("bytes") if is_file else value
        if isinstance(data, bytes):
            _without_bytes(data, _part_of_name(name), fields)
        else:
            kept[name] = _without_bytes(value, _part_of_name(name), fields)
    return [*fields, *([("json", _JSON.encode(kept).encode())] if kept else [])]


def _without_bytes(value: Any, name: str, fields: list[Part]) -> Any:
    """Return a value whose bytes are replaced by names of fields, which are added to `fields`."""
    if isinstance(value, bytes):
        found = format_of(value)
        kind = "bin" if found is None else found.extensions[0]
        fields.append((field_name(f"{name}.{kind}"), value))
        return fields[-1][0]
    if isinstance(value, list):
        return [_without_bytes(item, f"{name}.{i}", fields) for i, item in enumerate(value)]
    if isinstance(value, dict):
        return {
            key: _without_bytes(item, f"{name}.{_part_of_name(key)}", fields)
            for key, item in value.items()
        }
    return value


@lru_cache(maxsize=1024)
def _part_of_name(column: str) -> str:
    """Return the name of a column as a part of a field's name."""
    return tidy(column.replace("/", "_"))
