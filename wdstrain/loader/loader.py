"""The door to the pipeline: shards in, batches out, in plan order.

The loader holds what is asked for and which batch comes next; the pipeline does the work. Nothing starts before the first
batch is asked for, and the loader's end is the end of every thread and process it started.
"""

from __future__ import annotations

import inspect
import logging
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, Literal, get_args

import torch

from wdstrain.decode import libjpeg_turbo
from wdstrain.decode.fields import Field, Image, fits_batch_memory
from wdstrain.decode.label_fields import reader_of, with_classes
from wdstrain.decode.pickling import check_picklable
from wdstrain.decode.settings import Collate, Transform
from wdstrain.errors import UsageError, WdstrainError
from wdstrain.loader.batch_stream import OVER
from wdstrain.loader.epoch import Batches, Position
from wdstrain.loader.pipeline import Pipeline
from wdstrain.loader.pipeline_parts import PipelineOptions
from wdstrain.loader.stats import EpochStats, Report
from wdstrain.loader.weighting import choose
from wdstrain.native import kernels
from wdstrain.order.plan import ORDER, Order, Plan, Tail, integer, is_number
from wdstrain.order.weighted_plan import WeightedPlan
from wdstrain.runtime.byte_sizes import parse_size
from wdstrain.runtime.signals import WORKER_DEATH, DeferSignals
from wdstrain.shards.index import Index
from wdstrain.shards.resolve import open_index, require_one_split
from wdstrain.storage.addresses import Urls
from wdstrain.storage.shard_cache import Cache

_BUFFER_BYTES = (
    256 << 20
)  # a window of this many bytes is the default shuffle buffer; half of it is held at a time

_WIDEST = 8  # times the longest lane: a window beyond changes nothing any more

_log = logging.getLogger("wdstrain")

Context = Literal["fork", "forkserver", "spawn"]
OnBad = Literal["raise", "replace", "mark"]


