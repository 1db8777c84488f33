"""Arguments that users of other loaders write first are refused with the option that does it."""

from __future__ import annotations

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
        ("drop_last", 'Use tail="drop" or tail="keep"'),
        ("persistent_workers", "Not needed"),
        ("sampler", "where=, weights= or balance="),
        ("generator", "seed="),
        ("worker_init_fn", "rng"),
        ("timeout", "patience="),
        ("dataset", "urls"),
        ("workers", "Did you mean num_workers?"),
    ],
)
def test_an_argument_of_other_loaders_is_refused_with_the_next_step(
    shards: Path, argument: str, hint: str
) -> None:
    with pytest.raises(TypeError, match=rf"^Loader\(\) .*'{argument}'\. ") as refused:
        wt.Loader(str(shards), **{argument: None})
    assert hint in str(refused.value)
    with pytest.raises(TypeError, match=f"'{argument}'"):
        wt.mix({"a": str(shards)}, **{argument: None})


@pytest.mark.parametrize("batch_size", [None, 2])
def test_a_loader_in_a_data_loader_of_torch_is_refused_with_the_next_step(
    tmp_path: Path, batch_size: int | None
) -> None:
    with wt.Loader(str(write_shards(tmp_path, [4])), batch_size=2) as loader:
        wrapped: Any = DataLoader(loader, batch_size=batch_size)
        with pytest.raises(TypeError, match="Use it in place of a DataLoader"):
            next(iter(wrapped))


@pytest.mark.parametrize("way", ["folder", "index", "mixture"])
def test_one_split_of_several_is_read_by_its_name(tmp_path: Path, way: str) -> None:
    samples = ({"__key__": f"k{n:02d}", "cls": b"%d" % n} for n in range(40))
    wt.pack(samples, tmp_path, split={"train": 0.75, "val": 0.25})
    expected = {}
    for name in ("train", "val"):
        index = wt.open(f"{tmp_path}/{name}-*.tar")
        expected[name] = sorted(index[n]["__key__"] for n in range(len(index)))
    assert sum(map(len, expected.values())) == 40

    def keys(split: str) -> list[str]:
        options: dict[str, Any] = {"split": split, "batch_size": 1}
        if way == "mixture":
            loader = wt.mix({"a": tmp_path}, **options)
        else:
            loader = wt.Loader(tmp_path if way == "folder" else wt.open(tmp_path), **options)
        with loader:
            return sorted(key for batch in loader for key in batch["__key__"])

    assert {name: keys(name) for name in expected} == expected
    refused = "split='test': the splits of these shards are train, val"
    with pytest.raises(wt.UsageError, match=refused):
        keys("test")
