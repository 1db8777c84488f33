"""Arrays in batch memory of one shape equal arrays without a given shape, and are verified."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wdstrain as wt
from tests.conftest import Sample, npy, write_tar

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

SHAPE = (40, 40)
FIELDS: dict[str, Any] = {"x": wt.array("x.npy", shape=SHAPE, dtype="float32"), "label": wt.label()}
LOOSE: dict[str, Any] = {"x": wt.array("x.npy"), "label": wt.label()}  # of any shape


def values(number: int) -> Any:
    return np.arange(1600, dtype=np.float32).reshape(SHAPE) + np.float32(2000 * number)


def pack(folder: Path, count: int = 90, **options: Any) -> Path:
    samples = ({"__key__": f"n{n:04d}", "x.npy": values(n), "cls": n % 7} for n in range(count))
    wt.pack(samples, str(folder), **{"shuffle": False, "max_shard_samples": 17, **options})
    return folder


@pytest.fixture(scope="module")
def arrays(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pack(tmp_path_factory.mktemp("arrays") / "set")


def epoch(
    loader: wt.Loader, number: int = 0, start: int = 0
) -> list[tuple[list[str], Any, list[int]]]:
    batches = loader.epoch(number, start=start)
    return [(b["__key__"], b["x"].numpy().copy(), [int(n) for n in b["label"]]) for b in batches]


def are_right(batches: list[tuple[list[str], Any, list[int]]]) -> bool:
    """Return whether every array is the one of its key."""
    pairs = [pair for keys, x, _ in batches for pair in zip(keys, x, strict=True)]
    return all(np.array_equal(array, values(int(key[1:]))) for key, array in pairs)


def same(first: list[Any], second: list[Any]) -> bool:
    rows = zip(first, second, strict=True)
    return all(a[0] == b[0] and a[2] == b[2] and np.array_equal(a[1], b[1]) for a, b in rows)


def test_an_array_of_another_shape_and_equal_size_is_a_bad_sample(tmp_path: Path) -> None:
    arrays = [values(n).reshape((40, 40) if n != 7 else (20, 80)) for n in range(20)]
    samples: list[Sample] = [
        (f"n{n:02d}", {"x.npy": npy(array), "cls": b"1"}) for n, array in enumerate(arrays)
    ]
    write_tar(tmp_path / "a.tar", samples)
    with pytest.raises(wt.SampleError, match=r"'n07'.*float32\[20, 80\]"):
        epoch(wt.Loader(tmp_path, FIELDS, batch_size=5))
    loader = wt.Loader(tmp_path, FIELDS, batch_size=5, on_error="replace", max_errors=0.2)
    actual = epoch(loader)
    assert [bad["key"] for bad in loader.report()["bad_samples"]] == ["n07"]
    assert are_right(actual)
    assert "n07" not in [key for keys, _, _ in actual for key in keys]


# --- edge cases ---


def test_two_fields_may_read_the_same_array(arrays: Path) -> None:
    again = wt.array("x.npy", shape=SHAPE, dtype="float32")
    fields = {"x": FIELDS["x"], "again": again, "loose": wt.array("x.npy")}
    loader = wt.Loader(arrays, fields, batch_size=8)
    for batch in loader:
        for name in fields:
            assert are_right([(batch["__key__"], batch[name], [])])


@pytest.mark.parametrize(("start", "packed"), [(0, True), (0, False), (2, True), (3, False)])
def test_a_truncated_shard_with_gaps_delivers_its_intact_samples(
    tmp_path: Path, start: int, packed: bool
) -> None:
    """Gaps: members that are no samples, and samples that a resume does not need."""
    if packed:
        folder = pack(tmp_path / "set", 60)
        index = wt.index(str(folder))
        os.truncate(folder / "train-000001.tar", int(index.offsets.start[28]) + 100)
    else:
        folder = tmp_path
        samples: list[Sample] = []
        for n in range(60):
            samples += [(f"n{n:04d}", {"x.npy": npy(values(n)), "cls": b"%d" % (n % 7)})]
            samples += [(f".hidden{n}", {"x": bytes(700)})] if n % 5 == 0 else []
        write_tar(folder / "a.tar", samples)
        index = wt.index(str(folder))
        os.truncate(folder / "a.tar", int(index.offsets.start[48]) + 100)
    delivered = {}
    for name, fields in (("shaped", FIELDS), ("loose", LOOSE)):
        loader = wt.Loader(
            str(folder), fields, batch_size=5, shuffle_buffer=20, on_error="replace", max_errors=0.9
        )
        delivered[name] = [epoch(loader, 1, start), loader.report()["bad"]]
        loader.close()
    assert same(delivered["shaped"][0], delivered["loose"][0])
    assert delivered["shaped"][1] == delivered["loose"][1]


def test_samples_of_a_missing_shard_are_replaced_until_it_returns(tmp_path: Path) -> None:
    folder = pack(tmp_path / "set", 60)
    loader = wt.Loader(
        folder, FIELDS, batch_size=5, shuffle_buffer=10, on_error="replace", max_errors=0.9
    )
    (folder / "train-000001.tar").rename(tmp_path / "away.tar")
    actual = epoch(loader)
    assert loader.report()["bad"] == 17
    assert are_right(actual)
    (tmp_path / "away.tar").rename(folder / "train-000001.tar")
    for number in (1, 2, 3):  # samples read ahead for the next epochs are lost; later reads succeed
        epoch(loader, number)
    assert loader.report()["bad"] == 0
    loader.close()


def test_arrays_of_equal_size_in_another_order_are_not_exchanged(tmp_path: Path) -> None:
    samples: list[Sample] = []
    for n in range(24):
        files = {"x.npy": npy(values(n)), "y.npy": npy(-values(n))}
        samples.append((f"n{n:02d}", dict(sorted(files.items(), reverse=n % 3 == 1))))
    write_tar(tmp_path / "a.tar", samples)
    fields = {name: wt.array(f"{name}.npy", shape=SHAPE, dtype="float32") for name in "xy"}
    loader = wt.Loader(tmp_path, fields, batch_size=5)
    for batch in loader:
        for row, key in enumerate(batch["__key__"]):
            assert np.array_equal(batch["x"][row], values(int(key[1:])))
            assert np.array_equal(batch["y"][row], -values(int(key[1:])))
    loader.close()


# --- heads of .npy files ---


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
