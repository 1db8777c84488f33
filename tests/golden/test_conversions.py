"""What conversions write stays the same from one version to the next, with any number of workers.

Users append to a set, resume, and compare checksums with another version. `CONVERSIONS` has one
function per kind of source. `expected/conversions.json` has the hash of each file.

Shards are hashed as they are. index.json and index.arrow are hashed by their content, because
pyarrow may lay out the same table in other bytes (and the `id` and `sha256` of an index are hashes
of these bytes). Sentences for people are left out. The sources are the same bytes with every
version of every library, and no image is encoded again.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import wdstrain as wt
from tests.conftest import write_tar
from tests.golden.expected import check, check_names, digest, png

COUNT = 30
KINDS = ["ant", "bee", "cat"]
ROWS = [
    {
        "photo": f"images/{n // 10}/{n:03d}.png",
        "kind": KINDS[(n + n // 4) % 3],
        "angle": n / 8 - 1,
        "tags": "|".join(tag for bit, tag in enumerate("xyz") if (n % 7 + 1) >> bit & 1),
        "sender": f"s{n % 7}",
        "note": f"näme {n}" if n % 5 else "",
    }
    for n in range(COUNT)
]


def write_photos(folder: Path) -> Path:
    """Write the images that `ROWS` name."""
    for number, row in enumerate(ROWS):
        write_image(folder / str(row["photo"]), number)
    return folder


def write_classes(folder: Path, count: int = COUNT) -> Path:
    for number in range(count):
        write_image(folder / KINDS[(number + number // 4) % 3] / f"{number:03d}.png", number)
    return folder


def write_image(path: Path, number: int, **options: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(png(number, **options))


def write_source_shards(folder: Path) -> Path:
    """Write three shards with an index: samples with a PNG, a class and a JSON document."""
    fields = [
        {"png": png(n), "cls": b"%d" % (n % 3), "json": json.dumps(ROWS[n]).encode()}
        for n in range(COUNT)
    ]
    for shard in range(3):
        samples = [(f"a/{n:03d}", fields[n]) for n in range(10 * shard, 10 * shard + 10)]
        write_tar(folder / f"old-{shard}.tar", samples)
    wt.index(str(folder), columns=["json.angle"], label="cls", classes=KINDS)
    return folder


def class_folders(source: Path, out: Path, **options: Any) -> None:
    options |= {"split": {"train": 0.7, "val": 0.3}, "stratify": "label", "max_shard_samples": 8}
    wt.convert_folder(write_classes(source), out, **options)


def folders_of_splits(source: Path, out: Path, **options: Any) -> None:
    for split, count in (("train", 12), ("val", 5)):
        write_classes(source / split, count)
    wt.convert_folder(source, out, shuffle=False, num_shards=4, **options)


def flat_folder_with_masks(source: Path, out: Path, **options: Any) -> None:
    images, masks = write_classes(source / "images"), source / "masks"
    for path in images.rglob("*.png"):
        write_image(masks / path.relative_to(images), int(path.stem), gray=True)
    wt.convert_folder(images, out, flat=True, masks=masks, max_shard_size=17_408, **options)


def csv_table(source: Path, out: Path, **options: Any) -> None:
    with open(write_photos(source) / "log.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(ROWS[0]))
        writer.writeheader()
        writer.writerows(ROWS)
    options |= {"label": ["kind", "angle", "tags:multi"], "split": {"train": 0.8, "val": 0.2}}
    options |= {"group_by": "sender", "max_shard_samples": 10, "seed": 3}
    wt.convert_table(source / "log.csv", out, image="photo", **options)


def json_lines_table(source: Path, out: Path, **options: Any) -> None:
    lines = [json.dumps(row, ensure_ascii=False) for row in ROWS]
    (write_photos(source) / "log.jsonl").write_text("\n".join(lines), encoding="utf-8")
    options |= {"label": "kind", "where": "angle > -0.5", "limit": 20, "max_shard_samples": 6}
    options |= {"split": {"a": 0.5, "b": 0.3, "c": 0.2}, "stratify": "kind", "group_by": "sender"}
    wt.convert_table(source / "log.jsonl", out, image="photo", **options)


def parquet_of_image_bytes(source: Path, out: Path, **options: Any) -> None:
    columns = {name: [row[name] for row in ROWS] for name in ("kind", "angle", "note")}
    images = [{"bytes": png(n), "path": f"{n}.png"} for n in range(COUNT)]
    source.mkdir()
    pq.write_table(pa.table({"image": images, **columns}), source / "part.parquet")
    options |= {"label": ["angle:number", "kind:class"], "classes": ["cat", "bee", "ant"]}
    wt.convert_table(source / "part.parquet", out, image="image", max_shard_samples=16, **options)


def hdf5_file(source: Path, out: Path, **options: Any) -> None:
    source.mkdir()
    with h5py.File(source / "data.h5", "w") as file:
        file["x/points"] = np.arange(COUNT * 6, dtype="<f4").reshape(COUNT, 2, 3) / 4
        file["x/kinds"] = np.arange(COUNT) % 3
        file["x/names"] = [f"n {n}" for n in range(COUNT)]
        file["x/depth"] = np.arange(COUNT) / 2
    fields = {"points": "x/points", "cls": "x/kinds", "depth": "x/depth"}
    options |= {"label": ["cls", "depth:number"], "classes": KINDS, "max_shard_samples": 12}
    wt.convert_hdf5(source / "data.h5", out, fields, key="x/names", **options)


def arrays_of_numpy(source: Path, out: Path, **options: Any) -> None:
    source.mkdir()
    np.save(source / "x.npy", np.arange(COUNT * 4, dtype="<i2").reshape(COUNT, 4))
    arrays = {"x": source / "x.npy", "cls": np.arange(COUNT) % 4, "y": np.linspace(0, 1, COUNT)}
    options |= {"label": ["cls:class", "y:number"], "split": {"a": 0.5, "b": 0.5}}
    wt.convert_arrays(arrays, out, **options)


def tars_with_conditions(source: Path, out: Path, **options: Any) -> None:
    options |= {"where": "angle < 2 and json.sender != 's3'", "rename": {"png": "image.png"}}
    wt.convert_tars(write_source_shards(source), out, drop=["json"], max_shard_samples=9, **options)


def tars_in_file_order(source: Path, out: Path, **options: Any) -> None:
    write_source_shards(source)
    tars = [str(source / "old-2.tar"), str(source / "old-0.tar")]
    wt.convert_tars(tars, out, shuffle=False, max_shard_samples=15, **options)


def torchvision_set(source: Path, out: Path, **options: Any) -> None:
    write_classes(source / "eurosat" / "2750")
    # a sample has 2,048 bytes in its shard: these limits are met exactly, and missed by one byte
    wt.convert_torchvision("EuroSAT", out, str(source), max_shard_size=17_407, **options)


def packed_samples(source: Path, out: Path, **options: Any) -> None:
    samples = [
        {
            "__key__": f"k{n}",
            "json": {"kind": KINDS[n % 3], "n": n, "tags": [KINDS[n % 2]]},
            "txt": f"säid {n}",
            "x.npy": np.arange(3, dtype="<f4") + n,
            "bin": bytes(range(n)),
        }
        for n in range(COUNT)
    ]
    labels = [
        wt.Label("kind", "class", "json", "kind", tuple(KINDS)),
        wt.Label("n", "number", "json", "n"),
        wt.Label("tags", "multi", "json", "tags", ("ant", "bee")),
    ]
    wt.pack(samples, out, labels=labels, split={"train": 0.8, "val": 0.2}, **options)


def packed_samples_with_odd_keys(source: Path, out: Path, **options: Any) -> None:
    keys = ["a", "a", "b.c", "B.C", "ä/ö", "", "x" * 99, f"{'d' * 90}/{'e' * 90}", "l" * 300]
    keys += [f"{'f' * 150}/{'g' * 120}", "sp ace", "a/b/../c", "/abs/olute", "🦆"]
    # names of 100 bytes, and with a folder of 155, fit into the fields of a header exactly
    keys += ["x" * 96, f"{'p' * 120}/q", f"{'r' * 155}/{'s' * 96}", f"{'r' * 156}/{'s' * 96}"]
    samples = [{"__key__": key, "cls": n % 2, "bin": bytes(n)} for n, key in enumerate(keys) if key]
    wt.pack(samples, out, shuffle=False, **options)


def packed_samples_of_many_classes(source: Path, out: Path, **options: Any) -> None:
    samples = [{"__key__": f"{n}", "cls": n * n % 11, "txt": "t" * (n % 3)} for n in range(90)]
    split = {"train": 0.55, "val": 0.3, "test": 0.15}
    wt.pack(samples, out, split=split, stratify="label", num_shards=7, seed=1, **options)


def packed_pairs_with_bad_ones(source: Path, out: Path, **options: Any) -> None:
    pairs = [(png(n) if n % 9 else b"no image", KINDS[n % 3]) for n in range(COUNT)]
    wt.pack(pairs, out, classes=KINDS, on_error="skip", max_shard_samples=11, seed=5, **options)


def a_set_that_grew_and_shrank(source: Path, out: Path, **options: Any) -> None:
    wt.convert_folder(write_classes(source / "1", 20), out, max_shard_samples=8, **options)
    more = [{"__key__": f"new{n}", "png": png(n), "cls": n % 3} for n in range(9)]
    wt.pack(more, out, append=True, like=out, max_shard_samples=5, **options)
    wt.remove(out, keys=["new3", "ant/003"])


CONVERSIONS: dict[str, Callable[..., None]] = {
    function.__name__.replace("_", " "): function
    for function in (
        *(class_folders, folders_of_splits, flat_folder_with_masks, csv_table, json_lines_table),
        *(parquet_of_image_bytes, hdf5_file, arrays_of_numpy, tars_with_conditions),
        *(tars_in_file_order, torchvision_set, packed_samples, packed_samples_with_odd_keys),
        *(packed_samples_of_many_classes, packed_pairs_with_bad_ones, a_set_that_grew_and_shrank),
    )
}


def content(path: Path) -> bytes | str:
    """Return what must stay the same in a file of a set."""
    if path.name == "index.arrow":
        table = pa.ipc.open_file(path).read_all()
        rows = [f"{field.name}: {field.type}" for field in table.schema]
        rows += [*map(bytes.decode, table.schema.metadata), *map(repr, table.to_pylist())]
        return "\n".join(rows)
    if path.name == "index.json":
        document = json.loads(path.read_text())
        del document["wdstrain"]["id"], document["wdstrain"]["sha256"]
        info = document["wdstrain"]["info"]
        info["ignored"] = list(info["ignored"].values())
        info["source"]["decided"] = len(info["source"].get("decided", []))
        return json.dumps(document, ensure_ascii=False)
    if path.name == "skipped.jsonl":
        skipped = [json.loads(line) for line in path.read_text().splitlines()]
        return "\n".join(json.dumps({**one, "reason": bool(one["reason"])}) for one in skipped)
    return path.read_bytes()


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("name", CONVERSIONS)
def test_a_conversion_writes_the_same_files(tmp_path: Path, name: str, workers: int) -> None:
    CONVERSIONS[name](tmp_path / "source", tmp_path / "out", num_workers=workers)
    files = sorted(path for path in (tmp_path / "out").rglob("*") if path.is_file())
    check("conversions", name, {path.name: digest(content(path)) for path in files})


def test_the_file_has_no_other_entries() -> None:
    check_names("conversions", CONVERSIONS)
