"""What is known of a set of shards, as `info` tells it: to a program (plain values), a terminal and a notebook."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from html import escape
from typing import Any

from wdstrain.inspecting.contents import Content
from wdstrain.inspecting.dimensions import Range
from wdstrain.inspecting.histograms import Histogram, notes, plural, shown, spread
from wdstrain.report import charts
from wdstrain.runtime.byte_sizes import format_size
from wdstrain.shards.index import Label


@dataclass(frozen=True)
class Sizes:
    """How large the values of a field are, in bytes. percentile_99: 99 of 100 are not larger. total: of all."""

    smallest: int
    median: int
    percentile_99: int
    largest: int
    total: int


@dataclass(frozen=True)
class FieldFacts:
    """A field: how many samples have it, how large its values are, and what they are."""

    name: str
    samples: int
    sizes: Sizes
    content: Content


@dataclass(frozen=True)
class Looked:
    """What an estimate rests on: shards that were looked into, samples found there, requests to servers, bytes that were read."""

    shards: int
    samples: int
    requests: int
    bytes: int


@dataclass(frozen=True)
class Info:
    """What is in some shards. Renders in a terminal and in a notebook; `as_dict` is plain values.

    exact: samples and sizes are counted; otherwise samples, splits, overhead, per_shard and the counts and totals of fields are
    estimated from what was `looked` at, and `error` is how far off, as a share, if the rest is like it (two standard deviations).
    bytes: of all shards; of those on servers at most 200 are asked for theirs, others are taken to be like them.
    overhead: bytes that are headers and padding. per_shard: samples of the smallest, the middle and the largest shard. made: how it was made, in words; info: the same
    as the index has it. disagreements: by field, labels that differ between the sets, or that only some have, so that they are not
    in `labels`. findings: what is wrong with shards that are left away, a sentence each.
    """

    samples: int
    shards: int
    bytes: int
    splits: dict[str, int]
    fields: tuple[str, ...]
    labels: tuple[Label, ...]
    info: dict[str, Any]
    exact: bool
    error: float
    overhead: int
    per_shard: Range | None
    split_shards: dict[str, int]
    made: tuple[str, ...]
    ignored: dict[str, int]
    keys: tuple[str, ...]
    contents: tuple[FieldFacts, ...]
    histograms: tuple[Histogram, ...]
    looked: Looked | None = None
    disagreements: dict[str, str] = field(default_factory=dict)
    findings: tuple[str, ...] = field(default=())

    @property
    def ok(self) -> bool:
        """Whether nothing was found wrong."""
        return not self.findings

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as JSON has them."""
        return {**_plain(asdict(self)), "ok": self.ok}

    def __repr__(self) -> str:
        lines = [f"{name}: {value}" for name, value in self.summary()]
        lines += [f"field {one.name}: {told(one)}" for one in self.contents]
        lines += [f"label {one.label}: {'; '.join(notes(one))}" for one in self.histograms]
        return "\n".join(lines + [f"finding: {one}" for one in self.findings])

    def _repr_html_(self) -> str:
        parts = [charts.table(dict(self.summary()))]
        parts.append(
            charts.grid(
                ["field", *SIZES], [[one.name, *self.sizes_of(one)] for one in self.contents]
            )
        )
        parts.append(
            charts.table({one.name: line for one in self.contents for line in [told(one)]})
        )
        for one in self.histograms:
            parts.append(f"<p><b>{escape(one.label)}</b> {escape('; '.join(notes(one)))}</p>")
            parts.append(
                charts.bars(shown(one)) if one.classes else charts.table(dict(spread(one)))
            )
        parts += [f'<p class="wrong">{escape(one)}</p>' for one in self.findings]
        return charts.fragment("what is in there", "".join(parts))

    # --- lines -------------------------------------------------------------------------------------------------------

    def summary(self) -> list[tuple[str, str]]:
        """Names and values of the set as a whole."""
        about = "" if self.exact else "about "
        rows = [
            ("samples", f"{about}{self._count(self.samples)}{self._error()}"),
            ("shards", str(self.shards)),
        ]
        if self.per_shard is not None and self.shards > 1:
            low, middle, high = map(round, self.per_shard)
            rows.append(
                (
                    "of a shard",
                    f"{about}{low} to {high} samples, half of them {middle} or fewer"
                    if low < high
                    else f"{about}{low} samples each",
                )
            )
        rows.append(("MB", f"{self.bytes / 1e6:.1f}"))
        if self.samples:
            share = self.overhead / max(1, self.bytes)
            rows.append(
                (
                    "of that",
                    f"{about}{format_size(self.overhead)} headers and padding ({share:.1%}), {self.overhead // self.samples} bytes a sample",
                )
            )
        if any(self.splits):
            splits = (
                f"{name or 'without a name'} {count} ({plural(self.split_shards[name], 'shard')})"
                for name, count in self.splits.items()
            )
            rows.append(("splits", ", ".join(splits)))
        rows.append(("fields", ", ".join(self.fields)))
        for label in self.labels:
            rows.append((f"label {label.name}", label_words(label)))
        for place, why in self.disagreements.items():
            rows.append((f"label {place}", f"{why}. For its classes look at each set alone"))
        rows += [("made", one) for one in self.made]
        if self.ignored:
            rows.append(
                (
                    "passed over",
                    ", ".join(f"{count} x {reason}" for reason, count in self.ignored.items()),
                )
            )
        if self.keys:
            rows.append(("first keys", ", ".join(self.keys)))
        if self.looked is not None and not self.exact:
            requests = (
                f", {plural(self.looked.requests, 'request')}" if self.looked.requests else ""
            )
            rows.append(
                (
                    "looked at",
                    f"{plural(self.looked.samples, 'sample')} at the beginning of {plural(self.looked.shards, 'shard')}, "
                    f"{format_size(self.looked.bytes)}{requests}; the rest is estimated, --exact counts",
                )
            )
        return rows

    def sizes_of(self, one: FieldFacts) -> list[str]:
        """The cells of a field: samples, and sizes as SIZES names them."""
        about, sizes = "" if self.exact else "~", one.sizes
        each = (sizes.smallest, sizes.median, sizes.percentile_99, sizes.largest)
        return [
            f"{about}{self._count(one.samples)}",
            *map(format_size, each),
            f"{about}{format_size(sizes.total)}",
        ]

    def _count(self, count: int) -> int:
        """A count, with no more digits than an estimate has."""
        return count if self.exact else int(float(f"{count:.3g}"))

    def _error(self) -> str:
        if self.exact or self.looked is None:
            return ""
        if not self.looked.samples:
            return " (no whole sample in what was looked at)"
        return (
            f" (within {max(1, round(100 * self.error))} %, if the rest is like what was looked at)"
        )


