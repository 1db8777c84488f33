"""What an epoch of a loader cost, and what held it back."""

from __future__ import annotations

import math
import os
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

_NO_STALL = 0.1  # share of the time that may be spent waiting before the input is what holds it back
_KEPT = 100  # bad samples that are listed one by one; all are counted


class Finding(NamedTuple):
    """What is wrong with a sample or a shard, and where. `str` of it is a sentence.

    `field` is empty where the sample as a whole is at fault, `key` where it is the shard; the reason then goes on from the
    shard's name ("has 100 bytes, its index says 512").
    """

    shard: str
    key: str
    field: str
    offset: int
    reason: str

    @property
    def sentence(self) -> str:
        if not self.key:
            return f"{self.shard} {self.reason}."
        what = f"field '{self.field}' at offset {self.offset}" if self.field else f"the sample at offset {self.offset}"
        return f"{self.shard}: '{self.key}', {what}: {self.reason}."

    def __str__(self) -> str:
        return self.sentence


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
    copy_seconds: float = 0.0  # batches were on their way to a device, beside the loop's work
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
        return self.verdict_of("loop", self.loop_seconds)

    def verdict_of(self, consumer: str, busy_seconds: float) -> str:
        """The same where it is known what takes the batches, such as "GPU", and for how long it was busy with them.

        Of a stage that holds the others back it says what its share of the time was, and what more of it would give: a stage alone
        can do as many samples a second as its busy seconds say, and the slowest of all is what the whole does.
        """
        if not self.batches:
            return "nothing was delivered yet"
        total = self.wait_seconds + self.loop_seconds
        if self.stall < _NO_STALL:
            return f"{consumer} bound: it was busy {busy_seconds / max(1e-9, total):.0%} of the time and waited for data {self.stall:.1%}"
        decode, read, samples = self.decode_seconds / self.decoders, self.read_seconds, self.samples
        waited = f"the {consumer} waited for data {self.stall:.1%} of the time"
        if self.copy_seconds > max(read, decode, total / 2):
            return f"input bound: copy to the device {min(1.0, self.copy_seconds / total):.0%}; {waited}. Smaller or uint8 batches would help"
        if max(read, decode) < total / 2:
            busy = f"reading and decoding were busy {max(read, decode) / total:.0%} of it"
            return f"input bound: {waited}, {busy}: small batches, or shared processors"
        if read >= decode:
            speed = self.bytes / max(1e-9, read) / 1e6
            return (
                f"input bound: read {min(1.0, read / total):.0%}, storage gives {speed:.0f} MB/s; {waited}. "
                f"A disk that is nearer (cache_dir) or smaller samples would help"
            )
        shares = f"input bound: decode {min(1.0, decode / total):.0%}; {waited}"
        # samples per second, if nothing else held it back: of the loop, of the storage, and of one decoder
        others = min(samples / max(1e-9, self.loop_seconds), samples / max(1e-9, read))
        each = samples / max(1e-9, self.decode_seconds)
        more = min(math.ceil(others / each) - self.decoders, max(0, (os.cpu_count() or 1) - self.decoders))
        if more < 1:
            return f"{shares}. All {os.cpu_count()} cores are taken; smaller pictures (convert --resize) would help"
        rate = min(others, (self.decoders + more) * each)
        return f"{shares}. {more} more worker{'s' * (more > 1)} would give about {rate:.0f} samples/s"

    def report(self) -> dict[str, Any]:
        bad = [one._asdict() for one in self.bad_samples]
        return {**asdict(self), "bad_samples": bad, "stall": self.stall, "verdict": self.verdict}
