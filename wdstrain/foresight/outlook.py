"""What was foreseen, as people read it: lines for a terminal of 80 columns, a page with figures, and one sentence of advice.

Bars and not curves in the terminal: a row for each buffer carries its numbers, is read aloud as well as looked at, and survives a
pipe and a log. Bars grow with the logarithm, because what is told goes over four powers of ten and the end that matters is
the small one.
"""

from __future__ import annotations

import math
from html import escape
from statistics import fmean

from wdstrain.foresight.itinerary import RankShare
from wdstrain.foresight.prospect import GOOD_EFFECT, Mix, Prospect, most_neighbours
from wdstrain.foresight.shuffling import NEAREST
from wdstrain.report import charts
from wdstrain.report.charts import Line

_ROWS = 16  # of ranks that are told one by one
_BAR = 12  # characters of the longest bar
_PACK = "wdstrain convert tars URLS OUT"


def lines(what: Prospect, *, ascii_only: bool = False) -> list[str]:
    """All of it, in lines of at most 80 columns. ascii_only: where the output knows no other characters."""
    bar = "#" if ascii_only else "\u2588"
    return [
        *summary(what),
        "",
        *ranks(what),
        "",
        *quality(what),
        "",
        *plot(what, bar),
        "",
        *_folded(verdict(what)),
    ]


def summary(what: Prospect) -> list[str]:
    """What the epoch is."""
    order = (
        f"buffer of {what.shuffle_buffer} samples, seed {what.seed}"
        if what.shuffle
        else "none: the order on disk"
    )
    left = (
        f"{what.left_out} of {what.samples} (others in every epoch)"
        if what.left_out and what.shuffle
        else str(what.left_out)
    )
    rows = [
        ("samples", f"{what.samples} in {what.shards} shards, {_mb(what.bytes)} MB"),
        (
            "epoch",
            f"{what.epoch}: {what.steps} steps on each of {what.world_size} rank{'s' * (what.world_size > 1)}",
        ),
        (
            "batch",
            f"{what.batch_size} on a rank, {what.batch_size * what.world_size} in all, from {what.lanes} lane{'s' * (what.lanes > 1)}",
        ),
        ("shuffle", order),
        ("left out", left),
        (
            "exactly once",
            "every sample that is not left out" if what.exactly_once else "NO: this plan is broken",
        ),
    ]
    padding = sum(rank.padding for rank in what.ranks)
    if what.tail == "pad":
        rows.append(("padding", f"{padding} rows, marked invalid"))
    if what.tail == "keep":
        rows.append(("last batch", "short: it holds what is left"))
    return _named(rows)


def ranks(what: Prospect) -> list[str]:
    """A row for each rank; of many, for that which reads least and most, and their sum."""
    move = "requests" if what.on_a_server else "seeks"
    head = (
        "rank",
        "samples",
        "MB",
        "shards",
        "cut",
        "reads",
        move,
        "first MB",
        "held MB",
        "most MB",
    )
    if len(what.ranks) <= _ROWS:
        rows = [_rank_row(str(rank.rank), rank, what.on_a_server) for rank in what.ranks]
    else:
        ordered = sorted(what.ranks, key=lambda rank: rank.bytes)
        rows = [
            _rank_row(
                f"{'least' if rank is ordered[0] else 'most'} ({rank.rank})", rank, what.on_a_server
            )
            for rank in (ordered[0], ordered[-1])
        ]
    if len(what.ranks) > 1:
        rows.append(_sum_row(what))
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    gap = "  " if sum(widths) + 2 * len(widths) < 82 else " "
    found = [
        gap.join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in (head, *rows)
    ]
    notes = [
        "cut: shards entered in the middle; first: read before the first batch is whole;",
        "held: read and not delivered, on average and at most",
    ]
    if what.steps_looked_at < what.steps:
        notes[-1] += f" ({what.steps_looked_at} of {what.steps} steps looked at)"
    if what.lanes > what.world_size and not what.on_a_server:
        notes.append(
            f"the {what.lanes // what.world_size} lanes of a rank take turns: a disk moves with nearly every read"
        )
    return [*found, *notes]


def quality(what: Prospect) -> list[str]:
    """How well it is shuffled."""
    near, classes = what.now.neighbours, what.now.classes
    rows = []
    if near is not None:
        rows += [
            (
                "neighbours",
                f"{near.nearest:.3g} of the {NEAREST} nearest on disk share a batch (ideally {near.nearest_ideal:.3g})",
            ),
            (
                "",
                f"two that touch on disk: {near.touching:.2%} (ideally {near.touching_ideal:.2%})",
            ),
            ("moves", f"{near.move_mean:.0f} places on average, {near.move_most} at most"),
        ]
    if classes is not None:
        error = f" +- {classes.error:.2f}" if classes.error is not None else ""
        rows += [
            (
                "classes",
                f"{classes.classes:.1f} different in {classes.among} samples of a batch (ideally {classes.classes_ideal:.1f})",
            ),
            (
                "design effect",
                f"{classes.design_effect:.2f}{error} (ideally 1), by {what.labels_read} labels {what.label!r}",
            ),
        ]
    else:
        why = (
            what.why_no_classes
            or f"the {what.labels_read} labels that were read are of one class, or none"
        )
        rows.append(("classes", f"not looked at: {why}"))
    if what.epochs_mixed > 1:
        rows.append(("", f"(over {what.epochs_mixed} epochs)"))
    return _named(rows)


