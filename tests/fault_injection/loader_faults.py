"""Faults of loaders for `run.py`: dying workers, clock jumps, changing shards, several at once.

Each fault is a function that prepares shared data and returns a trial. The trial gets a folder and
a random generator and causes the real fault. It raises WrongOutcome if the loader did not survive, and
otherwise returns the outcome in a word.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import resource
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import wdstrain as wt
from tests.fault_injection.process_faults import Kill, WrongOutcome, inside, typed
from tests.fault_injection.workloads import (
    Converting,
    Filling,
    Remembering,
    Training,
    Work,
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
        self._at, self._how = at, how

    def read(self, name: str, data: Any, out: Any, draws: Any) -> bytes:
        content = bytes(data)
        if not self._how or self._at not in content:
            return content
        if self._how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._how == "limit":  # of addresses, as a container's memory is one
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            most = pages * resource.getpagesize() + (64 << 20)
            resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
            return bytes(1 << 30)
        raise MemoryError


# --- workers ---


def workers(shared: Path) -> Trial:
    """Kill a decoder's worker, or fail its allocation; a new loader resumes from the state."""
    foreign(shared / "set")
    expected = inside(lambda: _read(shared, 0, Bytes())).need("done").value[0]

    def trial(place: Path, bits: random.Random) -> str:
        how = bits.choice(["killed", "killed", "limit", "raised"])
        count = 0 if how == "raised" and bits.random() < 0.5 else bits.choice([1, 2])
        field = Bytes(b"%06d" % bits.randrange(120), how)
        delivered, text, state = inside(lambda: _read(shared, count, field)).need("done").value
        if delivered != expected[: len(delivered)]:
            raise WrongOutcome("other samples came before the fault")
        words = ["worker process of the loader died"]
        if how != "killed":
            words = ["no memory", "nable to allocate", "cannot allocate"]
        if not any(word in text for word in words) or "\n" in text:
            raise WrongOutcome(f"{how}: the error text is {text!r}")
        rest = inside(lambda: _read(shared, count, Bytes(), state)).need("done").value[0]
        if delivered + rest != expected:
            raise WrongOutcome("a new loader does not go on where the old one was")
        return how

    return trial


def _read(
    shared: Path, count: int, field: Bytes, state: dict[str, Any] | None = None
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
        text = f"a worker process of the loader died: {str(error).splitlines()[0]}"
        return delivered, text, now
    return delivered, "", now


def jobs(shared: Path) -> Trial:
    """Kill a process that writes shards; --resume completes the set."""
    work = Converting(shared, jobs=2)
    started = time.monotonic()
    inside(lambda: work.run(shared / "once")).need("done")
    seconds = time.monotonic() - started
    return lambda place, bits: _child_killed(
        work, place, partial(work.run, place), "was killed", bits.uniform(0.2, 0.9) * seconds
    )


def training_workers(shared: Path) -> Trial:
    """Kill a worker of `wdstrain train`: one error line, and --resume ends in the same weights."""
    work = Training(shared)
    options = ["train", str(shared / "set"), "--num-workers", "2"]
    for name, value in work.options.items():
        options += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])

    def trial(place: Path, bits: random.Random) -> str:
        run = partial(typed, *options, "--out", str(place / "run"))
        return _child_killed(work, place, run, "worker", bits.uniform(0.0, 0.3))

    return trial


def _child_killed(work: Work, place: Path, run: Callable[[], Any], word: str, after: float) -> str:
    """Kill a child of the work, some seconds after its begin or after the first child's.

    word: of its error.
    """
    work.lay(place)

    def killing() -> bool:
        hit, over = list[int](), threading.Event()

        def kill() -> None:
            while not multiprocessing.active_children() and not over.wait(0.001):
                pass
            over.wait(after)
            while not hit and not over.wait(0.001):
                for child in multiprocessing.active_children()[:1]:
                    with suppress(ProcessLookupError):  # it has just ended by itself
                        os.kill(child.pid or 0, signal.SIGKILL)
                        hit.append(child.pid or 0)

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
        inside(partial(step, place)).need("done")
    return "told" if ended.how == "told" else "not missed" if ended.value else "too late"


# --- clocks ---


