"""Our reading from servers for programs that take a file object, webdataset first of all.

    wds.gopen_schemes.update(dict.fromkeys(("http", "https", "s3"), wt.gopen))

After this line every pipeline of webdataset in the process reads through `http`: a connection that drops goes on at the byte
where it broke, and a shard that ends too early is an error. webdataset's own way is a pipe to curl, which takes what came for
the whole shard.
"""

from __future__ import annotations

import io
from typing import Any

from wdstrain.errors import UsageError
from wdstrain.storage.remote import RemoteFile, is_remote, open_remote, redacted

_BUFFER = 1 << 20  # bytes asked for at a time: tars are read in pieces of 512


class Body(io.RawIOBase):
    """An object on a server as a stream of its bytes, whole or an error."""

    def __init__(self, file: RemoteFile) -> None:
        self._file, self._at = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, offset + (0, self._at, self._file.size)[whence])
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self._file.size - self._at))
        self._file.read_into([memoryview(buffer)[:count]], self._at, last=self._file.size)
        self._at += count
        return count

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


def gopen(url: str, mode: str = "rb", bufsize: int = _BUFFER, **_: Any) -> io.BufferedReader:
    """An address http(s)://, s3://, gs:// or az:// as a file object to read from; the signature is webdataset's.

    Raises UsageError for other addresses and modes, and what reading a shard from a server raises, while it is read.
    """
    if mode != "rb":
        raise UsageError(
            f'{redacted(url)}: mode={mode!r}, and this opens for reading. Use mode="rb".'
        )
    if not is_remote(url):
        raise UsageError(f"{url} is no address of a server. Use open() for a file on this machine.")
    return io.BufferedReader(Body(open_remote(url)), max(bufsize, _BUFFER))
