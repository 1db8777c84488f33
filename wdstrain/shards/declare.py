"""The index of a folder of shards, with columns and labels: `wt.index` and `wdstrain index`.

Headers are read again. Splits, labels, provenance and, for shards with the same samples, checksums
and columns are kept from the index that is there. Columns and labels of shards made elsewhere are
read from their fields in one forward pass. A column is named by where it is stored: `cls` for a field,
`json.kind` for an entry of a JSON field.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from wdstrain.errors import SampleError, ShardError, UsageError, WdstrainError, logger
from wdstrain.report.printing import printable
from wdstrain.runtime.options import as_list, refuse, takes
from wdstrain.shards.columns import (
    PLAIN_FIELDS,
    Column,
    ColumnBuilder,
    as_label,
    column_name,
    counted,
    is_json,
    typed,
)
from wdstrain.shards.formats import is_image
from wdstrain.shards.index import Index, join
from wdstrain.shards.index_io import find_document, load, save_index
from wdstrain.shards.kinds import (
    FLAG_CLASSES,
    KINDS,
    NOT_A_COLUMN,
    Classes,
    ColumnInfo,
    Place,
    names_of,
    place_of_entry,
    scalar,
)
from wdstrain.shards.label_kinds import class_names, rule_of
from wdstrain.shards.offsets import Ints
from wdstrain.shards.options import IndexOptions
from wdstrain.shards.resolve import is_newer, is_unchanged, picked, scan
from wdstrain.shards.where import column_named, names_in
from wdstrain.storage.addresses import INDEX_NAME, check_finished, expand, tars_of
from wdstrain.storage.remote import is_remote

_LABELS = [name for name, kind in KINDS.items() if kind.can_be_label]
_MOST_CLASSES = 1 << 20  # of a label without names
_MASKS = ("png", "tif", "tiff", "bmp", "pgm", "gif")  # extensions of lossless images
MOST_FAR = 200  # labels that are read from a server; each is a request


# --- the index of a folder ------------------------------------------------------------------------


@takes(IndexOptions)
def index(options: IndexOptions) -> Index:
    """Make the index of all shards in a folder, write it there, and return it.

    Only headers are read, the chosen columns, and the columns of shards that the existing index does
    not list as they are. Splits, labels and provenance of an existing index are kept, and the
    checksums and columns of shards whose samples have the same offsets. Raises UsageError for shards
    of several folders, for a folder without shards, and for columns and labels that do not fit,
    ShardError for a shard that is cut or damaged.
    """
    listed = expand(options.urls)
    folder, *others = dict.fromkeys(map(os.path.dirname, listed))
    refuse(
        others or is_remote(listed[0]),
        f"these shards lie in {len(others) + 1} folders or on a server; an index is written "
        "beside the shards of one folder on this machine.",
        "Run this for each folder, and copy the index to the server.",
    )
    check_finished(folder)
    paths = tars_of(folder)
    refuse(
        not paths,
        f"{folder or '.'}: this folder holds no .tar file.",
        "Name the folder of the shards.",
    )
    index, index_path = scan(paths), os.path.join(folder, INDEX_NAME)
    changed = [shard.name for shard in index.shards if not is_unchanged(shard)]
    if changed:
        raise ShardError(
            f"{changed[0]} was written to while it was scanned.",
            "Run this again when it is complete.",
        )
    document = find_document(index_path)
    if document is not None:
        index = _with_former(index, document, index_path)
    if options.columns:
        index = with_columns(index, as_list(options.columns))
    if options.label is not None:
        index = with_label(index, options.label, options.classes, options.ignore)
    if twice := len(index) - pc.count_distinct(index.offsets.rows.column(0)).as_py():
        logger.warning("%d samples have the key of another sample of this set", twice)
    save_index(index, folder)
    return index


def _with_former(index: Index, document: Index, index_path: str) -> Index:
    """Return `index` with what headers do not give, from the former index file at `index_path`.

    Splits, labels and provenance are kept; so are checksums of shards with unchanged samples.
    document: the former index without its samples.
    """
    splits, labels = {shard.name: shard.split for shard in document.shards}, document.labels
    infos = (*document.columns, *(label for label in labels if label.has_column))
    places = dict.fromkeys(info.place for info in infos)
    former, parts, new = replace(document, shards=()), list[Index](), list[str]()
    with suppress(ShardError):
        former = load(index_path)
    for number, shard in enumerate(index.shards):
        shard = replace(shard, split=splits.get(shard.name, ""))
        part, old = index.pick([number]), picked(former, [shard.path])
        if old.shards and _is_same(old, part, {field for field, _ in places}):
            part = replace(old, shards=(replace(shard, sha256=old.shards[0].sha256),))
        else:
            new.append(shard.name)
            part = replace(part, shards=(shard,))
            part = with_labels(read_columns(part, places), labels)
        parts.append(part)
    merged = replace(join(parts), info={**document.info, **index.info})
    if "samples" in merged.info:
        merged.info["samples"] = class_counts(merged)
    for label in labels if new else ():
        if (label.is_class or label.kind in ("mask", "boxes")) and label.entry is None:
            logger.warning(
                "new in this set: %s. Numbers in their %s are class numbers of this set: %s",
                ", ".join(new[:5]) + ", ..." * (len(new) > 5),
                label.field,
                label.numbering,
            )
    return merged


def _is_same(old: Index, new: Index, fields: set[str]) -> bool:
    """Return whether one shard still holds the samples that its former index lists.

    fields: those of its columns. They are compared by checksums if the shard is newer than the index.
    """
    if old.shards[0].bytes != new.shards[0].bytes or old.offsets.differences(new.offsets):
        return False
    if not is_newer(new.shards[0]):
        return True
    with suppress(ShardError):
        deque(old.read(np.arange(len(old)), fields), maxlen=0)
        return old.offsets.has_checksums
    return False


def class_counts(index: Index) -> dict[str, dict[str, int]]:
    """Return the number of samples of each class, by split, from the column of the first label."""
    label = next((label for label in index.labels if label.is_class), None)
    numbers = {
        split: [i for i, shard in enumerate(index.shards) if shard.split == split]
        for split in index.splits
    }
    return {split: _counts(index.pick(own), label) for split, own in numbers.items()}


def _counts(index: Index, label: ColumnInfo | None) -> dict[str, int]:
    """Return the number of samples of each class that occurs, in the order of the classes.

    Samples without a value count as the class "".
    """
    columns = [column for column in index.columns if label and column.place == label.place]
    values = columns[0].values if columns else pa.nulls(len(index))
    counts = {"" if value is None else str(value): n for value, n in counted(values).items()}
    places = {name: place for place, name in enumerate(label.classes if label is not None else ())}
    return dict(sorted(counts.items(), key=lambda n: (places.get(n[0], len(places)), n[0])))


# --- columns and labels ---------------------------------------------------------------------------


def with_columns(index: Index, names: Sequence[str]) -> Index:
    """Return the index with columns of these fields and entries. Columns that it has are read again.

    Raises UsageError for a name that is no field, for a column without a value, and for values that
    no column can hold.
    """
    places = list(dict.fromkeys(_place(index, name) for name in names))
    kept = [column for column in index.columns if column.place not in places]
    sizes = {column_name(place): place for place in places if place[1] and is_image(place[0])}
    for column in kept:
        if column.name in sizes:
            raise UsageError(
                f"{column.stored_as} is a column called {column.name!r} already.",
                "Leave this size out.",
            )
    return index.with_columns((*kept, *typed(_raw(index, places), index.labels)))


def with_columns_of(index: Index, condition: str) -> Index:
    """Return the index with columns of the fields that a condition names and that have none."""
    places = {name: place_of_entry(name) for name in names_in(condition)}
    names = [
        name
        for name, (field, entry) in places.items()
        if column_named(index, name) is None
        and field in index.fields
        and (entry is not None or not (is_json(field) or is_image(field)))
        and not index.disagreement(field, entry)
    ]
    return with_columns(index, names) if names else index


def with_labels(index: Index, labels: Sequence[ColumnInfo]) -> Index:
    """Return `index` with these labels, and with its columns typed by them.

    A column that no Arrow type can hold is left out. A label without a column stays without one.
    """
    columns = [c for c in typed(index.columns, labels) if c.kind != NOT_A_COLUMN]
    return replace(index.with_columns(columns), labels=tuple(labels))


def with_label(
    index: Index, name: str, classes: Sequence[str] | None = None, ignored: int | None = None
) -> Index:
    """Return the index with a label that is stored in a field or in an entry of a JSON field.

    name: of the column, with `:KIND` if the values do not say which kind is meant. classes: names
    in the order of their numbers; default: sorted. ignored: of masks, see `with_field_label`.
    Raises UsageError for values that do not fit.
    """
    head, _, kind = name.rpartition(":")
    head, kind = (head, kind) if head and kind in _LABELS else (name, "")
    place = _place(index, head)
    refuse(
        kind in ("mask", "boxes") and (kind == "boxes") != is_boxes(head),
        f"{head} cannot hold {'boxes' if kind == 'boxes' else 'masks'}.",
        "Boxes lie in boxes.json or NAME.boxes.json, masks in an image.",
    )
    refuse(
        ignored is not None and (is_boxes(head) or not (kind == "mask" or is_mask(head))),
        "{ignore} is for masks.",
        f"Leave it out of the label {name}.",
        ignore=ignored,
    )
    if kind == "mask" or is_mask(head) or is_boxes(head):
        return with_field_label(index, head, classes or (), ignored)
    column = _raw(index, [place])[0]
    kind = kind or _kind(column, classes)
    refuse(
        kind == "number" and classes is not None,
        f"{name} is a number, and numbers have no classes.",
        "Leave classes away.",
    )
    title = "label" if place[1] is None and place[0] in PLAIN_FIELDS else column_name(place)
    label = ColumnInfo(title, kind, *place, _classes(column, kind, classes))
    declared = as_label(column, label)
    _check_values(index, column, declared, label)
    labels = [other for other in index.labels if other.place != place and other.name != title]
    columns = [other for other in index.columns if other.place != place]
    return replace(index.with_columns((*columns, declared)), labels=(*labels, label))


def with_field_label(
    index: Index, field: str, classes: Sequence[str], ignored: int | None = None
) -> Index:
    """Return the index with a label whose values are boxes, or masks: images of class numbers.

    classes: names in the order of their numbers, of masks also only the number of classes. The label
    has no column. It is named like the field without the extension. ignored: number of pixels without
    a class, beside 255. Raises UsageError for classes that masks or boxes cannot have.
    """
    label = boxes_label(field, classes) if is_boxes(field) else mask_label(field, classes, ignored)
    if label.kind == "mask" and len(index) and field in index.fields:
        [(_, sample)] = index.read([0], {field})
        label = replace(label, palette=palette_of(sample.get(field, b""), len(label.classes)))
    others = (other for other in index.labels if other.name != label.name)
    return replace(index, labels=(label, *others))


def is_mask(field: str) -> bool:
    """Return whether a field holds masks by its name, such as mask.png and left.mask.png."""
    before, _, extension = field.rpartition(".")
    return before.rpartition(".")[2] == "mask" and extension in _MASKS


def mask_label(field: str, classes: Sequence[str], ignored: int | None) -> ColumnInfo:
    """Return the label of masks. Raises UsageError for fewer than 2 classes or more than 255."""
    if len(classes) == 1 and classes[0].isdecimal():
        classes = tuple(map(str, range(int(classes[0]))))
    refuse(
        not 2 <= len(classes) <= 255 or len(set(classes)) < len(classes),
        f"{field} holds masks, and {len(classes)} classes are named: must be 2 to 255 "
        "different ones.",
        "Name them in the order of their numbers: background,cat,dog, or give their number: 21",
    )
    name = field.rpartition(".")[0] or "mask"
    return ColumnInfo(name, "mask", field, None, tuple(classes), ignored=ignored)


def palette_of(mask: bytes, count: int) -> tuple[str, ...]:
    """Return the colors "#rrggbb" of the first numbers of a PNG.

    Returns () without a palette, and for one that shows numbers as grays or several in one color.
    """
    start = mask.find(b"PLTE") + 4
    colors = mask[start : start + 3 * count].hex() if start >= 4 else ""
    palette = tuple(f"#{colors[at : at + 6]}" for at in range(0, len(colors), 6))
    is_colored = any(color[1:3] != color[3:5] for color in palette)
    return palette if is_colored and len(set(palette)) == count else ()


def is_boxes(field: str) -> bool:
    """Return whether a field holds boxes by its name, such as boxes.json and left.boxes.json."""
    return f".{field}".endswith(".boxes.json")


def boxes_label(field: str, classes: Sequence[str]) -> ColumnInfo:
    """Return the label of boxes, named like the field without its extension. Raises UsageError.

    classes: names in the order of their numbers.
    """
    refuse(
        not classes or len(set(classes)) < len(classes),
        f"{field} holds boxes, and the classes are {', '.join(classes)[:80] or 'not named'}: "
        "each must be named once.",
        "Name them in the order of their numbers: cat,dog, or a file with a name on each line.",
    )
    return ColumnInfo(field.removesuffix(".json"), "boxes", field, None, tuple(classes))


# --- parts ----------------------------------------------------------------------------------------


def _place(index: Index, name: str) -> Place:
    """Return (field, entry) of a column's name. Raises UsageError for a name that is no field."""
    joined = {column.name: column.place for column in index.columns if column.is_joined}
    field, entry = joined.get(name) or place_of_entry(name)
    is_part = is_boxes(field) or entry is not None or not is_json(field)
    if name in joined or (field in index.fields and is_part):
        return field, entry
    shown = ", ".join(f"{field}.ENTRY" if is_json(field) else field for field in index.fields)
    raise UsageError(
        f"there is no field {name!r} in these shards.",
        f"Use one of: {shown}.",
    )


