"""Sets that grow and shrink: append, remove, dry runs, and kills."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wdstrain as wt
from tests.conftest import files_of, quick_and_slow
from tests.conversion.conftest import killed_at
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


def tars(out: Path) -> dict[str, bytes]:
    return {name: data for name, data in files_of(out).items() if name.endswith("tar")}


@pytest.mark.parametrize("seed", range(3))
def test_random_changes_match_an_independent_model(tmp_path: Path, seed: int) -> None:
    """Convert, then append and remove at random; a dict of the samples is the model."""
    choice, unused = random.Random(seed), list(range(300))
    choice.shuffle(unused)
    out, split = tmp_path / "out", {"train": 0.7, "val": 0.3}
    model = {unused.pop() for _ in range(20)}
    packed(out, sorted(model), split=split)
    for _ in range(8):
        before = tars(out)
        if choice.random() < 0.5:
            new = [unused.pop() for _ in range(choice.randint(1, 15))]
            split_ = choice.choice([split, None]) if len(new) > 9 else None
            packed(out, new, append=True, split=split_, seed=choice.randint(0, 3))
            model |= set(new)
            assert before.items() <= tars(out).items()
        elif choice.random() < 0.5:
            removed_keys = choice.sample(sorted(model), choice.randint(1, len(model) // 2))
            wt.remove(str(out), keys=[f"k{n:03d}" for n in removed_keys])
            model -= set(removed_keys)
        else:
            edge = choice.choice(sorted(model))
            wt.remove(str(out), where=f"n == {edge} or n % 7 == {edge % 7} and n > {edge}")
            model -= {n for n in model if n == edge or (n % 7 == edge % 7 and n > edge)}
        assert contents(out) == contents(f"{out}/*.tar") == expected(model)
    index = wt.open(out)
    assert sorted(index.table["n"].to_pylist()) == sorted(model)
    assert wt.verify(out).ok
    assert sum(sum(counts.values()) for counts in index.info["samples"].values()) == len(model)
    dogs = sum(counts.get("dog", 0) for counts in index.info["samples"].values())
    assert dogs == sum(n % 2 for n in model)
    shards = {shard.name for shard in index.shards}
    assert {path.name for path in out.iterdir()} == shards | {"index.json", "index.arrow"}


NEW = samples([11])[0]


@pytest.mark.parametrize(
    ("new", "options", "message"),
    [
        (samples([3, 11]), {}, "1 of 2 keys are in .*, such as 'k003'"),
        ([{**NEW, "__key__": "K001"}], {}, "1 of 1 keys are in .* such as 'K001'"),
        ([{**NEW, "jpg": b"\xff\xd8\xff"}], {}, "the field 'jpg', which .* does not have"),
        ([{"__key__": "new", "cls": 0, "json": {}}], {}, "every sample of .* has the field 'txt'"),
        ([{**NEW, "json": {"n": "x"}}], {}, "column 'n' holds .* text .*, and integer"),
        ([NEW], {"classes": ["dog", "cat"]}, "'label' is . classes: dog, cat in the new .* 2 clas"),
        ([NEW], {"classes": ["cat", "eel"]}, "'label' is . classes: cat, eel in the new .* 2 clas"),
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


def _samples_of_day(folder: Path, day: int, **options: Any) -> wt.Index:
    return wt.pack(({"txt": f"{day} {n}"} for n in range(4)), folder / "out", **options)


def _array_file_of_day(folder: Path, day: int, **options: Any) -> wt.Index:
    np.save(folder / f"{day}.npy", np.full((4, 2), day))
    return wt.convert_arrays({"x": str(folder / f"{day}.npy")}, folder / "out", **options)


def _table_of_day(folder: Path, day: int, **options: Any) -> wt.Index:
    write_images(folder / str(day), 4)
    table = write_table(folder / "t", "csv", file=[f"{day}/{n}.png" for n in range(4)])
    return wt.convert_table(table, folder / "out", image="file", **options)


def _shards_of_day(folder: Path, day: int, **options: Any) -> wt.Index:
    rows = [{"__key__": f"{day}-{n}", "txt": f"{n}"} for n in range(4)]
    wt.pack(rows, folder / f"set{day}", overwrite=True)
    return wt.convert_tars(folder / f"set{day}", folder / "out", **options)


@pytest.mark.parametrize(
    "add_day", [_samples_of_day, _array_file_of_day, _table_of_day, _shards_of_day]
)
def test_the_same_call_with_new_data_adds_it_and_repeated_adds_nothing(
    tmp_path: Path, add_day: Callable[..., wt.Index]
) -> None:
    """A daily job: append=True, resume=True."""
    for day in (0, 1, 1, 2):
        growing = {"append": day > 0, "resume": day > 0}
        assert len(add_day(tmp_path, day, **growing)) == 4 * (day + 1)
    assert len(set(wt.open(tmp_path / "out").keys(range(12)))) == 12


def test_a_resumed_append_of_other_labels_for_the_same_texts_is_another_append(
    tmp_path: Path,
) -> None:
    """The members of both are equal, but not those of each sample."""
    out = tmp_path / "out"
    wt.pack([{"txt": "first", "cls": 0}], out, classes=["a", "b"])
    for flipped, count in ((0, 5), (0, 5), (1, 9), (1, 9)):
        rows = [{"txt": f"{n}", "cls": (n + flipped) % 2} for n in range(4)]
        wt.pack(rows, out, classes=["a", "b"], append=True, resume=True)
        assert len(wt.open(out)) == count
    assert len({(s["txt"], s["cls"]) for _, s in wt.open(out).read(range(1, 9))}) == 8


@pytest.mark.parametrize("source", ["folder", "pack"])
def test_a_new_class_gets_the_next_number_if_all_classes_are_named(
    tmp_path: Path, source: str
) -> None:
    def convert(names: list[str], **options: Any) -> wt.Index:
        if source == "pack":
            rows = [{"__key__": name, "txt": "", "cls": name} for name in names]
            return wt.pack(rows, tmp_path / "out", **options)
        for name in names:
            write_images(tmp_path / f"in{len(names)}" / name / name, 1)
        return wt.convert_folder(tmp_path / f"in{len(names)}", tmp_path / "out", **options)

    former = [f"class {n:02d}" for n in range(10)]
    convert(former, classes=former)
    assert "zebra" in str(attempt(lambda: convert(["zebra"], append=True)))
    index = convert(["zebra"], classes=[*former, "zebra"], append=True)
    assert index.labels[0].classes == (*former, "zebra")
    assert len(index.where("label == 'zebra'")) == 1


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


def test_removed_samples_are_absent_and_other_shards_keep_their_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packed(tmp_path, range(12), shuffle=False)
    before = files_of(tmp_path)
    words = ["remove", str(tmp_path), "--where", "n < 5", "--json"]
    assert main([*words, "--dry-run"]) == 0
    counts = json.loads(capsys.readouterr().out)
    assert (counts["removed"], counts["samples"]) == (5, 7)
    assert (counts["rewritten"], counts["deleted"]) == (1, 1)
    assert files_of(tmp_path) == before
    assert main(words) == 0
    assert contents(tmp_path) == expected(range(5, 12))
    after = tars(tmp_path)
    assert set(after) == {"train-000002.tar", "train-000003.tar"}
    assert after["train-000002.tar"] == before["train-000002.tar"]
    assert wt.open(tmp_path).info["removed"] == [{"count": 5, "where": "n < 5"}]


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


def test_a_key_names_one_sample_of_a_set(tmp_path: Path) -> None:
    """Also if files of two splits have the same names."""
    for split in ("train", "val"):
        write_images(tmp_path / "in" / split / "a", 2)
    index = wt.convert_folder(tmp_path / "in", tmp_path / "out")
    keys = index.keys(range(4))
    assert len(set(keys)) == len(index) == 4
    wt.remove(tmp_path / "out", keys=keys[:1])
    assert sorted(wt.open(tmp_path / "out").keys(range(3))) == sorted(keys[1:])


_DRAWN = {"split": {"a": 0.5, "b": 0.5}}


@pytest.mark.parametrize("kind", ["pack", "folder"])
@pytest.mark.parametrize(
    ("before", "options", "is_refused"),
    [
        ("", {**_DRAWN, "stratify": "unknown"}, True),
        ("", {**_DRAWN, "stratify": "label", "max_shard_samples": 2}, False),
        ("", {"split": {"a": 0.999, "b": 0.001}}, True),
        ("", {"num_shards": 7}, True),
        ("", {"append": True}, True),
        ("", {"out": "in/out"}, True),
        ("file", {"out": "notes", "overwrite": True}, True),
        ("file", {"out": "notes/out"}, True),
        ("set", {}, True),
        ("set", {"append": True}, True),  # the same keys
        ("set", {"resume": True, "seed": 3}, True),
        ("set", {"overwrite": True}, False),
    ],
)
def test_a_dry_run_reports_or_refuses_what_the_run_does_and_writes_no_file(
    tmp_path: Path, kind: str, before: str, options: dict[str, Any], is_refused: bool
) -> None:
    for name in CLASSES:
        write_images(tmp_path / "in" / name, 3)

    def convert(out: str = "out", **options: Any) -> wt.Index:
        if kind == "pack":
            return wt.pack(samples(range(6)), tmp_path / out, classes=CLASSES, **options)
        return wt.convert_folder(tmp_path / "in", tmp_path / out, **options)

    if before == "set":
        convert()
    (tmp_path / "notes").write_text("")
    is_refused = is_refused and (kind, options) != ("pack", {"out": "in/out"})
    files = sorted(tmp_path.rglob("*"))
    planned = attempt(lambda: convert(**options, dry_run=True))
    assert sorted(tmp_path.rglob("*")) == files
    done = attempt(lambda: convert(**options))
    assert isinstance(planned, str) == isinstance(done, str) == is_refused
    if isinstance(planned, wt.Index) and isinstance(done, wt.Index):
        rows = [[(s.name, s.samples, s.split) for s in index.shards] for index in (planned, done)]
        assert rows[0] == rows[1]


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
    with small_files(8192), pytest.raises(StorageError, match="cannot be written") as caught:
        call()
    assert ("resume" in str(caught.value)) == (verb == "append")  # remove has no such option
    assert files_of(tmp_path) == before
    assert contents(tmp_path) == expected(range(30))
    call(resume=True)
    assert contents(tmp_path) == expected(range(60) if verb == "append" else range(5, 30))


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


def change(out: Path, verb: str, **options: Any) -> object:
    if verb == "append":
        return packed(out, range(10, 17), append=True, **options)
    if verb == "remove":
        return wt.remove(str(out), where="n < 7")
    return wt.join(out, [{"key": f"k{n:03d}", "score": n, "caption": "x" * 900} for n in range(10)])


def state(out: Path | str) -> tuple[dict[str, bytes], list[list[Any]]]:
    """Return the texts of a set, and its joined columns."""
    joined = [column for column in wt.open(out).columns if column.name in ("score", "caption")]
    return contents(out), [column.values.to_pylist() for column in joined]


@pytest.mark.parametrize("every", quick_and_slow([False, True], 1))
@pytest.mark.parametrize("verb", ["append", "remove", "join"])
def test_a_change_killed_at_any_moment_leaves_the_old_or_the_new_set(
    tmp_path: Path, verb: str, every: bool
) -> None:
    whole, seen = tmp_path / "whole", set[bool]()
    packed(whole, range(10))
    wt.join(whole, [{"key": "k003", "score": -1}])
    old, files = state(whole), shutil.copytree(whole, tmp_path / "old")
    total = killed_at(1 << 30, whole, lambda: change(whole, verb))
    assert total is not None
    new = state(whole)
    assert len(new[0]) == {"append": 17, "remove": 3, "join": 10}[verb]
    for moment in range(total) if every else (total // 2, total - 2):
        out = shutil.copytree(files, tmp_path / str(moment))
        assert killed_at(moment, out, lambda: change(out, verb)) is None  # noqa: B023
        now = state(out)
        assert now in (old, new)
        seen.add(now == new)
        if now == old or verb != "remove":
            change(out, verb, resume=True)
        else:
            wt.remove(str(out), where="n < 7", dry_run=True)
        assert state(out) == new
        assert contents(f"{out}/train-*.tar") == new[0]
        assert sorted(os.listdir(out)) == sorted(os.listdir(whole))
        assert tars(out) == tars(whole)
        assert wt.verify(out).ok
    assert seen == {False, True}
