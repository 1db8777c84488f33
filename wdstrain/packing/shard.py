"""One shard: its members written under a temporary name, flushed to the disk, renamed.

The bytes of files are copied verbatim. While they pass by, the crc32 of each member is taken, and the sha256 of the shard by
a second thread, which costs less than writing them. Beside each shard its part of the index is left, with the identity of
what it was made from, so that a conversion that was broken off knows which shards it need not write again.
"""

from __future__ import annotations

import hashlib
import os
import uuid
from array import array
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from time import perf_counter

import numpy as np

from wdstrain.errors import SampleError, ShardError, StorageError
from wdstrain.packing.catalog import Catalog
from wdstrain.packing.collector import collector_paused
from wdstrain.packing.listing import Bad, Part
from wdstrain.packing.pictures import Recipe
from wdstrain.packing.planning import Piece
from wdstrain.packing.rows import Rows
from wdstrain.shards.columns import ColumnBuilder
from wdstrain.shards.index import Index, Shard
from wdstrain.shards.index_io import pack_part, unpack_part
from wdstrain.shards.offsets import Ints
from wdstrain.shards.tar import END
from wdstrain.storage.files import publish, sync_folder, write_whole

_CHUNK = 2 << 20  # bytes collected before they are written and hashed
_SLOW = 40e6  # bytes a second: files of 7 KB come at 70 from an SSD, at 1 from a rotating disk, at 250 from memory
PART = ".part"  # what the index says of one shard, beside it until the conversion ends

Tick = Callable[[int, int], None]  # samples and bytes of this shard so far


@dataclass(frozen=True)
class Packed:
    """A shard that was written: its index, the numbers of the samples in it, and what was left out of it."""

    index: Index
    numbers: Ints
    bad: list[Bad]
    kept: bool = False  # from an earlier run


def identity(piece: Piece, catalog: Catalog, recipe: Recipe, collect: bool) -> str:
    """Hash of all that the bytes of a shard depend on."""
    words = f"2 {piece.name} {recipe} {collect}".encode()
    return hashlib.blake2b(catalog.identity(piece.numbers) + words, digest_size=16).hexdigest()


def kept(folder: str, piece: Piece, mark: str) -> Packed | None:
    """The shard as an earlier run wrote it, if it is whole and made from the same."""
    path = os.path.join(folder, piece.name)
    try:
        with open(path + PART, "rb") as file:
            index, extra = unpack_part(file.read(), path)
        if extra["identity"] != mark or os.stat(path).st_size != index.shards[0].bytes:
            return None
        bad = [Bad(*row) for row in extra["bad"]]
        return Packed(index, piece.numbers[np.array(extra["places"], np.int64)], bad, kept=True)
    except (OSError, ShardError, ValueError, KeyError, TypeError, IndexError, OverflowError):
        return None  # it is written anew


def write_shard(
    folder: str,
    piece: Piece,
    catalog: Catalog,
    recipe: Recipe,
    *,
    collect: bool,
    memory: int,
    mark: str | None,
    tick: Tick,
) -> Packed:
    """Write a shard. `collect`: bad samples are left out and told, else the first raises SourceError.

    memory: bytes of samples held at a time while they are put in order. mark: the shard's identity; None: nothing is written.
    """
    path = os.path.join(folder, piece.name)
    places, bad = array("q"), []

    def good() -> Iterator[tuple[str, list[Part]]]:
        for place, number, parts in _fetched(piece.numbers, catalog, memory):
            try:
                if isinstance(parts, SampleError):
                    raise parts
                parts = recipe.apply(parts)
            except SampleError as error:
                bad.append(catalog.bad(number, str(error)))
                if not collect:
                    raise _Refused from None
                continue
            places.append(place)
            yield catalog.key(number), parts

    try:
        with suppress(FileNotFoundError):  # it speaks of the shard that is about to be replaced
            os.unlink(path + PART)
            sync_folder(folder)
        with collector_paused():
            index = write_samples(path, piece.split, good(), tick, write=mark is not None)
        if mark is None:
            return Packed(index, piece.numbers[np.array(places, np.int64)], bad)
        extra = {"identity": mark, "places": places.tolist(), "bad": bad}
        write_whole(path + PART, pack_part(index, extra))
    except _Refused:
        return Packed(Index((), (), Rows().offsets()), piece.numbers[:0], bad)
    except OSError as error:
        raise StorageError(
            f"{path} cannot be written: {error.strerror}. Free some space or choose another folder; --resume goes on."
        ) from error
    return Packed(index, piece.numbers[np.array(places, np.int64)], bad)


