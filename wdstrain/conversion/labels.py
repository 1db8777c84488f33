"""Labels of samples: the classes that are given, and the kind and classes that values decide.

The user states the kind of a column with `name:class`, `name:number`, `name:multi` or `name:flag`.
Otherwise the cells decide, by the rule in `shards.label_kinds`. Cells that do not fit the kind are
bad. A column is decided by its distinct values and how often each occurs, so large tables cost
little.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from wdstrain.conversion.listing import reject
from wdstrain.errors import SampleError
from wdstrain.runtime.options import refuse
from wdstrain.shards.kinds import FLAG_CLASSES, ColumnInfo
from wdstrain.shards.label_kinds import RANGE, class_names, number_in, rule_of, shown, whole_in
from wdstrain.shards.resolve import open_index
from wdstrain.storage.addresses import Urls

MOST_CLASSES = 1_000_000  # classes without names
_GAP = 100  # class numbers per number that occurs; numbers with wider gaps are ids
_SHOWN = 8  # classes that are named in messages
_SEPARATORS = ("|", ";", ",", "/")  # between the classes in one cell
_FLAGS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
_STATED_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")

# --- classes that are given, or counted ----------------------------------------------------------


def check_classes(classes: Sequence[str]) -> tuple[str, ...]:
    """Return the names of classes. Raises UsageError for a name that comes twice."""
    names = tuple(classes)
    twice = [name for name, count in Counter(names).items() if count > 1]
    refuse(
        twice,
        f"classes has {', '.join(map(repr, twice[:1]))} twice: each name must be one class.",
        "Rename one.",
    )
    return names


def fixed_classes(
    classes: Sequence[str], like: Urls | None, asked: Sequence[tuple[str, str | None]]
) -> dict[str, ColumnInfo]:
    """Return the labels whose classes are given, by name.

    classes: names of the only label that is asked for; like: shards that have all labels. asked:
    (name, kind or None). Raises UsageError if they do not fit together.
    """
    names = check_classes(classes)
    if names:
        able = [name for name, kind in asked if kind != "number"]
        refuse(
            len(able) != 1,
            f"classes needs one label of classes, but there are {len(able)}: "
            f"{', '.join(able) or 'none'}.",
            "Use {like} for several labels, or write LABEL:number for numbers.",
            like=...,
        )
        return {able[0]: ColumnInfo(able[0], dict(asked)[able[0]] or "class", "", classes=names)}
    if like is None:
        return {}
    labels = {label.name: label for label in open_index(like).labels}
    unknown = [name for name, _ in asked if name not in labels]
    refuse(
        unknown,
        f"{{like}}: these shards have no label {', '.join(map(repr, unknown))}.",
        f"Use one of their labels: {', '.join(labels) or 'none'}.",
        like=like,
    )
    return {name: labels[name] for name, _ in asked}


def given_classes(classes: Sequence[str], like: Urls | None) -> tuple[str, ...]:
    """Return the given classes of the field `cls`, whose label is called "label"; () if none."""
    fixed = fixed_classes(classes, like, [("label", None)])
    return fixed["label"].classes if fixed else ()


def stated_classes(names: Sequence[str]) -> dict[str, str]:
    """Return an entry for `Source.source` that identifies the given names of classes.

    It makes a resumed call with other names another call, also if no sample has a label.
    """
    names = check_classes(names)
    if not names:
        return {}
    some = ", ".join(map(str, names[:8])) + (", ..." if len(names) > 8 else "")
    digest = blake2b(json.dumps(list(map(str, names))).encode(), digest_size=4).hexdigest()
    return {"class_names": f"{len(names)}: {some} ({digest})"}


def class_rule(count: int = 0) -> str:
    """Return what a class number must be, for messages. count: of the classes; 0: no names."""
    if count:
        return f"a whole number from 0 to {count - 1}: there are {count} classes"
    return f"a whole number from 0 to {MOST_CLASSES - 1}; store an id or a time under another name"


def counted_classes(
    name: str, numbers: Collection[int], *, stated: bool = False
) -> tuple[str, ...]:
    """Return all class numbers up to the highest one, of a label without names of classes.

    stated: the user declared them as classes. Otherwise numbers with wide gaps are ids. Raises
    UsageError for these.
    """
    count = max(numbers, default=-1) + 1
    refuse(
        not stated and count > max(RANGE, _GAP * len(numbers)),
        f"{name} holds {len(numbers)} different whole numbers up to {count - 1}: as classes "
        f"counted from 0 they would make {count}, nearly all of them empty.",
        "Number them anew, name the classes with {classes}, or store them under another name. "
        f"For arrays, state the kind: {name}:class or {name}:number.",
        classes=...,
    )
    return tuple(map(str, range(count)))


# --- columns of plain values ---------------------------------------------------------------------


class Decision(NamedTuple):
    """A label column as it is packed.

    label: stored in the field json. codes: place in `values` of each row. values: distinct ones, as
    the label stores them. bad: why a value cannot be used, by its place. lines: for people.
    """

    label: ColumnInfo
    codes: npt.NDArray[np.int32]
    values: list[Any]
    bad: dict[int, str]
    lines: list[str]


def decide(
    place: str,
    name: str,
    kind: str | None,
    codes: npt.NDArray[np.int32],
    values: Sequence[Any],
    counts: npt.NDArray[np.int64],
    names: tuple[str, ...] = (),
    given: tuple[str, ...] = (),
) -> Decision:
    """Return the label of a column of plain values.

    kind: as the user named it. codes: place in `values` of each row. counts: rows of each value
    that are packed. names: of the column's class numbers, as the table has them. given: the classes
    that the label must have, in the order of their numbers. Raises UsageError for a column that may
    be of two kinds or is of none, SourceError for a column without a value.
    """
    cells = {code: values[code] for code in np.flatnonzero(counts).tolist()}
    bad = {
        code: f"the label column '{name}' is empty"
        for code, value in cells.items()
        if value is None or not str(value).strip()
    }
    cells = {code: value for code, value in cells.items() if code not in bad}
    reject(
        not cells,
        f"{place}: no row has a value in the label column '{name}'.",
        "Name another column.",
    )
    if kind is None and names and not any(isinstance(value, list) for value in cells.values()):
        kind = "class"
    rule = kind or rule_of(place, name, cells.values(), counts[list(cells)].tolist())
    kind, read = RULES[rule]
    if kind == "flag" and given not in ((), FLAG_CLASSES):
        kind, read = RULES["class"]
    if kind == "multi":
        texts = [value for value in cells.values() if isinstance(value, str)]
        read = partial(_members, separator=separator_in(texts) or "|")
    good, lines = _read(cells, read, bad, name), list[str]()
    whole = {code: whole_in(value) for code, value in good.items() if kind == "class" and not names}
    good = good if None in whole.values() else {**good, **whole}
    classes: tuple[str, ...] = FLAG_CLASSES if kind == "flag" else ()
    if kind in ("class", "multi"):
        classes = given or names or class_names(_texts(good), kind)
        for known in filter(None, (names, given)):
            used, by_text = _texts(good) - {"-1"}, dict(zip(known, known, strict=True))
            numbered = dict(zip(map(str, count()), known, strict=False))
            if known is names or (used.isdisjoint(known) and used <= numbered.keys()):
                by_text |= numbered
                if known is given:
                    zero = f"0 is {shown(known[0])}"
                    lines.append(f"label {name}: its numbers count the given classes: {zero}")
            good = _read(good, partial(_named, by_text), bad, name)
    refuse(
        not good,
        f"{place}: no value fits {name}:{kind}: {next(iter(bad.values()), '')}.",
        "Name another column, or another kind.",
    )
    label = ColumnInfo(name, kind, "json", name, classes)
    fit = f"{counts[list(good)].sum()} of {counts.sum()} values fit"
    stored = [good.get(code, value) for code, value in enumerate(values)]
    return Decision(label, codes, stored, bad, [*_lines(label, good, fit), *lines])


def _read(
    cells: dict[int, Any], read: Callable[[Any], Any], bad: dict[int, str], name: str
) -> dict[int, Any]:
    """Return the cells as the label stores them. Those that do not fit are added to `bad`."""
    good = {}
    for code, value in cells.items():
        try:
            good[code] = read(value)
        except SampleError as error:
            bad[code] = f"the label column '{name}' holds {shown(value)}, {error}"
    return good


# --- cells, as the label stores them: each function raises SampleError for others -----------------


def _number(value: Any) -> int | float:
    if (number := number_in(value, _STATED_NUMBER)) is None:
        raise SampleError("which is not a number, or too large for a float32")
    return number


def _quantity(value: Any) -> int | float:
    number = None if isinstance(value, bool) else number_in(value)
    if number is None:  # 007 is a name
        raise SampleError("which is not a number; as LABEL:class, every value is a class")
    return number


def _class_number(value: Any) -> int | float:
    if (number := _quantity(value)) == -1:  # Hugging Face data sets
        raise SampleError("which means no label; state LABEL:class or LABEL:number to use it")
    return number


def _flag(value: Any) -> bool:
    if (text := str(value).strip().lower()) not in _FLAGS:
        raise SampleError("which is not true or false")
    return _FLAGS[text]


def _class(value: Any) -> Any:
    if isinstance(value, (list, dict, bytes)):
        raise SampleError("which is not a class")
    return value.strip() if isinstance(value, str) else value


def _members(value: Any, separator: str) -> list[str | int]:
    """Return the classes in a cell."""
    parts = value.split(separator) if isinstance(value, str) else value
    members = list(map(_class, parts if isinstance(parts, list) else [parts]))
    if any(not isinstance(m, (str, int)) or isinstance(m, bool) for m in members):
        raise SampleError("which is not a list of classes")
    return list(filter(lambda member: member != "", members))


def _named(by_text: Mapping[str, str], value: Any) -> Any:
    """Return the name of a known class, or a list of them. by_text: the name of a value's text."""
    if isinstance(value, list):
        return [_named(by_text, member) for member in value]
    if value == -1:  # Hugging Face data sets
        raise SampleError("which means no label")
    if (name := by_text.get(str(value))) is None:
        raise SampleError(f"none of the {len(set(by_text.values()))} classes")
    return value if name == str(value) else name


