"""Forward reader of one rank: from the list of reads to batches whose samples lie in memory.

Called by the pipeline; calls `reads`, `blocks` and `fetch`. A thread begins the reads in the order
of their list. Memory is the only flow control: the next read begins once a block is free, also in
the next epoch. So the thread runs ahead of the loop, which must find the bytes there. A batch is
ready when all of its samples have arrived; reads may end in any order. An error belongs to the
first batch that it hits: all batches before it are delivered.

`Reader` owns the memory. A `Run` is one pass over the list, from a step on. To stop it, close it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from wdstrain.errors import ShardError, WdstrainError
from wdstrain.memory import Memory
from wdstrain.order.order import Ints, Order
from wdstrain.reader.blocks import Blocks
from wdstrain.reader.fetch import BadBytes, Fetcher, Outcome, ReadStats
from wdstrain.reader.reads import READ_SAMPLES, Read, reads
from wdstrain.runtime.machine import memory
from wdstrain.runtime.signals import DeferSignals
from wdstrain.runtime.watchdog import thread_stack
from wdstrain.shards.index import Index
from wdstrain.storage.cache import Cache
from wdstrain.storage.remote import is_remote

Bools = npt.NDArray[np.bool_]

_STEP_SAMPLES = 1024  # samples whose delivery is planned at once; a batch is a slice of them
_TABLE_SAMPLES = 1 << 14  # rows of a table of arrived samples


class ReadStopped(WdstrainError):
    """Another thread ended the reading."""

    def __init__(self) -> None:
        super().__init__("the reader was stopped")


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """Options of a reader.

    ahead: bytes that are read ahead, beyond the shuffle window. in_flight: most batches that are
    taken and not yet released. needed_fields: fields that are verified; None: all; if there are
    none, nothing is read.
    skip_unreadable: deliver samples that a local file does not give as bad, instead of raising an
    error. cache: of remote shards.
    """

    ahead: int
    in_flight: int
    needed_fields: set[str] | None = None
    skip_unreadable: bool = False
    cache: Cache | None = None


class ReadBatch(NamedTuple):
    """The b samples of one batch, which are read.

    number: of the batch in the run. ids, rng_ids: int64[b], see `Steps`. valid: bool[b], False for
    padding. offset: where each sample begins in the memory, int64[b]. bad: by row, why the bytes of
    a sample cannot be used.
    """

    number: int
    epoch: int
    step: int
    ids: Ints
    rng_ids: Ints
    valid: Bools
    offset: Ints
    bad: dict[int, BadBytes]


class Reader:
    """Reader of the lanes of one rank. memory: its blocks. stats: totals since it was made."""

    def __init__(
        self, index: Index, orders: Callable[[int], Order], rank: int, options: ReadOptions
    ) -> None:
        """Reserve the memory; nothing is started. orders: returns the order of an epoch.

        Raises ShardError for a sample that is too large for this machine.
        """
        self.index, self.orders, self.rank, self.options = index, orders, rank, options
        self.is_remote = any(is_remote(shard.path) for shard in index.shards)
        self.stats = ReadStats()
        self.most_ahead, capacity = _memory_needed(index, orders(0), options)
        self.blocks = Blocks(capacity)
        self._lifecycle = threading.RLock()  # held while a run is started or ended
        self._run: Run | None = None
        self._closed = False

    @property
    def memory(self) -> Memory:
        """The memory that the offsets of batches refer to."""
        return self.blocks.memory

    def start(self, epoch: int, step: int, until: int | None = None) -> Run:
        """Return a run that reads from this step on; the run before it ends.

        until: the first epoch that is not read; None: there is no end. Raises ReadStopped after
        `close`, RuntimeError if the system does not start a thread.
        """
        with self._lifecycle:
            self._end_run()
            # Another thread may close the reader before this call, and wait for this thread.
            if self._closed:
                raise ReadStopped
            self.blocks.reset()
            run = Run(self, epoch, step, until)
            with DeferSignals():
                run.start()
                self._run = run
            return run

    def close(self) -> None:
        """End reading for ever. The memory is freed with its last user, without the GC."""
        with self._lifecycle:
            self._closed = True
            self._end_run()

    def _end_run(self) -> None:
        """End the run, if there is one. After an interrupt the next call ends the rest of it."""
        if self._run is not None:
            self._run.close()
            self._run = None


class _Table:
    """Samples of consecutive batches that have arrived, by batch and row.

    offset, block: int64[batches, rows]: where a sample and its block begin. arrived: int64[batches].
    """

    def __init__(self, batches: int, rows: int) -> None:
        self.offset, self.block = np.zeros((2, batches, rows), np.int64)
        self.arrived = np.zeros(batches, np.int64)


class Run:
    """One pass of a reader. The loop's thread takes and releases batches; any thread may close.

    bytes_ahead: of the samples whose read has begun and that the loop has not taken.
    """

    def __init__(self, reader: Reader, epoch: int, step: int, until: int | None) -> None:
        self._blocks, self._stats, self._is_remote = reader.blocks, reader.stats, reader.is_remote
        options, order = reader.options, reader.orders(0)
        self._lanes, self._sizes = order.lanes_per_rank, reader.index.offsets.size
        self._most_ahead, self.bytes_ahead = reader.most_ahead, 0
        # Resume only when several reads fit. Single requests would wait for the server one after
        # another, and the loop would switch to the reader's thread for each.
        self._resume_below = reader.most_ahead - options.ahead // 4
        self._fetcher = Fetcher(
            reader.index,
            reader.memory,
            options.needed_fields,
            options.cache,
            reader.stats,
            self._complete,
            skip_unreadable=options.skip_unreadable,
        )
        self._reads_nothing = options.needed_fields is not None and not options.needed_fields
        self._reads = reads(reader.index, reader.orders, reader.rank, epoch, step, until)
        self._batches = _planned_batches(reader.orders, reader.rank, epoch, step, until)
        # The loop's thread takes the lock directly and waits on a simple queue. A Ctrl-C inside a
        # Condition would leave the lock locked.
        self._lock = threading.RLock()
        self._loop_wakeup: SimpleQueue[None] = SimpleQueue()
        self._reader_wakeup: SimpleQueue[None] = SimpleQueue()
        self._is_waiting = self._is_stopped = False
        self._wanted = 0  # the batch that the loop requests
        self._paused_before: int | None = None  # first batch of the read that waits for memory
        self._rows = order.batch_size
        self._batches_per_table = max(1, _TABLE_SAMPLES // order.batch_size)
        self._tables: dict[int, _Table] = {}
        self._bad: dict[int, dict[int, BadBytes]] = {}  # by batch and row
        # The first batch that cannot be read, and why. Batches before it are delivered.
        self._failed: tuple[int, WdstrainError] | None = None
        self._taken: dict[int, Ints] = {}  # blocks of the samples of batches, until their release
        self._in_flight: dict[int, Read] = {}  # by block
        self._thread: threading.Thread | None = None

    @property
    def is_paused(self) -> bool:
        """Whether no read begins until the loop requests or releases more batches."""
        thread = self._thread
        return self._paused_before is not None or thread is None or not thread.is_alive()

    def start(self) -> None:
        """Start the thread. Raises RuntimeError if the system does not; then nothing runs."""
        if self._reads_nothing:
            return
        thread = threading.Thread(target=self._begin_reads, name="wdstrain-reader", daemon=True)
        thread.start()  # may raise: then `close` must not join it
        self._thread = thread

    # --- in the loop's thread ---------------------------------------------------------------------

    def next(self) -> ReadBatch | None:
        """Return the next batch in order, once it is read; None after the last.

        Raises the error that hits this batch, and ReadStopped after `close`.
        """
        batch = next(self._batches, None)
        if batch is None:
            return None
        if self._reads_nothing and not self._is_stopped:
            return batch
        size, (key, own) = len(batch.ids), divmod(batch.number, self._batches_per_table)

        def is_ready() -> bool:
            table = self._tables.get(key)
            return table is not None and int(table.arrived[own]) == size

        with self._lock:
            self._wanted = batch.number
            self._wake_reader()
        self._wait(batch.number, is_ready)
        with self._lock:
            if self._is_stopped or not is_ready():
                self._raise_error()
            table = self._tables[key]
            self.bytes_ahead -= int(self._sizes[batch.ids].sum())
            if own == self._batches_per_table - 1:
                del self._tables[key]
            self._taken[batch.number] = table.block[own, :size]
            bad = self._bad.pop(batch.number, {})
            return batch._replace(offset=table.offset[own, :size].copy(), bad=bad)

    def release(self, number: int) -> None:
        """Release the memory of a batch. Call this once for each batch."""
        with self._lock:
            if not self._is_stopped and number in self._taken:  # else another run has the memory
                self._blocks.release(self._taken.pop(number))
                self._wake_reader()

    def _wait(self, number: int, is_ready: Callable[[], bool]) -> None:
        """Wait until a batch is ready or fails, or the run ends."""
        begun = time.perf_counter()
        try:
            while True:
                with self._lock:
                    if is_ready() or self._is_stopped or self._fails(number):
                        return
                    self._is_waiting = True
                    self._wake_reader()
                self._loop_wakeup.get()
        finally:
            self._is_waiting = False
            waited = time.perf_counter() - begun
            self._stats.shuffle_seconds += waited
            if self._is_remote:
                self._stats.read_seconds += waited

    def _fails(self, number: int) -> bool:
        """Return whether this batch or one before it cannot be read."""
        return self._failed is not None and self._failed[0] <= number

    def _raise_error(self) -> None:
        """Raise the error of the batch that cannot be read, or ReadStopped."""
        error = ReadStopped() if self._failed is None else self._failed[1]
        try:
            raise error
        finally:
            del error  # it refers to this frame

    def _needs(self, first: int) -> bool:
        """Return whether the loop needs a read. first: the first batch that does, as far as known.

        A read that was planned later may be needed earlier: then the loop waits for no other read.
        """
        return first <= self._wanted or (self._is_waiting and not self._in_flight)

    def _wake_reader(self) -> None:
        """Wake the reader's thread if it may go on. The caller holds the lock."""
        first = self._paused_before
        if first is not None and (self._needs(first) or self.bytes_ahead < self._resume_below):
            self._paused_before = None
            self._reader_wakeup.put(None)

    # --- in the reader's thread -------------------------------------------------------------------

    def _begin_reads(self) -> None:
        """Begin all reads, each once there is memory for it."""
        try:
            for read in self._reads:
                block = self._take_block(read)
                if block is None:
                    return
                begun = time.perf_counter()
                self._fetcher.begin(read, block, self._lanes)
                self._stats.read_seconds += time.perf_counter() - begun
        except BaseException as error:  # the loop raises it
            self._fail(error)
        finally:
            self._fetcher.close_local()

    def _take_block(self, read: Read) -> int | None:
        """Return memory for a read, once there is room or the loop needs it; None after `close`."""
        while True:
            with self._lock:
                needed = self._needs(read.first_batch)
                if self._is_stopped:
                    return None
                if needed or self.bytes_ahead < self._most_ahead:
                    block = self._blocks.take(read.nbytes, len(read.ids))
                    if block is not None:
                        self._in_flight[block] = read
                        self.bytes_ahead += int(read.size.sum())
                        return block
                    if needed:
                        raise WdstrainError(
                            f"the reader holds {self._blocks.held} bytes, which is its limit. "
                            f"Lower shuffle_buffer."
                        )
                self._paused_before = read.first_batch
            self._reader_wakeup.get()

    # --- in any thread ----------------------------------------------------------------------------

    def close(self) -> None:
        """End reading; wait for at most one read. May be called again after an interrupt.

        No memory is written to after that. Only a server that does not answer can keep a thread
        longer, and that thread writes nothing.
        """
        with DeferSignals(), self._lock:
            self._is_stopped = True
            # Frames of errors refer to this object, and the memory must be freed without the GC.
            self._failed = None
            self._loop_wakeup.put(None)
            self._reader_wakeup.put(None)
        if self._thread is not None:
            self._thread.join()
        self._fetcher.stop()

    def describe_wait(self) -> str | None:
        """Return what is being read, with the reader's stack, if the loop waits for a read."""
        if not self._is_waiting:
            return None
        read = next(iter(list(self._in_flight.values())), None)
        progress = "nothing is being read"
        if read is not None:
            progress = f"{read.shard.shown} is being read at offset {read.start}"
        stack = thread_stack(self._thread.ident if self._thread is not None else None)
        return f"{progress}; the reader:\n{stack}"

    def _complete(self, read: Read, block: int, outcome: Outcome) -> None:
        """Note the samples of a complete read. Must not raise in an I/O thread."""
        try:
            with self._lock:
                del self._in_flight[block]
                self._stats.bytes += read.stop - read.start
                arrived = np.ones(len(read.ids), bool)
                if outcome.error is not None:
                    failed = int(read.batch[outcome.failed])
                    arrived = read.batch < failed
                    self._fail_batch(failed, outcome.error)
                for position, reason in outcome.bad.items():
                    rows = self._bad.setdefault(int(read.batch[position]), {})
                    rows[int(read.row[position])] = reason
                self._note_arrival(read, block, arrived)
                self._wake_loop()
        except BaseException as error:
            self._fail(error)

    def _note_arrival(self, read: Read, block: int, arrived: Bools) -> None:
        """Note where the samples of a read are. arrived: those that can be delivered, bool[n]."""
        keys, own = np.divmod(read.batch, self._batches_per_table)
        for key in np.unique(keys[arrived]).tolist():
            table = self._tables.get(key)
            if table is None:
                table = self._tables[key] = _Table(self._batches_per_table, self._rows)
            mine = (keys == key) & arrived
            batch, row = own[mine], read.row[mine]
            table.offset[batch, row] = block + read.place[mine]
            table.block[batch, row] = block
            table.arrived += np.bincount(batch, minlength=len(table.arrived))

    def _fail(self, error: BaseException) -> None:
        """End reading; the loop's thread raises the error."""
        if not isinstance(error, WdstrainError):
            error = WdstrainError(f"reading failed: {error!r}")
        with self._lock:
            self._fail_batch(self._wanted, error)
            self._wake_loop()

    def _fail_batch(self, number: int, error: WdstrainError) -> None:
        """Note that a batch cannot be read. The caller holds the lock."""
        if not self._is_stopped and not self._fails(number):
            self._failed = number, error

    def _wake_loop(self) -> None:
        """Wake the loop's thread if it waits. The caller holds the lock."""
        if self._is_waiting:
            self._is_waiting = False
            self._loop_wakeup.put(None)


