"""What is foretold happens: reads, seeks and memory are a real reader's, and the statistics are true where the truth is known."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections import Counter
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wdstrain as wt
from tests.conftest import Sample, write_shards, write_tar
from wdstrain.cli import main
from wdstrain.errors import PlanError, UsageError
from wdstrain.foresight import doors, itinerary
from wdstrain.foresight.doors import foresee
from wdstrain.foresight.itinerary import Seen, reads_of, seen, waiting
from wdstrain.foresight.outlook import lines, page, verdict
from wdstrain.foresight.shuffling import NeighbourCount, batches_drawn, class_mix, parts_of
from wdstrain.order.plan import Plan
from wdstrain.order.rng import bits, uniform
from wdstrain.reader import read_blocks, reader
from wdstrain.serving import Server
from wdstrain.shards.index import Index
from wdstrain.shards.offsets import Ints
from wdstrain.shards.resolve import open_index
from wdstrain.shards.tar import END, header, padding
from wdstrain.storage.local import LocalFile

SIZES: list[dict[str, Any]] = [
    {"batch_size": 4},
    {"batch_size": 4, "lanes": 2},
    {"batch_size": 3, "world_size": 2, "lanes": 6, "tail": "pad"},
    {"batch_size": 3, "world_size": 3, "tail": "keep", "shuffle_buffer": 7},
    {"batch_size": 2, "shuffle": False},
    {"batch_size": 1, "world_size": 2, "lanes": 2, "shuffle_buffer": 1, "epoch": 2},
]


@pytest.fixture
def once(monkeypatch: pytest.MonkeyPatch) -> None:
    """How well it mixes is looked at in one epoch alone: enough where something else is tested."""
    monkeypatch.setattr(doors, "_MOST_EPOCHS", 1)


def plan_of(index: Index, **options: Any) -> Plan:
    """The plan of a loader with these options."""
    epoch = options.pop("epoch", 0)
    world = options.pop("world_size", 1)
    found = wt.Loader(index, rank=0, world_size=world, **options).plan(epoch)
    assert isinstance(found, Plan)
    return found


def odd_shards(folder: Path) -> Path:
    """Shards in which a read ends for each of its reasons: size, number of samples, the shard's end, something large between."""
    large: list[Sample] = [(f"a{i}", {"bin": bytes(900_000 + i)}) for i in range(12)]
    small: list[Sample] = [(f"b{i:05d}", {"txt": b"x"}) for i in range(1100)]
    write_tar(folder / "a.tar", large)
    write_tar(folder / "b.tar", small)
    write_tar(
        folder / "c.tar",
        [("c0", {"txt": b"y"}), ("c1", {"bin": bytes(6 << 20)}), ("c2", {"txt": b"z"})],
    )
    with open(folder / "d.tar", "wb") as file:  # what has no extension is no field of a sample
        for name, size in (
            ("d0.txt", 1),
            ("NOTES", 3000),
            ("d1.txt", 1),
            ("VIDEO", 5 << 20),
            ("d2.txt", 1),
        ):
            file.write(header(name, size) + bytes(size) + bytes(padding(size)))
        file.write(END)
    return folder


