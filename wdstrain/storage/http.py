"""HTTP through urllib3: connections, proxies, redirects, headers, and bodies read without a copy.

The environment variable WDSTRAIN_HTTP_HEADERS holds headers of every request, as lines
"Name: value". HF_TOKEN is sent to the Hugging Face Hub, or to the server that HF_ENDPOINT names.

The target of a redirect is used again until it refuses a request. Servers that redirect to signed
addresses count the requests for them. Where a server limits the requests, all processes of this
machine wait (`retries`).

Signed addresses that expired are renewed by a function of the user. Those with one server and one
query expire together, and are renewed by one call.
"""

from __future__ import annotations

import base64
import os
import re
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from contextlib import closing, nullcontext, suppress
from email.utils import parsedate_to_datetime
from functools import lru_cache, partial
from http.client import HTTPException, HTTPResponse
from typing import Any, cast
from urllib.parse import SplitResult, parse_qsl, unquote, urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

import urllib3
from urllib3.util.response import assert_header_parsing

from wdstrain.errors import StorageError, UsageError
from wdstrain.runtime.machine import memory
from wdstrain.storage.retries import (
    MODIFIED,
    REFUSAL_PATIENCE,
    Response,
    TemporaryError,
    note_limit,
    retry,
    seconds_to_wait,
    server_of,
    silence_limit,
)
from wdstrain.storage.secrets import describe_error, redacted, scrubbed, without_user

_HEADERS = "WDSTRAIN_HTTP_HEADERS"
_CONNECT_TIMEOUT = 10.0  # seconds
_REDIRECTS = 5
_RENEWALS = 2  # of an address for one request; other threads may use a short one up
_MOST_TARGETS = 4096  # of redirects that are remembered
_CHUNK = 256 << 10  # bytes of a small object that are read at a time
_REASON_BYTES = 16 << 10  # of an error page, in which the server's reason is looked for
_BODY = (200, 206)  # status codes of responses with bytes of the object
_REDIRECT = (301, 302, 303, 307, 308)
_BEYOND = 416  # status code of a request beyond the end of the object
_TEMPORARY = frozenset({408, 425, 429, 500, 502, 503, 504})  # status codes that a retry may fix
# At most 18 digits, and ASCII only: int() accepts digits of other scripts and of any count.
_NUMBER = re.compile(r"[0-9]{1,18}")
_RANGE = re.compile(r"bytes (?:(N)-(N)|\*)/(N|\*)".replace("N", _NUMBER.pattern))
_NEXT_PAGE = re.compile(r'<([^<>]*)>;\s*rel="?next"?')
_REASON = re.compile(
    r"<(?:Code|Message|AuthenticationErrorDetail)>([^<]+)<"
    r'|"(?:error|message|detail|error_description)"\s*:\s*"([^"]+)"'
)
_EXPIRED = re.compile(r"expired|time frame", re.IGNORECASE)

_targets: dict[str, str] = {}  # address -> which sent its bytes last

_renewal: Callable[[str], str] | None = None  # the function of `renew_addresses`
# By server and query of expired addresses: parts of the fresh one, and when it was there.
_renewed: dict[tuple[str, str], tuple[SplitResult, float]] = {}
_renewal_lock = threading.RLock()


def is_http(path: str) -> bool:
    return path.startswith(("http://", "https://"))


def check_address(address: str) -> None:
    """Raise UsageError for an address to which no request can be sent."""
    try:
        parts = urlsplit(address)
        _ = parts.port
        if not (parts.hostname or "").encode("idna"):
            raise ValueError("it has no host")
    except ValueError as error:
        raise UsageError(
            f"{redacted(address)}: not a valid address, {error}.",
            "Check its host and port. Write for example http://host/shards",
        ) from None


