"""A preview as lines for a terminal of 80 columns, as HTML with charts, and as a verdict.

Bars grow with the logarithm, because the values span four powers of ten.
"""

from __future__ import annotations

import math
from html import escape
from statistics import fmean
from textwrap import wrap

from wdstrain.inspection.epoch_preview.result import BufferQuality, Preview
from wdstrain.inspection.epoch_preview.shuffle_quality import NEAREST
from wdstrain.inspection.epoch_preview.simulate import RankShare
from wdstrain.report import charts
from wdstrain.report.charts import Line

_ROWS = 16  # ranks that are listed one by one
_BAR = 12  # characters of the longest bar
_TITLE = "preview of an epoch"
_RANK_HEAD = ("rank", "samples", "MB", "shards", "cut", "reads", "seeks")
_HELD_HEAD = ("first MB", "held MB", "max MB")


def lines(preview: Preview, *, ascii_only: bool = False) -> list[str]:
    """Return everything in lines of at most 80 columns. ascii_only: for other encodings."""
    bar = "#" if ascii_only else "█"
    blocks = [_summary(preview), _ranks(preview), _quality(preview), _buffers(preview, bar)]
    return [
        *(line for block in blocks for line in (*block, "")),
        *wrap(verdict(preview), 80, break_on_hyphens=False),
    ]


def verdict(preview: Preview) -> str:
    """Return a few sentences: whether the order is well shuffled, and what would be."""
    now, good = preview.quality, preview.smallest_good
    separated = next(
        (one for one in preview.sizes if one.shuffle and one.separates_neighbors), None
    )
    is_sorted = any(one.shuffle and not one.mixes_classes for one in preview.sizes)
    sentences = []
    if now.is_good:
        basis = "" if now.classes is not None else " by neighbors alone (no classes were measured)"
        smaller = ""
        if good is not None and good.held_bytes < 0.9 * now.held_bytes:
            smaller = f"; a buffer of {_buffer_text(good)} is enough"
        sentences.append(f"Well shuffled{basis}{smaller}.")
    else:
        sentences.append(f"Not well shuffled: {'; '.join(_faults(preview))}.")
        if preview.was_shuffled and now.shuffle and now.mixes_classes:
            sentences.append(
                "The shards were packed in random order, so neighbors have nothing in common, and "
                "this does little harm."
            )
        if good is not None and now.shuffle:
            sentences.append(
                f"A buffer of {_buffer_text(good)} is enough: --shuffle-buffer {good.buffer}."
            )
        elif good is not None:
            sentences.append(f"Remove --no-shuffle; a buffer of {_buffer_text(good)} is enough.")
        elif not is_sorted:
            sentences.append("No buffer that was tried is enough.")
    is_costly = separated and (good is None or good.held_bytes > 2 * separated.held_bytes)
    if is_sorted and separated is not None and is_costly:
        none_is_enough = ", and no buffer mixes them well" if good is None else ""
        sentences.append(
            f"Samples of a class lie together on disk{none_is_enough}. Pack them in random order: "
            f"wdstrain convert tars URLS OUT - then a buffer of {_buffer_text(separated)} is enough."
        )
    return " ".join(sentences)


def fragment(preview: Preview) -> str:
    """Return HTML for a notebook."""
    return charts.fragment(_TITLE, _body(preview))


def page(preview: Preview) -> str:
    """Return a page in one file."""
    return charts.page(_TITLE, f"<h1>{_TITLE.capitalize()}</h1>{_body(preview)}")


# --- blocks of lines ------------------------------------------------------------------------------


def _summary(preview: Preview) -> list[str]:
    p = preview
    order = f"buffer of {p.shuffle_buffer} samples, seed {p.seed}" if p.shuffle else "none"
    left_out = f"{p.left_out} of {p.samples}" if p.left_out else "0"
    left_out += " (others in every epoch)" if p.left_out and p.shuffle else ""
    total = p.batch_size * p.world_size
    rows = [
        ("samples", f"{p.samples} in {_count(p.shards, 'shard')}, {_mb(p.bytes)} MB"),
        ("epoch", f"{p.epoch}: {p.steps} steps on each of {_count(p.world_size, 'rank')}"),
        ("batch", f"{p.batch_size} per rank, {total} in all, from {_count(p.lanes, 'lane')}"),
        ("shuffle", order),
        ("left out", left_out),
        ("exactly once", "every sample that is not left out" if p.exactly_once else "NO: a bug"),
    ]
    if p.tail == "pad":
        padding = sum(rank.padding for rank in p.ranks)
        rows.append(("padding", f"{padding} rows, marked invalid"))
    if p.tail == "keep":
        rows.append(("last batch", "short: it holds the rest"))
    return _named(rows)


