"""Random bits that are a function of a key and an index, for ever.

Every random decision of this package (order, jitter, crop, split) is read from here by its index, so it can be
re-entered at any place and does not depend on how many numbers somebody else has drawn. SplitMix64 (Steele, Lea and
Flood, 2014) in counter form: value i of key k is `mix(k + (i + 1) * GOLDEN)`. It passes BigCrush, costs six integer
operations, and needs no promise of a library: numpy does not promise the stream of `Generator` methods (NEP 19).
Keys come from blake2b over the words that name the decision, so `("jitter", seed, epoch)` and `("shards", seed,
epoch)` are unrelated streams.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b
from operator import index as as_int

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def key(*words: int | str) -> int:
    """A 64-bit key for the decision that `words` name; a string and a number never collide.

    Equal integers of any type give one key. Raises TypeError for other numbers.
    """
    return _key(*(str(word) if isinstance(word, str) else int(as_int(word)) for word in words))


@lru_cache(maxsize=1024)
def _key(*words: int | str) -> int:
    text = "\x1f".join(f"{type(word).__name__[0]}{word}" for word in words)
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogateescape"), digest_size=8).digest(), "little")


def bits(index: npt.NDArray[np.integer] | U64, *words: int | str) -> U64:
    """64 random bits for each index. uint64, the shape of `index`."""
    return _mix(np.uint64(key(*words)) + (index.astype(np.uint64) + np.uint64(1)) * _GOLDEN)


def below(
    limit: int | npt.NDArray[np.integer], index: npt.NDArray[np.integer] | U64, *words: int | str
) -> npt.NDArray[np.int64]:
    """A uniform integer in [0, limit) for each index; limits at most 2**31. int64, the shape of `index`."""
    high = bits(index, *words) >> np.uint64(32)
    return np.asarray((high * np.asarray(limit).astype(np.uint64)) >> np.uint64(32), np.int64)


def uniform(index: npt.NDArray[np.integer] | U64, columns: int, *words: int | str) -> npt.NDArray[np.float64]:
    """`columns` uniform numbers in [0, 1) for each index. float64[len(index), columns]."""
    # seeds: uint64[n, 1]; steps: uint64[1, columns]
    seeds = bits(index, *words)[:, None]
    steps = np.arange(1, columns + 1, dtype=np.uint64)[None, :] * _GOLDEN
    return np.asarray((_mix(seeds + steps) >> np.uint64(11)) * 2.0**-53)


def _mix(z: U64) -> U64:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(z ^ (z >> np.uint64(31)))
