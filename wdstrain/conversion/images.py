"""Checks and resizing of images before they are packed. By default, their bytes are kept.

The first bytes of an image are compared with those of known formats. On request it is also decoded,
or downscaled. Re-encoded images are upright (EXIF orientation applied) and 8-bit. JPEGs stay JPEGs,
in RGB or gray; others become PNG with alpha, or JPEG without alpha if a quality is given. Fields
with a dot in their name (seg.png, depth.png) are data beside the image and are never re-encoded.
JPEGs are decoded at the smallest scale that is large enough (scaled DCT of libjpeg).
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import simplejpeg
from PIL import Image, ImageOps

from wdstrain.conversion.listing import Part
from wdstrain.conversion.options import Check, Options
from wdstrain.decode.codecs import check_scans, decode_image, open_picture
from wdstrain.decode.formats import JPEG, MAX_PIXELS, format_of, is_image
from wdstrain.errors import SampleError, SourceError
from wdstrain.runtime.cached import cached_property

_QUALITY = 90


@dataclass(frozen=True)
class Recipe:
    """Treatment of images. resize: most pixels of the shorter side; quality: of new JPEGs."""

    resize: int | None
    quality: int | None
    check: Check

    @classmethod
    def of(cls, options: Options) -> Recipe:
        if options.resize is not None:
            import torch  # noqa: F401  once, so that forked workers need not import it
        return cls(options.resize, options.quality, options.check)

    @property
    def changes(self) -> bool:
        return self.resize is not None or self.quality is not None

    @cached_property
    def only_looks(self) -> bool:
        return not self.changes and self.check != "decode"

    def looked_at(self) -> Recipe:
        """Return the recipe for images that were re-encoded by this one."""
        return Recipe(None, None, "magic")

    def apply(self, parts: Sequence[Part]) -> list[Part]:
        """Return the parts of a sample as they are packed. Raises SampleError for a bad image."""
        if self.only_looks:
            for field, data in parts:
                if is_image(field) and format_of(data) is None:
                    self._image(field, data)  # raises
            return list(parts)
        names = {field for field, _ in parts}
        made = []
        for field, data in parts:
            if is_image(field):
                name, data = self._image(field, data)
                # Two images of one sample keep different names. Readers find the format of an
                # image in its bytes, so a field named png may hold a JPEG.
                field = field if name in names else name
                names.add(field)
            made.append((field, data))
        return made

    def _image(self, field: str, data: bytes) -> Part:
        if not data:
            raise SampleError(f"its {field} has 0 bytes")
        if format_of(data) is None:
            raise SampleError(
                f"its {field} does not begin as an image does, but with {data[:12]!r}"
            )
        if self.only_looks:
            return field, data
        with warnings.catch_warnings():  # Pillow warns of odd metadata, and raises for damage
            warnings.simplefilter("ignore")
            if self.changes and "." not in field:  # seg.png is data, not the image
                return self._encoded(field, data)
            decode_image(data)
            return field, data

    def _encoded(self, field: str, data: bytes) -> Part:
        try:
            with open_picture(data) as image:
                size, upright = image.size, not _is_turned(image)
        except Exception as error:  # Pillow's plugins raise errors of any type
            decode_image(data)  # raises an error with the same words for the same damage
            raise SampleError(f"its {field} is not an image of a known format") from error
        small = self.resize is None or min(size) <= self.resize
        if small and self.quality is None:
            decode_image(data)  # kept images are checked as re-encoded ones are
            return field, data
        if size[0] * size[1] > MAX_PIXELS:
            raise SampleError(
                f"its {field} has {size[0]} x {size[1]} pixels, more than {MAX_PIXELS}"
            )
        is_jpeg = format_of(data) is JPEG
        if is_jpeg or self.quality is not None:
            return "jpg", self._jpeg(data, fast=is_jpeg and upright)
        return "png", self._png(data)

    def _jpeg(self, data: bytes, *, fast: bool) -> bytes:
        pixels = self._scaled(data) if fast else None
        made = _resized(decode_image(data) if pixels is None else pixels, self.resize)
        colors = "RGB" if made.shape[2] == 3 else "Gray"
        return bytes(
            simplejpeg.encode_jpeg(made, self.quality or _QUALITY, colors, colorsubsampling="420")
        )

    def _scaled(self, data: bytes) -> npt.NDArray[np.uint8] | None:
        """Return pixels of a JPEG at the smallest scale that is large enough; None if damaged."""
        try:
            height, width, colors, _ = simplejpeg.decode_jpeg_header(data)
            if colors not in ("YCbCr", "RGB", "Gray") or height * width > MAX_PIXELS:
                return None
            check_scans(data, height * width)
            factor = min(height, width) / self.resize if self.resize else 1.0
            least = (
                {"min_height": int(height / factor), "min_width": int(width / factor)}
                if factor > 1
                else {}
            )
            pixels = simplejpeg.decode_jpeg(data, "Gray" if colors == "Gray" else "RGB", **least)
            return np.asarray(pixels)
        except ValueError:
            return None

    def _png(self, data: bytes) -> bytes:
        decode_image(data)  # raises for a truncated image
        with open_picture(data) as image:
            upright = ImageOps.exif_transpose(image)
            if upright.mode.startswith("I"):
                grey = np.clip(np.asarray(upright), 0, 65535) >> 8
                upright = Image.fromarray(grey.astype(np.uint8))
            elif upright.mode in ("P", "PA") or "transparency" in upright.info:
                upright = upright.convert("RGBA")
            elif upright.mode not in ("L", "LA", "RGB", "RGBA"):
                upright = upright.convert("RGB")
            out = io.BytesIO()
            self._smaller(upright).save(out, "PNG")
            return out.getvalue()

    def _smaller(self, image: Image.Image) -> Image.Image:
        if self.resize is None or min(image.size) <= self.resize:
            return image
        return image.resize(
            _smaller(image.width, image.height, self.resize), Image.Resampling.BICUBIC
        )


def _smaller(width: int, height: int, side: int) -> tuple[int, int]:
    """Return width and height scaled so that the shorter is `side`."""
    factor = side / min(width, height)
    return max(1, round(width * factor)), max(1, round(height * factor))


def _resized(pixels: npt.NDArray[np.uint8], side: int | None) -> npt.NDArray[np.uint8]:
    """Return uint8[h, w, c] with the shorter side at most `side`: bicubic, as Pillow but faster."""
    height, width = pixels.shape[:2]
    if side is None or min(height, width) <= side:
        return pixels
    import torch

    wide, high = _smaller(width, height, side)
    planes = torch.from_numpy(pixels).permute(2, 0, 1)[None]
    made = torch.nn.functional.interpolate(
        planes, (high, wide), mode="bicubic", antialias=True, align_corners=False
    )
    return made[0].permute(1, 2, 0).contiguous().numpy()


def _is_turned(image: Image.Image) -> bool:
    # Other values, such as text, mean upright, as in `exif_transpose`.
    return image.getexif().get(0x0112) in range(2, 9)


def field_of(data: bytes) -> str:
    """Return the field for an image, by its first bytes. Raises SourceError for other bytes."""
    if (found := format_of(data)) is not None:
        return found.extensions[0]
    raise SourceError(f"it does not begin as an image does, but with {data[:12]!r}")
