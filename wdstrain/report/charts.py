"""Charts with axes as self-contained SVG: lines, stacked shares, points, histograms.

Texts that come from data must be escaped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import NamedTuple

import numpy as np

from wdstrain.report import pages

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
) -> str:
    """Return a line chart. Values that are not finite are left out, and values <= 0 if `log`.

    across: label of the x axis. share: show y in percent. log: use a logarithmic y axis if the
    values span more than a factor of 20.
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
    parts = [_frame(marks, y_at, x_marks, x_at, across, share)]
    for color, line in zip(COLORS, series, strict=False):
        path = " ".join(
            f"{x_at(x):.1f},{y_at(y):.1f}" for x, y in zip(line.xs, line.ys, strict=True)
        )
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.8" '
            'stroke-linejoin="round"/>'
        )
        if line.dots or len(line.xs) == 1:
            for x, y in zip(line.xs, line.ys, strict=True):
                hint = f"{line.name}: {_number(float(f'{y:.4g}'), share)} at {across} {_number(x, False)}"
                parts.append(
                    f'<circle cx="{x_at(x):.1f}" cy="{y_at(y):.1f}" r="3" fill="{color}">'
                    f"<title>{escape(hint)}</title></circle>"
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
            f'<polygon points="{" ".join(upper + lower[::-1])}" fill="{color}" opacity=".85">'
            f"<title>{escape(title)}</title></polygon>"
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
) -> str:
    """Return grid lines and the labels of both axes. share: label the y axis in percent."""
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    elements = []
    for mark in marks:
        y = y_at(mark)
        if _TOP - 1 <= y <= bottom + 1:
            ends = f'x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"'
            elements.append(f'<line class="grid" {ends}/>')
            elements.append(_text(f"{_LEFT - 6}", f"{y + 4:.1f}", _number(mark, share), "end"))
    for mark in x_marks:
        x = x_at(mark)
        if _LEFT - 1 <= x <= right + 1:
            elements.append(_text(f"{x:.1f}", f"{bottom + 15}", _number(mark, False)))
    elements.append(_text(f"{(_LEFT + right) / 2}", f"{_HEIGHT - 4}", escape(across)))
    return "".join(elements)


def _text(x: str, y: str, text: str, anchor: str = "middle") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{text}</text>'


def _figure(parts: Sequence[str], names: Sequence[str]) -> str:
    """Return a chart of these SVG elements, with a legend."""
    svg = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">{"".join(parts)}</svg>'
    return svg + pages.legend(dict(zip(names, COLORS, strict=False)))


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
