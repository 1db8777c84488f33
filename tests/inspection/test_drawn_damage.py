"""Verify finds drawn damage and nothing else, and repair saves every sample that is undamaged."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import wdstrain as wt
from tests.conftest import files_of, picture, write_tar
from tests.support.tables import write_pictures

CLASSES = ["ant", "bee", "cat"]
Damage = Callable[[random.Random, Path], None]


# --- sets of all kinds ---


def pack_documents(draw: random.Random, out: Path) -> None:
    """Numbers, flags, lists and missing values in JSON, of other types in some samples."""
    values = [1, 2.5, True, False, None, "text", ["a", "b"], [], "nan", {"x": 1}, -3]
    samples = [
        {
            "__key__": f"a/b.c/{n}" if draw.random() < 0.1 else f"ä{n}",
            "json": {name: draw.choice(values) for name in "pqr" if draw.random() < 0.8},
            "txt": f"näme {n}" * draw.randint(0, 3),
            "bin": draw.randbytes(draw.choice([0, 1, 511, 512, 513, 3000])),
        }
        for n in range(draw.randint(1, 30))
    ]
    wt.pack(samples, out, shuffle=draw.random() < 0.5, max_shard_samples=draw.randint(1, 40))


def pack_labels(draw: random.Random, out: Path) -> None:
    labels = [wt.Label("angle", "number", "json", "angle")]
    samples = [{"__key__": f"{n}", "json": {"angle": n / 3}, "cls": n % 2} for n in range(2, 14)]
    wt.pack(samples, out, labels=labels, split={"train": 0.5, "val": 0.3, "test": 0.2})


def convert_rows(draw: random.Random, out: Path) -> None:
    numbers = range(draw.randint(6, 24))
    folder = write_pictures(out.parent / f"{out.name}-source", numbers)
    rows = ["file,kind,weight,flag,note"]
    for n in numbers:
        weight, flag = draw.choice(["1", "2.5", "", "-7e3"]), draw.choice(["true", "false"])
        rows.append(f"{n}.png,{CLASSES[n % 3]},{weight},{flag},n {n}")
    (folder / "t.csv").write_text("\n".join(rows))
    wt.convert_table(folder / "t.csv", out, image="file", label="kind:class")


def append_images(draw: random.Random, out: Path) -> None:
    for start, count in ((0, draw.randint(1, 20)), (50, 4)):
        samples = [
            {"__key__": f"{n:03d}", "png": picture(n), "cls": n % 3}
            for n in range(start, start + count)
        ]
        size = draw.randint(1, 9)
        wt.pack(samples, out, append=start > 0, classes=CLASSES, max_shard_samples=size)


def index_tars(draw: random.Random, out: Path) -> None:
    """Shards of another program, with an index that headers gave, or without one."""
    out.mkdir()
    for shard in range(draw.randint(1, 3)):
        rows = [
            (f"{shard}{n}", {"txt": b"x" * draw.randint(1, 700), "cls": str(n % 3).encode()})
            for n in range(draw.randint(1, 9))
        ]
        write_tar(out / f"s-{shard}.tar", rows)
    if draw.random() < 0.7:
        wt.index(out, label="cls", classes=CLASSES)


KINDS = [pack_documents, pack_labels, convert_rows, append_images, index_tars]


@pytest.mark.parametrize("count", [60, pytest.param(500, marks=pytest.mark.slow)])
def test_healthy_sets_of_all_kinds_give_no_finding(tmp_path: Path, count: int) -> None:
    for number in range(count):
        draw, out = random.Random(number), tmp_path / f"{number}"
        KINDS[number % len(KINDS)](draw, out)
        findings = wt.verify(out, decode=draw.random() < 0.5).findings
        assert [str(finding) for finding in findings] == [], (number, KINDS[number % len(KINDS)])


# --- damage ---


def some(draw: random.Random, folder: Path, pattern: str = "*.tar") -> Path:
    return draw.choice(sorted(folder.glob(pattern)))


def flip_bit(name: str) -> Damage:
    def damage(draw: random.Random, folder: Path) -> None:
        path = some(draw, folder, name)
        data = bytearray(path.read_bytes())
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(data)

    return damage


def cut(draw: random.Random, folder: Path) -> None:
    path = some(draw, folder, draw.choice(["*.tar", "*.tar", "index.*"]))
    os.truncate(path, draw.randrange(path.stat().st_size))


def lengthen(draw: random.Random, folder: Path) -> None:
    with open(some(draw, folder), "ab") as file:
        file.write(bytes(512 * draw.randint(1, 30)))


def lose_blocks(draw: random.Random, folder: Path) -> None:
    path = some(draw, folder)
    data = path.read_bytes()
    at = 512 * draw.randrange(len(data) // 512 - 4)
    path.write_bytes(data[:at] + data[at + 1024 :])


def exchange_blocks(draw: random.Random, folder: Path) -> None:
    """Exchange two blocks of a shard that differ."""
    path = some(draw, folder)
    data = path.read_bytes()
    blocks = [data[at : at + 512] for at in range(0, len(data), 512)]
    pairs = [(a, b) for a in range(len(blocks)) for b in range(a) if blocks[a] != blocks[b]]
    a, b = draw.choice(pairs)
    blocks[a], blocks[b] = blocks[b], blocks[a]
    path.write_bytes(b"".join(blocks))


def exchange_shards(draw: random.Random, folder: Path) -> None:
    first, second = draw.sample(sorted(folder.glob("*.tar")), 2)
    a, b = first.read_bytes(), second.read_bytes()
    first.write_bytes(b)
    second.write_bytes(a)


def rename_shard(draw: random.Random, folder: Path) -> None:
    some(draw, folder).rename(folder / "other-000000.tar")


def remove(pattern: str) -> Damage:
    return lambda draw, folder: some(draw, folder, pattern).unlink()


def add_shard(draw: random.Random, folder: Path) -> None:
    (folder / "train-000099.tar").write_bytes(some(draw, folder).read_bytes())


def exchange_splits(own: Any, shards: list[Any]) -> None:
    shards[0]["split"], shards[-1]["split"] = shards[-1]["split"], shards[0]["split"]


# Edits of index.json, of its part for the package and the list of shards.
EDITS: list[Callable[[Any, list[Any]], object]] = [
    exchange_splits,
    lambda own, shards: shards[0].update(split="other"),
    lambda own, shards: shards[1].update(sha256="0" * 64),
    lambda own, shards: shards[2].update(nsamples=shards[2]["nsamples"] + 1),
    lambda own, shards: shards[3].update(filesize=shards[3]["filesize"] + 512),
    lambda own, shards: own["labels"][0]["classes"].reverse(),
    lambda own, shards: own["labels"][0]["classes"].append("dog"),
    lambda own, shards: own["labels"][0].update(classes=["bat", *CLASSES[1:]]),
    lambda own, shards: own["labels"][0].update(name="other"),
    lambda own, shards: own.update(labels=[]),
    lambda own, shards: own["fields"].reverse(),
    lambda own, shards: own["info"].update(made="elsewhere"),
]


def edited(edit: Callable[[Any, list[Any]], object]) -> Damage:
    def damage(draw: random.Random, folder: Path) -> None:
        document = json.loads((folder / "index.json").read_text())
        edit(document["wdstrain"], document["shardlist"])
        (folder / "index.json").write_text(json.dumps(document))

    return damage


def edit_table(part: str) -> Damage:
    """Change a cell of index.arrow. part: of the name of its column."""

    def damage(draw: random.Random, folder: Path) -> None:
        with pa.ipc.open_file(pa.BufferReader((folder / "index.arrow").read_bytes())) as reader:
            table, schema = reader.read_all(), reader.schema
        columns = [name for name in table.column_names if part in name and name != "shard"]
        name, row = draw.choice(columns), draw.randrange(len(table) - 1)
        values, kind = table[name].to_pylist(), schema.field(name).type
        if name == "key":  # two keys are cut at another place, or one is longer
            a, b = values[row : row + 2]
            values[row : row + 2] = draw.choice([(a + b[:1], b[1:]), (b, a), (a, b + "x")])
        elif pa.types.is_dictionary(kind):
            values[row] = CLASSES[1 - CLASSES.index(values[row])]
        else:
            values[row] += "x" if isinstance(values[row], str) else 1
        array = pa.array(values, kind)
        if pa.types.is_dictionary(kind):
            codes = pa.array([CLASSES.index(value) for value in values], pa.int32())
            array = pa.DictionaryArray.from_arrays(codes, pa.array(CLASSES))
        table = table.set_column(table.column_names.index(name), schema.field(name), array)
        with pa.ipc.new_file(folder / "index.arrow", schema) as writer:
            writer.write_table(table)

    return damage


MOVING: list[Damage] = [exchange_blocks, exchange_shards, rename_shard]
DAMAGES: list[Damage] = [
    *map(flip_bit, ("*.tar", "index.arrow", "index.json")),
    *MOVING,
    *(cut, lengthen, lose_blocks, add_shard),
    *map(remove, ("*.tar", "index.json", "index.arrow")),
    *map(edit_table, ("", "key", "crc32", "label")),
    *map(edited, EDITS),
]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a set of two splits in four shards, by name."""
    folder = tmp_path_factory.mktemp("healthy") / "set"
    entries = [{"age": n, "note": f"n{n}"} for n in range(16)]
    samples = [
        {"__key__": f"k{n:02d}", "png": picture(n), "cls": n % 2, "json": entries[n]}
        for n in range(16)
    ]
    shares = {"train": 0.5, "val": 0.5}
    wt.pack(samples, folder, classes=CLASSES, split=shares, max_shard_samples=5)
    assert wt.verify(folder, decode=True).ok
    return files_of(folder)


