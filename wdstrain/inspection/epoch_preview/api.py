"""`wt.plan_epoch`: what an epoch of a `Loader` will do, without reading a sample.

The orders are those of real plans: of the chosen buffer, and of others. Of a large epoch, memory
and shuffle quality are computed for some steps in its middle. Classes come from the column of the
index.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pyarrow.compute as pc

from wdstrain.errors import UsageError
from wdstrain.inspection.epoch_preview.measure import (
    Reads,
    buffer_quality,
    rank_share,
    reads_of,
)
from wdstrain.inspection.epoch_preview.preview import EpochPreview
from wdstrain.inspection.options import PlanOptions
from wdstrain.loader.loader import Loader
from wdstrain.order.plan import Plan
from wdstrain.runtime.options import takes
from wdstrain.shards.index import Index
from wdstrain.shards.kinds import ColumnInfo
from wdstrain.shards.label_values import MOST_FAR, classes_in, label_bytes
from wdstrain.shards.offsets import Ints
from wdstrain.shards.resolve import open_shards
from wdstrain.storage.remote import is_remote

_MAX_SAMPLES = 1 << 21  # of an epoch for which memory is computed
_MAX_MIXED = 1 << 18  # of an epoch for which shuffle quality is computed, for each buffer
_MAX_LABELS = 20_000  # that are read from local shards, if the index has no column

Progress = Callable[[int, int], None]


@takes(PlanOptions)
def plan_epoch(options: PlanOptions) -> EpochPreview:
    """Return a preview of an epoch of a `Loader` with these options, on all of its ranks.

    Classes come from the index. If it has no column of them, up to 20 000 labels are read (200 from
    a server). Raises what `Loader` raises, and UsageError for a label that does not exist or has no
    classes.
    """
    index = open_shards(options.urls)
    index = index if options.where is None else index.where(options.where)

    def loader(buffer: int | None, *, shuffled: bool) -> Loader:
        return Loader(
            index,
            batch_size=options.batch_size,
            lanes=options.lanes,
            seed=options.seed,
            tail=options.tail,
            shuffle=shuffled,
            shuffle_buffer=buffer,
            rank=0,
            world_size=options.world_size,
        )

    chosen, why = _label(index, options.label)
    plan = loader(options.shuffle_buffer, shuffled=options.shuffle).plan(options.epoch)
    assert isinstance(plan, Plan)
    widest = loader(2**31 - 1, shuffled=True).shuffle_buffer
    ranks = range(options.world_size)
    reads = [
        [reads_of(index, plan, rank, lane) for lane in range(plan.lanes_per_rank)] for rank in ranks
    ]
    steps = _measured_steps(plan, _MAX_SAMPLES)
    codes, read = None, 0
    if chosen is not None:
        codes, read, why = _class_codes(index, chosen, options.progress)
    plans = [replace(plan, window=size, shuffle=True, _blocks={}) for size in _sizes(plan, widest)]
    plans = plans if options.shuffle else [plan, *plans]
    mixed_steps = _measured_steps(plan, _MAX_MIXED)
    sizes = tuple(buffer_quality(index, one, codes, mixed_steps) for one in plans)
    packing = index.info.get("options")
    return EpochPreview(
        samples=len(index),
        shards=len(index.shards),
        bytes=sum(shard.bytes for shard in index.shards),
        is_remote=any(is_remote(shard.path) for shard in index.shards),
        batch_size=options.batch_size,
        world_size=options.world_size,
        lanes=plan.lane_count,
        shuffle=options.shuffle,
        shuffle_buffer=plan.window,
        seed=options.seed,
        epoch=options.epoch,
        tail=options.tail,
        steps=plan.steps,
        left_out=plan.left_out,
        exactly_once=_is_once(plan, [one for of_rank in reads for one in of_rank]),
        steps_measured=steps[1] - steps[0],
        ranks=tuple(rank_share(index, plan, rank, reads[rank], steps) for rank in ranks),
        quality=next(
            one for one in sizes if (one.buffer, one.shuffle) == (plan.window, options.shuffle)
        ),
        sizes=sizes,
        was_shuffled=isinstance(packing, dict) and packing.get("shuffle") is True,
        label=chosen.name if chosen is not None else None,
        labels_read=read,
        why_no_classes=why,
    )


# --- parts ----------------------------------------------------------------------------------------


def _measured_steps(plan: Plan, most: int) -> tuple[int, int]:
    """Return the steps [first, stop) to measure: all, or some in the middle with `most` samples."""
    count = max(1, min(plan.steps, most // plan.global_batch))
    first = (plan.steps - count) // 2
    return first, first + count


def _is_once(plan: Plan, reads: list[Reads]) -> bool:
    """Return whether the lanes read different samples, and all that are not left out."""
    lanes = [lane_reads for lane, lane_reads in enumerate(reads) if plan.lane_samples(lane)]
    first = np.concatenate([lane_reads.ids for lane_reads in lanes])
    count = np.concatenate([lane_reads.samples for lane_reads in lanes])
    order = np.argsort(first)
    is_apart = (first[order][1:] >= (first + count)[order][:-1]).all()
    return bool(is_apart) and int(count.sum()) == plan.samples - plan.left_out


def _sizes(plan: Plan, widest: int) -> list[int]:
    """Return the buffers to try: powers of two, the widest, and the chosen one.

    From a lane's part of a batch to twice a lane, but none that holds millions of samples.
    """
    most = max(plan.samples_per_step_per_lane, _MAX_SAMPLES // plan.lane_count)
    most = min(2 * plan.lane_samples(0), widest, most)
    least = (plan.samples_per_step_per_lane - 1).bit_length()
    sizes = {1 << power for power in range(least, most.bit_length())}
    sizes |= {widest} if plan.samples <= _MAX_SAMPLES else set()
    return sorted(sizes | {plan.window} if plan.shuffle else sizes)


def _class_codes(
    index: Index, label: ColumnInfo, progress: Progress | None
) -> tuple[Ints | None, int, str]:
    """Return (class of each sample, labels read from shards, why there are no classes)."""
    column = next((known for known in index.columns if known.place == label.place), None)
    if column is not None:
        values = column.values if column.kind == "class" else column.values.dictionary_encode()
        return np.asarray(pc.fill_null(values.indices, -1)).astype(np.int64), 0, ""
    remote = any(is_remote(shard.path) for shard in index.shards)
    if len(index) > (MOST_FAR if remote else _MAX_LABELS):
        return (
            None,
            0,
            (
                f"the index has no column of them. Run: wdstrain index DIR --columns "
                f"{label.stored_as}"
            ),
        )
    codes, numbers, read = np.full(len(index), -1, np.int64), dict[str, int](), 0
    for i, data in label_bytes(index, label.field, np.arange(len(index))):
        names = classes_in(data, label.entry, index.label_in_sample(label, i).classes)
        if len(names) == 1:
            codes[i] = numbers.setdefault(names[0], len(numbers))
        read += 1
        if progress is not None:
            progress(read, len(index))
    return codes, read, "" if len(numbers) > 1 else "all samples have one class, or none"


def _label(index: Index, name: str | None) -> tuple[ColumnInfo | None, str]:
    """Return (the label with classes, why there is none)."""
    labels = {label.name: label for label in index.labels}
    undeclared = set(index.fields) - {label.field for label in index.labels}
    if "cls" in undeclared and not index.shard_labels:
        labels.setdefault("cls", ColumnInfo("cls", "class", "cls"))
    if name is not None:
        if name not in labels:
            known = ", ".join(labels) or "none"
            raise UsageError(f"there is no label {name!r}. Use one of: {known}.")
        if not labels[name].is_class:
            raise UsageError(f"label {name!r} has the kind {labels[name].kind}: must be class.")
        return labels[name], ""
    with_classes = [label for label in labels.values() if label.is_class]
    if len(with_classes) == 1:
        return with_classes[0], ""
    if with_classes:
        names = ", ".join(label.name for label in with_classes)
        return None, f"there are several labels. Choose one (label): {names}"
    return None, "there is no label with classes"
