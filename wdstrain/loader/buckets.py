"""Buckets of a loader: which samples may share a batch, and how many of them a batch holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from wdstrain.decode.boxes import Boxes
from wdstrain.decode.fields import Field, Image, Mask
from wdstrain.decode.transforms import Size, nearest_size
from wdstrain.errors import UsageError
from wdstrain.loader.options import LoaderOptions
from wdstrain.report.printing import counted
from wdstrain.shards.formats import EXTENSIONS, SIDES
from wdstrain.shards.index import Index
from wdstrain.shards.offsets import Ints
from wdstrain.shards.selection import group_codes
from wdstrain.shards.where import column_named, complete_values

_MOST = 1000  # buckets; each leaves out a part of a batch


class Bucketing(NamedTuple):
    """The buckets of a loader, as `Buckets` takes them: codes, names, and samples from each lane.

    sizes: of images, by bucket, if the buckets are shapes of images.
    """

    codes: Ints
    names: Sequence[str]
    per_lane: Ints
    sizes: tuple[Size, ...] = ()


def bucketing(index: Index, options: LoaderOptions) -> Bucketing:
    """Return the buckets that the options of a loader give the samples of an index.

    Raises UsageError for options that do not fit the index.
    """
    lanes = max(1, (options.lanes or options.world_size) // options.world_size)  # of a rank
    if options.pixels is not None:
        shapes = _shapes(index, options.fields or {})
        codes, sizes = _by_shape(shapes, options.pixels, options.batch_size * options.world_size)
        names = [f"{height} x {width}" for height, width in sizes]
        return Bucketing(codes, names, np.full(len(sizes), options.batch_size // lanes), sizes)
    if isinstance(options.buckets, Mapping):
        ((column, edges),) = options.buckets.items()
        codes, used = _between(complete_values(index, column, "buckets"), list(edges), index)
        names = [f"{column} <= {edge:g}" for edge in used]
        return Bucketing(codes, names, np.array([_per_lane(edge, options, lanes) for edge in used]))
    column = str(options.buckets)
    if column == "aspect" and column_named(index, column) is None:
        raise UsageError(
            "buckets of shapes need the largest area of a shape.",
            "Give also {pixels}.",
            {"pixels": 512 * 512},
            option="buckets",
            value=column,
        )
    values, codes = complete_values(index, column, "buckets"), group_codes(index, column)
    first = np.unique(codes, return_index=True)[1]
    if len(first) > _MOST:
        raise UsageError(
            f"the column has {len(first)} values, and each would be a bucket; {_MOST} is the limit.",
            "Give the largest value of each bucket: {buckets}",
            {"buckets": {column: [64, 128, 256]}},
        )
    names = [f"{column} {value}" for value in values.take(pa.array(first)).to_pylist()]
    return Bucketing(codes, names, np.full(len(first), options.batch_size // lanes))


def sized(field: Field, bucketing: Bucketing | None) -> Any:
    """Return an image, mask or boxes of size="bucket" with the sizes of the buckets; else the field.

    Raises UsageError if there are none.
    """
    if isinstance(field, Boxes):
        return replace(field, image=sized(field.image, bucketing))
    if not isinstance(field, (Image, Mask)) or field.sizes is None:
        return field
    if bucketing is None or not bucketing.sizes:
        raise UsageError(
            'size="bucket" is the size of the shape that all images of a batch have.',
            "Give the loader {buckets} and {pixels}.",
            {"buckets": "aspect", "pixels": 256 * 256},
        )
    return replace(field, sizes=bucketing.sizes)


def _shapes(index: Index, fields: Mapping[str, Field]) -> npt.NDArray[np.float64]:
    """Return width / height of the image of each sample, from the columns of the index."""
    own = [field.image if isinstance(field, Boxes) else field for field in fields.values()]
    images = [field for field in own if isinstance(field, Image)]
    images.sort(key=lambda image: image.sizes is None)  # those of size="bucket" first
    names = [name for name in (images[0].names if images else EXTENSIONS) if name in index.fields]
    places = {column.place: column for column in index.columns}
    wanted = [f"{name}.{side}" for name in names for side in SIDES]
    if not wanted or not {(name, side) for name in names for side in SIDES} <= places.keys():
        raise UsageError(
            "the sizes of the images are no columns of this index yet.",
            f"Run: wdstrain index FOLDER --columns {','.join(wanted) or 'jpg.width,jpg.height'}",
            option="buckets",
            value="aspect",
        )
    # A sample is read from the first of these fields that it has.
    sides = [pc.coalesce(*(places[name, side].values for name in names)) for side in SIDES]
    unknown = np.flatnonzero(pc.is_null(pc.add(*sides))).tolist()
    if unknown:
        raise UsageError(
            f"{len(unknown)} samples have no size, the first of them {index.key(unknown[0])!r}.",
            "Leave them out with {where}.",
            {"where": ...},
            option="buckets",
            value="aspect",
        )
    width, height = (np.asarray(side, np.float64) for side in sides)
    return np.asarray(width / height)


def _by_shape(
    shapes: npt.NDArray[np.float64], pixels: int, least: int
) -> tuple[Ints, tuple[Size, ...]]:
    """Return the bucket of each image, and the (height, width) of the buckets.

    No size has more than `pixels`. Sizes are 1:4 to 4:1, with sides that are multiples of about a
    sixteenth of the side of the square. A size that fewer than `least` images have is not used.
    """
    step = max(1, round(pixels**0.5 / 16 / 8) * 8 or round(pixels**0.5 / 16))
    side = round(pixels**0.5 / step)
    narrow = [
        (pixels // width // step * step, width)
        for width in range(-(-side // 2) * step, side * step + 1, step)
    ]
    sizes = sorted({*narrow, *((w, h) for h, w in narrow)}, key=lambda size: size[1] / size[0])
    while True:
        codes = nearest_size(shapes, sizes)
        counts = np.bincount(codes, minlength=len(sizes))
        if counts.min() >= least or len(sizes) == 1:
            return codes.astype(np.int64), tuple(sizes)
        del sizes[int(counts.argmin())]


def _between(values: pa.Array, edges: list[Any], index: Index) -> tuple[Ints, list[float]]:
    """Return the bucket of each sample, and the edges of the buckets that have samples."""
    if not (pa.types.is_integer(values.type) or pa.types.is_floating(values.type)):
        raise UsageError(
            f"edges need a column of numbers; this one holds {values.type}.",
            "Give the name of the column alone, so that each value is a bucket.",
            option="buckets",
            value=edges,
        )
    numbers = np.asarray(values, np.float64)
    codes = np.searchsorted(np.array(edges, np.float64), numbers, side="left")
    above = np.flatnonzero((codes == len(edges)) | np.isnan(numbers)).tolist()
    if above:
        raise UsageError(
            f"{len(above)} samples are above the last edge {edges[-1]:g}, the first of them "
            f"{index.key(above[0])!r} with {numbers[above[0]]:g}.",
            "Add a larger edge, or leave them out with {where}.",
            {"where": ...},
            option="buckets",
            value=edges,
        )
    used, codes = np.unique(codes, return_inverse=True)
    return codes.reshape(-1).astype(np.int64), [float(edges[bucket]) for bucket in used]


def _per_lane(edge: float, options: LoaderOptions, lanes: int) -> int:
    """Return the samples that a batch of a bucket takes from each of the lanes of a rank."""
    if options.budget is None or edge <= 0:
        return options.batch_size // lanes
    count = int(min(options.batch_size, options.budget // edge)) // lanes
    if count < 1:
        raise UsageError(
            f"a batch needs {counted(lanes, 'sample')} at least, of up to {edge:g} each.",
            "Raise it, or leave the long samples out with {where}.",
            {"where": ...},
            option="budget",
            value=options.budget,
        )
    return count
