"""Selections by conditions on columns, by share, in splits and folds, and by key."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import wdstrain as wt
from tests.conftest import picture, write_tar
from tests.support.outcomes import result_or_refusal

KINDS = ["Other", "Pants", "Shirts"]
ROWS: list[dict[str, Any]] = [
    {
        "kind": KINDS[n % 3],
        "kids": n % 4 == 0 if n % 7 else None,
        "price": n / 4 if n % 5 else None,
        "year": 2000 + n,
        "tags": ["a", "b"][: n % 3],
        "code": f"{n:05d}",
        "sender_id": f"s{n // 6}",
        "size": n % 10,
        "two words": n % 2,
        "class": n % 4,
    }
    for n in range(60)
]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 samples in six shards. Some lack `kids`, `price` or the field txt."""
    out = tmp_path_factory.mktemp("selection") / "out"
    samples = [
        {"__key__": f"k{n:03d}", "bin": bytes(n), "cls": n % 2, "json": row}
        | ({"txt": "t"} if n % 5 else {})
        for n, row in enumerate(ROWS)
    ]
    labels = [wt.Label("kind", "class", "json", "kind", tuple(KINDS))]
    wt.pack(samples, str(out), shuffle=False, labels=labels, max_shard_samples=10)
    return out


@pytest.fixture(scope="module")
def index(packed: Path) -> wt.Index:
    return wt.open(packed)


def keys(index: wt.Index) -> list[str]:
    return index.keys(np.arange(len(index)))


def entries(folder: Path, rows: Sequence[dict[str, Any]]) -> wt.Index:
    """Return an index of samples k000, k001, ... whose json field has these entries."""
    samples = [{"__key__": f"k{n:03d}", "json": row} for n, row in enumerate(rows)]
    return wt.pack(samples, str(folder / "entries"), shuffle=False)


