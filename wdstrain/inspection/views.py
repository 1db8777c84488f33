"""`SampleView`: a sample as a person looks at it, with small images, labels and texts.

What is wrong with a sample is in its `error`. A mask is drawn in colors over the image beside it.
Views are drawn on one PNG with a light background, because it is printed and sent around.
"""

from __future__ import annotations

import io
import json
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageDraw, ImageFont, ImageOps
from torchvision.utils import draw_bounding_boxes

from wdstrain.decode.boxes import boxes
from wdstrain.decode.codecs import decode_mask
from wdstrain.inspection.result import text_of
from wdstrain.inspection.values import parsed
from wdstrain.report.printing import printable
from wdstrain.shards.declare import classes_in
from wdstrain.shards.declare import is_mask as is_mask_field
from wdstrain.shards.formats import is_image
from wdstrain.shards.kinds import COLORS, ColumnInfo

Pixels = npt.NDArray[np.uint8]
Array = npt.NDArray[Any]

_SIDE = 256  # pixels of the longer side of a thumbnail
_MAX_TEXT = 300  # characters of a text that are kept
_MIN_SIDE = 8  # pixels of the shorter side of an array that is shown as an image
_TEXTS = (
    *("txt", "text", "caption", "transcript"),
    *("cls", "cls2", "class", "count", "index", "inx", "id", "source", "valid"),
)
_OPACITY = 0.6  # of a mask over its image
_CELL = 192  # pixels of a picture in the PNG
_SHEET = 1280  # pixels of the width of a PNG
_PADDING, _LINE = 8, 15
_MAX_LINES = 3  # of each text of a sample
_TINY = 48  # pixels of the longer side of a picture that is enlarged without smoothing
_BACK, _CARD, _INK, _RED = "#f4f6f9", "#ffffff", "#1d2430", "#c8412b"


