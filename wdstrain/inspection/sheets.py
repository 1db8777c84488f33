"""Samples as text for a terminal, and as one PNG.

Keys in the text are complete, so that they can be copied. The PNG has a light background, because
it is printed and sent around.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache

from PIL import Image, ImageDraw, ImageFont, ImageOps
from rich.cells import cell_len, set_cell_size

from wdstrain.inspection.views import Pixels, SampleView
from wdstrain.report.printing import printable

_MAX_ROWS = 20  # of the table in a terminal
_WIDTH = 80  # columns of a terminal

_LARGEST_CELL, _SMALLEST_CELL = 192, 72  # pixels of a picture in the PNG
_MANY = 500  # pictures from which on they are small
_SHEET = 1280  # pixels of the width of a PNG
_PADDING, _LINE = 8, 15
_MAX_LINES = 5  # of text under a picture; without pictures twice as many
_TINY = 48  # pixels of the longer side of a picture that is enlarged without smoothing
_BACK, _CARD, _INK, _RED = "#f4f6f9", "#ffffff", "#1d2430", "#c8412b"


def text_table(samples: Sequence[SampleView]) -> str:
    """Return a row for each sample: key, labels, and what else there is or is wrong.

    Keys are complete. What does not fit into 80 columns is cut at the end of the row.
    """
    lines, shown = list[str](), samples[:_MAX_ROWS]
    keys = [printable(view.key) for view in shown]
    key_width = min(40, max(map(cell_len, keys), default=0))
    label_width = min(26, max((cell_len(view.label_text) for view in shown), default=0))
    for key, view in zip(keys, shown, strict=True):
        fields = ", ".join(f"{name}: {value}" for name, value in view.fields.items())
        other = printable("; ".join(filter(None, (view.error, view.text, fields))))
        padded = set_cell_size(key, max(cell_len(key), key_width))
        row = f"{padded}  {set_cell_size(view.label_text, label_width)}  {other}"
        lines.append(set_cell_size(row, max(_WIDTH, cell_len(key))).rstrip())
    more = [f"... and {len(samples) - _MAX_ROWS} more"] * (len(samples) > _MAX_ROWS)
    return "\n".join([*lines, *more])


def png_sheet(rows: Sequence[Sequence[SampleView]], title: str, notes: Sequence[str]) -> bytes:
    """Return a PNG with equal cells in a grid. Each of `rows` begins on a new line."""
    samples = [view for row in rows for view in row]
    pictures = max([1, *(len(view.pictures) for view in samples)])
    side = _LARGEST_CELL if len(samples) * pictures < _MANY else _SMALLEST_CELL
    width = pictures * (side + _PADDING) + _PADDING
    columns = max(1, min(max(map(len, rows), default=1), _SHEET // width))
    lines = [row[i : i + columns] for row in rows for i in range(0, len(row), columns)]
    tall = side + _PADDING if any(view.pictures for view in samples) else 0
    text_lines = max((len(_texts(view, width)) for view in samples), default=0)
    height = tall + text_lines * _LINE + 2 * _PADDING
    sheet_width = max(480, columns * width)
    head = [line for text in (title, *notes) for line in _wrapped(text, sheet_width, 14)]
    top = 20 * len(head) + 2 * _PADDING
    sheet = Image.new("RGB", (sheet_width, top + len(lines) * height), _BACK)
    ImageDraw.Draw(sheet).text((_PADDING, _PADDING), "\n".join(head), _INK, _font(14))
    for number, line in enumerate(lines):
        for column, view in enumerate(line):
            cell = _cell(view, side, (width, height))
            sheet.paste(cell, (column * width, top + number * height))
    buffer = io.BytesIO()
    sheet.save(buffer, "PNG", compress_level=3)  # three times as fast, hardly larger
    return buffer.getvalue()


def _cell(view: SampleView, side: int, size: tuple[int, int]) -> Image.Image:
    """Return the cell of a sample: its pictures and texts.

    side: pixels of the square for a picture; size: of the cell.
    """
    cell, top = Image.new("RGB", size, _CARD), _PADDING
    for place, pixels in enumerate(view.pictures.values()):
        picture, top = _fitted(pixels, side), side + 2 * _PADDING
        left, up = (side - picture.width) // 2, (side - picture.height) // 2
        cell.paste(picture, (_PADDING + place * (side + _PADDING) + left, _PADDING + up))
    color, frame = (_RED, _RED) if view.error else (_INK, _BACK)
    draw, text = ImageDraw.Draw(cell), "\n".join(_texts(view, cell.width))
    draw.text((_PADDING, top), text, color, _font(11), spacing=2)
    draw.rectangle((0, 0, cell.width - 1, cell.height - 1), outline=frame, width=2)
    return cell


def _texts(view: SampleView, width: int) -> list[str]:
    """Return the lines under a picture: label, error, texts and key. width: pixels of the cell."""
    texts = (view.label_text, view.error, view.text, view.field_text)
    lines = [line for text in texts for line in _wrapped(text, width, 11)[:4]]
    key = _wrapped(view.key, width, 11)[:2]
    most = _MAX_LINES if view.pictures else 2 * _MAX_LINES
    return [*lines[: most - len(key)], *key]


def _fitted(pixels: Pixels, side: int) -> Image.Image:
    """Return a picture that fits into a square; a tiny one with crisp pixels."""
    picture = Image.fromarray(pixels)
    is_tiny = max(picture.size) <= _TINY
    resampling = Image.Resampling.NEAREST if is_tiny else Image.Resampling.LANCZOS
    return ImageOps.contain(picture, (side, side), resampling)


def _wrapped(text: str, width: int, size: int) -> list[str]:
    """Return lines of text for a width in pixels. size: of the font."""
    return textwrap.wrap(printable(text), max(8, int((width - 2 * _PADDING) / (0.6 * size))))


@lru_cache(maxsize=2)
def _font(size: int) -> ImageFont.ImageFont | ImageFont.FreeTypeFont:
    with suppress(OSError):
        return ImageFont.truetype("DejaVuSans.ttf", size)
    return ImageFont.load_default(size)  # it has few letters beyond ASCII
