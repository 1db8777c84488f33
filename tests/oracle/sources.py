"""Random sources of a conversion, each with a model of the expected shards.

An item is identified by the bytes of one of its fields, which no other item has.
"""

from __future__ import annotations

import csv
import dataclasses
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import wdstrain as wt
from tests.conftest import encoded, npy
from tests.oracle.data_set import CLASSES, draw_data_set, write

WORDS = ("ant", "bee", "Cat", "dog fish", "été", "10")
NOISE = (".DS_Store", "notes.txt", "._0.png", "Thumbs.db")


@dataclass
class Item:
    """One sample of the source: its fields as bytes, its labels by name, and its group."""

    identity: bytes
    fields: dict[str, bytes] = field(default_factory=dict)
    labels: dict[str, str | float] = field(default_factory=dict)
    group: str = ""  # "": a group by itself


@dataclass
class Source:
    """A source to convert, and the samples that the shards must contain.

    kind: the function that draws it. field: the tar field that identifies an item.
    bad: samples that must be skipped and counted.
    change: alters the source, so that a resume must be refused; None if a change is undetectable.
    classes: name of the label of classes; None if there is none.
    grouping: the options that keep the groups of the items together; none if items have no groups.
    refused: words of the error if `convert` is always refused.
    """

    kind: str
    field: str
    items: list[Item]
    convert: Callable[..., wt.Index]
    bad: int = 0
    change: Callable[[], None] | None = None
    classes: str | None = "label"
    grouping: dict[str, Any] = dataclasses.field(default_factory=dict)
    refused: str | None = None

    def item(self, fields: Mapping[str, Any], row: int | None = None) -> Item:
        """Return the item of a packed sample, or of a row of a batch of samples."""
        for name in self.field.split(";"):
            if name in fields:
                identity = fields[name] if row is None else fields[name][row]
                if identity is not None:
                    return self.by_identity[identity]
        raise AssertionError(f"{[*fields]} has no {self.field}")

    def __post_init__(self) -> None:
        self.by_identity = {item.identity: item for item in self.items}
        assert len(self.by_identity) == len(self.items)


def draw_source(rng: random.Random, folder: Path) -> Source:
    folder.mkdir(parents=True)
    return rng.choice((draw_folder, draw_table, draw_arrays, draw_iterable, draw_tars))(rng, folder)


def draw_image(rng: random.Random, form: str = "PNG") -> bytes:
    pixels = np.frombuffer(rng.randbytes(7 * 5 * 3), np.uint8).reshape(7, 5, 3)
    return encoded(Image.fromarray(pixels), form, quality=95)


def draw_groups(rng: random.Random, items: list[Item]) -> None:
    """Draw the group of each item; "" for an item that is a group by itself.

    All groups have different sizes: the documented order of groups, by size, leaves no choice.
    """
    sizes = list[int]()
    while sum(sizes) + len(sizes) + 1 <= len(items):
        sizes.append(len(sizes) + 1)
    if not sizes:
        return
    sizes[-1] += len(items) - sum(sizes)
    names = [f"{rng.choice(WORDS)} {size}" for size in sizes]
    if sizes[0] == 1 and rng.random() < 0.5:
        names[0] = ""
    groups = [name for name, size in zip(names, sizes, strict=True) for _ in range(size)]
    rng.shuffle(groups)
    for item, group in zip(items, groups, strict=True):
        item.group = group


def draw_folder(rng: random.Random, folder: Path) -> Source:
    """Class folders with unusual names, non-image files, and dots and equal stems in names."""
    items, paths = [], []
    for name in rng.sample(WORDS, rng.randrange(1, len(WORDS))):
        for number in range(rng.randrange(1, 12)):
            form, ending = rng.choice((("PNG", "png"), ("JPEG", "jpg"), ("JPEG", "JPEG")))
            below = folder / name / rng.choice(("", "", "deep", "a.b"))
            below.mkdir(parents=True, exist_ok=True)
            stem = rng.choice((f"{number}", f"{number}.x", f"ü {number}"))
            items.append(Item(draw_image(rng, form), {}, {"label": name}))
            paths.append(below / f"{stem}.{ending}")
            paths[-1].write_bytes(items[-1].identity)
        if rng.random() < 0.3:
            (folder / name / rng.choice(NOISE)).write_bytes(b"nothing")

    def change() -> None:
        path = rng.choice(paths)
        path.write_bytes(draw_image(rng, "PNG" if path.suffix == ".png" else "JPEG"))

    convert = partial(wt.convert_folder, str(folder))
    return Source("folder", "png;jpg;jpeg", items, convert, change=change)


