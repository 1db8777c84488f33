"""Addresses of shards: expands a folder, glob, brace pattern or URL into tars and index files.

An address is never run as a command.

Addresses hf://datasets/OWNER/NAME[@REV][/PATTERN] mean files of a data set on the Hugging Face Hub.
They are ordinary HTTPS addresses. The environment variable HF_TOKEN gives access to private data
sets and HF_ENDPOINT names another server.
"""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from urllib.parse import quote, urljoin, urlsplit

from braceexpand import braceexpand

from wdstrain.errors import ShardError, StorageError, UsageError
from wdstrain.storage.http import hub_endpoint, is_http, read_page
from wdstrain.storage.objects import is_object, list_folder_of
from wdstrain.storage.remote import check_address, is_remote, name_of, redacted, shown_path

Urls = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]

INDEX_NAME = "index.json"
UNFINISHED = ".unfinished"  # staging directory of a conversion, in its output folder

COMPRESSED = re.compile(r"\.(tar\.(gz|zst|bz2|xz|lz4)|tgz|tbz2?|txz|tzst)$", re.IGNORECASE)
_TABLES = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet", ".pq", ".arrow", ".feather")
SOURCES = {
    **dict.fromkeys(_TABLES, "table"),
    **dict.fromkeys((".h5", ".hdf5"), "hdf5"),
    **dict.fromkeys((".npy", ".npz"), "arrays"),
}  # kind of conversion that packs a file, by its extension
_HUB = re.compile(
    r"hf://datasets/(?P<name>[\w.-]+/[\w.-]+)(@(?P<revision>[^@/]+|refs/convert/\w+|refs/pr/\d+))?"
    r"(/(?P<pattern>.*))?"
)
_MISSING = (401, 403, 404, 410)  # status codes of a data set that does not exist or is hidden
_SCHEME = re.compile(r"^([a-zA-Z][a-zA-Z0-9+.-]+)://")  # at least two letters: C:\ is a path


def expand(urls: Urls) -> list[str]:
    """Return the paths of the tars and index files that addresses mean, in order.

    A folder means its index, or its tars in name order if it has no index. A glob is sorted; a
    brace pattern keeps its own order. Raises UsageError for a pattern without a match, StorageError
    for a folder that cannot be read.
    """
    return [path for address in addresses_of(urls) for path in _expand(address)]


def addresses_of(urls: Urls) -> list[str]:
    """Return addresses without braces. Raises UsageError if there are none."""
    addresses = [urls] if isinstance(urls, str | os.PathLike) else urls
    addresses = list(addresses) if isinstance(addresses, Iterable) else []
    if not addresses or not all(isinstance(one, str | os.PathLike) for one in addresses):
        raise UsageError(
            "no address of shards was given.",
            "Name a folder, an index.json, a file, a glob or a brace pattern.",
        )
    return [part for address in addresses for part in _alternatives(os.fspath(address))]


def _alternatives(address: str) -> list[str]:
    """Return the addresses that the braces of an address mean; without braces itself."""
    path = address.partition("?")[0] if is_http(address) else address
    if "{" not in path or os.path.exists(address):
        return [address]
    try:
        return list(braceexpand(address, escape=False))
    except ValueError:
        raise UsageError(
            f"{shown_path(address)}: its braces do not pair up.",
            "Write for example train-{000000..000007}.tar",
        ) from None


def check_finished(folder: str) -> None:
    """Raise ShardError if a conversion was interrupted while it replaced the shards of a folder."""
    has_index = os.path.exists(os.path.join(folder, INDEX_NAME))
    if os.path.exists(os.path.join(folder, UNFINISHED)) and not has_index:
        raise ShardError(
            f"{folder}: a conversion into this folder was not finished.",
            "Run it again with {resume}.",
        )


def check_no_change(path: str) -> None:
    """Raise ShardError for a shard that its index does not list, while the set is changed.

    It is new and not listed yet, or was replaced and is about to be deleted.
    """
    folder = os.path.dirname(path)
    if not is_remote(path) and os.path.exists(os.path.join(folder, UNFINISHED)):
        raise ShardError(
            f"{path} is not in the index of its folder, and a command that changes this set is "
            "running or was killed.",
            "Wait for it, or run it again, or name the folder instead.",
        )


