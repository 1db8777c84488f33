"""Server of `stress.py`: a folder by ranges, with random faults that readers must survive.

A seed decides which response gets which fault. Faults that no reader can detect are left out: a
damaged or shortened index, and damage to the second read of a sample. Responses below LARGE bytes
are never damaged, because a sample that is read again has a request of its own.
"""

from __future__ import annotations

import random
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from email.utils import formatdate
from multiprocessing.connection import Connection
from pathlib import Path
from random import randrange
from typing import Any

from tests.support.servers import (
    Fault,
    Handler,
    Served,
    cut,
    end_in_headers,
    in_chunks,
    serving,
    status,
)
from wdstrain.runtime.workers import set_up_worker

LARGE = 256 << 10  # bytes of an answer that may be damaged, at least
OFTEN, SELDOM = 0.16, 0.004  # share of the answers with one of the faults below
HUNG = 24.0  # seconds without a byte: longer than our readers wait


def busy() -> Fault:
    after = random.choice(["0", "1", formatdate(time.time() + 1, usegmt=True)])
    return status(random.choice([503, 429, 500]), b"busy", Retry_After=after)


def without_head(data: bytes) -> Fault:
    """Send these bytes in place of an answer."""

    def fault(handler: Handler, path: Path, start: int, stop: int) -> bool:
        handler.wfile.write(data)
        handler.drop(reset=False)
        return True

    return fault


def of_wrong_length(more: int) -> Fault:
    def fault(handler: Handler, path: Path, start: int, stop: int) -> bool:
        handler.begin(path, start, stop + more)
        handler.wfile.write(path.read_bytes()[start:stop])
        handler.drop(reset=False)
        return True

    return fault


def late(handler: Handler, path: Path, start: int, stop: int) -> bool:
    time.sleep(random.uniform(0.05, 1.0))
    return False


def pausing(places: Iterable[int], seconds: float) -> Fault:
    """Pause at each of these places of the body."""

    def fault(handler: Handler, path: Path, start: int, stop: int) -> bool:
        data, sent = handler.begin(path, start, stop), 0
        for place in places:
            handler.wfile.write(data[sent:place])
            sent = place
            time.sleep(seconds)
        handler.wfile.write(data[sent:])
        return True

    return fault


def damaged(handler: Handler, path: Path, start: int, stop: int) -> bool:
    if stop - start < LARGE:
        return False
    data = bytearray(handler.begin(path, start, stop))
    data[randrange(len(data))] ^= 1 << randrange(8)
    handler.wfile.write(data)
    return True


def range_ignored(handler: Handler, path: Path, start: int, stop: int) -> bool:
    handler.answer(200, path.read_bytes(), {})
    return True


def is_reset() -> bool:
    return random.random() < 0.5


# Each draws a fault of a response with this many bytes.
FAULTS: dict[str, Callable[[int], Fault]] = {
    "cut off or reset in the body": lambda size: cut(randrange(size), reset=is_reset()),
    "cut off or reset in the head": lambda _: end_in_headers(randrange(1, 90), reset=is_reset()),
    "no answer": lambda _: without_head(b""),
    "nonsense for a head": lambda _: without_head(random.randbytes(100)),
    "late": lambda _: late,
    "stalls for a while": lambda size: pausing([randrange(size)], random.uniform(0.1, 1.5)),
    "trickles": lambda size: pausing(range(1, min(100, size) + 1), 0.005),
    "in chunks": lambda _: in_chunks(randrange(1000, 100_000)),
    "busy: 503, 429, 500": lambda _: busy(),
    "length too long": lambda size: of_wrong_length(randrange(1, size)),
    "length too short": lambda size: of_wrong_length(-randrange(1, size)),
    "a byte damaged": lambda _: damaged,
}
# What slows a reader down for long
RARE: dict[str, Callable[[int], Fault]] = {
    "range ignored": lambda _: range_ignored,
    "hangs": lambda size: pausing([randrange(size)], HUNG),
}
OF_SHARDS = {"length too short", "a byte damaged", "range ignored"}  # not done to an index


@dataclass
class Faulty(Served):
    rng: random.Random = field(default_factory=random.Random)
    counts: Counter[str] = field(default_factory=Counter)

    def next_fault(self) -> Fault:
        return self.draw

    def draw(self, handler: Handler, path: Path, start: int, stop: int) -> bool:
        """Answer with a random fault; return False if the response is to be right."""
        with self.lock:
            draw = self.rng.random()
            faults = RARE if draw < SELDOM else FAULTS if draw < SELDOM + OFTEN else {}
            name = self.rng.choice([*faults] or [""])
            if path.suffix != ".tar" and name in OF_SHARDS:
                name = ""
            self.counts.update({"requests": 1, "bytes": stop - start, name: 1})
        return bool(name) and faults[name](stop - start)(handler, path, start, stop)


def serve(root: str, seed: int, seconds: float, pipe: Connection) -> None:
    """Serve a folder, send the address, and then the counts whenever the pipe asks for them.

    Runs as a process, which ends when nothing was asked for some seconds.
    """
    set_up_worker()
    options: dict[str, Any] = {"faulty": (".tar", ".json", ".arrow"), "rng": random.Random(seed)}
    options |= {name: deque(maxlen=0) for name in ("requests", "headers", "sent")}
    with serving(Path(root), kind=Faulty, **options) as served:
        assert isinstance(served, Faulty)
        pipe.send(served.url)
        while pipe.poll(seconds):
            pipe.recv()
            pipe.send(dict(served.counts))
