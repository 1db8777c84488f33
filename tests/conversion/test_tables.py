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
from tests.support.tables import Tables, labelled, pictured, read_samples, write_pictures
from wdstrain.errors import SourceError, UsageError

HALVES = {"train": 0.5, "val": 0.5}


def sides(index: wt.Index) -> dict[str, str]:
    """{key: split}"""
    shards = index.shard_of(np.arange(len(index)))
    return {index.key(n): index.shards[int(shard)].split for n, shard in enumerate(shards)}


# --- paths ---


@pytest.mark.parametrize("rooted", [False, True])
def test_an_existing_absolute_path_is_used_and_a_missing_one_is_an_error(
    tables: Tables, tmp_path: Path, rooted: bool
) -> None:
    write_pictures(tmp_path / "old" / "a" / "IMG", [1])
    (tmp_path / "IMG" / "1.png").write_bytes(picture(9))  # another image of the same name
    text = f"file,y\n{tmp_path}/old/a/IMG/1.png,x\n{tmp_path}/old/b/IMG/2.png,y\n"
    options: dict[str, Any] = {"root": str(tmp_path)} if rooted else {}
    index = tables(text, label="y", on_error="skip", **options)
    assert [fields["png"] for fields in tables.samples.values()] == [picture(1)]
    assert "the image is not there" in tables.skipped[3]
    assert index.info["skipped"] == 1


