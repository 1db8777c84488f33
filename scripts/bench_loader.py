"""How fast our loader is, beside its peers on the same images and beside what arithmetic allows.

    .venv/bin/python scripts/bench_loader.py            (some eight minutes; --quick for a look, --case R1 for one case)

Each contender is a process of its own, asked in turn, several times over, in drawn order; medians and the spread. While others are
asked it is stopped: who fetches ahead or tidies up after his turn would take a core from whoever is next, which was half of the spread.
On a virtual machine, a turn in which others had more than 0.05 of our processors is made again, thrice at most.
A turn is a second or so of batches that were not ready before it began: those with which an epoch begins are not counted. So epochs of
a few thousand samples stand for long ones. `ours` in a ratio is the better of our two: threads (num_workers=0) and one worker process
per core. How each peer is set is said in bench_peers.py.

    R1  JPEG of some 500x375 -> random resized crop 224 + flip, batch 64: 1.15 of the best peer, 0.95 of decoding alone
    R2  JPEG 128x128 + flip, batch 32: 1.1 of FFCV, 3 times webdataset with PIL, the first epoch from construction on too
    R3  arrays 128x128x3 (`pack_arrays`, `wt.array` with shape and dtype), batch 32: 0.8 of plain `readinto`, 10 times a
        PyTables chunk-shuffle-queue loader, not behind FFCV
    R4  bytes only, 6 KB: 10 times webdataset. Whole epochs of webdataset, which begins each with nothing ready
    R5  a million samples: the first batch within 1 s, of a resume in the middle within 2 s; import wdstrain 0.3 s beyond torch
    R6  R1 with 1, 2, 4, ... worker processes; the training process at 10 000 samples/s (R2): 0.25 of a core
    R7  memory of all processes beside bare imports in as many, ten epochs: buffer + slots + 300 MB, flat

What was measured last; ratios carry over to other machines, samples/s do not.

    2 cores, no GPU, local disk, page cache warm, Python 3.11, torch 2.15, 2026-11-20; webdataset 1.0.2, LitData 0.2.76,
    MosaicML 0.13.0, FFCV 1.0.2, DALI 2.4.0, PyTables 3.11.1; 1 500 photographs, three times each
    R1  ours 3138 (2424 to 3276), threads 2774; decode alone 3529, whole pictures by simplejpeg and v2 2579; FFCV 1877,
        DALI 1715, LitData 1277, ImageFolder 1126, with torchvision 1294, MosaicML 1323, webdataset 1068, with torchvision
        1097. Of FFCV 1.67 (1.14 to 2.09): met; of decoding alone 0.89 (0.82 to 0.92), in another run 0.91 (0.87 to 0.95):
        MISSED
    R2  ours 21270 (19355 to 22051), threads 14017; decode alone 29033, simplejpeg 34531; FFCV 16599, DALI 13751, LitData
        6944, webdataset 5554, with torchvision 6757, ImageFolder 6539, MosaicML 5147. Of FFCV 1.28 (1.18 to 1.33), 3.83
        times webdataset: met. First epoch 4.6 times FFCV (5.9 s of compiling) and 3.7 times webdataset: met
    R3  ours 136797 (95278 to 145143), threads 114908; readinto 483901, into 128 MB 287336; FFCV 330908, LitData 9434,
        webdataset 11034, MosaicML 10125, PyTables 6642 (5415 to 11400). 20.6 times PyTables: met; of readinto 0.28, of FFCV
        0.41: MISSED
    R4  ours 230974 (221205 to 239777); readinto 2870131; webdataset 26409, without processes 21338. 8.75 times: MISSED
    R5  first batch 0.17 s, 0.21 s with processes; resume 0.46 s, 0.54 s; import 0.12 s (2026-11-21): met
    R6  two workers 1.91 times one; the training process 0.13 (0.12 to 0.13) of a core: met. On 16 cores (and no peers; Python
        3.12, torch 2.11) with a commit of the same day: 964, 1635, 3558, 7374, 11898 samples/s for 1, 2, 4, 8, 16 workers,
        12.34 times one, and 0.15 of a core: met; decode alone there 12929 (12624 to 17028)
    R7  73 MB beyond buffer and slots in R2, 56 and 62 in R3: met; epochs 8 to 10 by 2 to 4: 1.00 to 1.02: met

    With `kernels.c`, on a machine whose memory is half as fast, 2026-11-22:
    R3  0.68 of readinto (0.64 to 0.71), 0.33 without it in the same minutes: MISSED. FFCV was not there
    R4  ours 218164 (199591 to 224210), webdataset 17006: 12.83 times: met; without it 9.7. Read 16 MB at a time and compared there,
        on a slower day: ours 141414 (124310 to 144100), webdataset 10024: 14.11 times (12.29 to 14.65): met
    R3  with hands in C (2026-11-22): ours 105990 (48616 to 113283), readinto 143213, into 128 MB 91920; FFCV 102014, PyTables
        7425; webdataset 4958 in another run. Of readinto 0.74 (0.38 to 0.76), in six other runs 0.71, 0.75, 0.76, 0.77, 0.77
        and 0.83: MISSED. 1.04 of FFCV (0.94 to 1.11 in six runs): met but in one. 14 times PyTables: met. In turns against the
        commit before 1.2 to 1.3 times as fast
    The same day, with whoever is not asked stopped, and with less for the loop to do for a batch; other contenders were FFCV, PyTables
    and webdataset:
    R1  ours 1648 (1492 to 2172), threads 1523; decode alone 1778; FFCV 1249. Of FFCV 1.32, 1.31, 1.34: met; of decoding alone 0.93
        (0.86 to 1.18), in two other runs 0.89 and 0.94, on a third machine 0.92 (0.75 to 1.01; 1.44 of FFCV): MISSED.
        There, since whoever is done has the next batch: ours 2413 and 2371, decode alone 2508 and 2464, FFCV 1710 and 1609: 1.41 and
        1.47 of FFCV, 0.96 (0.85 to 1.06) and 0.96 (0.76 to 1.04) of decoding alone: met
        Since the JPEGs of a batch are decoded at once (fourth machine, two of its four cores, 2026-11-23, all peers): ours 1632,
        threads 1671; decode alone, at once too, 1677; FFCV 1057, ImageFolder with torchvision 910, LitData 888, MosaicML 828,
        DALI 802, webdataset with torchvision 740. Of FFCV 1.58 (1.35 to 1.73), of decoding alone 1.00 (0.84 to 1.14); in another
        run 1.59 and 0.98; in two 1.66 and 1.61 and, of decoding one by one, 1.06 and 1.14: met. On all four cores 1.55 and 0.94
        before, 1.69 and 0.94 of one by one: the 0.95 MISSED there
    R2  fourth machine: ours 11967, threads 11791; decode alone, at once too, 14338; FFCV 8197, webdataset 2439, with torchvision
        3315. Of FFCV 1.46 (1.14 to 1.61), 4.91 times webdataset, first epoch 7.24 and 5.10: met
    R3  fourth machine: ours 113190; readinto 138610; FFCV 101046, PyTables 5477: 0.82 (0.74 to 0.92), 1.12, 20.7: met
    R4  fourth machine: ours 121199, webdataset 10535: 11.5 (10.3 to 16.8): met
    R6  fourth machine: two workers 1.98 times one, the training process 0.15 of a core: met
    R7  fourth machine: 111, 168 and 172 MB beyond buffer and slots; flat (1.00, 1.01, 1.01): met
    R2  third machine: ours 18598, decode alone 21819, FFCV 13893: 1.34, first epoch 6.87: met. Before, on the second:
        ours 11218 (10599 to 12408), threads 9233; decode alone 15555; FFCV 8695: 1.29 (1.22 to 1.42), first epoch 5.36: met
    R3  ours 138684 (127747 to 150959), workers 128725; readinto 153506, into 128 MB 103582; FFCV 117147, PyTables 7624. Of readinto
        0.90 (0.82 to 1.02), in four other runs 0.90, 0.90, 0.93 and 0.97: met; the commit before 0.86. 0.68 (and 0.44) while other
        machines had the processors, before such turns were made again. 1.18 of FFCV (1.12 to 1.25),
        1.18 to 1.24 in the others: met. 18 times PyTables: met
    R4  ours 179724, webdataset 13061: 13.76 times (12.44 to 14.97): met
    R5  first batch 0.29 s, 0.43 s with processes; resume 0.68 s, 0.89 s; import 0.23 s: met
    R6  two workers 1.93 times one; the training process 0.17 (0.16 to 0.18) of a core: met
    R7  86 MB beyond buffer and slots in R2, 168 and 172 in R3, where 64 MB more are read ahead; flat (1.00 and 1.01): met

Where the time goes, microseconds of one core for a sample. R1: 526 of decoding in the workers, 4.5 of the system, 17 in the training
process, half of which is reading, in 559; on a third machine 760 to 800 in the workers, where decoding alone takes 757 to 790, 10 in
the loop's thread, 15 in the reader's, 11 of which the system copies. Before whoever was done had the next batch, nobody had
anything to do for 3 to 22. R2: 79 in the workers, where decoding alone takes 66; 9 in the loop's thread, 3.5 in the
reader, 4 in the threads of queues, before batches travelled together. R3: 14 in all: 6 of preadv, 2.5 comparing, 2 reader, 3 the
loop's thread; but a third of the time of two cores is waiting for the interpreter's lock, which is given away at each checksum:
without comparing it was 1.2 times as fast. FFCV copies once, from a mapped file, compares nothing, and plans in compiled code. R4:
1.7 in the reader, 2.1 in the decoder, 2.1 in planning a batch and handing it over.

With `kernels.c` R3 takes 15.5 on a machine where `readinto` takes 7.7: 10.4 reading and comparing by hands that need no lock, 2.7 the
loop's thread (3.5 before costs were a tuple), 1.4 the reader's, 0.3 who tells. On one where `readinto` takes 9 it took 21. Reading takes more than `readinto` because a window of batches is in no processor's cache:
into 128 MB it takes 13. Hands are idle for 0.03 of the time; 0.14 before the next epoch was planned in a pause of this one, and
before the loop waited a moment where the reader may go on: at the end of an epoch the loop has all it needs, makes no pause, and
Python gives its lock to another thread after five milliseconds, at each of the reader's operations.

Ideas and what they brought, by the speed of the same minute. Whole pictures by simplejpeg into their row, a picture turned
around by decoding it BGR and reversing the bytes of each row: R2 1.2, R1 1.04; these reversed in C, eight at a time: R2 1.06, R1 1.04 more. Batches of 32 in threes to a worker: R2 1.1.
Samples placed and planned many at a time: R4 1.5. Arrays read into their batch: R3 1.9 (arrays copied from the arena by the
training process itself would be 1.4). Steps planned a thousand samples at a time and one call for the checksums of a batch: R4
1.3; that call with Python's lock: R4 1.15 more. Reads of 16 MB in place of 4 R4 1.25, of 8 MB 1.13, of 32 MB 1.21: the reader
has the lock to wait for at each. Reads and checksums of 16 MB in one call: R3 1.6; two pieces under way: 1.1. Failed: the same
calls through ctypes one by one 0.5, pieces of 8 MB 0.8, three or four threads on two cores 0.95, huge pages for private memory
1.0. Of hands: their queue in C 1.07, reads of 32 MB and 128 MB ahead in place of 16 and 64 1.1, a read planned while the loop waits
for the reader's own lock 1.06, where bytes go computed for a whole window 1.06. Of workers, as a share of decoding alone in R2, ten starts of each,
+- 0.016: 0.78; 0.83 where whoever is done has the next batch and fields are read one after another; 0.875 where small answers are
written at once (a thread that asks for a decoder's lock took 6 us of a picture's 118). R1: 0.959 and, with these, 0.968 +- 0.01 in
14 starts of a program of our own; two batches of 64 in a message 1.01 to 1.02 more. JPEGs of a batch at once, by one decoder:
photographs 1.04, 128x128 1.26, 74x74 to 64x64 1.24; by four threads, of which each picture took the interpreter's lock some ten
times, 1.4 and 2.7, 2.1 and 5.2, 1.8 and 2.2 in two turns. Decoding whole pictures by libjpeg-turbo's own library one by one in place of simplejpeg: 0.95 to 1.0. Failed: reads of 8 MB 0.9, of 48 MB 0.98, 192 MB
ahead 1.0, three or four batches ahead for each worker in R1 1.0 (nothing to do for 3 us less, one slot each more), a picture made
in 150 KB that stay in the cache and copied to its batch past it 0.99, pieces of 512 KB to compare 1.0, of 128 KB 0.99, read into the processor's cache and copied on from there past it 1.03 of
what the hands take. Left alone: the file mapped and copied from, compared as it goes, takes two thirds of what they take, but a file
that is cut short meanwhile ends the process. Failed before: lists in place of numpy scalars for R3 0.98; turning a picture of 128x128 by numpy 54 us, by np.take 28
(torch 6.4, cv2 2.2, reversed bytes 3 to 5); index_select into the row 80; reading further ahead for R3 0.8 (32 to 64 MB), one
reading thread 0.8, chunks of 1 MB instead of 4 0.85. Huge pages for shared memory: the system's settings forbid them. What
misled: one process may be a fifth faster than another of the same program, as long as it lives (103 to 127 us for a picture of
R2); turns that count what was ready before gave webdataset four times its speed in R4; measuring a field in a process that
has torch's two threads beside others gave 40 us more for each picture that is turned around.
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
from stolen import undisturbed

import wdstrain as wt

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
OURS = ["ours, threads", "ours, workers"]
PATIENCE = 180  # seconds until a contender that does not answer is given up


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

    def say(self, case: str, text: str) -> None:
        for line in textwrap.wrap(
            text, 76, subsequent_indent="    ", replace_whitespace=False, drop_whitespace=True
        ):
            print(f"{case:3} {line}", file=self.out, flush=True)

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
        folder, wanted = self.place / "photos", 900 if self.quick else 4500
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
        wt.pack_folder(str(self.photos), str(self.place / "photo-tars"), shard_bytes=32_000_000)
        return self.place / "photo-tars"

    @cached_property
    def small_tars(self) -> Path:
        wt.pack_folder(str(self.small), str(self.place / "small-tars"), shard_bytes=16_000_000)
        return self.place / "small-tars"

    @cached_property
    def array_tars(self) -> Path:
        _ = self.small
        wt.pack_arrays(
            {"x": str(self.place / "arrays" / "x.npy")},
            str(self.place / "array-tars"),
            shard_bytes=64_000_000,
        )
        return self.place / "array-tars"

    def _folder(self, name: str) -> Path:
        (self.place / name).mkdir()
        return self.place / name

    def job(self, case: str) -> Job:
        if case == "R1":
            made = "picture", self.photos, self.photo_tars, 224, True, 64, 16
        elif case == "R2":
            made = "picture", self.small, self.small_tars, 128, False, 32, 32
        elif case == "R3":
            made = "array", self.place / "arrays", self.array_tars, 128, False, 32, 48
        else:
            made = "bytes", self.small, self.small_tars, 128, False, 32, 200
        kind, folder, shards, side, crop, batch, drain = made
        return Job(
            kind,
            str(folder),
            str(shards),
            "",
            side,
            crop,
            batch,
            CORES,
            drain // 4 if self.quick else drain,
        )


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
    rates.goal("best peer", 1.15)
    rates.goal("decode alone", 0.95)


def r2(bench: Bench) -> None:
    peers = ["ImageFolder", "webdataset", "webdataset-tv", "LitData", "MosaicML", "FFCV", "DALI"]
    rates = throughput(bench, "R2", ["decode alone", "decode simplejpeg"], peers, seconds=0.8)
    rates.goal("FFCV", 1.1)
    rates.goal("webdataset", 3)
    rates.goal_first("FFCV", 1.1)
    rates.goal_first("webdataset", 3)


def r3(bench: Bench) -> None:
    peers = ["PyTables", "webdataset", "LitData", "MosaicML", "FFCV"]
    rates = throughput(bench, "R3", ["readinto", "readinto 128 MB"], peers, seconds=0.6)
    rates.goal("readinto", 0.8)
    rates.goal("PyTables", 10)
    rates.goal("FFCV", 1.0)


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
            ("the first batch", 0, 1.0),
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
        buffer = min(256 << 20, sum(int(size) for size in index.offsets.stop - index.offsets.start))
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


CASES: dict[str, Callable[[Bench], None]] = {
    "R1": r1,
    "R2": r2,
    "R3": r3,
    "R4": r4,
    "R5": r5,
    "R6": r6,
    "R7": r7,
}


# --- throughput ------------------------------------------------------------------------------------------------------


@dataclass
class Rates:
    """Samples per second of each contender in each turn; `first`: seconds to the first batch, of the first epoch, samples."""

    bench: Bench
    case: str
    peers: list[str]
    limits: list[str]
    turns: dict[str, list[float]]
    first: dict[str, dict[str, float]]

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
    rates = Rates(bench, case, asked, limits, {}, {})
    with ExitStack() as stack:
        running = {
            name: stack.enter_context(_process(bench, name, job))
            for name in (*ours, *limits, *asked)
        }
        for name, one in list(running.items()):
            answer = one.ask(do="prepare")
            if "absent" not in answer and "failed" not in answer:
                answer = one.ask(do="open", whole=case == "R2")
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
        drawn, shares = random.Random(0), list[float]()
        stack.enter_context(_guarded([one.pid for one in running.values()]))
        for one in running.values():
            one.rest()
        for _ in range(1 if bench.quick else 7):
            for name, one in drawn.sample(list(running.items()), len(running)):
                whole = case == "R4" and name not in OURS
                words = {
                    "do": "turn",
                    "seconds": seconds / 2 if bench.quick else seconds,
                    "whole": whole,
                }
                answer, share = _turn(one, words)
                shares.append(share)
                if "rate" in answer:
                    rates.turns[name].append(answer["rate"])
                else:
                    bench.say(case, f"{name}: {answer['failed']}")
                    del running[name], rates.turns[name]
        for one in running.values():  # all at once: some take seconds to end
            one.leave()
    first = "first batch   epoch" if case == "R2" else "first batch"
    bench.say(case, f"{'':20}samples/s (turns){'':15}{first}")
    for name, found in rates.turns.items():
        begin = rates.first[name]
        start = f"{begin['first']:5.2f} s" if name not in limits else ""
        start += f" {begin['epoch']:6.2f} s" if name not in limits and case == "R2" else ""
        bench.say(case, f"{name:18} {_spread(found):31} {start}".rstrip())
    if any(shares):
        middle = f"{statistics.median(shares):.3f} ({min(shares):.3f} to {max(shares):.3f})"
        bench.say(case, f"of its processors' time other machines had {middle} in these turns")
    bench.found[case] = {"turns": rates.turns, "first": rates.first, "stolen": shares}
    return rates


def _turn(one: Process, words: dict[str, Any]) -> tuple[dict[str, Any], float]:
    """What it answers, and the share of our processors' time that other machines had meanwhile."""
    one.wake()
    answer, share = undisturbed(
        lambda: one.ask(**words), failed=lambda answer: "rate" not in answer
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

    def ask(self, **words: Any) -> dict[str, Any]:
        """What it answers; {"failed": why} if it ended or takes too long."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(words) + "\n")
            self._process.stdin.flush()
            if not select.select([self._process.stdout], [], [], PATIENCE)[0]:
                return {"failed": f"no answer in {PATIENCE} s"}
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
        bench = Bench(Path(folder), asked.quick, asked.data, names, pythons, out)
        bench.say(
            "",
            f"{CORES} cores, load {os.getloadavg()[0]:.1f}, {'drawn pictures' if not asked.data else asked.data.name}",
        )
        for name in asked.case or CASES:
            CASES[name](bench)
            bench.say(
                name, f"load {os.getloadavg()[0]:.1f}, {time.perf_counter() - begun:.0f} s so far"
            )
    if asked.json:
        print(json.dumps(bench.found))


def _peers() -> list[str]:
    return list(
        dict.fromkeys(name.split("-")[0] for name, one in CONTENDERS.items() if one.install)
    )


if __name__ == "__main__":
    main()
