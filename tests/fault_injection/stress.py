"""Check that samples stay exact and memory flat under faults, kills and a small cache.

    .venv/bin/python -m tests.fault_injection.stress     (ten minutes; --minutes 1 for a short run)

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
descriptors, threads. The 90th percentiles of the first and the last third are compared: of all
readers, and of each tree with enough measurements. The exit status is 1 if anything
is wrong, also if a process does not end when asked. `docs/robustness.md` has the last results.
"""

from __future__ import annotations

import argparse
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
from tests.fault_injection.process_faults import descendants, is_alive
from wdstrain.runtime.workers import set_up_worker

SHARDS, OF_SHARD, VALUES = 8, 500, 8192  # 43 MB in shards of 5.4 MB, which are two requests each
BATCH, WINDOW = 50, 1000
WAYS = ("killed", "breaks off", "steady")
FLAT = 0.10  # share that a measure may grow from the first third to the last
TICK, MEASURED = 0.1, 300  # seconds between two looks; measurements, at most one a second
MEASURES = (("memory", 1e6), ("descriptors", 1), ("threads", 1))  # and their units in the table
ENOUGH, MANY = 5, 30  # measurements of a third to show a tree, and to judge it alone
STARTED, ENDED = 240.0, 90.0  # seconds that all readers have to begin and to end
COSTS = ("samples", "retries", "reread", "bad", "fetched", "cached")  # of a pass's report
AGAIN = 2  # epochs of each reader that are read once more from the disk

_SPAWN = multiprocessing.get_context("spawn")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
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
    """Parameters of a reader process, and its files."""

    number: int
    way: str
    url: str
    place: Path
    workers: int
    seed: int
    limit: int

    def path(self, ending: str) -> Path:
        """jsonl: its log. json: its saved state. err: its stderr, empty unless it is killed."""
        return self.place / f"reader-{self.number}.{ending}"

    def loader(self, urls: str, workers: int, **options: Any) -> wt.Loader:
        """Half of the readers get tensors in reused memory, the others what torch collates."""
        fields: Any = {"x": wt.array("x.npy", shape=(VALUES,), dtype="uint8")}
        fields["txt"] = wt.text("txt")
        given = {"fields": fields} if self.number % 2 else {"transform": example}
        options |= {"batch_size": BATCH, "num_workers": workers, "shuffle_buffer": WINDOW}
        return wt.Loader(urls, seed=self.seed + self.number, **given, **options)

    def lines(self) -> list[dict[str, Any]]:
        """Return its messages; the last line of a killed reader may be truncated."""
        messages = []
        for line in (
            self.path("jsonl").read_text().splitlines() if self.path("jsonl").exists() else ()
        ):
            with contextlib.suppress(ValueError):
                messages.append(json.loads(line))
        return messages

    def truth(self) -> list[bytes]:
        """Return the digest of each sample."""
        return [bytes.fromhex(text) for text in json.loads((self.place / "truth.json").read_text())]


