"""Labels mean what the source says: kinds, class numbers, and values, or the user is asked."""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import wdstrain as wt
from tests.conftest import picture
from tests.support.tables import FORMS, attempt, write_images, write_table
from wdstrain.cli.main import main
from wdstrain.errors import UsageError

COUNT = 30


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("images"), COUNT)


def convert_cells(
    tmp_path: Path, images: Path, form: str, cells: list[Any], label: str | list[str] = "y"
) -> wt.Index:
    """Convert a table with an image and a cell of column y in each row."""
    table = write_table(
        tmp_path / "t", form, file=[f"{n % COUNT}.png" for n in range(len(cells))], y=cells
    )
    return wt.convert_table(table, tmp_path / "out", image="file", label=label, root=images)


def convert_rows(tmp_path: Path, source: str, values: list[Any], label: str = "y") -> wt.Index:
    """Convert arrays, HDF5 or samples in which every row has a value named y.

    "index": the value is in the json of packed samples, and `wt.index` declares it.
    """
    arrays = {"x": np.zeros((len(values), 2), np.float32), "y": np.array(values)}
    if source == "arrays":
        return wt.convert_arrays(arrays, tmp_path / "out", label=label)
    if source == "hdf5":
        with h5py.File(tmp_path / "rows.h5", "w") as file:
            for name, array in arrays.items():
                file[name] = array
        return wt.convert_hdf5(
            tmp_path / "rows.h5", tmp_path / "out", {name: name for name in arrays}, label=label
        )
    wt.pack([{"txt": "x", "json": {"y": value}} for value in values], tmp_path / "out")
    return wt.index(tmp_path / "out", label=f"json.{label}")


def convert_source(tmp_path: Path, images: Path, source: str, cells: list[Any]) -> wt.Index:
    if source in FORMS:
        return convert_cells(tmp_path, images, source, cells)
    return convert_rows(tmp_path, source, cells)


# --- kinds ---


@pytest.mark.parametrize("source", [*FORMS, "arrays", "hdf5", "index"])
def test_few_whole_numbers_stored_as_floats_are_classes_or_a_question(
    tmp_path: Path, images: Path, source: str
) -> None:
    cells = [float(n % 3) for n in range(COUNT)]
    result = attempt(lambda: convert_source(tmp_path, images, source, cells))
    if isinstance(result, str):
        assert {"class", "number"} <= set(re.findall(r"[a-z]+", result))
    else:
        label = result.labels[0]
        assert (label.kind, label.classes) == ("class", ("0", "1", "2"))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("kind", "classes"), [("class", ("0", "1", "2")), ("number", ())])
def test_floats_with_a_declared_kind_are_of_that_kind(
    tmp_path: Path, images: Path, form: str, kind: str, classes: tuple[str, ...]
) -> None:
    cells = [float(n % 3) for n in range(COUNT)]
    label = convert_cells(tmp_path, images, form, cells, f"y:{kind}").labels[0]
    assert (label.kind, label.classes) == (kind, classes)


FULLWIDTH = str.maketrans(
    "0123456789", "\uff10\uff11\uff12\uff13\uff14\uff15\uff16\uff17\uff18\uff19"
)

QUANTITIES: dict[str, Callable[[int], str]] = {
    "decimal comma": lambda n: f"{n},{n * 7 % 10}",
    "thousands": lambda n: f"{1000 + n * 13:,}.5",
    "whole thousands": lambda n: f"{1000 + n * 13:,}",
    "blanks between thousands": lambda n: f"{n + 1} {n % 10}00",
    "apostrophes between thousands": lambda n: f"{n + 1}'{n % 10}00",
    "percent": lambda n: f"{n}%",
    "currency": lambda n: f"${n}.50",
    "currency behind": lambda n: f"{n},50 \u20ac",
    "unit": lambda n: f"{n}.5 kg",
    "fullwidth digits": lambda n: f"{n}.5".translate(FULLWIDTH),
    "minus sign": lambda n: f"\u2212{n}.5",
}


