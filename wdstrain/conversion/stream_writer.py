"""Write a stream into shards in its own order, in one pass and without a copy on the disk."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np

from wdstrain.conversion.catalog import MetaBuilder, Renamed, SampleMeta
from wdstrain.conversion.collect import keyed
from wdstrain.conversion.images import Recipe
from wdstrain.conversion.listing import BadSamples, Source
from wdstrain.conversion.options import Options, check_splits
from wdstrain.conversion.shard_plan import check_prefixes
from wdstrain.conversion.shard_writer import Packed, ShardFile
from wdstrain.errors import UsageError
from wdstrain.runtime.options import as_bytes
from wdstrain.shards.tar_headers import END, member_size
from wdstrain.storage.files import disk_errors


def can_write_directly(source: Source, options: Options) -> bool:
    """Return whether samples can be written as they come: nothing depends on later samples."""
    decided_later = (options.split, options.resize, options.quality, options.num_shards)
    is_ordered = not (options.shuffle or options.append or source.has_files)
    return is_ordered and not any(decided_later)


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
    shards: dict[str, ShardFile] = {}
    begun: dict[str, int] = {}  # shards of each split

    def finish(shard: ShardFile) -> None:
        done(Packed(shard.finish(), np.array(shard.places, np.int64), []))

    advice = "Free some space or choose another folder, then run it again with resume=True."
    with disk_errors(folder, advice), ExitStack() as stack:
        for key, name, sample in keyed(source, options, bad, recipe=Recipe.of(options)):
            if sample.group:
                raise UsageError("group requires split. Give split={'train': 0.9, 'val': 0.1}.")
            split = sample.split or "train"
            added = sum(member_size(f"{key}.{f}", len(data)) for f, data in sample.parts)
            shard = shards.get(split)
            if shard is not None and (
                shard.bytes + added > room or len(shard) == options.max_shard_samples
            ):
                finish(shard)
                shard = None
            if shard is None:
                check_splits([split])
                check_prefixes([*begun, split])
                number = begun[split] = begun.get(split, -1) + 1
                path = os.path.join(folder, f"{split}-{number:06d}.tar")
                shard = shards[split] = stack.enter_context(ShardFile(path, split))
            shard.add(key, sample.parts, count)
            meta.add(key, sample)
            if key != name:
                renamed[count] = {"key": key, "name": name}
            count, size = count + 1, size + added
            progress(count, size)
        for shard in shards.values():
            finish(shard)
    return meta.finish(), renamed
