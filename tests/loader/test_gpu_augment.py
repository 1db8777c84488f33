"""Batch augmentation equals torchvision's on each image, with the random numbers of each sample."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional

import wdstrain as wt
from tests.conftest import Sample, encoded, write_tar
from wdstrain.augment.gpu import IMAGENET
from wdstrain.augment.mixing import DRAWS, beta_quantiles
from wdstrain.decode.transforms import random_crops

FIELDS = {"image": wt.image(size=32), "label": wt.label()}
_FACTOR, _ORDER, _SHARE = 23, 27, 29  # columns of a sample's draws that an augmentation uses


def _pictures(count: int, height: int = 40, width: int = 56) -> torch.Tensor:
    """Smooth images in which any shift shows. uint8[count, 3, height, width], channels last."""
    bits = torch.rand(count, 3, 6, 8, generator=torch.Generator().manual_seed(0))
    large = torch.nn.functional.interpolate(bits, (height, width), mode="bicubic").clamp(0, 1)
    return (large * 255).to(torch.uint8).contiguous(memory_format=torch.channels_last)


def _draws(count: int) -> Any:
    return np.random.default_rng(1).random((count, DRAWS))


def _distance(first: Any, second: Any) -> float:
    """Kolmogorov-Smirnov statistic of two samples: largest difference of distributions."""
    ends = np.sort(np.concatenate([first, second]))
    below = [
        np.searchsorted(np.sort(part), ends, side="right") / len(part) for part in (first, second)
    ]
    return float(np.abs(below[0] - below[1]).max())


def _changed(pictures: torch.Tensor, draws: Any = None, **options: Any) -> torch.Tensor:
    """Return the images after an augmentation."""
    draws = _draws(len(pictures)) if draws is None else draws
    output: torch.Tensor = wt.Augmentation(**options)({"image": pictures}, draws)["image"]
    return output


def _cropped(image: torch.Tensor, box: Any, size: list[int]) -> torch.Tensor:
    """Return torchvision's crop of an image, resized."""
    return functional.resized_crop(image.float() / 255, *box, size, antialias=True)


def test_crop_resize_and_flip_equal_torchvision() -> None:
    pictures, draws = _pictures(40), _draws(40)
    output = _changed(pictures, draws, augment="rrc+flip", size=(24, 20), scale=(0.35, 0.9))
    assert output.shape == (40, 3, 24, 20)
    assert output.is_contiguous(memory_format=torch.channels_last)
    for row, box in enumerate(random_crops(40, 56, draws, (0.35, 0.9)).tolist()):
        reference = _cropped(pictures[row], box, [24, 20])
        reference = functional.horizontal_flip(reference) if draws[row, 22] < 0.5 else reference
        assert torch.allclose(output[row], reference, atol=1e-4)


def test_without_a_crop_the_center_is_cropped_as_on_the_cpu() -> None:
    pictures = _pictures(8)
    reference = _cropped(pictures, (0, 8, 40, 40), [20, 20])
    assert torch.allclose(_changed(pictures, size=20), reference, atol=1e-4)
    assert torch.equal(_changed(pictures), pictures.float() / 255)


def test_color_changes_equal_torchvision_in_the_order_of_each_image() -> None:
    pictures, draws = _pictures(60), _draws(60)
    output = _changed(pictures, draws, brightness=0.4, contrast=0.6, saturation=0.8, hue=0.3)
    changes: list[tuple[Callable[..., torch.Tensor], float, float]] = [
        (functional.adjust_brightness, 0.6, 1.4),
        (functional.adjust_contrast, 0.4, 1.6),
        (functional.adjust_saturation, 0.2, 1.8),
        (functional.adjust_hue, -0.3, 0.3),
    ]
    seen = set()
    for row in range(60):
        reference = pictures[row].float() / 255
        order = list(permutations(range(4)))[int(draws[row, _ORDER] * 24)]
        seen.add(order)
        for which in order:
            change, low, high = changes[which]
            reference = change(reference, low + (high - low) * draws[row, _FACTOR + which])
        assert torch.allclose(output[row], reference, atol=2e-3), order
    assert len(seen) > 15


def test_mixup_shares_follow_the_beta_distribution() -> None:
    at = np.linspace(0, 1, 101)
    assert np.allclose(np.interp(at, *beta_quantiles(1.0)), at, atol=1e-6)
    assert np.allclose(np.interp(at, *beta_quantiles(0.5)), np.sin(np.pi * at / 2) ** 2, atol=1e-4)
    sampled = torch.distributions.Beta(0.2, 0.2).sample((20_000,)).numpy()
    ours = np.interp(np.random.default_rng(0).random(20_000), *beta_quantiles(0.2))
    assert _distance(ours, sampled) < 0.02


