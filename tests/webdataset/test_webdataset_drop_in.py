"""`wt.WebDataset` delivers the samples of `wds.WebDataset` and takes its arguments."""

from __future__ import annotations

import gc
import inspect
import random
import tarfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import webdataset as wds

import wdstrain as wt
from tests.support.foreign_tars import keys, read_wds, write_members, write_set
from tests.support.servers import serving
from wdstrain.errors import UsageError


@pytest.fixture
def urls(tmp_path: Path) -> str:
    """Three shards of 7, 13 and 1 samples, as a brace pattern."""
    return write_set(tmp_path / "set", [7, 13, 1])


def test_it_is_a_pipeline_of_webdataset_with_its_own_fluid_methods(urls: str) -> None:
    dataset = wt.WebDataset(urls, shardshuffle=False)
    assert isinstance(dataset, wds.DataPipeline)
    assert isinstance(dataset, wds.WebDataset)
    for name, method in inspect.getmembers(wds.compat.FluidInterface, inspect.isfunction):
        assert getattr(wt.WebDataset, name) is method
    changed = dataset.decode().rename(text="txt").to_tuple("__key__", "text").batched(3)
    assert [text for batch in changed for text in batch[1]] == [f"text {i}" for i in range(21)]


def test_it_takes_every_argument_of_webdataset_in_the_same_order() -> None:
    reference = inspect.signature(wds.WebDataset.__init__).parameters
    assert list(inspect.signature(wt.WebDataset.__init__).parameters) == list(reference)


FIELDS = ["jpg", "JPG2", "cls", "a.json", "seg.png", "", "TXT", "x.y.z", "npy"]
NOTES = ["README{}", "__n{}__", "__n{}__.json", "__n{}__/x.json", "__n{}/x__", "__{}.x__"]
BASES = ["k", "K", "a/b", "a.b/c", "ü", "x y", "-", "a/./b", "__x", "_"]


def random_shard(path: Path, random: random.Random) -> str:
    """Write a shard of odd names, sizes and members that belong to no sample."""
    members = []
    formats = (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)
    for number in range(random.choice([0, 1, 2, 7, 30])):
        base = f"{random.choice(BASES)}{number}"
        if random.random() < 0.1:
            base = f"same{number}"  # the same key in several shards
        if random.random() < 0.1:
            members.append((f"dir{number}/", b""))
        if random.random() < 0.1:
            members.append((random.choice(NOTES).format(number), b"x"))
        if random.random() < 0.1:
            members.append((f"{base}.__bad__", b"1"))
        for field in random.sample(FIELDS, random.randint(1, 4)):
            members.append((f"{base}.{field}", random.randbytes(random.choice([0, 1, 512, 513]))))
    return write_members(path, members, format=random.choice(formats))


