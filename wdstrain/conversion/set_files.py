"""Files of a set beside the bytes of its samples: names of shards, lists of samples, its record."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from wdstrain.conversion.listing import BadSample, Source
from wdstrain.conversion.options import Options
from wdstrain.conversion.result import ClassCounts
from wdstrain.conversion.resume import saved_options
from wdstrain.conversion.set_exchange import RENAMED_NAME, SKIPPED_NAME
from wdstrain.conversion.shard_writer import Packed
from wdstrain.shards.index import Index
from wdstrain.shards.index_io import json_bytes
from wdstrain.storage.files import read_whole, write_whole


def renumbered(
    packed: list[Packed], folder: str, taken: list[str]
) -> tuple[list[Index], dict[str, str]]:
    """Return the indexes of the shards with samples, under their final names.

    Also returns {final name: name in `folder`}. Shards without samples get no number. taken: names
    of the shards that are there; numbers begin after theirs.
    """
    parts, files, numbers = [], {}, dict[str, int]()
    for part in packed:
        shard = part.index.shards[0] if part.index.shards else None
        if shard is None or not shard.samples:
            continue
        if shard.split not in numbers:
            numbers[shard.split] = free_number(shard.split, taken) - 1
        number = numbers[shard.split] = numbers[shard.split] + 1
        name = f"{shard.split}-{number:06d}.tar"
        files[name] = shard.name
        parts.append(replace(part.index, shards=(replace(shard, path=os.path.join(folder, name)),)))
    return parts, files


def free_number(split: str, names: Iterable[str]) -> int:
    """Return the first shard number of a split above all numbers in `names`."""
    numbers = [
        int(name[len(split) + 1 : -4])
        for name in names
        if name.startswith(f"{split}-")
        and name.endswith(".tar")
        and name[len(split) + 1 : -4].isdecimal()
    ]
    return max(numbers, default=-1) + 1


def write_lists(
    folder: str, bad: Sequence[BadSample], renamed: Sequence[dict[str, str]], former: str | None
) -> dict[str, str]:
    """Write the lists of skipped and of renamed samples, and return {final name: name in `folder`}.

    former: folder of the set that an append extends; its lists are kept.
    """
    files = {}
    for name, rows in (
        (SKIPPED_NAME, [sample.portable() for sample in bad]),
        (RENAMED_NAME, renamed),
    ):
        if rows:
            before = read_whole(os.path.join(former, name)) if former is not None else None
            data = (before or b"") + b"".join(map(json_bytes, rows))
            write_whole(os.path.join(folder, name), data)
            files[name] = name
    return files


def record(source: Source, options: Options, samples: ClassCounts) -> dict[str, Any]:
    """Return how a set was made: source, options, splits, and samples by split and class."""
    made: dict[str, Any] = {
        "source": source.source,
        "options": saved_options(options),
        "samples": samples,
        "ignored": source.ignored,
    }
    if options.split:
        sums = {split: sum(counts.values()) for split, counts in samples.items()}
        made["split"] = {
            "shares": options.split,
            "got": {split: count / sum(sums.values()) for split, count in sums.items()},
            "stratify": options.stratify,
            "group_by": source.source.get("group_by"),
            "seed": options.seed,
        }
    return made
