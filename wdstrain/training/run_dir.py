"""The folder of a run: config.toml, metrics.jsonl, steps.jsonl, checkpoints/, tensorboard/, report.html.

`metrics.jsonl` has a line for each epoch, `steps.jsonl` one every 0.5 to 10 s. A resumed run
first removes the lines after its checkpoint from both. One process at a time uses a folder.

A checkpoint is written under a hidden name, flushed and renamed. `last.pt` and `best.pt` are links
to such files, and change atomically too. So a kill at any moment leaves the former checkpoint, and
at most a hidden file, which the next run removes. Checkpoints hold plain values and tensors only,
and are read with `weights_only`.
"""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch

from wdstrain.decode.worker_processes import WorkerDeathsAsErrors
from wdstrain.errors import UsageError
from wdstrain.runtime.file_locks import lock_file, unlock_file
from wdstrain.storage.files import check_folder_output, disk_errors, put_whole, write_whole
from wdstrain.training.config import CONFIG, METRICS, read_lines, refuse, refusing

STEPS = "steps.jsonl"
REPORT, BOARD, CHECKPOINTS = "report.html", "tensorboard", "checkpoints"
_RUN_FILES = {CONFIG, METRICS, STEPS, REPORT, BOARD, CHECKPOINTS}
_LOCK = ".lock"
LAST, BEST = "last.pt", "best.pt"
FORMAT = 3  # of the contents of a checkpoint
_INTACT = "Earlier checkpoints are intact."


def check_out(folder: str, *, overwrite: bool, resume: bool) -> None:
    """Raise UsageError for a folder that no run, or not this one, may write to.

    Raises StorageError if it cannot be written.
    """
    # hidden files are the lock, and incomplete files that a kill left
    names = {path.name for path in Path(folder).glob("[!.]*")}
    refuse(
        (resume and overwrite, "resume and overwrite exclude each other.", "Give one of them."),
        (
            names and CONFIG not in names,
            f"{folder} holds files that are not of a run.",
            "Choose another folder.",
        ),
        (
            names and not overwrite and not resume,
            f"{folder} holds a run already.",
            "Choose another folder, continue with {resume}, or replace it with {overwrite}.",
        ),
    )
    check_folder_output(folder)


class RunDir:
    """The folder of a new run, or with `resume` of an earlier one. config: text of config.toml."""

    def __init__(self, folder: str, config: str, *, overwrite: bool, resume: bool) -> None:
        self.folder = folder
        check_out(folder, overwrite=overwrite, resume=resume)
        with disk_errors(folder, "Choose another folder."), ExitStack() as stack:
            os.makedirs(folder, exist_ok=True)
            self._fd = lock_file(self.path(_LOCK))
            refuse(
                (
                    self._fd is None,
                    f"another process is training into {folder}.",
                    "Wait for it, or choose another folder.",
                )
            )
            stack.callback(self.close)
            for name in _RUN_FILES.intersection(os.listdir(folder)) if overwrite else ():
                if os.path.isdir(self.path(name)) and not os.path.islink(self.path(name)):
                    shutil.rmtree(self.path(name))
                else:
                    os.unlink(self.path(name))
            _remove_incomplete(folder)
            write_whole(self.path(CONFIG), config.encode("utf-8", "replace"))
            os.makedirs(self.path(CHECKPOINTS), exist_ok=True)
            stack.pop_all()

    def path(self, name: str) -> str:
        return os.path.join(self.folder, name)

    def log(self, name: str, line: Mapping[str, Any]) -> None:
        """Append a line to metrics.jsonl or steps.jsonl."""
        with open(self.path(name), "a", encoding="utf-8") as file:
            file.write(strict_json(line) + "\n")

    def rewind(self, history: Sequence[Mapping[str, Any]], position: tuple[int, int]) -> None:
        """Keep these lines in metrics.jsonl, and in steps.jsonl those up to (epoch, step)."""
        written = read_lines(self.path(STEPS))
        steps = [line for line in written if (line["epoch"], line["step"]) <= position]
        for name, lines in ((METRICS, history), (STEPS, steps)):
            text = "".join(f"{strict_json(line)}\n" for line in lines)
            write_whole(self.path(name), text.encode())

    def close(self) -> None:
        """Unlock the folder for other processes."""
        unlock_file(self._fd)
        self._fd = None


