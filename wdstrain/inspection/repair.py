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
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from wdstrain.conversion.listing import Part
from wdstrain.conversion.shard_writer import write_samples
from wdstrain.conversion.staging import Staging
from wdstrain.errors import ShardError, UsageError, WdstrainError
from wdstrain.inspection.options import RepairOptions
from wdstrain.inspection.scan import (
    Member,
    Scan,
    ShardReader,
    compared,
    field_kind,
    finding_of,
    is_header,
    limited,
    members_of,
    scan_shard,
    shards_at,
    total_bytes,
)
from wdstrain.inspection.verify import HasFindings, decode_error
from wdstrain.loader.stats import Finding
from wdstrain.report.printing import counted
from wdstrain.runtime.options import takes
from wdstrain.shards.declare import with_labels
from wdstrain.shards.index import Index, Shard, join
from wdstrain.shards.kinds import ColumnInfo
from wdstrain.shards.offsets import OffsetsBuilder
from wdstrain.shards.tar_headers import BLOCK
from wdstrain.storage.files import disk_errors
from wdstrain.storage.remote import is_remote, name_of, redacted, shown_path


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
    _check(result.out, [path for path, _ in todo])
    total, read = total_bytes(todo), 0

    def tick(size: int) -> None:
        nonlocal read
        read += size
        if options.progress is not None:
            options.progress(read, total)

    with Staging(result.out, overwrite=options.overwrite) as stage:
        try:
            folder = stage.folder()
            with disk_errors(result.out, "Free some space, or choose another folder."):
                made = [_repaired(*shard, folder, result, options.decode, tick) for shard in todo]
            parts = [index for index in made if len(index)]
            if not parts:
                first = f" The first: {result.findings[0]}" if result.findings else ""
                raise ShardError(
                    f"none of {counted(len(todo), 'shard')} holds an intact sample.{first}"
                )
            known = [expected for _, expected in todo if expected is not None]
            index = _with_what_was_known(join(parts), known, result)
            stage.commit(index, [shard.name for shard in index.shards])
        finally:
            stage.discard()
    result.shards, result.samples = len(index.shards), len(index)
    result.bytes = sum(shard.bytes for shard in index.shards)
    return result


def _repaired(
    path: str,
    expected: Index | None,
    folder: str,
    result: Repair,
    decode: bool,
    tick: Callable[[int], None],
) -> Index:
    """Write one shard; return its index, which is empty if nothing of it is intact."""
    listed = Shard(path, 0, 0) if expected is None else expected.shards[0]
    labels = () if expected is None else expected.labels
    intact, suspects, findings = Index((), OffsetsBuilder().offsets()), set[int](), list[Finding]()
    try:
        with ShardReader(path, threading.Event(), tick) as reader:
            intact, suspects, findings = recover(reader, path, expected)
    except WdstrainError as error:
        findings = [finding_of(shown_path(path), error)]
    if len(intact):
        samples = _readable(intact, suspects, findings, labels if decode else None)
        target = os.path.join(folder, name_of(path))
        intact = write_samples(target, listed.split, samples, lambda *_: None)
        if not len(intact):
            os.unlink(target)
    named = sum(bool(finding.key) for finding in findings)
    lost = max(named, listed.samples - len(intact))
    if lost > named:
        reason = f"held {listed.samples} samples, of which {lost - named} are lost without a trace"
        findings.append(Finding(shown_path(path), "", "", 0, reason))
    result.lost += lost
    result.findings += limited(findings)
    return intact


def recover(
    reader: ShardReader, path: str, expected: Index | None
) -> tuple[Index, set[int], list[Finding]]:
    """Return the intact samples of a shard, those of them next to damage, and what is lost.

    Raises StorageError or ShardError for a shard that cannot be read.
    """
    scan, rows = scan_shard(reader), OffsetsBuilder()
    has_checksums = expected is not None and expected.offsets.has_checksums
    if expected is None or not has_checksums or expected.shards[0].sha256 == scan.sha256:
        taken, lost = _by_headers(reader.shown, scan, expected)
    else:
        taken, lost = _by_checksums(reader, scan, expected)
    for key, (members, _) in taken.items():
        rows.put(key, members[0][1], members[-1][1], members)
    suspects = {number for number, (_, is_suspect) in enumerate(taken.values()) if is_suspect}
    shard = Shard(path, len(taken), reader.size)
    return Index((shard,), rows.offsets()), suspects, lost


Taken = dict[str, tuple[list[Member], bool]]  # members of each sample, and is it next to damage


