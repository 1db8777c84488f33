"""Shards are data, never code: nothing is executed, and no name escapes its folder or page."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from isal import isal_zlib

import wdstrain as wt
from tests.conftest import Sample, picture, write_picture_shards, write_shards, write_tar
from wdstrain.cli.main import main
from wdstrain.errors import SampleError, UsageError, WdstrainError
from wdstrain.training.train import train

EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 40 40\n%%EndComments\n(run) print\n%%EOF\n"
SMALL = {"epochs": 1, "batch_size": 4, "image_size": 16, "model": "small", "num_workers": 0}
FIELDS = {"image": wt.image("png;jpg", size=16), "label": wt.label()}


class Trap:
    """An object that makes a folder when it is unpickled."""

    def __init__(self, place: Path) -> None:
        self._place = place

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._place),)


def run(*words: str | Path) -> None:
    with contextlib.suppress(SystemExit):
        main(list(map(str, words)))


def every_verb(folder: Path, out: Path) -> None:
    """Run every verb that takes shards on these shards."""
    run("info", folder, "--exact")
    run("verify", folder, "--decode")
    run("repair", folder, "-o", out / "repaired")
    run("show", folder, "-o", out / "sheet.png")
    run("show", folder)
    run("plan", folder, "--batch-size", "4")
    run("bench", folder, "--batch-size", "4", "--image-size", "8", "--seconds", "0.05")
    run("convert", "tars", folder, out / "again", "--on-error", "skip")
    run("convert", "tars", folder, out / "smaller", "--on-error", "skip", "--resize", "16")
    run("index", folder)


def labelled(
    folder: Path,
    classes: list[str],
    info: dict[str, Any] | None = None,
    name: str = "kind",
    split: str = "",
) -> Path:
    wt.index(folder)
    document = json.loads((folder / "index.json").read_text())
    label = {"name": name, "kind": "class", "field": "cls", "column": None, "classes": classes}
    document["wdstrain"]["labels"] = [label]
    document["wdstrain"]["info"] |= info or {}
    document["shardlist"][0]["split"] = split
    (folder / "index.json").write_text(json.dumps(document))
    return folder


def everything(folder: Path) -> set[str]:
    return {str(path) for path in folder.rglob("*")}


def test_an_image_never_starts_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow detects EPS by its first bytes, under any file name, and runs Ghostscript on it."""
    program = tmp_path / "bin" / "gs"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\ntouch "{tmp_path}/ran"\nexit 1\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    folder, files = tmp_path / "shards", {"jpg": EPS, "png": EPS, "cls": b"0"}
    write_tar(folder / "a.tar", [(f"k{i}", files) for i in range(8)])
    with pytest.raises(SampleError, match="no image of a known format"):
        list(wt.Loader(folder, FIELDS, batch_size=4))
    every_verb(folder, tmp_path)
    assert not (tmp_path / "ran").exists()


def test_no_verb_unpickles_data(tmp_path: Path) -> None:
    trap, trapped = pickle.dumps(Trap(tmp_path / "ran")), io.BytesIO()
    np.save(trapped, np.array([Trap(tmp_path / "ran")], object), allow_pickle=True)
    saved = io.BytesIO()
    torch.save(Trap(tmp_path / "ran"), saved)
    fields = dict.fromkeys(("pyd", "pkl", "cls", "json", "jpg"), trap)
    fields |= {"pth": saved.getvalue(), "npy": trapped.getvalue()}
    folder = tmp_path / "shards"
    write_tar(folder / "a.tar", [(f"k{i}", dict(fields)) for i in range(8)])
    every_verb(folder, tmp_path)
    (batch,) = wt.Loader(folder, batch_size=8)
    assert batch["pyd"] == [trap] * 8  # bytes, unchanged
    decoders = [wt.array(), wt.array("pkl"), wt.label(), wt.number("pyd"), wt.json("json")]
    for field in (*decoders, wt.image("jpg")):
        with pytest.raises(SampleError, match=r"a\.tar: 'k\d'"):
            list(wt.Loader(folder, {"x": field}, batch_size=4))
    assert not (tmp_path / "ran").exists()


