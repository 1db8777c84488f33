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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from wdstrain.cli import main
from wdstrain.errors import StorageError
from wdstrain.serve import Server

MB = 1 << 20
BYTES = random.Random(1).randbytes(10_000)
STRANGE = "a b<i>&ä:1%2e.tar"

Answer = tuple[int, http.client.HTTPMessage, bytes]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("serving")
    shards = root / "shards"
    for place in (
        "secret.tar",
        "shards-not/secret.tar",
        "shards/.secret.tar",
        "shards/.hidden/s.tar",
    ):
        (root / place).parent.mkdir(parents=True, exist_ok=True)
        (root / place).write_bytes(b"hushhush")
    (shards / "sub").mkdir()
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
    with socket.create_connection(address(server), timeout=20) as plugged:
        plugged.sendall(b"GET " + target + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        response = rest_of(plugged)
    return int(response.split(b" ", 2)[1]), response


def address(server: Server) -> tuple[str, int]:
    host, port = server.url.removeprefix("http://").rstrip("/").rsplit(":", 1)
    return host.strip("[]"), int(port)


def rest_of(plugged: socket.socket) -> bytes:
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


def test_unsupported_ranges_get_the_complete_file_and_ranges_beyond_the_end_its_size(
    server: Server,
) -> None:
    for words in ("bytes=0-1,5-6", "lines=1-2", "bytes=5-2", "bytes=x-", "bytes="):
        assert ask(server, "/a.tar", Range=words)[::2] == (200, BYTES)
    for words in ("bytes=10000-", "bytes=999999-1000000"):
        status, headers, body = ask(server, "/a.tar", Range=words)
        assert (status, headers["Content-Range"]) == (416, "bytes */10000")
        assert len(body) < 200
    status, headers, body = ask(server, "/empty.tar")
    assert (status, headers["Content-Length"], body) == (200, "0", b"")
    assert ask(server, "/empty.tar", Range="bytes=0-")[0] == 416
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "PROPFIND"):
        assert ask(server, "/a.tar", method)[0] == 501


def test_head_has_the_headers_of_get_and_no_file_has_the_content_type_of_html(
    server: Server,
) -> None:
    connection = connect(server)
    kinds = {"a.tar": "x-tar", "index.json": "json", "page.html": "octet-stream"}
    for name, kind in kinds.items():
        _, expected, _ = ask(connection, f"/{name}")
        plugged = connection.sock
        status, headers, body = ask(connection, f"/{name}", "HEAD", Range="bytes=0-3")
        assert (status, body) == (200, b"")
        assert connection.sock is plugged  # kept alive
        assert headers["Content-Type"] == f"application/{kind}"
        assert headers["X-Content-Type-Options"] == "nosniff"
        for field in ("Content-Length", "ETag", "Last-Modified", "Accept-Ranges"):
            assert headers[field] == expected[field]
    connection.close()


