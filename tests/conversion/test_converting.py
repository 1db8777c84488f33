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
from tests.support.tables import read_samples
from wdstrain.cli import main
from wdstrain.conversion.options import Options
from wdstrain.conversion.runner import Step, convert
from wdstrain.conversion.sources.folder import list_folder
from wdstrain.errors import ShardError, SourceError, StorageError, UsageError
from wdstrain.runtime.machine import cores


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return write_class_folder(tmp_path / "in", {"cat": 11, "dog": 24, "eel": 5}, "jpg")


# --- the same bytes ---


@pytest.mark.parametrize("options", [{"resize": 16}, {"shuffle": False, "quality": 50}])
def test_any_number_of_workers_and_any_memory_writes_the_same_bytes(
    photos: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    outputs = []
    for jobs, memory in ((1, 1 << 30), (2, 1 << 30), (3, 16_000_000)):
        out = tmp_path / f"out{jobs}"
        wt.convert_folder(
            photos, out, num_workers=jobs, memory=memory, max_shard_samples=6, **options
        )
        outputs.append(files_of(out))
    assert outputs[0] == outputs[1] == outputs[2]


def test_a_moved_source_gives_the_same_bytes(photos: Path, tmp_path: Path) -> None:
    (photos / "cat" / "zero.jpg").touch()
    (photos / "cat" / "a.b.jpg").write_bytes(picture(3, kind="JPEG"))
    shutil.copytree(photos, tmp_path / "deep" / "down" / "in")
    for number, source in enumerate((photos, tmp_path / "deep" / "down" / "in")):
        wt.convert_folder(source, tmp_path / f"out{number}", on_error="skip")
    assert files_of(tmp_path / "out0") == files_of(tmp_path / "out1")
    assert set(files_of(tmp_path / "out0")) >= {"skipped.jsonl", "renamed.jsonl"}


def test_a_stream_and_a_list_of_the_same_samples_give_the_same_bytes(
    photos: Path, tmp_path: Path
) -> None:
    """The external shuffle orders as the shuffle of a list does."""
    index = wt.convert_folder(photos, tmp_path / "list", max_shard_samples=7)
    samples = [
        {
            "__key__": f"{path.parent.name}/{path.stem}",
            "jpg": path.read_bytes(),
            "cls": ["cat", "dog", "eel"].index(path.parent.name),
        }
        for path in sorted(photos.rglob("*.jpg"))
    ]
    wt.pack(iter(samples), tmp_path / "stream", max_shard_samples=7, classes=["cat", "dog", "eel"])
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
    names = [f"k{n}" for n in range(60)]
    assert list(read_samples(tmp_path / "direct")) == names


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
        done = subprocess.run(
            [sys.executable, "-c", _STREAM, str(count), str(tmp_path / str(count))],
            capture_output=True,
            text=True,
        )
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


def test_a_conversion_does_not_affect_other_child_processes(photos: Path, tmp_path: Path) -> None:
    """A running child is not waited for, and a failed one does not end the conversion."""
    context = multiprocessing.get_context("fork")
    ended = context.Event()
    children = [context.Process(target=ended.wait), context.Process(target=os._exit, args=(7,))]

    def begin(step: Step) -> None:
        if children[0].pid is None:
            for child in children:
                child.start()
            children[1].join()

    options: dict[str, Any] = {"max_shard_samples": 1, "num_workers": 2, "progress": begin}
    assert len(wt.convert_folder(photos, tmp_path / "out", **options)) == 40
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
    ("kind", "where"), [("tars", "/in/"), ("arrays", "/spill/"), ("folder", "/in/")]
)
def test_a_read_error_of_the_source_names_the_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, where: str
) -> None:
    """The error must not suggest to free disk space, as a write error does."""
    write_shards(tmp_path / "in", [20])
    write_class_folder(tmp_path / "in", {"a": 3})

    def failing(read: Callable[..., Any]) -> Callable[..., Any]:
        def fail(fd: int, *words: Any) -> Any:
            if where in os.readlink(f"/proc/self/fd/{fd}"):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return read(fd, *words)

        return fail

    for name in ("read", "pread", "preadv"):
        monkeypatch.setattr(os, name, failing(getattr(os, name)))
    pack: dict[str, Callable[[str], Any]] = {
        "tars": lambda out: wt.convert_tars(tmp_path / "in", out),
        "arrays": lambda out: wt.convert_arrays({"x": np.arange(50)}, out),
        "folder": lambda out: wt.convert_folder(tmp_path / "in", out),
    }
    with pytest.raises(
        (StorageError, SourceError), match=rf"{where}.* cannot be read.*Input/output error"
    ):
        pack[kind](str(tmp_path / "out"))


