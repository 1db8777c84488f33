"""What is seen of a sample in words: numbers, arrays, shares of classes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from wdstrain.looking.picturing import ends

Array = npt.NDArray[Any]

LETTERS = 300  # of a text that are kept
_SHARES = 3  # classes of a mixed label that are named


def cut(text: str) -> str:
    """The beginning of a text."""
    text = " ".join(text.split())
    return text if len(text) <= LETTERS else f"{text[: LETTERS - 1]}…"


def array_said(value: Array) -> str:
    """Kind, shape and range of an array."""
    kind = f"{value.dtype}{list(value.shape)}"
    if value.dtype.kind not in "iuf" or not value.size:
        return kind
    if value.size <= 4:
        return f"{kind} {' '.join(number_said(one) for one in value.ravel().tolist())}"
    low, high = ends(value)
    return f"{kind}, {low:.4g} to {high:.4g}"


def number_said(value: Any) -> str:
    """A number of a label."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return cut(str(value))
    if isinstance(value, (bool, int)) or (
        math.isfinite(number) and number == int(number) and abs(number) < 1e15
    ):
        return str(int(number)) if not isinstance(value, (bool, int)) else str(value)
    return f"{number:.4g}"


def shares_said(value: Array, classes: Sequence[str]) -> str:
    """Shares of classes by the largest of them, or the classes that are marked; empty for numbers that are something else."""
    if (
        value.ndim != 1
        or value.dtype.kind != "f"
        or len(value) < 2
        or (classes and len(classes) != len(value))
    ):
        return ""
    shares = value.astype(np.float64)
    if not (np.isfinite(shares).all() and (shares >= 0).all() and (shares <= 1.001).all()):
        return ""
    names = classes or [str(number) for number in range(len(shares))]
    if np.isin(shares, (0, 1)).all() and (classes or shares.sum() == 1):
        return "|".join(names[i] for i in np.flatnonzero(shares).tolist()) or "none"
    if abs(shares.sum() - 1) > 0.02:
        return ""
    largest = np.argsort(-shares, kind="stable")[:_SHARES]
    return ", ".join(f"{names[i]} {shares[i]:.0%}" for i in largest.tolist() if shares[i] >= 0.005)
