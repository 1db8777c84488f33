"""A finished set into a bucket: made on a disk first, put object by object, the index last.

An object is there whole or not at all, and without an index there is no set, so nobody reads half of one. What was put is known
by its checksum and not put again, so `resume` goes on with the objects that are missing.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from contextlib import suppress

from wdstrain.errors import ShardError, UsageError
from wdstrain.index_files import BIN_NAME, read_document
from wdstrain.indexing import Index
from wdstrain.objects import put, read_object, remove
from wdstrain.storage import INDEX_NAME, read_whole, user_cache

Told = Callable[[int, int, int], None]  # objects put, objects in all, bytes


def outgoing(address: str) -> str:
    """The folder in the user's cache where a set is made before it goes into a bucket."""
    return user_cache("outgoing", hashlib.blake2b(address.rstrip("/").encode(), digest_size=12).hexdigest())


def check_free(address: str) -> None:
    """Raise UsageError if a set is there already."""
    if read_object(_at(address, INDEX_NAME)) is not None:
        raise UsageError(f"{address} holds a set already. Choose another place, or add --overwrite to replace it.")


def deliver(index: Index, folder: str, address: str, told: Told) -> None:
    """Put the set in a folder into a bucket. A set that is there is replaced: its index goes first, its shards at the end."""
    sums = {shard.name: shard.sha256 for shard in index.shards}
    names = sorted(set(os.listdir(folder)) - {INDEX_NAME}, key=lambda name: (name == BIN_NAME, name))
    former: set[str] = set()
    with suppress(ShardError):
        former = {row["url"] for row in read_document(_at(address, INDEX_NAME))["shardlist"]}
    if former and read_object(_at(address, INDEX_NAME)) != read_whole(os.path.join(folder, INDEX_NAME)):
        remove(_at(address, INDEX_NAME))
    size = 0
    for number, name in enumerate([*names, INDEX_NAME]):
        path = os.path.join(folder, name)
        put(_at(address, name), path, sums.get(name) or _sha256(path))
        size += os.path.getsize(path)
        told(number + 1, len(names) + 1, size)
    for name in sorted(former - set(sums)):
        remove(_at(address, os.path.basename(name)))


def _at(address: str, name: str) -> str:
    return f"{address.rstrip('/')}/{name}"


def _sha256(path: str) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
