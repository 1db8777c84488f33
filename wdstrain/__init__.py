"""wdstrain: train from WebDataset tar shards, in one exact order, with purely sequential reads.

import wdstrain as wt

loader = wt.Loader("shards/train-*.tar", {"image": wt.image(size=224, augment="rrc+flip"), "label": wt.label()})
for batch in wt.to_device(loader, "cuda"): ...
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if sys.platform != "linux":
    raise ImportError(
        f"wdstrain does not run on {sys.platform}: it needs memfd and locks of Linux. Use WSL 2 or "
        "a Linux container."
    )

if TYPE_CHECKING:
    from wdstrain.augment.gpu import Augmentation
    from wdstrain.conversion.api import (
        convert_arrays,
        convert_coco,
        convert_folder,
        convert_hdf5,
        convert_table,
        convert_tars,
        convert_torchvision,
        convert_yolo,
        pack,
    )
    from wdstrain.conversion.changes import join, remove
    from wdstrain.decode.boxes import boxes
    from wdstrain.decode.fields import Example, Field, array, image, json, mask
    from wdstrain.decode.labels import label, number, text
    from wdstrain.errors import (
        PlanError,
        SampleError,
        ShardError,
        SourceError,
        StorageError,
        UsageError,
        WdstrainError,
    )
    from wdstrain.inspection.info import Info, info
    from wdstrain.inspection.plan import plan_epoch
    from wdstrain.inspection.repair import Repair, repair
    from wdstrain.inspection.show import Peek, peek
    from wdstrain.inspection.verify import Verification, verify
    from wdstrain.loader.device import to_device
    from wdstrain.loader.loader import Loader
    from wdstrain.loader.mixture import mix
    from wdstrain.order.plan import Plan
    from wdstrain.shards.declare import index
    from wdstrain.shards.index import Index, Shard
    from wdstrain.shards.kinds import ColumnInfo as Label
    from wdstrain.shards.resolve import open_index as open
    from wdstrain.storage.remote import gopen, renew_addresses
    from wdstrain.training.evaluate import evaluate, export, predict
    from wdstrain.training.train import Callback, train
    from wdstrain.tuning.bench import Bench, bench
    from wdstrain.webdataset.compat import WebDataset
    from wdstrain.webdataset.stream import Stream, stream, to_example

__version__ = "0.1.0"

__all__ = [
    "Augmentation",
    "Bench",
    "Callback",
    "Example",
    "Field",
    "Index",
    "Info",
    "Label",
    "Loader",
    "Peek",
    "Plan",
    "PlanError",
    "Repair",
    "SampleError",
    "Shard",
    "ShardError",
    "SourceError",
    "StorageError",
    "Stream",
    "UsageError",
    "Verification",
    "WdstrainError",
    "WebDataset",
    "array",
    "bench",
    "boxes",
    "convert_arrays",
    "convert_coco",
    "convert_folder",
    "convert_hdf5",
    "convert_table",
    "convert_tars",
    "convert_torchvision",
    "convert_yolo",
    "evaluate",
    "export",
    "gopen",
    "image",
    "index",
    "info",
    "join",
    "json",
    "label",
    "mask",
    "mix",
    "number",
    "open",
    "pack",
    "peek",
    "plan_epoch",
    "predict",
    "remove",
    "renew_addresses",
    "repair",
    "stream",
    "text",
    "to_device",
    "to_example",
    "train",
    "verify",
]


_NAMES = {
    "conversion.api": "pack convert_arrays convert_coco convert_folder convert_hdf5 convert_table "
    "convert_tars convert_torchvision convert_yolo",
    "conversion.changes": "join remove",
    "decode.boxes": "boxes",
    "decode.fields": "Example Field array image json mask",
    "decode.labels": "label number text",
    "errors": "PlanError SampleError ShardError SourceError StorageError UsageError WdstrainError",
    "inspection.plan": "plan_epoch",
    "inspection.info": "Info info",
    "inspection.repair": "Repair repair",
    "inspection.show": "Peek peek",
    "inspection.verify": "Verification verify",
    "loader.device": "to_device",
    "augment.gpu": "Augmentation",
    "loader.loader": "Loader",
    "loader.mixture": "mix",
    "webdataset.stream": "Stream stream to_example",
    "webdataset.compat": "WebDataset",
    "order.plan": "Plan",
    "shards.index": "Index Shard",
    "shards.kinds": "Label",
    "storage.remote": "gopen renew_addresses",
    "training.evaluate": "evaluate export predict",
    "training.train": "Callback train",
    "tuning.bench": "Bench bench",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()} | {
    "index": "shards.declare",
    "open": "shards.resolve",
}
_OWN_NAMES = {"Label": "ColumnInfo", "open": "open_index"}


def __getattr__(name: str) -> Any:
    """Return a public object. It is imported now, so that importing wdstrain does not import torch."""
    if name not in _MODULES:
        raise AttributeError(f"module 'wdstrain' has no attribute '{name}'")
    value = getattr(import_module(f"wdstrain.{_MODULES[name]}"), _OWN_NAMES.get(name, name))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
