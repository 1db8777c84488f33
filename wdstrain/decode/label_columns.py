"""Labels and numbers from the columns of the index, without reading their bytes.

A column is used only if it gives every sample the value that its bytes would give. Otherwise (a
missing value, a class that the field does not know) the field reads bytes, which gives the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from wdstrain.decode.fields import Field
from wdstrain.decode.label_fields import Label, Labels, Number
from wdstrain.shards.columns import Column
from wdstrain.shards.index import Index
from wdstrain.shards.offsets import Ints

_LARGEST = float(np.finfo(np.float32).max)


class LabelColumn(Protocol):
    """The values of a label field of all samples."""

    def rows(self, ids: Ints) -> torch.Tensor:
        """Return the values of these samples, in memory of their own. ids: int64[b]"""
        ...


def label_columns(fields: Mapping[str, Field], index: Index) -> dict[str, LabelColumn]:
    """Return the columns that take the place of fields, by the fields' names."""
    columns = {name: _label_column(field, index) for name, field in fields.items()}
    return {name: column for name, column in columns.items() if column is not None}


@dataclass(frozen=True)
class _Classes:
    """A class of each sample. codes: int32[n]. numbers: the delivered number of each code, int64."""

    codes: npt.NDArray[np.int32]
    numbers: Ints

    def rows(self, ids: Ints) -> torch.Tensor:
        return torch.from_numpy(self.numbers[self.codes[ids]])


@dataclass(frozen=True)
class _Numbers:
    """A number of each sample. dtype: of the batch."""

    values: npt.NDArray[np.float64] | Ints
    dtype: str

    def rows(self, ids: Ints) -> torch.Tensor:
        return torch.from_numpy(self.values[ids].astype(self.dtype))


@dataclass(frozen=True)
class _Flags:
    """Lists of classes: those of sample i are classes[first[i] : first[i + 1]]."""

    first: Ints
    classes: Ints
    count: int

    def rows(self, ids: Ints) -> torch.Tensor:
        flags = np.zeros((len(ids), self.count), np.float32)
        for row, number in enumerate(ids.tolist()):
            flags[row, self.classes[self.first[number] : self.first[number + 1]]] = 1
        return torch.from_numpy(flags)


def _label_column(field: Field, index: Index) -> LabelColumn | None:
    if type(field) not in (Label, Labels, Number):  # a user's class may read other values
        return None
    assert isinstance(field, (Label, Labels, Number))
    present = [name for name in field.names if name in index.fields]
    place = (present[0], field.column) if len(present) == 1 else None
    column = next((column for column in index.columns if column.place == place), None)
    if column is None or not len(column) or column.values.null_count:
        return None
    if isinstance(field, Number):
        return _numbers(field, column)
    return _flags(field, column) if isinstance(field, Labels) else _classes(field, column)


def _numbers(field: Number, column: Column) -> _Numbers | None:
    """Return the numbers of a column; None if some value is no finite float32."""
    if column.kind == "flag":
        return _Numbers(np.asarray(column.values.cast(pa.int8())).astype(np.int64), field.dtype)
    if column.kind not in ("integer", "number"):
        return None
    values = np.asarray(column.values)
    if not np.isfinite(values).all() or np.abs(values.astype(np.float64)).max() > _LARGEST:
        return None
    return _Numbers(values.astype(np.float64), field.dtype)


def _flags(field: Labels, column: Column) -> _Flags | None:
    """Return the lists of a column; None if some name is not a class of the field."""
    if column.kind != "multi":
        return None
    coded = column.values.flatten().dictionary_encode()
    positions = {name: number for number, name in reversed(list(enumerate(field.classes)))}
    names = coded.dictionary.to_pylist()
    if coded.null_count or any(name not in positions for name in names):
        return None
    numbers = np.array([positions[name] for name in names], np.int64)
    offsets = np.asarray(column.values.offsets).astype(np.int64)
    return _Flags(offsets - offsets[0], numbers[np.asarray(coded.indices)], len(field.classes))


def _classes(field: Label, column: Column) -> LabelColumn | None:
    """Return the class numbers of a column; None if the field needs the bytes."""
    if column.kind == "class":
        numbers = _numbers_of_classes(field, column.classes)
        codes = np.asarray(column.values.indices)
        return None if numbers is None else _Classes(codes, numbers)
    if column.kind == "integer":
        return _whole_numbers(field, column)
    if column.kind != "text":
        return None
    coded = column.values.dictionary_encode()
    names = coded.dictionary.to_pylist()
    if field.numbers or field.parts or any(name.isdecimal() for name in names):
        return None
    positions = _positions(field, names)
    return None if positions is None else _Classes(np.asarray(coded.indices), positions)


def _numbers_of_classes(field: Label, classes: tuple[str, ...]) -> Ints | None:
    """Return the number that a field delivers for each class of the index; None if it has none.

    It is the position of the class's name in the field. Class numbers without names, and classes
    that the field gives new names, keep their numbers.
    """
    has_names = classes != tuple(map(str, range(len(classes))))
    if has_names or field.column is not None:
        positions = _positions(field, list(classes))
        if positions is not None:
            return positions
        if field.parts or field.numbers or not set(classes).isdisjoint(field.classes):
            return None
    if field.column is not None or field.parts or field.by_name:
        return None
    if field.classes and len(classes) > len(field.classes):
        return None
    return np.arange(len(classes))


def _positions(field: Label, names: list[str]) -> Ints | None:
    """Return the position of each name in the classes of a field; None if one is missing."""
    if len(set(field.classes)) < len(field.classes) or not set(names) <= set(field.classes):
        return None
    places = {name: number for number, name in enumerate(field.classes)}
    return np.array([places[name] for name in names], np.int64)


def _whole_numbers(field: Label, column: Column) -> _Numbers | None:
    """Return class numbers that are stored as numbers, in sets that name no classes."""
    values = np.asarray(column.values)
    if values.min() < 0 or field.numbers or field.parts or field.by_name:
        return None
    if field.classes and (field.column is not None or values.max() >= len(field.classes)):
        return None
    return _Numbers(values, "int64")
