"""Compare one shard with its index and with the rules of the tar format.

Each finding has a place. With checksums in the index, damage is reported for each sample that it
hit. Of one shard at most 1000 findings are listed; the others are counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from wdstrain.decode.formats import is_image
from wdstrain.inspection.verify.decode_check import NOT_FINITE, DecodeCheck, FieldReaders
from wdstrain.inspection.verify.forward_reader import ForwardReader
from wdstrain.inspection.verify.scan import ShardScan, crcs_at, scan_shard
from wdstrain.loader.stats import Finding
from wdstrain.shards.columns import Column, ColumnBuilder, as_label, join_columns
from wdstrain.shards.index import Index
from wdstrain.shards.kinds import KINDS
from wdstrain.shards.offsets import Offsets

_MOST = 1000  # findings of one shard that are listed
_EMPTY = "it has 0 bytes"


@dataclass
class ShardCheck:
    """Result of checking a shard. scan: None if it could not be read to its end.

    table: keys and offsets of the samples. compared: the index has checksums. columns: samples
    whose value was compared with the index, by column. left_out: findings that are only counted.
    """

    path: str
    shown: str
    findings: list[Finding] = field(default_factory=list)
    scan: ShardScan | None = None
    table: Offsets = field(default_factory=lambda: Offsets.of([]))
    compared: bool = False
    left_out: int = 0
    columns: Counter[str] = field(default_factory=Counter)

    def add(self, key: str, name: str, offset: int, reason: str) -> None:
        if len(self.findings) < _MOST:
            self.findings.append(Finding(self.shown, key, name, offset, reason))
        else:
            self.left_out += 1

    def close(self) -> None:
        """Add a finding with the number of findings that are not listed."""
        if self.left_out:
            reason = (
                f"has {self.left_out} more findings than the {len(self.findings)} that are listed"
            )
            self.findings.append(Finding(self.shown, "", "", 0, reason))
            self.left_out = 0


def check_shard(
    reader: ForwardReader, expected: Index | None, path: str, decode_check: DecodeCheck | None
) -> ShardCheck:
    """Read a shard once and compare it. Raises StorageError or ShardError if it cannot be read."""
    done = ShardCheck(path, reader.shown)
    labels = expected.labels if expected is not None else ()
    columns = ColumnBuilder([one.place for one in expected.columns] if expected is not None else [])
    scan = done.scan = scan_shard(
        reader,
        FieldReaders(labels, is_finite=True) if decode_check is not None else None,
        decode_check,
        columns=columns,
    )
    table = scan.offsets()
    done.table = table
    if expected is not None and reader.size != expected.shards[0].bytes:
        done.add("", "", 0, f"has {reader.size} bytes, its index says {expected.shards[0].bytes}")
    for damage in scan.damages:
        nothing = (
            f"; bytes {damage.start} to {damage.stop} hold no sample"
            if damage.stop > damage.start
            else ""
        )
        done.add("", "", damage.start, damage.reason + nothing)
    _grouping(done, scan, table)
    _empty(done, table, {label.field for label in labels} | {"cls"})
    if expected is not None:
        _compare(done, scan, table, expected, reader)
        _compare_columns(done, scan, expected, columns)
    empty = {one.offset for one in done.findings if one.reason == _EMPTY}
    failures = decode_check.failures if decode_check is not None else []
    alike = Counter(reason for _, _, _, reason in failures if reason.endswith(NOT_FINITE))
    for key, name, offset, reason in failures:
        if offset in empty:  # reported as such
            continue
        if count := alike.pop(reason, 0):  # one finding for all of them
            more = f"; so is that of {count - 1} more in this shard" if count > 1 else ""
            done.add(key, name, offset, f"{reason}, and cannot be trained on{more}")
        elif not reason.endswith(NOT_FINITE):
            done.add(key, name, offset, reason)
    done.close()
    return done


def key_of(table: Offsets, place: int) -> str:
    """Return the key of a sample."""
    return table.keys_of(np.array([place]))[0]


def repeated_keys(scan: ShardScan, table: Offsets) -> list[tuple[int, int]]:
    """Return (number, number of the first) of each sample whose key came before in the shard."""
    names = scan.key_hashes
    order = np.argsort(names, kind="stable")
    again = np.flatnonzero(names[order][1:] == names[order][:-1]) + 1
    firsts: dict[str, int] = {}
    twice = []
    for at in again.tolist():
        before, place = int(order[at - 1]), int(order[at])
        key = key_of(table, place)
        if key_of(table, before) == key:  # not only equal hashes
            twice.append((place, firsts.setdefault(key, before)))
    return sorted(twice)


def _grouping(done: ShardCheck, scan: ShardScan, table: Offsets) -> None:
    for place, name, offset in scan.twice:
        done.add(
            key_of(table, place),
            name,
            offset,
            "it is the second member of this name. Pack the shard again",
        )
    for place, first in repeated_keys(scan, table):
        where = (
            f"its members are in two places, the first at offset {table.start[first]}; the fields "
            "of a sample must be adjacent"
        )
        done.add(key_of(table, place), "", int(table.start[place]), where)


def _empty(done: ShardCheck, table: Offsets, labels: set[str]) -> None:
    """Add images and labels of 0 bytes."""
    members = table.members
    for member in np.flatnonzero(members.size == 0).tolist():
        name = table.fields[members.field[member]]
        if name in labels or is_image(name):
            key = key_of(table, int(members.row[member]))
            done.add(key, name, int(members.offset[member]), _EMPTY)


def _compare(
    done: ShardCheck, scan: ShardScan, table: Offsets, expected: Index, reader: ForwardReader
) -> None:
    """Compare checksums and offsets with those in the index."""
    mine, listed = expected.shards[0].sha256, expected.offsets
    done.compared = bool(mine) or listed.has_checksums
    changed = not mine or mine != scan.sha256
    clean, before = not scan.damages, len(done.findings)
    if changed and listed.has_checksums:
        members, crcs = listed.members, crcs_at(listed.members, table.members, reader)
        for row in np.flatnonzero(crcs != members.crc).tolist():
            place, name = int(members.row[row]), listed.fields[members.field[row]]
            offset, size = int(members.offset[row]), int(members.size[row])
            gone = f"the shard has ended before byte {offset + size}, where it should"
            why = gone if crcs[row] < 0 else "the bytes are not those that were packed"
            done.add(expected.key(place), name, offset, why)
    differing = table.differences(listed)
    if clean and differing:
        others = (
            f"holds other samples than its index says ({', '.join(differing)}). "
            "Run: wdstrain index on it"
        )
        done.add("", "", 0, others)
    elif clean and mine and changed and len(done.findings) == before:
        note = ", though every field is as packed" if listed.has_checksums else ""
        done.add("", "", 0, f"has another sha256 than its index says{note}")


def _compare_columns(
    done: ShardCheck, scan: ShardScan, expected: Index, builder: ColumnBuilder
) -> None:
    """Compare the columns of the index with the values in the shard."""
    damaged = {(finding.key, finding.field) for finding in done.findings}
    offsets: list[dict[str, int]] = []  # of each sample, where its fields with values lie
    for number in range(len(expected)):
        members = expected.members(number)
        offsets.append({name: at for name, at, _ in members if at in scan.values})
        builder.add_values(pair for at in offsets[-1].values() for pair in scan.values[at])
    by_place = {column.place: column for column in builder.finish()}
    for column in expected.columns:
        stored = by_place[column.place]
        if KINDS[column.kind].can_be_label:
            stored = as_label(stored, column)
        elif column.kind == "text" and stored.kind in ("integer", "number"):
            # Other shards hold texts. A number may have several spellings, such as 2 and 2.0.
            column, stored = (as_label(c, replace(c, kind="number")) for c in (column, stored))
        name = column.stored_as
        done.columns[name] = sum(column.field in fields for fields in offsets)
        for number, indexed, value in _differences(column, stored):
            key, offset = expected.key(number), offsets[number].get(column.field)
            if offset is None or (key, column.field) in damaged:  # another finding names it
                continue
            reason = (
                f"the index has {_shown(indexed)} in its column {column.name}, the shard "
                f"{_shown(value)}. Run: wdstrain index FOLDER --columns {name}"
            )
            done.add(key, column.field, offset, reason)


def _differences(indexed: Column, stored: Column) -> Iterator[tuple[int, Any, Any]]:
    """Yield (number of the sample, value in the index, value in the shard) where they differ."""
    count = len(indexed)
    both = join_columns([(count, [indexed]), (count, [stored])])
    if both and both[0].kind == indexed.kind:
        values = both[0].values.to_pylist()
    else:  # values of other types
        values = [*indexed.values.to_pylist(), *stored.values.to_pylist()]
    for number, (left, other) in enumerate(zip(values[:count], values[count:], strict=True)):
        if left != other and not (left != left and other != other):  # NaN equals NaN here
            yield number, left, other


def _shown(value: Any) -> str:
    return "nothing" if value is None else repr(value)[:80]
