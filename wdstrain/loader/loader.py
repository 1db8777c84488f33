"""The loader: batches of samples from shards, in the order of the plan.

`options` checks the options, `planning` makes the plans, `epoch` delivers the batches of one epoch,
and `pipeline` reads and decodes them. Nothing starts before the first batch is requested.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

from wdstrain.decode.decoder import Collate, Transform
from wdstrain.decode.fields import Field, Image, Mask
from wdstrain.decode.labels import with_classes
from wdstrain.errors import UsageError, logger
from wdstrain.loader.buckets import sized
from wdstrain.loader.epoch import EpochBatches, LoaderState, Position
from wdstrain.loader.options import HABITS, LoaderOptions, OnError, StartMethod
from wdstrain.loader.pipeline import Pipeline
from wdstrain.loader.planning import EpochPlans, MixedSources, warn_of_class_numbers
from wdstrain.loader.recording import NOTHING, Recording
from wdstrain.loader.trainers import TrainerInterface
from wdstrain.native import kernels
from wdstrain.order.order import Order, Tail
from wdstrain.report.printing import counted
from wdstrain.runtime.options import hinted, integer
from wdstrain.shards.index import Index
from wdstrain.storage.addresses import Urls


class Loader(TrainerInterface):
    """Batches of samples from tar shards; every `for` loop runs the next epoch.

    A batch is a dict with a value for each field name, and "__key__": list[str]. A batch of images
    also has "__rng__", from which `Augmentation` draws. With tail="pad" there is "__valid__": bool[b],
    False for padding. With `fields`, fields of fixed size are tensors [b, ...], all others are
    lists. With `transform`, the examples are collated as torch does. With neither, each field of
    the shards is a list of bytes, None where a sample lacks it.
    Batch memory is not reused while you hold a reference to it.

    What to read:
    urls            folder, index.json, tar, glob or brace pattern, a list of them, or an Index
    split           name of the split to read, of shards that have several
    fields          {name in the batch: field}, such as {"image": wt.image(size=224),
                    "label": wt.label()}
    transform       function of a sample, or of (sample, rng), that returns an example. A sample is
                    {"__key__": str, field: bytes}; an example is a dict of values. `rng` is a NumPy
                    generator seeded by seed, epoch and sample. The global generators of torch, numpy
                    and random are seeded per sample only in worker processes: with num_workers=0,
                    threads share them, and what is drawn from them differs between runs
    collate_fn      function of a list of examples that returns a dict of batch values. Default:
                    torch's, which stacks values of equal shape. With it, examples may have any type
                    but None. It runs where the transform runs

    Which samples, in which order:
    where           condition on columns of the index, such as "kids and label != 'Other'"; see
                    `Index.where`
    weights         how often each sample occurs in an epoch: a number >= 0 for each sample of the
                    index, or the name of a column of numbers. 1.5 means once or twice. The rounded
                    sum is the size of the epoch; each occurrence is augmented anew. "recorded:loss",
                    or "loss" if no column has this name: what the loop records, see `record`
    balance         column such as "label": each of its values occurs equally often, together as
                    often as there are samples
    batch_size      samples of a batch on this rank
    buckets         column such as "length": each batch has samples of one of its values, on all
                    ranks; {"length": [64, 128, 256]}: of one range of values, up to 64, above 64 up
                    to 128, and so on. "aspect", with `pixels`: images of one shape. Each bucket
                    leaves out the samples that fill no step
    budget          with ranges: most of the column in a batch, such as tokens. A batch has
                    budget / (largest value of the range) samples, and `batch_size` at most
    pixels          largest area of a shape, such as 512 * 512. The index needs columns of the sizes:
                    wdstrain index FOLDER --columns jpg.width,jpg.height. wt.image(size="bucket")
                    crops and resizes each image to the shape of its batch, the nearest to its own
                    of those that enough images have for a batch on each rank
    shuffle         False: the order of the files
    shuffle_buffer  samples by which a delivery may be later than the read; the loader holds about
                    half of them. Default: 256 MB of samples. Shards that are sorted by class need a
                    buffer of the whole set: see `wt.plan_epoch`
    seed            of order and augmentation; both differ between epochs
    tail            samples that fill no step on every rank: "drop" leaves them out, "pad" repeats
                    samples and marks them, "keep" gives a short last batch. With "keep", the last
                    two batches may be short, and the last may be empty on some ranks
    lanes           number of places at which the set is read at once; default: one per rank. Fixed
                    lanes give the same global batches for every world size that divides them
    rank, world_size    default: torch.distributed if it is initialized, else what torchrun or srun
                    set in the environment, else 0 and 1

    How to run:
    num_workers     0: decode in threads of this process; N: in N worker processes. The order is the
                    same
    multiprocessing_context     start method of worker processes: "fork", "forkserver", "spawn";
                    default: Python's
    on_error        samples that cannot be read or decoded: "raise"; "replace": a good sample of the
                    same batch takes the place, or the next good one of the set. "mark": the row
                    holds zeros or None, and is False in `loader.epoch(n).delivered.own`; not with a
                    transform. Replaced and marked samples are counted, see `report`
    max_errors      share of the epoch's samples that may be replaced or marked; more is an error
    cache_dir       folder that keeps shards of servers, shared by all processes of this machine;
                    default: no cache
    cache_limit     most bytes in `cache_dir`, a number or "200GB"; the shards that were not used for
                    longest are removed; default: no limit
    patience        seconds without a batch until the logger "wdstrain" warns which stage is stuck,
                    with shard and key, and stderr gets the stacks; 0: never. The logger's level INFO
                    has one line of at most 120 characters for each whole epoch.
                    WDSTRAIN_NETWORK_TIMEOUT in the environment sets how many seconds a silent or
                    failing server is waited for; default: 120

    Raises UsageError and ShardError at once for wrong options and addresses. Iterating raises
    SampleError for a sample that cannot be decoded, with shard, key, field and offset.
    """

    @partial(hinted, hints=HABITS)
    def __init__(
        self,
        urls: Urls | Index | MixedSources,
        fields: Mapping[str, Field] | None = None,
        transform: Transform | None = None,
        *,
        batch_size: int = 64,
        num_workers: int = 0,
        where: str | None = None,
        weights: Any = None,
        balance: str | None = None,
        shuffle: bool = True,
        shuffle_buffer: int | None = None,
        seed: int = 0,
        tail: Tail = "drop",
        lanes: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        on_error: OnError = "raise",
        max_errors: float = 0.01,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_limit: int | str | None = None,
        multiprocessing_context: StartMethod | None = None,
        patience: float = 60.0,
        collate_fn: Collate | None = None,
        split: str | None = None,
        buckets: str | Mapping[str, Sequence[float]] | None = None,
        budget: float | None = None,
        pixels: int | None = None,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "urls")}
        self._set_up(urls, LoaderOptions.of(given))

    def _set_up(
        self,
        urls: Urls | Index | MixedSources,
        options: LoaderOptions,
        recording: Recording | None = None,
    ) -> None:
        """Make the plans. Raises UsageError and ShardError."""
        log_slow_paths()
        self._options = options
        self._plans = EpochPlans(urls, options, recording)
        self.index, self.recording = self._plans.index, self._plans.recording
        self.plan: Callable[[int], Order] = self._plans.plan  # returns the plan of an epoch
        self.batch_size, self.num_workers = options.batch_size, options.num_workers
        self.rank, self.world_size = options.rank, options.world_size
        self.shuffle_buffer: int = self._plans.shuffle_buffer
        self.transform, self.fields = options.transform, options.fields
        if self.fields is None:
            warn_of_class_numbers(self.index)
        else:
            self.fields = {
                name: sized(with_classes(field, self.index), self._plans.bucketing)
                for name, field in self.fields.items()
            }
        self.plan(0)  # raises now if the sizes do not fit together
        source = self._plans.source
        sources = source.first_ids if isinstance(source, MixedSources) else {}
        self._state = LoaderState(
            partial(Pipeline, self.index, self.plan, options, self.fields, sources), self.recording
        )

    # --- iteration --------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Batches of an epoch on this rank, the same on every rank."""
        return self.plan(0).steps

    def __iter__(self) -> EpochBatches:
        return self._pass(None)

    @property
    def next_position(self) -> tuple[int, int]:
        """(epoch, step) of the first batch of the next `for` loop."""
        return self._state.next_start[:2]

    def epoch(self, number: int, *, start: int = 0, until: int | None = None) -> EpochBatches:
        """Return an iterator over the batches of one epoch, from step `start` on.

        until: the epoch at which reading ahead stops: `loader.epoch(0, until=1)` reads only epoch 0,
        as for a validation. By default the next epoch is read ahead, unless the same epoch was
        requested twice in a row.
        """
        number, start = integer("epoch", number, 0), integer("start", start, 0)
        until = None if until is None else integer("until", until, 0)
        if until is not None and until <= number:
            raise UsageError(
                f"must be above epoch={number}.",
                f"Use for example until={number + 1}.",
                option="until",
                value=until,
            )
        if start and start >= len(self):
            raise UsageError(
                f"must be below {len(self)}; an epoch has {len(self)} steps, which count from 0.",
                option="start",
                value=start,
            )
        saved = self._state.next_start  # a state that was loaded counts the bad samples before it
        is_same = saved[:2] == (number, start)
        return self._pass(saved if is_same else Position(number, start), until)

    def _pass(self, start: Position | None, until: int | None = None) -> EpochBatches:
        return EpochBatches(self._state, self.plan, self._options, start, until)

    # --- state ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the batch that was delivered last, as a small JSON-able dict.

        Outside of a loop it is the start of the next loop if `set_epoch` or `load_state_dict` was
        called, otherwise the end of the last loop.
        With weights that are recorded, the state holds the values too, about 15 bytes per sample,
        and every rank must call this. Call `record` for a batch before the state is taken.
        """
        ranks = {"rank": self.rank, "world_size": self.world_size}
        recorded = {"recorded": self.recording.state()} if self.recording.name else {}
        return self._state.position._asdict() | ranks | self._plans.identity | recorded

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next `for` loop go on where the state was taken.

        Recorded values are those of the state from now on; there are none without recorded weights.
        Raises UsageError if the state belongs to other options or data; the message names them.
        """
        self._plans.check_identity(state)
        position = Position.of_state(state, len(self))
        self.recording.load(state.get("recorded") if self.recording.name else NOTHING)
        if self.recording.name is not None:  # the pipeline may read in another order
            self._plans.plan.cache_clear()
            self.close()
        if (state.get("rank"), state.get("world_size")) != (self.rank, self.world_size):
            position = position._replace(bad=0)  # they were counted on another rank
        self._state.restore(position)

    def __reduce__(self) -> tuple[Callable[..., Loader], tuple[Any, ...]]:
        """A copy is a loader of the same batches at the same position, which runs nothing yet."""
        weights = self._plans.weighting  # the source holds only the chosen samples
        chosen = replace(self._options, where=None, balance=None, split=None, weights=weights)
        return _copied, (
            *(type(self), self._plans.source, chosen, self._state.position),
            deepcopy(self.recording),
        )

    # --- reports ----------------------------------------------------------------------------------

    def report(self) -> dict[str, Any]:
        """Return what the newest epoch delivered, the seconds of each stage, and the bottleneck.

        The dict is JSON-able and has the names of `EpochStats`, "stall" and "verdict".
        """
        return self._state.stats.report()

    def __repr__(self) -> str:
        """What is read, what a batch holds, and the position: a text of some lines."""
        epoch, step, _ = self._state.position
        return _described(self, epoch, step, self._plans.buffered_megabytes(self.rank))

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End threads and worker processes. The loader can be used again; it starts new ones."""
        self._state.close()


@lru_cache(maxsize=1)
def log_slow_paths() -> None:
    """Log once per process which parts of the platform are missing, so that slower code runs."""
    if kernels.library is None:
        logger.warning(
            "The compiled part of wdstrain is missing, is older than its source, or cannot call "
            "the crc32 of isal, so slower generic code is used. For the fast one, install a C "
            "compiler and reinstall wdstrain and isal (in a clone: python scripts/compile.py)."
        )
    if kernels.libjpeg_turbo() is None:
        logger.info(
            "libjpeg-turbo 3 was not found, so each JPEG is decoded as a whole, even if a crop "
            "needs a part of it. For faster decoding: pip install turbojpeg"
        )


def _copied(
    kind: type[Loader],
    source: Index | MixedSources,
    options: LoaderOptions,
    position: Position,
    recording: Recording,
) -> Loader:
    loader = object.__new__(kind)
    loader._set_up(source, options, recording)
    loader._state.restore(position)
    return loader


def _described(loader: Loader, epoch: int, step: int, buffered: float) -> str:
    """Return lines on a loader at a position. buffered: megabytes of its shuffle buffer."""
    plan, index, fields = loader.plan(0), loader.index, (loader.fields or {}).items()
    batches = f"{counted(len(loader), 'batch')} of {loader.batch_size}"
    lines = [
        f"Loader({counted(len(index), 'sample')} in {counted(len(index.shards), 'shard')}, "
        f"{batches} on rank {loader.rank} of {loader.world_size}, "
        f"shuffle_buffer={loader.shuffle_buffer} holds about "
        f"{buffered:.1f} MB)",
        f"  at epoch {epoch}, step {step} of {len(loader)}; seed {plan.seed}, {plan.left_out} "
        f"samples left out",
        *(f"  {name}: {_describe(field, loader.batch_size)}" for name, field in fields),
    ]
    return "\n".join(lines)


def _describe(field: Field, batch_size: int) -> str:
    """Return the type and shape of a field in a batch, and the names that it is read from."""
    example = field.example
    if example is None:
        is_sized = isinstance(field, (Image, Mask)) and field.sizes
        kind = "a tensor of its bucket's size" if is_sized else "a list"
        return f"{kind}, from {', '.join(field.names)}"
    shape = (example.shape[-1], *example.shape[:-1]) if example.channels_last else example.shape
    return f"{example.dtype}{[batch_size, *shape]}, from {', '.join(field.names)}"
