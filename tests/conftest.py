"""Shared fixtures and helpers of the tests: real shards of small images in temporary folders."""

from __future__ import annotations

import gc
import io
import itertools
import multiprocessing
import os
import signal
import subprocess
import threading
import warnings
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

# More threads than cores wait for each other: one process per core, with one torch thread each.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import numpy.typing as npt
import pytest
import webdataset
from PIL import Image

from wdstrain.shards.tar_headers import END, header, padding

ROOT = Path(__file__).parent.parent

Sample = tuple[str, dict[str, bytes]]


def picture(number: int, *, size: tuple[int, int] = (24, 20), kind: str = "PNG") -> bytes:
    """Return an encoded image whose pixels depend on its number."""
    rows = np.arange(size[1])[:, None, None] * 3
    columns = np.arange(size[0])[None, :, None] * 5
    pixels = (rows + columns + np.array([number, 7 * number, 13 * number])[None, None, :]) % 256
    return encoded(Image.fromarray(pixels.astype(np.uint8)), kind, quality=95)


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    """Return an image as a file of this format. options: of Pillow."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def noise(width: int, height: int) -> npt.NDArray[np.uint8]:
    """Return noise and slopes, so that every block differs from its neighbors. uint8[h, w, 3]"""
    rows, columns = np.mgrid[:height, :width]
    grains = np.random.default_rng(width * height).integers(0, 60, (height, width, 3))
    slopes = np.stack([rows % 190, columns % 190, (rows + columns) % 190], axis=2)
    return (slopes + grains).astype(np.uint8)


def npy(array: Any) -> bytes:
    """Return an array as numpy saves it."""
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def images_with_equal_crc32() -> tuple[bytes, bytes]:
    """Return two different PNGs of equal size and crc32.

    PNG chunks contain crc32s, which fix 16 bits of the crc32 of the file, so a search is quick.
    """
    first_by_size_and_crc32: dict[tuple[int, int], bytes] = {}
    random = np.random.default_rng(0)
    while True:
        image = Image.fromarray(random.integers(0, 256, (8, 8), np.uint8))
        data = encoded(image, "png", compress_level=0)
        earlier = first_by_size_and_crc32.setdefault((len(data), zlib.crc32(data)), data)
        if earlier != data:
            return earlier, data


def write_tar(path: Path, samples: list[Sample]) -> Path:
    """Write a shard of these samples, with the header writer of the package."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        for key, fields in samples:
            for field, data in fields.items():
                file.write(header(f"{key}.{field}", len(data)) + data + bytes(padding(len(data))))
        file.write(END)
    return path


def write_shards(folder: Path, counts: list[int]) -> Path:
    """Write shards of text samples: sample i has the key s00000i, its number as `cls` and `txt`."""
    numbers = itertools.count()
    for shard, count in enumerate(counts):
        texts = [b"%d" % n for n in itertools.islice(numbers, count)]
        samples = [(f"s{int(t):06d}", {"cls": t, "txt": b"sample " + t}) for t in texts]
        write_tar(folder / f"part-{shard:03d}.tar", samples)
    return folder


def write_picture_shards(folder: Path, counts: list[int], bad: Collection[int] = ()) -> Path:
    """Write shards of pictures: sample i has the key s00i and the class i % 10.

    bad: numbers of the samples whose picture cannot be decoded.
    """
    numbers = itertools.count()
    for shard, count in enumerate(counts):
        samples = list[Sample]()
        for n in itertools.islice(numbers, count):
            data = b"no picture" if n in bad else picture(n)
            samples.append((f"s{n:03d}", {"png": data, "cls": b"%d" % (n % 10)}))
        write_tar(folder / f"p-{shard}.tar", samples)
    return folder


def keys_of(batches: Iterable[Mapping[str, Any]]) -> list[list[str]]:
    """Return the keys of each batch."""
    return [batch["__key__"] for batch in batches]


