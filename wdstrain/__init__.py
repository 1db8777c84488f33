"""wdstrain: train from WebDataset tar shards, in one exact order, with purely sequential reads.

import wdstrain as wt

loader = wt.Loader("shards/train-*.tar", {"image": wt.image(size=224, augment="rrc+flip"), "label": wt.label()})
for batch in wt.to_device(loader, "cuda"): ...
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from wdstrain.augmentation import Augmentation
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
from wdstrain.indexing import Index, Label, Shard
from wdstrain.loader import Loader
from wdstrain.mixed import mix
from wdstrain.opener import gopen
from wdstrain.opening import make_index as index
from wdstrain.plan import Plan
from wdstrain.streaming import Stream, stream, to_example

if TYPE_CHECKING:
    from wdstrain.benching import bench
    from wdstrain.foresight.doors import foresee
    from wdstrain.inspecting.doors import info
    from wdstrain.inspecting.facts import Info
    from wdstrain.looking.doors import Peek, peek
    from wdstrain.measured import Bench
    from wdstrain.packing.doors import pack, pack_arrays, pack_folder, pack_hdf5, pack_table, pack_tars, pack_torchvision
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


_LATER = {
    "Bench": "measured",
    "bench": "benching",
    "info": "inspecting.doors",
    "Info": "inspecting.facts",
    "peek": "looking.doors",
    "Peek": "looking.doors",
    "foresee": "foresight.doors",
    "train": "training.doors",
    "evaluate": "training.doors",
    "predict": "training.predicting",
    "export": "training.exporting",
    "verify": "verifying.doors",
    "Verification": "verifying.doors",
    "repair": "verifying.repairing",
    "Repair": "verifying.repairing",
}


def __getattr__(name: str) -> Any:
    """What packs, shows, foresees and trains is imported when it is first used: who writes his own loop needs none of it."""
    module = "packing.doors" if name.startswith("pack") else _LATER.get(name)
    if module is not None and name in __all__:
        return getattr(import_module(f"wdstrain.{module}"), name)
    raise AttributeError(f"module 'wdstrain' has no attribute '{name}'")
