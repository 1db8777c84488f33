"""Contact sheets show what a sample holds: captions beside images, and masks in colors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

import wdstrain as wt
from tests.conftest import picture

Pixels = npt.NDArray[np.int64]


def pixels(image: Any) -> Pixels:
    return np.asarray(Image.open(image).convert("RGB")).astype(np.int64)


# --- captions ---


def table_set(folder: Path, caption: str) -> None:
    """Convert a table with one image and its caption."""
    (folder / "a.png").write_bytes(picture(1, size=(64, 64)))
    (folder / "rows.jsonl").write_text(json.dumps({"file": "a.png", "words": caption}) + "\n")
    wt.convert_table(folder / "rows.jsonl", folder / "set", image="file", overwrite=True)


def packed_set(folder: Path, caption: str) -> None:
    sample = {"__key__": "a", "png": picture(1, size=(64, 64)), "txt": caption}
    wt.pack([sample], folder / "set", overwrite=True)


def column_set(folder: Path, caption: str) -> None:
    sample = {"__key__": "a", "png": picture(1, size=(64, 64)), "json": {"words": caption}}
    wt.pack([sample], folder / "set", overwrite=True)
    wt.index(folder / "set", columns=["json.words"])


@pytest.mark.parametrize("make", [table_set, column_set, packed_set])
def test_a_sheet_shows_the_caption_of_an_image(tmp_path: Path, make: Any) -> None:
    sheets = []
    for caption in ("a red kite", "two boats on a lake at dawn"):
        make(tmp_path, caption)
        peeked = wt.peek(str(tmp_path / "set"), 1)
        assert caption in repr(peeked)
        sheets.append(pixels(peeked.save(tmp_path / "sheet.png")).tobytes())
    assert sheets[0] != sheets[1]


def test_a_sheet_has_a_line_for_each_class_if_classes_are_chosen(tmp_path: Path) -> None:
    samples = [
        {"__key__": f"{name}{n}", "png": picture(n), "cls": number}
        for number, name in enumerate(("ant", "bee", "cow"))
        for n in range(4)
    ]
    wt.pack(samples, tmp_path / "set", classes=["ant", "bee", "cow"])
    heights = {}
    for order, n in (("first", 12), ("classes", 12), ("classes", 3)):
        sheet = wt.peek(tmp_path / "set", n, order=order).save(tmp_path / "sheet.png")
        heights[order, n] = len(pixels(sheet))
    assert heights["classes", 12] > heights["first", 12]  # three lines, not two
    assert heights["classes", 3] < heights["first", 12]  # one of each: they share a line
    sheet = wt.peek(tmp_path / "set", 2, classes=["bee", "bee", "cow"]).save(tmp_path / "s.png")
    assert abs(len(pixels(sheet)) - heights["first", 12]) < 80  # two lines: no class twice


# --- masks ---


def colors(image: Pixels) -> int:
    """Return the number of clearly different colors of areas; grays and noise do not count."""
    found, counts = np.unique((image // 8).reshape(-1, 3), axis=0, return_counts=True)
    distinct: list[Pixels] = []
    for color in found[(counts >= 200) & (np.ptp(found, axis=1) >= 4)]:
        if all(np.abs(color - other).max() >= 2 for other in distinct):
            distinct.append(color)
    return len(distinct)


def striped(folder: Path, classes: int, mode: str) -> Path:
    """Convert a black image whose mask has a stripe of each class."""
    stripes = np.repeat(np.arange(classes, dtype=np.uint8), 96 // classes)[:, None].repeat(96, 1)
    for kind, data in (("images", np.zeros((96, 96, 3), np.uint8)), ("masks", stripes)):
        (folder / kind).mkdir()
        image = Image.fromarray(data)
        if kind == "masks" and mode == "P":
            image.putpalette([value for n in range(classes) for value in (n * 20, 255 - n * 20, 0)])
        image.save(folder / kind / "a.png")
    wt.convert_folder(folder / "images", folder / "set", flat=True, masks=folder / "masks")
    return folder / "set"


@pytest.mark.parametrize(
    ("classes", "mode"),
    [
        (6, "L"),  # the color of class 7 is gray
        (4, "L"),
        (6, "P"),
    ],
)
def test_a_sheet_shows_each_class_of_a_mask_in_its_own_color(
    tmp_path: Path, classes: int, mode: str
) -> None:
    peeked = wt.peek(str(striped(tmp_path, classes, mode)), 1)
    for drawn in (pixels(peeked.save(tmp_path / "sheet.png")), peeked[0].pictures["mask.png"]):
        assert colors(np.asarray(drawn, np.int64)) >= classes - 1  # class 0 shows the image


def test_the_classes_in_a_mask_are_named(tmp_path: Path) -> None:
    names = ("sky", "road", "car", "tree")
    index = wt.open(striped(tmp_path, 4, "L"))
    assert wt.peek(index, 1)[0].labels == {"mask.png": "0, 1, 2, 3"}
    named = replace(index, labels=(wt.Label("seg", "mask", "mask.png", None, names),))
    assert wt.peek(named, 1)[0].labels == {"mask.png": ", ".join(names)}
