"""Images of a folder.

SRC/<class>/.../image.jpg, or SRC/train/<class>/... beside SRC/val. The class is the first folder
level. Its number is its place among the sorted names, as in torchvision's ImageFolder. File bytes
are kept. Files without the extension of an image are ignored and counted.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

from wdstrain.conversion.classes import look_alikes, stated_classes
from wdstrain.conversion.listing import (
    SPLITS,
    Keys,
    Sample,
    Source,
    check_there,
    count_ignored,
    image_field,
    is_litter,
)
from wdstrain.decode.formats import EXTENSIONS, JPEG
from wdstrain.errors import SourceError, UsageError
from wdstrain.runtime.machine import collector_paused
from wdstrain.shards.kinds import ColumnInfo


@collector_paused()
def list_folder(
    source: str, *, flat: bool = False, fixed: Sequence[str] = (), masks: str | None = None
) -> Source:
    """Return the images of a folder.

    flat: all images below it, without classes. masks: folder of their masks, see `_find_masks`;
    images without a mask are left out and counted. fixed: names of the classes in the order of
    their numbers (default: the sorted class folders). Raises UsageError for a folder that is
    missing, and for a class folder that is not in `fixed`; SourceError for one without images or
    class folders.
    """
    check_there(source, kind="folder")
    if not os.path.isdir(source):
        raise UsageError(f"{source}: there is no such folder. Check the path.")
    ignored: dict[str, int] = {}
    splits = _splits(source, ignored, alone=flat)
    roots = {split: os.path.join(source, folder) for folder, split in splits.items()}
    roots = roots or {"": source}
    images, outside = _find_images(roots, ignored, flat=flat)
    mask_files = _find_masks(source, masks, images, ignored) if masks and images else None
    classes = [] if flat else sorted({image.stratum for image in images})
    if fixed and flat:
        raise UsageError("classes and like name classes, and flat=True packs none. Choose one.")
    _check_found(source, classes, fixed, outside if not images else None, ignored)
    count_ignored(ignored, "images outside a class folder", outside)
    if classes:
        folders = {name for root in roots.values() for name in _folders(root)}
        count_ignored(ignored, "folders without images", len(folders - set(classes)))
    names = dict.fromkeys([*fixed, *classes])
    decided = [f"classes: {alike} look alike" for alike in look_alikes(names)]
    numbers = {name: str(number).encode() for number, name in enumerate(fixed or classes)}
    keys, items = Keys(), list[Sample]()
    for image in images:
        path, parts = str(image.parts[0][1]), list(image.parts)
        if classes:
            parts.append(("cls", numbers[image.stratum]))
        if mask_files is not None:
            if path not in mask_files:
                count_ignored(ignored, "images without a mask")
                continue
            parts.append(mask_files[path])
        stem = image.name.rpartition(".")[0]
        key = keys.key(stem)
        name = image.name if key != stem else ""
        items.append(image._replace(key=key, parts=parts, name=name))
    labels = (
        (ColumnInfo("label", "class", "cls", classes=tuple(fixed or classes)),) if classes else ()
    )
    about: dict[str, Any] = {"kind": "folder", "classes": len(fixed or classes)}
    about |= stated_classes(fixed)
    if masks is not None:
        about["masks"] = True
    if decided:
        about["decided"] = decided
    return Source(
        source,
        lambda: items,
        lambda: labels,
        about,
        len(items),
        ignored=ignored,
        root=source,
        stratum="label" if classes else "",
        has_files=True,
    )


def _find_images(
    roots: dict[str, str], ignored: dict[str, int], *, flat: bool
) -> tuple[list[Sample], int]:
    """Return (images, number of images outside a class folder). roots: folders by split.

    name: the path below the folder of the split.
    """
    images, outside = list[Sample](), 0
    for split, root in roots.items():
        for below, folder, names in _files(root, ignored):
            kind = "" if flat else below.split("/", 1)[0]
            prefix = f"{below}/" if below else ""
            for name in names:
                field = image_field(name)
                if field is None:
                    count_ignored(ignored, f"*{os.path.splitext(name)[1].lower()}")
                elif not kind and not flat:
                    outside += 1
                else:
                    parts = [(field, f"{folder}{os.sep}{name}")]
                    images.append(Sample(None, parts, split, stratum=kind, name=prefix + name))
    return images, outside


def _check_found(
    source: str,
    classes: Sequence[str],
    fixed: Sequence[str],
    outside: int | None,
    ignored: dict[str, int],
) -> None:
    """Raise UsageError for a folder of an unknown class, SourceError if there are no images.

    outside: images outside a class folder, if no others were found; else None.
    """
    other = [kind for kind in classes if fixed and kind not in fixed]
    if other:
        raise UsageError(
            f"{source}: the class folder {other[0]!r} is none of the {len(fixed)} given classes "
            f"({', '.join(fixed[:8])}{', ...' if len(fixed) > 8 else ''}). Rename it, or add it at "
            "the end of the classes."
        )
    if outside:
        raise SourceError(
            f"{source} holds {outside} images and no class folders. Make a folder for each class, "
            "or use flat=True for images without labels."
        )
    if outside is not None:
        seen = ", ".join(f"{count} x {name}" for name, count in sorted(ignored.items()))
        raise SourceError(
            f"{source} holds no images (found: {seen or 'nothing'}). Check the path. Images end in "
            f"{', '.join(EXTENSIONS)}."
        )


def _find_masks(
    source: str,
    masks: str,
    images: Sequence[Sample],
    ignored: dict[str, int],
) -> dict[str, tuple[str, str]]:
    """Return (field, path) of the mask of each image, by the path of the image.

    A mask has the path of its image, from its own folder and without the extension: masks/a/1.png
    is that of images/a/1.jpg. Raises SourceError for JPEGs and for two masks of an image.
    """
    check_there(masks, kind="folder")
    inside = os.path.commonpath([os.path.realpath(source), os.path.realpath(masks)])
    if inside == os.path.realpath(source):
        raise UsageError(
            f"masks={masks}: it is inside of {source}, so masks would be packed as images. Name "
            "the folder of the images alone."
        )
    by_stem: dict[str, tuple[str, str]] = {}
    for below, folder, names in _files(masks, {}):
        for name in names:
            field, path = image_field(name), f"{folder}{os.sep}{name}"
            if field in JPEG.extensions:
                raise SourceError(
                    f"{path} is a JPEG, which changes class numbers. Store masks as PNG."
                )
            stem = f"{below}/{name}".lstrip("/").rpartition(".")[0]
            if field is None:
                continue
            if stem in by_stem:
                raise SourceError(f"{by_stem[stem][1]} and {path} are masks of one image.")
            by_stem[stem] = (f"mask.{field}", path)
    paths = [str(image.parts[0][1]) for image in images]
    stems = {
        path: os.path.relpath(path, source).rpartition(".")[0].replace(os.sep, "/")
        for path in paths
    }
    matched = {path: by_stem[stem] for path, stem in stems.items() if stem in by_stem}
    if not matched:
        raise SourceError(
            f"{masks} has no mask for any image of {source}. A mask has the path of its image but "
            f"for the extension: {next(iter(stems.values()))}.png."
        )
    count_ignored(
        ignored, "masks without an image", len(by_stem) - len(set(stems.values()) & set(by_stem))
    )
    return matched


def _splits(source: str, ignored: dict[str, int], *, alone: bool) -> dict[str, str]:
    """Return {folder: split} if `source` has folders named train and val or test; else {}.

    alone: only if it has no other folders and files.
    """
    folders = _folders(source)
    named = {folder: SPLITS[folder.lower()] for folder in folders if folder.lower() in SPLITS}
    if "train" not in named.values() or len(named) < 2:
        return {}
    with os.scandir(source) as entries:
        beside = [entry.name for entry in entries if entry.is_file() and not is_litter(entry.name)]
    if alone and (beside or len(folders) > len(named)):
        return {}
    if len(set(named.values())) < len(named):
        raise SourceError(
            f"{source} holds {', '.join(sorted(named))}: two of these folders mean the same split. "
            "Keep one folder for each split."
        )
    count_ignored(ignored, "folders beside the splits", len(folders) - len(named))
    count_ignored(ignored, "files beside the splits", len(beside))
    order = list(dict.fromkeys(SPLITS.values()))
    return dict(sorted(named.items(), key=lambda item: order.index(item[1])))


def _folders(root: str) -> list[str]:
    try:
        with os.scandir(root) as entries:
            return sorted(
                entry.name for entry in entries if entry.is_dir() and not is_litter(entry.name)
            )
    except OSError as error:
        raise SourceError(
            f"{root} cannot be listed: {error.strerror}. Check its permissions."
        ) from error


def _files(root: str, ignored: dict[str, int]) -> Iterator[tuple[str, str, list[str]]]:
    """Yield (path below root with forward slashes, path, file names) of each folder, sorted.

    Links are followed.
    """

    def failed(error: OSError) -> None:
        raise SourceError(
            f"{error.filename} cannot be listed: {error.strerror}. Check its permissions."
        ) from error

    seen: set[str] = set()
    for folder, folders, files in os.walk(root, onerror=failed, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:
            raise SourceError(
                f"{folder} is found twice below {root} because of a link, so its images would come "
                f"twice. Remove the link."
            )
        seen.add(real)
        names = sorted(name for name in files if not is_litter(name))
        kept = sorted(name for name in folders if not is_litter(name))
        count_ignored(
            ignored, "hidden or system files", len(files) + len(folders) - len(names) - len(kept)
        )
        folders[:] = kept
        for path in [folder, *names]:
            if not path.isprintable() and any(0xDC80 <= ord(letter) <= 0xDCFF for letter in path):
                raise SourceError(
                    f"{path!r}: this name is not UTF-8, which an index needs. Rename it."
                )
        below = os.path.relpath(folder, root).replace(os.sep, "/")
        yield "" if below == "." else below, folder, names
