"""`wt.WebDataset` over ranks and worker processes: every sample once per epoch."""

from __future__ import annotations

import copy
import gc
import pickle
import random
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import webdataset as wds

import wdstrain as wt
from tests.support.foreign_tars import keys, read_wds, write_set

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded"),
]


def unchanged(batch: Any) -> Any:
    return batch


def key_of(sample: dict[str, Any]) -> str:
    return str(sample["__key__"])


def is_train(name: str) -> bool:
    return name.endswith(".cls")


@pytest.fixture
def urls(tmp_path: Path) -> Iterator[str]:
    """Three shards of 7, 13 and 1 samples."""
    yield write_set(tmp_path / "set", [7, 13, 1])
    gc.collect()


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Return a function that sets the environment of a rank, as torchrun does."""

    def become(rank: int, world_size: int) -> None:
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(world_size))

    return become


def read(dataset: Any, workers: int, **options: Any) -> list[list[Any]]:
    """Return three passes of a DataLoader."""
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=None, num_workers=workers, collate_fn=unchanged, **options
    )
    passes = [list(loader) for _ in range(3)]
    del loader
    gc.collect()
    return passes


def all_keys(urls: str) -> list[str]:
    return keys(read_wds(urls, nodesplitter=None))


# workers, ranks, and ending of the shards; there may be more workers than shards or samples
DIVIDED = [(4, 1, ".tar"), (1, 1, ".tgz"), (0, 3, ".tgz"), (3, 2, ".tar")]


@pytest.mark.parametrize(("workers", "ranks", "ending"), DIVIDED)
def test_ranks_and_workers_share_each_epoch(
    tmp_path: Path, workers: int, ranks: int, ending: str, rank: Callable[[int, int], None]
) -> None:
    """With a drawn set, splitter, and kind of workers. Whole tars are divided by count."""
    draw = random.Random(f"{workers} {ranks} {ending}")
    for number, counts in enumerate(([7, 13, 1], draw.choice([[2], [1, 1], [5] * 4]))):
        urls = write_set(tmp_path / str(number), counts, ending)
        options: dict[str, Any] = {"shardshuffle": True, "empty_check": False}
        if draw.random() < 0.5:
            options["nodesplitter"] = wds.split_by_node
        lasting = {"persistent_workers": workers > 0 and draw.random() < 0.5}
        epochs: list[list[str]] = [[], [], []]
        for own in range(ranks):
            rank(own, ranks)
            dataset = wt.WebDataset(urls, **options)
            parts = read(dataset.map(key_of), workers, **lasting)
            for epoch, part in zip(epochs, parts, strict=True):
                epoch += part
                assert (
                    ending != ".tar" or sum(counts) // ranks <= len(part) <= sum(counts) / ranks + 1
                )
        assert [sorted(epoch) for epoch in epochs] == [all_keys(urls)] * 3


@pytest.mark.slow
@pytest.mark.parametrize("ending", [".tar", ".tgz"])
def test_workers_may_be_spawned(tmp_path: Path, ending: str) -> None:
    urls = write_set(tmp_path / "set", [7, 13, 1], ending)
    options: dict[str, Any] = {"select_files": is_train, "handler": wds.ignore_and_continue}
    dataset = wt.WebDataset(urls, shardshuffle=5, **options).shuffle(5).map(key_of)
    dataset = dataset.with_length(21, silent=True)
    epochs = read(dataset, 2, multiprocessing_context="spawn", persistent_workers=True)
    assert [sorted(epoch) for epoch in epochs] == [all_keys(urls)] * 3


def test_each_worker_or_rank_may_have_an_epoch(urls: str, rank: Callable[[int, int], None]) -> None:
    """As in webdataset: a set length holds for each worker, and without a splitter all read all."""
    lengths = read(wt.WebDataset(urls, shardshuffle=True).map(key_of).with_epoch(11), 2)
    assert [len(epoch) for epoch in lengths] == [22] * 3
    (first, *_) = read(wt.WebDataset(urls, workersplitter=None).map(key_of), 2)
    assert sorted(first) == sorted(all_keys(urls) * 2)
    rank(1, 2)
    assert keys(wt.WebDataset(urls, nodesplitter=None)) == all_keys(urls)


def test_workers_are_read_from_the_environment(urls: str, monkeypatch: pytest.MonkeyPatch) -> None:
    delivered: list[str] = []
    monkeypatch.setenv("NUM_WORKERS", "4")
    for worker in range(4):
        monkeypatch.setenv("WORKER", str(worker))
        delivered += keys(wt.WebDataset(urls))
    assert sorted(delivered) == keys(read_wds(urls, workersplitter=None))


@pytest.mark.parametrize("ending", [".tar", ".tgz"])
def test_copies_count_epochs_independently(tmp_path: Path, ending: str) -> None:
    urls = write_set(tmp_path / "set", [2] * 10, ending)
    dataset = wt.WebDataset(urls, shardshuffle=True).map(key_of)
    first = list(dataset)
    copies = [pickle.loads(pickle.dumps(dataset)), copy.deepcopy(dataset)]
    second = list(dataset)
    assert second != first
    assert [list(other) for other in copies] == [second] * 2
    shared = dataset.batched(2)  # a fluid method shares the stages before it
    assert [key for batch in shared for key in batch] not in (first, second)


def every_second(shards: Any) -> Any:
    return islice(shards, 1, None, 2)


def test_user_defined_splitters_get_the_shards(
    urls: str, caplog: pytest.LogCaptureFixture, rank: Callable[[int, int], None]
) -> None:
    rank(0, 2)
    for name in ("nodesplitter", "workersplitter"):
        options = {"nodesplitter": None, name: every_second}
        assert list(wt.WebDataset(urls, **options)) == read_wds(urls, **options)
        assert f"because {name} splits shards" in caplog.text


def test_resampled_ranks_draw_independently(urls: str, rank: Callable[[int, int], None]) -> None:
    drawn = []
    for number in range(2):
        rank(number, 2)
        drawn.append(keys(wt.WebDataset(urls, resampled=True).with_epoch(400)))
    assert drawn[0] != drawn[1]
    assert all(set(part) == set(all_keys(urls)) for part in drawn)
