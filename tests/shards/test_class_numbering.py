"""A delivered class number means one class, whichever numbers the joined sets use."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wdstrain as wt
from tests.conftest import picture, write_tar
from wdstrain.cli import main
from wdstrain.errors import UsageError

Labeled = list[tuple[str, str]]  # key and class name

PETS: Labeled = [(f"p{i}", ("cat", "dog")[i % 2]) for i in range(10)]
WILD: Labeled = [(f"w{i}", ("wolf", "dog", "fox")[i % 3]) for i in range(9)]


def packed(folder: Path, samples: Labeled, classes: Sequence[str], **options: Any) -> Path:
    rows = ({"__key__": key, "txt": key, "cls": classes.index(name)} for key, name in samples)
    wt.pack(rows, str(folder), classes=list(classes), shuffle=False, **options)
    return folder


@pytest.fixture
def sets(tmp_path: Path) -> tuple[Path, Path]:
    pets = packed(tmp_path / "pets", PETS, ["cat", "dog"])
    return pets, packed(tmp_path / "wild", WILD, ["dog", "fox", "wolf"])


def delivered(loader: wt.Loader, classes: Sequence[str]) -> dict[str, str]:
    with closing(loader):
        return {
            key: classes[number]
            for batch in loader
            for key, number in zip(batch["__key__"], batch["y"].tolist(), strict=True)
        }


def loader_of(urls: Any, **options: Any) -> wt.Loader:
    """Return a loader of the label in cls, one by one. classes: of the label."""
    field = wt.label(classes=options.pop("classes", ()))
    return wt.Loader(urls, {"y": field}, **{"batch_size": 1, **options})


@pytest.mark.parametrize("num_workers", [0, 1])
def test_joined_and_mixed_sets_have_one_numbering(
    sets: tuple[Path, Path], num_workers: int
) -> None:
    for urls in (sets, sets[::-1]):
        loader = loader_of(urls, batch_size=4, tail="keep", num_workers=num_workers)
        (label,) = loader.index.labels
        assert sorted(label.classes) == ["cat", "dog", "fox", "wolf"]
        assert delivered(loader, label.classes) == dict(PETS + WILD)
    loader = wt.mix(dict(zip("ab", sets, strict=True)), {"y": wt.label()}, batch_size=1)
    actual = delivered(loader, loader.index.labels[0].classes)
    assert len(actual) > 15
    assert actual.items() <= dict(PETS + WILD).items()


def test_a_stream_of_sets_with_different_numbers_is_refused(sets: tuple[Path, Path]) -> None:
    for order in (sets, sets[::-1]):
        with pytest.raises(UsageError, match=r"cls differs between these sets.*Use wt\.Loader"):
            wt.stream(order)


def test_texts_that_are_names_and_numbers_of_classes(tmp_path: Path) -> None:
    """Texts are names unless an index declares numbers; undeclared ambiguous texts are refused."""
    classes = ["1", "2", "3"]
    samples = [(f"s{i}", classes[i % 3]) for i in range(9)]
    members = [(key, {"cls": name.encode()}) for key, name in samples]
    foreign = write_tar(tmp_path / "foreign" / "a.tar", members)
    assert delivered(loader_of(foreign, classes=classes), classes) == dict(samples)
    numbers = [(f"n{i}", classes[i % 3]) for i in range(9)]
    known = packed(tmp_path / "known", numbers, classes)
    for given, order in ((classes, classes), ((), classes), (classes[::-1], classes[::-1])):
        assert delivered(loader_of(known, classes=given), order) == dict(numbers)
    with pytest.raises(UsageError, match=r"differs between these sets.*wdstrain index --columns"):
        loader_of([known, foreign], classes=classes)
    wt.index(foreign.parent, label="cls", classes=classes)  # the numbers, which the texts could be
    assert len(delivered(loader_of([known, foreign], classes=classes), classes)) == 18
    with pytest.raises(UsageError, match="may be the name of one class and the number of another"):
        wt.to_example({"y": wt.label(classes=classes)})
    example = wt.to_example({"y": wt.label(classes=["0", "1", "10"])})
    assert example({"__key__": "x", "cls": b"10"})["y"] == 2


def test_given_classes_are_matched_by_name(sets: tuple[Path, Path]) -> None:
    own = ["fox", "cat", "wolf", "hen", "dog"]
    for urls, samples in ((sets, PETS + WILD), (sets[0], PETS), (sets[1], WILD)):
        assert delivered(loader_of(urls, classes=own), own) == dict(samples)
    renamed = ["Katze", "Hund"]  # one set with other names for the same numbers
    actual = delivered(loader_of(sets[0], classes=renamed), renamed)
    assert actual == {key: {"cat": "Katze", "dog": "Hund"}[name] for key, name in PETS}
    for urls, classes in ((sets, renamed), (sets, ["cat", "dog"]), (sets[1], ["wolf", "dog"])):
        with pytest.raises(UsageError, match=r"lacks '\w+'.*0 \w+, 1 \w+"):
            loader_of(urls, classes=classes)


def test_labels_in_a_json_field_are_joined_by_name(tmp_path: Path) -> None:
    sets = [tmp_path / "a", tmp_path / "b"]
    for folder, words in zip(sets, (["cat", "dog"], ["ant", "dog"]), strict=True):
        rows = [{"__key__": f"{folder.name}{word}", "json": {"kind": word}} for word in words]
        label = wt.Label("kind", "class", "json", "kind", tuple(words))
        wt.pack(rows, folder, labels=[label], shuffle=False)
    loader = wt.Loader(sets, {"y": wt.label("json.kind")}, batch_size=1)
    actual = delivered(loader, loader.index.labels[0].classes)
    assert actual == {"acat": "cat", "adog": "dog", "bant": "ant", "bdog": "dog"}


def foreign(folder: Path, fields: dict[str, bytes]) -> Path:
    write_tar(folder / "a.tar", [(f"f{i}", fields) for i in range(4)])
    return folder


def test_sets_with_and_without_names_stay_apart(sets: tuple[Path, Path], tmp_path: Path) -> None:
    numbered = tmp_path / "numbered"
    wt.pack(({"__key__": f"n{i}", "txt": "x", "cls": i % 3} for i in range(6)), numbered)
    unnamed = foreign(tmp_path / "foreign", {"cls": b"1", "txt": b"x"})
    for problem, other in (
        ("3 classes without names", numbered),
        ("no label", unnamed),
        ("no label", foreign(tmp_path / "pictures", {"txt": b"x"})),
    ):
        for urls in ([sets[0], other], [other, sets[0]]):
            with pytest.raises(
                UsageError, match=rf"label in cls differs.*(0 cat, 1 dog|{problem})"
            ):
                loader_of(urls)
            with pytest.raises(UsageError, match="0 cat, 1 dog"):
                wt.train(urls, tmp_path / "run")
        with pytest.raises(UsageError, match="label in cls differs"):
            wt.mix({"a": sets[0], "b": other}, {"y": wt.label()}, batch_size=1)
    own = ["dog", "cat", "hen"]  # names given by the caller cannot tell what 1 means there
    with pytest.raises(UsageError, match="wdstrain index --columns"):
        loader_of([sets[0], unnamed], classes=own)
    wt.index(unnamed, label="cls", classes=own)
    expected = dict(PETS) | {f"f{i}": "cat" for i in range(4)}
    assert delivered(loader_of([sets[0], unnamed], classes=own), own) == expected


def test_a_condition_on_incompatible_classes_raises_with_both_numberings(
    sets: tuple[Path, Path], tmp_path: Path
) -> None:
    numbered = tmp_path / "numbered"
    wt.pack(({"__key__": f"n{i}", "cls": i % 3} for i in range(6)), str(numbered))
    index = wt.open([sets[0], numbered])
    message = "no column 'label': the label in cls differs.*0 cat, 1 dog.*3 classes without names"
    with pytest.raises(UsageError, match=message):
        index.where("label == 1")
    with pytest.raises(UsageError, match=message):
        wt.Loader(index, balance="label")


def test_sets_of_numbers_without_names_are_joined_as_numbers(tmp_path: Path) -> None:
    for name, count in (("a", 3), ("b", 5)):
        rows = ({"__key__": f"{name}{i}", "cls": i} for i in range(count))
        wt.pack(rows, tmp_path / name, shuffle=False)
    loader = loader_of([tmp_path / "a", tmp_path / "b"], batch_size=8, shuffle=False)
    with closing(loader):
        (batch,) = loader
    assert batch["y"].tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    assert loader.index.labels[0].classes == ("0", "1", "2", "3", "4")


def test_info_and_show_use_the_class_of_each_sample(sets: tuple[Path, Path], capsys: Any) -> None:
    (column,) = wt.info(sets).columns
    assert column.classes == {"cat": 5, "dog": 8, "fox": 3, "wolf": 3}
    assert main(["show", *map(str, sets), "-n", "19", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["samples"]
    assert {sample["key"]: sample["labels"]["label"] for sample in shown} == dict(PETS + WILD)


def test_raw_class_numbers_of_different_meaning_are_logged(
    sets: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "wdstrain"):
        wt.Loader(sets[0], batch_size=2)
        wt.Loader(sets, {"y": wt.label()}, batch_size=2)
        assert not caplog.messages
        wt.Loader(sets, batch_size=2)
    (warning,) = caplog.messages
    assert "0 cat, 1 dog" in warning
    assert "0 dog, 1 fox, 2 wolf" in warning


# --- training ---


COLORS = {"cat": (220, 30, 30), "dog": (30, 30, 220), "fox": (30, 220, 30)}
SMALL: dict[str, Any] = {"image_size": 8, "batch_size": 8}


def pictures(folder: Path, names: Sequence[str], classes: Sequence[str]) -> Path:
    rows = (
        {"__key__": f"{classes[0]}{i}", "png": np.full((8, 8, 3), COLORS[name], np.uint8)}
        | {"cls": classes.index(name)}
        for i, name in enumerate(names)
    )
    wt.pack(rows, folder, classes=classes)
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that separates cats from dogs, and of sets beside it."""
    folder = tmp_path_factory.mktemp("trained")
    for name, classes in (("a", ["cat", "dog"]), ("b", ["dog", "cat"])):
        pictures(folder / name, ["cat", "dog"] * 20, classes)
    pictures(folder / "foxes", ["cat", "fox"], ["fox", "cat"])
    write_tar(folder / "unlabeled" / "a.tar", [("f", {"png": picture(0)})])
    wt.train(folder / "a", folder / "run", val=folder / "b", epochs=4, lr=0.01, **SMALL)
    return folder


def test_a_model_is_scored_by_class_name(trained: Path) -> None:
    """Also in the run, whose validation set numbers the classes the other way."""
    last = json.loads((trained / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["val"]["accuracy"] == 1
    for urls in (trained / "b", [trained / "b", trained / "a"]):
        outcome = wt.evaluate(trained / "run" / "checkpoints" / "last.pt", urls)
        assert outcome[1]["accuracy"] == 1


@pytest.mark.parametrize("other", ["foxes", "unlabeled"])
def test_sets_with_unknown_classes_are_refused(trained: Path, other: str) -> None:
    checkpoint, run = trained / "run" / "checkpoints" / "last.pt", trained / "run3"
    for urls in ([trained / other], [trained / "a", trained / other]):
        with pytest.raises(UsageError, match="0 cat, 1 dog"):
            wt.evaluate(checkpoint, urls)
        with pytest.raises(UsageError, match="0 cat, 1 dog"):
            wt.train(trained / "a", run, val=urls, epochs=1, **SMALL)
    assert not run.exists()
