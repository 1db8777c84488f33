"""Convert a source into a folder of shards and their index.

    source --collect--> catalog --plan_shards--> plan --write_shards--> shards -> index -> in place
                         |  ^
    images re-encoded <--+  |   (with resize or quality: their sizes must be known)
             +--------------+

The plan depends on the catalog and the options alone, so any number of workers gives the same
bytes. Everything is written into a staging folder (`staging`). Each shard carries the identity of
its samples, so `resume` writes only what is missing.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from wdstrain.conversion.changes import (
    appended,
    check_keys,
    check_labels,
    is_repeated,
    next_numbered_key,
)
from wdstrain.conversion.collect import Catalog, collect
from wdstrain.conversion.encode import Recipe
from wdstrain.conversion.listing import BadSample, BadSamples, Source, reject
from wdstrain.conversion.options import Options
from wdstrain.conversion.packing import (
    Packed,
    PlannedShard,
    batches,
    chosen,
    plan_shards,
    write_shards,
)
from wdstrain.conversion.staging import FROM_FILES, RENAMED_NAME, SKIPPED_NAME, Staging
from wdstrain.errors import SourceError, UsageError
from wdstrain.runtime.options import refuse
from wdstrain.shards.columns import Column
from wdstrain.shards.declare import class_counts, with_labels
from wdstrain.shards.formats import is_image
from wdstrain.shards.index import Index, Shard, join
from wdstrain.shards.index_io import json_bytes
from wdstrain.shards.kinds import ColumnInfo
from wdstrain.shards.offsets import Ints, Offsets, Row
from wdstrain.shards.tar_headers import END
from wdstrain.storage.files import write_whole

_MOST_REASONS = 5  # in the error of a source without a good sample
# Bytes of images that one task re-encodes: a tenth of a second, so that workers end together.
_ENCODE_BATCH = 6 << 20
# Numbers and quoted names in a reason, which differ from sample to sample.
_DETAIL = re.compile(r"'[^']*'|\"[^\"]*\"|\d+")


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
        return int(self.info["listed"] - self.info["skipped"]) - self.packed

    @property
    def skipped_reasons(self) -> dict[str, int]:
        """Number of skipped samples by reason, the most frequent first."""
        return _reasons(self.bad)


def convert(
    source: Source, out: str, options: Options, progress: Progress | None = None
) -> ConversionResult:
    """Convert a source into the folder `out`, or into a bucket (s3://bucket/folder).

    Raises UsageError if `out` is in use, SourceError for a bad sample unless it is skipped,
    StorageError for a disk that fails. Finished shards are then kept for `resume`, and the files
    that were in `out` before are unchanged.
    """
    _check(source, out, options)
    run = _Run(source, options, progress, BadSamples(options.on_error == "skip"))
    with Staging(
        out,
        overwrite=options.overwrite,
        resume=options.resume,
        change=options.append,
        dry_run=options.dry_run,
        uploaded=partial(run.report, "uploading"),
    ) as staging:
        if staging.is_complete:  # the samples of the source are not compared
            index = staging.load()
            staging.compare(index.info, run.call, "a finished")
            return ConversionResult(index, index.info, [], len(index.shards))
        run.former = staging.load() if options.append else None
        if options.dry_run:
            return run.planned_only(out)
        staging.begin(run.call)
        return run.pack(staging)


def _check(source: Source, out: str, options: Options) -> None:
    """Raise UsageError for an output folder or a label that does not fit the source."""
    if source.root is not None:
        real, root = os.path.realpath(out), os.path.realpath(source.root)
        refuse(
            real == root or real.startswith(os.path.join(root, "")),
            f"{out} lies in {source.root}, which is being converted.",
            "Put the shards into another folder.",
        )
    refuse(
        options.stratify is not None and options.stratify != source.stratum,
        f"{{stratify}}: {source.name} has no such label of "
        f"classes{f', but {source.stratum!r}' if source.stratum else ''}.",
        "Name a label of classes, or leave stratify out.",
        stratify=options.stratify,
    )


@dataclass
class _Run:
    """One run of a conversion.

    former: the set that it appends to. listed: samples of the source. limited: good ones that the
    option `limit` leaves out. labels: of the samples.
    """

    source: Source
    options: Options
    progress: Progress | None
    bad: BadSamples
    former: Index | None = None
    listed: int = 0
    limited: int = 0
    labels: tuple[ColumnInfo, ...] = ()

    @property
    def call(self) -> dict[str, Any]:
        """The arguments of the conversion, without what the files of the source decide."""
        stated = {name: v for name, v in self.source.source.items() if name not in FROM_FILES}
        call = {"source": stated, "options": self.options.saved()}
        if self.options.append:
            call["append"] = {"set": self.former.fingerprint if self.former is not None else None}
        return call

    def report(self, title: str, done: int, size: int, total: int | None) -> None:
        if self.progress is not None:
            self.progress(Step(title, done, total, size, len(self.bad.bad)))

    def planned_only(self, out: str) -> ConversionResult:
        """Return the result that the run would have, without writing anything.

        Files are not read: samples that would be skipped when they are read are counted as packed,
        and the sizes are those before images are re-encoded. The index has no fields and columns.
        """
        catalog = self._collected(None, out)
        plan, rows, shards = self._plan(catalog), list[Row](), list[Shard]()
        for shard in plan:
            keys, sizes = catalog.keys(shard.numbers), catalog.sizes[shard.numbers].tolist()
            rows += [(key, 0, size, ()) for key, size in zip(keys, sizes, strict=True)]
            path, size = os.path.join(out, shard.name), sum(sizes) + len(END)
            shards.append(Shard(path, len(sizes), size, shard.split))
        made = {"source": self.source.source, "made": "planned by a dry run"}
        index = with_labels(Index(tuple(shards), Offsets.of_samples(rows), info=made), self.labels)
        planned = np.concatenate([shard.numbers for shard in plan])
        samples = counted(index, catalog, planned)
        renamed = len(catalog.renamed.keys() & set(planned.tolist()))
        return ConversionResult(index, self._info(samples, renamed, None), self.bad.bad)

    def pack(self, staging: Staging) -> ConversionResult:
        """Write the shards and put them in place."""
        try:
            return self._finish(staging, *self._written(staging))
        except (UsageError, _NothingError):  # there is nothing to resume
            staging.discard()
            raise

    def _written(self, staging: Staging) -> tuple[list[Packed], Catalog]:
        """Write the shards of a plan of all samples; also return the catalog of these."""
        spool = None if self.source.has_files else staging.folder("spill")
        catalog = self._collected(spool, staging.shown)
        recipe = Recipe(self.options.resize, self.options.quality, self.options.check)
        if recipe.changes:
            catalog = self._encoded(catalog, recipe, staging.folder("encoded"))
            recipe = Recipe(None, None, "magic")
        plan, parts = self._plan(catalog), list[Packed]()
        staging.check_names({shard.split for shard in plan})
        with closing(self._shards(catalog, recipe, staging.folder(), plan, "packing")) as shards:
            for part in shards:
                if len(part.numbers):
                    parts.append(replace(part, index=staging.add(part.index)))
        return parts, catalog

    def _collected(self, spool: str | None, out: str) -> Catalog:
        """Return the samples. Raises SourceError if there are none, UsageError if they do not fit."""
        first_key = next_numbered_key(self.former) if self.former is not None else 0
        catalog = collect(
            self.source,
            spool,
            self.options,
            self.bad,
            partial(self.report, "reading", total=self.source.total),
            first_key,
        )
        self.labels, self.listed = self.source.labels(), len(catalog.sizes) + len(self.bad.bad)
        self._check_any(len(catalog.sizes))
        numbers = chosen(catalog, self.options)
        self.limited = len(catalog.sizes) - len(numbers)
        if self.former is not None:
            check_labels(self.former, self.labels, out)
            if not self.options.resume:  # else they may be in the set already
                check_keys(self.former, catalog.keys(numbers), out)
        return catalog

    def _plan(self, catalog: Catalog) -> list[PlannedShard]:
        return plan_shards(
            catalog,
            self.options,
            resplit=self.source.resplit,
            known=self.former.splits if self.former is not None else (),
        )

    def _encoded(self, catalog: Catalog, recipe: Recipe, folder: str) -> Catalog:
        """Return the samples with re-encoded images, in the order they will be packed."""
        numbers = chosen(catalog, self.options)
        runs = batches(numbers, catalog.sizes[numbers], _ENCODE_BATCH)
        plan = [PlannedShard(f"{place:06d}", "", run) for place, run in enumerate(runs)]
        done = list(self._shards(catalog, recipe, folder, plan, "encoding"))
        at = np.concatenate([part.numbers for part in done])
        self._check_any(len(at))
        return catalog.moved([part.index for part in done], at)

    def _shards(
        self, catalog: Catalog, recipe: Recipe, folder: str, plan: list[PlannedShard], title: str
    ) -> Generator[Packed, None, None]:
        report = partial(self.report, title, total=sum(len(shard.numbers) for shard in plan))
        return write_shards(catalog, recipe, folder, plan, self.options, self.bad, report)

    def _finish(self, staging: Staging, parts: list[Packed], catalog: Catalog) -> ConversionResult:
        """Write the index and the lists of samples, and put the set in place."""
        bad, former, names = self.bad.bad, self.former, catalog.renamed
        packed = sum(len(part.numbers) for part in parts)
        self._check_any(packed)
        reject(
            self.listed != packed + len(bad) + self.limited,
            f"{self.listed} samples were listed, but {packed} were packed, {len(bad)} skipped "
            f"and {self.limited} left out by limit. Please report this.",
        )
        indexes = [part.index for part in parts]
        renamed = [names[n] for part in parts for n in part.numbers.tolist() if n in names]
        joined = join(indexes)
        index = with_labels(joined, self.labels)
        divided = divided_images([*indexes, *filter(None, [former])])
        samples = counted(index, catalog, np.concatenate([part.numbers for part in parts]))
        info = self._info(samples, len(renamed), divided)
        index = replace(index, info=info)
        result = ConversionResult(index, info, bad, sum(part.is_kept for part in parts))
        if former is not None and self.options.resume and is_repeated(former, index):
            staging.discard()
            return replace(result, index=former, kept=len(former.shards))
        lists = self._write_lists(
            staging.folder(), renamed, staging.target.read if former else lambda name: None
        )
        if former is not None:
            entry = {**info, "source": self.call["source"], "limited": self.limited}
            index = appended(former, index, joined.columns, entry, staging.shown)
        staging.commit(index, lists)
        return replace(result, index=index)

    def _info(
        self, samples: dict[str, dict[str, int]], renamed: int, divided: int | None
    ) -> dict[str, Any]:
        """Return the counts and the provenance of a set. divided: None if it is not known."""
        options, source = self.options, self.source
        info: dict[str, Any] = {
            "listed": self.listed,
            "skipped": len(self.bad.bad),
            "renamed": renamed,
            "divided": divided,
            "source": source.source,
            "options": options.saved(),
            "samples": samples,
            "ignored": source.ignored,
        }
        if options.split:
            sums = {split: sum(counts.values()) for split, counts in samples.items()}
            info["split"] = {
                "shares": options.split,
                "got": {split: count / sum(sums.values()) for split, count in sums.items()},
                "stratify": options.stratify,
                "group_by": source.source.get("group_by"),
                "seed": options.seed,
            }
        return info

    def _write_lists(
        self,
        folder: str,
        renamed: list[dict[str, str]],
        read: Callable[[str], bytes | None] = lambda name: None,
    ) -> list[str]:
        """Write the lists of skipped and of renamed samples into a folder, and return their names.

        read: reads a file of the set that an append extends; its lists are kept.
        """
        lists = {SKIPPED_NAME: [bad.portable() for bad in self.bad.bad], RENAMED_NAME: renamed}
        written = [name for name, rows in lists.items() if rows]
        for name in written:
            data = (read(name) or b"") + b"".join(map(json_bytes, lists[name]))
            write_whole(os.path.join(folder, name), data)
        return written

    def _check_any(self, good: int) -> None:
        """Raise _NothingError if there are no samples, or no good ones."""
        bad, source = self.bad.bad, self.source
        if not self.listed:
            ignored = ", ".join(f"{count} x {reason}" for reason, count in source.ignored.items())
            raise _NothingError(
                f"{source.name} holds no samples"
                f"{f' to be packed ({ignored})' if ignored else ''}. Check the source."
            )
        if not good:
            reasons = [f"{count} x {reason}" for reason, count in _reasons(bad).items()]
            raise _NothingError(
                f"all of {self.listed} samples were skipped: {'; '.join(reasons[:_MOST_REASONS])}"
                f"{'; ...' if len(reasons) > _MOST_REASONS else ''}. The first: {bad[0].sentence}"
            )


class _NothingError(SourceError):
    """A source holds no good sample."""


# --- counts ---------------------------------------------------------------------------------------


def _reasons(bad: Iterable[BadSample]) -> dict[str, int]:
    """Return the number of bad samples by reason, the most frequent first.

    Reasons that differ only in numbers and quoted names are counted together, under the first.
    """
    first: dict[str, str] = {}
    kinds = (first.setdefault(_DETAIL.sub("*", s.reason), s.reason) for s in bad)
    return dict(Counter(kinds).most_common())


def counted(index: Index, catalog: Catalog, numbers: Ints) -> dict[str, dict[str, int]]:
    """Return the number of samples by split and class; "" is the class of no class.

    numbers: of the samples of the index, in the catalog.
    """
    labels = [label for label in index.labels if label.is_class] or [ColumnInfo("", "class", "")]
    classes = pa.array(
        np.array([*catalog.strata], object)[catalog.stratum[numbers]]
    ).dictionary_encode()
    index = index.with_columns([Column.of(labels[0], classes)])
    return class_counts(replace(index, labels=tuple(labels)))


def divided_images(parts: Iterable[Index]) -> int:
    """Return the number of images in several splits, compared by size and checksum."""
    index = join([part.with_columns([]) for part in parts if part.offsets.has_checksums])
    # an image beside the main one (seg.png) is data that many samples may share
    fields = [name for name in index.fields if is_image(name) and "." not in name]
    members = index.offsets.members_of(np.arange(len(index)), fields)
    identity = members.size.astype(np.uint64) << np.uint64(32) | members.crc.astype(np.uint64)
    _, codes = np.unique([shard.split for shard in index.shards], return_inverse=True)
    split = codes[index.shard_of(members.row)]
    distinct = [np.unique(identity[split == code]) for code in np.unique(codes)]
    return int((np.unique(np.concatenate(distinct), return_counts=True)[1] > 1).sum())
