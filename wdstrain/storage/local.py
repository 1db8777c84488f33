"""The one seam to disk and network: what an address means, and how bytes are read from and made safe on it.

Nothing else in the package opens a shard. A source is read by position into memory given by the caller (`preadv`), so
one system call spreads a run of the shard over many places and no byte is copied twice. Local files live here; what is
far away is read by `remote`, with the same few methods.
"""

from __future__ import annotations

import errno
import glob
import os
import re
import stat
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import BinaryIO, Protocol
from urllib.parse import quote, urlsplit, urlunsplit

from braceexpand import braceexpand

from wdstrain.errors import ShardError, StorageError, UsageError
from wdstrain.memory.pieces import BufferList
from wdstrain.memory.scatter import ScatterList
from wdstrain.storage.io_pool import IOThreadPool
from wdstrain.storage.object_store import is_object, list_folder_of
from wdstrain.storage.remote import RemoteFile, check_address, is_remote, name_of, open_remote, read_remote, redacted

Urls = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


class ShardFile(Protocol):
    """A shard as storage sees it.

    bytes: its size. sha256: of the whole file, empty if not known. tag: the state in which the index found it, empty if not
    known. name: the file's name. shown: the path without secrets, for messages.
    """

    @property
    def path(self) -> str: ...
    @property
    def bytes(self) -> int: ...
    @property
    def sha256(self) -> str: ...
    @property
    def tag(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def shown(self) -> str: ...


INDEX_NAME = "index.json"
UNFINISHED = ".unfinished"  # the stage of a conversion, in the folder it will fill
SWAPPING = ".swapping"  # the stage while its shards are put in place

_COMPRESSED = re.compile(r"\.(tar\.(gz|zst|bz2|xz|lz4)|tgz|tbz2?|txz)$")
_SCHEME = re.compile(r"^([a-zA-Z][a-zA-Z0-9+.-]+)://")  # two letters at least: C:\ is a path


def expand(urls: Urls) -> list[str]:
    """Paths of tars and of index files that an address means, in order.

    A folder means its index, or its tars in name order where it has none; a glob is sorted; a brace pattern keeps its
    own order. Raises UsageError naming the pattern that matches nothing, StorageError for a folder that cannot be read.
    """
    addresses = [urls] if isinstance(urls, (str, os.PathLike)) else list(urls)
    if not addresses:
        raise UsageError("no address of shards was given. Name a folder, an index.json, a file, a glob or a brace pattern.")
    return [path for address in addresses for path in _expand_one(os.fspath(address))]


def _expand_one(address: str) -> list[str]:
    try:
        return _expanded(address)
    except OSError as error:
        where = error.filename or address
        raise StorageError(f"{where} cannot be read: {error.strerror}. Check the permissions of the folder.") from error


def _expanded(address: str) -> list[str]:
    scheme = _SCHEME.match(address)
    if scheme and scheme.group(1).lower() == "file":
        address = address[len(scheme.group(0)) :]
    elif scheme and is_remote(scheme.group(0).lower()):
        return _expand_remote(scheme.group(0).lower() + address[len(scheme.group(0)) :])
    elif scheme:
        raise UsageError(
            f"{redacted(address)}: addresses of the kind {scheme.group(0)} cannot be read yet. Copy the shards to a disk."
        )
    if address.startswith("pipe:"):
        raise UsageError(f"{address}: an address is never run as a command. Name a file, or the address of a server.")
    path = Path(address)
    if path.is_dir():
        return _expand_folder(path)
    if path.exists():
        return [address]
    if "{" in address:
        try:
            return [one for part in braceexpand(address, escape=False) for one in _expand_one(part)]
        except ValueError:
            raise UsageError(f"{address}: its braces do not pair up. Write for example train-{{000000..000007}}.tar") from None
    if any(c in address for c in "*?["):
        found = _matching(address)
        if not found:
            raise UsageError(f"{address}: no file matches this pattern. Check the folder and the quotes around it.")
        return [one for part in found for one in _expand_one(part)]
    raise UsageError(f"{address}: there is no such file or folder. Check the address.")


def _matching(pattern: str) -> list[str]:
    """The paths that match a pattern, sorted. Raises OSError for a folder that cannot be read: glob leaves it out silently."""
    parent = os.path.dirname(pattern)
    for folder in _matching(parent) if glob.has_magic(parent) else [parent or os.curdir]:
        with suppress(FileNotFoundError, NotADirectoryError):
            os.scandir(folder).close()
            os.stat(os.path.join(folder, os.curdir))  # needs the right to look names up, which a list of names does not
    return sorted(glob.glob(pattern))


def _expand_remote(address: str) -> list[str]:
    if is_object(address):
        path, query = address, ""
    else:
        check_address(address)
        path, query = urlsplit(address).path, urlsplit(address).query
    if "{" in path:
        try:
            return [one for part in braceexpand(address, escape=False) for one in _expand_remote(part)]
        except ValueError:
            raise UsageError(
                f"{redacted(address)}: its braces do not pair up. Write for example train-{{000000..07}}.tar"
            ) from None
    if any(c in path for c in "*?[") and is_object(address):
        found = [name for name in list_folder_of(address) if fnmatchcase(name, path.rpartition("/")[2])]
        if not found:
            raise UsageError(f"{redacted(address)}: no object matches this pattern. Check the bucket and the folder.")
        return [beside(address, name) for name in found]
    if any(c in path for c in "*[") or query.endswith(".tar"):
        raise UsageError(
            f"{redacted(address)}: a server cannot be asked what matches * or ?. Use braces, or name its index.json."
        )
    if path.endswith((".tar", ".json")):
        return [address]
    # of a bucket's folder too: shards without an index may be half of a set that is being put there
    return [beside(f"{path.rstrip('/')}/" if is_object(address) else _in_folder(address), INDEX_NAME)]


def _in_folder(address: str) -> str:
    parts = urlsplit(address)
    return urlunsplit((parts.scheme, parts.netloc, f"{parts.path.rstrip('/')}/", parts.query, ""))


def _expand_folder(path: Path) -> list[str]:
    if (path / INDEX_NAME).exists():
        return [str(path / INDEX_NAME)]
    found = sorted(str(path / name) for name in os.listdir(path) if name.endswith(".tar"))
    if not found:
        if (path / UNFINISHED).exists():
            raise ShardError(f"{path}: a conversion into this folder was not finished. Run it again with --resume.")
        packed = sorted(one.name for one in path.iterdir() if _COMPRESSED.search(one.name))
        if packed:
            raise UsageError(f"{path}: {packed[0]} is compressed, and offsets need plain tars. Unpack it first, to .tar.")
        raise UsageError(f"{path}: this folder holds no index.json and no .tar file. Name the folder of the shards.")
    return found


def check_finished(folder: str) -> None:
    """Raise ShardError if a conversion was cut short while it put its shards in place of others."""
    unfinished = os.path.exists(os.path.join(folder, UNFINISHED)) and not os.path.exists(os.path.join(folder, INDEX_NAME))
    if unfinished or os.path.exists(os.path.join(folder, SWAPPING)):
        raise ShardError(f"{folder}: a conversion into this folder was not finished. Run it again with --resume.")


def state_of(found: os.stat_result) -> str:
    """The state of a file, as one word: what is written to it or put in its place changes it."""
    return f"{found.st_mtime_ns}:{found.st_ctime_ns}:{found.st_ino}"


def is_state(word: str, found: os.stat_result) -> bool:
    """Whether a file is in this state.

    A new link or other rights change the time of its entry alone, a file system in user space may number its files anew: neither is
    another file. What was moved to its place has both another number and another time, though it was written at the same time.
    """
    now, then = state_of(found).split(":"), word.split(":")
    return now[0] == then[0] and (now[1:2] == then[1:2] or now[2:] == then[2:])


class LocalFile:
    """A shard on a disk, read by position. Not shared between threads.

    state: in which it was found, for those that nothing else would tell to be others; "" asks for none. Raises ShardError, also
    of bytes that were read, where it is in another.
    """

    def __init__(self, path: str, state: str = "") -> None:
        self.path, self._state = path, state
        try:
            self._fd = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0))
        except OSError as error:
            raise StorageError(f"{path} cannot be opened: {error.strerror}.") from error
        found = os.fstat(self._fd)
        if not stat.S_ISREG(found.st_mode):  # of a pipe nobody knows the size, and opening one may wait for ever
            self.close()
            raise StorageError(f"{path} is no file but a folder, a pipe or a device. Name a tar.")
        self.size, self.tag = found.st_size, state_of(found)
        try:
            self._check()
        except ShardError:
            self.close()
            raise
        with suppress(OSError, AttributeError):  # a hint: some systems and file systems know none
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)

    @property
    def version(self) -> str:
        """The state in which it was found."""
        return self.tag

    def read(self, offset: int, length: int) -> bytes:
        """Bytes [offset, offset + length), fewer only at the end of the file. Raises StorageError where the disk gives none."""
        try:
            data = os.pread(self._fd, length, offset)
            while len(data) < length and (more := os.pread(self._fd, length - len(data), offset + len(data))):
                data += more  # 2 GB come at a time, fewer over a network
        except OSError as error:
            raise StorageError(f"{self.path} cannot be read at offset {offset}: {error.strerror}.") from error
        return data

    def read_into(self, pieces: ScatterList | Iterable[memoryview], offset: int) -> None:
        """Fill the pieces, one after another, with the bytes from offset on. Raises ShardError where the file ends first."""
        todo = pieces if isinstance(pieces, ScatterList) else BufferList(pieces)
        while todo.left:
            try:
                count = todo.read(self._fd, offset)
            except OSError as error:
                raise StorageError(f"{self.path} cannot be read at offset {offset}: {error.strerror}.") from error
            if count == 0:
                raise ShardError(
                    f"{self.path} ends at offset {offset}, {todo.left} bytes before the index says; it changed since it was "
                    f"indexed. Copy it again, or accept it as it is: wdstrain index {os.path.dirname(self.path) or '.'}"
                )
            offset += count
        self._check()

    def fill(self, hands: IOThreadPool, pieces: ScatterList, offset: int, done: Callable[[], None]) -> None:
        """The same by hands, which call `done` when as much came as they could read; `read_into` then tells what is missing."""
        hands.fill(self._fd, offset, pieces, done)

    def _check(self) -> None:
        if self._state and not is_state(self._state, os.fstat(self._fd)):
            raise ShardError(
                f"{self.path} was written to or replaced since it was opened first, so its samples may be others. Start again with "
                f"it as it is; shards that wdstrain convert made are told from others by their checksums."
            )

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1  # the system has closed it also where it tells an error
            os.close(fd)

    def __enter__(self) -> LocalFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


