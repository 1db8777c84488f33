"""Hook of mkdocs: adds the README and the API reference to the guides, in the README's order.

Programs that read documentation get `llms.txt`, a list of the pages, and `llms-full.txt`, which has
the text of all pages.

The API reference is made from the docstrings at run time, because some of them are generated from
option classes. They are preformatted text: columns are aligned for `help()`.
"""

from __future__ import annotations

import html
import inspect
import posixpath
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import wdstrain

ROOT = Path(__file__).resolve().parent.parent
_GUIDES = "docs"
_LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List the pages: README, guides in the order in which it links them, API reference."""
    readme = (ROOT / "README.md").read_text()
    config.nav = [{"Overview": "index.md"}, *_guides(readme), {"API reference": "api.md"}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are generated, and the texts for programs."""
    readme, api = (ROOT / "README.md").read_text(), "\n\n".join(_reference())
    overview = _with_site_links(readme, ".").replace('"docs/', '"')  # pictures in HTML
    guides = {name: (ROOT / _GUIDES / name).read_text() for name in _guides(readme)}
    pages = {"index.md": overview, **guides, "api.md": api}
    generated = {
        "index.md": overview,
        "api.md": api,
        "llms.txt": _list_of(pages),
        "llms-full.txt": "\n\n".join(html.unescape(text) for text in pages.values()),
    }
    for name, text in generated.items():
        files.append(File.generated(config, name, content=text))
    return files


def _guides(readme: str) -> list[str]:
    """Return the file names of the guides in the order in which the README links them."""
    return list(dict.fromkeys(re.findall(rf"\({_GUIDES}/([\w-]+\.md)", readme)))


def _list_of(pages: Mapping[str, str]) -> str:
    """Return a line for each page: title, link, and its first sentence."""
    lines = [
        "# wdstrain",
        "",
        "> Train PyTorch models from WebDataset tar shards.",
        "",
        "## Pages",
        "",
    ]
    for name, text in pages.items():
        title, _, body = text.removeprefix("# ").partition("\n")
        paragraph = body.strip().partition("\n\n")[0]
        sentence = re.split(r"(?<=[.:])\s", paragraph, maxsplit=1)[0]
        lines.append(f"- [{title}]({name.replace('.md', '.html')}): {' '.join(sentence.split())}")
    return "\n".join(lines) + "\n"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return a page with links of the site."""
    is_guide = (ROOT / _GUIDES / page.file.src_path).exists()
    return _with_site_links(markdown, _GUIDES) if is_guide else markdown


def _with_site_links(markdown: str, folder: str) -> str:
    """Return a text of a folder of the repository with links of the site.

    Links to files that are not part of the site become their text.
    """

    def replace(match: re.Match[str]) -> str:
        text, target = match.groups()
        path, _, anchor = target.partition("#")
        if "://" in target or not path:
            return match[0]
        path = posixpath.normpath(posixpath.join(folder, path))
        if path == "README.md":
            path = "index.md"
        elif path.startswith(f"{_GUIDES}/"):
            path = path.removeprefix(f"{_GUIDES}/")
        else:
            return text
        return f"[{text}]({path}{'#' if anchor else ''}{anchor})"

    return _LINK.sub(replace, markdown)


def _reference() -> Iterator[str]:
    """Yield the parts of the API reference: every public name and its methods."""
    yield "# API reference\n\n`import wdstrain as wt`"
    for name in wdstrain.__all__:
        value = getattr(wdstrain, name)
        yield f"## wt.{name}"
        yield from _entry(name, value)
        for member, method in sorted(vars(value).items()) if inspect.isclass(value) else ():
            if member.startswith("_") or not inspect.getdoc(method):
                continue
            if isinstance(method, property) or inspect.isroutine(method):
                yield f"### {name}.{member}"
                yield from _entry(member, getattr(value, member))


def _entry(name: str, value: Any) -> Iterator[str]:
    """Yield signature and docstring."""
    if callable(value) and not (inspect.isclass(value) and issubclass(value, Exception)):
        parameters = inspect.signature(value).parameters.values()
        shown = [str(part.replace(annotation=part.empty)) for part in parameters]
        call = f"{name}({', '.join(shown)})"
        if len(call) > 88:
            call = f"{name}(\n    " + ",\n    ".join(shown) + ",\n)"
        yield f"```python\n{call}\n```"
    yield f"<pre>{html.escape(inspect.getdoc(value) or '')}</pre>"
