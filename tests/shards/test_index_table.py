"""The index as an Arrow table: readable by other programs, and equal to the shards."""

from __future__ import annotations

import json
import shutil
import zlib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import wdstrain as wt
from tests.conftest import ROOT, write_tar
from wdstrain.errors import ShardError

KINDS = ["Other", "Pants", "Shirts"]


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """40 samples in four shards with every kind of column; every fifth has no text."""
    samples = []
    for number in range(40):
        entries: dict[str, Any] = {
            "kind": KINDS[number % 3],
            "kids": number % 4 == 0,
            "price": number / 4,
            "year": 2000 + number,
            "tags": ["a", "b"][: number % 3],
            "code": f"{number:05d}",
            "story": "x" * (300 if number == 7 else 3),
        }
        sample = {"__key__": f"k{number:03d}", "bin": bytes(number), "cls": number % 2}
        samples.append(sample | {"json": entries} | ({"txt": "t"} if number % 5 else {}))
    labels = [wt.Label("kind", "class", "json", "kind", tuple(KINDS))]
    out = tmp_path / "out"
    wt.pack(samples, str(out), shuffle=False, labels=labels, max_shard_samples=10)
    return out


def arrow_file(folder: Path) -> pa.Table:
    with pa.BufferReader((folder / "index.arrow").read_bytes()) as source:
        return pa.ipc.open_file(source).read_all()


def test_offsets_and_checksums_are_those_of_the_bytes(packed: Path) -> None:
    table = wt.open(packed).table
    assert table.equals(arrow_file(packed))
    assert table["kind"].chunk(0).dictionary.to_pylist() == KINDS
    assert "story" not in table.column_names, "one of its texts is long"
    for row in table.to_pylist():
        data = (packed / row["shard"]).read_bytes()
        assert row["offset"] + row["size"] <= len(data)
        number = int(row["key"][1:])
        content = data[row["bin.offset"] :][: row["bin.size"]]
        assert content == bytes(number)
        assert (row["bin.crc32"] or 0) == zlib.crc32(content)
        assert (row["txt.offset"] is None) == (number % 5 == 0)


def test_other_programs_open_the_index(packed: Path) -> None:
    """A guide that names DuckDB shows the lines that work, or `from 'index.arrow'` does."""
    pandas, polars, duckdb = map(pytest.importorskip, ("pandas", "polars", "duckdb"))
    sizes = wt.open(packed).to_pandas().groupby("kind", observed=True).size()
    assert sizes.to_dict() == {"Other": 14, "Pants": 13, "Shirts": 13}
    assert len(pandas.read_feather(packed / "index.arrow")) == 40
    frame = polars.read_ipc(packed / "index.arrow")
    assert frame.filter(polars.col("year") > 2029).height == 10
    opened = arrow_file(packed)
    rows = duckdb.sql("select count(*) from opened where price >= 5 and kind = 'Pants'").fetchall()
    assert (len(opened), rows) == (40, [(6,)])
    pages = [page.read_text() for page in (ROOT / "docs").glob("*.md")]
    claims = [text for text in pages if "DuckDB" in text and "import duckdb" not in text]
    try:
        opens = bool(duckdb.sql(f"select * from '{packed / 'index.arrow'}'"))
    except duckdb.Error:
        opens = False
    assert opens or not claims


