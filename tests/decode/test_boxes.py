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
    """Pack scenes, with EXIF orientations 1 to 8 by turns."""
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
    """Yield (pixels [h, w, 3], boxes, class numbers) of each sample."""
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


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
@pytest.mark.parametrize("augment", [None, "flip", "rrc", "rrc+flip"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_boxes_enclose_their_objects_after_any_crop_flip_resize_and_rotation(
    num_workers: int, augment: str | None, kind: str, tmp_path: Path
) -> None:
    folder = packed(tmp_path / "out", drawn(24), kind, turned=True)
    options: dict[str, Any] = {"size": (64, 72), "augment": augment}
    fields = {"image": wt.image(**options), "boxes": wt.boxes("boxes", **options)}
    places, count = set[tuple[float, ...]](), 0
    with wt.Loader(folder, fields, batch_size=6, num_workers=num_workers) as loader:
        for _ in range(2):
            for batch in loader:
                for pixels, boxes, labels in rows_of(batch):
                    check_boxes(pixels, boxes, labels)
                    places.update(map(tuple, boxes))
                    count += len(boxes)
    assert count > 48  # of 144
    assert (len(places) > count / 2 + 5) == (augment is not None)  # another crop in each epoch


@pytest.mark.parametrize("num_workers", [0, 1])
def test_boxes_follow_images_of_the_shape_of_their_bucket(num_workers: int, tmp_path: Path) -> None:
    folder = packed(tmp_path / "out", drawn(48), "JPEG", turned=True)
    wt.index(folder, columns=["jpg.width", "jpg.height"])
    options: dict[str, Any] = {"size": "bucket", "augment": "flip"}
    fields = {"image": wt.image(**options), "boxes": wt.boxes("boxes", **options)}
    buckets: dict[str, Any] = {"buckets": "aspect", "pixels": 80 * 80}
    shapes, count = set[tuple[int, ...]](), 0
    with wt.Loader(folder, fields, batch_size=6, num_workers=num_workers, **buckets) as loader:
        for batch in loader:
            shapes.add(tuple(batch["image"].shape))
            for pixels, boxes, labels in rows_of(batch):
                check_boxes(pixels, boxes, labels)
                count += len(boxes)
    assert len(shapes) > 1
    assert count > 48


@pytest.mark.parametrize("augment", [None, "flip"])
def test_boxes_of_images_in_their_own_size_are_delivered_exactly(
    augment: str | None, tmp_path: Path
) -> None:
    scenes = drawn(16, seed=1)
    folder = packed(tmp_path / "out", scenes, turned=True)
    fields = {"image": wt.image(augment=augment), "boxes": wt.boxes(augment=augment)}
    with wt.Loader(folder, fields, batch_size=4) as loader:
        for batch in loader:
            for pixels, boxes, labels in rows_of(batch):
                assert labels == [0, 1, 2]
                assert boxes == [seen(pixels, label) for label in labels]


def test_a_batch_holds_flat_boxes_with_offsets_and_gives_a_target_for_each_image(
    tmp_path: Path,
) -> None:
    rng = np.random.default_rng(3)
    scenes = [scene(rng, 60, 120, count) for count in (2, 0, 3, 1)]
    folder = packed(tmp_path / "out", scenes)
    fields = {"image": wt.image(), "boxes": wt.boxes()}
    batches = []
    for workers in (0, 2):
        with wt.Loader(
            folder, fields, batch_size=4, num_workers=workers, shuffle=False, tail="keep"
        ) as loader:
            (batch,) = wt.to_device(loader, "cpu")
            batches.append(batch["boxes"])
            by_key = dict(zip(batch["__key__"], batch["boxes"].targets(first_class=1), strict=True))
    one, other = batches
    for name, dtype, shape in (
        ("boxes", torch.float32, (6, 4)),
        ("labels", torch.int64, (6,)),
        ("offsets", torch.int64, (5,)),
    ):
        value = getattr(one, name)
        assert (value.dtype, tuple(value.shape)) == (dtype, shape)
        assert value.equal(getattr(other, name))
    for number, own in enumerate(scenes):
        target = by_key[f"k{number:03d}"]
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


def test_sets_that_number_their_classes_differently_are_joined_once_they_declare_the_same(
    tmp_path: Path,
) -> None:
    for name, classes in (("a", NAMES), ("b", NAMES[::-1])):
        own = scene(np.random.default_rng(1), 60, 120)
        sample = {"__key__": name, "png": own.file("PNG"), "boxes.json": json.loads(own.member)}
        label = wt.Label("boxes", "boxes", "boxes.json", classes=classes)
        wt.pack([sample], tmp_path / name, labels=[label])
    sets = [tmp_path / "a", tmp_path / "b"]
    with pytest.raises(wt.UsageError, match=r"differs between these sets.*wdstrain index SET"):
        wt.Loader(sets, {"boxes": wt.boxes()}, batch_size=2)
    for one in sets:
        wt.index(one, label="boxes.json", classes=NAMES)
    with wt.Loader(sets, {"boxes": wt.boxes()}, batch_size=2) as loader:
        assert next(iter(loader))["boxes"].labels.tolist() == [0, 1, 2] * 2


BAD: list[tuple[Any, str]] = [
    ([1, 2], r"must be stored as \{\"boxes\""),
    ({"boxes": [[0, 0, 5, 5]]}, r"must be stored as \{\"boxes\""),
    ({"boxes": [[0, 0, 5, 5]], "labels": []}, "as many labels as boxes"),
    ({"boxes": [[0, 0, 5]], "labels": ["red"]}, r"\[0, 0, 5\] must be four finite numbers"),
    ({"boxes": [[0, 0, "5", 5]], "labels": ["red"]}, "must be four finite numbers"),
    ({"boxes": [[5, 0, 5, 5]], "labels": ["red"]}, "x0 < x1 and y0 < y1"),
    ({"boxes": [[0, 0, float("nan"), 5]], "labels": ["red"]}, "nan.*finite"),
    ({"boxes": [[0, 0, 5, 5]], "labels": ["pink"]}, "'pink' is none of the 3 classes"),
    ({"boxes": [[0, 0, 5, 5]], "labels": [3]}, "3 is none of the 3 classes"),
    ({"boxes": [[0, 0, 5, 5]], "labels": [-1]}, "-1 is none of the 3 classes"),
    ({"boxes": [[0, 0, 5, 5]], "labels": [None]}, "None is none of the 3 classes"),
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


OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"size": 8, "augment": "trivialaugment"}, "rotates and shears images"),
    ({"size": 8, "augment": "flip+randaugment"}, "rotates and shears images"),
    ({"augment": "rrc"}, "needs a size"),
    ({"min_share": 1.5}, "min_share=1.5.*0 to 1"),
    ({"names": ""}, "names no field"),
    ({"size": 0}, "size=0"),
]


