"""Worker processes wait neither for each other nor for a reader; batches in flight are bounded."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path
from queue import Empty
from typing import Any

import numpy as np
import pytest
import torch

import wdstrain as wt
from tests.conftest import quick_and_slow, write_shards
from wdstrain.decode import workers
from wdstrain.decode.worker_processes import MessageMemory, interruptible_context, message_in

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
            for batch, seconds in ((LAST, 20), (LAST + 1, 0.5)):  # the second must not begin
                end = time.monotonic() + seconds
                while not (self.folder / str(batch)).exists() and time.monotonic() < end:
                    time.sleep(0.01)
            (self.folder / "begun").write_text(
                " ".join(sorted(file.name for file in self.folder.iterdir()))
            )
        return {"number": number}


@pytest.mark.skipif(torch.__version__ < "2.7", reason="before 2.7 torch gives tasks by turns")
def test_a_slow_batch_blocks_no_other_worker_and_keeps_the_order(tmp_path: Path) -> None:
    write_shards(tmp_path / "s", [12 * SIZE])
    notes = tmp_path / "notes"
    notes.mkdir()
    options: dict[str, Any] = {"batch_size": SIZE, "num_workers": 2, "shuffle": False}
    loader = wt.Loader(tmp_path / "s", transform=WaitsForLaterBatch(notes), **options)
    numbers = [number for batch in loader for number in batch["number"].tolist()]
    loader.close()
    assert numbers == list(range(12 * SIZE))
    begun = {int(number) for number in (notes / "begun").read_text().split()}
    assert max(begun) == LAST
    assert len(begun) == LAST  # all but the batch that waits behind the slow one


MESSAGES = {
    "small": {"a": 1, "b": ["text", b"bytes"]},
    "large": [np.arange(500_000), b"x" * 3_000_000],
    "many": [np.full(5000, number, np.int16) for number in range(2000)],
    "tensors": [torch.arange(12.0).reshape(3, 4).T, torch.ones(200_000)],
    "empty": [np.zeros((0, 3)), torch.zeros(0), ""],
}


def as_lists(value: Any) -> Any:
    """Return a message with its arrays and tensors as (dtype, nested list)."""
    if isinstance(value, list):
        return [as_lists(part) for part in value]
    is_array = isinstance(value, (np.ndarray, torch.Tensor))
    return (str(value.dtype), value.tolist()) if is_array else value


def read(memory: MessageMemory, place: Any, *, copy: bool = True) -> Any:
    return message_in(memory.map(place), place, copy=copy)


@pytest.fixture(params=quick_and_slow(["fork", "spawn"], 1))
def context(request: pytest.FixtureRequest) -> Any:
    return interruptible_context(multiprocessing.get_context(request.param), [])


def answer(questions: Any, answers: Any, memory: Any) -> None:
    while (item := questions.get(timeout=60)) is not None:
        answers.put(memory.write(item[0], [item[0], read(memory, item)]))


def test_workers_answer_messages_of_any_size_without_waiting_for_a_reader(context: Any) -> None:
    questions, answers = [context.Queue() for _ in range(2)], context.Queue()
    memory, messages = MessageMemory(), list(MESSAGES.values())
    workers = [
        context.Process(target=answer, args=(queue, answers, memory), daemon=True)
        for queue in questions
    ]
    for worker in workers:
        worker.start()
    for number, message in enumerate(messages):
        questions[number % 2].put(memory.write(number, message))
    for queue in questions:
        queue.put(None)
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    received = sorted(answers.get(timeout=20) for _ in messages)
    for number, message in enumerate(messages):
        assert as_lists(read(memory, received[number])) == [number, as_lists(message)]


def test_an_empty_queue_is_empty_and_a_closed_one_ignores_the_request_to_end(context: Any) -> None:
    """The DataLoader's iterator may be finalized after its queues."""
    queue = context.Queue()
    with pytest.raises(Empty):
        queue.get(timeout=0.01)
    queue.put(1)
    assert queue.get(timeout=20) == 1
    queue.close()
    queue.put(None)


# --- batches in flight ---


@pytest.mark.parametrize("count", [1, 2, 7, 64])
@pytest.mark.parametrize("processors", [1, 2, 8, 96])
@pytest.mark.parametrize("fits", [0, 1, 3, 10, 50, 10_000])
@pytest.mark.parametrize("batches_per_message", [1, 2, 4])
def test_batches_in_flight_are_bounded_by_cores_and_memory(
    count: int, processors: int, fits: int, batches_per_message: int
) -> None:
    limits = workers.limits_of(count, processors, fits, batches_per_message)
    assert limits.decoders == count
    assert limits.messages > count  # each worker needs a message
    assert limits.messages <= max(count + 1, count + processors + max(2, processors // 2))
    assert limits.messages * batches_per_message <= max((count + 1) * batches_per_message, fits)
    threads = workers.limits_of(0, processors, fits, 1)
    assert 2 <= threads.batches <= max(2, min(2 * processors, fits))
    assert 1 <= threads.decoders <= min(processors, threads.batches)
    assert fits < 2 * processors or threads == (2 * processors, processors, 1)


def look(event: Any, end: Any) -> None:
    end.put("begun")
    while not event.is_set():
        pass
    end.put("notified")


def test_workers_end_on_request_after_a_worker_was_killed_while_polling() -> None:
    """A killed process keeps the lock of a multiprocessing event, so `set` would wait forever."""
    context: Any = interruptible_context(multiprocessing.get_context("fork"), [])
    event, end = context.Event(), context.Queue()
    for is_last in [False] * 20 + [True]:
        worker = context.Process(target=look, args=(event, end))
        worker.start()
        assert end.get(timeout=20) == "begun"
        if not is_last:
            worker.kill()
            worker.join()
    event.set()
    assert end.get(timeout=20) == "notified"
    worker.join()
