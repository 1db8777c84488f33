"""Tools of `run.py` that kill processes and model the disk after a power cut."""

from __future__ import annotations

import ctypes
import io
import os
import pickle
import random
import select
import signal
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from wdstrain.cli import main
from wdstrain.errors import StorageError, WdstrainError

PATIENCE = 300.0  # seconds that any piece of work is given
beside: set[int] = set()  # processes that go on beside all that is tried
_SUBREAPER, _NEWNS, _NEWUSER, _RDONLY, _REMOUNT = 36, 0x20000, 0x10000000, 1, 32
_CHANGES = {
    "os.rename",
    "os.remove",
    "os.mkdir",
    "os.rmdir",
    "os.link",
    "os.truncate",
    "os.utime",
}  # audited


class WrongOutcome(Exception):
    """Raised for wrong data on a disk or a wrong report."""


class Ended(NamedTuple):
    """Outcome of a child: "done", "told" (a package error), "wrong" (another), "killed" or
    "hung".
    """

    how: str
    value: Any = None
    said: str = ""

    def need(self, *ways: str) -> Ended:
        """Return this outcome, or raise WrongOutcome if it is not one of these."""
        if self.how not in ways:
            raise WrongOutcome(
                f"it was {self.how}, not {' or '.join(ways)}: {self.said.strip() or self.value}"
            )
        if self.how == "told" and (
            not self.said or "\n" in self.said.strip() or "Traceback" in self.said
        ):
            raise WrongOutcome(f"its error is not one sentence: {self.said!r}")
        return self


@dataclass
class Kill:
    """after: seconds until the child is killed; at: file operation at which it kills itself."""

    after: float | None = None
    at: int | None = None
    alone: bool = False


def inside(
    work: Callable[[], Any], kill: Kill | None = None, *, patience: float = PATIENCE
) -> Ended:
    """Do work in a child process. Raises WrongOutcome if any of its processes is left."""
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(receiving)
        os._exit(_be(work, sending, kill))
    os.close(sending)
    try:
        if kill is not None and kill.after is not None:
            late = select.select([receiving], [], [], kill.after)[0]  # it told how it ended already
            victims = [] if late else [child] if kill.alone else [child, *descendants(child)]
            for pid in victims:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        answer = _received(receiving, patience)
    finally:
        os.close(receiving)
    if answer is None:
        for pid in [*descendants(child), child]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    _reap()
    if answer is None:
        return Ended("hung", said=f"nothing came for {patience:.0f} s")
    if answer:
        return Ended(*pickle.loads(answer))
    return Ended("killed", said=f"status {status}")


def _be(work: Callable[[], Any], sending: int, kill: Kill | None) -> int:
    """Run the work in the child, and send its outcome."""
    heard = io.StringIO()
    try:
        if kill is not None and kill.at is not None:
            count_operations(_killing(kill.at))
        with redirect_stdout(io.StringIO()), redirect_stderr(heard):
            ended = ("done", work(), heard.getvalue())
    except WdstrainError as error:
        ended = ("told", None, str(error))
    except BaseException:
        ended = ("wrong", None, traceback.format_exc())
    data = pickle.dumps(ended)
    data = struct.pack("<q", len(data)) + data
    while data:
        data = data[os.write(sending, data) :]
    return 0


def _received(fd: int, patience: float) -> bytes | None:
    """Return the child's message: empty if it died before, None after the timeout."""
    data, end = b"", time.monotonic() + patience
    while len(data) < 8 or len(data) < 8 + struct.unpack_from("<q", data)[0]:
        left = end - time.monotonic()
        if left <= 0:
            return None
        ready, _, _ = select.select([fd], [], [], min(left, 0.05))
        if ready:
            more = os.read(fd, 1 << 20)
            if not more:
                return b""
            data += more
    return data[8:]


def typed(*words: str) -> str:
    """Run a command and return its output. Raises StorageError with its error line on failure."""
    heard = io.StringIO()
    with redirect_stderr(heard):
        status = main(list(words))
    lines = heard.getvalue().strip().splitlines()
    if status not in (0, 1, 2, 130) or "Traceback" in heard.getvalue():
        raise WrongOutcome(f"exit status {status}: {heard.getvalue()}")
    if status:
        errors = [number for number, line in enumerate(lines) if line.startswith("error: ")]
        if not errors:
            raise WrongOutcome(f"exit status {status} without a sentence: {lines}")
        raise StorageError(" ".join(lines[errors[-1] :]).removeprefix("error: "))
    return heard.getvalue()


# --- processes ---


def adopt_orphans() -> None:
    """Adopt children of dead children, so that leftover processes are detected."""
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)


