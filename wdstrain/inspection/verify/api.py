"""`wt.verify`: read every shard once and compare it with its index.

Shards are read in parallel threads, because reading and hashing release the GIL. Nothing is
repaired, nothing stops at the first finding, and what could not be checked is counted.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from typing import Any

from wdstrain.errors import UsageError, WdstrainError
from wdstrain.inspection.options import VerifyOptions
from wdstrain.inspection.verify.cross_shard import CrossShardCheck, group_leaks
from wdstrain.inspection.verify.decode_check import DecodeCheck
from wdstrain.inspection.verify.forward_reader import ForwardReader
from wdstrain.inspection.verify.shard_check import ShardCheck, check_shard
from wdstrain.loader.stats import Finding
from wdstrain.runtime.machine import cores
from wdstrain.runtime.options import takes
from wdstrain.shards.index import Index, join
from wdstrain.shards.index_io import changed
from wdstrain.shards.resolve import IndexFiles, open_index, tars_of
from wdstrain.storage.addresses import INDEX_NAME, Urls, beside, expand, is_json
from wdstrain.storage.remote import is_remote, shown_path

_POLL = 0.1  # seconds between reports of progress

Shards = list[tuple[str, Index | None]]  # (path, index of this shard)


class HasFindings:
    """Base class of results with findings."""

    findings: list[Finding]

    @property
    def ok(self) -> bool:
        """Whether there are no findings."""
        return not self.findings

    def report(self) -> dict[str, Any]:
        """Return everything as JSON-able values."""
        findings = [
            {**finding._asdict(), "sentence": finding.sentence} for finding in self.findings
        ]
        return {**vars(self), "findings": findings, "ok": self.ok}


@dataclass
class Verification(HasFindings):
    """Result of `wt.verify`: counts and findings.

    findings: each with shard, key, field, offset, reason and `sentence`, which is its `str`.
    unindexed: shards without checksums, of which only the structure was checked. fields: samples
    that have each field. columns: samples whose value in the index was compared, by column.
    decoded, not_decoded: members by field, with `decode`. ignored: members that belong to no
    sample, by reason. repeated: samples whose key another shard has with other bytes (no finding).
    groups: number of groups that were compared between splits, by column. notes: what could not be
    checked.
    """

    shards: int = 0
    samples: int = 0
    bytes: int = 0
    unindexed: int = 0
    findings: list[Finding] = field(default_factory=list)
    fields: dict[str, int] = field(default_factory=dict)
    columns: dict[str, int] = field(default_factory=dict)
    decoded: dict[str, int] = field(default_factory=dict)
    not_decoded: dict[str, int] = field(default_factory=dict)
    ignored: dict[str, int] = field(default_factory=dict)
    repeated: int = 0
    groups: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@takes(VerifyOptions)
def verify(options: VerifyOptions) -> Verification:
    """Read shards, each once, and compare them with their index and with each other.

    Labels that are NaN or infinite are one finding per shard. Raises UsageError for addresses
    without shards. What is wrong with shards is in `findings`.
    """
    result = Verification()
    shards = list(dict(_listed(options.urls, result)).items())
    if options.where is not None:
        chosen = {shard.path for shard in open_index(options.urls).where(options.where).shards}
        shards = [(path, index) for path, index in shards if path in chosen]
    work = _Work(shards, options.decode, options.num_workers or cores())
    cross_shard = CrossShardCheck(_needed(options.need))
    totals = {name: Counter[str]() for name in ("columns", "decoded", "not_decoded", "ignored")}

    def report() -> None:
        result.bytes = work.bytes
        if options.progress is not None:
            options.progress(result, work.total)

    with closing(work.run(report)) as checks:
        for check, expected in checks:
            result.shards += 1
            result.findings += check.findings
            totals["columns"].update(check.columns)
            labels = [label.field for label in expected.labels] if expected is not None else []
            cross_shard.add(check, labels, expected.shards[0].split if expected is not None else "")
            result.samples = cross_shard.samples
            if check.scan is not None:
                result.unindexed += not check.compared
                totals["decoded"].update(check.scan.decoded)
                totals["not_decoded"].update(check.scan.not_decoded)
                totals["ignored"].update(check.scan.skipped_members)
    result.findings += cross_shard.findings()
    _check_groups(result, [index for _, index in shards if index is not None], options.group_by)
    for name, counts in totals.items():
        setattr(result, name, dict(counts))
    result.fields = dict(cross_shard.fields.most_common())
    result.repeated = cross_shard.repeated
    report()
    return result


class _Work:
    """Checks shards in threads."""

    def __init__(self, shards: Shards, decode: bool, num_workers: int) -> None:
        self._shards, self._decode, self._num_workers = shards, decode, num_workers
        self.bytes = 0
        self.total = total_bytes(shards)
        self._lock, self._stopping = threading.Lock(), threading.Event()
        self._open: set[ForwardReader] = set()

    def run(
        self, report: Callable[[], None]
    ) -> Generator[tuple[ShardCheck, Index | None], None, None]:
        """Yield the result of each shard, in order. An exception, also in the caller, ends all."""
        decoders = (
            ThreadPoolExecutor(self._num_workers, "wdstrain-decode")
            if self._decode
            else nullcontext()
        )
        with ThreadPoolExecutor(self._num_workers, "wdstrain-verify") as threads, decoders as pool:
            try:
                futures = [
                    threads.submit(self._check, path, expected, pool)
                    for path, expected in self._shards
                ]
                waiting: set[Future[ShardCheck]] = set(futures)
                for number, (_, expected) in enumerate(self._shards):
                    while not futures[number].done():
                        waiting -= wait(waiting, _POLL, FIRST_COMPLETED).done
                        report()
                    yield futures[number].result(), expected
                    waiting.discard(futures[number])
                    futures[number] = Future()  # frees its arrays
            except BaseException:
                self._stop()
                threads.shutdown(wait=False, cancel_futures=True)
                raise

    def _check(
        self, path: str, expected: Index | None, pool: ThreadPoolExecutor | None
    ) -> ShardCheck:
        shown = shown_path(path)
        try:
            with ForwardReader(path, self._stopping, self._tick) as reader:
                with self._lock:
                    self._open.add(reader)
                try:
                    decode_check = DecodeCheck(pool) if pool is not None else None
                    return check_shard(reader, expected, path, decode_check)
                finally:
                    with self._lock:
                        self._open.discard(reader)
        except WdstrainError as error:
            return ShardCheck(path, shown, [finding_of(shown, error)])

    def _tick(self, size: int) -> None:
        with self._lock:
            self.bytes += size

    def _stop(self) -> None:
        self._stopping.set()
        with self._lock:
            for reader in self._open:
                reader.interrupt()


# --- parts ----------------------------------------------------------------------------------------


def _check_groups(result: Verification, indexes: list[Index], group_by: str | None) -> None:
    """Find groups that are in two splits. group_by: a column; None: as the conversions recorded."""
    recorded = [index.info["split"].get("group_by") for index in indexes if _has_split(index)]
    for column in [group_by] if group_by else dict.fromkeys(filter(None, recorded)):
        try:
            if not indexes:
                raise UsageError("these shards have no index.")
            findings, result.groups[column] = group_leaks(join(indexes), column)
            result.findings += findings
        except UsageError as error:
            if group_by:
                raise
            result.notes.append(f"groups of {column!r} cannot be compared between splits: {error}")


def _has_split(index: Index) -> bool:
    return isinstance(index.info.get("split"), dict)


def _listed(urls: Urls, result: Verification) -> Shards:
    """Return the shards with what their index says. What is wrong with an index is a finding."""
    shards: Shards = []
    files = IndexFiles()
    for path in expand(urls):
        shown = shown_path(path)
        try:
            listed = dict(files.each(path))
            shards += listed.items()
            where = path if is_json(path) else beside(path, INDEX_NAME)
            reason = changed(where) if any(listed.values()) else ""
            if reason and shown_path(where) not in [other.shard for other in result.findings]:
                result.findings.append(Finding(shown_path(where), "", "", 0, reason))
            if is_json(path) and not is_remote(path):
                reason = "lies beside the index, which does not list it"
                result.findings += [
                    Finding(tar, "", "", 0, reason)
                    for tar in tars_of(os.path.dirname(path))
                    if tar not in listed
                ]
        except WdstrainError as error:
            finding = finding_of(shown, error)
            if finding.reason not in [other.reason for other in result.findings]:
                result.findings.append(finding)
    return shards


def finding_of(shown: str, error: WdstrainError) -> Finding:
    """Return a finding with the text of an error, which mostly starts with the shard's name."""
    text = str(error).removesuffix(".")
    if text.startswith(f"{shown} "):
        return Finding(shown, "", "", 0, text[len(shown) + 1 :])
    return Finding(shown, "", "", 0, f"cannot be checked: {text.removeprefix(f'{shown}: ')}")


def _needed(need: str | Sequence[str]) -> list[str]:
    """Return the needed fields; alternatives are separated by ";"."""
    groups = need.split(",") if isinstance(need, str) else list(need)
    cleaned = [
        ";".join(name.strip().lower() for name in group.split(";") if name.strip())
        for group in groups
    ]
    if need and not all(cleaned):
        raise UsageError(f"need={need!r}: a field is empty. Write for example 'jpg;png,cls'.")
    return [group for group in cleaned if group]


def total_bytes(shards: Shards) -> int | None:
    """Return the bytes of all shards; None if that is not known."""
    total = 0
    for path, expected in shards:
        try:
            if expected is not None and is_remote(path):
                total += expected.shards[0].bytes
            else:
                total += os.stat(path).st_size
        except OSError:
            if is_remote(path):
                return None
    return total
