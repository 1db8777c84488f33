"""The house stands: imports go down, names are honest, the README's words are true."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import h5py
import numpy as np
import pytest

import wdstrain
from tests.conftest import ROOT, write_class_folder

PACKAGE = ROOT / "wdstrain"

# a module imports only from floors below its own
FLOORS = [
    {
        "errors",
        "bits",
        "children",
        "interrupts",
        "checksum",
        "sizes",
        "locks",
        "pieces",
        "printing",
        "console",
        "packing.collector",
        "looking.picturing",
    },
    {"bodies", "turbo", "looking.wording", "sending"},
    {"http", "objects"},
    {"remote"},
    {"policies", "charts"},
    {"plan", "tar", "storage", "opener", "decode", "augment", "memory", "meter", "inspecting.dimensions"},
    {
        "indexing",
        "verifying.search",
        "arena",
        "pinned",
        "watching",
        "mixing",
        "packing.options",
        "packing.expression",
        "packing.jobs",
    },
    {"fields", "cache", "verifying.salvage", "verifying.passage"},
    {"forward", "labels", "verifying.trial", "inspecting.contents", "inspecting.provenance"},
    {"index_files", "slots", "packing.listing", "inspecting.histograms", "verifying.survey"},
    {
        "opening",
        "packing.pictures",
        "packing.encoding",
        "packing.catalog",
        "packing.tables",
        "packing.rows",
        "landing",
        "decoder",
        "inspecting.glimpses",
        "inspecting.facts",
        "verifying.inspection",
    },
    {
        "inspecting.sampling",
        "verifying.census",
        "looking.seeing",
        "looking.picking",
        "workers",
        "reader",
        "tasks",
        "packing.planning",
        "packing.folder",
        "packing.table",
        "packing.samples",
        "packing.arrays",
    },
    {
        "pipeline",
        "looking.figures",
        "looking.sheets",
        "foresight.itinerary",
        "packing.shard",
        "packing.spill",
        "packing.stage",
        "packing.bucket",
        "packing.hdf5",
        "packing.tars",
        "packing.vision",
        "inspecting.doors",
        "verifying.doors",
        "verifying.rescue",
    },
    {"verifying.repairing", "packing.convert", "batches", "augmentation", "cards", "inspecting", "foresight.shuffling"},
    {"packing.doors", "packing", "loader", "device", "limits", "verifying", "foresight.prospect"},
    {"streaming", "mixed", "benching", "looking.delivered", "foresight.outlook"},
    {"looking.doors", "foresight.doors"},
    {"looking", "foresight"},
    {
        "training.configuration",
        "training.task",
        "training.models",
        "training.world",
        "training.stages",
        "training.interruption",
        "training.telling",
    },
    {"training.recipe", "training.metrics", "training.counting", "training.gallery", "training.run", "training.checkpoints"},
    {"training.scoring", "training.tally"},
    {"training.loop", "training.report", "training.board", "training.opened"},
    {"training.keeping"},
    {"training.doors"},
    {"training.predicting", "training.exporting"},
    {"training"},
    {"serving.asking", "serving.places"},
    {"serving.inside"},
    {"serving.answering"},
    {"serving.server"},
    {"serving"},
    {"demo"},
    {"cli.words"},
    {"cli.convert", "cli.train", "cli.bench", "cli.show", "cli.info", "cli.check", "cli.plan"},
    {"cli.main"},
    {"cli"},
    {"", "__main__"},
]


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name below it; the package itself is the empty name."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = path
    return found


def imported(path: Path) -> set[str]:
    """Modules of the package that a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "wdstrain":
            base = node.module.removeprefix("wdstrain").lstrip(".")
            below = [f"{base}.{one.name}".lstrip(".") for one in node.names]
            names |= {one if one in modules() else base for one in below}
        elif isinstance(node, ast.Import):
            names |= {one.name.removeprefix("wdstrain.") for one in node.names if one.name.startswith("wdstrain.")}
    return names


def test_every_module_has_its_floor_and_imports_only_from_below() -> None:
    level = {name: number for number, floor in enumerate(FLOORS) for name in floor}
    assert set(level) == set(modules())
    for name, path in modules().items():
        for other in imported(path):
            if (name, other) == ("cli.main", ""):
                continue  # the version
            assert level[other] < level[name], f"{name} imports {other}, which is not below it"


def test_every_module_begins_with_why_it_is() -> None:
    for name, path in modules().items():
        assert ast.get_docstring(ast.parse(path.read_text())), f"{name} has no docstring"


def test_public_names_are_exactly_those_that_are_listed() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    imports = [
        node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("wdstrain.")
    ]
    bound = {one.asname or one.name for node in imports for one in node.names} - {"doors"}
    assert bound == set(wdstrain.__all__)
    assert all(callable(getattr(wdstrain, name)) for name in wdstrain.__all__)
    with pytest.raises(AttributeError, match="no attribute 'pack_nothing'"):
        _ = wdstrain.pack_nothing
    assert wdstrain.__all__ == sorted(wdstrain.__all__)
    for name in wdstrain.__all__:
        assert getattr(wdstrain, name).__doc__, f"wt.{name} has no docstring"


