"""Values of some samples of a set, evenly chosen: read at their own places on a disk, taken from the beginnings of shards on a server.

From a server each value would be a request. A few first MBs hold hundreds of samples for as many requests as there are shards
looked into; shards are written shuffled, or should be, so their beginnings are as good as any part of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from wdstrain.errors import StorageError, WdstrainError
from wdstrain.inspecting.dimensions import Value
from wdstrain.inspecting.glimpses import evenly
from wdstrain.shards.index import Index
from wdstrain.shards.labels import label_bytes
from wdstrain.shards.offsets import Ints
from wdstrain.storage.local import LocalFile
from wdstrain.storage.remote import is_remote

FIRST_BYTES = 64 << 10  # of a value: enough for the header of nearly every picture
_MOST_BYTES = 4 << 20  # of a value whose first bytes are not enough
_SOME = 4 << 10  # of a value that is cut off where what was fetched ends


class Sampler:
    """Reads values of an index's samples. heads: first bytes of shards on servers, by path.

    errors: what was wrong with shards that were to be read; the rest of them is left away.
    """

    def __init__(self, index: Index, heads: dict[str, bytes]) -> None:
        self._index, self._heads = index, heads
        self.errors: list[WdstrainError] = []

    def ids(self, most: int, *, whole: bool = False) -> Ints:
        """Ids of at most so many of the samples that can be read at once, evenly spread, ascending. int64[...]

        whole: not those of which only the beginning can.
        """
        parts = []
        for number, shard in enumerate(self._index.shards):
            first, stop = int(self._index.first[number]), int(self._index.first[number + 1])
            if is_remote(shard.path):
                until = len(self._heads.get(shard.path, b""))
                inside = int(
                    np.searchsorted(self._index.offsets.stop[first:stop], until, side="right")
                )
                stop = first + (
                    max(inside, not whole) if until and stop > first else 0
                )  # one that is too large shows its beginning
            parts.append((first, stop))
        ends = np.cumsum([stop - first for first, stop in parts], dtype=np.int64)
        places = np.array(evenly(int(ends[-1]) if len(ends) else 0, most), np.int64)
        shards = np.searchsorted(ends, places, side="right")
        begins = np.array([stop for _, stop in parts], np.int64)
        return np.asarray(begins[shards] - (ends[shards] - places), np.int64)

    def values(self, ids: Ints) -> Iterator[tuple[int, Value]]:
        """(number of the field, value) of all fields of these samples."""
        table, shards = self._index.offsets, self._index.shard_of(ids)
        for number in np.unique(shards).tolist():
            with _Part(self._index.shards[number].path, self._heads, self.errors) as part:
                for i in ids[shards == number].tolist():
                    for row in range(int(table.member_first[i]), int(table.member_first[i + 1])):
                        offset, size = int(table.member_offset[row]), int(table.member_size[row])
                        data = part(offset, min(size, FIRST_BYTES))
                        if len(data) >= min(size, _SOME):
                            yield (
                                int(table.member_field[row]),
                                Value(size, data, part.more(offset, size)),
                            )

    def labels(
        self, field: str, ids: Ints, *, through: bool, asked: bool
    ) -> Iterator[tuple[int, bytes | memoryview]]:
        """(id, bytes of a field) of those of these samples that have it.

        through: shards of servers are read as streams for it; asked: a request for each.
        """
        shards = self._index.shard_of(ids)
        if through or asked:
            for number in np.unique(
                shards
            ).tolist():  # what is wrong with one shard is no reason to leave the others
                try:
                    yield from label_bytes(
                        self._index, field, ids[shards == number], through=through
                    )
                except WdstrainError as error:
                    self.errors.append(error)
            return
        if field not in self._index.fields:
            return
        wanted, table = self._index.fields.index(field), self._index.offsets
        for number in np.unique(shards).tolist():
            with _Part(self._index.shards[number].path, self._heads, self.errors) as part:
                for i in ids[shards == number].tolist():
                    for row in range(int(table.member_first[i]), int(table.member_first[i + 1])):
                        size = int(table.member_size[row])
                        if (
                            table.member_field[row] == wanted
                            and len(data := part(int(table.member_offset[row]), size)) == size
                        ):
                            yield i, data


class _Part:
    """Bytes of one shard: of its file, or of its beginning; none after something was wrong with it."""

    def __init__(self, path: str, heads: dict[str, bytes], errors: list[WdstrainError]) -> None:
        self._path, self._head, self._errors = (
            path,
            heads.get(path, b"") if is_remote(path) else None,
            errors,
        )
        self._file: LocalFile | None = None

    def __enter__(self) -> _Part:
        if self._head is None:
            try:
                self._file = LocalFile(self._path)
            except WdstrainError as error:
                self._errors.append(error)
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def __call__(self, offset: int, length: int) -> bytes:
        if self._head is not None:
            return self._head[offset : offset + length]
        if self._file is None:
            return b""
        try:
            return self._file.read(offset, length)
        except StorageError as error:
            self._errors.append(error)
            self._file.close()
            self._file = None
            return b""

    def more(self, offset: int, size: int) -> Callable[[], bytes]:
        return lambda: self(offset, min(size, _MOST_BYTES))
