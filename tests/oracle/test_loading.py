"""Random cases of loading, compared with a model that shares no code with the package.

Every case is a function of its seed, which pytest prints as the name of the test:

    pytest tests/oracle/test_loading.py -k 17
"""

from __future__ import annotations

import copy
import json
import multiprocessing
import os
import pickle
import random
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

import wdstrain as wt
from tests.oracle.data_set import DataSet, Sample, draw_data_set, write
from tests.oracle.mixtures import mixed_steps, mixture_refusal, shares_of, turns
from tests.oracle.selections import COLUMNS, Choice, Weighting, check_parts, draw_choice
from tests.oracle.views import BROKEN, DECODED, VIEWS, compare, drawn, options, rows
from tests.support.drawn_cases import check_block
from tests.support.servers import cut, cut_in_headers, serving, status

DEFAULT = 40  # cases of the default suite
MIXTURES = 10  # further cases of the default suite
BLOCK, BLOCKS = 75, 4  # cases of the slow part: BLOCKS tests of BLOCK cases each

Batch = Mapping[str, Any]


@pytest.mark.parametrize("seed", range(DEFAULT))
def test_a_random_set_is_delivered_once_with_the_values_of_the_model(
    seed: int, tmp_path: Path
) -> None:
    """This holds for any workers and ranks."""
    check_case(seed, tmp_path)


@pytest.mark.parametrize("seed", range(100, 100 + MIXTURES))
def test_a_random_mixture_takes_the_steps_of_the_model(seed: int, tmp_path: Path) -> None:
    """It is refused if the model has no step, or no sample of a source."""
    rng = random.Random(seed)
    data = draw_data_set(rng, most=rng.choice((4, 30)), raw=seed % 3 == 0)
    paths = write(data, tmp_path / "set", rng)
    given = draw_options(rng, len(data.samples))
    case = Case(rng, data, paths, paths, given, "", rng.randrange(3))
    check_mixture(case)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("block", range(BLOCKS))
def test_more_random_sets_are_delivered_once_with_the_values_of_the_model(
    block: int, tmp_path: Path
) -> None:
    check_block(check_case, block, BLOCK, tmp_path)


Orders = list[list[list[int]]]  # sample numbers by rank, step and row


@dataclass
class Case:
    """One random data set, and the way a loader reads it.

    data: the samples that it reads. paths: shards of the set. source: the set, or a selection of
    it. options: of the loader. view: form of the samples. weighting: how often samples occur.
    orders: the delivered epoch of each rank. draws: results of random numbers in it, by step.
    """

    rng: random.Random
    data: DataSet
    paths: list[Path]
    source: Any
    options: dict[str, Any]
    view: str
    epoch: int
    weighting: Weighting | None = None
    orders: Orders = field(default_factory=list)
    draws: list[list[Any]] = field(default_factory=list)

    @property
    def samples(self) -> int:
        """Samples of an epoch, each counted as often as it occurs."""
        return self.weighting.total if self.weighting else len(self.data.samples)

    @property
    def folder(self) -> Path:
        """The folder of the shards."""
        return self.paths[0].parent

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return int(self.options["world_size"])

    @property
    def global_batch(self) -> int:
        """Samples of one step over all ranks."""
        return int(self.options["batch_size"]) * self.world_size

    def draw_rank(self) -> int:
        """Return the number of a rank."""
        return self.rng.randrange(self.world_size)

    def loader(self, rank: int, source: Any = None, **more: Any) -> wt.Loader:
        """Return the loader of a rank. source: replaces the shards. more: further options."""
        named = {**self.options, **options(self.view), "rank": rank, **more}
        return wt.Loader(self.source if source is None else source, **named)

    def read(self, rank: int, source: Any = None, **more: Any) -> list[Batch]:
        """Return all batches of the epoch on one rank."""
        loader = self.loader(rank, source, **more)
        try:
            batches: list[Batch] = list(loader.epoch(self.epoch))
            assert len(batches) == len(loader), "len() is not the number of batches"
        finally:
            loader.close()
        return batches

    def compare(self, batches: list[Batch]) -> None:
        """Assert that every row holds the values of the model."""
        for batch in batches:
            compare(self.view, batch, self.data)

    def numbers(self, batches: list[Batch]) -> list[list[int]]:
        """Return the numbers of the samples by step and row."""
        return [rows(self.view, batch) for batch in batches]


