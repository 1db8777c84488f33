"""Faults of loaders for `run.py`: dying workers, clock jumps, changing shards, several loaders at
once.

Each fault is a function that prepares shared data and returns a trial. The trial gets a folder and
a random generator and causes the real fault. It raises Lie if the loader did not survive, and
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
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import wdstrain as wt
from tests.fault_injection.process_faults import Kill, Lie, inside, typed
from tests.fault_injection.workloads import (
    Converting,
    Filling,
    Remembering,
    Training,
    Work,
    closing,
    epoch,
    foreign,
)
from wdstrain.errors import WdstrainError
from wdstrain.reader import reads
from wdstrain.serve import Server

Trial = Callable[[Path, random.Random], str]


# --- workers ---


class Heavy:
    """A field that at one sample kills its worker, or raises MemoryError."""

    names, example = ("bin",), None

    def __init__(self, at: bytes, how: str) -> None:
        self._at, self._how = at, how

    def read(self, name: str, data: Any, out: Any, draws: Any) -> bytes:
        content = bytes(data)
        if self._how and self._at in content:
            if self._how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if (
                self._how == "limit"
            ):  # of the addresses that the process may have, as a container's memory is one
                with open("/proc/self/statm") as file:
                    now = int(file.read().split()[0]) * resource.getpagesize()
                resource.setrlimit(resource.RLIMIT_AS, (now + (64 << 20), resource.RLIM_INFINITY))
                return bytes(1 << 30)
            raise MemoryError
        return content


def workers(shared: Path) -> Trial:
    """Kill a decoder's worker, or fail its allocation; a new loader resumes from the state."""
    foreign(shared / "set")
    expected = inside(lambda: _read(shared, "", 0, "")).need("done").value[0]

    def trial(place: Path, bits: random.Random) -> str:
        how, context = (
            bits.choice(["killed", "killed", "limit", "raised"]),
            bits.choice(["fork", "forkserver"]),
        )
        count = 0 if how == "raised" and bits.random() < 0.5 else bits.choice([1, 2])
        number = b"%06d" % bits.randrange(120)
        context = "fork"
        delivered, error_text, state = (
            inside(lambda: _read(shared, how, count, context, number)).need("done").value
        )
        if delivered != expected[: len(delivered)]:
            raise Lie("other samples came before the fault")
        words = (
            "worker process of the loader died"
            if how == "killed"
            else "no memory|nable to allocate|cannot allocate"
        )
        if not any(word in error_text for word in words.split("|")) or "\n" in error_text:
            raise Lie(f"{how}: the error text is {error_text!r}")
        rest = inside(lambda: _read(shared, "", count, context, b"", state)).need("done").value[0]
        if delivered + rest != expected:
            raise Lie("a new loader does not go on where the old one was")
        return how

    return trial


def _read(
    shared: Path,
    how: str,
    count: int,
    context: str,
    number: bytes = b"",
    state: dict[str, Any] | None = None,
) -> tuple[list[Any], str, dict[str, Any]]:
    """Return (delivered samples, outcome, state at the end)."""
    fields = {"bin": Heavy(number, how), "label": wt.label("cls")}
    loader = wt.Loader(
        shared / "set",
        fields,
        batch_size=8,
        shuffle_buffer=30,
        num_workers=count,
        multiprocessing_context="fork" if count else None,
    )
    delivered: list[Any] = []
    error_text, now = "", loader.state_dict()
    if state is not None:
        loader.load_state_dict(state)
    try:
        with closing(loader):
            for batch in loader:
                delivered += zip(
                    batch["__key__"], batch["bin"], batch["label"].tolist(), strict=True
                )
                now = loader.state_dict()
    except WdstrainError as error:
        error_text = str(error)
    except RuntimeError as error:  # torch's own, in the loop's own code: a signal tells it
        error_text = str(error)
        if "DataLoader worker" not in error_text:
            raise
        error_text = "a worker process of the loader died: " + error_text.splitlines()[0]
    return delivered, error_text, now


