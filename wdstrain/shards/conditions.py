"""Conditions on the columns of an index, such as `kids and label != 'Other'`.

A condition has the grammar of `expressions`, and is evaluated for all samples at once, without any
bytes of shards. Names: the columns, by their names in `Index.table` or by where they are stored
(`cls`, `json.kind`); key, shard, split; size, size.FIELD in bytes; has.NAME, whether a sample has a
field or a value in a column. A name that Python's grammar does not allow stands in backticks.

A class equals its name or its number. A comparison with a missing value is neither true nor false,
as in SQL: a sample is chosen only if the whole condition is true. `is None` finds missing values.
"""

from __future__ import annotations

import ast
import logging
import re
from collections.abc import Callable
from functools import reduce
from itertools import pairwise
from keyword import iskeyword
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from wdstrain.errors import UsageError
from wdstrain.report.printing import printable
from wdstrain.shards.columns import Column
from wdstrain.shards.expressions import parse
from wdstrain.shards.names import Names, Operand, Samples, TableRows, listed

Bools = npt.NDArray[np.bool_]

_QUOTED_NAME = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|`([^`]+)`""")
_OPERATORS = {"and", "or", "not", "in", "is", "True", "False", "None"}  # words of a condition
_COLUMNS = "__column__"  # `a b` is parsed as __column__["a b"]
_DESCRIBED = {
    "flag": "true or false",
    "number": "a number",
    "text": "a text",
    "class": "a class",
    "multi": "a list",
    "null": "None",
    "constants": "a list",
}
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
_log = logging.getLogger("wdstrain")


def matching(index: Samples | TableRows, text: str) -> Bools:
    """Return which samples a condition holds for. bool[len(index)]

    Raises UsageError for a condition that is not valid or that does not fit the columns.
    """
    if not isinstance(text, str):
        raise UsageError(f"where={text!r}: must be a condition, such as \"label != 'Other'\".")
    plain = _QUOTED_NAME.sub(lambda m: f"{_COLUMNS}[{m[1]!r}]" if m[1] else m[0], text)
    try:
        tree = parse(plain, (ast.Is, ast.IsNot))
    except UsageError as error:
        words = set(re.findall(r"\w+", plain))
        reserved = sorted(word for word in words - _OPERATORS if iskeyword(word))
        if not reserved:
            raise
        raise UsageError(
            f"{error}. Python reserves the word {reserved[0]}: a column of this name stands in "
            f"backticks, `{reserved[0]}` or `json.{reserved[0]}`."
        ) from None
    evaluation = Evaluation(index, text)
    try:
        holds = evaluation.truth(tree)
    except (pa.ArrowException, RecursionError, OverflowError) as error:
        raise UsageError(f"{text!r} cannot be evaluated ({error}).") from None
    if isinstance(holds, pa.Scalar):
        return np.full(len(index), bool(holds.as_py()))
    result = np.asarray(pc.fill_null(holds, False).to_numpy(zero_copy_only=False), np.bool_)
    # A condition with `is` deals with missing values itself.
    if not isinstance(index, TableRows) and not re.search(r"\bis\b", plain):
        for name, column in evaluation.names.used.items():
            _log_shards_without(index, text, name, column, result)
    return result


def _log_shards_without(
    index: Samples, text: str, name: str, column: Column, chosen: Bools
) -> None:
    """Log that shards have no value in a column of a condition, and so no chosen sample.

    Sets without the column, joined with others, are such shards.
    """
    if not column.values.null_count:
        return
    edges = np.concatenate([[0], np.cumsum(index.counts)])
    without = [
        number
        for number, (start, stop) in enumerate(pairwise(edges.tolist()))
        if start < stop
        and not chosen[start:stop].any()
        and column.values.slice(start, stop - start).null_count == stop - start
    ]
    if without:
        _log.warning(
            "%r: %d samples of %d shards have no value in the column %s, such as those of %s. None "
            "of them is chosen.",
            text,
            int(index.counts[without].sum()),
            len(without),
            printable(name),
            index.shards[without[0]].name,
        )


def column_values(index: Samples, name: str) -> pa.Array:
    """Return the values of the column with a name of a condition. Raises UsageError."""
    if not isinstance(name, str) or not name:
        raise UsageError(f"{name!r} is not the name of a column.")
    return Names(index, name).values(name)


class Evaluation:
    """Evaluates one condition for all samples of an index. names: values of its names."""

    def __init__(self, index: Samples | TableRows, text: str) -> None:
        self.names = Names(index, text)
        self._error = self.names.error

    def truth(self, node: ast.expr) -> Operand:
        """Return whether a node holds: numbers other than 0, texts and lists that are not empty."""
        if isinstance(node, ast.BoolOp):
            join = pc.and_kleene if isinstance(node.op, ast.And) else pc.or_kleene
            return reduce(join, map(self.truth, node.values))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return pc.invert(self.truth(node.operand))
        value = self._value(node)
        match _kind_of(value):
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
                return self.names.values(".".join(self._path(node)))
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
                marker == _COLUMNS
            ):
                return (name,)
            case ast.Name():
                return (node.id,)
            case ast.Attribute():
                return (*self._path(node.value), node.attr)
            case ast.Subscript(slice=ast.Constant(value=str(part))):
                return (*self._path(node.value), part)
        raise self._error(f"{ast.unparse(node)} is not the name of a column")

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
            if _kind_of(b) != "null" or _kind_of(a) in ("null", "constants"):
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
        kinds = (_kind_of(a), _kind_of(b))
        if "null" in kinds:
            raise self._error(f"None is compared with is or is not: {shown}")
        if set(kinds) <= {"number", "flag", "class"} and kinds != ("class", "class"):
            return _as_number(a), _as_number(b)
        if set(kinds) <= {"text", "class"}:
            return _as_text(a), _as_text(b)
        described = " with ".join(_DESCRIBED[kind] for kind in kinds)
        raise self._error(f"{described} cannot be compared: {shown}")

    def _contained(self, a: Operand, b: Operand, shown: str) -> Operand:
        """Return a in b: in a list of constants, in the lists of a column, or in a text."""
        if isinstance(b, list):
            return self._is_in_list(a, b, shown)
        if _kind_of(b) == "multi" and _kind_of(a) == "text" and isinstance(a, pa.Scalar):
            rows = pc.list_parent_indices(b).filter(pc.equal(b.flatten(), a))
            holds = np.zeros(len(b), np.bool_)
            holds[rows.to_numpy()] = True
            return pa.array(holds, mask=np.asarray(pc.is_null(b)))
        if _kind_of(b) in ("text", "class") and _kind_of(a) == "text" and isinstance(a, pa.Scalar):
            return pc.match_substring(_as_text(b), a.as_py())
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
            _kind_of(classes) != "class"
            or not isinstance(name, pa.Scalar)
            or _kind_of(name) != "text"
        ):
            return
        known = classes.dictionary.to_pylist()
        if name.as_py() not in known:
            raise self._error(f"there is no class {name.as_py()!r}. Use one of: {listed(known)}")

    def _calculated(self, node: ast.BinOp) -> Operand:
        a, b = self._value(node.left), self._value(node.right)
        if isinstance(node.op, ast.Add) and {_kind_of(a), _kind_of(b)} <= {"text", "class"}:
            return pc.binary_join_element_wise(
                _as_text(a), _as_text(b), pa.scalar("", pa.large_string())
            )
        a, b = self._number(node.left), self._number(node.right)
        if type(node.op) in _ARITHMETIC:
            return _ARITHMETIC[type(node.op)](a, b)
        if pc.any(pc.equal(b, 0)).as_py() if isinstance(b, pa.Array) else b.as_py() == 0:
            raise self._error(f"{ast.unparse(node)} divides by 0")
        if isinstance(node.op, ast.Div):
            return pc.divide(pc.cast(a, pa.float64()), pc.cast(b, pa.float64()))
        return _modulo(a, b)

    def _number(self, node: ast.expr) -> Operand:
        value = self._value(node)
        if _kind_of(value) not in ("number", "flag"):
            raise self._error(
                f"{ast.unparse(node)} is {_DESCRIBED[_kind_of(value)]}, not a number. Calculate with numbers only"
            )
        return _as_number(value)

    def _called(self, node: ast.Call) -> Operand:
        """Return the value of len() or of a method of texts."""
        if isinstance(node.func, ast.Name):
            value = self._value(node.args[0])
            if _kind_of(value) == "multi":
                return pc.list_value_length(value)
            if _kind_of(value) in ("text", "class"):
                return pc.utf8_length(_as_text(value))
            raise self._error(f"len() needs a text or a list: {ast.unparse(node)}")
        assert isinstance(node.func, ast.Attribute)
        text = self._value(node.func.value)
        if _kind_of(text) not in ("text", "class"):
            raise self._error(
                f"{ast.unparse(node.func.value)} is {_DESCRIBED[_kind_of(text)]}, not a text"
            )
        arguments = [self._constant(argument) for argument in node.args]
        if node.func.attr == "lower":
            if arguments:
                raise self._error("lower() takes no argument")
            return _in_lower_case(_as_text(text))
        if len(arguments) != 1 or not isinstance(arguments[0], str):
            raise self._error(f"{node.func.attr}() takes one text")
        check = pc.starts_with if node.func.attr == "startswith" else pc.ends_with
        return check(_as_text(text), arguments[0])


def _kind_of(value: Operand) -> str:
    if isinstance(value, list):
        return "constants"
    kind = value.type
    if pa.types.is_boolean(kind):
        return "flag"
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return "number"
    if pa.types.is_dictionary(kind):
        return "class"
    if pa.types.is_list(kind):
        return "multi"
    return "null" if pa.types.is_null(kind) else "text"


def _as_number(value: Operand) -> Operand:
    """Return numbers; of classes their numbers, of flags 0 and 1."""
    if _kind_of(value) == "class":
        return value.indices
    return pc.cast(value, pa.int64()) if _kind_of(value) == "flag" else value


def _as_text(value: Operand) -> Operand:
    return pc.cast(value, pa.large_string())


def _in_lower_case(texts: Operand) -> Operand:
    """Return texts in lower case. Arrow's own function differs from Python's for some letters."""
    if isinstance(texts, pa.Scalar):
        return pa.scalar(texts.as_py().lower(), pa.large_string())
    coded = texts.dictionary_encode()
    lower = [text.lower() for text in coded.dictionary.to_pylist()]
    return pa.array(lower, pa.large_string()).take(coded.indices)


def _modulo(a: Operand, b: Operand) -> Operand:
    """Return a % b with Python's sign."""
    missing = [np.asarray(pc.is_null(v)) for v in (a, b) if isinstance(v, pa.Array)]
    if not missing:
        return pa.scalar(a.as_py() % b.as_py())
    parts = [
        np.asarray(pc.fill_null(v, 1)) if isinstance(v, pa.Array) else v.as_py() for v in (a, b)
    ]
    return pa.array(np.mod(*parts), mask=np.logical_or.reduce(missing))
