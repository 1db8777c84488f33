"""Tables: one rule resolves image paths; types and declarations decide the kind of labels."""

from __future__ import annotations

import csv
import datetime
import json
import os
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

import wdstrain as wt
from tests.conftest import picture
from tests.support.tables import read_samples, skipped_rows, write_pictures, write_table
from wdstrain.cli.main import main
from wdstrain.errors import SourceError, UsageError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with IMG/0.png to IMG/5.png."""
    return with_pictures(tmp_path, range(6))


def with_pictures(folder: Path, numbers: Any) -> Path:
    write_pictures(folder / "IMG", numbers)
    return folder


def table(
    folder: Path,
    rows: list[list[Any]],
    columns: tuple[str, ...] = ("file", "y"),
    name: str = "t.csv",
) -> str:
    folder.mkdir(exist_ok=True)
    with open(folder / name, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([columns, *rows])
    return str(folder / name)


def labelled(folder: Path, cells: list[Any]) -> str:
    """Write a table with one image for each cell."""
    with_pictures(folder, range(len(cells)))
    return table(folder, [[f"IMG/{number}.png", cell] for number, cell in enumerate(cells)])


def sides(index: wt.Index) -> dict[str, str]:
    """{key: split}"""
    return {
        index.key(n): index.shards[int(index.shard_of(np.array([n]))[0])].split
        for n in range(len(index))
    }


# --- paths ---


@pytest.mark.parametrize("rooted", [False, True])
def test_an_existing_absolute_path_is_used_and_a_missing_one_is_an_error(
    tmp_path: Path, rooted: bool
) -> None:
    with_pictures(tmp_path / "old" / "a", [1])
    with_pictures(tmp_path / "here", [1, 2])  # other images with the same names
    (tmp_path / "here" / "IMG" / "1.png").write_bytes(picture(9))
    rows = [[f"{tmp_path}/old/a/IMG/1.png", "x"], [f"{tmp_path}/old/b/IMG/2.png", "y"]]
    options = {"root": str(tmp_path / "here")} if rooted else {}
    file = table(tmp_path / "here", rows)
    index = wt.convert_table(
        file, tmp_path / "out", image="file", label="y", on_error="skip", **options
    )  # type: ignore[arg-type]
    assert [fields["png"] for fields in read_samples(tmp_path / "out").values()] == [picture(1)]
    assert "the image is not there" in skipped_rows(tmp_path / "out")[3]
    assert index.info["skipped"] == 1
    assert "1 of 2 paths exist" in index.info["source"]["decided"][0]


HALVES = {"train": 0.5, "val": 0.5}


def test_the_rule_and_the_kinds_are_printed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = ["cat ", "Cat", "dog", "dog", "n", ""]
    file = table(folder, [[f"IMG\\{n}.png", cell] for n, cell in enumerate(cells)])
    words = ["convert", "table", file, str(folder / "out")]
    words += ["--image", "file", "--label", "y", "--on-error", "skip"]
    assert main(words) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == [
        f"images: 5 of 5 paths exist; relative paths begin at {folder}",
        "label y: 4 classes (Cat, cat, dog, n), 5 of 6 values fit",
    ]
    assert main([*words, "--overwrite", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["decided"] == lines[:2]


@pytest.mark.parametrize("absolute", [False, True])
def test_an_additional_row_changes_no_key_and_no_split(tmp_path: Path, absolute: bool) -> None:
    with_pictures(tmp_path / "set" / "day1", range(40))
    with_pictures(tmp_path / "set" / "day2", [99])
    before = f"{tmp_path}/set" if absolute else "../set"
    rows = [[f"{before}/day1/IMG/{n}.png", n % 2] for n in range(40)]
    more = [*rows[:20], [f"{before}/day2/IMG/99.png", 1], *rows[20:], rows[3]]
    packed = []
    for name, some in (("a", rows), ("b", more)):
        file = table(tmp_path / "tables", some, name=f"{name}.csv")
        index = wt.convert_table(
            file, tmp_path / name, image="file", label="y", split={"train": 0.7, "val": 0.3}
        )
        splits = sides(index)
        packed.append(
            {
                (key, splits[key], fields["png"])
                for key, fields in read_samples(tmp_path / name).items()
            }
        )
    assert len(packed[1]) == 42
    assert packed[0] < packed[1]


# --- one image, several rows ---


def test_rows_of_one_image_are_in_one_split(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However the path of the image is written."""
    with_pictures(folder, range(30))
    spellings = ["", "./", "IMG/../", f"{folder}/"]
    table(folder, [[f"{spellings[n // 30]}IMG/{n % 30}.png", n % 3] for n in range(120)])
    monkeypatch.chdir(folder)
    index = wt.convert_table("t.csv", "out", image="file", label="y", split=HALVES)
    splits, places = sides(index), {}
    for key, fields in read_samples(folder / "out").items():
        places.setdefault(fields["png"], set()).add(splits[key])
    assert [len(sides_) for sides_ in places.values()] == [1] * 30
    assert index.info["divided"] == 0
    assert "90 rows name an image that an earlier row names" in index.info["source"]["decided"][-1]


