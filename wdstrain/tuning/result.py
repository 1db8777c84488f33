"""Results of `wt.bench`: the rate of each stage, the bottleneck, and the tried settings."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from wdstrain.report.printing import aligned

_BUSY = 1.25  # loader / slowest stage from which on the machine is said to have been busy
_WORTH = 1.1  # gain from which on a setting is recommended


class Trial(NamedTuple):
    """A setting that was run.

    setting: the changed option, as "name=value". rate: samples/s. baseline: samples/s of the
    settings in use, measured just before. advice: a flag of `wdstrain train`.
    """

    setting: str
    rate: float
    baseline: float
    advice: str

    @property
    def gain(self) -> float:
        """Rate divided by the rate of the setting in use."""
        return self.rate / max(1e-9, self.baseline)


@dataclass(frozen=True, repr=False)
class Bench:
    """Rates of a loader and its stages, in samples/s.

    stages: by name. "storage": reading, nothing decoded. "decode" or "transform": all decoders
    together. "hand-off": batches from a local excerpt, nothing
    decoded.
    achieved: the loader with all its stages. bottleneck: name of the slowest stage.
    first_batch: seconds until the first batch. mean_bytes: bytes per sample.
    page_cache: share of the shards in the page cache, 0 to 1; None if unknown.
    bad: bad samples that were replaced. trials: settings that were run, with tune=True.
    """

    samples: int
    bytes: int
    mean_bytes: float
    batch_size: int
    num_workers: int
    decoders: int
    cores: int
    stages: dict[str, float]
    bottleneck: str
    achieved: float
    first_batch: float
    page_cache: float | None
    bad: int
    trials: tuple[Trial, ...] = ()

    @property
    def verdict(self) -> str:
        """The bottleneck in one sentence."""
        limit = self.stages.get(self.bottleneck, self.achieved)
        if self.achieved > _BUSY * limit:
            return (
                f"the loader gave {self.achieved:.0f} samples/s and its slowest stage alone "
                f"{limit:.0f}: the machine was busy meanwhile. Measure again, or longer (seconds)."
            )
        kind = "worker process(es)" if self.num_workers else "thread(s)"
        decoders = f"{self.decoders} {kind}"
        cause = {
            "storage": f"storage ({limit * self.mean_bytes / 1e6:.0f} MB/s)",
            "decode": f"decoding in {decoders}",
            "transform": f"the transform in {decoders}",
            "hand-off": "the hand-off of batches to the training loop",
        }[self.bottleneck]
        return f"{cause} limits loading to {self.achieved:.0f} samples/s."

    @property
    def advice(self) -> list[str]:
        """The command with the fastest setting, if it pays."""
        best = max(self.trials, key=lambda trial: trial.gain, default=None)
        pays = best is not None and best.gain >= _WORTH
        return [f"wdstrain train SHARDS --out RUN {best.advice}"] if best and pays else []

    def rows(self) -> list[tuple[str, str]]:
        """Return (name, value) pairs for a table."""
        size = f"{self.mean_bytes / 1e3:.1f} KB each, {self.bytes / 1e6:.1f} MB"
        stages = {name: f"{rate:.0f} samples/s" for name, rate in self.stages.items()}
        cached = ""
        if self.page_cache is not None:
            cached = f"; {self.page_cache:.0%} of the shards in the page cache"
        stages["storage"] += f" ({self.stages['storage'] * self.mean_bytes / 1e6:.0f} MB/s{cached})"
        if len(stages) == 2:
            stages["decode"] = "nothing: the batches hold bytes"
        setting = f"num_workers={self.num_workers}, batch_size={self.batch_size}"
        rows = [
            ("samples", f"{self.samples}, {size}"),
            *stages.items(),
            ("loader", f"{self.achieved:.0f} samples/s with {setting}"),
            ("first batch", f"after {self.first_batch:.2f} s"),
        ]
        if self.bad:
            rows.append(("bad samples", f"{self.bad} replaced; see wdstrain verify --decode"))
        for trial in self.trials:
            text = f"{trial.setting}: {trial.rate:.0f} samples/s ({trial.gain:.2f}x)"
            rows.append(("tried", text))
        if self.trials:
            rows += [("use", command) for command in self.advice or ["the current settings"]]
        return [*rows, ("verdict", self.verdict)]

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON-able values."""
        trials = [{**trial._asdict(), "gain": trial.gain} for trial in self.trials]
        return {**asdict(self), "trials": trials, "advice": self.advice, "verdict": self.verdict}

    def __repr__(self) -> str:
        return aligned(self.rows())