def _raw(index: Index, places: Sequence[Place]) -> tuple[Column, ...]:
    """Return the columns of these places as their bytes say. Raises UsageError."""
    columns = read_columns(index, places).columns
    for column in columns:
        refuse(
            column.stored.null_count == len(column) or column.kind == "vector",
            f"no sample has a value in {column.stored_as}, or it holds values that no column "
            "can hold. A column holds numbers, texts of at most 256 characters, true and "
            "false, or lists of names, and values of one type.",
            "Look at one: wdstrain show",
        )
    return columns


def _kind(column: Column, classes: Sequence[str] | None) -> str:
    """Return the kind of a label, by its values. classes: as the user names them."""
    if column.kind in ("integer", "number", "text") and classes is None:
        counts = counted(column.values.drop_null())
        rule = rule_of("these shards", column.stored_as, counts, counts.values())
        return "number" if rule == "quantity" else "class"
    is_named = column.kind == "flag" and classes is not None
    return "class" if column.kind not in _LABELS or is_named else column.kind


def _classes(column: Column, kind: str, given: Sequence[str] | None) -> tuple[str, ...]:
    """Return the class names of a label; () for numbers."""
    if kind == "number":
        return ()
    if kind == "flag" or (column.kind == "flag" and given is None):
        return FLAG_CLASSES
    if given is not None:
        if not given or len(set(given)) < len(given):
            raise UsageError(
                "must name each class once, in the order of their numbers: cat,dog, or a file "
                "with a name on each line.",
                option="classes",
                value=",".join(given)[:80],
            )
        return tuple(given)
    if column.kind == "integer":
        low, high = pc.min_max(column.values).as_py().values()
        refuse(
            low < 0 or high >= _MOST_CLASSES,
            f"{column.name} has values from {low} to {high}, and class numbers count from 0. "
            f"If they are numbers, add :number to the name.",
        )
        return tuple(map(str, range(high + 1)))
    values = column.values.flatten() if column.kind == "multi" else column.values
    names = class_names(filter(None, pc.unique(pc.cast(values, pa.string())).to_pylist()), kind)
    if column.entry is None and any(map(str.isdecimal, names)):
        raise UsageError(
            f"{column.name} holds names and numbers, such as {names[-1]!r} and {names[0]!r}, and "
            "a number counts as the number of a class.",
            "Name the classes in the order of their numbers.",
        )
    return names