@dataclass(eq=False)
class SampleView:
    """Visible parts of a sample: images, labels, texts of other fields.

    shard, offset: where it is stored. labels: values as text, by name.
    pictures: thumbnails uint8[h, w, 3], by field. fields: what each field is, as text.
    error: why it cannot be shown; "" if it can.
    """

    key: str
    shard: str
    offset: int
    labels: dict[str, str] = field(default_factory=dict)
    pictures: dict[str, Pixels] = field(default_factory=dict, repr=False)
    fields: dict[str, str] = field(default_factory=dict)
    error: str = ""

    @property
    def picture(self) -> Pixels | None:
        """The first picture, uint8[h, w, 3]; None if there is none."""
        return next(iter(self.pictures.values()), None)

    @property
    def lines(self) -> list[str]:
        """Labels, error and other fields, a line of each. An only label has no name."""
        named = [f"{name} {value}" for name, value in self.labels.items()]
        labels = named if len(named) > 1 else self.labels.values()
        others = (f"{n}: {text}" for n, text in self.fields.items() if n not in self.pictures)
        return [*map(printable, (", ".join(labels), self.error, *others))]

    def as_dict(self) -> dict[str, Any]:
        """Return everything but the pixels as JSON-able values."""
        return {**vars(self), "pictures": list(self.pictures)}

    def add(self, name: str, sample: Mapping[str, bytes], labels: Sequence[ColumnInfo]) -> None:
        """Add a field of a sample as it is stored in a shard.

        labels: of the set, some of which it may hold.
        """
        mine, data = [label for label in labels if label.field == name], sample[name]
        try:
            for label in mine:
                if label.kind == "boxes" and self.pictures:
                    self._add_boxes(label, sample)
                elif label.kind not in ("mask", "boxes") and label.name not in self.labels:
                    names = classes_in(memoryview(data), label.entry, label.classes)
                    self.labels[label.name] = text_of(names)
            if is_mask(name, mine):
                label = mine[0] if mine else ColumnInfo(name, "mask", name)
                self._add_mask(label, decode_mask(data, label.ignored).astype(np.int64))
            elif not mine or is_image(name) or name.rpartition(".")[2] in ("npy", "json"):
                self._add_value(name, parsed(name, data))
        except Exception as error:  # parsers raise anything; it is shown in the sample's place
            reason = f"{name}: {str(error) or type(error).__name__}"
            self.error = f"{self.error}; {reason}" if self.error else reason

    def _add_value(self, name: str, value: Any) -> None:
        """Add an image or an array, a text, or a document of JSON."""
        if isinstance(value, np.ndarray) and value.ndim:
            self.fields[name] = f"{value.dtype}{list(value.shape)}"
            if (pixels := _as_image(value)) is not None:
                self.pictures[name] = _thumbnail(pixels)
        elif isinstance(value, np.ndarray):
            self.labels[name] = text_of(value.item())
        else:
            is_text = isinstance(value, str)
            text = value if is_text else json.dumps(value, ensure_ascii=False).replace('"', "")
            self.fields[name] = _shortened(text)

    def _add_mask(self, label: ColumnInfo, numbers: Array) -> None:
        """Add class numbers in colors, over the first picture. numbers: integers [h, w]"""
        name, classes, found = label.field, label.classes, np.unique(numbers).tolist()
        names = (classes[n] if 0 <= n < len(classes) else str(n) for n in found)
        self.labels[name] = _shortened(", ".join(names))
        black = np.zeros((*numbers.shape, 3), np.uint8)
        below = next(iter(self.pictures.values())) if self.pictures else _thumbnail(black)
        image = Image.fromarray(numbers.astype(np.uint8))
        small = np.array(image.resize(below.shape[1::-1], Image.Resampling.NEAREST))
        mixed = _OPACITY * label.colors[small] + (1 - _OPACITY) * below
        self.pictures[name] = np.where(small[:, :, None] == 0, below, mixed).astype(np.uint8)

    def _add_boxes(self, label: ColumnInfo, sample: Mapping[str, bytes]) -> None:
        """Draw boxes with the names of their classes on the first picture."""
        name, pixels = next(iter(self.pictures.items()))
        field = boxes(label.field, size=pixels.shape[:2], classes=label.classes, min_share=0)
        own = field.read("", sample[label.field], None, np.zeros(0), field.picture_in(sample))
        corner, numbers = own["boxes"][:, :2], own["labels"].tolist()
        last = np.maximum(own["boxes"][:, 2:] - 1, corner)  # pixels that the boxes hold
        drawn = draw_bounding_boxes(
            torch.from_numpy(pixels).permute(2, 0, 1),
            torch.from_numpy(np.hstack([corner, last])),
            [label.classes[number] for number in numbers],
            [tuple(COLORS[(number + 1) % 256].tolist()) for number in numbers],
        )
        self.pictures[name] = drawn.permute(1, 2, 0).numpy()


def is_mask(name: str, labels: Sequence[ColumnInfo] = ()) -> bool:
    """Return whether a field holds class numbers of pixels. labels: that it holds."""
    return is_mask_field(name) or any(label.kind == "mask" for label in labels)


def is_shown(name: str) -> bool:
    """Return whether the values of a field have a type that is shown."""
    return is_image(name) or name.rpartition(".")[2] in (*_TEXTS, "npy", "json")


# --- values as texts ------------------------------------------------------------------------------


def _shortened(text: str) -> str:
    """Return the beginning of a text, as one line."""
    text = " ".join(text.split())
    return text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 1]}…"


# --- values as small images -----------------------------------------------------------------------


def _thumbnail(pixels: Pixels) -> Pixels:
    """Return a copy of at most 256 x 256 pixels. uint8[h, w, 3]"""
    image = Image.fromarray(np.ascontiguousarray(pixels))
    image.thumbnail((_SIDE, _SIDE), reducing_gap=2.0)
    return np.array(image)


