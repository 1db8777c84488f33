"""Places of the images of a table: one rule for all rows, chosen before an image is read.

A column holds the bytes of images, or paths; or a template such as `images/{id}.jpg` makes paths of
columns. Relative paths begin at the root. If no path with backslashes exists, backslashes become
slashes. If a root is given and no absolute path exists, the paths are of another machine. Then the
same beginning is removed from all: the shortest common one without which a file exists below the
root.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

from wdstrain.conversion.images import field_of
from wdstrain.conversion.listing import image_field
from wdstrain.conversion.sources.table_cells import Table, joined_column
from wdstrain.errors import SourceError, UsageError

_COLUMN = re.compile(r"\{([^{}]+)\}")  # in a template


class Image(NamedTuple):
    """The image of a row. name: with extension, for the key. identity: equal for equal images."""

    name: str
    field: str
    content: bytes | str  # bytes, or the path of the file
    identity: str


class ImageColumn:
    """The columns of paths or images. holds_bytes: the images themselves are in the table."""

    def __init__(self, table: Table, image: str) -> None:
        """image: a column, or a template with the names of columns in braces."""
        self._template = "" if image in table.columns else image
        names = _COLUMN.findall(image) if self._template else [image]
        missing = [name for name in names if name not in table.columns]
        if missing or not names:
            name = missing[0] if names else image
            raise UsageError(
                f"{table.name} has no column '{name}'. Use one of its columns: "
                f"{', '.join(table.columns)}.{joined_column(name, table.columns)}"
            )
        self.columns = list(dict.fromkeys(names))
        self.holds_bytes = not self._template and any(
            _has_bytes(cell) for batch in table.batches([image]) for cell in batch.cells[image]
        )

    @property
    def kept(self) -> bool:
        """Whether the columns stay beside the image: those of a template are data of their own."""
        return bool(self._template)

    def path(self, cells: dict[str, Any]) -> str:
        """Return the path in the cells of a row; "" if there is none."""
        if not self._template:
            return _path_in(cells[self.columns[0]])
        texts = {name: str(cells[name]).strip() for name in self.columns if cells[name] is not None}
        if len(texts) < len(self.columns):
            return ""
        return _COLUMN.sub(lambda match: texts[match[1]], self._template)


def bytes_image(cell: Any, name: str) -> Image:
    """Return the image in a cell with bytes. name: for the key, if the cell has no path.

    Raises SourceError if it is no image.
    """
    if isinstance(cell, dict):
        name, cell = str(cell.get("path") or name), cell.get("bytes")
    if isinstance(cell, str):
        raise SourceError("it holds a path where other rows hold the bytes of an image")
    if not isinstance(cell, bytes):
        raise SourceError("there are no bytes of an image")
    return Image(name, field_of(cell), cell, blake2b(cell, digest_size=16).hexdigest())


class PathRule:
    """Rule that gives the file of each path of a table."""

    def __init__(self, base: str, paths: Sequence[str], *, has_root: bool, is_file: bool) -> None:
        """base: the root of relative paths. has_root: the user named it. is_file: the table is."""
        self._base = base
        # keys do not say where the folder is
        self._prefix = os.path.join(os.path.abspath(base), "") if is_file or has_root else "/"
        self.asked = self.found = 0
        odd = [path for path in paths if "\\" in path]
        self._turned = bool(odd) and not any(map(os.path.isfile, map(self._below, odd)))
        self._left_out: str | None = None
        absolute = [path for path in map(self._slashed, paths) if _is_absolute(path)]
        if has_root and absolute and not any(map(os.path.isfile, absolute)):
            self._left_out = self._beginning(absolute)

    def image(self, path: str) -> Image:
        """Return the image of a path as the table has it. Raises SourceError if it is not there."""
        if not path:
            raise SourceError("there is no path of an image")
        self.asked += 1
        path = self._slashed(path)
        if image_field(path) is None:
            raise SourceError("the path has no extension of an image")
        name, file = path, self._below(path)
        if self._left_out is not None and path.startswith(self._left_out):
            name = path[len(self._left_out) :].lstrip("/")
            file = self._below(name)
        elif _is_absolute(path):
            name = os.path.normpath(path).removeprefix(self._prefix)
        if not os.path.isfile(file):
            if _is_hidden(file):
                raise SourceError(
                    "the image cannot be read: Permission denied. Check the permissions of its "
                    "folders"
                )
            where = "root says where relative paths begin"
            if _is_absolute(path):
                where = "root=FOLDER replaces the beginning that absolute paths share"
            raise SourceError(f"the image is not there; {where}")
        self.found += 1
        return Image(name, str(image_field(file)), file, os.path.abspath(file))

    def decision(self) -> str:
        """Return the rule and how many files it found, for people."""
        how = "unchanged, relative paths from the root"
        if self._left_out is not None:
            how = f"below the root, without {self._left_out!r} at the beginning"
        turned = ", backslashes as slashes" if self._turned else ""
        return f"images: {self.found} of {self.asked} paths exist; paths are read {how}{turned}"

    def _below(self, path: str) -> str:
        return os.path.join(self._base, path)

    def _slashed(self, path: str) -> str:
        return path.replace("\\", "/") if self._turned else path

    def _beginning(self, paths: list[str]) -> str | None:
        """Return the shortest common beginning without which a file is below the root."""
        left_out = ""
        for parts in zip(*(path.split("/")[:-1] for path in paths), strict=False):
            if len(set(parts)) > 1:
                return None
            left_out += f"{parts[0]}/"
            rest = (path[len(left_out) :].lstrip("/") for path in paths)
            if any(map(os.path.isfile, map(self._below, rest))):
                return left_out
        return None


def _is_hidden(path: str) -> bool:
    """Return whether a file is in a folder that may not be read, so it may be there."""
    try:
        os.stat(path)
    except PermissionError:
        return True
    except (OSError, ValueError):
        pass
    return False


def _is_absolute(path: str) -> bool:
    """Return whether a path begins at the root of a file system, also of another machine's."""
    has_drive = path[1:2] == ":" and path[2:3] in ("/", "\\") and path[0].isalpha()
    return has_drive or path.startswith(("/", "\\"))


def _has_bytes(cell: Any) -> bool:
    return isinstance(cell.get("bytes") if isinstance(cell, dict) else cell, bytes)


def _path_in(cell: Any) -> str:
    cell = cell.get("path") if isinstance(cell, dict) else cell
    return cell.strip() if isinstance(cell, str) else ""