@pytest.mark.parametrize(
    ("source", "notation"),
    [
        *(("csv", notation) for notation in QUANTITIES),
        *((source, "decimal comma") for source in ("jsonl", "parquet", "frame")),
        ("index", "decimal comma"),
    ],
)
def test_texts_that_are_numbers_to_people_are_numbers_or_a_question(
    tmp_path: Path, images: Path, source: str, notation: str
) -> None:
    cells = [QUANTITIES[notation](n) for n in range(COUNT)]
    result = attempt(lambda: convert_source(tmp_path, images, source, cells))
    assert "y'" in result if isinstance(result, str) else result.labels[0].kind == "number"


def test_quantities_in_arrays_of_texts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="label 'y'"):
        convert_rows(tmp_path, "arrays", [f"{n},5" for n in range(9)])


def test_durations_are_numbers_or_a_question(tmp_path: Path, images: Path) -> None:
    cells = [datetime.timedelta(seconds=1.5 * n) for n in range(COUNT)]
    result = attempt(lambda: convert_cells(tmp_path, images, "parquet", cells))
    assert "y'" in result if isinstance(result, str) else result.labels[0].kind == "number"


SPECIAL_NAMES = ("Nan", "NaN", "Inf", "-inf")
OTHER_NAMES = ("None", "null", "NA", "N/A")


@pytest.mark.parametrize("label", ["y", "y:class"])
@pytest.mark.parametrize(
    ("form", "name"),
    [
        *(("csv", name) for name in SPECIAL_NAMES + OTHER_NAMES),
        *((form, "Nan") for form in FORMS[1:]),
        *((form, "None") for form in FORMS[1:]),
    ],
)
def test_among_texts_a_word_for_a_special_number_is_a_class(
    tmp_path: Path, images: Path, form: str, name: str, label: str
) -> None:
    names = sorted([name, "Roti", "Dosa"])
    index = convert_cells(tmp_path, images, form, [names[n % 3] for n in range(12)], label)
    assert (len(index), sorted(index.labels[0].classes)) == (12, names)


@pytest.mark.parametrize("name", ["Nan", "No"])
@pytest.mark.parametrize(
    ("label", "cells", "options"),
    [
        ("y:multi", ["{}|a", "b", "{}"], {}),
        ("y:class", ["{}", "b", "a"], {"classes": ["b", "a", "{}"]}),
    ],
)
def test_a_declared_kind_takes_words_for_special_numbers(
    tmp_path: Path, images: Path, name: str, label: str, cells: list[str], options: dict[str, Any]
) -> None:
    table = write_table(
        tmp_path / "t", "csv", file=["0.png", "1.png", "2.png"], y=[c.format(name) for c in cells]
    )
    options = {key: [c.format(name) for c in names] for key, names in options.items()}
    index = wt.convert_table(
        table, tmp_path / "out", image="file", label=label, root=images, **options
    )
    assert len(index) == 3
    assert set(index.labels[0].classes) == {name, "a", "b"}


@pytest.mark.parametrize("name", [*SPECIAL_NAMES[:3], *OTHER_NAMES[:3]])
def test_words_for_special_numbers_are_names_of_splits_groups_and_class_folders(
    tmp_path: Path, images: Path, name: str
) -> None:
    table = write_table(
        tmp_path / "t", "csv", file=[f"{n}.png" for n in range(12)], y=[name, "b", "c"] * 4
    )
    options: dict[str, Any] = {"image": "file", "root": str(images)}
    assert set(wt.convert_table(table, tmp_path / "by", split_by="y", **options).splits) == {
        name,
        "b",
        "c",
    }
    split = {"left": 0.5, "right": 0.5}
    grouped = wt.convert_table(table, tmp_path / "grouped", group_by="y", split=split, **options)
    assert {len(side.where(f"y == '{name}'")) for side in grouped.split(split, by="y").values()
            if len(side) and name in side.table["y"].to_pylist()} == {4}  # fmt: skip
    write_images(tmp_path / "in" / name, 2)
    write_images(tmp_path / "in" / "b", 2)
    assert set(wt.convert_folder(tmp_path / "in", tmp_path / "o").labels[0].classes) == {name, "b"}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("separator", ["|", ", ", ",", ";", "/", " / "])
