"""Text of a stall warning: the stage that is stuck, its shard and key, and its Python stack."""

from __future__ import annotations

from typing import NamedTuple

from wdstrain.loader.pipeline_parts import PipelineParts
from wdstrain.reader.reader import CollectedBatch
from wdstrain.runtime.watchdog import thread_stack
from wdstrain.shards.index import Index


class Stall(NamedTuple):
    """A loop that waits for a batch.

    seconds: of waiting. position: (epoch, step) of the batch. batch_number: its number.
    pending: by batch number, the samples and keys of tasks that were given out.
    thread: identity of the waiting thread.
    """

    seconds: float
    position: tuple[int, int]
    batch_number: int
    pending: dict[int, tuple[CollectedBatch, list[str]]]
    thread: int


def describe_stall(index: Index, parts: PipelineParts, stall: Stall) -> str:
    """Return the warning. Runs in the watchdog's thread."""
    epoch, step = stall.position
    begin = f"no batch for {stall.seconds:.0f} s (epoch {epoch}, step {step}). "
    reading = parts.reader.describe_wait()
    if reading is not None:
        return f"{begin}Stage read: {reading}"
    progress = parts.workers.progress
    states = [(number, *progress[number].state) for number in range(progress.count)]
    busy = [
        _describe_decoder(index, parts, number, stall.pending.get(batch_number), row)
        for number, batch_number, row in states
        if batch_number >= stall.batch_number
    ]
    if busy:
        return f"{begin}Stage decode:\n" + "\n".join(busy)
    stack = thread_stack(stall.thread)
    if progress.count == 0:
        return f"{begin}Stage decode, in the loop's own thread:\n{stack}"
    idle = [parts.workers.stack(number) for number in range(progress.count)]
    return f"{begin}Stage hand-off: no decoder has work; the thread that waits:\n{stack}" + "".join(
        f"\n{name}:\n{decoder_stack}" for name, decoder_stack in idle
    )


def _describe_decoder(
    index: Index,
    parts: PipelineParts,
    number: int,
    pending: tuple[CollectedBatch, list[str]] | None,
    row: int,
) -> str:
    """Return what a decoder works on, with its stack."""
    name, stack = parts.workers.stack(number)
    calls = stack.splitlines()
    for i, call in enumerate(calls):  # the calls below the decoder start the thread or process
        if "decoder.py" in call and call.endswith("in __call__"):
            calls = calls[: i + 1]
            break
    stack = "\n".join(calls)
    if pending is None:
        return f"{name}:\n{stack}"
    ids = pending[0].ids[row : row + 1]
    shard, sample = index.shards[int(index.shard_of(ids)[0])], int(ids[0])
    offset = int(index.table.start[sample])
    return (
        f"{name} is at {shard.shown}: '{index.key(sample)}' at offset {offset} "
        f"(row {row} of its batch):\n{stack}"
    )