RULES: dict[str, tuple[str, Callable[..., Any]]] = {
    "class": ("class", _class),
    "class number": ("class", _class_number),
    "number": ("number", _number),
    "quantity": ("number", _quantity),
    "multi": ("multi", _members),
    "flag": ("flag", _flag),
}
KINDS = tuple(dict.fromkeys(kind for kind, _ in RULES.values()))


def separator_in(texts: Iterable[str]) -> str:
    """Return the separator between classes in some texts, whose parts come again in others, or ""."""
    texts = set(texts)
    for separator in _SEPARATORS:
        parts = [part.strip() for text in texts for part in text.split(separator)]
        comes_again = separator == "|" or len(set(parts)) < len(parts)
        if comes_again and any(separator in text for text in texts):
            return separator
    return ""


def _texts(cells: Mapping[int, Any]) -> set[str]:
    """Return the classes in all cells."""
    lists = (value if isinstance(value, list) else [value] for value in cells.values())
    return {str(member) for several in lists for member in several}


# --- lines for people -----------------------------------------------------------------------------


def _lines(label: ColumnInfo, good: Mapping[int, Any], fit: str) -> list[str]:
    """Return lines about the decision and the number of values that fit."""
    title, names = f"label {label.name}:", label.classes
    if label.kind == "number":
        low, high = min(good.values()), max(good.values())
        return [f"{title} a number from {low:g} to {high:g}, {fit}"]
    count, used = len(names), len(_texts(good))
    some = ", ".join(name[:40] for name in names[:_SHOWN]) + ", ..." * (count > _SHOWN)
    several = f"{'several of ' * (label.kind == 'multi')}{count} class{'es' * (count != 1)}"
    seen = f", {used} of them in this table" * (used < count)
    lines = [f"{title} {several} ({some}){seen}, {fit}"]
    if label.kind == "class" and (separator := separator_in(names)):
        held = sum(separator in name for name in names)
        lines.append(
            f"{title} {held} classes hold '{separator}'; {label.name}:multi takes a{separator}b as "
            "two classes"
        )
    return lines
