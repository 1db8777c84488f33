"""`wdstrain serve`: any byte range of a file, and no file outside the folder."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import wdstrain as wt
from wdstrain.cli import main
from wdstrain.errors import StorageError
from wdstrain.serve import Server

MB = 1 << 20
BYTES = random.Random(1).randbytes(10_000)
STRANGE = "a b<i>&ä:1%2e.tar"

Answer = tuple[int, http.client.HTTPMessage, bytes]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all kinds of entries, and a secret beside it."""
    root = tmp_path_factory.mktemp("serving")
    shards = root / "shards"
    (shards / "sub").mkdir(parents=True)
    (shards / ".hidden").mkdir()
    (root / "shards-not").mkdir()
    for place in (
        "secret.tar",
        "shards-not/secret.tar",
        "shards/.secret.tar",
        "shards/.hidden/s.tar",
    ):
        (root / place).write_bytes(b"hushhush")
    for name in ("a.tar", "index.json", "page.html", "plain", "sub/b.tar", STRANGE):
        (shards / name).write_bytes(BYTES)
    (shards / "empty.tar").touch()
    (shards / "one.tar").write_bytes(b"1")
    (shards / "near.tar").symlink_to("a.tar")
    (shards / "nearby").symlink_to("sub")
    (shards / "store.tar").symlink_to(shards / ".hidden" / "s.tar")
    far = {"far.tar": "../secret.tar", "up": "..", "beside": "../shards-not"}
    for name, target in {**far, "gone": "nothing", "me": "me"}.items():
        (shards / name).symlink_to(target)
    (shards / "device").symlink_to("/dev/zero")
    os.mkfifo(shards / "pipe")
    return shards


@pytest.fixture
def server(folder: Path) -> Iterator[Server]:
    with Server(folder) as running:
        yield running


def connect(server: Server) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(*address(server), timeout=20)


def ask(
    server: Server | http.client.HTTPConnection, path: str, method: str = "GET", **headers: str
) -> Answer:
    """Return the response to a request, over a new connection unless one is given."""
    connection = connect(server) if isinstance(server, Server) else server
    try:
        connection.request(
            method, path, headers={name.replace("_", "-"): value for name, value in headers.items()}
        )
        response = connection.getresponse()
        return response.status, response.headers, response.read()
    finally:
        if isinstance(server, Server):
            connection.close()


