"""Options of conversions. Each is declared once, and is a keyword argument and a flag.

`Options` holds those of packing, which all conversions have. One class for each kind of source adds
the source, the output folder, and options of its own.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, get_args

import numpy as np

from wdstrain.errors import UsageError
from wdstrain.order.plan import integer
from wdstrain.runtime.byte_sizes import as_bytes, parse_size
from wdstrain.runtime.machine import cores
from wdstrain.runtime.options import REQUIRED, option, parse_list, parse_pair, parse_pairs
from wdstrain.shards.label import Label
from wdstrain.shards.options import (
    progress_option,
    shard_urls,
    stored_classes,
    stored_label,
    where_option,
)
from wdstrain.storage.addresses import Urls

Path = str | os.PathLike[str]
OnError = Literal["raise", "skip"]
Check = Literal["magic", "decode"]
Engine = Literal["local", "ray"]

_SPLIT = re.compile(r"\w[\w-]*")
_PROCESS_BYTES = 16_000_000  # starting a process takes as long as packing about this much
_WHOLE_NUMBERS = (
    *("max_shard_samples", "num_shards", "num_workers", "limit", "resize", "quality"),
    "seed",
)


def parse_shares(text: str) -> dict[str, float]:
    """Return the share of each split of a text such as train=0.9,val=0.1."""
    shares: dict[str, float] = {}
    for part in text.split(","):
        name, equals, share = part.partition("=")
        try:
            if not equals or not name.strip() or name.strip() in shares:
                raise ValueError
            shares[name.strip()] = float(share)
        except ValueError:
            raise ValueError(
                f"{part!r} is not a share of a split; write for example train=0.9,val=0.1"
            ) from None
    return shares


@dataclass(frozen=True, kw_only=True)
class Options:
    """How samples are packed."""

    max_shard_size: int | str = option(
        "256MB",
        "largest size of a shard, in bytes or such as 256MB; a larger sample gets a shard of its own",
        metavar="SIZE",
        parse=parse_size,
    )
    max_shard_samples: int | None = option(
        None, "most samples in a shard (default: as many as fit)", metavar="N"
    )
    seed: int = option(0, "seed of the shuffle and the split", metavar="N")
    shuffle: bool = option(
        True,
        "order samples by a seeded hash of their keys; False keeps the order of the source",
        no_help="keep the order of the source",
    )
    split: Mapping[str, float] | None = option(
        None,
        "share of the samples in each split, such as train=0.9,val=0.1, drawn by a hash of the key",
        metavar="NAME=SHARE,...",
        parse=parse_shares,
    )
    stratify: str | None = option(
        None,
        "label of classes; make the shares of the split exact within each class",
        metavar="COL",
    )
    resize: int | None = option(
        None, "downscale images so that the shorter side is at most N pixels", metavar="N"
    )
    quality: int | None = option(
        None,
        "JPEG quality of re-encoded images, 1 to 100 (default: 90); without resizing, re-encodes "
        "every image",
        metavar="N",
    )
    check: Check = option(
        "magic", "check of each image: magic looks at the first bytes, decode decodes it"
    )
    on_error: OnError = option(
        "raise", "end at the first bad sample, or skip bad samples and list them in skipped.jsonl"
    )
    num_workers: int | None = option(
        None,
        "worker processes; the output does not depend on it (default: one per core, fewer for "
        "little data)",
        metavar="N",
    )
    memory: int | str = option(
        "1GB", "memory for ordering samples, over all processes", metavar="SIZE", parse=parse_size
    )
    engine: Engine = option(
        "local", "processes of this machine, or of a Ray cluster with a shared file system"
    )
    limit: int | None = option(None, "pack at most N samples, the first of a stream", metavar="N")
    num_shards: int | None = option(
        None,
        "shards to make in all, of about equal size (default: as many as the largest size gives)",
        metavar="N",
    )
    append: bool = option(False, "add the samples as new shards to the set in the output folder")
    dry_run: bool = option(
        False, "report the splits and shards that would be made, without writing them"
    )
    resume: bool = option(False, "continue an interrupted conversion")
    overwrite: bool = option(False, "replace the shards in the output folder")
    progress: Callable[[Any], None] | None = option(
        None, "function that is called with the Step that a conversion has reached", flag=None
    )

    def __post_init__(self) -> None:
        for name in _WHOLE_NUMBERS:
            value = getattr(self, name)
            if value is None and name != "seed":
                continue
            object.__setattr__(self, name, value := integer(name, value))  # the index is JSON
            if value < 1 and name != "seed":
                raise UsageError(f"{name}={value}: must be >= 1.")
        for name, least in (("max_shard_size", 1), ("memory", 16_000_000)):
            size = _size(name, getattr(self, name))
            object.__setattr__(self, name, size)
            if size < least:
                raise UsageError(f"{name}={size}: must be >= {least} bytes.")
        if self.quality is not None and self.quality > 100:
            raise UsageError(f"quality={self.quality}: must be <= 100.")
        for name, kinds in (("check", Check), ("on_error", OnError), ("engine", Engine)):
            if getattr(self, name) not in get_args(kinds):
                raise UsageError(
                    f"{name}={getattr(self, name)!r}: must be {' or '.join(get_args(kinds))}."
                )
        shares = (self.split or {"train": 1.0}).values()
        if min(shares) <= 0 or not np.isclose(sum(shares), 1.0):
            raise UsageError(
                f"split={dict(self.split or {})}: shares must be above 0 and add up to 1. "
                'Write for example split={"train": 0.9, "val": 0.1}.'
            )
        check_splits(self.split or ())
        if self.stratify and not self.split:
            raise UsageError(
                f'stratify={self.stratify!r} needs a split. Add split={{"train": 0.9, "val": 0.1}}.'
            )
        if self.append and self.overwrite:
            raise UsageError(
                "append=True keeps the shards that overwrite=True would replace. Give only one."
            )
        if self.num_shards is not None and self.max_shard_samples is not None:
            raise UsageError(
                f"num_shards={self.num_shards} and max_shard_samples={self.max_shard_samples} "
                f"exclude each other. Give only one."
            )
        if self.resume and self.overwrite:
            raise UsageError(
                "resume=True continues a conversion, and overwrite=True replaces it. Give only one."
            )

    def processes(self, size: int) -> int:
        """Return the number of worker processes for so many bytes of samples."""
        return self.num_workers or min(cores(), 1 + size // _PROCESS_BYTES)


def _size(name: str, value: Any) -> int:
    try:
        return as_bytes(value) if isinstance(value, str) else integer(name, value)
    except ValueError as error:
        raise UsageError(f"{name}={value!r}: {error}.") from None


def check_splits(names: Iterable[str]) -> None:
    """Raise UsageError for names of splits that are no beginning of a shard's name, NAME-000000.tar."""
    for name in names:
        if not isinstance(name, str) or not _SPLIT.fullmatch(name):
            raise UsageError(
                f"{name!r} cannot be the name of a split, which begins a file's name. Use letters, digits, _ and -."
            )


