"""Drawn cases of loading, each compared with a model of the data set that shares no code with the package.

Every case is a function of its seed, which pytest prints as the name of the test:

    pytest tests/oracle -k 'loading and 17'
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
from collections import Counter
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

import wdstrain as wt
from tests.oracle.blocks import check_block
from tests.oracle.data_set import DataSet, draw_data_set, write
from tests.oracle.views import BROKEN, DECODED, VIEWS, compare, options, rows
from tests.support.servers import cut, cut_in_headers, serving, status

DEFAULT = 60  # cases of the default suite
BLOCK, BLOCKS = 100, 15  # cases of the slow part: BLOCKS tests of BLOCK cases each

Batch = Mapping[str, Any]


@pytest.mark.parametrize("seed", range(DEFAULT))
def test_loading(seed: int, tmp_path: Path) -> None:
    """Each batch holds what the model says, exactly once, in one order, resumable, for any workers and ranks."""
    check_case(seed, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("block", range(BLOCKS))
def test_loading_more(block: int, tmp_path: Path) -> None:
    check_block(check_case, block, BLOCK, tmp_path)


def check_case(seed: int, folder: Path) -> None:
    rng = random.Random(seed)
    data = draw_data_set(rng)
    paths = write(data, folder / "set", rng)
    case = draw_options(rng, len(data.samples))
    view = rng.choice(VIEWS)
    epoch = rng.randrange(3)
    orders = check_epoch(data, folder / "set", case, view, epoch)
    check = rng.choice(
        (
            check_workers,
            check_resume,
            check_ranks,
            check_bad_samples,
            check_part,
            check_server,
            check_mixture,
            check_fork,
            check_stream,
        )
    )
    check(rng, data, paths, case, view, epoch, orders)


def draw_options(rng: random.Random, samples: int) -> dict[str, Any]:
    """Options of a loader that any case must work with."""
    tail = rng.choice(("drop", "pad", "keep"))
    world_size = rng.choice((1, 1, 2, 3, 4))
    if samples < world_size and tail == "drop":  # not a batch for each rank
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


def read_rank(
    source: Any, case: Mapping[str, Any], view: str, epoch: int, rank: int, **more: Any
) -> list[Batch]:
    """All batches of one epoch on one rank."""
    loader = wt.Loader(source, rank=rank, **{**case, **options(view), **more})
    try:
        batches = list(loader.epoch(epoch))
        assert len(batches) == len(loader), "len() is not the number of batches"
    finally:
        loader.close()
    return batches


def read_until_error(loader: wt.Loader, epoch: int) -> tuple[list[Batch], str | None]:
    """The batches of an epoch up to its end or its error, and the error's text."""
    batches: list[Batch] = []
    try:
        for batch in loader.epoch(epoch):
            batches.append(batch)
    except wt.WdstrainError as error:
        return batches, str(error)
    finally:
        loader.close()
    return batches, None


def numbers(view: str, batches: list[Batch]) -> list[list[int]]:
    return [rows(view, batch) for batch in batches]


def check_epoch(
    data: DataSet, source: Any, case: Mapping[str, Any], view: str, epoch: int
) -> list[list[list[int]]]:
    """Read an epoch on every rank, compare all values, and return the numbers by rank, step and row."""
    by_rank, real = [], Counter[int]()
    for rank in range(case["world_size"]):
        batches = read_rank(source, case, view, epoch, rank)
        for batch in batches:
            compare(view, batch, data)
            valid = (
                batch["__valid__"].tolist()
                if case["tail"] == "pad"
                else [True] * len(batch["__key__"])
            )
            real.update(n for n, good in zip(rows(view, batch), valid, strict=True) if good)
        by_rank.append(numbers(view, batches))
    assert len({len(steps) for steps in by_rank}) == 1, "ranks differ in steps"
    check_counts(data, case, by_rank, real)
    if not case["shuffle"] and case["world_size"] == 1 and case["lanes"] in (None, 1):
        order = [number for step in by_rank[0] for number in step][: real.total()]
        dropped = len(data.samples) - real.total()
        expected = [sample.number for sample in data.samples]
        # with tail="drop" one run of samples is left out
        assert any(
            order == expected[:at] + expected[at + dropped :] for at in range(len(order) + 1)
        )
    return by_rank


