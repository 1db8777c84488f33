"""Samples of compressed tars and zip archives, read forward once.

Members are grouped into samples by webdataset's rule: the key is the name up to the first dot of
its last part. Archives are not trusted: their unpacked size is limited.
"""

from __future__ import annotations

import os
import re
import stat
import zipfile
import zlib
from collections.abc import Callable, Iterator
from lzma import LZMAError
from typing import Any, BinaryIO, cast

from wdstrain.conversion.listing import (
    BadSample,
    Part,
    Sample,
    Source,
    count_ignored,
    drawn_again,
    field_name,
    file_mark,
    readable,
    split_of,
)
from wdstrain.conversion.source_options import TarsOptions
from wdstrain.errors import SampleError, ShardError, UsageError
from wdstrain.shards.tar import (
    Member,
    SkippedMembers,
    other_kind,
    split_name,
)
from wdstrain.shards.tar_stream import members, open_tar, samples, shown
from wdstrain.storage.addresses import INDEX_NAME, expand, is_json
from wdstrain.storage.remote import RemoteFile, is_remote, name_of

_ARCHIVE = re.compile(r"\.(tar\.(gz|bz2|xz|zst|lz4)|tgz|tbz2?|txz|zip)$", re.IGNORECASE)
_MOST_RATIO = 1000  # unpacked bytes for each byte of an archive, beyond the first _FREE
_FREE = 1 << 30  # bytes that any archive may unpack to


def archives_in(addresses: list[str]) -> list[str]:
    """Return the paths of addresses if any is a compressed tar or a zip; else []."""
    paths: list[str] = []
    for address in addresses:
        names = _names_in(address) if os.path.isdir(address) else []
        if names:
            paths += [os.path.join(address, name) for name in names]
        elif is_remote(address) and _ARCHIVE.search(name_of(address)):
            paths.append(address)
        else:
            paths += expand(address)
    if not any(_ARCHIVE.search(name_of(path)) for path in paths):
        return []
    if any(map(is_json, paths)):
        raise UsageError(
            "archives and sets with an index cannot be converted together. Convert each by itself."
        )
    return paths


def _names_in(folder: str) -> list[str]:
    """Return the archives of a folder that has neither an index nor a tar."""
    with readable(folder, "the permissions of the folder"):
        names = sorted(os.listdir(folder))
    if any(name == INDEX_NAME or name.endswith(".tar") for name in names):
        return []
    return [name for name in names if _ARCHIVE.search(name)]


def stream_archives(
    paths: list[str], options: TarsOptions, keys: set[str] | None, source: dict[str, Any]
) -> Source:
    """Return the samples of archives, in their order. keys: None: all. source: the provenance."""
    ignored: dict[str, int] = {}

    def entries() -> Iterator[Sample | BadSample]:
        for path in paths:
            split = split_of(name_of(path))
            skipped = SkippedMembers()
            for key, parts in _grouped(path, skipped):
                if keys is not None and key not in keys:
                    count_ignored(ignored, "keys that were not asked for")
                    continue
                try:
                    yield Sample(key, _kept(parts, options), split)
                except SampleError as error:
                    yield BadSample(shown(path), 0, key, str(error))
            for reason, count in skipped.items():
                count_ignored(ignored, reason, count)

    name = ", ".join(shown(path) for path in paths[:3]) + (", ..." if len(paths) > 3 else "")
    mark = None if any(map(is_remote, paths)) else file_mark(*paths)
    source |= drawn_again(map(split_of, map(name_of, paths)), options)
    return Source(name, entries, lambda: (), source, None, mark, ignored, resplit=True)


def _kept(parts: list[Part], options: TarsOptions) -> list[Part]:
    """Return the kept parts under their new names. Raises SampleError if there are none."""
    keep, drop, rename = options.keep, options.drop, options.rename or {}
    kept = [
        (field_name(rename.get(field, field)), data)
        for field, data in parts
        if (field in keep if keep else field not in drop)
    ]
    if not kept or len({field for field, _ in kept}) < len(kept):
        names = ", ".join(field for field, _ in kept) or "(none)"
        raise SampleError(f"it would have the fields {names}, but needs one or more, each once")
    return kept


def _grouped(path: str, skipped: SkippedMembers) -> Iterator[tuple[str, list[Part]]]:
    """Yield (key, parts) of each sample. Raises ShardError for a key in two places."""
    read = _zip_members if name_of(path).lower().endswith(".zip") else _tar_members
    for sample in samples(read(path, skipped), shown(path), skipped):
        yield sample.pop("__key__"), list(sample.items())


def _tar_members(path: str, skipped: SkippedMembers) -> Iterator[Member]:
    with open_tar(path) as stream:
        limited = cast(BinaryIO, _Limited(stream.read, _limit(path), shown(path)))
        yield from members(limited, shown(path), skipped)


def _limit(path: str) -> int:
    """Return the bytes that an archive may unpack to."""
    if is_remote(path):
        with RemoteFile(path) as file:
            size = file.size
    else:
        size = os.path.getsize(path)
    return max(_FREE, _MOST_RATIO * size)


class _Limited:
    """A stream that raises ShardError when an archive unpacks to more than its limit."""

    def __init__(self, read: Callable[[int], bytes], limit: int, archive: str) -> None:
        self._read, self._left, self._archive = read, limit, archive

    def read(self, length: int) -> bytes:
        data = self._read(length)
        self._left -= len(data)
        if self._left < 0:
            raise _too_large(self._archive)
        return data


def _too_large(archive: str) -> ShardError:
    return ShardError(
        f"{archive} unpacks to more than {_MOST_RATIO} times its size: it may be made to fill a "
        f"disk. If you trust it, unpack it and convert the result."
    )


def _zip_members(path: str, skipped: SkippedMembers) -> Iterator[Member]:
    """Yield the files of a zip with their data: forward, but the members of a key together."""
    if is_remote(path):
        raise UsageError(f"{shown(path)}: a zip archive must be on a disk. Download it first.")
    try:
        with zipfile.ZipFile(path) as archive:
            infos = sorted(archive.infolist(), key=lambda info: info.header_offset)
            for info in infos:
                info.filename = info.filename.replace("\\", "/")  # of Windows
            if sum(info.file_size for info in infos) > _limit(path):
                raise _too_large(shown(path))
            order: dict[str, int] = {}  # place of the first member of each key
            for place, info in enumerate(infos):
                order.setdefault((split_name(info.filename) or (info.filename,))[0], place)
            infos.sort(key=lambda i: order[(split_name(i.filename) or (i.filename,))[0]])
            for info in infos:
                mode = info.external_attr >> 16
                if info.is_dir() or (stat.S_IFMT(mode) and not stat.S_ISREG(mode)):
                    skipped[other_kind(b"5" if info.is_dir() else b"2", info.filename)] += 1
                    continue
                # A zip gives no offset of the data, and none is needed.
                yield Member(
                    info.filename, info.header_offset, 0, info.file_size, archive.read(info)
                )
    except (zipfile.BadZipFile, zlib.error, LZMAError, EOFError, ValueError, OSError) as error:
        raise ShardError(f"{shown(path)} is cut or damaged: {error}. Copy it again.") from error
    except (RuntimeError, NotImplementedError) as error:  # a password, or a rare compression
        raise ShardError(
            f"{shown(path)} cannot be unpacked: {error}. Unpack it yourself."
        ) from error