# --- kinds of labels ---

_NUMBERS = ["0.5", "0.25", "1.5", "2.5", "-1"]


def test_an_image_in_two_splits_is_reported(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = ["train", "train", "train", "train", "val", "Val "]
    rows = [[f"IMG/{n % 3}.png", part] for n, part in enumerate(parts)]
    words = ["convert", "table", table(folder, rows, ("file", "part")), str(folder / "out")]
    assert main([*words, "--image", "file", "--split-by", "part"]) == 0
    assert "2 images are in two splits or more" in capsys.readouterr().out
    assert set(wt.info(str(folder / "out")).splits) == {"train", "val", "Val"}


@pytest.mark.parametrize("label", ["y", "y:number"])
@pytest.mark.parametrize(
    "odd", ["nan", "NA", "n/a", "None", "-", "?", "inf", "abc", "", "0.5.1", "1_000"]
)
def test_one_bad_cell_does_not_turn_numbers_into_classes(
    tmp_path: Path, odd: str, label: str
) -> None:
    file, out = labelled(tmp_path, [*_NUMBERS[:2], odd, *_NUMBERS[2:]]), tmp_path / "out"
    with pytest.raises(SourceError, match="row 4"):
        wt.convert_table(file, out, image="file", label=label)
    index = wt.convert_table(file, out, image="file", label=label, on_error="skip")
    assert (index.labels[0].kind, len(index), list(skipped_rows(out))) == ("number", 5, [4])
    assert "5 of 6 values fit" in index.info["source"]["decided"][1]
    assert {key: json.loads(fields["json"])["y"] for key, fields in read_samples(out).items()} == {
        f"IMG/{n}": float(cell) for n, cell in zip((0, 1, 3, 4, 5), _NUMBERS, strict=True)
    }


def test_numbers_may_have_any_notation(tmp_path: Path) -> None:
    cells = [*_NUMBERS, "1e-100", "2.5e-100", "1E+3", "+.5", "-0"]
    index = wt.convert_table(labelled(tmp_path, cells), tmp_path / "out", image="file", label="y")
    assert index.labels[0].kind == "number"
    assert sorted(index.table["y"].to_pylist()) == sorted(map(float, cells))


@pytest.mark.parametrize(
    ("cells", "label", "classes", "bad"),
    [
        (["cat ", "cat", " dog", "dog"], "y", ("cat", "dog"), []),
        (["2", "0", "NA", "1", "0"], "y", ("0", "1", "2"), [4]),
        (["2", "0", "x", "1", "0"], "y", ("0", "1", "2"), [4]),
        (["2", "0", "x", "1", "0"], "y:class", ("0", "1", "2", "x"), []),
        (["0", "1", "-1", "1", "0"], "y", ("0", "1"), [4]),
        (["0", "1", "-1", "1", "0"], "y:class", ("-1", "0", "1"), []),
        (["0", "3"], "y", ("0", "1", "2", "3"), []),  # class numbers are kept
        (["1", "2", "99999"], "y:class", ("1", "2", "99999"), []),
        (["007", "010", "100"], "y", ("007", "010", "100"), []),
        (["true", "False", "TRUE"], "y", ("False", "True"), []),
        (["true", "False", "yes", "true"], "y", ("False", "True"), [4]),
        (["1.5", "2.5", "1.5"], "y:class", ("1.5", "2.5"), []),
        (["NA", "DE", "AT"], "y", ("AT", "DE", "NA"), []),
        (["cat", "dog", "7"], "y", ("7", "cat", "dog"), []),
        (["a|b", "b", "a"], "y", ("a", "a|b", "b"), []),
    ],
)
def test_the_kind_of_a_label_follows_nearly_all_cells(
    tmp_path: Path, cells: list[str], label: str, classes: tuple[str, ...], bad: list[int]
) -> None:
    file = labelled(tmp_path, cells)
    index = wt.convert_table(file, tmp_path / "out", image="file", label=label, on_error="skip")
    kind = "flag" if classes == ("False", "True") else "class"
    assert (index.labels[0].kind, index.labels[0].classes) == (kind, classes)
    assert list(skipped_rows(tmp_path / "out")) == bad
    for key, fields in read_samples(tmp_path / "out").items():
        cell = cells[int(key.rpartition("/")[2])].strip()
        assert classes[int(fields["cls"])].lower() == cell.lower()


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        ([str(n) for n in range(1001)], "1001 different numbers from 0 to 1000"),
        (["1", "2", "99999"], "3 different numbers from 1 to 99999"),
        (["1", "-1", "1"], "2 different numbers from -1 to 1"),
        (["1", "2", "a", "b"], "2 numbers and 2 texts, such as 'a'"),
        ([*["0", "1"] * 20, "0.5"], "3 different numbers from 0 to 1, all or nearly all of them w"),
    ],
)
def test_an_ambiguous_column_is_an_error_with_both_declarations(
    tmp_path: Path, cells: list[str], words: str
) -> None:
    with_pictures(tmp_path, [0])
    file, out = table(tmp_path, [["IMG/0.png", cell] for cell in cells]), tmp_path / "out"
    options: dict[str, Any] = {"image": "file", "on_error": "skip"}
    with pytest.raises(UsageError, match=f"{words}.*y:class.*y:number"):
        wt.convert_table(file, out, label="y", **options)
    assert not out.exists()
    classes = wt.convert_table(file, out, label="y:class", **options).labels[0].classes
    assert set(classes) == set(cells)
    if "a" not in cells:
        index = wt.convert_table(file, tmp_path / "numbers", label="y:number", **options)
        assert index.labels[0].kind == "number"


