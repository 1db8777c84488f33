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

import h5py
import numpy as np
import pytest

import wdstrain as wt
from tests.conftest import write_tar
from tests.golden.expected import check, check_names, key_paths, png
from wdstrain.cli import main

Json = Callable[..., Any]

COUNT = 24
DATA = ("classes", "ignored", "skipped_reasons")  # objects whose keys are data or sentences

# Commands in the folder `work`. They write to OUT, where `tars` has a shard with an index.
COMMANDS = {
    "convert folder": "convert folder photos OUT --split train=0.75,val=0.25 --stratify label",
    "convert folder skip": "convert folder odd OUT --on-error skip",
    "convert table": "convert table log.csv OUT --image file --label kind,angle,tags:multi",
    "convert hdf5": "convert hdf5 data.h5 OUT --field x=/x --field cls=/y",
    "convert arrays": "convert arrays OUT --field x=x.npy",
    "convert tars": "convert tars set OUT --where angle>1",
    "convert torchvision": "convert torchvision EuroSAT OUT --root .",
    "convert coco": "convert coco boxes.json yolo/images OUT",
    "convert yolo": "convert yolo yolo OUT",
    "index": "index OUT/tars --columns json.n --label cls",
    "info": "info set",
    "info without index": "info odd.tar",
    "show": "show set/train-000000.tar --limit 3 -o OUT/sheet.png",
    "verify": "verify set --decode",
    "verify damaged": "verify bad",
    "repair": "repair bad -o OUT/saved",
    "remove": "remove OUT/tars --where cls==1",
    "join": "join OUT/tars t.csv --on key",
    "plan": "plan set/train-000000.tar --batch-size 4 --world-size 2",
    "bench": "bench set/train-000000.tar --seconds 0.02 --batch-size 4 --image-size 8",
    "train": "train set --out OUT/run --label label,angle --epochs 1 --batch-size 4 --image-size 8 "
    "--device cpu",
    "evaluate": "evaluate run/checkpoints/last.pt set/val-000000.tar --device cpu",
    "compare": "compare run",
    "predict": "predict run/checkpoints/last.pt set/val-000000.tar -o OUT/t.csv --device cpu",
    "export": "export run/checkpoints/last.pt OUT/model.pt",
    "serve": "serve set --port 0",
    "demo": "demo --dir OUT",
}
SLOW = ("demo",)  # it trains on 1,200 images

