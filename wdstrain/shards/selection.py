"""Which samples a random share, a split or a fold of an index has. Integers only.

A choice is a pure function of the sizes, the columns and the seed: it is the same on every machine
and for every number of workers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from wdstrain.errors import UsageError
from wdstrain.order.rng import bits
from wdstrain.runtime.options import integer, is_number, refuse
from wdstrain.shards.offsets import Ints
from wdstrain.shards.where import Samples, column_values

_MIDDLE = 0.5 - 1e-6  # fractions from here on are rounded up; 1/2 itself would follow float errors


def number_of(index: Samples, key: str | int) -> int:
    """Return the number of the sample with a key, or of the sample at a position.

    Raises KeyError, IndexError, and UsageError for a key that several samples have.
    """
    if not isinstance(key, str):
        number = integer("index", key)
        if not -len(index) <= number < len(index):
            raise IndexError(
                f"sample {number}: there are {len(index)} samples, which count from 0."
            )
        return number % len(index)
    wanted = pa.scalar(key.encode("utf-8", "surrogateescape"), pa.large_binary())
    numbers = np.flatnonzero(pc.equal(index.offsets.rows.column(0), wanted))
    if not len(numbers):
        raise KeyError(f"no sample has the key {key!r}.")
    if len(numbers) > 1:
        shards = [index.shards[i].name for i in index.shard_of(numbers[:2]).tolist()]
        raise UsageError(
            f"{len(numbers)} samples have the key {key!r}, such as those in {shards[0]} and "
            f"{shards[1]}.",
            "Take one by its number, or choose a shard first: index.where('shard == "
            f"...')[{key!r}]",
        )
    return int(numbers[0])


def sample_ids(count: int, amount: float, seed: int) -> Ints:
    """Return a random choice of the ids below `count`, ascending.

    amount: a share (float in (0, 1]) or a number of samples (int >= 1).
    """
    seed = integer("seed", seed)
    is_share = not isinstance(amount, (int, np.integer)) and is_number(amount) and 0 < amount <= 1
    wanted = round(float(amount) * count) if is_share else integer("sample", amount, 1)
    if not 1 <= wanted <= count:
        raise UsageError(
            f"sample({amount!r}) of {count} samples: must be a share above 0 and at most 1, in which "
            f"there is a sample, or a number of samples from 1 to {count}."
        )
    chosen = np.argsort(bits(np.arange(count), "sample", seed), kind="stable")[:wanted]
    return np.sort(chosen)


def split_ids(
    index: Samples,
    shares: Mapping[str, float],
    by: str | None,
    stratify: str | None,
    seed: int,
) -> dict[str, Ints]:
    """Return the ids of each split, ascending. Every sample is in one of them; see `Index.split`."""
    seed, parts = integer("seed", seed), _checked(shares)
    part = _parts(index, list(parts.values()), by, stratify, seed)
    ids = {name: np.flatnonzero(part == number) for number, name in enumerate(parts)}
    for name, chosen in ids.items():
        if not len(chosen):
            raise UsageError(
                f"split: {name!r} gets none of {len(index)} samples.",
                "Give it a larger share"
                + (f", or split by smaller groups than those of {by!r}." if by else "."),
            )
    return ids


def fold_ids(
    index: Samples, count: int, by: str | None, stratify: str | None, seed: int
) -> Iterator[tuple[Ints, Ints]]:
    """Yield the ids (outside, inside) of each of `count` folds of equal size, ascending."""
    count = integer("folds", count, 2)
    shares = {str(number): 1 / count for number in range(count)}
    parts = list(split_ids(index, shares, by, stratify, seed).values())
    everything = np.arange(len(index))
    return ((np.setdiff1d(everything, part, assume_unique=True), part) for part in parts)


def _checked(shares: Mapping[str, float]) -> dict[str, float]:
    values = list(shares.values()) if isinstance(shares, Mapping) else []
    if not all(is_number(v) and 0 < v <= 1 for v in values) or abs(sum(values) - 1) > 1e-6:
        raise UsageError(
            f"split({shares!r}): must be shares by name, each above 0, that must add up to 1, such as "
            f"{{'train': 0.9, 'val': 0.1}}."
        )
    return {str(name): float(share) for name, share in shares.items()}


def _parts(
    index: Samples, shares: list[float], by: str | None, stratify: str | None, seed: int
) -> Ints:
    """Return the number of the split of each sample. int64[n]"""
    n = len(index)
    groups = np.arange(n) if by is None else group_codes(index, by)
    sizes = np.bincount(groups)  # samples of each group
    order = np.argsort(bits(np.arange(len(sizes)), "split", seed), kind="stable")
    if stratify is None:
        middle = np.cumsum(sizes[order]) - (sizes[order] + 1) / 2
        edges = np.round(np.cumsum(shares[:-1]) * n)
        chosen: Ints = np.searchsorted(edges, middle, side="right").astype(np.int64)
    else:
        strata = group_codes(index, stratify)
        strata = strata if by is None else _most_common(groups, strata)
        order = order[np.argsort(strata[order], kind="stable")]
        chosen = dealt(n, shares) if by is None else _dealt_groups(sizes[order], shares)
    part = np.empty(len(sizes), np.int64)
    part[order] = chosen
    return np.asarray(part[groups])


def dealt(n: int, shares: list[float]) -> Ints:
    """Return a split for each of n places, so that any run of places gets nearly its shares.

    The number of a split differs from its exact share by less than one with two splits, else by
    less than two.
    """
    part, rest, left = np.full(n, len(shares) - 1), np.arange(n), 1.0
    for number, share in enumerate(shares[:-1]):
        steps = np.floor(np.arange(len(rest) + 1) * (share / left) + _MIDDLE)
        chosen = np.diff(steps) > 0
        part[rest[chosen]] = number
        rest, left = rest[~chosen], left - share
    return part


def _dealt_groups(sizes: Ints, shares: list[float]) -> Ints:
    """Return a split for each group in order: always the one that lacks most of its share."""
    given, total, part = [0] * len(shares), 0, []
    for size in sizes.tolist():
        total += size
        lacking = [share * total - count for share, count in zip(shares, given, strict=True)]
        part.append(lacking.index(max(lacking)))
        given[part[-1]] += size
    return np.array(part, np.int64)


def _most_common(groups: Ints, strata: Ints) -> Ints:
    """Return the most frequent stratum of each group. int64[groups]"""
    pairs, counts = np.unique(np.stack([groups, strata]), axis=1, return_counts=True)
    order = np.lexsort((-counts, pairs[0]))
    first = np.unique(pairs[0][order], return_index=True)[1]
    return np.asarray(pairs[1][order][first])


def group_codes(index: Samples, name: str) -> Ints:
    """Return a number for each sample, the same for equal values of a column. int64[n]

    Each sample without a value has a number of its own.
    """
    values = column_values(index, name)
    refuse(
        pa.types.is_nested(values.type),
        f"column {name!r} holds lists. Group by a column of single values.",
    )
    if pa.types.is_floating(values.type):
        values = pc.add(values, 0.0)  # -0.0 equals 0.0
    values = values.dictionary_encode()
    missing = np.asarray(values.is_null())
    codes = np.asarray(pc.fill_null(values.indices, 0)).astype(np.int64)
    codes[missing] = len(values.dictionary) + np.arange(missing.sum())
    is_used = np.bincount(codes) > 0
    return np.asarray((np.cumsum(is_used) - 1)[codes])
