"""Write a stream into shards in its own order, in one pass and without a copy on the disk."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from itertools import islice

import numpy as np

from wdstrain.conversion.images import Recipe
from wdstrain.conversion.listing import BadSample, BadSamples, Keys, Stream
from wdstrain.conversion.options import Options, check_splits
from wdstrain.conversion.result import Tally
from wdstrain.conversion.sample_meta import MetaBuilder
from wdstrain.conversion.shard_plan import check_prefixes
from wdstrain.conversion.shard_writer import Packed, ShardFile
from wdstrain.conversion.upload import ShardUploads
from wdstrain.errors import SampleError, StorageError, UsageError
from wdstrain.runtime.options import as_bytes
from wdstrain.shards.tar_headers import END, member_size

Progress = Callable[[int, int], None]  # receives samples and bytes so far


def can_write_directly(options: Options) -> bool:
    """Return whether samples can be written as they come: nothing depends on later samples."""
    decided_later = (options.split, options.resize, options.quality, options.num_shards)
    return not options.shuffle and not options.append and not any(decided_later)


class StreamWriter:
    """Writes the samples of a stream into shards; one shard of each split is open at a time.

    packed, tally, listed: the shards, counts, and samples so far, bad ones included.
    """

    def __init__(
        self,
        folder: str,
        options: Options,
        bad: BadSamples,
        *,
        write: bool,
        uploads: ShardUploads | None,
    ) -> None:
        self.packed, self.tally, self.listed = list[Packed](), Tally(), 0
        self._folder, self._options, self._bad, self._write = folder, options, bad, write
        self._uploads = uploads
        self._recipe, self._meta = Recipe.of(options), MetaBuilder(options.seed)
        self._room = max(1, as_bytes(options.max_shard_size) - len(END))
        self._open: dict[str, ShardFile] = {}
        self._keys: dict[str, Keys] = {}  # by split
        self._numbers: dict[str, int] = {}  # of shards, by split
        self._size = 0

    def run(self, stream: Stream, progress: Progress) -> None:
        """Write all samples. Raises SourceError for a bad sample, StorageError for a full disk."""
        before, count, unfit = len(self._bad.bad), 0, 0
        try:
            with ExitStack() as stack:
                for sample in islice(stream.entries(self._bad), self._options.limit):
                    name = f"{count:09d}" if sample.key is None else sample.key
                    count += 1
                    if sample.group:
                        raise UsageError(
                            "group requires split. Give split={'train': 0.9, 'val': 0.1}."
                        )
                    try:
                        parts = self._recipe.apply(sample.parts)
                    except SampleError as error:
                        self._bad.put(BadSample(stream.name, 0, name, str(error)))
                        unfit += 1  # counted below, as an entry of the stream and as a bad sample
                        continue
                    split = sample.split or "train"
                    key = self._key(split, name)
                    size = sum(member_size(f"{key}.{field}", len(data)) for field, data in parts)
                    shard = self._shard(split, size, stack)
                    shard.add(key, parts)
                    self._size += size
                    self._meta.add(key, split, "", sample.stratum, sample.identity)
                    if key != name:
                        self.tally.renamed.append({"key": key, "name": name})
                    progress(count, self._size)
                for shard in self._open.values():
                    self._finish(shard)
            self._sort_and_count()
        except OSError as error:
            raise StorageError(
                f"{self._folder} cannot be written: {error.strerror}. Free some space or choose "
                f"another folder, then run it again with resume=True."
            ) from error
        self.listed = count + len(self._bad.bad) - before - unfit

    def _key(self, split: str, name: str) -> str:
        if split not in self._keys:
            check_splits([split])
            self._keys[split] = Keys()
            check_prefixes(list(self._keys))
        return self._keys[split].key(name)

    def _shard(self, split: str, size: int, stack: ExitStack) -> ShardFile:
        """Return the open shard of a split, or a new one if the next sample does not fit."""
        shard, most = self._open.get(split), self._options.max_shard_samples
        if shard is not None and (shard.bytes + size > self._room or len(shard) == most):
            self._finish(shard)
            shard = None
        if shard is None:
            number = self._numbers[split] = self._numbers.get(split, -1) + 1
            path = os.path.join(self._folder, f"{split}-{number:06d}.tar")
            shard = stack.enter_context(ShardFile(path, split, write=self._write))
            self._open[split] = shard
        return shard

    def _finish(self, shard: ShardFile) -> None:
        index = shard.finish()
        if self._uploads is not None:
            self._uploads.add(index.shards[0], index.shards[0].path)
        self.packed.append(Packed(index, np.arange(len(index)), []))

    def _sort_and_count(self) -> None:
        """Sort the shards by split, in the order of their first samples, and count the samples."""
        splits, meta = list(self._numbers), self._meta.finish()
        self.packed.sort(key=lambda part: splits.index(part.index.shards[0].split))
        for code, split in enumerate(meta.splits):
            numbers = np.flatnonzero(meta.split == code)
            self.tally.add(split, meta, numbers, numbers)
