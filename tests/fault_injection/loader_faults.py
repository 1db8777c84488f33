"""Faults of loaders for `run.py`: dying workers, clock jumps, changing shards, several at once.

Each fault is a function that prepares shared data and returns a trial. The trial gets a folder and
a random generator and causes the real fault. It raises WrongOutcome if the loader did not survive,
and otherwise returns the outcome in a word.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import wdstrain as wt
from tests.conftest import flags
from tests.fault_injection.process_faults import Kill, WrongOutcome, inside, kill_all, typed
from tests.fault_injection.workloads import (
    Converting,
    Filling,
    Remembering,
    Training,
    Work,
    done,
    epoch,
    foreign,
)
from wdstrain.errors import WdstrainError
from wdstrain.reader import reads
from wdstrain.serve import Server

Trial = Callable[[Path, random.Random], str]


class Bytes:
    """A field of bytes that at one sample kills its worker, or has no memory."""

    names, example = ("bin",), None

    def __init__(self, at: bytes = b"", how: str = "") -> None:
        self.at, self.how = at, how

    def read(self, name: str, data: Any, out: Any, draws: Any) -> bytes:
        content = bytes(data)
        if not self.how or self.at not in content:
            return content
        if self.how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "limit":  # of addresses, as a container's memory is one
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            most = pages * resource.getpagesize() + (64 << 20)
            resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
            return bytes(1 << 30)
        raise MemoryError


# --- workers ---


def workers(shared: Path) -> Trial:
    """Kill a decoder's worker, or fail its allocation; a new loader resumes from the state."""
    foreign(shared / "set")

    def read(
        count: int, field: Bytes, state: dict[str, Any] | None = None
    ) -> tuple[list[Any], str, dict[str, Any]]:
        """Return (delivered samples, text of the error, state at the end)."""
        fields = {"bin": field, "label": wt.label("cls")}
        options: dict[str, Any] = {"batch_size": 8, "shuffle_buffer": 30, "num_workers": count}
        options["multiprocessing_context"] = "fork" if count else None
        loader = wt.Loader(shared / "set", fields, **options)
        delivered, now = list[Any](), loader.state_dict()
        if state is not None:
            loader.load_state_dict(state)
        try:
            with closing(loader):
                for batch in loader:
                    labels = batch["label"].tolist()
                    delivered += zip(batch["__key__"], batch["bin"], labels, strict=True)
                    now = loader.state_dict()
        except WdstrainError as error:
            return delivered, str(error), now
        except RuntimeError as error:  # torch's own, in the loop's own code: a signal tells it
            if "DataLoader worker" not in str(error):
                raise
            return delivered, "worker process of the loader died", now
        return delivered, "", now

    expected = done(lambda: read(0, Bytes()))[0]

    def trial(place: Path, bits: random.Random) -> str:
        how = bits.choice(["killed", "killed", "limit", "raised"])
        count = 0 if how == "raised" and bits.random() < 0.5 else bits.choice([1, 2])
        field = Bytes(b"%06d" % bits.randrange(120), how)
        delivered, text, state = done(lambda: read(count, field))
        if delivered != expected[: len(delivered)]:
            raise WrongOutcome("other samples came before the fault")
        words = ["no memory", "nable to allocate", "cannot allocate"]
        if how == "killed":
            words = ["worker process of the loader died"]
        if not any(word in text for word in words) or "\n" in text:
            raise WrongOutcome(f"{how}: the error text is {text!r}")
        if delivered + done(lambda: read(count, Bytes(), state))[0] != expected:
            raise WrongOutcome("a new loader does not go on where the old one was")
        return how

    return trial


def jobs(shared: Path) -> Trial:
    """Kill a process that writes shards; --resume completes the set."""
    work, started = Converting(shared, jobs=2), time.monotonic()
    done(lambda: work.run(shared / "once"))
    seconds = time.monotonic() - started

    def trial(place: Path, bits: random.Random) -> str:
        after = bits.uniform(0.2, 0.9) * seconds
        return child_killed(work, place, partial(work.run, place), "was killed", after)

    return trial


def training_workers(shared: Path) -> Trial:
    """Kill a worker of `wdstrain train`: one error line, and --resume ends in the same weights."""
    work = Training(shared)
    words = ["train", str(shared / "set"), "--num-workers", "2", *flags(work.options)]

    def trial(place: Path, bits: random.Random) -> str:
        run = partial(typed, *words, "--out", str(place / "run"))
        return child_killed(work, place, run, "worker", bits.uniform(0.0, 0.3))

    return trial


