"""The command line: results on stdout, messages on stderr, reliable exit statuses."""

from __future__ import annotations

import json
import os
import re
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


def convert(photos: Path, out: Path, *words: str) -> int:
    return main(["convert", "folder", str(photos), str(out), *words])


def test_convert_index_info_and_verify_print_a_summary(
    photos: Path, tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "out"
    assert convert(photos, out, "--split", "train=0.8,val=0.2") == 0
    text = capsys.readouterr().out
    assert "40" in text
    assert "2 classes: cat, dog" in text
    for verb in ("info", "verify", "index"):
        assert main([verb, str(out)]) == 0
        assert "40" in capsys.readouterr().out


def test_json_is_one_object_on_stdout(photos: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out"
    assert convert(photos, out, "--json", "--max-shard-samples", "15") == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["samples"], document["shards"], document["splits"]) == (40, 3, {"train": 40})
    assert main(["verify", str(out), "--json"]) == 0
    checked = json.loads(capsys.readouterr().out)
    assert checked["ok"] is True
    assert checked["samples"] == 40
    assert main(["info", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["labels"][0]["classes"] == ["cat", "dog"]


def test_damage_is_printed_with_its_place_and_exits_with_1(
    photos: Path, tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "out"
    convert(photos, out)
    os.truncate(out / "train-000000.tar", 5000)
    capsys.readouterr()
    assert main(["verify", str(out)]) == 1
    assert "train-000000.tar has 5000 bytes, its index says" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "status", "sentence"),
    [
        (["convert", "folder", "absent", "out"], 2, "absent: there is no such folder"),
        (["convert", "folder", "empty", "out"], 1, "empty holds no images"),
        (
            ["convert", "folder", "photos/cat", "out"],
            1,
            "photos/cat holds 20 images and no class folders",
        ),
        (
            ["convert", "table", "absent.csv", "out", "--image", "f"],
            2,
            "absent.csv: there is no such file",
        ),
        (
            ["convert", "table", "log.csv", "out", "--image", "f"],
            2,
            "log.csv has no column 'f'.\nhint: Use one of its columns: file, n",
        ),
        (
            ["convert", "table", "log.csv", "out", "--image", "file"],
            1,
            "log.csv, row 2: gone.jpg: the image is not there",
        ),
        (["info", "photos"], 2, "photos: this folder holds no index.json and no .tar file"),
        (["info", "log.csv"], 2, "log.csv is not a shard, but the source of a conversion"),
        (["info", "cut"], 1, "part-000.tar ends"),
        (["verify", "absent"], 2, "absent: there is no such file or folder"),
        (["train", "cut", "--out", "run"], 1, "part-000.tar ends"),
        (["train", "plain", "--out", "run"], 2, "the index declares no labels"),
        (["train", "photos", "--out", "run", "--epochs", "0"], 2, "--epochs 0"),
        (["evaluate", "log.csv", "plain"], 2, "log.csv is no checkpoint"),
    ],
)
def test_bad_input_is_a_one_line_error_and_leaves_no_files(
    photos: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
    words: list[str],
    status: int,
    sentence: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "log.csv").write_text("file,n\ngone.jpg,1\n")
    write_shards(tmp_path / "plain", [4])
    write_shards(tmp_path / "cut", [4])
    os.truncate(tmp_path / "cut" / "part-000.tar", 1500)
    assert main(words) == status
    printed = capsys.readouterr()
    assert sentence in printed.err
    assert re.fullmatch(r"(images: .+\n)?error: .+\n(hint: .+\n)?", printed.err)
    assert printed.out == ""
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "words",
    [
        "convert folder absent out",
        "convert folder photos out --flat --masks absent",
        "convert folder photos out --like absent",
        "convert table absent.csv out --image f",
        "convert table absent-*.csv out --image f",
        "convert hdf5 absent.h5 out --field png=/x",
        "convert arrays out --field png=absent.npy",
        "convert tars absent out",
        "convert tars shards out --keys absent",
        "convert torchvision FashionMNIST out --root absent",
        "index absent",
        "info absent-{0..2}.tar",
        "show absent",
        "verify absent-*.tar",
        "repair absent --out out",
        "remove absent --where n==1",
        "remove shards --keys absent",
        "plan absent",
        "bench absent",
        "serve absent",
        "train absent --out out",
        "train shards --val absent --out out",
        "train shards --config absent.toml --out out",
        "evaluate absent.pt shards",
        "predict absent.pt photos --out out.csv",
        "export absent.pt out.pt",
    ],
)
def test_a_missing_input_is_wrong_usage_in_every_verb(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_shards(tmp_path / "shards", [4])
    wt.index(str(tmp_path / "shards"))
    before = sorted(os.listdir(tmp_path))
    assert main(words.split()) == 2
    assert re.fullmatch(r"error: .*absent.*\nhint: .+\n", capsys.readouterr().err)
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("convert folder empty out", "Check the path. Images end in jpg, jpeg, "),
        ("convert table empty out --image f", "Check the path. Tables end in .csv, .tsv, "),
        ("convert table log.csv out --image f", "Use one of its columns: file, n."),
        ("convert table log.csv out --image file --label x", "Use one of its columns: file, n."),
        ("convert table log.csv out --image file --where x==1", "Use one of: file, n."),
        (
            "info plain --where x==1",
            "Use one of: key, shard, split, size, size.FIELD or has.FIELD.",
        ),
        ("info pets --where x==1", "Use one of: label, key, shard, split, "),
        ("info pets --where label=='elk'", "Use one of: cat, dog."),
        ("index plain --columns x", "Use one of: cls, txt."),
        ("show pets --label x", "Use one of: label, "),
        ("show pets --class elk", "Use one of: cat, dog."),
        ("train pets --label x --out out", "Use one of: label."),
        ("train pets --balance x --out out", "Use one of: label, key, "),
        ("train empty --out out", "Name a folder of shards"),
    ],
)
def test_a_wrong_name_or_an_empty_folder_has_a_next_step(
    photos: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
    words: str,
    hint: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "log.csv").write_text("file,n\ngone.jpg,1\n")
    wt.index(str(write_shards(tmp_path / "plain", [4])))
    wt.convert_folder(str(photos), str(tmp_path / "pets"))
    assert main(words.split()) in (1, 2)
    assert f"\nhint: {hint}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_dry_run_does_not_claim_that_shards_were_written(
    photos: Path, tmp_path: Path, capsys: Any
) -> None:
    (photos / "cat" / "bad.jpg").write_bytes(b"")
    assert convert(photos, tmp_path / "out", "--dry-run", "--on-error", "skip") == 0
    printed = capsys.readouterr().out
    assert "shards would be in" in printed
    assert "shards are in" not in printed
    assert "packed" not in printed
    assert "skipped.jsonl" not in printed
    assert not (tmp_path / "out").exists()