Source = LocalFile | RemoteFile


def open_source(path: str, size: int | None = None, state: str = "") -> Source:
    """A shard to read from. size: as an index says, which saves asking a server for it. state: in which it has to be; "" asks none."""
    return open_remote(path, size, state or None) if is_remote(path) else LocalFile(path, state)


def read_whole(path: str) -> bytes | None:
    """A small file; None if it is not there."""
    if is_remote(path):
        return read_remote(path)
    try:
        with open(path, "rb", opener=regular) as file:
            return file.read()
    except FileNotFoundError:
        return None


def regular(path: str, flags: int) -> int:
    """Opens a file, for `open`. Raises OSError for what is none: to open or to read a pipe may wait for ever."""
    found = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
    if not stat.S_ISREG(os.fstat(found).st_mode):
        os.close(found)
        raise OSError(errno.EINVAL, "it is no file but a folder, a pipe or a device", path)
    return found


def beside(path: str, name: str) -> str:
    """The address of another file in the folder of a file; what follows a ? in an address goes along."""
    if not is_remote(path):
        return os.path.join(os.path.dirname(path), name)
    if is_object(path):  # a key is what it is, with all its characters
        return f"{path.rpartition('/')[0]}/{name}"
    parts = urlsplit(path)
    return urlunsplit((parts.scheme, parts.netloc, f"{parts.path.rpartition('/')[0]}/{quote(name)}", parts.query, ""))


def is_json(path: str) -> bool:
    """Whether an address is that of an index."""
    return name_of(path).endswith(".json")


def folder_of(path: str) -> str:
    """The folder of a file, as it may be shown."""
    return redacted(path).rpartition("/")[0] if is_remote(path) else os.path.dirname(path)


def user_cache(*names: str) -> str:
    """A path in this user's cache folder for this package."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(cache, "wdstrain", *names)


def publish(temporary: str, final: str) -> None:
    """Make a written and flushed file appear under its final name, whole or not at all, also after a power cut."""
    with open(temporary, "rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, final)
    sync_folder(os.path.dirname(final) or ".")


def sync_folder(folder: str) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def put_whole(path: str) -> Iterator[BinaryIO]:
    """A file to write, which has its name when all of it is written and flushed; after an error it is not there."""
    temporary = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.{uuid.uuid4().hex[:12]}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
        publish(temporary, path)
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}.") from error
    finally:
        with suppress(OSError):
            os.unlink(temporary)


def write_whole(path: str, data: bytes) -> None:
    """Write a small file atomically: temporary name, fsync, rename."""
    with put_whole(path) as file:
        file.write(data)