def raw(server: Server, target: bytes) -> tuple[int, bytes]:
    """Return status and complete response for a target of any bytes."""
    with socket.create_connection(address(server), timeout=20) as plugged:
        plugged.sendall(b"GET " + target + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        response = rest_of(plugged)
    return int(response.split(b" ", 2)[1]), response


def address(server: Server) -> tuple[str, int]:
    host, port = server.url.removeprefix("http://").rstrip("/").rsplit(":", 1)
    return host.strip("[]"), int(port)


def rest_of(plugged: socket.socket) -> bytes:
    """Return all bytes until the server closes the connection."""
    received = bytearray()
    while chunk := plugged.recv(MB):
        received += chunk
    return bytes(received)


# --- ranges ---


def test_any_range_of_a_file_equals_a_slice_of_it(server: Server) -> None:
    draw, connection = random.Random(2), connect(server)
    cases = [[0, 1], [0, 10_000], [9_999, 10_000], [5, 20_000]]
    cases += [draw.sample(range(10_001), 2) for _ in range(100)]
    for start, stop in map(sorted, cases):
        status, headers, body = ask(connection, "/a.tar", Range=f"bytes={start}-{stop - 1}")
        assert (status, body) == (206, BYTES[start:stop])
        shown = f"bytes {start}-{min(stop, 10_000) - 1}/10000"
        assert (headers["Content-Range"], headers["Accept-Ranges"]) == (shown, "bytes")
    assert ask(connection, "/a.tar", Range="bytes=9000-")[2] == BYTES[9000:]
    assert ask(connection, "/a.tar", Range="bytes=-7")[2] == BYTES[-7:]
    assert ask(connection, "/a.tar", Range="bytes=-70000")[2] == BYTES
    connection.close()


@pytest.mark.parametrize("words", ["bytes=0-1,5-6", "lines=1-2", "bytes=5-2", "bytes=x-", "bytes="])
def test_an_unsupported_range_returns_the_complete_file(server: Server, words: str) -> None:
    assert ask(server, "/a.tar", Range=words)[::2] == (200, BYTES)


def test_a_range_beyond_the_end_is_refused_with_the_size(server: Server) -> None:
    for words in ("bytes=10000-", "bytes=999999-1000000"):
        status, headers, body = ask(server, "/a.tar", Range=words)
        assert (status, headers["Content-Range"]) == (416, "bytes */10000")
        assert not set(body) & set(BYTES) or len(body) < 200
    status, headers, body = ask(server, "/empty.tar")
    assert (status, headers["Content-Length"], body) == (200, "0", b"")
    assert ask(server, "/empty.tar", Range="bytes=0-")[0] == 416


def test_ranges_beyond_four_gigabytes_are_served(tmp_path: Path) -> None:
    with open(tmp_path / "far.tar", "wb") as file:
        file.truncate((5 << 30) - 3)
        file.seek(5 << 30)
        file.write(b"end")
    with Server(tmp_path) as server:
        assert ask(server, "/far.tar", Range=f"bytes={5 << 30}-")[2] == b"end"


def test_head_has_the_headers_of_get_and_ignores_ranges(server: Server) -> None:
    names = ("Content-Length", "Content-Type", "ETag", "Last-Modified", "Accept-Ranges")
    status, headers, body = ask(server, "/a.tar", "HEAD", Range="bytes=0-3")
    _, expected, _ = ask(server, "/a.tar")
    assert (status, body) == (200, b"")
    assert [headers[name] for name in names] == [expected[name] for name in names]


@pytest.mark.parametrize(
    ("name", "kind"),
    [("a.tar", "application/x-tar"), ("index.json", "application/json")]
    + [(name, "application/octet-stream") for name in ("page.html", "plain")],
)
def test_no_file_has_the_content_type_of_html(server: Server, name: str, kind: str) -> None:
    headers = ask(server, f"/{name}")[1]
    assert (headers["Content-Type"], headers["X-Content-Type-Options"]) == (kind, "nosniff")


def test_conditional_requests_are_supported(server: Server) -> None:
    headers = ask(server, "/a.tar")[1]
    tag, modified = headers["ETag"], headers["Last-Modified"]
    assert ask(server, "/a.tar", If_Match=f'"other", {tag}')[0] == 200
    assert ask(server, "/a.tar", If_Match="*")[0] == 200
    assert ask(server, "/a.tar", If_Match='"other"')[0] == 412
    for known in (tag, modified):
        assert ask(server, "/a.tar", If_Range=known, Range="bytes=0-1")[::2] == (206, BYTES[:2])
    for old in (f"W/{tag}", '"other"', "Thu, 01 Jan 1970 00:00:01 GMT"):
        assert ask(server, "/a.tar", If_Range=old, Range="bytes=0-1")[::2] == (200, BYTES)


def test_ranges_of_a_replaced_file_are_not_mixed(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(b"old" * 100)
    with Server(tmp_path) as server:
        tag = ask(server, "/a.tar", Range="bytes=0-9")[1]["ETag"]
        (tmp_path / "new").write_bytes(b"new" * 100)
        os.utime(tmp_path / "new", (1, 1))
        os.replace(tmp_path / "new", tmp_path / "a.tar")
        assert ask(server, "/a.tar", If_Match=tag, Range="bytes=10-19")[0] == 412
        response = ask(server, "/a.tar", If_Range=tag, Range="bytes=10-19")
        assert response[::2] == (200, b"new" * 100)


# --- access ---


def escaping_targets() -> list[bytes]:
    """Return targets that escape a folder by spellings of dots and separators."""
    dots = b".. %2e%2e .%2e %252e%252e %c0%ae%c0%ae ..%00 ..; %2e%2e%20".split()
    between = [b"/", b"%2f", b"\\", b"%5c", b"%252f", b"%c0%af", b"//", b"/./"]
    begins = [b"/", b"//", b"/sub/", b"/nearby/", b"/%2f", b"file:///", b"http://x/", b""]
    ends = [(1, b"secret.tar"), (9, b"etc/passwd")]
    targets = [
        begin + separator.join([*[dot] * depth, end.replace(b"/", separator)])
        for begin, dot, separator, (depth, end) in itertools.product(begins, dots, between, ends)
    ]
    hidden = [b".secret.tar", b"%2esecret.tar", b".hidden/s.tar", b"sub/../.secret.tar"]
    links = [b"far.tar", b"up/secret.tar", b"up", b"beside/secret.tar", b"store.tar", b"device"]
    odd = b"pipe gone me me/a.tar a.tar%00 a.tar/ % %zz a.tar/a.tar".split()
    return targets + [b"/" + name for name in (*hidden, *links, *odd, b"x" * 5000, b"a/" * 2000)]


def test_files_outside_the_folder_and_hidden_files_are_not_served(server: Server) -> None:
    targets = escaping_targets()
    assert len(targets) > 1000
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda target: raw(server, target), targets))
    for target, (status, body) in zip(targets, answers, strict=True):
        if target != b"/store.tar":  # a link within the folder
            assert status in (400, 404, 414), target
            assert b"hushhush" not in body.partition(b"\r\n\r\n")[2], target
            assert b"root:" not in body, target


