"""Index files that do not fit their shards are found, refreshed and repaired."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import wdstrain as wt
from tests.conftest import picture, write_tar
from wdstrain.cli import main

CLASSES = ["ant", "bee"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A packed set of two splits and three columns."""
    folder = tmp_path_factory.mktemp("whole") / "set"
    samples = [
        {"__key__": f"k{n:02d}", "png": picture(n), "cls": n % 2, "json": {"age": n}}
        for n in range(12)
    ]
    wt.pack(samples, folder, classes=CLASSES, split={"train": 0.5, "val": 0.5}, shuffle=False)
    assert wt.verify(folder, decode=True).ok
    return folder


@pytest.fixture
def packed(whole: Path, tmp_path: Path) -> Path:
    """A copy of the set, whose shards keep their times."""
    return Path(shutil.copytree(whole, tmp_path / "set"))


def change_table(folder: Path, column: str, change: Callable[[list[Any]], list[Any]]) -> None:
    """Replace the values of a column in index.arrow."""
    with pa.ipc.open_file(folder / "index.arrow") as reader:
        table = reader.read_all()
    place, before = table.column_names.index(column), table[column].to_pylist()
    values = change(list(before))
    assert values != before
    field = table.schema.field(column)
    table = table.set_column(place, field, pa.chunked_array([pa.array(values, field.type)]))
    with pa.ipc.new_file(folder / "index.arrow", table.schema) as writer:
        writer.write_table(table)


def change_document(folder: Path, change: Callable[[Any, list[Any]], None]) -> None:
    """Change the part of the package in index.json, and the list of shards."""
    document = json.loads((folder / "index.json").read_text())
    before = json.dumps(document)
    change(document["wdstrain"], document["shardlist"])
    assert json.dumps(document) != before
    (folder / "index.json").write_text(json.dumps(document))


def is_found(folder: Path) -> bool:
    """Return whether verify reports anything."""
    try:
        return not wt.verify(folder, decode=True).ok
    except (wt.ShardError, wt.UsageError):
        return True


# --- verify ---

FIELDS = ["png", "cls", "json"]


@pytest.mark.parametrize("field", FIELDS)
def test_a_damaged_checksum_of_the_index_is_reported_and_loses_no_sample(
    packed: Path, tmp_path: Path, field: str
) -> None:
    change_table(packed, f"{field}.crc32", lambda sums: [sums[0] ^ 1, *sums[1:]])
    assert is_found(packed)
    done = wt.repair(packed, tmp_path / "repaired")
    assert (done.samples, done.lost) == (12, 0)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda a, b, c: (a + b[:1], b[1:], c), id="right"),
        pytest.param(lambda a, b, c: (a[:-1], a[-1:] + b, c), id="left"),
        pytest.param(lambda a, b, c: (a + b[:2], b[2:] + c[:1], c[1:]), id="two"),
        pytest.param(lambda a, b, c: (a, c, b), id="exchanged"),
        pytest.param(lambda a, b, c: (a, b, c + "x"), id="longer"),
    ],
)
def test_keys_of_the_index_that_the_shard_does_not_have_are_reported(
    packed: Path, change: Callable[[str, str, str], tuple[str, str, str]]
) -> None:
    change_table(packed, "key", lambda keys: [*change(*keys[:3]), *keys[3:]])
    assert is_found(packed)


def exchange_the_splits(document: Any, shards: list[Any]) -> None:
    shards[0]["split"], shards[1]["split"] = shards[1]["split"], shards[0]["split"]


EDITS: dict[str, Callable[[Any, list[Any]], None]] = {
    "class": lambda own, shards: own["labels"][0].update(classes=["bat", "bee"]),
    "order of classes": lambda own, shards: own["labels"][0]["classes"].reverse(),
    "name of the label": lambda own, shards: own["labels"][0].update(name="insect"),
    "labels": lambda own, shards: own["labels"].clear(),
    "splits": exchange_the_splits,
    "split": lambda own, shards: shards[0].update(split="tram"),
    "sha256": lambda own, shards: shards[0].update(sha256="0" * 64),
}


@pytest.mark.parametrize("edit", list(EDITS))
def test_an_edit_of_one_index_file_is_reported(packed: Path, edit: str) -> None:
    change_document(packed, EDITS[edit])
    assert is_found(packed)


