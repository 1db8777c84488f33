"""Splits of a source are kept or refused, or a message names their new splits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import wdstrain as wt
from tests.conftest import picture
from tests.support.tables import write_table
from wdstrain.cli.main import main

SPLITS = ("train", "test", "val")
PER_SPLIT = 6
COUNT = PER_SPLIT * len(SPLITS)
FORMS = ("csv", "jsonl", "parquet")


def write_source(folder: Path, layout: str) -> Path:
    """Write <folder>/<split>/.../<n>.png with other images in each split. layout: flat or classes."""
    for number in range(COUNT):
        split = SPLITS[number // PER_SPLIT]
        below = folder / split if layout == "flat" else folder / split / "ab"[number % 2]
        below.mkdir(parents=True, exist_ok=True)
        (below / f"{number:02d}.png").write_bytes(picture(number, size=(4, 4)))
    return folder


def rows_of(split: str) -> dict[str, list[Any]]:
    start = SPLITS.index(split) * PER_SPLIT
    numbers = range(start, start + PER_SPLIT)
    images = [picture(n, size=(4, 4)) for n in numbers]
    files = [f"in/{split}/{n:02d}.png" for n in numbers]
    return {"id": list(numbers), "file": files, "image": images}


def write_tables(folder: Path, form: str, *, folders: bool) -> list[str]:
    """Write a table for each split, named after it or in a folder named after it."""
    if form != "parquet":
        write_source(folder / "in", "flat")
    paths = []
    for split in SPLITS:
        columns = rows_of(split)
        del columns["file" if form == "parquet" else "image"]
        name = folder / "t" / split / "part" if folders else folder / split
        paths.append(str(write_table(name, form, **columns)))
    return [str(folder / "t")] if folders else paths


def convert(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> tuple[int, str, list[str]]:
    """Return the exit status, the output without paths, and the splits of the set."""
    out = tmp_path / "out"
    status = main(["convert", *words])
    text = re.sub(rf"{re.escape(str(tmp_path))}\S*", "", "".join(capsys.readouterr()))
    return status, text, sorted(wt.open(out).splits) if status == 0 else []


def table_words(tmp_path: Path, paths: list[str], form: str) -> list[str]:
    words = ["table", *paths, str(tmp_path / "out")]
    return [*words, "--image", "image" if form == "parquet" else "file", "--root", str(tmp_path)]


# --- found ---


@pytest.mark.parametrize(
    "mode", ["flat", "flat with masks", "flat below classes", "classes", "classes with masks"]
)
def test_folders_named_after_splits_become_splits_or_the_user_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], mode: str
) -> None:
    layout = "flat" if mode in ("flat", "flat with masks") else "classes"
    words = ["folder", str(write_source(tmp_path / "in", layout)), str(tmp_path / "out")]
    words += ["--flat"] if mode.startswith("flat") else []
    if mode.endswith("masks"):
        words += ["--masks", str(write_source(tmp_path / "other", layout))]
    _, text, splits = convert(words, tmp_path, capsys)
    assert splits in ([], sorted(SPLITS)) or re.search(r"\b(val|test)\b", text)


@pytest.mark.parametrize(
    ("form", "folders"), [(form, folders) for form in FORMS for folders in (False, True)]
)
def test_tables_named_after_splits_become_splits_or_the_user_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str, folders: bool
) -> None:
    paths = write_tables(tmp_path, form, folders=folders)
    _, text, splits = convert(table_words(tmp_path, paths, form), tmp_path, capsys)
    assert splits in ([], sorted(SPLITS)) or re.search(r"\b(val|test)\b", text)


# --- asked to be drawn again ---

DRAWN = ["--split", "train=0.5,val=0.5", "--seed", "1"]


def is_told(status: int, text: str) -> bool:
    """Return whether the splits were refused, or a line says that given ones are drawn again."""
    return status != 0 or bool(re.search(r"\b(test|again|anew|mixed)\b", text))


@pytest.mark.parametrize(
    ("form", "by"), [(form, by) for form in FORMS for by in ("file names", "a column")]
)
def test_splits_of_tables_are_not_drawn_again_silently(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str, by: str
) -> None:
    paths = write_tables(tmp_path, form, folders=False)
    words = [*table_words(tmp_path, paths, form), *DRAWN]
    if by == "a column":
        columns = {
            name: [cell for split in SPLITS for cell in rows_of(split)[name]]
            for name in ("id", "image" if form == "parquet" else "file")
        }
        columns["part"] = [split for split in SPLITS for _ in range(PER_SPLIT)]
        table = str(write_table(tmp_path / "all", form, **columns))
        words = [*table_words(tmp_path, [table], form), *DRAWN, "--split-by", "part"]
    status, text, _ = convert(words, tmp_path, capsys)
    assert is_told(status, text)


@pytest.mark.parametrize("mode", ["classes", "flat"])
def test_splits_of_folders_are_not_drawn_again_silently(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], mode: str
) -> None:
    source = str(write_source(tmp_path / "in", mode))
    words = ["folder", source, str(tmp_path / "out"), *DRAWN]
    words += ["--flat"] if mode == "flat" else []
    status, text, _ = convert(words, tmp_path, capsys)
    assert is_told(status, text)


@pytest.mark.parametrize("source", ["set", "shards of a set", "shards without an index"])
def test_splits_of_shards_are_not_drawn_again_silently(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], source: str
) -> None:
    wt.convert_folder(write_source(tmp_path / "in", "classes"), tmp_path / "set")
    addresses = [str(tmp_path / "set")]
    if source == "shards of a set":
        addresses = [str(tmp_path / "set" / "*.tar")]
    elif source == "shards without an index":
        for name in ("index.json", "index.arrow"):
            (tmp_path / "set" / name).unlink()
    status, text, _ = convert(["tars", *addresses, str(tmp_path / "out"), *DRAWN], tmp_path, capsys)
    assert is_told(status, text)
