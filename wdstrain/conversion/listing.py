"""Samples and sources: what every kind of source yields before anything is packed.

A sample holds its bytes, the paths of its files, or pixels that a worker encodes. Samples that
cannot be packed go to `BadSamples`, which raises or collects, so nothing is left out without being
counted.
"""

from __future__ import annotations

import marshal
import os
import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from wdstrain.errors import SampleError, SourceError
from wdstrain.runtime.options import refuse
from wdstrain.shards.formats import is_image
from wdstrain.shards.kinds import ColumnInfo

# Files that operating systems leave in folders.
_LITTER = {".ds_store", "thumbs.db", "desktop.ini", "__macosx"}

_ODD = re.compile(r"[.:]|//|^/|/$|^__[^/]*__/")  # in a path that may not be a key as it is
_NOTE = re.compile(r"__[^/]*__/")  # readers take members that begin so for notes of the writer

# Folders and shards of these names are splits.
SPLITS = {
    "train": "train",
    "training": "train",
    **dict.fromkeys(("val", "valid", "validation", "dev"), "val"),
    "test": "test",
}

Part = tuple[str, bytes]  # field and its bytes
Piece = tuple[str, int, int]  # a file to copy: path, size, and when it was changed last, in ns


class Sample(NamedTuple):
    """A sample of a source.

    key: wanted; `collect` makes it unique; None: its number becomes the key. parts: (field, content); the content is bytes, the path of
    a file to copy, or `Pixels` that a worker encodes. Samples of one group go to the same split.
    stratum: the class, for stratified splits and for counting. row: its number in the source, from
    1; 0: none. name: its name in the source, if the key differs. identity: equal for samples with
    equal images. Without a group, these go to the same split.
    """

    key: str | None
    parts: Sequence[tuple[str, Any]]
    split: str = ""
    group: str = ""
    stratum: str = ""
    row: int = 0
    name: str = ""
    identity: str = ""


class SampleStore:
    """Samples of bytes and files, in a quarter of the memory that their objects take."""

    def __init__(self) -> None:
        self._data, self._stops = bytearray(), array("q", [0])

    def append(self, sample: Sample) -> None:
        self._data += marshal.dumps(tuple(sample))  # type: ignore[arg-type]
        self._stops.append(len(self._data))

    def __len__(self) -> int:
        return len(self._stops) - 1

    def __getitem__(self, number: int) -> Sample:
        start, stop = self._stops[number : number + 2]
        return Sample(*marshal.loads(memoryview(self._data)[start:stop]))


def reject(exists: object, problem: str, hint: str = "", /, **options: Any) -> None:
    """Raise SourceError for a problem that exists. options: those that it and the hint name."""
    if exists:
        raise SourceError(problem, hint, options)


class BadSample(NamedTuple):
    """A sample that cannot be packed. row: in its source, 0: none. path: its path or key."""

    source: str
    row: int
    path: str
    reason: str

    @property
    def sentence(self) -> str:
        row = f", row {self.row}" if self.row else ""
        path = f": {self.path}" if self.path else ""
        return f"{self.source}{row}{path}: {self.reason.rstrip('.')}."

    def portable(self) -> dict[str, Any]:
        """Return the sample as JSON, without the folders above the source."""
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


@dataclass
class BadSamples:
    """Raises an error at the first bad sample, or collects all of them."""

    collect: bool = False
    bad: list[BadSample] = field(default_factory=list)

    def put(self, bad: BadSample) -> None:
        """Add a bad sample. Raises SourceError unless they are collected."""
        if not self.collect:
            raise SourceError(
                f"{bad.sentence}",
                "Fix or remove it, or leave such samples out with {on_error}.",
                {"on_error": "skip"},
            )
        self.bad.append(bad)


@dataclass(frozen=True)
class Source:
    """The samples of a source in their order, and facts about the source.

    samples: yields all samples, good and bad. labels: is called after the last of them.
    source: its provenance. total: number of samples; None: unknown. ignored: counts by reason, which
    grow while samples are read. resplit: its splits may be drawn anew. root: a folder that the shards
    must not be put into. stratum: name of the column that the strata are from. has_files: all
    contents are bytes and paths, so that samples are packed from where they are.
    """

    name: str
    samples: Callable[[], Iterable[Sample | BadSample]]
    labels: Callable[[], tuple[ColumnInfo, ...]]
    source: dict[str, Any]
    total: int | None = None
    ignored: dict[str, int] = field(default_factory=dict)
    resplit: bool = False
    root: str | None = None
    stratum: str = ""
    has_files: bool = False