def _check_values(index: Index, raw: Column, declared: Column, label: ColumnInfo) -> None:
    """Raise UsageError for the first sample whose value is none that the label can have."""
    wrong = np.asarray(declared.values.is_null()) & ~np.asarray(raw.values.is_null())
    if label.kind == raw.kind == "multi":
        known = pc.is_in(raw.values.flatten(), value_set=pa.array(label.classes, pa.string()))
        wrong[pc.list_parent_indices(raw.values).filter(pc.invert(known)).to_numpy()] = True
    if wrong.any():
        number = int(wrong.argmax())
        value = str(raw.values[number].as_py())[:80]
        raise UsageError(
            f"{index.shard_with(number).shown}: {printable(raw.name)} of sample "
            f"{printable(index.key(number))!r} is {printable(value)!r}, which does not fit the "
            f"label ({label.summary}; {int(wrong.sum())} such samples).",
            "Name all classes, or another kind.",
        )


# --- values of labels, read at their offsets without the images between them ----------------------


def even_part(index: Index, most: int) -> Ints:
    """Return ids of at most `most` samples, evenly spread over the set, ascending. int64[n]

    At most MOST_FAR ids if any shard is on a server.
    """
    most = min(most, MOST_FAR) if any(is_remote(shard.path) for shard in index.shards) else most
    return np.linspace(0, len(index) - 1, min(len(index), most)).astype(np.int64)


