"""Tables as other tools write them: frames, partitions, leftovers, dialects, file formats, dates."""

from __future__ import annotations

import decimal
import gzip
import io
import json
from collections.abc import Callable
from typing import Any

import duckdb
import pandas
import polars
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest

from tests.conftest import picture
from tests.support.tables import Tables, attempt, read_json, read_members, write_table
from wdstrain.errors import UsageError

FILES_OF_ROWS = [f"IMG/{n}.png" for n in range(3)]
ROWS = pa.table({"file": FILES_OF_ROWS, "kind": ["cat", "dog", "cat"]})


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
    tables: Tables, name: str
) -> None:
    frame = FRAMES[name](ROWS)
    result = attempt(lambda: tables.convert(frame, label="kind", root=tables.folder))
    assert isinstance(result, str) == (name in REFUSED)
    if isinstance(result, str):
        assert "DataFrame" in result
        assert "Arrow" in result
    else:
        packed = tables.samples
        assert [packed[f"IMG/{n}"]["cls"] for n in range(3)] == [b"0", b"1", b"0"]


@pytest.mark.parametrize("form", ["parquet", "csv", "jsonl"])
@pytest.mark.parametrize("pattern", ["", "*/*/*"])
def test_partition_folders_are_columns(tables: Tables, form: str, pattern: str) -> None:
    """Also if they are nested, encoded or without a value."""
    partitions = ["year=2024/kind=a%2Fb", "year=2024/kind=cat"]
    partitions += ["year=2025/kind=__HIVE_DEFAULT_PARTITION__"]
    for number, partition in enumerate(partitions):
        path = tables.folder / "t" / partition / "part"
        write_table(path, form, file=[f"IMG/{number}.png"], n=[number])
    index = tables(tables.folder / "t" / pattern, label=["year:class", "n"], root=tables.folder)
    rows = sorted(read_json(tables.out), key=lambda row: int(row["n"]))
    years = [(str(row.get("year")), row.get("kind")) for row in rows]
    assert years == [("2024", "a/b"), ("2024", "cat"), ("2025", None)]
    assert index.labels[0].classes == ("2024", "2025")


LEFTOVERS = ["_temporary/0/attempt_0/part-1", "_part-1", ".hidden/part-1", "__MACOSX/._part-1"]


@pytest.mark.parametrize("form", ["parquet", "csv", "jsonl"])
def test_leftovers_of_other_programs_beside_tables_are_not_packed(
    tables: Tables, form: str
) -> None:
    folder = tables.folder / "t"
    write_table(folder / "part-0", form, file=["IMG/0.png", "IMG/1.png"], n=[0, 1])
    for leftover in LEFTOVERS:
        write_table(folder / leftover, form, file=["IMG/0.png", "IMG/2.png"], n=[0, 2])
    (folder / "_SUCCESS").touch()
    tables(folder, root=tables.folder)
    assert set(tables.samples) == {"IMG/0", "IMG/1"}


def _arrow_bytes(rows: pa.Table, writer: Callable[..., Any]) -> bytes:
    sink = io.BytesIO()
    with writer(sink, rows.schema) as opened:
        opened.write_table(rows)
    return sink.getvalue()


def _written(write: Callable[[io.BytesIO], object]) -> bytes:
    sink = io.BytesIO()
    write(sink)
    return sink.getvalue()


_LISTED = ("array", "json lines")
_COMPRESSED = ("compress", "unpack", "gzip", "zip archive")
_CSV = ROWS.to_pandas().to_csv(index=False).encode()
_PARQUET = _written(lambda sink: pyarrow.parquet.write_table(ROWS, sink))
_FEATHER = _written(lambda sink: pyarrow.feather.write_feather(ROWS, sink))
_LINES = "".join(json.dumps(row, indent=1) + "\n" for row in ROWS.to_pylist()).encode()

