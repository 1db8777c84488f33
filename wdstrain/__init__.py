"""wdstrain: train from WebDataset tar shards, in one exact order, with purely sequential reads.

import wdstrain as wt

loader = wt.Loader("shards/train-*.tar", {"image": wt.image(size=224, augment="rrc+flip"), "label": wt.label()})
for batch in wt.to_device(loader, "cuda"): ...
"""

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
from wdstrain.opening import make_index as index
from wdstrain.plan import Plan
from wdstrain.streaming import Stream, stream, to_example
from wdstrain.verifying import Verification, verify

__version__ = "0.1.0"

__all__ = [
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
    "image",
    "index",
    "json",
    "label",
    "mix",
    "number",
    "stream",
    "text",
    "to_device",
    "to_example",
    "verify",
]
