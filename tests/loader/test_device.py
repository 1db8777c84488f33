"""`to_device` copies one batch ahead of the loop, and the state of the loader does not count it.

These tests run without a GPU: the copy goes from memory to memory. test_cuda.py has the tests on a
GPU.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import wdstrain as wt
from tests.conftest import Sample, live_threads_and_children, picture, write_shards, write_tar
from tests.support.known_faults import known_fault
from tests.support.servers import Handler, serving, stall
from wdstrain.loader.device import DeviceCopy, copy_ahead
from wdstrain.loader.epoch import EpochBatches

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

FIELDS = {"image": wt.image(size=(20, 24)), "label": wt.label()}


class _Arrived:
    def synchronize(self) -> None:
        """Return at once."""


class _Copies:
    """Copy batches in memory; `begun` is released at every copy."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.threads: list[str] = []

    def prepare(self, batches: EpochBatches) -> None:
        """Do nothing: a copy in memory needs no preparation."""

    def copy(self, batch: dict[str, Any], draws: Callable[[int], Any] | None) -> DeviceCopy:
        copied = {
            name: value.clone() if isinstance(value, torch.Tensor) else value
            for name, value in batch.items()
        }
        copied["draws"] = draws(3).tolist() if draws is not None else None
        self.threads.append(threading.current_thread().name)
        self.begun.release()
        return DeviceCopy(copied, _Arrived(), None)

    def receive(self, copy: DeviceCopy) -> dict[str, Any]:
        return copy.batch


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    for shard, numbers in enumerate([range(23), range(23, 60)]):
        samples: list[Sample] = [
            (f"s{n:03d}", {"png": picture(n), "cls": b"%d" % n}) for n in numbers
        ]
        write_tar(folder / f"p-{shard}.tar", samples)
    return folder


@pytest.mark.parametrize("num_workers", [0, 2])
def test_one_batch_is_copied_ahead_and_the_state_does_not_count_it(
    pictures: Path, num_workers: int
) -> None:
    loader = wt.Loader(pictures, FIELDS, batch_size=8, num_workers=num_workers)
    plain = loader.epoch(0)
    expected = [
        (batch["__key__"], batch["image"].clone(), plain.draws(3).tolist()) for batch in plain
    ]
    copies = _Copies()
    for step, batch in enumerate(copy_ahead(loader.epoch(0), copies)):
        for _ in range(2 if step == 0 else 1 if step + 1 < len(loader) else 0):
            assert copies.begun.acquire(
                timeout=60
            )  # the copy of the next batch has begun before the loop asks for it
        assert len(copies.threads) == min(step + 2, len(loader))
        keys, pixels, draws = expected[step]
        assert (batch["__key__"], batch["draws"]) == (keys, draws)
        assert torch.equal(batch["image"], pixels)
        assert loader.state_dict()["step"] == (step + 1) % len(loader)
        assert loader.report()["batches"] == step + 1
        assert loader.report()["samples"] == 8 * (step + 1)
    assert (
        copies.threads[0] == "MainThread"
    )  # iter() in the main thread starts the worker processes
    assert set(copies.threads[1:]) == {"wdstrain-device"}
    loader.close()


def test_epochs_are_consecutive_and_a_state_after_a_break_counts_delivered_batches(
    pictures: Path,
) -> None:
    loader = wt.Loader(pictures, FIELDS, batch_size=8)
    expected = [[batch["__key__"] for batch in loader.epoch(number)] for number in range(2)]
    assert [
        [batch["__key__"] for batch in copy_ahead(loader.epoch(number), _Copies())]
        for number in range(2)
    ] == expected
    for step, _ in enumerate(copy_ahead(loader.epoch(0), _Copies())):
        if step == 2:
            break
    state = loader.state_dict()
    assert state["step"] == 3
    loader.load_state_dict(state)
    assert [batch["__key__"] for batch in copy_ahead(iter(loader), _Copies())] == expected[0][3:]
    loader.close()


def test_a_bad_sample_raises_at_its_own_step(tmp_path: Path) -> None:
    samples: list[Sample] = [
        (f"s{n:03d}", {"png": picture(n) if n != 37 else b"no picture", "cls": b"1"})
        for n in range(64)
    ]
    write_tar(tmp_path / "p.tar", samples)
    loader, seen = wt.Loader(tmp_path, FIELDS, batch_size=8, shuffle=False), list[str]()
    with pytest.raises(wt.SampleError, match="s037"):
        seen.extend(batch["__key__"][0] for batch in copy_ahead(iter(loader), _Copies()))
    assert seen == ["s000", "s008", "s016", "s024"]
    assert loader.state_dict()["step"] == 4


