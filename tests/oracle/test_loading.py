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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

import wdstrain as wt
from tests.oracle.data_set import DataSet, Sample, draw_data_set, write
from tests.oracle.mixtures import mixed_steps, mixture_refusal, shares_of
from tests.oracle.selections import COLUMNS, Choice, Weighting, draw_choice
from tests.oracle.views import BROKEN, DECODED, OPTIONS, VIEWS, compare, drawn, rows
from tests.support.drawn_cases import check_block
from tests.support.servers import cut, cut_in_headers, serving, status

DEFAULT = 40  # cases of the default suite
MIXTURES = 10  # further cases of the default suite
BLOCK, BLOCKS = 75, 4  # cases of the slow part: BLOCKS tests of BLOCK cases each

Batches = list[dict[str, Any]]
Orders = list[list[list[int]]]  # sample numbers by rank, step and row


@pytest.mark.parametrize("seed", range(DEFAULT))
def test_a_random_set_is_delivered_once_with_the_values_of_the_model(
    seed: int, tmp_path: Path
) -> None:
    check_case(seed, tmp_path)


@pytest.mark.parametrize("seed", range(100, 100 + MIXTURES))
def test_a_random_mixture_takes_the_steps_of_the_model(seed: int, tmp_path: Path) -> None:
    """It is refused if the model has no step, or no sample of a source."""
    rng = random.Random(seed)
    data = draw_data_set(rng, most=rng.choice((4, 30)), raw=seed % 3 == 0)
    paths = write(data, tmp_path / "set", rng)
    given = draw_options(rng, len(data.samples))
    check_mixture(Case(rng, data, paths, paths, given, "", rng.randrange(3)))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("block", range(BLOCKS))
def test_more_random_sets_are_delivered_once_with_the_values_of_the_model(
    block: int, tmp_path: Path
) -> None:
    check_block(check_case, block, BLOCK, tmp_path)


