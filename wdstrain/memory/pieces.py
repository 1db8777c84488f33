"""Buffer lists: a run of bytes is written into several memoryviews, one after another.

`BufferList` is the form that `preadv` and `recvmsg_into` of the operating system take. It is the
generic path; `scatter.ScatterList` fills many buffers in one call of C.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable

_MAX_VIEWS = 1024  # buffers that one system call takes (IOV_MAX of Linux)


class BufferList:
    """Writable memoryviews that are filled in order. left: bytes that are not filled yet."""

    def __init__(self, views: Iterable[memoryview]) -> None:
        self._views = [view for view in views if len(view)]
        self._first = 0
        self.left = sum(map(len, self._views))

    def next_views(self) -> list[memoryview]:
        """Return the views that are filled next, as many as one system call takes."""
        return self._views[self._first : self._first + _MAX_VIEWS]

    def read(self, fd: int, offset: int) -> int:
        """Fill views from this offset of a file with one system call.

        Returns the number of bytes; 0 at the end of the file. Raises OSError.
        """
        count = os.preadv(fd, self.next_views(), offset)
        self.advance(count)
        return count

    def receive(self, connection: socket.socket, most: int) -> int:
        """Fill views with the next `most` bytes of a socket; `most` must be <= left.

        Returns the number of bytes: fewer if the socket times out, 0 at the end of the stream.
        Raises OSError.
        """
        views = self.next_views()
        if most < self.left:
            views = BufferList(views).split_off(min(most, sum(map(len, views))))
        count = connection.recvmsg_into(views, 0, socket.MSG_WAITALL)[0]
        self.advance(count)
        return count

    def advance(self, count: int) -> None:
        """Count the next `count` bytes as filled."""
        self.left -= count
        if not self.left:  # a read from a disk fills all views at once
            self._first = len(self._views)
            return
        while self._first < len(self._views) and count >= len(self._views[self._first]):
            count -= len(self._views[self._first])
            self._first += 1
        if count:
            self._views[self._first] = self._views[self._first][count:]

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Copy these bytes into the views that are filled next; len(data) must be <= left."""
        rest = memoryview(data)
        while rest:
            view = self._views[self._first]
            count = min(len(view), len(rest))
            view[:count] = rest[:count]
            self.advance(count)
            rest = rest[count:]

    def split_off(self, count: int) -> list[memoryview]:
        """Remove and return the views of the next `count` bytes, for another reader to fill."""
        views: list[memoryview] = []
        while count:
            view = self._views[self._first][:count]
            views.append(view)
            self.advance(len(view))
            count -= len(view)
        return views
