"""Anonymous memory that is shared with worker processes, and checksums of its bytes.

It is a memfd without a name in /dev/shm. A crash therefore leaves nothing behind, and the 64 MB
limit of a container's /dev/shm does not apply. The system provides a page when it is first written,
so a generous size costs nothing. A worker process gets the memory by fork, or as a duplicated file
descriptor under spawn and forkserver.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from contextlib import suppress
from multiprocessing.reduction import DupFd
from typing import Any

import numpy as np
import numpy.typing as npt
from isal.isal_zlib import crc32

from wdstrain.errors import WdstrainError
from wdstrain.native import kernels

_POPULATE_READ = 22  # MADV_POPULATE_READ, missing in module mmap


class SharedFile:
    """Anonymous file that this process and its workers share. fd: its descriptor."""

    def __init__(self, handle: Any = None) -> None:
        """handle: of the file in another process; None: a new, empty file. Raises OSError."""
        self.fd = os.memfd_create("wdstrain") if handle is None else handle.detach()
        weakref.finalize(self, os.close, self.fd)

    def __reduce__(self) -> tuple[type[SharedFile], tuple[Any]]:
        return SharedFile, (DupFd(self.fd),)


class Memory:
    """Zeroed bytes that this process and its workers share.

    size: in bytes. map, view: the bytes, writable; they stay mapped while either is referenced.
    address: address of the first byte in this process.
    """

    def __init__(self, size: int, file: SharedFile | None = None) -> None:
        """file: with the bytes of another process. Raises WdstrainError if the system does not
        provide `size` bytes."""
        try:
            self.size, self._file = size, file or SharedFile()
            os.truncate(self._file.fd, size)
            self.map = mmap.mmap(self._file.fd, size)
        except (OSError, OverflowError, ValueError) as error:
            raise WdstrainError(
                f"{size} bytes of memory cannot be reserved ({error}).",
                "Lower {shuffle_buffer} or {batch_size}.",
                {"shuffle_buffer": ..., "batch_size": ...},
            ) from None
        self.view = memoryview(self.map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self._populated: set[int] = set()  # offsets that `populate` was called with

    def populate(self, start: int, size: int) -> None:
        """Map all pages of these bytes, once. Call it before the first write."""
        if size and start not in self._populated:
            self._populated.add(start)
            populate(self.map, start, size)

    def __reduce__(self) -> tuple[type[Memory], tuple[int, SharedFile]]:
        return Memory, (self.size, self._file)


def populate(data: mmap.mmap, start: int, size: int) -> None:
    """Map all pages of these bytes in one system call.

    One page fault for each page takes four times as long.
    """
    with suppress(OSError):  # Linux before 5.14: the first access maps a page
        data.madvise(_POPULATE_READ, start, size)


def checksums(
    memory: Memory, start: npt.NDArray[np.int64], size: npt.NDArray[np.int64]
) -> npt.NDArray[np.uint32]:
    """Return the crc32 of runs of bytes of a memory. uint32[n]

    start, size: offset and length of each run in bytes, int64[n] each. The GIL is released.
    Raises ValueError if a run reaches beyond the memory: C reads the addresses that it gets.
    """
    # `memory.size - size` cannot overflow once size >= 0 holds; `start + size` could
    if len(start) and (start.min() < 0 or size.min() < 0 or (start > memory.size - size).any()):
        raise ValueError("a run of bytes is beyond its memory: start + size must be <= its size")
    if kernels.library is None:
        return np.array(
            [
                crc32(memory.view[begin : begin + length])
                for begin, length in zip(start.tolist(), size.tolist(), strict=True)
            ],
            np.uint32,
        )
    crcs = np.zeros(len(start), np.uint32)
    address, length = start + memory.address, np.ascontiguousarray(size)
    kernels.library.checksum_runs(
        kernels.checksum, len(crcs), address.ctypes.data, length.ctypes.data, crcs.ctypes.data
    )
    return crcs


def private_memory(size: int) -> memoryview:
    """Return zeroed bytes of this process, for buffers of some megabytes.

    They go back to the system with the last reference. malloc would keep as much for every thread
    that once freed such a buffer.
    """
    return memoryview(mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
