"""Boxes of a joined column are delivered as those of the shards."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import wdstrain as wt
from tests.support.scenes import NAMES, scene


def packed(folder: Path, count: int = 12, broken: Collection[int] = ()) -> None:
    """Pack scenes with their boxes, and join the boxes; broken: samples with an unknown class."""
    rng = np.random.default_rng(count)
    scenes = [scene(rng, *map(int, rng.integers(60, 140, 2))) for _ in range(count)]
    boxes = [{"boxes": own.boxes, "labels": own.names} for own in scenes]
    samples = [
        {"__key__": f"k{n}", "png": own.file("PNG", n % 8 + 1), "boxes.json": boxes[n]}
        for n, own in enumerate(scenes)
    ]
    wt.pack(samples, folder)
    for n in broken:
        boxes[n] = {"boxes": [[1, 2, 3, 4]], "labels": ["unicorn"]}
    counts = wt.join(folder, [{"key": f"k{n}", "Found": row} for n, row in enumerate(boxes)])
    assert counts.columns == {"Found": 0}


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"on_error": "replace"}], ids=str)
def test_boxes_of_a_joined_column_equal_those_of_the_shards(
    options: dict[str, Any], tmp_path: Path
) -> None:
    packed(tmp_path / "out", broken=range(7) if "on_error" in options else ())
    names: dict[str, Any] = {"size": (48, 64), "augment": "rrc+flip", "classes": NAMES}
    fields = {"stored": wt.boxes("boxes", **names), "found": wt.boxes("Found", **names)}
    with wt.Loader(tmp_path / "out", fields, batch_size=4, max_errors=1, **options) as loader:
        batches = [batch for _ in range(2) for batch in loader]
    assert len(batches) == 6
    for batch in batches:
        assert all(map(torch.equal, batch["stored"], batch["found"]))
    assert any(len(batch["found"].boxes) for batch in batches)


@pytest.mark.parametrize(
    ("boxes", "labels"), [([[1, 2, 3]], ["a"]), ([[1, 2, 3, 4]], []), (None, None), ([None], [1])]
)
def test_boxes_of_another_form_are_not_joined(boxes: Any, labels: Any, tmp_path: Path) -> None:
    packed(tmp_path / "out", count=1)
    table = [{"key": "k0", "more": {"boxes": boxes, "labels": labels}}]
    with pytest.raises(
        wt.UsageError, match="'more' .*: boxes are .x0, y0, x1, y1.* as many labels"
    ):
        wt.join(tmp_path / "out", table)


def test_samples_without_a_value_of_joined_boxes_are_left_out_by_a_condition(
    tmp_path: Path,
) -> None:
    packed(tmp_path / "out")
    wt.join(tmp_path / "out", [{"key": "k1", "more": {"boxes": [[1, 2, 3, 4]], "labels": ["a"]}}])
    fields = {"boxes": wt.boxes("more", classes=["a"])}
    with pytest.raises(wt.UsageError, match="11 of 12 samples have no value.*more.* is not None"):
        next(iter(wt.Loader(tmp_path / "out", fields, batch_size=1)))
    with wt.Loader(tmp_path / "out", fields, where="more is not None", batch_size=1) as loader:
        assert next(iter(loader))["boxes"].boxes.tolist() == [[1, 2, 3, 4]]
