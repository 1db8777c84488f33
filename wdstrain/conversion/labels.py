"""Decision about a label column: its kind, its classes, and the rows whose cells do not fit.

The user states the kind with `name:class`, `name:number`, `name:multi` or `name:flag`. Otherwise the
type of nearly all cells decides: text and whole numbers from 0 to 999 are classes, true and false
are flags, other numbers are numbers, lists are several classes. Cells that do not fit are bad and
never change the kind. A column that may be of two kinds is refused, and the error names both.

A column is decided by its distinct values and how often each occurs, so large tables cost little.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from wdstrain.conversion.classes import RANGE, look_alikes, shown
from wdstrain.errors import SourceError, UsageError
from wdstrain.shards.kinds import FLAG_CLASSES, ColumnInfo

KINDS = ("class", "number", "multi", "flag")
_FEW = 0.05  # cells of another type that do not make a column ambiguous
_SHOWN = 8  # classes and notes that are named in messages
_LARGEST = 3.4028234663852886e38  # of a float32, the type of numbers in training

# Texts for a missing number. In a column of text they may be classes.
_MISSING = frozenset(("na", "n/a", "#n/a", "<na>", "null", "none", "nil", "?", "-", "--"))
_MISSING |= {sign + word for sign in ("", "+", "-") for word in ("nan", "inf", "infinity")}
_SEPARATORS = ("|", ";", ",", "/")  # between the classes in one cell

# No leading zeros: 00123 is a name. At most 15 digits: a float keeps those apart.
WHOLE = re.compile(r"[+-]?(0|[1-9]\d{0,14})")
NUMBER = re.compile(r"[+-]?((0|[1-9]\d{0,14})(\.\d*)?|\.\d+)([eE][+-]?\d{1,3})?")
_ANY_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")
# What people read as a number: 1,5 and 1.234,5 and 1 200 and 12% and $3 and 7.5 kg and 0:01:30.
_QUANTITY = re.compile(
    r"[^\w\s]?\s?(\d{1,3}([ ,.'\u2019]\d{3})+|\d+)([.,]\d+)?(\s?[^\w\s]|\s\w{1,3})?"
    r"|(\d+ days?, )?\d+:\d\d:\d\d(\.\d+)?"
)


@dataclass
class Decision:
    """A label column as it is packed, or while it is decided.

    codes: place in `values` of each row. values: distinct ones, as the label stores them. counts:
    rows that have each. bad: why a value cannot be used, by its place. lines: for people.
    """

    place: str
    name: str
    codes: npt.NDArray[np.int32]
    values: list[Any]
    counts: npt.NDArray[np.int64]
    bad: dict[int, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    kind: str = ""
    classes: tuple[str, ...] = ()

    @property
    def label(self) -> ColumnInfo:
        """The label, stored in the field json."""
        return ColumnInfo(self.name, self.kind, "json", self.name, self.classes)

    def good(self) -> dict[int, Any]:
        """Return the values of rows that are not bad, by place."""
        codes = np.flatnonzero(self.counts).tolist()
        return {code: self.values[code] for code in codes if code not in self.bad}

    def rows(self, codes: Collection[int]) -> int:
        """Return the number of rows that have these values."""
        return int(self.counts[list(codes)].sum())

    def refuse(self, codes: Iterable[int], why: str) -> None:
        """Mark values as bad."""
        for code in codes:
            holds = f"the label column '{self.name}' holds {shown(self.values[code])}"
            self.bad.setdefault(code, f"{holds}, {why}")

    def read_all(self, read: Callable[[Any], Any], why: str = "") -> None:
        """Replace the good values by read(value), and refuse those for which it is None."""
        made = {code: read(value) for code, value in self.good().items()}
        self.refuse([code for code, value in made.items() if value is None], why)
        for code in made.keys() - self.bad.keys():
            self.values[code] = made[code]

    def ask(self, holds: str, *kinds: str) -> UsageError:
        """Return the error for a column that may be of several kinds."""
        choices = " or ".join(f'label="{self.name}:{kind}"' for kind in kinds)
        return UsageError(
            f"{self.place}: the column '{self.name}' holds {holds}. State the kind: {choices}."
        )


def decide(
    place: str,
    name: str,
    kind: str | None,
    codes: npt.NDArray[np.int32],
    values: Sequence[Any],
    counts: npt.NDArray[np.int64],
    names: tuple[str, ...] = (),
    classes: tuple[str, ...] = (),
) -> Decision:
    """Return the label of a column of plain values.

    kind: as the user named it. codes: place in `values` of each row. counts: rows of each value
    that are packed. names: of the column's class numbers, as the table has them. classes: those
    that the label must have, in the order of their numbers. Raises UsageError for a column that may
    be of two kinds or is of none, SourceError for a column without a value.
    """
    column = Decision(place, name, codes, list(values), counts)
    empty = [code for code, v in column.good().items() if v is None or not str(v).strip()]
    column.bad = dict.fromkeys(empty, f"the label column '{name}' is empty")
    if not column.good():
        raise SourceError(
            f"{place}: no row has a value in the label column '{name}'. Name another column."
        )
    has_lists = any(isinstance(value, list) for value in column.good().values())
    column.kind = kind or ("class" if names and not has_lists else _guess(column))
    if column.kind == "flag" and classes and classes != FLAG_CLASSES:
        column.kind = "class"
    makers = {"class": _classes, "flag": _flags, "number": _numbers, "multi": _lists}
    column.classes = makers[column.kind](column, names)
    if classes and column.kind != "number":
        _use_classes(column, classes)
    if not column.good():
        raise UsageError(
            f"{place}: no value fits {name}:{column.kind}: {next(iter(column.bad.values()))}. Name "
            "another column, or another kind."
        )
    column.lines = [*_lines(column), *column.lines]
    return column


def _few(total: int) -> int:
    return max(1 if total > 2 else 0, int(_FEW * total))


# --- the kind -------------------------------------------------------------------------------------


def _type(value: Any) -> str:
    if isinstance(value, bool):
        return "truth"
    if isinstance(value, (int, float)):
        return "number"
    if not isinstance(value, str):
        return "list" if isinstance(value, list) else "other"
    text = value.strip().lower()
    if number_in(text) is not None:
        return "number"
    if text in _MISSING:
        return "missing"
    return "truth" if text in ("true", "false") else "text"


def _guess(column: Decision) -> str:
    """Return the kind of nearly all cells. Cells that do not fit become bad."""
    types: dict[str, list[int]] = defaultdict(list)
    for code, value in column.good().items():
        types[_type(value)].append(code)
    count = Counter({name: column.rows(codes) for name, codes in types.items()})
    few = _few(count.total() - count["missing"])
    if count["other"] > few:
        raise UsageError(
            f"{column.place}: the column '{column.name}' holds "
            f"{shown(column.values[types['other'][0]])}, which is neither a class nor a number. "
            "Leave it out of the labels: it is kept in the json field."
        )
    if count["list"] > few:
        return _guess_lists(column, types["list"])
    column.refuse([*types["list"], *types["other"]], "unlike the other rows")
    texts = count["text"] + count["truth"]
    hint = f"{column.name}:class takes every value as a class"
    if texts <= few and count["number"] > texts:
        odd = [*types["text"], *types["truth"], *types["missing"]]
        column.refuse(odd, f"which is not a number; {hint}")
        return _guess_numbers(column, types["number"])
    if count["truth"] and count["text"] + count["number"] <= few and not types["missing"]:
        column.refuse([*types["text"], *types["number"]], f"which is not true or false; {hint}")
        return "flag"
    padded = [code for code in types["text"] if column.values[code].strip().isdigit()]
    # 007 is a name, so numbers beside such names are names too.
    if count["number"] > few and column.rows(padded) <= few:
        text = shown(column.values[[*types["text"], *types["truth"]][0]])
        holds = f"{count['number']} numbers and {texts} texts, such as {text}"
        raise column.ask(holds, "class", "number")
    quantities = [code for code in types["text"] if _is_quantity(column.values[code])]
    if len(quantities) > 1 and texts - column.rows(quantities) <= few:
        raise UsageError(
            f"{column.place}: the column '{column.name}' holds "
            f"{shown(column.values[quantities[0]])} and the like, which may be numbers. Write "
            f'plain numbers, such as 1234.5; or give decimal="," for decimal commas; or '
            f'label="{column.name}:class" if they are names.'
        )
    return "class"


def _is_quantity(text: str) -> bool:
    normal = unicodedata.normalize("NFKC", text).replace("\u2212", "-").strip()
    is_number = NUMBER.fullmatch(normal) or _QUANTITY.fullmatch(normal.lstrip("+-"))
    return bool(is_number) and not text.strip().isdigit()


def _guess_numbers(column: Decision, codes: list[int]) -> str:
    """Return whether numbers are classes or quantities. Text that is a number becomes one."""
    for code in codes:
        column.values[code] = number_in(column.values[code])
    values = [column.values[code] for code in codes]
    whole = [value for value in values if isinstance(value, int)]
    odd = [code for code in codes if isinstance(column.values[code], float)]
    fractions, count = column.rows(odd), column.rows(codes)
    if fractions:
        if all(value == int(value) and 0 <= value < RANGE for value in values):
            beside = " beside empty cells" if count < column.counts.sum() else ""
            holds = f"whole numbers as floats{beside}, which may have been class numbers"
            raise column.ask(holds, "class", "number")
        if fractions <= _FEW * count and all(0 <= value < RANGE for value in whole):
            holds = f"{count - fractions} whole numbers and {fractions} others, such as "
            raise column.ask(f"{holds}{column.values[odd[0]]!r}", "class", "number")
        return "number"
    negative = {value for value in whole if value < 0}
    if negative == {-1} and 0 not in whole:
        first = min((value for value in whole if value >= 0), default=-1)
        raise column.ask(f"-1 and whole numbers from {first}", "class", "number")
    if negative - {-1}:
        return "number"
    if max(whole) >= RANGE:
        holds = (
            f"{len(set(whole))} different whole numbers up to {max(whole)}, which may be classes"
        )
        raise column.ask(f"{holds} or numbers", "class", "number")
    # Hugging Face data sets: no label
    column.refuse(
        [code for code in codes if column.values[code] == -1],
        f"which means no label; {column.name}:class makes it a class, {column.name}:number a number",
    )
    return "class"


def _guess_lists(column: Decision, codes: list[int]) -> str:
    lists = [column.values[code] for code in codes]
    members = [member for members in lists for member in members]
    wrong = [m for m in members if isinstance(m, bool) or not isinstance(m, (str, int))]
    if len(wrong) > _few(len(members)):
        raise UsageError(
            f"{column.place}: the column '{column.name}' holds lists of {shown(wrong[0])} and the "
            "like, but a list of classes must hold names or class numbers. Leave it out of the "
            "labels: it is kept in the json field."
        )
    lengths = set(map(len, lists))
    has_names = any(isinstance(member, str) for member in members)
    if column.rows(codes) > 1 and len(lengths) == 1 and min(lengths) > 1 and not has_names:
        holds = f"lists of {min(lengths)} numbers each, which may be vectors rather than classes"
        raise column.ask(holds, "multi")
    return "multi"


# --- values, as the label stores them, and classes ------------------------------------------------


def number_in(value: Any) -> int | float | None:
    """Return the number that a value or text is; None for others, and for names such as 007."""
    if isinstance(value, str):
        text = value.strip()
        if WHOLE.fullmatch(text):
            return int(text)
        value = float(text) if NUMBER.fullmatch(text) else None
    is_number = isinstance(value, (int, float)) and math.isfinite(value)
    return value if is_number else None


def _numbers(column: Decision, names: tuple[str, ...]) -> tuple[str, ...]:
    column.read_all(_stated_number, "which is not a number")
    column.refuse(
        [code for code, number in column.good().items() if abs(number) > _LARGEST],
        "which is too large for a float32",
    )
    return ()


def _stated_number(value: Any) -> int | float | None:
    """Return a number, also of true and of 007."""
    number = number_in(value)
    if number is None and isinstance(value, str) and _ANY_NUMBER.fullmatch(value.strip()):
        return float(value)
    return None if number is None else +number


def _flags(column: Decision, names: tuple[str, ...]) -> tuple[str, ...]:
    flags = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
    column.read_all(lambda v: flags.get(str(v).strip().lower()), "which is not true or false")
    return FLAG_CLASSES


def _classes(column: Decision, names: tuple[str, ...]) -> tuple[str, ...]:
    if names:
        column.refuse(
            [c for c, value in column.good().items() if value == -1], "which means no label"
        )
        column.read_all(lambda v: _member(v, names), f"none of the {len(names)} classes")
        return names
    column.refuse(
        [code for code, v in column.good().items() if isinstance(v, (list, dict, bytes))],
        "which is not a class",
    )
    spellings: dict[str, list[str]] = {}  # by the name without blanks
    for value in filter(lambda v: isinstance(v, str), column.good().values()):
        spellings.setdefault(value.strip(), []).append(value)
    column.lines += [
        f"label {column.name}: {' and '.join(map(shown, some))} are one class: blanks around names "
        "are removed"
        for some in [some for some in spellings.values() if len(some) > 1][:_SHOWN]
    ]
    column.read_all(lambda v: v.strip() if isinstance(v, str) else v)
    whole = [_whole_in(value) for value in column.good().values()]
    if not whole or None in whole:
        return tuple(sorted({str(value) for value in column.good().values()}))
    column.read_all(_whole_in)
    distinct = sorted(set(column.good().values()))
    if distinct[0] >= 0 and distinct[-1] < max(RANGE, 2 * len(distinct)):
        distinct = list(range(distinct[-1] + 1))  # the numbers stay the class numbers
    return tuple(map(str, distinct))


def _whole_in(value: Any) -> int | None:
    number = number_in(value)
    is_whole = number is not None and not isinstance(number, bool) and number % 1 == 0
    return int(number) if is_whole else None  # type: ignore[arg-type]


def _lists(column: Decision, names: tuple[str, ...]) -> tuple[str, ...]:
    texts = [value for value in column.good().values() if isinstance(value, str)]
    separator = separator_in(texts) or "|"
    column.read_all(lambda v: _members(v, names, separator), "which is not a list of classes")
    members = {str(member) for several in column.good().values() for member in several}
    order = sorted(members, key=int) if all(map(WHOLE.fullmatch, members)) else sorted(members)
    return names or tuple(order)


def _members(value: Any, names: tuple[str, ...], separator: str) -> list[str | int] | None:
    """Return the classes in a cell; None if it holds something else."""
    parts = value.split(separator) if isinstance(value, str) else value
    parts = parts if isinstance(parts, list) else [parts]
    parts = [part for part in parts if not isinstance(part, str) or part.strip()]
    classes = [_member(part, names) for part in parts]
    return None if None in classes else classes


def _member(value: Any, names: tuple[str, ...]) -> Any:
    """Return a class; None for a value that is not one. names: of class numbers, if known."""
    if isinstance(value, str):
        return value.strip() if not names or value.strip() in names else None
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    if names:
        return names[value] if 0 <= value < len(names) else None
    return value


def separator_in(texts: Sequence[str]) -> str:
    """Return the separator between classes in some texts, whose parts come again in others, or ""."""
    for separator in _SEPARATORS:
        parts = [part.strip() for text in set(texts) for part in text.split(separator)]
        several = [text for text in set(texts) if separator in text]
        if several and (separator == "|" or len(set(parts)) < len(parts)):
            return separator
    return ""


def _use_classes(column: Decision, classes: tuple[str, ...]) -> None:
    """Give the label these classes, whose names its values must be.

    If no value is a name, and all are numbers below the number of classes, they are class numbers.
    """
    column.classes = classes
    used = _names_in(column)
    if used.isdisjoint(classes) and all(
        WHOLE.fullmatch(name) and 0 <= int(name) < len(classes) for name in used
    ):
        column.lines.append(
            f"label {column.name}: its numbers count the given classes: 0 is {shown(classes[0])}"
        )
        is_multi = column.kind == "multi"
        column.read_all(lambda v: [classes[int(n)] for n in v] if is_multi else classes[int(v)])
    known = set(classes)
    column.refuse(
        [code for code, v in column.good().items() if not known.issuperset(_names_of(v))],
        f"none of the {len(classes)} given classes",
    )


def _names_of(value: Any) -> set[str]:
    return set(map(str, value)) if isinstance(value, list) else {str(value)}


def _names_in(column: Decision) -> set[str]:
    return {name for value in column.good().values() for name in _names_of(value)}


# --- lines for people -----------------------------------------------------------------------------


def _lines(column: Decision) -> list[str]:
    """Return lines about the decision and the number of values that fit."""
    title, count, good = f"label {column.name}:", len(column.classes), column.good()
    fit = f"{column.rows(good)} of {column.counts.sum()} values fit"
    if column.kind == "number":
        return [f"{title} a number from {min(good.values()):g} to {max(good.values()):g}, {fit}"]
    some = ", ".join(name[:40] for name in column.classes[:_SHOWN])
    some += ", ..." if count > _SHOWN else ""
    several = f"{'several of ' * (column.kind == 'multi')}{count} class{'es' * (count != 1)}"
    used = len(_names_in(column))
    seen = f", {used} of them in this table" if used < count else ""
    lines = [f"{title} {several} ({some}){seen}, {fit}"]
    lines += [f"{title} the classes {names} look alike" for names in look_alikes(column.classes)]
    separator = separator_in(column.classes) if column.kind == "class" else ""
    if separator:
        names = sum(separator in name for name in column.classes)
        lines.append(
            f"{title} {names} classes hold '{separator}'; {column.name}:multi takes a{separator}b as "
            "two classes"
        )
    return lines
