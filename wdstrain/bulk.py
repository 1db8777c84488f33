"""Many runs of memory at once: filled from a file, and compared by checksum.

A batch has a run for each sample or more, and piece by piece each costs a view, a call, and Python's own lock, given away and waited
for once more; with several threads that is half of what reading arrays takes. Here one call in C is for all of them (`bulk.c`), given
as integers, and it holds no lock; what it reads it compares while the processor has it at hand. Where there was no compiler when the
package was installed, the same is done piece by piece, and `COMPILED` is False. The checksum itself is isal's in both.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt
from isal import isal_zlib

from wdstrain.checksum import crc32
from wdstrain.memory import Memory
from wdstrain.pieces import Pieces

Ints = npt.NDArray[np.int64]
Kinds = npt.NDArray[np.uint8]
Crcs = npt.NDArray[np.uint32]

UNCHECKED, ALONE, JOINED = range(3)

SOURCE, LIBRARY = (os.path.join(os.path.dirname(__file__), name) for name in ("bulk.c", "libbulk.so"))
_LONG = 16 << 20  # bytes whose comparison is worth giving away the lock of Python: some milliseconds
_BEYOND = "a run of bytes is beyond the end of the memory it is in"
_KNOWN = b"123456789", 0xCBF43926  # of which any crc32 is checked


class Places:
    """Runs of bytes in some memories, to be filled one after another. left: bytes that are still to come."""

    def __init__(self, memories: Sequence[Memory], of: Ints, start: Ints, size: Ints, checked: Kinds | None = None) -> None:
        """of: which of the memories; start, size: in it, int64[n] each. Raises ValueError beyond its end.

        checked: uint8[n], of which a checksum is wanted: ALONE, JOINED to the run before it, or UNCHECKED, as all are if it is None.
        """
        self._memories, self._of, self._start, self._size = memories, of, start, size
        _check(start, size, np.array([one.size for one in memories])[of])
        self._address = np.array([one.address for one in memories])[of] + start
        self._checked, self._crc = checked, np.zeros(len(start) if checked is not None else 0, np.uint32)
        self._begin()

    def _begin(self) -> None:
        self.left = self._all = int(self._size.sum())
        self._pieces: Pieces | None = None

    def part(self, start: int, stop: int) -> Places:
        """The runs [start, stop), to be filled apart from the others."""
        part = Places.__new__(Places)
        part._memories, rows = self._memories, slice(start, stop)
        part._of, part._start, part._size, part._address = (a[rows] for a in (self._of, self._start, self._size, self._address))
        part._checked, part._crc = None if self._checked is None else self._checked[rows], self._crc[rows]
        part._begin()
        return part

    def __iter__(self) -> Iterator[memoryview]:
        """The runs, for who fills them one by one."""
        views, ends = [one.view for one in self._memories], (self._start + self._size).tolist()
        for which, start, end in zip(self._of.tolist(), self._start.tolist(), ends, strict=True):
            yield views[which][start:end]

    def read(self, fd: int, offset: int) -> int:
        """Fill what is left from this offset of a file on, or a part of it. How many bytes: 0 at its end. Raises OSError."""
        if _library is None:
            self._pieces = self._pieces or Pieces(self)
            count = self._pieces.read(fd, offset)
        else:
            checks = (None, None, None) if self._checked is None else (_crc32, self._checked.ctypes.data, self._crc.ctypes.data)
            runs = self._address.ctypes.data, self._size.ctypes.data
            count = int(_library.fill(fd, offset, self._all - self.left, len(self._size), *runs, *checks))
            if count < 0:
                raise OSError(-count, os.strerror(-count))
        self.left -= count
        return count

    @property
    def crc(self) -> Crcs:
        """crc32 of the runs that are checked, once they are filled. uint32[n]"""
        if _library is None and self._checked is not None:
            for i, (run, kind) in enumerate(zip(self, self._checked.tolist(), strict=True)):
                if kind != UNCHECKED:
                    self._crc[i] = crc32(run, int(self._crc[i - 1]) if kind == JOINED else 0)
        return self._crc

    def run(self, number: int) -> memoryview:
        """One of the runs."""
        start = int(self._start[number])
        return self._memories[int(self._of[number])].view[start : start + int(self._size[number])]


def of_samples(
    memories: Sequence[Memory], of: Sequence[int], start: Ints, size: Ints, lie: Ints, checked: Sequence[int] = ()
) -> tuple[Places, Ints]:
    """Places of n samples that follow one another in a shard, in w runs each; and the number of each one's first run, int64[n].

    of, checked: of each of the w; start, size: int64[n, w]; lie: where the samples begin in the shard, int64[n]. What is between them
    there nobody wants, and goes to the last of the memories, over and over.
    """
    count, width = start.shape
    first, gaps = np.arange(0, count * width, width), lie[1:] - (lie + size.sum(axis=1))[:-1]
    runs = [np.tile(of, count), start.reshape(-1), size.reshape(-1), np.tile(np.array(checked, np.uint8), count)]
    if gaps.any():
        most = memories[-1].size
        pieces = np.append(0, -(-gaps // most))  # before each sample
        sizes = np.full(int(pieces.sum()), most)
        sizes[np.cumsum(pieces)[1:][gaps > 0] - 1] -= (-gaps % most)[gaps > 0]
        values: tuple[Any, ...] = (len(memories) - 1, 0, sizes, UNCHECKED)
        where = np.repeat(first, pieces)
        runs = [np.insert(one, where, value) if len(one) else one for one, value in zip(runs, values, strict=True)]
        first = first + np.cumsum(pieces)
    return Places(memories, runs[0], runs[1], runs[2], runs[3] if len(checked) else None), first


def checksums(memory: Memory, start: Ints, size: Ints) -> Crcs:
    """crc32 of runs of a memory. uint32[n]. Raises ValueError beyond its end."""
    if _library is None:
        _check(start, size, memory.size)
        runs = zip(start.tolist(), (start + size).tolist(), strict=True)
        return np.array([crc32(memory.view[begin:end]) for begin, end in runs], np.uint32)
    start, size, found = np.ascontiguousarray(start), np.ascontiguousarray(size), np.empty(len(start), np.uint32)
    arrays = start.ctypes.data, size.ctypes.data, found.ctypes.data
    # for less than a millisecond or so the lock is kept: another thread that took it would keep it for longer
    library = _library if int(size.sum()) > _LONG else _locked
    if library.checksums(_crc32, memory.address, memory.size, len(start), *arrays):
        raise ValueError(_BEYOND)
    return found


def _check(start: Ints, size: Ints, limit: Any) -> None:
    """Addresses are believed by the system: what an index claims must not lead out of the memory it is for."""
    if len(start) and (start.min() < 0 or size.min() < 0 or (start > limit - size).any()):  # in this order no sum overflows
        raise ValueError(_BEYOND)


def _checksum() -> int | None:
    """The address of isal's crc32; its function for Python takes Python's lock for each call."""
    with suppress(OSError, AttributeError):
        crc = ctypes.CDLL(isal_zlib.__file__).crc32_gzip_refl
        crc.argtypes, crc.restype = (ctypes.c_uint32, ctypes.c_char_p, ctypes.c_uint64), ctypes.c_uint32
        if crc(0, _KNOWN[0], len(_KNOWN[0])) == _KNOWN[1]:
            return ctypes.cast(crc, ctypes.c_void_p).value
    return None


def _compiled(kind: Callable[[str], Any]) -> Any:
    """The library of `bulk.c`; None where it was not compiled."""
    with suppress(OSError, AttributeError, ValueError):
        library, array, number = kind(LIBRARY), ctypes.c_void_p, ctypes.c_int64
        with open(SOURCE, "rb") as file:
            source = int.from_bytes(blake2b(file.read(), digest_size=8).digest(), "little")
        if ctypes.c_uint64.in_dll(library, "source").value != source:  # the clone was updated and not installed again
            return None
        library.checksums.argtypes = (array, array, number, number, array, array, array)
        library.fill.argtypes = (ctypes.c_int, *[number] * 3, *[array] * 5)
        library.checksums.restype, library.fill.restype = ctypes.c_int, number
        return library if _crc32 else None
    return None


_crc32 = _checksum()
_library, _locked = _compiled(ctypes.CDLL), _compiled(ctypes.PyDLL)  # called without Python's lock, and with it
COMPILED = _library is not None
