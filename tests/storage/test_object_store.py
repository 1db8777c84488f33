"""Sets in a bucket: written whole or not at all, read as from the disk. Against a real S3 server on the loopback.

It answers what is asked at gs:// as well, since Google's XML requests are S3's but for authentication and metadata.
"""

from __future__ import annotations

import json
import logging
import os
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wdstrain as wt
from tests.conftest import write_class_folder
from tests.support.foreign_tars import write_set
from tests.support.servers import Served, cut, fine, serving, status
from wdstrain.cli import main
from wdstrain.errors import ShardError, StorageError, UsageError
from wdstrain.storage import object_store, prefetch
from wdstrain.storage.object_store import list_folder_of, put, read_object

server = pytest.importorskip("moto.server", reason="moto is not installed")
pytest.importorskip("obstore", reason="obstore is not installed: pip install 'wdstrain[s3]'")

NAMELESS = ("client_email", "private_key", "private_key_id")  # of a service account


@pytest.fixture(params=["s3", "gs"])
def bucket(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[str]:
    """The address of an empty bucket."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    running = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    url = f"http://{host}:{port}"
    amazon = {
        "AWS_ACCESS_KEY_ID": "hush-id",
        "AWS_SECRET_ACCESS_KEY": "hush-secret",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": url,
    }
    google = {
        "GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(
            {"gcs_base_url": url, "disable_oauth": True} | dict.fromkeys(NAMELESS, "")
        ),
        "GOOGLE_BEARER_TOKEN": "hush-token",
    }
    for name in [
        name for name in os.environ if name.startswith(("AWS_", "GOOGLE_"))
    ]:  # nothing of this machine's
        monkeypatch.delenv(name)
    for name, value in (amazon if request.param == "s3" else google).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    object_store._store.cache_clear()
    urllib.request.urlopen(urllib.request.Request(f"{url}/bucket", method="PUT")).close()
    yield f"{request.param}://bucket"
    object_store._store.cache_clear()
    urllib.request.urlopen(urllib.request.Request(f"{url}/moto-api/reset", method="POST")).close()
    running.stop()


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return write_class_folder(tmp_path / "in", {"cat": 30, "dog": 30}, "jpg")


def stored(address: str) -> dict[str, bytes]:
    return {name: read_object(f"{address}/{name}") or b"" for name in list_folder_of(f"{address}/")}


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("ending", [".tar", ".tgz"])
def test_webdatasets_interface_reads_from_a_bucket(
    bucket: str, tmp_path: Path, ending: str
) -> None:
    urls = write_set(tmp_path / "set", [7, 13, 1], ending)
    for path in (tmp_path / "set").glob(f"*{ending}"):
        put(f"{bucket}/set/{path.name}", str(path), "")
    dataset = wt.WebDataset(f"{bucket}/set/part-{{000..002}}{ending}").decode().to_tuple("txt")
    assert list(dataset) == list(wt.WebDataset(urls).decode().to_tuple("txt"))
    dataset.close()


def test_a_set_in_a_bucket_is_that_on_the_disk_and_trains_alike(
    bucket: str, photos: Path, tmp_path: Path
) -> None:
    split = {"train": 0.7, "val": 0.3}
    index = wt.pack_folder(str(photos), f"{bucket}/set/photos", split=split, shard_samples=10)
    wt.pack_folder(str(photos), str(tmp_path / "here"), split=split, shard_samples=10)
    assert stored(f"{bucket}/set/photos") == files(tmp_path / "here")
    assert index.shards[0].path == f"{bucket}/set/photos/train-000000.tar"
    assert not list((tmp_path / "cache" / "wdstrain" / "outgoing").iterdir())

    def epoch(urls: str) -> list[Any]:
        loader = wt.Loader(
            urls, {"label": wt.label(), "image": wt.image(size=8)}, batch_size=8, seed=3
        )
        found = [
            (batch["__key__"], batch["label"].tolist(), batch["image"].sum().item())
            for batch in loader
        ]
        loader.close()
        return found

    count = sum(shard.split == "train" for shard in index.shards)
    for urls in (
        f"{bucket}/set/photos/train-*.tar",
        f"{bucket}/set/photos/train-{{000000..{count - 1:06d}}}.tar",
    ):
        assert epoch(urls) == epoch(f"{tmp_path}/here/train-*.tar")
    words = ["--epochs", "1", "--image-size", "16", "--batch-size", "8"]
    assert main(["train", f"{bucket}/set/photos", "--out", str(tmp_path / "run"), *words]) == 0
    assert main(["verify", f"{bucket}/set/photos"]) == 0


def test_a_set_that_is_there_is_refused_and_replaced_when_that_is_asked_for(
    bucket: str, photos: Path, tmp_path: Path
) -> None:
    wt.pack_folder(str(photos), f"{bucket}/p", shard_samples=10)
    with pytest.raises(UsageError, match="holds a set already"):
        wt.pack_folder(str(photos), f"{bucket}/p")
    wt.pack_folder(str(photos), f"{bucket}/p", overwrite=True, shard_samples=40)
    wt.pack_folder(str(photos), str(tmp_path / "here"), shard_samples=40)
    assert stored(f"{bucket}/p") == files(tmp_path / "here")


def test_putting_that_was_broken_off_goes_on_with_what_is_missing(
    bucket: str, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from wdstrain.packing import bucket as module

    asked: list[tuple[str, bool]] = []

    def failing(path: str, file: str, sha256: str) -> bool:
        if len(asked) == 4:
            raise StorageError("the network went away")
        asked.append((path, put(path, file, sha256)))
        return asked[-1][1]

    monkeypatch.setattr(module, "put", failing)
    with pytest.raises(StorageError, match="went away"):
        wt.pack_folder(str(photos), f"{bucket}/p", shard_samples=10)
    assert len(list_folder_of(f"{bucket}/p/")) == 4
    with pytest.raises(ShardError, match="index.json is not there"):  # no index, no set
        wt.Loader(f"{bucket}/p")
    monkeypatch.setattr(module, "put", lambda *words: asked.append((words[0], put(*words))) or True)
    wt.pack_folder(str(photos), f"{bucket}/p", shard_samples=10, resume=True)
    again = bucket.startswith(
        "gs"
    )  # this server keeps no metadata of Google's, so nothing says that an object is the same
    assert [fresh for _, fresh in asked] == [True] * 4 + [again] * 4 + [True] * 4
    wt.pack_folder(str(photos), str(tmp_path / "here"), shard_samples=10)
    assert stored(f"{bucket}/p") == files(tmp_path / "here")


THEIRS = json.dumps(
    {"shards": [{"raw_data": {"basename": "shard.00000.mds"}}], "version": 2}
).encode()


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("index.json", THEIRS),
        ("train-000000.tar", b"mine"),
        ("train-000007.tar", b"mine"),
        ("bad.jsonl", b"mine"),
    ],
)
def test_what_others_have_in_a_bucket_is_not_replaced(
    bucket: str, photos: Path, tmp_path: Path, name: str, data: bytes, overwrite: bool
) -> None:
    (tmp_path / "mine").write_bytes(data)
    put(f"{bucket}/p/{name}", str(tmp_path / "mine"), "")
    with pytest.raises(
        UsageError, match=f"{name}.* (is no index of this package|which no index lists)"
    ):
        wt.pack_folder(str(photos), f"{bucket}/p", overwrite=overwrite)
    assert stored(f"{bucket}/p") == {name: data}


def test_a_set_that_was_being_replaced_leaves_nothing_of_the_former_behind(
    bucket: str, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken off when the former index is gone: what it listed is known still, and nothing of others is touched."""
    from wdstrain.packing import bucket as module

    wt.pack_folder(str(photos), f"{bucket}/p", shard_samples=5)
    (tmp_path / "mine").write_bytes(b"mine")
    put(f"{bucket}/p/extra-000000.tar", str(tmp_path / "mine"), "")

    def failing(path: str, file: str, sha256: str) -> bool:
        raise StorageError("the network went away")

    with monkeypatch.context() as patch:
        patch.setattr(module, "put", failing)
        with pytest.raises(StorageError, match="went away"):
            wt.pack_folder(str(photos), f"{bucket}/p", shard_samples=20, overwrite=True)
    with pytest.raises(
        UsageError,
        match="a finished conversion of another source or with other options: seed was 0, is 1",
    ):
        wt.pack_folder(str(photos), f"{bucket}/p", shard_samples=20, seed=1, resume=True)
    wt.pack_folder(str(photos), f"{bucket}/p", shard_samples=20, resume=True)
    wt.pack_folder(str(photos), str(tmp_path / "here"), shard_samples=20)
    assert stored(f"{bucket}/p") == files(tmp_path / "here") | {"extra-000000.tar": b"mine"}


def test_large_shards_are_put_in_parts_and_read_in_ranges(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetch, "RANGE", 1 << 20)
    bits = np.random.default_rng(0)
    blobs = {f"k{number:03d}": bits.bytes(200_000) for number in range(80)}
    wt.pack(({"__key__": key, "bin": data} for key, data in blobs.items()), f"{bucket}/large")
    loader = wt.Loader(f"{bucket}/large", batch_size=8)
    found = {
        key: data
        for batch in loader
        for key, data in zip(batch["__key__"], batch["bin"], strict=True)
    }
    loader.close()
    assert found == blobs


def test_what_is_not_there_or_not_allowed_is_a_sentence_without_secrets(
    bucket: str, photos: Path, capsys: Any
) -> None:
    elsewhere = bucket.replace("bucket", "elsewhere")
    for words in (
        ["info", f"{bucket}/none"],
        ["info", f"{bucket}/none-*.tar"],
        ["verify", f"{elsewhere}/x/a.tar"],
    ):
        assert main(words) in (1, 2)
    assert main(["convert", "folder", str(photos), f"{elsewhere}/x"]) == 1
    printed = capsys.readouterr()
    assert "hush" not in printed.out + printed.err
    assert "Traceback" not in printed.err
    assert f"{bucket}/none/index.json is not there" in printed.err


def test_commands_say_where_the_shards_are(bucket: str, photos: Path, capsys: Any) -> None:
    assert main(["convert", "folder", str(photos), f"{bucket}/c", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["out"] == f"{bucket}/c"
    assert main(["info", f"{bucket}/c"]) == 0


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """A server that answers as S3 does to reads, and misbehaves when it is told to; shards of 60 samples are in its bucket."""
    rows = ({"__key__": f"{n:02d}", "bin": bytes([n]) * 3000} for n in range(60))
    wt.pack(rows, tmp_path / "bucket" / "set", shard_samples=20)
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    with serving(tmp_path, says="modified") as served:
        keys = {
            "AWS_ACCESS_KEY_ID": "a",
            "AWS_SECRET_ACCESS_KEY": "b",
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": served.url,
        }
        for name, value in keys.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(prefetch, "RANGE", 20_000)
        object_store._store.cache_clear()
        yield served
    object_store._store.cache_clear()


def test_a_bucket_that_fails_is_waited_for_and_the_log_says_so(
    elsewhere: Served, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = [batch["bin"] for batch in wt.Loader(tmp_path / "bucket" / "set", batch_size=8)]
    end = time.monotonic() + 3

    def busy(handler: Any, path: Path, start: int, stop: int) -> bool:
        return time.monotonic() < end and status(503)(handler, path, start, stop)

    elsewhere.faults += [fine(), cut(100), fine(), *[busy] * 10_000]
    loader = wt.Loader("s3://bucket/set", batch_size=8)
    assert [batch["bin"] for batch in loader] == wanted
    assert loader.report()["retries"] > 1
    loader.close()
    begins, ends = [text for one in caplog.records if "answer" in (text := one.getMessage())][:2]
    assert begins.startswith("s3://bucket does not answer (")
    assert "retrying for up to 120 s" in begins
    assert ends.startswith("s3://bucket answers again after ")


def test_a_bucket_that_fails_for_too_long_is_an_error(
    elsewhere: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WDSTRAIN_NETWORK_TIMEOUT", "0.5")
    loader = wt.Loader("s3://bucket/set", batch_size=8)
    elsewhere.faults += [status(503)] * 10_000
    with pytest.raises(
        StorageError,
        match=r"s3://bucket/set/.*tar: byte .* did not arrive in .* attempts over .*503.*WDSTRAIN_NETWORK",
    ):
        list(loader)
    loader.close()
