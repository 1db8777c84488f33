"""Arguments that users of other loaders write first are refused with the option that does it."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

import wdstrain as wt
from tests.conftest import write_shards


@pytest.mark.parametrize(
    ("argument", "hint"),
    [
        ("pin_memory", "Not needed: wt.to_device"),
        ("pin_memory_device", "Not needed: wt.to_device"),
        ("drop_last", 'Use tail="drop" or tail="keep"'),
        ("persistent_workers", "Not needed"),
        ("prefetch_factor", "Not needed"),
        ("in_order", "Not needed"),
        ("sampler", "where=, weights= or balance="),
        ("batch_sampler", "batch_size="),
        ("num_replicas", "world_size="),
        ("generator", "seed="),
        ("worker_init_fn", "rng"),
        ("timeout", "patience="),
        ("dataset", "urls"),
        ("split", "train-*.tar"),
        ("device", "wt.to_device"),
        ("workers", "Did you mean num_workers?"),
        ("transforms", "Did you mean transform?"),
    ],
)
def test_an_argument_of_other_loaders_is_refused_with_the_next_step(
    shards: Path, argument: str, hint: str
) -> None:
    with pytest.raises(TypeError, match=rf"^Loader\(\) .*'{argument}'\. ") as refused:
        wt.Loader(str(shards), **{argument: None})  # type: ignore[arg-type]
    assert hint in str(refused.value)
    with pytest.raises(TypeError, match=f"'{argument}'"):
        wt.mix({"a": str(shards)}, **{argument: None})


@pytest.mark.parametrize("batch_size", [None, 2])
def test_a_loader_in_a_data_loader_of_torch_is_refused_with_the_next_step(
    tmp_path: Path, batch_size: int | None
) -> None:
    with closing(wt.Loader(str(write_shards(tmp_path, [4])), batch_size=2)) as loader:
        wrapped: Any = DataLoader(loader, batch_size=batch_size)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="Use it in place of a DataLoader"):
            next(iter(wrapped))
