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
from collections.abc import Iterable
from hashlib import blake2b
from itertools import compress, islice
from stat import S_ISREG
from typing import Any

from wdstrain.conversion.images import field_of
from wdstrain.conversion.listing import Sample, image_field
from wdstrain.conversion.sources.table_cells import BATCH, Cells, cells_of, each, joined
from wdstrain.conversion.sources.table_read import Table
from wdstrain.errors import SourceError

_COLUMN = re.compile(r"\{([^{}]+)\}")  # in a template


class ImageColumn:
    """The columns of paths or images.

    kept: they stay beside the image, because those of a template are data of their own.
    holds_bytes: the images themselves are in the table.
    """

    def __init__(self, table: Table, image: str) -> None:
        """image: a column, or a template with the names of columns in braces."""
        self.kept, self._template = image not in table.columns, image
        self.columns = list(dict.fromkeys(_COLUMN.findall(image))) if self.kept else [image]
        for name in self.columns or [image]:
            table.check_column(name)
        self.holds_bytes = not self.kept and any(
            isinstance(cell.get("bytes") if isinstance(cell, dict) else cell, bytes)
            for _, _, cells in table.batches([image])
            for cell in cells[image]
        )

    def paths(self, table: Table, chosen: Iterable[bool]) -> Cells:
        """Return the path of each chosen row; "" if there is none. Numbers are as a CSV has them."""
        columns = [each(table.column(name, written=True)) for name in self.columns]
        paths = compress(map(self._path, zip(*columns, strict=True)), chosen)
        return joined([cells_of(some) for some in iter(lambda: list(islice(paths, BATCH)), [])])

    def _path(self, cells: tuple[Any, ...]) -> str:
        texts = {name: _text_in(cell) for name, cell in zip(self.columns, cells, strict=True)}
        if not self.kept:
            return texts[self._template]
        return _COLUMN.sub(lambda match: texts[match[1]], self._template) * all(texts.values())


def bytes_image(cell: Any, name: str) -> Sample:
    """Return a sample of the image in a cell. name: of the image, if the cell has no path.

    Raises SourceError if it is no image.
    """
    if isinstance(cell, dict):
        name, cell = str(cell.get("path") or name), cell.get("bytes")
    if isinstance(cell, str):
        raise SourceError("it holds a path where other rows hold the bytes of an image")
    if not isinstance(cell, bytes):
        raise SourceError("there are no bytes of an image")
    identity = blake2b(cell, digest_size=16).hexdigest()
    return Sample(None, [(field_of(cell), cell)], name=name, identity=identity)


class PathRule:
    """Rule that gives the file of each path of a table."""

    def __init__(self, base: str, paths: Cells, *, has_root: bool, is_file: bool) -> None:
        """base: the root of relative paths. has_root: the user named it. is_file: the table is."""
        self._base, self._left_out = base, None
        self.asked = self.found = 0
        # keys do not say where the folder is
        self._prefix = os.path.join(os.path.abspath(base), "") if is_file or has_root else "/"
        odd = [path for path in each(paths) if "\\" in path]
        self._turned = bool(odd) and not any(map(os.path.isfile, map(self._below, odd)))
        absolute = [path for path in map(self._slashed, each(paths)) if _is_absolute(path)]
        if has_root and absolute and not any(map(os.path.isfile, absolute)):
            self._left_out = self._beginning(absolute)

    def image(self, path: str) -> Sample:
        """Return a sample of the image of a path as the table has it. Raises SourceError."""
        if not path:
            raise SourceError("there is no path of an image")
        self.asked += 1
        name = path = self._slashed(path)
        field = image_field(path)
        if field is None:
            raise SourceError("the path has no extension of an image")
        if self._left_out is not None and path.startswith(self._left_out):
            name = path[len(self._left_out) :].lstrip("/")
        elif _is_absolute(path):
            name = os.path.normpath(path).removeprefix(self._prefix)
        file = self._below(path if self._left_out is None else name)
        status = _status(file)
        if status is None or not S_ISREG(status.st_mode):
            raise SourceError(
                "the image is not there; root=FOLDER replaces the beginning that absolute paths share"
                if _is_absolute(path)
                else "the image is not there; root says where relative paths begin"
            )
        self.found += 1
        if status.st_size == 0:
            raise SourceError("it has 0 bytes")
        parts = [(field, (file, status.st_size, status.st_mtime_ns))]
        return Sample(None, parts, name=name, identity=os.path.abspath(file))

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


def _status(path: str) -> os.stat_result | None:
    """Return the state of a file, None if there is none. Raises SourceError without permission."""
    try:
        return os.stat(path)
    except PermissionError:
        raise SourceError(
            "the image cannot be read: Permission denied. Check the permissions of its folders"
        ) from None
    except (OSError, ValueError):
        return None


def _is_absolute(path: str) -> bool:
    """Return whether a path begins at the root of a file system, also of another machine's."""
    has_drive = path[1:2] == ":" and path[2:3] in ("/", "\\") and path[0].isalpha()
    return has_drive or path.startswith(("/", "\\"))


def _text_in(cell: Any) -> str:
    cell = cell.get("path") if isinstance(cell, dict) else cell
    return "" if cell is None else str(cell).strip()
