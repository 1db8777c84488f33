"""Several ranks under torch.distributed: equal steps, disjoint samples, found without being told."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import write_shards

RANK = """
import json, os, sys
import torch, torch.distributed as dist
import wdstrain as wt

rank, world, folder, meeting = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
loader = wt.Loader(folder, {"label": wt.label()}, batch_size=4, num_workers=int(sys.argv[5]), tail=sys.argv[6])
epochs = []
for _ in range(3):
    found = []
    for batch in loader:
        total = batch["label"].sum()
        dist.all_reduce(total)  # hangs for ever if a rank has fewer steps
        valid = batch["__valid__"].tolist() if "__valid__" in batch else [True] * 4
        found.append([key for key, ok in zip(batch["__key__"], valid) if ok])
    assert len(found) == len(loader)
    epochs.append(found)
print(json.dumps(epochs))
loader.close()
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("world", "counts", "workers", "tail"),
    [
        (2, [7, 13, 1], 0, "drop"),
        (2, [7, 13, 1], 3, "pad"),
        pytest.param(4, [3, 0, 30, 8], 1, "drop", marks=pytest.mark.slow),
        pytest.param(4, [5], 0, "pad", marks=pytest.mark.slow),
    ],
)
def test_every_rank_takes_the_same_number_of_steps_and_its_own_samples(
    tmp_path: Path, world: int, counts: list[int], workers: int, tail: str
) -> None:
    folder = write_shards(tmp_path / "shards", counts)
    words = [str(world), str(folder), str(tmp_path / "meeting"), str(workers), tail]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), *words], stdout=subprocess.PIPE, text=True
        )
        for rank in range(world)
    ]
    epochs = [json.loads(rank.communicate(timeout=60)[0]) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * world
    for epoch in range(3):
        steps = {len(rank[epoch]) for rank in epochs}
        assert len(steps) == 1
        keys = [key for rank in epochs for batch in rank[epoch] for key in batch]
        assert (
            len(keys)
            == len(set(keys))
            == (sum(counts) if tail == "pad" else steps.pop() * 4 * world)
        )
    assert sum(counts) < 20 or epochs[0][0] != epochs[0][1]
