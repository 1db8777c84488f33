"""Shards on a server are read as from the disk, under every network fault."""

from __future__ import annotations

import gc
import itertools
import json
import logging
import os
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset as wds

import wdstrain as wt
from tests.conftest import ROOT, write_class_folder, write_shards, write_tar
from tests.support.readers import collected_batches, wait_until_paused
from tests.support.servers import (
    Fault,
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
)
from wdstrain.cli import main
from wdstrain.errors import ShardError, StorageError, UsageError
from wdstrain.reader.run import THREADS
from wdstrain.storage import http
from wdstrain.storage.addresses import expand
from wdstrain.storage.remote import RemoteFile
from wdstrain.storage.secrets import redacted


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Packed shards of about 300 KB, with an index."""
    folder = tmp_path_factory.mktemp("packed")
    rows = ({"__key__": f"k{n:04d}", "bin": os.urandom(2000 + n), "cls": n % 3} for n in range(400))
    wt.pack(rows, str(folder / "shards"), max_shard_size=300_000, split={"train": 0.8, "val": 0.2})
    return folder / "shards"


@pytest.fixture
def served(packed: Path) -> Iterator[Served]:
    with serving(packed) as server:
        yield server


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    small_and_quick(monkeypatch, 64 << 10)


def epoch(urls: Any, **options: Any) -> list[Any]:
    loader = wt.Loader(urls, batch_size=16, tail="keep", shuffle_buffer=100, **options)
    actual = [(batch["__key__"], batch["bin"], batch["cls"]) for batch in loader.epoch(1)]
    loader.close()
    return actual


# --- addresses ---


def test_every_kind_of_address_delivers_the_samples_of_the_disk(
    packed: Path, served: Served
) -> None:
    expected = epoch(f"{packed}/train-*.tar")
    names = sorted(path.name for path in packed.glob("train-*.tar"))
    braces = f"{served.url}/train-{{000000..{len(names) - 1:06d}}}.tar"
    assert len(names) > 2
    for urls in (
        braces,
        [f"{served.url}/{name}" for name in names],
        [f"{served.url}/{names[0]}", *map(str, sorted(packed.glob("train-*.tar"))[1:])],
    ):
        assert epoch(urls) == expected
    everything = wt.convert_tars(
        f"{served.url}/index.json", str(packed.parent / "copy"), shuffle=False, overwrite=True
    )
    assert len(everything) == 400
    for urls in (served.url, f"{served.url}/", f"{served.url}/index.json"):
        with pytest.raises(
            UsageError,
            match=r"holds several splits: train, val. Name one .*http\S*/train-000000.tar, http",
        ):
            wt.Loader(urls)


def test_commands_take_addresses(served: Served, capsys: Any) -> None:
    assert main(["info", f"{served.url}/index.json", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["samples"] == 400
    assert main(["verify", served.url]) == 0
    assert main(["info", f"{served.url}/gone"]) == 1
    assert "gone/index.json is not there" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("/train-*.tar", "a server cannot be asked what matches"),
        ("/train-{0..1.tar", "its braces do not pair up"),
    ],
)
def test_globs_on_a_server_are_refused_before_any_request(
    served: Served, address: str, words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        wt.Loader(served.url + address)
    assert served.requests == []


def test_windows_paths_are_paths() -> None:
    with pytest.raises(UsageError, match="no such file or folder"):
        expand("C:\\data\\train-000000.tar")


def test_an_html_page_instead_of_a_shard_raises_immediately(packed: Path) -> None:
    with (
        serving(packed, pages=True) as server,
        pytest.raises(StorageError, match="sent an HTML page instead of a shard"),
    ):
        wt.Loader(f"{server.url}/elsewhere/train-000000.tar")


def test_a_missing_object_is_an_error_with_its_http_status(served: Served) -> None:
    with pytest.raises(StorageError, match=r"/none.tar: the server answered 404 Not Found"):
        wt.Loader(f"{served.url}/none.tar")


def test_shards_without_an_index_are_scanned_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_shards(tmp_path / "s", [7, 13, 1])
    expected = sorted(
        key for batch in wt.Loader(str(tmp_path / "s"), batch_size=1) for key in batch["__key__"]
    )
    caplog.clear()
    with serving(tmp_path / "s") as server:
        for _ in range(2):
            loader = wt.Loader(f"{server.url}/part-{{000..002}}.tar", batch_size=1)
            assert sorted(key for batch in loader for key in batch["__key__"]) == expected
            loader.close()
    assert (
        sum("scanned the headers of 21 samples" in record.message for record in caplog.records) == 1
    )


# --- faults ---

FAULTS: dict[str, list[Fault]] = {
    "cut at once": [cut(0)],
    "cut at byte 1": [cut(1), cut(1)],
    "cut in the middle": [fine(), cut(30_000), cut(511), fine(), cut(60_000)],
    "reset in the middle": [cut(10_000, reset=True), fine(), cut(0, reset=True)],
    "reset in the headers": [cut_in_headers(), fine(), cut_in_headers()],
    "ended in the headers": [
        fault for after in range(5, 130, 8) for fault in (fine(), end_in_headers(after))
    ],
    "busy": [
        status(500),
        status(502),
        status(503),
        status(429, Retry_After="0"),
        status(503, Retry_After="Thu, 01 Jan 1970 00:00:00 GMT"),
    ],
    "in chunks": [in_chunks(10_000), in_chunks(1 << 20), cut(5)],
    "many": [fault for n in range(12) for fault in (cut(997 * n), status(503), fine())],
}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("ranges", [True, False])
def test_transient_faults_are_retried_without_loss(packed: Path, name: str, ranges: bool) -> None:
    expected = epoch(f"{packed}/train-*.tar")
    count = len(list(packed.glob("train-*.tar")))
    with serving(packed, ranges=ranges, faults=list(FAULTS[name])) as server:
        assert epoch(f"{server.url}/train-{{000000..{count - 1:06d}}}.tar") == expected
        assert not server.faults or not ranges  # one request fetches the rest of a shard


def test_shards_are_read_over_tls(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server whose certificate the environment does not trust is refused."""
    subject = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    new = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "1",
    ]
    subprocess.run(
        [*new, "-keyout", "key.pem", "-out", "cert.pem", *subject],
        cwd=tmp_path,
        check=True,
        capture_output=True,
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    expected = epoch(f"{packed}/train-*.tar")
    count = len(list(packed.glob("train-*.tar")))
    faults = [fine(), cut(70_001), status(503), cut(5, reset=True), fine(), cut(30_000)]
    with serving(packed, tls=context, faults=faults) as server:
        address = f"{server.url}/train-{{000000..{count - 1:06d}}}.tar"
        with pytest.raises(StorageError, match="CERTIFICATE_VERIFY_FAILED"):
            epoch(address)
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem"))
        assert epoch(address) == expected
        assert not server.faults


def test_connections_are_reused(packed: Path, served: Served) -> None:
    names: set[str] = set()

    def note(handler: Any, path: Path, start: int, stop: int) -> bool:
        names.add(str(handler.client_address))
        return False

    served.faults += [note] * 1000
    epoch([f"{served.url}/{path.name}" for path in sorted(packed.glob("train-*.tar"))])
    assert 1 <= len(names) <= THREADS + 1
    assert len([path for path, _ in served.requests if path.endswith(".tar")]) > 2 * len(names)


def test_a_slow_loop_gets_several_range_requests_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests go out in groups; readahead stays between three quarters and all of its bound."""
    wt.pack(
        ({"__key__": f"k{n:04d}", "bin": bytes(1000)} for n in range(2000)),
        str(tmp_path / "set"),
        shuffle=False,
    )
    monkeypatch.setenv("WDSTRAIN_RANGE_SIZE", "16KiB")
    with serving(tmp_path / "set") as server:
        loader = wt.Loader(server.url, batch_size=4, shuffle_buffer=8)
        begun, held = [0], []
        batches = collected_batches(loader.index, loader.plan, ahead=128 << 10)
        for step, (_, run, _) in enumerate(batches):
            wait_until_paused(run)
            held.append(run.bytes_ahead // 1536)
            begun.append(held[-1] + 4 * (step + 1))
            if begun[-1] == 2000:  # all samples
                break
        batches.close()
        held.pop()
        begun.pop()
    ranges = np.diff(begun[1:]) // 10  # of ten samples
    assert len(held) > 400
    assert sorted(set(ranges.tolist())) == [0, 3], ranges
    assert min(held) >= 3 * 85 // 4, min(held)
    assert max(held) <= 4 + 85 + 10, max(held)


def spans(server: Served, name: str) -> list[tuple[int, int]]:
    """Return the requested ranges of a file, and forget the requests."""
    with server.lock:
        ranges = [ranged for path, ranged in server.requests if path == f"/{name}"]
        server.requests.clear()
    return sorted(
        (int(start), int(stop) + 1)
        for start, stop in (
            given_range.removeprefix("bytes=").split("-") for given_range in ranges if given_range
        )
    )


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_single_epoch_requests_each_byte_once(tmp_path: Path, num_workers: int) -> None:
    rows = ({"__key__": f"k{n:04d}", "bin": os.urandom(1000 + n)} for n in range(200))
    index = wt.pack(rows, str(tmp_path / "set"))
    size, tar = index.shards[0].bytes, index.shards[0].name
    options: dict[str, Any] = {
        "batch_size": 32,
        "tail": "keep",
        "shuffle_buffer": 50,
        "num_workers": num_workers,
    }
    local = wt.Loader(str(tmp_path / "set"), **options)
    with serving(tmp_path / "set") as server:
        loader = wt.Loader(server.url, **options)
        for number in (0, 0, 1, 3, 0):
            delivered = [batch["__key__"] for batch in loader.epoch(number, until=number + 1)]
            assert delivered == [batch["__key__"] for batch in local.epoch(number)]
            requested = spans(server, tar)
            assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(requested)), (
                "a byte was asked for twice"
            )
            assert sum(stop - start for start, stop in requested) <= size
        for number in (0, 1, 2):  # consecutive epochs up to the last
            delivered = [batch["__key__"] for batch in loader.epoch(number, until=3)]
            assert delivered == [batch["__key__"] for batch in local.epoch(number)]
        assert sum(stop - start for start, stop in spans(server, tar)) <= 3 * size
        for _ in range(4):  # the same epoch several times, unannounced
            for _ in loader.epoch(0):
                pass
        assert sum(stop - start for start, stop in spans(server, tar)) <= 5 * size
        with pytest.raises(UsageError, match="until=2: must be above epoch=2"):
            loader.epoch(2, until=2)
        loader.close()
    local.close()


@pytest.mark.slow
def test_training_reads_train_and_val_shards_once_an_epoch(tmp_path: Path) -> None:
    write_class_folder(tmp_path / "pictures", {"a": 60, "b": 60})
    index = wt.convert_folder(
        str(tmp_path / "pictures"), str(tmp_path / "set"), split={"train": 0.6, "val": 0.4}
    )
    sizes = {shard.name: shard.bytes for shard in index.shards}
    options: dict[str, Any] = {"epochs": 3, "batch_size": 8, "image_size": 8}
    with serving(tmp_path / "set") as server:
        urls = {split: f"{server.url}/{split}-000000.tar" for split in ("train", "val")}
        wt.train(urls["train"], str(tmp_path / "run"), val=urls["val"], **options)
        requests = list(server.requests)
        for name, size in sizes.items():
            server.requests[:] = requests
            assert sum(stop - start for start, stop in spans(server, name)) <= 3 * size
        server.requests.clear()
        wt.evaluate(str(tmp_path / "run" / "checkpoints" / "last.pt"), urls["val"])
        assert (
            sum(stop - start for start, stop in spans(server, "val-000000.tar"))
            <= sizes["val-000000.tar"]
        )


def test_a_stalled_request_is_repeated(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "WDSTRAIN_NETWORK_TIMEOUT", "4"
    )  # a quarter of it without a byte ends a request
    released = threading.Event()
    expected = epoch(f"{packed}/train-000000.tar")
    with serving(packed, faults=[stall(5000, released), fine(), stall(0, released)]) as server:
        assert epoch(f"{server.url}/train-000000.tar") == expected
        released.set()


def test_a_dropped_connection_resumes_at_the_byte_where_it_broke(packed: Path) -> None:
    size = (packed / "train-000000.tar").stat().st_size
    with (
        serving(packed, faults=[cut(70_001)]) as server,
        RemoteFile(f"{server.url}/train-000000.tar", size) as file,
    ):
        actual = bytearray(size)
        file.read_into(memoryview(actual), 0)
        assert actual == (packed / "train-000000.tar").read_bytes()
        assert [requested for _, requested in server.requests] == [
            f"bytes=0-{size - 1}",
            f"bytes=70001-{size - 1}",
        ]
        assert file.retries == 1


def test_permanent_errors_name_address_status_byte_and_attempts(
    packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WDSTRAIN_NETWORK_TIMEOUT", "0.5")
    with serving(packed, faults=[fine(), *[status(503)] * 10_000]) as server:
        loader = wt.Loader(f"{server.url}/train-{{000000..000001}}.tar", batch_size=4)
        with pytest.raises(
            StorageError,
            match=r"/train-00000\d.tar: byte \d+ did not arrive in \d+ attempts over \d s; last error: .*status 503.*WDSTRAIN_NETWORK_TIMEOUT",
        ):
            list(loader)
    with pytest.raises(
        StorageError, match=r"index.json: byte 0 did not arrive in \d+ attempts.*refused"
    ):
        wt.Loader("http://127.0.0.1:9/shards")


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the log lines about servers."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.name == "wdstrain" and "answer" in record.getMessage()
    ]


def until(moment: float) -> Callable[[Any, Path, int, int], bool]:
    """Return a fault: the server answers 503 until a moment of the monotonic clock."""

    def fault(handler: Any, path: Path, start: int, stop: int) -> bool:
        return time.monotonic() < moment and status(503)(handler, path, start, stop)

    return fault


def test_the_log_names_a_server_that_is_waited_for(
    packed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = epoch(f"{packed}/train-*.tar")
    count = len(list(packed.glob("train-*.tar")))
    with serving(packed) as server:
        server.faults += [fine(), fine(), *[until(time.monotonic() + 1.5)] * 10_000]
        assert epoch(f"{server.url}/train-{{000000..{count - 1:06d}}}.tar") == expected
    assert lines_of(caplog)[0].startswith(
        f"{server.url} does not answer (TemporaryError: status 503); retrying for up to 120 s (WDSTRAIN_NETW"
    )


def test_a_loader_waits_for_a_server_that_refuses_connections(packed: Path) -> None:
    """The server starts when the log contains the line about waiting."""
    expected = epoch(f"{packed}/train-000000.tar")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with ExitStack() as stack:
        lines: list[str] = []

        class Starts(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                lines.append(record.getMessage())
                if "does not answer" in lines[-1]:
                    stack.enter_context(serving(packed, port=port))

        handler = Starts(logging.WARNING)
        logging.getLogger("wdstrain").addHandler(handler)
        stack.callback(logging.getLogger("wdstrain").removeHandler, handler)
        assert epoch(f"http://127.0.0.1:{port}/train-000000.tar") == expected
    begins = next(line for line in lines if "answer" in line)
    assert begins.startswith(f"http://127.0.0.1:{port} does not answer (NewConnectionError: ")


def test_short_faults_are_not_logged(packed: Path, caplog: pytest.LogCaptureFixture) -> None:
    with serving(packed, faults=[cut(70_001), status(503), fine(), cut(10)]) as server:
        epoch(f"{server.url}/train-000000.tar")
        assert not server.faults
    assert not lines_of(caplog)


def test_a_silent_server_raises_after_the_network_timeout(
    packed: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Several requests are in flight, and any of them may time out first."""
    monkeypatch.setenv("WDSTRAIN_NETWORK_TIMEOUT", "2")
    released = threading.Event()
    with serving(packed) as server:
        loader = wt.Loader(f"{server.url}/train-000000.tar", batch_size=4)
        server.faults += [stall(100, released), *[stall(0, released)] * 100]
        with pytest.raises(
            StorageError,
            match=r"byte \d+ did not arrive in [3-9] attempts over [2-9] s; last error: .*WDSTRAIN_NETWORK",
        ):
            list(loader)
        released.set()
    line = lines_of(caplog)[0]  # the other request may log it too
    assert line.startswith(f"{server.url} does not answer (")
    assert "for up to 2 s" in line


@pytest.mark.parametrize("value", ["two", "-1", "nan", "inf"])
def test_a_network_timeout_must_be_a_number_of_seconds(
    packed: Path, served: Served, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WDSTRAIN_NETWORK_TIMEOUT", value)
    with pytest.raises(
        UsageError, match=f"WDSTRAIN_NETWORK_TIMEOUT='{value}': must be a number of seconds >= 0"
    ):
        wt.Loader(f"{served.url}/train-000000.tar", batch_size=4)


def test_an_object_that_changes_during_a_read_raises(tmp_path: Path, packed: Path) -> None:
    shutil.copytree(packed, tmp_path / "s")
    with serving(tmp_path / "s", faults=[fine(), fine(), change(b"other bytes")]) as server:
        loader = wt.Loader(f"{server.url}/train-000000.tar", batch_size=4)
        with pytest.raises(
            ShardError,
            match=r"train-000000.tar (changed while it was read|has 11 bytes, its index says)",
        ):
            list(loader)
    shutil.rmtree(tmp_path / "s")
    shutil.copytree(packed, tmp_path / "s")
    with serving(tmp_path / "s") as server:
        loader = wt.Loader(f"{server.url}/train-000000.tar", batch_size=4)
        os.truncate(tmp_path / "s" / "train-000000.tar", 10_240)
        with pytest.raises(
            ShardError, match=r"train-000000.tar has 10240 bytes, its index says \d+"
        ):
            list(loader)


def test_bytes_damaged_in_transfer_are_bad_samples(tmp_path: Path, packed: Path) -> None:
    shutil.copytree(packed, tmp_path / "s")
    offset = next(at for name, at, _ in wt.index(str(tmp_path / "s")).members(3) if name == "bin")
    with open(tmp_path / "s" / "train-000000.tar", "r+b") as file:
        file.seek(offset)
        file.write(bytes(16))
    with serving(tmp_path / "s") as server:
        loader = wt.Loader(
            f"{server.url}/train-000000.tar",
            batch_size=4,
            tail="keep",
            on_error="replace",
            max_errors=0.1,
        )
        list(loader)
        assert loader.report()["bad"] == 1
        loader.close()
        assert main(["verify", f"{server.url}/train-000000.tar"]) == 1


@pytest.mark.parametrize("after", range(1, 110))
def test_a_truncated_response_header_is_a_transient_fault(packed: Path, after: int) -> None:
    """This holds for the first request too, when no size is known."""
    data = (packed / "train-000000.tar").read_bytes()
    with serving(packed, faults=[end_in_headers(after)]) as server:
        with RemoteFile(f"{server.url}/train-000000.tar") as file:
            assert (file.size, file.bytes_at(0, 1000), file.retries) == (len(data), data[:1000], 1)
        assert not server.faults


def test_a_truncated_index_response_is_requested_again(packed: Path) -> None:
    index_bytes = (packed / "index.json").read_bytes()
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(index_bytes)}\r\n\r\n".encode()
    for after in (1, 15, 16, 20, 60, len(head) - 3, len(head), len(head) + 9):
        asked = []
        listener = socket.create_server(("127.0.0.1", 0))

        def answer(
            after: int = after, asked: list[int] = asked, listener: socket.socket = listener
        ) -> None:
            while len(asked) < 2:
                with listener.accept()[0] as connection:
                    connection.recv(65536)
                    asked.append(after)
                    connection.sendall((head + index_bytes)[: after if len(asked) == 1 else None])

        thread = threading.Thread(target=answer)
        thread.start()
        address = f"http://127.0.0.1:{listener.getsockname()[1]}/index.json"
        assert http.read_page(address) == (index_bytes, None)
        thread.join(10)
        listener.close()
        assert len(asked) == 2


def test_redirects_do_not_pass_secrets_to_other_hosts(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WDSTRAIN_HTTP_HEADERS", "X-Token: hush-header")
    expected = epoch(f"{packed}/train-000000.tar")
    with serving(packed) as other_server, serving(packed) as redirecting:
        redirecting.faults += [lead_to(other_server.url.replace("127.0.0.1", "localhost"))] * 1000
        assert (
            epoch(f"{redirecting.url.replace('://', '://me:hush-word@')}/train-000000.tar")
            == expected
        )
        assert other_server.requests
        assert not any({"X-Token", "Authorization"} & set(sent) for sent in other_server.headers)
        other_server.faults += [status(404)] * 9
        with pytest.raises(StorageError, match="404") as caught:
            epoch(f"{redirecting.url}/train-000000.tar")
        assert "hush" not in str(caught.value)


def test_a_proxy_of_the_environment_is_used(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = epoch(f"{packed}/train-000000.tar")
    with serving(packed) as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        assert epoch("http://data.invalid/train-000000.tar") == expected
        asked = len(proxy.requests)
        assert asked
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        with serving(packed) as server:
            assert epoch(f"{server.url}/train-000000.tar") == expected
        assert len(proxy.requests) == asked


@pytest.mark.parametrize(
    "address",
    [
        "http://h:99999/x.tar",
        "http://host:abc/x.tar",
        "http:///x.tar",
        "http://[::1/x.tar",
        f"http://{'a' * 64}.org/x.tar",
    ],
)
def test_an_invalid_address_is_refused_before_any_request(address: str) -> None:
    with pytest.raises(UsageError, match="not a valid address"):
        wt.Loader(address)


def test_a_cached_scan_of_a_missing_shard_does_not_affect_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_shards(tmp_path / "s", [7, 13, 4])
    with serving(tmp_path / "s") as server:
        wt.Loader(f"{server.url}/part-{{000..002}}.tar", batch_size=1)
        (tmp_path / "s" / "part-002.tar").unlink()
        server.requests.clear()
        assert len(wt.Loader(f"{server.url}/part-000.tar", batch_size=1)) == 7
        assert {path for path, _ in server.requests} == {"/index.json", "/part-000.tar"}
        with pytest.raises(StorageError, match="404"):
            wt.Loader(f"{server.url}/part-{{000..002}}.tar")


# --- several readers, and their end ---


def test_several_loaders_and_workers_read_one_server_at_once(packed: Path) -> None:
    expected = epoch(f"{packed}/train-*.tar")
    count = len(list(packed.glob("train-*.tar")))
    faults = [fault for n in range(20) for fault in (fine(), fine(), cut(1009 * n))]
    delivered: list[Any] = []
    with serving(packed, faults=faults) as server:
        address = f"{server.url}/train-{{000000..{count - 1:06d}}}.tar"
        threads = [
            threading.Thread(target=lambda: delivered.append(epoch(address))) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert delivered == [expected] * 4


def test_a_resume_requests_no_byte_before_its_window(packed: Path) -> None:
    count = len(list(packed.glob("train-*.tar")))
    with serving(packed) as server:
        address = f"{server.url}/train-{{000000..{count - 1:06d}}}.tar"
        loader = wt.Loader(address, batch_size=4, shuffle=False)
        uninterrupted = [batch["__key__"] for batch in loader]
        loader.close()
        server.requests.clear()
        loader = wt.Loader(address, batch_size=4, shuffle=False)
        assert [
            batch["__key__"] for batch in loader.epoch(0, start=len(uninterrupted) - 3)
        ] == uninterrupted[-3:]
        loader.close()
        assert {path for path, _ in server.requests if path.endswith(".tar")} <= {
            f"/train-{n:06d}.tar" for n in (count - 1, 0, 1)
        }


def test_interrupted_loops_leave_no_thread(served: Served, packed: Path) -> None:
    count = len(list(packed.glob("train-*.tar")))
    for _ in range(10):
        loader = wt.Loader(f"{served.url}/train-{{000000..{count - 1:06d}}}.tar", batch_size=4)
        next(iter(loader))
        loader.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("wdstrain")]


def test_worker_processes_and_interrupted_loops_work_with_a_server(
    served: Served, packed: Path
) -> None:
    fields = {"label": wt.label()}
    expected = [
        batch["label"].tolist()
        for batch in wt.Loader(str(packed / "train-000000.tar"), fields, batch_size=8)
    ]
    loader = wt.Loader(f"{served.url}/train-000000.tar", fields, batch_size=8, num_workers=2)
    assert [batch["label"].tolist() for batch in loader] == expected
    loader.close()


# --- under webdataset ---


@pytest.fixture
def opener() -> Iterator[None]:
    before = dict(wds.gopen_schemes)
    wds.gopen_schemes.update(dict.fromkeys(("http", "https", "s3"), wt.gopen))
    yield
    wds.gopen_schemes.update(before)
    del wds.gopen_schemes["s3"]


@pytest.mark.parametrize("ranges", [True, False])
def test_webdataset_reads_through_the_http_opener(
    packed: Path, opener: None, ranges: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WDSTRAIN_NETWORK_TIMEOUT", "2")

    def samples(urls: list[str]) -> list[tuple[str, bytes]]:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", ResourceWarning
            )  # webdataset leaves its files to the garbage collector
            actual = [
                (sample["__key__"], sample["bin"])
                for sample in wds.WebDataset(urls, shardshuffle=False)
            ]
            gc.collect()
        return actual

    names = sorted(path.name for path in packed.glob("train-*.tar"))
    expected = samples([str(packed / name) for name in names])
    faults = [cut(0), cut(70_001), fine(), cut(99, reset=True), status(503), cut_in_headers()]
    with serving(packed, ranges=ranges, faults=faults) as server:
        assert samples([f"{server.url}/{name}" for name in names]) == expected
        assert not server.faults
    if not ranges:
        return
    monkeypatch.setenv("WDSTRAIN_NETWORK_TIMEOUT", "0.5")
    with (
        serving(packed, faults=[fine(), *[cut(100)] + [status(500)] * 10_000]) as server,
        pytest.raises(StorageError, match=r"byte 100 did not arrive in \d+ attempts .*status 500"),
    ):
        samples([f"{server.url}/{name}" for name in names[:2]])


def test_a_file_object_of_an_address_reads_and_seeks(packed: Path, served: Served) -> None:
    data = (packed / "train-000000.tar").read_bytes()
    with wt.gopen(f"{served.url}/train-000000.tar") as file:
        assert (file.read(10), file.tell()) == (data[:10], 10)
        file.seek(-5, os.SEEK_END)
        assert (file.read(), file.read()) == (data[-5:], b"")
        file.seek(0)
        assert file.read() == data
    with pytest.raises(UsageError, match="is not supported"):
        wt.gopen(f"{served.url}/x.tar", "wb")
    with pytest.raises(UsageError, match="not an address of a server"):
        wt.gopen("x.tar")


# --- secrets ---


def test_secrets_are_sent_and_never_shown(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, caplog: Any
) -> None:
    monkeypatch.setenv("WDSTRAIN_HTTP_HEADERS", "X-Token: hush-header\nX-Other: 1")
    with serving(packed) as server:
        host = server.url.removeprefix("http://")
        address = f"http://me:hush-word@{host}/train-000000.tar?sig=hush-query"
        loader = wt.Loader(address, batch_size=4)
        keys = [key for batch in loader for key in batch["__key__"]]
        texts = [
            str(loader),
            str(loader.index),
            json.dumps(loader.report()),
            json.dumps(loader.state_dict()),
        ]
        loader.close()
        assert len(keys) > 50
        for sent in server.headers:
            assert sent["Authorization"] == "Basic bWU6aHVzaC13b3Jk"
            assert sent["X-Token"] == "hush-header"
        assert all("sig=hush-query" in path for path, _ in server.requests)
        index = wt.convert_tars(address, str(tmp_path / "copy"))
        texts += [path.read_text("latin1") for path in (tmp_path / "copy").iterdir()] + [
            json.dumps(index.info)
        ]
        train = ["train", address, "--out", str(tmp_path / "run"), "--epochs", "1"]
        write_class_folder(tmp_path / "in", {"cat": 30, "dog": 30})
        wt.convert_folder(str(tmp_path / "in"), str(tmp_path / "photos"))
        with serving(tmp_path / "photos") as photos:
            pictures = (
                photos.url.replace("://", "://me:hush-word@") + "/train-000000.tar?sig=hush-query"
            )
            caplog.set_level(logging.DEBUG)
            assert (
                main(
                    [
                        "train",
                        pictures,
                        "--out",
                        str(tmp_path / "run"),
                        "--epochs",
                        "1",
                        "--batch-size",
                        "8",
                    ]
                )
                == 0
            )
        texts += [
            path.read_text("latin1") for path in (tmp_path / "run").rglob("*") if path.is_file()
        ]
        server.faults += [
            end_in_headers(60),
            fine(),
            end_in_headers(100),
            status(403),
            *[status(503)] * 99,
        ]
        for words in (
            ["info", address.replace("000000", "999999")],
            ["info", address, address],
            ["index", address],
            ["info", address.replace("http", "ftp")],
            train,
            ["verify", address],
            ["verify", address],
        ):
            main(words)
        texts += [record.getMessage() for record in caplog.records]
        assert any("?..." in text or "/train-000000.tar" in text for text in texts)
        shown = capsys.readouterr()
        texts += [shown.out, shown.err]
    assert not [text for text in texts if "hush" in text]
    assert redacted("https://a:b@h:1/p/x.tar?q=1#f") == "https://h:1/p/x.tar"


# --- real servers ---


@pytest.fixture
def nginx(packed: Path, tmp_path: Path) -> Iterator[str]:
    """nginx of Debian's packages, serving the shards."""
    places = [
        str(ROOT / ".venv" / "nginx" / "usr" / "sbin" / "nginx"),
        shutil.which("nginx") or "/usr/sbin/nginx",
    ]
    program = next((place for place in places if os.path.exists(place)), None)
    if program is None:
        pytest.skip(
            "nginx is not here: scripts/test.sh unpacks Debian's package where it can; else apt install nginx"
        )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = tmp_path / "nginx.conf"
    user = "user root;" if os.geteuid() == 0 else ""
    config.write_text(
        f"{user} daemon off; pid {tmp_path}/pid; error_log {tmp_path}/error.log; events {{}}\n"
        f"http {{ access_log off; client_body_temp_path {tmp_path}/a; proxy_temp_path {tmp_path}/b; fastcgi_temp_path {tmp_path}/c;\n"
        f"uwsgi_temp_path {tmp_path}/d; scgi_temp_path {tmp_path}/e;\n"
        f"server {{ listen 127.0.0.1:{port}; root {packed}; }} }}\n"
    )
    with subprocess.Popen(
        [program, "-e", f"{tmp_path}/error.log", "-c", str(config), "-p", str(tmp_path)],
        stderr=subprocess.PIPE,
    ) as process:
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
    count = len(list(packed.glob("train-*.tar")))
    assert epoch(f"{nginx}/train-{{000000..{count - 1:06d}}}.tar") == epoch(f"{packed}/train-*.tar")
    assert main(["verify", nginx]) == 0
    with pytest.raises(StorageError, match="404"):
        wt.Loader(f"{nginx}/none.tar")


def test_latency_is_hidden_by_prefetching(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a pause before each answer, a pass takes about as long as the pauses of one thread."""
    for number in range(8):
        write_tar(
            tmp_path / f"s-{number}.tar",
            [(f"k{number}-{i}", {"bin": bytes(4000)}) for i in range(60)],
        )
    wt.index(str(tmp_path))
    with serving(tmp_path, delay=0.05) as server:
        loader = wt.Loader(f"{server.url}/s-{{0..7}}.tar", batch_size=8, shuffle=False)
        keys = [key for batch in loader for key in batch["__key__"]]
        requested = [path for path, _ in server.requests if path.endswith(".tar")]
        loader.close()
    assert len(keys) == 480
    # The requests of several shards were in flight before the first one was consumed.
    assert len(set(requested[:6])) >= 2


def test_a_process_ends_while_a_server_stalls(packed: Path) -> None:
    released = threading.Event()

    def stalled(handler: Any, path: Path, start: int, stop: int) -> bool:
        return path.name != "train-000000.tar" and stall(100, released)(handler, path, start, stop)

    with serving(packed, faults=[stalled] * 50) as server:
        code = (
            "import logging; logging.disable(logging.WARNING)  # without a compiler there is one\n"
            f"import wdstrain as wt; urls = ['{server.url}/train-%06d.tar' % n for n in range(3)]\n"
            "loader = wt.Loader(urls, batch_size=4, shuffle=False)\n"
            "print(next(iter(loader))['__key__'][0])"
        )
        begun = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
        )
        seconds = time.monotonic() - begun
        released.set()
    assert (done.returncode, done.stderr) == (0, "")
    assert seconds < 15  # less than the stall


def test_training_on_class_folders_of_a_server_equals_the_disk(tmp_path: Path) -> None:
    write_class_folder(tmp_path / "in", {"cat": 30, "dog": 30})
    wt.convert_folder(str(tmp_path / "in"), str(tmp_path / "s"), split={"train": 0.7, "val": 0.3})
    common = ["--epochs", "1", "--image-size", "16", "--batch-size", "8"]
    with serving(tmp_path / "s") as server:
        assert main(["train", server.url, "--out", str(tmp_path / "far"), *common]) == 0
        cached = ["--cache-dir", str(tmp_path / "cache"), "--cache-limit", "1GB"]
        assert main(["train", server.url, "--out", str(tmp_path / "kept"), *common, *cached]) == 0
        asked = len([path for path, _ in server.requests if path.endswith(".tar")])
        best = str(tmp_path / "kept" / "checkpoints" / "best.pt")
        assert main(["evaluate", best, f"{server.url}/val-000000.tar", *cached]) == 0
        assert len([path for path, _ in server.requests if path.endswith(".tar")]) == asked
    assert main(["train", str(tmp_path / "s"), "--out", str(tmp_path / "near"), *common]) == 0
    runs = [
        (tmp_path / run / "metrics.jsonl").read_text().splitlines()
        for run in ("far", "kept", "near")
    ]
    assert len({json.loads(lines[-1])["loss"] for lines in runs}) == 1
