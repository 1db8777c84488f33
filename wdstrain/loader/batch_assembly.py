"""The loop's batches, which are made of the results of decoders.

`Pipeline` calls this in the loop's thread. If every sample of a batch is bad, another sample takes
their place. This is rare and does not depend on the decoders: the substitute is the next good
sample of the data set, for every epoch, rank and worker.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch

from wdstrain.augment.gpu import NO_SAMPLE, RNG, are_images
from wdstrain.decode.batches import BadSample, ReadBatch, Result, Slots, empty_row
from wdstrain.decode.boxes import BoxBatch
from wdstrain.decode.decoder import Decoder, stacked
from wdstrain.decode.labels import LabelColumn
from wdstrain.errors import SampleError, ShardError, StorageError
from wdstrain.loader.options import LoaderOptions
from wdstrain.loader.stats import Finding
from wdstrain.memory import Memory
from wdstrain.order.order import Order
from wdstrain.order.rng import bits
from wdstrain.reader.reads import sample_members
from wdstrain.shards.index import Index
from wdstrain.shards.offsets import Bools, Ints

Batch = dict[str, Any]

_MOST_TRIED = 100  # samples that are tried as substitutes, one after another


class TakenBatch(NamedTuple):
    """A batch of b rows, with its counts.

    values: by name. ids: sample ids in the rows, int64[b]. own: bool[b], whether a row has the
    sample that the plan put there; the other rows are bad samples, replaced or empty. valid: bool[b],
    False for padding. bad: the bad samples, without padding.
    """

    values: dict[str, Any]
    ids: Ints
    own: Bools
    valid: Bools
    bad: list[Finding]


class BatchAssembler:
    """Makes the loop's batches of results."""

    def __init__(
        self,
        index: Index,
        options: LoaderOptions,
        columns: Mapping[str, LabelColumn],
        texts: Collection[str],
        needed_fields: Collection[str] | None,
        sources: Mapping[str, int],
    ) -> None:
        """columns: labels that the index gives, by name. texts: joined columns that decoders need.

        needed_fields: of the decoders; None: all. sources: of a mixture, the first sample id of each source.
        """
        self._index, self._options, self._columns = index, options, columns
        self._needed_fields, self._source_names = needed_fields, list(sources)
        self._source_firsts = np.array(list(sources.values()), np.int64)
        self._joined = [column for column in index.columns if column.name in texts]

    def joined(self, ids: Ints) -> dict[str, list[str]]:
        """Return the texts of samples that decoders need, by joined column."""
        return {column.name: column.take(pa.array(ids)).to_pylist() for column in self._joined}

    def assemble(
        self, result: Result, batch: ReadBatch, order: Order, slots: Slots, decoder: Decoder
    ) -> TakenBatch:
        """Return the batch of a result.

        decoder: decodes a sample that takes the place of a batch of bad ones. Raises SampleError
        for a bad sample that is not replaced.
        """
        findings, keys = list[Finding](), batch.keys
        ids, draws = batch.ids, batch.rng_ids
        own = np.ones(len(ids), bool)
        if result.bad:
            result = self._replaced(result, batch, decoder)
            ids, draws = ids.copy(), draws.copy()
            for bad in result.bad:
                ids[bad.row], draws[bad.row], own[bad.row] = bad.substitute, bad.substitute, False
                if batch.valid[bad.row]:
                    findings.append(self._finding(batch, bad))
            keys = self._index.keys(ids)
        rows = int(np.count_nonzero(batch.valid)) if order.tail == "keep" else len(ids)
        values: dict[str, Any] = slots.lease(batch.slot, rows)
        values |= result.values if rows else self._empty(result.values)
        values |= self._labels(ids[:rows], own[:rows])
        if any(map(are_images, values.values())):
            values[RNG] = bits(draws[:rows], "device", order.seed, order.epoch)
            if self._options.on_error == "mark":
                values[RNG][~own[:rows]] = NO_SAMPLE
        values["__key__"] = keys[:rows]
        if self._source_names:
            numbers = np.searchsorted(self._source_firsts, ids, side="right") - 1
            values["__source__"] = [self._source_names[i] for i in numbers.tolist()]
        if order.tail == "pad":
            values["__valid__"] = torch.from_numpy(batch.valid.copy())
        return TakenBatch(values, ids[:rows], own[:rows], batch.valid[:rows], findings)

    def _labels(self, ids: Ints, own: Bools) -> dict[str, Any]:
        """Return the labels that the index gives, for the samples in the rows."""
        labels = {name: column.rows(ids) for name, column in self._columns.items()}
        if self._options.on_error == "mark":
            for row in np.flatnonzero(~own).tolist():
                empty_row(labels.values(), row)
        return {
            name: torch.from_numpy(rows) if isinstance(rows, np.ndarray) else stacked(rows)
            for name, rows in labels.items()
        }

    def _empty(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return values of decoders without their rows."""
        if self._options.transform is not None:
            return {name: without_rows(value) for name, value in values.items()}
        return {
            name: BoxBatch(value.boxes[:0], value.labels[:0], value.offsets[:1])
            if isinstance(value, BoxBatch)
            else value[:0]
            for name, value in values.items()
        }

    # --- bad samples ------------------------------------------------------------------------------

    def _replaced(self, result: Result, batch: ReadBatch, decoder: Decoder) -> Result:
        """Return the result after its bad samples were replaced.

        Raises SampleError if a bad sample is left.
        """
        if self._options.on_error == "replace" and len(result.bad) == len(batch.ids):
            result = self._substitute(result, batch, decoder)
        left = [bad for bad in result.bad if bad.substitute < 0]
        if left:
            raise self._error(batch, left)
        return result

    def _substitute(self, failed: Result, batch: ReadBatch, decoder: Decoder) -> Result:
        """Return a batch with the next good sample after a batch of bad ones in every row.

        Returns the failed batch if the next 100 samples are bad too.
        """
        bad_ids, first = set(batch.ids.tolist()), int(batch.ids[0])
        for number in range(first + 1, first + min(_MOST_TRIED + len(bad_ids), len(self._index))):
            number %= len(self._index)
            memory = None if number in bad_ids else self._read(number)
            if memory is None:
                continue
            rows = np.full(len(batch.ids), number)
            keys = self._index.keys(rows)
            members = sample_members(self._index, rows, self._needed_fields)
            again = batch._replace(
                ids=rows, rng_ids=rows, keys=keys, members=members, bad={}, joined=self.joined(rows)
            )
            with _generators_kept():
                # Worker processes seed the global random generators for each sample.
                seeded = self._options.num_workers > 0
                result = replace(decoder, arena=memory)(again, own_process=seeded)
            if not result.bad:
                return result._replace(bad=[bad._replace(substitute=number) for bad in failed.bad])
        return failed

    def _read(self, number: int) -> Memory | None:
        """Return memory that begins with a sample; None if its bytes cannot be used."""
        table = self._index.offsets
        memory, start = Memory(int(table.size[number])), int(table.start[number])
        try:
            [(_, sample)] = self._index.read([number], self._needed_fields)
        except (ShardError, StorageError):
            return None
        for name, offset, size in self._index.members(number):
            if name in sample:
                memory.view[offset - start :][:size] = sample[name]
        return memory

    def _error(self, batch: ReadBatch, left: list[BadSample]) -> SampleError:
        """Return the error for the bad samples of a batch that are not replaced."""
        sentence = self._finding(batch, left[0]).sentence
        if left[0].whole_batch:
            return SampleError(f"a batch that begins with {sentence}")
        count = f" ({len(left)} bad samples in this batch.)" if len(left) > 1 else ""
        if self._options.on_error == "raise":
            return SampleError(
                f"{sentence}{count}", "{on_error} goes on without it.", {"on_error": "replace"}
            )
        return SampleError(
            f"{sentence}{count}", "No good sample was found near it to take its place."
        )

    def _finding(self, batch: ReadBatch, bad: BadSample) -> Finding:
        """Return where a bad sample of a batch is and what is wrong with it."""
        number = int(batch.ids[bad.row])
        shard = self._index.shard_with(number)
        offsets = {name: offset for name, offset, _ in self._index.members(number)}
        offset = offsets.get(bad.field, int(self._index.offsets.start[number]))
        if bad.field and bad.field not in offsets:
            # The field is missing. The decoder knows only the fields it needs, so name all here.
            bad = bad._replace(field="", reason=f"{bad.reason} (but {', '.join(offsets)})")
        return Finding(shard.shown, self._index.key(number), bad.field, offset, bad.reason)


@contextmanager
def _generators_kept() -> Iterator[None]:
    """Restore the global random generators at the end."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


# --- tensors in nested mappings, lists and tuples, whose types stay as they are -------------------


def map_tensors(change: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Return a value with each of its tensors changed. Other parts stay as they are."""
    if isinstance(value, torch.Tensor):
        return change(value)
    return _rebuilt(value, lambda part: map_tensors(change, part))


def without_rows(value: Any) -> Any:
    """Return a collated value without its rows.

    A sequence that holds tensors has a column for each position of an example, as default_collate
    makes it. Any other sequence has an entry for each row.
    """
    if isinstance(value, torch.Tensor):
        return value[:0]
    has_columns = hasattr(value, "_fields") or _has_tensors(value)
    if isinstance(value, (list, tuple)) and not has_columns:
        return value[:0]
    return _rebuilt(value, without_rows)


def _has_tensors(value: Any) -> bool:
    """Return whether a tensor is anywhere in a value."""
    if isinstance(value, (Mapping, list, tuple)):
        parts = value.values() if isinstance(value, Mapping) else value
        return any(_has_tensors(part) for part in parts)
    return isinstance(value, torch.Tensor)


def _rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a container of the same type with each part changed; any other value as it is."""
    if isinstance(value, Mapping):
        parts = {name: change(part) for name, part in value.items()}
        if type(value) is dict or not isinstance(value, MutableMapping):
            return parts
        rebuilt = copy(value)
        rebuilt.update(parts)
        return rebuilt
    if isinstance(value, (list, tuple)):
        changed = map(change, value)
        return type(value)(*changed) if hasattr(value, "_fields") else type(value)(changed)
    return value
