"""Object stores (s3://, gs://, az://) through obstore.

obstore is an optional dependency. It brings credentials from the usual environment variables
(AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, ...), range requests and multipart uploads. An object is
written whole or not at all.

Reads are retried here and not by obstore, so that one time limit holds for all servers and the log
says when a server is silent (`retries`).
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import lru_cache
from typing import Any, TypeVar

from wdstrain.errors import ShardError, StorageError, UsageError, WdstrainError
from wdstrain.memory.scatter import ScatterList, as_scatter_list
from wdstrain.runtime.machine import memory
from wdstrain.storage.retries import Retries, network_timeout

SCHEMES = ("s3", "gs", "az", "abfs", "abfss")
_PREFIXES = tuple(f"{scheme}://" for scheme in SCHEMES)

_SHA256 = "sha256"  # metadata name of an object's checksum
_LONGEST_REQUEST, _CONNECT_TIMEOUT = 60.0, 10.0  # seconds
_UPLOAD_RETRIES = 1000  # the time limit ends them before
# obstore's texts of network errors and of status codes that a retry may fix
_TEMPORARY = re.compile(r"HTTP error: |status code: (408|429|5\d\d)\b")

Result = TypeVar("Result")


def is_object(path: str) -> bool:
    return path.startswith(_PREFIXES)


class ObjectFile:
    """An object, read by position. Only `stop` may be called by other threads.

    tag, version: ETag of the object. ranged: True. retries: failed attempts.
    fetched: bytes that were read. cached: 0.
    """

    ranged, cached = True, 0

    def __init__(
        self,
        path: str,
        size: int | None = None,
        tag: str | None = None,
        stopping: threading.Event | None = None,
    ) -> None:
        """size: None sends a request for size and tag. tag: None takes that of the first response.

        stopping: set to end reading.
        """
        self.path, self.retries, self.fetched = path, 0, 0
        self._stopping = stopping or threading.Event()
        if size is None:
            size, tag = _size_and_tag(path)
        self.size, self.tag = size, tag

    @property
    def version(self) -> str | None:
        return self.tag

    def read(self, offset: int, length: int) -> bytes:
        """Return bytes [offset, offset + length), fewer only at the end of the object."""
        length = max(0, min(length, self.size - offset))
        return self._get_range(offset, offset + length) if length else b""

    def read_into(
        self, target: ScatterList | Iterable[memoryview], offset: int, *, last: int | None = None
    ) -> None:
        """Fill the target with the bytes from offset on. last: ignored.

        Raises ShardError if the object changed, StorageError if the server does not recover.
        """
        target = as_scatter_list(target)
        stop = offset + target.left
        if stop > self.size:
            raise ShardError(
                f"{self.path} ends at byte {self.size}, {stop - self.size} bytes before the index "
                f"says. Copy it again."
            )
        data = self._get_range(offset, stop)
        if self._stopping.is_set():  # the memory of the target may be gone
            raise StorageError(f"{self.path}: reading was stopped.")
        target.write(data)

    def stop(self) -> None:
        """Let reads of other threads fail. A running request ends by its own time limit."""
        self._stopping.set()

    def close(self) -> None:
        """Do nothing: no resource is held between reads."""

    def __enter__(self) -> ObjectFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _get_range(self, start: int, stop: int) -> bytes:
        obstore, missing = _obstore(), f"byte {start}"

        def request() -> tuple[Any, bytes]:
            response = obstore.get(*_locate(self.path), options={"range": (start, stop)})
            return response.meta, bytes(response.bytes())

        def count_retry() -> None:
            self.retries += 1

        meta, data = _retried(self.path, missing, request, count_retry, self._stopping)
        if len(data) != stop - start:
            raise StorageError(
                f"{self.path}: the server sent {len(data)} bytes instead of {stop - start} at byte "
                f"{start}. Check the server."
            )
        if meta["size"] != self.size or (self.tag is not None and meta["e_tag"] != self.tag):
            raise ShardError(
                f"{self.path} changed while it was read, or since it was indexed. Start again."
            )
        self.tag = meta["e_tag"]
        self.fetched += len(data)
        return data


def read_object(path: str) -> bytes | None:
    """Return a small object; None if it does not exist."""

    def request() -> bytes:
        response = _obstore().get(*_locate(path))
        if response.meta["size"] > memory() // 4:
            raise StorageError(
                f"{path} has {response.meta['size']} bytes, too many to hold at once. "
                f"Check the address."
            )
        return bytes(response.bytes())

    try:
        return _retried(path, "byte 0", request)
    except _MissingError:
        return None


def list_folder_of(path: str) -> list[str]:
    """Return the sorted names of the objects in the folder of an address, without subfolders."""
    store, key = _locate(path)
    folder = key.rpartition("/")[0]
    listed = _retried(
        path, "a list", lambda: _obstore().list(store, prefix=folder or None).collect()
    )
    names = [entry["path"][len(folder) :].lstrip("/") for entry in listed]
    return sorted(name for name in names if name and "/" not in name)


def put(path: str, file: str, sha256: str) -> bool:
    """Upload a file as an object, whole or not at all.

    Returns False if an object with this checksum exists already. Raises StorageError.
    """
    store, key = _locate(path, for_writing=True)
    if _is_stored(path, sha256, os.path.getsize(file)):
        return False
    try:
        with open(file, "rb") as opened:
            _obstore().put(store, key, opened, attributes={_SHA256: sha256})
    except Exception as error:
        raise StorageError(
            f"{path} cannot be written: {_describe(error)}. Run it again with resume=True (--resume)."
        ) from None
    return True


def _is_stored(path: str, sha256: str, size: int) -> bool:
    """Return whether an object has this size, and this checksum in its metadata."""
    store, key = _locate(path, for_writing=True)
    try:
        present = _obstore().get(store, key, options={"head": True})
        is_same: bool = present.meta["size"] == size and present.attributes.get(_SHA256) == sha256
        return is_same
    except FileNotFoundError:
        return False
    except Exception as error:
        raise _as_storage_error(path, error, "its metadata") from None


def copy(source: str, path: str, sha256: str, size: int) -> bool:
    """Copy an object inside its bucket, on the server.

    Returns False if an object with this checksum exists already. Raises StorageError, also if the
    server makes another object than the source, as one does that does not know the request.
    """
    store, key = _locate(path, for_writing=True)
    obstore = _obstore()
    if _is_stored(path, sha256, size):
        return False
    try:
        obstore.copy(store, _locate(source)[1], key)
        copied = obstore.head(store, key)["size"]
    except FileNotFoundError:
        raise StorageError(
            f"{source} is gone. It is part of an unfinished upload. Run it again with "
            f"overwrite=True instead of resume=True."
        ) from None
    except Exception as error:
        raise StorageError(
            f"{path} cannot be written: {_describe(error)}. Run it again with resume=True (--resume)."
        ) from None
    if copied != size:
        remove(path)
        raise StorageError(f"{path}: the server cannot copy {source}.")
    return True


def remove(path: str) -> None:
    """Remove an object if it exists. Raises StorageError."""
    try:
        _obstore().delete(*_locate(path, for_writing=True))
    except FileNotFoundError:
        return
    except Exception as error:
        raise StorageError(f"{path} cannot be removed: {_describe(error)}.") from None


class _MissingError(StorageError):
    """An object does not exist."""


def _size_and_tag(path: str) -> tuple[int, str | None]:
    meta = _retried(path, "its size", lambda: _obstore().head(*_locate(path)))
    return int(meta["size"]), meta["e_tag"]


def _obstore() -> Any:
    try:
        import obstore
    except ImportError:
        raise UsageError(
            "s3://, gs:// and az:// need obstore. Install it: pip install 'wdstrain[s3]'"
        ) from None
    return obstore


def _retried(
    path: str,
    missing: str,
    request: Callable[[], Result],
    count_retry: Callable[[], None] = lambda: None,
    stopping: threading.Event | None = None,
) -> Result:
    """Return the result of a request, repeated while its error may be temporary.

    missing: what the server should send, for errors. count_retry: called for each temporary error.
    Raises _MissingError if the object does not exist, otherwise StorageError.
    """
    with Retries(path, path, stopping) as retries:
        while True:
            try:
                result = request()
                retries.progress()
                return result
            except WdstrainError:
                raise
            except Exception as error:
                if not _TEMPORARY.search(str(error)):
                    raise _as_storage_error(path, error, missing) from None
                reason = _describe(error)
            count_retry()
            retries.wait(reason, missing)


def _locate(path: str, *, for_writing: bool = False) -> tuple[Any, str]:
    """Return (store of the bucket, key in the bucket)."""
    scheme, _, rest = path.partition("://")
    bucket, _, key = rest.partition("/")
    store = _store(f"{scheme}://{bucket}", os.getpid(), network_timeout(), for_writing)
    return store, key.lstrip("/")


@lru_cache(maxsize=8)
def _store(bucket: str, process: int, timeout: float, for_writing: bool) -> Any:
    """Return a bucket with its connections.

    process: a forked child must not use its parent's connections. timeout: seconds that its server
    may be silent. for_writing: obstore retries requests, because it knows the parts of an upload.
    """
    _obstore()
    from obstore.store import from_url

    longest = min(_LONGEST_REQUEST, max(0.1, timeout / 2))
    options: Any = {
        "timeout": timedelta(seconds=longest),
        "connect_timeout": timedelta(seconds=min(_CONNECT_TIMEOUT, longest)),
    }
    retries: Any = {
        "max_retries": _UPLOAD_RETRIES if for_writing else 0,
        "retry_timeout": timedelta(seconds=timeout),
    }
    # A plain endpoint must be allowed. For Google it may be set in a file; the default is https.
    endpoint = os.environ.get("AWS_ENDPOINT_URL", "")
    if bucket.startswith("gs://") or endpoint.startswith("http://"):
        options["allow_http"] = True
    try:
        return from_url(bucket, client_options=options, retry_config=retries)
    except Exception as error:
        raise StorageError(
            f"{bucket} cannot be opened: {_describe(error)}. Check the credentials in the "
            f"environment."
        ) from None


def _as_storage_error(path: str, error: Exception, missing: str) -> StorageError:
    if isinstance(error, FileNotFoundError):
        return _MissingError(f"{path} is not there. Check the address.")
    return StorageError(
        f"{path}: the server did not send {missing}: {_describe(error)}. "
        f"Check the credentials and the network."
    )


def _describe(error: Exception) -> str:
    return " ".join(str(error).split("Debug source")[0].split())[:300]
