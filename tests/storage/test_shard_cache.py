"""What a server gave once is kept on the disk: whole or not at all, once for all processes, within its limit."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import wdstrain as wt
from tests.conftest import write_shards
from tests.support.servers import Handler, Served, cut, fine, serving, small_and_quick, status
from wdstrain.errors import UsageError
from wdstrain.shards.index import Index
from wdstrain.shards.resolve import open_index
from wdstrain.storage import block_map, cache_folder, prefetch
from wdstrain.storage.shard_cache import Cache

BLOCK = 32 << 10  # bytes


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four packed shards of some 200 KB."""
    folder = tmp_path_factory.mktemp("made")
    rows = (
        {"__key__": f"k{n:04d}", "bin": random.Random(n).randbytes(2000 + n), "cls": n % 3}
        for n in range(300)
    )
    wt.pack(rows, str(folder / "shards"), max_shard_size=230_000)
    return folder / "shards"


@pytest.fixture
def served(made: Path) -> Iterator[Served]:
    with serving(made) as server:
        yield server


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    small_and_quick(monkeypatch, BLOCK)


def epoch(loader: wt.Loader, number: int = 0) -> list[Any]:
    return [(batch["__key__"], batch["bin"], batch["cls"]) for batch in loader.epoch(number)]


def loader_of(urls: Any, folder: Path | None, **options: Any) -> wt.Loader:
    return wt.Loader(urls, batch_size=16, shuffle_buffer=50, cache_dir=folder, **options)


def asked(server: Served) -> list[tuple[str, str | None]]:
    return [one for one in server.requests if one[0].endswith(".tar")]


def whole(folder: Path) -> list[Path]:
    return sorted((folder / cache_folder.FOLDER).glob("*.tar"))


def check_content(folder: Path, made: Path) -> None:
    """Whatever has a final name in the cache is one of the shards, byte for byte."""
    shards = {path.read_bytes() for path in made.glob("*.tar")}
    assert all(path.read_bytes() in shards for path in whole(folder))


