"""The documentation site: valid links, and every public name in the API reference."""

from __future__ import annotations

import html
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import wdstrain
from tests.conftest import ROOT


@pytest.mark.slow
def test_the_site_is_built_without_warnings_and_needs_no_other_host(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    site = tmp_path / "site"
    build = [
        sys.executable,
        *["-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir"],
        str(site),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(build, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pages = {path.name: path.read_text() for path in site.glob("*.html")}
    guides = {path.stem + ".html" for path in (ROOT / "docs").glob("*.md")}
    assert {"index.html", "api.html", *guides} <= set(pages)
    assert all(f"]({name})" in (site / "llms.txt").read_text() for name in guides)
    for guide in (ROOT / "docs").glob("*.md"):
        assert guide.read_text() in (site / "llms-full.txt").read_text()
    for name, text in pages.items():
        assert not re.findall(r'(?:src|<link[^>]*href)="https?://[^"]*', text), name
    reference = html.unescape(re.sub(r"<[^>]+>", "", pages["api.html"]))
    for name in wdstrain.__all__:
        docstring = inspect.getdoc(getattr(wdstrain, name))
        assert docstring
        assert docstring in reference, name
        assert f'<h2 id="wt{name.lower()}"' in pages["api.html"]
