"""Conditions that choose samples, such as `cls < 3 and json.width > 640`.

A condition is parsed with Python's grammar, and a few kinds of nodes are evaluated over plain
values. It is data, never code: no calls except the ones listed here, and no loops.

Names: key, shard, split; a field of the sample (text, or JSON by its entries); size.FIELD, its bytes;
has.FIELD. The text of a field counts as a number if it is compared or computed with a number, or
with a field that also holds a number. Beside a text it stays text: `txt == '007'` matches only that
caption.
"""

from __future__ import annotations

import ast
import json
import operator
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from wdstrain.errors import SampleError, UsageError


class _FieldText(str):
    """The text of a field. It is false if it is empty or a number equal to 0."""

    __slots__ = ()

    @property
    def number(self) -> int | float | None:
        """The text as a number; None for other text and for "1_0", which Python reads as 10."""
        for kind in (int, float):
            if "_" not in self:
                with suppress(ValueError):
                    return kind(self)
        return None

    def __bool__(self) -> bool:
        return bool(len(self)) and self.number != 0


def _comparable(a: Any, b: Any) -> tuple[Any, Any]:
    """Return two values as they are compared: both as numbers if both are or hold numbers."""
    numbers = [value.number if isinstance(value, _FieldText) else value for value in (a, b)]
    if all(isinstance(number, (int, float)) for number in numbers):
        return numbers[0], numbers[1]
    return a, b


def _equal(a: Any, b: Any) -> bool:
    same_text = isinstance(a, str) and isinstance(b, str) and a == b  # also "nan" == "nan"
    return same_text or bool(operator.eq(*_comparable(a, b)))


def _is_in(a: Any, b: Any) -> bool:
    return any(_equal(a, item) for item in b) if isinstance(b, list) else a in b


_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Eq: _equal,
    ast.NotEq: lambda a, b: not _equal(a, b),
    ast.Lt: lambda a, b: operator.lt(*_comparable(a, b)),
    ast.LtE: lambda a, b: operator.le(*_comparable(a, b)),
    ast.Gt: lambda a, b: operator.gt(*_comparable(a, b)),
    ast.GtE: lambda a, b: operator.ge(*_comparable(a, b)),
    ast.In: _is_in,
    ast.NotIn: lambda a, b: not _is_in(a, b),
    ast.Add: lambda a, b: operator.add(*_comparable(a, b)),
    ast.Sub: lambda a, b: _number(a) - _number(b),
    ast.Mult: lambda a, b: _number(a) * _number(b),  # only numbers: text * number has no limit
    ast.Div: lambda a, b: _number(a) / _number(b),
    ast.Mod: lambda a, b: _number(a) % _number(b),
}
_LONGEST = 10_000  # characters of a condition
_METHODS = ("startswith", "endswith", "lower")


def parse(text: str, more: tuple[type, ...] = ()) -> ast.expr:
    """Return the syntax tree of a condition.

    more: kinds of nodes that are allowed besides the usual ones. Raises UsageError for text that is
    not a valid condition, or that uses or calls anything else.
    """
    if len(text) > _LONGEST:
        raise UsageError(
            f"a condition of {len(text)} characters is too long; {_LONGEST} is the limit. Shorten it."
        )
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UsageError(
            f"{text!r} is no condition ({error}). Write for example: cls < 3 and json.width > 640"
        ) from None
    for node in ast.walk(tree):
        if not isinstance(node, (*_KNOWN, *more)):
            raise UsageError(
                f"{text!r} uses {type(node).__name__}, which is not allowed in a condition. "
                f"Use comparisons, and, or, not, in, + - * / %, and names of fields."
            )
        if isinstance(node, ast.Call) and not _is_known_call(node):
            raise UsageError(
                f"{text!r} calls a function that is not allowed in a condition. "
                f"Use only len(), .startswith(), .endswith() and .lower()."
            )
    return tree