def plot(what: Prospect, bar: str = "\u2588") -> list[str]:
    """A row for each buffer: what it holds, and bars of how far it is from an ideal shuffle."""
    head = f"{'buffer':>9} {'held MB':>9}  {'neighbours in a batch':<22}"
    found = [
        f"{head}design effect of classes"
        if any(mix.classes for mix in what.sizes)
        else head.rstrip()
    ]
    for mix in what.sizes:
        near, classes = mix.neighbours, mix.classes
        cells = ["", ""]
        if near is not None:
            cells[0] = (
                f"{_bar(near.nearest - near.nearest_ideal, NEAREST, bar):<{_BAR}} {near.nearest:.2f}"
            )
        if classes is not None:
            cells[1] = (
                f"{_bar(classes.design_effect - 1, what.batch_size * what.world_size, bar):<{_BAR}} {classes.design_effect:.2f}"
            )
        marks = [
            word
            for word, holds in (("asked for", mix is what.now), ("enough", mix is what.enough))
            if holds
        ]
        name = str(mix.buffer) if mix.shuffle else "none"
        row = f"{name:>9} {_mb(mix.held_bytes):>9}  {cells[0]:<20}  {cells[1]:<20}  {', '.join(marks)}"
        found.append(row.rstrip())
    near = what.now.neighbours
    limit = (
        ""
        if near is None
        else f"at most {most_neighbours(near.nearest_ideal):.2g} of {NEAREST} neighbours, "
    )
    found.append(f"good enough: {limit}a design effect of at most {GOOD_EFFECT}")
    errors = [
        mix.classes.error
        for mix in what.sizes
        if mix.classes is not None and mix.classes.error is not None
    ]
    if errors and max(errors) > 2 * (GOOD_EFFECT - 1):
        found.append(
            f"(few batches were looked at: standard errors of design effects go up to {max(errors):.1f})"
        )
    return found


def verdict(what: Prospect) -> str:
    """A few sentences: whether it is good enough, and what would be."""
    now, enough = what.now, what.enough
    parted = next((mix for mix in what.sizes if mix.shuffle and mix.parts_neighbours), None)
    lie_together = any(not mix.evens_classes for mix in what.sizes if mix.shuffle)
    words = []
    if now.is_good:
        less = enough is not None and enough.held_bytes < 0.9 * now.held_bytes
        alone = (
            "" if now.classes is not None else " by neighbours alone (classes were not looked at)"
        )
        words.append(
            f"Good enough{alone}"
            + (f"; a buffer of {_size(enough)} would do." if enough is not None and less else ".")
        )
    else:
        words.append(f"Not good enough: {'; '.join(_faults(what))}.")
        if what.packed_at_random and now.shuffle and now.evens_classes:
            words.append(
                "As the shards were packed in random order, neighbours have nothing in common, and this does little harm."
            )
        if enough is not None and now.shuffle:
            words.append(f"A buffer of {_size(enough)} would do: --shuffle-buffer {enough.buffer}.")
        elif enough is not None:
            words.append(f"Leave --no-shuffle away; a buffer of {_size(enough)} would do.")
        elif not lie_together:
            words.append("No buffer that was tried is good enough.")
    if (
        lie_together
        and parted is not None
        and (enough is None or enough.held_bytes > 2 * parted.held_bytes)
    ):
        alone = ", and no buffer mixes that well" if enough is None else ""
        words.append(
            f"Samples of a class lie together on disk{alone}. Pack them again in random order: {_PACK}"
        )
        words.append(f"- then a buffer of {_size(parted)} would do.")
    return " ".join(words)


