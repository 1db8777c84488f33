"""Run coverage-guided fuzzing of the code that reads untrusted bytes.

    .venv/bin/python -m tests.fuzz --seconds 60                  (each target in turn)
    .venv/bin/python -m tests.fuzz tar http --seconds 600 --seed 7 --folder runs/fuzzing

Each target of `targets.py` runs under atheris in a process of its own. It starts from the target's
seeds, the cases in `tests/fuzz/cases`, and the inputs that earlier runs left in the folder. Inputs
that break a promise are written to `finds` in the folder, with the command that runs each again.
After a fix the input becomes a case, under a name that describes it. The exit status is 1 if there
are finds. atheris has wheels for Linux on x86-64 only.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from tests.fuzz.targets import TARGETS, Target

CASES = Path(__file__).parent / "cases"


class Outcome(NamedTuple):
    """Result of fuzzing a target. edges: covered, by libFuzzer; finds: failing inputs."""

    executions: int
    edges: int
    finds: list[Path]


def fuzz(target: Target, folder: Path, *, seed: int, limits: Iterable[str]) -> Outcome:
    """Fuzz one target in another process. limits: libFuzzer's flags. Raises RuntimeError if it
    fails.
    """
    corpus, finds = folder / "corpus" / target.name, folder / "finds"
    corpus.mkdir(parents=True, exist_ok=True)
    finds.mkdir(exist_ok=True)
    cases = [path.read_bytes() for path in sorted((CASES / target.name).glob("*"))]
    for number, data in enumerate(target.seeds() + cases):
        (corpus / f"given-{number:03d}").write_bytes(data)
    before = set(finds.glob(f"{target.name}-*"))
    words = [sys.executable, "-m", "tests.fuzz.fuzzer_process", target.name]
    words += [str(corpus), str(finds), str(seed), *limits]
    done = subprocess.run(words, capture_output=True, text=True, errors="replace", check=False)
    executions = re.search(r"stat::number_of_executed_units: (\d+)", done.stderr)
    if executions is None:
        raise RuntimeError(f"the fuzzer of {target.name} did not run:\n{done.stderr[-2000:]}")
    edges = max(map(int, re.findall(r"cov: (\d+)", done.stderr)), default=0)
    new = sorted(set(finds.glob(f"{target.name}-*")) - before)
    return Outcome(int(executions[1]), edges, new)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    names = ", ".join(TARGETS)
    parser.add_argument("targets", nargs="*", metavar="target", help=f"of {names}; default all")
    parser.add_argument("--seconds", type=int, default=60, help="of each target")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path("runs/fuzzing"), help="finds, corpus")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.targets if name not in TARGETS]
    if unknown:
        parser.error(f"{unknown[0]!r} is no target. They are {names}.")
    if find_spec("atheris") is None:
        print("atheris is not installed. Run: pip install atheris", file=sys.stderr)
        return 2
    print(f"{'target':10} {'executions':>11} {'edges':>6} {'finds':>6}")
    again = []
    limits = [f"-max_total_time={arguments.seconds}"]
    for name in arguments.targets or TARGETS:
        result = fuzz(TARGETS[name], arguments.folder, seed=arguments.seed, limits=limits)
        print(
            f"{name:10} {result.executions:11} {result.edges:6} {len(result.finds):6}", flush=True
        )
        again += [f"{sys.executable} -m tests.fuzz.targets {name} {path}" for path in result.finds]
    print(*(f"again: {command}" for command in again), sep="\n")
    return 1 if again else 0


if __name__ == "__main__":
    sys.exit(main())
