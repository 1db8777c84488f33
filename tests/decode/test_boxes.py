"""Boxes of objects stay around the pixels of their image: cropped, flipped, resized, rotated by EXIF."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import wdstrain as wt
from tests.conftest import write_tar
from tests.support.scenes import NAMES, Scene, scene, seen

LABEL = wt.Label("boxes", "boxes", "boxes.json", classes=NAMES)


def packed(folder: Path, scenes: list[Scene], kind: str = "PNG", turned: bool = False) -> Path:
    field = {"PNG": "png", "JPEG": "jpg"}[kind]
    samples = [
        {
            "__key__": f"k{number:03d}",
            field: own.file(kind, number % 8 + 1 if turned else 1),
            "boxes.json": {"boxes": own.boxes, "labels": own.names},
        }
        for number, own in enumerate(scenes)
    ]
    wt.pack(samples, folder, labels=[LABEL])
    return folder


def drawn(count: int, seed: int = 0) -> list[Scene]:
    rng = np.random.default_rng(seed)
    return [scene(rng, *map(int, rng.integers(60, 140, 2))) for _ in range(count)]


def rows_of(batch: dict[str, Any]) -> Iterator[tuple[Any, list[list[float]], list[int]]]:
    for image, target in zip(batch["image"], batch["boxes"].targets(), strict=True):
        pixels = image.permute(1, 2, 0).numpy()
        yield pixels, target["boxes"].tolist(), target["labels"].tolist()


def check_boxes(pixels: Any, boxes: list[list[float]], labels: list[int]) -> None:
    """Check that each box is that around the pixels of its class, within a pixel."""
    assert len(set(labels)) == len(labels)
    for box, label in zip(boxes, labels, strict=True):
        around = seen(pixels, label)
        assert around is not None
        assert np.abs(np.array(box) - around).max() <= 1.0, (box, around)


def count_checked(batches: Any, scale: float = 1, places: set[Any] | None = None) -> int:
    """Check all boxes of some batches, and return their number. places: where to add them."""
    count = 0
    for batch in batches:
        for pixels, boxes, labels in rows_of(batch):
            check_boxes(pixels * scale, boxes, labels)
            count += len(boxes)
            (set() if places is None else places).update(map(tuple, boxes))
    return count


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
@pytest.mark.parametrize("augment", [None, "flip", "rrc", "rrc+flip"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_boxes_enclose_their_objects_after_any_crop_flip_resize_and_rotation(
    num_workers: int, augment: str | None, kind: str, tmp_path: Path
) -> None:
    folder = packed(tmp_path / "out", drawn(24), kind, turned=True)
    options: dict[str, Any] = {"size": (64, 72), "augment": augment}
    fields = {"image": wt.image(**options), "boxes": wt.boxes("boxes", **options)}
    places = set[tuple[float, ...]]()
    with wt.Loader(folder, fields, batch_size=6, num_workers=num_workers) as loader:
        count = sum(count_checked(loader, places=places) for _ in range(2))
    assert count > 48  # of 144
    assert (len(places) > count / 2 + 5) == (augment is not None)  # another crop in each epoch


@pytest.mark.parametrize("num_workers", [0, 1])
def test_boxes_follow_images_of_the_shape_of_their_bucket(num_workers: int, tmp_path: Path) -> None:
    folder = packed(tmp_path / "out", drawn(48), "JPEG", turned=True)
    wt.index(folder, columns=["jpg.width", "jpg.height"])
    options: dict[str, Any] = {"size": "bucket", "augment": "flip"}
    fields = {"image": wt.image(**options), "boxes": wt.boxes("boxes", **options)}
    buckets: dict[str, Any] = {"buckets": "aspect", "pixels": 80 * 80}
    with wt.Loader(folder, fields, batch_size=6, num_workers=num_workers, **buckets) as loader:
        batches = list(loader)
    shapes = {batch["image"].shape for batch in batches}
    assert len(shapes) > 1
    assert count_checked(batches) > 48


def test_a_batch_holds_flat_boxes_with_offsets_and_gives_a_target_for_each_image(
    tmp_path: Path,
) -> None:
    rng = np.random.default_rng(3)
    scenes = [scene(rng, 60, 120, count) for count in (2, 0, 3, 1)]
    folder = packed(tmp_path / "out", scenes)
    how: dict[str, Any] = {"batch_size": 4, "shuffle": False, "tail": "keep"}
    for workers in (0, 2):
        with wt.Loader(folder, {"boxes": wt.boxes()}, num_workers=workers, **how) as loader:
            (batch,) = wt.to_device(loader, "cpu")
        boxes, labels, offsets = batch["boxes"]
        assert (boxes.dtype, labels.dtype, offsets.dtype) == (torch.float32, *[torch.int64] * 2)
        assert (boxes.shape, labels.shape, len(offsets)) == ((6, 4), (6,), 5)
        targets = batch["boxes"].targets(first_class=1)
        for key, target in zip(batch["__key__"], targets, strict=True):
            own = scenes[int(key[1:])]
            assert target["boxes"].shape == (len(own.boxes), 4)
            assert target["boxes"].tolist() == own.boxes
            assert target["labels"].tolist() == list(range(1, len(own.boxes) + 1))


# (box, least share of its area) of an image of 50 x 100 pixels, of which columns 25 to 75 are seen.
RULES = [
    ([15, 10, 35, 30], 0.5, [0, 10, 10, 30]),
    ([15, 10, 35, 30], 0.51, None),
    ([70, 0, 90, 50], 0.25, [45, 0, 50, 50]),
    ([70, 0, 91, 50], 0.25, None),
    ([0, 0, 25, 50], 0.0, None),  # outside
    ([74.2, 0, 75, 50], 0.0, None),  # less than a pixel
    ([-10, -10, 100, 60], 0.25, [0, 0, 50, 50]),
    ([-3, 10, 50, 20], 0.25, [0, 10, 25, 20]),
]


@pytest.mark.parametrize(("box", "share", "left"), RULES)
def test_boxes_are_clipped_and_dropped_by_the_stated_rule(
    box: list[float], share: float, left: list[float] | None, tmp_path: Path
) -> None:
    own = Scene(np.zeros((50, 100, 3), np.uint8), [box, [30, 5, 50, 25]], ["blue", "red"])
    fields = {"png": own.file("PNG"), "boxes.json": own.member}
    write_tar(tmp_path / "a.tar", [("k", fields)])
    field = wt.boxes(size=50, min_share=share, classes=NAMES)
    with wt.Loader(tmp_path, {"boxes": field}, batch_size=1) as loader:
        ((boxes, labels, offsets),) = [batch["boxes"] for batch in loader]
    expected = [[5, 5, 25, 25]] if left is None else [left, [5, 5, 25, 25]]
    assert boxes.tolist() == expected
    assert labels.tolist() == ([0] if left is None else [2, 0])
    assert offsets.tolist() == [0, len(expected)]


def test_classes_are_read_by_name_or_number_and_can_be_numbered_anew(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    own = scene(rng, 60, 120)
    numbers = json.dumps({"boxes": own.boxes, "labels": [2, "red", 1]}).encode()
    image = own.file("PNG")
    write_tar(tmp_path / "a.tar", [("k", {"png": image, "boxes.json": numbers})])

    def labels(**options: Any) -> list[int]:
        with wt.Loader(tmp_path, {"boxes": wt.boxes(**options)}, batch_size=1) as loader:
            return next(iter(loader))["boxes"].labels.tolist()

    assert labels(classes=NAMES) == [2, 0, 1]
    index = wt.index(tmp_path, label="boxes.json", classes=NAMES)
    assert index.labels == (LABEL,)
    assert index.labels[0].summary == "boxes of 3 classes: red, green, blue"
    assert labels() == [2, 0, 1]
    assert labels(classes=("blue", "green", "red")) == [0, 2, 1]
    with pytest.raises(wt.SampleError, match="'red' is none of the 2 classes"):
        labels(classes=("blue", "green"))


BAD: list[tuple[Any, str]] = [
    ([1, 2], r"must be stored as \{\"boxes\""),
    ({"boxes": [[0, 0, 5, 5]], "labels": []}, "as many labels as boxes"),
    ({"boxes": [[0, 0, 5]], "labels": ["red"]}, r"\[0, 0, 5\] must be four finite numbers"),
    ({"boxes": [[5, 0, 5, 5]], "labels": ["red"]}, "x0 < x1 and y0 < y1"),
    ({"boxes": [[0, 0, float("nan"), 5]], "labels": ["red"]}, "nan.*finite"),
    ({"boxes": [[0, 0, 5, 5]], "labels": ["pink"]}, "'pink' is none of the 3 classes"),
    ({"boxes": [[0, 0, 5, 5]], "labels": [3]}, "3 is none of the 3 classes"),
    ({"boxes": [[0, 0, 5, 5]], "labels": [-1]}, "-1 is none of the 3 classes"),
]


@pytest.mark.parametrize(("document", "message"), BAD)
def test_a_member_of_another_form_is_a_bad_sample(
    document: Any, message: str, tmp_path: Path
) -> None:
    image = scene(np.random.default_rng(0), 60, 60, 1).file("PNG")
    fields = {"png": image, "boxes.json": json.dumps(document).encode()}
    write_tar(tmp_path / "a.tar", [("key", fields)])
    field = wt.boxes(classes=NAMES)
    with (
        wt.Loader(tmp_path, {"boxes": field}, batch_size=1) as loader,
        pytest.raises(wt.SampleError, match=message) as error,
    ):
        list(loader)
    assert "boxes.json" in str(error.value)
    assert "key" in str(error.value)


def test_boxes_without_a_readable_image_are_a_bad_sample(tmp_path: Path) -> None:
    member = json.dumps({"boxes": [[0, 0, 5, 5]], "labels": [0]}).encode()
    good = scene(np.random.default_rng(0), 60, 60, 1)
    samples = [
        ("a", {"boxes.json": member}),
        ("b", {"boxes.json": member, "png": b"no image"}),
        ("c", {"boxes.json": member, "png": good.file("PNG")}),
        ("d", {"png": good.file("PNG")}),
    ]
    write_tar(tmp_path / "a.tar", samples)
    how: dict[str, Any] = {"batch_size": 4, "shuffle": False, "on_error": "mark", "max_errors": 1}
    with wt.Loader(tmp_path, {"boxes": wt.boxes()}, **how) as loader:
        (batch,) = loader
        assert batch["boxes"].offsets.tolist() == [0, 0, 0, 1, 1]
        assert [bad["key"] for bad in loader.report()["bad_samples"]] == ["a", "b", "d"]


def test_boxes_of_a_named_image_follow_that_image(tmp_path: Path) -> None:
    boxes = {"boxes": [[70, 50, 110, 70]], "labels": ["a"]}
    images = {"png": np.zeros((40, 60, 3), np.uint8), "left.png": np.zeros((80, 120, 3), np.uint8)}
    samples = ({**images, "left.boxes.json": boxes} for _ in range(4))
    wt.pack(samples, tmp_path)
    wt.index(tmp_path, label="left.boxes.json", classes=["a"])
    assert wt.verify(tmp_path, decode=True).ok
    assert not any(view.error for view in wt.peek(tmp_path))
    with wt.Loader(tmp_path, {"boxes": wt.boxes("left.boxes", size=(40, 60))}, batch_size=4) as one:
        assert next(iter(one))["boxes"].boxes.tolist() == [[35, 25, 55, 35]] * 4


def mixed(folder: Path) -> Any:
    loader = wt.Loader(
        folder, {"image": wt.image(size=64), "boxes": wt.boxes(size=64)}, batch_size=4
    )
    return wt.to_device(loader, "cpu", wt.Augmentation(mixup=0.2, classes=3, label="boxes"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda at: list(mixed(at)), "mixup"),
        (lambda _: wt.boxes(size=8, augment="flip+randaugment"), "rotates and shears images"),
        (lambda _: wt.boxes(augment="rrc"), "needs a size"),
        (lambda _: wt.boxes(names=""), "names no field"),
        (lambda _: wt.boxes(size=0), "size=0"),
        (lambda _: wt.boxes(min_share=1.5), "min_share=1.5: must be in 0 to 1"),
        (lambda _: wt.boxes(classes=["a", "a"]), "must be different names"),
        (lambda at: wt.index(at, label="png:boxes", classes=["a"]), "png cannot hold boxes"),
        (lambda at: wt.index(at, label="boxes.json:mask", classes="a,b"), "cannot hold masks"),
        (lambda at: wt.index(at, label="boxes.json", classes=["a"], ignore=3), "ignore=3 is for"),
        (lambda at: wt.Loader(at, {"x": wt.label("boxes")}), "Read them with wt.boxes"),
        (
            lambda at: wt.Loader(at, {"x": wt.boxes("other")}),
            "looks for other.json; these shards hold",
        ),
    ],
)
def test_wrong_options_and_declarations_of_boxes_are_refused(
    tmp_path: Path, make: Any, message: str
) -> None:
    with pytest.raises(wt.UsageError, match=re.escape(message)):
        make(packed(tmp_path / "out", drawn(4)))


def test_examples_of_a_stream_have_the_boxes_of_their_image(tmp_path: Path) -> None:
    folder = packed(tmp_path / "out", drawn(8), "JPEG", turned=True)
    options: dict[str, Any] = {"size": 64, "augment": "rrc+flip"}
    example_of = wt.to_example(
        {"image": wt.image(**options), "boxes": wt.boxes(classes=NAMES, **options)}
    )
    examples = [example_of(sample) for sample in wt.stream(folder)]
    assert len(examples) == 8
    for example in examples:
        pixels = example["image"].transpose(1, 2, 0)
        check_boxes(pixels, example["boxes"]["boxes"].tolist(), list(example["boxes"]["labels"]))


# --- augmentation of whole batches ----------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{"size": (40, 48)}, {"augment": "flip"}, {"augment": "rrc+flip", "size": 56}],
    ids=str,
)
def test_boxes_follow_the_augmentation_of_a_batch(options: dict[str, Any], tmp_path: Path) -> None:
    folder = packed(tmp_path / "out", drawn(24, seed=2))
    fields = {"image": wt.image(size=64), "boxes": wt.boxes(size=64)}
    with wt.Loader(folder, fields, batch_size=6) as loader:
        batches = wt.to_device(loader, "cpu", wt.Augmentation(**options))
        count = count_checked(batches, 255)
    assert count > 20