def clocks(shared: Path, url: str) -> Trial:
    """Move the wall clock by years while loaders run, with files from the past and the future."""
    works: list[Work] = [Filling(shared, url), Remembering(shared / "walk")]
    far = 10 * 365 * 86400

    def trial(place: Path, bits: random.Random) -> str:
        def worked(work: Work) -> None:
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
                    inside(partial(worked, work), Kill(after=bits.uniform(0, 0.15)))
                    age()
                inside(partial(worked, work)).need("done")
                inside(partial(work.end, place)).need("done")
                age()
                inside(partial(worked, work)).need("done")
        _turn_back(place / "set" / "part-001.tar")

        def read() -> bytes:
            loader = wt.Loader(place / "set", batch_size=8, shuffle=False)
            return {key: data for key, data, _ in epoch(loader)}["s000040"]

        if not inside(read).need("done").value.startswith(b"change"):
            raise WrongOutcome("the old bytes came")
        return "right"

    return trial


def _turn_back(shard: Path) -> None:
    """Replace a shard by one of equal size while the clock shows the old time."""
    was, data, new = os.stat(shard), bytearray(shard.read_bytes()), shard.with_name(".new")
    data[512:518] = b"change"  # in the first sample
    new.write_bytes(data)
    os.utime(new, ns=(was.st_atime_ns, was.st_mtime_ns))
    os.replace(new, shard)


# --- shards that change ---

KINDS = ("walked", "indexed", "packed", "arrays")
CHANGES = [
    "same size",
    "other size",
    "kept time",
    "deleted",
    "cut",
    "written over",
    "another shard",
]


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
        inside(partial(typed, *map(str, words))).need("done")

    def read(folder: Path, kind: str) -> dict[str, bytes]:
        return dict(_samples(str(folder), kind, 0))

    right = {kind: inside(partial(read, shared / kind, kind)).need("done").value for kind in KINDS}

    def trial(place: Path, bits: random.Random) -> str:
        kind, how = bits.choice(KINDS), bits.choice(CHANGES)
        # Of indexed shards on a server without checksums, nothing is known before the first request.
        far = bits.random() < 0.3 and kind != "indexed"
        count, replaces, step = bits.choice([0, 0, 2]), bits.random() < 0.3, bits.randrange(25)
        place.mkdir(parents=True)
        shutil.copytree(shared / kind, place / "set")
        victim = bits.choice(sorted((place / "set").glob("*.tar")))

        def change(at: int) -> None:
            if at == step:
                _change(victim, how, bits)

        def changing() -> tuple[list[Any], str]:
            delivered: list[Any] = []
            with Server(place / "set") as server:
                name = "part-{000..005}" if kind in KINDS[:2] else "train-{000000..000005}"
                address = f"{server.url}{name}.tar" if far else str(place / "set")
                try:
                    for pair in _samples(address, kind, count, replaces, change):
                        delivered.append(pair)
                except WdstrainError as error:
                    return delivered, str(error)
            return delivered, ""

        delivered, text = inside(changing).need("done").value
        about = f"{kind}, {how}, {'far' if far else 'here'}, at step {step}, {count} workers"
        wrong = [key for key, data in delivered if right[kind].get(key) != data]
        if wrong:
            raise WrongOutcome(f"{about}: other bytes came for {wrong[:3]}")
        if len(delivered) != 240 and not text:
            raise WrongOutcome(
                f"{about}: {len(delivered)} of 240 samples came, and nothing was said"
            )
        if text and ("\n" in text or victim.name not in text):
            raise WrongOutcome(f"{about}: the error text is {text!r}")
        shutil.rmtree(place / "set")
        shutil.copytree(shared / kind, place / "set")  # it is copied again
        if inside(partial(read, place / "set", kind)).need("done").value != right[kind]:
            raise WrongOutcome("it does not work again")
        return ("far " if far else "") + ("told" if text else "right")

    return trial


