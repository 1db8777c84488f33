"""Worker processes hand over without waiting: for each other, for a thread, or for who reads."""

from __future__ import annotations

import multiprocessing
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

import wdstrain as wt
from tests.conftest import write_shards
from wdstrain.decode import flight
from wdstrain.decode.worker_queues import interruptible_context
from wdstrain.runtime.machine import cores

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

SIZE = 100  # samples of a batch, so that each is a message of its own
STUCK, LATER = (
    2,
    7,
)  # the first batch that a worker has beside others, and the last that may begin before it is out, with two workers


class Waits:
    """Notes in files which batch has begun; at the begin of one it waits until another, later one has."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, sample: dict[str, Any]) -> dict[str, int]:
        number = int(sample["cls"])
        if number % SIZE == 0:
            (self.folder / str(number // SIZE)).touch()
        if (
            number == STUCK * SIZE and not (self.folder / "others").exists()
        ):  # the next epoch is begun, too
            end = time.monotonic() + 20
            while not (self.folder / str(LATER)).exists() and time.monotonic() < end:
                time.sleep(0.01)
            (self.folder / "others").write_text(
                " ".join(sorted(one.name for one in self.folder.iterdir()))
            )
        return {"number": number}


@pytest.mark.skipif(torch.__version__ < "2.7", reason="before 2.7 torch gives tasks in turn")
def test_a_batch_that_takes_long_holds_no_other_worker_back_and_all_come_in_order(
    tmp_path: Path,
) -> None:
    write_shards(tmp_path / "s", [12 * SIZE])
    notes = tmp_path / "notes"
    notes.mkdir()
    loader = wt.Loader(
        tmp_path / "s", transform=Waits(notes), batch_size=SIZE, num_workers=2, shuffle=False
    )
    numbers = [number for batch in loader for number in batch["number"].tolist()]
    loader.close()
    assert numbers == list(range(12 * SIZE))
    begun = {int(number) for number in (notes / "others").read_text().split()}
    assert max(begun) == LATER
    assert len(begun) == LATER  # all but the one that waits behind it


MESSAGES = 7


@pytest.fixture
def context() -> Any:
    return interruptible_context(multiprocessing.get_context("spawn"), MESSAGES)


def put_all(queue: Any, texts: list[bytes]) -> None:
    for text in texts:
        queue.put(text)


def test_as_many_messages_as_may_be_under_way_are_put_without_anybody_who_reads(
    context: Any,
) -> None:
    queue = context.Queue()
    queue.put(b"the first, by the thread")
    assert queue.get(timeout=20) == b"the first, by the thread"
    with queue._wlock:  # the thread has let go of it
        pass
    texts = [bytes([65 + i]) * 4000 for i in range(MESSAGES)]
    put_all(queue, texts)
    assert not queue._buffer  # nothing was left to the thread
    assert [queue.get(timeout=20) for _ in texts] == texts


def test_what_fits_into_a_pipe_no_more_is_left_to_the_thread(context: Any) -> None:
    """Or whoever puts it would wait for a reader, who may have gone: a worker that is asked to end would not hear of it."""
    queue = context.Queue()
    texts = [b"%d" % i * 50_000 for i in range(MESSAGES)]
    put_all(queue, texts)
    assert [queue.get(timeout=20) for _ in texts] == texts


def test_what_is_large_and_what_comes_while_another_writes_arrives_too(context: Any) -> None:
    queue = context.Queue()
    large = b"x" * 3_000_000
    queue.put(b"the first")
    assert queue.get(timeout=20) == b"the first"
    with queue._wlock:  # another process is writing
        put_all(queue, [b"1", large, b"2"])
        assert not queue._reader.poll()
    assert [queue.get(timeout=20) for _ in range(3)] == [b"1", large, b"2"]


def test_what_a_process_puts_comes_in_its_order_whatever_is_large(context: Any) -> None:
    """A worker's word that it is done with an older stream must not come before the last answer to that."""
    queue = context.Queue()
    texts = [b"%d" % i * (1 if i % 3 else 1_000_000) for i in range(60)]
    process = context.Process(target=put_all, args=(queue, texts), daemon=True)
    process.start()
    assert [queue.get(timeout=60) for _ in texts] == texts
    process.join(20)
    assert process.exitcode == 0


def test_a_closed_queue_takes_nothing(context: Any) -> None:
    queue = context.Queue()
    queue.put(1)
    assert queue.get(timeout=20) == 1
    queue.close()
    with pytest.raises(ValueError, match="closed"):
        queue.put(2)


# --- how many batches are in flight ----------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 8, 96])
@pytest.mark.parametrize("room", [0, 1, 3, 10, 50, 10_000])
def test_batches_in_flight_of_threads_are_bounded_by_cores_and_room(count: int, room: int) -> None:
    found = flight.of_threads(count, room)
    assert 2 <= found.batches <= max(2, min(2 * count, room))
    assert 1 <= found.decoders <= min(count, found.batches)
    if room >= 2 * count:
        assert found == (2 * count, count, 0, 1)


@pytest.mark.parametrize("count", [1, 2, 7, 64])
@pytest.mark.parametrize("processors", [1, 2, 8, 96])
@pytest.mark.parametrize("room", [0, 1, 3, 10, 50, 10_000])
@pytest.mark.parametrize("together", [1, 2, 4])
def test_batches_in_flight_of_worker_processes_are_bounded_by_cores_and_room(
    count: int, processors: int, room: int, together: int
) -> None:
    found = flight.of_processes(count, processors, room, together)
    assert found.decoders == count
    assert found.messages > count  # each has one, or a worker would never be used
    assert found.messages <= max(count + 1, count + processors + max(2, processors // 2))
    assert found.messages * together <= max((count + 1) * together, room)


class Begun:
    """A transform that notes each sample which it is given in a file, by a byte."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        with open(self.file, "ab", buffering=0) as opened:
            opened.write(b".")
        return {"cls": int(sample["cls"])}


@pytest.mark.parametrize("workers", [0, 1, 6])
def test_no_more_batches_are_begun_than_may_be_in_flight(tmp_path: Path, workers: int) -> None:
    """Batches of 130 samples travel one by one. The loop takes some and waits until nothing is begun any more."""
    size, batches = 130, 40
    shards, file = write_shards(tmp_path / "shards", [size * batches]), tmp_path / "begun"
    with closing(
        wt.Loader(shards, transform=Begun(file), batch_size=size, num_workers=workers)
    ) as loader:
        given = loader.epoch(0, until=1)
        for taken in range(1, 4):
            next(given)
            before = -1
            while before != (before := file.stat().st_size):
                time.sleep(0.3)
            busy = min(workers, cores())
            most = workers + busy + max(2, busy // 2) + 1 if workers else 2 * cores()
            assert before <= (taken + most) * size
        assert sum(1 for _ in given) == batches - 3
    assert file.stat().st_size == size * batches
