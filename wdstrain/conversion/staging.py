"""Staging folder of everything that writes a set: one hidden folder, one lock, one redo log.

`OUT/.unfinished` holds new files until they are complete. `commit` writes a record there, which
decides: from then on the change is completed, by this process or by the next one that opens the
folder. Readers refuse a folder with `.unfinished` and without an index, so they see the old set,
the new set, or an error. Append and remove only add shards under new names, and then swap the
index, so there is a set at any moment.

A conversion that fails or is killed before that leaves its files, and `resume` continues it.

A set lies in a folder or in a bucket, which have the same four methods. To put a file into the set
uses up the staged file: a file that is gone was put, and the change is complete when the staged
index.json is gone. For a bucket the staging folder lies in the user's cache. There the shards of a
new set are put as they are finished, which frees their disk space. Without an index there is no
set, so nobody reads half of one. Shards of a set that is replaced or extended are put at the end.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from hashlib import blake2b
from itertools import count
from typing import Any

from wdstrain.errors import WdstrainError
from wdstrain.runtime.file_locks import lock_file, unlock_file
from wdstrain.runtime.options import refuse
from wdstrain.shards.index import Index
from wdstrain.shards.index_io import (
    TABLE_NAME,
    check_sizes,
    find_document,
    json_bytes,
    load,
    save_index,
)
from wdstrain.shards.value_files import VALUE_FILE
from wdstrain.storage.addresses import INDEX_NAME, UNFINISHED
from wdstrain.storage.files import disk_errors, read_whole, sync, user_cache, write_whole
from wdstrain.storage.objects import is_object, list_folder_of, put, remove
from wdstrain.storage.remote import name_of, read_remote

SKIPPED_NAME = "skipped.jsonl"  # samples that were skipped, with reasons
RENAMED_NAME = "renamed.jsonl"  # samples whose key is not their name in the source

# Names in the staging folder:
LOCK_NAME = "owner"  # the locked file
_SHARDS = "shards"  # folder of the new shards, and of the files that are put beside them
_CALL = "call.json"  # arguments of the conversion
_COMMIT = "commit.json"  # a change that is decided
_SENT = "sent.json"  # sha256 of each shard that is in the bucket before the set is complete

# Entries of `Source.source` that its files decide, so they are not part of the call.
FROM_FILES = ("classes", "data", "decided", "origin")

# Errors of file systems that know no locks.
_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)

Put = Callable[[int, int, int], None]  # receives objects put into a bucket, bytes, objects in all

# --- places of sets -------------------------------------------------------------------------------


class Folder:
    """A set in a local folder. place: folder of the staging folder."""

    def __init__(self, address: str) -> None:
        self.place = address

    def names(self) -> set[str]:
        """Return the names of all files."""
        names = os.listdir(self.place) if os.path.exists(self.place) else ()
        return set(names) - {UNFINISHED}

    def read(self, name: str) -> bytes | None:
        """Return a small file; None if it does not exist."""
        return read_whole(os.path.join(self.place, name))

    def put(self, path: str, name: str) -> None:
        """Move a file into the set. After a power loss, an index implies the files put before it."""
        if name in (TABLE_NAME, INDEX_NAME):
            sync(self.place)
        os.replace(path, os.path.join(self.place, name))

    def delete(self, names: Iterable[str]) -> None:
        """Delete the files that exist."""
        for name in names:
            with suppress(FileNotFoundError):
                os.unlink(os.path.join(self.place, os.path.basename(name)))
        sync(self.place)


class Bucket:
    """A set in a bucket."""

    def __init__(self, address: str) -> None:
        self._address = address.rstrip("/")
        digest = blake2b(self._address.encode(), digest_size=12).hexdigest()
        self.place = user_cache("outgoing", digest)

    def names(self) -> set[str]:
        return set(list_folder_of(self._object("")))

    def read(self, name: str) -> bytes | None:
        return read_remote(self._object(name))

    def put(self, path: str, name: str) -> None:
        put(self._object(name), path)
        os.unlink(path)

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            remove(self._object(name))

    def _object(self, name: str) -> str:
        return f"{self._address}/{os.path.basename(name)}"


# --- staging --------------------------------------------------------------------------------------


class Staging(AbstractContextManager["Staging"]):
    """The staging folder of a set, locked by this process: `with Staging(out) as staging`.

    At the end of the block it is left for `resume` and for a change that is decided, else removed.
    target: the place of the set. shown: its address. is_complete: `resume` has nothing to do, because there is
    a finished conversion.
    """

    def __init__(
        self,
        address: str,
        *,
        overwrite: bool = False,
        resume: bool = False,
        change: bool = False,
        dry_run: bool = False,
        uploaded: Put | None = None,
    ) -> None:
        """change: there is a finished set that is to be changed. dry_run: only check that.

        uploaded: is called after each object that is put into a bucket at the end. Raises
        UsageError if the folder is in use and no option allows it.
        """
        self.is_bucket, self.shown = is_object(address), address
        self.target = Bucket(address) if self.is_bucket else Folder(address)
        self.path = os.path.join(self.target.place, UNFINISHED)
        self.is_complete, self._is_change, self._former = False, change, Index()
        self._uploaded = uploaded if self.is_bucket else None
        self._is_new = self.is_bucket or not os.path.exists(address)
        self._lock: int | None = None  # descriptor of the locked file
        self._is_held = False
        self._files, self._numbers = dict[str, str](), dict[str, Iterator[int]]()
        try:
            with disk_errors(self.target.place, "Choose another folder."):
                if not dry_run:
                    self._open()
                self._names = self.target.names() - self._sent.keys()
                self._index = self.target.read(INDEX_NAME) or b""
                with suppress(WdstrainError):  # it is damaged
                    if (document := find_document(os.path.join(address, INDEX_NAME))) is not None:
                        self._former = document
                is_begun = self._is_used(overwrite, resume)
                if not (self.is_complete or dry_run or (resume and is_begun)):
                    self._clear()
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        """Unlock the staging folder, and remove what holds nothing to resume."""
        if self._is_held:
            with suppress(OSError):
                files = {name for _, _, names in os.walk(self.path) for name in names}
                if files <= {LOCK_NAME, _CALL} or files.isdisjoint((_CALL, _COMMIT)):
                    self._clear()
                os.unlink(os.path.join(self.path, LOCK_NAME))  # the next process creates its own
        unlock_file(self._lock)
        with suppress(OSError):  # they are not empty, or others use them
            os.rmdir(self.path)
            if self._is_new:
                os.rmdir(self.target.place)

    def _open(self) -> None:
        """Lock the folder, and complete the change of a killed command."""
        os.makedirs(self.path, exist_ok=True)
        sync(os.path.dirname(os.path.abspath(self.target.place)))
        self._is_held = self._locks()
        refuse(
            not self._is_held,
            f"another conversion is writing into {self.shown}.",
            "Wait for it, or choose another folder. On a file system without locks, "
            f"delete {os.path.join(self.path, LOCK_NAME)} after a kill.",
        )
        if (record := read_whole(os.path.join(self.path, _COMMIT))) is not None:
            self._complete(**json.loads(record))

    def _locks(self) -> bool:
        """Lock the staging folder, and return whether this process holds it."""
        path, is_new = os.path.join(self.path, LOCK_NAME), False
        try:
            with suppress(FileExistsError):
                os.close(os.open(path, os.O_CREAT | os.O_EXCL, 0o644))
                is_new = True
            self._lock = lock_file(path)
            # Its former owner may have deleted the file after it was opened.
            return self._lock is not None and os.path.samestat(os.fstat(self._lock), os.stat(path))
        except FileNotFoundError:  # deleted just now
            return False
        except OSError as error:
            if error.errno not in _WITHOUT_LOCKS:
                raise
            return is_new  # who created the file holds it

    def _is_used(self, overwrite: bool, resume: bool) -> bool:
        """Return whether a conversion was begun. Raises UsageError if the folder may not be used."""
        is_begun, names = os.path.exists(os.path.join(self.path, _CALL)), self._names
        if resume and not self._is_change and not is_begun:
            self.is_complete = "listed" in self._former.info
        has_set = not _is_foreign(self._index or b"{}")
        rather = f"delete {self.path}" if self._is_change else "start anew with {overwrite}"
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
                self.is_bucket and SKIPPED_NAME in names and not has_set,
                f"holds a {SKIPPED_NAME}, which no index lists and which would be replaced.",
                "Choose another place, or move it away.",
            ),
            (
                is_begun and not (overwrite or resume),
                "holds an unfinished conversion.",
                f"Continue it with {{resume}}, or {rather}.",
            ),
            (
                names - {SKIPPED_NAME} and not is_free,
                f"holds {len(names)} files{' and no conversion' if resume else ''}.",
                "Choose an empty folder, or replace its shards with {overwrite}.",
            ),
        )
        for is_refused, reason, hint in refusals:
            refuse(
                is_refused,
                f"{self.shown} {reason}",
                hint,
            )
        return is_begun

    def check_names(self, splits: Iterable[str]) -> None:
        """Raise UsageError for foreign files that would be taken for shards of the new splits."""
        listed = {shard.name for shard in self._former.shards}
        for name in sorted(self._names - listed):
            split = name.rpartition("-")[0]
            refuse(
                name.endswith(".tar") and split in splits,
                f"{self.shown} holds {name}, which no index lists and which would be taken "
                f"for a shard of the new split '{split}'.",
                "Move such files away, or choose another folder.",
            )

    def load(self) -> Index:
        """Return the index of the set, with the addresses of its shards."""
        return check_sizes(load(os.path.join(self.shown, INDEX_NAME)))

    def begin(self, call: dict[str, Any]) -> None:
        """Record the arguments of this conversion. Raises UsageError if another call began it.

        `on_error` may differ, and so may the files of the source: the error that ended the
        conversion may have asked to repair one. Shards with changed files are written again.
        """
        path = os.path.join(self.path, _CALL)
        call = {"append": {}, **call, "set": {"its index": _digest(self._index)}}
        before = json.loads(read_whole(path) or b"{}")
        if before:
            options = {**call["options"], "on_error": before["options"]["on_error"]}
            self.compare(before, {**call, "options": options}, "an unfinished")
        write_whole(path, json_bytes(call))

    def compare(self, before: dict[str, Any], call: dict[str, Any], state: str) -> None:
        """Raise UsageError with the arguments in which a call differs from that of a conversion."""
        was, now = (
            {(part, name): value for part in call for name, value in one.get(part, {}).items()}
            for one in (before, json.loads(json.dumps(call)))
        )
        differing = [
            f"{place[1]} was {was.get(place)!r}, is {now.get(place)!r}"
            for place in was | now
            if was.get(place) != now.get(place) and place[1] not in FROM_FILES
        ]
        refuse(
            differing,
            f"{self.shown} holds {state} conversion of another source or with other options: "
            f"{'; '.join(differing)}.",
            "Choose another folder, or replace it with {overwrite}.",
        )

    def folder(self, name: str = _SHARDS) -> str:
        """Return a folder in the staging folder, created if it is missing."""
        path = os.path.join(self.path, name)
        with disk_errors(path):
            os.makedirs(path, exist_ok=True)
        return path

    def add(self, part: Index) -> Index:
        """Return the index of a finished shard under its final name.

        Numbers continue after those of the set that is changed. A shard of a new set in a bucket is
        put there now, which frees its disk space.
        """
        shard = part.shards[0]
        split = shard.split or "part"
        if split not in self._numbers:
            names = self._names if self._is_change else []
            numbers = [n for name in names for n in re.findall(rf"^{split}-(\d+)\.tar$", name)]
            self._numbers[split] = count(max(map(int, numbers), default=-1) + 1)
        name = f"{split}-{next(self._numbers[split]):06d}.tar"
        self._files[name] = shard.name
        refuse(
            not os.path.exists(shard.path) and self._sent.get(name) != shard.sha256,
            f"{shard.path} is gone, or was uploaded under another name, as samples were skipped.",
            "Start anew with {overwrite}.",
        )
        if self.is_bucket and not self._index and os.path.exists(shard.path):
            # Noted before the upload: after a kill, `_clear` still deletes the object.
            sent = self._sent | {name: shard.sha256}
            write_whole(os.path.join(self.path, _SENT), json_bytes(sent))
            self.target.put(shard.path, name)
        return replace(part, shards=(replace(shard, path=os.path.join(self.shown, name)),))

    @property
    def _sent(self) -> dict[str, str]:
        """The sha256 of the shards that were put into the bucket before the end, by name."""
        sent: dict[str, str] = json.loads(read_whole(os.path.join(self.path, _SENT)) or b"{}")
        return sent

    def commit(self, index: Index, files: Iterable[str] = ()) -> None:
        """Make `index` the set in `out`: with the shards that were added.

        files: others in the folder of the shards that are put beside them. Shards that only the
        former index lists are deleted, and unless this is a change, the files beside them. Values of
        joined columns stay until the next change, as a program may read the former index just now.
        """
        columns = {
            name_of(file.path)
            for column in (*index.columns, *(self._former.columns if self._is_change else ()))
            for file in column.files
        }
        staged = sorted(columns.intersection(os.listdir(self.folder())))
        moved = self._files | {n: n for n in (*files, *staged, TABLE_NAME, INDEX_NAME)}
        former = [
            *filter(VALUE_FILE.fullmatch, self._names),
            *(shard.name for shard in self._former.shards),
            *(() if self._is_change else (SKIPPED_NAME, RENAMED_NAME)),
        ]
        kept = {*moved, *columns, *(shard.name for shard in index.shards)}
        gone = [name for name in former if name not in kept]
        record: dict[str, Any] = {
            "files": moved,
            "gone": gone,
            "replaces": not self._is_change,
            "before": _digest(self._index),
        }
        save_index(index, self.folder())
        write_whole(os.path.join(self.path, _COMMIT), json_bytes(record))
        self._complete(**record)

    def _complete(
        self, files: dict[str, str], gone: list[str], replaces: bool, before: str
    ) -> None:
        """Complete a change that is decided, from any point at which it was killed.

        files: name in the staging folder of each file, by its name in the set; the index is the
        last. Raises UsageError if another program changed the set meanwhile.
        """
        paths = {name: os.path.join(self.path, _SHARDS, file) for name, file in files.items()}
        again = " with {resume}" if os.path.exists(os.path.join(self.path, _CALL)) else ""
        with disk_errors(self.target.place, f"Free some space, then run this again{again}."):
            if os.path.exists(paths[INDEX_NAME]):
                now, staged = self.target.read(INDEX_NAME), read_whole(paths[INDEX_NAME])
                refuse(
                    _digest(now or b"") not in (before, _digest(staged or b""))
                    and not (replaces and now is None),
                    f"{self.shown} was changed by another program since this change of it began.",
                    f"Delete {self.path} and run this again without {{resume}}.",
                )
                if replaces:
                    # The old index goes first, so no old shard is ever read under the new index.
                    # Then go the shards that the new one does not list: none lies beside it at any
                    # moment.
                    self.target.delete([INDEX_NAME])
                    self.target.delete(gone)
                size = 0
                for number, (name, path) in enumerate(paths.items(), 1):
                    if os.path.exists(path):  # else a killed command put it
                        size += os.path.getsize(path)
                        self.target.put(path, name)
                    if self._uploaded is not None:
                        self._uploaded(number, size, len(paths))
            self.target.delete([] if replaces else gone)
            self._clear(kept=files)

    def discard(self) -> None:
        """Remove all files, unless a change is decided: the next command completes it."""
        if not os.path.exists(os.path.join(self.path, _COMMIT)):
            self._clear()

    def _clear(self, kept: Collection[str] = ()) -> None:
        """Remove all files but the lock. The record is last: without it, work would begin anew.

        kept: shards in the bucket that stay there.
        """
        if sent := self._sent:
            self.target.delete(name for name in sent if name not in kept)
        for entry in sorted(os.scandir(self.path), key=lambda entry: entry.name == _COMMIT):
            if entry.is_dir():
                shutil.rmtree(entry.path, ignore_errors=True)
            elif entry.name != LOCK_NAME:
                os.unlink(entry.path)


def _digest(index: bytes) -> str:
    return blake2b(index, digest_size=8).hexdigest()


def _is_foreign(document: bytes) -> bool:
    """Return whether an index.json is of another program; a damaged one counts as ours."""
    try:
        return "wdstrain" not in json.loads(document)
    except (ValueError, RecursionError, TypeError):
        return False
