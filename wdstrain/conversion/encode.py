"""Bytes of fields: made of Python values, and of images that are checked or encoded again.

Values become bytes by the name of the field (`encode`):

    jpg png webp ...   a PIL image, or uint8 pixels: [h, w], [h, w, c], or a tensor [c, h, w]
    cls                a whole number, or the name of a known class; stored as a number
    txt                text
    json               anything JSON can hold
    NAME.npy           an array, a tensor or a number (of shape ())
    any other          bytes, or text and numbers as text

Bytes are kept as they are, except for a cls whose classes are known. Values that only a pickle
could hold are refused: a shard is data, never code.

The first bytes of an image are compared with those of known formats. On request it is also decoded,
or downscaled (`Recipe`). Re-encoded images are upright (EXIF orientation applied) and 8-bit. JPEGs
stay JPEGs, others become PNG, or JPEG if a quality is given. Both are RGB or gray. Other images beside a photo (mask.png, or a png beside a jpg) may hold classes or depths: they
get its size without blending.
"""

from __future__ import annotations

import io
import json
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import simplejpeg
from PIL import Image, ImageOps

from wdstrain.conversion.listing import Part, each_once, field_name
from wdstrain.conversion.options import Check
from wdstrain.decode.boxes import boxes, fitted
from wdstrain.decode.codecs import decode_image, resize
from wdstrain.errors import SampleError, SourceError
from wdstrain.shards.declare import is_boxes, is_mask
from wdstrain.shards.formats import (
    BY_EXTENSION,
    EXTENSIONS,
    JPEG,
    format_of,
    header_of,
    is_image,
    open_picture,
)

_QUALITY = 90

Size = tuple[int, int]  # width and height
Raster = npt.NDArray[np.uint8]  # [h, w, c]

# --- values ---------------------------------------------------------------------------------------


class Pixels(NamedTuple):
    """An image that is not encoded yet. value: a copy, because the source may reuse its memory."""

    field: str
    value: npt.NDArray[Any] | Image.Image
    quality: int

    @property
    def size(self) -> int:
        """Bytes of the pixels, about."""
        value = self.value
        return value.nbytes if isinstance(value, np.ndarray) else 3 * value.width * value.height


