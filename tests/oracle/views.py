"""Ways to request samples from a loader, and the expected delivery for a sample of the model."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

import wdstrain as wt
from tests.oracle.data_set import CLASSES, LARGE, SHAPE, DataSet, Sample

# field that a view decodes -> bytes which no decoder accepts
BROKEN = {
    "cls": b"not a class",
    "npy": b"\x93NUMPY\x01\x00 cut off",
    "png": b"\x89PNG\r\n\x1a\n cut off",
    "json": b'{"angle": ',
}


def example(sample: Mapping[str, Any]) -> dict[str, Any]:
    """A user's transform."""
    return {
        "number": int(sample["number"]),
        "sum": zlib.crc32(sample["png"]),
        "angle": json.loads(sample["json"])["angle"],
    }


def random_example(sample: Mapping[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """A user's transform with random numbers."""
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


def options(view: str) -> dict[str, Any]:
    """The arguments of `wt.Loader` for this view."""
    if view == "bytes":
        return {}
    if view == "transform":
        return {"transform": example}
    if view == "collated transform":
        return {"transform": as_tuple, "collate_fn": collated}
    if view == "random transform":
        return {"transform": random_example}
    fields: dict[str, Any] = {"number": wt.text("number")}
    if view == "raw":
        fields |= {"x": wt.array("npy", shape=LARGE, dtype="float64"), "label": wt.label()}
    elif view == "tensors":
        fields |= {"x": wt.array("npy", shape=SHAPE, dtype="uint8"), "label": wt.label()}
        fields |= {"image": wt.image("png", size=SIDE)}
        fields |= {"crop": wt.image("png", size=(4, 6), augment="rrc+flip")}
    else:
        fields |= {"x": wt.array("npy"), "image": wt.image("png"), "document": wt.json("json")}
        fields |= {"angle": wt.number("json.angle")}
        fields |= {"kind": wt.label("json.kind", classes=CLASSES)}
    return {"fields": fields}


SIDE = (5, 7)
VIEWS = ("bytes", "transform", "collated transform", "random transform", "tensors", "lists")
DECODED = {
    "tensors": ("cls", "npy", "png"),
    "lists": ("npy", "png", "json"),
    "transform": ("json",),
    "collated transform": ("json",),
    "raw": ("cls", "npy"),
}


def rows(view: str, batch: Mapping[str, Any]) -> list[int]:
    """Return the numbers of the samples of a batch, row by row; padding counts as a row."""
    return [int(number) for number in batch["number"]]


def drawn(batch: Mapping[str, Any]) -> list[Any]:
    """Return what random numbers made: it depends on the seed, the epoch and the sample alone."""
    return [batch[name].tolist() for name in ("drawn", "crop", "__rng__") if name in batch]


def compare(
    view: str, batch: Mapping[str, Any], data: DataSet, classes: tuple[str, ...] = ()
) -> None:
    """Assert that every row holds the values of its sample in the model."""
    by_number = data.by_number()
    for row, number in enumerate(rows(view, batch)):
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
            _compare_values(view, batch, row, sample, classes)


def _compare_values(
    view: str, batch: Mapping[str, Any], row: int, sample: Sample, classes: tuple[str, ...]
) -> None:
    assert np.array_equal(np.asarray(batch["x"][row]), sample.array)
    if view == "tensors":
        for image in (batch["image"], batch["crop"]):
            assert image.dtype == torch.uint8
            assert image.is_contiguous(memory_format=torch.channels_last)
    if view in ("raw", "tensors"):
        assert batch["label"].dtype == torch.int64
    if view != "raw":
        assert np.array_equal(np.asarray(batch["image"][row]), sample.pixels.transpose(2, 0, 1))
    if view in ("raw", "tensors"):
        label = int(batch["label"][row])
        assert (classes[label] if classes else label) == (
            CLASSES[sample.label] if classes else sample.label
        )
    else:
        assert batch["document"][row]["number"] == sample.number
        assert float(batch["angle"][row]) == float(torch.tensor(sample.angle, dtype=torch.float32))
        assert int(batch["kind"][row]) == sample.label
