"""Parts that all benchmarks share: the results as text or JSON, their conditions, and turns."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass
class Record:
    """Rows of a table: printed at once, and with --json as one object for `results_page.py`."""

    title: str
    as_json: bool
    quick: bool = False
    columns: Sequence[str] = ("case", "result")
    rows: list[list[str]] = field(default_factory=list)

    def say(self, *cells: str) -> None:
        """Print a row. With --json, stdout is kept for the object."""
        self.rows.append(list(cells))
        print("   ".join(cells), file=sys.stderr if self.as_json else sys.stdout, flush=True)

    def end(
        self, *packages: str, device: str = "", installed: Mapping[str, str] | None = None
    ) -> None:
        """Print the JSON object, if it was asked for.

        packages: those of this environment whose versions matter. installed: versions of others.
        """
        if self.as_json:
            table = {"title": self.title, "columns": list(self.columns), "rows": self.rows}
            about = conditions(*packages, quick=self.quick, device=device)
            about["installed"] |= installed or {}
            script = Path(sys.argv[0]).name
            print(json.dumps({"script": script, "conditions": about, "tables": [table]}, indent=1))


def conditions(*packages: str, quick: bool, device: str = "") -> dict[str, Any]:
    """Return machine, date, commit and versions of a measurement."""
    installed = {}
    for name in packages:
        with suppress(metadata.PackageNotFoundError):
            installed[name] = metadata.version(name)
    processor = platform.machine()
    with suppress(OSError, AttributeError):
        text = Path("/proc/cpuinfo").read_text()
        processor = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)[1]  # type: ignore[index]
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit or "not recorded",
        "machine": ", ".join(filter(None, [processor, f"{CORES} cores", device])),
        "python": platform.python_version(),
        "installed": installed,
        "quick": quick,
    }


def turns(what: str, count: int, minutes: float = 5.0) -> Iterator[int]:
    """Yield turn numbers and print each to stderr; begin no further turn after `minutes`."""
    deadline = time.monotonic() + 60 * minutes
    for number in range(count):
        if number and time.monotonic() > deadline:
            return
        clock = time.strftime("%H:%M:%S")
        print(f"{clock} {what}: turn {number + 1} of {count}", file=sys.stderr, flush=True)
        yield number
