"""Samples of a run, the source of their labels, and inputs that the user gives."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import webdataset as wds
from PIL import Image
from torch import Tensor, nn

import wdstrain as wt
from tests.conftest import encoded
from tests.support.small_runs import Linear, Lines, last, rows_of, saved, small_image
from wdstrain.cli import main

QUICK: dict[str, Any] = {"epochs": 1, "batch_size": 8, "image_size": 8}
KINDS = ("cat", "dog", "elk")


def image(number: int) -> bytes:
    """A red, green or blue image."""
    return encoded(Image.new("RGB", (8, 8), ("red", "lime", "blue")[number % 3]), "PNG")


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of three splits, whose classes have 45, 27 and 18 of 90 samples."""
    folder = tmp_path_factory.mktemp("data") / "shards"
    kinds = [KINDS[(i % 10 >= 5) + (i % 10 >= 8)] for i in range(90)]
    samples = (
        {"__key__": f"{i:03d}", "png": image(i), "cls": kind, "json": {"group": i % 2}}
        for i, kind in enumerate(kinds)
    )
    split = {"train": 0.6, "extra": 0.2, "val": 0.2}
    wt.pack(samples, folder, split=split, stratify="label", classes=KINDS)
    return folder


def sizes(run: wt.TrainResult) -> tuple[int, int]:
    """Return the samples of the first epoch of a run, and of its validation."""
    line = run.epochs[0]
    return line["samples"] + line["left_out"], int(run.val["samples"])


@pytest.mark.parametrize("where", ["key != ''", "group == 1"])
def test_each_fold_validates_on_its_part_and_trains_on_the_others(
    shards: Path, tmp_path: Path, where: str
) -> None:
    """Of all samples, or of the selected ones. Classes are divided evenly."""
    urls = f"{shards}/train-*.tar"
    index = wt.open(urls).where(where)
    label = index.labels[0].name
    whole = Counter(index.table.column(label).to_pylist())
    for part, (train, val) in enumerate(index.folds(4, stratify=label), 1):
        out, table = tmp_path / str(part), tmp_path / f"{part}.csv"
        done = wt.train(urls, out, fold=f"{part}/4", where=where, model=Linear, **QUICK)
        assert sizes(done) == (len(train), len(val))
        counts = Counter(val.table.column(label).to_pylist())
        assert all(abs(counts[kind] - whole[kind] / 4) < 1 for kind in KINDS)
        wt.predict(last(out), val, table, model=Linear)
        assert [row["key"] for row in rows_of(table)] == val.keys(range(len(val)))


def test_train_and_val_may_be_named_splits_but_not_several_unnamed_splits(
    shards: Path, tmp_path: Path
) -> None:
    counts = [len(wt.open(f"{shards}/{split}-*.tar")) for split in ("train", "extra", "val")]
    named: list[Any] = [
        [f"{shards}/train-*.tar", f"{shards}/extra-*.tar"],
        [f"{shards}/extra-000000.tar", f"{shards}/train-000000.tar"],
        f"{shards}/{{train,extra}}-*.tar",
    ]
    for number, urls in enumerate(named):
        out = tmp_path / str(number)
        done = wt.train(urls, out, val=[f"{shards}/val-*.tar"], model=Linear, **QUICK)
        assert sizes(done) == (counts[0] + counts[1], counts[2])
    train, val = f"{shards}/train-*.tar", f"{shards}/val-*.tar"
    for urls, options, words in (
        (f"{shards}/*.tar", {"val": val}, "holds several splits: extra, train, val"),
        (shards, {"fold": "1/3"}, "holds several splits"),
        (train, {"val": val, "fold": "1/3"}, "Give either fold or val"),
    ):
        with pytest.raises(wt.UsageError, match=words):
            wt.train(urls, tmp_path / "run", **options, **QUICK)
    assert not (tmp_path / "run").exists()
    with pytest.raises(wt.UsageError, match="several splits"):
        wt.evaluate(last(tmp_path / "0"), shards, model=Linear)


