"""Images with boxes of objects: annotation files of COCO, and folders of YOLO.

A sample is an image with its bytes, and `boxes.json` (see `decode.boxes`) in pixels of the upright
image. An image without boxes is a sample, too. Boxes of COCO belong to the raster whose width and
height the file states: if that is the stored image and not the upright one, boxes are rotated as
EXIF rotates the image. Its boxes without an area and those of crowds (`iscrowd`) are left out and
counted. Boxes of YOLO are shares of the upright image.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from wdstrain.conversion.encode import field_of
from wdstrain.conversion.listing import (
    SPLITS,
    BadSample,
    Sample,
    Source,
    check_there,
    image_field,
    walk,
)
from wdstrain.conversion.options import CocoOptions, YoloOptions
from wdstrain.decode.boxes import are_four_numbers, upright_boxes
from wdstrain.errors import SampleError, UsageError, WdstrainError
from wdstrain.runtime.options import refuse
from wdstrain.shards.declare import boxes_label
from wdstrain.shards.formats import header_of

# path; name, from which the key is made; split; width and height of the raster of the boxes, None for
# the upright image, "shares" for shares of its sides; boxes [left, top, width, height] with the names of their classes
_Picture = tuple[str, str, str, Any, list[tuple[list[float], str]]]

_IMAGE = re.compile(r"(.*/|)images/(.+)\.[^./]+")
_LABELS = re.compile(r"(.*/|)labels/(?!classes\.txt$).+\.txt")
_LINE = re.compile(r"\s*(\d{1,9})((?:\s+(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d\d?)?){4})\s*", re.ASCII)
_CLASSES = ("data.yaml", "data.yml", "dataset.yaml", "classes.txt", "labels/classes.txt")


def list_coco(options: CocoOptions) -> Source:
    """Return the images of an annotation file. Raises UsageError for wrong annotations."""
    path, folder, ignored = str(options.annotations), str(options.images), Counter[str]()
    try:
        document = json.loads(Path(path).read_bytes())
        classes = {one["id"]: str(one["name"]) for one in document["categories"]}
        pictures: dict[Any, _Picture] = {
            one["id"]: (
                str(Path(folder, one["file_name"])),
                one["file_name"].rpartition(".")[0],
                "",
                (one["width"], one["height"]) if {"width", "height"} <= one.keys() else None,
                [],
            )
            for one in document["images"]
        }
        if len(pictures) < len(document["images"]) or len(classes) < len(document["categories"]):
            raise ValueError("two images or two categories have one id")
        for one in document["annotations"]:
            image, category, box = (one.get(name) for name in ("image_id", "category_id", "bbox"))
            rules = {
                f"image {image}: `images` does not list it": image not in pictures,
                f"category {category}: `categories` does not list it": category not in classes,
                f"bbox {box!r:.80}: must be four finite numbers [x, y, width, height], the last two "
                ">= 0": not are_four_numbers(box) or min(box[2:]) < 0,
            }
            if broken := [rule for rule, is_broken in rules.items() if is_broken]:
                raise UsageError(
                    f"{path}: annotation {one.get('id')} of {pictures.get(image, ['no image'])[0]} "
                    f"has the {broken[0]}.",
                    "Correct or remove it.",
                )
            if one.get("iscrowd") or not box[2] * box[3]:
                ignored[f"boxes {'of crowds' if one.get('iscrowd') else 'without an area'}"] += 1
            else:
                pictures[image][-1].append((box, classes[category]))
        names = [classes[number] for number in sorted(classes)]
        return _source(path, "coco", [*pictures.values()], names, ignored, folder)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(
            f"{path} is not a file of COCO ({type(error).__name__}: {error}).",
            "It has the lists images (id, file_name), annotations (image_id, category_id, bbox) and "
            "categories (id, name).",
        ) from None


def list_yolo(options: YoloOptions) -> Source:
    """Return the images of a folder. Raises UsageError for wrong labels, or labels without an image.

    The labels of images/NAME.jpg are in labels/NAME.txt, also below a folder, such as train/. Folders
    called train, val and test are splits.
    """
    root, pictures = str(options.source), list[_Picture]()
    check_there(root, kind="folder")
    files = [f"{below}/{name}".lstrip("/") for below, _, _, own, _ in walk(root) for name in own]
    matches = [match for match in map(_IMAGE.fullmatch, files) if match and image_field(match[0])]
    labels, classes = set(filter(_LABELS.fullmatch, files)), _classes_in(root)
    lone = labels - {f"{match[1]}labels/{match[2]}.txt" for match in matches}
    refuse(
        lone or not matches,
        f"{Path(root, min(lone, default=''))}: there is no image.",
        "The labels of images/NAME.jpg are in labels/NAME.txt.",
    )
    for match in matches:
        text, name = f"{match[1]}labels/{match[2]}.txt", match[1] + match[2]
        split = next((SPLITS[part] for part in name.lower().split("/") if part in SPLITS), "")
        boxes = _boxes_in(root, text, match[0], classes) if text in labels else []
        pictures.append((str(Path(root, match[0])), name, split, "shares", boxes))
    return _source(root, "yolo", pictures, classes, {}, root)


def _boxes_in(
    root: str, text: str, image: str, classes: Sequence[str]
) -> list[tuple[list[float], str]]:
    """Return the boxes of a file of labels. Raises UsageError for a line of another form."""
    boxes, path = [], Path(root, text)
    for number, line in enumerate(path.read_text("utf-8-sig", "replace").splitlines(), 1):
        if line.strip():
            match = _LINE.fullmatch(line)
            x, y, width, height = map(float, match[2].split()) if match else (0.0, 0.0, 0.0, 0.0)
            if (
                match is None
                or int(match[1]) >= len(classes)
                or min(width, height) <= 0
                or max(x, y, width, height) > 1.001  # rounded
            ):
                raise UsageError(
                    f"{path}, line {number} (of {image}): {line!r:.80} must be a class number from 0 "
                    f"to {len(classes) - 1}, and center x, center y, width and height as shares of "
                    "the image, from 0 to 1.",
                    "Correct or remove it.",
                )
            box = [x - width / 2, y - height / 2, width, height]
            boxes.append((box, classes[int(match[1])]))
    return boxes


def _classes_in(root: str) -> list[str]:
    """Return the names of the classes of a folder. Raises UsageError without any."""
    path = next((path for name in _CLASSES if (path := Path(root, name)).exists()), None)
    if path is None:
        raise UsageError(
            f"{root} has no names of classes.", f"Write them into one of {', '.join(_CLASSES)}."
        )
    try:
        names = (
            [line.strip() for line in path.read_text("utf-8-sig").strip().splitlines()]
            if path.suffix == ".txt"
            else yaml.safe_load(path.read_bytes())["names"]
        )
        if not isinstance(names, (list, dict)) or "" in names:
            raise ValueError("no list of names")
        return [str(names[number]) for number in range(len(names))]
    except (yaml.YAMLError, ValueError, LookupError, TypeError) as error:
        raise UsageError(
            f"{path}: `names` must list the classes, or name each by its number from 0 "
            f"({type(error).__name__})."
        ) from None


def _source(
    name: str,
    kind: str,
    pictures: Sequence[_Picture],
    classes: Sequence[str],
    ignored: dict[str, int],
    root: str,
) -> Source:
    """Return images with their boxes as a source."""
    label, ignored = boxes_label("boxes.json", classes), Counter(ignored)

    def samples() -> Iterator[Sample | BadSample]:
        for path, stem, split, raster, boxes in pictures:
            try:
                data = Path(path).read_bytes()
                field, (shown, stored, orientation) = field_of(data), header_of(data)
                corners = np.array([box for box, _ in boxes], np.float64).reshape(-1, 4)
                corners[:, 2:] += corners[:, :2]
                if raster == "shares":
                    corners *= np.tile(shown, 2)
                elif raster == stored != shown:
                    corners = upright_boxes(corners, stored, orientation)
                elif raster not in (None, shown):
                    raise SampleError(
                        "its size is {} x {}, and its boxes are of {} x {} pixels".format(
                            *shown, *raster
                        )
                    )
            except (OSError, WdstrainError) as error:
                yield BadSample(name, 0, path, str(error))
            else:
                corners = corners.round(3)
                has_area = (corners[:, 2:] > corners[:, :2]).all(1)  # also after the rounding
                if not has_area.all():
                    ignored["boxes without an area"] += int((~has_area).sum())
                labels = [own for (_, own), is_kept in zip(boxes, has_area, strict=True) if is_kept]
                document = {"boxes": corners[has_area].tolist(), "labels": labels}
                parts = [(field, path), ("boxes.json", json.dumps(document).encode())]
                yield Sample(stem, parts, split)

    return Source(
        name,
        samples,
        lambda: (label,),
        {"kind": kind, "classes": len(classes)},
        len(pictures),
        ignored=ignored,
        root=root,
        has_files=True,
    )