def test_the_rule_and_the_kinds_are_printed(
    tables: Tables, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = ["cat ", "Cat", "dog", "dog", "n", ""]
    table = {"file": [f"IMG\\{n}.png" for n in range(6)], "y": cells}
    words = ["--label", "y", "--on-error", "skip"]
    assert tables.command(table, *words) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == [
        f"images: files; relative paths begin at {tables.folder}",
        "label y: 4 classes (Cat, cat, dog, n), 5 of 6 values fit",
    ]
    assert tables.command(table, *words, "--overwrite", "--json") == 0
    assert json.loads(capsys.readouterr().out)["decided"] == lines[:2]


@pytest.mark.parametrize("absolute", [False, True])
def test_an_additional_row_changes_no_key_and_no_split(
    tables: Tables, tmp_path: Path, absolute: bool
) -> None:
    write_pictures(tmp_path / "day1", range(40))
    write_pictures(tmp_path / "day2", [99])
    before = tmp_path if absolute else f"../{tmp_path.name}"
    rows = [f"{before}/day1/{n}.png,{n % 2}" for n in range(40)]
    more = [*rows[:20], f"{before}/day2/99.png,1", *rows[20:], rows[3]]
    packed = []
    for some in (rows, more):
        text = "\n".join(["file,y", *some])
        splits = sides(tables(text, label="y", split={"train": 0.7, "val": 0.3}))
        packed.append({(key, splits[key], part["png"]) for key, part in tables.samples.items()})
    assert len(packed[1]) == 42
    assert packed[0] < packed[1]


# --- one image, several rows ---


def test_rows_of_one_image_are_in_one_split(
    tables: Tables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the path of the image is written."""
    write_pictures(tmp_path / "IMG", range(30))
    spellings = ["", "./", "IMG/../", f"{tmp_path}/"]
    files = [f"{spellings[n // 30]}IMG/{n % 30}.png" for n in range(120)]
    tables.write({"file": files, "y": [n % 3 for n in range(120)]})
    monkeypatch.chdir(tmp_path)
    index = wt.convert_table("t.csv", "out", image="file", label="y", split=HALVES)
    splits, places = sides(index), dict[bytes, set[str]]()
    for key, fields in read_samples(tmp_path / "out").items():
        places.setdefault(fields["png"], set()).add(splits[key])
    assert [len(sides_) for sides_ in places.values()] == [1] * 30
    assert index.info["divided"] == 0


def test_an_image_in_two_splits_is_reported(
    tables: Tables, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = ["train", "train", "train", "train", "val", "Val "]
    table = {"file": [f"IMG/{n % 3}.png" for n in range(6)], "part": parts}
    assert tables.command(table, "--split-by", "part") == 0
    assert "2 images are in two splits or more" in capsys.readouterr().out
    assert set(wt.info(str(tables.out)).splits) == {"train", "val", "Val"}


# --- kinds of labels ---

_NUMBERS = ["0.5", "0.25", "1.5", "2.5", "-1"]


@pytest.mark.parametrize("label", ["y", "y:number"])
@pytest.mark.parametrize(
    "odd", ["nan", "NA", "n/a", "None", "-", "?", "inf", "abc", "", "0.5.1", "1_000"]
)
def test_one_bad_cell_does_not_turn_numbers_into_classes(
    tables: Tables, odd: str, label: str
) -> None:
    table = labelled([*_NUMBERS[:2], odd, *_NUMBERS[2:]])
    with pytest.raises(SourceError, match="row 4"):
        tables(table, label=label)
    index = tables(table, label=label, on_error="skip")
    assert (index.labels[0].kind, len(index), list(tables.skipped)) == ("number", 5, [4])
    assert "5 of 6 values fit" in index.info["source"]["decided"][1]
    expected = zip((0, 1, 3, 4, 5), map(float, _NUMBERS), strict=True)
    assert tables.entries("y") == {f"IMG/{n}": value for n, value in expected}


def test_numbers_may_have_any_notation(tables: Tables) -> None:
    cells = [*_NUMBERS, "1e-100", "2.5e-100", "1E+3", "+.5", "-0"]
    index = tables(labelled(cells), label="y")
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
    tables: Tables, cells: list[str], label: str, classes: tuple[str, ...], bad: list[int]
) -> None:
    index = tables(labelled(cells), label=label, on_error="skip")
    kind = "flag" if classes == ("False", "True") else "class"
    assert (index.labels[0].kind, index.labels[0].classes) == (kind, classes)
    assert list(tables.skipped) == bad
    for key, fields in tables.samples.items():
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
    tables: Tables, cells: list[str], words: str
) -> None:
    table = labelled(cells)
    with pytest.raises(UsageError, match=f"{words}.*y:class.*y:number"):
        tables(table, label="y", on_error="skip")
    assert not tables.out.exists()
    assert set(tables(table, label="y:class", on_error="skip").labels[0].classes) == set(cells)
    if "a" not in cells:
        assert tables(table, label="y:number", on_error="skip").labels[0].kind == "number"


def test_two_names_of_one_number_stay_two_classes(tables: Tables) -> None:
    table = labelled(["1.1", "1.10", "1.2"])
    index = tables(table, label="y:class")
    assert index.labels[0].classes == ("1.1", "1.10", "1.2")
    assert set(index.table["y"].to_pylist()) == {"1.1", "1.10", "1.2"}
    assert tables(table, label="y").labels[0].kind == "number"
    (label,) = tables(labelled(["1", "1.0", "1e0", "0"]), label="y:class").labels
    assert label.classes == ("0", "1")


@pytest.mark.parametrize("several", [False, True])
def test_class_names_of_a_hugging_face_table_are_kept_and_minus_one_is_missing(
    tables: Tables, several: bool
) -> None:
    names = {"info": {"features": {"y": {"names": ["1", "0", "bird"], "_type": "ClassLabel"}}}}
    rows = pyarrow.table({"image": [*map(picture, range(4))], "y": [0, 2, -1, 1], "x": [0.5] * 4})
    rows = rows.replace_schema_metadata({"huggingface": json.dumps(names)})
    pyarrow.parquet.write_table(rows, path := tables.folder / "t.parquet")
    labels = ["y", "x"] if several else ["y"]
    index = tables(path, image="image", label=labels, on_error="skip")
    assert index.labels[0].classes == ("1", "0", "bird")
    assert tables.skipped == {3: "the label column 'y' holds -1, which means no label"}
    field = wt.label("json.y") if several else wt.label()
    batch = next(iter(wt.Loader(index, {"y": field}, batch_size=3, shuffle=False)))
    numbers = dict(zip(batch["__key__"], batch["y"].tolist(), strict=True))
    assert numbers == {f"row-00000000{row}": number for row, number in ((1, 0), (2, 2), (4, 1))}


def test_integers_turned_into_floats_by_an_empty_cell_are_ambiguous(tables: Tables) -> None:
    frame = pandas.DataFrame(labelled([0, 1, None, 1]))
    words = "2 different numbers from 0.0 to 1.0, all .*y:class.*y:number"
    with pytest.raises(UsageError, match=words):
        tables(frame, label="y", on_error="skip")
    assert tables(frame, label="y:class", on_error="skip").labels[0].classes == ("0", "1")


# --- cells ---


def test_cells_of_a_csv_may_be_of_any_size(tables: Tables) -> None:
    before = csv.field_size_limit()
    tables(f"file,y,note\nIMG/0.png,a,{'n' * 200_000}\n", label="y")
    assert tables.entries("note") == {"IMG/0": "n" * 200_000}
    assert csv.field_size_limit() == before


def test_bytes_in_columns_lists_and_objects_become_fields(tables: Tables) -> None:
    crops = [[picture(1), b"\xff\xd8 no"], []]
    rows = {
        "image": [picture(0), picture(9)],
        "crops": pyarrow.array(crops, pyarrow.list_(pyarrow.binary())),
        "a/b": [{"mask": picture(2), "n": 1}] * 2,
        "mask": [b"\x00\x01"] * 2,
        "Thumb.Nail": [{"bytes": picture(3), "path": "x"}] * 2,
    }
    tables(rows, "parquet", image="image")
    first, second = (tables.samples[f"row-00000000{n}"] for n in (1, 2))
    assert json.loads(first.pop("json")) == {
        "crops": ["crops.0.png", "crops.1.bin"],
        "a/b": {"mask": "a_b.mask.png", "n": 1},
    }
    kept = {"a_b.mask.png": picture(2), "mask.bin": b"\x00\x01", "thumb_nail.png": picture(3)}
    crop_fields = {"crops.0.png": picture(1), "crops.1.bin": b"\xff\xd8 no"}
    assert first == {"png": picture(0), **crop_fields, **kept}
    assert set(second) == {"png", "json", *kept}


def test_values_that_text_cannot_represent_are_refused(tables: Tables) -> None:
    day = datetime.datetime(2024, 1, 2, 3)
    cells = [Decimal("1.10"), day, Path("a/b"), np.datetime64("2024-01-02"), b"\0x"]
    tables(pictured(cells, "x"), image="image")
    texts = ["1.10", "2024-01-02 03:00:00", "a/b", "2024-01-02"]
    packed = tables.samples
    for number, text in enumerate(texts, 1):
        assert json.loads(packed[f"row-00000000{number}"]["json"])["x"] == text
    assert packed["row-000000005"]["x.bin"] == b"\0x"
    for odd in (object(), {1, 2}, 1j, Image.new("L", (2, 2))):
        with pytest.raises(UsageError, match=f"a cell of the table is {type(odd).__name__}"):
            tables(pictured([odd], "x"), image="image")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('file,said\nIMG/0.png,  a\n IMG/1.png," ""b"" "\n', ["a", ' "b" ']),
        ('file, said\nIMG/0.png, "a, b"\nIMG/1.png, c\n', ["a, b", "c"]),
        *((f"file{d}said\nIMG/0.png{d}a, b\n", ["a, b"]) for d in ";|\t"),  # first line decides
    ],
)
def test_blanks_and_delimiters_in_cells_are_kept(
    tables: Tables, text: str, said: list[str]
) -> None:
    tables(text)
    assert [entry for _, entry in sorted(tables.entries("said").items())] == said


def test_a_table_may_come_through_a_pipe(tables: Tables) -> None:
    os.mkfifo(path := tables.folder / "t.csv")
    with ThreadPoolExecutor(1) as pool:
        pool.submit(path.write_text, "file,y\nIMG/0.png,a\nIMG/1.png,b\n")
        index = tables(path, label="y")
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
    tables: Tables, name: str, text: str, encoding: str, line: int
) -> None:
    path = tables.folder / name
    path.write_bytes(text.encode(encoding))
    words = f"{name} is not UTF-8: see line {line}. A table must be UTF-8."
    words += " Save it as UTF-8, or give its encoding" if name == "t.csv" else ""
    with pytest.raises(SourceError, match=words):
        tables(path, on_error="skip")
    path.write_bytes(text.encode("utf-8-sig"))
    assert len(tables(path)) > 0


def test_non_finite_numbers_outside_labels_are_counted_and_printed(tables: Tables) -> None:
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
        decided = tables(cells, form).info["source"]["decided"]
        assert [line for line in decided if line.startswith("column")] == expected
    assert tables.entries("depth")["IMG/3"] == "inf"


# --- refusals ---

_TWO = "file,n\nIMG/0.png,1\n"  # with a second row
_COPIES = {"image": [picture(0)], "Mask": [picture(1)], "mask": [picture(2)]}
_WIDTHS = [
    ("# made today\nfile,y\nIMG/0.png,a\n", "it has 2 cells, but the table has 1 columns"),
    ("file;y, z\nIMG/0.png;a\nIMG/1.png;b\n", "it has 1 cells, but the table has 2 columns"),
    ("file;y;z\nIMG/0.png,a,b\n", "it has 1 cells, but the table has 3 columns"),
]
_LISTS: list[tuple[list[Any], str, str]] = [
    ([[0.1, 0.2], [0.3, 0.4]], "y", "lists of 0.1 and the like"),
    ([[0, 1, 0], [1, 0, 0]], "y", "lists of 3 numbers each.*y:multi"),
    ([[[1]], [[2]]], "y", r"lists of \[1\] and the like"),
    ([{"a": 1}, {"a": 2}], "y", "which is neither a class nor a number"),
    ([[0.5], [1.5]], "y:multi", r"holds \[0.5\], which is not a list of classes"),
    ([[1], [2]], "y:class", r"holds \[1\], which is not a class"),
]


@pytest.mark.parametrize(
    ("table", "options", "words"),
    [
        ("path,n\nIMG/0.png,1\n", {}, "has no column 'file'. Use one of its columns: path, n"),
        ("file,m\nIMG/0.png,1\n", {}, "has no column 'n'. Use one of its columns: file, m"),
        (f"{_TWO}IMG/zzz.png,1\n", {}, "row 3: IMG/zzz.png: the image is not there"),
        (f"{_TWO}IMG/1.png\n", {}, "row 3: it has 1 cells, but the table has 2 columns"),
        (f"{_TWO}IMG/1.png,\n", {}, "row 3: IMG/1.png: the label column 'n' is empty"),
        ("file,n\n", {}, "has no rows that can be read"),
        ("file,n\n\n\n", {}, "has no rows that can be read"),
        ("file,file\nIMG/0.png,1\n", {}, "names a column twice"),
        ("IMG/9.png,3\nIMG/0.png,1\n", {}, "its first line looks like data"),
        ("file,n\nIMG/0.png,0.5\nIMG/1.png,nan\n", {}, "row 3: .* 'n' holds 'nan'"),
        (
            "file,n\nIMG/0.png,5\nIMG/1.png,40000000\n",
            {},
            "2 different numbers from 5 to 40000000, .*n:class.*n:number",
        ),
        ('file,n\n0.png,"1\n1.png,2\n2.png,3\n', {}, "a quote that is not closed"),
        (_TWO, {"label": "file"}, "a column is named twice: file, file"),
        (_TWO, {"label": "n:klass"}, "the kind must be one of class, number, multi"),
        ("t.parquet", {}, "cannot be read as Parquet"),
        ("t.jsonl", {}, "has no rows that can be read"),
        ("nothing.csv", {}, "nothing.csv: there is no such file"),
        (pandas.DataFrame([[1, 2]], columns=["a", "a"]), {}, "names a column twice"),
        (
            pandas.DataFrame(_COPIES),
            {"image": "image", "label": [], "on_error": "skip"},
            "two of its columns would be one field: png, mask.png, mask.png; rename one",
        ),
        *((text, {"label": "y"}, f"row 2: {words}") for text, words in _WIDTHS),
        *(
            (text, {"label": "y", "on_error": "skip"}, "has no rows that can be read")
            for text, _ in _WIDTHS
        ),
        *(
            (pictured(cells), {"image": "image", "label": label}, words)
            for cells, label, words in _LISTS
        ),
    ],
)
def test_an_unusable_table_is_refused(
    tables: Tables, table: Any, options: dict[str, Any], words: str
) -> None:
    (tables.folder / "t.parquet").write_text("PAR1 no")
    (tables.folder / "t.jsonl").write_text("")
    if isinstance(table, str):
        table = f"\ufeff{table}" if "\n" in table else tables.folder / table
    with pytest.raises((SourceError, UsageError), match=words):
        tables(table, **{"label": "n", **options})
