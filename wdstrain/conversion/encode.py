"""Bytes of the values of Python samples, by the name of the field.

    jpg png webp ...   a PIL image, or uint8 pixels: [h, w], [h, w, c], or a tensor [c, h, w]
    cls                a whole number, or the name of a known class; stored as a number
    txt                text
    json               anything JSON can hold
    NAME.npy           an array, a tensor or a number (of shape ())
    any other          bytes, or text and numbers as text

Bytes are kept as they are, except for a cls whose classes are known. Values that only a pickle
could hold are refused: a shard is data, never code.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

from wdstrain.conversion.images import eight_bit, jpeg, saved
from wdstrain.conversion.listing import field_name
from wdstrain.decode.formats import BY_EXTENSION, EXTENSIONS, JPEG
from wdstrain.errors import SampleError

if TYPE_CHECKING:
    import torch

_PICKLES = ("pyd", "pkl", "pickle", "pth", "pt")


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
        data = bytes(value)
        is_class = kind == "cls" and classes
        return str(_class(_class_in(data, classes), classes)).encode() if is_class else data
    if value is None:
        raise SampleError(f"its {name} is None; leave out the fields that a sample does not have")
    if kind in _PICKLES:
        raise SampleError(
            f"its {name} would have to be pickled, but a shard is data, never code; name an array "
            f"{name}.npy"
        )
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
        return _npy(name, value)
    if isinstance(value, (np.generic, np.ndarray)) and value.ndim == 0:
        value = value.item()
    if kind == "cls":
        return str(_class(value, classes)).encode()
    if kind == "json":
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        json.loads(text, object_pairs_hook=_checked)
        return text.encode()
    if isinstance(value, str):
        return str.encode(value)  # str() of an enum is another text
    for plain in (bool, int, float):
        if isinstance(value, plain):
            return str(plain(value)).encode()
    raise SampleError(
        f"its {name} is {type(value).__name__}, which a field of this name cannot hold; name an "
        f"array {name}.npy, an image {name}.png, a dict or list {name}.json, or give bytes or text"
    )


def _checked(pairs: list[tuple[str, Any]]) -> None:
    """Raise ValueError if two names of a dict are one name in JSON, such as 1 and "1"."""
    if len(dict(pairs)) < len(pairs):
        raise ValueError(f"a name comes twice in {[name for name, _ in pairs]}")


def array_field(name: str, values: npt.NDArray[Any]) -> str:
    """Return the field for the rows of an array: its name, with .npy or .txt if it has no kind."""
    name = field_name(name)
    kind = name.rpartition(".")[2].lower()
    if kind in (*EXTENSIONS, "npy", "cls", "txt", "json"):
        return name
    rows = dict(values.dtype.metadata or {}).get("vlen")  # HDF5: type of rows that differ in length
    return (
        f"{name}.txt"
        if values.dtype.kind in "SUO" and rows in (None, bytes, str)
        else f"{name}.npy"
    )


def _class_in(data: bytes, classes: Mapping[str, int]) -> int | str:
    """Return the class that bytes mean: a class number if readers take it as one, else a name.

    Raises SampleError for bytes that are the number of one class and the name of another.
    """
    text = data.decode("utf-8", "replace").strip()
    if not data.strip().isdigit():
        return text
    number = int(text)
    if number < len(classes) and classes.get(text, number) != number:
        raise SampleError(
            f"its cls {data!r} is the name of class {classes[text]} and also the number of class "
            f"{number}; give the name as str, or the number as int"
        )
    return text if number >= len(classes) and text in classes else number


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


def _channels_last(value: torch.Tensor) -> npt.NDArray[Any]:
    """Return pixels [c, h, w] as [h, w, c], also of an image that is 1, 3 or 4 pixels wide."""
    if value.ndim == 3 and value.shape[0] in (1, 3, 4):
        value = value.permute(1, 2, 0)
    pixels: npt.NDArray[Any] = value.detach().cpu().numpy()
    return pixels


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


def _npy(name: str, value: Any) -> bytes:
    array = np.asarray(value)
    if array.dtype.hasobject:
        raise SampleError(f"its {name} holds Python objects, which only a pickle could hold")
    # numpy warns of metadata, such as the names of an HDF5 enum.
    if array.dtype.metadata and array.dtype.names is None:
        array = array.view(array.dtype.str)
    out = io.BytesIO()
    np.save(out, array, allow_pickle=False)
    return out.getvalue()
