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

NAMES: tuple[str, ...] = ("width_\u00b5m", "\u212b", "\u00c5", "e\u0301t", "a", "x_1", "class")
NAMES += ("and", "two words", "größe", "日本", "it's", "a.b", "None", "Kind")
TEXTS: tuple[str, ...] = ("", "a", "A", "b", "ab", "red fish", 'say "x"', "it's", "back\\slash")
TEXTS += ("`tick`", "été", "e\u0301te\u0301", "İi", "ß", "SS", "🐟", "日本", "line\nbreak")
TEXTS += ("007", "nan", "None", "\t")
LEAST = -(2**63)
HUGE = (-(2**63) + 1, -(2**53) - 1, -1, 0, 1, 2**53, 2**53 + 1, 2**63 - 2, 2**63 - 1)
FLOATS = (math.nan, math.inf, -math.inf, -0.0, 0.0, 0.1, -2.5, 3.0, 1e-300, -1e300, 2.0**53)
CLASSES = ("ant", "bee", "Cat", "dog fish", "été", "it's")
TAGS = ("red", "blue", "dark red", "", "été", "it's")
COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    **{"==": operator.eq, "!=": operator.ne, "<": operator.lt},
    **{"<=": operator.le, ">": operator.gt, ">=": operator.ge},
}
# kind -> (dtype, value of a row without one, function that draws a value)
KINDS: dict[str, tuple[str, Any, Callable[[random.Random], Any]]] = {
    "huge": ("int64", 0, lambda rng: rng.choice((LEAST, *HUGE))),
    "small": ("int64", 0, lambda rng: rng.randrange(-9, 10)),
    "number": ("float64", 0.0, lambda rng: rng.choice((*FLOATS, round(rng.uniform(-9, 9), 2)))),
    "flag": ("bool", False, lambda rng: rng.random() < 0.5),
    "text": ("object", "", lambda rng: rng.choice(TEXTS)),
    "class": ("object", CLASSES[0], lambda rng: rng.choice(CLASSES)),
    "tags": ("object", [], lambda rng: rng.sample(TAGS, rng.randrange(4))),
}


@dataclass(frozen=True)
class Column:
    """One column. kind: a key of KINDS. values: None if missing."""

    name: str
    kind: str
    values: tuple[Any, ...]

    @property
    def written(self) -> str:
        is_word = self.name.isidentifier() and not iskeyword(self.name)
        return self.name if is_word else f"`{self.name}`"


@dataclass(frozen=True)
class Part:
    """A part of a condition: its text, how strongly it binds, and its value of each row.

    strength: 0: or, 1: and, 2: not, 3: comparison, 4: sum, 5: product, 6: name or call.
    """

    text: str
    strength: int
    values: pd.Series
    missing: pd.Series

    def inside(self, strength: int) -> str:
        """Return the text as an operand of an operator of this strength."""
        return self.text if self.strength >= strength else f"({self.text})"

    @property
    def rows(self) -> list[int]:
        return np.flatnonzero(self.values & ~self.missing).tolist()

    def apply(self, text: str, strength: int, function: Callable[[Any], Any]) -> Part:
        return Part(text, strength, function(self.values), self.missing)

    def each(self, text: str, strength: int, function: Callable[[Any], Any]) -> Part:
        return self.apply(text, strength, lambda values: values.map(function))

    def join(
        self, other: Part, sign: str, strength: int, function: Callable[[Any, Any], Any]
    ) -> Part:
        """Return function(self, other), missing where either is missing."""
        text = f"{self.inside(max(strength, 4))} {sign} {other.inside(strength + 1)}"
        missing = self.missing | other.missing
        return Part(text, strength, function(self.values, other.values), missing)


def draw_columns(rng: random.Random, count: int) -> list[Column]:
    """Return a column of each kind, and another one of texts, numbers and flags."""
    kinds = ("huge", "small", "small", "number", "number", "flag", "text", "text", "class", "tags")
    columns = []
    for kind, name in zip(kinds, rng.sample(NAMES, len(kinds)), strict=True):
        rare, draw = rng.choice((0.0, 0.2, 0.6)), KINDS[kind][2]
        values = [None if rng.random() < rare else draw(rng) for _ in range(count)]
        # Without a finite number, a column of numbers is one of texts: "nan" and "inf".
        values[0] = 0.5 if kind == "number" else draw(rng)
        columns.append(Column(name, kind, tuple(values)))
    return columns


