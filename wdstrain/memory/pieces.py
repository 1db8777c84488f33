"""Places in memory that a run of bytes is spread over, one after another, as the system's scattering calls take them."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable

_MOST = 1024  # pieces that one call takes (IOV_MAX of Linux)


class BufferList:
    """Places to be filled in order. left: bytes that are still to come."""

    def __init__(self, views: Iterable[memoryview]) -> None:
        self._views = [view for view in views if len(view)]
        self._first = 0
        self.left = sum(map(len, self._views))

    def next(self) -> list[memoryview]:
        """The places that come next, as many as one call takes."""
        return self._views[self._first : self._first + _MOST]

    def read(self, fd: int, offset: int) -> int:
        """Fill what one call of the system fills, from this offset of a file on. How many bytes: 0 at its end. Raises OSError."""
        count = os.preadv(fd, self.next(), offset)
        self.filled(count)
        return count

    def receive(self, connection: socket.socket, most: int) -> int:
        """Fill `most` bytes, no more than are left, with those that come next. How many: fewer before a pause, 0 at the end.

        Raises OSError.
        """
        views = self.next()
        if most < self.left:
            views = BufferList(views).cut(min(most, sum(map(len, views))))
        count = connection.recvmsg_into(views, 0, socket.MSG_WAITALL)[0]
        self.filled(count)
        return count

    def filled(self, count: int) -> None:
        """So many bytes of them were filled."""
        self.left -= count
        if not self.left:  # as a disk does it
            self._first = len(self._views)
            return
        while self._first < len(self._views) and count >= len(self._views[self._first]):
            count -= len(self._views[self._first])
            self._first += 1
        if count:
            self._views[self._first] = self._views[self._first][count:]

    def take(self, data: bytes | bytearray | memoryview) -> None:
        """Fill them with these bytes, which are not more than are left."""
        rest = memoryview(data)
        while rest:
            view = self._views[self._first]
            count = min(len(view), len(rest))
            view[:count] = rest[:count]
            self.filled(count)
            rest = rest[count:]

    def cut(self, count: int) -> list[memoryview]:
        """The places of the next `count` bytes, for another to fill."""
        found: list[memoryview] = []
        while count:
            view = self._views[self._first][:count]
            found.append(view)
            self.filled(len(view))
            count -= len(view)
        return found
