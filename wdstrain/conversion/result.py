"""Result of a conversion: progress, counts, final names of shards, lists of samples, provenance."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from wdstrain.conversion.catalog import Renamed, SampleMeta
from wdstrain.conversion.listing import BadSample, Source
from wdstrain.conversion.options import Options
from wdstrain.conversion.shard_writer import Packed
from wdstrain.conversion.staging import RENAMED_NAME, SKIPPED_NAME
from wdstrain.decode.formats import is_image
from wdstrain.shards.index import Index
from wdstrain.shards.index_io import json_bytes
from wdstrain.shards.kinds import ColumnInfo
from wdstrain.shards.offsets import Ints
from wdstrain.storage.files import read_whole, write_whole

# Numbers and quoted names in a reason, which differ from sample to sample.
_DETAIL = re.compile(r"'[^']*'|\"[^\"]*\"|\d+")

Hashes = npt.NDArray[np.uint64]
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
    """Result of a conversion. listed = packed + skipped (`bad`) + left out by `limit`.

    samples: number of samples by split and class. kept: shards that an earlier run had written.
    divided: images of several samples that are in different splits.
    """

    index: Index
    listed: int
    bad: list[BadSample]
    renamed: int
    samples: ClassCounts
    ignored: dict[str, int] = field(default_factory=dict)
    kept: int = 0
    limited: int = 0
    divided: int = 0

    @property
    def packed(self) -> int:
        """Number of samples that were packed."""
        return self.listed - len(self.bad) - self.limited

    def moved_to(self, folder: str) -> ConversionResult:
        """Return the result with the shards in another folder, or in a bucket."""
        shards = tuple(
            replace(shard, path=f"{folder.rstrip('/')}/{shard.name}") for shard in self.index.shards
        )
        return replace(self, index=replace(self.index, shards=shards))

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
    info, bad = index.info, []
    with suppress(FileNotFoundError), open(os.path.join(out, SKIPPED_NAME), "rb") as file:
        bad = [BadSample(**{**row, "row": row["row"] or 0}) for row in map(json.loads, file)]
    return ConversionResult(
        index,
        info["listed"],
        bad,
        info["renamed"],
        info["samples"],
        info["ignored"],
        kept=len(index.shards),
        limited=info["listed"] - len(index) - len(bad),
        divided=info.get("divided", 0),
    )


class Tally:
    """Counts of the samples that were packed: by split and class, renamed, in several splits."""

    def __init__(self, meta: SampleMeta, renamed: Renamed) -> None:
        """meta, renamed: of the samples as the source has them, before images were encoded."""
        self._meta, self._renamed = meta, renamed
        self._images: dict[str, list[Hashes]] = {}  # hashes of images, by split
        self.samples: ClassCounts = {}
        self.renamed: list[dict[str, str]] = []

    def add(self, split: str, numbers: Ints) -> None:
        """Count the samples of a shard."""
        counts = self.samples.setdefault(split, {})
        codes, sums = np.unique(self._meta.stratum[numbers], return_counts=True)
        for code, count in zip(codes, sums, strict=True):
            name = self._meta.strata[code]
            counts[name] = counts.get(name, 0) + int(count)
        hashes = self._meta.image[numbers]
        self._images.setdefault(split, []).append(hashes[hashes != 0])
        rows = map(self._renamed.get, numbers.tolist()) if self._renamed else ()
        self.renamed += [row for row in rows if row is not None]

    @property
    def divided(self) -> int:
        """Number of images that samples of different splits have."""
        return _in_several(self._images)

    def sorted_samples(self, labels: Iterable[ColumnInfo]) -> ClassCounts:
        """Return `samples` with the classes of each split in the order of the labels."""
        order = {name: place for label in labels for place, name in enumerate(label.classes)}
        return {split: sorted_counts(counts, order) for split, counts in self.samples.items()}


def divided_images(parts: Iterable[Index]) -> int:
    """Return the number of images in several splits, compared by size and checksum."""
    by_split: dict[str, list[Hashes]] = {}
    for index in parts:
        table = index.offsets
        if not table.has_checksums:
            continue
        # an image beside the main one (seg.png) is data that many samples may share
        fields = [name for name in index.fields if is_image(name) and "." not in name]
        members = table.members_of(np.arange(len(index)), fields)
        identity = members.size.astype(np.uint64) << np.uint64(32)
        identity |= members.crc.astype(np.uint64)
        shard_of = index.shard_of(members.row)
        for number, shard in enumerate(index.shards):
            by_split.setdefault(shard.split, []).append(identity[shard_of == number])
    return _in_several(by_split)


def _in_several(by_split: dict[str, list[Hashes]]) -> int:
    """Return the number of hashes in several splits."""
    distinct = [np.unique(np.concatenate(hashes)) for hashes in by_split.values()]
    counts = np.unique(np.concatenate(distinct), return_counts=True)[1] if distinct else np.zeros(0)
    return int((counts > 1).sum())


def sorted_counts(counts: dict[str, int], order: dict[str, int]) -> dict[str, int]:
    """Return counts by class in the order of the class numbers, then by name."""
    rows = sorted(counts.items(), key=lambda item: (order.get(item[0], len(order)), item[0]))
    return dict(rows)


def merged_counts(parts: Iterable[Any], labels: Iterable[ColumnInfo]) -> ClassCounts:
    """Return the sum of several counts by split and class."""
    order = {name: place for label in labels for place, name in enumerate(label.classes)}
    merged: dict[str, Counter[str]] = {}
    for part in parts:
        for split, counts in part.items():
            merged.setdefault(split, Counter()).update(counts)
    return {split: sorted_counts(counts, order) for split, counts in merged.items()}


# --- files beside the shards ---------------------------------------------------------------------


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