class Keys:
    """Unique keys of samples. webdataset ends a key at the first dot of its base name."""

    def __init__(self) -> None:
        # hash of a key in lower case -> last number appended to it; 64 bits take less memory
        self._given: dict[int, int] = {}

    def key(self, path: str) -> str:
        """Return the key for a path without its extension.

        Dots of the base name become underscores. A name that was given before, in upper or lower
        case, gets -2, -3, ...
        """
        wanted = key = tidy(path)
        folded = hash(wanted.casefold())
        number = self._given.get(folded, 0)
        while hash(key.casefold()) in self._given:
            number += 1
            key = f"{wanted}-{number + 1}"
        self._given[folded] = number
        self._given.setdefault(hash(key.casefold()), 0)
        return key


def tidy(path: str) -> str:
    """Return a key without "..", a root, a drive, a dot in its base name, or a folder __x__."""
    if path and not _ODD.search(path):
        return path
    # Such parts would write outside of the folder that a shard is unpacked into.
    parts = [
        part for part in path.split("/") if part not in ("", ".", "..") and not part.endswith(":")
    ]
    base = parts.pop() if parts else ""
    key = "/".join([*parts, base.replace(".", "_") or "_"])
    return key[1:] if _NOTE.match(key) else key


@lru_cache(maxsize=1024)  # is called for each field of each sample
def field_name(name: str) -> str:
    """Return the name of a field as readers give it back. Raises SampleError if they would not."""
    lower = name.lower()
    if not lower.isprintable() or re.search(r"^$|^\.|^__|[/\\]", lower):
        raise SampleError(
            f"{name!r} cannot be the name of a field: it follows a key and a dot, has no slash, and "
            f"does not begin with two underscores"
        )
    return lower


def each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON. Raises ValueError if a name comes twice, such as 1 and "1"."""
    document = dict(pairs)
    if len(document) < len(pairs):  # only the last value would be kept
        (twice, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"it names {twice!r} twice")
    return document


def image_field(name: str) -> str | None:
    """Return the field of an image file, by its extension; None if it is not that of an image."""
    extension = name.rpartition(".")[2].lower()
    return extension if "." in name and is_image(extension) else None


def piece_of(path: str) -> Piece:
    """Return a file to copy. Raises SampleError for one that is missing or empty."""
    try:
        status = os.stat(path)
    except OSError as error:
        raise SampleError(f"it cannot be read ({error.strerror})") from error
    if status.st_size == 0:
        raise SampleError("it has 0 bytes")
    return path, status.st_size, status.st_mtime_ns


def is_litter(name: str) -> bool:
    """Return whether a file is hidden or was left by an operating system."""
    return name.lower() in _LITTER or name.startswith(".")


def walk(
    root: str, skip: Callable[[str], bool] = is_litter, *, links: bool = True
) -> Iterator[tuple[str, str, list[str], list[str], int]]:
    """Yield each folder: path below root with slashes, path, sorted folders and files, number skipped.

    links: to folders are followed. Raises SourceError for a folder that cannot be listed, and for
    names that no key can have.
    """

    def failed(error: OSError) -> None:
        raise error

    seen: set[str] = set()
    with readable(root, "the permissions of the folder"):
        for folder, folders, files in os.walk(root, onerror=failed, followlinks=links):
            real = os.path.realpath(folder)
            reject(
                real in seen,
                f"{folder} is found twice below {root} because of a link, so its images "
                "would come twice.",
                "Remove the link.",
            )
            seen.add(real)
            names = sorted(name for name in files if not skip(name))
            kept = sorted(name for name in folders if not skip(name))
            skipped = len(files) + len(folders) - len(names) - len(kept)
            folders[:] = kept
            for name in (os.path.basename(folder), *names):
                if not name.isascii() and any("\udc80" <= letter <= "\udcff" for letter in name):
                    raise SourceError(
                        f"{name!r}: an index needs UTF-8, and this is not.",
                        "Rename it.",
                    )
            below = os.path.relpath(folder, root).replace(os.sep, "/")
            yield "" if below == "." else below, folder, kept, names, skipped


@contextmanager
def readable(path: str, check: str = "its permissions") -> Iterator[None]:
    """Raise SourceError for errors of the system. check: what the user looks at."""
    try:
        yield
    except OSError as error:
        raise SourceError(
            f"{error.filename or path} cannot be read: {error.strerror}.",
            f"Check {check}.",
        ) from error


def split_of(name: str) -> str:
    """Return the split in the name of a file, such as train-000000.tar; "" if there is none."""
    word = re.match(r"[A-Za-z]+", name)
    return SPLITS.get(word[0].lower(), "") if word else ""


def check_there(path: str, shown: str = "", *, kind: str = "file") -> None:
    """Raise UsageError if a path does not exist, or is no folder. shown: the path in the error."""
    refuse(
        not (os.path.isdir(path) if kind == "folder" else os.path.exists(path)),
        f"{shown or path}: there is no such {kind}, or no permission.",
        "Check it.",
    )
