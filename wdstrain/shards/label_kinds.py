"""The kind of a label whose user states none: one rule, for tables, arrays and `wt.index`.

Nearly all values (95 %) decide. Others never change the kind: they are bad.

values                               rule             label
-----------------------------------  ---------------  ---------------------------------
names, and numbers such as 007       class            a class, names in sorted order
whole numbers from 0 to 999          class number     a class, whose number is kept
true and false                       flag             a flag
other numbers                        quantity         a number
lists of names or class numbers      multi            several classes

Values that fit two of these are refused, and the error names the kinds to state: whole numbers that
are stored as floats or above 999, numbers beside names, lists of equal length, and texts that people
read as numbers (1,5 and 12% and 3 kg).
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from wdstrain.errors import UsageError

RANGE = 1000  # whole numbers below this are class numbers; larger ones can be ids or quantities
FEW = 0.05  # share of values of another type that do not make a column ambiguous
_LARGEST = 3.4028234663852886e38  # of a float32, the type of numbers in training

# Texts for a missing number. In a column of text they may be classes.
_MISSING = frozenset(("na", "n/a", "#n/a", "<na>", "null", "none", "nil", "?", "-", "--"))
_MISSING |= {sign + word for sign in ("", "+", "-") for word in ("nan", "inf", "infinity")}

# No leading zeros: 00123 is a name. At most 15 digits: a float keeps those apart.
WHOLE = re.compile(r"[+-]?(0|[1-9]\d{0,14})")
NUMBER = re.compile(r"[+-]?((0|[1-9]\d{0,14})(\.\d*)?|\.\d+)([eE][+-]?\d{1,3})?")
# What people read as a number: 1,5 and 1.234,5 and 1 200 and 12% and $3 and 7.5 kg and 0:01:30.
_QUANTITY = re.compile(
    r"[^\w\s]?\s?(\d{1,3}([ ,.'\u2019]\d{3})+|\d+)([.,]\d+)?(\s?[^\w\s]|\s\w{1,3})?"
    r"|(\d+ days?, )?\d+:\d\d:\d\d(\.\d+)?"
)


def rule_of(place: str, name: str, values: Iterable[Any], counts: Iterable[int]) -> str:
    """Return the name of the rule in the table above for a column.

    values: different ones, none of them empty. counts: rows of each. Raises UsageError for values
    that fit two rules or none.
    """
    column, rows, members = (place, name), Counter[str](), defaultdict[str, list[Any]](list)
    for value, count in zip(values, counts, strict=True):
        kind = _type(value)
        rows[kind] += count
        members[kind].append((value, count))
    total = rows.total() - rows["missing"]
    few = _few(total)
    main = next((kind for kind in rows if total - rows[kind] <= few and kind != "missing"), "")
    if rows["other"] > few:
        holds = f"{shown(members['other'][0][0])}, which is neither a class nor a number"
        raise _error(column, holds)
    if rows["list"] > few:
        return _rule_of_lists(column, [several for several, _ in members["list"]], total)
    if main == "number":
        numbers = {number_in(value): count for value, count in members["number"]}
        return _rule_of_numbers(column, numbers, rows["number"])
    if main == "truth" and not rows["missing"]:
        return "flag"
    if rows["number"] > few and rows["padded"] <= few:  # beside 007, numbers are names
        other = next(kind for kind in members if kind not in ("number", "missing"))
        texts = total - rows["number"]
        holds = f"{rows['number']} numbers and {texts} texts, such as {shown(members[other][0][0])}"
        raise _error(column, holds, "class", "number")
    if main == "quantity" and len(members["quantity"]) > 1:
        raise _error(
            column,
            f"{shown(members['quantity'][0][0])} and the like, which may be numbers; for a CSV with "
            "decimal commas there is {decimal}",
            "class",
        )
    return "class"


def _error(column: tuple[str, str], holds: str, *kinds: str) -> UsageError:
    """Return the error for a column that may be of several kinds, or of none."""
    place, name = column
    ways = " or ".join(["{label}", *(f"{name}:{kind}" for kind in kinds[1:])])
    step = f"State the kind: {ways}" if kinds else "Leave it out of the labels"
    options = {"label": f"{name}:{kinds[0]}" if kinds else ..., "decimal": ","}
    return UsageError(f"{place}: the column '{name}' holds {holds}.", f"{step}.", options)


def _type(value: Any) -> str:
    if isinstance(value, bool):
        return "truth"
    if number_in(value) is not None:
        return "number"
    if not isinstance(value, str):
        return "list" if isinstance(value, list) else "other"
    text = value.strip()
    if text.lower() in _MISSING:
        return "missing"
    if text.lower() in ("true", "false"):
        return "truth"
    if text.isdigit():
        return "padded"
    text = unicodedata.normalize("NFKC", text).replace("\u2212", "-").strip()
    is_quantity = NUMBER.fullmatch(text) or _QUANTITY.fullmatch(text.lstrip("+-"))
    return "quantity" if is_quantity else "name"


def _few(total: int) -> int:
    return max(1 if total > 2 else 0, int(FEW * total))


def _rule_of_numbers(column: tuple[str, str], rows: dict[Any, int], total: int) -> str:
    """Return whether numbers are classes or quantities. rows: of each number."""
    low, high = min(rows), max(rows)
    is_float = any(isinstance(number, float) for number in rows)
    fractions = sum(count for number, count in rows.items() if number % 1)
    if low < -1 or (is_float and (fractions > FEW * total or low < 0 or high >= RANGE)):
        return "quantity"
    if is_float or high >= RANGE or (low == -1 and 0 not in rows):
        raise _error(
            column,
            f"{len(rows)} different numbers from {low} to {high}, all or nearly all of them whole",
            "class",
            "number",
        )
    return "class number"


def _rule_of_lists(column: tuple[str, str], lists: Sequence[list[Any]], total: int) -> str:
    """Return "multi", unless lists may be vectors. total: rows of the column."""
    members = [member for several in lists for member in several]
    wrong = [m for m in members if isinstance(m, bool) or not isinstance(m, (str, int))]
    if len(wrong) > _few(len(members)):
        raise _error(column, f"lists of {shown(wrong[0])} and the like, not of classes")
    has_names = any(isinstance(member, str) for member in members)
    if total > 1 and len(lists[0]) > 1 and len(set(map(len, lists))) == 1 and not has_names:
        holds = f"lists of {len(lists[0])} numbers each, which may be vectors rather than classes"
        raise _error(column, holds, "multi")
    return "multi"


# --- values and classes ---------------------------------------------------------------------------


def number_in(value: Any, pattern: re.Pattern[str] = NUMBER) -> int | float | None:
    """Return the number that a value or text is; None for others, and for names such as 007."""
    if isinstance(value, str):
        text = value.strip()
        if WHOLE.fullmatch(text):
            return int(text)
        value = float(text) if pattern.fullmatch(text) else None
    is_number = isinstance(value, (int, float)) and abs(value) <= _LARGEST
    return +value if is_number else None


def whole_in(value: Any) -> int | None:
    """Return the whole number that a value or text is; None for others."""
    number = None if isinstance(value, bool) else number_in(value)
    return None if number is None or number % 1 else int(number)


def class_names(values: Iterable[Any], kind: str = "class") -> tuple[str, ...]:
    """Return the classes of values in the order of their numbers.

    Whole numbers keep their value as class number, except for ids (wide gaps). Names are sorted,
    and so are the members of lists (kind multi), which are stored by name.
    """
    known = set(values)
    if kind == "multi":
        texts = set(map(str, known))
        return tuple(sorted(texts, key=int if all(map(WHOLE.fullmatch, texts)) else None))
    numbers: set[Any] = set(map(whole_in, known))
    if not numbers or None in numbers:
        return tuple(sorted(set(map(str, known))))
    ordered: Sequence[Any] = sorted(numbers)
    if ordered[0] >= 0 and ordered[-1] < max(RANGE, 2 * len(ordered)):
        ordered = range(ordered[-1] + 1)  # the numbers stay the class numbers
    return tuple(map(str, ordered))


def shown(value: object) -> str:
    """Return a value as short text for messages."""
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
