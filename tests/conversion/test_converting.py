"""Conversions: reproducible bytes, no silent loss, and resume after a kill at any time."""

from __future__ import annotations

import errno
import itertools
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wdstrain as wt
from tests.conftest import (
    files_of,
    images_with_equal_crc32,
    picture,
    write_class_folder,
    write_shards,
)
from tests.support.children import ended
from tests.support.os_faults import recorded_reads, watched_calls
from tests.support.tables import Tables, read_samples
from wdstrain.cli import main
from wdstrain.conversion.options import Options
from wdstrain.conversion.runner import Step, convert
from wdstrain.conversion.sources.folder import list_folder
from wdstrain.errors import ShardError, SourceError, StorageError, UsageError
from wdstrain.runtime.machine import cores

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


@pytest.mark.parametrize("options", [{"resize": 16}, {"shuffle": False, "quality": 50}])
def test_any_number_of_workers_and_any_memory_writes_the_same_bytes(
    photos: Photos, options: dict[str, Any]
) -> None:
    outputs = []
    for jobs, memory in ((1, 1 << 30), (2, 1 << 30), (3, 16_000_000)):
        photos(f"out{jobs}", num_workers=jobs, memory=memory, max_shard_samples=6, **options)
        outputs.append(photos.files(f"out{jobs}"))
    assert outputs[0] == outputs[1] == outputs[2]


def test_a_moved_source_gives_the_same_bytes(photos: Photos, tmp_path: Path) -> None:
    (photos / "cat/zero.jpg").touch()
    (photos / "cat/a.b.jpg").write_bytes(picture(3, kind="JPEG"))
    shutil.copytree(photos.root, tmp_path / "deep" / "down" / "in")
    photos("out0", on_error="skip")
    wt.convert_folder(tmp_path / "deep" / "down" / "in", tmp_path / "out1", on_error="skip")
    assert photos.files("out0") == photos.files("out1")
    assert set(photos.files("out0")) >= {"skipped.jsonl", "renamed.jsonl"}


def test_a_stream_and_a_list_of_the_same_samples_give_the_same_bytes(
    photos: Photos, tmp_path: Path
) -> None:
    """The external shuffle orders as the shuffle of a list does."""
    index, classes = photos("list", max_shard_samples=7), list(CLASSES)

    def sample(path: Path) -> dict[str, Any]:
        kind = path.parent.name
        key, number = f"{kind}/{path.stem}", classes.index(kind)
        return {"__key__": key, "jpg": path.read_bytes(), "cls": number}

    samples = map(sample, sorted(photos.root.rglob("*.jpg")))
    wt.pack(samples, tmp_path / "stream", max_shard_samples=7, classes=classes)
    for shard in index.shards:
        assert (tmp_path / "stream" / shard.name).read_bytes() == Path(shard.path).read_bytes()


def test_a_stream_in_its_own_order_fills_one_shard_after_the_other(tmp_path: Path) -> None:
    samples = [{"__key__": f"k{n}", "bin": bytes([n]) * (n % 7 * 3000)} for n in range(60)]
    options: dict[str, Any] = {"shuffle": False, "max_shard_size": 50_000, "max_shard_samples": 9}
    direct = wt.pack(iter(samples), tmp_path / "direct", **options)
    planned = wt.pack(samples, tmp_path / "planned", split={"train": 1.0}, **options)
    assert len(direct.shards) == len(planned.shards) > 8
    for shard in direct.shards:
        assert Path(shard.path).read_bytes() == (tmp_path / "planned" / shard.name).read_bytes()
    assert list(read_samples(tmp_path / "direct")) == [f"k{n}" for n in range(60)]


# --- larger than memory ---

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


def test_each_spill_bucket_is_read_once_and_forward(tmp_path: Path) -> None:
    samples = ({"__key__": f"k{number}", "bin": bytes(3000)} for number in range(4000))
    with recorded_reads(r"/spill/[^/]+") as reads:
        wt.pack(samples, tmp_path / "out", max_shard_size=1_000_000, memory=64_000_000)
    buckets: dict[str, list[tuple[int, int]]] = {}
    for path, offset, length in reads:
        buckets.setdefault(path, []).append((offset, length))
    assert len(buckets) == 256
    # Twice at most: where a shard ends inside a bucket.
    assert sum(length for _, _, length in reads) < 2 * 4000 * 3600
    for offsets in buckets.values():
        ends = [offset + length for offset, length in offsets]
        backward = sum(start < end for end, (start, _) in zip(ends, offsets[1:], strict=False))
        assert backward <= 1


