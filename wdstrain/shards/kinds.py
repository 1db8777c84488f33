"""Kinds of labels and columns: one row says everything that differs between them. Values of fields.

A column of the index holds one value per sample, made from a field of the samples (`cls`) or from an
entry of a JSON field (`json`, entry `kind`) or of an image (`jpg`, entry `width`). Conversion, index, conditions, fields of a batch, `info`
and `verify` ask `KINDS` instead of testing names.

kind      Arrow type                     made from
class     dictionary<int32, string>      names or numbers of classes; codes are class numbers
flag      bool                           true and false; as a label the classes False and True
integer   int64                          whole numbers
number    float64                        numbers
multi     list<string>                   lists of names
text      string                         texts of at most 256 characters
vector    lists of float                 lists of numbers in a joined column
mask      no column                      images of class numbers
boxes     no column                      boxes of objects with their classes, as JSON

A joined column (`wt.join`) comes from a table and not from the samples. Its field is "", its entry is
its name. Its texts, of any length, and its lists of numbers lie in files of their own: the index holds
the row of each sample there.

Text, JSON, `.npy` arrays, and entries of JSON documents are parsed and never unpickled: a shard is
data, not code.
"""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from wdstrain.errors import SampleError
from wdstrain.report.printing import counted
from wdstrain.shards.formats import SIDES, format_of, header_of, is_image
from wdstrain.shards.value_files import ValueFile

Place = tuple[str, str | None]  # (field, entry of its JSON document or image, or None)

NOT_A_COLUMN = "other"  # kind of an entry with values that no column can hold
LONGEST_TEXT = 256  # characters; longer texts stay in their field
FLAG_CLASSES = ("False", "True")  # of a label of true and false
_COLOR = re.compile("#[0-9a-f]{6}")
# Neighboring numbers have different colors, those of Pascal VOC. uint8[256, 3]
_BITS = np.arange(8)[:, None]
_COLOR_BITS = np.arange(256)[:, None, None] >> (3 * _BITS + np.arange(3)) & 1
COLORS: npt.NDArray[np.uint8] = (_COLOR_BITS << (7 - _BITS)).sum(1).astype(np.uint8)
_SCALARS = (bool, int, float, str)
LARGEST = float(np.finfo(np.float32).max)  # of a number in a batch

Array = npt.NDArray[Any]

# The header that numpy writes for arrays of plain numbers, parsed here because numpy uses Python's
# parser. In some releases of Python 3.11 and 3.12 that parser fails at random when several threads
# use it (SystemError), so that good arrays would be bad samples. Other headers are parsed again then.
_ATTEMPTS = 20
_PLAIN_HEAD = re.compile(
    rb"\x93NUMPY\x01\x00..\{'descr': '([<>|=]?[biufcSU]\d{1,6})', 'fortran_order': (True|False), "
    rb"'shape': \(((?:\d{1,18}(?:, \d{1,18})*,?)?)\), \} *\n?",
    re.DOTALL,
)


