"""Sets in a bucket: upload of a new one, and change of one by append or remove.

While shards are written, each goes into the folder `.unfinished` of the bucket under its checksum,
and its local file gives its disk space back. At the end the server copies them to their names. An
object is whole or missing, and without an index there is no set, so nobody reads half of one.
`resume` uploads only what is missing.

A change goes through a local folder that holds the index of the set, and a file of the same name
and size without disk blocks for each of its shards. `Staging` changes it like any folder,
and calls `publish` before it ends: new shards first, then the index, then old shards are deleted. A
killed change is completed by the next one, from the same folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from wdstrain.conversion.result import ConversionResult, Progress, Step
from wdstrain.conversion.staging import RENAMED_NAME, SKIPPED_NAME, is_foreign
from wdstrain.errors import ShardError, StorageError, UsageError
from wdstrain.shards.index import Index, Shard
from wdstrain.shards.index_document import read_document
from wdstrain.shards.index_io import TABLE_NAME, load
from wdstrain.storage.addresses import INDEX_NAME, UNFINISHED
from wdstrain.storage.files import put_whole, read_whole, user_cache, write_whole
from wdstrain.storage.local import open_source
from wdstrain.storage.objects import copy, list_folder_of, put, remove
from wdstrain.storage.remote import read_remote

_BEGUN = ".begun.json"  # in the uploaded folder: names of objects that may be replaced or removed
_DONE = ".uploaded"  # ending of a file beside the local folder: checksums of uploaded shards
_BESIDE = (TABLE_NAME, SKIPPED_NAME, RENAMED_NAME)
_READ = 8 << 20  # bytes of one request

Uploaded = Callable[[int, int, int], None]  # receives objects uploaded, objects in all, bytes

# Local copies of the index of the set as it is in the bucket:
_FORMER_INDEX = ".former.json"


class ShardUploads:
    """Shards of an unfinished set that are in its bucket already."""

    def __init__(self, address: str, folder: str) -> None:
        """folder: where the set is made on this machine."""
        self._address, self._list = address, folder + _DONE
        self._sums = set((read_whole(self._list) or b"").decode().split())

    def add(self, shard: Shard, path: str) -> None:
        """Upload a shard that was written, and free the disk space of its file.

        The file keeps its size, by which `resume` knows that the shard is complete.
        """
        if shard.sha256 not in self._sums:
            put(self._staged(shard.sha256), path, shard.sha256)
            self._sums.add(shard.sha256)
            write_whole(self._list, "\n".join(sorted(self._sums)).encode())
        try:
            os.truncate(path, 0)
            os.truncate(path, shard.bytes)
        except OSError as error:
            raise StorageError(f"{path} cannot be written: {error.strerror}.") from error

    def move(self, shard: Shard, path: str) -> None:
        """Give a shard its name in the bucket. path: its local file, if it was not uploaded."""
        target = object_in(self._address, shard.name)
        if shard.sha256 not in self._sums:
            put(target, path, shard.sha256)
            return
        try:
            copy(self._staged(shard.sha256), target, shard.sha256, shard.bytes)
        except StorageError:
            self._fetch(shard, path)  # raises if the upload is gone
            put(target, path, shard.sha256)

    def clear(self) -> None:
        """Remove the unfinished objects."""
        for sha256 in self._sums:
            remove(self._staged(sha256))
        self._sums.clear()
        with suppress(FileNotFoundError):
            os.unlink(self._list)

    def _staged(self, sha256: str) -> str:
        return object_in(self._address, f"{UNFINISHED}/{sha256}")

    def _fetch(self, shard: Shard, path: str) -> None:
        """Download an uploaded shard again, for a server that cannot copy."""
        with (
            open_source(self._staged(shard.sha256), shard.bytes) as source,
            put_whole(path) as file,
        ):
            for start in range(0, shard.bytes, _READ):
                file.write(source.read(start, min(_READ, shard.bytes - start)))


def deliver_result(
    done: ConversionResult, folder: str, address: str, progress: Progress | None
) -> ConversionResult:
    """Move the finished set in a folder into a bucket."""
    report = progress or (lambda step: None)
    uploads = ShardUploads(address, folder)
    _deliver(
        done.index,
        folder,
        address,
        uploads,
        lambda number, total, size: report(Step("uploading", number, total, size, len(done.bad))),
    )
    uploads.clear()
    shutil.rmtree(folder)
    return done.moved_to(address)


def outgoing(address: str, kind: str = "set") -> str:
    """Return the folder in the user's cache where a set for a bucket is made or changed."""
    text = f"{kind} {address.rstrip('/')}"
    return user_cache("outgoing", hashlib.blake2b(text.encode(), digest_size=12).hexdigest())


