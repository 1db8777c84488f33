"""Decode fields as training would: images are decoded, others parsed; nothing is unpickled.

The extension of a field says how, and for labels the index. Threads decode a megabyte at a time:
a task for each small image would cost more than its decoding.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from functools import partial
from typing import NamedTuple

import numpy as np

from wdstrain.decode.codecs import decode_image
from wdstrain.decode.fields import Field, array, json
from wdstrain.decode.formats import is_image
from wdstrain.decode.labels import LabelField, field_of, text
from wdstrain.errors import SampleError
from wdstrain.shards.kinds import ColumnInfo
from wdstrain.shards.values import scalar

MOST = 1 << 30  # bytes of a field that is decoded
NOT_FINITE = "is NaN or infinite"
_TOGETHER = 1 << 20  # bytes of one task
_AHEAD = 4  # tasks that may wait, so that bytes do not pile up
_DRAWS = np.zeros(27)

Read = Callable[[bytes], object]
Failure = tuple[str, str, int, str]  # key, field, offset, reason


class _Try(NamedTuple):
    key: str
    field: str
    offset: int
    data: bytes
    read: Read


class FieldReaders:
    """Decoder of each field, by its name.

    labels: of the index. is_finite: NaN and infinite labels are refused, with a reason that ends
    with NOT_FINITE.
    """

    def __init__(self, labels: tuple[ColumnInfo, ...], *, is_finite: bool = False) -> None:
        self._labels, self._is_finite = labels, is_finite
        self._known: dict[str, Read | None] = {}

    def of(self, field: str) -> Read | None:
        """Return a function that raises for bytes that are invalid; None for unknown fields."""
        if field not in self._known:
            self._known[field] = self._reader(field)
        return self._known[field]

    def _reader(self, field: str) -> Read | None:
        mine = [field_of(declared) for declared in self._labels if declared.field == field]
        kind = field.rpartition(".")[2]
        if mine:
            return partial(_into_all, mine, field, is_finite=self._is_finite)
        if is_image(field):
            return decode_image
        if kind in ("txt", "text"):
            return partial(_into_all, [text(field)], field)
        if kind == "json":
            return partial(_into_all, [json(field)], field)
        if kind == "npy":
            return partial(_into_all, [array(field)], field)
        return _class if kind == "cls" else None


def decode_error(read: Read, data: bytes) -> str:
    """Return the reason that a field cannot be decoded; "" if it can."""
    try:
        read(data)
    except Exception as error:  # parsers raise whatever they meet
        return str(error).split("\n")[0].strip().rstrip(".") or type(error).__name__
    return ""


class DecodeCheck:
    """Decodes the fields of one shard in threads. failures: undecodable fields, in order."""

    def __init__(self, threads: Executor) -> None:
        self._threads = threads
        self._batch: list[_Try] = []
        self._bytes = 0
        self._running: deque[Future[list[Failure]]] = deque()
        self.failures: list[Failure] = []

    def put(self, key: str, field: str, offset: int, data: bytes, read: Read) -> None:
        self._batch.append(_Try(key, field, offset, data, read))
        self._bytes += len(data)
        if self._bytes >= _TOGETHER:
            self._submit()

    def finish(self) -> None:
        self._submit()
        while self._running:
            self.failures += self._running.popleft().result()

    def _submit(self) -> None:
        self._running.append(self._threads.submit(_try_all, self._batch))
        self._batch, self._bytes = [], 0
        while len(self._running) > _AHEAD:
            self.failures += self._running.popleft().result()


def _try_all(batch: list[_Try]) -> list[Failure]:
    return [
        (attempt.key, attempt.field, attempt.offset, why)
        for attempt in batch
        if (why := decode_error(attempt.read, attempt.data))
    ]


def _into_all(fields: Sequence[Field], name: str, data: bytes, *, is_finite: bool = False) -> None:
    """Decode a field with each of `fields`. is_finite: raise SampleError for NaN and infinity."""
    for field in fields:
        out = (
            np.empty(field.example.shape, field.example.dtype)
            if field.example is not None
            else None
        )
        field.read(name, memoryview(data), out, _DRAWS)
        is_number = isinstance(field, LabelField) and field.kind == "number"
        if is_finite and is_number and out is not None and not np.isfinite(out):
            raise SampleError(f"its {getattr(field, 'entry', None) or name} {NOT_FINITE}")


def _class(data: bytes) -> None:
    """Raise SampleError for an empty class, if no index lists the classes."""
    if not str(scalar(memoryview(data), None)):
        raise SampleError("it is empty")
