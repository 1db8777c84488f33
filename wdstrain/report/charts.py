"""Figures for pages: lines, stacked shares, bars and matrices, as SVG and HTML text that needs nothing else to be seen.

A page of ours is one file that opens without a network, in light and in dark, and is rewritten after every epoch within
milliseconds; a plotting library would bring more bytes per figure than all of ours together, and one colour of paper. Everything
that comes from data is escaped.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

COLOURS = ("#3b7dd8", "#e08214", "#2a9d6f", "#b3477f", "#7a6ad8", "#8a8a8a")  # told apart by those who see few colours, too

_WIDTH, _HEIGHT = 520, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 14, 12, 34
_MOST = 400  # points of a line: more than the page has pixels for


class Line(NamedTuple):
    """A line of a chart. `dots`: its points are drawn too."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    dots: bool = False


def lines(series: Sequence[Line], *, across: str, share: bool = False, log: bool = False) -> str:
    """A chart of lines over one axis, which is called `across`. share: y is a share, shown in percent; log: of a logarithmic scale."""
    series = [_thinned(one, log) for one in series]
    points = [(x, y) for one in series for x, y in zip(one.xs, one.ys, strict=True)]
    if not points:
        return '<p class="none">nothing to show yet</p>'
    low, high = min(y for _, y in points), max(y for _, y in points)
    y_at: Callable[[float], float]
    if log and high / max(low, 1e-300) > 20:
        marks = [10.0**power for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]
        height = _Scale(math.log10(marks[0]), math.log10(marks[-1]), _HEIGHT - _BOTTOM, _TOP)

        y_at = lambda y: height(math.log10(y))  # noqa: E731
    else:
        marks = ticks(low, high)
        y_at = _Scale(min(low, marks[0]), max(high, marks[-1]), _HEIGHT - _BOTTOM, _TOP)
    x_marks = ticks(min(x for x, _ in points), max(x for x, _ in points))
    x_at = _Scale(min(x for x, _ in points), max(x for x, _ in points), _LEFT, _WIDTH - _RIGHT)
    parts = [_frame(marks, y_at, x_marks, x_at, across, share)]
    for colour, one in zip(COLOURS, series, strict=False):
        path = " ".join(f"{x_at(x):.1f},{y_at(y):.1f}" for x, y in zip(one.xs, one.ys, strict=True))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8" stroke-linejoin="round"/>')
        if one.dots or len(one.xs) == 1:
            for x, y in zip(one.xs, one.ys, strict=True):
                said = f"{one.name}: {_number(float(f'{y:.4g}'), share)} at {across} {_number(x, False)}"
                parts.append(
                    f'<circle cx="{x_at(x):.1f}" cy="{y_at(y):.1f}" r="3" fill="{colour}"><title>{escape(said)}</title></circle>'
                )
    return _figure(parts, [one.name for one in series])


def shares(xs: Sequence[float], parts: Mapping[str, Sequence[float]], *, across: str) -> str:
    """What each part is of the whole, over one axis: areas on one another, which fill the chart."""
    if not len(xs):
        return '<p class="none">nothing to show yet</p>'
    if len(xs) == 1:
        xs, parts = [0.0, xs[0]], {name: [*values, *values] for name, values in parts.items()}
    keep = np.unique(np.linspace(0, len(xs) - 1, min(len(xs), _MOST)).astype(int))
    stack = np.cumsum([np.asarray(values, float)[keep] for values in parts.values()], axis=0)
    stack = stack / np.maximum(stack[-1], 1e-12)
    x_at, y_at = _Scale(xs[0], xs[-1], _LEFT, _WIDTH - _RIGHT), _Scale(0.0, 1.0, _HEIGHT - _BOTTOM, _TOP)
    across_at = [x_at(xs[i]) for i in keep]
    drawn, below = [], np.zeros(len(keep))
    for colour, name, above in zip(COLOURS, parts, stack, strict=False):
        upper = [f"{x:.1f},{y_at(y):.1f}" for x, y in zip(across_at, above, strict=True)]
        lower = [f"{x:.1f},{y_at(y):.1f}" for x, y in zip(across_at, below, strict=True)]
        title = f"{name}: {float((above - below).mean()):.0%} on average"
        drawn.append(
            f'<polygon points="{" ".join(upper + lower[::-1])}" fill="{colour}" opacity=".85"><title>{escape(title)}</title></polygon>'
        )
        below = above
    drawn.append(_frame([0, 0.25, 0.5, 0.75, 1], y_at, ticks(xs[0], xs[-1]), x_at, across, True))
    return _figure(drawn, list(parts))


def bars(counts: Mapping[str, float]) -> str:
    """A bar for each name."""
    most = max(counts.values(), default=0) or 1
    rows = [
        f'<tr><th>{escape(name)}</th><td class="bar"><span style="width:{100 * value / most:.1f}%"></span></td><td>{_count(value)}</td></tr>'
        for name, value in counts.items()
    ]
    return f'<table class="bars">{"".join(rows)}</table>'


