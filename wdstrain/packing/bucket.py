"""A finished set into a bucket: made on a disk first, put object by object, the index last.

An object is there whole or not at all, and without an index there is no set, so nobody reads half of one. What was put is known
by its checksum and not put again, so `resume` goes on with the objects that are missing.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import suppress

from wdstrain.errors import ShardError, UsageError
from wdstrain.packing.stage import BAD_NAME, RENAMED_NAME, is_foreign
from wdstrain.shards.index import Index
from wdstrain.shards.index_io import TABLE_NAME, read_document
from wdstrain.storage.addresses import INDEX_NAME
from wdstrain.storage.files import read_whole, user_cache, write_whole
from wdstrain.storage.object_store import list_folder_of, put, read_object, remove

_BEGUN = ".begun.json"  # in the folder that is put into a bucket: names of objects that are ours to replace or remove
_BESIDE = (TABLE_NAME, BAD_NAME, RENAMED_NAME)

Told = Callable[[int, int, int], None]  # objects put, objects in all, bytes


def outgoing(address: str) -> str:
    """The folder in the user's cache where a set is made before it goes into a bucket."""
    return user_cache(
        "outgoing", hashlib.blake2b(address.rstrip("/").encode(), digest_size=12).hexdigest()
    )


def check_free(address: str, *, overwrite: bool) -> None:
    """Raise UsageError if a set is there already and is not to be replaced, or files of others that would be."""
    listed = read_object(_at(address, INDEX_NAME))
    _check_index(address, listed)
    if listed is not None and not overwrite:
        raise UsageError(
            f"{address} holds a set already. Choose another place, or add --overwrite to replace it."
        )
    if not overwrite:
        _check_names(address, set(), None)


def deliver(index: Index, folder: str, address: str, told: Told) -> None:
    """Put the set in a folder into a bucket. A set that is there is replaced: its index goes first, its shards at the end.

    Raises UsageError, before anything is put, where an object of others would be replaced or taken for part of the set.
    """
    sums = {shard.name: shard.sha256 for shard in index.shards}
    names = sorted(
        (name for name in os.listdir(folder) if name != INDEX_NAME and not name.startswith(".")),
        key=lambda name: (name == TABLE_NAME, name),
    )
    listed = read_object(_at(address, INDEX_NAME))
    _check_index(address, listed)
    # what an attempt that was broken off replaced or put is known, also when the index that listed it is gone
    former = {str(name) for name in json.loads(read_whole(os.path.join(folder, _BEGUN)) or b"[]")}
    if listed is not None:
        with suppress(ShardError):
            former |= {
                *(row["url"] for row in read_document(_at(address, INDEX_NAME))["shardlist"]),
                *_BESIDE,
            }
    _check_names(address, former, {shard.split for shard in index.shards})
    write_whole(os.path.join(folder, _BEGUN), json.dumps(sorted({*former, *names})).encode())
    if listed is not None and listed != read_whole(os.path.join(folder, INDEX_NAME)):
        remove(_at(address, INDEX_NAME))
    size = 0
    for number, name in enumerate([*names, INDEX_NAME]):
        path = os.path.join(folder, name)
        put(_at(address, name), path, sums.get(name) or _sha256(path))
        size += os.path.getsize(path)
        told(number + 1, len(names) + 1, size)
    for name in sorted(former - {*names, INDEX_NAME}):
        remove(_at(address, os.path.basename(name)))


def _check_index(address: str, listed: bytes | None) -> None:
    if listed is not None and is_foreign(listed):
        raise UsageError(
            f"{_at(address, INDEX_NAME)} is no index of this package and would be replaced. Choose another place, or move it away."
        )


def _check_names(address: str, former: set[str], splits: set[str] | None) -> None:
    """Raise UsageError for objects that no index of this package lists and that would be replaced, or be taken for shards.

    former: names that may be replaced. splits: of the new set; None: not known yet.
    """
    for name in list_folder_of(_at(address, "")):
        split = name.rpartition("-")[0]
        shard = name.endswith(".tar") and (splits is None or split in splits)
        if name not in former and (shard or name in _BESIDE):
            raise UsageError(
                f"{address} holds {name}, which no index lists and which would be replaced or taken for part of the new set. "
                f"Choose another place, or move it away."
            )


def _at(address: str, name: str) -> str:
    return f"{address.rstrip('/')}/{name}"


def _sha256(path: str) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