def child_killed(work: Work, place: Path, run: Callable[[], Any], word: str, after: float) -> str:
    """Kill a child of the work, some seconds after its first child began. word: of its error."""
    work.lay(place)

    def killing() -> bool:
        hit, over = list[int](), threading.Event()

        def kill() -> None:
            while not multiprocessing.active_children() and not over.wait(0.001):
                pass
            over.wait(after)
            while not hit and not over.wait(0.001):
                hit.extend(child.pid or 0 for child in multiprocessing.active_children()[:1])
                kill_all(hit)

        killer = threading.Thread(target=kill)
        killer.start()
        try:
            run()
        finally:
            over.set()
            killer.join()
        return bool(hit)

    ended = inside(killing).need("done", "told")
    if ended.how == "told" and word not in ended.said:
        raise WrongOutcome(f"the error was another one: {ended.said}")
    for step in (work.look, work.again, work.end):
        done(partial(step, place))
    return "told" if ended.how == "told" else "not missed" if ended.value else "too late"


# --- clocks ---


def clocks(shared: Path, url: str) -> Trial:
    """Move the wall clock by years while loaders run, with files from the past and the future."""
    works: list[Work] = [Filling(shared, url), Remembering(shared / "walk")]
    far = 10 * 365 * 86400

    def trial(place: Path, bits: random.Random) -> str:
        def work_by_another_clock(work: Work) -> None:
            real = time.time
            time.time = lambda: real() + bits.uniform(-far, far)
            work.run(place)

        def age() -> None:
            for path in place.rglob("*"):
                when = time.time() + bits.choice([-1, 1]) * bits.uniform(0, far)
                os.utime(path, (when, when))

        for work in works:
            shutil.rmtree(place, ignore_errors=True)
            work.lay(place)
            for _ in range(2):
                if bits.random() < 0.5:  # and somebody is killed on the way
                    inside(partial(work_by_another_clock, work), Kill(after=bits.uniform(0, 0.15)))
                    age()
                done(partial(work_by_another_clock, work))
                done(partial(work.end, place))
                age()
                done(partial(work_by_another_clock, work))
        # A shard is replaced by one of equal size while the clock shows the old time.
        shard = place / "set" / "part-001.tar"
        data = bytearray(shard.read_bytes())
        data[512:518] = b"change"  # in the first sample
        replace(shard, bytes(data), keep_time=True)
        samples = done(lambda: epoch(wt.Loader(place / "set", batch_size=8, shuffle=False)))
        if not {key: data for key, data, _ in samples}["s000040"].startswith(b"change"):
            raise WrongOutcome("the old bytes came")
        return "right"

    return trial


def replace(path: Path, data: bytes, *, keep_time: bool = False) -> None:
    """Replace a file, and its time if it is not kept, as cp -p and rsync -t keep it."""
    was, new = os.stat(path), path.with_name(".new")
    new.write_bytes(data)
    if keep_time:
        os.utime(new, ns=(was.st_atime_ns, was.st_mtime_ns))
    os.replace(new, path)


# --- shards that change ---


def overwrite(victim: Path, data: bytes) -> None:
    with open(victim, "r+b") as file:
        file.write(data)


def beside(shard: Path) -> Path:
    return min(path for path in shard.parent.glob("*.tar") if path != shard)


# What is done to a shard. Arguments: the shard, other bytes of its length, a random generator.
CHANGES: dict[str, Callable[[Path, bytes, random.Random], object]] = {
    "same size": lambda shard, other, bits: replace(shard, other),
    "other size": lambda shard, other, bits: replace(shard, other + bytes(1024)),
    "kept time": lambda shard, other, bits: replace(shard, other, keep_time=True),
    "deleted": lambda shard, other, bits: shard.unlink(),
    "cut": lambda shard, other, bits: os.truncate(shard, bits.randrange(len(other))),
    "written over": lambda shard, other, bits: overwrite(shard, other),
    "another shard": lambda shard, other, bits: replace(shard, beside(shard).read_bytes()),
}
KINDS = {name: "part-{000..005}.tar" for name in ("walked", "indexed")}
KINDS |= {name: "train-{000000..000005}.tar" for name in ("packed", "arrays")}