SIZES = ("samples", "smallest", "median", "99 %", "largest", "in all")


def label_words(label: Label) -> str:
    """What a label is."""
    if label.kind == "number":
        return "a number"
    some = ", ".join(label.classes[:10]) + (", ..." if len(label.classes) > 10 else "")
    return f"{'any of ' * (label.kind == 'multi')}{plural(len(label.classes), 'class')}: {some}"


def told(one: FieldFacts) -> str:
    """What a field is, with the dimensions of its pictures."""
    found = one.content.images
    if found is None or found.width is None or found.height is None or found.megapixels is None:
        reason = f"; none can be read: {found.reason}" if found is not None else ""
        return one.content.what + reason
    width, height, pixels = found.width, found.height, found.megapixels
    if width.smallest == width.largest and height.smallest == height.largest:
        sides = f"{width.median} x {height.median}"
    else:
        sides = (
            f"{width.smallest}-{width.largest} x {height.smallest}-{height.largest}, median {width.median} x {height.median}, "
            f"{pixels.median:.2g} megapixels"
        )
    parts = [
        one.content.what,
        sides,
        ", ".join(_share(name, count, found.modes) for name, count in found.modes.items()),
    ]
    parts += [f"{found.turned:.0%} turned by EXIF"] * (found.turned > 0)
    parts += [f"{found.unreadable} unreadable ({found.reason})"] * (found.unreadable > 0)
    return f"{'; '.join(parts)}; of {found.looked_at} looked at"


# --- parts -----------------------------------------------------------------------------------------------------------


def _share(name: str, count: int, counts: Mapping[str, int]) -> str:
    return name if len(counts) == 1 else f"{name} {count / sum(counts.values()):.0%}"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, (list, tuple)) else value
