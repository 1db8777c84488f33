"""Sets in a bucket: made or changed in a local folder, and published as a whole.

The local folder holds the index of the set, and for each of its shards a file of the same size
without disk blocks. `Staging` changes it like any folder, and publishes each change that is
decided: new shards, then the index, then old objects are deleted. A killed change is published by
the next command, from the same folder.

The shards of a new set go into the bucket as they are finished, and their files give their disk
space back. Without an index there is no set, so nobody reads half of one. Shards of a set that is
replaced or extended are uploaded at the end.
"""

from __future__ import annotations

import glob
import os
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from hashlib import blake2b

from wdstrain.errors import ShardError, UsageError
from wdstrain.shards.index import Shard
from wdstrain.shards.index_document import find_document
from wdstrain.shards.index_io import TABLE_NAME
from wdstrain.storage.addresses import INDEX_NAME, UNFINISHED
from wdstrain.storage.files import disk_errors, read_whole, user_cache, write_whole
from wdstrain.storage.objects import list_folder_of, put, remove
from wdstrain.storage.remote import read_remote

SKIPPED_NAME = "skipped.jsonl"  # samples that were skipped, with reasons
RENAMED_NAME = "renamed.jsonl"  # samples whose key is not their name in the source

_SENT = ".sent"  # ending of the file beside an uploaded shard: its name in the bucket, its sha256
_READ = (INDEX_NAME, TABLE_NAME, SKIPPED_NAME, RENAMED_NAME)

Uploaded = Callable[[int, int, int], None]  # receives objects uploaded, bytes, objects in all


class Bucket:
    """A set in a bucket, and its local folder."""

    def __init__(self, address: str, uploaded: Uploaded | None) -> None:
        self._address, self._uploaded = address.rstrip("/"), uploaded or (lambda *counts: None)
        digest = blake2b(self._address.encode(), digest_size=12).hexdigest()
        self.folder = user_cache("outgoing", digest)

    def fetch(self) -> str:
        """Return the local folder, made anew unless it holds an unfinished conversion.

        Raises UsageError if another program changed the set since that began.
        """
        if os.path.exists(os.path.join(self.folder, UNFINISHED)):
            self._check(os.path.join(self.folder, UNFINISHED, "shards"), may_be_gone=True)
            return self.folder
        shutil.rmtree(self.folder, ignore_errors=True)
        names = list_folder_of(self._object(""))
        if SKIPPED_NAME in names and INDEX_NAME not in names:
            raise UsageError(
                f"{self._object(SKIPPED_NAME)} is there, which no index lists and which would be "
                f"replaced. Choose another place, or move it away."
            )
        os.makedirs(self.folder, exist_ok=True)
        for name in names:
            data = read_remote(self._object(name)) if name in _READ else None
            with open(os.path.join(self.folder, name), "wb") as file:
                file.write(data or b"")
        with suppress(ShardError):  # a damaged index lists no shards
            document = find_document(os.path.join(self.folder, INDEX_NAME))
            for shard in document.shards if document is not None else ():
                with open(os.path.join(self.folder, shard.name), "ab") as file:
                    file.truncate(shard.bytes)
        return self.folder

    def upload(self, shard: Shard, path: str) -> None:
        """Upload a finished shard of a new set, and free the disk space of its file.

        The file keeps its size, by which `resume` knows that the shard is complete.
        """
        if {INDEX_NAME, shard.name} & set(os.listdir(self.folder)):
            return
        sent, now = read_whole(path + _SENT) or b"", f"{shard.name} {shard.sha256}".encode()
        if sent != now and sent.endswith(shard.sha256.encode()):
            raise UsageError(
                f"{path} was uploaded under another name, as samples were skipped. Start anew with "
                f"overwrite=True."
            )
        if sent != now:
            put(self._object(shard.name), path, shard.sha256)
            write_whole(path + _SENT, now)
        with disk_errors(path):
            os.truncate(path, 0)
            os.truncate(path, shard.bytes)

    def forget(self, folder: str, keep: Iterable[str] = ()) -> None:
        """Delete the uploaded shards of an unfinished set in `folder`, but for those in `keep`."""
        for path in glob.glob(os.path.join(glob.escape(folder), f"*{_SENT}")):
            name = (read_whole(path) or b"").decode().partition(" ")[0]
            if name not in keep:
                remove(self._object(name))
            os.unlink(path)

    def publish(
        self, source: str, files: dict[str, str], gone: list[str], *, replaces: bool
    ) -> None:
        """Make the set in the bucket that of the index in `source`. May be repeated after a kill.

        Raises UsageError if another program changed the set meanwhile.
        """
        self._check(source, may_be_gone=replaces)
        index, table = (os.path.join(source, name) for name in (INDEX_NAME, TABLE_NAME))
        if read_remote(self._object(INDEX_NAME)) != read_whole(index):
            if replaces:
                remove(self._object(INDEX_NAME))
            paths = {final: os.path.join(source, name) for final, name in files.items()}
            size = 0
            for number, (name, path) in enumerate([*paths.items(), (TABLE_NAME, table)]):
                if not os.path.exists(path + _SENT):
                    put(self._object(name), path, "")
                size += os.path.getsize(path)
                self._uploaded(number + 1, size, len(paths) + 2)
            put(self._object(INDEX_NAME), index, "")
        for name in gone:
            remove(self._object(name))
        self.forget(source, files)

    def _check(self, source: str, *, may_be_gone: bool) -> None:
        """Raise UsageError unless the set is that of the local folder, or of `source`.

        may_be_gone: the set may be missing.
        """
        known = [read_whole(os.path.join(place, INDEX_NAME)) for place in (self.folder, source)]
        listed = read_remote(self._object(INDEX_NAME))
        if listed not in known and not (may_be_gone and listed is None):
            raise UsageError(
                f"{self._address} was changed by another program since this change of it began. "
                f"Delete {self.folder} and run this again without resume=True."
            )

    def _object(self, name: str) -> str:
        return f"{self._address}/{os.path.basename(name)}"