@pytest.mark.parametrize(
    ("label", "classes", "expected"),
    [
        ("cls", None, ("0", "1", "2")),
        ("cls", "cat,dog,elk", KINDS),
        ("json.kind", None, KINDS),
        ("json.kind", "elk,dog,cat", KINDS[::-1]),
        ("txt:class", None, KINDS),
    ],
)
def test_shards_made_by_webdataset_are_trained_on_without_conversion(
    tmp_path: Path, label: str, classes: str | None, expected: tuple[str, ...]
) -> None:
    for split, start in (("train", 0), ("val", 1000)):
        with wds.TarWriter(str(tmp_path / f"{split}-000000.tar")) as writer:
            for i in range(24):
                kind = KINDS[i % 3]
                fields = {"png": image(i), "cls": i % 3, "json": {"kind": kind, "size": i}}
                writer.write({"__key__": f"{start + i:04d}", **fields, "txt": kind})
    options = {**QUICK, "epochs": 3, "lr": 0.02, "schedule": "constant", "model": Linear}
    options |= {"val": f"{tmp_path}/val-*.tar", "label": label, "classes": classes}
    done = wt.train(f"{tmp_path}/train-*.tar", tmp_path / "run", **options)
    assert done.task.heads[0].classes == expected
    assert done.val["accuracy"] == 1.0


def test_classes_may_be_learned_as_numbers_if_they_are_numbers(tmp_path: Path) -> None:
    ages, kinds = [20, 30] * 8, ["cat", "dog"] * 8
    labels = [wt.Label("age", "class", "json", "age", ("20", "30"))]
    labels += [wt.Label("kind", "class", "json", "kind", ("cat", "dog"))]
    rows = [
        {"png": image(0), "json": {"age": a, "kind": k}} for a, k in zip(ages, kinds, strict=True)
    ]
    wt.pack(rows, tmp_path / "set", labels=labels)
    options = {**QUICK, "model": Linear}
    head = wt.train(tmp_path / "set", tmp_path / "run", label="age:number", **options).task.heads[0]
    assert (head.kind, head.mean, head.deviation) == ("number", 25, 5)
    with pytest.raises(wt.UsageError, match="cannot be learned as 'number': its values are names"):
        wt.train(tmp_path / "set", tmp_path / "other", label="kind:number", **options)


def test_a_run_prints_its_data_and_the_best_checkpoint(shards: Path, tmp_path: Path) -> None:
    lines = Lines()
    done = wt.train(shards, tmp_path / "run", model=Linear, device="cpu", progress=lines, **QUICK)
    assert lines.lines[:4] == [
        "model tests.support.small_runs:Linear: 579 parameters, on cpu",
        "task: label (one of 3 classes)",
        "training: 54 samples; label: cat 27, dog 16, elk 11",
        "validation: 18 samples; label: cat 9, dog 6, elk 3",
    ]
    accuracy = f"{done.val['accuracy']:.2%}"
    assert lines.lines[-2:] == [
        "training ended: the 1 epoch is done",
        f"best.pt is of epoch 1: accuracy {accuracy}, the highest of all epochs",
    ]


def test_the_image_size_may_be_height_and_width(shards: Path, tmp_path: Path) -> None:
    """The model takes images of 4 x 16 pixels."""
    model = "tests.support.small_runs:Linear"
    (tmp_path / "recipe.toml").write_text("image_size = [4, 16]\n")
    words = ["train", str(shards), "--model", model, "--epochs", "1", "--batch-size", "8"]
    assert main([*words, "--out", f"{tmp_path}/flag", "--image-size", "4x16"]) == 0
    assert main([*words, "--out", f"{tmp_path}/file", "--config", f"{tmp_path}/recipe.toml"]) == 0
    wt.train(shards, tmp_path / "keyword", model=model, **{**QUICK, "image_size": (4, 16)})
    for name in ("flag", "file", "keyword"):
        assert saved(tmp_path / name)["1.weight"].shape == (3, 192)


TWICE: dict[str, Any] = {"epochs": 2, "batch_size": 8, "lr": 0.01}
CLASSES = ["ant", "bee", "cow"]


