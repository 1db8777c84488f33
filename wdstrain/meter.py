"""What an epoch of a loader cost, and what held it back."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

_KEPT = 100  # bad samples that are listed one by one; all are counted


class Finding(NamedTuple):
    """A bad sample: where it lies and what is wrong with it. `field` is empty where the sample as a whole is at fault."""

    shard: str
    key: str
    field: str
    offset: int
    reason: str

    @property
    def sentence(self) -> str:
        what = f"field '{self.field}' at offset {self.offset}" if self.field else f"the sample at offset {self.offset}"
        return f"{self.shard}: '{self.key}', {what}: {self.reason}."


@dataclass
class Meter:
    """Counts and seconds of one epoch on one rank. Seconds of decoding add up over all decoders."""

    epoch: int = 0
    samples: int = 0
    batches: int = 0
    left_out: int = 0
    padded: int = 0
    bytes: int = 0  # read from storage
    fetched: int = 0  # bytes of them that came from servers
    cached: int = 0  # bytes of them that the cache had
    retries: int = 0  # requests that were made anew
    read_seconds: float = 0.0  # the reader waited for storage
    decode_seconds: float = 0.0
    wait_seconds: float = 0.0  # the loop waited for a batch: the stall
    loop_seconds: float = 0.0  # the loop was busy with a batch
    copies: int = 0  # batches copied because many were kept
    decoders: int = 1
    reread: int = 0  # samples that were read once more, because their checksum was not that of what was packed
    bad: int = 0  # samples that were replaced by others of their batch
    bad_reasons: dict[str, int] = field(default_factory=dict)
    bad_samples: list[Finding] = field(default_factory=list)

    def add_bad(self, found: list[Finding]) -> None:
        """Count bad samples by field and reason, and keep the first of them."""
        self.bad += len(found)
        for one in found:
            reason = f"{one.field or 'sample'}: {one.reason.split('(')[0].strip()}"
            self.bad_reasons[reason] = self.bad_reasons.get(reason, 0) + 1
        self.bad_samples += found[: max(0, _KEPT - len(self.bad_samples))]

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
        if self.stall < 0.1:
            return f"the loop itself is the limit: it waited for data {self.stall:.1%} of the time"
        decode = self.decode_seconds / self.decoders
        stage = "decoding" if decode > self.read_seconds else "reading"
        total = self.wait_seconds + self.loop_seconds
        share = max(decode, self.read_seconds) / total
        return f"input bound: {stage} ({share:.0%} of the time); the loop waited for data {self.stall:.1%} of the time"

    def report(self) -> dict[str, Any]:
        bad = [one._asdict() for one in self.bad_samples]
        return {**asdict(self), "bad_samples": bad, "stall": self.stall, "verdict": self.verdict}
