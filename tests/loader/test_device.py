"""Batches are brought to a device one ahead of the loop, and nothing else of the loader can tell.

Without a GPU the roads are those of memory here: what brings a batch is a copy in memory, everything else is as on a device.
What a GPU does with it is in test_cuda.py.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import wdstrain as wt
from tests.conftest import Sample, picture, write_tar
from wdstrain.loader.device import Sent, ahead
from wdstrain.loader.epoch import Batches

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

FIELDS = {"image": wt.image(size=(20, 24)), "label": wt.label()}


class _Arrived:
    def synchronize(self) -> None:
        """It is there at once."""


class _Copies:
    """Copies a batch in memory; `begun` is released each time."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.threads: list[str] = []

    def begin(self, batches: Batches) -> None:
        """There is nothing to do for memory here."""

    def send(self, batch: dict[str, Any], draws: Callable[[int], Any] | None) -> Sent:
        copied = {
            name: value.clone() if isinstance(value, torch.Tensor) else value
            for name, value in batch.items()
        }
        copied["draws"] = draws(3).tolist() if draws is not None else None
        self.threads.append(threading.current_thread().name)
        self.begun.release()
        return Sent(copied, _Arrived(), None)

    def received(self, sent: Sent) -> dict[str, Any]:
        return sent.batch


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
def test_the_next_batch_is_on_its_way_and_the_state_is_that_of_the_one_the_loop_has(
    pictures: Path, num_workers: int
) -> None:
    loader = wt.Loader(pictures, FIELDS, batch_size=8, num_workers=num_workers)
    plain = loader.epoch(0)
    expected = [
        (batch["__key__"], batch["image"].clone(), plain.draws(3).tolist()) for batch in plain
    ]
    copies = _Copies()
    for step, batch in enumerate(ahead(loader.epoch(0), copies)):
        for _ in range(2 if step == 0 else 1 if step + 1 < len(loader) else 0):
            assert copies.begun.acquire(
                timeout=60
            )  # the one after this is begun, without being asked for
        assert len(copies.threads) == min(step + 2, len(loader))
        keys, pixels, draws = expected[step]
        assert (batch["__key__"], batch["draws"]) == (keys, draws)
        assert torch.equal(batch["image"], pixels)
        assert loader.state_dict()["step"] == (step + 1) % len(loader)
        assert loader.report()["batches"] == step + 1
        assert loader.report()["samples"] == 8 * (step + 1)
    assert copies.threads[0] == "MainThread"  # it starts the worker processes
    assert set(copies.threads[1:]) == {"wdstrain-device"}
    loader.close()


def test_epochs_follow_one_another_and_a_break_goes_on_from_the_batch_that_was_given(
    pictures: Path,
) -> None:
    loader = wt.Loader(pictures, FIELDS, batch_size=8)
    expected = [[batch["__key__"] for batch in loader.epoch(number)] for number in range(2)]
    assert [
        [batch["__key__"] for batch in ahead(loader.epoch(number), _Copies())]
        for number in range(2)
    ] == expected
    for step, _ in enumerate(ahead(loader.epoch(0), _Copies())):
        if step == 2:
            break
    state = loader.state_dict()
    assert state["step"] == 3
    loader.load_state_dict(state)
    assert [batch["__key__"] for batch in ahead(iter(loader), _Copies())] == expected[0][3:]
    loader.close()


def test_a_bad_sample_is_the_error_of_its_own_step(tmp_path: Path) -> None:
    samples: list[Sample] = [
        (f"s{n:03d}", {"png": picture(n) if n != 37 else b"no picture", "cls": b"1"})
        for n in range(64)
    ]
    write_tar(tmp_path / "p.tar", samples)
    loader, seen = wt.Loader(tmp_path, FIELDS, batch_size=8, shuffle=False), list[str]()
    with pytest.raises(wt.SampleError, match="s037"):
        seen.extend(batch["__key__"][0] for batch in ahead(iter(loader), _Copies()))
    assert seen == ["s000", "s008", "s016", "s024"]
    assert loader.state_dict()["step"] == 4


def test_a_loop_that_ends_early_leaves_no_thread(pictures: Path) -> None:
    loader = wt.Loader(pictures, FIELDS, batch_size=8)
    for _ in range(3):
        for _ in ahead(iter(loader), _Copies()):
            break
        assert "wdstrain-device" not in [thread.name for thread in threading.enumerate()]
    with pytest.raises(ZeroDivisionError):
        _ = [1 // 0 for _ in ahead(iter(loader), _Copies())]
    loader.close()


def test_a_batch_that_never_comes_does_not_keep_a_loop_from_ending(
    pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk answers no more; the loop is left, and its thread is not waited for without end."""
    from wdstrain.reader.reader import Reader

    loader = wt.Loader(pictures, FIELDS, batch_size=2, shuffle_buffer=4)
    never = threading.Event()
    original = Reader.collect

    def stuck(self: Reader, epoch: int, step: int) -> Any:
        if step < 12:
            return original(self, epoch, step)
        never.set()
        with self._lock:
            self._lock.wait_for(lambda: self._error is not None)
        raise wt.WdstrainError("the reader was stopped")

    monkeypatch.setattr(Reader, "collect", stuck)
    copies, steps = _Copies(), 0
    for steps, _ in enumerate(ahead(iter(loader), copies)):
        for _ in range(2 if steps == 0 else 1):  # the next one is begun, or will never be
            while not never.is_set() and not copies.begun.acquire(timeout=0.01):
                pass
        if never.is_set():
            break
    assert 0 < steps < 12
    assert "wdstrain-device" not in [thread.name for thread in threading.enumerate()]
    loader.close()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_too_many_bad_samples_end_the_loop(tmp_path: Path, num_workers: int) -> None:
    """While the next batch is being taken in the other thread."""
    samples: list[Sample] = [
        (f"s{n:03d}", {"png": picture(n) if n % 9 else b"no picture", "cls": b"1"})
        for n in range(90)
    ]
    write_tar(tmp_path / "p.tar", samples)
    loader = wt.Loader(
        tmp_path, FIELDS, batch_size=4, num_workers=num_workers, on_bad="replace", max_bad=0.03
    )
    with pytest.raises(wt.SampleError, match="more than max_bad=0.03 allows"):
        list(ahead(iter(loader), _Copies()))
    assert "wdstrain-device" not in [thread.name for thread in threading.enumerate()]
    assert loader._pipeline is None


def test_a_loader_can_be_closed_while_a_batch_is_being_taken(pictures: Path) -> None:
    loader = wt.Loader(pictures, FIELDS, batch_size=4, num_workers=2)
    batches = ahead(iter(loader), _Copies())
    next(batches)
    loader.close()
    with pytest.raises(wt.WdstrainError):
        list(batches)


def test_what_a_copy_takes_is_in_the_report(pictures: Path) -> None:
    """Of the batches that the loop was given, not of the one ahead."""

    class Far(_Copies):
        def send(self, batch: dict[str, Any], draws: Callable[[int], Any] | None) -> Sent:
            begun = time.perf_counter()
            while time.perf_counter() < begun + 0.02:
                pass
            return super().send(batch, draws)

    loader = wt.Loader(pictures, FIELDS, batch_size=20)
    for step, _ in enumerate(ahead(loader.epoch(0), Far())):
        assert 0.02 * (step + 1) <= loader.report()["copy_seconds"]
    loader.close()
