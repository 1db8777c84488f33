"""What an epoch would do, told before a sample is read: what each rank reads and holds, how well it is shuffled, and with how
small a buffer it would still be.

The orders are those of real plans, the one asked for and others that differ in their buffer alone, so what is told is what
happens. A large epoch is looked at in parts, a small set over several epochs, since chance is large in a small one; how much was
looked at is told with it. Labels are the one thing that is read, a few bytes each, of samples in batches drawn at random: pairs
within batches tell how classes are mixed, and samples drawn one by one would hardly ever share a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from wdstrain.errors import UsageError
from wdstrain.foresight.itinerary import Reads, Waiting, reads_of, seen, share_of, waiting
from wdstrain.foresight.outlook import lines, part, verdict
from wdstrain.foresight.prospect import Mix, Prospect, parts_neighbours
from wdstrain.foresight.shuffling import (
    NeighbourCount,
    Neighbours,
    batches_drawn,
    class_mix,
    parts_of,
)
from wdstrain.loader.loader import Loader, open_shards
from wdstrain.order.plan import Plan, Tail, integer
from wdstrain.shards.index import Index, Label
from wdstrain.shards.labels import MOST_FAR, classes_in, label_bytes
from wdstrain.shards.offsets import Ints
from wdstrain.storage.addresses import Urls
from wdstrain.storage.remote import is_remote

_MOST = 1 << 21  # samples of an epoch that are looked at for what ranks hold
_MOST_MIXED = 1 << 18  # for how well one buffer mixes, in parts of an epoch or over several
_MOST_EPOCHS, _MOST_LANES = 32, 2048  # of a small set; lanes cost something, however short they are
_MOST_LABELS = 20_000
_FEW_LABELS = 500  # too few to say how a buffer mixes classes

Tell = Callable[[int, int], None]


class Foresight(Prospect):
    """What an epoch would do, as `foresee` finds it; it prints as a table, and shows figures in a notebook."""

    def __str__(self) -> str:
        return "\n".join(lines(self))

    def __repr__(self) -> str:
        return f"Foresight({self.samples} samples, {self.world_size} ranks, {self.steps} steps, good enough: {self.is_good})"

    def _repr_html_(self) -> str:
        return part(self)

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        enough = None if self.enough is None else self.enough.buffer
        return {
            **asdict(self),
            "good_enough": self.is_good,
            "smallest_good_buffer": enough,
            "verdict": verdict(self),
        }


def foresee(
    urls: Urls | Index,
    *,
    batch_size: int = 64,
    world_size: int = 1,
    lanes: int | None = None,
    shuffle: bool = True,
    shuffle_buffer: int | None = None,
    seed: int = 0,
    epoch: int = 0,
    tail: Tail = "drop",
    label: str | None = None,
    read_labels: bool = True,
    tell: Tell | None = None,
) -> Foresight:
    """What an epoch of a `Loader` with these options would do on all of its ranks; nothing is read but some labels.

    label: of classes, default the only one there is. read_labels: False leaves the look at classes away, and reads nothing. At
    most 20 000 labels are read, of shards on a server 200. tell(done, of): how reading them goes on.
    It prints as a table, and shows figures in a notebook. Raises what `Loader` raises, and UsageError for a label that is not
    there or has no classes.
    """
    epoch = integer("epoch", epoch, 0)

    def loader(buffer: int | None, shuffled: bool) -> Loader:
        words: dict[str, Any] = {
            "batch_size": batch_size,
            "lanes": lanes,
            "seed": seed,
            "tail": tail,
        }
        return Loader(
            index, shuffle_buffer=buffer, shuffle=shuffled, rank=0, world_size=world_size, **words
        )

    index = urls if isinstance(urls, Index) else open_shards(urls)
    asked, why = _label(index, label) if read_labels else (None, "labels were not to be read")
    now = loader(shuffle_buffer, shuffle)
    plan, widest = _plan(now, epoch), loader(2**31 - 1, True).shuffle_buffer
    reads = [
        [reads_of(index, plan, lane) for lane in plan.lanes_of(rank)] for rank in range(world_size)
    ]
    held, steps, whole = _held(index, plan)
    plans = [replace(plan, window=size, shuffle=True, _blocks={}) for size in _sizes(plan, widest)]
    plans = plans if shuffle else [plan, *plans]
    known = _Classes(index, asked)
    looked = [_look(index, one, known) for one in plans]
    at = next(
        i for i, one in enumerate(plans) if one.window == plan.window and one.shuffle == shuffle
    )
    if asked is not None and not known.all:
        looked = [
            _drawn(one, share) for one, share in zip(looked, known.shares(looked, at), strict=True)
        ]
    known.read([one.ids for one in looked], tell)
    mixes = tuple(_mix(one, known) for one in looked)
    return Foresight(
        samples=len(index),
        shards=len(index.shards),
        bytes=sum(shard.bytes for shard in index.shards),
        on_a_server=any(is_remote(shard.path) for shard in index.shards),
        batch_size=batch_size,
        world_size=world_size,
        lanes=plan.lane_count,
        shuffle=shuffle,
        shuffle_buffer=plan.window,
        seed=seed,
        epoch=epoch,
        tail=tail,
        steps=plan.steps,
        left_out=plan.left_out,
        exactly_once=whole and _once(plan, [one for of_rank in reads for one in of_rank]),
        steps_looked_at=steps,
        epochs_mixed=_epochs(plan),
        ranks=tuple(
            share_of(index, plan, rank, reads[rank], held[rank]) for rank in range(world_size)
        ),
        now=mixes[at],
        sizes=mixes,
        packed_at_random=isinstance(options := index.info.get("options"), dict)
        and options.get("shuffle") is True,
        label=asked.name if asked is not None else None,
        labels_read=known.count,
        why_no_classes=why,
    )


# --- what ranks do ---------------------------------------------------------------------------------------------------


def _plan(loader: Loader, epoch: int) -> Plan:
    plan = loader.plan(epoch)
    assert isinstance(plan, Plan)
    return plan


def _held(index: Index, plan: Plan) -> tuple[list[Waiting], int, bool]:
    """What waits on each rank at the steps that are looked at; how many these are; whether no place is delivered twice."""
    parts, found, once = parts_of(plan, _MOST), [], True
    for rank in range(plan.world_size):
        sums = [np.zeros((2, stop - first), np.int64) for first, stop in parts]
        for lane in plan.lanes_of(rank):
            for total, (first, stop) in zip(sums, parts, strict=True):
                places = seen(plan, lane, first, stop)
                once = once and len(np.unique(places.position)) == len(places.position)
                total += np.stack(waiting(index, plan, lane, first, stop, places))
        found.append(Waiting(*np.concatenate(sums, 1)))
    return found, sum(stop - first for first, stop in parts), once


def _once(plan: Plan, reads: list[Reads]) -> bool:
    """Whether what the lanes read are different samples, and all that are not left out."""
    lanes = [one for lane, one in enumerate(reads) if plan.lane_samples(lane)]
    first, count = (
        np.concatenate([one.ids for one in lanes]),
        np.concatenate([one.samples for one in lanes]),
    )
    order = np.argsort(first)
    apart = (first[order][1:] >= (first + count)[order][:-1]).all()
    return bool(apart) and int(count.sum()) == plan.samples - plan.left_out


# --- how it mixes ----------------------------------------------------------------------------------------------------


class _Looked(NamedTuple):
    """What the order of one buffer shows. batch, ids: int64[n], samples whose classes are wanted, and their batches."""

    plan: Plan
    neighbours: Neighbours | None
    samples: float
    bytes: float
    batch: Ints
    ids: Ints


class _Classes:
    """The classes of samples whose labels were read."""

    def __init__(self, index: Index, label: Label | None) -> None:
        self._index, self._label = index, label
        far = any(is_remote(shard.path) for shard in index.shards)
        self.most = MOST_FAR if far else _MOST_LABELS
        self.all = label is not None and len(index) <= self.most
        self.kind = np.full(
            len(index), -1, np.int64
        )  # number of the class of each sample, -1: not known
        self.count = 0

    def shares(self, looked: list[_Looked], now: int) -> list[int]:
        """How many labels tell of each buffer: of the one asked for and those that part neighbours twice as many."""
        weights = [
            2 if i == now or parts_neighbours(one.neighbours) else 1 for i, one in enumerate(looked)
        ]
        if self.most // len(looked) < _FEW_LABELS:
            weights = [int(i == now) for i in range(len(looked))]
        return [self.most * weight // sum(weights) for weight in weights]

    def read(self, wanted: list[Ints], tell: Tell | None) -> None:
        if self._label is None:
            return
        ids, numbers = (
            np.arange(len(self.kind)) if self.all else np.unique(np.concatenate(wanted)),
            dict[str, int](),
        )
        for number, data in label_bytes(self._index, self._label.field, ids):
            names = classes_in(
                data, self._label.column, self._index.label_in_sample(self._label, number).classes
            )
            if len(names) == 1:
                self.kind[number] = numbers.setdefault(names[0], len(numbers))
            self.count += 1
            if tell is not None:
                tell(self.count, len(ids))

    @property
    def counts(self) -> npt.NDArray[np.int64] | None:
        """Samples of each class in the whole set, if all were read."""
        return (
            np.bincount(self.kind[self.kind >= 0])
            if self.all and (self.kind >= 0).sum() > 1
            else None
        )


def _sizes(plan: Plan, widest: int) -> list[int]:
    """Buffers that are tried: powers of two from a lane's part of a batch to twice a lane, the widest, and the one asked for.

    Of a large set none that would hold millions of samples: nobody has the memory, and to look at it takes long.
    """
    most = min(
        2 * plan.lane_samples(0),
        widest,
        max(plan.samples_per_step_per_lane, _MOST // plan.lane_count),
    )
    found = {
        1 << power
        for power in range((plan.samples_per_step_per_lane - 1).bit_length(), most.bit_length())
    }
    found |= {widest} if plan.samples <= _MOST else set()
    return sorted(found | {plan.window} if plan.shuffle else found)


def _epochs(plan: Plan) -> int:
    return max(1, min(_MOST_MIXED // plan.samples, _MOST_LANES // plan.lane_count, _MOST_EPOCHS))


def _look(index: Index, plan: Plan, known: _Classes) -> _Looked:
    count, held = NeighbourCount(plan, index.first), list[Waiting]()
    batch: list[Ints] = [np.zeros(0, np.int64)]
    ids: list[Ints] = [np.zeros(0, np.int64)]
    for later in range(_epochs(plan)):
        one = replace(plan, epoch=plan.epoch + later, _blocks={}) if later else plan
        for first, stop in parts_of(one, _MOST_MIXED):
            lanes = [seen(one, lane, first, stop) for lane in range(one.lane_count)]
            count.add(lanes)
            if not later:
                held += [
                    waiting(index, one, lane, first, stop, places)
                    for lane, places in enumerate(lanes)
                ]
            if known.all:
                batch += [places.step + later * one.steps for places in lanes]
                ids += [places.ids for places in lanes]
    lanes_of_a_rank = plan.lane_count / plan.world_size
    samples, size = (
        lanes_of_a_rank * float(np.concatenate(one).mean()) for one in zip(*held, strict=True)
    )
    return _Looked(plan, count.result(), samples, size, np.concatenate(batch), np.concatenate(ids))


def _drawn(looked: _Looked, most: int) -> _Looked:
    """With samples of batches drawn at random, whose labels are to be read."""
    if not most:
        return looked
    rows = batches_drawn(looked.plan, most)
    return looked._replace(
        batch=np.repeat(np.arange(len(rows)), rows.shape[1]), ids=rows.reshape(-1)
    )


def _mix(looked: _Looked, known: _Classes) -> Mix:
    plan, kind = looked.plan, known.kind[looked.ids]
    there = kind >= 0
    classes = class_mix(
        looked.batch[there],
        kind[there],
        size=plan.global_batch,
        samples=plan.samples - plan.left_out,
        counts=known.counts,
        steps=plan.steps,
    )
    return Mix(plan.window, plan.shuffle, looked.samples, looked.bytes, looked.neighbours, classes)


def _label(index: Index, asked: str | None) -> tuple[Label | None, str]:
    """The label whose classes are looked at, or why there is none."""
    labels = {one.name: one for one in index.labels}
    if (
        "cls" in index.fields
        and not index.shard_labels
        and not any(one.field == "cls" for one in index.labels)
    ):
        labels.setdefault("cls", Label("cls", "class", "cls"))
    if asked is not None:
        if asked not in labels:
            raise UsageError(
                f"there is no label {asked!r} in the index; it has: {', '.join(labels) or 'none'}."
            )
        if labels[asked].kind != "class":
            raise UsageError(
                f"the label {asked!r} is of the kind {labels[asked].kind}: how evenly classes are mixed is not told by it."
            )
        return labels[asked], ""
    found = [one for one in labels.values() if one.kind == "class"]
    if len(found) == 1:
        return found[0], ""
    return (
        None,
        f"there are several labels; name one with --label: {', '.join(one.name for one in found)}"
        if found
        else "there is no label of classes",
    )