def check_counts(
    data: DataSet, case: Mapping[str, Any], by_rank: list[list[list[int]]], real: Counter[int]
) -> None:
    """Every sample once; with tail="drop", fewer than a global batch is left out."""
    assert not real or max(real.values()) == 1, (
        f"repeated: {[n for n, times in real.items() if times > 1]}"
    )
    total, step = len(data.samples), case["batch_size"] * case["world_size"]
    expected = total // step * step if case["tail"] == "drop" else total
    assert real.total() == expected, f"{real.total()} samples of {expected}"
    assert set(real) <= set(data.by_number())
    if case["tail"] != "keep":
        assert {len(rows) for steps in by_rank for rows in steps} <= {case["batch_size"]}


Orders = list[list[list[int]]]


def check_workers(
    rng: random.Random,
    data: DataSet,
    paths: list[Path],
    case: dict[str, Any],
    view: str,
    epoch: int,
    orders: Orders,
) -> None:
    """Worker processes deliver the same batches in the same order as threads."""
    rank = rng.randrange(case["world_size"])
    batches = read_rank(
        paths,
        case,
        view,
        epoch,
        rank,
        num_workers=rng.choice((1, 2)),
        multiprocessing_context="fork",
    )
    assert numbers(view, batches) == orders[rank]
    for batch in batches:
        compare(view, batch, data)
    if view == "random transform":
        threads = read_rank(paths, case, view, epoch, rank)
        drawn = [batch["drawn"].tolist() for batch in batches]
        assert drawn == [batch["drawn"].tolist() for batch in threads], "draws depend on workers"


def check_resume(
    rng: random.Random,
    data: DataSet,
    paths: list[Path],
    case: dict[str, Any],
    view: str,
    epoch: int,
    orders: Orders,
) -> None:
    """A loop that is left at any step goes on with the next batch, in the same loader or in another one."""
    rank = rng.randrange(case["world_size"])
    steps = len(orders[rank])
    if not steps:
        return
    stop = rng.randrange(steps)
    loader = wt.Loader(paths, rank=rank, **case, **options(view))
    loader.set_epoch(epoch)
    before = list(islice(loader, stop)) if stop else []
    state = json.loads(json.dumps(loader.state_dict()))
    if rng.random() < 0.5:
        loader.close()
        workers = rng.choice((0, 0, 0, 1))
        loader = wt.Loader(paths, rank=rank, num_workers=workers, **case, **options(view))
    loader.load_state_dict(state)
    after = list(loader)
    following = next(iter(loader), None)
    loader.close()
    assert numbers(view, before + after) == orders[rank], f"left at step {stop} of {steps}"
    for batch in after:
        compare(view, batch, data)
    if following is not None:
        expected = read_rank(paths, case, view, epoch + 1, rank)[0]
        assert rows(view, following) == rows(view, expected), (
            "the epoch after a resume is not the next one"
        )


