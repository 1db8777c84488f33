"""Samples as text for a terminal, as HTML for a notebook or a page, and as one PNG.

Keys and texts come from data: they are escaped, and are complete in the HTML, so that a key can be
copied. The PNG has a light background, because it is printed and sent around.
"""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import lru_cache
from html import escape

from PIL import Image, ImageDraw, ImageFont, ImageOps
from rich.cells import cell_len, set_cell_size

from wdstrain.inspection.show.sample_view import SampleView
from wdstrain.inspection.show.values import SIDE, Pixels
from wdstrain.report import pages
from wdstrain.report.printing import printable

_ROWS = 20  # of the table in a terminal
_MAX_LABEL = 160  # characters of labels and texts under a picture in HTML

_LARGEST_CELL, _SMALLEST_CELL = 192, 72  # pixels of a picture in the PNG
_MAX_PIXELS = 20e6  # of all pictures of the PNG, unless the smallest cells need more
_WIDTH, _MAX_WIDTH = 1280, 3900  # pixels of a PNG with few samples, and with many
_PADDING, _LINE = 8, 15
_TINY = 48  # pixels of the longer side of a picture that is enlarged without smoothing
_BACK, _CARD, _INK, _RED = "#f4f6f9", "#ffffff", "#1d2430", "#c8412b"


def text_table(samples: Sequence[SampleView], width: int = 80) -> str:
    """Return a row for each sample: key, labels, and what else there is or is wrong.

    Keys are complete. What does not fit into the width is cut at the end of the row.
    """
    rows = [(printable(view.key), view.label_text, _other_text(view)) for view in samples[:_ROWS]]
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
    pictures = max((len(view.pictures) for view in samples), default=0)
    width = min(8, pictures) * 154 - 10 if pictures else 300
    columns = f"repeat(auto-fill,minmax(min(100%,{width}px),1fr))"
    text = "".join(f"<p>{escape(printable(note))}</p>" for note in notes)
    cells = "".join(map(_figure, samples))
    sheet = f'<div class="sheet" style="grid-template-columns:{columns}">{cells}</div>'
    return pages.fragment(printable(title), f"<style>{_STYLE}</style>{text}{sheet}")


def html_page(samples: Sequence[SampleView], title: str, notes: Iterable[str]) -> str:
    """Return a page in one file."""
    figures = html_figures(samples, title, notes)
    style = "<style>.wdstrain{max-width:none}</style>"
    return pages.page(
        f"{printable(title)} - wdstrain", f'<section class="card">{figures}{style}</section>'
    )


def png_sheet(samples: Sequence[SampleView], title: str, notes: Sequence[str]) -> bytes:
    """Return a PNG with equal cells in a grid. Many samples get smaller cells."""
    pictures = max([1, *(len(view.pictures) for view in samples)])
    side = math.sqrt(_MAX_PIXELS / max(1, len(samples) * pictures))
    side = int(min(_LARGEST_CELL, max(_SMALLEST_CELL, side)))
    tall = side if any(view.pictures for view in samples) else 5 * _LINE
    cells = [_cell(view, side, tall, pictures) for view in samples]
    width, height = cells[0].size if cells else (side, side)
    square = min(math.ceil(math.sqrt(1.4 * len(cells) * height / width)), _MAX_WIDTH // width)
    columns = max(1, min(len(cells), max(_WIDTH // width, square)))
    sheet_width = max(480, columns * width)
    head = "\n".join(line for text in (title, *notes) for line in _wrapped(text, sheet_width, 14))
    top = 20 * (head.count("\n") + 1) + 2 * _PADDING
    rows = math.ceil(len(cells) / columns)
    sheet = Image.new("RGB", (sheet_width, top + rows * height), _BACK)
    draw = ImageDraw.Draw(sheet)
    draw.multiline_text((_PADDING, _PADDING), head, _INK, _font(14))
    for number, cell in enumerate(cells):
        row, column = divmod(number, columns)
        sheet.paste(cell, (column * width, top + row * height))
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
        drawn.append(f"<div>{pages.picture(pixels, most=SIDE)}{caption}</div>")
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
    """Return the cell of a sample: its pictures, then label, error, text and key.

    side: of the square for a picture; tall: its height, less if there are no pictures. pictures:
    squares of each cell.
    """
    width = pictures * (side + _PADDING) + _PADDING
    cell = Image.new("RGB", (width, tall + 5 * _LINE + 2 * _PADDING), _CARD)
    for place, pixels in enumerate(view.pictures.values()):
        picture = _fitted(pixels, side)
        left, up = (side - picture.width) // 2, (side - picture.height) // 2
        cell.paste(picture, (_PADDING + place * (side + _PADDING) + left, _PADDING + up))
    texts = (view.label_text, view.error, view.text, "" if view.pictures else view.field_text)
    lines = [line for text in texts for line in _wrapped(text, width, 11, most=4)]
    room = 5 if view.pictures else (cell.height - _PADDING) // _LINE
    key = _wrapped(view.key, width, 11, most=2)
    shown = "\n".join([*lines[: room - len(key)], *key])
    color = _RED if view.error else _INK
    draw = ImageDraw.Draw(cell)
    top = side + _PADDING if view.pictures else _PADDING
    draw.multiline_text((_PADDING, top), shown, color, _font(11), spacing=2)
    draw.rectangle(
        (0, 0, width - 1, cell.height - 1), outline=_RED if view.error else _BACK, width=2
    )
    return cell


def _fitted(pixels: Pixels, side: int) -> Image.Image:
    """Return a picture that fits into a square; a tiny one with crisp pixels."""
    picture = Image.fromarray(pixels)
    is_tiny = max(picture.size) <= _TINY
    resampling = Image.Resampling.NEAREST if is_tiny else Image.Resampling.LANCZOS
    return ImageOps.contain(picture, (side, side), resampling)


def _wrapped(text: str, width: int, size: int, *, most: int | None = None) -> list[str]:
    """Return at most `most` lines of text for a width in pixels. size: of the font."""
    room, font = width - 2 * _PADDING, _font(size)
    characters = max(8, int(room / (0.55 * size)))
    while True:  # widths of characters differ: digits are wider than the mean of letters
        lines = textwrap.wrap(printable(text), characters, max_lines=most, placeholder="…")
        if characters == 8 or all(font.getlength(line) <= room for line in lines):
            return lines
        characters -= 1


@lru_cache(maxsize=2)
def _font(size: int) -> ImageFont.ImageFont | ImageFont.FreeTypeFont:
    with suppress(OSError):
        return ImageFont.truetype("DejaVuSans.ttf", size)
    return ImageFont.load_default(size)  # it has few letters beyond ASCII


_STYLE = """
.wdstrain p{opacity:.75}.wdstrain .sheet{display:grid;gap:10px}
.wdstrain figure{margin:0;padding:6px;border:1px solid #8884;border-radius:6px;min-width:0;
  overflow-wrap:anywhere}
.wdstrain figure.broken{border:2px solid #d05032}.wdstrain .error{color:#d05032}
.wdstrain .pictures{display:flex;gap:4px;margin-bottom:4px}
.wdstrain .pictures>div{flex:1 1 0;min-width:0;max-width:256px}
.wdstrain img{display:block;width:100%;height:auto;aspect-ratio:1;object-fit:contain;
  background:#8882;border-radius:4px;margin:0}
.wdstrain img.small{image-rendering:pixelated}
.wdstrain b,.wdstrain small,.wdstrain .key{display:block}
.wdstrain small,.wdstrain .key{opacity:.7;font-size:11px}
.wdstrain .key{user-select:all;background:none;padding:0}
"""