def write_class_folder(folder: Path, classes: dict[str, int], kind: str = "png") -> Path:
    """Write <folder>/<class>/<n>.png."""
    numbers, form = itertools.count(), "JPEG" if kind == "jpg" else "PNG"
    for name, count in classes.items():
        (folder / name).mkdir(parents=True)
        for number in itertools.islice(numbers, count):
            data = picture(number, kind=form)
            (folder / name / f"{number:03d}.{kind}").write_bytes(data)
    return folder


def pytest_configure() -> None:
    """Keep temporary files in the clone, a folder for each run, and take SIGINT as in a terminal.

    A shell starts background jobs with SIGINT ignored, and child processes inherit that: tests that
    interrupt a program would wait for it forever.
    """
    (ROOT / ".pytest-tmp").mkdir(exist_ok=True)
    os.environ.setdefault("XDG_CACHE_HOME", str(ROOT / ".pytest-tmp" / "cache"))
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(ROOT / ".pytest-tmp"))
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest tests first, so that parallel test processes end together."""
    items.sort(key=lambda item: item.path.name not in ("test_guides.py", "test_ray.py"))


def pytest_collection_finish() -> None:
    """Exempt imported modules from garbage collection: they cost 0.3 s per `gc.collect()`."""
    gc.collect()
    gc.freeze()


def quick_and_slow(values: Iterable[Any], quick: int) -> list[Any]:
    """Return parameters: the first `quick` run in the default suite, the others are slow."""
    listed = list(values)
    slow = [value if isinstance(value, tuple) else (value,) for value in listed[quick:]]
    return listed[:quick] + [pytest.param(*value, marks=pytest.mark.slow) for value in slow]


def flags(options: dict[str, Any]) -> list[str]:
    """Return options of a training run as command line words."""
    words = []
    for name, value in options.items():
        words += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    return words


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Three shards of 7, 13 and 1 text samples."""
    return write_shards(tmp_path / "shards", [7, 13, 1])


@pytest.fixture(scope="session")
def data() -> Callable[[str], Path]:
    """Return a function that finds a real data set by name, or skips the test if it is missing."""
    place = Path(os.environ.get("WDSTRAIN_DATA", ROOT.parent / "shared" / "data"))

    def find(name: str) -> Path:
        if not (place / name).exists():
            pytest.skip(f"the real data set {name} is not here; WDSTRAIN_DATA names its folder")
        return place / name

    return find


@pytest.fixture(scope="session", autouse=True)
def no_flushes() -> Iterator[None]:
    """Skip fsync in the test process: on a journaling disk its waits take a sixth of the suite.

    Tests of power cuts run the package in processes of their own, or replace fsync again.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: None)
        yield


@pytest.fixture(autouse=True)
def no_leftovers() -> Iterator[None]:
    """Check that a test leaves no thread of the package and no child process."""
    yield
    if live_threads_and_children():
        gc.collect()  # an unreferenced loader ends with its last reference, in a cycle
        for thread in threading.enumerate():  # `close` leaves those that a server keeps to end
            if thread.name.startswith("wdstrain"):
                thread.join(20)
    assert not live_threads_and_children(), f"left behind: {live_threads_and_children()}"


def live_threads_and_children() -> list[str]:
    """Return the names of live threads of the package and of child processes."""
    threads = [item.name for item in threading.enumerate() if item.name.startswith("wdstrain")]
    return threads + [str(child) for child in multiprocessing.active_children()]


def files_of(folder: Path) -> dict[str, bytes]:
    """Return the contents of the files of a folder, by name."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def read_with_webdataset(paths: list[Path]) -> list[Sample]:
    """Return all samples of shards by webdataset, whose files the garbage collector closes."""
    samples = list[Sample]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        for path in paths:
            for sample in webdataset.WebDataset(str(path), shardshuffle=False):
                fields = {name: data for name, data in sample.items() if name[:2] != "__"}
                samples.append((sample["__key__"], fields))
        gc.collect()
    return samples


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with 1 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    mounted = subprocess.run(mount, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"a file system cannot be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)