def _numbered(labels: torch.Tensor, size: tuple[int, int]) -> dict[str, torch.Tensor]:
    """Return a batch of plain images whose pixels are their labels."""
    images = labels.to(torch.uint8).view(-1, 1, 1, 1).expand(len(labels), 3, *size)
    return {"image": images.contiguous(), "label": labels}


def test_mixup_mixes_pictures_and_labels_by_the_same_share() -> None:
    pictures, draws, label = _pictures(16), _draws(16), torch.arange(16) % 5
    output = wt.Augmentation(mixup=1.0, classes=5)({"image": pictures, "label": label}, draws)
    # The quantile function of beta(1, 1) is the identity.
    share = torch.from_numpy(draws[:, _SHARE]).float()
    hot = torch.nn.functional.one_hot(label, 5).float()
    for name, plain in (("image", pictures.float() / 255), ("label", hot)):
        weight = share.view(-1, *[1] * (plain.ndim - 1))
        mixed = weight * plain + (1 - weight) * plain.roll(1, 0)
        assert torch.allclose(output[name], mixed, atol=1e-4)


def test_cutmix_weights_labels_by_area() -> None:
    label = torch.arange(12)
    output = wt.Augmentation(cutmix=1.0, classes=12)(_numbered(label, (40, 56)), _draws(12))
    kept = (torch.round(output["image"][:, 0] * 255) == label.view(-1, 1, 1)).float().mean((1, 2))
    assert torch.allclose(output["label"][label, label], kept, atol=1e-5)
    assert torch.allclose(output["label"].sum(1), torch.ones(12))
    assert 0 < float(kept.min()) < float(kept.max())


def test_the_mix_and_cutmix_probabilities_are_respected() -> None:
    label = torch.arange(400) % 199
    batch, draws = _numbered(label, (32, 32)), _draws(400)
    options: dict[str, Any] = {"mixup": 1.0, "cutmix": 1.0, "classes": 199}
    output = wt.Augmentation(mixup_prob=0.3, mixup_switch_prob=0.25, **options)(batch, draws)
    mixed = output["label"][torch.arange(400), label] < 1
    assert 0.2 < float(mixed.float().mean()) < 0.4
    assert torch.equal(output["image"][~mixed], batch["image"][~mixed].float() / 255)
    flat = output["image"][mixed].flatten(1)
    cut = flat.amax(1) - flat.amin(1) > 1e-3
    assert 0.1 < float(cut.float().mean()) < 0.4


def test_random_erasing_equals_torchvision() -> None:
    count = 3000
    images = torch.full((count, 3, 40, 56), 200, dtype=torch.uint8)
    output = _changed(images, random_erasing=0.25, normalize="imagenet")
    black = (output.abs() < 1e-5).all(1)
    erased = black.flatten(1).any(1)
    assert 0.22 < float(erased.float().mean()) < 0.28
    whole = ((200 / 255 - torch.tensor(IMAGENET[0])) / torch.tensor(IMAGENET[1])).view(3, 1, 1)
    assert torch.allclose(output[~erased], whole, atol=1e-5)
    always = _changed(images, random_erasing=1.0)[:, 0] == 0
    rows, columns = always.any(2).sum(1), always.any(1).sum(1)
    assert torch.equal(always.flatten(1).sum(1), rows * columns)  # rectangles
    torch.manual_seed(0)
    eraser = v2.RandomErasing(p=1.0)
    reference = [eraser.make_params([images[0]]) for _ in range(count)]
    tops = always.any(2).int().argmax(1).numpy()
    for values, name in ((rows.numpy(), "h"), (columns.numpy(), "w"), (tops, "i")):
        expected = np.array([params[name] for params in reference if params["v"] is not None])
        assert _distance(values[rows.numpy() > 0], expected) < 0.05, name


def test_crops_have_the_requested_area_and_aspect_ratio() -> None:
    torch.manual_seed(0)
    picture, count = torch.zeros(3, 375, 500, dtype=torch.uint8), 2000
    scale, ratio = (0.35, 0.9), (0.5, 1.2)
    crop = v2.RandomResizedCrop(224, scale=scale, ratio=ratio)
    reference = [crop.make_params([picture]) for _ in range(count)]
    actual = random_crops(375, 500, _draws(count), scale, ratio)
    for column, name in enumerate(("top", "left", "height", "width")):
        expected = np.array([params[name] for params in reference])
        assert _distance(actual[:, column], expected) < 0.05, name


