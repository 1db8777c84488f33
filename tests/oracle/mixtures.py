"""Model of a mixture: which of its sources takes each turn, and when it is refused.

This module does not import the package.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise

UNITS = 65536  # shares are multiples of 1/UNITS


def shares_of(weights: Mapping[str, int]) -> dict[str, Fraction]:
    total = sum(weights.values())
    edges = [round(Fraction(UNITS * edge, total)) for edge in accumulate(weights.values())]
    parts = [Fraction(high - low, UNITS) for low, high in pairwise([0, *edges])]
    return dict(zip(weights, parts, strict=True))


def turns(shares: Mapping[str, Fraction], count: int) -> list[str]:
    """Return the source of each of the first `count` turns of a lane.

    A source may take its next turn once its share of the turns exceeds the turns it has taken. Its
    deadline is the turn at which the excess would reach one. The earliest deadline comes first.
    """
    taken, order = dict.fromkeys(shares, 0), list[str]()
    for turn in range(1, count + 1):
        ready = [name for name in shares if shares[name] * turn > taken[name]]
        order.append(min(ready, key=lambda name: math.ceil((taken[name] + 1) / shares[name])))
        taken[order[-1]] += 1
    return order


def mixed_steps(
    totals: Mapping[str, int], shares: Mapping[str, Fraction], per_lane: int, lanes: int
) -> list[dict[str, int]]:
    """Return the samples of each source in each step of an epoch.

    totals: samples of each source. per_lane: samples that a step takes from each lane. The epoch
    ends before the first step that a source cannot fill.
    """
    most = sum(totals.values()) // (per_lane * lanes)
    order, left, steps = turns(shares, most * per_lane), dict(totals), list[dict[str, int]]()
    for at in range(0, len(order), per_lane):
        taken = {name: order[at : at + per_lane].count(name) * lanes for name in shares}
        left = {name: left[name] - taken[name] for name in shares}
        if min(left.values()) < 0:
            break
        steps.append(taken)
    return steps


def mixture_refusal(steps: Sequence[Mapping[str, int]]) -> str | None:
    """Return the words of the error of a mixture with these steps; None if it is not refused."""
    if not steps:
        return "cannot fill one step"
    unused = [name for name in steps[0] if not any(step[name] for step in steps)]
    is_refused = f"gives no sample in an epoch of {len(steps)} step"
    return f"source {unused[0]} {is_refused}" if unused else None
