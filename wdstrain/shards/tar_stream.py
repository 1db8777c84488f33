"""Tar shards that are read forward from a stream, compressed or not, without an index.

The rules for headers and names are those of `wdstrain.shards.tar`. The size of a compressed shard is
unknown until its end, so a shard that is cut is noticed there: by the missing end marker, or by the
decompressor.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any, BinaryIO, cast

from wdstrain.errors import ShardError, StorageError, UsageError, WdstrainError
from wdstrain.report.printing import printable
from wdstrain.runtime.machine import memory
from wdstrain.shards.tar import (
    NO_KEY,
    NOT_A_SAMPLE,
    SkippedMembers,
    check_plain,
    is_not_sample,
    is_padding,
    other_kind,
    split_name,
)
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
from wdstrain.storage.cache import Cache
from wdstrain.storage.files import regular
from wdstrain.storage.remote import (
    ALL_BYTES,
    RemoteFile,
    RemoteStream,
    is_remote,
    name_of,
    shown_path,
)

_READ = 1 << 20  # bytes of one read
_COMPRESSED = re.compile(r"\.(tar\.(gz|bz2|xz|zst|lz4)|tgz|tbz2?|txz|tzst)$", re.IGNORECASE)
_PART = 16 << 20  # bytes that are reserved at a time, because a header may promise too many


def shown(path: str) -> str:
    """Return a path for messages: without secrets, and with printable characters."""
    return printable(shown_path(path))


def has_compressed_name(path: str) -> bool:
    """Return whether the name of a shard says that it is compressed."""
    return _COMPRESSED.search(name_of(path)) is not None


@contextmanager
def open_tar(path: str, cache: Cache | None = None) -> Iterator[BinaryIO]:
    """Open a shard, local or remote, as a stream of tar bytes. It is decompressed if it must be.

    cache: keeps shards of servers, as they are stored there. Raises StorageError or ShardError if
    the shard cannot be read, UsageError if its kind of compression cannot.
    """
    with _open(path, cache) as raw:
        head = raw.peek(BLOCK)[:BLOCK]
        kind = _kind(head)
        if kind is None:
            check_plain(head, shown(path))  # other kinds of compression
            yield raw
        else:
            # No buffer of our own: after damage it would drop the intact bytes that it holds.
            with _decompressor(kind, shown(path))(raw) as stream:
                yield stream


def _open(path: str, cache: Cache | None) -> io.BufferedReader:
    if is_remote(path):
        file = RemoteFile(path, first_bytes=ALL_BYTES if cache is None else 1)
        cached = cache and cache.open(path, file.size, tag=file.version or "")
        return io.BufferedReader(RemoteStream(cached or file), _READ)
    try:
        return cast(io.BufferedReader, open(path, "rb", _READ, opener=regular))
    except OSError as error:
        raise StorageError(
            f"{shown(path)} cannot be read: {error.strerror}. Check the address."
        ) from error


def _kind(head: bytes) -> str | None:
    """Return the kind of compression that the first bytes of a file show."""
    if head[257:262] == b"ustar":  # a tar whose first name looks like a magic number
        return None
    return next((kind for magic, kind in _KINDS.items() if head.startswith(magic)), None)


def _decompressor(kind: str, shard: str) -> Callable[[BinaryIO], Any]:
    """Return a function that opens a stream of this kind. Raises UsageError if none is installed."""
    for module, name, options in _DECOMPRESSORS[kind]:
        try:
            return partial(getattr(import_module(module), name), **options)
        except ImportError:
            continue
    raise UsageError(
        f"{shard} is compressed by {kind}, which this Python cannot read. Install it: "
        f"pip install 'wdstrain[archives]'"
    )


_KINDS = {
    b"\x1f\x8b\x08": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\0": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x04\x22\x4d\x18": "lz4",
}
# Module, class and options of the decompressors of each kind; the first that is installed is used.
_DECOMPRESSORS: dict[str, list[tuple[str, str, dict[str, Any]]]] = {
    "gzip": [("isal.igzip", "open", {"mode": "rb"})],
    "bzip2": [("bz2", "open", {})],
    "xz": [("lzma", "open", {})],
    "zstd": [("compression.zstd", "ZstdFile", {}), ("backports.zstd", "ZstdFile", {})],
    "lz4": [("lz4.frame", "LZ4FrameFile", {})],
}


def reraise(error: Exception) -> None:
    """Raise an error: the default of functions that get errors."""
    raise error


def samples(
    named: Iterable[tuple[str, bytes]],
    shard: str,
    skipped: SkippedMembers,
    entries: Mapping[str, Any] | None = None,
    on_error: Callable[[ShardError], Any] = reraise,
) -> Iterator[dict[str, Any]]:
    """Yield the samples of (name, data) of members: {"__key__": key, **entries, field: data}.

    shard: its name in errors. skipped: counts the members without a sample. on_error: gets the
    error for a key in two places, and for two members of one name, the second of which is left out.
    """
    keys, sample = set[str](), dict[str, Any]()
    for name, data in named:
        parts = split_name(name)
        if parts is None or is_not_sample(name):
            skipped.add(NO_KEY if parts is None else NOT_A_SAMPLE)
            continue
        key, field = parts
        error = ""
        if sample.get("__key__") != key:
            if sample:
                yield sample
            if key in keys:
                error = (
                    f"{shard} holds members of '{printable(key)}' in two places; the fields of a "
                    f"sample must be adjacent. Repack it from a sorted list."
                )
            keys.add(key)
            sample = {"__key__": key, **(entries or {})}
        if field in sample:
            error = (
                f"{shard} holds two members named '{printable(name)}', or a reserved name. "
                f"Repack it."
            )
        if error:
            on_error(ShardError(error))
        sample.setdefault(field, data)
    if sample:
        yield sample


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
