"""An index lists the samples of shards, round-trips through files, and is validated when read."""

from __future__ import annotations

import json
import os
import tarfile
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wdstrain as wt
from tests.conftest import write_shards, write_tar
from tests.support.servers import serving
from wdstrain.errors import ShardError, UsageError
from wdstrain.shards.resolve import open_index
from wdstrain.storage.addresses import expand


def test_unindexed_shards_are_scanned_and_what_is_no_sample_is_logged(shards: Path) -> None:
    """A second name of a file, which GNU tar stores as a hard link without data, is named."""
    with tarfile.open(shards / "part-002.tar", "a") as tar:
        member = tarfile.TarInfo("b.txt")
        member.type, member.linkname = tarfile.LNKTYPE, "s000020.txt"
        tar.addfile(member)
    reported: list[str] = []
    assert open_index(str(shards), note=reported.append).counts.tolist() == [7, 13, 1]
    assert "Passed over, no part of any sample: 1 times a link or device" in reported[0]


def scanned_samples(urls: Any) -> int:
    reported: list[str] = []
    open_index(urls, note=reported.append)
    return int(reported[0].split("headers of ")[1].split()[0]) if reported else 0


def test_a_scan_is_cached_and_only_changed_shards_rescanned(shards: Path, tmp_path: Path) -> None:
    names = ["part-000.tar", "part-001.tar", "", "", "part-001.tar"]
    assert [scanned_samples(shards / name) for name in names] == [7, 13, 1, 0, 0]
    before = open_index(shards)
    write_shards(tmp_path / "other", [5])
    os.replace(tmp_path / "other" / "part-000.tar", shards / "part-001.tar")
    assert [scanned_samples(shards), scanned_samples(shards)] == [5, 0]
    after = open_index(shards)
    assert after.counts.tolist() == [7, 5, 1]
    assert after.fingerprint != before.fingerprint
    assert [after.key(i) for i in (6, 7, 12)] == ["s000006", "s000000", "s000020"]
    os.utime(shards / "part-000.tar", ns=(1, 1))
    assert scanned_samples(shards) == 7


