"""Errors of the command line keep the names that the user gave, and name flags of the shell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import wdstrain as wt
from tests.conftest import write_shards
from wdstrain.cli import main


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A table whose columns have the names of options."""
    monkeypatch.chdir(tmp_path)
    Path("rows.csv").write_text("picture,group_by,split\nabsent.png,x,y\n")
    return "rows.csv"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("split=val/rows.csv", ["convert", "table", "split=val/rows.csv", "out", "--image", "p"]),
        ("limit=3.csv", ["convert", "table", "limit=3.csv", "out", "--image", "p"]),
        ("max_shard_size", ["convert", "table", "rows.csv", "out", "--image", "max_shard_size"]),
        (
            "'group_bys'",
            ["convert", "table", "rows.csv", "out", "--image", "picture", "--label", "group_bys"],
        ),
        (
            "'on_error'",
            [
                "convert",
                "table",
                "rows.csv",
                "out",
                "--image",
                "picture",
                "--label",
                "split,on_error",
            ],
        ),
        ("v1. Use this.csv", ["convert", "table", "v1. Use this.csv", "out", "--image", "p"]),
        ("seed=1. Run 2", ["info", "seed=1. Run 2"]),
        ("where=a b", ["verify", "where=a b"]),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_names_of_the_command_line_stay_as_they_are_in_errors(
    table: str, capsys: Any, name: str, words: list[str], as_json: bool
) -> None:
    for path in ("split=val/rows.csv", "limit=3.csv", "v1. Use this.csv"):
        Path(path).parent.mkdir(exist_ok=True)
        Path(path).write_bytes(Path(table).read_bytes())
    assert main([*words, *(["--json"] if as_json else [])]) == 2
    printed = capsys.readouterr()
    assert name in printed.err.splitlines()[0]
    if as_json:
        assert name in json.loads(printed.out)["error"]


@pytest.mark.parametrize(
    ("name", "image"),
    [
        ("group_by", "file"),  # a column in the list of columns
        ("limit=4.png", "picture"),  # a cell of the table
        ("b. Add c.png", "picture"),
        ("seed/a.png", "picture"),
    ],
)
def test_names_of_the_data_stay_as_they_are_in_errors(
    table: str, capsys: Any, name: str, image: str
) -> None:
    Path(table).write_text(f"picture,group_by\n{name},x\n")
    assert main(["convert", "table", table, "out", "--image", image]) != 0
    *_, problem, hint = capsys.readouterr().err.splitlines()
    assert name in (problem if image == "picture" else hint)


def test_a_name_with_a_line_break_cannot_pass_for_a_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["info", "set\nhint: delete it"]) == 2
    error, hint = capsys.readouterr().err.splitlines()
    assert error.startswith("error: set hint: delete it")
    assert hint.startswith("hint: Check")


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        (["--class", "b", "URL"], ["s000001"]),
        (["--class", "b", "--class", "c", "URL"], ["s000001", "s000002"]),
        (["URL", "--class", "b,c"], ["s000001", "s000002"]),
    ],
)
def test_options_with_several_values_may_stand_before_the_address(
    tmp_path: Path, capsys: Any, words: list[str], keys: list[str]
) -> None:
    shards = str(write_shards(tmp_path / "set", [3]))
    wt.index(shards, label="cls", classes=["a", "b", "c"])
    assert main(["show", *(shards if word == "URL" else word for word in words), "--json"]) == 0
    assert [sample["key"] for sample in json.loads(capsys.readouterr().out)["samples"]] == keys


def test_a_repeated_list_adds_to_the_list(tmp_path: Path) -> None:
    shards = str(write_shards(tmp_path / "set", [3]))
    assert main(["index", shards, "--columns", "cls", "--columns", "txt", "-q"]) == 0
    assert [column.name for column in wt.open(shards).columns] == ["cls", "txt"]


def test_addresses_after_val_are_named_in_the_error_for_a_missing_address(
    tmp_path: Path, capsys: Any
) -> None:
    shards = [str(write_shards(tmp_path / name, [3])) for name in ("val", "train")]
    assert main(["train", "--val", *shards, "--out", str(tmp_path / "run")]) == 2
    assert "--val takes each word" in capsys.readouterr().err
