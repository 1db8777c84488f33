"""Pack the samples of a source into shards: one run of a conversion.

`Packer` lists the samples, plans the shards, has them written, and puts them in place with their
index. `runner` decides which run a call needs.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
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
from wdstrain.conversion.catalog import Catalog, FileCatalog, SpanCatalog
from wdstrain.conversion.external_shuffle import restore_shuffle, shuffle_stream
from wdstrain.conversion.images import Recipe
from wdstrain.conversion.listing import BadSample, BadSamples, Listing, Source, Stream
from wdstrain.conversion.options import Options
from wdstrain.conversion.output_dir import OutputTransaction
from wdstrain.conversion.result import (
    ConversionResult,
    Progress,
    Step,
    Tally,
    count_reasons,
    divided_images,
    record,
    renumbered,
    write_lists,
)
from wdstrain.conversion.resume import call_of
from wdstrain.conversion.set_exchange import SKIPPED_NAME
from wdstrain.conversion.shard_plan import (
    PlannedShard,
    batches,
    check_prefixes,
    chosen,
    plan_shards,
)
from wdstrain.conversion.shard_pool import ShardJob
from wdstrain.conversion.shard_writer import IndexBuilder, Packed
from wdstrain.conversion.stream_writer import StreamWriter, can_write_directly
from wdstrain.conversion.upload import ShardUploads
from wdstrain.errors import SourceError, UsageError
from wdstrain.shards.declare import with_labels
from wdstrain.shards.index import Index, Shard, join
from wdstrain.shards.index_io import TABLE_NAME, json_bytes, save_index
from wdstrain.shards.kinds import ColumnInfo
from wdstrain.shards.tar_headers import END
from wdstrain.storage.addresses import INDEX_NAME
from wdstrain.storage.files import write_whole

_MOST_REASONS = 5  # in the error of a source without a good sample
# Bytes of images that one task re-encodes: a tenth of a second, so that workers end together.
_ENCODE_BATCH = 6 << 20


class Packer:
    """One run.

    transaction: None for a dry run. former: the set that it appends to. write=False: shards are
    made but not written, to compare them with existing ones.
    """

    def __init__(
        self,
        source: Source,
        transaction: OutputTransaction | None,
        options: Options,
        progress: Progress | None,
        *,
        former: Index | None = None,
        write: bool = True,
        uploads: ShardUploads | None = None,
    ) -> None:
        self._source, self._staging, self._options = source, transaction, options
        self._former, self._uploads = former, uploads
        self._write, self._progress = write, progress or (lambda step: None)
        self._title = "packing" if write else "comparing"
        self._bad = BadSamples(collect=options.on_error == "skip")

    @property
    def _transaction(self) -> OutputTransaction:
        assert self._staging is not None, "a dry run writes nothing"
        return self._staging

    def planned(self, out: str) -> ConversionResult:
        """Return the result of a dry run: the index has no checksums and no columns."""
        catalog, labels, listed = self._catalog()
        if not listed:
            raise _no_samples(self._source)
        if not len(catalog.sizes):
            raise self._all_skipped(listed)
        numbers = chosen(catalog, self._options)
        tally, parts = Tally(catalog), []
        if self._former is not None:
            check_labels(self._former, labels, out)
            check_keys(self._former, catalog, numbers, out)
        for shard in self._plan(catalog, self._options):
            tally.add(shard.split, catalog.meta, shard.numbers, shard.numbers)
            parts.append(_planned_index(shard, catalog, out))
        index = with_labels(join(parts), labels)
        info = {"source": self._source.source, "made": "planned by a dry run"}
        return ConversionResult(
            replace(index, info=info),
            listed,
            self._bad.bad,
            len(tally.renamed),
            tally.sorted_samples(labels),
            self._source.ignored,
            limited=len(catalog.sizes) - len(numbers),
            divided=tally.divided,
        )

    def _plan(self, catalog: Catalog, options: Options) -> list[PlannedShard]:
        resplit = isinstance(self._source, Stream) and self._source.resplit
        plan = plan_shards(catalog, options, resplit=resplit)
        if self._former is not None:
            check_prefixes([*self._former.splits, *(shard.split for shard in plan)])
        return plan

    def run(self, *, may_be_done: bool = False) -> ConversionResult:
        """may_be_done: an append that is not to be repeated, if it was the last one."""
        if isinstance(self._source, Stream) and can_write_directly(self._options):
            return self._direct(self._source)
        source, labels, listed = self._catalog()
        if not listed:
            self._transaction.clear()
            raise _no_samples(self._source)
        _check_stratum(self._source, self._options)
        numbers = chosen(source, self._options)
        if self._former is not None:
            call = call_of(self._source, self._options)
            entry = {"source": call["source"], "options": call["options"], "listed": listed}
            if may_be_done and was_appended(self._former, source, numbers, entry):
                self._transaction.clear()
                return appended_result(self._former)
            with self._refusal():
                check_labels(self._former, labels, self._transaction.shown)
                check_keys(self._former, source, numbers, self._transaction.shown)
        catalog, recipe, options = source, Recipe.of(self._options), self._options
        at = np.arange(len(source.sizes))  # number in the source of each sample of the catalog
        if recipe.changes:
            catalog, at = self._encoded(source, recipe)
            recipe = recipe.looked_at()
            options = replace(options, limit=None)  # applied when the images were chosen
        if not len(catalog.sizes):
            raise self._all_skipped(listed)
        plan = self._plan(catalog, options)
        self._transaction.check_names(list(dict.fromkeys(shard.split for shard in plan)))
        folder = self._transaction.folder("shards")
        packed = []
        job = ShardJob(catalog, recipe, folder, write=self._write)
        with closing(self._shards(job, plan, self._title)) as shards:
            for part in shards:
                if self._uploads is not None and len(part.numbers):
                    shard = part.index.shards[0]
                    self._uploads.add(shard, os.path.join(folder, shard.name))
                packed.append(part)
        tally = Tally(source)
        for part in packed:
            if len(part.numbers):
                split = part.index.shards[0].split
                tally.add(split, catalog.meta, part.numbers, at[part.numbers])
        limited = len(source.sizes) - len(numbers)
        written = sum(len(part.numbers) for part in packed)
        _check_sum(listed, written, len(self._bad.bad), limited)
        if not written:
            raise self._all_skipped(listed)
        return self._finish(packed, tally, labels, folder, listed, limited)

    def _direct(self, stream: Stream) -> ConversionResult:
        """Write a stream in its own order, in one pass."""
        folder = self._transaction.folder("shards")
        writer = StreamWriter(
            folder, self._options, self._bad, write=self._write, uploads=self._uploads
        )
        writer.run(stream, lambda done, size: self._report(self._title, done, stream.total, size))
        if not writer.listed:
            self._transaction.clear()
            raise _no_samples(stream)
        _check_stratum(stream, self._options)
        if not writer.packed:
            raise self._all_skipped(writer.listed)
        self._transaction.check_names(list(writer.tally.samples))
        return self._finish(writer.packed, writer.tally, stream.labels(), folder, writer.listed, 0)

    def _catalog(self) -> tuple[FileCatalog | SpanCatalog, tuple[ColumnInfo, ...], int]:
        """Return the samples, their labels, and the number of samples, bad ones included."""
        source, options, bad = self._source, self._options, self._bad
        if isinstance(source, Listing):
            for sample in source.bad:
                bad.put(sample)
            catalog = FileCatalog(source, options.seed, bad)
            return catalog, source.labels, len(source.items) + len(source.bad)
        first_key = next_numbered_key(self._former) if self._former is not None else 0
        folder = self._staging.folder("spill") if self._staging is not None else None
        restored = None
        if options.resume and folder is not None:
            restored = restore_shuffle(source, folder, options, bad)

        def progress(done: int, size: int) -> None:
            self._report("reading", done, source.total, size)

        return restored or shuffle_stream(source, folder, options, bad, progress, first_key)

    def _encoded(self, catalog: Catalog, recipe: Recipe) -> tuple[SpanCatalog, np.ndarray]:
        """Return the samples with re-encoded images, in the order they will be packed.

        They lie in files in the staging directory. Also returns their numbers in `catalog`.
        """
        numbers = chosen(catalog, self._options)
        runs = batches(numbers, catalog.sizes[numbers], _ENCODE_BATCH)
        plan = [PlannedShard(f"{place:06d}", "", run_) for place, run_ in enumerate(runs)]
        folder = self._transaction.folder("encoded")
        done = list(self._shards(ShardJob(catalog, recipe, folder), plan, "encoding"))
        index = join([part.index for part in done])
        at = np.concatenate([part.numbers for part in done])
        file = index.shard_of(np.arange(len(index))).astype(np.int32)
        paths = [shard.path for shard in index.shards]
        name, meta = self._source.name, catalog.meta.take(at)
        return SpanCatalog(name, paths, file, index.offsets, meta), at

    def _shards(
        self, job: ShardJob, plan: list[PlannedShard], title: str
    ) -> Generator[Packed, None, None]:
        return job.run(plan, self._options, self._bad, partial(self._report, title))

    def _finish(
        self,
        packed: list[Packed],
        tally: Tally,
        labels: tuple[ColumnInfo, ...],
        folder: str,
        listed: int,
        limited: int,
    ) -> ConversionResult:
        """Write the index and the lists of samples, and put the set in place."""
        bad, former = self._bad.bad, self._former
        taken = os.listdir(self._transaction.out) if former is not None else []
        parts, files = renumbered(packed, folder, taken)
        samples = tally.sorted_samples(labels)
        divided = divided_images([*parts, *filter(None, [former])])
        info = {
            "listed": listed,
            "skipped": len(bad),
            "renamed": len(tally.renamed),
            "divided": divided,
            **record(self._source, self._options, samples),
        }
        index = replace(with_labels(join(parts), labels), info=info)
        if former is not None:
            with self._refusal():
                index = joined(former, index, self._transaction.shown)
            call = call_of(self._source, self._options, former)
            entry = {**info, "source": call["source"], "limited": limited}
            index = replace(index, info=appended_info(former, entry))
        if self._write:
            out = self._transaction.out if former is not None else None
            files |= write_lists(folder, bad, tally.renamed, out)
        if former is not None:
            self._transaction.update_set(index, folder, files, call)
        elif self._write:
            save_index(index, folder)
            files |= {TABLE_NAME: TABLE_NAME, INDEX_NAME: INDEX_NAME}
            self._transaction.replace_set(folder, files)
        result = ConversionResult(
            index,
            listed,
            bad,
            len(tally.renamed),
            samples,
            self._source.ignored,
            sum(part.is_kept for part in packed),
            limited,
            divided,
        )
        return result.moved_to(self._transaction.out) if self._write else result

    @contextmanager
    def _refusal(self) -> Iterator[None]:
        """Remove the staging directory if the samples do not fit the set."""
        try:
            yield
        except UsageError:
            self._transaction.clear()
            raise

    def _all_skipped(self, listed: int) -> SourceError:
        """Return the error for a source without a good sample; they are listed in skipped.jsonl."""
        bad, place = self._bad.bad, ""
        if self._write and self._former is None:
            path = os.path.join(self._transaction.out, SKIPPED_NAME)
            write_whole(path, b"".join(json_bytes(sample.portable()) for sample in bad))
            place = f" All are listed in {path}"
        if self._staging is not None:
            self._staging.clear()  # there is nothing to resume
        return SourceError(
            f"all of {listed} samples were skipped: {_reasons(bad)}. "
            f"The first: {bad[0].sentence}{place}"
        )

    def _report(self, title: str, done: int, total: int | None, size: int) -> None:
        self._progress(Step(title, done, total, size, len(self._bad.bad)))


def _check_sum(listed: int, packed: int, skipped: int, limited: int) -> None:
    """Raise SourceError if a sample was lost."""
    if listed != packed + skipped + limited:
        raise SourceError(
            f"{listed} samples were listed, but {packed} were packed, {skipped} skipped and "
            f"{limited} left out by limit. Please report this."
        )


def _planned_index(shard: PlannedShard, catalog: Catalog, out: str) -> Index:
    """Return the index that a shard would have, without checksums and columns."""
    rows = IndexBuilder()
    for number in shard.numbers.tolist():
        rows.reserve(catalog.key(number), catalog.member_sizes(number))
    path = f"{out.rstrip('/')}/{shard.name}"
    entry = Shard(path, len(rows), rows.stop + len(END), shard.split)
    return Index((entry,), rows.offsets())


def _check_stratum(source: Source, options: Options) -> None:
    if options.stratify is not None and options.stratify != source.stratum:
        raise UsageError(
            f"stratify={options.stratify!r}: {source.name} has no such label of classes"
            f"{f', but {source.stratum!r}' if source.stratum else ''}. Name a label of classes, or "
            f"leave stratify out."
        )


def _reasons(bad: list[BadSample]) -> str:
    reasons = [f"{count} x {reason}" for reason, count in count_reasons(bad).items()]
    left = len(reasons) - _MOST_REASONS
    return "; ".join(reasons[:_MOST_REASONS]) + (f"; {left} more reasons" if left > 0 else "")


def _no_samples(source: Source) -> SourceError:
    ignored = ", ".join(f"{count} x {reason}" for reason, count in source.ignored.items())
    return SourceError(
        f"{source.name} holds no samples{f' to be packed ({ignored})' if ignored else ''}. "
        f"Check the source."
    )
