"""With webdataset, both ways: our reading under its stages, its samples through our fields.

    pipeline = wds.DataPipeline(wt.stream("shards/train-*.tar"), wds.map(my_function), wds.batched(32))
    pipeline = wds.DataPipeline(wds.SimpleShardList(urls), wds.tarfile_to_samples(), wds.map(wt.to_example(fields)))

A stream has the order, the forward reading and the checks of a loader. What it gives up: it knows nothing of batches, so
ranks differ by a sample or so where the samples do not divide, and each worker process of a torch DataLoader above it
reads a share of its own, so the order depends on their number. Use `wt.Loader` where that matters.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from wdstrain.augment import DRAWS
from wdstrain.bits import key, uniform
from wdstrain.errors import SampleError
from wdstrain.fields import Field, with_classes
from wdstrain.indexing import Index
from wdstrain.loader import Loader, open_shards, rank_of
from wdstrain.memory import Memory
from wdstrain.storage import Urls

_BATCH = 64  # samples taken from the pipeline at a time
_WORKERS = 4096  # most worker processes whose epochs are counted


class Stream(IterableDataset[dict[str, Any]]):
    """Samples as webdataset has them: {"__key__", "__url__", "__epoch__", field: bytes}; every `for` is the next epoch.

    Every sample comes once per epoch over all ranks and worker processes. The epochs of worker processes are counted in
    shared memory, so they go on also where the workers are started anew for each epoch.
    """

    def __init__(self, index: Index, **options: Any) -> None:
        """options: of a `Loader`."""
        self._index, self._options = index, options
        self._ranks = rank_of(None, None)
        self._epochs = Memory(8 * _WORKERS)
        self._loader: Loader | None = None

    def set_epoch(self, number: int) -> None:
        """The next `for` is this epoch, in every worker process."""
        np.frombuffer(self._epochs.view, np.int64)[:] = number

    def __iter__(self) -> Iterator[dict[str, Any]]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        counted = np.frombuffer(self._epochs.view, np.int64)
        epoch, counted[worker] = int(counted[worker]), counted[worker] + 1
        if self._loader is None:
            rank, world_size = self._ranks[0] * workers + worker, self._ranks[1] * workers
            self._loader = Loader(self._index, batch_size=_BATCH, tail="pad", rank=rank, world_size=world_size, **self._options)
        return self._samples(self._loader, epoch)

    def _samples(self, loader: Loader, epoch: int) -> Iterator[dict[str, Any]]:
        plan = loader.plan(epoch)
        (lane,) = plan.lanes_of(loader.rank)
        for step, batch in enumerate(loader.epoch(epoch)):
            ids = plan.ids(lane, plan.order(lane, *plan.span(lane, step)))
            shards = self._index.shard_of(ids)
            for row in np.flatnonzero(batch["__valid__"].numpy()).tolist():
                url = self._index.shards[int(shards[row])].shown
                sample = {"__key__": batch["__key__"][row], "__url__": url, "__epoch__": epoch}
                yield sample | {name: batch[name][row] for name in self._index.fields if batch[name][row] is not None}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_loader": None}  # threads and open files stay here


def stream(
    urls: Urls,
    *,
    shuffle: bool = True,
    shuffle_buffer: int | None = None,
    seed: int = 0,
    cache_dir: str | os.PathLike[str] | None = None,
    cache_limit: int | str | None = None,
) -> Stream:
    """Samples of shards as an iterable stage for `wds.DataPipeline`, or for torch's DataLoader; words as in `Loader`."""
    return Stream(
        open_shards(urls),
        shuffle=shuffle,
        shuffle_buffer=shuffle_buffer,
        seed=seed,
        cache_dir=cache_dir,
        cache_limit=cache_limit,
    )


class ToExample:
    """Applies fields to one sample of bytes; see `to_example`."""

    def __init__(self, fields: Mapping[str, Field], seed: int) -> None:
        self._fields, self._seed = {name: with_classes(field, ()) for name, field in fields.items()}, seed

    def __call__(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        if "__epoch__" in sample:
            number = np.array([key(sample["__key__"])], np.uint64)
            draws = uniform(number, DRAWS, "decode", self._seed, sample["__epoch__"])[0]
        else:  # nobody says which epoch it is; the worker's own generator moves on
            draws = np.random.random(DRAWS)
        example: dict[str, Any] = {"__key__": sample["__key__"]}
        for name, field in self._fields.items():
            found = next((one for one in field.names if one in sample), None)
            if found is None:
                has = ", ".join(one for one in sample if not one.startswith("__"))
                raise SampleError(f"'{sample['__key__']}' has none of {', '.join(field.names)} (but {has}).")
            out = np.empty(field.example.shape, field.example.dtype) if field.example is not None else None
            try:
                value = field.read(found, memoryview(sample[found]), out, draws)
            except Exception as error:
                where = f"{sample.get('__url__', 'a shard')}: '{sample['__key__']}', field '{found}'"
                raise SampleError(f"{where}: {error}.") from error
            planes = field.example is not None and field.example.channels_last
            example[name] = value if out is None else np.moveaxis(out, -1, 0) if planes else out
        return example


def to_example(fields: Mapping[str, Field], *, seed: int = 0) -> ToExample:
    """A function from a sample of bytes, as webdataset has them, to an example: numpy arrays and values by field name.

    Random augmentation depends on seed, epoch and key for samples of `wt.stream`, which say their epoch; for others on
    numpy's global generator. Raises SampleError naming shard, key and field.
    """
    return ToExample(fields, seed)
