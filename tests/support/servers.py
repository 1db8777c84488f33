"""A real HTTP server on the loopback that serves a folder and, when it is told to, misbehaves like real ones."""

from __future__ import annotations

import hashlib
import http.server
import re
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

Fault = Callable[["Handler", Path, int, int], bool]


@dataclass
class Served:
    """A running server. faults are asked before each answer, in turn; one that returns True has answered.

    says: the header that names the version of a file: "strong" or "weak" ETag, "modified" (Last-Modified), or "nothing".
    """

    root: Path
    url: str = ""
    ranges: bool = True
    says: str = "strong"
    delay: float = 0.0  # seconds before each answer
    pages: bool = False  # answer what is not there with a page and status 200
    faults: list[Fault] = field(default_factory=list)
    requests: list[tuple[str, str | None]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def next_fault(self) -> Fault | None:
        with self.lock:
            return self.faults.pop(0) if self.faults else None


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    served: Served

    def do_GET(self) -> None:
        served = self.served
        with served.lock:
            served.requests.append((self.path, self.headers.get("Range")))
            served.headers.append(dict(self.headers.items()))
        if served.delay:
            time.sleep(served.delay)
        # a proxy is asked for the whole address
        path = served.root / re.sub(r"^http://[^/]*", "", self.path).split("?")[0].lstrip("/")
        if not path.is_file():
            body = b"<html>not found</html>"
            self.answer(200 if served.pages else 404, body, {"Content-Type": "text/html"})
            return
        size = path.stat().st_size
        tag = f'"{hashlib.sha1(f"{path.stat().st_mtime_ns}-{size}".encode()).hexdigest()[:12]}"'
        modified = self.date_time_string(int(path.stat().st_mtime))
        says = {
            "strong": {"ETag": tag},
            "weak": {"ETag": f"W/{tag}"},
            "modified": {"Last-Modified": modified},
            "nothing": {},
        }
        version = says[served.says]
        if self.headers.get("If-Match") not in (None, version.get("ETag")):
            self.answer(412, b"", version)
            return
        found = (
            re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
            if served.ranges
            else None
        )
        start, stop = (
            (int(found[1]), min(size, int(found[2] or size - 1) + 1)) if found else (0, size)
        )
        fault = served.next_fault() if path.suffix == ".tar" else None
        if fault is not None and fault(self, path, start, stop):
            return
        data = path.read_bytes()[start:stop]
        headers = {**version, "Content-Type": "application/octet-stream"}
        if found:
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        self.answer(206 if found else 200, data, headers)

    def answer(
        self, status: int, body: bytes, headers: dict[str, str], *, length: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        self.wfile.write(body)

    def begin(self, path: Path, start: int, stop: int) -> bytes:
        """The head of a range's answer; returns the bytes that should follow."""
        ranged = self.served.ranges and self.headers.get("Range") is not None
        self.send_response(206 if ranged else 200)
        if ranged:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{path.stat().st_size}")
        self.send_header("Content-Length", str(stop - start))
        self.end_headers()
        return path.read_bytes()[start:stop]

    def drop(self, *, reset: bool) -> None:
        """End the connection now, cleanly or with a reset."""
        self.wfile.flush()
        if reset:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        else:
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()
        self.close_connection = True
        self.wfile = open("/dev/null", "wb")  # noqa: SIM115  nothing more is sent

    def log_message(self, *_: object) -> None:
        """Quiet."""


def cut(after: int, *, reset: bool = False) -> Fault:
    """The connection ends after so many bytes of the body."""

    def fault(handler: Handler, path: Path, start: int, stop: int) -> bool:
        handler.wfile.write(handler.begin(path, start, stop)[:after])
        handler.drop(reset=reset)
        return True

    return fault


def cut_in_headers() -> Fault:
    """The connection is reset in the middle of the answer's head."""

    def fault(handler: Handler, path: Path, start: int, stop: int) -> bool:
        handler.wfile.write(b"HTTP/1.1 206 Partial Content\r\nContent-Ra")
        handler.drop(reset=True)
        return True

    return fault


def end_in_headers(after: int, *, tagged: bool = True) -> Fault:
    """The connection ends cleanly after so many bytes of the answer's head."""

    def fault(handler: Handler, path: Path, start: int, stop: int) -> bool:
        lines = [
            "HTTP/1.1 206 Partial Content",
            f"Content-Length: {stop - start}",
            f"Content-Range: bytes {start}-{stop - 1}/{path.stat().st_size}",
            *([f'ETag: "{path.stat().st_size}"'] if tagged else []),
        ]
        handler.wfile.write("\r\n".join(lines).encode()[:after])
        handler.drop(reset=False)
        return True

    return fault


def lead_to(address: str) -> Fault:
    """The object is said to be elsewhere."""

    def fault(handler: Handler, path: Path, start: int, stop: int) -> bool:
        handler.answer(302, b"there", {"Location": f"{address}/{path.name}?sig=hush-elsewhere"})
        return True

    return fault


def status(code: int, **headers: str) -> Fault:
    """An answer with this status."""

    def fault(handler: Handler, path: Path, start: int, stop: int) -> bool:
        handler.answer(
            code, b"busy", {name.replace("_", "-"): value for name, value in headers.items()}
        )
        return True

    return fault


def stall(after: int, released: threading.Event) -> Fault:
    """No byte comes after so many, until the test is over."""

    def fault(handler: Handler, path: Path, start: int, stop: int) -> bool:
        handler.wfile.write(handler.begin(path, start, stop)[:after])
        handler.wfile.flush()
        released.wait(60)
        handler.drop(reset=False)
        return True

    return fault


def change(text: bytes) -> Fault:
    """The object is replaced by another before this answer is made."""

    def fault(handler: Handler, path: Path, start: int, stop: int) -> bool:
        other = path.with_suffix(".new")
        other.write_bytes(text)
        other.replace(path)
        handler.answer(412 if handler.headers.get("If-Match") else 200, text, {"ETag": '"other"'})
        return True

    return fault


def in_chunks(size: int) -> Fault:
    """The body comes in chunks, without a length."""

    def fault(handler: Handler, path: Path, start: int, stop: int) -> bool:
        data = path.read_bytes()[start:stop]
        ranged = handler.served.ranges and handler.headers.get("Range") is not None
        handler.send_response(206 if ranged else 200)
        if ranged:
            handler.send_header("Content-Range", f"bytes {start}-{stop - 1}/{path.stat().st_size}")
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        for at in range(0, len(data), size):
            piece = data[at : at + size]
            handler.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
        handler.wfile.write(b"0\r\n\r\n")
        return True

    return fault


def fine() -> Fault:
    """No fault: lets one answer pass."""
    return lambda handler, path, start, stop: False


@contextmanager
def serving(
    root: Path, *, tls: ssl.SSLContext | None = None, port: int = 0, **options: object
) -> Iterator[Served]:
    served = Served(root, **options)  # type: ignore[arg-type]
    handler = type("OneHandler", (Handler,), {"served": served})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), handler)
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # whoever reads us may leave
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
    )
    thread.start()
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    served.url = f"{'https' if tls else 'http'}://127.0.0.1:{server.server_address[1]}"
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def small_and_quick(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    """Set ranges and blocks that are smaller than the shards of tests, little reading ahead, and short pauses."""
    monkeypatch.setenv("WDSTRAIN_RANGE_SIZE", str(block))
    monkeypatch.setenv("WDSTRAIN_READ_AHEAD", "256KiB")
    monkeypatch.setenv("WDSTRAIN_RETRY_PAUSE", "0.001")
