"""Samples as text for a terminal, as HTML for a notebook or a page, and as one PNG.

Keys and texts come from data: they are escaped, and are complete in the HTML, so that a key can be
copied. The PNG has a light background, because it is printed and sent around.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from html import escape

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from rich.cells import cell_len, set_cell_size

from wdstrain.inspection.show.sample_view import SampleView
from wdstrain.inspection.show.values import SIDE, Pixels
from wdstrain.report import charts
from wdstrain.report.printing import printable

_ROWS = 20  # of the table in a terminal
_MAX_LABEL = 160  # characters of labels and texts under a picture in HTML

_LARGEST_CELL, _SMALLEST_CELL = 192, 72  # pixels of a picture in the PNG
_MAX_PIXELS = 20e6  # of all pictures of the PNG, unless the smallest cells need more
_WIDTH, _MAX_WIDTH = 1280, 3900  # pixels of a PNG with few samples, and with many
_PADDING, _LINE, _TITLE_LINE = 8, 15, 20
_TINY = 48  # pixels of the longer side of a picture that is enlarged without smoothing
_BACK, _CARD, _INK, _SOFT, _RED = "#f4f6f9", "#ffffff", "#1d2430", "#667085", "#c8412b"
_FONTS = ("DejaVuSans.ttf", "arial.ttf")  # Pillow's own font lacks most letters


def text_table(samples: Sequence[SampleView], width: int = 80) -> str:
    """Return a row for each sample: key, labels, and what else there is or is wrong.

    Keys are complete. What does not fit into the width is cut at the end of the row.
    """
    rows = [(printable(one.key), one.label_text, _other_text(one)) for one in samples[:_ROWS]]
    key_width = min(max((cell_len(key) for key, _, _ in rows), default=0), width // 2)
    label_width = min(max((cell_len(label) for _, label, _ in rows), default=0), width // 3)
    lines = []
    for key, label, other in rows:
        start = f"{_padded(key, key_width)}  {_padded(label, label_width)}"
        rest = width - cell_len(start) - 2
        lines.append(f"{start}  {_cut(other, rest)}".rstrip() if rest > 8 else start.rstrip())
    more = [f"... and {len(samples) - _ROWS} more"] if len(samples) > _ROWS else []
    return "\n".join([*lines, *more])


def html_figures(samples: Sequence[SampleView], title: str, notes: Iterable[str]) -> str:
    """Return HTML for a notebook: pictures with labels, texts and keys under them."""
    pictures = max((len(one.pictures) for one in samples), default=0)
    width = min(8, pictures) * 154 - 10 if pictures else 300
    columns = f"repeat(auto-fill,minmax(min(100%,{width}px),1fr))"
    text = "".join(f"<p>{escape(printable(note))}</p>" for note in notes)
    cells = "".join(map(_figure, samples))
    sheet = f'<div class="sheet" style="grid-template-columns:{columns}">{cells}</div>'
    return charts.fragment(printable(title), f"<style>{_STYLE}</style>{text}{sheet}")


def html_page(samples: Sequence[SampleView], title: str, notes: Iterable[str]) -> str:
    """Return a page in one file."""
    figures = html_figures(samples, title, notes)
    style = "<style>.wdstrain{max-width:none}</style>"
    return charts.page(
        f"{printable(title)} - wdstrain", f'<section class="card">{figures}{style}</section>'
    )


def png_sheet(samples: Sequence[SampleView], title: str, notes: Sequence[str]) -> bytes:
    """Return a PNG with equal cells in a grid. Many samples get smaller cells."""
    pictures = max([1, *(len(one.pictures) for one in samples)])
    side = math.sqrt(_MAX_PIXELS / max(1, len(samples) * pictures))
    side = int(min(_LARGEST_CELL, max(_SMALLEST_CELL, side)))
    shapes = [pixels.shape for one in samples for pixels in one.pictures.values()]
    tallest = max((shape[0] / shape[1] for shape in shapes), default=0)
    tallest = tallest if all(one.pictures for one in samples) else max(tallest, 0.7)
    cells = [_cell(one, side, round(side * min(1, tallest)), pictures) for one in samples]
    width, height = cells[0].size if cells else (side, side)
    square = math.ceil(math.sqrt(1.4 * len(cells) * height / width))
    columns = max(
        1,
        min(
            len(cells),
            max(_WIDTH // (width + _PADDING), min(square, _MAX_WIDTH // (width + _PADDING))),
        ),
    )
    sheet_width = max(480, columns * (width + _PADDING) + _PADDING)
    lines = [(line, _INK) for line in _wrapped(title, sheet_width - 2 * _PADDING, 14)]
    for note in notes:
        lines += [(line, _SOFT) for line in _wrapped(note, sheet_width - 2 * _PADDING, 14)]
    top = len(lines) * _TITLE_LINE + 2 * _PADDING
    rows = math.ceil(len(cells) / columns)
    sheet = Image.new("RGB", (sheet_width, top + rows * (height + _PADDING)), _BACK)
    _draw_lines(sheet, lines, _PADDING, _PADDING, 14, _TITLE_LINE)
    for number, cell in enumerate(cells):
        row, column = divmod(number, columns)
        x, y = _PADDING + column * (width + _PADDING), top + row * (height + _PADDING)
        sheet.paste(cell, (x, y))
    buffer = io.BytesIO()
    sheet.save(buffer, "PNG", compress_level=3)  # three times as fast, hardly larger
    return buffer.getvalue()


# --- text and HTML --------------------------------------------------------------------------------


def _other_text(view: SampleView) -> str:
    return printable("; ".join(filter(None, (view.error, view.text, view.field_text))))


def _padded(text: str, width: int) -> str:
    return text if cell_len(text) > width else set_cell_size(text, width)


def _cut(text: str, width: int) -> str:
    return text if cell_len(text) <= width else f"{set_cell_size(text, max(0, width - 1))}…"


def _figure(view: SampleView) -> str:
    drawn = []
    for name, pixels in view.pictures.items():
        caption = f"<small>{escape(printable(name))}</small>" if len(view.pictures) > 1 else ""
        drawn.append(f"<div>{charts.picture(pixels, most=SIDE)}{caption}</div>")
    parts = [f'<div class="pictures">{"".join(drawn)}</div>'] if drawn else []
    if view.error:
        parts.append(f'<div class="error">{escape(printable(view.error))}</div>')
    lines = (
        ("b", view.label_text),
        ("div", printable(view.text)),
        ("small", view.field_text),
    )
    for tag, text in lines:
        shown = text if len(text) <= _MAX_LABEL else f"{text[: _MAX_LABEL - 1]}…"
        parts += [f"<{tag}>{escape(shown)}</{tag}>"] if text else []
    parts.append(f'<code class="key">{escape(printable(view.key))}</code>')
    place = printable(f"{view.shard}, offset {view.offset}") if view.shard else ""
    hint = "\n".join(filter(None, (place, view.split, *(text for _, text in lines))))
    broken = " class=broken" if view.error else ""
    return f'<figure{broken} title="{escape(hint)}">{"".join(parts)}</figure>'


# --- PNG ------------------------------------------------------------------------------------------


def _cell(view: SampleView, side: int, tall: int, pictures: int) -> Image.Image:
    """Return the cell of a sample: its pictures, then lines with label, text or error, and key.

    side, tall: width and height of the space for a picture.
    """
    width = pictures * (side + _PADDING) + _PADDING
    texts = [(view.label_text, _INK, 2)]
    texts += [(view.error, _RED, 4)] if view.error else []
    texts += [(view.text, _INK, 2 if view.pictures else 5)]
    texts += [] if view.pictures else [(view.field_text, _SOFT, 3)]
    texts += [(view.key, _SOFT, 3)]
    lines = [
        (line, color)
        for text, color, most in texts
        for line in _wrapped(text, width - 2 * _PADDING, 11)[:most]
    ]
    names = len(view.pictures) > 1
    height = tall + _LINE * (4 + (pictures > 1)) + 2 * _PADDING
    cell = Image.new("RGB", (width, height), _CARD)
    top = _PADDING
    for place, (name, pixels) in enumerate(view.pictures.items()):
        x = _PADDING + place * (side + _PADDING)
        picture = _fitted(pixels, side, tall)
        left, up = (side - picture.width) // 2, (tall - picture.height) // 2
        cell.paste(picture, (x + left, top + up))
        if names:
            _draw_lines(cell, [(printable(name), _SOFT)], x, top + tall, 10, _LINE)
    start = top + (tall + names * _LINE + 2 if view.pictures else 0)
    space = (height - start - 2) // _LINE
    _draw_lines(cell, lines[:space], _PADDING, start, 11, _LINE)
    outline = _RED if view.error else "#d8dce3"
    ImageDraw.Draw(cell).rectangle(
        (0, 0, width - 1, height - 1), outline=outline, width=2 if view.error else 1
    )
    return cell


def _fitted(pixels: Pixels, width: int, height: int) -> Image.Image:
    """Return a picture that fits into a space; a tiny one is enlarged by a whole factor."""
    picture = Image.fromarray(pixels)
    factor = min(width / picture.width, height / picture.height)
    if factor >= 1 and max(picture.size) <= _TINY:
        return Image.fromarray(np.kron(pixels, np.ones((int(factor), int(factor), 1), np.uint8)))
    size = [max(1, round(length * factor)) for length in picture.size]
    return picture.resize((size[0], size[1]), Image.Resampling.LANCZOS)


def _draw_lines(
    image: Image.Image, lines: Sequence[tuple[str, str]], x: int, y: int, size: int, height: int
) -> None:
    draw = ImageDraw.Draw(image)
    for number, (line, color) in enumerate(lines):
        draw.text((x, y + number * height), line, color, _font(size))


@lru_cache(maxsize=4)
def _font(size: int) -> ImageFont.ImageFont | ImageFont.FreeTypeFont:
    for name in _FONTS:
        try:
            return ImageFont.truetype(name, size)
        except OSError:
            continue
    return ImageFont.load_default(size)


def _wrapped(text: str, width: float, size: int) -> list[str]:
    """Return a text in lines that fit into a width; words that are too long are broken."""
    font, lines, line = _font(size), list[str](), ""
    for word in printable(text).split():
        while word:
            longer = f"{line} {word}" if line else word
            if font.getlength(longer) <= width:
                line, word = longer, ""
            elif line:
                lines.append(line)
                line = ""
            else:
                count = next(
                    (n for n in range(len(word), 1, -1) if font.getlength(word[:n]) <= width), 1
                )
                lines.append(word[:count])
                word = word[count:]
    return [*lines, line] if line else lines


_STYLE = """
.wdstrain p{opacity:.75}.wdstrain .sheet{display:grid;gap:10px}
.wdstrain figure{margin:0;padding:6px;border:1px solid #8884;border-radius:6px;min-width:0;overflow-wrap:anywhere}
.wdstrain figure.broken{border:2px solid #d05032}.wdstrain .error{color:#d05032}
.wdstrain .pictures{display:flex;gap:4px;margin-bottom:4px}.wdstrain .pictures>div{flex:1 1 0;min-width:0;max-width:256px}
.wdstrain img{display:block;width:100%;height:auto;aspect-ratio:1;object-fit:contain;background:#8882;border-radius:4px;margin:0}
.wdstrain img.small{image-rendering:pixelated}
.wdstrain b,.wdstrain small,.wdstrain .key{display:block}.wdstrain small,.wdstrain .key{opacity:.7;font-size:11px}
.wdstrain .key{user-select:all;background:none;padding:0}
"""
