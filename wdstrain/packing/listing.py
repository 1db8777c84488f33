"""What a source of samples looks like before it is read.

A conversion is planned on this list: order, splits and shard boundaries are fixed before the first byte is copied, so
they cannot depend on how many jobs copy.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from wdstrain.decode import EXTENSIONS
from wdstrain.errors import SourceError
from wdstrain.indexing import Label

# what operating systems leave in folders, by name
_LITTER = {".ds_store", "thumbs.db", "desktop.ini", "__macosx"}


class Item(NamedTuple):
    """One sample to be packed. parts: (field, bytes), or (field, path of the file whose bytes are copied verbatim)."""

    key: str
    parts: tuple[tuple[str, bytes | str], ...]
    split: str = ""


@dataclass(frozen=True)
class Listing:
    """The items of a source in its own order, what is known of their labels, and what was passed over and why."""

    items: list[Item]
    labels: tuple[Label, ...]
    source: dict[str, Any]
    ignored: dict[str, int] = field(default_factory=dict)
    root: str | None = None  # the folder that was listed, which the shards must not be put into


class Keys:
    """Gives each item a key of its own: webdataset ends a key at the first dot of its base name, so dots are rewritten."""

    def __init__(self) -> None:
        self._given: dict[str, int] = {}  # key -> how many more wanted it

    def key(self, path: str) -> str:
        """The key for a path without its extension, with forward slashes: dots of the base name become underscores, and
        a name that was given before gets -2, -3, ..."""
        # no part that climbs, starts at the root or names a drive: a key is never a path out of a folder
        parts = [part for part in path.split("/") if part not in ("", ".", "..") and not part.endswith(":")]
        base = parts.pop() if parts else ""
        wanted = "/".join([*parts, base.replace(".", "_") or "_"])
        key, number = wanted, self._given.get(wanted, 0)
        while key in self._given:
            number += 1
            key = f"{wanted}-{number + 1}"
        self._given[wanted] = number
        self._given[key] = 0
        return key


def image_field(name: str) -> str | None:
    """The field an image file becomes, from its extension; None for a file that is no image by its name."""
    extension = os.path.splitext(name)[1][1:].lower()
    return extension if extension in EXTENSIONS else None


def is_litter(name: str) -> bool:
    """Whether a file is something an operating system left behind, or hidden."""
    return name.lower() in _LITTER or name.startswith(".")


def file_size(path: str, what: str) -> int:
    """The size of a file that is to be packed. Raises SourceError naming `what` when it is missing or empty."""
    try:
        size = os.stat(path).st_size
    except OSError as error:
        raise SourceError(
            f"{what}: {path} cannot be read: {error.strerror}. Put it there or remove it from the list."
        ) from error
    if size == 0:
        raise SourceError(f"{what}: {path} has 0 bytes, which is no image. Replace it or remove it.")
    return size