def test_wrong_usage_exits_with_2(capsys: Any) -> None:
    for words in (["nonsense"], [], ["convert"], ["convert", "folder", "a", "b", "--split", "x"]):
        assert main(words) == 2
        assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize(
    "words",
    [
        *[
            ["convert", kind]
            for kind in ("folder", "table", "hdf5", "arrays", "tars", "torchvision", "coco", "yolo")
        ],
        ["train"],
        ["show"],
        ["verify"],
        ["repair"],
        ["demo"],
        ["evaluate"],
    ],
)
def test_the_help_of_every_verb_has_an_example(words: list[str], capsys: Any) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([*words, "--help"])
    assert stopped.value.code == 0
    assert f"example: wdstrain {' '.join(words)}" in " ".join(capsys.readouterr().out.split())


def test_sizes_may_have_units(photos: Path, tmp_path: Path) -> None:
    assert convert(photos, tmp_path / "a", "--max-shard-size", "16KB") == 0
    assert len(list((tmp_path / "a").glob("*.tar"))) > 3


def test_a_closed_pipe_is_not_an_error(photos: Path, tmp_path: Path) -> None:
    convert(photos, tmp_path / "out")
    command = (
        f"{sys.executable} -m wdstrain info {tmp_path / 'out'} | true; echo ${{PIPESTATUS[0]}}"
    )
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("0\n", "")


