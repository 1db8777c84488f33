"""Options of a loader, with every check that needs no shards."""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from wdstrain.decode.decoder import Collate, Transform
from wdstrain.decode.fields import fits_batch_memory
from wdstrain.errors import UsageError
from wdstrain.order.order import Tail
from wdstrain.runtime.launch import Launch
from wdstrain.runtime.options import integer, is_number, parse_size
from wdstrain.shards.options import CheckedOptions
from wdstrain.storage.cache import Cache

StartMethod = Literal["fork", "forkserver", "spawn"]
OnError = Literal["raise", "replace", "mark"]

# arguments that other loaders have, and the next step of somebody who is used to them
HABITS = {
    "dataset": "The first argument is urls.",
    "drop_last": 'Use tail="drop" or tail="keep".',
    "sampler": "Use where=, weights= or balance=; ranks are split by rank= and world_size=.",
    "batch_sampler": "Use batch_size=, and where=, weights= or balance= to choose samples.",
    "num_replicas": "Use world_size=.",
    "generator": "Use seed=.",
    "worker_init_fn": "Not needed: transform=function(sample, rng) gets a seeded generator.",
    "timeout": "Use patience=.",
    "prefetch_factor": "Not needed: batches are read ahead.",
    "persistent_workers": "Not needed: workers stay until the loader is closed.",
    "in_order": "Not needed: the order of batches is fixed.",
    "pin_memory": "Not needed: wt.to_device copies batches through pinned memory.",
    "pin_memory_device": "Not needed: wt.to_device copies batches through pinned memory.",
    "device": "Use wt.to_device(loader, device).",
}


@dataclass(frozen=True, kw_only=True)
class LoaderOptions(CheckedOptions):
    """Checked options of a `Loader`, which documents them and has the defaults.

    is_rank_given: rank and world size are arguments of the user, not those of the job.
    Raises UsageError for a value that no shards could make right.
    """

    fields: Mapping[str, Any] | None
    transform: Transform | None
    batch_size: int = field(metadata={"least": 1})
    num_workers: int = field(metadata={"least": 0})
    where: Any
    weights: Any
    balance: Any
    shuffle: bool
    shuffle_buffer: int | None = field(default=None, metadata={"least": None})
    seed: int
    tail: Tail
    lanes: int | None = field(default=None, metadata={"least": 1})
    rank: int
    world_size: int
    is_rank_given: bool
    on_error: OnError
    max_errors: float
    cache_dir: str | os.PathLike[str] | None
    cache_limit: int | None = field(default=None, metadata={"least": 1, "parse": parse_size})
    split: str | None
    multiprocessing_context: StartMethod | None
    patience: float
    collate_fn: Collate | None
    buckets: Any
    budget: float | None
    pixels: int | None = field(default=None, metadata={"least": 64})

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> LoaderOptions:
        """Return the options, with the rank of this process."""
        rank, world_size = rank_of(given["rank"], given["world_size"])
        ranks = {"rank": rank, "world_size": world_size, "is_rank_given": given["rank"] is not None}
        return cls(**{**given, **ranks})

    def __post_init__(self) -> None:
        for is_wrong, *texts in self._rules():
            if is_wrong:
                raise UsageError(*texts)
        super().__post_init__()
        for name, one in (self.fields or {}).items():
            _check_field(name, one)
        _check_buckets(self.buckets)
        open_cache(self.cache_dir, self.cache_limit)  # raises UsageError

    def _rules(self) -> list[tuple[Any, ...]]:
        """Return whether each rule is broken, and the problem and hint for that case."""
        return [
            (
                self.weights is not None and self.balance is not None,
                "weights and balance were both given.",
                "Give one of them.",
            ),
            (
                self.buckets is not None and (self.weights is not None or self.balance is not None),
                "buckets was given with weights or balance, whose epochs have other samples.",
                "Give one of them.",
            ),
            (
                self.buckets is not None and self.tail != "drop",
                "each bucket leaves out the samples that fill no batch.",
                "Use {tail}.",
                {"tail": "drop"},
            ),
            (
                self.budget is not None
                and not (isinstance(self.buckets, Mapping) and is_number(self.budget)),
                "{budget}: must be a number, for buckets that are ranges of a column.",
                "Give for example {buckets}.",
                {"budget": self.budget, "buckets": {"length": [64, 128]}},
            ),
            (
                self.pixels is not None and self.buckets != "aspect",
                "{pixels} is the largest area of images in batches of one shape.",
                "Give {buckets}.",
                {"pixels": self.pixels, "buckets": "aspect"},
            ),
            (
                isinstance(self.shuffle_buffer, int) and self.shuffle_buffer < 1,
                "{shuffle_buffer}: must be an integer >= 1.",
                "Use {shuffle} to read in file order.",
                {"shuffle_buffer": self.shuffle_buffer, "shuffle": False},
            ),
            (
                not (is_number(self.max_errors) and 0 <= self.max_errors <= 1),
                "{max_errors}: must be a share of the epoch from 0 to 1.",
                "",
                {"max_errors": self.max_errors},
            ),
            (
                self.on_error == "mark" and self.transform is not None,
                "on_error='mark' leaves rows empty, and a transform has no empty value.",
                "Use {on_error}.",
                {"on_error": "replace"},
            ),
            (
                self.fields is not None and self.transform is not None,
                "fields and transform were both given; each defines the examples.",
                "Give one of them.",
            ),
            (
                self.transform is not None and not callable(self.transform),
                f"transform={self.transform!r}: must be a function of a sample, or of "
                f"(sample, rng).",
            ),
            (
                self.collate_fn is not None and not callable(self.collate_fn),
                f"collate_fn={self.collate_fn!r}: must be a function of a list of examples.",
            ),
            (
                self.collate_fn is not None and self.transform is None,
                "collate_fn was given without transform, whose examples it collates.",
                "Give transform too.",
            ),
            (
                self.fields is not None and not isinstance(self.fields, Mapping),
                f"fields={self.fields!r}: must be a dict.",
                "Write for example fields={'image': wt.image(size=64)}.",
            ),
            (
                not (is_number(self.patience) and 0 <= self.patience <= threading.TIMEOUT_MAX),
                "{patience}: must be a number of seconds >= 0.",
                "0 turns the warnings off.",
                {"patience": self.patience},
            ),
            (
                self.cache_limit is not None and self.cache_dir is None,
                "{cache_limit} needs {cache_dir}.",
                "Give {cache_dir} too.",
                {"cache_limit": self.cache_limit, "cache_dir": ...},
            ),
        ]

    def check_rank(self) -> None:
        """Raise UsageError if torch.distributed has another rank for this process by now.

        Each rank would read samples of others. A rank that the user gave is not compared.
        """
        if self.is_rank_given or not group_size():
            return
        rank, world_size = rank_of(None, None)
        if (rank, world_size) != (self.rank, self.world_size):
            raise UsageError(
                f"this loader was made for rank {self.rank} of {self.world_size}, and the "
                f"process group says rank {rank} of {world_size}.",
                "Make the loader after the process group (init_process_group), or give it {rank} "
                "and {world_size}.",
                {"rank": ..., "world_size": ...},
            )


