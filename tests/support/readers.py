"""A reader of complete samples, without a loader."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from wdstrain.decode.batch_slots import Layout, Slots
from wdstrain.order.order import Order
from wdstrain.reader.blocks import step_blocks
from wdstrain.reader.reader import CollectedBatch, Reader, ReadRun
from wdstrain.reader.resources import ReadOptions, ReadResources
from wdstrain.shards.index import Index


class Collected(NamedTuple):
    """A batch, which is valid until the next is requested, and its reader."""

    reader: Reader
    run: ReadRun
    batch: CollectedBatch


def collected_batches(
    index: Index, plans: Callable[[int], Order], step: int = 0, **options: Any
) -> Iterator[Collected]:
    """Yield the batches of epoch 0 from a step on. options: of `ReadOptions`."""
    slots = Slots(Layout.of({}, 1), busy=2, spare=0)
    read_options = ReadOptions(**{"ahead": 1, "in_flight": 1} | options)
    reader = Reader(ReadResources(index, plans, 0, read_options, slots))
    try:
        run = reader.start(0, 0, step, until=1)
        for block in step_blocks(plans(0), 0, step):
            for number in range(len(block)):
                batch = run.collect(block, number)
                yield Collected(reader, run, batch)
                slots.lease(batch.slot, 0)  # frees the slot
                run.release(batch.batch_number)
    finally:
        reader.close()


def wait_until_paused(run: ReadRun) -> None:
    """Wait until the reader is as far ahead as it may be."""
    end = time.monotonic() + 30
    while not run.is_paused:
        assert time.monotonic() < end
        time.sleep(0.0005)