def hub_endpoint() -> str:
    """Return the address of the Hugging Face Hub."""
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def request(address: str, start: int, stop: int) -> Response:
    """Return the response to a request for bytes [start, stop) of an object.

    Raises `RETRIED` errors if a retry may help, otherwise StorageError.
    """
    response = get(address, {"Range": f"bytes={start}-{stop - 1}"}, (_BEYOND,))
    close, headers = partial(_release, response), response.headers
    try:
        _check_body(response, address)
        extent = _extent(response, start, redacted(address))
    except StorageError:
        close()
        raise
    tag, modified = headers.get("ETag"), headers.get("Last-Modified")
    tag, modified = tag and tag.removeprefix("W/"), modified and MODIFIED + modified
    # A time within a second of the response is no version: the object may change in that second.
    version = tag or (modified if _is_old(headers) else None)
    return Response(
        _raw(response),
        *extent,
        version,
        tag,
        modified,
        ranged=response.status != 200,
        close=close,
        interrupt=response.shutdown,
    )


def _extent(
    response: urllib3.BaseHTTPResponse, start: int, shown: str
) -> tuple[int, int, int | None]:
    """Return start and end of a body, and the total bytes of the object. start: as requested."""
    if response.status == 200:  # the whole object
        length = response.headers.get("Content-Length", "")
        total = int(length) if _NUMBER.fullmatch(length) else None
        return 0, 1 << 62 if total is None else total, total
    header = response.headers.get("Content-Range", "")
    match = _RANGE.fullmatch(header)
    if match is None or int(match[1] or start) != start:
        raise StorageError(
            f"{shown}: the server sent the range {header!r} for a request that begins at byte {start}.",
            "Check the server.",
        )
    stop = int(match[2]) + 1 if match[2] else start  # "*": the object has no such byte
    return start, stop, None if match[3] == "*" else int(match[3])


def _check_body(response: urllib3.BaseHTTPResponse, address: str) -> None:
    """Raise StorageError for a body that is not made of the object's own bytes."""
    is_tar, shown = address.partition("?")[0].endswith(".tar"), redacted(address)
    coding = response.headers.get("Content-Encoding", "identity")
    transfer = response.headers.get("Transfer-Encoding", "chunked")
    if transfer.lower() not in ("chunked", "identity"):
        raise StorageError(
            f"{shown}: the server sent the transfer coding {transfer[:80]!r}; only chunked can be read.",
            "Check the server.",
        )
    if is_tar and response.headers.get("Content-Type", "").startswith("text/html"):
        raise StorageError(
            f"{shown}: the server sent an HTML page instead of a shard.", "Check the address."
        )
    # An object that is stored compressed has ranges of its compressed bytes.
    if coding.lower() != "identity" and (is_tar or response.status == 200):
        raise StorageError(
            f"{shown}: the server compresses it ({coding[:80]!r}), although the request forbids it, "
            "so offsets do not hold.",
            "Switch compression off for this file.",
        )


def _is_old(headers: Mapping[str, str]) -> bool:
    """Return whether an object was modified more than a second before the response."""
    with suppress(LookupError, TypeError, ValueError, OverflowError):  # they are not dates
        sent, modified = (
            parsedate_to_datetime(headers[name]) for name in ("Date", "Last-Modified")
        )
        return (sent - modified).total_seconds() > 1
    return False


def _release(response: urllib3.BaseHTTPResponse) -> None:
    """Close a connection, unless the whole body was read: then it is kept for reuse."""
    raw = _raw(response)
    if raw.length == 1:  # of a request for the size
        raw.read()
    if not raw.isclosed():
        response.close()
    response.release_conn()


def read_page(
    address: str, missing: Collection[int] = (403, 404, 410)
) -> tuple[bytes | None, str | None]:
    """Return (small object, address of the next one); both None if it does not exist.

    missing: status codes of an object that does not exist; S3 answers 403. The next one is that of
    the header `Link: <...>; rel="next"`. Raises StorageError for an object that would fill a quarter
    of the memory, also when it is decompressed.
    """
    return retry(address, partial(_read_page, address, missing), "byte 0")


