"""Boxes of objects: read from JSON, moved with their image, and flat in a batch.

A member such as `boxes.json` holds the boxes of one image:

    {"boxes": [[x0, y0, x1, y1], ...], "labels": ["cat", ...]}

Coordinates are pixels of the upright image, which the loader delivers: x to the right, y down, and
pixel i covers [i, i + 1). A label is the name of a class, or its number. The decoder gives `Boxes`
the bytes of the image too, because crops depend on its size.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from wdstrain.decode import fields
from wdstrain.decode.codecs import (
    BOTTOM_ROW_FIRST,
    FIRST_TRANSPOSED,
    RIGHT_COLUMN_FIRST,
)
from wdstrain.decode.crops import RATIO, SCALE
from wdstrain.decode.transforms import Draws, region
from wdstrain.errors import SampleError, UsageError
from wdstrain.runtime.cached import cached_property
from wdstrain.runtime.options import is_number
from wdstrain.shards.formats import EXTENSIONS, header_of
from wdstrain.shards.index import Index
from wdstrain.shards.kinds import Array, parsed_json

if TYPE_CHECKING:
    from torch import Tensor

_MIN_SHARE = 0.25  # of the area of a box, that must remain
_LEAST_SIDE = 0.999  # pixels of a box that remains; rounding takes less than the rest
_MARGIN = 1.0  # pixels that a stored box may reach beyond its image


class BoxBatch(NamedTuple):
    """The boxes of the b images of a batch, one image after another.

    boxes: float32[n, 4], x0, y0, x1, y1 in pixels of the images of the batch. labels: class
    numbers, int64[n]. offsets: int64[b + 1]; image i has the boxes offsets[i] to offsets[i + 1] - 1.
    """

    boxes: Tensor
    labels: Tensor
    offsets: Tensor

    def targets(self, first_class: int = 0) -> list[dict[str, Tensor]]:
        """Return {"boxes": float32[k, 4], "labels": int64[k]} of each image.

        first_class: number of the first class. Detectors with a background class need 1.
        """
        return [
            {"boxes": self.boxes[start:stop], "labels": self.labels[start:stop] + first_class}
            for start, stop in pairwise(self.offsets.tolist())
        ]

    def moved(self, parts: Array, size: tuple[int, int]) -> BoxBatch:
        """Return the boxes after a crop, a resize and a flip of each image. A GPU waits for them.

        parts: int64[b, 5], see `followed`. size: height and width of the new images.
        """
        boxes, labels, offsets = (tensor.cpu().numpy() for tensor in self)
        boxes, remain = followed(boxes, np.repeat(parts, np.diff(offsets), 0), size, _MIN_SHARE)
        made = boxes, labels[remain], np.cumsum([0, *remain])[offsets]
        return BoxBatch(*(old.new_tensor(new) for old, new in zip(self, made, strict=True)))


def flattened(rows: Sequence[dict[str, Array] | None]) -> tuple[Array, ...]:
    """Return the three arrays of a `BoxBatch`. rows: of `Boxes.read`; None: no boxes."""
    none: dict[str, Array] = {
        "boxes": np.zeros((0, 4), np.float32),
        "labels": np.zeros(0, np.int64),
    }
    return (
        *(np.concatenate([(row or none)[name] for row in rows]) for name in none),
        np.cumsum([0, *(len((row or none)["labels"]) for row in rows)]),
    )


@dataclass(frozen=True)
class Boxes:
    """Field of `boxes`. image: field of the image that the boxes follow.

    classes: names in the order of the delivered numbers. stored: in that of the numbers in the
    shards, if it differs. column: the joined column that holds the boxes; "": the shards do.
    """

    names: tuple[str, ...]
    image: fields.Image
    min_share: float
    classes: tuple[str, ...] = ()
    stored: tuple[str, ...] = ()
    example: None = None
    column: str = ""

    def read(
        self,
        name: str,
        data: bytes | memoryview,
        out: Array | None,
        draws: Draws,
        picture: bytes | memoryview | None = None,
    ) -> dict[str, Array]:
        """Return {"boxes": float32[k, 4], "labels": int64[k]}. picture: bytes of the image."""
        if not picture:
            raise SampleError(f"it has no image for its boxes ({', '.join(self.image.names)})")
        boxes, labels = parsed_boxes(data)
        (width, height), size, augment = (
            header_of(picture).size,
            self.image.size,
            self.image.augment,
        )
        part = region(height, width, size, augment, draws) if size else (0, 0, height, width)
        moved, remain = followed(
            *(boxes, np.array([[*part, augment.mirrors(draws)]])),
            *(size or (height, width), self.min_share),
        )
        return {
            "boxes": moved,
            "labels": np.array(list(map(self.number, labels)), np.int64)[remain],
        }

    def picture_in(self, sample: Mapping[str, Any]) -> Any:
        """Return the bytes of the image in a sample, by field; None without an image."""
        return next((sample[name] for name in self.image.names if name in sample), None)

    def check(self, sample: Mapping[str, bytes]) -> None:
        """Raise SampleError for boxes beyond their image, and for unknown classes."""
        picture = self.picture_in(sample)
        if picture is None:
            raise SampleError(f"it has no image for its boxes ({', '.join(self.image.names)})")
        member = fitted(sample[self.names[0]], picture)
        list(map(self.number, parsed_boxes(member)[1]))

    def number(self, label: Any) -> int:
        """Return the delivered number of a stored class. Raises SampleError if it is none."""
        known = self._numbers if isinstance(label, (str, int)) else dict[Any, int | None]()
        number = known.get(label) if self.classes else label
        if not isinstance(number, int) or number < 0:
            how = (
                "wt.boxes(..., classes=[...])"
                if self.column
                else "wdstrain index FOLDER --label boxes.json"
            )
            hint = "" if self.classes else f". Name them: {how}"
            raise SampleError(f"{label!r:.80} is none of the {len(self.classes)} classes{hint}")
        return number

    @cached_property
    def _numbers(self) -> dict[Any, int | None]:
        """Delivered numbers by name and by stored number."""
        named: dict[Any, int | None] = {name: n for n, name in enumerate(self.classes)}
        return named | {n: named.get(name) for n, name in enumerate(self.stored or self.classes)}

    def of_index(self, index: Index) -> Boxes:
        """Return the field with the joined column or the classes that an index has for it.

        Raises UsageError for sets that number their classes differently.
        """
        texts = (column for column in index.columns if column.is_joined and column.kind == "text")
        for column in texts:
            if f"{column.name.lower()}.json" in self.names:
                return replace(self, column=column.name, names=("",))
        labels = (*index.labels, *index.differing, None)
        label = next(
            own for own in labels if not own or (own.kind == "boxes" and own.field in self.names)
        )
        if label in index.differing:
            raise UsageError(
                f"{index.differing[label]}.",
                "If boxes have names of classes, declare all classes for each set: "
                f"wdstrain index SET --label {self.names[0]} --classes A,B,...",
            )
        known = label.classes if label else ()
        return replace(self, classes=self.classes or known, stored=known)


def boxes(
    names: str = "boxes",
    *,
    size: int | tuple[int, int] | None = None,
    augment: str | None = None,
    scale: tuple[float, float] = SCALE,
    ratio: tuple[float, float] = RATIO,
    crop_pct: float = 1.0,
    classes: tuple[str, ...] | list[str] = (),
    min_share: float = _MIN_SHARE,
    image: str | None = None,
) -> Boxes:
    """Return a field of boxes of objects, for detectors.

    The batch holds a tuple with `boxes`, float32[n, 4] (x0, y0, x1, y1) in pixels of the delivered
    images, `labels`, int64[n] class numbers, and `offsets`, int64[b + 1] of the images in them. Its
    method `targets()` returns the list of {"boxes", "labels"} that detectors of torchvision take.

    names: joined columns or tar fields to look for, separated by ";"; `boxes` means the column
    `boxes`, else the field `boxes.json`. They hold {"boxes": [[x0, y0, x1, y1], ...],
    "labels": [...]} in pixels of the upright image, with names or numbers of classes.
    size, augment, scale, ratio, crop_pct: the same as for the image. Boxes get the same crop,
    resize and flip. "trivialaugment" and "randaugment" also rotate and shear, so they are refused.
    classes: names in the order of the delivered numbers; default: those that the index names.
    min_share: boxes are clipped to the image. A box of which less than this share of its area or
    less than a pixel in width or height remains is left out.
    image: tar fields of the image, as for `wt.image`; default: every supported image format, for
    `left.boxes` left.jpg and so on. It is read even if only boxes are wanted.

        size, augment = 512, "rrc+flip"
        fields = {"image": wt.image(size=size, augment=augment), "boxes": wt.boxes(size=size, augment=augment)}
        targets = batch["boxes"].targets(first_class=1)
    """
    members = tuple(f"{name.removesuffix('.json')}.json" for name in fields.field_names(names))
    before, dot, _ = members[0].removesuffix(".json").rpartition(".")
    if image is None:
        image = ";".join(f"{before}{dot}{extension}" for extension in EXTENSIONS)
    like = fields.image(
        image, size=size, augment=augment, scale=scale, ratio=ratio, crop_pct=crop_pct
    )
    fields.check_can_follow(like, "boxes")
    if not (is_number(min_share) and 0 <= min_share <= 1):
        raise UsageError("must be in 0 to 1.", option="min_share", value=min_share)
    if len({*classes}) < len(classes):
        raise UsageError("must be different names.", option="classes", value=classes)
    return Boxes(members, like, min_share, tuple(classes))


def needed_names(field: fields.Field) -> tuple[str, ...]:
    """Return the tar fields that a field reads: its own, and those of the image that boxes follow."""
    if not isinstance(field, Boxes):
        return field.names
    return field.image.names if field.column else (*field.names, *field.image.names)


# --- values ---------------------------------------------------------------------------------------


def parsed_boxes(data: bytes | memoryview) -> tuple[Array, list[Any]]:
    """Return (boxes, labels) of a member. Raises SampleError for another form."""
    entries = document if isinstance(document := parsed_json(bytes(data)), dict) else {}
    boxes, labels = map(entries.get, ("boxes", "labels"))
    if not isinstance(boxes, list) or not isinstance(labels, list) or len(boxes) != len(labels):
        raise SampleError(
            'boxes must be stored as {"boxes": [[x0, y0, x1, y1], ...], "labels": [...]}, with as '
            f"many labels as boxes, and here is {document!r:.80}"
        )
    for box in boxes:
        if not are_four_numbers(box) or box[0] >= box[2] or box[1] >= box[3]:
            raise SampleError(
                f"its box {box!r:.80} must be four finite numbers [x0, y0, x1, y1] with x0 < x1 and "
                "y0 < y1"
            )
    return np.array(boxes, np.float64).reshape(-1, 4), labels


def are_four_numbers(values: Any) -> bool:
    """Return whether a value is a list of four finite numbers."""
    return (
        isinstance(values, list)
        and len(values) == 4
        and all(type(value) in (int, float) and math.isfinite(value) for value in values)
    )


def fitted(
    data: bytes,
    picture: bytes,
    resized: Callable[[tuple[int, int]], tuple[int, int]] = lambda size: size,
) -> bytes:
    """Return a member for a resized image. Raises SampleError for one that does not fit the image.

    resized: returns the size that an upright image of a size gets.
    """
    (boxes, labels), size = parsed_boxes(data), header_of(picture).size
    wrong = (boxes.min(1, initial=0) < -_MARGIN) | (boxes > np.tile(size, 2) + _MARGIN).any(1)
    if wrong.any():
        raise SampleError(
            f"its box {boxes[wrong][0].tolist()} reaches beyond its upright image of {size[0]} x "
            f"{size[1]} pixels"
        )
    made = (boxes * np.tile(np.divide(resized(size), size), 2)).tolist()
    return data if resized(size) == size else json.dumps({"boxes": made, "labels": labels}).encode()


def followed(
    boxes: Array, parts: Array, size: tuple[int, int], min_share: float
) -> tuple[Array, Array]:
    """Return the boxes that remain after a crop, a resize and a flip (see `boxes`), and which do.

    boxes: [n, 4]. parts: [n, 5], or [1, 5] for all: top, left, height and width of the crop, and
    whether it is flipped. size: height and width to which it is resized.
    """
    ends, (top, left, height, width, flipped) = size[::-1], parts.T
    scale = np.array(ends) / np.stack([width, height], 1)
    corners = (boxes.reshape(-1, 2, 2) - np.stack([left, top], 1)[:, None]) * scale[:, None]
    mirrored = ends[0] - corners[:, ::-1, 0]
    corners[:, :, 0] = np.where(flipped[:, None], mirrored, corners[:, :, 0])
    kept = corners.clip(0, ends)
    sides, before = np.diff(kept, axis=1)[:, 0], np.diff(corners, axis=1)[:, 0]
    remain = (sides >= _LEAST_SIDE).all(1) & (sides.prod(1) >= min_share * before.prod(1))
    return kept.reshape(-1, 4)[remain].astype(np.float32), remain


def upright_boxes(boxes: Array, stored: tuple[int, int], orientation: int) -> Array:
    """Return boxes of a stored image as boxes of the upright image. orientation: as EXIF has it."""
    is_mirrored = orientation in RIGHT_COLUMN_FIRST, orientation in BOTTOM_ROW_FIRST
    corners, order = boxes.reshape(-1, 2, 2), -1 if orientation >= FIRST_TRANSPOSED else 1
    return np.where(is_mirrored, stored - corners[:, ::-1], corners)[..., ::order].reshape(-1, 4)
