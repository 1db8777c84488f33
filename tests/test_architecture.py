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
LAYERS = [
    {"errors"},
    {"report", "native"},
    {"memory"},
    {"runtime"},
    {"order"},
    {"storage"},
    {"shards"},
    {"decode"},
    {"reader", "augment"},
    {"loader"},
    {"conversion", "webdataset"},
    {"inspection", "tuning"},
    {"training"},
    {"demo", "serve"},
    {"cli"},
    {"", "__main__"},
]

# Greatest number of statements in a package, docstrings not counted. Numbers only go down: a change
# that needs more makes room elsewhere in its package first.
BUDGETS = {
    "conversion": 3038,
    "training": 2926,
    "inspection": 1272,
    "loader": 1450,
    "shards": 2425,
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
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.split(".")[0] == "wdstrain"
        ):
            base = node.module.removeprefix("wdstrain").lstrip(".")
            below = [f"{base}.{submodule.name}".lstrip(".") for submodule in node.names]
            names |= {submodule if submodule in modules() else base for submodule in below}
        elif isinstance(node, ast.Import):
            names |= {
                submodule.name.removeprefix("wdstrain.")
                for submodule in node.names
                if submodule.name.startswith("wdstrain.")
            }
    return names


def test_a_layer_imports_only_from_layers_below() -> None:
    level = {name: number for number, layer in enumerate(LAYERS) for name in layer}
    for name, path in modules().items():
        layer = name.partition(".")[0]
        for other in imported(path):
            below = other.partition(".")[0]
            if below == layer or (name, other) == ("cli.main", ""):  # it prints the version
                continue
            assert level[below] < level[layer], (
                f"{name} imports {other}, which is not in a layer below"
            )


def test_imports_are_acyclic() -> None:
    version = {("cli.main", "")}
    graph = {
        name: {item for item in imported(path) if (name, item) not in version}
        for name, path in modules().items()
    }
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
    for name, path in modules().items():
        assert ast.get_docstring(tree_of(path)), f"{name} has no docstring"


def test_public_names_are_exactly_the_listed_ones() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    imports = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("wdstrain.")
    ]
    bound = {name.asname or name.name for node in imports for name in node.names} - {"doors"}
    assert bound == set(wdstrain.__all__)
    assert all(callable(getattr(wdstrain, name)) for name in wdstrain.__all__)
    with pytest.raises(AttributeError, match="no attribute 'pack_nothing'"):
        _ = wdstrain.pack_nothing
    assert wdstrain.__all__ == sorted(wdstrain.__all__)
    for name in wdstrain.__all__:
        assert getattr(wdstrain, name).__doc__, f"wt.{name} has no docstring"


def test_the_package_lists_its_public_names_and_no_others() -> None:
    _ = wdstrain.Loader
    assert dir(wdstrain) == wdstrain.__all__
    assert wdstrain.__version__


def test_no_module_has_the_name_of_a_public_function() -> None:
    """`wt.index(...)` must stay a function after any import."""
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
    commands = [
        ["--help"],
        ["index", shards],
        ["info", shards],
        ["verify", shards],
        ["convert", "tars", shards, str(tmp_path / "out")],
    ]
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
    run = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(run, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert "wdstrain/py.typed" in names
    assert not [name for name in names if not name.startswith("wdstrain")]
    assert ("wdstrain/native/libkernels.so" in names) == (kernels.library is not None)
    site, place = tmp_path / "site", tmp_path / "elsewhere"
    place.mkdir()
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--no-index",
        "--target",
        str(site),
        str(wheel),
    ]
    subprocess.run(install, check=True, capture_output=True)
    environment = {**os.environ, "PYTHONPATH": str(site)}
    code = (
        "from wdstrain.native import kernels; print(kernels.library is not None, kernels.__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=place,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert (
        done.stdout
        == f"{kernels.library is not None} {site / 'wdstrain' / 'native' / 'kernels.py'}\n"
    )
    for command in ([sys.executable, "-m", "wdstrain"], [str(site / "bin" / "wdstrain")]):
        done = subprocess.run(
            [*command, "--version"],
            cwd=place,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout == f"wdstrain {wdstrain.__version__}\n"


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
