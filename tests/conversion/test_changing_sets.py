"""Sets that grow and shrink: append, remove, dry runs, and kills."""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import os
import random
import signal
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import wdstrain as wt
from tests.conftest import files_of, picture, quick_and_slow
from tests.support.os_faults import small_files
from tests.support.readers import by_key
from tests.support.tables import attempt, write_images, write_table
from wdstrain.cli import main
from wdstrain.errors import ShardError, SourceError, StorageError, UsageError

CLASSES = ["cat", "dog"]
HALVES: dict[str, Any] = {"split": {"train": 0.5, "val": 0.5}}


def samples(numbers: Iterable[int]) -> list[dict[str, Any]]:
    return [
        {"__key__": f"k{n:03d}", "txt": f"text {n}" * (n % 5 + 1), "cls": n % 2, "json": {"n": n}}
        for n in numbers
    ]


def packed(out: Path, numbers: Iterable[int], **options: Any) -> wt.Index:
    options = {"max_shard_samples": 4, **options}
    return wt.pack(samples(numbers), out, classes=CLASSES, **options)


def contents(out: Path | str) -> dict[str, bytes]:
    """Return the text of each sample, read through a loader from the folder."""
    with wt.Loader(wt.open(out), batch_size=5, tail="keep", shuffle=False) as loader:
        return by_key(loader, "txt")


def expected(numbers: Iterable[int]) -> dict[str, bytes]:
    return {sample["__key__"]: sample["txt"].encode() for sample in samples(numbers)}


def test_appended_samples_are_new_shards_and_the_old_ones_keep_their_bytes(tmp_path: Path) -> None:
    out = tmp_path / "out"
    packed(out, range(10))
    before = {name: data for name, data in files_of(out).items() if name.endswith("tar")}
    index = packed(out, range(10, 17), append=True)
    assert [s.name for s in index.shards] == [f"train-{n:06d}.tar" for n in range(5)]
    assert before.items() <= files_of(out).items()
    assert contents(out) == contents(f"{out}/train-*.tar") == expected(range(17))
    assert wt.verify(out).ok
    assert index.info["samples"] == {"train": {"cat": 9, "dog": 8}}
    assert index.info["listed"] == 17
    assert len(wt.open(out).where("n >= 10 and label == 'dog'")) == 3
    assert not (out / ".unfinished").exists()


def test_samples_without_keys_get_the_next_numbers(tmp_path: Path) -> None:
    def add(start: int, **options: Any) -> None:
        wt.pack(({"txt": f"{n}"} for n in range(start, start + 3)), tmp_path, **options)

    add(0)
    add(3, append=True)
    add(3, append=True, resume=True)
    assert sorted(contents(tmp_path).items()) == [(f"{n:09d}", f"{n}".encode()) for n in range(6)]


NEW = samples([11])[0]


@pytest.mark.parametrize(
    ("new", "options", "message"),
    [
        (samples([3, 11]), {}, "1 of 2 keys are in .*, such as 'k003'"),
        ([{**NEW, "__key__": "K001"}], {}, "1 of 1 keys are in .* such as 'K001'"),
        ([{**NEW, "jpg": b"\xff\xd8\xff"}], {}, "the field 'jpg', which .* does not have"),
        ([{"__key__": "new", "cls": 0, "json": {}}], {}, "every sample of .* has the field 'txt'"),
        ([{**NEW, "json": {"n": "x"}}], {}, "column 'n' holds .* text .*, and integer"),
        *(
            (
                [NEW],
                {"classes": classes},
                f"label 'label' is . classes: {', '.join(classes)} in the new .* 2 classes: cat, dog in",
            )
            for classes in (["dog", "cat"], ["cat", "eel"], ["eel", "cat", "dog"])
        ),
        ([NEW], {"overwrite": True}, "Give only one"),
    ],
)
def test_samples_that_do_not_fit_the_set_are_refused_and_leave_it_unchanged(
    tmp_path: Path, new: list[dict[str, Any]], options: dict[str, Any], message: str
) -> None:
    packed(tmp_path / "set", range(10))
    before = files_of(tmp_path / "set")
    with pytest.raises(UsageError, match=message):
        wt.pack(new, tmp_path / "set", append=True, **{"classes": CLASSES, **options})
    assert files_of(tmp_path / "set") == before
    assert not (tmp_path / "set" / ".unfinished").exists()
    with pytest.raises(UsageError, match="holds no finished set|Give only one"):
        wt.pack(new, tmp_path / "none", append=True, **{"classes": CLASSES, **options})
    assert not (tmp_path / "none").exists()


