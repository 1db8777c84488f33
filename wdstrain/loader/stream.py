"""Samples of bytes from the loader, as a stage for webdataset's pipelines.

    pipeline = wds.DataPipeline(wt.stream("shards/train-*.tar"), wds.map(my_function), wds.batched(32))

A stream has the order, the forward reading and the checks of a loader. It does not know batches, so
ranks differ by a sample or so where the samples do not divide. Each worker process of a torch
DataLoader above it reads its own share, so the order depends on their number. Use `wt.Loader` where
that matters.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import IterableDataset

from wdstrain.decode.label_fields import differing_labels
from wdstrain.errors import SampleError, WdstrainError
from wdstrain.loader.epoch import EpochBatches
from wdstrain.loader.loader import Loader
from wdstrain.loader.options import rank_of
from wdstrain.loader.planning import open_shards
from wdstrain.loader.shared_epochs import SharedEpochs, worker_share
from wdstrain.order.plan import integer
from wdstrain.runtime.cached import cached_property
from wdstrain.shards.index import Index
from wdstrain.storage.addresses import Urls

_BATCH = 64  # samples taken from the pipeline at a time
_NO_FIELDS = ("__key__", "__valid__")  # entries of a batch that are no fields of samples

# error, number of samples that it costs -> whether to go on
OnError = Callable[[Exception, int], bool]


class PlannedSamples(IterableDataset[dict[str, Any]]):
    """Samples of an index in the order of a loader; every `for` is the next epoch.

    Every sample comes once per epoch over all ranks and worker processes, whatever their number was
    before. All processes count epochs together, in shared memory: a `for` in this process, or one
    pass of a DataLoader over all of its worker processes. Subclasses make a sample of a row.
    """

    def __init__(
        self,
        index: Index,
        *,
        ranks: tuple[int, int] | None = None,
        by_worker: bool = True,
        **options: Any,
    ) -> None:
        """ranks: (rank, world size); default: as `Loader`. by_worker: split also over the worker
        processes of a DataLoader. options: of a `Loader`."""
        self._index, self._options, self._by_worker = index, options, by_worker
        self._ranks = rank_of(None, None) if ranks is None else ranks
        self._epochs = SharedEpochs()
        self._process: int | None = None  # owner of the loaders; a forked child makes its own
        self._idle: list[Loader] = []  # loaders that no pass uses

    def set_epoch(self, number: int) -> None:
        """The next `for` is this epoch, in every worker process."""
        self._epochs.set(integer("epoch", number, 0))

    def close(self) -> None:
        """End the threads of passes that are over. The stream can be used again."""
        if self._process == os.getpid():
            for loader in self._idle:
                loader.close()
            self._idle = []

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self._pass(self._epochs.begin())

    def _pass(self, epoch: int) -> Iterator[dict[str, Any]]:
        with self._loader() as loader:
            for shard, key, fields in _rows(loader, epoch, self._on_error):
                sample = self._sample(shard, key, fields, epoch)
                if sample is not None:
                    yield sample

    @contextmanager
    def _loader(self) -> Iterator[Loader]:
        """A loader for one pass. Passes at the same time have a loader each."""
        process = os.getpid()
        if self._process != process:
            self._process, self._idle = process, []
        loader = self._idle.pop() if self._idle else self._new_loader()
        try:
            yield loader
        finally:
            if os.getpid() == process:  # not where a forked child collects a pass of its parent
                self._idle.append(loader)

    def _new_loader(self) -> Loader:
        rank, world_size = self._ranks
        worker, workers = worker_share() if self._by_worker else (0, 1)
        return Loader(
            self._index,
            batch_size=_BATCH,
            tail="pad",
            # Ranks come first, so that they differ by at most a sample in all of their workers.
            rank=worker * world_size + rank,
            world_size=world_size * workers,
            **self._options,
        )

    def _sample(
        self, shard: int, key: str, fields: dict[str, bytes], epoch: int
    ) -> dict[str, Any] | None:
        """Return a sample of shard number `shard` as users get it; None to leave it out."""
        raise NotImplementedError

    _on_error: OnError | None = None  # None: errors end the pass

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_process": None, "_idle": []}  # threads and files stay here


def _rows(
    loader: Loader, epoch: int, on_error: OnError | None
) -> Iterator[tuple[int, str, dict[str, bytes]]]:
    """Yield (shard number, key, data by field) of the samples of this rank in plan order.

    on_error: decides after each error; a step that fails as a whole is then left out. None: errors
    are raised.
    """
    step, steps = 0, len(loader)
    while step < steps:
        batches = loader.epoch(epoch, start=step)
        try:
            for batch in batches:
                step += 1
                if on_error and not all([on_error(error, 1) for error in _errors(batches)]):
                    return
                shards = loader.index.shard_of(batches.ids).tolist()
                yield from _good_rows(batch, batches.own, shards)
            return
        except WdstrainError as error:
            if on_error is None:
                raise
            if not on_error(error, _BATCH):
                return
            step += 1


def _errors(batches: EpochBatches) -> list[SampleError]:
    """Return an error for each bad sample of the batch that was given last."""
    return [SampleError(finding.sentence) for finding in batches.bad]


def _good_rows(
    batch: dict[str, Any], own: npt.NDArray[np.bool_], shards: list[int]
) -> Iterator[tuple[int, str, dict[str, bytes]]]:
    """Yield (shard number, key, data by field) of the rows that have their own sample."""
    keys = batch["__key__"]
    columns = {name: values for name, values in batch.items() if name not in _NO_FIELDS}
    for row in np.flatnonzero(batch["__valid__"].numpy() & own).tolist():
        fields = {name: values[row] for name, values in columns.items() if values[row] is not None}
        yield shards[row], keys[row], fields


class Stream(PlannedSamples):
    """Samples as webdataset has them: {"__key__", "__url__", "__epoch__", field: bytes}.

    Every `for` is the next epoch. Of sets that number their classes differently a sample also has
    "__labels__", by which `to_example` gives all of them one numbering.
    """

    def _sample(self, shard: int, key: str, fields: dict[str, bytes], epoch: int) -> dict[str, Any]:
        labels = self._shard_labels
        sample: dict[str, Any] = dict(fields)
        sample |= {"__key__": key, "__url__": self._index.shards[shard].shown, "__epoch__": epoch}
        return sample | ({"__labels__": labels[shard]} if labels else {})

    @cached_property
    def _shard_labels(self) -> Any:
        return differing_labels(self._index)


def stream(
    urls: Urls,
    *,
    shuffle: bool = True,
    shuffle_buffer: int | None = None,
    seed: int = 0,
    cache_dir: str | os.PathLike[str] | None = None,
    cache_limit: int | str | None = None,
) -> Stream:
    """Return the samples of shards as a stage for `wds.DataPipeline`, or for torch's DataLoader.

    The arguments are those of `Loader`.
    """
    return Stream(
        open_shards(urls),
        shuffle=shuffle,
        shuffle_buffer=shuffle_buffer,
        seed=integer("seed", seed),
        cache_dir=cache_dir,
        cache_limit=cache_limit,
    )
