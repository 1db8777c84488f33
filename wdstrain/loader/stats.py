"""Counts and seconds of an epoch by stage, and its bottleneck.

Each stage counts the seconds of its own threads: the reader's thread reads, all decoders together
decode, and the loop's thread builds tasks (parse), waits for the window (shuffle), receives decoded
batches (hand-off) and works on them (loop). The stages overlap, so their seconds do not add up.
`wait_seconds` and `loop_seconds` do: they are the time of the loop. The bottleneck is the stage
that would need the most time if it ran alone.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, NamedTuple

from wdstrain.errors import logger
from wdstrain.reader.reader import ReadStats
from wdstrain.report.printing import counted, printable
from wdstrain.runtime.machine import cores

_LARGEST_STALL = 0.1  # share of waiting up to which the loop is the bottleneck
_LEAST_COMPUTING = 0.4  # share of its time in which a decoder computes, below which it waits
_shorten = partial(textwrap.shorten, width=120, placeholder=" ...")  # a line of the log
_MOST_REASONS = 20  # reasons of bad samples that are counted separately
_LOGGED_REASONS = 3
_KEPT_FINDINGS = 100  # bad samples that are kept for the report; all are counted

_ADVICE = {  # by the slowest stage but decoding
    "": "The busiest stage took {busy} of it. Larger batches, or cores that no other process uses, "
    "would help",
    "copy to the device": "Smaller batches, or uint8 ones, would help",
    "hand-off": "Larger batches, or fewer values in each sample, would help",
    "read": "A faster disk (see cache_dir), or smaller samples, would help",
}


class Finding(NamedTuple):
    """A fault of a sample or a shard, and where it is.

    field: empty if the whole sample is bad. key: empty if the whole shard is; `reason` then goes on
    after the name of the shard: "has 100 bytes, its index says 512".
    """

    shard: str
    key: str
    field: str
    offset: int
    reason: str

    @property
    def sentence(self) -> str:
        """The fault as a sentence."""
        if not self.key:
            return printable(f"{self.shard} {self.reason}.")
        member = f"field '{self.field}'" if self.field else "the sample"
        return printable(
            f"{self.shard}: '{self.key}', {member} at offset {self.offset}: {self.reason}."
        )

    @property
    def kind(self) -> str:
        """The reason without quotations and numbers, to count similar findings together."""
        words = re.sub(r"\(.*|'[^']*'|\S*\d\S*", "", self.reason).split()
        return " ".join(words).rstrip(" ,:") or "it cannot be used"

    def __str__(self) -> str:
        return self.sentence


@dataclass
class StageTotals(ReadStats):
    """Counts and seconds of the stages. Seconds of all decoders are added up."""

    parse_seconds: float = 0.0  # tasks were built from plan and index
    decode_seconds: float = 0.0
    compute_seconds: float = 0.0  # processor time of decoding and collating
    collate_seconds: float = 0.0  # decoded rows became a batch
    handoff_seconds: float = 0.0  # a decoded batch that the loop waited for was on its way
    copies: int = 0  # batches that were copied because the loop kept many


@dataclass
class EpochStats(StageTotals):
    """Counts and seconds of one epoch on one rank."""

    epoch: int = 0
    samples: int = 0
    batches: int = 0
    left_out: int = 0
    padded: int = 0
    wait_seconds: float = 0.0  # the loop waited for a batch
    loop_seconds: float = 0.0  # the loop worked on a batch
    copy_seconds: float = 0.0  # batches were copied to a device, beside the loop's work
    decoders: int = 1
    bad: int = 0  # samples that were replaced or marked
    bad_reasons: dict[str, int] = field(default_factory=dict)
    bad_samples: list[Finding] = field(default_factory=list)

    def set_stages(self, before: Mapping[str, float], now: Mapping[str, float]) -> None:
        """Take the differences of two totals as the counts and seconds of the stages."""
        vars(self).update({name: value - before[name] for name, value in now.items()})

    def add_bad(self, findings: list[Finding]) -> None:
        """Count bad samples by field and reason, and keep the first of them."""
        self.bad += len(findings)
        for finding in findings:
            reason = f"{finding.field or 'sample'}: {finding.kind}"
            if reason not in self.bad_reasons and len(self.bad_reasons) >= _MOST_REASONS:
                reason = "others"
            self.bad_reasons[reason] = self.bad_reasons.get(reason, 0) + 1
        self.bad_samples += findings[: max(0, _KEPT_FINDINGS - len(self.bad_samples))]

    # --- the bottleneck ---------------------------------------------------------------------------

    @property
    def stall(self) -> float:
        """Share of the loop's time in which it waited for a batch, 0 to 1."""
        return self.wait_seconds / self._seconds if self.wait_seconds else 0.0

    @property
    def _seconds(self) -> float:
        """Seconds of the loop, with and without a batch; above 0."""
        return max(1e-9, self.wait_seconds + self.loop_seconds)

    @property
    def verdict(self) -> str:
        """The bottleneck of the epoch and advice, in a sentence or two."""
        return self.verdict_of("loop", self.loop_seconds)

    def verdict_of(self, consumer: str, busy_seconds: float) -> str:
        """Return the verdict for a known consumer of the batches, such as "GPU".

        busy_seconds: time in which the consumer was busy.
        """
        if not self.samples:
            return "nothing was delivered yet"
        bottleneck = self._bottleneck(consumer)
        if self.stall < _LARGEST_STALL:
            return (
                f"{bottleneck}: it was busy {busy_seconds / self._seconds:.0%} of the time and "
                f"waited for data {self.stall:.1%}"
            )
        waited = f"the {consumer} waited for data {self.stall:.1%} of the time"
        return f"{bottleneck}; {waited}. {self._advice()}"

    def _bottleneck(self, consumer: str = "loop") -> str:
        """Return the bottleneck in a few words, such as "input bound: decode 93%"."""
        if self.stall < _LARGEST_STALL:
            return f"{consumer} bound"
        stage, seconds = self._slowest
        if not stage:
            return "no bottleneck: no stage was busy half of the time"
        rate = self.bytes / max(1e-9, self.read_seconds) / 1e6
        storage = f", storage gives {rate:.0f} MB/s" if stage == "read" else ""
        return f"input bound: {stage} {min(1.0, seconds / self._seconds):.0%}{storage}"

    @property
    def is_input_bound(self) -> bool:
        """Whether the loop waited for data and one stage of loading took most of the time."""
        return self.stall >= _LARGEST_STALL and bool(self._slowest[0])

    @property
    def _slowest(self) -> tuple[str, float]:
        """Stage that takes the most time, and its seconds per thread; "" if none takes half."""
        seconds = {  # of two that are equal, the first is named
            "read": self.read_seconds,
            "decode": (self.decode_seconds + self.collate_seconds) / self.decoders,
            "hand-off": self.parse_seconds + self.handoff_seconds,
            "copy to the device": self.copy_seconds,
        }
        stage, most = max(seconds.items(), key=lambda item: item[1])
        return (stage if most >= self._seconds / 2 else ""), most

    def _advice(self) -> str:
        """Return what would make the slowest stage faster; never more workers than cores."""
        stage, seconds = self._slowest
        if stage != "decode":
            return _ADVICE[stage].format(busy=f"{seconds / self._seconds:.0%}")
        spent = self.decode_seconds + self.collate_seconds
        if 0 < self.compute_seconds < _LEAST_COMPUTING * spent:
            return (
                f"Decoding waits: it computes in {self.compute_seconds / spent:.0%} of its time. "
                f"A field or transform that waits for less would help"
            )
        # Rates in samples/s that one decoder, and the loop or the storage alone would reach.
        decoder_rate = self.samples / max(1e-9, spent)
        other_rate = self.samples / max(1e-9, self.loop_seconds, self.read_seconds)
        needed = math.ceil(other_rate / decoder_rate) - self.decoders
        more = min(needed, max(0, cores() - self.decoders))
        if more < 1:
            return f"All {cores()} cores are taken; smaller images (convert --resize) would help"
        rate = min(other_rate, (self.decoders + more) * decoder_rate)
        return f"{counted(more, 'more worker')} would give about {rate:.0f} samples/s"

    # --- texts ------------------------------------------------------------------------------------

    @property
    def line(self) -> str:
        """The epoch in one line of at most 120 characters, for the log."""
        seconds = self.wait_seconds + self.loop_seconds
        counts = {"retries": self.retries, "read again": self.reread, "bad": self.bad}
        notes = "".join(f", {count} {name}" for name, count in counts.items() if count)
        return _shorten(
            f"epoch {self.epoch}: {self.samples} samples, {self.bytes / 1e6:.1f} MB, "
            f"{seconds:.2f} s, {self.samples / self._seconds:.0f} samples/s, "
            f"waited {self.stall:.1%}{notes}; {self._bottleneck()}"
        )

    @property
    def bad_line(self) -> str:
        """The most frequent reasons of bad samples in at most 120 characters; empty without any."""
        reasons = sorted(self.bad_reasons.items(), key=lambda item: -item[1])[:_LOGGED_REASONS]
        text = ", ".join(f"{count} x {printable(reason)}" for reason, count in reasons)
        return _shorten(f"epoch {self.epoch}: bad samples: {text}") if text else ""

    def log(self) -> None:
        """Log the texts above."""
        logger.info("%s", self.line)
        if self.bad_line:
            logger.info("%s", self.bad_line)

    def report(self) -> dict[str, Any]:
        """Return all values, with stall and verdict, as JSON-able data."""
        findings = [finding._asdict() for finding in self.bad_samples]
        return {
            **asdict(self),
            "bad_samples": findings,
            "stall": self.stall,
            "verdict": self.verdict,
        }