def matrix(names: Sequence[str], counts: Sequence[Sequence[float]]) -> str:
    """A confusion matrix: a row for each true class, its cells as dark as their share of the row."""
    head = "".join(f"<th><span>{escape(name)}</span></th>" for name in names)
    rows = []
    for i, (name, row) in enumerate(zip(names, counts, strict=True)):
        whole = sum(row)
        cells = []
        for j, value in enumerate(row):
            part = value / whole if whole else 0.0
            colour = "59,125,216" if i == j else "208,80,50"
            title = f"{name} taken for {names[j]}: {_count(value)} of {_count(whole)} ({part:.1%})"
            cells.append(f'<td style="background:rgba({colour},{part:.3f})" title="{escape(title)}">{_count(value)}</td>')
        rows.append(f"<tr><th>{escape(name)}</th>{''.join(cells)}</tr>")
    return f'<table class="matrix"><tr><th></th>{head}</tr>{"".join(rows)}</table>'


def picture(pixels: npt.NDArray[np.uint8], *, most: int = 192) -> str:
    """An <img> with the picture in it, at most so many pixels wide; uint8[h, w, 3]."""
    image = Image.fromarray(pixels)
    image.thumbnail((most, most))
    buffer, kind = io.BytesIO(), "PNG" if max(image.size) <= 48 else "JPEG"
    image.save(buffer, kind, quality=85)
    data = base64.b64encode(buffer.getvalue()).decode()
    small = ' class="small"' if max(image.size) <= 48 else ""
    return f'<img{small} src="data:image/{kind.lower()};base64,{data}" width="{image.width}" height="{image.height}" alt="">'


def table(rows: Mapping[str, object]) -> str:
    """Names and values."""
    return (
        "<table>"
        + "".join(f"<tr><th>{escape(str(n))}</th><td>{escape(str(v))}</td></tr>" for n, v in rows.items())
        + "</table>"
    )


