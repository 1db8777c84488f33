"""Run each mutant against the tests of its package, in a copy of the tree and a process of its own.

A mutant is killed if a test fails, crashes its process, or hangs for a third of the time limit. At the
end the tests that killed mutants run on an unchanged copy. A test that fails or is slow there has
killed nothing: its mutants count as not judged.

A keeper makes the copy, starts the process of the tests, and ends whatever that process started.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import NamedTuple

from tests.mutants.mutants import TESTS, Mutant

ROOT = Path(__file__).parent.parent.parent
COPIED = ("wdstrain", "tests", "scripts", "docs")  # with the files beside them

HANG = 1 / 3  # share of the limit of a mutant after which a test hangs; others take a few seconds
CALM = 1 / 6  # share that a test may take on the unchanged tree if its hang is to count

KILLED, SURVIVED, UNJUDGED = "killed", "survived", "not judged"

# Runs one call of pytest after the other, up to the first that fails. Status 5: all tests are slow.
PROGRAM = """if True:
    import sys, pytest
    sys.path[:0] = [""]
    for number, test in enumerate(sys.argv[2:]):
        words = ["-o", "addopts=", "-vv", "-x", "-rfE", "--tb=no", "--basetemp", f"../base{number}"]
        words += ["-m", "not slow and not alone", "--strict-markers", "-o", "timeout_method=signal"]
        words += ["--timeout", sys.argv[1], "-p", "no:xdist"]
        status = pytest.main([*words, test])
        if status not in (0, 5):
            sys.exit(int(status))
