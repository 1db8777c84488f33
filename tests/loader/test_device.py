"""`to_device` copies one batch ahead of the loop, and the state of the loader does not count it.

These tests run without a GPU. test_cuda.py has the tests on a GPU.
"""

from __future__ import annotations

import io
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import wdstrain as wt
from tests.conftest import live_threads_and_children, write_picture_shards, write_shards
from tests.support.servers import Handler, serving, stall
from wdstrain.augment.gpu import RNG

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

FIELDS = {"image": wt.image(size=(20, 24)), "label": wt.label()}


class Copies:
    """Augmentation that notes the copies; `begun` is released at every one."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.threads: list[str] = []

    def check(self, batch: dict[str, Any]) -> None:
        """Accept any batch."""

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        self.threads.append(threading.current_thread().name)
        self.begun.release()
        return batch


def copied_ahead(batches: Any, copies: Any = None, device: str = "meta") -> Any:
    """Return the batches on a device: "meta" needs no GPU, and its tensors have no values."""
    return wt.to_device(batches, device, copies)


WITH_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
DEVICES = pytest.mark.parametrize("device", ["meta", pytest.param("cuda", marks=WITH_GPU)])


class Stays(torch.Tensor):
    """A tensor whose copy on any device has its values."""

    def to(self, *_: Any, **__: Any) -> Any:
        return self.clone()


def pixels_of(sample: dict[str, Any]) -> dict[str, Any]:
    pixels = np.array(Image.open(io.BytesIO(sample["png"])).convert("RGB").resize((24, 20)))
    return {"image": torch.from_numpy(pixels).permute(2, 0, 1).as_subclass(Stays)}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_one_batch_is_copied_ahead_and_not_yet_counted(photos: Path, num_workers: int) -> None:
    loader = wt.Loader(photos, transform=pixels_of, batch_size=8, num_workers=num_workers)
    expected = [
        (batch["__key__"], batch["image"].clone(), batch[RNG].tolist()) for batch in loader.epoch(0)
    ]
    copies = Copies()
    for step, batch in enumerate(copied_ahead(loader.epoch(0), copies)):
        for _ in range(2 if step == 0 else 1 if step + 1 < len(loader) else 0):
            assert copies.begun.acquire(
                timeout=60
            )  # the copy of the next batch has begun before the loop asks for it
        assert len(copies.threads) == min(step + 2, len(loader))
        keys, pixels, bits = expected[step]
        assert (batch["__key__"], batch[RNG].tolist()) == (keys, bits)
        assert torch.equal(batch["image"], pixels)
        assert loader.state_dict()["step"] == (step + 1) % len(loader)
        assert loader.report()["batches"] == step + 1
        assert loader.report()["samples"] == 8 * (step + 1)
    assert (
        copies.threads[0] == "MainThread"
    )  # iter() in the main thread starts the worker processes
    assert set(copies.threads[1:]) == {"wdstrain-device"}
    loader.close()


@DEVICES
def test_a_bad_sample_raises_at_its_own_step(tmp_path: Path, device: str) -> None:
    write_picture_shards(tmp_path, [64], bad=[37])
    loader, seen = wt.Loader(tmp_path, FIELDS, batch_size=8, shuffle=False), list[str]()
    with pytest.raises(wt.SampleError, match="s037"):
        seen.extend(batch["__key__"][0] for batch in copied_ahead(loader, None, device))
    assert seen == ["s000", "s008", "s016", "s024"]
    assert loader.state_dict()["step"] == 4


@DEVICES
def test_a_loop_that_ends_early_leaves_no_thread(photos: Path, device: str) -> None:
    loader = wt.Loader(photos, FIELDS, batch_size=8)
    for _ in range(3):
        for _ in copied_ahead(loader, None, device):
            break
        assert "wdstrain-device" not in [thread.name for thread in threading.enumerate()]
    with pytest.raises(ZeroDivisionError):
        _ = [1 // 0 for _ in copied_ahead(loader, None, device)]
    loader.close()


@pytest.fixture
def silent(tmp_path: Path) -> Iterator[tuple[str, threading.Event, threading.Event]]:
    """A set whose server stops answering at the third shard: (address, is asked, goes on)."""
    wt.index(write_shards(tmp_path, [20, 20, 20]))
    asked, released = threading.Event(), threading.Event()

    def stalled(handler: Handler, path: Path, start: int, stop: int) -> bool:
        if path.name != "part-002.tar" or released.is_set():
            return False
        asked.set()
        return stall(0, released)(handler, path, start, stop)

    with serving(tmp_path, faults=[stalled] * 100) as served:
        yield f"{served.url}/index.json", asked, released
        released.set()


def join_fetchers() -> None:
    """Wait for the threads that wait for the server no longer."""
    for thread in threading.enumerate():
        if thread.name.startswith("wdstrain-fetch"):
            thread.join(30)


def test_a_loop_ends_though_the_next_batch_never_arrives(silent: Any) -> None:
    """The server stops answering; the loop breaks, and close does not join its thread forever."""
    address, asked, released = silent
    with wt.Loader(address, batch_size=2, shuffle=False) as loader:
        steps = 0
        for steps, _ in enumerate(copied_ahead(loader, Copies()), 1):
            if steps == 20:  # the samples of two shards; the next batch never arrives
                assert asked.wait(30)
                break
        assert steps == 20
        assert "wdstrain-device" not in [thread.name for thread in threading.enumerate()]
    released.set()
    join_fetchers()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_too_many_bad_samples_end_the_loop(tmp_path: Path, num_workers: int) -> None:
    """The error occurs while the copy thread takes the next batch."""
    write_picture_shards(tmp_path, [90], bad=range(0, 90, 9))
    options: dict[str, Any] = {"on_error": "replace", "max_errors": 0.03}
    loader = wt.Loader(tmp_path, FIELDS, batch_size=4, num_workers=num_workers, **options)
    with pytest.raises(wt.SampleError, match="more than max_errors=0.03 allows"):
        list(copied_ahead(loader))
    assert "wdstrain-device" not in [thread.name for thread in threading.enumerate()]
    assert live_threads_and_children() == []  # the error closed the loader


def test_the_report_contains_the_time_of_copies(photos: Path) -> None:
    """The report counts the batches that the loop received, not the batch ahead."""

    class Slow(Copies):
        def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
            begun = time.perf_counter()
            while time.perf_counter() < begun + 0.02:
                pass
            return batch

    loader = wt.Loader(photos, FIELDS, batch_size=20)
    for step, _ in enumerate(copied_ahead(loader.epoch(0), Slow())):
        assert 0.02 * (step + 1) <= loader.report()["copy_seconds"]
    loader.close()


FORKED_WITH: list[list[str]] = []  # names of the threads of the package at each fork


def _note_threads() -> None:
    names = [thread.name for thread in threading.enumerate()]
    FORKED_WITH.append([name for name in names if name.startswith("wdstrain")])


@pytest.mark.slow
def test_workers_start_before_any_thread_after_a_break_at_a_silent_server(silent: Any) -> None:
    """A forked worker inherits the locks of threads that it does not have."""
    address, _, released = silent
    options: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "fork"}
    fields, copies = {"x": wt.text()}, Copies()
    with wt.Loader(address, fields, batch_size=2, shuffle=False, **options) as loader:
        for step, _ in enumerate(copied_ahead(loader, copies)):
            if step == 0:
                assert copies.begun.acquire(timeout=30)
            if not copies.begun.acquire(timeout=3):  # the next batch does not arrive
                break
        released.set()
        join_fetchers()
        os.register_at_fork(before=_note_threads)
        FORKED_WITH.clear()
        next(iter(copied_ahead(loader)))
        forked_with = list(FORKED_WITH)
    assert all(names == [] for names in forked_with)