@pytest.mark.parametrize(("options", "message"), OPTIONS)
def test_options_that_boxes_cannot_follow_are_refused(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(wt.UsageError, match=message):
        wt.boxes(**options)


def test_boxes_of_a_named_image_follow_that_image(tmp_path: Path) -> None:
    boxes = {"boxes": [[70, 50, 110, 70]], "labels": ["a"]}
    samples = (
        {
            "png": np.zeros((40, 60, 3), np.uint8),
            "left.png": np.zeros((80, 120, 3), np.uint8),
            "left.boxes.json": boxes,
        }
        for _ in range(4)
    )
    wt.pack(samples, tmp_path)
    wt.index(tmp_path, label="left.boxes.json", classes=["a"])
    assert wt.verify(tmp_path, decode=True).ok
    assert not any(view.error for view in wt.peek(tmp_path))
    with wt.Loader(tmp_path, {"boxes": wt.boxes("left.boxes", size=(40, 60))}, batch_size=4) as one:
        assert next(iter(one))["boxes"].boxes.tolist() == [[35, 25, 55, 35]] * 4


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda _: wt.boxes(min_share="a"), "min_share='a': must be in 0 to 1"),
        (lambda _: wt.boxes(classes=["a", "a"]), "must be different names"),
        (lambda at: wt.index(at, label="png:boxes", classes=["a"]), "png cannot hold boxes"),
        (lambda at: wt.index(at, label="boxes.json:mask", classes="a,b"), "cannot hold masks"),
        (lambda at: wt.index(at, label="boxes.json", classes=["a"], ignore=3), "ignore=3 is for"),
        (lambda at: wt.Loader(at, {"x": wt.label("boxes")}), "Read them with wt.boxes"),
    ],
)
def test_wrong_declarations_of_boxes_are_refused(tmp_path: Path, make: Any, message: str) -> None:
    with pytest.raises(wt.UsageError, match=re.escape(message)):
        make(packed(tmp_path / "out", drawn(4)))


def test_a_shard_without_the_field_is_refused_and_a_loader_describes_its_boxes(
    tmp_path: Path,
) -> None:
    folder = packed(tmp_path / "out", drawn(4))
    with pytest.raises(wt.UsageError, match=r"looks for other\.boxes\.json; these shards hold"):
        wt.Loader(folder, {"boxes": wt.boxes("other.boxes")}, batch_size=2)
    with wt.Loader(folder, {"boxes": wt.boxes()}, batch_size=2) as loader:
        assert re.search(r"boxes: .* from boxes.json", repr(loader))


def test_a_rank_without_samples_gets_no_boxes(tmp_path: Path) -> None:
    folder = packed(tmp_path / "out", drawn(1))
    how: dict[str, Any] = {"batch_size": 2, "tail": "keep", "world_size": 2}
    sizes = []
    for rank in (0, 1):
        with wt.Loader(folder, {"boxes": wt.boxes()}, rank=rank, **how) as loader:
            (batch,) = loader
            sizes.append((len(batch["__key__"]), len(batch["boxes"].targets())))
            assert batch["boxes"].offsets[-1] == len(batch["boxes"].boxes)
    assert sorted(sizes) == [(0, 0), (1, 1)]


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
        count = 0
        for batch in wt.to_device(loader, "cpu", wt.Augmentation(**options)):
            assert batch["boxes"].boxes.dtype == torch.float32
            for pixels, boxes, labels in rows_of(batch):
                check_boxes(pixels * 255, boxes, labels)
                count += len(boxes)
    assert count > 20


def test_mixed_images_have_no_boxes(tmp_path: Path) -> None:
    folder = packed(tmp_path / "out", drawn(4))
    fields = {"image": wt.image(size=64), "boxes": wt.boxes(size=64)}
    mixing = wt.Augmentation(mixup=0.2, classes=3, label="boxes")
    with (
        wt.Loader(folder, fields, batch_size=4) as loader,
        pytest.raises(wt.UsageError, match=r"mixup.*boxes"),
    ):
        list(wt.to_device(loader, "cpu", mixing))
