"""Random columns, random conditions on them, and their evaluation by pandas.

This module does not import the package. A condition is drawn as its text together with a function
that evaluates it. A comparison with a missing value is neither true nor false, as in SQL.
"""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from keyword import iskeyword
from typing import Any

import numpy as np
import pandas as pd

NAMES = (
    "width_\u00b5m",
    "\u212b",
    "\u00c5",
    "e\u0301t",
    "a",
    "x_1",
    "class",
    "and",
    "two words",
    "größe",
    "日本",
    "it's",
    "a.b",
    "None",
    "Kind",
)
TEXTS: tuple[str, ...] = (
    "",
    "a",
    "A",
    "b",
    "ab",
    "red fish",
    'say "x"',
    "it's",
    "back\\slash",
    "`tick`",
    "été",
)
TEXTS += (
    "e\u0301te\u0301",
    "İi",
    "ß",
    "SS",
    "🐟",
    "日本",
    "line\nbreak",
    "007",
    "nan",
    "None",
    "\t",
)
LEAST = -(2**63)
HUGE = (-(2**63) + 1, -(2**53) - 1, -1, 0, 1, 2**53, 2**53 + 1, 2**63 - 2, 2**63 - 1)
FLOATS = (math.nan, math.inf, -math.inf, -0.0, 0.0, 0.1, -2.5, 3.0, 1e-300, -1e300, 2.0**53)
CLASSES = ("ant", "bee", "Cat", "dog fish", "été", "it's")
TAGS = ("red", "blue", "dark red", "", "été", "it's")
COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


@dataclass(frozen=True)
class Column:
    """One column. kind: huge, small, number, flag, text, class or tags. values: None if missing."""

    name: str
    kind: str
    values: tuple[Any, ...]

    @property
    def written(self) -> str:
        """The name as a condition writes it."""
        is_word = self.name.isidentifier() and not iskeyword(self.name)
        return self.name if is_word else f"`{self.name}`"


@dataclass(frozen=True)
class Value:
    """A value of each row; those that are missing count for nothing."""

    values: pd.Series
    missing: pd.Series

    def map(self, function: Callable[[pd.Series], pd.Series]) -> Value:
        return Value(function(self.values), self.missing)

    def join(self, other: Value, function: Callable[[Any, Any], pd.Series]) -> Value:
        """Return function(self, other), missing where either is missing."""
        return Value(function(self.values, other.values), self.missing | other.missing)


@dataclass(frozen=True)
class Part:
    """A part of a condition: its text, how strongly it binds, and its value of each row."""

    text: str
    strength: int  # 0: or, 1: and, 2: not, 3: comparison, 4: sum, 5: product, 6: name or call
    value: Value

    def inside(self, strength: int) -> str:
        """Return the text as an operand of an operator of this strength."""
        return self.text if self.strength >= strength else f"({self.text})"

    @property
    def rows(self) -> list[int]:
        """Numbers of the rows for which the condition is true."""
        return np.flatnonzero(self.value.values & ~self.value.missing).tolist()


def draw_columns(rng: random.Random, count: int) -> list[Column]:
    """Return a column of each kind, and another one of texts, numbers and flags."""
    kinds = ("huge", "small", "small", "number", "number", "flag", "text", "text", "class", "tags")
    columns = []
    for kind, name in zip(kinds, rng.sample(NAMES, len(kinds)), strict=True):
        rare = rng.choice((0.0, 0.2, 0.6))
        values = [None if rng.random() < rare else _draw_value(rng, kind) for _ in range(count)]
        # Without a finite number, a column of numbers is one of texts: "nan" and "inf".
        values[0] = 0.5 if kind == "number" else _draw_value(rng, kind)
        columns.append(Column(name, kind, tuple(values)))
    return columns


def _draw_value(rng: random.Random, kind: str) -> Any:
    match kind:
        case "huge":
            return rng.choice((LEAST, *HUGE))
        case "small":
            return rng.randrange(-9, 10)
        case "number":
            return rng.choice((*FLOATS, round(rng.uniform(-9, 9), 2)))
        case "flag":
            return rng.random() < 0.5
        case "text":
            return rng.choice(TEXTS)
        case "class":
            return rng.choice(CLASSES)
    return rng.sample(TAGS, rng.randrange(4))