def _ranks(preview: Preview) -> list[str]:
    """Return a row for each rank; of many, of those that read least and most; and their sum."""
    head = [*_RANK_HEAD, *_HELD_HEAD]
    if preview.is_remote:
        head[head.index("seeks")] = "requests"
    ranks = [(str(rank.rank), rank) for rank in preview.ranks]
    if len(ranks) > _ROWS:
        ordered = sorted(preview.ranks, key=lambda rank: rank.bytes)
        least, most = ordered[0], ordered[-1]
        ranks = [(f"least ({least.rank})", least), (f"most ({most.rank})", most)]
    rows = [tuple(head), *(_rank_row(name, rank, preview.is_remote) for name, rank in ranks)]
    if len(preview.ranks) > 1:
        rows.append(_sum_row(preview))
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    gap = "  " if sum(widths) + 2 * len(widths) < 82 else " "
    table = [
        gap.join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows
    ]
    notes = [
        "cut: shards entered in the middle; first: read before the first batch;",
        "held: read and not delivered, mean and maximum",
    ]
    if preview.steps_measured < preview.steps:
        notes[-1] += f" ({preview.steps_measured} of {preview.steps} steps)"
    if preview.lanes > preview.world_size and not preview.is_remote:
        lanes = preview.lanes // preview.world_size
        notes.append(f"the {lanes} lanes of a rank take turns: a disk seeks with nearly every read")
    return [*table, *notes]


def _quality(preview: Preview) -> list[str]:
    near, classes = preview.quality.neighbors, preview.quality.classes
    rows = []
    if near is not None:
        nearest = f"{near.nearest:.3g} of the {NEAREST} nearest on disk share a batch"
        rows += [
            ("neighbors", f"{nearest} (ideal: {near.nearest_ideal:.3g})"),
            ("", f"two adjacent ones: {near.touching:.2%} (ideal: {near.touching_ideal:.2%})"),
            ("moves", f"{near.mean_move:.0f} places, mean; {near.max_move} at most"),
        ]
    if classes is None:
        rows.append(("classes", f"not measured: {preview.why_no_classes or 'too few samples'}"))
        return _named(rows)
    different = f"{classes.classes:.1f} different in {classes.among} samples of a batch"
    read = f"; {preview.labels_read} labels were read" if preview.labels_read else ""
    rows += [
        ("classes", f"{different} (ideal: {classes.classes_ideal:.1f})"),
        (
            "design effect",
            f"{classes.design_effect:.2f} of {preview.label!r} (ideal: 1, good: at most "
            f"{classes.limit:.2f}){read}",
        ),
    ]
    return _named(rows)


def _buffers(preview: Preview, bar: str = "█") -> list[str]:
    """Return a row for each buffer: memory, and bars of the distance from a random order."""
    has_classes = any(one.classes for one in preview.sizes)
    head = f"{'buffer':>9} {'held MB':>9}  {'neighbors in a batch':<22}"
    rows = [f"{head}design effect of classes" if has_classes else head.rstrip()]
    size = preview.batch_size * preview.world_size
    for one in preview.sizes:
        near, classes = one.neighbors, one.classes
        cells = ["", ""]
        if near is not None:
            length = _bar_length(near.nearest - near.nearest_ideal, NEAREST)
            cells[0] = f"{bar * length:<{_BAR}} {near.nearest:.2f}"
        if classes is not None:
            length = _bar_length(classes.design_effect - 1, size)
            cells[1] = f"{bar * length:<{_BAR}} {classes.design_effect:.2f}"
        marks = ["this one"] * (one is preview.quality)
        marks += ["enough"] * (one is preview.smallest_good)
        name = str(one.buffer) if one.shuffle else "none"
        row = f"{name:>9} {_mb(one.held_bytes):>9}  {cells[0]:<20}  {cells[1]:<20}"
        rows.append(f"{row}  {', '.join(marks)}".rstrip())
    return rows


