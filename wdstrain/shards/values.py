"""Values that fields hold: texts, JSON documents, .npy arrays, and the entry of one that is a label.

No value is ever unpickled: a shard is data, never code.
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

# as numpy writes it for arrays of plain numbers. numpy reads it with Python's own parser, which some releases of Python 3.11 and
# 3.12 do not let several threads use at once: a good array would be a bad sample, now and then
_PLAIN_HEAD = re.compile(
    rb"\x93NUMPY\x01\x00..\{'descr': '([<>|=]?[biufcSU]\d{1,6})', 'fortran_order': (True|False), "
    rb"'shape': \(((?:\d{1,18}(?:, \d{1,18})*,?)?)\), \}\s*",
    re.DOTALL,
)


def npy_array(data: memoryview) -> Array:
    """The array of a .npy file, over the same bytes."""
    if bytes(data[:6]) != b"\x93NUMPY":
        raise ValueError(f"it is no .npy array: it begins with {bytes(data[:8])!r}")
    wide = 2 if bytes(data[6:7]) == b"\x01" else 4  # bytes in which the length of the head is
    length = int.from_bytes(data[8 : 8 + wide], "little") + 8 + wide
    dtype, fortran, shape = npy_head(bytes(data[:length]))
    if dtype.hasobject:
        raise ValueError("it holds Python objects, which are not loaded (allow_pickle=False)")
    count = math.prod(shape)
    if count * dtype.itemsize > len(data) - length:
        raise ValueError(f"it claims the shape {shape} of {dtype}, and {len(data) - length} bytes follow its header")
    flat = np.frombuffer(data, dtype, count, length)
    return flat.reshape(shape[::-1]).T if fortran else flat.reshape(shape)


@lru_cache(maxsize=256)
def npy_head(head: bytes) -> tuple[np.dtype[Any], bool, tuple[int, ...]]:
    """(dtype, whether the first axis runs fastest, shape); reading it takes longer than copying 48 KB.

    Raises ValueError for a head that cannot be read.
    """
    if (plain := _PLAIN_HEAD.fullmatch(head)) is not None:
        descr, fortran, sides = plain.groups()
        return np.dtype(descr.decode()), fortran == b"True", tuple(int(side) for side in sides.split(b",") if side.strip())
    stream = io.BytesIO(head)
    npy: Any = np.lib.format  # whose functions have no types before numpy 2.3
    try:
        version = npy.read_magic(stream)
        shape, fortran, dtype = (npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0)(stream)
    except ValueError:
        raise
    except Exception as error:  # numpy lets through what Python's parsers raise
        raise ValueError(f"its .npy header cannot be read ({type(error).__name__})") from error
    if min(shape, default=0) < 0:  # -1 is all that is there, to frombuffer and to reshape
        raise ValueError(f"it claims the shape {shape}")
    return dtype, fortran, shape


def parsed_json(text: str | bytes, parse_float: Callable[[str], Any] | None = None) -> Any:
    """A JSON document. Raises ValueError for what is none, and for one that is nested too deeply."""
    try:
        return json.loads(text, parse_float=parse_float)
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None


def scalar(data: memoryview, column: str | None, parse_float: Callable[[str], Any] | None = None) -> Any:
    """The text or number of a field, or of one entry of its JSON where a column is given.

    parse_float: makes the numbers of a JSON document that have a point or an exponent. Raises SampleError or ValueError.
    """
    if column is None and bytes(data[:6]) == b"\x93NUMPY":  # a number of an HDF5 or array source
        return npy_array(data).item()
    text = bytes(data).decode("utf-8-sig").strip()
    if column is None:
        return text
    document = parsed_json(text, parse_float)
    if not isinstance(document, dict) or column not in document:
        has = ", ".join(list(document)[:20]) if isinstance(document, dict) else type(document).__name__
        raise SampleError(f"it has no entry {column!r}, but {has}")
    return document[column]
