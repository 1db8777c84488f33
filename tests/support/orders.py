"""Orders, step by step and lane by lane."""

from __future__ import annotations

from typing import NamedTuple

from wdstrain.order.order import Order


class Row(NamedTuple):
    """Where a sample is delivered."""

    step: int
    row: int


def batch_of(order: Order, rank: int, step: int) -> list[int]:
    """Return the sample ids of one step of a rank."""
    ids: list[int] = order.delivery(rank, step, step + 1).ids.tolist()
    return ids


def lane_of(order: Order, rank: int, lane: int, stride: int = 1 << 40) -> list[tuple[int, Row]]:
    """Return the samples of a lane in the order of reading. stride: places that are asked at once."""
    start, entries = 0, list[tuple[int, Row]]()
    while len((places := order.reading(rank, lane, start, start + stride)).ids):
        columns = (column.tolist() for column in places)
        entries += [(number, Row(step, row)) for number, step, row in zip(*columns, strict=True)]
        start += stride
    return entries


def check_reading(order: Order, rank: int) -> None:
    """Check that lanes read each row of a rank once, with the sample that is delivered there."""
    steps, entries = range(order.steps), list[tuple[int, Row]]()
    expected = [(id, Row(s, row)) for s in steps for row, id in enumerate(batch_of(order, rank, s))]
    for lane in range(order.lanes_per_rank):
        whole = lane_of(order, rank, lane)
        assert lane_of(order, rank, lane, 7) == whole, order
        entries += whole
        for step in steps:
            places = order.reading(rank, lane, 0, order.first_place(rank, lane, step))
            assert not (places.step >= step).any(), order
    assert sorted(entries, key=lambda entry: entry[1]) == expected, order