def test_cells_with_several_known_classes_get_a_note_that_names_the_kind(
    tmp_path: Path, images: Path, capsys: pytest.CaptureFixture[str], separator: str, form: str
) -> None:
    cells = [f"cat{separator}dog", "dog", f"cat{separator}bird", "bird"] * 4
    if form == "frame":
        notes = str(convert_cells(tmp_path, images, form, cells).info["source"]["decided"])
    else:
        table = write_table(tmp_path / "t", form, file=[f"{n}.png" for n in range(16)], y=cells)
        words = ["convert", "table", str(table), str(tmp_path / "out"), "--image", "file"]
        main([*words, "--label", "y", "--root", str(images)])
        notes = "".join(capsys.readouterr())
    assert "multi" in notes


@pytest.mark.parametrize("separator", ["|", ", ", ";", "/"])
def test_a_declared_list_is_separated_where_its_parts_come_again(
    tmp_path: Path, images: Path, separator: str
) -> None:
    cells = [f"cat{separator}dog", "dog", f"cat{separator}bird"]
    index = convert_cells(tmp_path, images, "csv", cells, "y:multi")
    assert index.labels[0].classes == ("bird", "cat", "dog")


def test_a_separator_between_parts_that_never_come_again_gets_no_note(
    tmp_path: Path, images: Path
) -> None:
    cells = ["Paris, France", "Rome, Italy", "Bern, Switzerland"] * 5
    index = convert_cells(tmp_path, images, "csv", cells)
    assert "multi" not in str(index.info["source"]["decided"])
    assert len(index.labels[0].classes) == 3


@pytest.mark.parametrize("source", ["arrays", "hdf5", "frame", "parquet"])
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
    tmp_path: Path, images: Path, source: str, values: list[Any], kind: str
) -> None:
    result = attempt(lambda: convert_source(tmp_path, images, source, values * 4))
    if kind:
        assert not isinstance(result, str)
        assert result.labels[0].kind == kind
    else:
        assert "label='y:class' or y:number" in str(result)


# --- class numbers ---


def numbered_folders(folder: Path, names: list[str]) -> Path:
    for number, name in enumerate(names):
        (folder / name).mkdir(parents=True)
        (folder / name / "a.png").write_bytes(picture(number, size=(4, 4)))
    return folder


@pytest.mark.parametrize(
    "names",
    [
        pytest.param([str(n) for n in range(12)], id="from 0"),
        pytest.param([str(n) for n in range(1, 13)], id="from 1"),
        pytest.param(["5", "10"], id="with gaps"),
        pytest.param(["0", "3"], id="two of many"),
        pytest.param([str(n) for n in range(10)], id="one digit"),
        pytest.param([f"{n:02d}" for n in range(12)], id="padded"),
    ],
)
@pytest.mark.parametrize("splits", [(".",), ("train", "val")])
def test_class_folders_named_by_numbers_keep_them_or_a_line_says_what_they_became(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], names: list[str], splits: tuple[str, ...]
) -> None:
    for split in splits:
        numbered_folders(tmp_path / "in" / split, names)
    assert main(["convert", "folder", str(tmp_path / "in"), str(tmp_path / "out")]) == 0
    lines = "".join(capsys.readouterr()).lower()
    classes = wt.open(tmp_path / "out").labels[0].classes
    kept = all(classes.index(name) == int(name) for name in names)
    assert kept or any(text in lines for text in ("class number", "sorted", "--classes"))


@pytest.mark.parametrize(
    "values",
    [
        pytest.param([str(n) for n in range(12)], id="texts"),
        pytest.param(list(range(12)), id="integers"),
    ],
)
def test_declared_labels_keep_the_class_numbers_that_their_values_are(
    tmp_path: Path, values: list[Any]
) -> None:
    result = attempt(lambda: convert_rows(tmp_path, "index", values))
    assert isinstance(result, str) or result.labels[0].classes == tuple(map(str, range(12)))


# --- values of a label in the index, in the samples and in batches ---


def check_values(index: wt.Index, name: str, rows: int) -> None:
    """Check that the index, conditions and batches agree on the class of every sample."""
    label = next(label for label in index.labels if label.name == name)
    column = index.table[name].to_pylist()
    assert None not in column
    found = {value: len(index.where(f"{name} == {value!r}")) for value in set(column)}
    assert found == {value: column.count(value) for value in column}
    assert set(map(str, found)) <= set(label.classes)
    assert sum(found.values()) == rows
    field = wt.label(label.stored_as)
    loader = wt.Loader(index, {"y": field}, batch_size=rows, tail="keep", shuffle=False)
    try:
        delivered = [label.classes[number] for batch in loader for number in batch["y"].tolist()]
    finally:
        loader.close()
    assert delivered == [str(value) for value in column]