def test_no_module_has_the_name_of_a_public_function() -> None:
    """`wt.index(...)` must stay a function whatever is imported."""
    assert not set(wdstrain.__all__) & set(modules())


def test_importing_starts_nothing_and_brings_no_trainer() -> None:
    code = "import sys, threading, wdstrain; print(threading.active_count(), *[m for m in sys.modules if 'wdstrain.' in m])"
    words = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert words[0] == "1"
    assert not [name for name in words[1:] if "training" in name or "cli" in name or "packing" in name]


def test_the_wheel_installs_a_typed_package_with_its_command(tmp_path: Path) -> None:
    run = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(run, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert "wdstrain/py.typed" in names
    assert not [name for name in names if not name.startswith("wdstrain")]
    site, place = tmp_path / "site", tmp_path / "elsewhere"
    place.mkdir()
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", str(site), str(wheel)]
    subprocess.run(install, check=True, capture_output=True)
    environment = {**os.environ, "PYTHONPATH": str(site)}
    for command in ([sys.executable, "-m", "wdstrain"], [str(site / "bin" / "wdstrain")]):
        done = subprocess.run([*command, "--version"], cwd=place, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout == f"wdstrain {wdstrain.__version__}\n"


# --- the README ------------------------------------------------------------------------------------------------------


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)


@pytest.fixture
def newcomer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what the README speaks of: photos/, a table of them, arrays, and the command on the path."""
    write_class_folder(tmp_path / "photos", {"cat": 40, "dog": 40}, "jpg")
    rows = [f"photos/cat/{i:03d}.jpg,{i / 40}" for i in range(40)]
    (tmp_path / "log.csv").write_text("\n".join(["file,angle", *rows]) + "\n")
    for name, array in (("images", np.zeros((9, 8, 8), np.uint8)), ("labels", np.arange(9) % 3), ("depth", np.zeros((9, 2)))):
        np.save(tmp_path / f"{name}.npy", array)
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["events/x"], file["events/energy"] = np.zeros((9, 4)), np.arange(9) / 8
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_block_of_the_readme_has_a_language_that_is_tested() -> None:
    opened = re.findall(r"^```(\w*)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert set(opened[::2]) <= {"bash", "python", "text"}
    assert set(opened[1::2]) <= {""}


def test_the_commands_of_the_readme_run(newcomer: Path) -> None:
    ours = [block for block in blocks("bash") if "scripts/" not in block]
    assert len(ours) >= 2
    for block in ours:
        assert shutil.which("wdstrain")
        done = subprocess.run(["bash", "-euo", "pipefail", "-c", block], capture_output=True, text=True)
        assert done.returncode == 0, f"{block}\n{done.stderr}"


@pytest.mark.timeout(300)
def test_the_two_commands_of_the_readme_run(tmp_path: Path) -> None:
    """From another folder; the demo in a folder of its own, and the checks without the tests, which are running already.

    The demo learns the digits, says what it did, and what to type next.
    """
    if Path(sys.prefix).resolve() != (ROOT / ".venv").resolve():
        pytest.skip("the tests run in another environment than scripts/test.sh makes")
    (block,) = [block for block in blocks("bash") if "scripts/" in block]
    commands = [line.split("#")[0].split() for line in block.splitlines() if line.strip()]
    assert commands == [["bash", "scripts/demo.sh"], ["bash", "scripts/test.sh"]]
    said = []
    for command, words in zip(commands, (["--dir", str(tmp_path)], ["--version"]), strict=True):
        done = subprocess.run(["bash", str(ROOT / command[1]), *words], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        said.append(done.stdout)
    last = json.loads((tmp_path / "digits-run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["val"]["accuracy"] >= 0.97
    for word in ("1797 (train", "shards", "MB", "samples/s", "stall", "accuracy", "wdstrain convert folder PICTURES"):
        assert word in said[0]
    assert max(len(line) for line in said[0].splitlines() if line.startswith("│")) <= 80


def test_the_python_of_the_readme_runs(newcomer: Path) -> None:
    convert = ["wdstrain", "convert", "folder", "photos", "shards/photos", "--split", "train=0.8,val=0.2"]
    subprocess.run(convert, check=True, capture_output=True)
    (newcomer / "shards" / "digits").symlink_to(newcomer / "shards" / "photos")
    assert blocks("python")
    for block in blocks("python"):
        # a file, not -c: worker processes of some start methods import it
        (newcomer / "block.py").write_text(block)
        done = subprocess.run([sys.executable, "-W", "error", "block.py"], capture_output=True, text=True)
        assert done.returncode == 0, f"{block}\n{done.stderr}"


def test_the_readme_names_every_module() -> None:
    text = (ROOT / "README.md").read_text()
    for name in modules():
        last = name.rpartition(".")[2]
        assert not name or last == "__main__" or re.search(rf"\b{last}\b", text), f"the README does not speak of {name}"
