"""Pack the samples of a source into shards: one run of a conversion.

`Packer` lists the samples, plans the shards, has them written, and puts them in place with their
index. `runner` decides which run a call needs.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any

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
from wdstrain.conversion.index_builder import IndexBuilder
from wdstrain.conversion.listing import BadSamples, Listing, Source, Stream
from wdstrain.conversion.options import Options
from wdstrain.conversion.output_dir import (
    RENAMED_NAME,
    SKIPPED_NAME,
    OutputTransaction,
    free_number,
)
from wdstrain.conversion.parallel import Tick, run
from wdstrain.conversion.result import (
    ClassCounts,
    ConversionResult,
    Progress,
    Step,
    Tally,
    count_reasons,
    divided_images,
)
from wdstrain.conversion.resume import (
    call_of,
    saved_options,
)
from wdstrain.conversion.shard_plan import (
    PlannedShard,
    batches,
    check_prefixes,
    chosen,
    plan_shards,
)
from wdstrain.conversion.shard_writer import Packed, identity, kept, write_shard
from wdstrain.conversion.stream_writer import StreamWriter, can_write_directly
from wdstrain.conversion.upload import ShardUploads
from wdstrain.errors import SourceError, UsageError
from wdstrain.runtime.byte_sizes import as_bytes
from wdstrain.shards.index import Index, Label, Shard, join, with_labels
from wdstrain.shards.index_io import TABLE_NAME, json_bytes, save_index
from wdstrain.shards.tar import END
from wdstrain.storage.addresses import INDEX_NAME
from wdstrain.storage.files import read_whole, write_whole

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
        self._bad = BadSamples(collect=options.on_error == "skip")
        self._kept = 0

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
            rows = IndexBuilder()
            for number in shard.numbers.tolist():
                rows.reserve(catalog.key(number), catalog.member_sizes(number))
            tally.add(shard.split, catalog.meta, shard.numbers, shard.numbers)
            entry = Shard(
                f"{out.rstrip('/')}/{shard.name}", len(rows), rows.stop + len(END), shard.split
            )
            parts.append(Index((entry,), tuple(rows.fields), rows.offsets()))
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
        title = "packing" if self._write else "comparing"
        packed = []
        with closing(
            self._packed(title, plan, catalog, recipe, folder, write=self._write)
        ) as shards:
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
        if listed != written + limited + len(self._bad.bad):
            raise SourceError(
                f"{listed} samples were listed; {written} were packed, {len(self._bad.bad)} "
                f"skipped, {limited} left out."
            )
        if not written:
            raise self._all_skipped(listed)
        return self._finish(packed, tally, labels, folder, listed, limited)

    def _direct(self, stream: Stream) -> ConversionResult:
        """Write a stream in its own order, in one pass."""
        folder = self._transaction.folder("shards")
        writer = StreamWriter(
            folder, self._options, self._bad, write=self._write, uploads=self._uploads
        )
        title = "packing" if self._write else "comparing"
        writer.run(stream, lambda done, size: self._report(title, done, stream.total, size))
        if not writer.listed:
            self._transaction.clear()
            raise _no_samples(stream)
        _check_stratum(stream, self._options)
        if not writer.packed:
            raise self._all_skipped(writer.listed)
        self._transaction.check_names(list(writer.tally.samples))
        return self._finish(writer.packed, writer.tally, stream.labels(), folder, writer.listed, 0)

    def _catalog(self) -> tuple[FileCatalog | SpanCatalog, tuple[Label, ...], int]:
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
        done = list(self._packed("encoding", plan, catalog, recipe, folder, write=True))
        index = join([part.index for part in done])
        at = np.concatenate([part.numbers for part in done])
        file = index.shard_of(np.arange(len(index))).astype(np.int32)
        paths = [shard.path for shard in index.shards]
        name, meta = self._source.name, catalog.meta.take(at)
        return SpanCatalog(name, paths, file, index.offsets, index.fields, meta), at

    def _packed(
        self,
        title: str,
        plan: list[PlannedShard],
        catalog: Catalog,
        recipe: Recipe,
        folder: str,
        *,
        write: bool,
    ) -> Generator[Packed, None, None]:
        """Yield the shards in order as they are written; those of an earlier run are kept."""
        options, collect = self._options, self._bad.collect
        marks = [identity(shard, catalog, recipe, collect) for shard in plan]
        found = [
            kept(folder, shard, mark) if options.resume else None
            for shard, mark in zip(plan, marks, strict=True)
        ]
        missing = [number for number, part in enumerate(found) if part is None]
        self._kept += len(plan) - len(missing)
        total = sum(len(shard.numbers) for shard in plan)
        before = sum(len(part.numbers) for part in found if part is not None)
        workers = options.processes(int(catalog.sizes.sum()))
        work = _WriteShards(
            folder,
            [(plan[number], marks[number] if write else None) for number in missing],
            catalog,
            recipe,
            collect,
            max(1 << 20, as_bytes(options.memory) // (8 * workers)),
        )

        def progress(done: int, size: int) -> None:
            self._report(title, before + done, total, size)

        with closing(run(work, len(missing), workers, progress, engine=options.engine)) as results:
            for part in found:
                packed = next(results) if part is None else part
                for sample in packed.bad:
                    self._bad.put(sample)
                yield packed
            next(results, None)  # to its end: there it waits for its processes

    def _finish(
        self,
        packed: list[Packed],
        tally: Tally,
        labels: tuple[Label, ...],
        folder: str,
        listed: int,
        limited: int,
    ) -> ConversionResult:
        """Write the index and the lists of samples, and put the set in place."""
        bad, former = self._bad.bad, self._former
        taken = os.listdir(self._transaction.out) if former is not None else []
        parts, files = _renumbered(packed, folder, taken)
        samples = tally.sorted_samples(labels)
        divided = divided_images([*parts, *filter(None, [former])])
        info = {
            "source": self._source.source,
            "options": saved_options(self._options),
            "samples": samples,
            "listed": listed,
            "skipped": len(bad),
            "renamed": len(tally.renamed),
            "ignored": self._source.ignored,
            "divided": divided,
            **self._split_record(samples),
        }
        index = replace(with_labels(join(parts), labels), info=info)
        if former is not None:
            with self._refusal():
                index = joined(former, index, self._transaction.shown)
            call = call_of(self._source, self._options, former)
            entry = {**info, "source": call["source"], "limited": limited}
            index = replace(index, info=appended_info(former, entry))
        if self._write:
            files |= self._lists(folder, tally.renamed)
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
            self._kept,
            limited,
            divided,
        )
        return result.moved_to(self._transaction.out) if self._write else result

    def _split_record(self, samples: ClassCounts) -> dict[str, Any]:
        """Return how the splits were made, and the shares that they got."""
        options = self._options
        if not options.split:
            return {}
        sums = {split: sum(counts.values()) for split, counts in samples.items()}
        return {
            "split": {
                "shares": options.split,
                "got": {split: count / sum(sums.values()) for split, count in sums.items()},
                "stratify": options.stratify,
                "group_by": self._source.source.get("group_by"),
                "seed": options.seed,
            }
        }

    def _lists(self, folder: str, renamed: list[dict[str, str]]) -> dict[str, str]:
        """Write the lists of skipped and of renamed samples; an append extends those of the set.

        Returns {final name: name in `folder`}.
        """
        files = {}
        for name, rows in (
            (SKIPPED_NAME, [sample.portable() for sample in self._bad.bad]),
            (RENAMED_NAME, renamed),
        ):
            if rows:
                data = b"".join(map(json_bytes, rows))
                if self._former is not None:
                    data = (read_whole(os.path.join(self._transaction.out, name)) or b"") + data
                write_whole(os.path.join(folder, name), data)
                files[name] = name
        return files

    @contextmanager
    def _refusal(self) -> Iterator[None]:
        """Remove the staging directory if the samples do not fit the set: nothing can be resumed."""
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
        reasons = [f"{count} x {reason}" for reason, count in count_reasons(bad).items()]
        more = (
            f"; {len(reasons) - _MOST_REASONS} more reasons" if len(reasons) > _MOST_REASONS else ""
        )
        return SourceError(
            f"all of {listed} samples were skipped: {'; '.join(reasons[:_MOST_REASONS])}{more}. "
            f"The first: {bad[0].sentence}{place}"
        )

    def _report(self, title: str, done: int, total: int | None, size: int) -> None:
        self._progress(Step(title, done, total, size, len(self._bad.bad)))


def _check_stratum(source: Source, options: Options) -> None:
    if options.stratify is not None and options.stratify != source.stratum:
        raise UsageError(
            f"stratify={options.stratify!r}: {source.name} has no such label of classes"
            f"{f', but {source.stratum!r}' if source.stratum else ''}. Name a label of classes, or "
            f"leave stratify out."
        )


@dataclass(frozen=True)
class _WriteShards:
    """Task of the workers: write a shard. shards: with the identity of each; None: only index it."""

    folder: str
    shards: list[tuple[PlannedShard, str | None]]
    catalog: Catalog
    recipe: Recipe
    collect: bool
    memory: int

    def __call__(self, number: int, tick: Tick) -> Packed:
        shard, mark = self.shards[number]
        return write_shard(
            self.folder,
            shard,
            self.catalog,
            self.recipe,
            collect=self.collect,
            memory=self.memory,
            mark=mark,
            tick=tick,
        )


def _renumbered(
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


def _no_samples(source: Source) -> SourceError:
    ignored = ", ".join(f"{count} x {reason}" for reason, count in source.ignored.items())
    return SourceError(
        f"{source.name} holds no samples{f' to be packed ({ignored})' if ignored else ''}."
    )
