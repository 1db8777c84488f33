"""Inputs that the user gives, labels that are fields, and errors of both.

tests/oracle/test_training.py draws images, arrays, both, and fields of the user's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import wdstrain as wt
from tests.support.small_runs import Linear, last, rows_of, small_image

QUICK: dict[str, Any] = {"epochs": 2, "batch_size": 8, "lr": 0.01}
CLASSES = ["ant", "bee", "cow"]


def sample(number: int) -> dict[str, Any]:
    entries = {"age": number / 2, "kind": number % 3, "tags": CLASSES[: number % 3]}
    fields = {"png": small_image(number), "x.npy": np.full(3, number / 40, np.float32)}
    return {"__key__": f"{number:03d}", **fields, "cls": number % 3, "json": entries}


class Sets(NamedTuple):
    train: Path
    val: Path


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Sets:
    """Samples 0 to 23 for training and 24 to 39 for validation, with one declared label."""
    out = tmp_path_factory.mktemp("inputs")
    sets = Sets(out / "train", out / "val")
    for path, numbers in zip(sets, (range(24), range(24, 40)), strict=True):
        wt.pack(map(sample, numbers), path, classes=CLASSES, shuffle=False)
    return sets


def train(shards: Sets, out: Path, **options: Any) -> Any:
    return wt.train(shards.train, out, **{"val": shards.val, **QUICK, **options})


class Both(nn.Module):
    """A model of an image and numbers."""

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
    shards: Sets, tmp_path: Path
) -> None:
    inputs: dict[str, Any] = {"model": Both, "fields": SEVERAL}
    train(shards, tmp_path / "run", epochs=1, **inputs)
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
    """Also for shards that number the same classes differently."""
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


def test_the_image_size_of_a_model_comes_from_its_field(shards: Sets, tmp_path: Path) -> None:
    """The model "small" immediately halves images of 48 pixels and more."""
    done = train(shards, tmp_path / "fields", fields={"image": wt.image(size=48)})
    other = train(shards, tmp_path / "options", image_size=48)
    torch.testing.assert_close(done.model.state_dict(), other.model.state_dict(), rtol=0, atol=0)
    metrics = wt.evaluate(last(tmp_path / "fields"), shards.val)[1]
    assert metrics["loss"] == pytest.approx(done.val["loss"], abs=1e-6) == other.val["loss"]


def test_targets_of_undeclared_labels_are_beside_predictions(shards: Sets, tmp_path: Path) -> None:
    bare = Sets(tmp_path / "train.tar", tmp_path / "val.tar")
    for path, packed in zip(bare, shards, strict=True):
        path.write_bytes((packed / "train-000000.tar").read_bytes())
    train(bare, tmp_path / "run", label="cls", classes=CLASSES, image_size=8)
    wt.predict(last(tmp_path / "run"), bare.val, tmp_path / "p.csv")
    rows = rows_of(tmp_path / "p.csv")
    assert [row["label_true"] for row in rows] == [CLASSES[n % 3] for n in range(24, 40)]


class Own:
    """A field of the user's."""

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
        ({"val_fields": {**IMAGE, "label": wt.number("json.age")}}, "reads another value"),
        ({"fields": {**IMAGE, "label": Own()}}, "reads another value"),
        ({"fields": {"image": "png"}}, "must be a dict of fields"),
        ({"fields": {"image": wt.image()}}, "without a fixed size"),
        ({"fields": array(4, "float32")}, "No good sample"),
        ({"fields": {"image": wt.number("json.height")}}, "No good sample"),
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
    shards: Sets, tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    with pytest.raises((wt.UsageError, wt.SampleError), match=words):
        train(shards, tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()
