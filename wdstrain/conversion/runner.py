"""Convert a source into a folder of shards and their index.

    source --collect--> catalog --plan_shards--> plan --write_shards--> shards -> index -> in place
                         |  ^
    images re-encoded <--+  |   (with resize or quality: their sizes must be known)
             +--------------+

A stream that keeps its order is written without a catalog (`stream_writer`). The plan depends on
the catalog and the options alone, so any number of workers gives the same bytes. Everything is
written into a staging folder (`staging`). Each shard carries the identity of its samples, so
`resume` writes only what is missing.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from wdstrain.conversion.append import (
    appended,
    check_keys,
    check_labels,
    is_repeated,
    next_numbered_key,
)
from wdstrain.conversion.catalog import Catalog, IndexCatalog, Renamed, SampleMeta
from wdstrain.conversion.collect import collect
from wdstrain.conversion.images import Recipe
from wdstrain.conversion.listing import BadSamples, Source
from wdstrain.conversion.options import Options
from wdstrain.conversion.result import (
    ConversionResult,
    Progress,
    Step,
    Written,
    count_reasons,
    counted,
    divided_images,
    read_result,
    record,
    write_lists,
)
from wdstrain.conversion.resume import call_of, check_call, differences
from wdstrain.conversion.shard_plan import (
    PlannedShard,
    batches,
    check_prefixes,
    chosen,
    plan_shards,
)
from wdstrain.conversion.shard_pool import write_shards
from wdstrain.conversion.shard_writer import Packed
from wdstrain.conversion.staging import Staging
from wdstrain.conversion.stream_writer import can_write_directly, write_stream
from wdstrain.conversion.upload import SKIPPED_NAME
from wdstrain.errors import SourceError, UsageError
from wdstrain.runtime.machine import collector_paused
from wdstrain.shards.declare import with_labels
from wdstrain.shards.index import Index, Shard, join
from wdstrain.shards.index_io import json_bytes
from wdstrain.shards.kinds import ColumnInfo
from wdstrain.shards.offsets import Ints, OffsetsBuilder
from wdstrain.shards.tar_headers import END
from wdstrain.storage.files import write_whole

_MOST_REASONS = 5  # in the error of a source without a good sample
# Bytes of images that one task re-encodes: a tenth of a second, so that workers end together.
_ENCODE_BATCH = 6 << 20


def convert(
    source: Source, out: str, options: Options, progress: Progress | None = None
) -> ConversionResult:
    """Convert a source into the folder `out`, or into a bucket (s3://bucket/folder).

    Raises UsageError if `out` is in use, SourceError for a bad sample unless it is skipped,
    StorageError for a disk that fails. Finished shards are then kept for `resume`, and the files
    that were in `out` before are unchanged.
    """
    _check(source, out, options)
    run = _Run(source, options, progress)
    with Staging(
        out,
        overwrite=options.overwrite,
        resume=options.resume,
        change=options.append,
        dry_run=options.dry_run,
        uploaded=partial(run.report, "uploading"),
    ) as staging:
        if staging.is_complete:
            return _finished(staging, source, options)
        run.former = staging.load() if options.append else None
        if options.dry_run:
            return run.planned_only(out)
        check_call(staging, call_of(source, options, run.former))
        with collector_paused() if source.has_files else nullcontext():
            return run.pack(staging).moved_to(out)


def _check(source: Source, out: str, options: Options) -> None:
    """Raise UsageError for an output folder or a label that does not fit the source."""
    if source.root is not None:
        real, root = os.path.realpath(out), os.path.realpath(source.root)
        if real == root or real.startswith(os.path.join(root, "")):
            raise UsageError(
                f"{out} lies in {source.root}, which is being converted. Put the shards into "
                f"another folder."
            )
    if options.stratify is not None and options.stratify != source.stratum:
        raise UsageError(
            f"stratify={options.stratify!r}: {source.name} has no such label of classes"
            f"{f', but {source.stratum!r}' if source.stratum else ''}. Name a label of classes, or "
            f"leave stratify out."
        )


def _planned_index(shard: PlannedShard, catalog: Catalog, out: str) -> Index:
    """Return the index that a shard would have, without fields and columns."""
    rows = OffsetsBuilder()
    sizes = catalog.sizes[shard.numbers].tolist()
    for key, size in zip(catalog.keys(shard.numbers), sizes, strict=True):
        rows.put(key, rows.stop, rows.stop + size, [])
    path = f"{out.rstrip('/')}/{shard.name}"
    entry = Shard(path, len(rows), rows.stop + len(END), shard.split)
    return Index((entry,), rows.offsets())


def _finished(staging: Staging, source: Source, options: Options) -> ConversionResult:
    """Return the result of the finished conversion that this call resumes.

    The samples of the source are not compared. Raises UsageError if it was another call, ShardError
    if a shard is missing or was cut.
    """
    index = staging.load()
    if differing := differences(index.info, call_of(source, options)):
        raise UsageError(
            f"{staging.shown} holds a finished conversion of another source or with other options: "
            f"{'; '.join(differing)}. Choose another folder, or replace it with overwrite=True."
        )
    return read_result(staging.out, index)


@dataclass
class _Run:
    """One run of a conversion.

    former: the set that it appends to. listed: samples of the source. limited: good ones that the
    option `limit` leaves out. labels: of the samples.
    """

    source: Source
    options: Options
    progress: Progress | None
    former: Index | None = None
    listed: int = 0
    limited: int = 0
    labels: tuple[ColumnInfo, ...] = ()
    bad: BadSamples = field(default_factory=BadSamples)

    def __post_init__(self) -> None:
        self.bad.collect = self.options.on_error == "skip"

    def report(self, title: str, done: int, size: int, total: int | None) -> None:
        if self.progress is not None:
            self.progress(Step(title, done, total, size, len(self.bad.bad)))

    def planned_only(self, out: str) -> ConversionResult:
        """Return the result that the run would have, without writing anything.

        Files are not read: samples that would be skipped when they are read are counted as packed,
        and the sizes are those before images are re-encoded. The index has no fields and columns.
        """
        catalog = self._collected(None, out)
        plan = self._plan(catalog, self.options)
        places = [(shard.split, shard.numbers) for shard in plan]
        index = join([_planned_index(shard, catalog, out) for shard in plan])
        made = {"source": self.source.source, "made": "planned by a dry run"}
        renamed = sum(int(np.isin(shard.numbers, list(catalog.renamed)).sum()) for shard in plan)
        info = self._info(catalog.meta, places, renamed, None)
        index = replace(with_labels(index, self.labels), info=made)
        return ConversionResult(index, info, self.bad.bad)

    def pack(self, staging: Staging) -> ConversionResult:
        """Write the shards and put them in place."""
        try:
            if can_write_directly(self.source, self.options):
                return self._pack_directly(staging)
            return self._pack(staging)
        except _NothingError as error:
            place = ""
            if self.bad.bad and self.former is None and staging.bucket is None:
                path = os.path.join(staging.out, SKIPPED_NAME)
                rows = [json_bytes(sample.portable()) for sample in self.bad.bad]
                write_whole(path, b"".join(rows))
                place = f" All are listed in {path}"
            staging.discard()  # there is nothing to resume
            raise SourceError(f"{error}{place}") from None
        except UsageError:
            staging.discard()
            raise

    def _pack_directly(self, staging: Staging) -> ConversionResult:
        folder = staging.folder("shards")
        written = Written((), staging.bucket)
        report = partial(self.report, "packing", total=self.source.total)
        meta, renamed = write_stream(
            self.source, folder, self.options, self.bad, report, written.add
        )
        self.listed, self.labels = len(meta.rank) + len(self.bad.bad), self.source.labels()
        splits = [name or "train" for name in meta.splits]
        written.parts.sort(key=lambda part: splits.index(part[0].shards[0].split))
        staging.check_names(splits)
        return self._finish(staging, written, meta, renamed)

    def _pack(self, staging: Staging) -> ConversionResult:
        spool = None if self.source.has_files else staging.folder("spill")
        source = self._collected(spool, staging.shown)
        catalog, recipe, options = source, Recipe.of(self.options), self.options
        at = np.arange(len(source.sizes))  # number in the source of each sample of the catalog
        if recipe.changes:
            catalog, at = self._encoded(source, recipe, staging.folder("encoded"))
            recipe = recipe.looked_at()
            options = replace(options, limit=None)  # applied when the images were chosen
            self._check_any(len(at))
        plan, folder = self._plan(catalog, options), staging.folder("shards")
        staging.check_names(list(dict.fromkeys(shard.split for shard in plan)))
        taken = os.listdir(staging.out) if self.former is not None else []
        written = Written(taken, staging.bucket)
        with closing(self._shards(catalog, recipe, folder, plan, "packing")) as shards:
            for part in shards:
                written.add(replace(part, numbers=at[part.numbers]))
        return self._finish(staging, written, source.meta, source.renamed)

    def _collected(self, spool: str | None, out: str) -> Catalog:
        """Return the samples. Raises SourceError if there are none, UsageError if they do not fit."""
        first_key = next_numbered_key(self.former) if self.former is not None else 0
        report = partial(self.report, "reading", total=self.source.total)
        collected = collect(self.source, spool, self.options, self.bad, report, first_key)
        catalog, self.labels, self.listed = collected
        self._check_any(len(catalog.sizes))
        numbers = chosen(catalog, self.options)
        self.limited = len(catalog.sizes) - len(numbers)
        if self.former is not None:
            check_labels(self.former, self.labels, out)
            if not self.options.resume:  # else they may be in the set already
                check_keys(self.former, catalog.keys(numbers), out)
        return catalog

    def _plan(self, catalog: Catalog, options: Options) -> list[PlannedShard]:
        plan = plan_shards(catalog, options, resplit=self.source.resplit)
        if self.former is not None:
            check_prefixes([*self.former.splits, *(shard.split for shard in plan)])
        return plan

    def _encoded(self, catalog: Catalog, recipe: Recipe, folder: str) -> tuple[IndexCatalog, Ints]:
        """Return the samples with re-encoded images, in the order they will be packed.

        Also returns their numbers in `catalog`.
        """
        numbers = chosen(catalog, self.options)
        runs = batches(numbers, catalog.sizes[numbers], _ENCODE_BATCH)
        plan = [PlannedShard(f"{place:06d}", "", run) for place, run in enumerate(runs)]
        done = list(self._shards(catalog, recipe, folder, plan, "encoding"))
        at = np.concatenate([part.numbers for part in done])
        index = join([part.index for part in done])
        return IndexCatalog(catalog.name, index, catalog.meta.take(at), {}), at

    def _shards(
        self, catalog: Catalog, recipe: Recipe, folder: str, plan: list[PlannedShard], title: str
    ) -> Generator[Packed, None, None]:
        report = partial(self.report, title)
        return write_shards(catalog, recipe, folder, plan, self.options, self.bad, report)

    def _finish(
        self, staging: Staging, written: Written, meta: SampleMeta, renamed: Renamed
    ) -> ConversionResult:
        """Write the index and the lists of samples, and put the set in place."""
        bad, former, parts = self.bad.bad, self.former, written.parts
        packed = sum(len(numbers) for _, numbers in parts)
        self._check_any(packed)
        if self.listed != packed + len(bad) + self.limited:
            raise SourceError(
                f"{self.listed} samples were listed, but {packed} were packed, {len(bad)} skipped "
                f"and {self.limited} left out by limit. Please report this."
            )
        rows = [renamed[n] for _, numbers in parts for n in numbers.tolist() if n in renamed]
        indexes = [index for index, _ in parts]
        divided = divided_images([*indexes, *filter(None, [former])])
        places = [(index.shards[0].split, numbers) for index, numbers in parts]
        info = self._info(meta, places, len(rows), divided)
        index = replace(with_labels(join(indexes), self.labels), info=info)
        result = ConversionResult(index, info, bad, written.kept)
        if former is not None and self.options.resume and is_repeated(former, index):
            staging.discard()
            return replace(result, index=former, kept=len(former.shards))
        folder, lists = staging.folder("shards"), staging.out if former is not None else None
        files = written.files | write_lists(folder, bad, rows, lists)
        if former is not None:
            stated = call_of(self.source, self.options)["source"]
            entry = {**info, "source": stated, "limited": self.limited}
            index = appended(former, index, entry, staging.shown)
        staging.commit(index, folder, files)
        return replace(result, index=index)

    def _info(
        self, meta: SampleMeta, places: list[tuple[str, Ints]], renamed: int, divided: int | None
    ) -> dict[str, Any]:
        """Return the counts and the provenance of a set.

        places: split and numbers of its samples. divided: None if it is not known.
        """
        counts = {
            "listed": self.listed,
            "skipped": len(self.bad.bad),
            "renamed": renamed,
            "divided": divided,
        }
        return {**counts, **record(self.source, self.options, counted(meta, places, self.labels))}

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
            reasons = [f"{count} x {reason}" for reason, count in count_reasons(bad).items()]
            left = len(reasons) - _MOST_REASONS
            raise _NothingError(
                f"all of {self.listed} samples were skipped: {'; '.join(reasons[:_MOST_REASONS])}"
                f"{f'; {left} more reasons' if left > 0 else ''}. The first: {bad[0].sentence}"
            )


class _NothingError(SourceError):
    """A source holds no good sample."""
