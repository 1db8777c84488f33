"""Convert a source into a folder of shards and their index.

    source --collect--> catalog --plan_shards--> plan --write_shards--> shards -> index -> in place
                         |  ^
    images re-encoded <--+  |   (with resize or quality: their sizes must be known)
             +--------------+

A stream that keeps its order is written without a catalog (`stream_writer`). The plan depends on
the catalog and the options alone, so any number of workers gives the same bytes. Everything is
written into a staging directory (`staging`). Each shard carries the identity of its samples, so
`resume` writes only what is missing.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from wdstrain.conversion.append import (
    appended_info,
    appended_result,
    check_keys,
    check_labels,
    joined,
    next_numbered_key,
    was_appended,
)
from wdstrain.conversion.catalog import Catalog, IndexCatalog
from wdstrain.conversion.collect import Collected, collect
from wdstrain.conversion.images import Recipe
from wdstrain.conversion.listing import BadSample, BadSamples, Source
from wdstrain.conversion.options import Options
from wdstrain.conversion.result import (
    ConversionResult,
    Progress,
    Step,
    Tally,
    count_reasons,
    divided_images,
    read_result,
    record,
    renumbered,
    write_lists,
)
from wdstrain.conversion.resume import call_of, check_call, differences, other_conversion
from wdstrain.conversion.shard_plan import (
    PlannedShard,
    batches,
    check_prefixes,
    chosen,
    plan_shards,
)
from wdstrain.conversion.shard_pool import write_shards
from wdstrain.conversion.shard_writer import Packed
from wdstrain.conversion.staging import SKIPPED_NAME, Staging
from wdstrain.conversion.stream_writer import can_write_directly, write_stream
from wdstrain.conversion.upload import (
    BucketUpdate,
    ShardUploads,
    bucket_update,
    check_free,
    deliver_result,
    outgoing,
)
from wdstrain.errors import SourceError, UsageError
from wdstrain.runtime.machine import collector_paused
from wdstrain.shards.declare import with_labels
from wdstrain.shards.index import Index, Shard, join
from wdstrain.shards.index_io import check_sizes, json_bytes, load
from wdstrain.shards.kinds import ColumnInfo
from wdstrain.shards.offsets import Ints, OffsetsBuilder
from wdstrain.shards.tar_headers import END
from wdstrain.storage.addresses import INDEX_NAME
from wdstrain.storage.files import write_whole
from wdstrain.storage.objects import is_object

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
    if options.dry_run:
        return _dry_run(source, out, options, progress)
    if not is_object(out):
        return _convert(source, out, options, progress)
    if options.append:
        with bucket_update(out) as update:
            done = _convert(source, update.folder, options, progress, update.uploads, update)
        return done.moved_to(out)
    folder = outgoing(out)
    if not (options.resume and os.path.exists(folder)):
        check_free(out, overwrite=options.overwrite)
    done = _convert(source, folder, options, progress, ShardUploads(out, folder))
    return deliver_result(done, folder, out, progress)


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


def _convert(
    source: Source,
    out: str,
    options: Options,
    progress: Progress | None,
    uploads: ShardUploads | None = None,
    update: BucketUpdate | None = None,
) -> ConversionResult:
    """Convert a source into a folder. uploads: receives the shards as they are finished.

    update: the set in a bucket that the folder stands for.
    """
    staging = Staging(
        out,
        overwrite=options.overwrite,
        resume=options.resume,
        change=options.append,
        shown=update.address if update is not None else None,
        publish=update.publish if update is not None else None,
    )
    if uploads is not None and not options.resume:
        uploads.clear()  # not before the staging removed the shards of an earlier run
    if staging.is_complete:
        return _finished(out, source, options)
    try:
        former = _set_in(out) if options.append else None
        if former is not None and _was_completed(staging, source, options):
            staging.leave()
            return appended_result(former)
        was_begun = bool(staging.read_call())
        check_call(staging, call_of(source, options, former))
        run = _Run(source, options, progress, former)
        with collector_paused() if source.has_files else nullcontext():
            return run.pack(staging, uploads, options.resume and not was_begun)
    except BaseException:
        staging.leave()
        raise


def _dry_run(
    source: Source, out: str, options: Options, progress: Progress | None
) -> ConversionResult:
    """Return the result that a conversion would have, without writing anything.

    Files are not read: samples that would be skipped when they are read are counted as packed, and
    the sizes are those before images are re-encoded. The index has no fields and no columns.
    """
    former = _set_in(out) if options.append else None
    if former is None and not (options.overwrite or options.resume):
        if is_object(out):
            check_free(out, overwrite=False)
        elif os.path.isdir(out) and set(os.listdir(out)) - {SKIPPED_NAME}:
            raise UsageError(
                f"{out} is not empty. Choose an empty folder, or replace its "
                f"shards with overwrite=True, or add to them with append=True."
            )
    run = _Run(source, options, progress, former)
    catalog, labels, listed = run.collect(None)
    numbers = chosen(catalog, options)
    if former is not None:
        check_labels(former, labels, out)
        check_keys(former, catalog, numbers, out)
    tally, parts = Tally(catalog.meta, catalog.renamed), []
    for shard in run.plan(catalog, options):
        tally.add(shard.split, shard.numbers)
        parts.append(_planned_index(shard, catalog, out))
    info = {"source": source.source, "made": "planned by a dry run"}
    limited = len(catalog.sizes) - len(numbers)
    index = replace(with_labels(join(parts), labels), info=info)
    return run.result(index, tally, labels, listed, limited, tally.divided)


def _planned_index(shard: PlannedShard, catalog: Catalog, out: str) -> Index:
    """Return the index that a shard would have, without fields and columns."""
    rows = OffsetsBuilder()
    for number, size in zip(
        shard.numbers.tolist(), catalog.sizes[shard.numbers].tolist(), strict=True
    ):
        rows.put(catalog.key(number), rows.stop, rows.stop + size, [])
    path = f"{out.rstrip('/')}/{shard.name}"
    entry = Shard(path, len(rows), rows.stop + len(END), shard.split)
    return Index((entry,), rows.offsets())


def _set_in(out: str) -> Index:
    """Return the index of the finished set in a folder. Raises UsageError if there is none."""
    path = os.path.join(out, INDEX_NAME)
    if not is_object(out) and not os.path.exists(path):
        raise UsageError(
            f"{out} holds no finished set of shards with an index. Name the folder of one."
        )
    return check_sizes(load(path))


def _was_completed(staging: Staging, source: Source, options: Options) -> bool:
    """Return whether the update that was completed just now is this append."""
    former = staging.completed
    return "append" in former and not differences(
        former, {**call_of(source, options), "append": former["append"]}
    )


def _finished(out: str, source: Source, options: Options) -> ConversionResult:
    """Return the result of the finished conversion in `out`, which this call resumes.

    The samples of the source are not compared. Raises UsageError if it was another call, ShardError
    if a shard is missing or was cut.
    """
    index = check_sizes(load(os.path.join(out, INDEX_NAME)))
    if differing := differences(index.info, call_of(source, options)):
        hint = "Choose another folder, or replace it with overwrite=True."
        raise other_conversion(out, differing, hint)
    return read_result(out, index)


@dataclass
class _Run:
    """One run of a conversion. former: the set that it appends to."""

    source: Source
    options: Options
    progress: Progress | None
    former: Index | None

    def __post_init__(self) -> None:
        self.bad = BadSamples(collect=self.options.on_error == "skip")

    def collect(self, spool: str | None) -> Collected:
        """Return the samples. Raises SourceError if there are no good ones."""
        first_key = next_numbered_key(self.former) if self.former is not None else 0
        report = partial(self._report, "reading", total=self.source.total)
        collected = collect(self.source, spool, self.options, self.bad, report, first_key)
        self._check_any(collected.listed, len(collected.catalog.sizes))
        return collected

    def plan(self, catalog: Catalog, options: Options) -> list[PlannedShard]:
        plan = plan_shards(catalog, options, resplit=self.source.resplit)
        if self.former is not None:
            check_prefixes([*self.former.splits, *(shard.split for shard in plan)])
        return plan

    def pack(
        self, staging: Staging, uploads: ShardUploads | None, may_be_done: bool
    ) -> ConversionResult:
        """Write the shards and put them in place.

        may_be_done: an append that is not to be repeated, if it was the last one.
        """
        try:
            if can_write_directly(self.source, self.options):
                return self._pack_directly(staging, uploads)
            return self._pack(staging, uploads, may_be_done)
        except _NothingError as error:
            place = ""
            if self.bad.bad and self.former is None:
                path = os.path.join(staging.out, SKIPPED_NAME)
                rows = [json_bytes(sample.portable()) for sample in self.bad.bad]
                write_whole(path, b"".join(rows))
                place = f" All are listed in {path}"
            staging.discard()  # there is nothing to resume
            raise SourceError(f"{error}{place}") from None

    def _pack_directly(self, staging: Staging, uploads: ShardUploads | None) -> ConversionResult:
        folder, packed = staging.folder("shards"), list[Packed]()

        def done(part: Packed) -> None:
            _upload(part, folder, uploads)
            packed.append(part)

        report = partial(self._report, "packing", total=self.source.total)
        meta, renamed = write_stream(self.source, folder, self.options, self.bad, report, done)
        self._check_any(len(meta.rank) + len(self.bad.bad), len(meta.rank))
        splits = [name or "train" for name in meta.splits]
        packed.sort(key=lambda part: splits.index(part.index.shards[0].split))
        staging.check_names(splits)
        tally, labels = Tally(meta, renamed), self.source.labels()
        return self._finish(staging, packed, tally, labels, len(meta.rank) + len(self.bad.bad))

    def _pack(
        self, staging: Staging, uploads: ShardUploads | None, may_be_done: bool
    ) -> ConversionResult:
        spool = None if self.source.has_files else staging.folder("spill")
        source, labels, listed = self.collect(spool)
        numbers = chosen(source, self.options)
        if self.former is not None:
            call = call_of(self.source, self.options)
            entry = {"source": call["source"], "options": call["options"], "listed": listed}
            if may_be_done and was_appended(self.former, source, numbers, entry):
                staging.discard()
                return appended_result(self.former)
            with _refusal(staging):
                check_labels(self.former, labels, staging.shown)
                check_keys(self.former, source, numbers, staging.shown)
        catalog, recipe, options = source, Recipe.of(self.options), self.options
        at = np.arange(len(source.sizes))  # number in the source of each sample of the catalog
        if recipe.changes:
            catalog, at = self._encoded(source, recipe, staging.folder("encoded"))
            recipe = recipe.looked_at()
            options = replace(options, limit=None)  # applied when the images were chosen
            self._check_any(listed, len(at))
        plan, folder = self.plan(catalog, options), staging.folder("shards")
        staging.check_names(list(dict.fromkeys(shard.split for shard in plan)))
        packed = []
        with closing(self._shards(catalog, recipe, folder, plan, "packing")) as shards:
            for part in shards:
                _upload(part, folder, uploads)
                packed.append(replace(part, numbers=at[part.numbers]))
        limited, tally = len(source.sizes) - len(numbers), Tally(source.meta, source.renamed)
        return self._finish(staging, packed, tally, labels, listed, limited)

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
        report = partial(self._report, title)
        return write_shards(catalog, recipe, folder, plan, self.options, self.bad, report)

    def _finish(
        self,
        staging: Staging,
        packed: list[Packed],
        tally: Tally,
        labels: tuple[ColumnInfo, ...],
        listed: int,
        limited: int = 0,
    ) -> ConversionResult:
        """Write the index and the lists of samples, and put the set in place."""
        bad, former, folder = self.bad.bad, self.former, staging.folder("shards")
        for part in packed:
            if len(part.numbers):
                tally.add(part.index.shards[0].split, part.numbers)
        written = sum(len(part.numbers) for part in packed)
        self._check_any(listed, written)
        if listed != written + len(bad) + limited:
            raise SourceError(
                f"{listed} samples were listed, but {written} were packed, {len(bad)} skipped and "
                f"{limited} left out by limit. Please report this."
            )
        taken = os.listdir(staging.out) if former is not None else []
        parts, files = renumbered(packed, folder, taken)
        divided = divided_images([*parts, *filter(None, [former])])
        info = {
            "listed": listed,
            "skipped": len(bad),
            "renamed": len(tally.renamed),
            "divided": divided,
            **record(self.source, self.options, tally.sorted_samples(labels)),
        }
        index = replace(with_labels(join(parts), labels), info=info)
        out = staging.out if former is not None else None
        files |= write_lists(folder, bad, tally.renamed, out)
        if former is not None:
            with _refusal(staging):
                index = joined(former, index, staging.shown)
            call = call_of(self.source, self.options, former)
            entry = {**info, "source": call["source"], "limited": limited}
            index = replace(index, info=appended_info(former, entry))
            staging.commit(index, folder, files, call)
        else:
            staging.commit(index, folder, files)
        kept = sum(part.is_kept for part in packed)
        result = self.result(index, tally, labels, listed, limited, divided, kept)
        return result.moved_to(staging.out)

    def result(
        self,
        index: Index,
        tally: Tally,
        labels: tuple[ColumnInfo, ...],
        listed: int,
        limited: int,
        divided: int,
        kept: int = 0,
    ) -> ConversionResult:
        return ConversionResult(
            index,
            listed,
            self.bad.bad,
            len(tally.renamed),
            tally.sorted_samples(labels),
            self.source.ignored,
            kept,
            limited,
            divided,
        )

    def _check_any(self, listed: int, good: int) -> None:
        """Raise _NothingError if there are no samples, or no good ones."""
        bad, source = self.bad.bad, self.source
        if not listed:
            ignored = ", ".join(f"{count} x {reason}" for reason, count in source.ignored.items())
            raise _NothingError(
                f"{source.name} holds no samples"
                f"{f' to be packed ({ignored})' if ignored else ''}. Check the source."
            )
        if not good:
            raise _NothingError(
                f"all of {listed} samples were skipped: {_reasons(bad)}. "
                f"The first: {bad[0].sentence}"
            )

    def _report(self, title: str, done: int, size: int, total: int | None) -> None:
        if self.progress is not None:
            self.progress(Step(title, done, total, size, len(self.bad.bad)))


class _NothingError(SourceError):
    """A source holds no good sample."""


def _upload(part: Packed, folder: str, uploads: ShardUploads | None) -> None:
    if uploads is not None and len(part.numbers):
        shard = part.index.shards[0]
        uploads.add(shard, os.path.join(folder, shard.name))


@contextmanager
def _refusal(staging: Staging) -> Iterator[None]:
    """Remove the staging directory if the samples do not fit the set."""
    try:
        yield
    except UsageError:
        staging.discard()
        raise


def _reasons(bad: list[BadSample]) -> str:
    reasons = [f"{count} x {reason}" for reason, count in count_reasons(bad).items()]
    left = len(reasons) - _MOST_REASONS
    return "; ".join(reasons[:_MOST_REASONS]) + (f"; {left} more reasons" if left > 0 else "")
