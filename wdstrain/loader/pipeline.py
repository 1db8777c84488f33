"""The running pipeline of one loader: plan -> reader -> decoders -> slots -> batches, in order.

A stream of batches goes on over the ends of epochs: while an epoch ends, the next is being read and
decoded. `seek` continues the stream if it is at the requested step, and starts another otherwise.
Memory, threads and worker processes stay. A stream starts its reader when the first task is
requested. That is after the workers are forked, so that no thread of ours exists at that time.

Every seek begins a new generation. The reader's run belongs to a generation, and calls with the
number of an earlier generation raise an error.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from wdstrain.decode.task import Result, Task
from wdstrain.errors import WdstrainError
from wdstrain.loader.batch_assembly import BatchAssembler, BatchInfo
from wdstrain.loader.batch_stream import OVER, BatchStream
from wdstrain.loader.pipeline_parts import PipelineOptions, StageTotals, build_parts
from wdstrain.order.order import Order
from wdstrain.runtime.signals import WORKER_DEATH, DeferSignals
from wdstrain.runtime.watchdog import StallWatchdog
from wdstrain.shards.index import Index

_log = logging.getLogger("wdstrain")

TAKEN = "another loop over the same loader took this one's place. Use a Loader for each loop."


class Pipeline:
    """Batches of one rank.

    generation: number of the newest loop. closed: `close` was called; it may have been interrupted.
    process: id of the process that made it. A forked child has none of its threads and workers.
    """

    def __init__(
        self, index: Index, plans: Callable[[int], Order], rank: int, options: PipelineOptions
    ) -> None:
        """Reserve the memory; nothing is started. plans: returns the plan of an epoch."""
        self.process, self.generation, self.closed = os.getpid(), 0, False
        # Held while a batch is taken. Another thread may close the pipeline meanwhile.
        self._lock = threading.RLock()
        self._parts = build_parts(index, plans, rank, options)
        self.reader = self._parts.reader
        self._assembler = BatchAssembler(self._parts)
        self._stream: BatchStream | None = None
        self._results: Iterator[Result] = iter(())  # of the decoders for the stream
        self._epoch = -1  # of the last seek
        self._watchdog = StallWatchdog.disabled()
        self._waiting_thread = 0
        self._finalizer: weakref.finalize[..., Any] | None = None

    @property
    def decoders(self) -> int:
        """Number of decoding threads or processes."""
        return self._parts.workers.count

    def totals(self) -> StageTotals:
        """Return what the stages took since the pipeline was made."""
        read = self.reader.stats
        return replace(
            self._parts.totals,
            bytes=read.bytes,
            fetched=read.fetch.fetched,
            cached=read.fetch.cached,
            retries=read.fetch.retries,
            read_seconds=read.read_seconds,
            shuffle_seconds=read.shuffle_seconds,
            copies=self._parts.slots.copies,
        )

    def lock_pages(self) -> None:
        """Page-lock the memory of batches for copies to a CUDA device."""
        self._parts.slots.lock_pages()

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
                self._stream = BatchStream(self._parts, epoch, step, until)
                self._results = self._parts.workers.run(self._tasks(self._stream))
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
            batch = self._take(stream, self._parts.plans(stream.position[0]))
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
                self._stream, self._results = None, iter(())
                self._parts.workers.close()
            self._watchdog.close()
            self._watchdog = StallWatchdog.disabled()
        if self._finalizer is not None:
            # Last: if a Ctrl-C interrupts this method, the owner's end closes the rest.
            self._finalizer.detach()

    # --- one stream -------------------------------------------------------------------------------

    def _continues_at(self, epoch: int, step: int) -> bool:
        """Return whether the stream is at this step and can go on for this generation."""
        stream = self._stream
        if stream is None or stream.position != (epoch, step):
            return False
        return stream.run is None or self.reader.renew(stream.run, self.generation)

    def _tasks(self, stream: BatchStream) -> Iterator[Task]:
        """Start the reader, and yield the tasks of a stream. Decoders have ended older tasks."""
        stream.run = self.reader.start(self.generation, *stream.first, stream.until)
        patience = self._parts.options.patience
        if patience and not self._watchdog.is_running:
            with DeferSignals():
                self._watchdog = StallWatchdog(patience, self._log_stall)
            self._watchdog.start_wait()
        yield from stream.tasks(stream.run)

    def _take(self, stream: BatchStream, plan: Order) -> tuple[dict[str, Any], BatchInfo]:
        """Return the next batch of a stream."""
        self._waiting_thread = threading.get_ident()
        self._watchdog.start_wait()
        try:
            result, pending = stream.next(self._results)
        finally:
            self._watchdog.end_wait()
        arrived = time.perf_counter()
        batch = self._assembler.assemble(result, pending, plan)
        if stream.run is not None:
            stream.run.release(result.batch_number)
        self._parts.totals.collate_seconds += time.perf_counter() - arrived
        stream.advance(plan.steps)
        return batch

    def _log_stall(self, seconds: float) -> None:
        """Log which stage is stuck. Runs in the watchdog's thread."""
        stream = self._stream
        if stream is not None and stream.position is not None:
            epoch, step = stream.position
            stage = stream.describe_stall(self._waiting_thread)
            _log.warning("no batch for %.0f s (epoch %d, step %d). %s", seconds, epoch, step, stage)


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
