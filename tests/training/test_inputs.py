"""Inputs given by the user: several inputs and labels among the fields."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import wdstrain as wt

QUICK: dict[str, Any] = {"epochs": 2, "batch_size": 8, "lr": 0.01}
CLASSES = ["ant", "bee", "cow"]
MEAN = torch.tensor((0.485, 0.456, 0.406)).view(3, 1, 1)
STD = torch.tensor((0.229, 0.224, 0.225)).view(3, 1, 1)


def png(number: int, side: int = 8) -> bytes:
    """Random pixels as a PNG."""
    pixels = np.random.default_rng(number).integers(0, 256, (side, side, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue()


def sample(number: int) -> dict[str, Any]:
    entries = {"age": number / 2, "kind": number % 3, "tags": CLASSES[: number % 3]}
    array = np.full(3, number / 40, np.float32)
    return {"__key__": f"{number:03d}", "png": png(number), "x.npy": array, "cls": number % 3} | {
        "json": entries
    }


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
    """A model of an image and numbers, which keeps its inputs."""

    seen: list[dict[str, Tensor]]

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.of_image = nn.Linear(3 * 8 * 8, outputs)
        self.of_numbers = nn.Linear(4, outputs)
        self.seen = []

    def forward(self, image: Tensor, x: Tensor, age: Tensor) -> Tensor:
        self.seen.append({"image": image, "x": x, "age": age})
        numbers = torch.cat([x, age[:, None]], 1)
        result: Tensor = self.of_image(image.flatten(1)) + self.of_numbers(numbers)
        return result


class One(nn.Module):
    """A linear model of images, which keeps its inputs."""

    seen: list[Tensor]

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(3 * 8 * 8, outputs)
        self.seen = []

    def forward(self, image: Tensor) -> Tensor:
        self.seen.append(image.detach().clone())
        result: Tensor = self.linear(image.flatten(1))
        return result


SEVERAL = {
    "image": wt.image(size=8),
    "x": wt.array("x.npy", shape=(3,), dtype="float32"),
    "age": wt.number("json.age"),
}


def decoded(data: bytes) -> np.ndarray[Any, Any]:
    """Pixels of a PNG, uint8[3, h, w]."""
    return np.asarray(Image.open(io.BytesIO(data))).transpose(2, 0, 1)


def checkpoint(run: Path) -> Path:
    return run / "checkpoints" / "last.pt"


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def weights(run: Any) -> list[Tensor]:
    return list(run.model.state_dict().values())


def same(first: Any, second: Any) -> bool:
    """Return whether two runs ended with the same weights and metrics."""
    equal = all(map(torch.equal, weights(first), weights(second)))
    return equal and first.val == pytest.approx(second.val)


# --- several inputs ---


def test_several_inputs_are_keyword_arguments(shards: Sets, tmp_path: Path) -> None:
    done = train(shards, tmp_path / "run", model=Both, fields=SEVERAL)
    seen = done.model.seen[1:]  # type: ignore[union-attr, index]  # the first is a trial
    first = torch.cat([batch["x"] for batch in seen])[:24]
    assert sorted((first[:, 0] * 40).round().int().tolist()) == list(range(24))
    for batch in seen:
        numbers = (batch["x"][:, 0] * 40).round().int().tolist()
        assert batch["age"].dtype == torch.float32
        assert batch["age"].tolist() == [n / 2 for n in numbers]
        pixels = torch.stack([torch.from_numpy(decoded(png(n)).copy()) for n in numbers])
        assert torch.allclose(batch["image"], (pixels / 255 - MEAN) / STD, atol=1e-5)


def test_a_model_of_several_inputs_is_resumed_scored_predicted_and_exported(
    shards: Sets, tmp_path: Path
) -> None:
    inputs: dict[str, Any] = {"model": Both, "fields": SEVERAL}
    train(shards, tmp_path / "run", epochs=1, **inputs)
    done = train(shards, tmp_path / "run", resume=True, **inputs)
    val, last = shards.val, checkpoint(tmp_path / "run")
    assert wt.evaluate(last, val, **inputs)[1]["loss"] == pytest.approx(done.val["loss"], abs=1e-6)
    wt.predict(last, val, tmp_path / "p.csv", probabilities=True, **inputs)
    wt.export(last, tmp_path / "m.pt2", model=Both)
    program: Any = torch.export.load(tmp_path / "m.pt2").module()
    rows = rows_of(tmp_path / "p.csv")
    assert [row["key"] for row in rows] == [f"{n:03d}" for n in range(24, 40)]
    for n, row in enumerate(rows, 24):
        pixels = torch.from_numpy(decoded(png(n)).copy())[None].float()
        x, age = torch.full((1, 3), n / 40), torch.tensor([n / 2])
        shares = program(pixels, x, age).softmax(1)[0].tolist()
        assert [float(row[f"label_{name}"]) for name in CLASSES] == pytest.approx(shares, abs=1e-5)
        assert row["label_true"] == CLASSES[n % 3]
    about = json.loads((tmp_path / "m.pt2.json").read_text())["inputs"]
    shapes = {"image": [None, 3, 8, 8], "x": [None, 3], "age": [None]}
    assert {own["name"]: own["shape"] for own in about} == shapes
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.png").write_bytes(png(1))
    with pytest.raises(wt.UsageError, match="image files give one input, and the model has 3"):
        wt.predict(last, tmp_path / "images", tmp_path / "q.csv", **inputs)


def test_class_numbers_and_tokens_reach_the_model_as_int64(tmp_path: Path) -> None:
    class Words(nn.Module):
        def __init__(self, outputs: int) -> None:
            super().__init__()
            self.words, self.kinds = nn.Embedding(9, 4), nn.Embedding(3, 4)
            self.last = nn.Linear(4, outputs)

        def forward(self, tokens: Tensor, kind: Tensor) -> Tensor:
            assert tokens.dtype == kind.dtype == torch.int64
            result: Tensor = self.last(self.words(tokens).mean(1) + self.kinds(kind))
            return result

    samples = (
        {"t.npy": np.full(5, n % 9, np.int64), "kind.txt": str(n % 3), "cls": n % 2}
        for n in range(32)
    )
    wt.pack(samples, tmp_path / "set", classes=["a", "b"])
    fields = {
        "tokens": wt.array("t.npy", shape=(5,), dtype="int64"),
        "kind": wt.label("kind.txt"),
    }
    done = wt.train(tmp_path / "set", tmp_path / "run", model=Words, fields=fields, **QUICK)
    assert len(done.epochs) == 2


def test_class_numbers_as_inputs_are_those_of_training(tmp_path: Path) -> None:
    """Also for shards that number the same classes differently, and for lists of classes."""

    class Kinds(nn.Module):
        seen: list[Tensor]

        def __init__(self, outputs: int) -> None:
            super().__init__()
            self.linear = nn.Linear(6, outputs)
            self.seen = []

        def forward(self, kind: Tensor, tags: Tensor) -> Tensor:
            kinds = nn.functional.one_hot(kind, 3)
            self.seen.append(kind)
            result: Tensor = self.linear(torch.cat([kinds, tags], 1))
            return result

    def numbered(*classes: str) -> list[wt.Label]:
        return [
            wt.Label("kind", "class", "json", "kind", classes),
            wt.Label("tags", "multi", "json", "tags", classes),
            wt.Label("age", "number", "json", "age"),
        ]

    def rows(numbers: range) -> list[dict[str, Any]]:
        return [
            {
                "__key__": f"{n:03d}",
                "json": {"age": n, "kind": CLASSES[n % 3], "tags": CLASSES[: n % 3]},
            }
            for n in numbers
        ]

    sets = Sets(tmp_path / "train", tmp_path / "val")
    wt.pack(rows(range(24)), sets.train, labels=numbered("ant", "bee", "cow"))
    wt.pack(rows(range(24, 40)), sets.val, labels=numbered("cow", "ant", "bee"), shuffle=False)
    fields = {
        "kind": wt.label("json.kind"),
        "tags": wt.label("json.tags", multi=True),
    }
    done = train(sets, tmp_path / "run", model=Kinds, fields=fields, label="age")
    assert torch.cat(done.model.seen[-2:]).tolist() == [n % 3 for n in range(24, 40)]
    last = checkpoint(tmp_path / "run")
    for given in ({}, {"fields": fields}):
        metrics = wt.evaluate(last, sets.val, model=Kinds, **given)[1]  # type: ignore[arg-type]
        assert metrics["loss"] == pytest.approx(done.val["loss"], abs=1e-6)
    predicted = {}
    for name in sets._fields:
        wt.predict(last, getattr(sets, name), tmp_path / "p.csv", model=Kinds)
        predicted[name] = {(int(r["key"]) % 3, r["age"]) for r in rows_of(tmp_path / "p.csv")}
    assert predicted["train"] == predicted["val"]


def test_fields_that_read_no_sample_are_refused(shards: Sets, tmp_path: Path) -> None:
    long, whole = (
        wt.array("x.npy", shape=(n,), dtype=t) for n, t in ((4, "float32"), (3, "int64"))
    )
    for field in (long, whole, wt.number("json.height")):
        with pytest.raises(wt.SampleError, match="No good sample"):
            train(shards, tmp_path / "run", model=One, fields={"image": field})
    assert not (tmp_path / "run").exists()


def test_options_that_need_one_input_are_refused_with_several_inputs(
    shards: Sets, tmp_path: Path
) -> None:
    other = {**SEVERAL, "x": wt.array("x.npy", shape=(3,), dtype="float64")}
    refusals: list[tuple[dict[str, Any], str]] = [
        ({"model": One}, r"does not take the keyword arguments image, x, age .*unexpected keyword"),
        ({"mixup": 0.2}, "need a single input"),
        ({"image_size": 32}, "image_size=32 has no effect with fields="),
        ({"val_fields": {"image": wt.image(size=8)}}, "the fields give image: uint8"),
        ({"val_fields": other}, "x: float64"),
    ]
    for options, words in refusals:
        with pytest.raises(wt.UsageError, match=words):
            train(shards, tmp_path / "run", **{"model": Both, "fields": SEVERAL, **options})
    assert not (tmp_path / "run").exists()


def test_the_image_size_of_a_model_comes_from_its_field(shards: Sets, tmp_path: Path) -> None:
    """The model "small" immediately halves images of 48 pixels and more."""
    large = {"image": wt.image(size=48)}
    done = train(shards, tmp_path / "fields", fields=large)
    assert same(done, train(shards, tmp_path / "options", image_size=48))
    last = checkpoint(tmp_path / "fields")
    metrics = wt.evaluate(last, shards.val)[1]
    assert metrics["loss"] == pytest.approx(done.val["loss"], abs=1e-6)


# --- labels among the fields ---


def test_an_entry_of_fields_may_be_the_label_that_is_learned(tmp_path: Path) -> None:
    labels = [
        wt.Label("kind", "class", "json", "kind", ("0", "1", "2")),
        wt.Label("age", "number", "json", "age"),
    ]
    wt.pack(map(sample, range(40)), tmp_path / "set", labels=labels)
    fields = {"image": wt.image(size=8), "label": wt.number("json.age")}
    options = {"label": "age", "model": One, **QUICK}
    done = wt.train(tmp_path / "set", tmp_path / "run", fields=fields, **options)
    assert str(done.task) == "age (a number)"

    for options, words in (
        ({"fields": fields}, "several labels: kind, age, .*Name those to learn"),
        ({"label": "kind", "fields": fields}, "reads another value than the label"),
    ):
        with pytest.raises(wt.WdstrainError, match=words):
            wt.train(tmp_path / "set", tmp_path / "bad", model=One, **options)  # type: ignore[arg-type]
    assert not (tmp_path / "bad").exists()


def test_targets_of_labels_that_no_index_declares_are_beside_predictions(
    shards: Sets, tmp_path: Path
) -> None:
    bare = Sets(tmp_path / "train.tar", tmp_path / "val.tar")
    for path, packed in zip(bare, shards, strict=True):
        path.write_bytes((packed / "train-000000.tar").read_bytes())
    train(bare, tmp_path / "run", label="cls", classes=CLASSES, image_size=8)
    wt.predict(checkpoint(tmp_path / "run"), bare.val, tmp_path / "p.csv")
    rows = rows_of(tmp_path / "p.csv")
    assert [row["label_true"] for row in rows] == [CLASSES[n % 3] for n in range(24, 40)]
