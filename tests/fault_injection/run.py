"""Kill processes, cut the power, fill disks, jump clocks and replace shards; count the survivors.

    python -m tests.fault_injection.run                       # every fault, a hundred times each
    python -m tests.fault_injection.run cut full --times 20   # faults with these words in the name
    python -m tests.fault_injection.run 'kill-at convert' --seed 0 --only 17   # one trial again

A workload survives a fault under three conditions. (a) Each file with a final name is whole and
correct, or opening it raises a clear error. (b) The message is one sentence. (c) The same work done
again gives the bytes, order or weights of an undisturbed run. A third of the interrupted workloads
are killed again while they resume. A kill after the end of its process does not count and is drawn
again; `missed` counts these.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import shutil
import statistics
import sys
import tempfile
import textwrap
import time
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from pathlib import Path

# Before torch: a process that is to be forked has no threads.
os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

import rich._emoji_codes  # noqa: F401  children would import each of these anew
import torch.utils.serialization
import torch.utils.tensorboard  # noqa: F401
import torchmetrics  # noqa: F401
import torchvision  # noqa: F401

from tests.fault_injection import loader_faults, workloads
from tests.fault_injection import process_faults as processes
from tests.fault_injection.loader_faults import Trial
from tests.fault_injection.process_faults import Kill, WrongOutcome, inside, recorded
from tests.fault_injection.workloads import Converting, Work, done
from wdstrain.serve import Server

AGAIN = 1 / 3  # share of kills that are followed by another
TRIES = 50  # kills that may come too late in a row


# --- faults of writing work ---


def check_afterwards(work: Work, place: Path) -> None:
    """Check the files, repeat the work, and compare, in one child process to save time."""
    done(lambda: [step(place) for step in (work.look, work.again, work.end)])


def kill_after(work: Work, shared: Path, *, alone: bool = False) -> Trial:
    """SIGKILL at a random moment of the work. alone: only the parent, not its workers."""
    seconds = deque[float](maxlen=5)  # of the last undisturbed runs: a machine's speed varies
    for number in range(5):
        place = shared / f"timed{number}"
        work.lay(place)
        begun = time.monotonic()
        done(partial(work.run, place))
        seconds.append(time.monotonic() - begun)

    def draw(bits: random.Random) -> Kill:
        return Kill(after=bits.uniform(0, 1.1 * statistics.median(seconds)), alone=alone)

    return killed(work, draw, seconds)


def kill_at(work: Work, shared: Path) -> Trial:
    work.lay(shared / "counted")
    count = processes.operations(lambda: work.run(shared / "counted"))
    return killed(work, lambda bits: Kill(at=bits.randint(1, count)), deque())


def killed(work: Work, draw: Callable[[random.Random], Kill], seconds: deque[float]) -> Trial:
    """Return a trial of a kill. seconds: gets those of each run that completed before the kill."""

    def trial(place: Path, bits: random.Random) -> str:
        for missed in range(TRIES):
            spot, begun = place / str(missed), time.monotonic()
            work.lay(spot)
            ended = inside(partial(work.run, spot), draw(bits)).need("done", "killed")
            if ended.how == "killed":
                break
            seconds.append(time.monotonic() - begun)
        else:
            raise WrongOutcome(f"{TRIES} kills came too late")
        while bits.random() < AGAIN:
            done(partial(work.look, spot))
            inside(partial(work.again, spot), draw(bits)).need("done", "killed")
        check_afterwards(work, spot)
        return f"killed+{missed}"

    return trial


def cut(work: Work, shared: Path) -> Trial:
    work.lay(shared / "recorded")
    recording = recorded(lambda: work.run(shared / "recorded"), shared / "recorded")

    def trial(place: Path, bits: random.Random) -> str:
        at = bits.randrange(len(recording.trees))
        place.mkdir(parents=True)
        processes.cut_power(recording, at, bits, place / "0")
        check_afterwards(work, place / "0")
        return "right"

    return trial


def on_a_disk(work: Work, obstruct: Callable[[Path, random.Random], Callable[[], None]]) -> Trial:
    """Return a trial on a tmpfs. obstruct: obstructs it, and returns a function that undoes it."""

    def trial(place: Path, bits: random.Random) -> str:
        def run() -> str:
            processes.own_mounts()
            processes.adopt_orphans()
            place.mkdir(parents=True)
            processes.mount(place, "size=16m")
            work.lay(place / "0")
            undo = obstruct(place, bits)
            ended = inside(lambda: work.run(place / "0")).need("done", "told")
            work.look(place / "0")
            undo()
            check_afterwards(work, place / "0")
            return ended.how

        return str(done(run))

    return trial


def full(work: Work, shared: Path) -> Trial:
    """Run on a disk with too little space for the work, then make room."""
    work.lay(shared / "recorded")
    recording = recorded(lambda: work.run(shared / "recorded"), shared / "recorded")
    need = recording.room() - recording.room(0)

    def fill(place: Path, bits: random.Random) -> Callable[[], None]:
        left, room = bits.randrange(0, need >> 12) << 12, os.statvfs(place)
        (place / "filler").write_bytes(bytes(max(0, room.f_bavail * room.f_frsize - left)))
        return (place / "filler").unlink

    return on_a_disk(work, fill)


def read_only(work: Work, shared: Path) -> Trial:
    """Run on a read-only disk, with the old files or half of the work, then make it writable."""

    def protect(place: Path, bits: random.Random) -> Callable[[], None]:
        if bits.random() < 0.7:
            kill = Kill(at=bits.randint(1, 60))
            inside(lambda: work.run(place / "0"), kill).need("killed", "done")
        processes.mount(place, "size=16m", processes.REMOUNT | processes.RDONLY)
        return partial(processes.mount, place, "size=16m", processes.REMOUNT)

    return on_a_disk(work, protect)


# --- the table ---


def all_faults(url: str, served: Path) -> dict[str, Callable[[Path], Trial]]:
    """Return all trials by name. A trial gets a folder for the data that its repetitions share."""
    two = partial(Converting, jobs=2)
    works: dict[str, Callable[[Path], Work]] = {
        "convert": Converting,
        "convert a stream": partial(Converting, kind="arrays"),
        "convert, resized": partial(Converting, kind="resized"),
        "convert over a set": partial(Converting, over=True),
        "index": workloads.Indexing,
        "remembered walk": workloads.Remembering,
        "cache filling": lambda shared: workloads.Filling(served.parent, url),
        "checkpoint writing": workloads.Saving,
        "training run": workloads.Training,
    }
    faults: dict[str, tuple[Callable[..., Trial], Callable[[Path], Work]]] = {}
    faults |= {f"kill-after {name}": (kill_after, make) for name, make in works.items()}
    faults["kill-after convert, 2 jobs"] = (kill_after, two)
    faults["kill-after parent of 2 jobs"] = (partial(kill_after, alone=True), two)
    faults |= {f"kill-at {name}": (kill_at, make) for name, make in works.items()}
    faults["kill-at parent of 2 jobs"] = (kill_at, two)
    for word, fault in {"power-cut": cut, "full-disk": full, "read-only": read_only}.items():
        faults |= {f"{word} {name}": (fault, make) for name, make in works.items()}

    def prepared(fault: Callable[..., Trial], make: Callable[[Path], Work], shared: Path) -> Trial:
        return fault(make(shared), shared)

    def beside_a_server(fault: Callable[[Path, str], Trial], shared: Path) -> Trial:
        shutil.copytree(served, shared / "served")
        return fault(shared, url)

    return {name: partial(prepared, *pair) for name, pair in faults.items()} | {
        "worker of a loader": loader_faults.workers,
        "worker of convert": loader_faults.jobs,
        "worker of train": loader_faults.training_workers,
        "clock jumps": partial(beside_a_server, loader_faults.clocks),
        "shard changes": loader_faults.shards,
        "two at once": partial(beside_a_server, loader_faults.together),
    }


def try_out(
    name: str, prepare: Callable[[Path], Trial], numbers: list[int], seed: int, place: Path
) -> tuple[str, list[str]]:
    """Return the lines of the table, and the failed trials."""
    begun, outcomes, missed, failed = time.monotonic(), Counter[str](), 0, list[str]()
    (place / "shared").mkdir(parents=True)
    trial = prepare(place / "shared")
    for number in numbers:
        bits = random.Random(f"{seed} {name} {number}")
        try:
            outcome, _, late = trial(place / str(number), bits).partition("+")
            outcomes[outcome] += 1
            missed += int(late or 0)
        except WrongOutcome as wrong:
            again = f"python -m tests.fault_injection.run '{name}' --seed {seed} --only {number}"
            failed.append(f"{name}, time {number}: {wrong}\n    again: {again}")
        shutil.rmtree(place / str(number), ignore_errors=True)
    shutil.rmtree(place, ignore_errors=True)
    counts = ", ".join(f"{n}_{word.replace(' ', '_')}" for word, n in sorted(outcomes.items()))
    counts += f", {missed}_missed" if missed else ""
    survived = len(numbers) - len(failed)
    line = f"{name:<30}{len(numbers):>5}{survived:>9}{time.monotonic() - begun:>6.0f}  "
    table = textwrap.fill(line + counts, 80, subsequent_indent=" " * len(line))
    return table.replace("_", " "), failed


def serving(folder: Path) -> str:
    receiving, sending = os.pipe()
    parent, child = os.getpid(), os.fork()
    if child == 0:
        with Server(folder) as server:
            os.write(sending, server.url.encode())
            while os.getppid() == parent:
                time.sleep(0.2)
        os._exit(0)
    processes.beside.add(child)
    os.close(sending)
    return os.read(receiving, 1000).decode()


def main() -> int:
    parser = argparse.ArgumentParser(description="Faults, survived or not.")
    add = parser.add_argument
    add("words", nargs="*", help="parts of names of faults; all if none is given")
    add("--times", type=int, default=100, help="how often each fault is tried (default 100)")
    add("--seed", type=int, default=0, help="of all that is drawn (default 0)")
    add("--only", type=int, help="try this time alone")
    add("--part", default="0/1", metavar="I/N", help="every N-th fault, from the I-th on")
    given = parser.parse_args()
    numbers = list(range(given.times)) if given.only is None else [given.only]
    processes.adopt_orphans()
    gc.freeze()  # what is there now is never collected, so that children need not copy it
    begun, failed = time.monotonic(), list[str]()
    place = Path(tempfile.mkdtemp(prefix="wdstrain-faults-"))
    os.environ["XDG_CACHE_HOME"] = str(place / "home")
    served = place / "web" / "served"
    try:
        done(lambda: workloads.Filling.serve_from(served))
        url, mounts = serving(served), processes.may_mount()
        print(f"{'fault':<30}{'times':>5}{'survived':>9}{'s':>6}  outcomes", flush=True)
        part, parts = map(int, given.part.split("/"))
        for name, prepare in list(all_faults(url, served).items())[part::parts]:
            if given.words and not any(word in name for word in given.words):
                continue
            if name.startswith(("full-disk", "read-only")) and not mounts:
                print(f"{name:<30}    -        -     -  no disk can be mounted here", flush=True)
                continue
            line, more = try_out(name, prepare, numbers, given.seed, place / "tried")
            failed += more
            print(line, flush=True)
    finally:
        processes.kill_all(processes.beside)
        for child in processes.beside:
            os.waitpid(child, 0)
        shutil.rmtree(place, ignore_errors=True)
    verdict = "not all survived" if failed else "all survived"
    print(f"{verdict}, in {time.monotonic() - begun:.0f} s (seed {given.seed})", *failed, sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # torch compilers print what they delete at exit
