"""Kill processes, cut the power, fill disks, jump clocks and replace shards, and count the
survivors.

    python -m tests.fault_injection.run                       # every fault, a hundred times each
    python -m tests.fault_injection.run cut full --times 20   # faults with these words in the name
    python -m tests.fault_injection.run 'kill-at convert' --seed 0 --only 17   # trial 17 of one fault again

A workload survives a fault under three conditions. (a) Each file with a final name is whole and
correct, or opening it raises a clear error. (b) The message is one sentence. (c) The same work done
again gives the bytes, order or weights of an undisturbed run. A third of the interrupted workloads
are killed again while they resume. `where` counts when the fault struck: before the first write,
during the work, or after all files had their names. A kill after the end of its process does not
count and is drawn again; `missed` counts these.
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
import time
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from pathlib import Path

for _name in (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
):  # before torch: a process that is to be forked has no threads
    os.environ[_name] = "1"

import rich._emoji_codes  # noqa: E402, F401  children would import each of these anew
import torch.utils.serialization  # noqa: E402
import torch.utils.tensorboard  # noqa: E402, F401
import torchmetrics  # noqa: E402, F401
import torchvision  # noqa: E402, F401

from tests.fault_injection import loader_faults  # noqa: E402
from tests.fault_injection.process_faults import (  # noqa: E402
    Kill,
    Recording,
    WrongOutcome,
    adopt_orphans,
    beside,
    cut_power,
    inside,
    may_mount,
    mount,
    operations,
    own_mounts,
    recorded,
    room_for,
)
from tests.fault_injection.workloads import (  # noqa: E402
    Converting,
    Filling,
    Indexing,
    Remembering,
    Saving,
    Training,
    Work,
)
from wdstrain.serve import Server  # noqa: E402

Trial = Callable[[Path, random.Random], str]
_AGAIN = 1 / 3  # share of kills that are followed by another
_TRIES = 50  # kills that may come too late in a row


# --- faults of writing work ---


def _afterwards(work: Work, place: Path, *, rebooted: bool = False) -> None:
    """Check the files, repeat the work, and compare, in one child process to save time."""

    def all_of_it() -> None:
        if rebooted:
            work.reboot()
        for description in (work.look, work.again, work.end):
            description(place)

    inside(all_of_it).need("done")


def kill_after(work: Work, shared: Path, *, alone: bool = False) -> Trial:
    """SIGKILL at a random moment of the work. alone: only the parent, not its workers."""
    seconds = deque[float](
        maxlen=5
    )  # that the last undisturbed runs took: a machine is faster at one time than at another
    for number in range(5):
        work.lay(shared / f"timed{number}")
        begun = time.monotonic()
        inside(lambda number=number: work.run(shared / f"timed{number}")).need("done")  # type: ignore[misc]
        seconds.append(time.monotonic() - begun)
    return _killed(
        work,
        lambda bits: Kill(after=bits.uniform(0, 1.1 * statistics.median(seconds)), alone=alone),
        seconds.append,
    )


def kill_at(work: Work, shared: Path) -> Trial:
    """SIGKILL before a random file operation of the work."""
    work.lay(shared / "counted")
    count = operations(lambda: work.run(shared / "counted"))
    return _killed(work, lambda bits: Kill(at=bits.randint(1, count)))


def _killed(
    work: Work,
    draw: Callable[[random.Random], Kill],
    took: Callable[[float], object] = lambda seconds: None,
) -> Trial:
    """took: gets the seconds of a run that completed before the kill."""

    def trial(place: Path, bits: random.Random) -> str:
        for missed in range(_TRIES):
            spot = place / str(missed)
            work.lay(spot)
            begun = time.monotonic()
            done = inside(partial(work.run, spot), draw(bits)).need("done", "killed")
            if done.how == "killed":
                break
            took(time.monotonic() - begun)
        else:
            raise WrongOutcome(f"{_TRIES} kills came too late")
        where = work.reach(spot)
        while bits.random() < _AGAIN:
            inside(lambda: work.look(spot)).need("done")
            inside(lambda: work.again(spot), draw(bits)).need("done", "killed")
        _afterwards(work, spot)
        return f"{where}+{missed}"

    return trial


def cut(work: Work, shared: Path) -> Trial:
    """Cut the power after a random file operation of the work."""
    place = shared / "recorded"
    work.lay(place)
    recording: Recording = recorded(lambda: work.run(place), place)

    def trial(place: Path, bits: random.Random) -> str:
        at = bits.randrange(len(recording.trees))
        place.mkdir(parents=True)
        cut_power(recording, at, bits, place / "0")
        where = work.reach(place / "0")
        _afterwards(work, place / "0", rebooted=True)
        return where

    return trial


def full(work: Work, shared: Path) -> Trial:
    """Run on a tmpfs with too little space for the work, then make room."""
    work.lay(shared / "recorded")
    recording = recorded(lambda: work.run(shared / "recorded"), shared / "recorded")
    need = room_for(recording) - room_for(
        Recording(recording.trees[:1], recording.folders, recording.versions)
    )

    def trial(place: Path, bits: random.Random) -> str:
        def on_a_disk() -> str:
            own_mounts()
            adopt_orphans()
            place.mkdir(parents=True)
            mount(place, "size=16m")
            work.lay(place / "0")
            left = bits.randrange(0, need >> 12) << 12
            room = os.statvfs(place)
            (place / "filler").write_bytes(bytes(max(0, room.f_bavail * room.f_frsize - left)))
            ended = inside(lambda: work.run(place / "0")).need("done", "told")
            work.look(place / "0")
            (place / "filler").unlink()
            _afterwards(work, place / "0")
            return ended.how

        return str(inside(on_a_disk).need("done").value)

    return trial


def read_only(work: Work, shared: Path) -> Trial:
    """Run on a read-only disk, with the old files or half of the work, then make it writable."""

    def trial(place: Path, bits: random.Random) -> str:
        def on_a_disk() -> str:
            own_mounts()
            adopt_orphans()
            place.mkdir(parents=True)
            mount(place, "size=16m")
            work.lay(place / "0")
            if bits.random() < 0.7:
                inside(lambda: work.run(place / "0"), Kill(at=bits.randint(1, 60))).need(
                    "killed", "done"
                )
            mount(place, "size=16m", again=True, read_only=True)
            ended = inside(lambda: work.run(place / "0")).need("done", "told")
            work.look(place / "0")
            mount(place, "size=16m", again=True)
            _afterwards(work, place / "0")
            return ended.how

        return str(inside(on_a_disk).need("done").value)

    return trial


# --- the table ---


def all_faults(url: str, served: Path) -> dict[str, Callable[[Path], Trial]]:
    """Return all trials by name. A trial gets a folder for the data that its repetitions share."""
    trials: dict[str, Callable[[Path], Trial]] = {}
    works: dict[str, Callable[[Path], Work]] = {
        "convert": Converting,
        "convert a stream": partial(Converting, kind="arrays"),
        "convert, resized": partial(Converting, kind="resized"),
        "convert over a set": partial(Converting, over=True),
        "index": Indexing,
        "remembered walk": Remembering,
        "cache filling": lambda shared: Filling(served.parent, url),
        "checkpoint writing": Saving,
        "training run": Training,
    }
    for name, work in works.items():
        trials[f"kill-after {name}"] = lambda shared, work=work: kill_after(work(shared), shared)  # type: ignore[misc]
    two = partial(Converting, jobs=2)
    trials["kill-after convert, 2 jobs"] = lambda shared: kill_after(two(shared), shared)
    trials["kill-after parent of 2 jobs"] = lambda shared: kill_after(
        two(shared), shared, alone=True
    )
    for name, work in works.items():
        trials[f"kill-at {name}"] = lambda shared, work=work: kill_at(work(shared), shared)  # type: ignore[misc]
    trials["kill-at parent of 2 jobs"] = lambda shared: kill_at(two(shared), shared)
    for description, fault in (("power-cut", cut), ("full-disk", full), ("read-only", read_only)):
        for name, work in works.items():
            trials[f"{description} {name}"] = lambda shared, work=work, fault=fault: fault(
                work(shared), shared
            )  # type: ignore[misc]
    trials["worker of a loader"] = loader_faults.workers
    trials["worker of convert"] = loader_faults.jobs
    trials["worker of train"] = loader_faults.training_workers
    trials["clock jumps"] = lambda shared: loader_faults.clocks(_beside(served, shared), url)
    trials["shard changes"] = loader_faults.shards
    trials["two at once"] = lambda shared: loader_faults.together(_beside(served, shared), url)
    trials["200 loaders"] = loader_faults.many
    return trials


def _beside(served: Path, shared: Path) -> Path:
    shutil.copytree(served, shared / "served")
    return shared


def try_out(
    name: str, prepare: Callable[[Path], Trial], numbers: list[int], seed: int, place: Path
) -> tuple[str, list[str]]:
    """Print a line of the table, and the failed trials."""
    begun, where, missed, failed = time.monotonic(), Counter[str](), 0, list[str]()
    shared = place / "shared"
    shared.mkdir(parents=True)
    trial = prepare(shared)
    for number in numbers:
        try:
            became, _, late = trial(
                place / str(number), random.Random(f"{seed} {name} {number}")
            ).partition("+")
            where[became] += 1
            missed += int(late or 0)
        except WrongOutcome as lie:
            failed.append(
                f"{name}, time {number}: {lie}\n    again: python -m tests.fault_injection.run '{name}' --seed {seed} --only {number}"
            )
        shutil.rmtree(place / str(number), ignore_errors=True)
    shutil.rmtree(place, ignore_errors=True)
    order = ("before", "within", "after")
    counts = [f"{where.pop(word)} {word}" for word in order if word in where] + [
        f"{n} {word}" for word, n in sorted(where.items())
    ]
    counts += [f"{missed} missed"] if missed else []
    first = f"{name:<30}{len(numbers):>5}{len(numbers) - len(failed):>9}{time.monotonic() - begun:>6.0f}  "
    lines, line = [], first
    for count in counts:
        if len(line) + len(count) >= 80:
            lines.append(line.rstrip(" ,"))
            line = " " * len(first)
        line += f"{count}, "
    return "\n".join([*lines, line.rstrip(" ,")]), failed


def serving(folder: Path) -> str:
    """Return the address of a folder, served by another process."""
    receiving, sending = os.pipe()
    parent, child = os.getpid(), os.fork()
    if child == 0:
        with Server(folder) as server:
            os.write(sending, server.url.encode())
            while os.getppid() == parent:
                time.sleep(0.2)
        os._exit(0)
    beside.add(child)
    os.close(sending)
    return os.read(receiving, 1000).decode()


def main() -> int:
    parser = argparse.ArgumentParser(description="Faults, survived or not.")
    parser.add_argument("words", nargs="*", help="parts of names of faults; all if none is given")
    parser.add_argument(
        "--times", type=int, default=100, help="how often each fault is tried (default 100)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn (default 0)")
    parser.add_argument("--only", type=int, help="try this time alone")
    parser.add_argument(
        "--part", default="0/1", metavar="I/N", help="every N-th fault, from the I-th on"
    )
    arguments = parser.parse_args()
    numbers = list(range(arguments.times)) if arguments.only is None else [arguments.only]
    adopt_orphans()
    gc.freeze()  # what is there now is never collected, so that children need not copy it
    begun, failed, place = (
        time.monotonic(),
        list[str](),
        Path(tempfile.mkdtemp(prefix="wdstrain-faults-")),
    )
    os.environ["XDG_CACHE_HOME"] = str(place / "home")
    try:
        inside(lambda: Filling.serve_from(place / "web")).need("done")
        url, mounts = serving(place / "web" / "served"), may_mount()
        print(
            f"{'fault':<30}{'times':>5}{'survived':>9}{'s':>6}  where, or what became of it",
            flush=True,
        )
        part, parts = map(int, arguments.part.split("/"))
        faults = list(all_faults(url, place / "web" / "served").items())
        for name, prepare in faults[part::parts]:
            if arguments.words and not any(word in name for word in arguments.words):
                continue
            if name.startswith(("full-disk", "read-only")) and not mounts:
                print(f"{name:<30}    -        -     -  no disk can be mounted here", flush=True)
                continue
            count = [
                number
                for number in numbers
                if name != "200 loaders" or number < 2 or arguments.only is not None
            ]
            line, more = try_out(name, prepare, count, arguments.seed, place / "tried")
            failed += more
            print(line, flush=True)
    finally:
        for child in beside:
            os.kill(child, 9)
            os.waitpid(child, 0)
        shutil.rmtree(place, ignore_errors=True)
    print(
        f"{'all' if not failed else 'not all'} survived, in {time.monotonic() - begun:.0f} s (seed {arguments.seed})"
    )
    for failure in failed:
        print(failure)
    return 1 if failed else 0


if __name__ == "__main__":
    ended = main()
    sys.stdout.flush()
    os._exit(ended)  # torch compilers print what they delete at exit