def _children(pid: int | None = None) -> list[int]:
    children = []
    with suppress(OSError):
        for task in os.listdir(f"/proc/{pid or os.getpid()}/task"):
            with open(f"/proc/{pid or os.getpid()}/task/{task}/children") as file:
                children += [int(word) for word in file.read().split()]
    return [child for child in children if is_alive(child)]


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def descendants(pid: int) -> list[int]:
    descendants = _children(pid)
    for child in descendants:
        descendants += _children(child)
    return descendants


def _reap(patience: float = 60.0) -> None:
    """Wait until all processes that a child started have ended. Raises WrongOutcome for the others."""
    end = time.monotonic() + patience
    while True:
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass  # an orphan that we adopted
        left = set(_children()) - beside
        if not left:
            return
        if time.monotonic() > end:
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            raise WrongOutcome(f"processes were left behind: {left}")
        time.sleep(0.005)


# --- operations on files ---


def count_operations(reported: Callable[[str], None]) -> None:
    """Call `told` before each changing file operation of this process and after each flush, for
    good.
    """
    owner = os.getpid()

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        opens = (
            event == "open"
            and isinstance(arguments[2], int)
            and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        )
        if (opens or event in _CHANGES) and os.getpid() == owner:
            reported(event)

    def stand_in(name: str) -> None:
        real = getattr(os, name)

        def call(*arguments: Any) -> Any:
            if os.getpid() == owner:
                reported(name)
            result = real(*arguments)
            if os.getpid() == owner and name == "fsync":
                reported(f"{name} {os.fstat(arguments[0]).st_ino}")
            return result

        setattr(os, name, call)

    for name in ("fsync", "pwrite"):
        stand_in(name)
    sys.addaudithook(hook)


def operations(work: Callable[[], Any]) -> int:
    """Return the number of file operations of a piece of work."""

    def counted() -> int:
        seen: list[str] = []
        count_operations(seen.append)
        work()
        return len(seen)

    return int(inside(counted).need("done").value)


def _killing(at: int) -> Callable[[str], None]:
    left = [at]

    def told(_: str) -> None:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    return told


# --- power cuts ---

Entries = dict[
    tuple[int, str], int
]  # (folder number, name) -> number of the file or folder; the root folder is 0


@dataclass
class Recording:
    """States of a folder: before each operation, after each flush, and at the end."""

    trees: list[Entries] = field(default_factory=list)
    folders: set[int] = field(default_factory=set)
    versions: dict[int, list[tuple[int, bytes]]] = field(
        default_factory=dict
    )  # of a file: from which state on it was what
    flushed: list[tuple[int, int]] = field(default_factory=list)  # (state, file or folder)
    whats: list[str] = field(default_factory=list)


class Recorder:
    """Records the changes of a folder, in the process that makes them."""

    def __init__(self, root: Path) -> None:
        self._root, self._known = str(root), dict[int, int]()
        self._next, self._seen = 1, dict[int, tuple[int, int, int]]()
        self.made, self._lock, self._busy = Recording(), threading.RLock(), False

    def __call__(self, description: str) -> None:
        with self._lock:
            if self._busy:
                return  # our own looking around
            self._busy = True
            try:
                self._look(description)
            finally:
                self._busy = False

    def _look(self, description: str) -> None:
        recording, state, tree, alive = self.made, len(self.made.trees), Entries(), set()
        todo = [(0, self._root)]
        for folder, path in todo:
            for entry in os.scandir(path):
                status = entry.stat(follow_symlinks=False)
                alive.add(status.st_ino)
                if status.st_ino not in self._known:
                    self._known[status.st_ino], self._next = self._next, self._next + 1
                number = tree[folder, entry.name] = self._known[status.st_ino]
                if entry.is_dir(follow_symlinks=False):
                    recording.folders.add(number)
                    todo.append((number, entry.path))
                    continue
                stamp = (status.st_mtime_ns, status.st_ctime_ns, status.st_size)
                if self._seen.get(number) != stamp or description.startswith(
                    "fsync"
                ):  # the clock of a file system is coarse
                    self._seen[number] = stamp
                    with open(entry.path, "rb") as file:
                        data = file.read()
                    versions = recording.versions.setdefault(number, [])
                    if not versions or versions[-1][1] != data:
                        versions.append((state, data))
        if description.startswith("fsync "):
            node = int(description.split()[1])
            number = 0 if node == os.stat(self._root).st_ino else self._known.get(node, -1)
            recording.flushed.append((state, number))
        for node in set(self._known) - alive:
            del self._known[node]
        recording.trees.append(tree)
        recording.whats.append(description)


def recorded(work: Callable[[], Any], root: Path) -> Recording:
    """Return the changes of a folder during `work`, which may only use this process to write to
    it.
    """

    def watched() -> Recording:
        recorder = Recorder(root)
        recorder("begin")
        count_operations(recorder)
        work()
        recorder("end")
        return recorder.made

    recording: Recording = inside(watched).need("done").value
    return recording


