"""What a run saves has the same keys from one version to the next, so that it can be resumed.

`expected/checkpoint_keys.json` has the states of loaders as they are, and the path, type and shape
of each value of checkpoints and of the other files of a run.
"""

from __future__ import annotations

import json
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

import wdstrain as wt
from tests.conftest import write_tar
from tests.golden.expected import check, check_names, key_paths, png

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LOADERS: dict[str, dict[str, Any]] = {
    "state of a loader": dict(batch_size=4, shuffle_buffer=6, tail="keep"),
    "state of a loader with ranks": dict(batch_size=2, lanes=4, rank=1, world_size=2, tail="pad"),
    "state of a loader with weights": dict(batch_size=4, weights=[0.5, 1.5] * 12, seed=3),
    "state of a loader with balance": dict(batch_size=4, balance="cls", shuffle=False),
    "state of a loader with a selection": dict(batch_size=4, where="cls == 1"),
}

# One run has the options that add the least to a checkpoint, the other has those that add the most.
RUNS: dict[str, dict[str, Any]] = {
    "small run": dict(label="label"),
    "large run": dict(
        **dict(label="label,angle", model="small", ema=0.9, optimizer="sgd", momentum=0.9),
        **dict(balance="label", augment="rrc+flip", on_error="replace", monitor="label/accuracy"),
    ),
}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards with columns, whose bytes are the same everywhere."""
    folder = tmp_path_factory.mktemp("state") / "shards"
    for shard, count in enumerate((9, 15)):
        samples = [(f"{shard}-{n}", {"cls": b"%d" % (n % 2)}) for n in range(count)]
        write_tar(folder / f"{shard}.tar", samples)
    wt.index(str(folder), columns=["cls"])
    return folder


@pytest.mark.parametrize("name", LOADERS)
def test_the_state_of_a_loader_is_the_same(shards: Path, name: str) -> None:
    with closing(wt.Loader(str(shards), {}, **LOADERS[name])) as loader:
        batches = loader.epoch(1, until=2)
        next(batches)
        check("checkpoint_keys", name, loader.state_dict())


def test_the_state_of_a_mixture_is_the_same(shards: Path) -> None:
    sources = {"a": str(shards / "0.tar"), "b": str(shards / "1.tar")}
    with closing(wt.mix(sources, {}, weights={"a": 1, "b": 2}, batch_size=3)) as loader:
        next(loader.epoch(1, until=2))
        check("checkpoint_keys", "state of a mixture", loader.state_dict())


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the runs, by name."""
    folder = tmp_path_factory.mktemp("runs")
    samples = [
        {"__key__": f"k{n:02d}", "png": png(n, 12, 12), "cls": n % 2, "json": {"angle": n / 4}}
        for n in range(24)
    ]
    labels = [wt.Label("angle", "number", "json", "angle")]
    options = {"split": {"train": 0.7, "val": 0.3}, "stratify": "label", "labels": labels}
    wt.pack(samples, folder / "set", classes=["no", "yes"], **options)
    for name, options in RUNS.items():
        shared = {"epochs": 2, "batch_size": 4, "image_size": 8, "device": "cpu"}
        wt.train(folder / "set", folder / name, **shared, **options)
    return folder


def own_keys(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return a checkpoint without what torch's optimizer adds, which differs between versions.

    The states of all parameters are a list.
    """
    state, groups = checkpoint["optimizer"]["state"], checkpoint["optimizer"]["param_groups"]
    kind = torch.optim.SGD if "momentum" in groups[0] else torch.optim.AdamW
    names = kind([torch.zeros(1)], lr=0.1).state_dict()["param_groups"][0].keys()
    groups = [
        {name: group[name] for name in group if name in ("params", "lr") or name not in names}
        for group in groups
    ]
    return {**checkpoint, "optimizer": {"state": list(state.values()), "param_groups": groups}}


@pytest.mark.parametrize("name", RUNS)
def test_a_checkpoint_has_the_same_keys(runs: Path, name: str) -> None:
    path = runs / name / "checkpoints" / "last.pt"
    checkpoint = torch.load(path, weights_only=True)
    check("checkpoint_keys", f"format of the checkpoint of a {name}", checkpoint["format"])
    check("checkpoint_keys", f"checkpoint of a {name}", key_paths(own_keys(checkpoint)))


@pytest.mark.parametrize("name", RUNS)
def test_the_files_of_a_run_have_the_same_keys(runs: Path, name: str) -> None:
    folder = runs / name
    files = sorted(path.name for path in folder.iterdir())
    check("checkpoint_keys", f"files of a {name}", files)
    options = tomllib.loads((folder / "config.toml").read_text())
    check("checkpoint_keys", f"config.toml of a {name}", key_paths(options))
    for file in ("metrics.jsonl", "steps.jsonl"):
        lines = [json.loads(line) for line in (folder / file).read_text().splitlines()]
        check("checkpoint_keys", f"{file} of a {name}", key_paths(lines))


def test_the_file_has_no_other_entries() -> None:
    parts: tuple[str, ...] = ("checkpoint", "config.toml", "files", "format of the checkpoint")
    parts += ("metrics.jsonl", "steps.jsonl")
    names = [f"{part} of a {name}" for name in RUNS for part in parts]
    check_names("checkpoint_keys", [*LOADERS, "state of a mixture", *names])
