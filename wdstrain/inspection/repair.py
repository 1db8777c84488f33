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
from typing import NamedTuple

import numpy as np
from isal.isal_zlib import crc32

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
    decode_error,
    field_kind,
    finding_of,
    is_header,
    limited,
    members_of,
    scan_shard,
)
from wdstrain.inspection.verify import HasFindings, Shards, total_bytes
from wdstrain.loader.stats import Finding
from wdstrain.runtime.options import takes
from wdstrain.shards.declare import with_labels
from wdstrain.shards.header_scans import picked
from wdstrain.shards.index import Index, Shard, join
from wdstrain.shards.index_io import TABLE_NAME, changed, find_index, remains
from wdstrain.shards.kinds import ColumnInfo
from wdstrain.shards.resolve import IndexFiles, tars_of
from wdstrain.shards.tar_headers import BLOCK
from wdstrain.storage.addresses import INDEX_NAME, Urls, beside, check_finished, expand, is_json
from wdstrain.storage.files import disk_errors
from wdstrain.storage.local import Source, open_source
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
    todo = _listed(options.urls, result)
    _check(result.out, [path for path, _ in todo])
    stage = Staging(result.out, overwrite=options.overwrite)
    total, read = total_bytes(todo), 0

    def tick(size: int) -> None:
        nonlocal read
        read += size
        if options.progress is not None:
            options.progress(read, total)

    try:
        folder = stage.folder("shards")
        with disk_errors(result.out, "Free some space, or choose another folder."):
            made = [_repaired(*shard, folder, result, options.decode, tick) for shard in todo]
        parts = [index for index in made if index is not None]
        if not parts:
            first = f" The first: {result.findings[0]}" if result.findings else ""
            raise ShardError(f"none of {len(todo)} shards holds an intact sample.{first}")
        index = _with_what_was_known(
            join(parts), [expected for _, expected in todo if expected is not None], result
        )
        stage.commit(index, folder, {shard.name: shard.name for shard in index.shards})
    except BaseException:
        stage.discard()
        raise
    result.shards, result.samples = len(index.shards), len(index)
    result.bytes = sum(shard.bytes for shard in index.shards)
    return result


# --- one shard ------------------------------------------------------------------------------------


class IntactSample(NamedTuple):
    """A sample to copy. is_suspect: it is next to damage."""

    key: str
    start: int
    members: list[Member]
    is_suspect: bool = False


def _repaired(
    path: str,
    expected: Index | None,
    folder: str,
    result: Repair,
    decode: bool,
    tick: Callable[[int], None],
) -> Index | None:
    """Write one shard; return its index, None if nothing of it is intact."""
    shown = shown_path(path)
    listed = Shard(path, 0, 0) if expected is None else expected.shards[0]
    labels = () if expected is None else expected.labels
    try:
        with ShardReader(path, threading.Event(), tick) as reader:
            intact, findings = recover(reader, expected)
    except WdstrainError as error:
        finding = finding_of(shown, error)
        lost = f"; its {listed.samples} samples are lost" if listed.samples else ""
        result.findings.append(finding._replace(reason=finding.reason + lost))
        result.lost += listed.samples
        return None
    with open_source(path) as source:
        entries = _entries(source, shown, intact, findings, labels if decode else None)
        target = os.path.join(folder, name_of(path))
        index = write_samples(target, listed.split, entries, lambda *_: None)
    named = sum(bool(finding.key) for finding in findings)
    unseen = listed.samples - len(index) - named
    if unseen > 0:
        reason = f"held {listed.samples} samples, of which {unseen} are lost without a trace"
        findings.append(Finding(shown, "", "", 0, reason))
    result.lost += named + max(0, unseen)
    result.findings += limited(shown, findings)
    if not len(index):
        os.unlink(target)
        return None
    return index


def recover(
    reader: ShardReader, expected: Index | None
) -> tuple[list[IntactSample], list[Finding]]:
    """Return the intact samples of a shard, and what is lost: samples, then bytes without samples.

    Raises StorageError or ShardError for a shard that cannot be read.
    """
    scan = scan_shard(reader)
    if expected is None or expected.shards[0].sha256 == scan.sha256:
        return _by_headers(reader.shown, scan)
    keys = expected.keys(np.arange(len(expected)))
    strange = [number for key, number in scan.first.items() if key not in {*keys}]
    has_checksums = expected.offsets.has_checksums
    if not has_checksums and (strange or not scan.damages):
        return _by_headers(reader.shown, scan)
    intact, lost = list[IntactSample](), list[Finding]()
    for key, members, changes in compared(scan, expected, reader):
        lost += changes[:1]
        if not changes:
            intact.append(IntactSample(key, members[0][1], members))
    if strange:  # the shard was replaced
        (key,), start = scan.offsets.keys_of(np.array(strange[:1])), scan.offsets.start[strange[0]]
        reason = (
            f"holds {len(strange)} samples that its index does not list, the first '{key}' at "
            f"offset {start}; they are not copied. Run: wdstrain index on it first"
        )
        lost.append(Finding(reader.shown, "", "", int(start), reason))
    return intact, lost


