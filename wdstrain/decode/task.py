"""Tasks, bad samples and results of decoders. All are sent between processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from wdstrain.shards.offsets import Ints

MISMATCH = "its bytes are not those that were packed (crc32)"

_MAX_REASON = 1000  # characters


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

    ids: int64[b]. columns: sequences of b values, changed in place; of arrays, rows are numbers.
    on_error: "raise" changes nothing; "replace" copies another row; "mark" empties the row.
    """
    if on_error == "mark":
        for sample in bad:
            for column in columns:
                column[sample.row] = 0 if isinstance(column, np.ndarray) else None
        return [sample._replace(substitute=int(ids[sample.row])) for sample in bad]
    good = sorted(set(range(len(ids))) - {sample.row for sample in bad})
    if on_error == "raise" or not good:
        return bad
    return [_copy_good_row(sample, good, ids, columns) for sample in bad]


def _copy_good_row(sample: BadSample, good: list[int], ids: Ints, columns: list[Any]) -> BadSample:
    """Copy the good row before a bad row, or the last good row if there is none before it.

    The choice depends on the batch alone: not on the worker, nor on the step of a resume.
    """
    row = max((row for row in good if row < sample.row), default=good[-1])
    for column in columns:
        column[sample.row] = column[row]
    return sample._replace(substitute=int(ids[row]))


class Members(NamedTuple):
    """Positions of the encoded values of a batch: b samples with m members (files) in all.

    first: int64[b + 1], number of the first member of each sample; the last entry is m.
    field: uint16[m], field number of each member.
    offset, size: int64[m] each, bytes of each member in the arena.
    common_fields: field numbers that each sample has, in this order; empty if samples differ.
    """

    first: Ints
    field: npt.NDArray[np.uint16]
    offset: Ints
    size: Ints
    common_fields: tuple[int, ...]


class Task(NamedTuple):
    """One batch to decode.

    slot: batch slot that the decoder fills.
    ids: int64[b], sample ids.
    keys: keys of the samples; empty unless there is a transform, which gets them.
    bad: by row, field and reason of a sample whose bytes cannot be used; see `BadSample`.
    draws: int64[b], numbers of the samples' own random bits; see `order.Steps`.
    """

    batch_number: int
    epoch: int
    slot: int
    ids: Ints
    members: Members
    keys: tuple[str, ...]
    bad: Mapping[int, tuple[str, str]]
    draws: Ints


class Result(NamedTuple):
    """A decoded batch.

    values: batch values by name, except those in the slot.
    bad: samples that could not be decoded.
    started, rows_done, finished: time.perf_counter() at the start, when every row was decoded, and
    when the rows were collated. All processes of a machine share this clock.
    cpu_seconds: processor time of the decoding thread.
    queued_seconds: time in which the thread waited for a processor.
    """

    batch_number: int
    slot: int
    values: dict[str, Any]
    bad: list[BadSample]
    started: float
    rows_done: float
    finished: float
    cpu_seconds: float
    queued_seconds: float