def test_two_names_of_one_number_stay_two_classes(tmp_path: Path) -> None:
    file = labelled(tmp_path, ["1.1", "1.10", "1.2"])
    index = wt.convert_table(file, tmp_path / "out", image="file", label="y:class")
    assert index.labels[0].classes == ("1.1", "1.10", "1.2")
    assert set(index.table["y"].to_pylist()) == {"1.1", "1.10", "1.2"}
    (label,) = wt.convert_table(file, tmp_path / "numbers", image="file", label="y").labels
    assert label.kind == "number"
    file = labelled(tmp_path, ["1", "1.0", "1e0", "0"])
    (label,) = wt.convert_table(file, tmp_path / "whole", image="file", label="y:class").labels
    assert label.classes == ("0", "1")


@pytest.mark.parametrize("several", [False, True])
def test_class_names_of_a_hugging_face_table_are_kept_and_minus_one_is_missing(
    tmp_path: Path, several: bool
) -> None:
    names = {"info": {"features": {"y": {"names": ["1", "0", "bird"], "_type": "ClassLabel"}}}}
    rows = pyarrow.table({"image": [*map(picture, range(4))], "y": [0, 2, -1, 1], "x": [0.5] * 4})
    rows = rows.replace_schema_metadata({"huggingface": json.dumps(names)})
    pyarrow.parquet.write_table(rows, tmp_path / "t.parquet")
    labels, out = ["y", "x"] if several else ["y"], tmp_path / "out"
    index = wt.convert_table(
        tmp_path / "t.parquet", out, image="image", label=labels, on_error="skip"
    )
    assert index.labels[0].classes == ("1", "0", "bird")
    assert skipped_rows(out) == {3: "the label column 'y' holds -1, which means no label"}
    field = wt.label("json.y") if several else wt.label()
    batch = next(iter(wt.Loader(index, {"y": field}, batch_size=3, shuffle=False)))
    numbers = dict(zip(batch["__key__"], batch["y"].tolist(), strict=True))
    assert numbers == {f"row-00000000{row}": number for row, number in ((1, 0), (2, 2), (4, 1))}


