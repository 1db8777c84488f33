"""RESULTS.md from what the benchmarks printed with --json.

    python scripts/benchmarks/bench_loader.py --json > loader.json
    python scripts/benchmarks/results_page.py loader.json

Each argument is the JSON of a run. A later run replaces the cases that it measured again.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_name("RESULTS.md")
TITLES = {
    "R1": "R1: JPEG 500x375, random resized crop 224 and flip, with label, batch 64",
    "R2": "R2: JPEG 128x128, flip, with label, batch 32",
    "R3": "R3: raw uint8 128x128x3 with a number, batch 32",
    "R4": "R4: bytes of 6 KB with label",
    "R5": "R5: a million samples, until the first batch",
    "R6": "R6: number of workers",
    "R7": "R7: memory",
    "R8": "R8: what must have no influence",
}


def main() -> None:
    runs = [json.loads(Path(name).read_text()) for name in sys.argv[1:]]
    if not runs:
        sys.exit("usage: results_page.py RUN.json ...")
    latest = {case: (found, run) for run in runs for case, found in run["cases"].items()}
    parts = [
        "# Results",
        "Made by `results_page.py` from the JSON of `bench_loader.py`; do not edit. Whole epochs, "
        "images or arrays with their labels, one worker process or thread per core.",
    ]
    for case in sorted(latest):
        found, run = latest[case]
        parts += [f"## {TITLES.get(case, case)}", _conditions(run["conditions"])]
        parts += [table for table in (_rates(found), _goals(found)) if table]
    PAGE.write_text("\n\n".join(parts) + "\n")
    print(f"{PAGE}: {len(latest)} cases of {len(runs)} runs")


def _conditions(about: dict[str, Any]) -> str:
    installed = ", ".join(f"{name} {version}" for name, version in about["installed"].items())
    quick = ", quick run" if about["quick"] else ""
    return (
        f"{about['date']}, commit {about['commit']}, {about['cores']} cores, "
        f"Python {about['python']}, {installed}{quick}"
    )


def _rates(found: dict[str, Any]) -> str:
    """Return the table of samples per second, the fastest first."""
    turns = {name: rates for name, rates in found.get("turns", {}).items() if rates}
    rows = ["| | samples/s, median | lowest | highest |", "|---|---|---|---|"]
    for name in sorted(turns, key=lambda name: -statistics.median(turns[name])):
        rates = turns[name]
        values = (statistics.median(rates), min(rates), max(rates))
        rows.append(f"| {name} | " + " | ".join(f"{value:,.0f}" for value in values) + " |")
    return "\n".join(rows) if turns else ""


def _goals(found: dict[str, Any]) -> str:
    rows = ["| ratio or value | measured | goal | |", "|---|---|---|---|"]
    for name, goal in found.get("goals", {}).items():
        met = "met" if goal["met"] else "missed"
        rows.append(f"| {name} | {goal['value']:.2f} | {goal['goal']:g} | {met} |")
    return "\n".join(rows) if len(rows) > 2 else ""


if __name__ == "__main__":
    main()
