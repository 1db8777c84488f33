"""What it costs to know what an epoch cost: the clocks behind `loader.report()` and the desks at which stuck decoders are found.

    .venv/bin/python scripts/benchmarks/bench_report.py

Two loaders that differ by a percent cannot be told apart on a machine whose turns differ by five. So what is added is timed by itself, a
hundred thousand times over, in the lines of code that run: for each sample, the row that is written to the decoder's desk; for each
batch, the desk, the watchdog's wait, and the readings of the clock. Their sum is set against what a sample takes the
loader in the same minute, one core for all that decodes and one for the loop: so the share is of the time of processors, and an upper bound
of what the speed loses. The log's line, once in an epoch, is not counted.
"""

from __future__ import annotations

import argparse
import io
import logging
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from record import Record, turns

import wdstrain as wt
from wdstrain.runtime.machine import cores
from wdstrain.runtime.watchdog import StallWatchdog

GOAL = 0.01
TIMES = 100_000


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer calls and epochs")
    parser.add_argument(
        "--minutes", type=float, default=2.0, help="after which no further turn of a case begins"
    )
    parser.add_argument(
        "--json", action="store_true", help="one JSON object on stdout at the end, text on stderr"
    )
    asked = parser.parse_args()
    record = Record("Cost of the report and of the watchdog", asked.json, asked.quick)
    watchdog = StallWatchdog(0)
    times = TIMES // 100 if asked.quick else TIMES
    batch = _each(lambda: _of_a_wait(watchdog), times) + 8 * _each(time.perf_counter, times)
    record.say("added", f"{batch * 1e6:.2f} us per batch")
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as place:
        shards = _shards(Path(place))
        cases: dict[str, tuple[Any, int]] = {
            "JPEG 128x128 + flip, batch 32": (
                {"image": wt.image(size=128, augment="flip"), "label": wt.label()},
                32,
            ),
            "label alone, batch 32": ({"label": wt.label()}, 32),
            "bytes of 7 KB, batch 64": (None, 64),
        }
        for name, (fields, size) in cases.items():
            rates = _rates(name, shards, fields, size, asked)
            spent = (min(cores(), 2) if fields else 1) / statistics.median(
                rates
            )  # seconds of processors for a sample
            added = batch / size
            word = "met" if added / spent <= GOAL else "MISSED"
            record.say(
                name,
                f"{statistics.median(rates):.0f} samples/s ({min(rates):.0f} to {max(rates):.0f}); added {added * 1e9:.0f} ns of "
                f"{spent * 1e6:.1f} us: {added / spent:.2%}, goal <= {GOAL:.0%}: {word}",
            )
    record.end("torch", "numpy")


def _each(call: Callable[[], object], times: int) -> float:
    """Seconds of one call, the least of five rounds; what calling costs is part of it."""
    found = []
    for _ in range(5):
        begun = time.perf_counter()
        for _ in range(times):
            call()
        found.append((time.perf_counter() - begun) / times)
    return min(found)


def _of_a_wait(watchdog: StallWatchdog) -> None:
    watchdog.start_wait()
    watchdog.end_wait()


def _shards(place: Path) -> str:
    def samples() -> Any:
        for number in range(4000):
            pixels = np.random.Generator(np.random.PCG64(number % 64)).integers(
                0, 255, (16, 16, 3), np.uint8
            )
            buffer = io.BytesIO()
            Image.fromarray(pixels).resize((128, 128), Image.Resampling.BICUBIC).save(
                buffer, "JPEG", quality=95
            )
            yield {"__key__": f"k{number:05d}", "jpg": buffer.getvalue(), "cls": number % 10}

    wt.pack(samples(), str(place / "shards"))
    return str(place / "shards")


def _rates(
    name: str, shards: str, fields: Any, size: int, asked: argparse.Namespace
) -> list[float]:
    """Samples a second of whole epochs, but for the first."""
    loader, found = wt.Loader(shards, fields, batch_size=size), []
    # The first epoch starts libraries, so it does not count.
    for _ in turns(name, 3 if asked.quick else 8, asked.minutes):
        begun, rows = time.perf_counter(), 0
        for batch in loader:
            rows += len(batch["__key__"])
        found.append(rows / (time.perf_counter() - begun))
    loader.close()
    return found[1:] or found


if __name__ == "__main__":
    main()