def _planned_batches(
    orders: Callable[[int], Order], rank: int, epoch: int, step: int, until: int | None
) -> Iterator[ReadBatch]:
    """Yield the batches of a rank, with their samples, before they are read. Offsets are 0."""
    number = 0
    while epoch != until:
        order = orders(epoch)
        count = max(1, _STEP_SAMPLES // order.batch_size)
        for first in range(step, order.steps, count):
            stop = min(first + count, order.steps)
            ids, rng_ids, firsts, valid = order.delivery(rank, first, stop)
            for own in range(stop - first):
                rows = slice(*firsts[own : own + 2])
                own_ids = ids[rows]
                own_rng_ids = own_ids if rng_ids is ids else rng_ids[rows]
                offset = np.zeros_like(own_ids)
                yield ReadBatch(
                    number, epoch, first + own, own_ids, own_rng_ids, valid[rows], offset, {}
                )
                number += 1
        epoch, step = epoch + 1, 0


def _memory_needed(index: Index, order: Order, options: ReadOptions) -> tuple[int, int]:
    """Return (bytes at which reading ahead pauses, bytes that may be held at once).

    The former are those of samples whose read has begun and that the loop has not taken.
    Raises ShardError for a sample that is too large for this machine's memory.
    """
    sizes = index.offsets.size
    _check_sample_size(index, int(np.argmax(sizes)), int(np.max(sizes)))
    epoch, most = (int((sizes * each).sum()) for each in (order.weights, np.ceil(order.weights)))
    # On average a sample leaves half a window after it was read. At the end of an epoch the window
    # empties. The next epoch must be read meanwhile, or the reader would have to fill its window at
    # twice the pace.
    window = int(order.max_delay * epoch / max(1, order.samples)) // 2
    most_ahead = window + min(options.ahead, epoch)
    # Blocks are held whole: that of a sample reaches a read and a window beyond it at both ends.
    samples = 3 * order.max_delay + 2 * order.lanes_per_rank * READ_SAMPLES
    page = 4096  # a block has whole pages
    largest = int(np.max(sizes)) + page
    held = min(samples * largest, 2 * (most + page * order.samples))
    held += (options.in_flight + 2) * order.batch_size * largest
    return most_ahead, 2 * (most_ahead + held)


def _check_sample_size(index: Index, number: int, size: int) -> None:
    """Raise ShardError for a sample that is too large for this machine's memory."""
    if size > (most := memory() // 2):
        shard = index.shard_with(number)
        raise ShardError(
            f"{shard.shown}: '{index.key(number)}' at offset {int(index.offsets.start[number])} has "
            f"{size} bytes, and a sample is held as a whole; the limit is {most}, half of this "
            f"machine's memory. Leave it out, or pack it in parts."
        )
