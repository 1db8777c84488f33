"""What is foretold happens: reads, seeks and memory are a real reader's, and the statistics are true where the truth is known."""

from __future__ import annotations

import itertools
import json
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
from wdstrain.inspection.epoch_preview import simulate
from wdstrain.inspection.epoch_preview.api import plan_epoch
from wdstrain.inspection.epoch_preview.shuffle_quality import class_mix, neighbors, parts_of
from wdstrain.inspection.epoch_preview.simulate import (
    LanePlaces,
    held_in,
    places_in,
    reads_of,
)
from wdstrain.order.plan import Plan
from wdstrain.order.rng import bits, uniform
from wdstrain.reader import read_blocks, read_thread
from wdstrain.serve import Server
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
def test_reads_and_seeks_are_those_of_a_real_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, options: dict[str, Any]
) -> None:
    folder = (
        odd_shards(tmp_path / "odd")
        if kind == "odd"
        else write_shards(tmp_path / "few", [7, 13, 1])
    )
    monkeypatch.setattr(read_blocks, "_LOCAL", 4 << 20)
    for module in (read_blocks, simulate):
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
    foretold = plan_epoch(index, **options)
    plan = plan_of(index, **options)
    if kind == "odd" and "lanes" not in options and options["batch_size"] == 4:
        assert foretold.ranks[0].unused_bytes > 3000
    monkeypatch.setattr(read_thread, "LocalFile", lambda path, state: Recorder(path))
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


