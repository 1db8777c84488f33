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
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from wdstrain.conversion.packing import write_samples
from wdstrain.conversion.staging import Staging
from wdstrain.errors import ShardError
from wdstrain.inspection.options import RepairOptions
from wdstrain.inspection.scan import (
    Entry,
    ShardCheck,
    ShardScan,
    as_packed,
    each_shard,
    field_kind,
    is_header,
    limited,
    missing,
    shards_at,
)
from wdstrain.inspection.verify import ShardsRead
from wdstrain.loader.stats import Finding
from wdstrain.report.printing import counted, printable
from wdstrain.runtime.options import refuse, takes
from wdstrain.shards.declare import with_labels
from wdstrain.shards.index import Index, Shard, join
from wdstrain.shards.offsets import Offsets
from wdstrain.shards.tar_headers import BLOCK
from wdstrain.storage.remote import is_remote, name_of, redacted

Taken = dict[str, list[Entry]]  # the members of each sample that is intact


@dataclass(repr=False)
class Repair(ShardsRead):
    """Result of `wt.repair`: copied and lost samples.

    samples: copied. lost: samples that are known to be lost. findings: each of them, and byte
    ranges without samples.
    """

    out: str = ""
    lost: int = 0


@takes(RepairOptions)
def repair(options: RepairOptions) -> Repair:
    """Copy all intact samples of shards into shards of the same names in another folder.

    A sample is intact if its bytes have the checksums of the index; without checksums, if its
    headers are valid. Splits, labels and provenance are kept. Raises UsageError if `out` is the
    folder of the shards, or is in use and `overwrite` is False; ShardError if nothing is intact;
    StorageError if the disk fails. `out` is then unchanged.
    """
    result = Repair(out=os.fspath(options.out))
    todo, faults = shards_at(options.urls)
    result.notes = [fault.sentence for fault in faults]
    _check(result.out, list(todo))
    with Staging(result.out, overwrite=options.overwrite) as stage:
        folder = stage.folder()
        rescued, _ = each_shard(todo, recover, "repairing", options.progress)
        made = [
            _saved(expected, found, folder, result)
            for expected, found in zip(todo.values(), rescued, strict=True)
        ]
        parts = [index for index in made if len(index)]
        if not parts:
            first = f" The first: {result.findings[0]}" if result.findings else ""
            raise ShardError(
                f"none of {counted(len(todo), 'shard')} holds an intact sample.{first}"
            )
        index = _with_what_was_known(join(parts), list(todo.values()), result)
        stage.commit(index, [shard.name for shard in index.shards])
    result.shards, result.samples = len(index.shards), len(index)
    result.bytes = sum(shard.bytes for shard in index.shards)
    return result


def _check(out: str, paths: list[str]) -> None:
    """Raise UsageError for a folder that cannot hold the repaired shards."""
    refuse(
        is_remote(out),
        f"{redacted(out)}: repaired shards are written to a local folder.",
        "Name one.",
    )
    folders = [os.path.dirname(path) or "." for path in paths if not is_remote(path)]
    refuse(
        os.path.realpath(out) in map(os.path.realpath, folders),
        f"{out} is the folder of the shards, which is never written to.",
        "Name another one.",
    )
    for name, count in Counter(map(name_of, paths)).items():
        refuse(count > 1, f"two shards are named {name}.", "Repair their folders one by one.")


def _saved(expected: Index, check: ShardCheck, folder: str, result: Repair) -> Index:
    """Write the intact samples of a shard, and return its index, which is empty without any.

    What is lost is added to the result.
    """
    listed = expected.shards[0]
    target = os.path.join(folder, listed.name)
    written = write_samples(target, listed.split, _writable(check))
    if not len(written):
        os.unlink(target)
    named = len({finding.key for finding in check.findings} - {""})
    lost = max(named, listed.samples - len(written))
    if lost > named:
        reason = (
            f"held {counted(listed.samples, 'sample')}, of which {lost - named} are lost without a "
            "trace"
        )
        check.findings.append(Finding(listed.shown, "", "", 0, reason))
    result.lost += lost
    result.findings += limited(check.findings, len(check.findings), "finding")
    return written


def _writable(check: ShardCheck) -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    """Yield the samples to write. A sample that cannot be written becomes a finding."""
    intact = check.found
    for number, values in intact.read(np.arange(len(intact))):
        key, start = intact.key(number), int(intact.offsets.start[number])
        if "\0" in "".join((key, *values)):
            check.findings.append(
                Finding(intact.shards[0].shown, key, "", start, "a NUL character is in its name")
            )
        else:
            yield key, list(values.items())


