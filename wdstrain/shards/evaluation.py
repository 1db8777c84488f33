"""Evaluation of the syntax tree of a condition, for all samples of an index at once."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import reduce
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from wdstrain.errors import UsageError
from wdstrain.report.printing import printable
from wdstrain.shards.columns import NOT_A_COLUMN, Column
from wdstrain.shards.index_table import key_array, named_columns, utf8_text
from wdstrain.shards.offsets import Ints, Offsets
from wdstrain.shards.operands import (
    DESCRIBED,
    Operand,
    as_number,
    as_text,
    as_utf8,
    in_lower_case,
    kind_of,
    modulo,
)

COLUMNS = "__column__"  # `a b` is parsed as __column__["a b"]
_SHOWN = 12  # names that an error lists
_COMPARISONS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Eq: pc.equal,
    ast.NotEq: pc.not_equal,
    ast.Lt: pc.less,
    ast.LtE: pc.less_equal,
    ast.Gt: pc.greater,
    ast.GtE: pc.greater_equal,
}
_ARITHMETIC: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: pc.add_checked,
    ast.Sub: pc.subtract_checked,
    ast.Mult: pc.multiply_checked,
}


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
    def shard_of(self, ids: Ints) -> Ints: ...
    def unjoined(self, name: str) -> str: ...


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


class Evaluation:
    """Evaluates one condition for all samples of an index."""

    def __init__(self, index: Samples | TableRows, text: str) -> None:
        self._index, self._text = index, text
        self.used: dict[str, Column] = {}  # columns that were evaluated, by their names in the text

    def truth(self, node: ast.expr) -> Operand:
        """Return whether a node holds: numbers other than 0, texts and lists that are not empty."""
        if isinstance(node, ast.BoolOp):
            join = pc.and_kleene if isinstance(node.op, ast.And) else pc.or_kleene
            return reduce(join, map(self.truth, node.values))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return pc.invert(self.truth(node.operand))
        value = self._value(node)
        match kind_of(value):
            case "flag":
                return value
            case "number":
                return pc.not_equal(value, 0)
            case "text":
                return pc.not_equal(pc.binary_length(value), 0)
            case "multi":
                return pc.not_equal(pc.list_value_length(value), 0)
            case "null":
                return pa.scalar(False)
        raise self._error(f"{ast.unparse(node)} is neither true nor false. Compare it with a value")

    def _value(self, node: ast.expr) -> Operand:
        match node:
            case ast.Constant(value=None):
                return pa.scalar(None)
            case ast.Constant(value=bool() | int() | float() | str()):
                return pa.scalar(node.value)
            case ast.List() | ast.Tuple():
                return [self._constant(item) for item in node.elts]
            case ast.BoolOp() | ast.UnaryOp(op=ast.Not()):
                return self.truth(node)
            case ast.UnaryOp():
                return pc.negate_checked(self._number(node.operand))
            case ast.BinOp():
                return self._calculated(node)
            case ast.Compare():
                return self._compared(node)
            case ast.Call():
                return self._called(node)
            case ast.Name() | ast.Attribute() | ast.Subscript():
                return self.named(".".join(self._path(node)))
        raise self._error(f"{ast.unparse(node)} is not a value of a column")

    def _constant(self, node: ast.expr) -> Any:
        value = self._value(node)
        if not isinstance(value, pa.Scalar):
            raise self._error(f"{ast.unparse(node)} is not a constant. A list holds constants only")
        return value.as_py()

    # --- names ------------------------------------------------------------------------------------

    def _path(self, node: ast.expr) -> tuple[str, ...]:
        """Return the parts of a name: a.b, a["b"] or `a.b`."""
        match node:
            case ast.Subscript(value=ast.Name(id=marker), slice=ast.Constant(value=str(name))) if (
                marker == COLUMNS
            ):
                return (name,)
            case ast.Name():
                return (node.id,)
            case ast.Attribute():
                return (*self._path(node.value), node.attr)
            case ast.Subscript(slice=ast.Constant(value=str(part))):
                return (*self._path(node.value), part)
        raise self._error(f"{ast.unparse(node)} is not the name of a column")

    def named(self, name: str) -> Operand:
        """Return the values that a name stands for."""
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
            return as_utf8(key_array(index.offsets))
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

    # --- operators --------------------------------------------------------------------------------

    def _compared(self, node: ast.Compare) -> Operand:
        """Return the result of a comparison, also of a chain such as 2 < a <= b."""
        sides = [node.left, *node.comparators]
        values = [self._value(side) for side in sides]
        results = []
        for i, operator in enumerate(node.ops):
            shown = f"{ast.unparse(sides[i])}, {ast.unparse(sides[i + 1])}"
            results.append(self._comparison(type(operator), values[i], values[i + 1], shown))
        return reduce(pc.and_kleene, results)

    def _comparison(self, operator: type, a: Operand, b: Operand, shown: str) -> Operand:
        """shown: both operands, for error messages."""
        if operator in (ast.Is, ast.IsNot):
            if kind_of(b) != "null" or kind_of(a) in ("null", "constants"):
                raise self._error(f"is and is not compare a column with None, not {shown}")
            return (pc.is_null if operator is ast.Is else pc.is_valid)(a)
        if operator in (ast.In, ast.NotIn):
            result = self._contained(a, b, shown)
            return pc.invert(result) if operator is ast.NotIn else result
        if operator in (ast.Eq, ast.NotEq):
            self._check_class_name(a, b)
            self._check_class_name(b, a)
        a, b = self._as_one_kind(a, b, shown)
        return _COMPARISONS[operator](a, b)

    def _as_one_kind(self, a: Operand, b: Operand, shown: str) -> tuple[Operand, Operand]:
        """Return two operands as they are compared: both as numbers, or both as texts."""
        kinds = (kind_of(a), kind_of(b))
        if "null" in kinds:
            raise self._error(f"None is compared with is or is not: {shown}")
        if set(kinds) <= {"number", "flag", "class"} and kinds != ("class", "class"):
            return as_number(a), as_number(b)
        if set(kinds) <= {"text", "class"}:
            return as_text(a), as_text(b)
        described = " with ".join(DESCRIBED[kind] for kind in kinds)
        raise self._error(f"{described} cannot be compared: {shown}")

    def _contained(self, a: Operand, b: Operand, shown: str) -> Operand:
        """Return a in b: in a list of constants, in the lists of a column, or in a text."""
        if isinstance(b, list):
            return self._is_in_list(a, b, shown)
        if kind_of(b) == "multi" and kind_of(a) == "text" and isinstance(a, pa.Scalar):
            rows = pc.list_parent_indices(b).filter(pc.equal(b.flatten(), a))
            holds = np.zeros(len(b), np.bool_)
            holds[rows.to_numpy()] = True
            return pa.array(holds, mask=np.asarray(pc.is_null(b)))
        if kind_of(b) in ("text", "class") and kind_of(a) == "text" and isinstance(a, pa.Scalar):
            return pc.match_substring(as_text(b), a.as_py())
        raise self._error(
            f"in looks for a value in a list, or for a constant text in a column of texts or lists, not {shown}"
        )

    def _is_in_list(self, a: Operand, constants: list[Any], shown: str) -> Operand:
        """Return whether a equals one of the constants."""
        if not constants:
            raise self._error(f"the list is empty: {shown}")
        equal = [self._comparison(ast.Eq, a, pa.scalar(constant), shown) for constant in constants]
        return reduce(pc.or_kleene, equal)

    def _check_class_name(self, classes: Operand, name: Operand) -> None:
        """Raise UsageError for a name that no class has: a typing error would choose wrongly."""
        if (
            kind_of(classes) != "class"
            or not isinstance(name, pa.Scalar)
            or kind_of(name) != "text"
        ):
            return
        known = classes.dictionary.to_pylist()
        if name.as_py() not in known:
            raise self._error(f"there is no class {name.as_py()!r}. Use one of: {_listed(known)}")

    def _calculated(self, node: ast.BinOp) -> Operand:
        a, b = self._value(node.left), self._value(node.right)
        if isinstance(node.op, ast.Add) and {kind_of(a), kind_of(b)} <= {"text", "class"}:
            return pc.binary_join_element_wise(
                as_text(a), as_text(b), pa.scalar("", pa.large_string())
            )
        a, b = self._number(node.left), self._number(node.right)
        if type(node.op) in _ARITHMETIC:
            return _ARITHMETIC[type(node.op)](a, b)
        if pc.any(pc.equal(b, 0)).as_py() if isinstance(b, pa.Array) else b.as_py() == 0:
            raise self._error(f"{ast.unparse(node)} divides by 0")
        if isinstance(node.op, ast.Div):
            return pc.divide(pc.cast(a, pa.float64()), pc.cast(b, pa.float64()))
        return modulo(a, b)

    def _number(self, node: ast.expr) -> Operand:
        value = self._value(node)
        if kind_of(value) not in ("number", "flag"):
            raise self._error(
                f"{ast.unparse(node)} is {DESCRIBED[kind_of(value)]}, not a number. Calculate with numbers only"
            )
        return as_number(value)

    def _called(self, node: ast.Call) -> Operand:
        """Return the value of len() or of a method of texts."""
        if isinstance(node.func, ast.Name):
            value = self._value(node.args[0])
            if kind_of(value) == "multi":
                return pc.list_value_length(value)
            if kind_of(value) in ("text", "class"):
                return pc.utf8_length(as_text(value))
            raise self._error(f"len() needs a text or a list: {ast.unparse(node)}")
        assert isinstance(node.func, ast.Attribute)
        text = self._value(node.func.value)
        if kind_of(text) not in ("text", "class"):
            raise self._error(
                f"{ast.unparse(node.func.value)} is {DESCRIBED[kind_of(text)]}, not a text"
            )
        arguments = [self._constant(argument) for argument in node.args]
        if node.func.attr == "lower":
            if arguments:
                raise self._error("lower() takes no argument")
            return in_lower_case(as_text(text))
        if len(arguments) != 1 or not isinstance(arguments[0], str):
            raise self._error(f"{node.func.attr}() takes one text")
        check = pc.starts_with if node.func.attr == "startswith" else pc.ends_with
        return check(as_text(text), arguments[0])

    # --- errors -----------------------------------------------------------------------------------

    def _error(self, reason: str) -> UsageError:
        text = repr(self._text)
        # A condition may be only the name that the reason quotes.
        return UsageError(f"{reason}." if text in reason else f"{text}: {reason}.")

    def _unknown(self, name: str) -> UsageError:
        index = self._index
        if isinstance(index, TableRows):
            if name in index.names:
                return self._error(
                    f"the column {name!r} cannot be used: its values are long or of several types, "
                    f"or its name is taken. Of the latter, write json.{name}"
                )
            columns = _listed(list(index.names))
            return self._error(
                f"there is no column {name!r}.{_near(name, index.names)} Use one of: {columns}"
            )
        if reason := index.unjoined(name):
            return self._error(
                f"there is no column {name!r}: {reason}. Name the "
                f"classes of each set alike: wdstrain index SET --label NAME --classes A,B"
            )
        names = [column.name for column in index.columns if column.kind != NOT_A_COLUMN]
        columns = f" one of: {_listed(names)}; also" if names else ""
        hint = ""
        if field := next((f for f in index.fields if name == f or name.startswith(f"{f}.")), ""):
            hint = (
                f" The field {field} has no such column: wdstrain index --columns {name} makes it."
            )
        near = _near(name, [*names, "key", "shard", "split", "size"])
        return self._error(
            f"there is no column {name!r}.{near} Use{columns} key, shard, split, size, "
            f"size.FIELD or has.FIELD.{hint}".rstrip(".")
        )


def _spelled_place(column: Column) -> str:
    field, entry = column.place
    return field if entry is None else f"{field}.{entry}"


def _near(name: str, known: Iterable[str]) -> str:
    """Return a sentence that names the known name most like this one; "" if none is."""
    near = get_close_matches(name, known, 1)
    return f" Did you mean {printable(near[0])}?" if near else ""


def _listed(names: list[str]) -> str:
    more = f", ... ({len(names)} in all)" if len(names) > _SHOWN else ""
    return printable(", ".join(names[:_SHOWN])) + more
