"""`wt.repair`: copy what is intact in damaged shards into new shards, with an index.

Each shard is written under its own name into another folder, with checksums. The output is written
to a staging directory and moved into place at the end, so a failure leaves nothing behind. Shards
are not repaired in place: what is lost may still be recovered from the damaged file by other means.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from isal.isal_zlib import crc32

from wdstrain.conversion.listing import Part
from wdstrain.conversion.output_dir import OutputTransaction
from wdstrain.conversion.shard_writer import write_samples
from wdstrain.errors import ShardError, StorageError, UsageError, WdstrainError
from wdstrain.inspection.options import RepairOptions
from wdstrain.inspection.repair.recover import IntactSample, recover
from wdstrain.inspection.verify.api import HasFindings, finding_of, total_bytes
from wdstrain.inspection.verify.damaged_tar import holds_header
from wdstrain.inspection.verify.decode_check import FieldReaders, decode_error
from wdstrain.inspection.verify.forward_reader import ForwardReader
from wdstrain.loader.stats import Finding
from wdstrain.runtime.options import takes
from wdstrain.shards.declare import with_labels
from wdstrain.shards.index import Index, join
from wdstrain.shards.index_io import TABLE_NAME, save_index
from wdstrain.shards.resolve import IndexFiles, tars_of
from wdstrain.storage.addresses import INDEX_NAME, Urls, check_finished, expand, is_json
from wdstrain.storage.local import Source, open_source
from wdstrain.storage.remote import is_remote, name_of, redacted, shown_path

_MOST = 4 << 30  # bytes of one sample, which is held in memory
_LISTED = 1000  # lost samples of one shard that are listed


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
    stage = OutputTransaction(result.out, overwrite=options.overwrite, resume=False)
    total, read = total_bytes(todo), 0

    def tick(size: int) -> None:
        nonlocal read
        read += size
        if options.progress is not None:
            options.progress(read, total)

    try:
        folder = stage.folder("shards")
        made = [
            _one(path, expected, folder, result, options.decode, tick) for path, expected in todo
        ]
        parts = [index for index in made if index is not None]
        if not parts:
            first = f" The first: {result.findings[0]}" if result.findings else ""
            raise ShardError(f"none of {len(todo)} shards holds an intact sample.{first}")
        index = _with_what_was_known(
            join(parts), [expected for _, expected in todo if expected is not None], result
        )
        save_index(index, folder)
        names = [shard.name for shard in index.shards]
        stage.replace_set(folder, {name: name for name in [*names, TABLE_NAME, INDEX_NAME]})
    except BaseException as error:
        stage.clear()
        if isinstance(error, OSError):
            raise StorageError(
                f"{result.out} cannot be written: {error.strerror}. Free some space, or choose "
                "another folder."
            ) from error
        raise
    result.shards, result.samples = len(index.shards), len(index)
    result.bytes = sum(shard.bytes for shard in index.shards)
    return result


# --- shards ---------------------------------------------------------------------------------------


def _one(
    path: str,
    expected: Index | None,
    folder: str,
    result: Repair,
    decode: bool,
    tick: Callable[[int], None],
) -> Index | None:
    """Write one shard; return its index, None if nothing of it is intact."""
    shown = shown_path(path)
    try:
        with ForwardReader(path, threading.Event(), tick) as reader:
            saved = recover(reader, expected)
    except WdstrainError as error:
        finding = finding_of(shown, error)
        count = len(expected) if expected is not None else 0
        lost = f"; its {count} samples are lost" if count else ""
        result.findings.append(finding._replace(reason=finding.reason + lost))
        result.lost += count
        return None
    readers = FieldReaders(expected.labels if expected is not None else ()) if decode else None
    split, lost_here = expected.shards[0].split if expected is not None else "", saved.lost
    try:
        with open_source(path) as source:
            entries = _entries(source, saved.intact, readers, lost_here, shown)
            index = write_samples(
                os.path.join(folder, name_of(path)), split, entries, lambda samples, size: None
            )
    except OSError as error:
        raise StorageError(
            f"{result.out} cannot be written: {error.strerror}. Free some space, or choose another "
            "folder."
        ) from error
    result.lost += len(lost_here)
    result.findings += [*lost_here[:_LISTED], *saved.gaps]
    if len(lost_here) > _LISTED:
        result.findings.append(
            Finding(shown, "", "", 0, f"has lost {len(lost_here) - _LISTED} more samples")
        )
    if not len(index):
        os.unlink(index.shards[0].path)
        return None
    return index


def _entries(
    source: Source,
    intact: Iterator[IntactSample],
    readers: FieldReaders | None,
    lost: list[Finding],
    shown: str,
) -> Iterator[tuple[str, list[Part]]]:
    """Yield the samples to write. A sample whose bytes prove to be damaged is added to `lost`."""
    for sample in intact:
        parts: list[Part] = []
        why = _refusal(sample)
        at = ("", sample.start)
        for name, offset, size, crc in [] if why else sample.members:
            at = (name, offset)
            data = source.read(offset, size)
            if crc32(data) != crc:
                why = "its bytes changed while they were read"
            elif sample.is_suspect and holds_header(data):
                why = "the next sample begins within it: bytes before that are missing"
            elif readers is not None and (read := readers.of(name)) is not None:
                why = decode_error(read, data)
            if why:
                break
            parts.append((name, data))
        if why:
            lost.append(Finding(shown, sample.key, at[0], at[1], why))
        else:
            yield sample.key, parts


def _refusal(sample: IntactSample) -> str:
    """Return the reason that a sample cannot be copied; "" if it can."""
    if sum(size for _, _, size, _ in sample.members) > _MOST:
        return f"it claims more than {_MOST >> 30} GiB"
    return (
        "a NUL character is in its name"
        if any("\0" in name for name in [sample.key, *(m[0] for m in sample.members)])
        else ""
    )


# --- the set --------------------------------------------------------------------------------------


def _listed(urls: Urls, result: Repair) -> list[tuple[str, Index | None]]:
    """Return the shards with what their index says. A damaged index is not used, and reported."""
    todo: dict[str, Index | None] = {}
    files = IndexFiles()
    for path in expand(urls):
        folder = os.path.dirname(path)
        if not is_remote(path):
            check_finished(folder)
        try:
            todo.update(files.each(path))
        except ShardError as error:
            if is_remote(path) and is_json(path):
                raise
            note = f"repaired without an index, by headers alone: {error}"
            result.notes += [note] if note not in result.notes else []
            todo.update({tar: None for tar in (tars_of(folder) if is_json(path) else [path])})
    return list(todo.items())


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
