"""A table to a listing: one column of pictures, label columns, and every other column kept as JSON.

`kinds` decides which kind each label is. A single class column is stored as `cls`, as everybody's readers expect; others are
read from the JSON by their column. A picture is a path, or bytes as parquet files of the Hugging Face kind hold them.

One rule finds the pictures of all rows (`_Paths`), and a key depends on its own row alone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from hashlib import blake2b
from typing import Any

from wdstrain.errors import SampleError, SourceError, UsageError
from wdstrain.packing.collector import collector_paused
from wdstrain.packing.kinds import KINDS, Column, decide, look_alikes
from wdstrain.packing.listing import (
    Bad,
    Item,
    Keys,
    Listing,
    Quarantine,
    field_name,
    image_field,
    tidy,
)
from wdstrain.packing.pictures import field_of, looks_like_image
from wdstrain.packing.tables import Columns, joined_column, read_table

_JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False)


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

    root: what relative picture paths begin at (default: the table's folder), and absolute ones of another machine are looked
    for below. group_by: a column whose equal values come to one side of a split. split_by: a column that names each row's
    split. collect: bad rows are listed as such, else the first raises SourceError, with its row. What was decided is in
    `source["decided"]` of the result. Raises UsageError for columns that do not exist.
    """
    quarantine = Quarantine(collect=collect)
    columns = read_table(table, quarantine, header=header)
    known = list(columns.values)
    wanted = [_kind(name, known) for name in labels]
    names = [image, *(name for name, _ in wanted)]
    if len(set(names)) < len(names):
        raise UsageError(
            f"a column is named twice: {', '.join(names)}. The picture and each label are columns of their own."
        )
    for name in [*names, *filter(None, (group_by, split_by))]:
        if name not in known:
            raise UsageError(
                f"{columns.name} has no column '{name}'. Its columns are: {', '.join(known)}.{joined_column(name, known)}"
            )
    for name, kind in wanted:
        if kind == "class" and name in columns.spellings:
            one, other = columns.spellings[name]
            raise UsageError(
                f"{columns.name}: the column '{name}' holds {one} and {other}, which are one number and two names. Write both "
                f"the same way if they are one class; put a letter before each if they are two, such as v{other}."
            )
    decided = [
        decide(columns.name, name, kind, columns.values[name], columns.classes.get(name, ()))
        for name, kind in wanted
    ]
    columns = _with_labels(columns, decided, quarantine)
    found = tuple(one.label for one in decided)
    classes = [label for label in found if label.kind == "class"]
    as_cls = classes[0].name if len(classes) == len(found) == 1 else None
    if as_cls is not None:
        found = (replace(classes[0], field="cls", column=None),)
    stratum = classes[0].name if classes else None
    numbers = (
        {name: str(number).encode() for number, name in enumerate(classes[0].classes)}
        if classes
        else {}
    )
    paths = _Paths(table, root, columns.values[image])
    keys, items = Keys(), []
    pictures: dict[str | bytes, str] = {}  # a picture -> the key of the first row that names it
    for number, row in enumerate(columns.rows):
        split = "" if split_by is None else _text(columns.values[split_by][number])
        if split_by is not None and not split:
            quarantine.put(Bad(columns.name, row, "", f"the split column '{split_by}' is empty"))
            continue
        try:
            name, picture = _picture(columns.values[image][number], paths, f"row-{row:09d}")
            parts: list[tuple[str, bytes | str]] = [picture]
            if as_cls is not None:
                parts.append(("cls", numbers[str(columns.values[as_cls][number])]))
            parts += _rest(
                {
                    c: values[number]
                    for c, values in columns.values.items()
                    if c not in (image, as_cls)
                }
            )
            fields = [field for field, _ in parts]
            if len(set(fields)) < len(fields):
                raise SampleError(
                    f"two of its columns would be one field: {', '.join(fields)}; rename one of them"
                )
        except (
            SourceError,
            SampleError,
            ValueError,
        ) as error:  # a lone surrogate or a NUL is a ValueError
            quarantine.put(
                Bad(columns.name, row, _shown(columns.values[image][number]), str(error))
            )
            continue
        stem = os.path.splitext(name)[0]
        key = keys.key(stem)
        content = picture[1]
        same = (
            os.path.abspath(content)
            if isinstance(content, str)
            else blake2b(content, digest_size=16).digest()
        )
        items.append(
            Item(
                key,
                tuple(parts),
                split=split,
                group=_group(group_by, columns.values[group_by][number]) if group_by else "",
                stratum=str(columns.values[stratum][number]) if stratum else "",
                row=row,
                name=name if key != stem else "",
                picture=pictures.setdefault(same, key),
            )
        )
    said = [*paths.said(), *(line for one in decided for line in one.said)]
    twice = len(items) - len(pictures)
    said += (
        [f"pictures: {twice} rows name a picture that an earlier row names too"] if twice else []
    )
    splits = dict.fromkeys(item.split for item in items)
    said += [f"split {split_by}: the splits {alike} look alike" for alike in look_alikes(splits)]
    for name in columns.changed:
        if name not in names:
            said += [
                f"column {name}: {what} in json ({count} value{'s' * (count > 1)})"
                for what, count in columns.changed[name].items()
            ]
    source = {
        "kind": "table",
        "image": image,
        "labels": [label.name for label in found],
        "decided": said,
    }
    return Listing(columns.name, items, found, source, bad=quarantine.bad)


