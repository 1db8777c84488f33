"""Model of the splits of a conversion: their refusals and their promises.

This module does not import the package.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction

Shares = Mapping[str, float]


def exact(share: float) -> Fraction:
    """Return a share as it was written: 0.1 is a tenth."""
    return Fraction(str(share))


def empty_stratified_splits(count: int, shares: Shares) -> set[str] | None:
    """Return the splits of `count` stratified samples that get none; None if it is not promised.

    The total of each split differs from its exact share by less than one, or less than two if there
    are three splits or more.
    """
    least = 1 if len(shares) == 2 else 2
    if count >= len(shares) and any(count * exact(share) < least for share in shares.values()):
        return None
    return set() if count >= len(shares) else set(shares)


def check_stratified(parts: Mapping[str, Sequence[str]], shares: Shares) -> None:
    """Assert that a split has its share of all samples and of each class, to less than one sample.

    With three splits or more, to less than two. parts: the class of each sample, by split.
    """
    room = 1 if len(shares) == 2 else 2
    totals = Counter(name for part in parts.values() for name in part)
    for split, share in shares.items():
        counts = Counter(parts.get(split, ()))
        for name, got, total in (
            ("all classes", counts.total(), totals.total()),
            *((name, counts[name], total) for name, total in totals.items()),
        ):
            meant = exact(share) * total
            assert abs(got - meant) < room, f"{split} has {got} of {total} samples of {name}"


def splits_of_groups(
    groups: Mapping[str, Mapping[str, int]], shares: Shares
) -> dict[str, str] | None:
    """Return the split of each group, by the documented rule; None if the rule leaves a choice.

    groups: samples of each class, by group. Groups are assigned from the largest to the smallest.
    Each goes to the split where it reduces the error most. The error is the sum of
    (samples - share)^2 / share over the splits, for all samples and for each class.
    """
    totals = Counter[str]()
    for classes in groups.values():
        totals.update(classes)
    whole = totals.total()
    has = {split: Counter[str]() for split in shares}

    def change(split: str, classes: Mapping[str, int]) -> Fraction:
        share, amount = exact(shares[split]), sum(classes.values())
        parts = [(has[split].total(), amount, share * whole)]
        parts += [(has[split][name], more, share * totals[name]) for name, more in classes.items()]
        return sum(
            (((now + more - goal) ** 2 - (now - goal) ** 2) / goal for now, more, goal in parts),
            Fraction(0),
        )

    split_of = dict[str, str]()
    sizes = [sum(classes.values()) for classes in groups.values()]
    if len(set(sizes)) < len(sizes):
        return None
    for group in sorted(groups, key=lambda name: -sum(groups[name].values())):
        changes = {split: change(split, groups[group]) for split in shares}
        best = min(changes, key=lambda split: changes[split])
        ties = [split for split in shares if abs(changes[split] - changes[best]) < 1e-9]
        if len({shares[split] for split in ties}) > 1:
            return None
        split_of[group] = ties[0]
        has[ties[0]].update(groups[group])
    return split_of
