"""Tables as other tools write them: frames, partitions, leftovers, dialects, file formats, dates."""

from __future__ import annotations

import bz2
import decimal
import gzip
import io
import json
import lzma
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas
import polars
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest

import wdstrain as wt
from tests.conftest import picture
from tests.support.tables import attempt, read_json, read_members, write_images, write_table
from wdstrain.cli.main import main
from wdstrain.errors import UsageError


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("images"), 6)


# --- objects of other libraries ---


class ArrowStream:
    """An object that offers a table by Arrow's interface alone."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self._table.__arrow_c_stream__(requested_schema)


REFUSED = ("polars.LazyFrame", "dict of columns")
FRAMES: dict[str, Callable[[pa.Table], Any]] = {
    "polars.DataFrame": polars.from_arrow,
    "polars.LazyFrame": lambda table: polars.LazyFrame(table.to_pydict()),
    "list of dicts": pa.Table.to_pylist,
    "pandas.DataFrame": pa.Table.to_pandas,
    "pyarrow.Table": lambda table: table,
    "pyarrow.RecordBatch": lambda table: table.to_batches()[0],
    "pyarrow.RecordBatchReader": pa.Table.to_reader,
    "Arrow stream": ArrowStream,
    "duckdb": lambda table: duckdb.from_arrow(table),
    "dict of columns": pa.Table.to_pydict,
}


@pytest.mark.parametrize("name", FRAMES)
def test_a_table_object_is_packed_or_the_error_names_what_is_accepted(
    tmp_path: Path, images: Path, name: str
) -> None:
    table = pa.table({"file": [f"{n}.png" for n in range(3)], "kind": ["cat", "dog", "cat"]})
    frame = FRAMES[name](table)
    result = attempt(
        lambda: wt.convert_table(frame, tmp_path / "out", image="file", label="kind", root=images)
    )
    assert isinstance(result, str) == (name in REFUSED)
    if isinstance(result, str):
        assert "DataFrame" in result
        assert "Arrow" in result
    else:
        members = read_members(tmp_path / "out")
        assert [members[f"{n}.cls"] for n in range(3)] == [b"0", b"1", b"0"]


# --- folders of tables ---


@pytest.mark.parametrize("form", ["parquet", "csv", "jsonl"])
@pytest.mark.parametrize("pattern", ["", "*/*"])
def test_partition_folders_are_columns(
    tmp_path: Path, images: Path, form: str, pattern: str
) -> None:
    for number, kind in enumerate(["cat", "dog", "cat"]):
        path = tmp_path / "t" / f"kind={kind}" / f"part-{number}"
        write_table(path, form, file=[f"{number}.png"], n=[number])
    result = attempt(
        lambda: wt.convert_table(
            tmp_path / "t" / pattern,
            tmp_path / "out",
            image="file",
            label=["kind", "n"],
            root=images,
        )
    )
    assert not isinstance(result, str), result
    assert sorted((row["n"], row["kind"]) for row in read_json(tmp_path / "out")) == [
        (0, "cat"),
        (1, "dog"),
        (2, "cat"),
    ]
    assert result.labels[0].classes == ("cat", "dog")


def test_partitions_may_be_nested_encoded_or_without_a_value(tmp_path: Path, images: Path) -> None:
    partitions = ["year=2024/kind=a%2Fb", "year=2024/kind=cat"]
    partitions += ["year=2025/kind=__HIVE_DEFAULT_PARTITION__"]
    for number, partition in enumerate(partitions):
        write_table(
            tmp_path / "t" / partition / "part", "parquet", file=[f"{number}.png"], n=[number]
        )
    wt.convert_table(tmp_path / "t", tmp_path / "out", image="file", root=images)
    rows = sorted(read_json(tmp_path / "out"), key=lambda row: int(row["n"]))
    assert [(str(row.get("year")), row.get("kind")) for row in rows] == [
        ("2024", "a/b"),
        ("2024", "cat"),
        ("2025", None),
    ]


@pytest.mark.parametrize("form", ["parquet", "csv", "jsonl"])
@pytest.mark.parametrize(
    "leftover",
    [
        "_temporary/0/attempt_0/part-1",
        "_delta_log/part-1",
        "_part-1",
        ".hidden/part-1",
        ".ipynb_checkpoints/part-1-checkpoint",
        "__MACOSX/._part-1",
        ".part-1",
    ],
)
def test_leftovers_of_other_programs_beside_tables_are_not_packed(
    tmp_path: Path, images: Path, form: str, leftover: str
) -> None:
    write_table(tmp_path / "t" / "part-0", form, file=["0.png", "1.png"], n=[0, 1])
    write_table(tmp_path / "t" / leftover, form, file=["0.png", "2.png"], n=[0, 2])
    (tmp_path / "t" / "_SUCCESS").touch()
    index = wt.convert_table(tmp_path / "t", tmp_path / "out", image="file", root=images)
    assert [index.key(n).rpartition("/")[2] for n in range(len(index))] in (["0", "1"], ["1", "0"])


# --- file formats ---


def _csv_bytes(rows: pa.Table) -> bytes:
    lines = [
        ",".join(rows.column_names),
        *map(",".join, zip(*rows.to_pydict().values(), strict=True)),
    ]
    return ("\n".join(lines) + "\n").encode()


def _arrow_bytes(rows: pa.Table, writer: Callable[..., Any]) -> bytes:
    sink = io.BytesIO()
    with writer(sink, rows.schema) as opened:
        opened.write_table(rows)
    return sink.getvalue()


def _feather_bytes(rows: pa.Table) -> bytes:
    sink = io.BytesIO()
    pyarrow.feather.write_feather(rows, sink)
    return sink.getvalue()


def _parquet_bytes(rows: pa.Table) -> bytes:
    sink = io.BytesIO()
    pyarrow.parquet.write_table(rows, sink)
    return sink.getvalue()


def _numpy_bytes(save: Callable[..., None]) -> bytes:
    sink = io.BytesIO()
    save(sink, np.arange(3))
    return sink.getvalue()


def _zip_bytes(name: str, data: bytes) -> bytes:
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w") as archive:
        archive.writestr(name, data)
    return sink.getvalue()


_COMPRESSED = ("compress", "unpack", "gzip", "zip archive")
_OLE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(504)  # the first bytes of .xls

# file name -> (bytes of a table in this form, words that name the form)
FILES: dict[str, tuple[Callable[[pa.Table], bytes], tuple[str, ...]]] = {
    "array.json": (lambda rows: json.dumps(rows.to_pylist()).encode(), ("array", "json lines")),
    "indented.json": (
        lambda rows: json.dumps(rows.to_pylist(), indent=1).encode(),
        ("array", "json lines"),
    ),
    "pretty.jsonl": (
        lambda rows: "\n".join(json.dumps(row, indent=1) for row in rows.to_pylist()).encode(),
        ("json lines", "one line", "each line"),
    ),
    "pandas.json": (
        lambda rows: str(rows.to_pandas().to_json()).encode(),
        ("json lines", "orient", "records"),
    ),
    "stream.arrow": (lambda rows: _arrow_bytes(rows, pa.ipc.new_stream), ("arrow",)),
    "file.arrow": (lambda rows: _arrow_bytes(rows, pa.ipc.new_file), ("arrow",)),
    "rows.feather": (_feather_bytes, ("arrow", "feather")),
    "parquet.csv": (_parquet_bytes, ("parquet",)),
    "lines.csv": (
        lambda rows: "".join(json.dumps(row) + "\n" for row in rows.to_pylist()).encode(),
        ("json",),
    ),
    "rows.npz": (lambda rows: _numpy_bytes(np.savez), ("numpy", "arrays")),
    "rows.npy": (lambda rows: _numpy_bytes(np.save), ("numpy", "arrays")),
    "rows.xlsx": (lambda rows: _zip_bytes("xl/workbook.xml", b"<x/>"), ("excel", "spreadsheet")),
    "rows.xls": (lambda rows: _OLE, ("excel", "spreadsheet")),
    "rows.db": (lambda rows: b"SQLite format 3\0" + bytes(84), ("sqlite",)),
    "rows.avro": (lambda rows: b"Obj\x01\x04\x16avro.schema\x02{}" + bytes(50), ("avro",)),
    "rows.orc": (lambda rows: b"ORC" + bytes(100), ("orc",)),
    "rows.csv.gz": (lambda rows: gzip.compress(_csv_bytes(rows)), _COMPRESSED),
    "gzip.csv": (lambda rows: gzip.compress(_csv_bytes(rows)), _COMPRESSED),
    "rows.csv.bz2": (lambda rows: bz2.compress(_csv_bytes(rows)), _COMPRESSED),
    "rows.csv.xz": (lambda rows: lzma.compress(_csv_bytes(rows)), _COMPRESSED),
    "rows.zip": (lambda rows: _zip_bytes("rows.csv", _csv_bytes(rows)), _COMPRESSED),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_file_in_another_form_is_read_or_its_form_is_named(
    tmp_path: Path, images: Path, name: str
) -> None:
    encode, words = FILES[name]
    rows = pa.table({"file": [f"{n}.png" for n in range(3)], "kind": ["cat", "dog", "cat"]})
    (tmp_path / name).write_bytes(encode(rows))
    result = attempt(
        lambda: wt.convert_table(
            tmp_path / name, tmp_path / "out", image="file", label="kind", root=images
        )
    )
    if isinstance(result, str):
        message = result.replace(str(tmp_path / name), "").lower()
        accepted = all(form in message for form in ("csv", "jsonl", "parquet"))
        assert accepted or any(word in message for word in words)
    else:
        assert len(result) == 3


# --- dialects of text tables ---

# name -> (text after the file name, encoding, option that reads it, text of the caption column)
DIALECTS: dict[str, tuple[str, str, dict[str, str], str]] = {
    "quotes escaped by backslashes": (
        'file,said\n{},"a 2\\" nail, bent"\n',
        "utf-8",
        {"escape": "\\"},
        'a 2" nail, bent',
    ),
    "line that names the delimiter": ("sep=;\nfile;said\n{};a, b\n", "utf-8", {}, "a, b"),
    "Windows code page": ("file,said\n{},K\u00e4se\n", "cp1252", {"encoding": "cp1252"}, "K\u00e4se"),
    "UTF-16": ("file,said\n{},K\u00e4se\n", "utf-16", {"encoding": "utf-16"}, "K\u00e4se"),
    "bars": ("file|said\n{}|a, b\n", "utf-8", {"delimiter": "|"}, "a, b"),
    "tabs in a .csv": ("file\tsaid\n{}\ta, b\n", "utf-8", {"delimiter": "\t"}, "a, b"),
}  # fmt: skip


@pytest.mark.parametrize("name", DIALECTS)
def test_a_dialect_of_text_tables_is_read_or_the_error_names_the_option(
    tmp_path: Path, images: Path, name: str
) -> None:
    text, encoding, option, said = DIALECTS[name]
    (tmp_path / "t.csv").write_bytes(text.format("0.png").encode(encoding))

    def convert(**options: Any) -> wt.Index:
        return wt.convert_table(
            tmp_path / "t.csv", tmp_path / "out", image="file", root=images, **options
        )

    result = attempt(convert)
    if isinstance(result, str):
        assert option
        assert all(name in result for name in option)
        convert(**option)
    assert [row["said"] for row in read_json(tmp_path / "out")] == [said]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("delimiter", [",", ";"])
def test_common_dialects_need_no_option(
    tmp_path: Path, images: Path, encoding: str, newline: str, delimiter: str
) -> None:
    lines = ["file,said", '0.png,"K\u00e4se ""2"""', ""]
    text = newline.join(lines).replace(",", delimiter)
    (tmp_path / "t.csv").write_bytes(text.encode(encoding))
    wt.convert_table(tmp_path / "t.csv", tmp_path / "out", image="file", root=images)
    assert [row["said"] for row in read_json(tmp_path / "out")] == ['K\u00e4se "2"']


