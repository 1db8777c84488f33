"""Options of conversions. Each is declared once, and is a keyword argument and a flag.

`Options` has those of packing, which all conversions have. The others add the source, the output
folder, and options of a kind of source.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import permutations
from typing import TYPE_CHECKING, Any, Literal

from wdstrain.runtime.machine import cores
from wdstrain.runtime.options import (
    REQUIRED,
    option,
    parse_list,
    parse_pair,
    parse_pairs,
    parse_size,
    refuse,
)
from wdstrain.shards.options import (
    CheckedOptions,
    ignored_number,
    shard_urls,
    where_option,
)

if TYPE_CHECKING:
    from wdstrain.shards.kinds import ColumnInfo
    from wdstrain.storage.addresses import Urls

Path = str | os.PathLike[str]
OnError = Literal["raise", "skip"]
Check = Literal["magic", "decode"]
Engine = Literal["local", "ray"]

_SPLIT = re.compile(r"\w[\w-]*")
_PROCESS_BYTES = 16_000_000  # starting a process takes as long as packing about this much
_EXCLUSIVE = (
    ("append", "overwrite"),
    ("resume", "overwrite"),
    ("num_shards", "max_shard_samples"),
    ("classes", "like"),
    ("keep", "drop"),
)
# an option, the one that it needs, that in words, and a value of it for the message
_NEEDS = (
    ("stratify", "split", "a split", {"train": 0.9, "val": 0.1}),
    ("mask_classes", "masks", "a folder of masks", "masks"),
    ("ignore", "mask_classes", "the classes of masks", ["sky", "road"]),
)
# the bytes of a set depend on these
_SAVED = (
    *("seed", "shuffle", "split", "stratify", "resize", "quality", "check", "limit"),
    *("max_shard_samples", "max_shard_size", "num_shards", "on_error"),
)


def parse_shares(text: str) -> dict[str, float]:
    """Return the share of each split of a text such as train=0.9,val=0.1."""
    pairs = list(map(parse_pair, text.split(",")))
    shares = {name: float(share) for name, share in pairs}
    if len(shares) < len(pairs):
        raise ValueError("a split is named twice; write for example train=0.9,val=0.1")
    return shares


@dataclass(frozen=True, kw_only=True)
class Options(CheckedOptions):
    """Options of packing, which all conversions have."""

    max_shard_size: int | str = option(
        "256MB",
        "largest size of a shard, in bytes or such as 256MB; a larger sample gets a shard of its "
        "own",
        metavar="SIZE",
        parse=parse_size,
        least=1,
    )
    max_shard_samples: int | None = option(
        None, "most samples in a shard (default: as many as fit)", metavar="N", least=1
    )
    seed: int = option(0, "seed of the shuffle and the split", metavar="N", least=None)
    shuffle: bool = option(
        True,
        "order samples by a seeded hash of their keys; without it they keep the order of the source",
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
        None, "downscale images so that the shorter side is at most N pixels", metavar="N", least=1
    )
    quality: int | None = option(
        None,
        "JPEG quality of re-encoded images, 1 to 100 (default: 90); without resizing, re-encodes "
        "every image",
        metavar="N",
        least=1,
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
        least=1,
    )
    memory: int | str = option(
        "1GB",
        "memory for ordering samples, over all processes",
        metavar="SIZE",
        parse=parse_size,
        least=16_000_000,
    )
    engine: Engine = option(
        "local", "processes of this machine, or of a Ray cluster with a shared file system"
    )
    limit: int | None = option(
        None, "pack at most N samples, the first of a stream", metavar="N", least=1
    )
    num_shards: int | None = option(
        None,
        "shards to make in all, of about equal size (default: as many as the largest size gives)",
        metavar="N",
        least=1,
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
        super().__post_init__()
        refuse((self.quality or 0) > 100, "{quality}: must be <= 100.", quality=self.quality)
        shares = (self.split or {"train": 1.0}).values()
        refuse(
            min(shares) <= 0 or not math.isclose(sum(shares), 1.0, rel_tol=1e-5),
            "{split}: shares must be above 0 and add up to 1, such as 0.9 and 0.1.",
            split=dict(self.split or {}),
        )
        check_splits(self.split or ())
        for name, owner, what, example in _NEEDS:
            value = getattr(self, name, None)
            refuse(
                value not in (None, (), "") and not getattr(self, owner),
                f"{{{name}}} needs {what}.",
                f"Add {{{owner}}}.",
                **{name: value, owner: example},
            )
        for one, other in _EXCLUSIVE:
            values = getattr(self, one, None), getattr(self, other, None)
            refuse(
                all(values),
                f"{{{one}}} and {{{other}}} exclude each other.",
                "Give only one.",
                **{one: values[0], other: values[1]},
            )

    @property
    def pixel_quality(self) -> int:
        """JPEG quality of stored pixels: 100 if they are encoded again later."""
        return 95 if self.quality is None and self.resize is None else 100

    def saved(self) -> dict[str, Any]:
        """Return the options that the bytes of a set depend on, as its index keeps them."""
        return {name: getattr(self, name) for name in _SAVED}

    def processes(self, size: int) -> int:
        """Return the number of worker processes for so many bytes of samples."""
        return self.num_workers or min(cores(), 1 + size // _PROCESS_BYTES)


def check_splits(names: Iterable[str], known: Iterable[str] = ()) -> None:
    """Raise UsageError for names of splits that cannot begin the name of a shard.

    known: names of other splits. Each must be told apart from the others by NAME-*.tar.
    """
    for name in names:
        refuse(
            not isinstance(name, str) or not _SPLIT.fullmatch(name),
            f"{name!r} cannot be the name of a split, which begins a file's name.",
            "Use letters, digits, _ and -.",
        )
    for name, longer in permutations((*known, *names), 2):
        refuse(
            longer.startswith(f"{name}-"),
            f"the splits '{name}' and '{longer}' cannot be told apart by {name}-*.tar.",
            "Rename one of them.",
        )


# --- kinds of sources -------------------------------------------------------------------------------


def _out() -> Any:
    return option(
        REQUIRED, "folder for the shards, or an address in a bucket such as s3://b/photos"
    )


@dataclass(frozen=True, kw_only=True)
class ClassOptions(Options):
    """Options of a source whose classes may be given."""

    classes: Sequence[str] = option(
        (),
        "names of the classes, in the order of their numbers (default: sorted names, or numbers)",
        metavar="A,B,...",
        parse=parse_list,
    )
    like: Urls | None = option(
        None, "shards whose labels and class numbers are kept", metavar="URL"
    )


@dataclass(frozen=True)
class PackOptions(ClassOptions):
    """Samples of an iterable."""

    samples: Any = option(REQUIRED, "iterable of samples, or a torch data set")
    out: Path = _out()
    _: KW_ONLY
    fields: Sequence[str] | None = option(
        None, "names of the fields of samples that are tuples (default: png and cls)"
    )
    labels: Sequence[ColumnInfo] = option((), "labels to declare beside `cls`")
    group: Callable[[Any], str] | None = option(
        None, "function of a sample; samples of equal groups go to the same split"
    )


@dataclass(frozen=True)
class FolderOptions(ClassOptions):
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
    mask_classes: Sequence[str] = option(
        (),
        "names of the classes in the masks, in the order of their numbers",
        metavar="A,B,...",
        parse=parse_list,
    )
    ignore: int | None = ignored_number()


@dataclass(frozen=True)
class TableOptions(ClassOptions):
    """Rows of a table."""

    table: Any = option(
        REQUIRED,
        "file, folder or glob of tables (.csv, .tsv, .jsonl, .parquet, .arrow), or "
        "hf://datasets/OWNER/NAME; in Python also a DataFrame or another Arrow table",
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
    root: Path | None = option(
        None,
        "folder where relative image paths begin (default: that of the table)",
        metavar="DIR",
    )
    header: bool = option(
        True,
        "whether a CSV has a header; without it, columns are named 0, 1, ...",
    )
    where: str | None = option(
        None,
        "pack rows whose columns meet a condition, such as \"kids and label != 'Other'\"",
        metavar="EXPR",
    )
    group_by: str | None = option(None, "keep rows with equal COL in the same split", metavar="COL")
    split_by: str | None = option(None, "column that names the split of each row", metavar="COL")
    text: str | None = option(None, "store the text of COL as the field txt", metavar="COL")
    decimal: str = option(
        ".", "character before the fraction of numbers in a CSV (default: a point)", metavar="CHAR"
    )
    escape: str | None = option(
        None, "character before quotes in the cells of a CSV, such as a backslash", metavar="CHAR"
    )
    encoding: str = option(
        "utf-8", "encoding of a CSV, such as cp1252 (default: utf-8)", metavar="NAME"
    )


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


@dataclass(frozen=True, kw_only=True)
class RowOptions(ClassOptions):
    """Options of a source of arrays."""

    label: str | Sequence[str] = option(
        (),
        "fields to learn; NAME:class or NAME:number states the kind",
        metavar="NAME[,NAME...]",
        parse=parse_list,
    )


@dataclass(frozen=True)
class Hdf5Options(RowOptions):
    """Data sets of an HDF5 or PyTables file."""

    file: Path = option(REQUIRED, "HDF5 or PyTables file")
    out: Path = _out()
    fields: Mapping[str, str] = _fields("/path/in/file")
    _: KW_ONLY
    key: str | None = option(
        None, "data set with the names of the samples (default: numbers)", metavar="/PATH"
    )


@dataclass(frozen=True)
class ArraysOptions(RowOptions):
    """Rows of arrays."""

    arrays: Mapping[str, Any] = _fields("FILE.npy")
    out: Path = _out()


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
    where: str | None = where_option("pack samples")
    keys: str | None = option(
        None, "pack samples whose keys a file lists, one per line", metavar="FILE"
    )


@dataclass(frozen=True)
class TorchvisionOptions(Options):
    """Samples of a torchvision data set."""

    name: str = option(REQUIRED, "class in torchvision.datasets")
    out: Path = _out()
    root: Path = option(
        REQUIRED,
        "folder of the data set's files; nothing is downloaded",
        metavar="DIR",
        flag="--root",
    )
    _: KW_ONLY
    splits: Sequence[str] = option(
        (),
        "splits to pack, by the names of torchvision (default: train and test, where a data set "
        "has no others)",
        metavar="S[,S...]",
        parse=parse_list,
    )


@dataclass(frozen=True)
class CocoOptions(Options):
    """Images with boxes in a file of annotations."""

    annotations: Path = option(REQUIRED, "JSON file of COCO with images, annotations, categories")
    images: Path = option(REQUIRED, "folder where the file names of the images begin")
    out: Path = _out()


@dataclass(frozen=True)
class YoloOptions(Options):
    """Images with boxes in a text file each."""

    source: Path = option(
        REQUIRED, "folder with images/ and labels/, and data.yaml or classes.txt with the classes"
    )
    out: Path = _out()


@dataclass(frozen=True)
class JoinOptions(CheckedOptions):
    """Columns of a table to add to the index of a finished set."""

    urls: str | Path = option(REQUIRED, "folder or bucket address of the set", metavar="SET")
    table: Any = option(
        REQUIRED,
        "table with a row for each sample: a file (.csv, .tsv, .jsonl, .parquet, .arrow) or a folder "
        "of them; in Python also a DataFrame, an Arrow table, or a list of dicts",
        metavar="TABLE",
    )
    _: KW_ONLY
    on: str = option(
        "key", "column that names the samples, in the table and in the index", metavar="COL"
    )


@dataclass(frozen=True)
class RemoveOptions(CheckedOptions):
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
    progress: Callable[[int, int], None] | None = option(
        None,
        "function that is called with (samples copied, samples to copy) during the work",
        flag=None,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse(
            (self.where is None) == (self.keys is None),
            "the samples to remove are named by {where} or {keys}, not by both.",
            "Give one of these.",
            where=...,
            keys=...,
        )
