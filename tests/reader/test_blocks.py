"""Blocks of memory: they do not overlap while samples are held, and freed memory is used again."""

from __future__ import annotations

import numpy as np
import pytest

from wdstrain.reader.reader import Blocks

PAGE = 4096


@pytest.mark.parametrize("seed", range(3))
def test_blocks_do_not_overlap_and_are_freed_with_their_last_sample(seed: int) -> None:
    rng = np.random.default_rng(seed)
    blocks = Blocks(64 * PAGE)
    held: dict[int, tuple[int, int]] = {}  # start -> end, samples left
    refused = 0
    for _ in range(3000):
        size, samples = int(rng.integers(1, 12 * PAGE)), int(rng.integers(1, 5))
        start = blocks.take(size, samples) if rng.random() < 0.5 else None
        if start is not None:
            assert 0 <= start <= start + size <= 64 * PAGE
            assert all(start + size <= a or b <= start for a, (b, _) in held.items())
            held[start] = (start + size, samples)
        elif held:
            chosen = rng.choice(list(held), int(rng.integers(1, 4)))
            released = [a for a in set(chosen.tolist()) if held[a][1]]
            blocks.release(np.array(released))
            held = {a: (b, n - (a in released)) for a, (b, n) in held.items()}
            held = {a: (b, n) for a, (b, n) in held.items() if n}
        assert blocks.held == sum(-(-(b - a) // PAGE) * PAGE for a, (b, _) in held.items())
        refused += start is None
    assert refused < 3000
    for start, (_, samples) in held.items():
        blocks.release(np.full(samples, start))
    assert blocks.held == 0
    assert blocks.take(64 * PAGE, 1) == 0


def test_memory_is_taken_from_the_front() -> None:
    """So the system provides no more pages than are held at one time."""
    blocks, order = Blocks(1000 * PAGE), list[int]()
    for number in range(500):
        order.append(blocks.take((1 + number % 3) * PAGE, 1) or 0)
        if len(order) > 10:
            blocks.release(np.array([order.pop(0)]))
    assert max(order) < 60 * PAGE
