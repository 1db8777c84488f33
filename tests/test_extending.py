"""Each example of the guide on extensions works, and changes at most three files."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.test_architecture import PACKAGE

GUIDE = ROOT / "docs" / "extending.md"
SECTIONS = {part.split("\n")[0]: part for part in GUIDE.read_text().split("\n## ")[1:]}


def changed(root: Path, block: str) -> Path:
    """Make the change of a block below `root`. Return the file.

    The first line names the file, and the line before or after which the rest of the block goes, or
    that it replaces.
    """
    head, _, text = block.partition("\n")
    match = re.fullmatch(r"# ([\w/.]+)(?:, (before|after|instead of): (.+))?", head)
    assert match, head
    side, line, path = match[2], match[3], root / match[1]
    if side is None:
        assert not path.exists()
        path.write_text(text)
        return path
    lines = path.read_text().splitlines(keepends=True)
    (place,) = [n for n, there in enumerate(lines) if there.strip() == line]
    lines[place + (side == "after") : place + (side != "before")] = [text]
    path.write_text("".join(lines))
    return path


@pytest.mark.parametrize("title", SECTIONS)
def test_an_extension_works_and_changes_at_most_three_files(title: str, tmp_path: Path) -> None:
    shutil.copytree(PACKAGE, tmp_path / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    blocks = re.findall(r"^```(\w+)\n(.*?)^```$", SECTIONS[title], re.DOTALL | re.MULTILINE)
    files = {changed(tmp_path, code) for language, code in blocks if language == "text"}
    assert len(files) <= 3
    (program,) = [code for language, code in blocks if language == "python"]
    (tmp_path / "program.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_guide_has_an_example_for_each_registry() -> None:
    words = ("Image format", "Kind of label", "Source", "Storage scheme", "Shuffle policy")
    assert all(any(title.startswith(word) for title in SECTIONS) for word in words)
