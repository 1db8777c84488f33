"""Run each mutant against the tests of its package, in a copy of the tree and processes of its own.

The command imports the large dependencies once and forks one keeper for each mutant. A keeper makes
the copy, forks the process of the tests, waits for its end, and kills everything that it left.
Neither the package nor its tests are imported before that fork, so that the copy is what runs.

A mutant is killed if a test fails, crashes its process, or hangs for a third of the time limit. At the
end the tests that killed mutants run on an unchanged copy. A test that fails or is slow there has
killed nothing: its mutants count as not judged.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
import types
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tests.mutants.mutants import TESTS, Mutant

ROOT = Path(__file__).parent.parent.parent
COPIED = ("wdstrain", "tests", "scripts", "docs")  # with the files beside them
IGNORED = shutil.ignore_patterns(".*", "*.tmp")

HANG = 1 / 3  # share of the limit of a mutant after which a test hangs; others take a few seconds
CALM = 1 / 6  # share that a test may take on the unchanged tree if its hang is to count
WARM = (  # imported once; the package imports most of them
    "numpy",
    "torch",
    "torch.utils.data",
    "torch.utils.tensorboard",
    "torchvision",
    "torchmetrics",
    "pyarrow.parquet",
    "PIL.Image",
    "simplejpeg",
    "urllib3",
    "rich.progress",
    "yaml",
    "webdataset",
    "h5py",
    "pandas",
    "sklearn.metrics",
    "xml.etree.ElementTree",
)

KILLED, SURVIVED, UNJUDGED = "killed", "survived", "not judged"


@dataclass(frozen=True)
class Job:
    """One run of pytest in a copy of the tree.

    name: of the mutant. change: module, old text and new text, or None for an unchanged copy.
    tests: arguments of pytest, one call after the other. seconds: limit of the run. patience: seconds
    of a test that hangs. at_first: stop at the first failure.
    """

    name: str
    change: tuple[str, str, str] | None
    tests: Sequence[Sequence[str]]
    seconds: float
    patience: float
    at_first: bool = True


@dataclass(frozen=True)
class Run:
    """What one job did. ended: all tests ran. seconds: of its tests by name."""

    job: Job
    failed: dict[str, str] = field(default_factory=dict)  # message by test or file
    seconds: dict[str, float] = field(default_factory=dict)
    last: str = ""  # the test that ran at the end, if the process did not end by itself
    idle: float = 0  # seconds since that test started
    status: int | None = None  # of the process of the tests; None: it was ended at the limit
    elapsed: float = 0
    problem: str = ""  # of the tool itself


@dataclass(frozen=True)
class Verdict:
    """Result of a mutant. test: the test that failed. how: its message, or the tests that ran."""

    mutant: Mutant
    outcome: str
    how: str
    seconds: float
    test: str = ""
    hung: bool = False


class Recorder:
    """Plugin of pytest that writes starts, ends and failures to a file, one JSON list per line."""

    def __init__(self, path: Path) -> None:
        self.file = open(path, "a", buffering=1)  # noqa: SIM115  open until the process ends

    def write(self, *words: Any) -> None:
        """Write one line, at once: the process may be killed at any moment."""
        self.file.write(json.dumps([time.monotonic(), *words]) + "\n")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.write("start", nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.write("end", nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.write("failed", report.nodeid, first_line(report))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.write("failed", report.nodeid, "cannot be collected: " + first_line(report))


def first_line(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Return the first line of what a failed test says."""
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = str(crash.message if crash else report.longrepr).strip().splitlines() or [""]
    return lines[0] if crash else lines[-1]


# --- one copy of the tree ---


def copy_tree(folder: Path, change: tuple[str, str, str] | None) -> Path:
    """Return a copy of the working tree with one change. Compiled files are kept where valid."""
    tree = folder / "tree"
    tree.mkdir()
    for path in ROOT.iterdir():
        if path.is_file() and not path.name.startswith("."):
            shutil.copy2(path, tree / path.name)
        elif path.name in COPIED:
            shutil.copytree(path, tree / path.name, ignore=IGNORED)
    if change is not None:
        module, old, new = change
        path = tree / "wdstrain" / module
        path.write_text(mutated(path.read_text(), old, new))
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink()
    return tree


def mutated(source: str, old: str, new: str) -> str:
    """Return the source of a module with one change. Raises ValueError if its place is unclear."""
    if source.count(old) != 1:
        raise ValueError(f"{old!r} occurs {source.count(old)} times, not once")
    return source.replace(old, new)


# --- the process of the tests ---


