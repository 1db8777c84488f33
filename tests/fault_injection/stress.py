"""Check that samples stay exact and memory flat under faults, kills and a small cache.

    .venv/bin/python -m tests.fault_injection.stress            (ten minutes; --minutes 1 for a short run)

Eight readers with four worker processes each use one server, which breaks every sixth response
(`faulty_server.py`). They share a cache that holds half of the set, so shards are evicted all the
time. Each reader runs epoch after epoch with its own seed, in one of three ways:

    killed       SIGKILL at a random moment, then a restart from the last saved state
    breaks off   leaves the loop at random steps and resumes, in the same loader or in a new one
    steady       is not disturbed

Each batch is compared with the plan and with the bytes that Python's tarfile reads: each sample
once, in the planned order, with its bytes. A chain of digests covers each epoch, across breaks and
kills. At the end some epochs are read again from the disk by a loader without workers, and must
have the same digests.

Process trees are measured from their first epoch after a start: Pss of anonymous and shared memory,
descriptors, threads. The 90th percentiles of the first and the last third are compared. (A median
would show how long a reader had one fetching thread instead of six, after a server that ignores
ranges.) A short run has few measurements, so in a run of a minute the sum is judged instead of each
tree. The exit status is 1 if anything is wrong, also if a process does not end when asked.

Last results:

    2 cores, no GPU, Python 3.11, torch 2.15.0, 2026-11-22
    8 readers x 4 workers, 10.0 minutes
    epochs from their first batch to their last                               1787
    samples told, and those of killed passes beside them                   7089400
    passes that began within an epoch                                          399
    readers killed and started again                                            41
    wrong epochs                                                                 0
    requests                                                                 29197
    MB served, MB from the cache                                      49036, 42759
    faults                                                                    4688
        cut off in the head                                                    365
        in chunks                                                              353
        length too short                                                       351
        reset in the body                                                      341
        no answer                                                              338
        busy: 503, 429, 500                                                    338
        cut off in the body                                                    337
        nonsense for a head                                                    337
        late                                                                   322
        reset in the head                                                      321
        stalls for a while                                                     320
        length too long                                                        317
        trickles                                                               306
        a byte damaged                                                         227
        range ignored                                                           63
        hangs                                                                   52
    retries told by the readers, samples read again                      2556, 161
    warnings of the readers                                                      8
    most bytes in the cache, its limit                          21968452, 21969408

    first and last third       epochs kills     memory, MB  descriptors    threads
    reader 0, killed              109    14        492 492      205 205      30 30
    reader 1, breaks off          333     0        476 512      206 204      26 26
    reader 2, steady              155     0        495 497      202 203      26 25
    reader 3, killed              267    14        494 493      182 183      26 26
    reader 4, breaks off          162     0        471 475      230 229      30 30
    reader 5, steady              378     0        494 498      179 179      21 21
    reader 6, killed              142    13        492 492      206 206      30 30
    reader 7, breaks off          241     0        497 474      207 207      26 26
    all readers                  1787    41      3911 3932    1617 1616    215 214
    server                                           31 31        57 54      42 40

    8 x ... the fetched bytes differ from the index (sha256). The shard is not kept in the cache.

    exact, and flat
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import io
import json
import logging
import multiprocessing
import os
import random
import re
import shutil
import signal
import statistics
import sys
import tarfile
import tempfile
import textwrap
import time
import traceback
import urllib.request
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np

import wdstrain as wt
from tests.fault_injection.faulty_server import FAULTS, RARE, serve
from wdstrain.decode.fields import Field
from wdstrain.runtime import child_process

SHARDS, OF_SHARD, VALUES = 8, 500, 8192  # 43 MB in shards of 5.4 MB, which are two requests each
BATCH, WINDOW = 50, 1000
WAYS = ("killed", "breaks off", "steady")
FLAT = 0.10  # most that it may grow from the first third to the last: of all readers, of the server, of one tree
TICK, MEASURED = (
    0.1,
    300,
)  # seconds between two looks at the readers; measurements, at most one a second
WHAT = ("memory", "files", "threads")
ENOUGH, MANY = (
    5,
    30,
)  # measurements in a third, below which nothing is said of a tree, and below which it is shown and not judged
STARTED, ENDED = (
    240.0,
    90.0,
)  # seconds that all readers have to begin and to end, on a machine that is busy
COSTS = ("samples", "retries", "reread", "bad", "fetched", "cached")  # of a pass's report
AGAIN = 2  # epochs of each reader that are read once more from the disk

_SPAWN = multiprocessing.get_context("spawn")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    words = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    place = Path(tempfile.mkdtemp(prefix="wdstrain-stress-"))
    try:
        with Load(place, words.minutes * 60, words.processes, words.workers, words.seed) as load:
            load.run()
        status = report(load)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    sys.exit(status)


# --- a reader ---


@dataclass(frozen=True)
class Reader:
    """Parameters of a reader process."""

    number: int
    way: str
    url: str
    place: str
    workers: int
    seed: int
    limit: int

    @property
    def log(self) -> Path:
        return Path(self.place, f"reader-{self.number}.jsonl")

    @property
    def said(self) -> Path:
        """Return the stderr of the reader and its workers: empty, unless it is killed."""
        return Path(self.place, f"reader-{self.number}.err")

    @property
    def saved(self) -> Path:
        return Path(self.place, f"reader-{self.number}.json")

    def loader(self, urls: str, workers: int, **options: Any) -> wt.Loader:
        fields: dict[str, Field] = {
            "x": wt.array("x.npy", shape=(VALUES,), dtype="uint8"),
            "txt": wt.text("txt"),
        }
        return wt.Loader(
            urls,
            fields
            if self.number % 2
            else None,  # half of the readers get tensors in reused memory,
            None if self.number % 2 else example,  # the others what torch collates
            batch_size=BATCH,
            num_workers=workers,
            shuffle_buffer=WINDOW,
            seed=self.seed + self.number,
            **options,
        )


def read(reader: Reader) -> None:
    """Read until the file `stop` exists, and append a line to the log for each pass."""
    child_process.set_up_worker()
    multiprocessing.set_start_method(
        None, force=True
    )  # workers begin as they do on this system, not as this process did
    warnings.filterwarnings(
        "ignore", "This DataLoader will create"
    )  # more workers than cores are meant here
    with open(reader.log, "a", buffering=1) as log, open(reader.said, "a") as output:
        os.dup2(output.fileno(), 2)

        def tell(**values: object) -> None:
            log.write(json.dumps({"pid": os.getpid(), **values}) + "\n")

        logger, warned = logging.getLogger("wdstrain"), logging.Handler(logging.WARNING)
        warned.emit = lambda record: tell(warned=record.getMessage())  # type: ignore[method-assign]
        logger.addHandler(warned)
        try:
            _read(reader, tell)
        except BaseException:
            tell(error=traceback.format_exc())
            raise


def _read(reader: Reader, tell: Callable[..., None]) -> None:
    truth, rng = (
        [bytes.fromhex(text) for text in json.loads(Path(reader.place, "truth.json").read_text())],
        random.Random(),
    )

    def new() -> wt.Loader:
        return reader.loader(
            reader.url, reader.workers, cache_dir=f"{reader.place}/cache", cache_limit=reader.limit
        )

    loader, over = new(), Path(reader.place, "stop")
    saved = json.loads(reader.saved.read_text()) if reader.saved.exists() else None
    while not over.exists():
        if saved is not None:
            loader.load_state_dict(saved["state"])
        epoch, step = loader.next_position
        ids, begun = planned(loader, epoch), step
        chain = bytes.fromhex(saved["chain"]) if saved is not None and step else b""
        leave = rng.randrange(3 * len(loader)) if reader.way == "breaks off" else len(loader)
        for batch in loader:
            digests_read = digests(batch)
            if digests_read != [truth[i] for i in ids[step * BATCH : (step + 1) * BATCH]]:
                tell(wrong=f"epoch {epoch}, step {step}: {batch['__key__']}")
            chain, step = hashlib.blake2b(chain + b"".join(digests_read)).digest(), step + 1
            if step % 5 == 0 and step < len(loader):
                write(
                    reader.saved, json.dumps({"state": loader.state_dict(), "chain": chain.hex()})
                )
            if step > leave or over.exists():
                break
        whole, costs = step == len(loader), {name: loader.report()[name] for name in COSTS}
        tell(
            epoch=epoch, steps=[begun, step], chain=chain.hex() if whole else None, **costs
        )  # before its end is written down
        write(reader.saved, json.dumps({"state": loader.state_dict(), "chain": chain.hex()}))
        saved = json.loads(reader.saved.read_text())
        if not whole and rng.random() < 0.5:
            loader.close()
            loader = new()
    loader.close()


def example(sample: dict[str, Any]) -> dict[str, Any]:
    return {"x": np.load(io.BytesIO(sample["x.npy"])), "txt": sample["txt"].decode()}


def digests(batch: dict[str, Any]) -> list[bytes]:
    """Return a digest of each delivered sample: its key, its values, its text."""
    samples = zip(batch["__key__"], batch["x"], batch["txt"], strict=True)
    return [digest(key, values.numpy().tobytes(), text.encode()) for key, values, text in samples]


def digest(key: str, values: bytes, text: bytes) -> bytes:
    return hashlib.blake2b(key.encode() + b"\0" + values + text, digest_size=16).digest()


def planned(loader: wt.Loader, epoch: int) -> list[int]:
    """Return the samples of an epoch in the promised order, by their numbers in the set."""
    plan = loader.plan(epoch)
    assert isinstance(plan, wt.Plan)
    ids: list[int] = plan.delivery(0, 0, plan.steps).ids.tolist()
    return ids


def write(path: Path, text: str) -> None:
    """Write a complete file or none, since the writer may be killed."""
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").replace(path)


# --- the load ---


@dataclass
class Measured:
    memory: int  # bytes
    files: int
    threads: int


@dataclass
class Place:
    """State of a running reader, as its parent sees it."""

    reader: Reader
    process: BaseProcess | None = None
    started: float = 0.0  # by the clock of files
    began: bool = False  # since then
    due: float = 0.0  # when it will be killed
    kills: int = 0
    measured: list[Measured] = field(default_factory=list)


class Load:
    """Server, readers and measurements. All processes have ended when the context exits."""

    def __init__(
        self, place: Path, seconds: float, processes: int, workers: int, seed: int
    ) -> None:
        self.place, self.seconds, self.workers, self.rng = (
            place,
            seconds,
            workers,
            random.Random(seed),
        )
        self.wrong: list[str] = []
        self.cache_most = 0
        self.server_measured: list[Measured] = []
        self.counts: dict[str, int] = {}
        self.begun = self.ended = 0.0
        self.shards = make(place, seed)
        self.limit = sum(path.stat().st_size for path in self.shards) // 2
        (place / "cache").mkdir()
        parent_end, child_end = _SPAWN.Pipe()
        longest = seconds + 3 * STARTED + 2 * ENDED
        self.server = _SPAWN.Process(
            target=serve, args=(str(place / "shards"), seed, longest, child_end)
        )
        self.server.start()
        if not parent_end.poll(60):
            raise TimeoutError("the server did not begin")
        self.url = f"http://127.0.0.1:{parent_end.recv()}"
        ways = [(number, WAYS[number % len(WAYS)]) for number in range(processes)]
        self.places = [
            Place(Reader(number, way, self.url, str(place), workers, seed, self.limit))
            for number, way in ways
        ]

    def __enter__(self) -> Load:
        return self

    def __exit__(self, *_: object) -> None:
        """End the running processes by id; workers end with their reader."""
        for process in [place.process for place in self.places] + [self.server]:
            if process is not None and process.is_alive():
                process.kill()
            if process is not None and process.pid is not None:
                process.join()

    def run(self) -> None:
        for place in self.places:
            self._start(place)
        self._wait(STARTED, "begin", lambda: all(self._has_begun(place) for place in self.places))
        # Memory that a reader allocates once is allocated by now; a slow machine took 20 s for it.
        self._wait(STARTED, "come to the end of an epoch", self._is_warm)
        self.begun, measured = time.monotonic(), 0.0
        end = self.begun + self.seconds
        while not self.wrong and (
            (now := time.monotonic()) < end or (now < end + STARTED and not self._is_tried())
        ):
            for place in self.places:
                self._look_after(place)
            if now >= measured + max(1.0, self.seconds / MEASURED):
                measured = now
                self._measure()
            time.sleep(TICK)
        self.ended = time.monotonic()
        self._end()

    def _start(self, place: Place) -> None:
        place.started, place.began, place.process = (
            time.time(),
            False,
            _SPAWN.Process(target=read, args=(place.reader,)),
        )
        place.process.start()

    def _has_begun(self, place: Place) -> bool:
        """Return whether it has saved a state since its start, so that it may be killed."""
        if not place.began and place.reader.saved.exists():
            place.began = place.reader.saved.stat().st_mtime > place.started
            place.due = time.monotonic() + self.rng.uniform(
                0, max(1.0, min(60.0, self.seconds / 4))
            )
        return place.began

    def _is_tried(self) -> bool:
        """Return whether every reader has completed an epoch, and the chosen ones were killed."""
        return self._is_warm() and all(
            place.kills for place in self.places if place.reader.way == "killed"
        )

    def _is_warm(self) -> bool:
        """Return whether every reader has completed an epoch."""
        return all(any(line.get("chain") for line in lines(place.reader)) for place in self.places)

    def _look_after(self, place: Place) -> None:
        assert place.process is not None
        if not place.process.is_alive():
            self.wrong.append(
                f"reader {place.reader.number} ended by itself, with status {place.process.exitcode}"
            )
        elif (
            self._has_begun(place) and place.reader.way == "killed" and place.due < time.monotonic()
        ):
            pids = tree(place.process.pid)
            place.process.kill()
            place.process.join()
            place.kills += 1
            self._wait(30, "end with their killed reader", lambda: not any(map(alive, pids)))
            self._start(place)

    def _end(self) -> None:
        (self.place / "stop").touch()
        running = [place.process for place in self.places if place.process is not None]
        pids = [pid for process in running for pid in tree(process.pid)]
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"{self.url}/.counts", timeout=60) as answer,
        ):
            self.counts = ast.literal_eval(answer.read().decode())
        self._wait(ENDED, "end", lambda: not any(process.is_alive() for process in running))
        self._wait(10, "end with their readers", lambda: not any(map(alive, pids)))
        self.wrong += [
            f"reader ended with status {process.exitcode}"
            for process in running
            if process.exitcode
        ]
        self.wrong += leftovers(self.place, self.shards)
        for place in self.places:
            self.wrong += checked_again(place.reader)

    def _wait(self, seconds: float, description: str, done: Callable[[], bool]) -> None:
        end = time.monotonic() + seconds
        while not done():
            if time.monotonic() > end:
                self.wrong.append(f"not all processes did {description} within {seconds:.0f} s")
                return
            time.sleep(TICK)

    def _measure(self) -> None:
        for place in self.places:
            assert place.process is not None
            passes = [line for line in lines(place.reader) if line.get("pid") == place.process.pid]
            pids = tree(place.process.pid)
            if passes and len(pids) == 1 + self.workers and (usage := measured(pids)):
                place.measured.append(usage)
        usage = measured(tree(self.server.pid))
        self.server_measured += [usage] if usage else []
        self.cache_most = max(self.cache_most, bytes_in(self.place / "cache"))
        if sys.stderr.isatty():
            epochs = sum(
                bool(line.get("chain")) for place in self.places for line in lines(place.reader)
            )
            sys.stderr.write(f"\r{time.monotonic() - self.begun:.0f} s: {epochs} epochs ")


def make(place: Path, seed: int) -> list[Path]:
    """Pack the shards, and return their contents according to tarfile."""
    rng = np.random.default_rng(seed)
    samples = (
        {
            "__key__": f"s{i:06d}",
            "x.npy": rng.integers(0, 256, VALUES, np.uint8),
            "txt": "word " * int(rng.integers(400)),
        }
        for i in range(SHARDS * OF_SHARD)
    )
    index = wt.pack(samples, str(place / "shards"), max_shard_samples=OF_SHARD, seed=seed)
    truth, paths = [], [Path(shard.path) for shard in index.shards]
    for path in paths:
        with tarfile.open(path) as tar:
            fields: dict[str, dict[str, bytes]] = {}
            for member in tar:
                key, _, name = member.name.partition(".")
                file = tar.extractfile(member)
                fields.setdefault(key, {})[name] = file.read() if file is not None else b""
        truth += [
            digest(key, values["x.npy"][-VALUES:], values["txt"]).hex()
            for key, values in fields.items()
        ]
    (place / "truth.json").write_text(json.dumps(truth))
    return paths


# --- measurements ---


def lines(reader: Reader) -> list[dict[str, Any]]:
    """Return the messages of a reader; the last line of a killed reader may be truncated."""
    messages = []
    for line in reader.log.read_text().splitlines() if reader.log.exists() else []:
        with contextlib.suppress(ValueError):
            messages.append(json.loads(line))
    return messages


def tree(pid: int | None) -> list[int]:
    """Return a process and its descendants."""
    pids = [pid] if pid is not None else []
    for pid_ in pids:
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{pid_}/task"):
                pids += [
                    int(word)
                    for word in Path(f"/proc/{pid_}/task/{task}/children").read_text().split()
                ]
    return pids


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def measured(pids: list[int]) -> Measured | None:
    """Return the sum over a process tree, or None if a part of it ended meanwhile."""
    memory = files = threads = 0
    try:
        for pid in pids:
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                memory += (
                    int(line.split()[1]) * 1024
                    if line.startswith(("Pss_Anon:", "Pss_Shmem:"))
                    else 0
                )
            files += len(os.listdir(f"/proc/{pid}/fd"))
            threads += len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return None
    return Measured(memory, files, threads)


def bytes_in(folder: Path) -> int:
    """Return the bytes of a cache: those of the files that two looks, one after the other, find."""
    looks = []
    for _ in range(2):
        sizes = {}
        for path in folder.glob("*/*"):
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                sizes[path.name, status.st_ino] = status.st_size
        looks.append(sizes)
    return sum(size for file, size in looks[0].items() if file in looks[1])


def leftovers(place: Path, shards: Sequence[Path]) -> Iterator[str]:
    """Return leftovers and wrong files after all processes have ended."""
    sums = {hashlib.sha256(path.read_bytes()).digest() for path in shards}
    for path in (place / "cache").glob("*/*"):
        if path.suffix == ".tar" and hashlib.sha256(path.read_bytes()).digest() not in sums:
            yield f"{path.name} in the cache is not one of the shards"
        elif path.name != "CACHEDIR.TAG" and not re.search(r"\.tar(\.\d+\.part)?$", path.name):
            yield f"{path.name} was left in the cache"


def checked_again(reader: Reader) -> Iterator[str]:
    """Check the digest chains of all epochs against the plan, and some against the disk."""
    chains = {line["epoch"]: line["chain"] for line in lines(reader) if line.get("chain")}
    local = reader.loader(f"{reader.place}/shards", 0)
    truth = [
        bytes.fromhex(text) for text in json.loads(Path(reader.place, "truth.json").read_text())
    ]
    again = set(random.Random(reader.number).sample(sorted(chains), min(AGAIN, len(chains))))
    for epoch, chain in chains.items():
        expected = [truth[i] for i in planned(local, epoch)]
        batches = [expected[at : at + BATCH] for at in range(0, len(expected), BATCH)]
        if chain_of(batches) != chain:
            yield f"epoch {epoch} of reader {reader.number} is not what was planned"
        if epoch in again and chain_of([digests(batch) for batch in local.epoch(epoch)]) != chain:
            yield f"epoch {epoch} of reader {reader.number} is not what the disk gives"
    local.close()
    if chains and sorted(chains) != list(range(max(chains) + 1)):
        yield f"reader {reader.number} left out epochs: {sorted(set(range(max(chains))) - set(chains))}"


def chain_of(batches: list[list[bytes]]) -> str:
    chain = b""
    for batch in batches:
        chain = hashlib.blake2b(chain + b"".join(batch)).digest()
    return chain.hex()


# --- report ---


def report(load: Load) -> int:
    """Print the findings; return 1 if there are any."""
    reported = [line for place in load.places for line in lines(place.reader)]
    passes, wrong = [line for line in reported if "steps" in line], load.wrong
    wrong += [
        str(line[word]).strip().splitlines()[-1]
        for line in reported
        for word in ("wrong", "error")
        if word in line
    ]
    total = Counter[str]()
    for line in passes:
        total.update({name: line[name] for name in COSTS})
    resumed, epochs = (
        sum(line["steps"][0] > 0 for line in passes),
        sum(bool(line["chain"]) for line in passes),
    )
    kills, faults = (
        sum(place.kills for place in load.places),
        {name: load.counts.get(name, 0) for name in FAULTS + RARE},
    )
    print(
        f"{len(load.places)} readers x {load.workers} workers, {(load.ended - load.begun) / 60:.1f} minutes"
    )
    _row("epochs from their first batch to their last", epochs)
    _row("samples told, and those of killed passes beside them", total["samples"])
    _row("passes that began within an epoch", resumed)
    _row("readers killed and started again", kills)
    _row("wrong epochs", len(wrong))
    _row("requests", load.counts.get("requests", 0))
    _row(
        "MB served, MB from the cache",
        f"{load.counts.get('bytes', 0) / 1e6:.0f}, {total['cached'] / 1e6:.0f}",
    )
    _row("faults", sum(faults.values()))
    for name, count in sorted(faults.items(), key=lambda place: -place[1]):
        _row(f"    {name}", count)
    _row(
        "retries told by the readers, samples read again", f"{total['retries']}, {total['reread']}"
    )
    warned = Counter(
        re.sub(r"\S*\d\S*", "...", line["warned"].splitlines()[0])
        for line in reported
        if "warned" in line
    )
    _row("warnings of the readers", warned.total())
    most, limit = load.cache_most, load.limit
    _row("most bytes in the cache, its limit", f"{most}, {limit}")
    wrong += (
        [f"the cache held {most} bytes, {most - limit} above its limit"] if most > limit else []
    )
    wrong += [f"{total['bad']} samples were replaced"] if total["bad"] else []
    wrong += [] if epochs and sum(faults.values()) else ["nothing was put to the test"]
    print(
        f"\n{'first and last third':<26}{'epochs':>7}{'kills':>6}{'memory, MB':>15}{'descriptors':>13}{'threads':>11}"
    )
    first, last = [0.0] * 3, [0.0] * 3
    for place in load.places:
        if place.reader.way != "killed" and (stderr := place.reader.said.read_text().strip()):
            wrong.append(
                f"reader {place.reader.number}, {place.reader.way}, says on stderr: {stderr[-3000:]}"
            )
        own = [line for line in lines(place.reader) if line.get("chain")]
        name = f"reader {place.reader.number}, {place.reader.way}"
        before, after, bad = _flat(name, place.measured, f"{len(own):>7}{place.kills:>6}")
        first, last = (
            [a + b for a, b in zip(first, before, strict=True)],
            [a + b for a, b in zip(last, after, strict=True)],
        )
        wrong += bad
    wrong += _compared("all readers", f"{epochs:>7}{kills:>6}", first, last)
    wrong += _flat("server", load.server_measured, "")[2]
    wrong = list(dict.fromkeys(wrong))
    for text, count in warned.most_common():
        print(f"\n{textwrap.fill(f'{count} x {text}', 80)}")
    print(f"\n{'exact, and flat' if not wrong else f'{len(wrong)} THINGS ARE WRONG'}")
    for description in wrong:
        print(f"    {description}")
    return int(bool(wrong))


def _row(name: str, value: object) -> None:
    print(f"{name:<54}{value:>24}")


def _flat(
    name: str, samples: list[Measured], counts: str
) -> tuple[list[float], list[float], list[str]]:
    """Print a line of the table: memory, descriptors and threads at start and end, and growth."""
    third = len(samples) // 3
    if third < ENOUGH:
        print(f"{name:<26}{counts:<13}{'too few measurements':>39}")
        return [0.0] * 3, [0.0] * 3, []
    before, after = (
        [
            float(statistics.quantiles((getattr(item, description) for item in part), n=10)[-1])
            for description in WHAT
        ]
        for part in (samples[:third], samples[-third:])
    )
    grown = _compared(name, counts, before, after)
    return before, after, grown if third >= MANY else []


def _compared(name: str, counts: str, before: list[float], after: list[float]) -> list[str]:
    pairs = [
        f"{a / unit:.0f} {b / unit:.0f}"
        for a, b, unit in zip(before, after, (1e6, 1, 1), strict=True)
    ]
    print(f"{name:<26}{counts:<13}{pairs[0]:>15}{pairs[1]:>13}{pairs[2]:>11}")
    grown = [b > (1 + FLAT) * a + 2 for a, b in zip(before, after, strict=True)]
    return [
        f"{name}: {description} {pair}, that is not flat"
        for description, pair, bad in zip(WHAT, pairs, grown, strict=True)
        if bad
    ]


if __name__ == "__main__":
    main()
