"""Samples of bytes from the loader, as a stage for webdataset's pipelines; examples of such samples.

    pipeline = wds.DataPipeline(wt.stream("shards/train-*.tar"), wds.map(wt.to_example(fields)))

A stream has the order, the forward reading and the checks of a loader. It does not know batches, so
ranks differ by a sample or so where the samples do not divide. Each worker process of a torch
DataLoader above it reads its own share, so the order depends on their number. Use `wt.Loader` where
that matters.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from functools import partial
from multiprocessing.context import get_spawning_popen
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from wdstrain.decode.boxes import Boxes
from wdstrain.decode.fields import Field, read_field
from wdstrain.decode.labels import with_classes
from wdstrain.decode.transforms import DRAWS
from wdstrain.errors import SampleError, UsageError, WdstrainError
from wdstrain.loader.epoch import EpochBatches
from wdstrain.loader.loader import Loader
from wdstrain.loader.options import rank_of
from wdstrain.memory import SharedFile
from wdstrain.order.rng import key, uniform
from wdstrain.runtime.options import integer
from wdstrain.shards.index import Index
from wdstrain.shards.resolve import open_shards
from wdstrain.shards.tar import reraise
from wdstrain.storage.addresses import Urls

_BATCH = 64  # samples taken from the pipeline at a time
_RECORD = struct.Struct("qqq")  # of the log of passes
_SET, _ALONE = -1, -2  # first number of a record; seeds of torch are >= 0


class PassEnds(Exception):
    """Raised by the handler of a `Stream` to end a pass without an error."""


class Epochs:
    """The number of the next epoch, which this process and worker processes count together.

    A pass of a DataLoader over all its workers is one epoch. A worker knows the pass by the seed
    that torch gives to all workers of a pass, and by the passes that it began before. Two passes
    with the same seed of torch are therefore the same epoch.

    The passes are a log in memory that the workers share: each appends a record, and a pass has the
    number of its first record. The system makes appending atomic.
    """

    def __init__(self, epoch: int = 0, log: SharedFile | None = None, changes: int = 0) -> None:
        """log: that another process has; changes: those that it counted."""
        self._log = log or SharedFile()
        fcntl.fcntl(self._log.fd, fcntl.F_SETFL, os.O_APPEND)
        self._changes, self._begun = changes, 0  # begun: passes that this worker process began
        if log is None:
            self.set(epoch)

    def set(self, number: int) -> None:
        """Make `number` the next epoch, in every worker process."""
        self._changes += 1  # a worker that starts later has it, so its pass is a new one
        os.write(self._log.fd, _RECORD.pack(_SET, number, 0))

    def begin(self) -> int:
        """Return the epoch of the pass that begins, in this process or over all worker processes."""
        info = get_worker_info()
        record = (_ALONE, time.monotonic_ns(), os.getpid())
        if info is not None:
            record = (info.seed - info.id, self._begun, self._changes)
            self._begun += 1
        os.write(self._log.fd, _RECORD.pack(*record))
        return self._numbers()[0][record]

    def _numbers(self) -> tuple[dict[tuple[int, ...], int], int]:
        """Return the epochs of all passes in the log, and the next epoch."""
        numbers, number = dict[tuple[int, ...], int](), 0
        for record in _RECORD.iter_unpack(
            os.pread(self._log.fd, os.fstat(self._log.fd).st_size, 0)
        ):
            if record[0] == _SET:
                number = record[1]
            elif record not in numbers:
                numbers[record] = number
                number += 1
        return numbers, number

    def __reduce__(self) -> tuple[Callable[..., Epochs], tuple[Any, ...]]:
        """A worker process that starts shares the log. Any other copy counts by itself."""
        if get_spawning_popen() is not None:
            return Epochs, (0, self._log, self._changes)
        return Epochs, (self._numbers()[1],)


class Stream(IterableDataset[dict[str, Any]]):
    """Samples as webdataset has them: {"__key__", "__url__", "__epoch__", field: bytes}.

    Every `for` is the next epoch. Every sample comes once per epoch over all ranks and worker
    processes. Ranks must begin the same passes.
    """

    def __init__(
        self,
        index: Index,
        *,
        ranks: tuple[int, int] | None = None,
        by_worker: bool = True,
        handler: Callable[[Exception], Any] = reraise,
        **options: Any,
    ) -> None:
        """ranks: (rank, world size); default: as `Loader`. by_worker: split also over the worker
        processes of a DataLoader. handler: gets errors; raises, or returns to go on. options: of a
        `Loader`."""
        self._index, self._by_worker, self._handler = index, by_worker, handler
        self._ranks = rank_of(None, None) if ranks is None else ranks
        self._options, self._epochs = options, Epochs()

    def set_epoch(self, number: int) -> None:
        """The next `for` is this epoch, in every worker process."""
        self._epochs.set(integer("epoch", number, 0))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self._pass(self._epochs.begin())

    def _pass(self, epoch: int) -> Iterator[dict[str, Any]]:
        from webdataset.utils import pytorch_worker_info  # imported only where it is used

        rank, world_size = self._ranks
        worker, workers = pytorch_worker_info()[2:] if self._by_worker else (0, 1)
        loader = Loader(
            self._index,
            batch_size=_BATCH,
            tail="pad",
            # Ranks come first, so that they differ by at most a sample in all of their workers.
            rank=worker * world_size + rank,
            world_size=world_size * workers,
            **self._options,
        )
        with closing(loader), suppress(PassEnds):
            yield from self._samples(loader, epoch)

    def _samples(self, loader: Loader, epoch: int) -> Iterator[dict[str, Any]]:
        """Yield the samples of this rank and worker in plan order.

        A step that fails as a whole is left out if the handler goes on.
        """
        step, steps = 0, len(loader)
        while step < steps:
            batches = loader.epoch(epoch, start=step, until=epoch + 1)
            try:
                for batch in batches:
                    step += 1
                    for finding in batches.delivered.bad:
                        self._handler(SampleError(finding.sentence))
                    yield from self._rows(batch, batches, epoch)
                return
            except WdstrainError as error:
                self._handler(error)
                step += 1

    def _rows(
        self, batch: dict[str, Any], batches: EpochBatches, epoch: int
    ) -> Iterator[dict[str, Any]]:
        """Yield the rows of a batch that have their own sample."""
        keys, is_valid = batch.pop("__key__"), batch.pop("__valid__").numpy()
        shards = self._index.shard_of(batches.delivered.ids).tolist()
        for row in (is_valid & batches.delivered.own).nonzero()[0].tolist():
            fields = {name: rows[row] for name, rows in batch.items() if rows[row] is not None}
            if sample := self._sample(keys[row], fields, shards[row], epoch):
                yield sample

    def _sample(
        self, key: str, fields: dict[str, Any], shard: int, epoch: int
    ) -> dict[str, Any] | None:
        """Return a sample as users get it; None to leave it out."""
        url = self._index.shards[shard].shown
        return {**fields, "__key__": key, "__url__": url, "__epoch__": epoch}


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

    The arguments are those of `Loader`. Raises UsageError for sets that number their classes
    differently: samples do not say to which set they belong.
    """
    index = open_shards(urls)
    for label, why in index.differing.items():
        if label.is_class and label.entry is None:
            raise UsageError(
                f"{why}.",
                "Use wt.Loader, which gives one numbering, or pack the sets together.",
            )
    return Stream(
        index,
        shuffle=shuffle,
        shuffle_buffer=shuffle_buffer,
        seed=integer("seed", seed),
        cache_dir=cache_dir,
        cache_limit=cache_limit,
    )


