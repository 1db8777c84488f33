"""A delivered class number means one class, whichever numbers the joined sets use."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
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
    """Write shards of samples whose `cls` is a number of these classes."""
    rows = ({"__key__": key, "txt": key, "cls": classes.index(name)} for key, name in samples)
    wt.pack(rows, str(folder), classes=list(classes), shuffle=False, **options)
    return folder


@pytest.fixture
def sets(tmp_path: Path) -> tuple[Path, Path]:
    return packed(tmp_path / "pets", PETS, ["cat", "dog"]), packed(
        tmp_path / "wild", WILD, ["dog", "fox", "wolf"]
    )


def delivered(loader: wt.Loader, classes: Sequence[str]) -> dict[str, str]:
    """Return the class name that each sample is delivered with."""
    actual = {}
    for batch in loader:
        actual |= {
            key: classes[int(number)]
            for key, number in zip(batch["__key__"], batch["y"], strict=True)
        }
    loader.close()
    return actual


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("order", [1, -1])
def test_joined_sets_deliver_one_numbering(
    sets: tuple[Path, Path], order: int, num_workers: int
) -> None:
    loader = wt.Loader(
        sets[::order], {"y": wt.label()}, batch_size=4, tail="keep", num_workers=num_workers
    )
    (label,) = loader.index.labels
    assert sorted(label.classes) == ["cat", "dog", "fox", "wolf"]
    assert delivered(loader, label.classes) == dict(PETS + WILD)


def test_a_stream_of_sets_with_different_numbers_is_refused(sets: tuple[Path, Path]) -> None:
    for order in (sets, sets[::-1]):
        with pytest.raises(UsageError, match=r"cls differs between these sets.*Use wt\.Loader"):
            wt.stream(order)


def test_sets_that_name_one_label_differently_are_streamed(tmp_path: Path) -> None:
    for name in ("pet", "animal"):
        label = wt.Label(name, "class", "cls", None, ("cat", "dog"))
        rows = ({"__key__": f"{name}{n}", "cls": n % 2} for n in range(4))
        wt.pack(rows, str(tmp_path / name), labels=[label], shuffle=False)
    sets = [tmp_path / "pet", tmp_path / "animal"]
    numbers = [sample["cls"] for sample in wt.stream(sets, shuffle=False)]
    assert numbers == [b"0", b"1"] * 4
    with closing(wt.Loader(sets, {"y": wt.label()}, batch_size=8, shuffle=False)) as loader:
        assert next(iter(loader))["y"].tolist() == [0, 1] * 4


def test_texts_that_are_names_and_numbers_of_classes(tmp_path: Path) -> None:
    """Texts are names unless an index declares numbers; undeclared ambiguous texts are refused."""
    classes = ["1", "2", "3"]
    samples = [(f"s{i}", classes[i % 3]) for i in range(9)]
    foreign = write_tar(
        tmp_path / "foreign" / "a.tar", [(key, {"cls": name.encode()}) for key, name in samples]
    )
    field = {"y": wt.label(classes=classes)}
    assert delivered(wt.Loader(foreign, field, batch_size=3), classes) == dict(samples)
    numbers = [(f"n{i}", classes[i % 3]) for i in range(9)]
    known = packed(tmp_path / "known", numbers, classes)
    for fields in (field, {"y": wt.label()}, {"y": wt.label(classes=classes[::-1])}):
        order = classes[::-1] if fields["y"].classes == tuple(classes[::-1]) else classes
        assert delivered(wt.Loader(known, fields, batch_size=3), order) == dict(numbers)
    with pytest.raises(UsageError, match=r"differs between these sets.*wdstrain index --columns"):
        wt.Loader([known, foreign], field, batch_size=3)
    wt.index(foreign.parent, label="cls", classes=classes)  # the numbers, which the texts could be
    assert len(delivered(wt.Loader([known, foreign], field, batch_size=3), classes)) == 18
    with pytest.raises(UsageError, match="may be the name of one class and the number of another"):
        wt.to_example(field)
    assert (
        wt.to_example({"y": wt.label(classes=["0", "1", "10"])})({"__key__": "x", "cls": b"10"})[
            "y"
        ]
        == 2
    )


def test_a_mixture_delivers_one_numbering(sets: tuple[Path, Path]) -> None:
    loader = wt.mix(dict(zip("ab", sets, strict=True)), {"y": wt.label()}, batch_size=1)
    actual = delivered(loader, loader.index.labels[0].classes)
    assert len(actual) > 15
    assert actual.items() <= dict(PETS + WILD).items()


def test_given_classes_are_matched_by_name(sets: tuple[Path, Path]) -> None:
    own_classes = ["fox", "cat", "wolf", "hen", "dog"]
    for urls, samples in ((sets, PETS + WILD), (sets[0], PETS), (sets[1], WILD)):
        assert delivered(
            wt.Loader(urls, {"y": wt.label(classes=own_classes)}, batch_size=1), own_classes
        ) == dict(samples)
    renamed = ["Katze", "Hund"]  # one set with other names for the same numbers
    actual = delivered(wt.Loader(sets[0], {"y": wt.label(classes=renamed)}, batch_size=1), renamed)
    assert actual == {key: {"cat": "Katze", "dog": "Hund"}[name] for key, name in PETS}
    for urls, classes in ((sets, renamed), (sets, ["cat", "dog"]), (sets[1], ["wolf", "dog"])):
        with pytest.raises(UsageError, match=r"lacks '\w+'.*0 \w+, 1 \w+"):
            wt.Loader(urls, {"y": wt.label(classes=classes)})


def test_a_part_of_the_shards_keeps_the_numbering(tmp_path: Path) -> None:
    options = {"max_shard_samples": 3, "split": {"train": 0.5, "val": 0.5}}
    for name, samples, classes in (
        ("pets", PETS, ["cat", "dog"]),
        ("wild", WILD, ["wolf", "fox", "dog"]),
    ):
        packed(tmp_path / name, samples, classes, **options)
    for split in ("train", "val"):
        loader = wt.Loader(f"{tmp_path}/*/{split}-*.tar", {"y": wt.label()}, batch_size=1)
        actual = delivered(loader, loader.index.labels[0].classes)
        assert len(actual) > 5
        assert actual.items() <= dict(PETS + WILD).items()


def test_labels_in_a_json_field_are_joined_by_name(tmp_path: Path) -> None:
    (tmp_path / "x.png").write_bytes(picture(0))
    for name, words in (("a", ["cat", "dog"]), ("b", ["dog", "ant"])):
        lines = "\n".join(f"{tmp_path / 'x.png'},{word},{word}" for word in words)
        (tmp_path / f"{name}.csv").write_text(f"file,kind,same\n{lines}\n")
        labels = ["kind", "same"]  # with several labels, each is an entry of one JSON field
        wt.convert_table(
            str(tmp_path / f"{name}.csv"),
            str(tmp_path / name),
            image="file",
            label=labels,
            shuffle=False,
        )
    field = {"y": wt.label("json.kind")}
    loader = wt.Loader([tmp_path / "a", tmp_path / "b"], field, batch_size=4, shuffle=False)
    (batch,) = loader
    assert [loader.index.labels[0].classes[int(number)] for number in batch["y"]] == [
        "cat",
        "dog",
        "dog",
        "ant",
    ]


def foreign(folder: Path, fields: dict[str, bytes]) -> Path:
    write_tar(folder / "a.tar", [(f"f{i}", fields) for i in range(4)])
    return folder


def test_sets_with_and_without_class_names_are_not_joined(
    sets: tuple[Path, Path], tmp_path: Path
) -> None:
    numbered = tmp_path / "numbered"
    wt.pack(({"__key__": f"n{i}", "txt": "x", "cls": i % 3} for i in range(6)), str(numbered))
    without = {
        "3 classes without names": numbered,
        "no label": foreign(tmp_path / "foreign", {"cls": b"1", "txt": b"x"}),
        "no label ": foreign(tmp_path / "pictures", {"txt": b"x"}),
    }
    for problem, other in without.items():
        for urls in ([sets[0], other], [other, sets[0]]):
            with pytest.raises(UsageError, match="label in cls differs") as error:
                wt.Loader(urls, {"y": wt.label()})
            assert "0 cat, 1 dog" in str(error.value)
            assert problem.strip() in str(error.value)
            with pytest.raises(UsageError, match="0 cat, 1 dog"):
                wt.train(urls, str(tmp_path / "run"))
            assert sum(
                len(batch["txt"]) for batch in wt.Loader(urls, {"txt": wt.text()}, batch_size=1)
            ) in (14, 16)
        with pytest.raises(UsageError, match="label in cls differs"):
            wt.mix({"a": sets[0], "b": other}, {"y": wt.label()}, batch_size=1)
    own_classes = ["dog", "cat", "hen"]  # names given by the caller cannot tell what 1 means there
    field = {"y": wt.label(classes=own_classes)}
    with pytest.raises(UsageError, match="wdstrain index --columns"):
        wt.Loader([sets[0], without["no label"]], field, batch_size=1)
    wt.index(without["no label"], label="cls", classes=own_classes)
    loader = wt.Loader([sets[0], without["no label"]], field, batch_size=1)
    assert delivered(loader, own_classes) == dict(PETS) | {f"f{i}": "cat" for i in range(4)}


@pytest.mark.parametrize("name", ["label", "cls"])
def test_a_condition_on_incompatible_classes_raises_with_both_numberings(
    sets: tuple[Path, Path], tmp_path: Path, name: str
) -> None:
    numbered = tmp_path / "numbered"
    wt.pack(({"__key__": f"n{i}", "cls": i % 3} for i in range(6)), str(numbered))
    index = wt.open([sets[0], numbered])
    message = f"no column '{name}': the label in cls differs.*0 cat, 1 dog.*3 classes without names"
    with pytest.raises(UsageError, match=message):
        index.where(f"{name} == 1")
    with pytest.raises(UsageError, match=message):
        wt.Loader(index, balance=name)


def test_sets_of_numbers_without_names_are_joined_as_numbers(tmp_path: Path) -> None:
    for name, count in (("a", 3), ("b", 5)):
        wt.pack(
            ({"__key__": f"{name}{i}", "cls": i} for i in range(count)),
            str(tmp_path / name),
            shuffle=False,
        )
    loader = wt.Loader(
        [tmp_path / "a", tmp_path / "b"], {"y": wt.label()}, batch_size=8, shuffle=False
    )
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


def pictures(names: Iterable[str], classes: Sequence[str]) -> Iterable[dict[str, Any]]:
    """Flat colors, one for each class."""
    colors = {"cat": (220, 30, 30), "dog": (30, 30, 220), "fox": (30, 220, 30)}
    for i, name in enumerate(names):
        yield {
            "__key__": f"{classes[0]}{i}",
            "png": np.full((8, 8, 3), colors[name], np.uint8),
            "cls": classes.index(name),
        }


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that separates cats from dogs, and of sets beside it."""
    folder = tmp_path_factory.mktemp("trained")
    names = ["cat", "dog"] * 20
    for name, classes in (("a", ["cat", "dog"]), ("b", ["dog", "cat"])):
        wt.pack(pictures(names, classes), str(folder / name), classes=classes)
    wt.pack(pictures(["cat", "fox"], ["fox", "cat"]), str(folder / "foxes"), classes=["fox", "cat"])
    wt.pack(
        ({**item, "cls": 1} for item in pictures(names, ["cat", "dog"])), str(folder / "numbered")
    )
    write_tar(folder / "foreign" / "a.tar", [("f", {"png": picture(0), "cls": b"1"})])
    write_tar(folder / "unlabeled" / "a.tar", [("f", {"png": picture(0)})])
    wt.train(str(folder / "a"), str(folder / "run"), epochs=4, lr=0.01, image_size=8, batch_size=8)
    return folder


