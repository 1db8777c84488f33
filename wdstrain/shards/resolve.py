"""Addresses to an index: read it beside the shards, recall it, or make it from tar headers.

An index beside the shards is used after the sizes of the shards were compared. Shards without an
index are scanned header by header once. The result is stored in a hidden folder beside them, or in
the user's cache folder if that cannot be written. It is used as long as the state of a shard
(times and inode, or ETag) does not change.
"""

from __future__ import annotations

import glob
import logging
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from itertools import groupby

import numpy as np

from wdstrain.errors import ShardError, StorageError, UsageError, WdstrainError
from wdstrain.report.printing import printable
from wdstrain.runtime.options import takes
from wdstrain.shards.declare import with_columns, with_label
from wdstrain.shards.index import Index, Shard, join, with_labels
from wdstrain.shards.index_io import (
    check_sizes,
    info_of,
    is_wdstrain_index,
    labels_of,
    load,
    read_document,
    save_index,
    scan,
    splits_of,
)
from wdstrain.shards.labels import classes_in, label_bytes, read_columns
from wdstrain.shards.options import IndexOptions
from wdstrain.shards.tar import other_kind
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
from wdstrain.storage.files import read_whole, user_cache
from wdstrain.storage.local import is_state
from wdstrain.storage.remote import is_remote, name_of, open_remote, redacted

_STATE_THREADS = 8  # shards whose state is requested at the same time
_HIDDEN = ".wdstrain"  # folder beside shards without an index, for the result of a scan

_log = logging.getLogger("wdstrain")

Note = Callable[[str], None]  # receives a line for the log


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


@takes(IndexOptions)
def make_index(options: IndexOptions) -> Index:
    """Make the index of all shards in a folder, write it there, and return it.

    Only headers are read, the chosen columns, and the columns of shards that the existing index does
    not list as they are. Splits, labels and provenance of an existing index are kept, and the
    checksums and columns of shards whose samples have the same offsets. Raises UsageError for shards
    of several folders, for a folder without shards, and for columns and labels that do not fit,
    ShardError for a shard that is cut or damaged.
    """
    listed = expand(options.urls)
    if any(map(is_remote, listed)):
        raise UsageError(
            "an index is written beside its shards, which is not possible on a server. "
            "Make it where the files are stored, then copy it to the server."
        )
    folders = {os.path.dirname(path) for path in listed}
    if len(folders) != 1:
        raise UsageError(
            f"these shards lie in {len(folders)} folders; an index lists the shards of one folder. Run this for each folder."
        )
    folder = folders.pop()
    check_finished(folder)
    paths = tars_of(folder)
    if not paths:
        raise UsageError(
            f"{folder or '.'}: this folder holds no .tar file. Name the folder of the shards."
        )
    index, index_path = scan(paths), os.path.join(folder, INDEX_NAME)
    changed = [shard.name for shard in index.shards if not _is_unchanged(shard)]
    if changed:
        raise ShardError(
            f"{changed[0]} was written to while it was scanned. Run this again when it is complete."
        )
    if os.path.exists(index_path) and is_wdstrain_index(index_path):
        index = _with_former(index, index_path)
    if options.columns:
        index = with_columns(index, options.columns)
    if options.label is not None:
        index = with_label(index, options.label, options.classes)
    save_index(index, folder)
    return index


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
            shown = redacted(shown) if is_remote(shown) else shown
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
        if number is not None and not _same_samples(index.pick([n]), scanned.pick([number])):
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