def test_decimal_commas_are_read_by_an_option(tmp_path: Path, images: Path) -> None:
    rows = ["file;angle;said", *(f"{n}.png;{n},5;a,{n}" for n in range(6))]
    (tmp_path / "t.csv").write_text("\n".join(rows))

    def convert(**options: Any) -> wt.Index:
        return wt.convert_table(
            tmp_path / "t.csv",
            tmp_path / "out",
            image="file",
            label="angle",
            root=images,
            **options,
        )

    with pytest.raises(UsageError, match=r"'angle' holds '0,5' .*decimal=','"):
        convert()
    index = convert(decimal=",")
    assert index.labels[0].kind == "number"
    assert sorted(index.table["angle"].to_pylist()) == [n + 0.5 for n in range(6)]
    assert sorted(row["said"] for row in read_json(tmp_path / "out")) == [
        f"a,{n}" for n in range(6)
    ]


def test_a_sign_makes_a_number_and_no_flag(tmp_path: Path, images: Path) -> None:
    rows = ["file,n,said", *(f"{n}.png,+{n},+true" for n in range(3))]
    (tmp_path / "t.csv").write_text("\n".join(rows))
    index = wt.convert_table(tmp_path / "t.csv", tmp_path / "out", image="file", root=images)
    assert sorted(index.table["n"].to_pylist()) == [0, 1, 2]
    assert index.table["said"].to_pylist() == ["+true"] * 3


