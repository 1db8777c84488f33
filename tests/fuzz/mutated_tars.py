"""Count which readers lose samples of damaged tars without an error: wdstrain, tarfile, webdataset.

    .venv/bin/python -m tests.fuzz.mutated_tars            (10 000 tars, about five minutes; --count, --seed)

Shards of four writers are damaged once each, by a kind and a seed (`tar_mutations.py`). The writers
are wdstrain, webdataset's TarWriter, and tarfile in its PAX and GNU formats with long names. A
shard has seven samples of two or three members. Each tar is read by

    plain      `wt.Loader` on the result of a header scan, without an index
    indexed    `wt.Loader` with the index of the undamaged shard, which has checksums
    tarfile    `tarfile.open`, each regular member extracted
    webdataset `webdataset.WebDataset` with its default handler, which raises

A *silent loss*: the reader ends without an exception or a warning, and a sample of the original is
missing or has other bytes. An independent judge sorts the damage into three kinds. A tar *tells* if
tarfile, read to the very end, does not reach an end marker followed by zeros only. It is *another*
well-formed tar if its samples differ: a flipped bit in data, or a new size with a new checksum.
Only an index can reveal that. All other damage is *harmless*. Without an index wdstrain promises no
silent loss except in another well-formed tar; with an index, none. The exit status is 1 if this
promise is broken. `docs/robustness.md` has the last counts.
"""

from __future__ import annotations

import argparse
import gc
import io
import logging
import sys
import tarfile
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import webdataset

import wdstrain as wt
from tests.conftest import Sample, write_tar
from tests.fuzz.tar_mutations import BLOCK, KINDS
from tests.support.indexes import with_checksums
from wdstrain.shards.index_io import save_index
from wdstrain.shards.resolve import scan
from wdstrain.shards.tar import is_not_sample, split_name


def write_shards(folder: Path, random: Random) -> dict[Path, list[Sample]]:
    """Write well-formed tars of each writer, with an index; return their samples by path."""
    shards = {}
    for name in ("wdstrain", "webdataset", "pax", "gnu"):
        far = "a folder with a long name/" * 6 if name in ("pax", "gnu") else "folder/"
        images = [random.randbytes(random.choice([0, 100, 512, 700, 1500])) for _ in range(7)]
        samples: list[Sample] = [
            (f"{far}sample{i:04d}", {"cls": b"%d" % i, "jpg": images[i]}) for i in range(7)
        ]
        for _, of in samples[::3]:
            of["seg.png"] = random.randbytes(300)
        path = folder / name / "it.tar"
        write_tar(path, samples)
        if name == "webdataset":
            with webdataset.TarWriter(str(path), encoder=False, mtime=0) as writer:
                for key, of in samples:
                    writer.write({"__key__": key, **of})
        elif name != "wdstrain":
            style = tarfile.PAX_FORMAT if name == "pax" else tarfile.GNU_FORMAT
            with tarfile.open(path, "w", format=style) as tar:
                for key, of in samples:
                    for part, data in of.items():
                        info = tarfile.TarInfo(f"{key}.{part}")
                        info.size, info.mtime = len(data), 1.5
                        tar.addfile(info, io.BytesIO(data))
        save_index(with_checksums(scan([str(path)])), str(path.parent))
        shards[path] = samples
    return shards


# --- readers ---


def loaded(source: Any) -> list[Sample]:
    delivered = []
    with closing(wt.Loader(source, batch_size=4, tail="keep", shuffle=False)) as loader:
        for batch in loader.epoch(0):
            for row, key in enumerate(batch.pop("__key__")):
                fields = {name: values[row] for name, values in batch.items()}
                delivered.append((key, {n: data for n, data in fields.items() if data is not None}))
    return delivered


def by_tarfile(path: Path) -> list[Sample]:
    with tarfile.open(path, "r:") as tar:
        return grouped(tar)


