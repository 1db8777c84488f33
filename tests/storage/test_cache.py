"""Shard cache: whole shards only, shared by all processes, within the size limit."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import wdstrain as wt
from tests.conftest import write_shards
from tests.support.servers import (
    Handler,
    Served,
    cut,
    fine,
    serving,
    small_and_quick,
    stall,
    status,
)
from wdstrain.errors import UsageError
from wdstrain.shards.index import Index, Shard
from wdstrain.shards.resolve import open_index
from wdstrain.storage.cache import FOLDER, Cache, CachedFile
from wdstrain.storage.remote import RemoteFile

RANGE = 32 << 10  # bytes of a range request


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four packed shards of about 200 KB."""
    folder = tmp_path_factory.mktemp("packed")
    rows = (
        {"__key__": f"k{n:04d}", "bin": random.Random(n).randbytes(2000 + n), "cls": n % 3}
        for n in range(300)
    )
    wt.pack(rows, str(folder / "shards"), max_shard_size=230_000)
    return folder / "shards"


@pytest.fixture
def served(packed: Path) -> Iterator[Served]:
    with serving(packed) as server:
        yield server


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    small_and_quick(monkeypatch, RANGE)


def epoch(loader: wt.Loader, number: int = 0) -> list[Any]:
    return [(batch["__key__"], batch["bin"], batch["cls"]) for batch in loader.epoch(number)]


def loader_of(urls: Any, folder: Path | None, **options: Any) -> wt.Loader:
    return wt.Loader(urls, batch_size=16, shuffle_buffer=50, cache_dir=folder, **options)


def tar_requests(server: Served) -> list[tuple[str, str | None]]:
    return [request for request in server.requests if request[0].endswith(".tar")]


def whole(folder: Path) -> list[Path]:
    return sorted((folder / FOLDER).glob("*.tar"))


def check_content(folder: Path, packed: Path) -> None:
    """Check that every file with a final name in the cache equals a shard byte for byte."""
    shards = {path.read_bytes() for path in packed.glob("*.tar")}
    assert all(path.read_bytes() in shards for path in whole(folder))


def sent(server: Served) -> int:
    """Return the bytes of shards that a server sent."""
    return sum(size for path, size in server.sent if path.endswith(".tar"))


def size_of(packed: Path) -> int:
    return sum(path.stat().st_size for path in packed.glob("*.tar"))


def opened(cache: Cache, shard: Shard) -> CachedFile | None:
    return cache.open(shard.path, shard.bytes, shard.sha256, shard.tag)


def place_of(cache: Cache, shard: Shard) -> str:
    return cache.place(shard.path, shard.bytes, shard.sha256, shard.tag)


def parts(folder: Path) -> list[Path]:
    return sorted((folder / FOLDER).glob("*.part"))


def read(file: CachedFile | None) -> bytes:
    """Return the bytes of a shard."""
    assert file is not None
    data = bytearray(file.size)
    file.read_into(memoryview(data), 0)
    return bytes(data)


def keep(cache: Cache, shard: Shard) -> None:
    """Read a shard, so that the cache has it."""
    file = opened(cache, shard)
    read(file)
    file.close()
    cache.stop(10)


# --- filling ---


@pytest.mark.parametrize("ranges", [True, False])
def test_the_first_epoch_fills_the_cache_and_the_next_needs_no_server(
    packed: Path, tmp_path: Path, ranges: bool
) -> None:
    near = loader_of(str(packed), None)
    expected = [epoch(near, number) for number in range(2)]
    with serving(packed, ranges=ranges) as server:
        loader = loader_of(server.url, tmp_path / "cache")
        assert epoch(loader) == expected[0]
        sizes = [path.stat().st_size for path in packed.glob("*.tar")]
        assert (
            loader.report()["fetched"] == sum(sizes)
            if ranges
            else loader.report()["fetched"] >= sum(sizes)
        )
        loader.close()
        server.requests.clear()
        far = loader_of(server.url, tmp_path / "cache")
        assert epoch(far) == expected[0]
        assert tar_requests(server) == []
        assert far.report()["fetched"] == 0 < far.report()["bytes"] <= far.report()["cached"]
    assert epoch(far, 1) == expected[1]  # the server is stopped
    assert sorted(path.read_bytes() for path in whole(tmp_path / "cache")) == sorted(
        p.read_bytes() for p in packed.glob("*.tar")
    )
    assert not list((tmp_path / "cache").rglob("*.part"))
    with tarfile.open(whole(tmp_path / "cache")[0]) as tar:
        assert tar.getnames()


