"""Labels mean what the source says: kinds, class numbers, and values, or the user is asked."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import wdstrain as wt
from tests.support.tables import FORMS, Tables, attempt, labelled, write_images
from wdstrain.cli.main import main

COUNT = 30


def convert_rows(source: str, values: list[Any], tables: Tables, label: str = "y") -> wt.Index:
    """Convert a source in which every row has a value named y.

    source: a form of tables, "arrays", "hdf5", or "index": the value is in the json of packed
    samples, and `wt.index` declares it.
    """
    folder, out = tables.folder, tables.folder / "rows"
    if source in FORMS:
        return tables(labelled(values), source, label=label)
    arrays = {"x": np.zeros((len(values), 2), np.float32), "y": np.array(values)}
    if source == "arrays":
        return wt.convert_arrays(arrays, out, label=label)
    if source == "hdf5":
        with h5py.File(folder / "rows.h5", "w") as file:
            for name, array in arrays.items():
                file[name] = array
        return wt.convert_hdf5(folder / "rows.h5", out, {"x": "x", "y": "y"}, label=label)
    wt.pack([{"txt": "x", "json": {"y": value}} for value in values], out)
    return wt.index(out, label=f"json.{label}")


FULLWIDTH = {ord("0") + digit: 0xFF10 + digit for digit in range(10)}

QUANTITIES: dict[str, Callable[[int], str]] = {
    "decimal comma": lambda n: f"{n},{n * 7 % 10}",
    "thousands": lambda n: f"{1000 + n * 13:,}.5",
    "blanks between thousands": lambda n: f"{n + 1} {n % 10}00",
    "percent": lambda n: f"{n}%",
    "currency": lambda n: f"${n}.50",
    "unit": lambda n: f"{n}.5 kg",
    "fullwidth digits": lambda n: f"{n}.5".translate(FULLWIDTH),
    "minus sign": lambda n: f"\u2212{n}.5",
}


@pytest.mark.parametrize(
    ("source", "notation"),
    [
        *(("csv", notation) for notation in QUANTITIES),
        *((source, "decimal comma") for source in ("jsonl", "parquet", "frame", "index")),
        ("parquet", "duration"),
        ("arrays", "decimal comma"),
    ],
)
def test_texts_that_are_numbers_to_people_are_numbers_or_a_question(
    tables: Tables, source: str, notation: str
) -> None:
    durations = [datetime.timedelta(seconds=1.5 * n) for n in range(COUNT)]
    cells = durations if notation == "duration" else list(map(QUANTITIES[notation], range(COUNT)))
    result = attempt(lambda: convert_rows(source, cells, tables))
    assert "y'" in result if isinstance(result, str) else result.labels[0].kind == "number"


SPECIAL_NAMES = ("Nan", "-inf", "None", "NA")


@pytest.mark.parametrize("label", ["y", "y:class"])
@pytest.mark.parametrize(
    ("form", "name"),
    [
        *(("csv", name) for name in SPECIAL_NAMES),
        *((form, name) for form in FORMS[1:] for name in ("Nan", "None")),
    ],
)
def test_among_texts_a_word_for_a_special_number_is_a_class(
    tables: Tables, form: str, name: str, label: str
) -> None:
    names = sorted([name, "Roti", "Dosa"])
    index = convert_rows(form, names * 4, tables, label)
    assert (len(index), sorted(index.labels[0].classes)) == (12, names)
    index = tables(labelled([f"{name}|a", "b", name]), label="y:multi")
    assert set(index.labels[0].classes) == {name, "a", "b"}


@pytest.mark.parametrize("name", ["Nan", "Inf", "None"])
def test_words_for_special_numbers_are_names_of_splits_groups_and_class_folders(
    tables: Tables, tmp_path: Path, name: str
) -> None:
    table, split = labelled([name, "b", "c"] * 4), {"left": 0.5, "right": 0.5}
    assert set(tables(table, split_by="y").splits) == {name, "b", "c"}
    grouped = tables(table, group_by="y", split=split)
    sides = [side.table["y"].to_pylist() for side in grouped.split(split, by="y").values()]
    assert {side.count(name) for side in sides} == {0, 4}
    for folder in (name, "b"):
        write_images(tmp_path / "in" / folder, 2)
    assert set(wt.convert_folder(tmp_path / "in", tmp_path / "o").labels[0].classes) == {name, "b"}


@pytest.mark.parametrize("separator", ["|", ", ", ",", ";", "/", " / "])
def test_cells_with_several_known_classes_are_lists_only_if_declared(
    tables: Tables, separator: str
) -> None:
    """A note names the kind where the parts of a cell come again."""
    table = labelled([f"cat{separator}dog", "dog", f"cat{separator}bird", "bird"] * 4)
    for form in FORMS:
        assert "multi" in str(tables(table, form, label="y").info["source"]["decided"])
    assert tables(table, label="y:multi").labels[0].classes == ("bird", "cat", "dog")
    index = tables(labelled(["Paris, France", "Rome, Italy", "Bern, Switzerland"] * 5), label="y")
    assert "multi" not in str(index.info["source"]["decided"])


@pytest.mark.parametrize("source", [*FORMS, "arrays", "hdf5"])
@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([True, False, True], "flag"),
        ([0, 5, 2], "class"),
        ([-3, 2, 5], "number"),
        ([0.5, 1.0, 2.0], "number"),
        ([0, 5, 2000], ""),
        ([0.0, 1.0, 0.0], ""),
    ],
)
def test_one_rule_decides_the_kind_in_arrays_and_tables(
    tables: Tables, source: str, values: list[Any], kind: str
) -> None:
    result = attempt(lambda: convert_rows(source, values * 4, tables))
    if kind:
        assert not isinstance(result, str)
        assert result.labels[0].kind == kind
    else:
        assert "label='y:class' or y:number" in str(result)


@pytest.mark.parametrize(
    "names",
    [
        [str(n) for n in range(12)],
        [str(n) for n in range(1, 13)],
        ["5", "10"],
        [f"{n:02d}" for n in range(12)],
    ],
)
@pytest.mark.parametrize("splits", [(".",), ("train", "val")])
def test_class_folders_named_by_numbers_keep_them_or_a_line_says_what_they_became(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], names: list[str], splits: tuple[str, ...]
) -> None:
    for split in splits:
        for name in names:
            write_images(tmp_path / "in" / split / name, 1)
    assert main(["convert", "folder", str(tmp_path / "in"), str(tmp_path / "out")]) == 0
    lines = "".join(capsys.readouterr()).lower()
    classes = wt.open(tmp_path / "out").labels[0].classes
    kept = all(classes.index(name) == int(name) for name in names)
    assert kept or any(text in lines for text in ("class number", "sorted", "--classes"))


@pytest.mark.parametrize("kind", [str, int])
def test_declared_labels_keep_the_class_numbers_that_their_values_are(
    tables: Tables, kind: Callable[[int], Any]
) -> None:
    result = attempt(lambda: convert_rows("index", list(map(kind, range(12))), tables))
    assert isinstance(result, str) or result.labels[0].classes == tuple(map(str, range(12)))


def check_values(index: wt.Index, name: str, rows: int) -> None:
    """Check that the index, conditions and batches agree on the class of every sample."""
    label = next(label for label in index.labels if label.name == name)
    column = index.table[name].to_pylist()
    assert None not in column
    found = {value: len(index.where(f"{name} == {value!r}")) for value in set(column)}
    assert found == {value: column.count(value) for value in column}
    assert set(map(str, found)) <= set(label.classes)
    assert sum(found.values()) == rows
    fields = {"y": wt.label(label.stored_as)}
    with wt.Loader(index, fields, batch_size=rows, shuffle=False) as loader:
        (batch,) = loader.epoch(0, until=1)
    delivered = [label.classes[number] for number in batch["y"].tolist()]
    assert delivered == [str(value) for value in column]


BOOLEANS = [n % 3 == 0 for n in range(12)]
_DATES = [datetime.date(2024, 1, 1), datetime.date(2024, 2, 1)]
_TIMES = [datetime.datetime(2024, 1, 1), datetime.datetime(2024, 2, 1, 3)]


@pytest.mark.parametrize(
    ("form", "cells", "kind"),
    [
        *((form, BOOLEANS, "") for form in FORMS),
        ("parquet", BOOLEANS, ":class"),
        ("jsonl", ["true", "FALSE", "True"], ""),
        ("jsonl", [True, "cat"], ":class"),
        ("jsonl", [0.0, 1.0], ":class"),
        ("jsonl", [0, 100_000, 200_000], ":class"),
        ("csv", ["007", "010"], ""),
        ("parquet", _DATES, ""),
        ("parquet", _TIMES, ""),
    ],
)
def test_a_second_label_has_the_same_values_in_index_conditions_and_batches(
    tables: Tables, form: str, cells: list[Any], kind: str
) -> None:
    values = [cells[n % len(cells)] for n in range(12)]
    table = {**labelled(values), "a": ["x", "y"] * 6}
    index = tables(table, form, label=["a", f"y{kind}"])
    check_values(index, "y", 12)
    check_values(index, "a", 12)


@pytest.mark.parametrize("source", ["arrays", "hdf5", "index"])
@pytest.mark.parametrize(
    ("values", "kind"),
    [([True, False, False], ""), ([0.0, 1.0, 2.0], ":class"), ([0, 1, 2], "")],
)
def test_a_label_of_arrays_or_json_has_the_same_values_in_index_conditions_and_batches(
    tables: Tables, source: str, values: list[Any], kind: str
) -> None:
    check_values(convert_rows(source, values * 4, tables, f"y{kind}"), "y", 12)