@pytest.mark.parametrize(
    ("cells", "label", "words"),
    [
        ([[0.1, 0.2], [0.3, 0.4]], "y", "lists of 0.1 and the like"),
        ([[0, 1, 0], [1, 0, 0]], "y", "lists of 3 numbers each.*y:multi"),
        ([[[1]], [[2]]], "y", r"lists of \[1\] and the like"),
        ([{"a": 1}, {"a": 2}], "y", "which is neither a class nor a number"),
        ([[0.5], [1.5]], "y:multi", r"holds \[0.5\], which is not a list of classes"),
        ([[1], [2]], "y:class", r"holds \[1\], which is not a class"),
    ],
)
def test_lists_that_are_not_classes_are_refused(
    tmp_path: Path, cells: list[Any], label: str, words: str
) -> None:
    frame = pandas.DataFrame({"image": [picture(n) for n in range(len(cells))], "y": cells})
    with pytest.raises(UsageError, match=words):
        wt.convert_table(frame, tmp_path / "out", image="image", label=label)


def test_integers_turned_into_floats_by_an_empty_cell_are_ambiguous(tmp_path: Path) -> None:
    frame = pandas.DataFrame({"image": [picture(n) for n in range(4)], "y": [0, 1, None, 1]})
    options: dict[str, Any] = {"image": "image", "on_error": "skip"}
    words = "2 different numbers from 0.0 to 1.0, all .*y:class.*y:number"
    with pytest.raises(UsageError, match=words):
        wt.convert_table(frame, tmp_path / "out", label="y", **options)
    index = wt.convert_table(frame, tmp_path / "out", label="y:class", **options)
    assert index.labels[0].classes == ("0", "1")


# --- cells ---


def test_cells_of_a_csv_may_be_of_any_size(folder: Path) -> None:
    before = csv.field_size_limit()
    file = table(folder, [["IMG/0.png", "a", "n" * 200_000]], ("file", "y", "note"))
    wt.convert_table(file, folder / "out", image="file", label="y")
    assert json.loads(read_samples(folder / "out")["IMG/0"]["json"])["note"] == "n" * 200_000
    assert csv.field_size_limit() == before


def test_columns_of_bytes_that_would_be_one_field_are_refused(tmp_path: Path) -> None:
    frame = pandas.DataFrame({"image": [picture(0)], "Mask": [picture(1)], "mask": [picture(2)]})
    with pytest.raises(
        SourceError,
        match="two of its columns would be one field: png, mask.png, mask.png; rename one",
    ):
        wt.convert_table(frame, tmp_path / "out", image="image", on_error="skip")


def test_bytes_in_columns_lists_and_objects_become_fields(tmp_path: Path) -> None:
    rows = {
        "image": [picture(0), picture(9)],
        "crops": pyarrow.array([[picture(1), b"\xff\xd8 no"], []], pyarrow.list_(pyarrow.binary())),
        "a/b": [{"mask": picture(2), "n": 1}] * 2,
        "mask": [b"\x00\x01"] * 2,
        "Thumb.Nail": [{"bytes": picture(3), "path": "x"}] * 2,
    }
    pyarrow.parquet.write_table(pyarrow.table(rows), tmp_path / "t.parquet")
    wt.convert_table(tmp_path / "t.parquet", tmp_path / "out", image="image")
    first, second = (read_samples(tmp_path / "out")[f"row-00000000{n}"] for n in (1, 2))
    assert json.loads(first.pop("json")) == {
        "crops": ["crops.0.png", "crops.1.bin"],
        "a/b": {"mask": "a_b.mask.png", "n": 1},
    }
    kept = {"a_b.mask.png": picture(2), "mask.bin": b"\x00\x01", "thumb_nail.png": picture(3)}
    crops = {"crops.0.png": picture(1), "crops.1.bin": b"\xff\xd8 no"}
    assert first == {"png": picture(0), **crops, **kept}
    assert set(second) == {"png", "json", *kept}


def test_values_that_text_cannot_represent_are_refused(tmp_path: Path) -> None:
    def frame(cells: list[Any]) -> pandas.DataFrame:
        images = [picture(n) for n in range(len(cells))]
        return pandas.DataFrame({"image": images, "x": pandas.Series(cells, dtype=object)})

    day = datetime.datetime(2024, 1, 2, 3)
    cells = [Decimal("1.10"), day, Path("a/b"), np.datetime64("2024-01-02"), bytearray(b"\0x")]
    wt.convert_table(frame(cells), tmp_path / "out", image="image")
    packed = read_samples(tmp_path / "out")
    texts = ["1.10", "2024-01-02 03:00:00", "a/b", "2024-01-02"]
    for number, text in enumerate(texts, 1):
        assert json.loads(packed[f"row-00000000{number}"]["json"])["x"] == text
    assert packed["row-000000005"]["x.bin"] == b"\0x"
    for odd in (object(), {1, 2}, 1j, Image.new("L", (2, 2))):
        with pytest.raises(UsageError, match=f"a cell of the table is {type(odd).__name__}"):
            wt.convert_table(frame([odd]), tmp_path / "odd", image="image")