def jobs(shared: Path) -> Trial:
    """Kill a process that writes shards; --resume completes the set."""
    work = Converting(shared, jobs=2)
    started = time.monotonic()
    inside(lambda: work.run(shared / "once")).need("done")
    seconds = time.monotonic() - started

    def trial(place: Path, bits: random.Random) -> str:
        work.lay(place)
        after = bits.uniform(0.2, 0.9) * seconds

        def killing() -> bool:
            hit: list[int] = []

            def kill() -> None:
                end = time.monotonic() + 10
                time.sleep(after)
                while not hit and time.monotonic() < end and not over.is_set():
                    for child in multiprocessing.active_children():
                        with suppress(ProcessLookupError):  # it has just ended by itself
                            if child.pid is not None:
                                os.kill(child.pid, signal.SIGKILL)
                                hit.append(child.pid)
                                break
                    time.sleep(0.001)

            over = threading.Event()
            killer = threading.Thread(target=kill)
            killer.start()
            try:
                work.run(place)
            finally:
                over.set()
                killer.join()
            return bool(hit)

        ended = inside(killing).need("done", "told")
        if ended.how == "told" and "was killed" not in ended.said:
            raise Lie(f"what was said: {ended.said}")
        inside(lambda: work.look(place)).need("done")
        inside(lambda: work.again(place)).need("done")
        work.end(place)
        return "told" if ended.how == "told" else "not missed" if ended.value else "missed"

    return trial


def training_workers(shared: Path) -> Trial:
    """Kill a worker of `wdstrain train`: one error line, and --resume ends in the same weights."""
    work = Training(shared)

    def trial(place: Path, bits: random.Random) -> str:
        work.lay(place)
        words = ["train", str(shared / "set"), "--out", str(place / "run"), "--num-workers", "2"]
        for name, value in work.options.items():
            words += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
        after = bits.uniform(0.0, 0.3)

        def killing() -> bool:
            hit = []

            def kill() -> None:
                end = time.monotonic() + 30
                while (
                    not (children := multiprocessing.active_children()) and time.monotonic() < end
                ):
                    time.sleep(0.001)
                time.sleep(after)
                children = multiprocessing.active_children()
                with suppress(ProcessLookupError):  # it has just ended by itself
                    if children and children[0].pid is not None:
                        os.kill(children[0].pid, signal.SIGKILL)
                        hit.append(children[0].pid)

            killer = threading.Thread(target=kill, daemon=True)
            killer.start()
            typed(*words)
            return bool(hit)

        ended = inside(killing).need("done", "told")
        if ended.how == "told" and "worker" not in ended.said:
            raise Lie(f"what was said: {ended.said}")
        inside(lambda: work.look(place)).need("done")
        inside(lambda: work.again(place)).need("done")
        inside(lambda: work.end(place)).need("done")
        return "told" if ended.how == "told" else "too late"

    return trial


# --- clocks ---


def clocks(shared: Path, url: str) -> Trial:
    """Move the wall clock by years while loaders run, with files from the past and the future."""
    filling, remembering = Filling(shared, url), Remembering(shared / "walk")

    def jumping(bits: random.Random) -> None:
        real, far = time.time, 10 * 365 * 86400
        time.time = lambda: real() + bits.uniform(-far, far)

    def age(folder: Path, bits: random.Random) -> None:
        for path in folder.rglob("*"):
            when = time.time() + bits.choice([-1, 1]) * bits.uniform(0, 10 * 365 * 86400)
            os.utime(path, (when, when))

    def trial(place: Path, bits: random.Random) -> str:
        def worked(work: Work) -> None:
            jumping(bits)
            work.run(place)

        for work in (filling, remembering):
            if work is remembering:
                shutil.rmtree(place)
            work.lay(place)
            for _ in range(2):
                if bits.random() < 0.5:  # and somebody is killed on the way
                    inside(lambda work=work: worked(work), Kill(after=bits.uniform(0, 0.15)))  # type: ignore[misc]
                    age(place, bits)
                inside(lambda work=work: worked(work)).need("done")  # type: ignore[misc]
                inside(lambda work=work: work.end(place)).need("done")  # type: ignore[misc]
                age(place, bits)
                inside(lambda work=work: worked(work)).need("done")  # type: ignore[misc]
        _turned_back(place)
        return "right"

    def _turned_back(place: Path) -> None:
        """Replace a shard by one of equal size while the clock shows the old time."""
        old, new = place / "set" / "part-001.tar", place / "set" / ".new"
        was, data = os.stat(old), bytearray(old.read_bytes())
        data[512:518] = b"change"  # in the first sample
        new.write_bytes(data)
        os.utime(new, ns=(was.st_atime_ns, was.st_mtime_ns))
        os.replace(new, old)

        def read() -> bytes:
            return dict(
                (key, data)
                for key, data, _ in epoch(wt.Loader(place / "set", batch_size=8, shuffle=False))
            )["s000040"]

        if not inside(read).need("done").value.startswith(b"change"):
            raise Lie("the old bytes came")

    return trial


