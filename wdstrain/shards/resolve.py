"""Addresses to an index: read it beside the shards, recall it, or make it from tar headers.

An index beside the shards is used after the sizes of the shards were compared. Shards without an
index are scanned header by header once (`header_scans`).
"""

from __future__ import annotations

import glob
import logging
import os
import re
from collections.abc import Callable
from functools import partial
from itertools import groupby

from wdstrain.errors import ShardError, UsageError, WdstrainError
from wdstrain.shards.header_scans import Note, recall_or_scan
from wdstrain.shards.index import Index, Shard, join
from wdstrain.shards.index_document import (
    is_wdstrain_index,
)
from wdstrain.shards.index_io import check_sizes, load
from wdstrain.storage.addresses import (
    INDEX_NAME,
    Urls,
    alternatives,
    beside,
    check_finished,
    check_no_change,
    expand,
    folder_of,
    is_json,
)
from wdstrain.storage.files import read_whole
from wdstrain.storage.remote import is_remote, name_of, shown_path

_log = logging.getLogger("wdstrain")


def open_index(urls: Urls, *, note: Note | None = None, may_be_short: bool = False) -> Index:
    """Return the index of the shards at `urls`.

    note: receives a line about each scan of headers. may_be_short: shards may have fewer bytes than
    their index says. Raises UsageError for addresses without shards, ShardError for shards that are cut,
    damaged, unfinished or different from their index.
    """
    return gather(
        urls,
        partial(_checked, note=note, may_be_short=may_be_short),
        partial(recall_or_scan, note=note),
    )


def gather(
    urls: Urls, check: Callable[[Index], Index], scan_shards: Callable[[list[str]], Index]
) -> Index:
    """Return the index of the shards at `urls`, with the caller's way of checking and scanning.

    check: takes the index of shards that an index file lists, returns the index to use.
    scan_shards: takes paths of shards of one folder that no index file lists, returns their index.
    Raises UsageError for addresses without shards and for a shard that is named twice.
    """
    parts: list[Index] = []
    known: dict[str, Index | None] = {}
    listed = expand(urls)
    for (folder, is_index), paths in groupby(
        listed, key=lambda path: (beside(path, ""), is_json(path))
    ):
        if is_remote(folder):
            if is_index:
                parts += [check(load(path)) for path in paths]
                continue
        else:
            check_finished(folder)
        if is_index and is_wdstrain_index(os.path.join(folder, INDEX_NAME)):
            parts += [check(load(path)) for path in paths]
            continue
        if is_index:  # another tool's list without offsets: use the shards beside it
            paths = iter(tars_of(folder))
        for is_indexed, group in groupby(paths, key=lambda path: _number(path, known) is not None):
            run = list(group)
            if not is_indexed and known[beside(run[0], "")] is not None:
                check_no_change(run[0])
            parts.append(check(_picked(run, known)) if is_indexed else scan_shards(run))
    index = join(parts)
    named: dict[str, Shard] = {}  # by real path
    folders: dict[str, str] = {}
    for shard in index.shards:
        real = _real(shard.path, folders)
        if real in named:
            other = named[real].shown
            also = f" (also as {other})" if other != shard.shown else ""
            raise UsageError(
                f"{shard.shown} is named twice{also}, so its samples would come twice. Name each shard once."
            )
        named[real] = shard
    return index


def shard_index(path: str, known: dict[str, Index | None]) -> Index | None:
    """Return the index of one shard from the index beside it; None if that does not list it.

    known: indexes read so far, by folder; the call adds to them. The size is not checked.
    """
    number = _number(path, known)
    index = known[beside(path, "")]
    return index.pick([number]) if index is not None and number is not None else None


def require_one_split(index: Index, urls: Urls) -> Index:
    """Return `index` unchanged after checking that no single address in `urls` has several splits.

    This keeps validation data out of training. A brace pattern such as {train,extra}-*.tar names
    its splits, and counts as several addresses. Raises UsageError with the address of each split.
    """
    given = [urls] if isinstance(urls, (str, os.PathLike)) else list(urls)
    for address in (part for url in given for part in alternatives(os.fspath(url))):
        meant = set(expand(address))
        if len(meant) == 1 and not any(map(is_json, meant)):
            continue  # one shard has one split; this is quick for lists of thousands of shards
        folders = {beside(path, "") for path in meant if is_json(path)}
        mine = [s for s in index.shards if s.path in meant or beside(s.path, "") in folders]
        splits = list(dict.fromkeys(shard.split for shard in mine))
        if len(splits) > 1:
            folder, shown = folder_of(mine[0].path) or ".", os.fspath(address)
            choices = ", ".join(f"{folder}/{_pattern(mine, split)}" for split in splits if split)
            shown = shown_path(shown)
            named = f"{shown} holds several splits: {', '.join(filter(None, splits))}"
            unsplit = [shard.name for shard in mine if not shard.split]
            if unsplit:
                raise UsageError(
                    f"{named}, and shards without a split ({len(unsplit)}, the first is "
                    f"{unsplit[0]}). Name one split, or the shards without one: {choices}, or "
                    f"{folder}/{unsplit[0]}{' and so on' if len(unsplit) > 1 else ''}"
                )
            raise UsageError(f"{named}. Name one of: {choices}")
    return index