def run_tests(job: Job, folder: Path, tree: Path) -> int:
    """Run pytest here, in a process made for it. Return 1 if a test failed."""
    for name in ("tmp", "home"):
        (folder / name).mkdir()
    os.chdir(tree)
    here = str(tree)
    sys.path[:] = [here, *(path for path in sys.path if path not in ("", here, str(ROOT)))]
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "wdstrain")]:
        del sys.modules[name]
    sys.modules["__main__"] = types.ModuleType("__main__")  # this one is not for worker processes
    sys.argv = ["pytest"]
    tempfile.tempdir = None
    os.environ.update(
        PYTHONPATH=here,
        TMPDIR=str(folder / "tmp"),
        HOME=str(folder / "home"),
        XDG_CACHE_HOME=str(folder / "home"),
        TERM="dumb",
    )
    recorder = Recorder(folder / "record")
    words = [
        *("-q", "--timeout", str(job.patience), "-o", "timeout_method=signal"),
        *("-m", "not slow and not alone", "--tb=short", "--rootdir", here),
        *("-o", f"cache_dir={folder / 'cache'}"),
        *(["-x"] if job.at_first else []),
        # A plugin of pytest may belong to a dependency that the keeper has imported already.
        *("-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning"),
    ]
    for number, tests in enumerate(job.tests):
        basetemp = ["--basetemp", str(folder / f"base{number}")]
        status = int(pytest.main([*words, *basetemp, *tests], plugins=[recorder]))
        if status in (3, 4):
            recorder.write("failed", tests[0], f"pytest cannot run: exit status {status}")
        if status not in (0, 5) and job.at_first:  # 5: all its tests are slow
            return 1
    return 0


