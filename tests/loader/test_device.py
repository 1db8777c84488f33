"""`to_device` copies one batch ahead of the loop, and the state of the loader does not count it.

These tests run without a GPU. test_cuda.py has the tests on a GPU.
"""

from __future__ import annotations

import threading
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

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


WITH_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
DEVICES = pytest.mark.parametrize("device", ["meta", pytest.param("cuda", marks=WITH_GPU)])


class Stays(torch.Tensor):
    """A tensor whose copy on any device has its values."""

    def to(self, *_: Any, **__: Any) -> Any:
        return self.clone()


def pixels_of(sample: dict[str, Any]) -> dict[str, Any]:
    pixels = torch.tensor(list(sample["png"][:75]), dtype=torch.uint8).view(3, 5, 5)
    return {"image": pixels.as_subclass(Stays)}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_one_batch_is_copied_ahead_and_not_yet_counted(photos: Path, num_workers: int) -> None:
    loader = wt.Loader(photos, transform=pixels_of, batch_size=8, num_workers=num_workers)
    expected = [
        (batch["__key__"], batch["image"].clone(), batch[RNG].tolist()) for batch in loader.epoch(0)
    ]
    copies = Copies()
    for step, batch in enumerate(wt.to_device(loader.epoch(0), "meta", copies)):
        for _ in range(2 if step == 0 else 1 if step + 1 < len(loader) else 0):
            # The copy of the next batch begins before the loop asks for it.
            assert copies.begun.acquire(timeout=60)
        assert len(copies.threads) == min(step + 2, len(loader))
        keys, pixels, bits = expected[step]
        assert (batch["__key__"], batch[RNG].tolist()) == (keys, bits)
        assert torch.equal(batch["image"], pixels)
        assert loader.state_dict()["step"] == (step + 1) % len(loader)
        assert loader.report()["batches"] == step + 1
        assert loader.report()["samples"] == 8 * (step + 1)
    # iter() starts the worker processes in the main thread.
    assert copies.threads[0] == "MainThread"
    assert set(copies.threads[1:]) == {"wdstrain-device"}
    loader.close()


@DEVICES
def test_a_bad_sample_raises_at_its_own_step(tmp_path: Path, device: str) -> None:
    write_picture_shards(tmp_path, [64], bad=[37])
    loader, seen = wt.Loader(tmp_path, FIELDS, batch_size=8, shuffle=False), list[str]()
    with pytest.raises(wt.SampleError, match="s037"):
        seen.extend(batch["__key__"][0] for batch in wt.to_device(loader, device))
    assert seen == ["s000", "s008", "s016", "s024"]
    assert loader.state_dict()["step"] == 4


@DEVICES
def test_a_loop_that_ends_early_leaves_no_thread(photos: Path, device: str) -> None:
    loader = wt.Loader(photos, FIELDS, batch_size=8)
    for _ in range(3):
        for _ in wt.to_device(loader, device):
            break
        assert "wdstrain-device" not in [thread.name for thread in threading.enumerate()]
    with pytest.raises(ZeroDivisionError):
        _ = [1 // 0 for _ in wt.to_device(loader, device)]
    loader.close()


def test_a_loop_ends_though_the_next_batch_never_arrives(tmp_path: Path) -> None:
    """The server stops answering at the third shard. The loop breaks, and close joins no thread."""
    wt.index(write_shards(tmp_path, [20, 20, 20]))
    asked, released = threading.Event(), threading.Event()

    def stalled(handler: Handler, path: Path, start: int, stop: int) -> bool:
        if path.name != "part-002.tar" or released.is_set():
            return False
        asked.set()
        return stall(0, released)(handler, path, start, stop)

    with (
        serving(tmp_path, faults=[stalled] * 100) as served,
        wt.Loader(f"{served.url}/index.json", batch_size=2, shuffle=False) as loader,
    ):
        batches: Any = wt.to_device(loader, "meta")
        assert len(list(islice(batches, 20))) == 20  # the samples of two shards
        assert asked.wait(30)
        batches.close()
        assert "wdstrain-device" not in [thread.name for thread in threading.enumerate()]
        loader.close()
        released.set()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_too_many_bad_samples_end_the_loop(tmp_path: Path, num_workers: int) -> None:
    write_picture_shards(tmp_path, [90], bad=range(0, 90, 9))
    options: dict[str, Any] = {"on_error": "replace", "max_errors": 0.03}
    loader = wt.Loader(tmp_path, FIELDS, batch_size=4, num_workers=num_workers, **options)
    with pytest.raises(wt.SampleError, match="more than max_errors=0.03 allows"):
        list(wt.to_device(loader, "meta"))
    assert "wdstrain-device" not in [thread.name for thread in threading.enumerate()]
    assert live_threads_and_children() == []  # the error closed the loader