def get(
    address: str, headers: Mapping[str, str], others: Collection[int] = ()
) -> urllib3.BaseHTTPResponse:
    """Return the response to a GET request, at the first byte of the object.

    Redirects are followed, and an address that expired is renewed. others: status codes of
    responses without bytes that are returned, too. Raises `RETRIED` errors for what a retry may
    fix, otherwise StorageError.
    """
    for left in reversed(range(_RENEWALS + 1)):
        sent = time.monotonic()
        try:
            response = _follow(_current_address(address), headers)
        except ValueError as error:  # of urllib and urllib3
            raise StorageError(
                f"{redacted(address)} leads to an address that is not valid "
                f"({scrubbed(str(error))})."
            ) from None
        if response.status in _BODY:
            return response
        with closing(response):
            reason = _reason(response, address)
        has_expired = _EXPIRED.search(reason)
        if not (has_expired and left and _renew(address, sent)):
            break
    if response.status in others and not has_expired:
        return response
    advice = "Check the address."
    if has_expired:
        advice = (
            "The signed address or the token has expired. Get a new one, and continue with it at "
            "the same position (--resume)."
        )
    raise StorageError(
        f"{redacted(address)}: the server answered {response.status} "
        f"{response.reason or ''}{reason}.",
        advice,
    )


def _follow(address: str, headers: Mapping[str, str]) -> urllib3.BaseHTTPResponse:
    """Send a request to the known target of an address, or to the address and its redirects."""
    # One request learns the target for all threads.
    with nullcontext() if address in _targets else _locks(os.getpid())[hash(address) % 64]:
        target = _targets.get(address, address)
        response = _send(address, target, headers)
        if target != address and 400 <= response.status < 500:
            response.close()
            target, response = address, _send(address, address, headers)
        for _ in range(_REDIRECTS):
            location = response.headers.get("Location")
            if response.status not in _REDIRECT or not location:
                break
            response.close()
            target = urljoin(target, location)
            response = _send(address, target, headers)
    if response.status in _BODY:
        if len(_targets) >= _MOST_TARGETS:
            _targets.clear()
        _targets[address] = target
    return response


def _send(address: str, target: str, headers: Mapping[str, str]) -> urllib3.BaseHTTPResponse:
    """Send one GET request. address: named by the user; its secrets are sent to its server only.

    Raises TemporaryError for a status that a retry may fix.
    """
    server, silence = server_of(target), silence_limit()
    secret = _secret_headers(address) if server_of(address) == server else {}
    client = f"{server} {sorted(secret.items())}"
    if wait := seconds_to_wait(client):
        raise TemporaryError("the limit of requests is reached", wait)
    try:
        response = _pool_manager(target).request(
            "GET",
            without_user(target),
            headers={"Accept-Encoding": "identity", **secret, **headers},
            preload_content=False,
            redirect=False,
            retries=False,
            timeout=urllib3.Timeout(connect=min(_CONNECT_TIMEOUT, silence), read=silence),
        )
    except Exception as error:
        _clear_frames(error)
        if target != address:
            _targets.pop(address, None)
        raise
    raw = _raw(response)
    try:
        # A malformed line hides the headers behind it. urllib3 only logs that.
        assert_header_parsing(raw.headers)
        # http.client takes a connection that ends within the head for the end of the head.
        is_empty = raw.isclosed() or raw.length == 0
        if response.status in _BODY and not is_empty and not raw.fp.peek(1):
            raise HTTPException("the connection ended within the head of the response")
        wait = note_limit(client, response.status, response.headers)
        if response.status in _TEMPORARY:
            patience = REFUSAL_PATIENCE if response.status == 429 else 1.0
            raise TemporaryError(f"status {response.status}", wait, patience)
    except BaseException:
        response.close()
        raise
    return response


def _read_page(address: str, missing: Collection[int]) -> tuple[bytes | None, str | None]:
    with closing(get(address, {}, missing)) as response:
        if response.status in missing:
            return None, None
        data, most = bytearray(), memory() // 4
        for chunk in response.stream(_CHUNK):  # memory grows with the bytes, not with their claim
            data += chunk
            if len(data) > most:
                raise StorageError(
                    f"{redacted(address)} has more than {most} bytes, too many to hold at once.",
                    "Check the address.",
                )
    is_page = response.headers.get("Content-Type", "").startswith("text/html")
    # Some servers send a page with status 200 for a missing object.
    if is_page and urlsplit(address).path.endswith(".json"):
        return None, None
    following = _NEXT_PAGE.search(response.headers.get("Link", ""))
    return bytes(data), following[1] if following else None