def _with_what_was_known(index: Index, former: list[Index], result: Repair) -> Index:
    """Return the index with labels and provenance of the old one; counts only if none is lost."""
    known = [old for old in former if old.shards[0].samples]
    labels = known[0].labels if known and len({old.labels for old in known}) == 1 else ()
    gone = sorted({c.name for old in known for c in old.columns if c.is_joined})
    if gone:
        names = printable(", ".join(gone))
        result.notes.append(f"joined columns are not copied: {names}. Join the table again.")
    stale = {"made", "states"} | ({"samples", "listed"} if result.findings else set())
    info = known[0].info if known else {}
    kept = {name: value for name, value in info.items() if name not in stale}
    return replace(
        with_labels(index, [label for label in labels if not label.is_joined]),
        info={**kept, "repaired": {"copied": len(index), "lost": result.lost}},
    )


# --- one shard ------------------------------------------------------------------------------------


def recover(scan: ShardScan, expected: Index) -> ShardCheck:
    """Return the intact samples of a shard, and what is lost.

    expected: what the index says of the shard. Raises StorageError or ShardError for a shard that
    cannot be read.
    """
    deque(scan.samples(), maxlen=0)
    is_changed = expected.shards[0].sha256 != scan.sha256
    if is_changed and expected.offsets.has_checksums:
        taken, lost = as_packed(scan, expected)
        known = {*expected.keys(np.arange(len(expected)))}
        if strange := [key for key, *_ in scan.rows if key not in known]:  # it was replaced
            lost.append(
                scan.finding(
                    f"holds {counted(len(strange), 'sample')} that its index does not list, the "
                    f"first '{strange[0]}'; they are not copied. Run: wdstrain index on it first"
                )
            )
    else:
        taken, lost = _by_headers(scan)
        lost += [*(missing(scan, expected) if is_changed else ()), *scan.damages]
    rows = [(key, own[0][1], own[-1][1], own) for key, own in taken.items()]
    shard = Shard(scan.source.path, len(taken), scan.size)
    return ShardCheck(lost, Index((shard,), Offsets.of_samples(rows)))


def _by_headers(scan: ShardScan) -> tuple[Taken, list[Finding]]:
    """Return the samples with valid headers, and those that are lost nevertheless.

    A sample whose members lie in two places becomes whole.
    """
    taken, lost = Taken(), list[Finding]()
    doubled = {fault.key for fault in scan.faults if fault.field}
    for key, start, _, members in scan.rows:
        earlier = taken.get(key, [])
        if key in doubled or {name for name, *_ in members} & {name for name, *_ in earlier}:
            lost.append(
                scan.finding("a member of this key and name came before", key, offset=start)
            )
        else:
            taken[key] = [*earlier, *members]
    usual = Counter(map(_kinds, taken.values())).most_common(1)
    starts = [start for _, start, _, _ in scan.rows]
    behind = np.searchsorted(starts, [damage.offset for damage in scan.damages], "right")
    near = {scan.rows[at][0] for at in (*behind, *(behind - 1)) if 0 <= at < len(starts)}
    for key in sorted(near & taken.keys()):
        fault = _fault_near_damage(scan, key, taken[key], usual[0][0])
        if fault is not None:
            del taken[key]
            lost.append(fault)
    return taken, lost


def _kinds(members: Sequence[Entry]) -> frozenset[str]:
    """Return the kinds of the fields of a sample."""
    return frozenset(field_kind(name) for name, *_ in members)


def _fault_near_damage(
    scan: ShardScan, key: str, members: list[Entry], usual: frozenset[str]
) -> Finding | None:
    """Return what shows that a sample next to damage is not whole. usual: kinds of its fields."""
    if _kinds(members) != usual:
        reason = f"it is next to damage and lacks some of {', '.join(sorted(usual))}, or has others"
        return scan.finding(reason, key, offset=members[0][1])
    for name, offset, size, _ in members:
        data = scan.source.bytes_at(offset, size)
        if any(is_header(data[at : at + BLOCK]) for at in range(0, size, BLOCK)):
            return scan.finding(
                "the next sample begins within it: bytes before that are missing", key, name, offset
            )
    return None