@pytest.mark.parametrize("options", SIZES)
@pytest.mark.parametrize("kind", ["odd", "few"])
@pytest.mark.usefixtures("once")
def test_reads_and_seeks_are_those_of_a_real_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, options: dict[str, Any]
) -> None:
    folder = (
        odd_shards(tmp_path / "odd")
        if kind == "odd"
        else write_shards(tmp_path / "few", [7, 13, 1])
    )
    monkeypatch.setattr(read_blocks, "_LOCAL", 4 << 20)
    for module in (read_blocks, itinerary):
        monkeypatch.setattr(module, "READ_SAMPLES", 1024)
    sources: list[Recorder] = []

    class Recorder(LocalFile):
        """A shard that remembers what was read of it."""

        def __init__(self, path: str) -> None:
            super().__init__(path)
            self.reads: list[tuple[int, int]] = []
            sources.append(self)

        def read_into(self, pieces: Any, offset: int) -> None:
            super().read_into(pieces, offset)
            self.reads.append((offset, offset + sum(map(len, pieces))))

    index = wt.index(folder)
    foretold = foresee(index, read_labels=False, **options)
    plan = plan_of(index, **options)
    if kind == "odd" and "lanes" not in options and options["batch_size"] == 4:
        assert foretold.ranks[0].unused_bytes > 3000
    monkeypatch.setattr(reader, "LocalFile", lambda path, state: Recorder(path))
    words = {name: value for name, value in options.items() if name not in ("epoch", "world_size")}
    for rank in foretold.ranks:
        sources.clear()
        loader = wt.Loader(index, rank=rank.rank, world_size=foretold.world_size, **words)
        delivered = [key for batch in loader.epoch(foretold.epoch) for key in batch["__key__"]]
        loader.close()
        lanes = [reads_of(index, plan, lane) for lane in plan.lanes_of(rank.rank)]
        of_epoch = sources[
            : sum(len(lane.opens) for lane in lanes)
        ]  # the reader goes on into the next
        expected = Counter[tuple[str, tuple[tuple[int, int], ...]]]()
        for lane in lanes:
            for first, stop in itertools.pairwise([*lane.opens.tolist(), len(lane.ids)]):
                spans = zip(
                    lane.start[first:stop].tolist(), lane.stop[first:stop].tolist(), strict=True
                )
                expected[index.shards[lane.shard[first]].path, tuple(spans)] += 1
        assert Counter((one.path, tuple(one.reads)) for one in of_epoch) == expected
        jumps = sum(a[1] != b[0] for one in of_epoch for a, b in itertools.pairwise(one.reads))
        assert rank.seeks == len(of_epoch) + jumps
        assert rank.reads == sum(len(one.reads) for one in of_epoch)
        assert rank.bytes == sum(stop - start for one in of_epoch for start, stop in one.reads)
        assert rank.shards == len({one.path for one in of_epoch})
        assert len(delivered) == rank.samples + rank.padding
        assert len(loader) == rank.steps


def test_reads_are_the_same_however_many_are_found_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = wt.index(odd_shards(tmp_path / "odd"))
    monkeypatch.setattr(itinerary, "READ_SAMPLES", 1024)
    for options in SIZES:
        plan = plan_of(index, **options)
        whole = [reads_of(index, plan, lane) for lane in range(plan.lane_count)]
        with monkeypatch.context() as patch:
            patch.setattr(itinerary, "_CHUNK", 1030)  # more than one read takes
            for lane, one in enumerate(whole):
                parts = reads_of(index, plan, lane)
                assert all((a == b).all() for a, b in zip(one, parts, strict=True))


def plans(index: Index) -> list[Plan]:
    return [plan_of(index, **options) for options in SIZES] + [
        plan_of(index, batch_size=30, tail="pad", lanes=30)
    ]


def replayed(index: Index, plan: Plan, lane: int) -> list[tuple[int, int]]:
    """(samples, bytes) that wait at each step, by reading and delivering one after another."""
    needed = [plan.order(lane, *plan.span(lane, step)).tolist() for step in range(plan.steps)]
    last = {place: step for step, places in enumerate(needed) for place in places}
    size = (index.offsets.stop - index.offsets.start)[
        plan.ids(lane, np.arange(plan.lane_places(lane)))
    ].tolist()
    waits, read, found = set[int](), 0, []
    for step, places in enumerate(needed):
        while places and read <= max(places):
            waits.add(read)
            read += 1
        found.append((len(waits), sum(size[place] for place in waits)))
        waits -= {place for place in waits if last[place] == step}
    return found