class Expression:
    """A condition on a sample."""

    def __init__(self, text: str) -> None:
        """Parse a condition. Raises UsageError for text that is not a valid condition."""
        self.text = text
        self._tree = parse(text)

    @property
    def names(self) -> set[str]:
        """The fields that the condition names, by the first part of their names."""
        names = {node.id for node in ast.walk(self._tree) if isinstance(node, ast.Name)}
        return names - {"key", "shard", "split", "size", "has", "len"}

    def holds(self, sample: Mapping[str, bytes], **about: str) -> bool:
        """Return whether the condition holds for a sample; False if the sample lacks a field.

        sample: bytes by field; about: values of key, shard and split. Raises SampleError if the
        condition cannot be evaluated, for example because a text is compared with a number.
        """
        try:
            return bool(self._value(self._tree, sample, about))
        except _Missing:
            return False
        except (
            TypeError,
            ZeroDivisionError,
            LookupError,
            OverflowError,
            RecursionError,
            ValueError,
        ) as error:
            raise SampleError(
                f"{self.text!r} cannot be evaluated for it ({type(error).__name__}: {error})"
            ) from None

    def _value(self, node: Any, sample: Mapping[str, bytes], about: Mapping[str, str]) -> Any:
        """Return the value of one node of the syntax tree."""

        def value(child: Any) -> Any:
            return self._value(child, sample, about)

        match node:
            case ast.Constant():
                return node.value
            case ast.List() | ast.Tuple():
                return [value(item) for item in node.elts]
            case ast.BoolOp(op=ast.And()):
                return all(value(operand) for operand in node.values)
            case ast.BoolOp():
                return any(value(operand) for operand in node.values)
            case ast.UnaryOp(op=ast.Not()):
                return not value(node.operand)
            case ast.UnaryOp():
                return -_number(value(node.operand))
            case ast.BinOp():
                return _OPERATORS[type(node.op)](value(node.left), value(node.right))
            case ast.Compare():
                left = value(node.left)
                for operation, comparator in zip(node.ops, node.comparators, strict=True):
                    right = value(comparator)
                    if not _OPERATORS[type(operation)](left, right):
                        return False
                    left = right
                return True
            case ast.Call():
                return self._call(node, value)
            case ast.Name():
                return about[node.id] if node.id in about else _read(sample, node.id)
            case _:
                return self._entry(node, sample, value)

    def _entry(self, node: Any, sample: Mapping[str, bytes], value: Callable[[Any], Any]) -> Any:
        """Return the value of a.b or a["b"].

        It is the size of a field, whether the sample has the field, a field with a dot in its name,
        or an entry of JSON.
        """
        entry = node.attr if isinstance(node, ast.Attribute) else value(node.slice)
        base = node.value.id if isinstance(node.value, ast.Name) else ""
        if base == "size":
            return len(_bytes(sample, entry))
        if base == "has":
            return entry in sample
        if f"{base}.{entry}" in sample:
            return _read(sample, f"{base}.{entry}")
        document = value(node.value)
        if isinstance(document, dict) and entry not in document:
            raise KeyError(f"there is no {entry!r}, but {', '.join(map(str, document))}")
        return document[entry]

    def _call(self, node: ast.Call, value: Callable[[Any], Any]) -> Any:
        """Return the value of a call of len() or of a text method."""
        if isinstance(node.func, ast.Name):
            return len(value(node.args[0]))
        assert isinstance(node.func, ast.Attribute)
        text = value(node.func.value)
        if not isinstance(text, str):
            raise TypeError(f"{text!r} is not a text")
        return getattr(text, node.func.attr)(*[value(argument) for argument in node.args])


def _is_known_call(node: ast.Call) -> bool:
    if node.keywords:
        return False
    if isinstance(node.func, ast.Name):
        return node.func.id == "len" and len(node.args) == 1
    return isinstance(node.func, ast.Attribute) and node.func.attr in _METHODS


_KNOWN = (
    *(
        ast.Constant,
        ast.List,
        ast.Tuple,
        ast.BoolOp,
        ast.And,
        ast.Or,
        ast.UnaryOp,
        ast.Not,
        ast.USub,
        ast.BinOp,
        ast.Compare,
    ),
    *(ast.Name, ast.Load, ast.Attribute, ast.Subscript, ast.Call),
    *_OPERATORS,
)


class _Missing(Exception):
    """The sample lacks the field."""


def _bytes(sample: Mapping[str, bytes], field: str) -> bytes:
    if field not in sample:
        raise _Missing(field)
    return sample[field]


def _number(value: Any) -> Any:
    """Return a value as a number. Raises TypeError if it is none."""
    if isinstance(value, _FieldText) and (number := value.number) is not None:
        return number
    if not isinstance(value, (int, float)):
        raise TypeError(f"{value!r} is not a number")
    return value


def _read(sample: Mapping[str, bytes], field: str) -> Any:
    """Return the value of a field: parsed JSON, or text."""
    data = _bytes(sample, field)
    if field.rpartition(".")[2] == "json":
        return json.loads(data)
    return _FieldText(data.decode("utf-8", "replace").strip())
