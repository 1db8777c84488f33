"""A table to a listing: one column of pictures, label columns, and every other column kept as JSON.

A label column of whole numbers from 0, of words or of booleans is a class, one with other numbers a number, one with lists
(or with `a|b|c`, if it is asked for as `name:multi`) several classes at once; `name:class`, `name:number` and `name:multi` say
it outright. A single class column is stored as `cls`, as everybody's readers expect; others are read from the JSON by their
column. A picture is a path, or bytes as parquet files of the Hugging Face kind hold them.
"""

from __future__ import annotations

import json
import os
from typing import Any

from wdstrain.errors import SampleError, SourceError, UsageError
from wdstrain.indexing import Label
from wdstrain.packing.collector import collector_paused
from wdstrain.packing.listing import Bad, Item, Keys, Listing, Quarantine, field_name, image_field, tidy
from wdstrain.packing.pictures import field_of, looks_like_image
from wdstrain.packing.tables import Columns, read_table

_HIGHEST_CLASS = 100_000  # whole numbers beyond are ids of something, not classes counted from 0
_MOST_CLASSES = 1000  # more distinct whole numbers than this are a quantity, not classes
_KINDS = ("class", "number", "multi")


@collector_paused()
def list_table(
    table: Any,
    *,
    image: str,
    labels: list[str],
    root: str | None = None,
    header: bool = True,
    group_by: str | None = None,
    split_by: str | None = None,
    collect: bool = False,
) -> Listing:
    """The rows of a table: a CSV, TSV, JSON lines or parquet file, or a pandas DataFrame.

    root: what relative picture paths begin at, and absolute ones of another machine are looked for below; default the
    table's folder. group_by: a column whose equal values come to one side of a split. split_by: a column that names each
    row's split. collect: bad rows are listed as such, else the first raises SourceError, with its row.
    Raises UsageError for columns that do not exist.
    """
    quarantine = Quarantine(collect=collect)
    columns = read_table(table, quarantine, header=header)
    known = list(columns.values)
    wanted = [_kind(name, known) for name in labels]
    names = [image, *(name for name, _ in wanted)]
    if len(set(names)) < len(names):
        raise UsageError(f"a column is named twice: {', '.join(names)}. The picture and each label are columns of their own.")
    for name in [*names, *filter(None, (group_by, split_by))]:
        if name not in known:
            raise UsageError(f"{columns.name} has no column '{name}'. Its columns are: {', '.join(known)}")
    columns = _with_labels(columns, wanted, quarantine)
    found = tuple(_label(columns, name, kind) for name, kind in wanted)
    for label in found:
        if label.kind == "multi":  # one class by itself is a list of one
            cells = columns.values[label.name]
            columns.values[label.name] = [cell if isinstance(cell, list) else [cell] for cell in cells]
    classes = [label for label in found if label.kind == "class"]
    as_cls = classes[0].name if len(classes) == len(found) == 1 else None
    if as_cls is not None:
        found = (Label(as_cls, "class", "cls", classes=classes[0].classes),)
    stratum = classes[0] if classes else None
    base = root if root is not None else "" if not isinstance(table, (str, os.PathLike)) else os.path.dirname(table)
    keys, items = Keys(), []
    above = _above([cell for cell in columns.values[image] if isinstance(cell, str)]) if root is None else None
    for number, row in enumerate(columns.rows):
        if split_by is not None and columns.values[split_by][number] is None:
            quarantine.put(Bad(columns.name, row, "", f"the split column '{split_by}' is empty"))
            continue
        try:
            name, picture = _picture(columns.values[image][number], base, f"row-{row:09d}", above)
            parts: list[tuple[str, bytes | str]] = [picture]
            if as_cls is not None:
                parts.append(("cls", _class(columns.values[as_cls][number], found[0]).encode()))
            rest = {c: values[number] for c, values in columns.values.items() if c not in (image, as_cls)}
            parts += _rest(rest)
        except (SourceError, SampleError, ValueError) as error:  # a lone surrogate or a NUL is a ValueError
            quarantine.put(Bad(columns.name, row, str(columns.values[image][number])[:200], str(error)))
            continue
        stem = os.path.splitext(name)[0]
        key = keys.key(stem)
        items.append(
            Item(
                key,
                tuple(parts),
                split=str(columns.values[split_by][number]) if split_by else "",
                group=_group(group_by, columns.values[group_by][number]) if group_by else "",
                stratum=_name(columns.values[stratum.name][number], stratum) if stratum else "",
                row=row,
                name=name if key != stem else "",
            )
        )
    source = {"kind": "table", "image": image, "labels": [label.name for label in found]}
    return Listing(columns.name, items, found, source, bad=quarantine.bad)


def _kind(name: str, known: list[str]) -> tuple[str, str | None]:
    before, colon, kind = name.rpartition(":")
    if colon and before in known and kind not in _KINDS and name not in known:
        raise UsageError(f"'{name}': a label is of one of the kinds {', '.join(_KINDS)}, and '{kind}' is none of them.")
    return (before, kind) if colon and kind in _KINDS and name not in known else (name, None)


def _group(column: str, value: Any) -> str:
    """The group of a row; a row that names none is one by itself."""
    return "" if value is None else f"{column}={value}"


# --- labels ----------------------------------------------------------------------------------------------------------