def body(what: Prospect) -> str:
    """All of it as HTML, with figures."""
    sizes = [mix for mix in what.sizes if mix.shuffle]
    across = "samples of the shuffle buffer, as powers of two"
    at = [math.log2(mix.buffer) for mix in sizes]
    near = [
        (x, mix.neighbours) for x, mix in zip(at, sizes, strict=True) if mix.neighbours is not None
    ]
    even = [(x, mix.classes) for x, mix in zip(at, sizes, strict=True) if mix.classes is not None]
    cards = []
    if near:
        xs = [x for x, _ in near]
        series = [
            Line("this set", xs, [one.nearest for _, one in near], dots=True),
            Line("good enough", xs, [most_neighbours(one.nearest_ideal) for _, one in near]),
            Line("ideal", xs, [one.nearest_ideal for _, one in near]),
        ]
        cards.append(
            (
                f"Of the {NEAREST} nearest on disk, in the same batch",
                charts.lines(series, across=across, log=True),
            )
        )
    if even:
        xs = [x for x, _ in even]
        series = [
            Line("this set", xs, [max(one.design_effect, 1e-3) for _, one in even], dots=True),
            Line("good enough", xs, [GOOD_EFFECT] * len(xs)),
        ]
        cards.append(
            (
                f"Design effect of {what.label}: variance of class shares over the ideal",
                charts.lines(series, across=across, log=True),
            )
        )
    cards.append(
        (
            "Held on a rank, MB",
            charts.lines(
                [Line("on average", at, [mix.held_bytes / 1e6 for mix in sizes], dots=True)],
                across=across,
            ),
        )
    )
    some = f" (the first {_ROWS})" if len(what.ranks) > _ROWS else ""
    cards.append(
        (
            f"MB read by each rank{some}",
            charts.bars({str(one.rank): round(one.bytes / 1e6, 1) for one in what.ranks[:_ROWS]}),
        )
    )
    text = [
        ("Epoch", summary(what)),
        ("Shuffle", quality(what)),
        ("Ranks", ranks(what)),
        ("Buffers", plot(what)),
    ]
    figures = "".join(
        f'<div class="card"><h2>{escape(name)}</h2>{drawn}</div>' for name, drawn in cards
    )
    told = "".join(
        f'<div class="card"><h2>{escape(name)}</h2><pre>{escape(chr(10).join(rows))}</pre></div>'
        for name, rows in text
    )
    return f'<p><b>{escape(verdict(what))}</b></p><div class="cards">{figures}</div>{told}'


def part(what: Prospect) -> str:
    """A part of a notebook."""
    return charts.fragment("what an epoch would do", body(what))


def page(what: Prospect) -> str:
    """A page in one file."""
    return charts.page("what an epoch would do", f"<h1>What an epoch would do</h1>{body(what)}")


# --- parts -----------------------------------------------------------------------------------------------------------


def _rank_row(name: str, rank: RankShare, far: bool) -> tuple[str, ...]:
    sizes = (rank.first_batch_bytes, rank.held_bytes_mean, rank.held_bytes_most)
    counts = (
        rank.shards,
        rank.opened_in_the_middle,
        rank.reads,
        rank.requests if far else rank.seeks,
    )
    return (name, str(rank.samples), _mb(rank.bytes), *map(str, counts), *map(_mb, sizes))


def _sum_row(what: Prospect) -> tuple[str, ...]:
    def total(name: str) -> int:
        return sum(getattr(rank, name) for rank in what.ranks)

    moves = "requests" if what.on_a_server else "seeks"
    counts = [str(total(name)) for name in ("opened_in_the_middle", "reads", moves)]
    means = (
        fmean(rank.held_bytes_mean for rank in what.ranks) * len(what.ranks),
        total("held_bytes_most"),
    )
    return (
        "all",
        str(total("samples")),
        _mb(total("bytes")),
        "",
        *counts,
        _mb(total("first_batch_bytes")),
        *map(_mb, means),
    )


def _faults(what: Prospect) -> list[str]:
    """What is wrong with the order."""
    near, classes, found = what.now.neighbours, what.now.classes, []
    if near is not None and not what.now.parts_neighbours:
        found.append(
            f"of the {NEAREST} samples nearest on disk {near.nearest:.2g} share a batch, ideally {near.nearest_ideal:.2g}"
        )
    if classes is not None and not what.now.evens_classes:
        size = what.batch_size * what.world_size
        found.append(
            f"batches of {size} are as uneven in their classes as ideal ones of {max(1, round(size / classes.design_effect))}"
        )
    return found


def _bar(value: float, most: float, bar: str) -> str:
    """As long as the logarithm: none at a hundredth, whole at `most`."""
    share = math.log(max(value, 0.01) / 0.01) / math.log(max(most, 1) / 0.01)
    return bar * round(_BAR * min(1.0, share))


def _size(mix: Mix) -> str:
    return f"{mix.buffer} samples ({_mb(mix.held_bytes)} MB held on a rank)"


def _mb(size: float) -> str:
    return (
        f"{size / 1e6:.0f}"
        if size >= 1e8
        else f"{size / 1e6:.1f}"
        if size >= 1e5
        else f"{size / 1e6:.3f}"
    )


def _named(rows: list[tuple[str, str]]) -> list[str]:
    """Names and texts beside them."""
    return [
        f"{name if not i else '':<13} {part}"
        for name, text in rows
        for i, part in enumerate(_folded(text, 66))
    ]


def _folded(text: str, width: int = 80) -> list[str]:
    """A paragraph in lines."""
    found = [""]
    for word in text.split():
        if found[-1] and len(found[-1]) + 1 + len(word) > width:
            found.append("")
        found[-1] = f"{found[-1]} {word}".strip()
    return found
