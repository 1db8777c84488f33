"""Options of conversions. Each is declared once, and is a keyword argument and a flag.

These are the options of packing, which all conversions have. `source_options` adds those of each
kind of source.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from wdstrain.errors import UsageError
from wdstrain.runtime.machine import cores
from wdstrain.runtime.options import integer, option, parse_pair, parse_size
from wdstrain.shards.options import CheckedOptions

Path = str | os.PathLike[str]
OnError = Literal["raise", "skip"]
Check = Literal["magic", "decode"]
Engine = Literal["local", "ray"]

_SPLIT = re.compile(r"\w[\w-]*")
_PROCESS_BYTES = 16_000_000  # starting a process takes as long as packing about this much
_EXCLUSIVE = (
    ("append", "overwrite"),
    ("resume", "overwrite"),
    ("num_shards", "max_shard_samples"),
    ("classes", "like"),
    ("keep", "drop"),
)
# the bytes of a set depend on these
_SAVED = (
    *("seed", "shuffle", "split", "stratify", "resize", "quality", "check", "limit"),
    *("max_shard_samples", "max_shard_size", "num_shards", "on_error"),
)


def parse_shares(text: str) -> dict[str, float]:
    """Return the share of each split of a text such as train=0.9,val=0.1."""
    pairs = list(map(parse_pair, text.split(",")))
    shares = {name: float(share) for name, share in pairs}
    if len(shares) < len(pairs):
        raise ValueError("a split is named twice; write for example train=0.9,val=0.1")
    return shares


@dataclass(frozen=True, kw_only=True)
class Options(CheckedOptions):
    """Options of packing, which all conversions have."""

    max_shard_size: int | str = option(
        "256MB",
        "largest size of a shard, in bytes or such as 256MB; a larger sample gets a shard of its "
        "own",
        metavar="SIZE",
        parse=parse_size,
    )
    max_shard_samples: int | None = option(
        None, "most samples in a shard (default: as many as fit)", metavar="N", least=1
    )
    seed: int = option(0, "seed of the shuffle and the split", metavar="N", least=None)
    shuffle: bool = option(
        True,
        "order samples by a seeded hash of their keys; False keeps the order of the source",
        no_help="keep the order of the source",
    )
    split: Mapping[str, float] | None = option(
        None,
        "share of the samples in each split, such as train=0.9,val=0.1, drawn by a hash of the key",
        metavar="NAME=SHARE,...",
        parse=parse_shares,
    )
    stratify: str | None = option(
        None,
        "label of classes; make the shares of the split exact within each class",
        metavar="COL",
    )
    resize: int | None = option(
        None, "downscale images so that the shorter side is at most N pixels", metavar="N", least=1
    )
    quality: int | None = option(
        None,
        "JPEG quality of re-encoded images, 1 to 100 (default: 90); without resizing, re-encodes "
        "every image",
        metavar="N",
        least=1,
    )
    check: Check = option(
        "magic", "check of each image: magic looks at the first bytes, decode decodes it"
    )
    on_error: OnError = option(
        "raise", "end at the first bad sample, or skip bad samples and list them in skipped.jsonl"
    )
    num_workers: int | None = option(
        None,
        "worker processes; the output does not depend on it (default: one per core, fewer for "
        "little data)",
        metavar="N",
        least=1,
    )
    memory: int | str = option(
        "1GB", "memory for ordering samples, over all processes", metavar="SIZE", parse=parse_size
    )
    engine: Engine = option(
        "local", "processes of this machine, or of a Ray cluster with a shared file system"
    )
    limit: int | None = option(
        None, "pack at most N samples, the first of a stream", metavar="N", least=1
    )
    num_shards: int | None = option(
        None,
        "shards to make in all, of about equal size (default: as many as the largest size gives)",
        metavar="N",
        least=1,
    )
    append: bool = option(False, "add the samples as new shards to the set in the output folder")
    dry_run: bool = option(
        False, "report the splits and shards that would be made, without writing them"
    )
    resume: bool = option(False, "continue an interrupted conversion")
    overwrite: bool = option(False, "replace the shards in the output folder")
    progress: Callable[[Any], None] | None = option(
        None, "function that is called with the Step that a conversion has reached", flag=None
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("max_shard_size", 1), ("memory", 16_000_000)):
            value = getattr(self, name)
            try:
                size = parse_size(value) if isinstance(value, str) else integer(name, value, least)
            except ValueError as error:
                raise UsageError(f"{error}.", option=name, value=value) from None
            object.__setattr__(self, name, integer(name, size, least))
        if self.quality is not None and self.quality > 100:
            raise UsageError("must be <= 100.", option="quality", value=self.quality)
        shares = (self.split or {"train": 1.0}).values()
        if min(shares) <= 0 or not math.isclose(sum(shares), 1.0, rel_tol=1e-5):
            raise UsageError(
                "shares must be above 0 and add up to 1, such as 0.9 and 0.1.",
                option="split",
                value=dict(self.split or {}),
            )
        check_splits(self.split or ())
        if self.stratify and not self.split:
            raise UsageError(
                "{stratify} needs a split.",
                "Add {split}.",
                {"stratify": self.stratify, "split": {"train": 0.9, "val": 0.1}},
            )
        for one, other in _EXCLUSIVE:
            values = getattr(self, one, None), getattr(self, other, None)
            if all(values):
                raise UsageError(
                    f"{{{one}}} and {{{other}}} exclude each other.",
                    "Give only one.",
                    {one: values[0], other: values[1]},
                )

    @property
    def pixel_quality(self) -> int:
        """JPEG quality of stored pixels: 100 if they are encoded again later."""
        return 95 if self.quality is None and self.resize is None else 100

    def saved(self) -> dict[str, Any]:
        """Return the options that the bytes of a set depend on, as its index keeps them."""
        return {name: getattr(self, name) for name in _SAVED}

    def processes(self, size: int) -> int:
        """Return the number of worker processes for so many bytes of samples."""
        return self.num_workers or min(cores(), 1 + size // _PROCESS_BYTES)


def check_splits(names: Iterable[str]) -> None:
    """Raise UsageError for names of splits that cannot begin the name of a shard."""
    for name in names:
        if not isinstance(name, str) or not _SPLIT.fullmatch(name):
            raise UsageError(
                f"{name!r} cannot be the name of a split, which begins a file's name.",
                "Use letters, digits, _ and -.",
            )
