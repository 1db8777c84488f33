"""Change of a set in a bucket: append and remove, through a local copy of its index.

The local folder holds the index of the set, and a file of the same name and size without disk
blocks for each of its shards. `OutputTransaction` changes it like any folder, and calls `publish`
before it ends: new shards first, then the index, then old shards are deleted. A killed change is
completed by the next one, from the same folder.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from wdstrain.conversion.set_exchange import RENAMED_NAME, SKIPPED_NAME
from wdstrain.conversion.upload import ShardUploads, file_sha256, object_in, outgoing
from wdstrain.errors import UsageError
from wdstrain.shards.index import Index
from wdstrain.shards.index_io import FORMER_TABLE, TABLE_NAME, load
from wdstrain.storage.addresses import INDEX_NAME, UNFINISHED
from wdstrain.storage.files import read_whole, write_whole
from wdstrain.storage.object_store import list_folder_of, put, read_object, remove

# Local copies of the index of the set as it is in the bucket:
_FORMER_INDEX, _FORMER_TABLE = ".former.json", ".former.arrow"


class BucketUpdate:
    """A set in a bucket that is being changed.

    folder: its local folder. uploads: receives new shards as they are finished.
    """

    def __init__(self, address: str, folder: str) -> None:
        self.address, self.folder = address, folder
        self.uploads = ShardUploads(address, folder)

    def load(self) -> Index:
        """Return the index, with the addresses of the shards in the bucket."""
        path = os.path.join(self.folder, INDEX_NAME)
        return load(path, base=f"{self.address.rstrip('/')}/")

    def publish(self, files: list[str], gone: list[str]) -> None:
        """Make the set in the bucket that of the local folder. May be repeated after a kill.

        files: names of new files. gone: names of shards to delete. Raises UsageError if another
        program changed the set meanwhile.
        """
        new, listed = self._local(INDEX_NAME), read_object(self._object(INDEX_NAME))
        if listed != new:
            if listed != self._local(_FORMER_INDEX):
                raise self._changed()
            shards = {shard.name: shard for shard in self.load().shards}
            for name in files:
                if name in shards:
                    self.uploads.move(shards[name], os.path.join(self.folder, name))
                else:
                    self._put(name)
            # Readers of the old index.json take this table until the new index.json is there.
            self._put(FORMER_TABLE, _FORMER_TABLE)
            self._put(TABLE_NAME)
            self._put(INDEX_NAME)
        for name in [FORMER_TABLE, *gone]:
            remove(self._object(name))
        self.uploads.clear()
        self._keep_former()

    def fetch(self) -> None:
        """Make the local folder anew. Raises UsageError if the bucket holds no set."""
        listed = read_object(self._object(INDEX_NAME))
        if os.path.exists(os.path.join(self.folder, UNFINISHED)):
            if listed not in (self._local(_FORMER_INDEX), self._local(INDEX_NAME)):
                raise self._changed()
            return
        if listed is None:
            raise UsageError(
                f"{self.address} holds no finished set of shards with an index. Name the folder "
                f"of one."
            )
        shutil.rmtree(self.folder, ignore_errors=True)
        os.makedirs(self.folder)
        names = list_folder_of(self._object(""))
        for name in (TABLE_NAME, SKIPPED_NAME, RENAMED_NAME):
            if name in names:
                data = read_object(self._object(name)) or b""
                write_whole(os.path.join(self.folder, name), data)
        write_whole(os.path.join(self.folder, INDEX_NAME), listed)
        sizes = {shard.name: shard.bytes for shard in self.load().shards}
        for name in {*sizes, *(name for name in names if name.endswith(".tar"))}:
            with open(os.path.join(self.folder, name), "wb") as file:
                file.truncate(sizes.get(name, 0))
        self._keep_former()

    def end(self) -> None:
        """Remove the local folder, unless it holds an unfinished change."""
        if not os.path.exists(os.path.join(self.folder, UNFINISHED)):
            self.uploads.clear()
            shutil.rmtree(self.folder, ignore_errors=True)

    def _keep_former(self) -> None:
        for name, copy in ((TABLE_NAME, _FORMER_TABLE), (INDEX_NAME, _FORMER_INDEX)):
            write_whole(os.path.join(self.folder, copy), self._local(name) or b"")

    def _changed(self) -> UsageError:
        return UsageError(
            f"{self.address} was changed by another program since this change of it began. Delete "
            f"{self.folder} and run this again without resume=True."
        )

    def _local(self, name: str) -> bytes | None:
        return read_whole(os.path.join(self.folder, name))

    def _object(self, name: str) -> str:
        return object_in(self.address, name)

    def _put(self, name: str, local_name: str | None = None) -> None:
        path = os.path.join(self.folder, local_name or name)
        put(self._object(name), path, file_sha256(path))


@contextmanager
def bucket_update(address: str) -> Iterator[BucketUpdate]:
    """Yield a set in a bucket to change. Its local folder is kept if the change is unfinished."""
    update = BucketUpdate(address, outgoing(address, "update"))
    update.fetch()
    try:
        yield update
    finally:
        update.end()