Row = dict[str, Any]
CONDITIONS: list[tuple[str, Callable[[int, Row], Any]]] = [
    ("kids and kind != 'Other'", lambda n, r: r["kids"] and r["kind"] != "Other"),
    ("kids is None", lambda n, r: r["kids"] is None),
    ("kids is not None and not kids", lambda n, r: r["kids"] is False),
    ("not kids", lambda n, r: r["kids"] is False),
    ("not kids or price > 10", lambda n, r: r["kids"] is False or (r["price"] or 0) > 10),
    ("kids == 1 or kids == False", lambda n, r: r["kids"] is not None),
    ("kind == 1", lambda n, r: r["kind"] == "Pants"),
    ("json.kind in ['Pants', 'Shirts']", lambda n, r: r["kind"] in KINDS[1:]),
    ("kind not in (0, 'Pants')", lambda n, r: r["kind"] == "Shirts"),
    ("kind.startswith('P') or kind.endswith('r')", lambda n, r: r["kind"] != "Shirts"),
    ("kind.lower() == 'pants'", lambda n, r: r["kind"] == "Pants"),
    ("price < 3.5", lambda n, r: r["price"] is not None and r["price"] < 3.5),
    ("2010 <= year < 2020", lambda n, r: 2010 <= r["year"] < 2020),
    ("year % 7 == 3 and -year < 0", lambda n, r: r["year"] % 7 == 3),
    ("-year % 7 == 3", lambda n, r: -r["year"] % 7 == 3),
    ("(year - 2000) / 4 == price", lambda n, r: r["price"] is not None),
    ("year + 1 > 2 * 1005", lambda n, r: r["year"] + 1 > 2010),
    ("'b' in tags", lambda n, r: "b" in r["tags"]),
    ("'b' not in tags", lambda n, r: "b" not in r["tags"]),
    ("tags and len(tags) < 2", lambda n, r: r["tags"] == ["a"]),
    ("'003' in code", lambda n, r: "003" in r["code"]),
    ("code == '00017'", lambda n, r: r["code"] == "00017"),
    ("len(code) == 5 and code + 'x' >= '00050x'", lambda n, r: n >= 50),
    ("json.size == 3", lambda n, r: r["size"] == 3),
    ("label.size == 3", lambda n, r: r["size"] == 3),
    ("`two words` == 1", lambda n, r: r["two words"] == 1),
    ("`class` == 3 and json['class'] > 2 and `json.class` > 1", lambda n, r: n % 4 == 3),
    ("json['two words'] == 1", lambda n, r: r["two words"] == 1),
    ("'`' not in code and `two words`", lambda n, r: r["two words"]),
    ("size.bin > 30", lambda n, r: n > 30),
    ("has.txt", lambda n, r: n % 5),
    ("not has.txt", lambda n, r: not n % 5),
    ("has.price", lambda n, r: r["price"] is not None),
    ("key == 'k007' or key > 'k055'", lambda n, r: n == 7 or n > 55),
    ("shard.endswith('00002.tar')", lambda n, r: n // 10 == 2),
    ("cls == 1", lambda n, r: n % 2),
    ("size > 0 and split == 'train'", lambda n, r: True),
    ("1 < 2 and True", lambda n, r: True),
]


@pytest.mark.parametrize(("condition", "holds"), CONDITIONS, ids=[text for text, _ in CONDITIONS])
def test_a_condition_selects_as_the_python_expression(
    index: wt.Index, condition: str, holds: Callable[[int, Row], Any]
) -> None:
    expected = [f"k{n:03d}" for n, row in enumerate(ROWS) if holds(n, row)]
    assert expected
    assert keys(index.where(condition)) == expected


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        ("colour == 1", "there is no column 'colour'. Use one of: "),
        ("lable == 1", "there is no column 'lable'. Use one of: label, "),
        ("json.colour == 1", "become columns by `wdstrain index --columns`"),
        ("year < 'x'", "a number with a text cannot be compared"),
        ("code < 3", "a text with a number cannot be compared"),
        ("kind == 'Othr'", "there is no class 'Othr'. Use one of: Other, Pants, Shirts"),
        ("tags == 'a'", "a list with a text cannot be compared"),
        ("kids == None", "compared with is or is not"),
        ("kind", "Compare it with a value"),
        ("open('x')", "calls a function"),
        ("kind.upper() == 'X'", "calls a function"),
        ("(lambda: 1)()", "not allowed in a condition"),
        ("[x for x in tags]", "not allowed in a condition"),
        ("year / 0 > 1", "divides by 0"),
        ("year % (year - 2000) == 1", "divides by 0"),
        ("year * 9223372036854775807 > 1", "overflow"),
        ("year == 1e400 * 10 ** 3", "not allowed in a condition"),
        ("code + 1 == 3", "a text with a number cannot be"),
        ("year in []", "a list of constants that is not empty"),
        ("year in [code]", "not a constant"),
        ("year ==", "is no condition"),
        ("class == 1 and year > 3", "stands in backticks: `class`"),
        ("json.class == 1", "`json.class`"),
        ("", "is no condition"),
        ("kids and year > 9999", "holds for none of 60 samples"),
        ("9" * 30 + " < year", "cannot be evaluated"),
        ("not " * 5000 + "kids", "at most 10000 characters"),
        ("-" * 4000 + "year > 3", ""),
        ("''.startswith(key)", "not a constant"),
        ("`` == 3", ""),
    ],
)
def test_an_invalid_condition_is_a_clear_error(
    index: wt.Index, condition: str, message: str
) -> None:
    with pytest.raises(wt.UsageError) as caught:
        index.where(condition)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_sets_without_a_column_of_the_condition_are_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name, entries in (("a", {"kids": True}), ("b", {"other": 1})):
        samples = ({"__key__": f"{name}{n}", "json": entries} for n in range(6))
        wt.pack(samples, str(tmp_path / name))
    joined = wt.open([tmp_path / "a", tmp_path / "b"])
    assert len(wt.Loader(joined, where="kids", weights=np.ones(12), batch_size=2)) == 3
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == (
        "'kids': 6 of 12 samples lack a value in a column of it. None of them is chosen."
    )
    caplog.clear()
    assert len(joined.where("kids is None")) == len(joined.where("kids is not None")) == 6
    assert not caplog.records


def test_a_selection_can_be_selected_from(index: wt.Index) -> None:
    small = index.where("year >= 2020").where("kind == 'Pants'").sample(5, seed=3)
    assert len(small) == 5
    assert repr(small).startswith("Index(5 samples, ")
    assert f", {sum(small.table['size'].to_pylist()) / 1e6:.1f} MB" in repr(small)
    chosen = [int(key[1:]) for key in keys(small)]
    assert chosen == sorted(chosen)
    assert all(n >= 20 and n % 3 == 1 for n in chosen)
    assert [row["year"] for row in small.table.to_pylist()] == [2000 + n for n in chosen]