def test_a_column_becomes_the_caption(tmp_path: Path, images: Path) -> None:
    said = ["a dog", "", 'K\u00e4se, 2 "pieces"']
    table = write_table(
        tmp_path / "t", "csv", file=[f"{n}.png" for n in range(3)], said=said, n=[1, 2, 3]
    )
    words = ["convert", "table", str(table), str(tmp_path / "out"), "--image", "file"]
    assert main([*words, "--root", str(images), "--text", "said"]) == 0
    members = read_members(tmp_path / "out")
    assert members["0.txt"] == b"a dog"
    assert "1.txt" not in members
    assert members["2.txt"].decode() == said[2]
    assert json.loads(members["2.json"]) == {"n": 3}


@pytest.mark.parametrize("writer", [pa.ipc.new_stream, pa.ipc.new_file])
def test_a_folder_of_arrow_files_with_class_names_is_packed(
    tmp_path: Path, writer: Callable[..., Any]
) -> None:
    """As `save_to_disk` of Hugging Face writes it: a folder for each split."""
    names = {"info": {"features": {"kind": {"names": ["cat", "dog"], "_type": "ClassLabel"}}}}
    for number, split in enumerate(("train", "test")):
        rows = pa.table({"image": [picture(2 * number + n) for n in range(2)], "kind": [1, 0]})
        folder = tmp_path / "t" / split
        folder.mkdir(parents=True)
        rows = rows.replace_schema_metadata({"huggingface": json.dumps(names)})
        (folder / "data-00000-of-00001.arrow").write_bytes(_arrow_bytes(rows, writer))
        (folder / "dataset_info.json").write_text("{}")
    index = wt.convert_table(tmp_path / "t", tmp_path / "out", image="image", label="kind")
    assert index.labels[0].classes == ("cat", "dog")
    assert {shard.split: shard.samples for shard in index.shards} == {"train": 2, "test": 2}
    members = read_members(tmp_path / "out")
    key = "test/data-00000-of-00001/row-000000001"
    assert (members[f"{key}.png"], members[f"{key}.cls"]) == (picture(2), b"1")