def read(reader: Reader) -> None:
    """Read until the file `stop` exists, and append a line to the log for each pass."""
    set_up_worker()
    multiprocessing.set_start_method(None, force=True)  # workers begin as on this system
    warnings.filterwarnings("ignore", "This DataLoader will create")  # more than cores: meant here
    with (
        open(reader.path("jsonl"), "a", buffering=1) as log,
        open(reader.path("err"), "a") as output,
    ):
        os.dup2(output.fileno(), 2)

        def tell(**values: object) -> None:
            log.write(json.dumps({"pid": os.getpid(), **values}) + "\n")

        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: tell(warned=record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("wdstrain").addHandler(handler)
        try:
            _read(reader, tell)
        except BaseException:
            tell(error=traceback.format_exc())
            raise


def _read(reader: Reader, tell: Callable[..., None]) -> None:
    truth, rng, cache = reader.truth(), random.Random(), reader.place / "cache"

    def new() -> wt.Loader:
        options = {"cache_dir": str(cache), "cache_limit": reader.limit}
        return reader.loader(reader.url, reader.workers, **options)

    def save() -> None:
        """Write a complete file or none, since the reader may be killed."""
        text = json.dumps({"state": loader.state_dict(), "chain": chain.hex()})
        reader.path("new").write_text(text)
        reader.path("new").replace(reader.path("json"))

    loader, over = new(), reader.place / "stop"
    while not over.exists():
        chain = b""
        if reader.path("json").exists():
            saved = json.loads(reader.path("json").read_text())
            loader.load_state_dict(saved["state"])
            chain = bytes.fromhex(saved["chain"]) if loader.next_position[1] else b""
        epoch, step = loader.next_position
        ids, begun = planned(loader, epoch), step
        leave = rng.randrange(3 * len(loader)) if reader.way == "breaks off" else len(loader)
        for batch in loader:
            actual = digests(batch)
            if actual != [truth[i] for i in ids[step * BATCH : (step + 1) * BATCH]]:
                tell(wrong=f"epoch {epoch}, step {step}: {batch['__key__']}")
            chain, step = chained(chain, actual), step + 1
            if step % 5 == 0 and step < len(loader):
                save()
            if step > leave or over.exists():
                break
        is_whole, costs = step == len(loader), {name: loader.report()[name] for name in COSTS}
        tell(epoch=epoch, steps=[begun, step], chain=chain.hex() if is_whole else None, **costs)
        save()
        if not is_whole and rng.random() < 0.5:
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


def chained(chain: bytes, batch: list[bytes]) -> bytes:
    return hashlib.blake2b(chain + b"".join(batch)).digest()


def planned(loader: wt.Loader, epoch: int) -> list[int]:
    """Return the samples of an epoch in the promised order, by their numbers in the set."""
    plan = loader.plan(epoch)
    assert isinstance(plan, wt.Plan)
    ids: list[int] = plan.delivery(0, 0, plan.steps).ids.tolist()
    return ids


# --- the load ---

Measured = tuple[float, ...]  # bytes, descriptors and threads of a process tree


@dataclass
class Running:
    """A running reader, as its parent sees it. due: when it will be killed."""

    reader: Reader
    process: BaseProcess
    started: float  # by the clock of files
    began: bool = False  # it has saved a state since its start, so that it may be killed
    due: float = 0.0
    kills: int = 0
    measured: list[Measured] = field(default_factory=list)


class Load:
    """Server, readers and measurements. All processes have ended when the context exits."""

    def __init__(self, place: Path, seconds: float, count: int, workers: int, seed: int) -> None:
        self.place, self.seconds, self.workers = place, seconds, workers
        self.rng, self.wrong, self.cache_most = random.Random(seed), list[str](), 0
        self.counts: dict[str, int] = {}
        self.begun = self.ended = 0.0
        self.shards = make(place, seed)
        self.limit = sum(path.stat().st_size for path in self.shards) // 2
        (place / "cache").mkdir()
        self.server_pipe, child_end = _SPAWN.Pipe()
        longest = seconds + 3 * STARTED + 2 * ENDED
        words = (str(place / "shards"), seed, longest, child_end)
        self.server = _SPAWN.Process(target=serve, args=words)
        self.server.start()
        if not self.server_pipe.poll(60):
            raise TimeoutError("the server did not begin")
        self.url = self.server_pipe.recv()
        self.running = list[Running]()
        for number in range(count):
            way = WAYS[number % len(WAYS)]
            reader = Reader(number, way, self.url, place, workers, seed, self.limit)
            self.running.append(Running(reader, *_started(reader)))

    def __enter__(self) -> Load:
        return self

    def __exit__(self, *_: object) -> None:
        """End the running processes by id; workers end with their reader."""
        for process in [item.process for item in self.running] + [self.server]:
            process.kill()
            process.join()

    def run(self) -> None:
        self._wait(STARTED, "begin", lambda: all(map(self._has_begun, self.running)))
        # Memory that a reader allocates once is allocated by the end of its first epoch.
        self._wait(STARTED, "come to the end of an epoch", self._is_warm)
        self.begun, measured = time.monotonic(), 0.0
        end = self.begun + self.seconds
        while not self.wrong and (
            (now := time.monotonic()) < end or (now < end + STARTED and not self._is_tried())
        ):
            for item in self.running:
                self._look_after(item)
            if now >= measured + max(1.0, self.seconds / MEASURED):
                measured = now
                self._measure()
            time.sleep(TICK)
        self.ended = time.monotonic()
        self._end()

    def _has_begun(self, item: Running) -> bool:
        saved = item.reader.path("json")
        if not item.began and saved.exists():
            item.began = saved.stat().st_mtime > item.started
            longest = max(1.0, min(60.0, self.seconds / 4))
            item.due = time.monotonic() + self.rng.uniform(0, longest)
        return item.began

    def _is_warm(self) -> bool:
        """Return whether every reader has completed an epoch."""
        return all(any(line.get("chain") for line in item.reader.lines()) for item in self.running)

    def _is_tried(self) -> bool:
        """Return whether every reader has completed an epoch, and the chosen ones were killed."""
        killed = [item.kills for item in self.running if item.reader.way == "killed"]
        return self._is_warm() and all(killed)

    def _look_after(self, item: Running) -> None:
        if not item.process.is_alive():
            status = item.process.exitcode
            self.wrong.append(f"reader {item.reader.number} ended by itself, with status {status}")
        elif self._has_begun(item) and item.reader.way == "killed" and item.due < time.monotonic():
            pids = tree(item.process.pid)
            item.process.kill()
            item.process.join()
            item.kills += 1
            self._wait(30, "end with their killed reader", lambda: not any(map(is_alive, pids)))
            (item.process, item.started), item.began = _started(item.reader), False

    def _end(self) -> None:
        (self.place / "stop").touch()
        processes = [item.process for item in self.running]
        pids = [pid for process in processes for pid in tree(process.pid)]
        self.server_pipe.send("counts")
        self.counts = self.server_pipe.recv()
        self._wait(ENDED, "end", lambda: not any(process.is_alive() for process in processes))
        self._wait(10, "end with their readers", lambda: not any(map(is_alive, pids)))
        statuses = [process.exitcode for process in processes if process.exitcode]
        self.wrong += [f"reader ended with status {status}" for status in statuses]
        self.wrong += leftovers(self.place, self.shards)
        for item in self.running:
            self.wrong += checked_again(item.reader)

    def _wait(self, seconds: float, description: str, done: Callable[[], bool]) -> None:
        end = time.monotonic() + seconds
        while not done():
            if time.monotonic() > end:
                self.wrong.append(f"not all processes did {description} within {seconds:.0f} s")
                return
            time.sleep(TICK)

    def _measure(self) -> None:
        for item in self.running:
            pids = tree(item.process.pid)
            is_warm = any(line.get("pid") == item.process.pid for line in item.reader.lines())
            if is_warm and len(pids) == 1 + self.workers:
                item.measured += measured(pids)
        self.cache_most = max(self.cache_most, bytes_in(self.place / "cache"))


def _started(reader: Reader) -> tuple[BaseProcess, float]:
    """Return the process of a reader, and the time of its start."""
    process = _SPAWN.Process(target=read, args=(reader,))
    started = time.time()
    process.start()
    return process, started


def make(place: Path, seed: int) -> list[Path]:
    """Pack the shards, and write the digests of their contents according to tarfile."""
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
        for key, values in fields.items():
            truth.append(digest(key, values["x.npy"][-VALUES:], values["txt"]).hex())
    (place / "truth.json").write_text(json.dumps(truth))
    return paths


def tree(pid: int | None) -> list[int]:
    """Return a process and its descendants."""
    return [] if pid is None else [pid, *descendants(pid)]


def measured(pids: list[int]) -> list[Measured]:
    """Return the sum over a process tree, in a list; an empty one if a part of it ended."""
    memory = files = threads = 0
    try:
        for pid in pids:
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith(("Pss_Anon:", "Pss_Shmem:")):
                    memory += int(line.split()[1]) * 1024
            files += len(os.listdir(f"/proc/{pid}/fd"))
            threads += len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return []
    return [(memory, files, threads)] if pids else []


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
    chains = {line["epoch"]: line["chain"] for line in reader.lines() if line.get("chain")}
    local, truth = reader.loader(f"{reader.place}/shards", 0), reader.truth()
    again = set(random.Random(reader.number).sample(sorted(chains), min(AGAIN, len(chains))))
    for epoch, chain in chains.items():
        expected = [truth[i] for i in planned(local, epoch)]
        batches = [expected[at : at + BATCH] for at in range(0, len(expected), BATCH)]
        if chain_of(batches) != chain:
            yield f"epoch {epoch} of reader {reader.number} is not what was planned"
        if epoch in again and chain_of([digests(batch) for batch in local.epoch(epoch)]) != chain:
            yield f"epoch {epoch} of reader {reader.number} is not what the disk gives"
    local.close()
    missing = sorted(set(range(max(chains, default=0))) - set(chains))
    if missing:
        yield f"reader {reader.number} left out epochs: {missing}"


def chain_of(batches: list[list[bytes]]) -> str:
    chain = b""
    for batch in batches:
        chain = chained(chain, batch)
    return chain.hex()


# --- report ---


def report(load: Load) -> int:
    """Print the findings; return 1 if there are any."""
    reported = [line for item in load.running for line in item.reader.lines()]
    passes = [line for line in reported if "steps" in line]
    wrong = load.wrong + [
        str(line[word]).strip().splitlines()[-1]
        for line in reported
        for word in ("wrong", "error")
        if word in line
    ]
    total = {name: sum(line[name] for line in passes) for name in COSTS}
    epochs = sum(bool(line["chain"]) for line in passes)
    kills = sum(item.kills for item in load.running)
    faults = {name: load.counts.get(name, 0) for name in (*FAULTS, *RARE)}
    minutes = (load.ended - load.begun) / 60
    print(f"{len(load.running)} readers x {load.workers} workers, {minutes:.1f} minutes")
    served = f"{load.counts.get('bytes', 0) / 1e6:.0f}, {total['cached'] / 1e6:.0f}"
    most, limit = load.cache_most, load.limit
    warned = Counter(
        re.sub(r"\S*\d\S*", "...", line["warned"].splitlines()[0])
        for line in reported
        if "warned" in line
    )
    for name, value in {
        "epochs from their first batch to their last": epochs,
        "samples told, and those of killed passes beside them": total["samples"],
        "passes that began within an epoch": sum(line["steps"][0] > 0 for line in passes),
        "readers killed and started again": kills,
        "wrong epochs": len(wrong),
        "requests": load.counts.get("requests", 0),
        "MB served, MB from the cache": served,
        "faults": sum(faults.values()),
        **{f"    {name}": faults[name] for name in sorted(faults, key=lambda n: -faults[n])},
        "retries told by the readers, samples read again": f"{total['retries']}, {total['reread']}",
        "warnings of the readers": warned.total(),
        "most bytes in the cache, its limit": f"{most}, {limit}",
    }.items():
        print(f"{name:<54}{value:>24}")
    if most > limit:
        wrong.append(f"the cache held {most} bytes, {most - limit} above its limit")
    if total["bad"]:
        wrong.append(f"{total['bad']} samples were replaced")
    if not epochs or not sum(faults.values()):
        wrong.append("nothing was put to the test")
    wrong += _growth(load, epochs, kills)
    for text, count in warned.most_common():
        print(f"\n{textwrap.fill(f'{count} x {text}', 80)}")
    wrong = list(dict.fromkeys(wrong))
    print(f"\n{'exact, and flat' if not wrong else f'{len(wrong)} THINGS ARE WRONG'}")
    for description in wrong:
        print(f"    {description}")
    return int(bool(wrong))


def _growth(load: Load, epochs: int, kills: int) -> Iterator[str]:
    """Print the measures of each tree in its first and last third; yield what grows."""
    head = f"{'epochs':>7}{'kills':>6}{'memory, MB':>15}{'descriptors':>13}{'threads':>11}"
    print(f"\n{'first and last third':<26}{head}")
    sums = np.zeros((2, len(MEASURES)))
    for item in load.running:
        reader = item.reader
        if reader.way != "killed" and (stderr := reader.path("err").read_text().strip()):
            yield f"reader {reader.number}, {reader.way}, says on stderr: {stderr[-3000:]}"
        own = sum(bool(line.get("chain")) for line in reader.lines())
        name = f"reader {reader.number}, {reader.way}"
        thirds = _thirds(item.measured)
        sums += 0 if thirds is None else thirds
        grown = _compared(name, f"{own:>7}{item.kills:>6}", thirds)
        yield from grown if len(item.measured) >= 3 * MANY else ()
    yield from _compared("all readers", f"{epochs:>7}{kills:>6}", sums)


def _thirds(samples: list[Measured]) -> Any:
    """Return the 90th percentiles of the first and the last third; None if there are too few."""
    third = len(samples) // 3
    if third < ENOUGH:
        return None
    parts = samples[:third], samples[-third:]
    return [[statistics.quantiles(c, n=10)[-1] for c in zip(*part, strict=True)] for part in parts]


def _compared(name: str, counts: str, thirds: Any) -> list[str]:
    """Print a line of the table; return the names of the figures that grow."""
    if thirds is None:
        print(f"{name:<26}{counts:<13}{'too few measurements':>39}")
        return []
    grown, cells = [], []
    for (measure, unit), before, after in zip(MEASURES, *thirds, strict=True):
        cells.append(f"{before / unit:.0f} {after / unit:.0f}")
        if after > (1 + FLAT) * before + 2:
            grown.append(f"{name}: {measure} {cells[-1]}, that is not flat")
    print(f"{name:<26}{counts:<13}{cells[0]:>15}{cells[1]:>13}{cells[2]:>11}")
    return grown


if __name__ == "__main__":
    main()
