"""The preview of `plan` equals the epoch that loaders deliver, and its shuffle statistics are
true.
"""

from __future__ import annotations

import json
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wdstrain as wt
from tests.conftest import Sample, write_shards, write_tar
from tests.support.orders import lane_of
from wdstrain.cli import main
from wdstrain.errors import PlanError, UsageError
from wdstrain.order.rng import uniform
from wdstrain.serve import Server
from wdstrain.shards.offsets import Offsets
from wdstrain.shards.resolve import open_index

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


@pytest.mark.parametrize("options", OPTIONS)
def test_ranks_deliver_and_read_what_was_planned(tmp_path: Path, options: dict[str, Any]) -> None:
    index = wt.index(write_shards(tmp_path, [7, 113, 1, 40, 61]))
    planned, loaders = plan_and_loaders(index, options)
    keys = []
    for rank, loader in zip(planned.ranks, loaders, strict=True):
        batches = list(loader.epoch(planned.epoch))
        assert len(batches) == rank.steps == planned.steps == len(loader)
        delivered = [key for batch in batches for key in batch["__key__"]]
        assert len(delivered) == rank.samples + rank.padding
        keys += delivered
        assert loader.report()["bytes"] >= rank.bytes  # it may read ahead into the next epoch
        loader.close()
    assert len(set(keys)) == 222 - planned.left_out
    assert planned.exactly_once


def held(index: wt.Index, loader: wt.Loader, planned: Any) -> np.ndarray[Any, Any]:
    """Return samples and bytes that a rank holds at each step. int64[2, steps]

    Each lane is read and delivered sample by sample, as far as a step needs it.
    """
    plan: Any = loader.plan(planned.epoch)
    sizes = (index.offsets.stop - index.offsets.start).tolist()
    sums = np.zeros((2, plan.steps), np.int64)
    for lane in range(plan.lanes_per_rank):
        entries = lane_of(plan, loader.rank, lane)
        due = {number: row.step for number, row in entries}  # padding repeats a sample
        order = list(due)
        waiting, read = list[int](), 0
        for step in range(plan.steps):
            furthest = max((order.index(i) for i, row in entries if row.step == step), default=-1)
            waiting += order[read : furthest + 1]
            read = max(read, furthest + 1)
            sums[:, step] += (len(waiting), sum(sizes[number] for number in waiting))
            waiting = [number for number in waiting if due[number] != step]
    return sums


@pytest.mark.parametrize("options", OPTIONS)
def test_planned_memory_equals_a_replay(tmp_path: Path, options: dict[str, Any]) -> None:
    index = wt.index(write_shards(tmp_path, [70, 113, 40]))
    planned, loaders = plan_and_loaders(index, options)
    for rank, loader in zip(planned.ranks, loaders, strict=True):
        samples, size = held(index, loader, planned)
        assert (rank.held_samples_most, rank.held_bytes_most) == (samples.max(), size.max())
        assert rank.held_samples_mean == pytest.approx(samples.mean())
        assert rank.held_bytes_mean == pytest.approx(size.mean())
        assert rank.first_batch_bytes == size[0]


def test_planned_requests_equal_the_requests_at_a_server(tmp_path: Path) -> None:
    """In file order and without a second epoch, each byte of a sample is requested once."""
    index = wt.index(write_shards(tmp_path, [70, 113, 40]))
    with Server(tmp_path, "127.0.0.1", 0) as server:
        url = f"{server.url}/index.json"
        options: dict[str, Any] = {"batch_size": 1, "shuffle": False}
        rank = wt.plan_epoch(url, **options).ranks[0]
        assert (rank.shards, rank.reads, rank.seeks, rank.requests) == (3, 3, 3, 3)
        assert rank.bytes == (index.offsets.stop - index.offsets.start).sum()
        before = server.requests
        loader = wt.Loader(url, **options)
        assert sum(1 for _ in loader.epoch(0)) == 223
        loader.close()
        assert rank.requests <= server.requests - before <= 2 * rank.requests + 3


def test_a_gap_is_a_seek_only_if_it_is_large(tmp_path: Path) -> None:
    large: list[Sample] = [(f"a{i}", {"bin": bytes(900_000 + i)}) for i in range(12)]
    folder = write_tar(tmp_path / "a.tar", large).parent
    wt.index(folder, columns=[])
    index = wt.open(folder)
    (rank,) = wt.plan_epoch(index, batch_size=1, shuffle=False).ranks
    assert (rank.reads, rank.seeks) == (1, 1)
    ids = np.array([0, 1, 4, 8, 9])
    (rank,) = wt.plan_epoch(index.take(ids), batch_size=1, shuffle=False).ranks
    assert (rank.reads, rank.seeks) == (3, 3)


# --- shuffle quality ---


