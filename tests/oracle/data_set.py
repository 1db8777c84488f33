"""Model of a data set in plain Python: its samples, and the batches a loader must deliver.

This module does not import the package. The tars are written by Python's `tarfile`, the images by
Pillow, the arrays by NumPy.
"""

from __future__ import annotations

import io
import itertools
import json
import random
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from tests.conftest import encoded, npy

CLASSES = ("ant", "bee", "cat", "dog")
SHAPE = (3, 2)  # of the array of each sample
LARGE = (16, 40)  # of float64, in sets for raw arrays: large enough to be read into the batch
SIDES = (5, 7)  # height and width of each image
FORMATS = (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Sample:
    """One sample in the model: values, and the bytes of each tar field."""

    number: int
    key: str
    label: int
    angle: float
    owner: int
    weight: float
    array: Array
    pixels: Array
    fields: dict[str, bytes]

    @property
    def kind(self) -> str:
        return CLASSES[self.label]


@dataclass(frozen=True)
class DataSet:
    """Samples by shard, in file order.

    raw: each sample has a large array, and the same fields in the same order.
    """

    shards: tuple[tuple[Sample, ...], ...]
    raw: bool = False

    @property
    def samples(self) -> list[Sample]:
        return [sample for shard in self.shards for sample in shard]

    def by_number(self) -> dict[int, Sample]:
        return {sample.number: sample for sample in self.samples}

    def only(self, numbers: Iterable[int]) -> DataSet:
        """Return the set of these samples, in the order of this set; no shard is empty."""
        wanted = set(numbers)
        shards = (tuple(s for s in shard if s.number in wanted) for shard in self.shards)
        return replace(self, shards=tuple(shard for shard in shards if shard))


def draw_sample(rng: random.Random, number: int, key: str, *, raw: bool = False) -> Sample:
    """Return a sample with random fields; `number` identifies it in the model and in the fields."""
    values = np.random.default_rng(rng.getrandbits(64))
    array = values.normal(size=LARGE) if raw else values.integers(0, 256, SHAPE).astype(np.uint8)
    pixels = values.integers(0, 256, (*SIDES, 3)).astype(np.uint8)
    label, angle = rng.randrange(len(CLASSES)), round(rng.uniform(-9, 9), 3)
    owner, weight = number // 3, rng.choice((0, 0.5, 1, 1, 2.25))
    document = {"number": number, "angle": angle, "kind": CLASSES[label]}
    document |= {"owner": owner, "weight": weight}
    fields = {
        "number": str(number).encode(),
        "cls": str(label).encode(),
        "json": json.dumps(document).encode(),
        "npy": npy(array),
        "png": encoded(Image.fromarray(pixels), "PNG"),
    }
    if raw or rng.random() < 0.7:  # some samples lack this field, but not in a set of raw arrays
        fields["bin"] = values.bytes(rng.choice((0, 1, 511, 512, 513, rng.randrange(20_000))))
    return Sample(number, key, label, angle, owner, weight, array, pixels, fields)


def draw_data_set(
    rng: random.Random, *, first: int = 0, most: int = 60, raw: bool = False
) -> DataSet:
    """Return a set with random shard sizes; keys are unique, or restart in each shard."""
    counts = [rng.randrange(1, most) for _ in range(rng.choice((1, 1, 2, 3, 5)))]
    anew, wide = rng.random() < 0.3, rng.random() < 0.2
    shards, numbers = [], itertools.count(first)
    for count in counts:
        samples = []
        for place in range(count):
            number = next(numbers)
            key = f"{place if anew else number:06d}"
            key = f"folder/{'long-' * 30}{key}" if wide else key
            samples.append(draw_sample(rng, number, key, raw=raw))
        shards.append(tuple(samples))
    return DataSet(tuple(shards), raw=raw)


def write(data: DataSet, folder: Path, rng: random.Random) -> list[Path]:
    """Write the shards as one of the three tar formats; return their paths in order."""
    folder.mkdir(parents=True, exist_ok=True)
    form = rng.choice(FORMATS)
    if form == tarfile.USTAR_FORMAT and any(len(s.key) > 90 for s in data.samples):
        form = tarfile.GNU_FORMAT
    paths, order = list[Path](), None
    for index, shard in enumerate(data.shards):
        paths.append(folder / f"part-{index:03d}.tar")
        with tarfile.open(paths[-1], "w", format=form) as tar:
            for sample in shard:
                names = list(sample.fields)
                rng.shuffle(names)
                order = order or names
                for name in order if data.raw else names:
                    add(tar, f"{sample.key}.{name}", sample.fields[name])
    return paths


def add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))


def read_tars(paths: Sequence[Path]) -> Iterator[tuple[Path, str, dict[str, bytes]]]:
    """Yield (shard, key, fields) of each sample, by `tarfile` and webdataset's rule for keys."""

    def key_of(member: tarfile.TarInfo) -> str:
        folder, slash, base = member.name.rpartition("/")
        return folder + slash + base.partition(".")[0]

    for path in paths:
        with tarfile.open(path) as tar:
            for key, members in itertools.groupby(tar, key_of):
                fields = dict[str, bytes]()
                for member in members:
                    file, name = tar.extractfile(member), member.name[len(key) + 1 :]
                    assert file is not None, f"{path}: {member.name} is no file"
                    assert name not in fields, f"{path}: {member.name} comes twice"
                    fields[name] = file.read()
                yield path, key, fields