@pytest.mark.parametrize("seed", range(12))
def test_random_shards_are_read_as_by_webdataset(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    endings = [".tar"] if draw.random() < 0.7 else [".tar", ".tgz", ".tar.xz"]
    shards = [
        random_shard(tmp_path / f"s{i}{draw.choice(endings)}", draw)
        for i in range(draw.randint(1, 5))
    ] * draw.choice([1, 1, 1, 3])  # a shard may be named several times
    options: dict[str, Any] = {"empty_check": False}
    if draw.random() < 0.2:
        options["select_files"] = lambda name: not name.endswith(".cls")
    if draw.random() < 0.2:
        options["rename_files"] = lambda name: name.replace("seg.png", "png")
    expected = read_wds(shards, **options)
    dataset = wt.WebDataset(shards, **options)
    assert list(dataset) == expected
    shuffled = list(wt.WebDataset(shards, shardshuffle=10, seed=seed, **options).shuffle(5))
    order = [(s["__key__"], s["__url__"]) for s in expected]
    assert sorted((s["__key__"], s["__url__"]) for s in shuffled) == sorted(order)


def test_addresses_are_those_of_webdataset_folders_globs_and_indexes(
    urls: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WDS_HERE", str(tmp_path / "set"))
    address = "${HERE}/part-000.tar::${HERE}/part-{001..002}.tar"
    assert list(wt.WebDataset(address)) == read_wds(address) == read_wds(urls)
    wt.index(str(tmp_path / "set"))
    folder = tmp_path / "set"
    for other in (f"file:{urls}", folder, folder / "*.tar", folder / "index.json"):
        assert keys(wt.WebDataset(other)) == keys(read_wds(urls))


def test_wrong_addresses_and_arguments_raise_at_construction() -> None:
    """A command is refused and never run."""
    never = "never run as a command. Name the file or the"
    refused: list[tuple[Any, dict[str, Any], str]] = [
        *((f"pipe:{command}", {}, never) for command in ("cat x.tar", "cat $(ls); touch x", "")),
        ("nothing.tar", {}, "nothing.tar: there is no such file"),
        ([], {}, "no address of shards"),
        (7, {}, "urls=7: must be an address"),
        ("sftp://host/x.tar", {}, "addresses sftp:// cannot be read"),
        ("x.tar", {"mode": "unlink"}, "mode='unlink': must be None or \"resampled\""),
        ("${NOWHERE}/x.tar", {}, "WDS_NOWHERE is not in the environment"),
    ]
    for urls, options, message in refused:
        with pytest.raises(UsageError, match=message):
            wt.WebDataset(urls, **options)


def test_shardshuffle_permutes_all_shards_in_each_epoch(tmp_path: Path) -> None:
    urls = write_set(tmp_path, [3] * 12)
    dataset = wt.WebDataset(urls, shardshuffle=2, seed=1)
    epochs = [keys(dataset) for _ in range(3)]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert all(sorted(epoch) == keys(read_wds(urls)) for epoch in epochs)
    for epoch in epochs:  # whole shards: three samples in their order
        assert all(int(epoch[i][3:]) + 1 == int(epoch[i + 1][3:]) for i in range(0, 36, 3))
    dataset.set_epoch(0)
    assert keys(dataset) == epochs[0]
    assert keys(wt.WebDataset(urls, shardshuffle=True, seed=2)) != epochs[0]


def test_the_seed_comes_from_the_environment(urls: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert wt.WebDataset(urls).seed == 0
    monkeypatch.setenv("WDS_SEED", "5")
    assert wt.WebDataset(urls).seed == 5
    assert wt.WebDataset(urls, seed=7).seed == 7


def test_repeat_and_epochs_count_samples_as_in_webdataset(urls: str) -> None:
    assert len(list(wt.WebDataset(urls).with_epoch(50))) == 50
    assert len(list(wt.WebDataset(urls).repeat(2).with_epoch(5))) == 5
    assert len(wt.WebDataset(urls).with_length(8, silent=True).with_epoch(3)) == 8
    with pytest.warns(UserWarning, match=r"Use \.repeat\(\)"):
        assert len(list(wt.WebDataset(urls, repeat=True))) == 21


def test_an_empty_set_is_an_error_unless_it_is_allowed(tmp_path: Path) -> None:
    shard = write_members(tmp_path / "empty.tar", [])
    with pytest.raises(ValueError, match="No samples found in dataset"):
        list(wt.WebDataset(shard))
    assert list(wt.WebDataset(shard, empty_check=False)) == []


def test_passes_at_the_same_time_do_not_disturb_each_other(urls: str) -> None:
    dataset = wt.WebDataset(urls)
    pairs = list(zip(dataset, dataset.to_tuple("__key__"), strict=True))
    assert len(pairs) == 21
    assert all(sample["__key__"] == key for sample, (key,) in pairs)


@pytest.mark.parametrize("ending", [".tar", ".tgz"])
@pytest.mark.parametrize("is_remote", [False, True])
@pytest.mark.parametrize("has_cache", [False, True])
def test_samples_have_the_entries_of_webdataset(
    is_remote: bool, has_cache: bool, ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    write_set(tmp_path / "set", [7, 13, 1], ending)
    with serving(tmp_path / "set") as served:
        folder = served.url if is_remote else tmp_path / "set"
        passes = []
        for kind in (wds.WebDataset, wt.WebDataset, wt.WebDataset):
            cache = tmp_path / f"cache-{kind.__module__}"
            options = {"cache_dir": str(cache), "cache_size": 1 << 30} if has_cache else {}
            cache.mkdir(exist_ok=True)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ResourceWarning)
                dataset = kind(f"{folder}/part-{{000..002}}{ending}", shardshuffle=False, **options)
                samples = list(dataset)
                dataset.close()
                gc.collect()
            paths = [str(sample.pop("__local_path__", "")) for sample in samples]
            kept = [path.startswith(str(cache)) and Path(path).is_file() for path in paths]
            passes.append((samples, kept, [bool(path) for path in paths]))
    assert passes[1] == passes[2] == passes[0]
    assert passes[1][1] == [has_cache and is_remote] * 21


def test_remote_shards_without_an_index_are_streamed_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is read before the first sample is requested. The log names the missing promises."""
    write_set(tmp_path / "set", [2] * 6)
    with serving(tmp_path) as server:
        address = f"{server.url}/set/part-{{000..005}}.tar"
        dataset = wt.WebDataset(address)
        assert not [path for path, _ in server.requests if path.endswith(".tar")]
        assert "has no index beside it (wdstrain index makes one)" in caplog.text
        assert "no pass can be resumed" in caplog.text
        sample = next(iter(dataset))
        assert sample["__key__"] == "d/s0000"
        assert len({path for path, _ in server.requests if path.endswith(".tar")}) == 1
        wt.index(str(tmp_path / "set"))
        caplog.clear()
        assert keys(wt.WebDataset(address)) == [f"d/s{i:04d}" for i in range(12)]
        assert "Whole shards" not in caplog.text


def test_the_headers_that_a_pass_read_are_an_index_for_the_next_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    urls, expected = write_set(tmp_path / "set", [2] * 6), [f"d/s{i:04d}" for i in range(12)]
    with serving(tmp_path) as server:
        address = urls.replace(str(tmp_path), server.url)
        selected = wt.WebDataset(address, select_files=lambda name: name.endswith(".txt"))
        assert keys(selected) == expected
        caplog.clear()
        index = wt.open(address)
        assert index.keys(range(12)) == expected
        assert index.fields == ("cls", "txt")
        assert keys(wt.WebDataset(address)) == expected
        assert "scanned" not in caplog.text
        assert "Whole shards" not in caplog.text