@dataclass(frozen=True)
class ColumnInfo:
    """One column or label: its name, its kind, and where its values are stored.

    field: of the samples. entry: of its JSON document, or None. classes: names in the order of their
    numbers. is_label: a training target. A label may lack a column, as a mask does. ignored: number
    of the pixels of masks that have no class, beside 255. palette: of masks, a color "#rrggbb" for
    each class; (): those of Pascal VOC. files: of a column whose values lie apart.
    """

    name: str
    kind: str
    field: str
    entry: str | None = None
    classes: tuple[str, ...] = ()
    is_label: bool = True
    ignored: int | None = None
    palette: tuple[str, ...] = ()
    files: tuple[ValueFile, ...] = ()

    @property
    def place(self) -> Place:
        """(field, entry) of its value."""
        return self.field, self.entry

    @property
    def is_joined(self) -> bool:
        """Whether its values come from a table, and no field of the samples holds them."""
        return not self.field

    @property
    def stored_as(self) -> str:
        """Where its value is stored, as conditions and `index --columns` name it: `json.kind`."""
        if self.entry is None or self.is_joined:
            return self.entry or self.field
        return f"{self.field}.{self.entry}"

    @property
    def is_class(self) -> bool:
        """Whether its value is one of the classes, as true and false are."""
        return KINDS[self.kind].is_class

    @property
    def read(self) -> Callable[[Any], Any]:
        """Function from a value in the shards to the value of the column, of classes to their number.

        It raises SampleError for a value that the label cannot have.
        """
        if self.is_class:
            return Classes(self.classes, by_name=self.entry is not None).number
        return KINDS[self.kind].read

    @property
    def has_column(self) -> bool:
        """Whether a column can hold its values."""
        return KINDS[self.kind].arrow is not None

    @property
    def task(self) -> str:
        """The kind of what a model learns: "class" also for true and false."""
        return "class" if self.is_class else self.kind

    @property
    def has_names(self) -> bool:
        """Whether the classes have names other than their numbers."""
        return self.classes != tuple(map(str, range(len(self.classes))))

    @property
    def summary(self) -> str:
        """The kind of its values and the first classes, for people."""
        if not self.classes:
            return KINDS[self.kind].described
        names = ", ".join(self.classes[:10]) + (", ..." if len(self.classes) > 10 else "")
        some_of = {"multi": "any of ", "mask": "masks of ", "boxes": "boxes of "}.get(self.kind, "")
        return f"{some_of}{counted(len(self.classes), 'class')}: {names}{self._ignored_text}"

    @property
    def _ignored_text(self) -> str:
        return "" if self.ignored is None else f"; {self.ignored} is ignored"

    @property
    def colors(self) -> npt.NDArray[np.uint8]:
        """Colors of the numbers in a mask, uint8[256, 3]."""
        colors: npt.NDArray[np.uint8] = COLORS.copy()
        for number, color in enumerate(self.palette):
            colors[number] = [*bytes.fromhex(color[1:])]
        return colors

    @property
    def numbering(self) -> str:
        """The first classes with their numbers, for error messages."""
        if not self.classes:
            return f"{KINDS[self.kind].described}, no classes"
        if not self.has_names:
            return f"{len(self.classes)} classes without names"
        shown = ", ".join(f"{number} {name}" for number, name in enumerate(self.classes[:6]))
        more = f", ... ({len(self.classes)} classes)" if len(self.classes) > 6 else ""
        return f"{shown}{more}{self._ignored_text}"

    @property
    def meaning(self) -> tuple[Any, ...]:
        """What must be equal in several sets for their labels to become one.

        Classes are joined by name, if they have names. Pixels of masks and labels of boxes are
        numbers that no column joins, so all must be equal.
        """
        if self.kind in ("mask", "boxes"):
            return self.kind, self.classes, self.ignored
        return self.kind, self.kind == "class" and self.has_names

    @property
    def row(self) -> dict[str, Any]:
        """A label as index.json and checkpoints list it."""
        row: dict[str, Any] = {
            "name": self.name,
            "kind": self.kind,
            "field": self.field,
            "column": self.entry,
        }
        row |= {"ignored": self.ignored} if self.ignored is not None else {}
        row |= {"palette": list(self.palette)} if self.palette else {}
        return {**row, "classes": list(self.classes)}

    @classmethod
    def of_row(cls, row: dict[str, Any]) -> ColumnInfo:
        """Return the label in such a row. Raises LookupError or TypeError for another form."""
        if set(row) - {"ignored", "palette"} != {"name", "kind", "field", "column", "classes"}:
            raise ValueError(f"its label has the entries {', '.join(map(str, row))}")
        if not all(isinstance(name, str) for name in row["classes"]):
            raise ValueError("its classes must be strings")
        names, ignored = tuple(row["classes"]), row.get("ignored")
        if not isinstance(ignored, (int, type(None))):
            raise ValueError(f"its ignored number is {ignored!r:.40}")
        palette = tuple(row.get("palette", ()))
        if palette and (len(palette) != len(names) or not all(map(_COLOR.fullmatch, palette))):
            raise ValueError(
                f"its palette is {palette!r:.80}: must be a color #rrggbb for each class"
            )
        place = row["field"], row["column"]
        return cls(row["name"], row["kind"], *place, names, ignored=ignored, palette=palette)