def draw_case(seed: int, folder: Path) -> tuple[Case, tuple[str, ...]]:
    """Return a random case, and the kinds of its selection.

    In every third case arrays are raw; every other case has a selection or weights.
    """
    rng = random.Random(seed)
    raw = seed % 3 == 0
    data = draw_data_set(rng, most=30 if raw else 60, raw=raw)
    paths = write(data, folder / "set", rng)
    choice = Choice(data, str(folder / "set"))
    if seed % 2:
        choice = draw_choice(rng, seed // 2, data, folder / "set")
    given = draw_options(rng, choice.samples) | choice.options
    view, epoch = "raw" if raw else rng.choice(VIEWS), rng.randrange(3)
    if view == "raw" and given["tail"] == "pad" and rng.random() < 0.7:
        given["tail"] = "keep"  # padded arrays are not read straight into batches
    case = Case(rng, choice.data, paths, choice.source, given, view, epoch, choice.weighting)
    return case, choice.kinds


def check_of(seed: int, kinds: tuple[str, ...]) -> Callable[[Case], None]:
    """Return one more property to check, all in turn. Some need a whole set."""
    checks = CHECKS if kinds else CHECKS + OF_WHOLE_SETS
    return checks[seed // 2 % len(checks)]


def check_case(seed: int, folder: Path) -> None:
    """Compare one random case with the model, and check one more property of it."""
    case, kinds = draw_case(seed, folder)
    case.orders = check_epoch(case, case.source)
    check_of(seed, kinds)(case)


def draw_options(rng: random.Random, samples: int) -> dict[str, Any]:
    """Return random options of a loader that are valid for every case."""
    tail = rng.choice(("drop", "pad", "keep"))
    world_size = rng.choice((1, 1, 2, 3, 4))
    if samples < world_size and tail == "drop":  # less than one batch per rank
        tail = "pad"
    lanes = rng.choice((None, world_size, 2 * world_size))
    per_lane = rng.choice((1, 2, 3, 5))
    batch_size = per_lane * (lanes or world_size) // world_size
    if tail == "drop":
        batch_size = max(1, min(batch_size, samples // world_size))
        if lanes is not None and batch_size * world_size % lanes:
            lanes = None
    return {
        "batch_size": batch_size,
        "world_size": world_size,
        "lanes": lanes,
        "tail": tail,
        "shuffle": rng.random() < 0.8,
        "shuffle_buffer": rng.choice((None, 1, 2, 7, 50, 10_000)),
        "seed": rng.choice((0, 1, rng.getrandbits(31))),
    }


def read_until_error(loader: wt.Loader, epoch: int) -> tuple[list[Batch], str | None]:
    """Return the batches of an epoch up to its end or its error, and the error's text."""
    batches: list[Batch] = []
    try:
        for batch in loader.epoch(epoch):
            batches.append(batch)
    except wt.WdstrainError as error:
        return batches, str(error)
    finally:
        loader.close()
    return batches, None


def check_epoch(case: Case, source: Any) -> Orders:
    """Read the epoch on every rank, compare all values, and return the orders."""
    by_rank, real, tail = [], Counter[int](), case.options["tail"]
    case.draws = []
    for rank in range(case.world_size):
        batches = case.read(rank, source)
        case.compare(batches)
        by_rank.append(case.numbers(batches))
        case.draws.append(list(map(drawn, batches)))
        for batch, step in zip(batches, by_rank[-1], strict=True):
            valid = batch["__valid__"].tolist() if tail == "pad" else [True] * len(step)
            real.update(number for number, good in zip(step, valid, strict=True) if good)
    assert len({len(steps) for steps in by_rank}) == 1, "ranks differ in steps"
    check_counts(case, by_rank, real)
    plain = not case.options["shuffle"] and case.weighting is None
    if plain and by_rank[1:] == [] and case.options["lanes"] in (None, 1):
        order = [number for step in by_rank[0] for number in step][: real.total()]
        dropped = len(case.data.samples) - real.total()
        expected = [sample.number for sample in case.data.samples]
        # With tail="drop" one run of samples is dropped.
        assert any(
            order == expected[:at] + expected[at + dropped :] for at in range(len(order) + 1)
        )
    return by_rank


def check_counts(case: Case, by_rank: Orders, real: Counter[int]) -> None:
    """Check that samples are delivered once, or as their weights say.

    "drop" drops less than a global batch.
    """
    total, step, tail = case.samples, case.global_batch, case.options["tail"]
    expected = total // step * step if tail == "drop" else total
    assert real.total() == expected, f"{real.total()} samples of {expected}"
    if case.weighting is None:
        repeated = [number for number, times in real.items() if times > 1]
        assert not repeated, f"repeated: {repeated}"
    else:
        case.weighting.check(real, expected)
    assert set(real) <= set(case.data.by_number())
    if tail != "keep":
        sizes = {len(rows) for steps in by_rank for rows in steps}
        assert sizes <= {case.options["batch_size"]}


def check_workers(case: Case) -> None:
    """Worker processes deliver the same batches in the same order as threads."""
    rank, workers = case.draw_rank(), case.rng.choice((1, 2))
    method = case.rng.choice(("fork", "fork", "fork", "spawn", "forkserver"))
    batches = case.read(rank, num_workers=workers, multiprocessing_context=method)
    assert case.numbers(batches) == case.orders[rank]
    case.compare(batches)
    assert list(map(drawn, batches)) == case.draws[rank], "draws depend on workers"


def pickled(loader: wt.Loader) -> wt.Loader:
    """Return a copy, as another process gets it."""
    received: wt.Loader = pickle.loads(pickle.dumps(loader))
    return received


def check_resume(case: Case) -> None:
    """Check that a stopped loop continues with the next batch, also in a new loader or a copy.

    After the last batch that is the first of the next epoch.
    """
    rng, rank = case.rng, case.draw_rank()
    steps = len(case.orders[rank])
    stop = rng.randrange(steps + 1)
    loader = case.loader(rank)
    loader.set_epoch(case.epoch)
    before = list(islice(loader, stop)) if stop else []
    state = json.loads(json.dumps(loader.state_dict()))
    copied = rng.choice((None, None, pickled, copy.copy, copy.deepcopy))
    if copied is not None:  # it begins where the loader is
        with loader:
            loader = copied(loader)
    elif rng.random() < 0.7:
        loader.close()
        loader = case.loader(rank, num_workers=rng.choice((0, 0, 0, 1)))
    if copied is None:
        loader.load_state_dict(state)
    after = list(loader)
    following = next(iter(loader), None)
    loader.close()
    check_other_states(case, rank, state)
    case.compare(after)
    if stop == steps:
        before, after, following = [], before, after[0]
    assert case.numbers(before + after) == case.orders[rank], f"stopped at step {stop} of {steps}"
    assert list(map(drawn, before + after)) == case.draws[rank]
    if following is not None:
        expected = replace(case, epoch=case.epoch + 1).read(rank)
        assert case.numbers([following]) == case.numbers(expected[:1]), (
            "the epoch after a resume is not the next one"
        )


def check_other_states(case: Case, rank: int, state: Mapping[str, Any]) -> None:
    """Check that a state is refused with another selection or other weights."""
    whole, given = wt.open(str(case.folder)), case.source
    given = given if isinstance(given, wt.Index) else whole
    others: list[tuple[str, Any, dict[str, Any]]] = []
    if case.weighting is not None:
        more = {"balance": None, "weights": [8.0] * len(given)}
        others.append(("weights was", given, more))
    others.append(("seed was", given, {"seed": case.options["seed"] + 1}))
    if max(len(case.data.samples), case.global_batch) < len(whole):
        others.append(("data was", whole, {"where": None, "weights": None, "balance": None}))
    for difference, source, more in others:
        other = case.loader(rank, source, **more)
        with pytest.raises(wt.UsageError, match=difference):
            other.load_state_dict(state)
        other.close()


def check_ranks(case: Case) -> None:
    """With `lanes` fixed, another number of ranks takes the same global batches."""
    lanes, total = case.options["lanes"] or case.world_size, case.global_batch
    sizes = [size for size in range(1, lanes + 1) if lanes % size == 0 and total % size == 0]
    world_size = case.rng.choice(sizes)
    ranks = {"lanes": lanes, "world_size": world_size, "batch_size": total // world_size}
    other = replace(case, options=case.options | ranks)
    others = check_epoch(other, case.source)
    for step in range(len(case.orders[0])):
        global_batch = sorted(number for rank in case.orders for number in rank[step])
        assert global_batch == sorted(number for rank in others for number in rank[step]), (
            f"step {step}"
        )
    check_state_of_ranks(case, other, others)


def check_state_of_ranks(case: Case, other: Case, orders: Orders) -> None:
    """The state of any rank continues on every rank of another number of ranks."""
    stop = case.rng.randrange(len(orders[0]))
    loader = case.loader(case.draw_rank())
    loader.set_epoch(case.epoch)
    delivered = list(islice(loader, stop)) if stop else []
    state = json.loads(json.dumps(loader.state_dict()))
    loader.close()
    assert len(delivered) == stop
    for rank in range(other.world_size):
        resumed = other.loader(rank)
        resumed.load_state_dict(state)
        assert other.numbers(list(resumed)) == orders[rank][stop:], f"rank {rank}, step {stop}"
        resumed.close()


def broken(field: str, sample: Sample) -> bytes:
    """Return bytes that no decoder accepts; of large arrays as many as before."""
    data = sample.fields[field]
    return BROKEN[field].ljust(len(data) if len(data) > 4096 else 0)


def damage(case: Case, field: str, victims: set[int]) -> Case:
    """Return a case whose data set has undecodable samples. victims: their numbers."""
    shards = tuple(
        tuple(
            replace(sample, fields=sample.fields | {field: broken(field, sample)})
            if sample.number in victims
            else sample
            for sample in shard
        )
        for shard in case.data.shards
    )
    data = replace(case.data, shards=shards)
    paths = write(data, case.folder.parent / "damaged", case.rng)
    damaged = replace(case, data=data, paths=paths, source=paths)
    # Sizes of samples differ now, and with them the default of the shuffle buffer.
    undecoded = replace(damaged, view="bytes")
    damaged.orders = [undecoded.numbers(undecoded.read(rank)) for rank in range(case.world_size)]
    return damaged


def check_bad_samples(case: Case) -> None:
    """Check that an undecodable sample is replaced and counted, or ends the loop at its batch."""
    rng, samples = case.rng, case.data.samples
    view = rng.choice([view for view in DECODED if view not in ("raw", "tensors")])
    view = rng.choice((view, "raw" if case.data.raw else "tensors"))
    field = rng.choice(DECODED[view])
    count = min(len(samples) // 2, rng.randrange(1, 8))
    begin = rng.randrange(len(samples) - count + 1)
    run = samples[begin : begin + count]  # longer than a small batch
    chosen = rng.choice((run, rng.sample(samples, count)))
    victims = {sample.number for sample in chosen}
    if not victims:
        return
    damaged = replace(damage(case, field, victims), view=view)
    workers, rank = rng.choice((0, 0, 0, 1)), case.draw_rank()
    planned = damaged.orders[rank]
    first = next((at for at, step in enumerate(planned) if victims & set(step)), None)

    delivered, error = read_until_error(damaged.loader(rank, num_workers=workers), case.epoch)
    if error is not None and [] in planned[: len(delivered) + 1]:
        first = planned.index([])  # the shape of an empty batch is that of a sample: a bad one
    assert damaged.numbers(delivered) == planned[:first]
    assert (error is None) == (first is None), f"first bad batch: {first}; error: {error}"
    if error is not None:
        assert any(sample.key in error for sample in chosen), error
        assert "transform" in view or field in error

    loader = damaged.loader(rank, num_workers=workers, on_error="replace", max_errors=1.0)
    replaced, error = read_until_error(loader, case.epoch)
    if error is not None:  # no good sample is left to replace a bad one
        assert len(victims) * 2 >= len(samples), error
        return
    replace(case, view=view).compare(replaced)
    count = 0
    for step, expected in zip(damaged.numbers(replaced), planned, strict=True):
        for number, planned_number in zip(step, expected, strict=True):
            is_victim = planned_number in victims
            count += is_victim
            assert number not in victims if is_victim else number == planned_number
    report = loader.report()
    assert json.loads(json.dumps(report)) == report
    assert sum(report["bad_reasons"].values()) == report["bad"]
    assert {bad["key"] for bad in report["bad_samples"]} <= {sample.key for sample in chosen}
    if case.options["tail"] != "pad":
        assert report["bad"] == count
    start = rng.randrange(len(planned)) if planned else 0
    again = damaged.loader(rank, num_workers=1 - workers, on_error="replace", max_errors=1.0)
    rest = list(again.epoch(case.epoch, start=start)) if planned else []
    again.close()
    assert damaged.numbers(rest) == damaged.numbers(replaced)[start:], "another substitute"


def check_part(case: Case) -> None:
    """Check that some of the shards, listed or named by a pattern, are a set of their own."""
    paths = case.paths
    chosen = sorted(case.rng.sample(range(len(paths)), case.rng.randrange(1, len(paths) + 1)))
    data = replace(case.data, shards=tuple(case.data.shards[index] for index in chosen))
    part = replace(case, data=data, paths=[paths[index] for index in chosen])
    if case.options["tail"] == "drop" and len(data.samples) < case.global_batch:
        with pytest.raises(wt.WdstrainError):
            part.loader(0, part.paths)
        return
    source: Any = part.paths
    if case.rng.random() < 0.5:
        names = ",".join(f"{index:03d}" for index in chosen)
        names = f"{{{names}}}" if len(chosen) > 1 else names
        source = str(case.folder / f"part-{names}.tar")
    check_epoch(part, source)


def check_server(case: Case) -> None:
    """Check that a server with transient faults delivers as the disk, also through a cache."""
    rng, rank = case.rng, case.draw_rank()
    more: dict[str, Any] = {}
    if rng.random() < 0.6:
        size = max(path.stat().st_size for path in case.paths)
        more["cache_dir"] = case.folder.parent / "cache"
        more["cache_limit"] = rng.choice((None, size * 2 + 100_000))
    indexed = rng.random() < 0.5
    if indexed:
        wt.index(str(case.folder))
    with serving(case.folder) as served:
        urls = [f"{served.url}/{path.name}" for path in case.paths]
        faults = (cut(100), cut(1000, reset=True), cut_in_headers(), status(503), status(500))
        for _ in range(2):
            served.faults.extend(rng.choice(faults) for _ in range(rng.randrange(3)))
            batches = case.read(rank, f"{served.url}/index.json" if indexed else urls, **more)
            assert case.numbers(batches) == case.orders[rank]
            case.compare(batches)
        served.faults.clear()


def check_mixture(case: Case) -> None:
    """Check that each step of a mixture takes the samples of each source that the model expects.

    A mixture is refused only if the model says so. Each sample comes once, with its own bytes, and
    a stopped epoch goes on with the next step.
    """
    rng, folders = case.rng, {"a": case.folder, "b": case.folder.parent / "other"}
    sets = {"a": case.data, "b": draw_data_set(rng, first=100_000, most=30, raw=case.data.raw)}
    write(sets["b"], folders["b"], rng)
    view = rng.choice(("transform", "raw" if case.data.raw else "tensors", "lists"))
    named: dict[str, Any] = {**case.options, **options(view), "tail": "drop"}
    named["weights"] = rng.choice((None, {"a": 1, "b": 1}, {"a": 3, "b": 1}, {"a": 1, "b": 9}))
    if rng.random() < 0.3:
        for folder in folders.values():
            wt.index(str(folder), columns=COLUMNS)
        named["where"] = "kind in ['ant', 'bee', 'cat']"
        sets = {
            name: data.only(sample.number for sample in data.samples if sample.kind != "dog")
            for name, data in sets.items()
        }
    sources = {name: str(folder) for name, folder in folders.items()}
    expected = "holds for none" if not all(data.samples for data in sets.values()) else None
    steps = list[dict[str, int]]()
    if expected is None:
        totals = {name: len(data.samples) for name, data in sets.items()}
        lanes = case.options["lanes"] or case.world_size
        shares = shares_of(named["weights"] or totals)
        steps = mixed_steps(totals, shares, case.global_batch // lanes, lanes)
        expected = mixture_refusal(steps)
    if expected is not None:
        with pytest.raises(wt.WdstrainError, match=expected):
            wt.mix(sources, **named, rank=0)
        return
    data = DataSet(sets["a"].shards + sets["b"].shards, raw=case.data.raw)
    mixed = replace(case, data=data, view=view)
    seen, taken = Counter[int](), [Counter[str]() for _ in steps]
    for rank in range(case.world_size):
        loader = wt.mix(sources, **named, rank=rank)
        assert len(loader) == len(steps)
        batches = list(loader.epoch(case.epoch))
        mixed.compare(batches)
        for at, (batch, numbers) in enumerate(zip(batches, mixed.numbers(batches), strict=True)):
            for name, number in zip(batch["__source__"], numbers, strict=True):
                assert number in sets[name].by_number(), "a sample has the name of another source"
            seen.update(numbers)
            taken[at].update(batch["__source__"])
        stop = rng.randrange(len(steps) + 1)
        loader.set_epoch(case.epoch)
        before = list(islice(loader, stop)) if stop else []
        state = json.loads(json.dumps(loader.state_dict()))
        other = pickled(loader)
        loader.close()
        if rng.random() < 0.5:
            other = wt.mix(sources, **named, rank=rank)
            other.load_state_dict(state)
        after = list(other) if stop < len(steps) else []
        other.close()
        assert mixed.numbers(before + after) == mixed.numbers(batches)
    assert [{name: step[name] for name in sets} for step in taken] == steps
    assert max(seen.values()) == 1


def check_fork(case: Case) -> None:
    """Check that a forked child delivers the same batches, and its parent continues."""
    rank, workers = case.draw_rank(), case.rng.choice((0, 0, 1))
    options = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
    loader = case.loader(rank, **options)
    batches = loader.epoch(case.epoch)
    before = list(islice(batches, case.rng.randrange(len(case.orders[rank]) + 1)))
    receiver, sender = multiprocessing.Pipe(duplex=False)
    child = os.fork()
    if not child:
        signal.alarm(60)
        try:
            delivered = list(loader.epoch(case.epoch))
            case.compare(delivered)
            loader.close()
            sender.send(case.numbers(delivered))
        except BaseException as error:
            sender.send(repr(error))
        finally:
            os._exit(0)
    sender.close()
    after = list(batches)
    loader.close()
    try:
        answer = receiver.recv()
    finally:
        os.waitpid(child, 0)
        receiver.close()
    assert answer == case.orders[rank], "in the child"
    assert case.numbers(before + after) == case.orders[rank]
    case.compare(before + after)


def check_stream(case: Case) -> None:
    """Check that a stream has each sample once per epoch, for any number of worker processes.

    Single samples may be taken from it before.
    """
    rng = case.rng
    stream = wt.stream(case.paths, seed=case.options["seed"], shuffle=case.options["shuffle"])
    if rng.random() < 0.5:
        next(iter(stream))
    workers = rng.choice((0, 0, 1, 2))
    loader = DataLoader(
        stream,
        batch_size=None,
        num_workers=workers,
        persistent_workers=workers > 0 and rng.random() < 0.3,
        multiprocessing_context="fork" if workers else None,
    )
    expected = {sample.number: sample.fields for sample in case.data.samples}
    for _ in range(rng.choice((1, 2, 3))):
        samples = list(loader)
        assert sorted(int(sample["number"]) for sample in samples) == sorted(expected)
        for sample in samples:
            fields = {
                name: bytes(value) for name, value in sample.items() if not name.startswith("__")
            }
            assert fields == expected[int(sample["number"])]
        if rng.random() < 0.3:
            next(iter(stream))


def check_device(case: Case) -> None:
    """Check that `to_device` yields the batches, and that the loop's position is the loader's."""
    rank = case.draw_rank()
    steps = case.orders[rank]
    loader = case.loader(rank, num_workers=case.rng.choice((0, 0, 0, 1)))
    loader.set_epoch(case.epoch)
    stop = case.rng.randrange(len(steps) + 1)
    moved = wt.to_device(loader, "cpu")
    batches = list(islice(moved, stop)) if stop else []
    state = loader.state_dict()
    assert (state["epoch"], state["step"]) in (
        (case.epoch, stop),
        (case.epoch + stop // max(1, len(steps)), 0),
    )
    batches += moved
    loader.close()
    assert case.numbers(batches) == steps
    case.compare(batches)


# Seven, and thirteen for a whole set: all meet raw arrays, which every third case has.
CHECKS: tuple[Callable[[Case], None], ...] = (
    check_workers,
    check_resume,
    check_ranks,
    check_resume,
    check_fork,
    check_device,
)
CHECKS += (check_resume,)
OF_WHOLE_SETS = (
    check_bad_samples,
    check_bad_samples,
    check_part,
    check_server,
    check_mixture,
    check_stream,
)


def test_the_model_detects_a_changed_byte(tmp_path: Path) -> None:
    """Samples that differ from the model in one byte do not pass."""
    rng = random.Random(0)
    data = draw_data_set(rng)
    write(data, tmp_path, rng)
    with open(tmp_path / "part-000.tar", "r+b") as file:
        content = file.read()
        file.seek(
            content.index(data.samples[0].fields["npy"]) + len(data.samples[0].fields["npy"]) - 1
        )
        file.write(bytes([content[file.tell()] ^ 1]))
    loader = wt.Loader(str(tmp_path), batch_size=1, shuffle=False)
    with pytest.raises(AssertionError):
        compare("bytes", next(iter(loader)), data)
    loader.close()


def features(seed: int, folder: Path) -> Iterator[str]:
    """Yield what is drawn for a case."""
    case, kinds = draw_case(seed, folder)
    yield from kinds
    yield check_of(seed, kinds).__name__
    yield case.view
    if case.view == "raw" and case.options["tail"] != "pad":
        yield "raw without padding"
    if case.world_size > 1:
        yield "several ranks"
    if "where" in case.options and "weights" in case.options:
        yield "weights before a condition"


def test_the_default_cases_cover_every_feature(tmp_path: Path) -> None:
    counts = Counter[str]()
    for seed in range(DEFAULT):
        counts.update(features(seed, tmp_path / str(seed)))
    least = {"raw without padding": DEFAULT // 4, "several ranks": 12, "check_resume": 6}
    least |= dict.fromkeys(("where", "sample", "split", "folds", "weights", "balance"), 2)
    least |= dict.fromkeys((check.__name__ for check in CHECKS + OF_WHOLE_SETS), 1)
    least |= {"weights before a condition": 1, "where of the loader": 2, **dict.fromkeys(VIEWS, 2)}
    missing = {name: counts[name] for name in least if counts[name] < least[name]}
    assert not missing, f"too few of the default cases: {missing}"


def test_the_model_detects_weights_that_are_not_kept() -> None:
    """A sample of weight 2 that comes once does not pass, nor two classes that are not balanced."""
    half = Fraction(1, 2)
    weighting = Weighting({0: Fraction(2), 1: half, 2: half}, [[0], [1, 2]])
    weighting.check({0: 2, 2: 1}, 3)
    for times in ({0: 1, 1: 1, 2: 1}, {0: 2, 1: 1, 2: 1}, {0: 2}):
        with pytest.raises(AssertionError):
            weighting.check(times, 3)


def test_the_model_of_a_mixture_gives_exact_shares() -> None:
    """Of every four turns the large source takes three, and the epoch ends with the small one."""
    shares = shares_of({"a": 3, "b": 1})
    assert "".join(turns(shares, 12)) == "aaabaaabaaab"
    steps = mixed_steps({"a": 100, "b": 3}, shares, per_lane=4, lanes=1)
    assert steps == [{"a": 3, "b": 1}] * 3
    assert mixture_refusal(steps) is None
    assert mixture_refusal([]) == "cannot fill one step"
    assert mixture_refusal([{"a": 4, "b": 0}]) == ("source b gives no sample in an epoch of 1 step")


@pytest.mark.parametrize("fault", ["lost", "twice", "stratum", "group"])
def test_the_model_detects_parts_that_break_a_promise(fault: str) -> None:
    """Parts that lack or repeat a sample, or divide classes or groups otherwise, do not pass."""
    data = draw_data_set(random.Random(1))
    by_class = [s.number for s in sorted(data.samples, key=lambda sample: sample.kind)]
    parts = {"a": by_class[::2], "b": by_class[1::2]}
    shares, by, stratify = {"a": 0.5, "b": 0.5}, None, "kind"
    check_parts(data, parts, shares, by, stratify)
    if fault == "lost":
        parts["a"].pop()
    elif fault == "twice":
        parts["a"].append(parts["b"][0])
    elif fault == "group":
        by = "owner"
    else:
        half = len(by_class) // 2
        parts = {"a": by_class[:half], "b": by_class[half:]}
    with pytest.raises(AssertionError):
        check_parts(data, parts, shares, by, stratify)
