"""Output folder of a conversion: a hidden staging directory, and its exchange with what is there.

A conversion that fails or is killed leaves its staging directory, which readers ignore and
`resume` continues. A new set replaces the old one by an exchange: readers refuse the folder while
it lasts, and `resume` completes it. An update (append, remove) only adds shards under new names,
so it swaps the index alone, and readers see the old set or the new one at any moment.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from wdstrain.conversion.set_exchange import DONE_NAME, EXCHANGE_NAME, SKIPPED_NAME, SetExchange
from wdstrain.errors import StorageError, UsageError, WdstrainError
from wdstrain.shards.index import Index
from wdstrain.shards.index_document import read_document
from wdstrain.shards.index_io import json_bytes, move_index, save_index
from wdstrain.storage.addresses import INDEX_NAME, SWAPPING, UNFINISHED
from wdstrain.storage.files import read_whole, sync_folder, write_whole

# Names in the staging directory:
LOCK_NAME = "owner"  # the locked file
_UPDATE = "update.json"  # an update that is decided: from here on it is completed, never undone
_CALL = "call.json"  # arguments of the conversion

Publish = Callable[[list[str], list[str]], None]  # names of new files, of shards to delete

_LOCK_TIMEOUT = 2.0  # seconds: workers of a killed conversion hold its lock a moment longer
_LOCK_POLL = 0.02  # seconds


class OutputTransaction:
    """The staging directory in `out`, locked by this process.

    is_complete: nothing is left to do: `out` holds a finished conversion, or one whose exchange was
    completed now. completed_update: arguments of an update that was killed before and was completed
    now; empty if there was none. shown: where the set is, for messages.
    """

    def __init__(
        self,
        out: str,
        *,
        overwrite: bool = False,
        resume: bool = False,
        update: bool = False,
        shown: str | None = None,
        publish: Publish | None = None,
    ) -> None:
        """update: `out` holds a finished set that is to be changed.

        publish: called before an update ends, and again after a kill. Raises UsageError if the
        folder is in use and no option allows it.
        """
        self.out, self.path = out, os.path.join(out, UNFINISHED)
        self.shown, self._publish = shown or out, publish
        self.is_complete, self.completed_update = False, dict[str, Any]()
        self._created, self._lock = not os.path.exists(out), FolderLock(self.path)
        self._exchange = SetExchange(out, self.path)
        try:
            if not (update and self._created):
                os.makedirs(out, exist_ok=True)
            if self._created and not update:
                sync_folder(os.path.dirname(os.path.abspath(out)))
            if os.path.exists(self.path):
                self._lock.acquire(self.shown, create=False)
                self._finish_former()
            if update:
                self._begin_update(resume)
            else:
                self._begin(overwrite, resume)
        except (FileExistsError, NotADirectoryError):
            self.leave()
            raise UsageError(
                f"{out} is a file, or lies in one. Name a folder for the shards."
            ) from None
        except OSError as error:
            self.leave()
            raise StorageError(
                f"{out} cannot be written: {error.strerror}. Choose another folder."
            ) from error
        except BaseException:
            self.leave()
            raise

    def _begin(self, overwrite: bool, resume: bool) -> None:
        present = set(os.listdir(self.out))
        _check_use(self.out, present, overwrite, resume)
        if resume and present - {SKIPPED_NAME} and not present & {UNFINISHED, SWAPPING}:
            self.is_complete = True
            return
        self._lock.acquire(self.shown, create=True)
        if (set(os.listdir(self.out)) ^ present) - {UNFINISHED}:
            raise UsageError(
                f"another conversion was writing into {self.out} until now. Look at what it made "
                f"before you go on."
            )
        if resume and SWAPPING in present:
            self._exchange.complete()
            self._remove()
            self.is_complete = True
        elif not resume:
            self._exchange.remember_names()
            for name in set(os.listdir(self.path)) - {LOCK_NAME, EXCHANGE_NAME}:
                _discard(os.path.join(self.path, name))

    def _begin_update(self, resume: bool) -> None:
        listed = os.path.join(self.out, INDEX_NAME)
        data = read_whole(listed)
        if self._exchange.is_begun or data is None or is_foreign(data):
            raise UsageError(
                f"{self.shown} holds no finished set of shards with an index. Name the folder of "
                "one."
            )
        begun = os.path.exists(os.path.join(self.path, _CALL))
        if begun and not resume:
            raise UsageError(
                f"{self.shown} holds an unfinished conversion. Continue it with resume=True, "
                f"or delete {self.path}"
            )
        self._lock.acquire(self.shown, create=True)
        if not resume:
            for name in set(os.listdir(self.path)) - {LOCK_NAME}:
                _discard(os.path.join(self.path, name))

    def _finish_former(self) -> None:
        """Complete an update that was decided; remove the rest of a completed transaction."""
        if not self._lock.is_held:
            return
        if os.path.exists(os.path.join(self.path, _UPDATE)):
            self._complete_update()
        elif os.path.exists(os.path.join(self.path, DONE_NAME)) or not (
            set(os.listdir(self.path)) - {LOCK_NAME}
        ):
            self._remove()

    def read_call(self) -> dict[str, Any]:
        """Return the arguments of the conversion that left this directory; {} if unknown."""
        with (
            suppress(OSError, ValueError),
            open(os.path.join(self.path, _CALL), encoding="utf-8") as file,
        ):
            return dict(json.load(file))
        return {}

    def write_call(self, call: dict[str, Any]) -> None:
        """Record the arguments of this conversion, for the check of one that resumes it."""
        write_whole(os.path.join(self.path, _CALL), json_bytes(call))

    def check_names(self, splits: Sequence[str]) -> None:
        """Raise UsageError for foreign files that would be taken for shards of the new splits."""
        listed = os.path.join(self.out, INDEX_NAME)
        known = set(self._exchange.names())
        if os.path.exists(listed):
            known |= {shard.name for shard in read_document(listed).shards}
        for name in sorted(os.listdir(self.out)):
            is_shard = name.endswith(".tar") and name.rpartition("-")[0] in splits
            if is_shard and name not in known and not self._exchange.is_begun:
                raise UsageError(
                    f"{self.out} holds {name}, which no index lists and which would be taken for a "
                    f"shard of the new split '{name.rpartition('-')[0]}'. Move such files away, or "
                    f"choose another folder."
                )

    def folder(self, name: str) -> str:
        """Return a folder in the staging directory, created if it is missing."""
        path = os.path.join(self.path, name)
        try:
            os.makedirs(path, exist_ok=True)
        except OSError as error:
            raise StorageError(
                f"{path} cannot be written: {error.strerror}. Free some space."
            ) from error
        return path

    def clear(self) -> None:
        """Remove the staging directory, and the folder if it was created for it.

        An update that is decided stays: the next transaction completes it.
        """
        if os.path.exists(os.path.join(self.path, _UPDATE)):
            self._lock.release()
            return
        self._remove()
        if self._created:
            with suppress(OSError):
                os.rmdir(self.out)

    def leave(self) -> None:
        """Leave the staging directory for `resume`; remove it if nothing was written."""
        if self._lock.is_held and not any(
            set(files) - {LOCK_NAME, _CALL} for _, _, files in os.walk(self.path)
        ):
            self.clear()
        self._lock.release()

    def replace_set(self, shards: str, files: dict[str, str]) -> None:
        """Replace the set in the folder by files in `shards`: {final name: name there}.

        The index is put last. Only files that the former index lists are removed, and files of
        interrupted exchanges.
        """
        try:
            self._exchange.begin(shards, files)
            self._exchange.complete()
        except OSError as error:
            raise self._not_written(error) from error
        self._remove()

    def update_set(
        self, index: Index, shards: str, files: dict[str, str], call: dict[str, Any]
    ) -> None:
        """Change the set in the folder to `index`, whose new shards lie in `shards`.

        files: {final name: name in `shards`} of the new shards. Shards that `index` does not list
        are deleted. call: what a killed update reports when it is completed.
        """
        document = read_document(os.path.join(self.out, INDEX_NAME))
        listed = {shard.name for shard in index.shards}
        gone = [shard.name for shard in document.shards if shard.name not in listed]
        record = {"folder": os.path.basename(shards), "files": files, "gone": gone, "call": call}
        save_index(index, shards)
        write_whole(os.path.join(self.path, _UPDATE), json_bytes(record))
        self._complete_update()

    def _complete_update(self) -> None:
        """Complete an update from any point at which it was killed."""
        path = os.path.join(self.path, _UPDATE)
        with open(path, encoding="utf-8") as file:
            record = json.load(file)
        shards = os.path.join(self.path, record["folder"])
        try:
            for final, name in record["files"].items():
                with suppress(FileNotFoundError):  # moved already
                    os.replace(os.path.join(shards, name), os.path.join(self.out, final))
            sync_folder(self.out)
            move_index(shards, self.out)
            if self._publish is not None:
                self._publish(list(record["files"]), record["gone"])
            for name in record["gone"]:
                with suppress(FileNotFoundError):
                    os.unlink(os.path.join(self.out, os.path.basename(name)))
            sync_folder(self.out)
            os.rename(path, os.path.join(self.path, DONE_NAME))
            sync_folder(self.path)
        except OSError as error:
            raise self._not_written(error) from error
        self.completed_update = record["call"]
        self._remove()

    def _not_written(self, error: OSError) -> StorageError:
        return StorageError(
            f"{self.out} cannot be written: {error.strerror}. Free some space, then run this again "
            f"with resume=True."
        )

    def _remove(self) -> None:
        """Remove the staging directory; its lock last, so that the next process creates its own."""
        with suppress(OSError):  # somebody removed it, or the whole folder
            for name in sorted(
                set(os.listdir(self.path)) - {LOCK_NAME},
                key=lambda name: (name == EXCHANGE_NAME, name == DONE_NAME),
            ):
                _discard(os.path.join(self.path, name))
        self._lock.release()
        with suppress(OSError):
            os.rmdir(self.path)


def _check_use(out: str, present: set[str], overwrite: bool, resume: bool) -> None:
    """Raise UsageError if a folder with these files may not be used."""
    others = present - {UNFINISHED, SWAPPING}
    listed = os.path.join(out, INDEX_NAME)
    is_set = INDEX_NAME in present and not is_foreign(read_whole(listed) or b"")
    if overwrite and INDEX_NAME in present and not is_set:
        raise UsageError(
            f"{listed} is no index of this package and would be replaced. Choose another "
            f"folder, or move it away."
        )
    if overwrite or not present or present == {SKIPPED_NAME}:
        return
    is_unfinished = len(others) < len(present)
    if not resume and is_unfinished:
        raise UsageError(
            f"{out} holds an unfinished conversion. Continue it with resume=True, or start anew "
            f"with overwrite=True."
        )
    if not resume or not (is_unfinished or (is_set and "listed" in _info(listed))):
        raise UsageError(
            f"{out} holds {len(others)} files{' and no conversion' if resume else ''}. Choose an "
            f"empty folder, or replace its shards with overwrite=True."
        )


def is_foreign(document: bytes) -> bool:
    """Return whether an index.json is of another program; a damaged one counts as ours."""
    try:
        return "wdstrain" not in json.loads(document)
    except (ValueError, RecursionError, TypeError):
        return False


def _info(path: str) -> dict[str, Any]:
    with suppress(WdstrainError):
        return read_document(path).info
    return {}


def _discard(path: str) -> None:
    """Remove a folder or a file, as far as that is possible."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            os.unlink(path)