class Drawing:
    """Draws conditions on some columns."""

    def __init__(self, rng: random.Random, columns: Sequence[Column]) -> None:
        self._rng, self._columns = rng, columns
        self._count = len(columns[0].values)

    def condition(self, depth: int = 3) -> Part:
        """Return a condition of at most this depth."""
        rng = self._rng
        kind = rng.choice(("and", "or", "not", "leaf")) if depth else "leaf"
        if kind == "leaf":
            return self._leaf()
        if kind == "not":
            return self.negated(self.condition(depth - 1))
        parts = [self.condition(depth - 1) for _ in range(rng.choice((2, 2, 3)))]
        return self.joined(kind, parts)

    def negated(self, part: Part) -> Part:
        return Part(f"not {part.inside(2)}", 2, part.value.map(operator.invert))

    def joined(self, word: str, parts: Sequence[Part]) -> Part:
        """Return the parts joined by `and` or `or`."""
        strength = 1 if word == "and" else 0
        text = f" {word} ".join(part.inside(strength + 1) for part in parts)
        return Part(text, strength, _joined(word, [part.value for part in parts]))

    def compared(self, left: Part, right: Part, sign: str) -> Part:
        value = left.value.join(right.value, COMPARISONS[sign])
        return Part(f"{left.inside(4)} {sign} {right.inside(4)}", 3, value)

    # --- columns and constants --------------------------------------------------------------------

    def _column(self, *kinds: str) -> tuple[Column, Part]:
        """Return a column of one of these kinds, by its name or its place."""
        column = self._rng.choice([one for one in self._columns if one.kind in kinds])
        part = self.named(column)
        if part.text == column.name and self._rng.random() < 0.2:
            part = replace(part, text=f"json.{column.name}")
        return column, part

    def named(self, column: Column) -> Part:
        """Return a column by its name."""
        missing = pd.Series([value is None for value in column.values])
        filler = {"text": "", "class": CLASSES[0], "tags": [], "number": 0.0, "flag": False}
        values = pd.Series(
            [filler.get(column.kind, 0) if value is None else value for value in column.values],
            dtype={"huge": "int64", "small": "int64", "number": "float64", "flag": "bool"}.get(
                column.kind, "object"
            ),
        )
        return Part(column.written, 6, Value(values, missing))

    def constant(self, value: Any) -> Part:
        text = repr(value)
        if isinstance(value, str) and "'" not in value and self._rng.random() < 0.3:
            text = '"' + text[1:-1].replace('"', '\\"') + '"'
        strength = 6 if isinstance(value, (str, bool)) or value >= 0 else 5
        missing = pd.Series([False] * self._count)
        return Part(text, strength, Value(pd.Series([value] * self._count), missing))

    # --- conditions without and, or, not ----------------------------------------------------------

    def _leaf(self) -> Part:
        draw = self._rng.choice(
            (
                self._numbers,
                self._numbers,
                self._huge,
                self._texts,
                self._texts,
                self._classes,
                self._tags,
                self._flags,
                self._missing,
                self._truth,
            )
        )
        return draw()

    def _compared(self, left: Part, right: Part, signs: Sequence[str] = tuple(COMPARISONS)) -> Part:
        return self.compared(left, right, self._rng.choice(signs))

    def _numbers(self) -> Part:
        rng = self._rng
        if rng.random() < 0.2:  # a chain
            low, middle, high = (self._number(1) for _ in range(3))
            first, second = self._compared(low, middle, ("<", "<=")), self._compared(middle, high)
            text = first.text + second.text.removeprefix(middle.inside(4))
            return Part(text, 3, _joined("and", [first.value, second.value]))
        if rng.random() < 0.3:
            column, part = self._column("small", "number")
            finite = [value for value in column.values if value is not None and _is_finite(value)]
            return self._listed(part, [*rng.sample(finite, min(len(finite), 2)), 3, -2.5])
        return self._compared(self._number(2), self._number(2))

    def _number(self, depth: int) -> Part:
        """Return a calculation. Divisors are constants other than 0."""
        rng = self._rng
        kind = rng.choice(("name", "name", "constant", "sum", "product", "division", "minus"))
        if not depth or kind == "name":
            return self._column("small", "number", "flag" if depth == 2 else "small")[1]
        if kind == "constant":
            return self.constant(rng.choice((0, 1, -3, 0.5, -2.5, 7, 1e9)))
        left = self._number(depth - 1)
        if kind == "minus":
            return Part(f"-{left.inside(6)}", 5, left.value.map(lambda v: -_as_number(v)))
        if kind == "division":
            right = self.constant(rng.choice((2, 3, -4, 0.5)))
            sign, call = rng.choice((("/", operator.truediv), ("%", operator.mod)))
        else:
            right = self._number(depth - 1)
            signs = (
                (("+", operator.add), ("-", operator.sub))
                if kind == "sum"
                else (("*", operator.mul),)
            )
            sign, call = rng.choice(signs)
        strength = 4 if kind == "sum" else 5
        value = left.value.join(right.value, lambda a, b: call(_as_number(a), _as_number(b)))
        return Part(f"{left.inside(strength)} {sign} {right.inside(strength + 1)}", strength, value)

    def _huge(self) -> Part:
        """Whole numbers of 64 bits. Beside numbers with a point they are rounded, as in pandas."""
        rng, (_, part) = self._rng, self._column("huge")
        if rng.random() < 0.3:
            return self._listed(part, rng.sample(HUGE, 3))
        if rng.random() < 0.2:
            return self._compared(part, self._column("huge", "small")[1])
        if rng.random() < 0.3:
            return self._compared(part, self._column("number")[1])
        return self._compared(part, self.constant(rng.choice((*HUGE, LEAST, 2.0**53, -0.5, 1e300))))

    def _texts(self) -> Part:
        rng, (column, part) = self._rng, self._column("text")
        kind = rng.choice(("compare", "compare", "list", "contains", "method", "len", "join"))
        if rng.random() < 0.3:
            lower = part.value.map(lambda v: v.map(str.lower))
            part = Part(f"{part.text}.lower()", 6, lower)
        other = rng.choice((*TEXTS, column.values[0]))
        if kind == "list":
            return self._listed(part, [other, *rng.sample(TEXTS, 2)])
        if kind == "compare":
            constant, column_part = self.constant(other), self._column("text")[1]
            return self._compared(part, rng.choice((constant, constant, column_part)))
        if kind == "join":
            whole = part.value.join(self.constant(other).value, operator.add)
            text = f"{part.text} + {self.constant(other).text}"
            return self._compared(Part(text, 4, whole), self._column("text")[1])
        return self._about(part, kind, other)

    def _about(self, part: Part, kind: str, other: str) -> Part:
        """A condition on parts of texts, or on their length."""
        constant = self.constant(other).text
        if kind == "contains":
            word, negated = self._rng.choice((("in", False), ("not in", True)))
            value = part.value.map(lambda v: v.map(lambda text: (other in text) != negated))
            return Part(f"{constant} {word} {part.text}", 3, value)
        if kind == "len":
            length = Part(f"len({part.text})", 6, part.value.map(lambda v: v.map(len)))
            return self._compared(length, self.constant(self._rng.randrange(5)))
        method = self._rng.choice(("startswith", "endswith"))
        value = part.value.map(lambda v: v.map(lambda text: getattr(text, method)(other)))
        return Part(f"{part.text}.{method}({constant})", 6, value)

    def _classes(self) -> Part:
        rng, (_, part) = self._rng, self._column("class")
        numbers = part.value.map(lambda v: v.map(CLASSES.index))
        kind = rng.choice(("name", "name", "number", "list", "contains", "method", "len"))
        if kind == "number":
            constant = self.constant(rng.randrange(-1, len(CLASSES) + 1))
            return self._compared(Part(part.text, 6, numbers), constant)
        if kind == "name":
            return self._compared(part, self.constant(rng.choice(CLASSES)), ("==", "!="))
        if kind == "list":
            return self._listed(part, rng.sample(CLASSES, 3))
        return self._about(part, kind, rng.choice(("a", "", "é", "dog fish", "'")))

    def _tags(self) -> Part:
        rng, (_, part) = self._rng, self._column("tags")
        return self._about(part, rng.choice(("contains", "contains", "len")), rng.choice(TAGS))

    def _flags(self) -> Part:
        _, part = self._column("flag")
        constant = self.constant(self._rng.choice((True, False, 0, 1, 2)))
        return self._compared(part, constant)

    def _missing(self) -> Part:
        _, part = self._column("huge", "small", "number", "flag", "text", "class", "tags")
        known = pd.Series([False] * self._count)
        kind = self._rng.choice(("is None", "is not None", "has"))
        if kind == "has" and "`" not in part.text and not part.text.startswith("json."):
            return Part(f"has.{part.text}", 6, Value(~part.value.missing, known))
        kind = "is None" if kind == "has" else kind
        missing = part.value.missing
        return Part(
            f"{part.text} {kind}", 3, Value(missing if kind == "is None" else ~missing, known)
        )

    def _truth(self) -> Part:
        """A column alone: numbers other than 0, also nan, and texts and lists that are not empty."""
        column, part = self._column("huge", "small", "number", "flag", "text", "tags")
        if column.kind in ("text", "tags"):
            return Part(part.text, 6, part.value.map(lambda v: v.map(bool)))
        return Part(part.text, 6, part.value.map(lambda v: v != 0))

    def _listed(self, part: Part, constants: Sequence[Any]) -> Part:
        """A value in a list of constants."""
        word = self._rng.choice(("in", "in", "not in"))
        text = ", ".join(self.constant(constant).text for constant in constants)
        text = self._rng.choice((f"[{text}]", f"({text})"))
        is_in = part.value.map(lambda v: v.map(lambda x: any(x == one for one in constants)))
        value = is_in if word == "in" else is_in.map(operator.invert)
        return Part(f"{part.inside(4)} {word} {text}", 3, value)


def _joined(word: str, values: Sequence[Value]) -> Value:
    """Return `and` or `or`: missing unless one of the known values decides."""
    known_true = [value.values & ~value.missing for value in values]
    known_false = [~value.values & ~value.missing for value in values]
    if word == "and":
        true, false = np.logical_and.reduce(known_true), np.logical_or.reduce(known_false)
    else:
        true, false = np.logical_or.reduce(known_true), np.logical_and.reduce(known_false)
    return Value(pd.Series(true), pd.Series(~(true | false)))


def _as_number(values: pd.Series) -> pd.Series:
    return values.astype("int64") if values.dtype == bool else values


def _is_finite(value: float) -> bool:
    return math.isfinite(value)
