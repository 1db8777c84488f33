"""Options of `info`, `peek`, `verify`, `repair` and `plan_epoch`.

Each is declared once, and is a keyword argument of the function and a flag of the verb.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Literal

from wdstrain.errors import UsageError
from wdstrain.runtime.options import REQUIRED, as_list, is_number, option, parse_list
from wdstrain.shards.options import CheckedOptions, shard_urls, where_option

if TYPE_CHECKING:
    from wdstrain.report.terminal import Reporter
    from wdstrain.shards.index import Index
    from wdstrain.storage.addresses import Urls

Order = Literal["first", "random", "classes"]

MAX_SHOWN = 1000  # samples of one call of `peek`
_PROGRESS = (
    "object with step(title, done, total, text, unit) and line(text) that shows progress, in "
    "megabytes (default: in the terminal or notebook; False: none)"
)


@dataclass(frozen=True)
class InfoOptions(CheckedOptions):
    """Options of `wt.info`."""

    urls: Urls | Index = shard_urls()
    _: KW_ONLY
    where: str | None = where_option("count samples")
    exact: bool = option(
        False,
        "read all labels that have no column in the index; without it, at most 2000 are read and "
        "counted",
    )


@dataclass(frozen=True)
class PeekOptions(CheckedOptions):
    """Options of `wt.peek`."""

    source: Urls | Index = shard_urls(python="shards by any address, or an Index")
    n: int = option(
        5,
        "number of samples; with --class, of each class (default: 24)",
        python="number of samples; with classes, of each class (default: 5)",
        metavar="N",
        flag="-n --limit",
        least=1,
    )
    _: KW_ONLY
    where: str | None = where_option("show samples")
    order: Order = option(
        "first",
        'which samples: "first", "random", or "classes", that is equally many of each class',
        switches={
            "first": "show the first samples (default)",
            "random": "show random samples, chosen by --seed",
            "classes": "show equally many samples of each class",
        },
    )
    classes: Sequence[str] = option(
        (),
        "show samples of these classes",
        metavar="NAME[,NAME...]",
        flag="--class",
        parse=parse_list,
        several=True,
    )
    label: str | None = option(
        None,
        "label to show, and whose classes are chosen (default: all labels, and the only one with "
        "classes)",
        metavar="NAME",
    )
    seed: int = option(0, "seed of random choices", metavar="N", least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(
            self, "classes", tuple(dict.fromkeys(map(str, as_list(self.classes or ()))))
        )
        if self.n * max(1, len(self.classes)) > MAX_SHOWN:
            raise UsageError(f"must be 1 to {MAX_SHOWN} samples in all.", option="n", value=self.n)


@dataclass(frozen=True)
class VerifyOptions(CheckedOptions):
    """Options of `wt.verify`."""

    urls: Urls = shard_urls()
    _: KW_ONLY
    decode: bool = option(
        False, "also decode every image, and parse every label, json, npy and txt"
    )
    need: Sequence[str] = option(
        (),
        "report samples that lack a field of this list; 'jpg;png,cls' stands for jpg or png, and "
        "cls",
        metavar="F[;F],...",
        parse=parse_list,
    )
    where: str | None = where_option("read only shards with samples")
    group_by: str | None = option(
        None,
        "report samples with equal COL in different splits (default: the column by which the "
        "conversion grouped them)",
        metavar="COL",
    )
    num_workers: int | None = option(None, "threads (default: one per core)", metavar="N", least=1)
    progress: Reporter | bool | None = option(None, _PROGRESS, flag=None)


@dataclass(frozen=True)
class RepairOptions(CheckedOptions):
    """Options of `wt.repair`."""

    urls: Urls = shard_urls()
    out: str | os.PathLike[str] = option(
        REQUIRED,
        "folder for the repaired shards; not the folder of the damaged shards",
        metavar="DIR",
        flag="-o --out",
    )
    _: KW_ONLY
    overwrite: bool = option(False, "replace the shards in the output folder")
    progress: Reporter | bool | None = option(None, _PROGRESS, flag=None)


def _prices(text: str) -> list[float]:
    return [float(word) for word in parse_list(text)]


def _buckets(text: str) -> str | dict[str, list[float]]:
    """Return the column of --buckets COLUMN, or its ranges in COLUMN:64,128,256."""
    column, colon, edges = text.rpartition(":")
    return {column: list(map(float, edges.split(",")))} if colon else text


@dataclass(frozen=True)
class PlanOptions(CheckedOptions):
    """Options of `wt.plan_epoch`, with the meaning they have for a `Loader`."""

    urls: Urls | Index = shard_urls()
    _: KW_ONLY
    where: str | None = where_option("plan an epoch of the samples")
    batch_size: int = option(64, "samples per batch on each rank", metavar="N", least=1)
    world_size: int = option(
        1, "number of ranks, that is of training processes", metavar="N", least=1
    )
    lanes: int | None = option(
        None,
        "places of the set that are read at the same time (default: one per rank)",
        metavar="N",
        least=1,
    )
    shuffle_buffer: int | None = option(
        None,
        "shuffle buffer of each lane, in samples (default: as many as 256 MB hold)",
        metavar="N",
        least=1,
    )
    shuffle: bool = option(True, "shuffle the samples; without it, they are read in file order")
    seed: int = option(0, "seed of the order", metavar="N")
    epoch: int = option(0, "number of the epoch, from 0 on", metavar="N", least=0)
    tail: Literal["drop", "pad", "keep"] = option(
        "drop",
        "samples that fill no step on every rank: left out (drop), filled up with repeated samples "
        "(pad), or a short last batch (keep)",
    )
    buckets: str | Mapping[str, Sequence[float]] | None = option(
        None,
        "column whose values share a batch; with numbers, its values up to each of them",
        metavar="COL[:N,N...]",
        parse=_buckets,
    )
    budget: float | None = option(
        None, "with ranges of a column: most of it in a batch, such as tokens", metavar="N"
    )
    pixels: int | None = option(
        None,
        "with the buckets of aspect: largest area of the shape of a batch",
        metavar="N",
        least=64,
    )
    rate: float = option(
        1000.0, "samples per second of each rank, for the hours of the epoch", metavar="N"
    )
    price: Sequence[float] | None = option(
        None,
        "price of a GB that is read, and of 1000 requests, for the cost of the epoch",
        metavar="GB,REQUESTS",
        parse=_prices,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (is_number(self.rate) and self.rate > 0):
            raise UsageError("must be > 0.", option="rate", value=self.rate)
        if self.price is not None and len(self.price) != 2:
            raise UsageError(
                "must be two numbers, such as 0.09,0.0004.", option="price", value=self.price
            )
