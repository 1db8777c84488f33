"""Intact and lost samples of a damaged shard.

With checksums in the index, a sample is intact if its bytes match them: at the offset in the index,
where the scan found it, or shifted like its neighbors. Without, the headers decide: all samples are
taken; those next to damage only if they have the fields that most samples have. Changed bytes
within a field are then not noticed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from wdstrain.inspection.verify.cross_shard import field_kind
from wdstrain.inspection.verify.damaged_tar import Damage
from wdstrain.inspection.verify.forward_reader import ForwardReader
from wdstrain.inspection.verify.scan import ShardScan, crcs_at, scan_shard
from wdstrain.inspection.verify.shard_check import key_of, repeated_keys
from wdstrain.loader.stats import Finding
from wdstrain.shards.index import Index
from wdstrain.shards.offsets import Offsets

_SHIFTS = 8  # distances at which lost samples are searched

Member = tuple[str, int, int, int]  # field, offset, size, crc32


class IntactSample(NamedTuple):
    """A sample to copy. members: (field, offset, size, crc32). is_suspect: it is next to damage."""

    key: str
    start: int
    members: list[Member]
    is_suspect: bool = False


@dataclass
class Recovery:
    """Intact samples of one shard, in order. lost: other samples; gaps: bytes without samples."""

    intact: Iterator[IntactSample]
    count: int
    lost: list[Finding] = field(default_factory=list)
    gaps: list[Finding] = field(default_factory=list)


def recover(reader: ForwardReader, expected: Index | None) -> Recovery:
    """Read a shard and return what is intact. Raises StorageError or ShardError."""
    scan = scan_shard(reader)
    table = scan.offsets()
    if expected is not None and expected.offsets.has_checksums:
        return _by_checksums(scan, table, expected, reader)
    return _by_headers(scan, table, expected, reader.shown)


def _by_checksums(
    scan: ShardScan, table: Offsets, expected: Index, reader: ForwardReader
) -> Recovery:
    listed, shown = expected.offsets, reader.shown
    crcs = crcs_at(listed.members, table.members, reader)
    lost = set(listed.members.row[crcs != listed.members.crc].tolist())
    places = _places(scan, table, {expected.key(i) for i in lost}) if lost else {}
    moved: dict[int, list[Member]] = {}
    for i in sorted(lost):
        place = places.get(expected.key(i))
        there = {} if place is None else {member[0]: member for member in _members(table, place)}
        wanted = [(name, size, crc) for name, _, size, crc in _members(listed, i)]
        if all(name in there and there[name][2:] == (size, crc) for name, size, crc in wanted):
            moved[i] = [there[name] for name, _, _ in wanted]
    shifts = Counter(there[0][1] - _members(listed, i)[0][1] for i, there in moved.items())
    lost -= moved.keys()
    for i in sorted(lost):
        for shift, _ in shifts.most_common(_SHIFTS):
            shifted = [
                (name, offset + shift, size, crc) for name, offset, size, crc in _members(listed, i)
            ]
            if all(_lies(reader, *member[1:]) for member in shifted):
                moved[i] = shifted
                break
    lost -= moved.keys()
    findings = [_lost(expected, crcs.tolist(), i, shown) for i in sorted(lost)]
    intact = (
        IntactSample(expected.key(i), int(listed.start[i]), moved.get(i) or _members(listed, i))
        for i in range(len(expected))
        if i not in lost
    )
    count = len(expected) - len(lost)
    return Recovery(intact, count, findings, _unlisted(scan, table, expected, shown))


def _lies(reader: ForwardReader, offset: int, size: int, crc: int) -> bool:
    return 0 <= offset <= reader.size - size and reader.reread_crc32(offset, size) == crc


def _by_headers(scan: ShardScan, table: Offsets, expected: Index | None, shown: str) -> Recovery:
    again: dict[int, list[int]] = {}  # the first place of a key -> its others
    for place, first in repeated_keys(scan, table):
        again.setdefault(first, []).append(place)
    others = {place for places in again.values() for place in places}
    twice = {place for place, _, _ in scan.twice}
    result = Recovery(iter(()), 0)
    taken: list[IntactSample] = []
    for place in range(len(scan)):
        key, start = key_of(table, place), int(table.start[place])
        if place in others:
            continue
        if twice & {place, *again.get(place, [])}:
            result.lost.append(Finding(shown, key, "", start, "two of its members have one name"))
            continue
        members, is_suspect = _members(table, place), place in scan.suspects
        for more in again.get(place, []):
            rest = _members(table, more)
            if {name for name, *_ in members} & {name for name, *_ in rest}:
                why = f"its key came before, at offset {start}"
                result.lost.append(Finding(shown, key, "", int(table.start[more]), why))
                continue
            members, is_suspect = members + rest, is_suspect or more in scan.suspects
        taken.append(IntactSample(key, start, members, is_suspect))
    known = _known(expected, taken) if scan.damages else {}
    usual = Counter(_kind(one) for one in taken).most_common(1)[0][0] if taken else frozenset()
    sound = []
    for one in taken:
        why = _doubt(one, known.pop(one.key, None), usual)
        if why:
            result.lost.append(Finding(shown, one.key, "", one.start, why))
        else:
            sound.append(one)
    unseen = "its headers are damaged, and its index has no checksums to know its bytes by"
    result.lost += [Finding(shown, key, "", start, unseen) for key, (start, _) in known.items()]
    if expected is None or not _known(expected, taken):
        result.gaps = [_gap(one, shown) for one in scan.damages]
    result.intact, result.count = iter(sound), len(sound)
    return result


def _doubt(
    sample: IntactSample, listed: tuple[int, list[tuple[str, int]]] | None, usual: frozenset[str]
) -> str:
    """Return a reason to suspect lost members; "" if there is none.

    listed: its start and fields with sizes in the index. usual: fields of most samples.
    """
    if listed is not None:
        is_whole = sorted((name, size) for name, _, size, _ in sample.members) == listed[1]
        return "" if is_whole else "its fields are not those that its index says"
    if not sample.is_suspect or _kind(sample) == usual:
        return ""
    lacks = " and ".join(sorted(usual - _kind(sample)))
    why = f"lacks what the others have: {lacks}" if lacks else "has other fields than the others"
    return f"it is next to damage and {why}"


def _gap(damage: Damage, shown: str) -> Finding:
    """Return the finding for bytes without samples."""
    is_empty = damage.stop <= damage.start
    held = "" if is_empty else f"; bytes {damage.start} to {damage.stop} hold no sample"
    return Finding(shown, "", "", damage.start, damage.reason + held)


# --- parts ----------------------------------------------------------------------------------------


def _members(table: Offsets, place: int) -> list[Member]:
    """Return (field, offset, size, crc32) of the members of a sample."""
    crcs = table.members_of(np.array([place])).crc.tolist()
    return [(*member, crc) for member, crc in zip(table.members_at(place), crcs, strict=True)]


def _places(scan: ShardScan, table: Offsets, keys: set[str]) -> dict[str, int]:
    """Return the number of the first sample of the scan with each of these keys."""
    places: dict[str, int] = {}
    for place in range(len(scan)):
        if (key := key_of(table, place)) in keys:
            places.setdefault(key, place)
    return places


def _lost(expected: Index, crcs: list[int], i: int, shown: str) -> Finding:
    """Return the finding for the first changed member of a sample."""
    first = int(expected.offsets.members.first[i])
    for row, (name, offset, size, crc) in enumerate(_members(expected.offsets, i), first):
        if crcs[row] != crc:
            gone = f"the shard has ended before byte {offset + size}, where it should"
            why = gone if crcs[row] < 0 else "the bytes are not those that were packed"
            return Finding(shown, expected.key(i), name, offset, why)
    raise AssertionError(f"sample {i} is intact")


def _unlisted(scan: ShardScan, table: Offsets, expected: Index, shown: str) -> list[Finding]:
    """Return a finding for samples that the index does not list: the shard was replaced."""
    strange = np.flatnonzero(~np.isin(table.start, expected.offsets.start)).tolist()
    if not strange:
        return []
    keys = set(expected.keys(np.arange(len(expected))))
    unknown = [place for place in strange if key_of(table, place) not in keys]
    if not unknown:
        return []
    where = f"the first '{key_of(table, unknown[0])}' at offset {table.start[unknown[0]]}"
    reason = (
        f"holds {len(unknown)} samples that its index does not list, {where}; they are not copied. "
        "Run: wdstrain index on it first"
    )
    return [Finding(shown, "", "", int(table.start[unknown[0]]), reason)]


def _known(
    expected: Index | None, taken: list[IntactSample]
) -> dict[str, tuple[int, list[tuple[str, int]]]]:
    """Return (start, fields with sizes) by key, as an index without checksums says.

    {} if it does not list all samples of the shard.
    """
    if expected is None:
        return {}
    known = {
        expected.key(i): (
            int(expected.offsets.start[i]),
            sorted((name, size) for name, _, size in expected.members(i)),
        )
        for i in range(len(expected))
    }
    return known if all(sample.key in known for sample in taken) else {}


def _kind(sample: IntactSample) -> frozenset[str]:
    return frozenset([field_kind(name) for name, *_ in sample.members])
