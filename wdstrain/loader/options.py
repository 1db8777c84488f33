"""Options of a loader, with every check that needs no shards."""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from wdstrain.decode.fields import Field, fits_batch_memory
from wdstrain.decode.pickling import check_picklable
from wdstrain.decode.task import Collate, Transform
from wdstrain.errors import UsageError
from wdstrain.order.order import Tail
from wdstrain.order.plan import integer, is_number
from wdstrain.runtime.launch import Launch
from wdstrain.runtime.options import parse_size
from wdstrain.storage.shard_cache import Cache

StartMethod = Literal["fork", "forkserver", "spawn"]
OnError = Literal["raise", "replace", "mark"]

_CHOICES: dict[str, tuple[Any, ...]] = {
    "tail": get_args(Tail),
    "on_error": get_args(OnError),
    "multiprocessing_context": (None, *get_args(StartMethod)),
}

# arguments that other loaders have, and the next step of somebody who is used to them
HABITS = {
    "dataset": "The first argument is urls.",
    "split": "Name the shards of the split, such as shards/train-*.tar.",
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


@dataclass(kw_only=True)
class LoaderOptions:
    """Checked options of a `Loader`, which documents them. `rank` and `world_size` are resolved.

    Integers of NumPy become integers of Python. Raises UsageError for a value that no shards could
    make right.
    """

    fields: Mapping[str, Field] | None = None
    transform: Transform | None = None
    batch_size: int = 64
    num_workers: int = 0
    where: str | None = None
    weights: Any = None
    balance: str | None = None
    shuffle: bool = True
    shuffle_buffer: int | None = None
    seed: int = 0
    tail: Tail = "drop"
    lanes: int | None = None
    rank: int | None = None
    world_size: int | None = None
    on_error: OnError = "raise"
    max_errors: float = 0.01
    cache_dir: str | os.PathLike[str] | None = None
    cache_limit: int | str | None = None
    multiprocessing_context: StartMethod | None = None
    patience: float = 60.0
    collate_fn: Collate | None = None

    def __post_init__(self) -> None:
        self.batch_size = integer("batch_size", self.batch_size, 1)
        self.num_workers = integer("num_workers", self.num_workers, 0)
        self.seed = integer("seed", self.seed)
        if self.lanes is not None:
            self.lanes = integer("lanes", self.lanes, 1)
        if self.shuffle_buffer is not None:
            self.shuffle_buffer = _shuffle_buffer(self.shuffle_buffer)
        if self.weights is not None and self.balance is not None:
            raise UsageError("weights and balance were both given. Give one of them.")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                names = ", ".join(filter(None, choices))
                raise UsageError(f"{name}={getattr(self, name)!r}: must be one of {names}.")
        self._check_errors()
        self._check_examples()
        if not is_number(self.patience) or not 0 <= self.patience <= threading.TIMEOUT_MAX:
            raise UsageError(
                f"patience={self.patience!r}: must be a number of seconds >= 0. 0 turns the "
                f"warnings off."
            )
        if self.num_workers:
            functions = {"transform": self.transform, "collate_fn": self.collate_fn}
            check_picklable(self.fields, functions, self.multiprocessing_context)
        self.cache = open_cache(self.cache_dir, self.cache_limit)
        self.ranks = rank_of(self.rank, self.world_size)
        self.rank, self.world_size = self.ranks

    def _check_errors(self) -> None:
        if not is_number(self.max_errors) or not 0 <= self.max_errors <= 1:
            raise UsageError(
                f"max_errors={self.max_errors!r}: must be a share of the epoch from 0 to 1."
            )
        if self.on_error == "mark" and self.transform is not None:
            raise UsageError(
                'on_error="mark" leaves rows empty, and a transform has no empty value. '
                'Use on_error="replace".'
            )

    def _check_examples(self) -> None:
        """Check the options that say what an example is."""
        if self.fields is not None and self.transform is not None:
            raise UsageError(
                "fields and transform were both given; each defines the examples. Give one of them."
            )
        if self.transform is not None and not callable(self.transform):
            raise UsageError(
                f"transform={self.transform!r}: must be a function of a sample, or of (sample, rng)."
            )
        if self.collate_fn is not None and not callable(self.collate_fn):
            raise UsageError(
                f"collate_fn={self.collate_fn!r}: must be a function of a list of examples."
            )
        if self.collate_fn is not None and self.transform is None:
            raise UsageError(
                "collate_fn was given without transform, whose examples it collates. "
                "Give transform too."
            )
        if self.fields is not None and not isinstance(self.fields, Mapping):
            raise UsageError(
                f"fields={self.fields!r}: must be a dict. Write for example "
                f"fields={{'image': wt.image(size=64)}}."
            )
        for name, field in (self.fields or {}).items():
            _check_field(name, field)

    @property
    def takes_rng(self) -> bool:
        """Whether the transform is called with (sample, rng)."""
        return self.transform is not None and takes_rng(self.transform)


def _shuffle_buffer(value: int) -> int:
    try:
        return integer("shuffle_buffer", value, 1)
    except UsageError as error:
        raise UsageError(f"{error} Use shuffle=False to read in file order.") from None


def _check_field(name: str, field: Any) -> None:
    is_complete = all(hasattr(field, part) for part in ("names", "example", "read"))
    if isinstance(field, type) or not is_complete:
        raise UsageError(
            f"fields[{name!r}]={field!r}: must be a field. Write for example "
            f"wt.image('jpg', size=64)."
        )
    if field.example is not None and not fits_batch_memory(field.example):
        raise UsageError(
            f"field {name!r} has an example of {field.example.dtype!r}, a dtype that torch lacks. "
            f"Use for example float32."
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
    cache_dir: str | os.PathLike[str] | None = None, cache_limit: int | str | None = None
) -> Cache | None:
    """Return the cache in a folder; None without a folder. Raises UsageError."""
    if cache_dir is None:
        if cache_limit is not None:
            raise UsageError(f"cache_limit={cache_limit!r} needs cache_dir. Give cache_dir too.")
        return None
    try:
        limit = parse_size(cache_limit) if isinstance(cache_limit, str) else cache_limit
    except ValueError as error:
        raise UsageError(f"cache_limit: {error}.") from None
    return Cache(os.fspath(cache_dir), None if limit is None else integer("cache_limit", limit, 1))


def rank_of(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return (rank, world_size).

    The first that says: the arguments, torch.distributed, the environment of torchrun or srun.
    Otherwise (0, 1). Raises UsageError.
    """
    if (rank is None) != (world_size is None):
        raise UsageError(f"rank={rank}, world_size={world_size}: give both or none.")
    if rank is None or world_size is None:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        else:
            launch = Launch.of()
            rank, world_size = launch.rank, launch.size
    rank, world_size = integer("rank", rank), integer("world_size", world_size)
    if not 0 <= rank < world_size:
        raise UsageError(f"rank={rank}: must be >= 0 and below world_size={world_size}.")
    return rank, world_size
