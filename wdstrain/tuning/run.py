"""Run a loader for a while and measure its rate."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from wdstrain.decode.fields import Field
from wdstrain.decode.pickling import check_picklable
from wdstrain.decode.task import Transform
from wdstrain.errors import UsageError
from wdstrain.loader.loader import Loader
from wdstrain.loader.options import takes_rng
from wdstrain.shards.index import Index
from wdstrain.tuning import stages


@dataclass(frozen=True)
class Rate:
    """Result of one run of a loader.

    rate: samples/s. first_batch: seconds until the first batch.
    decode: seconds of one decoder per sample, collation included. compute: processor seconds of them.
    runnable: seconds of them in which it computed or waited for a processor, but not for the GIL.
    report: of the last epoch.
    """

    rate: float
    first_batch: float
    decode: float
    compute: float
    runnable: float
    report: Mapping[str, Any]


@dataclass(frozen=True)
class Setup:
    """The loader that is measured."""

    fields: Mapping[str, Field] | None
    transform: Transform | None
    num_workers: int
    options: Mapping[str, Any]
    seconds: float

    @property
    def decodes(self) -> bool:
        """Whether samples are decoded at all. Without fields and transform they are bytes."""
        return self.fields is not None or self.transform is not None

    @property
    def fits_processes(self) -> bool:
        """Whether fields and functions can be sent to worker processes."""
        functions = {"transform": self.transform, "collate_fn": self.options.get("collate_fn")}
        try:
            check_picklable(self.fields, functions, self.options.get("multiprocessing_context"))
        except UsageError:
            return False
        return True

    def idle(self, index: Index) -> Setup:
        """Return the same loader with fields or a transform that decode nothing."""
        if self.transform is not None:
            rng = takes_rng(self.transform)
            idle = stages.IdleTransform.like(self.transform, index, takes_rng=rng)
            return replace(self, transform=idle)
        fields: dict[str, Field] = {
            name: stages.IdleField.like(field, index) for name, field in (self.fields or {}).items()
        }
        return replace(self, fields=fields if self.fields is not None else None)

    def run(self, index: Index, **changes: Any) -> Rate:
        """Run the loader for `seconds` after its first batch. changes: other Loader options."""
        options = {"num_workers": self.num_workers, **self.options, **changes}
        loader = Loader(index, self.fields, self.transform, **options)
        begin = time.perf_counter()
        first, rows, batches = begin, 0, 0
        decode, compute, queued, decoded, epochs = 0.0, 0.0, 0.0, 0, 0
        try:
            while not epochs or time.perf_counter() - first < self.seconds or batches < 2:
                for batch in loader:
                    now = time.perf_counter()
                    first = first if batches else now
                    rows += len(batch["__key__"]) if batches else 0
                    batches += 1
                    del batch
                    if now - first >= self.seconds and batches > 1:
                        break
                report = loader.report()
                if epochs == 1:  # the first epoch includes the start of libraries
                    decode, compute, queued, decoded = 0.0, 0.0, 0.0, 0
                decode += report["decode_seconds"] + report["collate_seconds"]
                compute += report["compute_seconds"]
                queued += report["queued_seconds"]
                decoded += report["samples"]
                epochs += 1
            spent = time.perf_counter() - first
            decoded = max(1, decoded)
            decode, compute, queued = (value / decoded for value in (decode, compute, queued))
            return Rate(rows / spent, first - begin, decode, compute, compute + queued, report)
        finally:
            loader.close()
