"""Object stores (s3://, gs://, az://) through obstore.

obstore is an optional dependency. It brings credentials from the usual environment variables
(AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, ...), range requests and multipart uploads. An object is
written whole or not at all.

Reads are retried here and not by obstore, so that one time limit holds for all servers and the log
says when a server is silent (`retries`). Credentials are read again after a request was refused.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import lru_cache, partial
from typing import Any

from wdstrain.errors import StorageError, UsageError, WdstrainError
from wdstrain.storage.retries import Response, Result, TemporaryError, network_timeout, retry

PREFIXES = ("s3://", "gs://", "az://", "abfs://", "abfss://")
_LONGEST_REQUEST, _CONNECT_TIMEOUT = 60.0, 10.0  # seconds
_MOST_BYTES = 16 << 20  # of a request, which are held in memory and must come within its time
_UPLOAD_RETRIES = 1000  # the time limit ends them before
# obstore's texts of network errors, and of status codes that a retry or new credentials may fix
_TEMPORARY = re.compile(r"HTTP error: |status code: (408|429|5\d\d)\b")
_REFUSED = re.compile(r"status code: 40[13]\b|ExpiredToken|Unauthenticated|PermissionDenied")


class MissingError(StorageError):
    """There is no object at an address."""


def is_object(path: str) -> bool:
    return path.startswith(PREFIXES)


def request(path: str, start: int, stop: int) -> Response:
    """Return the response to a request for bytes [start, stop) of an object, or the first of them."""

    def read(store: Any, key: str) -> Response:
        result = _obstore().get(
            store, key, options={"range": (start, min(stop, start + _MOST_BYTES))}
        )
        (begin, end), tag = result.range, result.meta["e_tag"]
        return Response(io.BytesIO(result.bytes()), begin, end, result.meta["size"], tag, tag)

    return _ask(path, f"byte {start} was not sent", read)


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
    path: str, failed: str, request: Callable[[Any, str], Result], *, writes: bool = False
) -> Result:
    """Return the result of a request to a store and key, repeated once with new credentials.

    failed: what did not happen. writes: whether obstore repeats requests, and not the caller.
    Raises TemporaryError if a retry may help, otherwise StorageError.
    """
    try:
        try:
            return request(*_locate(path, writes=writes))
        except Exception as error:
            if not _REFUSED.search(f"{type(error).__name__} {error}"):
                raise
        _store.cache_clear()
        return request(*_locate(path, writes=writes))
    except WdstrainError:
        raise
    except FileNotFoundError:
        raise MissingError(f"{path} is not there.", "Check the address.") from None
    except Exception as error:
        reason = " ".join(str(error).split("Debug source")[0].split())[:300]
        if not writes and _TEMPORARY.search(str(error)):
            raise TemporaryError(reason) from None
        advice = " A conversion goes on with {resume}." if writes else ""
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
