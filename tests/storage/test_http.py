"""Shards on a server are read as from the disk, under every network fault."""

from __future__ import annotations

import itertools
import json
import logging
import os
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import webdataset as wds

import wdstrain as wt
from tests.conftest import ROOT, write_class_folder
from tests.support.foreign_tars import read_wds
from tests.support.servers import (
    ALWAYS,
    Served,
    change,
    cut,
    cut_in_headers,
    end_in_headers,
    fine,
    in_chunks,
    lead_to,
    serving,
    small_and_quick,
    stall,
    status,
    until,
)
from wdstrain.cli import main
from wdstrain.errors import ShardError, StorageError, UsageError
from wdstrain.storage.remote import RemoteFile
from wdstrain.storage.secrets import redacted

FIRST, TRAIN = "train-000000.tar", "train-{000000..000003}.tar"
NAMES = [f"train-{n:06d}.tar" for n in range(4)]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed") / "shards"
    rows = ({"__key__": f"k{n:04d}", "bin": os.urandom(2000 + n), "cls": n % 3} for n in range(400))
    wt.pack(rows, folder, max_shard_samples=80, split={"train": 0.8, "val": 0.2})
    assert sorted(path.name for path in folder.glob("train*.tar")) == NAMES
    return folder


@pytest.fixture
def served(packed: Path) -> Iterator[Served]:
    with serving(packed) as server:
        yield server


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    small_and_quick(monkeypatch, 64 << 10)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user cache"))


def epoch(urls: Any, **options: Any) -> list[Any]:
    loader = wt.Loader(urls, batch_size=16, tail="keep", shuffle_buffer=100, **options)
    with loader:
        return [(batch["__key__"], batch["bin"], batch["cls"]) for batch in loader.epoch(1)]


# --- addresses ---


def test_every_kind_of_address_delivers_the_samples_of_the_disk_also_to_commands(
    packed: Path, served: Served, tmp_path: Path, capsys: Any
) -> None:
    expected = epoch(f"{packed}/train-*.tar")
    remote, local = ([f"{place}/{name}" for name in NAMES] for place in (served.url, packed))
    for urls in (f"{served.url}/{TRAIN}", remote, [*remote[:1], *local[1:]]):
        assert epoch(urls) == expected
    assert len(wt.convert_tars(f"{served.url}/index.json", tmp_path / "copy", shuffle=False)) == 400
    words = r"holds several splits: train, val. Name one .*http\S*/train-000000.tar, http"
    for end in ("", "/", "/index.json"):
        with pytest.raises(UsageError, match=words):
            wt.Loader(f"{served.url}{end}")
    assert main(["verify", served.url]) == 0
    assert main(["info", f"{served.url}/gone"]) == 1
    assert "gone/index.json is not there" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("{url}/train-*.tar", "a server cannot be asked what matches"),
        ("{url}/train-{{0..1.tar", "its braces do not pair up"),
        ("C:\\data\\train-000000.tar", "no such file or folder"),
        ("http://h:99999/x.tar", "not a valid address"),
        ("http:///x.tar", "not a valid address"),
        ("http://[::1/x.tar", "not a valid address"),
    ],
)
def test_a_wrong_address_or_timeout_is_refused_before_any_request(
    served: Served, address: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match=words):
        wt.Loader(address.format(url=served.url))
    for value in ("two", "-1", "nan"):
        monkeypatch.setenv("WDSTRAIN_NETWORK_TIMEOUT", value)
        words = f"WDSTRAIN_NETWORK_TIMEOUT='{value}': must be a number of seconds >= 0"
        with pytest.raises(UsageError, match=words):
            wt.Loader(f"{served.url}/{FIRST}", batch_size=4)
    assert served.requests == []


