"""The notebook of scripts/ in a real kernel, and what people do in notebooks: interrupt, run again, redefine, use lambdas."""

from __future__ import annotations

import re

from tests.conftest import ROOT

NOTEBOOK = ROOT / "scripts" / "notebook.py"


def cells() -> list[tuple[str, bool]]:
    """(text, whether it is code) of the cells of the notebook."""
    parts = re.split(r"^# %%(.*)\n", NOTEBOOK.read_text(), flags=re.MULTILINE)
    assert not parts[0].strip()
    return [(text.strip("\n"), "[markdown]" not in mark) for mark, text in zip(parts[1::2], parts[2::2], strict=True)]
