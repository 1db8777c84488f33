"""Contact sheets show what a sample holds: captions beside images, and masks in colors."""

from __future__ import annotations

import base64
import io
import json
import re
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

import wdstrain as wt
from tests.conftest import picture
from tests.support.known_faults import known_fault

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


UNSHOWN = known_fault("inspection/caption_sheet")


@pytest.mark.parametrize(
    ("make", "ending"),
    [
        pytest.param(table_set, "png", marks=UNSHOWN),
        pytest.param(column_set, "png", marks=UNSHOWN),
        (packed_set, "png"),
        (table_set, "html"),
        (packed_set, "html"),
    ],
)
def test_a_sheet_shows_the_caption_of_an_image(tmp_path: Path, make: Any, ending: str) -> None:
    sheets = []
    for caption in ("a red kite", "two boats on a lake at dawn"):
        make(tmp_path, caption)
        sheet = tmp_path / f"sheet.{ending}"
        wt.peek(str(tmp_path / "set"), 1).save(str(sheet))
        shown = sheet.read_bytes() if ending == "html" else pixels(sheet).tobytes()
        sheets.append(sha256(shown).hexdigest())
    assert sheets[0] != sheets[1]


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


BLACK = known_fault("inspection/mask_sheet_black")


@pytest.mark.parametrize(
    ("classes", "mode"),
    [
        pytest.param(12, "L", marks=BLACK),
        pytest.param(4, "L", marks=BLACK),
        (12, "P"),
    ],
)
@pytest.mark.parametrize("ending", ["png", "html"])
def test_a_sheet_shows_each_class_of_a_mask_in_its_own_color(
    tmp_path: Path, classes: int, mode: str, ending: str
) -> None:
    peeked = wt.peek(str(striped(tmp_path, classes, mode)), 1)
    sheet = tmp_path / f"sheet.{ending}"
    peeked.save(str(sheet))
    drawn = pixels(sheet if ending == "png" else last_image(sheet.read_text()))
    assert colors(drawn) >= classes - 1  # one may be black


def last_image(page: str) -> io.BytesIO:
    images = re.findall(r"data:image/\w+;base64,([\w+/=]+)", page)
    return io.BytesIO(base64.b64decode(images[-1]))