def sample(number: int) -> dict[str, Any]:
    entries = {"age": number / 2, "kind": number % 3, "tags": CLASSES[: number % 3]}
    fields = {"png": small_image(number), "x.npy": np.full(3, number / 40, np.float32)}
    return {"__key__": f"{number:03d}", **fields, "cls": number % 3, "json": entries}


class Sets(NamedTuple):
    train: Path
    val: Path


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Sets:
    """Samples 0 to 23 for training and 24 to 39 for validation, with one declared label."""
    out = tmp_path_factory.mktemp("inputs")
    sets = Sets(out / "train", out / "val")
    for path, numbers in zip(sets, (range(24), range(24, 40)), strict=True):
        wt.pack(map(sample, numbers), path, classes=CLASSES, shuffle=False)
    return sets


def train(sets: Sets, out: Path, **options: Any) -> Any:
    return wt.train(sets.train, out, **{"val": sets.val, **TWICE, **options})


class Both(nn.Module):
    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.of_image, self.of_numbers = nn.Linear(192, outputs), nn.Linear(4, outputs)

    def forward(self, image: Tensor, x: Tensor, age: Tensor) -> Tensor:
        numbers = torch.cat([x, age[:, None]], 1)
        result: Tensor = self.of_image(image.flatten(1)) + self.of_numbers(numbers)
        return result


SEVERAL = {
    "image": wt.image(size=8),
    "x": wt.array("x.npy", shape=(3,), dtype="float32"),
    "age": wt.number("json.age"),
}


def test_files_of_images_are_refused_and_an_exported_model_names_its_inputs(
    sets: Sets, tmp_path: Path
) -> None:
    inputs: dict[str, Any] = {"model": Both, "fields": SEVERAL}
    train(sets, tmp_path / "run", epochs=1, **inputs)
    wt.export(last(tmp_path / "run"), tmp_path / "m.pt2", model=Both)
    about = json.loads((tmp_path / "m.pt2.json").read_text())["inputs"]
    shapes = {"image": [None, 3, 8, 8], "x": [None, 3], "age": [None]}
    assert {own["name"]: own["shape"] for own in about} == shapes
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.png").write_bytes(small_image(1))
    with pytest.raises(wt.UsageError, match="image files give one input, and the model has 3"):
        wt.predict(last(tmp_path / "run"), tmp_path / "images", tmp_path / "q.csv", **inputs)


