"""Bar charts as one SVG file that is readable on light and dark backgrounds."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

_WIDTH, _LABELS, _VALUES, _ROW, _HEAD, _GAP = 760, 110, 90, 21, 34, 14

_STYLE = """
text{font:13px system-ui,-apple-system,"Segoe UI",sans-serif;fill:#1f2937}
.title{font-weight:600}.peer{fill:#a3acb9}.own{fill:#3b7dd8}
@media(prefers-color-scheme:dark){text{fill:#e5e7eb}.peer{fill:#5d6775}.own{fill:#5b9bf0}}
"""


class Bar(NamedTuple):
    """One bar. value: samples/s."""

    name: str
    value: float


class Panel(NamedTuple):
    """One group of bars with a scale of its own."""

    title: str
    bars: Sequence[Bar]


def chart(panels: Sequence[Panel]) -> str:
    """Return the SVG of horizontal bars, one panel below the other."""
    elements, y = list[str](), 0
    for panel in panels:
        y += _HEAD
        elements.append(f'<text class="title" x="0" y="{y - 12}">{escape(panel.title)}</text>')
        most = max(bar.value for bar in panel.bars)
        for bar in panel.bars:
            width = (_WIDTH - _LABELS - _VALUES) * bar.value / most
            kind = "own" if bar.name == "wdstrain" else "peer"
            elements += [
                f'<text x="{_LABELS - 8}" y="{y + 14}" text-anchor="end">{escape(bar.name)}</text>',
                f'<rect class="{kind}" x="{_LABELS}" y="{y + 2}" width="{width:.1f}" height="16" rx="2"/>',
                f'<text x="{_LABELS + width + 6:.1f}" y="{y + 14}">{bar.value:,.0f}</text>',
            ]
            y += _ROW
        y += _GAP
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {y}" width="{_WIDTH}" height="{y}" role="img">'
        f"<title>Samples per second by library</title><style>{_STYLE}</style>\n"
        + "\n".join(elements)
        + "\n</svg>\n"
    )