def _pattern(shards: list[Shard], split: str) -> str:
    """Return a pattern that names the shards of a split.

    Remote shards get a range in braces, because servers cannot list the names that match a `*`.
    """
    names = sorted(shard.name for shard in shards if shard.split == split)
    if not is_remote(shards[0].path):
        return f"{split}-*.tar"
    first, last = names[0], names[-1]
    if len(names) == 1 or not re.fullmatch(rf"{re.escape(split)}-\d+\.tar", first):
        return first
    return f"{split}-{{{first[len(split) + 1 : -4]}..{last[len(split) + 1 : -4]}}}.tar"


# --- parts ----------------------------------------------------------------------------------------


def tars_of(folder: str) -> list[str]:
    """Return the paths of the tars in a folder, sorted by name."""
    return sorted(glob.glob(os.path.join(glob.escape(folder), "*.tar")))


def _number(path: str, known: dict[str, Index | None]) -> int | None:
    """Return the number of a shard in the index beside it; None if that does not list it.

    known: indexes read so far, by folder; the call adds to them.
    """
    folder, listed = beside(path, ""), beside(path, INDEX_NAME)
    if folder not in known:
        is_there = read_whole(listed) is not None if is_remote(path) else os.path.exists(listed)
        known[folder] = load(listed) if is_there and is_wdstrain_index(listed) else None
    index = known[folder]
    return index.shard_numbers.get(name_of(path)) if index is not None else None


def _picked(paths: list[str], known: dict[str, Index | None]) -> Index:
    """Return the index of these shards of one folder, from the index beside them."""
    index = known[beside(paths[0], "")]
    assert index is not None
    return index.pick(index.shard_numbers[name_of(path)] for path in paths)


def _real(path: str, folders: dict[str, str]) -> str:
    """Return the path of a shard without links.

    folders: real paths of folders so far; the call adds to them.
    """
    if is_remote(path):
        return path
    if os.path.islink(path):
        return os.path.realpath(path)
    folder, name = os.path.split(path)
    if folder not in folders:
        folders[folder] = os.path.realpath(folder)
    return os.path.join(folders[folder], name)


def _checked(index: Index, *, note: Note | None, may_be_short: bool) -> Index:
    """Return an index with the current states of its shards.

    Raises ShardError for a shard that differs from its index. may_be_short: see `open_index`.
    """
    return _checked_headers(
        check_sizes(index, may_be_short=may_be_short), note, may_be_short=may_be_short
    )


def _checked_headers(index: Index, note: Note | None, *, may_be_short: bool) -> Index:
    """Return `index` after scanning its shards that are newer than it and have no checksums.

    Raises ShardError for a shard with other samples than in its index. The result of a scan is
    stored, so a shard is scanned once. may_be_short: shards that are cut or damaged are not compared.
    """
    newer = [
        n
        for n, shard in enumerate(index.shards)
        if _is_newer(shard.path) and index.expected_state(shard)
    ]
    if not newer:
        return index
    failed: list[WdstrainError] | None = [] if may_be_short else None
    complete = [
        index.shards[n].path
        for n in newer
        if not may_be_short or os.path.getsize(index.shards[n].path) == index.shards[n].bytes
    ]
    scanned = recall_or_scan(complete, note, failed) if complete else index.pick([])
    for n in newer:
        shard = index.shards[n]
        number = scanned.shard_numbers.get(shard.name)
        if number is not None and index.pick([n]).offsets.differences(
            scanned.pick([number]).offsets
        ):
            folder = os.path.dirname(shard.path) or "."
            raise ShardError(
                f"{shard.path} holds other samples than its index says: it was replaced after it "
                f"was indexed. Accept it as it is: wdstrain index {folder}"
            )
    return index


def _is_newer(path: str) -> bool:
    """Return whether a local shard was changed or moved after the index beside it was written."""
    if is_remote(path):
        return False
    try:
        shard, index = os.stat(path), os.stat(beside(path, INDEX_NAME))
    except OSError:
        return False
    return max(shard.st_mtime_ns, shard.st_ctime_ns) >= index.st_mtime_ns