def test_links_within_the_folder_are_followed(server: Server) -> None:
    for name in ("near.tar", "nearby/b.tar"):
        assert ask(server, f"/{name}")[::2] == (200, BYTES)
    assert ask(server, "/store.tar")[::2] == (200, b"hushhush")


def test_a_link_that_changes_during_requests_serves_no_outside_file(tmp_path: Path) -> None:
    (tmp_path / "shards" / "sub").mkdir(parents=True)
    (tmp_path / "shards" / "sub" / "b.tar").write_bytes(b"b")
    (tmp_path / "secret.tar").write_bytes(b"hushhush")
    over, shards = threading.Event(), tmp_path / "shards"

    def change() -> None:
        for target in itertools.cycle([shards / "sub", tmp_path]):
            (shards / ".next").symlink_to(target)
            (shards / ".next").replace(shards / "link")
            if over.is_set():
                return

    changing = threading.Thread(target=change)
    with Server(shards) as server:
        connection = connect(server)
        changing.start()
        try:
            names = ["/link/secret.tar", "/link/b.tar"] * 300
            answers = [ask(connection, name) for name in names]
        finally:
            over.set()
            changing.join()
            connection.close()
    assert {status for status, _, _ in answers} == {200, 404}
    assert all(b"hushhush" not in body for _, _, body in answers)


def test_a_folder_that_is_a_link_is_served(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder)
    with Server(tmp_path / "link") as server:
        assert ask(server, "/one.tar")[2] == b"1"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.tar").touch(0)
    with Server(tmp_path) as server:
        assert ask(server, "/a.tar")[0] == 403


# --- connections ---


def test_a_connection_is_kept_alive_between_requests(server: Server) -> None:
    connection = connect(server)
    connection.connect()
    first = connection.sock
    for path, status in (("/a.tar", 200), ("/nothing", 404), ("/", 404), ("/a.tar", 200)):
        assert ask(connection, path)[0] == status
        assert connection.sock is first
    connection.close()


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PROPFIND"])
def test_other_methods_are_refused(server: Server, method: str) -> None:
    assert ask(server, "/a.tar", method)[0] == 501


def test_many_concurrent_clients_get_their_own_bytes(server: Server) -> None:
    def client(number: int) -> bool:
        draw, connection = random.Random(number), connect(server)
        for _ in range(20):
            start = draw.randrange(9000)
            body = ask(connection, "/a.tar", Range=f"bytes={start}-{start + 999}")[2]
            if body != BYTES[start : start + 1000]:
                return False
        connection.close()
        return True

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(client, range(32)))


def test_sending_a_shrinking_file_closes_the_connection(tmp_path: Path) -> None:
    with open(tmp_path / "large.tar", "wb") as file:
        file.truncate(64 * MB)
    with Server(tmp_path) as server, socket.socket() as client:
        client.settimeout(20)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(address(server))
        client.sendall(b"GET /large.tar HTTP/1.1\r\nHost: x\r\n\r\n")
        assert client.recv(4) == b"HTTP"
        os.truncate(tmp_path / "large.tar", MB)
        head, _, body = rest_of(client).partition(b"\r\n\r\n")
        assert b"Content-Length: 67108864" in head
        assert len(body) < 64 * MB


def test_close_does_not_wait_for_idle_or_stalled_clients(tmp_path: Path) -> None:
    with open(tmp_path / "large.tar", "wb") as file:
        file.truncate(64 * MB)
    with Server(tmp_path) as server:
        resting, slow = (socket.create_connection(address(server)) for _ in range(2))
        slow.sendall(b"GET /large.tar HTTP/1.1\r\nHost: x\r\n\r\n")
        assert slow.recv(4) == b"HTTP"
    server.wait()
    resting.close()
    slow.close()


# --- with the loader ---


