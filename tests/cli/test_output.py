"""Results are strict JSON, and print on a terminal or pipe of any encoding."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

import wdstrain as wt
from tests.conftest import picture, write_tar
from wdstrain.cli import main

VERBS = ["info", "info --exact", "verify --decode", "show", "index", "plan --batch-size 2"]


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A set whose keys, classes and texts lie in no 8-bit encoding."""
    folder = tmp_path_factory.mktemp("named") / "set"
    samples = [
        {"__key__": f"\u732b{n}", "cls": n % 2, "txt": "\u00e9\u4e2d\U0001f600 " * 20}
        for n in range(6)
    ]
    wt.pack(samples, folder, classes=["\u732b", "chien\u200bne"])
    return str(folder)


def printed(words: list[str], encoding: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return what a command that ends well prints to a stdout of this encoding."""
    stdout = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stdout)
        assert main(words) == 0
        stdout.flush()
    return stdout.buffer.getvalue().decode(encoding)


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "shift_jis", "utf-8"])
@pytest.mark.parametrize("verb", VERBS)
def test_every_encoding_of_the_terminal_gets_a_result(
    named: str, verb: str, encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "6" in printed([*verb.split(), named], encoding, monkeypatch)
    report = json.loads(printed([*verb.split(), named, "--json"], encoding, monkeypatch))
    if verb == "info":  # it draws bars
        bar = "\u2588" if encoding == "utf-8" else "#"
        assert bar * 30 in printed([verb, named], encoding, monkeypatch)
    if verb == "index":
        assert report["labels"][0]["classes"] == ["\u732b", "chien\u200bne"]


def test_numbers_that_json_lacks_become_null(tmp_path: Path, capsys: Any) -> None:
    texts = ["1.1e308", "1.6e308", "-1.4e308", "1.2e308"]
    rows = [(f"k{n}", {"json": f'{{"far": {text}}}'.encode()}) for n, text in enumerate(texts)]
    write_tar(tmp_path / "set" / "a.tar", rows)
    wt.index(tmp_path / "set", columns=["json.far"])
    for verb in VERBS:
        assert main([*verb.split(), str(tmp_path / "set"), "--json"]) == 0
        json.loads(capsys.readouterr().out, parse_constant=pytest.fail)


def test_json_holds_names_that_a_terminal_cannot_show(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = ["caf\u00e9", "soft\u00adhyphen", "right\u202eleft", "\U0001f469"]
    write_tar(tmp_path / "a.tar", [(key, {"png": picture(1)}) for key in keys])
    assert main(["show", str(tmp_path), "--json"]) == 0
    out = capsys.readouterr().out
    assert [sample["key"] for sample in json.loads(out)["samples"]] == keys
    assert "\u202e" not in out