def draw_table(rng: random.Random, folder: Path) -> Source:
    """A CSV of paths and labels; some images are missing, some labels are empty."""
    items, rows, good = list[Item](), list[dict[str, str]](), list[dict[str, str]]()
    words, is_absolute = rng.sample(WORDS[:-1], rng.randrange(2, len(WORDS))), rng.random() < 0.3
    (folder / "images").mkdir()
    for number in range(rng.randrange(3, 40)):
        item = Item(draw_image(rng), {}, {"kind": rng.choice(words)})
        item.labels["angle"] = round(rng.uniform(-1, 1), 4)
        name = f"images/{number:03d}.png"
        row = {"file": str(folder / name) if is_absolute else name}
        row |= {label: str(value) for label, value in item.labels.items()}
        row["text"] = rng.choice(('say "x"', "a,b", "00123", "\n", ""))
        row["owner"] = rng.choice(WORDS)  # replaced in good rows
        fault = rng.choice((None,) * 12 + ("missing", "empty label", "no number"))
        row |= {"empty label": {"kind": ""}, "no number": {"angle": "oops"}}.get(fault or "", {})
        if fault != "missing":
            (folder / name).write_bytes(item.identity)
        rows.append(row)
        if fault is None:
            good.append(row)
            items.append(item)
    draw_groups(rng, items)
    for row, item in zip(good, items, strict=True):
        row["owner"] = item.group

    def write_rows() -> None:
        with open(folder / "table.csv", "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([[*rows[0]], *(row.values() for row in rows)])

    def change() -> None:
        good[0]["text"] += "another text"
        write_rows()

    write_rows()
    options: dict[str, Any] = {"image": "file", "label": ["kind:class", "angle:number"]}
    convert = partial(wt.convert_table, str(folder / "table.csv"), **options, on_error="skip")
    bad, grouping = len(rows) - len(good), {"group_by": "owner"}
    return Source("table", "png", items, convert, bad, change, "kind", grouping)


def draw_arrays(rng: random.Random, folder: Path) -> Source:
    """Arrays of one length in .npy files or in memory, with class numbers."""
    count, names = rng.randrange(2, 60), ["zero", "one", "two"]
    values = np.random.default_rng(rng.getrandbits(64))
    x, labels = values.integers(0, 1 << 62, (count, 4)), values.integers(0, 3, count)
    labels[: min(3, count)] = np.arange(min(3, count))
    x[:, 0] = np.arange(count)
    pairs = zip(x, labels.tolist(), strict=True)
    items = [Item(npy(row), {}, {"label": names[label]}) for row, label in pairs]
    arrays: dict[str, Any] = {"x": x, "cls": labels}
    if rng.random() < 0.6:
        for name, array in arrays.items():
            np.save(folder / f"{name}.npy", array)
        arrays = {name: str(folder / f"{name}.npy") for name in arrays}

    def change() -> None:
        x[rng.randrange(count), 1] += 1
        if isinstance(arrays["x"], str):
            np.save(folder / "x.npy", x)

    convert = partial(wt.convert_arrays, arrays, classes=names)
    return Source("arrays", "x.npy", items, convert, change=change)


def draw_iterable(rng: random.Random, folder: Path) -> Source:
    """Samples of a generator: bytes, texts, arrays, class numbers, with or without keys."""
    items, samples = list[Item](), list[dict[str, Any]]()
    is_keyed = rng.random() < 0.5
    for number in range(rng.randrange(1, 60)):
        label, text = rng.randrange(3), f"text {number}"
        items.append(Item(draw_image(rng), {"txt": text.encode()}, {"label": WORDS[label]}))
        sample: dict[str, Any] = {"png": items[-1].identity, "cls": label, "txt": text}
        sample["json"] = {"n": number, "ü": [1, None, "x"]}
        if is_keyed:
            sample["__key__"] = rng.choice((f"key-{number}", f"a.b/{number}", f"{number // 2}"))
        samples.append(sample)
    draw_groups(rng, items)

    def convert(out: str, **options: Any) -> wt.Index:
        return wt.pack((sample for sample in samples), out, classes=list(WORDS[:3]), **options)

    grouping = {"group": lambda sample: items[sample["json"]["n"]].group}
    return Source("iterable", "png", items, convert, grouping=grouping)


def draw_tars(rng: random.Random, folder: Path) -> Source:
    """Shards written by another program, selected, and with fields dropped or renamed."""
    data, labeled, tars = draw_data_set(rng), rng.random() < 0.5, folder / "tars"

    def lay() -> None:
        write(data, tars, rng)
        if labeled:
            wt.index(str(tars), label="cls", classes=CLASSES)

    lay()
    select, holds = rng.choice(
        (
            *((None, lambda s: True),) * 2,
            ("cls == 1", lambda s: s.label == 1),
            ("json.angle > 0 and cls != 2", lambda s: s.angle > 0 and s.label != 2),
            ("has.bin", lambda s: "bin" in s.fields),
        )
    )
    chosen = [sample for sample in data.samples if holds(sample)]
    drop, rename = rng.choice(((), ("npy",), ("bin", "json"))), rng.choice(({}, {"png": "i.png"}))
    items = []
    for sample in chosen:
        fields = {rename.get(n, n): v for n, v in sample.fields.items() if n not in drop}
        labels: dict[str, str | float] = {"label": CLASSES[sample.label]} if labeled else {}
        items.append(Item(sample.fields["number"], fields, labels))

    def change() -> None:
        rng.choice(chosen).fields["number"] += b"000000"
        lay()

    convert = partial(wt.convert_tars, str(tars), where=select, drop=drop, rename=rename)
    is_unknown = "bin" in drop and not any("bin" in sample.fields for sample in data.samples)
    refused = "no shard has a field 'bin'" if is_unknown else None
    classes = "label" if labeled else None
    return Source("tars", "number", items, convert, change=change, classes=classes, refused=refused)