def test_an_interrupted_conversion_prints_how_to_resume(tmp_path: Path, capsys: Any) -> None:
    photos, out = write_class_folder(tmp_path / "many", {"a": 2000}), tmp_path / "out"
    command = [
        sys.executable,
        "-m",
        "wdstrain",
        "convert",
        "folder",
        str(photos),
        str(out),
        "--max-shard-samples",
        "2",
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        wait_for(lambda: len(list((out / ".unfinished").glob("shards/*.tar"))) > 3, process)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "error: interrupted.\nhint: Run the same command with --resume to continue." in err
    assert "Traceback" not in err
    assert [path.name for path in out.iterdir()] == [".unfinished"]
    assert convert(photos, out, "--max-shard-samples", "2", "--resume", "--json") == 0
    assert (
        json.loads(capsys.readouterr().out)["kept_shards"] >= 3
    )  # the record of the last shard may be missing
    assert main(["verify", str(out)]) == 0


@pytest.mark.slow
def test_a_killed_conversion_is_refused_as_input(tmp_path: Path, capsys: Any) -> None:
    photos = write_class_folder(tmp_path / "many", {"a": 1000})
    out = tmp_path / "out"
    command = [
        sys.executable,
        "-m",
        "wdstrain",
        "convert",
        "folder",
        str(photos),
        str(out),
        "--max-shard-samples",
        "2",
        "--num-workers",
        "2",
    ]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        wait_for(lambda: len(list((out / ".unfinished").glob("shards/*.tar"))) > 3, process)
        with open(f"/proc/{process.pid}/task/{process.pid}/children") as file:
            workers = [int(word) for word in file.read().split()]
        process.kill()
        process.wait()
    assert workers
    end = time.monotonic() + 20
    while any(os.path.exists(f"/proc/{pid}") for pid in workers):
        assert time.monotonic() < end, "workers outlive their parent"
        time.sleep(0.02)
    assert main(["info", str(out)]) == 1
    assert "a conversion into this folder was not finished" in capsys.readouterr().err
    assert convert(photos, out) == 2
    assert "holds an unfinished conversion" in capsys.readouterr().err
    assert convert(photos, out, "--max-shard-samples", "2", "--resume") == 0
    assert main(["verify", str(out)]) == 0
    convert(photos, tmp_path / "whole", "--max-shard-samples", "2", "--num-workers", "1")
    files = [
        {path.name: path.read_bytes() for path in folder.iterdir()}
        for folder in (out, tmp_path / "whole")
    ]
    assert files[0] == files[1]


def wait_for(done: Any, process: subprocess.Popen[Any]) -> None:
    end = time.monotonic() + 30
    while not done():
        assert process.poll() is None, "it ended before it could be interrupted"
        assert time.monotonic() < end
        time.sleep(0.002)


def test_an_unknown_option_is_refused_with_a_similar_option(capsys: Any) -> None:
    assert main(["train", "shards", "--out", "run", "--wieght-decay", "3"]) == 2
    message = "error: unrecognized option '--wieght-decay'.\nhint: Did you mean --weight-decay?\n"
    assert capsys.readouterr().err == message
    assert main(["convert", "folder", "a", "b", "--spilt", "train=1"]) == 2
    assert "Did you mean --split?" in capsys.readouterr().err


@pytest.mark.parametrize("closed", [False, True])
def test_a_result_that_cannot_be_written_is_an_error(tmp_path: Path, closed: bool) -> None:
    wt.pack([{"txt": "x"}], tmp_path / "set")
    words = ["info", str(tmp_path / "set"), *(["--json"] if closed else [])]
    script = f'exec "$0" -m wdstrain "$@" {">&-" if closed else "> /dev/full"}'
    done = subprocess.run(
        ["bash", "-c", script, sys.executable, *words], capture_output=True, text=True
    )
    assert done.returncode == (0 if closed else 1)
    message = "error: the work is done, but its result cannot be written to stdout: No space left on device."
    assert done.stderr == ("" if closed else f"{message}\nhint: Write it elsewhere.\n")


def test_convert_guesses_the_kind_of_a_source_and_says_so(
    photos: Path, tmp_path: Path, capsys: Any
) -> None:
    table = tmp_path / "table.csv"
    files = sorted(path for path in photos.rglob("*") if path.is_file())[:2]
    table.write_text("file,kind\n" + "".join(f"{path},k{i}\n" for i, path in enumerate(files)))
    for source, kind, count in ((photos, "folder", None), (table, "table", 2)):
        out = tmp_path / f"out-{kind}"
        words = ["--image", "file", "--label", "kind"] if kind == "table" else []
        assert main(["convert", str(source), str(out), *words]) == 0
        assert f"is packed as by: wdstrain convert {kind}\n" in capsys.readouterr().err
        assert count in (None, len(wt.open(out)))
    again = tmp_path / "again"
    assert main(["convert", str(tmp_path / "out-folder"), str(again), "--quiet"]) == 0
    assert capsys.readouterr().err == ""
    assert wt.open(again).keys(range(3))
    (tmp_path / "both" / "images").mkdir(parents=True)
    (tmp_path / "both" / "labels.csv").write_text("a\n")
    assert main(["convert", str(tmp_path / "both"), str(tmp_path / "no")]) == 2
    assert "holds the table labels.csv and folders such as images" in capsys.readouterr().err
    assert main(["convert", "x.npy", str(tmp_path / "no")]) == 2
    assert "Run: wdstrain convert arrays OUT --field NAME=x.npy" in capsys.readouterr().err
    (tmp_path / "flat").mkdir()
    (tmp_path / "flat" / "a=b.png").write_bytes(picture(1))
    assert main(["convert", str(tmp_path / "flat"), str(tmp_path / "one"), "--flat"]) == 0
    assert main(["convert", "fodler", "a", "b"]) == 2
    assert "Did you mean folder?" in capsys.readouterr().err
