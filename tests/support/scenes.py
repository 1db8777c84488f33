"""Images with colored rectangles, whose boxes a test finds again in the pixels."""

from __future__ import annotations

import itertools
import json
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

from tests.conftest import encoded

Pixels = npt.NDArray[np.uint8]
Box = list[float]  # x0, y0, x1, y1

NAMES = ("red", "green", "blue")
COLORS = np.array([[255, 0, 0], [0, 255, 0], [0, 0, 255]])
GRAY = 90

TURNS: tuple[str, ...] = ("FLIP_LEFT_RIGHT", "ROTATE_180", "FLIP_TOP_BOTTOM", "TRANSPOSE")
TURNS += ("ROTATE_90", "TRANSVERSE", "ROTATE_270")
# How an upright image is stored with this EXIF orientation.
STORED_BY = {orientation: Image.Transpose[name] for orientation, name in enumerate(TURNS, 2)}


class Scene(NamedTuple):
    """An upright image with one rectangle of each class. names: of the classes of the boxes."""

    pixels: Pixels
    boxes: list[Box]
    names: list[str]

    def file(self, kind: str, orientation: int = 1) -> bytes:
        """Return the image as a file, stored as EXIF says."""
        image = Image.fromarray(self.raster(orientation))
        exif = Image.Exif()
        exif[0x0112] = orientation
        how: dict[str, Any] = {"quality": 95, "subsampling": 0} if kind == "JPEG" else {}
        return encoded(image, kind, exif=exif.tobytes(), **how)

    def raster(self, orientation: int) -> Pixels:
        """Return the pixels as they lie in the file of this orientation."""
        image = Image.fromarray(self.pixels)
        return np.asarray(image.transpose(STORED_BY[orientation]) if orientation > 1 else image)

    @property
    def member(self) -> bytes:
        """The boxes as they are stored beside the upright image."""
        return json.dumps({"boxes": self.boxes, "labels": self.names}).encode()


def scene(rng: np.random.Generator, height: int, width: int, count: int = 3) -> Scene:
    """Return an image with `count` rectangles in columns of their own, so that none covers another."""
    pixels = np.full((height, width, 3), GRAY, np.uint8)
    edges = np.linspace(0, width, count + 1).astype(int)
    boxes, names = list[Box](), list[str]()
    for number, (low, high) in enumerate(itertools.pairwise(edges)):
        x0, y0 = int(rng.integers(low, high - 13)), int(rng.integers(0, height - 13))
        x1, y1 = int(rng.integers(x0 + 12, high)), int(rng.integers(y0 + 12, height + 1))
        pixels[y0:y1, x0:x1] = COLORS[number]
        boxes.append([x0, y0, x1, y1])
        names.append(NAMES[number])
    return Scene(pixels, boxes, names)


def seen(pixels: npt.NDArray[Any], label: int) -> Box | None:
    """Return the box around the pixels that have more than half of a class color; None: no pixel.

    pixels: [h, w, 3], 0 to 255.
    """
    distance = np.abs(pixels.astype(float) - COLORS[label]).sum(-1)
    rows, columns = np.nonzero(distance < np.abs(COLORS[label] - GRAY).sum() / 2)
    if not len(rows):
        return None
    return [*map(float, (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1))]
