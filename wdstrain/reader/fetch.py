"""Bytes of reads: into their blocks of memory, and verified there.

Called by the threads of `run`. A range request retries by itself (`storage`). A complete read is
verified once against the checksums of the index. Samples that differ are read once more, past any
cache.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Iterable
from contextlib import suppress
from functools import partial

import numpy as np

from wdstrain.errors import ShardError, WdstrainError
from wdstrain.memory import Memory, checksums, private_memory
from wdstrain.order.order import Ints
from wdstrain.reader.reader import Reader
from wdstrain.reader.reads import LOCAL_BYTES, Read
from wdstrain.shards.index import Index, Shard, expected_state, needs_headers
from wdstrain.shards.tar import is_sample
from wdstrain.storage.files import open_source
from wdstrain.storage.remote import File, is_remote, range_size

# Why the bytes of a sample cannot be used: the field that differs, "" for the whole sample; a reason.
Bad = tuple[str, str]

_DAMAGED = "its bytes are not those that were packed (crc32), also when they are read again"


class Fetcher:
    """The open shards of one thread, which reads from them into blocks of memory.

    is_ranged: whether all servers answered range requests. Only `stop` may be called by other
    threads.
    """

    def __init__(self, reader: Reader, lock: threading.RLock, most_files: int) -> None:
        """lock: held while the totals of all threads change. most_files: that stay open, the last
        used ones."""
        self._reader, self._lock, self._most_files = reader, lock, most_files
        self._index, self._memory, self._stats = reader.index, reader.memory, reader.stats
        self._files: dict[str, File] = {}
        self.is_ranged, self._stopping = True, threading.Event()
        # Memory is taken when it is written.
        self._scratch = private_memory(max(range_size(), LOCAL_BYTES))

    def read(self, read: Read, block: int) -> dict[int, Bad | BaseException]:
        """Read into a block and verify. Return what is wrong, by position of the sample in the read.

        An error ends reading before the batch of its sample.
        """
        bad: dict[int, Bad | BaseException] = {}
        try:
            try:
                self._fill(read, block)
            except WdstrainError:
                if is_remote(read.shard.path):
                    raise
                bad = self._read_singly(read, block)
                if any(isinstance(reason, WdstrainError) for reason in bad.values()):
                    return bad
            self._check_replaced(read, block)
            place, fields = block + read.place, self._reader.needed_fields
            find = partial(damaged_samples, self._index, fields, self._memory, read.ids, place)
            if not (again := find().keys() - bad.keys()):
                return bad
            self._read_again(read, block, again)
            return bad | {row: (name, _DAMAGED) for row, name in find().items() if row in again}
        except BaseException as error:  # the loop raises it
            return {int(np.argmin(read.batch)): error}

    def stop(self) -> None:
        """End the read that the thread is in. It writes nothing to memory afterwards."""
        self._stopping.set()
        for file in list(self._files.values()):
            file.stop()

    def close(self) -> None:
        """Close all files."""
        while self._files:
            self._files.popitem()[1].close()

    # --- one read ---------------------------------------------------------------------------------

    def _fill(self, read: Read, block: int) -> None:
        """Fill the block of a read."""
        target = self._memory.view[block : block + read.nbytes]
        if read.has_gaps:
            target = self._scratch[: read.stop - read.start]
        self._read_into(read.shard, target, read.start)
        if read.has_gaps:
            self._copy(read, target, block, range(len(read.ids)))

    def _read_into(self, shard: Shard, target: memoryview, offset: int) -> None:
        file = self._file(shard)
        before = file.counts()
        try:
            file.read_into(target, offset)
        finally:
            self.is_ranged &= file.ranged
            cache = self._reader.cache
            loaded = cache.take_counts() if cache is not None else Counter[str]()
            with self._lock:
                for name, count in file.counts().items():
                    vars(self._stats)[name] += count - before[name] + loaded[name]

    def _read_singly(self, read: Read, block: int) -> dict[int, Bad | BaseException]:
        """Read the samples one by one, in the order of their batches: the shard is damaged.

        Return those that cannot be read. The first one ends this, unless they are skipped.
        """
        bad: dict[int, Bad | BaseException] = {}
        self._stats.retries += len(read.ids)
        for row in np.argsort(read.batch, kind="stable").tolist():
            start = int(self._index.offsets.start[read.ids[row]])
            try:
                self._read_into(read.shard, self._view(read, block, row), start)
            except WdstrainError as error:
                if not self._reader.skip_unreadable:
                    return {row: error}
                bad[row] = "", f"it cannot be read ({str(error).rstrip('.')})"
        return bad

    def _read_again(self, read: Read, block: int, rows: Collection[int]) -> None:
        """Read samples whose checksums differ again, past the cache."""
        shard, cache = read.shard, self._reader.cache
        with self._lock:
            self._stats.reread += len(rows)
        if cache is not None:
            cache.forget(shard.path, shard.bytes, shard.sha256, shard.tag)
        with suppress(WdstrainError):  # then they stay as bad as they are
            data = private_memory(read.stop - read.start)
            state = expected_state(self._index, shard)
            with open_source(shard.path, shard.bytes, state) as source:
                source.read_into(data, read.start)
            self._copy(read, data, block, rows)

    def _copy(self, read: Read, data: memoryview, block: int, rows: Iterable[int]) -> None:
        """Copy samples to the block. data: the bytes [start, stop) of the read."""
        begin = (self._index.offsets.start[read.ids] - read.start).tolist()
        for row in rows:
            sample = self._view(read, block, row)
            sample[:] = data[begin[row] : begin[row] + len(sample)]

    def _view(self, read: Read, block: int, row: int) -> memoryview:
        """Return the memory of a sample."""
        return self._memory.view[block + int(read.place[row]) :][: int(read.size[row])]

    def _check_replaced(self, read: Read, block: int) -> None:
        """Raise ShardError if a shard was replaced since it was opened, as version or headers show.

        Only shards of which nothing else tells that are checked.
        """
        if not needs_headers(self._index, read.shard):
            return
        path, tag = read.shard.path, self._files[read.shard.path].tag
        if tag and self._index.versions.setdefault(path, tag) != tag:
            raise ShardError(
                f"{read.shard.shown} changed while it was read.",
                "Start again.",
            )
        for row, number in enumerate(read.ids.tolist()):
            start = int(self._index.offsets.start[number])
            key, members = self._index.key(number), self._index.members(number)
            fields = [(name, offset - start, size) for name, offset, size in members]
            if not is_sample(self._view(read, block, row), key, fields):
                raise ShardError(
                    f"{read.shard.shown} was replaced since it was opened: its headers at offset "
                    f"{start} are not those of '{key}'.",
                    "Start again with the new shard.",
                )

    # --- files ------------------------------------------------------------------------------------

    def _file(self, shard: Shard) -> File:
        """Return the open file of a shard."""
        file = self._files.pop(shard.path, None) or self._open(shard)
        self._files[shard.path] = file
        while len(self._files) > self._most_files:
            self._files.pop(next(iter(self._files))).close()
        return file

    def _open(self, shard: Shard) -> File:
        state, cache = expected_state(self._index, shard), self._reader.cache
        if state is None:
            state = self._index.versions.get(shard.path)
        if cache is not None and is_remote(shard.path):
            file = cache.open(shard.path, shard.bytes, shard.sha256, shard.tag, self._stopping)
            if file is not None:
                return file
        return open_source(shard.path, shard.bytes, state, self._stopping)


def damaged_samples(
    index: Index, needed_fields: Collection[str] | None, memory: Memory, ids: Ints, place: Ints
) -> dict[int, str]:
    """Return the positions of the samples whose checksums differ, with the first such field.

    needed_fields: those to verify; None: all. place: where each sample begins in the memory,
    int64[n]. Raises ValueError if a field lies beyond the memory, as a hostile index may say.
    """
    if not index.offsets.has_checksums:
        return {}
    members = index.offsets.members_of(ids, needed_fields)
    begin = members.offset + (place - index.offsets.start[ids])[members.row]
    differs = (checksums(memory, begin, members.size) != members.crc) & (members.crc != 0)
    wrong = np.flatnonzero(differs)[::-1].tolist()
    return {int(members.row[i]): index.fields[members.field[i]] for i in wrong}
