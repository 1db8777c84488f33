"""Import layers, the list of public names, and the completeness of the installed package."""

from __future__ import annotations

import ast
import functools
import graphlib
import json
import os
import re
import subprocess
import sys
import zipfile
from collections import Counter
from pathlib import Path

import pytest

import wdstrain
from tests.conftest import ROOT, write_shards
from wdstrain.native import kernels

PACKAGE = ROOT / "wdstrain"

# Packages and top-level modules, lowest first; each imports only from itself and from layers below.
LAYERS: list[set[str]] = [
    *({"errors"}, {"report", "native"}, {"memory"}, {"runtime"}, {"order"}, {"storage"}),
    *({"shards"}, {"decode"}, {"reader", "augment"}, {"loader"}, {"conversion", "webdataset"}),
    *({"inspection", "tuning"}, {"training"}, {"demo", "serve"}, {"cli"}, {"", "__main__"}),
]

# Greatest number of statements in a package, docstrings not counted. Numbers only go down: a change
# that needs more makes room elsewhere in its package first.
BUDGETS = {
    "conversion": 3060,
    "training": 2926,
    "inspection": 1272,
    "loader": 1448,
    "shards": 2411,
    "decode": 1499,
    "storage": 1055,
    "reader": 476,
    "cli": 520,
    "runtime": 402,
    "tuning": 219,
    "order": 507,
    "report": 219,
    "augment": 272,
    "webdataset": 324,
    "native": 56,
    "": 288,  # modules at the top, memory.py among them
}


@functools.cache
def modules() -> dict[str, Path]:
    """Return the files of all modules by dotted name below the package; the package is ""."""
    paths = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        paths[".".join(part for part in parts if part != "__init__")] = path
    return paths


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def imported(path: Path) -> set[str]:
    """Return the modules of the package that a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(tree_of(path)):
        listed = node.names if isinstance(node, ast.Import | ast.ImportFrom) else []
        start = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        for name in (start + one.name for one in listed):
            if name.startswith("wdstrain."):
                below = name.removeprefix("wdstrain.")
                names.add(below if below in modules() or not start else below.rpartition(".")[0])
    return names


def test_a_layer_imports_only_from_layers_below_and_without_cycles() -> None:
    level = {name: number for number, layer in enumerate(LAYERS) for name in layer}
    version = ("cli.main", "")  # it prints the version
    graph = {
        name: {other for other in imported(path) if (name, other) != version}
        for name, path in modules().items()
    }
    for name, others in graph.items():
        for other in others:
            layer, below = name.partition(".")[0], other.partition(".")[0]
            is_below = below == layer or level[below] < level[layer]
            assert is_below, f"{name} imports {other}, which is not in a layer below"
    graphlib.TopologicalSorter(graph).prepare()


def statements(tree: ast.Module) -> int:
    """Return the number of statements without docstrings; neither format nor comments change it."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    texts = [node.value for node in nodes if isinstance(node, ast.Expr)]
    return len(nodes) - sum(
        isinstance(text, ast.Constant) and isinstance(text.value, str) for text in texts
    )


def test_no_package_exceeds_its_budget_of_statements() -> None:
    sizes: Counter[str] = Counter()
    for name, path in modules().items():
        in_package = path.parent != PACKAGE
        sizes[name.partition(".")[0] if in_package else ""] += statements(tree_of(path))
    assert sizes.keys() == BUDGETS.keys(), "a package has no budget, or a budget no package"
    assert not {name: count for name, count in sizes.items() if count > BUDGETS[name]}


def test_no_class_of_loading_has_more_than_250_lines() -> None:
    layers = set.union(*LAYERS[: LAYERS.index({"conversion", "webdataset"}) + 1]) - {"conversion"}
    lengths = {
        f"{name}.{node.name}": (node.end_lineno or 0) - node.lineno + 1
        for name, path in modules().items()
        if name.partition(".")[0] in layers
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ClassDef)
    }
    assert {name: length for name, length in lengths.items() if length > 250} == {}


def test_every_module_has_a_docstring() -> None:
    assert [name for name, path in modules().items() if not ast.get_docstring(tree_of(path))] == []


def test_public_names_are_exactly_the_listed_ones() -> None:
    nodes = ast.walk(tree_of(PACKAGE / "__init__.py"))
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    own = [node for node in imports if (node.module or "").startswith("wdstrain.")]
    bound = {name.asname or name.name for node in own for name in node.names} - {"doors"}
    assert bound == set(wdstrain.__all__)
    assert dir(wdstrain) == wdstrain.__all__ == sorted(wdstrain.__all__)
    with pytest.raises(AttributeError, match="no attribute 'pack_nothing'"):
        _ = wdstrain.pack_nothing
    for name in wdstrain.__all__:
        assert callable(getattr(wdstrain, name))
        assert getattr(wdstrain, name).__doc__, f"wt.{name} has no docstring"
    # `wt.index(...)` must stay a function after any import
    assert not set(wdstrain.__all__) & set(modules())