class Loader:
    """Batches of the samples in `urls`; every `for` is the next epoch.

    A batch is a dict: a value by field name, "__key__" with the keys as list[str], and with tail="pad" "__valid__" (bool
    [b], False for padding). With `fields`, fixed-size fields are tensors [b, ...]; with `transform`, examples are collated
    as torch does; with neither, each tar field is a list of bytes (None where a sample lacks it). A batch is the caller's
    for as long as he holds it.

    urls            folder, index.json, tar, glob or brace pattern, a list of them, or an Index
    fields          {name in the batch: field}, such as {"image": wt.image(size=224), "label": wt.label()}
    transform       sample -> example, or (sample, rng) -> example; a sample is {"__key__": str, field: bytes}, an example a
                    dict of values by name. rng is the sample's own in this epoch. What torch, numpy and random draw by
                    themselves is seeded per sample in worker processes; with num_workers=0 threads share these generators,
                    so it differs from run to run
    batch_size      per rank
    num_workers     0: decode in threads of this process; N: in N worker processes. The order is the same
    where           a condition on the columns of the index, such as "kids and label != 'Other'": only these samples are
                    read; see `Index.where`
    weights         how often each sample occurs in an epoch: one number >= 0 for each sample of the index, or the name of a
                    column of numbers. A weight of 1.5 means once or twice; the sum of all, rounded, is the size of an epoch.
                    Reads stay forward; each occurrence is augmented anew
    balance         a column, such as "label": each of its values gets the same number of samples, together as many as there are
    shuffle         False: file order. seed: of the order and of augmentation; each epoch differs
    shuffle_buffer  samples: how far a sample may be delivered after it was read; about half of them are held at a time.
                    Default: 256 MB of samples. Of a smaller set that was packed shuffled it mixes as well as a shuffle of the
                    whole; of one sorted by class its beginning and end stay uneven (`foresee` tells)
    tail            samples that fill no whole step on every rank: "drop", "pad" (marked) or "keep" (a short last batch,
                    of 0 rows on a rank for which no sample is left). A lane that has no sample left for the last batch keeps
                    one of its last but one back for it: with "keep" that one can be shorter too, by a row for each lane
    lanes           default one per rank. Fix it to get the same global batches for every world size that divides it
    rank, world_size             default: torch.distributed if it is initialised, else RANK and WORLD_SIZE, else 0 and 1
    on_bad          a sample that cannot be decoded: "raise", or "replace" it by the good one before it in its batch, or
                    by the next of the data set where all of the batch is bad, and count it; more than the share max_bad
                    of an epoch is an error all the same. So are samples that a disk does not give, and those of a local
                    shard that lie beyond its end. "mark": as "replace", but nothing takes its place: its row holds zeros or
                    None, and is False in the `own` of `loader.epoch(n)`. Not with a transform
    cache_dir, cache_limit       folder that keeps shards of servers while they stream, for all processes of this machine;
                    most bytes in it (a number, or "200GB"): those not used for longest go first. Default: no cache
    multiprocessing_context      how worker processes are started: "fork", "forkserver", "spawn"; default: Python's own
    patience        seconds without a batch after which the logger "wdstrain" warns who is stuck: stage, shard, key, and the
                    Python stack of the thread or worker process; 0: never. Its level INFO has a line of at most 120
                    characters for each whole epoch, its level DEBUG the seconds of each stage too. How long a server that is
                    silent or fails is waited for is set by the environment: WDSTRAIN_NETWORK_TIMEOUT (seconds, default 120)
    collate_fn      list of the examples of a batch -> dict of its values by name. Default: as torch does, which stacks values
                    of one shape. Examples may then be of any type but None. With worker processes it runs there

    Raises UsageError and ShardError at once for addresses and sizes that cannot be, SampleError in the loop for a sample
    that cannot be decoded, with shard, key, field and offset.
    """

    def __init__(
        self,
        urls: Urls | Index,
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
        on_bad: OnBad = "raise",
        max_bad: float = 0.01,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_limit: int | str | None = None,
        multiprocessing_context: Context | None = None,
        patience: float = 60.0,
        collate_fn: Collate | None = None,
    ) -> None:
        options = {
            name: value
            for name, value in locals().items()
            if name not in ("self", "urls", "__class__")
        }
        _log_slow_paths()
        if fields is not None and transform is not None:
            raise UsageError(
                "fields and transform were both given; each says what an example is. Give one of them."
            )
        if collate_fn is not None and (transform is None or not callable(collate_fn)):
            raise UsageError(
                f"collate_fn={collate_fn!r}: must be a function of the list of examples that a transform returned. Give transform too."
            )
        if on_bad not in get_args(OnBad) or not is_number(max_bad) or not 0 <= max_bad <= 1:
            raise UsageError(
                f"on_bad={on_bad!r}, max_bad={max_bad}: on_bad is raise, replace or mark, max_bad a share from 0 to 1."
            )
        if on_bad == "mark" and transform is not None:
            raise UsageError(
                'on_bad="mark" leaves rows empty, and what a transform makes has none. Use on_bad="replace".'
            )
        if not is_number(patience) or not 0 <= patience <= threading.TIMEOUT_MAX:
            raise UsageError(
                f"patience={patience!r}: must be a number of seconds >= 0. 0 turns the warnings off."
            )
        batch_size, seed = integer("batch_size", batch_size, 1), integer("seed", seed)
        num_workers = integer("num_workers", num_workers, 0)
        lanes = None if lanes is None else integer("lanes", lanes, 1)
        cache = open_cache(cache_dir, cache_limit)
        self.index: Index = (
            urls if isinstance(urls, Index) else open_shards(urls, cut=on_bad != "raise")
        )
        self.index, weighting = choose(self.index, where, weights, balance)
        self.batch_size, self.num_workers = batch_size, num_workers
        self.rank, self.world_size = rank_of(rank, world_size)
        self.shuffle_buffer: int = _buffer(self.index, shuffle_buffer, lanes or self.world_size)
        _check_fields(self.index, fields)
        if fields is not None:
            fields = {name: with_classes(field, self.index) for name, field in fields.items()}
        else:
            _warn_of_numbers(self.index)
        self.fields, self.transform = fields, transform
        if multiprocessing_context not in (None, *get_args(Context)):
            raise UsageError(
                f"multiprocessing_context={multiprocessing_context!r} is not fork, forkserver or spawn."
            )
        if num_workers:
            check_picklable(
                fields, {"transform": transform, "collate_fn": collate_fn}, multiprocessing_context
            )
        self._weighting = weighting
        make = self._planner(
            seed=seed,
            batch_size=batch_size,
            world_size=self.world_size,
            lanes=lanes,
            window=self.shuffle_buffer if shuffle else 1,
            shuffle=shuffle,
            tail=tail,
        )
        self.plan: Callable[[int], Order] = lru_cache(maxsize=4)(lambda epoch: make(epoch=epoch))
        self.plan(0)  # sizes that do not fit are told at once
        self._pipeline_options = PipelineOptions(
            fields=fields,
            transform=transform,
            takes_rng=transform is not None and takes_rng(transform),
            collate_fn=collate_fn,
            on_bad=on_bad,
            num_workers=num_workers,
            context=multiprocessing_context,
            cache=cache,
            sources=self._sources,
            patience=patience,
        )
        self._options: dict[str, Any] = {
            **options,
            "where": None,  # the index has the chosen samples only
            "weights": weighting,
            "balance": None,
            "rank": self.rank,
            "world_size": self.world_size,
        }  # for copies
        self._max_bad = float(max_bad)
        self._pipeline: Pipeline | None = None
        self._position: Position | None = (
            None  # the step after what was delivered; None: nothing was yet
        )
        self._start: Position | None = None  # where the next `for` begins, if somebody said so
        self._meter = EpochStats()
        self._host: Callable[[], _Host | None] = lambda: None  # of the pass that began last

    _sources: Mapping[str, int] | None = None  # the first id of each source of a mixture

    def _planner(self, **sizes: Any) -> Callable[..., Order]:
        """What makes the plan of an epoch."""
        if self._weighting is None:
            return partial(Plan, counts=self.index.counts, **sizes)
        weights, strata = self._weighting.weights, self._weighting.strata
        return partial(
            WeightedPlan, counts=self.index.counts, weights=weights, strata=strata, **sizes
        )

    # --- iterating ---------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Batches of an epoch on this rank, the same on every rank."""
        return self.plan(0).steps

    def __iter__(self) -> Batches:
        return self._from(self._next)

    @property
    def begins(self) -> tuple[int, int]:
        """(epoch, step) of the first batch of the next `for`."""
        return self._next[:2]

    @property
    def _next(self) -> Position:
        if self._start is not None:
            return self._start
        # every `for` is the next epoch, also after a `break`
        return (
            Position(0, 0)
            if self._position is None
            else Position(self._position.epoch + (self._position.step > 0), 0)
        )

    def epoch(self, number: int, *, start: int = 0, until: int | None = None) -> Batches:
        """Iterate over one epoch, from a step on.

        until: the epoch at which reading ahead stops. `loader.epoch(0, until=1)` reads epoch 0 alone, as for a validation.
        By default the next epoch is read ahead, unless the same epoch was asked for twice in a row.
        """
        number, start = integer("epoch", number, 0), integer("start", start, 0)
        until = None if until is None else integer("until", until, 0)
        if until is not None and until <= number:
            raise UsageError(
                f"until={until}: must be above the epoch, {number}. Give epochs in all, or {number + 1}."
            )
        if start and start >= len(self):
            raise UsageError(
                f"epoch {number}, step {start}: an epoch has {len(self)} steps, which count from 0."
            )
        return self._from(Position(number, start), until)

    def _from(self, start: Position, until: int | None = None) -> Batches:
        return Batches(_Host(self), self.plan, self.rank, start, self._max_bad, until)

    def set_epoch(self, number: int) -> None:
        """The next `for` is this epoch; of a loaded state that lies in it, the rest."""
        number = integer("epoch", number, 0)
        if self._start is None or self._start.epoch != number:
            self._start = Position(number, 0)

    # --- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Where the loop is, after the batch it was given last; a small JSON-able dict.

        Between two loops: where the next one begins, if `set_epoch` or `load_state_dict` was called; else where the last one was.
        """
        at = self._at
        bad = {"bad": at.bad, "rank": self.rank, "world_size": self.world_size}
        return {"epoch": at.epoch, "step": at.step, **bad, **self._identity()}

    @property
    def _at(self) -> Position:
        """Where a loop is that is within an epoch; else where the next begins, if somebody said so."""
        host, position = self._host(), self._position
        if host is not None and host.runs and position is not None and position.step:
            return position
        return self._start or position or Position(0, 0)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next `for` goes on where the state was taken. Raises UsageError naming what differs from this loader."""
        mine = self._identity()
        differing = [
            f"{name} was {state.get(name)!r}, is {value!r}"
            for name, value in mine.items()
            if state.get(name) != value
        ]
        if "weights" in state and "weights" not in mine:
            differing.append("there were weights, here are none")
        if differing:
            raise UsageError(
                f"this state belongs to another order: {'; '.join(differing)}. Use the same values, or start anew."
            )
        try:
            at = Position(
                *(
                    integer(name, state.get(name, 0 if name == "bad" else None), 0)
                    for name in Position._fields
                )
            )
        except UsageError as error:
            raise UsageError(
                f"this state is no position in an epoch of {len(self)} steps: {error}"
            ) from None
        if at.step >= len(self):
            raise UsageError(
                f"step={at.step} of this state is no position in an epoch of {len(self)} steps."
            )
        if (state.get("rank"), state.get("world_size")) != (self.rank, self.world_size):
            at = at._replace(bad=0)  # those were another rank's: this one may have met none
        self._start = at
        self._host = lambda: None  # a loop that still runs is not where this state was taken

    def _identity(self) -> dict[str, Any]:
        """All that the order depends on."""
        plan = self.plan(0)
        weighted = {} if self._weighting is None else {"weights": self._weighting.fingerprint}
        return weighted | {
            "order": ORDER,
            "data": self.index.fingerprint,
            "seed": plan.seed,
            "global_batch": plan.global_batch,
            "lanes": plan.lane_count,
            "shuffle": plan.shuffle,
            "window": plan.window,
            "tail": plan.tail,
        }

    def report(self) -> Report:
        """What the current or last epoch delivered, what each stage took in seconds, and what held it back.

        A dict of JSON-able values, which a notebook shows as a table; see `EpochStats` for its names.
        """
        return self._meter.report()

    def twin(self) -> Loader:
        """A loader of the same batches that begins where this one's next `for` does, and neither disturbs nor moves this one.

        It decodes in threads: no process is forked beside the threads of a loop that runs. So a transform gets the same `rng`, but
        what it draws from the global generators is not what worker processes would draw.
        """
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        other._pipeline_options = replace(self._pipeline_options, num_workers=0)
        other._pipeline, other._meter, other._host = None, EpochStats(), lambda: None
        return other

    def __reduce__(self) -> tuple[Callable[..., Loader], tuple[Any, ...]]:
        """Copies, pickled or not: a loader of the same batches that has not begun, at the same position."""
        return _copied, (type(self), self._sets, self._options, self._at)

    @property
    def _sets(self) -> tuple[Any, ...]:
        """What a copy is made over."""
        return (self.index,)

    def close(self) -> None:
        """End threads and worker processes. The loader can be used again; it starts new ones."""
        pipeline = self._pipeline
        if pipeline is not None:
            with DeferSignals(WORKER_DEATH):  # what it has ends too, and would drop the word
                pipeline.close()
            if self._pipeline is pipeline:  # a loop in another thread may have begun anew
                self._pipeline = None

    def __repr__(self) -> str:
        return (
            f"Loader({len(self.index)} samples in {len(self.index.shards)} shards, {len(self)} batches of {self.batch_size} "
            f"on rank {self.rank} of {self.world_size}, shuffle_buffer={self.shuffle_buffer} holds about {self._held:.1f} MB)"
        )

    def _repr_html_(self) -> str:
        from wdstrain.loader.notebook import loader_card

        what = "what the transform makes" if self.transform is not None else self.fields
        epoch, step, _ = self._at
        doing = {
            "workers": self.num_workers or "threads",
            "position": f"epoch {epoch}, step {step} of {len(self)}",
        }
        return loader_card(
            self.index, self.plan(0), self.rank, what, self._held, doing, self.report()
        )

    @property
    def _held(self) -> float:
        """MB that the shuffle buffer holds at a time, about."""
        plan = self.plan(0)
        waiting = sum(
            min(plan.window / 2, plan.lane_samples(lane)) for lane in plan.lanes_of(self.rank)
        )
        return waiting * _mean_bytes(self.index) / 1e6 if plan.shuffle else 0.0


