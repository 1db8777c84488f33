"""The decoder: encoded samples in the reader's memory to values in a batch slot.

A decoder keeps no order, no position and no open file. Any thread, or any worker process that
received it by pickling, can decode any task with the same result.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from wdstrain.decode.batches import BadSample, Layout, ReadBatch, Result, reason_of, substitute
from wdstrain.decode.boxes import BoxBatch, Boxes, flattened
from wdstrain.decode.fields import Field, Image, Json, Mask, NumpyArray, read_field, torch_has
from wdstrain.decode.labels import LabelField
from wdstrain.decode.transforms import DRAWS, Draws, Size, nearest_size
from wdstrain.errors import SampleError
from wdstrain.memory import Memory
from wdstrain.order.rng import key, uniform
from wdstrain.shards.formats import header_of
from wdstrain.shards.kinds import Array
from wdstrain.shards.offsets import Ints

Transform = Callable[..., Any]  # sample -> example, or (sample, rng) -> example
Collate = Callable[[list[Any]], Mapping[str, Any]]  # examples of a batch, in order -> batch

_GZIPPED = "; it is gzip data: pack fields uncompressed"
_NOT_RANDOM = (Json, NumpyArray, LabelField)  # fields that use no random numbers


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """Decodes tasks by fields, by a transform, or by neither, which delivers bytes.

    arena: memory with the encoded samples. slots: memory of all batch slots.
    layout: columns of a batch slot.
    field_names: names of the index's fields, by field number.
    fields: fields to decode, by name in the batch; None: with `transform`, or for plain bytes.
    transform: function of the user, instead of `fields`. takes_rng: it takes (sample, rng).
    collate_fn: makes a batch of the examples of the transform; None: torch's default_collate.
    on_error: "raise", "replace" or "mark" bad samples; see `substitute`.
    seed: of the random numbers of each sample.
    """

    arena: Memory
    slots: Memory
    layout: Layout
    field_names: tuple[str, ...]
    fields: Mapping[str, Field] | None = None
    transform: Transform | None = None
    takes_rng: bool = False
    collate_fn: Collate | None = None
    on_error: str = "raise"
    seed: int = 0

    def __call__(self, batch: ReadBatch, *, own_process: bool = False) -> Result:
        """Return the decoded batch of a batch. Bad samples are reported in the result.

        own_process: the global random generators of this process belong to the decoder.
        """
        started, cpu_start = time.perf_counter(), time.thread_time()
        slot_start = batch.slot * self.layout.size
        self.slots.populate(slot_start, self.layout.size)
        columns = self.layout.arrays(self.slots.view, slot_start, len(batch.ids))
        bad_rows = {row: BadSample(row, *why) for row, why in batch.bad.items()}
        sized = self._sized_fields(batch)
        examples = {name: field.example for name, field in sized.items() if field.example}
        own = Layout.of(examples, len(batch.ids))
        made = own.arrays(np.zeros(own.size, np.uint8), 0, len(batch.ids))
        if self.transform is not None:
            lists = {"": self._run_transform(self.transform, batch, bad_rows, own_process)}
        elif self.fields is not None:
            columns |= made
            lists = self._decode_fields({**self.fields, **sized}, batch, columns, bad_rows)
        else:
            samples = self._samples(batch)
            lists = {
                name: [bytes(sample[name]) if name in sample else None for sample in samples]
                for name in self.field_names
            }
        rows_done, values = time.perf_counter(), dict[str, Any]()
        bad = substitute(
            sorted(bad_rows.values()),
            batch.ids,
            [*columns.values(), *lists.values()],
            self.on_error,
        )
        if all(sample.substitute >= 0 for sample in bad):
            try:
                values = self._collate(lists) | own.tensors(made)
            except SampleError as error:
                bad = [BadSample(0, "", str(error), whole_batch=True)]
        finished, computing = time.perf_counter(), time.thread_time() - cpu_start
        seconds = {
            "decode_seconds": rows_done - started,
            "collate_seconds": finished - rows_done,
            "compute_seconds": computing,
        }
        return Result(values, bad, finished, seconds)

    def _collate(self, lists: dict[str, list[Any]]) -> dict[str, Any]:
        """Return the batch values of the rows. Raises SampleError."""
        if self.transform is not None:
            return _collate_examples(lists[""], self.collate_fn)
        if self.fields is None:
            return lists
        # The type of a batch value must not depend on its samples, some of which may be marked.
        are_lists = (Image, Mask) if self.on_error != "mark" else object
        return {
            name: BoxBatch(*map(torch.from_numpy, flattened(rows)))
            if isinstance(self.fields[name], Boxes)
            else list(map(_tensor, rows))
            if isinstance(self.fields[name], are_lists)
            else stacked(rows)
            for name, rows in lists.items()
        }

    # --- fields -----------------------------------------------------------------------------------

    def _sized_fields(self, batch: ReadBatch) -> dict[str, Field]:
        """Return fields of size="bucket" with that of a batch, which its first image decides."""
        fields = self.fields or {}
        own = [field.image if isinstance(field, Boxes) else field for field in fields.values()]
        images = [field for field in own if isinstance(field, (Image, Mask)) and field.sizes]
        first = min(images, key=lambda field: isinstance(field, Mask), default=None)
        return {} if first is None else _with_size(fields, self._size_of(batch, first))

    def _size_of(self, batch: ReadBatch, field: Image | Mask) -> Size:
        """Return the size of the bucket of a batch, by the first image with an intact header."""
        sizes = field.sizes or ()
        for _, offset, size in self._first_of(batch, field.names).T.tolist():
            with suppress(SampleError):  # also for a sample without the field
                width, height = header_of(self.arena.view[offset : offset + max(0, size)]).size
                return sizes[nearest_size(width / height, sizes)]
        return sizes[0]

    def _decode_fields(
        self,
        fields: Mapping[str, Field],
        batch: ReadBatch,
        columns: Mapping[str, Array],
        bad: dict[int, BadSample],
    ) -> dict[str, list[Any]]:
        """Decode the fields. Values with a fixed size go to `columns`, others are returned."""
        draws: Draws = np.empty((len(batch.ids), 0))
        if not all(type(field) in _NOT_RANDOM for field in fields.values()):
            draws = uniform(batch.rng_ids, DRAWS, "sample", self.seed, batch.epoch)
        lists = dict[str, list[Any]]()
        # field by field: a label that is decoded between two images takes five times as long
        for name, field in fields.items():
            column, values = columns.get(name), list[Any]([None] * len(batch.ids))
            if column is None:
                lists[name] = values
            places = self._first_of(batch, field.names)
            pictures = self._first_of(batch, field.image.names if isinstance(field, Boxes) else ())
            done = (
                set()
                if column is None
                else self._decode_together(field, places, column, bad, draws)
            )
            for row in sorted({*range(len(batch.ids))} - done - bad.keys()):
                number, offset, size = places[:, row].tolist()
                member, out = "", None if column is None else column[row, ...]
                view = self.arena.view[offset : offset + size]
                try:
                    if isinstance(field, Boxes) and field.column:
                        view = memoryview(batch.joined[field.column][row].encode())
                    elif size < 0:
                        raise LookupError(f"it has none of {', '.join(field.names)}")
                    else:
                        member = self.field_names[number]
                    if isinstance(field, Boxes):
                        _, start, length = pictures[:, row].tolist()
                        picture = self.arena.view[start : start + length] if length >= 0 else None
                        values[row] = field.read(member, view, None, draws[row], picture)
                    else:
                        values[row] = _checked(read_field(field, member, view, out, draws[row]))
                except Exception as error:  # a user's field may raise anything
                    hint = _GZIPPED if bytes(view[:2]) == b"\x1f\x8b" else ""
                    bad[row] = BadSample(row, member or name, f"{reason_of(error)}{hint}")
        return lists

    def _first_of(self, batch: ReadBatch, names: tuple[str, ...]) -> Ints:
        """Return where the first of these fields lies that each sample has.

        int64[3, b]: number of the field, offset and size of its value; -1 for samples without any.
        """
        places, members, known = np.full((3, len(batch.ids)), -1), batch.members, self.field_names
        for number in (known.index(name) for name in reversed(names) if name in known):
            is_field = members.field == number
            places[0, members.row[is_field]] = number
            places[1:, members.row[is_field]] = members.offset[is_field], members.size[is_field]
        return places

    def _decode_together(
        self,
        field: Field,
        places: Ints,
        column: Array,
        bad: Mapping[int, BadSample],
        draws: Draws,
    ) -> set[int]:
        """Decode plain JPEGs or equal arrays by one call of C. Returns the rows that are done.

        Rows that fail here are decoded again one by one, which finds the reason. So are values that
        are missing or beyond the memory: offsets may come from a hostile index file.
        """
        # a user's subclass may decode differently
        if not isinstance(field, (Image, NumpyArray)) or type(field) not in (Image, NumpyArray):
            return set()
        _, offset, size = places
        is_inside = (offset >= 0) & (size >= 0) & (offset <= self.arena.size - size)
        is_inside[list(bad)] = False
        rows = np.flatnonzero(is_inside)
        with suppress(Exception):
            address = offset[rows] + self.arena.address
            return field.read_rows(rows, address, size[rows], column, draws)
        return set()

    # --- whole samples ----------------------------------------------------------------------------

    def _samples(self, batch: ReadBatch) -> list[dict[str, memoryview]]:
        """Return the values of each sample by field, in the order of the shard."""
        samples: list[dict[str, memoryview]] = [{} for _ in batch.ids]
        members, view = batch.members, self.arena.view
        for row, field, offset, size in zip(
            members.row.tolist(),
            members.field.tolist(),
            members.offset.tolist(),
            members.size.tolist(),
            strict=True,
        ):
            samples[row][self.field_names[field]] = view[offset : offset + size]
        return samples

    def _run_transform(
        self, transform: Transform, batch: ReadBatch, bad: dict[int, BadSample], own_process: bool
    ) -> list[Any]:
        """Return the example of each sample.

        own_process: seed the global random generators for each sample. Threads share them, and
        must leave them alone.
        """
        examples: list[Any] = [None] * len(batch.ids)
        for row, members in enumerate(self._samples(batch)):
            if row in bad:
                continue
            sample: dict[str, Any] = {"__key__": batch.keys[row]}
            sample |= {name: bytes(member) for name, member in members.items()}
            random_key = key("sample", self.seed, batch.epoch, int(batch.rng_ids[row]))
            if own_process:
                _seed_globals(random_key)
            try:
                examples[row] = (
                    transform(sample, np.random.Generator(np.random.Philox(key=random_key)))
                    if self.takes_rng
                    else transform(sample)
                )
                self._check_example(examples[row])
            except Exception as error:  # the user's function may raise anything
                source = (
                    ""
                    if isinstance(error, SampleError)
                    else f"transform raised {type(error).__name__}: "
                )
                bad[row] = BadSample(row, "", f"{source}{reason_of(error)}")
        return examples

    def _check_example(self, example: Any) -> None:
        """Raise SampleError for a value that cannot be collated."""
        if example is None:
            raise SampleError(
                "transform returned None, and each sample must give an example; "
                "filter samples when they are packed (wdstrain convert tars --where)"
            )
        if self.collate_fn in (None, default_collate) and not isinstance(example, Mapping):
            raise SampleError(
                f"transform returned {type(example).__name__}; an example must be a dict of values "
                "by name, or a value that your own collate_fn takes"
            )


def _with_size(fields: Mapping[str, Field], size: Size) -> dict[str, Field]:
    """Return those of the fields that have the size of their bucket, with this size."""
    sized = dict[str, Field]()
    for name, field in fields.items():
        if isinstance(field, (Image, Mask)) and field.sizes:
            sized[name] = replace(field, size=size, sizes=None)
        elif isinstance(field, Boxes) and field.image.sizes:
            sized[name] = replace(field, image=replace(field.image, size=size, sizes=None))
    return sized


def _checked(value: Any) -> Any:
    """Return the value. Raises SampleError for an array of numbers that torch does not support."""
    if _is_numeric(value) and not torch_has(value.dtype):
        raise SampleError(
            f"it is an array of {value.dtype}, which torch does not support; "
            "store it as float64 or complex128"
        )
    return value


def stacked(values: list[Any]) -> Any:
    """Return a tensor if all values are arrays of one shape, else a list."""
    first = next(iter(values), None)
    is_uniform = isinstance(first, np.ndarray) and all(
        isinstance(value, np.ndarray) and (value.shape, value.dtype) == (first.shape, first.dtype)
        for value in values
    )
    return _tensor(np.stack(values)) if is_uniform else list(map(_tensor, values))


def _tensor(value: Any) -> Any:
    """Return arrays of numbers as tensors, anything else as it is."""
    if not _is_numeric(value):
        return value
    # torch takes no other byte order and no negative strides, and warns of read-only memory
    return torch.from_numpy(np.require(value, value.dtype.newbyteorder("="), ["C", "W"]))


def _is_numeric(value: Any) -> bool:
    """Return whether a value is an array of numbers; arrays of text or times are not."""
    return isinstance(value, np.ndarray) and value.dtype.kind in "biufc"


def _seed_globals(random_key: int) -> None:
    """Seed the global random generators of this process."""
    random.seed(random_key)
    np.random.seed(random_key & 0xFFFFFFFF)
    # not torch.manual_seed: it records a call stack for each kind of device, and would seed the
    # devices of a training process in which a batch is decoded again
    torch.default_generator.manual_seed(random_key)


def _collate_examples(examples: list[Any], collate_fn: Collate | None) -> dict[str, Any]:
    """Return the batch of these examples. Raises SampleError."""
    try:
        batch = (collate_fn or default_collate)(examples)
        if not isinstance(batch, Mapping):
            raise TypeError(
                f"it returned {type(batch).__name__}; a batch must be a dict of values by name"
            )
        return dict(batch)
    except Exception as error:
        reason = reason_of(error)
        if collate_fn not in (None, default_collate):
            raise SampleError(f"collate_fn raised {type(error).__name__}: {reason}") from error
        raise SampleError(
            f"the examples of this batch cannot be stacked: {reason.rstrip('. ')}. "
            "Return values of one shape, or give the Loader a collate_fn, which makes a batch of "
            "the list of its examples"
        ) from error