def test_the_default_cases_cover_every_feature(tmp_path: Path) -> None:
    counts = Counter[str]()
    for seed in range(DEFAULT):
        case, kinds = draw_case(seed, tmp_path / str(seed))
        counts.update((*kinds, check_of(seed, kinds).__name__, case.view))
        counts["raw without padding"] += case.view == "raw" and case.options["tail"] != "pad"
        counts["several ranks"] += case.world_size > 1
        counts["weights before a condition"] += {"where", "weights"} <= set(case.options)
    least = {"raw without padding": DEFAULT // 4, "several ranks": 12, "check_resume": 6}
    least |= dict.fromkeys(("where", "sample", "split", "folds", "weights", "balance"), 2)
    least |= dict.fromkeys((check.__name__ for check in CHECKS + OF_WHOLE_SETS), 1)
    least |= {"weights before a condition": 1, "where of the loader": 2, **dict.fromkeys(VIEWS, 2)}
    missing = {name: counts[name] for name in least if counts[name] < least[name]}
    assert not missing, f"too few of the default cases: {missing}"


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
        return self.paths[0].parent

    @property
    def world_size(self) -> int:
        return int(self.options["world_size"])

    @property
    def lanes(self) -> int:
        return self.options["lanes"] or self.world_size

    @property
    def global_batch(self) -> int:
        """Samples of one step over all ranks."""
        return int(self.options["batch_size"]) * self.world_size

    def draw_rank(self) -> int:
        return self.rng.randrange(self.world_size)

    def loader(self, rank: int, source: Any = None, **more: Any) -> wt.Loader:
        """Return the loader of a rank. source: replaces the shards. more: further options."""
        named = {**self.options, **OPTIONS[self.view], "rank": rank, **more}
        return wt.Loader(self.source if source is None else source, **named)

    def read(self, rank: int, source: Any = None, **more: Any) -> Batches:
        with self.loader(rank, source, **more) as loader:
            batches: Batches = list(loader.epoch(self.epoch))
            assert len(batches) == len(loader), "len() is not the number of batches"
        return batches

    def stop(self, loader: wt.Loader, step: int) -> tuple[Batches, dict[str, Any]]:
        """Return the batches of a loop that stops before a step, and the state as saved."""
        loader.set_epoch(self.epoch)
        before = list(islice(loader, step)) if step else []
        assert len(before) == step
        return before, json.loads(json.dumps(loader.state_dict()))

    def compare(self, batches: Batches) -> None:
        for batch in batches:
            compare(self.view, batch, self.data)

    def check(self, batches: Batches, rank: int, draws: bool = False) -> None:
        """Assert that these are the batches of the epoch on a rank, with the same draws."""
        assert numbers(batches) == self.orders[rank]
        self.compare(batches)
        assert not draws or list(map(drawn, batches)) == self.draws[rank]


def numbers(batches: Batches) -> list[list[int]]:
    return [rows(batch) for batch in batches]


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
    options = {"batch_size": batch_size, "world_size": world_size, "lanes": lanes, "tail": tail}
    options |= {"shuffle": rng.random() < 0.8}
    options |= {"shuffle_buffer": rng.choice((None, 1, 2, 7, 50, 10_000))}
    return options | {"seed": rng.choice((0, 1, rng.getrandbits(31)))}


def read_until_error(loader: wt.Loader, epoch: int) -> tuple[Batches, str | None]:
    """Return the batches of an epoch up to its end or its error, and the error's text."""
    batches: Batches = []
    with loader:
        try:
            for batch in loader.epoch(epoch):
                batches.append(batch)
        except wt.WdstrainError as error:
            return batches, str(error)
    return batches, None


def check_epoch(case: Case, source: Any) -> Orders:
    """Read the epoch on every rank, compare all values, and return the orders.

    Samples are delivered once, or as their weights say; "drop" drops less than a global batch.
    """
    orders, real, tail = Orders(), Counter[int](), case.options["tail"]
    case.draws = []
    for rank in range(case.world_size):
        batches = case.read(rank, source)
        case.compare(batches)
        orders.append(numbers(batches))
        case.draws.append(list(map(drawn, batches)))
        for batch, step in zip(batches, orders[-1], strict=True):
            valid = batch["__valid__"].tolist() if tail == "pad" else [True] * len(step)
            real.update(number for number, good in zip(step, valid, strict=True) if good)
    assert len({len(steps) for steps in orders}) == 1, "ranks differ in steps"
    total = case.samples
    expected = total - total % case.global_batch if tail == "drop" else total
    assert real.total() == expected, f"{real.total()} samples of {expected}"
    if case.weighting is None:
        assert max(real.values(), default=1) == 1, f"repeated: {real.most_common(3)}"
    else:
        case.weighting.check(real, expected)
    assert set(real) <= set(case.data.by_number())
    sizes = {len(rows) for steps in orders for rows in steps}
    assert tail == "keep" or sizes <= {case.options["batch_size"]}
    is_plain = not case.options["shuffle"] and case.weighting is None
    if is_plain and len(orders) == case.lanes == 1:
        order = list(chain.from_iterable(orders[0]))[: real.total()]
        in_files = [sample.number for sample in case.data.samples]
        dropped = len(in_files) - real.total()
        # With tail="drop" one run of samples is dropped.
        cuts = (in_files[:at] + in_files[at + dropped :] for at in range(len(order) + 1))
        assert order in cuts
    return orders


def check_workers(case: Case) -> None:
    rank, workers = case.draw_rank(), case.rng.choice((1, 2))
    method = case.rng.choice(("fork", "fork", "fork", "spawn", "forkserver"))
    batches = case.read(rank, num_workers=workers, multiprocessing_context=method)
    case.check(batches, rank, draws=True)


def pickled(loader: wt.Loader) -> wt.Loader:
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
    before, state = case.stop(loader, stop)
    copied = rng.choice((None, None, pickled, copy.copy, copy.deepcopy))
    if copied is not None:  # it begins where the loader is
        with loader:
            loader = copied(loader)
    elif rng.random() < 0.7:
        loader.close()
        loader = case.loader(rank, num_workers=rng.choice((0, 0, 0, 1)))
    if copied is None:
        loader.load_state_dict(state)
    with loader:
        after, following = list(loader), next(iter(loader), None)
    check_other_states(case, rank, state)
    if stop == steps:
        before, after, following = [], before, after[0]
    case.check(before + after, rank, draws=True)
    if following is not None:
        expected = replace(case, epoch=case.epoch + 1).read(rank)
        assert rows(following) == rows(expected[0]), "the epoch after a resume is not the next one"


def check_other_states(case: Case, rank: int, state: Mapping[str, Any]) -> None:
    """Check that a state is refused with another selection or other weights."""
    whole = wt.open(str(case.folder))
    given = case.source if isinstance(case.source, wt.Index) else whole
    others = [("seed was", given, {"seed": case.options["seed"] + 1})]
    if case.weighting is not None:
        more: dict[str, Any] = {"balance": None, "weights": [8.0] * len(given)}
        others.append(("weights was", given, more))
    if max(len(case.data.samples), case.global_batch) < len(whole):
        others.append(("data was", whole, dict.fromkeys(("where", "weights", "balance"))))
    for difference, source, more in others:
        with (
            case.loader(rank, source, **more) as other,
            pytest.raises(wt.UsageError, match=difference),
        ):
            other.load_state_dict(state)


def check_ranks(case: Case) -> None:
    """With `lanes` fixed, another number of ranks takes the same global batches.

    The state of any rank continues on every rank of another number of ranks.
    """
    lanes, total = case.lanes, case.global_batch
    sizes = [size for size in range(1, lanes + 1) if lanes % size == 0 and total % size == 0]
    world_size = case.rng.choice(sizes)
    ranks = {"lanes": lanes, "world_size": world_size, "batch_size": total // world_size}
    other = replace(case, options=case.options | ranks)
    orders = check_epoch(other, case.source)
    global_batches, others = (
        [sorted(chain.from_iterable(step)) for step in zip(*by_rank, strict=True)]
        for by_rank in (case.orders, orders)
    )
    assert global_batches == others
    stop = case.rng.randrange(len(orders[0]))
    with case.loader(case.draw_rank()) as loader:
        _, state = case.stop(loader, stop)
    for rank in range(other.world_size):
        with other.loader(rank) as resumed:
            resumed.load_state_dict(state)
            assert numbers(list(resumed)) == orders[rank][stop:], f"rank {rank}, step {stop}"


def damage(case: Case, name: str, victims: set[int]) -> Case:
    """Return a case whose data set has undecodable samples. victims: their numbers."""

    def damaged(sample: Sample) -> Sample:
        size = len(sample.fields[name])
        broken = BROKEN[name].ljust(size if size > 4096 else 0)  # large arrays keep their size
        is_victim = sample.number in victims
        return replace(sample, fields=sample.fields | {name: broken}) if is_victim else sample

    shards = tuple(tuple(map(damaged, shard)) for shard in case.data.shards)
    data = replace(case.data, shards=shards)
    paths = write(data, case.folder.parent / "damaged", case.rng)
    # Sizes of samples differ now, and with them the default of the shuffle buffer.
    undecoded = replace(case, data=data, paths=paths, source=paths, view="bytes")
    orders = [numbers(undecoded.read(rank)) for rank in range(case.world_size)]
    return replace(undecoded, view=case.view, orders=orders)


def check_bad_samples(case: Case) -> None:
    """Check that an undecodable sample is replaced and counted, or ends the loop at its batch."""
    rng, samples = case.rng, case.data.samples
    view = rng.choice([view for view in DECODED if view not in ("raw", "tensors")])
    view = rng.choice((view, "raw" if case.data.raw else "tensors"))
    name = rng.choice(DECODED[view])
    count = min(len(samples) // 2, rng.randrange(1, 8))
    begin = rng.randrange(len(samples) - count + 1)
    run = samples[begin : begin + count]  # longer than a small batch
    chosen = rng.choice((run, rng.sample(samples, count)))
    victims = {sample.number for sample in chosen}
    if not victims:
        return
    damaged = damage(replace(case, view=view), name, victims)
    workers, rank = rng.choice((0, 0, 0, 1)), case.draw_rank()
    planned = damaged.orders[rank]
    first = next((at for at, step in enumerate(planned) if victims & set(step)), None)

    delivered, error = read_until_error(damaged.loader(rank, num_workers=workers), case.epoch)
    if error is not None and [] in planned[: len(delivered) + 1]:
        first = planned.index([])  # the shape of an empty batch is that of a sample: a bad one
    assert numbers(delivered) == planned[:first]
    assert (error is None) == (first is None), f"first bad batch: {first}; error: {error}"
    if error is not None:
        assert any(sample.key in error for sample in chosen), error
        assert "transform" in view or name in error

    options: dict[str, Any] = {"on_error": "replace", "max_errors": 1.0}
    loader = damaged.loader(rank, num_workers=workers, **options)
    replaced, error = read_until_error(loader, case.epoch)
    if error is not None:  # no good sample is left to replace a bad one
        assert len(victims) * 2 >= len(samples), error
        return
    replace(case, view=view).compare(replaced)
    pairs = [
        pair
        for steps in zip(numbers(replaced), planned, strict=True)
        for pair in zip(*steps, strict=True)
    ]
    for number, expected in pairs:
        assert number not in victims if expected in victims else number == expected
    report = loader.report()
    assert json.loads(json.dumps(report)) == report
    assert sum(report["bad_reasons"].values()) == report["bad"]
    assert {bad["key"] for bad in report["bad_samples"]} <= {sample.key for sample in chosen}
    if case.options["tail"] != "pad":
        assert report["bad"] == sum(expected in victims for _, expected in pairs)
    start = rng.randrange(len(planned)) if planned else 0
    with damaged.loader(rank, num_workers=1 - workers, **options) as again:
        rest = list(again.epoch(case.epoch, start=start)) if planned else []
    assert numbers(rest) == numbers(replaced)[start:], "another substitute"


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
    names = ",".join(f"{index:03d}" for index in chosen)
    pattern = str(case.folder / f"part-{f'{{{names}}}' if len(chosen) > 1 else names}.tar")
    check_epoch(part, case.rng.choice((part.paths, pattern)))


def check_server(case: Case) -> None:
    """Check that a server with transient faults delivers as the disk, also through a cache."""
    rng, rank = case.rng, case.draw_rank()
    more: dict[str, Any] = {}
    if rng.random() < 0.6:
        size = max(path.stat().st_size for path in case.paths)
        more["cache_dir"] = case.folder.parent / "cache"
        more["cache_limit"] = rng.choice((None, size * 2 + 100_000))
    is_indexed = rng.random() < 0.5
    if is_indexed:
        wt.index(str(case.folder))
    with serving(case.folder) as served:
        urls = [f"{served.url}/{path.name}" for path in case.paths]
        faults = (cut(100), cut(1000, reset=True), cut_in_headers(), status(503), status(500))
        for _ in range(2):
            served.faults.extend(rng.choice(faults) for _ in range(rng.randrange(3)))
            source = f"{served.url}/index.json" if is_indexed else urls
            case.check(case.read(rank, source, **more), rank)
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
    named: dict[str, Any] = {**case.options, **OPTIONS[view], "tail": "drop"}
    named["weights"] = rng.choice((None, {"a": 1, "b": 1}, {"a": 3, "b": 1}, {"a": 1, "b": 9}))
    if rng.random() < 0.3:
        named["where"] = "kind in ['ant', 'bee', 'cat']"
        for name, data in sets.items():
            wt.index(str(folders[name]), columns=COLUMNS)
            sets[name] = data.only(s.number for s in data.samples if s.kind != "dog")
    sources = {name: str(folder) for name, folder in folders.items()}
    totals = {name: len(data.samples) for name, data in sets.items()}
    expected, steps = "holds for none" if not all(totals.values()) else None, list[dict[str, int]]()
    if expected is None:
        shares = shares_of(named["weights"] or totals)
        steps = mixed_steps(totals, shares, case.global_batch // case.lanes, case.lanes)
        expected = mixture_refusal(steps)
    if expected is not None:
        with pytest.raises(wt.WdstrainError, match=expected):
            wt.mix(sources, **named, rank=0)
        return
    mixed = replace(case, data=DataSet(sets["a"].shards + sets["b"].shards), view=view)
    source_of = {number: name for name, data in sets.items() for number in data.by_number()}
    seen, taken = Counter[int](), [Counter[str]() for _ in steps]
    for rank in range(case.world_size):
        with wt.mix(sources, **named, rank=rank) as loader:
            assert len(loader) == len(steps)
            batches = list(loader.epoch(case.epoch))
            mixed.compare(batches)
            for counts, batch in zip(taken, batches, strict=True):
                assert batch["__source__"] == [source_of[number] for number in rows(batch)]
                counts.update(batch["__source__"])
                seen.update(rows(batch))
            stop = rng.randrange(len(steps) + 1)
            before, state = mixed.stop(loader, stop)
            other = pickled(loader)
        if rng.random() < 0.5:
            other = wt.mix(sources, **named, rank=rank)
            other.load_state_dict(state)
        with other:
            after = list(other) if stop < len(steps) else []
        assert numbers(before + after) == numbers(batches)
    assert [{name: step[name] for name in sets} for step in taken] == steps
    assert max(seen.values()) == 1


def check_fork(case: Case) -> None:
    """Check that a forked child delivers the same batches, and its parent continues."""
    rank, workers = case.draw_rank(), case.rng.choice((0, 0, 1))
    options = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
    with case.loader(rank, **options) as loader:
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
                sender.send(numbers(delivered))
            except BaseException as error:
                sender.send(repr(error))
            finally:
                os._exit(0)
        sender.close()
        after = list(batches)
    with receiver:
        try:
            answer = receiver.recv()
        finally:
            os.waitpid(child, 0)
    assert answer == case.orders[rank], "in the child"
    case.check(before + after, rank)


def check_stream(case: Case) -> None:
    """Check that a stream has each sample once per epoch, for any number of worker processes.

    Single samples may be taken from it before.
    """
    rng = case.rng
    stream = wt.stream(case.paths, seed=case.options["seed"], shuffle=case.options["shuffle"])
    if rng.random() < 0.5:
        next(iter(stream))
    options: dict[str, Any] = {"num_workers": rng.choice((0, 0, 1, 2))}
    if options["num_workers"]:
        options["multiprocessing_context"] = "fork"
        options["persistent_workers"] = rng.random() < 0.3
    loader = DataLoader(stream, batch_size=None, **options)
    expected = {sample.number: sample.fields for sample in case.data.samples}
    for _ in range(rng.choice((1, 2, 3))):
        samples = list(loader)
        assert sorted(int(sample["number"]) for sample in samples) == sorted(expected)
        for sample in samples:
            fields = {name: bytes(value) for name, value in sample.items() if name[:2] != "__"}
            assert fields == expected[int(sample["number"])]
        if rng.random() < 0.3:
            next(iter(stream))


def check_device(case: Case) -> None:
    """Check that `to_device` yields the batches, and that the loop's position is the loader's."""
    rank = case.draw_rank()
    steps = len(case.orders[rank])
    stop = case.rng.randrange(steps + 1)
    with case.loader(rank, num_workers=case.rng.choice((0, 0, 0, 1))) as loader:
        loader.set_epoch(case.epoch)
        moved = wt.to_device(loader, "cpu")
        batches = list(islice(moved, stop)) if stop else []
        state = loader.state_dict()
        following = (case.epoch + stop // max(1, steps), 0)
        assert (state["epoch"], state["step"]) in ((case.epoch, stop), following)
        batches += moved
    case.check(batches, rank)


# Seven, and thirteen for a whole set: all meet raw arrays, which every third case has.
CHECKS: tuple[Callable[[Case], None], ...] = (check_workers, check_resume, check_ranks)
CHECKS += (check_resume, check_fork, check_device, check_resume)
OF_WHOLE_SETS: tuple[Callable[[Case], None], ...] = (
    check_bad_samples,
    check_bad_samples,
    check_part,
)
OF_WHOLE_SETS += (check_server, check_mixture, check_stream)