def test_no_byte_is_fetched_twice_in_an_epoch(packed: Path, served: Served, tmp_path: Path) -> None:
    loader = loader_of(served.url, tmp_path)
    epoch(loader)
    loader.close()
    assert sent(served) == size_of(packed)


def test_ranks_on_one_machine_share_what_they_fetch(
    packed: Path, served: Served, tmp_path: Path
) -> None:
    loaders = [loader_of(served.url, tmp_path, rank=rank, world_size=3) for rank in range(3)]
    expected = [epoch(loader_of(str(packed), None, rank=rank, world_size=3)) for rank in range(3)]
    delivered: dict[int, Any] = {}
    threads = [
        threading.Thread(target=lambda r=r: delivered.update({r: epoch(loaders[r])}))
        for r in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [delivered[rank] for rank in range(3)] == expected
    for loader in loaders:
        loader.close()
    assert sent(served) < 2 * size_of(packed)
    check_content(tmp_path, packed)


def test_processes_share_a_cache(packed: Path, served: Served, tmp_path: Path) -> None:
    code = (
        "import sys, wdstrain as wt\n"
        f"loader = wt.Loader({served.url!r}, batch_size=16, cache_dir={str(tmp_path)!r}, seed=int(sys.argv[1]))\n"
        "print(sum(len(batch['__key__']) for batch in loader), loader.report()['retries'])\n"
        "loader.close()"
    )
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(seed)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for seed in range(2)
    ]
    assert [process.communicate(timeout=60) for process in running] == [("288 0\n", "")] * 2
    assert sent(served) < 2 * size_of(packed)
    check_content(tmp_path, packed)
    assert len(whole(tmp_path)) == len(list(packed.glob("*.tar")))


def test_a_resumed_run_fetches_only_the_shards_it_reads(
    packed: Path, served: Served, tmp_path: Path
) -> None:
    expected = epoch(loader_of(str(packed), None, shuffle=False))
    loader = loader_of(served.url, tmp_path, shuffle=False)
    last = loader.epoch(0, start=len(expected) - 2, until=1)  # do not read ahead into epoch 1
    delivered = [batch["__key__"] for batch in last]
    assert delivered == [batch_[0] for batch_ in expected[-2:]]
    loader.close()
    names = sorted(path.name for path in packed.glob("*.tar"))
    assert not {f"/{name}" for name in names[:2]} & {path for path, _ in tar_requests(served)}
    loader = loader_of(served.url, tmp_path, shuffle=False)
    assert epoch(loader) == expected
    loader.close()
    assert len(whole(tmp_path)) == len(list(packed.glob("*.tar")))
    check_content(tmp_path, packed)


