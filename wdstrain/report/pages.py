"""Pages as self-contained HTML: tables, a confusion matrix, pictures, legends.

A page is one file. It opens without a network, follows the light or dark theme of the browser, and
is fast enough to be rewritten after every epoch. Every text that comes from data must be escaped.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Mapping, Sequence
from html import escape

import numpy as np
import numpy.typing as npt
from PIL import Image


def page(title: str, parts: Iterable[str]) -> bytes:
    """Return an HTML page. title: plain text. parts: HTML below the title."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)} - wdstrain</title><style>{_STYLE}</style></head>"
        f"<body><main><h1>{escape(title)}</h1>{''.join(parts)}</main></body></html>\n"
    ).encode("utf-8", "replace")


def card(title: str, body: str) -> str:
    """Return a part of a page with a heading."""
    return f'<section class="card"><h2>{escape(title)}</h2>{body}</section>'


def cards(parts: Iterable[str]) -> str:
    """Return cards side by side."""
    return f'<div class="cards">{"".join(parts)}</div>'


def table(rows: Iterable[Sequence[object]], titles: Sequence[str] = ()) -> str:
    """Return a table of rows, each headed by its first value, or with titles of columns."""
    first = "td" if titles else "th"
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    lines = "".join(
        f"<tr><{first}>{escape(str(name))}</{first}>"
        + "".join(f"<td>{escape(str(value))}</td>" for value in values)
        + "</tr>"
        for name, *values in rows
    )
    return f"<table><tr>{head}</tr>{lines}</table>"


def matrix(names: Sequence[str], counts: Sequence[Sequence[float]]) -> str:
    """Return a confusion matrix in percent of its rows: true classes; columns are predictions.

    counts: a row for each class; a cell's count is in its tooltip. Classes that neither occur nor
    are predicted are left out. Cells shrink until the page is wide enough for all.
    """
    values = np.array(counts, np.float64)
    shown = np.flatnonzero(values.sum(0) + values.sum(1)).tolist()
    text = '<td style="background:rgba({},{:.3f})" title="{}">{}</td>'.format
    head = "".join(f"<th>{escape(names[i])}</th>" for i in shown)
    size = f"clamp(6px,33vw/{max(1, len(shown))},12px)"
    table = f'<table class="matrix" style="font-size:{size}"><tr><th></th>{head}</tr>'
    for i in shown:
        whole, cells = values[i].sum() or 1, ""
        for j in shown:
            color, value = "59,125,216" if i == j else "208,80,50", values[i, j]
            title = f"{names[i]} taken for {names[j]}: {value:.12g} of {whole:.12g}"
            percent = f"{100 * value / whole:.0f}" if value else ""
            cells += text(color, value / whole, escape(title), percent)
        table += f"<tr><th>{escape(names[i])}</th>{cells}</tr>"
    return f"{table}</table>"


def legend(colors: Mapping[str, str]) -> str:
    """Return names with their colors, also for a page without these styles."""
    mark = "display:inline-block;width:10px;height:10px;margin-right:5px;background:"
    return '<div class="legend">{}</div>'.format(
        "".join(
            f'<span><i style="{mark}{color}"></i>{escape(name)}</span>'
            for name, color in colors.items()
        )
    )


def picture(pixels: npt.NDArray[np.uint8], *, most: int = 192) -> str:
    """Return an <img> that contains the pixels.

    pixels: uint8[h, w, 3]. most: the height, and the width of an image that is not wider than high,
    are scaled down to this number of pixels.
    """
    image = Image.fromarray(pixels)
    panels = max(1, round(image.width / image.height))
    image.thumbnail((most * panels, most))
    is_small = max(image.height, image.width // panels) <= 48
    buffer, kind = io.BytesIO(), "PNG" if is_small else "JPEG"
    image.save(buffer, kind, quality=85)
    data = base64.b64encode(buffer.getvalue()).decode()
    return (
        f'<img{" class=small" * is_small} width="{image.width}" height="{image.height}" '
        f'src="data:image/{kind.lower()};base64,{data}" alt="">'
    )


_STYLE = """
:root{color-scheme:light dark;--line:#d8dce3;--soft:#667085;--card:#fff;--back:#f4f6f9;
  --text:#1d2430}
@media(prefers-color-scheme:dark){:root{--line:#333b48;--soft:#9aa4b2;--card:#1b212b;
  --back:#12161d;--text:#e6e9ee}}
body{margin:0;background:var(--back);color:var(--text);font:14px/1.45 system-ui,sans-serif}
main{max-width:2400px;margin:0 auto;padding:20px}
p{max-width:100ch}
h1{font-size:22px;margin:0 0 4px}
h2{font-size:15px;margin:0 0 8px}
p{margin:0 0 10px}
.soft,.none{color:var(--soft)}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,440px),1fr));gap:14px;
  margin:14px 0;align-items:start;grid-auto-flow:dense}
.cards>.card,.card{box-sizing:border-box}
.card+.card{margin-top:14px}
.cards>.card+.card{margin-top:0}
.card{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:14px;
  overflow:auto;min-width:0}
.facts{display:flex;flex-wrap:wrap;gap:10px 28px;margin:12px 0}
.facts div b{display:block;font-size:19px}
.facts div{color:var(--soft)}
.facts+table{margin-bottom:10px}
.facts b{color:var(--text)}
svg{width:100%;height:auto;display:block}
svg text{fill:var(--soft);font-size:11px}
.grid{stroke:var(--line)}
.legend span{display:inline-block;margin-right:14px;color:var(--soft);white-space:nowrap}
.legend i{border-radius:2px}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th{text-align:left;font-weight:500;padding:2px 10px 2px 0;vertical-align:top}
td{padding:2px 8px 2px 0;overflow-wrap:anywhere}
.matrix th{vertical-align:middle}
.matrix th,.matrix td{white-space:nowrap;overflow-wrap:normal}
.matrix td{text-align:center;min-width:1.9em;padding:.35em .2em;border:1px solid var(--line)}
.matrix th{max-width:14em;overflow:hidden;text-overflow:ellipsis}
.matrix tr:first-child th{padding:.3em .2em;height:2em;writing-mode:vertical-rl;transform:rotate(180deg);
  max-height:10em;margin-left:auto}
.cards>.card:has(.matrix,.shown){grid-column:1/-1}
.shown{display:grid;grid-template-columns:repeat(auto-fill,minmax(128px,1fr));gap:10px}
.shown figure{margin:0;font-size:12px;overflow-wrap:anywhere}
.shown img{width:100%;height:auto;border-radius:4px}
.wide{grid-template-columns:repeat(auto-fill,minmax(min(100%,300px),1fr))}
.legend+.shown{margin-top:8px}
.small{image-rendering:pixelated}
.wrong{color:#d05032}
.key{color:var(--soft);font-size:11px}
@media(max-width:600px){main{padding:10px}.card{padding:10px}svg text{font-size:13px}}
"""
