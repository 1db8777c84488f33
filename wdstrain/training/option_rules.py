"""Rules for the values of options: what they may be, as a function and in words."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple


class Rule(NamedTuple):
    """Which values an option may have, as a function and in words."""

    holds: Callable[[Any], bool]
    text: str


def _is_fold(text: str) -> bool:
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    return match is not None and 1 <= int(match[1]) <= int(match[2]) >= 2


def _is_jitter(values: tuple[float, ...]) -> bool:
    in_range = all(0 <= value < math.inf for value in values) and max(values[3:], default=0) <= 0.5
    return len(values) in (0, 1, 3, 4) and in_range


def parse_numbers(text: str) -> tuple[float, ...]:
    """Return the numbers of a list with commas between them."""
    try:
        return tuple(float(word) for word in text.split(","))
    except ValueError:
        raise ValueError(f"{text!r} is not a list of numbers; write for example 0.35,1") from None


AT_LEAST_0 = Rule(lambda value: value >= 0, ">= 0")
AT_LEAST_1 = Rule(lambda value: value >= 1, ">= 1")
FINITE = Rule(lambda value: 0 <= value < math.inf, "a finite number >= 0")
ABOVE_0 = Rule(lambda value: 0 < value < math.inf, "a finite number above 0")
BELOW_1 = Rule(lambda value: 0 <= value < 1, ">= 0 and below 1")
FACTOR = Rule(lambda value: 0 < value <= 1, "above 0 and at most 1")
FOLD = Rule(_is_fold, "K/N with a part K in 1 to N and N >= 2, such as 1/5")
PROBABILITY = Rule(lambda value: 0 <= value <= 1, "in 0 to 1")
JITTER = Rule(_is_jitter, "1, 3 or 4 finite numbers >= 0, the fourth (hue) at most 0.5")
SEED = Rule(lambda value: 0 <= value < 2**63, ">= 0 and below 2**63")
