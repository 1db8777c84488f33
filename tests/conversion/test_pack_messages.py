"""Messages of `wt.pack` about rows: they name what a row has, and the field that fits a value."""

from __future__ import annotations

import datetime
import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import wdstrain as wt
from tests.conftest import picture
from tests.support.outcomes import result_or_refusal


@pytest.mark.parametrize(
    ("rows", "fields"),
    [
        ([{"image": b"x", "label": 1}], ("jpg", "cls")),
        ([{"image": b"x", "label": 1}], {"jpg": "image", "cls": "label"}),
        ([{"__key__": "a", "image": b"x", "label": 1}], ("jpg",)),
        ([{"image": None, "label": 1}], None),
    ],
)
def test_a_row_of_names_is_packed_or_its_names_are_shown(
    rows: list[dict[str, Any]], fields: Any, tmp_path: Path
) -> None:
    """A message must not say that a row has nothing, nor only a key, when it has an image."""
    options = {"fields": fields} if fields is not None else {}
    outcome = result_or_refusal(lambda: len(wt.pack(rows, tmp_path / "out", **options)))
    if isinstance(outcome, str):
        assert "image" in outcome or "fields=" in outcome


def _opened(kind: str) -> Image.Image:
    return Image.open(io.BytesIO(picture(1, kind=kind)))


@pytest.mark.parametrize(
    ("value", "hints"),
    [
        pytest.param(_opened("JPEG"), "jpg|jpeg|png", id="JPEG of Pillow"),
        pytest.param(_opened("PNG"), "jpg|jpeg|png", id="PNG of Pillow"),
        pytest.param(Image.new("L", (8, 8)), "jpg|jpeg|png", id="made by Pillow"),
        pytest.param({"a": 1}, "json", id="dict"),
        pytest.param({"bytes": picture(1), "path": None}, "jpg|png|bytes|json", id="HF image"),
        pytest.param(Path("a.jpg"), "jpg|png|txt|bytes|read", id="path"),
        pytest.param(io.BytesIO(b"x"), "bytes|read|getvalue|jpg|png", id="file"),
        pytest.param(datetime.date(2020, 1, 2), "txt|json|text", id="date"),
        pytest.param(["a", "b"], "json", id="list of texts"),
        pytest.param([1, 2], "npy|json", id="list of numbers"),
        pytest.param(np.zeros((3, 8, 8), np.float32), "npy", id="array"),
        pytest.param(None, "jpg|png|bytes|json", id="None"),
    ],
)
def test_a_value_without_a_kind_is_packed_or_its_usual_field_is_named(
    value: Any, hints: str, tmp_path: Path
) -> None:
    """Rows as data sets of Hugging Face have them: `image` says nothing about the format."""
    rows = [{"image": value, "cls": 1}]
    outcome = result_or_refusal(lambda: len(wt.pack(rows, tmp_path / "out")))
    assert outcome == 1 or re.search(rf"\b({hints})\b", str(outcome))
