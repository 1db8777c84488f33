"""Conversions: reproducible bytes, no silent loss, resume, splits, bounds, and folders of output."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import wdstrain as wt
from tests.conftest import (
    files_of,
    images_with_equal_crc32,
    picture,
    write_class_folder,
    write_shards,
)
from tests.support.os_faults import watched_calls
from tests.support.tables import read_samples
from wdstrain.cli import main
from wdstrain.errors import ShardError, SourceError, StorageError, UsageError

CLASSES = {"cat": 11, "dog": 24, "eel": 5}
NO_PICTURE = "no picture"


class Photos:
    """A class folder of 40 JPEGs, converted to folders beside it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.root = folder, write_class_folder(folder / "in", CLASSES, "jpg")

    def __call__(self, out: str = "out", **options: Any) -> wt.Index:
        return wt.convert_folder(self.root, self.folder / out, **options)

    def __truediv__(self, name: str) -> Path:
        return self.root / name

    def files(self, out: str = "out") -> dict[str, bytes]:
        return files_of(self.folder / out)


@pytest.fixture
def photos(tmp_path: Path) -> Photos:
    return Photos(tmp_path)


# --- the same bytes ---


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_stream_and_a_list_of_the_same_samples_give_the_same_bytes(
    tmp_path: Path, shuffle: bool
) -> None:
    samples = [{"__key__": f"k{n}", "bin": bytes([n]) * (n % 7 * 3000)} for n in range(60)]
    options: dict[str, Any] = {"max_shard_size": 50_000, "max_shard_samples": 9}
    direct = wt.pack(iter(samples), tmp_path / "direct", shuffle=shuffle, **options)
    split = {"train": 1.0}
    wt.pack(samples, tmp_path / "planned", split=split, shuffle=shuffle, **options)
    assert len(direct.shards) > 7
    for shard in direct.shards:
        assert Path(shard.path).read_bytes() == (tmp_path / "planned" / shard.name).read_bytes()
    packed = list(read_samples(tmp_path / "direct"))
    assert (packed == [f"k{n}" for n in range(60)]) != shuffle


