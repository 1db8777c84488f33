"""Operands of conditions on columns: their kinds, and operations that Arrow lacks or does otherwise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

# An operand: an Arrow array with one value per sample, an Arrow scalar, or a list of constants.
Operand = Any

DESCRIBED = {
    "flag": "true or false",
    "number": "a number",
    "text": "a text",
    "class": "a class",
    "multi": "a list",
    "null": "None",
    "constants": "a list",
}


def kind_of(value: Operand) -> str:
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


def as_number(value: Operand) -> Operand:
    """Return numbers; of classes their numbers, of flags 0 and 1."""
    if kind_of(value) == "class":
        return value.indices
    return pc.cast(value, pa.int64()) if kind_of(value) == "flag" else value


def as_text(value: Operand) -> Operand:
    return pc.cast(value, pa.large_string())


def in_lower_case(texts: Operand) -> Operand:
    """Return texts in lower case. Arrow's own function differs from Python's for some letters."""
    if isinstance(texts, pa.Scalar):
        return pa.scalar(texts.as_py().lower(), pa.large_string())
    coded = texts.dictionary_encode()
    lower = [text.lower() for text in coded.dictionary.to_pylist()]
    return pa.array(lower, pa.large_string()).take(coded.indices)


def as_utf8(keys: pa.Array) -> pa.Array:
    """Return keys as text: bytes that are not UTF-8 as escapes."""
    if pa.types.is_large_string(keys.type):
        return keys
    texts = [bytes(key).decode("utf-8", "backslashreplace") for key in keys.to_pylist()]
    return pa.array(texts, pa.large_string())


def modulo(a: Operand, b: Operand) -> Operand:
    """Return a % b with Python's sign."""
    missing = [np.asarray(pc.is_null(v)) for v in (a, b) if isinstance(v, pa.Array)]
    if not missing:
        return pa.scalar(a.as_py() % b.as_py())
    parts = [
        np.asarray(pc.fill_null(v, 1)) if isinstance(v, pa.Array) else v.as_py() for v in (a, b)
    ]
    return pa.array(np.mod(*parts), mask=np.logical_or.reduce(missing))
