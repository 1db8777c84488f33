"""Checkpoints: complete or absent, the latest ones and the best, without pickled objects.

A checkpoint is written under a hidden name, flushed and renamed. `last.pt` and `best.pt` are links
to such files, and change atomically too. So a kill at any moment leaves the former checkpoint, and
at most a hidden file, which the next run removes. Checkpoints hold plain values and tensors only,
and are read with `weights_only`.
"""

from __future__ import annotations

import os
import pickle
import shutil
import uuid
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch

from wdstrain.decode.worker_processes import WorkerDeathsAsErrors
from wdstrain.errors import StorageError, UsageError
from wdstrain.storage.files import publish

LAST, BEST = "last.pt", "best.pt"
FORMAT = 3  # of the contents of a checkpoint


class Checkpoints:
    """Checkpoints of one run in their folder. keep: latest checkpoints to keep, beside the best."""

    def __init__(self, folder: str, keep: int) -> None:
        self._folder, self._keep = folder, keep
        for name in os.listdir(folder):
            if name.startswith(".") and name.endswith(".tmp"):
                with suppress(OSError):
                    os.unlink(os.path.join(folder, name))

    def save(self, state: Mapping[str, Any], step: int, *, best: bool = False) -> str:
        """Write a checkpoint of this step of the run, and return its path. best: it is the best."""
        name = f"step-{step:08d}.pt"
        path, temporary = os.path.join(self._folder, name), self._temporary()
        try:
            with WorkerDeathsAsErrors():
                torch.save(dict(state), temporary)
                # best.pt first: a run resumed from this step does not write it again
                if best:
                    self._name(temporary, BEST)
                publish(temporary, path)
                self._name(path, LAST)
                for old in names(self._folder)[: -self._keep]:
                    if old != name:
                        os.unlink(os.path.join(self._folder, old))
                return path
        except (OSError, RuntimeError) as error:  # torch.save raises RuntimeError on a full disk
            why = getattr(error, "strerror", None) or str(error).splitlines()[0]
            raise StorageError(
                f"the checkpoint {path} cannot be written ({why}). Earlier checkpoints are intact."
            ) from error
        finally:
            with suppress(OSError):
                os.unlink(temporary)

    def _name(self, path: str, other: str) -> None:
        """Give a file a second name, which replaces an earlier file of that name."""
        temporary = self._temporary()
        try:
            try:
                os.link(path, temporary)
            except OSError:  # a file system without links
                shutil.copyfile(path, temporary)
            publish(temporary, os.path.join(self._folder, other))
        finally:  # a link that stays would keep the bytes of a checkpoint on a full disk
            with suppress(OSError):
                os.unlink(temporary)

    def _temporary(self) -> str:
        return os.path.join(self._folder, f".{uuid.uuid4().hex[:12]}.tmp")


def names(folder: str) -> list[str]:
    """Return the names of a folder's checkpoints by step, the oldest first."""
    return sorted(
        name for name in os.listdir(folder) if name.startswith("step-") and name.endswith(".pt")
    )


def read_last(folder: str) -> tuple[dict[str, Any] | None, list[str]]:
    """Return (last readable checkpoint of a folder or None, why later ones cannot be read).

    Raises UsageError if there are checkpoints, and none can be read.
    """
    refused: list[str] = []
    if not os.path.isdir(folder):
        return None, refused
    for name in [LAST, *reversed(names(folder))]:
        path = os.path.join(folder, name)
        if not os.path.exists(path):
            continue
        try:
            return read_checkpoint(path), refused
        except UsageError as error:
            refused.append(str(error))
    if refused:
        raise UsageError(f"no checkpoint in {folder} can be read: {refused[0]}")
    return None, refused


def _check_bytes(path: str) -> None:
    """Raise UsageError for a file of torch.save whose bytes changed, which torch does not notice."""
    try:
        with zipfile.ZipFile(path) as file:
            damaged = file.testzip()
    except (zipfile.BadZipFile, NotImplementedError):
        return  # torch has its own words for other files
    if damaged is not None:
        raise UsageError(
            f"{path} is damaged: the checksum of {damaged} differs.",
            "Use another file.",
        )


def load_file(path: str, other: str) -> Any:
    """Return what torch.save wrote, on the CPU. other: sentence on a file that is none.

    Raises UsageError for a missing or damaged file.
    """
    try:
        _check_bytes(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read: {error.strerror or error}.",
            "Check the path.",
        ) from error
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError, ValueError) as error:
        raise UsageError(f"{path} {other}") from error


def read_checkpoint(path: str) -> dict[str, Any]:
    """Return a checkpoint as it was saved. Raises UsageError for another or a missing file."""
    state = load_file(path, "is no checkpoint of a run. Name one such as RUN/checkpoints/best.pt")
    if not isinstance(state, dict) or not {"model", "config", "task"} <= set(state):
        raise UsageError(
            f"{path} is a checkpoint of another program: it lacks model, config or task."
        )
    if state.get("format") != FORMAT:
        raise UsageError(
            f"{path} has the checkpoint format {state.get('format')}: must be {FORMAT}. Read it with "
            f"the version of wdstrain that wrote it."
        )
    return state
