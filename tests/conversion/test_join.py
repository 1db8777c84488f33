"""Columns that join a finished set from a table."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

import wdstrain as wt
from tests.conftest import picture
from tests.support.servers import serving
from tests.support.tables import write_table
from wdstrain.cli import main
from wdstrain.errors import ShardError, SourceError, UsageError, WdstrainError

COUNT = 30
KINDS = ("cat", "dog", "owl")
Row = dict[str, Any]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A packed set, and one with all joined columns and two labels."""
    folder = tmp_path_factory.mktemp("sets")
    samples = (
        {"__key__": f"k{n:02d}", "png": picture(n), "json": {"n": n, "side": n % 2}}
        for n in range(COUNT)
    )
    wt.pack(samples, folder / "set", max_shard_samples=8, split={"train": 0.8, "val": 0.2})
    shutil.copytree(folder / "set", folder / "joined")
    wt.join(folder / "joined", table())
    for name in ("kind", "tags"):
        wt.index(folder / "joined", label=name)
    return folder


@pytest.fixture
def out(bases: Path, tmp_path: Path) -> str:
    return str(shutil.copytree(bases / "set", tmp_path / "set"))


@pytest.fixture
def joined(bases: Path, tmp_path: Path) -> str:
    return str(shutil.copytree(bases / "joined", tmp_path / "joined"))


def row(n: int) -> dict[str, Any]:
    return {
        "key": f"k{n:02d}",
        "caption": f"number {n}, größer" + " and more" * (n * 9),
        "score": n / 8,
        "age": n,
        "good": n % 2 == 0,
        "kind": KINDS[n % 3],
        "tags": ["a", "b"][: n % 3],
        "embedding": [n / 2, -1.0, float(n)],
    }


def table(numbers: Any = range(COUNT)) -> list[dict[str, Any]]:
    return [row(n) for n in reversed(numbers)]


def tars(out: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(out).glob("*.tar")}


def values(index: wt.Index, name: str) -> dict[str, Any]:
    """Return the values of a column by key."""
    column = next(column for column in index.columns if column.name == name)
    return dict(zip(index.keys(np.arange(len(index))), column.values.to_pylist(), strict=True))


def expected(name: str, numbers: Any = range(COUNT)) -> dict[str, Any]:
    return {f"k{n:02d}": row(n)[name] if n in numbers else None for n in range(COUNT)}


def written(folder: Path, form: str) -> Any:
    """Return the table as it is written in a form, or in memory."""
    rows = table()
    if form in ("rows", "Arrow", "pandas"):
        return {"rows": rows, "Arrow": pa.Table.from_pylist(rows), "pandas": pd.DataFrame(rows)}[
            form
        ]
    names = [name for name in rows[0] if form != "csv" or name not in ("tags", "embedding")]
    return write_table(folder / "t", form, **{name: [row[name] for row in rows] for name in names})


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet", "pandas", "rows", "Arrow"])
def test_each_form_of_table_gives_every_sample_the_value_of_its_row(
    out: str, tmp_path: Path, form: str
) -> None:
    before, shards = wt.open(out), tars(out)
    done = wt.join(out, written(tmp_path, form))
    assert (done.samples, done.matched, done.unknown) == (COUNT, COUNT, 0)
    assert done.columns == dict.fromkeys(done.columns, 0)
    assert row(0).keys() - done.columns - {"key"} in ({"tags", "embedding"}, set())
    for name in done.columns:
        assert values(wt.open(out), name) == expected(name)
    assert tars(out) == shards
    assert wt.verify(out).ok
    if form in ("pandas", "rows", "Arrow"):
        in_memory = before.join(written(tmp_path, form))
        kept = {key: value for key, value in expected("caption").items() if key > "k16"}
        assert values(in_memory.where("score > 2"), "caption") == kept
    assert [column.name for column in before.columns] == ["n", "side"]


