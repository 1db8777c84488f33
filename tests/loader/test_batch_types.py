"""A batch value has one type in every batch of a run, and keeps it on a device."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import wdstrain as wt
from tests.conftest import encoded, npy, picture, write_shards, write_tar
from tests.support.outcomes import result_or_refusal

Views = namedtuple("Views", "first second")


def skeleton(value: Any, rows: int | None = None) -> Any:
    """Return the types of a value and of its parts. rows: replaces the length of the batch."""
    if isinstance(value, torch.Tensor):
        return (value.dtype, (len(value) if rows is None else rows, *value.shape[1:]))
    if isinstance(value, dict):
        return (type(value), {name: skeleton(part, rows) for name, part in value.items()})
    if isinstance(value, (list, tuple)):
        if value and all(isinstance(part, str) for part in value):
            return (type(value), len(value) if rows is None else rows)
        is_empty_text = rows is not None and not value
        return (type(value), 0 if is_empty_text else [skeleton(part, rows) for part in value])
    return type(value)


def devices(value: Any) -> set[str]:
    """Return the devices of all tensors in a value."""
    if isinstance(value, torch.Tensor):
        return {value.device.type}
    parts = value.values() if isinstance(value, dict) else value
    is_container = isinstance(value, (dict, list, tuple))
    return set().union(*map(devices, parts)) if is_container else set()


VALUES: dict[str, Callable[[Any], Any]] = {
    "tensor": lambda x: x,
    "list of dicts": lambda x: [{"a": x}],
    "list of tuples": lambda x: [(x, x), (x,)],
    "dict of lists of lists": lambda x: {"a": [[x]]},
    "list of lists with texts": lambda x: [["word", x]],
    "named tuple with a text": lambda x: Views("word", x),
    "named tuple of lists": lambda x: Views([x], Views(x, x)),
    "list of named tuples": lambda x: [Views(x, x)],
    "ordered dict": lambda x: OrderedDict(a=x),
}


def of_kind(kind: str) -> Callable[[Any], dict[str, Any]]:
    """Return a transform whose example is one of VALUES."""
    return lambda sample: {"value": VALUES[kind](torch.ones(2))}


@pytest.mark.parametrize("kind", VALUES)
def test_tensors_are_moved_in_their_containers_and_a_batch_without_rows_has_the_same(
    kind: str, tmp_path: Path
) -> None:
    """Seven samples on three ranks: the last batch of one rank is empty."""
    write_shards(tmp_path, [7])
    options: dict[str, Any] = {"transform": of_kind(kind), "batch_size": 1, "tail": "keep"}
    device = "cuda" if torch.cuda.is_available() else "meta"
    with wt.Loader(tmp_path, **options, rank=2, world_size=3) as loader:
        plain, _, empty = (batch["value"] for batch in loader.epoch(0, until=1))
        moved = next(iter(wt.to_device(loader, device)))["value"]
    assert devices(moved) == {device}
    assert skeleton(moved) == skeleton(plain)
    assert skeleton(empty, rows=0) == skeleton(plain, rows=0)


def test_a_batch_without_rows_has_the_types_of_fields(tmp_path: Path) -> None:
    rows = [(f"k{n}", {"png": picture(n), "cls": b"%d" % n, "txt": b"x"}) for n in range(4)]
    write_tar(tmp_path / "a.tar", rows)
    fields = {"image": wt.image(size=8), "images": wt.image(), "text": wt.text()}
    fields |= {"label": wt.label()}
    for given in (fields, None):
        last = []
        for rank in (0, 2):
            options: dict[str, Any] = {"batch_size": 1, "tail": "keep", "world_size": 3}
            with wt.Loader(tmp_path, given, rank=rank, **options) as loader:
                last.append(list(loader)[-1])
        full, empty = last
        assert empty["__key__"] == []
        for name, value in full.items():
            assert type(empty[name]) is type(value)
            assert len(empty[name]) == 0
            if isinstance(value, torch.Tensor):
                assert skeleton(empty[name]) == skeleton(value, rows=0), name


MASK = encoded(Image.fromarray(np.ones((8, 8), np.uint8)), "PNG")
ONES = npy(np.ones(3, np.float32))
MARKED = [
    (wt.array("npy", shape=(3,), dtype="float32"), ONES, 1),
    (wt.image("png"), picture(1), 1),
    (wt.mask("mask.png", size=8), MASK, 1),
    (wt.number("cls"), b"3", 1),
    (wt.text("txt"), b"word", 1),
    (wt.array("npy"), ONES, 1),
    (wt.array("npy"), ONES, 4),
    (wt.array("npy"), npy(np.float32(1)), 1),
    (wt.mask("mask.png"), MASK, 1),
]


@pytest.mark.parametrize(
    ("field", "data", "bad"), MARKED, ids=lambda value: type(value).__name__ + str(value)[:1]
)
def test_a_marked_row_does_not_change_the_type_of_a_batch(
    field: Any, data: bytes, bad: int, tmp_path: Path
) -> None:
    """bad: samples of the second batch that cannot be decoded, or whose options are refused."""
    name = field.names[0]
    damaged = [data if n < 4 or n >= 4 + bad else b"\xff" + data[1:20] for n in range(8)]
    samples = [(f"k{n}", {name: part, "bin": b""}) for n, part in enumerate(damaged)]
    write_tar(tmp_path / "a.tar", samples)

    def types() -> set[type]:
        options: dict[str, Any] = {"on_error": "mark", "max_errors": 1, "shuffle": False}
        with wt.Loader(tmp_path, {"x": field}, batch_size=4, **options) as loader:
            return {type(batch["x"]) for batch in loader.epoch(0, until=1)}

    outcome = result_or_refusal(types)
    assert "mark" in outcome if isinstance(outcome, str) else len(outcome) == 1


@pytest.mark.parametrize("num_workers", [0, 1])
def test_images_without_a_size_are_a_list_also_if_their_sizes_agree(
    tmp_path: Path, num_workers: int
) -> None:
    wt.pack(({"__key__": f"k{n}", "mask.png": MASK} for n in range(2)), tmp_path / "out")
    fields = {"mask": wt.mask("mask.png"), "image": wt.image("mask.png")}
    with wt.Loader(tmp_path / "out", fields, batch_size=2, num_workers=num_workers) as loader:
        batch = next(iter(loader))
    for name in fields:
        assert isinstance(batch[name], list)
        assert [value.shape[-2:] for value in batch[name]] == [(8, 8)] * 2
