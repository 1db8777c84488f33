"""Checks and resizing of images before they are packed. By default, their bytes are kept.

The first bytes of an image are compared with those of known formats. On request it is also decoded,
or downscaled. Re-encoded images are upright (EXIF orientation applied) and 8-bit. JPEGs stay JPEGs,
in RGB or gray; others become PNG with alpha, or JPEG without alpha if a quality is given. Images of
values beside a photo (mask.png, or a gray png beside a jpg) get its size without blending.
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

    def apply(self, parts: Sequence[Part]) -> list[Part]:
        """Return the parts of a sample as they are packed. Raises SampleError for a bad image."""
        for field, data in parts:
            if is_image(field) and format_of(data) is None:
                raise SampleError(
                    f"its {field} does not begin as an image does, but with {data[:12]!r}"
                )
        if not self.changes and self.check != "decode":
            return list(parts)
        names = {field for field, _ in parts}
        photo = _photo(parts) if self.changes else None
        made = []
        for field, data in parts:
            if is_image(field):
                name, data = self._image(field, data, photo)
                # Two images of one sample keep different names. Readers find the format of an
                # image in its bytes, so a field named png may hold a JPEG.
                field = field if name in names else name
                names.add(field)
            made.append((field, data))
        return made

    def _image(self, field: str, data: bytes, photo: Part | None) -> Part:
        with warnings.catch_warnings():  # Pillow warns of odd metadata, and raises for damage
            warnings.simplefilter("ignore")
            if photo is not None and "." not in field and not _is_map(field, data, photo):
                return self._encoded(field, data)
            decode_image(data)
            if photo is not None and format_of(data) is not JPEG:
                data = self._map(field, data, photo[1])
            return field, data

    def _map(self, field: str, data: bytes, photo: bytes) -> bytes:
        """Return an image of values, such as classes, in the size that its photo will have.

        Values are never blended. An image of another size than its photo is kept.
        """
        with open_picture(photo) as image:
            stored, shown = image.size, ImageOps.exif_transpose(image).size
        small = self.resize is None or min(stored) <= self.resize
        if small and self.quality is None:
            return data
        with open_picture(data) as image:
            if image.size == stored != shown:
                raise SampleError(
                    f"its {field} has the size of the stored photo, which is shown rotated; store "
                    f"both upright"
                )
            if small or image.size != shown:
                return data
            out = io.BytesIO()
            made = image.resize(_smaller(*shown, self.resize or 1), Image.Resampling.NEAREST)
            made.save(out, image.format)
            return out.getvalue()

    def _encoded(self, field: str, data: bytes) -> Part:
        try:
            with open_picture(data) as image:
                size, upright = image.size, not _is_turned(image)
                frames = 1 if format_of(data) is JPEG else getattr(image, "n_frames", 1)
        except Exception as error:  # Pillow's plugins raise errors of any type
            decode_image(data)  # raises an error with the same words for the same damage
            raise SampleError(f"its {field} is not an image of a known format") from error
        small = self.resize is None or min(size) <= self.resize
        if small and self.quality is None:
            decode_image(data)  # kept images are checked as re-encoded ones are
            return field, data
        if frames > 1:
            raise SampleError(f"its {field} has {frames} frames, and one would be left")
        is_jpeg = format_of(data) is JPEG
        if is_jpeg or self.quality is not None:
            return "jpg", self._jpeg(data, size if is_jpeg and upright else None)
        return "png", self._png(data)

    def _jpeg(self, data: bytes, size: tuple[int, int] | None) -> bytes:
        """size: width and height of an upright JPEG, which can be decoded at a smaller scale."""
        pixels = self._scaled(data) if size is not None else None
        if pixels is None or size is None:
            pixels = decode_image(data)
            size = pixels.shape[1], pixels.shape[0]
        made = pixels if self.resize is None else _resized(pixels, _smaller(*size, self.resize))
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
            if self.resize is not None and self.resize < min(upright.size):
                size = _smaller(*upright.size, self.resize)
                upright = upright.resize(size, Image.Resampling.BICUBIC)
            upright.save(out, "PNG")
            return out.getvalue()


def _photo(parts: Sequence[Part]) -> Part | None:
    """Return the image that the others belong to: the first JPEG, or else the first one."""
    images = [part for part in parts if is_image(part[0]) and "." not in part[0]]
    return next((part for part in images if format_of(part[1]) is JPEG), next(iter(images), None))


def _is_map(field: str, data: bytes, photo: Part) -> bool:
    """Return whether the pixels of a lossless image beside a JPEG are values of one channel."""
    if field == photo[0] or format_of(photo[1]) is not JPEG or format_of(data) is JPEG:
        return False
    decode_image(data)  # raises an error for damage that says where it is
    with open_picture(data) as image:
        return image.mode in ("1", "L", "P") or image.mode.startswith("I")


def _smaller(width: int, height: int, side: int) -> tuple[int, int]:
    """Return width and height scaled so that the shorter is at most `side`."""
    factor = min(1.0, side / min(width, height))
    return max(1, round(width * factor)), max(1, round(height * factor))


def _resized(pixels: npt.NDArray[np.uint8], size: tuple[int, int]) -> npt.NDArray[np.uint8]:
    """Return uint8[h, w, c] with this width and height: bicubic, as Pillow but faster."""
    wide, high = size
    if pixels.shape[:2] == (high, wide):
        return pixels
    import torch

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
