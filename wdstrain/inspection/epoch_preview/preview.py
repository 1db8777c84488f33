"""`EpochPreview`, the result of `wt.plan_epoch`: lines for a terminal, HTML with charts, a verdict.

Bars grow with the logarithm, because the values span four powers of ten.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from html import escape
from textwrap import wrap
from typing import Any

from wdstrain.inspection.epoch_preview.measure import NEAREST, BufferQuality, RankShare
from wdstrain.order.order import Tail
from wdstrain.report import charts, pages
from wdstrain.report.charts import Line
from wdstrain.runtime.cached import cached_property

_ROWS = 16  # ranks that are listed one by one
_BAR = 12  # characters of the longest bar
_TITLE = "preview of an epoch"
_RANK_HEAD = ("rank", "samples", "MB", "shards", "cut", "reads", "seeks")
_HELD_HEAD = ("first MB", "held MB", "max MB")


@dataclass(frozen=True)
class EpochPreview:
    """Preview of an epoch. Prints as a table, and shows figures in a notebook.

    ranks: what each rank does. exactly_once: every sample that is not left out is read once.
    steps_measured: steps for which memory was computed. quality: of the chosen order; sizes: of all
    tried buffers, the smallest first. was_shuffled: the conversion shuffled the shards. label:
    whose classes were measured; labels_read: values that were read from shards, because the index
    has no column of them; why_no_classes: why no classes were measured.
    """

    samples: int
    shards: int
    bytes: int
    is_remote: bool
    batch_size: int
    world_size: int
    lanes: int
    shuffle: bool
    shuffle_buffer: int
    seed: int
    epoch: int
    tail: Tail
    steps: int
    left_out: int
    exactly_once: bool
    steps_measured: int
    ranks: tuple[RankShare, ...]
    quality: BufferQuality
    sizes: tuple[BufferQuality, ...]
    was_shuffled: bool
    label: str | None
    labels_read: int
    why_no_classes: str

    @cached_property
    def smallest_good(self) -> BufferQuality | None:
        """The smallest buffer that mixes well; None if none of the tried ones does."""
        return next(
            (quality for quality in self.sizes if quality.shuffle and quality.is_good), None
        )

    @property
    def is_good(self) -> bool:
        return self.quality.is_good

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def __repr__(self) -> str:
        return (
            f"EpochPreview({self.samples} samples, {self.world_size} ranks, {self.steps} steps, "
            f"well shuffled: {self.is_good})"
        )

    def _repr_html_(self) -> str:
        return pages.fragment(_TITLE, _body(self))

    def lines(self, *, ascii_only: bool = False) -> list[str]:
        """Return everything in lines of at most 80 columns. ascii_only: for other encodings."""
        bar = "#" if ascii_only else "█"
        blocks = [_summary(self), _ranks(self), _quality(self), _buffers(self, bar)]
        rows = [line for block in blocks for line in (*block, "")]
        return [*rows, *wrap(_verdict(self), 80, break_on_hyphens=False)]

    def page(self) -> str:
        """Return an HTML page in one file."""
        return pages.page(_TITLE, f"<h1>{_TITLE.capitalize()}</h1>{_body(self)}")

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON-able values."""
        good = self.smallest_good
        return {
            **asdict(self),
            "is_good": self.is_good,
            "smallest_good_buffer": None if good is None else good.buffer,
            "verdict": _verdict(self),
        }


def _verdict(preview: EpochPreview) -> str:
    """Return a few sentences: whether the order is well shuffled, and what would be."""
    now, good = preview.quality, preview.smallest_good
    separated = next(
        (quality for quality in preview.sizes if quality.shuffle and quality.separates_neighbors),
        None,
    )
    is_sorted = any(quality.shuffle and not quality.mixes_classes for quality in preview.sizes)
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
            f"wdstrain convert tars URLS OUT - then a buffer of {_buffer_text(separated)} is "
            "enough."
        )
    return " ".join(sentences)


# --- blocks of lines ------------------------------------------------------------------------------


def _summary(preview: EpochPreview) -> list[str]:
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


def _ranks(preview: EpochPreview) -> list[str]:
    """Return a row for each rank; of many, of those that read least and most."""
    head = [*_RANK_HEAD, *_HELD_HEAD]
    if preview.is_remote:
        head[head.index("seeks")] = "requests"
    ranks = [(str(rank.rank), rank) for rank in preview.ranks]
    if len(ranks) > _ROWS:
        ordered = sorted(preview.ranks, key=lambda rank: rank.bytes)
        least, most = ordered[0], ordered[-1]
        ranks = [(f"least ({least.rank})", least), (f"most ({most.rank})", most)]
    rows = [tuple(head), *(_rank_row(name, rank, preview.is_remote) for name, rank in ranks)]
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