# --- killed and resumed ---


def test_resume_rewrites_shards_of_changed_input(photos: Path, tmp_path: Path) -> None:
    """Files changed since the interruption are packed again, and the other shards are kept."""
    out, options = tmp_path / "out", {"max_shard_samples": 4, "shuffle": False}
    (photos / "eel" / "039.jpg").write_text("no picture")
    with pytest.raises(SourceError, match="039.jpg: its jpg does not begin as an image does"):
        convert(list_folder(str(photos)), str(out), Options(**options))  # type: ignore[arg-type]
    (photos / "eel" / "039.jpg").write_bytes(picture(999, kind="JPEG"))
    (photos / "cat" / "000.jpg").write_bytes(picture(555, size=(40, 40), kind="JPEG"))
    equal_size = bytearray((photos / "dog" / "016.jpg").read_bytes())
    equal_size[60] ^= 1
    (photos / "dog" / "016.jpg").write_bytes(equal_size)
    options["resume"] = True
    done = convert(list_folder(str(photos)), str(out), Options(**options))  # type: ignore[arg-type]
    assert (done.kept, len(done.index.shards)) == (7, 10)
    wt.convert_folder(photos, tmp_path / "whole", max_shard_samples=4, shuffle=False)
    assert files_of(out) == files_of(tmp_path / "whole")


def test_a_changed_mask_older_than_its_image_is_packed_again(photos: Path, tmp_path: Path) -> None:
    """The new mask has as many bytes as the old one, and both are older than the image."""
    old, new = images_with_equal_crc32()
    out, masks = tmp_path / "out", tmp_path / "masks"
    for image in photos.glob("*/*.jpg"):
        image.write_bytes(picture(1, size=(8, 8), kind="JPEG"))
        mask = masks / image.parent.name / f"{image.stem}.png"
        mask.parent.mkdir(parents=True, exist_ok=True)
        mask.write_bytes(old)
        os.utime(mask, (1, 1))
    (photos / "eel" / "039.jpg").write_text("no picture")

    def pack(**options: Any) -> wt.Index:
        return wt.convert_folder(
            photos, out, masks=masks, max_shard_samples=4, shuffle=False, **options
        )

    with pytest.raises(SourceError, match="039.jpg"):
        pack()
    (photos / "eel" / "039.jpg").write_bytes(picture(999, size=(8, 8), kind="JPEG"))
    changed = masks / "cat" / "000.png"
    changed.write_bytes(new)
    os.utime(changed, (2, 2))
    assert pack(resume=True)["cat/000"]["mask.png"] == new


class EnoughError(Exception):
    """Raised to end a conversion from within."""


def broken_off(step: Step) -> None:
    if step.title == "packing" and step.done > 200:
        raise EnoughError


def test_resume_refuses_other_options(tmp_path: Path) -> None:
    array, out = np.arange(4000).reshape(400, 10), tmp_path / "out"
    options: dict[str, Any] = {"max_shard_samples": 40}
    with pytest.raises(EnoughError):
        wt.convert_arrays({"x": array}, out, progress=broken_off, **options)
    options["resume"] = True
    begin = "an unfinished conversion of another source or with other options: "
    changes: list[tuple[str, dict[str, Any], str]] = [
        ("x", {"seed": 3}, "seed was 0, is 3"),
        ("x", {"shuffle": False, "limit": 9}, "shuffle was True, is False; limit was None, is 9"),
        ("y", {}, "fields was ['x'], is ['y']"),
    ]
    for field, other, message in changes:
        with pytest.raises(UsageError, match=re.escape(f"{begin}{message}.")):
            wt.convert_arrays({field: array}, out, **options, **other)
    assert len(wt.convert_arrays({"x": array}, out, on_error="skip", **options)) == 400


