"""The colors of masks are those of their files: in the index, sheets, predictions and reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import wdstrain as wt

COLORS = {"sky": (128, 128, 128), "road": (128, 64, 128), "car": (64, 0, 200)}
HEX = ["#808080", "#804080", "#4000c8"]
SIZE = (24, 32)
NUMBERS = np.arange(SIZE[0] * SIZE[1], dtype=np.uint8).reshape(SIZE) // 4 % 3


def folders(folder: Path, colors: list[int]) -> Path:
    """Write black images, and masks whose palette begins with these colors; []: without one."""
    for name in ("images", "masks"):
        (folder / name).mkdir(parents=True)
    for number in range(12):
        Image.new("RGB", SIZE[::-1]).save(folder / "images" / f"{number}.png")
        mask = Image.fromarray(NUMBERS)
        if colors:
            mask.putpalette(colors)
        mask.save(folder / "masks" / f"{number}.png")
    return folder


def packed(source: Path, out: Path, **named: Any) -> wt.Index:
    return wt.convert_folder(
        source / "images",
        out,
        flat=True,
        masks=source / "masks",
        split={"train": 0.5, "val": 0.5},
        **named,
    )


def palette_of(folder: Path) -> Any:
    (label,) = json.loads((folder / "index.json").read_text())["wdstrain"]["labels"]
    return label.get("palette")


def test_the_palette_of_masks_colors_sheets_predictions_and_reports(tmp_path: Path) -> None:
    source = folders(tmp_path / "source", np.ravel([*COLORS.values()]).tolist())
    packed(source, tmp_path / "set", mask_classes=list(COLORS))
    packed(source, tmp_path / "bare")
    wt.index(tmp_path / "bare", label="mask.png", classes=list(COLORS))
    assert palette_of(tmp_path / "set") == palette_of(tmp_path / "bare") == HEX

    (view,) = wt.peek(tmp_path / "set", 1)
    wanted = np.array([*COLORS.values()])[NUMBERS] * 0.6
    shown = view.pictures["mask.png"][NUMBERS > 0].astype(int)  # class 0 shows the image
    assert np.abs(shown - wanted[NUMBERS > 0]).max() <= 1

    options: dict[str, Any] = {"epochs": 1, "image_size": SIZE, "batch_size": 4}
    wt.train(tmp_path / "set", tmp_path / "run", **options)
    report = (tmp_path / "run" / "report.html").read_text()
    assert [color for color in HEX if color not in report] == []
    best = tmp_path / "run" / "checkpoints" / "best.pt"
    wt.predict(best, tmp_path / "set" / "val-*.tar", tmp_path / "out.csv")
    for path in (tmp_path / "out").glob("*.png"):
        palette = Image.open(path).getpalette() or []
        assert palette[:9] == np.ravel([*COLORS.values()]).tolist()


@pytest.mark.parametrize(
    "colors", [[], [0, 0, 0, 1, 1, 1, 2, 2, 2], [9, 0, 0, 9, 0, 0, 1, 2, 3]], ids=str
)
def test_a_palette_that_does_not_tell_classes_apart_is_not_used(
    colors: list[int], tmp_path: Path
) -> None:
    source = folders(tmp_path / "source", colors)
    packed(source, tmp_path / "set", mask_classes=list(COLORS))
    assert palette_of(tmp_path / "set") is None
