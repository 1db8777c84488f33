"""Damage under `wt.WebDataset`: an error by default, and a log line if a handler continues."""

from __future__ import annotations

import gzip
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import webdataset as wds

import wdstrain as wt
from tests.support.foreign_tars import MODES, keys, read_wds, write_members, write_set
from wdstrain.errors import SampleError, ShardError, UsageError, WdstrainError
from wdstrain.shards.tar_headers import header

COMPRESSED = [ending for ending in MODES if ending != ".tar"]


@pytest.fixture
def errors(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """The log lines about errors that a handler skipped."""
    caplog.set_level(logging.WARNING, "wdstrain")
    return lambda: [text for text in caplog.messages if "The handler" in text]


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


@pytest.mark.parametrize("size", [512, 5000, 6144])
def test_a_truncated_shard_raises_and_with_a_handler_delivers_its_intact_samples(
    tmp_path: Path, size: int, errors: Callable[[], list[str]]
) -> None:
    urls = write_set(tmp_path, [4, 4, 4])
    intact = read_wds(urls)
    cut(tmp_path / "part-001.tar", size)
    with pytest.raises(ShardError, match=r"part-001\.tar"):
        wt.WebDataset(urls)
    dataset = wt.WebDataset(urls, handler=wds.ignore_and_continue)
    samples = list(dataset)
    assert samples == intact[: len(samples) - 4] + intact[8:]
    assert len(errors()) == 1
    assert "part-001.tar" in errors()[0]
    assert "The handler skips this error. Errors so far: 1." in errors()[0]


def test_a_missing_shard_raises_and_with_a_handler_is_skipped(
    tmp_path: Path, errors: Callable[[], list[str]]
) -> None:
    urls = write_set(tmp_path, [4, 4, 4])
    (tmp_path / "part-001.tar").unlink()
    with pytest.raises(UsageError, match="no such file"):
        wt.WebDataset(urls)
    samples = keys(wt.WebDataset(urls, handler=wds.ignore_and_continue))
    assert samples == [f"d/s{i:04d}" for i in (0, 1, 2, 3, 8, 9, 10, 11)]
    assert "part-001.tar cannot be opened" in errors()[0]


def test_a_handler_may_warn_or_end_the_pass_or_raise(
    tmp_path: Path, errors: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)  # webdataset waits after a warning
    urls = write_set(tmp_path, [4, 4, 4])
    cut(tmp_path / "part-001.tar", 512)
    with pytest.warns(UserWarning, match=r"ShardError\(.*part-001"):
        assert len(list(wt.WebDataset(urls, handler=wds.warn_and_continue))) == 8
    with pytest.warns(UserWarning, match="part-001"):
        assert len(list(wt.WebDataset(urls, handler=wds.warn_and_stop))) == 4
    assert len(list(wt.WebDataset(urls, handler=wds.ignore_and_stop))) == 4
    assert "The handler ends this pass" in errors()[-1]

    def fail(error: Exception) -> bool:
        raise LookupError("mine") from error

    with pytest.raises(LookupError, match="mine"):
        list(wt.WebDataset(urls, handler=fail))


def indexed(tmp_path: Path) -> tuple[str, Path]:
    """Two shards of 100 samples with checksums. Returns their pattern and the second shard."""
    samples = [{"__key__": f"k{i:03d}", "txt": b"text %03d" % i} for i in range(200)]
    wt.pack(samples, str(tmp_path / "set"), max_shard_samples=100, shuffle=False)
    return f"{tmp_path}/set/*.tar", sorted((tmp_path / "set").glob("*.tar"))[1]


def test_changed_bytes_affect_their_sample(tmp_path: Path, errors: Callable[[], list[str]]) -> None:
    urls, shard = indexed(tmp_path)
    shard.write_bytes(shard.read_bytes().replace(b"text 150", b"text 15?"))
    with pytest.raises(SampleError, match="'k150'"):
        list(wt.WebDataset(urls))
    dataset = wt.WebDataset(urls, handler=wds.ignore_and_continue)
    expected = [f"k{i:03d}" for i in range(200) if i != 150]
    assert [keys(dataset) for _ in range(2)] == [expected] * 2
    assert all("'k150'" in text for text in errors())
    assert len(errors()) == 2


def test_a_shard_truncated_after_it_was_opened_goes_to_the_handler(
    tmp_path: Path, errors: Callable[[], list[str]]
) -> None:
    urls, shard = indexed(tmp_path)
    raising, going_on = wt.WebDataset(urls), wt.WebDataset(urls, handler=wds.ignore_and_continue)
    cut(shard, shard.stat().st_size // 2)
    with pytest.raises(WdstrainError, match=shard.name):
        list(raising)
    samples = keys(going_on)
    assert samples[:100] == [f"k{i:03d}" for i in range(100)]
    assert len(samples) < 200
    assert errors()


def test_select_files_may_raise_to_a_handler(
    tmp_path: Path, errors: Callable[[], list[str]]
) -> None:
    def select(name: str) -> bool:
        if name == "d/s0001.txt":
            raise LookupError(name)
        return True

    for ending in (".tar", ".tgz"):
        urls = write_set(tmp_path / ending, [3], ending)
        with pytest.raises(LookupError):
            list(wt.WebDataset(urls, select_files=select))
        samples = list(wt.WebDataset(urls, select_files=select, handler=wds.ignore_and_continue))
        assert ["txt" in sample for sample in samples] == [True, False, True]
    assert len(errors()) == 2


def test_torn_samples_are_refused(tmp_path: Path, errors: Callable[[], list[str]]) -> None:
    for ending in (".tar", ".tgz"):
        members = [("a.cls", b"0"), ("b.cls", b"1"), ("a.txt", b"2"), ("b.txt", b"3")]
        torn = write_members(tmp_path / f"torn{ending}", members)
        with pytest.raises(ShardError, match="holds members of 'a' in two places"):
            list(wt.WebDataset(torn))
        members = [("a.cls", b"0"), ("a.cls", b"1"), ("b.cls", b"2")]
        twice = write_members(tmp_path / f"twice{ending}", members)
        with pytest.raises(ShardError, match="holds two members named 'a.cls'"):
            list(wt.WebDataset(twice))
        for shard, errors_in_it in ((torn, 2), (twice, 1)):
            before = len(errors())
            going_on = {"handler": wds.ignore_and_continue}
            assert list(wt.WebDataset(shard, **going_on)) == read_wds(shard, **going_on)
            assert len(errors()) == before + errors_in_it


@pytest.mark.parametrize("ending", COMPRESSED)
def test_compressed_shards_are_streamed_and_logged_once(
    tmp_path: Path, ending: str, caplog: pytest.LogCaptureFixture
) -> None:
    urls = write_set(tmp_path, [7, 13, 1], ending)
    dataset = wt.WebDataset(urls)
    assert [list(dataset) for _ in range(2)] == [read_wds(urls)] * 2
    (note,) = [text for text in caplog.messages if "compressed" in text]
    assert f"without an index, because {tmp_path}/part-000{ending} is compressed" in note
    assert "no pass can be resumed" in note


def test_a_compressed_shard_is_recognized_by_its_bytes(tmp_path: Path) -> None:
    expected = keys(read_wds(write_set(tmp_path, [3], ".tgz")))
    (tmp_path / "part-000.tgz").rename(tmp_path / "x.tar")
    assert keys(wt.WebDataset(f"{tmp_path}/x.tar")) == expected
    shard = write_members(tmp_path / "y.tar", [("BZh91AY&SY.cls", b"0"), ("b.cls", b"1")])
    assert keys(wt.WebDataset([shard, shard])) == ["BZh91AY&SY", "b"] * 2


@pytest.mark.parametrize("ending", COMPRESSED)
def test_a_truncated_compressed_shard_raises_at_any_length(
    tmp_path: Path, ending: str, errors: Callable[[], list[str]]
) -> None:
    urls = write_set(tmp_path, [30, 30], ending)
    intact = read_wds(urls)
    second = tmp_path / f"part-001{ending}"
    data = second.read_bytes()
    for share in (0, 1, 4, 7):
        second.write_bytes(data[: len(data) * share // 8])
        with pytest.raises(ShardError, match=f"part-001{ending}"):
            list(wt.WebDataset(urls))
        before = len(errors())
        samples = list(wt.WebDataset(urls, handler=wds.ignore_and_continue))
        assert samples == intact[: len(samples)]
        assert 30 <= len(samples) < 60
        assert len(errors()) == before + 1


def test_a_tar_truncated_before_compression_is_an_error(tmp_path: Path) -> None:
    write_set(tmp_path, [8])
    plain = (tmp_path / "part-000.tar").read_bytes()
    shard = tmp_path / "x.tgz"
    for size in range(0, 16 * 1024 + 512, 512):  # tarfile accepts these
        shard.write_bytes(gzip.compress(plain[:size], 1))
        with pytest.raises(ShardError, match=r"x\.tgz ends at (byte|offset)"):
            list(wt.WebDataset(str(shard)))
    shard.write_bytes(gzip.compress(plain + plain, 1))
    with pytest.raises(ShardError, match="has data after its end"):
        list(wt.WebDataset(str(shard)))


def test_other_files_than_tars_are_errors(tmp_path: Path) -> None:
    for name, data, message in (
        ("x.tgz", gzip.compress(header("a.bin", 1 << 33)), "ends at byte"),
        ("x.tgz", gzip.compress(header("a.bin", 1 << 60)), "more than this machine has"),
        ("x.tar", b"PK\x03\x04" + bytes(2000), "is a zip file, not a plain tar"),
    ):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ShardError, match=message):
            list(wt.WebDataset(str(tmp_path / name)))
