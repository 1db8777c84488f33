"""Object stores (s3://, gs://, az://) through obstore.

obstore is an optional dependency. It brings credentials from the usual environment variables
(AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, ...), range requests and multipart uploads. An object is
written whole or not at all.

Reads are retried here and not by obstore, so that one time limit holds for all servers and the log
says when a server is silent (`retries`). Credentials are read again after a request was refused.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import lru_cache, partial
from typing import Any, TypeVar

from wdstrain.errors import StorageError, UsageError, WdstrainError
from wdstrain.storage.retries import TemporaryError, network_timeout, retry

PREFIXES = ("s3://", "gs://", "az://", "abfs://", "abfss://")
_LONGEST_REQUEST, _CONNECT_TIMEOUT = 60.0, 10.0  # seconds
_MOST_BYTES = 64 << 20  # of a request, which must end within its time
_UPLOAD_RETRIES = 1000  # the time limit ends them before
# obstore's texts of network errors, and of status codes that a retry or new credentials may fix
_TEMPORARY = re.compile(r"HTTP error: |status code: (408|429|5\d\d)\b")
_REFUSED = re.compile(r"status code: 40[13]\b|ExpiredToken|Unauthenticated|PermissionDenied")

Result = TypeVar("Result")


class MissingError(StorageError):
    """There is no object at an address."""


def is_object(path: str) -> bool:
    return path.startswith(PREFIXES)


class ObjectResponse:
    """Response to a range request, as `http.HttpResponse`."""

    ranged = True

    def __init__(self, path: str, start: int, stop: int) -> None:
        """Request bytes [start, stop) of an object, or the first of them."""
        self._path, self.process = path, os.getpid()
        options = {"range": (start, min(stop, start + _MOST_BYTES))}
        response = _ask(path, f"byte {start} was not sent", _obstore().get, options=options)
        self.position, self.stop = response.range
        self.total: int | None = response.meta["size"]
        self.version: str | None = response.meta["e_tag"]
        self._chunks = iter(response.stream())
        self._chunk = memoryview(b"")  # the bytes from `position` on that have arrived

    def readinto(self, view: memoryview) -> int:
        """Fill the view with the next bytes; return how many, 0 at the end of the body."""
        if not self._chunk:
            with _errors(self._path, f"byte {self.position} was not sent"):
                self._chunk = memoryview(next(self._chunks, b""))
        count = min(len(view), len(self._chunk))
        view[:count], self._chunk = self._chunk[:count], self._chunk[count:]
        self.position += count
        return count

    def is_version(self, version: str) -> bool:
        """Return whether the object has this version."""
        return self.version == version

    def interrupt(self) -> None:
        """Do nothing: a request ends by its own time limit."""

    def close(self) -> None:
        """Drop the body."""
        self._chunks, self._chunk = iter(()), memoryview(b"")


def list_folder_of(path: str) -> list[str]:
    """Return the sorted names of the objects in the folder of an address, without subfolders."""
    folder = _locate(path)[1].rpartition("/")[0]

    def read(store: Any, _: str) -> list[str]:
        return [entry["path"] for entry in _obstore().list(store, folder or None).collect()]

    request = partial(_ask, path, "its folder was not listed", read)
    names = [name[len(folder) :].lstrip("/") for name in retry(path, request, "a list")]
    return sorted(name for name in names if name and "/" not in name)


def put(path: str, file: str) -> None:
    """Upload a file as an object, whole or not at all. Raises StorageError."""

    def upload(store: Any, key: str) -> None:
        with open(file, "rb") as opened:
            _obstore().put(store, key, opened)

    _ask(path, "it cannot be written", upload, writes=True)


def remove(path: str) -> None:
    """Remove an object if it exists. Raises StorageError."""
    with suppress(MissingError):
        _ask(path, "it cannot be removed", _obstore().delete, writes=True)


def _obstore() -> Any:
    try:
        import obstore.store
    except ImportError:
        raise UsageError(
            "s3://, gs:// and az:// need obstore.",
            "Install it: pip install 'wdstrain[s3]'",
        ) from None
    return obstore


def _ask(
    path: str,
    failed: str,
    request: Callable[..., Result],
    *,
    writes: bool = False,
    **options: Any,
) -> Result:
    """Return the result of a request to a store and key, repeated once with new credentials.

    failed, writes: see `_errors`.
    """
    with _errors(path, failed, writes=writes):
        try:
            return request(*_locate(path, writes=writes), **options)
        except Exception as error:
            if not _REFUSED.search(f"{type(error).__name__} {error}"):
                raise
        _store.cache_clear()
        return request(*_locate(path, writes=writes), **options)


@contextmanager
def _errors(path: str, failed: str, *, writes: bool = False) -> Iterator[None]:
    """Raise StorageError, or TemporaryError if a retry may help, for an error of obstore.

    failed: what did not happen. writes: whether obstore repeats requests, and not the caller.
    """
    try:
        yield
    except WdstrainError:
        raise
    except FileNotFoundError:
        raise MissingError(f"{path} is not there.", "Check the address.") from None
    except Exception as error:
        reason = " ".join(str(error).split("Debug source")[0].split())[:300]
        if not writes and _TEMPORARY.search(str(error)):
            raise TemporaryError(reason) from None
        advice = " A conversion goes on with resume=True (--resume)." if writes else ""
        raise StorageError(
            f"{path}: {failed}: {reason}.",
            f"Check the credentials in the environment and the network.{advice}",
        ) from None


def _locate(path: str, *, writes: bool = False) -> tuple[Any, str]:
    """Return (store of the bucket, key in the bucket)."""
    scheme, _, rest = path.partition("://")
    bucket, _, key = rest.partition("/")
    store = _store(f"{scheme}://{bucket}", os.getpid(), network_timeout(), writes)
    return store, key.lstrip("/")


@lru_cache(maxsize=8)
def _store(bucket: str, process: int, timeout: float, writes: bool) -> Any:
    """Return a bucket with its connections.

    process: a forked child must not use its parent's connections. timeout: seconds that its server
    may be silent. writes: obstore retries requests, because it knows the parts of an upload.
    """
    longest = min(_LONGEST_REQUEST, max(0.1, timeout / 2))
    options: Any = {
        "timeout": timedelta(seconds=longest),
        "connect_timeout": timedelta(seconds=min(_CONNECT_TIMEOUT, longest)),
    }
    retries: Any = {
        "max_retries": _UPLOAD_RETRIES if writes else 0,
        "retry_timeout": timedelta(seconds=timeout),
    }
    # A plain endpoint must be allowed. For Google it may be set in a file; the default is https.
    endpoint = os.environ.get("AWS_ENDPOINT_URL", "")
    if bucket.startswith("gs://") or endpoint.startswith("http://"):
        options["allow_http"] = True
    return _obstore().store.from_url(bucket, client_options=options, retry_config=retries)
