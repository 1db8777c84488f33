"""Decision about a label column: its kind, its classes, and the rows whose cells do not fit.

The user states the kind with `name:class`, `name:number`, `name:multi` or `name:flag`. Otherwise the
type of nearly all cells decides: text and whole numbers from 0 to 999 are classes, true and false
are flags, other numbers are numbers, lists are several classes. Cells that do not fit are bad and
never change the kind. A column that may be of two kinds is refused, and the error names both.

A column is decided by its distinct values and how often each occurs, so large tables cost little.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from wdstrain.conversion.classes import RANGE, look_alikes, shown
from wdstrain.errors import SourceError, UsageError
from wdstrain.shards.kinds import FLAG_CLASSES, ColumnInfo

_FEW = 0.05  # cells of another type that do not make a column ambiguous
_SHOWN = 8  # classes that are named in messages
_LARGEST = 3.4028234663852886e38  # of a float32, the type of numbers in training
_SEPARATORS = ("|", ";", ",", "/")  # between the classes in one cell
_FLAGS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}

# Texts for a missing number. In a column of text they may be classes.
_MISSING = frozenset(("na", "n/a", "#n/a", "<na>", "null", "none", "nil", "?", "-", "--"))
_MISSING |= {sign + word for sign in ("", "+", "-") for word in ("nan", "inf", "infinity")}

# No leading zeros: 00123 is a name. At most 15 digits: a float keeps those apart.
WHOLE = re.compile(r"[+-]?(0|[1-9]\d{0,14})")
NUMBER = re.compile(r"[+-]?((0|[1-9]\d{0,14})(\.\d*)?|\.\d+)([eE][+-]?\d{1,3})?")
_STATED_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")
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

    def rows(self, fits: Callable[[Any], bool] = lambda value: True) -> int:
        """Return the number of good rows whose values fit."""
        return int(self.counts[[code for code, value in self.good().items() if fits(value)]].sum())

    def read(self, read: Callable[[Any], Any], why: str = "") -> None:
        """Replace the good values by read(value). Those for which it is None become bad."""
        for code, value in self.good().items():
            made = read(value)
            if made is None:
                holds = f"the label column '{self.name}' holds {shown(value)}"
                self.bad[code] = f"{holds}, {why}"
            else:
                self.values[code] = made

    def keep(self, fits: Callable[[Any], bool], why: str) -> None:
        """Make the values bad that do not fit."""
        self.read(lambda value: value if fits(value) else None, why)

    def refusal(self, holds: str, step: str) -> UsageError:
        return UsageError(f"{self.place}: the column '{self.name}' holds {holds}. {step}")

    def question(self, holds: str, *kinds: str) -> UsageError:
        """Return the error for a column that may be of several kinds."""
        choices = " or ".join(f'label="{self.name}:{kind}"' for kind in kinds)
        return self.refusal(holds, f"State the kind: {choices}.")


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
    column.classes = KINDS[column.kind](column, names)
    if classes and column.kind != "number":
        _use_classes(column, classes)
    if not column.good():
        raise UsageError(
            f"{place}: no value fits {name}:{column.kind}: {next(iter(column.bad.values()))}. Name "
            "another column, or another kind."
        )
    column.lines = [*_lines(column), *column.lines]
    return column


# --- the kind -------------------------------------------------------------------------------------


def _few(total: int) -> int:
    return max(1 if total > 2 else 0, int(_FEW * total))


def _type(value: Any) -> str:
    if isinstance(value, bool):
        return "truth"
    if number_in(value) is not None:
        return "number"
    if not isinstance(value, str):
        return "list" if isinstance(value, list) else "other"
    text = value.strip().lower()
    if text in _MISSING:
        return "missing"
    return "truth" if text in ("true", "false") else "text"


def _guess(column: Decision) -> str:
    """Return the kind of nearly all cells. Raises UsageError for a column that may be of two."""
    rows, samples = Counter[str](), dict[str, Any]()
    for code, value in column.good().items():
        rows[_type(value)] += int(column.counts[code])
        samples.setdefault(_type(value), value)
    few = _few(rows.total() - rows["missing"])
    texts = rows["text"] + rows["truth"]
    if rows["other"] > few:
        raise column.refusal(
            f"{shown(samples['other'])}, which is neither a class nor a number",
            "Leave it out of the labels: it is kept in the json field.",
        )
    if rows["list"] > few:
        return _guess_lists(column)
    if texts <= few and rows["number"] > texts:
        hint = f"{column.name}:class takes every value as a class"
        column.read(
            lambda v: None if isinstance(v, bool) else number_in(v),
            f"which is not a number; {hint}",
        )
        return _guess_numbers(column)
    if rows["truth"] and rows["text"] + rows["number"] <= few and not rows["missing"]:
        return "flag"
    # 007 is a name, so numbers beside such names are names too.
    padded = column.rows(lambda v: _type(v) == "text" and v.strip().isdigit())
    if rows["number"] > few and padded <= few:
        text = shown(samples.get("text", samples.get("truth")))
        holds = f"{rows['number']} numbers and {texts} texts, such as {text}"
        raise column.question(holds, "class", "number")
    quantities = [value for value in column.good().values() if _is_quantity(value)]
    if len(quantities) > 1 and texts - column.rows(_is_quantity) <= few:
        raise column.refusal(
            f"{shown(quantities[0])} and the like, which may be numbers",
            'Write plain numbers, such as 1234.5; or give decimal="," for decimal commas; or '
            f'label="{column.name}:class" if they are names.',
        )
    return "class"


def _is_quantity(value: Any) -> bool:
    if _type(value) != "text" or value.strip().isdigit():
        return False
    normal = unicodedata.normalize("NFKC", value).replace("\u2212", "-").strip()
    return bool(NUMBER.fullmatch(normal) or _QUANTITY.fullmatch(normal.lstrip("+-")))


def _guess_numbers(column: Decision) -> str:
    """Return whether numbers are classes or quantities."""
    values = column.good().values()
    low, high = min(values), max(values)
    has_floats = any(isinstance(value, float) for value in values)
    many = column.rows(lambda v: v % 1 != 0) > _FEW * column.rows()
    if low < -1 or (has_floats and (many or low < 0 or high >= RANGE)):
        return "number"
    if has_floats or high >= RANGE or (low == -1 and 0 not in values):
        count = len(set(values))
        holds = f"{count} different numbers from {low} to {high}, all or nearly all of them whole"
        raise column.question(holds, "class", "number")
    # Hugging Face data sets: no label
    kinds = f"{column.name}:class makes it a class, {column.name}:number a number"
    column.keep(lambda v: v != -1, f"which means no label; {kinds}")
    return "class"


def _guess_lists(column: Decision) -> str:
    lists = [value for value in column.good().values() if isinstance(value, list)]
    members = [member for members in lists for member in members]
    wrong = [m for m in members if isinstance(m, bool) or not isinstance(m, (str, int))]
    if len(wrong) > _few(len(members)):
        raise column.refusal(
            f"lists of {shown(wrong[0])} and the like, but a list of classes must hold names or "
            "class numbers",
            "Leave it out of the labels: it is kept in the json field.",
        )
    has_names = any(isinstance(member, str) for member in members)
    is_fixed = len(set(map(len, lists))) == 1 and len(lists[0]) > 1
    if is_fixed and not has_names and column.rows() > 1:
        holds = f"lists of {len(lists[0])} numbers each, which may be vectors rather than classes"
        raise column.question(holds, "multi")
    return "multi"


# --- values, as the label stores them, and classes ------------------------------------------------


def number_in(value: Any, pattern: re.Pattern[str] = NUMBER) -> int | float | None:
    """Return the number that a value or text is; None for others, and for names such as 007."""
    if isinstance(value, str):
        text = value.strip()
        if WHOLE.fullmatch(text):
            return int(text)
        value = float(text) if pattern.fullmatch(text) else None
    is_number = isinstance(value, (int, float)) and abs(value) <= _LARGEST
    return +value if is_number else None


def _numbers(column: Decision, names: tuple[str, ...]) -> tuple[str, ...]:
    why = "which is not a number, or too large for a float32"
    column.read(lambda value: number_in(value, _STATED_NUMBER), why)
    return ()


def _flags(column: Decision, names: tuple[str, ...]) -> tuple[str, ...]:
    column.read(lambda v: _FLAGS.get(str(v).strip().lower()), "which is not true or false")
    return FLAG_CLASSES


def _classes(column: Decision, names: tuple[str, ...]) -> tuple[str, ...]:
    if names:
        column.keep(lambda value: value != -1, "which means no label")
        column.read(lambda value: _member(value, names), f"none of the {len(names)} classes")
        return names
    column.keep(lambda v: not isinstance(v, (list, dict, bytes)), "which is not a class")
    column.read(lambda value: value.strip() if isinstance(value, str) else value)
    values = set(column.good().values())
    numbers = [_whole_in(value) for value in column.good().values()]
    if not numbers or None in numbers:
        return tuple(sorted(set(map(str, values))))
    column.read(_whole_in)
    distinct: Sequence[Any] = sorted(set(numbers))
    if distinct[0] >= 0 and distinct[-1] < max(RANGE, 2 * len(distinct)):
        distinct = range(distinct[-1] + 1)  # the numbers stay the class numbers
    return tuple(map(str, distinct))


def _whole_in(value: Any) -> int | None:
    number = None if isinstance(value, bool) else number_in(value)
    return None if number is None or number % 1 else int(number)


def _lists(column: Decision, names: tuple[str, ...]) -> tuple[str, ...]:
    texts = [value for value in column.good().values() if isinstance(value, str)]
    separator = separator_in(texts) or "|"
    column.read(lambda v: _members(v, names, separator), "which is not a list of classes")
    members = {str(member) for several in column.good().values() for member in several}
    order = sorted(members, key=int) if all(map(WHOLE.fullmatch, members)) else sorted(members)
    return names or tuple(order)


def _members(value: Any, names: tuple[str, ...], separator: str) -> list[str | int] | None:
    """Return the classes in a cell; None if it holds something else."""
    parts = value.split(separator) if isinstance(value, str) else value
    parts = parts if isinstance(parts, list) else [parts]
    classes = [_member(p, names) for p in parts if not isinstance(p, str) or p.strip()]
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


def separator_in(texts: Iterable[str]) -> str:
    """Return the separator between classes in some texts, whose parts come again in others, or ""."""
    texts = set(texts)
    for separator in _SEPARATORS:
        parts = [part.strip() for text in texts for part in text.split(separator)]
        comes_again = separator == "|" or len(set(parts)) < len(parts)
        if comes_again and any(separator in text for text in texts):
            return separator
    return ""


def _use_classes(column: Decision, classes: tuple[str, ...]) -> None:
    """Give the label these classes, whose names its values must be.

    If no value is a name, and all are numbers below the number of classes, they are class numbers.
    """
    column.classes = classes
    used = _names_in(column)
    if used.isdisjoint(classes) and all(n.isdecimal() and int(n) < len(classes) for n in used):
        column.lines.append(
            f"label {column.name}: its numbers count the given classes: 0 is {shown(classes[0])}"
        )
        is_multi = column.kind == "multi"
        column.read(lambda v: [classes[int(n)] for n in v] if is_multi else classes[int(v)])
    known = set(classes)
    column.keep(
        lambda value: known.issuperset(_names_of(value)),
        f"none of the {len(classes)} given classes",
    )


def _names_of(value: Any) -> set[str]:
    return set(map(str, value)) if isinstance(value, list) else {str(value)}


def _names_in(column: Decision) -> set[str]:
    return {name for value in column.good().values() for name in _names_of(value)}


KINDS = {"class": _classes, "number": _numbers, "multi": _lists, "flag": _flags}


# --- lines for people -----------------------------------------------------------------------------


def _lines(column: Decision) -> list[str]:
    """Return lines about the decision and the number of values that fit."""
    title, count, good = f"label {column.name}:", len(column.classes), column.good().values()
    fit = f"{column.rows()} of {column.counts.sum()} values fit"
    if column.kind == "number":
        return [f"{title} a number from {min(good):g} to {max(good):g}, {fit}"]
    some = ", ".join(name[:40] for name in column.classes[:_SHOWN]) + ", ..." * (count > _SHOWN)
    several = f"{'several of ' * (column.kind == 'multi')}{count} class{'es' * (count != 1)}"
    used = len(_names_in(column))
    seen = f", {used} of them in this table" * (used < count)
    lines = [f"{title} {several} ({some}){seen}, {fit}"]
    lines += [f"{title} the classes {names} look alike" for names in look_alikes(column.classes)]
    if column.kind == "class" and (separator := separator_in(column.classes)):
        names = sum(separator in name for name in column.classes)
        lines.append(
            f"{title} {names} classes hold '{separator}'; {column.name}:multi takes a{separator}b as "
            "two classes"
        )
    return lines