# file name -> (bytes of a table in this form, words that name the form)
FILES: dict[str, tuple[bytes, tuple[str, ...]]] = {
    "array.json": (json.dumps(ROWS.to_pylist(), indent=1).encode(), _LISTED),
    "pretty.jsonl": (_LINES, ("json lines", "one line", "each line")),
    "pandas.json": (ROWS.to_pandas().to_json().encode(), ("json lines", "orient", "records")),
    "stream.arrow": (_arrow_bytes(ROWS, pa.ipc.new_stream), ("arrow",)),
    "file.arrow": (_arrow_bytes(ROWS, pa.ipc.new_file), ("arrow",)),
    "rows.feather": (_FEATHER, ("arrow", "feather")),
    "parquet.csv": (_PARQUET, ("parquet",)),
    "lines.csv": (b'{"file": "IMG/0.png", "kind": "cat"}\n' * 3, ("json",)),
    "rows.xls": (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(504), ("excel", "spreadsheet")),
    "rows.db": (b"SQLite format 3\0" + bytes(84), ("sqlite",)),
    "rows.csv.gz": (gzip.compress(_CSV), _COMPRESSED),
    "gzip.csv": (gzip.compress(_CSV), _COMPRESSED),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_in_another_form_is_read_or_its_form_is_named(tables: Tables, name: str) -> None:
    data, words = FILES[name]
    path = tables.folder / name
    path.write_bytes(data)
    result = attempt(lambda: tables(path, label="kind"))
    if isinstance(result, str):
        message = result.replace(str(path), "").lower()
        accepted = all(form in message for form in ("csv", "jsonl", "parquet"))
        assert accepted or any(word in message for word in words)
    else:
        assert len(result) == 3


# name -> (text, encoding, option that reads it, text of the caption column)
DIALECTS: dict[str, tuple[str, str, dict[str, str], str]] = {
    "quotes escaped by backslashes": (
        'file,said\nIMG/0.png,"a 2\\" nail, bent"\n', "utf-8", {"escape": "\\"}, 'a 2" nail, bent'
    ),
    "line that names the delimiter": ("sep=;\nfile;said\nIMG/0.png;a, b\n", "utf-8", {}, "a, b"),
    "Windows code page": (
        "file,said\nIMG/0.png,K\u00e4se\n", "cp1252", {"encoding": "cp1252"}, "K\u00e4se"
    ),
    "UTF-16": ("file,said\nIMG/0.png,K\u00e4se\n", "utf-16", {"encoding": "utf-16"}, "K\u00e4se"),
    "bars": ("file|said\nIMG/0.png|a, b\n", "utf-8", {"delimiter": "|"}, "a, b"),
    "tabs in a .csv": ("file\tsaid\nIMG/0.png\ta, b\n", "utf-8", {"delimiter": "\t"}, "a, b"),
}  # fmt: skip


@pytest.mark.parametrize("name", DIALECTS)
def test_a_dialect_of_text_tables_is_read_or_the_error_names_the_option(
    tables: Tables, name: str
) -> None:
    text, encoding, option, said = DIALECTS[name]
    path = tables.folder / "t.csv"
    path.write_bytes(text.encode(encoding))
    result = attempt(lambda: tables(path))
    if isinstance(result, str):
        assert option
        assert all(name in result for name in option)
        tables(path, **option)
    assert tables.entries("said") == {"IMG/0": said}


def test_decimal_commas_are_read_by_an_option(tables: Tables) -> None:
    rows = ["file;angle;said", *(f"IMG/{n}.png;{n},5;a,{n}" for n in range(6))]
    with pytest.raises(UsageError, match=r"'angle' holds '0,5' .*decimal=','"):
        tables("\n".join(rows), label="angle")
    index = tables("\n".join(rows), label="angle", decimal=",")
    assert index.labels[0].kind == "number"
    assert tables.entries("angle") == {f"IMG/{n}": n + 0.5 for n in range(6)}
    assert tables.entries("said") == {f"IMG/{n}": f"a,{n}" for n in range(6)}


def test_a_sign_makes_a_number_and_no_flag(tables: Tables) -> None:
    index = tables("\n".join(["file,n,said", *(f"IMG/{n}.png,+{n},+true" for n in range(3))]))
    assert sorted(index.table["n"].to_pylist()) == [0, 1, 2]
    assert index.table["said"].to_pylist() == ["+true"] * 3


def test_a_column_becomes_the_caption(tables: Tables) -> None:
    said = ["a dog", "", 'K\u00e4se, 2 "pieces"']
    table = {"file": FILES_OF_ROWS, "said": said, "n": [1, 2, 3]}
    assert tables.command(table, "--text", "said") == 0
    packed = tables.samples
    assert packed["IMG/0"]["txt"] == b"a dog"
    assert "txt" not in packed["IMG/1"]
    assert packed["IMG/2"]["txt"].decode() == said[2]
    assert json.loads(packed["IMG/2"]["json"]) == {"n": 3}


@pytest.mark.parametrize("writer", [pa.ipc.new_stream, pa.ipc.new_file])
def test_a_folder_of_arrow_files_with_class_names_is_packed(
    tables: Tables, writer: Callable[..., Any]
) -> None:
    """As `save_to_disk` of Hugging Face writes it: a folder for each split."""
    names = {"info": {"features": {"kind": {"names": ["cat", "dog"], "_type": "ClassLabel"}}}}
    for number, split in enumerate(("train", "test")):
        rows = pa.table({"image": [picture(2 * number + n) for n in range(2)], "kind": [1, 0]})
        folder = tables.folder / "t" / split
        folder.mkdir(parents=True)
        rows = rows.replace_schema_metadata({"huggingface": json.dumps(names)})
        (folder / "data-00000-of-00001.arrow").write_bytes(_arrow_bytes(rows, writer))
        (folder / "dataset_info.json").write_text("{}")
    index = tables(tables.folder / "t", image="image", label="kind")
    assert index.labels[0].classes == ("cat", "dog")
    assert {shard.split: shard.samples for shard in index.shards} == {"train": 2, "test": 2}
    members = read_members(tables.out)
    key = "test/data-00000-of-00001/row-000000001"
    assert (members[f"{key}.png"], members[f"{key}.cls"]) == (picture(2), b"1")


_DATE = pa.array([0, 3_000_000, 0], pa.int32()).cast(pa.date32())  # the year 10183


def _times(kind: pa.DataType, value: int) -> pa.Array:
    return pa.array([0, value, 0], pa.int64()).cast(kind)


VALUES: dict[str, pa.Array] = {
    "date": _DATE,
    "date before the year 1": pa.array([0, -3_000_000, 0], pa.int32()).cast(pa.date32()),
    "seconds": _times(pa.timestamp("s"), 2**50),
    "microseconds": _times(pa.timestamp("us"), 2**60),
    "duration": _times(pa.duration("s"), 2**53),
    "list of dates": pa.ListArray.from_arrays([0, 1, 2, 3], _DATE),
    "struct of dates": pa.StructArray.from_arrays([_DATE], ["until"]),
    "nanoseconds": _times(pa.timestamp("ns"), 1),
    "wide decimal": pa.array([decimal.Decimal("1" * 50)] * 3, pa.decimal256(60, 2)),
    "unsigned": pa.array([1, 2**64 - 1, 3], pa.uint64()),
}


@pytest.mark.parametrize("name", [*VALUES, "frame"])
def test_a_value_beyond_pythons_types_is_stored_or_a_bad_sample(tables: Tables, name: str) -> None:
    if name == "frame":
        times = pandas.arrays.ArrowExtensionArray(VALUES["microseconds"])
        index = tables(pandas.DataFrame({"file": FILES_OF_ROWS, "until": times}), on_error="skip")
    else:
        index = tables({"file": FILES_OF_ROWS, "until": VALUES[name]}, "parquet", on_error="skip")
    assert len(index) + index.info["skipped"] == 3
    assert len(index) >= 2