def _with_former(index: Index, index_path: str) -> Index:
    """Return `index` with what headers do not give, from the former index file at `index_path`.

    Splits, labels and provenance are kept; so are checksums of shards with unchanged samples.
    """
    document = read_document(index_path)
    splits, labels, info = (
        splits_of(document),
        labels_of(document),
        {**info_of(document), **index.info},
    )
    former: Index | None = None
    with suppress(ShardError):
        former = load(index_path)
    known = former.columns if former is not None else ()
    places = {column.place for column in known} | {label.place for label in labels}
    parts, new = [], []
    for number, shard in enumerate(index.shards):
        part, shard = index.pick([number]), replace(shard, split=splits.get(shard.name, ""))
        old = None
        if former is not None and shard.name in former.shard_numbers:
            old = former.pick([former.shard_numbers[shard.name]])
        if old is not None and old.shards[0].bytes == shard.bytes and _same_samples(part, old):
            part, shard = replace(old, labels=()), replace(shard, sha256=old.shards[0].sha256)
        else:
            new.append(shard.name)
            if old is not None:
                _warn_of_losses(old, part)
            part = replace(with_labels(read_columns(part, places), labels), labels=())
        parts.append(replace(part, shards=(shard,)))
    merged = replace(join(parts), labels=labels, info=info)
    if "samples" in info and (new or set(splits) - set(index.shard_numbers)):
        merged.info["samples"] = class_counts(merged)
    for label in labels if new else ():
        if label.kind == "class" and label.column is None:
            _log.warning(
                "new in this set: %s. Numbers in their %s are class numbers of this set: %s",
                ", ".join(new[:5]) + (f" and {len(new) - 5} more" if len(new) > 5 else ""),
                label.field,
                label.numbering,
            )
    return merged


def _warn_of_losses(old: Index, new: Index) -> None:
    """Log what the former index of one shard lists and the shard no longer holds."""
    fields: dict[str, set[str]] = {}
    for i, key in enumerate(new.keys(np.arange(len(new)))):
        fields.setdefault(key, set()).update(field for field, _, _ in new.members(i))
    lost = []
    for i, key in enumerate(old.keys(np.arange(len(old)))):
        gone = [field for field, _, _ in old.members(i) if field not in fields.get(key, ())]
        if gone:
            lost.append(printable(f"'{key[:80]}' ({', '.join(gone)})"))
    if lost:
        _log.warning(
            "%s lost fields of %d samples since its index was made: %s. The new index leaves them "
            "out. If that was not intended, restore the shard.",
            new.shards[0].shown,
            len(lost),
            ", ".join(lost[:5]) + (f" and {len(lost) - 5} more" if len(lost) > 5 else ""),
        )


def class_counts(index: Index) -> dict[str, dict[str, int]]:
    """Return the number of samples of each class, by split, from the labels in the shards.

    Samples without a readable label count as the class "".
    """
    label = next((label for label in index.labels if label.kind == "class"), None)
    names = dict.fromkeys(range(len(index)), "")
    if label is not None:
        for i, data in label_bytes(index, label.field, np.arange(len(index))):
            names[i] = next(iter(classes_in(data, label.column, label.classes)), "")
    order = {name: place for place, name in enumerate(label.classes if label is not None else ())}
    by_split: dict[str, dict[str, int]] = {}
    for number, shard in enumerate(index.shards):
        ids = range(int(index.first[number]), int(index.first[number + 1]))
        counts = Counter(names[i] for i in ids) + Counter(by_split.get(shard.split, {}))
        by_split[shard.split] = dict(
            sorted(counts.items(), key=lambda item: (order.get(item[0], len(order)), item[0]))
        )
    return by_split


def _same_samples(a: Index, b: Index) -> bool:
    """Return whether two indexes have the same keys, fields and offsets."""
    if [a.members(i) for i in range(len(a))] != [b.members(i) for i in range(len(b))]:
        return False
    return all(
        np.array_equal(getattr(a.offsets, name), getattr(b.offsets, name))
        for name in ("start", "stop", "key_first", "keys")
    )


# --- remembering ----------------------------------------------------------------------------------


