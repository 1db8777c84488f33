"""Fields of the columns that are neither image nor class: JSON, and bytes beside it."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from wdstrain.conversion.images import field_of, looks_like_image
from wdstrain.conversion.listing import Part, field_name, tidy
from wdstrain.errors import SourceError

_JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False)


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
        try:
            kind = field_of(value) if looks_like_image(value) else "bin"
        except SourceError:  # the format has several extensions
            kind = "bin"
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
