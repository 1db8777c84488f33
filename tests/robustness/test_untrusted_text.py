"""Terminal escapes in keys, classes, labels and file names are never printed."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest

import wdstrain as wt
from tests.conftest import picture, write_tar
from wdstrain.cli.main import main

ESCAPE = "\x1b]0;owned\x07\x1b[31m"


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """Shards and an index in which every name would turn a terminal red."""
    folder = tmp_path / "set"
    samples = [
        (f"k{i}{ESCAPE}", {"png": picture(i) if i else b"none", "cls": b"9" if i == 1 else b"0"})
        for i in range(12)
    ]
    write_tar(folder / f"a{ESCAPE.replace('/', '')}.tar", samples)
    wt.index(folder)
    index = json.loads((folder / "index.json").read_text())
    label = {"name": f"kind{ESCAPE}", "kind": "class", "field": "cls", "column": None}
    label |= {"classes": [f"c{ESCAPE}", f"d{ESCAPE}"]}
    index["wdstrain"]["labels"] = [label]
    index["shardlist"][0]["split"] = f"train{ESCAPE}"
    (folder / "index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize(
    "words",
    [
        ["info"],
        ["info", "--exact"],
        ["verify", "--decode"],
        ["show", "-n", "12"],
        ["show", "--class", "nothing"],
        ["plan", "--batch-size", "4"],
        ["plan", "--batch-size", "4", "--label", "nothing"],
        ["index"],
        ["bench", "--batch-size", "4", "--image-size", "8", "--seconds", "0.05"],
    ],
    ids=lambda words: " ".join(words),
)
@pytest.mark.parametrize("as_json", [False, True])
def test_no_verb_prints_an_escape(
    hostile: Path, words: list[str], as_json: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    with contextlib.suppress(SystemExit):
        main([words[0], str(hostile), *words[1:], *(["--json"] if as_json else [])])
    shown = capfd.readouterr()
    assert shown.out + shown.err
    assert "\x1b" not in shown.out + shown.err
    assert "\x07" not in shown.out + shown.err


def test_repair_prints_no_escape(
    hostile: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (shard,) = hostile.glob("*.tar")
    shard.write_bytes(shard.read_bytes()[:9000])
    assert main(["repair", str(hostile), "-o", str(tmp_path / "whole")]) == 1
    shown = capfd.readouterr()
    assert "lost" in shown.out + shown.err
    assert "\x1b" not in shown.out + shown.err