@pytest.mark.parametrize(
    ("field", "other"),
    [("x", {"seed": 3}), ("x", {"shuffle": False}), ("x", {"limit": 300}), ("y", {})],
)
def test_a_resume_with_other_options_equals_a_fresh_conversion_with_them(
    tmp_path: Path, field: str, other: dict[str, Any]
) -> None:
    """Where nothing says with which options the conversion began."""
    array, out = tmp_path / "x.npy", tmp_path / "out"
    np.save(array, np.arange(4000).reshape(400, 10))
    options: dict[str, Any] = {"max_shard_samples": 40, **other}
    with pytest.raises(EnoughError):
        wt.convert_arrays({"x": array}, out, max_shard_samples=40, progress=broken_off)
    (out / ".unfinished" / "call.json").unlink()
    wt.convert_arrays({field: array}, out, resume=True, **options)
    wt.convert_arrays({field: array}, tmp_path / "fresh", **options)
    assert files_of(out) == files_of(tmp_path / "fresh")


def test_resume_without_earlier_output_converts(photos: Path, tmp_path: Path) -> None:
    assert len(wt.convert_folder(photos, tmp_path / "out", resume=True)) == 40
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").touch()
    with pytest.raises(UsageError, match="holds 1 files and no conversion"):
        wt.convert_folder(photos, tmp_path / "notes", resume=True)


def test_a_read_only_disk_is_one_error_and_resume_continues(photos: Path, small_disk: Path) -> None:
    out = small_disk / "out"
    (photos / "cat" / "000.jpg").rename(photos.parent / "away.jpg")
    (photos / "cat" / "000.jpg").write_text("no picture")
    with pytest.raises(SourceError):
        wt.convert_folder(photos, out, max_shard_samples=5)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    try:
        for options in ({"resume": True}, {"overwrite": True}):
            with pytest.raises(StorageError, match="cannot be written: Read-only file system"):
                wt.convert_folder(photos, out, **options)  # type: ignore[arg-type]
    finally:
        subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    (photos.parent / "away.jpg").replace(photos / "cat" / "000.jpg")
    assert len(wt.convert_folder(photos, out, max_shard_samples=5, resume=True)) == 40


# --- no silent loss ---


def test_bad_samples_are_skipped_counted_and_listed(photos: Path, tmp_path: Path) -> None:
    (photos / "cat" / "zero.jpg").touch()
    (photos / "cat" / "text.jpg").write_text("<html>404</html>")
    (photos / "dog" / "half.jpg").write_bytes(picture(1, kind="JPEG")[:300])
    (photos / "dog" / "gone.jpg").symlink_to(tmp_path / "nowhere.jpg")
    out = tmp_path / "out"
    with pytest.raises(SourceError, match="it has 0 bytes|it cannot be read"):
        wt.convert_folder(photos, out)
    options: dict[str, Any] = {"on_error": "skip", "overwrite": True, "num_workers": 2}
    index = wt.convert_folder(photos, out, check="decode", **options)
    assert (index.info["listed"], index.info["skipped"], len(index)) == (44, 4, 40)
    rows = skipped(out)
    reasons = {row["path"]: row["reason"] for row in rows}
    assert set(reasons) == {"cat/zero.jpg", "cat/text.jpg", "dog/half.jpg", "dog/gone.jpg"}
    assert "does not begin as an image does" in reasons["cat/text.jpg"]
    assert "truncated" in reasons["dog/half.jpg"].lower()
    assert {row["source"] for row in rows} == {"in"}
    unchecked = wt.convert_folder(photos, out, **options)
    assert unchecked.info["skipped"] == 3  # unless decoded, a truncated image is accepted


def skipped(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "skipped.jsonl").read_text().splitlines()]