def blocks_in(folder: Path, index: Index) -> set[tuple[str, int]]:
    """The blocks of shards that are in the cache, by the path of the shard on its server."""
    found = set()
    for shard in index.shards:
        with Cache(str(folder)).open(shard) or nullcontext() as file:
            if file is not None:
                count = range(-(-shard.bytes // BLOCK))
                found |= {(f"/{shard.name}", number) for number in count if file.has_block(number)}
    return found


# --- filling ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranges", [True, False])
def test_the_first_epoch_fills_the_cache_and_the_next_needs_no_server(
    made: Path, tmp_path: Path, ranges: bool
) -> None:
    near = loader_of(str(made), None)
    wanted = [epoch(near, number) for number in range(2)]
    with serving(made, ranges=ranges) as server:
        loader = loader_of(server.url, tmp_path / "cache")
        assert epoch(loader) == wanted[0]
        sizes = [path.stat().st_size for path in made.glob("*.tar")]
        assert (
            loader.report()["fetched"] == sum(sizes)
            if ranges
            else loader.report()["fetched"] >= sum(sizes)
        )
        loader.close()
        server.requests.clear()
        far = loader_of(server.url, tmp_path / "cache")
        assert epoch(far) == wanted[0]
        assert asked(server) == []
        assert far.report()["fetched"] == 0 < far.report()["bytes"] <= far.report()["cached"]
    assert epoch(far, 1) == wanted[1]  # the server is gone
    assert sorted(path.read_bytes() for path in whole(tmp_path / "cache")) == sorted(
        p.read_bytes() for p in made.glob("*.tar")
    )
    assert not list((tmp_path / "cache").rglob("*.part"))
    with tarfile.open(whole(tmp_path / "cache")[0]) as tar:
        assert tar.getnames()


def test_no_block_is_fetched_twice_in_an_epoch(served: Served, tmp_path: Path) -> None:
    loader = loader_of(served.url, tmp_path)
    epoch(loader)
    loader.close()
    assert max(Counter(asked(served)).values()) == 1


def test_ranks_on_one_machine_fetch_each_block_once(
    made: Path, served: Served, tmp_path: Path
) -> None:
    loaders = [loader_of(served.url, tmp_path, rank=rank, world_size=3) for rank in range(3)]
    wanted = [epoch(loader_of(str(made), None, rank=rank, world_size=3)) for rank in range(3)]
    found: dict[int, Any] = {}
    threads = [
        threading.Thread(target=lambda r=r: found.update({r: epoch(loaders[r])})) for r in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [found[rank] for rank in range(3)] == wanted
    for loader in loaders:
        loader.close()
    assert max(Counter(asked(served)).values()) == 1


def test_processes_share_a_cache_without_fetching_a_shard_twice(
    made: Path, served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WDSTRAIN_RANGE_SIZE")  # of default size, a block is a shard here
    code = (
        "import sys, wdstrain as wt\n"
        f"loader = wt.Loader({served.url!r}, batch_size=16, cache_dir={str(tmp_path)!r}, seed=int(sys.argv[1]))\n"
        "print(sum(len(batch['__key__']) for batch in loader), loader.report()['retries'])"
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
    assert [one.communicate(timeout=60) for one in running] == [("288 0\n", "")] * 2
    assert max(Counter(path for path, _ in asked(served)).values()) == 1
    assert len(whole(tmp_path)) == len(list(made.glob("*.tar")))


def test_a_run_that_begins_in_the_middle_asks_for_no_more_than_it_reads(
    made: Path, served: Served, tmp_path: Path
) -> None:
    wanted = epoch(loader_of(str(made), None, shuffle=False))
    loader = loader_of(served.url, tmp_path, shuffle=False)
    found = [batch["__key__"] for batch in loader.epoch(0, start=len(wanted) - 2)]
    assert found == [one[0] for one in wanted[-2:]]
    loader.close()
    part_of_first = [span for path, span in asked(served) if path.endswith("000002.tar")]
    assert len(part_of_first) < 7  # of 8 blocks
    loader = loader_of(served.url, tmp_path, shuffle=False)
    assert epoch(loader) == wanted
    loader.close()
    repeated = sum(count - 1 for count in Counter(asked(served)).values())
    assert repeated <= prefetch.THREADS  # requests that were broken off with the first loader
    assert len(whole(tmp_path)) == len(list(made.glob("*.tar")))


@pytest.mark.parametrize("packed", [True, False])
def test_what_a_resume_passes_over_is_cached_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packed: bool
) -> None:
    """Samples that were delivered before the resume lie between those that are read; samples are as long as blocks divide."""
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


def test_faults_on_the_way_into_the_cache_cost_nothing(made: Path, tmp_path: Path) -> None:
    wanted = epoch(loader_of(str(made), None))
    faults = [fault for n in range(12) for fault in (cut(997 * n), status(503), fine())]
    with serving(made, faults=faults) as server:
        loader = loader_of(server.url, tmp_path)
        assert epoch(loader) == wanted
        assert loader.report()["retries"] >= 12
        loader.close()
    check_content(tmp_path, made)
    assert len(whole(tmp_path)) == len(list(made.glob("*.tar")))


def test_shards_without_a_checksum_are_kept_by_the_tag_of_their_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    write_shards(tmp_path / "s", [20, 20])
    with serving(tmp_path / "s") as server:
        urls = f"{server.url}/part-{{000..001}}.tar"

        def keys() -> list[str]:
            loader = wt.Loader(urls, batch_size=4, cache_dir=tmp_path / "cache")
            found = sorted(key for batch in loader for key in batch["__key__"])
            loader.close()
            return found

        first = keys()
        assert len(whole(tmp_path / "cache")) == 2
        server.requests.clear()
        assert keys() == first
        assert {span for _, span in asked(server)} <= {
            None
        }  # asked whether they changed, not for a range
        shutil.rmtree(tmp_path / "s")
        write_shards(tmp_path / "s", [20, 21])
        assert len(keys()) == 41 - 1 == len(first)
        assert len(whole(tmp_path / "cache")) > 2


# --- what is not what it should be -----------------------------------------------------------------------------------


def flip(path: Path, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 255]))


def offset_of(index: Index, number: int) -> int:
    """Where the field of random bytes of a sample begins, and some."""
    return next(at for name, at, _ in index.members(number) if name == "bin") + 7


def test_damage_in_a_cached_shard_is_read_past_the_cache(
    made: Path, served: Served, tmp_path: Path
) -> None:
    wanted = epoch(loader_of(str(made), None))
    loader = loader_of(served.url, tmp_path)
    epoch(loader)
    loader.close()
    damaged = next(path for path in whole(tmp_path) if path.name.startswith("train-000000-"))
    flip(damaged, offset_of(loader.index, 3))
    assert epoch(loader) == wanted
    assert (loader.report()["reread"], loader.report()["bad"]) == (1, 0)
    loader.close()
    check_content(tmp_path, made)  # it was taken out
    assert epoch(loader) == wanted
    loader.close()
    check_content(tmp_path, made)
    assert damaged.exists()


def test_damage_on_the_way_is_fetched_again_once(made: Path, tmp_path: Path) -> None:
    wanted = epoch(loader_of(str(made), None))

    def damaged(handler: Handler, path: Path, start: int, stop: int) -> bool:
        data = bytearray(path.read_bytes()[start:stop])
        data[len(data) // 2 :: 64] = bytes(len(data[len(data) // 2 :: 64]))
        span = {"Content-Range": f"bytes {start}-{stop - 1}/{path.stat().st_size}"}
        handler.answer(206, bytes(data), span)
        return True

    for workers in (0, 2):
        with serving(made, faults=[fine(), damaged]) as server:
            loader = wt.Loader(server.url, batch_size=16, shuffle_buffer=50)
            assert epoch(loader) == wanted
            assert loader.report()["reread"] > 0
            loader.close()
        with serving(made, faults=[damaged]) as server:
            fields = {"label": wt.label()}
            loader = wt.Loader(
                server.url, fields, batch_size=16, shuffle=False, num_workers=workers
            )
            near = wt.Loader(str(made), fields, batch_size=16, shuffle=False)
            assert [batch["label"].tolist() for batch in loader] == [
                batch["label"].tolist() for batch in near
            ]
            loader.close()


def test_damage_that_stays_is_an_error_with_shard_and_byte(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made, tmp_path / "s")
    index = open_index(str(made))
    at = offset_of(index, 3)
    flip(tmp_path / "s" / "train-000000.tar", at)
    with serving(tmp_path / "s") as server:
        loader = loader_of(server.url, None)
        with pytest.raises(
            wt.SampleError,
            match=rf"train-000000.tar: '{index.key(3)}', field 'bin' at offset {at - 7}: .*also when they are read again",
        ):
            epoch(loader)
        assert [span for path, span in asked(server) if path.endswith("000000.tar")][-1] is not None


def test_a_shard_that_differs_from_its_index_is_not_cached(
    made: Path, tmp_path: Path, caplog: Any
) -> None:
    shutil.copytree(made, tmp_path / "s")
    size = (made / "train-000000.tar").stat().st_size
    flip(tmp_path / "s" / "train-000000.tar", size - 1)  # beyond the last sample
    with serving(tmp_path / "s") as server:
        loader = loader_of(server.url, tmp_path / "cache")
        assert epoch(loader) == epoch(loader_of(str(made), None))
        loader.close()
    assert "the fetched bytes differ from the index" in caplog.text
    assert len(whole(tmp_path / "cache")) == len(list(made.glob("*.tar"))) - 1
    check_content(tmp_path / "cache", made)


def test_a_cached_shard_of_another_length_is_fetched_again(
    made: Path, served: Served, tmp_path: Path
) -> None:
    loader = loader_of(served.url, tmp_path)
    wanted = epoch(loader)
    loader.close()
    os.truncate(whole(tmp_path)[1], 1000)
    assert epoch(loader) == wanted
    loader.close()
    check_content(tmp_path, made)


@pytest.mark.parametrize("what", ["a folder", "a part"])
def test_a_wrong_file_under_a_final_name_is_not_used(
    made: Path, served: Served, tmp_path: Path, what: str, caplog: Any
) -> None:
    loader = loader_of(served.url, tmp_path)
    wanted = epoch(loader_of(str(made), None))
    one, shard = Cache(str(tmp_path)), loader.index.shards[0]
    if what == "a folder":
        os.mkdir(one.path_of(shard))
    else:
        file = one.open(shard)
        assert file is not None
        file.close()
        os.replace(one.path_of(shard) + block_map.PART, one.path_of(shard))
    for _ in range(2):
        assert epoch(loader) == wanted
        loader.close()
    assert caplog.text.count("cannot be written") == (what == "a folder")


def test_a_part_that_was_begun_anew_does_not_get_the_name_of_another(
    served: Served, tmp_path: Path
) -> None:
    one, shard = Cache(str(tmp_path)), open_index(served.url).shards[0]
    first = one.open(shard)
    assert first is not None
    first.fill(0, shard.bytes - BLOCK)
    one.forget(shard)
    second = one.open(shard)
    assert second is not None
    first.fill(0, shard.bytes)  # all of it is there, in a file that has no name any more
    assert (first.whole, os.path.exists(one.path_of(shard))) == (True, False)
    second.fill(0, shard.bytes)
    assert os.path.getsize(one.path_of(shard)) == shard.bytes
    first.close()
    second.close()


# --- the limit -------------------------------------------------------------------------------------------------------


def test_the_cache_stays_within_its_limit_and_the_oldest_goes_first(
    made: Path, served: Served, tmp_path: Path
) -> None:
    sizes = {path.name: path.stat().st_size for path in made.glob("*.tar")}
    limit = 2 * max(sizes.values())
    loader = loader_of(served.url, tmp_path, cache_limit=limit, shuffle=False)
    wanted = epoch(loader_of(str(made), None, shuffle=False))
    for _ in range(2):
        assert epoch(loader) == wanted
        loader.close()
        assert (
            0
            < sum(path.stat().st_size for path in (tmp_path / cache_folder.FOLDER).glob("*.tar*"))
            <= limit
        )
    check_content(tmp_path, made)
    one, shards = Cache(str(tmp_path / "other"), limit), loader.index.shards
    for number in (0, 1, 0, 2):
        file = one.open(shards[number])  # the third time it is there, and was used last
        assert file is not None
        if not file.whole:
            file.fill(0, file.size)
            os.utime(one.path_of(shards[number]), ns=(number, number))
        file.close()
    assert {path.name[:12] for path in whole(tmp_path / "other")} == {
        "train-000000",
        "train-000002",
    }


def test_only_files_of_the_cache_are_evicted(made: Path, served: Served, tmp_path: Path) -> None:
    for path in made.iterdir():
        shutil.copy(path, tmp_path)
    with closing(loader_of(served.url, tmp_path, cache_limit="10MB")) as loader:
        wanted = epoch(loader)
    for path in whole(tmp_path):  # of the names that a cache gives, beside its folder
        shutil.copy(path, tmp_path)
    (tmp_path / cache_folder.FOLDER / "notes.tar").write_bytes(bytes(100_000))
    mine = {
        path: path.read_bytes()
        for path in [*tmp_path.glob("*.*"), tmp_path / cache_folder.FOLDER / "notes.tar"]
    }
    limit = max(path.stat().st_size for path in made.glob("*.tar"))
    there = [path for path in whole(tmp_path) if path.name != "notes.tar"]
    for gone in there[:2]:  # which pushes others out when it is read again
        gone.unlink(missing_ok=True)
        with closing(loader_of(served.url, tmp_path, cache_limit=limit)) as loader:
            assert sorted(epoch(loader)) == sorted(wanted)
    assert {path: path.read_bytes() for path in mine} == mine
    assert len(set(there) - set(whole(tmp_path))) > 2


def test_a_folder_with_foreign_files_is_not_used_as_a_cache(served: Served, tmp_path: Path) -> None:
    (tmp_path / cache_folder.FOLDER).mkdir()
    (tmp_path / cache_folder.FOLDER / "thesis.tar").write_bytes(b"mine")
    with pytest.raises(UsageError, match=r"wdstrain-cache holds thesis.tar, which no cache wrote"):
        loader_of(served.url, tmp_path)
    os.unlink(tmp_path / cache_folder.FOLDER / "thesis.tar")
    loader_of(served.url, tmp_path).close()  # an empty one, as a kill may leave it


def test_files_in_use_are_never_evicted(served: Served, tmp_path: Path) -> None:
    shards = open_index(served.url).shards
    one = Cache(str(tmp_path), shards[0].bytes + shards[1].bytes - 1)
    first = one.open(shards[0])
    assert first is not None
    first.fill(0, first.size)
    assert Cache(str(tmp_path), one.limit).open(shards[1]) is None  # no room: it is streamed
    first.close()
    second = one.open(shards[1])
    assert second is not None
    assert not os.path.exists(one.path_of(shards[0]))
    second.close()


def test_a_shard_above_the_limit_is_streamed(made: Path, served: Served, tmp_path: Path) -> None:
    loader = loader_of(served.url, tmp_path, cache_limit="10KB")
    assert epoch(loader) == epoch(loader_of(str(made), None))
    loader.close()
    assert list(tmp_path.rglob("*.tar*")) == []


# --- ends ------------------------------------------------------------------------------------------------------------

_RUN = """
import sys, wdstrain as wt
loader = wt.Loader(sys.argv[1], batch_size=16, shuffle_buffer=50, cache_dir=sys.argv[2])
print("begun", flush=True)
print(sum(len(batch["__key__"]) for batch in loader))
"""


class _Killer:
    """A fault of a server: whoever asks for shards is killed with the request of this number."""

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
def test_a_kill_at_any_moment_leaves_nothing_partial_under_a_final_name(
    made: Path, tmp_path: Path
) -> None:
    """The process is killed when the server has answered so many requests; another goes on with what is there."""
    wanted = epoch(loader_of(str(made), None))
    blocks = sum(-(-path.stat().st_size // BLOCK) for path in made.glob("*.tar"))
    for moment in (1, 5, 11, blocks - 3, blocks):
        folder = tmp_path / str(moment)
        killer = _Killer(moment)
        with serving(made, faults=[killer] * 100) as server:
            command = [sys.executable, "-c", _RUN, server.url, str(folder)]
            victim = killer.begin(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            out, _ = victim.communicate(timeout=60)
            assert (victim.returncode, out) == (-signal.SIGKILL, "begun\n")
            check_content(folder, made)
            server.faults.clear()
            loader = loader_of(server.url, folder)
            there = blocks_in(folder, loader.index)
            assert len(there) >= moment - 1 - prefetch.THREADS
            server.requests.clear()
            assert epoch(loader) == wanted
            loader.close()
            again = {
                (path, int(span[6:].split("-")[0]) // BLOCK) for path, span in asked(server) if span
            }
            assert not again & there
        check_content(folder, made)
        assert len(whole(folder)) == len(list(made.glob("*.tar")))


@pytest.mark.parametrize("options", ["size=300k", pytest.param("ro", marks=pytest.mark.slow)])
def test_a_disk_that_takes_no_more_degrades_to_streaming_with_one_warning(
    made: Path, served: Served, tmp_path: Path, options: str
) -> None:
    """On a small disk of memory that this process alone sees."""
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


def test_an_impossible_cache_folder_is_an_immediate_error(served: Served, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for options, words in (
        ({"cache_dir": tmp_path / "file"}, "cannot be made"),
        ({"cache_limit": "1GB"}, "Give cache_dir too"),
        ({"cache_dir": tmp_path, "cache_limit": "many"}, "'many' is not a size"),
        ({"cache_dir": tmp_path, "cache_limit": 0}, "cache_limit=0"),
    ):
        with pytest.raises(UsageError, match=words):
            wt.Loader(served.url, **options)


def test_a_shard_of_which_nothing_is_known_is_not_kept(served: Served, tmp_path: Path) -> None:
    shard = open_index(served.url).shards[0]
    assert Cache(str(tmp_path)).open(replace(shard, sha256="")) is None