def test_joined_sets_with_equal_shard_names_are_a_data_frame(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    for name in "ab":
        samples = ({"__key__": f"{name}{n}", "cls": n % 2} for n in range(4))
        wt.pack(samples, tmp_path / name, shuffle=False)
    index = wt.open([tmp_path / "a", tmp_path / "b"]).where("cls == 1")
    for frame in (index.to_pandas(), index.table.to_pandas()):
        assert frame.key.tolist() == ["a1", "a3", "b1", "b3"]
        assert all("train-000000.tar" in shard for shard in frame.shard)


def test_indexing_again_reads_the_columns_of_shards_that_changed(packed: Path) -> None:
    before = wt.open(packed).table
    names = sorted(path.name for path in packed.glob("*.tar"))
    rows = [
        (f"new{n}", {"json": json.dumps({"kind": "Pants", "price": n}).encode(), "cls": b"1"})
        for n in range(4)
    ]
    write_tar(packed / names[1], rows)
    wt.index(packed)
    after = wt.open(packed).table
    assert after["key"].to_pylist()[:10] == before["key"].to_pylist()[:10]
    new = after.slice(10, 4).to_pylist()
    assert [row["kind"] for row in new] == ["Pants"] * 4
    assert [row["price"] for row in new] == [0.0, 1.0, 2.0, 3.0]
    assert [row["year"] for row in new] == [None] * 4
    assert after["code"].to_pylist()[14:] == before["code"].to_pylist()[20:]


def test_a_table_of_other_shards_or_with_other_columns_is_refused(packed: Path) -> None:
    intact = arrow_file(packed)
    good = shutil.copy(packed / "index.arrow", packed.parent)
    place = intact.column_names.index("bin.size")
    for table, message in (
        (intact.slice(0, 39), "number of samples"),
        (intact.drop_columns("price"), "column"),
        (intact.take(list(range(39, -1, -1))), "order of their shard"),
        (intact.set_column(2, "offset", pa.array([-512] + [0] * 39)), "outside its shard"),
        (intact.set_column(place, "bin.size", intact["size"]), "a field lies outside its sample"),
    ):
        with pa.ipc.new_file(packed / "index.arrow", table.schema) as writer:
            writer.write_batch(table.combine_chunks().to_batches()[0])
        with pytest.raises(ShardError, match=message):
            wt.open(packed)
    shutil.copy(good, packed / "index.arrow")
    assert len(wt.open(packed)) == 40


@pytest.mark.parametrize(
    ("prices", "kind"),
    [
        (["nan", "inf", 1.5, 4, 7, "-inf"], "number"),
        (["nan", "inf", "nan", "nan", "-inf", "nan"], "text"),  # "nan" and "inf" may also be names
        (["nan", "inf", True, False, True, True], "text"),
    ],
)
def test_the_kind_of_a_column_does_not_depend_on_the_shards(
    tmp_path: Path, prices: list[Any], kind: str
) -> None:
    samples = [{"__key__": f"s{i}", "json": {"price": price}} for i, price in enumerate(prices)]
    sets = []
    for name, most in (("one", 6), ("three", 2)):
        out = str(tmp_path / name)
        packed = wt.pack(samples, out, max_shard_samples=most, shuffle=False)
        for index in (packed, wt.open(out), wt.index(out, columns=["json.price"])):
            (column,) = index.columns
            assert column.kind == kind
            sets.append([str(value) for value in column.values.to_pylist()])
        assert wt.verify(out).ok
    assert sets == [sets[0]] * 6
    if kind == "number":
        above = sum(float(price) > 3 for price in prices)
        assert len(wt.open(tmp_path / "three").where("price > 3")) == above


def test_numbers_and_texts_stored_as_fields_stay_columns_when_repacked(tmp_path: Path) -> None:
    samples = (
        {
            "__key__": f"{n:03d}",
            "price": float("nan") if n == 3 else n / 4,
            "sender": f"anna{n % 3}",
        }
        for n in range(40)
    )
    wt.pack(samples, tmp_path / "set", max_shard_samples=7)
    wt.convert_tars(tmp_path / "set", tmp_path / "again", where="price > 4")
    for folder, count in (("set", 13), ("again", 7)):
        index = wt.open(tmp_path / folder)
        kinds = {column.name: column.kind for column in index.columns}
        assert kinds == {"price": "number", "sender": "text"}
        assert len(index.where("sender == 'anna1' and price >= 0")) == count
        assert wt.verify(tmp_path / folder).ok
