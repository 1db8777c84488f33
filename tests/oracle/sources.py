"""Random sources of a conversion, each with a model of the expected shards.

An item is identified by the bytes of one of its fields, which no other item has.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import wdstrain as wt
from tests.conftest import npy
from tests.oracle.data_set import CLASSES, DataSet, draw_data_set, write

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


def draw_source(rng: random.Random, folder: Path) -> Source:
    """Return a source of a random kind below `folder`."""
    folder.mkdir(parents=True)
    return rng.choice((draw_folder, draw_table, draw_arrays, draw_iterable, draw_tars))(rng, folder)


def draw_image(rng: random.Random, form: str = "PNG") -> bytes:
    """Return an image with unique bytes."""
    file = io.BytesIO()
    pixels = np.frombuffer(rng.randbytes(7 * 5 * 3), np.uint8).reshape(7, 5, 3)
    Image.fromarray(pixels).save(file, form, quality=95)
    return file.getvalue()


def draw_groups(rng: random.Random, count: int) -> list[str]:
    """Return the group of each of `count` items; "" for an item that is a group by itself.

    All groups have different sizes: the documented order of groups, by size, leaves no choice.
    """
    sizes = list[int]()
    while sum(sizes) + len(sizes) + 1 <= count:
        sizes.append(len(sizes) + 1)
    if not sizes:
        return []
    sizes[-1] += count - sum(sizes)
    names = [f"{rng.choice(WORDS)} {size}" for size in sizes]
    if sizes[0] == 1 and rng.random() < 0.5:
        names[0] = ""
    groups = [name for name, size in zip(names, sizes, strict=True) for _ in range(size)]
    rng.shuffle(groups)
    return groups


def draw_folder(rng: random.Random, folder: Path) -> Source:
    """Class folders with unusual names, non-image files, and dots and equal stems in names."""
    items, paths = [], []
    for name in rng.sample(WORDS, rng.randrange(1, len(WORDS))):
        for number in range(rng.randrange(1, 12)):
            form, ending = rng.choice((("PNG", "png"), ("JPEG", "jpg"), ("JPEG", "JPEG")))
            data = draw_image(rng, form)
            below = folder / name / rng.choice(("", "", "deep", "a.b"))
            below.mkdir(parents=True, exist_ok=True)
            path = below / rng.choice(
                (f"{number}.{ending}", f"{number}.x.{ending}", f"ü {number}.{ending}")
            )
            path.write_bytes(data)
            paths.append(path)
            items.append(Item(data, {}, {"label": name}))
        if rng.random() < 0.3:
            (folder / name / rng.choice(NOISE)).write_bytes(b"nothing")

    def change() -> None:
        path = rng.choice(paths)
        path.write_bytes(draw_image(rng, "PNG" if path.suffix == ".png" else "JPEG"))

    return Source(
        "folder",
        "png;jpg;jpeg",
        items,
        lambda out, **options: wt.convert_folder(str(folder), out, **options),
        change=change,
    )


def draw_table(rng: random.Random, folder: Path) -> Source:
    """A CSV of paths and labels; some images are missing, some labels are empty."""
    items, bad, rows, good = [], 0, list[list[str]](), list[list[str]]()
    words = rng.sample(WORDS[:-1], rng.randrange(2, len(WORDS)))
    (folder / "images").mkdir()
    absolute = rng.random() < 0.3
    for number in range(rng.randrange(3, 40)):
        data = draw_image(rng)
        path = folder / "images" / f"{number:03d}.png"
        kind, angle, text = (
            rng.choice(words),
            round(rng.uniform(-1, 1), 4),
            rng.choice(('say "x"', "a,b", "00123", "\n", "")),
        )
        fault = rng.choice((None,) * 12 + ("missing", "empty label", "no number"))
        if fault != "missing":
            path.write_bytes(data)
        bad += fault is not None
        shown = str(path) if absolute else f"images/{number:03d}.png"
        rows.append(
            [
                shown,
                "" if fault == "empty label" else kind,
                "oops" if fault == "no number" else str(angle),
                text,
                rng.choice(WORDS),  # replaced in good rows
            ]
        )
        if fault is None:
            good.append(rows[-1])
            items.append(Item(data, {}, {"kind": kind, "angle": angle}))
    for row, item, group in zip(good, items, draw_groups(rng, len(good)), strict=True):
        row[4] = item.group = group

    def write_rows() -> None:
        with open(folder / "table.csv", "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([["file", "kind", "angle", "text", "owner"], *rows])

    write_rows()

    def convert(out: str, **options: Any) -> wt.Index:
        convert_options = {"on_error": "skip", **options}
        labels = ["kind:class", "angle:number"]
        return wt.convert_table(
            str(folder / "table.csv"), out, image="file", label=labels, **convert_options
        )

    def change() -> None:
        good[0][3] += "another text"
        write_rows()

    grouping = {"group_by": "owner"}
    return Source("table", "png", items, convert, bad, change, "kind", grouping)


def draw_arrays(rng: random.Random, folder: Path) -> Source:
    """Arrays of one length in .npy files or in memory, with class numbers."""
    count = rng.randrange(2, 60)
    values = np.random.default_rng(rng.getrandbits(64))
    x = values.integers(0, 1 << 62, (count, 4))
    labels = values.integers(0, 3, count)
    labels[: min(3, count)] = np.arange(min(3, count))
    x[:, 0] = np.arange(count)
    names = ["zero", "one", "two"]
    items = [
        Item(npy(row), {}, {"label": names[label]})
        for row, label in zip(x, labels.tolist(), strict=True)
    ]
    arrays: dict[str, Any] = {"x": x, "cls": labels}
    if rng.random() < 0.6:
        for name, array in arrays.items():
            np.save(folder / f"{name}.npy", array)
        arrays = {name: str(folder / f"{name}.npy") for name in arrays}

    def change() -> None:
        x[rng.randrange(count), 1] += 1
        if isinstance(arrays["x"], str):
            np.save(folder / "x.npy", x)

    return Source(
        "arrays",
        "x.npy",
        items,
        lambda out, **options: wt.convert_arrays(arrays, out, classes=names, **options),
        change=change,
    )


def draw_iterable(rng: random.Random, folder: Path) -> Source:
    """Samples of a generator: bytes, texts, arrays, class numbers, with or without keys."""
    items, samples = [], []
    keyed = rng.random() < 0.5
    for number in range(rng.randrange(1, 60)):
        data = draw_image(rng)
        label = rng.randrange(3)
        document = {"n": number, "ü": [1, None, "x"]}
        sample: dict[str, Any] = {
            "png": data,
            "cls": label,
            "txt": f"text {number}",
            "json": document,
        }
        if keyed:
            sample["__key__"] = rng.choice((f"key-{number}", f"a.b/{number}", f"{number // 2}"))
        samples.append(sample)
        items.append(Item(data, {"txt": f"text {number}".encode()}, {"label": WORDS[label]}))
    for item, group in zip(items, draw_groups(rng, len(items)), strict=True):
        item.group = group

    def stream() -> Iterator[dict[str, Any]]:
        yield from samples

    return Source(
        "iterable",
        "png",
        items,
        lambda out, **options: wt.pack(stream(), out, classes=list(WORDS[:3]), **options),
        grouping={"group": lambda sample: items[sample["json"]["n"]].group},
    )


def draw_tars(rng: random.Random, folder: Path) -> Source:
    """Shards written by another program, selected, and with fields dropped or renamed."""
    data: DataSet = draw_data_set(rng)
    labeled = rng.random() < 0.5

    def lay() -> None:
        write(data, folder / "tars", rng)
        if labeled:
            wt.index(str(folder / "tars"), label="cls", classes=CLASSES)

    lay()
    select = rng.choice((None, None, "cls == 1", "json.angle > 0 and cls != 2", "has.bin"))
    chosen = {
        None: lambda s: True,
        "cls == 1": lambda s: s.label == 1,
        "json.angle > 0 and cls != 2": lambda s: s.angle > 0 and s.label != 2,
        "has.bin": lambda s: "bin" in s.fields,
    }[select]
    drop = rng.choice(((), ("npy",), ("bin", "json")))
    rename = rng.choice(({}, {"png": "image.png"}))
    items = []
    for sample in filter(chosen, data.samples):
        fields = {rename.get(n, n): v for n, v in sample.fields.items() if n not in drop}
        labels: dict[str, str | float] = {"label": CLASSES[sample.label]} if labeled else {}
        items.append(Item(sample.fields["number"], fields, labels))

    def convert(out: str, **options: Any) -> wt.Index:
        fields = {"where": select, "drop": drop, "rename": rename}
        return wt.convert_tars(str(folder / "tars"), out, **fields, **options)

    def change() -> None:
        sample = rng.choice([sample for sample in data.samples if chosen(sample)])
        sample.fields["number"] += b"000000"
        lay()

    classes = "label" if labeled else None
    unknown = "bin" in drop and not any("bin" in sample.fields for sample in data.samples)
    refused = "no shard has a field 'bin'" if unknown else None
    return Source("tars", "number", items, convert, change=change, classes=classes, refused=refused)


def document_of(fields: dict[str, bytes]) -> Any:
    """The sample's json field, parsed."""
    return json.loads(fields["json"])