def _reason(response: urllib3.BaseHTTPResponse, address: str) -> str:
    """Return ": " and the reason that an error page gives, without secrets; "" if it gives none."""
    text = ""
    with suppress(Exception):
        text = response.read(_REASON_BYTES).decode("utf-8", "replace")
    found = [xml or json for xml, json in _REASON.findall(text)]
    reason = scrubbed(", ".join(found)[:300]).rstrip(".")
    for _, value in parse_qsl(urlsplit(address).query):
        reason = reason.replace(value, "...")
    return f": {reason}" if reason else ""


def _secret_headers(address: str) -> dict[str, str]:
    """Return the headers from the environment, and a token or user and password as a header.

    Raises UsageError for a header that cannot be sent.
    """
    lines = [line.partition(":") for line in os.environ.get(_HEADERS, "").splitlines()]
    headers = {name.strip(): value.strip() for name, colon, value in lines if colon}
    token = os.environ.get("HF_TOKEN", "").strip()
    text = "".join([token, *headers, *headers.values()])
    if not (text.isascii() and text.isprintable()):
        raise UsageError(
            f"{_HEADERS}, HF_TOKEN: must be printable ASCII.",
            "Correct them.",
        )
    if token and address.startswith(f"{hub_endpoint()}/"):
        headers["Authorization"] = f"Bearer {token}"
    if user := urlsplit(address).netloc.rpartition("@")[0]:
        headers["Authorization"] = "Basic " + base64.b64encode(unquote(user).encode()).decode()
    return headers


def _clear_frames(error: BaseException | None) -> None:
    """Clear the variables of the frames that an error went through.

    A frame of urllib3 refers to its error. The error refers to that frame, and so to all callers
    and the buffers that they fill. They would live until the next garbage collection.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


def _raw(response: urllib3.BaseHTTPResponse) -> HTTPResponse:
    """Return http.client's response, which is read without a copy. urllib3 has no name for it."""
    return cast(HTTPResponse, cast(Any, response)._fp)


def _pool_manager(address: str) -> urllib3.PoolManager:
    """Return the connections of this process, through a proxy if the environment names one."""
    parts = urlsplit(address)
    proxy = "" if proxy_bypass(parts.hostname or "") else getproxies().get(parts.scheme, "")
    certificates = os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR")
    return _new_pool_manager(os.getpid(), proxy, certificates)


@lru_cache(maxsize=4)
def _new_pool_manager(
    process: int, proxy: str, certificates: tuple[str | None, ...]
) -> urllib3.PoolManager:
    """process: a forked child must not use its parent's connections."""
    options: Any = {"num_pools": 16, "maxsize": 128}
    return urllib3.ProxyManager(proxy, **options) if proxy else urllib3.PoolManager(**options)


@lru_cache(maxsize=1)
def _locks(process: int) -> list[threading.Lock]:
    """Return locks of this process; a forked child must not wait for its parent's threads."""
    return [threading.Lock() for _ in range(64)]


# --- addresses that expire -------------------------------------------------------------------------


def renew_addresses(function: Callable[[str], str] | None) -> None:
    """Call a function for a fresh address when a server says that a signed address has expired.

    It gets the address as it was named first, and returns that of the same file with a new
    signature. It is called once for all addresses with the same server and query, while their
    readers wait. None: no function is called. Each process of a job needs the call.
    """
    global _renewal
    _renewal = function


def _current_address(address: str) -> str:
    """Return an address with its newest signature."""
    old = urlsplit(address)
    fresh = _renewed.get((old.netloc, old.query))
    return address if fresh is None else fresh[0]._replace(path=old.path).geturl()


def _renew(address: str, sent: float) -> bool:
    """Return whether there is a fresh address in place of one that a server refused as expired.

    sent: time of the request (monotonic). Raises StorageError if the user's function fails.
    """
    if _renewal is None:
        return False
    old = urlsplit(address)
    key = old.netloc, old.query
    with _renewal_lock:
        if key not in _renewed or _renewed[key][1] < sent:
            try:
                fresh = urlsplit(_renewal(address))
                if fresh.path != old.path:
                    raise ValueError("it returned the address of another file")
            except Exception as error:
                raise StorageError(
                    f"{redacted(address)} has expired, and its renewal failed: "
                    f"{describe_error(error)}.",
                    "Check the function of wt.renew_addresses.",
                ) from error
            _renewed[key] = fresh, time.monotonic()
    return True
