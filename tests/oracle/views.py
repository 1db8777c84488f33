"""Ways to request samples from a loader, and the expected delivery for a sample of the model."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

import wdstrain as wt
from tests.oracle.data_set import CLASSES, LARGE, SHAPE, SIDES, DataSet, Sample

# field that a view decodes -> bytes which no decoder accepts
BROKEN = {
    "cls": b"not a class",
    "npy": b"\x93NUMPY\x01\x00 cut off",
    "png": b"\x89PNG\r\n\x1a\n cut off",
    "json": b'{"angle": ',
}
DECODED = {
    "tensors": ("cls", "npy", "png"),
    "lists": ("npy", "png", "json"),
    "transform": ("json",),
    "collated transform": ("json",),
    "raw": ("cls", "npy"),
}


def example(sample: Mapping[str, Any]) -> dict[str, Any]:
    number, angle = int(sample["number"]), json.loads(sample["json"])["angle"]
    return {"number": number, "sum": zlib.crc32(sample["png"]), "angle": angle}


def random_example(sample: Mapping[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {**example(sample), "drawn": int(rng.integers(0, 1 << 62))}


def as_tuple(sample: Mapping[str, Any]) -> tuple[int, int, float, torch.Tensor]:
    """A user's transform, whose examples only `collated` can join."""
    return (*example(sample).values(), torch.ones(int(sample["number"]) % 5))


def collated(examples: list[Any]) -> dict[str, Any]:
    """A user's function that makes batches."""
    columns = list(zip(*examples, strict=True)) or [(), (), (), ()]
    angles = torch.tensor(columns[2], dtype=torch.float64)
    whole = {"number": torch.tensor(columns[0]), "sum": list(columns[1]), "angle": angles}
    return {**whole, "examples": examples}


NUMBER: dict[str, Any] = {"number": wt.text("number")}
# The arguments of `wt.Loader` for each view but "raw", which needs a set of raw arrays
OPTIONS: dict[str, dict[str, Any]] = {
    "bytes": {},
    "transform": {"transform": example},
    "collated transform": {"transform": as_tuple, "collate_fn": collated},
    "random transform": {"transform": random_example},
    "tensors": {
        "fields": NUMBER
        | {"x": wt.array("npy", shape=SHAPE, dtype="uint8"), "label": wt.label()}
        | {"image": wt.image("png", size=SIDES)}
        | {"crop": wt.image("png", size=(4, 6), augment="rrc+flip")}
    },
    "lists": {
        "fields": NUMBER
        | {"x": wt.array("npy"), "image": wt.image("png"), "document": wt.json("json")}
        | {"angle": wt.number("json.angle"), "kind": wt.label("json.kind", classes=CLASSES)}
    },
}
VIEWS = tuple(OPTIONS)
ARRAY = wt.array("npy", shape=LARGE, dtype="float64")
OPTIONS["raw"] = {"fields": NUMBER | {"x": ARRAY, "label": wt.label()}}


def rows(batch: Mapping[str, Any]) -> list[int]:
    """Return the numbers of the samples of a batch, row by row; padding counts as a row."""
    return [int(number) for number in batch["number"]]


def drawn(batch: Mapping[str, Any]) -> list[Any]:
    """Return what random numbers made: it depends on the seed, the epoch and the sample alone."""
    return [batch[name].tolist() for name in ("drawn", "crop", "__rng__") if name in batch]


def compare(view: str, batch: Mapping[str, Any], data: DataSet) -> None:
    by_number = data.by_number()
    for row, number in enumerate(rows(batch)):
        sample = by_number[number]
        assert batch["__key__"][row] == sample.key
        if view == "bytes":
            names = {name for each in by_number.values() for name in each.fields}
            delivered = {name: batch[name][row] for name in names if batch[name][row] is not None}
            assert delivered == sample.fields
        elif "transform" in view:
            assert int(batch["sum"][row]) == zlib.crc32(sample.fields["png"])
            assert float(batch["angle"][row]) == sample.angle
            if "examples" in batch:
                assert len(batch["examples"][row][3]) == number % 5
        else:
            compare_values(view, batch, row, sample)


def compare_values(view: str, batch: Mapping[str, Any], row: int, sample: Sample) -> None:
    assert np.array_equal(np.asarray(batch["x"][row]), sample.array)
    if view == "tensors":
        for image in (batch["image"], batch["crop"]):
            assert image.dtype == torch.uint8
            assert image.is_contiguous(memory_format=torch.channels_last)
    if view != "raw":
        assert np.array_equal(np.asarray(batch["image"][row]), sample.pixels.transpose(2, 0, 1))
    if view == "lists":
        assert batch["document"][row]["number"] == sample.number
        assert float(batch["angle"][row]) == float(np.float32(sample.angle))
        assert int(batch["kind"][row]) == sample.label
    else:
        assert batch["label"].dtype == torch.int64
        assert int(batch["label"][row]) == sample.label