# --- the same call every day: append=True, resume=True ---


def _texts(day: int, key: int | str) -> list[dict[str, Any]]:
    return [{"__key__": f"{key}-{n}", "txt": f"{day} {n}"} for n in range(4)]


def _pack_day(folder: Path, day: int, **options: Any) -> wt.Index:
    return wt.pack(({"txt": f"{day} {n}"} for n in range(4)), folder / "out", **options)


def _pack_keyed_day(folder: Path, day: int, **options: Any) -> wt.Index:
    return wt.pack(iter(_texts(day, day)), folder / "out", **options)


def _pack_equal_keys(folder: Path, day: int, **options: Any) -> wt.Index:
    return wt.pack(iter(_texts(day, min(day, 1))), folder / "out", **options)


def _arrays_day(folder: Path, day: int, **options: Any) -> wt.Index:
    return wt.convert_arrays({"x": np.full((4, 2), day)}, folder / "out", **options)


def _array_file_of_day(folder: Path, day: int, **options: Any) -> wt.Index:
    np.save(folder / f"{day}.npy", np.full((4, 2), day))
    return wt.convert_arrays({"x": str(folder / f"{day}.npy")}, folder / "out", **options)


def _hdf5_day(folder: Path, day: int, **options: Any) -> wt.Index:
    with h5py.File(folder / f"{day}.h5", "w") as file:
        file["x"] = np.full((4, 2), day)
    return wt.convert_hdf5(folder / f"{day}.h5", folder / "out", {"x": "x"}, **options)


def _folder_day(folder: Path, day: int, **options: Any) -> wt.Index:
    write_images(folder / f"in{day}" / "a" / str(day), 4)
    return wt.convert_folder(folder / f"in{day}", folder / "out", **options)


def _table_day(folder: Path, day: int, **options: Any) -> wt.Index:
    write_images(folder / str(day), 4)
    table = write_table(folder / "t", "csv", file=[f"{day}/{n}.png" for n in range(4)])
    return wt.convert_table(table, folder / "out", image="file", **options)


def _table_of_bytes_day(folder: Path, day: int, **options: Any) -> wt.Index:
    images = [picture(4 * day + n, size=(4, 4)) for n in range(4)]
    table = write_table(folder / f"t{day}", "parquet", image=images, n=[day] * 4)
    return wt.convert_table(table, folder / "out", image="image", **options)


def _tars_day(folder: Path, day: int, **options: Any) -> wt.Index:
    wt.pack(_texts(day, day), folder / f"set{day}")
    return wt.convert_tars(folder / f"set{day}", folder / "out", **options)


DAYS: list[Callable[..., wt.Index]] = [
    _pack_day,
    _pack_equal_keys,
    _arrays_day,
    _array_file_of_day,
    _hdf5_day,
    _pack_keyed_day,
    _folder_day,
    _table_day,
    _table_of_bytes_day,
    _tars_day,
]


@pytest.mark.parametrize("add_day", DAYS)
def test_the_same_call_with_new_data_adds_it_or_is_refused(
    tmp_path: Path, add_day: Callable[..., wt.Index]
) -> None:
    for day in range(3):
        growing = {"append": day > 0, "resume": day > 0}
        result = attempt(lambda: add_day(tmp_path, day, **growing))  # noqa: B023
        if isinstance(result, str):
            assert "key" in result
            return
        assert len(result) == 4 * (day + 1)


# --- classes that are new ---

NUMBERED = [f"class {n:02d}" for n in range(10)]


