"""The pipeline of one loader: plan -> reader -> decoders -> slots -> batches, in order.

`EpochBatches` takes the batches. The pipeline owns the memory, the reader's run, and the decoding
threads or worker processes. Its stream of batches goes on over the ends of epochs: while an epoch
ends, the next is being read and decoded. `begin` continues the stream if it is at the requested
step, and starts another otherwise. The reader starts when the first task is requested. That is
after the workers are forked: a fork beside a thread of this package could copy a held lock.
"""

from __future__ import annotations

import faulthandler
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from wdstrain.decode.batches import Layout, ReadBatch, Result, Slots
from wdstrain.decode.boxes import Boxes, needed_names
from wdstrain.decode.decoder import Decoder
from wdstrain.decode.fields import Field, NumpyArray
from wdstrain.decode.labels import label_columns
from wdstrain.decode.worker_processes import WorkerProcesses
from wdstrain.decode.workers import DecoderThreads, InFlightLimits, in_flight_limits
from wdstrain.errors import WdstrainError, logger
from wdstrain.loader.batch_assembly import BatchAssembler, TakenBatch
from wdstrain.loader.options import LoaderOptions, open_cache, takes_rng
from wdstrain.loader.stats import StageTotals
from wdstrain.order.order import Order
from wdstrain.reader.reader import Reader
from wdstrain.reader.run import ReadStopped, Run
from wdstrain.runtime.options import size_setting
from wdstrain.runtime.watchdog import StallWatchdog
from wdstrain.runtime.workers import WORKER_DEATH, DeferSignals
from wdstrain.shards.index import Index

OVER = (
    "this pass over the loader is over: it was closed, or ended with an error.",
    "Begin another one.",
)
TAKEN = (
    "another loop over the same loader took this one's place.",
    "Use a Loader for each loop.",
)

_READ_AHEAD = "WDSTRAIN_READ_AHEAD", 64 << 20  # bytes that are read beyond half a window
_SPARE_SLOTS = 4  # batches that the user may keep before further ones are copies
_INLINE_BYTES = (
    4 << 20
)  # batches of arrays up to this size are copied in 0.4 ms by the loop's thread
_SHOWN_KEYS = 16  # of the awaited batch in a message


