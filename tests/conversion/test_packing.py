"""Conversion keeps file bytes, is reproducible, and is atomic on failure."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import wdstrain as wt
from tests.conftest import files_of, picture, write_class_folder
from tests.support.os_faults import small_files, watched_calls
from tests.support.tables import read_samples
from wdstrain.conversion.listing import Keys
from wdstrain.conversion.options import Options
from wdstrain.errors import ShardError, SourceError, StorageError, UsageError


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return write_class_folder(tmp_path / "photos", {"dog": 13, "cat": 9})


def test_samples_are_shuffled_by_default_and_in_source_order_with_no_shuffle(
    photos: Path, tmp_path: Path
) -> None:
    def keys(**options: Any) -> list[str]:
        index = wt.convert_folder(photos, tmp_path / "out", overwrite=True, **options)
        return [index.key(i) for i in range(len(index))]

    listed = sorted(f"{path.parent.name}/{path.stem}" for path in photos.rglob("*.png"))
    assert keys(shuffle=False) == listed
    assert keys() == keys() != listed
    assert keys(seed=1) != keys()
    assert sorted(keys()) == listed


def test_overhead_per_image_and_label_is_at_most_2500_bytes(photos: Path, tmp_path: Path) -> None:
    index = wt.convert_folder(photos, tmp_path / "out")
    payload = sum(path.stat().st_size for path in photos.rglob("*.png"))
    assert (index.shards[0].bytes - payload) / len(index) <= 2500


def test_split_folders_are_kept(tmp_path: Path) -> None:
    write_class_folder(tmp_path / "in" / "train", {"a": 3, "b": 4})
    write_class_folder(tmp_path / "in" / "val", {"a": 2})
    (tmp_path / "in" / "annotations").mkdir()
    index = wt.convert_folder(tmp_path / "in", tmp_path / "out")
    shards = [(shard.name, shard.samples) for shard in index.shards]
    assert shards == [("train-000000.tar", 7), ("val-000000.tar", 2)]
    assert index.labels[0].classes == ("a", "b")
    assert index.info["ignored"] == {"folders beside the splits": 1}
    with pytest.raises(UsageError, match="own splits already"):
        wt.convert_folder(tmp_path / "in", tmp_path / "again", split={"x": 0.5, "y": 0.5})


def test_names_with_dots_and_equal_names_get_distinct_keys(tmp_path: Path) -> None:
    folder = tmp_path / "in" / "a"
    folder.mkdir(parents=True)
    for name in ("x.v1.png", "x.v2.png", "x_v2.png", "y.png", "y.jpg", "grüße.PNG"):
        (folder / name).write_bytes(picture(len(name)))
    wt.convert_folder(tmp_path / "in", tmp_path / "out")
    by_key = read_samples(tmp_path / "out")
    assert set(by_key) == {"a/grüße", "a/x_v1", "a/x_v2", "a/x_v2-2", "a/y", "a/y-2"}
    assert by_key["a/grüße"]["png"] == picture(len("grüße.PNG"))


def test_keys_never_escape_their_folder() -> None:
    keys, paths = Keys(), ("../../etc/x", "/etc/x", "D:/a/x", "./a/x", "", "__x__")
    assert [keys.key(path) for path in paths] == ["etc/x", "etc/x-2", "a/x", "a/x-2", "_", "__x__"]


def test_skipped_files_and_folders_are_counted_and_links_followed(
    photos: Path, tmp_path: Path
) -> None:
    for name in (".DS_Store", "._001.png", "notes.TXT"):
        (photos / "cat" / name).write_bytes(b"x")
    (photos / "lonely.png").write_bytes(picture(1))
    write_class_folder(tmp_path / "elsewhere", {"x": 3})
    (photos / "bird").symlink_to(tmp_path / "elsewhere" / "x")
    (photos / "empty").mkdir()
    (photos / "__MACOSX").mkdir()
    index = wt.convert_folder(photos, tmp_path / "out")
    assert index.labels[0].classes == ("bird", "cat", "dog")
    assert len(index) == 25
    assert index.info["ignored"] == {
        "hidden or system files": 3,
        "*.txt": 1,
        "images outside a class folder": 1,
        "folders without images": 1,
    }


# --- bad input ---


@pytest.mark.parametrize(
    ("make", "options", "error", "words"),
    [
        (lambda path: path / "absent", {}, UsageError, "there is no such folder"),
        (lambda path: path, {}, SourceError, "holds no images .found: nothing"),
        (
            lambda path: write_class_folder(path / "x", {"a": 2}) / "a",
            {},
            SourceError,
            "holds 2 images and no class folders.*flat=True",
        ),
        (lambda path: (path / "c").mkdir() or path, {}, SourceError, "holds no images .found: not"),
        (
            lambda path: write_class_folder(path / "x", {"a": 2}),
            {"split": {"train": 0.99, "val": 0.01}, "limit": 1},
            UsageError,
            "the split 'val' gets none of 1 samples",
        ),
    ],
)
def test_an_unusable_folder_is_refused(
    tmp_path: Path,
    make: Callable[[Path], Path],
    options: dict[str, Any],
    error: type[Exception],
    words: str,
) -> None:
    (tmp_path / "in").mkdir()
    with pytest.raises(error, match=words):
        wt.convert_folder(make(tmp_path / "in"), tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_an_empty_image_is_refused_before_any_write(photos: Path, tmp_path: Path) -> None:
    (photos / "cat" / "000.png").write_bytes(b"")
    (photos / "cat" / "zero.png").write_bytes(b"")
    with pytest.raises(SourceError, match="000.png: it has 0 bytes.*on_error=.skip"):
        wt.convert_folder(photos, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_shards_are_not_written_into_their_source(photos: Path) -> None:
    with pytest.raises(UsageError, match="which is being converted"):
        wt.convert_folder(photos, photos / "shards")
    assert not (photos / "shards").exists()


def test_an_output_that_is_a_file_is_refused(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("x")
    with pytest.raises(
        StorageError, match="out cannot be written: Not a directory. Choose another"
    ):
        wt.convert_folder(photos, tmp_path / "out")
    assert os.path.getsize(tmp_path / "out") == 1


# --- an output that exists, and failures ---


def test_overwriting_is_asked_for_and_replaces_only_shards(photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    wt.convert_folder(photos, out, max_shard_samples=11)
    before = files_of(out)
    with pytest.raises(UsageError, match="holds 4 files.*overwrite=True"):
        wt.convert_folder(photos, out, seed=1)
    assert files_of(out) == before
    (out / "notes.txt").write_text("mine")
    index = wt.convert_folder(photos, out, overwrite=True)
    assert set(files_of(out)) == {"index.arrow", "index.json", "notes.txt", "train-000000.tar"}
    assert len(wt.open(out)) == len(index) == 22


def test_a_failed_overwrite_leaves_the_old_set_intact(photos: Path, tmp_path: Path) -> None:
    out, image = tmp_path / "out", photos / "dog" / "010.png"
    wt.convert_folder(photos, out)
    (out / "backup-202401.tar").write_text("mine")
    before = files_of(out)
    with (
        watched_calls("open", r"dog/010\.png", lambda: image.unlink(missing_ok=True)),
        pytest.raises(SourceError),
    ):
        wt.convert_folder(photos, out, overwrite=True, max_shard_samples=2, num_workers=1)
    assert files_of(out) == before
    assert wt.verify(out / "index.json").samples == 22
    wt.convert_folder(photos, out, overwrite=True)
    assert (out / "backup-202401.tar").read_text() == "mine"


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_conversion_resumes_when_a_removed_source_is_back(
    photos: Path, tmp_path: Path, jobs: int
) -> None:
    out, away = tmp_path / "out", tmp_path / "away"
    options: dict[str, Any] = {"max_shard_samples": 1, "num_workers": jobs, "shuffle": False}
    wt.convert_folder(photos, tmp_path / "whole", **options)

    def removed(step: object) -> None:
        if photos.exists():
            photos.rename(away)

    with pytest.raises(SourceError, match="cannot be read .No such file.*on_error=.skip"):
        wt.convert_folder(photos, out, progress=removed, **options)
    with pytest.raises(ShardError, match="was not finished.*resume=True"):
        wt.open(out)
    finished = {path.stat().st_ino for path in out.rglob("*.tar")}
    away.rename(photos)
    wt.convert_folder(photos, out, resume=True, **options)
    assert 0 < len(finished) < 22
    assert finished <= {path.stat().st_ino for path in out.glob("*.tar")}
    assert files_of(out) == files_of(tmp_path / "whole")


@pytest.mark.parametrize("kind", ["folder", "stream"])
def test_a_full_disk_is_one_error_and_the_conversion_can_resume(
    photos: Path, tmp_path: Path, kind: str
) -> None:
    def convert_photos(out: str, **options: Any) -> wt.Index:
        if kind == "folder":
            return wt.convert_folder(photos, tmp_path / out, **options)
        paths = sorted(photos.rglob("*.png"))
        rows = ({"__key__": f"{n}", "png": path.read_bytes()} for n, path in enumerate(paths))
        return wt.pack(rows, tmp_path / out, **options)

    words = r"cannot be written: File too large.*resume=True"
    with small_files(8192), pytest.raises(StorageError, match=words):
        convert_photos("out")
    assert len(convert_photos("out", resume=True)) == 22
    convert_photos("whole")
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_workers": 0}, "num_workers=0"),
        ({"limit": 0}, "limit=0"),
        ({"max_shard_size": 0}, "max_shard_size=0"),
        ({"quality": 101}, "quality=101"),
        ({"split": {"a": 0.5, "b": 0.6}}, "split"),
        ({"resume": True, "overwrite": True}, "Give only one"),
        ({"stratify": "label"}, "needs a split"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Options(**options)