def test_rows_are_counted_and_samples_without_one_have_no_value(
    out: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "scores.csv"
    path.write_text("key,score,note\nk03,1.5,\nk05,2.5,good\nx1,9,\nx2,9,bad\n")
    assert main(["join", out, str(path), "--on", "key", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    counts = (report["matched"], report["unknown"], report["unknown_keys"])
    assert counts == (2, 2, ["'x1'", "'x2'"])
    assert report["columns"] == {"score": COUNT - 2, "note": COUNT - 1}
    assert main(["join", out, str(path)]) == 0
    shown = capsys.readouterr().out
    assert f"2 of {COUNT} samples" in shown
    assert "2 rows of the table: 'x1', 'x2'" in shown
    assert f"replaced, {COUNT - 2} samples without a value" in shown
    assert {k for k, v in values(wt.open(out), "score").items() if v is not None} == {"k03", "k05"}
    wt.join(out, [{"n": n, "square": n * n} for n in range(COUNT)], on="n")
    assert values(wt.open(out), "square") == {f"k{n:02d}": n * n for n in range(COUNT)}


def test_readers_keep_a_replaced_column_which_stays_until_the_next_change(joined: str) -> None:
    former, names = wt.open(joined), set(Path(joined).glob("column-*"))
    fields = {"caption": wt.text("caption"), "v": wt.array("embedding")}
    batches = iter(wt.Loader(former, fields, batch_size=3))
    next(batches)
    rows = [{"key": f"k{n:02d}", "caption": "new", "embedding": [0.5]} for n in range(4)]
    assert wt.join(joined, rows).replaced == ["caption", "embedding"]
    assert values(pickle.loads(pickle.dumps(former)), "caption") == expected("caption")
    assert len(names.intersection(Path(joined).glob("column-*"))) == 2
    wt.join(joined, [{"key": "k01", "score": 7}])
    assert not names.intersection(Path(joined).glob("column-*"))
    for batch in batches:
        assert batch["caption"] == [row(int(key[1:]))["caption"] for key in batch["__key__"]]
        assert batch["v"].shape[1] == 3
    new = {f"k{n:02d}": "new" if n < 4 else None for n in range(COUNT)}
    assert values(wt.open(joined), "caption") == new
    assert values(wt.open(joined).where("score == 7"), "embedding") == {"k01": [0.5]}
    assert wt.verify(joined).ok


@pytest.mark.parametrize("workers", [0, 1])
def test_fields_read_joined_columns(joined: str, workers: int) -> None:
    wt.join(joined, [{"key": f"k{n:02d}", "path": list(range(n % 3))} for n in range(COUNT)])
    fields = {
        "image": wt.image(size=8),
        "caption": wt.text("caption"),
        "score": wt.number("score"),
        "age": wt.number("age", dtype="float64"),
        "kind": wt.label("kind"),
        "tags": wt.label("tags"),
        "vector": wt.array("embedding"),
        "path": wt.array("path"),
    }
    options: Row = {"batch_size": 4, "num_workers": workers, "split": "train", "tail": "keep"}
    loader = wt.Loader(joined, fields, **options)
    for batch in loader:
        rows = [row(int(key[1:])) for key in batch["__key__"]]
        assert batch["caption"] == [row["caption"] for row in rows]
        assert batch["score"].tolist() == [row["score"] for row in rows]
        assert batch["age"].dtype == torch.float64
        assert [KINDS[number] for number in batch["kind"]] == [row["kind"] for row in rows]
        assert batch["tags"].sum(1).tolist() == [len(row["tags"]) for row in rows]
        assert batch["vector"].dtype == torch.float32
        assert batch["vector"].tolist() == [row["embedding"] for row in rows]
        paths = [list(range(row["age"] % 3)) for row in rows]
        assert [path.tolist() for path in batch["path"]] == paths
    loader.close()


def test_every_view_of_a_set_knows_its_columns(joined: str) -> None:
    info = wt.info(joined)
    assert {column.name for column in info.columns} >= row(0).keys() - {"key"}
    assert [label.name for label in info.labels] == ["kind", "tags"]
    assert "number 3, größer" in repr(wt.peek(joined, n=COUNT))
    wt.index(joined)  # again, from the headers
    assert values(wt.open(joined), "embedding") == expected("embedding")
    wt.join(joined, [{"key": "k00", "mood": "sad"}, {"key": "k01", "mood": "gay"}])
    assert main(["index", joined, "--label", "mood", "--classes", "gay,sad"]) == 0
    label = wt.open(joined).labels[-1]
    assert (label.name, label.kind, label.classes) == ("mood", "class", ("gay", "sad"))
    with pytest.raises(UsageError, match="embedding, or it holds values that no column can hold"):
        wt.index(joined, label="embedding")
    done = wt.repair(joined, out=f"{joined}/../repaired")
    assert any(re.match(r"joined columns are not copied: .*embedding", n) for n in done.notes)
    assert not wt.open(f"{joined}/../repaired").labels


def test_a_packed_copy_holds_the_columns_in_its_samples(joined: str, tmp_path: Path) -> None:
    copy = str(tmp_path / "copy")
    wt.join(joined, table(range(20)))
    wt.convert_tars(joined, copy)
    index = wt.open(copy)
    assert not list(Path(copy).glob("column-*"))
    for name in ("score", "age", "good", "kind", "tags"):
        assert values(index, name) == expected(name, range(20))
    assert [label.classes for label in index.labels] == [KINDS, ("a", "b")]
    document = json.loads(index["k07"]["json"])
    assert (document["caption"], document["n"]) == (row(7)["caption"], 7)
    assert {"embedding.npy"} == index["k07"].keys() - index["k25"].keys()


def test_a_value_that_a_sample_holds_too_is_not_replaced(tmp_path: Path) -> None:
    """A text of more than 256 characters is no column, so that a join does not know of it."""
    samples = (
        {"__key__": f"k{n}", "x.npy": np.zeros(2), "json": {"note": "long" * 99}} for n in range(4)
    )
    wt.pack(samples, tmp_path / "set")
    with pytest.raises(UsageError, match=r"'x' .*: the samples or the index use"):
        wt.join(tmp_path / "set", [{"key": "k1", "x": [1.0, 2.0]}])
    wt.join(tmp_path / "set", [{"key": "k1", "note": "short"}])
    with pytest.raises(SourceError, match="k1: it holds note, and so does a joined column"):
        wt.convert_tars(tmp_path / "set", tmp_path / "copy")
    copy = wt.convert_tars(tmp_path / "set", tmp_path / "copy", on_error="skip")
    assert sorted(copy.keys(np.arange(len(copy)))) == ["k0", "k2", "k3"]


def test_samples_that_come_and_go_keep_their_values(joined: str) -> None:
    wt.remove(joined, where="age < 3")
    new = {"__key__": "z", "png": picture(1), "json": {"n": 99, "side": 0}}
    wt.pack([new], joined, split={"train": 1.0}, append=True)
    for name in ("caption", "kind", "embedding"):
        kept = {key: value for key, value in expected(name).items() if key > "k02"}
        assert values(wt.open(joined), name) == kept | {"z": None}
    assert wt.verify(joined).ok


def test_a_field_of_a_column_with_missing_values_names_the_samples_to_leave_out(out: str) -> None:
    wt.join(out, table(range(20)))
    for name, field in (("caption", wt.text("caption")), ("embedding", wt.array("embedding"))):
        with pytest.raises(UsageError, match=rf"the column {name}.* 10 of 30 .*`{name}` is not"):
            next(iter(wt.Loader(wt.open(out), {"field": field}, batch_size=2)))
        chosen = wt.open(out).where(f"{name} is not None")
        assert len(list(wt.Loader(chosen, {"field": field}, batch_size=2))) == 10
    with pytest.raises(UsageError, match="caption, a text, does not give every sample a number"):
        next(iter(wt.Loader(chosen, {"f": wt.number("caption")}, batch_size=2)))


REFUSED: list[tuple[list[Row], str, str]] = [
    ([{"key": "x", "a": 1}, {"key": "y", "a": 2}], "key", "none of 2 keys .*'x', 'y'.*such as 'k"),
    ([{"key": "k01", "a": 1}, {"key": "k01", "a": 2}], "key", "1 keys are in several rows.*'k01'"),
    ([{"id": "k01", "a": 1}], "key", "the table has the columns id, a: it needs 'key'"),
    ([{"key": 1.5, "a": 1}], "key", "keys are texts or whole numbers"),
    ([{"key": "k01", "a": {"x": 1}}], "key", "'a' of the table has the type struct"),
    ([{"key": "k01", "a": [1.0, None]}], "key", "lists with empty items"),
    ([{"key": "k01", "a": [1.0, -1e39]}], "key", r"numbers beyond 3\.40282e\+38"),
    ([{"key": "k01", "a": 1}, {"key": "k02", "a": "x"}], "key", "hold values of one type"),
    ([{"key": "k01", "size": 1}], "key", "'size' .*: the samples or the index use"),
    ([{"key": "k01", "json.x": 1}], "key", "means an entry"),
    ([{"key": "k01", "kind": "cow"}], "key", "do not fit the label .* 3 classes: cat, dog, owl"),
    ([{"side": 0, "a": 1}, {"side": 0, "a": 2}], "side", "several samples have .* '0'"),
]


@pytest.mark.parametrize(("rows", "on", "message"), REFUSED)
def test_a_table_that_does_not_fit_is_refused_and_the_set_stays(
    joined: str, rows: list[Row], on: str, message: str
) -> None:
    before = {path.name: path.read_bytes() for path in Path(joined).iterdir()}
    with pytest.raises(UsageError, match=message):
        wt.join(joined, rows, on=on)
    assert {path.name: path.read_bytes() for path in Path(joined).iterdir()} == before


def test_columns_of_a_server_are_fetched_when_they_are_read(joined: str, tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        url = f"{served.url}/joined/index.json"
        for name in ("embedding", "score"):
            served.sent.clear()
            fields = {"value": wt.array(name) if name == "embedding" else wt.number(name)}
            batch = next(iter(wt.Loader(url, fields, batch_size=4, split="train")))
            rows = [row(int(key[1:]))[name] for key in batch["__key__"]]
            assert batch["value"].tolist() == rows
            assert len({path for path, _ in served.sent if "column-" in path}) == (name != "score")
        index = wt.open(url)
        wt.join(joined, [{"key": "k01", "caption": "new", "embedding": [1]}])
        assert values(index, "caption") == expected("caption")
        with pytest.raises(UsageError, match="only a set on a disk or in a bucket"):
            wt.join(url, table())
        for path in Path(joined).glob("column-*"):
            path.write_bytes(path.read_bytes()[:-8] + bytes(8))
        with pytest.raises(ShardError, match="column-.* is damaged"):
            values(wt.open(url), "caption")


@pytest.mark.parametrize("damage", ["missing", "other"])
def test_a_damaged_column_is_an_error_or_a_finding(out: str, damage: str) -> None:
    wt.join(out, [{key: row(n)[key] for key in ("key", "caption")} for n in range(COUNT)])
    for name in ("no.parquet", "empty.parquet"):
        Path(out, "empty.parquet").touch()
        with pytest.raises(WdstrainError, match=rf"{name}.* (no such file|cannot be read)"):
            wt.join(out, f"{out}/{name}")
    (path,) = Path(out).glob("column-*")
    if damage == "other":
        path.write_bytes(path.read_bytes().replace(b"number 7,", b"number 8,"))
        assert any("column-" in str(finding) for finding in wt.verify(out).findings)
        return
    path.unlink()
    with pytest.raises(ShardError, match="column-"):
        wt.open(out)


def test_a_model_learns_a_joined_column(out: str, tmp_path: Path) -> None:
    wt.join(out, table())
    options: Row = {"epochs": 1, "batch_size": 8, "image_size": 32, "device": "cpu"}
    wt.train(out, out=tmp_path / "run", model="small", label="kind", **options)
    checkpoint = tmp_path / "run" / "checkpoints" / "last.pt"
    _, scores = wt.evaluate(checkpoint, f"{out}/train-*.tar")
    assert set(scores["classes"]["kind"]) == set(KINDS)
