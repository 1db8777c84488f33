"""Values of joined columns: Arrow files beside the index, which are mapped and read row by row.

A column of texts or lists in the index holds only the row of each sample in such a file. So samples
are selected, joined and pickled without their values. The name of a file has a hash of its bytes. A
file of a server is fetched when the first value is asked for, and held in memory.
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import pyarrow as pa

from wdstrain.errors import ShardError
from wdstrain.runtime.cached import cached_property
from wdstrain.storage.files import put_whole, read_whole, regular
from wdstrain.storage.remote import is_remote, redacted

VALUE_FILE = re.compile(r"column-([0-9a-f]{16})\.arrow")


class ValueFile:
    """The values of a joined column, in a file or in memory. Its name is the hash of its bytes.

    path: of the file, "" in memory. count: of the values. chunks: the values in memory.
    """

    def __init__(self, path: str, count: int, chunks: pa.ChunkedArray | None = None) -> None:
        self.path, self.count = path, count
        if chunks is not None:
            self.chunks = chunks

    def __reduce__(self) -> tuple[object, ...]:
        return ValueFile, (self.path, self.count, None if self.path else self.chunks)

    @cached_property
    def chunks(self) -> pa.ChunkedArray:
        """The values: views of the file. Raises ShardError for another file, and OSError.

        Places of texts are checked, but not their UTF-8: that would read the whole file.
        """
        try:
            values = pa.ipc.open_file(pa.py_buffer(file_bytes(self.path))).read_all()[0]
            is_text = values.type == pa.large_string()
            (values.cast(pa.large_binary()) if is_text else values).validate(full=True)
            return values
        except (ValueError, pa.ArrowException, IndexError) as error:
            raise ShardError(
                f"{redacted(self.path)} is damaged: {error}.",
                "Copy the set again, or join the column again.",
            ) from None


def gathered(files: Sequence[ValueFile], rows: pa.Array, arrow: pa.DataType) -> pa.Array:
    """Return values by row, null for null. rows: int64, which count through all files.

    Only the chunks that hold them are read. ChunkedArray.take would copy all chunks of texts.
    """
    chunks = [chunk for file in files for chunk in file.chunks.chunks]
    stops, numbers = np.cumsum(list(map(len, chunks))), np.asarray(rows.drop_null())
    order = np.argsort(numbers, kind="stable")
    parts = np.split(numbers[order], np.searchsorted(numbers[order], stops[:-1]))
    taken = [
        chunk.take(pa.array(part - stop + len(chunk))).cast(arrow)
        for chunk, part, stop in zip(chunks, parts, stops.tolist(), strict=False)
        if len(part)
    ]
    place = np.full(len(rows), -1)
    place[np.flatnonzero(np.asarray(rows.is_valid()))[order]] = np.arange(len(order))
    return pa.concat_arrays([pa.nulls(0, arrow), *taken]).take(pa.array(place, mask=place < 0))


def write_values(blocks: Iterable[pa.Array], arrow: pa.DataType, folder: str) -> str:
    """Write values into a file in a folder, and return its path."""
    made = os.path.join(folder, ".column.arrow")
    with put_whole(made) as file, pa.ipc.new_file(file, pa.schema({"values": arrow})) as writer:
        for block in blocks:
            writer.write_batch(pa.record_batch([block], names=["values"]))
    path = os.path.join(folder, file_name(made))
    os.replace(made, path)
    return path


def file_name(path: str) -> str:
    """Return the name of a file of values, by its bytes."""
    return f"column-{blake2b(file_bytes(path), digest_size=8).hexdigest()}.arrow"


def file_bytes(path: str) -> Any:
    """Return the bytes of a file; a local one is mapped. Raises OSError, ValueError."""
    if not is_remote(path):
        with open(path, "rb", opener=regular) as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    data = read_whole(path)
    if data is None:
        raise ValueError(f"{redacted(path)} is not there")
    return data
