"""Worker processes wait neither for each other nor for a reader; batches in flight are bounded."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from contextlib import closing, suppress
from pathlib import Path
from queue import Empty
from typing import Any

import pytest
import torch

import wdstrain as wt
from tests.conftest import write_shards
from wdstrain.decode import workers
from wdstrain.decode.worker_queues import interruptible_context
from wdstrain.runtime.machine import cores

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

SIZE = 100  # bytes per sample, so large that each batch is a message of its own
# With two workers: a slow batch, and the last batch that may begin before the slow one ends.
SLOW, LAST = 2, 7


class WaitsForLaterBatch:
    """Transform that records started batches in files, and waits in SLOW until LAST has begun."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, sample: dict[str, Any]) -> dict[str, int]:
        number = int(sample["cls"])
        if number % SIZE == 0:
            (self.folder / str(number // SIZE)).touch()
        # The next epoch begins too, without waiting.
        if number == SLOW * SIZE and not (self.folder / "begun").exists():
            end = time.monotonic() + 20
            while not (self.folder / str(LAST)).exists() and time.monotonic() < end:
                time.sleep(0.01)
            (self.folder / "begun").write_text(
                " ".join(sorted(file.name for file in self.folder.iterdir()))
            )
        return {"number": number}


@pytest.mark.skipif(torch.__version__ < "2.7", reason="before 2.7 torch gives tasks by turns")
def test_a_slow_batch_blocks_no_other_worker_and_keeps_the_order(
    tmp_path: Path,
) -> None:
    write_shards(tmp_path / "s", [12 * SIZE])
    notes = tmp_path / "notes"
    notes.mkdir()
    loader = wt.Loader(
        tmp_path / "s",
        transform=WaitsForLaterBatch(notes),
        batch_size=SIZE,
        num_workers=2,
        shuffle=False,
    )
    numbers = [number for batch in loader for number in batch["number"].tolist()]
    loader.close()
    assert numbers == list(range(12 * SIZE))
    begun = {int(number) for number in (notes / "begun").read_text().split()}
    assert max(begun) == LAST
    assert len(begun) == LAST  # all but the batch that waits behind the slow one


MESSAGES = 7


@pytest.fixture
def context() -> Any:
    return interruptible_context(multiprocessing.get_context("spawn"), MESSAGES)


def put_all(queue: Any, messages: list[bytes]) -> None:
    for message in messages:
        queue.put(message)


def put_all_and_wait(queue: Any, messages: list[bytes], end: Any) -> None:
    """The exit of the process does not wait for its messages."""
    put_all(queue, messages)
    end.get(timeout=60)


def test_all_messages_of_a_full_flight_are_written_without_a_reader(context: Any) -> None:
    """The sending thread is not used, so it does not compete with a decoder for the GIL."""
    queue = context.Queue()
    messages = [bytes([65 + i]) * 4000 for i in range(MESSAGES)]
    put_all(queue, messages)
    assert queue.unsent == 0
    assert [queue.get(timeout=20) for _ in messages] == messages


def test_put_does_not_wait_for_room_in_the_pipe(context: Any) -> None:
    """A worker that waited for a reader would not notice the request to end."""
    queue = context.Queue()
    messages = [b"%d" % i * 50_000 for i in range(MESSAGES)] + [b"x" * 3_000_000, b"last"]
    put_all(queue, messages)
    assert queue.unsent > 0
    assert [queue.get(timeout=20) for _ in messages] == messages


def test_messages_of_each_process_keep_their_order_at_any_size(context: Any) -> None:
    """A worker's answer that an older stream is over must follow the last answer of that stream."""
    queue, ends = context.Queue(), [context.Queue() for _ in range(2)]
    messages = [
        [b"%d %d " % (sender, i) * (1 if i % 3 else 50_000) for i in range(15)]
        for sender in range(2)
    ]
    processes = [
        context.Process(target=put_all_and_wait, args=arguments, daemon=True)
        for arguments in zip([queue] * 2, messages, ends, strict=True)
    ]
    for process in processes:
        process.start()
    received = [queue.get(timeout=60) for _ in range(2 * 15)]
    for sender, sent in enumerate(messages):
        assert [message for message in received if message.startswith(b"%d " % sender)] == sent
    for process, end in zip(processes, ends, strict=True):
        end.put("end")
        process.join(20)
        assert process.exitcode == 0


def test_a_queue_without_messages_is_empty(context: Any) -> None:
    with pytest.raises(Empty):
        context.Queue().get(timeout=0.01)


def test_a_closed_queue_takes_only_the_request_to_end(context: Any) -> None:
    """The DataLoader's iterator may be finalized after its queues."""
    queue = context.Queue()
    queue.put(1)
    assert queue.get(timeout=20) == 1
    queue.close()
    queue.put(None)
    with pytest.raises(ValueError, match="closed"):
        queue.put(2)


def open_files() -> set[str]:
    """Return what the descriptors of this process refer to; pipes have numbers."""
    targets = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the descriptor of the folder itself is already closed
            targets.add(os.readlink(f"/proc/self/fd/{name}"))
    return targets


def test_a_dropped_queue_closes_its_pipe_and_ends_its_thread(context: Any) -> None:
    threads, files = set(threading.enumerate()), open_files()
    queue = context.Queue()
    queue.put(1)
    (thread,), pipe = set(threading.enumerate()) - threads, open_files() - files
    assert pipe
    del queue
    thread.join(20)
    assert not thread.is_alive()
    assert not pipe & open_files()


# --- batches in flight ---


@pytest.mark.parametrize("count", [1, 2, 8, 96])
@pytest.mark.parametrize("fits", [0, 1, 3, 10, 50, 10_000])
def test_batches_in_flight_of_threads_are_bounded_by_cores_and_memory(
    count: int, fits: int
) -> None:
    limits = workers.of_threads(count, fits)
    assert 2 <= limits.batches <= max(2, min(2 * count, fits))
    assert 1 <= limits.decoders <= min(count, limits.batches)
    if fits >= 2 * count:
        assert limits == (2 * count, count, 0, 1)


@pytest.mark.parametrize("count", [1, 2, 7, 64])
@pytest.mark.parametrize("processors", [1, 2, 8, 96])
@pytest.mark.parametrize("fits", [0, 1, 3, 10, 50, 10_000])
@pytest.mark.parametrize("batches_per_message", [1, 2, 4])
def test_batches_in_flight_of_worker_processes_are_bounded_by_cores_and_memory(
    count: int, processors: int, fits: int, batches_per_message: int
) -> None:
    limits = workers.of_processes(count, processors, fits, batches_per_message)
    assert limits.decoders == count
    assert limits.messages > count  # each worker needs a message
    assert limits.messages <= max(count + 1, count + processors + max(2, processors // 2))
    assert limits.messages * batches_per_message <= max((count + 1) * batches_per_message, fits)


class CountsSamples:
    """Transform that appends a byte to a file for each sample."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        with open(self.file, "ab", buffering=0) as opened:
            opened.write(b".")
        return {"cls": int(sample["cls"])}


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow), 6])
def test_no_more_batches_begin_than_may_be_in_flight(tmp_path: Path, workers: int) -> None:
    """The loop takes some batches and waits until no more begin. Each message has one batch."""
    size, batches = 130, 40
    shards, file = write_shards(tmp_path / "shards", [size * batches]), tmp_path / "begun"
    with closing(
        wt.Loader(shards, transform=CountsSamples(file), batch_size=size, num_workers=workers)
    ) as loader:
        passed = loader.epoch(0, until=1)
        for taken in range(1, 4):
            next(passed)
            before = -1
            while before != (before := file.stat().st_size):
                time.sleep(0.2)
            busy = min(workers, cores())
            most = workers + busy + max(2, busy // 2) + 1 if workers else 2 * cores()
            assert before <= (taken + most) * size
        assert sum(1 for _ in passed) == batches - 3
    assert file.stat().st_size == size * batches