def test_a_loop_that_ends_early_leaves_no_thread(pictures: Path) -> None:
    loader = wt.Loader(pictures, FIELDS, batch_size=8)
    for _ in range(3):
        for _ in copy_ahead(iter(loader), _Copies()):
            break
        assert "wdstrain-device" not in [thread.name for thread in threading.enumerate()]
    with pytest.raises(ZeroDivisionError):
        _ = [1 // 0 for _ in copy_ahead(iter(loader), _Copies())]
    loader.close()


def test_a_loop_ends_though_the_next_batch_never_arrives(tmp_path: Path) -> None:
    """The server stops answering; the loop breaks, and close does not join its thread forever."""
    write_shards(tmp_path, [20, 20, 20])
    wt.index(tmp_path)
    stalled, released = threading.Event(), threading.Event()

    def stall_at_the_last_shard(handler: Handler, path: Path, start: int, stop: int) -> bool:
        if path.name != "part-002.tar":
            return False
        stalled.set()
        return stall(0, released)(handler, path, start, stop)

    with serving(tmp_path, faults=[stall_at_the_last_shard] * 100) as served:
        loader = wt.Loader(f"{served.url}/index.json", batch_size=2, shuffle=False)
        copies, steps = _Copies(), 0
        for steps, _ in enumerate(copy_ahead(iter(loader), copies), 1):
            if steps == 20:  # the samples of two shards; the next batch never arrives
                assert stalled.wait(30)
                break
        assert steps == 20
        assert "wdstrain-device" not in [thread.name for thread in threading.enumerate()]
        loader.close()
        released.set()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_too_many_bad_samples_end_the_loop(tmp_path: Path, num_workers: int) -> None:
    """The error occurs while the copy thread takes the next batch."""
    samples: list[Sample] = [
        (f"s{n:03d}", {"png": picture(n) if n % 9 else b"no picture", "cls": b"1"})
        for n in range(90)
    ]
    write_tar(tmp_path / "p.tar", samples)
    loader = wt.Loader(
        tmp_path, FIELDS, batch_size=4, num_workers=num_workers, on_error="replace", max_errors=0.03
    )
    with pytest.raises(wt.SampleError, match="more than max_errors=0.03 allows"):
        list(copy_ahead(iter(loader), _Copies()))
    assert "wdstrain-device" not in [thread.name for thread in threading.enumerate()]
    assert live_threads_and_children() == []  # the error closed the loader


def test_a_loader_can_be_closed_while_a_batch_is_being_taken(pictures: Path) -> None:
    loader = wt.Loader(pictures, FIELDS, batch_size=4, num_workers=2)
    batches = copy_ahead(iter(loader), _Copies())
    next(batches)
    loader.close()
    with pytest.raises(wt.WdstrainError):
        list(batches)


def test_the_report_contains_the_time_of_copies(pictures: Path) -> None:
    """The report counts the batches that the loop received, not the batch ahead."""

    class Far(_Copies):
        def copy(self, batch: dict[str, Any], draws: Callable[[int], Any] | None) -> DeviceCopy:
            begun = time.perf_counter()
            while time.perf_counter() < begun + 0.02:
                pass
            return super().copy(batch, draws)

    loader = wt.Loader(pictures, FIELDS, batch_size=20)
    for step, _ in enumerate(copy_ahead(loader.epoch(0), Far())):
        assert 0.02 * (step + 1) <= loader.report()["copy_seconds"]
    loader.close()


FORKED_WITH: list[list[str]] = []  # names of the threads of the package at each fork


def _note_threads() -> None:
    names = [thread.name for thread in threading.enumerate()]
    FORKED_WITH.append([name for name in names if name.startswith("wdstrain")])


@pytest.mark.slow
@known_fault("suspected/fork_beside_a_thread_after_a_break")
def test_workers_start_before_any_thread_after_a_break_at_a_silent_server(tmp_path: Path) -> None:
    """A forked worker inherits the locks of threads that it does not have."""
    write_shards(tmp_path, [20, 20, 20])
    wt.index(tmp_path)
    released = threading.Event()

    def stall_at_the_last_shard(handler: Handler, path: Path, start: int, stop: int) -> bool:
        is_stalled = path.name == "part-002.tar" and not released.is_set()
        return is_stalled and stall(0, released)(handler, path, start, stop)

    options: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "fork"}
    with serving(tmp_path, faults=[stall_at_the_last_shard] * 100) as served:
        loader = wt.Loader(
            f"{served.url}/index.json", {"x": wt.text()}, batch_size=2, shuffle=False, **options
        )
        try:
            copies = _Copies()
            assert copies.begun.acquire(blocking=False) is False
            for step, _ in enumerate(copy_ahead(iter(loader), copies)):
                if step == 0:
                    assert copies.begun.acquire(timeout=30)
                if not copies.begun.acquire(timeout=3):  # the next batch does not arrive
                    break
            released.set()
            os.register_at_fork(before=_note_threads)
            FORKED_WITH.clear()
            next(iter(copy_ahead(iter(loader), _Copies())))
            forked_with = list(FORKED_WITH)
        finally:
            released.set()
            loader.close()
    assert all(names == [] for names in forked_with)