def encoded_pixels(parts: Sequence[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Return the parts of a sample with bytes of images. Raises SampleError for pixels that do not fit."""
    return [(name, _image(*part) if isinstance(part, Pixels) else part) for name, part in parts]


def encode(
    name: str, value: Any, *, quality: int = 95, classes: Mapping[str, int] | None = None
) -> tuple[str, bytes | Pixels]:
    """Return (field, bytes) of a value, or (field, pixels) of an image that `encode_all` encodes.

    classes: the number of each class by its name, if known. Raises SampleError for a value that a
    field of this name cannot hold.
    """
    name = field_name(name)
    kind = name.rpartition(".")[2]
    try:
        return name, _encoded(name, kind, value, quality, classes or {})
    except SampleError:
        raise
    except Exception as error:  # the methods of a value may raise anything
        form = {"json": "JSON", "npy": "an array"}.get(kind, "UTF-8")
        raise SampleError(f"its {name} cannot be written as {form} ({error})") from None


def _encoded(
    name: str, kind: str, value: Any, quality: int, classes: Mapping[str, int]
) -> bytes | Pixels:
    if isinstance(value, (bytes, bytearray, memoryview)):
        if kind != "cls" or not classes:
            return bytes(value)
        text = bytes(value).decode("utf-8", "replace").strip()
        value = int(text) if text.isdecimal() and text not in classes else text
    if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
        raise SampleError(
            f"its {name} has masked values, but no format keeps the mask; fill them first"
        )
    # A tensor exists only if torch is imported.
    if "torch" in sys.modules and isinstance(value, sys.modules["torch"].Tensor):
        value = value.detach().cpu().numpy() if kind not in EXTENSIONS else _channels_last(value)
    if kind in EXTENSIONS:
        if isinstance(value, np.ndarray) or type(value) is Image.Image:
            return Pixels(name, value.copy(), quality)
        return _image(name, value, quality)  # an open file
    if kind == "npy":
        return npy(name, value)
    if isinstance(value, (np.generic, np.ndarray)) and value.ndim == 0:
        value = value.item()
    if kind == "cls":
        return str(_class(value, classes)).encode()
    if kind == "json":
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        json.loads(text, object_pairs_hook=each_once)
        return text.encode()
    if isinstance(value, str):
        return str.encode(value)  # str() of an enum is another text
    for plain in (bool, int, float):
        if isinstance(value, plain):
            return str(plain(value)).encode()
    if value is None:
        raise SampleError(f"its {name} is None; leave out the fields that a sample does not have")
    raise SampleError(
        f"its {name} is {type(value).__name__}, which a field of this name cannot hold; name an "
        f"array {name}.npy, an image {name}.png, a dict or list {name}.json, or give bytes or text"
    )


def array_field(name: str, values: npt.NDArray[Any]) -> str:
    """Return the field for the rows of an array: its name, with .npy or .txt if it has no kind."""
    name = field_name(name)
    if name.rpartition(".")[2] in (*EXTENSIONS, "npy", "cls", "txt", "json"):
        return name
    rows = dict(values.dtype.metadata or {}).get("vlen")  # HDF5: type of rows that differ in length
    return (
        f"{name}.txt"
        if values.dtype.kind in "SUO" and rows in (None, bytes, str)
        else f"{name}.npy"
    )


def _class(value: Any, classes: Mapping[str, int]) -> int:
    if isinstance(value, bool) or (isinstance(value, int) and value >= 0):
        number = int(value)
        if classes and number >= len(classes):
            raise SampleError(f"its cls is {number}, but there are {len(classes)} classes")
        return number
    if isinstance(value, str) and value in classes:
        return classes[value]
    known = (
        f"one of {', '.join(list(classes)[:8])}"
        if classes
        else "a number, or a name if classes=[...] is given"
    )
    raise SampleError(f"its cls is {value!r}, but a class must be {known}")


def _channels_last(value: Any) -> npt.NDArray[Any]:
    """Return a tensor of pixels [c, h, w] as [h, w, c], also of an image that is 1, 3 or 4 pixels wide."""
    if value.ndim == 3 and value.shape[0] in (1, 3, 4):
        value = value.permute(1, 2, 0)
    return np.asarray(value.detach().cpu())


def _image(name: str, value: Any, quality: int) -> bytes:
    made = BY_EXTENSION[name.rpartition(".")[2]]
    if isinstance(value, np.ndarray):
        pixels = value[..., 0] if value.ndim == 3 and value.shape[2] == 1 else value
        if pixels.dtype != np.uint8 or not (
            pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[2] in (3, 4))
        ):
            raise SampleError(
                f"its {name} is an array of {value.dtype} {list(value.shape)}, but pixels must be "
                f"uint8 [h, w] or [h, w, 3]; store it as {name.rpartition('.')[0] or 'image'}.npy"
            )
        if made is JPEG and pixels.ndim == 3 and pixels.shape[2] == 3:
            return jpeg(pixels, quality, "444")
        value = Image.fromarray(np.ascontiguousarray(pixels))
    if not isinstance(value, Image.Image):
        raise SampleError(f"its {name} is {type(value).__name__}, but must be an image")
    value = ImageOps.exif_transpose(value)
    value = eight_bit(value) if made.has_quality else value
    if made is JPEG and value.mode not in ("L", "RGB"):
        value = value.convert("RGB")
    try:
        return saved(value, made.plugins[0], **({"quality": quality} if made.has_quality else {}))
    except (OSError, ValueError, KeyError) as error:
        raise SampleError(
            f"its {name} cannot be written as {made.extensions[0]} ({error})"
        ) from None


def npy(name: str, value: Any) -> bytes:
    """Return an array as a .npy file. name: of its field, for the error of Python objects."""
    array = np.asarray(value)
    if array.dtype.hasobject:
        raise SampleError(f"its {name} holds Python objects, which only a pickle could hold")
    # numpy warns of metadata, such as the names of an HDF5 enum.
    if array.dtype.metadata and array.dtype.names is None:
        array = array.view(array.dtype.str)
    out = io.BytesIO()
    np.save(out, array, allow_pickle=False)
    return out.getvalue()


# --- images that are checked, or encoded again ----------------------------------------------------


@dataclass(frozen=True)
class Recipe:
    """Treatment of images. resize: most pixels of the shorter side; quality: of new JPEGs."""

    resize: int | None
    quality: int | None
    check: Check

    def __post_init__(self) -> None:
        if self.resize is not None:
            import torch  # noqa: F401  once, so that forked workers need not import it

    @property
    def changes(self) -> bool:
        return self.resize is not None or self.quality is not None

    def apply(self, parts: Sequence[Part]) -> list[Part]:
        """Return the parts of a sample as they are packed. Raises SampleError for a bad image."""
        photo, names, made = photo_of(parts), {field for field, _ in parts}, list[Part]()
        for field, data in parts:
            name = field
            if is_image(field):
                if format_of(data) is None:
                    raise SampleError(
                        f"its {field} does not begin as an image does, but with {data[:12]!r}"
                    )
                if photo is not None and is_mask(field):
                    check_mask((field, data), photo)
                if self.changes or self.check == "decode":
                    name, data = self._image(field, data, photo if self.changes else None)
            elif photo is not None and is_boxes(field):
                owner = boxes(field).picture_in(dict(parts)) or photo[1]
                data = fitted(data, owner, self._smaller)
            # Two images of one sample keep different names. Readers find the format of an image
            # in its bytes, so a field named png may hold a JPEG.
            name = field if name in names else name
            names.add(name)
            made.append((name, data))
        return made

    def _image(self, field: str, data: bytes, photo: Part | None) -> Part:
        with warnings.catch_warnings():  # Pillow warns of odd metadata, and raises for damage
            warnings.simplefilter("ignore")
            is_jpeg = format_of(data) is JPEG
            if photo is not None and "." not in field and (is_jpeg or field == photo[0]):
                return self._encoded(field, data)
            decode_image(data)
            return field, data if photo is None or is_jpeg else self._map(field, data, photo)

    def _map(self, field: str, data: bytes, photo: Part) -> bytes:
        """Return an image of values, such as classes, in the size that its photo will have.

        Values are never blended. An image of another size than its photo is kept.
        """
        stored, shown, *_ = _sizes(*photo)
        if self._keeps(stored):
            return data
        with open_picture(data) as image:
            if image.size == stored != shown:
                raise SampleError(
                    f"its {field} has the size of the stored photo, which is shown rotated; store "
                    f"both upright"
                )
            wanted = self._smaller(shown)
            if wanted == shown or image.size != shown:
                return data
            return saved(image.resize(wanted, Image.Resampling.NEAREST), str(image.format))

    def _encoded(self, field: str, data: bytes) -> Part:
        stored, shown, frames, mode = _sizes(field, data)
        if self._keeps(stored):
            decode_image(data)  # kept images are checked as re-encoded ones are
            return field, data
        if frames > 1:
            raise SampleError(f"its {field} has {frames} frames, and one would be left")
        wanted = self._smaller(shown)
        pixels = decode_image(data, self._smaller(stored))
        pixels = pixels[..., :1] if mode == "L" else pixels
        made = np.empty((*wanted[::-1], pixels.shape[2]), np.uint8)
        resize(pixels, made, "bicubic")
        if format_of(data) is JPEG or self.quality is not None:
            return "jpg", jpeg(made, self.quality or _QUALITY, "420")
        return "png", _image("png", made, _QUALITY)

    def _keeps(self, stored: Size) -> bool:
        """Return whether a photo of this size keeps its bytes."""
        return self.quality is None and self._smaller(stored) == stored

    def _smaller(self, size: Size) -> Size:
        """Return a size scaled so that the shorter side is short enough."""
        factor = min(1.0, self.resize / min(size)) if self.resize is not None else 1.0
        return max(1, round(size[0] * factor)), max(1, round(size[1] * factor))


def photo_of(parts: Sequence[Part]) -> Part | None:
    """Return the image that the others belong to: the first JPEG, or else the first one."""
    images = [part for part in parts if is_image(part[0]) and "." not in part[0]]
    return next((part for part in images if format_of(part[1]) is JPEG), next(iter(images), None))


def check_mask(mask: Part, photo: Part) -> None:
    """Raise SampleError for a mask that does not cover its photo as it is shown.

    A mask drawn on the stored raster of a rotated photo, or on a part of it, would be stretched.
    Damaged images are left to the check that decodes.
    """
    try:
        (stored, (width, height), *_), (_, own, *_) = _sizes(*photo), _sizes(*mask)
    except SampleError:
        return
    # sides of a smaller mask are rounded to pixels
    if abs(own[0] * height - own[1] * width) > max(width, height):
        turned = "and is rotated when it is shown; store both upright"
        raise SampleError(
            f"its {mask[0]} has {own[0]} x {own[1]} pixels, its {photo[0]} {width} x {height}, "
            f"{turned if own == stored else 'and a mask has the shape of its image'}"
        )


def _sizes(field: str, data: bytes) -> tuple[Size, Size, int, str]:
    """Return the size of an image as it is stored, that of its upright form, its frames and mode.

    Raises SampleError for an image whose header cannot be read.
    """
    try:
        with open_picture(data) as image:
            frames = 1 if format_of(data) is JPEG else getattr(image, "n_frames", 1)
            return image.size, header_of(data).size, frames, image.mode
    except Exception as error:  # Pillow's plugins raise errors of any type
        decode_image(data)  # raises an error with the same words for the same damage
        raise SampleError(f"its {field} is not an image of a known format") from error


# --- encoders -------------------------------------------------------------------------------------


def jpeg(pixels: Raster, quality: int, subsampling: str) -> bytes:
    """Return pixels [h, w, 1 or 3] as a JPEG."""
    made, colors = np.ascontiguousarray(pixels), "Gray" if pixels.shape[2] == 1 else "RGB"
    return bytes(simplejpeg.encode_jpeg(made, quality, colors, colorsubsampling=subsampling))


def saved(image: Image.Image, plugin: str, **options: Any) -> bytes:
    """Return an image as a file of a format of Pillow."""
    out = io.BytesIO()
    image.save(out, plugin, **options)
    return out.getvalue()


def eight_bit(image: Image.Image) -> Image.Image:
    """Return a gray image of 16 bits with its upper 8 bits, and others as they are."""
    if not image.mode.startswith("I"):
        return image
    return Image.fromarray((np.clip(np.asarray(image), 0, 65535) >> 8).astype(np.uint8))


def field_of(data: bytes) -> str:
    """Return the field for an image, by its first bytes. Raises SourceError for other bytes."""
    if (found := format_of(data)) is not None:
        return found.extensions[0]
    raise SourceError(f"it does not begin as an image does, but with {data[:12]!r}")
