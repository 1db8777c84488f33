"""Values of fields: text, JSON, `.npy` arrays, and label entries of JSON documents.

Values are parsed and never unpickled: a shard is data, not code.
"""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from wdstrain.errors import SampleError

Array = npt.NDArray[Any]

# The header that numpy writes for arrays of plain numbers, parsed here because numpy uses Python's
# parser. In some releases of Python 3.11 and 3.12 that parser fails at random when several threads
# use it, so that good arrays would be bad samples.
_PLAIN_HEAD = re.compile(
    rb"\x93NUMPY\x01\x00..\{'descr': '([<>|=]?[biufcSU]\d{1,6})', 'fortran_order': (True|False), "
    rb"'shape': \(((?:\d{1,18}(?:, \d{1,18})*,?)?)\), \} *\n?",
    re.DOTALL,
)


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
    stream = io.BytesIO(head)
    npy: Any = np.lib.format  # has no type hints before numpy 2.3
    try:
        if (plain := _PLAIN_HEAD.fullmatch(head)) is not None:
            descr, order, sides = plain.groups()
            shape = tuple(int(side) for side in sides.split(b",") if side.strip())
            return np.dtype(descr.decode()), order == b"True", shape
        is_first = npy.read_magic(stream) == (1, 0)
        read = npy.read_array_header_1_0 if is_first else npy.read_array_header_2_0
        shape, fortran, dtype = read(stream)
    except Exception as error:  # numpy passes on the errors of Python's parser
        reason = error if isinstance(error, ValueError) else type(error).__name__
        raise ValueError(f"its .npy header cannot be read ({reason})") from error
    if min(shape, default=0) < 0:  # frombuffer and reshape would take -1 as "the rest"
        raise ValueError(f"it claims the shape {shape}")
    return dtype, fortran, shape


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

    parse_float: makes the JSON numbers that have a point or an exponent. Raises SampleError for a
    missing entry, ValueError for data that cannot be parsed.
    """
    if column is None and bytes(data[:6]) == b"\x93NUMPY":  # from an HDF5 or array source
        return npy_array(data).item()
    text = bytes(data).decode("utf-8-sig").strip()
    if column is None:
        return text
    document = parsed_json(text, parse_float)
    if isinstance(document, dict) and column in document:
        return document[column]
    is_dict = isinstance(document, dict)
    entries = ", ".join(list(document)[:20]) if is_dict else type(document).__name__
    raise SampleError(f"it has no entry {column!r}, but {entries}")
