"""GET requests through urllib3: connections, proxies, redirects, headers; addresses without secrets.

Secrets are the user and password, the query (signed addresses) and the fragment of an address. They
are left out of errors, output and logs.

The environment variable WDSTRAIN_HTTP_HEADERS holds headers of every request, as lines
"Name: value". HF_TOKEN is sent to the Hugging Face Hub, or to the server that HF_ENDPOINT names.
"""

from __future__ import annotations

import base64
import logging
import os
import re
import socket
from collections.abc import Mapping
from functools import lru_cache
from http.client import HTTPResponse
from typing import Any, cast
from urllib.parse import unquote, urlsplit, urlunsplit
from urllib.request import getproxies, proxy_bypass

import urllib3
from urllib3.exceptions import LocationParseError
from urllib3.util.response import assert_header_parsing

from wdstrain.errors import StorageError, UsageError
from wdstrain.storage.retries import silence_limit

_HEADERS = "WDSTRAIN_HTTP_HEADERS"
_CONNECT_TIMEOUT = 10.0  # seconds
_REDIRECTS = 5
_PUBLIC_HEADERS = ("Range", "If-Match", "Accept-Encoding")
_CERTIFICATE_VARIABLES = ("SSL_CERT_FILE", "SSL_CERT_DIR")
_hidden: set[str] = set()  # secrets of all addresses that were requested


def redacted(address: str) -> str:
    """Return an address without user, password, query and fragment."""
    parts = urlsplit(address)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def redacted_invalid(address: str) -> str:
    """Return the same for an address that cannot be parsed."""
    return re.sub(r"//[^/]*@", "//", address.split("?")[0])


def without_user(address: str) -> str:
    """Return an address without user, password and fragment."""
    parts = urlsplit(address)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, parts.query, ""))


def describe_error(error: Exception, address: str) -> str:
    """Return the type and text of an error without secrets.

    They may be those of the address or of an address that it redirected to.
    """
    error = getattr(error, "reason", None) or error  # the connection's error, not the request's
    text = re.sub(r"\s+", " ", str(error)) or type(error).__name__
    for secret in {address, without_user(address), *_secrets(address)}:
        text = text.replace(secret, "...")
    text = re.sub(r"//[^/\s]*@", "//", re.sub(r"\?[^\s'\")]+", "?...", text))
    return f"{type(error).__name__}: {text[:200]}"


def hide_in_logs(address: str) -> None:
    """Replace the secrets of an address in urllib3's log records from now on."""
    _hidden.update(_secrets(address))


def _secrets(address: str) -> list[str]:
    parts = urlsplit(address)
    return [secret for secret in (parts.query, parts.netloc.rpartition("@")[0]) if secret]


class _SecretFilter(logging.Filter):
    """Log filter that replaces hidden secrets."""

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        secrets = [secret for secret in tuple(_hidden) if secret in text]  # other threads add some
        for secret in secrets:
            text = text.replace(secret, "...")
        if secrets:
            record.msg, record.args, record.exc_info = text, (), None
        return True


for _module in ("connection", "connectionpool", "util.retry", "poolmanager"):
    logging.getLogger(f"urllib3.{_module}").addFilter(_SecretFilter())


class RawResponse(HTTPResponse):
    """http.client's response with its socket, from which a body can be received without a copy."""

    def __init__(self, sock: socket.socket, *args: Any, **options: Any) -> None:
        super().__init__(sock, *args, **options)
        self.socket = sock


def _keep_raw_response(connection: Any, *args: Any, **options: Any) -> RawResponse:
    connection.raw_response = RawResponse(*args, **options)
    return cast(RawResponse, connection.raw_response)


class HTTPConnection(urllib3.connection.HTTPConnection):
    """urllib3's connection that keeps the `RawResponse` of its last request."""

    raw_response: RawResponse
    response_class: Any = _keep_raw_response  # http.client calls it as a method


class HTTPSConnection(urllib3.connection.HTTPSConnection):
    """The same over TLS."""

    raw_response: RawResponse
    response_class: Any = _keep_raw_response


class HTTPConnectionPool(urllib3.HTTPConnectionPool):
    ConnectionCls = HTTPConnection


class HTTPSConnectionPool(urllib3.HTTPSConnectionPool):
    ConnectionCls = HTTPSConnection


def check_address(address: str) -> None:
    """Raise UsageError for an address to which no request can be sent."""
    try:
        parts = urlsplit(address)
        _ = parts.port
        host = (parts.hostname or "").encode("idna")
    except ValueError as error:
        raise UsageError(
            f"{redacted_invalid(address)}: not a valid address ({error}). Check its host and port."
        ) from None
    if not host:
        raise UsageError(
            f"{redacted_invalid(address)}: not a valid address, it has no host. "
            f"Write for example http://host/shards"
        )


