"""How many batches are in flight at one time: being decoded, waiting to be, or ready before their turn.

Bounded by cores and by bytes, so that a machine with many cores, or large batches, does not fill its memory.
"""

from __future__ import annotations

from typing import NamedTuple

from wdstrain.runtime.machine import cores, memory, processes

PREFETCH = 2  # messages that a worker process has at one time; batches in flight for a thread
_SHARE = 16  # the part of memory that batches in flight may take is one of so many
_LEAST_BYTES = 256 << 20  # that may be in flight, however small the memory is
# of one message: samples, about, where batches are small; batches; bytes of the batches
_SAMPLES, _BATCHES, _BYTES = 128, 4, 32 << 20


class Flight(NamedTuple):
    """Most batches in flight, and the decoders for them. Of worker processes also: most messages under way, and batches of each."""

    batches: int
    decoders: int
    messages: int = 0
    together: int = 1


def flight_of(num_workers: int, batch_size: int, slot_bytes: int, read_bytes: float) -> Flight:
    """Return what is in flight on this machine. slot_bytes: of a decoded batch of a fixed size; read_bytes: of a batch as it is read."""
    room = max(_LEAST_BYTES, memory() // processes() // _SHARE) // max(
        1, int(slot_bytes + read_bytes)
    )
    if not num_workers:
        return of_threads(cores(), room)
    return of_processes(
        num_workers,
        cores(),
        room,
        max(1, min(_SAMPLES // batch_size, _BATCHES, _BYTES // max(1, slot_bytes))),
    )


def of_threads(cores: int, room: int) -> Flight:
    """Return what is in flight with a thread per core, where there is room for so many batches."""
    batches = max(2, min(PREFETCH * cores, room))
    return Flight(batches, min(cores, batches))


def of_processes(count: int, cores: int, room: int, together: int) -> Flight:
    """Return what is in flight with `count` worker processes, where there is room for so many batches.

    together: batches of one message, which takes as much time as several small pictures, or two photographs. Each worker has a message,
    as many more wait as can be worked on, and some are back before one that was sent before them: with half a message for each
    worker, one of sixteen that takes 1.1 times as long costs 0.004 of the speed, by simulation.
    """
    busy = min(count, cores)
    messages = max(
        count + 1, min(count + (PREFETCH - 1) * busy + max(2, busy // 2), room // together)
    )
    return Flight((messages + 1) * together - 1, count, messages, together)