def _as_image(value: Array) -> Pixels | None:
    """Return an array as an image uint8[h, w, 3]; None if it has another shape.

    Shapes are [h, w], [h, w, 1 or 3] and [1 or 3, h, w]. uint8 stays as it is. Of other numbers, 0
    to 1 is black to white if they all lie there, else their extremes are.
    """
    if value.ndim == 3 and value.shape[2] not in (1, 3):
        value = np.moveaxis(value, 0, -1)
    planes = np.atleast_3d(value)
    is_picture = planes.dtype.kind in "biuf" and planes.shape[2:] in ((1,), (3,))
    if not is_picture or min(planes.shape[:2]) < _MIN_SIDE:
        return None
    if planes.dtype != np.uint8:
        planes = np.nan_to_num(planes.astype(np.float64), posinf=0, neginf=0)
        low, high = float(planes.min()), float(planes.max())
        limits = (0, 1) if low >= 0 and high <= 1 else (low, high)
        planes = np.rint(np.interp(planes, limits, (0, 255))).astype(np.uint8)
    return np.broadcast_to(planes, (*planes.shape[:2], 3))


# --- sheets ---------------------------------------------------------------------------------------


def png_sheet(rows: Sequence[Sequence[SampleView]], title: str) -> bytes:
    """Return a PNG with cells of one width in a grid. Each of `rows` begins on a new line."""
    panels = max([1, *(len(view.pictures) for row in rows for view in row)])
    side = panels * (_CELL + _PADDING) + _PADDING
    columns = max(1, min(max(map(len, rows), default=1), _SHEET // side))
    lines = [
        [_cell(view, side) for view in row[i : i + columns]]
        for row in rows
        for i in range(0, len(row), columns)
    ]
    width = max(480, columns * side)
    head = _wrapped(title, width, 14)
    heights = [max(cell.height for cell in line) for line in lines]
    *tops, height = np.cumsum([20 * len(head) + 2 * _PADDING, *heights]).tolist()
    sheet = Image.new("RGB", (width, height), _BACK)
    ImageDraw.Draw(sheet).text((_PADDING, _PADDING), "\n".join(head), _INK, _font(14))
    for top, line in zip(tops, lines, strict=True):
        for column, cell in enumerate(line):
            sheet.paste(cell, (column * side, top))
    buffer = io.BytesIO()
    sheet.save(buffer, "PNG", compress_level=3)  # three times as fast, hardly larger
    return buffer.getvalue()


def _cell(view: SampleView, width: int) -> Image.Image:
    """Return the cell of a sample: its pictures, labels, error, captions, fields and key."""
    lines = [line for text in view.lines for line in _wrapped(text, width, 11)[:_MAX_LINES]]
    lines = [*lines[: 3 * _MAX_LINES], *_wrapped(view.key, width, 11)[:_MAX_LINES]]
    top = _CELL + 2 * _PADDING if view.pictures else _PADDING
    cell = Image.new("RGB", (width, top + _LINE * len(lines) + _PADDING), _CARD)
    for place, pixels in enumerate(view.pictures.values()):
        is_tiny = max(pixels.shape[:2]) <= _TINY  # its pixels stay crisp
        method = Image.Resampling.NEAREST if is_tiny else Image.Resampling.LANCZOS
        picture = ImageOps.pad(Image.fromarray(pixels), (_CELL, _CELL), method, _CARD)
        cell.paste(picture, (_PADDING + place * (_CELL + _PADDING), _PADDING))
    color, frame = (_RED, _RED) if view.error else (_INK, _BACK)
    ImageDraw.Draw(cell).text((_PADDING, top), "\n".join(lines), color, _font(11), spacing=2)
    return ImageOps.expand(ImageOps.crop(cell, 2), 2, frame)


def _wrapped(text: str, width: int, size: int) -> list[str]:
    """Return lines of text for a width in pixels. size: of the font."""
    return textwrap.wrap(printable(text), max(8, int((width - 2 * _PADDING) / (0.6 * size))))


@lru_cache(maxsize=2)
def _font(size: int) -> ImageFont.ImageFont | ImageFont.FreeTypeFont:
    with suppress(OSError):
        return ImageFont.truetype("DejaVuSans.ttf", size)
    return ImageFont.load_default(size)  # it has few letters beyond ASCII
