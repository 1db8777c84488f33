"""Addresses to an index: read it beside the shards, recall it, or make it from tar headers.

An index beside the shards is used after the sizes of the shards were compared. Shards without an
index are scanned header by header once (`header_scans`).
"""

from __future__ import annotations

import glob
import logging
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cache
from itertools import groupby

from wdstrain.errors import ShardError, UsageError, WdstrainError
from wdstrain.shards.header_scans import Note, picked, recall_or_scan
from wdstrain.shards.index import Index, Shard, join
from wdstrain.shards.index_io import check_sizes, find_index, load
from wdstrain.storage.addresses import (
    INDEX_NAME,
    Urls,
    alternatives,
    beside,
    check_finished,
    check_no_change,
    expand,
    is_json,
)
from wdstrain.storage.remote import is_remote, name_of, shown_path

_log = logging.getLogger("wdstrain")


def open_index(urls: Urls | Index, *, note: Note | None = None) -> Index:
    """Return the index of the shards at `urls`; an index as it is.

    note: receives a line about each scan of headers. Raises UsageError for addresses without shards,
    ShardError for shards that are cut, damaged, unfinished or different from their index.
    """
    return _opened(urls, note)[0]


def open_shards(
    urls: Urls | Index,
    split: str | None = None,
    *,
    unless: Collection[str] = (),
    may_be_short: bool = False,
) -> Index:
    """Return the index of shards of one split; an index as it is.

    split: name of the split. None: no single address may have several, which keeps validation data
    out of training. A brace pattern such as {train,extra}-*.tar counts as several addresses.
    unless: a set with all of these splits is returned as it is. may_be_short: shards may have fewer
    bytes than their index says. Logs a warning if shards without an index are scanned. Raises
    UsageError, with a shard of each split, and as `open_index` does.
    """
    index, meant = _opened(urls, _log.warning, may_be_short=may_be_short)
    if split is not None:
        numbers = [i for i, shard in enumerate(index.shards) if shard.split == split]
        if not numbers:
            names = ", ".join(filter(None, index.splits)) or "none"
            raise UsageError(f"split={split!r}: the splits of these shards are {names}.")
        return index.pick(numbers)
    if unless and set(unless) <= set(index.splits):
        return index
    for address, paths in meant.items():
        places = {beside(path, "") if is_json(path) else path for path in paths}
        if len(paths) == 1 and not is_json(paths[0]):
            continue  # one shard has one split; this is quick for lists of thousands of shards
        first = {  # a shard of each split
            shard.split or "no split": shard.shown
            for shard in reversed(index.shards)
            if shard.path in places or beside(shard.path, "") in places
        }
        if len(first) > 1:
            raise UsageError(
                f"{shown_path(address)} holds several splits: {', '.join(reversed(first))}. Name one "
                f"by its shards, such as {', '.join(reversed(first.values()))}: with * in a folder, "
                f"with braces on a server, or by split=... of a loader."
            )
    return index


def groups_of(paths: Iterable[str]) -> Iterator[tuple[list[str], Index | None]]:
    """Yield (paths, index) of consecutive shards of one folder at the paths of tars and index files.

    index: of these shards, from the file that lists them; None: none does. Their sizes are not
    compared with the index. Raises ShardError for an index that is damaged, and for an unfinished
    folder.
    """
    files = IndexFiles()
    located = (place for path in paths for place in files.shards(path))
    for (folder, _), run in groupby(
        located, key=lambda place: (beside(place[0], ""), id(place[1]))
    ):
        shards, indexes = zip(*run, strict=True)
        index: Index | None = indexes[0]
        if index is None and files.at(beside(folder, INDEX_NAME)) is not None:
            check_no_change(shards[0])
        yield list(shards), None if index is None else picked(index, shards)


