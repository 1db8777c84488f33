"""Many drawn cases in one test: the seed of the first that fails is in its error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


def check_block(check: Callable[[int, Path], None], block: int, size: int, folder: Path) -> None:
    """Run `check(seed, folder of its own)` for the `size` seeds of a block; blocks share no seed."""
    for seed in range(1000 + block * size, 1000 + (block + 1) * size):
        try:
            check(seed, folder / str(seed))
        except BaseException as error:
            error.args = (f"case {seed}: {error}",)
            raise
