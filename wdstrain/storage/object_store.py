"""Object stores: s3://, gs://, az:// through obstore, which brings credentials, ranges, multipart uploads and their retries.

Why obstore: one well-kept library for all three (Rust's object_store, wheels without dependencies), as fast as urllib3 and
faster than fsspec on the loopback, and it reads the usual environment (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, ...). It is an extra.
An object is put whole or not at all; there are no half shards in a bucket. Reads are retried here and not by obstore, which
does not tell: so the same setting holds for all servers, and the log says when one is waited for (`outages`).
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache
from typing import Any, TypeVar

from wdstrain.errors import ShardError, StorageError, UsageError, WdstrainError
from wdstrain.memory.scatter import ScatterList, as_scatter_list
from wdstrain.runtime.machine import memory
from wdstrain.storage.outages import TIMEOUT, Retries, network_timeout

SCHEMES = ("s3", "gs", "az", "abfs", "abfss")
_SHA256 = "sha256"  # metadata of what was put
_LONGEST_REQUEST, _CONNECT = 60.0, 10.0  # seconds
_MANY = 1000  # the time ends them before
# as obstore words an error of the network, or of a server that may get over it
_TRANSIENT = re.compile(r"HTTP error: |status code: (408|429|5\d\d)\b")


def is_object(path: str) -> bool:
    return path.startswith(tuple(f"{scheme}://" for scheme in SCHEMES))


@dataclass
class ObjectFile:
    """An object, read by position. Not shared between threads."""

    path: str
    known_size: int | None = None
    tag: str | None = None
    stopping: threading.Event = field(default_factory=threading.Event, repr=False)
    ranged: bool = True
    retries: int = 0
    fetched: int = 0  # bytes
    cached: int = 0

    def __post_init__(self) -> None:
        if self.known_size is None:
            found = head(self.path)
            if found is None:
                raise StorageError(f"{self.path} is not there. Check the address.")
            self.known_size, self.tag = found

    @property
    def version(self) -> str | None:
        """What tells the object from a later one."""
        return self.tag

    @property
    def size(self) -> int:
        assert self.known_size is not None
        return self.known_size

    def read(self, offset: int, length: int) -> bytes:
        """Bytes [offset, offset + length), fewer only at the end of the object."""
        length = max(0, min(length, self.size - offset))
        return self._bytes(offset, offset + length) if length else b""

    def read_into(
        self, pieces: ScatterList | Iterable[memoryview], offset: int, *, last: int | None = None
    ) -> None:
        """Fill the pieces, one after another, with the bytes from offset on."""
        todo = as_scatter_list(pieces)
        stop = offset + todo.left
        if stop > self.size:
            raise ShardError(
                f"{self.path} ends at byte {self.size}, {stop - self.size} bytes before the index says. Copy it again."
            )
        data = self._bytes(offset, stop)
        if self.stopping.is_set():  # where the bytes are for may be gone
            raise StorageError(f"{self.path}: reading was stopped.")
        todo.write(data)

    def stop(self) -> None:
        """A request that is under way is waited for; it has a time limit of its own."""
        self.stopping.set()

    def close(self) -> None:
        """Nothing is held between reads."""

    def __enter__(self) -> ObjectFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _bytes(self, start: int, stop: int) -> bytes:
        obstore = _obstore()

        def ask() -> tuple[Any, bytes]:
            answer = obstore.get(*_split(self.path), options={"range": (start, stop)})
            return answer.meta, bytes(answer.bytes())

        def failed() -> None:
            self.retries += 1

        try:
            meta, data = _retried(self.path, f"byte {start}", ask, failed, self.stopping)
        except StorageError:
            raise
        except Exception as error:
            raise _told(self.path, error, f"byte {start}") from None
        if len(data) != stop - start:
            raise StorageError(
                f"{self.path} gave {len(data)} bytes at byte {start} where {stop - start} were asked for."
            )
        if meta["size"] != self.size or (self.tag is not None and meta["e_tag"] != self.tag):
            raise ShardError(
                f"{self.path} changed while it was read, or since it was indexed. Start again."
            )
        self.tag = meta["e_tag"]
        self.fetched += len(data)
        return data


def head(path: str) -> tuple[int, str | None] | None:
    """(bytes, tag) of an object; None if it is not there."""
    try:
        found = _retried(path, "its size", lambda: _obstore().head(*_split(path)))
    except FileNotFoundError:
        return None
    except WdstrainError:
        raise
    except Exception as error:
        raise _told(path, error, "its size") from None
    return int(found["size"]), found["e_tag"]


def read_object(path: str) -> bytes | None:
    """A small object as a whole; None if it is not there."""

    def ask() -> bytes:
        found = _obstore().get(*_split(path))
        if found.meta["size"] > memory() // 4:
            raise StorageError(
                f"{path} has {found.meta['size']} bytes, too many to hold at once. Check the address."
            )
        return bytes(found.bytes())

    try:
        return _retried(path, "its bytes", ask)
    except WdstrainError:
        raise
    except FileNotFoundError:
        return None
    except Exception as error:
        raise _told(path, error, "its bytes") from None


def list_folder_of(path: str) -> list[str]:
    """The names of the objects in the folder of an address, sorted; those of folders in it are left away."""
    store, key = _split(path)
    folder = key.rpartition("/")[0]
    try:
        listed = _retried(
            path, "a list", lambda: _obstore().list(store, prefix=folder or None).collect()
        )
        found = [one["path"] for one in listed]
    except WdstrainError:
        raise
    except Exception as error:
        raise _told(path, error, "a list") from None
    names = [one[len(folder) :].lstrip("/") for one in found]
    return sorted(name for name in names if name and "/" not in name)


def put(path: str, file: str, sha256: str) -> bool:
    """Put a file as an object, whole or not at all. False if the same is there already."""
    store, key = _split(path, writes=True)
    obstore = _obstore()
    try:
        there = obstore.get(store, key, options={"head": True})
        if there.meta["size"] == os.path.getsize(file) and there.attributes.get(_SHA256) == sha256:
            return False
    except FileNotFoundError:
        pass
    except Exception as error:
        raise _told(path, error, "its head") from None
    try:
        with open(file, "rb") as opened:
            obstore.put(store, key, opened, attributes={_SHA256: sha256})
    except Exception as error:
        raise StorageError(
            f"{path} cannot be written: {_words(error)}. The same command with --resume goes on."
        ) from None
    return True


def remove(path: str) -> None:
    """Remove an object that may be there."""
    try:
        _obstore().delete(*_split(path, writes=True))
    except FileNotFoundError:
        return
    except Exception as error:
        raise StorageError(f"{path} cannot be removed: {_words(error)}.") from None


# --- parts -----------------------------------------------------------------------------------------------------------


def _obstore() -> Any:
    try:
        import obstore
    except ImportError:
        raise UsageError(
            "s3://, gs:// and az:// need obstore. Install it: pip install 'wdstrain[s3]'"
        ) from None
    return obstore


Found = TypeVar("Found")


def _retried(
    path: str,
    what: str,
    ask: Callable[[], Found],
    failed: Callable[[], None] = lambda: None,
    stopping: threading.Event | None = None,
) -> Found:
    """Return what a request gives, made anew while its error may be over by itself. failed: called for each such error.

    Raises StorageError when the server was waited for long enough, other errors as they are.
    """
    stopping = stopping or threading.Event()
    with Retries(path) as retries:
        while True:
            try:
                found = ask()
                retries.progress()
                return found
            except Exception as error:
                if not _TRANSIENT.search(str(error)) or isinstance(error, WdstrainError):
                    raise
                reason = _words(error)
            failed()
            pause = retries.pause(reason)
            if pause is None:
                raise StorageError(
                    f"{path} did not give {what} in {retries.tries} attempts over {retries.seconds:.0f} s, the last: {reason}. Check "
                    f"the credentials and the network; {TIMEOUT} sets for how many seconds a server is waited for."
                )
            stopping.wait(pause)
            if stopping.is_set():
                raise StorageError(f"{path}: reading was stopped.")


def _split(path: str, *, writes: bool = False) -> tuple[Any, str]:
    """(the store of a bucket, the key in it)."""
    scheme, _, rest = path.partition("://")
    bucket, _, key = rest.partition("/")
    return _store(f"{scheme}://{bucket}", os.getpid(), network_timeout(), writes), key.lstrip("/")


@lru_cache(maxsize=8)
def _store(bucket: str, process: int, timeout: float, writes: bool) -> Any:
    """A bucket, with its connections, which a fork does not share. timeout: seconds that its server is waited for.

    writes: requests are retried by obstore, which knows the parts of an upload.
    """
    _obstore()
    from obstore.store import from_url

    longest = min(_LONGEST_REQUEST, max(0.1, timeout / 2))
    options: Any = {
        "timeout": timedelta(seconds=longest),
        "connect_timeout": timedelta(seconds=min(_CONNECT, longest)),
    }
    retries: Any = {
        "max_retries": _MANY if writes else 0,
        "retry_timeout": timedelta(seconds=timeout),
    }
    # an endpoint that was named says it; Google's is named in the environment or in a file, and is https where none is
    if bucket.startswith("gs://") or os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://"):
        options["allow_http"] = True
    try:
        return from_url(bucket, client_options=options, retry_config=retries)
    except Exception as error:
        raise StorageError(
            f"{bucket} cannot be opened: {_words(error)}. Check the credentials in the environment."
        ) from None


def _told(path: str, error: Exception, what: str) -> StorageError:
    if isinstance(error, FileNotFoundError):
        return StorageError(f"{path} is not there. Check the address.")
    return StorageError(
        f"{path} did not give {what}: {_words(error)}. Check the credentials and the network."
    )


def _words(error: Exception) -> str:
    return " ".join(str(error).split("Debug source")[0].split())[:300]
