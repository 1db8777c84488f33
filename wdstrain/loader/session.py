"""State of a running loader: its pipeline, its position, its newest pass and that pass's counts."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from wdstrain.errors import UsageError, WdstrainError
from wdstrain.loader.batch_stream import OVER
from wdstrain.loader.pipeline import Pipeline
from wdstrain.loader.stats import EpochStats
from wdstrain.native import kernels
from wdstrain.order.plan import integer
from wdstrain.runtime.signals import WORKER_DEATH, DeferSignals

_log = logging.getLogger("wdstrain")


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


class LoaderSession:
    """What a loader has running. Only the newest pass over the loader moves its position.

    stats: of the newest pass. pipeline: None before the first pass and after `close`.
    """

    def __init__(self, make_pipeline: Callable[[], Pipeline]) -> None:
        """make_pipeline: must not refer to the loader, which is closed when nobody refers to it."""
        self.stats = EpochStats()
        self._make_pipeline = make_pipeline
        self.pipeline: Pipeline | None = None
        self._position: Position | None = None  # after the batch that was delivered last
        self._requested: Position | None = None  # start of the next loop, if somebody set it
        self._link: Callable[[], PassLink | None] = lambda: None  # of the newest pass; weak

    # --- position ---------------------------------------------------------------------------------

    @property
    def next_start(self) -> Position:
        """The first step of the next `for` loop, which is the next epoch also after a `break`."""
        if self._requested is not None:
            return self._requested
        if self._position is None:
            return Position(0, 0)
        return Position(self._position.epoch + (self._position.step > 0), 0)

    @property
    def position(self) -> Position:
        """The position of a loop within an epoch; otherwise the start of the next loop."""
        link, position = self._link(), self._position
        if link is not None and link.is_current and position is not None and position.step:
            return position
        return self._requested or position or Position(0, 0)

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the next epoch. A requested step within it stays."""
        if self._requested is None or self._requested.epoch != epoch:
            self._requested = Position(epoch, 0)

    def restore(self, position: Position) -> None:
        """Make this the start of the next loop. A loop that still runs has no position any more."""
        self._requested = position
        self._link = lambda: None

    # --- pipeline ---------------------------------------------------------------------------------

    def close(self) -> None:
        """End the pipeline. The next pass makes another one."""
        pipeline = self.pipeline
        if pipeline is not None:
            with DeferSignals(WORKER_DEATH):  # the workers end; torch would report their death
                pipeline.close()
            if self.pipeline is pipeline:  # a loop in another thread may have begun anew
                self.pipeline = None

    def open_pipeline(self, link: PassLink) -> Pipeline:
        """Return the pipeline for the pass of this link."""
        # Before the other pass notices: the end of a pass that lost its place closes nothing.
        self._disconnect_others(link)
        pipeline = self.pipeline
        # It may be closed in part, by a Ctrl-C or another thread. A forked child makes its own.
        if pipeline is not None and (pipeline.closed or pipeline.process != os.getpid()):
            self.close()
            pipeline = None
        if pipeline is None:
            pipeline = self._make_pipeline()
            pipeline.close_with(self)
            self.pipeline = pipeline
        return pipeline

    def begin(self, link: PassLink, stats: EpochStats, position: Position) -> None:
        """Make the pass of this link the newest one."""
        self._requested, self.stats, self._position = None, stats, position
        self._disconnect_others(link)
        self._link = weakref.ref(link)

    def move(self, position: Position) -> None:
        """Note the position after the batch that was delivered last."""
        self._position = position

    def _disconnect_others(self, link: PassLink) -> None:
        newest = self._link()
        if newest is not None and newest is not link:
            newest.disconnect()


class PassLink:
    """Reference from a pass to the session of its loader, until an error or a newer pass.

    A traceback refers to the pass for as long as it is kept: in a notebook until the next error.
    The loader must be able to end before that, so no frame of a pass refers to it otherwise.
    """

    def __init__(self, session: LoaderSession) -> None:
        self._session: LoaderSession | None = session

    @property
    def is_current(self) -> bool:
        """Whether the pass may still take batches."""
        return self._session is not None

    def open_pipeline(self) -> Pipeline:
        """Return the running pipeline. Raises WdstrainError if the pass is over."""
        if self._session is None:
            raise WdstrainError(OVER)
        return self._session.open_pipeline(self)

    def begin(self, stats: EpochStats, position: Position) -> None:
        """Make this pass the newest one of its loader."""
        if self._session is not None:
            self._session.begin(self, stats, position)

    def move(self, position: Position) -> None:
        """Move the loader to a position."""
        if self._session is not None:
            self._session.move(position)

    def disconnect(self) -> None:
        """End this pass alone: the loader belongs to another one."""
        self._session = None

    def close(self) -> None:
        """End this pass and the pipeline."""
        session, self._session = self._session, None
        if session is not None:
            session.close()


@lru_cache(maxsize=1)
def log_slow_paths() -> None:
    """Log once per process which parts of the platform are missing, so that slower code runs."""
    if kernels.library is None:
        _log.warning(
            "The compiled part of wdstrain is missing or older than its source, so slower generic "
            "code is used. For the fast one, install a C compiler and reinstall wdstrain (in a "
            "clone: python scripts/compile.py)."
        )
    if kernels.libjpeg_turbo() is None:
        _log.info(
            "libjpeg-turbo 3 was not found, so each JPEG is decoded as a whole, even if a crop "
            "needs a part of it. For faster decoding: pip install turbojpeg"
        )
