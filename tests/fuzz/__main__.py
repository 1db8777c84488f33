"""Run coverage-guided fuzzing of the code that reads untrusted bytes.

    .venv/bin/python -m tests.fuzz --seconds 60                  (each target in turn)
    .venv/bin/python -m tests.fuzz tar http --seconds 600 --seed 7 --folder runs/fuzzing

Each target of `targets.py` runs under atheris in a process of its own. It starts from the target's
seeds, the cases in `tests/fuzz/cases`, and the inputs that earlier runs left in the folder. Inputs
that break a promise are written to `finds` in the folder, with the command that runs each again.
After a fix the input becomes a case, under a name that describes it. The exit status is 1 if there
are finds. atheris has wheels for Linux on x86-64 only.

`lines` counts the lines of the tested functions that the kept inputs run, of all their lines. Lines
that run once per process, such as loading a library, are not part of a target. `edges` is
libFuzzer's count for the whole package.

`tar` and `written` share a module: each runs lines that the other does not.
"""

from __future__ import annotations

import argparse
import dis
import importlib
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from tests.fuzz.targets import TARGETS, Target

CASES = Path(__file__).parent / "cases"


@dataclass(frozen=True)
class Outcome:
    """Result of fuzzing a target. lines: covered, and all; edges: by libFuzzer; finds: failing
    inputs.
    """

    target: str
    executions: int
    seconds: float
    lines: tuple[int, int]
    edges: int
    finds: list[Path]


def fuzz(target: Target, folder: Path, *, seed: int, limits: Iterable[str]) -> Outcome:
    """Fuzz one target in another process. limits: libFuzzer's flags. Raises RuntimeError if it
    fails.
    """
    corpus, finds = folder / "corpus" / target.name, folder / "finds"
    corpus.mkdir(parents=True, exist_ok=True)
    finds.mkdir(exist_ok=True)
    for number, data in enumerate(inputs_of(target)):
        (corpus / f"given-{number:03d}").write_bytes(data)
    before = set(finds.glob(f"{target.name}-*"))
    begun = time.perf_counter()
    words = [sys.executable, "-m", "tests.fuzz.fuzzer_process", target.name]
    words += [str(corpus), str(finds), str(seed), *limits]
    done = subprocess.run(
        words,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
    )
    executions = re.search(r"stat::number_of_executed_units: (\d+)", done.stderr)
    if executions is None:
        raise RuntimeError(f"the fuzzer of {target.name} did not run:\n{done.stderr[-2000:]}")
    edges = [int(edge_count) for edge_count in re.findall(r"cov: (\d+)", done.stderr)]
    seconds = time.perf_counter() - begun
    new_finds = sorted(set(finds.glob(f"{target.name}-*")) - before)
    covered = lines_covered(target, (path.read_bytes() for path in sorted(corpus.iterdir())))
    return Outcome(
        target.name, int(executions[1]), seconds, covered, max(edges, default=0), new_finds
    )


def inputs_of(target: Target) -> list[bytes]:
    """Return the seeds of a target and the kept cases."""
    return target.seeds() + [path.read_bytes() for path in sorted((CASES / target.name).glob("*"))]


# --- coverage ---


def lines_covered(target: Target, inputs: Iterable[bytes]) -> tuple[int, int]:
    """Return the number of lines of the tested functions that these inputs run, and of all
    lines.
    """
    tested = lines_of(target.code)
    seen: set[tuple[str, int]] = set()

    def enter(frame: FrameType, event: str, value: Any) -> Any:
        return step if frame.f_code.co_filename in files else None

    def step(frame: FrameType, event: str, value: Any) -> Any:
        if event == "line":
            seen.add((frame.f_code.co_filename, frame.f_lineno))
        return step

    files = {file for file, _ in tested}
    before = sys.gettrace()
    for data in inputs:
        sys.settrace(enter)
        try:
            target.run(data)
        except Exception:  # a find, already reported
            pass
        finally:
            sys.settrace(before)
    return len(seen & tested), len(tested)


def lines_of(names: Iterable[str]) -> set[tuple[str, int]]:
    """Return (file, line) of the function bodies in these modules, or in parts named
    "module:part".
    """
    lines_found = set()
    for name in names:
        module, _, part = name.partition(":")
        file = str(importlib.import_module(module).__file__)
        with open(file, encoding="utf-8") as source:
            code = compile(source.read(), file, "exec")
        for path, function in _functions(code, ()):
            if not part or part in path:
                lines = {line for _, line in dis.findlinestarts(function) if line}
                lines_found |= {(file, line) for line in lines - {function.co_firstlineno}}
    return lines_found


def _functions(code: CodeType, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], CodeType]]:
    for co_const in code.co_consts:
        if isinstance(co_const, CodeType):
            if co_const.co_flags & CO_OPTIMIZED:  # not the body of a class, which runs at import
                yield (*path, co_const.co_name), co_const
            yield from _functions(co_const, (*path, co_const.co_name))


# --- the command ---


HEAD = f"{'target':10} {'executions':>11} {'seconds':>8} {'lines':>12} {'':>5} {'edges':>6} {'finds':>6}"


def row(item: Outcome) -> str:
    covered, every = item.lines
    lines, share = f"{covered}/{every}", f"{100 * covered / every:.0f} %"
    return f"{item.target:10} {item.executions:11} {item.seconds:8.0f} {lines:>12} {share:>5} {item.edges:6} {len(item.finds):6}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "targets", nargs="*", metavar="target", help=f"of {', '.join(TARGETS)}; default all"
    )
    parser.add_argument("--seconds", type=int, default=60, help="of each target")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/fuzzing"), help="folder for finds and the corpus"
    )
    arguments = parser.parse_args()
    unknown = [name for name in arguments.targets if name not in TARGETS]
    if unknown:
        parser.error(f"{unknown[0]!r} is no target. They are {', '.join(TARGETS)}.")
    if find_spec("atheris") is None:
        print(
            "atheris is not installed, which has wheels for Linux on x86-64: pip install atheris",
            file=sys.stderr,
        )
        return 2
    print(HEAD)
    outcomes = []
    for name in arguments.targets or TARGETS:
        outcomes.append(
            fuzz(
                TARGETS[name],
                arguments.folder,
                seed=arguments.seed,
                limits=[f"-max_total_time={arguments.seconds}"],
            )
        )
        print(row(outcomes[-1]), flush=True)
    finds = [(outcome.target, path) for outcome in outcomes for path in outcome.finds]
    for target, path in finds:
        print(f"again: {sys.executable} -m tests.fuzz.targets {target} {path}")
    return 1 if finds else 0


if __name__ == "__main__":
    sys.exit(main())
