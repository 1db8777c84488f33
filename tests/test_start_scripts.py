"""The README's scripts keep what is not theirs, and check in the environment of a new machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

NOISE = {"PYTHONUNBUFFERED": "1", "PYTHONPATH": "/nowhere", "LANG": "de_DE.UTF-8", "PIP_QUIET": "1"}
NO_SETUP = 'setup() {{ :; }}; fail() {{ exit 9; }}; ROOT="{}"; VENV="$ROOT/.venv"\n'


def stub(path: Path, script: str) -> None:
    """Write an executable shell script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder with the start scripts alone, and programs that only look like those they call."""
    folder = tmp_path / "clone"
    (folder / "scripts").mkdir(parents=True)
    for name in ("setup.sh", "test.sh", "requirements.lock"):
        shutil.copy(ROOT / "scripts" / name, folder / "scripts")
    for name in ("pyproject.toml", "scripts/compile.py", "wdstrain/native/kernels.c"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


def run(
    clone: Path, script: str, *words: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], "HOME": str(clone), **environment}
    command = ["bash", f"scripts/{script}", *words]
    return subprocess.run(command, cwd=clone, env=environment, capture_output=True, text=True)


def test_a_virtual_environment_of_the_user_is_not_deleted(clone: Path) -> None:
    """Its Python differs from the one that the script would use."""
    stub(clone / ".venv" / "bin" / "python", "echo Python 3.9.1")
    done = run(clone, "setup.sh", PYTHON=sys.executable)
    assert done.returncode == 1
    assert "was not created by this script" in done.stderr
    assert (clone / ".venv" / "bin" / "python").exists()


def test_an_environment_of_the_script_itself_is_made_anew_for_another_python(clone: Path) -> None:
    stub(clone / ".venv" / "bin" / "python", "echo Python 3.9.1")
    (clone / ".venv" / "created-by-setup").touch()
    stub(clone / "no-venv", f'[ "$1" = -m ] && exit 1; exec {sys.executable} "$@"')
    done = run(clone, "setup.sh", PYTHON=str(clone / "no-venv"))
    assert "cannot create a virtual environment" in done.stderr
    assert [path.name for path in (clone / ".venv").iterdir()] == ["created-by-setup"]


@pytest.mark.parametrize("ci", ["", "true"])
def test_checks_run_in_a_bare_environment(clone: Path, ci: str) -> None:
    """Ruff, mypy and pytest see HOME, PATH and CI, whatever the caller has set."""
    log = clone / "log"
    stub(clone / ".venv" / "bin" / "python", f"echo run: $* >>{log}; env >>{log}")
    stub(clone / "bin" / "nginx", "exit 1")
    (clone / "scripts" / "setup.sh").write_text(NO_SETUP.format(clone))
    (clone / "scripts" / "check_wheel.sh").touch()
    path = f"{clone}/bin:{os.environ['PATH']}"
    done = run(clone, "test.sh", "tests/x.py", PATH=path, **NOISE, **({"CI": ci} if ci else {}))
    assert done.returncode == 0, done.stderr
    lines = log.read_text().splitlines()
    programs = [line.split()[2] for line in lines if line.startswith("run: ")]
    assert programs == ["ruff", "ruff", "mypy"] + ["pytest"] * (3 if ci else 2)
    names = {line.partition("=")[0] for line in lines if not line.startswith("run: ")}
    added_by_sh = {"PWD", "OLDPWD", "SHLVL", "_"}
    assert names - added_by_sh == ({"HOME", "PATH", "CI"} if ci else {"HOME", "PATH"})


def test_a_missing_optional_program_is_named_with_the_reason(clone: Path) -> None:
    """Without nginx, and without a way to download it, the tests run and a line says so."""
    stub(clone / ".venv" / "bin" / "python", "exit 0")
    (clone / "scripts" / "setup.sh").write_text(NO_SETUP.format(clone))
    for name in ("env", "bash", "dirname", "mkdir", "timeout", "grep", "nproc", "dpkg", "rm"):
        if found := shutil.which(name):
            (clone / "bin").mkdir(exist_ok=True)
            (clone / "bin" / name).symlink_to(found)
    stub(clone / "bin" / "apt-get", "exit 100")
    done = run(clone, "test.sh", "tests/x.py", PATH=str(clone / "bin"))
    assert done.returncode == 0, done.stderr
    assert "Tests with nginx are skipped" in done.stderr
