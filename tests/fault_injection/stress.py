"""Check that samples stay exact and memory flat under faults, kills and a small cache.

    .venv/bin/python -m tests.fault_injection.stress     (ten minutes; --minutes 1 for a short run)

Eight readers with four worker processes each use one server, which breaks every sixth response
(`faulty_server.py`). They share a cache that holds half of the set, so shards are evicted all the
time. Each reader runs epoch after epoch with its own seed, in one of three ways:

    killed       SIGKILL at a random moment, then a restart from the last saved state
    breaks off   leaves the loop at random steps and resumes, in the same loader or in a new one
    steady       is not disturbed

Each batch is compared with the plan and with the bytes that Python's tarfile reads: each sample
once, in the planned order, with its bytes. A pass begins where the state was saved.

Process trees are measured from their first epoch after a start: Pss of anonymous and shared memory,
descriptors, threads. The 90th percentiles of the first and the last third are compared: of all
readers, and of each tree with enough measurements. The exit status is 1 if anything is wrong, also
if a process does not end when asked. `docs/robustness.md` has the last results.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import logging
import math
import multiprocessing
import os
import random
import re
import shutil
import signal
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np

import wdstrain as wt
from tests.fault_injection.faulty_server import FAULTS, RARE, serve
from tests.fault_injection.process_faults import descendants, is_alive
from tests.oracle.data_set import read_tars
from wdstrain.runtime.workers import set_up_worker

SHARDS, OF_SHARD, VALUES = 8, 500, 8192  # 43 MB in shards of 5.4 MB, which are two requests each
BATCH, WINDOW = 50, 1000
WAYS = ("killed", "breaks off", "steady")
FLAT = 0.10  # share that a measure may grow from the first third to the last
TICK, MEASURED = 0.1, 300  # seconds between two looks; measurements, at most one a second
MEASURES = {"MB": 1e6, "descriptors": 1, "threads": 1}  # and their units
ENOUGH, MANY = 5, 30  # measurements of a third to count a tree, and to judge it alone
STARTED, ENDED = 240.0, 90.0  # seconds that all readers have to begin and to end
COSTS = ("samples", "retries", "reread", "bad", "cached")  # of a pass's report
SPAWN = multiprocessing.get_context("spawn")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    for name, default in {"processes": 8, "workers": 4, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    words = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    place = Path(tempfile.mkdtemp(prefix="wdstrain-stress-"))
    try:
        load = Load(place, words.minutes * 60, words.processes, words.workers, words.seed)
        try:
            load.run()
        finally:
            load.kill()
        status = report(load)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    sys.exit(status)


# --- a reader ---


@dataclass(frozen=True)
class Reader:
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

    def loader(self) -> wt.Loader:
        """Half of the readers get tensors in reused memory, the others what torch collates."""
        fields: Any = {"x": wt.array("x.npy", shape=(VALUES,), dtype="uint8")}
        fields["txt"] = wt.text("txt")
        options = {"fields": fields} if self.number % 2 else {"transform": example}
        options |= {"batch_size": BATCH, "num_workers": self.workers, "shuffle_buffer": WINDOW}
        options |= {"cache_dir": str(self.place / "cache"), "cache_limit": self.limit}
        return wt.Loader(self.url, seed=self.seed + self.number, **options)

    def lines(self) -> list[dict[str, Any]]:
        """Return its messages; the last line of a killed reader may be truncated."""
        messages, path = list[dict[str, Any]](), self.path("jsonl")
        for line in path.read_text().splitlines() if path.exists() else ():
            with contextlib.suppress(ValueError):
                messages.append(json.loads(line))
        return messages

    def epochs(self) -> set[int]:
        return {line["epoch"] for line in self.lines() if line.get("is_whole")}


def read(reader: Reader) -> None:
    """Read until the file `stop` exists, and append a line to the log for each pass."""
    set_up_worker()
    multiprocessing.set_start_method(None, force=True)  # workers begin as on this system
    warnings.filterwarnings("ignore", "This DataLoader will create")  # more than cores: meant here
    with open(reader.path("jsonl"), "a", buffering=1) as log, open(reader.path("err"), "a") as err:
        os.dup2(err.fileno(), 2)

        def tell(**values: object) -> None:
            log.write(json.dumps({"pid": os.getpid(), **values}) + "\n")

        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: tell(warned=record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("wdstrain").addHandler(handler)
        try:
            read_epochs(reader, tell)
        except BaseException:
            tell(error=traceback.format_exc())
            raise


def read_epochs(reader: Reader, tell: Callable[..., None]) -> None:
    truth, rng = json.loads((reader.place / "truth.json").read_text()), random.Random()
    loader, over, saved = reader.loader(), reader.place / "stop", reader.path("json")

    def save() -> None:
        """Write a complete file or none, since the reader may be killed."""
        position = [epoch, step] if step < len(loader) else [epoch + 1, 0]
        text = json.dumps({"state": loader.state_dict(), "position": position})
        reader.path("new").write_text(text)
        reader.path("new").replace(saved)

    while not over.exists():
        if saved.exists():
            before = json.loads(saved.read_text())
            loader.load_state_dict(before["state"])
            if [*loader.next_position] != before["position"]:
                tell(wrong=f"resumed at {loader.next_position}, not {before['position']}")
        epoch, step = loader.next_position
        plan, begun = loader.plan(epoch), step
        assert isinstance(plan, wt.Plan)
        ids = plan.delivery(0, 0, plan.steps).ids.tolist()
        if sorted(ids) != list(range(len(truth))):
            tell(wrong=f"the plan of epoch {epoch} has not each sample once")
        leave = rng.randrange(3 * len(loader)) if reader.way == "breaks off" else len(loader)
        for batch in loader:
            samples = zip(batch["__key__"], batch["x"], batch["txt"], strict=True)
            actual = [digest(key, x.numpy().tobytes(), text.encode()) for key, x, text in samples]
            if actual != [truth[i] for i in ids[step * BATCH : (step + 1) * BATCH]]:
                tell(wrong=f"epoch {epoch}, step {step}: {batch['__key__']}")
            step += 1
            if step % 5 == 0 and step < len(loader):
                save()
            if step > leave or over.exists():
                break
        costs, is_whole = {name: loader.report()[name] for name in COSTS}, step == len(loader)
        tell(epoch=epoch, begun=begun, is_whole=is_whole, **costs)
        save()
        if not is_whole and rng.random() < 0.5:
            loader.close()
            loader = reader.loader()
    loader.close()


def example(sample: dict[str, Any]) -> dict[str, Any]:
    return {"x": np.load(io.BytesIO(sample["x.npy"])), "txt": sample["txt"].decode()}


def digest(key: str, values: bytes, text: bytes) -> str:
    return hashlib.blake2b(key.encode() + b"\0" + values + text, digest_size=16).hexdigest()


# --- the load ---


@dataclass
class Running:
    """A running reader, as its parent sees it.

    started: by the clock of files. due: when it is killed; inf until it has saved a state since its
    start. measured: bytes, descriptors and threads of its process tree.
    """

    reader: Reader
    kills: int = -1
    measured: list[tuple[int, ...]] = field(default_factory=list)
    due: float = math.inf

    def start(self) -> None:
        self.kills += 1
        self.process: BaseProcess = SPAWN.Process(target=read, args=(self.reader,))
        self.started, self.due = time.time(), math.inf
        self.process.start()

    def tree(self) -> list[int]:
        pid = self.process.pid or 0
        return [pid, *descendants(pid)]


class Load:
    """Server, readers and measurements. `kill` ends all processes by their ids."""

    def __init__(self, place: Path, seconds: float, count: int, workers: int, seed: int) -> None:
        self.place, self.seconds, self.workers = place, seconds, workers
        self.rng, self.wrong, self.cache_most = random.Random(seed), list[str](), 0
        self.counts: dict[str, int] = {}
        self.begun = self.ended = 0.0
        self.shards = make(place, seed)
        self.limit = sum(path.stat().st_size for path in self.shards) // 2
        (place / "cache").mkdir()
        self.pipe, child_end = SPAWN.Pipe()
        longest = seconds + 3 * STARTED + 2 * ENDED
        words = (str(place / "shards"), seed, longest, child_end)
        self.server = SPAWN.Process(target=serve, args=words)
        self.server.start()
        if not self.pipe.poll(60):
            raise TimeoutError("the server did not begin")
        url = self.pipe.recv()
        self.running = [
            Running(Reader(n, WAYS[n % len(WAYS)], url, place, workers, seed, self.limit))
            for n in range(count)
        ]
        for item in self.running:
            item.start()

    def kill(self) -> None:
        for process in [item.process for item in self.running] + [self.server]:
            process.kill()
            process.join()

    def run(self) -> None:
        self.wait(STARTED, "begin", lambda: all(map(self.has_begun, self.running)))
        # Memory that a reader allocates once is allocated by the end of its first epoch.
        self.wait(STARTED, "come to the end of an epoch", self.is_warm)
        self.begun, measured = time.monotonic(), 0.0
        end = self.begun + self.seconds
        while not self.wrong and (
            (now := time.monotonic()) < end or (now < end + STARTED and not self.is_tried())
        ):
            for item in self.running:
                self.look_after(item)
            if now >= measured + max(1.0, self.seconds / MEASURED):
                measured = now
                self.measure()
            time.sleep(TICK)
        self.ended = time.monotonic()
        self.end()

    def has_begun(self, item: Running) -> bool:
        saved = item.reader.path("json")
        if item.due == math.inf and saved.exists() and saved.stat().st_mtime > item.started:
            longest = max(1.0, min(60.0, self.seconds / 4))
            item.due = time.monotonic() + self.rng.uniform(0, longest)
        return item.due < math.inf

    def is_warm(self) -> bool:
        """Return whether every reader has completed an epoch."""
        return all(item.reader.epochs() for item in self.running)

    def is_tried(self) -> bool:
        return self.is_warm() and all(i.kills for i in self.running if i.reader.way == "killed")

    def look_after(self, item: Running) -> None:
        if not item.process.is_alive():
            status = item.process.exitcode
            self.wrong.append(f"reader {item.reader.number} ended by itself, with status {status}")
        elif self.has_begun(item) and item.reader.way == "killed" and item.due < time.monotonic():
            pids = item.tree()
            item.process.kill()
            item.process.join()
            self.wait(30, "end with their killed reader", lambda: not any(map(is_alive, pids)))
            item.start()

    def end(self) -> None:
        (self.place / "stop").touch()
        pids = [pid for item in self.running for pid in item.tree()]
        self.pipe.send("counts")
        self.counts = self.pipe.recv()
        self.wait(ENDED, "end", lambda: not any(item.process.is_alive() for item in self.running))
        self.wait(10, "end with their readers", lambda: not any(map(is_alive, pids)))
        for item in self.running:
            name, epochs = f"reader {item.reader.number}", item.reader.epochs()
            if item.process.exitcode:
                self.wrong.append(f"{name} ended with status {item.process.exitcode}")
            if missing := set(range(max(epochs, default=0))) - epochs:
                self.wrong.append(f"{name} left out epochs: {missing}")
        self.wrong += leftovers(self.place, self.shards)

    def wait(self, seconds: float, description: str, done: Callable[[], bool]) -> None:
        end = time.monotonic() + seconds
        while not done():
            if time.monotonic() > end:
                self.wrong.append(f"not all processes did {description} within {seconds:.0f} s")
                return
            time.sleep(TICK)

    def measure(self) -> None:
        for item in self.running:
            pids = item.tree()
            is_warm = any(line.get("pid") == item.process.pid for line in item.reader.lines())
            if is_warm and len(pids) == 1 + self.workers:
                with contextlib.suppress(OSError):  # a part of the tree ended
                    item.measured.append(measured(pids))
        self.cache_most = max(self.cache_most, bytes_in(self.place / "cache"))


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
    paths = [Path(shard.path) for shard in index.shards]
    contents = ((key, values["x.npy"], values["txt"]) for _, key, values in read_tars(paths))
    truth = [digest(key, array[-VALUES:], text) for key, array, text in contents]
    (place / "truth.json").write_text(json.dumps(truth))
    return paths


def measured(pids: list[int]) -> tuple[int, ...]:
    """Return the sum of bytes, descriptors and threads over a process tree. Raises OSError."""
    memory = files = threads = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith(("Pss_Anon:", "Pss_Shmem:")):
                memory += int(line.split()[1]) * 1024
        files += len(os.listdir(f"/proc/{pid}/fd"))
        threads += len(os.listdir(f"/proc/{pid}/task"))
    return memory, files, threads


def bytes_in(folder: Path) -> int:
    """Return the bytes of a cache: those of the files that two looks, one after the other, see."""
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
    """Yield leftovers and wrong files after all processes have ended."""
    contents = {path.read_bytes() for path in shards}
    for path in (place / "cache").glob("*/*"):
        if path.suffix == ".tar" and path.read_bytes() not in contents:
            yield f"{path.name} in the cache is not one of the shards"
        elif path.name != "CACHEDIR.TAG" and not re.search(r"\.tar(\.\d+\.part)?$", path.name):
            yield f"{path.name} was left in the cache"


# --- report ---


def report(load: Load) -> int:
    reported = [line for item in load.running for line in item.reader.lines()]
    passes = [line for line in reported if "begun" in line]
    texts = [str(line[w]).strip() for line in reported for w in ("wrong", "error") if w in line]
    wrong = load.wrong + [text.splitlines()[-1] for text in texts]
    grown, growing = growth(load)
    total = {name: sum(line[name] for line in passes) for name in COSTS}
    epochs, kills = sum(line["is_whole"] for line in passes), sum(i.kills for i in load.running)
    faults = {name: load.counts.get(name, 0) for name in (*FAULTS, *RARE)}
    served = f"{load.counts.get('bytes', 0) / 1e6:.0f}, {total['cached'] / 1e6:.0f}"
    minutes = (load.ended - load.begun) / 60
    print(f"{len(load.running)} readers x {load.workers} workers, {minutes:.1f} minutes")
    for name, value in {
        "epochs from their first batch to their last": epochs,
        "samples told, and those of killed passes beside them": total["samples"],
        "passes that began within an epoch": sum(line["begun"] > 0 for line in passes),
        "readers killed and started again": kills,
        "wrong epochs": len(wrong),
        "requests": load.counts.get("requests", 0),
        "MB served, MB from the cache": served,
        "faults": sum(faults.values()),
        **{f"    {name}": faults[name] for name in sorted(faults, key=lambda n: -faults[n])},
        "retries told by the readers, samples read again": f"{total['retries']}, {total['reread']}",
        "warnings of the readers": sum("warned" in line for line in reported),
        "most bytes in the cache, its limit": f"{load.cache_most}, {load.limit}",
        **grown,
    }.items():
        print(f"{name:<54}{value:>24}")
    if load.cache_most > load.limit:
        wrong.append(f"the cache held {load.cache_most} bytes, its limit is {load.limit}")
    if total["bad"]:
        wrong.append(f"{total['bad']} samples were replaced")
    if not epochs or not sum(faults.values()):
        wrong.append("nothing was put to the test")
    wrong = list(dict.fromkeys(wrong + growing))
    print(f"\n{'exact, and flat' if not wrong else f'{len(wrong)} THINGS ARE WRONG'}")
    print(*(f"    {text}" for text in wrong), sep="\n")
    return int(bool(wrong))


def growth(load: Load) -> tuple[dict[str, str], list[str]]:
    """Return rows of 90th percentiles in the first and the last third, and what grows."""
    rows, wrong, sums = dict[str, str](), list[str](), np.zeros((2, len(MEASURES)))
    judged = {"all readers": sums}
    for item in load.running:
        reader, third = item.reader, len(item.measured) // 3
        if reader.way != "killed" and (stderr := reader.path("err").read_text().strip()):
            wrong.append(f"reader {reader.number} says on stderr: {stderr[-3000:]}")
        if third >= ENOUGH:
            parts = (item.measured[:third], item.measured[-third:])
            columns = [zip(*part, strict=True) for part in parts]
            ends = np.array([[statistics.quantiles(c, n=10)[-1] for c in part] for part in columns])
            sums += ends
            judged |= {f"reader {reader.number}, {reader.way}": ends} if third >= MANY else {}
    for name, (first, last) in judged.items():
        for (measure, unit), before, after in zip(MEASURES.items(), first, last, strict=True):
            row = f"{name}: {measure}, first and last third"
            rows[row] = f"{before / unit:.0f}, {after / unit:.0f}"
            if after > (1 + FLAT) * before + 2:
                wrong.append(f"{row}: {rows[row]}, that is not flat")
    return rows, wrong


if __name__ == "__main__":
    main()
