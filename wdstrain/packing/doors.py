"""Packing from Python: one function for each kind of source, all with the options of `Options` as keyword arguments.

Each returns the index of what was written; `index.info` says how many samples were listed, quarantined and renamed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from wdstrain.packing.arrays import stream_arrays
from wdstrain.packing.convert import Progress, convert, resumed_in_place
from wdstrain.packing.folder import list_folder
from wdstrain.packing.hdf5 import stream_hdf5
from wdstrain.packing.listing import Source
from wdstrain.packing.options import Options, Packing
from wdstrain.packing.samples import stream_samples
from wdstrain.packing.table import list_table
from wdstrain.packing.tars import TarOptions, stated, stream_tars
from wdstrain.packing.vision import stream_torchvision
from wdstrain.shards.index import Index, Label
from wdstrain.storage.addresses import Urls

if TYPE_CHECKING:
    from typing_extensions import Unpack


def pack(
    samples: Any,
    out: str | os.PathLike[str],
    *,
    fields: Sequence[str] | None = None,
    classes: Sequence[str] = (),
    labels: Sequence[Label] = (),
    group: Callable[[Any], str] | None = None,
    progress: Progress | None = None,
    **options: Unpack[Packing],
) -> Index:
    """Pack any iterable of samples, or a torch data set, into shards.

        wt.pack(({"jpg": data, "cls": number} for data, number in mine), "shards/mine", split={"train": 0.9, "val": 0.1})

    A sample is a dict of fields: bytes as they are; pictures, numbers, texts, arrays by the name of the field ("png", "cls",
    "txt", "json", "x.npy"); a value is never None. "__key__" names it. A tuple is named by `fields`, and taken for ("png", "cls") without.
    classes: the names of the classes that `cls` counts, each once; a cls that is a name, as text or bytes, is stored as its
    number. labels: further columns to learn. group: samples of one group come
    to one side of a split. The samples are read once and may be more than memory holds. Raises as `wdstrain convert` does.
    """
    source = stream_samples(
        samples,
        fields=fields,
        classes=classes,
        labels=labels,
        group=group,
        quality=_of_pixels(options),
    )
    return _packed(source, out, options, progress)


def pack_folder(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    flat: bool = False,
    progress: Progress | None = None,
    **options: Unpack[Packing],
) -> Index:
    """Pack a folder of class folders, or with `flat` all pictures below it."""
    return _packed(list_folder(os.fspath(source), flat=flat), out, options, progress)


def pack_table(
    table: Any,
    out: str | os.PathLike[str],
    *,
    image: str,
    label: str | Sequence[str] = (),
    root: str | None = None,
    header: bool = True,
    group_by: str | None = None,
    split_by: str | None = None,
    progress: Progress | None = None,
    **options: Unpack[Packing],
) -> Index:
    """Pack the rows of a CSV, TSV, JSON lines or parquet file, or of a pandas DataFrame.

    label: columns to learn; "name:class", "name:number" or "name:multi" says the kind, else the type of nearly all cells
    decides. What was decided is in `index.info["source"]["decided"]`.
    """
    listing = list_table(
        table,
        image=image,
        labels=[label] if isinstance(label, str) else list(label),
        root=root,
        header=header,
        group_by=group_by,
        split_by=split_by,
        collect=options.get("on_bad") == "quarantine",
    )
    return _packed(listing, out, options, progress)


def pack_hdf5(
    file: str | os.PathLike[str],
    out: str | os.PathLike[str],
    fields: Mapping[str, str],
    *,
    label: str | Sequence[str] = (),
    classes: Sequence[str] = (),
    key: str | None = None,
    progress: Progress | None = None,
    **options: Unpack[Packing],
) -> Index:
    """Pack data sets of one length from an HDF5 or PyTables file: fields={"image": "/train/images", "cls": "/train/labels"}."""
    labels = [label] if isinstance(label, str) else list(label)
    source = stream_hdf5(
        os.fspath(file),
        fields,
        labels=labels,
        classes=classes,
        key=key,
        quality=_of_pixels(options),
    )
    return _packed(source, out, options, progress)


def pack_arrays(
    arrays: Mapping[str, Any],
    out: str | os.PathLike[str],
    *,
    label: str | Sequence[str] = (),
    classes: Sequence[str] = (),
    progress: Progress | None = None,
    **options: Unpack[Packing],
) -> Index:
    """Pack rows of arrays of one length: in memory, .npy files (memory-mapped), or FILE.npz:member."""
    labels = [label] if isinstance(label, str) else list(label)
    source = stream_arrays(arrays, labels=labels, classes=classes, quality=_of_pixels(options))
    return _packed(source, out, options, progress)


def pack_tars(
    urls: Urls,
    out: str | os.PathLike[str],
    *,
    keep: Sequence[str] = (),
    drop: Sequence[str] = (),
    rename: Mapping[str, str] | None = None,
    select: str | None = None,
    keys: str | None = None,
    where: str | None = None,
    label: str | None = None,
    classes: Sequence[str] | None = None,
    progress: Progress | None = None,
    **options: Unpack[Packing],
) -> Index:
    """Pack the samples of existing shards anew: other sizes, another order, merged, split, filtered, with fewer fields.

    Into the folder they lie in, with overwrite=True, if all of its shards are among them.
    """
    urls, out = urls if isinstance(urls, (str, os.PathLike)) else list(urls), os.fspath(out)
    chosen = TarOptions(
        keep=keep,
        drop=drop,
        rename=rename,
        select=select,
        keys=keys,
        where=where,
        label=label,
        classes=classes,
    )
    done = resumed_in_place(out, stated(urls, out, chosen), Options(**options), progress)
    if done is not None:
        return done.index
    source = stream_tars(urls, chosen, out=out)
    return _packed(source, out, options, progress)


def pack_torchvision(
    name: str,
    out: str | os.PathLike[str],
    root: str,
    *,
    splits: Sequence[str] = (),
    progress: Progress | None = None,
    **options: Unpack[Packing],
) -> Index:
    """Pack a torchvision data set by the name of its class, from files that are in `root` already."""
    return _packed(stream_torchvision(name, root, splits=splits), out, options, progress)


def _of_pixels(options: Packing) -> int:
    """The quality of JPEGs made of pixels: hardly any loss where all are encoded once more."""
    return 95 if options.get("quality") is None else 100


def _packed(
    source: Source, out: str | os.PathLike[str], options: Packing, progress: Progress | None
) -> Index:
    return convert(source, os.fspath(out), Options(**options), progress).index