def test_a_share_is_exact_and_determined_by_its_seed(index: wt.Index) -> None:
    tenth = index.sample(0.1, seed=0)
    assert len(tenth) == 6
    assert keys(tenth) == keys(index.sample(6, seed=0)) == keys(index.sample(0.1, seed=0))
    assert keys(tenth) != keys(index.sample(0.1, seed=1))
    assert keys(index.sample(1.0)) == keys(index)


@pytest.mark.parametrize("amount", [0, 0.0, 1.5, -1, 61, True, math.nan, "x", 0.001])
def test_impossible_shares_are_refused(index: wt.Index, amount: Any) -> None:
    with pytest.raises(wt.UsageError):
        index.sample(amount)


def test_splits_contain_every_sample_once(index: wt.Index) -> None:
    parts = index.split({"train": 0.8, "val": 0.1, "test": 0.1}, seed=1)
    assert {name: len(part) for name, part in parts.items()} == {"train": 48, "val": 6, "test": 6}
    assert sorted(key for part in parts.values() for key in keys(part)) == keys(index)
    other = index.split({"train": 0.8, "val": 0.1, "test": 0.1}, seed=2)
    assert keys(other["train"]) != keys(parts["train"])


def test_a_stratified_split_has_its_share_of_every_class(index: wt.Index) -> None:
    for name in ("kind", "json.two words", "cls"):
        parts = index.split({"train": 0.9, "val": 0.1}, stratify=name, seed=0)
        assert len(parts["val"]) == 6
        column = {"kind": "kind", "json.two words": "two words", "cls": "label"}[name]
        counts = Counter(row[column] for row in parts["val"].table.to_pylist())
        assert max(counts.values()) - min(counts.values()) == 0, name


@pytest.mark.parametrize("stratify", [None, "kind"])
def test_a_group_stays_in_one_split(index: wt.Index, stratify: str | None) -> None:
    parts = index.split({"a": 0.5, "b": 0.3, "c": 0.2}, by="sender_id", stratify=stratify)
    senders = [{row["sender_id"] for row in p.table.to_pylist()} for p in parts.values()]
    assert sum(map(len, senders)) == 10
    assert len(set.union(*senders)) == 10
    assert [len(part) for part in parts.values()] == [30, 18, 12]


@pytest.mark.parametrize("by", [None, "sender_id"])
@pytest.mark.parametrize("stratify", [None, "kind"])
def test_each_sample_is_validated_in_one_fold(
    index: wt.Index, by: str | None, stratify: str | None
) -> None:
    seen: list[str] = []
    for train, val in index.folds(5, by=by, stratify=stratify, seed=4):
        assert len(val) == 12
        assert sorted(keys(train) + keys(val)) == keys(index)
        seen += keys(val)
    assert sorted(seen) == keys(index)


@pytest.mark.parametrize("folds", [3, 5])
def test_folds_divide_each_class_evenly(tmp_path: Path, folds: int) -> None:
    rows = [{"kind": f"c{number}"} for number in range(1, 60) for _ in range(number)]
    samples = [{"__key__": f"k{n:03d}", "json": row} for n, row in enumerate(rows)]
    index = wt.pack(samples, str(tmp_path / "out"), shuffle=False)
    counts = [
        Counter(val.table["kind"].to_pylist()) for _, val in index.folds(folds, stratify="kind")
    ]
    for number in range(1, 60):
        of_class = [count[f"c{number}"] for count in counts]
        assert sum(of_class) == number
        assert max(of_class) - min(of_class) <= 1


def test_strings_are_compared_as_in_python(tmp_path: Path) -> None:
    texts = [
        "\u0130",
        "\u039f\u03a3",
        "A",
        None,
    ]  # the first two have special lower case forms in Python
    samples = [{"__key__": f"k{n}", "json": {"__column__": text}} for n, text in enumerate(texts)]
    index = wt.pack(samples, str(tmp_path / "out"), shuffle=False)
    for number, text in enumerate(texts[:3]):
        assert text is not None
        for name in ("__column__", "`__column__`", "json.__column__"):
            assert keys(index.where(f"{name}.lower() == {text.lower()!r}")) == [f"k{number}"]


