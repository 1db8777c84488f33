"""Tar shards that are read forward from a stream, compressed or not, without an index.

The rules for headers and names are those of `wdstrain.shards.tar`. The size of a compressed shard is
unknown until its end, so a shard that is cut is noticed there: by the missing end marker, or by the
decompressor.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any, BinaryIO, cast

from wdstrain.errors import ShardError, UsageError, WdstrainError
from wdstrain.report.printing import printable
from wdstrain.runtime.machine import memory
from wdstrain.shards.tar import (
    Member,
    SkippedMembers,
    Window,
    check_plain,
    compression_of,
    walk,
)
from wdstrain.shards.tar_headers import BLOCK, Fault
from wdstrain.storage.cache import Cache
from wdstrain.storage.files import open_source
from wdstrain.storage.remote import (
    ALL_BYTES,
    RemoteFile,
    is_remote,
    shown_path,
)

_READ = 1 << 20  # bytes of one read
_PART = 16 << 20  # bytes that are reserved at a time, because a header may promise too many


@contextmanager
def open_tar(path: str, cache: Cache | None = None) -> Iterator[tuple[BinaryIO, io.BufferedReader]]:
    """Open a shard, local or remote, as streams of its tar bytes and of the bytes that are stored.

    Both are one stream if the shard is not compressed. cache: keeps shards of servers, as they are
    stored there. Raises StorageError or ShardError if the shard cannot be read, UsageError if its
    kind of compression cannot.
    """
    with _open_raw(path, cache) as raw:
        head = raw.peek(BLOCK)[:BLOCK]
        kind = compression_of(head)
        if kind in _DECOMPRESSORS:
            # No buffer of our own: after damage it would drop the intact bytes that it holds.
            with _decompressor(kind, shown_path(path))(raw) as stream:
                yield stream, raw
        else:
            check_plain(head, shown_path(path))  # zip
            yield raw, raw


def _open_raw(path: str, cache: Cache | None) -> io.BufferedReader:
    """Open a shard as it is stored. The arguments and errors are those of `open_tar`."""
    if cache is None or not is_remote(path):
        return io.BufferedReader(open_source(path), _READ)
    remote = RemoteFile(path)
    cached = cache.open(path, remote.size, tag=remote.version or "")
    return io.BufferedReader(cached or remote, _READ)


def _decompressor(kind: str, shard: str) -> Callable[[BinaryIO], Any]:
    """Return a function that opens a stream of this kind. Raises UsageError if none is installed."""
    for module, name in _DECOMPRESSORS[kind]:
        with suppress(ImportError):
            return cast(Callable[[BinaryIO], Any], getattr(import_module(module), name))
    raise UsageError(
        f"{shard} is compressed by {kind}, which this Python cannot read.",
        "Install it: pip install 'wdstrain[archives]'",
    )


# Modules and functions that decompress each kind; the first that is installed is used.
_DECOMPRESSORS = {
    "gzip": [("isal.igzip", "open")],
    "bzip2": [("bz2", "open")],
    "xz": [("lzma", "open")],
    "zstd": [("compression.zstd", "ZstdFile"), ("backports.zstd", "ZstdFile")],
    "lz4": [("lz4.frame", "LZ4FrameFile")],
}


def members(stream: BinaryIO, shard: str, skipped: SkippedMembers) -> Iterator[Member]:
    """Yield the regular files of a tar with their data.

    shard: its name in errors. skipped: counts the members that are skipped. Raises Fault for a shard
    that is cut, as `tar.walk` does, and ShardError for one that cannot be decompressed.
    """

    def read(offset: int, length: int) -> bytes:
        """Return the next bytes. They are those at an offset, which only the error names."""
        try:
            return stream.read(min(length, _PART))
        except (WdstrainError, MemoryError):
            raise
        except Exception as error:  # each decompressor has its own classes
            raise ShardError(
                f"{shard} is cut or damaged after byte {offset} of its contents: {error}.",
                "Copy it again.",
            ) from error

    # Nothing is read ahead: a read that meets damage fails as a whole, with the intact bytes before
    # it. The last block is kept, because the end of a tar is read twice.
    source = Window(read, ALL_BYTES, ahead=0, behind=BLOCK, skips=False)
    most = memory()
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
