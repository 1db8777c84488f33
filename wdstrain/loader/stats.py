"""What an epoch of a loader cost, stage by stage, and what held it back.

Seconds are those of whoever does the work: reading has a thread, decoding all decoders together, the loop's own thread plans
(parse), waits for the window (shuffle), takes over what was decoded (hand-off) and is busy with the batch (loop). So they are no
parts of one sum, but `wait_seconds` and `loop_seconds` are: of the loop's own time. A stage by itself can do as many samples a second as its
busy seconds say, and the slowest of all is what the whole does: from that comes the verdict. A profiler would say the same for a hundred
times the cost; these are a few readings of the clock for each batch.
"""

from __future__ import annotations

import math
import re
import textwrap
from dataclasses import asdict, dataclass, field
from html import escape
from typing import Any, NamedTuple

from wdstrain.report import charts
from wdstrain.report.printing import printable
from wdstrain.runtime.machine import cores

_NO_STALL = (
    0.1  # share of the time that may be spent waiting before the input is what holds it back
)
_KINDS = 20  # of reasons that are counted apart
_SHOWN = 3  # of them in a line of the log
_WAITS = 0.4  # share of its time in which a decoder computes, below which it rather waits
_WIDTH = 120  # characters of a line of the log
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
            return printable(f"{self.shard} {self.reason}.")
        what = (
            f"field '{self.field}' at offset {self.offset}"
            if self.field
            else f"the sample at offset {self.offset}"
        )
        return printable(f"{self.shard}: '{self.key}', {what}: {self.reason}.")

    @property
    def kind(self) -> str:
        """What findings of one kind have in common: the reason without what it quotes, and without numbers."""
        return (
            " ".join(re.sub(r"\(.*|'[^']*'|\S*\d\S*", "", self.reason).split()).rstrip(" ,:")
            or "it cannot be used"
        )

    def __str__(self) -> str:
        return self.sentence


class Report(dict[str, Any]):
    """What an epoch cost, as JSON-able values by name; a notebook shows it as a table with bars."""

    def __init__(self, values: dict[str, Any], stages: dict[str, float]) -> None:
        super().__init__(values)
        self._stages = stages

    def _repr_html_(self) -> str:
        counts = {
            "samples": self["samples"],
            "batches": self["batches"],
            "MB": f"{self['bytes'] / 1e6:.1f}",
            "waited": f"{self['wait_seconds']:.2f} s ({self['stall']:.1%})",
        }
        far = {"MB fetched": self["fetched"] / 1e6, "MB from the cache": self["cached"] / 1e6}
        counts |= {name: f"{value:.1f}" for name, value in far.items() if value}
        counts |= {
            name.replace("_", " "): self[name]
            for name in ("left_out", "padded", "retries", "reread", "copies", "bad")
            if self[name]
        }
        counts |= {f"bad: {reason}": count for reason, count in self["bad_reasons"].items()}
        seconds = {f"{name}, s": round(spent, 3) for name, spent in self._stages.items()}
        body = (
            f"<p><b>{escape(self['verdict'])}</b></p>{charts.table(counts)}{charts.bars(seconds)}"
        )
        return charts.fragment(f"epoch {self['epoch']}", body)


