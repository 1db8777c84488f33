"""Tools of `run.py` that kill processes and model the disk after a power cut."""

from __future__ import annotations

import ctypes
import io
import itertools
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from wdstrain.cli import main
from wdstrain.errors import StorageError, WdstrainError

PATIENCE = 300.0  # seconds that any piece of work is given
beside: set[int] = set()  # processes that go on beside all that is tried
SUBREAPER, NEWNS, NEWUSER, RDONLY, REMOUNT, PRIVATE = 36, 1 << 17, 1 << 28, 1, 32, 0x44000
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
AUDITED = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.truncate", "os.utime"}


class WrongOutcome(Exception):
    """Raised for wrong data on a disk or a wrong report."""


class Ended(NamedTuple):
    """How a child ended: "done", "told" (a package error), "wrong" (another), "killed", "hung"."""

    how: str
    value: Any = None
    said: str = ""

    def need(self, *ways: str) -> Ended:
        """Return this outcome, or raise WrongOutcome if it is not one of these."""
        said = self.said.strip()
        if self.how not in ways:
            raise WrongOutcome(f"it was {self.how}, not {' or '.join(ways)}: {said or self.value}")
        if self.how == "told" and (not said or "\n" in said or "Traceback" in said):
            raise WrongOutcome(f"its error is not one sentence: {self.said!r}")
        return self


@dataclass
class Kill:
    """after: seconds until the child is killed; at: file operation at which it kills itself."""

    after: float | None = None
    at: int | None = None
    alone: bool = False


def inside(work: Callable[[], Any], kill: Kill | None = None) -> Ended:
    """Do work in a child process. Raises WrongOutcome if any of its processes is left."""
    receiving, sending = multiprocessing.Pipe(duplex=False)
    child = os.fork()
    if child == 0:
        receiving.close()
        sending.send(outcome_of(work, kill))
        os._exit(0)
    sending.close()
    with receiving:
        if kill is not None and kill.after is not None and not receiving.poll(kill.after):
            kill_all([child] if kill.alone else [child, *descendants(child)])
        answer = Ended("hung", said=f"nothing came for {PATIENCE:.0f} s")
        try:
            if receiving.poll(PATIENCE):
                answer = receiving.recv()
        except (EOFError, OSError):
            answer = Ended("killed")
    if answer.how == "hung":
        kill_all([*descendants(child), child])
    status = os.waitpid(child, 0)[1]
    reap()
    return answer._replace(said=f"status {status}") if answer.how == "killed" else answer


def outcome_of(work: Callable[[], Any], kill: Kill | None) -> Ended:
    heard = io.StringIO()
    try:
        if kill is not None and kill.at is not None:
            kill_at(kill.at)
        with redirect_stdout(io.StringIO()), redirect_stderr(heard):
            return Ended("done", work(), heard.getvalue())
    except WdstrainError as error:
        return Ended("told", None, str(error))
    except BaseException:
        return Ended("wrong", None, traceback.format_exc())


def typed(*words: str) -> str:
    """Run a command and return its output. Raises StorageError with its error line on failure."""
    heard = io.StringIO()
    with redirect_stderr(heard):
        status = main(list(words))
    output = heard.getvalue()
    if status not in (0, 1, 2, 130) or "Traceback" in output:
        raise WrongOutcome(f"exit status {status}: {output}")
    if status:
        _, is_error, text = f"\n{output.strip()}".rpartition("\nerror: ")
        if not is_error:
            raise WrongOutcome(f"exit status {status} without a sentence: {output}")
        raise StorageError(" ".join(text.splitlines()))
    return output


# --- processes ---


def adopt_orphans() -> None:
    """Adopt children of dead children, so that leftover processes are detected."""
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def descendants(pid: int) -> list[int]:
    children = list[int]()
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            children += map(int, (task / "children").read_text().split())
    children = [child for child in children if is_alive(child)]
    return children + [below for child in children for below in descendants(child)]


