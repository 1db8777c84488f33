"""The folder of a run: config.toml, metrics.jsonl, checkpoints/last.pt and best.pt.

Checkpoints are written whole or not at all, and hold plain values and tensors only, so that they are read with
`weights_only` and nothing is ever unpickled from one.
"""

from __future__ import annotations

import io
import json
import os
import pickle
from collections.abc import Mapping
from typing import Any

import torch

from wdstrain.errors import StorageError, UsageError
from wdstrain.storage import write_whole


class Run:
    """A run in `folder`, which must be empty or absent unless `overwrite`."""

    def __init__(self, folder: str, config: Mapping[str, Any], *, overwrite: bool) -> None:
        self.folder = folder
        try:
            os.makedirs(folder, exist_ok=True)
            if os.listdir(folder) and not overwrite:
                raise UsageError(f"{folder} holds a run or other files. Choose another --out, or add --overwrite.")
            os.makedirs(os.path.join(folder, "checkpoints"), exist_ok=True)
        except OSError as error:
            raise StorageError(f"{folder} cannot be written: {error.strerror}. Choose another --out.") from error
        lines = [f"{name} = {_toml(value)}" for name, value in config.items() if value is not None]
        write_whole(os.path.join(folder, "config.toml"), ("\n".join(lines) + "\n").encode())
        write_whole(self._metrics, b"")

    @property
    def _metrics(self) -> str:
        return os.path.join(self.folder, "metrics.jsonl")

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Append a line of metrics."""
        with open(self._metrics, "a", encoding="utf-8") as file:
            file.write(json.dumps(metrics) + "\n")

    def save(self, name: str, state: Mapping[str, Any]) -> str:
        """Write a checkpoint; returns its path."""
        buffer, path = io.BytesIO(), os.path.join(self.folder, "checkpoints", f"{name}.pt")
        torch.save(dict(state), buffer)
        write_whole(path, buffer.getvalue())
        return path


def read_checkpoint(path: str) -> dict[str, Any]:
    """A checkpoint as it was saved. Raises UsageError for a file that is missing or is none of ours."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read: {error.strerror or error}. Name a checkpoint such as RUN/checkpoints/best.pt"
        ) from error
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError) as error:
        raise UsageError(f"{path} is no checkpoint of a run. Name one such as RUN/checkpoints/best.pt") from error
    if not isinstance(state, dict) or not {"model", "config", "task"} <= set(state):
        raise UsageError(f"{path} is a checkpoint of something else: it lacks model, config or task.")
    return state


def _toml(value: Any) -> str:
    """A value as TOML writes it; JSON's strings, numbers, booleans and arrays are TOML's."""
    return json.dumps(value)