def test_importing_starts_no_thread_and_imports_no_trainer_and_no_webdataset() -> None:
    code = """if True:
        import sys, threading
        import wdstrain as wt
        print(threading.active_count(), *(name for name in sys.modules if "wdstrain." in name))
        wt.Loader, wt.stream
        print("webdataset" in sys.modules)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, last = done.stdout.splitlines()
    assert first.split()[0] == "1"
    assert not re.search(r"training|cli|conversion", first)
    assert last == "False"


@pytest.mark.parametrize("platform", ["win32", "darwin"])
def test_an_import_on_another_system_is_an_error_with_the_next_step(platform: str) -> None:
    code = f"import sys; sys.platform = '{platform}'; import wdstrain"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stderr.splitlines()[-1].endswith("Use WSL 2 or a Linux container.")


def test_commands_without_torch_do_not_import_it(tmp_path: Path) -> None:
    """Each runs in a child that is forked after the import of the command line."""
    shards = str(write_shards(tmp_path / "shards", [20]))
    commands = [["--help"], *([verb, shards] for verb in ("index", "info", "verify"))]
    commands.append(["convert", "tars", shards, str(tmp_path / "out")])
    code = """if True:
        import json, os, sys
        from wdstrain.cli.main import main
        for words in json.loads(sys.argv[1]):
            if os.fork() == 0:
                status = 99
                try:
                    status = main(words)
                except SystemExit as end:
                    status = end.code
                finally:
                    os._exit(98 if "torch" in sys.modules else status or 0)
            print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)  # a child repeats unflushed lines
    """
    run = [sys.executable, "-c", code, json.dumps(commands)]
    done = subprocess.run(run, stdout=subprocess.PIPE, text=True)
    lines = done.stdout.splitlines()
    assert [line for line in lines if re.fullmatch(r"\d+", line)] == ["0"] * 5, done


@pytest.mark.slow
def test_the_wheel_installs_a_typed_package_with_its_command(tmp_path: Path) -> None:
    """The wheel is built from the source archive, so the archive is complete too."""
    site, place = tmp_path / "site", tmp_path / "elsewhere"
    place.mkdir()

    def run(*words: object, **variables: str) -> str:
        command, environment = list(map(str, words)), {**os.environ, **variables}
        done = subprocess.run(
            command, cwd=place, env=environment, stdout=subprocess.PIPE, text=True
        )
        assert done.returncode == 0, command
        return done.stdout

    python = sys.executable
    run(python, "-m", "build", "--no-isolation", "--outdir", tmp_path, ROOT)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    is_compiled = kernels.library is not None
    assert "wdstrain/py.typed" in names
    assert not [name for name in names if not name.startswith("wdstrain")]
    assert ("wdstrain/native/libkernels.so" in names) == is_compiled
    run(python, "-m", "pip", "install", "--no-deps", "--no-index", "--target", site, wheel)
    code = "from wdstrain.native import kernels as k; print(k.library is not None, k.__file__)"
    kernels_py = site / "wdstrain" / "native" / "kernels.py"
    assert run(python, "-c", code, PYTHONPATH=str(site)) == f"{is_compiled} {kernels_py}\n"
    for command in ([python, "-m", "wdstrain"], [site / "bin" / "wdstrain"]):
        printed = run(*command, "--version", PYTHONPATH=str(site))
        assert printed == f"wdstrain {wdstrain.__version__}\n"


PRIVATE = re.compile(r"_[a-z]")
# Private names of the standard library and of named tuples without a public alternative.
ALLOWED = {"_repr_html_", "_repr_mimebundle_", "_replace", "_asdict", "_fields", "_make", "_exit"}
ALLOWED |= {"_shutdown", "_run_exitfuncs", "_clear", "_registry", "_registered_with_atexit"}
ALLOWED |= {"_sleep", "_words", "_current_frames"}
# Each replaces a function of the project to reach a moment or a size that no option reaches.
REPLACING = {"inspection/test_plan.py", "fuzz/targets.py", "fuzz/test_fuzzing.py"}


def test_tests_read_no_private_names() -> None:
    """Tests use the public API, the shell, files, or public names of a module."""
    for path in (ROOT / "tests").rglob("*.py"):
        name = path.relative_to(ROOT / "tests").as_posix()
        if name in REPLACING:
            continue
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Attribute) and PRIVATE.match(node.attr):
                owner = node.value.id if isinstance(node.value, ast.Name) else ""
                assert owner in ("self", "cls", "os") or node.attr in ALLOWED, (
                    f"{name}:{node.lineno} reads {node.attr}"
                )
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("setattr"):
                replaced = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
                private = [str(item) for item in replaced if re.search(r"(^|\.)_[a-z]", str(item))]
                assert not private, f"{name}:{node.lineno} replaces {private[0]}"