def kill_all(pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def reap(patience: float = 60.0) -> None:
    """Wait until all processes that a child started have ended. Raises WrongOutcome for others."""
    end = time.monotonic() + patience
    while True:
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass  # an orphan that we adopted
        left = set(descendants(os.getpid())) - beside
        if not left:
            return
        if time.monotonic() > end:
            kill_all(left)
            raise WrongOutcome(f"processes were left behind: {left}")
        time.sleep(0.005)


# --- operations on files ---


def count_operations(report: Callable[[str], object]) -> None:
    """From now on report each changing file operation of this process before it, and each flush.

    A flush is reported once more after it, with the number of its inode.
    """
    owner = os.getpid()

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        is_open = event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITING
        if (is_open or event in AUDITED) and os.getpid() == owner:
            report(event)

    def replace(name: str, real: Callable[..., Any]) -> None:
        def call(*arguments: Any) -> Any:
            is_own = os.getpid() == owner
            if is_own:
                report(name)
            result = real(*arguments)
            if is_own and name == "fsync":
                report(f"{name} {os.fstat(arguments[0]).st_ino}")
            return result

        setattr(os, name, call)

    replace("fsync", os.fsync)
    replace("pwrite", os.pwrite)
    sys.addaudithook(hook)


def kill_at(number: int) -> None:
    """Kill this process before its changing file operation with this number, from 1 on."""
    left = itertools.count(number - 1, -1)

    def kill(_: str) -> None:
        if next(left) == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    count_operations(kill)


def operations(work: Callable[[], Any]) -> int:
    def counted() -> int:
        seen = list[str]()
        count_operations(seen.append)
        work()
        return len(seen)

    return int(inside(counted).need("done").value)


# --- power cuts ---

# (folder number, name) -> number of the file or folder; the root folder is 0
Entries = dict[tuple[int, str], int]


@dataclass
class Recording:
    """States of a folder: before each operation, after each flush, and at the end.

    versions: of a file, (state since which it has these bytes, bytes). flushed: (state, number).
    """

    root: str
    trees: list[Entries] = field(default_factory=list)
    folders: set[int] = field(default_factory=set)
    versions: dict[int, list[tuple[int, bytes]]] = field(default_factory=dict)
    flushed: list[tuple[int, int]] = field(default_factory=list)
    known: dict[int, int] = field(default_factory=dict)  # number by inode
    stamps: dict[int, tuple[int, int, int]] = field(default_factory=dict)

    def content(self, number: int, state: int) -> bytes:
        """Return the bytes of a file in a state; none before its first version."""
        return next((d for since, d in reversed(self.versions[number]) if since <= state), b"")

    def room(self, *states: int) -> int:
        """Return the peak size of the folder in bytes, in pages. states: all if none is given."""
        most = 0
        for state in states or range(len(self.trees)):
            files = set(self.trees[state].values()) - self.folders
            pages = sum(-(-len(self.content(number, state)) // 4096) for number in files)
            most = max(most, 4096 * (len(self.trees[state]) + pages))
        return most

    def look(self, operation: str) -> None:
        """Record the state, in the process that changes it."""
        state, tree, inodes, todo = len(self.trees), Entries(), set[int](), [(0, self.root)]
        for folder, path in todo:
            for entry in os.scandir(path):
                status = entry.stat(follow_symlinks=False)
                inodes.add(status.st_ino)
                if status.st_ino not in self.known:
                    self.known[status.st_ino] = len(self.folders) + len(self.stamps) + 1
                number = tree[folder, entry.name] = self.known[status.st_ino]
                if entry.is_dir(follow_symlinks=False):
                    self.folders.add(number)
                    todo.append((number, entry.path))
                    continue
                stamp = (status.st_mtime_ns, status.st_ctime_ns, status.st_size)
                # The clock of a file system is coarse, so a flush looks again.
                if self.stamps.get(number) != stamp or operation.startswith("fsync"):
                    self.stamps[number], data = stamp, Path(entry.path).read_bytes()
                    versions = self.versions.setdefault(number, [])
                    if not versions or versions[-1][1] != data:
                        versions.append((state, data))
        if operation.startswith("fsync "):
            inode = int(operation.split()[1])
            is_root = inode == os.stat(self.root).st_ino
            self.flushed.append((state, 0 if is_root else self.known.get(inode, -1)))
        self.known = {inode: n for inode, n in self.known.items() if inode in inodes}
        self.trees.append(tree)


def recorded(work: Callable[[], Any], root: Path) -> Recording:
    """Return the changes of a folder during `work`, which writes to it in this process only."""

    def watched() -> Recording:
        recording, lock = Recording(str(root)), threading.Lock()

        def look(operation: str) -> None:
            with lock:
                recording.look(operation)

        look("begin")
        count_operations(look)
        work()
        look("end")
        return recording

    recording: Recording = inside(watched).need("done").value
    return recording


def cut_power(recording: Recording, at: int, bits: random.Random, into: Path) -> None:
    """Write to a new folder what a disk may contain after a power cut in this state."""
    # Directory entries that each operation removed and added
    changes = [
        (dict(before.items() - after.items()), dict(after.items() - before.items()))
        for before, after in itertools.pairwise(recording.trees[: at + 1])
    ]
    touched = [{folder for folder, _ in (*gone, *came)} for gone, came in changes]
    flushed = [(state, number) for state, number in recording.flushed if state <= at]
    share, needed, kept = bits.choice([0.0, 0.1, 0.5, 1.0]), set[int](), list[int]()
    for i in reversed(range(len(changes))):
        is_flushed = any(state > i and number in touched[i] for state, number in flushed)
        # Nothing older in the same folder is left out.
        if is_flushed or bits.random() < share or touched[i] & needed:
            kept.append(i)
            needed |= touched[i]
    tree = dict(recording.trees[0])
    for gone, came in (changes[i] for i in reversed(kept)):
        for place, number in gone.items():
            if tree.get(place) == number:
                del tree[place]
        tree.update(came)
    placed: dict[int, Path] = {}

    def content(number: int) -> bytes:
        """Return possible contents of a file: the flushed bytes, or any part of later writes."""
        safe = max((state for state, other in flushed if other == number), default=0)
        base, now = recording.content(number, safe), recording.content(number, at)
        if base == now:
            return now
        # Flushed bytes that were not written to since survive the power cut.
        new = bytes(b if a == b else 0 for a, b in zip(base, now, strict=False))
        rest = len(now) - len(new)
        half = (new + now[len(new) :])[: len(new) + rest // 2]
        return bits.choice([base, now, new + bytes(rest), half])

    def lay(folder: int, path: Path) -> None:
        path.mkdir(exist_ok=True)
        for (of, name), number in tree.items():
            if of != folder:
                continue
            if number in recording.folders:
                lay(number, path / name)
            elif number in placed:
                os.link(placed[number], path / name)
            else:
                placed[number] = path / name
                placed[number].write_bytes(content(number))

    lay(0, into)


# --- disks ---


def own_mounts() -> None:
    """Let this process mount privately. Call it in a child. Raises OSError without permission."""
    user, group = os.getuid(), os.getgid()
    system("unshare", NEWNS | (NEWUSER if user else 0))
    if user:
        maps = {"setgroups": "deny", "uid_map": f"0 {user} 1", "gid_map": f"0 {group} 1"}
        for name, text in maps.items():
            Path(f"/proc/self/{name}").write_text(text)
    system("mount", b"none", b"/", None, ctypes.c_ulong(PRIVATE), None)  # and all below it


def mount(place: Path, options: str, flags: int = 0) -> None:
    """Mount a small tmpfs, or change its options with REMOUNT."""
    system("mount", b"none", bytes(place), b"tmpfs", ctypes.c_ulong(flags), options.encode())


def may_mount() -> bool:
    def attempt() -> None:
        own_mounts()
        mount(Path("/tmp"), "size=64k")

    return inside(attempt).how == "done"


def system(name: str, *arguments: Any) -> None:
    """Call a function of libc. Raises OSError."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
