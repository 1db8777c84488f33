"""Conditions on the columns of an index, such as `kids and label != 'Other'`.

A condition has the grammar of Python's expressions, and is evaluated for all samples at once,
without any bytes of shards. It is data, never code: no calls except the ones listed here. Names: the
columns, by their names in `Index.table` or by where they are stored (`cls`, `json.kind`); key, shard,
split; size, size.FIELD in bytes; has.NAME, whether a sample has a field or a value in a column. A name
that Python's grammar does not allow stands in backticks.

A class equals its name or its number. A comparison with a missing value is neither true nor false,
as in SQL: a sample is chosen only if the whole condition is true. `is None` finds missing values.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from wdstrain.errors import UsageError, logger
from wdstrain.report.printing import printable
from wdstrain.runtime.options import refuse
from wdstrain.shards.columns import Column, mapped
from wdstrain.shards.kinds import KINDS, NOT_A_COLUMN, kind_of
from wdstrain.shards.offsets import Bools, Ints, table_names

# An operand: an Arrow array with one value per sample, an Arrow scalar, or a list of constants.
Operand = Any
Samples = Any  # an Index, whose module imports this one

_LONGEST = 10_000  # characters of a condition
_SHOWN = 12  # names that an error lists
_BASE = ("key", "shard", "split", "size")  # names that every index has
_COLUMNS = "__column__"  # `a b` is parsed as __column__["a b"]
_TOKENS = re.compile(
    r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|(\.?)`([^`]+)`|(\.?)((?:[^\W\d]|[^\x00-\x7f])(?:\w|[^\x00-\x7f])*)|(?<![=!<>])=(?!=)"""
)
_TEXTS = {"text", "class"}  # kinds that have a text
_NUMBERS = {"number", "flag"}  # kinds that one can calculate with


@dataclass(frozen=True)
class TableRows:
    """Rows of a table that is not packed yet: they have columns, and no fields and shards.

    names: all columns of the table, for error messages.
    """

    columns: tuple[Column, ...]
    count: int
    names: tuple[str, ...]
    fields: tuple[str, ...] = ()

    def __len__(self) -> int:
        return self.count


def matching(rows: Samples | TableRows, text: str) -> Bools:
    """Return for which samples or rows a condition holds. bool[len(rows)]

    Raises UsageError for a condition that is not valid or that does not fit the columns.
    """
    every = pa.array(np.ones(len(rows), np.bool_))  # a condition of constants has one value
    try:
        holds = pc.and_(every, _Condition(rows, text).truth(parsed(text)))
    except (pa.ArrowException, RecursionError, OverflowError) as error:
        raise UsageError(f"{text!r} cannot be evaluated ({error}).") from None
    if holds.null_count and not isinstance(rows, TableRows):
        logger.warning(
            "%r: %d of %d samples lack a value in a column of it. None of them is chosen.",
            text,
            holds.null_count,
            len(rows),
        )
    return np.asarray(pc.fill_null(holds, False))


def ids_where(index: Samples, condition: str) -> Ints:
    """Return the ids of the samples for which a condition holds, ascending. int64[k]

    Raises UsageError if there are none.
    """
    ids = np.flatnonzero(matching(index, condition))
    refuse(
        not len(ids),
        f"{condition!r} holds for none of {len(index)} samples.",
        "Look at the values: wdstrain info",
    )
    return ids


def column_values(index: Samples, name: str) -> pa.Array:
    """Return the values of the column with a name of a condition. Raises UsageError."""
    if not isinstance(name, str) or not name:
        raise UsageError(f"{name!r} is not the name of a column.")
    return _Condition(index, name).named(name)


def complete_values(index: Samples, name: str, option: str) -> pa.Array:
    """Return the values of the column that an option names.

    Raises UsageError if there is no such column, and if some samples have no value.
    """
    values = column_values(index, name)
    if values.null_count:
        raise UsageError(
            f"{values.null_count} of {len(index)} samples have no value.",
            "Leave them out: {where}",
            {"where": f"`{name}` is not None"},
            option=option,
            value=name,
        )
    return values


def names_in(text: str) -> list[str]:
    """Return the names that a condition uses and their beginnings: `json.kind` and `json`.

    Raises UsageError.
    """
    return [name for node in ast.walk(parsed(text)) if (name := _name(node))]


# --- grammar --------------------------------------------------------------------------------------