@dataclass
class EpochStats:
    """Counts and seconds of one epoch on one rank. Seconds of decoding and collating add up over all decoders."""

    epoch: int = 0
    samples: int = 0
    batches: int = 0
    left_out: int = 0
    padded: int = 0
    bytes: int = 0  # read from storage
    fetched: int = 0  # bytes of them that came from servers
    cached: int = 0  # bytes of them that the cache had
    retries: int = 0  # requests that were made anew
    read_seconds: float = 0.0  # the reader waited for storage, and compared what came
    parse_seconds: float = 0.0  # plan and index became the places of a batch's members
    shuffle_seconds: float = (
        0.0  # a batch waited until the part of the window that it needs was read
    )
    decode_seconds: float = 0.0
    compute_seconds: float = (
        0.0  # of decoding and collating, those in which a decoder had a processor and did not wait
    )
    collate_seconds: float = 0.0  # decoded rows became one batch
    handoff_seconds: float = 0.0  # a batch that was decoded and wanted was on its way to the loop
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
            reason = f"{one.field or 'sample'}: {one.kind}"
            reason = (
                reason if reason in self.bad_reasons or len(self.bad_reasons) < _KINDS else "others"
            )
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
        if not self.samples:
            return "nothing was delivered yet"
        total = self.wait_seconds + self.loop_seconds
        if self.stall < _NO_STALL:
            return f"{consumer} bound: it was busy {busy_seconds / max(1e-9, total):.0%} of the time and waited for data {self.stall:.1%}"
        decode = (self.decode_seconds + self.collate_seconds) / self.decoders
        read, samples, given = (
            self.read_seconds,
            self.samples,
            self.parse_seconds + self.handoff_seconds,
        )
        waited = f"the {consumer} waited for data {self.stall:.1%} of the time"
        if self.copy_seconds > max(read, decode, total / 2):
            return f"input bound: copy to the device {min(1.0, self.copy_seconds / total):.0%}; {waited}. Smaller or uint8 batches would help"
        if given > max(read, decode, total / 2):
            return f"input bound: hand-off {min(1.0, given / total):.0%}; {waited}. Larger batches, or fewer values in each sample, would help"
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
        spent = self.decode_seconds + self.collate_seconds
        if 0 < self.compute_seconds < _WAITS * spent:
            return (
                f"{shares}. Decoding waits: it computes in {self.compute_seconds / spent:.0%} of its time. A field or "
                f"transform that waits for less would help"
            )
        # samples per second, if nothing else held it back: of the loop, of the storage, and of one decoder
        others = min(samples / max(1e-9, self.loop_seconds), samples / max(1e-9, read))
        each = samples / max(1e-9, decode * self.decoders)
        more = min(math.ceil(others / each) - self.decoders, max(0, cores() - self.decoders))
        if more < 1:
            return f"{shares}. All {cores()} cores are taken; smaller pictures (convert --resize) would help"
        rate = min(others, (self.decoders + more) * each)
        return (
            f"{shares}. {more} more worker{'s' * (more > 1)} would give about {rate:.0f} samples/s"
        )

    @property
    def stages(self) -> dict[str, float]:
        """Seconds by stage, in the order in which a sample meets them."""
        return {
            "read": self.read_seconds,
            "parse": self.parse_seconds,
            "wait for shuffle": self.shuffle_seconds,
            "decode": self.decode_seconds,
            "collate": self.collate_seconds,
            "hand-off": self.handoff_seconds,
            "copy": self.copy_seconds,
            "loop": self.loop_seconds,
        }

    @property
    def line(self) -> str:
        """The epoch in one line of at most 120 characters, for a log. `report` has all of it."""
        seconds = self.wait_seconds + self.loop_seconds
        counts = {"retries": self.retries, "read again": self.reread, "bad": self.bad}
        notes = "".join(f", {count} {name}" for name, count in counts.items() if count)
        return _shortened(
            f"epoch {self.epoch}: {self.samples} samples, {self.bytes / 1e6:.1f} MB, {seconds:.2f} s, "
            f"{self.samples / max(1e-9, seconds):.0f} samples/s, waited {self.stall:.1%}{notes}; {self.verdict}"
        )

    @property
    def bad_line(self) -> str:
        """The most frequent reasons of bad samples in one line of at most 120 characters; empty if there are none."""
        most = sorted(self.bad_reasons.items(), key=lambda one: -one[1])[:_SHOWN]
        reasons = ", ".join(f"{count} x {printable(reason)}" for reason, count in most)
        return _shortened(f"epoch {self.epoch}: bad samples: {reasons}") if reasons else ""

    @property
    def details(self) -> str:
        """Seconds of each stage, and the whole verdict, in one line."""
        stages = ", ".join(f"{name} {spent:.2f}" for name, spent in self.stages.items())
        return (
            f"epoch {self.epoch}: {self.batches} batches, {self.fetched / 1e6:.1f} MB fetched, {self.cached / 1e6:.1f} MB from the "
            f"cache; seconds: {stages}; {self.decoders} decoder{'s' * (self.decoders != 1)}; {self.verdict}"
        )

    def report(self) -> Report:
        bad = [one._asdict() for one in self.bad_samples]
        return Report(
            {**asdict(self), "bad_samples": bad, "stall": self.stall, "verdict": self.verdict},
            stages=self.stages,
        )


def _shortened(text: str) -> str:
    return textwrap.shorten(text, _WIDTH, placeholder=" ...")
