"""A torchvision data set, by the name of its class, as a stream. Its splits are kept.

If the data set lists its files (`samples`), their bytes are packed. Otherwise its items are read
and their images stored as PNG, which is lossless. Nothing is downloaded.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from wdstrain.conversion.listing import Stream, check_there
from wdstrain.conversion.sources.iterable import classes_of, stream_samples
from wdstrain.errors import SourceError, UsageError

_NAMES = ("train", "val", "valid", "test", "extra", "unlabeled")


def stream_torchvision(name: str, root: str, *, splits: Sequence[str] = ()) -> Stream:
    """Return the samples of a data set. splits: names of its splits (default: all).

    Raises UsageError for a name or split that torchvision does not know, SourceError for a split
    that is missing in `root` or damaged.
    """
    import torchvision.datasets  # takes half a second

    kind: Any = getattr(torchvision.datasets, name, None)
    if kind is None or name not in torchvision.datasets.__all__:
        near = [
            known
            for known in torchvision.datasets.__all__
            if known.lower().startswith(name[:3].lower())
        ]
        raise UsageError(
            f"torchvision has no data set '{name}'. "
            + (f"Did you mean {', '.join(near)}?" if near else "Check the name.")
        )
    parameters = inspect.signature(kind).parameters
    strange = sorted(set(splits) - {"train", "test"}) if "train" in parameters else []
    if strange:
        raise UsageError(f"{name} has no split '{strange[0]}'. Use train or test.")
    known = (
        ["train", "test"]
        if "train" in parameters
        else _known(kind, root)
        if "split" in parameters
        else [""]
    )
    wanted = (
        list(splits) or [one for one in _NAMES if known is None or one in known]
        if known != [""]
        else [""]
    )
    if not splits and known and "trainval" in known and not {"train", "val"} & set(known):
        wanted = ["trainval", *wanted]
    found: dict[str, Any] = {}
    reasons, failed = [], []
    for split in wanted:
        arguments: dict[str, Any] = (
            {"train": split == "train"}
            if "train" in parameters
            else {"split": split}
            if split
            else {}
        )
        try:
            found["val" if split == "valid" else split] = kind(root, **arguments)
        except Exception as error:  # data sets raise any type for missing files and splits
            reasons.append(
                f"{split or name}: "
                f"{str(error).splitlines()[0] if str(error) else type(error).__name__}"
            )
            failed.append(split)
            if splits:
                raise SourceError(
                    f"{name} in {root} has no split '{split}' ({reasons[-1]}). Check splits and "
                    "root."
                ) from error
    if not found:
        check_there(root, kind="folder")
        raise SourceError(
            f"{name} is not in {root} as torchvision expects it ({'; '.join(reasons)}). Download "
            "it first."
        )
    if failed and known is not None:
        raise SourceError(
            f"{name} in {root}: the split '{failed[0]}' is missing or cannot be read "
            f"({reasons[0]}). Fix it, or name the splits to convert: "
            f"splits={[split for split in wanted if split not in failed]}"
        )
    passed = [
        *reasons,
        *(f"split {one}, which was not asked for" for one in known or () if one not in wanted),
    ]
    files = {split: _Files(one) for split, one in found.items() if _has_files(one)}
    parts = files if len(files) == len(found) else found
    classes = classes_of(next(iter(found.values())))
    source = {"kind": "torchvision", "name": name, "splits": list(found)}
    fields = None if parts is files else ("png", "cls")
    stream = stream_samples(parts, fields=fields, classes=classes, name=name, source=source)
    return replace(stream, resplit=True, ignored=dict.fromkeys(passed, 1))


def _known(kind: Any, root: str) -> list[str] | None:
    """Return the splits of a data set, from its error for an unknown split; None if not named."""
    try:
        kind(root, split=" ")
    except Exception as error:  # data sets raise any type
        _, says, names = str(error).partition("Valid values are ")
        return re.findall(r"'([^']*)'", names) if says else None
    return None


class _Files:
    """The files of a data set that lists them, as samples with their bytes."""

    def __init__(self, data: Any) -> None:
        self._rows = data.samples

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        path, target = self._rows[number]
        with open(path, "rb") as file:
            data = file.read()
        return {str(path).rpartition(".")[2].lower(): data, "cls": int(target)}


def _has_files(data: Any) -> bool:
    rows = getattr(data, "samples", None)
    return (
        isinstance(rows, list) and bool(rows) and isinstance(rows[0], tuple) and len(rows[0]) == 2
    )
