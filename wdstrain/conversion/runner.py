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
from wdstrain.conversion.catalog import Catalog, IndexCatalog
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
from wdstrain.conversion.shard_plan import (
    PlannedShard,
    batches,
    chosen,
    plan_shards,
)
from wdstrain.conversion.shard_writer import Packed, write_shards
from wdstrain.conversion.staging import FROM_FILES, SKIPPED_NAME, Staging
from wdstrain.errors import SourceError, UsageError
from wdstrain.runtime.machine import collector_paused
from wdstrain.shards.declare import with_labels
from wdstrain.shards.index import Index, Shard, join
from wdstrain.shards.kinds import ColumnInfo
from wdstrain.shards.offsets import Ints, OffsetsBuilder
from wdstrain.shards.tar_headers import END

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
        if staging.is_complete:  # the samples of the source are not compared
            index = staging.load()
            staging.compare(index.info, run.call, "a finished")
            return read_result(staging.out, index)
        run.former = staging.load() if options.append else None
        if options.dry_run:
            return run.planned_only(out)
        staging.begin(run.call)
        with collector_paused() if source.has_files else nullcontext():
            return run.pack(staging)


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


@dataclass
class _Run:
    """One run of a conversion.

    former: the set that it appends to. listed: samples of the source. limited: good ones that the
    option `limit` leaves out. labels: of the samples. lists: folder for the list of skipped samples
    if there are no others.
    """

    source: Source
    options: Options
    progress: Progress | None
    former: Index | None = None
    listed: int = 0
    limited: int = 0
    labels: tuple[ColumnInfo, ...] = ()
    bad: BadSamples = field(default_factory=BadSamples)
    lists: str | None = None

    def __post_init__(self) -> None:
        self.bad.collect = self.options.on_error == "skip"

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
        plan, rows, shards = self._plan(catalog, self.options), OffsetsBuilder(), list[Shard]()
        for shard in plan:
            stops = np.cumsum(catalog.sizes[shard.numbers]).tolist()
            for key, start, stop in zip(
                catalog.keys(shard.numbers), [0, *stops[:-1]], stops, strict=True
            ):
                rows.put(key, start, stop, [])
            path, size = f"{out.rstrip('/')}/{shard.name}", stops[-1] + len(END)
            shards.append(Shard(path, len(stops), size, shard.split))
        made = {"source": self.source.source, "made": "planned by a dry run"}
        index = replace(with_labels(Index(tuple(shards), rows.offsets()), self.labels), info=made)
        info, _ = self._info(catalog, [(shard.split, shard.numbers) for shard in plan], None)
        return ConversionResult(index, info, self.bad.bad)

    def pack(self, staging: Staging) -> ConversionResult:
        """Write the shards and put them in place."""
        self.lists = staging.out if self.former is None and staging.bucket is None else None
        try:
            return self._pack(staging)
        except (UsageError, _NothingError):  # there is nothing to resume
            staging.discard()
            raise

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
        written = Written(staging, taken)
        with closing(self._shards(catalog, recipe, folder, plan, "packing")) as shards:
            for part in shards:
                written.add(replace(part, numbers=at[part.numbers]))
        return self._finish(staging, written, source)

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
        known = self.former.splits if self.former is not None else ()
        return plan_shards(catalog, options, resplit=self.source.resplit, known=known)

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
        report = partial(self.report, title, total=sum(len(shard.numbers) for shard in plan))
        return write_shards(catalog, recipe, folder, plan, self.options, self.bad, report)

    def _finish(self, staging: Staging, written: Written, source: Catalog) -> ConversionResult:
        """Write the index and the lists of samples, and put the set in place."""
        bad, former, parts = self.bad.bad, self.former, written.parts
        packed = sum(len(numbers) for _, numbers in parts)
        self._check_any(packed)
        if self.listed != packed + len(bad) + self.limited:
            raise SourceError(
                f"{self.listed} samples were listed, but {packed} were packed, {len(bad)} skipped "
                f"and {self.limited} left out by limit. Please report this."
            )
        indexes = [index for index, _ in parts]
        divided = divided_images([*indexes, *filter(None, [former])])
        places = [(index.shards[0].split, numbers) for index, numbers in parts]
        info, renamed = self._info(source, places, divided)
        index = replace(with_labels(join(indexes), self.labels), info=info)
        result = ConversionResult(index, info, bad, written.kept)
        if former is not None and self.options.resume and is_repeated(former, index):
            staging.discard()
            return replace(result, index=former, kept=len(former.shards))
        folder, lists = staging.folder("shards"), staging.out if former is not None else None
        files = written.files | write_lists(folder, bad, renamed, lists)
        if former is not None:
            entry = {**info, "source": self.call["source"], "limited": self.limited}
            index = appended(former, index, entry, staging.shown)
        staging.commit(index, folder, files)
        return replace(result, index=index)

    def _info(
        self, catalog: Catalog, places: list[tuple[str, Ints]], divided: int | None
    ) -> tuple[dict[str, Any], list[dict[str, str]]]:
        """Return the counts and the provenance of a set, and the rows of its renamed samples.

        places: split and numbers of its samples. divided: None if it is not known.
        """
        names, numbers = catalog.renamed, [n for _, ids in places for n in ids.tolist()]
        renamed = [names[number] for number in numbers if number in names]
        samples = counted(catalog.meta, places, self.labels)
        counts = {"listed": self.listed, "skipped": len(self.bad.bad), "renamed": len(renamed)}
        made = record(self.source, self.options, samples)
        return {**counts, "divided": divided, **made}, renamed

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
            left, place = len(reasons) - _MOST_REASONS, ""
            if self.lists is not None:
                write_lists(self.lists, bad, [], None)
                place = f" All are listed in {os.path.join(self.lists, SKIPPED_NAME)}"
            raise _NothingError(
                f"all of {self.listed} samples were skipped: {'; '.join(reasons[:_MOST_REASONS])}"
                f"{f'; {left} more reasons' if left > 0 else ''}. The first: {bad[0].sentence}"
                f"{place}"
            )


class _NothingError(SourceError):
    """A source holds no good sample."""
