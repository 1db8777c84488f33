"""A replaced shard on a server is never read with the keys of the old shard, for any headers."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import wdstrain as wt
from tests.support.foreign_tars import write_members
from tests.support.readers import by_key
from tests.support.servers import Handler, Served, serving
from wdstrain.errors import ShardError

SAYS = ("strong", "weak", "modified", "nothing")
FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


def content(number: int, size: int) -> bytes:
    return (f"<{number}>" * size).encode()[:size]


def put(
    folder: Path, first: int, sizes: list[int], *, at: int, keys: int | None = None, **how: Any
) -> None:
    """Write a tar of samples that hold their number repeatedly; all tars have one size.

    at: modification time. keys: first number of the keys (default: `first`).
    """
    write_numbers(folder / "new.tar", first, sizes, first if keys is None else keys, **how)
    os.utime(folder / "new.tar", (at, at))
    os.replace(folder / "new.tar", folder / "a.tar")


def write_numbers(
    path: Path, first: int, sizes: list[int], keys: int, kind: str = "ustar", long: str = ""
) -> None:
    members = [
        (f"{long}k{number + keys}.{field}", content(number + first, size))
        for number, size in enumerate(sizes)
        for field in ("txt", "name")
    ]
    write_members(path, members, format=FORMATS[kind])


def delivered(loader: wt.Loader) -> dict[str, bytes]:
    with loader:
        return by_key(loader, "txt")


@pytest.fixture
def www(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    return tmp_path / "www"


@pytest.fixture(params=SAYS)
def server(request: pytest.FixtureRequest, www: Path) -> Iterator[Served]:
    with serving(www, says=request.param) as served:
        yield served


@pytest.mark.parametrize("cached", [False, True])
def test_a_cached_scan_of_a_shard_is_not_used_for_its_replacement(
    server: Served, www: Path, cached: bool
) -> None:
    options = {"cache_dir": www.parent / "cache"} if cached else {}
    other = (2, 50, [300, 100, 200])
    for at, first, sizes in ((1, 0, [100, 200, 300]), other, other):
        put(www, first, sizes, at=at)
        actual = delivered(wt.Loader(f"{server.url}/a.tar", batch_size=3, **options))
        assert actual == {f"k{n}": content(n, size) for n, size in enumerate(sizes, first)}


@pytest.mark.parametrize("sizes", [[300, 100, 200], [100, 200, 300]])
@pytest.mark.parametrize("cached", [False, True])
def test_a_shard_replaced_after_it_was_opened_raises(
    server: Served, www: Path, cached: bool, sizes: list[int]
) -> None:
    put(www, 0, [100, 200, 300], at=1)
    options = {"cache_dir": www.parent / "cache"} if cached else {}
    loader = wt.Loader(f"{server.url}/a.tar", batch_size=3, **options)
    put(www, 50, sizes, at=2)
    words = r"a.tar (changed while it was read|was replaced since it was opened).*Start again"
    with pytest.raises(ShardError, match=words):
        delivered(loader)


@pytest.mark.parametrize("says", ["strong", "weak", "modified"])
@pytest.mark.parametrize("closed", [False, True])
def test_a_replacement_with_other_data_raises_in_the_next_epoch(
    www: Path, says: str, closed: bool
) -> None:
    """The set has an index without checksums."""
    put(www, 0, [100, 200, 300], at=1)
    wt.index(www)
    with serving(www, says=says) as served:
        loader = wt.Loader(served.url, batch_size=3)
        batches = loader.epoch(0, until=1)
        assert next(batches)["txt"]
        if closed:
            loader.close()
        put(www, 50, [100, 200, 300], at=2, keys=0)
        with closing(loader), pytest.raises(ShardError, match="changed while it was read"):
            next(loader.epoch(1))
        reread = delivered(wt.Loader(served.url, batch_size=3))
        assert sorted(reread.values()) == [content(50, 100), content(51, 200), content(52, 300)]


def test_a_local_shard_that_is_written_over_raises_in_the_next_epoch(www: Path) -> None:
    """The set has an index without checksums, and the file keeps its number and size."""
    put(www, 0, [100, 200, 300], at=1)
    wt.index(www)
    with wt.Loader(www, batch_size=3) as loader:
        assert next(iter(loader.epoch(0, until=1)))["txt"]
        loader.close()
        put(www.parent / "other", 50, [100, 200, 300], at=2, keys=0)
        (www / "a.tar").write_bytes((www.parent / "other" / "a.tar").read_bytes())
        with pytest.raises(ShardError, match="was written to or replaced"):
            next(iter(loader.epoch(1)))


@pytest.mark.parametrize("long", ["", "folder/" * 20])
@pytest.mark.parametrize("kind", list(FORMATS))
def test_headers_of_every_kind_identify_the_shard(www: Path, kind: str, long: str) -> None:
    sizes = [0, 1, 511, 512, 513, 70_000, 200_000]
    put(www, 7, sizes, at=1, kind=kind, long=long)
    with serving(www, says="nothing") as served:
        actual = delivered(wt.Loader(f"{served.url}/a.tar", batch_size=2, tail="keep"))
    assert actual == {f"{long}k{n}": content(n, size) for n, size in enumerate(sizes, 7)}


@pytest.mark.parametrize("age", [-9, 0, 1])
def test_a_modification_time_is_not_used_within_a_second_of_the_response(
    www: Path, age: int
) -> None:
    """A file may change within a second. The clock stands, so slow machines see the same ages."""

    def stop_clock(handler: Handler, path: Path, start: int, stop: int) -> bool:
        date = handler.date_time_string(2_000_000_000 + age)
        handler.date_time_string = lambda timestamp=None: date  # type: ignore[method-assign]
        return False

    with serving(www, says="modified", faults=[stop_clock] * 100) as served:
        for first, sizes in ((0, [100, 200, 300]), (50, [300, 100, 200])):
            put(www, first, sizes, at=2_000_000_000)
            actual = delivered(
                wt.Loader(f"{served.url}/a.tar", batch_size=3, cache_dir=www.parent / "cache")
            )
            assert actual == {f"k{n}": content(n, size) for n, size in enumerate(sizes, first)}


def test_shards_that_differ_only_in_their_query_have_two_cache_entries(www: Path) -> None:
    """A server may form ETags from time and size, which two files can have in common."""
    sizes = [100, 200, 300]
    for folder, first in ((www, 0), (www / "x", 0), (www / "y", 50)):
        put(folder, first, sizes, at=1, keys=0)

    def answer(handler: Handler, path: Path, start: int, stop: int) -> bool:
        data = (www / handler.path[-1] / "a.tar").read_bytes()
        ranged = handler.headers.get("Range") is not None
        span = {"Content-Range": f"bytes {start}-{stop - 1}/{len(data)}"} if ranged else {}
        handler.answer(206 if ranged else 200, data[start:stop], {"ETag": 'W/"1"', **span})
        return True

    with serving(www, faults=[answer] * 100) as served:
        for name, first in (("x", 0), ("y", 50)):
            url, cache = f"{served.url}/a.tar?set={name}", www.parent / "cache"
            actual = delivered(wt.Loader(url, batch_size=3, cache_dir=cache))
            assert actual == {f"k{n}": content(n + first, size) for n, size in enumerate(sizes)}
