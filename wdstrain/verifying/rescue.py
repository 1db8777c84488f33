"""Which samples of a damaged shard are whole, and what of it is lost.

Where an index has checksums, a sample is whole when its members' bytes have them, whatever became of the headers: at the place
that the index says, where the walk came by it, or as far off as its neighbours are. Else the headers decide: all samples are
taken but those beside a damage, which are taken if they have the fields that most have. A flipped byte within a field is then
not seen; who has no checksums can have pictures decoded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from wdstrain.loader.stats import Finding
from wdstrain.shards.index import Index
from wdstrain.shards.offsets import Offsets
from wdstrain.verifying.census import plain
from wdstrain.verifying.inspection import key_of, returning
from wdstrain.verifying.passage import Passage
from wdstrain.verifying.survey import Survey, crcs_at, survey

_SHIFTS = 8  # distances that lost samples are looked for at


class Whole(NamedTuple):
    """A sample to copy. members: (field, offset, size, crc32). doubtful: its last member may hold the next one's header."""

    key: str
    start: int
    members: list[tuple[str, int, int, int]]
    doubtful: bool = False


@dataclass
class Rescue:
    """What is whole in one shard, in order; lost: samples that are not; gaps: what else is lost, where no index knows."""

    whole: Iterator[Whole]
    count: int
    lost: list[Finding] = field(default_factory=list)
    gaps: list[Finding] = field(default_factory=list)


def rescue(passage: Passage, promised: Index | None) -> Rescue:
    """Pass over a shard and say what can be saved of it. Raises StorageError or ShardError where it cannot be read."""
    found = survey(passage)
    table = found.offsets()
    if promised is not None and len(promised.offsets.member_crc):
        return _by_checksums(found, table, promised, passage)
    return _by_headers(found, table, promised, passage.shown)


def _by_checksums(found: Survey, table: Offsets, promised: Index, passage: Passage) -> Rescue:
    theirs, shown = promised.offsets, passage.shown
    crcs, offsets = crcs_at(theirs, table, passage), theirs.member_offset.copy()
    bad = np.flatnonzero(crcs != theirs.member_crc)
    hit = np.unique(np.searchsorted(theirs.member_first, bad, side="right") - 1)
    lost = set(hit.tolist())
    shifts: Counter[int] = Counter()
    mine = _places(found, table, {promised.key(i) for i in lost}) if lost else {}
    for i in sorted(lost):
        rows = range(*theirs.member_first[i : i + 2].tolist())
        there = (
            {name: rest for name, *rest in _members(found, table, mine[key])}
            if (key := promised.key(i)) in mine
            else {}
        )
        wanted = [[int(theirs.member_size[row]), int(theirs.member_crc[row])] for row in rows]
        names = [name for name, _, _ in promised.members(i)]
        if [there[name][1:] if name in there else None for name in names] == wanted:
            moved = [there[name][0] for name in names]
            shifts[moved[0] - int(offsets[rows[0]])] += 1
            offsets[rows.start : rows.stop] = moved
            lost.discard(i)
    for i in sorted(lost):
        rows = range(*theirs.member_first[i : i + 2].tolist())
        for shift, _ in shifts.most_common(_SHIFTS):
            if all(_lies(passage, theirs, row, shift) for row in rows):
                offsets[rows.start : rows.stop] += shift
                lost.discard(i)
                break
    findings = [_lost(promised, crcs.tolist(), i, shown) for i in sorted(lost)]

    def whole() -> Iterator[Whole]:
        for i in range(len(promised)):
            if i not in lost:
                rows = range(*theirs.member_first[i : i + 2].tolist())
                names = [promised.fields[theirs.member_field[row]] for row in rows]
                members = [
                    (
                        name,
                        int(offsets[row]),
                        int(theirs.member_size[row]),
                        int(theirs.member_crc[row]),
                    )
                    for name, row in zip(names, rows, strict=True)
                ]
                yield Whole(promised.key(i), int(theirs.start[i]), members)

    return Rescue(
        whole(), len(promised) - len(lost), findings, _unlisted(found, table, promised, shown)
    )


