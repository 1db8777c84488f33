"""What a source of samples looks like before it is packed.

There are two kinds. A `Listing` knows its items before a byte of them is read (files of a folder, rows of a table). A
`Stream` is read once from its start to its end (arrays, HDF5, other tars, any iterable). What cannot be packed goes to the
`Quarantine`, which raises or collects: nothing is left out without being counted.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from wdstrain.decode.image_formats import EXTENSIONS
from wdstrain.errors import SampleError, SourceError
from wdstrain.shards.index import Label
from wdstrain.storage.remote import is_remote

# what operating systems leave in folders, by name
_LITTER = {".ds_store", "thumbs.db", "desktop.ini", "__macosx"}

_EXTENSIONS = frozenset(EXTENSIONS)
_ODD = re.compile(r"[.:]|//|^/|/$")  # in a path that may not be a key as it is

# folders and shards named so are splits
SPLITS = {
    "train": "train",
    "training": "train",
    **dict.fromkeys(("val", "valid", "validation", "dev"), "val"),
    "test": "test",
}

Part = tuple[str, bytes]  # field and its bytes


class Item(NamedTuple):
    """One sample to be packed. parts: (field, bytes), or (field, path of the file whose bytes are copied verbatim).

    group: samples of one group come to one side of a split. stratum: the class, for stratified splits and for counting.
    row: where it stands in a table, from 1; 0 if it is in none. name: what the source calls it, if not as its key.
    picture: the key of the first item with the same picture; such items come to one side of a split too, unless grouped.
    """

    key: str
    parts: tuple[tuple[str, bytes | str], ...]
    split: str = ""
    group: str = ""
    stratum: str = ""
    row: int = 0
    name: str = ""
    picture: str = ""


class Entry(NamedTuple):
    """One sample of a stream. `key` None: it is given a number for a key."""

    key: str | None
    parts: list[Part]
    split: str = ""
    group: str = ""
    stratum: str = ""


class Bad(NamedTuple):
    """What could not be packed: the source it is from, its row there (0: none), its path or key, and why."""

    source: str
    row: int
    path: str
    reason: str

    @property
    def sentence(self) -> str:
        row = f", row {self.row}" if self.row else ""
        path = f": {self.path}" if self.path else ""
        return f"{self.source}{row}{path}: {self.reason}."

    def portable(self) -> dict[str, Any]:
        """For a file that says the same on every machine: without the folders above the source."""
        source, path = self.source.rstrip("/"), self.path
        for place in (
            source,
            os.path.abspath(source),
            os.path.dirname(source),
            os.path.dirname(os.path.abspath(source)),
        ):
            path = path.removeprefix(f"{place}/") if place else path
        return {
            "source": os.path.basename(source),
            "row": self.row or None,
            "path": path,
            "reason": self.reason,
        }


class Quarantine:
    """Where bad samples go: an error at the first, or a list of them all."""

    def __init__(self, *, collect: bool = False) -> None:
        self.collect = collect
        self.bad: list[Bad] = []

    def put(self, bad: Bad) -> None:
        """Raises SourceError unless bad samples are collected."""
        if not self.collect:
            raise SourceError(
                f"{bad.sentence} Mend or remove it, or go on without such samples: --on-bad quarantine"
            )
        self.bad.append(bad)


@dataclass(frozen=True)
class Listing:
    """The items of a source in its own order, what is known of their labels, and what was passed over and why."""

    name: str
    items: list[Item]
    labels: tuple[Label, ...]
    source: dict[str, Any]
    ignored: dict[str, int] = field(default_factory=dict)
    bad: list[Bad] = field(default_factory=list)
    root: str | None = None  # the folder that was listed, which the shards must not be put into


@dataclass(frozen=True)
class Stream:
    """A source that is read once. `entries` may put into the quarantine; `labels` is asked after the last entry.

    total: how many entries there will be, None if that is not known. mark: says which input it is (files with sizes and
    times), so that what was laid down of it can be used again; None if nobody knows, and it is read anew.
    """

    name: str
    entries: Callable[[Quarantine], Iterator[Entry]]
    labels: Callable[[], tuple[Label, ...]]
    source: dict[str, Any]
    total: int | None = None
    mark: str | None = None
    ignored: dict[str, int] = field(default_factory=dict)  # grows while entries are read
    resplit: bool = False  # splits of the source may be drawn anew
    root: str | None = None


Source = Listing | Stream


class Keys:
    """Gives each item a key of its own: webdataset ends a key at the first dot of its base name, so dots are rewritten."""

    def __init__(self) -> None:
        self._given: dict[str, int] = {}  # key in lower case -> how many more wanted it

    def key(self, path: str) -> str:
        """The key for a path without its extension, with forward slashes: dots of the base name become underscores, and
        a name that was given before, in capitals or not, gets -2, -3, ..."""
        wanted = tidy(path)
        folded = wanted.casefold()
        if folded not in self._given:
            self._given[folded] = 0
            return wanted
        key, number = wanted, self._given[folded]
        while key.casefold() in self._given:
            number += 1
            key = f"{wanted}-{number + 1}"
        self._given[folded] = number
        self._given.setdefault(key.casefold(), 0)
        return key


def tidy(path: str) -> str:
    """A key that is no path out of a folder and has no dot in its base name."""
    if path and not _ODD.search(path):
        return path
    # no part that climbs, starts at the root or names a drive
    parts = [
        part for part in path.split("/") if part not in ("", ".", "..") and not part.endswith(":")
    ]
    base = parts.pop() if parts else ""
    return "/".join([*parts, base.replace(".", "_") or "_"])


def field_name(name: str) -> str:
    """A field's name as readers give it back. Raises SampleError for one that they would not."""
    lower = name.lower()
    if (
        not lower
        or "/" in lower
        or "\0" in lower
        or lower.startswith(".")
        or not lower.isprintable()
    ):
        raise SampleError(
            f"{name!r} cannot be the name of a field: it follows a key and a dot, and has no slash"
        )
    return lower


def image_field(name: str) -> str | None:
    """The field an image file becomes, from its extension; None for a file that is no image by its name."""
    extension = name.rpartition(".")[2].lower()
    return extension if extension in _EXTENSIONS and "." in name else None


def is_litter(name: str) -> bool:
    """Whether a file is something an operating system left behind, or hidden."""
    return name.lower() in _LITTER or name.startswith(".")


def split_of(name: str) -> str:
    """The split that a shard's name speaks of, where no index does."""
    word = re.match(r"[A-Za-z]+", name)
    return SPLITS.get(word[0].lower(), "") if word else ""


def check_there(path: str, shown: str = "", *, kind: str = "file") -> None:
    """Raise SourceError for what is not there, or lies in a folder that may not be read. shown: the path in the error."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: the path holds a NUL
        raise SourceError(f"{shown or path}: there is no such {kind}. Check the path.") from None
    except OSError as error:
        raise SourceError(
            f"{shown or path} cannot be read: {error.strerror}. Check the permissions of its folders."
        ) from error


def file_mark(*paths: str) -> str:
    """Sizes and times of files, for a stream's mark."""
    local = [path for path in paths if not is_remote(path)]
    return repr(
        [
            paths,
            [
                (os.path.abspath(path), os.stat(path).st_size, os.stat(path).st_mtime_ns)
                for path in local
            ],
        ]
    )
