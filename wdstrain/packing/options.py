"""How a conversion packs: what people set with flags and keyword arguments."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypedDict, get_args

import numpy as np

from wdstrain.errors import UsageError
from wdstrain.order.plan import integer

OnBad = Literal["raise", "quarantine"]
Check = Literal["magic", "decode"]
Engine = Literal["local", "ray"]

_SPLIT = re.compile(r"\w[\w-]*")


@dataclass(frozen=True, kw_only=True)
class Options:
    """
    shard_samples, shard_bytes  most of a shard; a single sample that is larger has a shard to itself
    seed, shuffle               of the order, a seeded hash of each key; False keeps the source's order
    split                       share of the samples by split name, by a seeded hash of each key, or of its group
    stratify                    shares are exact within each class instead
    jobs                        processes; the bytes are the same for any number
    memory                      bytes that samples take while they are put in order, over all jobs
    resize, quality             pictures with a shorter side above `resize` are made that small; JPEG quality of what is
                                encoded anew (90); `quality` alone encodes every picture
    check                       "magic": a picture begins as one; "decode": it can be decoded
    on_bad                      "raise" at the first bad sample, or "quarantine": pack the others and list it in bad.jsonl
    resume, overwrite           go on with a conversion that was broken off; replace the shards in the folder
    limit                       pack so many samples only
    engine                      "local" processes, or a "ray" cluster with a file system that all nodes see
    """

    shard_samples: int | None = None
    shard_bytes: int = 256_000_000
    seed: int = 0
    shuffle: bool = True
    split: dict[str, float] | None = None
    stratify: bool = False
    jobs: int = 1
    memory: int = 1_000_000_000
    resize: int | None = None
    quality: int | None = None
    check: Check = "magic"
    on_bad: OnBad = "raise"
    resume: bool = False
    overwrite: bool = False
    limit: int | None = None
    engine: Engine = "local"

    def __post_init__(self) -> None:
        for name in (
            "shard_samples",
            "shard_bytes",
            "jobs",
            "limit",
            "resize",
            "quality",
            "memory",
            "seed",
        ):
            value = getattr(self, name)
            if value is None and name in ("shard_samples", "limit", "resize", "quality"):
                continue
            object.__setattr__(
                self, name, value := integer(name, value)
            )  # the index keeps them as JSON
            if value < 1 and name != "seed":
                raise UsageError(f"{name}={value} is below 1.")
        if self.quality is not None and self.quality > 100:
            raise UsageError(f"quality={self.quality} is above 100, the best that JPEG knows.")
        if self.memory < 16_000_000:
            raise UsageError(
                f"memory={self.memory} bytes are too few to put samples in order. Give 16MB or more."
            )
        for name, kinds in (("check", Check), ("on_bad", OnBad), ("engine", Engine)):
            if getattr(self, name) not in get_args(kinds):
                raise UsageError(
                    f"{name}={getattr(self, name)!r} is not one of {', '.join(get_args(kinds))}."
                )
        shares = (self.split or {"train": 1.0}).values()
        if min(shares) <= 0 or not np.isclose(sum(shares), 1.0):
            raise UsageError(
                f"split={self.split}: shares are above 0 and add up to 1. Write for example train=0.9,val=0.1"
            )
        check_splits(self.split or ())
        if self.stratify and not self.split:
            raise UsageError(
                "stratify says how a split is drawn, and none is asked for. Add --split train=0.9,val=0.1"
            )
        if self.resume and self.overwrite:
            raise UsageError(
                "resume goes on with what is there, overwrite replaces it. Choose one."
            )


def check_splits(names: Iterable[str]) -> None:
    """Raise UsageError for names of splits that are no beginning of a shard's name, NAME-000000.tar."""
    for name in names:
        if not isinstance(name, str) or not _SPLIT.fullmatch(name):
            raise UsageError(
                f"{name!r} cannot be the name of a split, which begins a file's name. Use letters, digits, _ and -."
            )


class Packing(TypedDict, total=False):
    """The same, as keyword arguments of the functions people call."""

    shard_samples: int | None
    shard_bytes: int
    seed: int
    shuffle: bool
    split: dict[str, float] | None
    stratify: bool
    jobs: int
    memory: int
    resize: int | None
    quality: int | None
    check: Check
    on_bad: OnBad
    resume: bool
    overwrite: bool
    limit: int | None
    engine: Engine