def beside(path: str, name: str) -> str:
    """Return the address of another file in the folder of a file, with the same query."""
    if not is_remote(path):
        return os.path.join(os.path.dirname(path), name)
    if not is_http(path):  # all characters are literal
        return f"{path.rpartition('/')[0]}/{name}"
    parts = urlsplit(path)
    place = f"{parts.path.rpartition('/')[0]}/{quote(name)}"
    return parts._replace(path=place, fragment="").geturl()


def is_json(path: str) -> bool:
    """Return whether an address is that of an index."""
    return name_of(path).endswith(".json")


def folder_of(path: str) -> str:
    """Return the folder of a file, without secrets."""
    return redacted(path).rpartition("/")[0] if is_remote(path) else os.path.dirname(path)


def _expand(address: str) -> list[str]:
    if is_hub(address):
        return _expand_hub(address)
    if is_remote(address):
        return _expand_remote(address)
    if address.startswith("pipe:"):
        raise UsageError(
            f"{address}: an address is never run as a command.",
            "Name a file or a server.",
        )
    path = address.removeprefix("file://")
    if scheme := _SCHEME.match(path):
        raise UsageError(
            f"{redacted(address)}: addresses {scheme[0]} cannot be read.",
            "Copy the shards to a disk.",
        )
    return _expand_local(path)


def _expand_local(address: str) -> list[str]:
    try:
        path = Path(address)
        if path.is_dir():
            return _expand_folder(path)
        if path.exists():
            if kind := SOURCES.get(path.suffix.lower()):
                raise UsageError(
                    f"{address} is not a shard, but the source of a conversion.",
                    f"Make shards of it: wdstrain convert {kind} --help",
                )
            return [address]
        if glob.has_magic(address):
            paths = matching_paths(address)
            if not paths:
                raise UsageError(
                    f"{address}: no file matches this pattern.",
                    "Check the folder and the quotes around it.",
                )
            return [path for match in paths for path in _expand_local(match)]
    except OSError as error:
        raise StorageError(
            f"{error.filename or address} cannot be read: {error.strerror}.",
            "Check the permissions of the folder.",
        ) from error
    raise UsageError(
        f"{address}: there is no such file or folder.",
        "Check the address.",
    )


def matching_paths(pattern: str) -> list[str]:
    """Return the paths that match a glob, sorted.

    Raises OSError for a folder that cannot be read. `glob` skips such a folder.
    """
    parent = os.path.dirname(pattern)
    for folder in matching_paths(parent) if glob.has_magic(parent) else [parent or os.curdir]:
        with suppress(FileNotFoundError, NotADirectoryError):
            os.scandir(folder).close()
            # Needs the permission to look names up; a list of names does not.
            os.stat(os.path.join(folder, os.curdir))
    return sorted(glob.glob(pattern))


def _expand_folder(path: Path) -> list[str]:
    if (path / INDEX_NAME).exists():
        return [str(path / INDEX_NAME)]
    if tars := tars_of(str(path)):
        return tars
    check_finished(str(path))
    compressed = sorted(entry.name for entry in path.iterdir() if COMPRESSED.search(entry.name))
    if compressed:
        raise UsageError(
            f"{path}: {compressed[0]} is compressed, and offsets need plain tars.",
            "Unpack it first, to .tar.",
        )
    raise UsageError(
        f"{path}: this folder holds no index.json and no .tar file.",
        f"Name a folder of shards, or make shards of its images: wdstrain convert folder {path} "
        "OUT",
    )


def tars_of(folder: str) -> list[str]:
    """Return the paths of the tars in a folder, also of hidden ones, sorted by name."""
    return sorted(
        os.path.join(folder, name) for name in os.listdir(folder or ".") if name.endswith(".tar")
    )