# --- values beyond Python's types ---

_DATE = pa.array([0, 3_000_000, 0], pa.int32()).cast(pa.date32())  # the year 10183


def _times(kind: pa.DataType, value: int) -> pa.Array:
    return pa.array([0, value, 0], pa.int64()).cast(kind)


VALUES: dict[str, pa.Array] = {
    "date": _DATE,
    "date before the year 1": pa.array([0, -3_000_000, 0], pa.int32()).cast(pa.date32()),
    "milliseconds as a date": _times(pa.date64(), 86_400_000 * 3_000_000),
    "seconds": _times(pa.timestamp("s"), 2**50),
    "negative milliseconds": _times(pa.timestamp("ms"), -(2**55)),
    "microseconds": _times(pa.timestamp("us"), 2**60),
    "microseconds in a time zone": _times(pa.timestamp("us", tz="UTC"), 2**60),
    "duration": _times(pa.duration("s"), 2**53),
    "list of dates": pa.ListArray.from_arrays([0, 1, 2, 3], _DATE),
    "struct of dates": pa.StructArray.from_arrays([_DATE], ["until"]),
    "nanoseconds": _times(pa.timestamp("ns"), 1),
    "duration in nanoseconds": _times(pa.duration("ns"), 1),
    "wide decimal": pa.array([decimal.Decimal("1" * 50)] * 3, pa.decimal256(60, 2)),
    "unsigned": pa.array([1, 2**64 - 1, 3], pa.uint64()),
}


def _write_far(path: Path, values: pa.Array) -> Path:
    table = pa.table({"image": [picture(n, size=(4, 4)) for n in range(3)], "until": values})
    pyarrow.parquet.write_table(table, path)
    return path


@pytest.mark.parametrize("name", VALUES)
def test_a_value_beyond_pythons_types_is_stored_or_a_bad_sample(tmp_path: Path, name: str) -> None:
    table = _write_far(tmp_path / "t.parquet", VALUES[name])
    index = wt.convert_table(table, tmp_path / "out", image="image", on_error="skip")
    assert len(index) + index.info["skipped"] == 3
    assert len(index) >= 2


@pytest.mark.parametrize(
    "options",
    [
        {"label": "until:class"},
        {"group_by": "until", "split": {"a": 0.5, "b": 0.5}},
        {"where": "until != '1970-01-01'"},
    ],
)
def test_a_far_date_that_decides_about_its_row_is_used_or_a_bad_sample(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    table = _write_far(tmp_path / "t.parquet", _DATE)
    result = attempt(
        lambda: wt.convert_table(table, tmp_path / "out", image="image", on_error="skip", **options)
    )
    assert "until" in result if isinstance(result, str) else len(result) >= 1


def test_far_times_in_a_data_frame_are_stored_or_bad_samples(tmp_path: Path) -> None:
    times = pandas.arrays.ArrowExtensionArray(VALUES["microseconds"])
    frame = pandas.DataFrame({"image": [picture(n, size=(4, 4)) for n in range(3)], "until": times})
    index = wt.convert_table(frame, tmp_path / "out", image="image", on_error="skip")
    assert len(index) + index.info["skipped"] == 3
