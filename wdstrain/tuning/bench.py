"""`wt.bench`: the rate of each stage of a loader, of the loader itself, and the bottleneck.

Every rate is that of a real `wt.Loader`; only its input differs. Storage is measured with batches
of bytes, decoding on a local excerpt, and the hand-off with batches of bytes of the excerpt. With
`tune`, other numbers of worker processes are run too.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from dataclasses import fields as fields_of
from typing import Any, NamedTuple

import numpy as np

from wdstrain.conversion.packing import write_samples
from wdstrain.decode.decoder import Transform
from wdstrain.decode.fields import Field
from wdstrain.decode.fields import array as array_field
from wdstrain.decode.fields import image as image_field
from wdstrain.decode.labels import field_of
from wdstrain.errors import UsageError
from wdstrain.loader.loader import Loader
from wdstrain.report.printing import counted
from wdstrain.report.terminal import reporting, table_text
from wdstrain.runtime.machine import cores
from wdstrain.runtime.options import takes
from wdstrain.shards.formats import is_image
from wdstrain.shards.index import Index
from wdstrain.shards.resolve import open_shards
from wdstrain.storage.remote import is_remote
from wdstrain.tuning.options import BenchOptions, LoaderChoices

_EXCERPT, _EXCERPT_BYTES = 256, 64 << 20  # samples, at least; bytes, at most
_RUNS = 4  # places of the set from which the samples of an excerpt are taken
_LIMITS = 0.8  # of the hand-off rate: a stage that is faster is limited by the hand-off
_BUSY = 1.25  # loader / slowest stage from which on the machine is said to have been busy
_WORTH = 1.1  # gain from which on a setting is recommended


class Trial(NamedTuple):
    """A setting that was run.

    setting: the changed option, as "name=value". rate: samples/s. baseline: samples/s of the
    settings in use, measured just before. gain: rate / baseline. advice: a flag of `wdstrain train`.
    """

    setting: str
    rate: float
    baseline: float
    gain: float
    advice: str


@dataclass(frozen=True, repr=False)
class Bench:
    """Rates of a loader and its stages, in samples/s.

    stages: by name. "storage": reading, nothing decoded. "decode" or "transform": all decoders
    together. "hand-off": batches from a local excerpt, nothing decoded.
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
        limit = self.stages[self.bottleneck]
        if self.achieved > _BUSY * limit:
            return (
                f"the loader gave {self.achieved:.0f} samples/s and its slowest stage alone "
                f"{limit:.0f}: the machine was busy meanwhile. Measure again, or longer (seconds)."
            )
        decoders = counted(self.decoders, "worker process" if self.num_workers else "thread")
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
        paying = [trial for trial in self.trials if trial.gain >= _WORTH]
        best = sorted(paying, key=lambda trial: trial.gain)[-1:]
        return [f"wdstrain train SHARDS --out RUN {trial.advice}" for trial in best]

    def rows(self) -> list[tuple[str, str]]:
        """Return (name, value) pairs for a table."""
        stages = {name: f"{rate:.0f} samples/s" for name, rate in self.stages.items()}
        cached = (
            ""
            if self.page_cache is None
            else f"; {self.page_cache:.0%} of the shards in the page cache"
        )
        stages["storage"] += f" ({self.stages['storage'] * self.mean_bytes / 1e6:.0f} MB/s{cached})"
        if len(stages) == 2:
            stages["decode"] = "nothing: the batches hold bytes"
        setting = f"num_workers={self.num_workers}, batch_size={self.batch_size}"
        tried = [f"{t.setting}: {t.rate:.0f} samples/s ({t.gain:.2f}x)" for t in self.trials]
        use = "\n".join(self.advice) or "the current settings"
        rows = {
            "samples": f"{self.samples}, {self.mean_bytes / 1e3:.1f} KB each, {self.bytes / 1e6:.1f} MB",
            **stages,
            "loader": f"{self.achieved:.0f} samples/s with {setting}",
            "first batch": f"after {self.first_batch:.2f} s",
            "bad samples": f"{self.bad} replaced; see wdstrain verify --decode" if self.bad else "",
            "tried": "\n".join(tried),
            "use": use if tried else "",
            "verdict": self.verdict,
        }
        return [(name, text) for name, text in rows.items() if text]

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON-able values."""
        trials = [trial._asdict() for trial in self.trials]
        return {**asdict(self), "trials": trials, "advice": self.advice, "verdict": self.verdict}

    def __repr__(self) -> str:
        return table_text(self.rows())


# --- measurements ---------------------------------------------------------------------------------


@takes(BenchOptions)
def bench(options: BenchOptions) -> Bench:
    """Return the rate of each stage of a loader and of the loader itself, and the bottleneck.

    Three or more measurements are made. Raises what `wt.Loader` raises, and UsageError for shards
    without samples.
    """
    index = open_shards(options.urls)
    if not len(index):
        raise UsageError("there are no samples in these shards.", "Check the address.")
    fields = options.fields
    if fields is None and options.transform is None and not options.as_bytes:
        fields = usual_fields(index, options.image_size, options.augment)
    chosen = {field.name: getattr(options, field.name) for field in fields_of(LoaderChoices)}
    loader = Loader(index, fields, options.transform, **chosen)  # checks options
    chosen |= {"where": None, "max_errors": 1.0}  # the samples of the loader's index meet `where`
    whole = _Subject(loader.index, fields, options.transform, chosen, options.seconds)
    index, decodes = whole.index, fields is not None or options.transform is not None
    powers = {2**power for power in range(cores().bit_length()) if 2**power <= cores()}
    others = {0, cores(), *powers} - {options.num_workers} if options.tune and decodes else ()
    page_cache, trials = _share_in_page_cache(index), list[Trial]()
    with tempfile.TemporaryDirectory() as folder, reporting(options.progress, True) as reporter:
        part = whole.on_excerpt(max(_EXCERPT, 4 * options.batch_size), f"{folder}/part.tar")
        decoding = {"decode" if options.transform is None else "transform": part} if decodes else {}
        stages = {"storage": whole.as_bytes(), **decoding, "hand-off": part.as_bytes()}
        todo, rates = 1 + len(stages) + len(others), dict[str, float]()
        for name, subject in stages.items():
            reporter.step("measuring", len(rates), todo, name, "")
            rates[name] = subject.run()["rate"]
        reporter.step("measuring", len(rates), todo, "the loader", "")
        achieved = whole.run()
        for done, count in enumerate(sorted(others), 1 + len(rates)):
            setting = f"num_workers={count}"
            reporter.step("measuring", done, todo, setting, "")
            with suppress(UsageError):  # fields or functions cannot be sent to processes
                # The load of a machine changes from minute to minute: both are measured together.
                baseline, rate = whole.run()["rate"], whole.run(num_workers=count)["rate"]
                gain, advice = rate / max(1e-9, baseline), f"--num-workers {count}"
                trials.append(Trial(setting, rate, baseline, gain, advice))
    slow = {name: rate for name, rate in rates.items() if rate < _LIMITS * rates["hand-off"]}
    return Bench(
        samples=len(index),
        bytes=sum(shard.bytes for shard in index.shards),
        mean_bytes=float(index.offsets.size.sum()) / len(index),
        batch_size=options.batch_size,
        num_workers=options.num_workers,
        decoders=int(achieved["decoders"]),
        cores=cores(),
        stages=rates,
        bottleneck=min(slow, key=lambda name: slow[name], default="hand-off"),
        achieved=achieved["rate"],
        first_batch=achieved["first_batch"],
        page_cache=page_cache,
        bad=achieved["bad"],
        trials=tuple(trials),
    )


def usual_fields(index: Index, size: int, augment: str) -> dict[str, Field] | None:
    """Return the fields that training would read: images or arrays, and the labels of the index.

    size: of images, in pixels. None if there are neither images nor arrays.
    """
    names = [name for name in index.fields if is_image(name)]
    plain = [name for name in names if "." not in name] or names
    labels = {label.field for label in index.labels}
    arrays = [n for n in index.fields if n.rpartition(".")[2] == "npy" and n not in labels]
    if not plain and not arrays:
        return None
    fields: dict[str, Field] = {name: array_field(name) for name in arrays}
    if plain:
        fields = {"image": image_field(";".join(plain), size=size, augment=augment)}
    values = [label for label in index.labels if label.has_column]  # neither masks nor boxes
    return fields | {f"label {label.name}": field_of(label) for label in values}


@dataclass(frozen=True)
class _Subject:
    """A loader that is measured. options: other arguments of it. seconds: of a measurement."""

    index: Index
    fields: Mapping[str, Field] | None
    transform: Transform | None
    options: Mapping[str, Any]
    seconds: float

    def run(self, **changes: Any) -> dict[str, Any]:
        """Return the report of the loader, its rate in samples/s and the seconds to its first batch.

        It runs for `seconds` after that. changes: other options.
        """
        begin = time.perf_counter()
        first, rows, batches = begin, 0, 0
        with Loader(
            self.index, self.fields, self.transform, **{**self.options, **changes}
        ) as loader:
            while batches < 2 or time.perf_counter() - first < self.seconds:
                for batch in loader:
                    now = time.perf_counter()
                    first = first if batches else now
                    rows += len(batch["__key__"]) if batches else 0
                    batches += 1
                    del batch
                    if now - first >= self.seconds and batches > 1:
                        break
            rate = rows / (time.perf_counter() - first)
            return {**loader.report(), "rate": rate, "first_batch": first - begin}

    def as_bytes(self) -> _Subject:
        """Return the same loader with batches of bytes."""
        options = {**self.options, "collate_fn": None}
        return replace(self, fields=None, transform=None, options=options)

    def on_excerpt(self, count: int, path: str) -> _Subject:
        """Return the loader over a new tar at `path` with samples from all over the set.

        It does not wait for storage: it has about `count` samples, at most about 64 MB.
        """
        index = self.index
        total = max(1, sum(shard.bytes for shard in index.shards))
        count = max(1, min(count, len(index), int(_EXCERPT_BYTES * len(index) / total)))
        starts = np.linspace(0, max(0, len(index) - count // _RUNS), _RUNS).astype(np.int64)
        ids = np.unique(np.add.outer(starts, np.arange(-(-count // _RUNS))).clip(0, len(index) - 1))
        # Samples of several shards may share a key, so the id becomes the key.
        samples = ((f"{number:012d}", list(f.items())) for number, f in index.read(ids))
        made = write_samples(path, "", samples)
        part = replace(made.with_columns(index.take(ids).columns), labels=index.labels)
        # A local file, which may be smaller than a global batch of all ranks.
        own = {"cache_dir": None, "cache_limit": None, "balance": None, "rank": 0, "world_size": 1}
        batch_size = min(self.options["batch_size"], len(part))
        return replace(self, index=part, options={**self.options, **own, "batch_size": batch_size})


def _share_in_page_cache(index: Index) -> float | None:
    """Return the share of the shards in the page cache, 0 to 1, sampled at 64 offsets.

    None for remote shards, and where the file system cannot report it.
    """
    hits, rows = 0, np.linspace(0, len(index) - 1, 64).astype(np.int64)
    for number, shard in zip(rows.tolist(), index.shard_of(rows).tolist(), strict=True):
        if is_remote(index.shards[shard].path):
            return None
        with open(index.shards[shard].path, "rb") as file:
            offset = int(index.offsets.start[number])
            try:
                hits += os.preadv(file.fileno(), [bytearray(1)], offset, os.RWF_NOWAIT)
            except BlockingIOError:  # not in the page cache
                continue
            except OSError:
                return None
    return hits / len(rows)
