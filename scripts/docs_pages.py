"""Hook of mkdocs: adds the README and the API reference to the guides, in the README's order.

The API reference is made from the docstrings at run time, because some of them are generated from
option classes. They are preformatted text: columns are aligned for `help()`.
"""

from __future__ import annotations

import html
import inspect
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import wdstrain

ROOT = Path(__file__).resolve().parent.parent
_GUIDES = "wdstrain/guides"
_LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List the pages: README, guides in the order in which it links them, API reference."""
    readme = (ROOT / "README.md").read_text()
    guides = dict.fromkeys(re.findall(rf"\({_GUIDES}/([\w-]+\.md)", readme))
    config.nav = [{"Overview": "index.md"}, *guides, {"API reference": "api.md"}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add generated pages and the images of the README."""
    readme = (ROOT / "README.md").read_text()
    files.append(File.generated(config, "index.md", content=_with_site_links(readme, ".")))
    files.append(File.generated(config, "api.md", content="\n\n".join(_reference())))
    for path in sorted((ROOT / "docs").rglob("*.*")):
        name = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


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
        elif not path.startswith("docs/"):
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
