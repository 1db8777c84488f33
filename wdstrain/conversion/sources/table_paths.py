"""The files of a table: of a path, folder, glob or address on the Hub, or of several of these."""

from __future__ import annotations

import glob
import os
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from wdstrain.conversion.listing import check_there, is_litter, split_of
from wdstrain.conversion.sources.table_files import format_of
from wdstrain.errors import SourceError, UsageError
from wdstrain.storage.addresses import is_hub, list_hub_files, matching_paths
from wdstrain.storage.remote import is_remote

_EXTENSIONS = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet", ".pq")  # of tables in folders


@dataclass(frozen=True)
class TableFiles:
    """The files of a table. base: where relative paths of images begin."""

    name: str
    paths: list[str]
    base: str

    def key_prefix(self, file: str) -> str:
        """Return the beginning of the keys of a file's rows; "" if it is the only file."""
        return "" if len(self.paths) < 2 else f"{self._below(file)}/"

    def splits(self) -> dict[str, str]:
        """Return the split of each file; {} unless there are several and all names contain one."""
        splits = {file: split_of(os.path.basename(file)) for file in self.paths}
        return splits if len(splits) > 1 and all(splits.values()) else {}

    def _below(self, file: str) -> str:
        stem = os.path.splitext(unquote(file) if is_remote(file) else file)[0]
        return stem.removeprefix(os.path.join(self.base, "")).replace(os.sep, "/")


def find_files(table: Any) -> TableFiles:
    """Return the files of one or several addresses of a table.

    Raises SourceError if there are none, or if they are of several formats.
    """
    if not isinstance(table, (str, os.PathLike, list, tuple)) or not table:
        raise UsageError(
            f"table is {type(table).__name__}: must be the path of a file or folder, a glob, "
            "several of them, or a pandas DataFrame."
        )
    named = [table] if isinstance(table, (str, os.PathLike)) else list(table)
    addresses = [str(os.fspath(address)) for address in named]
    name = ", ".join(addresses)
    matches = [_find(address) for address in addresses]
    paths = list(dict.fromkeys(path for some, _ in matches for path in some))
    formats = {format_of(path): path for path in paths}
    if len(formats) > 1:
        first, second = list(formats.values())[:2]
        raise SourceError(
            f"{name} holds tables of several formats, such as {first} and {second}. Name the files "
            "of one format."
        )
    bases = [base for _, base in matches]
    base = bases[0] if len(set(bases)) == 1 else os.path.commonpath([*map(os.path.abspath, bases)])
    return TableFiles(name, paths, base)


def _find(address: str) -> tuple[list[str], str]:
    """Return (files, folder) of one address."""
    if is_hub(address):
        return _find_on_hub(address)
    if is_remote(address):
        return [address], address.rpartition("/")[0]
    if os.path.isdir(address):
        return _files_below(address), address
    if glob.has_magic(address) and not os.path.lexists(address):
        try:
            paths = list(filter(os.path.isfile, matching_paths(address)))
        except OSError as error:
            raise SourceError(
                f"{error.filename or address} cannot be read: {error.strerror}. Check the "
                f"permissions of the folder."
            ) from error
        if not paths:
            raise UsageError(f"{address}: no file matches this pattern. Check the path.")
        return paths, os.path.commonpath([os.path.dirname(path) for path in paths])
    check_there(address)
    return [address], os.path.dirname(address)


def _find_on_hub(address: str) -> tuple[list[str], str]:
    base, files = list_hub_files(address)
    tables = [path for path in files if path.lower().endswith(_EXTENSIONS)]
    tables = [path for path in tables if format_of(path) == "parquet"] or tables
    if not tables:
        raise SourceError(
            f"{address} holds no tables. Check the address. Tables end in "
            f"{', '.join(_EXTENSIONS)}. Shards of webdataset need no conversion: wdstrain info "
            f"{address}"
        )
    return tables, base


def _files_below(folder: str) -> list[str]:
    def failed(error: OSError) -> None:
        raise SourceError(
            f"{error.filename} cannot be read: {error.strerror}. Check the permissions of the "
            f"folder."
        ) from error

    paths = []
    for place, folders, names in os.walk(folder, onerror=failed, followlinks=False):
        folders[:] = sorted(name for name in folders if not is_litter(name))
        paths += [
            os.path.join(place, name)
            for name in sorted(names)
            if name.lower().endswith(_EXTENSIONS) and not is_litter(name)
        ]
    if not paths:
        raise SourceError(
            f"{folder} holds no tables. Check the path. Tables end in {', '.join(_EXTENSIONS)}."
        )
    return paths
