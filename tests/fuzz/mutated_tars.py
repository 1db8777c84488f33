"""Count which readers lose samples of damaged tars without an error: wdstrain, tarfile, webdataset.

    .venv/bin/python -m tests.fuzz.mutated_tars            (10 000 tars, about five minutes; --count, --seed)

Shards of four writers are damaged once each, by a kind and a seed (`tar_mutations.py`). The writers
are wdstrain, webdataset's TarWriter, and tarfile in its PAX and GNU formats with long names. A
shard has seven samples of two or three members. Each tar is read by

    plain      `wt.Loader` on the result of a header scan, without an index
    indexed    `wt.Loader` with the index of the undamaged shard, which has checksums
    tarfile    `tarfile.open(mode="r:")`, each regular member extracted
    stream     the same with mode="r|"
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
import os
import sys
import tarfile
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import webdataset

import wdstrain as wt
from tests.fuzz.tar_mutations import BLOCK, KINDS
from tests.support.indexes import with_checksums
from wdstrain.errors import WdstrainError
from wdstrain.shards.index import Index
from wdstrain.shards.index_io import save_index
from wdstrain.shards.resolve import scan
from wdstrain.shards.tar import is_not_sample, split_name
from wdstrain.shards.tar_headers import END, header, padding

Sample = tuple[str, dict[str, bytes]]
Read = Callable[[str], list[Sample]]

READERS = ("plain", "indexed", "tarfile", "stream", "webdataset")
PROMISED = {"plain": (WdstrainError,), "indexed": (WdstrainError,)}
_THEIRS = (
    tarfile.TarError,
    OSError,
    EOFError,
    ValueError,
)  # promised errors of other readers; other exceptions are counted


def shards_of(random: Random) -> dict[str, tuple[bytes, list[Sample]]]:
    """Return well-formed tars by the name of their writer, and their samples."""
    tars = {}
    for name in ("wdstrain", "webdataset", "pax", "gnu"):
        far = "a folder with a long name/" * 6 if name in ("pax", "gnu") else "folder/"
        sizes = [0, 100, 512, 700, 1500]
        images = [random.randbytes(random.choice(sizes)) for _ in range(7)]
        samples: list[Sample] = [
            (f"{far}sample{i:04d}", {"cls": b"%d" % i, "jpg": images[i]}) for i in range(7)
        ]
        for _, of in samples[::3]:
            of["seg.png"] = random.randbytes(300)
        buffer = io.BytesIO()
        if name == "wdstrain":
            for key, of in samples:
                for part, data in of.items():
                    buffer.write(
                        header(f"{key}.{part}", len(data)) + data + bytes(padding(len(data)))
                    )
            buffer.write(END)
        elif name == "webdataset":
            with webdataset.TarWriter(buffer, encoder=False, mtime=0) as writer:
                for key, of in samples:
                    writer.write({"__key__": key, **of})
        else:
            style = tarfile.PAX_FORMAT if name == "pax" else tarfile.GNU_FORMAT
            with tarfile.open(fileobj=buffer, mode="w", format=style) as tar:
                for key, of in samples:
                    for part, data in of.items():
                        info = tarfile.TarInfo(f"{key}.{part}")
                        info.size, info.mtime = len(data), 1.5
                        tar.addfile(info, io.BytesIO(data))
        tars[name] = buffer.getvalue(), samples
    return tars


# --- readers ---


def read_plain(path: str) -> list[Sample]:
    return _loaded(scan([path]))


def read_indexed(path: str) -> list[Sample]:
    return _loaded(os.path.join(os.path.dirname(path), "index.json"))


def _loaded(source: str | Index) -> list[Sample]:
    loader = wt.Loader(source, batch_size=4, tail="keep", shuffle=False)
    try:
        delivered = []
        for batch in loader.epoch(0):
            for row, key in enumerate(batch["__key__"]):
                fields = {name: values[row] for name, values in batch.items() if name != "__key__"}
                delivered.append(
                    (key, {name: data for name, data in fields.items() if data is not None})
                )
        return delivered
    finally:
        loader.close()


def read_tarfile(path: str) -> list[Sample]:
    with tarfile.open(path, "r:") as tar:
        return _grouped(_members(tar))


def read_stream(path: str) -> list[Sample]:
    with open(path, "rb") as file, tarfile.open(fileobj=file, mode="r|") as tar:
        return _grouped(_members(tar))


def read_webdataset(path: str) -> list[Sample]:
    return [
        (
            sample["__key__"],
            {name: data for name, data in sample.items() if not name.startswith("__")},
        )
        for sample in webdataset.WebDataset(path, shardshuffle=False)
    ]


def _members(tar: tarfile.TarFile) -> Iterable[tuple[str, bytes]]:
    for info in tar:
        if info.isreg():
            file = tar.extractfile(info)
            assert file is not None
            yield info.name, file.read()


def _grouped(members: Iterable[tuple[str, bytes]]) -> list[Sample]:
    """Group members by webdataset's rule: neighbors that share a key."""
    groups: list[Sample] = []
    for name, data in members:
        parts = split_name(name)
        if parts is None or is_not_sample(name):
            continue
        if not groups or groups[-1][0] != parts[0] or parts[1] in groups[-1][1]:
            groups.append((parts[0], {}))
        groups[-1][1][parts[1]] = data
    return groups


READ: dict[str, Read] = {
    "plain": read_plain,
    "indexed": read_indexed,
    "tarfile": read_tarfile,
    "stream": read_stream,
    "webdataset": read_webdataset,
}


# --- judging ---