def _kind(name: str, known: list[str]) -> tuple[str, str | None]:
    before, colon, kind = name.rpartition(":")
    if colon and before in known and kind not in KINDS and name not in known:
        raise UsageError(
            f"'{name}': a label is of one of the kinds {', '.join(KINDS)}, and '{kind}' is none of them."
        )
    return (before, kind) if colon and kind in KINDS and name not in known else (name, None)


def _group(column: str, value: Any) -> str:
    """The group of a row; a row that names none is one by itself."""
    return f"{column}={_text(value)}" if _text(value) else ""


def _text(value: Any) -> str:
    return "" if value is None else str(value).strip()


def _with_labels(columns: Columns, decided: Sequence[Column], quarantine: Quarantine) -> Columns:
    """The rows whose labels can be used, with the labels as they are packed; the others go to the quarantine."""
    values = {**columns.values, **{one.label.name: one.values for one in decided}}
    kept = []
    for number, row in enumerate(columns.rows):
        reason = next((one.bad[number] for one in decided if number in one.bad), None)
        if reason is None:
            kept.append(number)
        else:
            quarantine.put(Bad(columns.name, row, "", reason))
    if not kept:
        raise SourceError(
            f"{columns.name}: no row has all its labels ({', '.join(one.label.name for one in decided)})."
        )
    if len(kept) < len(columns.rows):
        values = {c: [cells[i] for i in kept] for c, cells in values.items()}
    return Columns(columns.name, values, [columns.rows[i] for i in kept], changed=columns.changed)


# --- pictures --------------------------------------------------------------------------------------------------------


class _Paths:
    """Where the paths of a column lead: one rule for all of its rows.

    A path is taken as it is written; relative ones begin at the root. Where no path with backslashes exists so, backslashes are
    slashes. Where a root was given and no absolute path exists, they are of another machine: the beginning that all share is
    left out, as much of it as must be for any to be found below the root, and the same of each.
    """

    def __init__(self, table: Any, root: str | None, cells: Sequence[Any]) -> None:
        of_file = isinstance(table, (str, os.PathLike))
        self.base = root if root is not None else os.path.dirname(table) if of_file else ""
        # no part of keys, wherever the folder lies
        self._origin = (
            os.path.join(os.path.abspath(self.base), "") if of_file or root is not None else "/"
        )
        self.asked = self.found = 0
        names = [name for name in map(_path_in, cells) if name]
        odd = [name for name in names if "\\" in name]
        self._turned = bool(odd) and not any(
            os.path.isfile(os.path.join(self.base, name)) for name in odd
        )
        self._left_out: str | None = None
        absolute = [name for name in map(self._slashed, names) if _is_absolute(name)]
        if root is not None and absolute and not any(map(os.path.isfile, absolute)):
            self._left_out = self._beginning(absolute)

    def find(self, name: str) -> tuple[str, str]:
        """(name for the key, path) of a path as the table has it. Raises SourceError for a picture that is not there."""
        self.asked += 1
        name = self._slashed(name)
        if image_field(name) is None:
            raise SourceError("the picture has no extension of an image")
        end, path = name, os.path.join(self.base, name)
        if self._left_out is not None and name.startswith(self._left_out):
            end = name[len(self._left_out) :].lstrip("/")
            path = os.path.join(self.base, end)
        elif _is_absolute(name):
            end = os.path.normpath(name).removeprefix(self._origin)
        if not os.path.isfile(path):
            if _is_hidden(path):
                raise SourceError(
                    "the picture cannot be read: Permission denied. Check the permissions of its folders"
                )
            raise SourceError("the picture is not there; --root says where relative paths begin")
        self.found += 1
        return end, path

    def said(self) -> list[str]:
        """The rule, and how many pictures it found."""
        if not self.asked:
            return []
        how = "as they are written, relative ones from the root"
        if self._left_out is not None:
            how = f"below the root, without {self._left_out!r} at their beginning"
        turned = ", backslashes as slashes" if self._turned else ""
        return [
            f"pictures: {self.found} of {self.asked} paths lead to a file; they are taken {how}{turned}"
        ]

    def _slashed(self, name: str) -> str:
        return name.replace("\\", "/") if self._turned else name

    def _beginning(self, names: list[str]) -> str | None:
        """What all paths begin with that is left out: the shortest for which a file is below the root."""
        left_out = ""
        for parts in zip(*(name.split("/")[:-1] for name in names), strict=False):
            if len(set(parts)) > 1:
                return None
            left_out += f"{parts[0]}/"
            if any(
                os.path.isfile(os.path.join(self.base, name[len(left_out) :].lstrip("/")))
                for name in names
            ):
                return left_out
        return None