def check_ranks(
    rng: random.Random,
    data: DataSet,
    paths: list[Path],
    case: dict[str, Any],
    view: str,
    epoch: int,
    orders: Orders,
) -> None:
    """With `lanes` fixed, another number of ranks takes the same global batches."""
    lanes, total = case["lanes"] or case["world_size"], case["batch_size"] * case["world_size"]
    sizes = [size for size in range(1, lanes + 1) if lanes % size == 0 and total % size == 0]
    world_size = rng.choice(sizes)
    other = {**case, "lanes": lanes, "world_size": world_size, "batch_size": total // world_size}
    others = check_epoch(data, paths, other, view, epoch)
    for step in range(len(orders[0])):
        mine = sorted(number for rank in orders for number in rank[step])
        assert mine == sorted(number for rank in others for number in rank[step]), f"step {step}"


def check_bad_samples(
    rng: random.Random,
    data: DataSet,
    paths: list[Path],
    case: dict[str, Any],
    view: str,
    epoch: int,
    orders: Orders,
) -> None:
    """A sample that cannot be decoded is replaced and counted, or ends the loop at its batch; no other is touched."""
    view = rng.choice(tuple(DECODED))
    field = rng.choice(DECODED[view])
    victims = {
        sample.number
        for sample in rng.sample(data.samples, min(len(data.samples) // 2, rng.randrange(1, 4)))
    }
    if not victims:
        return
    damaged = DataSet(
        tuple(
            tuple(
                type(s)(**{**s.__dict__, "fields": {**s.fields, field: BROKEN[field]}})
                if s.number in victims
                else s
                for s in shard
            )
            for shard in data.shards
        )
    )
    again = write(damaged, paths[0].parent.parent / "damaged", rng)
    workers = rng.choice((0, 0, 0, 1))
    # the sizes of samples differ now, and with them the default of the shuffle buffer
    planned_steps = [
        numbers("bytes", read_rank(again, case, "bytes", epoch, rank))
        for rank in range(case["world_size"])
    ]
    rank = rng.randrange(case["world_size"])
    first = next((at for at, step in enumerate(planned_steps[rank]) if victims & set(step)), None)

    more = {**case, **options(view), "rank": rank, "num_workers": workers}
    delivered, error = read_until_error(wt.Loader(again, **more), epoch)
    assert numbers(view, delivered) == planned_steps[rank][:first]
    assert (error is None) == (first is None), f"first bad batch: {first}; error: {error}"
    if error is not None:
        assert any(sample.key in error for sample in damaged.samples if sample.number in victims), (
            error
        )
        assert view == "transform" or field in error

    loader = wt.Loader(again, on_bad="replace", max_bad=1.0, **more)
    replaced, error = read_until_error(loader, epoch)
    if error is not None:  # nothing good is left to replace a sample by
        assert len(victims) * 2 >= len(data.samples), error
        return
    met = 0
    for step, batch in enumerate(replaced):
        compare(view, batch, data)
        for row, number in enumerate(rows(view, batch)):
            planned = planned_steps[rank][step][row]
            if planned in victims:
                met += 1
                assert number not in victims
            else:
                assert number == planned
    if case["tail"] != "pad":
        assert loader.report()["bad"] == met


def check_part(
    rng: random.Random,
    data: DataSet,
    paths: list[Path],
    case: dict[str, Any],
    view: str,
    epoch: int,
    orders: Orders,
) -> None:
    """Some of the shards, named one by one or by a pattern, are a set of their own."""
    chosen = sorted(rng.sample(range(len(paths)), rng.randrange(1, len(paths) + 1)))
    part = DataSet(tuple(data.shards[index] for index in chosen))
    if case["tail"] == "drop" and len(part.samples) < case["batch_size"] * case["world_size"]:
        with pytest.raises(wt.WdstrainError):
            wt.Loader([paths[index] for index in chosen], rank=0, **case)
        return
    source: Any = [paths[index] for index in chosen]
    if rng.random() < 0.5:
        source = str(
            paths[0].parent / f"part-{{{','.join(f'{index:03d}' for index in chosen)},}}.tar"
        ).replace(",}", "}")
        if len(chosen) == 1:
            source = str(paths[chosen[0]])
    check_epoch(part, source, case, view, epoch)


def check_server(
    rng: random.Random,
    data: DataSet,
    paths: list[Path],
    case: dict[str, Any],
    view: str,
    epoch: int,
    orders: Orders,
) -> None:
    """A server that fails now and then gives what the disk gives, also through a cache."""
    rank = rng.randrange(case["world_size"])
    more: dict[str, Any] = {}
    if rng.random() < 0.6:
        more["cache_dir"] = paths[0].parent.parent / "cache"
        more["cache_limit"] = rng.choice(
            (None, max(path.stat().st_size for path in paths) * 2 + 100_000)
        )
    indexed = rng.random() < 0.5
    if indexed:
        wt.index(str(paths[0].parent))
    with serving(paths[0].parent) as served:
        urls = [f"{served.url}/{path.name}" for path in paths]
        kinds = (cut(100), cut(1000, reset=True), cut_in_headers(), status(503), status(500))
        for _ in range(2):
            served.faults.extend(rng.choice(kinds) for _ in range(rng.randrange(3)))
            batches = read_rank(
                f"{served.url}/index.json" if indexed else urls, case, view, epoch, rank, **more
            )
            assert numbers(view, batches) == orders[rank]
            for batch in batches:
                compare(view, batch, data)
        served.faults.clear()


def check_mixture(
    rng: random.Random,
    data: DataSet,
    paths: list[Path],
    case: dict[str, Any],
    view: str,
    epoch: int,
    orders: Orders,
) -> None:
    """A mixture gives each source its share, each sample once, and each sample its own bytes."""
    folder = paths[0].parent.parent / "other"
    other = draw_data_set(rng, first=100_000)
    write(other, folder, rng)
    sets = {"a": data, "b": other}
    names = {
        one: set(sample.fields) - {"bin"}
        for one, sample in ((n, s.samples[0]) for n, s in sets.items())
    }
    assert names["a"] == names["b"]
    weights = rng.choice((None, {"a": 1, "b": 1}, {"a": 3, "b": 1}, {"a": 1, "b": 9}))
    sizes = {name: (weights or {n: len(s.samples) for n, s in sets.items()})[name] for name in sets}
    view = rng.choice(("transform", "tensors", "lists"))
    mixed = {**case, "tail": "drop"}
    seen, by_source = Counter[int](), Counter[str]()
    steps = set()
    for rank in range(case["world_size"]):
        try:
            loader = wt.mix(
                {"a": str(paths[0].parent), "b": str(folder)},
                weights=weights,
                rank=rank,
                **mixed,
                **options(view),
            )
        except wt.PlanError:  # a source cannot fill one step
            return
        batches = list(loader.epoch(epoch))
        steps.add(len(batches))
        assert len(batches) == len(loader)
        loader.close()
        for batch in batches:
            for name, number in zip(batch["__source__"], rows(view, batch), strict=True):
                assert number in sets[name].by_number(), "a sample is called another source's"
                seen[number] += 1
                by_source[name] += 1
            compare(view, batch, DataSet(data.shards + other.shards))
    assert len(steps) == 1, "ranks differ in steps"
    assert not seen or max(seen.values()) == 1
    lanes = case["lanes"] or case["world_size"]
    for name in sets:
        share = sizes[name] / sum(sizes.values()) * seen.total()
        assert abs(by_source[name] - share) <= lanes + 0.01 * share + 1, (by_source, sizes)


def check_fork(
    rng: random.Random,
    data: DataSet,
    paths: list[Path],
    case: dict[str, Any],
    view: str,
    epoch: int,
    orders: Orders,
) -> None:
    """A forked child that uses its parent's loader delivers the truth or refuses; the parent notices nothing."""
    rank = rng.randrange(case["world_size"])
    loader = wt.Loader(paths, rank=rank, **case, **options(view))
    batches = loader.epoch(epoch)
    before = list(islice(batches, rng.randrange(len(orders[rank]) + 1)))
    receiver, sender = multiprocessing.Pipe(duplex=False)
    child = os.fork()
    if not child:
        signal.alarm(60)
        try:
            delivered = list(loader.epoch(epoch))
            for batch in delivered:
                compare(view, batch, data)
            sender.send(numbers(view, delivered))
        except wt.WdstrainError as error:
            sender.send(str(error))
        except BaseException as error:
            sender.send({"failed": repr(error)})
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
    assert isinstance(answer, str) or answer == orders[rank]
    assert numbers(view, before + after) == orders[rank]
    for batch in before + after:
        compare(view, batch, data)


def check_stream(
    rng: random.Random,
    data: DataSet,
    paths: list[Path],
    case: dict[str, Any],
    view: str,
    epoch: int,
    orders: Orders,
) -> None:
    """A stream under any number of worker processes gives each sample once per epoch, also after looks at single samples."""
    stream = wt.stream(paths, seed=case["seed"], shuffle=case["shuffle"])
    if rng.random() < 0.5:
        next(iter(stream))
    workers = rng.choice((0, 0, 1, 2))
    persistent = workers > 0 and rng.random() < 0.3
    context = "fork" if workers else None
    loader = DataLoader(
        stream,
        batch_size=None,
        num_workers=workers,
        persistent_workers=persistent,
        multiprocessing_context=context,
    )
    expected = {sample.number: sample for sample in data.samples}
    for _ in range(rng.choice((1, 2, 3))):
        samples = list(loader)
        assert sorted(int(sample["number"]) for sample in samples) == sorted(expected)
        for sample in samples:
            fields = {
                name: bytes(value) for name, value in sample.items() if not name.startswith("__")
            }
            assert fields == expected[int(sample["number"])].fields
        if rng.random() < 0.3:
            next(iter(stream))


def test_the_model_notices_a_changed_byte(tmp_path: Path) -> None:
    """The oracle itself: samples which differ from the model in one byte do not pass."""
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
