"""Conversion keeps file bytes, is reproducible, and is atomic on failure."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import wdstrain as wt
from tests.conftest import files_of, picture, write_class_folder
from tests.support.os_faults import small_files
from tests.support.tables import read_samples
from wdstrain.conversion.listing import Keys
from wdstrain.conversion.options import Options
from wdstrain.conversion.runner import Step, convert
from wdstrain.conversion.sources.folder import list_folder
from wdstrain.errors import ShardError, SourceError, StorageError, UsageError
from wdstrain.shards.resolve import open_index


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return write_class_folder(tmp_path / "photos", {"dog": 13, "cat": 9})


def pack(source: Path, out: Path, **options: Any) -> wt.Index:
    return convert(list_folder(str(source)), str(out), Options(**options)).index


def test_samples_are_shuffled_by_default_and_in_source_order_with_no_shuffle(
    photos: Path, tmp_path: Path
) -> None:
    def keys(**options: Any) -> list[str]:
        index = pack(photos, tmp_path / "out", overwrite=True, **options)
        return [index.key(i) for i in range(len(index))]

    listed = [item.key for item in list_folder(str(photos)).samples()]
    assert keys(shuffle=False) == listed == sorted(listed)
    assert keys() == keys() != listed
    assert keys(seed=1) != keys()
    assert sorted(keys()) == listed


def test_overhead_per_image_and_label_is_at_most_2500_bytes(photos: Path, tmp_path: Path) -> None:
    index = pack(photos, tmp_path / "out")
    payload = sum(path.stat().st_size for path in photos.rglob("*.png"))
    assert (index.shards[0].bytes - payload) / len(index) <= 2500


def test_split_folders_are_kept(tmp_path: Path) -> None:
    write_class_folder(tmp_path / "in" / "train", {"a": 3, "b": 4})
    write_class_folder(tmp_path / "in" / "val", {"a": 2})
    index = pack(tmp_path / "in", tmp_path / "out")
    assert [(shard.name, shard.samples) for shard in index.shards] == [
        ("train-000000.tar", 7),
        ("val-000000.tar", 2),
    ]
    with pytest.raises(UsageError, match="own splits already"):
        pack(tmp_path / "in", tmp_path / "again", split={"x": 0.5, "y": 0.5})


def test_names_with_dots_and_equal_names_get_distinct_keys(tmp_path: Path) -> None:
    folder = tmp_path / "in" / "a"
    folder.mkdir(parents=True)
    for name in ("x.v1.png", "x.v2.png", "x_v2.png", "y.png", "y.jpg", "grüße.PNG"):
        (folder / name).write_bytes(picture(len(name)))
    index = pack(tmp_path / "in", tmp_path / "out", shuffle=False)
    by_key = read_samples(tmp_path / "out")
    assert set(by_key) == {"a/grüße", "a/x_v1", "a/x_v2", "a/x_v2-2", "a/y", "a/y-2"}
    assert len(index) == 6
    assert by_key["a/grüße"]["png"] == picture(len("grüße.PNG"))


def test_keys_never_escape_their_folder() -> None:
    keys = Keys()
    assert [
        keys.key(path) for path in ("../../etc/x", "/etc/x", "D:/a/x", "./a/x", "", "__x__")
    ] == ["etc/x", "etc/x-2", "a/x", "a/x-2", "_", "__x__"]


def test_skipped_files_are_counted(photos: Path, tmp_path: Path) -> None:
    (photos / "cat" / ".DS_Store").write_bytes(b"x")
    (photos / "cat" / "._001.png").write_bytes(b"x")
    (photos / "cat" / "notes.TXT").write_bytes(b"x")
    (photos / "lonely.png").write_bytes(picture(1))
    listing = list_folder(str(photos))
    assert len(list(listing.samples())) == 22
    assert listing.ignored == {
        "hidden or system files": 2,
        "*.txt": 1,
        "images outside a class folder": 1,
    }


def test_linked_folders_are_followed_and_empty_folders_are_no_classes(
    photos: Path, tmp_path: Path
) -> None:
    write_class_folder(tmp_path / "elsewhere", {"x": 3})
    (photos / "bird").symlink_to(tmp_path / "elsewhere" / "x")
    (photos / "empty").mkdir()
    (photos / "__MACOSX").mkdir()
    listing = list_folder(str(photos))
    assert listing.labels()[0].classes == ("bird", "cat", "dog")
    assert len(list(listing.samples())) == 25
    assert listing.ignored == {"folders without images": 1, "hidden or system files": 1}


def test_folders_beside_the_splits_are_counted_and_are_no_classes(tmp_path: Path) -> None:
    for split in ("train", "val"):
        write_class_folder(tmp_path / "in" / split, {"a": 2, "b": 2})
    (tmp_path / "in" / "annotations").mkdir()
    listing = list_folder(str(tmp_path / "in"))
    assert listing.labels()[0].classes == ("a", "b")
    assert listing.ignored == {"folders beside the splits": 1}


def test_shards_are_not_written_into_their_source(photos: Path) -> None:
    with pytest.raises(UsageError, match="which is being converted"):
        pack(photos, photos / "shards")
    assert not (photos / "shards").exists()


# --- bad input ---


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda folder: folder / "absent", "there is no such folder"),
        (lambda folder: folder, "holds no images .found: nothing"),
        (
            lambda folder: write_class_folder(folder / "x", {"a": 2}) / "a",
            "holds 2 images and no class folders.*flat=True",
        ),
        (lambda folder: (folder / "c").mkdir() or folder, "holds no images .found: nothing"),
    ],
)
def test_an_unusable_folder_is_refused(
    tmp_path: Path, make: Callable[[Path], Path], words: str
) -> None:
    (tmp_path / "in").mkdir()
    source = make(tmp_path / "in")
    missing = not source.exists()
    with pytest.raises(UsageError if missing else SourceError, match=words):
        pack(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_empty_image_is_refused_before_any_write(photos: Path, tmp_path: Path) -> None:
    (photos / "cat" / "000.png").write_bytes(b"")
    (photos / "cat" / "zero.png").write_bytes(b"")
    with pytest.raises(SourceError, match="000.png: it has 0 bytes.*on_error=.skip"):
        pack(photos, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_existing_folder_is_refused_and_unchanged(photos: Path, tmp_path: Path) -> None:
    pack(photos, tmp_path / "out")
    before = files_of(tmp_path / "out")
    with pytest.raises(UsageError, match="holds 3 files.*overwrite=True"):
        pack(photos, tmp_path / "out", seed=1)
    assert files_of(tmp_path / "out") == before


def test_overwriting_replaces_only_shards(photos: Path, tmp_path: Path) -> None:
    pack(photos, tmp_path / "out", max_shard_samples=2)
    (tmp_path / "out" / "notes.txt").write_text("mine")
    index = pack(photos, tmp_path / "out", overwrite=True)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "index.arrow",
        "index.json",
        "notes.txt",
        "train-000000.tar",
    ]
    assert len(open_index(tmp_path / "out")) == len(index) == 22


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_conversion_resumes_when_a_removed_source_is_back(
    photos: Path, tmp_path: Path, jobs: int
) -> None:
    pack(photos, tmp_path / "whole", max_shard_samples=1, shuffle=False)
    out, away = tmp_path / "out", tmp_path / "away"

    def removed(step: Step) -> None:
        if photos.exists():
            photos.rename(away)

    listing = list_folder(str(photos))
    with pytest.raises(SourceError, match="cannot be read .No such file.*on_error=.skip"):
        convert(
            listing,
            str(out),
            Options(max_shard_samples=1, num_workers=jobs, shuffle=False),
            removed,
        )
    with pytest.raises(ShardError, match="was not finished.*resume=True"):
        open_index(out)
    away.rename(photos)
    done = convert(
        list_folder(str(photos)),
        str(out),
        Options(max_shard_samples=1, num_workers=jobs, shuffle=False, resume=True),
    )
    assert 0 < done.kept < 22
    assert files_of(out) == files_of(tmp_path / "whole")


@pytest.mark.parametrize("kind", ["folder", "stream"])
def test_a_full_disk_is_one_error_and_the_conversion_can_resume(
    photos: Path, tmp_path: Path, kind: str
) -> None:
    def convert_photos(out: str, **options: Any) -> wt.Index:
        if kind == "folder":
            return pack(photos, tmp_path / out, **options)
        paths = sorted(photos.rglob("*.png"))
        rows = ({"__key__": f"{n}", "png": path.read_bytes()} for n, path in enumerate(paths))
        return wt.pack(rows, tmp_path / out, **options)

    words = r"cannot be written: File too large.*resume=True"
    with small_files(8192), pytest.raises(StorageError, match=words):
        convert_photos("out")
    assert len(convert_photos("out", resume=True)) == 22
    convert_photos("whole")
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


def test_a_failed_overwrite_leaves_the_old_set_intact(photos: Path, tmp_path: Path) -> None:
    pack(photos, tmp_path / "out")
    (tmp_path / "out" / "backup-202401.tar").write_text("mine")
    before = files_of(tmp_path / "out")
    listing = list_folder(str(photos))
    (photos / "dog" / "010.png").unlink()
    with pytest.raises(SourceError):
        convert(listing, str(tmp_path / "out"), Options(overwrite=True, max_shard_samples=2))
    assert files_of(tmp_path / "out") == before
    assert wt.verify(tmp_path / "out" / "index.json").samples == 22
    pack(photos, tmp_path / "out", overwrite=True)
    assert (tmp_path / "out" / "backup-202401.tar").read_text() == "mine"


def test_a_split_that_would_be_empty_is_refused(photos: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the split 'val' gets none of 1 samples"):
        pack(photos, tmp_path / "out", split={"train": 0.99, "val": 0.01}, limit=1)


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


def test_an_output_that_is_a_file_is_refused(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("x")
    with pytest.raises(StorageError, match="out cannot be written: File exists. Choose another"):
        pack(photos, tmp_path / "out")
    assert os.path.getsize(tmp_path / "out") == 1
