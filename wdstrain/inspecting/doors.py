"""What is in some shards, at once or exactly: `info`.

What an index knows costs nothing, so it is told exactly: samples, sizes of fields, splits, and classes where the conversion
counted them. What only the values know is told from some of them. Shards without an index are looked into within bounds
(`glimpses`), and all that follows from those samples is called an estimate; `exact` walks over every header, which is remembered,
and reads every label. A damaged shard is named and left away, and the others are told of.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from wdstrain.errors import WdstrainError
from wdstrain.inspecting import histograms
from wdstrain.inspecting.contents import Looker
from wdstrain.inspecting.dimensions import of_all
from wdstrain.inspecting.facts import FieldFacts, Info, Looked, Sizes
from wdstrain.inspecting.glimpses import beginnings, evenly, look_into
from wdstrain.inspecting.histograms import Counting, Histogram
from wdstrain.inspecting.provenance import ignored, made
from wdstrain.inspecting.sampling import Sampler
from wdstrain.report.printing import printable
from wdstrain.shards.index import Index, Label, Shard, join
from wdstrain.shards.index_io import check_size
from wdstrain.shards.offsets import Ints, Offsets
from wdstrain.shards.resolve import Note, gather, recall, walked
from wdstrain.storage.addresses import Urls
from wdstrain.storage.remote import name_of

Progress = Callable[[str, int, int], None]  # (what is done, how many, of how many)
Floats = npt.NDArray[np.float64]

_VALUES = 200  # samples whose values are looked at
_LABELS = 2_000  # labels that are read, where not all are
_CLASSES = ("cls", "cls2", "class")  # fields that hold class numbers where no index says so
_ASKED = 64  # labels that are asked for one by one, where none lies in the first MB of a shard
_KEYS = 3


def info(
    urls: Urls | Index,
    *,
    exact: bool = False,
    note: Note | None = None,
    progress: Progress | None = None,
) -> Info:
    """What is in the shards that `urls` mean: samples, sizes, fields, pictures, labels, splits, and how they were made.

    exact: shards without an index are walked over whole, which is remembered and told to `note`, and every label is read, which
    `progress` follows. Otherwise at most 3 MB of each of 8 such shards are read, and Info.exact tells whether that was all of
    them. Raises UsageError for addresses that mean nothing, ShardError or StorageError where no shard can be read; what is wrong
    with some of several is in Info.findings.
    """
    found = _Gathered(exact, note)
    index = urls if isinstance(urls, Index) else gather(urls, found.sound, found.unindexed)
    known = index.pick(i for i, shard in enumerate(index.shards) if shard.path not in found.fresh)
    seen = look_into(list(found.fresh)) if found.fresh else None
    index = join(
        [part for part in (known, seen.index if seen else None) if part is not None and part.shards]
        or [known]
    )
    found.failed += seen.errors if seen else []
    if not index.shards and found.failed:
        raise _all_wrong(found.failed)
    begun = beginnings(known)
    found.failed += [one.error for one in begun if one.error is not None]
    sampler = Sampler(
        index, {**{one.path: one.head for one in begun}, **(seen.heads if seen else {})}
    )
    weights = None
    if seen is not None and not seen.exact:  # what each sample of the index stands for
        each = seen.samples / max(1, len(seen.index))
        weights = np.repeat([1.0, each], [len(known), len(seen.index)])
    contents = _contents(index, sampler, weights)
    counts = [*known.counts.tolist(), *(seen.counts if seen else [])]
    size, samples = sum(shard.bytes for shard in index.shards), sum(counts)
    if index.is_selection:  # its shards hold other samples too
        size = int((index.offsets.stop - index.offsets.start).sum())
    splits: Counter[str] = Counter()
    for shard, count in zip(index.shards, counts, strict=True):
        splits[shard.split] += count
    return Info(
        samples=samples,
        shards=len(index.shards),
        bytes=size,
        splits=dict(splits),
        fields=tuple(map(printable, index.fields)),
        labels=index.labels,
        info={name: value for name, value in index.info.items() if name != "states"},
        exact=weights is None,
        error=seen.error * seen.samples / max(1, samples) if seen and weights is not None else 0.0,
        overhead=max(0, size - sum(one.sizes.total for one in contents)),
        per_shard=of_all(counts),
        split_shards=dict(Counter(shard.split for shard in index.shards)),
        made=tuple(dict.fromkeys(map(made, found.infos))),
        ignored=dict(
            sum(
                (Counter(ignored(one)) for one in found.infos),
                Counter(seen.ignored if seen else {}),
            )
        ),
        keys=tuple(printable(index.key(i)) for i in range(min(_KEYS, len(index)))),
        contents=contents,
        histograms=_histograms(index, sampler, weights, exact, progress),
        looked=Looked(seen.looked_into, len(seen.index), seen.requests, seen.read)
        if seen
        else None,
        disagreements=_disagreements(index),
        findings=tuple(
            dict.fromkeys(printable(str(one)) for one in [*found.failed, *sampler.errors])
        ),
    )


def _disagreements(index: Index) -> dict[str, str]:
    """Why the sets have no label together, by the places that differ: a loader refuses these too."""
    places = dict.fromkeys(label.place for labels in index.shard_labels for label in labels)
    found = {"/".join(filter(None, place)): index.disagreement(*place) for place in places}
    return {printable(place): printable(why) for place, why in found.items() if why}


class _Gathered:
    """What is met while the shards of an address are gathered: how they were made, what is wrong, which no index lists."""

    def __init__(self, exact: bool, note: Note | None) -> None:
        self._exact, self._note = exact, note
        self.infos: list[dict[str, Any]] = []
        self.failed: list[WdstrainError] = []
        self.fresh: dict[str, None] = {}

    def sound(self, part: Index) -> Index:
        """Those shards of an index that have the sizes it says."""
        self.infos.append(part.info)
        good = []
        for number, shard in enumerate(part.shards):
            try:
                check_size(shard)
                good.append(number)
            except WdstrainError as error:
                self.failed.append(error)
        return part.pick(good)

    def unindexed(self, paths: list[str]) -> Index:
        """Shards of one folder that no index lists: walked over or remembered; the others with no samples yet."""
        part = walked(paths, self._note, self.failed) if self._exact else recall(paths)
        self.infos.append(part.info)
        if self._exact:
            return part
        fresh = [path for path in paths if name_of(path) not in part.shard_numbers]
        self.fresh |= dict.fromkeys(fresh)
        blank = Index(tuple(Shard(path, 0, 0) for path in fresh), (), Offsets.of([], []))
        return join([part, blank]) if fresh else part


def _contents(index: Index, sampler: Sampler, weights: Floats | None) -> tuple[FieldFacts, ...]:
    """What each field is, and how large."""
    lookers = [Looker(name) for name in index.fields]
    for number, value in sampler.values(sampler.ids(_VALUES)):
        lookers[number].add(value)
    table, of_members = index.offsets, None
    if weights is not None:
        of_members = np.repeat(weights, np.diff(table.member_first))
    found = []
    for number, name in enumerate(index.fields):
        rows = np.flatnonzero(table.member_field == number)
        if not len(rows):
            continue  # of other shards of the set
        stands_for = of_members[rows] if of_members is not None else np.ones(len(rows))
        samples, sizes = round(float(stands_for.sum())), _sizes(table.member_size[rows], stands_for)
        found.append(FieldFacts(printable(name), samples, sizes, lookers[number].content()))
    return tuple(found)


def _sizes(sizes: Ints, weights: Floats) -> Sizes:
    """weights: what each stands for."""
    order = np.argsort(sizes, kind="stable")
    below = np.cumsum(weights[order])  # values up to each, in ascending order
    places = np.searchsorted(below, below[-1] * np.array([0.0, 0.5, 0.99]) - 1e-9)
    low, middle, high = (int(sizes[order[place]]) for place in places)
    return Sizes(low, middle, high, int(sizes[order[-1]]), round(float((sizes * weights).sum())))


def _histograms(
    index: Index, sampler: Sampler, weights: Floats | None, exact: bool, progress: Progress | None
) -> tuple[Histogram, ...]:
    """What each label comes to: as the index says, or by all labels, or by some. What lies in one field is read once."""
    names = (
        () if index.shard_labels else _CLASSES
    )  # of sets whose numbers mean different classes, a number says nothing
    labels = index.labels or tuple(
        Label(name, "class", name) for name in names if name in index.fields
    )
    found = {
        label: histogram
        for label in labels
        if (histogram := histograms.recorded(index, label)) is not None
    }
    ids = np.arange(len(index)) if exact else sampler.ids(_LABELS, whole=True)
    asked = not len(ids)  # no sample is small enough to be at hand
    if asked:
        ids = np.array(evenly(len(index), _ASKED), np.int64)
    scale, every = len(index) / max(1, len(ids)), weights is None and len(ids) == len(index)
    for field in dict.fromkeys(label.field for label in labels if label not in found):
        counting = {
            label: Counting(label)
            for label in labels
            if label.field == field and label not in found
        }
        for done, (i, data) in enumerate(sampler.labels(field, ids, through=exact, asked=asked)):
            if progress and exact:
                progress(f"reading {field}", done, len(ids))
            for label, one in counting.items():
                one.add(
                    data,
                    scale if weights is None else scale * float(weights[i]),
                    index.label_in_sample(label, i),
                )
        found |= {label: one.histogram(len(ids), exact=every) for label, one in counting.items()}
    return tuple(found[label] for label in labels)


def _all_wrong(failed: list[WdstrainError]) -> WdstrainError:
    """The first of what is wrong with all shards, and how many more there are."""
    more = f" None of the other {len(failed) - 1} can be read either." if len(failed) > 1 else ""
    return type(failed[0])(f"{failed[0]}{more}")
