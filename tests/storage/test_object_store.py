"""Sets in a bucket: written atomically, read as from the disk, against a real local S3 server.

The server also answers gs:// requests: Google's XML API is S3's except for authentication and
metadata.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wdstrain as wt
from tests.conftest import files_of, write_class_folder
from tests.support.foreign_tars import write_set
from tests.support.readers import by_key
from tests.support.servers import Served, cut, fine, serving, status
from wdstrain.cli import main
from wdstrain.conversion.runner import Step
from wdstrain.errors import ShardError, StorageError, UsageError
from wdstrain.storage.objects import list_folder_of, put
from wdstrain.storage.remote import read_remote

server = pytest.importorskip("moto.server", reason="moto is not installed")
pytest.importorskip("obstore", reason="obstore is not installed: pip install 'wdstrain[s3]'")

NAMELESS = ("client_email", "private_key", "private_key_id")  # keys of a service account
TENS: dict[str, Any] = {"max_shard_samples": 10}


def amazon(endpoint: str) -> dict[str, str]:
    keys = {"AWS_ACCESS_KEY_ID": "hush-id", "AWS_SECRET_ACCESS_KEY": "hush-secret"}
    return {**keys, "AWS_REGION": "us-east-1", "AWS_ENDPOINT_URL": endpoint}


def google(endpoint: str) -> dict[str, str]:
    account = {"gcs_base_url": endpoint, "disable_oauth": True} | dict.fromkeys(NAMELESS, "")
    key = {"GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(account)}
    return {**key, "GOOGLE_BEARER_TOKEN": "hush-token"}


def set_only(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    """Set variables of a client, and ignore the settings of this machine."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "GOOGLE_"))]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    running = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    yield f"http://{host}:{port}"
    running.stop()


NUMBERS = itertools.count()