def by_class(folder: Path, counts: list[int], classes: int) -> Path:
    """Write shards that are sorted by class."""
    total, number = sum(counts), 0
    for shard, count in enumerate(counts):
        samples: list[Sample] = []
        for _ in range(count):
            label = str(number * classes // total).encode()
            samples.append((f"s{number:06d}", {"cls": label, "txt": bytes(200)}))
            number += 1
        write_tar(folder / f"part-{shard:03d}.tar", samples)
    return folder


def measured(index: wt.Index, codes: np.ndarray[Any, Any], **options: Any) -> tuple[float, float]:
    """Return (neighbors, design effect) of a loader's batches, counted sample by sample."""
    size = options["batch_size"]
    loader = wt.Loader(index, **options)
    batches = [np.array([int(key[1:]) for key in batch["__key__"]]) for batch in loader.epoch(0)]
    loader.close()
    batch_of = np.full(len(index), -1)
    for number, ids in enumerate(batches):
        batch_of[ids] = number
    shares = []
    for i in range(1, 9):
        a, b = batch_of[:-i], batch_of[i:]
        near = (a >= 0) & (b >= 0)
        same_shard = np.diff(index.shard_of(np.arange(len(index))))  # one shard: all zero
        assert not same_shard.any()
        shares.append((a == b)[near].mean())
    counts = np.bincount(codes)
    total = counts.sum()
    alike = (counts * (counts - 1)).sum() / (total * (total - 1))
    pairs = [np.bincount(codes[ids]) for ids in batches]
    inside = sum((n * (n - 1)).sum() for n in pairs) / (len(pairs) * size * (size - 1))
    return 2 * sum(shares), 1 + (size - 1) * (inside - alike) / (1 - alike)


@pytest.mark.parametrize("buffer", [1, 40, 400])
def test_shuffle_quality_equals_that_of_delivered_batches(tmp_path: Path, buffer: int) -> None:
    folder = by_class(tmp_path, [800], 4)
    wt.index(folder, columns=["cls"])
    codes = np.repeat(np.arange(4), 200)
    options: dict[str, Any] = {"batch_size": 16, "shuffle_buffer": buffer}
    quality = wt.plan_epoch(folder, **options).quality
    near, effect = measured(wt.open(folder), codes, **options)
    assert quality.neighbors.nearest == pytest.approx(near)
    assert quality.neighbors.nearest_ideal == pytest.approx(16 * 15 / 799)
    assert quality.classes.design_effect == pytest.approx(effect)


def test_a_random_order_is_ideal_and_a_sorted_order_is_not(
    tmp_path: Path,
) -> None:
    draws = uniform(np.arange(3000), 1, "classes")[:, 0]
    samples: list[Sample] = [
        (f"s{i:06d}", {"cls": str(int(draw * 5)).encode()}) for i, draw in enumerate(draws)
    ]
    write_tar(tmp_path / "mixed" / "a.tar", samples)
    wt.index(tmp_path / "mixed", columns=["cls"])
    wide = wt.plan_epoch(tmp_path / "mixed", batch_size=50, shuffle_buffer=10**6).quality
    assert wide.neighbors is not None
    assert wide.classes is not None
    assert wide.neighbors.nearest < 1.5 * wide.neighbors.nearest_ideal
    assert abs(wide.classes.design_effect - 1) < 2 * wide.classes.chance
    assert wide.is_good
    folder = by_class(tmp_path / "sorted", [3000], 5)
    wt.index(folder, columns=["cls"])
    lined_up = wt.plan_epoch(folder, batch_size=50, shuffle=False).quality
    assert lined_up.classes is not None
    assert lined_up.classes.design_effect == pytest.approx(50)


def test_sorted_shards_get_helpful_advice_to_repack(
    tmp_path: Path,
) -> None:
    folder = by_class(tmp_path / "sorted", [500, 500, 500, 500], 4)
    before = wt.plan_epoch(folder, batch_size=20, shuffle_buffer=50)
    assert before.quality.classes is not None
    assert before.quality.classes.design_effect > 15
    assert not before.is_good
    text = " ".join(str(before).split())
    assert "Not well shuffled" in text
    assert "wdstrain convert tars URLS OUT" in text
    assert main(["convert", "tars", str(folder), str(tmp_path / "mixed"), "--json"]) == 0
    after = wt.plan_epoch(tmp_path / "mixed", batch_size=20, shuffle_buffer=50)
    assert after.quality.classes is not None
    assert after.quality.mixes_classes
    assert "packed in random order" in " ".join(str(after).split())
    assert "convert tars" not in str(after)
    assert after.smallest_good is not None
    buffer = after.smallest_good.buffer
    wide = wt.plan_epoch(tmp_path / "mixed", batch_size=20, shuffle_buffer=buffer)
    assert wide.is_good
    assert "Well shuffled" in str(wide)
    assert wide.quality.held_bytes == after.smallest_good.held_bytes


def test_classes_come_from_the_index_without_a_read(tmp_path: Path) -> None:
    folder = by_class(tmp_path, [600, 600], 3)
    wt.index(folder)
    with Server(folder, "127.0.0.1", 0) as server:
        bare = wt.plan_epoch(f"{server.url}/index.json", batch_size=20, shuffle_buffer=30)
    assert (bare.is_remote, bare.labels_read, bare.quality.classes) == (True, 0, None)
    assert "wdstrain index DIR --columns cls" in " ".join(str(bare).split())
    read = wt.plan_epoch(folder, batch_size=20, shuffle_buffer=30)
    assert read.labels_read == 1200
    wt.index(folder, columns=["cls"])
    with Server(folder, "127.0.0.1", 0) as server:
        preview = wt.plan_epoch(f"{server.url}/index.json", batch_size=20, shuffle_buffer=30)
        assert server.requests == 2  # index.json and index.arrow
    assert preview.labels_read == 0
    assert preview.quality.classes == read.quality.classes
    assert preview.quality.classes is not None
    assert preview.quality.classes.design_effect > 5
    assert "requests" in str(preview)
    chosen = wt.plan_epoch(folder, where="cls != 2", batch_size=20)
    assert chosen.samples == 800


def test_a_condition_limits_the_epoch(tmp_path: Path, capsys: Any) -> None:
    folder = by_class(tmp_path, [300, 300], 3)
    wt.index(folder, columns=["cls"])
    assert main(["plan", str(folder), "--where", "cls == 1", "--batch-size", "10", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["samples"] == 200


# --- command line ---


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


def test_with_many_ranks_the_extremes_are_shown(folder: Path) -> None:
    preview = wt.plan_epoch(folder, world_size=20, batch_size=3)
    rows = [
        line.split()[0]
        for line in str(preview).splitlines()
        if line.split()[:1] in (["least"], ["most"], ["all"], ["0"], ["19"])
    ]
    assert rows == ["least", "most"]
    few = wt.plan_epoch(folder, world_size=3, batch_size=3)
    assert [
        line.split()[0] for line in str(few).splitlines() if line.strip()[:2] in ("0 ", "1 ", "2 ")
    ] == [
        "0",
        "1",
        "2",
    ]


def test_json_contains_the_complete_preview(folder: Path, capsys: Any) -> None:
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
    document = json.loads(capsys.readouterr().out)
    assert (
        document["epoch"],
        document["steps"],
        document["left_out"],
        document["exactly_once"],
    ) == (
        3,
        42,
        12,
        True,
    )
    assert [rank["samples"] for rank in document["ranks"]] == [294, 294]
    assert document["labels_read"] == 600
    assert document["verdict"]
    assert {mix["buffer"] for mix in document["sizes"]} >= {document["shuffle_buffer"], 64}


def test_the_html_page_is_one_file_with_figures(folder: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "plan.html"
    assert main(["plan", str(folder), "-o", str(out)]) == 0
    assert str(out) in capsys.readouterr().err
    text = out.read_text()
    assert text.count("<svg") == 2
    assert "http" not in text
    preview = wt.plan_epoch(folder)
    assert preview._repr_html_().count("<svg") == 2
    assert preview.as_dict()["verdict"] in unescape(preview._repr_html_())
    for size in ("64", "256"):  # axis labels are sample counts, not exponents
        assert f">{size}<" in text


def test_the_help_of_plan_has_an_example(capsys: Any) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["plan", "--help"])
    assert stopped.value.code == 0
    assert "example: wdstrain plan" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--batch-size", "700"], "600 samples cannot give 1 rank(s) one batch of 700"),
        (["--world-size", "4", "--lanes", "6"], "6 lanes cannot be shared by 4 ranks"),
        (["--label", "colour"], "there is no label 'colour'.\nhint: Use one of: cls."),
        (["--epoch", "-1"], "--epoch -1: must be an integer >= 0."),
        (["--shuffle-buffer", "0"], "--shuffle-buffer 0: must be an integer >= 1"),
        (["-o", "plan.png"], "plan.png: the file must end in .html."),
    ],
)
def test_impossible_options_are_a_usage_error(
    folder: Path, capsys: Any, words: list[str], sentence: str
) -> None:
    assert main(["plan", str(folder), *words]) == 2
    printed = capsys.readouterr()
    assert sentence in printed.err
    lines = printed.err.splitlines()
    assert [line.split(":")[0] for line in lines] == ["error", "hint"][: len(lines)]
    assert printed.out == ""


def test_impossible_sizes_raise_the_errors_of_a_loader(folder: Path) -> None:
    with pytest.raises(PlanError, match="Use a world size that divides lanes"):
        wt.plan_epoch(folder, lanes=3, world_size=2)
    index = open_index(folder)
    with pytest.raises(UsageError, match="has the kind number"):
        wt.plan_epoch(replace(index, labels=(wt.Label("angle", "number", "txt"),)), label="angle")
    labels = tuple(wt.Label(name, "class", "json", name) for name in ("a", "b"))
    without_fields = Offsets.of_arrays((), index.offsets.rows.columns[:3])
    several = wt.plan_epoch(replace(index, labels=labels, offsets=without_fields))
    assert "several labels. Choose one (label): a, b" in several.why_no_classes
