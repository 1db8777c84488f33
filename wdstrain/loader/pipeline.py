"""The running pipeline of one loader: plan -> reader -> decoders -> slots -> batches, in order.

It is one stream of batches that goes on over the ends of epochs: while an epoch ends, the next is being read and decoded.
`seek` goes on with the stream where it happens to be at the wanted step, and starts a new one where it is not; memory,
threads and worker processes stay. The stream starts its reader when the first task is asked for, which is after the
workers are forked, so that no thread of ours exists at that time.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from wdstrain.decode.bad_samples import MISMATCH, BadSample
from wdstrain.decode.batch_slots import Layout, Slots
from wdstrain.decode.decoder import Decoder
from wdstrain.decode.fields import Field
from wdstrain.decode.flight import flight_of
from wdstrain.decode.label_fields import is_light
from wdstrain.decode.settings import Collate, DecoderSettings, Transform
from wdstrain.decode.task import Result, Task
from wdstrain.decode.worker_processes import WorkerProcesses
from wdstrain.decode.workers import DecoderThreads, InlineDecoder
from wdstrain.errors import SampleError, WdstrainError
from wdstrain.loader.stats import Finding
from wdstrain.loader.task_blocks import TaskBuilder
from wdstrain.order.plan import Order
from wdstrain.reader.reader import Batch, Reader, batches_begun
from wdstrain.reader.slot_sink import SlotSink, direct_fields
from wdstrain.reader.step_blocks import step_blocks
from wdstrain.runtime.signals import DeferSignals
from wdstrain.runtime.watchdog import StallWatchdog, thread_stack
from wdstrain.shards.index import Index, Ints
from wdstrain.storage.prefetch import ReadStopped
from wdstrain.storage.shard_cache import Cache

_log = logging.getLogger("wdstrain")

_AHEAD_BYTES, _AHEAD_OF_LANDING = 64 << 20, 128 << 20  # held beyond half a window
OVER = (
    "this pass over the loader is over: it was closed, or ended with an error. Begin another one."
)
TAKEN = "another loop over the same loader took this one's place. Use a Loader for each loop."
_SPARE = 4  # batches in the user's hands before further ones are copies


class StageTotals(NamedTuple):
    """What the stages took, by the names of the meter."""

    bytes: int = 0
    fetched: int = 0
    cached: int = 0
    retries: int = 0
    read_seconds: float = 0.0
    shuffle_seconds: float = 0.0
    parse_seconds: float = 0.0
    decode_seconds: float = 0.0
    compute_seconds: float = 0.0
    collate_seconds: float = 0.0
    handoff_seconds: float = 0.0
    copies: int = 0
    reread: int = 0


class BatchInfo(NamedTuple):
    """Of one batch: the samples in its rows (int64[b]), which rows have the sample that the plan put there (bool[b]; the others
    have one that stands in for it), how many are padding, and the bad samples among the others."""

    ids: Ints
    own: npt.NDArray[np.bool_]
    padded: int
    bad: list[Finding]


class Pipeline:
    """Batches of one rank. `plans(epoch)` gives the plan of an epoch."""

    def __init__(
        self,
        index: Index,
        plans: Callable[[int], Order],
        rank: int,
        *,
        fields: Mapping[str, Field] | None,
        transform: Transform | None,
        takes_rng: bool,
        collate_fn: Collate | None,
        on_bad: str,
        num_workers: int,
        context: str | None,
        cache: Cache | None = None,
        sources: Mapping[str, int] | None = None,
        patience: float = 0,
    ) -> None:
        """sources: the first id of each source of a mixture, in order; batches then say where each sample is from.

        patience: seconds without a batch until it is told who is stuck; 0: never.
        """
        self.process = (
            os.getpid()
        )  # which started it; what a forked child inherits of it does not work there
        replace, self._marks = on_bad != "raise", on_bad == "mark"
        self._using = (
            threading.RLock()
        )  # a batch is taken in one thread, and all may be closed in another
        self._index, self._plans, self._rank = index, plans, rank
        self._source_names, self._source_firsts = (
            list(sources or ()),
            np.array(list((sources or {}).values()), np.int64),
        )
        plan = plans(0)
        examples = {
            name: field.example
            for name, field in (fields or {}).items()
            if field.example is not None
        }
        layout = Layout.of(examples, plan.batch_size)
        lands = direct_fields(index, fields, layout, plan)
        decoded = (
            None
            if fields is None
            else {name: field for name, field in fields.items() if name not in lands}
        )
        # bytes are taken from the arena by this process itself, and a number beside an array is read sooner than sent away
        inline = transform is None and (
            decoded is None or (bool(lands) and all(is_light(one) for one in decoded.values()))
        )
        read_bytes = (
            plan.batch_size * sum(shard.bytes for shard in index.shards) / max(1, len(index))
        )
        flight = flight_of(num_workers, plan.batch_size, layout.size, read_bytes)
        busy = 1 if inline else flight.batches
        ahead = _AHEAD_OF_LANDING if lands else _AHEAD_BYTES
        begun = batches_begun(index, plan, rank, ahead) if lands else 0
        self._slots = Slots(layout, busy=busy + begun + 1, spare=_SPARE)
        landing = self._landing = (
            SlotSink(index, lands.values(), self._slots, replace) if lands else None
        )
        wanted = (
            None
            if decoded is None
            else {name for field in decoded.values() for name in field.names}
        )
        self._reader = Reader(
            index,
            plans,
            rank,
            ahead=ahead,
            in_flight=busy + 1,
            needed_fields=wanted,
            skip_unreadable=replace,
            cache=cache,
            slot_sink=landing,
        )
        self._to_do = TaskBuilder(index, wanted, with_keys=transform is not None, landing=landing)
        self._replace, self._cache, self._transforms = replace, cache, transform is not None
        settings = DecoderSettings(
            field_names=index.fields,
            layout=layout,
            fields=decoded,
            transform=transform,
            takes_rng=takes_rng,
            collate_fn=collate_fn,
            on_bad=on_bad,
            seed=plan.seed,
        )
        self._decoder = decoder = Decoder(settings, self._reader.memory, self._slots.memory)
        self._workers: InlineDecoder | DecoderThreads | WorkerProcesses
        if inline:
            self._workers = InlineDecoder(decoder)
        else:
            self._workers = (
                WorkerProcesses(decoder, flight, context)
                if num_workers
                else DecoderThreads(decoder, flight)
            )
        self._seeded = isinstance(self._workers, WorkerProcesses)
        self._results: Iterator[Result] | None = None
        self._at: tuple[int, int] | None = None  # epoch and step of the batch that comes out next
        self._epoch = -1  # of the last seek
        self._until: int | None = None  # the epoch before which the tasks end
        self._broken: WdstrainError | None = None  # why they ended before
        self._whole = True  # nothing broke off while a batch was made: a stream that was interrupted would seem to have ended
        self._pending: dict[
            int, tuple[Batch, list[str]]
        ] = {}  # batch number -> what was asked of the decoders, and its keys
        self._awaited, self._waiter = (
            0,
            0,
        )  # the number of the batch that comes out next, and the thread that waits for it
        self._patience, self._watch = patience, StallWatchdog.disabled()
        self._seconds = {"parse_seconds": 0.0, "decode_seconds": 0.0, "compute_seconds": 0.0}
        self._seconds |= {"collate_seconds": 0.0, "handoff_seconds": 0.0}
        self._reread = 0
        self.closed = False  # or about to be
        self.let_go: Callable[[], Any] = lambda: None  # whoever had it closed ends it no more
        self._turn = (
            0  # grows with every seek: an older loop over the same stream is told that it lost it
        )

    @property
    def decoders(self) -> int:
        return self._workers.count

    def seek(self, epoch: int, step: int, until: int | None = None) -> int:
        """The next batch is this one. Returns the turn of who asked, which lasts until another seeks. Raises WdstrainError after
        the end.

        until: the epoch of which nothing is read ahead; by default none is read ahead of an epoch that is asked for again.
        """
        with self._using:
            if (
                self.closed
            ):  # by another thread, since it was asked for; nobody would close it any more
                raise WdstrainError(OVER)
            self._turn += 1
            self._reader.resume()
            if not self._whole:  # a worker may have half a message
                self._workers.close()
            if self._results is None or self._at != (epoch, step) or not self._whole:
                self._until = epoch + 1 if until is None and epoch == self._epoch else until
                tasks = self._tasks(epoch, step, self._until)
                self._results, self._at, self._awaited = self._workers.run(tasks), (epoch, step), 0
                self._whole = True
            self._epoch = epoch
            return self._turn

    def next(self, turn: int | None) -> tuple[dict[str, Any], BatchInfo]:
        """The next batch and what is to be counted of it, for the loop that has the turn. Raises SampleError for a bad sample that
        was not replaced, WdstrainError where another loop has the turn."""
        with self._using:  # the turn may be lost in waiting for it
            if turn != self._turn:
                raise WdstrainError(TAKEN)
            return self._next()

    def _next(self) -> tuple[dict[str, Any], BatchInfo]:
        if self._results is None or self._at is None or not self._whole:
            raise WdstrainError(OVER)
        self._whole = False
        result = self._result(self._results)
        came = time.perf_counter()
        batch, keys = self._pending.pop(result.batch_number)
        epoch, step = self._at
        given, found, plan = batch.ids.copy(), list[Finding](), self._plans(epoch)
        own = np.ones(len(given), bool)
        if result.bad:
            result = self._good(result, batch, epoch)
            for one in result.bad:
                given[one.row], own[one.row] = one.substitute, False
            found = [self._found(batch, one) for one in result.bad if batch.valid[one.row]]
        valid = len(given) if plan.tail == "drop" else int(np.count_nonzero(batch.valid))
        rows = valid if plan.tail == "keep" else len(given)
        values = result.values
        if not rows:
            values = {
                name: _none_of(value) if self._transforms else value[:0]
                for name, value in values.items()
            }
        made: dict[str, Any] = self._slots.lease(result.slot, rows) | values
        made["__key__"] = self._index.keys(given[:rows]) if result.bad else keys[:rows]
        if self._source_names:
            numbers = np.searchsorted(self._source_firsts, given, side="right") - 1
            made["__source__"] = [self._source_names[i] for i in numbers.tolist()]
        if plan.tail == "pad":
            made["__valid__"] = torch.from_numpy(batch.valid.copy())
        self._reader.release(result.batch_number)
        self._seconds["decode_seconds"] += result.rows_done - result.started
        self._seconds["compute_seconds"] += result.cpu_seconds
        self._seconds["collate_seconds"] += (
            result.finished - result.rows_done + time.perf_counter() - came
        )
        after = (epoch, step + 1) if step + 1 < plan.steps else (epoch + 1, 0)
        self._at = after if after[0] != self._until else None
        self._whole = True
        return made, BatchInfo(given[:rows], own[:rows], rows - valid, found)

    def costs(self) -> StageTotals:
        """What the stages took since the pipeline was made."""
        reader, tally = self._reader, self._reader.tally
        return StageTotals(
            reader.read_bytes,
            tally.fetched,
            tally.cached,
            tally.retries,
            reader.read_seconds,
            reader.shuffle_seconds,
            copies=self._slots.copies,
            reread=self._reread,
            **self._seconds,
        )

    def lock_pages(self) -> None:
        """Batch memory is about to be copied to a CUDA device, again and again."""
        self._slots.lock_pages()

    def goes_on_for_another(self, turn: int | None) -> bool:
        """Whether a loop that had this turn lost it. None: it had none yet."""
        return turn is not None and turn != self._turn

    def abandon(self, turn: int | None) -> bool:
        """End the reading, for a thread that waits for what it may never get; another seek starts it again.

        Returns False if the turn is another loop's: nothing is ended then.
        """
        if turn != self._turn:
            return False
        self._reader.halt()  # it may be about to begin
        with self._using:
            self._at = None
        return True

    def close(self) -> None:
        """End the reader's thread and the decoders. A forked child has neither, and leaves those of its parent alone.

        A Ctrl-C that comes meanwhile leaves a part of it undone; it can be called again, by several threads at once.
        """
        if os.getpid() != self.process:
            return
        self.closed = True
        self._reader.end()  # whoever waits for a batch in another thread waits no more, and who is about to wait does not begin
        with self._using:
            self._results = self._at = None
            self._workers.close()
        self._reader.close()
        self._watch.close()
        self._watch = StallWatchdog.disabled()

    # --- parts -------------------------------------------------------------------------------------------------------

    def _result(self, results: Iterator[Result]) -> Result:
        """The next result, and what passed from the moment when it was both asked for and made until it was here."""
        asked, others = (
            time.perf_counter(),
            self._seconds["parse_seconds"] + self._reader.shuffle_seconds,
        )
        self._waiter = threading.get_ident()
        self._watch.start_wait()
        try:
            result = next(results, None)
        except MemoryError as error:  # of the batch as a whole; of a sample it is a reason
            raise WdstrainError(
                "there was no memory to make a batch. Lower batch_size, num_workers or shuffle_buffer, or give it more memory."
            ) from error
        finally:
            self._watch.end_wait()
        if result is None:  # all that came before what cannot be read was delivered
            broken, self._broken = self._broken, None
            try:
                raise broken or WdstrainError(OVER)
            finally:
                del broken  # which refers to this frame
        others = (
            self._seconds["parse_seconds"] + self._reader.shuffle_seconds - others
        )  # which were done meanwhile
        self._seconds["handoff_seconds"] += max(
            0.0, time.perf_counter() - max(asked, result.finished) - others
        )
        self._awaited = result.batch_number + 1
        return result

    def _tell(self, seconds: float) -> None:
        """Nothing came for so long: say who is stuck, and where. Runs in the thread of the watch."""
        at, behind = self._at, self._reader.behind()
        if at is None:
            return
        said = f"no batch for {seconds:.0f} s (epoch {at[0]}, step {at[1]}). "
        states = [
            (number, *self._workers.progress[number].state)
            for number in range(self._workers.progress.count)
        ]
        busy = [
            (number, self._pending.get(batch_number), row)
            for number, batch_number, row in states
            if batch_number >= self._awaited
        ]
        if behind is not None:
            said += f"Stage read: {behind}"
        elif busy:
            said += "Stage decode:\n" + "\n".join(
                self._stuck(number, batch, row) for number, batch, row in busy
            )
        elif self._workers.progress.count == 0:
            said += f"Stage decode, in the loop's own thread:\n{thread_stack(self._waiter)}"
        else:
            said += f"Stage hand-off: no decoder has work; the thread that waits:\n{thread_stack(self._waiter)}"
            idle = [self._workers.stack(number) for number in range(self._workers.progress.count)]
            said += "".join(f"\n{name}:\n{stack}" for name, stack in idle)
        _log.warning("%s", said)

    def _stuck(self, number: int, asked: tuple[Batch, list[str]] | None, row: int) -> str:
        name, stack = self._workers.stack(number)
        calls = stack.splitlines()  # what is below the decoder is how a thread or process begins
        ours = [
            i
            for i, call in enumerate(calls)
            if "decoder.py" in call and call.endswith("in __call__")
        ]
        stack = "\n".join(calls[: ours[0] + 1] if ours else calls)
        if asked is None:
            return f"{name}:\n{stack}"
        ids = asked[0].ids[row : row + 1]
        shard, first = self._index.shards[int(self._index.shard_of(ids)[0])], int(ids[0])
        offset = int(self._index.table.start[first])
        return f"{name} is at {shard.shown}: '{self._index.key(first)}' at offset {offset} (row {row} of its batch):\n{stack}"

    def _tasks(self, epoch: int, step: int, until: int | None) -> Iterator[Task]:
        """Tasks from this step on, up to an epoch or without end. Runs in the training process, as the DataLoader's sampler or for threads."""
        self._pending.clear()
        self._broken = None
        self._reader.stop()
        self._slots.reset()
        self._reader.start(epoch, step, until)
        if self._patience and not self._watch.is_running:
            with DeferSignals():
                self._watch = StallWatchdog(self._patience, self._tell)
            self._watch.start_wait()
        batch_number = 0
        while epoch != until:
            begun, waited = time.perf_counter(), self._reader.shuffle_seconds
            for stretch in step_blocks(self._plans(epoch), self._rank, step):
                block = self._to_do.build_block(epoch, stretch.ids, stretch.firsts)
                for number in range(len(stretch)):
                    try:
                        batch = self._reader.collect(stretch, number)
                        slot = (
                            self._slots.take()
                            if self._landing is None
                            else self._landed(self._landing, batch_number, batch)
                        )
                    except ReadStopped:
                        raise
                    except (
                        WdstrainError
                    ) as error:  # the loop is given what came before it, and then raises it
                        self._broken = error
                        return
                    self._pending[batch_number] = (
                        batch,
                        block.keys[stretch.firsts[number] : stretch.firsts[number + 1]],
                    )
                    task = block.task(
                        number, batch_number, slot, batch.offset, batch.unreadable, batch.unverified
                    )
                    waited = self._reader.shuffle_seconds - waited
                    self._seconds["parse_seconds"] += time.perf_counter() - begun - waited
                    yield task
                    begun, waited = time.perf_counter(), self._reader.shuffle_seconds
                    batch_number += 1
            epoch, step = epoch + 1, 0

    def _landed(self, landing: SlotSink, batch_number: int, batch: Batch) -> int:
        """The slot into which a batch was read."""
        slot, unreadable, again = landing.slot(batch_number, batch.ids)
        batch.unreadable.update(unreadable)
        self._reread += again
        return slot

    def _again(self, failed: Result, batch: Batch, epoch: int) -> Result:
        """A batch after what is not as it was packed was read once more, from where it comes."""
        damaged = batch.ids[[one.row for one in failed.bad if one.reason == MISMATCH]]
        self._reread += len(damaged)
        for number in set(self._index.shard_of(damaged).tolist()):
            if self._cache is not None:
                self._cache.forget(self._index.shards[number])
        if (
            self._landing is not None
        ):  # others may have taken the place of what landed in the rows of bad samples
            for row in {one.row for one in failed.bad} - batch.unreadable.keys():
                self._landing.reread(int(batch.ids[row]), row, failed.slot)
        task = self._to_do.make(
            failed.batch_number, epoch, failed.slot, batch.ids, batch.offset, batch.unreadable
        )
        return self._to_do.again(self._decoder, failed, task, batch.offset, seeded=self._seeded)

    def _good(self, result: Result, batch: Batch, epoch: int) -> Result:
        """A batch of which samples are bad, once others stand in for them. Raises SampleError where none does."""
        if any(one.reason == MISMATCH for one in result.bad):
            result = self._again(result, batch, epoch)
        if self._replace and not self._marks and len(result.bad) == len(batch.ids):
            result = self._to_do.substitute_batch(
                self._decoder, result, epoch, batch.ids, seeded=self._seeded
            )
        unreadable = [one for one in result.bad if one.substitute < 0]
        if unreadable:
            more = f" ({len(unreadable)} bad samples in this batch.)" if len(unreadable) > 1 else ""
            if unreadable[0].whole_batch:
                raise SampleError(
                    f"a batch that begins with {self._found(batch, unreadable[0]).sentence}"
                )
            more += (
                " No good sample was found near it to take its place."
                if self._replace
                else ' on_bad="replace" goes on without it.'
            )
            raise SampleError(self._found(batch, unreadable[0]).sentence + more)
        return result

    def _found(self, batch: Batch, bad: BadSample) -> Finding:
        number = int(batch.ids[bad.row])
        shard = self._index.shards[int(self._index.shard_of(batch.ids[bad.row : bad.row + 1])[0])]
        offsets = {name: offset for name, offset, _ in self._index.members(number)}
        offset = offsets.get(bad.field, int(self._index.table.start[number]))
        if (
            bad.field and bad.field not in offsets
        ):  # it is missing; the decoder was sent only what is looked for
            bad = bad._replace(field="", reason=f"{bad.reason} (but {', '.join(offsets)})")
        return Finding(shard.shown, self._index.key(number), bad.field, offset, bad.reason)


def _none_of(value: Any) -> Any:
    """The collated value of a batch without its rows: of the kind it would be, and empty."""
    if isinstance(value, torch.Tensor):
        return value[:0]
    if isinstance(value, Mapping):
        return {name: _none_of(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)) and any(
        isinstance(part, (torch.Tensor, Mapping)) for part in value
    ):
        return type(value)(
            map(_none_of, value)
        )  # what default_collate makes of sequences: a column for each place
    return []
