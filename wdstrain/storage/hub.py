"""Data sets on the Hugging Face Hub: addresses hf://datasets/OWNER/NAME[@REV][/PATTERN].

Their files are ordinary HTTPS addresses. The environment variable HF_TOKEN gives access to private
data sets and HF_ENDPOINT names another server.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from urllib.parse import quote, urljoin, urlsplit

from wdstrain.errors import StorageError, UsageError
from wdstrain.storage.http import hub_endpoint, read_page

_ADDRESS = re.compile(
    r"hf://datasets/(?P<name>[\w.-]+/[\w.-]+)(@(?P<revision>[^@/]+|refs/convert/\w+|refs/pr/\d+))?"
    r"(/(?P<pattern>.*))?"
)
_MOST_PAGES = 10_000  # of a listing; a server that always names a next page never ends
_MISSING = (401, 403, 404, 410)  # status codes of a data set that does not exist or is hidden
_MAGIC = frozenset("*?[")


@dataclass(frozen=True)
class HubFiles:
    """Files of a data set at one revision. base: the address that their paths are below."""

    base: str
    paths: list[str]

    def address(self, path: str) -> str:
        """Return the HTTPS address of a file."""
        return f"{self.base}/{quote(path)}"


def is_hub(address: str) -> bool:
    return address.startswith("hf://")


def list_hub_files(address: str) -> HubFiles:
    """Return the files that an address means, sorted: a folder with all below it, a file, a glob.

    Raises UsageError for an address that is not valid or that no file matches, StorageError for a
    data set that does not exist or may not be read.
    """
    parsed = _ADDRESS.fullmatch(address)
    if parsed is None:
        raise UsageError(
            f"{address}: not a valid address of the Hub. Write hf://datasets/OWNER/NAME, "
            f"hf://datasets/OWNER/NAME@REVISION or hf://datasets/OWNER/NAME/data/train-*.tar"
        )
    name, revision = parsed["name"], quote(parsed["revision"] or "main", safe="")
    pattern = (parsed["pattern"] or "").rstrip("/")
    everything = _listed(f"{hub_endpoint()}/api/datasets/{name}/tree/{revision}", address)
    paths = sorted(path for path in everything if _matches(path, pattern))
    if not paths:
        raise UsageError(
            f"{address}: none of the {len(everything)} files of this data set matches. Check the "
            f"path behind OWNER/NAME."
        )
    return HubFiles(f"{hub_endpoint()}/datasets/{name}/resolve/{revision}", paths)


def _matches(path: str, pattern: str) -> bool:
    """Return whether a path is the pattern, below it, or matches it; * does not match a slash."""
    if not pattern or path == pattern or path.startswith(f"{pattern}/"):
        return True
    if _MAGIC.isdisjoint(pattern):
        return False
    parts, patterns = path.split("/"), pattern.split("/")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def _listed(tree: str, address: str) -> list[str]:
    """Return the paths of all files of a data set, page after page."""
    page, paths = f"{tree}?recursive=true", []
    for _ in range(_MOST_PAGES):
        body, following = read_page(page, _MISSING)
        if body is None:
            raise StorageError(
                f"{address}: the Hub has no such data set or revision, or it may not be read. "
                f"Check the name; HF_TOKEN gives access to private data sets."
            )
        try:
            paths += [entry["path"] for entry in json.loads(body) if entry["type"] == "file"]
        except (ValueError, KeyError, TypeError) as error:
            raise StorageError(
                f"{address}: {urlsplit(tree).netloc} did not send a list of files ({error!r}). "
                f"Check HF_ENDPOINT."
            ) from None
        if following is None:
            return paths
        page = urljoin(page, following)
    raise StorageError(f"{address}: its list of files has more than {_MOST_PAGES} pages.")