# --- one class for each kind of source -------------------------------------------------------------


def _out() -> Any:
    return option(
        REQUIRED, "folder for the shards, or an address in a bucket such as s3://b/photos"
    )


def _fixed_classes() -> Any:
    return option(
        (),
        "names of the classes, in the order of their numbers (default: sorted)",
        metavar="A,B,...",
        parse=parse_list,
    )


def _like() -> Any:
    return option(None, "shards whose labels and class numbers are kept", metavar="URL")


@dataclass(frozen=True)
class PackOptions(Options):
    """Samples of an iterable."""

    samples: Any = option(REQUIRED, "iterable of samples, or a torch data set")
    out: Path = _out()
    _: KW_ONLY
    fields: Sequence[str] | None = option(
        None, "names of the fields of samples that are tuples (default: png and cls)"
    )
    classes: Sequence[str] = option(
        (), "names of the classes that `cls` counts, in the order of their numbers"
    )
    like: Urls | None = _like()
    labels: Sequence[Label] = option((), "labels to declare beside `cls`")
    group: Callable[[Any], str] | None = option(
        None, "function of a sample; samples of equal groups come to the same split"
    )


@dataclass(frozen=True)
class FolderOptions(Options):
    """Class folders, or flat files."""

    source: Path = option(
        REQUIRED, "folder of class folders, or of train/ and val/ with class folders in them"
    )
    out: Path = _out()
    _: KW_ONLY
    flat: bool = option(False, "pack all images below the folder, without classes")
    masks: Path | None = option(
        None,
        "folder with the mask of each image, such as a/1.png for the image a/1.jpg",
        metavar="DIR",
    )
    classes: Sequence[str] = _fixed_classes()
    like: Urls | None = _like()


