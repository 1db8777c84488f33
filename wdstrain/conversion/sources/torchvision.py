"""A torchvision data set, by the name of its class, as a source. Its splits are kept.

If the data set lists its files (`samples`), their bytes are packed. Otherwise its items are read
and their images stored as PNG, which is lossless. Nothing is downloaded.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from wdstrain.conversion.listing import Source, check_there
from wdstrain.conversion.sources.iterable import classes_of, stream_samples
from wdstrain.errors import SourceError, UsageError

_NAMES = ("train", "val", "valid", "trainval", "test", "extra", "unlabeled")


def stream_torchvision(name: str, root: str, *, splits: Sequence[str] = ()) -> Source:
    """Return the samples of a data set. splits: names of its splits (default: all).

    Raises UsageError for a name or split that torchvision does not know, SourceError for a split
    that is missing in `root` or damaged.
    """
    kind = _data_set(name)
    parameter, known = _splits_of(kind, root)
    if strange := sorted(set(splits) - set(known)):
        raise UsageError(f"{name} has no split '{strange[0]}'. Use {' or '.join(known)}.")
    has_parts = {"train", "val"} & set(known)  # of trainval
    wanted = list(splits) or [one for one in known if one != "trainval" or not has_parts]
    data_sets: dict[str, Any] = {}
    reasons: dict[str, str] = {}  # why splits cannot be opened
    for split in wanted:
        value = split == "train" if parameter == "train" else split
        try:
            data_sets["val" if split == "valid" else split] = kind(
                root, **({parameter: value} if parameter else {})
            )
        except Exception as error:  # data sets raise any type for missing files
            first_line = str(error).partition("\n")[0]
            reasons[split] = f"{split or name}: {first_line or type(error).__name__}"
    if not data_sets:
        check_there(root, kind="folder")
        raise SourceError(
            f"{name} is not in {root} as torchvision expects it ({'; '.join(reasons.values())}). "
            "Download it first."
        )
    if reasons:
        failed, reason = next(iter(reasons.items()))
        raise SourceError(
            f"{name} in {root}: the split '{failed}' is missing or cannot be read ({reason}). "
            f"Fix it, or name the splits to convert: "
            f"splits={[split for split in wanted if split not in reasons]}"
        )
    files = {split: _Files(one) for split, one in data_sets.items() if _has_files(one)}
    parts = files if len(files) == len(data_sets) else data_sets
    source = {"kind": "torchvision", "name": name, "splits": list(data_sets)}
    stream = stream_samples(
        parts,
        fields=None if parts is files else ("png", "cls"),
        classes=classes_of(next(iter(data_sets.values()))),
        name=name,
        source=source,
    )
    return replace(
        stream,
        resplit=True,
        ignored={f"split {one}, which was not asked for": 1 for one in known if one not in wanted},
    )


def _data_set(name: str) -> Any:
    """Return a class of torchvision.datasets by its name."""
    import torchvision.datasets  # takes half a second

    names = torchvision.datasets.__all__
    if name in names:
        return getattr(torchvision.datasets, name)
    near = [known for known in names if known.lower().startswith(name[:3].lower())]
    raise UsageError(
        f"torchvision has no data set '{name}'. "
        + (f"Did you mean {', '.join(near)}?" if near else "Check the name.")
    )


def _splits_of(kind: Any, root: str) -> tuple[str, list[str]]:
    """Return (parameter of the class that chooses a split, its splits)."""
    parameters = inspect.signature(kind).parameters
    if "train" in parameters:
        return "train", ["train", "test"]
    if "split" not in parameters:
        return "", [""]
    try:
        kind(root, split=" ")
    except Exception as error:  # of any type; it names the splits
        known = re.findall(r"'([^']*)'", str(error).partition("Valid values are ")[2])
        if known:
            return "split", [name for name in _NAMES if name in known]
    return "split", ["train", "test"]


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