_STREAM = """
import resource, sys
import numpy as np
import wdstrain as wt
from wdstrain.conversion import api as _  # the import counts for neither run
bits = np.random.default_rng(0)
def samples(count):
    for number in range(count):
        yield {"__key__": f"k{number:07d}", "bin": bits.bytes(8000)}
list(samples(10))
wt.pack(samples(int(sys.argv[1])), sys.argv[2], memory=16_000_000, max_shard_size=8_000_000)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


@pytest.mark.slow
def test_a_source_of_ten_times_the_memory_is_shuffled_within_it(tmp_path: Path) -> None:
    """16 MB allowed, 165 MB packed: the peak is less than 16 MB above a small conversion."""
    peaks = []
    for count in (50, 20_000):
        words = [sys.executable, "-c", _STREAM, str(count), str(tmp_path / str(count))]
        done = subprocess.run(words, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout))
    assert sum(path.stat().st_size for path in (tmp_path / "20000").glob("*.tar")) > 160_000_000
    assert peaks[1] - peaks[0] < 16_000_000
    places = np.array([int(key[1:]) for key in read_samples(tmp_path / "20000")])
    assert sorted(places.tolist()) == list(range(20_000))
    first = places[:1000]  # a complete shuffle: the first thousand come from all parts
    assert abs(first.mean() - 10_000) < 1_000
    assert len(set(first // 1000)) == 20


def test_conversions_leave_no_descriptors_and_threads(photos: Photos, tmp_path: Path) -> None:
    counts = []
    for number in range(3):
        photos(str(number), num_workers=2, max_shard_samples=5)
        wt.pack([{"txt": "x"}] * 50, tmp_path / f"s{number}")
        counts.append(len(os.listdir("/proc/self/fd")))
    assert max(counts) == counts[0]


# --- resumed ---


def test_a_changed_mask_older_than_its_image_is_packed_again(
    photos: Photos, tmp_path: Path
) -> None:
    """The new mask has as many bytes as the old one, and both are older than the image."""
    old, new = images_with_equal_crc32()
    for image in photos.root.glob("*/*.jpg"):
        image.write_bytes(picture(1, size=(8, 8), kind="JPEG"))
        mask = tmp_path / "masks" / image.parent.name / f"{image.stem}.png"
        mask.parent.mkdir(parents=True, exist_ok=True)
        mask.write_bytes(old)
        os.utime(mask, (1, 1))
    options: dict[str, Any] = {"masks": tmp_path / "masks", "max_shard_samples": 4}
    (photos / "eel/039.jpg").write_text(NO_PICTURE)
    with pytest.raises(SourceError, match="039.jpg"):
        photos(**options, shuffle=False)
    (photos / "eel/039.jpg").write_bytes(picture(999, size=(8, 8), kind="JPEG"))
    changed = tmp_path / "masks" / "cat" / "000.png"
    changed.write_bytes(new)
    os.utime(changed, (2, 2))
    assert photos(**options, shuffle=False, resume=True)["cat/000"]["mask.png"] == new


class EnoughError(Exception):
    """Raised to end a conversion from within."""


@pytest.mark.parametrize("kind", ["unfinished", "finished"])
def test_resume_refuses_another_source_or_other_options(tmp_path: Path, kind: str) -> None:
    def broken_off(step: Any) -> None:
        if kind == "unfinished" and step.title == "packing" and step.done > 50:
            raise EnoughError

    def convert(field: str = "x", **options: Any) -> wt.Index:
        array = {field: np.arange(1000).reshape(100, 10)}
        return wt.convert_arrays(array, tmp_path, **{"max_shard_samples": 10, **options})

    try:
        convert(progress=broken_off)
    except EnoughError:
        assert kind == "unfinished"
    changes: list[tuple[str, dict[str, Any], str]] = [
        ("x", {"seed": 3}, "seed was 0, is 3"),
        ("x", {"shuffle": False, "limit": 9}, "shuffle was True, is False; limit was None, is 9"),
        ("x", {"classes": ["a", "b"]}, "class_names was "),
        ("y", {}, "fields was ['x'], is ['y']"),
    ]
    for field, options, message in changes:
        words = f"conversion of another source or with other options: {message}"
        with pytest.raises(UsageError, match=rf"an? {kind} {re.escape(words)}"):
            convert(field, resume=True, **options)
    assert len(convert(resume=True, num_workers=2)) == 100


def test_a_resumed_stream_writes_a_shard_again_whose_sample_has_another_content(
    tmp_path: Path,
) -> None:
    """The size and the key of the sample are those of before."""

    def broken_off(step: Any) -> None:
        if step.title == "packing" and step.done > 20:
            raise EnoughError

    def pack(text: str, **options: Any) -> wt.Index:
        rows = ({"__key__": f"k{n:02d}", "txt": text if n == 3 else "x"} for n in range(40))
        return wt.pack(rows, tmp_path, max_shard_samples=10, shuffle=False, **options)

    with pytest.raises(EnoughError):
        pack("x", progress=broken_off)
    assert list(tmp_path.rglob("train-000000.tar"))
    index = pack("y", resume=True)
    texts = [sample["txt"] for _, sample in index.read(np.arange(40), ["txt"])]
    assert texts == [b"y" if n == 3 else b"x" for n in range(40)]


def test_resume_without_earlier_output_converts(photos: Photos, tmp_path: Path) -> None:
    assert len(photos(resume=True)) == 40
    (tmp_path / "out" / "train-000000.tar").unlink()
    with pytest.raises(ShardError, match="cannot be found"):
        photos(resume=True)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").touch()
    with pytest.raises(UsageError, match="holds 1 files and no conversion"):
        photos("notes", resume=True)


@pytest.mark.parametrize("workers", [1, 2])
def test_ctrl_c_does_not_wait_for_the_shards_that_are_being_written(
    tmp_path: Path, workers: int
) -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (500, 500, 3), np.uint8)
    (tmp_path / "in" / "a").mkdir(parents=True)
    first, out = tmp_path / "in" / "a" / "0.png", tmp_path / "out"
    Image.fromarray(pixels).save(first, compress_level=1)
    for number in range(1, 800):
        os.link(first, tmp_path / "in" / "a" / f"{number}.png")

    def interrupt() -> None:
        while not any(path.stat().st_size for path in out.rglob("*.tar.*.tmp")):  # a part
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)

    with ThreadPoolExecutor(1) as threads:
        threads.submit(interrupt)
        options: dict[str, Any] = {"num_workers": workers, "max_shard_samples": 400}
        with pytest.raises(KeyboardInterrupt):
            wt.convert_folder(tmp_path / "in", out, check="decode", **options)  # takes its time
    assert not list(out.rglob("*.tar"))


# --- errors of disks ---


def test_a_read_error_of_the_source_names_the_source(photos: Photos) -> None:
    """The error must not suggest to free disk space, as a write error does."""

    def fail() -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    words = "/in/.*cannot be read.*Input/output"
    failing = watched_calls("pread", r"/in/.*jpg", fail)
    with failing, pytest.raises((StorageError, SourceError), match=words):
        photos(num_workers=1)


def test_a_read_only_disk_is_one_error(photos: Photos, small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(StorageError, match="cannot be written: Read-only file system"):
        photos("disk/out")


# --- no silent loss ---


def skipped(out: Path) -> dict[str, str]:
    """Return {path: reason} of the samples that a conversion skipped."""
    lines = map(json.loads, (out / "skipped.jsonl").read_text().splitlines())
    return {row["path"]: row["reason"] for row in lines if row["source"] == "in"}


def test_bad_samples_are_skipped_counted_and_listed(photos: Photos, tmp_path: Path) -> None:
    (photos / "cat/zero.jpg").touch()
    (photos / "cat/text.jpg").write_text("<html>404</html>")
    (photos / "dog/half.jpg").write_bytes(picture(1, kind="JPEG")[:300])
    (photos / "dog/phone.jpg").write_bytes(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(99))
    (photos / "dog/clip.jpg").write_bytes(b"\0\0\0\x18ftypisom\0\0\0\0isommp41" + bytes(99))
    (photos / "dog/gone.jpg").symlink_to(tmp_path / "nowhere.jpg")
    with pytest.raises(SourceError, match="it has 0 bytes|it cannot be read"):
        photos()
    assert not (tmp_path / "out").exists()
    options: dict[str, Any] = {"on_error": "skip", "overwrite": True, "num_workers": 2}
    index = photos(check="decode", **options)
    assert (index.info["listed"], index.info["skipped"], len(index)) == (46, 6, 40)
    reasons = skipped(tmp_path / "out")
    bad = {"cat/zero", "cat/text", "dog/half", "dog/phone", "dog/clip", "dog/gone"}
    assert set(reasons) == {f"{name}.jpg" for name in bad}
    assert "does not begin as an image does" in reasons["cat/text.jpg"]
    assert "truncated" in reasons["dog/half.jpg"].lower()
    assert photos(**options).info["skipped"] == 5  # unless decoded, a truncated image is accepted


def test_a_shard_of_only_bad_samples_leaves_no_empty_shard_and_no_gap(photos: Photos) -> None:
    for number in range(4, 8):
        (photos / f"cat/{number:03d}.jpg").write_text(NO_PICTURE)
    index = photos(on_error="skip", shuffle=False, max_shard_samples=4, limit=12)
    names = [(shard.name, shard.samples) for shard in index.shards]
    assert names == [(f"train-{number:06d}.tar", 4) for number in range(2)]
    keys = [key.rpartition("/")[2] for key in index.keys(range(8))]
    assert keys == [f"{number:03d}" for number in [0, 1, 2, 3, 8, 9, 10, 11]]


def _reversed(path: Path) -> None:
    path.write_bytes(path.read_bytes()[::-1])
    os.utime(path, (1, 1))


def _grown(path: Path) -> None:
    path.write_bytes(picture(3, size=(99, 99), kind="JPEG"))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_reversed, "it was changed since it was listed"),
        (_grown, r"it had \d+ bytes when it was listed and has \d+ now"),
    ],
)
def test_a_sample_that_changes_while_it_is_packed_is_bad(
    photos: Photos, tmp_path: Path, change: Callable[[Path], None], reason: str
) -> None:
    """The file changes between the listing, which records its size, and the copy."""
    with watched_calls("open", r"/cat/003\.jpg", lambda: change(photos / "cat/003.jpg")):
        assert len(photos(on_error="skip", num_workers=1)) == 39
    (found,) = skipped(tmp_path / "out").values()
    assert re.search(reason, found)


# --- folders ---


def test_skipped_files_and_folders_are_counted_and_links_followed(
    photos: Photos, tmp_path: Path
) -> None:
    for name in (".DS_Store", "._001.png", "notes.TXT"):
        (photos / "cat" / name).write_bytes(b"x")
    (photos / "lonely.png").write_bytes(picture(1))
    write_class_folder(tmp_path / "elsewhere", {"x": 3})
    (photos / "bird").symlink_to(tmp_path / "elsewhere" / "x")
    (photos / "empty").mkdir()
    (photos / "__MACOSX").mkdir()
    index = photos()
    assert (index.labels[0].classes, len(index)) == (("bird", "cat", "dog", "eel"), 43)
    assert index.info["ignored"] == {
        "hidden or system files": 3,
        "*.txt": 1,
        "images outside a class folder": 1,
        "folders without images": 1,
    }


def test_split_folders_are_kept_and_what_lies_beside_them_is_counted(tmp_path: Path) -> None:
    write_class_folder(tmp_path / "in" / "train", {"a": 3, "b": 4})
    write_class_folder(tmp_path / "in" / "dev", {"a": 2})
    (tmp_path / "in" / "annotations").mkdir()
    (tmp_path / "in" / "1.png").write_bytes(picture(1))
    index = wt.convert_folder(tmp_path / "in", tmp_path / "out")
    shards = [(shard.name, shard.samples) for shard in index.shards]
    assert shards == [("train-000000.tar", 7), ("val-000000.tar", 2)]
    assert index.labels[0].classes == ("a", "b")
    ignored = {"folders beside the splits": 1, "files beside the splits": 1}
    assert index.info["ignored"] == ignored
    with pytest.raises(UsageError, match="own splits already"):
        wt.convert_folder(tmp_path / "in", tmp_path / "again", split={"x": 0.5, "y": 0.5})
    write_class_folder(tmp_path / "in" / "val", {"a": 2})
    with pytest.raises(SourceError, match="two of these folders mean the same split"):
        wt.convert_folder(tmp_path / "in", tmp_path / "again")


def test_names_with_dots_and_equal_names_get_distinct_keys(tmp_path: Path) -> None:
    folder = tmp_path / "in" / "a"
    folder.mkdir(parents=True)
    for name in ("x.v1.png", "x.v2.png", "x_v2.png", "y.png", "y.jpg", "grüße.PNG"):
        (folder / name).write_bytes(picture(len(name)))
    wt.convert_folder(tmp_path / "in", tmp_path / "out")
    by_key = read_samples(tmp_path / "out")
    assert set(by_key) == {"a/grüße", "a/x_v1", "a/x_v2", "a/x_v2-2", "a/y", "a/y-2"}
    assert by_key["a/grüße"]["png"] == picture(len("grüße.PNG"))


# --- splits and options ---


def test_max_shard_size_bounds_the_file(tmp_path: Path) -> None:
    samples = ({"__key__": f"k{i}", "bin": bytes(100 * i)} for i in range(200))
    index = wt.pack(samples, tmp_path / "out", max_shard_size=50_000)
    assert all(Path(shard.path).stat().st_size <= 50_000 for shard in index.shards)
    assert len(index.shards) < 2 * sum(100 * i + 1024 for i in range(200)) / 50_000
    rows = iter([{"bin": bytes(9000)}, {"txt": "small"}])
    packed = wt.pack(rows, tmp_path / "large", max_shard_size=5000)
    assert sorted(shard.samples for shard in packed.shards) == [1, 1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"split": {"train": 0.5, "train-clean": 0.5}}, "'train' and 'train-clean' cannot be told"),
        ({"split": {"a": 0.5, "b": 0.5}, "stratify": "label"}, "no classes to stratify by"),
        ({"split": {"train": 0.99, "val": 0.01}, "limit": 1}, "'val' gets none of 1 samples"),
        ({"split": {"a": 0.5, "b": 0.6}}, "shares must be above 0 and add up to 1"),
        ({"split": {"t.x": 0.5, "b": 0.5}}, "'t.x' cannot be the name of a split"),
        ({"split": {"a\n": 0.5, "b": 0.5}}, "cannot be the name of a split"),
        ({"stratify": "label"}, "needs a split"),
        ({"num_workers": 0}, "num_workers=0"),
        ({"limit": 0}, "limit=0"),
        ({"max_shard_size": 0}, "max_shard_size=0"),
        ({"quality": 101}, "quality=101"),
        ({"resume": True, "overwrite": True}, "Give only one"),
    ],
)
def test_impossible_options_are_refused(
    options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=words):
        wt.pack([{"txt": "x"}] * 40, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


# --- folders that hold something ---


def test_an_overwrite_is_asked_for_and_replaces_only_shards_or_nothing(
    photos: Photos, tmp_path: Path
) -> None:
    photos(max_shard_samples=20)
    (tmp_path / "out" / "backup-202401.tar").write_text("mine")
    before = photos.files()
    with pytest.raises(UsageError, match="holds 5 files.*overwrite=True"):
        photos(seed=1)
    image = photos / "dog/016.jpg"
    data = image.read_bytes()
    with (
        watched_calls("open", r"dog/016\.jpg", lambda: image.unlink(missing_ok=True)),
        pytest.raises(SourceError),
    ):
        photos(overwrite=True, max_shard_samples=2, num_workers=1)
    assert photos.files() == before
    assert wt.verify(tmp_path / "out" / "index.json").samples == 40
    image.write_bytes(data)
    photos(overwrite=True)
    names = {"index.arrow", "index.json", "backup-202401.tar", "train-000000.tar"}
    assert set(photos.files()) == names
    assert photos.files()["backup-202401.tar"] == b"mine"


def test_a_foreign_index_or_shard_is_neither_resumed_nor_replaced(
    photos: Photos, tmp_path: Path
) -> None:
    for name, text in (("foreign", '{"shardlist": []}'), ("other", '{"x": 1}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "index.json").write_text(text)
        with pytest.raises((UsageError, ShardError)):
            photos(name, resume=True)
        with pytest.raises(UsageError, match="no index of this package and would be replaced"):
            photos(name, overwrite=True)
        assert photos.files(name) == {"index.json": text.encode()}
    write_shards(tmp_path / "walked", [3])
    wt.index(tmp_path / "walked")
    with pytest.raises(UsageError, match="no conversion"):
        photos("walked", resume=True)
    write_shards(tmp_path / "shards", [2])
    (tmp_path / "shards" / "part-000.tar").rename(tmp_path / "shards" / "train-000000.tar")
    with pytest.raises(UsageError, match="holds train-000000.tar, which no index lists"):
        photos("shards", overwrite=True)


def test_shards_are_not_converted_into_their_own_folder(tmp_path: Path, capsys: Any) -> None:
    folder = tmp_path / "set"
    rows = [{"__key__": f"k{n:02d}", "txt": f"t{n}"} for n in range(40)]
    wt.pack(rows, folder, split={"train": 0.5, "val": 0.5}, max_shard_samples=10)
    before = files_of(folder)
    refusal = r"holds (train|val)-000000\.tar, which is being converted"
    options: dict[str, Any]
    for options in ({"overwrite": True}, {"append": True}, {"resume": True}, {"dry_run": True}):
        with pytest.raises(UsageError, match=refusal):
            wt.convert_tars(folder / "train-*.tar", folder, **options)
    assert main(["convert", "tars", str(folder), f"{folder}/", "--overwrite"]) == 2
    assert re.search(refusal, capsys.readouterr().err)
    assert files_of(folder) == before