def _samples(
    address: str,
    kind: str,
    count: int,
    replaces: bool = False,
    at: Callable[[int], None] = lambda step: None,
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
            values = [
                value.numpy().tobytes() if isinstance(value, torch.Tensor) else value
                for value in batch["bin"]
            ]
            yield from zip(batch["__key__"], values, strict=True)


def _change(victim: Path, how: str, bits: random.Random) -> None:
    data, was = victim.read_bytes(), os.stat(victim)
    other = bytes(byte ^ 0x15 if byte else 0 for byte in data)
    if how == "deleted":
        victim.unlink()
    elif how == "cut":
        os.truncate(victim, bits.randrange(len(data)))
    elif how == "written over":
        with open(victim, "r+b") as file:
            file.write(other)
    else:
        if how == "another shard":
            others = [path for path in sorted(victim.parent.glob("*.tar")) if path != victim]
            other = others[0].read_bytes()
        new = victim.with_name(".new")
        new.write_bytes(other + bytes(1024) if how == "other size" else other)
        if how == "kept time":  # as cp -p and rsync -t do
            os.utime(new, ns=(was.st_atime_ns, was.st_mtime_ns))
        os.replace(new, victim)


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
        resume = [bits.random() < 0.4 and kind != "over" for _ in waits]
        work.lay(place)

        def outcome(wait: float, resumes: bool) -> str:
            time.sleep(wait)
            try:
                work.resume(place) if resumes else work.run(place)
            except WdstrainError as error:
                return str(error)
            except BaseException as error:
                return f"wrong: {error!r}"
            return "done"

        def both() -> list[str]:
            pipes, children = [os.pipe() for _ in waits], []
            for (_, writing), wait, resumes in zip(pipes, waits, resume, strict=True):
                child = os.fork()
                if child == 0:
                    os.write(writing, outcome(wait, resumes).encode())
                    os._exit(0)
                children.append(child)
                os.close(writing)
            for child in children:
                os.waitpid(child, 0)
            return [os.read(heard, 1 << 16).decode() for heard, _ in pipes]

        outcomes = inside(both).need("done").value
        for words in outcomes:
            is_refused = any(word in words for word in refused) and "\n" not in words
            if words != "done" and (words.startswith("wrong") or not is_refused):
                raise WrongOutcome(f"{kind}: {outcomes}")
        if "done" not in outcomes:
            raise WrongOutcome(f"{kind}: none of both was done: {outcomes}")
        for step in (work.look, work.end):
            inside(partial(step, place)).need("done")
        return f"{kind} {outcomes.count('done')}"

    return trial


# --- many loaders ---


def many(shared: Path) -> Trial:
    """Open and close 200 loaders: descriptors, threads, processes and memory do not grow."""
    foreign(shared / "set", 2, 60)

    def open_and_close(loaders: int, count: int, bits: random.Random) -> None:
        fields = {"bin": Bytes(), "label": wt.label("cls")}
        for number in range(loaders):
            loader = wt.Loader(shared / "set", fields, batch_size=8, num_workers=count)
            stop = bits.choice([1, 3, len(loader) + 1])
            for step, _ in enumerate(loader):
                if step + 1 == stop:
                    break
            if number % 3 or count:
                loader.close()

    def counted() -> Counter[str]:
        gc.collect()
        end = time.monotonic() + 5  # threads of forgotten loaders end by themselves, not at once
        while time.monotonic() < end and (
            multiprocessing.active_children() or len(os.listdir("/proc/self/task")) > 1
        ):
            time.sleep(0.01)
        status = Path("/proc/self/status").read_text()
        shared_names = [
            n for n in os.listdir("/dev/shm") if n.startswith(("torch_", "psm_", "sem."))
        ]
        return Counter(
            descriptors=len(os.listdir("/proc/self/fd")),
            threads=len(os.listdir("/proc/self/task")),
            processes=len(multiprocessing.active_children()),
            named=len(shared_names),
            memory=int(status.partition("RssAnon:")[2].split()[0]) // 1024,
        )

    def trial(place: Path, bits: random.Random) -> str:
        count = bits.choice([0, 2])

        def watched() -> list[Counter[str]]:
            open_and_close(20, count, bits)
            before = counted()
            open_and_close(200, count, bits)
            return [before, counted()]

        before, after = inside(watched).need("done").value
        allowed = Counter(before, memory=before["memory"] + 24)
        if any(after[name] > allowed[name] for name in before):
            raise WrongOutcome(f"before {dict(before)}, after {dict(after)}")
        return f"{count} workers"

    return trial
