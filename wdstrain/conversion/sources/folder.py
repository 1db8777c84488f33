"""Images of a folder.

SRC/<class>/.../image.jpg, or SRC/train/<class>/... beside SRC/val. The class is the first folder
level. Its number is its place among the sorted names, as in torchvision's ImageFolder. File bytes
are kept. Files without the extension of an image are ignored and counted.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from wdstrain.conversion.labels import stated_classes
from wdstrain.conversion.listing import (
    SPLITS,
    Sample,
    Source,
    check_there,
    image_field,
    reject,
    walk,
)
from wdstrain.errors import SourceError
from wdstrain.runtime.machine import collector_paused
from wdstrain.runtime.options import refuse
from wdstrain.shards.declare import mask_label, palette_of
from wdstrain.shards.formats import EXTENSIONS, JPEG
from wdstrain.shards.kinds import ColumnInfo


@collector_paused()
def list_folder(
    source: str,
    *,
    flat: bool = False,
    fixed: Sequence[str] = (),
    masks: str | None = None,
    mask_classes: Sequence[str] = (),
    ignore: int | None = None,
) -> Source:
    """Return the images of a folder.

    flat: all images below it, without classes. masks: folder of their masks, see `_with_masks`;
    images without a mask are left out and counted. mask_classes, ignore: names of the classes in
    the masks, and the number that is none. fixed: names of the classes in the order of their
    numbers (default: the sorted class folders). Raises UsageError for a folder that is missing, and
    for a class folder that is not in `fixed`; SourceError for one without images or class folders,
    and for masks of several formats whose classes are named.
    """
    check_there(source, kind="folder")
    refuse(
        fixed and flat,
        "{classes} and {like} name classes, and {flat} packs none.",
        "Choose one, or name the classes of masks with {mask_classes}.",
        classes=...,
        like=...,
        flat=True,
        mask_classes=...,
    )
    ignored = Counter[str]()
    images = _find_images(
        source, _splits(source, ignored, alone=flat) or {"": source}, ignored, flat=flat
    )
    classes = sorted({image.stratum for image in images} - {""})
    other = [kind for kind in classes if fixed and kind not in fixed]
    refuse(
        other,
        f"{source}: the class folder {min(other, default='')!r} is none of the {len(fixed)} given "
        f"classes ({', '.join(fixed[:8])}{', ...' if len(fixed) > 8 else ''}).",
        "Rename it, or add it at the end of the classes.",
    )
    numbers = {name: b"%d" % number for number, name in enumerate(fixed or classes)}
    items = list[Sample]()
    for image in images if masks is None else _with_masks(source, masks, images, ignored):
        file, *mask = image.parts
        parts = [file, *([("cls", numbers[image.stratum])] if classes else []), *mask]
        items.append(image._replace(parts=parts))
    labels = [ColumnInfo("label", "class", "cls", classes=tuple(numbers))] if classes else []
    if mask_classes:
        fields = sorted({item.parts[-1][0] for item in items})
        reject(
            len(fields) > 1,
            f"{masks} holds {' and '.join(fields)}: a label lies in one field.",
            "Store all masks in one format.",
        )
        label = mask_label(fields[0], mask_classes, ignore)
        with suppress(OSError), open(items[0].parts[-1][1], "rb") as first:
            label = replace(label, palette=palette_of(first.read(), len(label.classes)))
        labels.append(label)
    about: dict[str, Any] = {"kind": "folder", "classes": len(numbers), **stated_classes(fixed)}
    about |= {} if masks is None else {"masks": True}
    about |= {"mask_classes": list(mask_classes), "ignore": ignore} if mask_classes else {}
    moved = (n for place, n in enumerate(numbers) if n.isdecimal() and int(n) != place)
    if name := next(moved, ""):
        about["decided"] = [
            f"classes: names are sorted, so folder {name!r} has the class number "
            f"{int(numbers[name])}"
        ]
    return Source(
        source,
        lambda: items,
        lambda: tuple(labels),
        about,
        len(items),
        ignored=dict(+ignored),
        root=source,
        stratum="label" if classes else "",
        has_files=True,
    )


def _image_files(root: str, ignored: Counter[str]) -> Iterator[tuple[str, str, str]]:
    """Yield (path below the root with slashes, path, field) of each image; count other files."""
    for below, folder, _, names, hidden in walk(root):
        ignored["hidden or system files"] += hidden
        for name in names:
            field = image_field(name)
            if field is None:
                ignored[f"*{os.path.splitext(name)[1].lower()}"] += 1
            else:
                yield f"{below}/{name}".lstrip("/"), f"{folder}{os.sep}{name}", field


def _find_images(
    source: str, roots: dict[str, str], ignored: Counter[str], *, flat: bool
) -> list[Sample]:
    """Return the images, whose name is the path below the folder of the split.

    roots: folders by split. Raises SourceError if there are none.
    """
    images, outside, folders = list[Sample](), 0, set[str]()
    for split, root in roots.items():
        folders.update([] if flat else next(walk(root))[2])
        for name, path, field in _image_files(root, ignored):
            kind, is_inside, _ = ("", True, "") if flat else name.partition("/")
            if is_inside:
                stem = name.rpartition(".")[0]
                images.append(Sample(stem, [(field, path)], split, stratum=kind, name=name))
            else:
                outside += 1
    ignored["images outside a class folder"] += outside
    if images:
        ignored["folders without images"] += len(folders - {image.stratum for image in images})
        return images
    reject(
        outside,
        f"{source} holds {outside} images and no class folders.",
        "Make a folder for each class, or use {flat} for images without labels.",
        flat=True,
    )
    seen = ", ".join(f"{count} x {name}" for name, count in sorted((+ignored).items()))
    raise SourceError(
        f"{source} holds no images (found: {seen or 'nothing'}).",
        f"Check the path. Images end in {', '.join(EXTENSIONS)}.",
    )


def _with_masks(
    source: str, masks: str, images: Sequence[Sample], ignored: Counter[str]
) -> list[Sample]:
    """Return the images that have a mask, with it, and count the others.

    A mask has the path of its image, from its own folder and without the extension: masks/a/1.png
    is that of images/a/1.jpg. Raises SourceError for JPEGs and for two masks of an image.
    """
    check_there(masks, kind="folder")
    root = os.path.realpath(source)
    refuse(
        os.path.commonpath([root, os.path.realpath(masks)]) == root,
        f"{{masks}}: it is inside of {source}, so masks would be packed as images.",
        "Name the folder of the images alone.",
        masks=masks,
    )
    by_stem: dict[str, tuple[str, str]] = {}
    for name, path, field in _image_files(masks, Counter()):
        stem = name.rpartition(".")[0]
        reject(
            field in JPEG.extensions or stem in by_stem,
            f"{path} cannot be the mask of an image: a JPEG changes class numbers, and "
            "an image has one mask.",
            "Store one PNG for each image.",
        )
        by_stem[stem] = (f"mask.{field}", path)
    paths = (os.path.relpath(str(image.parts[0][1]), source) for image in images)
    stems = [path.rpartition(".")[0].replace(os.sep, "/") for path in paths]
    matched = [
        image._replace(parts=[*image.parts, by_stem[stem]])
        for image, stem in zip(images, stems, strict=True)
        if stem in by_stem
    ]
    reject(
        not matched,
        f"{masks} has no mask for any image of {source}. A mask has the path of its image but "
        f"for the extension: {stems[0]}.png.",
    )
    ignored["masks without an image"] += len(by_stem.keys() - {*stems})
    ignored["images without a mask"] += len(images) - len(matched)
    return matched


def _splits(source: str, ignored: Counter[str], *, alone: bool) -> dict[str, str]:
    """Return {split: folder} if `source` has folders named train and val or test; else {}.

    alone: only if it has no other folders and files.
    """
    _, _, folders, files, _ = next(walk(source))
    named = {folder: SPLITS[folder.lower()] for folder in folders if folder.lower() in SPLITS}
    beside = len(folders) - len(named)
    if "train" not in named.values() or len(named) < 2 or (alone and (files or beside)):
        return {}
    reject(
        len(set(named.values())) < len(named),
        f"{source} holds {', '.join(sorted(named))}: two of these folders mean the same split.",
        "Keep one folder for each split.",
    )
    ignored["folders beside the splits"] += beside
    ignored["files beside the splits"] += len(files)
    folders_of = {split: os.path.join(source, folder) for folder, split in named.items()}
    return {split: folders_of[split] for split in SPLITS.values() if split in folders_of}