class IndexFiles:
    """Index files that were read, each once."""

    def __init__(self) -> None:
        self.at = cache(_index_at)

    def shards(self, path: str) -> list[tuple[str, Index | None]]:
        """Return (path of a shard, the index that lists it or None) for a tar or an index file.

        Raises ShardError for a remote index that is missing, and for one that is damaged.
        """
        index = self.at(path if is_json(path) else beside(path, INDEX_NAME))
        if not is_json(path):
            is_listed = index is not None and name_of(path) in index.shard_numbers
            return [(path, index if is_listed else None)]
        if index is not None:
            return [(shard.path, index) for shard in index.shards]
        if is_remote(path):
            load(path)  # raises the error
        # Another tool's list without offsets: use the shards beside it.
        return [place for tar in tars_of(os.path.dirname(path)) for place in self.shards(tar)]

    def each(self, path: str) -> Iterator[tuple[str, Index | None]]:
        """Yield the same with an index of this shard alone."""
        for shard, index in self.shards(path):
            yield shard, None if index is None else picked(index, [shard])


def join_once(parts: Sequence[Index]) -> Index:
    """Return indexes as one. Raises UsageError for a shard that is named twice."""
    index = join(parts)
    named: dict[str, Shard] = {}  # by real path
    for shard in index.shards:
        path = shard.path if is_remote(shard.path) else os.path.realpath(shard.path)
        if path in named:
            raise UsageError(
                f"{shard.shown} is named twice (also as {named[path].shown}), so its samples would "
                f"come twice. Name each shard once."
            )
        named[path] = shard
    return index


def tars_of(folder: str) -> list[str]:
    """Return the paths of the tars in a folder, sorted by name."""
    return sorted(glob.glob(os.path.join(glob.escape(folder), "*.tar")))


def is_newer(shard: Shard) -> bool:
    """Return whether a local shard was changed or moved after the index beside it was written."""
    try:
        status, index = os.stat(shard.path), os.stat(beside(shard.path, INDEX_NAME))
    except OSError:  # also of a server
        return False
    return max(status.st_mtime_ns, status.st_ctime_ns) >= index.st_mtime_ns


# --- parts ----------------------------------------------------------------------------------------


def _index_at(path: str) -> Index | None:
    """Return the index in a file; None if there is none. Raises ShardError for a damaged one."""
    if not is_remote(path):
        check_finished(os.path.dirname(path))
    return find_index(path)


def _opened(
    urls: Urls | Index, note: Note | None, *, may_be_short: bool = False
) -> tuple[Index, dict[str, list[str]]]:
    """Return the index of shards, and the paths of tars and index files that each address means."""
    if isinstance(urls, Index):
        return urls, {}
    given = [urls] if isinstance(urls, (str, os.PathLike)) else list(urls)
    addresses = [part for url in given for part in alternatives(os.fspath(url))]
    meant = {address: expand(address) for address in addresses}
    every = [path for address in addresses for path in meant[address]] or expand([])
    parts = [
        recall_or_scan(paths, note) if index is None else _checked(index, note, may_be_short)
        for paths, index in groups_of(every)
    ]
    return join_once(parts), meant


def _checked(index: Index, note: Note | None, may_be_short: bool) -> Index:
    """Return an index with the current states of its shards.

    Shards that are newer than their index and have no checksums are scanned. The result is stored, so
    a shard is scanned once. may_be_short: see `open_shards`; a shard that is cut is not scanned.
    Raises ShardError for a shard that differs from its index.
    """
    index = check_sizes(index, may_be_short=may_be_short)
    newer = [
        shard.path
        for shard in index.shards
        if index.expected_state(shard)
        and is_newer(shard)
        and os.path.getsize(shard.path) == shard.bytes
    ]
    failed: list[WdstrainError] | None = [] if may_be_short else None
    scanned = recall_or_scan(newer, note, failed) if newer else index.pick([])
    for shard in scanned.shards:
        listed, actual = picked(index, [shard.path]), picked(scanned, [shard.path])
        if listed.offsets.differences(actual.offsets):
            raise ShardError(
                f"{shard.path} holds other samples than its index says: it was replaced after it "
                f"was indexed. Accept it as it is: "
                f"wdstrain index {os.path.dirname(shard.path) or '.'}"
            )
    return index