def by_webdataset(path: Path) -> list[Sample]:
    return [
        (sample["__key__"], {n: data for n, data in sample.items() if not n.startswith("__")})
        for sample in webdataset.WebDataset(str(path), shardshuffle=False)
    ]


def grouped(tar: tarfile.TarFile) -> list[Sample]:
    """Group members by webdataset's rule: neighbors that share a key."""
    groups: list[Sample] = []
    for info in tar:
        file = tar.extractfile(info) if info.isreg() else None
        data, parts = file.read() if file else b"", split_name(info.name)
        if file is None or parts is None or is_not_sample(info.name):
            continue
        if not groups or groups[-1][0] != parts[0] or parts[1] in groups[-1][1]:
            groups.append((parts[0], {}))
        groups[-1][1][parts[1]] = data
    return groups


READ: dict[str, Callable[[Path], list[Sample]]] = {
    "plain": lambda path: loaded(scan([str(path)])),
    "indexed": lambda path: loaded(path.with_name("index.json")),
    "tarfile": by_tarfile,
    "webdataset": by_webdataset,
}


# --- judging ---


def judge(data: bytes, original: list[Sample]) -> str:
    """Return the kind of a damage: "tells", "another" or "harmless", as in the module docstring."""
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:", errorlevel=2) as tar:
            samples, end = grouped(tar), tar.offset
    except (tarfile.TarError, ValueError, OverflowError, EOFError, RecursionError):
        return "tells"
    if end + 2 * BLOCK > len(data) or any(data[end:]):
        return "tells"
    return "harmless" if samples == original else "another"


def outcome_of(reader: str, path: Path, original: list[Sample]) -> str:
    """Return "whole", "error", "silent" or "more". Raises what wdstrain does not promise."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        warnings.simplefilter("ignore", ResourceWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            delivered = READ[reader](path)
        except wt.WdstrainError:
            return "error"
        except Exception:
            if reader in ("plain", "indexed"):
                raise
            return "error"
    if warned:
        return "error"
    if any(sample not in delivered for sample in original):
        return "silent"
    return "whole" if delivered == original else "more"


Counts = Counter[tuple[str, str, str]]


def campaign(count: int, seed: int, folder: Path) -> tuple[Counts, list[str]]:
    """Damage and read `count` tars. Returns counts by (reader, kind of damage, outcome), and the
    broken promises.
    """
    random, counts, broken = Random(seed), Counts(), list[str]()
    shards = write_shards(folder, random)
    sound = {path: path.read_bytes() for path in shards}
    for path, original in shards.items():
        outcomes = [outcome_of(reader, path, original) for reader in READ]
        assert outcomes == ["whole"] * len(READ), f"{path}: {outcomes}"
    for number in range(count):
        name = [*KINDS][number % len(KINDS)]
        path = random.choice(sorted(shards))
        path.write_bytes(KINDS[name](sound[path], random))
        known = judge(path.read_bytes(), shards[path])
        for reader in READ:
            outcome = outcome_of(reader, path, shards[path])
            counts[reader, known, outcome] += 1
            is_promised = reader == "indexed" or (reader == "plain" and known != "another")
            if outcome == "silent" and is_promised:
                broken.append(f"{reader}, {path.parent.name}, {name}, number {number} ({known})")
    with warnings.catch_warnings():  # webdataset leaves its files to the garbage collector
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
    return counts, broken


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--count", type=int, default=10_000, help="tars")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    logging.disable()
    with tempfile.TemporaryDirectory(prefix="mutated-tars-") as folder:
        counts, broken = campaign(arguments.count, arguments.seed, Path(folder))
    print(f"{'damage':10}{'outcome':8}" + "".join(f"{reader:>12}" for reader in READ))
    for known in ("tells", "another", "harmless"):
        for outcome in ("silent", "error", "whole", "more"):
            cells = [counts[reader, known, outcome] for reader in READ]
            print(f"{known:10}{outcome:8}" + "".join(f"{cell:12}" for cell in cells))
    print(f"broken promises of wdstrain: {len(broken)}", *broken[:20], sep="\n  ")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