def _by_headers(shown: str, scan: Scan) -> tuple[list[IntactSample], list[Finding]]:
    """Return the samples with valid headers. One whose members lie in two places becomes whole."""
    taken, lost = dict[str, IntactSample](), list[Finding]()
    starts = scan.offsets.start.tolist()
    behind = np.searchsorted(starts, [damage.start for damage in scan.damages], side="right")
    suspects, twice = {*behind.tolist(), *(behind - 1).tolist()}, {row[0] for row in scan.twice}
    keys = scan.offsets.keys_of(np.arange(len(starts)))
    for number, (key, members) in enumerate(zip(keys, members_of(scan.offsets), strict=True)):
        one = IntactSample(key, starts[number], members, number in suspects)
        earlier = taken.setdefault(key, one)
        reason = ""
        if number in twice:
            del taken[key]
            reason = "two of its members have one name"
        elif earlier is not one and {row[0] for row in members} & {
            row[0] for row in earlier.members
        }:
            reason = f"its key came before, at offset {earlier.start}"
        elif earlier is not one:
            is_suspect = earlier.is_suspect or one.is_suspect
            taken[key] = IntactSample(key, earlier.start, earlier.members + members, is_suspect)
        if reason:
            lost.append(Finding(shown, key, "", one.start, reason))
    kinds = {key: frozenset(field_kind(row[0]) for row in taken[key].members) for key in taken}
    usual = Counter(kinds.values()).most_common(1)
    for key, kind in kinds.items():
        if taken[key].is_suspect and kind != usual[0][0]:
            lacks = " and ".join(sorted(usual[0][0] - kind))
            reason = "lacks what the others have: " if lacks else "has other fields than the others"
            reason = f"it is next to damage and {reason}{lacks}"
            lost.append(Finding(shown, key, "", taken.pop(key).start, reason))
    lost += [Finding(shown, "", "", damage.start, damage.reason) for damage in scan.damages]
    return list(taken.values()), lost


def _entries(
    source: Source,
    shown: str,
    intact: list[IntactSample],
    findings: list[Finding],
    labels: Sequence[ColumnInfo] | None,
) -> Iterator[tuple[str, list[Part]]]:
    """Yield the samples to write. A sample whose bytes prove to be damaged becomes a finding.

    labels: of the index, with which values are decoded; None: they are not.
    """
    for sample in intact:
        parts: list[Part] = []
        for name, offset, size, crc in sample.members:
            data = source.read(offset, size)
            reason = ""
            if crc32(data) != crc:
                reason = "its bytes changed while they were read"
            elif sample.is_suspect and any(
                is_header(data[at : at + BLOCK]) for at in range(0, size, BLOCK)
            ):
                reason = "the next sample begins within it: bytes before that are missing"
            elif "\0" in sample.key + name:
                reason = "a NUL character is in its name"
            elif labels is not None:
                reason = decode_error(name, data, labels)
            if reason:
                findings.append(Finding(shown, sample.key, name, offset, reason))
                break
            parts.append((name, data))
        else:
            yield sample.key, parts


# --- the set --------------------------------------------------------------------------------------


def _listed(urls: Urls, result: Repair) -> Shards:
    """Return the shards with what their index says, or with what is left of a damaged one."""
    todo, files, known = dict[str, Index | None](), IndexFiles(), dict[str, Index | None]()
    for path in expand(urls):
        if is_remote(path):
            todo.update(files.each(path))
            continue
        where = path if is_json(path) else beside(path, INDEX_NAME)
        if where not in known:
            known[where], note = _index_at(where)
            result.notes += [note] if note else []
        index, tars = known[where], [path]
        if is_json(path):
            tars = tars_of(os.path.dirname(path))
            tars = tars if index is None else [shard.path for shard in index.shards]
        for tar in tars:
            own = None if index is None else picked(index, [tar])
            todo[tar] = own if own is not None and own.shards else None
    return list(todo.items())


def _index_at(path: str) -> tuple[Index | None, str]:
    """Return a local index, or what is left of a damaged one, and a note about the damage."""
    check_finished(os.path.dirname(path))
    try:
        index = find_index(path)
        reason = "" if index is None else changed(path)
        if index is not None and not reason:
            return index, ""
    except ShardError as error:
        reason = str(error)
    left = remains(path)
    if left is not None and len(left):
        return left, f"repaired with the index in {TABLE_NAME} alone: {reason or 'no index.json'}"
    return left, f"repaired without an index, by headers alone: {reason}" if reason else ""


def _check(out: str, paths: list[str]) -> None:
    """Raise UsageError for a folder that cannot hold the repaired shards."""
    if is_remote(out):
        raise UsageError(
            f"{redacted(out)}: repaired shards are written to a local folder. Name one."
        )
    if not paths:
        raise UsageError("there are no shards at these addresses. Name a folder with .tar files.")
    inputs = {
        os.path.realpath(os.path.dirname(path) or ".") for path in paths if not is_remote(path)
    }
    if os.path.realpath(out) in inputs:
        raise UsageError(
            f"{out} is the folder of the shards, which is never written to. Name another one."
        )
    twice = [name for name, count in Counter(map(name_of, paths)).items() if count > 1]
    if twice:
        raise UsageError(f"two shards are named {twice[0]}. Repair their folders one by one.")


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
