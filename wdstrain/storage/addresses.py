"""Addresses of shards: which tars and index files a folder, glob, brace pattern or URL means.

An address is never run as a command.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from urllib.parse import quote, urlsplit, urlunsplit

from braceexpand import braceexpand

from wdstrain.errors import ShardError, StorageError, UsageError
from wdstrain.storage.object_store import is_object, list_folder_of
from wdstrain.storage.remote import check_address, is_remote, name_of, redacted

Urls = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
INDEX_NAME = "index.json"
UNFINISHED = ".unfinished"  # the stage of a conversion, in the folder it will fill
SWAPPING = ".swapping"  # the stage while its shards are put in place
_COMPRESSED = re.compile(r"\.(tar\.(gz|zst|bz2|xz|lz4)|tgz|tbz2?|txz)$")
_SCHEME = re.compile(r"^([a-zA-Z][a-zA-Z0-9+.-]+)://")  # two letters at least: C:\ is a path


def expand(urls: Urls) -> list[str]:
    """Paths of tars and of index files that an address means, in order.

    A folder means its index, or its tars in name order where it has none; a glob is sorted; a brace pattern keeps its
    own order. Raises UsageError naming the pattern that matches nothing, StorageError for a folder that cannot be read.
    """
    addresses = [urls] if isinstance(urls, (str, os.PathLike)) else list(urls)
    if not addresses:
        raise UsageError(
            "no address of shards was given. Name a folder, an index.json, a file, a glob or a brace pattern."
        )
    return [path for address in addresses for path in _expand_one(os.fspath(address))]


def _expand_one(address: str) -> list[str]:
    try:
        return _expanded(address)
    except OSError as error:
        where = error.filename or address
        raise StorageError(
            f"{where} cannot be read: {error.strerror}. Check the permissions of the folder."
        ) from error


def _expanded(address: str) -> list[str]:
    scheme = _SCHEME.match(address)
    if scheme and scheme.group(1).lower() == "file":
        address = address[len(scheme.group(0)) :]
    elif scheme and is_remote(scheme.group(0).lower()):
        return _expand_remote(scheme.group(0).lower() + address[len(scheme.group(0)) :])
    elif scheme:
        raise UsageError(
            f"{redacted(address)}: addresses of the kind {scheme.group(0)} cannot be read yet. Copy the shards to a disk."
        )
    if address.startswith("pipe:"):
        raise UsageError(
            f"{address}: an address is never run as a command. Name a file, or the address of a server."
        )
    path = Path(address)
    if path.is_dir():
        return _expand_folder(path)
    if path.exists():
        return [address]
    if "{" in address:
        try:
            return [one for part in braceexpand(address, escape=False) for one in _expand_one(part)]
        except ValueError:
            raise UsageError(
                f"{address}: its braces do not pair up. Write for example train-{{000000..000007}}.tar"
            ) from None
    if any(c in address for c in "*?["):
        found = _matching(address)
        if not found:
            raise UsageError(
                f"{address}: no file matches this pattern. Check the folder and the quotes around it."
            )
        return [one for part in found for one in _expand_one(part)]
    raise UsageError(f"{address}: there is no such file or folder. Check the address.")


def _matching(pattern: str) -> list[str]:
    """The paths that match a pattern, sorted. Raises OSError for a folder that cannot be read: glob leaves it out silently."""
    parent = os.path.dirname(pattern)
    for folder in _matching(parent) if glob.has_magic(parent) else [parent or os.curdir]:
        with suppress(FileNotFoundError, NotADirectoryError):
            os.scandir(folder).close()
            os.stat(
                os.path.join(folder, os.curdir)
            )  # needs the right to look names up, which a list of names does not
    return sorted(glob.glob(pattern))


def _expand_remote(address: str) -> list[str]:
    if is_object(address):
        path, query = address, ""
    else:
        check_address(address)
        path, query = urlsplit(address).path, urlsplit(address).query
    if "{" in path:
        try:
            return [
                one for part in braceexpand(address, escape=False) for one in _expand_remote(part)
            ]
        except ValueError:
            raise UsageError(
                f"{redacted(address)}: its braces do not pair up. Write for example train-{{000000..07}}.tar"
            ) from None
    if any(c in path for c in "*?[") and is_object(address):
        found = [
            name for name in list_folder_of(address) if fnmatchcase(name, path.rpartition("/")[2])
        ]
        if not found:
            raise UsageError(
                f"{redacted(address)}: no object matches this pattern. Check the bucket and the folder."
            )
        return [beside(address, name) for name in found]
    if any(c in path for c in "*[") or query.endswith(".tar"):
        raise UsageError(
            f"{redacted(address)}: a server cannot be asked what matches * or ?. Use braces, or name its index.json."
        )
    if path.endswith((".tar", ".json")):
        return [address]
    # of a bucket's folder too: shards without an index may be half of a set that is being put there
    return [
        beside(f"{path.rstrip('/')}/" if is_object(address) else _in_folder(address), INDEX_NAME)
    ]


def _in_folder(address: str) -> str:
    parts = urlsplit(address)
    return urlunsplit((parts.scheme, parts.netloc, f"{parts.path.rstrip('/')}/", parts.query, ""))


def _expand_folder(path: Path) -> list[str]:
    if (path / INDEX_NAME).exists():
        return [str(path / INDEX_NAME)]
    found = sorted(str(path / name) for name in os.listdir(path) if name.endswith(".tar"))
    if not found:
        if (path / UNFINISHED).exists():
            raise ShardError(
                f"{path}: a conversion into this folder was not finished. Run it again with --resume."
            )
        packed = sorted(one.name for one in path.iterdir() if _COMPRESSED.search(one.name))
        if packed:
            raise UsageError(
                f"{path}: {packed[0]} is compressed, and offsets need plain tars. Unpack it first, to .tar."
            )
        raise UsageError(
            f"{path}: this folder holds no index.json and no .tar file. Name the folder of the shards."
        )
    return found


def check_finished(folder: str) -> None:
    """Raise ShardError if a conversion was cut short while it put its shards in place of others."""
    unfinished = os.path.exists(os.path.join(folder, UNFINISHED)) and not os.path.exists(
        os.path.join(folder, INDEX_NAME)
    )
    if unfinished or os.path.exists(os.path.join(folder, SWAPPING)):
        raise ShardError(
            f"{folder}: a conversion into this folder was not finished. Run it again with --resume."
        )


def beside(path: str, name: str) -> str:
    """The address of another file in the folder of a file; what follows a ? in an address goes along."""
    if not is_remote(path):
        return os.path.join(os.path.dirname(path), name)
    if is_object(path):  # a key is what it is, with all its characters
        return f"{path.rpartition('/')[0]}/{name}"
    parts = urlsplit(path)
    return urlunsplit(
        (
            parts.scheme,
            parts.netloc,
            f"{parts.path.rpartition('/')[0]}/{quote(name)}",
            parts.query,
            "",
        )
    )


def is_json(path: str) -> bool:
    """Whether an address is that of an index."""
    return name_of(path).endswith(".json")


def folder_of(path: str) -> str:
    """The folder of a file, as it may be shown."""
    return redacted(path).rpartition("/")[0] if is_remote(path) else os.path.dirname(path)