def test_ranges_of_a_replaced_file_are_not_mixed(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(b"old" * 100)
    with Server(tmp_path) as server:
        headers = ask(server, "/a.tar")[1]
        tag, modified = headers["ETag"], headers["Last-Modified"]
        assert ask(server, "/a.tar", If_Match=f'"other", {tag}')[0] == 200
        assert ask(server, "/a.tar", If_Match="*")[0] == 200
        for known in (tag, modified):
            assert ask(server, "/a.tar", If_Range=known, Range="bytes=0-1")[::2] == (206, b"ol")
        (tmp_path / "new").write_bytes(b"new" * 100)
        os.utime(tmp_path / "new", (1, 1))
        os.replace(tmp_path / "new", tmp_path / "a.tar")
        assert ask(server, "/a.tar", If_Match=tag, Range="bytes=10-19")[0] == 412
        for old in (tag, f"W/{tag}", '"other"', "Thu, 01 Jan 1970 00:00:09 GMT"):
            response = ask(server, "/a.tar", If_Range=old, Range="bytes=10-19")
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


def test_links_within_the_folder_and_the_folder_itself_are_followed(
    server: Server, folder: Path, tmp_path: Path
) -> None:
    for name in ("near.tar", "nearby/b.tar"):
        assert ask(server, f"/{name}")[::2] == (200, BYTES)
    assert ask(server, "/store.tar")[::2] == (200, b"hushhush")
    (tmp_path / "link").symlink_to(folder)
    with Server(tmp_path / "link") as other:
        assert ask(other, "/one.tar")[2] == b"1"


def test_a_link_that_changes_during_requests_serves_no_outside_file(tmp_path: Path) -> None:
    (tmp_path / "shards" / "sub").mkdir(parents=True)
    (tmp_path / "shards/sub/b.tar").write_bytes(b"b")
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
        changing.start()
        try:
            answers = [ask(server, f"/link/{name}.tar") for name in ["secret", "b"] * 200]
        finally:
            over.set()
            changing.join()
    assert {status for status, _, _ in answers} == {200, 404}
    assert all(b"hushhush" not in body for _, _, body in answers)


# --- connections ---


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


# --- the command ---


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_the_command_serves_until_a_signal_and_prints_totals(
    folder: Path, sent: signal.Signals
) -> None:
    words = ["--json", "--host", "0.0.0.0"] if sent == signal.SIGTERM else []
    command = [sys.executable, "-m", "wdstrain", "serve", str(folder), "--port", "0", *words]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        begun = r"serving (.*) at (http://127\.0\.0\.1:(\d+)/) \(Ctrl-C ends\)\n"
        match = re.fullmatch(begun, line)
        assert match, line
        if words:
            warning = r"Everyone who reaches this machine \(.+\) can read this folder"
            assert re.match(warning, process.stderr.readline())
        connection = http.client.HTTPConnection("127.0.0.1", int(match[3]), timeout=20)
        assert ask(connection, "/a.tar", Range="bytes=5-9")[2] == BYTES[5:10]
        process.send_signal(sent)
        out, err = process.communicate(timeout=5)
        connection.close()
    assert (process.returncode, err) == (0, "")
    if words:
        report = json.loads(out)
        assert report.pop("seconds") > 0
        assert report == {"folder": match[1], "url": match[2], "requests": 1, "bytes": 5}
        assert match[1] == str(folder.resolve())
    else:
        assert re.fullmatch(r"served 1 request, 0\.0 MB, in \d+ s\n", out)


@pytest.mark.parametrize(
    ("words", "status", "sentence"),
    [
        (["absent"], 2, "absent cannot be served: No such file or directory.\nhint: Name a folder"),
        (
            [".", "--port", "{taken}"],
            1,
            "--port {taken}: [Errno 98] Address already in use.\nhint: Ch",
        ),
        ([".", "--host", "a..b"], 1, "nothing can listen at --host a..b, --port 8000: [Errno -2]"),
        ([".", "--port", "70000"], 1, "nothing can listen at --host 127.0.0.1, --port 70000: "),
        ([".", "--port", "-1"], 2, "--port -1: must be an integer >= 0."),
    ],
)
def test_unservable_folders_and_addresses_are_one_line_errors(
    capsys: Any, words: list[str], status: int, sentence: str
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert main(["serve", *(word.replace("{taken}", port) for word in words)]) == status
    printed = capsys.readouterr()
    assert sentence.replace("{taken}", port) in printed.err
    assert printed.out == ""


def test_host_names_and_ipv6_addresses_are_supported_and_an_address_is_free_again_at_once(
    folder: Path,
) -> None:
    with Server(folder, "localhost") as server:
        assert server.url.startswith("http://127.0.0.1:")
        assert server.is_local
        assert ask(server, "/one.tar")[2] == b"1"
    with Server(folder, port=address(server)[1]) as server:  # without waiting for TIME_WAIT
        assert ask(server, "/one.tar")[2] == b"1"
    try:
        newer = Server(folder, "::1")
    except StorageError:
        pytest.skip("this machine has no IPv6")
    with newer as server:
        assert server.url.startswith("http://[::1]:")
        assert ask(server, "/one.tar")[2] == b"1"