def test_a_model_is_scored_by_class_name(trained: Path) -> None:
    checkpoint = trained / "run" / "checkpoints" / "last.pt"
    for urls in (
        trained / "a",
        trained / "b",
        [trained / "a", trained / "b"],
        [trained / "b", trained / "a"],
    ):
        assert wt.evaluate(checkpoint, urls)[1]["accuracy"] == 1
    done = wt.train(
        trained / "a",
        trained / "run2",
        val=trained / "b",
        epochs=4,
        lr=0.01,
        image_size=8,
        batch_size=8,
        overwrite=True,
    )
    assert done.val["accuracy"] == 1


@pytest.mark.parametrize("other", ["foxes", "numbered", "foreign", "unlabeled"])
def test_sets_with_unknown_classes_are_refused(trained: Path, other: str) -> None:
    checkpoint = trained / "run" / "checkpoints" / "last.pt"
    for urls in ([trained / other], [trained / "a", trained / other]):
        with pytest.raises(UsageError, match="0 cat, 1 dog"):
            wt.evaluate(checkpoint, urls)
        with pytest.raises(UsageError, match="0 cat, 1 dog"):
            wt.train(
                trained / "a", trained / "run3", val=urls, epochs=1, image_size=8, batch_size=8
            )
    assert not (trained / "run3").exists()


def test_classes_of_joined_sets_are_counted_and_trained_by_name(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    urls = [trained / "b", trained / "foxes"]
    done = wt.train(
        urls, tmp_path / "run", epochs=1, image_size=8, batch_size=8, class_weights="balanced"
    )
    assert done.task.heads[0].classes == ("dog", "cat", "fox")
    assert "label: cat 21, dog 20, fox 1" in capsys.readouterr().err
    assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])["samples"]
