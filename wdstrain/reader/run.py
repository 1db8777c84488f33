"""Forward reader of one rank: from the list of reads to batches whose samples lie in memory.

Called by the pipeline; calls `reads`, `reader` and `fetch`. A few threads take the reads in the
order of their list: one for local shards, several for servers, which hides the latency of requests.
Memory is the only flow control: the next read begins once a block is free, also in the next epoch.
So the threads run ahead of the loop, which must find the bytes there. A batch is ready when all of
its samples have arrived; reads may end in any order. An error belongs to the first batch that it
hits: all batches before it are delivered.

A `Run` is one pass over the list, from a step on. To stop it, close it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from itertools import pairwise
from math import inf
from queue import SimpleQueue

import numpy as np

from wdstrain.decode.batches import ReadBatch
from wdstrain.errors import WdstrainError
from wdstrain.order.order import Ints, Order
from wdstrain.reader.fetch import Bad, Fetcher
from wdstrain.reader.reader import Blocks, Reader, ReadStats
from wdstrain.reader.reads import Read, epochs, of_rows, reads, sample_members
from wdstrain.runtime.workers import DeferSignals
from wdstrain.shards.index import Index
from wdstrain.storage.remote import is_remote

THREADS = 6  # requests in flight: 6 x 4 MB in 100 ms are 240 MB/s
STOP_PATIENCE = 2.0  # seconds that `close` waits for threads that wait for a server

_STEP_SAMPLES = 1024  # samples whose delivery is planned at once; a batch is a slice of them
_TABLE_SAMPLES = 1 << 14  # rows of a table of arrived samples


class ReadStopped(WdstrainError):
    """Another thread ended the reading."""


class Run:
    """One pass of a reader. The loop's thread takes and releases batches; any thread may close.

    blocks: the memory in use. bytes_ahead: of the samples whose read has begun and that the loop
    has not taken.
    """

    def __init__(self, reader: Reader, epoch: int, step: int, until: int | None = None) -> None:
        """Nothing is started. until: the first epoch that is not read; None: there is no end."""
        order, index = reader.orders(0), reader.index
        self._stats, self._sizes, self._cache = reader.stats, index.offsets.size, reader.cache
        self.blocks = Blocks(reader.memory.size)
        self._most_ahead, self.bytes_ahead = reader.most_ahead, 0
        # Resume only when several reads fit. Single requests would wait for the server one after
        # another, and the loop would switch to a reading thread for each.
        self._resume_below = reader.most_ahead - reader.ahead // 4
        self._reads = reads(index, reader.orders, reader.rank, epoch, step, until)
        # The generators must not refer to the reader: the memory must be freed without the GC.
        self._batches = _planned_batches(
            index, reader.orders, reader.rank, reader.needed_fields, epoch, step, until
        )
        # The loop's thread takes the lock directly and waits on a simple queue. A Ctrl-C inside a
        # Condition would leave the lock locked.
        self._lock = threading.RLock()
        self._turn = threading.Lock()  # held by the thread that takes the next read
        self._loop_wakeup, self._reader_wakeup = SimpleQueue[None](), SimpleQueue[None]()
        self.is_waiting = self._is_stopped = False  # waiting: the loop, for a batch
        self._wanted = 0  # the batch that the loop requests
        self._paused_before: int | None = None  # first batch of the read that waits for memory
        self._counted_until = 0.0  # time up to which reading was counted
        self.in_flight: dict[threading.Thread, Read] = {}
        # By batch and row, where each arrived sample and its block begin; -1 for others. Tables of
        # consecutive batches, int64[2, batches * rows].
        self._tables: dict[int, Ints] = {}
        self._rows = order.batch_size
        self._table_size = max(1, _TABLE_SAMPLES // self._rows) * self._rows
        self._bad: dict[int, dict[int, Bad]] = {}  # by batch and row
        # The first batch that cannot be read, and why. Batches before it are delivered.
        self._failed_batch, self._error = inf, WdstrainError("")
        self._taken: dict[int, Ints] = {}  # blocks of the samples of batches, until their release
        count = THREADS if any(is_remote(shard.path) for shard in index.shards) else 1
        if reader.needed_fields is not None and not reader.needed_fields:
            count = 0
        self._fetchers = [Fetcher(reader, self._lock, order.lanes_per_rank) for _ in range(count)]
        self._only: Fetcher | None = None  # goes on alone if a server knows no ranges
        self._threads: list[threading.Thread] = []

    @property
    def is_paused(self) -> bool:
        """Whether no read begins until the loop requests or releases more batches."""
        return self._paused_before is not None or not any(t.is_alive() for t in self._threads)

    def start(self) -> None:
        """Start the threads. Raises RuntimeError if the system does not."""
        for number, fetcher in enumerate(self._fetchers):
            name = f"wdstrain-fetch-{number}"
            thread = threading.Thread(
                target=self._read_all, args=(fetcher,), name=name, daemon=True
            )
            thread.start()  # may raise: then `close` must not join it
            self._threads.append(thread)

    # --- in the loop's thread ---------------------------------------------------------------------

    def next(self) -> ReadBatch | None:
        """Return the next batch in order, once it is read; None after the last.

        Raises the error that hits this batch, and ReadStopped after `close`.
        """
        planned, begun = next(self._batches, None), time.perf_counter()
        if planned is None:
            return None
        try:
            while (batch := self._take(planned)) is None:
                self._loop_wakeup.get()
            return batch
        finally:
            self.is_waiting = False
            self._stats.shuffle_seconds += time.perf_counter() - begun

    def _take(self, batch: ReadBatch) -> ReadBatch | None:
        """Return a batch with the places of its samples; None while some are missing."""
        key, start = divmod(batch.number * self._rows, self._table_size)
        stop = start + len(batch.ids)
        with self._lock:
            table, is_ready = self._tables.get(key), not self._fetchers
            if table is not None:
                is_ready = bool((table[0, start:stop] >= 0).all())
            if self._is_stopped:
                raise ReadStopped("the reader was stopped")
            if self._failed_batch <= batch.number and not is_ready:
                raise self._error
            self._wanted, self.is_waiting = batch.number, not is_ready
            if table is not None and is_ready:
                self.bytes_ahead -= int(self._sizes[batch.ids].sum())
                place, self._taken[batch.number] = table[:, start:stop]
                offset = batch.members.offset + place[batch.members.row]
                batch = batch._replace(
                    members=batch.members._replace(offset=offset),
                    bad=self._bad.pop(batch.number, {}),
                )
                if start + self._rows == self._table_size:
                    del self._tables[key]
            self._wake_reader()
            return batch if is_ready else None

    def release(self, number: int) -> None:
        """Release the memory of a batch. Call this once for each batch."""
        with self._lock:
            if number in self._taken:
                self.blocks.release(self._taken.pop(number))
                self._wake_reader()

    def _needs(self, first: int) -> bool:
        """Return whether the loop needs a read. first: the first batch that does, as far as known.

        A read that was planned later may be needed earlier: then the loop waits for no other read.
        """
        return first <= self._wanted or (self.is_waiting and not self.in_flight)

    def _wake_reader(self) -> None:
        """Wake the thread that waits for memory if it may go on. The caller holds the lock."""
        first = self._paused_before
        if first is not None and (self._needs(first) or self.bytes_ahead < self._resume_below):
            self._paused_before = None
            self._reader_wakeup.put(None)

    # --- in the reading threads -------------------------------------------------------------------

    def _read_all(self, fetcher: Fetcher) -> None:
        """Read until the end. This is the function of each thread."""
        try:
            with closing(fetcher):
                while (job := self._next_read(fetcher)) is not None:
                    begun = time.perf_counter()
                    self._complete(*job, fetcher.read(*job), begun)
        except BaseException as error:
            with self._lock:
                self._fail(self._wanted, error)
                self._wake_loop()

    def _next_read(self, fetcher: Fetcher) -> tuple[Read, int] | None:
        """Return the next read and its block, once there is room or the loop needs it.

        None at the end, and for a thread that is to end.
        """
        with self._turn:
            if self._only is None and not fetcher.is_ranged:
                self._only = fetcher  # several threads would each fetch whole shards
            if self._is_stopped or self._only not in (None, fetcher):
                return None
            read = next(self._reads, None)
            while read is not None and not self._is_stopped:
                if (block := self._block_of(read)) is not None:
                    return read, block
                self._reader_wakeup.get()
            return None

    def _block_of(self, read: Read) -> int | None:
        """Return memory for a read; None to wait for room, and after `close`."""
        with self._lock:
            needed, block = self._needs(read.first_batch), None
            if not self._is_stopped and (needed or self.bytes_ahead < self._most_ahead):
                block = self.blocks.take(read.nbytes, len(read.ids))
                if block is None and needed:
                    raise WdstrainError(
                        f"the reader holds {self.blocks.held} bytes, which is its limit.",
                        "Lower {shuffle_buffer}.",
                        {"shuffle_buffer": ...},
                    )
            if block is None:
                self._paused_before = read.first_batch
            else:
                self.in_flight[threading.current_thread()] = read
                self.bytes_ahead += int(read.size.sum())
            return block

    def _complete(
        self, read: Read, block: int, bad: Mapping[int, Bad | BaseException], begun: float
    ) -> None:
        """Note the samples of a complete read. bad: see `Fetcher.read`. begun: time of its begin."""
        is_arrived = np.ones(len(read.ids), bool)
        with self._lock:
            now = time.perf_counter()
            self._stats.read_seconds += now - max(begun, self._counted_until)
            self._counted_until = now
            self._stats.bytes += read.stop - read.start
            del self.in_flight[threading.current_thread()]
            for position, reason in bad.items():
                batch = int(read.batch[position])
                if isinstance(reason, BaseException):
                    is_arrived = read.batch < batch
                    self._fail(batch, reason)
                else:
                    self._bad.setdefault(batch, {})[int(read.row[position])] = reason
            places = (read.batch * self._rows + read.row)[is_arrived]
            self._note_arrival(places, read.place[is_arrived] + block, block)
            self._wake_loop()

    def _note_arrival(self, places: Ints, offsets: Ints, block: int) -> None:
        """Note where samples lie that have arrived. places: numbers of their rows, over all batches."""
        keys, own = np.divmod(places, self._table_size)
        for key in set(keys.tolist()):
            if key not in self._tables:
                self._tables[key] = np.full((2, self._table_size), -1)
            mine = keys == key
            self._tables[key][0, own[mine]] = offsets[mine]
            self._tables[key][1, own[mine]] = block

    # --- in any thread ----------------------------------------------------------------------------

    def close(self) -> None:
        """End reading; wait for at most one read. May be called again after an interrupt.

        No memory is written to after that. Only a server that does not answer can keep a thread
        longer, and that thread writes nothing.
        """
        with DeferSignals(), self._lock:
            self._is_stopped = True
            # Frames of an error refer to this object, and the memory must be freed without the GC.
            self._failed_batch, self._error = inf, WdstrainError("")
            self._stats = ReadStats()  # a thread that a server keeps is not counted any more
            self._loop_wakeup.put(None)
            self._reader_wakeup.put(None)
            for fetcher in self._fetchers:
                fetcher.stop()
        end = time.monotonic() + STOP_PATIENCE
        for thread in self._threads:
            read = self.in_flight.get(thread)
            is_at_server = read is not None and is_remote(read.shard.path)
            thread.join(max(0.0, end - time.monotonic()) if is_at_server else None)
        if self._cache is not None:
            self._cache.stop(max(0.0, end - time.monotonic()))

    def _fail(self, batch: int, error: BaseException) -> None:
        """End reading before a batch; the loop's thread raises the error. The caller holds the lock."""
        if not isinstance(error, WdstrainError):
            error = WdstrainError(f"reading failed: {error!r}")
        if batch < self._failed_batch and not self._is_stopped:
            self._failed_batch, self._error = batch, error

    def _wake_loop(self) -> None:
        """Wake the loop's thread if it waits. The caller holds the lock."""
        if self.is_waiting:
            self.is_waiting = False
            self._loop_wakeup.put(None)


def _planned_batches(
    index: Index,
    orders: Callable[[int], Order],
    rank: int,
    needed_fields: set[str] | None,
    epoch: int,
    step: int,
    until: int | None,
) -> Iterator[ReadBatch]:
    """Yield the batches of a rank before they are read: offsets are those within the samples."""
    for order, first_step, before in epochs(orders, epoch, step, until):
        count = max(1, _STEP_SAMPLES // order.batch_size)
        for first in range(first_step, order.steps, count):
            stop = min(first + count, order.steps)
            ids, rng_ids, firsts, valid = order.delivery(rank, first, stop)
            keys, members = index.keys(ids), sample_members(index, ids, needed_fields)
            for number, (start, end) in enumerate(pairwise(firsts), before + first):
                rows = slice(start, end)
                samples = ids[rows], rng_ids[rows], valid[rows], keys[rows]
                yield ReadBatch(number, order.epoch, *samples, of_rows(members, start, end), {})
