"""The folder of a conversion while it is made: a stage in it, hidden, and the exchange that puts all in place together.

A conversion that fails or is killed leaves its stage, which readers refuse and `--resume` goes on with, and what was in the
folder before is there still. Nothing half-made is ever where a reader looks.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from wdstrain.errors import StorageError, UsageError, WdstrainError
from wdstrain.shards.index_io import TABLE_NAME, json_bytes, read_document
from wdstrain.storage.addresses import INDEX_NAME, SWAPPING, UNFINISHED
from wdstrain.storage.files import read_whole, sync_folder, write_whole

BAD_NAME = "bad.jsonl"  # what was put into quarantine
RENAMED_NAME = "renamed.jsonl"  # samples whose key is not what the source calls them

_NAMES = "names.json"  # on the stage: what the exchange removes and brings
_DONE = "done"  # on the stage: what is left of an exchange that came to its end
_LOCK = "owner"  # on the stage: held by the process that works on it
_CALL = "call.json"  # on the stage: what the conversion was asked for
_PATIENCE = (
    2.0  # seconds: the workers of a conversion that was killed hold its lock a moment longer
)
_LOOK = 0.02  # seconds between two looks at it


class Stage:
    """The stage in a folder. Raises UsageError if the folder is in use and neither flag allows it.

    whole: nothing is left to do, since what is there is a finished conversion, or an exchange that was finished now.
    """

    def __init__(self, out: str, *, overwrite: bool, resume: bool) -> None:
        self.out, self.path = out, os.path.join(out, UNFINISHED)
        self._made, self.whole = not os.path.exists(out), False
        self._held = -1
        try:
            os.makedirs(out, exist_ok=True)
            if self._made:
                sync_folder(os.path.dirname(os.path.abspath(out)))
            if os.path.exists(
                self.path
            ):  # whoever works there comes first, also one that takes away what is left of its work
                self._lock(make=False)
                # nothing was begun; or all is in place, and the rest was being removed
                if self._held >= 0 and (
                    not set(os.listdir(self.path)) - {_LOCK}
                    or os.path.exists(os.path.join(self.path, _DONE))
                ):
                    self._remove()
            present = set(os.listdir(out))
            self._check(present, overwrite, resume)
            if resume and not present & {UNFINISHED, SWAPPING} and present:
                self.whole = True
                return
            if self._held < 0:
                self._lock(make=True)
            if (set(os.listdir(out)) ^ present) - {UNFINISHED}:
                raise UsageError(
                    f"another conversion was writing into {out} until now. Look at what it made before you go on."
                )
            if resume and SWAPPING in present:
                self._exchange()
                self.whole = True
            elif not resume:
                names = self._cut_short()
                if names:
                    write_whole(
                        os.path.join(self.path, _NAMES),
                        json.dumps({"former": names, "files": {}}).encode(),
                    )
                for name in set(os.listdir(self.path)) - {_LOCK, _NAMES}:
                    _discard(os.path.join(self.path, name))
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
            self.leave()  # also a stage that was made a moment ago, and has nothing on it
            raise

    def _check(self, present: set[str], overwrite: bool, resume: bool) -> None:
        others = present - {UNFINISHED, SWAPPING}
        listed = os.path.join(self.out, INDEX_NAME)
        mine = INDEX_NAME in present and not is_foreign(read_whole(listed) or b"")
        if overwrite and INDEX_NAME in present and not mine:
            raise UsageError(
                f"{listed} is no index of this package and would be replaced. Choose another folder, or move it away."
            )
        if overwrite or not present:
            return
        if not resume and len(others) < len(present):
            raise UsageError(
                f"{self.out} holds an unfinished conversion. Add --resume to go on with it, or --overwrite to start anew."
            )
        if not resume or (len(others) == len(present) and not (mine and "listed" in _info(listed))):
            raise UsageError(
                f"{self.out} holds {len(others)} files{' and no conversion' if resume else ''}. Choose an empty folder, or "
                f"add --overwrite to replace its shards."
            )

    def call(self) -> dict[str, Any]:
        """Return what the conversion that left this stage was asked for; nothing if it was killed before it said so."""
        with (
            suppress(OSError, ValueError),
            open(os.path.join(self.path, _CALL), encoding="utf-8") as file,
        ):
            return dict(json.load(file))
        return {}

    def keep_call(self, call: dict[str, Any]) -> None:
        """Write down what this conversion is asked for, so that one that resumes it can be compared."""
        write_whole(os.path.join(self.path, _CALL), json_bytes(call))

    def check_names(self, splits: Sequence[str]) -> None:
        """Raise UsageError if shards of others lie there that would be taken for part of the new splits."""
        listed = os.path.join(self.out, INDEX_NAME)
        former = (
            {row["url"] for row in read_document(listed)["shardlist"]}
            if os.path.exists(listed)
            else set()
        )
        former |= set(self._cut_short())
        for name in sorted(os.listdir(self.out)):
            split = name.rpartition("-")[0]
            if (
                name.endswith(".tar")
                and name not in former
                and split in splits
                and not os.path.exists(self._swapping)
            ):
                raise UsageError(
                    f"{self.out} holds {name}, which no index lists and which would be taken for a shard of the new split "
                    f"'{split}'. Move such files away, or choose another folder."
                )

    def _cut_short(self) -> list[str]:
        """What exchanges that were cut short were about to remove or bring: one that stands, one that was about to, older ones."""
        found: list[str] = []
        for place in (self._swapping, os.path.join(self.path, "shards"), self.path):
            with (
                suppress(OSError, ValueError, KeyError),
                open(os.path.join(place, _NAMES), encoding="utf-8") as file,
            ):
                names = json.load(file)
                found += [*names["former"], *names["files"]]
        return list(dict.fromkeys(found))

    @property
    def _swapping(self) -> str:
        return os.path.join(self.out, SWAPPING)

    def folder(self, name: str) -> str:
        """A folder on the stage."""
        path = os.path.join(self.path, name)
        try:
            os.makedirs(path, exist_ok=True)
        except OSError as error:
            raise StorageError(
                f"{path} cannot be written: {error.strerror}. Free some space."
            ) from error
        return path

    def clear(self) -> None:
        """Take the stage away, and the folder if it was made for it."""
        self._remove()
        if self._made:
            with suppress(OSError):
                os.rmdir(self.out)

    def leave(self) -> None:
        """Leave the stage for --resume; take it away if nothing is on it."""
        if self._held >= 0 and not any(
            set(files) - {_LOCK, _CALL} for _, _, files in os.walk(self.path)
        ):
            self.clear()
        self._unlock()

    def put_in_place(self, shards: str, files: dict[str, str]) -> None:
        """Replace the set in the folder by the files in `shards`: {final name: name there}, the index last.

        Only what the former index lists is removed, or what an exchange that was cut short was about to remove or bring.
        While this goes on, readers refuse the folder; if it is cut short, `resume` brings it to its end.
        """
        swapping, listed = self._swapping, os.path.join(self.out, INDEX_NAME)
        former: list[str] = []
        with suppress(WdstrainError):
            former += (
                [row["url"] for row in read_document(listed)["shardlist"]]
                if os.path.exists(listed)
                else []
            )
        former += self._cut_short()
        try:
            write_whole(
                os.path.join(shards, _NAMES),
                json.dumps({"former": former, "files": files}).encode(),
            )
            if os.path.exists(
                swapping
            ):  # of an exchange that was cut short; until the new one stands, no index is there
                shutil.rmtree(os.path.join(self.path, "former"), ignore_errors=True)
                os.rename(swapping, os.path.join(self.path, "former"))
            os.rename(shards, swapping)
            sync_folder(self.out)
            self._exchange()
        except OSError as error:
            raise StorageError(
                f"{self.out} cannot be written: {error.strerror}. Run this again with --resume."
            ) from error

    def _exchange(self) -> None:
        """Bring an exchange to its end, wherever it stands."""
        swapping = self._swapping
        with open(os.path.join(swapping, _NAMES), encoding="utf-8") as file:
            names = json.load(file)
        files: dict[str, str] = names["files"]
        arrived = {
            final
            for final, name in files.items()
            if not os.path.exists(os.path.join(swapping, name))
        }
        if (
            INDEX_NAME not in arrived
        ):  # readers first find no index, then no shard of the old set under a new index
            for name in [INDEX_NAME, BAD_NAME, RENAMED_NAME, *names["former"], TABLE_NAME]:
                if os.path.basename(name) not in arrived:
                    with suppress(FileNotFoundError):
                        os.unlink(os.path.join(self.out, os.path.basename(name)))
            for final, name in files.items():
                if final == INDEX_NAME:
                    sync_folder(
                        self.out
                    )  # where it has arrived, all others have, also after a power cut
                if final not in arrived:
                    os.replace(os.path.join(swapping, name), os.path.join(self.out, final))
            sync_folder(self.out)
        os.rename(
            swapping, os.path.join(self.path, _DONE)
        )  # at once: from here on readers take the new set
        sync_folder(self.out)
        self._remove()

    # --- one conversion at a time ------------------------------------------------------------------------------------

    def _lock(self, *, make: bool) -> None:
        """Hold the stage, by a lock that ends with the process. Two conversions into one folder would undo each other.

        make: the stage, if it is not there; else it is held by nobody if it is taken away meanwhile.
        """
        end, path = time.monotonic() + _PATIENCE, os.path.join(self.path, _LOCK)
        while self._held < 0:
            if make:
                os.makedirs(self.path, exist_ok=True)
            elif not os.path.exists(self.path):
                return
            with suppress(FileNotFoundError):  # the stage was taken away just now
                fd = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o644)
                try:
                    if _has_lock(fd) and os.path.samestat(
                        os.fstat(fd), os.stat(path)
                    ):  # and not one that was taken away
                        self._held = fd
                finally:
                    if self._held < 0:
                        os.close(fd)
            if self._held < 0:
                if time.monotonic() > end:
                    raise UsageError(
                        f"another conversion is writing into {self.out}. Wait for it, or choose another folder."
                    )
                time.sleep(_LOOK)

    def _remove(self) -> None:
        """Take the stage away, and its lock last: whoever waits for that begins a stage of its own."""
        with suppress(OSError):  # somebody took it away, or the whole folder
            for name in sorted(
                set(os.listdir(self.path)) - {_LOCK},
                key=lambda name: (name == _NAMES, name == _DONE),
            ):
                _discard(
                    os.path.join(self.path, name)
                )  # that it is done, and what is exchanged, last
        self._unlock()
        with suppress(OSError):
            os.rmdir(self.path)

    def _unlock(self) -> None:
        if self._held < 0:
            return  # another's
        with suppress(OSError):
            os.unlink(os.path.join(self.path, _LOCK))
        os.close(self._held)
        self._held = -1


def _has_lock(fd: int) -> bool:
    """Whether this process has the lock now, or there are none here."""
    try:
        import fcntl
    except ImportError:  # not a system with such locks
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


def is_foreign(document: bytes) -> bool:
    """Whether the bytes of an index.json are of another program; a damaged one is taken for ours."""
    try:
        return "wdstrain" not in json.loads(document)
    except (ValueError, RecursionError, TypeError):
        return False


def _info(path: str) -> dict[str, Any]:
    with suppress(WdstrainError):
        return dict(read_document(path)["wdstrain"]["info"])
    return {}


def made_of(path: str) -> dict[str, Any]:
    """What the index at `path` says of the source it was made of; nothing if it does not say, or cannot be read."""
    source = _info(path).get("source")
    return source if isinstance(source, dict) else {}


def _discard(path: str) -> None:
    """Take a folder or a file away, as far as that is possible."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            os.unlink(path)