class Pipeline:
    """Batches of one rank.

    slots: memory of its batches. workers: its decoding threads or processes. closed: `close` was
    called; it may have been interrupted. process: id of the process that made it. A forked child has
    none of its threads and workers.
    """

    def __init__(
        self,
        index: Index,
        plans: Callable[[int], Order],
        options: LoaderOptions,
        fields: Mapping[str, Field] | None,
        sources: Mapping[str, int],
    ) -> None:
        """Reserve the memory; nothing is started. Raises ShardError for a sample that is too large.

        plans: returns the plan of an epoch. fields: those of the options, with class names.
        sources: of a mixture, the first sample id of each source.
        """
        self.process, self.closed = os.getpid(), False
        self._index, self._plans, self._options = index, plans, options
        plan, columns = plans(0), label_columns(fields or {}, index)
        needed: set[str] | None = None
        if fields is not None:  # those that the index does not give
            fields = {name: field for name, field in fields.items() if name not in columns}
            needed = {name for field in fields.values() for name in needed_names(field)}
        examples = {
            name: field.example
            for name, field in (fields or {}).items()
            if field.example is not None
        }
        layout = Layout.of(examples, plan.batch_size)
        # C copies plain arrays faster than processes take and give them; plain bytes are not copied.
        is_copied = options.transform is None and all(
            type(field) is NumpyArray and field.example for field in (fields or {}).values()
        )
        is_inline = is_copied and layout.size <= _INLINE_BYTES
        batch_bytes = plan.batch_size * sum(shard.bytes for shard in index.shards)
        limits = in_flight_limits(
            0 if is_copied else options.num_workers,
            plan.batch_size,
            layout.size,
            batch_bytes / max(1, len(index)),
        )
        if is_inline:
            limits = InFlightLimits(messages=1, decoders=0)
        self.slots = Slots(layout, busy=limits.batches + 1, spare=_SPARE_SLOTS)
        self._reader = Reader(
            index,
            plans,
            options.rank,
            ahead=size_setting(*_READ_AHEAD),
            in_flight=limits.batches + 1,
            needed_fields=needed,
            skip_unreadable=options.on_error != "raise",
            cache=open_cache(options.cache_dir, options.cache_limit),
        )
        self._decoder = decoder = Decoder(
            arena=self._reader.memory,
            slots=self.slots.memory,
            field_names=index.fields,
            layout=layout,
            fields=fields,
            transform=options.transform,
            takes_rng=options.transform is not None and takes_rng(options.transform),
            collate_fn=options.collate_fn,
            on_error=options.on_error,
            seed=plan.seed,
        )
        self.workers: DecoderThreads | WorkerProcesses = DecoderThreads(decoder, limits)
        if options.num_workers and not is_copied:
            context = options.multiprocessing_context
            self.workers = WorkerProcesses(decoder, limits, context)
        self._totals = StageTotals()
        texts = {field.column for field in (fields or {}).values() if isinstance(field, Boxes)}
        self._assembler = BatchAssembler(index, options, columns, texts, needed, sources)
        # Held while a batch is taken. Another thread may close the pipeline meanwhile.
        self._lock = threading.RLock()
        self._taker: Callable[[], object] = lambda: None  # weak
        self._epoch = -1  # that was requested last
        self._position: tuple[int, int] | None = None  # of the next batch
        self._is_taking = False  # remains True if an exception comes while a batch is taken
        self._run: Run | None = None
        self._watchdog = StallWatchdog(options.patience)
        self._finalizer: weakref.finalize[..., Any] | None = None

    def totals(self) -> dict[str, float]:
        """Return what the stages took since the pipeline was made, by the names of `StageTotals`."""
        return {**vars(self._totals), **vars(self._reader.stats), "copies": self.slots.copies}

    # --- batches ----------------------------------------------------------------------------------

    def begin(self, taker: object, epoch: int, step: int, until: int | None = None) -> None:
        """Let `taker` take the batches from this one on, over the ends of epochs; no other may.

        until: the epoch at which reading ahead stops. By default nothing is read ahead if the same
        epoch is requested twice in a row. Raises WdstrainError after `close`.
        """
        with self._lock:
            # Another thread may have closed the pipeline meanwhile; nobody would close it again.
            if self.closed:
                raise WdstrainError(*OVER)
            if self._is_taking:
                self.workers.close()  # a worker may have sent half a message
            if self._is_taking or self._position != (epoch, step):
                if until is None and epoch == self._epoch:
                    until = epoch + 1
                self._begin((epoch, step), until)
            self._epoch, self._taker = epoch, weakref.ref(taker)

    def take(self, taker: object) -> TakenBatch:
        """Return the next batch.

        Raises SampleError for a bad sample that is not replaced, the error of a read at the first
        batch that lacks its samples, and WdstrainError if the pipeline was closed or has a new taker.
        """
        with self._lock:
            if self._taker() is not taker:
                raise WdstrainError(*TAKEN)
            if self.closed or self._is_taking or self._position is None:
                raise WdstrainError(*OVER)
            self._is_taking = True
            epoch, step = self._position
            plan = self._plans(epoch)
            result = self._next_result()
            arrived = time.perf_counter()
            batch = self._pending.popleft()
            taken = self._assembler.assemble(result, batch, plan, self.slots, self._decoder)
            if self._run is not None:
                self._run.release(batch.number)
            self._totals.collate_seconds += time.perf_counter() - arrived
            after = (epoch, step + 1) if step + 1 < plan.steps else (epoch + 1, 0)
            self._position = after if after[0] != self._until else None
            self._is_taking = False
            return taken

    def _begin(self, position: tuple[int, int], until: int | None) -> None:
        """Begin a stream of batches at (epoch, step). `_tasks` starts to read."""
        self._position, self._until, self._is_taking = position, until, False
        self._pending = deque[ReadBatch]()  # batches that are being decoded, in their order
        # Why the tasks ended early. The loop gets the batches before it, and then raises it.
        self._error: WdstrainError | None = None
        self._results = self.workers.run(self._tasks(self._pending, position, until))

    def _next_result(self) -> Result:
        """Return the next decoded batch. Raises WdstrainError if there is none."""
        begun, others = time.perf_counter(), self._seconds_before_decoding
        self._watchdog.start_wait()
        try:
            result = next(self._results, None)
        except MemoryError as error:  # for one sample it would be the reason why it is bad
            raise WdstrainError(
                "there was no memory to make a batch.",
                "Lower {batch_size}, {num_workers} or {shuffle_buffer}, or give it more memory.",
                {"batch_size": ..., "num_workers": ..., "shuffle_buffer": ...},
            ) from error
        finally:
            self._watchdog.end_wait()
        if result is None:  # all batches before the one that cannot be read were delivered
            reason, self._error = self._error, None
            try:
                raise reason or WdstrainError(*OVER)
            finally:
                del reason  # it refers to this frame
        # The hand-off is the time in which a batch was both requested and decoded, but not here.
        # This thread did other work meanwhile.
        totals, others = self._totals, self._seconds_before_decoding - others
        handoff = time.perf_counter() - max(begun, result.finished) - others
        totals.handoff_seconds += max(0.0, handoff)
        for name, seconds in result.seconds.items():
            vars(totals)[name] += seconds
        return result

    @property
    def _seconds_before_decoding(self) -> float:
        """Seconds in which the loop's thread built tasks or waited for samples."""
        return self._totals.parse_seconds + self._reader.stats.shuffle_seconds

    # --- tasks ------------------------------------------------------------------------------------

    def _tasks(
        self, pending: deque[ReadBatch], position: tuple[int, int], until: int | None
    ) -> Iterator[ReadBatch]:
        """Start to read, and yield the task of each batch once its samples are read.

        Decoders have ended older tasks. Raises ReadStopped if the pipeline is closed.
        """
        self.slots.reset()
        if self._run is not None:
            self._run.close()
        run = self._run = Run(self._reader, *position, until)
        with DeferSignals():
            run.start()
            self._watchdog.start(self._log_stall)
        try:
            if self.closed:  # by another thread, before it could see this run
                run.close()
            while (batch := run.next()) is not None:
                begun = time.perf_counter()
                pending.append(batch._replace(slot=self.slots.take()))
                keys = batch.keys if self._options.transform is not None else []
                joined = self._assembler.joined(batch.ids)
                sent = pending[-1]._replace(keys=keys, joined=joined)
                self._totals.parse_seconds += time.perf_counter() - begun
                yield sent
        except ReadStopped:
            raise
        except WdstrainError as error:
            self._error = error

    # --- stalls -----------------------------------------------------------------------------------

    def _log_stall(self, seconds: float) -> None:
        """Log which stage is stuck, with the awaited samples, and print the stacks of all threads.

        Runs in the watchdog's thread.
        """
        stage = _stuck_stage(self._run, self._pending, self._index, self.workers.describe())
        logger.warning("no batch for %.0f s; stderr has the stacks. %s", seconds, stage)
        faulthandler.dump_traceback(2)  # not sys.stderr: a notebook's has no descriptor

    # --- the end ----------------------------------------------------------------------------------

    def close_with(self, owner: object) -> None:
        """Close this pipeline when its owner is garbage collected, unless it is closed before."""
        self._finalizer = weakref.finalize(owner, _close_without_owner, self)

    def close(self) -> None:
        """End all threads and processes. In a forked child this does nothing to its parent's.

        A Ctrl-C may interrupt this method. It can be called again, also by several threads at once.
        """
        if os.getpid() == self.process:
            self.closed = True
            # Before the lock, which a thread that waits for a batch holds.
            if self._run is not None:
                self._run.close()
            self.workers.interrupt(WdstrainError(*OVER))
            with self._lock:
                self._results, self._pending, self._run = iter(()), deque(), None
                self.workers.close()
            self._watchdog.close()
        if self._finalizer is not None:
            # Last: if a Ctrl-C interrupts this method, the owner's end closes the rest.
            self._finalizer.detach()


