"""Annotations of COCO and folders of YOLO: the boxes in shards enclose the objects of their images."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wdstrain as wt
from tests.conftest import picture
from tests.support.scenes import NAMES, Scene, scene, seen
from tests.support.tables import attempt, read_samples
from wdstrain.cli.main import main

COUNT = 16  # images, two of each EXIF orientation
Document = dict[str, list[dict[str, Any]]]


def drawn(count: int = COUNT) -> list[Scene]:
    """Return scenes that are wider than high, of which every fifth has no object."""
    rng = np.random.default_rng(count)
    counts = [0 if number % 5 == 4 else 3 for number in range(count)]
    return [scene(rng, *map(int, rng.integers((60, 100), (100, 140))), n) for n in counts]  # type: ignore[call-arg]


def write_coco(folder: Path, scenes: list[Scene], on: str = "upright") -> Path:
    """Write images with EXIF orientations, and annotations of the raster `on`, or of unsaid size.

    If it is that of the file, images are rotated by a quarter turn, so that their size tells.
    """
    (folder / "photos" / "a").mkdir(parents=True)
    images, annotations = list[dict[str, Any]](), list[dict[str, Any]]()
    for number, own in enumerate(scenes):
        orientation = (1, 5, 6, 7, 8)[number % 5] if on == "stored" else number % 8 + 1
        name, (height, width) = f"a/{number:02d}.png", own.pixels.shape[:2]
        (folder / "photos" / name).write_bytes(own.file("PNG", orientation))
        boxes, size = own.boxes, (width, height)
        if on == "stored":  # of the pixels as they lie in the file
            raster = own.raster(orientation)
            found = [seen(raster, NAMES.index(label)) for label in own.names]
            boxes, size = [box for box in found if box is not None], raster.shape[1::-1]
        sides = {} if on == "unsaid" else {"width": size[0], "height": size[1]}
        images.append({"id": 100 + number, "file_name": name, **sides})
        annotations += [
            {
                "id": len(annotations) + place,
                "image_id": 100 + number,
                "category_id": 10 * (3 - NAMES.index(label)),
                "bbox": [x0, y0, x1 - x0, y1 - y0],
            }
            for place, ((x0, y0, x1, y1), label) in enumerate(zip(boxes, own.names, strict=True))
        ]
    categories = [{"id": 10 * (3 - place), "name": name} for place, name in enumerate(NAMES)]
    document = {"images": images, "annotations": annotations, "categories": categories}
    (folder / "boxes.json").write_text(json.dumps(document))
    return folder


def write_yolo(
    folder: Path, scenes: list[Scene], layout: str = "images/{split}", names: str = "data.yaml"
) -> Path:
    for number, own in enumerate(scenes):
        split = "train" if number % 4 else "valid"
        images = folder / layout.format(split=split)
        labels = folder / layout.replace("images", "labels").format(split=split)
        for place in (images, labels):
            place.mkdir(parents=True, exist_ok=True)
        (images / f"{number:02d}.png").write_bytes(own.file("PNG", number % 8 + 1))
        height, width = own.pixels.shape[:2]
        lines = [
            f"{NAMES.index(name)} {(x0 + x1) / 2 / width:.6f} {(y0 + y1) / 2 / height:.6f} "
            f"{(x1 - x0) / width:.6f} {(y1 - y0) / height:.6f}\n"
            for (x0, y0, x1, y1), name in zip(own.boxes, own.names, strict=True)
        ]
        if lines or number == 4:  # an empty file, and no file
            (labels / f"{number:02d}.txt").write_text("".join(lines))
    texts = {
        "data.yaml": "names:\n  0: red\n  1: green\n  2: blue\nnc: 3\n",
        "dataset.yaml": "path: .\nnames: [red, green, blue]\n",
        "classes.txt": "red\ngreen\nblue\n",
    }
    (folder / names).write_text(texts[names])
    return folder


def check_set(
    out: Path, split: str | None = None, count: int = COUNT, *, side: int = 0, within: float = 0.01
) -> None:
    """Check that each box is around the pixels of its class, and that every object has one.

    side: the shorter side of each image. within: pixels.
    """
    fields = {"image": wt.image(), "boxes": wt.boxes()}
    how: dict[str, Any] = {"batch_size": 4, "tail": "keep", "split": split}
    with wt.Loader(out, fields, **how) as loader:
        classes, total = loader.index.labels[0].classes, 0
        assert sorted(classes) == sorted(NAMES)
        for batch in loader:
            for image, target in zip(batch["image"], batch["boxes"].targets(), strict=True):
                pixels, total = image.permute(1, 2, 0).numpy(), total + 1
                assert side in (0, min(image.shape[1:]))
                found = {
                    NAMES.index(classes[label]): box
                    for label, box in zip(
                        target["labels"].tolist(), target["boxes"].tolist(), strict=True
                    )
                }
                for number in range(3):
                    around = seen(pixels, number)
                    assert (around is None) == (number not in found)
                    assert around is None or np.allclose(found[number], around, rtol=0, atol=within)
    assert total == count


@pytest.mark.parametrize("on", ["upright", "stored", "unsaid"])
def test_coco_boxes_enclose_the_objects_of_upright_images(on: str, tmp_path: Path) -> None:
    source = write_coco(tmp_path / "in", drawn(), on)
    index = wt.convert_coco(source / "boxes.json", source / "photos", tmp_path / "out")
    assert index.labels == (
        wt.Label("boxes", "boxes", "boxes.json", classes=("blue", "green", "red")),
    )
    check_set(tmp_path / "out")
    assert f"a/{0:02d}" in read_samples(tmp_path / "out")


@pytest.mark.parametrize("layout", ["images/{split}", "{split}/images"])
@pytest.mark.parametrize("names", ["data.yaml", "dataset.yaml", "classes.txt"])
def test_yolo_folders_are_packed_with_their_splits(names: str, layout: str, tmp_path: Path) -> None:
    source = write_yolo(tmp_path / "in", drawn(), layout, names)
    index = wt.convert_yolo(source, tmp_path / "out")
    assert index.splits == ("train", "val")
    assert index.labels[0].classes == NAMES
    check_set(tmp_path / "out", "train", 12)
    check_set(tmp_path / "out", "val", 4)


def test_boxes_are_resized_with_their_image(tmp_path: Path) -> None:
    source, out, again = write_coco(tmp_path / "in", drawn()), tmp_path / "out", tmp_path / "again"
    wt.convert_coco(source / "boxes.json", source / "photos", out, resize=40)
    wt.convert_tars(out, again, resize=30)
    check_set(out, side=40, within=1)
    check_set(again, side=30, within=1)


def test_the_commands_make_the_sets_of_the_functions_and_guess_a_yolo_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    coco, yolo = write_coco(tmp_path / "c", drawn()), write_yolo(tmp_path / "y", drawn(), "images")
    split = {"train": 0.5, "val": 0.5}
    wt.convert_coco(coco / "boxes.json", coco / "photos", tmp_path / "1", split=split)
    wt.convert_yolo(yolo, tmp_path / "2", split=split)
    words: dict[str, list[object]] = {"4": ["yolo", yolo], "5": [yolo]}
    words["3"] = ["coco", coco / "boxes.json", coco / "photos"]
    for name, source in words.items():
        out = [str(tmp_path / name), "--split", "train=0.5,val=0.5"]
        assert main(["convert", *map(str, source), *out]) == 0
    sets = [
        {path.name: path.read_bytes() for path in (tmp_path / n).glob("*.tar")} for n in "12345"
    ]
    assert sets[0] == sets[2]
    assert sets[1] == sets[3] == sets[4]
    assert {name[:3] for name in sets[1]} == {"tra", "val"}
    assert "packed as by: wdstrain convert yolo" in "".join(capsys.readouterr())


def test_boxes_of_crowds_and_without_an_area_are_left_out_and_counted(tmp_path: Path) -> None:
    source = write_coco(tmp_path / "in", drawn(2))
    document: Document = json.loads((source / "boxes.json").read_text())
    document["annotations"][0]["iscrowd"] = 1
    document["annotations"][1]["bbox"][2] = 0
    (source / "boxes.json").write_text(json.dumps(document))
    index = wt.convert_coco(source / "boxes.json", source / "photos", tmp_path / "out")
    assert index.info["ignored"] == {"boxes of crowds": 1, "boxes without an area": 1}
    members = [json.loads(own["boxes.json"]) for own in read_samples(tmp_path / "out").values()]
    assert sorted(len(member["labels"]) for member in members) == [1, 3]


def _set(name: str, row: int, entry: str, value: Any) -> Callable[[Document], None]:
    def change(document: Document) -> None:
        document[name][row][entry] = value

    return change


def _drop(name: str) -> Callable[[Document], None]:
    return lambda document: document.update({name: None})  # type: ignore[dict-item]


BAD_COCO: list[tuple[Callable[[Document], None], str]] = [
    (_set("annotations", 1, "image_id", 7), r"annotation 1 .*image 7.*`images` does not list"),
    (_set("annotations", 1, "category_id", 7), r"a/00\.png .*category 7.*`categories`"),
    (_set("annotations", 1, "bbox", [1, 2, 3]), r"a/00\.png .*\[1, 2, 3\].*four finite numbers"),
    (_set("annotations", 1, "bbox", [1, 2, -3, 4]), r"\[1, 2, -3, 4\].*four finite numbers"),
    (_set("categories", 1, "name", "red"), "each must be named once"),
    (_set("images", 0, "id", 101), "two images.*have one id"),
    (_set("categories", 0, "id", 10), "two categories have one id"),
    (_drop("images"), "not a file of COCO"),
]


@pytest.mark.parametrize(("change", "message"), BAD_COCO)
def test_wrong_annotations_are_refused_with_file_image_value_and_rule(
    change: Callable[[Document], None], message: str, tmp_path: Path
) -> None:
    source = write_coco(tmp_path / "in", drawn(2))
    document = json.loads((source / "boxes.json").read_text())
    change(document)
    (source / "boxes.json").write_text(json.dumps(document))
    with pytest.raises(wt.UsageError, match=message) as error:
        wt.convert_coco(source / "boxes.json", source / "photos", tmp_path / "out")
    assert "boxes.json" in str(error.value)
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").glob("*.tar"))


@pytest.mark.parametrize(
    "line",
    [
        "0 0.5 0.5 0.1",
        "3 0.5 0.5 0.1 0.1",
        "0.5 0.5 0.5 0.1 0.1",
        "0 nan 0.5 0.1 0.1",
        "0 0.5 0.5 -0.1 0.1",
        "0 20 30 10 10",
    ],
)
def test_wrong_lines_are_refused_with_file_line_value_and_rule(line: str, tmp_path: Path) -> None:
    source = write_yolo(tmp_path / "in", drawn(2))
    (source / "labels" / "train" / "01.txt").write_text(f"0 0.5 0.5 0.1 0.1\n\n{line}\n")
    rule = rf"01\.txt, line 3.*{re.escape(line)}.*class number from 0 to 2.*0 to 1"
    with pytest.raises(wt.UsageError, match=rule):
        wt.convert_yolo(source, tmp_path / "out")


BAD_FOLDERS: list[tuple[Callable[[Path], Any], str]] = [
    (lambda folder: (folder / "images/train/01.png").unlink(), r"train/01\.txt: there is no image"),
    (lambda folder: (folder / "data.yaml").unlink(), r"no names of classes.*data\.yaml"),
    (lambda folder: (folder / "data.yaml").write_text("nc: 3"), r"data\.yaml.*names"),
    (
        lambda folder: (folder / "data.yaml").write_text("names: [a, a, b]"),
        "each must be named once",
    ),
    (lambda folder: (folder / "data.yaml").write_text("names: {1: a}"), r"data\.yaml.*names"),
    (lambda folder: (folder / "data.yaml").write_text("{"), r"data\.yaml.*names"),
    (lambda folder: (folder / "images").rename(folder / "pictures"), "there is no image"),
]


@pytest.mark.parametrize(("change", "message"), BAD_FOLDERS)
def test_wrong_folders_are_refused(
    change: Callable[[Path], Any], message: str, tmp_path: Path
) -> None:
    source = write_yolo(tmp_path / "in", drawn(2))
    change(source)
    with pytest.raises(wt.UsageError, match=message):
        wt.convert_yolo(source, tmp_path / "out")


BAD_IMAGES: list[tuple[Callable[[Path, Document], Any], str]] = [
    (lambda photos, _: (photos / "a/01.png").unlink(), "cannot be read|No such file"),
    (lambda photos, _: (photos / "a/01.png").write_bytes(b"text"), "does not begin as an image"),
    (lambda _, doc: doc["images"][1].update(width=9), r"boxes are of 9 x \d+ pixels"),
    (lambda _, doc: doc["annotations"][-1].update(bbox=[0, 0, 500, 9]), "reaches beyond"),
]


@pytest.mark.parametrize(("change", "message"), BAD_IMAGES)
def test_wrong_images_are_bad_samples(
    change: Callable[[Path, Document], Any], message: str, tmp_path: Path
) -> None:
    source = write_coco(tmp_path / "in", drawn(2))
    document = json.loads((source / "boxes.json").read_text())
    change(source / "photos", document)
    (source / "boxes.json").write_text(json.dumps(document))
    words = (source / "boxes.json", source / "photos", tmp_path / "out")
    with pytest.raises(wt.SourceError, match=message) as error:
        wt.convert_coco(*words)
    assert "01.png" in str(error.value)
    assert len(wt.convert_coco(*words, on_error="skip", overwrite=True)) == 1


@pytest.mark.parametrize(
    ("member", "message"),
    [
        ({"boxes": [[0, 0, 9, 9]], "labels": []}, "as many labels as boxes"),
        ({"boxes": [[0, 0, 99, 9]], "labels": [0]}, "beyond its upright image of 24 x 20"),
        ({"boxes": [[0, 0, 0, 9]], "labels": [0]}, "x0 < x1"),
    ],
)
def test_boxes_that_do_not_fit_their_image_are_not_packed(
    member: Any, message: str, tmp_path: Path
) -> None:
    sample = {"__key__": "k", "png": picture(0), "boxes.json": member}
    assert message in str(attempt(lambda: wt.pack([sample], tmp_path / "out")))