def _convert_classes(
    folder: Path, source: str, first: int, names: list[str], **options: Any
) -> wt.Index:
    """Convert a sample of each class; `first` is the number of the first of them."""
    if source == "folder":
        for name in names:
            write_images(folder / f"in{first}" / name / str(first), 1)
        return wt.convert_folder(folder / f"in{first}", folder / "out", **options)
    if source == "table":
        write_images(folder / "images", 12)
        files = [f"images/{n}.png" for n in range(first, first + len(names))]
        table = write_table(folder / "t", "csv", file=files, kind=names)
        return wt.convert_table(table, folder / "out", image="file", label="kind", **options)
    if source == "pack":
        rows = [
            {"__key__": f"k{first + n}", "txt": "", "cls": name} for n, name in enumerate(names)
        ]
        return wt.pack(rows, folder / "out", **options)
    arrays = {"x": np.zeros((len(names), 2)), "cls": np.arange(first, first + len(names))}
    return wt.convert_arrays(arrays, folder / "out", **options)


@pytest.mark.parametrize("source", ["folder", "table", "pack", "arrays"])
def test_a_new_class_gets_the_next_number_or_a_refusal_that_shows_the_difference(
    tmp_path: Path, source: str
) -> None:
    _convert_classes(tmp_path, source, 0, NUMBERED, classes=NUMBERED)
    messages = []
    for classes in ([], [*NUMBERED, "zebra"]):
        options: dict[str, Any] = {"classes": classes, "append": True}
        result = attempt(lambda: _convert_classes(tmp_path, source, 10, ["zebra"], **options))  # noqa: B023
        if not isinstance(result, str):
            assert result.labels[0].classes == (*NUMBERED, "zebra")
            assert len(result.where(f"{result.labels[0].name} == 'zebra'")) == 1
            return
        messages.append(result)
    assert "at the end" not in messages[0]
    assert "zebra" in messages[1]


# --- keys ---


def _two_splits(folder: Path, source: str) -> wt.Index:
    """Convert samples of two splits whose files or keys have the same names."""
    out, splits = folder / "out", ("train", "val")
    if source == "class folders":
        for split in splits:
            write_images(folder / "in" / split / "a", 2)
        return wt.convert_folder(folder / "in", out)
    if source == "tables":
        rows = {"image": [picture(n, size=(4, 4)) for n in range(2)], "n": [1, 2]}
        tables = [write_table(folder / split, "parquet", **rows) for split in splits]
        return wt.convert_table(tables, out, image="image")
    sets = [folder / f"set-{split}" for split in splits]
    for split, place in zip(splits, sets, strict=True):
        rows_ = [{"__key__": f"k{n}", "txt": split} for n in range(2)]
        wt.pack(rows_, place, split={split: 1.0})
    return wt.convert_tars(sets, out)


@pytest.mark.parametrize("source", ["class folders", "sets", "tables"])
def test_a_key_names_one_sample_of_a_set(tmp_path: Path, source: str) -> None:
    out, keys = tmp_path / "out", tmp_path / "keys"
    index = _two_splits(tmp_path, source)
    assert len(set(index.keys(np.arange(len(index))))) == len(index) == 4
    keys.write_text(f"{index.key(0)}\n")
    result = attempt(lambda: wt.convert_tars(out, tmp_path / "few", keys=str(keys)))
    assert isinstance(result, str) or len(result) == 1
    attempt(lambda: wt.remove(str(out), keys=[index.key(0)]))
    assert len(wt.open(out)) >= 3


# --- dry runs ---


def _source(folder: Path, kind: str, out: Path, **options: Any) -> wt.Index:
    """Convert six samples of two classes."""
    if kind == "pack":
        return wt.pack(samples(range(6)), out, **options)
    if kind == "arrays":
        return wt.convert_arrays({"x": np.zeros((6, 2)), "cls": np.arange(6) % 2}, out, **options)
    for n in range(2):
        write_images(folder / "in" / CLASSES[n], 3)
    if kind == "folder":
        return wt.convert_folder(folder / "in", out, **options)
    files = [f"in/{name}/{n}.png" for name in CLASSES for n in range(3)]
    table = write_table(folder / "t", "csv", file=files, label=[name[3:-6] for name in files])
    return wt.convert_table(table, out, image="file", label="label", **options)


def _with_file(folder: Path, kind: str) -> None:
    (folder / "file").write_text("")


