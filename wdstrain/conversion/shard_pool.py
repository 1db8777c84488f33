"""Write planned shards in worker processes, and keep those that an earlier run wrote."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass

from wdstrain.conversion.catalog import Catalog
from wdstrain.conversion.images import Recipe
from wdstrain.conversion.listing import BadSamples
from wdstrain.conversion.options import Options
from wdstrain.conversion.parallel import Tick, run
from wdstrain.conversion.shard_plan import PlannedShard
from wdstrain.conversion.shard_writer import Packed, identity, kept, write_shard
from wdstrain.runtime.byte_sizes import as_bytes

Report = Callable[[int, int, int], None]  # samples written, samples in all, bytes


@dataclass(frozen=True)
class ShardJob:
    """Samples to write into shards. write=False: shards are indexed but not written."""

    catalog: Catalog
    recipe: Recipe
    folder: str
    write: bool = True

    def run(
        self, plan: Sequence[PlannedShard], options: Options, bad: BadSamples, report: Report
    ) -> Generator[Packed, None, None]:
        """Yield the shards in order as they are written; with `resume`, existing ones are kept."""
        marks = [identity(shard, self.catalog, self.recipe, bad.collect) for shard in plan]
        found = [
            kept(self.folder, shard, mark) if options.resume else None
            for shard, mark in zip(plan, marks, strict=True)
        ]
        missing = [number for number, part in enumerate(found) if part is None]
        total = sum(len(shard.numbers) for shard in plan)
        before = sum(len(part.numbers) for part in found if part is not None)
        workers = options.processes(int(self.catalog.sizes.sum()))
        work = _WriteShards(
            self,
            [(plan[number], marks[number] if self.write else None) for number in missing],
            bad.collect,
            max(1 << 20, as_bytes(options.memory) // (8 * workers)),
        )

        def progress(done: int, size: int) -> None:
            report(before + done, total, size)

        with closing(run(work, len(missing), workers, progress, engine=options.engine)) as results:
            for part in found:
                packed = next(results) if part is None else part
                for sample in packed.bad:
                    bad.put(sample)
                yield packed
            next(results, None)  # waits for the worker processes to end


@dataclass(frozen=True)
class _WriteShards:
    """Task of the workers. shards: with the identity of each; None: it is only indexed."""

    job: ShardJob
    shards: list[tuple[PlannedShard, str | None]]
    collect: bool
    memory: int

    def __call__(self, number: int, tick: Tick) -> Packed:
        shard, mark = self.shards[number]
        return write_shard(
            self.job.folder,
            shard,
            self.job.catalog,
            self.job.recipe,
            collect=self.collect,
            memory=self.memory,
            mark=mark,
            tick=tick,
        )
