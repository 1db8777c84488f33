"""wdstrain: train from WebDataset tar shards, in one exact order, with purely sequential reads.

import wdstrain as wt

loader = wt.Loader("shards/train-*.tar", {"image": wt.image(size=224, augment="rrc+flip"), "label": wt.label()})
for batch in wt.to_device(loader, "cuda"): ...
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wdstrain.augmentation import Augmentation
    from wdstrain.benching import bench
    from wdstrain.device import to_device
    from wdstrain.errors import (
        PlanError,
        SampleError,
        ShardError,
        SourceError,
        StorageError,
        UsageError,
        WdstrainError,
    )
    from wdstrain.fields import Example, Field, array, image, json, label, number, text
    from wdstrain.foresight.doors import foresee
    from wdstrain.indexing import Index, Label, Shard
    from wdstrain.inspecting.doors import info
    from wdstrain.inspecting.facts import Info
    from wdstrain.loader import Loader
    from wdstrain.looking.doors import Peek, peek
    from wdstrain.measured import Bench
    from wdstrain.mixed import mix
    from wdstrain.opener import gopen
    from wdstrain.opening import make_index as index
    from wdstrain.packing.doors import pack, pack_arrays, pack_folder, pack_hdf5, pack_table, pack_tars, pack_torchvision
    from wdstrain.plan import Plan
    from wdstrain.streaming import Stream, stream, to_example
    from wdstrain.training.doors import evaluate, train
    from wdstrain.training.exporting import export
    from wdstrain.training.predicting import predict
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


_WHERE = {
    "augmentation": "Augmentation",
    "benching": "bench",
    "device": "to_device",
    "errors": "PlanError SampleError ShardError SourceError StorageError UsageError WdstrainError",
    "fields": "Example Field array image json label number text",
    "foresight.doors": "foresee",
    "indexing": "Index Label Shard",
    "inspecting.doors": "info",
    "inspecting.facts": "Info",
    "loader": "Loader",
    "looking.doors": "Peek peek",
    "measured": "Bench",
    "mixed": "mix",
    "opener": "gopen",
    "packing.doors": "pack pack_arrays pack_folder pack_hdf5 pack_table pack_tars pack_torchvision",
    "plan": "Plan",
    "streaming": "Stream stream to_example",
    "training.doors": "evaluate train",
    "training.exporting": "export",
    "training.predicting": "predict",
    "verifying.doors": "Verification verify",
    "verifying.repairing": "Repair repair",
}
_MODULE = {name: module for module, names in _WHERE.items() for name in names.split()} | {"index": "opening"}


def __getattr__(name: str) -> Any:
    """What a name stands for is imported when it is first used: a command that needs no torch does not wait for it."""
    if name not in _MODULE:
        raise AttributeError(f"module 'wdstrain' has no attribute '{name}'")
    found = getattr(import_module(f"wdstrain.{_MODULE[name]}"), "make_index" if name == "index" else name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
