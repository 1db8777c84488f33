"""What loaders deliver, and a reader of complete samples without a loader."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any, NamedTuple

from wdstrain.decode.batches import ReadBatch
from wdstrain.order.order import Order
from wdstrain.reader.reader import Reader
from wdstrain.reader.run import Run
from wdstrain.shards.index import Index


def by_key(batches: Iterable[Mapping[str, Any]], field: str) -> dict[str, Any]:
    """Return {key: value of a field} of all delivered samples; a key comes once."""
    pairs = [pair for b in batches for pair in zip(b["__key__"], b[field], strict=True)]
    assert len(dict(pairs)) == len(pairs), "a key was delivered twice"
    return dict(pairs)


class Collected(NamedTuple):
    """A batch, which is valid until the next is requested, and its reader."""

    reader: Reader
    run: Run
    batch: ReadBatch


def collected_batches(
    index: Index, orders: Callable[[int], Order], step: int = 0, **options: Any
) -> Generator[Collected, None, None]:
    """Yield the batches of epoch 0 from a step on. options: of `Reader`."""
    reader = Reader(index, orders, 0, **{"ahead": 1, "in_flight": 1} | options)
    run = Run(reader, 0, step, until=1)
    try:
        run.start()
        while (batch := run.next()) is not None:
            yield Collected(reader, run, batch)
            run.release(batch.number)
    finally:
        run.close()


def wait_until_paused(run: Run) -> None:
    """Wait until the reader is as far ahead as it may be."""
    end = time.monotonic() + 30
    while not run.is_paused:
        assert time.monotonic() < end
        time.sleep(0.0005)