def test_a_renamed_class_is_counted_and_chosen_by_one_name(packed: Path) -> None:
    change_document(packed, EDITS["class"])
    with contextlib.suppress(wt.ShardError):  # refused as a whole
        (label,) = (c for c in wt.info(packed).as_dict()["columns"] if c["name"] == "label")
        counted = label["classes"]
        chosen = {name: wt.info(packed, where=f"label == '{name}'").samples for name in counted}
        assert counted == chosen


# --- refresh ---


def insects(folder: Path, name: str, kind: int, text: bytes = b"x") -> Path:
    """Write a shard of six samples of one class, as another tool would."""
    fields = {"txt": text, "cls": str(kind).encode(), "json": f'{{"age": {kind}}}'.encode()}
    return write_tar(folder / f"{name}.tar", [(f"{name}{n}", fields) for n in range(6)])


@pytest.mark.parametrize("column", ["label", "age"])
@pytest.mark.parametrize("text", [b"x", b"x" * 600])
def test_indexing_again_reads_the_labels_of_a_replaced_shard(
    tmp_path: Path, column: str, text: bytes
) -> None:
    shards = [insects(tmp_path, name, 0) for name in ("a", "b")]
    for shard in shards:
        os.utime(shard, (10**9, 10**9))
    wt.index(tmp_path, label="cls", classes=CLASSES, columns=["json.age"])
    insects(tmp_path, "b", 1, text)
    refreshed = wt.index(tmp_path).table.to_pydict()
    assert (
        refreshed[column] == {"label": ["ant"] * 6 + ["bee"] * 6, "age": [0] * 6 + [1] * 6}[column]
    )


def test_index_refreshes_the_labels_of_a_packed_shard_that_was_replaced(
    packed: Path, tmp_path: Path
) -> None:
    (shard,) = packed.glob("train-*.tar")
    rows = [(key, data["cls"], data) for key, data in samples_of(packed, shard.name)]
    others = {b"0": b"1", b"1": b"0"}
    write_tar(shard, [(key, {**data, "cls": others[label]}) for key, label, data in rows])
    assert main(["index", str(packed), "-q"]) == 0
    refreshed = wt.open(packed).where("split == 'train'").table.to_pydict()
    expected = {key: CLASSES[1 - int(label)] for key, label, _ in rows}
    assert dict(zip(refreshed["key"], refreshed["label"], strict=True)) == expected


def samples_of(folder: Path, shard: str) -> list[tuple[str, dict[str, bytes]]]:
    """Return keys and fields of a shard, as a loader reads them."""
    loader = wt.Loader(str(folder / shard), batch_size=1, shuffle=False)
    batches = list(loader.epoch(0, until=1))
    loader.close()
    return [(batch["__key__"][0], {name: batch[name][0] for name in FIELDS}) for batch in batches]


# --- repair ---


def overwrite(path: Path) -> None:
    """Overwrite 64 bytes in the middle of a file."""
    data = path.read_bytes()
    middle = len(data) // 2
    path.write_bytes(data[:middle] + b"\xff" * 64 + data[middle + 64 :])


DAMAGES: dict[str, Callable[[Path], object]] = {
    "lost": os.remove,
    "cut": lambda path: os.truncate(path, 700),
    "empty": lambda path: os.truncate(path, 0),
    "overwritten": overwrite,
}


@pytest.mark.parametrize("damage", list(DAMAGES))
def test_repair_keeps_labels_and_splits_if_only_the_table_of_the_index_is_lost(
    packed: Path, tmp_path: Path, damage: str
) -> None:
    before = wt.open(packed)
    keys = sorted(before.table["key"].to_pylist())  # the table is mapped
    DAMAGES[damage](packed / "index.arrow")
    wt.repair(packed, tmp_path / "repaired")
    after = wt.open(tmp_path / "repaired")
    assert (after.labels, after.splits) == (before.labels, before.splits)
    assert sorted(after.table["key"].to_pylist()) == keys


def test_repair_says_that_labels_are_lost_with_the_document_of_the_index(
    packed: Path, tmp_path: Path
) -> None:
    before = wt.open(packed)
    os.remove(packed / "index.json")
    done = wt.repair(packed, tmp_path / "repaired")
    said = " ".join([*done.notes, *(finding.sentence for finding in done.findings)])
    assert wt.open(tmp_path / "repaired").labels == before.labels or "index" in said


def test_indexing_again_after_the_table_is_lost_keeps_declared_columns(packed: Path) -> None:
    wt.index(packed, columns=["json.age"])
    before = [column.name for column in wt.open(packed).columns]
    os.remove(packed / "index.arrow")
    assert [column.name for column in wt.index(packed).columns] == before