# A command of each verb whose work cannot begin.
WRONG = [
    *(
        "convert folder none out",
        "convert table none.csv out --image file",
        "convert tars none out",
    ),
    *("convert hdf5 none.h5 out --field x=/x", "convert arrays out --field x=none.npy"),
    *("convert torchvision Nothing out --root .", "convert coco none.json none out"),
    *("convert yolo none out", "index none", "info none", "show none", "verify none"),
    *("repair none -o out", "remove none --where cls==1", "join none t.csv", "plan none"),
    *("bench none", "train none --out run", "evaluate none none", "compare none", "serve none"),
    *("predict none none -o table.csv", "export none model.pt", "info none --spilt", "show"),
]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with sources of conversions, a set of shards, a damaged copy of it, and a run."""
    folder = tmp_path_factory.mktemp("json")
    kinds = ("no", "yes")
    names = [f"photos/{kinds[n % 2]}/{n:02d}.png" for n in range(COUNT)]
    rows = [f"{name},{kinds[n % 2]},{n / 4},a|b" for n, name in enumerate(names)]
    box = {"image_id": 1, "category_id": 1, "bbox": [0, 0, 3, 3]}
    boxes = {"images": [{"id": 1, "file_name": "1.png"}], "annotations": [box]}
    files: dict[str, str | bytes] = {
        **{name: png(n, 12, 12) for n, name in enumerate(names)},
        "log.csv": "\n".join(["file,kind,angle,tags", *rows]) + "\n",
        "t.csv": "key,score\n1,2.5\n7,1\n",
        **{"odd/a/good.png": png(1), "odd/a/bad.png": "no image", "odd/a/notes.txt": "notes"},
        **{f"eurosat/2750/c{number}/1.png": png(number) for number in range(2)},
        **{"yolo/images/1.png": png(1), "yolo/classes.txt": "car\n"},
        "yolo/labels/1.txt": "0 0.5 0.5 0.5 0.5\n",
        "boxes.json": json.dumps({**boxes, "categories": [{"id": 1, "name": "car"}]}),
    }
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data if isinstance(data, bytes) else data.encode())
    np.save(folder / "x.npy", np.zeros((4, 2), np.float32))
    with h5py.File(folder / "data.h5", "w") as file:
        file["x"], file["y"] = np.zeros((4, 2), np.float32), np.arange(4) % 2
    write_tar(folder / "odd.tar", [("1", {"cls": b"0", "png": png(1), "x.npy": b"no array"})])
    entries = [
        {"angle": n / 4, "who": f"p{n % 5}", "maybe": n if n % 3 else None} for n in range(COUNT)
    ]
    samples = [
        {"__key__": f"k{n:02d}", "png": png(n, 12, 12), "cls": n % 2, "json": entry}
        for n, entry in enumerate(entries)
    ]
    labels = [wt.Label("angle", "number", "json", "angle")]
    split: dict[str, Any] = {"split": {"train": 0.7, "val": 0.3}, "stratify": "label", "seed": 1}
    wt.pack(samples, folder / "set", classes=["no", "yes"], labels=labels, **split)
    wt.pack(samples, folder / "bad", classes=["no", "yes"], labels=labels, shuffle=False)
    with open(folder / "bad" / "train-000000.tar", "r+b") as damaged:
        damaged.seek(700)
        damaged.write(b"????")
    options = {"label": "label", "epochs": 1, "batch_size": 4, "image_size": 8, "device": "cpu"}
    wt.train(folder / "set", folder / "run", **options)
    return folder


@pytest.fixture
def run(
    work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Json:
    """Return a function that runs a command with --json and returns its JSON object."""
    monkeypatch.chdir(work)

    def run(command: str, status: int = 0) -> Any:
        capsys.readouterr()
        done = main([*command.replace("OUT", str(tmp_path)).split(), "--json"])
        out, errors = capsys.readouterr()
        assert done == status, errors
        assert out.count("\n") == 1, "not one JSON object on one line"
        return json.loads(out)

    return run


class InterruptedAfterStart(io.StringIO):
    """stderr that interrupts this process when `serve` says that it serves."""

    def write(self, text: str) -> int:
        if "serving" in text:
            signal.raise_signal(signal.SIGINT)
        return super().write(text)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in COMMANDS]
)
def test_the_json_of_a_verb_has_the_same_keys(
    run: Json, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "OUT/tars" in COMMANDS[name]:
        rows = [(str(n), {"cls": b"%d" % n, "json": b'{"n": 1}'}) for n in range(3)]
        wt.index(write_tar(tmp_path / "tars" / "a.tar", rows), columns=["cls"])
    if name == "serve":
        monkeypatch.setattr(sys, "stderr", InterruptedAfterStart())
    shown = run(COMMANDS[name], status=int("bad" in COMMANDS[name]))
    if name == "bench":
        # which values are null, and whether there is advice, depends on the time that was measured
        shown = {**dict.fromkeys(shown), "stages": dict.fromkeys(shown["stages"])}
    check("json_keys", name, key_paths(shown, DATA))


@pytest.mark.parametrize("command", WRONG)
def test_the_json_of_an_error_has_the_same_keys(run: Json, command: str) -> None:
    shown = run(command, status=2)
    assert isinstance(shown["error"], str)
    assert isinstance(shown["hint"], str | None)
    check("json_keys", "error", sorted(shown))


def test_every_verb_of_the_help_is_here(capsys: pytest.CaptureFixture[str]) -> None:
    for start in ("", "convert "):
        with pytest.raises(SystemExit):
            main([*start.split(), "--help"])
        for verb in re.findall(r"^    (\w+)", capsys.readouterr().out, re.MULTILINE):
            for commands in (COMMANDS.values(), [*WRONG, "demo "]):
                assert any(f"{words} ".startswith(f"{start}{verb} ") for words in commands), verb


def test_predictions_have_the_same_columns(run: Json, tmp_path: Path) -> None:
    run(f"{COMMANDS['predict']} --probabilities --embeddings")
    head = next(csv.reader((tmp_path / "t.csv").read_text().splitlines()))
    check("json_keys", "columns of predictions", head)


def test_the_file_has_no_other_entries() -> None:
    check_names("json_keys", [*COMMANDS, "error", "columns of predictions"])
