"""Batch memory that is reused: what fixed-size values of a batch are written into, and tensors over it.

One allocation for all slots, shared with the workers. A slot goes back when nobody holds any tensor of its batch any more:
the tensors of a hand-out rest on one small object whose end is watched. The user may therefore keep a batch as long as he
likes; once he holds more than the spare slots, further batches are copies, so that decoding never waits for him.

A child that he forks has the batches that he holds as they are then, in memory of its own: its parent uses the slots again, and sees
nothing of what the child writes.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from wdstrain.decode.fields import Example
from wdstrain.errors import WdstrainError
from wdstrain.memory.pinned import PageLock
from wdstrain.memory.shared import Memory, Snapshot

_log = logging.getLogger("wdstrain")

_ALIGN = 4096  # a page, so that columns can be page-locked and copied whole


@dataclass(frozen=True)
class Layout:
    """Where each column of a batch lies in a slot. For `rows` rows; offsets in bytes."""

    rows: int
    columns: dict[str, tuple[Example, int]]
    size: int

    @classmethod
    def of(cls, examples: Mapping[str, Example], rows: int) -> Layout:
        columns, offset = {}, 0
        for name, example in examples.items():
            columns[name] = (example, offset)
            row = int(np.prod(example.shape, dtype=np.int64)) * np.dtype(example.dtype).itemsize
            offset += -(-row * rows // _ALIGN) * _ALIGN
        return cls(rows, columns, offset)

    def arrays(self, buffer: Any, start: int, rows: int) -> dict[str, npt.NDArray[Any]]:
        """The columns of the slot that begins at byte `start`, its first `rows` rows: array[rows, *shape] each."""
        return {
            name: np.ndarray((rows, *example.shape), example.dtype, buffer, start + offset)
            for name, (example, offset) in self.columns.items()
        }


class Slots:
    """`busy` slots for batches being decoded and `spare` ones for batches in the user's hands."""

    def __init__(self, layout: Layout, *, busy: int, spare: int) -> None:
        self.layout, self.busy, self.spare = layout, busy, spare
        self.memory = Memory(max(1, (busy + spare) * layout.size))
        self.copies = 0  # batches handed out as copies
        self._lock = threading.Lock()
        self._free = list(
            range(busy + spare)
        )  # a heap: those in front are used again first, the others take no memory
        self._held: dict[int, _Ground] = {}  # slot -> what its tensors rest on
        # what ended. It is appended at any time, in any thread: by C alone, because a Ctrl-C that comes while Python code runs
        # for the end of an object would be swallowed
        self._ended: deque[_Ground] = deque()
        self._lock_tried = not layout.columns
        self._locked: PageLock | None = None
        _living.add(self)

    def lock_pages(self) -> None:
        """Page-lock the memory for copies to a CUDA device, once. Where the system refuses, it is told, and copies take longer."""
        if not self._lock_tried:
            self._lock_tried = True
            try:
                self._locked = PageLock(self.memory)
            except OSError as error:
                _log.warning(
                    "%s: the processor takes part in every copy to the device. Raise the limit (ulimit -l).",
                    error,
                )

    def reset(self) -> None:
        """Take back every slot that is not in the user's hands."""
        with self._lock:
            self._collect()
            self._free = sorted(set(range(self.busy + self.spare)) - self._held.keys())

    def take(self) -> int:
        """A slot to decode a batch into."""
        with self._lock:
            self._collect()
            if not self._free:
                raise WdstrainError(
                    f"all {self.busy + self.spare} slots for batches are in use. Lower shuffle_buffer."
                )
            return heappop(self._free)

    def hand_out(self, slot: int, rows: int) -> dict[str, torch.Tensor]:
        """The batch as tensors. Over the slot while there are spare ones, else a copy."""
        with self._lock:
            self._collect()
            keeps = len(self._held) < self.spare and bool(self.layout.columns)
        if not keeps:
            arrays = self.layout.arrays(self.memory.view, slot * self.layout.size, rows)
            tensors = {
                name: _tensor(array.copy(), self.layout.columns[name][0])
                for name, array in arrays.items()
            }
            self.copies += bool(self.layout.columns)
            with self._lock:
                heappush(self._free, slot)
            return tensors
        ground = (ctypes.c_char * self.layout.size).from_buffer(
            self.memory.map, slot * self.layout.size
        )
        ground.locked = self._locked  # type: ignore[attr-defined]  # as long as its tensors live
        held = _Ground(ground, self._ended.append)
        held.slot = slot
        with self._lock:
            self._held[slot] = held
        arrays = self.layout.arrays(ground, 0, rows)
        return {
            name: _tensor(array, self.layout.columns[name][0]) for name, array in arrays.items()
        }

    def stop(self) -> None:
        """Hand nothing out until `go_on`: a process is about to be forked."""
        self._lock.acquire()

    def go_on(self) -> None:
        """It was."""
        self._lock.release()

    def held(self) -> list[Snapshot]:
        """The batches in the user's hands, while it is stopped."""
        self._collect()
        return [
            Snapshot(self.memory, slot * self.layout.size, self.layout.size) for slot in self._held
        ]

    def _collect(self) -> None:
        while self._ended:
            slot = self._ended.popleft().slot
            del self._held[slot]
            heappush(self._free, slot)


class _Ground(weakref.ref[Any]):
    """What the tensors of a batch rest on, until its end."""

    __slots__ = ("slot",)
    slot: int


def _tensor(array: npt.NDArray[Any], example: Example) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    return tensor.permute(0, 3, 1, 2) if example.channels_last else tensor


class _Fork:
    """What is done around a fork."""

    def __init__(self) -> None:
        self._alone = threading.Lock()
        self._stopped, self._held = list[Slots](), list[Snapshot]()

    def begin(self) -> None:
        self._alone.acquire()
        for slots in list(_living):
            slots.stop()
            self._stopped.append(slots)
            self._held += slots.held()

    def end_in_parent(self) -> None:
        for snapshot in self._held:
            snapshot.discard()
        self._end()

    def end_in_child(self) -> None:
        for snapshot in self._held:
            snapshot.install()
        self._end()

    def _end(self) -> None:
        for slots in self._stopped:
            slots.go_on()
        self._stopped, self._held = [], []
        self._alone.release()


_living: weakref.WeakSet[Slots] = weakref.WeakSet()
if hasattr(os, "register_at_fork"):
    _fork = _Fork()
    os.register_at_fork(
        before=_fork.begin, after_in_parent=_fork.end_in_parent, after_in_child=_fork.end_in_child
    )
