"""Options are declared once: functions, flags, help texts and errors agree."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest

import wdstrain as wt
from tests.conftest import write_class_folder
from wdstrain.cli import main

KINDS = ["folder", "table", "hdf5", "arrays", "tars", "torchvision", "coco", "yolo"]


def helped(words: list[str], capsys: Any) -> str:
    with pytest.raises(SystemExit) as stopped:
        main([*words, "--help"])
    assert stopped.value.code == 0
    text: str = capsys.readouterr().out
    return text


@pytest.mark.parametrize("kind", KINDS)
def test_each_argument_of_a_conversion_has_a_flag_and_a_help_text(kind: str, capsys: Any) -> None:
    function = getattr(wt, f"convert_{kind}")
    parameters = inspect.signature(function).parameters
    assert all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters.values())
    documented = inspect.getdoc(function) or ""
    shown = helped(["convert", kind], capsys)
    for name in parameters:
        assert re.search(rf"^    {name}: \w", documented, re.MULTILINE), name
        flag = name.replace("_", "-")
        python_only = name == "progress"
        word = {"table": "FILE", "urls": "URL"}.get(name, name.upper())
        positional = re.search(rf"^  {word} ", shown, re.MULTILINE)
        as_field = name in ("fields", "arrays") and "--field" in shown
        is_there = bool(re.search(rf"--(no-)?{flag}\b", shown) or positional or as_field)
        assert is_there != python_only, name


VERBS: dict[str, Any] = {
    "index": wt.index,
    "info": wt.info,
    "show": wt.peek,
    "verify": wt.verify,
    "repair": wt.repair,
    "remove": wt.remove,
    "plan": wt.plan_epoch,
    "bench": wt.bench,
}
PYTHON_ONLY = {
    *("progress", "note", "fields", "transform", "normalize", "tail", "lanes", "rank"),
    *("world_size", "on_error", "max_errors", "multiprocessing_context", "patience", "collate_fn"),
}  # arguments of bench and show; plan has flags for some of them
OTHER_NAMES = {"n": "limit", "order": "random", "keys": "keys?", "as_bytes": "bytes"}


@pytest.mark.parametrize("verb", VERBS)
def test_each_argument_of_a_verb_is_a_documented_keyword_and_a_flag(verb: str, capsys: Any) -> None:
    documented = inspect.getdoc(VERBS[verb]) or ""
    shown = helped([verb], capsys)
    for name, parameter in inspect.signature(VERBS[verb]).parameters.items():
        assert parameter.kind is not parameter.VAR_KEYWORD
        assert re.search(rf"^    {name}: \w", documented, re.MULTILINE), name
        flag = OTHER_NAMES.get(name, name).replace("_", "-")
        is_there = name in ("urls", "source") or re.search(rf"--(no-)?{flag}\b", shown)
        assert is_there or name in PYTHON_ONLY, name
        default = parameter.default
        if type(default) in (int, float) and is_there and name != "n":
            assert f"(default: {default})" in " ".join(shown.split()), name


def test_a_wrong_choice_in_python_is_refused(tmp_path: Path) -> None:
    with pytest.raises(wt.UsageError, match=r"^tail='cut': must be one of drop, pad, keep\.$"):
        wt.plan_epoch("absent", tail="cut")
    with pytest.raises(wt.UsageError, match=r"^num_workers=0: must be an integer >= 1\.$"):
        wt.verify("absent", num_workers=0)
    with pytest.raises(TypeError, match=r"info\(\) .*'exakt'. Did you mean exact\?"):
        wt.info("absent", exakt=True)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["plan", "absent", "--batch-size", "0"], "--batch-size 0: must be an integer >= 1"),
        (["plan", "absent", "--rate", "-1"], "--rate -1.0: must be > 0"),
        (["verify", "absent", "--num-workers", "0"], "--num-workers 0: must be an integer >= 1"),
        (["bench", "absent", "--seconds", "-1"], "--seconds -1.0: must be > 0"),
        (["show", "absent", "--limit", "0"], "--limit 0: must be an integer >= 1"),
        (["index", "absent", "--classes", "a,b"], "needs --label, whose values"),
        (["remove", "absent"], "--where or --keys"),
        (["serve", "absent", "--port", "x"], "--port: 'x' is not an integer"),
    ],
)
def test_wrong_usage_of_verbs_names_the_flag(words: list[str], error: str, capsys: Any) -> None:
    assert main(words) == 2
    assert error in capsys.readouterr().err


def test_help_fits_80_columns(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    verbs = [["convert", kind] for kind in KINDS]
    verbs += [[], ["convert"], ["index"], ["info"], ["show"], ["verify"], ["repair"], ["plan"]]
    verbs += [
        ["bench"],
        ["remove"],
        ["train"],
        ["evaluate"],
        ["predict"],
        ["export"],
        ["serve"],
        ["demo"],
    ]
    for words in verbs:
        text = helped(words, capsys)
        assert max(map(len, text.splitlines())) <= 80, words
        assert "example: wdstrain " in text


def test_an_unknown_argument_is_refused_with_a_similar_argument() -> None:
    with pytest.raises(TypeError, match=r"convert_folder\(\) .*'max_samples'.*max_shard_samples\?"):
        wt.convert_folder("in", "out", max_samples=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"convert_table\(\) missing.*'image'"):
        wt.convert_table("in.csv", "out")


def test_python_names_arguments_and_the_shell_names_flags(tmp_path: Path, capsys: Any) -> None:
    source, out = str(write_class_folder(tmp_path / "in", {"a": 2})), str(tmp_path / "out")
    with pytest.raises(wt.UsageError, match=r"^stratify='label' needs a split. Add split=\{"):
        wt.convert_folder(source, out, stratify="label")
    assert main(["convert", "folder", source, out, "--stratify", "label"]) == 2
    error = "error: --stratify label needs a split.\nhint: Add --split train=0.9,val=0.1.\n"
    assert capsys.readouterr().err == error
    with pytest.raises(wt.UsageError, match="max_shard_samples=0: must be an integer >= 1"):
        wt.convert_folder(source, out, max_shard_samples=0)
    assert main(["convert", "folder", source, out, "--max-shard-samples", "0"]) == 2
    assert capsys.readouterr().err == "error: --max-shard-samples 0: must be an integer >= 1.\n"


def test_errors_with_json_are_json_objects(tmp_path: Path, capsys: Any) -> None:
    absent = str(tmp_path / "absent")
    for words, status, error in (
        (["convert", "folder", absent, absent, "--json"], 2, "there is no such folder"),
        (
            ["convert", "folder", absent, absent, "--json", "--stratify", "label"],
            2,
            "needs a split",
        ),
        (["convert", "folder", "--json", absent], 2, "required: OUT"),
        (["convert", "folder", absent, absent, "--json", "--spilt", "x"], 2, "unrecognized"),
        (["verify", absent, "--json"], 2, "no such file"),
    ):
        assert main(words) == status
        printed = capsys.readouterr()
        assert error in json.loads(printed.out)["error"]
        assert printed.err.startswith("error: ")


@pytest.mark.parametrize(
    ("text", "size"), [("256MB", 256_000_000), ("256M", 256_000_000), ("4KiB", 4096), ("77", 77)]
)
def test_sizes_are_written_with_or_without_a_unit(text: str, size: int, tmp_path: Path) -> None:
    source, out = write_class_folder(tmp_path / "in", {"a": 2}), str(tmp_path / "out")
    index = wt.convert_folder(str(source), out, max_shard_size=text)
    assert index.info["options"]["max_shard_size"] == size


@pytest.mark.parametrize("text", ["", "MB", "-3MB", "1e400", "nan", "3XB"])
def test_invalid_sizes_are_refused(text: str, tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(wt.UsageError, match="max_shard_size="):
        wt.convert_folder(str(tmp_path), str(tmp_path / "out"), max_shard_size=text)
    words = ["convert", "folder", str(tmp_path), str(tmp_path / "out")]
    assert main([*words, f"--max-shard-size={text}"]) == 2
    assert "--max-shard-size" in capsys.readouterr().err


def test_quiet_prints_only_the_result(tmp_path: Path, capsys: Any) -> None:
    source, out = write_class_folder(tmp_path / "in", {"a": 2}), str(tmp_path / "out")
    assert main(["convert", "folder", str(source), out, "--json", "-q"]) == 0
    printed = capsys.readouterr()
    assert (json.loads(printed.out)["samples"], printed.err) == (2, "")
    assert main(["convert", "folder", str(source), out, "-q"]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_options_are_not_abbreviated(tmp_path: Path, capsys: Any) -> None:
    assert main(["convert", "folder", "in", str(tmp_path / "out"), "--max-shard-sam", "3"]) == 2
    assert "hint: Did you mean --max-shard-samples?" in capsys.readouterr().err


def test_hints_name_flags_of_the_shell(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "config.toml").touch()
    assert main(["train", "shards", "--out", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert "continue with --resume, or replace it with --overwrite" in " ".join(err.split())
