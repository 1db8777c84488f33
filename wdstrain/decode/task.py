"""What decoders get and give: read batches, bad samples and results. All go between processes."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from wdstrain.shards.offsets import Ints, Members

_MAX_REASON = 1000  # characters


class ReadBatch(NamedTuple):
    """The b samples of one batch, which are read.

    number: of the batch in the run. ids, rng_ids: int64[b], see `order.Steps`. valid: bool[b], False
    for padding. keys: of the samples. members: the needed fields, in the memory of the reader.
    bad: by row, field and reason of a sample whose bytes cannot be used; see `BadSample`.
    slot: batch slot that the decoder fills.
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
    """A decoded batch.

    values: batch values by name, except those in the slot.
    bad: samples that could not be decoded.
    finished: time.perf_counter() at the end; all processes of a machine share this clock.
    seconds: of decoding, by the names of `StageTotals`.
    """

    batch_number: int
    slot: int
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