class Drawing:
    def __init__(self, rng: random.Random, columns: Sequence[Column]) -> None:
        self.rng, self.columns = rng, columns
        self.known = pd.Series([False] * len(columns[0].values))  # no row is missing

    def condition(self, depth: int = 3) -> Part:
        kind = self.rng.choice(("and", "or", "not", "leaf")) if depth else "leaf"
        if kind == "leaf":
            leaves = (self.numbers, self.numbers, self.huge, self.texts, self.texts)
            more = (self.classes, self.tags, self.flags, self.is_missing, self.truth)
            return self.rng.choice(leaves + more)()
        if kind == "not":
            return self.negated(self.condition(depth - 1))
        parts = [self.condition(depth - 1) for _ in range(self.rng.choice((2, 2, 3)))]
        return self.joined(kind, parts)

    def negated(self, part: Part) -> Part:
        return part.apply(f"not {part.inside(2)}", 2, operator.invert)

    def joined(self, word: str, parts: Sequence[Part], text: str | None = None) -> Part:
        """Return parts joined by `and` or `or`: missing unless one of the known values decides."""
        strength = 1 if word == "and" else 0
        if text is None:
            text = f" {word} ".join(part.inside(strength + 1) for part in parts)
        is_true = [part.values & ~part.missing for part in parts]
        is_false = [~part.values & ~part.missing for part in parts]
        every, some = np.logical_and.reduce, np.logical_or.reduce
        true = every(is_true) if strength else some(is_true)
        false = some(is_false) if strength else every(is_false)
        return Part(text, strength, pd.Series(true), pd.Series(~(true | false)))

    def compared(self, left: Part, right: Part, sign: str = "") -> Part:
        """Return a comparison, with a random sign if none is given."""
        sign = sign or self.rng.choice([*COMPARISONS])
        return left.join(right, sign, 3, COMPARISONS[sign])

    # --- columns and constants --------------------------------------------------------------------

    def column(self, *kinds: str) -> tuple[Column, Part]:
        """Return a column of one of these kinds, by its name or its place."""
        column = self.rng.choice([one for one in self.columns if one.kind in kinds])
        part = self.named(column)
        if part.text == column.name and self.rng.random() < 0.2:
            part = replace(part, text=f"json.{column.name}")
        return column, part

    def named(self, column: Column) -> Part:
        dtype, filler, _ = KINDS[column.kind]
        missing = pd.Series([value is None for value in column.values])
        values = [filler if value is None else value for value in column.values]
        return Part(column.written, 6, pd.Series(values, dtype=dtype), missing)

    def constant(self, value: Any) -> Part:
        text = repr(value)
        if isinstance(value, str) and "'" not in value and self.rng.random() < 0.3:
            text = '"' + text[1:-1].replace('"', '\\"') + '"'
        strength = 6 if isinstance(value, (str, bool)) or value >= 0 else 5
        return Part(text, strength, pd.Series([value] * len(self.known)), self.known)

    # --- conditions without and, or, not ----------------------------------------------------------

    def numbers(self) -> Part:
        rng = self.rng
        if rng.random() < 0.2:  # a chain
            low, middle, high = (self.number(1) for _ in range(3))
            first = self.compared(low, middle, rng.choice(("<", "<=")))
            second = self.compared(middle, high)
            text = first.text + second.text.removeprefix(middle.inside(4))
            return replace(self.joined("and", [first, second], text), strength=3)
        if rng.random() < 0.3:
            column, part = self.column("small", "number")
            finite = [x for x in column.values if x is not None and math.isfinite(x)]
            return self.listed(part, [*rng.sample(finite, min(len(finite), 2)), 3, -2.5])
        return self.compared(self.number(2), self.number(2))

    def number(self, depth: int) -> Part:
        """Return a calculation. Divisors are constants other than 0."""
        rng = self.rng
        kind = rng.choice(("name", "name", "constant", "sum", "product", "division", "minus"))
        if not depth or kind == "name":
            return self.column("small", "number", "flag" if depth == 2 else "small")[1]
        if kind == "constant":
            return self.constant(rng.choice((0, 1, -3, 0.5, -2.5, 7, 1e9)))
        left = self.number(depth - 1)
        if kind == "minus":
            return left.apply(f"-{left.inside(6)}", 5, lambda values: -as_number(values))
        if kind == "division":
            right = self.constant(rng.choice((2, 3, -4, 0.5)))
            sign, call = rng.choice((("/", operator.truediv), ("%", operator.mod)))
        else:
            right = self.number(depth - 1)
            sums, products = (("+", operator.add), ("-", operator.sub)), (("*", operator.mul),)
            sign, call = rng.choice(sums if kind == "sum" else products)
        strength = 4 if kind == "sum" else 5
        return left.join(right, sign, strength, lambda a, b: call(as_number(a), as_number(b)))

    def huge(self) -> Part:
        """Whole numbers of 64 bits. Beside numbers with a point they are rounded, as in pandas."""
        rng, (_, part) = self.rng, self.column("huge")
        if rng.random() < 0.3:
            return self.listed(part, rng.sample(HUGE, 3))
        if rng.random() < 0.2:
            return self.compared(part, self.column("huge", "small")[1])
        if rng.random() < 0.3:
            return self.compared(part, self.column("number")[1])
        return self.compared(part, self.constant(rng.choice((*HUGE, LEAST, 2.0**53, -0.5, 1e300))))

    def texts(self) -> Part:
        rng, (column, part) = self.rng, self.column("text")
        kind = rng.choice(("compare", "compare", "list", "contains", "method", "len", "join"))
        if rng.random() < 0.3:
            part = part.each(f"{part.text}.lower()", 6, str.lower)
        other = rng.choice((*TEXTS, column.values[0]))
        if kind == "list":
            return self.listed(part, [other, *rng.sample(TEXTS, 2)])
        if kind == "compare":
            constant, another = self.constant(other), self.column("text")[1]
            return self.compared(part, rng.choice((constant, constant, another)))
        if kind == "join":
            whole = part.join(self.constant(other), "+", 4, operator.add)
            return self.compared(whole, self.column("text")[1])
        return self.about(part, kind, other)

    def about(self, part: Part, kind: str, other: str) -> Part:
        """A condition on parts of texts, or on their length."""
        constant = self.constant(other).text
        if kind == "contains":
            word = self.rng.choice(("in", "not in"))
            is_in = part.each(f"{constant} {word} {part.text}", 3, lambda text: other in text)
            return is_in if word == "in" else is_in.apply(is_in.text, 3, operator.invert)
        if kind == "len":
            length = part.each(f"len({part.text})", 6, len)
            return self.compared(length, self.constant(self.rng.randrange(5)))
        method = self.rng.choice(("startswith", "endswith"))
        text = f"{part.text}.{method}({constant})"
        return part.each(text, 6, lambda text: getattr(text, method)(other))

    def classes(self) -> Part:
        rng, (_, part) = self.rng, self.column("class")
        kind = rng.choice(("name", "name", "number", "list", "contains", "method", "len"))
        if kind == "number":
            constant = self.constant(rng.randrange(-1, len(CLASSES) + 1))
            return self.compared(part.each(part.text, 6, CLASSES.index), constant)
        if kind == "name":
            constant = self.constant(rng.choice(CLASSES))
            return self.compared(part, constant, rng.choice(("==", "!=")))
        if kind == "list":
            return self.listed(part, rng.sample(CLASSES, 3))
        return self.about(part, kind, rng.choice(("a", "", "é", "dog fish", "'")))

    def tags(self) -> Part:
        rng, (_, part) = self.rng, self.column("tags")
        return self.about(part, rng.choice(("contains", "contains", "len")), rng.choice(TAGS))

    def flags(self) -> Part:
        _, part = self.column("flag")
        return self.compared(part, self.constant(self.rng.choice((True, False, 0, 1, 2))))

    def is_missing(self) -> Part:
        _, part = self.column(*KINDS)
        kind = self.rng.choice(("is None", "is not None", "has"))
        if kind == "has" and "`" not in part.text and not part.text.startswith("json."):
            return Part(f"has.{part.text}", 6, ~part.missing, self.known)
        is_not = kind == "is not None"
        text = f"{part.text} {'is not None' if is_not else 'is None'}"
        return Part(text, 3, ~part.missing if is_not else part.missing, self.known)

    def truth(self) -> Part:
        """A column alone: numbers other than 0, also nan, and texts and lists that are not empty."""
        column, part = self.column(*(kind for kind in KINDS if kind != "class"))
        if column.kind in ("text", "tags"):
            return part.each(part.text, 6, bool)
        return part.apply(part.text, 6, lambda values: values != 0)

    def listed(self, part: Part, constants: Sequence[Any]) -> Part:
        word = self.rng.choice(("in", "in", "not in"))
        text = ", ".join(self.constant(constant).text for constant in constants)
        text = f"{part.inside(4)} {word} {self.rng.choice((f'[{text}]', f'({text})'))}"
        is_in = part.each(text, 3, lambda x: any(x == one for one in constants))
        return is_in if word == "in" else is_in.apply(text, 3, operator.invert)


def as_number(values: pd.Series) -> pd.Series:
    return values.astype("int64") if values.dtype == bool else values
