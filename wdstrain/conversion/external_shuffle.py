"""First pass of an external shuffle: write a stream into files from which any order can be read.

Samples are written into buckets, with the headers that they have in a shard. Each bucket is a file
for a range of shuffle ranks, or of sample numbers if the order is kept. A shard is then read
forward from one bucket or two. Data is written twice in all, sequentially. Memory holds the write
buffers, within `memory`, and about 100 bytes per sample.

A shuffle buffer is not used: its order would depend on its size, and a small one mixes badly.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from itertools import islice
from typing import Any
from zipfile import BadZipFile

import numpy as np

from wdstrain.conversion.catalog import SpanCatalog
from wdstrain.conversion.listing import BadSample, BadSamples, Stream, StreamSample, tidy
from wdstrain.conversion.options import Options
from wdstrain.conversion.sample_meta import MetaBuilder, SampleMeta
from wdstrain.conversion.shard_writer import IndexBuilder
from wdstrain.errors import StorageError
from wdstrain.runtime.options import as_bytes
from wdstrain.shards.kinds import ColumnInfo
from wdstrain.shards.offsets import Offsets, arrow_file
from wdstrain.storage.files import sync_folder, write_whole

_RUN = 256 << 20  # bytes of a bucket if the order of the source is kept
_DONE = "spill.npz"
_ABOUT = "spill.json"
_META = ("rank", "side", "image", "split", "stratum")  # arrays of SampleMeta

Progress = Callable[[int, int], None]  # samples and bytes so far


def shuffle_stream(
    stream: Stream,
    folder: str | None,
    options: Options,
    bad_samples: BadSamples,
    progress: Progress,
    first_key: int = 0,
) -> tuple[SpanCatalog, tuple[ColumnInfo, ...], int]:
    """Write a stream, or its first `limit` samples, into files in `folder`.

    Returns the samples, their labels, and the number of entries that were read, bad ones included.
    folder: None counts the samples and writes nothing. first_key: key, as a number, of the first
    sample without a key.
    """
    if folder is not None:
        with suppress(FileNotFoundError):  # describes files that are about to be overwritten
            os.unlink(os.path.join(folder, _ABOUT))
            sync_folder(folder)
    writer = _BucketWriter(folder, options, first_key)
    before = len(bad_samples.bad)
    for entry in islice(stream.entries(bad_samples), options.limit):
        writer.add(entry)
        progress(writer.count, writer.bytes)
    writer.flush()
    catalog = writer.catalog(stream.name)
    labels = stream.labels()
    entries = writer.count + len(bad_samples.bad) - before
    if stream.mark is not None and folder is not None:
        writer.save(
            _identity(stream, options), labels, bad_samples.bad[before:], entries, stream.ignored
        )
    return catalog, labels, entries


def restore_shuffle(
    stream: Stream, folder: str, options: Options, bad_samples: BadSamples
) -> tuple[SpanCatalog, tuple[ColumnInfo, ...], int] | None:
    """Return the result of `shuffle_stream` in an earlier run; None if it did not finish."""
    try:
        with open(os.path.join(folder, _ABOUT), encoding="utf-8") as file:
            about = json.load(file)
        if stream.mark is None or about["identity"] != _identity(stream, options):
            return None
        with np.load(os.path.join(folder, _DONE), allow_pickle=False) as archive:
            arrays = dict(archive)
    except (OSError, ValueError, KeyError, BadZipFile):
        return None
    per_sample: dict[str, Any] = {name: arrays.pop(name) for name in _META}
    splits, strata = map(tuple, about["names"])
    meta = SampleMeta(**per_sample, splits=splits, strata=strata, grouped=about["grouped"])
    file_, offsets = arrays["file_of"], Offsets.of_bytes(about["fields"], arrays["rows"], ())
    paths = [os.path.join(folder, f"{number:03d}") for number in range(about["files"])]
    renamed, names = (
        {int(number): key for number, key in about[name].items()}
        for name in ("renamed", "original")
    )
    catalog = SpanCatalog(stream.name, paths, file_, offsets, meta, renamed)
    catalog.names.update(names)
    for row in about["bad"]:
        bad_samples.put(BadSample(*row))
    stream.ignored.update(about["ignored"])
    labels = tuple(map(ColumnInfo.of_row, about["labels"]))
    return catalog, labels, about["entries"]


def _identity(stream: Stream, options: Options) -> str:
    """Return a hash of everything that the written files depend on."""
    words = (
        stream.name,
        stream.mark,
        stream.source,
        options.seed,
        options.shuffle,
        options.limit,
        options.split is None,
    )
    return blake2b(
        repr((*words, options.on_error)).encode("utf-8", "surrogateescape"), digest_size=16
    ).hexdigest()


class _BucketWriter:
    """Writes samples into buckets, and collects their positions and properties."""

    def __init__(self, folder: str | None, options: Options, first_key: int) -> None:
        self._write, self._first_key, folder = folder is not None, first_key, folder or ""
        self._folder, self._shuffle = folder, options.shuffle
        self._most = as_bytes(options.memory) // 6  # bytes of all buffers
        self._resplit = options.split is not None
        self._meta = MetaBuilder(options.seed)
        self._hashes = self._meta.hashes
        self._buffers: dict[int, list[bytes]] = {}
        self._held = 0
        self._offsets: dict[int, int] = {}
        self._opened: set[int] = set()
        self.count = self.bytes = 0
        self._rows = IndexBuilder()
        self._names: dict[int, str] = {}
        self._folds, self._files = array("Q"), array("i")

    def add(self, entry: StreamSample) -> None:
        key = f"{self._first_key + self.count:09d}" if entry.key is None else tidy(entry.key)
        if entry.key is not None and key != entry.key:
            self._names[self.count] = entry.key
        rank = self._meta.add(key, entry.split, entry.group, entry.stratum, entry.identity)
        # 256 buckets: each fits in memory if the stream is below 256 times `memory`.
        file = rank >> 56 if self._shuffle else self.bytes // _RUN
        start = self._offsets.get(file, 0)
        buffer = self._buffers.get(file)
        if buffer is None:
            buffer = self._buffers[file] = []
        buffer += self._rows.add(key, entry.parts, start)
        self._folds.append(self._hashes.of(key.casefold()))
        self._files.append(file)
        self._offsets[file] = self._rows.stop
        self.count += 1
        self.bytes += self._rows.stop - start
        self._held += self._rows.stop - start
        if self._held > self._most:
            self.flush()

    def flush(self) -> None:
        """Write all buffers."""
        for file, buffer in sorted(self._buffers.items()) if self._write else ():
            with (
                _disk_errors(self._path(file)),
                open(self._path(file), "ab" if file in self._opened else "wb", buffering=0) as out,
            ):
                self._opened.add(file)
                data = memoryview(b"".join(buffer))
                while data:
                    data = data[out.write(data) :]
        self._buffers.clear()
        self._held = 0

    def _path(self, file: int) -> str:
        return os.path.join(self._folder, f"{file:03d}")

    def catalog(self, name: str) -> SpanCatalog:
        paths = [self._path(number) for number in range(max(self._opened, default=-1) + 1)]
        files = np.array(self._files, np.int32)
        self._made = SpanCatalog(
            name,
            paths,
            files,
            self._rows.offsets(),
            self._meta.finish(),
        )
        self._made.names.update(self._names)
        self._rename_duplicates(self._made)
        return self._made

    def _rename_duplicates(self, made: SpanCatalog) -> None:
        """Append -2, -3, ... to keys that came before in their split, in upper or lower case."""
        folds, split = np.array(self._folds, np.uint64), made.meta.split * (not self._resplit)
        order = np.lexsort((np.arange(len(folds)), folds, split))
        same = (
            (np.diff(folds[order]) == 0) & (np.diff(split[order]) == 0)
            if len(order)
            else np.zeros(0, bool)
        )
        taken = set() if not same.any() else set(zip(split.tolist(), folds.tolist(), strict=True))
        # By (split, key): the number that was given last. All numbers below it are taken.
        last: dict[tuple[int, int], int] = {}
        for number in np.sort(order[1:][same]).tolist():
            place, key = (int(split[number]), int(folds[number])), made.own_key(number)
            times = last.get(place, 1) + 1
            while (int(split[number]), self._hashes.of(f"{key}-{times}".casefold())) in taken:
                times += 1
            last[place] = times
            made.renamed[number] = f"{key}-{times}"
            made.names.setdefault(number, key)
            taken.add((int(split[number]), self._hashes.of(made.renamed[number].casefold())))
            made.meta.rank[number] = self._hashes.of(made.renamed[number])

    def save(
        self,
        identity: str,
        labels: tuple[ColumnInfo, ...],
        bad: list[BadSample],
        entries: int,
        ignored: dict[str, int],
    ) -> None:
        """Save everything that `restore_shuffle` needs."""
        made = self._made
        arrays = {name: getattr(made.meta, name) for name in _META}
        arrays |= {
            "file_of": made.file,
            "rows": np.frombuffer(arrow_file(made.offsets.rows), np.uint8),
        }
        about = {
            "identity": identity,
            "names": [made.meta.splits, made.meta.strata],
            "grouped": made.meta.grouped,
            "files": len(made.paths),
            "fields": made.offsets.fields,
            "renamed": made.renamed,
            "original": made.names,
            "bad": bad,
            "labels": [label.row for label in labels],
            "entries": entries,
            "ignored": ignored,
        }
        done = os.path.join(self._folder, _DONE)
        with _disk_errors(done):
            for number in sorted(self._opened):
                with open(self._path(number), "rb") as file:
                    os.fsync(file.fileno())
            with open(done, "wb") as out:
                np.savez(out, allow_pickle=False, **arrays)
                out.flush()
                os.fsync(out.fileno())
            write_whole(os.path.join(self._folder, _ABOUT), json.dumps(about).encode())


@contextmanager
def _disk_errors(path: str) -> Iterator[None]:
    """Raise StorageError for errors of the disk."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"{path} cannot be written: {error.strerror}. Free some space, then run this again "
            "with resume=True."
        ) from error
