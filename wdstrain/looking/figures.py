"""Samples for a person's eyes as text: a table for a terminal, figures for a notebook, a whole page.

A notebook and a page get the same figures, which bring their own style under names of their own, so that they look alike wherever
they stand and disturb nothing there; colours are those of the surroundings, light or dark. Keys and texts come from data: everything
is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from rich.cells import cell_len, set_cell_size

from wdstrain.looking.picturing import SIDE
from wdstrain.looking.seeing import Seen
from wdstrain.report import charts
from wdstrain.report.printing import printable

_ROWS = 20  # of a table in a terminal; the rest is counted
_LETTERS = 160  # of a text or a key under a picture


def text_table(samples: Sequence[Seen], width: int = 80) -> str:
    """A row for each sample: its key, its labels, what else is in it, and what is wrong with it."""
    rows = [(printable(one.key), one.said, _rest(one)) for one in samples[:_ROWS]]
    keys = min(max((cell_len(row[0]) for row in rows), default=0), max(12, width // 3))
    labels = min(max((cell_len(row[1]) for row in rows), default=0), max(8, width * 2 // 5))
    lines = [
        f"{_fitted(key, keys, keys // 2)}  {_fitted(said, labels)}  {_fitted(rest, width - keys - labels - 4)}".rstrip()
        for key, said, rest in rows
    ]
    return "\n".join(
        lines + ([f"... and {len(samples) - _ROWS} more"] if len(samples) > _ROWS else [])
    )


def figures(samples: Sequence[Seen], title: str, notes: Iterable[str]) -> str:
    """Pictures with labels and keys under them, as HTML that stands anywhere."""
    wide = max((len(one.pictures) for one in samples), default=1)
    across = f"minmax(min(100%,{min(8, wide) * 154 - 10}px),1fr)"
    said = "".join(f"<p>{escape(printable(note))}</p>" for note in notes)
    cells = "".join(_figure(one) for one in samples)
    body = f'<style>{_STYLE}</style>{said}<div class="sheet" style="grid-template-columns:repeat(auto-fill,{across})">{cells}</div>'
    return charts.fragment(printable(title), body)


def page(samples: Sequence[Seen], title: str, notes: Iterable[str]) -> str:
    """The same as a page of its own."""
    return charts.page(
        f"{printable(title)} - wdstrain",
        f'<section class="card">{figures(samples, title, notes)}</section>',
    )


# --- parts -----------------------------------------------------------------------------------------------------------


def _figure(seen: Seen) -> str:
    key = printable(seen.key)
    where = f"{seen.shard}, offset {seen.offset}" if seen.shard else ""
    drawn = [
        f"<div>{charts.picture(pixels, most=SIDE)}{f'<small>{escape(printable(name))}</small>' if len(seen.pictures) > 1 else ''}</div>"
        for name, pixels in seen.pictures.items()
    ]
    parts = [f'<div class="pictures">{"".join(drawn)}</div>'] if drawn else []
    if seen.error:
        parts.append(f'<div class="error">{escape(printable(seen.error))}</div>')
    if seen.said:
        parts.append(f"<b>{escape(_shortened(seen.said))}</b>")
    if seen.text:
        parts.append(f"<div>{escape(_shortened(printable(seen.text)))}</div>")
    if seen.rest:
        parts.append(f"<small>{escape(_shortened(seen.rest))}</small>")
    parts.append(
        f"<small>{escape(key if len(key) <= _LETTERS else key[: _LETTERS // 2] + '…' + key[-_LETTERS // 2 :])}</small>"
    )
    hint = "\n".join(
        one
        for one in (key, printable(where), seen.split, seen.said, printable(seen.text), seen.rest)
        if one
    )
    return f'<figure{" class=broken" if seen.error else ""} title="{escape(hint)}">{"".join(parts)}</figure>'


def _rest(seen: Seen) -> str:
    """What is wrong, what is said, and what else there is."""
    return printable("; ".join(one for one in (seen.error, seen.text, seen.rest) if one))


def _shortened(text: str) -> str:
    return text if len(text) <= _LETTERS else f"{text[: _LETTERS - 1]}…"


def _fitted(text: str, width: int, tail: int = 0) -> str:
    """A text in so many cells of a terminal; of one that is too long, its beginning, and so many letters of its end."""
    if cell_len(text) <= width:
        return set_cell_size(text, width)
    end = text[len(text) - tail :]
    return set_cell_size(f"{set_cell_size(text, max(0, width - cell_len(end) - 1))}…{end}", width)


_STYLE = """
.wdstrain p{opacity:.75}.wdstrain .sheet{display:grid;gap:10px}
.wdstrain figure{margin:0;padding:6px;border:1px solid #8884;border-radius:6px;min-width:0;overflow-wrap:anywhere}
.wdstrain figure.broken{border:2px solid #d05032}.wdstrain .error{color:#d05032}
.wdstrain .pictures{display:flex;gap:4px;margin-bottom:4px}.wdstrain .pictures>div{flex:1 1 0;min-width:0;max-width:256px}
.wdstrain img{display:block;width:100%;height:auto;aspect-ratio:1;object-fit:contain;background:#8882;border-radius:4px;margin:0}
.wdstrain img.small{image-rendering:pixelated}
.wdstrain b,.wdstrain small{display:block}.wdstrain small{opacity:.7;font-size:11px}
"""