def test_a_loader_reads_from_the_server_as_from_the_disk(tmp_path: Path) -> None:
    rows = ({"__key__": f"k{n:04d}", "bin": os.urandom(2000 + n), "cls": n % 3} for n in range(300))
    wt.pack(rows, str(tmp_path / "shards"), max_shard_size=200_000)

    def epoch(urls: str) -> list[Any]:
        loader = wt.Loader(urls, batch_size=16, tail="keep", shuffle_buffer=100)
        batches = [(batch["__key__"], batch["bin"], batch["cls"]) for batch in loader.epoch(1)]
        loader.close()
        return batches

    expected = epoch(str(tmp_path / "shards"))
    last = len(list((tmp_path / "shards").glob("*.tar"))) - 1
    with Server(tmp_path) as server:
        assert last > 1
        pattern = f"shards/train-{{000000..{last:06d}}}.tar"
        for address in ("shards", "shards/", "shards/index.json", pattern):
            assert epoch(server.url + address) == expected
        assert main(["verify", f"{server.url}shards"]) == 0


# --- the command ---


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_the_command_serves_until_a_signal_and_prints_totals(
    folder: Path, sent: signal.Signals
) -> None:
    words = ["--json"] if sent == signal.SIGTERM else []
    command = [sys.executable, "-m", "wdstrain", "serve", str(folder), "--port", "0", *words]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        match = re.fullmatch(
            r"serving (.*) at (http://127\.0\.0\.1:(\d+)/) \(Ctrl-C ends\)\n", line
        )
        assert match, line
        assert match[1] == str(folder.resolve())
        connection = http.client.HTTPConnection("127.0.0.1", int(match[3]), timeout=20)
        assert ask(connection, "/a.tar", Range="bytes=5-9")[2] == BYTES[5:10]
        begun = time.monotonic()
        process.send_signal(sent)
        out, err = process.communicate(timeout=20)
        assert time.monotonic() - begun < 5
        connection.close()
    assert (process.returncode, err) == (0, "")
    if words:
        report = json.loads(out)
        assert report.pop("seconds") > 0
        assert report == {"folder": match[1], "url": match[2], "requests": 1, "bytes": 5}
    else:
        assert re.fullmatch(r"served 1 request, 0\.0 MB, in \d+ s\n", out)


def test_the_help_of_serve_has_an_example(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    assert "example: wdstrain serve " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "status", "sentence"),
    [
        (["absent"], 2, "absent cannot be served: No such file or directory.\nhint: Name a folder"),
        (["file"], 2, "file cannot be served: Not a directory.\nhint: Name a folder"),
        (
            [".", "--port", "{taken}"],
            1,
            "nothing can listen at --host 127.0.0.1, --port {taken}: [Errno 98] Address already in use.\n"
            "hint: Choose 127.0.0.1 or 0.0.0.0, and a port above 1023; 0 is any free one.",
        ),
        (
            [".", "--host", "192.0.2.1"],
            1,
            "--port 8000: [Errno 99] Cannot assign requested address",
        ),
        ([".", "--host", "a..b"], 1, "nothing can listen at --host a..b, --port 8000: [Errno -2]"),
        ([".", "--port", "70000"], 1, "nothing can listen at --host 127.0.0.1, --port 70000: "),
        ([".", "--port", "-1"], 2, "--port -1: must be an integer >= 0."),
    ],
)
def test_unservable_folders_and_addresses_are_one_line_errors(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
    words: list[str],
    status: int,
    sentence: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert main(["serve", *(word.replace("{taken}", port) for word in words)]) == status
    printed = capsys.readouterr()
    assert sentence.replace("{taken}", port) in printed.err
    assert printed.out == ""


def test_serving_beyond_loopback_logs_a_warning(folder: Path) -> None:
    command = [sys.executable, "-m", "wdstrain", "serve", str(folder), "--host", "0.0.0.0"]
    with subprocess.Popen([*command, "--port", "0"], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert re.search(r"at http://127\.0\.0\.1:\d+/ ", process.stderr.readline())
        line = process.stderr.readline()
        assert re.match(r"Everyone who reaches this machine \(.+\) can read this folder", line)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0


def test_host_names_and_ipv6_addresses_are_supported(folder: Path) -> None:
    with Server(folder, "localhost") as server:
        assert server.url.startswith("http://127.0.0.1:")
        assert server.is_local
        assert ask(server, "/one.tar")[2] == b"1"
    try:
        newer = Server(folder, "::1")
    except StorageError:
        pytest.skip("this machine has no IPv6")
    with newer as server:
        assert server.url.startswith("http://[::1]:")
        assert ask(server, "/one.tar")[2] == b"1"


def test_an_address_is_used_by_one_server_at_a_time(folder: Path) -> None:
    with Server(folder) as server:
        port = address(server)[1]
        with pytest.raises(StorageError, match="Address already in use"):
            Server(folder, port=port)
        ask(server, "/one.tar")
    with Server(folder, port=port) as server:  # immediately, without waiting for TIME_WAIT
        assert ask(server, "/one.tar")[2] == b"1"
