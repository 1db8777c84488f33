"""Options are declared once: functions, flags, help texts, types and errors agree."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wdstrain as wt
from tests.conftest import write_class_folder
from wdstrain.cli import main

KINDS = ["folder", "table", "hdf5", "arrays", "tars", "torchvision", "coco", "yolo"]
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
OTHER_VERBS = ("join", "train", "evaluate", "predict", "export", "serve", "demo")


def helped(words: list[str], capsys: Any) -> str:
    with pytest.raises(SystemExit) as stopped:
        main([*words, "--help"])
    assert stopped.value.code == 0
    text: str = capsys.readouterr().out
    return text


def test_each_help_text_fits_80_columns_and_has_an_example(
    capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    verbs = [["convert", kind] for kind in KINDS] + [[verb] for verb in (*VERBS, *OTHER_VERBS)]
    for words in [[], ["convert"], *verbs]:
        text = helped(words, capsys)
        assert max(map(len, text.splitlines())) <= 80, words
        assert f"example: wdstrain {' '.join(words)}".strip() in " ".join(text.split()), words


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
        word = {"table": "FILE", "urls": "URL"}.get(name, name.upper())
        positional = re.search(rf"^  {word} ", shown, re.MULTILINE)
        as_field = name in ("fields", "arrays") and "--field" in shown
        is_there = bool(re.search(rf"--(no-)?{flag}\b", shown) or positional or as_field)
        assert is_there != (name == "progress"), name


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


def test_an_unknown_argument_or_choice_in_python_is_refused() -> None:
    with pytest.raises(wt.UsageError, match=r"^tail='cut': must be one of drop, pad, keep\.$"):
        wt.plan_epoch("absent", tail="cut")
    with pytest.raises(wt.UsageError, match=r"^num_workers=0: must be an integer >= 1\.$"):
        wt.verify("absent", num_workers=0)
    with pytest.raises(wt.UsageError, match=r"^stratify='label' needs a split. Add split=\{"):
        wt.convert_folder("in", "out", stratify="label")
    with pytest.raises(TypeError, match=r"info\(\) .*'exakt'. Did you mean exact\?"):
        wt.info("absent", exakt=True)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"convert_table\(\) missing.*'image'"):
        wt.convert_table("in.csv", "out")


def test_sizes_are_written_with_or_without_a_unit(tmp_path: Path) -> None:
    source = write_class_folder(tmp_path / "in", {"a": 2})
    for text, size in (("256MB", 256_000_000), ("4KiB", 4096), ("77", 77)):
        index = wt.convert_folder(source, tmp_path / text, max_shard_size=text)
        assert index.info["options"]["max_shard_size"] == size


@pytest.mark.parametrize("text", ["", "-3MB", "1e400", "nan", "3XB"])
def test_invalid_sizes_are_refused(text: str, tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(wt.UsageError, match="max_shard_size="):
        wt.convert_folder(str(tmp_path), str(tmp_path / "out"), max_shard_size=text)
    words = ["convert", "folder", str(tmp_path), str(tmp_path / "out")]
    assert main([*words, f"--max-shard-size={text}"]) == 2
    assert "--max-shard-size" in capsys.readouterr().err


# --- types of options ---


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Class folders, a table of their images, an array, and shards."""
    folder = write_class_folder(tmp_path_factory.mktemp("sources") / "photos", {"a": 2, "b": 2})
    rows = [f"{path.relative_to(folder)},{path.parent.name}" for path in folder.rglob("*.png")]
    (folder / "log.csv").write_text("\n".join(["file,kind", *rows]) + "\n")
    np.save(folder / "kinds.npy", np.arange(4) % 2)
    rows_of_set = [{"__key__": f"k{n}", "cls": n % 2, "txt": "x"} for n in range(6)]
    wt.pack(rows_of_set, folder / "set", classes=["a", "b"])
    return folder


SAMPLES = [{"__key__": str(n), "cls": n % 2} for n in range(4)]
CALLS: dict[str, Callable[..., object]] = {
    "folder": lambda s, out, **options: wt.convert_folder(s, out, **options),
    "table": lambda s, out, **options: wt.convert_table(
        s / "log.csv", out, **{"image": "file", **options}
    ),
    "arrays": lambda s, out, **options: wt.convert_arrays({"cls": s / "kinds.npy"}, out, **options),
    "tars": lambda s, out, **options: wt.convert_tars(s / "set", out, **options),
    "pack": lambda s, out, **options: wt.pack(SAMPLES, out, **options),
    "index": lambda s, out, **options: wt.index(s / "set", **options),
    "join": lambda s, out, **options: wt.join(s / "set", [{"key": "k1", "x": 1.0}], **options),
    "plan": lambda s, out, **options: wt.plan_epoch(s / "set", batch_size=2, **options),
    "loader": lambda s, out, **options: wt.Loader(s / "set", batch_size=2, **options),
}


@pytest.mark.parametrize(
    ("call", "option", "value"),
    [
        ("loader", "shuffle", "no"),  # a text that is not empty would be true
        ("folder", "dry_run", "no"),
        ("loader", "shuffle", None),
        ("folder", "overwrite", [1]),
        ("folder", "split", {"train": "0.5", "val": "0.5"}),
        ("folder", "split", ["train", "val"]),
        ("folder", "quality", "95"),
        ("table", "image", ["file"]),
        ("table", "root", ["."]),
        ("tars", "rename", {"txt": 3}),
        ("pack", "labels", ["cls"]),
        ("pack", "group", "cls"),
        ("pack", "fields", "cls"),
        ("loader", "split", 3),
        ("loader", "multiprocessing_context", "thread"),
        ("loader", "cache_dir", ["cache"]),
        ("loader", "where", ["label == 'a'"]),
        ("loader", "fields", ["txt"]),
        ("join", "on", ["key"]),
        ("index", "label", ["cls", "txt"]),
    ],
)
def test_a_value_of_another_type_is_refused_by_the_name_of_its_option(
    sources: Path, tmp_path: Path, call: str, option: str, value: object
) -> None:
    with pytest.raises(wt.UsageError, match=rf"^{option}=.*: must be "):
        CALLS[call](sources, tmp_path / "out", **{option: value})


@pytest.mark.parametrize(
    ("call", "option", "value"),
    [
        ("tars", "rename", "cls=kind"),
        ("folder", "split", "train=0.5,val=0.5"),
        ("folder", "classes", None),
        ("table", "label", None),
        ("tars", "keep", None),
        # not taken letter by letter
        ("tars", "keep", "txt"),
        ("tars", "drop", "txt"),
        ("table", "label", "kind"),
        ("arrays", "label", "cls"),
        ("index", "columns", "txt"),
    ],
)
def test_a_text_or_nothing_is_taken_as_it_is_meant(
    sources: Path, tmp_path: Path, call: str, option: str, value: object
) -> None:
    CALLS[call](sources, tmp_path / "out", **{option: value})
