"""Segmentation: masks are learned, scored as numpy scores them, and predicted as files."""

from __future__ import annotations

import json
import re
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import wdstrain as wt
from tests.conftest import encoded, write_tar
from tests.support.outcomes import result_or_refusal
from tests.support.small_runs import rows_of
from wdstrain.cli import main

COLORS = np.array([[30, 30, 30], [220, 40, 40], [40, 60, 220]])
CLASSES = "background,red,blue"
QUICK: dict[str, Any] = {"label": "mask.png", "classes": CLASSES, "image_size": 16, "batch_size": 8}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders images and masks; colors are the classes of the mask, whose row 0 has no class."""
    folder, rng = tmp_path_factory.mktemp("scenes"), np.random.default_rng(0)
    for name in ("images", "masks"):
        (folder / name).mkdir()
    for number in range(60):
        mask = np.zeros((16, 20), np.uint8)
        for kind, top, left in zip(
            (1, 2), rng.integers(0, 10, 2), rng.integers(0, 14, 2), strict=True
        ):
            mask[top : top + 6, left : left + 6] = kind
        pixels = np.clip(COLORS[mask] + rng.normal(0, 8, (16, 20, 3)), 0, 255).astype(np.uint8)
        mask[0] = 255
        Image.fromarray(pixels).save(folder / "images" / f"{number:03d}.jpg", quality=95)
        Image.fromarray(mask).save(folder / "masks" / f"{number:03d}.png")
    return folder


@pytest.fixture(scope="module")
def shards(folders: Path) -> Path:
    out, split = folders / "shards", {"train": 0.8, "val": 0.2}
    wt.convert_folder(folders / "images", out, flat=True, masks=folders / "masks", split=split)
    return out


@pytest.fixture(scope="module")
def run(shards: Path) -> Path:
    """A run of the command line that learned the masks of the shards."""
    out = shards.parent / "run"
    words = ["--label", "mask.png", "--classes", CLASSES, "--image-size", "16", "--lr", "5e-3"]
    words += ["--batch-size", "8", "--epochs", "5", "--augment", "rrc+flip", "--deterministic"]
    assert main(["train", str(shards), "--out", str(out), *words]) == 0
    return out


def best(run: Path) -> str:
    return str(run / "checkpoints" / "best.pt")


def test_masks_are_learned_and_the_best_mean_iou_is_kept(run: Path, shards: Path) -> None:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    scores = [line["val"]["mIoU"] for line in lines]
    assert max(scores) > 0.6
    task, metrics = wt.evaluate(best(run), f"{shards}/val-*.tar")
    assert metrics["mIoU"] == pytest.approx(max(scores), abs=1e-9)
    assert set(lines[-1]["classes"]["mask"]) == {"background", "red", "blue"}
    rows = metrics["classes"]["mask"].values()
    assert np.mean([row["IoU"] for row in rows]) == pytest.approx(metrics["mIoU"])
    assert "3 classes per pixel" in str(task)
    report = (run / "report.html").read_text()
    words = ("image, prediction, true mask", "IoU", "Confusion matrix", "Percent of the pixels")
    assert [text for text in words if text not in report] == []


@pytest.mark.parametrize("way", ["convert", "index"])
def test_masks_whose_classes_the_set_declares_are_learned_alike(
    shards: Path, folders: Path, tmp_path: Path, way: str
) -> None:
    """Names and an ignored number of the set give the run that the same options of train give."""
    masks, names = tmp_path / "masks", CLASSES.split(",")
    masks.mkdir()
    for path in (folders / "masks").iterdir():
        numbers = np.asarray(Image.open(path))
        Image.fromarray(np.where(numbers == 255, 7, numbers)).save(masks / path.name)
    options: dict[str, Any] = {"flat": True, "masks": masks, "split": {"train": 0.8, "val": 0.2}}
    named: dict[str, Any] = {"mask_classes": names, "ignore": 7} if way == "convert" else {}
    wt.convert_folder(folders / "images", tmp_path / "set", **options, **named)
    if way == "index":
        wt.index(tmp_path / "set", label="mask.png", classes=names, ignore=7)
    short: dict[str, Any] = {**QUICK, "epochs": 1, "deterministic": True, "device": "cpu"}
    told = wt.train(shards, tmp_path / "told", **short)
    del short["label"], short["classes"]
    for label in (None, "mask", "mask.png"):
        run = wt.train(tmp_path / "set", tmp_path / "run", label=label, overwrite=True, **short)
        assert run.val == told.val
    assert (
        wt.evaluate(best(tmp_path / "run"), f"{tmp_path}/set/val-*.tar")[1]["mIoU"]
        == (told.val["mIoU"])
    )


@pytest.mark.parametrize(
    "other",
    [
        {"mask_classes": ["background", "blue", "red"]},
        {"mask_classes": ["background", "red", "blue"], "ignore": 7},
    ],
    ids=["numbering", "ignored"],
)
def test_masks_that_sets_number_differently_are_not_mixed(
    folders: Path, tmp_path: Path, other: dict[str, Any]
) -> None:
    """A pixel is a number, so no column joins the classes of two sets by name."""
    source = {"source": folders / "images", "masks": folders / "masks", "flat": True}
    wt.convert_folder(out=tmp_path / "a", **source, mask_classes=CLASSES.split(","))
    wt.convert_folder(out=tmp_path / "b", **source, **other)
    options: dict[str, Any] = {"epochs": 1, "image_size": 16, "batch_size": 8}
    for more in ({}, {"label": "mask.png", "classes": CLASSES}):
        with pytest.raises(wt.UsageError, match="differs between these sets: 0 background, 1 red"):
            wt.train([tmp_path / "a", tmp_path / "b"], tmp_path / "run", **options, **more)
    with pytest.raises(wt.UsageError, match="these shards declare 0 background, 1"):
        wt.train(tmp_path / "a", tmp_path / "run", val=tmp_path / "b", **options)
    assert not (tmp_path / "run").exists()
    wt.train(tmp_path / "a", tmp_path / "run", **options)
    with pytest.raises(wt.UsageError, match="these shards declare 0 background, 1"):
        wt.evaluate(best(tmp_path / "run"), tmp_path / "b")


@pytest.mark.parametrize("source", ["folder", "shards"])
def test_predicted_masks_have_the_size_and_the_name_of_their_image(
    run: Path, folders: Path, tmp_path: Path, source: str
) -> None:
    """Pixels that the model does not see are 255."""
    images = urls = tmp_path / "images"
    images.mkdir()
    (images / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n cut")
    for number in range(3):
        photo = Image.open(folders / "images" / f"{number:03d}.jpg")
        photo.resize((24 + 4 * number, 18)).save(images / f"street {number}.png")
    if source == "shards":
        urls, paths = tmp_path / "set", sorted(images.iterdir())
        wt.pack(({"__key__": path.stem, "png": path.read_bytes()} for path in paths), urls)
    wt.predict(best(run), urls, tmp_path / "p.csv")
    broken, *rows = sorted(rows_of(tmp_path / "p.csv"), key=lambda row: row["key"])
    assert (broken["mask"], len(rows)) == ("", 3)
    assert broken["error"]
    for number, row in enumerate(rows):
        assert f"street {number}" in row["mask"]
        mask, border = np.asarray(Image.open(tmp_path / row["mask"])), 3 + 2 * number
        assert mask.shape == (18, 24 + 4 * number)
        assert (mask[:, [*range(border), *range(-border, 0)]] == 255).all()
        assert (mask[1:-1, border + 1 : -border - 1] < 3).all()
    for name, options, words in (
        ("o.csv", {"probabilities": True}, "probabilities: not available for masks"),
        ("o.csv", {"embeddings": True}, "embeddings: not available for masks"),
        ("p.csv", {}, "p has files already"),
    ):
        with pytest.raises(wt.UsageError, match=words):
            wt.predict(best(run), urls, tmp_path / name, **options)


def test_classes_without_pixels_are_in_no_mean(shards: Path, tmp_path: Path) -> None:
    wt.train(shards, tmp_path / "run", **{**QUICK, "classes": "7", "epochs": 2, "lr": 0.01})
    metrics = wt.evaluate(best(tmp_path / "run"), f"{shards}/val-*.tar")[1]
    shares = [row["IoU"] for row in metrics["classes"]["mask"].values()]
    there = [share for share in shares if share is not None]
    assert metrics["mIoU"] == pytest.approx(np.mean(there))
    assert metrics["classes_without_pixels"] == len(shares) - len(there) > 0


def test_a_model_of_torchvision_learns_masks(shards: Path, tmp_path: Path) -> None:
    options = {**QUICK, "limit_train_batches": 1, "limit_val_batches": 1, "epochs": 1}
    done = wt.train(shards, tmp_path / "run", model="lraspp_mobilenet_v3_large", **options)
    assert 0 <= done.val["mIoU"] <= 1
    assert wt.evaluate(best(tmp_path / "run"), f"{shards}/val-*.tar")[1]["samples"] == 12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"classes": None}, "Name their classes"),
        ({"augment": "trivialaugment"}, "masks would not follow"),
        ({"mixup": 0.2}, "they mix the classes of one label"),
        ({"model": "resnet18"}, "no model for masks"),
        ({"fields": {"image": wt.image()}}, "need an image field of wt.image with a size"),
    ],
)
def test_options_that_do_not_fit_masks_are_refused(
    shards: Path, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(wt.UsageError, match=message):
        wt.train(shards, tmp_path / "run", **{**QUICK, "epochs": 1, **options})
    assert not (tmp_path / "run").exists()


def test_masks_without_images_and_jpeg_masks_are_named(folders: Path, tmp_path: Path) -> None:
    images, masks = folders / "images", tmp_path / "masks"
    masks.mkdir()
    for name in ("000", "other"):
        shutil.copy(folders / "masks" / "000.png", masks / f"{name}.png")
    index = wt.convert_folder(images, tmp_path / "out", flat=True, masks=masks)
    assert index.info["ignored"] == {"images without a mask": 59, "masks without an image": 1}
    assert index["000"]["mask.png"] == (masks / "000.png").read_bytes()
    (masks / "001.jpg").write_bytes(b"")
    for source, options, words in (
        (images, {"flat": True, "masks": masks}, "a JPEG changes class numbers"),
        (images, {"masks": folders / "masks"}, "flat=True"),
        (folders, {"flat": True, "masks": folders / "masks"}, "packed as images"),
    ):
        with pytest.raises((wt.SourceError, wt.UsageError), match=words):
            wt.convert_folder(source, tmp_path / "more", **options)


def train_of_masks(folder: Path, values: tuple[int, int], mode: str, classes: str) -> int:
    """Convert eight images, and masks with these two values, and train; return the status."""
    for number in range(8):
        inside = np.zeros((16, 16), bool)
        inside[4:12, 4 : 5 + number] = True
        gray = Image.fromarray(np.where(inside, 250, 40).astype(np.uint8))
        mask = Image.fromarray(np.where(inside, *values[::-1]).astype(np.uint8)).convert(mode)
        for name, image in (("images", gray.convert("RGB")), ("masks", mask)):
            (folder / name).mkdir(exist_ok=True)
            image.save(folder / name / f"street{number}.png")
    words = ["--flat", "--masks", str(folder / "masks")]
    status = main(["convert", "folder", str(folder / "images"), str(folder / "set"), *words])
    words = ["--label", "mask.png", "--classes", classes, "--image-size", "16", "--epochs", "1"]
    words += ["--batch-size", "4", "--device", "cpu", "--out", str(folder / "run")]
    return status or main(["train", str(folder / "set"), *words])


@pytest.mark.parametrize(
    ("values", "mode", "classes", "named"),
    [
        ((0, 255), "L", "background,lesion", "255|lesion"),
        ((0, 255), "1", "background,lesion", "255|lesion"),
        ((1, 2), "L", "background,lesion,vessel", "background"),
        ((0, 1), "RGB", "background,lesion", "RGB|channels"),
    ],
    ids=["0, 255", "1 bit", "from 1", "RGB"],
)
def test_values_of_masks_that_are_no_class_numbers_are_named(
    tmp_path: Path,
    values: tuple[int, int],
    mode: str,
    classes: str,
    named: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The conversion or the training names a value that is no class, or a class without pixels."""
    train_of_masks(tmp_path, values, mode, classes)
    captured = capsys.readouterr()
    lines = (captured.out + captured.err).replace(str(tmp_path), "").splitlines()
    said = "\n".join(line for line in lines if "samples/s" not in line)
    assert re.search(rf"\b({named})\b", said), said


