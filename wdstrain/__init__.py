"""wdstrain: train from WebDataset tar shards, in one exact order, with purely sequential reads.

import wdstrain as wt

loader = wt.Loader("shards/train-*.tar", {"image": wt.image(size=224, augment="rrc+flip"), "label": wt.label()})
for batch in wt.to_device(loader, "cuda"): ...
"""

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
    from wdstrain.packing.doors import pack, pack_arrays, pack_folder, pack_hdf5, pack_table, pack_tars, pack_torchvision

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
    "stream",
    "text",
    "to_device",
    "to_example",
    "verify",
]


def __getattr__(name: str) -> Any:
    """The packing functions are imported when they are first used: who trains does not need them."""
    if name.startswith("pack") and name in __all__:
        from wdstrain.packing import doors

        return getattr(doors, name)
    raise AttributeError(f"module 'wdstrain' has no attribute '{name}'")
