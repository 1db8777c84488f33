"""Result of a conversion: progress, counts, final names of shards, lists of samples, provenance."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from wdstrain.conversion.catalog import SampleMeta
from wdstrain.conversion.listing import BadSample, Source
from wdstrain.conversion.options import Options
from wdstrain.conversion.shard_writer import Packed
from wdstrain.conversion.staging import RENAMED_NAME, SKIPPED_NAME, Staging
from wdstrain.decode.formats import is_image
from wdstrain.shards.index import Index, join
from wdstrain.shards.index_io import json_bytes
from wdstrain.shards.kinds import ColumnInfo
from wdstrain.shards.offsets import Ints
from wdstrain.storage.files import read_whole, write_whole

# Numbers and quoted names in a reason, which differ from sample to sample.
_DETAIL = re.compile(r"'[^']*'|\"[^\"]*\"|\d+")

ClassCounts = dict[str, dict[str, int]]  # {split: {class: samples}}; "" is the class of no class


class Step(NamedTuple):
    """Progress of a conversion. total: None if it is unknown."""

    title: str
    done: int
    total: int | None
    bytes: int
    bad: int


Progress = Callable[[Step], None]


@dataclass(frozen=True)
class ConversionResult:
    """Result of a conversion.

    info: counts of its samples: `listed` = packed + skipped (`bad`) + left out by `limit`; `renamed`;
    `samples` by split and class; `divided`, images of several samples that are in different splits;
    `ignored` by reason. kept: shards that an earlier run had written.
    """

    index: Index
    info: dict[str, Any]
    bad: list[BadSample]
    kept: int = 0

    @property
    def packed(self) -> int:
        """Number of samples that were packed."""
        return sum(sum(counts.values()) for counts in self.info["samples"].values())

    @property
    def limited(self) -> int:
        """Number of good samples that the option `limit` left out."""
        return int(self.info["listed"]) - len(self.bad) - self.packed

    @property
    def skipped_reasons(self) -> dict[str, int]:
        """Number of skipped samples by reason, the most frequent first."""
        return count_reasons(self.bad)


def count_reasons(bad: Iterable[BadSample]) -> dict[str, int]:
    """Return the number of bad samples by reason, the most frequent first.

    Reasons that differ only in numbers and quoted names are counted together, under the first.
    """
    first: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for sample in bad:
        counts[first.setdefault(_DETAIL.sub("*", sample.reason), sample.reason)] += 1
    return dict(counts.most_common())


def read_result(out: str, index: Index) -> ConversionResult:
    """Return the result of a finished conversion from what its index records."""
    rows = (read_whole(os.path.join(out, SKIPPED_NAME)) or b"").splitlines()
    bad = [BadSample(**{**row, "row": row["row"] or 0}) for row in map(json.loads, rows)]
    return ConversionResult(index, index.info, bad, kept=len(index.shards))


class Written:
    """The shards of a run under their final names, as they are finished.

    parts: the index of each, and the numbers of its samples in the source. files: {final name: name
    in the folder where they were written}. kept: number of shards that an earlier run had written.
    """

    def __init__(self, staging: Staging, taken: Iterable[str] = ()) -> None:
        """taken: names of the shards that are there; numbers begin after theirs."""
        self._taken, self._bucket = list(taken), staging.bucket
        self._folder = staging.shown.rstrip("/")
        self._numbers = dict[str, Iterator[int]]()
        self.parts, self.files, self.kept = list[tuple[Index, Ints]](), dict[str, str](), 0

    def add(self, part: Packed) -> None:
        """Take a shard, and upload it. One without samples gets no name."""
        self.kept += part.is_kept
        if not len(part.numbers):
            return
        shard = part.index.shards[0]
        following = count(_free_number(shard.split, self._taken))
        number = next(self._numbers.setdefault(shard.split, following))
        named = replace(shard, path=f"{self._folder}/{shard.split}-{number:06d}.tar")
        self.parts.append((replace(part.index, shards=(named,)), part.numbers))
        self.files[named.name] = shard.name
        if self._bucket is not None:
            self._bucket.upload(named, shard.path)


def _free_number(split: str, names: Iterable[str]) -> int:
    """Return the first shard number of a split above all numbers in `names`."""
    shard = re.compile(rf"{re.escape(split)}-(\d+)\.tar")
    return max((int(name[1]) for name in map(shard.fullmatch, names) if name), default=-1) + 1


# --- counts --------------------------------------------------------------------------------------


def counted(
    meta: SampleMeta, places: Iterable[tuple[str, Ints]], labels: Iterable[ColumnInfo]
) -> ClassCounts:
    """Return the number of samples by split and class. places: a split and numbers of samples.

    Classes are in the order of the labels, then by name.
    """
    order = {name: place for label in labels for place, name in enumerate(label.classes)}
    sums = dict[str, Ints]()
    for split, numbers in places:
        counts = np.bincount(meta.stratum[numbers], minlength=len(meta.strata))
        sums[split] = sums.get(split, 0) + counts
    ranked = sorted(enumerate(meta.strata), key=lambda row: (order.get(row[1], len(order)), row[1]))
    return {
        split: {name: int(counts[code]) for code, name in ranked if counts[code]}
        for split, counts in sums.items()
    }


def divided_images(parts: Iterable[Index]) -> int:
    """Return the number of images in several splits, compared by size and checksum."""
    index = join([part.with_columns([]) for part in parts if part.offsets.has_checksums])
    # an image beside the main one (seg.png) is data that many samples may share
    fields = [name for name in index.fields if is_image(name) and "." not in name]
    members = index.offsets.members_of(np.arange(len(index)), fields)
    identity = members.size.astype(np.uint64) << np.uint64(32) | members.crc.astype(np.uint64)
    names = index.splits
    split = np.array([names.index(shard.split) for shard in index.shards])
    split = split[index.shard_of(members.row)]
    distinct = [np.unique(identity[split == code]) for code in range(len(names))]
    return int((np.unique(np.concatenate(distinct), return_counts=True)[1] > 1).sum())


# --- files beside the shards ---------------------------------------------------------------------


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
    """Return the provenance of a set: source, options, splits, samples by split and class."""
    made: dict[str, Any] = {
        "source": source.source,
        "options": options.saved(),
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
