"""One pass over an epoch: batches are taken from the pipeline, and given to the loop.

The two are told apart so that a batch can be on its way to a device before the loop asks for it: what is taken may be ahead, while
position, counts and stall are those of what was given. Only whoever takes touches the pipeline, one thread at a time.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn, Protocol

import numpy as np
import numpy.typing as npt

from wdstrain.decode.worker_processes import worker_death_error
from wdstrain.errors import SampleError, UsageError, WdstrainError
from wdstrain.loader.batch_assembly import BatchInfo
from wdstrain.loader.pipeline import Pipeline
from wdstrain.loader.pipeline_parts import StageTotals
from wdstrain.loader.stats import EpochStats, Finding
from wdstrain.order.plan import Order
from wdstrain.order.rng import uniform

_log = logging.getLogger("wdstrain")

Batch = dict[str, Any]
Draws = npt.NDArray[np.float64]


class Position(NamedTuple):
    """The step that is delivered next. bad: bad samples of the epoch that were replaced before it, on this rank."""

    epoch: int
    step: int
    bad: int = 0


class Host(Protocol):
    """The loader, as a pass over an epoch sees it."""

    def open(self) -> Pipeline: ...
    def begun(self, meter: EpochStats, position: Position) -> None: ...
    def moved(self, position: Position) -> None: ...
    def leave(self) -> None: ...
    def close(self) -> None: ...


class Taken(NamedTuple):
    """A batch that nobody was given yet. costs: what the stages took up to it, since the pipeline was made.

    position: where the loop is after it.
    """

    batch: Batch
    counts: BatchInfo
    costs: StageTotals
    position: tuple[int, int]
    plan: Order

    def draws(self, columns: int) -> Draws:
        """Random numbers in [0, 1), float64[b, columns]: a row for each sample, its own in this epoch."""
        return uniform(self.counts.draws, columns, "device", self.plan.seed, self.plan.epoch)


class Batches(Iterator[Batch]):
    """The batches of one epoch from a step on. Nothing starts before the first is asked for.

    Several threads may take batches: each batch is given to one of them. A pass belongs to the process that asked first.
    """

    _plan: Order  # once it has begun
    _promised: int  # samples of this pass, and of the whole epoch
    _whole: int

    def __init__(
        self,
        host: Host,
        plans: Callable[[int], Order],
        rank: int,
        start: Position,
        max_bad: float,
        until: int | None,
    ) -> None:
        self._host, self._plans, self._rank, self._max_bad = host, plans, rank, max_bad
        self._start, self._until = start, until
        self._epoch, self._step, self._bad = start
        self._rows = 0
        self._pipeline: Pipeline | None = None
        self._generation: int | None = None  # of the pipeline, once it has begun
        self._before = StageTotals()
        self._meter = EpochStats()
        self._last: Taken | None = None
        self._given_at: float | None = None
        self._logged = False
        self._asking = (
            threading.RLock()
        )  # held from asking until a batch is given, so that the position never goes back
        self._process: int | None = None  # the one that asked first

    def __next__(self) -> Batch:
        self._check_process()
        with self._asking:
            try:
                asked = self.asked()
                try:
                    return self.give(self.take(), asked)
                except StopIteration:
                    self.ended()
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
            "a pass over a loader cannot be pickled or copied: its threads and workers belong to this process. Pickle the loader, or "
            "save loader.state_dict(), and begin a pass from it."
        )

    def draws(self, columns: int) -> Draws:
        """Random numbers in [0, 1), float64[b, columns]: a row for each sample of the batch given last, its own in this epoch.

        They are the same for any number of workers and ranks and after a resume, and unrelated to those of `fields`.
        """
        if self._last is None:
            raise UsageError(
                "no batch was given yet, and draws belong to one. Ask for a batch first."
            )
        return self._last.draws(columns)

    @property
    def own(self) -> npt.NDArray[np.bool_]:
        """Rows of the batch given last that have their own sample, bool[b]; in the others one stands in for a bad one."""
        if self._last is None:
            raise UsageError("no batch was given yet. Ask for one first.")
        return self._last.counts.own

    @property
    def bad(self) -> list[Finding]:
        """The bad samples of the batch given last, in the order of their rows: those that are not in `own`, without padding."""
        if self._last is None:
            raise UsageError("no batch was given yet. Ask for one first.")
        return self._last.counts.bad

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """The samples in the rows of the batch given last, by their numbers in the index. int64[b]"""
        if self._last is None:
            raise UsageError("no batch was given yet. Ask for one first.")
        return self._last.counts.ids

    # --- for who brings batches to a device ----------------------------------------------------------------------------

    def asked(self) -> float:
        """The loop asks for a batch: it is done with the one before. The time."""
        self._check_process()
        now = time.perf_counter()
        if self._given_at is not None:
            self._meter.loop_seconds += now - self._given_at
            self._given_at = None
        return now

    def take(self) -> Taken:
        """The next batch. Raises StopIteration at the epoch's end, and what the pipeline raises."""
        with self._asking:
            if self._pipeline is None:
                self._begin()
            assert self._pipeline is not None
            if self._step == self._plan.steps:
                if self._rows != self._promised:
                    raise WdstrainError(
                        f"epoch {self._epoch} promised {self._promised} samples and gave {self._rows}."
                    )
                raise StopIteration
            batch, counts = self._pipeline.next(self._generation)
            self._rows += len(counts.ids)
            self._step += 1
            at = (
                (self._epoch, self._step) if self._step < self._plan.steps else (self._epoch + 1, 0)
            )
            return Taken(batch, counts, self._pipeline.totals(), at, self._plan)

    def give(
        self, taken: Taken, asked: float, batch: Batch | None = None, copy_seconds: float = 0.0
    ) -> Batch:
        """The loop gets this batch, or what became of it, which it asked for at this time. Raises SampleError for too many bad.

        copy_seconds: how long it was on its way to a device.
        """
        self._meter.copy_seconds += copy_seconds
        self._count(taken.counts)
        self._host.moved(Position(*taken.position, self._bad if taken.position[1] else 0))
        vars(self._meter).update(taken.costs.since(self._before))
        self._last = Taken({}, *taken[1:])  # the memory of a batch is the loop's alone
        self._given_at = time.perf_counter()
        self._meter.wait_seconds += self._given_at - asked
        return taken.batch if batch is None else batch

    def ended(self) -> None:
        """The loop was given all batches: a line in the log says what they cost, once."""
        if self._given_at is None and self._meter.batches and not self._logged:
            self._logged = True
            _log.info("%s", self._meter.line)
            if bad := self._meter.bad_line:
                _log.info("%s", bad)
            _log.debug("%s", self._meter.details)

    def lock_pages(self) -> None:
        """Page-lock the memory of these batches for copies to a CUDA device, once. A batch was taken before."""
        if self._pipeline is not None:
            self._pipeline.lock_pages()

    def abandon(self) -> bool:
        """Whoever waits for a batch in another thread is to wait no more. False if another pass took this one's place: then whoever
        waits does so for that one, and is told."""
        return self._pipeline is not None and self._pipeline.cancel(self._generation)

    def close(self) -> None:
        """Something went wrong: end what the loader started, unless another pass goes on with it. This pass is over."""
        if self._process in (None, os.getpid()):
            pipeline, generation = self._pipeline, self._generation
            if pipeline is not None and generation not in (None, pipeline.generation):
                self._host.leave()
            else:
                self._host.close()

    # --- parts -------------------------------------------------------------------------------------------------------

    def _check_process(self) -> None:
        """Raise WdstrainError in a forked child of the process that asked first: threads, workers and locks are the parent's."""
        process = os.getpid()
        self._process = self._process or process
        if self._process != process:
            raise WdstrainError(
                f"this pass over the loader began in process {self._process}, and its batches go on there; a forked child cannot "
                f"take from it. Begin a pass in this process: for batch in loader."
            )

    def _begin(self) -> None:
        plan = self._plan = self._plans(self._epoch)
        self._promised, self._whole = (
            sum(_promised(plan, lane, step) for lane in plan.lanes_of(self._rank))
            for step in (self._step, 0)
        )
        pipeline = self._pipeline = self._host.open()
        self._generation = pipeline.seek(self._epoch, self._step, self._until)
        self._before = pipeline.totals()
        self._meter = EpochStats(
            epoch=self._epoch, left_out=plan.left_out, decoders=pipeline.decoders
        )
        self._host.begun(self._meter, self._start)

    def _count(self, counts: BatchInfo) -> None:
        """Count a batch that is given. Raises SampleError if it has too many bad samples; then it is not given."""
        meter = self._meter
        if counts.bad:
            self._bad += len(counts.bad)
            meter.add_bad(counts.bad)
            if self._bad > self._max_bad * self._whole:
                before = (
                    f", {self._start.bad} of them before step {self._start.step}"
                    if self._start.bad
                    else ""
                )
                raise SampleError(
                    f"{self._bad} of the {self._whole} samples of epoch {meter.epoch} are bad{before}, more than "
                    f"max_bad={self._max_bad} allows "
                    f"({', '.join(f'{count} x {reason}' for reason, count in meter.bad_reasons.items())}). "
                    f"The last: {counts.bad[-1].sentence}"
                )
        meter.batches += 1
        meter.samples += len(counts.ids) - counts.padded
        meter.padded += counts.padded


def _promised(plan: Order, lane: int, step: int) -> int:
    """Samples that a lane delivers from a step on, padding included."""
    first, stop = plan.span(lane, step)[0], plan.span(lane, plan.steps - 1)[1]
    return (min(stop, plan.lane_samples(lane)) if plan.tail == "keep" else stop) - first
