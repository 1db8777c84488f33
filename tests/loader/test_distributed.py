"""Ranks of a process group or of the environment: shared samples, and loaders that are refused."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import wdstrain as wt
from tests.support.children import Program

RANK = """
import json, sys
import torch.distributed as dist
import wdstrain as wt

rank, meeting, shards = int(sys.argv[1]), *sys.argv[2:]
options = {"fields": {"label": wt.label()}, "batch_size": 4}
older = {  # than the process group
    "Loader": wt.Loader(shards, **options),
    "mix": wt.mix({"a": shards}, weights={"a": 1.0}, **options),
    "set_epoch": wt.Loader(shards, **options),
}
older["set_epoch"].set_epoch(1)
dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
older |= {tail: wt.Loader(shards, tail=tail, num_workers=2, **options) for tail in ("drop", "pad")}
for name, loader in older.items():
    keys = []
    try:
        for batch in loader:
            dist.all_reduce(batch["label"].sum())  # hangs forever if a rank has fewer steps
            valid = batch["__valid__"].tolist() if "__valid__" in batch else [True] * 4
            keys += [key for key, is_valid in zip(batch["__key__"], valid) if is_valid]
        older[name] = keys
    except wt.UsageError as error:
        older[name] = str(error)
    loader.close()
print(json.dumps(older))
dist.destroy_process_group()
"""


def test_ranks_of_a_process_group_share_the_samples_and_older_loaders_are_refused(
    shards: Path, tmp_path: Path
) -> None:
    programs = [Program(RANK, rank, tmp_path / "meeting", shards) for rank in range(2)]
    ranks = [program.end() for program in programs]
    assert [rank.status for rank in ranks] == [0] * 2, ranks
    printed = [json.loads(rank.out) for rank in ranks]
    for tail, samples in (("drop", 16), ("pad", 21)):
        keys = [key for rank in printed for key in rank[tail]]
        assert len(keys) == len(set(keys)) == samples
    for name in ("Loader", "mix", "set_epoch"):
        assert all("process group" in rank[name] for rank in printed), printed


def test_a_rank_of_the_job_is_compared_with_the_process_group_and_a_given_one_is_not(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pickled copy remembers where its rank came from."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    of_job = wt.Loader(shards, batch_size=2)
    given = wt.Loader(shards, batch_size=2, rank=1, world_size=2)
    group = torch.distributed
    group.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        for loader in (of_job, pickle.loads(pickle.dumps(of_job))):
            with pytest.raises(wt.UsageError, match="rank 1 of 2, and the process .* says rank 0"):
                next(iter(loader))
        for loader in (given, pickle.loads(pickle.dumps(given))):
            assert len(list(loader)) == 5
        assert len(list(wt.Loader(shards, batch_size=2))) == 10
    finally:
        group.destroy_process_group()
    assert len(list(of_job)) == 5


RANK_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK")
STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "3", "SLURM_PROCID": "1"}
# Environment, and the rank that it says, or a word of the refusal
RANKS: list[tuple[dict[str, str], tuple[int, int] | str]] = [
    ({"RANK": "1", "WORLD_SIZE": "2"}, (1, 2)),
    ({"WORLD_SIZE": "1"}, (0, 1)),
    ({"WORLD_SIZE": "2", "LOCAL_RANK": "1", "NODE_RANK": "0"}, "rank"),  # of Lightning
    ({"WORLD_SIZE": "2"}, "rank"),
    ({"RANK": "1"}, "rank"),
    ({"RANK": "5", "WORLD_SIZE": "2"}, "rank"),
    ({**STEP, "SLURM_NODELIST": "node[3-5]"}, (1, 3)),
]


@pytest.mark.parametrize(("environment", "rank"), RANKS, ids=str)
def test_a_rank_of_a_job_is_known_or_refused(
    shards: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], rank: Any
) -> None:
    for name in (*RANK_NAMES, *(n for n in os.environ if n.startswith("SLURM"))):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if isinstance(rank, str):
        with pytest.raises(wt.UsageError, match=f"(?i){rank}"):
            wt.Loader(shards, {"label": wt.label()}, batch_size=4)
    else:
        with wt.Loader(shards, {"label": wt.label()}, batch_size=4) as loader:
            assert (loader.rank, loader.world_size) == rank