def _quality(preview: EpochPreview) -> list[str]:
    near, classes = preview.quality.neighbors, preview.quality.classes
    rows = []
    if near is not None:
        nearest = f"{near.nearest:.3g} of the {NEAREST} nearest on disk share a batch"
        rows.append(("neighbors", f"{nearest} (ideal: {near.nearest_ideal:.3g})"))
    if classes is None:
        rows.append(("classes", f"not measured: {preview.why_no_classes or 'too few samples'}"))
        return _named(rows)
    read = f"; {preview.labels_read} labels were read" if preview.labels_read else ""
    effect = f"{classes.design_effect:.2f} of {preview.label!r}"
    good = f"(ideal: 1, good: at most {classes.limit:.2f})"
    return _named([*rows, ("design effect", f"{effect} {good}{read}")])


def _buffers(preview: EpochPreview, bar: str = "█") -> list[str]:
    """Return a row for each buffer: memory, and bars of the distance from a random order."""
    has_classes = any(quality.classes for quality in preview.sizes)
    head = f"{'buffer':>9} {'held MB':>9}  {'neighbors in a batch':<22}"
    rows = [f"{head}design effect of classes" if has_classes else head.rstrip()]
    size = preview.batch_size * preview.world_size
    for quality in preview.sizes:
        near, classes = quality.neighbors, quality.classes
        cells = ["", ""]
        if near is not None:
            length = _bar_length(near.nearest - near.nearest_ideal, NEAREST)
            cells[0] = f"{bar * length:<{_BAR}} {near.nearest:.2f}"
        if classes is not None:
            length = _bar_length(classes.design_effect - 1, size)
            cells[1] = f"{bar * length:<{_BAR}} {classes.design_effect:.2f}"
        marks = ["this one"] * (quality is preview.quality)
        marks += ["enough"] * (quality is preview.smallest_good)
        name = str(quality.buffer) if quality.shuffle else "none"
        row = f"{name:>9} {_mb(quality.held_bytes):>9}  {cells[0]:<20}  {cells[1]:<20}"
        rows.append(f"{row}  {', '.join(marks)}".rstrip())
    return rows


def _body(preview: EpochPreview) -> str:
    sizes = [measured for measured in preview.sizes if measured.shuffle]
    near = [(measured.buffer, measured.neighbors) for measured in sizes if measured.neighbors]
    even = [(measured.buffer, measured.classes) for measured in sizes if measured.classes]
    near_title = f"Neighbors: of the {NEAREST} nearest on disk, in the same batch"
    even_title = f"Design effect of {preview.label}: variance of class shares / ideal variance"
    figures = [
        _chart(near_title, [(size, measured.nearest, measured.limit) for size, measured in near]),
        _chart(
            even_title, [(size, measured.design_effect, measured.limit) for size, measured in even]
        ),
    ]
    texts = {
        "Epoch": _summary(preview),
        "Shuffle": _quality(preview),
        "Ranks": _ranks(preview),
        "Buffers": _buffers(preview),
    }
    tables = "".join(
        f'<div class="card"><h2>{name}</h2><pre>{escape(chr(10).join(rows))}</pre></div>'
        for name, rows in texts.items()
    )
    verdict = escape(_verdict(preview))
    return f'<p><b>{verdict}</b></p><div class="cards">{"".join(figures)}</div>{tables}'


def _chart(title: str, points: list[tuple[int, float, float]]) -> str:
    """Return a card with a chart of (buffer, value, largest good value)."""
    if not points:
        return ""
    xs = [math.log2(size) for size, _, _ in points]
    series = [
        Line("this set", xs, [max(value, 1e-3) for _, value, _ in points], dots=True),
        Line("good", xs, [limit for _, _, limit in points]),
    ]
    chart = charts.lines(
        series, across="shuffle buffer, samples", log=True, x_text=lambda x: f"{2**x:.0f}"
    )
    return f'<div class="card"><h2>{escape(title)}</h2>{chart}</div>'


# --- parts ----------------------------------------------------------------------------------------


def _rank_row(name: str, rank: RankShare, is_remote: bool) -> tuple[str, ...]:
    moves = rank.requests if is_remote else rank.seeks
    counts = (rank.shards, rank.opened_in_the_middle, rank.reads, moves)
    sizes = (rank.first_batch_bytes, rank.held_bytes_mean, rank.held_bytes_most)
    return (name, str(rank.samples), _mb(rank.bytes), *map(str, counts), *map(_mb, sizes))


def _faults(preview: EpochPreview) -> list[str]:
    """Return the problems of the order."""
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


def _buffer_text(quality: BufferQuality) -> str:
    return f"{quality.buffer} samples ({_mb(quality.held_bytes)} MB held on a rank)"


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