# --- examples --------------------------------------------------------------------------------------


def to_example(
    fields: Mapping[str, Field], *, seed: int = 0
) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Return a function from a sample of bytes to an example: arrays and values by field name.

    Random augmentation depends on seed, epoch and key for samples of `wt.stream`, which name their
    epoch; for others on numpy's global generator. Raises SampleError naming shard, key and field.
    """
    with_names = {name: with_classes(field, None) for name, field in fields.items()}
    return partial(_example, fields=with_names, seed=integer("seed", seed))


def _example(
    sample: Mapping[str, Any], *, fields: Mapping[str, Field], seed: int
) -> dict[str, Any]:
    if "__epoch__" in sample:
        number = np.array([key(sample["__key__"])], np.uint64)
        draws = uniform(number, DRAWS, "decode", seed, sample["__epoch__"])[0]
    else:  # the epoch is unknown; the worker's own generator moves on
        draws = np.random.random(DRAWS)
    draws.flags.writeable = False  # all fields of a sample have the same
    values = {name: read_sample(field, sample, draws) for name, field in fields.items()}
    return {"__key__": sample["__key__"], **values}


def read_sample(field: Field, sample: Mapping[str, Any], draws: Any) -> Any:
    """Return the value of a field, from the bytes of one sample. Raises SampleError naming shard, key and field."""
    member = next((name for name in field.names if name in sample), None)
    if member is None:
        has = ", ".join(name for name in sample if not name.startswith("__"))
        raise SampleError(
            f"'{sample['__key__']}' has none of {', '.join(field.names)} (but {has})."
        )
    example = field.example
    out = None if example is None else np.empty(example.shape, example.dtype)
    try:
        if isinstance(field, Boxes):
            return field.read(member, sample[member], None, draws, field.picture_in(sample))
        value = read_field(field, member, memoryview(sample[member]), out, draws)
    except Exception as error:
        where = f"{sample.get('__url__', 'a shard')}: '{sample['__key__']}', field '{member}'"
        raise SampleError(f"{where}: {error}.") from error
    if example is None or out is None:
        return value
    return np.moveaxis(out, -1, 0) if example.channels_last else out
