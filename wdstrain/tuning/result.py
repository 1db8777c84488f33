"""What was measured of a loader's stages, and what follows: which of them binds, what another setting would give, in words.

The stages run side by side, so a loader is as fast as the slowest of them; those that compute also share the processors. That is
the whole model: the least of storage, hand-off, decoding by the decoders there are, and what the processors can do of decoding and
hand-off together. Where threads together decode hardly more than one of them, they wait for the interpreter's lock, which the
hand-off needs as well: then what they do together is done one after another. A road not taken is to search settings one by one: it takes a run each, and says nothing of why.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from html import escape
from typing import Any, NamedTuple

import numpy as np

from wdstrain.report import charts

_LOCKED = 0.75  # of what as many single threads would decode: below it, they wait for the interpreter's lock
UNEVEN = (
    1.25  # times what its parts allow: no loader is faster, so they were measured in a worse moment
)


class Change(NamedTuple):
    """Something to change, and the samples a second that it would give."""

    what: str
    rate: float


class Try(NamedTuple):
    """A number of workers (0: threads), the samples a second that were predicted for it, and those that it gave."""

    num_workers: int
    predicted: float
    rate: float


@dataclass(frozen=True)
class Bench:
    """What was measured, in samples a second where nothing else is said.

    storage: the reader alone; decode: {decoders at a time: all of them together}, by "threads" and "processes"; handoff: batches of which
    nothing is decoded, by the same; achieved: the loader as it was asked for; first_batch: seconds until its first.
    """

    samples: int
    bytes: int
    mean_bytes: float
    batch_size: int
    num_workers: int
    cores: int
    storage: float
    in_memory: float | None
    decode: dict[str, dict[int, float]]
    handoff: dict[str, float]
    achieved: float
    first_batch: float
    bad: int
    report_verdict: str
    changes: tuple[Change, ...] = ()
    tries: tuple[Try, ...] = ()
    inline: bool = field(
        default=False, repr=False
    )  # nothing is decoded: the loop takes the bytes itself

    def predicted(self, num_workers: int) -> float:
        """Samples a second of a loader with so many workers."""
        return min(self._limits(num_workers).values())

    @property
    def binding(self) -> str:
        """What is slowest: storage, decode, hand-off, processors or lock."""
        found = self._limits(self.num_workers)
        return min(found, key=lambda name: found[name])

    @property
    def verdict(self) -> str:
        """What binds, and what to change, in a sentence or two."""
        whole = self.predicted(self.num_workers)
        share = self.achieved / whole if whole else 0.0
        words = {
            "storage": f"storage binds, with {self.storage * self.mean_bytes / 1e6:.0f} MB/s",
            "decode": "decoding binds",
            "hand-off": "the hand-off of batches binds",
            "processors": f"the {self.cores} processors bind, all of them at work",
            "lock": "the interpreter's lock binds, for which threads wait",
        }
        if share > UNEVEN:
            return (
                f"the loader gave {self.achieved:.0f} samples/s, more than the {whole:.0f} that its parts allow by themselves: the machine "
                f"was busy with something else meanwhile. Measure again, or longer (seconds)."
            )
        said = f"{words[self.binding]}: {self.achieved:.0f} samples/s are {share:.0%} of the {whole:.0f} that it allows."
        if not self.changes:
            return f"{said} No change of those that were looked at would give a tenth more."
        best = max(self.changes, key=lambda one: one.rate)
        return f"{said} {best.what} would give about {best.rate:.0f} samples/s ({best.rate / max(1e-9, self.achieved):.2f} times)."

    @property
    def best(self) -> Try | None:
        """Of the settings that were tried, the fastest; of those within a hundredth, the one with the fewest workers."""
        good = [one for one in self.tries if one.rate >= 0.99 * max(one.rate for one in self.tries)]
        return min(good, key=lambda one: one.num_workers, default=None)

    def rows(self) -> list[tuple[str, str]]:
        """Names and values, for a table."""
        found = [
            (
                "samples",
                f"{self.samples}, {self.mean_bytes / 1e3:.1f} KB each, {self.bytes / 1e6:.1f} MB",
            )
        ]
        cached = (
            ""
            if self.in_memory is None
            else f"; {self.in_memory:.0%} of the shards lie in the system's memory"
        )
        found.append(
            (
                "storage",
                f"{self.storage:.0f} samples/s ({self.storage * self.mean_bytes / 1e6:.0f} MB/s{cached})",
            )
        )
        for kind, rates in self.decode.items():
            each = ", ".join(f"{count}: {rate:.0f}" for count, rate in rates.items())
            found.append((f"decode, {kind}", f"{each} samples/s"))
        found += [
            (f"hand-off, {kind}", f"{rate:.0f} samples/s") for kind, rate in self.handoff.items()
        ]
        setting = f"num_workers={self.num_workers}, batch_size={self.batch_size}"
        found.append(("achieved", f"{self.achieved:.0f} samples/s with {setting}"))
        found.append(("first batch", f"after {self.first_batch:.2f} s"))
        if self.bad:
            found.append(
                ("bad samples", f"{self.bad} were replaced; wdstrain verify --decode names them")
            )
        found += [("change", f"{one.what}: about {one.rate:.0f} samples/s") for one in self.changes]
        for one in self.tries:
            found.append(
                (
                    "tried",
                    f"num_workers={one.num_workers}: {one.rate:.0f} samples/s ({one.predicted:.0f} predicted)",
                )
            )
        if self.best is not None:
            found.append(
                ("best", f"num_workers={self.best.num_workers}: {self.best.rate:.0f} samples/s")
            )
        return [*found, ("verdict", self.verdict)]

    def as_dict(self) -> dict[str, Any]:
        """Everything, JSON-able."""
        found = asdict(self)
        found["changes"] = [one._asdict() for one in self.changes]
        found["tries"] = [{**one._asdict()} for one in self.tries]
        return {
            **found,
            "binding": self.binding,
            "predicted": self.predicted(self.num_workers),
            "verdict": self.verdict,
        }

    def _repr_html_(self) -> str:
        most = {"achieved": self.achieved, **self._limits(self.num_workers)}
        bars = charts.bars({f"{name}, samples/s": round(rate) for name, rate in most.items()})
        facts = charts.table(dict(self.rows()[:-1]))
        return charts.fragment(
            "what holds loading back", f"<p><b>{escape(self.verdict)}</b></p>{bars}{facts}"
        )

    def _limits(self, num_workers: int) -> dict[str, float]:
        kind = "processes" if num_workers else "threads"
        decoders = min(num_workers or self.cores, self.cores)
        rates = self.decode[kind]
        if self.inline:
            return {"storage": self.storage, "decode": rates[1]}
        known = sorted(rates)
        decode = float(np.interp(decoders, known, [rates[count] for count in known]))
        each = rates[known[-1]] / known[-1]  # of one processor, while all decode
        together = self.cores / (1 / each + 1 / self.handoff[kind])
        found = {
            "storage": self.storage,
            "decode": decode,
            "hand-off": self.handoff[kind],
            "processors": together,
        }
        if kind == "threads" and rates[known[-1]] < _LOCKED * known[-1] * rates[1]:
            found["lock"] = 1 / (1 / rates[known[-1]] + 1 / self.handoff[kind])
        return found