def test_a_video_or_heic_with_an_image_extension_is_bad(tmp_path: Path) -> None:
    def boxes(*brands: bytes) -> bytes:
        words = b"".join((brands[0], bytes(4), *brands[1:]))
        return (8 + len(words)).to_bytes(4, "big") + b"ftyp" + words + b"avifavif" * 60

    write_class_folder(tmp_path / "in", {"a": 1}, "jpg")
    good = {
        "1.avif": boxes(b"avif", b"mif1"),
        "2.avif": boxes(b"mif1", b"miaf", b"avif"),
        "3.avif": boxes(b"avis"),
    }
    bad = {
        "clip.jpg": boxes(b"isom", b"isom", b"mp41"),
        "phone.jpg": boxes(b"heic", b"mif1", b"heic"),
        "x.jpg": b"\0\0\0\x08ftyp",
    }
    for name, data in (good | bad).items():
        (tmp_path / "in" / "a" / name).write_bytes(data)
    index = wt.convert_folder(tmp_path / "in", tmp_path / "out", on_error="skip")
    assert {row["path"] for row in skipped(tmp_path / "out")} == {f"a/{name}" for name in bad}
    assert len(index) == 1 + len(good)


def test_a_shard_of_only_bad_samples_leaves_no_empty_shard_and_no_gap(tmp_path: Path) -> None:
    write_class_folder(tmp_path / "in", {"a": 12}, "jpg")
    images, out = sorted((tmp_path / "in" / "a").iterdir()), tmp_path / "out"
    for image in images[4:8]:
        image.write_text("no picture")
    options: dict[str, Any] = {"on_error": "skip", "shuffle": False, "max_shard_samples": 4}
    index = wt.convert_folder(tmp_path / "in", out, **options)
    names = [(shard.name, shard.samples) for shard in index.shards]
    assert names == [("train-000000.tar", 4), ("train-000001.tar", 4)]
    assert list(read_samples(out)) == [f"a/{number:03d}" for number in [0, 1, 2, 3, 8, 9, 10, 11]]
    assert wt.verify(out).ok
    for image in images[1:]:
        image.unlink()
    images[0].write_text("no picture")
    with pytest.raises(SourceError, match="all of 1 samples were skipped: 1 x .* first: .*000.jpg"):
        wt.convert_folder(tmp_path / "in", tmp_path / "out2", on_error="skip")


def test_a_sample_that_is_replaced_by_one_of_its_size_is_bad(photos: Path, tmp_path: Path) -> None:
    path = photos / "cat" / "003.jpg"

    def replace() -> None:
        path.write_bytes(path.read_bytes()[::-1])
        os.utime(path, (1, 1))

    with watched_calls("open", r"/cat/003\.jpg", replace):
        wt.convert_folder(photos, tmp_path / "out", on_error="skip", num_workers=1)
    assert [bad["reason"] for bad in skipped(tmp_path / "out")] == [
        "it was changed since it was listed"
    ]


def test_a_sample_that_changes_while_it_is_packed_is_bad(photos: Path, tmp_path: Path) -> None:
    """The file grows between the listing, which records its size, and the copy."""
    path = photos / "cat" / "003.jpg"

    def grow() -> None:
        path.write_bytes(picture(3, size=(99, 99), kind="JPEG"))

    with watched_calls("open", r"/cat/003\.jpg", grow):
        index = wt.convert_folder(photos, tmp_path / "out", on_error="skip", num_workers=1)
    assert len(index) == 39
    [bad] = skipped(tmp_path / "out")
    assert re.search(r"it had \d+ bytes when it was listed and has \d+ now", bad["reason"])


# --- splits ---


