"""An option of another type than documented is taken as it is meant, or is a usage error."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wdstrain as wt
from tests.conftest import write_class_folder


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Class folders, a table of their images, an array, and shards."""
    folder = write_class_folder(tmp_path_factory.mktemp("sources") / "photos", {"a": 2, "b": 2})
    rows = [f"{path.relative_to(folder)},{path.parent.name}" for path in folder.rglob("*.png")]
    (folder / "log.csv").write_text("\n".join(["file,kind", *rows]) + "\n")
    np.save(folder / "kinds.npy", np.arange(4) % 2)
    rows_of_set = [{"__key__": f"k{n}", "cls": n % 2, "txt": "x", "n.cls": 1} for n in range(6)]
    wt.pack(rows_of_set, folder / "set", classes=["a", "b"])
    return folder


def convert_folder(sources: Path, out: str, **options: Any) -> object:
    return wt.convert_folder(str(sources), out, **options)


def convert_table(sources: Path, out: str, **options: Any) -> object:
    return wt.convert_table(sources / "log.csv", out, **{"image": "file", **options})


def convert_arrays(sources: Path, out: str, **options: Any) -> object:
    return wt.convert_arrays({"cls": sources / "kinds.npy"}, out, **options)


def convert_tars(sources: Path, out: str, **options: Any) -> object:
    return wt.convert_tars(sources / "set", out, **options)


def pack(sources: Path, out: str, **options: Any) -> object:
    return wt.pack([{"__key__": str(n), "cls": n % 2} for n in range(4)], out, **options)


def index(sources: Path, out: str, **options: Any) -> object:
    wt.convert_tars(sources / "set", out)
    return wt.index(out, **options)


def plan(sources: Path, out: str, **options: Any) -> object:
    return wt.plan_epoch(sources / "set", batch_size=2, **options)


def loader(sources: Path, out: str, **options: Any) -> object:
    return wt.Loader(str(sources / "set"), batch_size=2, **options)


def mixture(folder: Path, out: str, **options: Any) -> object:
    return wt.mix(**options)


def opened(folder: Path, out: str, **options: Any) -> object:
    return wt.open(**options)


@pytest.mark.parametrize(
    ("function", "option", "value"),
    [
        (convert_tars, "keys", ["k1", "k2"]),
        (convert_tars, "where", ["cls == 1"]),
        (convert_tars, "rename", "cls=kind"),
        (convert_tars, "keep", None),
        (convert_tars, "drop", None),
        (index, "label", ["cls", "n.cls"]),
        (convert_folder, "masks", ["masks"]),
        (convert_folder, "classes", None),
        (convert_folder, "split", "train=0.5,val=0.5"),
        (convert_folder, "split", ["train", "val"]),
        (convert_table, "image", ["file"]),
        (convert_table, "root", ["."]),
        (convert_table, "label", None),
        (convert_table, "where", ["kind"]),
        (convert_table, "header", None),
        (convert_arrays, "label", None),
        (pack, "labels", ["cls"]),
        (pack, "group", "cls"),
        (plan, "where", ["label == 'a'"]),
        (plan, "shuffle", "yes"),
        (loader, "cache_dir", ["cache"]),
        (mixture, "sources", ["absent"]),
        (opened, "urls", None),
        (loader, "where", ["label == 'a'"]),
        (loader, "balance", ["label"]),
        (loader, "weights", {"a": 1}),
        (loader, "fields", ["txt"]),
        (loader, "tail", ["drop"]),
        (pack, "classes", "ab"),
        (pack, "fields", "cls"),
    ],
)
def test_a_value_of_another_type_is_taken_or_refused(
    sources: Path,
    tmp_path: Path,
    function: Callable[..., object],
    option: str,
    value: object,
) -> None:
    with contextlib.suppress(wt.WdstrainError):
        function(sources, str(tmp_path / "out"), **{option: value})


def join(sources: Path, out: str, **options: Any) -> object:
    wt.convert_tars(sources / "set", out)
    return wt.join(out, [{"key": "k1", "score": 1.0}], **options)


@pytest.mark.parametrize(
    ("function", "option", "value"),
    [
        (loader, "shuffle", "no"),  # a text that is not empty would be true
        (plan, "shuffle", "no"),
        (convert_folder, "dry_run", "no"),
        (loader, "shuffle", None),
        (convert_folder, "overwrite", [1]),
        (convert_folder, "split", {"train": "0.5", "val": "0.5"}),
        (convert_tars, "rename", {"txt": 3}),
        (loader, "split", 3),
        (loader, "multiprocessing_context", "thread"),
        (convert_folder, "quality", "95"),
        (pack, "classes", [1, 2]),
        (join, "on", ["key"]),
        (index, "label", 3),
    ],
)
def test_a_value_of_another_type_is_refused_by_the_name_of_its_option(
    sources: Path,
    tmp_path: Path,
    function: Callable[..., object],
    option: str,
    value: object,
) -> None:
    with pytest.raises(wt.UsageError, match=rf"^{option}=.*: must be "):
        function(sources, str(tmp_path / "out"), **{option: value})


@pytest.mark.parametrize(
    ("function", "option", "value"),
    [
        (index, "columns", "txt"),
        (convert_tars, "keep", "txt"),
        (convert_tars, "drop", "txt"),
        (convert_table, "label", "kind"),
        (convert_arrays, "label", "cls"),
    ],
)
def test_a_text_in_place_of_a_list_is_not_taken_letter_by_letter(
    sources: Path,
    tmp_path: Path,
    function: Callable[..., object],
    option: str,
    value: str,
) -> None:
    refusal = option
    try:
        function(sources, str(tmp_path / "out"), **{option: value})
    except wt.UsageError as error:
        refusal = str(error)
    assert option in refusal