def test_blanks_at_the_beginning_of_a_cell_are_kept_inside_quotes(folder: Path) -> None:
    for text, expected in (
        ('file,said\nIMG/0.png,  a\n IMG/1.png," ""b"" "\n', ["a", ' "b" ']),
        ('file, said\nIMG/0.png, "a, b"\nIMG/1.png, c\n', ["a, b", "c"]),
    ):
        (folder / "t.csv").write_text(text)
        wt.convert_table(folder / "t.csv", folder / "out", image="file", overwrite=True)
        packed = sorted(read_samples(folder / "out").items())
        assert [json.loads(fields["json"])["said"] for _, fields in packed] == expected


def test_a_table_may_come_through_a_pipe(folder: Path, tmp_path: Path) -> None:
    os.mkfifo(folder / "t.csv")
    with ThreadPoolExecutor(1) as pool:
        pool.submit((folder / "t.csv").write_text, "file,y\nIMG/0.png,a\nIMG/1.png,b\n")
        index = wt.convert_table(folder / "t.csv", tmp_path / "out", image="file", label="y")
    assert (len(index), index.labels[0].classes) == (2, ("a", "b"))


@pytest.mark.parametrize(
    ("name", "text", "encoding", "line"),
    [
        ("t.csv", "file,y\nIMG/0.png,caf\u00e9\n", "latin-1", 2),
        ("t.csv", "file,y\rIMG/0.png,a\rIMG/1.png,caf\u00e9\r", "latin-1", 3),
        ("t.csv", "file,y\nIMG/0.png,a\n", "utf-16", 1),
        ("t.jsonl", '{"file": "IMG/0.png"}\n{"file": "IMG/1.png", "y": "\u00e9"}\n', "latin-1", 2),
        ("t.jsonl", '{"file": "IMG/0.png"}\n', "utf-16", 1),
    ],
)
def test_a_table_that_is_not_utf_8_is_refused_with_its_line(
    folder: Path, name: str, text: str, encoding: str, line: int
) -> None:
    (folder / name).write_bytes(text.encode(encoding))
    words = f"{name} is not UTF-8: see line {line}. A table must be UTF-8."
    if name == "t.csv":
        words += " Save it as UTF-8, or give its encoding"
    with pytest.raises(SourceError, match=words):
        wt.convert_table(folder / name, folder / "out", image="file", on_error="skip")
    (folder / name).write_bytes(text.encode("utf-8-sig"))
    assert len(wt.convert_table(folder / name, folder / "out", image="file")) > 0


def test_an_object_with_a_repeated_key_is_a_bad_row(folder: Path) -> None:
    rows = [
        '{"file": "IMG/0.png", "y": 0}',
        '{"file": "IMG/1.png", "y": 0, "y": 1}',
        '{"file": "IMG/2.png", "y": 1, "z": {"a": 1, "a": 2}}',
    ]
    (folder / "t.jsonl").write_text("\n".join(rows))
    wt.convert_table(folder / "t.jsonl", folder / "out", image="file", on_error="skip")
    assert set(read_samples(folder / "out")) == {"IMG/0"}
    reasons = skipped_rows(folder / "out")
    assert set(reasons) == {2, 3}
    assert "names 'y' twice" in reasons[2]
    assert "names 'a' twice" in reasons[3]


@pytest.mark.parametrize("on_error", ["raise", "skip"])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# made today\nfile,y\nIMG/0.png,a\n", "it has 2 cells, but the table has 1 columns"),
        ("file;y, z\nIMG/0.png;a\nIMG/1.png;b\n", "it has 1 cells, but the table has 2 columns"),
        ("file;y;z\nIMG/0.png,a,b\n", "it has 1 cells, but the table has 3 columns"),
    ],
)
def test_a_header_whose_width_differs_from_all_rows_is_an_error(
    folder: Path, text: str, message: str, on_error: str
) -> None:
    (folder / "t.csv").write_text(text)
    message = f"row 2: {message}" if on_error == "raise" else "has no rows that can be read"
    with pytest.raises(SourceError, match=message):
        wt.convert_table(
            folder / "t.csv", folder / "out", image="file", label="y", on_error=on_error
        )


