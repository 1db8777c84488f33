"""Charts, tables and pages as self-contained SVG and HTML.

A page is one file. It opens without a network, follows the light or dark theme of the browser, and
is fast enough to be rewritten after every epoch. Every text that comes from data must be escaped.
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

# also distinct for people with impaired color vision
COLORS = ("#3b7dd8", "#e08214", "#2a9d6f", "#b3477f", "#7a6ad8", "#8a8a8a")

_WIDTH, _HEIGHT = 520, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 14, 12, 34  # margins
_BINS = 40  # of a histogram
_MAX_POINTS = 400  # points of a line; a chart has no pixels for more

_EMPTY = '<p class="none">nothing to show yet</p>'


class Line(NamedTuple):
    """One line of a chart. dots: also draw its points."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    dots: bool = False


def lines(
    series: Sequence[Line],
    *,
    across: str,
    share: bool = False,
    log: bool = False,
    x_text: Callable[[float], str] | None = None,
) -> str:
    """Return a line chart. Values that are not finite are left out, and values <= 0 if `log`.

    across: label of the x axis. share: show y in percent. log: use a logarithmic y axis if the
    values span more than a factor of 20. x_text: text of an x value, such as of an exponent.
    Lines beyond the sixth have no color and are not drawn.
    """
    series = [_thinned(line, log) for line in series]
    points = [(x, y) for line in series for x, y in zip(line.xs, line.ys, strict=True)]
    if not points:
        return _EMPTY
    low, high = min(y for _, y in points), max(y for _, y in points)
    y_at: Callable[[float], float]
    if log and high / max(low, 1e-300) > 20:
        marks = [
            10.0**power
            for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        ]
        height = _Scale(math.log10(marks[0]), math.log10(marks[-1]), _HEIGHT - _BOTTOM, _TOP)

        y_at = lambda y: height(math.log10(y))  # noqa: E731
    else:
        marks = ticks(low, high)
        y_at = _Scale(min(low, marks[0]), max(high, marks[-1]), _HEIGHT - _BOTTOM, _TOP)
    x_marks = ticks(min(x for x, _ in points), max(x for x, _ in points))
    x_at = _Scale(min(x for x, _ in points), max(x for x, _ in points), _LEFT, _WIDTH - _RIGHT)
    x_text = x_text or (lambda x: _number(x, False))
    parts = [_frame(marks, y_at, x_marks, x_at, across, share, x_text)]
    for color, line in zip(COLORS, series, strict=False):
        path = " ".join(
            f"{x_at(x):.1f},{y_at(y):.1f}" for x, y in zip(line.xs, line.ys, strict=True)
        )
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.8" stroke-linejoin="round"/>'
        )
        if line.dots or len(line.xs) == 1:
            for x, y in zip(line.xs, line.ys, strict=True):
                hint = f"{line.name}: {_number(float(f'{y:.4g}'), share)} at {across} {x_text(x)}"
                parts.append(
                    f'<circle cx="{x_at(x):.1f}" cy="{y_at(y):.1f}" r="3" fill="{color}"><title>{escape(hint)}</title></circle>'
                )
    return _figure(parts, [line.name for line in series])


def shares(xs: Sequence[float], parts: Mapping[str, Sequence[float]], *, across: str) -> str:
    """Return a chart of stacked areas: the share of each part in the sum of all parts.

    across: label of the x axis. parts: values by name, as many as `xs`.
    """
    if not len(xs):
        return _EMPTY
    if len(xs) == 1:
        xs, parts = [0.0, xs[0]], {name: [*values, *values] for name, values in parts.items()}
    keep = np.unique(np.linspace(0, len(xs) - 1, min(len(xs), _MAX_POINTS)).astype(int))
    stack = np.cumsum([np.asarray(values, float)[keep] for values in parts.values()], axis=0)
    stack = stack / np.maximum(stack[-1], 1e-12)
    x_at, y_at = (
        _Scale(xs[0], xs[-1], _LEFT, _WIDTH - _RIGHT),
        _Scale(0.0, 1.0, _HEIGHT - _BOTTOM, _TOP),
    )
    x_positions = [x_at(xs[i]) for i in keep]
    areas, below = [], np.zeros(len(keep))
    for color, name, above in zip(COLORS, parts, stack, strict=False):
        upper = [f"{x:.1f},{y_at(y):.1f}" for x, y in zip(x_positions, above, strict=True)]
        lower = [f"{x:.1f},{y_at(y):.1f}" for x, y in zip(x_positions, below, strict=True)]
        title = f"{name}: {float((above - below).mean()):.0%} on average"
        areas.append(
            f'<polygon points="{" ".join(upper + lower[::-1])}" fill="{color}" opacity=".85"><title>{escape(title)}</title></polygon>'
        )
        below = above
    areas.append(_frame([0, 0.25, 0.5, 0.75, 1], y_at, ticks(xs[0], xs[-1]), x_at, across, True))
    return _figure(areas, list(parts))


