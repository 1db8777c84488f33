"""Charts with axes as self-contained SVG. Texts that come from data must be escaped."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

import numpy as np

from wdstrain.report import pages

# also distinct for people with impaired color vision
COLORS = (
    *("#3b7dd8", "#e08214", "#2a9d6f", "#b3477f", "#7a6ad8", "#8a8a8a"),
    *("#17a2b8", "#c9a400", "#d9534f", "#5b8c2a", "#9c6b4a", "#d070c8"),  # of many runs
)

_WIDTH, _HEIGHT = 520, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 506, 12, 196  # edges of the lines
_MAX_POINTS = 400  # points of a line; a chart has no pixels for more


class Line(NamedTuple):
    """One line of a chart. dots: draw its points, too."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    dots: bool = False


def lines(series: Sequence[Line], *, across: str, share: bool = False) -> str:
    """Return a chart of lines and points. Values that are not finite are left out.

    across: label of the x axis. share: show y in percent.
    Lines beyond the last of `COLORS` are not drawn.
    """
    series = [line for line in map(_drawable, series) if line.xs]
    xs = [x for line in series for x in line.xs]
    ys = [y for line in series for y in line.ys]
    if not xs:
        return '<p class="none">nothing to show yet</p>'
    x_marks, y_marks = ticks(min(xs), max(xs)), ticks(min(ys), max(ys))
    parts = [*_axes(x_marks, y_marks, across, share)]
    for color, line in zip(COLORS, series, strict=False):
        left = np.interp(line.xs, (x_marks[0], x_marks[-1]), (_LEFT, _RIGHT))
        top = np.interp(line.ys, (y_marks[0], y_marks[-1]), (_BOTTOM, _TOP))
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(left, top, strict=True))
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.8" '
            'stroke-linejoin="round"/>'
        )
        if line.dots or len(line.xs) == 1:
            for x, y, *point in zip(left, top, line.xs, line.ys, strict=True):
                hint = f"{line.name}: {_number(point[1], share, 4)} at {across} {point[0]:.4g}"
                circle = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}">'
                parts.append(f"{circle}<title>{escape(hint)}</title></circle>")
    head = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" font-size="11" fill="currentColor"'
    colors = dict(zip((line.name for line in series), COLORS, strict=False))
    return f"<svg {head}>{''.join(parts)}</svg>{pages.legend(colors)}"


def ticks(low: float, high: float) -> list[float]:
    """Return four to seven round numbers that span a range; three if high <= low."""
    if not high > low:
        return [low - abs(low or 1) / 2, low, low + abs(low or 1) / 2]
    raw = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    first = math.floor(low / step + 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, math.ceil(high / step - 1e-9) + 1)]


def _drawable(line: Line) -> Line:
    """Return a line with its finite points; of many, the means of groups are joined."""
    points = np.array([line.xs, line.ys], np.float64)
    points = points[:, np.isfinite(points).all(0)]
    if points.shape[1] > _MAX_POINTS:
        groups = np.array_split(points, _MAX_POINTS, axis=1)
        points = np.array([(group[0, -1], group[1].mean()) for group in groups]).T
    return line._replace(xs=points[0].tolist(), ys=points[1].tolist())


def _axes(
    x_marks: Sequence[float], y_marks: Sequence[float], across: str, share: bool
) -> Iterator[str]:
    """Yield grid lines and the labels of both axes. share: label the y axis in percent."""
    text = '<text x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>'.format
    for y, mark in zip(np.linspace(_BOTTOM, _TOP, len(y_marks)), y_marks, strict=True):
        yield (
            f'<line class="grid" stroke="#8886" x1="{_LEFT}" x2="{_RIGHT}" y1="{y:.1f}" '
            f'y2="{y:.1f}"/>'
        )
        yield text(_LEFT - 6, y + 4, "end", _number(mark, share))
    for x, mark in zip(np.linspace(_LEFT, _RIGHT, len(x_marks)), x_marks, strict=True):
        yield text(x, _BOTTOM + 15, "middle", _number(mark, False))
    yield text((_LEFT + _RIGHT) / 2, _HEIGHT - 4, "middle", escape(across))


def _number(value: float, share: bool, digits: int = 10) -> str:
    """Return a number as text with up to ten digits, so that adjacent ticks differ."""
    return f"{value * 100:.{digits}g}%" if share else f"{value:.{digits}g}"
