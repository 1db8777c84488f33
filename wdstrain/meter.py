"""What an epoch of a loader cost, and what held it back."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class Meter:
    """Counts and seconds of one epoch on one rank. Seconds of decoding add up over all decoders."""

    epoch: int = 0
    samples: int = 0
    batches: int = 0
    left_out: int = 0
    padded: int = 0
    bytes: int = 0  # read from storage
    read_seconds: float = 0.0  # the reader waited for storage
    decode_seconds: float = 0.0
    wait_seconds: float = 0.0  # the loop waited for a batch: the stall
    loop_seconds: float = 0.0  # the loop was busy with a batch
    copies: int = 0  # batches copied because many were kept
    decoders: int = 1

    @property
    def stall(self) -> float:
        """The share of the time in which the loop waited for data, 0 to 1."""
        total = self.wait_seconds + self.loop_seconds
        return self.wait_seconds / total if total else 0.0

    @property
    def verdict(self) -> str:
        """What held the epoch back, in a sentence."""
        if not self.batches:
            return "nothing was delivered yet"
        if self.stall < 0.05:
            return f"the loop itself is the limit: it waited for data {self.stall:.1%} of the time"
        decode = self.decode_seconds / self.decoders
        stage = "decoding" if decode > self.read_seconds else "reading"
        total = self.wait_seconds + self.loop_seconds
        share = max(decode, self.read_seconds) / total
        return f"input bound: {stage} ({share:.0%} of the time); the loop waited for data {self.stall:.1%} of the time"

    def report(self) -> dict[str, Any]:
        return {**asdict(self), "stall": self.stall, "verdict": self.verdict}
