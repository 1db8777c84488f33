"""How fast our loader is, beside its peers on the same images and beside what arithmetic allows.

    .venv/bin/python scripts/benchmarks/bench_loader.py            (some ten minutes; --quick for a look, --case R1 for one case)
    .venv/bin/python scripts/benchmarks/bench_loader.py --json > scripts/benchmarks/results/loader.json
    .venv/bin/python scripts/benchmarks/results_page.py            (writes RESULTS.md and the chart of the README)

Every contender delivers images or arrays with their labels, in whole epochs: a turn begins at the end of an epoch and ends at the end
of a later one, so the batches that are ready at its beginning are as many as those at its end. Ours is what `pip install .` installs.

Each contender is a process of its own, asked in turn, several times over, in drawn order; medians and the spread. A contender is
stopped while others are asked: its prefetching would take a core from them. On a virtual machine, a turn in which others had more than
0.05 of our processors is made again, thrice at most. `ours` in a ratio is the better of our two: threads (num_workers=0) and one worker
process per core. How each peer is set is said in bench_peers.py.

    R1  JPEG of some 500x375 -> random resized crop 224 + flip, batch 64: 1.6 of the best peer; threads 0.9 of workers
    R2  JPEG 128x128 + flip, batch 32: 1.2 of FFCV, 3 times webdataset with PIL, the first epoch from construction on too;
        threads 0.9 of workers
    R3  arrays 128x128x3 with a number each (`convert_arrays`, `wt.array` with shape and dtype), batch 32: 0.95 of FFCV, 12 times a
        PyTables chunk-shuffle-queue loader
    R4  bytes only, 6 KB: 10 times webdataset
    R5  a million samples: the first batch within 0.5 s, of a resume in the middle within 2 s; import wdstrain 0.3 s beyond torch
    R6  R1 with 1, 2, 4, ... worker processes; the training process at 10 000 samples/s (R2): 0.25 of a core
    R7  memory of all processes beside bare imports in as many, ten epochs: buffer + slots + 300 MB, flat
    R8  no influence: R3 with tail="keep", and R2 with an EXIF segment in each JPEG, 0.95 of the same without
    R9  one slow sample among fifty: a transform takes 1 ms, and 300 ms for one of them; 0.8 of what the mean cost allows
    R10 R1 in a trainer that is busy for 40 ms with each batch of 64, on another device: loose files, webdataset, our WebDataset, our
        loader. The rate / 1,600 is the busy share of the trainer; 0.95 for our loader
    R11 all images of the set decoded in their own sizes, batch 32, the best of 0, 2, 4 and 8 workers: a DataLoader over the bytes in
        memory with two decoders, and our loader from shards; not slower than the best

Beside its rate, each contender has the CPU seconds of its processes per 1,000 samples, the peak of their memory in a turn that is not
counted, and the 99th percentile of the wait for a batch.
"""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import os
import random
import select
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import bench_peers
import numpy as np
from bench_peers import CONTENDERS, Job
from PIL import Image
from record import CORES, conditions
from steal_time import undisturbed

import wdstrain as wt

VERSIONS = ("torch", "torchvision", "numpy", "pyarrow", "simplejpeg", "turbojpeg", "webdataset")
OURS = ["ours, threads", "ours, workers"]
PATIENCE = 180  # seconds until a contender that does not answer is given up
_STEP = 0.04  # seconds that a trainer is busy with a batch
_QUICK, _SLOW, _EACH = 0.001, 0.3, 50  # seconds of a transform for most samples, and for one of 50
TURN_PATIENCE = 60  # the same for a turn, which takes a few seconds on an idle machine


