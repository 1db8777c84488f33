"""Class folders to a listing: SRC/<class>/.../picture.jpg, or SRC/train/<class>/... and SRC/val/<class>/...

The class is the first folder level, its number the place among the sorted names, as torchvision's ImageFolder counts. File
bytes are kept. Files that are no image by their extension are passed over and counted by extension.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from wdstrain.errors import SourceError
from wdstrain.indexing import Label
from wdstrain.packing.listing import Item, Keys, Listing, image_field, is_litter

_SPLITS = {"train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}


def list_folder(source: str, *, flat: bool = False) -> Listing:
    """The pictures of a folder. `flat`: all files below it, without classes.

    Raises SourceError for a folder that is missing, holds no pictures, or holds no class folders.
    """
    if not os.path.isdir(source):
        raise SourceError(f"{source}: there is no such folder. Check the path.")
    ignored: dict[str, int] = {}
    splits = {} if flat else _splits(source)
    roots = {split: os.path.join(source, folder) for folder, split in splits.items()} or {"": source}
    classes = [] if flat else sorted({name for root in roots.values() for name in _folders(root)})
    keys: dict[str, Keys] = {split: Keys() for split in roots}
    items = []
    for split, root in roots.items():
        for name, path in _files(root, ignored):
            field = image_field(name)
            if field is None or (classes and "/" not in name):
                what = f"*{os.path.splitext(name)[1].lower()}" if field is None else "pictures outside a class folder"
                ignored[what] = ignored.get(what, 0) + 1
                continue
            parts: tuple[tuple[str, bytes | str], ...] = ((field, path),)
            if classes:
                parts += (("cls", str(classes.index(name.split("/", 1)[0])).encode()),)
            items.append(Item(keys[split].key(os.path.splitext(name)[0]), parts, split))
        if not flat and not classes:
            break
    if not flat and not classes:
        count = ignored.get("pictures outside a class folder", 0) + len(items)
        advice = "For pictures without labels add --flat." if count else "Name the folder that holds the pictures."
        raise SourceError(
            f"{source} holds {count} pictures and no class folders; one folder for each class is expected. {advice}"
        )
    if not items:
        found = ", ".join(f"{count} x {what}" for what, count in sorted(ignored.items())) or "nothing"
        raise SourceError(f"{source} holds no pictures (found: {found}). Known extensions are jpg, png, webp and the like.")
    labels = (Label("class", "class", "cls", classes=tuple(classes)),) if classes else ()
    return Listing(items, labels, {"kind": "folder", "classes": len(classes)}, ignored)


def _splits(source: str) -> dict[str, str]:
    """{folder: split} where all folders of `source` are named like splits, else nothing."""
    folders = _folders(source)
    named = {folder: _SPLITS[folder.lower()] for folder in folders if folder.lower() in _SPLITS}
    return named if len(named) == len(folders) == len(set(named.values())) and "train" in named.values() else {}


def _folders(root: str) -> list[str]:
    with os.scandir(root) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and not is_litter(entry.name))


def _files(root: str, ignored: dict[str, int]) -> Iterator[tuple[str, str]]:
    """(name relative to root with forward slashes, path) of every file below root, sorted; links to files are followed."""
    for folder, folders, files in os.walk(root):
        litter = sum(map(is_litter, [*folders, *files]))
        if litter:
            ignored["hidden or system files"] = ignored.get("hidden or system files", 0) + litter
        folders[:] = sorted(name for name in folders if not is_litter(name))
        for name in sorted(name for name in files if not is_litter(name)):
            path = os.path.join(folder, name)
            yield os.path.relpath(path, root).replace(os.sep, "/"), path
