"""The order of the samples, and their random numbers, stay equal from one version to the next.

Users compare runs, resume them and read the same set with another version. `PLANS` has one row per
plan. Each is delivered by loaders, on every rank, in two epochs. `expected/orders.json` has the
hash of the keys in their order, and that of the random numbers.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wdstrain as wt
from tests.conftest import Sample, write_tar
from tests.golden.expected import check, check_names, digest

EPOCHS = (0, 3)
SMALL = [7, 13, 1, 40, 24, 3, 17]  # samples of each shard: 105
LARGE = [5000, 1, 4800]  # longer than the positions that are computed together

Choose = Callable[[wt.Index], wt.Index]


def split(name: str, shares: Mapping[str, float], **options: Any) -> Choose:
    return lambda index: index.split(shares, **options)[name]


def fold(number: int, count: int, **options: Any) -> Choose:
    return lambda index: list(index.folds(count, **options))[number][0]


THIRDS = {"a": 1 / 3, "b": 1 / 3, "c": 1 / 3}
RAMP = np.linspace(0, 3, sum(SMALL))
HEAVY = np.where(np.arange(sum(LARGE)) % 5, 1.25, 6.2779)  # 12,310 further occurrences

# Name, then the options of the loader. `batch` is batch_size, and `buffer` is shuffle_buffer. Other
# words: `world` ranks; `set` is the set to read; `choose` takes samples of the index; `mix` is a
# mixture: the weights of its sets, None for the default. A buffer of 1000 is larger than the small set.
PLANS: dict[str, dict[str, Any]] = {
    "default": dict(batch=8),
    "file order, drop": dict(batch=8, shuffle=False),
    "file order, keep, 3 ranks": dict(batch=4, shuffle=False, tail="keep", world=3),
    "file order, pad, 2 ranks, 4 lanes": dict(batch=4, shuffle=False, tail="pad", world=2, lanes=4),
    "buffer 1, drop": dict(batch=4, buffer=1),
    "buffer 1, keep, 2 ranks": dict(batch=8, buffer=1, tail="keep", world=2),
    "buffer 6, drop": dict(batch=4, buffer=6),
    "buffer 6, pad, 2 ranks": dict(batch=4, buffer=6, tail="pad", world=2),
    "buffer 6, keep, 4 ranks": dict(batch=4, buffer=6, tail="keep", world=4),
    "buffer 6, drop, large set": dict(batch=500, buffer=6, set="large"),
    "buffer 100, drop, 2 lanes": dict(batch=8, buffer=100, lanes=2),
    "buffer 100, pad, 3 lanes": dict(batch=6, buffer=100, tail="pad", lanes=3),
    "buffer 100, keep, 4 lanes, 2 ranks": dict(batch=4, buffer=100, tail="keep", lanes=4, world=2),
    "buffer 100, keep, 1 sample a step": dict(batch=1, buffer=100, tail="keep", world=2),
    "buffer 100, pad, large set, 2 ranks": dict(
        batch=500, buffer=100, tail="pad", world=2, set="large"
    ),
    "buffer 1000, drop, 4 ranks": dict(batch=2, buffer=1000, world=4),
    "buffer 1000, pad, 3 ranks": dict(batch=4, buffer=1000, tail="pad", world=3),
    "buffer 1000, keep, another seed": dict(batch=4, buffer=1000, tail="keep", seed=-77),
    "keep, whole batches, 3 lanes": dict(batch=15, buffer=9, tail="keep", lanes=3),
    "pad, whole batches, 5 lanes": dict(batch=35, buffer=9, tail="pad", lanes=5),
    "pad, a batch larger than the set": dict(batch=40, tail="pad", world=4, lanes=8),
    "keep, a batch larger than the set": dict(batch=40, tail="keep", world=4, lanes=8),
    "keep, lanes that end early": dict(
        batch=8, buffer=6, tail="keep", world=2, lanes=4, where="year < 2033"
    ),
    "keep, ranks that end early": dict(
        batch=3, buffer=6, tail="keep", world=4, where="year < 2025"
    ),
    "keep, lanes that end early, 2 steps": dict(
        batch=8, buffer=6, tail="keep", world=2, lanes=4, where="year < 2018"
    ),
    "keep, ranks without samples, 1 step": dict(batch=2, tail="keep", world=4, where="year < 2002"),
    "pad, samples for one lane": dict(batch=2, tail="pad", world=4, where="year < 2002"),
    "weights of an array": dict(batch=8, buffer=6, weights=RAMP),
    "weights of a column, 2 ranks": dict(batch=8, tail="keep", world=2, weights="often"),
    "weights without repeats": dict(batch=8, shuffle=False, tail="keep", weights=RAMP / 3),
    "weights, file order, large set": dict(
        batch=1000, shuffle=False, tail="keep", set="large", weights=HEAVY
    ),
    "balance of classes": dict(batch=8, buffer=6, balance="kind"),
    "balance, pad, 3 lanes": dict(batch=6, buffer=100, tail="pad", lanes=3, balance="kind"),
    "mixture by sizes": dict(batch=8, mix=None),
    "mixture 5:3:1, buffer 6, 2 ranks": dict(
        batch=6, buffer=6, world=2, mix={"one": 5, "two": 3, "three": 1}
    ),
    "mixture, file order, 4 lanes": dict(
        batch=4, shuffle=False, lanes=4, mix={"one": 1, "two": 1, "three": 0.3}
    ),
    "mixture, 1 sample a step": dict(
        batch=1, buffer=100, mix={"one": 0.2, "two": 0.5, "three": 0.3}
    ),
    "mixture, 1 sample of a set": dict(batch=4, mix={"one": 0.5, "two": 0.486, "three": 0.014}),
    "where": dict(batch=4, where="kind != 'rare' and year >= 2020", world=2),
    "sample of a share": dict(batch=4, choose=lambda index: index.sample(0.3, seed=1)),
    "sample of a number": dict(batch=4, choose=lambda index: index.sample(50)),
    "split": dict(batch=4, choose=split("b", THIRDS, seed=2)),
    "split by groups": dict(batch=4, choose=split("a", THIRDS, by="group")),
    "split, stratified": dict(batch=4, choose=split("c", THIRDS, stratify="kind")),
    "split by groups, stratified": dict(
        batch=4, choose=split("b", {"a": 0.6, "b": 0.4}, by="group", stratify="kind")
    ),
    "folds": dict(batch=4, choose=fold(1, 4, seed=3)),
    "folds by groups": dict(batch=4, choose=fold(2, 3, by="group", stratify="kind")),
}


def write_set(folder: Path, counts: list[int], first: int = 0) -> Path:
    """Write shards whose samples have four columns. Keys count from `first`."""
    numbers = itertools.count(first)
    for shard, count in enumerate(counts):
        samples: list[Sample] = []
        for number in itertools.islice(numbers, count):
            row = {
                "kind": "rare" if number % 11 == 0 else ["a", "b"][number % 2],
                "year": 2000 + number,
                "often": number % 3 + 0.25,
                "group": f"g{number * 7 % 23}",
            }
            samples.append((f"{number}", {"json": json.dumps(row).encode()}))
        write_tar(folder / f"{shard:03d}.tar", samples)
    wt.index(str(folder), columns=["json.kind", "json.year", "json.often", "json.group"])
    return folder


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("orders")
    counts = {"small": SMALL, "large": LARGE, "one": [30, 9], "two": [50], "three": [3, 9, 4]}
    first = {"two": 200, "three": 300}
    return {
        name: write_set(folder / name, sizes, first.get(name, 0)) for name, sizes in counts.items()
    }


@dataclass(frozen=True)
class Numbers:
    """A field of the key of a sample, as its bytes say it, and of its random numbers."""

    names: tuple[str, ...] = ("json",)
    example: None = None

    def read(self, name: str, data: memoryview, out: Any, draws: Any) -> tuple[str, bytes]:
        return str(json.loads(bytes(data))["year"] - 2000), draws.astype("<f8").tobytes()


def loaders(sets: dict[str, Path], plan: dict[str, Any], fields: Any) -> list[wt.Loader]:
    """Return the loader of each rank."""
    names = {"batch": "batch_size", "buffer": "shuffle_buffer", "world": "world_size"}
    others = ("set", "choose", "mix")
    options = {names.get(name, name): plan[name] for name in plan if name not in others}
    options.setdefault("world_size", 1)
    ranks = range(options["world_size"])
    if "mix" in plan:
        sources = {name: str(sets[name]) for name in ("one", "two", "three")}
        options["weights"] = plan["mix"]
        return [wt.mix(sources, fields, rank=rank, **options) for rank in ranks]
    index = plan.get("choose", lambda i: i)(wt.open(sets[plan.get("set", "small")]))
    return [wt.Loader(index, fields, rank=rank, **options) for rank in ranks]


def rows_of(batch: dict[str, Any]) -> list[str]:
    """Return the key of each row; in brackets if the row is padding."""
    valid = batch.get("__valid__", [True] * len(batch["__key__"]))
    return [
        key if is_valid else f"({key})"
        for key, is_valid in zip(batch["__key__"], valid, strict=True)
    ]


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_delivers_the_same_order_and_random_numbers(
    sets: dict[str, Path], name: str
) -> None:
    order, numbers, delivered = list[str](), b"", 0
    for rank, loader in enumerate(loaders(sets, PLANS[name], {"numbers": Numbers()})):
        with closing(loader):
            for epoch in EPOCHS:
                batches = list(loader.epoch(epoch, until=epoch + 1))
                for step, batch in enumerate(batches):
                    rows = rows_of(batch)
                    order.append(f"{epoch} {rank} {step}: {' '.join(rows)}")
                    numbers += b"".join(draws for _, draws in batch["numbers"])
                    delivered += len(rows)
                for start in {len(batches) // 2, len(batches) - 1}:  # also what a resume delivers
                    rest = list(loader.epoch(epoch, start=start, until=epoch + 1))
                    assert list(map(rows_of, rest)) == list(map(rows_of, batches[start:]))
                    for batch in [*batches, *rest]:
                        assert [key for key, _ in batch["numbers"]] == batch["__key__"]
    value = {"rows": delivered, "order": digest("\n".join(order)), "numbers": digest(numbers)}
    check("orders", name, value)


# Orders that a person can read: one text for each epoch and rank, with " | " between the steps.
SHORT: dict[str, dict[str, Any]] = {
    "short: default": dict(batch=4, where="year < 2021"),
    "short: buffer 4, keep, 2 ranks": dict(
        batch=4, buffer=4, tail="keep", world=2, where="year < 2021"
    ),
    "short: file order, pad, 2 ranks": dict(
        batch=4, shuffle=False, tail="pad", world=2, where="year < 2021"
    ),
    "short: balance": dict(batch=4, buffer=3, balance="kind", where="year < 2021"),
    "short: mixture": dict(batch=4, buffer=12, mix={"one": 2, "two": 1, "three": 1}),
}


@pytest.mark.parametrize("name", SHORT)
def test_a_short_order_is_literally_the_same(sets: dict[str, Path], name: str) -> None:
    lines: dict[str, str] = {}
    for rank, loader in enumerate(loaders(sets, SHORT[name], {})):
        with closing(loader):
            for epoch in EPOCHS:
                steps = [" ".join(rows_of(batch)) for batch in loader.epoch(epoch, until=epoch + 1)]
                lines[f"epoch {epoch}, rank {rank}"] = " | ".join(steps)
    check("orders", name, lines)


def raw_numbers(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    # the raw numbers of a bit generator stay the same in every NumPy; those of its methods may not
    raw = rng.bit_generator.random_raw(2)
    return {"numbers": f"{sample['__key__']}: {raw[0]:016x} {raw[1]:016x}"}


def test_a_transform_gets_the_same_random_numbers(sets: dict[str, Path]) -> None:
    lines: list[str] = []
    for plan in ({"where": "year < 2003"}, {"weights": "often", "where": "year < 2004"}):
        loader = wt.Loader(
            str(sets["small"]), transform=raw_numbers, batch_size=2, tail="keep", **plan
        )
        with closing(loader):
            lines += [line for batch in loader.epoch(1, until=2) for line in batch["numbers"]]
    check("orders", "numbers of a transform", lines)


def test_the_loader_adds_nothing_of_its_own_to_the_order(sets: dict[str, Path]) -> None:
    """`loader.plan`, which `wt.plan_epoch` shows, gives the order that is delivered."""
    loader = wt.Loader(str(sets["small"]), {}, batch_size=4, lanes=4, tail="keep", shuffle_buffer=9)
    plan = loader.plan(2)
    with closing(loader):
        delivered = [rows_of(batch) for batch in loader.epoch(2, until=3)]
    planned = [
        list(map(str, plan.delivery(0, step, step + 1).ids.tolist())) for step in range(plan.steps)
    ]
    assert delivered == planned


def test_the_file_has_no_other_entries() -> None:
    check_names("orders", [*PLANS, *SHORT, "numbers of a transform"])