def test_a_page_or_nothing_instead_of_a_shard_is_an_error_that_says_so(
    packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(packed) as server:
        with pytest.raises(StorageError, match=r"/none.tar: the server answered 404 Not Found"):
            wt.Loader(f"{server.url}/none.tar")
        server.pages = True
        with pytest.raises(StorageError, match="sent an HTML page instead of a shard"):
            wt.Loader(f"{server.url}/elsewhere/{FIRST}")
    monkeypatch.setenv("WDSTRAIN_NETWORK_TIMEOUT", "0.5")
    words = r"index.json: byte 0 did not arrive in \d+ attempts.*refused"
    with pytest.raises(StorageError, match=words):
        wt.Loader("http://127.0.0.1:9/shards")


# --- faults ---


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    lines = [record.getMessage() for record in caplog.records if record.name == "wdstrain"]
    return [line for line in lines if "answer" in line]


@pytest.mark.parametrize("ranges", [True, False])
def test_busy_servers_and_answers_in_chunks_cost_no_sample_and_no_log_line(
    packed: Path, ranges: bool, caplog: pytest.LogCaptureFixture
) -> None:
    faults = [
        *(status(502), status(429, Retry_After="0"), in_chunks(10_000), in_chunks(1 << 20), cut(5)),
        status(503, Retry_After="Thu, 01 Jan 1970 00:00:00 GMT"),
    ]
    with serving(packed, ranges=ranges, faults=faults) as server:
        assert epoch(f"{server.url}/{TRAIN}") == epoch(f"{packed}/train-*.tar")
        assert not server.faults or not ranges  # one request fetches the rest of a shard
    assert not lines_of(caplog)


def test_a_truncated_response_header_is_a_transient_fault(packed: Path) -> None:
    """This holds for the first request of a shard, when no size is known, and for an index."""
    data = (packed / FIRST).read_bytes()
    with serving(packed) as server:
        for after in range(1, 110):
            server.faults.append(end_in_headers(after))
            with RemoteFile(f"{server.url}/{FIRST}") as file:
                actual = (file.size, file.bytes_at(0, 1000), file.retries)
            assert actual == (len(data), data[:1000], 1), after
            assert not server.faults
    with serving(packed, faulty=(".json",)) as server:
        for fault in (*map(end_in_headers, (1, 15, 16, 20, 60)), cut(0), cut(9)):
            server.faults.append(fault)
            server.requests.clear()
            assert len(wt.open(f"{server.url}/index.json")) == 400
            assert [path for path, _ in server.requests].count("/index.json") == 2


def test_a_dropped_connection_resumes_at_the_byte_where_it_broke(packed: Path) -> None:
    expected = (packed / FIRST).read_bytes()
    with (
        serving(packed, faults=[cut(70_001)]) as server,
        RemoteFile(f"{server.url}/{FIRST}", len(expected)) as file,
    ):
        actual = bytearray(len(expected))
        file.read_into(memoryview(actual), 0)
        assert actual == expected
        assert [requested for _, requested in server.requests] == [
            f"bytes={start}-{len(expected) - 1}" for start in (0, 70_001)
        ]
        assert file.retries == 1


def test_shards_are_read_over_tls(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1"
    words += " -keyout key.pem -out cert.pem -subj /CN=x -addext subjectAltName=IP:127.0.0.1"
    subprocess.run(words.split(), cwd=tmp_path, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    with serving(packed, tls=context, faults=[fine(), cut(70_001), cut(5, reset=True)]) as server:
        with pytest.raises(StorageError, match="CERTIFICATE_VERIFY_FAILED"):
            epoch(f"{server.url}/{TRAIN}")
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem"))
        assert epoch(f"{server.url}/{TRAIN}") == epoch(f"{packed}/train-*.tar")
        assert not server.faults


def test_a_stalled_request_is_repeated(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WDSTRAIN_NETWORK_TIMEOUT", "4")  # a quarter without a byte ends a request
    released = threading.Event()
    with serving(packed, faults=[stall(5000, released), fine(), stall(0, released)]) as server:
        assert epoch(f"{server.url}/{FIRST}") == epoch(packed / FIRST)
        released.set()


# --- faults that last ---


def test_permanent_errors_name_address_status_byte_and_attempts(
    packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WDSTRAIN_NETWORK_TIMEOUT", "0.5")
    words = r"/train-00000\d.tar: byte \d+ did not arrive in \d+ attempts over \d s; last error: "
    with (
        serving(packed, faults=[fine(), *[status(503)] * ALWAYS]) as server,
        pytest.raises(StorageError, match=words + ".*status 503.*WDSTRAIN_NETWORK_TIMEOUT"),
        wt.Loader(f"{server.url}/train-{{000000..000001}}.tar", batch_size=4) as loader,
    ):
        list(loader)


def test_the_log_names_a_server_that_is_waited_for(
    packed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    busy = until(time.monotonic() + 1.5, status(503))
    with serving(packed, faults=[fine(), fine(), *[busy] * ALWAYS]) as server:
        assert epoch(f"{server.url}/{TRAIN}") == epoch(f"{packed}/train-*.tar")
    waits = "(TemporaryError: status 503); retrying for up to 120 s (WDSTRAIN_NETW"
    assert lines_of(caplog)[0].startswith(f"{server.url} does not answer {waits}")


def test_an_object_that_changes_during_a_read_raises(tmp_path: Path, packed: Path) -> None:
    shutil.copytree(packed, tmp_path / "s")
    words = f"{FIRST} (changed while it was read|has 11 bytes, its index says)"
    with (
        serving(tmp_path / "s", faults=[fine(), fine(), change(b"other bytes")]) as server,
        pytest.raises(ShardError, match=words),
    ):
        list(wt.Loader(f"{server.url}/{FIRST}", batch_size=4))


# --- requests ---


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_single_epoch_requests_each_byte_once(tmp_path: Path, num_workers: int) -> None:
    rows = ({"__key__": f"k{n:04d}", "bin": os.urandom(1000 + n)} for n in range(200))
    shard = wt.pack(rows, tmp_path / "set").shards[0]
    with (
        serving(tmp_path / "set") as server,
        wt.Loader(server.url, batch_size=32, num_workers=num_workers, shuffle_buffer=50) as loader,
    ):
        for epochs in ([0], [0], [3], [0, 1, 2]):
            server.requests.clear()
            for number in epochs:
                list(loader.epoch(number, until=epochs[-1] + 1))
            ranges = [text.removeprefix("bytes=") for path, text in server.requests if text]
            asked = sorted(tuple(map(int, text.split("-"))) for text in ranges)
            assert sum(last + 1 - first for first, last in asked) <= len(epochs) * shard.bytes
            if len(epochs) == 1:
                assert all(one[1] < other[0] for one, other in itertools.pairwise(asked))
        with pytest.raises(UsageError, match="until=2: must be above epoch=2"):
            loader.epoch(2, until=2)


# --- redirects, proxies and secrets ---


def test_redirects_do_not_pass_secrets_to_other_hosts(
    packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WDSTRAIN_HTTP_HEADERS", "X-Token: hush-header")
    with serving(packed) as other, serving(packed) as hub:
        hub.faults += [lead_to(other.url.replace("127.0.0.1", "localhost"))] * ALWAYS
        address = f"{hub.url.replace('://', '://me:hush-word@')}/{FIRST}"
        assert epoch(address) == epoch(packed / FIRST)
        assert other.requests
        assert not any({"X-Token", "Authorization"} & set(sent) for sent in other.headers)
        other.faults += [status(404)] * 9
        with pytest.raises(StorageError, match="404") as caught:
            epoch(f"{hub.url}/{FIRST}")
        assert "hush" not in str(caught.value)


def test_a_proxy_of_the_environment_is_used(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(packed) as proxy, serving(packed) as server:
        monkeypatch.setenv("http_proxy", proxy.url)
        assert epoch(f"http://data.invalid/{FIRST}") == epoch(packed / FIRST)
        asked = len(proxy.requests)
        assert asked
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        assert epoch(f"{server.url}/{FIRST}") == epoch(packed / FIRST)
        assert len(proxy.requests) == asked


def test_secrets_are_sent_and_never_shown(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, caplog: Any
) -> None:
    monkeypatch.setenv("WDSTRAIN_HTTP_HEADERS", "X-Token: hush-header\nX-Other: 1")
    caplog.set_level(logging.DEBUG)
    write_class_folder(tmp_path / "in", {"cat": 30, "dog": 30})
    wt.convert_folder(tmp_path / "in", tmp_path / "photos")
    with serving(packed) as server, serving(tmp_path / "photos") as photos:
        secret = f"/{FIRST}?sig=hush-query"
        urls = [url.replace("://", "://me:hush-word@") for url in (server.url, photos.url)]
        address, pictures = (f"{url}{secret}" for url in urls)
        with wt.Loader(address, batch_size=4) as loader:
            assert len([key for batch in loader for key in batch["__key__"]]) > 50
            texts = [str(loader), str(loader.index)]
            texts += [json.dumps(loader.report()), json.dumps(loader.state_dict())]
        for sent in server.headers:
            assert sent["Authorization"] == "Basic bWU6aHVzaC13b3Jk"
            assert sent["X-Token"] == "hush-header"
        assert all("sig=hush-query" in path for path, _ in server.requests)
        texts.append(json.dumps(wt.convert_tars(address, tmp_path / "copy").info))
        train = ["train", "--out", str(tmp_path / "run"), "--epochs", "1", "--batch-size", "8"]
        train += ["--image-size", "8"]
        assert main([*train, pictures]) == 0
        written = [*(tmp_path / "copy").iterdir(), *(tmp_path / "run").rglob("*")]
        texts += [path.read_text("latin1") for path in written if path.is_file()]
        server.faults += [end_in_headers(60), fine(), status(403), *[status(503)] * 20]
        missing, foreign = address.replace("000000", "999999"), address.replace("http", "ftp")
        lines = [["info", missing], ["info", address, address], ["index", address]]
        lines += [["info", foreign], [*train, address], *[["verify", address]] * 2]
        for words in lines:
            main(words)
        texts += [record.getMessage() for record in caplog.records]
        assert any("?..." in text or f"/{FIRST}" in text for text in texts)
        texts += capsys.readouterr()
    assert not [text for text in texts if "hush" in text]
    assert redacted("https://a:b@h:1/p/x.tar?q=1#f") == "https://h:1/p/x.tar"


# --- under webdataset, on nginx, in training ---


@pytest.mark.parametrize("ranges", [True, False])
def test_webdataset_reads_through_the_http_opener(
    packed: Path, ranges: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for scheme in ("http", "https", "s3"):
        monkeypatch.setitem(wds.gopen_schemes, scheme, wt.gopen)

    def samples(place: object) -> list[tuple[str, bytes]]:
        read = read_wds([f"{place}/{name}" for name in NAMES])
        return [(sample["__key__"], sample["bin"]) for sample in read]

    faults = [cut(0), cut(70_001), fine(), cut(99, reset=True), status(503), cut_in_headers()]
    with serving(packed, ranges=ranges, faults=faults) as server:
        assert samples(server.url) == samples(packed)
        assert not server.faults


def test_a_file_object_of_an_address_reads_and_seeks(packed: Path, served: Served) -> None:
    data = (packed / FIRST).read_bytes()
    with wt.gopen(f"{served.url}/{FIRST}") as file:
        assert (file.read(10), file.tell()) == (data[:10], 10)
        file.seek(-5, os.SEEK_END)
        assert (file.read(), file.read()) == (data[-5:], b"")
        file.seek(0)
        assert file.read() == data
    with pytest.raises(UsageError, match="is not supported"):
        wt.gopen(f"{served.url}/x.tar", "wb")
    with pytest.raises(UsageError, match="not an address of a server"):
        wt.gopen("x.tar")


@pytest.fixture
def nginx(packed: Path, tmp_path: Path) -> Iterator[str]:
    own = ROOT / ".venv" / "nginx" / "usr" / "sbin" / "nginx"
    program = str(own) if own.exists() else shutil.which("nginx", path="/usr/sbin:/usr/bin")
    if program is None:
        pytest.skip("no nginx: scripts/test.sh unpacks it where it can; else apt install it")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    places = " ".join(f"{kind}_temp_path {tmp_path}/{kind};" for kind in kinds)
    config = tmp_path / "nginx.conf"
    config.write_text(
        f"{'user root;' if os.geteuid() == 0 else ''} daemon off; pid {tmp_path}/pid;\n"
        f"error_log {tmp_path}/error.log; events {{}} http {{ access_log off; {places}\n"
        f"server {{ listen 127.0.0.1:{port}; root {packed}; }} }}\n"
    )
    command = [program, "-e", f"{tmp_path}/error.log", "-c", str(config), "-p", str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        end = time.monotonic() + 10
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert process.poll() is None, process.stderr
            assert time.monotonic() < end
            time.sleep(0.02)
        yield f"http://127.0.0.1:{port}"
        process.terminate()
        process.wait(10)


def test_shards_on_nginx_are_read_as_from_the_disk(packed: Path, nginx: str) -> None:
    assert epoch(f"{nginx}/{TRAIN}") == epoch(f"{packed}/train-*.tar")
    assert main(["verify", nginx]) == 0
    with pytest.raises(StorageError, match="404"):
        wt.Loader(f"{nginx}/none.tar")