@dataclass
class Bench:
    """What was asked for, and what was found so far."""

    place: Path
    quick: bool
    data: Path | None
    peers: list[str] | None  # None: all
    pythons: dict[str, str]
    out: Any
    found: dict[str, Any] = field(default_factory=dict)
    said: list[list[str]] = field(default_factory=list)  # rows of case and text
    minutes: float = 5.0  # of a case, after which no further round begins
    photo_count: int = 4500

    def say(self, case: str, text: str) -> None:
        self.said.append([case, text])
        for line in textwrap.wrap(
            text, 76, subsequent_indent="    ", replace_whitespace=False, drop_whitespace=True
        ):
            print(f"{case:3} {line}", file=self.out, flush=True)

    def progress(self, case: str, text: str) -> None:
        """Print the name of the current measurement to stderr."""
        print(f"{case:3} {time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)

    def goal(
        self,
        case: str,
        what: str,
        value: float,
        goal: float,
        *,
        below: bool = False,
        digits: int = 2,
    ) -> None:
        met = value <= goal if below else value >= goal
        self.say(
            case,
            f"{what}: {value:.{digits}f}, goal {'<' if below else '>'}= {goal:g}: {'met' if met else 'MISSED'}",
        )
        self.found.setdefault(case, {}).setdefault("goals", {})[what] = {
            "value": value,
            "goal": goal,
            "met": met,
        }

    # --- the material: made once, when a case first needs it ---

    @cached_property
    def photos(self) -> Path:
        """Class folders of photographs, each so often that an epoch takes some seconds."""
        folder, wanted = self.place / "photos", 900 if self.quick else self.photo_count
        found = sorted(self.data.rglob("*.jpg")) if self.data else []
        if not found:
            found = _drawn(self.place / "drawn", 60 if self.quick else 300)
        for number in range(wanted):
            path = found[number % len(found)]
            out = folder / path.parent.name / f"{number:06d}.jpg"
            out.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, out)
        return folder

    @cached_property
    def small(self) -> Path:
        """Class folders of cuts of the photographs, 128 x 128, about 7 KB; the first of them as arrays in arrays/x.npy."""
        wanted, rows = (3000, 3200) if self.quick else (20_000, 12_800)
        photos = sorted(self.photos.rglob("*.jpg"))[: 200 if self.quick else 1500]
        npy: Any = np.lib.format  # whose functions have no types before numpy 2.3
        arrays = npy.open_memmap(
            self._folder("arrays") / "x.npy", "w+", np.uint8, (rows, 128, 128, 3)
        )
        each = -(-max(wanted, rows) // len(photos))
        # its workers end when their work does; those of multiprocessing's Pool are killed, and one that holds a lock then keeps it
        with ProcessPoolExecutor(CORES, multiprocessing.get_context("fork")) as pool:
            made = pool.map(partial(_cuts, each), photos, chunksize=4)
            number = 0
            for path, cuts in zip(photos, made, strict=True):
                folder = self.place / "small" / path.parent.name
                folder.mkdir(parents=True, exist_ok=True)
                for pixels, data in cuts:
                    if number < wanted:
                        (folder / f"{number:06d}.jpg").write_bytes(data)
                    if number < rows:
                        arrays[number] = pixels
                    number += 1
        return self.place / "small"

    @cached_property
    def photo_tars(self) -> Path:
        wt.convert_folder(
            str(self.photos), str(self.place / "photo-tars"), max_shard_size=32_000_000
        )
        return self.place / "photo-tars"

    @cached_property
    def small_tars(self) -> Path:
        wt.convert_folder(
            str(self.small), str(self.place / "small-tars"), max_shard_size=16_000_000
        )
        return self.place / "small-tars"

    @cached_property
    def array_tars(self) -> Path:
        _ = self.small
        arrays = self.place / "arrays"
        rows = len(np.load(arrays / "x.npy", mmap_mode="r"))
        np.save(arrays / "y.npy", np.random.default_rng(0).random(rows, np.float32))
        wt.convert_arrays(
            {name: str(arrays / f"{name}.npy") for name in ("x", "y")},
            str(self.place / "array-tars"),
            label="y",
            max_shard_size=64_000_000,
        )
        return self.place / "array-tars"

    @cached_property
    def exif_tars(self) -> Path:
        """The shards of `small`, with an EXIF segment (orientation 1) in each JPEG."""
        segment = Image.Exif()
        segment[0x0112] = 1
        body = segment.tobytes()
        inserted = b"\xff\xe1" + (len(body) + 2).to_bytes(2, "big") + body
        for path in self.small.rglob("*.jpg"):
            out = self.place / "exif" / path.parent.name / path.name
            out.parent.mkdir(parents=True, exist_ok=True)
            data = path.read_bytes()
            out.write_bytes(data[:2] + inserted + data[2:])
        wt.convert_folder(
            str(self.place / "exif"), str(self.place / "exif-tars"), max_shard_size=16_000_000
        )
        return self.place / "exif-tars"

    def _folder(self, name: str) -> Path:
        (self.place / name).mkdir()
        return self.place / name

    def job(self, case: str) -> Job:
        if case == "R1":
            made = "picture", self.photos, self.photo_tars, 224, True, 64
        elif case == "R2":
            made = "picture", self.small, self.small_tars, 128, False, 32
        elif case == "R3":
            made = "array", self.place / "arrays", self.array_tars, 128, False, 32
        else:
            made = "bytes", self.small, self.small_tars, 128, False, 32
        kind, folder, shards, side, crop, batch = made
        return Job(kind, str(folder), str(shards), "", side, crop, batch, CORES)


# --- cases -----------------------------------------------------------------------------------------------------------


def r1(bench: Bench) -> None:
    peers = [
        "ImageFolder",
        "ImageFolder-tv",
        "webdataset",
        "webdataset-tv",
        "LitData",
        "MosaicML",
        "FFCV",
        "DALI",
    ]
    rates = throughput(bench, "R1", ["decode alone", "decode simplejpeg"], peers, seconds=1.5)
    rates.goal("best peer", 1.6)
    rates.goal_threads(0.9)


def r2(bench: Bench) -> None:
    peers = ["ImageFolder", "webdataset", "webdataset-tv", "LitData", "MosaicML", "FFCV", "DALI"]
    rates = throughput(bench, "R2", ["decode alone", "decode simplejpeg"], peers, seconds=0.8)
    rates.goal("FFCV", 1.2)
    rates.goal("webdataset", 3)
    rates.goal_threads(0.9)
    rates.goal_first("FFCV", 1.1)
    rates.goal_first("webdataset", 3)


def r3(bench: Bench) -> None:
    peers = ["PyTables", "webdataset", "LitData", "MosaicML", "FFCV"]
    rates = throughput(bench, "R3", ["readinto", "readinto 128 MB"], peers, seconds=0.6)
    rates.goal("PyTables", 12)
    rates.goal("FFCV", 0.95)


def r4(bench: Bench) -> None:
    rates = throughput(
        bench,
        "R4",
        ["readinto"],
        ["webdataset", "webdataset-1"],
        seconds=0.6,
        ours=["ours, threads"],
    )
    rates.goal("best peer", 10)


def r5(bench: Bench) -> None:
    count = 100_000 if bench.quick else 1_000_000
    folder, part = bench.place / "million", bench.place / "part"
    wt.pack(
        ({"__key__": f"k{n:05d}", "cls": n % 10} for n in range(10_000)), str(part), shuffle=False
    )
    folder.mkdir()
    for number in range(count // 10_000):  # the same shard under many names
        os.link(part / "train-000000.tar", folder / f"train-{number:06d}.tar")
    wt.index(str(folder))
    repeats = 1 if bench.quick else 3
    for workers in (0, CORES):
        for what, step, goal in (
            ("the first batch", 0, 0.5),
            ("a resume in the middle", count // 64 // 2, 2.0),
        ):
            seconds = [
                float(_fresh(_START, str(folder), str(workers), str(step))) for _ in range(repeats)
            ]
            _seconds(
                bench, "R5", f"{what} of {count} samples, num_workers={workers}", seconds, goal
            )
    _seconds(
        bench,
        "R5",
        "import wdstrain after torch",
        [float(_fresh(_IMPORT)) for _ in range(repeats)],
        0.3,
    )


def r6(bench: Bench) -> None:
    job, counts = bench.job("R1"), [1]
    while counts[-1] < CORES:
        counts.append(min(2 * counts[-1], CORES))
    rates: dict[int, list[float]] = {count: [] for count in counts}
    shares = []
    with ExitStack() as stack:
        processes = {
            n: stack.enter_context(_process(bench, "ours, workers", replace(job, workers=n)))
            for n in counts
        }
        small = stack.enter_context(_process(bench, "ours, workers", bench.job("R2")))
        for one in (*processes.values(), small):
            one.ask(do="open")
        for _ in range(1 if bench.quick else 5):
            for count, one in processes.items():
                rates[count].append(one.ask(do="turn", seconds=1.5)["rate"])
            turn = small.ask(do="turn", seconds=1.0)
            shares.append(turn["cpu"] / turn["rate"] * 10_000)
    first = statistics.median(rates[1])
    for count, found in rates.items():
        ratio = statistics.median(found) / first
        bench.say(
            "R6",
            f"{count:2} worker{'s' * (count > 1):1} {_spread(found)} samples/s, {ratio:.2f} times one",
        )
    bench.found["R6"] = {"rates": rates, "shares": shares}
    share = statistics.median(shares)
    bench.goal(
        "R6",
        f"the training process at 10 000 samples/s, share of a core ({min(shares):.2f} to {max(shares):.2f})",
        share,
        0.25,
        below=True,
    )


def r7(bench: Bench) -> None:
    pairs = [("R2", "ours, workers"), ("R3", "ours, workers"), ("R3", "ours, threads")]
    for case, name in pairs[:1] if bench.quick else pairs:
        job = bench.job(case)
        workers = job.workers if name.endswith("workers") else 0
        with _process(bench, "imports", replace(job, workers=workers)) as bare:
            bare.ask(do="open")
            imports = _memory(bare.pid)
        index = wt.index(job.shards)
        row = job.side * job.side * 3
        buffer = min(256 << 20, int(index.offsets.size.sum()))
        slots = (2 * (workers or CORES) + 5) * job.batch * row
        peaks = []
        with _process(bench, name, job) as one, _watched(one.pid) as peak:
            one.ask(do="open")
            for _ in range(10):
                peak.clear()
                one.ask(do="epoch")
                peaks.append(max([*peak, _memory(one.pid)]) - imports)
        over = (max(peaks) - buffer - slots) / 1e6
        what = f"{case} {name}: {max(peaks) / 1e6:.0f} MB beside imports; {buffer / 1e6:.0f} buffer, {slots / 1e6:.0f} slots"
        bench.goal("R7", f"{what}, MB beyond", over, 300, below=True, digits=0)
        growth = max(peaks[7:]) / max(peaks[1:4])
        bench.goal("R7", f"{case} {name}: epochs 8 to 10 by 2 to 4", growth, 1.05, below=True)


def r8(bench: Bench) -> None:
    """Ours with and without what must have no influence, in the same turns."""
    small = bench.job("R2")
    pairs = {
        'tail="keep" on arrays': (bench.job("R3"), replace(bench.job("R3"), tail="keep")),
        "EXIF": (small, replace(small, shards=str(bench.exif_tars))),
    }
    for what, jobs in pairs.items():
        found: dict[str, list[list[float]]] = {}
        with ExitStack() as stack:
            for name in OURS:
                both = [stack.enter_context(_process(bench, name, job)) for job in jobs]
                for one in both:
                    one.ask(do="open")
                    one.rest()
                found[name] = [[], []]
                for _ in range(1 if bench.quick else 7):
                    for rates, one in zip(found[name], both, strict=True):
                        rates.append(
                            _turn(
                                one,
                                {"do": "turn", "seconds": 0.6},
                                time.monotonic() + 60 * bench.minutes,
                            )[0]["rate"]
                        )
        bench.found.setdefault("R8", {})[what] = found
        for name, (without, with_it) in found.items():
            ratio = statistics.median(with_it) / statistics.median(without)
            bench.goal("R8", f"{what}, {name}: with / without", ratio, 0.95)


def r9(bench: Bench) -> None:
    """Decoders sleep, so neither the number of cores nor their load matters."""
    folder, count = bench.place / "slow", 1000 if bench.quick else 4000
    numbers = ({"__key__": f"k{n:05d}", "cls": n} for n in range(count))
    wt.pack(numbers, str(folder), shuffle=False)
    ideal = (_QUICK * (_EACH - 1) + _SLOW) / _EACH
    for batch_size in (8, 64):
        for workers in (0, CORES):
            loader = wt.Loader(
                str(folder), transform=_slow_at_times, batch_size=batch_size, num_workers=workers
            )
            with loader:
                batches = iter(loader)
                next(batches)  # the workers have started
                begun, samples = time.perf_counter(), 0
                for batch in batches:
                    samples += len(batch["__key__"])
                rate = samples / (time.perf_counter() - begun)
            share = rate * ideal / CORES
            bench.goal("R9", f"batch {batch_size}, num_workers={workers}", share, 0.8)


def r10(bench: Bench) -> None:
    names = ["ImageFolder-tv", "webdataset-tv", "wt.WebDataset", "ours, workers"]
    found = {name: _rates(bench, name, bench.job("R1"), step=_STEP) for name in names}
    bench.found["R10"] = {"turns": found}
    for name, rates in found.items():
        bench.say("R10", f"{name:18} {_spread(rates)}")
    busy = statistics.median(found["ours, workers"]) * _STEP / bench.job("R1").batch
    bench.goal("R10", "busy share of the trainer, ours, workers", busy, 0.95)


def r11(bench: Bench) -> None:
    found = {}
    for name in ("memory, Pillow", "memory, torchvision", "ours, whole images"):
        each = {
            workers: _rates(bench, name, replace(bench.job("R1"), workers=workers))
            for workers in ((0, CORES) if bench.quick else (0, 2, 4, 8))
        }
        best = max(each, key=lambda workers: statistics.median(each[workers]))
        found[f"{name}, {best} workers"] = each[best]
        bench.say("R11", f"{name:20} {_spread(each[best])} with {best} workers")
    bench.found["R11"] = {"turns": found}
    *others, ours = (statistics.median(rates) for rates in found.values())
    bench.goal("R11", "ours, whole images / the best of the others", ours / max(others), 1)


def _rates(bench: Bench, name: str, job: Job, step: float = 0.0) -> list[float]:
    """Return the samples per second of a contender in some turns, while no other runs."""
    with _process(bench, name, job) as one:
        one.ask(do="open")
        words: dict[str, Any] = {"do": "turn", "seconds": 1.0 if bench.quick else 3.0, "step": step}
        answers = [one.ask(**words) for _ in range(1 if bench.quick else 3)]
    return [answer["rate"] for answer in answers]


def _slow_at_times(sample: dict[str, Any]) -> dict[str, int]:
    number = int(sample["cls"])
    time.sleep(_SLOW if number % _EACH == 0 else _QUICK)
    return {"number": number}


CASES: dict[str, Callable[[Bench], None]] = {
    "R1": r1,
    "R2": r2,
    "R3": r3,
    "R4": r4,
    "R5": r5,
    "R6": r6,
    "R7": r7,
    "R8": r8,
    "R9": r9,
    "R10": r10,
    "R11": r11,
}


# --- throughput ------------------------------------------------------------------------------------------------------


@dataclass
class Rates:
    """Samples per second of each contender in each turn; `first`: seconds to the first batch, of the first epoch, samples.

    costs: by contender, CPU seconds per 1,000 samples ("tree_cpu") and the 99th percentile of the wait for a batch ("wait") in each
    turn, and the peak of memory in bytes ("memory").
    """

    bench: Bench
    case: str
    peers: list[str]
    limits: list[str]
    turns: dict[str, list[float]]
    first: dict[str, dict[str, float]]
    costs: dict[str, dict[str, list[float]]]

    @property
    def ours(self) -> str:
        return max(
            (name for name in self.turns if name in OURS),
            key=lambda name: statistics.median(self.turns[name]),
        )

    def goal(self, other: str, goal: float) -> None:
        """Ours by the other: of the medians, and the spread over turns."""
        found = {
            name: statistics.median(self.turns[name]) for name in self.peers if name in self.turns
        }
        if other == "best peer":
            other = max(found, key=lambda name: found[name], default=other)
        if other not in self.turns:
            self.bench.say(self.case, f"ours / {other}: goal {goal:g}, not measured")
            return
        mine, theirs = self.turns[self.ours], self.turns[other]
        each = [a / b for a, b in zip(mine, theirs, strict=True)]
        what = f"{self.ours} / {other} ({min(each):.2f} to {max(each):.2f})"
        self.bench.goal(self.case, what, statistics.median(mine) / statistics.median(theirs), goal)

    def goal_threads(self, goal: float) -> None:
        threads, workers = (statistics.median(self.turns[name]) for name in OURS)
        self.bench.goal(self.case, "ours, threads / ours, workers", threads / workers, goal)

    def goal_first(self, other: str, goal: float) -> None:
        """The same of the first epoch, from construction on."""
        speed = {name: one["samples"] / one["epoch"] for name, one in self.first.items()}
        if other in speed:
            ours = max((name for name in speed if name in OURS), key=lambda name: speed[name])
            self.bench.goal(
                self.case, f"first epoch, {ours} / {other}", speed[ours] / speed[other], goal
            )


def throughput(
    bench: Bench,
    case: str,
    limits: list[str],
    peers: list[str],
    *,
    seconds: float,
    ours: Sequence[str] = OURS,
) -> Rates:
    job = bench.job(case)
    asked = [
        name
        for name in peers
        if bench.peers is None or name in bench.peers or name.split("-")[0] in bench.peers
    ]
    rates = Rates(bench, case, asked, limits, {}, {}, {})
    deadline = time.monotonic() + 60 * bench.minutes
    with ExitStack() as stack:
        running = {
            name: stack.enter_context(_process(bench, name, job))
            for name in (*ours, *limits, *asked)
        }
        for name, one in list(running.items()):
            bench.progress(case, f"{name}: data are prepared, the first epoch begins")
            answer = one.ask(deadline, do="prepare")
            if "absent" not in answer and "failed" not in answer:
                answer = one.ask(deadline, do="open", whole=case == "R2")
            if "absent" in answer or "failed" in answer:
                why = (
                    f"absent. {CONTENDERS[name].install}"
                    if "absent" in answer
                    else answer["failed"]
                )
                bench.say(case, f"{name}: {why}")
                del running[name]
                one.end()
            else:
                rates.first[name] = answer
                rates.turns[name] = []
                rates.costs[name] = {"tree_cpu": [], "wait": [], "memory": []}
        drawn, shares = random.Random(0), list[float]()
        stack.enter_context(_guarded([one.pid for one in running.values()]))
        for one in running.values():
            one.rest()
        rounds = 1 if bench.quick else 7
        for number in range(rounds):
            if number and time.monotonic() > deadline:
                bench.say(case, f"{number} of {rounds} rounds in {bench.minutes:g} minutes")
                break
            bench.progress(case, f"round {number + 1} of {rounds}: {len(running)} contenders")
            for name, one in drawn.sample(list(running.items()), len(running)):
                bench.progress(case, f"  {name}")
                words = {"do": "turn", "seconds": seconds / 2 if bench.quick else seconds}
                answer, share = _turn(one, words, deadline)
                shares.append(share)
                if "rate" in answer:
                    rates.turns[name].append(answer["rate"])
                    for cost in ("tree_cpu", "wait"):
                        rates.costs[name][cost].append(answer[cost])
                else:
                    bench.say(case, f"{name}: {answer['failed']}")
                    del running[name], rates.turns[name]
        for name, one in running.items():
            one.wake()
            with _watched(one.pid) as peak:
                one.ask(time.monotonic() + TURN_PATIENCE, do="turn", seconds=seconds)
            rates.costs[name]["memory"] = [max([*peak, _memory(one.pid)])]
            one.rest()
        for one in running.values():  # all at once: some take seconds to end
            one.leave()
    first = "first batch   epoch" if case == "R2" else "first batch"
    bench.say(case, f"{'':20}samples/s (turns){'':15}{first}")
    for name, found in rates.turns.items():
        begin = rates.first[name]
        start = f"{begin['first']:5.2f} s" if name not in limits else ""
        start += f" {begin['epoch']:6.2f} s" if name not in limits and case == "R2" else ""
        bench.say(case, f"{name:18} {_spread(found):31} {start}".rstrip())
    bench.say(case, f"{'':18} CPU s / 1,000 samples   peak MB   p99 wait, ms")
    for name in rates.turns:
        cpu, wait, memory = (
            statistics.median(rates.costs[name][cost]) for cost in ("tree_cpu", "wait", "memory")
        )
        bench.say(case, f"{name:18} {cpu:21.4f} {memory / 1e6:9.0f} {wait * 1000:14.2f}")
    if any(shares):
        middle = f"{statistics.median(shares):.3f} ({min(shares):.3f} to {max(shares):.3f})"
        bench.say(case, f"of its processors' time other machines had {middle} in these turns")
    bench.found[case] = {
        "turns": rates.turns,
        "first": rates.first,
        "costs": rates.costs,
        "stolen": shares,
    }
    return rates


def _turn(one: Process, words: dict[str, Any], deadline: float) -> tuple[dict[str, Any], float]:
    """Return the answer, and the share of our processors' time that other machines had meanwhile.

    After the deadline a disturbed turn is not repeated, and a turn may take TURN_PATIENCE seconds.
    """
    one.wake()
    answer, share = undisturbed(
        lambda: one.ask(time.monotonic() + TURN_PATIENCE, **words),
        failed=lambda answer: "rate" not in answer or time.monotonic() > deadline,
    )
    one.rest()
    return answer, share


def _spread(found: Sequence[float]) -> str:
    return f"{statistics.median(found):9.0f} ({min(found):.0f} to {max(found):.0f})"


def _seconds(bench: Bench, case: str, what: str, found: list[float], goal: float) -> None:
    bench.found.setdefault(case, {})[what] = found
    bench.goal(
        case,
        f"{what}, seconds ({min(found):.2f} to {max(found):.2f})",
        statistics.median(found),
        goal,
        below=True,
    )


# --- processes -------------------------------------------------------------------------------------------------------


class Process:
    """A contender in a process of its own, with a home and temporary files in our folder."""

    def __init__(self, bench: Bench, name: str, job: Job) -> None:
        self.name, self._out = name, Path(tempfile.mkdtemp(dir=bench.place))
        python = bench.pythons.get(name.split("-")[0], sys.executable)
        command = [
            python,
            bench_peers.__file__,
            name,
            json.dumps(asdict(replace(job, out=str(self._out)))),
        ]
        changes = {
            "HOME": self._out,
            "TMPDIR": self._out,
            "PYTHONWARNINGS": "ignore",
            "LITDATA_DISABLE_VERSION_CHECK": "1",
        }
        self._log = open(self._out / "log", "w")  # noqa: SIM115  (it stays open as long as the process runs)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
            env=os.environ | {key: str(value) for key, value in changes.items()},
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, deadline: float | None = None, **words: Any) -> dict[str, Any]:
        """What it answers; {"failed": why} if it ended or takes too long.

        deadline: of time.monotonic(), at least ten seconds from now; default: PATIENCE seconds.
        """
        patience: float = PATIENCE
        if deadline is not None:
            patience = max(10.0, min(patience, deadline - time.monotonic()))
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(words) + "\n")
            self._process.stdin.flush()
            if not select.select([self._process.stdout], [], [], patience)[0]:
                return {"failed": f"no answer in {patience:.0f} s"}
            answer: dict[str, Any] = json.loads(self._process.stdout.readline())
            return answer
        except (OSError, ValueError):
            last = (self._out / "log").read_text().splitlines() or [""]
            return {"failed": f"its process ended ({last[-1][:200]})"}

    def rest(self) -> None:
        """Its processes stop until they are woken: it does nothing beside others' turns, and nothing for its own before that begins."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGSTOP)

    def wake(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGCONT)

    def leave(self) -> None:
        """Nothing more will be asked."""
        self.wake()
        with suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()

    def end(self) -> None:
        """It ends when there is nothing more to be asked; what it leaves behind is ended with it, and its files go."""
        self.leave()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()
        shutil.rmtree(self._out, ignore_errors=True)


@contextmanager
def _guarded(groups: Sequence[int]) -> Iterator[None]:
    """If this process is killed meanwhile, so are these groups of processes: one that is stopped could not see that nobody asks any more."""
    words = [
        "sh",
        "-c",
        'read -r _; for group; do kill -s KILL -- "-$group" 2>/dev/null; done',
        "sh",
        *map(str, groups),
    ]
    guard = subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield
    finally:
        guard.kill()
        guard.communicate()


@contextmanager
def _process(bench: Bench, name: str, job: Job) -> Iterator[Process]:
    process = Process(bench, name, job)
    try:
        yield process
    finally:
        process.end()


def _fresh(code: str, *words: str) -> str:
    """What a new interpreter prints."""
    return subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=True
    ).stdout


_IMPORT = """
import time, torch
begun = time.perf_counter()
import wdstrain as wt
wt.Loader, wt.image, wt.to_device  # names are imported when they are used
print(time.perf_counter() - begun)
"""
_START = """
import sys, time, wdstrain as wt
wt.Loader, wt.label
begun = time.perf_counter()
loader = wt.Loader(sys.argv[1], {"label": wt.label()}, batch_size=64, num_workers=int(sys.argv[2]))
if int(sys.argv[3]):
    loader.load_state_dict({**loader.state_dict(), "step": int(sys.argv[3])})
next(iter(loader))
print(time.perf_counter() - begun)
"""


def _memory(pid: int) -> int:
    """Bytes of a process and its descendants, shared ones once; without the pages of files, which are libraries."""
    pids, total = [pid], 0
    for one in pids:
        with suppress(OSError):  # one that ended meanwhile
            for task in os.listdir(f"/proc/{one}/task"):
                pids += [
                    int(word)
                    for word in Path(f"/proc/{one}/task/{task}/children").read_text().split()
                ]
            for line in Path(f"/proc/{one}/smaps_rollup").read_text().splitlines():
                total += (
                    int(line.split()[1]) * 1024
                    if line.startswith(("Pss_Anon:", "Pss_Shmem:"))
                    else 0
                )
    return total


@contextmanager
def _watched(pid: int) -> Iterator[list[int]]:
    """A list to which the memory of a process and its descendants is added twenty times a second."""
    found: list[int] = []
    stopping = threading.Event()

    def watch() -> None:
        while not stopping.wait(0.05):
            found.append(_memory(pid))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        stopping.set()
        thread.join()


# --- pictures --------------------------------------------------------------------------------------------------------


def _drawn(folder: Path, count: int) -> list[Path]:
    """Pictures with the size and about the detail of photographs, of five classes."""
    bits, made = np.random.default_rng(0), []
    for number in range(count):
        rough = Image.fromarray(bits.integers(0, 255, (47, 63, 3), np.uint8)).resize(
            (500, 375), Image.Resampling.BICUBIC
        )
        pixels = np.clip(np.asarray(rough) + bits.normal(0, 6, (375, 500, 1)), 0, 255).astype(
            np.uint8
        )
        made.append(folder / f"class{number % 5}" / f"{number}.jpg")
        made[-1].parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(made[-1], quality=90)
    return made


def _cuts(count: int, path: Path) -> list[tuple[Any, bytes]]:
    """Random regions of a photograph, 128 x 128, as pixels and as JPEG."""
    bits, made = np.random.default_rng(int(path.stem)), []
    with Image.open(path) as photo:
        pixels = photo.convert("RGB")
    for _ in range(count):
        side = int(bits.integers(min(128, min(pixels.size)), min(pixels.size) + 1))
        left, top = (int(bits.integers(length - side + 1)) for length in pixels.size)
        cut = pixels.resize(
            (128, 128), Image.Resampling.BILINEAR, (left, top, left + side, top + side)
        )
        file = io.BytesIO()
        cut.save(file, "JPEG", quality=90)
        made.append((np.asarray(cut), file.getvalue()))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="less data, one short turn each")
    parser.add_argument(
        "--case", choices=list(CASES), action="append", help="only this case; may be given again"
    )
    known = ", ".join(_peers())
    parser.add_argument(
        "--peers",
        help=f"all (the default; with --quick: webdataset), none, or some of {known}, commas between",
    )
    parser.add_argument(
        "--data",
        type=Path,
        help="folder of class folders of JPEG photographs (default: they are drawn)",
    )
    parser.add_argument(
        "--python",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="interpreter that has this peer",
    )
    parser.add_argument(
        "--json", action="store_true", help="one JSON line on stdout at the end, text on stderr"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=5.0,
        help="minutes of a case after which no further round begins (default: %(default)s)",
    )
    asked = parser.parse_args()
    peers = asked.peers or ("webdataset" if asked.quick else "all")
    names = None if peers == "all" else [name for name in peers.split(",") if name != "none"]
    if unknown := [name for name in names or [] if name not in CONTENDERS and name not in _peers()]:
        parser.error(f"--peers {','.join(unknown)}: known are all, none, {', '.join(_peers())}")
    if asked.data and not asked.data.is_dir():
        parser.error(f"--data {asked.data}: there is no such folder")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was started is ended then as well
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        pythons = dict(one.split("=", 1) for one in asked.python)
        out = sys.stderr if asked.json else sys.stdout
        bench = Bench(
            Path(folder), asked.quick, asked.data, names, pythons, out, minutes=asked.minutes
        )
        bench.say(
            "",
            f"{CORES} cores, load {os.getloadavg()[0]:.1f}, {'drawn pictures' if not asked.data else asked.data.name}",
        )
        for name in asked.case or CASES:
            bench.progress(name, "begins")
            CASES[name](bench)
            bench.say(
                name, f"load {os.getloadavg()[0]:.1f}, {time.perf_counter() - begun:.0f} s so far"
            )
    if asked.json:
        about = conditions(*VERSIONS, quick=asked.quick)
        print(json.dumps({"conditions": about, "cases": bench.found}))


def _peers() -> list[str]:
    return list(
        dict.fromkeys(name.split("-")[0] for name, one in CONTENDERS.items() if one.install)
    )


if __name__ == "__main__":
    main()