def room_for(recording: Recording) -> int:
    """Return the peak size of a folder in bytes, in pages."""
    most = 0
    for state, tree in enumerate(recording.trees):
        total = 4096 * len(tree)
        for number in set(tree.values()) - recording.folders:
            data = [data for since, data in recording.versions[number] if since <= state]
            total += -(-len(data[-1]) // 4096) * 4096 if data else 0
        most = max(most, total)
    return most


def cut_power(recording: Recording, at: int, bits: random.Random, into: Path) -> None:
    """Write to a new folder what a disk may contain after a power cut in this state."""
    changes: list[
        tuple[Entries, Entries]
    ] = []  # directory entries removed and added since the last saved state
    for before, after in zip(recording.trees[:at], recording.trees[1 : at + 1], strict=True):
        gone = {place: number for place, number in before.items() if after.get(place) != number}
        changes.append(
            (
                gone,
                {place: number for place, number in after.items() if before.get(place) != number},
            )
        )
    touched = [{folder for folder, _ in (*gone, *came)} for gone, came in changes]
    flushed = [(state, number) for state, number in recording.flushed if state <= at]
    kept = {
        i
        for i in range(len(changes))
        if any(state > i and number in touched[i] for state, number in flushed)
    }
    share = bits.choice([0.0, 0.1, 0.5, 1.0])
    kept |= {i for i in range(len(changes)) if touched[i] and bits.random() < share}
    done = [False] * len(changes)
    needed: set[int] = set()
    for i in range(len(changes) - 1, -1, -1):  # nothing older in the same folder is left out
        if i in kept or touched[i] & needed:
            done[i] = True
            needed |= touched[i]
    tree = dict(recording.trees[0])
    for (gone, came), is_done in zip(changes, done, strict=True):
        if is_done:
            for place, number in gone.items():
                if tree.get(place) == number:
                    del tree[place]
            tree.update(came)
    _lay(recording, tree, 0, at, flushed, bits, into, {})


def _lay(
    recording: Recording,
    tree: Entries,
    folder: int,
    at: int,
    flushed: list[tuple[int, int]],
    bits: random.Random,
    into: Path,
    placed: dict[int, Path],
) -> None:
    into.mkdir(exist_ok=True)
    for (of, name), number in tree.items():
        if of != folder:
            continue
        if number in recording.folders:
            _lay(recording, tree, number, at, flushed, bits, into / name, placed)
        elif number in placed:
            os.link(placed[number], into / name)
        else:
            placed[number] = into / name
            placed[number].write_bytes(_after(recording, number, at, flushed, bits))


def _after(
    recording: Recording, number: int, at: int, flushed: list[tuple[int, int]], bits: random.Random
) -> bytes:
    """Return possible contents of a file: the flushed bytes, or any part of later writes."""
    safe = max([state for state, other in flushed if other == number], default=0)
    versions = recording.versions[number]
    then = [data for state, data in versions if state <= safe]
    now = (
        next(data for state, data in reversed(versions) if state <= at)
        if versions[0][0] <= at
        else b""
    )
    base = then[-1] if then else b""
    if base == now:
        return now
    new = bytes(
        b if a == b else 0 for a, b in zip(base, now, strict=False)
    )  # flushed files that were not written to since survive the power cut
    rest = len(now) - len(new)
    return bits.choice(
        [base, now, new + bytes(rest), (new + now[len(new) :])[: len(new) + rest // 2]]
    )


# --- disks ---


def own_mounts() -> None:
    """Let this process mount privately. Call it in a child. Raises OSError without permission."""
    user, group = os.getuid(), os.getgid()
    _call("unshare", _NEWNS | (_NEWUSER if user else 0))
    if user:
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"0 {user} 1"),
            ("gid_map", f"0 {group} 1"),
        ):
            Path(f"/proc/self/{name}").write_text(text)
    _call(
        "mount", b"none", b"/", None, ctypes.c_ulong(0x4000 | 0x40000), None
    )  # private, and all below it


def mount(place: Path, options: str, *, again: bool = False, read_only: bool = False) -> None:
    """Mount a small tmpfs, or change its options."""
    flags = (_REMOUNT if again else 0) | (_RDONLY if read_only else 0)
    _call("mount", b"none", os.fsencode(place), b"tmpfs", ctypes.c_ulong(flags), options.encode())


def may_mount() -> bool:
    """Return whether disks can be mounted here."""

    def tried() -> None:
        own_mounts()
        mount(Path("/tmp"), "size=64k")

    return inside(tried).how == "done"


def _call(name: str, *arguments: Any) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
