"""Write RESULTS.md and the chart of the README from the JSON in results/.

    python scripts/benchmarks/bench_loader.py --json > scripts/benchmarks/results/loader.json
    python scripts/benchmarks/results_page.py

`loader.json` is what `bench_loader.py --json` prints. The other files are what `--json` of the other
benchmarks prints: conditions, and for each table a title, columns and rows. A new run overwrites its file.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from chart import Bar, Panel, chart

HERE = Path(__file__).parent
PAGE, RESULTS = HERE / "RESULTS.md", HERE / "results"
CHART = HERE.parents[1] / "docs" / "images" / "benchmark.svg"
TITLES = {
    "R1": "R1: JPEG 500x375, random resized crop 224 and flip, with label, batch 64",
    "R2": "R2: JPEG 128x128, flip, with label, batch 32",
    "R3": "R3: raw uint8 128x128x3 with a number, batch 32",
    "R4": "R4: bytes of 6 KB with label",
    "R5": "R5: a million samples, until the first batch",
    "R6": "R6: number of workers",
    "R7": "R7: memory",
    "R8": "R8: what must have no influence",
    "R9": "R9: one slow sample among fifty",
    "R10": "R10: R1 in a trainer that is busy for 40 ms with each batch of 64",
    "R11": "R11: whole images of the set, decoded, best of 0, 2, 4 and 8 workers",
}
NAMES = {
    "ImageFolder-tv": "ImageFolder, torchvision decoder",
    "webdataset-tv": "webdataset, torchvision decoder",
    "ours, workers": "wdstrain, worker processes",
    "ours, threads": "wdstrain, threads",
}


def main() -> None:
    PAGE.write_text(page())
    CHART.write_text(chart(_panels(json.loads((RESULTS / "loader.json").read_text())["cases"])))
    print(f"{PAGE}\n{CHART}")


def page() -> str:
    """Return RESULTS.md."""
    loader = json.loads((RESULTS / "loader.json").read_text())
    parts = [
        "# Results",
        "Written by `results_page.py` from `results/*.json`; do not edit. Ratios carry over to other "
        "machines, samples/s do not.",
        "# Loader beside its peers",
        "`bench_loader.py`: whole epochs, images or arrays with their labels, one worker process or "
        "thread per core. " + _conditions(loader["conditions"]),
    ]
    for case, found in sorted(loader["cases"].items(), key=lambda case: int(case[0][1:])):
        parts.append(f"## {TITLES.get(case, case)}")
        parts += [table for table in (_rates(found), _goals(found)) if table]
    for path in sorted(RESULTS.glob("*.json")):
        if path.stem != "loader":
            parts += _tables(json.loads(path.read_text()))
    return "\n\n".join(parts) + "\n"


def _conditions(about: dict[str, Any]) -> str:
    installed = ", ".join(f"{name} {version}" for name, version in about["installed"].items())
    quick = " Quick run." if about["quick"] else ""
    return (
        f"{about['date']}, {about['machine']}, Python {about['python']}, {installed}, "
        f"commit {about['commit']}.{quick}"
    )


def _rates(found: dict[str, Any]) -> str:
    """Return the table of samples per second, the fastest first, and what they cost."""
    turns = {name: rates for name, rates in found.get("turns", {}).items() if rates}
    costs = {"tree_cpu": "CPU s per 1,000 samples", "memory": "peak MB", "wait": "wait p99, ms"}
    titles = [
        "",
        "samples/s, median",
        "lowest",
        "highest",
        *(costs.values() if "costs" in found else ()),
    ]
    rows = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for name in sorted(turns, key=lambda name: -statistics.median(turns[name])):
        rates = turns[name]
        values = [statistics.median(rates)] + ([min(rates), max(rates)] if len(rates) > 1 else [])
        cells = [f"{value:,.0f}" for value in values] + [""] * (3 - len(values))
        if "costs" in found:
            cpu, memory, wait = (statistics.median(found["costs"][name][cost]) for cost in costs)
            cells += [f"{cpu:.4f}", f"{memory / 1e6:.0f}", f"{wait * 1000:.2f}"]
        rows.append(f"| {NAMES.get(name, name)} | " + " | ".join(cells) + " |")
    return "\n".join(rows) if turns else ""


def _goals(found: dict[str, Any]) -> str:
    rows = ["| ratio or value | measured | goal | |", "|---|---|---|---|"]
    for name, goal in found.get("goals", {}).items():
        met = "met" if goal["met"] else "missed"
        rows.append(f"| {name} | {goal['value']:.2f} | {goal['goal']:g} | {met} |")
    return "\n".join(rows) if len(rows) > 2 else ""


def _tables(run: dict[str, Any]) -> list[str]:
    """Return the headings, notes and tables of one file."""
    parts = []
    for table in run["tables"]:
        lines = [table["columns"], ["---"] * len(table["columns"]), *table["rows"]]
        about = f"`{run['script']}`: {_conditions(run['conditions'])}"
        notes = " ".join(filter(None, [about, table.get("notes")]))
        grid = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
        parts += [f"# {table['title']}", notes, grid]
    return parts


def resume_table(run: dict[str, Any]) -> str:
    """Return the table of docs/exact-resume.md: a line for each library, a column for each job."""
    libraries: dict[str, dict[str, str]] = {}
    for name, job, again, never, same in run["tables"][0]["rows"]:
        counts = f"{again} again, {never} lost" if never else again
        libraries.setdefault(name, {})[job] = "exact" if same == "yes" else counts
    jobs = list(next(iter(libraries.values())))
    lines = [["", *jobs], ["---"] * (len(jobs) + 1)]
    lines += [[name, *(cells.get(job, "") for job in jobs)] for name, cells in libraries.items()]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _panels(cases: dict[str, Any]) -> list[Panel]:
    """Return a panel for each case with peers: the better of wdstrain's two, then each library once."""
    panels = []
    for case in ("R1", "R2", "R3"):
        best: dict[str, float] = {}
        for name, rates in cases.get(case, {}).get("turns", {}).items():
            library = "wdstrain" if name.startswith("ours") else name.removesuffix("-tv")
            if rates and not name.startswith(("decode", "readinto")):
                best[library] = max(best.get(library, 0), statistics.median(rates))
        bars = [Bar(name, rate) for name, rate in sorted(best.items(), key=lambda bar: -bar[1])]
        if bars:
            panels.append(Panel(TITLES[case].partition(": ")[2], bars))
    return panels


if __name__ == "__main__":
    main()
