"""Batches on their way: what decoders get and give, and the memory of the values.

`ReadBatch`, `BadSample` and `Result` go between processes. Values lie in slots that decoders write
to, with tensors over them. All slots are one allocation, which is shared with the workers. A slot is
free again once no tensor of its batch exists: all of them refer to one small object, and a weak
reference notes its end. Users may therefore keep batches. Once they keep more batches than there are
spare slots, further batches are copies, so decoding never waits for a user.

A forked child shares this memory with its parent. Once the parent drops a batch, its slot is
reused, and the child sees the next batch there: a child that needs a batch clones it first.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from bisect import bisect
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from wdstrain.decode.fields import Example
from wdstrain.errors import WdstrainError, logger
from wdstrain.memory import Memory
from wdstrain.shards.offsets import Ints, Members

_MAX_REASON = 1000  # characters
_ALIGN = 4096  # bytes of a page: whole columns are page-locked and copied


class ReadBatch(NamedTuple):
    """The b samples of one batch, which are read.

    number: of the batch in the run. ids, rng_ids: int64[b], see `order.Steps`. valid: bool[b], False
    for padding. keys: of the samples. members: the needed fields, in the memory of the reader.
    bad: by row, field and reason of a sample whose bytes cannot be used; see `BadSample`.
    slot: batch slot that the decoder fills. joined: texts of the rows from joined columns, by column.
    """

    number: int
    epoch: int
    ids: Ints
    rng_ids: Ints
    valid: npt.NDArray[np.bool_]
    keys: list[str]
    members: Members
    bad: Mapping[int, tuple[str, str]]
    slot: int = -1
    joined: Mapping[str, list[str]] = {}


class BadSample(NamedTuple):
    """A sample that could not be decoded.

    row: row in the batch. field: name of the field that failed; empty if unknown.
    substitute: id of the sample whose values are in the row; the sample's own id if the row was
    emptied; -1 if neither was done.
    whole_batch: every sample was decoded, but they could not be collated.
    """

    row: int
    field: str
    reason: str
    substitute: int = -1
    whole_batch: bool = False


class Result(NamedTuple):
    """A decoded batch. values: batch values by name, except those in its slot.

    bad: samples that could not be decoded.
    finished: time.perf_counter() at the end; all processes of a machine share this clock.
    seconds: of decoding, by the names of `StageTotals`.
    """

    values: dict[str, Any]
    bad: list[BadSample]
    finished: float
    seconds: dict[str, float]


def reason_of(error: Exception) -> str:
    """Return the text of an error, shortened, for a log line or a message.

    A text of any length may come from the data. A MemoryError has none, and gets advice.
    """
    if isinstance(error, MemoryError):
        text = str(error) or "there was no memory for it"
        return f"{text}; if the sample is sound, lower num_workers or batch_size"
    text = str(error) or type(error).__name__
    return text if len(text) <= _MAX_REASON else f"{text[:_MAX_REASON]} ..."


def substitute(
    bad: list[BadSample], ids: Ints, columns: list[Any], on_error: str
) -> list[BadSample]:
    """Replace or empty the rows of bad samples. Returns them with their substitutes.

    The choice depends on the batch alone: not on the worker, nor on the step of a resume.

    ids: int64[b]. columns: sequences of b values, changed in place; of arrays, rows are numbers.
    on_error: "raise" changes nothing; "mark" empties the row; "replace" copies the good row before
    it, or the last good row if there is none before it.
    """
    good = sorted(set(range(len(ids))) - {sample.row for sample in bad})
    if on_error == "raise" or (on_error == "replace" and not good):
        return bad
    # of no good row before it, the number is -1: the last good row
    sources = [b.row if on_error == "mark" else good[bisect(good, b.row) - 1] for b in bad]
    for sample, source in zip(bad, sources, strict=True):
        if on_error == "mark":
            empty_row(columns, sample.row)
        else:
            for column in columns:
                column[sample.row] = column[source]
    return [b._replace(substitute=int(ids[row])) for b, row in zip(bad, sources, strict=True)]


def empty_row(columns: Iterable[Any], row: int) -> None:
    """Make a row 0 in columns that are arrays, and None in lists."""
    for column in columns:
        column[row] = 0 if isinstance(column, np.ndarray) else None


# --- memory ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """Columns of a batch slot.

    columns: by name, the example of a row and the column's offset in bytes. size: bytes of a slot.
    """

    columns: dict[str, tuple[Example, int]]
    size: int

    @classmethod
    def of(cls, examples: Mapping[str, Example], rows: int) -> Layout:
        """Return the layout for batches. examples: of one row, by column. rows: of a batch."""
        columns, offset = {}, 0
        for name, example in examples.items():
            columns[name] = (example, offset)
            row = int(np.prod(example.shape, dtype=np.int64)) * np.dtype(example.dtype).itemsize
            offset += -(-row * rows // _ALIGN) * _ALIGN
        return cls(columns, offset)

    def arrays(self, buffer: Any, start: int, rows: int) -> dict[str, npt.NDArray[Any]]:
        """Return the columns of the slot at byte `start`. Array[rows, *shape] each, by name."""
        return {
            name: np.ndarray((rows, *example.shape), example.dtype, buffer, start + offset)
            for name, (example, offset) in self.columns.items()
        }

    def tensors(self, arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, torch.Tensor]:
        """Return the columns as tensors; images have their channels before height and width."""
        return {
            name: torch.from_numpy(
                array.transpose(0, 3, 1, 2) if self.columns[name][0].channels_last else array
            )
            for name, array in arrays.items()
        }


class Places:
    """Numbers of places in a memory. A place is free again once no object refers to its bytes."""

    def __init__(self, busy: int, spare: int) -> None:
        """busy: places that are taken at a time. spare: places whose bytes others refer to."""
        self._all, self._spare = frozenset(range(busy + spare)), spare
        self._taken = set[int]()
        # To what holds the bytes, by place. No callback: Python drops a Ctrl-C that comes while
        # Python code runs at an object's end.
        self._leases: dict[int, weakref.ref[Any]] = {}

    def reset(self) -> None:
        """Free every place to which nothing refers."""
        self._taken.clear()

    def take(self) -> int:
        """Return a free place. Raises WdstrainError if there is none."""
        free = self._all - self._taken - self._kept()
        if not free:
            raise WdstrainError(
                f"all {len(self._all)} slots for batches are in use.",
                "Lower {shuffle_buffer}.",
                {"shuffle_buffer": ...},
            )
        place = min(free)  # the first are reused first, so the last may never take memory
        self._taken.add(place)
        return place

    @property
    def has_spare(self) -> bool:
        """Whether objects may refer to the bytes of one more place."""
        return len(self._kept()) < self._spare

    def lease(self, place: int, data: Any) -> None:
        """End the use of a place. It is free again once `data`, which holds its bytes, is freed."""
        self._taken.discard(place)
        self._leases[place] = weakref.ref(data)

    def _kept(self) -> set[int]:
        """Return the places to whose bytes an object refers."""
        return {place for place, data in self._leases.items() if data() is not None}


class Slots:
    """Slots for batches that are read or decoded, and for batches that the user keeps.

    The pipeline calls this under its lock; tensors may end in any thread and at any time.
    copies: batches that the user got as copies.
    """

    def __init__(self, layout: Layout, *, busy: int, spare: int) -> None:
        """busy: slots for batches that are read or decoded. spare: slots for the user's batches."""
        self.layout, self.copies, self._places = layout, 0, Places(busy, spare)
        self.memory = Memory(max(1, (busy + spare) * layout.size))
        self.take, self.reset = self._places.take, self._places.reset
        self._page_lock_tried = not layout.columns
        self._page_lock: PageLock | None = None

    def lock_pages(self) -> None:
        """Page-lock the memory for copies to a CUDA device, once.

        If the system refuses, a warning is logged, and copies take longer.
        """
        if not self._page_lock_tried:
            self._page_lock_tried = True
            try:
                self._page_lock = PageLock(self.memory)
            except OSError as error:
                logger.warning(
                    "%s: the processor takes part in every copy to the device. "
                    "Raise the limit (ulimit -l).",
                    error,
                )

    def lease(self, slot: int, rows: int) -> dict[str, torch.Tensor]:
        """Return the first rows of a slot as tensors by name: copies if no slot is spare."""
        start, size = slot * self.layout.size, self.layout.size
        is_spare = self._places.has_spare and self.layout.columns
        base = (ctypes.c_char * size).from_buffer(self.memory.map, start)
        self._places.lease(slot, base)
        if not is_spare:
            arrays = self.layout.arrays(self.memory.view, start, rows)
            self.copies += bool(arrays)
            return self.layout.tensors({name: array.copy() for name, array in arrays.items()})
        base.page_lock = self._page_lock  # type: ignore[attr-defined]  # for as long as the tensors
        return self.layout.tensors(self.layout.arrays(base, 0, rows))


class PageLock:
    """Keeps a memory page-locked (pinned) while this object exists.

    A CUDA device copies from such memory asynchronously. Lock it after the worker processes have
    started: they write into the same pages and need not know of the lock.
    """

    def __init__(self, memory: Memory) -> None:
        """Raises OSError if CUDA refuses to lock the memory."""
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        error_code = int(cudart.cudaHostRegister(memory.address, memory.size, 0))
        if error_code:
            with suppress(RuntimeError):  # clears the error; the next call would raise it
                torch.zeros(1, device="cuda")
            raise OSError(
                f"{memory.size / 1e6:.0f} MB could not be page-locked (CUDA error {error_code})"
            )
        # the finalizer refers to the map: pages must stay mapped until they are unlocked
        weakref.finalize(
            self, _unlock, cudart, memory.address, os.getpid(), memory.map
        ).atexit = False


def _unlock(cudart: Any, address: int, owner: int, _: Any) -> None:
    """Unlock the pages, unless this is a forked child: the lock belongs to the process `owner`."""
    if os.getpid() == owner:
        cudart.cudaHostUnregister(address)
