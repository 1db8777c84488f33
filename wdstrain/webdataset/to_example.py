"""A function from webdataset's samples of bytes to examples, by fields.

pipeline = wds.DataPipeline(wds.SimpleShardList(urls), wds.tarfile_to_samples(), wds.map(wt.to_example(fields)))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from wdstrain.decode.fields import Field, read_field
from wdstrain.decode.labels import with_classes
from wdstrain.decode.transforms import DRAWS
from wdstrain.errors import SampleError
from wdstrain.order.rng import key, uniform
from wdstrain.runtime.options import integer


def to_example(
    fields: Mapping[str, Field], *, seed: int = 0
) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Return a function from a sample of bytes to an example: arrays and values by field name.

    Random augmentation depends on seed, epoch and key for samples of `wt.stream`, which name their
    epoch; for others on numpy's global generator. Raises SampleError naming shard, key and field.
    """
    with_names = {name: with_classes(field, None) for name, field in fields.items()}
    return partial(_example, fields=with_names, seed=integer("seed", seed))


def _example(
    sample: Mapping[str, Any], *, fields: Mapping[str, Field], seed: int
) -> dict[str, Any]:
    if "__epoch__" in sample:
        number = np.array([key(sample["__key__"])], np.uint64)
        draws = uniform(number, DRAWS, "decode", seed, sample["__epoch__"])[0]
    else:  # the epoch is unknown; the worker's own generator moves on
        draws = np.random.random(DRAWS)
    draws.flags.writeable = False  # all fields of a sample have the same
    example: dict[str, Any] = {"__key__": sample["__key__"]}
    for name, field in fields.items():
        example[name] = read_sample(field, sample, draws)
    return example


def read_sample(field: Field, sample: Mapping[str, Any], draws: Any) -> Any:
    """Return the value of a field, from the bytes of one sample. Raises SampleError naming shard, key and field."""
    member = next((name for name in field.names if name in sample), None)
    if member is None:
        has = ", ".join(name for name in sample if not name.startswith("__"))
        raise SampleError(
            f"'{sample['__key__']}' has none of {', '.join(field.names)} (but {has})."
        )
    out = None
    if field.example is not None:
        out = np.empty(field.example.shape, field.example.dtype)
    try:
        value = read_field(field, member, memoryview(sample[member]), out, draws)
    except Exception as error:
        where = f"{sample.get('__url__', 'a shard')}: '{sample['__key__']}', field '{member}'"
        raise SampleError(f"{where}: {error}.") from error
    if out is None:
        return value
    planes = field.example is not None and field.example.channels_last
    return np.moveaxis(out, -1, 0) if planes else out
