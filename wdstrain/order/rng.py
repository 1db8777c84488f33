"""Random bits as a pure function of a key and an index.

Every random decision (order, jitter, crop, split) reads its bits here by index. The bits do not
depend on how many numbers were drawn before, so an epoch can start at any step.

The generator is SplitMix64 (Steele, Lea and Flood, 2014) as a counter: value i of key k is
`mix(k + (i + 1) * GOLDEN)`. NumPy's `Generator` is not used, because NumPy may change its stream
(NEP 19). A key is the blake2b hash of the words that name the decision. `("jitter", seed, epoch)`
and `("shards", seed, epoch)` are therefore unrelated streams.
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
    """Return the 64-bit key of the decision that `words` name.

    Equal integers of any type give the same key. A string and an integer never do.
    Raises TypeError for a number that is not an integer.
    """
    return _key(*(str(word) if isinstance(word, str) else int(as_int(word)) for word in words))


@lru_cache(maxsize=1024)
def _key(*words: int | str) -> int:
    text = "\x1f".join(f"{type(word).__name__[0]}{word}" for word in words)
    return int.from_bytes(
        blake2b(text.encode("utf-8", "surrogateescape"), digest_size=8).digest(), "little"
    )


def bits(index: npt.NDArray[np.integer] | U64, *words: int | str) -> U64:
    """Return 64 random bits for each index. uint64, shape of `index`."""
    return _mix(np.uint64(key(*words)) + (index.astype(np.uint64) + np.uint64(1)) * _GOLDEN)


def below(
    limit: int | npt.NDArray[np.integer], index: npt.NDArray[np.integer] | U64, *words: int | str
) -> npt.NDArray[np.int64]:
    """Return a uniform integer in [0, limit) for each index. int64, shape of `index`.

    limit: one limit, or one for each index; at most 2**31.
    """
    high = bits(index, *words) >> np.uint64(32)
    return np.asarray((high * np.asarray(limit).astype(np.uint64)) >> np.uint64(32), np.int64)


def uniform(
    index: npt.NDArray[np.integer] | U64, columns: int, *words: int | str
) -> npt.NDArray[np.float64]:
    """Return `columns` uniform numbers in [0, 1) for each index. float64[len(index), columns]."""
    return stretched(bits(index, *words), columns)


def stretched(seeds: U64, columns: int) -> npt.NDArray[np.float64]:
    """Return uniform numbers in [0, 1) from 64 random bits each. float64[len(seeds), columns]."""
    steps = np.arange(1, columns + 1, dtype=np.uint64)[None, :] * _GOLDEN  # uint64[1, columns]
    return np.asarray((_mix(seeds[:, None] + steps) >> np.uint64(11)) * 2.0**-53)


def _mix(z: U64) -> U64:
    """Return the output function of SplitMix64 for each state. uint64, shape of `z`."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(z ^ (z >> np.uint64(31)))