def _expand_remote(address: str) -> list[str]:
    path, query = address, ""
    if is_http(address):
        check_address(address)
        path, query = urlsplit(address).path, urlsplit(address).query
    if any(character in path for character in "*?[") and is_object(address):
        return _matching_objects(address)
    # "?" as a pattern is the beginning of a query.
    is_file = path.endswith((".tar", ".json")) or COMPRESSED.search(path)
    if any(character in path for character in "*[") or (query.endswith(".tar") and not is_file):
        raise UsageError(
            f"{redacted(address)}: a server cannot be asked what matches * or ?.",
            "Use braces, or name its index.json.",
        )
    if is_file:
        return [address]
    # Also in a bucket: shards without an index may be a set that is still being uploaded.
    folder = f"{path.rstrip('/')}/"
    if is_http(address):
        folder = urlsplit(address)._replace(path=folder).geturl()
    return [beside(folder, INDEX_NAME)]


def _expand_hub(address: str) -> list[str]:
    """Return the shards of a data set on the Hub: its index, or else its tars."""
    _, files = list_hub_files(address)
    tars = [path for path in files if path.endswith(".tar")]
    index = [path for path in files if path.rpartition("/")[2] == INDEX_NAME]
    if not tars and not index:
        raise UsageError(
            f"{address}: these files of the data set hold no .tar. Tables are packed first: "
            f"wdstrain convert table {address} OUT --image COL"
        )
    folders = {path.rpartition("/")[0] for path in tars}
    if len(index) == 1 and folders <= {index[0].rpartition("/")[0]}:
        return index
    return tars or index


def _matching_objects(address: str) -> list[str]:
    pattern = address.rpartition("/")[2]
    names = [name for name in list_folder_of(address) if fnmatchcase(name, pattern)]
    if not names:
        raise UsageError(
            f"{redacted(address)}: no object matches this pattern.",
            "Check the bucket and the folder.",
        )
    return [beside(address, name) for name in names]


def is_hub(address: str) -> bool:
    return address.startswith("hf://")


def list_hub_files(address: str) -> tuple[str, list[str]]:
    """Return (address of the data set, addresses of the files that an address means, sorted).

    It means a folder with all below it, a file, or a glob. The addresses that are returned are https.
    Raises UsageError for an address that is not valid or that no file matches, StorageError for a
    data set that does not exist or may not be read.
    """
    parsed = _HUB.fullmatch(address)
    if parsed is None:
        raise UsageError(
            f"{address}: not a valid address of the Hub.",
            "Write hf://datasets/OWNER/NAME, hf://datasets/OWNER/NAME@REVISION or "
            "hf://datasets/OWNER/NAME/data/train-*.tar",
        )
    name, revision = parsed["name"], quote(parsed["revision"] or "main", safe="")
    pattern = (parsed["pattern"] or "").rstrip("/")
    everything = _listed(f"{hub_endpoint()}/api/datasets/{name}/tree/{revision}", address)
    paths = sorted(path for path in everything if _matches(path, pattern))
    if not paths:
        raise UsageError(
            f"{address}: none of the {len(everything)} files of this data set matches.",
            "Check the path behind OWNER/NAME.",
        )
    base = f"{hub_endpoint()}/datasets/{name}/resolve/{revision}"
    return base, [f"{base}/{quote(path)}" for path in paths]


def _matches(path: str, pattern: str) -> bool:
    """Return whether a path is the pattern, below it, or matches it; * does not match a slash."""
    place, wanted = PurePosixPath("/", path), PurePosixPath("/", pattern)
    return place.is_relative_to(wanted) or place.match(str(wanted))


def _listed(tree: str, address: str) -> list[str]:
    """Return the paths of all files of a data set, page after page."""
    page: str | None = f"{tree}?recursive=true"
    paths = list[str]()
    while page is not None:
        body, following = read_page(page, _MISSING)
        if body is None:
            raise StorageError(
                f"{address}: the Hub has no such data set or revision, or it may not be read.",
                "Check the name; HF_TOKEN gives access to private data sets.",
            )
        try:
            paths += [entry["path"] for entry in json.loads(body) if entry["type"] == "file"]
        except (ValueError, KeyError, TypeError) as error:
            raise StorageError(
                f"{address}: {urlsplit(tree).netloc} did not send a list of files ({error!r}).",
                "Check HF_ENDPOINT.",
            ) from None
        page = following and urljoin(page, following)
    return paths
