"""Limits for batches in flight: being decoded, waiting to be, or ready before their turn.

They are bounded by cores and by bytes: many cores or large batches must not fill the memory.
"""

from __future__ import annotations

from typing import NamedTuple

from wdstrain.runtime.machine import cores, memory, processes

PREFETCH = 2  # messages that a worker process has at a time; batches in flight per thread

_MEMORY_SHARE = 16  # batches in flight may take 1/16 of the memory
_MIN_BYTES = 256 << 20  # that they may take on any machine
# limits for one message: samples, batches, bytes
_MESSAGE_SAMPLES, _MESSAGE_BATCHES, _MESSAGE_BYTES = 128, 4, 32 << 20


class Flight(NamedTuple):
    """Limits for batches in flight.

    batches: most batches in flight. decoders: number of threads or processes.
    messages: most messages in flight to and from worker processes; 0 for threads.
    together: batches in one message.
    """

    batches: int
    decoders: int
    messages: int = 0
    together: int = 1


def flight_of(num_workers: int, batch_size: int, slot_bytes: int, read_bytes: float) -> Flight:
    """Return the limits on this machine.

    slot_bytes: bytes of a batch slot. read_bytes: mean bytes of a batch as read from its shards.
    """
    limit = max(_MIN_BYTES, memory() // processes() // _MEMORY_SHARE)
    room = limit // max(1, int(slot_bytes + read_bytes))
    if not num_workers:
        return of_threads(cores(), room)
    together = min(
        _MESSAGE_SAMPLES // batch_size, _MESSAGE_BATCHES, _MESSAGE_BYTES // max(1, slot_bytes)
    )
    return of_processes(num_workers, cores(), room, max(1, together))


def of_threads(cores: int, room: int) -> Flight:
    """Return the limits for a thread per core. room: batches that fit in memory."""
    batches = max(2, min(PREFETCH * cores, room))
    return Flight(batches, min(cores, batches))


def of_processes(count: int, cores: int, room: int, together: int) -> Flight:
    """Return the limits for `count` worker processes. room: batches that fit in memory.

    Each worker has a message, each busy core has another that waits. Half a message per busy core
    is ready before its turn: without it a slightly slower worker would hold up the others.
    """
    busy = min(count, cores)
    wanted = count + (PREFETCH - 1) * busy + max(2, busy // 2)
    messages = max(count + 1, min(wanted, room // together))
    return Flight((messages + 1) * together - 1, count, messages, together)