def _by_headers(found: Survey, table: Offsets, promised: Index | None, shown: str) -> Rescue:
    again: dict[int, list[int]] = {}  # the first place of a key -> its others
    for place, first in returning(found, table):
        again.setdefault(first, []).append(place)
    others = {place for places in again.values() for place in places}
    twice = {place for place, _, _ in found.twice}
    result = Rescue(iter(()), 0)
    taken: list[Whole] = []
    for place in range(len(found)):
        key, start = key_of(table, place), int(table.start[place])
        if place in others:
            continue
        if twice & {place, *again.get(place, [])}:
            result.lost.append(Finding(shown, key, "", start, "two of its members have one name"))
            continue
        members, doubtful = _members(found, table, place), place in found.doubtful
        for more in again.get(place, []):
            rest = _members(found, table, more)
            if {name for name, *_ in members} & {name for name, *_ in rest}:
                why = f"its key came before, at offset {start}"
                result.lost.append(Finding(shown, key, "", int(table.start[more]), why))
                continue
            members, doubtful = members + rest, doubtful or more in found.doubtful
        taken.append(Whole(key, start, members, doubtful))
    known = _known(promised, taken) if found.damages else {}
    usual = Counter(_kind(one) for one in taken).most_common(1)[0][0] if taken else frozenset()
    sound = []
    for one in taken:
        wanted = known.pop(one.key, None)
        if (
            wanted is not None
            and sorted((name, size) for name, _, size, _ in one.members) != wanted[1]
        ):
            result.lost.append(
                Finding(
                    shown, one.key, "", one.start, "its fields are not those that its index says"
                )
            )
        elif wanted is None and one.doubtful and _kind(one) != usual:
            lacks = " and ".join(sorted(usual - _kind(one)))
            why = (
                f"lacks what the others have: {lacks}"
                if lacks
                else "has other fields than the others"
            )
            result.lost.append(
                Finding(shown, one.key, "", one.start, f"it lies beside a damage and {why}")
            )
        else:
            sound.append(one)
    unseen = "its headers are damaged, and its index has no checksums to know its bytes by"
    result.lost += [Finding(shown, key, "", start, unseen) for key, (start, _) in known.items()]
    if promised is None or not _known(promised, taken):
        result.gaps = [
            Finding(
                shown,
                "",
                "",
                one.start,
                one.reason
                + (
                    f"; bytes {one.start} to {one.stop} hold no sample"
                    if one.stop > one.start
                    else ""
                ),
            )
            for one in found.damages
        ]
    result.whole, result.count = iter(sound), len(sound)
    return result


# --- parts -----------------------------------------------------------------------------------------------------------


def _members(found: Survey, table: Offsets, place: int) -> list[tuple[str, int, int, int]]:
    """(field, offset, size, crc32) of the members that the walk came by."""
    rows = range(*table.member_first[place : place + 2].tolist())
    return [
        (
            found.fields[table.member_field[m]],
            int(table.member_offset[m]),
            int(table.member_size[m]),
            int(table.member_crc[m]),
        )
        for m in rows
    ]


def _places(found: Survey, table: Offsets, keys: set[str]) -> dict[str, int]:
    """Where in a survey these keys are, the first of each."""
    places: dict[str, int] = {}
    for place in range(len(found)):
        if (key := key_of(table, place)) in keys:
            places.setdefault(key, place)
    return places


def _lies(passage: Passage, theirs: Offsets, row: int, shift: int) -> bool:
    """Whether the bytes of a member lie so far from where an index says that they do."""
    offset, size = int(theirs.member_offset[row]) + shift, int(theirs.member_size[row])
    return (
        0 <= offset <= passage.size - size and passage.again(offset, size) == theirs.member_crc[row]
    )


def _lost(promised: Index, crcs: list[int], i: int, shown: str) -> Finding:
    """What is said of a sample by the first of its members that is not as it was packed."""
    first = int(promised.offsets.member_first[i])
    for row, (name, offset, size) in enumerate(promised.members(i), first):
        if crcs[row] != promised.offsets.member_crc[row]:
            gone = f"the shard has ended before byte {offset + size}, where it should"
            why = gone if crcs[row] < 0 else "the bytes are not those that were packed"
            return Finding(shown, promised.key(i), name, offset, why)
    raise AssertionError(f"sample {i} is whole")


def _unlisted(found: Survey, table: Offsets, promised: Index, shown: str) -> list[Finding]:
    """Samples that an index does not know, as where a shard was replaced and its index was not made anew."""
    strange = np.flatnonzero(~np.isin(table.start, promised.offsets.start)).tolist()
    if not strange:
        return []
    keys = set(promised.keys(np.arange(len(promised))))
    unknown = [place for place in strange if key_of(table, place) not in keys]
    if not unknown:
        return []
    where = f"the first '{key_of(table, unknown[0])}' at offset {table.start[unknown[0]]}"
    reason = f"holds {len(unknown)} samples that its index does not list, {where}; they are not copied. Run: wdstrain index on it first"
    return [Finding(shown, "", "", int(table.start[unknown[0]]), reason)]


def _known(
    promised: Index | None, taken: list[Whole]
) -> dict[str, tuple[int, list[tuple[str, int]]]]:
    """(start, fields with sizes) by key, as an index without checksums says; nothing if it does not know all that is there."""
    if promised is None:
        return {}
    known = {
        promised.key(i): (
            int(promised.offsets.start[i]),
            sorted((name, size) for name, _, size in promised.members(i)),
        )
        for i in range(len(promised))
    }
    return known if all(one.key in known for one in taken) else {}


def _kind(one: Whole) -> frozenset[str]:
    return frozenset([plain(name) for name, *_ in one.members])