def grid(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table with a line of names above its columns."""
    names = "".join(f"<th>{escape(name)}</th>" for name in head)
    cells = ("".join(f"<td>{escape(str(value))}</td>" for value in row) for row in rows)
    return f"<table><tr>{names}</tr>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"


def page(title: str, body: str) -> str:
    """A whole page."""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body><main>{body}</main></body></html>\n"
    )


def part(title: str, body: str) -> str:
    """A part of somebody else's page, such as a notebook's: with our looks, which are under a name of their own and disturb nothing there."""
    return f'<div class="wdstrain"><style>{_PART}</style><h4>{escape(title)}</h4>{body}</div>'


def ticks(low: float, high: float) -> list[float]:
    """Four to seven round numbers that span a range."""
    if not high > low:
        return [low - abs(low or 1) / 2, low, low + abs(low or 1) / 2]
    raw = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    first = math.floor(low / step + 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, math.ceil(high / step - 1e-9) + 1)]


# --- parts -----------------------------------------------------------------------------------------------------------


class _Scale:
    def __init__(self, low: float, high: float, begin: float, end: float) -> None:
        self._low, self._begin = low, begin
        self._factor = (end - begin) / ((high - low) or 1)

    def __call__(self, value: float) -> float:
        return self._begin + (value - self._low) * self._factor


def _thinned(line: Line, log: bool) -> Line:
    """At most so many points, each the mean of those it stands for; those that are no numbers are left away."""
    good = [(x, y) for x, y in zip(line.xs, line.ys, strict=True) if math.isfinite(y) and (not log or y > 0)]
    if len(good) > _MOST:
        parts = np.array_split(np.array(good), _MOST)
        good = [(float(part[-1, 0]), float(part[:, 1].mean())) for part in parts]
    return line._replace(xs=[x for x, _ in good], ys=[y for _, y in good])


def _frame(
    marks: Sequence[float], y_at: Callable[[float], float], x_marks: Sequence[float], x_at: _Scale, across: str, share: bool
) -> str:
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    found = []
    for mark in marks:
        y = y_at(mark)
        if _TOP - 1 <= y <= bottom + 1:
            found.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
            found.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_number(mark, share)}</text>')
    for mark in x_marks:
        x = x_at(mark)
        if _LEFT - 1 <= x <= right + 1:
            found.append(f'<text x="{x:.1f}" y="{bottom + 15}" text-anchor="middle">{_number(mark, False)}</text>')
    found.append(f'<text x="{(_LEFT + right) / 2}" y="{_HEIGHT - 4}" text-anchor="middle">{escape(across)}</text>')
    return "".join(found)


def _figure(parts: Sequence[str], names: Sequence[str]) -> str:
    legend = "".join(
        f'<span><i style="background:{colour}"></i>{escape(name)}</span>' for colour, name in zip(COLOURS, names, strict=False)
    )
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">{"".join(parts)}</svg><div class="legend">{legend}</div>'


def _number(value: float, share: bool) -> str:
    """A number with all of its digits, 12 at most, so that neighboring ticks read differently."""
    value = float(f"{value * 100 if share else value:.12g}")
    text = np.format_float_positional(value, trim="-")
    if value and not 1e-3 <= abs(value) < 1e5:
        text = min(text, np.format_float_scientific(value, trim="-", exp_digits=1).replace("e+", "e"), key=len)
    return f"{text}%" if share else text


def _count(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else f"{value:g}"


_STYLE = """
:root{color-scheme:light dark;--line:#d8dce3;--soft:#667085;--card:#fff;--back:#f4f6f9;--text:#1d2430}
@media(prefers-color-scheme:dark){:root{--line:#333b48;--soft:#9aa4b2;--card:#1b212b;--back:#12161d;--text:#e6e9ee}}
body{margin:0;background:var(--back);color:var(--text);font:14px/1.45 system-ui,sans-serif}
main{max-width:1120px;margin:0 auto;padding:20px}h1{font-size:22px;margin:0 0 4px}h2{font-size:15px;margin:0 0 8px}
p{margin:0 0 10px}.soft,.none{color:var(--soft)}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,440px),1fr));gap:14px;margin:14px 0}
.cards>.card,.card{box-sizing:border-box}.card+.card{margin-top:14px}.cards>.card+.card{margin-top:0}
.card{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:14px;overflow:auto;min-width:0}
.facts{display:flex;flex-wrap:wrap;gap:10px 28px;margin:12px 0}.facts div b{display:block;font-size:19px}
.facts div{color:var(--soft)}.facts b{color:var(--text)}
svg{width:100%;height:auto;display:block}svg text{fill:var(--soft);font-size:11px}.grid{stroke:var(--line)}
.legend span{margin-right:14px;color:var(--soft)}.legend i{display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:5px}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}th{text-align:left;font-weight:500;padding:2px 10px 2px 0;vertical-align:top}
td{padding:2px 8px 2px 0;overflow-wrap:anywhere}.bars{width:100%}.bars td:last-child{text-align:right;width:5em;padding-left:10px}.bar span{display:block;height:12px;background:#3b7dd8;border-radius:2px;min-width:1px}
.bar{width:70%}.matrix th{vertical-align:middle}.matrix td{text-align:center;min-width:34px;padding:5px;border:1px solid var(--line)}
.matrix tr:first-child th{padding:2px 4px;font-size:12px;text-align:center;max-width:110px;overflow:hidden;text-overflow:ellipsis}
.shown{display:grid;grid-template-columns:repeat(auto-fill,minmax(128px,1fr));gap:10px}
.shown figure{margin:0;font-size:12px;overflow-wrap:anywhere}.shown img{width:100%;height:auto;border-radius:4px}.small{image-rendering:pixelated}
.wrong{color:#d05032}.key{color:var(--soft);font-size:11px}
"""

_PART = """
.wdstrain{font:13px/1.45 system-ui,sans-serif;text-align:left;max-width:760px}.wdstrain h4{font-size:14px;margin:0 0 6px}.wdstrain p{margin:0 0 6px}
.wdstrain table{font:inherit;color:inherit;border-collapse:collapse;table-layout:auto;font-variant-numeric:tabular-nums;margin:0 0 8px}
.wdstrain th{font-weight:500;padding:2px 12px 2px 0;vertical-align:top}
.wdstrain th,.wdstrain td{text-align:left!important;background:none}.wdstrain td{padding:2px 8px 2px 0;overflow-wrap:anywhere;vertical-align:top}.wdstrain .bars{width:100%}.wdstrain .bars th{white-space:nowrap}
.wdstrain .bars td:last-child{text-align:right;width:5em}.wdstrain .bar{width:70%}
.wdstrain .bar span{display:block;height:12px;background:#3b7dd8;border-radius:2px;min-width:1px}
.wdstrain svg{width:100%;max-width:520px;height:auto;display:block}.wdstrain svg text{fill:currentColor;opacity:.7;font-size:11px}
.wdstrain .grid{stroke:#8886}.wdstrain .legend span{margin-right:14px;opacity:.8}
.wdstrain .wrong{color:#d05032}
.wdstrain .cards{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,340px),1fr));gap:12px 20px;margin:10px 0}
.wdstrain .card{min-width:0}.wdstrain .card h2{font-size:13px;font-weight:500;margin:0 0 6px}
.wdstrain pre{font:12px/1.4 ui-monospace,monospace;color:inherit;background:none;border:0;margin:0 0 10px;padding:0;overflow:auto}
.wdstrain .legend i{display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:5px}
"""