"""


# The line of a test or file that failed, and its message.
FAILED = r"^(?:FAILED|ERROR) (tests/\S+?(?:::\w+(?:\[.*?\])?)?)(?: - (.*))?$"
# The line of a test that has no result: it ran at the end.
RUNNING = r"^(tests/\S+::\w+(?:\[.*\])?) (?!.*(?:PASSED|SKIPPED|XFAIL|XPASS|FAILED|ERROR))"


class Run(NamedTuple):
    """A run of tests. status: of the process; None: it was ended at the limit. idle: seconds since
    its last output.
    """

    status: int | None
    output: str
    seconds: float
    idle: float


@dataclass(frozen=True)
class Verdict:
    """Result of a mutant. test: the test that failed. how: its message, or the tests that ran."""

    mutant: Mutant
    outcome: str
    how: str
    seconds: float
    test: str = ""
    hung: bool = False


def mutated(source: str, old: str, new: str) -> str:
    """Return the source of a module with one change. Raises ValueError if its place is unclear."""
    if source.count(old) != 1:
        raise ValueError(f"{old!r} occurs {source.count(old)} times, not once")
    return source.replace(old, new)


def copy_tree(tree: Path) -> None:
    """Copy the working tree, with its compiled files."""
    tree.mkdir()
    for path in ROOT.iterdir():
        if path.is_file() and not path.name.startswith("."):
            shutil.copy2(path, tree / path.name)
        elif path.name in COPIED:
            shutil.copytree(path, tree / path.name, ignore=shutil.ignore_patterns(".*", "*.tmp"))


def run_tests(change: Mutant | None, tests: Sequence[str], seconds: float, patience: float) -> Run:
    """Run tests in a copy of the tree with a change, and end all processes that they started.

    seconds: the limit of the run. patience: seconds of a test that hangs.
    """
    # A process whose parent ends becomes a child of this one, so that none escapes.
    if ctypes.CDLL(None, use_errno=True).prctl(36, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
    with tempfile.TemporaryDirectory(prefix="wm-", ignore_cleanup_errors=True) as place:
        folder, tree = Path(place), Path(place, "tree")  # short: sockets lie in it
        copy_tree(tree)
        if change is not None:
            path = tree / "wdstrain" / change.module
            path.write_text(mutated(path.read_text(), change.old, change.new))
            for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
                compiled.unlink()
        for name in ("tmp", "home"):
            (folder / name).mkdir()
        homes = dict.fromkeys(("HOME", "XDG_CACHE_HOME"), str(folder / "home"))
        own = {"PYTHONPATH": str(tree), "TMPDIR": str(folder / "tmp"), "TERM": "dumb", **homes}
        command = [sys.executable, "-c", PROGRAM, str(patience), *tests]
        begun, log = time.monotonic(), folder / "log"
        try:
            with open(log, "wb") as output:
                process = subprocess.Popen(
                    command,
                    cwd=tree,
                    env={**os.environ, **own},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            status: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            kill_descendants()
        idle, elapsed = time.time() - log.stat().st_mtime, time.monotonic() - begun
        return Run(status, log.read_text(errors="replace"), elapsed, idle)


def kill_descendants() -> None:
    """End all descendants: each is adopted when its parent has ended."""
    while pids := list(map(int, Path("/proc/thread-self/children").read_text().split())):
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for pid in pids:
            os.waitpid(pid, 0)


def judge(mutant: Mutant, seconds: float) -> Verdict:
    """Return whether tests see the mutant: its own first, then those of its package."""
    tests = [*dict.fromkeys((*mutant.tests, *TESTS[mutant.package]))]
    try:
        run = run_tests(mutant, tests, seconds, HANG * seconds)
    except (OSError, ValueError) as error:
        return Verdict(mutant, UNJUDGED, str(error), 0)
    failed = re.search(FAILED, run.output, re.MULTILINE)
    if failed:
        message = failed[2] or ""
        return Verdict(mutant, KILLED, message, run.seconds, failed[1], "Timeout (>" in message)
    last = re.findall(RUNNING, run.output, re.MULTILINE)
    if last and (run.status is not None or run.idle > HANG * seconds):
        how = f"ended with status {run.status}" if run.status is not None else "hangs"
        return Verdict(mutant, KILLED, how, run.seconds, last[-1], run.status is None)
    if run.status not in (0, None):
        return Verdict(mutant, UNJUDGED, " ".join(run.output.splitlines()[-1:]), run.seconds)
    limit = "" if run.status == 0 else ", which is the limit"
    return Verdict(mutant, SURVIVED, f"{run.output.count(' PASSED ')} tests{limit}", run.seconds)


def faults(tests: Sequence[str], seconds: float, patience: float) -> dict[str, str]:
    """Return the tests that fail or are slow on an unchanged tree, and how."""
    run = run_tests(None, tests, seconds * len(tests), patience)
    if run.status == 0:
        return {}
    if len(tests) == 1:
        return {tests[0]: " ".join(run.output.splitlines()[-1:])}
    return {name: how for test in tests for name, how in faults([test], seconds, patience).items()}


def judged(mutants: Sequence[Mutant], seconds: float, at_once: int) -> Iterator[Verdict]:
    """Yield the verdict of each mutant. seconds: the limit of each. at_once: that run together."""
    with ProcessPoolExecutor(at_once) as keepers:
        yield from keepers.map(partial(judge, seconds=seconds), mutants)


def confirm(verdicts: Sequence[Verdict], seconds: float, at_once: int) -> list[Verdict]:
    """Return the verdicts, but for kills by tests that fail or hang on an unchanged tree, too."""
    groups = defaultdict[tuple[str, bool], set[str]](set)
    for verdict in verdicts:
        if "::" in verdict.test:  # others could not be imported
            groups[verdict.test.partition("::")[0], verdict.hung].add(verdict.test)
    patience = [seconds * (CALM if hung else HANG) for _, hung in groups]
    with ProcessPoolExecutor(at_once) as keepers:
        found = keepers.map(faults, map(sorted, groups.values()), repeat(seconds), patience)
        bad = {test: how for some in found for test, how in some.items()}
    return [
        replace(
            verdict, outcome=UNJUDGED, how=f"{verdict.test} on an unchanged tree: {how}", test=""
        )
        if (how := bad.get(verdict.test))
        else verdict
        for verdict in verdicts
    ]
