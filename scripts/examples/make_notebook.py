"""Run notebook.py as a notebook and write notebook.ipynb with its outputs.

    .venv/bin/python scripts/examples/make_notebook.py      (about a minute)

notebook.py is the source: a script whose cells begin with `# %%`. The cell that installs the
package is not run. Tests compare the cells of both files.
"""

from __future__ import annotations

import base64
import io
import re
import tempfile
from pathlib import Path
from typing import Any

import nbclient
import nbformat
from PIL import Image

SOURCE = Path(__file__).with_name("notebook.py")
NOTEBOOK = SOURCE.with_suffix(".ipynb")
_INSTALL = "%pip install"


def cells(source: str) -> list[tuple[str, str]]:
    """Return (type, text) of each cell of a script; type: "markdown" or "code"."""
    parts = re.split(r"^# %%(.*)\n", source, flags=re.MULTILINE)
    found = []
    for mark, text in zip(parts[1::2], parts[2::2], strict=True):
        kind = "markdown" if "[markdown]" in mark else "code"
        text = text.strip("\n")
        if kind == "markdown" or text.startswith(f"# {_INSTALL}"):
            text = re.sub(r"^# ?", "", text, flags=re.MULTILINE)
        found.append((kind, text))
    return found


def _reduce(data: dict[str, str]) -> None:
    """Replace a picture by one of 64 colors, a third of its size: the notebook is kept in git."""
    if "image/png" in data:
        buffer = io.BytesIO()
        with Image.open(io.BytesIO(base64.b64decode(data["image/png"]))) as picture:
            picture.convert("RGB").quantize(64).save(buffer, "PNG", optimize=True)
        data["image/png"] = base64.b64encode(buffer.getvalue()).decode()


def main() -> None:
    metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    notebook: Any = nbformat.v4.new_notebook(metadata=metadata)  # type: ignore[no-untyped-call]
    with tempfile.TemporaryDirectory() as home:
        client = nbclient.NotebookClient(
            notebook,
            kernel_name="python3",
            timeout=600,
            record_timing=False,
            resources={"metadata": {"path": home}},
        )
        with client.setup_kernel():
            for number, (kind, text) in enumerate(cells(SOURCE.read_text())):
                new: Any = getattr(nbformat.v4, f"new_{kind}_cell")
                notebook.cells.append(new(text, id=f"cell-{number:02d}"))
                if kind == "code" and not text.startswith(_INSTALL):
                    client.execute_cell(notebook.cells[-1], number)
                    for output in notebook.cells[-1].outputs:
                        _reduce(output.get("data", {}))
    notebook.metadata = metadata
    nbformat.write(notebook, NOTEBOOK)  # type: ignore[no-untyped-call]
    print(f"{NOTEBOOK}: {len(notebook.cells)} cells, {NOTEBOOK.stat().st_size / 1e3:.0f} KB")


if __name__ == "__main__":
    main()
