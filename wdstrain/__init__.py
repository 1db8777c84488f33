"""wdstrain: train from WebDataset tar shards, in one exact order, with purely sequential reads.

import wdstrain as wt

loader = wt.Loader("shards/train-*.tar", {"image": wt.image(size=224, augment="rrc+flip"), "label": wt.label()})
for batch in wt.to_device(loader, "cuda"): ...
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wdstrain.decode.fields import Example, Field, array, image, json, text
    from wdstrain.decode.label_fields import label, number
    from wdstrain.errors import (
        PlanError,
        SampleError,
        ShardError,
        SourceError,
        StorageError,
        UsageError,
        WdstrainError,
    )
    from wdstrain.foresight.doors import foresee
    from wdstrain.inspecting.doors import info
    from wdstrain.inspecting.facts import Info
    from wdstrain.loader.device import to_device
    from wdstrain.loader.gpu_augment import Augmentation
    from wdstrain.loader.loader import Loader
    from wdstrain.loader.mixture import mix
    from wdstrain.loader.stream import Stream, stream
    from wdstrain.loader.to_example import to_example
    from wdstrain.loader.webdataset import WebDataset
    from wdstrain.looking.doors import Peek, peek
    from wdstrain.order.plan import Plan
    from wdstrain.packing.doors import (
        pack,
        pack_arrays,
        pack_folder,
        pack_hdf5,
        pack_table,
        pack_tars,
        pack_torchvision,
    )
    from wdstrain.shards.index import Index, Label, Shard
    from wdstrain.shards.resolve import make_index as index
    from wdstrain.shards.resolve import open_index as open
    from wdstrain.storage.file_object import gopen
    from wdstrain.training.doors import evaluate, train
    from wdstrain.training.exporting import export
    from wdstrain.training.predicting import predict
    from wdstrain.tuning.bench import bench
    from wdstrain.tuning.result import Bench
    from wdstrain.verifying.doors import Verification, verify
    from wdstrain.verifying.repairing import Repair, repair

__version__ = "0.1.0"

__all__ = [
    "Augmentation",
    "Bench",
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
    "evaluate",
    "export",
    "foresee",
    "gopen",
    "image",
    "index",
    "info",
    "json",
    "label",
    "mix",
    "number",
    "open",
    "pack",
    "pack_arrays",
    "pack_folder",
    "pack_hdf5",
    "pack_table",
    "pack_tars",
    "pack_torchvision",
    "peek",
    "predict",
    "repair",
    "stream",
    "text",
    "to_device",
    "to_example",
    "train",
    "verify",
]


_NAMES = {
    "decode.fields": "Example Field array image json text",
    "decode.label_fields": "label number",
    "errors": "PlanError SampleError ShardError SourceError StorageError UsageError WdstrainError",
    "foresight.doors": "foresee",
    "inspecting.doors": "info",
    "inspecting.facts": "Info",
    "loader.device": "to_device",
    "loader.gpu_augment": "Augmentation",
    "loader.loader": "Loader",
    "loader.mixture": "mix",
    "loader.stream": "Stream stream",
    "loader.to_example": "to_example",
    "loader.webdataset": "WebDataset",
    "looking.doors": "Peek peek",
    "order.plan": "Plan",
    "packing.doors": "pack pack_arrays pack_folder pack_hdf5 pack_table pack_tars pack_torchvision",
    "shards.index": "Index Label Shard",
    "storage.file_object": "gopen",
    "training.doors": "evaluate train",
    "training.exporting": "export",
    "training.predicting": "predict",
    "tuning.bench": "bench",
    "tuning.result": "Bench",
    "verifying.doors": "Verification verify",
    "verifying.repairing": "Repair repair",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()} | {
    "index": "shards.resolve",
    "open": "shards.resolve",
}
_OWN_NAMES = {"index": "make_index", "open": "open_index"}


def __getattr__(name: str) -> Any:
    """What a name stands for is imported when it is first used: a command that needs no torch does not wait for it."""
    if name not in _MODULES:
        raise AttributeError(f"module 'wdstrain' has no attribute '{name}'")
    found = getattr(import_module(f"wdstrain.{_MODULES[name]}"), _OWN_NAMES.get(name, name))
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
