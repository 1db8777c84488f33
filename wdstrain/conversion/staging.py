"""Staging folder of everything that writes a set: one hidden folder, one lock, one redo log.

`OUT/.unfinished` holds new files until they are complete. `commit` writes a record there, which
decides: from then on the change is completed, by this process or by the next one that opens the
folder. Readers refuse a folder with `.unfinished` and without an index, so they see the old set,
the new set, or an error. Append and remove only add shards under new names, and then swap the
index, so there is a set at any moment.

A conversion that fails or is killed before that leaves its files, and `resume` continues it.

A set in a bucket is changed in a local folder, and published as a whole. The local folder holds the
index of the set, and an empty file for each other object. A change that is decided is published:
new shards, then the index, then old objects are deleted. The shards of a new set go into the bucket
as they are finished, and their files give their disk space back. Without an index there is no set,
so nobody reads half of one. Shards of a set that is replaced or extended are uploaded at the end.
"""

from __future__ import annotations

import fcntl
import glob
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from hashlib import blake2b
from itertools import count
from typing import Any

from wdstrain.errors import UsageError, WdstrainError
from wdstrain.shards.index import Index, Shard
from wdstrain.shards.index_io import (
    TABLE_NAME,
    check_sizes,
    find_document,
    json_bytes,
    load,
    move_index,
    save_index,
)
from wdstrain.storage.addresses import INDEX_NAME, UNFINISHED
from wdstrain.storage.files import disk_errors, read_whole, sync, user_cache, write_whole
from wdstrain.storage.objects import is_object, list_folder_of, put, remove
from wdstrain.storage.remote import read_remote

SKIPPED_NAME = "skipped.jsonl"  # samples that were skipped, with reasons
RENAMED_NAME = "renamed.jsonl"  # samples whose key is not their name in the source

# Names in the staging folder:
LOCK_NAME = "owner"  # the locked file
_SHARDS = "shards"  # folder of the new shards, and of the files that are put beside them
_CALL = "call.json"  # arguments of the conversion
_COMMIT = "commit.json"  # a change that is decided
_SENT = ".sent"  # ending of the file beside an uploaded shard: its name in the bucket, its sha256

# Entries of `Source.source` that its files decide, so they are not part of the call.
FROM_FILES = ("classes", "data", "decided", "origin")

_LOCK_TIMEOUT = 2.0  # seconds: workers of a killed conversion hold its lock a moment longer
_LOCK_POLL = 0.02  # seconds
_LOCK_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
_READ = (INDEX_NAME, TABLE_NAME, SKIPPED_NAME, RENAMED_NAME)

Uploaded = Callable[[int, int, int], None]  # receives objects uploaded, bytes, objects in all


