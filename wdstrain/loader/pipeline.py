"""The running pipeline of one loader: plan -> reader -> decoders -> slots -> batches, in order.

A stream of batches goes on over the ends of epochs: while an epoch ends, the next is being read and
decoded. `seek` continues the stream if it is at the requested step, and starts another otherwise.
Memory, threads and worker processes stay. A stream starts its reader when the first task is
requested. That is after the workers are forked, so that no thread of ours exists at that time.

Every seek begins a new generation. The reader's runs belong to a generation, and calls with the
number of an earlier generation raise an error.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from wdstrain.decode.decoder import Result, Task
from wdstrain.errors import WdstrainError
from wdstrain.loader.bad_samples import BadSampleHandler
from wdstrain.loader.batch_assembly import BatchAssembler, BatchInfo
from wdstrain.loader.pipeline_parts import PipelineOptions, build_parts
from wdstrain.loader.stage_clock import StageClock, StageTotals
from wdstrain.loader.stall_report import Stall, describe_stall
from wdstrain.loader.task_stream import TaskStream
from wdstrain.order.plan import Order
from wdstrain.runtime.signals import WORKER_DEATH, DeferSignals
from wdstrain.runtime.watchdog import StallWatchdog
from wdstrain.shards.index import Index

_log = logging.getLogger("wdstrain")

OVER = (
    "this pass over the loader is over: it was closed, or ended with an error. Begin another one."
)
TAKEN = "another loop over the same loader took this one's place. Use a Loader for each loop."


@dataclass(eq=False)
class _BatchStream:
    """Batches from a step on.

    results: decoded batches. tasks: their tasks. until: the first epoch that is not read.
    position: (epoch, step) of the next batch; None at the end. batch_number: its number.
    is_interrupted: an exception came while a batch was made, so the next one may be lost.
    """

    results: Iterator[Result]
    tasks: TaskStream
    position: tuple[int, int] | None
    until: int | None
    batch_number: int = 0
    is_interrupted: bool = False

    def advance(self, steps: int) -> None:
        """Go on to the next step. steps: of the epoch."""
        assert self.position is not None
        epoch, step = self.position
        after = (epoch, step + 1) if step + 1 < steps else (epoch + 1, 0)
        self.position = after if after[0] != self.until else None


class Pipeline:
    """Batches of one rank.

    generation: number of the newest loop. closed: `close` was called; it may have been interrupted.
    process: id of the process that made it. A forked child has none of its threads and workers.
    """

    def __init__(
        self,
        index: Index,
        plans: Callable[[int], Order],
        rank: int,
        options: PipelineOptions,
    ) -> None:
        """Reserve the memory; nothing is started. plans: returns the plan of an epoch."""
        self.process, self.generation, self.closed = os.getpid(), 0, False
        self._index, self._plans, self._rank = index, plans, rank
        # Held while a batch is taken. Another thread may close the pipeline meanwhile.
        self._lock = threading.RLock()
        self._parts = parts = build_parts(index, plans, rank, options)
        self.reader = parts.reader
        self._clock = StageClock(parts.reader.stats)
        bad_samples = BadSampleHandler(index, parts, options, self._clock)
        self._assembler = BatchAssembler(index, parts.slots, bad_samples, options)
        self._stream: _BatchStream | None = None
        self._epoch = -1  # of the last seek
        self._patience, self._watchdog = options.patience, StallWatchdog.disabled()
        self._waiting_thread = 0
        self._finalizer: weakref.finalize[..., Any] | None = None

    @property
    def decoders(self) -> int:
        """Number of decoding threads or processes."""
        return self._parts.workers.count

    @property
    def reads_into_slots(self) -> bool:
        """Whether some arrays are read straight into batches."""
        return self._parts.sink is not None

    def totals(self) -> StageTotals:
        """Return what the stages took since the pipeline was made."""
        return self._clock.totals(self._parts.slots.copies)

    def lock_pages(self) -> None:
        """Page-lock the memory of batches for copies to a CUDA device."""
        self._parts.slots.lock_pages()

    # --- lifecycle --------------------------------------------------------------------------------

    def seek(self, epoch: int, step: int, until: int | None = None) -> int:
        """Begin a new generation whose next batch is this one, and return its number.

        until: the epoch at which reading ahead stops. By default nothing is read ahead if the same
        epoch is requested twice in a row. Raises WdstrainError after `close`.
        """
        with self._lock:
            # Another thread may have closed the pipeline meanwhile; nobody would close it again.
            if self.closed:
                raise WdstrainError(OVER)
            self.generation += 1
            if self._stream is not None and self._stream.is_interrupted:
                self._parts.workers.close()  # a worker may have sent half a message
                self._stream = None
            if not self._continues_at(epoch, step):
                if until is None and epoch == self._epoch:
                    until = epoch + 1
                self._stream = self._new_stream(epoch, step, until)
            self._epoch = epoch
            return self.generation

    def next(self, generation: int | None) -> tuple[dict[str, Any], BatchInfo]:
        """Return the next batch of a generation, and its counts.

        Raises SampleError for a bad sample that is not replaced, and WdstrainError if another loop
        took this one's place.
        """
        with self._lock:  # another loop may begin while this one waits for the lock
            if generation != self.generation:
                raise WdstrainError(TAKEN)
            stream = self._stream
            if stream is None or stream.position is None or stream.is_interrupted:
                raise WdstrainError(OVER)
            stream.is_interrupted = True
            plan = self._plans(stream.position[0])
            batch = self._take(stream, plan)
            stream.advance(plan.steps)
            stream.is_interrupted = False
            return batch

    def cancel(self, generation: int | None) -> bool:
        """End the reads of a generation, for a thread that waits for a batch that may never come.

        Returns False if another loop took this one's place; then nothing ends.
        """
        if generation is None or generation != self.generation:
            return False
        self.reader.cancel(generation)  # before the lock, which the waiting thread holds
        with self._lock:
            if generation == self.generation and self._stream is not None:
                self._stream.position = None
        return True

    def close_with(self, owner: object) -> None:
        """Close this pipeline when its owner is garbage collected, unless it is closed before."""
        self._finalizer = weakref.finalize(owner, _close_without_owner, self)

    def close(self) -> None:
        """End all threads and processes. In a forked child this does nothing to its parent's.

        A Ctrl-C may interrupt this method. It can be called again, also by several threads at once.
        """
        if os.getpid() == self.process:
            self.closed = True
            self.reader.close()  # before the lock, which a thread that waits for a batch holds
            with self._lock:
                self._stream = None
                self._parts.workers.close()
            self._watchdog.close()
            self._watchdog = StallWatchdog.disabled()
        if self._finalizer is not None:
            # Last: if a Ctrl-C interrupts this method, the owner's end closes the rest.
            self._finalizer.detach()

    # --- one stream -------------------------------------------------------------------------------

    def _continues_at(self, epoch: int, step: int) -> bool:
        """Return whether the stream is at this step, and its reads go on for this generation."""
        stream = self._stream
        if stream is None or stream.position != (epoch, step):
            return False
        return self.reader.renew(self.generation)

    def _new_stream(self, epoch: int, step: int, until: int | None) -> _BatchStream:
        tasks = TaskStream(self._parts, self._plans, self._rank, self._clock)
        results = self._parts.workers.run(self._tasks(tasks, epoch, step, until))
        return _BatchStream(results, tasks, (epoch, step), until)

    def _tasks(self, tasks: TaskStream, epoch: int, step: int, until: int | None) -> Iterator[Task]:
        """Start the reader, and yield the tasks of a stream. Decoders have ended older tasks."""
        self.reader.cancel(self.generation - 1)  # it writes to slots, which are taken back now
        self._parts.slots.reset()
        self.reader.start(self.generation, epoch, step, until)
        if self._patience and not self._watchdog.is_running:
            with DeferSignals():
                self._watchdog = StallWatchdog(self._patience, self._log_stall)
            self._watchdog.start_wait()
        yield from tasks.tasks(epoch, step, until)

    def _take(self, stream: _BatchStream, plan: Order) -> tuple[dict[str, Any], BatchInfo]:
        """Return the next batch of a stream."""
        result = self._next_result(stream)
        arrived = time.perf_counter()
        collected, keys = stream.tasks.pending.pop(result.batch_number)
        batch = self._assembler.assemble(result, collected, keys, plan)
        self.reader.release(result.batch_number)
        self._clock.add_result(result, time.perf_counter() - arrived)
        return batch

    def _next_result(self, stream: _BatchStream) -> Result:
        """Return the next decoded batch. Counts its hand-off: requested, decoded and not here."""
        begun, before = time.perf_counter(), self._clock.before_decoding
        self._waiting_thread = threading.get_ident()
        self._watchdog.start_wait()
        try:
            result = next(stream.results, None)
        except MemoryError as error:  # for one sample it would be the reason why it is bad
            raise WdstrainError(
                "there was no memory to make a batch. Lower batch_size, num_workers or "
                "shuffle_buffer, or give it more memory."
            ) from error
        finally:
            self._watchdog.end_wait()
        if result is None:  # all batches before the one that cannot be read were delivered
            reason, stream.tasks.error = stream.tasks.error, None
            try:
                raise reason or WdstrainError(OVER)
            finally:
                del reason  # it refers to this frame
        others = self._clock.before_decoding - before  # other work of this thread meanwhile
        self._clock.add_handoff(time.perf_counter() - max(begun, result.ended) - others)
        stream.batch_number = result.batch_number + 1
        return result

    def _log_stall(self, seconds: float) -> None:
        """Log which stage is stuck. Runs in the watchdog's thread."""
        stream = self._stream
        if stream is None or stream.position is None:
            return
        stall = Stall(
            seconds,
            stream.position,
            stream.batch_number,
            stream.tasks.pending,
            self._waiting_thread,
        )
        _log.warning("%s", describe_stall(self._index, self._parts, stall))


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