def test_what_waits_in_memory_is_what_a_replay_of_reads_and_deliveries_finds(
    tmp_path: Path,
) -> None:
    index = wt.index(write_shards(tmp_path, [7, 113, 1, 40, 61]))
    for plan in plans(index):
        for lane in range(plan.lane_count):
            expected = replayed(index, plan, lane)
            held = waiting(index, plan, lane, 0, plan.steps)
            assert list(zip(held.samples.tolist(), held.bytes.tolist(), strict=True)) == expected, (
                plan,
                lane,
            )
            for first, stop in (
                (plan.steps // 2, plan.steps),
                (plan.steps // 3, plan.steps // 3 + 1),
            ):
                if plan.tail == "drop":
                    part = waiting(index, plan, lane, first, stop)
                    assert (
                        list(zip(part.samples.tolist(), part.bytes.tolist(), strict=True))
                        == expected[first:stop]
                    )


@pytest.mark.usefixtures("once")
def test_a_rank_holds_what_its_lanes_hold(tmp_path: Path) -> None:
    index = wt.index(write_shards(tmp_path, [70, 113, 40]))
    for options in SIZES:
        found, plan = foresee(index, read_labels=False, **options), plan_of(index, **options)
        for rank in found.ranks:
            held = np.sum(
                [replayed(index, plan, lane) for lane in plan.lanes_of(rank.rank)], axis=0
            )
            assert (rank.held_samples_most, rank.held_bytes_most) == tuple(held.max(0).tolist())
            assert (rank.held_samples_mean, rank.held_bytes_mean) == pytest.approx(
                held.mean(0).tolist()
            )
            assert rank.first_batch_bytes == held[0, 1]


@pytest.mark.usefixtures("once")
def test_every_rank_has_the_same_steps_and_every_sample_is_read_once(tmp_path: Path) -> None:
    index = wt.index(write_shards(tmp_path, [7, 113, 1, 40, 61]))
    for options in SIZES:
        found = foresee(index, read_labels=False, **options)
        assert found.exactly_once
        assert len({rank.steps for rank in found.ranks}) == 1
        assert sum(rank.samples for rank in found.ranks) == 222 - found.left_out


@pytest.mark.usefixtures("once")
def test_an_order_that_gives_a_sample_twice_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = wt.index(write_shards(tmp_path, [40]))
    ids = Plan.ids
    monkeypatch.setattr(
        Plan, "ids", lambda plan, lane, places: np.minimum(ids(plan, lane, places), 35)
    )
    assert not foresee(index, batch_size=4, read_labels=False).exactly_once


def test_a_part_of_an_epoch_has_the_steps_and_places_of_the_whole(tmp_path: Path) -> None:
    index = wt.index(write_shards(tmp_path, [900, 1100]))
    for plan in [*plans(index), plan_of(index, batch_size=8, shuffle_buffer=100, lanes=4)]:
        whole = [seen(plan, lane, 0, plan.steps) for lane in range(plan.lane_count)]
        assert parts_of(plan, 4000) == [(0, plan.steps)]
        parts = parts_of(plan, 64)
        assert all(0 <= first < stop <= plan.steps for first, stop in parts)
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(parts))
        for lane, (first, stop) in itertools.product(range(plan.lane_count), parts):
            part = seen(plan, lane, first, stop)
            for name in ("ids", "position", "step", "due"):
                rest = getattr(whole[lane], name)[part.low : part.low + len(part.ids)]
                assert (getattr(part, name) == rest).all()


# --- how well it is shuffled -----------------------------------------------------------------------------------------


def shuffled(count: int, *words: int | str) -> Ints:
    return np.argsort(bits(np.arange(count), *words))


def test_a_random_order_has_the_neighbours_of_the_ideal() -> None:
    count, size = 20_000, 50
    plan = Plan(counts=np.array([count]), seed=0, epoch=0, batch_size=size)
    sums = NeighbourCount(plan, np.array([0, count]))
    for run in range(5):
        position = shuffled(count, "ideal", run)
        ids = np.arange(count)
        sums.add([Seen(0, ids, position, position // size, position // size)])
    found = sums.result()
    assert found is not None
    ideal = (size - 1) / (count - 1)
    assert found.touching_ideal == pytest.approx(ideal)
    assert found.nearest_ideal == pytest.approx(16 * ideal)
    # so many pairs of neighbours that meet with this probability; pairs are all but independent
    assert abs(found.touching - ideal) < 4 * np.sqrt(ideal / (5 * count))
    assert abs(found.nearest - 16 * ideal) < 4 * 2 * np.sqrt(8 * ideal / (5 * count))
    assert found.move_mean == pytest.approx(count / 3, rel=0.02)


def test_the_ideal_of_batches_that_are_not_alike_counts_each_with_its_pairs() -> None:
    plan = Plan(counts=np.array([10]), seed=0, epoch=0, batch_size=4, tail="keep")
    found = NeighbourCount(plan, np.array([0, 10]))
    found.add([Seen(0, np.arange(10), np.arange(10), np.arange(10) // 4, np.arange(10) // 4)])
    result = found.result()
    assert result is not None
    assert result.touching_ideal == pytest.approx(
        (6 + 6 + 1) / 45
    )  # pairs in batches of 4, 4 and 2 among those of 10
    assert result.touching == pytest.approx(7 / 9)


def test_class_sorted_shards_have_a_design_effect_of_the_batch_and_an_ideal_order_of_one() -> None:
    kinds, size = np.repeat(np.arange(10), 2000), 50
    counts = np.bincount(kinds)
    batch = np.arange(20_000) // size
    lined_up = class_mix(batch, kinds, size=size, samples=20_000, counts=counts)
    mixed = [
        class_mix(
            batch, kinds[shuffled(20_000, "mix", run)], size=size, samples=20_000, counts=counts
        )
        for run in range(20)
    ]
    assert lined_up is not None
    assert lined_up.design_effect == pytest.approx(size)
    assert (lined_up.classes, lined_up.among) == (1, size)
    effects = np.array([one.design_effect for one in mixed if one])
    errors = np.array([one.error for one in mixed if one], float)
    assert abs(effects.mean() - 1) < 4 * errors.mean() / np.sqrt(20)
    assert 0.5 < errors.mean() / effects.std() < 2  # the error that is told is the one that is made
    classes = np.mean([one.classes for one in mixed if one])
    assert classes == pytest.approx(mixed[0].classes_ideal if mixed[0] else 0, abs=0.01)
    assert lined_up.classes_ideal == pytest.approx(10 * (1 - 0.9**size), abs=0.001)


@pytest.mark.parametrize("window", [1, 60, 4000])
def test_a_part_of_the_labels_tells_what_all_of_them_tell(window: int) -> None:
    """Over many draws of 10 of 100 batches; classes of very different sizes, partly sorted, in several shards."""
    count, size = 5000, 50
    kinds = np.minimum(
        (uniform(np.arange(count), 1, "kind")[:, 0] ** 3 * 6).astype(int)
        + np.arange(count) // 2500,
        6,
    )
    plan = Plan(counts=np.full(10, 500), seed=3, epoch=0, batch_size=size, window=window)
    ids = plan.ids(0, plan.order(0, 0, count))
    every = class_mix(
        np.arange(count) // size, kinds[ids], size=size, samples=count, counts=np.bincount(kinds)
    )
    assert every is not None
    for among, draws in ((size, 300), (20, 300)):
        effects, errors = [], []
        for draw in range(draws):
            order = shuffled(100, "draw", draw)[:10]
            rows = np.stack(
                [
                    ids[b * size : (b + 1) * size][shuffled(size, "row", draw, int(b))[:among]]
                    for b in order
                ]
            )
            one = class_mix(
                np.repeat(np.arange(10), among), kinds[rows].reshape(-1), size=size, samples=count
            )
            assert one is not None
            effects.append(one.design_effect)
            errors.append(one.error)
        # 10 batches know the spread of their classes to some percent of it; the mean of many draws has no bias beyond that
        spread = np.std(effects)
        assert (
            abs(np.mean(effects) - every.design_effect)
            < 4 * spread / np.sqrt(draws) + 0.05 * every.design_effect
        )
        assert 0.5 < np.mean(np.array(errors, float)) / spread < 2


def test_batches_are_drawn_from_the_plan_itself(tmp_path: Path) -> None:
    plan = plan_of(
        wt.index(write_shards(tmp_path, [700, 300])), batch_size=10, shuffle_buffer=100, lanes=2
    )
    of = {
        int(i): step
        for step in range(plan.steps)
        for lane in (0, 1)
        for i in plan.ids(lane, plan.order(lane, *plan.span(lane, step)))
    }
    for most, shape in ((200, (20, 10)), (40, (8, 5)), (10**6, (100, 10))):
        rows = batches_drawn(plan, most)
        assert rows.shape == shape
        steps = [{of[i] for i in row} for row in rows.tolist()]
        assert all(len(one) == 1 for one in steps)
        assert len({one.pop() for one in steps}) == shape[0]


def by_class(folder: Path, counts: list[int], classes: int, *, stray: float = 0.0) -> Path:
    """Shards sorted by class. stray: share of samples that are of any."""
    total, number = sum(counts), 0
    draws = uniform(np.arange(total), 2, "stray")
    for shard, count in enumerate(counts):
        samples: list[Sample] = []
        for _ in range(count):
            place = draws[number, 1] if draws[number, 0] < stray else number / total
            samples.append(
                (f"s{number:06d}", {"cls": str(int(place * classes)).encode(), "txt": bytes(200)})
            )
            number += 1
        write_tar(folder / f"part-{shard:03d}.tar", samples)
    return folder


def test_sorted_shards_are_told_to_be_packed_again_and_are_good_afterwards(tmp_path: Path) -> None:
    folder = by_class(tmp_path / "sorted", [500, 500, 500, 500], 4)
    before = foresee(folder, batch_size=20, shuffle_buffer=50)
    assert before.now.classes is not None
    assert before.now.classes.design_effect > 15
    assert not before.is_good
    text = str(before)
    assert "Not good enough" in text
    assert "wdstrain convert tars URLS OUT" in text
    assert main(["convert", "tars", str(folder), str(tmp_path / "mixed"), "--json"]) == 0
    after = foresee(tmp_path / "mixed", batch_size=20, shuffle_buffer=50)
    assert after.now.classes is not None
    assert after.now.evens_classes
    assert "packed in random order" in str(after)
    assert "convert tars" not in str(after)
    assert after.enough is not None
    wide = foresee(tmp_path / "mixed", batch_size=20, shuffle_buffer=after.enough.buffer)
    assert wide.is_good
    assert "Good enough" in str(wide)
    assert wide.now.held_bytes == after.enough.held_bytes


def test_reading_a_part_of_the_labels_gives_the_same_within_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = wt.index(by_class(tmp_path, [2000, 2000, 1000], 10, stray=0.5))
    every = foresee(index, batch_size=20, shuffle_buffer=300)
    assert every.labels_read == 5000
    monkeypatch.setattr(doors, "_MOST_LABELS", 2500)
    monkeypatch.setattr(doors, "_FEW_LABELS", 100)
    some = foresee(index, batch_size=20, shuffle_buffer=300)
    assert 1000 < some.labels_read <= 2500
    for one, other in zip(every.sizes, some.sizes, strict=True):
        assert one.buffer == other.buffer
        assert one.neighbours == other.neighbours
        if other.classes is not None and one.classes is not None:
            assert one.classes.error is not None
            assert other.classes.error is not None
            error = np.hypot(one.classes.error, other.classes.error)
            assert abs(one.classes.design_effect - other.classes.design_effect) < 4 * error


@pytest.mark.usefixtures("once")
def test_labels_of_a_server_are_few_and_tell_nonetheless(tmp_path: Path) -> None:
    folder = by_class(tmp_path, [600, 600], 3)
    wt.index(folder)
    with Server(folder, "127.0.0.1", 0) as server:
        found = foresee(f"{server.url}/index.json", batch_size=20, shuffle_buffer=30)
        silent = foresee(
            f"{server.url}/index.json", batch_size=20, shuffle_buffer=30, read_labels=False
        )
    assert found.on_a_server
    assert 100 < found.labels_read <= 200
    assert found.now.classes is not None
    assert found.now.classes.design_effect > 5
    assert silent.labels_read == 0
    assert "requests" in str(silent)


def test_small_sets_are_looked_at_over_epochs_and_say_so(tmp_path: Path) -> None:
    index = wt.index(write_shards(tmp_path, [30]))
    found = foresee(index, batch_size=4)
    assert found.epochs_mixed > 1
    assert f"over {found.epochs_mixed} epochs" in str(found)


def test_a_large_epoch_is_looked_at_in_parts_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = wt.index(write_shards(tmp_path, [4000, 4000]))
    whole = foresee(index, batch_size=5, shuffle_buffer=40, read_labels=False)
    monkeypatch.setattr(doors, "_MOST", 1000)
    monkeypatch.setattr(doors, "_MOST_MIXED", 1000)
    part = foresee(index, batch_size=5, shuffle_buffer=40, read_labels=False)
    assert whole.steps_looked_at == whole.steps == 1600
    assert 0 < part.steps_looked_at < 300
    assert f"({part.steps_looked_at} of 1600 steps looked at)" in " ".join(str(part).split())
    names = ("samples", "bytes", "reads", "seeks", "first_batch_bytes")
    assert [getattr(part.ranks[0], name) for name in names] == [
        getattr(whole.ranks[0], name) for name in names
    ]
    assert part.exactly_once
    assert part.ranks[0].held_samples_mean == pytest.approx(
        whole.ranks[0].held_samples_mean, rel=0.1
    )
    assert part.now.neighbours is not None
    assert whole.now.neighbours is not None
    pairs = 8 * 1000  # that were looked at, at least
    assert abs(part.now.neighbours.nearest - whole.now.neighbours.nearest) < 4 * 16 / np.sqrt(pairs)


# --- what is typed ---------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    out = by_class(tmp_path / "shards", [300, 300], 3)
    wt.index(out)
    return out


@pytest.mark.usefixtures("once")
def test_plan_prints_at_eighty_columns(folder: Path, capsys: Any) -> None:
    for words in (
        [],
        ["--world-size", "2", "--lanes", "4"],
        ["--world-size", "20", "--batch-size", "3"],
        ["--no-shuffle"],
    ):
        assert main(["plan", str(folder), "--batch-size", "10", *words]) == 0
        printed = capsys.readouterr()
        assert max(map(len, printed.out.splitlines())) <= 80
        assert "exactly once" in printed.out
        assert "design effect" in printed.out
    assert "least (" not in printed.out
    assert "Leave --no-shuffle away" in printed.out or "Not good enough" in printed.out


@pytest.mark.usefixtures("once")
def test_many_ranks_are_told_by_their_ends_and_their_sum(folder: Path) -> None:
    found = foresee(folder, world_size=20, batch_size=3)
    rows = [
        line.split()[0]
        for line in lines(found)
        if line.split()[:1] in (["least"], ["most"], ["all"], ["0"], ["19"])
    ]
    assert rows == ["least", "most", "all"]
    few = foresee(folder, world_size=3, batch_size=3)
    assert [line.split()[0] for line in lines(few) if line.strip()[:2] in ("0 ", "1 ", "2 ")] == [
        "0",
        "1",
        "2",
    ]


@pytest.mark.usefixtures("once")
def test_json_says_all_of_it(folder: Path, capsys: Any) -> None:
    assert (
        main(
            [
                "plan",
                str(folder),
                "--world-size",
                "2",
                "--batch-size",
                "7",
                "--epoch",
                "3",
                "--json",
            ]
        )
        == 0
    )
    told = json.loads(capsys.readouterr().out)
    assert (told["epoch"], told["steps"], told["left_out"], told["exactly_once"]) == (
        3,
        42,
        12,
        True,
    )
    assert [rank["samples"] for rank in told["ranks"]] == [294, 294]
    assert told["labels_read"] == 600
    assert told["verdict"]
    assert {mix["buffer"] for mix in told["sizes"]} >= {told["shuffle_buffer"], 64}


@pytest.mark.usefixtures("once")
def test_without_labels_nothing_of_the_shards_is_read(folder: Path, capsys: Any) -> None:
    assert main(["plan", str(folder), "--no-labels"]) == 0
    before = capsys.readouterr().out
    for path in folder.glob("*.tar"):
        path.write_bytes(bytes(os.path.getsize(path)))
    later = time.time() + 1
    os.utime(
        folder / "index.json", (later, later)
    )  # shards that changed after their index are walked over again
    assert main(["plan", str(folder), "--no-labels"]) == 0
    assert capsys.readouterr().out == before
    assert "not looked at: labels were not to be read" in before
    assert main(["plan", str(folder)]) == 0
    assert "of one class, or none" in " ".join(capsys.readouterr().out.split())


@pytest.mark.usefixtures("once")
def test_the_page_is_one_file_with_figures(folder: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "plan.html"
    assert main(["plan", str(folder), "-o", str(out)]) == 0
    assert str(out) in capsys.readouterr().err
    text = out.read_text()
    assert text.count("<svg") == 3
    assert "http" not in text
    found = foresee(folder)
    assert text == page(found)
    assert found._repr_html_().count("<svg") == 3
    assert verdict(found) in unescape(found._repr_html_())


def test_plan_helps_with_an_example(capsys: Any) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["plan", "--help"])
    assert stopped.value.code == 0
    assert "example: wdstrain plan" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--batch-size", "700"], "600 samples cannot give 1 rank(s) one batch of 700"),
        (["--world-size", "4", "--lanes", "6"], "6 lanes cannot be shared by 4 ranks"),
        (["--label", "colour"], "there is no label 'colour' in the index; it has: cls."),
        (["--epoch", "-1"], "epoch=-1: must be an integer >= 0."),
        (["--shuffle-buffer", "0"], "shuffle_buffer=0: must be an integer >= 1"),
        (["-o", "plan.png"], "plan.png: the page is HTML."),
    ],
)
def test_what_cannot_be_is_one_sentence(
    folder: Path, capsys: Any, words: list[str], sentence: str
) -> None:
    assert main(["plan", str(folder), *words]) == 2
    printed = capsys.readouterr()
    assert sentence in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""


def test_sizes_that_cannot_be_are_the_errors_of_a_loader(folder: Path) -> None:
    with pytest.raises(PlanError, match="Use a world size that divides lanes"):
        foresee(folder, lanes=3, world_size=2)
    index = open_index(folder)
    with pytest.raises(UsageError, match="is of the kind number"):
        foresee(replace(index, labels=(wt.Label("angle", "number", "txt"),)), label="angle")
    labels = tuple(wt.Label(name, "class", "json", name) for name in ("a", "b"))
    several = foresee(replace(index, labels=labels, fields=("txt", "x")))
    assert "several labels; name one with --label: a, b" in several.why_no_classes