def test_files_on_a_slow_disk_are_read_in_listed_order(tmp_path: Path) -> None:
    """A shuffled shard of 7 MB is read in groups of 0.5, 2 and 4.5 MB, each in the listed order.

    A fast disk is read in groups of 0.5 MB. The shards are the same.
    """
    (tmp_path / "in" / "a").mkdir(parents=True)
    for number in range(28):
        data = picture(number, kind="JPEG") + bytes(1 << 18)
        (tmp_path / "in" / "a" / f"{number:03d}.jpg").write_bytes(data)
    wt.convert_folder(tmp_path / "in", tmp_path / "fast")
    slow = watched_calls("pread", r"\.jpg", lambda: time.sleep(0.01))  # 25 MB/s
    with slow, recorded_reads(r"\.jpg") as reads:
        wt.convert_folder(tmp_path / "in", tmp_path / "slow", num_workers=1)
    paths = [path for path, _, _ in reads]
    assert len(paths) == 28
    assert sum(later < earlier for earlier, later in itertools.pairwise(paths)) <= 2
    assert files_of(tmp_path / "fast") == files_of(tmp_path / "slow")


def test_a_conversion_does_not_affect_other_child_processes(photos: Photos) -> None:
    """A running child is not waited for, and a failed one does not end the conversion."""
    context = multiprocessing.get_context("fork")
    ended = context.Event()
    children = [context.Process(target=ended.wait), context.Process(target=os._exit, args=(7,))]

    def begin(step: Step) -> None:
        if children[0].pid is None:
            for child in children:
                child.start()
            children[1].join()

    assert len(photos(max_shard_samples=1, num_workers=2, progress=begin)) == 40
    assert children[0].is_alive()
    ended.set()
    children[0].join()
    assert [child.exitcode for child in children] == [0, 7]


def test_a_large_conversion_uses_one_process_per_usable_core() -> None:
    done = ended(
        """
        import os
        from wdstrain.conversion.options import Options
        print(Options().processes(10**12), Options(num_workers=3).processes(10), end=' ')
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        print(Options().processes(10**12), Options().processes(10))
        """
    )
    assert done.out.split() == [str(cores()), "3", "1", "1"]


@pytest.mark.parametrize(
    ("kind", "where"), [("tars", "/set/"), ("arrays", "/spill/"), ("folder", "/in/")]
)
def test_a_read_error_of_the_source_names_the_source(
    photos: Photos, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, where: str
) -> None:
    """The error must not suggest to free disk space, as a write error does."""
    write_shards(tmp_path / "set", [20])

    def failing(read: Callable[..., Any]) -> Callable[..., Any]:
        def fail(fd: int, *words: Any) -> Any:
            if where in os.readlink(f"/proc/self/fd/{fd}"):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return read(fd, *words)

        return fail

    for name in ("read", "pread", "preadv"):
        monkeypatch.setattr(os, name, failing(getattr(os, name)))
    pack: dict[str, Callable[[], Any]] = {
        "tars": lambda: wt.convert_tars(tmp_path / "set", tmp_path / "out"),
        "arrays": lambda: wt.convert_arrays({"x": np.arange(50)}, tmp_path / "out"),
        "folder": photos,
    }
    words = rf"{where}.* cannot be read.*Input/output error"
    with pytest.raises((StorageError, SourceError), match=words):
        pack[kind]()


# --- killed and resumed ---


