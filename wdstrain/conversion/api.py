"""Conversion from Python: one function for each kind of source.

Their arguments are the fields of the option classes. Each function returns the index of the shards;
`index.info` says how many samples were listed, skipped and renamed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from wdstrain.conversion.labels import given_classes
from wdstrain.conversion.listing import Source
from wdstrain.conversion.options import (
    ArraysOptions,
    CocoOptions,
    FolderOptions,
    Hdf5Options,
    Options,
    PackOptions,
    TableOptions,
    TarsOptions,
    TorchvisionOptions,
    YoloOptions,
)
from wdstrain.conversion.runner import ConversionResult, convert
from wdstrain.conversion.sources.arrays import stream_arrays, stream_hdf5
from wdstrain.conversion.sources.boxes import list_coco, list_yolo
from wdstrain.conversion.sources.folder import list_folder
from wdstrain.conversion.sources.iterable import stream_samples, stream_torchvision
from wdstrain.conversion.sources.shards import stream_tars
from wdstrain.conversion.sources.table import open_table
from wdstrain.runtime.options import takes
from wdstrain.shards.index import Index

Note = Callable[[str], None]


@takes(PackOptions)
def pack(options: PackOptions) -> Index:
    """Pack any iterable of samples, or a torch data set, into shards.

        samples = ({"jpg": data, "cls": 3} for data in images)
        wt.pack(samples, "shards/mine", split={"train": 0.9, "val": 0.1})

    A sample is a dict of fields, or a tuple that `fields` names. Values are bytes, which are stored
    as they are, or images, numbers, texts and arrays, which are encoded by the name of the field:
    "png", "cls", "txt", "json", "x.npy". "__key__" names the sample. A class may be given by its
    name. The samples are read once and may be more than memory holds.
    """
    return run_conversion(options).index


@takes(FolderOptions)
def convert_folder(options: FolderOptions) -> Index:
    """Pack a folder of class folders, or all images below a folder, into shards."""
    return run_conversion(options).index


@takes(TableOptions)
def convert_table(options: TableOptions) -> Index:
    """Pack the rows of a table, or of a pandas DataFrame, into shards.

    Kinds of labels that were decided by the cells are in `index.info["source"]["decided"]`.
    """
    return run_conversion(options).index


@takes(Hdf5Options)
def convert_hdf5(options: Hdf5Options) -> Index:
    """Pack data sets of one length from an HDF5 or PyTables file into shards.

    wt.convert_hdf5("data.h5", "shards/data", {"image": "/train/images", "cls": "/train/labels"})
    """
    return run_conversion(options).index


@takes(ArraysOptions)
def convert_arrays(options: ArraysOptions) -> Index:
    """Pack the rows of arrays of one length into shards: in memory, .npy files, or FILE.npz:member.

    wt.convert_arrays({"png": "images.npy", "cls": labels}, "shards/data")
    """
    return run_conversion(options).index


@takes(TarsOptions)
def convert_tars(options: TarsOptions) -> Index:
    """Pack samples of existing shards again: resized, shuffled, merged, split, with fewer fields."""
    return run_conversion(options).index


@takes(TorchvisionOptions)
def convert_torchvision(options: TorchvisionOptions) -> Index:
    """Pack a torchvision data set, by the name of its class, into shards."""
    return run_conversion(options).index


@takes(CocoOptions)
def convert_coco(options: CocoOptions) -> Index:
    """Pack images with the boxes of an annotation file of COCO into shards.

    wt.convert_coco("instances_train.json", "train2017", "shards/coco")
    """
    return run_conversion(options).index


@takes(YoloOptions)
def convert_yolo(options: YoloOptions) -> Index:
    """Pack images with the boxes of a folder of YOLO into shards: images/, labels/ and data.yaml."""
    return run_conversion(options).index


def run_conversion(options: Any, note: Note = lambda text: None) -> ConversionResult:
    """Return the outcome of a conversion. note: is called with each decision about the source."""
    is_tars = isinstance(options, TarsOptions)
    source = stream_tars(options, note) if is_tars else _SOURCES[type(options)](options)
    for decision in source.source.get("decided", ()):
        note(decision)
    done = convert(source, os.fspath(options.out), options, options.progress)
    if options.resume and done.kept == len(done.index.shards):
        note(
            f"complete: all {len(done.index)} samples were packed before. What was added to the "
            f"source since then is packed by append or overwrite."
        )
    return done


def _folder(options: FolderOptions) -> Source:
    names = given_classes(options.classes, options.like if options.flat else _numbering(options))
    return list_folder(
        os.fspath(options.source),
        flat=options.flat,
        fixed=names,
        masks=None if options.masks is None else os.fspath(options.masks),
        mask_classes=options.mask_classes,
        ignore=options.ignore,
    )


def _table(options: TableOptions) -> Source:
    return open_table(replace(options, like=_numbering(options)))


def _numbering(options: FolderOptions | TableOptions) -> Any:
    """Return the set that numbers the classes: the one that samples are appended to."""
    appends = options.append and options.like is None and not options.classes
    return options.out if appends else options.like


_SOURCES: Mapping[type[Options], Callable[[Any], Source]] = {
    PackOptions: stream_samples,
    FolderOptions: _folder,
    TableOptions: _table,
    Hdf5Options: stream_hdf5,
    ArraysOptions: stream_arrays,
    TorchvisionOptions: stream_torchvision,
    CocoOptions: list_coco,
    YoloOptions: list_yolo,
}
