"""One pass over an epoch: it takes batches from the pipeline and delivers them to the loop.

Taking and delivering are separate steps, so that a batch can be copied to a device before the loop
asks for it. Batches that were taken may be ahead of the loop; position, counts and stall are those
of the delivered ones. Only one thread at a time takes batches.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, NoReturn

from wdstrain.decode.worker_processes import WorkerDeathsAsErrors
from wdstrain.errors import SampleError, UsageError, WdstrainError
from wdstrain.loader.batch_assembly import Batch, TakenBatch
from wdstrain.loader.options import LoaderOptions
from wdstrain.loader.pipeline import OVER, Pipeline
from wdstrain.loader.recording import Recording
from wdstrain.loader.stats import EpochStats, Finding
from wdstrain.order.order import Order
from wdstrain.runtime.options import integer
from wdstrain.runtime.workers import WORKER_DEATH, DeferSignals


class Position(NamedTuple):
    """The step that is delivered next. bad: bad samples of this rank before it in the epoch."""

    epoch: int
    step: int
    bad: int = 0

    @classmethod
    def of_state(cls, state: Mapping[str, Any], steps: int) -> Position:
        """Return the position in a loader's state. steps: of an epoch.

        Raises UsageError if no epoch has such a position.
        """
        try:
            epoch, step = (integer(name, state.get(name), 0) for name in ("epoch", "step"))
            bad = integer("bad", state.get("bad", 0), 0)
        except UsageError as error:
            raise UsageError(f"this state holds no position: {error}") from None
        if step >= steps:
            raise UsageError(
                f"step={step} in this state: must be below {steps}, the steps of an epoch."
            )
        return cls(epoch, step, bad)


class LoaderState:
    """What the passes of a loader share: its pipeline, its position, and which pass is the newest.

    stats: of the newest pass. newest: returns the newest pass, if it exists; a weak reference.
    reached: the position after the batch that was delivered last. delivered: that batch without its
    tensors, of the newest pass. recording: values that the loop records.
    """

    def __init__(self, make_pipeline: Callable[[], Pipeline], recording: Recording) -> None:
        """make_pipeline: must not refer to the loader, which is closed when nobody refers to it."""
        self.stats, self.recording = EpochStats(), recording
        self.delivered: TakenBatch | None = None
        # Held while a pass becomes the newest one and takes over the pipeline: of two that began at
        # once, each could otherwise be the newest while the other has the pipeline.
        self.beginning = threading.Lock()
        self.newest: Callable[[], EpochBatches | None] = lambda: None
        self._make_pipeline = make_pipeline
        self._pipeline: Pipeline | None = None  # before the first pass and after `close`
        self.reached = Position(0, 0)
        self._requested: Position | None = None  # start of the next loop, if somebody set it

    @property
    def next_start(self) -> Position:
        """The first step of the next `for` loop, which is the next epoch also after a `break`."""
        epoch, step, _ = self.reached
        return self._requested or Position(epoch + (step > 0), 0)

    @property
    def position(self) -> Position:
        """The position of a loop within an epoch; otherwise the start of the next loop."""
        loop = self.newest()
        is_in_loop = loop is not None and loop.state is not None and self.reached.step
        return self.reached if is_in_loop else self._requested or self.reached

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the next epoch. A requested step within it stays."""
        if self._requested is None or self._requested.epoch != epoch:
            self._requested = Position(epoch, 0)

    def restore(self, position: Position) -> None:
        """Make this the start of the next loop. A loop that still runs has no position any more."""
        self._requested, self.newest, self.delivered = position, lambda: None, None

    def open_pipeline(self, newest: EpochBatches) -> Pipeline:
        """Return the running pipeline for a pass, which is the newest from now on."""
        self.newest, pipeline = weakref.ref(newest), self._pipeline
        # It may be closed in part, by a Ctrl-C or another thread. A forked child makes its own.
        if pipeline is not None and (pipeline.closed or pipeline.process != os.getpid()):
            self.close()
            pipeline = None
        if pipeline is None:
            pipeline = self._pipeline = self._make_pipeline()
            pipeline.close_with(self)
        return pipeline

    def begin(self, stats: EpochStats, position: Position) -> None:
        """Note where the newest pass begins, and its counts."""
        self.stats, self.reached, self._requested, self.delivered = stats, position, None, None

    def close(self) -> None:
        """End the pipeline. The next pass makes another one."""
        pipeline = self._pipeline
        if pipeline is not None:
            with DeferSignals(WORKER_DEATH):  # the workers end; torch would report their death
                pipeline.close()
            if self._pipeline is pipeline:  # a loop in another thread may have begun anew
                self._pipeline = None