def _by_checksums(reader: ShardReader, scan: Scan, expected: Index) -> tuple[Taken, list[Finding]]:
    """Return the samples of an index whose bytes are intact, and what is lost."""
    taken, lost = Taken(), list[Finding]()
    for key, members, changes in compared(scan, expected, reader):
        lost += changes[:1]
        if not changes:
            taken[key] = members, False
    known = {*expected.keys(np.arange(len(expected)))}
    strange = [key for key in scan.first if key not in known]
    if strange:  # the shard was replaced
        reason = (
            f"holds {len(strange)} samples that its index does not list, the first '{strange[0]}'; "
            f"they are not copied. Run: wdstrain index on it first"
        )
        lost.append(Finding(reader.shown, "", "", 0, reason))
    return taken, lost


def _by_headers(shown: str, scan: Scan, expected: Index | None) -> tuple[Taken, list[Finding]]:
    """Return the samples with valid headers. One whose members lie in two places becomes whole."""
    taken, lost = Taken(), list[Finding]()
    starts = scan.offsets.start.tolist()
    behind = np.searchsorted(starts, [damage.start for damage in scan.damages], side="right")
    near = {*behind.tolist(), *(behind - 1).tolist()}
    twice = {number for number, field, _, _ in scan.faults if field}
    keys = scan.offsets.keys_of(np.arange(len(starts)))
    for number, (key, members) in enumerate(zip(keys, members_of(scan.offsets), strict=True)):
        earlier, is_suspect = taken.get(key, ([], False))
        reason = "two of its members have one name" if number in twice else ""
        if {row[0] for row in members} & {row[0] for row in earlier}:
            reason = f"its key came before, at offset {starts[scan.first[key]]}"
        if reason:
            lost.append(Finding(shown, key, "", starts[number], reason))
        else:
            taken[key] = earlier + members, is_suspect or number in near
    kinds = {key: frozenset(field_kind(row[0]) for row in rows) for key, (rows, _) in taken.items()}
    usual = Counter(kinds.values()).most_common(1)
    for key, kind in kinds.items():
        if taken[key][1] and kind != usual[0][0]:
            reason = (
                f"it is next to damage and has {', '.join(kind)}, others {', '.join(usual[0][0])}"
            )
            lost.append(Finding(shown, key, "", taken.pop(key)[0][0][1], reason))
    named = {*taken, *(finding.key for finding in lost)}
    for number, key in enumerate(
        () if expected is None else expected.keys(np.arange(len(expected)))
    ):
        if key not in named:
            offset = int(expected.offsets.start[number]) if expected is not None else 0
            lost.append(Finding(shown, key, "", offset, "it is not there, as the index says"))
    lost += [Finding(shown, "", "", damage.start, damage.reason) for damage in scan.damages]
    return taken, lost


def _readable(
    intact: Index, suspects: set[int], findings: list[Finding], labels: Sequence[ColumnInfo] | None
) -> Iterator[tuple[str, list[Part]]]:
    """Yield the samples to write. A sample whose bytes prove to be damaged becomes a finding.

    labels: of the index, with which values are decoded; None: they are not.
    """
    for number, values in intact.read(np.arange(len(intact))):
        key, reason = intact.key(number), ""
        for name, offset, _ in intact.members(number):
            data = values[name]
            if number in suspects and any(
                is_header(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK)
            ):
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


def _check(out: str, paths: list[str]) -> None:
    """Raise UsageError for a folder that cannot hold the repaired shards."""
    if is_remote(out):
        raise UsageError(
            f"{redacted(out)}: repaired shards are written to a local folder.",
            "Name one.",
        )
    if not paths:
        raise UsageError(
            "there are no shards at these addresses.",
            "Name a folder with .tar files.",
        )
    inputs = {
        os.path.realpath(os.path.dirname(path) or ".") for path in paths if not is_remote(path)
    }
    if os.path.realpath(out) in inputs:
        raise UsageError(
            f"{out} is the folder of the shards, which is never written to.",
            "Name another one.",
        )
    twice = [name for name, count in Counter(map(name_of, paths)).items() if count > 1]
    if twice:
        raise UsageError(
            f"two shards are named {twice[0]}.",
            "Repair their folders one by one.",
        )


def _with_what_was_known(index: Index, known: list[Index], result: Repair) -> Index:
    """Return the index with labels and provenance of the old one; counts only if none is lost."""
    labels = (
        known[0].labels if known and all(old.labels == known[0].labels for old in known) else ()
    )
    stale = {"made", "states"} | ({"samples", "listed"} if result.findings else set())
    former = {
        name: value for name, value in (known[0].info if known else {}).items() if name not in stale
    }
    info = {**former, "repaired": {"copied": len(index), "lost": result.lost}}
    return replace(with_labels(index, labels), info=info)
