"""Boxes are checked against their image and classes, drawn on sheets, and counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wdstrain as wt
from tests.conftest import write_tar
from tests.support.scenes import NAMES, Scene, scene

COUNT = 4


def packed(folder: Path, turned: bool = False) -> list[Scene]:
    rng = np.random.default_rng(0)
    scenes = [scene(rng, 60, 120, count) for count in (3, 0, 3, 1)]
    samples = [
        {
            "__key__": f"k{n}",
            "png": own.file("PNG", 6 if turned else 1),
            "boxes.json": json.loads(own.member),
        }
        for n, own in enumerate(scenes)
    ]
    label = wt.Label("boxes", "boxes", "boxes.json", classes=NAMES[::-1])  # drawn in other colors
    wt.pack(samples, folder, labels=[label], shuffle=False)
    return scenes


@pytest.mark.parametrize("turned", [False, True])
def test_good_boxes_are_verified_without_a_finding(turned: bool, tmp_path: Path) -> None:
    packed(tmp_path / "set", turned)
    assert wt.verify(tmp_path / "set", decode=True).ok


FINDINGS: list[tuple[Any, str]] = [
    ({"boxes": [[0, 0, 130, 5]], "labels": ["red"]}, "reaches beyond its upright image"),
    ({"boxes": [[0, -1.5, 13, 5]], "labels": ["red"]}, "reaches beyond its upright image"),
    ({"boxes": [[5, 0, 5, 5]], "labels": ["red"]}, "x0 < x1"),
    ({"boxes": [[0, 0, 5, float("inf")]], "labels": ["red"]}, "finite"),
    ({"boxes": [[0, 0, 5]], "labels": ["red"]}, "four finite numbers"),
    ({"boxes": [[0, 0, 5, 5]], "labels": ["pink"]}, "'pink' is none of the 3 classes"),
    ({"boxes": [[0, 0, 5, 5]], "labels": []}, "as many labels as boxes"),
    ({"boxes": [[-0.9, 0, 120.9, 60.9]], "labels": [2]}, ""),
]


@pytest.mark.parametrize(("document", "message"), FINDINGS)
def test_wrong_boxes_are_findings(document: Any, message: str, tmp_path: Path) -> None:
    image = scene(np.random.default_rng(0), 60, 120).file("PNG")
    write_tar(
        tmp_path / "a.tar", [("k", {"png": image, "boxes.json": json.dumps(document).encode()})]
    )
    wt.index(tmp_path, label="boxes.json", classes=NAMES)
    found = [finding.sentence for finding in wt.verify(tmp_path, decode=True).findings]
    assert len(found) == bool(message)
    assert all(message in sentence and "boxes.json" in sentence for sentence in found)


def test_the_index_counts_boxes_by_class_and_selects_images_by_their_classes(
    tmp_path: Path,
) -> None:
    packed(tmp_path / "set")
    info = wt.info(tmp_path / "set")
    assert info.labels[0].summary == "boxes of 3 classes: blue, green, red"
    assert {column.name: column.classes for column in info.columns} == {
        "boxes.json.labels": {"red": 3, "green": 2, "blue": 2}
    }
    assert len(wt.open(tmp_path / "set").where("'green' in `boxes.json.labels`")) == 2


def test_boxes_are_no_label_that_the_trainer_learns(tmp_path: Path) -> None:
    packed(tmp_path / "set")
    with pytest.raises(
        wt.UsageError, match=r"label 'boxes' cannot be learned: it is of kind boxes"
    ):
        wt.train(tmp_path / "set", out=tmp_path / "run")


def test_a_sheet_shows_boxes_with_the_names_of_their_classes(tmp_path: Path) -> None:
    scenes = packed(tmp_path / "set")
    views = wt.peek(tmp_path / "set", COUNT)
    for own, view in zip(scenes, views, strict=True):
        pixels = view.pictures["png"]
        assert not view.error
        changed = (pixels != own.pixels).any(-1)
        for x0, y0, x1, y1 in np.array(own.boxes, int).reshape(-1, 4):
            edge = np.zeros_like(changed)
            edge[y0:y1, [x0, x1 - 1]] = edge[[y0, y1 - 1], x0:x1] = True
            assert changed[edge].mean() > 0.9
        assert changed.any() == bool(own.boxes)