def check_free(address: str, *, overwrite: bool) -> None:
    """Raise UsageError if a set is there and may not be replaced, or foreign files would be."""
    listed = read_remote(object_in(address, INDEX_NAME))
    _check_index(address, listed)
    if listed is not None and not overwrite:
        raise UsageError(
            f"{address} holds a set already. Choose another place, or replace it with "
            f"overwrite=True."
        )
    if not overwrite:
        _check_names(address, set(), None)


def _deliver(
    index: Index, folder: str, address: str, uploads: ShardUploads, uploaded: Uploaded
) -> None:
    """Put the set in a folder into a bucket. An existing set is replaced: its index goes first.

    Raises UsageError, before anything is put, if a foreign object would be replaced, or would be
    taken for part of the set.
    """
    shards = {shard.name: shard for shard in index.shards}
    names = sorted(
        (name for name in os.listdir(folder) if name != INDEX_NAME and not name.startswith(".")),
        key=lambda name: (name == TABLE_NAME, name),
    )
    listed = read_remote(object_in(address, INDEX_NAME))
    _check_index(address, listed)
    # Names of an interrupted attempt, whose old index may be gone.
    former = {str(name) for name in json.loads(read_whole(os.path.join(folder, _BEGUN)) or b"[]")}
    if listed is not None:
        with suppress(ShardError):
            former |= {
                *(shard.name for shard in read_document(object_in(address, INDEX_NAME)).shards),
                *_BESIDE,
            }
    _check_names(address, former, {shard.split for shard in index.shards})
    write_whole(os.path.join(folder, _BEGUN), json.dumps(sorted({*former, *names})).encode())
    if listed is not None and listed != read_whole(os.path.join(folder, INDEX_NAME)):
        remove(object_in(address, INDEX_NAME))
    size = 0
    for number, name in enumerate([*names, INDEX_NAME]):
        path = os.path.join(folder, name)
        if name in shards:
            uploads.move(shards[name], path)
        else:
            put(object_in(address, name), path, file_sha256(path))
        size += os.path.getsize(path)
        uploaded(number + 1, len(names) + 1, size)
    for name in sorted(former - {*names, INDEX_NAME}):
        remove(object_in(address, os.path.basename(name)))


def _check_index(address: str, listed: bytes | None) -> None:
    if listed is not None and is_foreign(listed):
        raise UsageError(
            f"{object_in(address, INDEX_NAME)} is no index of this package and would be replaced. "
            "Choose another place, or move it away."
        )


def _check_names(address: str, former: set[str], splits: set[str] | None) -> None:
    """Raise UsageError for foreign objects that would be replaced, or be taken for shards.

    former: names that may be replaced. splits: of the new set; None: not known yet.
    """
    for name in list_folder_of(object_in(address, "")):
        split = name.rpartition("-")[0]
        shard = name.endswith(".tar") and (splits is None or split in splits)
        if name not in former and (shard or name in _BESIDE):
            raise UsageError(
                f"{address} holds {name}, which no index lists and which would be replaced or "
                "taken for part of the new set. Choose another place, or move it away."
            )


def object_in(address: str, name: str) -> str:
    """Return the address of an object in a folder of a bucket."""
    return f"{address.rstrip('/')}/{name}"


def file_sha256(path: str) -> str:
    """Return the sha256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


# --- change of a set in a bucket -----------------------------------------------------------------


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
        new, listed = self._local(INDEX_NAME), read_remote(self._object(INDEX_NAME))
        if listed != new:
            if listed != self._local(_FORMER_INDEX):
                raise self._changed()
            shards = {shard.name: shard for shard in self.load().shards}
            for name in files:
                if name in shards:
                    self.uploads.move(shards[name], os.path.join(self.folder, name))
                else:
                    self._put(name)
            self._put(TABLE_NAME)
            self._put(INDEX_NAME)
        for name in gone:
            remove(self._object(name))
        self.uploads.clear()
        self._keep_former()

    def fetch(self) -> None:
        """Make the local folder anew. Raises UsageError if the bucket holds no set."""
        listed = read_remote(self._object(INDEX_NAME))
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
                data = read_remote(self._object(name)) or b""
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
        path = os.path.join(self.folder, _FORMER_INDEX)
        write_whole(path, self._local(INDEX_NAME) or b"")

    def _changed(self) -> UsageError:
        return UsageError(
            f"{self.address} was changed by another program since this change of it began. Delete "
            f"{self.folder} and run this again without resume=True."
        )

    def _local(self, name: str) -> bytes | None:
        return read_whole(os.path.join(self.folder, name))

    def _object(self, name: str) -> str:
        return object_in(self.address, name)

    def _put(self, name: str) -> None:
        path = os.path.join(self.folder, name)
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
