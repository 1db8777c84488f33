"""Selections by conditions on columns, by share, in splits and folds, and by key."""

from __future__ import annotations

import math
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wdstrain as wt
from tests.conftest import write_tar

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
    samples = [{"__key__": f"k{n:03d}", "json": row} for n, row in enumerate(rows)]
    return wt.pack(samples, str(folder / "entries"), shuffle=False)


Row = dict[str, Any]
# What tests/oracle does not draw.
CONDITIONS: list[tuple[str, Callable[[int, Row], Any]]] = [
    ("kind not in (0, 'Pants')", lambda n, r: r["kind"] == "Shirts"),
    ("-year % 7 == 3", lambda n, r: -r["year"] % 7 == 3),
    ("json.size == label.size == 3", lambda n, r: r["size"] == 3),
    ("`class` == 3 and json['class'] > 2 and `json.class` > 1", lambda n, r: n % 4 == 3),
    ("json['two words'] == 1", lambda n, r: r["two words"] == 1),
    ("'`' not in code and `two words`", lambda n, r: r["two words"]),
    ("key == 'k007' or key > 'k055'", lambda n, r: n == 7 or n > 55),
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
        ("kind == 'Othr'", "there is no class 'Othr'. Use one of: Other, Pants, Shirts"),
        ("kids == None", "compared with is or is not"),
        ("kind", "Compare it with a value"),
        ("kind.upper() == 'X'", "calls a function"),
        ("[x for x in tags]", "not allowed in a condition"),
        ("year % (year - 2000) == 1", "divides by 0"),
        ("year * 9223372036854775807 > 1", "overflow"),
        ("year in []", "a list of constants that is not empty"),
        ("year in [code]", "not a constant"),
        ("year ==", "is no condition"),
        ("class == 1 and year > 3", "stands in backticks: `class`"),
        ("kids and year > 9999", "holds for none of 60 samples"),
        ("9" * 30 + " < year", "cannot be evaluated"),
        ("not " * 5000 + "kids", "at most 10000 characters"),
        ("`` == 3", ""),
    ],
)
def test_an_invalid_condition_is_an_error(index: wt.Index, condition: str, message: str) -> None:
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


def test_a_share_is_determined_by_its_seed(index: wt.Index) -> None:
    tenth = index.sample(0.1, seed=0)
    assert keys(tenth) == keys(index.sample(6, seed=0))
    assert keys(tenth) != keys(index.sample(0.1, seed=1))
    assert keys(index.sample(1.0)) == keys(index)
    first, second = (index.split({"train": 0.8, "val": 0.2}, seed=seed) for seed in (1, 2))
    assert keys(first["train"]) != keys(second["train"])


@pytest.mark.parametrize("folds", [3, 5])
def test_folds_divide_each_class_evenly(tmp_path: Path, folds: int) -> None:
    index = entries(tmp_path, [{"kind": size} for size in range(1, 60) for _ in range(size)])
    parts = [Counter(v.table["kind"].to_pylist()) for _, v in index.folds(folds, stratify="kind")]
    for size in range(1, 60):
        of_class = [part[size] for part in parts]
        assert sum(of_class) == size
        assert max(of_class) - min(of_class) <= 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        *((("sample", amount), None) for amount in (0, 1.5, -1, 61, True, math.nan, "x", 0.001)),
        (("split", {"a": 0.5, "b": 0.6}), "must add up to 1"),
        (("split", {"a": 1.2, "b": -0.2}), "above 0"),
        (("split", 0.9), "shares by name"),
        (("split", {"a": 0.999, "b": 0.001}), "'b' gets none of 60"),
        (("split", {"a": 0.5, "b": 0.5}, "colour"), "^there is no column 'colour'"),
        (("split", {"a": 0.5, "b": 0.5}, "tags"), "holds lists"),
    ],
)
def test_impossible_shares_are_refused(index: wt.Index, call: Any, message: Any) -> None:
    verb, amount, *by = call
    with pytest.raises(wt.UsageError, match=message):
        getattr(index, verb)(amount, **({"by": by[0]} if by else {}))


def test_strings_are_compared_as_in_python(tmp_path: Path) -> None:
    texts = ["\u0130", "\u039f\u03a3", "A"]  # the first two have special lower case forms in Python
    index = entries(tmp_path, [{"__column__": text} for text in [*texts, None]])
    for number, text in enumerate(texts):
        for name in ("__column__", "`__column__`", "json.__column__"):
            assert keys(index.where(f"{name}.lower() == {text.lower()!r}")) == [f"k{number:03d}"]


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
        list(index)  # type: ignore[call-overload]


def test_a_key_of_two_samples_is_an_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
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
    index = wt.open(shutil.copytree(packed, tmp_path / "copy"))
    offset = next(offset for name, offset, _ in index.members(30) if name == "bin")
    shard = Path(index.shards[3].path)
    data = bytearray(shard.read_bytes())
    data[offset] ^= 1
    shard.write_bytes(data)
    with pytest.raises(wt.ShardError, match=r"bin of sample k030"):
        index["k030"]


def test_zeros_of_either_sign_are_one_group_one_stratum_and_one_class(tmp_path: Path) -> None:
    index, half = entries(tmp_path, [{"g": value} for value in [0.0, -0.0, 1.5] * 10]), {"a": 0.5}
    half["b"] = 0.5
    for seed in range(6):
        for one, other in [(*index.split(half, by="g", seed=seed).values(),)]:
            assert not {*one.table["g"].to_pylist()} & {*other.table["g"].to_pylist()}
    parts = index.split(half, stratify="g").values()
    assert [part.table["g"].to_pylist().count(0.0) for part in parts] == [10, 10]
    fields = {"g": wt.number("json.g")}
    with closing(wt.Loader(index, fields, balance="g", batch_size=10)) as loader:
        counts = Counter(v for batch in loader.epoch(0, until=1) for v in batch["g"].tolist())
    assert counts == {0.0: 15, 1.5: 15}


MICRO, ANGSTROM, ACCENT = "width_\u00b5m", "\u212b", "e\u0301t"


@pytest.mark.parametrize("form", ["{} == 1", "json.{} == 1", "`{}` == 1", "json['{}'] == 1"])
@pytest.mark.parametrize("names", [[MICRO], ["\u00e9t", ACCENT], ["\u00c5", ANGSTROM]])
def test_a_column_is_found_by_its_own_name(names: list[str], form: str, tmp_path: Path) -> None:
    """Python's grammar takes equivalent characters for one: names are compared as they are."""
    index = entries(tmp_path, [{name: n - i for i, name in enumerate(names)} for n in range(4)])
    for i, name in enumerate(names):
        assert keys(index.where(form.format(name))) == [f"k{1 + i:03d}"]
    one = entries(tmp_path / "one", [{names[-1]: 1}, {"other": 2}])
    assert keys(one.where(f"has.{names[-1]}")) == ["k000"]