# --- lock ----------------------------------------------------------------------------------------


class FolderLock:
    """The lock of one directory. It ends with the process."""

    def __init__(self, folder: str) -> None:
        self._folder, self._fd = folder, -1

    @property
    def is_held(self) -> bool:
        return self._fd >= 0

    def acquire(self, out: str, *, create: bool) -> None:
        """Lock the directory. Raises UsageError, which names `out`, if another process holds it.

        create: create the directory if it is missing; otherwise nothing is locked if it disappears.
        """
        end, path = time.monotonic() + _LOCK_TIMEOUT, os.path.join(self._folder, LOCK_NAME)
        while not self.is_held:
            if create:
                os.makedirs(self._folder, exist_ok=True)
            elif not os.path.exists(self._folder):
                return
            with suppress(FileNotFoundError):  # the directory was removed just now
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
                try:
                    # The file may have been deleted after it was opened.
                    if _try_lock(fd) and os.path.samestat(os.fstat(fd), os.stat(path)):
                        self._fd = fd
                finally:
                    if not self.is_held:
                        os.close(fd)
            if not self.is_held:
                if time.monotonic() > end:
                    raise UsageError(
                        f"another conversion is writing into {out}. Wait for it, or choose another "
                        f"folder."
                    )
                time.sleep(_LOCK_POLL)

    def release(self) -> None:
        """Delete the locked file and unlock it. The next process creates its own."""
        if self.is_held:
            with suppress(OSError):
                os.unlink(os.path.join(self._folder, LOCK_NAME))
            os.close(self._fd)
            self._fd = -1


def _try_lock(fd: int) -> bool:
    """Lock a file; return False if another process holds it. True where locks do not exist."""
    try:
        import fcntl
    except ImportError:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True
