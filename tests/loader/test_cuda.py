"""Loaders on a CUDA device: intact batches while the device is behind, and pinned memory."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest
import torch

import wdstrain as wt
from tests.conftest import keys_of, write_picture_shards
from wdstrain.augment.gpu import IMAGENET
from wdstrain.augment.mixing import DRAWS
from wdstrain.decode.batches import PageLock
from wdstrain.memory import Memory
from wdstrain.shards.kinds import ColumnInfo
from wdstrain.training.distributed import EpochSums
from wdstrain.training.heads import ClassHead
from wdstrain.training.inputs import normalize
from wdstrain.training.tasks import Task

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]

FIELDS = {"image": wt.image(size=(48, 40)), "label": wt.label()}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_picture_shards(tmp_path_factory.mktemp("pictures"), [150, 150])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_are_intact_while_the_device_is_behind(pictures: Path, num_workers: int) -> None:
    """Keep the device busy: memory released too early would be overwritten before the copy."""
    on_device, in_memory = (
        wt.Loader(pictures, FIELDS, batch_size=16, num_workers=num_workers) for _ in range(2)
    )
    sums, expected = [], []
    for _ in range(3):
        for batch in wt.to_device(on_device, "cuda"):
            torch.cuda._sleep(3_000_000)
            sums.append((batch["image"].long().sum((1, 2, 3)), batch["label"]))
            del batch
        expected += [(batch["image"].long().sum((1, 2, 3)), batch["label"]) for batch in in_memory]
    for (pixels, label), (pixels_here, label_here) in zip(sums, expected, strict=True):
        assert torch.equal(pixels.cpu(), pixels_here)
        assert torch.equal(label.cpu(), label_here)
    on_device.close()
    in_memory.close()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batch_memory_is_page_locked_while_it_is_used(pictures: Path, num_workers: int) -> None:
    loader = wt.Loader(pictures, FIELDS, batch_size=16, num_workers=num_workers)
    assert not next(iter(loader))["image"].is_pinned()
    for _ in wt.to_device(loader, "cuda"):
        pass
    batches = loader.epoch(0)
    kept = [next(batches) for _ in range(2)]
    assert all(batch["image"].is_pinned() and batch["label"].is_pinned() for batch in kept)
    address = kept[0]["image"].data_ptr()
    loader.close()
    del loader, batches, _
    gc.collect()
    assert kept[0]["image"].is_pinned()  # as long as it is held
    assert kept[0]["image"].data_ptr() == address
    del kept
    gc.collect()


def test_memory_can_be_pinned_again_and_a_refusal_is_an_error() -> None:
    memory = Memory(1 << 20)
    first = PageLock(memory)
    with pytest.raises(OSError, match="could not be page-locked"):
        PageLock(memory)
    del first
    gc.collect()
    assert isinstance(PageLock(memory), PageLock)


def test_augmentation_on_the_device_equals_augmentation_in_memory() -> None:
    bits = torch.rand(32, 3, 6, 8, generator=torch.Generator().manual_seed(0))
    pixels = (torch.nn.functional.interpolate(bits, (60, 80), mode="bicubic").clamp(0, 1) * 255).to(
        torch.uint8
    )
    batch = {
        "image": pixels.contiguous(memory_format=torch.channels_last),
        "label": torch.arange(32) % 5,
    }
    draws = np.random.default_rng(0).random((32, DRAWS))
    colours = {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.1}
    varied = wt.Augmentation(
        "rrc+flip", size=(48, 40), normalize="imagenet", mixup=0.2, cutmix=1.0, classes=5, **colours
    )
    in_memory = varied(batch, draws)
    on_device = varied({name: value.cuda() for name, value in batch.items()}, draws)
    assert torch.allclose(on_device["label"].cpu(), in_memory["label"], atol=1e-5)
    assert float((on_device["image"].cpu() - in_memory["image"]).abs().mean()) < 3e-3
    assert (
        float((on_device["image"].cpu() - in_memory["image"]).abs().amax()) < 0.1
    )  # the hue of a nearly gray pixel changes with the smallest rounding difference


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_state_counts_the_batches_that_a_loop_got(pictures: Path, num_workers: int) -> None:
    loader = wt.Loader(pictures, FIELDS, batch_size=16, num_workers=num_workers)
    expected = keys_of(loader.epoch(0))
    for step, batch in enumerate(wt.to_device(loader.epoch(0), "cuda")):
        torch.cuda.synchronize()
        assert batch["__key__"] == expected[step]
        assert loader.state_dict()["step"] == (step + 1) % len(loader)
        assert loader.report()["batches"] == step + 1
        if step == 7:
            break
    state = loader.state_dict()
    loader.close()
    resumed = wt.Loader(pictures, FIELDS, batch_size=16)
    resumed.load_state_dict(state)
    assert keys_of(wt.to_device(resumed, "cuda")) == expected[8:]
    resumed.close()


def test_loss_and_metrics_of_a_step_do_not_synchronize_with_the_device() -> None:
    label = ColumnInfo(name="kind", field="cls", kind="class", classes=("a", "b", "c"))
    task = Task((ClassHead(label),))
    pixels = torch.randint(0, 256, (8, 3, 16, 16), dtype=torch.uint8)
    outputs, target = torch.randn(8, 3, device="cuda"), torch.arange(8, device="cuda") % 3
    on_device, images = (
        pixels.cuda(),
        normalize(pixels.cuda(), IMAGENET),
    )  # the first call copies constants to the device
    sums = EpochSums(task, torch.device("cuda"))
    try:
        torch.cuda.set_sync_debug_mode("error")
        images = normalize(on_device, IMAGENET)
        losses = task.losses(outputs, [target])
        sums.add(outputs, [target], losses)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.allclose(images.cpu(), normalize(pixels, IMAGENET), atol=1e-5)
    actual = sums.read()
    assert actual["loss"] == pytest.approx(float(losses.double().sum()))
    assert actual["samples"] == 8
