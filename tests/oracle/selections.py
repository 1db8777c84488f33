"""Random selections and weights of a set, and what the documentation promises of each.

A selection behaves like any set, so all checks of loading hold for it, too.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wdstrain as wt
from tests.oracle.data_set import CLASSES, DataSet, Sample

COLUMNS = ["cls", *(f"json.{name}" for name in ("angle", "kind", "owner", "weight"))]
WEIGHTS = (0, 0.25, 0.5, 1, 1, 1.5, 2, 3.75)

Condition = tuple[str, Callable[[Sample], bool]]


@dataclass
class Weighting:
    """How often each sample occurs in an epoch.

    weights: by number of the sample. strata: numbers of samples whose total is exact within 1.
    """

    weights: dict[int, Fraction]
    strata: list[list[int]]

    @property
    def total(self) -> int:
        """Samples of an epoch: the sum of the weights, rounded."""
        return math.floor(sum(self.weights.values()) + Fraction(1, 2))

    def check(self, times: Mapping[int, int], total: int) -> None:
        """Assert that the samples of a whole epoch occur as often as their weights say.

        times: of each sample, by number. total: samples of the epoch that were delivered.
        """
        for number, weight in self.weights.items():
            most, least = math.ceil(weight), math.floor(weight) if total == self.total else 0
            assert least <= times.get(number, 0) <= most, (
                f"sample {number} of weight {weight} occurs {times.get(number, 0)} times"
            )
        for stratum in self.strata if total == self.total else ():
            meant = sum((self.weights[number] for number in stratum), Fraction())
            got = sum(times.get(number, 0) for number in stratum)
            assert abs(got - meant) < 1, f"{got} occurrences where the weights add up to {meant}"


@dataclass
class Choice:
    """Some samples of a set, as a loader is given them.

    data: the samples. source: for the loader. options: of the loader. kinds: drawn features.
    """

    data: DataSet
    source: Any
    options: dict[str, Any] = field(default_factory=dict)
    weighting: Weighting | None = None
    kinds: tuple[str, ...] = ()

    @property
    def samples(self) -> int:
        return self.weighting.total if self.weighting else len(self.data.samples)


def draw_choice(rng: random.Random, turn: int, data: DataSet, folder: Path) -> Choice:
    """Return a random selection of a set with shards in `folder`, or all samples, with weights.

    turn: number of the case, so that all kinds have their turn.
    """
    index = wt.index(str(folder), columns=COLUMNS)
    select, weigh = KINDS[turn % len(KINDS)]
    choice = Choice(data, str(folder)) if select is None else select(rng, data, index)
    return choice if weigh is None else weigh(rng, data, choice)


def numbers_of(index: wt.Index, data: DataSet) -> list[int]:
    """Return the numbers of the samples of a selection, in its order, by shard and key."""
    numbers = {
        (f"part-{at:03d}.tar", sample.key): sample.number
        for at, shard in enumerate(data.shards)
        for sample in shard
    }
    shards, keys = index.table["shard"].to_pylist(), index.table["key"].to_pylist()
    return [numbers[place] for place in zip(shards, keys, strict=True)]


# --- selections -----------------------------------------------------------------------------------


def draw_condition(rng: random.Random, data: DataSet) -> Condition:
    """Return a condition on the columns, and the same as a function of a sample of the model."""
    sample = rng.choice(data.samples)
    number, angle, size = sample.label, sample.angle, len(sample.fields["png"])
    kind, owner = CLASSES[rng.randrange(len(CLASSES))], sample.owner
    first_shard = {s.number for s in data.shards[0]}
    conditions: tuple[Condition, ...] = (
        (f"cls == {number}", lambda s: s.label == number),
        (f"json.angle > {angle} or kind == {kind!r}", lambda s: s.angle > angle or s.kind == kind),
        ("kind in ['ant', 'bee']", lambda s: s.kind in ("ant", "bee")),
        ("kind.startswith('a') or 'o' in kind", lambda s: s.kind in ("ant", "dog")),
        ("has.json and angle < 2.5", lambda s: s.angle < 2.5),
        (f"size.png >= {size}", lambda s: len(s.fields["png"]) >= size),
        (f"owner % 2 == {owner % 2}", lambda s: s.owner % 2 == owner % 2),
        (f"-3 < angle <= {angle}", lambda s: -3 < s.angle <= angle),
        ("shard != 'part-000.tar'", lambda s: s.number not in first_shard),
    )
    if any("bin" in s.fields for s in data.samples):
        conditions += (("not has.bin", lambda s: "bin" not in s.fields),)
    return rng.choice(conditions)


def choose_where(
    rng: random.Random, data: DataSet, index: wt.Index, of_loader: bool = False
) -> Choice:
    """Choose by a condition of the index, or one that is an option of the loader."""
    text, holds = draw_condition(rng, data)
    chosen = data.only(sample.number for sample in data.samples if holds(sample))
    if not chosen.samples:
        with pytest.raises(wt.UsageError, match=f"holds for none of {len(index)} samples"):
            wt.Loader(index, where=text) if of_loader else index.where(text)
        return Choice(data, index)
    if of_loader:
        return Choice(chosen, index, {"where": text}, kinds=("where of the loader",))
    selection = index.where(text)
    assert numbers_of(selection, data) == [sample.number for sample in chosen.samples], text
    return Choice(chosen, selection, kinds=("where",))


def choose_sample(rng: random.Random, data: DataSet, index: wt.Index) -> Choice:
    amount = rng.choice((0.25, 0.5, 1.0, rng.randrange(1, len(index) + 1)))
    wanted, seed = amount if isinstance(amount, int) else amount * len(index), rng.randrange(3)
    if wanted < 0.5:
        return Choice(data, index)
    selection = index.sample(amount, seed=seed)
    numbers = numbers_of(selection, data)
    assert math.floor(wanted) <= len(numbers) <= math.ceil(wanted)
    assert numbers == numbers_of(index.sample(amount, seed=seed), data), "not the same samples"
    return chosen_by(data, selection, "sample")


def choose_split(rng: random.Random, data: DataSet, index: wt.Index) -> Choice:
    """Choose a part of a split; check all parts."""
    shares = rng.choice(({"train": 0.75, "val": 0.25}, {"a": 0.5, "b": 0.3, "c": 0.2}))
    by, stratify = rng.choice((None, "owner", "owner")), rng.choice((None, "kind"))
    least = len(index) * min(shares.values())
    by = by if least >= 12 else None  # too few groups of three samples
    if least < 2:
        return Choice(data, index)
    parts = index.split(shares, by=by, stratify=stratify, seed=rng.randrange(3))
    numbers = {name: numbers_of(part, data) for name, part in parts.items()}
    check_parts(data, numbers, shares, by, stratify)
    return chosen_by(data, parts[rng.choice(list(shares))], "split")


def choose_folds(rng: random.Random, data: DataSet, index: wt.Index) -> Choice:
    """Choose the training or the validation part of a fold; check all folds."""
    count, stratify = rng.choice((2, 3, 5)), rng.choice((None, "kind", "json.kind"))
    if len(index) < 2 * count:
        return Choice(data, index)
    by = rng.choice((None, "owner")) if len(index) >= 12 * count else None
    folds = list(index.folds(count, by=by, stratify=stratify, seed=rng.randrange(3)))
    inside = {str(at): numbers_of(val, data) for at, (_, val) in enumerate(folds)}
    check_parts(data, inside, dict.fromkeys(inside, 1 / count), by, stratify)
    for (train, _), val in zip(folds, inside.values(), strict=True):
        assert sorted(numbers_of(train, data) + val) == sorted(data.by_number()), (
            "a fold lacks some"
        )
    return chosen_by(data, rng.choice(rng.choice(folds)), "folds")


def chosen_by(data: DataSet, selection: wt.Index, kind: str) -> Choice:
    """Return the choice of a selection, whose samples must be in the order of the set."""
    numbers = numbers_of(selection, data)
    chosen = data.only(numbers)
    assert [sample.number for sample in chosen.samples] == numbers, "not in file order"
    return Choice(chosen, selection, kinds=(kind,))


def check_parts(
    data: DataSet,
    parts: Mapping[str, Iterable[int]],
    shares: Mapping[str, float],
    by: str | None,
    stratify: str | None,
) -> None:
    """Assert that every sample is in one part, and that groups and shares are as promised."""
    numbers = [number for part in parts.values() for number in part]
    assert sorted(numbers) == sorted(data.by_number()), "parts are not disjoint and complete"
    samples = {name: [data.by_number()[number] for number in part] for name, part in parts.items()}
    room = 1.0 if len(parts) == 2 or (stratify is None and by is None) else 2.0
    if by:
        seen = Counter(owner for part in samples.values() for owner in {s.owner for s in part})
        assert max(seen.values()) == 1, "a group is in two parts"
        room = 2 * max(Counter(sample.owner for sample in data.samples).values())
    classes = [None] if stratify is None or by else [None, *{s.kind for s in data.samples}]
    for name, share in shares.items():
        for kind in classes:
            got = sum(kind in (None, sample.kind) for sample in samples[name])
            meant = share * sum(kind in (None, sample.kind) for sample in data.samples)
            assert abs(got - meant) < room + 1e-6, f"{name} has {got} of {kind}, not {meant}"


# --- weights --------------------------------------------------------------------------------------


def choose_weights(
    rng: random.Random, data: DataSet, choice: Choice, balance: bool = False
) -> Choice:
    """Weigh the samples by an array, a list or a column; or balance classes or owners."""
    # Of a condition of the loader, the weights are those of all samples.
    given = data.samples if "where" in choice.options else choice.data.samples
    option: dict[str, Any]
    if balance:
        option = {"balance": rng.choice(("kind", "kind", "owner"))}
        values = {sample.number: getattr(sample, option["balance"]) for sample in given}
    elif "where" in choice.options or rng.random() < 0.6:
        values = {sample.number: rng.choice(WEIGHTS) for sample in given}
        option = {"weights": rng.choice((list, np.array))(list(values.values()))}
    else:
        values, option = {sample.number: sample.weight for sample in given}, {"weights": "weight"}
    groups: dict[Any, list[int]] = {}
    for sample in choice.data.samples:
        groups.setdefault(values[sample.number], []).append(sample.number)
    each, weights = Fraction(len(choice.data.samples), len(groups)), dict[int, Fraction]()
    for value, group in groups.items():
        weights |= dict.fromkeys(group, each / len(group) if balance else Fraction(value))
    weighting, kinds = Weighting(weights, list(groups.values())), (*choice.kinds, *option)
    options = choice.options | option
    if weighting.total:
        return Choice(choice.data, choice.source, options, weighting, kinds)
    with pytest.raises(wt.PlanError, match="gives no sample in an epoch"):
        wt.Loader(choice.source, batch_size=1, **options)
    return choice


choose_balance = partial(choose_weights, balance=True)
choose_option = partial(choose_where, of_loader=True)
KINDS = (
    (choose_where, None),
    (choose_option, choose_weights),
    (choose_sample, None),
    (choose_split, choose_balance),
    (choose_folds, None),
    (None, choose_weights),
    (choose_option, choose_balance),
    (choose_split, None),
    (choose_folds, choose_weights),
    (None, choose_balance),
    (choose_option, None),
    (choose_sample, choose_weights),
    (choose_where, choose_weights),
)