def test_a_class_number_beyond_the_classes_has_a_hint_that_helps(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for call in (
        lambda: train_of_masks(tmp_path, (3, 3), "L", "3"),
        lambda: main(["evaluate", best(run), str(tmp_path / "set")]),
    ):
        assert call() != 0
        error = capsys.readouterr().err
        assert "class number 3" in error
        assert "--on-error replace goes on" not in " ".join(error.split())


@pytest.mark.parametrize("name", ["mask", "mask.png"])
def test_a_field_of_masks_may_be_named_as_label(shards: Path, tmp_path: Path, name: str) -> None:
    fields = {"image": wt.image(size=16), name: wt.mask("mask.png", size=16)}
    options = {**QUICK, "fields": fields, "epochs": 1, "limit_train_batches": 1}
    del options["image_size"]
    outcome = result_or_refusal(lambda: wt.train(shards, tmp_path / "run", **options))
    assert not isinstance(outcome, str) or re.search("['\"]mask['\"]", outcome), outcome


def jpeg(image: Image.Image, orientation: int) -> bytes:
    """Return a photo that is shown rotated."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(image, "JPEG", quality=100, exif=exif)


@pytest.mark.parametrize(
    ("orientation", "drawn_on", "size"),
    [
        (6, "stored", (40, 20)),
        (6, "upright", (20, 40)),
        (1, "upright", (80, 40)),
        (1, "cropped", 0),
    ],
    ids=["rotated", "turned", "twice", "cropped"],
)
def test_a_mask_lies_on_its_image_or_is_a_bad_sample(
    tmp_path: Path, orientation: int, drawn_on: str, size: Any
) -> None:
    """The left third of the upright image is white, and the mask has it as class 1."""
    upright = np.zeros((20, 40) if orientation == 1 else (40, 20), np.uint8)
    upright[:, : upright.shape[1] // 3] = 255
    stored = upright if orientation == 1 else np.ascontiguousarray(np.rot90(upright))
    mask = Image.fromarray((stored if drawn_on == "stored" else upright) // 255)
    if drawn_on == "cropped":
        mask, size = mask.crop((10, 0, 30, 20)), (20, 20)
    sample = {"jpg": jpeg(Image.fromarray(np.stack([stored] * 3, 2)), orientation)}
    sample |= {"mask.png": encoded(mask.resize(size, Image.Resampling.NEAREST), "PNG")}
    options: dict[str, Any] = {"size": upright.shape, "augment": "flip"}
    fields = {"image": wt.image("jpg", **options), "mask": wt.mask("mask.png", **options)}
    try:
        wt.pack((sample for _ in range(4)), tmp_path / "set")
        with closing(wt.Loader(tmp_path / "set", fields, batch_size=4)) as loader:
            batch = next(iter(loader))
    except wt.WdstrainError:
        return
    white = batch["image"][:, 0] > 127
    assert float((white == (batch["mask"] == 1)).float().mean()) > 0.95


def test_masks_of_another_shape_in_foreign_shards_end_training_at_its_start(tmp_path: Path) -> None:
    """A photo that is shown rotated, with a mask that was drawn on its stored raster."""
    fields = {
        "jpg": jpeg(Image.new("RGB", (40, 20)), 6),
        "mask.png": encoded(Image.new("L", (40, 20)), "PNG"),
    }
    write_tar(tmp_path / "a.tar", [(f"k{n}", fields) for n in range(8)])
    with pytest.raises(wt.UsageError, match=r"key 'k0': its mask.png has 40 x 20 pixels.*upright"):
        wt.train(tmp_path / "a.tar", tmp_path / "run", **QUICK, epochs=1)
    assert not (tmp_path / "run").exists()