def test_a_config_file_makes_no_objects(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(f"epochs: !!python/object/apply:os.mkdir ['{tmp_path}/ran']\n")
    words = ["train", str(tmp_path), "--out", str(tmp_path / "run"), "--config", str(config)]
    assert main(words) == 2
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "address", ["pipe:touch {}/ran", "pipe:cat {}/x.tar", "{}/$(touch ran).tar", "`touch {}/ran`"]
)
def test_no_address_is_run(tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for opened in (wt.Loader, wt.index, wt.info, wt.gopen):
        with pytest.raises(UsageError):
            opened(address.format(tmp_path))
    assert not list(tmp_path.iterdir())


def test_a_function_named_in_a_checkpoint_is_not_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_picture_shards(tmp_path / "shards", [16])
    labelled(folder, [f"c{i}" for i in range(10)])
    (tmp_path / "my_models.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w').close()\n"
        "from wdstrain.training.models import make_small\n"
        "def mine(outputs):\n    return make_small(outputs, 16)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    train(str(folder), tmp_path / "run", **{**SMALL, "model": "my_models:mine"})
    best = tmp_path / "run" / "checkpoints" / "last.pt"
    lines = [
        ["evaluate", best, folder],
        ["predict", best, folder, "-o", tmp_path / "p.csv"],
        ["export", best, tmp_path / "model.pt"],
    ]
    for line in lines:
        sys.modules.pop("my_models")
        (tmp_path / "ran").unlink()
        words = list(map(str, line))
        assert main(words) == 2
        err = capsys.readouterr().err
        assert "functions that a checkpoint names are not called" in err
        assert re.search(r"Give it.*--model", err, re.DOTALL)
        assert not (tmp_path / "ran").exists()
        assert main([*words, "--model", "my_models:mine"]) == 0
        assert (tmp_path / "ran").exists()


def test_a_function_named_in_a_run_folder_is_not_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text('model = "my_models:mine"\n')
    (tmp_path / "my_models.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = write_shards(tmp_path / "set", [8])
    assert main(["train", str(folder), "--out", str(tmp_path / "run"), "--resume"]) == 2
    err = capsys.readouterr().err
    assert "functions that a run names are not called" in err
    assert re.search(r"Give it.*--model", err, re.DOTALL)
    assert not (tmp_path / "ran").exists()


KEYS = [
    "../../outside/x",
    "/outside/x",
    "a/../../../x",
    "$HOME/x",
    "~/x",
    "-rf",
    "..\\..\\x",
    ".",
    "C:\\x",
    "`touch`",
]


def test_keys_never_leave_their_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards, out = tmp_path / "deep" / "set", tmp_path / "deep" / "out"
    out.mkdir(parents=True)
    monkeypatch.chdir(out)
    fields = {"png": picture(1), "../../outside/f": b"x", "cls": b"1"}
    samples: list[Sample] = [(f"{key}{i}", fields) for i in range(4) for key in KEYS]
    write_tar(shards / "a.tar", samples)
    labelled(shards, ["dark", "light"])
    before = everything(tmp_path)
    every_verb(shards, out)
    train(str(shards), out / "run", **{**SMALL, "on_error": "replace"})
    run("predict", out / "run" / "checkpoints" / "last.pt", shards, "-o", out / "p.csv")
    new = everything(tmp_path) - before
    assert {str(out / "p.csv"), str(out / "sheet.png"), str(out / "again")} <= new
    inside = (str(out), str(shards / "index."))
    assert [path for path in new if not path.startswith(inside)] == []


class Page(HTMLParser):
    """HTML page as a browser parses it: tags with their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


MARK = "owned"
EVIL = f"<script>{MARK}()</script>\"'><img src=x onerror={MARK}()></title></style><!--<svg/onload={MARK}()>"


def test_text_from_shards_is_escaped_in_html(tmp_path: Path) -> None:
    evil = EVIL.replace("/", "\u2215")  # "/" is not possible in a file name
    folder = tmp_path / "set"
    texts = {"txt": EVIL.encode(), "json": json.dumps({EVIL: EVIL}).encode()}
    rows: list[Sample] = [
        (f"k{i}{EVIL.replace('.', '')}", {"png": picture(i), "cls": b"%d" % (i % 2), **texts})
        for i in range(16)
    ]
    write_tar(folder / f"train-{evil[:60]}.tar", rows)
    about = {"source": {"kind": EVIL, EVIL: EVIL}, "options": {"seed": EVIL}}
    labelled(folder, [f"c{EVIL}", f"d{EVIL}"], about)
    train(str(folder), tmp_path / "run", val=str(folder), **SMALL)
    text = (tmp_path / "run" / "report.html").read_text(errors="replace")
    assert MARK in text, "the report does not show the text at all"
    assert f"<script>{MARK}" not in text
    assert f"<img src=x onerror={MARK}" not in text
    for tag, attributes in Page(text).tags:
        assert tag != "script" or MARK not in str(attributes)
        assert not [each for each in attributes if each.startswith("on")], (tag, attributes)
        values = [attributes.get(key) for key in ("href", "src", "style", "action")]
        assert not any(value and MARK in value for value in values), (tag, attributes)


READS_PICTURES = """
import sys
sys.modules["turbojpeg"] = None  # as where the package is not installed
import wdstrain as wt
(batch,) = wt.Loader("set", {"image": wt.image(size=8, augment="rrc")}, batch_size=4)
assert len(batch["__key__"]) == 4
sys.stdout.write(open("/proc/self/maps").read())
"""


def test_no_library_is_loaded_from_the_working_directory(tmp_path: Path) -> None:
    samples = [(f"k{i}", {"jpg": picture(i, kind="JPEG")}) for i in range(4)]
    write_tar(tmp_path / "set" / "a.tar", samples)
    library = tmp_path / "turbojpeg.libs" / "libturbojpeg-0.so"
    library.parent.mkdir()
    shutil.copy(isal_zlib.__file__, library)  # any loadable library
    ended = subprocess.run(
        [sys.executable, "-c", READS_PICTURES], cwd=tmp_path, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    assert str(tmp_path) not in ended.stdout


def npy_of(shape: str, descr: str = "'<f4'") -> bytes:
    return npy_with(f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}")


def npy_with(head: str) -> bytes:
    raw = head.encode("latin-1") + b"\n"
    return b"\x93NUMPY\x01\x00" + len(raw).to_bytes(2, "little") + raw + bytes(12)


HOSTILE: dict[str, tuple[str, bytes]] = {
    "shape below 0": ("x.npy", npy_of("(-1, 4)")),
    "shape with a gap": ("x.npy", npy_of("(3,,")),
    "braces": ("x.npy", npy_with("{" * 200)),
    "a list as a key": ("x.npy", npy_with("{[]:1}")),
    "a deep dtype": ("x.npy", npy_of("(3,)", "[" * 150 + "'<f4'" + "]" * 150)),
    "objects": ("x.npy", npy_of("(3,)", "'|O'")),
    "a head of 2 GB": ("x.npy", b"\x93NUMPY\x02\x00\xff\xff\xff\x7f" + b"{" * 100),
    "deep JSON": ("json", b"[" * 100_000),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers_and_json_are_clean_errors(name: str, tmp_path: Path, capsys: Any) -> None:
    field, data = HOSTILE[name]
    sample = {field: data, "png": picture(1), "cls": b"1"}
    write_tar(tmp_path / "s" / "t.tar", [(f"k{i}", sample) for i in range(3)])
    for words in (["info", "--exact"], ["info", "--json"], ["show"], ["verify", "--decode"]):
        run(words[0], tmp_path / "s", *words[1:])
    shown = capsys.readouterr()
    assert "k0" in shown.out
    assert "Traceback" not in shown.err
    if field == "x.npy":
        assert not wt.verify(tmp_path / "s", decode=True).ok
        loader = wt.Loader(tmp_path / "s", {"x": wt.array("x.npy")}, batch_size=1)
        with pytest.raises(SampleError, match="'k[0-2]', field 'x.npy'"):
            next(iter(loader))
        (tmp_path / "x.npy").write_bytes(data)
        with pytest.raises(WdstrainError, match="x.npy"):
            wt.convert_arrays({"x": str(tmp_path / "x.npy")}, str(tmp_path / "out"))


def without_root_privileges() -> list[str]:
    """Return a command prefix that drops root's right to read any file."""
    if os.geteuid() != 0:
        return []
    if shutil.which("setpriv") is None:
        pytest.skip("root reads everything, and there is no setpriv")
    rights = "-dac_override,-dac_read_search"
    return ["setpriv", f"--bounding-set={rights}", f"--inh-caps={rights}"]


COMMANDS = """
import json, sys
from wdstrain.cli import main
for words in json.loads(sys.argv[1]):
    print(main(words), file=sys.stderr, flush=True)
"""


def run_locked(commands: list[list[Any]], modes: dict[Path, int]) -> tuple[list[str], str]:
    words = json.dumps([[str(word) for word in command] for command in commands])
    program = [*without_root_privileges(), sys.executable, "-c", COMMANDS, words]
    for path, mode in modes.items():
        path.chmod(mode)
    try:
        done = subprocess.run(program, capture_output=True, text=True, timeout=100)
    finally:
        for path in modes:
            path.chmod(0o755)
    assert "Traceback" not in done.stderr
    statuses = [line for line in done.stderr.splitlines() if line.isdigit()]
    return statuses, done.stderr + done.stdout


def test_a_pattern_does_not_skip_unreadable_folders(tmp_path: Path) -> None:
    sets = tmp_path / "sets"
    for name in ("open", "locked"):
        wt.pack([{"__key__": name, "txt": "x"}], sets / name)
    (sets / "notes.txt").write_text("a file beside the folders is no folder that cannot be read")
    commands = [["info", tmp_path / name] for name in ("sets/*/train-*.tar", "*/*/train-*.tar")]
    # 0o444: names can be listed, but no file in the folder can be opened
    for mode, status in ((0o755, 0), (0o000, 1), (0o444, 1)):
        statuses, shown = run_locked(commands, {sets / "locked": mode})
        assert statuses == [str(status)] * 2, shown
        refused = re.findall(r"locked\S* cannot be (?:read|opened): Permission denied", shown)
        assert len(refused) == 2 * status


def test_unreadable_paths_are_errors_and_not_empty_sets(tmp_path: Path) -> None:
    """A folder, an index.json and a tar without read permission, for every verb."""
    for name in ("hidden", "indexed", "bare"):
        wt.pack([{"__key__": "k", "txt": "x"}], tmp_path / name)
    for name in ("index.json", "index.arrow"):
        (tmp_path / "bare" / name).unlink()
    hidden, indexed, bare, out = (tmp_path / n for n in ("hidden", "indexed", "bare", "out"))
    commands: list[list[Any]] = [
        [verb, place]
        for verb in ("info", "verify", "show", "index")
        for place in (hidden, indexed, bare)
    ]
    commands += [["convert", "tars", place, out] for place in (hidden, indexed, bare)]
    # `convert folder` reads no index, and repair continues without an unreadable one
    commands += [["convert", "folder", hidden, out]]
    commands += [["repair", place, "-o", out] for place in (hidden, bare)]
    modes = {hidden: 0, indexed / "index.json": 0, bare / "train-000000.tar": 0}
    statuses, shown = run_locked(commands, modes)
    assert statuses == ["1"] * len(commands), shown
    assert shown.count("Permission denied") == len(commands)
    assert not out.exists()


@pytest.mark.parametrize("name", ["index.json", "index.arrow"])
@pytest.mark.parametrize("verb", ["info", "index"])
def test_a_named_pipe_in_place_of_an_index_is_refused_without_waiting(
    name: str, verb: str, tmp_path: Path
) -> None:
    wt.pack([{"txt": "x"}], tmp_path / "set")
    (tmp_path / "set" / name).unlink()
    os.mkfifo(tmp_path / "set" / name)
    status = main([verb, str(tmp_path / "set")])
    assert status == (0 if (verb, name) == ("index", "index.arrow") else 1)


# --- escapes of terminals ---

ESCAPE = "\x1b]0;owned\x07\x1b[31m"


@pytest.fixture
def red(tmp_path: Path) -> Path:
    """Shards and an index in which every name would turn a terminal red."""
    folder = tmp_path / "set"
    samples = [
        (f"k{i}{ESCAPE}", {"png": picture(i) if i else b"none", "cls": b"9" if i == 1 else b"0"})
        for i in range(12)
    ]
    write_tar(folder / f"a{ESCAPE.replace('/', '')}.tar", samples)
    labelled(folder, [f"c{ESCAPE}", f"d{ESCAPE}"], name=f"kind{ESCAPE}", split=f"train{ESCAPE}")
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
    red: Path, words: list[str], as_json: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    with contextlib.suppress(SystemExit):
        main([words[0], str(red), *words[1:], *(["--json"] if as_json else [])])
    shown = capfd.readouterr()
    assert shown.out + shown.err
    assert "\x1b" not in shown.out + shown.err
    assert "\x07" not in shown.out + shown.err


def test_repair_prints_no_escape(
    red: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (shard,) = red.glob("*.tar")
    shard.write_bytes(shard.read_bytes()[:9000])
    assert main(["repair", str(red), "-o", str(tmp_path / "whole")]) == 1
    shown = capfd.readouterr()
    assert "lost" in shown.out + shown.err
    assert "\x1b" not in shown.out + shown.err
