"""A real local HTTP server of a folder, with faults on request."""

from __future__ import annotations

import gzip
import hashlib
import http.server
import itertools
import re
import socket
import ssl
import struct
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

EXPIRED = b"<Error><Code>AccessDenied</Code><Message>Request has expired</Message></Error>"

Fault = Callable[["Handler", Path, int, int], bool]
ALWAYS = 10_000  # requests of a test, at most


@dataclass
class Served:
    """A running server. A fault that returns True has responded in its place.

    says: header that identifies the version of a file: "strong" or "weak" ETag, "modified"
    (Last-Modified), or "nothing". faulty: endings of the paths that have faults. sent: path and
    body size of each response. most: largest number of requests at the same time.
    """

    root: Path
    url: str = ""
    ranges: bool = True
    says: str = "strong"
    delay: float = 0.0  # seconds before each response
    pages: bool = False  # respond to missing paths with a page and status 200
    faults: list[Fault] = field(default_factory=list)
    faulty: tuple[str, ...] = (".tar",)
    requests: list[tuple[str, str | None]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    sent: list[tuple[str, int]] = field(default_factory=list)
    running: int = 0
    most: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def next_fault(self) -> Fault | None:
        with self.lock:
            return self.faults.pop(0) if self.faults else None


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    served: Served

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        served = self.served
        with served.lock:
            served.requests.append((self.path, self.headers.get("Range")))
            served.headers.append(dict(self.headers.items()))
            served.running += 1
            served.most = max(served.most, served.running)
        if served.delay:
            time.sleep(served.delay)
        with served.lock:
            served.running -= 1
        # A proxy gets the complete address.
        path = served.root / re.sub(r"^http://[^/]*", "", self.path).split("?")[0].lstrip("/")
        if not path.is_file():
            body = b"<html>not found</html>"
            return self.answer(200 if served.pages else 404, body, {"Content-Type": "text/html"})
        size, time_ns = path.stat().st_size, path.stat().st_mtime_ns
        tag = f'"{hashlib.sha1(f"{time_ns}-{size}".encode()).hexdigest()[:12]}"'
        version = {
            "strong": {"ETag": tag},
            "weak": {"ETag": f"W/{tag}"},
            "modified": {"Last-Modified": self.date_time_string(time_ns // 10**9)},
            "nothing": {},
        }[served.says]
        wanted = self.headers.get("If-Match")
        if wanted is not None and (wanted != version.get("ETag") or wanted.startswith("W/")):
            return self.answer(412, b"", version)
        if self.headers.get("If-None-Match", "") == version.get("ETag"):
            return self.answer(304, b"", version)
        start, stop = 0, size
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if asked and served.ranges:
            start, stop = int(asked[1]), min(size, int(asked[2] or size - 1) + 1)
        fault = served.next_fault() if path.suffix in served.faulty else None
        if fault is None or not fault(self, path, start, stop):
            self.answer_range(path, start, stop, version)

    @property
    def is_ranged(self) -> bool:
        return self.served.ranges and self.headers.get("Range") is not None

    def answer_range(self, path: Path, start: int, stop: int, version: dict[str, str]) -> None:
        """Send bytes [start, stop) of a file as the request asks for them."""
        headers = {**version, "Content-Type": "application/octet-stream"}
        if self.is_ranged:
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{path.stat().st_size}"
        self.answer(206 if self.is_ranged else 200, path.read_bytes()[start:stop], headers)

    def answer(
        self, status: int, body: bytes, headers: dict[str, str], *, length: int | None = None
    ) -> None:
        size = str(len(body) if length is None else length)
        self.send_head(status, {**headers, "Content-Length": size})
        body = b"" if self.command == "HEAD" else body
        with self.served.lock:
            self.served.sent.append((self.path, len(body)))
        self.wfile.write(body)

    def send_head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def begin(self, path: Path, start: int, stop: int, *, chunked: bool = False) -> bytes:
        """Send the header of a range response; return the bytes that should follow."""
        size = (
            {"Transfer-Encoding": "chunked"} if chunked else {"Content-Length": str(stop - start)}
        )
        place = {"Content-Range": f"bytes {start}-{stop - 1}/{path.stat().st_size}"}
        self.send_head(206 if self.is_ranged else 200, size | (place if self.is_ranged else {}))
        return path.read_bytes()[start:stop]

    def drop(self, *, reset: bool) -> None:
        """Close the connection, cleanly or with a reset."""
        self.wfile.flush()
        if reset:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        else:
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()
        self.close_connection = True
        self.wfile = open("/dev/null", "wb")  # noqa: SIM115  nothing more is sent

    def log_message(self, *_: object) -> None:
        """Log no request."""


def responds(send: Callable[..., object]) -> Fault:
    """Return the fault of a function that responds to a request."""

    def fault(handler: Handler, path: Path, start: int, stop: int) -> bool:
        send(handler, path, start, stop)
        return True

    return fault


def cut(after: int, *, reset: bool = False) -> Fault:
    """Close the connection after this many bytes of the body."""

    def send(handler: Handler, path: Path, start: int, stop: int) -> None:
        handler.wfile.write(handler.begin(path, start, stop)[:after])
        handler.drop(reset=reset)

    return responds(send)


def cut_in_headers() -> Fault:
    """Reset the connection in the middle of the response header."""
    return end_in_headers(44, reset=True)


def end_in_headers(after: int, *, tagged: bool = True, reset: bool = False) -> Fault:
    """Close the connection after this many bytes of the response header."""

    def send(handler: Handler, path: Path, start: int, stop: int) -> None:
        size = path.stat().st_size
        head = f"HTTP/1.1 206 Partial Content\r\nContent-Length: {stop - start}\r\n"
        head += f"Content-Range: bytes {start}-{stop - 1}/{size}"
        head += f'\r\nETag: "{size}"' if tagged else ""
        handler.wfile.write(head.encode()[:after])
        handler.drop(reset=reset)

    return responds(send)


def lead_to(address: str) -> Fault:
    """Redirect to another address."""

    def send(handler: Handler, path: Path, *_: int) -> None:
        handler.answer(302, b"there", {"Location": f"{address}/{path.name}?sig=hush-elsewhere"})

    return responds(send)


def status(code: int, body: bytes = b"busy", **headers: str) -> Fault:
    """Respond with this status."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return responds(lambda handler, *_: handler.answer(code, body, named))


def until(moment: float, fault: Fault) -> Fault:
    """Respond with a fault until a moment of the monotonic clock."""
    return lambda *response: time.monotonic() < moment and fault(*response)


def stall(after: int, released: threading.Event) -> Fault:
    """Stop sending after this many bytes, until the test ends."""

    def send(handler: Handler, path: Path, start: int, stop: int) -> None:
        handler.wfile.write(handler.begin(path, start, stop)[:after])
        handler.wfile.flush()
        released.wait(60)
        handler.drop(reset=False)

    return responds(send)


def change(text: bytes) -> Fault:
    """Replace the object before this response."""

    def send(handler: Handler, path: Path, *_: int) -> None:
        other = path.with_suffix(".new")
        other.write_bytes(text)
        other.replace(path)
        handler.answer(412 if handler.headers.get("If-Match") else 200, text, {"ETag": '"other"'})

    return responds(send)


def requiring_no_version(handler: Handler, path: Path, start: int, stop: int) -> bool:
    """Fault: refuse If-Match, also with the server's own ETag, as some proxies do."""
    is_refused = bool(handler.headers.get("If-Match"))
    return is_refused and status(412, b"")(handler, path, start, stop)


@dataclass
class Signer:
    """Fault: refuse signatures that have expired, as S3 does. Each is good for some requests.

    uses: number of them. expired: signatures that were refused. calls: addresses that were renewed.
    """

    uses: int
    expired: set[str] = field(default_factory=set)
    calls: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def renew(self, address: str) -> str:
        """Return an address with a new signature."""
        with self.lock:
            self.calls.append(address)
            return f"{address.partition('?')[0]}?sig=hush-{len(self.calls)}"

    def __call__(self, handler: Handler, path: Path, start: int, stop: int) -> bool:
        signature = handler.path.partition("?sig=")[2]
        with self.lock:
            self.counts[signature] += 1
            is_good = signature and self.counts[signature] <= self.uses
            self.expired |= set() if is_good else {signature}
        return not is_good and status(403, EXPIRED)(handler, path, start, stop)


def pooled(*, strict: bool) -> Fault:
    """Respond as a pool of servers that give the same bytes different ETags, in turn for each file.

    strict: a server of the pool refuses the ETags of the others.
    """
    turns: dict[Path, Iterator[int]] = defaultdict(itertools.count)

    def send(handler: Handler, path: Path, start: int, stop: int) -> None:
        tag = f'"server-{next(turns[path]) % 2}"'
        if strict and handler.headers.get("If-Match") not in (None, tag):
            handler.answer(412, b"", {"ETag": tag})
        else:
            handler.answer_range(path, start, stop, {"ETag": tag})

    return responds(send)


def compressing(handler: Handler, path: Path, start: int, stop: int) -> bool:
    """Fault: send whole objects compressed, whatever the request accepts, but ranges as they are."""
    if handler.is_ranged:
        return False
    version = {"ETag": f'"{path.stat().st_size}"', "Content-Encoding": "gzip"}
    handler.answer(200, gzip.compress(path.read_bytes(), 1), version)
    return True


def in_chunks(size: int) -> Fault:
    """Send the body in chunks, without a length."""

    def send(handler: Handler, path: Path, start: int, stop: int) -> None:
        data = handler.begin(path, start, stop, chunked=True)
        for at in range(0, len(data), size):
            chunk = data[at : at + size]
            handler.wfile.write(f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n")
        handler.wfile.write(b"0\r\n\r\n")

    return responds(send)


def fine() -> Fault:
    """No fault: a normal response."""
    return lambda handler, path, start, stop: False


@contextmanager
def serving(
    root: Path,
    *,
    tls: ssl.SSLContext | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    kind: type[Served] = Served,
    handled_by: type[Handler] = Handler,
    **options: object,
) -> Iterator[Served]:
    served = kind(root, **options)
    handler = type("OneHandler", (handled_by,), {"served": served})
    server = http.server.ThreadingHTTPServer((host, port), handler)
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # clients may close
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    served.url = f"{'https' if tls else 'http'}://{host}:{server.server_address[1]}"
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def small_and_quick(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    """Make ranges and blocks smaller than test shards, readahead small, and pauses short."""
    monkeypatch.setenv("WDSTRAIN_RANGE_SIZE", str(block))
    monkeypatch.setenv("WDSTRAIN_READ_AHEAD", "256KiB")
    monkeypatch.setenv("WDSTRAIN_RETRY_PAUSE", "0.001")