def parsed(text: str) -> ast.expr:
    """Return the syntax tree of a condition. Raises UsageError for text that is no condition."""
    if not isinstance(text, str) or len(text) > _LONGEST:
        raise UsageError(
            f"must be a condition of at most {_LONGEST} characters, such as \"label != 'Other'\".",
            option="where",
            value=str(text)[:80],
        )
    if any(token[0] == "=" for token in _TOKENS.finditer(text)):
        raise UsageError(
            f"{text!r}: = assigns a value.",
            "Use == to compare.",
        )
    try:
        return ast.parse(_TOKENS.sub(_own_name, text).strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UsageError(
            f"{text!r} is no condition ({error}).",
            "Write for example: cls < 3 and json.width > 640. A name that is a word of Python "
            "stands in backticks: `class`, `json.class`",
        ) from None


def _own_name(token: re.Match[str]) -> str:
    """Return a token for Python's parser, which takes equivalent characters of names for one."""
    dot, name = token[1] or token[3], token[2] or token[4]
    if not name or (token[4] and name.isascii()):
        return token[0]
    return f"{'' if dot else _COLUMNS}[{name!r}]"


def _name(node: ast.AST) -> str | None:
    """Return the name of a column that a node writes: a.b, a["b"] or `a.b`; None for others."""
    match node:
        case ast.Name(name):
            return name
        case ast.Attribute(base, part) | ast.Subscript(base, ast.Constant(str(part))):
            above = _name(base)
            return part if above == _COLUMNS else above and f"{above}.{part}"
    return None


# --- values ---------------------------------------------------------------------------------------


def column_named(rows: Samples | TableRows, name: str) -> Column | None:
    """Return the column with a name in the table, or else the one that is stored there."""
    columns = [column for column in rows.columns if column.kind != NOT_A_COLUMN]
    named = {column.stored_as: column for column in columns}
    names = table_names(rows.fields, columns)
    return (named | dict(zip(reversed(names), reversed(columns), strict=False))).get(name)


class _Condition:
    """One condition on samples."""

    def __init__(self, rows: Samples | TableRows, text: str) -> None:
        """text: the condition, for error messages."""
        self._rows: Any = rows
        self._text = text

    def _error(self, reason: str, hint: str = "") -> UsageError:
        """Return the error for a condition. A condition may be only the name in the reason."""
        text = repr(self._text)
        return UsageError(f"{reason}." if text in reason else f"{text}: {reason}.", hint)

    def named(self, name: str) -> Operand:
        """Return the values that a name stands for, one per sample. Raises UsageError."""
        rows, (base, _, part) = self._rows, name.partition(".")
        if (column := column_named(rows, name)) is not None:
            return column.values
        if base == "has" and part:
            return pc.is_valid(self.named(f"size.{part}" if part in rows.fields else part))
        if base == "size" and part in rows.fields:
            return rows.offsets.extents[part][1]
        if isinstance(rows, TableRows) or name not in _BASE:
            raise self._error(*self._unknown(name))
        if name in ("key", "size"):
            return rows.offsets.rows.column(0 if name == "key" else 2)
        return rows.words("name" if name == "shard" else name).dictionary_decode()

    def _unknown(self, name: str) -> tuple[str, str]:
        """Return the reason for a name that means no column, and a hint with the names that do."""
        rows, problem = self._rows, f"there is no column {name!r}"
        if isinstance(rows, TableRows):
            return problem, f"Use one of: {_listed([*rows.names])}."
        whys = (why for c, why in rows.differing.items() if name in (c.name, c.stored_as))
        if reason := next(whys, ""):
            return f"{problem}: {reason}", (
                "Name the classes of each set alike: wdstrain index SET --label NAME --classes A,B."
            )
        names = [column.name for column in rows.columns if column.kind != NOT_A_COLUMN]
        return problem, (
            f"Use one of: {_listed([*names, *_BASE])}, size.FIELD or has.FIELD. Numbers, short "
            "texts, true and false, and lists of names in a field become columns by `wdstrain "
            "index --columns`."
        )

    def truth(self, node: ast.expr) -> Operand:
        """Return whether a node holds: numbers other than 0, texts and lists that are not empty."""
        value = self._value(node)
        match _kind(value):
            case "flag":
                return value
            case "number":
                return pc.not_equal(value, 0)
            case "text" | "multi":
                return pc.not_equal(_length(value), 0)
        raise self._error(
            f"{ast.unparse(node)} is neither true nor false", "Compare it with a value."
        )

    def _value(self, node: ast.expr) -> Operand:
        match node:
            case ast.Constant(value=None | bool() | int() | float() | str()):
                return pa.scalar(node.value)
            case ast.List() | ast.Tuple():
                return [self._constant(item) for item in node.elts]
            case ast.BoolOp():
                join = pc.and_kleene if isinstance(node.op, ast.And) else pc.or_kleene
                return reduce(join, map(self.truth, node.values))
            case ast.UnaryOp(ast.Not(), operand):
                return pc.invert(self.truth(operand))
            case ast.UnaryOp(ast.USub(), ast.Constant(int() | float() as number)):
                return pa.scalar(-number)  # -2**63 fits, and 2**63 does not
            case ast.UnaryOp(ast.USub(), operand):
                return self._value(ast.BinOp(ast.Constant(0), ast.Sub(), operand))
            case ast.BinOp(left, operator, right) if type(operator) in _ON_NUMBERS:
                a, b = self._value(left), self._value(right)
                return self._applied(type(operator), a, b, ast.unparse(node))
            case ast.Compare():
                values, shown = [self._value(node.left)], ast.unparse(node)
                values += map(self._value, node.comparators)
                sides = zip(node.ops, values, values[1:], strict=False)
                parts = (self._applied(type(op), a, b, shown) for op, a, b in sides)
                return reduce(pc.and_kleene, parts)
            case ast.Call(ast.Name("len"), [operand], []):
                return self._called(ast.Call(ast.Attribute(operand, "len"), [], []))
            case ast.Call():
                return self._called(node)
            case _ if (name := _name(node)) is not None:
                return self.named(name)
        raise self._error(
            f"{ast.unparse(node)} is not allowed in a condition",
            "Use comparisons, and, or, not, in, + - * / %, and names of columns.",
        )

    def _constant(self, node: ast.expr) -> pa.Scalar:
        value = self._value(node)
        if not isinstance(value, pa.Scalar):
            raise self._error(
                f"{ast.unparse(node)} is not a constant", "A list holds constants only."
            )
        return value

    def _applied(self, operator: type, a: Operand, b: Operand, shown: str) -> Operand:
        """Return the result of a comparison or calculation. shown: the text, for error messages."""
        if operator in _OPPOSITES:
            return pc.invert(self._applied(_OPPOSITES[operator], a, b, shown))
        kinds = {_kind(a), _kind(b)}
        if operator is ast.Is and _kind(b) == NOT_A_COLUMN and _kind(a) != "constants":
            return pc.is_null(a)
        if operator is ast.Is or NOT_A_COLUMN in kinds:
            raise self._error(f"None is compared with is or is not, and nothing else is: {shown}")
        if operator is ast.In:
            return self._contained(a, b, shown)
        if kinds <= {*_NUMBERS, "class"} and kinds != {"class"}:
            a, b = _numbers(a, b)
            if operator in (ast.Div, ast.Mod) and pc.any(pc.equal(b, 0)).as_py():
                raise self._error(f"{shown} divides by 0")
            return _ON_NUMBERS[operator](a, b)
        if not kinds <= _TEXTS or operator not in _ON_TEXTS:
            described = " with ".join(map(_described, (a, b)))
            raise self._error(f"{described} cannot be compared or calculated: {shown}")
        names = [value.as_py() for value in (a, b) if isinstance(value, pa.Scalar)]
        known = [c for v in (a, b) if _kind(v) == "class" for c in v.dictionary.to_pylist()]
        if operator in (ast.Eq, ast.NotEq) and known and not {*names} <= {*known}:
            unknown = f"there is no class {names[0]!r}"  # a typing error would choose wrongly
            raise self._error(unknown, f"Use one of: {_listed(known)}.")
        return _ON_TEXTS[operator](_as_text(a), _as_text(b))

    def _contained(self, a: Operand, b: Operand, shown: str) -> Operand:
        """Return a in b: in a list of constants, in the lists of a column, or in a text."""
        if isinstance(b, list) and b:
            return reduce(pc.or_kleene, (self._applied(ast.Eq, a, item, shown) for item in b))
        is_text = _kind(a) == "text" and isinstance(a, pa.Scalar)
        if is_text and _kind(b) == "multi":
            rows = pc.list_parent_indices(b).filter(pc.equal(b.flatten(), a))
            return pa.array(np.isin(np.arange(len(b)), rows), mask=np.asarray(b.is_null()))
        if is_text and _kind(b) in _TEXTS:
            return pc.match_substring(_as_text(b), a.as_py())
        raise self._error(
            f"in looks for a value in a list of constants that is not empty, or for a constant text "
            f"in a column of texts or lists, not {shown}"
        )

    def _called(self, node: ast.Call) -> Operand:
        """Return the value of len() or of a method of texts."""
        name, arguments = getattr(node.func, "attr", ""), [*map(self._constant, node.args)]
        if name in _METHODS and not node.keywords:
            function, kinds, count = _METHODS[name]
            value = self._value(node.func.value)  # type: ignore[attr-defined]
            if _kind(value) in kinds and list(map(_kind, arguments)) == ["text"] * count:
                texts = value if _kind(value) == "multi" else _as_text(value)
                return function(texts, *(argument.as_py() for argument in arguments))
        raise self._error(
            f"{ast.unparse(node)} calls a function that is not allowed in a condition",
            "Use only len() of a text or a list, and .startswith('...'), .endswith('...') and "
            ".lower() of a text.",
        )


def _listed(names: list[str]) -> str:
    """Return the first names with commas between them, and how many there are."""
    more = f", ... ({len(names)} in all)" if len(names) > _SHOWN else ""
    return printable(", ".join(names[:_SHOWN])) + more


def _kind(value: Operand) -> str:
    """Return how a value compares: as its kind's `operand`; "constants" for a list of them."""
    return "constants" if isinstance(value, list) else kind_of(value.type)


def _described(value: Operand) -> str:
    names = {"constants": "a list", NOT_A_COLUMN: "None"}
    return names.get(_kind(value)) or KINDS[_kind(value)].described


def _numbers(*operands: Operand) -> list[Operand]:
    """Return operands as numbers, all whole or all floats; of classes their numbers."""
    values = [value.indices if _kind(value) == "class" else value for value in operands]
    is_float = any(pa.types.is_floating(value.type) for value in values)
    kind = pa.float64() if is_float else pa.int64()
    return [pc.cast(value, kind, safe=False) for value in values]  # floats round, as in pandas


def _divided(a: Operand, b: Operand) -> Operand:
    return pc.divide(*(pc.cast(value, pa.float64(), safe=False) for value in (a, b)))


@np.errstate(invalid="ignore")  # the remainder of infinity is nan
def _modulo(a: Operand, b: Operand) -> Operand:
    """Return a % b with Python's sign."""
    if isinstance(a, pa.Scalar) and isinstance(b, pa.Scalar):
        return pa.scalar(a.as_py() % b.as_py())
    parts = [
        v.as_py() if isinstance(v, pa.Scalar) else np.asarray(pc.fill_null(v, 1)) for v in (a, b)
    ]
    is_known = pc.and_(pc.is_valid(a), pc.is_valid(b))
    return pc.if_else(is_known, pa.array(np.mod(*parts)), None)


def _as_text(value: Operand) -> Operand:
    return pc.cast(value, pa.large_string())


def _joined(a: Operand, b: Operand) -> Operand:
    return pc.binary_join_element_wise(a, b, pa.scalar("", pa.large_string()))


def _length(value: Operand) -> Operand:
    """Return the number of characters of texts, or of names in lists."""
    return (
        pc.list_value_length(value) if _kind(value) == "multi" else pc.utf8_length(_as_text(value))
    )


def _in_lower_case(texts: Operand) -> Operand:
    """Return texts in lower case. Arrow's own function differs from Python's for some letters."""
    if isinstance(texts, pa.Scalar):
        return pa.scalar(texts.as_py().lower())
    return mapped(texts, str.lower, pa.large_string())


_COMPARISONS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Eq: pc.equal,
    ast.NotEq: pc.not_equal,
    ast.Lt: pc.less,
    ast.LtE: pc.less_equal,
    ast.Gt: pc.greater,
    ast.GtE: pc.greater_equal,
}
_ON_TEXTS = {**_COMPARISONS, ast.Add: _joined}
_ON_NUMBERS = {
    **_COMPARISONS,
    ast.Add: pc.add_checked,
    ast.Sub: pc.subtract_checked,
    ast.Mult: pc.multiply_checked,
    ast.Div: _divided,
    ast.Mod: _modulo,
}
_OPPOSITES: dict[type, type] = {ast.NotIn: ast.In, ast.IsNot: ast.Is}
# Function, the kinds it is called on, and the number of its arguments, which are texts.
_METHODS: dict[str, tuple[Callable[..., Any], set[str], int]] = {
    "len": (_length, {*_TEXTS, "multi"}, 0),
    "lower": (_in_lower_case, _TEXTS, 0),
    "startswith": (pc.starts_with, _TEXTS, 1),
    "endswith": (pc.ends_with, _TEXTS, 1),
}