def scatter(points: Sequence[tuple[float, float]], *, across: str, up: str) -> str:
    """Return a scatter plot of (x, y) with the line x = y. Points that are not finite are left out.

    across, up: labels of the axes.
    """
    points = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    if not points:
        return _EMPTY
    xs, ys = zip(*points, strict=True)
    x_marks, y_marks = ticks(min(xs), max(xs)), ticks(min(ys), max(ys))
    x_at = _Scale(x_marks[0], x_marks[-1], _LEFT, _WIDTH - _RIGHT)
    y_at = _Scale(y_marks[0], y_marks[-1], _HEIGHT - _BOTTOM, _TOP)
    low, high = max(x_marks[0], y_marks[0]), min(x_marks[-1], y_marks[-1])
    parts = [_frame(y_marks, y_at, x_marks, x_at, across, False)]
    parts += [
        f'<circle cx="{x_at(x):.1f}" cy="{y_at(y):.1f}" r="2.5" fill="{COLORS[0]}" opacity=".5"/>'
        for x, y in points
    ]
    if low < high:
        ends = (
            f'x1="{x_at(low):.1f}" y1="{y_at(low):.1f}" x2="{x_at(high):.1f}" y2="{y_at(high):.1f}"'
        )
        parts.append(f'<line {ends} stroke="{COLORS[1]}" stroke-width="1.8"/>')
    return _figure(parts, [up, f"{up} = {across}"])


def histogram(values: Sequence[float], *, across: str) -> str:
    """Return a histogram of finite values. across: label of the x axis."""
    finite = np.array([value for value in values if math.isfinite(value)])
    if not len(finite):
        return _EMPTY
    x_marks = ticks(float(finite.min()), float(finite.max()))
    counts, edges = np.histogram(finite, _BINS, (x_marks[0], x_marks[-1]))
    x_at = _Scale(x_marks[0], x_marks[-1], _LEFT, _WIDTH - _RIGHT)
    y_marks = ticks(0.0, float(counts.max()))
    y_at = _Scale(0.0, y_marks[-1], _HEIGHT - _BOTTOM, _TOP)
    parts = [_frame(y_marks, y_at, x_marks, x_at, across, False)]
    for count, left, right in zip(counts.tolist(), edges[:-1], edges[1:], strict=True):
        title = f"{_number(float(f'{left:.4g}'), False)} to {_number(float(f'{right:.4g}'), False)}"
        parts.append(
            f'<rect x="{x_at(left):.1f}" y="{y_at(count):.1f}" '
            f'width="{x_at(right) - x_at(left) - 1:.1f}" height="{y_at(0) - y_at(count):.1f}" '
            f'fill="{COLORS[0]}"><title>{title}: {count}</title></rect>'
        )
    return _figure(parts, ["samples"])


def bars(counts: Mapping[str, float], *, most: float | None = None) -> str:
    """Return a bar chart: one bar for each name. most: value of a full bar; default: the largest."""
    most = most or max(counts.values(), default=0) or 1
    rows = [
        f'<tr><th>{escape(name)}</th><td class="bar"><span style="width:{100 * value / most:.1f}%"></span></td><td>{_count(value)}</td></tr>'
        for name, value in counts.items()
    ]
    return f'<table class="bars">{"".join(rows)}</table>'


def matrix(names: Sequence[str], counts: Sequence[Sequence[float]]) -> str:
    """Return a confusion matrix: rows are true classes, columns predictions.

    counts: a row for each class. A cell is as dark as its share of the row.
    """
    head = "".join(f"<th><span>{escape(name)}</span></th>" for name in names)
    rows = []
    for i, (name, row) in enumerate(zip(names, counts, strict=True)):
        whole = sum(row)
        cells = []
        for j, value in enumerate(row):
            part = value / whole if whole else 0.0
            color = "59,125,216" if i == j else "208,80,50"
            title = f"{name} taken for {names[j]}: {_count(value)} of {_count(whole)} ({part:.1%})"
            cells.append(
                f'<td style="background:rgba({color},{part:.3f})" title="{escape(title)}">{_count(value)}</td>'
            )
        rows.append(f"<tr><th>{escape(name)}</th>{''.join(cells)}</tr>")
    return f'<table class="matrix"><tr><th></th>{head}</tr>{"".join(rows)}</table>'


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
    small = ' class="small"' if is_small else ""
    return f'<img{small} src="data:image/{kind.lower()};base64,{data}" width="{image.width}" height="{image.height}" alt="">'