class _Host:
    """What a pass over an epoch does to its loader.

    After an error, and when another pass has begun, it lets go of it: a traceback holds the pass for as long as it is kept, in a
    notebook until the next error, and the loader is to end when its user lets go of it. For the same reason no frame here names
    the loader.
    """

    def __init__(self, loader: Loader) -> None:
        self._loader: Loader | None = loader

    def open(self) -> Pipeline:
        if self._loader is None:
            raise WdstrainError(OVER)
        self._displace()  # before it notices: the end of one that lost its place ends nothing
        pipeline = self._loader._pipeline
        # perhaps not all of it is closed: Ctrl-C came meanwhile, or another thread is at it. A forked child makes all of it anew
        if pipeline is not None and (pipeline.closed or pipeline.process != os.getpid()):
            self._loader.close()
            pipeline = None
        if pipeline is None:
            pipeline = Pipeline(
                self._loader.index,
                self._loader.plan,
                self._loader.rank,
                self._loader._pipeline_options,
            )
            pipeline.close_with(self._loader)
            self._loader._pipeline = pipeline
        return pipeline

    @property
    def runs(self) -> bool:
        """Whether this is the pass of its loader."""
        return self._loader is not None

    def begun(self, meter: EpochStats, position: Position) -> None:
        if self._loader is not None:
            self._loader._start, self._loader._meter, self._loader._position = None, meter, position
            self._displace()
            self._loader._host = weakref.ref(self)

    def moved(self, position: Position) -> None:
        if self._loader is not None:
            self._loader._position = position

    def _displace(self) -> None:
        """The pass that began last lets go of the loader."""
        former = self._loader._host() if self._loader is not None else None
        if former is not None and former is not self:
            former._loader = None

    def leave(self) -> None:
        """The loader is another pass's."""
        self._loader = None

    def close(self) -> None:
        loader, self._loader = self._loader, None
        if loader is not None:
            loader.close()


