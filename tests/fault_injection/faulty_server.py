"""HTTP server of `stress.py`: serves a folder by ranges, with random faults that readers must
survive.

A seed decides which response gets which fault. Faults that no reader can detect are left out: a
damaged or shortened index, and damage to the second read of a sample. Responses below LARGE bytes
are never damaged, because a sample that is read again has a request of its own.
"""

from __future__ import annotations

import contextlib
import http.server
import mmap
import os
import random
import re
import socket
import struct
import threading
import time
from collections import Counter
from email.utils import formatdate
from multiprocessing.connection import Connection

from wdstrain.runtime import child_process

LARGE = 256 << 10  # bytes of an answer that may be damaged, at least
OFTEN, SELDOM = 0.16, 0.004  # share of the answers with one of the faults below
_HUNG = 24.0  # seconds without a byte: longer than our readers wait

FAULTS = (
    "cut off in the body",
    "reset in the body",
    "cut off in the head",
    "reset in the head",
    "no answer",
    "nonsense for a head",
    "late",
    "stalls for a while",
    "trickles",
    "in chunks",
    "busy: 503, 429, 500",
    "length too long",
    "length too short",
    "a byte damaged",
)
RARE = ("range ignored", "hangs")  # what slows a reader down for long
_OF_SHARDS = {"length too short", "a byte damaged", "range ignored"}  # what is not done to an index


class _Gone(Exception):
    """Raised when the server closes the connection on purpose."""


class _Counts(Counter[str]):
    """Counters of requests and faults."""

    lock = threading.Lock()

    def count(self, description: str, number: int = 1) -> None:
        with self.lock:
            self[description] += number


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    root: str
    rng: random.Random
    counts: _Counts

    def do_GET(self) -> None:
        if self.path == "/.counts":  # asked by whoever runs the load
            self._send(200, {}, repr(dict(self.counts)).encode())
            return
        path = os.path.join(self.root, self.path.lstrip("/"))
        if not re.fullmatch(r"/[\w.-]+", self.path) or not os.path.isfile(path):
            self._send(404, {}, b"not here")
            return
        self.counts.count("requests")
        with (
            contextlib.suppress(_Gone),
            open(path, "rb") as file,
        ):  # mapped: what each thread reads, malloc keeps for it
            self._give(
                memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)),
                path.endswith(".tar"),
            )

    def _give(self, data: memoryview, shard: bool) -> None:
        fault, size = self._fault(shard), len(data)
        byte_range = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if fault == "range ignored":
            byte_range = None
        start, stop = (
            (int(byte_range[1]), min(size, int(byte_range[2] or size) + 1))
            if byte_range
            else (0, size)
        )
        data, headers = data[start:stop], {"ETag": f'"{size}"'}
        if byte_range:
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        if fault == "a byte damaged" and len(data) < LARGE:
            fault = ""
        if fault:
            self.counts.count(fault)
        self._spoil(fault, 206 if byte_range else 200, headers, data)

    def _fault(self, shard: bool) -> str:
        with self.counts.lock:
            draw = self.rng.random()
            fault = (
                self.rng.choice(RARE)
                if draw < SELDOM
                else self.rng.choice(FAULTS)
                if draw < SELDOM + OFTEN
                else ""
            )
        return fault if shard or fault not in _OF_SHARDS else ""

    def _spoil(self, fault: str, status: int, headers: dict[str, str], data: memoryview) -> None:
        at = random.randrange(len(data))
        if fault == "busy: 503, 429, 500":
            after = random.choice(["0", "1", formatdate(time.time() + 1, usegmt=True)])
            self._send(random.choice([503, 429, 500]), {"Retry-After": after}, b"busy")
        elif fault in ("no answer", "nonsense for a head"):
            self.wfile.write(random.randbytes(100) if fault == "nonsense for a head" else b"")
            self._end(reset=False)
        elif fault.endswith("in the head"):
            head = self._head(status, headers, len(data))
            self.wfile.write(head[: random.randrange(1, len(head))])
            self._end(reset=fault.startswith("reset"))
        elif fault == "in chunks":
            self.wfile.write(self._head(status, headers | {"Transfer-Encoding": "chunked"}, None))
            step = random.randrange(1000, 100_000)
            for begin in range(0, len(data), step):
                piece = data[begin : begin + step]
                self._body(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            self._body(b"0\r\n\r\n")
        elif fault in ("length too long", "length too short"):
            self.wfile.write(
                self._head(status, headers, len(data) + (1 + at if fault.endswith("long") else -at))
            )
            self._body(data)
            self._end(reset=False)
        else:
            if fault == "late":
                time.sleep(random.uniform(0.05, 1.0))
            self.wfile.write(self._head(status, headers, len(data)))
            if fault in ("", "late", "range ignored"):
                self._body(data)
                return
            self._body(data[:at])
            if fault == "a byte damaged":
                self._body(bytes([data[at] ^ 1 << random.randrange(8)]))
                self._body(data[at + 1 :])
                return
            if fault.endswith("in the body"):
                self._end(reset=fault.startswith("reset"))
            if fault == "trickles":
                for begin in range(at, min(len(data), at + 100)):
                    self._body(data[begin : begin + 1])
                    time.sleep(0.005)
                at = min(len(data), at + 100)
            else:
                time.sleep(_HUNG if fault == "hangs" else random.uniform(0.1, 1.5))
            self._body(data[at:])

    def _send(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.wfile.write(self._head(status, headers, len(body)) + body)

    def _head(self, status: int, headers: dict[str, str], length: int | None) -> bytes:
        lines = [
            f"HTTP/1.1 {status} {self.responses[status][0]}",
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        lines += ["Content-Type: application/octet-stream"] + [f"Content-Length: {length}"] * (
            length is not None
        )
        return "\r\n".join([*lines, "", ""]).encode()

    def _body(self, data: bytes | memoryview) -> None:
        self.wfile.write(data)
        self.counts.count("bytes", len(data))

    def _end(self, *, reset: bool) -> None:
        if reset:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
        else:
            self.connection.shutdown(socket.SHUT_WR)
        self.close_connection = True
        raise _Gone

    def log_message(self, *_: object) -> None:
        """Log no request."""


class _Server(http.server.ThreadingHTTPServer):
    request_queue_size = 256

    def handle_error(self, *_: object) -> None:
        """Ignore errors of readers that close the connection or are killed."""


def serve(root: str, seed: int, seconds: float, pipe: Connection) -> None:
    """Serve a folder for a limited time and send the port through the pipe. Runs as a process."""
    child_process.set_up_worker()
    words = {"root": root, "rng": random.Random(seed), "counts": _Counts()}
    with _Server(("127.0.0.1", 0), type("Served", (Handler,), words)) as server:
        pipe.send(server.server_address[1])
        threading.Thread(target=server.serve_forever, daemon=True).start()
        time.sleep(seconds)
