"""The preview of `plan` equals the epoch that loaders deliver, and its shuffle statistics are
true.
"""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wdstrain as wt
from tests.conftest import Sample, write_shards, write_tar
from tests.support.orders import lane_of
from wdstrain.cli import main
from wdstrain.order.rng import uniform
from wdstrain.serve import Server

OPTIONS: list[dict[str, Any]] = [
    {"batch_size": 4},
    {"batch_size": 4, "lanes": 2},
    {"batch_size": 3, "world_size": 2, "lanes": 6, "tail": "pad"},
    {"batch_size": 3, "world_size": 3, "tail": "keep", "shuffle_buffer": 7},
    {"batch_size": 2, "shuffle": False},
    {"batch_size": 1, "world_size": 2, "lanes": 2, "shuffle_buffer": 1, "epoch": 2},
]


def plan_and_loaders(index: wt.Index, options: dict[str, Any]) -> tuple[Any, list[wt.Loader]]:
    """Return the preview of an epoch, and a loader of each rank."""
    words = {name: value for name, value in options.items() if name != "epoch"}
    world = words.pop("world_size", 1)
    loaders = [wt.Loader(index, rank=rank, world_size=world, **words) for rank in range(world)]
    return wt.plan_epoch(index, **options), loaders


def held(index: wt.Index, loader: wt.Loader, planned: Any) -> np.ndarray[Any, Any]:
    """Return the bytes that a rank holds at each step. int64[steps]

    Each lane is read and delivered sample by sample, as far as a step needs it.
    """
    plan: Any = loader.plan(planned.settings["epoch"])
    sizes = (index.offsets.stop - index.offsets.start).tolist()
    sums = np.zeros(plan.steps, np.int64)
    for lane in range(plan.lanes_per_rank):
        entries = lane_of(plan, loader.rank, lane)
        due = {number: row.step for number, row in entries}  # padding repeats a sample
        order = list(due)
        waiting, read = list[int](), 0
        for step in range(plan.steps):
            furthest = max((order.index(i) for i, row in entries if row.step == step), default=-1)
            waiting += order[read : furthest + 1]
            read = max(read, furthest + 1)
            sums[step] += sum(sizes[number] for number in waiting)
            waiting = [number for number in waiting if due[number] != step]
    return sums


