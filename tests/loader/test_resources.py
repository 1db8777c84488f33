"""Bounded memory, bounded reads after a resume, and mixing as the shuffle buffer allows."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wdstrain as wt
from tests.conftest import Sample, write_tar
from tests.support.readers import collected_batches
from tests.support.servers import cut, end_in_headers, serving, status
from wdstrain.shards.tar_headers import END, header, padding


def blobs(folder: Path, *, shards: int, samples: int, size: int) -> Path:
    """Write shards of samples of about `size` bytes; every shard is a class of its own."""
    rng = np.random.default_rng(0)
    for shard in range(shards):
        output: list[Sample] = []
        for i in range(samples):
            data = bytes(int(rng.integers(size // 2, size * 3 // 2)))
            output.append((f"s{shard:03d}{i:05d}", {"bin": data, "cls": b"%d" % shard}))
        write_tar(folder / f"b-{shard:03d}.tar", output)
    return folder


def test_buffered_bytes_are_about_the_window(tmp_path: Path) -> None:
    folder = blobs(tmp_path, shards=4, samples=2000, size=4000)
    loader = wt.Loader(folder, batch_size=16, shuffle_buffer=4000)
    mean = sum(shard.bytes for shard in loader.index.shards) / 8000
    ahead = 1 << 20
    monitored = [
        (run.bytes_ahead, run.blocks.held)
        for _, run, _ in collected_batches(loader.index, loader.plan, ahead=ahead)
    ]
    waiting, held = np.max(monitored, axis=0)
    read = 16 << 20  # a read starts while any room is left
    assert waiting < 0.55 * 4000 * mean + ahead + read
    assert held < 1.1 * 4000 * mean + ahead + 2 * read


MEMORY = """
import json, os, sys, time
import wdstrain as wt

def bytes_read():
    return int(open("/proc/self/io").read().split()[1])

def tree():
    # proportional set size: shared memory counts once over the process tree; without file pages
    # (libraries), whose share changes when anything else on this machine ends
    pids, total = [os.getpid()], 0
    for pid in pids:
        for task in os.listdir(f"/proc/{pid}/task"):
            pids += [int(word) for word in open(f"/proc/{pid}/task/{task}/children").read().split()]
        for line in open(f"/proc/{pid}/smaps_rollup"):
            total += int(line.split()[1]) * 1024 if line.startswith(("Pss_Anon:", "Pss_Shmem:")) else 0
    return total

fields = {"label": wt.label()}
loader = wt.Loader(sys.argv[1], fields, batch_size=32, num_workers=int(sys.argv[2]), shuffle_buffer=1000)
sizes = []
for epoch in range(10):
    for step, batch in enumerate(loader):
        # read ahead as far as possible in the first epoch, so that the peak does not vary by run
        before = -4096
        while epoch == 0 and step % 8 == 0 and (now := bytes_read()) - before >= 4096:
            before = now
            time.sleep(0.05)
    sizes.append(tree())
print(json.dumps(sizes))
"""


@pytest.mark.alone
@pytest.mark.parametrize("workers", [0, 2])
def test_memory_of_the_process_tree_is_flat_from_the_second_epoch_to_the_tenth(
    tmp_path: Path, workers: int
) -> None:
    folder = blobs(tmp_path, shards=4, samples=600, size=6000)
    words = [sys.executable, "-c", MEMORY, str(folder), str(workers)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    sizes = json.loads(done.stdout)
    assert max(sizes[1:]) <= 1.05 * min(sizes[1:]), sizes


def mapped() -> int:
    """Number of shared memory files that this process has open."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the folder itself is already closed
            count += "memfd:wdstrain" in os.readlink(f"/proc/self/fd/{name}")
    return count


@pytest.mark.parametrize(("way", "workers"), [("plain", 0), ("break", 2), ("server", 0)])
def test_close_frees_memory_without_the_collector(tmp_path: Path, workers: int, way: str) -> None:
    folder = blobs(tmp_path, shards=2, samples=100, size=1000)
    gc.collect()
    gc.disable()
    try:
        before = mapped()
        with serving(folder) as served:
            urls = f"{served.url}/b-{{000..001}}.tar" if way == "server" else folder
            loader = wt.Loader(urls, {"label": wt.label()}, batch_size=10, num_workers=workers)
            served.faults += [end_in_headers(30), cut(5), status(503)] * (way == "server")
            named = set(os.listdir("/dev/shm"))
            for step, _ in enumerate(loader):
                assert mapped() > before
                assert not re.search("wdstrain|torch", str(set(os.listdir("/dev/shm")) - named))
                if way == "break" and step == 3:
                    break
            del _
            loader.close()
        assert mapped() == before
        assert not served.faults
    finally:
        gc.enable()


def holes(folder: Path, sizes: list[int], shards: int) -> Path:
    """Write shards of samples of these sizes as files with holes, which take no space on a disk."""
    folder.mkdir(parents=True, exist_ok=True)
    for shard in range(shards):
        with open(folder / f"h-{shard:03d}.tar", "wb") as file:
            for n, size in enumerate(sizes):
                file.write(header(f"s{shard:03d}{n:04d}.bin", size))
                file.seek(size + padding(size), os.SEEK_CUR)
            file.write(END)
    return folder


@pytest.mark.parametrize(("is_mixture", "ranks"), [(True, 1), (False, 64)])
def test_the_default_buffer_of_each_rank_has_256_mb_or_a_warning_is_logged(
    is_mixture: bool, ranks: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sets = {name: holes(tmp_path / name, [3_000_000] * 32, shards=16) for name in "ab"}
    options: dict[str, Any] = {"batch_size": 4, "rank": 0, "world_size": ranks}
    loader = wt.mix(sets, **options) if is_mixture else wt.Loader(sets["a"], **options)
    with contextlib.closing(loader):
        notes = [r.getMessage() for r in caplog.records if "scanned" not in r.msg]
        assert loader.shuffle_buffer * 3 >= 100 or any("buffer" in note for note in notes)


@pytest.mark.parametrize("is_weighted", [False, True])
def test_the_default_buffer_has_256_mb_of_the_samples_of_the_epoch(
    is_weighted: bool, tmp_path: Path
) -> None:
    """Of 100 samples one is large; with weights it is half of the epoch."""
    folder = holes(tmp_path, [3_000_000] + [100] * 99, shards=20)
    weights = ([50.0] + [50 / 99] * 99) * 20 if is_weighted else None
    with wt.Loader(folder, batch_size=4, weights=weights) as loader:
        assert loader.shuffle_buffer * (1_500_000 if is_weighted else 30_000) < 2 * 256e6
        named = re.search(r"([\d.]+) MB", repr(loader))
        assert named is not None
        assert 100 < float(named[1]) < 300 if is_weighted else float(named[1]) < 100
