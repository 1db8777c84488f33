"""Values of the names in a condition: columns, keys, shards, splits, sizes and presence of fields."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from wdstrain.errors import UsageError
from wdstrain.report.printing import printable
from wdstrain.shards.columns import NOT_A_COLUMN, Column
from wdstrain.shards.index_table import key_array, named_columns, utf8_text
from wdstrain.shards.label import Label, place_named
from wdstrain.shards.offsets import Ints, Offsets

# An operand: an Arrow array with one value per sample, an Arrow scalar, or a list of constants.
Operand = Any

_SHOWN = 12  # names that an error lists


class _Shard(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def split(self) -> str: ...


class Samples(Protocol):
    """The parts of an index that conditions and selections use."""

    def __len__(self) -> int: ...
    @property
    def shards(self) -> Sequence[_Shard]: ...
    @property
    def fields(self) -> tuple[str, ...]: ...
    @property
    def columns(self) -> tuple[Column, ...]: ...
    @property
    def offsets(self) -> Offsets: ...
    @property
    def counts(self) -> Ints: ...
    @property
    def shard_labels(self) -> Sequence[tuple[Label, ...]]: ...
    def shard_of(self, ids: Ints) -> Ints: ...
    def disagreement(self, field: str, column: str | None) -> str: ...


@dataclass(frozen=True)
class TableRows:
    """Rows of a table that is not packed yet: they have columns, and no fields and shards.

    names: all columns of the table, for error messages.
    """

    columns: tuple[Column, ...]
    count: int
    names: tuple[str, ...]
    fields: tuple[str, ...] = ()
    shards: tuple[_Shard, ...] = ()

    def __len__(self) -> int:
        return self.count


class Names:
    """Values of the names in one condition. used: the columns that were named, by name."""

    def __init__(self, index: Samples | TableRows, text: str) -> None:
        """text: the condition, for error messages."""
        self._index, self._text = index, text
        self.used: dict[str, Column] = {}

    def values(self, name: str) -> Operand:
        """Return the values that a name stands for, one per sample. Raises UsageError."""
        base, _, rest = name.partition(".")
        index = self._index
        if (column := self._column(name)) is not None:
            self.used[name] = column
            return column.values
        if base == "has" and rest:
            return self._has(rest)
        if isinstance(index, TableRows):
            raise self._unknown(name)
        if base == "size" and rest in index.fields:
            return self._field_size(rest)
        if name == "size":
            return pa.array(index.offsets.stop - index.offsets.start)
        if name == "key":
            return _as_utf8(key_array(index.offsets))
        if name in ("shard", "split"):
            texts = [shard.name if name == "shard" else shard.split for shard in index.shards]
            rows = np.repeat(np.arange(len(index.shards)), index.counts)
            return pa.array(map(utf8_text, texts), pa.string()).take(pa.array(rows))
        raise self._unknown(name)

    def _column(self, name: str) -> Column | None:
        """Return the column with a name in the table, or else the one that is stored there."""
        columns = [column for column in self._index.columns if column.kind != NOT_A_COLUMN]
        by_name = named_columns(self._index.fields, columns)
        by_place = {_spelled_place(column): column for column in columns}
        return by_name.get(name) or by_place.get(name)

    def _field_size(self, field: str) -> pa.Array:
        """Return the bytes of a field in each sample; null if the sample lacks it."""
        assert not isinstance(self._index, TableRows)  # which has no fields
        offsets, number = self._index.offsets, self._index.fields.index(field)
        members = np.flatnonzero(offsets.member_field == number)
        rows = np.searchsorted(offsets.member_first, members, side="right") - 1
        size, missing = np.zeros(len(self._index), np.int64), np.ones(len(self._index), bool)
        size[rows], missing[rows] = offsets.member_size[members], False
        return pa.array(size, mask=missing)

    def _has(self, name: str) -> Operand:
        if name in self._index.fields:
            return pc.is_valid(self._field_size(name))
        column = self._column(name)
        if column is None:
            raise self._unknown(name)
        return pc.is_valid(column.values)

    def error(self, reason: str) -> UsageError:
        text = repr(self._text)
        # A condition may be only the name that the reason quotes.
        return UsageError(f"{reason}." if text in reason else f"{text}: {reason}.")

    def _unknown(self, name: str) -> UsageError:
        index = self._index
        if isinstance(index, TableRows):
            if name in index.names:
                return self.error(
                    f"the column {name!r} cannot be used: its values are long or of several types, "
                    f"or its name is taken. Of the latter, write json.{name}"
                )
            columns = listed(list(index.names))
            return self.error(
                f"there is no column {name!r}.{_near(name, index.names)} Use one of: {columns}"
            )
        place = place_named(index.shard_labels, name)
        if place is not None and (reason := index.disagreement(*place)):
            return self.error(
                f"there is no column {name!r}: {reason}. Name the "
                f"classes of each set alike: wdstrain index SET --label NAME --classes A,B"
            )
        names = [column.name for column in index.columns if column.kind != NOT_A_COLUMN]
        columns = f" one of: {listed(names)}; also" if names else ""
        hint = ""
        if field := next((f for f in index.fields if name == f or name.startswith(f"{f}.")), ""):
            hint = (
                f" The field {field} has no such column: wdstrain index --columns {name} makes it."
            )
        near = _near(name, [*names, "key", "shard", "split", "size"])
        return self.error(
            f"there is no column {name!r}.{near} Use{columns} key, shard, split, size, "
            f"size.FIELD or has.FIELD.{hint}".rstrip(".")
        )


def _spelled_place(column: Column) -> str:
    field, entry = column.place
    return field if entry is None else f"{field}.{entry}"


def _as_utf8(keys: pa.Array) -> pa.Array:
    """Return keys as text: bytes that are not UTF-8 as escapes."""
    if pa.types.is_large_string(keys.type):
        return keys
    texts = [bytes(key).decode("utf-8", "backslashreplace") for key in keys.to_pylist()]
    return pa.array(texts, pa.large_string())


def _near(name: str, known: Iterable[str]) -> str:
    """Return a sentence that names the known name most like this one; "" if none is."""
    near = get_close_matches(name, known, 1)
    return f" Did you mean {printable(near[0])}?" if near else ""


def listed(names: list[str]) -> str:
    """Return the first names with commas between them, and how many there are."""
    more = f", ... ({len(names)} in all)" if len(names) > _SHOWN else ""
    return printable(", ".join(names[:_SHOWN])) + more