def test_resume_rewrites_shards_of_changed_input(photos: Photos, tmp_path: Path) -> None:
    """Files changed since the interruption are packed again, and the other shards are kept."""
    options: dict[str, Any] = {"max_shard_samples": 4, "shuffle": False}
    (photos / "eel/039.jpg").write_text(NO_PICTURE)
    with pytest.raises(SourceError, match="039.jpg: its jpg does not begin as an image does"):
        photos(**options)
    (photos / "eel/039.jpg").write_bytes(picture(999, kind="JPEG"))
    (photos / "cat/000.jpg").write_bytes(picture(555, size=(40, 40), kind="JPEG"))
    equal_size = bytearray((photos / "dog/016.jpg").read_bytes())
    equal_size[60] ^= 1
    (photos / "dog/016.jpg").write_bytes(equal_size)
    listing = list_folder(str(photos.root))
    done = convert(listing, str(tmp_path / "out"), Options(**options, resume=True))
    assert (done.kept, len(done.index.shards)) == (7, 10)
    photos("whole", **options)
    assert photos.files() == photos.files("whole")


def test_a_changed_mask_older_than_its_image_is_packed_again(
    photos: Photos, tmp_path: Path
) -> None:
    """The new mask has as many bytes as the old one, and both are older than the image."""
    old, new = images_with_equal_crc32()
    masks = tmp_path / "masks"
    for image in photos.root.glob("*/*.jpg"):
        image.write_bytes(picture(1, size=(8, 8), kind="JPEG"))
        mask = masks / image.parent.name / f"{image.stem}.png"
        mask.parent.mkdir(parents=True, exist_ok=True)
        mask.write_bytes(old)
        os.utime(mask, (1, 1))
    options: dict[str, Any] = {"masks": masks, "max_shard_samples": 4, "shuffle": False}
    (photos / "eel/039.jpg").write_text(NO_PICTURE)
    with pytest.raises(SourceError, match="039.jpg"):
        photos(**options)
    (photos / "eel/039.jpg").write_bytes(picture(999, size=(8, 8), kind="JPEG"))
    changed = masks / "cat" / "000.png"
    changed.write_bytes(new)
    os.utime(changed, (2, 2))
    assert photos(**options, resume=True)["cat/000"]["mask.png"] == new


class EnoughError(Exception):
    """Raised to end a conversion from within."""


def broken_off(step: Step) -> None:
    if step.title == "packing" and step.done > 50:
        raise EnoughError


ARRAY = np.arange(1000).reshape(100, 10)
SHARDS: dict[str, Any] = {"max_shard_samples": 10}