BOOLEANS = [n % 3 == 0 for n in range(12)]


@pytest.mark.parametrize(
    ("form", "cells", "kind"),
    [
        *((form, BOOLEANS, "") for form in FORMS),
        ("parquet", BOOLEANS, ":class"),
        ("jsonl", ["true", "FALSE", "True"], ""),
        ("jsonl", [True, "cat"], ":class"),
        ("jsonl", [0, 1, 2], ""),
        ("jsonl", [0.5, 1.5], ":class"),
        ("jsonl", [0.0, 1.0], ":class"),
        ("jsonl", [7, "cat"], ":class"),
        ("jsonl", [0, 100_000, 200_000], ":class"),
        ("csv", ["007", "010"], ""),
        ("csv", [" a", "a", "b"], ""),
        ("parquet", [datetime.date(2024, 1, 1), datetime.date(2024, 2, 1)], ""),
        ("parquet", [datetime.datetime(2024, 1, 1), datetime.datetime(2024, 2, 1, 3)], ""),
    ],
)
def test_a_second_label_has_the_same_values_in_index_conditions_and_batches(
    tmp_path: Path, images: Path, form: str, cells: list[Any], kind: str
) -> None:
    values = [cells[n % len(cells)] for n in range(12)]
    table = write_table(
        tmp_path / "t", form, file=[f"{n}.png" for n in range(12)], a=["x", "y"] * 6, y=values
    )
    index = wt.convert_table(
        table, tmp_path / "out", image="file", label=["a", f"y{kind}"], root=images
    )
    check_values(index, "y", 12)
    check_values(index, "a", 12)


@pytest.mark.parametrize("label", ["y", ["a", "y"]])
@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_true_and_false_are_flags_everywhere(
    tmp_path: Path, images: Path, form: str, label: str | list[str]
) -> None:
    """As the only label, in the field cls, and beside another label, in the field json."""
    table = write_table(
        tmp_path / "t", form, file=[f"{n}.png" for n in range(12)], a=["x", "z"] * 6, y=BOOLEANS
    )
    out = tmp_path / "out"
    index = wt.convert_table(table, out, image="file", label=label, root=images, shuffle=False)
    name = index.labels[-1].name
    assert index.labels[-1].classes == ("False", "True")
    assert index.table[name].to_pylist() == BOOLEANS
    assert len(index.where(name)) == 4
    assert len(index.where(f"not {name} and {name} == False and {name} < 1")) == 8
    fields = {"class": wt.label(name), "number": wt.number(name)}
    with closing(wt.Loader(index, fields, batch_size=12, shuffle=False)) as loader:
        (batch,) = loader.epoch(0, until=1)
    assert batch["class"].tolist() == batch["number"].tolist() == [int(flag) for flag in BOOLEANS]
    info = {column.name: column for column in wt.info(out).columns}[name]
    assert (info.classes, info.missing) == ({"False": 8, "True": 4}, 0)
    assert wt.verify(out).ok


@pytest.mark.parametrize("source", ["arrays", "hdf5"])
@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([True, False, False], ""),
        ([True, False, False], ":class"),
        ([0.0, 1.0, 2.0], ":class"),
        ([0, 1, 2], ""),
    ],
)
def test_a_label_of_arrays_has_the_same_values_in_index_conditions_and_batches(
    tmp_path: Path, source: str, values: list[Any], kind: str
) -> None:
    index = convert_rows(tmp_path, source, values * 4, f"y{kind}")
    check_values(index, "y", 12)


@pytest.mark.parametrize("values", [[True, False, False], [0, 1, 2], ["0", "1", "2"]])
def test_a_declared_label_has_the_same_values_in_index_conditions_and_batches(
    tmp_path: Path, values: list[Any]
) -> None:
    check_values(convert_rows(tmp_path, "index", values * 4), "y", 12)
