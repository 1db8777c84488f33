"""A CSV or TSV table to a listing: one column of image paths, label columns, and every other column kept as JSON.

A label column of whole numbers from 0 or of words is a class, one with other numbers is a number; `name:class` and
`name:number` say it outright. A single class column is stored as `cls`, as everybody's readers expect; several are read
from the JSON by their column, where numbers always are.
"""

from __future__ import annotations

import csv
import json
import os
import re
from typing import Any

from wdstrain.errors import SourceError, UsageError
from wdstrain.indexing import Label
from wdstrain.packing.listing import Item, Keys, Listing, image_field

# no leading zeros: 00123 is a name; and no more digits than a float keeps apart
_WHOLE = re.compile(r"[+-]?(0|[1-9]\d{0,14})")
_NUMBER = re.compile(r"[+-]?((0|[1-9]\d{0,14})(\.\d*)?|\.\d+)([eE][+-]?\d{1,2})?")
_HIGHEST_CLASS = 100_000  # whole numbers beyond are ids of something, not classes counted from 0
_MOST_CLASSES = 1000  # more distinct whole numbers than this are a quantity, not classes


def list_table(file: str, *, image: str, labels: list[str], root: str | None = None) -> Listing:
    """The rows of a table. `root`: what relative image paths begin at; default the table's folder.

    Raises SourceError for a missing file, an empty table, a ragged row, or a picture that is not there, with its row;
    UsageError for columns that do not exist.
    """
    header, rows, lines = _read(file)
    wanted = [_kind(name, header) for name in labels]
    names = [image, *(name for name, _ in wanted)]
    if len(set(names)) < len(names):
        raise UsageError(f"a column is named twice: {', '.join(names)}. The picture and each label are columns of their own.")
    for name in names:
        if name not in header:
            raise UsageError(f"{file} has no column '{name}'. Its columns are: {', '.join(header)}")
    columns = {name: _typed([row[i] for row in rows]) for i, name in enumerate(header) if name != image}
    found = tuple(_label(file, name, kind, columns[name], lines) for name, kind in wanted)
    classes = [label for label in found if label.kind == "class"]
    as_cls = classes[0].name if len(classes) == len(found) == 1 else None
    if as_cls is not None:
        found = (Label(as_cls, "class", "cls", classes=classes[0].classes),)
    keys, base, items = Keys(), root if root is not None else os.path.dirname(file), []
    for number, row in enumerate(rows):
        name = row[header.index(image)].strip()
        path = _find(base, name)
        field = image_field(name)
        if path is None or field is None:
            what = "is not there" if path is None else "has no extension of an image"
            raise SourceError(
                f"{file}, row {lines[number]}: the picture {name!r} {what}. Its paths begin at {base or '.'} (--root)."
            )
        parts: list[tuple[str, bytes | str]] = [(field, path)]
        if as_cls is not None:
            parts.append(("cls", _class(columns[as_cls][number], found[0]).encode()))
        rest = {column: values[number] for column, values in columns.items() if column != as_cls}
        if rest:
            parts.append(("json", json.dumps(rest, ensure_ascii=False).encode()))
        items.append(Item(keys.key(os.path.splitext(name.replace("\\", "/"))[0]), tuple(parts)))
    return Listing(items, found, {"kind": "table", "image": image, "labels": [label.name for label in found]})


def _read(file: str) -> tuple[list[str], list[list[str]], list[int]]:
    """The header, the rows, and the line of each row."""
    try:
        with open(file, encoding="utf-8-sig", newline="") as opened:
            reader = csv.reader(opened, delimiter="\t" if file.lower().endswith(".tsv") else ",", skipinitialspace=True)
            table = [(reader.line_num, row) for row in reader if row]
    except OSError as error:
        raise SourceError(f"{file} cannot be read: {error.strerror}. Check the path.") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise SourceError(f"{file} is no UTF-8 CSV table ({error}). Save it as one.") from error
    if len(table) < 2:
        raise SourceError(f"{file} has {len(table)} lines that are not blank; a header and at least one row are needed.")
    header = [name.strip() for name in table[0][1]]
    if any(_NUMBER.fullmatch(name) or image_field(name) for name in header):
        raise SourceError(
            f"{file}: its first line looks like data ({header[0][:40]!r} ...). Add a line that names the columns."
        )
    if len(set(header)) < len(header):
        raise SourceError(f"{file} names a column twice: {', '.join(header)}. Give each its own name.")
    for line, row in table[1:]:
        if len(row) != len(header):
            raise SourceError(f"{file}, row {line} has {len(row)} cells, the header {len(header)}. Mend the row.")
    return header, [row for _, row in table[1:]], [line for line, _ in table[1:]]


def _kind(name: str, header: list[str]) -> tuple[str, str | None]:
    before, colon, kind = name.rpartition(":")
    return (before, kind) if colon and kind in ("class", "number") and name not in header else (name, None)


def _typed(cells: list[str]) -> list[Any]:
    """The cells of a column as whole numbers, else as numbers, else as they are; empty cells are None."""
    texts = [cell.strip() for cell in cells]
    for kind, pattern in ((int, _WHOLE), (float, _NUMBER)):
        if all(not text or pattern.fullmatch(text) for text in texts):
            return [kind(text) if text else None for text in texts]
    return [cell if cell.strip() else None for cell in cells]


def _label(file: str, name: str, kind: str | None, values: list[Any], lines: list[int]) -> Label:
    if None in values:
        row = lines[values.index(None)]
        raise SourceError(f"{file}, row {row}: the label column '{name}' is empty. Fill it in or remove the row.")
    whole = all(isinstance(value, int) and value >= 0 for value in values)
    for row, value in zip(lines, values, strict=True):
        if isinstance(value, str) and value.strip().lower().lstrip("+-") in ("nan", "inf", "infinity"):
            raise SourceError(f"{file}, row {row}: the label column '{name}' holds {value!r}. Mend or remove the row.")
    words = any(isinstance(value, str) for value in values)
    if kind == "number" and words:
        word = next(value for value in values if isinstance(value, str))
        raise UsageError(f"{file}: the column '{name}' is asked for as a number and holds {word!r}. Use {name}:class.")
    if kind == "class" or (kind is None and (words or (whole and len(set(values)) <= _MOST_CLASSES))):
        if whole and max(values) > _HIGHEST_CLASS:
            raise UsageError(
                f"{file}: the column '{name}' holds whole numbers up to {max(values)}, too many to be classes counted from 0. "
                f"Use {name}:number, or number the classes."
            )
        if whole:  # numbers are kept as they are; the classes are all up to the largest
            return Label(name, "class", "json", name, tuple(map(str, range(max(values) + 1))))
        return Label(name, "class", "json", name, tuple(sorted(set(map(str, values)))))
    return Label(name, "number", "json", name)


def _class(value: Any, label: Label) -> str:
    return str(label.classes.index(str(value)))


def _find(base: str, name: str) -> str | None:
    """The file a cell means: relative to base or absolute, with slashes of either kind."""
    for one in (name, name.replace("\\", "/")):
        path = os.path.join(base, one)
        if os.path.isfile(path):
            return path
    return None
