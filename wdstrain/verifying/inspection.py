"""One shard against what its index promises, and against what a sound tar is: findings, each with its place.

Damage is told where it lies, and by the samples that it hit where the index has checksums. A shard that is full of one fault is
told of by its first thousand findings and a count of the rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from wdstrain.decode.image_formats import EXTENSIONS
from wdstrain.loader.stats import Finding
from wdstrain.shards.columns import Column, ColumnBuilder, as_label, join_columns
from wdstrain.shards.index import Index
from wdstrain.shards.offsets import Ints, Offsets
from wdstrain.verifying.passage import Passage
from wdstrain.verifying.survey import Survey, crcs_at, survey
from wdstrain.verifying.trial import NOT_FINITE, Readers, Trials

_MOST = 1000  # findings of one shard that are told one by one
_EMPTY = "it has 0 bytes"
_COMPARED = (
    "start",
    "stop",
    "keys",
    "member_first",
    "member_field",
    "member_offset",
    "member_size",
)


@dataclass
class Inspection:
    """A shard that was looked at. found: None where it could not be read to its end."""

    path: str
    shown: str
    findings: list[Finding] = field(default_factory=list)
    found: Survey | None = None
    starts: Ints = field(default_factory=lambda: np.zeros(0, np.int64))  # of its samples
    compared: bool = False  # its bytes, with checksums of an index
    left_out: int = 0  # findings that were counted only
    columns: Counter[str] = field(default_factory=Counter)  # samples of each that were compared

    def add(self, key: str, name: str, offset: int, reason: str) -> None:
        if len(self.findings) < _MOST:
            self.findings.append(Finding(self.shown, key, name, offset, reason))
        else:
            self.left_out += 1

    def close(self) -> None:
        """Say how many findings were left out, if any were."""
        if self.left_out:
            reason = f"has {self.left_out} more findings; the first {len(self.findings)} are told one by one"
            self.findings.append(Finding(self.shown, "", "", 0, reason))
            self.left_out = 0


def inspect(
    passage: Passage, promised: Index | None, path: str, trials: Trials | None
) -> Inspection:
    """Pass over a shard once and compare it. Raises StorageError or ShardError where it cannot be read to its end."""
    done = Inspection(path, passage.shown)
    labels = promised.labels if promised is not None else ()
    columns = ColumnBuilder([one.place for one in promised.columns] if promised is not None else [])
    found = done.found = survey(
        passage,
        Readers(labels, is_finite=True) if trials is not None else None,
        trials,
        columns=columns,
    )
    table = found.offsets()
    done.starts = table.start
    if promised is not None and passage.size != promised.shards[0].bytes:
        done.add("", "", 0, f"has {passage.size} bytes, its index says {promised.shards[0].bytes}")
    for damage in found.damages:
        nothing = (
            f"; bytes {damage.start} to {damage.stop} hold no sample"
            if damage.stop > damage.start
            else ""
        )
        done.add("", "", damage.start, damage.reason + nothing)
    _grouping(done, found, table)
    _empty(done, found, table, {label.field for label in labels} | {"cls"})
    if promised is not None:
        _compare(done, found, table, promised, passage)
        _compare_columns(done, found, promised, columns)
    empty = {one.offset for one in done.findings if one.reason == _EMPTY}
    misfits = trials.misfits if trials is not None else []
    alike = Counter(reason for _, _, _, reason in misfits if reason.endswith(NOT_FINITE))
    for key, name, offset, reason in misfits:
        if offset in empty:  # it was told as such
            continue
        if count := alike.pop(reason, 0):  # the first of this shard tells of all
            more = f"; so is that of {count - 1} more in this shard" if count > 1 else ""
            done.add(key, name, offset, f"{reason}, and cannot be learnt{more}")
        elif not reason.endswith(NOT_FINITE):
            done.add(key, name, offset, reason)
    done.close()
    return done


def key_of(table: Offsets, place: int) -> str:
    """The key of a sample."""
    first, stop = table.key_first[place : place + 2]
    return table.keys[first:stop].tobytes().decode("utf-8", "surrogateescape")


def returning(found: Survey, table: Offsets) -> list[tuple[int, int]]:
    """(place, place of the first) of each sample whose key was there before in its shard."""
    names = found.names
    order = np.argsort(names, kind="stable")
    again = np.flatnonzero(names[order][1:] == names[order][:-1]) + 1
    firsts: dict[str, int] = {}
    twice = []
    for at in again.tolist():
        before, place = int(order[at - 1]), int(order[at])
        key = key_of(table, place)
        if key_of(table, before) == key:  # and not its hash alone
            twice.append((place, firsts.setdefault(key, before)))
    return sorted(twice)


def _grouping(done: Inspection, found: Survey, table: Offsets) -> None:
    for place, name, offset in found.twice:
        done.add(
            key_of(table, place),
            name,
            offset,
            "it is the second member of this name. Repack the shard",
        )
    for place, first in returning(found, table):
        where = f"its members lie in two places, the first at offset {table.start[first]}; the fields of a sample must be adjacent"
        done.add(key_of(table, place), "", int(table.start[place]), where)


def _empty(done: Inspection, found: Survey, table: Offsets, labels: set[str]) -> None:
    """Pictures and labels of 0 bytes."""
    rows = np.flatnonzero(table.member_size == 0)
    for row, place in zip(
        rows.tolist(),
        (np.searchsorted(table.member_first, rows, side="right") - 1).tolist(),
        strict=True,
    ):
        name = found.fields[table.member_field[row]]
        if name in labels or name.rpartition(".")[2] in EXTENSIONS:
            done.add(key_of(table, place), name, int(table.member_offset[row]), _EMPTY)


def _compare(
    done: Inspection, found: Survey, table: Offsets, promised: Index, passage: Passage
) -> None:
    """The samples, and the bytes of the shard, then of its members, with those that the index says."""
    mine, theirs = promised.shards[0].sha256, promised.offsets
    done.compared = bool(mine) or len(theirs.member_crc) > 0
    changed = not mine or mine != found.sha256
    clean, before = not found.damages, len(done.findings)
    if changed and len(theirs.member_crc):
        crcs = crcs_at(theirs, table, passage)
        for row in np.flatnonzero(crcs != theirs.member_crc).tolist():
            place = int(np.searchsorted(theirs.member_first, row, side="right")) - 1
            name, offset, size = promised.members(place)[row - int(theirs.member_first[place])]
            gone = f"the shard has ended before byte {offset + size}, where it should"
            why = gone if crcs[row] < 0 else "the bytes are not those that were packed"
            done.add(promised.key(place), name, offset, why)
    fields = {name: number for number, name in enumerate(promised.fields)}
    numbers = np.array([fields.get(name, -1) for name in found.fields] or [0], np.int64)
    same = {
        name: np.array_equal(getattr(table, name), getattr(theirs, name))
        for name in _COMPARED
        if name != "member_field"
    }
    same["member_field"] = np.array_equal(numbers[table.member_field], theirs.member_field)
    differing = [name for name in _COMPARED if not same[name]]
    if clean and differing:
        others = f"holds other samples than its index says ({', '.join(differing)}). Run: wdstrain index on it"
        done.add("", "", 0, others)
    elif clean and mine and changed and len(done.findings) == before:
        said = ", though every field is as packed" if len(theirs.member_crc) else ""
        done.add("", "", 0, f"has another sha256 than its index says{said}")


def _compare_columns(
    done: Inspection, found: Survey, promised: Index, builder: ColumnBuilder
) -> None:
    """Compare the labels and scalars that the index has with those in the bytes of the shard."""
    damaged = {(one.key, one.field) for one in done.findings}
    offsets: list[dict[str, int]] = []  # of each sample, where its fields with values lie
    for number in range(len(promised)):
        members = promised.members(number)
        offsets.append({name: at for name, at, _ in members if at in found.values})
        builder.add_values(pair for at in offsets[-1].values() for pair in found.values[at])
    by_place = {column.place: column for column in builder.finish()}
    for column in promised.columns:
        stored = by_place[column.place]
        if column.kind in ("class", "number", "multi"):
            stored = as_label(stored, column.name, column.kind, column.classes)
        name = column.field if column.entry is None else f"{column.field}.{column.entry}"
        done.columns[name] = sum(column.field in fields for fields in offsets)
        for number, indexed, value in _differences(column, stored):
            key, offset = promised.key(number), offsets[number].get(column.field)
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
    for number, (one, other) in enumerate(zip(values[:count], values[count:], strict=True)):
        if one != other and not (one != one and other != other):  # NaN equals NaN here
            yield number, one, other


def _shown(value: Any) -> str:
    return "nothing" if value is None else repr(value)[:80]
