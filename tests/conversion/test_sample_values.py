"""Values of samples are stored unchanged, or counted as bad, or a message names the change."""

from __future__ import annotations

import enum
import io
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from PIL import Image

import wdstrain as wt
from tests.support.tables import attempt, read_json, read_members


class Animal(str, enum.Enum):
    """A text enum, whose str() is another text."""

    CAT = "cat"


class Spoken(str):
    """A text that is printed as another one."""

    __slots__ = ()

    def __str__(self) -> str:
        return "printed"


class Counted(int):
    """A number that is printed as a text."""

    __slots__ = ()

    def __str__(self) -> str:
        return "printed"


class Level(enum.IntEnum):
    """A number with a name."""

    LOW = 1


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        (Animal.CAT, b"cat"),
        (Spoken("said"), b"said"),
        (Counted(3), b"3"),
        (Level.LOW, b"1"),
        (np.str_("cat"), b"cat"),
        (np.array("cat"), b"cat"),
        ("a\r\n\0b", b"a\r\n\0b"),
        (10**30, b"1" + b"0" * 30),
        (bytearray(b"cat"), b"cat"),
        (memoryview(b"c-a-t")[::2], b"cat"),
    ],
)
def test_a_text_is_stored_as_it_is_or_refused(tmp_path: Path, value: Any, stored: bytes) -> None:
    result = attempt(lambda: wt.pack([{"__key__": "k", "txt": value}], tmp_path / "out"))
    assert isinstance(result, str) or read_members(tmp_path / "out") == {"k.txt": stored}


@pytest.mark.parametrize("name", [b"x", None])
def test_a_field_that_is_not_named_by_a_text_is_refused(tmp_path: Path, name: Any) -> None:
    assert isinstance(attempt(lambda: wt.pack([{"txt": "x", name: b"1"}], tmp_path / "out")), str)


@pytest.mark.parametrize("value", [Animal.CAT, Level.LOW, Counted(3), {"n": 2**53 + 1}, (1, 2)])
def test_values_of_json_are_stored_as_they_are(tmp_path: Path, value: Any) -> None:
    wt.pack([{"json": value}], tmp_path / "out")
    assert read_json(tmp_path / "out") == [list(value) if isinstance(value, tuple) else value]


# --- values that cannot be stored ---


class Lazy:
    """An array whose reading fails."""

    def __array__(self, *_: object, **__: object) -> Any:
        raise RuntimeError("the server is gone")


def _deep() -> list[Any]:
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    return value


UNUSUAL: dict[str, Callable[[], Any]] = {
    "bfloat16": lambda: torch.ones(3, dtype=torch.bfloat16),
    "float8": lambda: torch.ones(3).to(torch.float8_e4m3fn),
    "conjugated": lambda: torch.ones(3, dtype=torch.complex64).conj(),
    "negated": lambda: torch.ones(3, dtype=torch.complex64).conj().imag,
    "sparse": lambda: torch.eye(3).to_sparse(),
    "meta": lambda: torch.ones(3, device="meta"),
    "with a gradient": lambda: torch.ones(3, requires_grad=True),
    "ragged": lambda: [[1], [1, 2], [3]],
    "failing": Lazy,
    "objects": lambda: np.array([{}, {}, {}], object),
    "half": lambda: np.ones(3, np.float16),
    "dates": lambda: np.array(["2024-01-01"] * 3, "M8[D]"),
    "masked": lambda: np.ma.masked_array([1, 2, 3], [0, 1, 0]),
    "texts": lambda: ["a", "b", "c"],
}


@pytest.mark.parametrize("source", ["pack", "arrays"])
@pytest.mark.parametrize("name", UNUSUAL)
def test_a_value_that_arrays_cannot_hold_is_a_bad_sample(
    tmp_path: Path, source: str, name: str
) -> None:
    value = UNUSUAL[name]()
    samples = [{"__key__": "a", "x.npy": 1}, {"__key__": "b", "x.npy": value}]
    if source == "pack":
        index = wt.pack(samples, tmp_path / "out", on_error="skip")
        assert len(index) + index.info["skipped"] == 2
    else:
        attempt(lambda: wt.convert_arrays({"x": value}, tmp_path / "out", on_error="skip"))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("png", torch.ones((3, 4, 4), dtype=torch.bfloat16)),
        ("json", None),
        ("__key__", "\ud800"),
        ("txt", "\ud800"),
        ("\ud800", b"x"),
        ("cls", -1),
        ("x.npy", {1}),
        ("txt", object()),
    ],
    ids=["bfloat16", "deep", "key", "text", "field", "class", "set", "object"],
)
def test_any_value_that_a_field_cannot_hold_is_a_bad_sample(
    tmp_path: Path, field: str, value: Any
) -> None:
    sample = {"txt": "x", "__key__": "b", field: _deep() if field == "json" else value}
    index = wt.pack([{"__key__": "a", "txt": "1"}, sample], tmp_path / "out", on_error="skip")
    assert (len(index), index.info["skipped"]) == (1, 1)


# --- entries of json as columns ---

ENTRIES = 300  # more than an index has columns for
ROWS = [{f"k{number % ENTRIES}": number} for number in range(1200)]


def _packed_rows(tmp_path: Path) -> None:
    samples = ({"json": row} for row in ROWS)
    wt.pack(samples, tmp_path / "out", max_shard_samples=600)


