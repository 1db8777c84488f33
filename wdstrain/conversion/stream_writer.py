"""Write a stream into shards in its own order, in one pass and without a copy on the disk."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np

from wdstrain.conversion.catalog import MetaBuilder, Renamed, SampleMeta
from wdstrain.conversion.collect import keyed
from wdstrain.conversion.images import Recipe
from wdstrain.conversion.listing import BadSamples, Source
from wdstrain.conversion.options import Options, check_splits
from wdstrain.conversion.shard_plan import check_prefixes
from wdstrain.conversion.shard_writer import Packed, ShardFile
from wdstrain.errors import StorageError, UsageError
from wdstrain.runtime.options import as_bytes
from wdstrain.shards.tar_headers import END, member_size


def can_write_directly(source: Source, options: Options) -> bool:
    """Return whether samples can be written as they come: nothing depends on later samples."""
    decided_later = (options.split, options.resize, options.quality, options.num_shards)
    is_ordered = not (options.shuffle or options.append or source.has_files)
    return is_ordered and not any(decided_later)


@dataclass
class _Open:
    """A shard that is being written. numbers: of its samples in the stream."""

    file: ShardFile
    numbers: list[int] = field(default_factory=list)


def write_stream(
    source: Source,
    folder: str,
    options: Options,
    bad: BadSamples,
    progress: Callable[[int, int], None],
    done: Callable[[Packed], None],
) -> tuple[SampleMeta, Renamed]:
    """Write all samples into shards; one of each split is open at a time.

    progress: receives samples and bytes so far. done: receives each shard. Returns the properties
    of the samples. Raises SourceError for a bad sample, StorageError for a full disk.
    """
    meta, renamed, count, size = MetaBuilder(options.seed), Renamed(), 0, 0
    room = max(1, as_bytes(options.max_shard_size) - len(END))
    shards: dict[str, _Open] = {}
    begun: dict[str, int] = {}  # shards of each split

    def finish(shard: _Open) -> None:
        done(Packed(shard.file.finish(), np.array(shard.numbers, np.int64), []))

    try:
        with ExitStack() as stack:
            for key, name, sample in keyed(source, options, bad, recipe=Recipe.of(options)):
                if sample.group:
                    raise UsageError("group requires split. Give split={'train': 0.9, 'val': 0.1}.")
                split = sample.split or "train"
                sizes = [member_size(f"{key}.{f}", len(data)) for f, data in sample.parts]
                shard = shards.get(split)
                if shard is not None and (
                    shard.file.bytes + sum(sizes) > room
                    or len(shard.file) == options.max_shard_samples
                ):
                    finish(shards.pop(split))
                if split not in shards:
                    check_splits([split])
                    check_prefixes([*begun, split])
                    number = begun[split] = begun.get(split, -1) + 1
                    path = os.path.join(folder, f"{split}-{number:06d}.tar")
                    shards[split] = _Open(stack.enter_context(ShardFile(path, split)))
                shards[split].file.add(key, sample.parts)
                shards[split].numbers.append(count)
                meta.add(key, sample)
                if key != name:
                    renamed[count] = {"key": key, "name": name}
                count, size = count + 1, size + sum(sizes)
                progress(count, size)
            for shard in shards.values():
                finish(shard)
    except OSError as error:
        raise StorageError(
            f"{folder} cannot be written: {error.strerror}. Free some space or choose another "
            f"folder, then run it again with resume=True."
        ) from error
    return meta.finish(), renamed