class _Refused(Exception):
    """A bad sample came, and none is to be left out."""


def write_samples(
    path: str,
    split: str,
    samples: Iterable[tuple[str, list[Part]]],
    tick: Tick,
    *,
    write: bool = True,
) -> Index:
    """Write a shard of these samples, (key, parts) each, whole or not at all; returns its index. Raises OSError.

    write False: the index alone is made.
    """
    # a name of its own: on a cluster, a node that was given up may still be writing the same shard
    temporary = os.path.join(
        os.path.dirname(path), f".{os.path.basename(path)}.{uuid.uuid4().hex[:12]}.tmp"
    )
    rows, columns = Rows(), ColumnBuilder()
    try:
        with (
            open(temporary if write else os.devnull, "wb", buffering=0) as file,
            _Digest() as digest,
        ):
            chunk: list[bytes] = []
            begun = 0
            for key, parts in samples:
                chunk += rows.add(key, parts)
                columns.add(parts)
                if rows.stop - begun >= _CHUNK:
                    _write(file, digest, chunk)
                    chunk, begun = [], rows.stop
                    tick(len(rows), rows.stop)
            _write(file, digest, [*chunk, END])
            sha256 = digest.finish()
            tick(len(rows), rows.stop)
        if write:
            publish(temporary, path)
        return Index(
            (Shard(path, len(rows), rows.stop + len(END), split, sha256),),
            tuple(rows.fields),
            rows.offsets(),
            columns=columns.finish(),
        )
    finally:
        with suppress(OSError):
            os.unlink(temporary)


def _fetched(
    numbers: Ints, catalog: Catalog, memory: int
) -> Iterator[tuple[int, int, list[Part] | SampleError]]:
    """(place in the shard, number, parts) of each sample, in order.

    Samples are fetched a group at a time, within a group as they lie on the disk. Groups are small while bytes come from the
    page cache, and grow to what memory allows where a disk makes us wait for them.
    """
    stops, place, filled = np.cumsum(catalog.sizes[numbers]), 0, 0
    together = min(memory, catalog.together)
    while place < len(numbers):
        stop = max(place + 1, int(np.searchsorted(stops, filled + together, side="right")))
        begun = perf_counter()
        try:
            found = catalog.fetch(numbers[place:stop])
        except OSError as error:  # not to be taken for one of the disk that is written to
            raise StorageError(
                f"{error.filename or 'the source'} cannot be read: {error.strerror}."
            ) from error
        before, filled = filled, int(stops[stop - 1])
        if filled - before < _SLOW * (perf_counter() - begun):
            together = min(memory, 4 * together)
        yield from zip(range(place, stop), numbers[place:stop].tolist(), found, strict=True)
        place = stop


class _Digest:
    """The sha256 of what is written, taken in a thread of its own, one chunk behind at most.

    Writing there too was no faster: what is left to do here holds the interpreter's lock either way. Nor was flushing to
    the disk now and then instead of at the end.
    """

    def __enter__(self) -> _Digest:
        self._hash, self._pool = hashlib.sha256(), ThreadPoolExecutor(1)
        self._last: Future[None] | None = None
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True)

    def update(self, data: memoryview) -> None:
        if self._last is not None:
            self._last.result()
        self._last = self._pool.submit(self._hash.update, data)

    def finish(self) -> str:
        """The sha256 of all, in hexadecimal."""
        if self._last is not None:
            self._last.result()
        return self._hash.hexdigest()


def _write(file: FileIO, digest: _Digest, chunk: list[bytes]) -> None:
    data = memoryview(b"".join(chunk))
    digest.update(data)
    while data:
        data = data[file.write(data) :]
