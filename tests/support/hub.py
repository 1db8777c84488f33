"""A server with the HTTP layout of the Hugging Face Hub, whose files are on a second server."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

from tests.support.servers import Served, serving

TOKEN = "hf_secret"
_PAGE = 2  # entries of a page of a list


@dataclass
class Hub:
    """A running Hub. files: the server of its files. requests: requested paths."""

    url: str
    files: Served
    requests: list[str] = field(default_factory=list)


@contextmanager
def serving_hub(root: Path, name: str, revision: str = "main") -> Iterator[Hub]:
    """Serve the files below `root` as the private data set `name` at one revision."""
    with serving(root) as files:
        hub = Hub("", files)
        tree = f"/api/datasets/{name}/tree/{revision}"
        resolve = f"/datasets/{name}/resolve/{revision}/"

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                parts = urlsplit(self.path)
                hub.requests.append(parts.path)
                if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                    self.answer(401, b"{}")
                elif parts.path == tree:
                    self.answer_list(int(parse_qs(parts.query).get("cursor", ["0"])[0]))
                elif parts.path.startswith(resolve):
                    location = f"{files.url}/{unquote(parts.path.removeprefix(resolve))}"
                    self.answer(302, b"", Location=location)
                else:
                    self.answer(404, b"{}")

            def answer_list(self, first: int) -> None:
                paths = sorted(root.rglob("*"))
                rows = [
                    {
                        "type": "directory" if path.is_dir() else "file",
                        "path": path.relative_to(root).as_posix(),
                    }
                    for path in paths[first : first + _PAGE]
                ]
                following = first + _PAGE
                link = f'<{hub.url}{tree}?recursive=true&cursor={following}>; rel="next"'
                headers = {"Link": link} if following < len(paths) else {}
                self.answer(200, json.dumps(rows).encode(), **headers)

            def answer(self, status: int, body: bytes, **headers: str) -> None:
                self.send_response(status)
                for header, value in {**headers, "Content-Length": str(len(body))}.items():
                    self.send_header(header, value)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            server.server_close()
            thread.join()