def _with_labels(columns: Columns, wanted: list[tuple[str, str | None]], quarantine: Quarantine) -> Columns:
    """The rows whose labels can be used; the others go to the quarantine. Texts of several classes become lists."""
    values = dict(columns.values)
    for name, kind in wanted:
        if kind == "multi":
            values[name] = [_parted(cell) for cell in values[name]]
    bad = [False] * len(columns.rows)
    for name, _ in wanted:
        for number, value in enumerate(values[name]):
            reason = None
            if value is None:
                reason = f"the label column '{name}' is empty"
            elif (isinstance(value, str) and value.strip().lower().lstrip("+-") in ("nan", "inf", "infinity")) or (
                isinstance(value, float) and value in (float("inf"), float("-inf"))
            ):
                reason = f"the label column '{name}' holds {value!r}"
            if reason and not bad[number]:
                bad[number] = True
                quarantine.put(Bad(columns.name, columns.rows[number], "", reason))
    if not any(bad):
        return Columns(columns.name, values, columns.rows)
    kept = [number for number, one in enumerate(bad) if not one]
    if not kept:
        raise SourceError(f"{columns.name}: no row has all its labels ({', '.join(name for name, _ in wanted)}).")
    return Columns(columns.name, {c: [cells[i] for i in kept] for c, cells in values.items()}, [columns.rows[i] for i in kept])


def _parted(cell: Any) -> Any:
    """`a|b` as a list."""
    if cell is None or isinstance(cell, list):
        return cell
    return [part.strip() for part in str(cell).split("|") if part.strip()]


def _label(columns: Columns, name: str, kind: str | None) -> Label:
    values, file = columns.values[name], columns.name
    lists = any(isinstance(value, list) for value in values)
    if kind == "multi" or (kind is None and lists):
        members = {str(one) for value in values for one in (value if isinstance(value, list) else [value])}
        return Label(name, "multi", "json", name, tuple(sorted(members)))
    if lists or any(isinstance(value, (dict, bytes)) for value in values):
        raise UsageError(
            f"{file}: the column '{name}' holds lists or bytes, which are no class and no number. Use {name}:multi"
        )
    truths = all(isinstance(value, bool) for value in values)
    whole = not truths and all(isinstance(value, int) and not isinstance(value, bool) and value >= 0 for value in values)
    words = any(isinstance(value, str) for value in values)
    if kind == "number" and words:
        word = next(value for value in values if isinstance(value, str))
        raise UsageError(f"{file}: the column '{name}' is asked for as a number and holds {word!r}. Use {name}:class.")
    if kind == "class" or (kind is None and (words or truths or (whole and len(set(values)) <= _MOST_CLASSES))):
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


def _name(value: Any, label: Label) -> str:
    return label.classes[label.classes.index(str(value))]


# --- pictures --------------------------------------------------------------------------------------------------------


def _picture(cell: Any, base: str, fallback: str, above: str | None) -> tuple[str, tuple[str, bytes | str]]:
    """(name, (field, path or bytes)) of a cell. above: the folder of all absolute paths, which is no part of names;
    None if they lie below base.

    Raises SourceError saying why it is no picture.
    """
    if isinstance(cell, dict) and ("bytes" in cell or "path" in cell):  # as Hugging Face data sets hold pictures
        if cell.get("bytes") is None:
            return _picture(cell.get("path"), base, fallback, above)
        name = cell.get("path") or fallback
        return str(name), (field_of(cell["bytes"]), cell["bytes"])
    if isinstance(cell, bytes):
        return fallback, (field_of(cell), cell)
    if not isinstance(cell, str) or not cell.strip():
        raise SourceError("there is no path of a picture")
    name = cell.strip()
    field = image_field(name.replace("\\", "/"))
    if field is None:
        raise SourceError("the picture has no extension of an image")
    for below, path in _places(base, name, within=above is None):
        if os.path.isfile(path):
            return below.removeprefix(above or "") if below.startswith("/") else below, (field, path)
    raise SourceError("the picture is not there; --root says where relative paths begin")


def _places(base: str, name: str, *, within: bool) -> list[tuple[str, str]]:
    """(name of the sample, path) of each file a cell may mean: as it is written, with slashes of either kind, below base;
    for an absolute path, also ever shorter ends of it below base. within: those first, so that a name does not depend on what
    else this machine holds."""
    slashed = name.replace("\\", "/")
    places = [(slashed, os.path.join(base, one)) for one in (name, slashed)]
    ends: list[str] = []
    drive, _, rest = slashed.partition(":")
    if slashed.startswith("/") or (len(drive) == 1 and rest.startswith("/")):
        parts = [part for part in slashed.split("/") if part]
        ends = ["/".join(parts[first:]) for first in range(1, len(parts))]
    below = [(end, os.path.join(base, end)) for end in ends]
    return below + places if within else places + below


def _above(cells: list[str]) -> str:
    """The folder that all absolute paths lie in, with a slash at its end; nothing if there are none."""
    folders = {os.path.dirname(cell.strip().replace("\\", "/")) for cell in cells if cell.strip().startswith("/")}
    return os.path.join(os.path.commonpath(folders), "") if folders else ""


def _rest(row: dict[str, Any]) -> list[tuple[str, bytes | str]]:
    """The other columns of a row: one json, and a field of its own for bytes, which JSON cannot hold."""
    loose: list[tuple[str, bytes | str]] = []
    kept: dict[str, Any] = {}
    for name, value in row.items():
        data = value.get("bytes") if isinstance(value, dict) and set(value) == {"bytes", "path"} else value
        if isinstance(data, bytes):
            kind = field_of(data) if looks_like_image(data) else "bin"
            loose.append((field_name(f"{tidy(name)}.{kind}"), data))
        else:
            kept[name] = value
    text = json.dumps(kept, ensure_ascii=False, allow_nan=False, default=str) if kept else ""
    return [*loose, *([("json", text.encode())] if kept else [])]
