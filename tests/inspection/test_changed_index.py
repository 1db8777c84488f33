"""Indexing again reads what changed in shards, and keeps what was declared."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

import wdstrain as wt
from tests.conftest import picture, write_tar
from tests.support.tables import read_samples
from wdstrain.cli import main

CLASSES = ["ant", "bee"]


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    samples = [
        {"__key__": f"k{n:02d}", "png": picture(n), "cls": n % 2, "json": {"age": n}}
        for n in range(12)
    ]
    wt.pack(samples, tmp_path / "set", classes=CLASSES, split={"train": 0.5, "val": 0.5})
    return tmp_path / "set"


@pytest.mark.parametrize("text", [b"x", b"x" * 600])
def test_indexing_again_reads_labels_and_columns_of_a_replaced_shard(
    tmp_path: Path, text: bytes
) -> None:
    def write(name: str, kind: int, text: bytes) -> Path:
        fields = {"txt": text, "cls": b"%d" % kind, "json": b'{"age": %d}' % kind}
        return write_tar(tmp_path / f"{name}.tar", [(f"{name}{n}", fields) for n in range(6)])

    for name in "ab":
        os.utime(write(name, 0, b"x"), (10**9, 10**9))
    wt.index(tmp_path, label="cls", classes=CLASSES, columns=["json.age"])
    write("b", 1, text)
    refreshed = wt.index(tmp_path).table.to_pydict()
    assert refreshed["label"] == ["ant"] * 6 + ["bee"] * 6
    assert refreshed["age"] == [0] * 6 + [1] * 6


def test_index_refreshes_the_labels_of_a_packed_shard_that_was_replaced(packed: Path) -> None:
    (shard,) = packed.glob("train-*.tar")
    keys = wt.open(packed).where("split == 'train'").keys(np.arange(6))
    before = read_samples(packed)
    others = {b"0": b"1", b"1": b"0"}
    write_tar(shard, [(key, {**before[key], "cls": others[before[key]["cls"]]}) for key in keys])
    assert main(["index", str(packed), "-q"]) == 0
    refreshed = wt.open(packed).where("split == 'train'").table.to_pydict()
    expected = {key: CLASSES[1 - int(before[key]["cls"])] for key in keys}
    assert dict(zip(refreshed["key"], refreshed["label"], strict=True)) == expected


def test_indexing_again_after_the_table_is_lost_keeps_declared_columns(packed: Path) -> None:
    wt.index(packed, columns=["json.age"])
    before = [column.name for column in wt.open(packed).columns]
    os.remove(packed / "index.arrow")
    assert [column.name for column in wt.index(packed).columns] == before
