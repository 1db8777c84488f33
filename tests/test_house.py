"""The house stands: imports go down, names are honest, what is installed is whole."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import wdstrain
from tests.conftest import ROOT, write_shards
from wdstrain import compiled

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
        "compiled",
        "printing",
        "machine",
        "cached",
        "formats",
        "packing.collector",
        "looking.picturing",
    },
    {"turbo", "looking.wording", "sending", "console", "memory"},
    {"bulk"},
    {"bodies", "hands"},
    {"http", "objects"},
    {"remote"},
    {"policies", "charts"},
    {"plan", "tar", "storage", "opener", "decode", "augment", "meter", "measured", "inspecting.dimensions"},
    {
        "indexing",
        "verifying.search",
        "arena",
        "pinned",
        "stretches",
        "watching",
        "mixing",
        "packing.options",
        "packing.expression",
        "packing.jobs",
        "fitting",
    },
    {"pictures"},
    {"fields", "cache", "channels", "comparing", "verifying.salvage", "verifying.passage"},
    {"forward", "spread", "labels", "verifying.trial", "inspecting.contents", "inspecting.provenance"},
    {"index_files", "slots", "packing.listing", "packing.kinds", "inspecting.histograms", "verifying.survey"},
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
    {"course"},
    {
        "inspecting.sampling",
        "verifying.census",
        "looking.seeing",
        "looking.picking",
        "processes",
        "reader",
        "tasks",
        "packing.planning",
        "packing.folder",
        "packing.table",
        "packing.samples",
        "packing.arrays",
    },
    {
        "workers",
        "looking.figures",
        "looking.sheets",
        "foresight.itinerary",
        "packing.shard",
        "packing.spill",
        "packing.stage",
        "packing.hdf5",
        "packing.tars",
        "packing.vision",
        "inspecting.doors",
        "verifying.doors",
        "verifying.rescue",
    },
    {"pipeline", "packing.bucket"},
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


def test_commands_that_need_no_torch_do_not_wait_for_it(tmp_path: Path) -> None:
    shards = write_shards(tmp_path / "shards", [20])
    for words in (
        ["--help"],
        ["index", shards],
        ["info", shards],
        ["verify", shards],
        ["convert", "tars", shards, tmp_path / "out"],
    ):
        code = "import sys; from wdstrain.cli.main import main\ntry: main(sys.argv[1:])\nfinally: print('torch' in sys.modules)"
        done = subprocess.run([sys.executable, "-c", code, *map(str, words)], capture_output=True, text=True)
        assert done.stdout.splitlines()[-1] == "False", done


@pytest.mark.slow
def test_the_wheel_installs_a_typed_package_with_its_command_and_guides(tmp_path: Path) -> None:
    """A wheel that is made from the source archive, so that has all of it, too."""
    run = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(run, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert "wdstrain/py.typed" in names
    guides = [path.relative_to(ROOT).as_posix() for path in (PACKAGE / "guides").glob("*.md")]
    assert guides
    assert set(guides) <= set(names)
    assert not [name for name in names if not name.startswith("wdstrain")]
    assert ("wdstrain/libbulk.so" in names) == (compiled.library is not None)
    site, place = tmp_path / "site", tmp_path / "elsewhere"
    place.mkdir()
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", str(site), str(wheel)]
    subprocess.run(install, check=True, capture_output=True)
    environment = {**os.environ, "PYTHONPATH": str(site)}
    code = "from wdstrain import compiled; print(compiled.library is not None, compiled.__file__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=place, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == f"{compiled.library is not None} {site / 'wdstrain' / 'compiled.py'}\n"
    for command in ([sys.executable, "-m", "wdstrain"], [str(site / "bin" / "wdstrain")]):
        done = subprocess.run([*command, "--version"], cwd=place, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout == f"wdstrain {wdstrain.__version__}\n"
