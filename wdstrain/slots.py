"""Batch memory that is reused: what fixed-size values of a batch are written into, and tensors over it.

One allocation for all slots, shared with the workers. A slot goes back when nobody holds any tensor of its batch any more:
the tensors of a hand-out rest on one small object whose end is watched. The user may therefore keep a batch as long as he
likes; once he holds more than the spare slots, further batches are copies, so that decoding never waits for him.
"""

from __future__ import annotations

import ctypes
import logging
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from wdstrain.fields import Example
from wdstrain.memory import Memory
from wdstrain.pinned import Locked

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
        found = {}
        for name, (example, offset) in self.columns.items():
            count = rows * int(np.prod(example.shape, dtype=np.int64))
            flat = np.frombuffer(buffer, example.dtype, count, start + offset)
            found[name] = flat.reshape(rows, *example.shape)
        return found


class Slots:
    """`busy` slots for batches being decoded and `spare` ones for batches in the user's hands."""

    def __init__(self, layout: Layout, *, busy: int, spare: int) -> None:
        self.layout, self.busy, self.spare = layout, busy, spare
        self.memory = Memory(max(1, (busy + spare) * layout.size))
        self.copies = 0  # batches handed out as copies
        self._free = set(range(busy + spare))  # sets: finalizers run at any time, in any thread
        self._held: set[int] = set()
        self._lock_tried = not layout.columns
        self._locked: Locked | None = None

    def lock_pages(self) -> None:
        """Page-lock the memory for copies to a CUDA device, once. Where the system refuses, it is told, and copies take longer."""
        if not self._lock_tried:
            self._lock_tried = True
            try:
                self._locked = Locked(self.memory)
            except OSError as error:
                _log.warning("%s: the processor takes part in every copy to the device. Raise the limit (ulimit -l).", error)

    def reset(self) -> None:
        """Take back every slot that is not in the user's hands."""
        self._free |= set(range(self.busy + self.spare)) - self._held

    def take(self) -> int:
        """A slot to decode a batch into."""
        return self._free.pop()

    def hand_out(self, slot: int, rows: int) -> dict[str, torch.Tensor]:
        """The batch as tensors. Over the slot while there are spare ones, else a copy."""
        if not self.layout.columns:
            self._free.add(slot)
            return {}
        if len(self._held) >= self.spare:
            arrays = self.layout.arrays(self.memory.view, slot * self.layout.size, rows)
            tensors = {name: _tensor(array.copy(), self.layout.columns[name][0]) for name, array in arrays.items()}
            self.copies += 1
            self._free.add(slot)
            return tensors
        ground = (ctypes.c_char * self.layout.size).from_buffer(self.memory.map, slot * self.layout.size)
        self._held.add(slot)
        weakref.finalize(ground, self._give_back, slot).atexit = False
        arrays = self.layout.arrays(ground, 0, rows)
        return {name: _tensor(array, self.layout.columns[name][0]) for name, array in arrays.items()}

    def _give_back(self, slot: int) -> None:
        self._held.discard(slot)
        self._free.add(slot)


def _tensor(array: npt.NDArray[Any], example: Example) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    return tensor.permute(0, 3, 1, 2) if example.channels_last else tensor