def _copied(
    kind: Callable[..., Loader], sets: tuple[Any, ...], options: dict[str, Any], at: Position | None
) -> Loader:
    loader = kind(*sets, **options)
    loader._start = at
    return loader


def open_shards(urls: Urls, *, cut: bool = False) -> Index:
    """The index of shards of one split; what a walk over headers costs is told by the logger "wdstrain".

    cut: local shards may be shorter than their index says.
    """
    return require_one_split(open_index(urls, note=_log.warning, cut=cut), urls)


@lru_cache(maxsize=1)
def _log_slow_paths() -> None:
    """Log once per process which native parts are missing, so that slower code does the same work."""
    if kernels.library is None:
        _log.warning(
            "The compiled part of wdstrain is missing or older than its source, so slower generic code is used. To get the fast "
            "one, install a C compiler and reinstall wdstrain (in a clone: python scripts/compile.py)."
        )
    if libjpeg_turbo.functions() is None:
        _log.info(
            "libjpeg-turbo 3 was not found, so each JPEG is decoded as a whole, also where a crop takes only a part of it. To get "
            "the faster decoding: pip install turbojpeg"
        )


def open_cache(
    cache_dir: str | os.PathLike[str] | None = None, cache_limit: int | str | None = None
) -> Cache | None:
    """Return the cache of a folder; None if no folder is given. Raises UsageError."""
    if cache_dir is None:
        if cache_limit is not None:
            raise UsageError(
                f"cache_limit={cache_limit!r} limits a cache, and none is asked for. Give cache_dir too."
            )
        return None
    try:
        most = parse_size(cache_limit) if isinstance(cache_limit, str) else cache_limit
    except ValueError as error:
        raise UsageError(f"cache_limit: {error}.") from None
    return Cache(os.fspath(cache_dir), None if most is None else integer("cache_limit", most, 1))