# --- shards that change ---


def shards(shared: Path) -> Trial:
    """Replace, delete, truncate or overwrite a shard while an epoch reads it."""
    foreign(shared / "walked", 6)
    foreign(shared / "others", 6, salt=b"other ")
    foreign(shared / "indexed", 6)
    inside(lambda: typed("index", str(shared / "indexed"))).need("done")
    inside(
        lambda: typed(
            "convert",
            "tars",
            str(shared / "walked"),
            str(shared / "packed"),
            "--max-shard-samples",
            "40",
        )
    ).need("done")
    rows = np.arange(240 * 2048, dtype=np.int64).reshape(240, 2048)
    np.save(shared / "rows.npy", rows)
    words = ["--field", f"bin={shared / 'rows.npy'}", "--max-shard-samples", "40"]
    inside(lambda: typed("convert", "arrays", str(shared / "arrays"), *words)).need("done")

    def read(kind: str) -> Any:
        return dict(_samples(str(shared / kind), kind, 0))

    right = {
        kind: inside(partial(read, kind)).need("done").value
        for kind in ("walked", "indexed", "packed", "arrays")
    }

    def trial(place: Path, bits: random.Random) -> str:
        kind, far = bits.choice(["walked", "indexed", "packed", "arrays"]), bits.random() < 0.3
        # Of indexed shards on a server without checksums, nothing is known before the first
        # request.
        far = far and kind != "indexed"
        how = bits.choice(
            [
                "same size",
                "other size",
                "kept time",
                "deleted",
                "cut",
                "written over",
                "another shard",
            ]
        )
        workers_, replace = bits.choice([0, 0, 2]), bits.random() < 0.3
        place.mkdir(parents=True)
        shutil.copytree(shared / kind, place / "set")
        victim = bits.choice(sorted((place / "set").glob("*.tar")))
        step = bits.randrange(0, 25)

        def read() -> tuple[list[Any], str]:
            delivered: list[Any] = []
            with Server(place / "set") as server:
                names = (
                    "part-{000..005}.tar"
                    if kind in ("walked", "indexed")
                    else "train-{000000..000005}.tar"
                )
                try:
                    for _sample in _samples(
                        server.url + names if far else str(place / "set"),
                        kind,
                        workers_,
                        replace,
                        lambda at: _change(victim, how, bits) if at == step else None,
                    ):
                        delivered.append(_sample)
                except WdstrainError as error:
                    return delivered, str(error)
            return delivered, ""

        delivered, error_text = inside(read).need("done").value
        wrong = [key for key, data in delivered if right[kind].get(key) != data]
        if wrong:
            raise Lie(
                f"{kind}, {how}, {'far' if far else 'here'}, at step {step}, {workers_} workers: other bytes came for {wrong[:3]}"
            )
        if len(delivered) != 240 and not error_text:
            raise Lie(f"{kind}, {how}: {len(delivered)} of 240 samples came, and nothing was said")
        if error_text and ("\n" in error_text or victim.name not in error_text):
            raise Lie(f"{kind}, {how}: the error text is {error_text!r}")
        shutil.rmtree(place / "set")
        shutil.copytree(shared / kind, place / "set")  # it is copied again
        again = inside(lambda: dict(_samples(str(place / "set"), kind, 0))).need("done").value
        if again != right[kind]:
            raise Lie("it does not work again")
        return ("far " if far else "") + ("told" if error_text else "right")

    return trial


def _samples(
    address: str,
    kind: str,
    workers_: int,
    replace: bool = False,
    at: Callable[[int], None] = lambda step: None,
) -> Iterator[tuple[str, bytes]]:
    fields = (
        {"bin": wt.array("bin.npy", shape=(2048,), dtype="int64")}
        if kind == "arrays"
        else {"bin": _Bytes()}
    )
    # Readahead is small, so that faults occur in time.
    reads.READ_SAMPLES = 8
    os.environ |= {"WDSTRAIN_RANGE_SIZE": str(1 << 13), "WDSTRAIN_READ_AHEAD": str(1 << 14)}
    loader = wt.Loader(
        address,
        fields,
        batch_size=8,
        shuffle_buffer=16,
        num_workers=workers_,
        on_error="replace" if replace else "raise",
        max_errors=0.5,
    )
    with closing(loader):
        for step, batch in enumerate(loader):
            at(step)
            values = [
                value.numpy().tobytes() if isinstance(value, torch.Tensor) else value
                for value in batch["bin"]
            ]
            yield from zip(batch["__key__"], values, strict=True)