@pytest.mark.parametrize("damage", [b"", b"x" * 100, None])
def test_a_cached_scan_is_validated_and_repeated_where_it_cannot_be_cached(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: bytes | None
) -> None:
    """damage: None for a file in the way of the cache."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    if damage is None:
        cache.write_text("in the way")
    scanned_samples(shards)
    for stored in cache.rglob("*.arrow") if damage is not None else ():
        stored.write_bytes(damage)
    second = 0 if damage is not None else 21
    assert [scanned_samples(shards), scanned_samples(shards)] == [21, second]


def test_processes_that_start_together_share_one_scan(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    reported: list[str] = []
    barrier = threading.Barrier(3)

    def start() -> int:
        barrier.wait(30)
        return len(open_index(f"{server.url}/part-{{000..002}}.tar", note=reported.append))

    with serving(shards, delay=0.1) as server, ThreadPoolExecutor(3) as threads:
        counts = [future.result(60) for future in [threads.submit(start) for _ in range(3)]]
    assert counts == [21] * 3
    assert len([line for line in reported if "scanned the headers of 21 samples" in line]) == 1
    assert all("wdstrain index" in line for line in reported)


def test_every_kind_of_address_names_the_same_shards(shards: Path) -> None:
    paths = [str(path) for path in sorted(shards.glob("*.tar"))]
    odd = str(write_tar(shards.parent / "a{0..3}*.tar", [("k", {"txt": b"1"})]))
    assert expand(odd) == [odd]
    for urls in (
        shards,
        f"{shards}/part-*.tar",
        f"{shards}/part-{{000..002}}.tar",
        f"file://{shards}",
        [shards / "part-000.tar", f"{shards}/part-00[12].tar"],
    ):
        assert expand(urls) == paths
    wt.index(shards)
    for indexed in (str(shards), shards / "index.json", paths, f"{shards}/*.tar"):
        assert [shard.path for shard in open_index(indexed).shards] == paths


@pytest.mark.parametrize(
    ("addresses", "words"),
    [
        (["nothing/here"], "there is no such file or folder"),
        (["{empty}"], "holds no index.json and no .tar"),
        (["{empty}/*.tar"], "no file matches this pattern"),
        (["{empty}/a-{{0..2}}.tar"], "a-0.tar: there is no such file"),
        (["ftp://host/x.tar"], "ftp:// cannot be read"),
        ([], "no address"),
    ],
)
def test_an_address_without_shards_or_with_two_of_one_is_an_error(
    shards: Path, tmp_path: Path, addresses: list[str], words: str
) -> None:
    (tmp_path / "empty").mkdir()
    given = [address.format(empty=tmp_path / "empty", shards=shards) for address in addresses]
    with pytest.raises(UsageError, match=words):
        open_index(given)


def test_shards_that_were_cut_lost_or_never_finished_are_refused(shards: Path) -> None:
    size = (shards / "part-001.tar").stat().st_size
    wt.index(shards)
    os.truncate(shards / "part-001.tar", size - 1024)
    with pytest.raises(ShardError, match="part-001.tar has 26624 bytes, its index says"):
        open_index(shards)
    (shards / "index.json").rename(shards / "away.json")
    with pytest.raises(ShardError, match="part-001.tar ends at byte .* without the two zero"):
        open_index(shards)
    (shards / "away.json").rename(shards / "index.json")
    (shards / "part-001.tar").unlink()
    with pytest.raises(ShardError, match="part-001.tar is in the index but cannot be found"):
        open_index(shards)


def test_a_folder_of_an_unfinished_conversion_is_refused(shards: Path) -> None:
    (shards / ".unfinished").mkdir()
    for urls in (shards, shards / "part-000.tar"):
        with pytest.raises(ShardError, match="not finished"):
            open_index(urls)


def set_splits(folder: Path, **splits: str) -> None:
    """Index a folder, and write splits of shards, by their names without endings, to the index."""
    wt.index(folder)
    document = json.loads((folder / "index.json").read_text())
    for row in document["shardlist"]:
        row["split"] = splits.get(row["url"].removesuffix(".tar").replace("-", "_"), "")
    (folder / "index.json").write_text(json.dumps(document))


def test_indexing_again_takes_changed_shards_and_keeps_splits(shards: Path, tmp_path: Path) -> None:
    set_splits(shards, part_000="val")
    write_shards(tmp_path / "other", [3])
    (tmp_path / "other" / "part-000.tar").rename(shards / "part-003.tar")
    index = wt.index(shards)
    assert index.counts.tolist() == [7, 13, 1, 3]
    assert [shard.split for shard in index.shards] == ["val", "", "", ""]
    assert wt.index(shards / "part-001.tar").counts.tolist() == [7, 13, 1, 3]


def test_an_index_of_two_folders_is_refused(shards: Path, tmp_path: Path) -> None:
    write_shards(tmp_path / "other", [3])
    with pytest.raises(UsageError, match="2 folders"):
        wt.index([shards, tmp_path / "other"])


def test_a_set_with_several_splits_needs_the_name_of_one(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "s", [3, 4])
    set_splits(folder, part_000="train", part_001="val")
    words = r"several splits: train, val. Name one .*part-000.tar, \S*part-001.tar"
    for urls in (folder, [folder], folder / "index.json", f"{folder}/*.tar"):
        with pytest.raises(UsageError, match=words):
            wt.Loader(urls)
    both = [folder / "part-000.tar", folder / "part-001.tar"]
    assert len(wt.Loader(both, batch_size=1)) == 7


def test_an_index_json_of_another_tool_is_ignored(shards: Path) -> None:
    (shards / "index.json").write_text(
        '{"__kind__": "wids-shard-index-v1", "shardlist": [{"url": "part-000.tar", "nsamples": 9}]}'
    )
    for urls in (shards, shards / "index.json", f"{shards}/*.tar"):
        assert open_index(urls).counts.tolist() == [7, 13, 1]
    assert wt.verify(shards).ok
    assert wt.index(shards).counts.tolist() == [7, 13, 1]


@pytest.mark.parametrize(
    "change",
    [
        lambda document: document.pop("shardlist"),
        lambda document: document["shardlist"][0].update(nsamples=-1),
        lambda document: document["shardlist"][0].update(filesize=2**70),
        lambda document: document["wdstrain"].pop("info"),
        lambda document: document["wdstrain"].update(version=1),
        '{"wdstrain": 3}',
        "nul",
        "[" * 100_000,
    ],
    ids=range(8),
)
def test_json_that_is_no_index_is_refused(shards: Path, change: Any) -> None:
    wt.index(shards)
    document = json.loads((shards / "index.json").read_text())
    text = change if isinstance(change, str) else (change(document), json.dumps(document))[1]
    (shards / "index.json").write_text(text)
    with pytest.raises(
        ShardError, match=r"index.json.*(is not an index of this pack|wdstrain index)"
    ):
        open_index(shards)


@pytest.mark.parametrize("spelling", ["shards", "{}", "folder", "link.tar"])
@pytest.mark.parametrize("indexed", [False, True])
def test_a_shard_under_two_names_is_refused(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spelling: str, indexed: bool
) -> None:
    if indexed:
        wt.index(shards)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").symlink_to(shards)
    (tmp_path / "link.tar").symlink_to(shards / "part-000.tar")
    with pytest.raises(UsageError, match="is named twice .also as shards/part-000.tar"):
        wt.Loader(["shards", spelling.format(shards)], batch_size=1)


# --- shards that were replaced after they were indexed ---


@pytest.mark.parametrize("how", ["written", "moved"])
def test_a_shard_that_was_replaced_after_indexing_is_refused(tmp_path: Path, how: str) -> None:
    samples = [(f"s{i:02d}", {"txt": f"{i:02d}".encode()}) for i in range(8)]
    other = write_tar(tmp_path / "other" / "a.tar", samples[::-1])
    shard = write_tar(tmp_path / "set" / "a.tar", samples)
    wt.index(tmp_path / "set")
    if how == "moved":
        os.replace(other, shard)
    else:
        shard.write_bytes(other.read_bytes())
    words = "a.tar holds other samples than its index says.*wdstrain index"
    with pytest.raises(ShardError, match=words):
        wt.Loader(tmp_path / "set", batch_size=4)
    wt.index(tmp_path / "set")
    with closing(wt.Loader(tmp_path / "set", {"txt": wt.text()}, batch_size=4)) as loader:
        for batch in loader:
            assert batch["__key__"] == [f"s{text}" for text in batch["txt"]]


# --- checksums, shard by shard ---


def damaged_set(folder: Path) -> tuple[Path, Path, str]:
    """Return a packed set with one changed byte in an array, a foreign set of the same fields, and
    the key of the changed sample.
    """
    arrays = [np.full((64, 64), number, np.uint8) for number in range(12)]
    rows = ({"__key__": f"p{n}", "npy": array} for n, array in enumerate(arrays))
    index = wt.pack(rows, folder / "packed", max_shard_samples=4)
    foreign = [(f"f{n}", {"npy": index[f"p{n}"]["npy"]}) for n in range(4)]
    write_tar(folder / "foreign" / "a.tar", foreign)
    ((_, offset, size),) = index.members(6)
    with open(index.shards[1].path, "r+b") as file:
        file.seek(offset + size - 9)
        file.write(b"\xff")
    return folder / "packed", folder / "foreign", index.key(6)


@pytest.mark.parametrize("shape", [None, (64, 64)])
@pytest.mark.parametrize("how", ["joined", "mixture", "indexed twice"])
def test_a_packed_shard_keeps_its_checksums_beside_foreign_shards(
    tmp_path: Path, how: str, shape: Any
) -> None:
    packed, foreign, key = damaged_set(tmp_path)
    if how == "indexed twice":
        os.rename(foreign / "a.tar", packed / "a.tar")
        wt.index(packed)
        wt.index(packed)
    urls = [foreign, packed] if how == "joined" else sorted(packed.glob("*.tar"))

    def loader(**options: Any) -> wt.Loader:
        array = wt.array("npy", shape=shape, dtype="uint8") if shape else wt.array("npy")
        options |= {"fields": {"x": array}, "batch_size": 4}
        if how == "mixture":
            return wt.mix({"a": packed, "b": foreign}, weights={"a": 3, "b": 1}, **options)
        return wt.Loader(urls, **options)

    with pytest.raises(wt.SampleError, match=f"'{key}'.*not those that were packed"):
        list(loader())
    with closing(loader(on_error="replace", max_errors=1.0)) as replacing:
        assert sum(len(batch["__key__"]) for batch in replacing) == 16
        assert [item["key"] for item in replacing.report()["bad_samples"]] == [key]


def test_a_rebuilt_index_counts_samples(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "set"
    rows = ({"__key__": f"s{i}", "cls": i % 2} for i in range(20))
    options: dict[str, Any] = {"classes": ["cat", "dog"], "split": {"train": 0.8, "val": 0.2}}
    before = wt.pack(rows, folder, shuffle=False, **options).info["samples"]
    assert wt.index(folder).info["samples"] == before
    more = [("x", {"cls": b"1"}), ("y", {"txt": b"no label"}), ("z", {"cls": b"1"})]
    write_tar(folder / "more.tar", more)
    with caplog.at_level("WARNING", "wdstrain"):
        assert wt.index(folder).info["samples"] == {"": {"dog": 2, "": 1}, **before}
    numbers = "Numbers in their cls are class numbers of this set: 0 cat, 1 dog"
    assert f"more.tar. {numbers}" in caplog.text
    os.unlink(folder / "val-000000.tar")
    expected = {"": {"dog": 2, "": 1}, "train": before["train"]}
    assert wt.index(folder).info["samples"] == expected


def test_read_yields_the_chosen_fields_in_the_order_of_the_ids(shards: Path) -> None:
    """Samples that lie together on a server are read by few requests."""
    index = wt.index(shards)
    samples = [(number, index[number]) for number in range(21)]
    for ids in ([20, 3, 3, 7], range(21), []):
        for fields in (None, ["txt"], ["cls", "absent"]):
            expected = [
                (n, {k: v for k, v in samples[n][1].items() if k in (fields or index.fields)})
                for n in ids
            ]
            assert list(index.read(ids, fields)) == expected
    with serving(shards) as server:
        far = wt.open(server.url)
        server.requests.clear()
        assert list(far.read(range(21))) == list(index.read(range(21)))
        assert len(server.requests) == 3
