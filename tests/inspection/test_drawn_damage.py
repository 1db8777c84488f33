"""Verify finds drawn damage and nothing else, and repair saves every sample that is undamaged."""

from __future__ import annotations

import io
import json
import os
import random
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import wdstrain as wt
from tests.conftest import picture, write_tar

CLASSES = ["ant", "bee", "cat"]
Sizes = [pytest.param(60, id="some"), pytest.param(500, marks=pytest.mark.slow, id="many")]
Damage = Callable[[random.Random, Path], None]


# --- sets of all kinds ---


def pack_images(draw: random.Random, out: Path) -> None:
    samples = [
        {"__key__": f"{n:03d}", "png": picture(n), "cls": n % 3} for n in range(draw.randint(1, 20))
    ]
    wt.pack(samples, out, classes=CLASSES, max_shard_samples=draw.randint(1, 9))


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
    folder = out.parent / f"{out.name}-source"
    folder.mkdir()
    rows = ["file,kind,weight,flag,note"]
    for n in range(draw.randint(6, 24)):
        (folder / f"{n}.png").write_bytes(picture(n))
        weight = draw.choice(["1", "2.5", "", "-7e3"])
        rows.append(f"{n}.png,{CLASSES[n % 3]},{weight},{draw.choice(['true', 'false'])},n {n}")
    (folder / "t.csv").write_text("\n".join(rows))
    wt.convert_table(folder / "t.csv", out, image="file", label="kind:class")


def grow(draw: random.Random, out: Path) -> None:
    pack_images(draw, out)
    more = [{"__key__": f"m{n}", "png": picture(50 + n), "cls": n % 2} for n in range(4)]
    wt.pack(more, out, append=True, classes=CLASSES)


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


def gnu_tars(draw: random.Random, out: Path) -> None:
    """Long names, directories, and records of any size, as Python's tarfile writes them."""
    out.mkdir()
    form = draw.choice([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT])
    with tarfile.open(out / "a.tar", "w", format=form) as tar:
        tar.add(out, "folder", recursive=False)
        for n in range(draw.randint(1, 9)):
            info = tarfile.TarInfo("folder/" + "x" * draw.choice([1, 60, 90]) + f"{n}.txt")
            info.size = draw.randint(0, 2000)
            tar.addfile(info, io.BytesIO(bytes(info.size)))
    if draw.random() < 0.5:
        wt.index(out)


KINDS = [pack_images, pack_documents, pack_labels, convert_rows, grow, index_tars, gnu_tars]


@pytest.mark.parametrize("count", Sizes)
def test_healthy_sets_of_all_kinds_give_no_finding(tmp_path: Path, count: int) -> None:
    for number in range(count):
        draw, out = random.Random(number), tmp_path / f"{number}"
        KINDS[number % len(KINDS)](draw, out)
        findings = wt.verify(out, decode=number % 2 == 0).findings
        assert [str(finding) for finding in findings] == [], (number, KINDS[number % len(KINDS)])


# --- damage ---


def some(draw: random.Random, folder: Path, pattern: str = "*.tar") -> Path:
    return draw.choice(sorted(folder.glob(pattern)))


def flip_bit(name: str) -> Damage:
    """Flip one bit anywhere in a file."""

    def damage(draw: random.Random, folder: Path) -> None:
        path = some(draw, folder, name)
        data = bytearray(path.read_bytes())
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(data)

    damage.__name__ = f"flip a bit of {name}"
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


def exchange_members(draw: random.Random, folder: Path) -> None:
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


def remove_file(draw: random.Random, folder: Path) -> None:
    some(draw, folder, draw.choice(["*.tar", "index.json", "index.arrow"])).unlink()


def add_shard(draw: random.Random, folder: Path) -> None:
    (folder / "train-000099.tar").write_bytes(some(draw, folder).read_bytes())


