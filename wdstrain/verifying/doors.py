"""Reading every shard and comparing it with what is promised of it.

Shards are passed once each, side by side in threads: reading and hashing leave the interpreter to each other, and a thread
costs no copy of an index. Nothing is repaired and nothing stops at the first finding; what could not be checked is counted.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from wdstrain.errors import UsageError, WdstrainError
from wdstrain.loader.stats import Finding
from wdstrain.runtime.machine import cores
from wdstrain.shards.index import Index
from wdstrain.shards.index_io import is_wdstrain_index, load
from wdstrain.shards.resolve import shard_index, tars_of
from wdstrain.shards.tar import Walk
from wdstrain.storage.addresses import Urls, check_finished, expand, is_json
from wdstrain.storage.local import open_source
from wdstrain.storage.remote import is_remote, redacted
from wdstrain.verifying.census import Census
from wdstrain.verifying.inspection import Inspection, inspect
from wdstrain.verifying.passage import Passage
from wdstrain.verifying.salvage import Damage, salvage
from wdstrain.verifying.trial import Trials

_LOOK = 0.1  # seconds between looks at what threads have done


@dataclass
class Verification:
    """What was read and what was found wrong.

    findings: each with shard, key, field, offset, reason and `sentence`, which is its `str`. fields: samples that have each.
    columns: samples whose value in the index was compared with the shard, by column.
    decoded, not_decoded: members by field, if that was asked for. repeated: samples whose key another shard has with other
    bytes, which is no finding.
    """

    shards: int = 0
    samples: int = 0
    bytes: int = 0
    unindexed: int = (
        0  # shards of which only the structure could be checked, since no index has checksums
    )
    findings: list[Finding] = field(default_factory=list)
    fields: dict[str, int] = field(default_factory=dict)
    columns: dict[str, int] = field(default_factory=dict)
    decoded: dict[str, int] = field(default_factory=dict)
    not_decoded: dict[str, int] = field(default_factory=dict)
    ignored: dict[str, int] = field(
        default_factory=dict
    )  # members that are no part of a sample, by reason
    repeated: int = 0

    @property
    def ok(self) -> bool:
        return not self.findings

    def report(self) -> dict[str, Any]:
        """All of it, JSON-able."""
        findings = [{**one._asdict(), "sentence": one.sentence} for one in self.findings]
        return {**vars(self), "findings": findings, "ok": self.ok}


Progress = Callable[[Verification, int | None], None]


def verify(
    urls: Urls,
    *,
    decode: bool = False,
    jobs: int | None = None,
    need: str | Sequence[str] = (),
    progress: Progress | None = None,
) -> Verification:
    """Read all shards that `urls` mean, each once, and compare them with their index.

    decode: every picture is decoded, every json, npy, txt and label parsed; labels that are NaN or infinite are one finding of
    each shard. jobs: threads; default one per core. need: fields that every sample has, as in ["jpg;png", "cls"]. progress:
    told several times a second, with what was read so far and the bytes in all, None if a server has not said. Raises UsageError for an address that means nothing; what is wrong
    with shards and indexes is in `findings`.
    """
    if jobs is not None and jobs < 1:
        raise UsageError(f"jobs={jobs} is below 1.")
    result = Verification()
    todo = list(dict(_listed(urls, result)).items())
    work = _Work(todo, decode, jobs or cores())
    census = Census(_needed(need))
    tried: Counter[str] = Counter()
    untried: Counter[str] = Counter()
    ignored: Counter[str] = Counter()
    compared: Counter[str] = Counter()

    def took(done: Inspection, promised: Index | None) -> None:
        result.shards += 1
        result.findings += done.findings
        compared.update(done.columns)
        labels = [label.field for label in promised.labels] if promised is not None else []
        census.add(done, labels, promised.shards[0].split if promised is not None else "")
        result.samples = census.samples
        if done.found is not None:
            result.unindexed += not done.compared
            tried.update(done.found.tried)
            untried.update(done.found.untried)
            ignored.update(done.found.walk.ignored)

    def told() -> None:
        result.bytes = work.bytes
        if progress is not None:
            progress(result, work.total)

    work.run(took, told)
    result.findings += census.missing() + census.twins(_key_at) + census.divided(_key_at)
    result.columns = dict(compared)
    result.fields, result.repeated = dict(census.fields.most_common()), census.repeated
    result.decoded, result.not_decoded, result.ignored = dict(tried), dict(untried), dict(ignored)
    told()
    return result


class _Work:
    """Shards, passed side by side."""

    def __init__(self, todo: list[tuple[str, Index | None]], decode: bool, jobs: int) -> None:
        self._todo, self._decode, self._jobs = todo, decode, jobs
        self.bytes = 0
        self.total = sum_of(todo)
        self._lock, self._stopping = threading.Lock(), threading.Event()
        self._open: set[Passage] = set()

    def run(
        self, took: Callable[[Inspection, Index | None], None], told: Callable[[], None]
    ) -> None:
        """Look at all of them; `took` is given each in order. An interruption ends what is under way."""
        decoders = (
            ThreadPoolExecutor(self._jobs, "wdstrain-decode") if self._decode else nullcontext()
        )
        with ThreadPoolExecutor(self._jobs, "wdstrain-verify") as threads, decoders as trying:
            try:
                futures = [
                    threads.submit(self._one, path, promised, trying)
                    for path, promised in self._todo
                ]
                waiting: set[Future[Inspection]] = set(futures)
                place = 0
                while place < len(futures):
                    waiting -= wait(waiting, _LOOK, FIRST_COMPLETED).done
                    while place < len(futures) and futures[place].done():
                        took(futures[place].result(), self._todo[place][1])
                        futures[place] = Future()  # its arrays are with whoever took them
                        place += 1
                    told()
            except BaseException:
                self._stop()
                threads.shutdown(wait=False, cancel_futures=True)
                raise

    def _one(
        self, path: str, promised: Index | None, threads: ThreadPoolExecutor | None
    ) -> Inspection:
        shown = redacted(path) if is_remote(path) else path
        try:
            with Passage(path, self._stopping, self._tick) as passage:
                with self._lock:
                    self._open.add(passage)
                try:
                    return inspect(
                        passage, promised, path, Trials(threads) if threads is not None else None
                    )
                finally:
                    with self._lock:
                        self._open.discard(passage)
        except WdstrainError as error:
            return Inspection(path, shown, [finding_of(shown, error)])

    def _tick(self, size: int) -> None:
        with self._lock:
            self.bytes += size

    def _stop(self) -> None:
        self._stopping.set()
        with self._lock:
            for passage in self._open:
                passage.interrupt()


# --- parts -----------------------------------------------------------------------------------------------------------


def _listed(urls: Urls, result: Verification) -> list[tuple[str, Index | None]]:
    """The shards that addresses mean, with what their index promises; what is wrong with indexes is a finding."""
    todo: list[tuple[str, Index | None]] = []
    known: dict[str, Index | None] = {}
    for path in expand(urls):
        shown = redacted(path) if is_remote(path) else path
        try:
            if not is_remote(path):
                check_finished(os.path.dirname(path))
            if is_json(path) and not is_wdstrain_index(path):
                todo += [(tar, None) for tar in tars_of(os.path.dirname(path))]
            elif not is_json(path):
                todo.append((path, shard_index(path, known)))
            else:
                index = load(path)
                todo += [(shard.path, index.pick([i])) for i, shard in enumerate(index.shards)]
                listed = {shard.path for shard in index.shards}
                here = [] if is_remote(path) else tars_of(os.path.dirname(path))
                reason = "lies beside the index, which does not list it"
                result.findings += [
                    Finding(tar, "", "", 0, reason) for tar in here if tar not in listed
                ]
        except WdstrainError as error:
            found = finding_of(shown, error)
            reasons = [one.reason for one in result.findings]
            result.findings += [found] if found.reason not in reasons else []
    return todo


def finding_of(shown: str, error: WdstrainError) -> Finding:
    """A finding from an error's sentence, which most often begins with the name."""
    text = str(error).removesuffix(".")
    if text.startswith(f"{shown} "):
        return Finding(shown, "", "", 0, text[len(shown) + 1 :])
    return Finding(shown, "", "", 0, f"cannot be checked: {text.removeprefix(f'{shown}: ')}")


def _needed(need: str | Sequence[str]) -> list[str]:
    groups = need.split(",") if isinstance(need, str) else list(need)
    found = [
        ";".join(name.strip().lower() for name in group.split(";") if name.strip())
        for group in groups
    ]
    if any(not one for one in found) and need:
        raise UsageError(
            f"need={need!r} names no field in one place. Write for example 'jpg;png,cls'."
        )
    return [one for one in found if one]


def sum_of(todo: list[tuple[str, Index | None]]) -> int | None:
    """Bytes of all shards, None if that is not known."""
    total = 0
    for path, promised in todo:
        try:
            total += (
                promised.shards[0].bytes
                if promised is not None and is_remote(path)
                else os.stat(path).st_size
            )
        except OSError:
            if is_remote(path):
                return None
    return total


def _key_at(path: str, offset: int) -> str:
    """The key of the sample that begins at an offset; empty where none does any more."""
    try:
        with open_source(path) as source:
            read = lambda start, length: source.read(offset + start, length)  # noqa: E731
            first = next(
                salvage(read, source.size - offset, lambda key, field, data, size: (0, 0), Walk()),
                None,
            )
            return "" if first is None or isinstance(first, Damage) else first.key
    except WdstrainError:
        return ""
