"""Labels from the columns of the index: the same values as from their bytes, and no bytes read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import wdstrain as wt
from tests.conftest import quick_and_slow

NAMES = ["cat", "dog", "emu"]


def samples(values: list[Any], *, field: str) -> list[dict[str, Any]]:
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
    "mixed": [1, "cat", 2, "dog"],
    "missing": [1, None, 2, 0],
    "lists": [["cat"], [], ["dog", "cat"], ["emu"]],
    "digits as names": ["1", "2", "0", "1"],
    "large": [7, 3, 12, 1],
    "floats": [0.5, 1.0, -2.25, 1e30],
    "huge": [1e300, 1, 2, 3],
    "flags": [True, False, True, True],
    "lists of numbers": [[1], [], [2, 0], [1]],
    "negative": [-1, 1, 2, 0],
}
LABELS = {
    "unknown": None,
    "classes": ("class", tuple(NAMES)),
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
    multi = [wt.label(name, classes=NAMES, multi=True)] if COLUMN[place] else []
    return [wt.number(name), *(wt.label(name, classes=list(c)) for c in CLASSES), *multi]


CLASSES: list[tuple[str, ...]] = [
    (),
    ("emu", "cat", "dog"),
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


@pytest.mark.parametrize("place", ["cls", "json"])
@pytest.mark.parametrize("kind", quick_and_slow(VALUES, 5))
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


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("options", [{}, {"where": "label == 1"}, {"balance": "label"}])
def test_columns_need_no_shard(options: dict[str, Any], num_workers: int, tmp_path: Path) -> None:
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
    rows: list[dict[str, Any]] = [
        {"__key__": f"k{n}", "cls": n % 2, "Note.txt": f"note {n}"}
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
        "note": wt.text("Note.txt"),
        "long": wt.text("meta.json.long"),
    }
    with wt.Loader(index, fields, batch_size=6, shuffle=False) as loader:
        (batch,) = loader.epoch(0, until=1)
    values = {
        name: batch[name] if isinstance(batch[name], list) else batch[name].tolist()
        for name in fields
    }
    assert values == {
        "by label": [0, 1] * 3,
        "by field": [0, 1] * 3,
        "kind": [0, 1, 2] * 2,
        "tags": [[0, 0, 1], *[[0, 0, 0]] * 5],
        "angle": [n / 2 for n in range(6)],
        "caption": [f"a {n}" for n in range(6)],
        "note": [f"note {n}" for n in range(6)],
        "long": [row["meta.json"]["long"] for row in rows],
    }
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