def edit_document(draw: random.Random, folder: Path) -> None:
    """Edit classes, splits, checksums, names or counts in index.json."""
    path = folder / "index.json"
    document = json.loads(path.read_text())
    shard, own = draw.choice(document["shardlist"]), document["wdstrain"]
    edits: list[Callable[[], Any]] = [
        lambda: shard.update(split="other"),
        lambda: shard.update(sha256="0" * 64),
        lambda: shard.update(nsamples=shard["nsamples"] + 1),
        lambda: shard.update(filesize=shard["filesize"] + 512),
        lambda: own["labels"][0]["classes"].reverse(),
        lambda: own["labels"][0]["classes"].append("dog"),
        lambda: own["labels"][0].update(name="other"),
        lambda: own.update(labels=[]),
        lambda: own["fields"].reverse(),
        lambda: own["info"].update(made="elsewhere"),
    ]
    draw.choice(edits)()
    path.write_text(json.dumps(document))


def edit_table(draw: random.Random, folder: Path) -> None:
    """Change one cell of index.arrow."""
    with pa.ipc.open_file(pa.BufferReader((folder / "index.arrow").read_bytes())) as reader:
        table, schema = reader.read_all(), reader.schema
    name = draw.choice([name for name in table.column_names if name != "shard"])
    values, row = table[name].to_pylist(), draw.randrange(len(table))
    old = values[row]
    is_class = pa.types.is_dictionary(schema.field(name).type)
    values[row] = (
        CLASSES[1 - CLASSES.index(old)] if is_class else old + ("x" if isinstance(old, str) else 1)
    )
    array = pa.array(values, schema.field(name).type)
    if is_class:
        codes = pa.array([CLASSES.index(value) for value in values], pa.int32())
        array = pa.DictionaryArray.from_arrays(codes, pa.array(CLASSES))
    table = table.set_column(table.column_names.index(name), schema.field(name), array)
    with pa.ipc.new_file(folder / "index.arrow", schema) as writer:
        writer.write_table(table)


DAMAGES: list[Damage] = [
    flip_bit("*.tar"),
    flip_bit("index.arrow"),
    flip_bit("index.json"),
    cut,
    lengthen,
    lose_blocks,
    exchange_members,
    exchange_shards,
    rename_shard,
    remove_file,
    add_shard,
    edit_document,
    edit_table,
]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a set of two splits in four shards, by name."""
    folder = tmp_path_factory.mktemp("healthy") / "set"
    samples = [
        {
            "__key__": f"k{n:02d}",
            "png": picture(n),
            "cls": n % 2,
            "json": {"age": n, "note": f"n{n}"},
        }
        for n in range(16)
    ]
    shares = {"train": 0.5, "val": 0.5}
    wt.pack(samples, folder, classes=CLASSES, split=shares, max_shard_samples=5)
    assert wt.verify(folder, decode=True).ok
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


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


@pytest.mark.parametrize("count", Sizes)
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
        damage = DAMAGES[number % len(DAMAGES)]
        restore()
        damage(random.Random(number), folder)
        assert is_found(folder), (number, damage.__name__)
        done = wt.repair(folder, out, overwrite=True)
        assert wt.open(out).labels == labels, (number, damage.__name__, done)
        saved = contents(out)
        damaged = {
            key
            for key, (name, members) in extents.items()
            if not _has(folder / name, members, healthy[name])
        }
        if damage is lose_blocks:  # what lies behind them is found where it is now
            assert saved.keys() >= whole.keys() - damaged, (number, damage.__name__)
        elif damage not in (exchange_members, exchange_shards, rename_shard):
            assert saved.keys() == whole.keys() - damaged, (number, damage.__name__)
            assert saved == {key: whole[key] for key in saved}, (number, damage.__name__)
            named = {finding.key for finding in done.findings}
            said = " ".join(map(str, done.findings))
            lost = whole.keys() - saved.keys()
            assert lost <= named or f"of which {len(lost)} are lost" in said, (number, done)
        assert wt.verify(out).ok, (number, damage.__name__)


def _has(path: Path, members: list[tuple[str, int, int]], healthy: bytes) -> bool:
    """Return whether the bytes of these members are unchanged."""
    data = path.read_bytes() if path.exists() else b""
    return all(data[at : at + size] == healthy[at : at + size] for _, at, size in members)
