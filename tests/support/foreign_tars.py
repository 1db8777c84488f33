"""Tars written by Python's tarfile, and their samples as webdataset reads them."""

from __future__ import annotations

import gc
import io
import itertools
import tarfile
import warnings
from pathlib import Path
from typing import Any

import webdataset as wds

MODES = {".tar": "w", ".tgz": "w:gz", ".tar.gz": "w:gz", ".tar.bz2": "w:bz2", ".tar.xz": "w:xz"}


def write_members(path: Path, members: list[tuple[str, bytes]], *, format: int = 0) -> str:
    """Write a tar of these (name, data), compressed by its file extension. Returns its path.

    format: tarfile's. A name that ends with a slash is a directory.
    """
    mode = next(mode for ending, mode in MODES.items() if path.name.endswith(ending))
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode, format=format) as tar:  # type: ignore[call-overload]
        for name, data in members:
            member = tarfile.TarInfo(name.rstrip("/"))
            member.size = len(data)
            if name.endswith("/"):
                member.type = tarfile.DIRTYPE
            tar.addfile(member, io.BytesIO(data))
    return str(path)


def write_set(folder: Path, counts: list[int], ending: str = ".tar") -> str:
    """Write shards of `counts` samples `key.cls` and `key.txt`. Returns their brace pattern."""
    numbers = itertools.count()
    for shard, count in enumerate(counts):
        members = list[tuple[str, bytes]]()
        for n in itertools.islice(numbers, count):
            members.append((f"d/s{n:04d}.cls", b"%d" % (n % 3)))
            members.append((f"d/s{n:04d}.txt", b"text %d" % n))
        write_members(folder / f"part-{shard:03d}{ending}", members)
    return f"{folder}/part-{{000..{len(counts) - 1:03d}}}{ending}"


def read_wds(urls: Any, **options: Any) -> list[dict[str, Any]]:
    """Return the samples of `wds.WebDataset`, which leaves its files to the garbage collector."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        samples = list(wds.WebDataset(urls, **{"shardshuffle": False, **options}))
        gc.collect()
    return samples


def keys(samples: Any) -> list[str]:
    return [sample["__key__"] for sample in samples]