def _stuck_stage(run: Run | None, pending: Sequence[ReadBatch], index: Index, words: str) -> str:
    """Return which stage the loop waits for, with the awaited samples.

    pending: batches that decoders have. words: on the workers.
    """
    if run is not None and run.is_waiting:
        for read in list(run.in_flight.values()):
            return f"Stage read: {read.shard.shown} is being read at offset {read.start}"
        return "Stage read: nothing is being read"
    if not pending:
        return f"Stage hand-off. {words}"
    awaited = pending[0]
    first, more = int(awaited.ids[0]), len(awaited.ids) - _SHOWN_KEYS
    keys = ", ".join(awaited.keys[:_SHOWN_KEYS]) + (f" and {more} more" if more > 0 else "")
    return (
        f"Stage decode: the awaited samples are {keys}; the first is in "
        f"{index.shard_with(first).shown} at offset {int(index.offsets.start[first])}. {words}"
    )


def _close_without_owner(pipeline: Pipeline) -> None:
    """Close a pipeline whose owner was garbage collected.

    In a thread of ours another thread closes it, because a thread cannot wait for itself. The
    interpreter waits for that thread before it exits: a reader that was killed inside numpy would
    abort the process.
    """
    if threading.current_thread().name.startswith("wdstrain-"):
        threading.Thread(target=pipeline.close, daemon=False).start()
    else:
        with DeferSignals(WORKER_DEATH):  # the death of a worker that ends anyway is no error
            pipeline.close()