class Kinds(nn.Module):
    """A model of a class number, a list of classes and tokens, which keeps the class numbers."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.words, self.linear = nn.Embedding(3, 4), nn.Linear(10, outputs)
        self.seen: list[Tensor] = []

    def forward(self, kind: Tensor, tags: Tensor, tokens: Tensor) -> Tensor:
        assert (tokens.dtype, kind.dtype, tags.dtype) == (torch.int64, torch.int64, torch.float32)
        self.seen.append(kind)
        kinds = nn.functional.one_hot(kind, 3)
        return self.linear(torch.cat([kinds, tags, self.words(tokens).mean(1)], 1))


def test_class_numbers_tokens_and_lists_of_classes_are_inputs_with_the_numbers_of_training(
    tmp_path: Path,
) -> None:
    """Also for sets that number the same classes differently."""
    sets, rows = (
        Sets(tmp_path / "train", tmp_path / "val"),
        [
            {
                "__key__": f"{n:03d}",
                "json": {"age": n, "kind": CLASSES[n % 3], "tags": CLASSES[: n % 3]},
                "t.npy": np.full(5, n % 3),
            }
            for n in range(40)
        ],
    )
    for path, part, classes in zip(
        sets, (rows[:24], rows[24:]), (("ant", "bee", "cow"), ("cow", "ant", "bee")), strict=True
    ):
        labels = [
            wt.Label("kind", "class", "json", "kind", classes),
            wt.Label("tags", "multi", "json", "tags", classes),
            wt.Label("age", "number", "json", "age"),
        ]
        wt.pack(part, path, labels=labels, shuffle=False)
    fields = {"kind": wt.label("json.kind"), "tags": wt.label("json.tags", multi=True)}
    fields |= {"tokens": wt.array("t.npy", shape=(5,), dtype="int64")}
    done = train(sets, tmp_path / "run", model=Kinds, fields=fields, label="age")
    assert torch.cat(done.model.seen[-2:]).tolist() == [n % 3 for n in range(24, 40)]
    best, predicted = last(tmp_path / "run"), []
    for given in ({}, {"fields": fields}):
        metrics = wt.evaluate(best, sets.val, model=Kinds, **given)[1]
        assert metrics["loss"] == pytest.approx(done.val["loss"], abs=1e-6)
    for path in sets:
        wt.predict(best, path, tmp_path / "p.csv", model=Kinds)
        predicted.append({(int(r["key"]) % 3, r["age"]) for r in rows_of(tmp_path / "p.csv")})
    assert predicted[0] == predicted[1]


def test_the_image_size_of_a_model_comes_from_its_field(sets: Sets, tmp_path: Path) -> None:
    """The model "small" immediately halves images of 48 pixels and more."""
    done = train(sets, tmp_path / "fields", fields={"image": wt.image(size=48)})
    other = train(sets, tmp_path / "options", image_size=48)
    torch.testing.assert_close(done.model.state_dict(), other.model.state_dict(), rtol=0, atol=0)
    metrics = wt.evaluate(last(tmp_path / "fields"), sets.val)[1]
    assert metrics["loss"] == pytest.approx(done.val["loss"], abs=1e-6) == other.val["loss"]


def test_targets_of_undeclared_labels_are_beside_predictions(sets: Sets, tmp_path: Path) -> None:
    bare = Sets(tmp_path / "train.tar", tmp_path / "val.tar")
    for path, packed in zip(bare, sets, strict=True):
        path.write_bytes((packed / "train-000000.tar").read_bytes())
    train(bare, tmp_path / "run", label="cls", classes=CLASSES, image_size=8)
    wt.predict(last(tmp_path / "run"), bare.val, tmp_path / "p.csv")
    rows = rows_of(tmp_path / "p.csv")
    assert [row["label_true"] for row in rows] == [CLASSES[n % 3] for n in range(24, 40)]


class Own:
    names = ("png",)
    example = wt.Example((3, 8, 8), "float32")

    def read(self, name: str, data: memoryview, out: Any, draws: Any) -> None: ...


IMAGE = {"image": wt.image(size=8)}


def array(length: int, dtype: str) -> dict[str, Any]:
    return {"x": wt.array("x.npy", shape=(length,), dtype=dtype)}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"fields": {"label": wt.label()}}, "gives no input of the model.*Labels are named"),
        ({"fields": {"a b": wt.image(size=8), "b": IMAGE["image"]}}, "names an input 'a b'"),
        ({"fields": {**IMAGE, "label": wt.label(classes=["x", "y"])}}, "reads another value"),
        ({"fields": {**IMAGE, "label": Own()}}, "reads another value"),
        ({"fields": {"image": "png"}}, "must be a dict of fields"),
        ({"fields": {"image": wt.image()}}, "without a fixed size"),
        ({"fields": array(4, "float32")}, "No good sample"),
        ({"val_fields": {"image": wt.image(size=8, augment="flip")}}, "val_fields= augments image"),
        ({"fields": {"image": Own()}, "augment": "flip"}, "augment='flip' has no effect with fiel"),
        ({"val": None, "val_fields": IMAGE}, "val_fields and the schedule plateau need"),
        ({"model": Linear, "fields": SEVERAL}, "not take the keyword arguments image, x, age"),
        ({"model": Both, "fields": SEVERAL, "mixup": 0.2}, "need a single input"),
        ({"fields": SEVERAL, "image_size": 32}, "image_size=32 has no effect with fields="),
        (
            {"model": Both, "fields": SEVERAL, "val_fields": {**SEVERAL, **array(3, "float64")}},
            "x: float64",
        ),
    ],
)
def test_fields_that_are_no_inputs_or_do_not_fit_other_options_are_refused(
    sets: Sets, tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    with pytest.raises((wt.UsageError, wt.SampleError), match=words):
        train(sets, tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()