@pytest.mark.parametrize(
    ("shares", "options", "message"),
    [
        ({"a": 0.5, "b": 0.6}, {}, "must add up to 1"),
        ({"a": 1.2, "b": -0.2}, {}, "above 0"),
        ({}, {}, "shares by name"),
        (0.9, {}, "shares by name"),
        ({"a": 0.999, "b": 0.001}, {}, "'b' gets none of 60"),
        ({"a": 0.5, "b": 0.5}, {"by": "colour"}, "^there is no column 'colour'"),
        ({"a": 0.5, "b": 0.5}, {"by": "tags"}, "holds lists"),
        ({"a": math.nan, "b": 0.5}, {}, "above 0"),
    ],
)
def test_impossible_splits_are_refused(
    index: wt.Index, shares: Any, options: Any, message: str
) -> None:
    with pytest.raises(wt.UsageError, match=message):
        index.split(shares, **options)


def test_a_sample_is_read_by_key_and_by_number(packed: Path, index: wt.Index) -> None:
    assert index["k007"]["bin"] == bytes(7)
    assert index[7] == index["k007"] == index.where("year > 2005")["k007"]
    assert index["k005"].keys() == {"__key__", "bin", "cls", "json"}
    assert index[-1]["__key__"] == "k059"
    with pytest.raises(KeyError, match="nobody"):
        index["nobody"]
    with pytest.raises(IndexError, match="60 samples"):
        index[60]
    with pytest.raises(TypeError, match="not iterable"):
        list(index)


def test_a_key_of_several_samples_is_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(2):
        write_tar(tmp_path / f"s-{number}.tar", [("same", {"txt": b"%d" % number})])
    index = wt.open(tmp_path)
    with pytest.raises(wt.UsageError, match=r"2 samples have the key 'same'.*s-0.tar and s-1.tar"):
        index["same"]
    assert index.where("shard == 's-1.tar'")["same"]["txt"] == b"1"
    caplog.clear()
    wt.index(tmp_path)
    assert caplog.messages == ["1 samples have the key of another sample of this set"]


