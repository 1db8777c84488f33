"""`wt.repair`: copy what is intact in damaged shards into new shards, with an index.

Each shard is written under its own name into another folder, with checksums. The output is written
to a staging directory and moved into place at the end, so a failure leaves nothing behind. Shards
are not repaired in place: other programs may still recover more from the damaged file.

With checksums in the index, a sample is intact if its bytes match them: at the offset in the index,
or where the scan found it. Without, the headers decide: all samples are taken; those next to damage
only if they have the fields that most samples have. Changed bytes within a field are then not noticed.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
from isal.isal_zlib import crc32

from wdstrain.conversion.listing import Part
from wdstrain.conversion.shard_writer import write_samples
from wdstrain.conversion.staging import Staging
from wdstrain.errors import ShardError, UsageError, WdstrainError
from wdstrain.inspection.options import RepairOptions
from wdstrain.inspection.scan import (
    Found,
    Member,
    ShardScan,
    field_kind,
    finding_of,
    is_header,
    limited,
    shards_at,
    total_bytes,
)
from wdstrain.inspection.verify import HasFindings, decode_error
from wdstrain.loader.stats import Finding
from wdstrain.report.printing import counted
from wdstrain.report.terminal import reporting
from wdstrain.runtime.options import takes
from wdstrain.shards.declare import with_labels
from wdstrain.shards.index import Index, Shard, join
from wdstrain.shards.kinds import ColumnInfo
from wdstrain.shards.offsets import OffsetsBuilder
from wdstrain.shards.tar_headers import BLOCK
from wdstrain.storage.files import disk_errors, open_source
from wdstrain.storage.remote import is_remote, name_of, redacted, shown_path

Taken = dict[str, list[Member]]  # the members of each sample that is intact


@dataclass
class Repair(HasFindings):
    """Result of `wt.repair`: copied and lost samples.

    samples: copied. lost: samples that are known to be lost. findings: each of them, and byte
    ranges without samples; each with shard, key, field, offset, reason and `sentence`.
    """

    out: str
    shards: int = 0
    samples: int = 0
    bytes: int = 0
    lost: int = 0
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@takes(RepairOptions)
def repair(options: RepairOptions) -> Repair:
    """Copy all intact samples of shards into shards of the same names in another folder.

    A sample is intact if its bytes have the checksums of the index; without checksums, if its
    headers are valid. Splits, labels and provenance are kept. Raises UsageError if `out` is the
    folder of the shards, or is in use and `overwrite` is False; ShardError if nothing is intact;
    StorageError if the disk fails. `out` is then unchanged.
    """
    result = Repair(os.fspath(options.out))
    todo, faults = shards_at(options.urls)
    result.notes = [fault.sentence for fault in faults]
    _check(result.out, list(todo))
    total, read = total_bytes(todo), 0
    megabytes = None if total is None else total // 10**6

    def tick(size: int) -> None:
        nonlocal read
        read += size
        reporter.step("repairing", read // 10**6, megabytes, unit="MB")

    with (
        reporting(options.progress, True) as reporter,
        Staging(result.out, overwrite=options.overwrite) as stage,
    ):
        try:
            folder = stage.folder()
            with disk_errors(result.out, "Free some space, or choose another folder."):
                made = [
                    _repaired(path, expected, folder, result, options.decode, tick)
                    for path, expected in todo.items()
                ]
            parts = [index for index in made if len(index)]
            if not parts:
                first = f" The first: {result.findings[0]}" if result.findings else ""
                raise ShardError(
                    f"none of {counted(len(todo), 'shard')} holds an intact sample.{first}"
                )
            index = _with_what_was_known(join(parts), list(todo.values()), result)
            stage.commit(index, [shard.name for shard in index.shards])
        finally:
            stage.discard()
    result.shards, result.samples = len(index.shards), len(index)
    result.bytes = sum(shard.bytes for shard in index.shards)
    return result


def _check(out: str, paths: list[str]) -> None:
    """Raise UsageError for a folder that cannot hold the repaired shards."""
    if is_remote(out):
        raise UsageError(
            f"{redacted(out)}: repaired shards are written to a local folder.", "Name one."
        )
    folders = [os.path.dirname(path) or "." for path in paths if not is_remote(path)]
    if os.path.realpath(out) in map(os.path.realpath, folders):
        raise UsageError(
            f"{out} is the folder of the shards, which is never written to.", "Name another one."
        )
    for name, count in Counter(map(name_of, paths)).items():
        if count > 1:
            raise UsageError(f"two shards are named {name}.", "Repair their folders one by one.")


def _repaired(
    path: str,
    expected: Index,
    folder: str,
    result: Repair,
    decode: bool,
    tick: Callable[[int], None],
) -> Index:
    """Write one shard; return its index, which is empty if nothing of it is intact."""
    listed, shown = expected.shards[0], shown_path(path)
    intact, suspects, findings = Index(), set[str](), list[Finding]()
    try:
        with open_source(path, state="") as source:
            intact, suspects, findings = recover(ShardScan(source, tick), expected)
    except WdstrainError as error:
        findings = [finding_of(shown, error)]
    if len(intact):
        labels = expected.labels if decode else None
        samples = _readable(intact, suspects, findings, labels)
        target = os.path.join(folder, name_of(path))
        intact = write_samples(target, listed.split, samples, lambda *_: None)
        if not len(intact):
            os.unlink(target)
    named = sum(bool(finding.key) for finding in findings)
    lost = max(named, listed.samples - len(intact))
    if lost > named:
        reason = f"held {listed.samples} samples, of which {lost - named} are lost without a trace"
        findings.append(Finding(shown, "", "", 0, reason))
    result.lost += lost
    result.findings += limited(findings)
    return intact


def recover(scan: ShardScan, expected: Index) -> tuple[Index, set[str], list[Finding]]:
    """Return the intact samples of a shard, keys of those next to damage, and what is lost.

    expected: what the index says of the shard. Raises StorageError or ShardError for a shard that
    cannot be read.
    """
    samples, rows, suspects = list(scan.samples()), OffsetsBuilder(), set[str]()
    if not expected.offsets.has_checksums or expected.shards[0].sha256 == scan.sha256:
        taken, suspects, lost = _by_headers(scan, samples, expected)
    else:
        taken, lost = _by_checksums(scan, samples, expected)
    for key, members in taken.items():
        rows.put(key, members[0][1], members[-1][1], members)
    shard = Shard(scan.source.path, len(taken), scan.size)
    return Index((shard,), rows.offsets()), suspects, lost


def _by_checksums(
    scan: ShardScan, samples: list[Found], expected: Index
) -> tuple[Taken, list[Finding]]:
    """Return the samples of an index whose bytes are intact, and what is lost.

    They are where the scan found the bytes of this key, or where the index says.
    """
    taken, lost = Taken(), list[Finding]()
    places = {
        (found.key, name, size, crc): offset
        for found in samples
        for name, offset, size, crc in found.members.values()
    }
    for key, wanted in _rows_of(expected):
        members = list[Member]()
        for name, offset, size, crc in wanted:
            place = places.get((key, name, size, crc))
            if place is None and crc32(scan.source.read(offset, size)) != crc:
                reason = "the bytes are not those that were packed"
                lost.append(Finding(scan.shown, key, name, offset, reason))
                break
            members.append((name, offset if place is None else place, size, crc))
        else:
            taken[key] = members
    known = {*expected.keys(np.arange(len(expected)))}
    strange = [found.key for found in samples if found.key not in known]
    if strange:  # the shard was replaced
        reason = (
            f"holds {len(strange)} samples that its index does not list, the first '{strange[0]}'; "
            f"they are not copied. Run: wdstrain index on it first"
        )
        lost.append(Finding(scan.shown, "", "", 0, reason))
    return taken, lost


def _by_headers(
    scan: ShardScan, samples: list[Found], expected: Index
) -> tuple[Taken, set[str], list[Finding]]:
    """Return the samples with valid headers, keys of those next to damage, and what is lost.

    A sample whose members lie in two places becomes whole.
    """
    taken, lost, suspects = Taken(), list[Finding](), set[str]()
    starts = [found.start for found in samples]
    behind = [bisect_right(starts, damage.start) for damage in scan.damages]
    near = {*behind, *(number - 1 for number in behind)}
    for number, found in enumerate(samples):
        earlier = taken.get(found.key, [])
        if found.twice or found.members.keys() & {name for name, *_ in earlier}:
            reason = "a member of this key and name came before"
            lost.append(Finding(scan.shown, found.key, "", found.start, reason))
            continue
        taken[found.key] = [*earlier, *found.members.values()]
        if number in near:
            suspects.add(found.key)
    kinds = {key: {field_kind(name) for name, *_ in members} for key, members in taken.items()}
    usual = Counter(map(frozenset, kinds.values())).most_common(1)
    for key in sorted(suspects):
        if kinds[key] != usual[0][0]:
            fields, others = ", ".join(sorted(kinds[key])), ", ".join(sorted(usual[0][0]))
            reason = f"it is next to damage and has {fields}, others {others}"
            lost.append(Finding(scan.shown, key, "", taken.pop(key)[0][1], reason))
    named = {*taken, *(finding.key for finding in lost)}
    for key, members in _rows_of(expected):
        if key not in named:
            reason = "it is not there, as the index says"
            lost.append(Finding(scan.shown, key, "", members[0][1], reason))
    lost += [Finding(scan.shown, "", "", damage.start, damage.reason) for damage in scan.damages]
    return taken, suspects, lost


def _rows_of(index: Index) -> Iterator[tuple[str, list[Member]]]:
    """Yield (key, (field, offset, size, crc32 or 0) of each member) of the samples of an index."""
    found = index.offsets.members
    columns = (array.tolist() for array in (found.offset, found.size, found.crc))
    names = map(index.fields.__getitem__, found.field.tolist())
    rows = list(zip(names, *columns, strict=True))
    keys = index.keys(np.arange(len(index)))
    for key, (first, stop) in zip(keys, pairwise(found.first.tolist()), strict=True):
        yield key, rows[first:stop]


def _readable(
    intact: Index, suspects: set[str], findings: list[Finding], labels: Sequence[ColumnInfo] | None
) -> Iterator[tuple[str, list[Part]]]:
    """Yield the samples to write. A sample whose bytes prove to be damaged becomes a finding.

    labels: of the index, with which values are decoded; None: they are not.
    """
    for number, values in intact.read(np.arange(len(intact))):
        key, reason = intact.key(number), ""
        for name, offset, _ in intact.members(number):
            data = values[name]
            blocks = (data[at : at + BLOCK] for at in range(0, len(data), BLOCK))
            if key in suspects and any(map(is_header, blocks)):
                reason = "the next sample begins within it: bytes before that are missing"
            elif "\0" in key + name:
                reason = "a NUL character is in its name"
            elif labels is not None:
                reason = decode_error(name, data, labels)
            if reason:
                findings.append(Finding(intact.shards[0].shown, key, name, offset, reason))
                break
        if not reason:
            yield key, list(values.items())


def _with_what_was_known(index: Index, former: list[Index], result: Repair) -> Index:
    """Return the index with labels and provenance of the old one; counts only if none is lost."""
    known = [old for old in former if old.shards[0].samples]
    labels = known[0].labels if known and len({old.labels for old in known}) == 1 else ()
    stale = {"made", "states"} | ({"samples", "listed"} if result.findings else set())
    info = known[0].info if known else {}
    kept = {name: value for name, value in info.items() if name not in stale}
    repaired = {"copied": len(index), "lost": result.lost}
    return replace(with_labels(index, labels), info={**kept, "repaired": repaired})
