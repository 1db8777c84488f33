"""Samples of a source as a catalog: of its files, or of a spool that its bytes are written into.

The spool is the first pass of an external shuffle. Samples are written into buckets, with the
headers that they have in a shard. Each bucket is a file for a range of shuffle ranks, or of sample
numbers if the order is kept. A shard is then read forward from one bucket or two. Data is written
twice in all, sequentially. Memory holds the write buffers, within `memory`, and about 200 bytes per
sample.

A shuffle buffer is not used: its order would depend on its size, and a small one mixes badly.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from wdstrain.conversion.catalog import (
    Catalog,
    FileCatalog,
    IndexCatalog,
    MetaBuilder,
    Renamed,
    SampleMeta,
    bad_file,
    with_pieces,
)
from wdstrain.conversion.encode import Pixels, encoded_pixels
from wdstrain.conversion.listing import BadSample, BadSamples, Keys, Sample, Source
from wdstrain.conversion.options import Options
from wdstrain.conversion.shard_writer import IndexBuilder, run
from wdstrain.errors import SampleError, ShardError
from wdstrain.runtime.machine import cores
from wdstrain.runtime.options import as_bytes
from wdstrain.shards.columns import Column
from wdstrain.shards.index import Index, Shard
from wdstrain.shards.index_io import pack_part, unpack_part
from wdstrain.shards.kinds import ColumnInfo
from wdstrain.shards.offsets import as_numpy
from wdstrain.storage.files import disk_errors, sync_folder, write_whole

_RUN = 256 << 20  # bytes of a bucket if the order of the source is kept
_DONE = "spill.arrow"  # what the buckets hold
_ADVICE = "Free some space, then run this again with resume=True."
_BATCH_BYTES, _BATCH = 1 << 20, 256  # bytes and samples that one task encodes
_FEW = 4  # batches; a stream with fewer is encoded by this process

Entry = Sample | BadSample

Progress = Callable[[int, int], None]  # samples and bytes so far


class Collected(NamedTuple):
    """The samples of a source, its labels, and the number of samples with the bad ones."""

    catalog: Catalog
    labels: tuple[ColumnInfo, ...]
    listed: int


def collect(
    source: Source,
    spool: str | None,
    options: Options,
    bad: BadSamples,
    progress: Progress,
    first_key: int = 0,
) -> Collected:
    """Return the samples of a source, or the first `limit` ones of a source that is read once.

    spool: folder for their bytes; None: nothing is written. first_key: key, as a number, of the
    first sample without a key.
    """
    if source.has_files:
        return _collect_files(source, options, bad)
    if options.resume and spool is not None and (restored := _restored(source, spool, bad)):
        return restored
    before = len(bad.bad)
    writer = _Spool(spool, options)
    for key, name, sample in keyed(source, options, bad, first_key):
        writer.add(key, name, sample)
        progress(writer.count, writer.bytes)
    catalog = writer.finish(source.name)
    listed = writer.count + len(bad.bad) - before
    done = Collected(catalog, source.labels(), listed)
    if source.mark is not None and spool is not None:
        _save(source, spool, done, bad.bad[before:])
    return done


def _collect_files(source: Source, options: Options, bad: BadSamples) -> Collected:
    builder, sizes, renamed = MetaBuilder(options.seed), array("q"), Renamed()
    items, before = list[Sample](), len(bad.bad)
    for entry in source.samples():
        if isinstance(entry, BadSample):
            bad.put(entry)
            continue
        try:
            item, size = with_pieces(entry)
        except SampleError as error:
            bad.put(bad_file(source.name, entry, str(error)))
            continue
        if item.name:
            renamed[len(sizes)] = {"key": str(item.key), "name": item.name}
        builder.add(str(item.key), item)
        if source.stored is None:
            items.append(item)
        sizes.append(size)
    stored, counts = source.stored or items, np.array(sizes, np.int64)
    catalog = FileCatalog(source.name, stored, builder.finish(), counts, renamed)
    return Collected(catalog, source.labels(), len(sizes) + len(bad.bad) - before)


def keyed(
    source: Source,
    options: Options,
    bad: BadSamples,
    first_key: int = 0,
) -> Iterator[tuple[str, str, Sample]]:
    """Yield (key, name in the source, sample) of the good samples of a stream, as bytes."""
    keys, number = Keys(), first_key
    for entry in _encoded(source, options):
        if isinstance(entry, BadSample):
            bad.put(entry)
            continue
        name = f"{number:09d}" if entry.key is None else entry.key
        number += 1
        yield keys.key(name), name, entry


# --- pixels, encoded in worker processes ---------------------------------------------------------


def _encoded(source: Source, options: Options) -> Iterator[Entry]:
    """Yield the samples of a stream, in order, with bytes in place of `Pixels`."""
    batches = _batches(source.samples(), options.limit)
    head = list(islice(batches, _FEW))
    jobs = options.num_workers or (cores() if len(head) == _FEW else 1)
    has_pixels = any(isinstance(part, Pixels) for batch in head for _, part in _parts_of(batch))
    batches = chain(head, batches)
    del head  # held by the chain until they are taken
    work = partial(_encode, source.name)
    with closing(run(work, batches, jobs if has_pixels else 1, lambda *_: None)) as results:
        for batch in results:
            yield from batch


def _batches(entries: Iterable[Entry], limit: int | None) -> Iterator[list[Entry]]:
    """Yield the entries up to the good sample number `limit`; the next one is not asked for."""
    batch, size, count = list[Entry](), 0, 0
    for entry in entries:
        batch.append(entry)
        count += isinstance(entry, Sample)
        if count == limit:
            break
        size += sum(p.size if isinstance(p, Pixels) else len(p) for _, p in _parts_of([entry]))
        if size >= _BATCH_BYTES or len(batch) == _BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _parts_of(batch: Iterable[Entry]) -> Iterator[tuple[str, Any]]:
    return (part for entry in batch if isinstance(entry, Sample) for part in entry.parts)


def _encode(source: str, batch: list[Entry], tick: Any) -> list[Entry]:
    """Return samples with bytes in place of `Pixels`; one that its format cannot hold is bad."""
    made = list[Entry]()
    for entry in batch:
        if isinstance(entry, Sample) and any(isinstance(part, Pixels) for _, part in entry.parts):
            try:
                entry = entry._replace(parts=encoded_pixels(entry.parts))
            except SampleError as error:
                entry = BadSample(source, entry.row, "", str(error))
        made.append(entry)
    return made


# --- spool ---------------------------------------------------------------------------------------


class _Spool:
    """Writes samples into buckets, and collects their positions and properties.

    folder: None counts the samples and writes nothing. count, bytes: of the samples so far.
    """

    def __init__(self, folder: str | None, options: Options) -> None:
        self._folder, self._shuffle = folder, options.shuffle
        self._most = as_bytes(options.memory) // 6  # bytes of all buffers
        self._meta, self._rows, self._renamed = MetaBuilder(options.seed), IndexBuilder(), Renamed()
        self._files, self._stops = array("i"), dict[int, int]()  # of each sample; of each file
        self._buffers: dict[int, list[bytes]] = {}
        self._held = self.count = self.bytes = 0
        if folder is not None:
            with suppress(FileNotFoundError):  # it describes files that are about to be replaced
                os.unlink(os.path.join(folder, _DONE))
                sync_folder(folder)
            for name in os.listdir(folder):
                os.unlink(os.path.join(folder, name))

    def add(self, key: str, name: str, sample: Sample) -> None:
        """Add a sample. Raises StorageError."""
        if key != name:
            self._renamed[self.count] = {"key": key, "name": name}
        rank = self._meta.add(key, sample)
        # 256 buckets: each fits in memory if the stream is below 256 times `memory`.
        file = rank >> 56 if self._shuffle else self.bytes // _RUN
        start = self._stops.get(file, 0)
        self._buffers.setdefault(file, []).extend(self._rows.add(key, sample.parts, start))
        self._stops[file] = self._rows.stop
        self._files.append(file)
        self.count += 1
        self.bytes += self._rows.stop - start
        self._held += self._rows.stop - start
        if self._held > self._most:
            self._flush()

    def _flush(self) -> None:
        """Write all buffers."""
        for file, buffer in sorted(self._buffers.items()) if self._folder is not None else ():
            with (
                disk_errors(self._path(file), _ADVICE),
                open(self._path(file), "ab", buffering=0) as out,
            ):
                data = memoryview(b"".join(buffer))
                while data:
                    data = data[out.write(data) :]
        self._buffers.clear()
        self._held = 0

    def _path(self, file: int) -> str:
        return os.path.join(self._folder or "", f"{file:03d}")

    def finish(self, name: str) -> IndexCatalog:
        """Return the samples by file, and in the order in which they came."""
        self._flush()
        files = np.array(self._files, np.int32)
        order = np.argsort(files, kind="stable")
        counts = np.bincount(files).tolist()
        shards = [
            Shard(self._path(file), counts[file], stop)
            for file, stop in sorted(self._stops.items())
        ]
        places = dict(zip(order.tolist(), range(len(order)), strict=True)) if self._renamed else {}
        renamed = {places[number]: row for number, row in self._renamed.items()}
        index = Index(tuple(shards), self._rows.offsets().take(order))
        return IndexCatalog(name, index, self._meta.finish().take(order), renamed)


def _save(source: Source, folder: str, done: Collected, bad: list[BadSample]) -> None:
    """Save what `_restored` needs: the index of the buckets, with the properties as columns."""
    catalog = done.catalog
    assert isinstance(catalog, IndexCatalog)
    meta = catalog.meta
    columns = [
        Column(name, "integer", name, is_label=False, values=pa.array(values.astype(np.int64)))
        for name, values in zip(meta._fields, meta.arrays, strict=False)
    ]
    extra = {
        "identity": _identity(source),
        "meta": meta[4:],
        "renamed": list(catalog.renamed.items()),
        "bad": bad,
        "listed": done.listed,
        "ignored": source.ignored,
    }
    for shard in catalog.index.shards:
        with disk_errors(shard.path, _ADVICE), open(shard.path, "rb") as file:
            os.fsync(file.fileno())
    sync_folder(folder)  # after a power cut, the file implies all buckets
    index = replace(catalog.index.with_columns(columns), labels=done.labels)
    write_whole(os.path.join(folder, _DONE), pack_part(index, extra))


def _restored(source: Source, folder: str, bad: BadSamples) -> Collected | None:
    """Return what an earlier run collected of the same source; None if it did not finish."""
    path = os.path.join(folder, _DONE)
    try:
        with open(path, "rb") as file:
            index, about = unpack_part(file.read(), path)
    except (OSError, ShardError):
        return None
    if source.mark is None or about["identity"] != _identity(source):
        return None
    types = (np.uint64, np.uint64, np.int32, np.int32)
    arrays = (as_numpy(c.values).astype(t) for c, t in zip(index.columns, types, strict=True))
    meta = SampleMeta(*arrays, *about["meta"])
    for row in about["bad"]:
        bad.put(BadSample(*row))
    source.ignored.update(about["ignored"])
    labels, index = index.labels, replace(index.with_columns(()), labels=())
    catalog = IndexCatalog(source.name, index, meta, dict(about["renamed"]))
    return Collected(catalog, labels, about["listed"])


def _identity(source: Source) -> str:
    """Return a hash of the input that the spool depends on. Only equal options are resumed."""
    words = repr((source.name, source.mark, source.source))
    return blake2b(words.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
