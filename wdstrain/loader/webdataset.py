"""With webdataset, both ways: our reading under its stages, its samples through our fields.

    pipeline = wds.DataPipeline(wt.stream("shards/train-*.tar"), wds.map(my_function), wds.batched(32))
    pipeline = wds.DataPipeline(wds.SimpleShardList(urls), wds.tarfile_to_samples(), wds.map(wt.to_example(fields)))

A stream has the order, the forward reading and the checks of a loader. What it gives up: it knows nothing of batches, so
ranks differ by a sample or so where the samples do not divide, and each worker process of a torch DataLoader above it
reads a share of its own, so the order depends on their number. Use `wt.Loader` where that matters.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import IterableDataset, get_worker_info

from wdstrain.decode.fields import Field, read_field
from wdstrain.decode.label_fields import Label, differing_labels, label_of_set, with_classes
from wdstrain.decode.transforms import DRAWS
from wdstrain.errors import SampleError, UsageError
from wdstrain.loader.loader import Loader, open_shards, rank_of
from wdstrain.memory.shared import Memory
from wdstrain.order.plan import integer
from wdstrain.order.rng import key, uniform
from wdstrain.shards.index import Index
from wdstrain.storage.addresses import Urls

_BATCH = 64  # samples taken from the pipeline at a time
_WORKERS = 4096  # most worker processes of a DataLoader
_PASSES = 4096  # passes of worker processes that are remembered, the last ones


class Stream(IterableDataset[dict[str, Any]]):
    """Samples as webdataset has them: {"__key__", "__url__", "__epoch__", field: bytes}; every `for` is the next epoch.

    Of sets that number their classes differently a sample also has "__labels__", by which `to_example` numbers them as one.

    Every sample comes once per epoch over all ranks and worker processes, whatever their number was before. All processes count
    epochs together, in shared memory: a `for` here, or one pass of a DataLoader over all of its worker processes.
    """

    def __init__(self, index: Index, **options: Any) -> None:
        """options: of a `Loader`."""
        self._index, self._options = index, options
        self._ranks = rank_of(None, None)
        self._epochs = _Epochs()
        self._process: int | None = None  # whose the loader is; a forked child makes its own
        self._loader: Loader | None = None

    def set_epoch(self, number: int) -> None:
        """The next `for` is this epoch, in every worker process."""
        self._epochs.set(number)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if self._process != os.getpid():
            self._process, self._loader, self._calls = os.getpid(), None, itertools.count()
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        call = next(self._calls)
        epoch = (
            self._epochs.next()
            if info is None
            else self._epochs.joined(info.seed - worker, call, worker, workers)
        )
        if self._loader is None:
            rank, world_size = self._ranks[0] * workers + worker, self._ranks[1] * workers
            self._loader = Loader(
                self._index,
                batch_size=_BATCH,
                tail="pad",
                rank=rank,
                world_size=world_size,
                **self._options,
            )
        return self._samples(self._loader, epoch)

    def _samples(self, loader: Loader, epoch: int) -> Iterator[dict[str, Any]]:
        plan, labels = loader.plan(epoch), differing_labels(self._index)
        (lane,) = plan.lanes_of(loader.rank)
        for step, batch in enumerate(loader.epoch(epoch)):
            ids = plan.ids(lane, plan.order(lane, *plan.span(lane, step)))
            shards = self._index.shard_of(ids)
            for row in np.flatnonzero(batch["__valid__"].numpy()).tolist():
                url = self._index.shards[int(shards[row])].shown
                sample = {
                    name: batch[name][row]
                    for name in self._index.fields
                    if batch[name][row] is not None
                }
                sample |= {"__key__": batch["__key__"][row], "__url__": url, "__epoch__": epoch}
                yield sample | ({"__labels__": labels[int(shards[row])]} if labels else {})

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in self.__dict__.items() if name != "_calls"}
        return {**state, "_process": None, "_loader": None}  # threads and open files stay here


class _Epochs:
    """The number of the next epoch, and those of the last passes of worker processes, in memory that all processes share.

    The worker processes of a DataLoader begin a pass one by one, and their parent does not say which. So the first that begins it
    takes the next number, and the others find that: what torch gives all of them, the seed of their pass, and the how many-th pass
    of their process it is are the same. Where a program seeds torch alike before each pass, worker processes of another pass have
    begun already, and Python numbers processes.
    """

    def __init__(self) -> None:
        self._memory = Memory(8 * (2 + 6 * _PASSES) + _PASSES * _WORKERS // 8)

    def set(self, number: int) -> None:
        with self._memory.exclusive():
            self._counts[0] = number

    def next(self) -> int:
        """The next epoch, for the caller alone."""
        with self._memory.exclusive():
            self._counts[0] += 1
            return int(self._counts[0]) - 1

    def joined(self, seed: int, call: int, worker: int, workers: int) -> int:
        """The epoch of the pass that a worker process begins. seed: of all worker processes; call: how often it began one before."""
        if workers > _WORKERS:
            raise UsageError(
                f"num_workers={workers} of the DataLoader: a stream must have {_WORKERS} worker processes at most."
            )
        identity = multiprocessing.current_process()._identity
        first = (
            identity[-1] - worker if identity else 0
        )  # the number of the pass's first process, if no others began meanwhile
        with self._memory.exclusive():
            passes, counts = self._passes, self._counts
            begun = int(counts[1])
            same = np.flatnonzero(
                (passes[: min(begun, _PASSES), :3] == (seed, call, workers)).all(axis=1)
            )
            free = [i for i in same.tolist() if not self._has(i, worker)]
            free.sort(
                key=lambda i: (passes[i, 4] == first, (i - begun) % _PASSES), reverse=True
            )  # its own, else the latest
            if free and (passes[free[0], 4] == first or _is_alive(int(passes[free[0], 5]))):
                number = free[0]
            else:
                number = begun % _PASSES
                passes[number] = seed, call, workers, counts[0], first, os.getpid()
                self._workers[number] = 0
                counts += 1
            self._workers[number, worker // 8] |= 1 << worker % 8
            return int(passes[number, 3])

    def _has(self, number: int, worker: int) -> bool:
        return bool(self._workers[number, worker // 8] >> (worker % 8) & 1)

    @property
    def _counts(self) -> npt.NDArray[np.int64]:
        """int64[2]: the next epoch, and how many passes worker processes began."""
        return np.frombuffer(self._memory.view, np.int64, 2)

    @property
    def _passes(self) -> npt.NDArray[np.int64]:
        """int64[_PASSES, 6]: seed, call, worker processes, epoch, number of the first process, process that was there first."""
        return np.frombuffer(self._memory.view, np.int64, 6 * _PASSES, 16).reshape(_PASSES, 6)

    @property
    def _workers(self) -> npt.NDArray[np.uint8]:
        """uint8[_PASSES, _WORKERS / 8]: a bit for each worker process that began the pass."""
        return np.frombuffer(self._memory.view, np.uint8, offset=16 + 48 * _PASSES).reshape(
            _PASSES, _WORKERS // 8
        )


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


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
        seed=integer("seed", seed),
        cache_dir=cache_dir,
        cache_limit=cache_limit,
    )


class ToExample:
    """Applies fields to one sample of bytes; see `to_example`."""

    def __init__(self, fields: Mapping[str, Field], seed: int) -> None:
        self._fields = {name: with_classes(field, None) for name, field in fields.items()}
        self._seed = integer("seed", seed)

    def __call__(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        if "__epoch__" in sample:
            number = np.array([key(sample["__key__"])], np.uint64)
            draws = uniform(number, DRAWS, "decode", self._seed, sample["__epoch__"])[0]
        else:  # nobody says which epoch it is; the worker's own generator moves on
            draws = np.random.random(DRAWS)
        draws.flags.writeable = False  # all fields of a sample have the same
        example: dict[str, Any] = {"__key__": sample["__key__"]}
        labels = sample.get("__labels__")
        for name, field in self._fields.items():
            found = next((one for one in field.names if one in sample), None)
            if found is None:
                has = ", ".join(one for one in sample if not one.startswith("__"))
                raise SampleError(
                    f"'{sample['__key__']}' has none of {', '.join(field.names)} (but {has})."
                )
            if labels and isinstance(field, Label):
                field = label_of_set(field, labels)
            out = (
                np.empty(field.example.shape, field.example.dtype)
                if field.example is not None
                else None
            )
            try:
                value = read_field(field, found, memoryview(sample[found]), out, draws)
            except Exception as error:
                where = (
                    f"{sample.get('__url__', 'a shard')}: '{sample['__key__']}', field '{found}'"
                )
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
