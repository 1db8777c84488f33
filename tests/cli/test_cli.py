"""The command line: results on stdout, messages on stderr, reliable exit statuses."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import wdstrain as wt
from tests.conftest import picture, write_class_folder, write_shards
from wdstrain.cli import main


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return write_class_folder(tmp_path / "photos", {"cat": 20, "dog": 20})


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Class folders, a table, shards, and an empty folder."""
    folder = tmp_path_factory.mktemp("cli") / "sources"
    write_class_folder(folder / "photos", {"cat": 20, "dog": 20})
    wt.convert_folder(folder / "photos", folder / "pets")
    wt.index(write_shards(folder / "plain", [4]))
    write_shards(folder / "cut", [4])
    os.truncate(folder / "cut" / "part-000.tar", 1500)
    (folder / "log.csv").write_text("file,n\ngone.jpg,1\n")
    (folder / "empty").mkdir()
    return folder


@pytest.fixture
def place(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the sources in the working directory."""
    monkeypatch.chdir(shutil.copytree(sources, tmp_path / "place"))
    return tmp_path / "place"


def convert(photos: Path, out: Path, *words: str) -> int:
    return main(["convert", "folder", str(photos), str(out), *words])


# --- results ---


def test_verbs_print_a_summary_or_one_object_of_json_and_damage_ends_with_1(
    photos: Path, tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "out"
    assert convert(photos, out, "--split", "train=0.8,val=0.2") == 0
    text = capsys.readouterr().out
    assert re.search(r"samples +40\n", text)
    assert "2 classes: cat, dog" in text
    for verb in ("info", "verify", "index"):
        assert main([verb, str(out)]) == 0
        assert "40" in capsys.readouterr().out
        assert main([verb, str(out), "--json", "-q"]) == 0
        printed = capsys.readouterr()
        assert (json.loads(printed.out)["samples"], printed.err) == (40, "")
    os.truncate(out / "val-000000.tar", 5000)
    assert main(["verify", str(out)]) == 1
    assert "val-000000.tar has 5000 bytes, its index says" in capsys.readouterr().err


def test_a_dry_run_does_not_claim_that_shards_were_written(
    photos: Path, tmp_path: Path, capsys: Any
) -> None:
    (photos / "cat" / "bad.jpg").write_bytes(b"")
    assert convert(photos, tmp_path / "out", "--dry-run", "--on-error", "skip") == 0
    printed = capsys.readouterr().out
    assert "shards would be in" in printed
    assert not re.search("shards are in|packed|skipped.jsonl", printed)
    assert not (tmp_path / "out").exists()


def test_convert_guesses_the_kind_of_a_source_and_says_so(place: Path, capsys: Any) -> None:
    Path("table.csv").write_text("file,kind\nphotos/cat/000.png,a\nphotos/dog/020.png,b\n")
    Path("flat").mkdir()
    Path("flat/a=b.png").write_bytes(picture(1))
    for words, kind, count in (
        ("photos 1", "folder", 40),
        ("table.csv 2 --image file --label kind", "table", 2),
        ("1 3", "tars", 40),
        ("flat 4 --flat", "folder", 1),
    ):
        assert main(["convert", *words.split()]) == 0
        assert f"is packed as by: wdstrain convert {kind}\n" in capsys.readouterr().err
        assert len(wt.open(words.split()[1])) == count
    Path("both/images").mkdir(parents=True)
    Path("both/labels.csv").write_text("a\n")
    for words, message in (
        ("both no", "holds the table labels.csv and folders such as images"),
        ("x.npy no", "Run: wdstrain convert arrays OUT --field NAME=x.npy"),
        ("fodler a b", "Did you mean folder?"),
    ):
        assert main(["convert", *words.split()]) == 2
        assert message in capsys.readouterr().err


# --- refusals ---


@pytest.mark.parametrize(
    ("words", "status", "error", "hint"),
    [
        ("", 2, "", ""),
        ("convert folder a b --split x", 2, "", ""),
        ("convert folder empty out", 1, "empty holds no images", "Check the path. Images end in"),
        ("convert folder photos/cat out", 1, "photos/cat holds 20 images and no class folders", ""),
        ("convert table log.csv out --image f", 2, "has no column 'f'", "Use one of its columns: "),
        (
            "convert table log.csv out --image file",
            1,
            "row 2: gone.jpg: the image is not there",
            "",
        ),
        ("info log.csv", 2, "log.csv is not a shard, but the source of a conversion", ""),
        ("info cut", 1, "part-000.tar ends", ""),
        ("info plain --where x==1", 2, "", "Use one of: key, shard, split, size, size.FIELD or "),
        ("info pets --where label=='elk'", 2, "", "Use one of: cat, dog."),
        ("index plain --columns x", 2, "", "Use one of: cls, txt."),
        ("show pets --class elk", 2, "", "Use one of: cat, dog."),
        ("train plain --out run", 2, "the index declares no labels", ""),
        ("train pets --label x --out out", 2, "", "Use one of: label."),
        ("train photos --out run --epochs 0", 2, "--epochs 0", ""),
        ("train plain --out pets", 2, "", "continue with --resume, or replace it with --overwr"),
        ("train plain --out run --wieght-decay 3", 2, "unrecognized option '--wieght", "Did you "),
        ("convert folder a b --max-shard-sam 3", 2, "", "Did you mean --max-shard-samples?"),
        ("evaluate log.csv plain", 2, "log.csv is no checkpoint", ""),
        ("plan absent --rate -1", 2, "--rate -1.0: must be > 0", ""),
        ("index absent --classes a,b", 2, "needs --label, whose values", ""),
        ("remove absent", 2, "--where or --keys", ""),
        ("train --val plain pets --out run", 2, "no shards to train on", "--val takes each word"),
        (
            "convert folder pets out --stratify label",
            2,
            "--stratify label needs a split",
            "Add --sp",
        ),
    ],
)
def test_wrong_usage_and_bad_input_are_a_line_with_a_next_step_and_leave_no_files(
    place: Path, capsys: Any, words: str, status: int, error: str, hint: str
) -> None:
    Path("pets/config.toml").touch()
    assert main(words.split()) == status
    printed = capsys.readouterr()
    assert re.fullmatch(r"(images: .+\n)?error: .+\n(hint: .+\n)?", printed.err)
    assert error in printed.err.partition("error: ")[2].splitlines()[0]
    assert hint in printed.err.partition("\nhint: ")[2]
    assert printed.out == ""
    assert not (place / "out").exists()
    assert not (place / "run").exists()


@pytest.mark.parametrize(
    "words",
    [
        "convert folder absent out",
        "convert folder photos out --flat --masks absent",
        "convert table absent.csv out --image f",
        "convert hdf5 absent.h5 out --field png=/x",
        "convert arrays out --field png=absent.npy",
        "convert tars absent out",
        "convert tars pets out --keys absent",
        "convert torchvision FashionMNIST out --root absent",
        "index absent",
        "info absent-{0..2}.tar",
        "show absent",
        "verify absent-*.tar",
        "repair absent --out out",
        "remove absent --where n==1",
        "remove pets --keys absent",
        "plan absent",
        "bench absent",
        "serve absent",
        "train absent --out out",
        "train pets --val absent --out out",
        "evaluate absent.pt pets",
        "predict absent.pt photos --out out.csv",
        "export absent.pt out.pt",
    ],
)
def test_a_missing_input_is_wrong_usage_in_every_verb(place: Path, capsys: Any, words: str) -> None:
    before = sorted(os.listdir(place))
    assert main(words.split()) == 2
    assert re.fullmatch(r"error: .*absent.*\nhint: .+\n", capsys.readouterr().err)
    assert sorted(os.listdir(place)) == before


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("convert folder absent out", "there is no such folder"),
        ("convert folder absent out --stratify label", "needs a split"),
        ("convert folder absent", "required: OUT"),
        ("convert folder absent out --spilt x", "unrecognized"),
    ],
)
def test_errors_with_json_are_json_objects(
    place: Path, capsys: Any, words: str, error: str
) -> None:
    assert main([*words.split(), "--json"]) == 2
    printed = capsys.readouterr()
    assert error in json.loads(printed.out)["error"]
    assert printed.err.startswith("error: ")


# --- names in errors ---


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("split=val/rows.csv", ["convert", "table", "split=val/rows.csv", "out", "--image", "p"]),
        ("v1. Use this.csv", ["convert", "table", "v1. Use this.csv", "out", "--image", "p"]),
        ("max_shard_size", ["convert", "table", "log.csv", "out", "--image", "max_shard_size"]),
        ("'on_error'", ["convert", "table", "log.csv", "o", "--image", "n", "--label", "on_error"]),
        ("seed=1. Run 2", ["info", "seed=1. Run 2"]),
        ("where=a b", ["verify", "where=a b", "--json"]),
        ("set hint: delete it", ["info", "set\nhint: delete it"]),  # it cannot pass for a hint
    ],
)
def test_names_of_the_command_line_stay_as_they_are_in_errors(
    place: Path, capsys: Any, name: str, words: list[str]
) -> None:
    for path in map(Path, ("split=val/rows.csv", "v1. Use this.csv")):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(Path("log.csv").read_bytes())
    assert main(words) == 2
    printed = capsys.readouterr()
    assert name in printed.err.splitlines()[0]
    assert "--json" not in words or name in json.loads(printed.out)["error"]


@pytest.mark.parametrize("name", ["limit=4.png", "b. Add c.png", "seed/a.png"])
def test_names_of_the_data_stay_as_they_are_in_errors(place: Path, capsys: Any, name: str) -> None:
    Path("log.csv").write_text(f"picture,group_by\n{name},x\n")
    for image, line in (("picture", 0), ("file", 1)):
        assert main(["convert", "table", "log.csv", "out", "--image", image]) != 0
        lines = capsys.readouterr().err.splitlines()[-2:]  # of the error and the hint
        assert ("group_by", name)[line == 0] in lines[line]


# --- lists ---


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        ("--class b URL", ["s000001"]),
        ("--class b --class c URL", ["s000001", "s000002"]),
        ("URL --class b,c", ["s000001", "s000002"]),
    ],
)
def test_options_with_several_values_may_stand_before_the_address_and_be_repeated(
    tmp_path: Path, capsys: Any, words: str, keys: list[str]
) -> None:
    shards = str(write_shards(tmp_path / "set", [3]))
    wt.index(shards, label="cls", classes=["a", "b", "c"])
    assert main(["show", *words.replace("URL", shards).split(), "--json"]) == 0
    assert [sample["key"] for sample in json.loads(capsys.readouterr().out)["samples"]] == keys


# --- processes ---


@pytest.mark.parametrize(
    ("words", "status", "error"),
    [
        (" | true; exit ${PIPESTATUS[0]}", 0, ""),
        (" --json >&-", 0, ""),
        (" > /dev/full", 1, "its result cannot be written to stdout: No space left on device."),
    ],
)
def test_a_closed_pipe_is_no_error_and_a_result_that_cannot_be_written_is(
    tmp_path: Path, words: str, status: int, error: str
) -> None:
    wt.pack([{"txt": "x"}], tmp_path / "set")
    script = f'"$0" -m wdstrain info "$@"{words}'
    command = ["bash", "-c", script, sys.executable, str(tmp_path / "set")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == status
    assert error in done.stderr
    assert bool(done.stderr) == bool(error)


def test_an_interrupted_conversion_prints_how_to_resume(tmp_path: Path, capsys: Any) -> None:
    photos, out = write_class_folder(tmp_path / "many", {"a": 2000}), tmp_path / "out"
    words = ["convert", "folder", str(photos), str(out), "--max-shard-samples", "2"]
    command = [sys.executable, "-m", "wdstrain", *words]
    with subprocess.Popen(command, stdout=-1, stderr=-1, text=True) as process:
        wait_for(lambda: len(list((out / ".unfinished").glob("shards/*.tar"))) > 3, process)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "error: interrupted.\nhint: Run the same command with --resume to continue." in err
    assert "Traceback" not in err
    assert [path.name for path in out.iterdir()] == [".unfinished"]
    assert main([*words, "--resume", "--json"]) == 0
    # The record of the last shard may be missing.
    assert json.loads(capsys.readouterr().out)["kept_shards"] >= 3
    assert main(["verify", str(out)]) == 0


def wait_for(done: Any, process: subprocess.Popen[Any]) -> None:
    end = time.monotonic() + 30
    while not done():
        assert process.poll() is None, "it ended before it could be interrupted"
        assert time.monotonic() < end
        time.sleep(0.002)