def _check_field(name: str, field: Any) -> None:
    is_complete = all(hasattr(field, part) for part in ("names", "example", "read"))
    if isinstance(field, type) or not is_complete:
        raise UsageError(
            f"fields[{name!r}]={field!r}: must be a field.",
            "Write for example wt.image('jpg', size=64).",
        )
    if field.example is not None and not fits_batch_memory(field.example):
        raise UsageError(
            f"field {name!r} has an example of {field.example.dtype!r}, a dtype that torch lacks.",
            "Use for example float32.",
        )


def _check_buckets(buckets: Any) -> None:
    """Raise UsageError unless buckets are None, a name, or {name: ascending numbers}."""
    if buckets is None or (isinstance(buckets, str) and buckets):
        return
    edges: Any = list(buckets.values()) if isinstance(buckets, Mapping) else []
    edges = edges[0] if len(edges) == 1 and isinstance(edges[0], (list, tuple, np.ndarray)) else ()
    if not len(edges) or not all(map(is_number, edges)) or any(np.diff(edges) <= 0):
        raise UsageError(
            "must be the name of a column, or a dict of one column with the largest value of each "
            "bucket, ascending.",
            "Write for example {'length': [64, 128, 256]}.",
            option="buckets",
            value=buckets,
        )


def takes_rng(transform: Transform) -> bool:
    """Return whether a transform has exactly two required parameters: (sample, rng)."""
    try:
        parameters = inspect.signature(transform).parameters.values()
    except (TypeError, ValueError):
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [p for p in parameters if p.kind in positional and p.default is p.empty]
    return len(required) == 2


def open_cache(
    cache_dir: str | os.PathLike[str] | None = None, cache_limit: int | None = None
) -> Cache | None:
    """Return the cache in a folder; None without a folder. Raises UsageError."""
    return None if cache_dir is None else Cache(os.fspath(cache_dir), cache_limit)


def rank_of(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return (rank, world_size).

    The first that says: the arguments, torch.distributed, the environment of torchrun or srun.
    Otherwise (0, 1). Raises UsageError.
    """
    if (rank is None) != (world_size is None):
        raise UsageError(
            "{rank}, {world_size}: give both or none.",
            options={"rank": rank, "world_size": world_size},
        )
    if rank is None or world_size is None:
        if group_size():
            rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        else:
            launch = Launch.of()
            rank, world_size = launch.rank, launch.size
    rank, world_size = integer("rank", rank), integer("world_size", world_size)
    if not 0 <= rank < world_size:
        raise UsageError(
            "must be >= 0 and below {world_size}.",
            "",
            {"world_size": world_size},
            option="rank",
            value=rank,
        )
    return rank, world_size


def group_size() -> int:
    """Return the number of processes of torch.distributed; 0 without a process group."""
    group = torch.distributed
    return group.get_world_size() if group.is_available() and group.is_initialized() else 0
