"""Properties of samples that are known before bytes are copied: order, split, class, image."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from wdstrain.order.rng import bits
from wdstrain.shards.offsets import Ints

U64 = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class SampleMeta:
    """Properties of n samples, as arrays.

    rank: position in a shuffle. side: hash that decides the split, equal for samples of one group.
    image: equal for equal images, 0 if unknown. split, stratum: places in `splits` and `strata`.
    grouped: the user named groups.
    """

    rank: U64
    side: U64
    image: U64
    split: npt.NDArray[np.int32]
    stratum: npt.NDArray[np.int32]
    splits: tuple[str, ...]
    strata: tuple[str, ...]
    grouped: bool = False

    def take(self, numbers: Ints) -> SampleMeta:
        """Return the properties of some samples."""
        return replace(
            self,
            rank=self.rank[numbers],
            side=self.side[numbers],
            image=self.image[numbers],
            split=self.split[numbers],
            stratum=self.stratum[numbers],
        )


class Hashes:
    """Seeded 64-bit hashes of strings."""

    def __init__(self, seed: int) -> None:
        self._base = blake2b(f"pack\x1f{seed}\x1f".encode(), digest_size=8)

    def of(self, text: str) -> int:
        hashed = self._base.copy()
        hashed.update(text.encode("utf-8", "surrogateescape"))
        return int.from_bytes(hashed.digest(), "little")


class Codes:
    """Numbers of names, from 0, in the order in which the names first occur."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def of(self, name: str) -> int:
        return self.numbers.setdefault(name, len(self.numbers))


def sample_meta(rows: Iterable[tuple[str, str, str, str, str]], seed: int) -> SampleMeta:
    """Return the properties of samples, each given as (key, split, group, stratum, identity).

    Samples without a group form a group with those of the same identity.
    """
    builder = MetaBuilder(seed)
    for row in rows:
        builder.add(*row)
    return builder.finish()


class MetaBuilder:
    """Collects the properties of samples that are added one after another."""

    def __init__(self, seed: int) -> None:
        self.hashes = Hashes(seed)
        self._rank, self._groups, self._image = array("Q"), array("Q"), array("Q")
        self._split, self._stratum = array("i"), array("i")
        self._splits, self._strata, self._grouped = Codes(), Codes(), False

    def add(self, key: str, split: str, group: str, stratum: str, identity: str) -> int:
        """Add a sample and return its rank."""
        rank = self.hashes.of(key)
        image = rank if identity == key else self.hashes.of(identity) if identity else 0
        self._rank.append(rank)
        self._image.append(image)
        self._groups.append(self.hashes.of(group) if group else image or rank)
        self._grouped = self._grouped or bool(group)
        self._split.append(self._splits.of(split))
        self._stratum.append(self._strata.of(stratum))
        return rank

    def finish(self) -> SampleMeta:
        """Return the properties of all samples that were added."""
        codes, splits = np.array(self._split, np.int32), tuple(self._splits.numbers)
        return SampleMeta(
            np.array(self._rank, np.uint64),
            sides_of(np.array(self._groups, np.uint64), codes, splits, self._grouped),
            np.array(self._image, np.uint64),
            codes,
            np.array(self._stratum, np.int32),
            splits,
            tuple(self._strata.numbers),
            self._grouped,
        )


def sides_of(
    groups: U64, split: npt.NDArray[np.int32], splits: Sequence[str], grouped: bool
) -> U64:
    """Return the hash of each sample that decides its split: uint64[n].

    It is independent of the shuffle's rank. Without groups it also depends on the split that the
    sample comes from. The samples of `train` were chosen by this very hash, so without that a
    second split of them would be uneven.
    """
    sides = np.zeros(len(groups), np.uint64)
    for code, name in enumerate(splits):
        mine = split == code
        sides[mine] = bits(groups[mine], "side", "" if grouped else name)
    return sides