def _with_set(folder: Path, kind: str) -> None:
    _source(folder, kind, folder / "out")


def _with_other_files(folder: Path, kind: str) -> None:
    (folder / "out").mkdir()
    (folder / "out" / "notes.txt").write_text("")


_DRAWN = {"split": {"a": 0.5, "b": 0.5}}


@pytest.mark.parametrize(
    ("kind", "prepare", "options"),
    [
        *((kind, None, {**_DRAWN, "stratify": "unknown"}) for kind in ("folder", "pack", "arrays")),
        ("folder", None, {"out": "in/out"}),
        ("table", _with_file, {"out": "file"}),
        ("pack", _with_file, {"out": "file/out"}),
        ("folder", _with_file, {"out": "file", "overwrite": True}),
        ("arrays", _with_set, {"resume": True, "seed": 3}),
        ("table", _with_set, {"resume": True, "seed": 3}),
        ("table", None, {**_DRAWN, "stratify": "unknown"}),
        ("folder", None, {**_DRAWN, "stratify": "label"}),
        ("pack", None, {"split": {"a": 0.999, "b": 0.001}}),
        ("arrays", None, {"num_shards": 7}),
        ("folder", None, {"classes": ["cat"]}),
        ("pack", _with_set, {}),
        ("pack", _with_set, {"append": True}),
        ("folder", _with_set, {"append": True}),
        ("folder", None, {"append": True}),
        ("table", _with_other_files, {}),
        ("table", _with_other_files, {"overwrite": True}),
    ],
)
def test_a_dry_run_refuses_what_the_run_refuses(
    tmp_path: Path, kind: str, prepare: Callable[[Path, str], None] | None, options: dict[str, Any]
) -> None:
    if prepare is not None:
        prepare(tmp_path, kind)
    options = {"out": "out", **options}
    out = tmp_path / options.pop("out")
    dry_run, run = (
        isinstance(attempt(lambda: _source(tmp_path, kind, out, dry_run=dry, **options)), str)  # noqa: B023
        for dry in (True, False)
    )
    assert dry_run == run