def _body(preview: Preview) -> str:
    sizes = [one for one in preview.sizes if one.shuffle]
    across = "shuffle buffer, samples"
    near = [(math.log2(one.buffer), one.neighbors) for one in sizes if one.neighbors]
    even = [(math.log2(one.buffer), one.classes) for one in sizes if one.classes]
    cards = []
    if near:
        xs = [x for x, _ in near]
        series = [
            Line("this set", xs, [one.nearest for _, one in near], dots=True),
            Line("good", xs, [one.limit for _, one in near]),
            Line("ideal", xs, [one.nearest_ideal for _, one in near]),
        ]
        title = f"Neighbors: of the {NEAREST} nearest on disk, in the same batch"
        cards.append((title, charts.lines(series, across=across, log=True, x_text=_power)))
    if even:
        xs = [x for x, _ in even]
        series = [
            Line("this set", xs, [max(one.design_effect, 1e-3) for _, one in even], dots=True),
            Line("good", xs, [one.limit for _, one in even]),
        ]
        title = f"Design effect of {preview.label}: variance of class shares / ideal variance"
        cards.append((title, charts.lines(series, across=across, log=True, x_text=_power)))
    held = [one.held_bytes / 1e6 for one in sizes]
    memory = [Line("mean", [math.log2(one.buffer) for one in sizes], held, dots=True)]
    cards.append(("Held on a rank, MB", charts.lines(memory, across=across, x_text=_power)))
    first = f" (the first {_ROWS})" if len(preview.ranks) > _ROWS else ""
    read = {f"rank {one.rank}": round(one.bytes / 1e6, 1) for one in preview.ranks[:_ROWS]}
    cards.append((f"Read by each rank, MB{first}", charts.bars(read)))
    texts = [
        ("Epoch", _summary(preview)),
        ("Shuffle", _quality(preview)),
        ("Ranks", _ranks(preview)),
        ("Buffers", _buffers(preview)),
    ]
    figures = "".join(
        f'<div class="card"><h2>{escape(name)}</h2>{drawn}</div>' for name, drawn in cards
    )
    tables = "".join(
        f'<div class="card"><h2>{name}</h2><pre>{escape(chr(10).join(rows))}</pre></div>'
        for name, rows in texts
    )
    text = escape(verdict(preview))
    return f'<p><b>{text}</b></p><div class="cards">{figures}</div>{tables}'


# --- parts ----------------------------------------------------------------------------------------


def _rank_row(name: str, rank: RankShare, is_remote: bool) -> tuple[str, ...]:
    moves = rank.requests if is_remote else rank.seeks
    counts = (rank.shards, rank.opened_in_the_middle, rank.reads, moves)
    sizes = (rank.first_batch_bytes, rank.held_bytes_mean, rank.held_bytes_most)
    return (name, str(rank.samples), _mb(rank.bytes), *map(str, counts), *map(_mb, sizes))


def _sum_row(preview: Preview) -> tuple[str, ...]:
    def total(name: str) -> int:
        return sum(getattr(rank, name) for rank in preview.ranks)

    moves = "requests" if preview.is_remote else "seeks"
    counts = [str(total(name)) for name in ("opened_in_the_middle", "reads", moves)]
    mean = fmean(rank.held_bytes_mean for rank in preview.ranks) * len(preview.ranks)
    sizes = map(_mb, (total("first_batch_bytes"), mean, total("held_bytes_most")))
    return ("all", str(total("samples")), _mb(total("bytes")), "", *counts, *sizes)


def _faults(preview: Preview) -> list[str]:
    """Return what is wrong with the order."""
    now = preview.quality
    near, classes, faults = now.neighbors, now.classes, []
    if near is not None and not now.separates_neighbors:
        faults.append(
            f"of the {NEAREST} nearest samples on disk {near.nearest:.2g} share a batch, ideally "
            f"{near.nearest_ideal:.2g}"
        )
    if classes is not None and not now.mixes_classes:
        size = preview.batch_size * preview.world_size
        ideal = max(1, round(size / classes.design_effect))
        faults.append(f"batches of {size} are as uneven in their classes as ideal ones of {ideal}")
    return faults


def _bar_length(value: float, most: float) -> int:
    """Return the logarithmic length of a bar: 0 at a hundredth, the whole bar at `most`."""
    share = math.log(max(value, 0.01) / 0.01) / math.log(max(most, 1) / 0.01)
    return round(_BAR * min(1.0, share))


def _power(exponent: float) -> str:
    return f"{2**exponent:.0f}"


def _buffer_text(one: BufferQuality) -> str:
    return f"{one.buffer} samples ({_mb(one.held_bytes)} MB held on a rank)"


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def _mb(size: float) -> str:
    digits = 0 if size >= 1e8 else 1 if size >= 1e5 else 3
    return f"{size / 1e6:.{digits}f}"


def _named(rows: list[tuple[str, str]]) -> list[str]:
    """Return names with wrapped texts beside them."""
    return [
        f"{name if not number else '':<13} {line}"
        for name, text in rows
        for number, line in enumerate(wrap(text, 66, break_on_hyphens=False))
    ]