def test_samples_held_in_memory_match_a_replay_of_reads_and_deliveries(
    tmp_path: Path,
) -> None:
    index = wt.index(write_shards(tmp_path, [7, 113, 1, 40, 61]))
    for plan in plans(index):
        for lane in range(plan.lane_count):
            expected = replayed(index, plan, lane)
            held = held_in(index, plan, lane, 0, plan.steps)
            assert list(zip(held.samples.tolist(), held.bytes.tolist(), strict=True)) == expected, (
                plan,
                lane,
            )
            for first, stop in (
                (plan.steps // 2, plan.steps),
                (plan.steps // 3, plan.steps // 3 + 1),
            ):
                if plan.tail == "drop":
                    part = held_in(index, plan, lane, first, stop)
                    assert (
                        list(zip(part.samples.tolist(), part.bytes.tolist(), strict=True))
                        == expected[first:stop]
                    )


def test_a_rank_holds_what_its_lanes_hold(tmp_path: Path) -> None:
    index = wt.index(write_shards(tmp_path, [70, 113, 40]))
    for options in SIZES:
        found, plan = plan_epoch(index, **options), plan_of(index, **options)
        for rank in found.ranks:
            held = np.sum(
                [replayed(index, plan, lane) for lane in plan.lanes_of(rank.rank)], axis=0
            )
            assert (rank.held_samples_most, rank.held_bytes_most) == tuple(held.max(0).tolist())
            assert (rank.held_samples_mean, rank.held_bytes_mean) == pytest.approx(
                held.mean(0).tolist()
            )
            assert rank.first_batch_bytes == held[0, 1]


def test_every_rank_has_the_same_steps_and_every_sample_is_read_once(tmp_path: Path) -> None:
    index = wt.index(write_shards(tmp_path, [7, 113, 1, 40, 61]))
    for options in SIZES:
        found = plan_epoch(index, **options)
        assert found.exactly_once
        assert len({rank.steps for rank in found.ranks}) == 1
        assert sum(rank.samples for rank in found.ranks) == 222 - found.left_out


def test_a_part_of_an_epoch_has_the_steps_and_places_of_the_whole(tmp_path: Path) -> None:
    index = wt.index(write_shards(tmp_path, [900, 1100]))
    for plan in [*plans(index), plan_of(index, batch_size=8, shuffle_buffer=100, lanes=4)]:
        whole = [places_in(plan, lane, 0, plan.steps) for lane in range(plan.lane_count)]
        assert parts_of(plan, 4000) == [(0, plan.steps)]
        parts = parts_of(plan, 64)
        assert all(0 <= first < stop <= plan.steps for first, stop in parts)
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(parts))
        for lane, (first, stop) in itertools.product(range(plan.lane_count), parts):
            part = places_in(plan, lane, first, stop)
            for name in ("ids", "position", "step", "due"):
                rest = getattr(whole[lane], name)[part.low : part.low + len(part.ids)]
                assert (getattr(part, name) == rest).all()


# --- how well it is shuffled -----------------------------------------------------------------------------------------


def shuffled(count: int, *words: int | str) -> Ints:
    return np.argsort(bits(np.arange(count), *words))


def test_a_random_order_has_the_neighbors_of_the_ideal() -> None:
    count, size = 20_000, 50
    plan = Plan(counts=np.array([count]), seed=0, epoch=0, batch_size=size)
    parts = []
    for run in range(5):
        position = shuffled(count, "ideal", run)
        step = position // size
        parts.append([LanePlaces(0, np.arange(count), position, step, step)])
    found = neighbors(plan, np.array([0, count]), parts)
    assert found is not None
    ideal = (size - 1) / (count - 1)
    assert found.touching_ideal == pytest.approx(ideal)
    assert found.nearest_ideal == pytest.approx(16 * ideal)
    # so many pairs of neighbors that meet with this probability; pairs are nearly independent
    assert abs(found.touching - ideal) < 4 * np.sqrt(ideal / (5 * count))
    assert abs(found.nearest - 16 * ideal) < 4 * 2 * np.sqrt(8 * ideal / (5 * count))
    assert found.mean_move == pytest.approx(count / 3, rel=0.02)


def test_the_ideal_of_batches_of_different_sizes_counts_each_with_its_pairs() -> None:
    plan = Plan(counts=np.array([10]), seed=0, epoch=0, batch_size=4, tail="keep")
    places = np.arange(10)
    lanes = [LanePlaces(0, places, places, places // 4, places // 4)]
    result = neighbors(plan, np.array([0, 10]), [lanes])
    assert result is not None
    # pairs in batches of 4, 4 and 2 among those of 10
    assert result.touching_ideal == pytest.approx((6 + 6 + 1) / 45)
    assert result.touching == pytest.approx(7 / 9)


def test_class_sorted_shards_have_a_design_effect_of_the_batch_and_an_ideal_order_of_one() -> None:
    kinds, size = np.repeat(np.arange(10), 2000), 50
    counts = np.bincount(kinds)
    batch = np.arange(20_000) // size
    lined_up = class_mix(batch, kinds, size=size, counts=counts)
    mixed = [
        one
        for run in range(20)
        if (one := class_mix(batch, kinds[shuffled(20_000, "mix", run)], size=size, counts=counts))
    ]
    assert lined_up is not None
    assert lined_up.design_effect == pytest.approx(size)
    assert (lined_up.classes, lined_up.among) == (1, size)
    effects = np.array([one.design_effect for one in mixed])
    assert abs(effects.mean() - 1) < 2 * mixed[0].chance / np.sqrt(20)
    # the stated chance is two standard deviations
    assert 0.5 < mixed[0].chance / 2 / effects.std() < 2
    classes = np.mean([one.classes for one in mixed])
    assert classes == pytest.approx(mixed[0].classes_ideal, abs=0.01)
    assert lined_up.classes_ideal == pytest.approx(10 * (1 - 0.9**size), abs=0.001)


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


def test_sorted_shards_get_the_advice_to_repack_which_helps(
    tmp_path: Path,
) -> None:
    folder = by_class(tmp_path / "sorted", [500, 500, 500, 500], 4)
    before = plan_epoch(folder, batch_size=20, shuffle_buffer=50)
    assert before.quality.classes is not None
    assert before.quality.classes.design_effect > 15
    assert not before.is_good
    text = " ".join(str(before).split())
    assert "Not well shuffled" in text
    assert "wdstrain convert tars URLS OUT" in text
    assert main(["convert", "tars", str(folder), str(tmp_path / "mixed"), "--json"]) == 0
    after = plan_epoch(tmp_path / "mixed", batch_size=20, shuffle_buffer=50)
    assert after.quality.classes is not None
    assert after.quality.mixes_classes
    assert "packed in random order" in " ".join(str(after).split())
    assert "convert tars" not in str(after)
    assert after.smallest_good is not None
    buffer = after.smallest_good.buffer
    wide = plan_epoch(tmp_path / "mixed", batch_size=20, shuffle_buffer=buffer)
    assert wide.is_good
    assert "Well shuffled" in str(wide)
    assert wide.quality.held_bytes == after.smallest_good.held_bytes


def test_classes_come_from_the_index_without_a_read(tmp_path: Path) -> None:
    folder = by_class(tmp_path, [600, 600], 3)
    wt.index(folder)
    with Server(folder, "127.0.0.1", 0) as server:
        bare = plan_epoch(f"{server.url}/index.json", batch_size=20, shuffle_buffer=30)
    assert (bare.is_remote, bare.labels_read, bare.quality.classes) == (True, 0, None)
    assert "wdstrain index DIR --columns cls" in " ".join(str(bare).split())
    read = plan_epoch(folder, batch_size=20, shuffle_buffer=30)
    assert read.labels_read == 1200
    wt.index(folder, columns=["cls"])
    with Server(folder, "127.0.0.1", 0) as server:
        found = plan_epoch(f"{server.url}/index.json", batch_size=20, shuffle_buffer=30)
        assert server.requests == 2  # index.json and index.arrow
    assert found.labels_read == 0
    assert found.quality.classes == read.quality.classes
    assert found.quality.classes is not None
    assert found.quality.classes.design_effect > 5
    assert "requests" in str(found)
    chosen = plan_epoch(folder, where="cls != 2", batch_size=20)
    assert chosen.samples == 800


def test_a_condition_limits_the_epoch(tmp_path: Path, capsys: Any) -> None:
    folder = by_class(tmp_path, [300, 300], 3)
    wt.index(folder, columns=["cls"])
    assert main(["plan", str(folder), "--where", "cls == 1", "--batch-size", "10", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["samples"] == 200


# --- what is typed ---------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    out = by_class(tmp_path / "shards", [300, 300], 3)
    wt.index(out)
    return out


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
    assert "Remove --no-shuffle" in printed.out or "Not well shuffled" in printed.out


def test_many_ranks_are_summarized_by_first_last_and_sum(folder: Path) -> None:
    found = plan_epoch(folder, world_size=20, batch_size=3)
    rows = [
        line.split()[0]
        for line in str(found).splitlines()
        if line.split()[:1] in (["least"], ["most"], ["all"], ["0"], ["19"])
    ]
    assert rows == ["least", "most", "all"]
    few = plan_epoch(folder, world_size=3, batch_size=3)
    assert [
        line.split()[0] for line in str(few).splitlines() if line.strip()[:2] in ("0 ", "1 ", "2 ")
    ] == [
        "0",
        "1",
        "2",
    ]


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


def test_the_page_is_one_file_with_figures(folder: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "plan.html"
    assert main(["plan", str(folder), "-o", str(out)]) == 0
    assert str(out) in capsys.readouterr().err
    text = out.read_text()
    assert text.count("<svg") == 3
    assert "http" not in text
    found = plan_epoch(folder)
    assert found._repr_html_().count("<svg") == 3
    assert found.as_dict()["verdict"] in unescape(found._repr_html_())
    for size in ("64", "256"):  # axes are in samples, not in exponents
        assert f">{size}<" in text


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
        (["--label", "colour"], "there is no label 'colour'. The index has: cls."),
        (["--epoch", "-1"], "--epoch -1: must be an integer >= 0."),
        (["--shuffle-buffer", "0"], "--shuffle-buffer 0: must be an integer >= 1"),
        (["-o", "plan.png"], "plan.png: the file must end in .html."),
    ],
)
def test_impossible_options_are_one_error(
    folder: Path, capsys: Any, words: list[str], sentence: str
) -> None:
    assert main(["plan", str(folder), *words]) == 2
    printed = capsys.readouterr()
    assert sentence in printed.err
    lines = printed.err.splitlines()
    assert [line.split(":")[0] for line in lines] == ["error", "hint"][: len(lines)]
    assert printed.out == ""


def test_sizes_that_cannot_be_are_the_errors_of_a_loader(folder: Path) -> None:
    with pytest.raises(PlanError, match="Use a world size that divides lanes"):
        plan_epoch(folder, lanes=3, world_size=2)
    index = open_index(folder)
    with pytest.raises(UsageError, match="has the kind number"):
        plan_epoch(replace(index, labels=(wt.Label("angle", "number", "txt"),)), label="angle")
    labels = tuple(wt.Label(name, "class", "json", name) for name in ("a", "b"))
    several = plan_epoch(replace(index, labels=labels, fields=("txt", "x")))
    assert "several labels. Choose one (label): a, b" in several.why_no_classes
