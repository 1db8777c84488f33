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
from wdstrain.verifying import Verification, verify

if TYPE_CHECKING:
    from wdstrain.foresight import foresee
    from wdstrain.packing.doors import pack, pack_arrays, pack_folder, pack_hdf5, pack_table, pack_tars, pack_torchvision
    from wdstrain.training.doors import evaluate, train
    from wdstrain.training.exporting import export
    from wdstrain.training.predicting import predict

__version__ = "0.1.0"

__all__ = [
    "Augmentation",
    "Example",
    "Field",
    "Index",
    "Label",
    "Loader",
    "Plan",
    "PlanError",
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
    "evaluate",
    "export",
    "foresee",
    "gopen",
    "image",
    "index",
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
    "predict",
    "stream",
    "text",
    "to_device",
    "to_example",
    "train",
    "verify",
]


_LATER = {
    "foresee": "foresight",
    "train": "training.doors",
    "evaluate": "training.doors",
    "predict": "training.predicting",
    "export": "training.exporting",
}


def __getattr__(name: str) -> Any:
    """What packs, trains and foresees is imported when it is first used: who writes his own loop needs neither."""
    module = "packing.doors" if name.startswith("pack") else _LATER.get(name)
    if module is not None and name in __all__:
        return getattr(import_module(f"wdstrain.{module}"), name)
    raise AttributeError(f"module 'wdstrain' has no attribute '{name}'")
