"""The stateless part of the pipeline: bytes in the arena to values in a slot.

A `Task` is a few integers per sample; what comes back is the slot's number, the values that have no fixed size, and which
samples were bad and why, as text. The same object works in a thread and, pickled once, in a worker process; it holds no
order, no position and no file, so it does not matter which of them decodes what.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from copy import copy
from itertools import pairwise, repeat
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import default_collate

from wdstrain.decode.batch_slots import Layout
from wdstrain.decode.fields import Field, Image, read_field, torch_has
from wdstrain.decode.jpeg_batch import Members
from wdstrain.decode.label_fields import Label
from wdstrain.decode.transforms import DRAWS, Draws
from wdstrain.errors import SampleError
from wdstrain.memory.scatter import ChecksumJob
from wdstrain.memory.shared import Memory
from wdstrain.order.rng import key, uniform
from wdstrain.runtime.watchdog import ProgressCell
from wdstrain.shards.index import Ints
from wdstrain.shards.values import Array

Transform = Callable[..., Any]
Collate = Callable[
    [list[Any]], Mapping[str, Any]
]  # the examples of a batch, in order, to its values by name


class Task(NamedTuple):
    """One batch to decode: b samples with m members in all.

    ids: int64[b]; first: int64[b + 1] into field: uint16[m], offset, size: int64[m], of bytes in the arena. unverified: int64[k], those
    of the m that nobody compared yet; crc: uint32[k], of their bytes as they were packed. keys are sent only where a transform
    sees them. unreadable: why the samples in some rows could not be read.
    """

    batch_number: int
    epoch: int
    slot: int
    ids: Ints
    first: Ints
    field: npt.NDArray[np.uint16]
    offset: Ints
    size: Ints
    unverified: Ints
    crc: npt.NDArray[np.uint32]
    keys: tuple[str, ...]
    unreadable: dict[int, str]
    alike: tuple[int, ...]  # the fields of each sample, in order; empty where samples differ

    def __reduce__(self) -> tuple[Any, ...]:
        """Arrays travel as bytes, in a quarter of the time that numpy takes for them."""
        return _task, (self[:3], [array.tobytes() for array in self[3:10]], self[10:])


_ARRAYS = tuple(map(np.dtype, "qqHqqqI"))  # ids to crc


def _task(begin: tuple[Any, ...], arrays: list[bytes], end: tuple[Any, ...]) -> Task:
    return Task(
        *begin,
        *(
            np.ndarray(len(one) // kind.itemsize, kind, one)
            for one, kind in zip(arrays, _ARRAYS, strict=True)
        ),
        *end,
    )


_LONGEST = 1000  # characters of a reason
_NO_EXAMPLE = (
    "transform returned None, and each sample must give an example; filter samples when they are packed (wdstrain convert tars "
    "--select)"
)
MISMATCH = "its bytes are not those that were packed (crc32)"


class Bad(NamedTuple):
    """A sample that could not be decoded: its row in the batch, the field at fault (may be empty), and why.

    `substitute` is the id of the sample that took its place, its own where its row was left empty, -1 if neither was done.
    of_batch: each sample could be decoded, but no batch could be made of them.
    """

    row: int
    field: str
    reason: str
    substitute: int = -1
    of_batch: bool = False


class Result(NamedTuple):
    """A batch that was decoded: begun, read (its rows are there, and are made one batch) and ended, by time.perf_counter.

    Its zero is the same in all processes of a machine.
    """

    batch_number: int
    slot: int
    values: dict[str, Any]  # of the fields that have no column in the slot
    bad: list[Bad]
    begun: float
    read: float
    ended: float
    computed: float  # seconds of a processor, of those in between


Read = tuple[
    dict[str, Any], list[Bad], float
]  # values that have no column, bad samples, and when the rows were read


class Decoder:
    """Decodes tasks by `fields`, by `transform`, or by neither, into bytes. `takes_rng`: the transform wants (sample, rng).

    collate_fn: makes a batch of the examples that the transform returned; default: as torch does.
    """

    def __init__(
        self,
        *,
        names: tuple[str, ...],
        fields: Mapping[str, Field] | None,
        transform: Transform | None,
        takes_rng: bool,
        collate_fn: Collate | None,
        replace: bool,
        marks: bool,
        seed: int,
        arena: Memory,
        slots: Memory,
        layout: Layout,
    ) -> None:
        self._names, self._fields, self._transform, self._takes_rng = (
            names,
            fields,
            transform,
            takes_rng,
        )
        self._collate: Collate = collate_fn or default_collate
        self._replace, self._marks = replace, marks
        self._seed, self.arena, self.slots, self._layout = seed, arena, slots, layout
        self._idle = (
            transform is None and fields is not None and not fields
        )  # everything is read into its place

    def __call__(self, task: Task, desk: ProgressCell, *, own_process: bool = False) -> Result:
        """desk: where whoever decodes says how far it is."""
        begun = time.perf_counter()
        if self._idle and not task.unreadable:
            return Result(task.batch_number, task.slot, {}, [], begun, begun, begun, 0.0)
        computed = time.thread_time()
        desk.begin(task.batch_number)
        self.slots.populate(task.slot * self._layout.size, self._layout.size)
        if self._transform is not None:
            values, bad, read = self._transformed(task, own_process, desk)
        elif self._fields is None:
            values, bad, read = self._bytes(task)
        else:
            values, bad, read = self._read_fields(task, desk)
        desk.set_idle()
        return Result(
            task.batch_number,
            task.slot,
            values,
            bad,
            begun,
            read,
            time.perf_counter(),
            time.thread_time() - computed,
        )

    def over(self, arena: Memory) -> Decoder:
        """The same decoder over the bytes of another arena."""
        other = copy(self)
        other.arena = arena
        return other

    def _bytes(self, task: Task) -> Read:
        """Each field as a list of bytes, None where a sample lacks it."""
        rows = len(task.ids)
        ends = (task.offset + task.size).tolist()
        data = list(map(self.arena.map.__getitem__, map(slice, task.offset.tolist(), ends)))
        bad = self._damaged(task)
        read = time.perf_counter()
        found: dict[str, list[bytes | None]] = {name: [None] * rows for name in self._names}
        for place, field in enumerate(task.alike):
            found[self._names[field]][:] = data[place :: len(task.alike)]
        if not task.alike:
            of = np.repeat(np.arange(rows), np.diff(task.first)).tolist()
            for row, field, value in zip(of, task.field.tolist(), data, strict=True):
                found[self._names[field]][row] = value
        return found, self._substitute(list(bad.values()), task.ids, list(found.values())), read

    def _read_fields(self, task: Task, desk: ProgressCell) -> Read:
        assert self._fields is not None
        draws = uniform(task.ids, DRAWS, "sample", self._seed, task.epoch)
        draws.flags.writeable = False  # all fields of a sample have the same
        columns = self._layout.arrays(self.slots.view, task.slot * self._layout.size, len(task.ids))
        loose = {
            name: [None] * len(task.ids)
            for name, field in self._fields.items()
            if field.example is None
        }
        data, bad = self._members(task), self._damaged(task)
        for (
            name,
            field,
        ) in (
            self._fields.items()
        ):  # one after another: a label between two pictures takes five times as long
            column = columns.get(name)
            done = self._at_once(field, column, task, bad, draws, desk)
            by_row = field.of(task.ids) if isinstance(field, Label) and field.parts else None
            for row, (found, one) in enumerate(self._found(field.names, task, data)):
                if row in done or row in bad:
                    continue
                desk.set_row(row)
                try:
                    if one is None:
                        raise LookupError(f"it has none of {', '.join(field.names)}")
                    reader = field if by_row is None else by_row[row]
                    value = read_field(
                        reader, found, one, None if column is None else column[row, ...], draws[row]
                    )
                    if column is None:
                        loose[name][row] = _for_torch(value)
                except (
                    Exception
                ) as error:  # whatever a field of the user raises is a reason, not a crash
                    bad[row] = Bad(row, found or name, _reason(error))
        read = time.perf_counter()
        gone = self._substitute(
            sorted(bad.values()), task.ids, [*columns.values(), *loose.values()]
        )
        return (
            {}
            if _fails(gone)
            else {name: _batched(self._fields[name], values) for name, values in loose.items()},
            gone,
            read,
        )

    def _at_once(
        self,
        field: Field,
        column: Array | None,
        task: Task,
        bad: Mapping[int, Bad],
        draws: Draws,
        desk: ProgressCell,
    ) -> set[int]:
        """The rows of a field that were read together; of what goes wrong there, one by one is told what it was."""
        place = self._place(field.names, task)
        if (
            type(field) is not Image or column is None or place is None
        ):  # what a user made of one may read otherwise
            return set()
        start, size = task.offset[place :: len(task.alike)], task.size[place :: len(task.alike)]
        rows = [row for row in range(len(task.ids)) if row not in bad]
        if (start < 0).any() or (size < 0).any() or (start > self.arena.size - size).any():
            return set()
        members = Members(start + self.arena.address, size)
        with suppress(Exception):
            return field.read_rows(members, rows, column, draws, desk.row_address)
        return set()

    def _transformed(self, task: Task, own_process: bool, desk: ProgressCell) -> Read:
        assert self._transform is not None
        examples: list[Any] = [None] * len(task.ids)
        data = self._members(task)
        damaged = self._damaged(task)
        bad = list(damaged.values())
        for row, members in enumerate(self._by_row(task, data)):
            desk.set_row(row)
            if row in damaged:
                continue
            sample = {
                "__key__": task.keys[row],
                **{name: bytes(one) for name, one in members.items()},
            }
            word = key("sample", self._seed, task.epoch, int(task.ids[row]))
            if own_process:  # in threads the global generators are shared and are left alone
                random.seed(word)
                np.random.seed(word & 0xFFFFFFFF)
                # torch.manual_seed would write down a call stack for each kind of device there might be, and seed a training
                # process's devices where a batch is decoded again there
                torch.default_generator.manual_seed(word)
            try:
                rng = (np.random.Generator(np.random.Philox(key=word)),) if self._takes_rng else ()
                example = examples[row] = self._transform(sample, *rng)
            except Exception as error:
                bad.append(
                    Bad(row, "", f"transform raised {type(error).__name__}: {_reason(error)}")
                )
                continue
            if example is None:
                bad.append(Bad(row, "", _NO_EXAMPLE))
            elif self._collate is default_collate and not isinstance(example, Mapping):
                reason = f"transform returned {type(example).__name__}; an example must be a dict of values by name"
                bad.append(Bad(row, "", f"{reason}, or something that a collate_fn of yours takes"))
        read = time.perf_counter()
        bad = self._substitute(sorted(bad), task.ids, [examples])
        if _fails(bad):
            return {}, bad, read
        try:
            collated = self._collate(examples)
            if not isinstance(collated, Mapping):
                raise TypeError(
                    f"it returned {type(collated).__name__}; a batch is a dict of values by name"
                )
        except Exception as error:
            reason = f"collate_fn raised {type(error).__name__}: {_reason(error)}"
            if self._collate is default_collate:
                reason = (
                    f"the examples of this batch cannot be stacked: {_reason(error).rstrip('. ')}. Return values of one shape, or "
                    f"give the Loader a collate_fn, which makes a batch of the list of its examples"
                )
            return {}, [Bad(0, "", reason, of_batch=True)], read
        return dict(collated), bad, read

    def _substitute(self, bad: list[Bad], ids: Ints, columns: list[Any]) -> list[Bad]:
        """Put good samples of the batch in the places of bad ones, if that is asked for and there is a good one.

        The one before takes the place, around the end: a function of the batch alone, so that it does not depend on who
        decodes or where a run was resumed. Where bad samples are marked, their rows are made empty. columns: sequences with a
        value for each row.
        """
        if self._marks:
            for column in columns:
                for one in bad:
                    column[one.row] = 0 if isinstance(column, np.ndarray) else None
            return [one._replace(substitute=int(ids[one.row])) for one in bad]
        good = sorted(set(range(len(ids))) - {one.row for one in bad})
        if not self._replace or not good:
            return bad
        done = []
        for one in bad:
            substitute = max((row for row in good if row < one.row), default=good[-1])
            for column in columns:
                column[one.row] = column[substitute]
            done.append(one._replace(substitute=int(ids[substitute])))
        return done

    def _members(self, task: Task) -> list[memoryview]:
        """Where the members of a batch lie in the arena."""
        view = self.arena.view
        ends = (task.offset + task.size).tolist()
        return [view[start:end] for start, end in zip(task.offset.tolist(), ends, strict=True)]

    def _damaged(self, task: Task) -> dict[int, Bad]:
        """By row, what was not read as it was packed."""
        bad = {row: Bad(row, "", reason) for row, reason in task.unreadable.items()}
        if len(task.unverified):
            size = task.size[task.unverified]
            sums = ChecksumJob(
                [self.arena],
                np.zeros_like(size),
                task.offset[task.unverified],
                size,
                np.ones_like(size),
            )
            sums.update()
            for m in task.unverified[sums.checksums != task.crc].tolist():
                row = int(np.searchsorted(task.first, m, side="right")) - 1
                bad.setdefault(row, Bad(row, self._names[task.field[m]], MISMATCH))
        return dict(sorted(bad.items()))

    def _by_row(self, task: Task, data: list[memoryview]) -> Iterator[dict[str, memoryview]]:
        """The members of each sample, by field."""
        names, field, first = self._names, task.field.tolist(), task.first.tolist()
        for start, stop in pairwise(first):
            yield {names[field[m]]: data[m] for m in range(start, stop)}

    def _found(
        self, names: tuple[str, ...], task: Task, data: list[memoryview]
    ) -> Iterable[tuple[str, memoryview | None]]:
        """Of each sample the first of these fields that it has, and its bytes; ("", None) of one that has none."""
        if not task.alike:
            samples = self._by_row(task, data)
            return [
                next(((name, one[name]) for name in names if name in one), ("", None))
                for one in samples
            ]
        place = self._place(names, task)
        if place is None:
            return repeat(("", None), len(task.ids))
        return zip(
            repeat(self._names[task.alike[place]]), data[place :: len(task.alike)], strict=False
        )

    def _place(self, names: tuple[str, ...], task: Task) -> int | None:
        """Of the first of these fields that samples have, where it is among their fields; None where they have none or differ."""
        places = {self._names[field]: place for place, field in enumerate(task.alike)}
        return next((places[name] for name in names if name in places), None)


def _reason(error: Exception) -> str:
    """What an error says of itself. It may speak of all that a sample holds, and is kept, sent and shown; one that came for want
    of memory says nothing."""
    if isinstance(error, MemoryError):
        return f"{str(error) or 'there was no memory for it'}; if the sample is sound, lower num_workers or batch_size"
    text = str(error) or type(error).__name__
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."


def _fails(bad: list[Bad]) -> bool:
    return any(one.substitute < 0 for one in bad)


def _for_torch(value: Any) -> Any:
    """The value of a field as `_gather` takes it. Raises SampleError for an array of numbers that torch cannot hold."""
    if (
        not isinstance(value, np.ndarray) or value.dtype.kind not in "biufc"
    ):  # text and times stay arrays of numpy
        return value
    if not torch_has(value.dtype):
        raise SampleError(
            f"it is an array of {value.dtype}, which torch does not have; store it as float64 or complex128"
        )
    return value if value.dtype.isnative else value.astype(value.dtype.newbyteorder("="))


def _batched(field: Field, values: list[Any]) -> Any:
    """Return the values of a field without a fixed size as they are in the batch.

    Images stay a list also where all sizes happen to agree, so that the type of a batch does not depend on its samples.
    """
    return [_tensor(value) for value in values] if isinstance(field, Image) else _gather(values)


def _gather(values: list[Any]) -> Any:
    """A tensor where all values are arrays of one shape and dtype, else the list."""
    first = values[0]
    if isinstance(first, np.ndarray) and all(
        isinstance(one, np.ndarray) and one.shape == first.shape and one.dtype == first.dtype
        for one in values
    ):
        return _tensor(np.stack(values))
    return [_tensor(value) for value in values]


def _tensor(value: Any) -> Any:
    """Arrays as tensors, but for those of a kind that torch has not (text, times)."""
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "biufc":
        return value
    # torch takes no strides below 0, and warns of memory that is read-only
    return torch.from_numpy(np.require(value, requirements=["C", "W"]))
