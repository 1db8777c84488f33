"""One pass over an epoch: it takes batches from the pipeline and delivers them to the loop.

Taking and delivering are separate steps, so that a batch can be copied to a device before the loop
asks for it. Batches that were taken may be ahead of the loop; position, counts and stall are those
of the delivered ones. Only one thread at a time takes batches.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from wdstrain.decode.worker_processes import worker_death_error
from wdstrain.errors import SampleError, UsageError, WdstrainError
from wdstrain.loader.batch_assembly import BatchInfo
from wdstrain.loader.pipeline import Pipeline
from wdstrain.loader.pipeline_parts import StageTotals
from wdstrain.loader.session import PassLink, Position
from wdstrain.loader.stats import EpochStats, Finding
from wdstrain.order.order import Order
from wdstrain.order.rng import uniform

_log = logging.getLogger("wdstrain")

Batch = dict[str, Any]
Draws = npt.NDArray[np.float64]


class TakenBatch(NamedTuple):
    """A batch that was taken from the pipeline and not delivered yet.

    totals: of the stages up to it, since the pipeline was made.
    position: (epoch, step) of the batch after it.
    """

    batch: Batch
    info: BatchInfo
    totals: StageTotals
    position: tuple[int, int]
    plan: Order

    def draws(self, columns: int) -> Draws:
        """Return random numbers in [0, 1), float64[b, columns]; see `EpochBatches.draws`."""
        return uniform(self.info.draws, columns, "device", self.plan.seed, self.plan.epoch)


class EpochBatches(Iterator[Batch]):
    """The batches of one epoch from a step on. Nothing starts before the first is requested.

    Several threads may take batches; each batch goes to one of them. Only the process that
    requested the first batch gets more.
    """

    _plan: Order  # set with the first batch
    _expected: int  # samples of this pass, padding included
    _epoch_samples: int  # samples of the whole epoch on this rank, padding included

    def __init__(
        self,
        link: PassLink,
        plans: Callable[[int], Order],
        rank: int,
        start: Position,
        max_errors: float,
        until: int | None,
    ) -> None:
        """plans: returns the plan of an epoch. until: the epoch at which reading ahead stops."""
        self._link, self._plans, self._rank, self._max_errors = link, plans, rank, max_errors
        self._start, self._until = start, until
        self._epoch, self._step, self._bad = start
        self._rows = 0  # taken so far
        self._pipeline: Pipeline | None = None
        self._generation: int | None = None  # of the pipeline, set with the first batch
        self._totals_before = StageTotals()
        self._stats = EpochStats()
        self._last: TakenBatch | None = None  # delivered last, without its tensors
        self._delivered_at: float | None = None  # None while the loop waits for a batch
        self._is_logged = False
        # Held from a request to its delivery, so that the position never moves back.
        self._lock = threading.RLock()
        self._process: int | None = None  # process that requested the first batch

    def __next__(self) -> Batch:
        self._check_process()
        with self._lock:
            try:
                requested = self.request()
                try:
                    return self.deliver(self.take(), requested)
                except StopIteration:
                    self.log_summary()
                    raise
            except StopIteration:
                raise
            except RuntimeError as error:
                self.close()
                if (death := worker_death_error(error)) is None:
                    raise
                raise death from error
            except BaseException:
                self.close()
                raise

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "a pass over a loader cannot be pickled or copied: its threads and workers belong to "
            "this process. Pickle the loader, or save loader.state_dict(), and begin a pass from it."
        )

    def draws(self, columns: int) -> Draws:
        """Return random numbers in [0, 1) for the batch delivered last. float64[b, columns].

        Row i depends on seed, epoch and the sample in row i: not on workers, ranks or a resume.
        The numbers are unrelated to those that `fields` use.
        """
        return self._delivered.draws(columns)

    @property
    def own(self) -> npt.NDArray[np.bool_]:
        """Rows of the batch delivered last that hold their own sample, not a substitute. bool[b]"""
        return self._delivered.info.own

    @property
    def bad(self) -> list[Finding]:
        """The bad samples of the batch delivered last, in row order, without padding."""
        return self._delivered.info.bad

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """Ids of the samples in the rows of the batch delivered last. int64[b]

        The id of a sample is its number in the index.
        """
        return self._delivered.info.ids

    @property
    def _delivered(self) -> TakenBatch:
        if self._last is None:
            raise UsageError("no batch was delivered yet. Request one first.")
        return self._last

    # --- for code that copies batches to a device -------------------------------------------------

    def request(self) -> float:
        """Note that the loop is done with its batch and wants the next one. Return the time."""
        self._check_process()
        now = time.perf_counter()
        if self._delivered_at is not None:
            self._stats.loop_seconds += now - self._delivered_at
            self._delivered_at = None
        return now

    def take(self) -> TakenBatch:
        """Return the next batch of the pipeline.

        Raises StopIteration at the end of the epoch, and the errors of the pipeline.
        """
        with self._lock:
            if self._pipeline is None:
                self._begin()
            assert self._pipeline is not None
            if self._step == self._plan.steps:
                if self._rows != self._expected:
                    raise WdstrainError(
                        f"epoch {self._epoch}: {self._expected} samples were planned and "
                        f"{self._rows} delivered. Please report this error."
                    )
                raise StopIteration
            batch, info = self._pipeline.next(self._generation)
            self._rows += len(info.ids)
            self._step += 1
            is_last = self._step == self._plan.steps
            position = (self._epoch + 1, 0) if is_last else (self._epoch, self._step)
            return TakenBatch(batch, info, self._pipeline.totals(), position, self._plan)

    def deliver(
        self,
        taken: TakenBatch,
        requested: float,
        batch: Batch | None = None,
        copy_seconds: float = 0.0,
    ) -> Batch:
        """Return a batch to the loop and count it. Raises SampleError for too many bad samples.

        requested: the time of the request. batch: delivered in place of the taken batch, such as
        its copy on a device. copy_seconds: how long that copy took.
        """
        self._stats.copy_seconds += copy_seconds
        self._count(taken.info)
        self._link.move(Position(*taken.position, self._bad if taken.position[1] else 0))
        vars(self._stats).update(taken.totals.since(self._totals_before))
        self._last = taken._replace(batch={})  # only the loop refers to the batch's memory
        self._delivered_at = time.perf_counter()
        self._stats.wait_seconds += self._delivered_at - requested
        return taken.batch if batch is None else batch

    def log_summary(self) -> None:
        """Log the counts of the epoch once, after the loop got all batches."""
        if self._delivered_at is None and self._stats.batches and not self._is_logged:
            self._is_logged = True
            _log.info("%s", self._stats.line)
            if bad_line := self._stats.bad_line:
                _log.info("%s", bad_line)
            _log.debug("%s", self._stats.details)

    def lock_pages(self) -> None:
        """Page-lock the memory of these batches for copies to a CUDA device, after the first."""
        if self._pipeline is not None:
            self._pipeline.lock_pages()

    def cancel(self) -> bool:
        """End the wait for a batch in another thread.

        Returns False if a newer pass took this one's place: that thread gets an error by itself.
        """
        return self._pipeline is not None and self._pipeline.cancel(self._generation)

    def close(self) -> None:
        """End this pass after an error, and the pipeline unless a newer pass uses it."""
        if self._process in (None, os.getpid()):
            pipeline, generation = self._pipeline, self._generation
            if pipeline is not None and generation not in (None, pipeline.generation):
                self._link.disconnect()
            else:
                self._link.close()

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

    def _begin(self) -> None:
        """Start the pipeline at the first step."""
        plan = self._plan = self._plans(self._epoch)
        self._expected, self._epoch_samples = (
            sum(_samples_from(plan, lane, step) for lane in plan.lanes_of(self._rank))
            for step in (self._step, 0)
        )
        pipeline = self._pipeline = self._link.open_pipeline()
        self._generation = pipeline.seek(self._epoch, self._step, self._until)
        self._totals_before = pipeline.totals()
        self._stats = EpochStats(
            epoch=self._epoch, left_out=plan.left_out, decoders=pipeline.decoders
        )
        self._link.begin(self._stats, self._start)

    def _count(self, info: BatchInfo) -> None:
        """Count a batch. Raises SampleError if the epoch has too many bad samples with it."""
        stats = self._stats
        if info.bad:
            self._bad += len(info.bad)
            stats.add_bad(info.bad)
            if self._bad > self._max_errors * self._epoch_samples:
                raise SampleError(self._too_many_errors(info.bad[-1]))
        stats.batches += 1
        stats.samples += len(info.ids) - info.padded
        stats.padded += info.padded

    def _too_many_errors(self, last: Finding) -> str:
        """Return the error message. last: the newest bad sample."""
        earlier = self._start.bad
        before = f", {earlier} of them before step {self._start.step}" if earlier else ""
        reasons = self._stats.bad_reasons.items()
        return (
            f"{self._bad} of the {self._epoch_samples} samples of epoch {self._epoch} are bad"
            f"{before}, more than max_errors={self._max_errors} allows "
            f"({', '.join(f'{count} x {reason}' for reason, count in reasons)}). "
            f"The last: {last.sentence} Raise max_errors to allow more."
        )


def _samples_from(plan: Order, lane: int, step: int) -> int:
    """Return the number of samples that a lane delivers from a step on, padding included."""
    first, stop = plan.span(lane, step)[0], plan.span(lane, plan.steps - 1)[1]
    return (min(stop, plan.lane_samples(lane)) if plan.tail == "keep" else stop) - first
