"""Tar shards that are read forward from a stream, compressed or not, without an index.

The rules for headers and names are those of `wdstrain.shards.tar`. The size of a compressed shard is
unknown until its end, so a shard that is cut is noticed there: by the missing end marker, or by the
decompressor.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any, BinaryIO, cast

from wdstrain.errors import ShardError, StorageError, UsageError, WdstrainError
from wdstrain.report.printing import printable
from wdstrain.runtime.machine import memory
from wdstrain.shards.tar import (
    Member,
    SkippedMembers,
    Window,
    check_plain,
    compression_of,
    grouped,
    reraise,
    walk,
)
from wdstrain.shards.tar_headers import BLOCK, Fault
from wdstrain.storage.cache import Cache
from wdstrain.storage.files import regular
from wdstrain.storage.remote import (
    ALL_BYTES,
    RemoteFile,
    RemoteStream,
    is_remote,
    shown_path,
)

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
    with open_raw(path, cache) as raw, decompressed(raw, shown(path)) as stream:
        yield stream


@contextmanager
def decompressed(raw: io.BufferedReader, shard: str) -> Iterator[BinaryIO]:
    """Yield the tar bytes of a stream, which is itself a plain tar or compressed."""
    head = raw.peek(BLOCK)[:BLOCK]
    kind = compression_of(head)
    if kind in _DECOMPRESSORS:
        # No buffer of our own: after damage it would drop the intact bytes that it holds.
        with _decompressor(kind, shard)(raw) as stream:
            yield stream
    else:
        check_plain(head, shard)  # zip
        yield raw


def open_raw(path: str, cache: Cache | None = None) -> io.BufferedReader:
    """Open a shard as it is stored. The arguments and errors are those of `open_tar`."""
    if is_remote(path):
        file = RemoteFile(path, first_bytes=ALL_BYTES if cache is None else 1)
        cached = cache and cache.open(path, file.size, tag=file.version or "")
        return io.BufferedReader(RemoteStream(cached or file), _READ)
    try:
        return cast(io.BufferedReader, open(path, "rb", _READ, opener=regular))
    except OSError as error:
        raise StorageError(
            f"{shown(path)} cannot be read: {error.strerror}.",
            "Check the address.",
        ) from error


def _decompressor(kind: str, shard: str) -> Callable[[BinaryIO], Any]:
    """Return a function that opens a stream of this kind. Raises UsageError if none is installed."""
    for module, name, options in _DECOMPRESSORS[kind]:
        try:
            return partial(getattr(import_module(module), name), **options)
        except ImportError:
            continue
    raise UsageError(
        f"{shard} is compressed by {kind}, which this Python cannot read.",
        "Install it: pip install 'wdstrain[archives]'",
    )


# Module, class and options of the decompressors of each kind; the first that is installed is used.
_DECOMPRESSORS: dict[str, list[tuple[str, str, dict[str, Any]]]] = {
    "gzip": [("isal.igzip", "open", {"mode": "rb"})],
    "bzip2": [("bz2", "open", {})],
    "xz": [("lzma", "open", {})],
    "zstd": [("compression.zstd", "ZstdFile", {}), ("backports.zstd", "ZstdFile", {})],
    "lz4": [("lz4.frame", "LZ4FrameFile", {})],
}


def samples(
    files: Iterable[Member],
    shard: str,
    skipped: SkippedMembers,
    entries: Mapping[str, Any] | None = None,
    on_error: Callable[[ShardError], Any] = reraise,
) -> Iterator[dict[str, Any]]:
    """Yield the samples of members: {"__key__": key, **entries, field: data}.

    For the other arguments and errors see `tar.grouped`.
    """
    reserved = {"__key__", *(entries or ())}
    for key, fields in grouped(files, shard, skipped, reserved, on_error):
        data = {name: member.data for name, member in fields.items()}
        yield {"__key__": key, **(entries or {}), **data}


def members(stream: BinaryIO, shard: str, skipped: SkippedMembers) -> Iterator[Member]:
    """Yield the regular files of a tar with their data.

    shard: its name in errors. skipped: counts the members that are skipped. `samples` raises
    ShardError for a shard that is cut or damaged.
    """
    source, most = _Forward(stream, shard), memory()
    for member in walk(source, skipped):
        if member.size > most:
            raise Fault(
                f"claims {member.size} bytes for '{printable(member.name)}' at offset "
                f"{member.offset}, more than this machine has memory",
                "Copy or pack it again",
            )
        data = source.read(member.offset, member.size)
        if len(data) < member.size:
            name = printable(member.name)
            raise Fault(f"ends at byte {source.size} inside '{name}': it was cut")
        yield Member(*member[:4], data)


class _Forward(Window):
    """Bytes of a tar from a stream, whose size is known at its end.

    Nothing is read ahead: a read that meets damage fails as a whole, with the intact bytes before
    it. The block before the last read is kept, because the end of a tar is read twice.
    """

    def __init__(self, stream: BinaryIO, shard: str) -> None:
        self.size, self._stream, self._shard = ALL_BYTES, stream, shard
        self._base, self._buffer = 0, bytearray()  # the bytes from `_base` on

    def read(self, offset: int, length: int) -> bytes:
        """Return bytes [offset, offset + length), fewer only at the end."""
        stop = offset + length
        while self._base + len(self._buffer) < stop and self._more(stop):
            pass
        data = bytes(memoryview(self._buffer)[offset - self._base :][:length])
        passed = max(0, offset - BLOCK - self._base)
        del self._buffer[:passed]
        self._base += passed
        return data

    def _more(self, stop: int) -> bool:
        """Read on, at most up to the byte `stop`. Returns False at the end of the stream."""
        end = self._base + len(self._buffer)
        try:
            data = self._stream.read(min(stop - end, _PART))
        except (WdstrainError, MemoryError):
            raise
        except Exception as error:  # each decompressor has its own classes
            raise ShardError(
                f"{self._shard} is cut or damaged after byte {end} of its contents: {error}.",
                "Copy it again.",
            ) from error
        self._buffer += data
        self.size = self.size if data else end
        return bool(data)
