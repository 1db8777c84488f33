"""Interrupt a loop over a loader repeatedly, at random moments at which Python handles Ctrl-C.

These moments are calls of Python functions and returns of C functions in the main thread, as a
profiler sees them. Each is equally likely, however short. This module runs as a program of its own,
because a lock that stays locked never ends: the program then prints the stacks of all threads and
exits. Its last line is {"moments", "interrupted"}.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

import wdstrain as wt
from tests.conftest import live_threads_and_children

PATIENCE = 60.0  # seconds until a loop counts as hanging
SWALLOWED = ("<genexpr>", "__del__", "_remove")  # Python prints and drops their exceptions


class Moments:
    """Count the moments of the main thread within `with`, and raise Ctrl-C at the `nth`."""

    def __init__(self, nth: int = 0) -> None:
        self.count, self.nth = 0, nth

    def __enter__(self) -> Moments:
        sys.setprofile(self._look)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _look(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "c_return" or (event == "call" and frame.f_code.co_name not in SWALLOWED):
            self.count += 1
            if self.count == self.nth:
                sys.setprofile(None)
                signal.raise_signal(signal.SIGINT)


def interrupted(turn: Callable[[], None], nth: int, second: float | None) -> bool:
    """Return whether the turn ended with KeyboardInterrupt. second: delay of a second Ctrl-C."""
    ended_by_it, began = False, threading.Event()

    def again() -> None:
        began.wait()
        time.sleep(second or 0.0)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=again)
    if second is not None:
        thread.start()
    with suppress(KeyboardInterrupt):
        try:
            with Moments(nth) as moments:
                turn()
        except KeyboardInterrupt:
            ended_by_it = True
            raise
        finally:
            assert moments.count >= nth or not ended_by_it
            began.set()
            if second is not None:
                thread.join()
                time.sleep(0.001)  # the time of a training step
    return ended_by_it


def main() -> None:
    urls, given, count, seed, word = sys.argv[1:]
    options, rng, is_twice = json.loads(given), random.Random(int(seed)), word == "twice"
    kind = options.pop("kind")
    if kind == "transform":
        options["transform"] = lambda sample: {"n": int(sample["cls"])}
    elif kind == "array":
        options["fields"] = {"x": wt.array("x.npy", shape=(2048,), dtype="int32")}
    options |= {"batch_size": 2, "multiprocessing_context": "fork"}
    loader: wt.Loader | None = wt.Loader(urls, **options)

    def turn() -> None:
        for _ in range(2):
            list(loader or ())

    with Moments() as moments:
        turn()
    assert loader is not None
    promised = [batch["__key__"] for batch in loader.epoch(0)]
    ended = 0
    for number in range(int(count)):
        about, loader = f"after interrupt {number}", wt.Loader(urls, **options)
        faulthandler.dump_traceback_later(PATIENCE, exit=True)
        second = rng.uniform(0, 0.002) if is_twice else None
        ended += interrupted(turn, rng.randrange(1, moments.count), second)
        assert [batch["__key__"] for batch in loader.epoch(0)] == promised, about
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, about
        loader = None
        if live_threads_and_children():  # the traceback keeps the loader until a collection
            gc.collect()
        assert not live_threads_and_children(), about
        faulthandler.cancel_dump_traceback_later()
    print(json.dumps({"moments": moments.count, "interrupted": ended}))


if __name__ == "__main__":
    main()
