"""How large pictures are, of which format and colours, by their headers.

No pixel is decoded, so that what breaks decoders or fills memory does neither here, and a picture costs its first 64 KB; more is
read where a large profile stands before its size, or its table at its end.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from PIL import Image, UnidentifiedImageError

from wdstrain.decode.image_formats import open_picture
from wdstrain.report.printing import printable

_ORIENTATION = 274  # EXIF

Header = tuple[str, str, int, int, bool]  # format, mode, width, height, whether EXIF turns it


class Value(NamedTuple):
    """A field of a sample. data: its first bytes; whole: reads more of it, where the first are not enough."""

    size: int
    data: bytes
    whole: Callable[[], bytes]


class Range(NamedTuple):
    """The least, the middle and the most of some numbers."""

    smallest: float
    median: float
    largest: float


@dataclass(frozen=True)
class Images:
    """What the headers of some pictures say. turned: share of those whose EXIF says that they lie otherwise than they are stored.

    width, height: in pixels, as stored. unreadable: pictures whose header says nothing, the first because of `reason`.
    """

    looked_at: int
    unreadable: int = 0
    reason: str = ""
    formats: dict[str, int] = field(default_factory=dict)
    modes: dict[str, int] = field(default_factory=dict)
    width: Range | None = None
    height: Range | None = None
    megapixels: Range | None = None
    turned: float = 0.0


def header(value: Value) -> Header | str:
    """What the header of a picture says, or why it says nothing."""
    found = _opened(value.data)
    if isinstance(found, str) and len(value.data) < value.size:
        found = _opened(value.whole())
    return found


def images_of(found: Iterable[Header | str]) -> Images:
    """What some headers say together."""
    found = list(found)
    good, bad = (
        [one for one in found if not isinstance(one, str)],
        [one for one in found if isinstance(one, str)],
    )
    return Images(
        looked_at=len(found),
        unreadable=len(bad),
        reason=bad[0] if bad else "",
        formats=dict(Counter(one[0] for one in good).most_common()),
        modes=dict(Counter(one[1] for one in good).most_common()),
        width=of_all(one[2] for one in good),
        height=of_all(one[3] for one in good),
        megapixels=of_all(round(one[2] * one[3] / 1e6, 4) for one in good),
        turned=sum(one[4] for one in good) / max(1, len(good)),
    )


def of_all(values: Iterable[float]) -> Range | None:
    """The least, the middle (one of them) and the most; None of none."""
    found = sorted(values)
    return Range(found[0], found[(len(found) - 1) // 2], found[-1]) if found else None


def _opened(data: bytes) -> Header | str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of pictures that are large, and of tags that are odd
            with open_picture(data) as image:
                exif = Image.Exif()
                if image.format in ("JPEG", "MPO"):
                    exif = (
                        image.getexif()
                    )  # with what XMP says; of other formats it would read the pixels
                elif image.info.get("exif"):
                    exif.load(image.info["exif"])
                tags = getattr(image, "tag_v2", exif)  # of TIFF
                return (
                    str(image.format),
                    image.mode,
                    image.width,
                    image.height,
                    tags.get(_ORIENTATION, 1) in range(2, 9),
                )
    except UnidentifiedImageError:
        return "no image of a known format"
    except Exception as error:  # Pillow's plugins raise whatever their parsers meet
        return printable(str(error) or type(error).__name__)
