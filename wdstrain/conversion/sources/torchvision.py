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

_NAMES = ("train", "val", "valid", "test", "extra", "unlabeled")


def stream_torchvision(name: str, root: str, *, splits: Sequence[str] = ()) -> Source:
    """Return the samples of a data set. splits: names of its splits (default: all).

    Raises UsageError for a name or split that torchvision does not know, SourceError for a split
    that is missing in `root` or damaged.
    """
    kind = _data_set(name)
    parameter, known = _splits_of(kind, root)
    strange = sorted(set(splits) - {"train", "test"}) if parameter == "train" else []
    if strange:
        raise UsageError(f"{name} has no split '{strange[0]}'. Use train or test.")
    wanted = _wanted(splits, known)
    data_sets: dict[str, Any] = {}
    reasons: dict[str, str] = {}  # why splits cannot be opened
    for split in wanted:
        arguments = {"train": split == "train"} if parameter == "train" else {"split": split}
        try:
            opened = kind(root, **arguments) if parameter else kind(root)
            data_sets["val" if split == "valid" else split] = opened
        except Exception as error:  # data sets raise any type for missing files and splits
            text = str(error).splitlines()[0] if str(error) else type(error).__name__
            reasons[split] = f"{split or name}: {text}"
            if splits:
                raise SourceError(
                    f"{name} in {root} has no split '{split}' ({reasons[split]}). Check splits and "
                    "root."
                ) from error
    if not data_sets:
        check_there(root, kind="folder")
        raise SourceError(
            f"{name} is not in {root} as torchvision expects it ({'; '.join(reasons.values())}). "
            "Download it first."
        )
    if reasons and known is not None:
        failed, reason = next(iter(reasons.items()))
        raise SourceError(
            f"{name} in {root}: the split '{failed}' is missing or cannot be read ({reason}). "
            f"Fix it, or name the splits to convert: "
            f"splits={[split for split in wanted if split not in reasons]}"
        )
    left_out = [one for one in known or () if one not in wanted]
    passed = [*reasons.values(), *(f"split {one}, which was not asked for" for one in left_out)]
    files = {split: _Files(one) for split, one in data_sets.items() if _has_files(one)}
    parts = files if len(files) == len(data_sets) else data_sets
    classes = classes_of(next(iter(data_sets.values())))
    source = {"kind": "torchvision", "name": name, "splits": list(data_sets)}
    fields = None if parts is files else ("png", "cls")
    stream = stream_samples(parts, fields=fields, classes=classes, name=name, source=source)
    return replace(stream, resplit=True, ignored=dict.fromkeys(passed, 1))


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


def _splits_of(kind: Any, root: str) -> tuple[str, list[str] | None]:
    """Return (parameter of the class that chooses a split, splits or None if unknown)."""
    parameters = inspect.signature(kind).parameters
    if "train" in parameters:
        return "train", ["train", "test"]
    if "split" in parameters:
        return "split", _known(kind, root)
    return "", [""]


def _wanted(splits: Sequence[str], known: list[str] | None) -> list[str]:
    """Return the splits to open. splits: those that were asked for; none: all."""
    if known == [""]:
        return known
    if splits:
        return list(splits)
    wanted = [split for split in _NAMES if known is None or split in known]
    if known and "trainval" in known and not {"train", "val"} & set(known):
        return ["trainval", *wanted]
    return wanted


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
