"""Tar shards that are read forward from a stream, compressed or not, without an index.

The rules for headers and names are those of `wdstrain.shards.tar`. The size of a compressed shard is
unknown until its end, so a shard that is cut is noticed there: by the missing end marker, or by the
decompressor.
"""

from __future__ import annotations

import bz2
import io
import lzma
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any, BinaryIO, cast

from isal import igzip

from wdstrain.errors import ShardError, StorageError, UsageError, WdstrainError
from wdstrain.report.printing import printable
from wdstrain.runtime.machine import memory
from wdstrain.shards.index import Shard
from wdstrain.shards.tar import SkippedMembers, check_plain, is_padding, other_kind
from wdstrain.shards.tar_headers import (
    BLOCK,
    EXTENSION_LIMIT,
    EXTENSIONS,
    Extra,
    name_in,
    padding,
    size_in,
    sparse_error,
)
from wdstrain.storage.file_object import RemoteStream
from wdstrain.storage.files import regular
from wdstrain.storage.remote import is_remote, open_remote, shown_path
from wdstrain.storage.shard_cache import Cache

_READ = 1 << 20  # bytes of one read
_PART = 16 << 20  # bytes that are reserved at a time, because a header may promise too many


def shown(path: str) -> str:
    """Return a path for messages: without secrets, and with printable characters."""
    return printable(shown_path(path))


@contextmanager
def open_tar(path: str, cache: Cache | None = None) -> Iterator[BinaryIO]:
    """Open a shard, local or remote, as a stream of tar bytes. It is decompressed if it must be.

    cache: keeps shards of servers, as they are stored there. Raises StorageError or ShardError if
    the shard cannot be read, UsageError if its kind of compression cannot.
    """
    raw = _open_remote(path, cache) if is_remote(path) else _open_local(path)
    with raw, _decompressed(raw, shown(path)) as stream:
        yield stream


def _open_local(path: str) -> io.BufferedReader:
    try:
        return cast(io.BufferedReader, open(path, "rb", _READ, opener=regular))
    except OSError as error:
        raise StorageError(
            f"{shown(path)} cannot be read: {error.strerror}. Check the address."
        ) from error


def _open_remote(path: str, cache: Cache | None) -> io.BufferedReader:
    file = open_remote(path, first_bytes=1 if cache is not None else None)
    cached = None
    if cache is not None:
        cached = cache.open(Shard(path, 0, file.size, tag=file.version or ""))
    if cached is not None:
        file.close()
    return io.BufferedReader(RemoteStream(cached or file), _READ)


def is_compressed(head: bytes) -> bool:
    """Return whether the first bytes of a file are those of a compressed file that can be read."""
    return _kind(head) is not None


def _kind(head: bytes) -> str | None:
    if head[257:262] == b"ustar":  # a tar whose first name looks like a magic number
        return None
    return next((kind for magic, kind in _KINDS.items() if head.startswith(magic)), None)


def _decompressed(raw: io.BufferedReader, shard: str) -> BinaryIO:
    head = raw.peek(BLOCK)[:BLOCK]
    kind = _kind(head)
    if kind is None:
        check_plain(head, shard)  # other kinds of compression
        return raw
    # No buffer of our own: after damage it would drop the intact bytes that it holds.
    optional = {"zstd": _zstd, "lz4": _lz4}
    return cast(BinaryIO, optional[kind](raw, shard) if kind in optional else _OPENERS[kind](raw))


def _zstd(raw: BinaryIO, shard: str) -> Any:
    for name in ("compression.zstd", "backports.zstd"):
        try:
            return import_module(name).ZstdFile(raw)
        except ImportError:
            continue
    try:
        decompressor = import_module("zstandard").ZstdDecompressor()
    except ImportError:
        raise UsageError(
            f"{shard} is compressed by zstd, which this Python cannot read. "
            f"Install it: pip install 'wdstrain[archives]'"
        ) from None
    return decompressor.stream_reader(raw, read_across_frames=True)


def _lz4(raw: BinaryIO, shard: str) -> Any:
    try:
        return import_module("lz4.frame").LZ4FrameFile(raw)
    except ImportError:
        raise UsageError(
            f"{shard} is compressed by lz4, which Python cannot read. "
            f"Install it: pip install 'wdstrain[archives]'"
        ) from None


_KINDS = {
    b"\x1f\x8b\x08": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\0": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x04\x22\x4d\x18": "lz4",
}
_OPENERS: dict[str, Callable[[BinaryIO], Any]] = {
    "gzip": partial(igzip.open, mode="rb"),
    "bzip2": bz2.open,
    "xz": lzma.open,
}