class Staging(AbstractContextManager["Staging"]):
    """The staging folder of a set, locked by this process: `with Staging(out) as staging`.

    At the end of the block it is left for `resume`, or removed if nothing was written. out: the
    folder of the set, for a bucket the local one. shown: where the set is, for messages.
    is_complete: `resume` has nothing to do, because there is a finished conversion.
    """

    def __init__(
        self,
        address: str,
        *,
        overwrite: bool = False,
        resume: bool = False,
        change: bool = False,
        dry_run: bool = False,
        uploaded: Uploaded | None = None,
    ) -> None:
        """change: there is a finished set that is to be changed. dry_run: only check that.

        uploaded: is called after each object. Raises UsageError if the folder is in use and no
        option allows it.
        """
        self.bucket = Bucket(address, uploaded) if is_object(address) else None
        self.out, self.shown = self.bucket.fetch() if self.bucket is not None else address, address
        self.path = os.path.join(self.out, UNFINISHED)
        self.is_complete, self._is_change = False, change
        self._is_new, self._lock = not os.path.exists(self.out), -1  # descriptor of the locked file
        self._files, self._numbers = dict[str, str](), dict[str, Iterator[int]]()
        try:
            with disk_errors(self.out, "Choose another folder."):
                if not dry_run:
                    self._open()
                is_begun = self._is_used(overwrite, resume)
                if not (self.is_complete or dry_run or (resume and is_begun)):
                    self._clear()
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        """Unlock the staging folder, and remove what holds nothing to resume."""
        if self._lock >= 0:
            with suppress(OSError):
                files = {name for _, _, names in os.walk(self.path) for name in names}
                if files <= {LOCK_NAME, _CALL}:
                    self._clear()
                os.unlink(os.path.join(self.path, LOCK_NAME))  # the next process creates its own
            os.close(self._lock)
        with suppress(OSError):  # they are not empty, or others use them
            os.rmdir(self.path)
            if self._is_new:
                os.rmdir(self.out)
        if self.bucket is not None and not os.path.exists(self.path):
            shutil.rmtree(self.out, ignore_errors=True)

    def _open(self) -> None:
        """Lock the folder, and complete the change of a killed command."""
        os.makedirs(self.out, exist_ok=True)
        sync(os.path.dirname(os.path.abspath(self.out)))
        end = time.monotonic() + _LOCK_TIMEOUT
        while not self._is_locked():
            if time.monotonic() > end:
                raise UsageError(
                    f"another conversion is writing into {self.shown}.",
                    "Wait for it, or choose another folder. On a file system without locks, "
                    f"delete {os.path.join(self.path, LOCK_NAME)} after a kill.",
                )
            time.sleep(_LOCK_POLL)
        if (record := read_whole(os.path.join(self.path, _COMMIT))) is not None:
            self._complete(**json.loads(record))

    def _is_locked(self) -> bool:
        """Lock the staging folder, created if it is missing; return whether this process holds it."""
        path = os.path.join(self.path, LOCK_NAME)
        with suppress(FileExistsError):  # removed just now; a file of this name is refused below
            os.makedirs(self.path, exist_ok=True)
        is_new = not os.path.exists(path)
        with suppress(FileNotFoundError, FileExistsError):  # removed or created just now
            lock = os.open(path, _LOCK_FLAGS | (os.O_EXCL if is_new else 0), 0o644)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # The file may have been deleted after it was opened.
                is_held = os.path.samestat(os.fstat(lock), os.stat(path))
            except OSError as error:  # a file system without locks: who created the file holds it
                is_held = is_new and not isinstance(error, (BlockingIOError, FileNotFoundError))
            if is_held:
                self._lock = lock
                return True
            os.close(lock)
        return False

    def _former(self) -> Index:
        """Return what index.json says of the set in the folder; nothing if it is damaged."""
        with suppress(WdstrainError):
            if (document := find_document(os.path.join(self.out, INDEX_NAME))) is not None:
                return document
        return Index()

    def _is_used(self, overwrite: bool, resume: bool) -> bool:
        """Return whether a conversion was begun. Raises UsageError if the folder may not be used."""
        is_begun, names = os.path.exists(os.path.join(self.path, _CALL)), set[str]()
        if resume and not self._is_change and not is_begun:
            self.is_complete = "listed" in self._former().info
        with suppress(FileNotFoundError):
            names = set(os.listdir(self.out)) - {UNFINISHED}
        has_set = not _is_foreign(read_whole(os.path.join(self.out, INDEX_NAME)) or b"{}")
        rather = f"delete {self.path}" if self._is_change else "start anew with overwrite=True"
        is_free = overwrite or is_begun or self._is_change or self.is_complete
        refusals = (
            (
                self._is_change and not has_set,
                "holds no finished set of shards with an index.",
                "Name the folder of one.",
            ),
            (
                INDEX_NAME in names and not has_set,
                f"holds an {INDEX_NAME} that is no index of this package and would be replaced.",
                "Choose another folder, or move it away.",
            ),
            (
                is_begun and not (overwrite or resume),
                "holds an unfinished conversion.",
                f"Continue it with resume=True, or {rather}.",
            ),
            (
                names - {SKIPPED_NAME} and not is_free,
                f"holds {len(names)} files{' and no conversion' if resume else ''}.",
                "Choose an empty folder, or replace its shards with overwrite=True.",
            ),
        )
        for is_refused, reason, hint in refusals:
            if is_refused:
                raise UsageError(f"{self.shown} {reason}", hint)
        return is_begun

    def check_names(self, splits: Iterable[str]) -> None:
        """Raise UsageError for foreign files that would be taken for shards of the new splits."""
        listed = {shard.name for shard in self._former().shards}
        for name in sorted(set(os.listdir(self.out)) - listed):
            split = name.rpartition("-")[0]
            if name.endswith(".tar") and split in splits:
                raise UsageError(
                    f"{self.shown} holds {name}, which no index lists and which would be taken "
                    f"for a shard of the new split '{split}'.",
                    "Move such files away, or choose another folder.",
                )

    def load(self) -> Index:
        """Return the index of the set, with the addresses of its shards."""
        place = f"{self.shown.rstrip('/')}/"
        return check_sizes(load(os.path.join(self.out, INDEX_NAME), base=place))

    def begin(self, call: dict[str, Any]) -> None:
        """Record the arguments of this conversion. Raises UsageError if another call began it.

        `on_error` may differ, and so may the files of the source: the error that ended the
        conversion may have asked to repair one. Shards with changed files are written again.
        """
        path = os.path.join(self.path, _CALL)
        before = json.loads(read_whole(path) or b"{}")
        if before:
            options = {**call["options"], "on_error": before["options"]["on_error"]}
            self.compare(before, {"append": {}, **call, "options": options}, "an unfinished")
        write_whole(path, json_bytes(call))

    def compare(self, before: dict[str, Any], call: dict[str, Any], state: str) -> None:
        """Raise UsageError with the arguments in which a call differs from that of a conversion."""
        differing = []
        for part, values in json.loads(json.dumps(call)).items():
            former = before.get(part, {})
            for name in dict.fromkeys([*former, *values]):
                if former.get(name) != values.get(name) and name not in FROM_FILES:
                    differing.append(f"{name} was {former.get(name)!r}, is {values.get(name)!r}")
        if differing:
            raise UsageError(
                f"{self.shown} holds {state} conversion of another source or with other options: "
                f"{'; '.join(differing)}.",
                "Choose another folder, or replace it with overwrite=True.",
            )

    def folder(self, name: str = _SHARDS) -> str:
        """Return a folder in the staging folder, created if it is missing."""
        path = os.path.join(self.path, name)
        with disk_errors(path):
            os.makedirs(path, exist_ok=True)
        return path

    def add(self, part: Index) -> Index:
        """Return the index of a finished shard under its final name, and upload the shard.

        Numbers continue after those of the set that is changed.
        """
        shard = part.shards[0]
        split = shard.split or "part"
        if split not in self._numbers:
            names = os.listdir(self.out) if self._is_change else []
            numbers = [n for name in names for n in re.findall(rf"^{split}-(\d+)\.tar$", name)]
            self._numbers[split] = count(max(map(int, numbers), default=-1) + 1)
        name = f"{split}-{next(self._numbers[split]):06d}.tar"
        named = replace(shard, path=f"{self.shown.rstrip('/')}/{name}")
        self._files[name] = shard.name
        if self.bucket is not None:
            self.bucket.upload(named, shard.path)
        return replace(part, shards=(named,))

    def commit(self, index: Index, files: Iterable[str] = ()) -> None:
        """Make `index` the set in `out`: with the shards that were added.

        files: others in the folder of the shards that are put beside them. Shards that only the
        former index lists are deleted, and unless this is a change, the files beside them.
        """
        folder, moved = self.folder(), self._files | {name: name for name in files}
        former = [shard.name for shard in self._former().shards]
        former += [] if self._is_change else [SKIPPED_NAME, RENAMED_NAME]
        kept = {*moved, *(shard.name for shard in index.shards)}
        gone = [name for name in former if name not in kept]
        record: dict[str, Any] = {"files": moved, "gone": gone, "replaces": not self._is_change}
        save_index(index, folder)
        write_whole(os.path.join(self.path, _COMMIT), json_bytes(record))
        self._complete(**record)

    def _complete(self, files: dict[str, str], gone: list[str], replaces: bool) -> None:
        """Complete a change that is decided, from any point at which it was killed."""
        source = os.path.join(self.path, _SHARDS)
        is_whole = os.path.exists(os.path.join(source, INDEX_NAME))
        if self.bucket is not None and is_whole:
            self.bucket.publish(source, files, gone, replaces=replaces)
        is_resumable = os.path.exists(os.path.join(self.path, _CALL))
        again = " with resume=True" if is_resumable else ""
        with disk_errors(self.out, f"Free some space, then run this again{again}."):
            if replaces and is_whole:
                # The old index goes first, so no old shard is ever read under the new index. Then
                # go the shards that the new one does not list: none lies beside it at any moment.
                _unlink(self.out, [INDEX_NAME])
                _unlink(self.out, gone)
            for final, name in files.items():
                with suppress(FileNotFoundError):  # moved already
                    os.replace(os.path.join(source, name), os.path.join(self.out, final))
            sync(self.out)  # after a power loss, the index implies all other files
            move_index(source, self.out)
            _unlink(self.out, gone)
            self._clear()

    def discard(self) -> None:
        """Remove all files, unless a change is decided: the next command completes it."""
        if not os.path.exists(os.path.join(self.path, _COMMIT)):
            self._clear()

    def _clear(self) -> None:
        """Remove all files but the lock. The record is last: without it, work would begin anew."""
        if self.bucket is not None:
            self.bucket.forget(os.path.join(self.path, _SHARDS))
        for entry in sorted(os.scandir(self.path), key=lambda entry: entry.name == _COMMIT):
            if entry.is_dir():
                shutil.rmtree(entry.path, ignore_errors=True)
            elif entry.name != LOCK_NAME:
                os.unlink(entry.path)


