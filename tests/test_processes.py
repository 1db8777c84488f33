"""Worker processes hand over without waiting: for each other, for a thread, or for who reads."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import wdstrain as wt
from tests.conftest import write_shards
from wdstrain.decode.worker_queues import careful

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
        if number == STUCK * SIZE and not (self.folder / "others").exists():  # the next epoch is begun, too
            end = time.monotonic() + 20
            while not (self.folder / str(LATER)).exists() and time.monotonic() < end:
                time.sleep(0.01)
            (self.folder / "others").write_text(" ".join(sorted(one.name for one in self.folder.iterdir())))
        return {"number": number}


@pytest.mark.skipif(torch.__version__ < "2.7", reason="before 2.7 torch gives tasks in turn")
def test_a_batch_that_takes_long_holds_no_other_worker_back_and_all_come_in_order(tmp_path: Path) -> None:
    write_shards(tmp_path / "s", [12 * SIZE])
    notes = tmp_path / "notes"
    notes.mkdir()
    loader = wt.Loader(tmp_path / "s", transform=Waits(notes), batch_size=SIZE, num_workers=2, shuffle=False)
    numbers = [number for batch in loader for number in batch["number"].tolist()]
    loader.close()
    assert numbers == list(range(12 * SIZE))
    begun = {int(number) for number in (notes / "others").read_text().split()}
    assert max(begun) == LATER
    assert len(begun) == LATER  # all but the one that waits behind it


MESSAGES = 7


@pytest.fixture
def context() -> Any:
    return careful(multiprocessing.get_context("spawn"), MESSAGES)


def put_all(queue: Any, texts: list[bytes]) -> None:
    for text in texts:
        queue.put(text)


def test_as_many_messages_as_may_be_under_way_are_put_without_anybody_who_reads(context: Any) -> None:
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
