"""Killed processes, full disks and changed files: no wrong files remain, and work can continue."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import wdstrain as wt
from tests.conftest import ROOT, files_of, picture, write_class_folder, write_shards
from tests.support.drawn_cases import DAY
from tests.support.os_faults import ended_at, watched_calls
from wdstrain.conversion.staging import Staging
from wdstrain.errors import SampleError, ShardError, UsageError, WdstrainError
from wdstrain.shards.index_io import load, save_index
from wdstrain.shards.resolve import open_index, scan
from wdstrain.storage.files import is_state, state_of
from wdstrain.training.checkpoint import BEST, FORMAT, LAST, read_checkpoint, write_checkpoint
from wdstrain.training.config import read_lines
from wdstrain.training.run_dir import STEPS, append_line, open_folder

# --- the fault injection script ---


def survived(*words: str, times: int) -> None:
    """Check that the script reports all faults with these words in their names as survived."""
    run = [sys.executable, "-m", "tests.fault_injection.run", *words, "--times", str(times)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(run, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line for line in done.stdout.splitlines()[1:-1] if line[:1].strip()]
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
    assert rows
    for row in rows:
        counts = re.match(r".{30} +(\d+) +(\d+) +\d+ ", row)
        is_survived = counts is not None and counts[1] == counts[2]
        assert is_survived or row.endswith("no disk can be mounted here"), row
    assert done.stdout.splitlines()[-1].startswith("all survived")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(4))
def test_a_fault_of_every_kind_is_survived(part: int) -> None:
    survived("--part", f"{part}/4", "--seed", str(DAY), times=1)


# --- conversions ---


def check_another_source_between(
    folder: Path, convert: Callable[[str, Path], Any], first: str, second: str
) -> None:
    """Check that a conversion ignores what one of the source "two" left when both ended there."""
    for name, end in (("one", first), ("two", second)):
        with ended_at("replace", end):
            convert(name, folder / "out")
    convert("one", folder / "out")
    convert("one", folder / "whole")
    assert files_of(folder / "out") == files_of(folder / "whole")


def test_spilled_samples_overwritten_by_another_stream_are_not_used(tmp_path: Path) -> None:
    for name, value in (("one", 1), ("two", 2)):
        np.save(tmp_path / f"{name}.npy", np.full((300, 50), value))

    def pack(name: str, out: Path) -> None:
        source = {"x": tmp_path / f"{name}.npy"}
        wt.convert_arrays(source, out, max_shard_samples=40, resume=True)

    check_another_source_between(tmp_path, pack, *[r"/train-\d+\.tar"] * 2)


def test_the_index_of_a_shard_is_not_used_for_a_shard_that_replaced_it(tmp_path: Path) -> None:
    """A shard of equal size was written from other input, and its part of the index was not."""
    for name, value in (("one", 1), ("two", 2)):
        (tmp_path / name / "a").mkdir(parents=True)
        for number in range(6):
            data = picture(value, kind="JPEG").ljust(2000, b"\0")
            (tmp_path / name / "a" / f"{number}.jpg").write_bytes(data)

    def convert(name: str, out: Path) -> None:
        wt.convert_folder(tmp_path / name, out, max_shard_samples=3, resume=True)

    check_another_source_between(tmp_path, convert, r"/commit\.json", r"\.tar\.part")


def test_a_finished_conversion_does_not_remove_staging_files_of_the_next(tmp_path: Path) -> None:
    """A second conversion begins while the first, already complete, removes its staging files."""

    def second() -> None:
        with pytest.raises(UsageError, match="another conversion is writing into"):
            wt.pack([{"txt": "two"}], tmp_path / "out", overwrite=True)

    with watched_calls("unlink", r"/\.unfinished/owner", second):
        wt.pack([{"txt": "one"}], tmp_path / "out")
    wt.pack([{"txt": "three"}], tmp_path / "out", overwrite=True)
    assert sorted(os.listdir(tmp_path / "out")) == ["index.arrow", "index.json", "train-000000.tar"]


def test_the_lock_of_a_removed_staging_directory_has_no_effect(tmp_path: Path) -> None:
    """A conversion that waited for it makes a new directory, which a third has to wait for."""
    with Staging(str(tmp_path / "out")):
        fd = os.open(tmp_path / "out" / ".unfinished" / "owner", os.O_RDWR)
    with Staging(str(tmp_path / "out")):
        owner = os.stat(tmp_path / "out" / ".unfinished" / "owner")
        assert not os.path.samestat(os.fstat(fd), owner)
        with pytest.raises(UsageError, match="another conversion is writing into"):
            Staging(str(tmp_path / "out"), overwrite=True)
    os.close(fd)


# --- indexes ---


def test_an_index_survives_a_kill_during_its_replacement(tmp_path: Path) -> None:
    """The old or the new index is complete, and checksums are copied from one to the other."""
    write_class_folder(tmp_path / "in", {"cat": 12})
    wt.convert_folder(str(tmp_path / "in"), str(tmp_path / "set"), max_shard_samples=4)
    (tmp_path / "set" / "train-000002.tar").unlink()
    before = load(str(tmp_path / "set" / "index.json"))
    for name, samples in (("arrow", 12), ("json", 8), ("json", 8)):
        with ended_at("replace", rf"/index\.{name}"):
            wt.index(tmp_path / "set")
        survived = load(str(tmp_path / "set" / "index.json")).offsets
        assert np.array_equal(survived.start, before.offsets.start[:samples])
    index = wt.index(tmp_path / "set")
    crcs = index.offsets.members.crc
    assert np.array_equal(crcs, before.offsets.members.crc[: len(crcs)])
    assert len(crcs) == 16
    assert not [name for name in os.listdir(tmp_path / "set") if name.startswith(".")]


def test_offsets_and_shards_are_those_of_one_index(tmp_path: Path) -> None:
    write_shards(tmp_path / "s", [3, 4])
    save_index(scan([str(tmp_path / "s" / "part-001.tar")]), str(tmp_path / "s"))
    shutil.copy(tmp_path / "s" / "index.json", tmp_path / "kept.json")
    save_index(scan([str(tmp_path / "s" / "part-000.tar")]), str(tmp_path / "s"))
    shutil.copy(tmp_path / "kept.json", tmp_path / "s" / "index.json")
    index = load(str(tmp_path / "s" / "index.json"))
    assert ([shard.name for shard in index.shards], len(index)) == (["part-000.tar"], 3)


# --- shards that change ---


def replaced(path: Path, data: bytes, *, keep_time: bool = False) -> None:
    was, new = os.stat(path), path.with_name(".new")
    new.write_bytes(data)
    if keep_time:
        os.utime(new, ns=(was.st_atime_ns, was.st_mtime_ns))
    os.replace(new, path)


@pytest.mark.parametrize("keep_time", [True, False])
@pytest.mark.parametrize("indexed", [True, False])
def test_a_shard_without_checksums_that_is_replaced_during_use_is_an_error_or_bad_samples(
    tmp_path: Path, indexed: bool, keep_time: bool
) -> None:
    folder = write_shards(tmp_path / "s", [9, 9])
    if indexed:
        wt.index(folder)
    options: dict[str, Any] = {"batch_size": 2, "shuffle": False}
    loader = wt.Loader(folder, **options)
    replacing = wt.Loader(folder, **options, on_error="replace", max_errors=0.6)
    shard = folder / "part-001.tar"
    replaced(shard, shard.read_bytes().replace(b"sample 1", b"SAMPLE 1"), keep_time=keep_time)
    changed = "part-001.tar was written to or replaced since it was opened first"
    with loader, pytest.raises(ShardError, match=changed):
        list(loader)
    with replacing:
        actual = [text for batch in replacing for text in batch["txt"]]
        assert replacing.report()["bad"] == 9
    assert [text[:6] for text in actual] == [b"sample"] * 18
    assert len(list(wt.Loader(folder, **options))) == 9  # the new shard


def test_a_new_link_and_changed_permissions_do_not_change_a_file(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "s", [9])
    path = folder / "part-000.tar"
    state = state_of(os.stat(path))
    os.link(path, tmp_path / "backup.tar")
    path.chmod(0o600)
    assert is_state(state, os.stat(path))
    time, _, number = state.split(":")
    assert is_state(f"{time}:0:{number}", os.stat(path))
    assert not is_state(f"{time}:0:0", os.stat(path))


def test_a_shard_that_changes_while_it_is_indexed_raises_and_is_not_cached(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "s", [9, 9])
    shard = folder / "part-001.tar"
    data = shard.read_bytes()
    os.utime(shard, ns=(0, 0))
    with watched_calls("preadv", r"/part-001\.tar", lambda: shard.write_bytes(data)):
        with pytest.raises(ShardError, match="part-001.tar was written to while it was scanned"):
            wt.index(folder)
        open_index(str(folder))
    notes: list[str] = []
    open_index(str(folder), note=notes.append)
    assert "scanned the headers of 9 samples" in notes[0]


# --- checkpoints ---


def state(step: int) -> dict[str, Any]:
    weights = {"w": torch.full((4,), float(step))}
    return {"format": FORMAT, "model": weights, "config": {}, "task": {}}


def test_the_best_checkpoint_gets_its_name_before_the_last(tmp_path: Path) -> None:
    """A run resumes from the last checkpoint, so an unnamed best checkpoint would be lost."""
    folder, options = str(tmp_path), {"keep": 2, "best": True}
    write_checkpoint(folder, state(1), 1, **options)
    for name in ("step-00000002.pt", LAST):
        with ended_at("replace", f"/{name}"):
            write_checkpoint(folder, state(2), 2, **options)
        assert read_checkpoint(str(tmp_path / BEST))["model"]["w"][0] == 2
        assert read_checkpoint(str(tmp_path / LAST))["model"]["w"][0] == 1
    write_checkpoint(folder, state(2), 2, **options)
    assert all(read_checkpoint(str(tmp_path / name))["model"]["w"][0] == 2 for name in (BEST, LAST))


def test_random_bytes_in_the_metrics_file_are_ignored(tmp_path: Path) -> None:
    append_line(str(tmp_path / STEPS), {"step": 1})
    with open(tmp_path / STEPS, "ab") as file:
        file.write(b"\xff\xfe\x00\x00\x80 noise")
    assert read_lines(str(tmp_path / STEPS)) == [{"step": 1}]


def test_a_run_killed_before_it_wrote_its_configuration_can_be_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, ended_at("replace", ".*"), ExitStack() as stack:
        patch.setattr(os, "unlink", lambda *_: None)  # a killed process does not clean up
        open_folder(str(tmp_path / "run"), "", stack, overwrite=False, resume=False)
    assert [name for name in os.listdir(tmp_path / "run") if name.endswith(".tmp")]
    for resume in (False, True):
        with ExitStack() as stack:
            open_folder(str(tmp_path / "run"), "", stack, overwrite=False, resume=resume)
    assert not [name for name in os.listdir(tmp_path / "run") if name.endswith(".tmp")]


# --- workers ---


ADVICE = "there was no memory for it; if the sample is sound, lower num_workers or batch_size"


class Reads:
    """A field that reads whatever a function returns."""

    names, example = ("cls",), None

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function

    def read(self, name: str, data: memoryview, out: Any, draws: Any) -> Any:
        return self._function()


def hungry() -> Any:
    raise MemoryError


def huge() -> Any:
    """Return a sparse array; a batch of them is larger than any address space."""
    return np.broadcast_to(np.int64(0), (1 << 46,))


@pytest.mark.parametrize(
    ("value", "num_workers", "message"),
    [(hungry, 0, ADVICE), (hungry, 1, ADVICE), (huge, 0, "there was no memory to make a batch")],
)
def test_out_of_memory_is_an_error_with_advice(
    shards: Path, value: Any, num_workers: int, message: str
) -> None:
    options: dict[str, Any] = {"batch_size": 4, "num_workers": num_workers}
    with (
        wt.Loader(shards, {"x": Reads(value)}, **options) as loader,
        pytest.raises(WdstrainError, match=message) as raised,
    ):
        list(loader)
    assert value is huge or isinstance(raised.value, SampleError)