def start_tests(job: Job, folder: Path, tree: Path) -> int:
    """Start the process of the tests in a session of its own, and return its number."""
    pid = os.fork()
    if pid:
        return pid
    status = 99
    try:
        die_with_parent()
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        null, log = (
            os.open(os.devnull, os.O_RDONLY),
            os.open(folder / "log", os.O_CREAT | os.O_WRONLY),
        )
        for source, target in ((null, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        os.close(null)
        os.close(log)
        status = run_tests(job, folder, tree)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # not through the exits of the parent


# --- the keeper ---


def keep(job: Job, folder: Path) -> Run:
    """Run one job in a child process, and end all processes that it started."""
    started = time.monotonic()
    status: int | None = None
    pid = 0
    try:
        tree = copy_tree(folder, job.change)
        started = time.monotonic()
        pid = start_tests(job, folder, tree)
        while time.monotonic() < started + job.seconds:
            ended, code = os.waitpid(pid, os.WNOHANG)
            if ended:
                status = os.waitstatus_to_exitcode(code)
                break
            time.sleep(0.02)
    finally:
        kill_descendants()
    return read_record(job, folder, status, time.monotonic() - started)


def read_record(job: Job, folder: Path, status: int | None, elapsed: float) -> Run:
    """Return what the plugin wrote."""
    failed: dict[str, str] = {}
    starts: dict[str, float] = {}
    seconds: dict[str, float] = {}
    last = ""
    record = folder / "record"
    for line in record.read_text().splitlines() if record.exists() else []:
        moment, word, test, *message = json.loads(line)
        if word == "start":
            starts[test], last = moment, test
        elif word == "end":
            seconds[test], last = moment - starts[test], ""
        else:
            failed.setdefault(test, message[0])
    idle = time.monotonic() - starts[last] if last else 0
    problem = ""
    if status == 99 and not failed:
        problem = " ".join((folder / "log").read_text().splitlines()[-1:]) or "no test ran"
    return Run(job, failed, seconds, last, idle, status, elapsed, problem)


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process."""
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def die_with_parent() -> None:
    """Let the kernel end this process when its parent ends."""
    prctl(1, signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of descendants whose parents end, so that none escapes."""
    prctl(36, 1)


def children() -> list[int]:
    """Return the child processes of this process."""
    return [int(word) for word in Path("/proc/thread-self/children").read_text().split()]


def kill_descendants() -> None:
    """End all descendants: each is adopted when its parent has ended."""
    while pids := children():
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for pid in pids:
            os.waitpid(pid, 0)


# --- all jobs ---


def warm_up() -> None:
    """Import what the package and its tests import, so that each child has it."""
    for name in WARM:
        try:
            importlib.import_module(name)
        except ImportError:
            print(f"{name} is not installed: tests that need it are skipped", file=sys.stderr)


def run_jobs(jobs: Sequence[Job], at_once: int) -> Iterator[Run]:
    """Yield the result of each job, as soon as it has one. at_once: keepers that run together."""
    waiting, running = list(reversed(jobs)), dict[int, tuple[Job, Path]]()
    with tempfile.TemporaryDirectory(prefix="wm-", ignore_cleanup_errors=True) as place:
        try:
            while waiting or running:
                while waiting and len(running) < at_once:
                    job = waiting.pop()
                    folder = Path(place) / str(len(jobs) - len(waiting))  # short: sockets lie in it
                    folder.mkdir()
                    running[start_keeper(job, folder)] = job, folder
                pid, _ = os.wait()
                job, folder = running.pop(pid)
                yield read_result(job, folder)
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            for pid in running:
                os.kill(pid, signal.SIGTERM)
            for pid in running:
                os.waitpid(pid, 0)


def start_keeper(job: Job, folder: Path) -> int:
    """Start a keeper and return its number. It writes its result to a file."""
    pid = os.fork()
    if pid:
        return pid
    try:
        prctl(1, signal.SIGTERM)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        adopt_orphans()
        run = keep(job, folder)
        words = {name: value for name, value in vars(run).items() if name != "job"}
        (folder / "result").write_text(json.dumps(words))
    except Exception as error:
        (folder / "result").write_text(json.dumps({"problem": f"{type(error).__name__}: {error}"}))
    finally:
        os._exit(0)


def read_result(job: Job, folder: Path) -> Run:
    """Return the result that a keeper wrote."""
    path = folder / "result"
    words = json.loads(path.read_text()) if path.exists() else {"problem": "its keeper was killed"}
    return Run(job=job, **words)


# --- verdicts ---


def job_of(mutant: Mutant, seconds: float) -> Job:
    """Return the run of a mutant: its own tests first, then those of its package."""
    tests = dict.fromkeys((*mutant.tests, *TESTS[mutant.package]))
    change = (mutant.module, mutant.old, mutant.new)
    return Job(mutant.name, change, [(test,) for test in tests], seconds, HANG * seconds)


def judge(mutant: Mutant, run: Run) -> Verdict:
    """Return whether the tests of a run see the mutant; kills are still to be confirmed."""
    if run.problem:
        return Verdict(mutant, UNJUDGED, run.problem, run.elapsed)
    if run.failed:
        test, message = next(iter(run.failed.items()))
        hung = "Timeout (>" in message
        return Verdict(mutant, KILLED, message, run.elapsed, test, hung)
    if run.status is None and run.idle > run.job.patience:
        return Verdict(mutant, KILLED, "hangs", run.elapsed, run.last, hung=True)
    if run.status is None or run.status == 0:
        limit = "" if run.status == 0 else ", which is the limit"
        return Verdict(mutant, SURVIVED, f"{len(run.seconds)} tests{limit}", run.elapsed)
    how = f"the process ended with status {run.status}"
    return Verdict(mutant, KILLED if run.last else UNJUDGED, how, run.elapsed, run.last)


def confirm(verdicts: Sequence[Verdict], seconds: float, at_once: int) -> list[Verdict]:
    """Return the verdicts, but for kills by tests that fail or hang on an unchanged tree, too.

    seconds: the limit of each mutant.
    """
    files = defaultdict[str, set[str]](set)
    for verdict in verdicts:
        if verdict.test:
            files[verdict.test.partition("::")[0]].add(verdict.test)
    jobs = [
        Job(file, None, [sorted(tests)], seconds * (1 + CALM * len(tests)), HANG * seconds, False)
        for file, tests in files.items()
    ]
    runs = {run.job.name: run for run in run_jobs(jobs, at_once)}
    return [
        confirmed(verdict, runs[verdict.test.partition("::")[0]], CALM * seconds)
        if verdict.test
        else verdict
        for verdict in verdicts
    ]


def confirmed(verdict: Verdict, run: Run, calm: float) -> Verdict:
    """Return a verdict as the run of its test on an unchanged tree leaves it.

    calm: most seconds of the test there, if its hang is to count.
    """
    test, failed = verdict.test, [*run.failed.values(), run.problem]
    if "::" not in test and run.seconds and not failed[:-1]:  # its tests could not be imported
        return verdict
    if test in run.seconds and test not in run.failed:
        if not verdict.hung or run.seconds[test] <= calm:
            return verdict
        failed = [f"takes {run.seconds[test]:.0f} s"]
    how = f"{test} on an unchanged tree: {failed[0] or 'did not run'}"
    return replace(verdict, outcome=UNJUDGED, how=how, test="")
