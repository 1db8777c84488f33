"""Tables: one rule resolves image paths; types and declarations decide the kind of labels."""

from __future__ import annotations

import csv
import datetime
import json
import os
import shutil
import tarfile
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
from wdstrain.cli.main import main
from wdstrain.errors import SourceError, UsageError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with IMG/0.png to IMG/5.png."""
    return with_pictures(tmp_path, range(6))


def with_pictures(folder: Path, numbers: Any) -> Path:
    (folder / "IMG").mkdir(parents=True, exist_ok=True)
    for number in numbers:
        (folder / "IMG" / f"{number}.png").write_bytes(picture(number))
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


def read(out: Path) -> dict[str, dict[str, bytes]]:
    """{key: {field: bytes}} of every shard, by tarfile."""
    actual: dict[str, dict[str, bytes]] = {}
    for path in sorted(out.glob("*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                base = member.name.rpartition("/")[2]
                field = base[base.index(".") + 1 :]
                file = tar.extractfile(member)
                assert file is not None
                actual.setdefault(member.name.removesuffix(f".{field}"), {})[field] = file.read()
    return actual


def bad_rows(out: Path) -> dict[int, str]:
    """{row: reason} of the skipped rows."""
    if not (out / "skipped.jsonl").exists():
        return {}
    return {
        row["row"]: row["reason"]
        for row in map(json.loads, (out / "skipped.jsonl").read_text().splitlines())
    }


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
    assert [fields["png"] for fields in read(tmp_path / "out").values()] == [picture(1)]
    assert "the image is not there" in bad_rows(tmp_path / "out")[3]
    assert index.info["skipped"] == 1
    assert "1 of 2 paths exist" in index.info["source"]["decided"][0]


def test_absolute_paths_of_another_machine_need_a_root(folder: Path) -> None:
    file = table(folder, [["/gone/IMG/1.png", "a"]])
    with pytest.raises(SourceError, match=r"row 2: /gone/IMG/1.png: the image is not there; root"):
        wt.convert_table(file, folder / "out", image="file", label="y")


@pytest.mark.parametrize(
    "beginning", ["/", "/data/set/", "C:\\data\\set\\", "d:/", "\\\\server\\share\\"]
)
def test_paths_of_another_machine_are_resolved_by_their_longest_suffix(
    folder: Path, beginning: str
) -> None:
    shutil.copy(folder / "IMG" / "5.png", folder / "0.png")  # the same name, nearer to the root
    turned = [
        f"{beginning}IMG/{n}.png".replace("/", "\\")
        if "\\" in beginning
        else f"{beginning}IMG/{n}.png"
        for n in (0, 1)
    ]
    file = table(folder, [[turned[0], "a"], [turned[1], "b"]])
    index = wt.convert_table(file, folder / "out", image="file", label="y", root=folder)
    assert {key: fields["png"] for key, fields in read(folder / "out").items()} == {
        f"IMG/{n}": picture(n) for n in (0, 1)
    }
    assert "2 of 2 paths exist" in index.info["source"]["decided"][0]


def test_one_prefix_is_removed_from_all_paths(folder: Path) -> None:
    """A shorter suffix of one path is never used: one rule holds for all paths."""
    shutil.copy(folder / "IMG" / "5.png", folder / "7.png")
    file = table(folder, [[f"/x/IMG/{n}.png", "ab"[n % 2]] for n in (0, 1, 7)])
    index = wt.convert_table(
        file, folder / "out", image="file", label="y", root=folder, on_error="skip"
    )
    assert set(read(folder / "out")) == {"IMG/0", "IMG/1"}
    assert list(bad_rows(folder / "out")) == [4]
    assert index.info["source"]["decided"][0].startswith(
        "images: 2 of 3 paths exist; paths are read below the root"
    )


def test_the_rule_and_the_kinds_are_printed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = table(
        folder, [[f"IMG\\{n}.png", ["cat ", "Cat", "dog", "dog", "n", ""][n]] for n in range(6)]
    )
    words = [
        "convert",
        "table",
        file,
        str(folder / "out"),
        "--image",
        "file",
        "--label",
        "y",
        "--on-error",
        "skip",
    ]
    assert main(words) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == (
        "images: 5 of 5 paths exist; paths are read unchanged, relative paths from the root, "
        "backslashes as slashes"
    )
    assert lines[1] == "label y: 4 classes (Cat, cat, dog, n), 5 of 6 values fit"
    assert lines[2] == "label y: the classes 'Cat' and 'cat' look alike"
    assert main([*words, "--overwrite", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["decided"] == lines[:3]


def test_backslashes_in_the_name_of_an_existing_file_are_kept(folder: Path) -> None:
    (folder / "IMG\\0.png").write_bytes(picture(8))
    wt.convert_table(table(folder, [["IMG\\0.png", "a"]]), folder / "out", image="file", label="y")
    assert [fields["png"] for fields in read(folder / "out").values()] == [picture(8)]


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
            {(key, splits[key], fields["png"]) for key, fields in read(tmp_path / name).items()}
        )
    assert len(packed[1]) == 42
    assert packed[0] < packed[1]


# --- one image, several rows ---


def test_rows_of_one_image_are_in_one_split(folder: Path) -> None:
    with_pictures(folder, range(30))
    file = table(
        folder, [[f"{['', './', 'IMG/../'][n % 3]}IMG/{n % 30}.png", n % 3] for n in range(90)]
    )
    index = wt.convert_table(
        file, folder / "out", image="file", label="y", split={"train": 0.5, "val": 0.5}
    )
    splits, places = sides(index), {}
    for key, fields in read(folder / "out").items():
        places.setdefault(fields["png"], set()).add(splits[key])
    assert len(places) == 30
    assert all(len(sides_) == 1 for sides_ in places.values())
    assert index.info["divided"] == 0
    assert (
        "60 rows name an image that an earlier row names too" in index.info["source"]["decided"][-1]
    )


def test_absolute_and_relative_paths_of_one_image_are_in_one_split(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_pictures(folder, range(20))
    table(folder, [[f"{['', f'{folder}/'][n // 20]}IMG/{n % 20}.png", n % 2] for n in range(40)])
    monkeypatch.chdir(folder)
    index = wt.convert_table(
        "t.csv", "out", image="file", label="y", split={"train": 0.5, "val": 0.5}
    )
    splits, places = sides(index), {}
    for key, fields in read(folder / "out").items():
        places.setdefault(fields["png"], set()).add(splits[key])
    assert len(places) == 20
    assert all(len(sides_) == 1 for sides_ in places.values())


def test_equal_image_bytes_are_in_one_split(tmp_path: Path) -> None:
    frame = pandas.DataFrame(
        {"image": [picture(n % 20) for n in range(60)], "y": [n % 2 for n in range(60)]}
    )
    index = wt.convert_table(
        frame, tmp_path / "out", image="image", label="y", split={"train": 0.5, "val": 0.5}
    )
    splits, places = sides(index), {}
    for key, fields in read(tmp_path / "out").items():
        places.setdefault(fields["png"], set()).add(splits[key])
    assert [len(sides_) for sides_ in places.values()] == [1] * 20


def test_an_image_in_two_splits_is_reported(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [[f"IMG/{n % 3}.png", n % 2, "train" if n < 4 else "val"] for n in range(6)]
    file = table(folder, rows, ("file", "y", "part"))
    words = [
        "convert",
        "table",
        file,
        str(folder / "out"),
        "--image",
        "file",
        "--label",
        "y",
        "--split-by",
        "part",
    ]
    assert main(words) == 0
    assert "2 images are in two splits or more" in capsys.readouterr().out


# --- kinds of labels ---

_NUMBERS = ["0.5", "0.25", "1.5", "2.5", "-1"]


@pytest.mark.parametrize("label", ["y", "y:number"])
@pytest.mark.parametrize(
    "odd", ["nan", "NA", "n/a", "None", "-", "?", "inf", "abc", "", "0.5.1", "1_000"]
)
def test_one_bad_cell_does_not_turn_numbers_into_classes(
    tmp_path: Path, odd: str, label: str
) -> None:
    file = labelled(tmp_path, [*_NUMBERS[:2], odd, *_NUMBERS[2:]])
    with pytest.raises(SourceError, match="row 4"):
        wt.convert_table(file, tmp_path / "out", image="file", label=label)
    index = wt.convert_table(file, tmp_path / "out", image="file", label=label, on_error="skip")
    assert (index.labels[0].kind, len(index), list(bad_rows(tmp_path / "out"))) == (
        "number",
        5,
        [4],
    )
    assert "5 of 6 values fit" in index.info["source"]["decided"][1]
    values = {
        key: json.loads(fields["json"])["y"] for key, fields in read(tmp_path / "out").items()
    }
    assert values == {
        f"IMG/{n}": float(cell) for n, cell in zip((0, 1, 3, 4, 5), _NUMBERS, strict=True)
    }


@pytest.mark.parametrize("small", ["1e-100", "2.5e-100", "1E+3", "+.5", "-0"])
def test_numbers_may_have_any_notation(tmp_path: Path, small: str) -> None:
    index = wt.convert_table(
        labelled(tmp_path, [*_NUMBERS, small]), tmp_path / "out", image="file", label="y"
    )
    assert (index.labels[0].kind, len(index)) == ("number", 6)


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
    assert list(bad_rows(tmp_path / "out")) == bad
    for key, fields in read(tmp_path / "out").items():
        cell = cells[int(key.rpartition("/")[2])].strip()
        assert classes[int(fields["cls"])].lower() == cell.lower()


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        ([str(n) for n in range(1001)], "1001 different numbers from 0 to 1000.*y:class.*y:number"),
        (["1", "2", "99999"], "3 different numbers from 1 to 99999.*y:class.*y:number"),
        (["1", "-1", "1"], "2 different numbers from -1 to 1.*y:class.*y:number"),
        (["1", "2", "a", "b"], "2 numbers and 2 texts, such as 'a'.*y:class.*y:number"),
        (
            [*["0", "1"] * 20, "0.5"],
            "3 different numbers from 0 to 1, all or nearly all of them whole.*y:class.*y:number",
        ),
    ],
)
def test_an_ambiguous_column_is_an_error_with_both_declarations(
    tmp_path: Path, cells: list[str], words: str
) -> None:
    with_pictures(tmp_path, [0])
    file = table(tmp_path, [["IMG/0.png", cell] for cell in cells])
    with pytest.raises(UsageError, match=words):
        wt.convert_table(file, tmp_path / "out", image="file", label="y", on_error="skip")
    assert not (tmp_path / "out").exists()


def test_two_names_of_one_number_stay_two_classes(tmp_path: Path) -> None:
    file = labelled(tmp_path, ["1.1", "1.10", "1.2"])
    index = wt.convert_table(file, tmp_path / "out", image="file", label="y:class")
    assert index.labels[0].classes == ("1.1", "1.10", "1.2")
    assert set(index.table["y"].to_pylist()) == {"1.1", "1.10", "1.2"}
    assert (
        wt.convert_table(file, tmp_path / "numbers", image="file", label="y").labels[0].kind
        == "number"
    )
    complete = wt.convert_table(
        labelled(tmp_path, ["1", "1.0", "1e0", "0"]),
        tmp_path / "whole",
        image="file",
        label="y:class",
    )
    assert complete.labels[0].classes == ("0", "1")


def test_many_declared_class_numbers_are_kept(tmp_path: Path) -> None:
    with_pictures(tmp_path, [0])
    file = table(tmp_path, [["IMG/0.png", n] for n in range(1001)])
    index = wt.convert_table(file, tmp_path / "out", image="file", label="y:class")
    assert index.labels[0].classes == tuple(map(str, range(1001)))
    assert (
        wt.convert_table(file, tmp_path / "b", image="file", label="y:number").labels[0].kind
        == "number"
    )


@pytest.mark.parametrize("several", [False, True])
def test_class_names_of_a_hugging_face_table_are_kept_and_minus_one_is_missing(
    tmp_path: Path, several: bool
) -> None:
    metadata = {
        "info": {"features": {"label": {"names": ["1", "0", "bird"], "_type": "ClassLabel"}}}
    }
    arrow_table = pyarrow.table(
        {"image": [picture(n) for n in range(4)], "label": [0, 2, -1, 1], "x": [0.5] * 4}
    )
    pyarrow.parquet.write_table(
        arrow_table.replace_schema_metadata({"huggingface": json.dumps(metadata)}),
        tmp_path / "t.parquet",
    )
    labels = ["label", "x"] if several else ["label"]
    index = wt.convert_table(
        tmp_path / "t.parquet", tmp_path / "out", image="image", label=labels, on_error="skip"
    )
    assert index.labels[0].classes == ("1", "0", "bird")
    assert bad_rows(tmp_path / "out") == {
        3: "the label column 'label' holds -1, which means no label"
    }
    field = wt.label("json.label") if several else wt.label()
    batch = next(iter(wt.Loader(index, {"y": field}, batch_size=3, shuffle=False)))
    assert dict(zip(batch["__key__"], batch["y"].tolist(), strict=True)) == {
        "row-000000001": 0,
        "row-000000002": 2,
        "row-000000004": 1,
    }


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
    with pytest.raises(
        UsageError, match="2 different numbers from 0.0 to 1.0, all .*y:class.*y:number"
    ):
        wt.convert_table(frame, tmp_path / "out", image="image", label="y", on_error="skip")
    index = wt.convert_table(
        frame, tmp_path / "out", image="image", label="y:class", on_error="skip"
    )
    assert index.labels[0].classes == ("0", "1")


# --- cells ---


def test_cells_of_a_csv_may_be_of_any_size(folder: Path) -> None:
    before = csv.field_size_limit()
    file = table(folder, [["IMG/0.png", "a", "n" * 200_000]], ("file", "y", "note"))
    wt.convert_table(file, folder / "out", image="file", label="y")
    assert json.loads(read(folder / "out")["IMG/0"]["json"])["note"] == "n" * 200_000
    assert csv.field_size_limit() == before


def test_bytes_in_lists_and_objects_become_fields(tmp_path: Path) -> None:
    crops = pyarrow.array([[picture(1), b"\xff\xd8 no"], []], pyarrow.list_(pyarrow.binary()))
    rows = pyarrow.table(
        {
            "image": [picture(0), picture(9)],
            "crops": crops,
            "a/b": [{"mask": picture(2), "n": 1}] * 2,
        }
    )
    pyarrow.parquet.write_table(rows, tmp_path / "t.parquet")
    wt.convert_table(tmp_path / "t.parquet", tmp_path / "out", image="image")
    packed = read(tmp_path / "out")
    assert set(packed["row-000000001"]) == {
        "png",
        "crops.0.png",
        "crops.1.bin",
        "a_b.mask.png",
        "json",
    }
    assert packed["row-000000001"]["crops.0.png"] == picture(1)
    assert packed["row-000000001"]["crops.1.bin"] == b"\xff\xd8 no"
    assert packed["row-000000001"]["a_b.mask.png"] == picture(2)
    assert json.loads(packed["row-000000001"]["json"]) == {
        "crops": ["crops.0.png", "crops.1.bin"],
        "a/b": {"mask": "a_b.mask.png", "n": 1},
    }
    assert set(packed["row-000000002"]) == {"png", "a_b.mask.png", "json"}


def test_columns_of_bytes_that_would_be_one_field_are_refused(tmp_path: Path) -> None:
    frame = pandas.DataFrame({"image": [picture(0)], "Mask": [picture(1)], "mask": [picture(2)]})
    with pytest.raises(
        SourceError,
        match="two of its columns would be one field: png, mask.png, mask.png; rename one",
    ):
        wt.convert_table(frame, tmp_path / "out", image="image", on_error="skip")


def test_values_that_text_cannot_represent_are_refused(tmp_path: Path) -> None:
    cells = [
        Decimal("1.10"),
        datetime.datetime(2024, 1, 2, 3),
        Path("a/b"),
        np.datetime64("2024-01-02"),
        bytearray(b"\0x"),
    ]
    frame = pandas.DataFrame(
        {"image": [picture(n) for n in range(5)], "x": pandas.Series(cells, dtype=object)}
    )
    wt.convert_table(frame, tmp_path / "out", image="image")
    packed = read(tmp_path / "out")
    assert [json.loads(packed[f"row-00000000{n}"]["json"])["x"] for n in range(1, 5)] == [
        "1.10",
        "2024-01-02 03:00:00",
        "a/b",
        "2024-01-02",
    ]
    assert packed["row-000000005"]["x.bin"] == b"\0x"
    for odd in (object(), {1, 2}, 1j, Image.new("L", (2, 2))):
        frame = pandas.DataFrame({"image": [picture(0)], "x": pandas.Series([odd], dtype=object)})
        with pytest.raises(UsageError, match=f"a cell of the table is {type(odd).__name__}"):
            wt.convert_table(frame, tmp_path / "odd", image="image")


def test_blanks_at_the_beginning_of_a_cell_are_kept_inside_quotes(
    folder: Path, tmp_path: Path
) -> None:
    def texts(text: str) -> list[str]:
        (folder / "t.csv").write_text(text)
        wt.convert_table(
            folder / "t.csv", tmp_path / "out", image="file", shuffle=False, overwrite=True
        )
        return [
            json.loads(fields["json"])["said"]
            for _, fields in sorted(read(tmp_path / "out").items())
        ]

    assert texts('file,said\nIMG/0.png,  a\n IMG/1.png," ""b"" "\n') == ["a", ' "b" ']
    assert texts('file, said\nIMG/0.png, "a, b"\nIMG/1.png, c\n') == ["a, b", "c"]


def test_a_table_may_come_through_a_pipe(folder: Path, tmp_path: Path) -> None:
    os.mkfifo(folder / "t.csv")
    with ThreadPoolExecutor(1) as pool:
        pool.submit((folder / "t.csv").write_text, "file,y\nIMG/0.png,a\nIMG/1.png,b\n")
        index = wt.convert_table(folder / "t.csv", tmp_path / "out", image="file", label="y")
    assert (len(index), index.labels[0].classes) == (2, ("a", "b"))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("file,y\nIMG/0.png,caf\u00e9\n".encode("latin-1"), "is not UTF-8: see line 2"),
        (
            "file,y\rIMG/0.png,a\rIMG/1.png,caf\u00e9\r".encode("latin-1"),
            "is not UTF-8: see line 3",
        ),
        ("file,y\nIMG/0.png,a\n".encode("utf-16"), "is not UTF-8: see line 1"),
    ],
)
def test_a_csv_that_is_not_utf_8_is_refused_with_its_line(
    folder: Path, data: bytes, message: str
) -> None:
    (folder / "t.csv").write_bytes(data)
    with pytest.raises(
        SourceError,
        match=f"t.csv {message}. A table must be UTF-8. Save it as UTF-8, or give its encoding",
    ):
        wt.convert_table(folder / "t.csv", folder / "out", image="file", label="y")


def test_an_object_with_a_repeated_key_is_a_bad_row(folder: Path) -> None:
    rows = [
        '{"file": "IMG/0.png", "y": 0}',
        '{"file": "IMG/1.png", "y": 0, "y": 1}',
        '{"file": "IMG/2.png", "y": 1, "z": {"a": 1, "a": 2}}',
    ]
    (folder / "t.jsonl").write_text("\n".join(rows))
    index = wt.convert_table(
        folder / "t.jsonl", folder / "out", image="file", label="y", on_error="skip"
    )
    assert len(index) == 1
    reasons = bad_rows(folder / "out")
    assert set(reasons) == {2, 3}
    assert "names 'y' twice" in reasons[2]
    assert "names 'a' twice" in reasons[3]


@pytest.mark.parametrize(
    ("encoding", "message"), [("latin-1", "see line 2"), ("utf-16", "see line 1")]
)
def test_json_lines_that_are_not_utf_8_are_refused_with_their_line(
    folder: Path, encoding: str, message: str
) -> None:
    rows = '{"file": "IMG/0.png", "y": "a"}\n{"file": "IMG/1.png", "y": "\u00e9"}\n'
    (folder / "t.jsonl").write_text(rows, encoding)
    with pytest.raises(
        SourceError, match=f"t.jsonl is not UTF-8: {message}. A table must be UTF-8."
    ):
        wt.convert_table(folder / "t.jsonl", folder / "out", image="file", on_error="skip")
    (folder / "t.jsonl").write_text(rows, "utf-8-sig")
    assert len(wt.convert_table(folder / "t.jsonl", folder / "out", image="file")) == 2


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


def test_similar_split_names_are_printed_and_not_merged(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = table(
        folder,
        [[f"IMG/{n}.png", ["val", "Val ", "train"][n % 3]] for n in range(6)],
        ("file", "part"),
    )
    words = ["convert", "table", file, str(folder / "out"), "--image", "file", "--split-by", "part"]
    main(words)
    assert (
        "split part: the splits 'val' and 'Val' look alike" in capsys.readouterr().err.splitlines()
    )
    assert set(wt.info(folder / "out").splits) == {"train", "val", "Val"}


def test_non_finite_numbers_outside_labels_are_counted_and_printed(folder: Path) -> None:
    nan, inf = float("nan"), float("inf")
    cells: dict[str, list[Any]] = {
        "file": [f"IMG/{n}.png" for n in range(6)],
        "y": [0.5, 1.5, 2.5, 3.5, 4.5, 5.5],
        "depth": [nan, 1.0, nan, inf, -inf, 2.0],
        "box": [[nan, 1.0], [2.0, inf], [inf, 0.0], None, [1.0, 2.0], [1.0, 2.0]],
        "n": [1, 2, 3, 4, 5, 6],
    }
    expected = [
        "column depth: NaN became null in json (2 values)",
        "column depth: inf became the text 'inf' in json (1 value)",
        "column depth: -inf became the text '-inf' in json (1 value)",
        "column box: NaN became null in json (1 value)",
        "column box: inf became the text 'inf' in json (2 values)",
    ]
    pyarrow.parquet.write_table(pyarrow.table(cells), folder / "t.parquet")
    rows = [{name: values[n] for name, values in cells.items()} for n in range(6)]
    (folder / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for source in (folder / "t.parquet", folder / "t.jsonl", pandas.DataFrame(cells)):
        index = wt.convert_table(
            source, folder / "out", image="file", label="y", root=folder, overwrite=True
        )
        assert [
            line for line in index.info["source"]["decided"] if line.startswith("column")
        ] == expected
    assert json.loads(read(folder / "out")["IMG/3"]["json"])["depth"] == "inf"
