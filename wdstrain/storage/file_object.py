"""File objects over remote files, for webdataset and other programs.

    wds.gopen_schemes.update(dict.fromkeys(("http", "https", "s3"), wt.gopen))

After this line all webdataset pipelines of the process read through this package. A dropped
connection continues at the byte where it broke, and a shard that ends early is an error. webdataset
itself reads from a pipe to curl, which takes a partial response for the whole shard.
"""

from __future__ import annotations

import io
from typing import Any

from wdstrain.errors import UsageError
from wdstrain.storage.cache import CachedFile
from wdstrain.storage.remote import RemoteFile, is_remote, redacted

_BUFFER = 1 << 20  # bytes per read; tar readers ask for 512 at a time


class RemoteStream(io.RawIOBase):
    """A remote file, or its copy in the cache, as a raw binary stream."""

    def __init__(self, file: RemoteFile | CachedFile) -> None:
        self._file, self._position = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = max(0, offset + (0, self._position, self._file.size)[whence])
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        size = self._file.size
        count = max(0, min(len(buffer), size - self._position))
        if count:  # object stores refuse an empty range
            self._file.read_into(memoryview(buffer)[:count], self._position, last=size)
        self._position += count
        return count

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


def gopen(url: str, mode: str = "rb", bufsize: int = _BUFFER, **_: Any) -> io.BufferedReader:
    """Return a file object for an address http(s)://, s3://, gs:// or az://.

    The signature is webdataset's. Raises UsageError for other addresses and modes. Reading raises
    ShardError or StorageError.
    """
    if mode != "rb":
        raise UsageError(f'{redacted(url)}: mode={mode!r} is not supported. Use mode="rb".')
    if not is_remote(url):
        raise UsageError(f"{url}: not an address of a server. Use open() for a local file.")
    return io.BufferedReader(RemoteStream(RemoteFile(url)), max(bufsize, _BUFFER))