@dataclass(frozen=True)
class TableOptions(Options):
    """Rows of a table."""

    table: Any = option(
        REQUIRED,
        "file, folder or glob of tables (.csv, .tsv, .jsonl, .parquet), or "
        "hf://datasets/OWNER/NAME; in Python also a DataFrame",
        metavar="FILE",
        several=True,
    )
    out: Path = _out()
    _: KW_ONLY
    image: str = option(
        REQUIRED,
        "column of image paths or (in Parquet) bytes, or a template such as 'images/{id}.jpg'",
        metavar="COL",
    )
    label: str | Sequence[str] = option(
        (),
        "columns to learn; COL:class, COL:number or COL:multi (a|b) states the kind, which is "
        "otherwise decided by the cells",
        metavar="COL[,COL...]",
        parse=parse_list,
    )
    root: str | None = option(
        None,
        "folder where relative image paths begin (default: that of the table); absolute paths of "
        "another machine are looked for below it",
        metavar="DIR",
    )
    header: bool = option(
        True,
        "whether a CSV has a header; without it, columns are named 0, 1, ...",
        no_help="read a CSV without a header; its columns are named 0, 1, ...",
    )
    where: str | None = option(
        None,
        "pack rows whose columns meet a condition, such as \"kids and label != 'Other'\"",
        metavar="EXPR",
    )
    classes: Sequence[str] = _fixed_classes()
    like: Urls | None = _like()
    group_by: str | None = option(None, "keep rows with equal COL in the same split", metavar="COL")
    split_by: str | None = option(None, "column that names the split of each row", metavar="COL")


def _fields(place: str) -> Any:
    return option(
        REQUIRED,
        f"field and its {place}; fields png and jpg store rows as images, cls as classes, other "
        "names as NAME.npy",
        metavar=f"NAME={place}",
        parse=parse_pair,
        flag="--field",
        several=True,
    )


def _array_label() -> Any:
    return option(
        (),
        "fields to learn; NAME:class or NAME:number states the kind",
        metavar="NAME[,NAME...]",
        parse=parse_list,
    )


def _array_classes() -> Any:
    return option(
        (),
        "names of the classes that `cls` counts, in the order of their numbers",
        metavar="A,B,...",
        parse=parse_list,
    )


@dataclass(frozen=True)
class Hdf5Options(Options):
    """Data sets of an HDF5 or PyTables file."""

    file: Path = option(REQUIRED, "HDF5 or PyTables file")
    out: Path = _out()
    fields: Mapping[str, str] = _fields("/path/in/file")
    _: KW_ONLY
    label: str | Sequence[str] = _array_label()
    classes: Sequence[str] = _array_classes()
    like: Urls | None = _like()
    key: str | None = option(
        None, "data set with the names of the samples (default: numbers)", metavar="/PATH"
    )


@dataclass(frozen=True)
class ArraysOptions(Options):
    """Rows of arrays."""

    arrays: Mapping[str, Any] = _fields("FILE.npy")
    out: Path = _out()
    _: KW_ONLY
    label: str | Sequence[str] = _array_label()
    classes: Sequence[str] = _array_classes()
    like: Urls | None = _like()


@dataclass(frozen=True)
class TarsOptions(Options):
    """Samples of existing shards."""

    urls: Urls = shard_urls()
    out: Path = _out()
    _: KW_ONLY
    keep: Sequence[str] = option((), "fields to keep", metavar="F[,F...]", parse=parse_list)
    drop: Sequence[str] = option((), "fields to leave out", metavar="F[,F...]", parse=parse_list)
    rename: Mapping[str, str] | None = option(
        None, "new names of fields", metavar="F=G[,F=G...]", parse=parse_pairs
    )
    select: str | None = option(
        None,
        "pack samples whose fields meet a condition, such as 'cls < 3 and json.width > 640'",
        metavar="CONDITION",
    )
    where: str | None = where_option("pack samples")
    keys: str | None = option(
        None, "pack samples whose keys a file lists, one per line", metavar="FILE"
    )
    label: str | None = stored_label()
    classes: Sequence[str] | None = stored_classes()


@dataclass(frozen=True)
class TorchvisionOptions(Options):
    """Samples of a torchvision data set."""

    name: str = option(REQUIRED, "class in torchvision.datasets")
    out: Path = _out()
    root: str = option(
        REQUIRED, "folder of its files; nothing is downloaded", metavar="DIR", flag="--root"
    )
    _: KW_ONLY
    splits: Sequence[str] = option(
        (),
        "splits to pack, by the names of torchvision (default: all)",
        metavar="S[,S...]",
        parse=parse_list,
    )


@dataclass(frozen=True)
class RemoveOptions:
    """Samples to remove from a finished set."""

    urls: Urls = shard_urls("folder or bucket address of the set, or some of its shards")
    _: KW_ONLY
    where: str | None = where_option("remove samples")
    keys: Path | Sequence[str] | None = option(
        None,
        "remove the samples whose keys a file lists, one per line",
        metavar="FILE",
        python="remove the samples with these keys: a list, or a file with one key per line",
    )
    dry_run: bool = option(False, "report what would be removed, and change nothing")
    progress: Callable[[int, int], None] | None = progress_option(
        "(samples copied, samples to copy)"
    )

    def __post_init__(self) -> None:
        if (self.where is None) == (self.keys is None):
            raise UsageError(
                "the samples to remove are named by where=... or keys=..., not by both. Give one of these."
            )