def strict_json(value: Any) -> str:
    """Return JSON for every program: NaN and infinity, which JSON lacks, are null."""
    return json.dumps(json.loads(json.dumps(value), parse_constant=lambda name: None))


def _remove_incomplete(folder: str) -> None:
    """Remove incomplete files that a kill left. Raises StorageError."""
    with disk_errors(folder, "Choose another folder."):
        for path in Path(folder).glob(".*.tmp"):
            path.unlink()


# --- checkpoints ----------------------------------------------------------------------------------


class Checkpoints:
    """Checkpoints of one run in their folder. keep: latest checkpoints to keep, beside the best."""

    def __init__(self, folder: str, keep: int) -> None:
        self._folder, self._keep = folder, keep
        _remove_incomplete(folder)

    def save(self, state: Mapping[str, Any], step: int, *, best: bool = False) -> str:
        """Write a checkpoint of this step of the run, and return its path. best: it is the best."""
        name = f"step-{step:08d}.pt"
        path = os.path.join(self._folder, name)
        # best.pt first: a run resumed from this step does not write it again
        first, *others = (BEST, name, LAST) if best else (name, LAST)
        with put_whole(os.path.join(self._folder, first), _INTACT) as file:
            try:
                with WorkerDeathsAsErrors():
                    torch.save(dict(state), file.name)
            except RuntimeError as error:  # of torch on a full disk
                raise OSError(errno.EIO, str(error).splitlines()[0]) from error
        for other in others:
            self._link(first, other)
        with disk_errors(path, _INTACT):
            for old in set(names(self._folder)[: -self._keep]) - {name}:
                os.unlink(os.path.join(self._folder, old))
        return path

    def _link(self, name: str, other: str) -> None:
        """Give a file another name in the folder, which replaces an earlier file of that name."""
        path = os.path.join(self._folder, name)
        with put_whole(os.path.join(self._folder, other), _INTACT) as file:
            os.unlink(file.name)
            try:
                os.link(path, file.name)
            except OSError:  # a file system without links
                shutil.copyfile(path, file.name)


def names(folder: str) -> list[str]:
    """Return the names of a folder's checkpoints by step, the oldest first."""
    return sorted(path.name for path in Path(folder).glob("step-*.pt"))


def read_last(folder: str) -> tuple[dict[str, Any] | None, list[str]]:
    """Return (last readable checkpoint of a folder or None, why later ones cannot be read).

    Raises UsageError if there are checkpoints, and none can be read.
    """
    refused: list[str] = []
    paths = [os.path.join(folder, name) for name in (LAST, *reversed(names(folder)))]
    for path in filter(os.path.exists, paths):
        try:
            return read_checkpoint(path), refused
        except UsageError as error:
            refused.append(str(error))
    if refused:
        raise UsageError(f"no checkpoint in {folder} can be read: {refused[0]}")
    return None, refused


def load_file(path: str, other: str) -> Any:
    """Return what torch.save wrote, on the CPU. other: sentence on a file that is none.

    Raises UsageError for a missing or damaged file, also for changed bytes, which torch does not
    notice.
    """
    with refusing(f"{path} cannot be read", "Check the path.", errors=(OSError,)):
        try:
            # torch has its own words for other files
            with suppress(zipfile.BadZipFile, NotImplementedError), zipfile.ZipFile(path) as file:
                damaged = file.testzip()
                problem = f"{path} is damaged: the checksum of {damaged} differs."
                refuse((damaged is not None, problem, "Use another file."))
            return torch.load(path, map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError, ValueError) as error:
            raise UsageError(f"{path} {other}") from error


def read_checkpoint(path: str) -> dict[str, Any]:
    """Return a checkpoint as it was saved. Raises UsageError for another or a missing file."""
    state = load_file(path, "is no checkpoint of a run. Name one such as RUN/checkpoints/best.pt")
    parts: dict[str, Any] = state if isinstance(state, dict) else {}
    refuse(
        (
            not {"model", "config", "task"} <= set(parts),
            f"{path} is a checkpoint of another program: it lacks model, config or task.",
        ),
        (
            parts.get("format") != FORMAT,
            f"{path} has the checkpoint format {parts.get('format')}: must be {FORMAT}.",
            "Read it with the version of wdstrain that wrote it.",
        ),
    )
    return parts
