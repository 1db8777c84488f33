"""Options of each kind of source: the source, the output folder, and options of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

from wdstrain.conversion.options import Options, Path
from wdstrain.errors import UsageError
from wdstrain.runtime.options import REQUIRED, as_list, option, parse_list, parse_pair, parse_pairs
from wdstrain.shards.options import progress_option, shard_urls, where_option

if TYPE_CHECKING:
    from wdstrain.shards.kinds import ColumnInfo
    from wdstrain.storage.addresses import Urls


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

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.rename, str):
            raise UsageError(
                "must be a dict of new names by field.",
                option="rename",
                value=self.rename,
            )
        for name in ("keep", "drop"):  # a name by itself is not a list of letters
            object.__setattr__(self, name, as_list(getattr(self, name) or ()))


@dataclass(frozen=True)
class TorchvisionOptions(Options):
    """Samples of a torchvision data set."""

    name: str = option(REQUIRED, "class in torchvision.datasets")
    out: Path = _out()
    root: str = option(
        REQUIRED,
        "folder of the data set's files; nothing is downloaded",
        metavar="DIR",
        flag="--root",
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
                "the samples to remove are named by {where} or {keys}, not by both.",
                "Give one of these.",
                {"where": ..., "keys": ...},
            )
