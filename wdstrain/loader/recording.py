"""Values that a loop records for each sample, and the weights of epochs that are made of them.

`Loader.record` and `Loader.recorded` call `Recording`. An epoch with such weights is drawn from the
values of the epochs before it: `EpochBatches` calls `begin` when the first batch of an epoch is
requested, and `EpochPlans` takes the plan of the epoch from here.

Several ranks share their values by collectives. The first rank then keeps all of them, and the
others begin anew, so that no value is counted twice when they share again.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Mapping
from itertools import chain
from typing import Any
from zlib import compress, decompress

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from wdstrain.errors import UsageError
from wdstrain.loader.batch_assembly import TakenBatch
from wdstrain.loader.options import group_size
from wdstrain.order.order import Ints
from wdstrain.order.weighted_plan import WeightedPlan
from wdstrain.shards.index import Index
from wdstrain.shards.joining import can_join

# Record of a sample in a column. epoch: of the newest value. count, total: of the values of that
# epoch. times: values of all epochs. Sums of float32 values are nearly always exact in float64, so
# they do not depend on the ranks that had the values.
_NONE = np.array(
    (-1, 0, 0, 0), [("epoch", "<i4"), ("count", "<i4"), ("times", "<i4"), ("total", "<f8")]
)
RECORDED = "recorded:"  # begins the name of recorded values, where a column has it, too
_ALL = ""  # column that counts each call of `record`
_TABLE = ("epoch", "times")  # columns of the table beside the recorded ones
# Share of the former values in the smoothed value of a sample, and share of the mean weight that
# every sample has.
_FORMER, _FLOOR = 0.5, 0.1
# A state without values, of samples that are not weighed.
NOTHING = {"epoch": 0, "newest": 0, "smoothed": "eJwDAAAAAAE=", "columns": {}}


class Recording:
    """Recorded values of the samples of a loader.

    name: of the values that weigh the samples; None: none do.
    """

    def __init__(
        self, index: Index, name: str | None, weights: Any, rank: int, world_size: int
    ) -> None:
        """weights: the option of the loader."""
        self.name, self._weights = name, weights
        self._samples, self._known = len(index), [column.name for column in index.columns]
        self._rank, self._world_size = rank, world_size
        self._columns: dict[str, npt.NDArray[Any]] = {}
        self._is_recorded = False  # whether the loop ever recorded what weighs the samples
        self._newest = self._epoch = 0  # epochs: the last that has values, and that was begun
        # By sample, what the weights of `_epoch` are made of; NaN: nothing.
        self._smoothed = np.full(self._samples if self.name else 0, np.nan, np.float32)
        self._delivered: TakenBatch | None = None  # the batch that was recorded last

    # --- values -----------------------------------------------------------------------------------

    def record(
        self,
        index: Index,
        delivered: TakenBatch | None,
        epoch: int,
        batch: Mapping[str, Any],
        values: Mapping[str, Any],
    ) -> None:
        """Keep values of a batch; see `Loader.record`. delivered: the batch delivered last."""
        keys = batch.get("__key__") if isinstance(batch, Mapping) else None
        keys = keys if isinstance(keys, (list, tuple)) else ()
        for is_wrong, problem, hint in (
            (
                delivered is None or list(keys) != delivered.values["__key__"],
                "values can be recorded only for the batch that this loader delivered last.",
                'Call record(batch, ...) before the next batch is requested, with its "__key__".',
            ),
            (
                delivered is self._delivered,
                "this batch was recorded already.",
                "Record all of its values by one call.",
            ),
            (
                epoch < self._newest,
                f"epoch {epoch} cannot be recorded after values of epoch {self._newest}.",
                "Make another loader, or load a state.",
            ),
            (not values, "record was called without values.", "Write record(batch, loss=losses)."),
        ):
            if is_wrong:
                raise UsageError(problem, hint)
        assert delivered is not None
        rows = np.flatnonzero(delivered.own & delivered.valid)
        checked = [self._checked(index, delivered, rows, *pair) for pair in values.items()]
        self._delivered, self._newest = delivered, epoch
        self._is_recorded |= self.name in values
        for name, numbers in {_ALL: 0, **dict(zip(values, checked, strict=True))}.items():
            new = {"epoch": epoch, "count": 1, "times": 1, "total": numbers}
            self._add(self._columns, name, delivered.ids[rows], new)

    @np.errstate(over="ignore")
    def _checked(
        self, index: Index, delivered: TakenBatch, rows: Ints, name: str, values: Any
    ) -> npt.NDArray[np.float32]:
        """Return the values of the rows that are recorded. Raises UsageError."""
        if name in _TABLE or not can_join(index, name):
            raise UsageError(
                f"values cannot be recorded as {name!r}: the table of values, the samples or the "
                "index use this name, or it means an entry of a field.",
                "Give them another name.",
            )
        if self.name is None and isinstance(self._weights, str) and name == self._weights:
            raise UsageError(
                "{weights} is a column of the index, and recorded values would not change it.",
                f"To use the recorded values, write weights='{RECORDED}{name}'.",
                {"weights": name},
            )
        try:
            numbers = np.asarray(
                values.detach().cpu().to(torch.promote_types(values.dtype, torch.float32))
                if isinstance(values, torch.Tensor)
                else values
            )
        except (TypeError, ValueError, RuntimeError):  # a list of other values than numbers
            numbers = np.array(None)
        if numbers.shape != delivered.ids.shape or numbers.dtype.kind not in "biuf":
            raise UsageError(
                f"{name} is a {type(values).__name__} of shape {list(numbers.shape)}: must be one "
                f"number for each of the {len(delivered.ids)} rows of the batch.",
                "Losses of torch give them with reduction='none'.",
            )
        recorded = numbers[rows].astype(np.float32)
        negative = np.flatnonzero(recorded < 0)
        if name == self.name and len(negative):
            raise UsageError(
                f"{recorded[negative[0]]:g} was recorded for sample "
                f"{delivered.values['__key__'][rows[negative[0]]]!r}: values that weigh samples "
                "must be >= 0.",
                option="weights",
                value=name,
            )
        return recorded

    def _add(self, columns: dict[str, npt.NDArray[Any]], name: str, ids: Ints, new: Any) -> None:
        """Add records of samples to a column. new: an array or a number by part of a record.

        Values count until a sample has a later epoch.
        """
        if name not in columns:
            columns[name] = np.full(self._samples, _NONE)
        records = columns[name]
        newer = ids[new["epoch"] > records["epoch"][ids]]
        records["count"][newer] = records["total"][newer] = 0
        records["epoch"][ids] = np.maximum(records["epoch"][ids], new["epoch"])
        rows = records["epoch"][ids] == new["epoch"]
        for part, is_added in (("count", rows), ("total", rows), ("times", True)):
            np.add.at(records[part], ids, np.where(is_added, new[part], 0))

    def _shared(self) -> dict[str, npt.NDArray[Any]]:
        """Return the records of all ranks by column. Collective."""
        if self._world_size == 1 or group_size() != self._world_size:
            return self._columns
        own = [(n, ids := np.flatnonzero(c["times"]), c[ids]) for n, c in self._columns.items()]
        parts, columns = [own] * self._world_size, dict[str, npt.NDArray[Any]]()
        torch.distributed.all_gather_object(parts, own)
        for name, ids, records in chain(*parts):
            self._add(columns, name, ids, records)
        return columns

    def table(self, index: Index) -> pa.Table:
        """Return the values of all ranks; see `Loader.recorded`. Collective."""
        columns = self._shared()
        newest = columns.get(_ALL, np.full(self._samples, _NONE))
        means = {
            n: pa.array(_means(c), mask=(c["count"] == 0) | (c["epoch"] != newest["epoch"]))
            for n, c in columns.items()
            if n != _ALL
        }
        return pa.table(
            {"key": index.batch().column(0), **{n: newest[n] for n in _TABLE}, **means}
        ).filter(pa.array(newest["times"] > 0))

    # --- weights ----------------------------------------------------------------------------------

    def begin(self, epoch: int) -> int | None:
        """Make the weights of an epoch, unless it was begun before. Collective.

        Returns the epoch at which reading ahead must stop, because its weights are not known yet;
        None: it need not stop. Raises UsageError.
        """
        if self.name is not None and self._world_size not in (1, group_size()):
            raise UsageError(
                f"the ranks draw an epoch from the values {self.name!r} that all of them recorded, "
                f"and this process cannot share them with {{world_size}}.",
                "Call torch.distributed.init_process_group on each rank first.",
                {"world_size": self._world_size},
            )
        if self.name is not None and epoch > self._epoch:
            columns, former = self._shared(), self._smoothed
            records = columns.get(self.name, np.full(self._samples, _NONE))
            values = _means(records)
            is_new = np.isfinite(values) & (records["epoch"] >= self._epoch)
            mixed = np.where(np.isnan(former), values, _FORMER * former + (1 - _FORMER) * values)
            self._smoothed = np.where(is_new, mixed, former)
            self._columns, self._epoch = {} if self._rank else columns, epoch
        return None if self.name is None else epoch + 1

    def plan(self, arguments: Mapping[str, Any], epoch: int) -> WeightedPlan:
        """Return the plan of an epoch. arguments: others of the plan.

        Raises UsageError for an epoch whose weights are not known.
        """
        if epoch not in (0, self._epoch):
            raise UsageError(
                f"epoch {epoch} is drawn from the values that are recorded when it begins. Known are "
                f"the orders of epoch 0 and of the newest epoch, {self._epoch}."
            )
        is_known = np.isfinite(self._smoothed) & (epoch == self._epoch)
        # Numbers are added one after another, so that the sum is the same on every machine.
        sums = np.cumsum(self._smoothed[is_known], dtype=np.float64)
        mean = sums[-1:].sum() / max(1, len(sums))
        shares = np.divide(
            self._smoothed, mean, out=np.ones(self._samples), where=is_known & (mean > 0)
        )
        return WeightedPlan(
            weights=_FLOOR + (1 - _FLOOR) * shares,
            # Samples of one stratum are drawn at random; nearly all weights differ.
            strata=np.zeros(self._samples, np.int64),
            epoch=epoch,
            **arguments,
        )

    def check(self) -> None:
        """Raise UsageError if nothing was recorded of the column that weighs the samples."""
        if self.name is not None and not self._is_recorded:
            raise UsageError(
                "nothing was recorded under this name for the batch before, and the index has no "
                f"such column; its columns are {', '.join(self._known) or '(none)'}.",
                f"Name one of them, or call record(batch, {self.name}=values) for each batch.",
                option="weights",
                value=self.name,
            )

    # --- state ------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the values of all ranks as a JSON-able dict. Collective."""
        return {
            "epoch": self._epoch,
            "newest": self._newest,
            "smoothed": _packed(self._smoothed),
            "columns": {name: _packed(records) for name, records in self._shared().items()},
        }

    def load(self, state: Any) -> None:
        """Replace the values by those of a state. Raises UsageError."""
        try:
            smoothed = _unpacked(state["smoothed"], self._smoothed.dtype, len(self._smoothed))
            columns = {
                str(name): _unpacked(text, _NONE.dtype, self._samples)
                for name, text in state["columns"].items()
            }
            self._epoch, self._newest = int(state["epoch"]), int(state["newest"])
        except Exception as error:  # of types, base64 and zlib
            raise UsageError("this state holds no recorded values of these samples.") from error
        self._is_recorded = self.name in columns
        self._columns, self._smoothed = {} if self._rank else columns, smoothed


def _packed(values: npt.NDArray[Any]) -> str:
    """Return an array as a text."""
    return b64encode(compress(values.tobytes(), 1)).decode()


def _unpacked(text: str, dtype: np.dtype[Any], count: int) -> npt.NDArray[Any]:
    """Return the array of a text."""
    return np.array(np.frombuffer(decompress(b64decode(text)), dtype).reshape(count))


@np.errstate(all="ignore")
def _means(records: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Return the mean of the values of each sample in its newest epoch; NaN without values."""
    return np.asarray(records["total"] / records["count"], np.float32)