class EpochBatches(Iterator[Batch]):
    """The batches of one epoch from a step on. Nothing starts before the first is requested.

    Several threads may take batches; each batch goes to one of them. Only the process that
    requested the first batch gets more.
    """

    def __init__(
        self,
        state: LoaderState,
        plans: Callable[[int], Order],
        options: LoaderOptions,
        start: Position | None,
        until: int | None,
    ) -> None:
        """plans: returns the plan of an epoch. start: None for that of the loader's next loop when
        the first batch is requested: Lightning makes an iterator before it sets the epoch.
        until: the epoch at which reading ahead stops.
        """
        # None after the end. A traceback may refer to this pass for long: in a notebook until the
        # next error. The loader must be able to end before that.
        self.state: LoaderState | None = state
        self._options, self._plans, self._until = options, plans, until
        self._requested, self._recording = start, state.recording
        self._pipeline: Pipeline | None = None  # set with the first batch
        self._totals_before: dict[str, float] = {}  # set with the first batch
        self._stats = EpochStats()
        self._last: TakenBatch | None = None  # delivered last, without its tensors
        self._delivered_at: float | None = None  # None while the loop waits for a batch
        # Held from a request to its delivery, so that the position never moves back.
        self._lock = threading.RLock()
        self._process: int | None = None  # process that requested the first batch

    def _start_at(self, start: Position) -> None:
        """Make this the position of the first batch."""
        self._start = start
        self._epoch, self._step, self._bad = start  # the step that is taken next
        self._plan, rank = self._plans(self._epoch), self._options.rank
        # Rows before that step and of the whole epoch on this rank, padding included.
        self._rows, self._epoch_samples = (
            self._plan.rows_before(rank, step) for step in (self._step, self._plan.steps)
        )
        self._delivered_steps = self._step

    def __next__(self) -> Batch:
        self._check_process()
        with self._lock, WorkerDeathsAsErrors():
            try:
                requested = self.request()
                return self.deliver(self.take(), requested)
            except StopIteration:
                raise
            except BaseException:
                self.close()
                raise

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "a pass over a loader cannot be pickled or copied: its threads and workers belong to "
            "this process. Pickle the loader, or save loader.state_dict(), and begin a pass from it."
        )

    @property
    def delivered(self) -> TakenBatch:
        """The batch delivered last, without its tensors.

        `ids`: numbers of its samples in the index. `own`: rows that hold their own sample, no
        substitute. `bad`: the bad samples in row order.
        """
        if self._last is None:
            raise UsageError("no batch was delivered yet.", "Request one first.")
        return self._last

    # --- for code that copies batches to a device -------------------------------------------------

    def request(self) -> float:
        """Note that the loop is done with its batch and wants the next one. Return the time.

        After the last batch, the counts of the epoch are logged. Raises UsageError if nothing was
        recorded of the column that weighs the samples.
        """
        self._check_process()
        now = time.perf_counter()
        if self._delivered_at is not None:
            self._stats.loop_seconds += now - self._delivered_at
            self._delivered_at = None
            if self._delivered_steps == self._plan.steps:
                self._stats.log()
            self._recording.check()
        return now

    def take(self) -> TakenBatch:
        """Return the next batch of the pipeline.

        Raises StopIteration at the end of the epoch, and the errors of the pipeline.
        """
        with self._lock:
            if self._pipeline is None:
                self._pipeline = self._begin()
            if self._step == self._plan.steps:
                if self._rows != self._epoch_samples:
                    raise WdstrainError(
                        f"epoch {self._epoch}: {self._epoch_samples} samples were planned and "
                        f"{self._rows} delivered. Please report this error."
                    )
                raise StopIteration
            taken = self._pipeline.take(self)
            self._rows += len(taken.ids)
            self._step += 1
            return taken

    def deliver(self, taken: TakenBatch, requested: float, copy_seconds: float = 0.0) -> Batch:
        """Return a batch to the loop and count it. Raises SampleError for too many bad samples.

        taken: its values may be copies on a device. requested: the time of the request.
        copy_seconds: how long the copy took.
        """
        self._stats.copy_seconds += copy_seconds
        self._count(taken)
        self._delivered_steps += 1
        # only the loop refers to the batch's memory
        self._last = taken._replace(values={"__key__": taken.values["__key__"]})
        is_last = self._delivered_steps == self._plan.steps
        state = self.state
        if state is not None and state.newest() is self:
            after = Position(self._epoch, self._delivered_steps, self._bad)
            state.reached = Position(self._epoch + 1, 0) if is_last else after
            state.delivered = self._last
        if self._pipeline is not None:
            self._stats.set_stages(self._totals_before, self._pipeline.totals())
        self._delivered_at = time.perf_counter()
        self._stats.wait_seconds += self._delivered_at - requested
        return taken.values

    def lock_pages(self) -> None:
        """Page-lock the memory of these batches for copies to a CUDA device, after the first."""
        if self._pipeline is not None:
            self._pipeline.slots.lock_pages()

    def close(self) -> bool:
        """End this pass, and the pipeline unless a newer pass uses it. Return whether that ended.

        In a forked child this does nothing.
        """
        if self._process not in (None, os.getpid()):
            return False
        state, self.state = self.state, None
        if state is None or state.newest() is not self:
            return False
        state.close()
        return True

    # --- parts ------------------------------------------------------------------------------------

    def _check_process(self) -> None:
        """Raise WdstrainError in a forked child, which has none of the threads and workers."""
        process = os.getpid()
        self._process = self._process or process
        if self._process != process:
            raise WdstrainError(
                f"this pass over the loader began in process {self._process}, which alone can go "
                f"on with it. Begin a pass in this process: for batch in loader."
            )

    def _begin(self) -> Pipeline:
        """Start the pipeline at the first step."""
        state = self.state
        if state is None:
            raise WdstrainError(*OVER)
        self._options.check_rank()
        start = self._requested or state.next_start
        until = self._recording.begin(start.epoch) or self._until
        self._start_at(start)
        with state.beginning:
            pipeline = state.open_pipeline(self)
            pipeline.begin(self, self._epoch, self._step, until)
        self._totals_before = pipeline.totals()
        self._stats = EpochStats(
            epoch=self._epoch, left_out=self._plan.left_out, decoders=pipeline.workers.count
        )
        state.begin(self._stats, self._start)
        return pipeline

    def _count(self, taken: TakenBatch) -> None:
        """Count a batch. Raises SampleError if the epoch has too many bad samples with it."""
        stats = self._stats
        if taken.bad:
            self._bad += len(taken.bad)
            stats.add_bad(taken.bad)
            if self._bad > self._options.max_errors * self._epoch_samples:
                raise self._too_many_errors(taken.bad[-1])
        stats.batches += 1
        stats.samples += int(taken.valid.sum())
        stats.padded += int((~taken.valid).sum())

    def _too_many_errors(self, last: Finding) -> SampleError:
        """Return the error. last: the newest bad sample."""
        earlier = self._start.bad
        before = f", {earlier} of them before step {self._start.step}" if earlier else ""
        reasons = self._stats.bad_reasons.items()
        return SampleError(
            f"{self._bad} of the {self._epoch_samples} samples of epoch {self._epoch} are bad"
            f"{before}, more than {{max_errors}} allows "
            f"({', '.join(f'{count} x {reason}' for reason, count in reasons)}). "
            f"The last: {last.sentence}",
            "Allow a greater share of bad samples to go on.",
            {"max_errors": float(self._options.max_errors)},
        )