def legend(colors: Mapping[str, str]) -> str:
    """Return names with their colors."""
    spans = (
        f'<span><i style="background:{color}"></i>{escape(name)}</span>'
        for name, color in colors.items()
    )
    return f'<div class="legend">{"".join(spans)}</div>'


def table(rows: Mapping[str, object]) -> str:
    """Return a table with a row for each name and value."""
    return (
        "<table>"
        + "".join(
            f"<tr><th>{escape(str(n))}</th><td>{escape(str(v))}</td></tr>" for n, v in rows.items()
        )
        + "</table>"
    )


def grid(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table with a header row."""
    names = "".join(f"<th>{escape(name)}</th>" for name in head)
    cells = ("".join(f"<td>{escape(str(value))}</td>" for value in row) for row in rows)
    return f"<table><tr>{names}</tr>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"


def page(title: str, body: str) -> str:
    """Return an HTML page. title: plain text. body: HTML."""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body><main>{body}</main></body></html>\n"
    )


def fragment(title: str, body: str) -> str:
    """Return HTML for a page of another program, such as a notebook. title: plain text. body: HTML.

    Its styles apply only within it.
    """
    return f'<div class="wdstrain"><style>{_FRAGMENT_STYLE}</style><h4>{escape(title)}</h4>{body}</div>'


def ticks(low: float, high: float) -> list[float]:
    """Return four to seven round numbers that span a range; three if high <= low."""
    if not high > low:
        return [low - abs(low or 1) / 2, low, low + abs(low or 1) / 2]
    raw = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    first = math.floor(low / step + 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, math.ceil(high / step - 1e-9) + 1)]


# --- helpers --------------------------------------------------------------------------------------


class _Scale:
    """Linear map from values in [low, high] to pixels in [begin, end]."""

    def __init__(self, low: float, high: float, begin: float, end: float) -> None:
        self._low, self._begin = low, begin
        self._factor = (end - begin) / ((high - low) or 1)

    def __call__(self, value: float) -> float:
        return self._begin + (value - self._low) * self._factor


def _thinned(line: Line, log: bool) -> Line:
    """Return the line with at most `_MAX_POINTS` points, each the mean of a group of points.

    Points that cannot be drawn are left out.
    """
    points = [
        (x, y)
        for x, y in zip(line.xs, line.ys, strict=True)
        if math.isfinite(y) and (not log or y > 0)
    ]
    if len(points) > _MAX_POINTS:
        groups = np.array_split(np.array(points), _MAX_POINTS)
        points = [(float(group[-1, 0]), float(group[:, 1].mean())) for group in groups]
    return line._replace(xs=[x for x, _ in points], ys=[y for _, y in points])


def _frame(
    marks: Sequence[float],
    y_at: Callable[[float], float],
    x_marks: Sequence[float],
    x_at: _Scale,
    across: str,
    share: bool,
    x_text: Callable[[float], str] | None = None,
) -> str:
    """Return grid lines and the labels of both axes. share: label the y axis in percent."""
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    elements = []
    for mark in marks:
        y = y_at(mark)
        if _TOP - 1 <= y <= bottom + 1:
            elements.append(
                f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'
            )
            elements.append(
                f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_number(mark, share)}</text>'
            )
    for mark in x_marks:
        x = x_at(mark)
        if _LEFT - 1 <= x <= right + 1:
            elements.append(
                f'<text x="{x:.1f}" y="{bottom + 15}" text-anchor="middle">{x_text(mark) if x_text else _number(mark, False)}</text>'
            )
    elements.append(
        f'<text x="{(_LEFT + right) / 2}" y="{_HEIGHT - 4}" text-anchor="middle">{escape(across)}</text>'
    )
    return "".join(elements)


def _figure(parts: Sequence[str], names: Sequence[str]) -> str:
    """Return a chart of these SVG elements, with a legend."""
    svg = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">{"".join(parts)}</svg>'
    return svg + legend(dict(zip(names, COLORS, strict=False)))


def _number(value: float, share: bool) -> str:
    """Return a number as short text with up to 12 digits, so that adjacent ticks differ."""
    value = float(f"{value * 100 if share else value:.12g}")
    text = np.format_float_positional(value, trim="-")
    if value and not 1e-3 <= abs(value) < 1e5:
        text = min(
            text,
            np.format_float_scientific(value, trim="-", exp_digits=1).replace("e+", "e"),
            key=len,
        )
    return f"{text}%" if share else text


def _count(value: float) -> str:
    """Return a count as text, without decimals if it is whole."""
    return str(int(value)) if float(value).is_integer() else f"{value:g}"


_STYLE = """
:root{color-scheme:light dark;--line:#d8dce3;--soft:#667085;--card:#fff;--back:#f4f6f9;--text:#1d2430}
@media(prefers-color-scheme:dark){:root{--line:#333b48;--soft:#9aa4b2;--card:#1b212b;--back:#12161d;--text:#e6e9ee}}
body{margin:0;background:var(--back);color:var(--text);font:14px/1.45 system-ui,sans-serif}
main{max-width:1120px;margin:0 auto;padding:20px}
h1{font-size:22px;margin:0 0 4px}
h2{font-size:15px;margin:0 0 8px}
p{margin:0 0 10px}
.soft,.none{color:var(--soft)}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,440px),1fr));gap:14px;margin:14px 0;align-items:start}
.cards>.card,.card{box-sizing:border-box}
.card+.card{margin-top:14px}
.cards>.card+.card{margin-top:0}
.card{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:14px;overflow:auto;min-width:0}
.facts{display:flex;flex-wrap:wrap;gap:10px 28px;margin:12px 0}
.facts div b{display:block;font-size:19px}
.facts div{color:var(--soft)}
.facts+table{margin-bottom:10px}
.facts b{color:var(--text)}
svg{width:100%;height:auto;display:block}
svg text{fill:var(--soft);font-size:11px}
.grid{stroke:var(--line)}
.legend span{display:inline-block;margin-right:14px;color:var(--soft);white-space:nowrap}
.legend i{display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:5px}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th{text-align:left;font-weight:500;padding:2px 10px 2px 0;vertical-align:top}
td{padding:2px 8px 2px 0;overflow-wrap:anywhere}
.bars{width:100%}
.bars td:last-child{text-align:right;width:5em;padding-left:10px}
.bar span{display:block;height:12px;background:#3b7dd8;border-radius:2px;min-width:1px}
.bar{width:70%}
.matrix th{vertical-align:middle}
.matrix td{text-align:center;min-width:34px;padding:5px;border:1px solid var(--line)}
.matrix tr:first-child th{padding:2px 4px;font-size:12px;text-align:center;max-width:110px;overflow:hidden;text-overflow:ellipsis}
.shown{display:grid;grid-template-columns:repeat(auto-fill,minmax(128px,1fr));gap:10px}
.shown figure{margin:0;font-size:12px;overflow-wrap:anywhere}
.shown img{width:100%;height:auto;border-radius:4px}
.wide{grid-template-columns:repeat(auto-fill,minmax(min(100%,300px),1fr))}
.legend+.shown{margin-top:8px}
.small{image-rendering:pixelated}
.wrong{color:#d05032}
.key{color:var(--soft);font-size:11px}
"""

_FRAGMENT_STYLE = """
.wdstrain{font:13px/1.45 system-ui,sans-serif;text-align:left;max-width:760px}
.wdstrain h4{font-size:14px;margin:0 0 6px}
.wdstrain p{margin:0 0 6px}
.wdstrain table{font:inherit;color:inherit;border-collapse:collapse;table-layout:auto;font-variant-numeric:tabular-nums;margin:0 0 8px}
.wdstrain th{font-weight:500;padding:2px 12px 2px 0;vertical-align:top}
.wdstrain th,.wdstrain td{text-align:left!important;background:none}
.wdstrain td{padding:2px 8px 2px 0;overflow-wrap:anywhere;vertical-align:top}
.wdstrain .bars{width:100%}
.wdstrain .bars th{white-space:nowrap}
.wdstrain .bars td:last-child{text-align:right;width:5em}
.wdstrain .bar{width:70%}
.wdstrain .bar span{display:block;height:12px;background:#3b7dd8;border-radius:2px;min-width:1px}
.wdstrain svg{width:100%;max-width:520px;height:auto;display:block}
.wdstrain svg text{fill:currentColor;opacity:.7;font-size:11px}
.wdstrain .grid{stroke:#8886}
.wdstrain .legend span{margin-right:14px;opacity:.8}
.wdstrain .wrong{color:#d05032}
.wdstrain .cards{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,340px),1fr));gap:12px 20px;margin:10px 0}
.wdstrain .card{min-width:0}
.wdstrain .card h2{font-size:13px;font-weight:500;margin:0 0 6px}
.wdstrain pre{font:12px/1.4 ui-monospace,monospace;color:inherit;background:none;border:0;margin:0 0 10px;padding:0;overflow:auto}
.wdstrain .legend i{display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:5px}
"""
