"""Declared columns and labels of foreign shards: `wdstrain index --columns --label --classes`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import wdstrain as wt
from tests.conftest import picture
from tests.support.foreign_tars import write_members
from wdstrain.cli.main import main

KINDS = ["Shirts", "Other", "Pants"]


def write(folder: Path, samples: list[dict[str, bytes]]) -> Path:
    for first in range(0, len(samples), 10):
        members = [
            (f"k{number:03d}.{field}", data)
            for number, sample in enumerate(samples[first : first + 10], first)
            for field, data in sample.items()
        ]
        write_members(folder / f"s-{first // 10:03d}.tar", members)
    return folder


def document(n: int) -> bytes:
    entries = {"kind": KINDS[n % 3], "price": n / 2, "kids": n % 2 == 0, "a.b": n, "minus": n - 5}
    entries["code"] = 700 * n
    entries |= {"tags": ["a"] * (n % 2) + ["b"], "mixed": [n, {"x": 1}][n % 2]}
    return json.dumps(entries).encode()


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """30 samples with a class number, a text, and JSON; every fifth has no JSON."""
    samples = [
        {"png": picture(n), "cls": str(n % 3).encode(), "txt": KINDS[n % 3].encode()}
        | ({"json": document(n)} if n % 5 else {})
        for n in range(30)
    ]
    return write(tmp_path / "shards", samples)


TRAIN = ["--epochs", "1", "--batch-size", "10", "--image-size", "16", "--device", "cpu"]


def failure(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    capsys.readouterr()
    assert main(list(map(str, words))) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return error


def test_fields_and_entries_become_typed_columns(shards: Path, capsys: Any) -> None:
    names = "cls,txt,json.kind,json.price,json.kids,json.tags,json.a.b"
    assert main(["index", str(shards), "--columns", names]) == 0
    printed = capsys.readouterr().out
    assert "6 samples have none" in printed
    table = wt.open(shards).table
    types = {name: str(table.schema.field(name).type) for name in ("cls", "txt", "price", "kids")}
    assert types == {"cls": "int64", "txt": "string", "price": "double", "kids": "bool"}
    for n, row in enumerate(table.to_pylist()):
        assert (row["cls"], row["txt"]) == (n % 3, KINDS[n % 3])
        has = n % 5
        assert row["kind"] == (KINDS[n % 3] if has else None)
        assert row["price"] == (n / 2 if has else None)
        assert row["tags"] == (["a"] * (n % 2) + ["b"] if has else None)
        assert row["a.b"] == (n if has else None)
    assert len(wt.open(shards).where("price > 10 and 'a' in tags")) == sum(
        n / 2 > 10 and n % 2 and n % 5 > 0 for n in range(30)
    )


def test_declared_columns_are_kept_and_read_again_when_indexing_again(shards: Path) -> None:
    wt.index(shards, columns=["cls"])
    wt.index(shards, columns=["txt"])
    index = wt.index(shards)
    assert [column.name for column in index.columns] == ["cls", "txt"]
    data = bytearray((shards / "s-000.tar").read_bytes())
    offset = next(offset for name, offset, _ in index.members(1) if name == "cls")
    data[offset : offset + 1] = b"7"
    (shards / "s-000.tar").write_bytes(data)
    assert wt.index(shards).table["cls"].to_pylist()[:3] == [0, 7, 2]
    index = wt.index(shards, columns=["cls", "cls"])
    assert [column.name for column in index.columns] == ["txt", "cls"]


def labels(index: wt.Index, field: Any) -> list[int]:
    loader = wt.Loader(index, {"label": field}, batch_size=10, shuffle=False)
    actual = [number for batch in loader.epoch(0, until=1) for number in batch["label"].tolist()]
    loader.close()
    return actual


def test_training_names_labels_of_bare_shards(shards: Path, tmp_path: Path, capsys: Any) -> None:
    val = write(tmp_path / "val", [{"png": picture(n), "txt": b"Pants"} for n in range(10)])
    words = ["train", shards, "--val", val, "--out", tmp_path / "run", *TRAIN, "--label", "txt"]
    assert main(list(map(str, words))) == 0
    assert not (shards / "index.json").exists()
    declared = wt.index(val, label="txt", classes=KINDS)
    outcome = wt.evaluate(tmp_path / "run/checkpoints/last.pt", declared)
    assert outcome[0].heads[0].classes == tuple(sorted(KINDS))
    words[-1] = "json.colour"
    assert "no sample has a value in json.colour" in failure(capsys, *words, "--overwrite")
    assert "--label cls" in failure(capsys, *words[:-2], "--overwrite")


def test_classes_are_named_in_the_order_of_their_numbers(shards: Path, tmp_path: Path) -> None:
    names = tmp_path / "names.txt"
    names.write_text("Shirts\nOther\n\nPants\n")
    assert main(["index", str(shards), "--label", "cls", "--classes", str(names)]) == 0
    index = wt.open(shards)
    assert index.labels == (wt.Label("label", "class", "cls", None, tuple(KINDS)),)
    assert index.table["label"].to_pylist() == [KINDS[n % 3] for n in range(30)]
    assert len(index.where("label == 'Pants'")) == 10
    assert main(["index", str(shards), "--label", "cls"]) == 0
    assert wt.open(shards).labels[0].classes == ("0", "1", "2")


def test_kinds_of_labels_follow_their_values(shards: Path) -> None:
    index = wt.index(shards, label="json.price")
    assert index.labels == (wt.Label("price", "number", "json", "price", ()),)
    index = wt.index(shards, label="json.tags")
    assert index.labels[1] == wt.Label("tags", "multi", "json", "tags", ("a", "b"))
    index = wt.index(shards, label="cls:number")
    assert {label.name: label.kind for label in index.labels} == {
        "price": "number",
        "tags": "multi",
        "label": "number",
    }
    assert labels(index, wt.number("cls")) == [n % 3 for n in range(30)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--columns", "colour"], "there is no field 'colour'"),
        (["--columns", "json"], "json.ENTRY"),
        (["--columns", "json.colour"], "no sample has a value in json.colour"),
        (["--columns", "json.mixed"], "no column can hold"),
        (["--label", "png"], "no sample has a value in png"),
        (["--label", "json.minus:class"], "add :number"),
        (["--label", "json.code"], "json.code:class or json.code:number"),
        (["--label", "cls", "--classes", "a,b"], "is '2', which does not fit the label (2 classes"),
        (["--label", "txt:number"], "does not fit the label (a number"),
        (["--label", "json.tags", "--classes", "a,c"], "does not fit the label (any of 2 classes"),
        (["--label", "cls", "--classes", "a,b,a"], "must name each class once"),
        (["--classes", "a,b"], "Give both"),
        (["--label", "txt", "--classes", "missing.txt"], "there is no such file"),
        (["--label", "cls:number", "--classes", "a,b"], "numbers have no classes"),
    ],
)
def test_wrong_declarations_are_refused(
    shards: Path, words: list[str], message: str, capsys: Any
) -> None:
    assert message in failure(capsys, "index", shards, *words)
    assert not (shards / "index.json").exists()


def test_names_and_numbers_in_one_field_need_classes(tmp_path: Path, capsys: Any) -> None:
    values = ["cat", "1", "dog"]
    shards = write(tmp_path / "odd", [{"cls": value.encode()} for value in values])
    assert "names and numbers" in failure(capsys, "index", shards, "--label", "cls")
    index = wt.index(shards, label="cls", classes=["dog", "cat"])
    assert index.table["label"].to_pylist() == ["cat", "cat", "dog"]