class _Bytes:
    names, example = ("bin",), None

    def read(self, name: str, data: Any, out: Any, draws: Any) -> bytes:
        return bytes(data)


def _change(victim: Path, how: str, bits: random.Random) -> None:
    data, was = bytearray(victim.read_bytes()), os.stat(victim)
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
            other = next(
                path for path in sorted(victim.parent.glob("*.tar")) if path != victim
            ).read_bytes()
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

    def trial(place: Path, bits: random.Random) -> str:
        kind = bits.choice([*kinds, "conversions", "over", "caches"])
        work = kinds[kind]
        work.lay(place)
        waits = [0.0, bits.uniform(0, 0.4)]
        bits.shuffle(waits)
        resume = [bits.random() < 0.4 for _ in waits]

        def both() -> list[str]:
            pipes = [os.pipe() for _ in waits]
            children = []
            for (_, writing), wait, how in zip(pipes, waits, resume, strict=True):
                child = os.fork()
                if child == 0:
                    time.sleep(wait)
                    words = "done"
                    try:
                        if how and kind != "over":
                            typed(
                                "convert", *work._words, str(place / "out"), "--resume"
                            ) if isinstance(work, Converting) else work.again(place)
                        else:
                            work.run(place)
                    except WdstrainError as error:
                        words = str(error)
                    except BaseException as error:
                        words = f"wrong: {error!r}"
                    os.write(writing, words.encode())
                    os._exit(0)
                children.append(child)
                os.close(writing)
            for child in children:
                os.waitpid(child, 0)
            return [os.read(heard, 1 << 16).decode() for heard, _ in pipes]

        outcomes = inside(both).need("done").value
        wrong = [
            words for words in outcomes if words.startswith("wrong") or not words or "\n" in words
        ]
        refused = ("another", "holds", "lies there", "was not finished")
        wrong += [
            words
            for words in outcomes
            if words != "done" and not any(word in words for word in refused)
        ]
        if wrong:
            raise Lie(f"{kind}: {wrong}")
        if "done" not in outcomes:
            raise Lie(f"{kind}: none of both was done: {outcomes}")
        inside(lambda: work.look(place)).need("done")
        inside(lambda: work.end(place)).need("done")
        return f"{kind} {outcomes.count('done')}"

    return trial


# --- many loaders ---


def many(shared: Path) -> Trial:
    """Open and close 200 loaders: descriptors, threads, processes and memory do not grow."""
    foreign(shared / "set", 2, 60)

    def opened_and_closed(count: int, workers_: int, bits: random.Random) -> None:
        for number in range(count):
            loader = wt.Loader(
                shared / "set",
                {"bin": _Bytes(), "label": wt.label("cls")},
                batch_size=8,
                num_workers=workers_,
            )
            stop = bits.choice([1, 3, len(loader) + 1])
            for step, _ in enumerate(loader):
                if step + 1 == stop:
                    break
            if number % 3 or workers_:
                loader.close()

    def counted() -> Counter[str]:
        gc.collect()
        end = time.monotonic() + 5
        while (
            multiprocessing.active_children() or len(os.listdir("/proc/self/task")) > 1
        ) and time.monotonic() < end:
            time.sleep(
                0.01
            )  # threads of loaders that were forgotten end by themselves, but not at once
        with open("/proc/self/status") as file:
            memory = next(
                int(line.split()[1]) // 1024 for line in file if line.startswith("RssAnon")
            )
        return Counter(
            descriptors=len(os.listdir("/proc/self/fd")),
            threads=len(os.listdir("/proc/self/task")),
            processes=len(multiprocessing.active_children()),
            named=len(
                [
                    name
                    for name in os.listdir("/dev/shm")
                    if name.startswith(("torch_", "psm_", "sem."))
                ]
            ),
            memory=memory,
        )

    def trial(place: Path, bits: random.Random) -> str:
        workers_ = bits.choice([0, 2])

        def watched() -> list[Counter[str]]:
            opened_and_closed(20, workers_, bits)
            before = counted()
            opened_and_closed(200, workers_, bits)
            return [before, counted()]

        before, after = inside(watched).need("done").value
        if after["memory"] > before["memory"] + 24 or any(
            after[name] > before[name] for name in before if name != "memory"
        ):
            raise Lie(f"before {dict(before)}, after {dict(after)}")
        return f"{workers_} workers"

    return trial
