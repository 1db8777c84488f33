"""Remove samples from a finished set: only the shards that hold them are written again.

The other samples of such a shard are copied into a shard with a new number, which takes its place
in the index. Readers see the old set or the new one at any moment (`Staging`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from wdstrain.conversion.result import Written
from wdstrain.conversion.shard_writer import Packed, write_samples
from wdstrain.conversion.source_options import RemoveOptions
from wdstrain.conversion.sources.shards import read_keys
from wdstrain.conversion.staging import Staging
from wdstrain.errors import SourceError, UsageError
from wdstrain.runtime.options import takes
from wdstrain.shards.declare import class_counts
from wdstrain.shards.index import Index, join
from wdstrain.shards.offsets import Ints
from wdstrain.shards.resolve import open_index
from wdstrain.shards.where import matching
from wdstrain.storage.addresses import Urls
from wdstrain.storage.files import disk_errors
from wdstrain.storage.objects import is_object
from wdstrain.storage.remote import is_remote, redacted

Progress = Callable[[int, int], None]  # receives samples copied, and samples to copy


@dataclass(frozen=True)
class RemoveResult:
    """Counts of a removal. samples, bytes: of the set now. rewritten, deleted: shards."""

    folder: str
    removed: int
    samples: int
    bytes: int
    rewritten: int
    deleted: int

    def report(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        return asdict(self)


@takes(RemoveOptions)
def remove(options: RemoveOptions) -> RemoveResult:
    """Remove samples from a finished set, and return counts.

    A killed call is completed or started again by the same call. Raises UsageError for a set that
    is not on a disk or in a bucket, and if no sample would be left; SourceError for keys that no
    shard has; ShardError for a sample whose bytes have changed.
    """
    folder, wanted = _folder_of(options.urls), _wanted(options.keys)
    call = {"remove": [options.where, wanted, str(options.urls)]}
    with Staging(folder, change=True) as staging:
        try:
            if staging.completed.get("remove") == call["remove"]:
                return RemoveResult(**staging.completed["result"])
            index = staging.load()
            ids = _chosen(index, options, wanted)
            result = _planned(folder, index, ids)
            if len(ids) and not options.dry_run:
                with disk_errors(folder, "Free some space. The set is unchanged."):
                    result = _rewrite(staging, index, ids, call, result, options.progress)
            return result
        finally:
            staging.discard()


def _wanted(keys: str | os.PathLike[str] | Sequence[str] | None) -> list[str] | None:
    if isinstance(keys, (str, os.PathLike)):
        return sorted(read_keys(os.fspath(keys)))
    return None if keys is None else sorted(set(keys))


def _folder_of(urls: Urls) -> str:
    """Return the folder, on a disk or in a bucket, whose index lists these shards."""
    addresses = [urls] if isinstance(urls, (str, os.PathLike)) else list(urls)
    folders = set[str]()
    for address in [os.fspath(address) for address in addresses]:
        is_file = address.endswith((".tar", ".json")) and not os.path.isdir(address)
        folders.add(os.path.dirname(address) or "." if is_file else address)
    folder = folders.pop()
    if folders:
        raise UsageError(
            f"these shards lie in {len(folders) + 1} folders. Run this for each folder by itself."
        )
    if is_remote(folder) and not is_object(folder):
        raise UsageError(
            f"{redacted(folder)}: samples can be removed from a set on a disk or in a bucket. "
            f"Download the set, remove them, and upload it."
        )
    return folder


def _chosen(index: Index, options: RemoveOptions, wanted: list[str] | None) -> Ints:
    """Return the ids of the samples to remove, ascending.

    Raises SourceError for keys that none of the shards has.
    """
    named = {shard.name for shard in open_index(options.urls).shards}
    allowed = np.repeat([shard.name in named for shard in index.shards], index.counts)
    if wanted is None:
        return np.flatnonzero(matching(index, options.where or "") & allowed)
    keys, remove = index.keys(np.arange(len(index))), set(wanted)
    ids = [n for n in np.flatnonzero(allowed).tolist() if keys[n] in remove]
    missing = remove.difference(keys[n] for n in ids)
    if missing:
        raise SourceError(
            f"{len(missing)} of {len(wanted)} keys are in no shard, such as '{min(missing)}'. "
            f"Nothing was removed. Take out the keys that do not exist."
        )
    return np.array(ids, np.int64)


def _planned(folder: str, index: Index, ids: Ints) -> RemoveResult:
    left = index.counts - np.bincount(index.shard_of(ids), minlength=len(index.shards))
    if not left.any():
        raise UsageError(
            f"no sample of {folder} would be left. Delete the folder if that is intended."
        )
    changed = left < index.counts
    samples, size = int(left.sum()), sum(shard.bytes for shard in index.shards)
    rewritten, deleted = int((changed & (left > 0)).sum()), int((changed & (left == 0)).sum())
    return RemoveResult(folder, len(ids), samples, size, rewritten, deleted)


def _rewrite(
    staging: Staging,
    index: Index,
    ids: Ints,
    call: dict[str, Any],
    result: RemoveResult,
    progress: Progress | None,
) -> RemoveResult:
    """Write the changed shards without the samples `ids`, and put the new index in place."""
    folder, written = staging.folder("shards"), Written(staging, os.listdir(staging.out))
    stays = np.ones(len(index), bool)
    stays[ids] = False
    changed = set(index.shard_of(ids).tolist())
    total = int(stays[np.isin(index.shard_of(np.arange(len(index))), [*changed])].sum())
    parts, copied = list[Index](), 0

    def tick(samples: int, size: int) -> None:
        nonlocal copied
        copied += samples
        if progress is not None:
            progress(copied, total)

    for number, shard in enumerate(index.shards):
        old, first = index.pick([number]), int(index.first[number])
        local = np.flatnonzero(stays[first : int(index.first[number + 1])])
        if number not in changed:
            parts.append(old)
        elif len(local):
            path = os.path.join(folder, f"{number:06d}")
            # Read forward, and compared with the crc32 of each member.
            samples = ((old.key(row), list(fields.items())) for row, fields in old.read(local))
            new = write_samples(path, shard.split or "part", samples, tick)
            written.add(Packed(new, local, []))
            named = replace(written.parts[-1][0].shards[0], split=shard.split)
            new = replace(new.with_columns(old.take(local).columns), shards=(named,))
            parts.append(replace(new, labels=index.labels))
    made = replace(join(parts), labels=index.labels, shard_labels=())
    entry = {"count": len(ids), "where": call["remove"][0]}
    info = {**index.info, "removed": [*index.info.get("removed", []), entry]}
    info |= {"samples": class_counts(made)} if "samples" in info else {}
    result = replace(result, bytes=sum(shard.bytes for shard in made.shards))
    call = {**call, "result": asdict(result)}
    staging.commit(replace(made, info=info), folder, written.files, call)
    return result
