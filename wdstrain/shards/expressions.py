"""Expressions that choose samples, such as `cls < 3 and json.width > 640`: data, never code.

Python's own grammar is read and a handful of its nodes are evaluated over plain values; there are no calls but those named
here, and nothing that loops. Names: key, shard, split; a field of the sample (text, JSON by its entries); size.FIELD, its bytes;
has.FIELD. The text of a field counts as a number where it is compared or computed with a number, or with a field that holds one
too; beside a text it is a text, so `txt == '007'` finds that caption alone.
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
    """The text of a field, which is false where it is a number that is 0."""

    __slots__ = ()

    @property
    def number(self) -> int | float | None:
        """The number that it is; None if it is none, as "1_0", which is 10 to Python."""
        for kind in (int, float):
            if "_" not in self:
                with suppress(ValueError):
                    return kind(self)
        return None

    def __bool__(self) -> bool:
        return bool(len(self)) and self.number != 0


def _alike(a: Any, b: Any) -> tuple[Any, Any]:
    """Two values as they are compared: texts of fields as numbers beside a number."""
    mine = [one.number if isinstance(one, _FieldText) else one for one in (a, b)]
    return (mine[0], mine[1]) if all(isinstance(one, (int, float)) for one in mine) else (a, b)


def _equal(a: Any, b: Any) -> bool:
    same_text = isinstance(a, str) and isinstance(b, str) and a == b  # "nan" too, which is no number's equal
    return same_text or bool(operator.eq(*_alike(a, b)))


def _is_in(a: Any, b: Any) -> bool:
    return any(_equal(a, one) for one in b) if isinstance(b, list) else a in b


_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Eq: _equal,
    ast.NotEq: lambda a, b: not _equal(a, b),
    ast.Lt: lambda a, b: operator.lt(*_alike(a, b)),
    ast.LtE: lambda a, b: operator.le(*_alike(a, b)),
    ast.Gt: lambda a, b: operator.gt(*_alike(a, b)),
    ast.GtE: lambda a, b: operator.ge(*_alike(a, b)),
    ast.In: _is_in,
    ast.NotIn: lambda a, b: not _is_in(a, b),
    ast.Add: lambda a, b: operator.add(*_alike(a, b)),
    ast.Sub: lambda a, b: _number(a) - _number(b),
    ast.Mult: lambda a, b: _number(a) * _number(b),  # of numbers alone: a text times a number has no bound
    ast.Div: lambda a, b: _number(a) / _number(b),
    ast.Mod: lambda a, b: _number(a) % _number(b),
}
_LONGEST = 10_000
_METHODS = ("startswith", "endswith", "lower")


class Expression:
    """A condition on a sample. Raises UsageError for text that is none."""

    def __init__(self, text: str) -> None:
        self.text = text
        try:
            self._tree = ast.parse(text.strip(), mode="eval").body if len(text) <= _LONGEST else None
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise UsageError(f"{text!r} is no condition ({error}). Write for example: cls < 3 and json.width > 640") from None
        if self._tree is None:
            raise UsageError(f"a condition of {len(text)} characters is too long; {_LONGEST} are the most.")
        for node in ast.walk(self._tree):
            if not isinstance(node, _KNOWN):
                raise UsageError(
                    f"{text!r} uses {type(node).__name__}, which a condition cannot. Use comparisons, and, or, not, in, + - * / %, "
                    f"and names of fields."
                )
            if isinstance(node, ast.Call) and not _is_known_call(node):
                raise UsageError(f"{text!r}: of calls a condition knows len(), .startswith(), .endswith() and .lower().")

    @property
    def names(self) -> set[str]:
        """The fields it speaks of, by the first part of their names."""
        found = {node.id for node in ast.walk(self._tree) if isinstance(node, ast.Name)} if self._tree is not None else set()
        return found - {"key", "shard", "split", "size", "has", "len"}

    def holds(self, sample: Mapping[str, bytes], **about: str) -> bool:
        """Whether it holds for the fields of a sample; not where it speaks of a field that the sample has not.

        Raises SampleError where it cannot be told.
        """
        try:
            return bool(self._value(self._tree, sample, about))
        except _Missing:
            return False
        except (TypeError, ZeroDivisionError, LookupError, OverflowError, RecursionError, ValueError) as error:
            raise SampleError(f"{self.text!r} cannot be told of it ({type(error).__name__}: {error})") from None

    def _value(self, node: Any, sample: Mapping[str, bytes], about: Mapping[str, str]) -> Any:
        def value(one: Any) -> Any:
            return self._value(one, sample, about)

        match node:
            case ast.Constant():
                return node.value
            case ast.List() | ast.Tuple():
                return [value(one) for one in node.elts]
            case ast.BoolOp(op=ast.And()):
                return all(value(one) for one in node.values)
            case ast.BoolOp():
                return any(value(one) for one in node.values)
            case ast.UnaryOp(op=ast.Not()):
                return not value(node.operand)
            case ast.UnaryOp():
                return -_number(value(node.operand))
            case ast.BinOp():
                return _OPERATORS[type(node.op)](value(node.left), value(node.right))
            case ast.Compare():
                left = value(node.left)
                for operation, one in zip(node.ops, node.comparators, strict=True):
                    right = value(one)
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
        """a.b or a["b"]: the size of a field, whether it is there, a field with a dot in its name, or an entry of JSON."""
        entry = node.attr if isinstance(node, ast.Attribute) else value(node.slice)
        base = node.value.id if isinstance(node.value, ast.Name) else ""
        if base == "size":
            return len(_bytes(sample, entry))
        if base == "has":
            return entry in sample
        if f"{base}.{entry}" in sample:
            return _read(sample, f"{base}.{entry}")
        holder = value(node.value)
        if isinstance(holder, dict) and entry not in holder:
            raise KeyError(f"there is no {entry!r}, but {', '.join(map(str, holder))}")
        return holder[entry]

    def _call(self, node: ast.Call, value: Callable[[Any], Any]) -> Any:
        if isinstance(node.func, ast.Name):
            return len(value(node.args[0]))
        assert isinstance(node.func, ast.Attribute)
        text = value(node.func.value)
        if not isinstance(text, str):
            raise TypeError(f"{text!r} is no text")
        return getattr(text, node.func.attr)(*[value(one) for one in node.args])


def _is_known_call(node: ast.Call) -> bool:
    if node.keywords:
        return False
    if isinstance(node.func, ast.Name):
        return node.func.id == "len" and len(node.args) == 1
    return isinstance(node.func, ast.Attribute) and node.func.attr in _METHODS


_KNOWN = (
    *(ast.Constant, ast.List, ast.Tuple, ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.USub, ast.BinOp, ast.Compare),
    *(ast.Name, ast.Load, ast.Attribute, ast.Subscript, ast.Call),
    *_OPERATORS,
)


class _Missing(Exception):
    """The sample has no such field."""


def _bytes(sample: Mapping[str, bytes], field: str) -> bytes:
    if field not in sample:
        raise _Missing(field)
    return sample[field]


def _number(value: Any) -> Any:
    if isinstance(value, _FieldText) and (number := value.number) is not None:
        return number
    if not isinstance(value, (int, float)):
        raise TypeError(f"{value!r} is no number")
    return value


def _read(sample: Mapping[str, bytes], field: str) -> Any:
    data = _bytes(sample, field)
    if field.rpartition(".")[2] == "json":
        return json.loads(data)
    return _FieldText(data.decode("utf-8", "replace").strip())
