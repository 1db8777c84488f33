"""Splits of a source are kept; if they are drawn again, that is refused or a line says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import wdstrain as wt
from tests.conftest import picture
from tests.support.tables import write_pictures, write_table
from wdstrain.cli.main import main

SPLITS = ("test", "train", "val")
DRAWN = ["--split", "train=0.5,val=0.5", "--seed", "1"]


def write_source(folder: Path, flat: bool) -> str:
    """Write six images in <folder>/<split>, or in <folder>/<split>/<class>."""
    for place, split in enumerate(SPLITS):
        for number in range(6):
            below = folder / split if flat else folder / split / "ab"[number % 2]
            write_pictures(below, [6 * place + number])
    return str(folder)


@pytest.fixture
def convert(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Convert; return the splits of the set, the output, and the exit status."""

    def run(*words: str) -> tuple[list[str], str, int]:
        status = main(["convert", *words])
        splits = sorted(wt.open(tmp_path / "out").splits) if status == 0 else []
        return splits, "".join(capsys.readouterr()), status

    return run


@pytest.mark.parametrize("mode", ["flat", "flat below classes", "classes"])
@pytest.mark.parametrize("masks", [False, True])
def test_folders_named_after_splits_become_splits_and_are_not_drawn_again(
    tmp_path: Path, convert: Any, mode: str, masks: bool
) -> None:
    source = write_source(tmp_path / "in", mode == "flat")
    words = ["folder", source, str(tmp_path / "out"), *(["--flat"] if mode != "classes" else [])]
    words += ["--masks", write_source(tmp_path / "masks", mode == "flat")] if masks else []
    _, printed, status = convert(*words, *DRAWN)
    assert status == 2
    assert "the source has its own splits already" in printed
    assert convert(*words)[0] == list(SPLITS)


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])
@pytest.mark.parametrize("by", ["file names", "folder names", "a column"])
def test_tables_named_after_splits_become_splits_and_a_line_says_that_they_are_drawn_again(
    tmp_path: Path, convert: Any, form: str, by: str
) -> None:
    paths = []
    whole: dict[str, list[Any]] = {"id": [], "file": [], "image": [], "part": []}
    write_source(tmp_path / "in", flat=True)
    for place, split in enumerate(SPLITS):
        numbers = range(6 * place, 6 * place + 6)
        columns: dict[str, list[Any]] = {"id": list(numbers), "part": [split] * 6}
        columns["file"] = [f"in/{split}/{n}.png" for n in numbers]
        columns["image"] = [picture(n) for n in numbers]
        del columns["file" if form == "parquet" else "image"]
        for name, cells in columns.items():
            whole[name] += cells
        path = tmp_path / "t" / split / "part" if by == "folder names" else tmp_path / split
        paths.append(str(write_table(path, form, **columns)))
    if by == "a column":
        table = {name: cells for name, cells in whole.items() if cells}
        paths = [str(write_table(tmp_path / "all", form, **table))]
    elif by == "folder names":
        paths = [str(tmp_path / "t")]
    words = ["table", *paths, str(tmp_path / "out"), "--root", str(tmp_path)]
    words += ["--image", "image" if form == "parquet" else "file"]
    words += ["--split-by", "part"] if by == "a column" else []
    assert convert(*words)[0] == list(SPLITS)
    again = "has its own splits already" if by == "a column" else "(1), drawn again"
    assert again in convert(*words, *DRAWN, "--overwrite")[1]


@pytest.mark.parametrize("source", ["set", "shards of a set", "shards without an index"])
def test_splits_of_shards_are_kept_and_a_line_says_that_they_are_drawn_again(
    tmp_path: Path, convert: Any, source: str
) -> None:
    folder = tmp_path / "set"
    wt.convert_folder(write_source(tmp_path / "in", flat=False), folder)
    if source == "shards without an index":
        for name in ("index.json", "index.arrow"):
            (folder / name).unlink()
    address = f"{folder}/*.tar" if source == "shards of a set" else str(folder)
    words = ["tars", address, str(tmp_path / "out")]
    assert convert(*words)[0] == list(SPLITS)
    splits, printed, _ = convert(*words, *DRAWN, "--overwrite")
    assert splits == ["train", "val"]
    assert "splits: those of the source" in printed
    assert "are drawn again" in printed
