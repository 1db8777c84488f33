"""Shard cache: whole shards only, shared by all processes, within the size limit."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import random
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import wdstrain as wt
from tests.support.children import Ended, Program
from tests.support.servers import (
    Served,
    serving,
    small_and_quick,
    stall,
)
from wdstrain.errors import UsageError
from wdstrain.shards.index import Shard
from wdstrain.shards.resolve import open_index
from wdstrain.storage.cache import FOLDER, Cache, CachedFile
from wdstrain.storage.remote import RemoteFile

RANGE = 32 << 10  # bytes of a range request
SHARDS = 4


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed") / "shards"
    rows = (
        {"__key__": f"k{n:04d}", "bin": random.Random(n).randbytes(2000 + n), "cls": n % 3}
        for n in range(300)
    )
    wt.pack(rows, folder, max_shard_samples=75)
    return folder


@pytest.fixture
def served(packed: Path) -> Iterator[Served]:
    with serving(packed) as server:
        yield server


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    small_and_quick(monkeypatch, RANGE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))


def loader_of(urls: Any, folder: Path | None = None, **options: Any) -> wt.Loader:
    return wt.Loader(urls, batch_size=16, shuffle_buffer=50, cache_dir=folder, **options)


def epoch(loader: wt.Loader, number: int = 0) -> list[Any]:
    with closing(loader):
        batches = loader.epoch(number, until=number + 1)
        return [(batch["__key__"], batch["bin"], batch["cls"]) for batch in batches]


def sent(server: Served) -> int:
    return sum(size for path, size in server.sent if path.endswith(".tar"))


def size_of(packed: Path) -> int:
    return sum(path.stat().st_size for path in packed.glob("*.tar"))


def whole(folder: Path) -> list[Path]:
    return sorted((folder / FOLDER).glob("*.tar"))


def parts(folder: Path) -> list[Path]:
    return sorted((folder / FOLDER).glob("*.part"))


def check_content(folder: Path, packed: Path, count: int | None = SHARDS) -> None:
    """Check that files with a final name in the cache are shards, byte for byte, and so many."""
    shards = {path.read_bytes() for path in packed.glob("*.tar")}
    assert all(path.read_bytes() in shards for path in whole(folder))
    assert count in (None, len(whole(folder)))


def opened(cache: Cache, shard: Shard) -> CachedFile | None:
    return cache.open(shard.path, shard.bytes, shard.sha256, shard.tag)


def place_of(cache: Cache, shard: Shard) -> str:
    return cache.place(shard.path, shard.bytes, shard.sha256, shard.tag)


def read(file: CachedFile | None) -> bytes:
    assert file is not None
    data = bytearray(file.size)
    file.read_into(memoryview(data), 0)
    return bytes(data)


def keep(cache: Cache, shard: Shard) -> None:
    file = opened(cache, shard)
    read(file)
    assert file is not None
    file.close()
    cache.stop(10)


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 255
    path.write_bytes(data)


def offset_of(index: wt.Index, number: int) -> int:
    """Return an offset within the field of random bytes of a sample."""
    return next(at for name, at, _ in index.members(number) if name == "bin") + 7


# --- filling ---


@pytest.mark.parametrize("ranges", [True, False])
def test_the_first_epoch_fills_the_cache_and_the_next_needs_no_server(
    packed: Path, tmp_path: Path, ranges: bool
) -> None:
    """With ranges, no byte is fetched twice."""
    expected = [epoch(loader_of(packed), number) for number in range(2)]
    with serving(packed, ranges=ranges) as server:
        loader = loader_of(server.url, tmp_path / "cache")
        assert epoch(loader) == expected[0]
        assert loader.report()["fetched"] >= size_of(packed)
        assert sent(server) == loader.report()["fetched"] == size_of(packed) or not ranges
        server.requests.clear()
        far = loader_of(server.url, tmp_path / "cache")
        assert epoch(far) == expected[0]
        assert not [path for path, _ in server.requests if path.endswith(".tar")]
        assert far.report()["fetched"] == 0 < far.report()["bytes"] <= far.report()["cached"]
    assert epoch(far, 1) == expected[1]  # the server is stopped
    check_content(tmp_path / "cache", packed)
    assert parts(tmp_path / "cache") == []


def test_processes_share_a_cache(packed: Path, served: Served, tmp_path: Path) -> None:
    code = """
        import sys, wdstrain as wt
        url, folder, seed = sys.argv[1:]
        with wt.Loader(url, batch_size=16, cache_dir=folder, seed=int(seed)) as loader:
            print(sum(len(batch["__key__"]) for batch in loader), loader.report()["retries"])
    """
    running = [Program(code, served.url, tmp_path, seed) for seed in range(2)]
    assert [program.end() for program in running] == [Ended(0, "288 0\n", "")] * 2
    assert sent(served) < 2 * size_of(packed)
    check_content(tmp_path, packed)


@pytest.mark.parametrize("has_index", [True, False])
def test_bytes_skipped_by_a_resume_are_cached_unchanged(tmp_path: Path, has_index: bool) -> None:
    """Delivered samples lie between samples that a resume reads; sizes divide the block size."""
    rows = (
        {"__key__": f"k{n:04d}", "bin": random.Random(n).randbytes(2048 - 512)} for n in range(600)
    )
    wt.pack(rows, tmp_path / "s", shuffle=False, max_shard_samples=300)
    if not has_index:
        (tmp_path / "s" / "index.json").unlink()
    with serving(tmp_path / "s") as server:
        urls = f"{server.url}/train-{{000000..000001}}.tar"
        for start in (20, 33, 7):
            options: dict[str, Any] = {"batch_size": 8, "shuffle_buffer": 300}
            with wt.Loader(urls, cache_dir=tmp_path / "cache", **options) as loader:
                list(loader.epoch(start, start=start))
                list(loader.epoch(start + 1))
                assert loader.report()["reread"] == 0
    check_content(tmp_path / "cache", tmp_path / "s", 2)


# --- damage ---


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_damaged_cached_shard_is_read_from_the_server_and_kept_anew(
    packed: Path, served: Served, tmp_path: Path, is_cut: bool
) -> None:
    expected = epoch(loader_of(packed))
    loader = loader_of(served.url, tmp_path)
    epoch(loader)
    damaged = next(path for path in whole(tmp_path) if path.name.startswith("train-000000-"))
    if is_cut:
        os.truncate(damaged, 1000)
    else:
        flip(damaged, offset_of(loader.index, 3))
    assert epoch(loader) == expected
    assert (loader.report()["reread"], loader.report()["bad"]) == (int(not is_cut), 0)
    check_content(tmp_path, packed, None)  # the damaged file was removed
    assert epoch(loader) == expected
    check_content(tmp_path, packed)
    assert damaged.exists()


@pytest.mark.parametrize("replacement", ["a folder", "a part"])
def test_a_wrong_file_under_a_final_name_is_not_used(
    packed: Path, served: Served, tmp_path: Path, replacement: str, caplog: Any
) -> None:
    loader = loader_of(served.url, tmp_path)
    shard = loader.index.shards[0]
    place = Path(place_of(Cache(str(tmp_path)), shard))
    if replacement == "a folder":
        place.mkdir()
    else:
        place.write_bytes(bytes(shard.bytes - 1))
    for _ in range(2):
        assert epoch(loader) == epoch(loader_of(packed))
    assert caplog.text.count("cannot be written") == (replacement == "a folder")


def stopped_after(packed: Path, folder: Path, count: int) -> Shard:
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
    with serving(packed) as server:
        keep(Cache(str(tmp_path)), replace(shard, path=f"{server.url}/{shard.name}"))
        assert 0 < sent(server) == shard.bytes - present < shard.bytes
    check_content(tmp_path, packed, 1)


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
    check_content(tmp_path, packed, 1)


def test_a_part_of_a_shard_without_a_checksum_is_fetched_again(
    packed: Path, served: Served, tmp_path: Path
) -> None:
    address = f"{served.url}/train-000000.tar"
    with RemoteFile(address) as remote:
        shard = Shard(address, 0, remote.size, tag=remote.version or "")
    cache = Cache(str(tmp_path))
    Path(f"{place_of(cache, shard)}.{shard.bytes}.part").write_bytes(bytes(1000))
    keep(cache, shard)
    check_content(tmp_path, packed, 1)


def test_a_shard_without_etag_or_checksum_is_not_cached(served: Served, tmp_path: Path) -> None:
    shard = open_index(served.url).shards[0]
    assert opened(Cache(str(tmp_path)), replace(shard, sha256="")) is None


@pytest.mark.parametrize("present", [0, 50_000])
def test_a_download_that_stands_still_is_not_waited_for(
    packed: Path, served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, present: int
) -> None:
    """Its process may be stopped, and holds the lock of the file, which has some bytes."""
    monkeypatch.setenv("WDSTRAIN_NETWORK_TIMEOUT", "1")
    cache, shard = Cache(str(tmp_path)), open_index(served.url).shards[0]
    data = (packed / shard.name).read_bytes()
    with open(f"{place_of(cache, shard)}.{shard.bytes}.part", "wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        other.write(data[:present])
        other.flush()
        file = opened(cache, shard)
        assert file is not None
        for start in (0, 60_000, 20_000, 150_000, 1_000):
            part = bytearray(20_000)
            file.read_into(memoryview(part), start)
            assert bytes(part) == data[start : start + 20_000]
        assert (file.cached, file.fetched) == ((60_000, 40_000) if present else (0, 100_000))
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
            check_content(tmp_path, packed, int(file is second))
            assert file is not None
            file.close()


# --- the limit ---


def test_the_cache_stays_within_its_limit_and_evicts_the_oldest(
    packed: Path, served: Served, tmp_path: Path
) -> None:
    limit = 2 * max(path.stat().st_size for path in packed.glob("*.tar"))
    loader = loader_of(served.url, tmp_path, cache_limit=limit, shuffle=False)
    for _ in range(2):
        assert epoch(loader) == epoch(loader_of(packed, shuffle=False))
        assert 0 < sum(path.stat().st_size for path in (tmp_path / FOLDER).glob("*.tar*")) <= limit
    check_content(tmp_path, packed, None)
    cache, shards = Cache(str(tmp_path / "other"), limit), loader.index.shards
    for number in (0, 1, 0, 2):
        keep(cache, shards[number])
        os.utime(place_of(cache, shards[number]), ns=(time.time_ns(), time.time_ns()))
    names = {path.name[:12] for path in whole(tmp_path / "other")}
    assert names == {"train-000000", "train-000002"}


def test_only_files_of_the_cache_are_evicted(packed: Path, served: Served, tmp_path: Path) -> None:
    for path in packed.iterdir():
        shutil.copy(path, tmp_path)
    expected = epoch(loader_of(served.url, tmp_path, cache_limit="10MB"))
    for path in whole(tmp_path):  # files with cache-like names beside its folder
        shutil.copy(path, tmp_path)
    (tmp_path / FOLDER / "notes.tar").write_bytes(bytes(100_000))
    places = [*tmp_path.glob("*.*"), tmp_path / FOLDER / "notes.tar"]
    own = {path: path.read_bytes() for path in places}
    limit = max(path.stat().st_size for path in packed.glob("*.tar"))
    cached = [path for path in whole(tmp_path) if path.name != "notes.tar"]
    for removed in cached[:2]:  # reading these again evicts others
        removed.unlink(missing_ok=True)
        assert sorted(epoch(loader_of(served.url, tmp_path, cache_limit=limit))) == sorted(expected)
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
    assert epoch(loader) == epoch(loader_of(packed))
    assert list(tmp_path.rglob("*.tar*")) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cache_dir": __file__}, "cannot be made"),
        ({"cache_limit": "1GB"}, "Give cache_dir= too"),
        ({"cache_dir": "cache", "cache_limit": "many"}, "'many' is not a size"),
        ({"cache_dir": "cache", "cache_limit": 0}, "cache_limit=0"),
    ],
)
def test_an_impossible_cache_folder_raises_immediately(
    packed: Path, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        wt.Loader(packed, **options)


def test_a_full_disk_degrades_to_streaming_with_one_warning(
    packed: Path, served: Served, small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (small_disk / "filler").write_bytes(bytes(700_000))
    assert epoch(loader_of(served.url, small_disk)) == epoch(loader_of(packed))
    assert caplog.text.count("cannot be written") == 1


def test_a_file_system_without_locks_leaks_no_descriptor(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some network file systems refuse locks: ENOLCK. The cache was filled when it had them."""

    def refused(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    for is_refused, name in ((False, "cache"), (True, "cache"), (True, "new")):
        if is_refused:
            monkeypatch.setattr(fcntl, "flock", refused)
        batches = epoch(loader_of(served.url, tmp_path / name))
        assert sorted(key for keys, *_ in batches for key in keys)[-1] == "k0299"
    gc.collect()
    links = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    assert not [link for link in links if link.startswith(str(tmp_path))]
