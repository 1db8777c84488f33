"""Arrays in batch memory of one shape equal arrays without a given shape, and are verified."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wdstrain as wt
from tests.conftest import Sample, npy, write_tar

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

SHAPE = (40, 40)
FIELDS: dict[str, Any] = {"x": wt.array("x.npy", shape=SHAPE, dtype="float32"), "label": wt.label()}


def values(number: int) -> Any:
    return np.arange(1600, dtype=np.float32).reshape(SHAPE) + np.float32(2000 * number)


def test_an_array_of_another_shape_and_equal_size_is_a_bad_sample(tmp_path: Path) -> None:
    arrays = [values(n).reshape((40, 40) if n != 7 else (20, 80)) for n in range(20)]
    samples: list[Sample] = [
        (f"n{n:02d}", {"x.npy": npy(array), "cls": b"1"}) for n, array in enumerate(arrays)
    ]
    write_tar(tmp_path / "a.tar", samples)
    with pytest.raises(wt.SampleError, match=r"'n07'.*float32\[20, 80\]"):
        list(wt.Loader(tmp_path, FIELDS, batch_size=5))
    loader = wt.Loader(tmp_path, FIELDS, batch_size=5, on_error="replace", max_errors=0.2)
    for batch in loader:
        for key, array in zip(batch["__key__"], batch["x"], strict=True):
            assert np.array_equal(array, values(int(key[1:])))
            assert key != "n07"
    assert [bad["key"] for bad in loader.report()["bad_samples"]] == ["n07"]


def test_arrays_of_equal_size_in_another_order_are_not_exchanged_and_may_be_read_twice(
    tmp_path: Path,
) -> None:
    samples: list[Sample] = []
    for n in range(24):
        files = {"x.npy": npy(values(n)), "y.npy": npy(-values(n))}
        samples.append((f"n{n:02d}", dict(sorted(files.items(), reverse=n % 3 == 1))))
    write_tar(tmp_path / "a.tar", samples)
    fields = {name: wt.array(f"{name}.npy", shape=SHAPE, dtype="float32") for name in "xy"}
    fields |= {"again": FIELDS["x"], "loose": wt.array("x.npy")}
    loader = wt.Loader(tmp_path, fields, batch_size=5)
    for batch in loader:
        for row, key in enumerate(batch["__key__"]):
            for name in ("x", "again", "loose"):
                assert np.array_equal(batch[name][row], values(int(key[1:])))
            assert np.array_equal(batch["y"][row], -values(int(key[1:])))
    loader.close()


def with_head(array: Any, *, padding: int = 64, version: int = 1) -> bytes:
    """Return a .npy file whose head has other padding, or another version, than numpy writes now."""
    kind = f"{{'descr': '{array.dtype.str}', 'fortran_order': False, 'shape': {array.shape}, }}"
    width = 2 if version == 1 else 4
    fill = -(8 + width + len(kind) + 1) % padding
    head = kind.encode() + b" " * fill + b"\n"
    length = len(head).to_bytes(width, "little")
    return b"\x93NUMPY" + bytes((version, 0)) + length + head + array.tobytes()


HEADS: dict[str, Any] = {
    "plain": npy,
    "old padding": lambda array: with_head(array, padding=16),
    "version 2": lambda array: with_head(array, version=2),
    "Fortran": lambda array: npy(np.asfortranarray(array)),
    "big-endian": lambda array: npy(array.astype(">f4")),
}


@pytest.mark.parametrize("first", HEADS)
def test_arrays_with_other_heads_in_a_batch_have_their_values(tmp_path: Path, first: str) -> None:
    names = [first, *HEADS, *HEADS]
    samples = [(f"n{n:02d}", {"x.npy": HEADS[name](values(n))}) for n, name in enumerate(names)]
    samples[4] = ("n04", {"x.npy": npy(values(4))[:-4]})
    samples[5] = ("n05", {"x.npy": npy(values(5).T[:20])})
    samples[6] = ("n06", {})
    write_tar(tmp_path / "a.tar", [(key, parts | {"txt": b"x"}) for key, parts in samples])
    options: dict[str, Any] = {"on_error": "mark", "max_errors": 1.0, "shuffle": False}
    with wt.Loader(tmp_path, {"x": FIELDS["x"]}, batch_size=11, **options) as loader:
        (batch,) = loader
        bad = {4, 5, 6} | {row for row, name in enumerate(names) if name == "big-endian"}
        assert loader.report()["bad"] == len(bad)
    for row, name in enumerate(names):
        expected = np.zeros(SHAPE, np.float32) if row in bad else values(row)
        assert np.array_equal(batch["x"][row].numpy(), expected), name
