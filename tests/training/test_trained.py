"""Use of a checkpoint: scores and predictions as in training, for every image."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import wdstrain as wt
from tests.support.children import ended
from tests.support.small_runs import PLAIN, SMALL, Linear, last, rows_of, small_image, two_classes
from wdstrain.cli import main


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("small") / "shards"
    return two_classes(out, 24, split={"train": 0.75, "val": 0.25}, seed=1)


@pytest.fixture(scope="module")
def run(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "run"
    wt.train(shards, out, **SMALL)
    return last(out)


class Inverted:
    names, example = ("png",), wt.Example((8, 8, 3), "uint8", channels_last=True)

    def read(self, name: str, data: memoryview, out: Any, draws: Any) -> None:
        wt.image(size=8).read(name, data, out, draws)
        out[...] = 255 - out


def test_a_second_process_and_fields_with_other_inputs_are_refused(
    run: Path, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    val = f"{shards}/val-*.tar"
    for field, words in (
        (wt.image(size=(8, 12)), r"was trained on image: uint8\[3, 8, 8\]"),
        (wt.image(), "without a fixed size"),
    ):
        with pytest.raises(wt.UsageError, match=words):
            wt.evaluate(run, val, fields={"image": field})
        with pytest.raises(wt.UsageError, match=words):
            wt.predict(run, val, tmp_path / "p.csv", fields={"image": field})
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1")):
        monkeypatch.setenv(name, value)
    with pytest.raises(wt.UsageError, match="one process, and this job has 2"):
        wt.predict(run, val, tmp_path / "p.csv")


def test_a_user_defined_field_must_be_given_again(shards: Path, tmp_path: Path) -> None:
    wt.train(shards, tmp_path / "run", fields={"image": Inverted()}, **SMALL)
    with pytest.raises(wt.UsageError, match="a field of your own, Inverted"):
        wt.evaluate(last(tmp_path / "run"), f"{shards}/val-*.tar")
    words = r"the input was .*source='Inverted'.*, is .*source='image'"
    with pytest.raises(wt.UsageError, match=words):
        wt.train(shards, tmp_path / "run", resume=True, **{**SMALL, "epochs": 2})


# --- a row for every image ---

GOOD, BAD = small_image(1), small_image(1)[:45]


@pytest.mark.parametrize(
    "pictures",
    [[BAD] * 20, [GOOD] * 3 + [BAD] * 120 + [None] + [GOOD] * 3],
    ids=["all bad", "many bad and one missing"],
)
def test_every_image_has_its_row(run: Path, tmp_path: Path, pictures: list[bytes | None]) -> None:
    fields = ({"png": data} if data else {"txt": b"no picture"} for data in pictures)
    samples = ({"__key__": f"k{i:03d}", **own} for i, own in enumerate(fields))
    wt.pack(samples, tmp_path / "set", shuffle=False)
    done = wt.predict(run, tmp_path / "set", tmp_path / "p.csv", batch_size=8)
    rows = [
        (row["key"], bool(row["error"]), bool(row["label"])) for row in rows_of(tmp_path / "p.csv")
    ]
    good = [data == GOOD for data in pictures]
    assert rows == [(f"k{i:03d}", not is_good, is_good) for i, is_good in enumerate(good)]
    assert (done.rows, done.bad) == (len(pictures), good.count(False))


def test_an_image_with_changed_bytes_has_its_row(run: Path, tmp_path: Path) -> None:
    wt.pack([{"__key__": "a", "png": GOOD}], tmp_path / "set")
    shard = tmp_path / "set" / "train-000000.tar"
    data = bytearray(shard.read_bytes())
    data[512 + len(GOOD) // 2] ^= 255
    shard.write_bytes(data)
    wt.predict(run, tmp_path / "set", tmp_path / "p.csv")
    (row,) = rows_of(tmp_path / "p.csv")
    assert (row["key"], row["label"]) == ("a", "")
    assert "not those that were packed" in row["error"]


def test_an_unreadable_label_hides_no_prediction_and_numbers_have_all_digits(
    tmp_path: Path,
) -> None:
    label, digits = wt.Label("y", "number", "json", "y"), [1_700_000_001, 1e-12, -0.1, 1 / 3]
    for name, values in (("whole", [*range(8)]), ("odd", [0.5, "cow", 1, None, *digits])):
        samples = (
            {"__key__": f"k{i}", "png": GOOD, **({} if y is None else {"json": {"y": y}})}
            for i, y in enumerate(values)
        )
        wt.pack(samples, tmp_path / name, labels=[label], shuffle=False)
    wt.train(tmp_path / "whole", tmp_path / "run", **SMALL)
    checkpoint = last(tmp_path / "run")
    done = wt.predict(checkpoint, tmp_path / "odd", tmp_path / "p.csv")
    rows = rows_of(tmp_path / "p.csv")
    assert all(row["y"] for row in rows)
    assert [row["y_true"] for row in rows[:4]] == ["0.5", "", "1", ""]
    assert [float(row["y_true"]) for row in rows[4:]] == digits
    assert [row["error"] for row in rows] == [""] * 8
    assert done.bad == 0


def test_each_bad_image_has_its_own_reason_even_with_equal_keys(run: Path, tmp_path: Path) -> None:
    for name, data in (("a", BAD), ("b", BAD[:40])):
        samples = ({"__key__": f"k{i:02d}", "png": data} for i in range(40))
        wt.pack(samples, tmp_path / name, shuffle=False)
    paths = [tmp_path / name / "train-000000.tar" for name in "ab"]
    wt.predict(run, paths, tmp_path / "p.csv", batch_size=16)
    errors = [row["error"] for row in rows_of(tmp_path / "p.csv")]
    assert len(set(errors[:40])) == len(set(errors[40:])) == 1
    assert errors[0] != errors[40]


# tests/oracle/test_training.py draws arrays of one dimension.
ARRAYS = [("uint8", (1, 8, 8)), ("uint8", (4, 8, 8)), ("float64", (3, 8, 8)), ("int64", (3, 8, 8))]


@pytest.mark.parametrize(("dtype", "shape"), ARRAYS)
def test_arrays_of_every_kind_are_trained_scored_predicted_and_exported(
    tmp_path: Path, dtype: str, shape: tuple[int, ...]
) -> None:
    rng = np.random.default_rng(0)
    arrays = [(rng.random(shape) * 200).astype(dtype) for _ in range(32)]
    samples = ({"__key__": f"{i:02d}", "x.npy": x, "cls": i % 2} for i, x in enumerate(arrays))
    wt.pack(samples, tmp_path / "set", split={"train": 0.75, "val": 0.25}, shuffle=False)
    make = functools.partial(Linear, inputs=int(np.prod(shape)))
    fields = {"image": wt.array("x.npy", shape=shape, dtype=dtype)}
    done = wt.train(tmp_path / "set", tmp_path / "run", model=make, fields=fields, **PLAIN)
    checkpoint, val = last(tmp_path / "run"), f"{tmp_path}/set/val-*.tar"
    assert wt.evaluate(checkpoint, val, model=make)[1]["loss"] == pytest.approx(done.val["loss"])
    wt.predict(checkpoint, val, tmp_path / "p.csv", model=make, probabilities=True)
    wt.export(checkpoint, tmp_path / "m.pt2", model=make)
    exported = torch.export.load(tmp_path / "m.pt2").module()
    for row in rows_of(tmp_path / "p.csv"):
        values = torch.from_numpy(arrays[int(row["key"])])[None].float()
        share = float(exported(values).detach().sigmoid())
        assert share == pytest.approx(float(row["label_1"]), abs=1e-4)


def test_complex_arrays_are_refused_before_any_write(tmp_path: Path) -> None:
    samples = ({"x.npy": np.ones(192, np.complex64), "cls": i % 2} for i in range(16))
    wt.pack(samples, tmp_path / "set")
    options = {"fields": {"image": wt.array("x.npy", shape=(192,), dtype="complex64")}, **PLAIN}
    with pytest.raises(wt.UsageError, match=r"complex64\[192\]: must be real numbers"):
        wt.train(tmp_path / "set", tmp_path / "run", model=Linear, **options)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_non_finite_target_is_a_bad_sample(tmp_path: Path, value: float) -> None:
    texts = [json.dumps({"y": value if i == 7 else 1.0 * i}).encode() for i in range(120)]
    samples = ({"__key__": f"k{i:03d}", "png": GOOD, "json": y} for i, y in enumerate(texts))
    wt.pack(samples, tmp_path / "set", labels=[wt.Label("y", "number", "json", "y")], shuffle=False)
    with pytest.raises(wt.SampleError, match="k007.*is not finite"):
        wt.train(tmp_path / "set", tmp_path / "run", **SMALL)
    done = wt.train(tmp_path / "set", tmp_path / "other", on_error="replace", **SMALL)
    assert done.epochs[0]["bad"] == 1
    assert np.isfinite(done.epochs[0]["loss"])


def test_max_errors_needs_on_error_and_has_a_hint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = ({"png": GOOD if i else BAD, "cls": i % 2} for i in range(40))
    wt.pack(fields, tmp_path / "set", classes=["no", "yes"])
    words = ["train", str(tmp_path / "set"), "--epochs", "1", "--batch-size", "8"]
    words += ["--image-size", "8", "--out", str(tmp_path / "run")]
    checkpoint = str(tmp_path / "run" / "checkpoints" / "best.pt")
    evaluate = ["evaluate", checkpoint, str(tmp_path / "set"), "--on-error", "replace"]
    hint, more = "hint: Allow a greater share of bad samples", ["--max-errors", "0.1"]
    for command, status, text in (
        ([*words, *more], 2, "--max-errors 0.1 needs --on-error replace"),
        ([*words, "--on-error", "replace"], 1, hint),
        ([*words, "--overwrite", "--on-error", "replace", *more], 0, ""),
        (evaluate, 1, hint),
        ([*evaluate, *more], 0, ""),
    ):
        assert main(command) == status
        assert text in capsys.readouterr().err


def test_an_output_that_cannot_be_written_is_named_before_any_work(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, damaged = tmp_path / "file", tmp_path / "no-checkpoint.pt"
    folder.write_text("")
    damaged.write_bytes(b"nothing")  # read later than the output is checked
    for command in (
        ["train", str(shards), "--batch-size", "999", "--out", str(folder / "run")],
        ["predict", str(damaged), str(shards), "--out", str(folder / "p.csv")],
        ["export", str(damaged), str(folder / "m.pt2")],
    ):
        assert main(command) == 1
        error, hint = capsys.readouterr().err.splitlines()
        assert error.startswith(f"error: {command[-1]} cannot be written: ")
        assert hint.startswith(("hint: Choose another folder", "hint: Name a file in another"))


def test_options_may_be_numpy_numbers_and_paths_which_are_saved_as_absolute_paths(
    shards: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    (tmp_path / "a" / "first.pt").write_bytes(run.read_bytes())
    monkeypatch.chdir(tmp_path / "a")
    options: dict[str, Any] = {"lr": np.float64(1e-3), "epochs": np.int64(1), "keep": 3.0}
    options |= {"compile": np.bool_(False), "device": torch.device("cpu")}
    options |= {"cache_dir": Path("cache"), "cache_limit": 10**9, "weights": Path("first.pt")}
    wt.train(shards, tmp_path / "run", **{**SMALL, **options})
    lines = {"lr = 0.001", "epochs = 1", "keep = 3", "compile = false", 'device = "cpu"'}
    lines |= {f'cache_dir = "{tmp_path}/a/cache"', f'weights = "{tmp_path}/a/first.pt"'}
    saved = (tmp_path / "run" / "config.toml").read_text().splitlines()
    assert lines | {'cache_limit = "1000000000"'} <= set(saved)
    monkeypatch.chdir(tmp_path / "b")
    assert main(["train", "--resume", "--out", str(tmp_path / "run"), "--epochs", "2"]) == 0


def test_a_module_is_trained_as_a_copy(shards: Path, tmp_path: Path) -> None:
    model = Linear(1)
    before = copy.deepcopy(model.state_dict())
    done = wt.train(shards, tmp_path / "run", model=model, **SMALL)
    wt.evaluate(last(tmp_path / "run"), f"{shards}/val-*.tar", model=model)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert not torch.equal(done.model.state_dict()["1.weight"], before["1.weight"])


def test_a_run_started_from_python_resumes_from_the_shell(
    shards: Path, tmp_path: Path, capsys: Any
) -> None:
    out, words = str(tmp_path / "run"), ["train", "--resume", "--out", str(tmp_path / "run")]
    for make, resume in ((functools.partial(Linear, inputs=192), False), (Linear(1), True)):
        wt.train(shards, out, model=make, resume=resume, **{**SMALL, "epochs": 1 + resume})
    assert main([*words, "--epochs", "3"]) == 2
    assert "Give it: --model module:function" in capsys.readouterr().err
    assert main([*words, "--epochs", "3", "--model", "tests.support.small_runs:Linear"]) == 0
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 3
    assert main([*words, "--epochs", "4", "--model", "small"]) == 2


MINE = """
from tests.support.small_runs import Linear
class Net(Linear):
    def __init__(self, outputs):
        import parts
        super().__init__(outputs)
    def forward(self, x):
        import late
        return super().forward(x)
"""
TRAIN = """
import os, sys
os.chdir(sys.argv.pop(1))
sys.path = [path for path in sys.path if path]
from wdstrain.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_a_model_can_import_modules_beside_it_at_any_time(shards: Path, tmp_path: Path) -> None:
    for name, text in (("parts", ""), ("late", ""), ("mine", MINE)):
        (tmp_path / f"{name}.py").write_text(text)
    words = f"train {shards} --out run --model mine:Net --epochs 1 --image-size 8 --batch-size 8"
    done = ended(TRAIN, tmp_path, *words.split())
    assert done.status == 0, done.err