def _is_hidden(path: str) -> bool:
    """Whether a file lies in a folder that may not be read, so that nobody knows whether it is there."""
    try:
        os.stat(path)
    except PermissionError:
        return True
    except (OSError, ValueError):
        pass
    return False


def _is_absolute(name: str) -> bool:
    """Whether a path begins at the root of a file system, also of another machine's."""
    return name.startswith(("/", "\\")) or (
        name[1:2] == ":" and name[2:3] in ("/", "\\") and name[0].isalpha()
    )


def _path_in(cell: Any) -> str:
    """The path in a cell that holds no bytes of a picture; empty if there is none."""
    if isinstance(cell, dict):
        cell = cell.get("path") if cell.get("bytes") is None else None
    return cell.strip() if isinstance(cell, str) else ""


def _shown(cell: Any) -> str:
    """A cell for people: its path, or what stands there instead of bytes and paths."""
    return _path_in(cell) or (str(cell)[:200] if isinstance(cell, (str, int, float)) else "")


def _picture(cell: Any, paths: _Paths, fallback: str) -> tuple[str, tuple[str, bytes | str]]:
    """(name, (field, path or bytes)) of a cell. Raises SourceError saying why it is no picture."""
    if isinstance(cell, dict) and isinstance(
        cell.get("bytes"), bytes
    ):  # as Hugging Face data sets hold pictures
        return str(cell.get("path") or fallback), (field_of(cell["bytes"]), cell["bytes"])
    if isinstance(cell, bytes):
        return fallback, (field_of(cell), cell)
    name = _path_in(cell)
    if not name:
        raise SourceError("there is no path of a picture")
    end, path = paths.find(name)
    return end, (str(image_field(path)), path)


# --- other columns ---------------------------------------------------------------------------------------------------


def _rest(row: dict[str, Any]) -> list[tuple[str, bytes | str]]:
    """The other columns of a row: one json, and a field of its own for bytes, which JSON cannot hold. Bytes inside of lists
    and objects leave the name of their field where they stood."""
    loose: list[tuple[str, bytes | str]] = []
    kept: dict[str, Any] = {}
    for name, value in row.items():
        data = (
            value.get("bytes")
            if isinstance(value, dict) and set(value) == {"bytes", "path"}
            else value
        )
        if isinstance(data, bytes):
            _loosened(data, _part(name), loose)
        else:
            kept[name] = _loosened(value, _part(name), loose)
    return [*loose, *([("json", _JSON.encode(kept).encode())] if kept else [])]


def _loosened(value: Any, name: str, loose: list[tuple[str, bytes | str]]) -> Any:
    """A value with the field's name in the place of bytes, which go to `loose`."""
    if isinstance(value, bytes):
        try:
            kind = field_of(value) if looks_like_image(value) else "bin"
        except SourceError:  # of a format that several extensions stand for
            kind = "bin"
        loose.append((field_name(f"{name}.{kind}"), value))
        return loose[-1][0]
    if isinstance(value, list):
        return [_loosened(one, f"{name}.{place}", loose) for place, one in enumerate(value)]
    if isinstance(value, dict):
        return {key: _loosened(one, f"{name}.{_part(key)}", loose) for key, one in value.items()}
    return value


@lru_cache(maxsize=1024)
def _part(name: str) -> str:
    """The name of a column as a part of a field's name."""
    return tidy(name.replace("/", "_"))