@pytest.mark.parametrize("packed", [True, False])
def test_bytes_skipped_by_a_resume_are_cached_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packed: bool
) -> None:
    """Delivered samples lie between samples that a resume reads; sizes divide the block size."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    rows = [(f"k{n:04d}", random.Random(n).randbytes(2048 - 512)) for n in range(600)]
    wt.pack(
        ({"__key__": key, "bin": data} for key, data in rows),
        str(tmp_path / "s"),
        shuffle=False,
        max_shard_samples=300,
    )
    shards = sorted((tmp_path / "s").glob("*.tar"))
    if not packed:
        (tmp_path / "s" / "index.json").unlink()
    with serving(tmp_path / "s") as server:
        urls = f"{server.url}/train-{{000000..000001}}.tar"
        for start in (20, 33, 7):
            loader = wt.Loader(urls, batch_size=8, shuffle_buffer=300, cache_dir=tmp_path / "cache")
            list(loader.epoch(start, start=start))
            list(loader.epoch(start + 1))
            assert loader.report()["reread"] == 0
            loader.close()
    kept = whole(tmp_path / "cache")
    assert [path.read_bytes() for path in kept] == [path.read_bytes() for path in shards]


def test_faults_while_filling_the_cache_are_retried(packed: Path, tmp_path: Path) -> None:
    expected = epoch(loader_of(str(packed), None))
    faults = [fault for n in range(12) for fault in (cut(997 * n), status(503))]
    with serving(packed, faults=faults) as server:
        loader = loader_of(server.url, tmp_path)
        assert epoch(loader) == expected
        assert loader.report()["retries"] >= 12
        loader.close()
    check_content(tmp_path, packed)
    assert len(whole(tmp_path)) == len(list(packed.glob("*.tar")))


def test_shards_without_a_checksum_are_cached_by_etag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    write_shards(tmp_path / "s", [20, 20])
    with serving(tmp_path / "s") as server:
        urls = f"{server.url}/part-{{000..001}}.tar"

        def keys() -> list[str]:
            loader = wt.Loader(urls, batch_size=4, cache_dir=tmp_path / "cache")
            delivered = sorted(key for batch in loader for key in batch["__key__"])
            loader.close()
            return delivered

        first = keys()
        assert len(whole(tmp_path / "cache")) == 2
        server.requests.clear()
        assert keys() == first
        assert {span for _, span in tar_requests(server)} <= {"bytes=0-0"}  # whether they changed
        shutil.rmtree(tmp_path / "s")
        write_shards(tmp_path / "s", [20, 21])
        assert len(keys()) == 41 - 1 == len(first)
        assert len(whole(tmp_path / "cache")) > 2


# --- damage ---


def flip(path: Path, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 255]))


def offset_of(index: Index, number: int) -> int:
    """Return an offset within the field of random bytes of a sample."""
    return next(at for name, at, _ in index.members(number) if name == "bin") + 7


def test_a_damaged_cached_shard_is_read_from_the_server(
    packed: Path, served: Served, tmp_path: Path
) -> None:
    expected = epoch(loader_of(str(packed), None))
    loader = loader_of(served.url, tmp_path)
    epoch(loader)
    loader.close()
    damaged = next(path for path in whole(tmp_path) if path.name.startswith("train-000000-"))
    flip(damaged, offset_of(loader.index, 3))
    assert epoch(loader) == expected
    assert (loader.report()["reread"], loader.report()["bad"]) == (1, 0)
    loader.close()
    check_content(tmp_path, packed)  # the damaged file was removed
    assert epoch(loader) == expected
    loader.close()
    check_content(tmp_path, packed)
    assert damaged.exists()


def test_data_damaged_in_transfer_is_fetched_once_more(packed: Path, tmp_path: Path) -> None:
    expected = epoch(loader_of(str(packed), None))

    def damaged(handler: Handler, path: Path, start: int, stop: int) -> bool:
        data = bytearray(path.read_bytes()[start:stop])
        data[len(data) // 2 :: 64] = bytes(len(data[len(data) // 2 :: 64]))
        span = {"Content-Range": f"bytes {start}-{stop - 1}/{path.stat().st_size}"}
        handler.answer(206, bytes(data), span)
        return True

    for workers in (0, 2):
        with serving(packed, faults=[fine(), damaged]) as server:
            loader = wt.Loader(server.url, batch_size=16, shuffle_buffer=50)
            assert epoch(loader) == expected
            assert loader.report()["reread"] > 0
            loader.close()
        with serving(packed, faults=[damaged]) as server:
            fields = {"label": wt.label()}
            loader = wt.Loader(
                server.url, fields, batch_size=16, shuffle=False, num_workers=workers
            )
            near = wt.Loader(str(packed), fields, batch_size=16, shuffle=False)
            assert [batch["label"].tolist() for batch in loader] == [
                batch["label"].tolist() for batch in near
            ]
            loader.close()


def test_permanent_damage_raises_with_shard_and_byte(packed: Path, tmp_path: Path) -> None:
    shutil.copytree(packed, tmp_path / "s")
    index = open_index(str(packed))
    at = offset_of(index, 3)
    flip(tmp_path / "s" / "train-000000.tar", at)
    with serving(tmp_path / "s") as server:
        loader = loader_of(server.url, None)
        with pytest.raises(
            wt.SampleError,
            match=rf"train-000000.tar: '{index.key(3)}', field 'bin' at offset {at - 7}: .*also when they are read again",
        ):
            epoch(loader)
        assert [span for path, span in tar_requests(server) if path.endswith("000000.tar")][
            -1
        ] is not None


def test_a_shard_that_differs_from_its_index_is_not_cached(
    packed: Path, tmp_path: Path, caplog: Any
) -> None:
    shutil.copytree(packed, tmp_path / "s")
    size = (packed / "train-000000.tar").stat().st_size
    flip(tmp_path / "s" / "train-000000.tar", size - 1)  # beyond the last sample
    with serving(tmp_path / "s") as server:
        loader = loader_of(server.url, tmp_path / "cache")
        assert epoch(loader) == epoch(loader_of(str(packed), None))
        loader.close()
    assert "the fetched bytes differ from the index" in caplog.text
    assert len(whole(tmp_path / "cache")) == len(list(packed.glob("*.tar"))) - 1
    check_content(tmp_path / "cache", packed)


def test_a_cached_shard_of_another_length_is_fetched_again(
    packed: Path, served: Served, tmp_path: Path
) -> None:
    loader = loader_of(served.url, tmp_path)
    expected = epoch(loader)
    loader.close()
    os.truncate(whole(tmp_path)[1], 1000)
    assert epoch(loader) == expected
    loader.close()
    check_content(tmp_path, packed)


@pytest.mark.parametrize("replacement", ["a folder", "a part"])
def test_a_wrong_file_under_a_final_name_is_not_used(
    packed: Path, served: Served, tmp_path: Path, replacement: str, caplog: Any
) -> None:
    loader = loader_of(served.url, tmp_path)
    expected = epoch(loader_of(str(packed), None))
    cache, shard = Cache(str(tmp_path)), loader.index.shards[0]
    if replacement == "a folder":
        os.mkdir(place_of(cache, shard))
    else:
        Path(place_of(cache, shard)).write_bytes(bytes(shard.bytes - 1))
    for _ in range(2):
        assert epoch(loader) == expected
        loader.close()
    assert caplog.text.count("cannot be written") == (replacement == "a folder")


def stopped_after(packed: Path, folder: Path, count: int) -> Shard:
    """Fetch `count` bytes of a shard; return it. Its server is gone then."""
    released = threading.Event()
    with serving(packed, faults=[stall(count, released)]) as server:
        cache, shard = Cache(str(folder)), open_index(server.url).shards[0]
        file = opened(cache, shard)
        assert file is not None
        file.read_into(memoryview(bytearray(count // 2)), 0)
        cache.stop(10)
        released.set()
        file.close()
    assert [path.stat().st_size for path in parts(folder)] != [0]
    return shard


def test_a_later_process_goes_on_where_a_file_ends(packed: Path, tmp_path: Path) -> None:
    shard = stopped_after(packed, tmp_path, 2 * RANGE)
    present = parts(tmp_path)[0].stat().st_size
    assert 0 < present < shard.bytes
    with serving(packed) as server:
        keep(Cache(str(tmp_path)), replace(shard, path=f"{server.url}/{shard.name}"))
        assert sent(server) == shard.bytes - present
    check_content(tmp_path, packed)
    assert len(whole(tmp_path)) == 1


def test_a_part_with_wrong_bytes_does_not_become_a_shard(
    packed: Path, tmp_path: Path, caplog: Any
) -> None:
    """A power failure may leave such bytes."""
    shard = stopped_after(packed, tmp_path, 2 * RANGE)
    flip(parts(tmp_path)[0], 1000)
    with serving(packed) as server:
        shard = replace(shard, path=f"{server.url}/{shard.name}")
        keep(Cache(str(tmp_path)), shard)
        assert "the fetched bytes differ from the index" in caplog.text
        assert (whole(tmp_path), parts(tmp_path)) == ([], [])
        keep(Cache(str(tmp_path)), shard)
    assert len(whole(tmp_path)) == 1
    check_content(tmp_path, packed)


def test_a_part_of_a_shard_without_a_checksum_is_fetched_again(
    packed: Path, tmp_path: Path
) -> None:
    with serving(packed) as server:
        address = f"{server.url}/train-000000.tar"
        with RemoteFile(address) as remote:
            shard = Shard(address, 0, remote.size, tag=remote.version or "")
        cache = Cache(str(tmp_path))
        Path(f"{place_of(cache, shard)}.{shard.bytes}.part").write_bytes(bytes(1000))
        keep(cache, shard)
    check_content(tmp_path, packed)
    assert len(whole(tmp_path)) == 1


def test_a_download_that_stands_still_is_not_waited_for(
    packed: Path, served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process may be stopped, and holds the lock of the file."""
    monkeypatch.setenv("WDSTRAIN_NETWORK_TIMEOUT", "1")
    cache, shard = Cache(str(tmp_path)), open_index(served.url).shards[0]
    with open(f"{place_of(cache, shard)}.{shard.bytes}.part", "wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        file = opened(cache, shard)
        assert read(file) == (packed / shard.name).read_bytes()
        assert (file.cached, file.fetched) == (0, shard.bytes)
        file.close()


def test_a_file_that_lacks_bytes_is_read_from_the_cache_and_the_server_in_turn(
    packed: Path, served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WDSTRAIN_NETWORK_TIMEOUT", "1")
    cache, shard = Cache(str(tmp_path)), open_index(served.url).shards[0]
    data = (packed / shard.name).read_bytes()
    with open(f"{place_of(cache, shard)}.{shard.bytes}.part", "wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        other.write(data[:50_000])
        other.flush()
        file = opened(cache, shard)
        assert file is not None
        for start in (0, 60_000, 20_000, 150_000, 1_000):  # the server has those above 50,000
            part = bytearray(20_000)
            file.read_into(memoryview(part), start)
            assert bytes(part) == data[start : start + 20_000]
        assert (file.cached, file.fetched) == (60_000, 40_000)
        file.close()


def test_a_forgotten_shard_is_not_put_in_place_by_its_former_download(
    packed: Path, tmp_path: Path
) -> None:
    """The name of its file belongs to another download then."""
    released = [threading.Event(), threading.Event()]
    with serving(packed, faults=[stall(RANGE, event) for event in released]) as server:
        shard = open_index(server.url).shards[0]
        caches = [Cache(str(tmp_path)) for _ in range(2)]

        def wait_for_requests(count: int) -> None:
            end = time.monotonic() + 30
            while sum(path.endswith(".tar") for path, _ in server.requests) < count:
                assert time.monotonic() < end

        first = opened(caches[0], shard)
        wait_for_requests(1)  # it gets the first event
        caches[0].forget(shard.path, shard.bytes, shard.sha256, shard.tag)
        second = opened(caches[1], shard)
        wait_for_requests(2)
        for file, cache, event in zip((first, second), caches, released, strict=True):
            event.set()
            assert read(file) == (packed / shard.name).read_bytes()
            cache.stop(10)
            check_content(tmp_path, packed)
            assert len(whole(tmp_path)) == (file is second)
            assert file is not None
            file.close()


# --- the limit ---


def test_the_cache_stays_within_its_limit_and_evicts_the_oldest(
    packed: Path, served: Served, tmp_path: Path
) -> None:
    sizes = {path.name: path.stat().st_size for path in packed.glob("*.tar")}
    limit = 2 * max(sizes.values())
    loader = loader_of(served.url, tmp_path, cache_limit=limit, shuffle=False)
    expected = epoch(loader_of(str(packed), None, shuffle=False))
    for _ in range(2):
        assert epoch(loader) == expected
        loader.close()
        assert 0 < sum(path.stat().st_size for path in (tmp_path / FOLDER).glob("*.tar*")) <= limit
    check_content(tmp_path, packed)
    cache, shards = Cache(str(tmp_path / "other"), limit), loader.index.shards
    for number in (0, 1, 0, 2):
        keep(cache, shards[number])
        os.utime(place_of(cache, shards[number]), ns=(time.time_ns(), time.time_ns()))
    assert {path.name[:12] for path in whole(tmp_path / "other")} == {
        "train-000000",
        "train-000002",
    }


def test_only_files_of_the_cache_are_evicted(packed: Path, served: Served, tmp_path: Path) -> None:
    for path in packed.iterdir():
        shutil.copy(path, tmp_path)
    with closing(loader_of(served.url, tmp_path, cache_limit="10MB")) as loader:
        expected = epoch(loader)
    for path in whole(tmp_path):  # files with cache-like names beside its folder
        shutil.copy(path, tmp_path)
    (tmp_path / FOLDER / "notes.tar").write_bytes(bytes(100_000))
    own = {
        path: path.read_bytes() for path in [*tmp_path.glob("*.*"), tmp_path / FOLDER / "notes.tar"]
    }
    limit = max(path.stat().st_size for path in packed.glob("*.tar"))
    cached = [path for path in whole(tmp_path) if path.name != "notes.tar"]
    for removed in cached[:2]:  # reading these again evicts others
        removed.unlink(missing_ok=True)
        with closing(loader_of(served.url, tmp_path, cache_limit=limit)) as loader:
            assert sorted(epoch(loader)) == sorted(expected)
    assert {path: path.read_bytes() for path in own} == own
    assert len(set(cached) - set(whole(tmp_path))) > 2


def test_files_in_use_are_never_evicted(served: Served, tmp_path: Path) -> None:
    shards = open_index(served.url).shards
    cache = Cache(str(tmp_path), shards[0].bytes + shards[1].bytes - 1)
    keep(cache, shards[0])
    first = opened(cache, shards[0])
    assert first is not None
    # There is no room: the shard is streamed.
    assert opened(Cache(str(tmp_path), cache.limit), shards[1]) is None
    first.close()
    keep(cache, shards[1])
    assert not os.path.exists(place_of(cache, shards[0]))


def test_a_shard_above_the_limit_is_streamed(packed: Path, served: Served, tmp_path: Path) -> None:
    loader = loader_of(served.url, tmp_path, cache_limit="10KB")
    assert epoch(loader) == epoch(loader_of(str(packed), None))
    loader.close()
    assert list(tmp_path.rglob("*.tar*")) == []


# --- interruptions ---

_RUN = """
import sys, wdstrain as wt
loader = wt.Loader(sys.argv[1], batch_size=16, shuffle_buffer=50, cache_dir=sys.argv[2])
print("begun", flush=True)
print(sum(len(batch["__key__"]) for batch in loader))
"""


class _Killer:
    """Server fault that kills the client at the request with this number."""

    def __init__(self, moment: int) -> None:
        self._left, self._begun = moment, threading.Event()
        self._victim: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def begin(self, victim: subprocess.Popen[str]) -> subprocess.Popen[str]:
        self._victim = victim
        self._begun.set()
        return victim

    def __call__(self, handler: Handler, path: Path, start: int, stop: int) -> bool:
        with self._lock:
            self._left -= 1
            now = self._left == 0
        if now:
            self._begun.wait(30)
            assert self._victim is not None
            self._victim.send_signal(signal.SIGKILL)
        return False


@pytest.mark.slow
def test_a_kill_at_any_moment_leaves_no_partial_file_under_a_final_name(
    packed: Path, tmp_path: Path
) -> None:
    """A process is killed after a number of requests; another process continues with its cache."""
    expected = epoch(loader_of(str(packed), None))
    total = size_of(packed)
    for moment in range(1, len(list(packed.glob("*.tar"))) + 1):
        folder = tmp_path / str(moment)
        killer = _Killer(moment)
        with serving(packed, faults=[killer] * 100) as server:
            command = [sys.executable, "-c", _RUN, server.url, str(folder)]
            victim = killer.begin(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            out, _ = victim.communicate(timeout=60)
            assert (victim.returncode, out) == (-signal.SIGKILL, "begun\n")
            check_content(folder, packed)
            cached = sum(path.stat().st_size for path in (*whole(folder), *parts(folder)))
            server.faults.clear()
            server.sent.clear()
            loader = loader_of(server.url, folder)
            assert epoch(loader) == expected
            loader.close()
            assert sent(server) == total - cached
        check_content(folder, packed)
        assert len(whole(folder)) == len(list(packed.glob("*.tar")))


@pytest.mark.parametrize("options", ["size=300k", pytest.param("ro", marks=pytest.mark.slow)])
def test_a_full_disk_degrades_to_streaming_with_one_warning(
    packed: Path, served: Served, tmp_path: Path, options: str
) -> None:
    """On a small tmpfs that only this process sees."""
    folder = tmp_path / "cache"
    folder.mkdir()
    mount = f"mount -t tmpfs -o {options} none {folder}"
    if subprocess.run(["unshare", "-rm", "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("this machine lets nobody mount a small disk (unshare -rm)")
    command = [
        "unshare",
        "-rm",
        "sh",
        "-c",
        f'{mount} && exec "$@"',
        "sh",
        sys.executable,
        "-c",
        _RUN,
    ]
    done = subprocess.run(
        [*command, served.url, str(folder)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "begun\n288\n"), done.stderr
    assert done.stderr.count("cannot be written") == 1, done.stderr


def test_an_impossible_cache_folder_raises_immediately(served: Served, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for options, words in (
        ({"cache_dir": tmp_path / "file"}, "cannot be made"),
        ({"cache_limit": "1GB"}, "Give cache_dir= too"),
        ({"cache_dir": tmp_path, "cache_limit": "many"}, "'many' is not a size"),
        ({"cache_dir": tmp_path, "cache_limit": 0}, "cache_limit=0"),
    ):
        with pytest.raises(UsageError, match=words):
            wt.Loader(served.url, **options)


def test_a_shard_without_etag_or_checksum_is_not_cached(served: Served, tmp_path: Path) -> None:
    shard = open_index(served.url).shards[0]
    assert opened(Cache(str(tmp_path)), replace(shard, sha256="")) is None


def test_a_file_system_without_locks_leaks_no_descriptor(
    served: Served, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some network file systems refuse locks: ENOLCK. The cache was filled when it had them."""

    def refused(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    def open_shards() -> list[str]:
        links = Path("/proc/self/fd").iterdir()
        names = [os.readlink(link) for link in links if link.is_symlink()]
        return [name for name in names if name.startswith(str(tmp_path))]

    folder = tmp_path / "cache"
    for is_refused, name in ((False, folder), (True, folder), (True, tmp_path / "new")):
        if is_refused:
            monkeypatch.setattr(fcntl, "flock", refused)
        with closing(loader_of(served.url, name)) as loader:
            assert sorted(key for keys, *_ in epoch(loader) for key in keys)[-1] == "k0299"
    gc.collect()
    assert open_shards() == []
