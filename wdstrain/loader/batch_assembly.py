"""The dict that the loop gets: decoded values, keys, sources and the mask of padding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from wdstrain.decode.batch_slots import Slots
from wdstrain.decode.decoder import Result
from wdstrain.loader.bad_samples import BadSampleHandler
from wdstrain.loader.pipeline_parts import PipelineOptions
from wdstrain.loader.stats import Finding
from wdstrain.order.plan import Order
from wdstrain.reader.reader import CollectedBatch
from wdstrain.shards.index import Index, Ints


class BatchInfo(NamedTuple):
    """Counts of one batch of b rows.

    ids: sample ids in the rows, int64[b]. own: bool[b], whether the row has the sample that the plan
    put there; in the others a substitute replaces a bad sample. padded: rows of padding.
    bad: the bad samples, without padding.
    """

    ids: Ints
    own: npt.NDArray[np.bool_]
    padded: int
    bad: list[Finding]


class BatchAssembler:
    """Assembles the loop's batches from decoded ones."""

    def __init__(
        self, index: Index, slots: Slots, bad_samples: BadSampleHandler, options: PipelineOptions
    ) -> None:
        self._index, self._slots, self._bad_samples = index, slots, bad_samples
        self._transforms = options.transform is not None
        sources = options.sources or {}
        self._source_names = list(sources)
        self._source_firsts = np.array(list(sources.values()), np.int64)

    def assemble(
        self, result: Result, batch: CollectedBatch, keys: list[str], plan: Order
    ) -> tuple[dict[str, Any], BatchInfo]:
        """Return the batch and its counts. keys: of its samples.

        Raises SampleError for a bad sample that is not replaced.
        """
        ids, findings = batch.ids.copy(), list[Finding]()
        own = np.ones(len(ids), bool)
        if result.bad:
            result = self._bad_samples.repair(result, batch, plan.epoch)
            for bad in result.bad:
                ids[bad.row], own[bad.row] = bad.substitute, False
                if batch.valid[bad.row]:
                    findings.append(self._bad_samples.finding(batch, bad))
        valid = len(ids) if plan.tail == "drop" else int(np.count_nonzero(batch.valid))
        rows = valid if plan.tail == "keep" else len(ids)
        values = self._slots.hand_out(result.slot, rows) | self._loose_values(result, rows)
        values["__key__"] = self._index.keys(ids[:rows]) if result.bad else keys[:rows]
        if self._source_names:
            numbers = np.searchsorted(self._source_firsts, ids, side="right") - 1
            values["__source__"] = [self._source_names[i] for i in numbers.tolist()]
        if plan.tail == "pad":
            values["__valid__"] = torch.from_numpy(batch.valid.copy())
        return values, BatchInfo(ids[:rows], own[:rows], rows - valid, findings)

    def _loose_values(self, result: Result, rows: int) -> dict[str, Any]:
        """Return the values that have no column in a slot."""
        if rows:
            return result.values
        return {
            name: _without_rows(value) if self._transforms else value[:0]
            for name, value in result.values.items()
        }


def _without_rows(value: Any) -> Any:
    """Return a collated value without its rows, of the same type."""
    if isinstance(value, torch.Tensor):
        return value[:0]
    if isinstance(value, Mapping):
        return {name: _without_rows(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)) and any(
        isinstance(part, (torch.Tensor, Mapping)) for part in value
    ):
        # default_collate makes a column for each position of a sequence
        return type(value)(map(_without_rows, value))
    return []
