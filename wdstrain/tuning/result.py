"""Results of `wt.bench`: the rate of each stage, the bottleneck, and the tried settings."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from html import escape
from typing import Any, NamedTuple

from wdstrain.report import pages

_WORTH = 1.1  # gain from which on a setting is recommended
_BUSY = (
    1.25  # a loader that exceeds its slowest stage by this factor was measured in a quieter moment
)


class Trial(NamedTuple):
    """A setting that was run.

    setting: the changed option, as "name=value". rate: samples/s. baseline: samples/s of the
    settings in use, measured just before. advice: a flag of `wdstrain train`, or a whole command.
    """

    setting: str
    rate: float
    baseline: float
    advice: str

    @property
    def gain(self) -> float:
        """Rate divided by the rate of the setting in use."""
        return self.rate / max(1e-9, self.baseline)


@dataclass(frozen=True)
class Bench:
    """Rates of a loader and its stages, in samples/s.

    stages: by name. "storage": reading, nothing decoded. "decode" or "transform": all decoders
    together, as if none waited for the GIL. "hand-off": batches from a local excerpt, nothing
    decoded.
    achieved: the loader with all its stages. bottleneck: name of the slowest stage, or "GIL".
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
        kind = "worker process" if self.num_workers else "thread"
        plural = kind if self.decoders == 1 else f"{kind}es" if self.num_workers else f"{kind}s"
        causes = {
            "storage": f"storage ({limit * self.mean_bytes / 1e6:.0f} MB/s)",
            "decode": f"decoding in {self.decoders} {plural}",
            "transform": f"the transform in {self.decoders} {plural}",
            "hand-off": "the hand-off of batches to the training loop",
        }
        if self.bottleneck == "GIL":
            return (
                f"waiting for the GIL limits {self.decoders} {plural} to {self.achieved:.0f} "
                f"samples/s. Use worker processes (num_workers)."
            )
        return f"{causes[self.bottleneck]} limits loading to {self.achieved:.0f} samples/s."

    @property
    def advice(self) -> list[str]:
        """Commands to use: with the fastest setting of each kind that pays."""
        best: dict[str, Trial] = {}
        for trial in self.trials:
            name = trial.setting.partition("=")[0]
            if trial.gain >= max(_WORTH, best[name].gain if name in best else 0.0):
                best[name] = trial
        words = [trial.advice for trial in best.values()]
        flags = [flag for flag in words if flag.startswith("--")]
        train = ["wdstrain train SHARDS --out RUN " + " ".join(flags)] if flags else []
        return [*train, *(command for command in words if command not in flags)]

    def rows(self) -> list[tuple[str, str]]:
        """Return (name, value) pairs for a table."""
        size = f"{self.mean_bytes / 1e3:.1f} KB each, {self.bytes / 1e6:.1f} MB"
        rows = [("samples", f"{self.samples}, {size}")]
        for name, rate in self.stages.items():
            note = ""
            if name == "storage":
                note = f" ({rate * self.mean_bytes / 1e6:.0f} MB/s{self._page_cache_note()})"
            rows.append((name, f"{rate:.0f} samples/s{note}"))
        if not {"decode", "transform"} & set(self.stages):
            rows.append(("decode", "nothing: the batches hold bytes"))
        setting = f"num_workers={self.num_workers}, batch_size={self.batch_size}"
        rows.append(("loader", f"{self.achieved:.0f} samples/s with {setting}"))
        rows.append(("first batch", f"after {self.first_batch:.2f} s"))
        if self.bad:
            rows.append(("bad samples", f"{self.bad} replaced; see wdstrain verify --decode"))
        for trial in self.trials:
            rows.append(
                ("tried", f"{trial.setting}: {trial.rate:.0f} samples/s ({trial.gain:.2f}x)")
            )
        if self.trials:
            rows += [("use", command) for command in self.advice or ["the current settings"]]
        return [*rows, ("verdict", self.verdict)]

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON-able values."""
        trials = [{**trial._asdict(), "gain": trial.gain} for trial in self.trials]
        return {**asdict(self), "trials": trials, "advice": self.advice, "verdict": self.verdict}

    def _repr_html_(self) -> str:
        rates = {"loader": self.achieved, **self.stages}
        bars = pages.bars({f"{name}, samples/s": round(rate) for name, rate in rates.items()})
        facts = pages.table(dict(self.rows()[:-1]))
        return pages.fragment("bottleneck", f"<p><b>{escape(self.verdict)}</b></p>{bars}{facts}")

    def _page_cache_note(self) -> str:
        if self.page_cache is None:
            return ""
        return f"; {self.page_cache:.0%} of the shards in the page cache"
