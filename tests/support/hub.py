"""A server with the HTTP layout of the Hugging Face Hub, whose files are on a second server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

from tests.support.servers import Handler, Served, serving

TOKEN = "hf_secret"
PAGE = 2  # entries of a page of a list


@dataclass
class Hub:
    """A running Hub. files: the server of its files. requests: requested paths."""

    url: str
    files: Served
    requests: list[str] = field(default_factory=list)


@contextmanager
def serving_hub(root: Path, name: str, revision: str = "main") -> Iterator[Hub]:
    """Serve the files below `root` as the private data set `name` at one revision."""
    tree = f"/api/datasets/{name}/tree/{revision}"
    resolve = f"/datasets/{name}/resolve/{revision}/"

    class HubHandler(Handler):
        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            hub.requests.append(parts.path)
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                self.answer(401, b"{}", {})
            elif parts.path == tree:
                self.answer_list(int(parse_qs(parts.query).get("cursor", ["0"])[0]))
            elif parts.path.startswith(resolve):
                location = f"{files.url}/{unquote(parts.path.removeprefix(resolve))}"
                self.answer(302, b"", {"Location": location})
            else:
                self.answer(404, b"{}", {})

        def answer_list(self, first: int) -> None:
            paths, following = sorted(root.rglob("*")), first + PAGE
            kinds = {True: "directory", False: "file"}
            rows = [
                {"type": kinds[path.is_dir()], "path": path.relative_to(root).as_posix()}
                for path in paths[first:following]
            ]
            link = f'<{hub.url}{tree}?recursive=true&cursor={following}>; rel="next"'
            headers = {"Link": link} if following < len(paths) else {}
            self.answer(200, json.dumps(rows).encode(), headers)

    with serving(root) as files, serving(root, handled_by=HubHandler) as served:
        yield (hub := Hub(served.url, files))