@pytest.fixture(params=["s3", pytest.param("gs", marks=pytest.mark.slow)])
def bucket(
    request: pytest.FixtureRequest, endpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> str:
    """Address of an empty bucket. Every test has its own."""
    set_only(monkeypatch, (amazon if request.param == "s3" else google)(endpoint))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    name = f"bucket{next(NUMBERS)}"
    urllib.request.urlopen(urllib.request.Request(f"{endpoint}/{name}", method="PUT")).close()
    return f"{request.param}://{name}"


class BrokenOffError(Exception):
    """Error of a caller that breaks off an upload."""


def broken_off(title: str, most: int) -> Callable[[Step], None]:
    def report(step: Step) -> None:
        if step.title == title and step.done > most:
            raise BrokenOffError

    return report


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return write_class_folder(tmp_path / "in", {"cat": 30, "dog": 30}, "jpg")


def stored(address: str) -> dict[str, bytes]:
    return {name: read_remote(f"{address}/{name}") or b"" for name in list_folder_of(f"{address}/")}


@pytest.mark.parametrize("ending", [".tar", ".tgz"])
def test_the_webdataset_interface_reads_from_a_bucket(
    bucket: str, tmp_path: Path, ending: str
) -> None:
    urls = write_set(tmp_path / "set", [7, 13, 1], ending)
    for path in (tmp_path / "set").glob(f"*{ending}"):
        put(f"{bucket}/set/{path.name}", str(path))
    dataset = wt.WebDataset(f"{bucket}/set/part-{{000..002}}{ending}").decode().to_tuple("txt")
    assert list(dataset) == list(wt.WebDataset(urls).decode().to_tuple("txt"))
    dataset.close()


@pytest.mark.parametrize("bucket", ["s3", "gs"], indirect=True)
def test_a_set_in_a_bucket_equals_the_set_on_the_disk(
    bucket: str, photos: Path, tmp_path: Path
) -> None:
    split = {"train": 0.7, "val": 0.3}
    index = wt.convert_folder(photos, f"{bucket}/set/photos", split=split, **TENS)
    wt.convert_folder(photos, tmp_path / "here", split=split, **TENS)
    assert stored(f"{bucket}/set/photos") == files_of(tmp_path / "here")
    assert index.shards[0].path == f"{bucket}/set/photos/train-000000.tar"
    assert not list((tmp_path / "cache" / "wdstrain" / "outgoing").iterdir())

    def epoch(urls: str) -> list[Any]:
        fields = {"label": wt.label(), "image": wt.image(size=8)}
        with wt.Loader(urls, fields, batch_size=8, seed=3) as loader:
            return [(b["__key__"], b["label"].tolist(), b["image"].sum().item()) for b in loader]

    count = sum(shard.split == "train" for shard in index.shards)
    for names in ("*", f"{{000000..{count - 1:06d}}}"):
        urls = f"{bucket}/set/photos/train-{names}.tar"
        assert epoch(urls) == epoch(f"{tmp_path}/here/train-*.tar")
    words = ["--epochs", "1", "--image-size", "16", "--batch-size", "8"]
    assert main(["train", f"{bucket}/set/photos", "--out", str(tmp_path / "run"), *words]) == 0
    assert main(["verify", f"{bucket}/set/photos"]) == 0


def test_an_overwrite_changes_no_object_before_all_its_shards_are_made(
    bucket: str, photos: Path, tmp_path: Path
) -> None:
    """Also not by a shard whose name the old set lacks: a reader of all tars would find it."""
    wt.convert_folder(photos, f"{bucket}/p")
    with pytest.raises(UsageError, match=rf"{bucket}/p holds 3 files.*overwrite=True"):
        wt.convert_folder(photos, f"{bucket}/p")
    put(f"{bucket}/p/train-000000.tar", str(next(photos.glob("*/*.jpg"))))  # damage
    before, during = stored(f"{bucket}/p"), list[dict[str, bytes]]()

    def look(step: Step) -> None:
        if step.title == "packing":
            during.append(stored(f"{bucket}/p"))
        elif step.title == "uploading":
            assert "index.json" not in stored(f"{bucket}/p") or step.done == step.total

    wt.convert_folder(photos, f"{bucket}/p", overwrite=True, num_workers=1, progress=look, **TENS)
    assert len(during) >= 6
    assert all(now == before for now in during)
    wt.convert_folder(photos, tmp_path / "here", **TENS)
    assert stored(f"{bucket}/p") == files_of(tmp_path / "here")


def test_an_interrupted_upload_resumes_with_the_missing_objects(
    bucket: str, photos: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A call that is refused in between deletes no upload, and a finished one may be resumed."""
    options: dict[str, Any] = {"num_workers": 1, "progress": broken_off("packing", 40)}
    with pytest.raises(BrokenOffError):
        wt.convert_folder(photos, f"{bucket}/p", **TENS, **options)
    assert len(list_folder_of(f"{bucket}/p/")) == 4
    with pytest.raises(ShardError, match="index.json is not there"):  # without it, there is no set
        wt.Loader(f"{bucket}/p")
    with pytest.raises(UsageError, match=r"unfinished conversion\. Continue it with resume=True"):
        wt.convert_folder(photos, f"{bucket}/p", **TENS)
    with caplog.at_level(logging.INFO, "werkzeug"):
        wt.convert_folder(photos, f"{bucket}/p", **TENS, resume=True)
    assert sum('"PUT ' in record.getMessage() for record in caplog.records) == 4
    assert len(wt.convert_folder(photos, f"{bucket}/p", **TENS, resume=True)) == 60
    wt.convert_folder(photos, tmp_path / "here", **TENS)
    assert stored(f"{bucket}/p") == files_of(tmp_path / "here")


def test_shards_are_uploaded_as_they_are_finished_and_take_no_local_space(
    bucket: str, tmp_path: Path
) -> None:
    """After each shard but the last few, the local files are empty and the bucket has no set."""
    places = tmp_path / "cache" / "wdstrain" / "outgoing"
    space: list[int] = []

    def progress(step: Step) -> None:
        if step.title == "packing" and step.done > 30:
            shards = list(places.rglob("*.tar"))
            space.append(sum(512 * path.stat().st_blocks for path in shards if path.exists()))
            assert not {"index.json", "index.arrow"} & {*list_folder_of(f"{bucket}/p/")}

    rows = [{"__key__": f"k{number:03d}", "bin": os.urandom(100_000)} for number in range(60)]
    options: dict[str, Any] = {"max_shard_samples": 5, "shuffle": False}
    index = wt.pack(iter(rows), f"{bucket}/p", progress=progress, **options)
    wt.pack(iter(rows), str(tmp_path / "here"), **options)
    assert space
    assert max(space) < 2_000_000 < sum(shard.bytes for shard in index.shards)
    assert stored(f"{bucket}/p") == files_of(tmp_path / "here")
    assert not list_folder_of(f"{bucket}/p/.unfinished/")
    assert not list(places.iterdir())


def new_dogs(folder: Path, count: int) -> Path:
    new = write_class_folder(folder / "new", {"dog": count}, "jpg")
    for path in (new / "dog").iterdir():
        path.rename(path.with_name(f"new{path.name}"))
    return new


def changes(photos: Path, new: Path, out: str) -> dict[str, list[str]]:
    size = ["--max-shard-samples", "10"]
    return {
        "make": ["convert", "folder", str(photos), out, *size],
        "append": ["convert", "folder", str(new), out, "--append", *size],
        "remove": ["remove", out, "--where", "key < 'cat/014' or key == 'dog/new01'"],
    }


def test_a_set_in_a_bucket_grows_and_shrinks_like_one_on_the_disk(
    bucket: str, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = new_dogs(tmp_path, 13)
    remote, local = (changes(photos, new, out) for out in (f"{bucket}/p", f"{tmp_path}/here"))
    capsys.readouterr()
    for name in ("make", "append", "remove"):
        if name != "make":
            for words in (remote, local):
                assert main([*words[name], "--dry-run", "--json"]) == 0
            printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
            assert printed[0].get("removed") == printed[1].get("removed")
            assert printed[0]["samples"] == printed[1]["samples"]
        for words in (remote, local):
            assert main([*words[name], "-q"]) == 0
        assert stored(f"{bucket}/p") == files_of(tmp_path / "here")
        capsys.readouterr()
    for out in (f"{bucket}/p", f"{tmp_path}/here"):
        rows = [{"key": f"cat/{n:03d}", "note": f"cat {n}", "score": n} for n in range(14, 20)]
        assert wt.join(out, rows).matched == 6
    assert stored(f"{bucket}/p") == files_of(tmp_path / "here")
    assert not list((tmp_path / "cache" / "wdstrain" / "outgoing").iterdir())
    assert not list_folder_of(f"{bucket}/p/.unfinished/")
    assert wt.verify(f"{bucket}/p").ok
    with pytest.raises(UsageError, match=f"of 13 keys are in {bucket}/p already"):
        wt.convert_folder(new, f"{bucket}/p", append=True)
    with pytest.raises(ShardError, match=r"none/index.json is not there"):
        wt.convert_folder(new, f"{bucket}/none", append=True)
    assert stored(f"{bucket}/p") == files_of(tmp_path / "here")


class Killer(logging.Handler):
    """Log handler that kills a process after a given request that changes a bucket."""

    def __init__(self, moment: int) -> None:
        super().__init__()
        self.moment, self.count, self.process = moment, 0, 0

    def emit(self, record: logging.LogRecord) -> None:
        if any(f"{method} /" in record.getMessage() for method in ("PUT", "POST", "DELETE")):
            self.count += 1
            if self.count == self.moment:
                os.kill(self.process, signal.SIGKILL)


def run_and_kill(words: list[str], moment: int) -> tuple[int, int]:
    log, killer = logging.getLogger("werkzeug"), Killer(moment)
    level = log.level
    log.addHandler(killer)
    log.setLevel(logging.INFO)
    try:
        with subprocess.Popen([sys.executable, "-m", "wdstrain", *words, "-q"]) as process:
            killer.process = process.pid
        return process.returncode, killer.count
    finally:
        log.removeHandler(killer)
        log.setLevel(level)


@pytest.mark.parametrize("bucket", ["s3"], indirect=True)
@pytest.mark.parametrize("verb", ["append", "remove"])
def test_a_killed_change_in_a_bucket_leaves_the_old_or_the_new_set(
    bucket: str, photos: Path, tmp_path: Path, verb: str
) -> None:
    new = new_dogs(tmp_path, 25)
    local = changes(photos, new, f"{tmp_path}/here")
    assert main([*local["make"], "-q"]) == 0
    states = [files_of(tmp_path / "here")]
    assert main([*local[verb], "-q"]) == 0
    states.append(files_of(tmp_path / "here"))
    remote = changes(photos, new, f"{bucket}/whole")
    assert main([*remote["make"], "-q"]) == 0
    code, total = run_and_kill(remote[verb], 1 << 30)
    assert code == 0
    keys = [sorted(wt.open(f"{bucket}/whole").table["key"].to_pylist())]
    seen = set()
    for moment in (total // 4, total - 1):
        out = f"{bucket}/{moment}"
        remote = changes(photos, new, out)
        assert main([*remote["make"], "-q"]) == 0
        keys[1:] = [sorted(wt.open(out).table["key"].to_pylist())]
        assert run_and_kill(remote[verb], moment)[0] == -signal.SIGKILL
        assert wt.verify(out).ok
        now = sorted(wt.open(out).table["key"].to_pylist())
        assert now in keys
        seen.add(keys.index(now))
        again = ["--resume"] if verb == "append" else []
        if verb == "remove" and now == keys[0]:
            again = ["--dry-run"]  # completes the committed change and has no work left
        assert main([*remote[verb], *again, "-q"]) == 0
        assert stored(out) == states[1]
        assert not list_folder_of(f"{out}/.unfinished/")
        assert not list((tmp_path / "cache" / "wdstrain" / "outgoing").iterdir())
    assert seen == {0, 1}


FOREIGN_INDEX = json.dumps(
    {"shards": [{"raw_data": {"basename": "shard.00000.mds"}}], "version": 2}
).encode()


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("index.json", FOREIGN_INDEX),
        ("train-000007.tar", b"mine"),
        ("skipped.jsonl", b"mine"),
    ],
)
def test_foreign_objects_in_a_bucket_are_not_replaced(
    bucket: str, photos: Path, tmp_path: Path, name: str, data: bytes, overwrite: bool
) -> None:
    (tmp_path / "mine").write_bytes(data)
    put(f"{bucket}/p/{name}", str(tmp_path / "mine"))
    words = f"({name}.* (is no index of this package|which no index lists)|holds 1 files)"
    with pytest.raises(UsageError, match=words):
        wt.convert_folder(photos, f"{bucket}/p", overwrite=overwrite)
    assert stored(f"{bucket}/p") == {name: data}


def test_an_interrupted_replacement_leaves_no_objects_of_the_old_set(
    bucket: str, photos: Path, tmp_path: Path
) -> None:
    """After the old index was deleted, its objects are still known, and foreign ones are kept."""
    wt.convert_folder(photos, f"{bucket}/p", max_shard_samples=5)
    (tmp_path / "mine").write_bytes(b"mine")
    put(f"{bucket}/p/extra-000000.tar", str(tmp_path / "mine"))
    options: dict[str, Any] = {"max_shard_samples": 20, "overwrite": True}
    with pytest.raises(BrokenOffError):
        wt.convert_folder(photos, f"{bucket}/p", progress=broken_off("uploading", 0), **options)
    assert "index.json" not in stored(f"{bucket}/p")
    words = "a finished conversion of another source or with other options: seed was 0, is 1"
    with pytest.raises(UsageError, match=words):
        wt.convert_folder(photos, f"{bucket}/p", max_shard_samples=20, seed=1, resume=True)
    wt.convert_folder(photos, f"{bucket}/p", max_shard_samples=20, resume=True)
    wt.convert_folder(photos, tmp_path / "here", max_shard_samples=20)
    assert stored(f"{bucket}/p") == files_of(tmp_path / "here") | {"extra-000000.tar": b"mine"}


def test_large_shards_are_uploaded_in_parts_and_read_in_ranges(bucket: str) -> None:
    bits = np.random.default_rng(0)
    blobs = {f"k{number:03d}": bits.bytes(200_000) for number in range(80)}
    wt.pack(({"__key__": key, "bin": data} for key, data in blobs.items()), f"{bucket}/large")
    with wt.Loader(f"{bucket}/large", batch_size=8) as loader:
        assert by_key(loader, "bin") == blobs


def test_commands_print_addresses_and_name_missing_and_forbidden_objects_without_secrets(
    bucket: str, photos: Path, capsys: Any
) -> None:
    faulty_bucket = bucket.replace("bucket", "faulty_bucket")
    for verb, address in (("info", f"{bucket}/none"), ("info", f"{bucket}/none-*.tar")):
        assert main([verb, address]) in (1, 2)
    assert main(["verify", f"{faulty_bucket}/x/a.tar"]) in (1, 2)
    assert main(["convert", "folder", str(photos), f"{faulty_bucket}/x"]) == 1
    printed = capsys.readouterr()
    assert "hush" not in printed.out + printed.err
    assert "Traceback" not in printed.err
    assert f"{bucket}/none/index.json is not there" in printed.err
    assert main(["convert", "folder", str(photos), f"{bucket}/c", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["out"] == f"{bucket}/c"
    assert main(["info", f"{bucket}/c"]) == 0


@pytest.fixture
def faulty_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Served, str]]:
    """A faulty server that answers reads like S3, and its bucket with a set of 60 samples."""
    bucket = f"bucket{next(NUMBERS)}"
    rows = ({"__key__": f"{n:02d}", "bin": bytes([n]) * 3000} for n in range(60))
    wt.pack(rows, tmp_path / bucket / "set", max_shard_samples=20)
    with serving(tmp_path, says="modified") as served:
        set_only(monkeypatch, amazon(served.url))
        yield served, f"s3://{bucket}"


def test_a_failing_bucket_is_retried_and_the_wait_is_logged(
    faulty_bucket: tuple[Served, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    served, bucket = faulty_bucket
    local = tmp_path / bucket.removeprefix("s3://") / "set"
    expected = [batch["bin"] for batch in wt.Loader(local, batch_size=8)]
    end = time.monotonic() + 1.5

    def busy(handler: Any, path: Path, start: int, stop: int) -> bool:
        return time.monotonic() < end and status(503)(handler, path, start, stop)

    served.faults += [fine(), cut(100), fine(), *[busy] * 10_000]
    loader = wt.Loader(f"{bucket}/set", batch_size=8)
    assert [batch["bin"] for batch in loader] == expected
    assert loader.report()["retries"] > 1
    loader.close()
    begins = next(text for record in caplog.records if "answer" in (text := record.getMessage()))
    assert begins.startswith(f"{bucket} does not answer (")
    assert "retrying for up to 120 s" in begins


@pytest.mark.parametrize("code", [401, 403])
def test_credentials_are_read_again_once_after_a_request_was_refused(
    faulty_bucket: tuple[Served, str], monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    served, bucket = faulty_bucket

    def renewing(handler: Any, path: Path, start: int, stop: int) -> bool:
        if "Credential=hush-id/" not in handler.headers["Authorization"]:
            return False
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "renewed")
        return status(code)(handler, path, start, stop)

    loader = wt.Loader(f"{bucket}/set", batch_size=8, tail="keep")
    served.faults += [renewing] * 10_000
    assert sum(len(batch["bin"]) for batch in loader.epoch(0, until=1)) == 60
    loader.close()
    served.faults[:] = [status(code)] * 10_000
    with pytest.raises(StorageError, match=rf"{bucket}/set/.*tar: .*Check the credentials"):
        list(wt.Loader(f"{bucket}/set", batch_size=8))