def judge(data: bytes, original: list[Sample]) -> str:
    """Return the kind of a damage: "tells", "another" or "harmless", as in the module docstring."""
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:", errorlevel=2) as tar:
            members = _grouped(_members(tar))
            end = tar.offset
    except (tarfile.TarError, ValueError, OverflowError, EOFError, RecursionError):
        return "tells"
    if end + 2 * BLOCK > len(data) or any(data[end:]):
        return "tells"
    return "harmless" if members == original else "another"


def look(read: Read, path: str, original: list[Sample]) -> tuple[str, type[Exception] | None]:
    """Return the outcome of a reader: "whole", "error" with the exception, "silent", or "more"."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        warnings.simplefilter("ignore", ResourceWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            delivered = read(path)
        except Exception as error:
            return "error", type(error)
    if warned:
        return "error", None
    if any(sample not in delivered for sample in original):
        return "silent", None
    return ("whole" if delivered == original else "more"), None


@dataclass
class Counts:
    """Counts of cases by (kind, class) and of outcomes by (reader, class, outcome, kind).

    strange: exceptions that no reader promises.
    """

    cases: Counter[tuple[str, str]] = field(default_factory=Counter)
    outcomes: Counter[tuple[str, str, str, str]] = field(default_factory=Counter)
    strange: Counter[tuple[str, str]] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)

    def of(self, reader: str, known: str, outcome: str, kind: str = "") -> int:
        return sum(
            count
            for (item, description, came, by), count in self.outcomes.items()
            if item == reader
            and known in (description, "")
            and came == outcome
            and kind in (by, "")
        )


def campaign(count: int, seed: int, folder: Path, keep: Path | None = None) -> Counts:
    """Damage and read `count` tars. folder: for one tar at a time. keep: folder for broken
    promises.
    """
    random, counts = Random(seed), Counts()
    shards = shards_of(random)
    for name, (data, original) in shards.items():
        place = folder / name
        place.mkdir(parents=True)
        (place / "it.tar").write_bytes(data)
        index = scan([str(place / "it.tar")])
        save_index(with_checksums(index), str(place))
        for reader, read in READ.items():
            outcome, error = look(read, str(place / "it.tar"), original)
            if outcome != "whole":
                raise AssertionError(
                    f"{reader} does not read the sound shard of {name}: {outcome} {error}"
                )
    for number in range(count):
        kind = KINDS[number % len(KINDS)]
        name = random.choice(sorted(shards))
        data, original = shards[name]
        damaged = kind(data, random)
        path = folder / name / "it.tar"
        path.write_bytes(damaged)
        known = judge(damaged, original)
        counts.cases[kind.__name__, known] += 1
        for reader, read in READ.items():
            outcome, error = look(read, str(path), original)
            counts.outcomes[reader, known, outcome, kind.__name__] += 1
            if error is not None and not issubclass(error, PROMISED.get(reader, _THEIRS)):
                counts.strange[reader, error.__name__] += 1
            lost = outcome == "silent" and (
                reader == "indexed" or (reader == "plain" and known != "another")
            )
            if lost or (
                reader in PROMISED and error is not None and not issubclass(error, WdstrainError)
            ):
                counts.broken.append(
                    f"{reader} {name} {kind.__name__} number {number} ({known}): {outcome} {error}"
                )
                if keep is not None:
                    keep.mkdir(parents=True, exist_ok=True)
                    (keep / f"{number}-{kind.__name__}.tar").write_bytes(damaged)
    with warnings.catch_warnings():  # webdataset leaves its files to the garbage collector
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
    return counts


def table(counts: Counts) -> str:
    """Return silent losses by kind and reader, and outcomes of the readers by class of damage."""
    readers = "".join(f"{name:>8}" for name in ("plain", "indexed", "tarfile", "stream", "webd."))

    def row(name: str, cells: list[int], *numbers: object) -> str:
        first = f"{name:<26}" + "".join(f"{number:>7}" for number in numbers).ljust(14)
        return first + "".join(f"{cell:8}" for cell in cells)

    lines = [row("silent losses", [], "tars", "tell") + readers]
    for kind in [item.__name__ for item in KINDS] + [""]:
        silent = [counts.of(reader, "", "silent", kind) for reader in READERS]
        tars = sum(n for (k, _), n in counts.cases.items() if kind in (k, ""))
        tell = sum(n for (k, c), n in counts.cases.items() if c == "tells" and kind in (k, ""))
        lines.append(row(kind.replace("_", " ") or "in all", silent, tars, tell))
    for known in ("tells", "another", "harmless"):
        tars = sum(n for (_, c), n in counts.cases.items() if c == known)
        lines += ["", row(known, [], tars) + readers]
        for outcome in ("silent", "error", "whole", "more"):
            lines.append(row(f"  {outcome}", [counts.of(r, known, outcome) for r in READERS]))
    strange = (
        ", ".join(f"{reader} {name} {n}" for (reader, name), n in sorted(counts.strange.items()))
        or "none"
    )
    return "\n".join([*lines, "", f"exceptions nobody promised: {strange}"])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--count", type=int, default=10_000, help="tars")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--keep", type=Path, help="folder for tars on which wdstrain breaks its promise"
    )
    arguments = parser.parse_args()
    logging.disable()
    begun = time.perf_counter()
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(prefix="mutated-tars-", dir=memory) as folder:
        counts = campaign(arguments.count, arguments.seed, Path(folder), arguments.keep)
    print(table(counts))
    print(
        f"{arguments.count} tars, seed {arguments.seed}, {time.perf_counter() - begun:.0f} s; broken promises of wdstrain: {len(counts.broken)}"
    )
    for item in counts.broken[:20]:
        print(" ", item)
    return 1 if counts.broken else 0


if __name__ == "__main__":
    sys.exit(main())