def shards(shared: Path) -> Trial:
    """Replace, delete, truncate or overwrite a shard while an epoch reads it."""
    for name in ("walked", "indexed"):
        foreign(shared / name, 6)
    np.save(shared / "rows.npy", np.arange(240 * 2048, dtype=np.int64).reshape(240, 2048))
    field, most = f"bin={shared / 'rows.npy'}", ["--max-shard-samples", "40"]
    for words in (
        ["index", shared / "indexed"],
        ["convert", "tars", shared / "walked", shared / "packed", *most],
        ["convert", "arrays", shared / "arrays", "--field", field, *most],
    ):
        done(partial(typed, *map(str, words)))

    def read(folder: Path, kind: str) -> dict[str, bytes]:
        return dict(samples(str(folder), kind, 0))

    right = {kind: done(partial(read, shared / kind, kind)) for kind in KINDS}

    def trial(place: Path, bits: random.Random) -> str:
        kind, how = bits.choice([*KINDS]), bits.choice([*CHANGES])
        # Of indexed shards on a server without checksums, nothing is known before a request.
        far = bits.random() < 0.3 and kind != "indexed"
        count, replaces, step = bits.choice([0, 0, 2]), bits.random() < 0.3, bits.randrange(25)
        place.mkdir(parents=True)
        shutil.copytree(shared / kind, place / "set")
        victim = bits.choice(sorted((place / "set").glob("*.tar")))

        def change(at: int) -> None:
            if at == step:
                other = bytes(byte ^ 0x15 if byte else 0 for byte in victim.read_bytes())
                CHANGES[how](victim, other, bits)

        def read_changing() -> tuple[list[Any], str]:
            delivered = list[Any]()
            with Server(place / "set") as server:
                address = f"{server.url}{KINDS[kind]}" if far else str(place / "set")
                try:
                    delivered.extend(samples(address, kind, count, replaces, change))
                except WdstrainError as error:
                    return delivered, str(error)
            return delivered, ""

        delivered, text = done(read_changing)
        about = f"{kind}, {how}, {'far' if far else 'here'}, at step {step}, {count} workers"
        wrong = [key for key, data in delivered if right[kind].get(key) != data]
        if wrong:
            raise WrongOutcome(f"{about}: other bytes came for {wrong[:3]}")
        if len(delivered) != 240 and not text:
            raise WrongOutcome(f"{about}: {len(delivered)} of 240 samples came, without an error")
        if text and ("\n" in text or victim.name not in text):
            raise WrongOutcome(f"{about}: the error text is {text!r}")
        shutil.rmtree(place / "set")
        shutil.copytree(shared / kind, place / "set")  # it is copied again
        if done(partial(read, place / "set", kind)) != right[kind]:
            raise WrongOutcome("it does not work again")
        return ("far " if far else "") + ("told" if text else "right")

    return trial


def samples(
    address: str,
    kind: str,
    count: int,
    replaces: bool = False,
    at: Callable[[int], object] = lambda step: None,
) -> Iterator[tuple[str, bytes]]:
    """Yield (key, bytes) of each sample of an epoch. at: called before each step."""
    is_array = kind == "arrays"
    field = wt.array("bin.npy", shape=(2048,), dtype="int64") if is_array else Bytes()
    # Readahead is small, so that faults occur in time.
    reads.READ_SAMPLES = 8
    os.environ |= {"WDSTRAIN_RANGE_SIZE": str(1 << 13), "WDSTRAIN_READ_AHEAD": str(1 << 14)}
    options: dict[str, Any] = {"batch_size": 8, "shuffle_buffer": 16, "num_workers": count}
    options |= {"on_error": "replace" if replaces else "raise", "max_errors": 0.5}
    with closing(wt.Loader(address, {"bin": field}, **options)) as loader:
        for step, batch in enumerate(loader):
            at(step)
            for key, value in zip(batch["__key__"], batch["bin"], strict=True):
                yield key, value.numpy().tobytes() if isinstance(value, torch.Tensor) else value


# --- concurrency ---


def together(shared: Path, url: str) -> Trial:
    """Run two at once: conversions, scans or training runs in one folder, or users of one cache."""
    kinds: dict[str, Work] = {
        "conversions": Converting(shared / "a"),
        "jobs": Converting(shared / "b", jobs=2),
        "over": Converting(shared / "c", over=True),
        "walks": Remembering(shared / "d"),
        "caches": Filling(shared, url),
        "runs": Training(shared / "e"),
    }
    refused = ("another", "holds", "lies there", "was not finished")

    def trial(place: Path, bits: random.Random) -> str:
        kind = bits.choice([*kinds, "conversions", "over", "caches"])
        work, waits = kinds[kind], [0.0, bits.uniform(0, 0.4)]
        bits.shuffle(waits)
        resumes = [bits.random() < 0.4 and kind != "over" for _ in waits]
        work.lay(place)

        def run(wait: float, resume: bool) -> str:
            time.sleep(wait)
            try:
                (work.resume if resume else work.run)(place)
            except WdstrainError as error:
                return str(error)
            except BaseException as error:
                return f"wrong: {error!r}"
            return "done"

        def run_both() -> list[str]:
            pipes, children = [os.pipe() for _ in waits], list[int]()
            for (_, writing), wait, resume in zip(pipes, waits, resumes, strict=True):
                children.append(os.fork())
                if children[-1] == 0:
                    os.write(writing, run(wait, resume).encode())
                    os._exit(0)
                os.close(writing)
            for child in children:
                os.waitpid(child, 0)
            return [os.read(heard, 1 << 16).decode() for heard, _ in pipes]

        outcomes = done(run_both)
        for text in outcomes:
            is_refused = any(word in text for word in refused) and "\n" not in text
            if text != "done" and (text.startswith("wrong") or not is_refused):
                raise WrongOutcome(f"{kind}: {outcomes}")
        if "done" not in outcomes:
            raise WrongOutcome(f"{kind}: none of both was done: {outcomes}")
        for step in (work.look, work.end):
            done(partial(step, place))
        return f"{kind} {outcomes.count('done')}"

    return trial
