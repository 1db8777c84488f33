"""The folder of a run: config.toml, metrics.jsonl, steps.jsonl, checkpoints/, tensorboard/, report.html.

`metrics.jsonl` has a line for each epoch, `steps.jsonl` one every 0.5 to 10 s. A resumed run
first removes the lines after its checkpoint from both. One process at a time uses a folder.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from wdstrain.errors import StorageError, UsageError
from wdstrain.runtime.file_locks import lock_file, unlock_file
from wdstrain.storage.files import check_folder_output, write_whole

CONFIG, METRICS, STEPS = "config.toml", "metrics.jsonl", "steps.jsonl"
REPORT, BOARD, CHECKPOINTS = "report.html", "tensorboard", "checkpoints"
_RUN_FILES = {CONFIG, METRICS, STEPS, REPORT, BOARD, CHECKPOINTS}
_LOCK = ".lock"


def check_out(folder: str, *, overwrite: bool, resume: bool) -> None:
    """Raise UsageError for a folder that no run, or not this one, may write to.

    Raises StorageError if it cannot be written.
    """
    if resume and overwrite:
        raise UsageError(
            "resume and overwrite exclude each other.",
            "Give one of them.",
        )
    names = os.listdir(folder) if os.path.isdir(folder) else []
    there = [name for name in names if name != _LOCK and not _is_incomplete(name)]
    if there and CONFIG not in there:
        raise UsageError(
            f"{folder} holds files that are not of a run.",
            "Choose another folder.",
        )
    if there and not overwrite and not resume:
        raise UsageError(
            f"{folder} holds a run already.",
            "Choose another folder, continue with resume=True, or replace it with overwrite=True.",
        )
    check_folder_output(folder)


class RunDir:
    """The folder of a new run, or with `resume` of an earlier one. config: text of config.toml."""

    def __init__(self, folder: str, config: str, *, overwrite: bool, resume: bool) -> None:
        self.folder = folder
        self._fd: int | None = None
        check_out(folder, overwrite=overwrite, resume=resume)
        try:
            os.makedirs(folder, exist_ok=True)
            self._lock()
            if overwrite:
                self._clear()
            for name in os.listdir(folder):
                if _is_incomplete(name):
                    os.unlink(self.path(name))
            write_whole(self.path(CONFIG), config.encode("utf-8", "replace"))
            os.makedirs(self.path(CHECKPOINTS), exist_ok=True)
        except BaseException as error:
            self.close()
            if not isinstance(error, OSError):
                raise
            raise StorageError(
                f"{folder} cannot be written: {error.strerror}.",
                "Choose another folder.",
            ) from error

    def path(self, name: str) -> str:
        return os.path.join(self.folder, name)

    def log(self, name: str, line: Mapping[str, Any]) -> None:
        """Append a line to metrics.jsonl or steps.jsonl."""
        with open(self.path(name), "a", encoding="utf-8") as file:
            file.write(strict_json(line) + "\n")

    def lines(self, name: str) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl or steps.jsonl, without one that a kill cut off."""
        lines = []
        with (
            suppress(FileNotFoundError),
            open(self.path(name), encoding="utf-8", errors="replace") as file,
        ):
            for line in file:
                with suppress(ValueError):
                    lines.append(json.loads(line))
        return lines

    def rewind(self, history: Sequence[Mapping[str, Any]], position: tuple[int, int]) -> None:
        """Keep these lines in metrics.jsonl, and in steps.jsonl those up to (epoch, step)."""
        steps = [line for line in self.lines(STEPS) if (line["epoch"], line["step"]) <= position]
        for name, lines in ((METRICS, history), (STEPS, steps)):
            text = "".join(f"{strict_json(line)}\n" for line in lines)
            write_whole(self.path(name), text.encode())

    def close(self) -> None:
        """Unlock the folder for other processes."""
        unlock_file(self._fd)
        self._fd = None

    def _lock(self) -> None:
        self._fd = lock_file(self.path(_LOCK))
        if self._fd is None:
            raise UsageError(
                f"another process is training into {self.folder}.",
                "Wait for it, or choose another folder.",
            )

    def _clear(self) -> None:
        """Remove the files of a run, and nothing else."""
        for name in _RUN_FILES.intersection(os.listdir(self.folder)):
            if os.path.isdir(self.path(name)) and not os.path.islink(self.path(name)):
                shutil.rmtree(self.path(name))
            else:
                os.unlink(self.path(name))


def strict_json(value: Any) -> str:
    """Return JSON for every program: NaN and infinity, which JSON lacks, are null."""
    return json.dumps(json.loads(json.dumps(value), parse_constant=lambda name: None))


def _is_incomplete(name: str) -> bool:
    """Return whether a file is an incomplete one that a kill left."""
    return name.startswith(".") and name.endswith(".tmp")