def is_found(folder: Path) -> bool:
    try:
        return not wt.verify(folder).ok
    except (wt.ShardError, wt.UsageError):
        return True


def contents(folder: Path) -> dict[str, tuple[str, str, dict[str, bytes]]]:
    """Return split, class and fields of each sample, by key."""
    index = wt.open(folder)
    rows = index.table.select(["key", "shard", "label"]).to_pylist()
    return {
        row["key"]: (row["shard"].partition("-")[0], row["label"], dict(index[number]))
        for number, row in enumerate(rows)
    }


@pytest.mark.parametrize("count", [3 * len(DAMAGES), pytest.param(500, marks=pytest.mark.slow)])
def test_every_drawn_damage_is_found_and_undamaged_samples_are_saved(
    tmp_path: Path, healthy: dict[str, bytes], count: int
) -> None:
    folder, out = tmp_path / "set", tmp_path / "out"
    folder.mkdir()

    def restore() -> None:
        for path in folder.iterdir():
            path.unlink()
        for name, data in healthy.items():
            (folder / name).write_bytes(data)

    restore()
    whole, before = contents(folder), wt.open(folder)
    extents = {
        before.key(number): (before.shard_with(number).name, before.members(number))
        for number in range(len(before))
    }
    labels = before.labels
    del before  # its file is mapped
    for number in range(count):
        case = f"damage {number % len(DAMAGES)} of {number}"
        damage = DAMAGES[number % len(DAMAGES)]
        restore()
        damage(random.Random(number), folder)
        assert is_found(folder), case
        done = wt.repair(folder, out, overwrite=True)
        assert wt.open(out).labels == labels, (case, done)
        saved = contents(out)
        intact = {
            key for key, (name, of) in extents.items() if has(folder / name, of, healthy[name])
        }
        if damage is lose_blocks:  # samples behind them are found where they are now
            assert saved.keys() >= intact, case
        elif damage not in MOVING:
            assert saved == {key: whole[key] for key in intact}, case
            lost = whole.keys() - intact
            said = " ".join(map(str, done.findings))
            is_named = lost <= {finding.key for finding in done.findings}
            assert is_named or f"of which {len(lost)} are lost" in said, (case, done)
        assert wt.verify(out).ok, case


def has(path: Path, members: list[tuple[str, int, int]], healthy: bytes) -> bool:
    """Return whether the bytes of these members are unchanged."""
    data = path.read_bytes() if path.exists() else b""
    return all(data[at : at + size] == healthy[at : at + size] for _, at, size in members)
