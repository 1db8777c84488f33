"""A contact sheet as one PNG: equal cells in a grid, each with pictures, labels, text and key.

Drawn by Pillow, which is here anyway, on paper that is light whatever the screen is, for it is sent around and printed. Its size is
bounded: many samples get smaller cells, so a thousand are one picture that can still be opened. Pillow's own font holds unaccented
Latin alone, so a common one of the system is taken where there is one; what a font cannot draw is a box.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from PIL import Image, ImageDraw, ImageFont

from wdstrain.looking.picturing import Pixels
from wdstrain.looking.seeing import Seen
from wdstrain.report.printing import printable

Font = ImageFont.ImageFont | ImageFont.FreeTypeFont

_PAPER, _CARD, _BACK = "#f4f6f9", "#ffffff", "#e9ecf1"
_INK, _SOFT, _RED = "#1d2430", "#667085", "#c8412b"

_LARGEST, _SMALLEST = 192, 72  # pixels of a picture's side
_LOWEST, _WORDY = (
    0.3,
    0.6,
)  # least height of a cell by its side: of pictures alone, where words stand in place of one
_TINY = 48  # pixels of the longer side of what is enlarged by whole pixels
_AREA = 20e6  # pixels of all pictures together, as far as the smallest side allows
_WIDTH, _WIDEST = 1280, 4000  # of a sheet of few samples, of any
_EDGE, _GAP, _PAD = 16, 8, 6
_LINE, _TITLE = 15, 20  # heights of lines
_TEXTS = 2  # lines of a text
_FONTS = ("DejaVuSans.ttf", "arial.ttf")


class _Grid(NamedTuple):
    """How cells lie. wide: pictures in a cell; side, height: pixels that are there for one; lines: of text under them."""

    columns: int
    wide: int
    side: int
    height: int
    lines: int

    @property
    def cell(self) -> tuple[int, int]:
        width = self.wide * self.side + (self.wide - 1) * _GAP // 2 + 2 * _PAD
        return width, self.height + 2 * _PAD + self.lines * _LINE + 2

    def width(self, columns: int) -> int:
        return 2 * _EDGE + columns * (self.cell[0] + _GAP) - _GAP


def sheet(samples: Sequence[Seen], title: str, notes: Sequence[str]) -> bytes:
    """The sheet as a PNG."""
    grid = _grid(samples)
    width, heads = max(480, grid.width(grid.columns)), [title, *notes]
    wrapped = [
        line for head in heads for line in _wrapped(printable(head), width - 2 * _EDGE, 14, 4)
    ]
    top = _EDGE + len(wrapped) * _TITLE + _GAP
    rows = math.ceil(len(samples) / grid.columns)
    image = Image.new("RGB", (width, top + rows * (grid.cell[1] + _GAP) + _EDGE - _GAP), _PAPER)
    draw = ImageDraw.Draw(image)
    for number, line in enumerate(wrapped):
        draw.text((_EDGE, _EDGE + number * _TITLE), line, _INK if number == 0 else _SOFT, _font(14))
    for number, seen in enumerate(samples):
        row, column = divmod(number, grid.columns)
        _draw_cell(
            image,
            draw,
            seen,
            grid,
            _EDGE + column * (grid.cell[0] + _GAP),
            top + row * (grid.cell[1] + _GAP),
        )
    buffer = io.BytesIO()
    image.save(
        buffer, "PNG", compress_level=3
    )  # a third of the time, and photographs hardly get smaller
    return buffer.getvalue()


def _grid(samples: Sequence[Seen]) -> _Grid:
    wide = max([1, *(len(one.pictures) for one in samples)])
    side = int(max(_SMALLEST, min(_LARGEST, math.sqrt(_AREA / max(1, len(samples) * wide)))))
    inner = _Grid(1, wide, side, side, 0).cell[0] - 2 * _PAD
    lines = 1 + (wide > 1) + max((len(_words(one, inner)) for one in samples), default=0)
    shapes = [pixels.shape for one in samples for pixels in one.pictures.values()]
    lowest = _LOWEST if all(one.pictures for one in samples) else _WORDY
    height = round(side * min(1.0, max([lowest, *(shape[0] / shape[1] for shape in shapes)])))
    grid = _Grid(1, wide, side, height, lines)
    most = next(
        (columns for columns in range(1, 1 + len(samples)) if grid.width(columns + 1) > _WIDEST),
        max(1, len(samples)),
    )
    fits = max(1, (_WIDTH - 2 * _EDGE + _GAP) // (grid.cell[0] + _GAP))
    square = math.ceil(math.sqrt(1.4 * len(samples) * grid.cell[1] / grid.cell[0]))
    return grid._replace(columns=max(1, min(most, len(samples), max(fits, square))))


def _words(seen: Seen, width: int) -> list[tuple[str, str, int]]:
    """(text, colour, size) of each line between a picture and its key."""
    lines = [
        (line, _INK, 12) for line in _wrapped(seen.said, width, 12, min(_TEXTS, len(seen.labels)))
    ]
    lines += [(printable(seen.error), _RED, 11)] if seen.error and seen.pictures else []
    if seen.text and (seen.pictures or seen.error):
        lines += [(line, _INK, 11) for line in _wrapped(printable(seen.text), width, 11, _TEXTS)]
    return lines


def _draw_cell(
    image: Image.Image, draw: ImageDraw.ImageDraw, seen: Seen, grid: _Grid, left: int, top: int
) -> None:
    width, height = grid.cell
    broken = bool(seen.error)
    draw.rectangle(
        (left, top, left + width - 1, top + height - 1),
        _CARD,
        _RED if broken else "#d8dce3",
        2 if broken else 1,
    )
    x, y, inner = left + _PAD, top + _PAD, width - 2 * _PAD
    if seen.pictures:
        for place, (name, pixels) in enumerate(seen.pictures.items()):
            at = x + place * (grid.side + _GAP // 2)
            _paste(image, draw, pixels, (grid.side, grid.height), at, y)
            if len(seen.pictures) > 1:
                draw.text(
                    (at, y + grid.height + 2),
                    _fitted(printable(name), grid.side, 10),
                    _SOFT,
                    _font(10),
                )
    else:
        draw.rectangle((x, y, x + inner - 1, y + grid.height - 1), _BACK)
        said = printable(seen.error or seen.text or seen.rest)
        for number, line in enumerate(_wrapped(said, inner - 8, 11, (grid.height - 8) // _LINE)):
            draw.text((x + 4, y + 4 + number * _LINE), line, _RED if broken else _INK, _font(11))
    y += grid.height + 2 + (_LINE if grid.wide > 1 else 0)
    for line, colour, size in [*_words(seen, inner), (printable(seen.key), _SOFT, 10)]:
        draw.text((x, y), _fitted(line, inner, size), colour, _font(size))
        y += _LINE


def _paste(
    image: Image.Image,
    draw: ImageDraw.ImageDraw,
    pixels: Pixels,
    place: tuple[int, int],
    left: int,
    top: int,
) -> None:
    """A picture in the middle of its place; a tiny one is enlarged by whole pixels, which stay to be seen."""
    width, height = place
    draw.rectangle((left, top, left + width - 1, top + height - 1), _BACK)
    picture = Image.fromarray(pixels)
    factor, crisp = min(width / picture.width, height / picture.height), max(picture.size) <= _TINY
    factor = max(1, int(factor)) if crisp else factor
    size = max(1, round(picture.width * factor)), max(1, round(picture.height * factor))
    picture = picture.resize(size, Image.Resampling.NEAREST if crisp else Image.Resampling.LANCZOS)
    image.paste(picture, (left + (width - size[0]) // 2, top + (height - size[1]) // 2))


# --- text ------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=8)
def _font(size: int) -> Font:
    for name in _FONTS:
        try:
            return ImageFont.truetype(name, size)
        except OSError:
            continue
    return ImageFont.load_default(size)


def _fitted(text: str, width: float, size: int) -> str:
    """A text in one line; of one that is too long, its beginning and its end, which tell keys apart."""
    text = text[:400] + text[-400:] if len(text) > 800 else text
    if _font(size).getlength(text) <= width:
        return text
    low, high = 0, len(text)  # letters that are kept: low fits
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (
            (middle, high)
            if _font(size).getlength(_shortened(text, middle)) <= width
            else (low, middle)
        )
    return _shortened(text, low)


def _shortened(text: str, letters: int) -> str:
    return f"{text[: letters - letters // 3]}…{text[len(text) - letters // 3 :]}"


def _wrapped(text: str, width: float, size: int, most: int) -> list[str]:
    """A text in at most so many lines, the last of which is cut."""
    lines, words = list[str](), text.split()
    while words and len(lines) < most - 1:
        count = 1
        while count < len(words) and _font(size).getlength(" ".join(words[: count + 1])) <= width:
            count += 1
        if (
            count == 1 and _font(size).getlength(words[0]) > width
        ):  # a word that is longer than a line
            letters = next(
                k
                for k in range(len(words[0]), 0, -1)
                if k == 1 or _font(size).getlength(words[0][:k]) <= width
            )
            lines.append(words[0][:letters])
            words[0] = words[0][letters:]
            words = words if words[0] else words[1:]
            continue
        lines.append(" ".join(words[:count]))
        words = words[count:]
    return lines + ([_fitted(" ".join(words), width, size)] if words and most > 0 else [])