@pytest.mark.parametrize("delimiter", [";", "|", "\t"])
def test_the_delimiter_is_the_one_of_the_first_line(folder: Path, delimiter: str) -> None:
    (folder / "t.csv").write_text(f"file{delimiter}y\nIMG/0.png{delimiter}a, b\n")
    index = wt.convert_table(folder / "t.csv", folder / "out", image="file", label="y")
    assert index.labels[0].classes == ("a, b",)


def test_non_finite_numbers_outside_labels_are_counted_and_printed(folder: Path) -> None:
    nan, inf = float("nan"), float("inf")
    cells: dict[str, list[Any]] = {
        "file": [f"IMG/{n}.png" for n in range(6)],
        "depth": [nan, 1.0, nan, inf, -inf, 2.0],
        "box": [[nan, 1.0], [2.0, inf], [inf, 0.0], None, [1.0, 2.0], [1.0, 2.0]],
    }
    expected = [
        "column depth: NaN became null in json (2 values)",
        "column depth: inf became the text 'inf' in json (1 value)",
        "column depth: -inf became the text '-inf' in json (1 value)",
        "column box: NaN became null in json (1 value)",
        "column box: inf became the text 'inf' in json (2 values)",
    ]
    for form in ("parquet", "jsonl", "frame"):
        source = write_table(folder / "t", form, **cells)
        index = wt.convert_table(source, folder / "out", image="file", root=folder, overwrite=True)
        decided = index.info["source"]["decided"]
        assert [line for line in decided if line.startswith("column")] == expected
    assert json.loads(read_samples(folder / "out")["IMG/3"]["json"])["depth"] == "inf"


# --- refusals ---

_TWO = "file,n\nIMG/0.png,1\n"  # with a second row


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("path,n\nIMG/0.png,1\n", "has no column 'file'. Use one of its columns: path, n"),
        ("file,m\nIMG/0.png,1\n", "has no column 'n'. Use one of its columns: file, m"),
        (f"{_TWO}IMG/zzz.png,1\n", "row 3: IMG/zzz.png: the image is not there"),
        (f"{_TWO}IMG/1.png\n", "row 3: it has 1 cells, but the table has 2 columns"),
        (f"{_TWO}IMG/1.png,\n", "row 3: IMG/1.png: the label column 'n' is empty"),
        ("file,n\n", "has no rows that can be read"),
        ("file,n\n\n\n", "has no rows that can be read"),
        ("file,file\nIMG/0.png,1\n", "names a column twice"),
        ("IMG/9.png,3\nIMG/0.png,1\n", "its first line looks like data"),
        ("file,n\nIMG/0.png,0.5\nIMG/1.png,nan\n", "row 3: .* 'n' holds 'nan'"),
        (
            "file,n\nIMG/0.png,5\nIMG/1.png,40000000\n",
            "2 different numbers from 5 to 40000000, .*n:class.*n:number",
        ),
        ('file,n\n0.png,"1\n1.png,2\n2.png,3\n', "a quote that is not closed"),
    ],
)
def test_an_unusable_table_is_refused(folder: Path, content: str, words: str) -> None:
    (folder / "t.csv").write_text(content, encoding="utf-8-sig")
    with pytest.raises((SourceError, UsageError), match=words):
        wt.convert_table(folder / "t.csv", folder / "out", image="file", label="n")


@pytest.mark.parametrize(
    ("table", "label", "words"),
    [
        ("t.parquet", "n", "cannot be read as Parquet"),
        ("t.jsonl", "n", "has no rows that can be read"),
        ("t.csv", "file", "a column is named twice: file, file"),
        ("nothing.csv", "n", "nothing.csv: there is no such file"),
        (pandas.DataFrame([[1, 2]], columns=["a", "a"]), "n", "names a column twice"),
    ],
)
def test_an_object_that_is_no_table_is_refused(
    folder: Path, table: Any, label: str, words: str
) -> None:
    for name, content in (("t.parquet", "PAR1 no"), ("t.jsonl", ""), ("t.csv", _TWO)):
        (folder / name).write_text(content)
    table = folder / table if isinstance(table, str) else table
    with pytest.raises((SourceError, UsageError), match=words):
        wt.convert_table(table, folder / "out", image="file", label=label)