def test_removed_samples_are_absent_and_other_shards_keep_their_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packed(tmp_path, range(12), shuffle=False)
    before = files_of(tmp_path)
    assert main(["remove", str(tmp_path), "--where", "n < 5", "--dry-run", "--json"]) == 0
    counts = json.loads(capsys.readouterr().out)
    assert (counts["removed"], counts["samples"]) == (5, 7)
    assert (counts["rewritten"], counts["deleted"]) == (1, 1)
    assert files_of(tmp_path) == before
    assert main(["remove", str(tmp_path), "--where", "n < 5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["removed"] == 5
    assert contents(tmp_path) == contents(f"{tmp_path}/train-*.tar") == expected(range(5, 12))
    assert files_of(tmp_path)["train-000002.tar"] == before["train-000002.tar"]
    names = sorted(path.name for path in tmp_path.glob("*.tar"))
    assert names == ["train-000002.tar", "train-000003.tar"]
    index = wt.open(tmp_path)
    assert index.info["samples"] == {"train": {"cat": 3, "dog": 4}}
    assert index.info["removed"] == [{"count": 5, "where": "n < 5"}]
    assert wt.verify(tmp_path).ok


def test_keys_that_do_not_exist_are_refused_and_nothing_is_removed(tmp_path: Path) -> None:
    out, keys = tmp_path / "out", tmp_path / "keys.txt"
    packed(out, range(6))
    before = files_of(out)
    keys.write_text("k001\nnone\nk999\n")
    with pytest.raises(SourceError, match="2 of 3 keys are in no shard, such as 'k999'"):
        wt.remove(str(out), keys=str(keys))
    with pytest.raises(UsageError, match="no sample of .* would be left"):
        wt.remove(str(out), where="n >= 0")
    assert files_of(out) == before
    assert not (out / ".unfinished").exists()
    keys.write_text("k001\n")
    assert wt.remove(str(out), keys=str(keys)).removed == 1
    assert contents(out) == expected([0, 2, 3, 4, 5])


def test_a_damaged_sample_is_not_copied_when_others_are_removed(tmp_path: Path) -> None:
    index = packed(tmp_path, range(8), shuffle=False)
    with open(tmp_path / "train-000000.tar", "r+b") as file:
        file.seek(index.members(1)[0][1])
        file.write(b"X")
    with pytest.raises(ShardError, match="sample k001 .* has another crc32"):
        wt.remove(str(tmp_path), keys=["k000"])
    wt.remove(str(tmp_path), keys=["k006"])


def test_a_dry_run_reports_the_conversion_and_writes_no_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    for name in CLASSES:
        write_images(source / name, 10)
    options: dict[str, Any] = {**HALVES, "max_shard_samples": 3}
    planned = wt.convert_folder(source, out, dry_run=True, **options)
    words = ["--split", "train=0.5,val=0.5", "--max-shard-samples", "3", "--dry-run", "--json"]
    assert main(["convert", "folder", str(source), str(out), *words]) == 0
    assert json.loads(capsys.readouterr().out)["samples"] == 20
    assert len(wt.pack(iter(samples(range(9))), out, dry_run=True)) == 9
    assert not out.exists()
    done = wt.convert_folder(source, out, **options)
    rows = [
        [(s.name, s.samples, s.bytes, s.split) for s in index.shards] for index in (planned, done)
    ]
    assert rows[0] == rows[1]


@pytest.mark.parametrize("count", [2, 3, 7, 20])
def test_num_shards_is_exact(tmp_path: Path, count: int) -> None:
    options: dict[str, Any] = {**HALVES, "max_shard_samples": None}
    index = packed(tmp_path, range(40), num_shards=count, **options)
    assert len(index.shards) == count
    assert contents(tmp_path) == expected(range(40))
    sizes = [shard.samples for shard in index.shards if shard.split == "train"]
    assert max(sizes) - min(sizes) <= max(2, max(sizes) // 3)
    with pytest.raises(UsageError, match="num_shards=41: must be from 2, .* to 40"):
        packed(tmp_path / "o", range(40), num_shards=41, **options)


@pytest.mark.parametrize("split", [{}, HALVES])
def test_if_every_sample_is_bad_the_reasons_are_listed(
    tmp_path: Path, split: dict[str, Any]
) -> None:
    bad = [{"__key__": f"k{n}", "jpg": f"no image {n}".encode()} for n in range(9)]
    for options in ({}, {"quality": 50}):
        with pytest.raises(SourceError, match="all of 9 samples were skipped: 9 x its jpg"):
            wt.pack(bad, tmp_path, on_error="skip", **split, **options)
    packed(tmp_path, range(5))
    assert contents(tmp_path) == expected(range(5))


# --- faults ---


@pytest.mark.parametrize("verb", ["append", "remove"])
def test_a_full_disk_leaves_the_old_set_and_the_same_call_resumes(
    tmp_path: Path, verb: str
) -> None:
    def call(**options: Any) -> object:
        if verb == "append":
            return packed(tmp_path, range(30, 60), append=True, **options)
        return wt.remove(str(tmp_path), where="n < 5")

    packed(tmp_path, range(30), max_shard_samples=None)
    before = files_of(tmp_path)
    with small_files(8192), pytest.raises(StorageError, match="cannot be written"):
        call()
    assert files_of(tmp_path) == before
    assert contents(tmp_path) == expected(range(30))
    call(resume=True)
    assert contents(tmp_path) == expected(range(60) if verb == "append" else range(5, 30))


def test_the_hint_of_a_full_disk_names_no_option_that_remove_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed(tmp_path, range(9))

    replace = os.replace

    def full(source: str, target: str) -> None:
        if ".unfinished" not in target:  # into the folder of the set
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(StorageError, match="cannot be written") as caught:
            wt.remove(str(tmp_path), where="n < 5")
    assert "resume" not in str(caught.value)


@pytest.mark.parametrize("locks", [True, False])
def test_of_two_writers_one_wins_and_the_other_hears_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locks: bool
) -> None:
    """All cases at once: each waits until the time limit of a lock is over."""

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    if not locks:
        monkeypatch.setattr(fcntl, "flock", no_locks)
    cases = [(first, again) for first in (0, 20) for again in ("resume", "overwrite")]
    with ThreadPoolExecutor(len(cases)) as pool:
        list(pool.map(lambda case: check_two_writers(tmp_path / str(case), *case), cases))


def change(out: Path, verb: str, moment: int, count: Any) -> None:
    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("os.rename", "os.remove", "os.link") and str(out) in str(arguments):
            count.value += 1
            if count.value > moment:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    if verb == "append":
        packed(out, range(10, 17), append=True)
    elif verb == "overwrite":
        overwritten(out, overwrite=True)
    else:
        wt.remove(str(out), where="n < 7")


def overwritten(out: Path, **options: Any) -> wt.Index:
    return packed(out, range(40, 47), max_shard_samples=5, **options)


def changed(out: Path, verb: str, moment: int) -> int | None:
    """Change a set; SIGKILL the process before one of its renames and deletions.

    Returns the number of renames and deletions if the process completes.
    """
    context = multiprocessing.get_context("fork")
    count = context.Value("q", 0)
    child = context.Process(target=change, args=(out, verb, moment, count))
    child.start()
    child.join()
    assert child.exitcode in (0, -signal.SIGKILL)
    return int(count.value) if child.exitcode == 0 else None


def test_a_column_that_cannot_hold_values_of_appended_samples_goes_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nulls in their place would be other values than those of the samples."""
    out = str(tmp_path / "set")
    wt.pack([{"__key__": "a", "json": {"angle": 0.5, "road": 1}}], out)
    wt.pack([{"__key__": "b", "json": {"angle": {"degrees": 3}, "road": 2}}], out, append=True)
    index = wt.open(out)
    assert [column.name for column in index.columns] == ["road"]
    assert "no columns angle any more" in caplog.text
    stored = [json.loads(sample["json"]) for _, sample in index.read([0, 1], ["json"])]
    assert [entries["angle"] for entries in stored] == [0.5, {"degrees": 3}]


def test_a_resumed_append_of_other_labels_for_the_same_texts_is_another_append(
    tmp_path: Path,
) -> None:
    """The members of both are equal, but not those of each sample."""

    def rows(flipped: bool) -> list[dict[str, Any]]:
        return [{"txt": f"{n}", "cls": (n + flipped) % 2} for n in range(4)]

    out = tmp_path / "out"
    wt.pack([{"txt": "first", "cls": 0}], out, classes=["a", "b"])
    for flipped, count in ((False, 5), (False, 5), (True, 9), (True, 9)):
        wt.pack(rows(flipped), out, classes=["a", "b"], append=True, resume=True)
        assert len(wt.open(out)) == count
    texts = {(s["txt"], s["cls"]) for _, s in wt.open(out).read(range(1, 9))}
    assert len(texts) == 8
    assert wt.verify(out).ok


EVERY_MOMENT = pytest.mark.parametrize("every", quick_and_slow([False, True], 1))


@EVERY_MOMENT
@pytest.mark.parametrize("verb", ["append", "remove"])
def test_a_change_killed_at_any_moment_leaves_the_old_or_the_new_set(
    tmp_path: Path, verb: str, every: bool
) -> None:
    new = expected(range(17)) if verb == "append" else expected(range(7, 10))
    packed(tmp_path / "whole", range(10))
    total = changed(tmp_path / "whole", verb, 1 << 30)
    assert total is not None
    contents_after_kill = set()
    for moment in range(total) if every else (total // 2, total - 2):
        out = tmp_path / str(moment)
        packed(out, range(10))
        assert changed(out, verb, moment) is None
        now = contents(out)
        contents_after_kill.add(len(now))
        assert now in (expected(range(10)), new)
        if verb == "append":
            packed(out, range(10, 17), append=True, resume=True)
        elif now != new:
            wt.remove(str(out), where="n < 7")
        else:
            wt.remove(str(out), where="n < 7", dry_run=True)
        assert contents(out) == new
        assert contents(f"{out}/train-*.tar") == new
        assert files_of(out) == files_of(tmp_path / "whole")
        assert wt.verify(out).ok
    assert len(contents_after_kill) == 2  # the old set and the new one


@EVERY_MOMENT
@pytest.mark.parametrize("again", ["resume", "overwrite"])
def test_an_overwrite_killed_at_any_moment_is_refused_and_completed(
    tmp_path: Path, again: str, every: bool
) -> None:
    """Readers see the old set, the new one, or an error."""
    old, new = expected(range(10)), expected(range(40, 47))
    overwritten(tmp_path / "whole")
    packed(tmp_path / "count", range(10))
    total = changed(tmp_path / "count", "overwrite", 1 << 30)
    assert total is not None
    seen = set[str]()
    some = (2, total // 2, total - 8, total - 4, total - 1)
    for moment in range(total) if every else some:
        out = tmp_path / str(moment)
        packed(out, range(10))
        assert changed(out, "overwrite", moment) is None
        for address in (out, f"{out}/*.tar"):
            now = attempt(lambda: contents(address))  # noqa: B023
            if isinstance(now, str):
                assert "not finished" in now or "is not in the index" in now
            else:
                assert now in (old, new)
            seen.add(now[-13:] if isinstance(now, str) else str(len(now)))
        with pytest.raises(UsageError, match="overwrite=True"):
            overwritten(out)
        result = attempt(lambda: overwritten(out, **{again: True}))  # noqa: B023
        if isinstance(result, str):  # killed before it began
            assert "finished conversion of another source or with other options" in result
            overwritten(out, overwrite=True)
        assert contents(out) == contents(f"{out}/*.tar") == new
        assert files_of(out) == files_of(tmp_path / "whole")
        assert not (out / ".unfinished").exists()
    assert {"10", "7"} < seen


@pytest.mark.parametrize("seed", range(3))
def test_random_changes_match_an_independent_model(tmp_path: Path, seed: int) -> None:
    """Convert, then append and remove at random; a dict of the samples is the model."""
    choice, unused = random.Random(seed), list(range(300))
    choice.shuffle(unused)
    out = tmp_path / "out"
    model = {unused.pop() for _ in range(20)}
    split = {"train": 0.7, "val": 0.3}
    packed(out, sorted(model), split=split)
    for _ in range(8):
        if choice.random() < 0.5:
            new = [unused.pop() for _ in range(choice.randint(1, 15))]
            split_ = choice.choice([split, None])
            seed_, split_ = choice.randint(0, 3), split_ if len(new) > 9 else None
            packed(out, new, append=True, split=split_, seed=seed_)
            model |= set(new)
        elif choice.random() < 0.5:
            removed_keys = choice.sample(sorted(model), choice.randint(1, len(model) // 2))
            wt.remove(str(out), keys=[f"k{n:03d}" for n in removed_keys])
            model -= set(removed_keys)
        else:
            edge = choice.choice(sorted(model))
            wt.remove(str(out), where=f"n == {edge} or n % 7 == {edge % 7} and n > {edge}")
            model -= {n for n in model if n == edge or (n % 7 == edge % 7 and n > edge)}
        assert contents(out) == expected(model)
    index = wt.open(out)
    assert sorted(index.table["n"].to_pylist()) == sorted(model)
    assert wt.verify(out).ok
    assert sum(sum(counts.values()) for counts in index.info["samples"].values()) == len(model)
    dogs = sum(counts.get("dog", 0) for counts in index.info["samples"].values())
    assert dogs == sum(n % 2 for n in model)
    shards = {shard.name for shard in index.shards}
    assert {path.name for path in out.iterdir()} == shards | {"index.json", "index.arrow"}


def check_two_writers(folder: Path, first: int, again: str) -> None:
    """first: number of the first sample of the second writer; 0 is that of the first one."""
    results: list[wt.Index | str] = []

    def begin_another(step: object) -> None:
        if not results:
            results.append("begun")
            options: dict[str, Any] = {"num_workers": 1, again: True}
            results[0] = attempt(lambda: packed(folder, range(first, first + 9), **options))

    results += [attempt(lambda: packed(folder, range(9), num_workers=1, progress=begin_another))]
    errors = [result for result in results if isinstance(result, str)]
    assert len(errors) == 1
    assert any(word in errors[0] for word in ("another", "writing"))
    winner = range(9) if isinstance(results[0], str) else range(first, first + 9)
    assert contents(folder) == expected(winner)
