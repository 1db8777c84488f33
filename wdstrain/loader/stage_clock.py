"""Seconds and counts of the stages of a pipeline since it was made."""

from __future__ import annotations

from typing import NamedTuple

from wdstrain.decode.decoder import Result
from wdstrain.reader.run_state import ReadStats


class StageTotals(NamedTuple):
    """Totals of the stages, by the names of `EpochStats`."""

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


class StageClock:
    """Totals of one pipeline. read: totals of its reader.

    parse: seconds in which tasks were built. reread: samples that were read again.
    """

    def __init__(self, read: ReadStats) -> None:
        self.read, self.parse, self.reread = read, 0.0, 0
        self._decode = self._compute = self._collate = self._handoff = 0.0

    @property
    def before_decoding(self) -> float:
        """Seconds in which the loop's thread built tasks or waited for samples."""
        return self.parse + self.read.shuffle_seconds

    def add_handoff(self, seconds: float) -> None:
        """Count the time in which a decoded batch was requested and on its way."""
        self._handoff += max(0.0, seconds)

    def add_result(self, result: Result, assemble_seconds: float) -> None:
        """Count a decoded batch, and the time to make the loop's batch of it."""
        self._decode += result.read - result.begun
        self._compute += result.computed
        self._collate += result.ended - result.read + assemble_seconds

    def totals(self, copies: int) -> StageTotals:
        """Return the totals. copies: batches that were copied out of their slots."""
        return StageTotals(
            bytes=self.read.bytes,
            fetched=self.read.fetch.fetched,
            cached=self.read.fetch.cached,
            retries=self.read.fetch.retries,
            read_seconds=self.read.read_seconds,
            shuffle_seconds=self.read.shuffle_seconds,
            parse_seconds=self.parse,
            decode_seconds=self._decode,
            compute_seconds=self._compute,
            collate_seconds=self._collate,
            handoff_seconds=self._handoff,
            copies=copies,
            reread=self.reread,
        )
