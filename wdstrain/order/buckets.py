"""Epoch plan in which every batch holds samples of one bucket, such as texts of about one length.

The line of an epoch is that of a `Plan`. Each bucket has a hole of its own in it, and its other
samples are cut by count into equal runs, one for each lane. A lane reads its runs of all buckets
together, forward, and shuffles them as a `Plan` does. So each bucket has as many samples in one lane
as in any other, however the buckets are spread over the shards.

A lane fills batches of a bucket in the order of its shuffle. The n-th batch of a bucket becomes a
step when the last lane has filled its part. The steps are in the order in which that happens. Their
number is the same in each epoch. A plan takes 16 bytes for each sample, of all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from wdstrain.errors import PlanError
from wdstrain.order.order import Ints, Order, Places, Steps
from wdstrain.order.plan import Plan
from wdstrain.order.rng import bits

_NAMED = 3  # buckets that an error names


class Buckets(Order):
    """The order of one epoch in batches of one bucket each.

    codes: the bucket of each sample, int64[samples]. names: of the buckets. per_lane: samples that a
    step of each bucket takes from a lane, int64[buckets]; `batch_size` is the largest batch of them.
    bucket_steps: of each bucket, int64[buckets]. totals: samples of each bucket. The other arguments
    are those of `Plan`. Raises PlanError for a bucket that fills no step.
    """

    tail = "drop"

    def __init__(
        self,
        *,
        counts: Ints,
        codes: Ints,
        names: Sequence[str],
        per_lane: Ints,
        seed: int,
        epoch: int,
        world_size: int,
        lanes: int | None,
        window: int,
        shuffle: bool,
    ) -> None:
        self.seed, self.epoch, self.shuffle, self.world_size = seed, epoch, shuffle, world_size
        self.samples, self.window, self.per_lane = int(counts.sum()), window, per_lane
        self.lane_count = world_size if lanes is None else lanes
        self.lanes_per_rank = self.lane_count // world_size
        self.batch_size = int(per_lane.max()) * self.lanes_per_rank
        self.names, self.totals = tuple(names), np.bincount(codes, minlength=len(names))
        self.bucket_steps = self.totals // (self.per_lane * self.lane_count)
        self._check()
        self.steps = int(self.bucket_steps.sum())
        line = Plan(
            counts=counts, seed=seed, epoch=epoch, batch_size=1, shuffle=shuffle, tail="keep"
        )
        ids = line.ids(0, np.arange(self.samples))
        lane = self._lane_of(codes[ids])
        lanes_ids = [ids[lane == number] for number in range(self.lane_count)]
        # Only its shuffle within a lane is used.
        within = Plan(
            counts=np.array([sum(map(len, lanes_ids))]),
            seed=seed,
            epoch=epoch,
            batch_size=self.lanes_per_rank,
            world_size=world_size,
            lanes=lanes,
            window=window,
            shuffle=shuffle,
        )
        self._lanes = self._filled(lanes_ids, codes, within)
        # rows of a rank before each step. int64[steps + 1]
        self._rows = np.zeros(self.steps + 1, np.int64)
        step_of = np.concatenate([lane.step for lane in self._lanes])
        np.cumsum(np.bincount(step_of) // world_size, out=self._rows[1:])
        self.max_delay = max(map(self._longest_delay, range(world_size)))

    @property
    def left_out(self) -> int:
        """Samples that this epoch does not deliver."""
        return self.samples - int(self._rows[-1]) * self.world_size

    def rows_before(self, rank: int, step: int) -> int:
        """Return how many rows a rank delivers before a step."""
        return int(self._rows[step])

    def delivery(self, rank: int, first: int, stop: int) -> Steps:
        """Return the samples that a rank delivers in the steps [first, stop), by step and lane."""
        ids, step, lane, row = [], [], [], []
        for number, own in enumerate(self._of(rank)):
            inside = np.flatnonzero((own.step >= first) & (own.step < stop))
            ids.append(own.ids[inside])
            step.append(own.step[inside])
            row.append(own.row[inside])
            lane.append(np.full(len(inside), number))
        order = np.lexsort(tuple(map(np.concatenate, (row, lane, step))))
        chosen = np.concatenate(ids)[order]
        firsts = self._rows[first : stop + 1] - self._rows[first]
        return Steps(chosen, chosen, firsts.tolist(), np.ones(len(chosen), bool))

    def reading(self, rank: int, lane: int, start: int, stop: int) -> Places:
        """Return the samples at the places [start, stop) of a lane; see `Order.reading`."""
        own = self._of(rank)[lane]
        step, row = (column[start:stop].astype(np.int64) for column in (own.step, own.row))
        in_lane = np.diff(self._rows)[step] // self.lanes_per_rank
        return Places(own.ids[start:stop], step, row + lane * in_lane)

    def first_place(self, rank: int, lane: int, step: int) -> int:
        """Return the first place of a lane that is read if the epoch starts at `step`."""
        return int(np.argmax(self._of(rank)[lane].step >= step))

    # --- helpers ----------------------------------------------------------------------------------

    def _check(self) -> None:
        """Raise PlanError if there is a bucket that fills no step."""
        empty = np.flatnonzero(self.bucket_steps == 0).tolist()
        if empty:
            named = ", ".join(
                f"{self.names[b]} has {self.totals[b]} of {self.per_lane[b] * self.lane_count}"
                for b in empty[:_NAMED]
            )
            raise PlanError(
                f"{len(empty)} of {len(self.names)} buckets cannot fill one batch on each rank "
                f"({named}{', ...' if len(empty) > _NAMED else ''} samples).",
                "Lower {batch_size}, choose fewer buckets, or leave these samples out with {where}.",
                {"batch_size": ..., "where": ...},
            )

    def _of(self, rank: int) -> list[Places]:
        """Return the lanes of a rank. A row counts the samples of its lane in the step."""
        return self._lanes[rank * self.lanes_per_rank :][: self.lanes_per_rank]

    def _lane_of(self, line: Ints) -> Ints:
        """Return the lane of each sample along the line; `lane_count` for those left out.

        line: the bucket of each sample along the line.
        """
        at = _number_in_bucket(line, self.totals)
        kept = self.bucket_steps * self.per_lane * self.lane_count
        left_out = self.totals - kept
        hole = kept.copy()  # the first sample of each bucket that is left out, among those of it
        if self.shuffle:
            random = bits(np.arange(len(hole)), "bucket hole", self.seed, self.epoch)
            hole = (random % (kept + 1).astype(np.uint64)).astype(np.int64)
        place = at - left_out[line] * (at >= hole[line] + left_out[line])
        lane = place // (kept // self.lane_count)[line]
        lane[(at >= hole[line]) & (at < (hole + left_out)[line])] = self.lane_count
        return np.asarray(lane)

    def _filled(self, lanes_ids: list[Ints], codes: Ints, within: Plan) -> list[Places]:
        """Return the lanes, after their samples filled batches. lanes_ids: samples of each.

        Steps and rows are int32, to save memory.
        """
        first = np.cumsum(self.bucket_steps) - self.bucket_steps  # batch of each bucket
        filled_at, lanes = np.zeros(self.steps, np.int64), []
        for number, ids in enumerate(lanes_ids):
            places = within.order(number, 0, len(ids))
            code = codes[ids[places]]
            batch, row = np.divmod(_number_in_bucket(code, self.totals), self.per_lane[code])
            batch += first[code]
            np.maximum.at(filled_at, batch, np.arange(len(ids)))
            by_place = np.argsort(places)
            lanes.append(Places(ids, batch[by_place].astype("i4"), row[by_place].astype("i4")))
        step_of = np.empty(self.steps, "i4")
        step_of[np.argsort(filled_at, kind="stable")] = np.arange(self.steps)
        return [lane._replace(step=step_of[lane.step]) for lane in lanes]

    def _longest_delay(self, rank: int) -> int:
        """Return the most samples that a rank reads from one of them until its delivery."""
        # places of each lane that are read before the end of each step
        read = [self._read_by(lane) for lane in self._of(rank)]
        total, longest = np.append(0, sum(read)), 0
        for lane, until in zip(self._of(rank), read, strict=True):
            begun = np.searchsorted(until, np.arange(len(lane.ids)), side="right")
            longest = max(longest, int((total[lane.step + 1] - total[begun]).max()))
        return longest

    def _read_by(self, lane: Places) -> Ints:
        """Return how many places of a lane are read when each step is delivered. int64[steps]"""
        needed = np.zeros(self.steps, np.int64)
        np.maximum.at(needed, lane.step, np.arange(1, len(lane.ids) + 1))
        return np.maximum.accumulate(needed)


def _number_in_bucket(codes: Ints, totals: Ints) -> Ints:
    """Return how many samples of its bucket come before each sample. int64, as `codes`."""
    order = np.argsort(codes, kind="stable")
    counts = np.bincount(codes, minlength=len(totals))
    number = np.empty(len(codes), np.int64)
    number[order] = np.arange(len(codes)) - np.repeat(np.cumsum(counts) - counts, counts)
    return number