def _is_foreign(document: bytes) -> bool:
    """Return whether an index.json is of another program; a damaged one counts as ours."""
    try:
        return "wdstrain" not in json.loads(document)
    except (ValueError, RecursionError, TypeError):
        return False


def _unlink(folder: str, names: Iterable[str]) -> None:
    for name in names:
        with suppress(FileNotFoundError):
            os.unlink(os.path.join(folder, os.path.basename(name)))
    sync(folder)


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
            self._check(os.path.join(self.folder, UNFINISHED, _SHARDS), may_be_gone=True)
            return self.folder
        shutil.rmtree(self.folder, ignore_errors=True)
        names = list_folder_of(self._object(""))
        if SKIPPED_NAME in names and INDEX_NAME not in names:
            raise UsageError(
                f"{self._object(SKIPPED_NAME)} is there, which no index lists and which would be "
                "replaced.",
                "Choose another place, or move it away.",
            )
        os.makedirs(self.folder, exist_ok=True)
        for name in names:
            data = read_remote(self._object(name)) if name in _READ else None
            with open(os.path.join(self.folder, name), "wb") as file:
                file.write(data or b"")
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
                f"{path} was uploaded under another name, as samples were skipped.",
                "Start anew with overwrite=True.",
            )
        if sent != now:
            put(self._object(shard.name), path)
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
        paths = {final: os.path.join(source, name) for final, name in files.items()}
        paths |= {name: os.path.join(source, name) for name in (TABLE_NAME, INDEX_NAME)}
        new, former = map(read_whole, (paths[INDEX_NAME], os.path.join(self.folder, INDEX_NAME)))
        # An overwrite may give the former index: without an upload, damaged shards would stay.
        if new == former or read_remote(self._object(INDEX_NAME)) != new:
            if replaces:
                remove(self._object(INDEX_NAME))
            size = 0
            for number, (name, path) in enumerate(paths.items(), 1):  # the index is the last
                if not os.path.exists(path + _SENT):
                    put(self._object(name), path)
                size += os.path.getsize(path)
                self._uploaded(number, size, len(paths))
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
                f"{self._address} was changed by another program since this change of it began.",
                f"Delete {self.folder} and run this again without resume=True.",
            )

    def _object(self, name: str) -> str:
        return f"{self._address}/{os.path.basename(name)}"