def members(stream: BinaryIO, shard: str, skipped: SkippedMembers) -> Iterator[tuple[str, bytes]]:
    """Yield (name, data) of the regular files of a tar.

    shard: its name in errors. skipped: counts the members that are skipped. Raises ShardError for a
    shard that is cut or damaged.
    """
    reader = _Reader(stream, shard)
    extra, is_extended = Extra(), False
    while True:
        offset = reader.offset
        block = reader.read(BLOCK, "a header")
        if block == bytes(BLOCK):
            if is_extended:
                raise ShardError(
                    f"{shard} ends at offset {offset} after an extension header without its member. "
                    f"Repack it."
                )
            reader.check_end(offset)
            return
        length, kind = size_in(block, shard, offset), block[156:157]
        if kind in EXTENSIONS:
            if length > EXTENSION_LIMIT:
                raise ShardError(
                    f"{shard} claims an extension header of {length} bytes at offset {offset}; "
                    f"1 MiB is the limit. Repack it."
                )
            payload = reader.read(length + padding(length), "an extension header")
            extra.read(kind, payload, length, shard, offset)
            is_extended = True
            continue
        name = extra.path or name_in(block)
        length = extra.size if extra.size is not None else length
        if kind == b"S" or extra.sparse:
            raise sparse_error(shard, name, offset)
        extra, is_extended = Extra(), False
        if kind in (b"0", b"\0", b"7") and not name.endswith("/"):
            yield name, reader.read(length, f"'{printable(name)}'")
            reader.read(padding(length), f"'{printable(name)}'")
        else:
            skipped.add(other_kind(kind, name))
            length = 0 if kind in b"123456" else length
            reader.skip(length + padding(length), f"'{printable(name)}'")


class _Reader:
    """Exact reads from a stream. Raises ShardError where it ends too early or is damaged."""

    def __init__(self, stream: BinaryIO, shard: str) -> None:
        self._stream, self._shard, self._memory = stream, shard, memory()
        self.offset = 0
        self._last = self._before = b""  # last block that was read, and the block before that read

    def read(self, length: int, described: str) -> bytes:
        """Return the next `length` bytes. described: what they are, in errors."""
        if length > self._memory:
            raise ShardError(
                f"{self._shard} claims {length} bytes for {described} at offset {self.offset}, "
                f"more than this machine has memory. Copy or pack it again."
            )
        data = self._some(min(length, _PART))
        if len(data) < length:
            data = self._in_parts(data, length)
        if len(data) < length:
            raise ShardError(
                f"{self._shard} ends at byte {self.offset + len(data)} inside {described}, without "
                f"the two zero blocks that end a tar: it was cut. Copy or pack it again."
            )
        if length:
            self.offset += length
            last = data[-BLOCK:] if length >= BLOCK else (self._last + data)[-BLOCK:]
            self._before, self._last = self._last, last
        return data

    def _in_parts(self, data: bytes, length: int) -> bytes:
        """Return `data` and the bytes after it, `length` in total; fewer at the end of the stream."""
        parts, count = [data], len(data)
        while count < length and data:
            data = self._some(min(length - count, _PART))
            parts.append(data)
            count += len(data)
        return b"".join(parts)

    def skip(self, length: int, described: str) -> None:
        while length:
            part = min(length, _PART)
            self.read(part, described)
            length -= part

    def check_end(self, offset: int) -> None:
        """Read to the end of the stream, after the zero block at `offset`.

        Raises ShardError unless a second zero block follows, and then only the zeros that tar adds.
        """
        size = self.offset
        while data := self._some(_READ):
            size += len(data)
            if data.strip(b"\0"):
                raise ShardError(
                    f"{self._shard} has data after its end at offset {offset}: several tars in one, "
                    f"or damage. Copy or pack it again."
                )
        if size - offset < 2 * BLOCK:
            raise ShardError(
                f"{self._shard} ends at byte {size} without the two zero blocks that end a tar: it "
                f"was cut. Copy or pack it again."
            )
        if not is_padding(lambda start, length: self._before, offset, size):
            raise ShardError(
                f"{self._shard} ends at offset {offset}, {size - offset} bytes before the file does, "
                f"which is more than tar adds. It is damaged. Copy or pack it again."
            )

    def _some(self, length: int) -> bytes:
        try:
            return self._stream.read(length) if length else b""
        except (WdstrainError, MemoryError):
            raise
        except Exception as error:  # each decompressor has its own classes
            raise ShardError(
                f"{self._shard} is cut or damaged after byte {self.offset} of its contents: {error}. "
                f"Copy it again."
            ) from error