def rank_of(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """(rank, world_size) as given, else as torch.distributed says, else as the environment does, else (0, 1)."""
    if (rank is None) != (world_size is None):
        raise UsageError(
            f"rank={rank} and world_size={world_size} belong together. Give both or none."
        )
    if rank is None or world_size is None:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        else:
            rank, world_size = _environment("RANK", 0), _environment("WORLD_SIZE", 1)
    rank, world_size = integer("rank", rank), integer("world_size", world_size)
    if not 0 <= rank < world_size:
        raise UsageError(f"rank={rank} is not one of {world_size} ranks, which count from 0.")
    return rank, world_size


def _environment(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdigit():
        raise UsageError(
            f"{name}={text!r} in the environment is no number. Unset it, or give rank and world_size."
        )
    return int(text)


def _mean_bytes(index: Index) -> float:
    return float((index.offsets.stop - index.offsets.start).sum()) / max(1, len(index))


def _buffer(index: Index, asked: int | None, lanes: int) -> int:
    try:
        asked = None if asked is None else integer("shuffle_buffer", asked, 1)
    except UsageError as error:
        raise UsageError(f"{error} Use shuffle=False to read in file order.") from None
    fits = max(1, int(_BUFFER_BYTES // max(1.0, _mean_bytes(index)))) // lanes
    # wider than a lane mixes its start with its end; eight times as wide is as good as a shuffle of the whole lane
    widest = _WIDEST * -(-len(index) // lanes)
    return max(1, min(asked if asked is not None else fits, widest))


def _check_fields(index: Index, fields: Mapping[str, Field] | None) -> None:
    if fields is not None and not isinstance(fields, Mapping):
        raise UsageError(
            f"fields={fields!r} is no dict. Write for example fields={{'image': wt.image(size=64)}}."
        )
    for name, field in (fields or {}).items():
        if isinstance(field, type) or not all(
            hasattr(field, part) for part in ("names", "example", "read")
        ):
            raise UsageError(
                f"field {name!r} is {field!r}, which is no field. Write for example wt.image('jpg', size=64)."
            )
        if field.example is not None and not fits_batch_memory(field.example):
            raise UsageError(
                f"field {name!r} has an example of {field.example.dtype!r}, no dtype that torch has. Use for example float32."
            )
        if not any(one in index.fields for one in field.names):
            wanted, found = ", ".join(field.names), ", ".join(index.fields)
            known = ", ".join(reader_of(label) for label in index.labels)
            hint = (
                f" Their labels are read with {known}."
                if known and not isinstance(field, Image)
                else ""
            )
            raise UsageError(
                f"field {name!r} looks for {wanted}; these shards hold {found}. Name one of those.{hint}"
            )


def _warn_of_numbers(index: Index) -> None:
    """Say that raw class numbers of these sets mean different classes, if they do."""
    for field in dict.fromkeys(
        label.field for labels in index.shard_labels for label in labels if label.column is None
    ):
        mine = [
            next((one for one in labels if one.place == (field, None)), None)
            for labels in index.shard_labels
        ]
        found = {
            one.numbering if one is not None else "no label": shard.shown
            for shard, one in zip(index.shards, mine, strict=True)
        }
        if len(found) > 1 and any(one is not None and one.kind == "class" for one in mine):
            _log.warning(
                "%s has different class numbers in these sets: %s. Its bytes are given as packed. fields={'label': wt.label('%s')} "
                "delivers one numbering.",
                field,
                "; ".join(f"{numbering} ({shown})" for numbering, shown in found.items()),
                field,
            )


def takes_rng(transform: Transform) -> bool:
    """Whether a transform wants (sample, rng)."""
    try:
        parameters = inspect.signature(transform).parameters.values()
    except (TypeError, ValueError):
        return False
    needed = [
        p
        for p in parameters
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty
    ]
    return len(needed) == 2
