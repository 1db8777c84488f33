"""`Info`, the result of `wt.info`: plain values, and their text for a terminal and a notebook."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from html import escape
from typing import Any

from wdstrain.inspection.info.contents import Content, Range
from wdstrain.inspection.info.statistics import ColumnSummary, plural
from wdstrain.report import pages
from wdstrain.runtime.options import format_size
from wdstrain.shards.kinds import ColumnInfo

FIELD_HEAD = ("field", "samples", "smallest", "median", "99 %", "largest", "total")
_DEFAULTS = {
    "seed": 0,
    "shuffle": True,
    "check": "magic",
    "max_shard_size": 256_000_000,
    "on_error": "raise",
}  # options of a conversion that are not reported
_SOURCE_KEYS = (
    "name",
    "classes",
    "image",
    "labels",
    "group_by",
    "split_by",
    "fields",
    "select",
    "where",
    "splits",
)  # of the source of a conversion, if it has them


@dataclass(frozen=True)
class Sizes:
    """Sizes of the values of a field, in bytes. total: of all values."""

    smallest: int
    median: int
    percentile_99: int
    largest: int
    total: int


@dataclass(frozen=True)
class FieldSummary:
    """A field: the number of samples that have it, the sizes of its values, and what they are."""

    name: str
    samples: int
    sizes: Sizes
    content: Content

    def text(self) -> str:
        """Return the description of the values, with the dimensions of images."""
        images = self.content.images
        if images is None:
            return self.content.what
        if images.width is None or images.height is None:
            return f"{self.content.what}; none can be read: {images.reason}"
        width, height = images.width, images.height
        sides = f"{width.median} x {height.median}"
        if width.smallest < width.largest or height.smallest < height.largest:
            sides = (
                f"{width.smallest}-{width.largest} x {height.smallest}-{height.largest} pixels, "
                f"median {sides}"
            )
        total = sum(images.modes.values())
        modes = [
            name if len(images.modes) == 1 else f"{name} {count / total:.0%}"
            for name, count in images.modes.items()
        ]
        parts = [self.content.what, sides, ", ".join(modes)]
        parts += [f"{images.rotated:.0%} rotated by EXIF"] * (images.rotated > 0)
        if images.unreadable:
            parts.append(f"{images.unreadable} unreadable ({images.reason})")
        return f"{'; '.join(parts)}; by {plural(images.looked_at, 'header')}"


@dataclass(frozen=True)
class Excerpt:
    """Basis of an estimate: shards, samples, requests to servers, bytes read."""

    shards: int
    samples: int
    requests: int
    bytes: int


@dataclass(frozen=True)
class Info:
    """Contents of some shards. Prints as text, renders in a notebook; `as_dict()` is JSON-able.

    exact: samples and sizes were counted. Otherwise samples, splits, overhead, per_shard and the
    counts and totals of fields are estimated from `excerpt`.
    bytes: of all shards. overhead: bytes of headers and padding. per_shard: samples per shard.
    split_shards: shards of each split. made: how the set was made, in words; info: the same as the
    index has it. ignored: members that belong to no sample, by reason. keys: the first keys.
    contents: each field. columns: statistics of labels, then of other columns.
    disagreements: labels that cannot be joined, because they differ between the sets, by field.
    findings: what is wrong with shards that are left out.
    """

    samples: int
    shards: int
    bytes: int
    splits: dict[str, int]
    fields: tuple[str, ...]
    labels: tuple[ColumnInfo, ...]
    info: dict[str, Any]
    exact: bool
    overhead: int
    per_shard: Range | None
    split_shards: dict[str, int]
    made: tuple[str, ...]
    ignored: dict[str, int]
    keys: tuple[str, ...]
    contents: tuple[FieldSummary, ...]
    columns: tuple[ColumnSummary, ...]
    excerpt: Excerpt | None = None
    disagreements: dict[str, str] = field(default_factory=dict)
    findings: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong with the shards."""
        return not self.findings

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON-able values."""
        labels = [label.row for label in self.labels]
        return {**_plain(asdict(self)), "labels": labels, "ok": self.ok}

    def __repr__(self) -> str:
        lines = [f"{name}: {value}" for name, value in self.summary()]
        lines += [f"field {part.name}: {part.text()}" for part in self.contents]
        lines += [f"column {part.name}: {part.line()}" for part in self.columns]
        return "\n".join(lines + [f"finding: {finding}" for finding in self.findings])

    def _repr_html_(self) -> str:
        parts = [pages.table(dict(self.summary())), pages.grid(FIELD_HEAD, self.field_rows())]
        parts.append(pages.table({part.name: part.text() for part in self.contents}))
        for column in self.charted():
            notes = escape("; ".join(column.notes()))
            parts.append(f"<p><b>{escape(column.name)}</b> {notes}</p>")
            parts += [pages.table(dict(column.facts())), pages.bars(column.bars())]
        if others := self.other_columns():
            parts.append(pages.grid(("column", "kind", "missing", "values"), others))
        parts += [f'<p class="wrong">{escape(finding)}</p>' for finding in self.findings]
        return pages.fragment("contents of the shards", "".join(parts))

    # --- rows of tables ---------------------------------------------------------------------------

    def summary(self) -> list[tuple[str, str]]:
        """Return (name, value) pairs about the set as a whole."""
        about = "" if self.exact else "about "
        rows = [
            ("samples", f"{about}{self._count(self.samples)}"),
            ("shards", f"{self.shards}{self._samples_per_shard()}"),
            ("size", format_size(self.bytes)),
        ]
        if self.samples:
            share = self.overhead / max(1, self.bytes)
            each = self.overhead // self.samples
            rows.append(("headers, padding", f"{about}{share:.1%}, {each} bytes per sample"))
        if any(self.splits):
            splits = (
                f"{name or 'without a split'} {count} ({plural(self.split_shards[name], 'shard')})"
                for name, count in self.splits.items()
            )
            rows.append(("splits", ", ".join(splits)))
        rows.append(("fields", ", ".join(self.fields)))
        rows += [(f"label {label.name}", label.summary) for label in self.labels]
        for place, reason in self.disagreements.items():
            rows.append((f"label {place}", f"{reason}. For its classes, look at each set alone"))
        rows += [("made", text) for text in self.made]
        if self.ignored:
            ignored = (f"{count} x {reason}" for reason, count in self.ignored.items())
            rows.append(("ignored members", ", ".join(ignored)))
        if self.keys:
            rows.append(("first keys", ", ".join(self.keys)))
        if self.excerpt is not None and not self.exact:
            excerpt = self.excerpt
            requests = f", {plural(excerpt.requests, 'request')}" if excerpt.requests else ""
            rows.append(
                (
                    "estimated from",
                    f"{plural(excerpt.samples, 'sample')} at the beginning of "
                    f"{plural(excerpt.shards, 'shard')}, {format_size(excerpt.bytes)}{requests}. "
                    f"To count all: --exact",
                )
            )
        return rows

    def field_rows(self) -> list[list[str]]:
        """Return the rows of a table of fields, under FIELD_HEAD."""
        about, rows = "" if self.exact else "~", []
        for part in self.contents:
            sizes = part.sizes
            each = (sizes.smallest, sizes.median, sizes.percentile_99, sizes.largest)
            samples, total = self._count(part.samples), format_size(sizes.total)
            row = [part.name, f"{about}{samples}", *map(format_size, each), f"{about}{total}"]
            rows.append(row)
        return rows

    def charted(self) -> list[ColumnSummary]:
        """Return the columns that are shown as bar charts: labels."""
        return [column for column in self.columns if column.is_label]

    def other_columns(self) -> list[list[str]]:
        """Return the rows of a table of the other columns: name, kind, missing, values."""
        return [
            [column.name, column.kind, str(column.missing), column.line()]
            for column in self.columns
            if not column.is_label
        ]

    def _samples_per_shard(self) -> str:
        if self.per_shard is None or self.shards < 2:
            return ""
        low, median, high = map(round, self.per_shard)
        about = "" if self.exact else "about "
        if low == high:
            return f", {about}{low} samples each"
        middle = f", median {median}" if self.shards > 2 else ""
        return f", {about}{low} to {high} samples each{middle}"

    def _count(self, count: int) -> int:
        """Return a count with no more digits than an estimate has."""
        return count if self.exact else int(float(f"{count:.3g}"))


# --- how a set was made ---------------------------------------------------------------------------


def provenance_text(info: Mapping[str, Any]) -> str:
    """Return the provenance in an index as text: source, changed options, counts."""
    source, options = _mapping(info.get("source")), _mapping(info.get("options"))
    if not source:
        return "by another program, its index does not say how"
    changed = {
        name: value
        for name, value in options.items()
        if value != _DEFAULTS.get(name) and value not in (None, False)
    }
    about = _pairs(source, _SOURCE_KEYS)
    parts = [f"from {source.get('kind')}{f' ({about})' if about else ''}"]
    parts += [f"with {_pairs(changed, tuple(changed))}"] * bool(changed)
    parts += ["not shuffled"] * (options.get("shuffle") is False)
    if isinstance(info.get("listed"), int):
        counts = [f"{info[name]} {name}" for name in ("skipped", "renamed") if info.get(name)]
        parts.append(", ".join([f"{plural(info['listed'], 'sample')} listed", *counts]))
    if info.get("made") == "scanned from headers":
        parts.append("index made again from the headers")
    return "; ".join(parts)


def ignored_members(info: Mapping[str, Any]) -> dict[str, int]:
    """Return the number of members that belong to no sample, by reason, as an index says."""
    ignored = _mapping(info.get("ignored"))
    return {str(reason): count for reason, count in ignored.items() if isinstance(count, int)}


def _pairs(values: Mapping[str, Any], names: tuple[str, ...]) -> str:
    """Return these values as text: "name value, ..."; empty values are left out."""
    return ", ".join(f"{name} {_value_text(values[name])}" for name in names if values.get(name))


def _value_text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ",".join(f"{name}={item}" for name, item in value.items())
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
