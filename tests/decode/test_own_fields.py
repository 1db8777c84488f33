"""Arrays and fields of users: input is not changed by others, output is delivered unchanged."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import wdstrain as wt
from tests.conftest import Sample, npy, write_tar
from wdstrain.errors import SampleError, UsageError, WdstrainError

WORKERS = pytest.mark.parametrize("num_workers", [0, 1])


def body(number: int) -> bytes:
    return (b"%06d" % number) * (500 + number % 7)


def pack(folder: Path, count: int, **options: Any) -> Path:
    samples = ({"__key__": f"k{n:06d}", "bin": body(n), "id": str(n)} for n in range(count))
    wt.pack(samples, folder, max_shard_samples=100, **options)
    return folder


class Own:
    """A field without a fixed size."""

    names: tuple[str, ...] = ("bin",)
    example: wt.Example | None = None

    def read(self, name: str, data: memoryview, out: Any, draws: Any) -> Any:
        return data


class Backwards(Own):
    def read(self, name: str, data: memoryview, out: Any, draws: Any) -> Any:
        return np.frombuffer(data, np.uint8)[::-1]


class Nested(Own):
    def read(self, name: str, data: memoryview, out: Any, draws: Any) -> Any:
        return {"x": np.frombuffer(data, np.uint8)}


def held(value: Any, kind: type[Own]) -> bytes:
    value = value["x"] if isinstance(value, dict) else value
    data = bytes(value.numpy() if isinstance(value, torch.Tensor) else value)
    return data[::-1] if kind is Backwards else data


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pack(tmp_path_factory.mktemp("many"), 600)


@WORKERS
@pytest.mark.parametrize("kind", [Own, Backwards, Nested])
def test_what_a_field_returns_does_not_change_after_delivery(
    many: Path, kind: type[Own], num_workers: int
) -> None:
    options: dict[str, Any] = {"batch_size": 16, "shuffle_buffer": 32, "num_workers": num_workers}
    with wt.Loader(many, {"x": kind()}, **options) as loader:
        batches = list(loader)
    assert len(batches) == 600 // 16
    for batch in batches:
        expected = [body(int(key[1:])) for key in batch["__key__"]]
        assert [held(value, kind) for value in batch["x"]] == expected


class Halves(Own):
    """A field that writes to the bytes it gets."""

    def read(self, name: str, data: memoryview, out: Any, draws: Any) -> Any:
        values = np.frombuffer(data, np.uint8)
        values //= 2
        return values


class Redraws(Own):
    def read(self, name: str, data: memoryview, out: Any, draws: Any) -> Any:
        draws[:] = 0


@pytest.mark.parametrize("kind", [Halves, Redraws])
def test_a_field_cannot_change_the_input_of_other_fields(tmp_path: Path, kind: type[Own]) -> None:
    folder = pack(tmp_path / "set", 20)
    with (
        wt.Loader(folder, {"own": kind(), "x": Own()}, batch_size=5) as loader,
        pytest.raises(SampleError, match=r"field 'bin' at offset \d+: .*read-only"),
    ):
        list(loader)


class HalvesByTorch(Own):
    """A field that writes to its input through torch, which ignores that memory is read-only."""

    def read(self, name: str, data: memoryview, out: Any, draws: Any) -> Any:
        assert isinstance(data, memoryview)
        assert data.readonly
        values = torch.frombuffer(data, dtype=torch.uint8)
        values //= 2
        torch.from_numpy(draws).zero_()
        return values.numpy()


class Drawn(Own):
    def read(self, name: str, data: memoryview, out: Any, draws: Any) -> Any:
        return float(draws.max())


@pytest.mark.filterwarnings("ignore:The given (buffer|NumPy array) is not writable")
@pytest.mark.parametrize("through", ["Loader", "to_example"])
def test_writes_of_a_field_through_torch_reach_no_other_field(tmp_path: Path, through: str) -> None:
    folder = pack(tmp_path / "set", 20, shuffle=False)
    fields: dict[str, wt.Field] = {"own": HalvesByTorch(), "x": Own(), "drawn": Drawn()}
    if through == "Loader":
        with wt.Loader(folder, fields, batch_size=5, shuffle=False) as loader:
            batches = list(loader)
        values = [(x, drawn) for b in batches for x, drawn in zip(b["x"], b["drawn"], strict=True)]
    else:
        apply = wt.to_example(fields)
        examples = [apply({"__key__": f"k{n:06d}", "bin": body(n)}) for n in range(20)]
        values = [(example["x"], example["drawn"]) for example in examples]
    assert [x for x, _ in values] == list(map(body, range(20)))
    assert all(drawn > 0 for _, drawn in values)


class Tokens(Own):
    """A field that fills a part of `out`."""

    names, example = ("id",), wt.Example((8,), "int64")

    def read(self, name: str, data: memoryview, out: Any, draws: Any) -> Any:
        out[: len(data)] = np.frombuffer(data, np.uint8)


@WORKERS
def test_unwritten_parts_of_out_are_zeros(many: Path, num_workers: int) -> None:
    with wt.Loader(many, {"x": Tokens()}, batch_size=20, num_workers=num_workers) as loader:
        for batch in (batch for _ in range(2) for batch in loader):
            texts = [str(int(key[1:])).encode() for key in batch["__key__"]]
            assert batch["x"].tolist() == [list(text.ljust(8, b"\0")) for text in texts]
    apply = wt.to_example({"x": Tokens()})
    assert apply({"__key__": "k", "id": b"12"})["x"].tolist() == [49, 50, 0, 0, 0, 0, 0, 0]


class Returns(Tokens):
    """A field that returns a value where `out` is expected."""

    def read(self, name: str, data: memoryview, out: Any, draws: Any) -> Any:
        return np.arange(8)


class ReturnsOut(Tokens):
    def read(self, name: str, data: memoryview, out: Any, draws: Any) -> Any:
        out[:] = int(bytes(data))
        return out


def test_a_returned_value_in_place_of_out_is_refused(tmp_path: Path) -> None:
    folder = pack(tmp_path / "set", 20)
    with (
        wt.Loader(folder, {"x": Returns()}, batch_size=5) as loader,
        pytest.raises(SampleError, match="returned ndarray, and a field with an example writes"),
    ):
        list(loader)
    with wt.Loader(folder, {"x": ReturnsOut()}, batch_size=5) as loader:
        for batch in loader:
            assert batch["x"].tolist() == [[int(key[1:])] * 8 for key in batch["__key__"]]


class OwnArray(type(wt.array("x.npy"))):  # type: ignore[misc]
    """An array, twice as large as it was packed."""

    def read(self, name: str, data: memoryview, out: Any, draws: Any) -> None:
        super().read(name, data, out, draws)
        out *= 2


def test_an_array_field_of_a_user_decodes_its_own_arrays(tmp_path: Path) -> None:
    rows = ({"__key__": f"k{n}", "x.npy": np.full((64, 64), n, "float32")} for n in range(8))
    wt.pack(rows, tmp_path / "set")
    plain = wt.array("x.npy", shape=(64, 64), dtype="float32")
    own = OwnArray(plain.names, plain.example)
    with wt.Loader(tmp_path / "set", {"x": own}, batch_size=4) as loader:
        for batch in loader:
            expected = [[2.0 * int(key[1:])] for key in batch["__key__"]]
            assert [item.unique().tolist() for item in batch["x"]] == expected


KINDS = [
    np.arange(6, dtype=">i4"),
    np.arange(6, dtype="uint16"),
    np.arange(6, dtype="float16"),
    np.arange(6, dtype="complex64"),
    np.array(3.5),
    np.zeros((0, 3)),
    np.asfortranarray(np.arange(6).reshape(2, 3)),
]


@pytest.mark.parametrize("value", KINDS, ids=str)
@pytest.mark.parametrize(("among", "num_workers"), [(1, 1), (4, 0)])
def test_arrays_are_delivered_as_tensors_of_their_values(
    tmp_path: Path, value: Any, among: int, num_workers: int
) -> None:
    arrays = [np.arange(4) if n % among else value for n in range(4)]
    rows = [{"__key__": f"k{n}", "x.npy": npy(array)} for n, array in enumerate(arrays)]
    wt.pack(rows, tmp_path / "set", shuffle=False)
    fields: dict[str, Any] = {"x": wt.array("x.npy")}
    if among == 1 and value.dtype.isnative:
        fields["fixed"] = wt.array("x.npy", shape=value.shape, dtype=value.dtype.name)
    options: dict[str, Any] = {"batch_size": 4, "shuffle": False, "num_workers": num_workers}
    with wt.Loader(tmp_path / "set", fields, **options) as loader:
        (batch,) = loader
    for name in fields:
        for actual, expected in zip(batch[name], arrays, strict=True):
            assert actual.numpy().dtype == expected.dtype.newbyteorder("=")
            assert np.array_equal(actual.numpy(), expected)


@pytest.mark.skipif(np.dtype("longdouble").itemsize == 8, reason="longdouble is float64 here")
@WORKERS
def test_an_array_that_torch_cannot_hold_is_a_bad_sample(tmp_path: Path, num_workers: int) -> None:
    arrays = [np.arange(3, dtype="longdouble" if n == 2 else "int64") for n in range(4)]
    rows = [{"__key__": f"k{n}", "x.npy": npy(array)} for n, array in enumerate(arrays)]
    wt.pack(rows, tmp_path / "set", shuffle=False)
    options: dict[str, Any] = {"batch_size": 4, "shuffle": False, "num_workers": num_workers}
    fields = {"x": wt.array("x.npy")}
    words = r"train-000000.tar: 'k2', field 'x.npy' .* is an array of float\d+, which torch"
    with pytest.raises(SampleError, match=words):
        list(wt.Loader(tmp_path / "set", fields, **options))
    with pytest.raises(UsageError, match="longdouble.*dtype that torch has"):
        wt.array("x.npy", shape=(3,), dtype="longdouble")


@pytest.mark.parametrize("dtype", ["U3", "datetime64[s]", ">i4", "nonsense"])
def test_an_example_with_a_dtype_unknown_to_torch_is_refused(tmp_path: Path, dtype: str) -> None:
    folder = pack(tmp_path / "set", 4)

    class Fixed(Own):
        example = wt.Example((3,), dtype)

    words = re.escape(f"field 'x' has an example of '{dtype}'")
    with pytest.raises(WdstrainError, match=words):
        wt.Loader(folder, {"x": Fixed()}, batch_size=2)


# --- arrays of one shape, in batch memory ---

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