def recall_or_scan(
    paths: list[str], note: Note | None, failed: list[WdstrainError] | None = None
) -> Index:
    """Return the index of shards of one folder that no index lists: recalled or scanned.

    note: receives a line about the scan. failed: a list that receives the errors of bad shards,
    which are then left out; None: the first error is raised.
    """
    known = recall(paths)
    fresh = [path for path in paths if name_of(path) not in known.shard_numbers]
    if not fresh:
        return known
    begun = time.perf_counter()
    scanned = scan(fresh, failed)
    seconds = time.perf_counter() - begun
    index = join([part for part in (known, scanned) if part.shards] or [known])
    if scanned.shards:
        place = _remember(index, _folder(paths))
        if note:
            stored = "not remembered: neither the folder nor the cache can be written"
            if place:
                stored = f"remembered in {place}"
            rate = len(scanned) / max(seconds, 1e-9)
            note(
                f"no index beside {scanned.shards[0].shown}: scanned the headers of "
                f"{len(scanned)} samples in {seconds:.2f} s ({rate:.0f}/s); "
                f"{stored}{_skipped(scanned)}"
            )
    return index.pick(
        index.shard_numbers[name] for name in map(name_of, paths) if name in index.shard_numbers
    )


def _skipped(index: Index) -> str:
    """Return a sentence about members that a scan skipped, without directories; "" if none."""
    ignored = index.info.get("ignored", {})
    is_directory = other_kind(b"5", "")
    counts = [
        f"{count} times {reason}" for reason, count in ignored.items() if reason != is_directory
    ]
    return f". Passed over, no part of any sample: {', '.join(counts)}" if counts else ""


def recall(paths: list[str]) -> Index:
    """Return the index of the shards among `paths` that an earlier scan stored, in their order.

    paths: shards of one folder. Raises UsageError for a shard that was not finished.
    """
    for path in paths:
        if path.endswith(".tmp"):
            raise UsageError(f"{path} is a shard that was not finished. Run the conversion again.")
    index = _recall(_folder(paths), {name_of(path) for path in paths})
    if index is None:
        return scan([])
    return index.pick(
        index.shard_numbers[name] for name in map(name_of, paths) if name in index.shard_numbers
    )


def _folder(paths: list[str]) -> str:
    return beside(paths[0], "") if is_remote(paths[0]) else os.path.dirname(paths[0])


def _places(folder: str) -> Iterator[str]:
    """Yield the folders where a scan of `folder` may be stored, the best first."""
    if not is_remote(folder):
        yield os.path.join(folder, _HIDDEN)
    name = blake2b(
        (folder if is_remote(folder) else os.path.abspath(folder)).encode(
            "utf-8", "surrogateescape"
        ),
        digest_size=12,
    ).hexdigest()
    yield user_cache("indexes", name)


def _recall(folder: str, wanted: set[str]) -> Index | None:
    """Return the stored index of the wanted shards (names) that have not changed since.

    None if nothing is stored for them.
    """
    for place in _places(folder):
        with suppress(ShardError, OSError):
            index = load(os.path.join(place, INDEX_NAME), base=folder)
            states = index.info.get("states")
            states = states if isinstance(states, dict) else {}
            index = index.pick(i for i, shard in enumerate(index.shards) if shard.name in wanted)
            shards = [
                replace(shard, tag=str(states.get(shard.name) or "")) for shard in index.shards
            ]
            index = replace(index, shards=tuple(shards))
            with ThreadPoolExecutor(_STATE_THREADS) as threads:
                unchanged = list(threads.map(_is_unchanged, index.shards))
            same = [i for i, is_same in enumerate(unchanged) if is_same]
            return index.pick(same) if same else None
    return None


def _remember(index: Index, folder: str) -> str | None:
    """Store the result of a scan of `folder`; return where, or None if no place can be written."""
    states = {shard.name: shard.tag or None for shard in index.shards}
    for place in _places(folder):
        with suppress(OSError, StorageError):
            os.makedirs(place, exist_ok=True)
            save_index(replace(index, info={**index.info, "states": states}), place)
            return place
    return None


def _is_unchanged(shard: Shard) -> bool:
    """Return whether a shard still has the state it had when it was scanned.

    False also for a missing shard: reading it raises the error.
    """
    if is_remote(shard.path):
        try:
            with open_remote(shard.path) as source:
                # Without an ETag it may be any other shard of the same size
                is_same_size = source.size == shard.bytes
                return is_same_size and source.version is not None and source.version == shard.tag
        except StorageError:
            return False
    try:
        status = os.stat(shard.path)
    except OSError:
        return False
    return status.st_size == shard.bytes and is_state(shard.tag, status)
