"""Ranks under torch.distributed: equal steps and disjoint samples, without rank arguments."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch

import wdstrain as wt
from tests.conftest import write_shards
from tests.support.children import Program

RANK = """
import json, sys
import torch.distributed as dist
import wdstrain as wt

rank, world, meeting = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
shards, fields = json.loads(sys.argv[4])[0][0], {"label": wt.label()}
older = {  # than the process group
    "Loader": wt.Loader(shards, fields, batch_size=4),
    "mix": wt.mix({"a": shards}, weights={"a": 1.0}, fields=fields, batch_size=4),
    "set_epoch": wt.Loader(shards, fields, batch_size=4),
}
older["set_epoch"].set_epoch(1)
dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
for folder, workers, tail in json.loads(sys.argv[4]):
    loader = wt.Loader(folder, fields, batch_size=4, num_workers=workers, tail=tail)
    epochs = []
    for _ in range(3):
        delivered = []
        for batch in loader:
            total = batch["label"].sum()
            dist.all_reduce(total)  # hangs forever if a rank has fewer steps
            valid = batch["__valid__"].tolist() if "__valid__" in batch else [True] * 4
            delivered.append([key for key, ok in zip(batch["__key__"], valid) if ok])
        assert len(delivered) == len(loader)
        epochs.append(delivered)
    print(json.dumps(epochs))
    loader.close()
for name, loader in older.items():
    try:
        older[name] = [key for batch in loader for key in batch["__key__"]]
    except wt.WdstrainError as error:
        older[name] = str(error)
    loader.close()
print(json.dumps(older))
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("world", "cases"),
    [
        (2, [([7, 13, 1], 0, "drop"), ([7, 13, 1], 3, "pad")]),
        pytest.param(4, [([3, 0, 30, 8], 1, "drop"), ([5], 0, "pad")], marks=pytest.mark.slow),
    ],
)
def test_every_rank_takes_the_same_number_of_steps_and_its_own_samples(
    tmp_path: Path, world: int, cases: list[tuple[list[int], int, str]]
) -> None:
    """Also with a loader that is older than the process group."""
    runs = [
        (str(write_shards(tmp_path / f"shards{number}", counts)), workers, tail)
        for number, (counts, workers, tail) in enumerate(cases)
    ]
    words = [world, tmp_path / "meeting", json.dumps(runs)]
    programs = [Program(RANK, rank, *words) for rank in range(world)]
    ranks = [program.end() for program in programs]
    assert [rank.status for rank in ranks] == [0] * world, ranks
    printed = [rank.out.splitlines() for rank in ranks]
    for number, (counts, _, tail) in enumerate(cases):
        epochs = [json.loads(lines[number]) for lines in printed]
        for epoch in range(3):
            steps = {len(rank[epoch]) for rank in epochs}
            assert len(steps) == 1
            keys = [key for rank in epochs for batch in rank[epoch] for key in batch]
            samples = sum(counts) if tail == "pad" else steps.pop() * 4 * world
            assert len(keys) == len(set(keys)) == samples
        assert sum(counts) < 20 or epochs[0][0] != epochs[0][1]
    older = [json.loads(lines[-1]) for lines in printed]
    for name in older[0]:
        given = [rank[name] for rank in older]
        if isinstance(given[0], str):  # refused
            assert "process group" in given[0] or "rank" in given[0]
            continue
        delivered = [key for rank in given for key in rank]
        assert len({len(rank) for rank in given}) == 1, name
        assert len(set(delivered)) == len(delivered) > sum(cases[0][0]) - 4 * world, name


def test_a_rank_of_the_job_is_compared_with_the_process_group_and_a_given_one_is_not(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pickled copy remembers where its rank came from."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    of_job = wt.Loader(shards, batch_size=2)
    given = wt.Loader(shards, batch_size=2, rank=1, world_size=2)
    assert len(list(of_job)) == len(list(given)) == 5
    group = torch.distributed
    group.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        for loader in (of_job, pickle.loads(pickle.dumps(of_job))):
            with pytest.raises(
                wt.UsageError, match="rank 1 of 2, and the process group says rank 0"
            ):
                next(iter(loader))
        for loader in (given, pickle.loads(pickle.dumps(given))):
            assert len(list(loader)) == 5
        assert len(list(wt.Loader(shards, batch_size=2))) == 10
    finally:
        group.destroy_process_group()
    assert len(list(of_job)) == 5
