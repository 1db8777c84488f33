"""Settings that `wt.bench(tune=True)` runs, each against the settings in use."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np

from wdstrain.conversion.images import Recipe
from wdstrain.conversion.options import Options
from wdstrain.decode.codecs import decode_image
from wdstrain.decode.fields import Image
from wdstrain.errors import SampleError
from wdstrain.runtime.machine import cores
from wdstrain.shards.index import Index
from wdstrain.storage.local import open_source
from wdstrain.storage.remote import is_remote
from wdstrain.tuning import stages
from wdstrain.tuning.result import Trial
from wdstrain.tuning.run import Setup

_LARGER = 1.25  # side of an image / side that is needed: below it, --resize is not tried
_MARGIN = 8 / 7  # packed side / side of a crop, as 256 for 224
_WIDER_BUFFER = 4  # factor by which the shuffle buffer is enlarged


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
    """Return the side to which images could be resized; None if that would make little difference."""
    images = [field for field in (setup.fields or {}).values() if isinstance(field, Image)]
    if len(images) != 1 or images[0].size is None:
        return None
    needed, sides = round(max(images[0].size) * _MARGIN), list[int]()
    with open_source(part.shards[0].path) as source:
        for number in range(min(32, len(part))):
            for name, offset, size in part.members(number):
                if name in images[0].names:
                    try:
                        sides.append(min(decode_image(source.read(offset, size)).shape[:2]))
                    except SampleError:
                        continue
    return needed if sides and float(np.median(sides)) >= needed * _LARGER else None