def test_unsupported_augmentation_is_an_error() -> None:
    varied, two = wt.Augmentation(mixup=0.2, classes=10), _pictures(2)
    moved, floats = (
        {"image": two, "label": label} for label in (torch.zeros(2).long(), torch.zeros(2))
    )
    masked = {**moved, "mask": torch.zeros(2, 40, 56).long()}
    assert wt.Augmentation(brightness=0.2)(masked, _draws(2))["mask"] is masked["mask"]
    changes: list[dict[str, Any]] = [{"augment": "flip"}, {"augment": "rrc", "size": 20}]
    changes += [{"size": 24}, {"cutmix": 1.0, "classes": 2}]
    calls: list[tuple[Callable[[], Any], str]] = [
        *(
            (lambda change=change: wt.Augmentation(**change)(masked, _draws(2)), "mask")
            for change in changes
        ),
        (lambda: wt.Augmentation("rrc"), "needs a size"),
        (lambda: wt.Augmentation("blur"), "'blur' is not known"),
        (lambda: wt.Augmentation(hue=0.6), "hue=0.6"),
        (lambda: wt.Augmentation(mixup=0.2), "classes="),
        (lambda: wt.Augmentation(normalize="mnist"), "normalize='mnist'"),
        (lambda: wt.Augmentation(dtype=torch.uint8), "torch.uint8"),
        (lambda: list(wt.to_device([moved], "cpu", varied)), "has no random numbers of its"),
        (lambda: varied({}, _draws(1)), r"batch\['image'\] is missing"),
        (lambda: varied(floats, _draws(2)), r"batch\['label'\] is float32\[2\]"),
    ]
    for call, words in calls:
        with pytest.raises(wt.UsageError, match=words):
            call()


def test_an_empty_batch_has_the_types_of_full_batches() -> None:
    varied = wt.Augmentation("rrc", size=(24, 20), mixup=0.2, classes=5, dtype=torch.bfloat16)
    batch = {"image": _pictures(4)[:0], "label": torch.zeros(0, dtype=torch.int64)}
    output = varied(batch, _draws(0))
    assert (output["image"].shape, output["image"].dtype) == ((0, 3, 24, 20), torch.bfloat16)
    assert (output["label"].shape, output["label"].dtype) == ((0, 5), torch.float32)


@pytest.mark.parametrize("options", [{"normalize": "imagenet"}, {"size": 20}])
def test_changes_without_randomness_need_no_random_numbers(options: dict[str, Any]) -> None:
    images = _pictures(4)
    without = wt.Augmentation(**options)({"image": images})["image"]
    assert torch.equal(without, _changed(images, **options))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_random_numbers_come_with_the_batch(num_workers: int, photos: Path) -> None:
    augmentation = wt.Augmentation("rrc+flip", size=16, hue=0.2)
    with wt.Loader(photos, FIELDS, batch_size=8, num_workers=num_workers) as loader:
        moved = [batch["image"] for batch in wt.to_device(loader.epoch(0), "cpu", augmentation)]
        own = [augmentation(batch)["image"] for batch in loader.epoch(0, until=1)]
    assert all(torch.equal(a, b) for a, b in zip(own, moved, strict=True))


@pytest.mark.parametrize("mixing", [{"mixup": 1.0}, {"cutmix": 1.0}], ids=["mixup", "cutmix"])
@pytest.mark.parametrize("bad", [5, 7], ids=["within the batch", "last of the batch"])
def test_a_marked_sample_is_not_mixed(bad: int, mixing: dict[str, float], tmp_path: Path) -> None:
    """All good images are gray and of class 1; a marked row is black and of class 0."""
    gray = encoded(Image.fromarray(np.full((32, 32, 3), 200, np.uint8)), "PNG")
    samples: list[Sample] = [
        (f"s{n}", {"png": gray if n != bad else gray[:45], "cls": b"1"}) for n in range(8)
    ]
    write_tar(tmp_path / "a.tar", samples)
    fields = {"image": wt.image(size=32), "label": wt.label()}
    options: dict[str, Any] = {"on_error": "mark", "max_errors": 1, "shuffle": False}
    with wt.Loader(tmp_path, fields, batch_size=8, **options) as loader:
        batches = loader.epoch(0, until=4)
        for batch in wt.to_device(batches, "cpu", wt.Augmentation(classes=2, **mixing)):
            own = torch.from_numpy(np.asarray(batches.delivered.own))
            assert float(batch["label"][own, 1].min()) == 1
            assert float(batch["image"][own].min()) == pytest.approx(200 / 255)


@pytest.mark.parametrize("mixing", [{"mixup": 0.2}, {"cutmix": 0.2}], ids=["mixup", "cutmix"])
def test_a_label_outside_the_classes_of_mixup_is_an_error_with_its_key(
    mixing: dict[str, float], photos: Path
) -> None:
    augmentation = wt.Augmentation(classes=9, **mixing)  # sample s009 has the class 9
    with wt.Loader(photos, FIELDS, batch_size=60, shuffle=False) as loader:
        batches = wt.to_device(loader.epoch(0, until=1), "cpu", augmentation)
        with pytest.raises(wt.WdstrainError, match="s009"):
            next(batches)
