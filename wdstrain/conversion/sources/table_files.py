"""The files of a table: of a path, folder, glob or address on the Hub, or of several of these."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from stat import S_ISREG
from typing import Any
from urllib.parse import unquote

import pyarrow as pa

from wdstrain.conversion.listing import check_there, is_litter, readable, split_of, walk
from wdstrain.errors import SourceError
from wdstrain.runtime.options import refuse
from wdstrain.storage.addresses import is_hub, list_hub_files, matching_paths
from wdstrain.storage.remote import gopen, is_remote, shown_path

# Extensions of tables in folders. Of a file that is named alone, .json and .ipc count too.
_FORMS = {
    **dict.fromkeys((".csv", ".tsv"), "csv"),
    **dict.fromkeys((".jsonl", ".ndjson"), "json"),
    **dict.fromkeys((".parquet", ".pq"), "parquet"),
    **dict.fromkeys((".arrow", ".feather"), "arrow"),
}


@dataclass(frozen=True)
class TableFiles:
    """The files of a table.

    base: where relative paths of images begin; None: of a frame. states: of the files that were
    read, which differ if one was changed.
    """

    name: str
    paths: list[str]
    base: str | None
    states: dict[str, Any] = field(default_factory=dict)

    def key_prefix(self, file: str) -> str:
        """Return the beginning of the keys of a file's rows; "" if it is the only file."""
        return "" if len(self.paths) < 2 else f"{os.path.splitext(self._below(file))[0]}/"

    def splits(self) -> dict[str, str]:
        """Return the split of each file, by its name or folders; {} unless all of several have one."""
        names = {file: reversed(self._below(file).split("/")) for file in self.paths}
        splits = {file: next(filter(None, map(split_of, n)), "") for file, n in names.items()}
        return splits if len(splits) > 1 and all(splits.values()) else {}

    def partitions(self, file: str) -> dict[str, str]:
        """Return the cells that folders such as kind=cat give to all rows of a file."""
        pairs = [part.partition("=") for part in self._below(file).split("/")[:-1]]
        return {
            unquote(name): "" if value == "__HIVE_DEFAULT_PARTITION__" else unquote(value)
            for name, equals, value in pairs
            if name and equals
        }

    @contextmanager
    def reading(self, path: str) -> Iterator[None]:
        """Raise SourceError for a file that is no table of its form, or that changes."""
        state = self.states.setdefault(path, _state(path))
        try:
            yield
        except (pa.ArrowException, OSError) as error:
            reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
            raise SourceError(
                f"{shown_path(path)} cannot be read as {form_of(path).capitalize()} ({reason}).",
                "Check the file and its permissions, or copy or write it again.",
            ) from error
        if _state(path) != state:
            raise SourceError(
                f"{path} changed while it was converted.",
                "Convert it again.",
            )

    def _below(self, file: str) -> str:
        path = unquote(file) if is_remote(file) else file
        return path.removeprefix(os.path.join(self.base or "", "")).replace(os.sep, "/")


def find_files(table: Any) -> TableFiles:
    """Return the files of one or several addresses of a table.

    Raises SourceError if there are none, or if they are of several formats.
    """
    named = [table] if isinstance(table, (str, os.PathLike)) else table
    refuse(
        not isinstance(named, (list, tuple)) or not named,
        f"table is {type(table).__name__}: must be the path of a file or folder, a glob, "
        "several of them, a list of dicts, or a DataFrame or table that offers Arrow data "
        "(pandas, polars, DuckDB, pyarrow). Collect a lazy frame first.",
    )
    addresses = [str(os.fspath(address)) for address in named]
    name = ", ".join(addresses)
    bases, matches = zip(*map(_find, addresses), strict=True)
    paths = list(dict.fromkeys(path for paths in matches for path in paths))
    if not paths:
        raise SourceError(
            f"{name} holds no tables.",
            f"Check the path. Tables end in {', '.join(_FORMS)}. Shards of webdataset need no "
            f"conversion: wdstrain info {name}",
        )
    forms = {form_of(path): path for path in paths}
    if len(forms) > 1:
        raise SourceError(
            f"{name} holds tables of several formats, such as {' and '.join(forms.values())}.",
            "Name the files of one format.",
        )
    base = bases[0] if len(set(bases)) == 1 else os.path.commonpath(map(os.path.abspath, bases))
    return TableFiles(name, paths, base)


def form_of(path: str) -> str:
    """Return csv, json, parquet or arrow, by the extension of a file; csv for others."""
    forms = {**_FORMS, ".json": "json", ".ipc": "arrow"}
    return forms.get(os.path.splitext(path)[1].lower(), "csv")


def _is_table(path: str) -> bool:
    return path.lower().endswith(tuple(_FORMS))


def _find(address: str) -> tuple[str, list[str]]:
    """Return (folder, files) of one address."""
    if is_hub(address):
        base, files = list_hub_files(address)
        tables = list(filter(_is_table, files))
        return base, [path for path in tables if form_of(path) == "parquet"] or tables
    if is_remote(address):
        return address.rpartition("/")[0], [address]
    if os.path.isdir(address):
        found = (
            os.path.join(folder, name)
            for _, folder, _, names, _ in walk(address, _is_leftover, links=False)
            for name in names
        )
        return address, list(filter(_is_table, found))
    if glob.has_magic(address) and not os.path.lexists(address):
        with readable(address, "the permissions of the folder"):
            paths = list(filter(os.path.isfile, matching_paths(address)))
        refuse(not paths, f"{address}: no file matches this pattern.", "Check the path.")
        return os.path.commonpath(map(os.path.dirname, paths)), paths
    check_there(address)
    return os.path.dirname(address), [address]


def _is_leftover(name: str) -> bool:
    """Return whether a name is of no table: Spark, pandas and Arrow ignore `_temporary`, too."""
    return is_litter(name) or name.startswith("_")


# --- contents -------------------------------------------------------------------------------------


def read_file(path: str) -> bytes:
    """Return the bytes of a local file, a pipe, or a file of a server."""
    with (
        readable(path, "the path and its permissions"),
        gopen(path) if is_remote(path) else open(path, "rb") as file,
    ):
        return bytes(file.read())


def _state(path: str) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None  # a file of a server
    state = status.st_ino, status.st_size, status.st_mtime_ns
    return state if S_ISREG(status.st_mode) else None