def _no_value(value: Any) -> None:
    return None


@dataclass(frozen=True)
class Kind:
    """What differs between the kinds of labels and columns.

    described: for people. arrow: type of its column; None: it has none. python, items: type of a
    value of JSON or of a field, and types of the items of a list, that make a column one of this
    kind. read: such a value as the column holds it; raises SampleError for others. dtype: in a
    batch; "": as the field says, or a list. is_class: a sample has one of `classes`. can_be_label:
    an index may declare it.
    """

    described: str
    arrow: pa.DataType | None
    python: type | None = None
    items: tuple[type, ...] = ()
    read: Callable[[Any], Any] = _no_value
    dtype: str = ""
    is_class: bool = False
    can_be_label: bool = False


def kind_of(arrow: pa.DataType) -> str:
    """Return the kind as which values of an Arrow type are compared."""
    if pa.types.is_integer(arrow) or pa.types.is_floating(arrow):
        return "number"
    return next((name for name, kind in KINDS.items() if kind.arrow == arrow), "text")


def kind_of_value(value: Any) -> str:
    """Return the kind of a column with a value of JSON or of a field."""
    if type(value) is int and not -(1 << 63) <= value < 1 << 63:
        return "text"
    items = frozenset(map(type, value if type(value) is list else ()))
    return _kind_of_types(type(value), items)  # type: ignore[arg-type]


@lru_cache(maxsize=256)
def _kind_of_types(python: type, items: frozenset[type]) -> str:
    return next(
        (n for n, k in KINDS.items() if python is k.python and items <= {*k.items}), NOT_A_COLUMN
    )


def place_of_entry(name: str) -> Place:
    """Return (field, entry) of `json.kind`, `meta.json.gz.kind` or `jpg.width`; else (name, None)."""
    (field, _, entry), parts = name.rpartition("."), name.split(".")
    if entry in SIDES and is_image(field) and "json" not in parts[:-1]:
        return field, entry
    at = parts.index("json", 0, -1) + 1 if "json" in parts[:-1] else len(parts)
    at += parts[at:-1][:1] == ["gz"]
    return ".".join(parts[:at]), ".".join(parts[at:]) or None


class Classes:
    """Numbers of classes by the values that stand for them: names, or numbers."""

    def __init__(self, names: Sequence[str], *, by_name: bool) -> None:
        """by_name: a text that is a name and a number is the name, as in the values of a table."""
        self._by_name, self._count = by_name, len(names)
        self._numbers = {name: number for number, name in reversed(list(enumerate(names)))}

    def number(self, value: Any) -> int:
        """Return the number of a class. Raises SampleError for a value that is none."""
        named = self._numbers.get(spelled(value)) if isinstance(value, _SCALARS) else None
        if named is None and isinstance(value, bool):  # True is 1, also where that is a name
            named = self._numbers.get(str(int(value)))
        number = _whole(value)
        is_number = number is not None and 0 <= number < (self._count or math.inf)
        if named is not None and (self._by_name or not is_number):
            return named
        if number is None:
            known = f" and none of the {self._count} classes" if self._count else ""
            raise SampleError(f"{str(value)[:80]!r} is not a whole number{known}")
        if is_number:
            return number
        raise SampleError(
            f"{number} is not a class: they are 0 to {self._count - 1 if self._count else 'n'}"
        )


def number_of(value: Any) -> float:
    """Return a number, or a text that is one. Raises SampleError for other values."""
    try:
        # Python reads 1_0 as 10, and refuses a lone _.
        number = float("_" if isinstance(value, str) and "_" in value else value)
    except (TypeError, ValueError, OverflowError):
        raise SampleError(f"{str(value)[:80]!r} is not a number") from None
    if math.isinf(number) and isinstance(value, str) and "inf" not in value.lower():
        raise SampleError(f"{value[:80]} is more than a float32 holds")
    return number


