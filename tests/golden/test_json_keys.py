"""The keys of what `--json` prints stay the same, for each verb and for errors.

Other programs read them. `expected/json_keys.json` has the path and the type of each value. All
commands run in this process, on a set of 24 tiny images.
"""

from __future__ import annotations

import csv
import io
import json
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wdstrain as wt
from tests.conftest import write_tar
from tests.golden.expected import check, check_names, key_paths
from tests.golden.tiny_images import png
from wdstrain.cli import main

Json = Callable[..., Any]

COUNT = 24
DATA = ("classes", "ignored", "skipped_reasons")  # objects whose keys are data or sentences


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with sources of conversions, a set of shards, a damaged copy of it, and a run."""
    folder = tmp_path_factory.mktemp("json")
    for number in range(COUNT):
        path = folder / "photos" / ("no", "yes")[number % 2] / f"{number:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(number, 12, 12))
    rows = [
        f"photos/{('no', 'yes')[n % 2]}/{n:02d}.png,{('no', 'yes')[n % 2]},{n / 4},a|b"
        for n in range(COUNT)
    ]
    (folder / "log.csv").write_text("\n".join(["file,kind,angle,tags", *rows]) + "\n")
    samples = [
        {
            "__key__": f"k{n:02d}",
            "png": png(n, 12, 12),
            "cls": n % 2,
            "json": {"angle": n / 4, "who": f"p{n % 5}", "maybe": n if n % 3 else None},
        }
        for n in range(COUNT)
    ]
    labels = [wt.Label("angle", "number", "json", "angle")]
    split: dict[str, Any] = {"split": {"train": 0.7, "val": 0.3}, "stratify": "label", "seed": 1}
    wt.pack(samples, folder / "set", classes=["no", "yes"], labels=labels, **split)
    wt.pack(samples, folder / "bad", classes=["no", "yes"], labels=labels, shuffle=False)
    with open(folder / "bad" / "train-000000.tar", "r+b") as file:
        file.seek(700)
        file.write(b"????")
    options = {"label": "label", "epochs": 1, "batch_size": 4, "image_size": 8, "device": "cpu"}
    wt.train(folder / "set", folder / "run", **options)
    return folder


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Json:
    """Return a function that runs a command with --json and returns its JSON object."""

    def run(*words: object, status: int = 0) -> Any:
        capsys.readouterr()
        done = main([*map(str, words), "--json"])
        out, errors = capsys.readouterr()
        assert done == status, errors
        assert out.count("\n") == 1, "not one JSON object on one line"
        return json.loads(out)

    return run


def convert_folder(run: Json, work: Path, out: Path) -> Any:
    split = ["--split", "train=0.75,val=0.25", "--stratify", "label"]
    return run("convert", "folder", work / "photos", out / "set", *split)


def convert_folder_skip(run: Json, work: Path, out: Path) -> Any:
    (out / "in" / "a").mkdir(parents=True)
    (out / "in" / "a" / "good.png").write_bytes(png(1))
    (out / "in" / "a" / "bad.png").write_bytes(b"no image")
    (out / "in" / "a" / "notes.txt").write_bytes(b"notes")
    return run("convert", "folder", out / "in", out / "set", "--on-error", "skip")


def convert_table(run: Json, work: Path, out: Path) -> Any:
    words = ["--image", "file", "--label", "kind,angle,tags:multi"]
    return run("convert", "table", work / "log.csv", out / "set", *words)


def convert_hdf5(run: Json, work: Path, out: Path) -> Any:
    h5py = pytest.importorskip("h5py")
    with h5py.File(out / "data.h5", "w") as file:
        file["x"] = np.zeros((4, 2), np.float32)
        file["y"] = np.arange(4) % 2
    fields = ["--field", "x=/x", "--field", "cls=/y"]
    return run("convert", "hdf5", out / "data.h5", out / "set", *fields)


def convert_arrays(run: Json, work: Path, out: Path) -> Any:
    np.save(out / "x.npy", np.zeros((4, 2), np.float32))
    return run("convert", "arrays", out / "set", "--field", f"x={out / 'x.npy'}")


def convert_tars(run: Json, work: Path, out: Path) -> Any:
    return run("convert", "tars", work / "set", out / "set", "--where", "angle > 1")


def convert_torchvision(run: Json, work: Path, out: Path) -> Any:
    for number in range(2):
        path = out / "root" / "eurosat" / "2750" / f"c{number}" / "1.png"
        path.parent.mkdir(parents=True)
        path.write_bytes(png(number))
    return run("convert", "torchvision", "EuroSAT", out / "set", "--root", out / "root")


def convert_coco(run: Json, work: Path, out: Path) -> Any:
    (out / "in").mkdir()
    (out / "in" / "1.png").write_bytes(png(1))
    box = {"image_id": 1, "category_id": 1, "bbox": [0, 0, 3, 3]}
    document = {"images": [{"id": 1, "file_name": "1.png"}], "annotations": [box]}
    categories = [{"id": 1, "name": "car"}]
    (out / "boxes.json").write_text(json.dumps({**document, "categories": categories}))
    return run("convert", "coco", out / "boxes.json", out / "in", out / "set")


def convert_yolo(run: Json, work: Path, out: Path) -> Any:
    for name in ("images", "labels"):
        (out / "in" / name).mkdir(parents=True)
    (out / "in" / "images" / "1.png").write_bytes(png(1))
    (out / "in" / "labels" / "1.txt").write_text("0 0.5 0.5 0.5 0.5\n")
    (out / "in" / "classes.txt").write_text("car\n")
    return run("convert", "yolo", out / "in", out / "set")


def index(run: Json, work: Path, out: Path) -> Any:
    write_tar(out / "a.tar", [("1", {"cls": b"0", "json": b'{"n": 1}'})])
    return run("index", out, "--columns", "json.n", "--label", "cls")


def info(run: Json, work: Path, out: Path) -> Any:
    return run("info", work / "set")


def info_without_index(run: Json, work: Path, out: Path) -> Any:
    write_tar(out / "a.tar", [("1", {"cls": b"0", "png": png(1), "x.npy": b"no array"})])
    return run("info", out / "a.tar")


def show(run: Json, work: Path, out: Path) -> Any:
    return run("show", work / "set" / "train-000000.tar", "--limit", "3", "-o", out / "sheet.png")


def verify(run: Json, work: Path, out: Path) -> Any:
    return run("verify", work / "set", "--decode")


def verify_damaged(run: Json, work: Path, out: Path) -> Any:
    return run("verify", work / "bad", status=1)


def repair(run: Json, work: Path, out: Path) -> Any:
    return run("repair", work / "bad", "-o", out / "saved", status=1)


def remove(run: Json, work: Path, out: Path) -> Any:
    write_tar(out / "a.tar", [(str(n), {"cls": b"%d" % n}) for n in range(3)])
    wt.index(str(out), columns=["cls"])
    return run("remove", out, "--where", "cls == 1")


def join(run: Json, work: Path, out: Path) -> Any:
    write_tar(out / "a.tar", [(str(n), {"cls": b"%d" % n}) for n in range(3)])
    wt.index(str(out))
    (out / "t.csv").write_text("key,score\n1,2.5\n7,1\n")
    return run("join", out, out / "t.csv", "--on", "key")


def plan(run: Json, work: Path, out: Path) -> Any:
    words = ["--batch-size", "4", "--world-size", "2"]
    return run("plan", work / "set" / "train-000000.tar", *words)


def bench(run: Json, work: Path, out: Path) -> Any:
    words = ["--seconds", "0.02", "--batch-size", "4", "--image-size", "8"]
    report = run("bench", work / "set" / "train-000000.tar", *words)
    # which values are null, and whether there is advice, depends on the time that was measured
    return {**dict.fromkeys(report), "stages": dict.fromkeys(report["stages"])}


def train(run: Json, work: Path, out: Path) -> Any:
    words = ["--epochs", "1", "--batch-size", "4", "--image-size", "8", "--device", "cpu"]
    return run("train", work / "set", "--out", out / "run", "--label", "label,angle", *words)


def checkpoint(work: Path) -> Path:
    return work / "run" / "checkpoints" / "last.pt"


def evaluate(run: Json, work: Path, out: Path) -> Any:
    return run("evaluate", checkpoint(work), work / "set" / "val-000000.tar", "--device", "cpu")


def compare(run: Json, work: Path, out: Path) -> Any:
    return run("compare", checkpoint(work).parents[1])


def predict(run: Json, work: Path, out: Path) -> Any:
    words = ["-o", out / "table.csv", "--device", "cpu"]
    return run("predict", checkpoint(work), work / "set" / "val-000000.tar", *words)


def export(run: Json, work: Path, out: Path) -> Any:
    return run("export", checkpoint(work), out / "model.pt")


class InterruptedAfterStart(io.StringIO):
    """stderr that interrupts this process when `serve` says that it serves."""

    def write(self, text: str) -> int:
        if "serving" in text:
            signal.raise_signal(signal.SIGINT)
        return super().write(text)


def serve(run: Json, work: Path, out: Path) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", InterruptedAfterStart())
        return run("serve", work / "set", "--port", "0")


def demo(run: Json, work: Path, out: Path) -> Any:
    pytest.importorskip("skimage")
    return run("demo", "--dir", out)


VERBS: dict[str, Callable[[Json, Path, Path], Any]] = {
    function.__name__.replace("_", " "): function
    for function in (
        convert_folder,
        convert_folder_skip,
        convert_table,
        convert_hdf5,
        convert_arrays,
        convert_tars,
        convert_torchvision,
        convert_coco,
        convert_yolo,
        index,
        info,
        info_without_index,
        show,
        verify,
        verify_damaged,
        repair,
        remove,
        join,
        plan,
        bench,
        train,
        evaluate,
        compare,
        predict,
        export,
        serve,
        demo,
    )
}
SLOW = ("demo",)  # it trains on 1,200 images

ABSENT = "no-such-folder"
# A command of each verb whose work cannot begin.
WRONG: dict[str, list[str]] = {
    "convert folder": ["convert", "folder", ABSENT, "out"],
    "convert table": ["convert", "table", f"{ABSENT}.csv", "out", "--image", "file"],
    "convert hdf5": ["convert", "hdf5", f"{ABSENT}.h5", "out", "--field", "x=/x"],
    "convert arrays": ["convert", "arrays", "out", "--field", f"x={ABSENT}.npy"],
    "convert tars": ["convert", "tars", ABSENT, "out"],
    "convert torchvision": ["convert", "torchvision", "Nothing", "out", "--root", "."],
    "convert coco": ["convert", "coco", f"{ABSENT}.json", ABSENT, "out"],
    "convert yolo": ["convert", "yolo", ABSENT, "out"],
    "index": ["index", ABSENT],
    "info": ["info", ABSENT],
    "show": ["show", ABSENT],
    "verify": ["verify", ABSENT],
    "repair": ["repair", ABSENT, "-o", "out"],
    "remove": ["remove", ABSENT, "--where", "cls == 1"],
    "join": ["join", ABSENT, "t.csv"],
    "plan": ["plan", ABSENT],
    "bench": ["bench", ABSENT],
    "train": ["train", ABSENT, "--out", "run"],
    "evaluate": ["evaluate", ABSENT, ABSENT],
    "compare": ["compare", ABSENT],
    "predict": ["predict", ABSENT, ABSENT, "-o", "table.csv"],
    "export": ["export", ABSENT, "model.pt"],
    "serve": ["serve", ABSENT],
    "unknown option": ["info", ABSENT, "--spilt"],
    "missing words": ["show"],
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in VERBS]
)
def test_the_json_of_a_verb_has_the_same_keys(
    run: Json, work: Path, tmp_path: Path, name: str
) -> None:
    check("json_keys", name, key_paths(VERBS[name](run, work, tmp_path), DATA))


@pytest.mark.parametrize("name", WRONG)
def test_the_json_of_an_error_has_the_same_keys(
    run: Json, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    shown = run(*WRONG[name], status=2)
    assert isinstance(shown["error"], str)
    assert isinstance(shown["hint"], str | None)
    check("json_keys", "error", sorted(shown))


def test_every_verb_of_the_help_is_here(capsys: pytest.CaptureFixture[str]) -> None:
    for start in ([], ["convert"]):
        with pytest.raises(SystemExit):
            main([*start, "--help"])
        text = capsys.readouterr().out
        for verb in re.findall(r"^    (\w+)", text, re.MULTILINE):
            known = [name for name in VERBS if f"{name} ".startswith(" ".join([*start, verb, ""]))]
            assert known, f"no command of {verb}"


def test_predictions_have_the_same_columns(run: Json, work: Path, tmp_path: Path) -> None:
    words = ["-o", tmp_path / "t.csv", "--device", "cpu", "--probabilities", "--embeddings"]
    run("predict", checkpoint(work), work / "set" / "val-000000.tar", *words)
    head = next(csv.reader((tmp_path / "t.csv").read_text().splitlines()))
    check("json_keys", "columns of predictions", head)


def test_the_file_has_no_other_entries() -> None:
    check_names("json_keys", [*VERBS, "error", "columns of predictions"])
