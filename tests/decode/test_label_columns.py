"""Labels from the columns of the index: the same values as from their bytes, and no bytes read."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import wdstrain as wt
from tests.conftest import picture, quick_and_slow

NAMES = ["cat", "dog", "emu"]


def samples(values: list[Any], *, field: str) -> list[dict[str, Any]]:
    """Return samples whose cls, or entry `kind` of their json, holds these values."""
    samples_ = []
    for n, value in enumerate(values):
        sample: dict[str, Any] = {"__key__": f"k{n:03d}", "bin": b"x" * (n % 7)}
        if value is not None:
            sample[field] = str(value).encode() if field == "cls" else {"kind": value}
        samples_.append(sample)
    return samples_


VALUES: dict[str, list[Any]] = {
    "numbers": [0, 2, 1, 1],
    "names": ["dog", "cat", "emu", "cat"],
    "digits as names": ["1", "2", "0", "1"],
    "large": [7, 3, 12, 1],
    "floats": [0.5, 1.0, -2.25, 1e30],
    "huge": [1e300, 1, 2, 3],
    "flags": [True, False, True, True],
    "lists": [["cat"], [], ["dog", "cat"], ["emu"]],
    "lists of numbers": [[1], [], [2, 0], [1]],
    "mixed": [1, "cat", 2, "dog"],
    "missing": [1, None, 2, 0],
    "negative": [-1, 1, 2, 0],
}
LABELS = {
    "unknown": None,
    "classes": ("class", tuple(NAMES)),
    "other order": ("class", ("emu", "dog", "cat")),
    "numbered": ("class", ("0", "1", "2")),
    "shifted": ("class", ("1", "2", "0")),
    "number": ("number", ()),
    "multi": ("multi", tuple(NAMES)),
}
NEVER_VALID = {
    "cls": ("huge", "missing", "mixed", "flags", "negative", "names"),
    "json": ("huge", "missing", "lists of numbers"),
}
COLUMN = {"cls": None, "json": "kind"}


def fields(place: str) -> list[Any]:
    name = "cls" if COLUMN[place] is None else f"{place}.{COLUMN[place]}"
    samples_: list[Any] = [wt.number(name)]
    samples_ += [wt.label(name, classes=list(c)) for c in CLASSES]
    if COLUMN[place]:
        samples_ += [wt.label(name, classes=NAMES, multi=True)]
    return samples_


CLASSES: list[tuple[str, ...]] = [
    (),
    *itertools.islice(itertools.permutations(NAMES, 3), 0, 6, 2),
    ("x", "y", "z"),
    ("cat", "y", "z"),
    ("2", "1", "0"),
    ("0", "1", "2"),
    tuple("abcdefghijklmnop"),
    ("a", "b"),
    ("cat", "cat", "dog", "emu"),
]


def outcome(index: wt.Index, field: Any) -> Any:
    """Return the batches of a loader, or the kind of its error."""
    try:
        with wt.Loader(index, {"label": field}, batch_size=3, tail="keep", seed=1) as loader:
            return [batch["label"].tolist() for batch in loader.epoch(0, until=1)]
    except wt.WdstrainError as error:
        return type(error).__name__


QUICK = ["numbers", "names", "mixed", "missing", "lists"]


@pytest.mark.parametrize("place", ["cls", "json"])
@pytest.mark.parametrize("kind", quick_and_slow(dict.fromkeys([*QUICK, *VALUES]), len(QUICK)))
def test_columns_and_bytes_of_labels_are_equal(tmp_path: Path, place: str, kind: str) -> None:
    if place == "cls" and kind.startswith("lists"):
        pytest.skip("a list is no text of cls")
    valid = 0
    for name, values in LABELS.items():
        labels, out = [], tmp_path / name
        if values is not None:
            labels = [wt.Label("l", values[0], place, COLUMN[place], values[1])]
        try:
            wt.pack(samples(VALUES[kind], field=place), str(out), shuffle=False, labels=labels)
        except wt.WdstrainError:
            continue
        index = wt.open(out)
        for field in fields(place):
            with_column = outcome(index, field)
            with_bytes = outcome(index.with_columns(()), field)
            if kind == "names" and place == "cls" and with_bytes != with_column:
                # Bytes with names do not contain the other class names of the joined sets; the
                # index does.
                assert set(field.classes).isdisjoint(NAMES)
                with_bytes = outcome(index, wt.label())
            assert with_column == with_bytes, (name, field, json.dumps(VALUES[kind]))
            valid += not isinstance(with_column, str)
    assert valid or kind in NEVER_VALID[place]


@pytest.mark.parametrize("classes", [("1", "0"), ("2", "1", "0"), ("True", "False"), ("a", "b")])
@pytest.mark.parametrize("is_label", [True, False], ids=["label", "other column"])
def test_flags_of_a_table_have_the_same_classes_in_columns_and_bytes(
    tmp_path: Path, classes: tuple[str, ...], is_label: bool
) -> None:
    """The label is a number in cls, another column is true or false in json."""
    rows = ["file,known,words"]
    for number, known in enumerate([True, False, True, True, False]):
        (tmp_path / f"{number}.png").write_bytes(picture(number))
        rows.append(f"{number}.png,{known},w{number % 2}")
    (tmp_path / "table.csv").write_text("\n".join(rows) + "\n")
    label = "known" if is_label else "words"
    table, out = tmp_path / "table.csv", str(tmp_path / "out")
    index = wt.convert_table(str(table), out, image="file", label=label, shuffle=False)
    assert [column.kind for column in index.columns if column.name == "known"] == ["flag"]
    field = wt.label("cls" if is_label else "json.known", classes=classes)
    with_column = outcome(index, field)
    assert with_column == outcome(index.with_columns(()), field)
    assert not isinstance(with_column, str), with_column


def priced(arrays: Iterable[Any]) -> list[dict[str, Any]]:
    """Return samples of these arrays, each with a class and a price."""
    labels = ({"cls": n % 5, "json": {"price": n / 4}} for n in itertools.count())
    rows = zip(arrays, labels, strict=False)
    return [{"__key__": f"k{n:03d}", "npy": array, **of} for n, (array, of) in enumerate(rows)]


def with_labels(shape: bool) -> dict[str, Any]:
    array = wt.array("npy", shape=(64, 32), dtype="float32") if shape else wt.array("npy")
    return {"a": array, "label": wt.label(), "price": wt.number("json.price")}


def damage(index: wt.Index, field: str, numbers: Iterable[int], at: int) -> None:
    """Change a byte of a field of each of these samples, which lie in one shard."""
    shard = Path(index.shards[0].path)
    data = bytearray(shard.read_bytes())
    for n in numbers:
        (offset,) = (offset for name, offset, _ in index.members(n) if name == field)
        data[offset + at] ^= 64
    shard.write_bytes(data)


@pytest.mark.parametrize("on_error", ["replace", "mark"])
@pytest.mark.parametrize("shape", [True, False], ids=["direct", "decoded"])
def test_a_substitute_has_its_own_label(tmp_path: Path, on_error: Any, shape: bool) -> None:
    out = tmp_path / "out"
    wt.pack(priced([np.full((64, 32), n, np.float32) for n in range(40)]), str(out), shuffle=False)
    damage(wt.open(out), "npy", [7, 8, 30], 200)
    loader = wt.Loader(out, with_labels(shape), batch_size=8, on_error=on_error, max_errors=0.2)
    batches, bad = loader.epoch(0, until=1), 0
    for batch in batches:
        values = torch.tensor([0 if a is None else int(a[0, 1]) for a in batch["a"]])
        own = torch.from_numpy(batches.delivered.own)
        bad += int((~own).sum())
        assert torch.equal(batch["label"], values % 5)
        assert torch.equal(batch["price"], values / 4)
    loader.close()
    assert bad == 3


def test_a_set_of_missing_labels_is_joined_with_a_set_of_classes(tmp_path: Path) -> None:
    """Its column has no kind of its own: each value is missing."""
    labels = [wt.Label("kind", "class", "json", "kind", tuple(NAMES))]
    wt.pack(samples(["dog", "cat"], field="json"), str(tmp_path / "a"), labels=labels)
    samples_ = [{"__key__": f"n{n}", "json": {"kind": None}} for n in range(3)]
    wt.pack(samples_, str(tmp_path / "b"))
    for order in ("ab", "ba"):
        index = wt.open([str(tmp_path / name) for name in order])
        assert sorted(filter(None, index.table["kind"].to_pylist())) == ["cat", "dog"]
        assert index.table["kind"].null_count == 3
        assert len(index.where("kind == 'dog'")) == 1


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("options", [{}, {"where": "label == 1"}, {"balance": "label"}])
def test_columns_need_no_shard(options: dict[str, Any], num_workers: int, tmp_path: Path) -> None:
    """A class and a number of the index are delivered though the shards are gone."""
    rows = ({"__key__": f"k{n}", "cls": n % 2, "json": {"angle": n / 2}} for n in range(8))
    index = wt.pack(rows, tmp_path / "out", shuffle=False)
    fields = {"label": wt.label("cls"), "angle": wt.number("angle")}
    more = {"shuffle": False, "num_workers": num_workers, **options}
    with wt.Loader(index, fields, batch_size=4, **more) as loader:
        for shard in index.shards:
            Path(shard.path).unlink()
        for batch in loader.epoch(0, until=1):
            numbers = [int(key[1:]) for key in batch["__key__"]]
            assert batch["label"].tolist() == [n % 2 for n in numbers]
            assert batch["angle"].tolist() == [n / 2 for n in numbers]


@pytest.mark.parametrize("has_columns", [True, False])
def test_a_name_is_a_column_of_the_index_or_else_a_field(tmp_path: Path, has_columns: bool) -> None:
    """Nobody needs to know that a table's columns lie in `json`, or that a label lies in `cls`."""
    rows = [
        {"__key__": f"k{n}", "cls": n % 2, "txt": f"text {n}", "Note.txt": f"note {n}"}
        | {"json": {"Kind": NAMES[n % 3], "angle": n / 2, "caption": f"a {n}", "Tags": ["emu"][n:]}}
        | {"meta.json": {"long": "long " * 100 + str(n)}}
        for n in range(6)
    ]
    labels = [
        wt.Label("Kind", "class", "json", "Kind", tuple(NAMES)),
        wt.Label("Tags", "multi", "json", "Tags", tuple(NAMES)),
    ]
    index = wt.pack(rows, tmp_path / "out", labels=labels, classes=["no", "yes"], shuffle=False)
    if not has_columns:
        index = index.with_columns(())
    fields = {
        "by label": wt.label("label"),
        "by field": wt.label("cls"),
        "kind": wt.label("Kind"),
        "tags": wt.label("Tags"),
        "angle": wt.number("angle" if has_columns else "json.angle", dtype="float64"),
        "caption": wt.text("caption" if has_columns else "json.caption"),
        "txt": wt.text("txt"),
        "note": wt.text("Note.txt"),
        "long": wt.text("meta.json.long"),
    }
    with wt.Loader(index, fields, batch_size=6, shuffle=False) as loader:
        (batch,) = loader.epoch(0, until=1)
    assert batch["by label"].tolist() == batch["by field"].tolist() == [0, 1, 0, 1, 0, 1]
    assert batch["kind"].tolist() == [0, 1, 2, 0, 1, 2]
    assert batch["tags"].tolist() == [[0, 0, 1], *[[0, 0, 0]] * 5]
    assert batch["angle"].tolist() == [n / 2 for n in range(6)]
    assert batch["angle"].dtype == torch.float64
    assert batch["caption"] == [f"a {n}" for n in range(6)]
    assert batch["txt"] == [f"text {n}" for n in range(6)]
    assert batch["note"] == [f"note {n}" for n in range(6)]
    assert [text[-2:] for text in batch["long"]] == [f" {n}" for n in range(6)]
    with pytest.raises(wt.UsageError, match="looks for colour"):
        wt.Loader(index, {"x": wt.label("colour")})


def test_a_text_of_a_column_is_none_in_a_marked_row(tmp_path: Path) -> None:
    row = {"txt": "no number", "cls": 0, "json": {"caption": "x"}}
    rows = [{"__key__": key, **row} for key in "ab"]
    index = wt.pack(rows, tmp_path / "out", shuffle=False)
    fields = {"n": wt.number("txt"), "caption": wt.text("caption")}
    options: dict[str, Any] = {"on_error": "mark", "max_errors": 1.0, "batch_size": 2}
    with wt.Loader(index, fields, **options) as loader:
        (batch,) = loader.epoch(0, until=1)
    assert batch["caption"] == [None, None]