def test_reading_a_damaged_sample_by_key_raises(packed: Path, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(packed, copy)
    index = wt.open(copy)
    (_, offset, _), *_ = [m for m in index.members(30) if m[0] == "bin"]
    shard = Path(index.shards[3].path)
    data = bytearray(shard.read_bytes())
    data[offset] ^= 1
    shard.write_bytes(data)
    with pytest.raises(wt.ShardError, match=r"bin of sample k030"):
        index["k030"]


# --- columns of numbers ---------------------------------------------------------------------------

LONG = [5, 2**62 + 1, 7, -(2**60)]  # float64 holds neither the second nor its neighbors


@pytest.mark.parametrize(
    "condition",
    [
        *("-id < 0", "id % 2 == 1", "id % 2.0 == 1", f"id == {2**62 + 1}", f"id < {2**62 + 1}"),
        *("id > 6.5", "id == 7.0", "id != 7.0", "2.5 < id < 7.5", "id <= 1e30"),
        *("id in [7.0, 5]", "id not in [7.0]", "id + 0.5 > 6", "id * 1.0 > 6"),
        *("id / 2 > 3", "third < id", f"id > -{2**63}"),
    ],
)
def test_long_integers_are_compared_with_any_number(condition: str, tmp_path: Path) -> None:
    index = entries(tmp_path, [{"id": number, "third": number / 3} for number in LONG])
    expected = [
        f"k{n:03d}"
        for n, number in enumerate(LONG)
        if eval(condition, {"id": number, "third": number / 3})
    ]
    assert keys(index.where(condition)) == expected


@pytest.mark.parametrize("condition", ["x % 3 == 1", "not x % 3 < 1", "-x % 3 >= 2"])
def test_a_remainder_of_infinity_is_not_a_number_without_a_warning(
    condition: str, tmp_path: Path
) -> None:
    """JSON stores infinities as texts, and the column holds them as numbers."""
    numbers: list[Any] = [7.0, math.inf, 6.5, -math.inf, 4.0]
    index = entries(tmp_path, [{"x": x if math.isfinite(x) else str(x)} for x in numbers])
    meant = [f"k{n:03d}" for n, x in enumerate(numbers) if eval(condition, {"x": x})]
    assert keys(index.where(condition)) == meant


ZEROS = [0.0, -0.0, 1.5, 2.5] * 4


def _split_by(index: wt.Index) -> list[wt.Index]:
    return [p for s in range(6) for p in index.split({"a": 0.5, "b": 0.5}, by="g", seed=s).values()]


def _folds_by(index: wt.Index) -> list[wt.Index]:
    return [
        part for seed in range(6) for pair in index.folds(2, by="g", seed=seed) for part in pair
    ]


@pytest.mark.parametrize("divide", [_split_by, _folds_by])
def test_zeros_of_either_sign_are_one_group(
    divide: Callable[[wt.Index], list[wt.Index]], tmp_path: Path
) -> None:
    parts = divide(entries(tmp_path, [{"g": value} for value in ZEROS]))
    values = [part.table["g"].to_pylist() for part in parts]
    assert [set(a) & set(b) for a, b in zip(values[::2], values[1::2], strict=True)] == [set()] * (
        len(values) // 2
    )


def test_zeros_of_either_sign_are_one_stratum(tmp_path: Path) -> None:
    index = entries(tmp_path, [{"g": value} for value in (0.0, 1.5, -0.0, 2.5)])
    parts = index.split({"a": 0.5, "b": 0.5}, stratify="g").values()
    assert [part.table["g"].to_pylist().count(0.0) for part in parts] == [1, 1]


def test_zeros_of_either_sign_are_balanced_as_one_class(tmp_path: Path) -> None:
    index = entries(tmp_path, [{"g": value} for value in (0.0, -0.0, 1.5) * 10])
    fields = {"g": wt.number("json.g")}
    with closing(wt.Loader(index, fields, balance="g", batch_size=10)) as loader:
        counts = Counter(v for batch in loader.epoch(0, until=1) for v in batch["g"].tolist())
    assert counts == {0.0: 15, 1.5: 15}


def test_zeros_of_either_sign_are_one_group_of_a_conversion(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(picture(1))
    table = pa.table({"image": ["a.png"] * 16, "g": ZEROS})
    pq.write_table(table, tmp_path / "t.parquet")
    options = {"image": "image", "group_by": "g", "split": {"a": 0.5, "b": 0.5}}
    values = []
    for seed in range(3):
        out = tmp_path / f"out{seed}"
        wt.convert_table(tmp_path / "t.parquet", out, label="g", seed=seed, **options)
        values.append([set(wt.open(str(out / f"{s}-*.tar")).table["g"].to_pylist()) for s in "ab"])
    assert [a & b for a, b in values] == [set()] * 3


# --- names of columns -----------------------------------------------------------------------------

MICRO, ANGSTROM, ACCENT, SQUARE = "width_\u00b5m", "\u212b", "e\u0301t", "x\u00b2y"


@pytest.mark.parametrize("form", ["{} == 1", "json.{} == 1", "`{}` == 1", "json['{}'] == 1"])
@pytest.mark.parametrize("names", [[MICRO], [ACCENT], ["\u00e9t", ACCENT], ["\u00c5", ANGSTROM]])
def test_a_column_is_found_by_its_own_name(names: list[str], form: str, tmp_path: Path) -> None:
    """Python's grammar takes equivalent characters for one: names are compared as they are."""
    index = entries(tmp_path, [{name: n - i for i, name in enumerate(names)} for n in range(4)])
    for i, name in enumerate(names):
        assert keys(index.where(form.format(name))) == [f"k{1 + i:03d}"]


@pytest.mark.parametrize("name", [MICRO, ACCENT])
def test_the_presence_of_a_value_is_found_by_the_own_name_of_a_column(
    name: str, tmp_path: Path
) -> None:
    index = entries(tmp_path, [{name: 1}, {"other": 2}])
    assert keys(index.where(f"has.{name}")) == ["k000"]


@pytest.mark.parametrize("form", ["{} == 1", "json.{} == 1"])
def test_a_name_that_the_grammar_does_not_allow_is_found_or_hinted_at(
    form: str, tmp_path: Path
) -> None:
    index = entries(tmp_path, [{SQUARE: n} for n in range(4)])
    found = result_or_refusal(lambda: keys(index.where(form.format(SQUARE))))
    assert found == ["k001"] or "backtick" in found or f"`{SQUARE}`" in found
