"""Measurements that are made again where other machines had our processors meanwhile.

Who uses all of them suffers more from that than who uses one, so the ratios that the benchmarks print would be those of the hour.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

Measured = TypeVar("Measured")

MOST = 0.05  # of our processors' time
_TRIES = 4


def undisturbed(
    measure: Callable[[], Measured], failed: Callable[[Measured], bool] = lambda _: False
) -> tuple[Measured, float]:
    """What `measure` returns, and the share of our processors' time that other machines had meanwhile. Above MOST it is measured anew,
    three times at most, unless it failed; the one with the smallest share counts."""
    found: list[tuple[float, Measured]] = []
    while len(found) < _TRIES and (not found or (found[-1][0] > MOST and not failed(found[-1][1]))):
        before = _ticks()
        result = measure()
        busy, stolen = (after - earlier for after, earlier in zip(_ticks(), before, strict=True))
        found.append((stolen / max(1, busy + stolen), result))
    share, result = min(found, key=lambda one: one[0])
    return result, share


def _ticks() -> tuple[int, int]:
    """What the processors did, and what others had of them who share their machine; 0 where the system does not say."""
    with suppress(OSError), open("/proc/stat") as file:
        user, nice, system, _, _, irq, soft, steal, *_ = map(int, file.readline().split()[1:])
        return user + nice + system + irq + soft, steal
    return 0, 0