def spelled(value: Any) -> Any:
    """Return a value as text, None as None. A lone surrogate becomes a question mark."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "replace").decode()
    if isinstance(value, float) and math.isfinite(value):
        return json.dumps(value)
    return None if value is None else str(value)  # nan and inf as a conversion writes them


def text_of(value: Any) -> str:
    """Return a text, or a number or flag as text. Raises SampleError for other values."""
    if isinstance(value, (dict, list)) or value is None:
        raise SampleError(f"{str(value)[:80]!r} is not a text")
    return str(spelled(value))


def names_of(value: Any) -> list[str]:
    """Return the names in a list. Raises SampleError for other values."""
    if not isinstance(value, list):
        raise SampleError(f"{str(value)[:80]!r} is not a list of classes")
    return [str(spelled(name)) for name in value]


def _whole(value: Any) -> int | None:
    """Return a whole number, or a text that is one; None for other values."""
    if isinstance(value, str) and "_" in value:
        return None
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return None if isinstance(value, float) and number != value else number


KINDS = {
    "class": Kind(
        "a class",
        pa.dictionary(pa.int32(), pa.string()),
        dtype="int64",
        is_class=True,
        can_be_label=True,
    ),
    "flag": Kind(
        "true or false",
        pa.bool_(),
        bool,
        read=bool,
        dtype="int64",
        is_class=True,
        can_be_label=True,
    ),
    "integer": Kind("a number", pa.int64(), int, read=int),
    "number": Kind("a number", pa.float64(), float, read=number_of, can_be_label=True),
    "multi": Kind(
        "a list",
        pa.list_(pa.string()),
        list,
        (str, int),
        names_of,
        dtype="float32",
        can_be_label=True,
    ),
    "text": Kind("a text", pa.string(), str, read=text_of),
    "vector": Kind("a list of numbers", pa.large_list(pa.float32()), dtype="float32"),
    "mask": Kind("masks", None, dtype="int64", can_be_label=True),
    "boxes": Kind("boxes", None, dtype="float32", can_be_label=True),
    NOT_A_COLUMN: Kind("of several types", pa.null()),
}


# --- labels of several sets -----------------------------------------------------------------------


def joined_labels(
    sets: Sequence[tuple[str, Sequence[ColumnInfo]]],
) -> tuple[tuple[ColumnInfo, ...], dict[ColumnInfo, str]]:
    """Return (labels of all sets together, what differs by the labels that are not equal in all).

    sets: name for messages, and labels. Class numbers are joined by the names of the classes, as
    sets may number them differently.
    """
    by_set = [{label.place: label for label in labels} for _, labels in sets]
    joined, differing = list[ColumnInfo](), dict[ColumnInfo, str]()
    for place in dict.fromkeys(place for own in by_set for place in own):
        present = [own[place] for own in by_set if place in own]
        stated = {(one.meaning, one.classes) for one in present}
        if len(present) < len(sets) or len(stated) > 1:
            first = next((one for one in present if one.is_class), present[0])
            numberings = dict[str, str]()
            for own, (shown, _) in zip(by_set, sets, strict=True):
                numbering = own[place].numbering if place in own else "no label"
                numberings.setdefault(numbering, f"{numbering} ({shown})")
            problem = f"the label in {first.stored_as} differs between these sets"
            differing[first] = f"{problem}: {'; '.join(numberings.values())}"
        # Class numbers without names must not be joined: 0 may be another class in another set.
        # Multi-labels store names, so they can always be joined.
        if len(present) == len(sets) and len({one.meaning for one in present}) == 1:
            classes = dict.fromkeys(name for label in present for name in label.classes)
            joined.append(replace(present[0], classes=tuple(classes)))
    return tuple(joined), differing


# --- values of fields ------------------------------------------------------------------------------


def npy_array(data: memoryview) -> Array:
    """Return the array of a .npy file as a view of `data`.

    Raises ValueError for other data, for arrays of Python objects and for a wrong size.
    """
    if bytes(data[:6]) != b"\x93NUMPY":
        raise ValueError(f"it is not a .npy array: it begins with {bytes(data[:8])!r}")
    length_size = 2 if bytes(data[6:7]) == b"\x01" else 4  # bytes of the header's length
    length = int.from_bytes(data[8 : 8 + length_size], "little") + 8 + length_size
    dtype, fortran, shape = npy_head(bytes(data[:length]))
    if dtype.hasobject:
        raise ValueError("it holds Python objects, which are not loaded (allow_pickle=False)")
    count = math.prod(shape)
    if count * dtype.itemsize > len(data) - length:
        raise ValueError(
            f"it claims the shape {shape} of {dtype}, and {len(data) - length} bytes follow its header"
        )
    flat = np.frombuffer(data, dtype, count, length)
    return flat.reshape(shape[::-1]).T if fortran else flat.reshape(shape)


@lru_cache(maxsize=256)
def npy_head(head: bytes) -> tuple[np.dtype[Any], bool, tuple[int, ...]]:
    """Return (dtype, is Fortran order, shape) of the header of a .npy file.

    Cached, because most arrays of a set have the same header. Raises ValueError for a header that
    cannot be read.
    """
    try:
        if (plain := _PLAIN_HEAD.fullmatch(head)) is not None:
            descr, order, sides = plain.groups()
            shape = tuple(int(side) for side in sides.split(b",") if side.strip())
            return np.dtype(descr.decode()), order == b"True", shape
        shape, fortran, dtype = _parsed_head(head)
    except Exception as error:  # numpy passes on the errors of Python's parser
        reason = error if isinstance(error, ValueError) else type(error).__name__
        raise ValueError(f"its .npy header cannot be read ({reason})") from error
    if min(shape, default=0) < 0:  # frombuffer and reshape would take -1 as "the rest"
        raise ValueError(f"it claims the shape {shape}")
    return dtype, fortran, shape


def _parsed_head(head: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Return (shape, is Fortran order, dtype) as numpy reads them in a header; see `_PLAIN_HEAD`."""
    npy: Any = np.lib.format  # has no type hints before numpy 2.3
    for _ in range(_ATTEMPTS):
        stream = io.BytesIO(head)
        is_first = npy.read_magic(stream) == (1, 0)
        read = npy.read_array_header_1_0 if is_first else npy.read_array_header_2_0
        with suppress(SystemError):
            return read(stream)  # type: ignore[no-any-return]
    raise ValueError("Python's parser failed")


def parsed_json(text: str | bytes, parse_float: Callable[[str], Any] | None = None) -> Any:
    """Return a parsed JSON document. Raises ValueError if it is invalid or nested too deeply."""
    try:
        return json.loads(text, parse_float=parse_float)
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None


def scalar(
    data: memoryview, column: str | None, parse_float: Callable[[str], Any] | None = None
) -> Any:
    """Return the text or number of a field, or the entry `column` of its JSON document.

    An image has the entries of `SIDES`. parse_float: makes the JSON numbers that have a point or an exponent. Raises SampleError for a
    missing entry, ValueError for data that cannot be parsed.
    """
    if column is None and bytes(data[:6]) == b"\x93NUMPY":  # from an HDF5 or array source
        return npy_array(data).item()
    if column in SIDES and format_of(data) is not None:
        return header_of(data).size[SIDES.index(column)]
    text = bytes(data).decode("utf-8-sig").strip()
    if column is None:
        return text
    document = parsed_json(text, parse_float)
    entries = document if isinstance(document, dict) else {}
    if column in entries:
        return entries[column]
    held = ", ".join(list(entries)[:20]) or type(document).__name__
    raise SampleError(f"it has no entry {column!r}, but {held}")