def test_groups_are_not_divided_and_splits_have_their_shares(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Groups of 1 to 16 rows, each mostly of one class."""
    rows = [
        (f"IMG/{i % 9}.png", f"sender{group}", "ab"[(group + (i % 5 == 0)) % 2])
        for group in range(48)
        for i in range(1 + group % 16)
    ]
    (tmp_path / "IMG").mkdir()
    for i in range(9):
        (tmp_path / "IMG" / f"{i}.png").write_bytes(picture(i))
    file, split = tmp_path / "t.csv", {"train": 0.7, "val": 0.2, "test": 0.1}
    file.write_text("file,sender,kind\n" + "\n".join(map(",".join, rows)))
    words = ["convert", "table", str(file), str(tmp_path / "out"), "--image", "file"]
    words += ["--label", "kind", "--group-by", "sender", "--split", "train=0.7,val=0.2,test=0.1"]
    assert main(words) == 0
    output = capsys.readouterr().out
    assert "% (70.0% asked)" in output
    assert "% (20.0% asked)" in output
    index = wt.open(tmp_path / "out")
    table = index.to_pandas()
    table["split"] = [name.partition("-")[0] for name in table["shard"]]
    assert table.groupby("sender")["split"].nunique().max() == 1
    for _, some in [("", table), *table.groupby("kind", observed=True)]:
        shares = some["split"].value_counts(normalize=True)
        assert shares.to_dict() == pytest.approx(split, abs=0.01)
    info = index.info["split"]
    assert (info["group_by"], info["seed"], info["shares"]) == ("sender", 0, split)
    assert info["got"] == pytest.approx(table["split"].value_counts(normalize=True).to_dict())


# --- bounds ---


def test_max_shard_size_bounds_the_file(tmp_path: Path) -> None:
    samples = ({"__key__": f"k{i}", "bin": bytes(100 * i)} for i in range(200))
    index = wt.pack(samples, tmp_path / "out", max_shard_size=50_000)
    assert all(Path(shard.path).stat().st_size <= 50_000 for shard in index.shards)
    assert len(index.shards) < 2 * sum(100 * i + 1024 for i in range(200)) / 50_000
    packed_index = wt.pack(
        [{"bin": bytes(9000)}, {"txt": "small"}], tmp_path / "large", max_shard_size=5000
    )
    assert sorted(shard.samples for shard in packed_index.shards) == [1, 1]


def test_conversions_leave_no_descriptors_and_threads(photos: Path, tmp_path: Path) -> None:
    before = None
    for number in range(4):
        wt.convert_folder(photos, tmp_path / str(number), num_workers=2, max_shard_samples=5)
        wt.pack([{"txt": "x"}] * 50, tmp_path / f"s{number}")
        now = len(os.listdir("/proc/self/fd"))
        before = before or now
        assert now <= before


# --- edge cases ---


def test_resume_refuses_a_finished_set_of_another_source_or_options(
    photos: Path, tmp_path: Path
) -> None:
    out = str(tmp_path / "out")
    wt.convert_folder(photos, out)
    for options, message in (
        ({"seed": 4}, "seed was 0, is 4"),
        ({"resize": 50}, "resize was None, is 50"),
        ({"limit": 7}, "limit was None, is 7"),
    ):
        with pytest.raises(
            UsageError,
            match=f"a finished conversion of another source or with other options: {message}",
        ):
            wt.convert_folder(photos, out, resume=True, **options)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="a finished conversion of another source"):
        wt.pack([{"txt": "x"}], out, resume=True)
    (tmp_path / "out" / "train-000000.tar").unlink()
    with pytest.raises(ShardError, match="cannot be found"):
        wt.convert_folder(photos, out, resume=True)


def test_resume_refuses_other_classes_even_of_an_unlabeled_set(tmp_path: Path) -> None:
    rows = {"x": np.zeros((5, 2), np.float32)}
    packs: dict[str, Callable[..., Any]] = {
        "samples": lambda out, **options: wt.pack(
            ({"__key__": f"k{n}", "txt": "x"} for n in range(5)), out, **options
        ),
        "arrays": lambda out, **options: wt.convert_arrays(rows, out, **options),
    }
    for name, pack in packs.items():
        for former, classes in (([], ["a", "b"]), (["a", "b"], []), (["a", "b"], ["b", "a"])):
            pack(tmp_path / name, classes=former, overwrite=True)
            assert len(pack(tmp_path / name, classes=former, resume=True)) == 5
            with pytest.raises(
                UsageError,
                match="a finished conversion of another source or with other options: class_names was ",
            ):
                pack(tmp_path / name, classes=classes, resume=True)


def test_a_foreign_index_is_neither_resumed_nor_replaced(photos: Path, tmp_path: Path) -> None:
    for name, text in (("foreign", '{"shardlist": []}'), ("other", '{"x": 1}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "index.json").write_text(text)
        with pytest.raises((UsageError, ShardError)):
            wt.convert_folder(photos, tmp_path / name, resume=True)
        with pytest.raises(UsageError, match="no index of this package and would be replaced"):
            wt.convert_folder(photos, tmp_path / name, overwrite=True)
        assert (tmp_path / name / "index.json").read_text() == text
    write_shards(tmp_path / "walked", [3])
    wt.index(tmp_path / "walked")
    with pytest.raises(UsageError, match="no conversion"):
        wt.convert_folder(photos, tmp_path / "walked", resume=True)


def test_foreign_shards_are_not_mixed_with_new_ones(photos: Path, tmp_path: Path) -> None:
    for number in range(3):
        write_shards(tmp_path / f"s{number}", [2])
        (tmp_path / "out").mkdir(exist_ok=True)
        (tmp_path / f"s{number}" / "part-000.tar").rename(
            tmp_path / "out" / f"train-00000{number}.tar"
        )
    with pytest.raises(UsageError, match="holds train-000000.tar, which no index lists"):
        wt.convert_folder(photos, tmp_path / "out", overwrite=True)
    assert sorted(files_of(tmp_path / "out")) == [
        "train-000000.tar",
        "train-000001.tar",
        "train-000002.tar",
    ]


def test_tars_beside_a_staging_directory_and_without_an_index_are_no_set(
    photos: Path, tmp_path: Path
) -> None:
    """State after two power cuts: in a swap, and while another conversion takes its place."""
    out = tmp_path / "out"
    wt.convert_folder(photos, out, max_shard_samples=10)
    (out / "index.json").unlink()
    (out / ".unfinished").mkdir()
    for urls in (str(out), f"{out}/*.tar"):
        with pytest.raises(ShardError, match="was not finished"):
            wt.Loader(urls)


def test_an_interrupt_at_any_moment_is_reported_or_too_late(tmp_path: Path) -> None:
    """SIGINT at many moments of a short conversion: it completes, or --resume finishes it."""
    write_class_folder(tmp_path / "in", {"a": 300}, "jpg")
    wt.convert_folder(tmp_path / "in", tmp_path / "whole", max_shard_samples=40, resize=16)
    code = (
        "import os, signal, sys, wdstrain as wt\n"
        "from wdstrain.conversion import shard_pool as jobs\n"
        "def interrupt(*_): os.kill(os.getpid(), signal.SIGINT)\n"
        "shut = jobs.ProcessPoolExecutor.shutdown\n"
        "def shutdown(self, **options):\n"
        "    interrupt() if len(sys.argv) > 2 else None\n"
        "    shut(self, **options)\n"
        "jobs.ProcessPoolExecutor.shutdown = shutdown\n"
        "wt.convert_folder('in', sys.argv[1], max_shard_samples=40, resize=16, num_workers=2, resume=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "out", "x"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "KeyboardInterrupt" in done.stderr
    assert "Exception ignored" not in done.stderr
    wt.convert_folder(
        tmp_path / "in", tmp_path / "out", max_shard_samples=40, resize=16, resume=True
    )
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


def test_shards_are_not_converted_into_their_own_folder(tmp_path: Path, capsys: Any) -> None:
    folder = tmp_path / "set"
    rows = [{"__key__": f"k{n:02d}", "txt": f"t{n}"} for n in range(40)]
    wt.pack(rows, folder, split={"train": 0.5, "val": 0.5}, max_shard_samples=10)
    before = files_of(folder)
    refusal = r"holds (train|val)-000000\.tar, which is being converted"
    for options in ({"overwrite": True}, {"append": True}, {"resume": True}, {"dry_run": True}):
        with pytest.raises(UsageError, match=refusal):
            wt.convert_tars(folder / "train-*.tar", folder, **options)  # type: ignore[arg-type]
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


def test_the_command_accepts_the_split_names_of_python(
    photos: Path, tmp_path: Path, capsys: Any
) -> None:
    words = ["convert", "folder", str(photos), str(tmp_path / "out"), "--split"]
    assert main([*words, "t.x=0.5,b=0.5"]) == 2
    assert "'t.x' cannot be the name of a split" in capsys.readouterr().err
    assert main([*words, "train-clean=0.5,2024=0.5"]) == 0
    names = {path.name for path in (tmp_path / "out").glob("*.tar")}
    assert names == {"train-clean-000000.tar", "2024-000000.tar"}
