"""The body of an answer, from the socket to where it is wanted without a stop in between.

urllib3 finds, asks and checks; then a body of a known length over plain TCP is nothing but the next bytes of a socket. They are
received by the system into the places they are for, megabytes at a call and outside the interpreter's lock. urllib3's own
reading makes bytes of each 200 KB that came and copies them: 0.65 to 0.75 of the speed on a loopback, and twice the time of
the processor. Over TLS, in chunks, or where the insides of http.client are not those we know, its way is taken.
"""

from __future__ import annotations

import socket
import struct
from http.client import HTTPResponse

import urllib3

from wdstrain.memory.scatter import ScatterList

_READ = 256 << 10  # bytes taken from urllib3 at a time, at most


class Body:
    """The body of a response that was not read yet. stall: seconds without a byte that are too many."""

    def __init__(self, response: urllib3.BaseHTTPResponse, stall: float) -> None:
        self._response, self._stall = response, stall
        self._answer, self._socket = _plain(response)
        self._drained = False  # http.client's buffer

    def read_into(self, pieces: ScatterList) -> int:
        """Fill what comes, one byte at least; 0 at the end of the body. Raises as urllib3 and sockets do."""
        if self._socket is None or self._answer is None:
            found = self._response.read1(min(pieces.left, _READ))
            pieces.write(found)
            return len(found)
        answer = self._answer
        length = answer.length or 0
        wanted = min(pieces.left, length)
        if not wanted:
            return 0
        if self._drained:
            count = self._receive(pieces, wanted)
        else:
            there = answer.fp.peek()  # what came with the headers
            count = min(len(there), wanted)
            pieces.write(answer.fp.read(count))
            self._drained = count == len(there)
            if self._drained:
                self._wait_in_the_system()
        answer.length = length - count
        if answer.length == 0:
            answer._close_conn()  # type: ignore[attr-defined]  # as it does itself after the last byte
            self._response.release_conn()  # for the next request
        return count

    def stop(self) -> None:
        """End a read that another thread is in.

        An SSLSocket's own way would forget that it is one, and give what comes next as it is on the wire.
        """
        found = getattr(
            getattr(getattr(getattr(self._response, "_fp", None), "fp", None), "raw", None),
            "_sock",
            None,
        )
        if isinstance(found, socket.socket):
            socket.socket.shutdown(found, socket.SHUT_RDWR)
        else:
            self._response.shutdown()

    def _receive(self, pieces: ScatterList, wanted: int) -> int:
        assert self._socket is not None
        try:
            return pieces.receive(self._socket, wanted)
        except BlockingIOError:
            raise TimeoutError(f"no byte came for {self._stall:g} s") from None

    def _wait_in_the_system(self) -> None:
        """A timeout of Python's own makes a socket return with whatever is there, some KB at a time. For the next request http.client
        sets one of its own again."""
        assert self._socket is not None
        self._socket.settimeout(None)
        self._socket.setsockopt(
            socket.SOL_SOCKET,
            socket.SO_RCVTIMEO,
            struct.pack("ll", int(self._stall), int(self._stall % 1 * 1e6)),
        )


def begins(response: urllib3.BaseHTTPResponse, patience: float | None = None) -> bool:
    """Whether a first byte of the body comes, where there should be one; also if none came within the patience, in seconds.

    http.client takes a connection that ends within the head of an answer for the end of the head.
    """
    stream = getattr(getattr(response, "_fp", None), "fp", None)
    if stream is None:
        return True
    connection = getattr(getattr(stream, "raw", None), "_sock", None)
    if patience is not None and isinstance(connection, socket.socket):
        connection.settimeout(patience)  # the answer is not read any further
    try:
        return bool(stream.peek(1))
    except TimeoutError:
        if patience is None:
            raise
        return True


def _plain(response: urllib3.BaseHTTPResponse) -> tuple[HTTPResponse | None, socket.socket | None]:
    """The socket whose next bytes are this body, and http.client's response over it; none where that is not so."""
    answer = getattr(response, "_fp", None)
    raw = getattr(getattr(answer, "fp", None), "raw", None)
    found = getattr(raw, "_sock", None)
    if (
        type(answer) is not HTTPResponse
        or type(found) is not socket.socket
        or not hasattr(answer, "_close_conn")
    ):
        return None, None
    if (
        answer.chunked
        or answer.length is None
        or response.headers.get("Content-Encoding", "identity") != "identity"
    ):
        return None, None
    return answer, found
