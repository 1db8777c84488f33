"""Server of `stress.py`: a folder by ranges, with random faults that readers must survive.

A seed decides which response gets which fault. Faults that no reader can detect are left out: a
damaged or shortened index, and damage to the second read of a sample. Responses below LARGE bytes
are never damaged, because a sample that is read again has a request of its own.
"""

from __future__ import annotations

import random
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from email.utils import formatdate
from multiprocessing.connection import Connection
from pathlib import Path
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
_HUNG = 24.0  # seconds without a byte: longer than our readers wait


def _busy(handler: Handler, path: Path, start: int, stop: int) -> bool:
    after = random.choice(["0", "1", formatdate(time.time() + 1, usegmt=True)])
    code = random.choice([503, 429, 500])
    return status(code, b"busy", Retry_After=after)(handler, path, start, stop)


def _cut_in_body(handler: Handler, path: Path, start: int, stop: int) -> bool:
    after = random.randrange(stop - start)
    return cut(after, reset=random.random() < 0.5)(handler, path, start, stop)


def _cut_in_head(handler: Handler, path: Path, start: int, stop: int) -> bool:
    after, reset = random.randrange(1, 90), random.random() < 0.5
    return end_in_headers(after, reset=reset)(handler, path, start, stop)


def _no_answer(handler: Handler, path: Path, start: int, stop: int) -> bool:
    handler.drop(reset=False)
    return True


def _nonsense(handler: Handler, path: Path, start: int, stop: int) -> bool:
    handler.wfile.write(random.randbytes(100))
    return _no_answer(handler, path, start, stop)


def _chunked(handler: Handler, path: Path, start: int, stop: int) -> bool:
    return in_chunks(random.randrange(1000, 100_000))(handler, path, start, stop)


def _of_wrong_length(sign: int) -> Fault:
    def fault(handler: Handler, path: Path, start: int, stop: int) -> bool:
        wrong = stop + sign * random.randrange(1, stop - start)
        data = path.read_bytes()[start:stop]
        handler.begin(path, start, wrong)
        handler.wfile.write(data)
        handler.drop(reset=False)
        return True

    return fault


def _late(handler: Handler, path: Path, start: int, stop: int) -> bool:
    time.sleep(random.uniform(0.05, 1.0))
    return False


def _pausing(least: float, most: float) -> Fault:
    def fault(handler: Handler, path: Path, start: int, stop: int) -> bool:
        data, at = handler.begin(path, start, stop), random.randrange(stop - start)
        handler.wfile.write(data[:at])
        time.sleep(random.uniform(least, most))
        handler.wfile.write(data[at:])
        return True

    return fault


def _trickling(handler: Handler, path: Path, start: int, stop: int) -> bool:
    data = handler.begin(path, start, stop)
    for place in range(min(100, len(data))):
        handler.wfile.write(data[place : place + 1])
        time.sleep(0.005)
    handler.wfile.write(data[100:])
    return True


def _damaged(handler: Handler, path: Path, start: int, stop: int) -> bool:
    if stop - start < LARGE:
        return False
    data = bytearray(handler.begin(path, start, stop))
    data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    handler.wfile.write(data)
    return True


def _range_ignored(handler: Handler, path: Path, start: int, stop: int) -> bool:
    handler.answer(200, path.read_bytes(), {})
    return True


FAULTS: dict[str, Fault] = {
    "cut off or reset in the body": _cut_in_body,
    "cut off or reset in the head": _cut_in_head,
    "no answer": _no_answer,
    "nonsense for a head": _nonsense,
    "late": _late,
    "stalls for a while": _pausing(0.1, 1.5),
    "trickles": _trickling,
    "in chunks": _chunked,
    "busy: 503, 429, 500": _busy,
    "length too long": _of_wrong_length(1),
    "length too short": _of_wrong_length(-1),
    "a byte damaged": _damaged,
}
# What slows a reader down for long.
RARE: dict[str, Fault] = {"range ignored": _range_ignored, "hangs": _pausing(_HUNG, _HUNG)}
_OF_SHARDS = {"length too short", "a byte damaged", "range ignored"}  # what is not done to an index


@dataclass
class Faulty(Served):
    """A server that draws a fault for some of the responses, and counts them."""

    rng: random.Random = field(default_factory=random.Random)
    counts: Counter[str] = field(default_factory=Counter)

    def next_fault(self) -> Fault:
        return self.draw

    def draw(self, handler: Handler, path: Path, start: int, stop: int) -> bool:
        """Answer with a random fault; return False if the response is to be right."""
        with self.lock:
            draw = self.rng.random()
            drawn = RARE if draw < SELDOM else FAULTS if draw < SELDOM + OFTEN else {}
            name = self.rng.choice([*drawn, ""] if not drawn else [*drawn])
            if path.suffix != ".tar" and name in _OF_SHARDS:
                name = ""
            self.counts["requests"] += 1
            self.counts["bytes"] += stop - start
            self.counts[name] += 1
        return bool(name) and drawn[name](handler, path, start, stop)


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
