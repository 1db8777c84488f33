"""Places for connections: so many at a time, the others wait; and what was served through them.

A client keeps its connection for the next request, so most places are held by clients that rest. When all are taken and
another client waits, the one that rests longest is hung up on (HTTP allows it at any time, and clients come back), and those at
work leave after their answer. Where none rests, it is the one that has dawdled longest: for DAWDLE seconds it has neither sent a
whole request nor taken LITTLE of its answer. So many more clients than places are served in turn, also where most of them only
hold their places; a plain limit would starve the rest.
"""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress

DAWDLE = 5.0  # seconds that a client may take for next to nothing while others wait for its place
LITTLE = 64 << 10  # bytes of an answer: whoever takes fewer in that time dawdles


class Places:
    """Who is connected. Every method may be called from any thread."""

    def __init__(self, limit: int) -> None:
        self.requests = self.bytes = 0  # requests that came whole, bytes of bodies that were sent
        self._limit = limit
        self._changed = threading.Condition()
        self._taken: set[socket.socket] = set()
        self._resting: dict[
            socket.socket, bool
        ] = {}  # await a request, longest first; True: had an answer before
        self._moved: dict[
            socket.socket, float
        ] = {}  # when they last did not dawdle, longest ago first
        self._crowded = self._closed = False

    def __len__(self) -> int:
        return len(self._taken)

    def take(self, connection: socket.socket) -> None:
        """A place for a new connection, as soon as there is one."""
        with self._changed:
            while len(self._taken) >= self._limit and not self._closed:
                self._crowded = True
                one, left = self._next_out()
                if one is not None:
                    self._hang_up(one)
                self._changed.wait(left)
            self._crowded = False
            self._taken.add(connection)
            self._moved[connection] = time.monotonic()

    def leave(self, connection: socket.socket) -> None:
        with self._changed:
            self._taken.discard(connection)
            self._resting.pop(connection, None)
            self._moved.pop(connection, None)
            self._changed.notify_all()

    def rest(self, connection: socket.socket, *, answered: bool) -> None:
        """It awaits a request. It is hung up on where its place is needed."""
        with self._changed:
            self._resting[connection] = answered
            self._moves(connection)
            if self._closed or (self._crowded and answered):
                self._hang_up(connection)

    def work(self, connection: socket.socket) -> None:
        """Its request is there."""
        with self._changed:
            self._resting.pop(connection, None)
            self._moves(connection)

    def may_stay(self) -> bool:
        """Whether a connection may be kept after the answer that is now made, which is counted."""
        with self._changed:
            self.requests += 1
            return not (self._crowded or self._closed)

    def sent(self, connection: socket.socket, count: int) -> None:
        """So many bytes more of its answer were taken."""
        with self._changed:
            self.bytes += count
            if count >= LITTLE:
                self._moves(connection)

    def close(self) -> None:
        """Nobody waits and nobody rests any more; who is at work goes after the answer."""
        with self._changed:
            self._closed = True
            for connection in list(self._resting):
                self._hang_up(connection)
            self._changed.notify_all()

    def empty(self, seconds: float) -> None:
        """Return when all have left, or hang up on those who are at work after so many seconds."""
        with self._changed:
            self._changed.wait_for(lambda: not self._taken, seconds)
            for connection in self._taken:
                self._hang_up(connection)
            self._changed.wait_for(lambda: not self._taken, seconds)

    def _next_out(self) -> tuple[socket.socket | None, float]:
        """Whose place is needed, if it can be taken now, and after how many seconds to look again."""
        resting = next((one for one, answered in self._resting.items() if answered), None)
        if resting is not None:
            return resting, DAWDLE
        slowest, since = next(iter(self._moved.items()), (None, time.monotonic()))
        left = since + DAWDLE - time.monotonic()
        return (slowest, DAWDLE) if left <= 0 else (None, left)

    def _moves(self, connection: socket.socket) -> None:
        if self._moved.pop(connection, None) is not None:  # it was not hung up on
            self._moved[connection] = time.monotonic()

    def _hang_up(self, connection: socket.socket) -> None:
        self._resting.pop(connection, None)
        self._moved.pop(connection, None)
        with suppress(OSError):  # its client was faster
            connection.shutdown(socket.SHUT_RDWR)