@pytest.mark.parametrize("options", OPTIONS)
def test_ranks_deliver_read_and_hold_what_was_planned(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    index = wt.index(write_shards(tmp_path, [7, 113, 1, 40, 61]))
    planned, loaders = plan_and_loaders(index, options)
    keys = []
    for rank, loader in zip(planned.ranks, loaders, strict=True):
        assert rank["held_bytes_most"] == held(index, loader, planned).max()
        batches = list(loader.epoch(planned.settings["epoch"]))
        assert len(batches) == planned.steps == len(loader)
        delivered = [key for batch in batches for key in batch["__key__"]]
        assert len(delivered) == rank["samples"] + rank["padding"]
        keys += delivered
        assert loader.report()["bytes"] >= rank["bytes"]  # it may read ahead into the next epoch
        loader.close()
    assert len(set(keys)) == 222 - planned.left_out
    assert planned.exactly_once


LENGTHS = [n * 37 % 90 for n in range(400)]
BUCKETS: list[dict[str, Any]] = [
    {"buckets": "kind", "batch_size": 7},
    {"buckets": {"length": [20, 60, 90]}, "budget": 500, "batch_size": 16, "world_size": 2},
    {"buckets": {"length": [30, 90]}, "budget": 360, "world_size": 2, "lanes": 4, "epoch": 1},
]


@pytest.mark.parametrize("options", BUCKETS)
def test_ranks_deliver_the_steps_of_each_bucket_that_were_planned(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    samples = ({"json": {"length": n, "kind": "abc"[n % 3]}, "cls": n % 5} for n in LENGTHS)
    index = wt.pack(samples, tmp_path / "set", max_shard_samples=90)
    planned, loaders = plan_and_loaders(index, options)
    batches = [list(loader.epoch(planned.settings["epoch"])) for loader in loaders]
    sizes = [sum(len(batch["__key__"]) for batch in step) for step in zip(*batches, strict=True)]
    rows = planned.buckets
    assert sorted(sizes) == sorted(row["batch"] for row in rows for _ in range(row["steps"]))
    assert len(sizes) == planned.steps
    assert [sum(len(batch["__key__"]) for batch in own) for own in batches] == [
        rank["samples"] for rank in planned.ranks
    ]
    assert sum(row["samples"] for row in rows) == len(LENGTHS) == sum(sizes) + planned.left_out
    assert sum(row["left_out"] for row in rows) == planned.left_out
    assert planned.exactly_once
    assert planned.quality == {"classes": None, "neighbors": None}


def test_the_shell_plans_buckets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wt.pack(({"json": {"length": n}} for n in LENGTHS), tmp_path / "set")
    words = ["plan", str(tmp_path / "set"), "--budget", "450", "--buckets"]
    assert main([*words, "length:45,90"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"length <= 45 +\d+ steps of 10 on all ranks, \d+ of", printed)
    assert re.search(r"length <= 90 +\d+ steps of 5 on all ranks, \d+ of", printed)
    assert main([*words, "length:45,x"]) == 2


def test_planned_requests_equal_the_requests_at_a_server(tmp_path: Path) -> None:
    """In file order and without a second epoch, each byte of a sample is requested once."""
    index = wt.index(write_shards(tmp_path, [70, 113, 40]))
    with Server(tmp_path) as server:
        url = f"{server.url}/index.json"
        options: dict[str, Any] = {"batch_size": 1, "shuffle": False}
        rank = wt.plan_epoch(url, **options).ranks[0]
        assert (rank["shards"], rank["reads"], rank["seeks"], rank["requests"]) == (3, 3, 3, 3)
        assert rank["bytes"] == (index.offsets.stop - index.offsets.start).sum()
        before = server.requests
        loader = wt.Loader(url, **options)
        assert sum(1 for _ in loader.epoch(0)) == 223
        loader.close()
        assert rank["requests"] <= server.requests - before <= 2 * rank["requests"] + 3


def test_a_gap_is_a_seek_only_if_it_is_large(tmp_path: Path) -> None:
    large: list[Sample] = [(f"a{i}", {"bin": bytes(900_000 + i)}) for i in range(12)]
    folder = write_tar(tmp_path / "a.tar", large).parent
    wt.index(folder, columns=[])
    index = wt.open(folder)
    (rank,) = wt.plan_epoch(index, batch_size=1, shuffle=False).ranks
    assert (rank["reads"], rank["seeks"]) == (1, 1)
    ids = np.array([0, 1, 4, 8, 9])
    (rank,) = wt.plan_epoch(index.take(ids), batch_size=1, shuffle=False).ranks
    assert (rank["reads"], rank["seeks"]) == (3, 3)


# --- shuffle quality ---


def by_class(folder: Path, counts: list[int], classes: int) -> Path:
    """Write shards that are sorted by class."""
    numbers = itertools.count()
    for shard, count in enumerate(counts):
        samples: list[Sample] = [
            (f"s{n:06d}", {"cls": b"%d" % (n * classes // sum(counts)), "txt": bytes(200)})
            for n in itertools.islice(numbers, count)
        ]
        write_tar(folder / f"part-{shard:03d}.tar", samples)
    return folder


def measured(index: wt.Index, codes: np.ndarray[Any, Any], **options: Any) -> float:
    """Return the design effect of a loader's batches, counted sample by sample."""
    size = options["batch_size"]
    loader = wt.Loader(index, **options)
    batches = [np.array([int(key[1:]) for key in batch["__key__"]]) for batch in loader.epoch(0)]
    loader.close()
    counts = np.bincount(codes)
    total = counts.sum()
    alike = (counts * (counts - 1)).sum() / (total * (total - 1))
    pairs = [np.bincount(codes[ids]) for ids in batches]
    inside = sum((n * (n - 1)).sum() for n in pairs) / (len(pairs) * size * (size - 1))
    return float(1 + (size - 1) * (inside - alike) / (1 - alike))


@pytest.mark.parametrize("buffer", [1, 40, 400])
def test_shuffle_quality_equals_that_of_delivered_batches(tmp_path: Path, buffer: int) -> None:
    folder = by_class(tmp_path, [500, 300], 4)
    wt.index(folder, columns=["cls"])
    places = np.arange(800) // 16
    options: dict[str, Any] = {"batch_size": 16, "shuffle_buffer": buffer}
    quality: Any = wt.plan_epoch(folder, **options).quality
    for name, codes in (("neighbors", places), ("classes", np.repeat(np.arange(4), 200))):
        effect = measured(wt.open(folder), codes, **options)
        assert quality[name]["value"] == pytest.approx(effect)


def test_a_random_order_is_ideal_and_a_sorted_order_is_not(tmp_path: Path) -> None:
    draws = uniform(np.arange(3000), 1, "classes")[:, 0]
    samples: list[Sample] = [
        (f"s{i:06d}", {"cls": str(int(draw * 5)).encode()}) for i, draw in enumerate(draws)
    ]
    write_tar(tmp_path / "mixed" / "a.tar", samples)
    wt.index(tmp_path / "mixed", columns=["cls"])
    wide: Any = wt.plan_epoch(tmp_path / "mixed", batch_size=50, shuffle_buffer=10**6)
    mixing = wide.quality["classes"]
    assert abs(mixing["value"] - 1) < 2 * (mixing["limit"] - 1.1)  # two standard deviations
    assert wide.is_good
    folder = by_class(tmp_path / "sorted", [3000], 5)
    wt.index(folder, columns=["cls"])
    lined_up: Any = wt.plan_epoch(folder, batch_size=50, shuffle=False).quality
    assert lined_up["classes"]["value"] == pytest.approx(50)


def test_sorted_shards_get_advice_to_repack_that_helps(tmp_path: Path) -> None:
    folder = by_class(tmp_path / "sorted", [500, 500, 500, 500], 4)
    wt.index(folder, columns=["cls"])
    before: Any = wt.plan_epoch(folder, batch_size=20, shuffle_buffer=50)
    assert before.quality["classes"]["value"] > 15
    assert not before.is_good
    text = " ".join(repr(before).split())
    for words in ("Not well shuffled", "wdstrain convert tars URLS OUT", "Raise --shuffle-buffer"):
        assert words in text
    wide: Any = wt.plan_epoch(folder, batch_size=20, shuffle_buffer=10**6)
    assert wide.quality["classes"]["value"] < 2
    unshuffled = wt.plan_epoch(folder, batch_size=20, shuffle=False)
    assert "Remove --no-shuffle" in repr(unshuffled)
    wt.convert_tars(folder, tmp_path / "mixed")
    wt.index(tmp_path / "mixed", columns=["cls"])
    after = wt.plan_epoch(tmp_path / "mixed", batch_size=20, shuffle_buffer=1)
    assert after.verdict == "Well shuffled."


def test_classes_come_from_the_index_without_a_read(tmp_path: Path) -> None:
    folder = by_class(tmp_path, [600, 600], 3)
    for columns in ([], ["cls"]):
        wt.index(folder, columns=columns)
        with Server(folder) as server:
            planned: Any = wt.plan_epoch(f"{server.url}/index.json", batch_size=20)
            assert server.requests == 2  # index.json and index.arrow
        assert planned.requests > 0
        assert bool(planned.quality["classes"]) == bool(columns)
        advice = "wdstrain index DIR --columns NAME"
        assert (advice in " ".join(repr(planned).split())) != bool(columns)
    assert wt.plan_epoch(folder, where="cls != 2", batch_size=20).samples == 800


# --- command line ---


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    out = by_class(tmp_path / "shards", [300, 300], 3)
    wt.index(out, columns=["cls"])
    return out


def test_plan_prints_at_eighty_columns_and_json_is_the_complete_preview(
    folder: Path, capsys: Any
) -> None:
    for words in ([], ["--world-size", "2", "--lanes", "4"], ["--no-shuffle"]):
        assert main(["plan", str(folder), "--batch-size", "10", *words]) == 0
        printed = capsys.readouterr().out
        assert max(map(len, printed.splitlines())) <= 80
        assert all(text in printed for text in ("exactly once", "design effect", " seek"))
    words = ["--world-size", "2", "--batch-size", "7", "--epoch", "3", "--json"]
    assert main(["plan", str(folder), *words]) == 0
    document = json.loads(capsys.readouterr().out)
    counts = [document[name] for name in ("steps", "left_out", "exactly_once")]
    assert (document["settings"]["epoch"], counts) == (3, [42, 12, True])
    assert [rank["samples"] for rank in document["ranks"]] == [294, 294]


def test_hours_and_cost_are_those_of_the_given_rate_and_prices(folder: Path, capsys: Any) -> None:
    assert wt.plan_epoch(folder, batch_size=10).hours == pytest.approx(600 / 1000 / 3600)
    with Server(folder) as server:
        words = ["plan", f"{server.url}/index.json", "--world-size", "2", "--batch-size", "10"]
        words += ["--rate", "50", "--price", "0.09,0.4"]
        assert main([*words, "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert main(words) == 0
    assert document["hours"] == pytest.approx(600 / 2 / 50 / 3600)
    size, count = (sum(rank[name] for rank in document["ranks"]) for name in ("bytes", "requests"))
    assert document["requests"] == count > 0
    assert document["cost"] == pytest.approx(size / 1e9 * 0.09 + count / 1000 * 0.4)
    printed = capsys.readouterr().out
    assert f"{document['cost']:.4g} per epoch" in printed
    assert re.search(r"0:00:\d+ at 50 samples/s on each rank", printed)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--batch-size", "700"], "600 samples cannot give 1 rank(s) one batch of 700"),
        (["--world-size", "4", "--lanes", "6"], "6 lanes cannot be shared by 4 ranks"),
        (["--rate", "0"], "--rate 0.0: must be > 0"),
        (["--price", "1"], "must be two numbers"),
    ],
)
def test_impossible_options_are_a_usage_error(
    folder: Path, capsys: Any, words: list[str], sentence: str
) -> None:
    assert main(["plan", str(folder), *words]) == 2
    printed = capsys.readouterr()
    assert sentence in printed.err
    assert printed.out == ""
