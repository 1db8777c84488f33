"""Rate of a loader that runs for a while, with the settings in use and with others."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from wdstrain.conversion.images import Recipe
from wdstrain.conversion.options import Options
from wdstrain.decode.codecs import decode_image
from wdstrain.decode.decoder import Transform
from wdstrain.decode.fields import Field, Image
from wdstrain.decode.worker_processes import check_picklable
from wdstrain.errors import SampleError, UsageError
from wdstrain.loader.loader import Loader
from wdstrain.loader.options import takes_rng
from wdstrain.runtime.machine import cores
from wdstrain.shards.index import Index
from wdstrain.storage.remote import is_remote
from wdstrain.tuning import stages
from wdstrain.tuning.result import Trial

_LARGER = 1.25  # side of an image / side that is needed: below it, --resize is not tried
_MARGIN = 8 / 7  # packed side / side of a crop, as 256 for 224
_WIDER_BUFFER = 4  # factor by which the shuffle buffer is enlarged


@dataclass(frozen=True)
class Rate:
    """Result of one run of a loader.

    rate: samples/s. first_batch: seconds until the first batch.
    decode: seconds of one decoder per sample, collation included. compute: processor seconds of
    them.
    runnable: seconds of them in which it computed or waited for a processor, but not for the GIL.
    report: of the last epoch.
    """

    rate: float
    first_batch: float
    decode: float
    compute: float
    runnable: float
    report: Mapping[str, Any]


@dataclass(frozen=True)
class Setup:
    """The loader that is measured."""

    fields: Mapping[str, Field] | None
    transform: Transform | None
    num_workers: int
    options: Mapping[str, Any]
    seconds: float

    @property
    def decodes(self) -> bool:
        """Whether samples are decoded at all. Without fields and transform they are bytes."""
        return self.fields is not None or self.transform is not None

    @property
    def fits_processes(self) -> bool:
        """Whether fields and functions can be sent to worker processes."""
        functions = {"transform": self.transform, "collate_fn": self.options.get("collate_fn")}
        try:
            check_picklable(self.fields, functions, self.options.get("multiprocessing_context"))
        except UsageError:
            return False
        return True

    def idle(self, index: Index) -> Setup:
        """Return the same loader with fields or a transform that decode nothing."""
        if self.transform is not None:
            rng = takes_rng(self.transform)
            idle = stages.IdleTransform.like(self.transform, index, takes_rng=rng)
            return replace(self, transform=idle)
        fields: dict[str, Field] = {
            name: stages.IdleField.like(field, index) for name, field in (self.fields or {}).items()
        }
        return replace(self, fields=fields if self.fields is not None else None)

    def run(self, index: Index, **changes: Any) -> Rate:
        """Run the loader for `seconds` after its first batch. changes: other Loader options."""
        options = {"num_workers": self.num_workers, **self.options, **changes}
        loader = Loader(index, self.fields, self.transform, **options)
        begin = time.perf_counter()
        first, rows, batches = begin, 0, 0
        decode, compute, queued, decoded, epochs = 0.0, 0.0, 0.0, 0, 0
        try:
            while not epochs or time.perf_counter() - first < self.seconds or batches < 2:
                for batch in loader:
                    now = time.perf_counter()
                    first = first if batches else now
                    rows += len(batch["__key__"]) if batches else 0
                    batches += 1
                    del batch
                    if now - first >= self.seconds and batches > 1:
                        break
                report = loader.report()
                if epochs == 1:  # the first epoch includes the start of libraries
                    decode, compute, queued, decoded = 0.0, 0.0, 0.0, 0
                decode += report["decode_seconds"] + report["collate_seconds"]
                compute += report["compute_seconds"]
                queued += report["queued_seconds"]
                decoded += report["samples"]
                epochs += 1
            spent = time.perf_counter() - first
            decoded = max(1, decoded)
            decode, compute, queued = (value / decoded for value in (decode, compute, queued))
            return Rate(rows / spent, first - begin, decode, compute, compute + queued, report)
        finally:
            loader.close()


# --- settings that tune=True tries ---------------------------------------------------------------


@dataclass(frozen=True)
class Subject:
    """The loader whose settings are varied.

    index: the whole set. part: an excerpt on this machine. setup, part_setup: the loader over each.
    folder: for files that a trial makes.
    """

    index: Index
    part: Index
    setup: Setup
    part_setup: Setup
    folder: str

    def run(self, name: str, value: int | str) -> Trial:
        """Run one of `settings(...)`, and the settings in use just before it.

        The load of a machine changes from minute to minute, so both are measured together.
        """
        setting = f"{name}={value}"
        if name != "resize":
            baseline = self.setup.run(self.index).rate
            if name == "cache_dir":  # the excerpt is local, as a full cache is
                rate = self.part_setup.run(self.part).rate
                return Trial(setting, rate, baseline, "--cache-dir DIR")
            rate = self.setup.run(self.index, **{name: value}).rate
            return Trial(setting, rate, baseline, f"--{name.replace('_', '-')} {value}")
        small = stages.excerpt(
            self.part,
            len(self.part),
            os.path.join(self.folder, "small.tar"),
            Recipe.of(Options(resize=int(value))).apply,
        )
        baseline = self.part_setup.run(self.part).rate
        rate = self.part_setup.run(small).rate
        return Trial(setting, rate, baseline, f"wdstrain convert tars SHARDS OUT --resize {value}")


def settings(
    index: Index, part: Index, setup: Setup, shuffle_buffer: int
) -> list[tuple[str, int | str]]:
    """Return the settings to try, as (name, value), without those in use."""
    chosen: list[tuple[str, int | str]] = []
    if setup.decodes and setup.fits_processes:
        powers = [2**power for power in range(cores().bit_length()) if 2**power <= cores()]
        for count in sorted({0, cores(), *powers} - {setup.num_workers}):
            chosen.append(("num_workers", count))
    if setup.options.get("shuffle", True) and shuffle_buffer < len(index):
        chosen.append(("shuffle_buffer", min(_WIDER_BUFFER * shuffle_buffer, len(index))))
    remote = any(is_remote(shard.path) for shard in index.shards)
    if remote and setup.options.get("cache_dir") is None:
        chosen.append(("cache_dir", "DIR (full)"))
    if (side := _smaller_side(part, setup)) is not None:
        chosen.append(("resize", side))
    return chosen


def _smaller_side(part: Index, setup: Setup) -> int | None:
    """Return the side to which images could be resized; None if that would change little."""
    images = [field for field in (setup.fields or {}).values() if isinstance(field, Image)]
    if len(images) != 1 or images[0].size is None:
        return None
    needed, sides = round(max(images[0].size) * _MARGIN), list[int]()
    for _, fields in part.read(range(min(32, len(part))), images[0].names):
        for data in fields.values():
            with suppress(SampleError):
                sides.append(min(decode_image(data).shape[:2]))
    return needed if sides and float(np.median(sides)) >= needed * _LARGER else None