def test_resume_refuses_other_options(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(EnoughError):
        wt.convert_arrays({"x": ARRAY}, out, progress=broken_off, **SHARDS)
    begin = "an unfinished conversion of another source or with other options: "
    changes: list[tuple[str, dict[str, Any], str]] = [
        ("x", {"seed": 3}, "seed was 0, is 3"),
        ("x", {"shuffle": False, "limit": 9}, "shuffle was True, is False; limit was None, is 9"),
        ("y", {}, "fields was ['x'], is ['y']"),
    ]
    for field, other, message in changes:
        with pytest.raises(UsageError, match=re.escape(f"{begin}{message}.")):
            wt.convert_arrays({field: ARRAY}, out, resume=True, **SHARDS, **other)
    assert len(wt.convert_arrays({"x": ARRAY}, out, on_error="skip", resume=True, **SHARDS)) == 100


FINISHED = "a finished conversion of another source or with other options: "


def test_resume_refuses_a_finished_set_of_another_source_or_options(
    photos: Photos, tmp_path: Path
) -> None:
    photos()
    changes: list[tuple[dict[str, Any], str]] = [
        ({"seed": 4}, "seed was 0, is 4"),
        ({"resize": 50}, "resize was None, is 50"),
        ({"limit": 7}, "limit was None, is 7"),
    ]
    for options, message in changes:
        with pytest.raises(UsageError, match=f"{FINISHED}{message}"):
            photos(resume=True, **options)
    with pytest.raises(UsageError, match="a finished conversion of another source"):
        wt.pack([{"txt": "x"}], tmp_path / "out", resume=True)
    (tmp_path / "out" / "train-000000.tar").unlink()
    with pytest.raises(ShardError, match="cannot be found"):
        photos(resume=True)


def test_resume_refuses_other_classes_even_of_an_unlabeled_set(tmp_path: Path) -> None:
    def pack_samples(out: Path, **options: Any) -> wt.Index:
        return wt.pack(({"__key__": f"k{n}", "txt": "x"} for n in range(5)), out, **options)

    def pack_arrays(out: Path, **options: Any) -> wt.Index:
        return wt.convert_arrays({"x": np.zeros((5, 2), np.float32)}, out, **options)

    for pack in (pack_samples, pack_arrays):
        out = tmp_path / pack.__name__
        for former, classes in (([], ["a", "b"]), (["a", "b"], []), (["a", "b"], ["b", "a"])):
            pack(out, classes=former, overwrite=True)
            assert len(pack(out, classes=former, resume=True)) == 5
            with pytest.raises(UsageError, match=f"{FINISHED}class_names was "):
                pack(out, classes=classes, resume=True)


@pytest.mark.parametrize(
    ("field", "other"),
    [("x", {"seed": 3}), ("x", {"shuffle": False}), ("x", {"limit": 75}), ("y", {})],
)
def test_a_resume_with_other_options_equals_a_fresh_conversion_with_them(
    tmp_path: Path, field: str, other: dict[str, Any]
) -> None:
    """Where nothing says with which options the conversion began."""
    array, out = tmp_path / "x.npy", tmp_path / "out"
    np.save(array, ARRAY)
    with pytest.raises(EnoughError):
        wt.convert_arrays({"x": array}, out, progress=broken_off, **SHARDS)
    (out / ".unfinished" / "call.json").unlink()
    wt.convert_arrays({field: array}, out, resume=True, **SHARDS, **other)
    wt.convert_arrays({field: array}, tmp_path / "fresh", **SHARDS, **other)
    assert files_of(out) == files_of(tmp_path / "fresh")


def test_resume_without_earlier_output_converts(photos: Photos, tmp_path: Path) -> None:
    assert len(photos(resume=True)) == 40
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").touch()
    with pytest.raises(UsageError, match="holds 1 files and no conversion"):
        photos("notes", resume=True)


def test_a_read_only_disk_is_one_error_and_resume_continues(
    photos: Photos, small_disk: Path
) -> None:
    first = photos / "cat/000.jpg"
    intact = first.read_bytes()
    first.write_text(NO_PICTURE)
    with pytest.raises(SourceError):
        photos("disk/out", max_shard_samples=5)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    try:
        for option in ("resume", "overwrite"):
            with pytest.raises(StorageError, match="cannot be written: Read-only file system"):
                photos("disk/out", **{option: True})
    finally:
        subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    first.write_bytes(intact)
    assert len(photos("disk/out", max_shard_samples=5, resume=True)) == 40


# --- no silent loss ---


def skipped(out: Path) -> dict[str, str]:
    """Return {path: reason} of the samples that a conversion skipped."""
    lines = map(json.loads, (out / "skipped.jsonl").read_text().splitlines())
    return {row["path"]: row["reason"] for row in lines if row["source"] == "in"}


def test_bad_samples_are_skipped_counted_and_listed(photos: Photos, tmp_path: Path) -> None:
    (photos / "cat/zero.jpg").touch()
    (photos / "cat/text.jpg").write_text("<html>404</html>")
    (photos / "dog/half.jpg").write_bytes(picture(1, kind="JPEG")[:300])
    (photos / "dog/gone.jpg").symlink_to(tmp_path / "nowhere.jpg")
    with pytest.raises(SourceError, match="it has 0 bytes|it cannot be read"):
        photos()
    options: dict[str, Any] = {"on_error": "skip", "overwrite": True, "num_workers": 2}
    index = photos(check="decode", **options)
    assert (index.info["listed"], index.info["skipped"], len(index)) == (44, 4, 40)
    reasons = skipped(tmp_path / "out")
    assert set(reasons) == {"cat/zero.jpg", "cat/text.jpg", "dog/half.jpg", "dog/gone.jpg"}
    assert "does not begin as an image does" in reasons["cat/text.jpg"]
    assert "truncated" in reasons["dog/half.jpg"].lower()
    assert photos(**options).info["skipped"] == 3  # unless decoded, a truncated image is accepted


def test_a_video_or_heic_with_an_image_extension_is_bad(tmp_path: Path) -> None:
    def boxes(*brands: bytes) -> bytes:
        words = b"".join((brands[0], bytes(4), *brands[1:]))
        return (8 + len(words)).to_bytes(4, "big") + b"ftyp" + words + b"avifavif" * 60

    write_class_folder(tmp_path / "in", {"a": 1}, "jpg")
    good = {"1.avif": boxes(b"avif", b"mif1"), "2.avif": boxes(b"mif1", b"miaf", b"avif")}
    good["3.avif"] = boxes(b"avis")
    bad = {"clip.jpg": boxes(b"isom", b"isom", b"mp41"), "x.jpg": b"\0\0\0\x08ftyp"}
    bad["phone.jpg"] = boxes(b"heic", b"mif1", b"heic")
    for name, data in (good | bad).items():
        (tmp_path / "in" / "a" / name).write_bytes(data)
    index = wt.convert_folder(tmp_path / "in", tmp_path / "out", on_error="skip")
    assert set(skipped(tmp_path / "out")) == {f"a/{name}" for name in bad}
    assert len(index) == 1 + len(good)


def test_a_shard_of_only_bad_samples_leaves_no_empty_shard_and_no_gap(tmp_path: Path) -> None:
    write_class_folder(tmp_path / "in", {"a": 12}, "jpg")
    images, out = sorted((tmp_path / "in" / "a").iterdir()), tmp_path / "out"
    for image in images[4:8]:
        image.write_text(NO_PICTURE)
    options: dict[str, Any] = {"on_error": "skip", "shuffle": False, "max_shard_samples": 4}
    index = wt.convert_folder(tmp_path / "in", out, **options)
    names = [(shard.name, shard.samples) for shard in index.shards]
    assert names == [("train-000000.tar", 4), ("train-000001.tar", 4)]
    assert list(read_samples(out)) == [f"a/{number:03d}" for number in [0, 1, 2, 3, 8, 9, 10, 11]]
    assert wt.verify(out).ok
    for image in images[1:]:
        image.unlink()
    images[0].write_text(NO_PICTURE)
    with pytest.raises(SourceError, match="all of 1 samples were skipped: 1 x .* first: .*000.jpg"):
        wt.convert_folder(tmp_path / "in", tmp_path / "out2", on_error="skip")


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


# --- splits and bounds ---


def test_shares_of_grouped_splits_are_printed_and_stored(
    tables: Tables, capsys: pytest.CaptureFixture[str]
) -> None:
    """Groups of 1 to 16 rows, each mostly of one class."""
    rows = [
        (f"IMG/{i % 9}.png", f"sender{group}", "ab"[(group + (i % 5 == 0)) % 2])
        for group in range(48)
        for i in range(1 + group % 16)
    ]
    split = {"train": 0.7, "val": 0.2, "test": 0.1}
    text = "file,sender,kind\n" + "\n".join(map(",".join, rows))
    words = ["--label", "kind", "--group-by", "sender", "--split", "train=0.7,val=0.2,test=0.1"]
    assert tables.command(text, *words) == 0
    output = capsys.readouterr().out
    assert "% (70.0% asked)" in output
    assert "% (20.0% asked)" in output
    index = wt.open(tables.out)
    table = index.to_pandas()
    table["split"] = [name.partition("-")[0] for name in table["shard"]]
    assert table.groupby("sender")["split"].nunique().max() == 1
    for _, some in [("", table), *table.groupby("kind", observed=True)]:
        shares = some["split"].value_counts(normalize=True)
        assert shares.to_dict() == pytest.approx(split, abs=0.01)
    info = index.info["split"]
    assert (info["group_by"], info["seed"], info["shares"]) == ("sender", 0, split)
    assert info["got"] == pytest.approx(table["split"].value_counts(normalize=True).to_dict())


def test_max_shard_size_bounds_the_file(tmp_path: Path) -> None:
    samples = ({"__key__": f"k{i}", "bin": bytes(100 * i)} for i in range(200))
    index = wt.pack(samples, tmp_path / "out", max_shard_size=50_000)
    assert all(Path(shard.path).stat().st_size <= 50_000 for shard in index.shards)
    assert len(index.shards) < 2 * sum(100 * i + 1024 for i in range(200)) / 50_000
    rows = iter([{"bin": bytes(9000)}, {"txt": "small"}])
    packed = wt.pack(rows, tmp_path / "large", max_shard_size=5000)
    assert sorted(shard.samples for shard in packed.shards) == [1, 1]


def test_conversions_leave_no_descriptors_and_threads(photos: Photos, tmp_path: Path) -> None:
    counts = []
    for number in range(3):
        photos(str(number), num_workers=2, max_shard_samples=5)
        wt.pack([{"txt": "x"}] * 50, tmp_path / f"s{number}")
        counts.append(len(os.listdir("/proc/self/fd")))
    assert max(counts) == counts[0]


# --- folders that hold something ---


def test_a_foreign_index_is_neither_resumed_nor_replaced(photos: Photos, tmp_path: Path) -> None:
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


def test_foreign_shards_are_not_mixed_with_new_ones(photos: Photos, tmp_path: Path) -> None:
    write_shards(tmp_path / "out", [2, 2, 2])
    for number, path in enumerate(sorted((tmp_path / "out").iterdir())):
        path.rename(path.with_name(f"train-00000{number}.tar"))
    before = photos.files()
    with pytest.raises(UsageError, match="holds train-000000.tar, which no index lists"):
        photos(overwrite=True)
    assert photos.files() == before


def test_tars_beside_a_staging_directory_and_without_an_index_are_no_set(
    photos: Photos, tmp_path: Path
) -> None:
    """State after two power cuts: in a swap, and while another conversion takes its place."""
    photos(max_shard_samples=10)
    (tmp_path / "out" / "index.json").unlink()
    (tmp_path / "out" / ".unfinished").mkdir()
    for urls in (tmp_path / "out", f"{tmp_path}/out/*.tar"):
        with pytest.raises(ShardError, match="was not finished"):
            wt.Loader(urls)


_INTERRUPTED = """
import os, signal, sys, wdstrain as wt
os.chdir(sys.argv[1])
from wdstrain.conversion import shard_pool as jobs
shut = jobs.ProcessPoolExecutor.shutdown
def shutdown(self, **options):
    os.kill(os.getpid(), signal.SIGINT)
    shut(self, **options)
jobs.ProcessPoolExecutor.shutdown = shutdown
wt.convert_folder('in', 'out', max_shard_samples=40, resize=16, num_workers=2, resume=True)
"""


def test_an_interrupt_at_the_end_is_reported_and_resumed(tmp_path: Path) -> None:
    """SIGINT while the processes of a conversion end."""
    write_class_folder(tmp_path / "in", {"a": 300}, "jpg")
    options: dict[str, Any] = {"max_shard_samples": 40, "resize": 16}
    done = ended(_INTERRUPTED, tmp_path)
    assert done.status != 0
    assert "KeyboardInterrupt" in done.err
    assert "Exception ignored" not in done.err
    wt.convert_folder(tmp_path / "in", tmp_path / "out", resume=True, **options)
    wt.convert_folder(tmp_path / "in", tmp_path / "whole", **options)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


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


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"split": {"train": 0.5, "train-clean": 0.5}}, "'train' and 'train-clean' cannot be told"),
        ({"split": {"a": 0.5, "b": 0.5}, "stratify": "label"}, "no classes to stratify by"),
        *(
            ({"split": {name: 0.5, "b": 0.5}}, "cannot be the name of a split")
            for name in ("t.x", "a/b", "a b", "-a", ".a", "", "a\n", "a*")
        ),
    ],
)
def test_splits_that_cannot_be_are_refused(
    options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=words):
        wt.pack([{"txt": "x"}] * 40, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_the_command_accepts_the_split_names_of_python(photos: Photos, capsys: Any) -> None:
    words = ["convert", "folder", str(photos.root), str(photos.folder / "out"), "--split"]
    assert main([*words, "t.x=0.5,b=0.5"]) == 2
    assert "'t.x' cannot be the name of a split" in capsys.readouterr().err
    assert main([*words, "train-clean=0.5,2024=0.5"]) == 0
    assert {"train-clean-000000.tar", "2024-000000.tar"} <= set(photos.files())