def get(address: str, headers: Mapping[str, str] | None = None) -> urllib3.BaseHTTPResponse:
    """Return the response to a GET request; its body is not read yet.

    Redirects are followed. Secret headers are not sent to another host.
    Raises urllib3's HTTPError, HTTPException or OSError for an error that a retry may fix,
    StorageError for an address that is not valid.
    """
    hide_in_logs(address)
    headers = {**request_headers(address), **(headers or {})}
    secret = [name for name in headers if name not in _PUBLIC_HEADERS]
    retries = urllib3.Retry(
        _REDIRECTS,
        connect=0,
        read=0,
        redirect=_REDIRECTS,
        status=0,
        other=0,
        raise_on_redirect=False,
        remove_headers_on_redirect=[*urllib3.Retry.DEFAULT_REMOVE_HEADERS_ON_REDIRECT, *secret],
    )
    silence = silence_limit()
    try:
        response = _pool_manager(address).request(
            "GET",
            without_user(address),
            headers=headers,
            preload_content=False,
            retries=retries,
            timeout=urllib3.Timeout(connect=min(_CONNECT_TIMEOUT, silence), read=silence),
        )
    except LocationParseError as error:
        raise StorageError(f"{redacted(address)}: not a valid address ({error}).") from None
    except Exception as error:
        _drop_tracebacks(error)
        raise error
    try:
        # A malformed line hides the headers behind it. urllib3 only logs that.
        assert_header_parsing(raw_response(response).headers)
    except Exception:
        response.close()
        raise
    return response


def raw_response(response: urllib3.BaseHTTPResponse) -> RawResponse:
    """Return http.client's response under a response of `get`, before its body is read."""
    return cast(HTTPConnection, response.connection).raw_response


def request_headers(address: str) -> dict[str, str]:
    """Return the headers from the environment, and a token or user and password as a header.

    Raises UsageError for a header that cannot be sent.
    """
    headers = {}
    for line in os.environ.get(_HEADERS, "").splitlines():
        name, colon, value = line.partition(":")
        if colon:
            headers[name.strip()] = value.strip()
    if not all(text.isascii() and text.isprintable() for pair in headers.items() for text in pair):
        raise UsageError(f"{_HEADERS}: headers must be printable ASCII. Correct it.")
    token = os.environ.get("HF_TOKEN", "").strip()
    if token and address.startswith(f"{hub_endpoint()}/"):
        if not (token.isascii() and token.isprintable()):
            raise UsageError("HF_TOKEN: must be printable ASCII. Correct it.")
        headers["Authorization"] = f"Bearer {token}"
    user = urlsplit(address).netloc.rpartition("@")[0]
    if user:
        headers["Authorization"] = "Basic " + base64.b64encode(unquote(user).encode()).decode()
    return headers


def hub_endpoint() -> str:
    """Return the address of the Hugging Face Hub."""
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def _drop_tracebacks(error: BaseException) -> None:
    """Drop the tracebacks of an error and of the errors behind it.

    A frame of urllib3 refers to its error. The traceback refers to that frame, and so to all
    callers and the buffers that they fill. They would live until the next garbage collection.
    """
    errors: list[Any] = [error]
    seen = set[int]()  # errors may refer to each other
    while errors:
        behind = errors.pop()
        if isinstance(behind, BaseException) and id(behind) not in seen:
            seen.add(id(behind))
            behind.__traceback__ = None
            # urllib3's ProtocolError has the error of the socket among its arguments only.
            errors += [behind.__cause__, behind.__context__, *behind.args]


def _pool_manager(address: str) -> urllib3.PoolManager:
    """Return the connections of this process, through a proxy if the environment names one."""
    parts = urlsplit(address)
    proxy_variable = f"{parts.scheme}_proxy"
    environment = tuple(
        os.environ.get(name)
        for name in (
            proxy_variable,
            proxy_variable.upper(),
            "no_proxy",
            "NO_PROXY",
            "REQUEST_METHOD",
        )
    )
    return _new_pool_manager(
        os.getpid(),  # a forked child must not use its parent's connections
        _proxy(parts.scheme, parts.hostname or "", environment),
        tuple(map(os.environ.get, _CERTIFICATE_VARIABLES)),
    )


@lru_cache(maxsize=4)
def _new_pool_manager(
    process: int, proxy: str, certificates: tuple[str | None, ...]
) -> urllib3.PoolManager:
    options: Any = {"num_pools": 16, "maxsize": 128}
    manager = urllib3.ProxyManager(proxy, **options) if proxy else urllib3.PoolManager(**options)
    manager.pool_classes_by_scheme = {"http": HTTPConnectionPool, "https": HTTPSConnectionPool}
    return manager


@lru_cache(maxsize=64)
def _proxy(scheme: str, host: str, environment: tuple[str | None, ...]) -> str:
    """Return the proxy of a host; "" for none.

    environment: values of the variables that decide it, as the key of the cache. Without a cache,
    `getproxies` would scan the whole environment for each request.
    """
    return "" if proxy_bypass(host) else getproxies().get(scheme, "")
