"""What an address means: the index of its shards, read, remembered or made.

Shards with an index beside them are taken as it says, after their sizes were compared. Shards that somebody else made are
walked over header by header once; what was found is remembered in a hidden folder beside them, or in the user's cache
folder where that cannot be written, and used for as long as a shard stays in the state in which it was found.
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
from wdstrain.shards.index import Index, Shard, join
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
from wdstrain.shards.labels import classes_in, label_bytes
from wdstrain.shards.tar import other_kind
from wdstrain.storage.local import (
    INDEX_NAME,
    Urls,
    beside,
    check_finished,
    expand,
    folder_of,
    is_json,
    is_state,
    read_whole,
    user_cache,
)
from wdstrain.storage.remote import is_remote, name_of, open_remote, redacted

_ASKING = 8  # servers are asked for so many shards at once
_HIDDEN = ".wdstrain"  # folder beside foreign shards for what was found in them

_log = logging.getLogger("wdstrain")

Note = Callable[[str], None]


def open_index(urls: Urls, *, note: Note | None = None, cut: bool = False) -> Index:
    """The index of the shards that `urls` mean: read where it lies beside them, remembered, or made by a walk over headers.

    Raises UsageError for addresses that mean nothing, ShardError for shards that are cut, damaged, unfinished or not
    what their index says. `note` is told what a walk costs. cut: shards may be shorter than their index says.
    """
    return gather(urls, partial(_checked, note=note, cut=cut), partial(walked, note=note))


def gather(urls: Urls, check: Callable[[Index], Index], walk: Callable[[list[str]], Index]) -> Index:
    """The index of the shards that `urls` mean, by somebody's own way with shards that are damaged and those that no index lists.

    check: given a part of the set that its index knows, returns what is to be used of it. walk: given shards of one folder that
    no index lists, returns theirs.
    """
    parts: list[Index] = []
    known: dict[str, Index | None] = {}
    listed = expand(urls)
    for (folder, is_index), paths in groupby(listed, key=lambda path: (beside(path, ""), is_json(path))):
        if is_remote(folder):
            if is_index:
                parts += [check(load(path)) for path in paths]
                continue
        else:
            check_finished(folder)
        if is_index and is_wdstrain_index(os.path.join(folder, INDEX_NAME)):
            parts += [check(load(path)) for path in paths]
            continue
        if is_index:  # an index of somebody else's: the shards beside it speak for themselves
            paths = iter(tars_of(folder))
        for known_to_us, group in groupby(paths, key=lambda path: _number(path, known) is not None):
            run = list(group)
            parts.append(check(_picked(run, known)) if known_to_us else walk(run))
    index = join(parts)
    named: dict[str, str] = {}
    folders: dict[str, str] = {}
    for shard in index.shards:
        real = _real(shard.path, folders)
        if real in named:
            also = f" (also as {named[real]})" if named[real] != shard.shown else ""
            raise UsageError(f"{shard.shown} is named twice{also}, so its samples would come twice. Name each shard once.")
        named[real] = shard.shown
    return index


def one_of(path: str, known: dict[str, Index | None]) -> Index | None:
    """The index of one shard, cut from the index beside it; None if there is none that lists it. Its size is not checked.

    known: the indexes read so far, by folder; empty at first.
    """
    number = _number(path, known)
    index = known[beside(path, "")]
    return index.pick([number]) if index is not None and number is not None else None


def make_index(urls: Urls) -> Index:
    """Index all shards of the folder that `urls` lie in as they are now, and write the index beside them.

    Only headers are read, and after a change the labels of classes, which are counted anew. Splits, labels and provenance of an
    index that lies there are kept, and the checksums of shards whose samples lie where they lay. Raises UsageError for shards of several folders or a folder without shards, ShardError
    for a shard that is cut or damaged.
    """
    listed = expand(urls)
    if any(map(is_remote, listed)):
        raise UsageError(
            "an index is written beside its shards, and a server takes none. Make it where they lie, and copy it there."
        )
    folders = {os.path.dirname(path) for path in listed}
    if len(folders) != 1:
        raise UsageError(f"an index lies beside its shards, and these lie in {len(folders)} folders. Name the shards of one.")
    folder = folders.pop()
    check_finished(folder)
    paths = tars_of(folder)
    if not paths:
        raise UsageError(f"{folder or '.'}: this folder holds no .tar file. Name the folder of the shards.")
    index, beside = scan(paths), os.path.join(folder, INDEX_NAME)
    changed = [shard.name for shard in index.shards if not _is_as_found(shard)]
    if changed:
        raise ShardError(f"{changed[0]} was written to while it was walked over. Run this again when it is whole.")
    if os.path.exists(beside) and is_wdstrain_index(beside):
        index = _kept(index, beside)
    save_index(index, folder)
    return index


def one_split(index: Index, urls: Urls) -> Index:
    """The index itself, unless one address alone means several splits: training data must not swallow the rest.

    Raises UsageError naming the addresses of the splits.
    """
    for address in [urls] if isinstance(urls, (str, os.PathLike)) else list(urls):
        meant = set(expand(address))
        if len(meant) == 1 and not any(map(is_json, meant)):
            continue  # one shard has one split; a list may name many thousands of them
        folders = {beside(path, "") for path in meant if is_json(path)}
        mine = [s for s in index.shards if s.path in meant or beside(s.path, "") in folders]
        splits = list(dict.fromkeys(shard.split for shard in mine))
        if len(splits) > 1:
            folder, shown = folder_of(mine[0].path) or ".", os.fspath(address)
            choices = ", ".join(f"{folder}/{_pattern(mine, split)}" for split in splits if split)
            shown = redacted(shown) if is_remote(shown) else shown
            named = f"{shown} holds several splits: {', '.join(filter(None, splits))}"
            loose = [shard.name for shard in mine if not shard.split]
            if loose:
                raise UsageError(
                    f"{named}, and shards without a split ({len(loose)}, the first is {loose[0]}). Name one split, or the shards without one: "
                    f"{choices}, or {folder}/{loose[0]}{' and so on' if len(loose) > 1 else ''}"
                )
            raise UsageError(f"{named}. Name one of: {choices}")
    return index


def _pattern(shards: list[Shard], split: str) -> str:
    """How the shards of a split are named together: a server cannot be asked what matches a *."""
    names = sorted(shard.name for shard in shards if shard.split == split)
    if not is_remote(shards[0].path):
        return f"{split}-*.tar"
    first, last = names[0], names[-1]
    if len(names) == 1 or not re.fullmatch(rf"{re.escape(split)}-\d+\.tar", first):
        return first
    return f"{split}-{{{first[len(split) + 1 : -4]}..{last[len(split) + 1 : -4]}}}.tar"


# --- parts -----------------------------------------------------------------------------------------------------------


def tars_of(folder: str) -> list[str]:
    """The tars of a folder, in name order."""
    return sorted(glob.glob(os.path.join(glob.escape(folder), "*.tar")))


def _number(path: str, known: dict[str, Index | None]) -> int | None:
    """The place of a shard in the index beside it. `known`: the indexes read so far, by folder."""
    folder, listed = beside(path, ""), beside(path, INDEX_NAME)
    if folder not in known:
        is_there = read_whole(listed) is not None if is_remote(path) else os.path.exists(listed)
        known[folder] = load(listed) if is_there and is_wdstrain_index(listed) else None
    index = known[folder]
    return index.shard_numbers.get(name_of(path)) if index is not None else None


def _picked(paths: list[str], known: dict[str, Index | None]) -> Index:
    index = known[beside(paths[0], "")]
    assert index is not None
    return index.pick(index.shard_numbers[name_of(path)] for path in paths)


def _real(path: str, folders: dict[str, str]) -> str:
    """The path of a shard without links. folders: those of its folders so far."""
    if is_remote(path):
        return path
    if os.path.islink(path):
        return os.path.realpath(path)
    folder, name = os.path.split(path)
    if folder not in folders:
        folders[folder] = os.path.realpath(folder)
    return os.path.join(folders[folder], name)


def _checked(index: Index, *, note: Note | None, cut: bool) -> Index:
    """A part of a set as it is found now. Raises ShardError for a shard that is not what its index says."""
    return _checked_headers(check_sizes(index, cut=cut), note, cut=cut)


def _checked_headers(index: Index, note: Note | None, *, cut: bool) -> Index:
    """Walk over shards that were changed or copied after their index was made and have no checksums. Raises ShardError where a
    shard has other samples than its index says.

    A walk is remembered, so a shard is walked over once. cut: shards that are cut or damaged are left as they are.
    """
    doubtful = [n for n, shard in enumerate(index.shards) if index.expected_state(shard) and _is_newer(shard.path)]
    if not doubtful:
        return index
    failed: list[WdstrainError] | None = [] if cut else None
    whole = [
        index.shards[n].path for n in doubtful if not cut or os.path.getsize(index.shards[n].path) == index.shards[n].bytes
    ]
    found = walked(whole, note, failed) if whole else index.pick([])
    for n in doubtful:
        shard = index.shards[n]
        if shard.name in found.shard_numbers and not _same_samples(
            index.pick([n]), found.pick([found.shard_numbers[shard.name]])
        ):
            folder = os.path.dirname(shard.path) or "."
            raise ShardError(
                f"{shard.path} holds other samples than its index says: it was replaced after it was indexed. Accept it as it is: "
                f"wdstrain index {folder}"
            )
    return index


def _is_newer(path: str) -> bool:
    """Whether a shard here was changed, or put where it is, after the index beside it."""
    if is_remote(path):
        return False
    try:
        shard, index = os.stat(path), os.stat(beside(path, INDEX_NAME))
    except OSError:
        return False
    return max(shard.st_mtime_ns, shard.st_ctime_ns) >= index.st_mtime_ns


def _kept(index: Index, beside: str) -> Index:
    """An index with what an earlier one knew and a walk over headers does not tell."""
    document = read_document(beside)
    splits, labels, info = splits_of(document), labels_of(document), {**info_of(document), **index.info}
    former: Index | None = None
    with suppress(ShardError):
        former = load(beside)
    parts, new = [], []
    for number, shard in enumerate(index.shards):
        one, shard = index.pick([number]), replace(shard, split=splits.get(shard.name, ""))
        was = (
            former.pick([former.shard_numbers[shard.name]])
            if former is not None and shard.name in former.shard_numbers
            else None
        )
        if was is not None and was.shards[0].bytes == shard.bytes and _same_samples(one, was):
            one, shard = replace(was, labels=()), replace(shard, sha256=was.shards[0].sha256)
        else:
            new.append(shard.name)
        parts.append(replace(one, shards=(shard,)))
    found = replace(join(parts), labels=labels, info=info)
    if "samples" in info and (new or set(splits) - set(index.shard_numbers)):
        found.info["samples"] = _counted(found)
    for label in labels if new else ():
        if label.kind == "class" and label.column is None:
            _log.warning(
                "new in this set: %s. Numbers in their %s count as classes of this set: %s",
                ", ".join(new[:5]) + (f" and {len(new) - 5} more" if len(new) > 5 else ""),
                label.field,
                label.numbering,
            )
    return found


def _counted(index: Index) -> dict[str, dict[str, int]]:
    """Samples of each split by class, from the labels themselves; those without a label that can be read count as ""."""
    label = next((one for one in index.labels if one.kind == "class"), None)
    names = dict.fromkeys(range(len(index)), "")
    if label is not None:
        for i, data in label_bytes(index, label.field, np.arange(len(index))):
            names[i] = next(iter(classes_in(data, label.column, label.classes)), "")
    found: dict[str, dict[str, int]] = {}
    for number, shard in enumerate(index.shards):
        ids = range(int(index.first[number]), int(index.first[number + 1]))
        counts = Counter(names[i] for i in ids) + Counter(found.get(shard.split, {}))
        order = {name: place for place, name in enumerate(label.classes if label is not None else ())}
        found[shard.split] = dict(sorted(counts.items(), key=lambda one: (order.get(one[0], len(order)), one[0])))
    return found


def _same_samples(a: Index, b: Index) -> bool:
    if [a.members(i) for i in range(len(a))] != [b.members(i) for i in range(len(b))]:
        return False
    return all(
        np.array_equal(getattr(a.table, name), getattr(b.table, name)) for name in ("start", "stop", "key_first", "keys")
    )


# --- remembering -----------------------------------------------------------------------------------------------------


def walked(paths: list[str], note: Note | None, failed: list[WdstrainError] | None = None) -> Index:
    """The index of shards of one folder that no index lists: what is remembered of them, and a walk over the others.

    failed: takes what is wrong with shards, which are then left away; None: the first that is wrong is raised.
    """
    known = recall(paths)
    fresh = [path for path in paths if name_of(path) not in known.shard_numbers]
    if not fresh:
        return known
    begun = time.perf_counter()
    found = scan(fresh, failed)
    seconds, index = time.perf_counter() - begun, join([part for part in (known, found) if part.shards] or [known])
    if found.shards:
        place = _remember(index, _folder(paths))
        if note:
            kept = f"remembered in {place}" if place else "not remembered: neither the folder nor the cache can be written"
            note(
                f"no index beside {found.shards[0].shown}: walked over the headers of {len(found)} samples in {seconds:.2f} s "
                f"({len(found) / max(seconds, 1e-9):.0f}/s); {kept}{_passed_over(found)}"
            )
    return index.pick(index.shard_numbers[name] for name in map(name_of, paths) if name in index.shard_numbers)


def _passed_over(found: Index) -> str:
    """What a walk passed over that may have been part of a sample, as one clause; "" if nothing."""
    ignored = found.info.get("ignored", {})
    some = [f"{count} times {reason}" for reason, count in ignored.items() if reason != other_kind(b"5", "")]
    return f". Passed over, no part of any sample: {', '.join(some)}" if some else ""


def recall(paths: list[str]) -> Index:
    """The index of those of some shards of one folder of which an earlier walk is remembered, in their order."""
    for path in paths:
        if path.endswith(".tmp"):
            raise UsageError(f"{path} is a shard that was not finished. Run the conversion again.")
    found = _recall(_folder(paths), {name_of(path) for path in paths})
    if found is None:
        return scan([])
    return found.pick(found.shard_numbers[name] for name in map(name_of, paths) if name in found.shard_numbers)


def _folder(paths: list[str]) -> str:
    return beside(paths[0], "") if is_remote(paths[0]) else os.path.dirname(paths[0])


def _places(folder: str) -> Iterator[str]:
    """Where what was found in a folder may be remembered, the best place first."""
    if not is_remote(folder):
        yield os.path.join(folder, _HIDDEN)
    name = blake2b(
        (folder if is_remote(folder) else os.path.abspath(folder)).encode("utf-8", "surrogateescape"), digest_size=12
    ).hexdigest()
    yield user_cache("indexes", name)


def _recall(folder: str, wanted: set[str]) -> Index | None:
    """What is remembered of those of the wanted shards of a folder that have not changed since."""
    for place in _places(folder):
        with suppress(ShardError, OSError):
            index = load(os.path.join(place, INDEX_NAME), base=folder)
            states = index.info.get("states")
            states = states if isinstance(states, dict) else {}
            index = index.pick(i for i, shard in enumerate(index.shards) if shard.name in wanted)
            index = replace(index, shards=tuple(replace(one, tag=str(states.get(one.name) or "")) for one in index.shards))
            with ThreadPoolExecutor(_ASKING) as threads:
                same = [i for i, is_same in enumerate(threads.map(_is_as_found, index.shards)) if is_same]
            return index.pick(same) if same else None
    return None


def _remember(index: Index, folder: str) -> str | None:
    """Write down what was found; returns where, or None where nothing can be written."""
    states = {shard.name: shard.tag or None for shard in index.shards}
    for place in _places(folder):
        with suppress(OSError, StorageError):
            os.makedirs(place, exist_ok=True)
            save_index(replace(index, info={**index.info, "states": states}), place)
            return place
    return None


def _is_as_found(shard: Shard) -> bool:
    """Whether a shard is in the state in which it was walked over. Of one that is not there, whoever reads it will say so."""
    if is_remote(shard.path):
        try:
            with open_remote(shard.path) as source:
                # one of which its server says nothing may be any other of the same size
                return source.size == shard.bytes and source.version is not None and source.version == shard.tag
        except StorageError:
            return False
    try:
        found = os.stat(shard.path)
    except OSError:
        return False
    return found.st_size == shard.bytes and is_state(shard.tag, found)
