"""The public names with their docstrings, as a page.

    .venv/bin/python scripts/api_page.py api        (writes api/wdstrain.html, which needs no network)

Of the package only what `wdstrain.__all__` lists is shown. Docstrings are shown as they are written, columns and all, by a
monospaced font: they are made to be read in an editor and by `help()`, and Markdown would run their columns together.
"""

from __future__ import annotations

import argparse
import html
import sys
from pathlib import Path

import pdoc.doc
import pdoc.render

import wdstrain

# as wide as docstrings are; attributes are explained in the docstring of their class, so they get no line of their own
_STYLE = """
<style>
main.pdoc { width: auto; max-width: none; } .pdoc pre { font-size: 12px; line-height: 1.4; white-space: pre-wrap; max-width: 136ch; }
.classattr:not(:has(.docstring)):has(> .variable), nav .memberlist .memberlist li:has(> .variable) { display: none; }
</style>
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Render the public names with their docstrings as a page."
    )
    parser.add_argument("out", type=Path, help="folder for the page")
    out: Path = parser.parse_args().out
    for name in wdstrain.__all__:
        setattr(
            wdstrain, name, getattr(wdstrain, name)
        )  # also those that are imported when they are first used
    pdoc.render.configure(
        show_source=False, search=False, footer_text=f"wdstrain {wdstrain.__version__}"
    )
    pdoc.render.env.filters["to_markdown"] = lambda text: text
    pdoc.render.env.filters["to_html"] = lambda text: f"<pre>{html.escape(text)}</pre>"
    module = pdoc.doc.Module(wdstrain)
    text = pdoc.render.html_module(module, {module.modulename: module})
    out.mkdir(parents=True, exist_ok=True)
    page = out / "wdstrain.html"
    page.write_text(text.replace("</head>", f"{_STYLE}</head>", 1), encoding="utf-8")
    print(f"{len(wdstrain.__all__)} names: {page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