def _merged_sets(tmp_path: Path) -> None:
    for half in range(2):
        samples = ({"__key__": f"{half}-{n}", "json": row} for n, row in enumerate(ROWS[half::2]))
        wt.pack(samples, tmp_path / f"set{half}")
    wt.convert_tars([tmp_path / "set0", tmp_path / "set1"], tmp_path / "out", max_shard_samples=600)


def _grown_set(tmp_path: Path) -> None:
    for half in range(2):
        samples = ({"json": row} for row in ROWS[600 * half :][:600])
        wt.pack(samples, tmp_path / "out", append=bool(half))


def _rows_of_one_shard(tmp_path: Path) -> None:
    wt.pack(({"json": row} for row in ROWS), tmp_path / "out")


@pytest.mark.parametrize("source", [_packed_rows, _merged_sets, _grown_set, _rows_of_one_shard])
def test_a_column_holds_all_values_of_its_entry(
    tmp_path: Path, source: Callable[[Path], None]
) -> None:
    source(tmp_path)
    index = wt.open(tmp_path / "out")
    entries = [item for row in read_json(tmp_path / "out") for item in row.items()]
    stored = Counter(name for name, value in entries if value is not None)
    columns = [name for name in index.table.column_names if name in stored]
    held = {name: len(index) - index.table[name].null_count for name in columns}
    assert held == {name: stored[name] for name in columns}
    assert wt.verify(tmp_path / "out").ok


# --- attributes of HDF5 that change what the numbers mean ---

STORED = np.array([100, 200, -999, 300], np.int16)
ATTRIBUTES: dict[str, tuple[dict[str, Any], list[float | None]]] = {
    "scale and offset": (
        {"scale_factor": 0.1, "add_offset": 273.15},
        [283.15, 293.15, 173.25, 303.15],
    ),
    "scale": ({"scale_factor": 0.5}, [50.0, 100.0, -499.5, 150.0]),
    "fill value": ({"_FillValue": np.int16(-999)}, [100.0, 200.0, None, 300.0]),
    "missing value": ({"missing_value": np.int16(-999)}, [100.0, 200.0, None, 300.0]),
    "unsigned": ({"_Unsigned": "true"}, [100.0, 200.0, 64537.0, 300.0]),
}


@pytest.mark.parametrize("kind", ["label", "field"])
@pytest.mark.parametrize("name", ATTRIBUTES)
def test_packed_numbers_of_netcdf_are_unpacked_or_the_attributes_are_named(
    tmp_path: Path, name: str, kind: str
) -> None:
    attributes, values = ATTRIBUTES[name]
    with h5py.File(tmp_path / "t.nc", "w") as file:
        file.create_dataset("heat", data=STORED).attrs.update(attributes)
    result = attempt(
        lambda: wt.convert_hdf5(
            tmp_path / "t.nc",
            tmp_path / "out",
            {"heat": "/heat"},
            label=["heat:number"] if kind == "label" else [],
            on_error="skip",
            shuffle=False,
        )
    )
    said = result if isinstance(result, str) else json.dumps(result.info)
    if any(attribute in said for attribute in attributes):
        return
    assert not isinstance(result, str)
    if kind == "label":
        stored = np.array(result.table["heat"].to_pylist(), float)
    else:
        members = sorted(read_members(tmp_path / "out").items())
        stored = np.array([np.load(io.BytesIO(data)) for _, data in members], float)
    present = [value for value in values if value is not None]
    assert stored[~np.isnan(stored)] == pytest.approx(present)


# --- images ---

PIXELS = np.random.default_rng(0).integers(0, 255, (60, 80, 3), np.uint8)


@pytest.mark.parametrize("source", ["array", "PIL image", "arrays"])
def test_resized_pixels_are_encoded_once_at_the_default_quality(
    tmp_path: Path, source: str
) -> None:
    written = []
    for options in ({"resize": 20}, {"resize": 20, "quality": 90}):
        out = tmp_path / str(len(options))
        if source == "arrays":
            wt.convert_arrays({"jpg": PIXELS[None]}, out, **options)
        else:
            value = PIXELS if source == "array" else Image.fromarray(PIXELS)
            wt.pack([{"__key__": "k", "jpg": value}], out, **options)
        written.append(list(read_members(out).values()))
    assert written[0] == written[1]


@pytest.mark.parametrize(("field", "kind"), [("gif", "GIF"), ("webp", "WEBP"), ("tif", "TIFF")])
def test_a_resized_animation_keeps_its_frames_or_the_user_is_told(
    tmp_path: Path, field: str, kind: str
) -> None:
    frames = [Image.fromarray(np.full((60, 80, 3), 60 * n, np.uint8)) for n in range(4)]
    buffer = io.BytesIO()
    frames[0].save(buffer, kind, save_all=True, append_images=frames[1:])
    samples = [{"__key__": "k", field: buffer.getvalue()}]
    result = attempt(lambda: wt.pack(samples, tmp_path / "out", resize=20))
    said = result if isinstance(result, str) else json.dumps(result.info)
    if "frame" not in said and "animat" not in said:
        (stored,) = read_members(tmp_path / "out").values()
        assert getattr(Image.open(io.BytesIO(stored)), "n_frames", 1) == 4