def complete_column(index: Index, label: ColumnInfo) -> Column | None:
    """Return the column of a label if it has a value for every sample."""
    found = (c for c in index.columns if (c.place, c.kind) == (label.place, label.kind))
    return next((c for c in found if len(c) and not c.stored.null_count), None)


def recorded_counts(index: Index, label: ColumnInfo) -> dict[str, int]:
    """Return the number of samples of each class, from the label's column.

    {} without a complete column. A sample of several classes counts for each of them.
    """
    counts = _counts(index, label) if complete_column(index, label) is not None else {}
    is_known = set(counts) <= set(label.classes)
    return {name: counts.get(name, 0) for name in label.classes} if is_known and counts else {}


def read_columns(index: Index, places: Collection[Place]) -> Index:
    """Return `index` with columns of these fields and entries only, read forward from the shards.

    Joined columns are those of the index.
    """
    joined = [column for column in index.columns if column.is_joined and column.place in places]
    stored = [place for place in places if place not in {column.place for column in joined}]
    builder = ColumnBuilder(stored)
    for _, fields in index.read(np.arange(len(index)) if stored else [], {f for f, _ in stored}):
        builder.add(fields.items())
    return index.with_columns((*joined, *builder.finish()))


def classes_in(data: memoryview, entry: str | None, classes: Sequence[str]) -> list[str]:
    """Return the class names in the bytes of a label; [] if they are invalid.

    The value is a list of names, a name, or a number, which counts in `classes`. entry: of JSON, None
    if the value is a whole field.
    """
    try:
        value = scalar(data, entry)
    except (WdstrainError, ValueError):
        return []
    if isinstance(value, list):
        return names_of(value)
    with suppress(SampleError, IndexError):  # tables store names, which may look like numbers
        return [classes[Classes(classes, by_name=entry is not None).number(value)]]
    return [str(value)]
