"""`wdstrain serve`: any part of a file, nothing outside the folder, whatever clients do."""

from __future__ import annotations

import errno
import http.client
import json
import os
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from email.utils import formatdate, parsedate_to_datetime
from pathlib import Path
from typing import Any

import pytest

import wdstrain as wt
from wdstrain.cli import main
from wdstrain.errors import StorageError, UsageError
from wdstrain.serving import Server, answering, inside
from wdstrain.serving import server as serving

MB = 1 << 20
BYTES = random.Random(1).randbytes(10_000)
STRANGE = "a b<i>&ä:1%2e.tar"

Answer = tuple[int, http.client.HTTPMessage, bytes]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all kinds of things in it, and a secret beside it."""
    root = tmp_path_factory.mktemp("serving")
    shards = root / "shards"
    (shards / "sub").mkdir(parents=True)
    (shards / ".hidden").mkdir()
    (root / "shards-not").mkdir()
    for place in (
        root / "secret.tar",
        root / "shards-not" / "secret.tar",
        shards / ".secret.tar",
        shards / ".hidden" / "s.tar",
    ):
        place.write_bytes(b"secret")
    for name in ("a.tar", "index.json", "page.html", "plain", "sub/b.tar", STRANGE):
        (shards / name).write_bytes(BYTES)
    (shards / "empty.tar").touch()
    (shards / "one.tar").write_bytes(b"1")
    (shards / "near.tar").symlink_to("a.tar")
    (shards / "nearby").symlink_to("sub")
    (shards / "store.tar").symlink_to(shards / ".hidden" / "s.tar")
    for name, target in (
        ("far.tar", "../secret.tar"),
        ("up", ".."),
        ("beside", "../shards-not"),
        ("gone", "nothing"),
        ("me", "me"),
    ):
        (shards / name).symlink_to(target)
    (shards / "device").symlink_to("/dev/zero")
    os.mkfifo(shards / "pipe")
    return shards


@pytest.fixture
def server(folder: Path) -> Iterator[Server]:
    with Server(folder) as running:
        yield running


def connect(server: Server) -> http.client.HTTPConnection:
    host, port = server.url.removeprefix("http://").rstrip("/").rsplit(":", 1)
    return http.client.HTTPConnection(host.strip("[]"), int(port), timeout=20)


def ask(
    server: Server | http.client.HTTPConnection, path: str, method: str = "GET", **headers: str
) -> Answer:
    """An answer, over a connection of its own unless one is given."""
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


def plug(server: Server, *, room: int | None = None) -> socket.socket:
    """A bare connection; room: bytes that the client's side holds unread."""
    plugged = socket.socket()
    plugged.settimeout(20)
    if room:
        plugged.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
    host, port = server.url.removeprefix("http://").rstrip("/").split(":")
    try:
        plugged.connect((host, int(port)))
    except OSError:
        plugged.close()
        raise
    return plugged


def rest_of(plugged: socket.socket) -> bytes:
    """Everything until the server ends the connection."""
    found = bytearray()
    while chunk := plugged.recv(MB):
        found += chunk
    return bytes(found)


def say(server: Server, words: bytes) -> tuple[int, bytes]:
    """Status and all that is answered to these very words, after which the client says no more."""
    with plug(server) as plugged:
        plugged.sendall(words)
        plugged.shutdown(socket.SHUT_WR)
        found = rest_of(plugged)
    assert found.startswith(b"HTTP/1.1 "), found[:100]
    return int(found.split(b" ", 2)[1]), found


def until(done: Callable[[], Any]) -> None:
    """Wait for something that happens soon and cannot be waited for otherwise."""
    end = time.monotonic() + 20
    while not done():
        assert time.monotonic() < end
        time.sleep(0.002)


def taken(plugged: socket.socket) -> bool:
    """Whether the server still listens to one more letter."""
    try:
        plugged.sendall(b"x")
    except OSError:
        return False
    return True


# --- parts -----------------------------------------------------------------------------------------------------------


def test_any_part_of_a_file_is_what_a_slice_gives(server: Server) -> None:
    rng = random.Random(2)
    edges = [0, 1, 2, 4095, 4096, 8191, 9_998, 9_999]
    pairs = [(a, b) for a in edges for b in edges] + [
        (rng.randrange(10_000), rng.randrange(12_000)) for _ in range(200)
    ]
    connection = connect(server)
    for a, b in pairs:
        status, headers, body = ask(connection, "/a.tar", Range=f"bytes={a}-{b}")
        if b < a:  # no part at all: passed over
            assert (status, body) == (200, BYTES)
            continue
        assert (status, body) == (206, BYTES[a : b + 1])
        assert headers["Content-Range"] == f"bytes {a}-{min(b, 9_999)}/10000"
        assert headers["Content-Length"] == str(len(body))
    for a in edges:
        assert ask(connection, "/a.tar", Range=f"bytes={a}-")[2] == BYTES[a:]
        assert ask(connection, "/a.tar", Range=f"bytes=-{a + 1}")[2] == BYTES[-a - 1 :]
        assert ask(connection, "/a.tar", Range=f"BYTES=000{a}-{a}")[2] == BYTES[a : a + 1]
    assert (
        ask(connection, "/a.tar", Range="bytes=-20000")[1]["Content-Range"] == "bytes 0-9999/10000"
    )
    connection.close()


@pytest.mark.parametrize(
    "words",
    [
        *(
            "bytes=",
            "bytes=-",
            "bytes=x-y",
            "bytes=1",
            "bytes=5-2",
            "bytes=-1-2",
            "bytes=--5",
            "bytes=0-1,3-4",
            "bytes=0-1,",
        ),
        *(
            "items=0-5",
            "0-5",
            "bytes 0-5",
            "bytes=0x1-0x2",
            "bytes=1.0-2",
            "bytes=+1-2",
            "bytes=1 - 2",
            "bytes=\u00b2-\u00b3",
        ),
        *("", "="),
    ],
)
def test_a_range_that_is_not_understood_gives_the_whole(server: Server, words: str) -> None:
    status, headers, body = ask(server, "/a.tar", Range=words)
    assert (status, headers["Content-Range"], body) == (200, None, BYTES)


def test_two_range_headers_give_the_whole(server: Server) -> None:
    words = b"GET /a.tar HTTP/1.1\r\nHost: x\r\nRange: bytes=0-1\r\nRange: bytes=3-4\r\n\r\n"
    assert say(server, words)[0] == 200


@pytest.mark.parametrize(
    "words",
    [
        "10000-10000",
        "10000-",
        "-0",
        "-00",
        f"{10**22}-{10**23}",
        f"{2**64}-",
        f"{'9' * 30_000}-{'1' * 30_000}",
    ],
)
def test_a_part_behind_the_end_is_refused_with_the_size(server: Server, words: str) -> None:
    status, headers, body = ask(server, "/a.tar", Range=f"bytes={words}")
    assert (status, headers["Content-Range"]) == (416, "bytes */10000")
    assert headers["Content-Length"] == str(len(body))


def test_absurd_ends_of_a_part_mean_the_end_of_the_file(server: Server) -> None:
    for words in (
        "0-99999999999999999999999",
        f"-{'9' * 30_000}",
        f"0-{'9' * 30_000}",
        f"{'0' * 30_000}-",
    ):
        status, headers, body = ask(server, "/a.tar", Range=f"bytes={words}")
        assert (status, headers["Content-Range"], body) == (206, "bytes 0-9999/10000", BYTES)


def test_an_empty_file_has_a_length_and_no_parts(server: Server) -> None:
    for headers in ({}, {"Range": "bytes=-5"}):
        status, found, body = ask(server, "/empty.tar", **headers)
        assert (status, found["Content-Length"], body) == (200, "0", b"")
    for words in ("bytes=0-", "bytes=0-0", "bytes=-0"):
        status, found, _ = ask(server, "/empty.tar", Range=words)
        assert (status, found["Content-Range"]) == (416, "bytes */0")
    assert ask(server, "/one.tar", Range="bytes=0-0")[2] == b"1"


def test_parts_behind_four_gigabytes_are_given(tmp_path: Path) -> None:
    with open(tmp_path / "large.tar", "wb") as file:
        file.seek(5 << 30)
        file.write(BYTES)
    with Server(tmp_path) as server:
        assert (
            ask(server, "/large.tar", Range=f"bytes={5 << 30}-{(5 << 30) + 99}")[2] == BYTES[:100]
        )
        assert ask(server, "/large.tar", Range="bytes=-10")[2] == BYTES[-10:]
        assert ask(server, "/large.tar", "HEAD")[1]["Content-Length"] == str((5 << 30) + 10_000)


# --- heads and conditions --------------------------------------------------------------------------------------------


def test_head_says_what_get_says(server: Server) -> None:
    for path in ("/a.tar", "/empty.tar", "/", "/sub", "/nothing", "/index.json", "/.secret.tar"):
        found = [ask(server, path, method) for method in ("GET", "HEAD")]
        heads = [[item for item in headers.items() if item[0] != "Date"] for _, headers, _ in found]
        assert found[0][0] == found[1][0]
        assert heads[0] == heads[1]
        assert found[1][2] == b""
        assert found[0][1]["Content-Length"] == str(len(found[0][2]))


def test_a_head_ignores_ranges(server: Server) -> None:
    status, headers, _ = ask(server, "/a.tar", "HEAD", Range="bytes=0-4")
    assert (status, headers["Content-Length"], headers["Accept-Ranges"]) == (200, "10000", "bytes")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.tar", "application/x-tar"),
        ("index.json", "application/json"),
        ("page.html", "application/octet-stream"),
        ("plain", "application/octet-stream"),
    ],
)
def test_no_file_is_called_a_page(server: Server, name: str, kind: str) -> None:
    headers = ask(server, f"/{name}")[1]
    assert headers["Content-Type"] == kind
    assert headers["X-Content-Type-Options"] == "nosniff"


def test_conditions_are_met_or_said_not_to_be(server: Server, folder: Path) -> None:
    headers = ask(server, "/a.tar")[1]
    tag, time_ = headers["ETag"], headers["Last-Modified"]
    assert re.fullmatch(r'"[0-9a-f-]+"', tag)
    second = (folder / "a.tar").stat().st_mtime
    assert time_ == formatdate(second, usegmt=True)
    before, after = formatdate(second - 100, usegmt=True), formatdate(second + 100, usegmt=True)
    for wanted, cases in {
        200: [
            {"If-Match": tag},
            {"If-Match": f'"other", W/"x", {tag}'},
            {"If-Match": "*"},
            {"If-None-Match": '"other"'},
            {"If-None-Match": "nonsense"},
            {"If-Modified-Since": before},
            {"If-Modified-Since": "yesterday"},
            {"If-Modified-Since": time_, "If-None-Match": '"other"'},  # the tag says it better
            {"If-Unmodified-Since": time_},
            {"If-Unmodified-Since": before, "If-Match": tag},
            {"If-Unmodified-Since": "Mon, 99 Foo 99999999999999999999 99:99:99 GMT"},
        ],
        304: [
            {"If-None-Match": tag},
            {"If-None-Match": f'"other", W/{tag}'},
            {"If-None-Match": "*"},
            {"If-Modified-Since": time_},
            {"If-Modified-Since": after},
            {"If-None-Match": tag, "If-Match": tag, "Range": "bytes=0-1"},
        ],
        412: [
            {"If-Match": '"other"'},
            {"If-Match": f"W/{tag}"},
            {"If-Match": ""},
            {"If-Unmodified-Since": before},
            {"If-Match": '"other"', "If-None-Match": tag, "Range": "bytes=0-1"},
        ],
    }.items():
        for case in cases:
            for method in ("GET", "HEAD"):
                status, found, body = ask(server, "/a.tar", method, **case)
                assert (status, found["ETag"]) == (wanted, tag), case
                assert body == b"" or wanted != 304


def test_a_part_is_given_only_of_the_file_that_was_meant(server: Server, folder: Path) -> None:
    old = 1_600_000_000
    os.utime(folder / "a.tar", (old, old))
    tag, time_ = (ask(server, "/a.tar")[1][name] for name in ("ETag", "Last-Modified"))
    for words in (tag, time_):
        assert ask(server, "/a.tar", Range="bytes=0-1", If_Range=words)[0] == 206
    for words in ('"other"', f"W/{tag}", formatdate(old + 1, usegmt=True), "x", ""):
        status, _, body = ask(server, "/a.tar", Range="bytes=0-1", If_Range=words)
        assert (status, body) == (200, BYTES)
    assert ask(server, "/a.tar", Range="bytes=20000-", If_Range='"other"')[0] == 200
    now = int(time.time()) + 1000  # a time that may still come to mean another file
    os.utime(folder / "a.tar", (now, now))
    headers = ask(server, "/a.tar")[1]
    assert parsedate_to_datetime(headers["Last-Modified"]) <= parsedate_to_datetime(headers["Date"])
    assert ask(server, "/a.tar", Range="bytes=0-1", If_Range=formatdate(now, usegmt=True))[0] == 200


def test_another_file_of_the_same_name_has_another_tag(server: Server, folder: Path) -> None:
    path = folder / "changing.tar"
    seen = set()
    for _ in range(2):
        other = folder / "next.tar"
        other.write_bytes(BYTES)
        os.utime(other, (1_600_000_000, 1_600_000_000))
        os.rename(other, path)
        seen.add(ask(server, "/changing.tar")[1]["ETag"])
        with open(path, "ab") as file:
            file.write(b"x")
        seen.add(ask(server, "/changing.tar")[1]["ETag"])
    path.unlink()
    assert len(seen) == 4


# --- nothing outside -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "target",
    [
        *(
            "/../secret.tar",
            "/sub/../../secret.tar",
            "/sub/../a.tar",
            "/./a.tar",
            "/%2e%2e/secret.tar",
            "/.%2e/secret.tar",
        ),
        *(
            "/..%2fsecret.tar",
            "/%2e%2e%2fsecret.tar",
            "/..%5csecret.tar",
            "/..\\secret.tar",
            "/sub%2fb.tar",
            "/sub%2Fb.tar",
        ),
        *(
            "/%252e%252e/secret.tar",
            "/%252e%252e%252fsecret.tar",
            "/%c0%ae%c0%ae/secret.tar",
            "/..%c0%afsecret.tar",
        ),
        *(
            "/%00",
            "/a.tar%00",
            "/a.tar%00.json",
            "/..;/secret.tar",
            "/..%00/secret.tar",
            "/%2e",
            "/%2e%2e",
            "/..",
            "/.",
        ),
        *(
            "/.secret.tar",
            "/%2esecret.tar",
            "/.hidden/s.tar",
            "/.hidden/",
            "/sub/..",
            "/sub/.",
            "/.well-known/x",
        ),
        *(
            "//etc/passwd",
            "///etc/passwd",
            "/sub//b.tar",
            "/%2fetc%2fpasswd",
            "/etc/passwd",
            "/a.tar/",
            "/a.tar/x",
        ),
        *(
            "http://x/a.tar",
            "file:///etc/passwd",
            "a.tar",
            "*",
            "..",
            "?",
            "C:\\a.tar",
            "/shards-not/secret.tar",
        ),
        *(
            "/far.tar",
            "/up/secret.tar",
            "/up/",
            "/up",
            "/beside/secret.tar",
            "/beside/",
            "/gone",
            "/me",
            "/me/x",
        ),
        *(
            "/device",
            "/pipe",
            "/" + "x" * 300,
            "/" + "x/" * 4000,
            "/" + "%78" * 20_000,
            "/nothing",
            "/nothing/",
            "/%ff%fe",
        ),
        *(
            "/~root",
            "/sub/%2e%2e/%2e%2e/secret.tar",
            "/%u002e%u002e/secret.tar",
            "/..%252fsecret.tar",
            "/.%00./secret.tar",
        ),
    ],
)
def test_nothing_outside_the_folder_and_nothing_hidden_is_given(
    server: Server, target: str
) -> None:
    for method in (b"GET", b"HEAD"):
        words = method + b" " + target.encode() + b" HTTP/1.1\r\nHost: x\r\n\r\n"
        status, found = say(server, words)
        assert status in (400, 404), found[:200]
        assert b"secret" not in found.partition(b"\r\n\r\n")[2]


def test_links_that_stay_inside_are_followed(server: Server) -> None:
    assert ask(server, "/near.tar")[2] == BYTES
    assert ask(server, "/nearby/b.tar")[2] == BYTES
    assert ask(server, "/store.tar")[2] == b"secret"  # what its owner put on show under a name


def test_a_folder_that_becomes_a_link_while_it_is_opened_leads_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("shards/sub", "outside"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "b.tar").write_bytes(place.encode())
    real_open = os.open
    shards = str((tmp_path / "shards").resolve())

    def exchanged(path: str, flags: int) -> int:
        if not os.path.islink(f"{shards}/sub"):
            os.rename(f"{shards}/sub", f"{shards}/was")
            os.symlink(tmp_path / "outside", f"{shards}/sub")
        return real_open(path, flags)

    os.close(inside.open_inside(shards, ["sub", "b.tar"]))
    files = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(inside.os, "open", exchanged)
    with pytest.raises(FileNotFoundError, match="not inside"):
        inside.open_inside(shards, ["sub", "b.tar"])
    os.unlink(f"{shards}/sub")
    os.rename(f"{shards}/was", f"{shards}/sub")
    monkeypatch.setattr(
        inside, "_OPENED", "/nowhere"
    )  # where the system does not say what was opened
    with pytest.raises(FileNotFoundError, match="not inside"):
        inside.open_inside(shards, ["sub", "b.tar"])
    assert len(os.listdir("/proc/self/fd")) == files


def test_a_folder_that_is_a_link_itself_is_served(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder)
    with Server(tmp_path / "link") as server:
        assert ask(server, "/a.tar")[2] == BYTES


def test_a_file_that_may_not_be_read_is_refused_and_trouble_is_told(
    server: Server, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    errors = [errno.EACCES, errno.EMFILE, errno.EIO]
    monkeypatch.setattr(
        answering,
        "open_inside",
        lambda *_: (_ for _ in ()).throw(OSError(errors.pop(0), "words", "a.tar")),
    )
    assert ask(server, "/a.tar")[0] == 403
    status, headers, _ = ask(server, "/a.tar")
    assert (status, headers["Retry-After"]) == (503, "1")
    assert ask(server, "/a.tar")[0] == 500
    server.stop()
    assert capfd.readouterr().err == "wdstrain: [Errno 5] words: 'a.tar'\n"


# --- folders ---------------------------------------------------------------------------------------------------------


def test_a_folder_shows_what_may_be_asked_for(server: Server) -> None:
    status, headers, body = ask(server, "/")
    page = body.decode()
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    links = re.findall(r'<li><a href="\./([^"]*)">', page)
    assert links[:2] == ["a%20b%3Ci%3E%26%C3%A4%3A1%252e.tar", "a.tar"]
    assert "a b&lt;i&gt;&amp;ä:1%2e.tar</a>" in page
    names = [
        "empty.tar",
        "index.json",
        "near.tar",
        "nearby/",
        "one.tar",
        "page.html",
        "plain",
        "store.tar",
        "sub/",
    ]
    assert links[2:] == names
    assert not re.search("secret|hidden|far.tar|beside|device|pipe|gone", page)
    for link in links:
        assert ask(server, f"/{link}")[0] == 200
    assert 'href="../"' not in page
    assert 'href="../"' in ask(server, "/sub/")[2].decode()


def test_names_of_any_bytes_are_shown_and_given(tmp_path: Path) -> None:
    names = [b"\xff\xfe.tar", "ä€.tar".encode(), b"a\nb.tar", b'"q".tar', b"#1?.tar", b"100%.tar"]
    for name in names:
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name)).write_bytes(name)
    with Server(tmp_path) as server:
        links = re.findall(r'href="\./([^"]*)">', ask(server, "/")[2].decode())
        assert sorted(ask(server, f"/{link}")[2] for link in links) == sorted(names)
        assert (
            say(server, "GET /ä€.tar HTTP/1.0\r\n\r\n".encode())[0] == 200
        )  # a client that does not encode


def test_a_folder_without_its_slash_is_somewhere_else(server: Server) -> None:
    status, headers, _ = ask(server, "/sub?x=1")
    assert (status, headers["Location"]) == (301, "/sub/")
    assert ask(server, "/nearby")[1]["Location"] == "/nearby/"


def test_a_page_does_not_grow_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answering, "LISTED", 5)
    for number in range(8):
        (tmp_path / f"{number}.tar").touch()
    with Server(tmp_path) as server:
        page = ask(server, "/")[2].decode()
    assert page.count(".tar</a>") == 5
    assert "only 5 are shown" in page


# --- connections -----------------------------------------------------------------------------------------------------


def test_a_connection_is_kept_from_one_request_to_the_next(server: Server) -> None:
    connection = connect(server)
    ask(connection, "/a.tar")
    first = connection.sock
    for path, method in (
        ("/a.tar", "HEAD"),
        ("/nothing", "GET"),
        ("/", "GET"),
        ("/a.tar", "POST"),
        ("/empty.tar", "GET"),
    ):
        ask(connection, path, method, If_None_Match="*")
        assert connection.sock is first
    assert ask(connection, "/a.tar", Range="bytes=90000-")[0] == 416
    assert ask(connection, "/a.tar", Connection="foo, Close")[1]["Connection"] == "close"
    assert connection.sock is None
    assert server.requests == 8
    until(lambda: server.bytes == 2 * 10_000)  # what was sent is counted once it is


def test_requests_that_come_together_are_answered_in_turn(server: Server) -> None:
    words = b"".join(
        b"GET /a.tar HTTP/1.1\r\nHost: x\r\nRange: bytes=%d-%d\r\n\r\n" % (n, n) for n in range(50)
    )
    status, found = say(server, words)
    assert status == 206
    assert [part[:1] for part in found.split(b"\r\n\r\n")[1:]] == [
        BYTES[n : n + 1] for n in range(50)
    ]


def test_old_clients_are_served(server: Server) -> None:
    status, found = say(server, b"GET /one.tar HTTP/1.0\r\n\r\n")
    assert (status, found.endswith(b"\r\nConnection: close\r\n\r\n1")) == (200, True)
    status, found = say(server, b"GET /one.tar HTTP/1.0\r\nConnection: keep-alive\r\n\r\n" * 2)
    assert found.count(b"\r\nConnection: keep-alive\r\n\r\n1") == 2
    assert say(server, b"GET /one.tar\r\n\r\n")[0] == 200


@pytest.mark.parametrize(
    "method",
    ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "PROPFIND", "get", "X"],
)
def test_other_methods_are_not_here(server: Server, method: str) -> None:
    status, headers, body = ask(server, "/a.tar", method)
    assert (status, headers["Allow"]) == (405, "GET, HEAD")
    assert headers["Content-Length"] == str(len(body))


@pytest.mark.parametrize(
    "head",
    [
        "Content-Length: 3000000",
        "Transfer-Encoding: chunked",
        "Content-Length: 3000000\r\nExpect: 100-continue",
        "Content-Length: 0\r\nContent-Length: 9",
    ],
)
@pytest.mark.parametrize(("method", "wanted"), [("GET", 200), ("PUT", 405)])
def test_a_request_with_a_body_is_answered_and_its_connection_ends(
    server: Server, method: str, wanted: int, head: str
) -> None:
    status, found = say(
        server,
        f"{method} /one.tar HTTP/1.1\r\nHost: x\r\n{head}\r\n\r\n".encode() + bytes(3_000_000),
    )
    assert status == wanted
    assert found.count(b"HTTP/1.1 ") == 1
    assert b"\r\nConnection: close\r\n" in found


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 414),
        (b"GET /one.tar HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 100_000 + b"\r\n\r\n", 431),
        (b"GET /one.tar HTTP/1.1\r\nHost: x\r\n" + b"X: y\r\n" * 100_000 + b"\r\n", 431),
        (b"nonsense\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\n\n", 400),
        (b"GET /one.tar HTTP/9.9\r\n\r\n", 505),
        (b"GET /one.tar HTTP/x\r\n\r\n", 400),
        (b"GET /one tar HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET /one.tar HTTP/1.1\r\n\r\n", 400),
        (b"GET /one.tar HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n", 400),
    ],
)
def test_floods_and_nonsense_are_refused_in_words(
    server: Server, words: bytes, wanted: int
) -> None:
    status, found = say(server, words)
    assert status == wanted
    assert found.count(b"HTTP/1.1 ") == 1
    head, _, body = found.partition(b"\r\n\r\n")
    assert f"Content-Length: {len(body)}\r\n".encode() in head
    assert b"text/plain" in head
    assert ask(server, "/one.tar")[2] == b"1"


def test_many_clients_at_once_each_get_their_bytes(server: Server) -> None:
    def client(number: int) -> bool:
        connection = connect(server)
        rng = random.Random(number)
        good = True
        for _ in range(10):
            start = rng.randrange(10_000)
            good &= (
                ask(connection, "/a.tar", Range=f"bytes={start}-{start + 5000}")[2]
                == BYTES[start : start + 5001]
            )
        connection.close()
        return good

    with ThreadPoolExecutor(64) as pool:
        assert all(pool.map(client, range(64)))
    assert server.requests == 640


def test_more_clients_than_places_are_served_in_turn(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "CONNECTIONS", 3)
    most = []
    with Server(folder) as server, ThreadPoolExecutor(16) as pool:
        resting = [connect(server) for _ in range(3)]
        for connection in resting:  # all places are held by clients that rest
            assert ask(connection, "/one.tar")[2] == b"1"

        def client(_: int) -> bytes:
            connection = connect(server)
            connection.request("GET", "/one.tar")
            body = connection.getresponse().read()
            most.append(len(server.places))
            until(lambda: len(most) >= 16)  # each holds on to its connection until all were served
            connection.close()
            return body

        assert list(pool.map(client, range(16))) == [b"1"] * 16
        for connection in resting:
            connection.close()
    assert max(most) <= 3


def large(tmp_path: Path) -> Path:
    with open(tmp_path / "large.tar", "wb") as file:
        file.truncate(16 * MB)
    return tmp_path


ALL = b"GET /large.tar HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


def test_a_slow_client_keeps_nobody_waiting(tmp_path: Path) -> None:
    with Server(large(tmp_path)) as server, plug(server, room=4096) as slow:
        slow.sendall(ALL)
        assert slow.recv(4) == b"HTTP"
        for _ in range(20):
            assert ask(server, "/large.tar", Range="bytes=0-99")[2] == bytes(100)
        assert rest_of(slow).partition(b"\r\n\r\n")[2] == bytes(16 * MB)


def test_who_takes_nothing_more_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.setattr(answering, "PATIENCE", 0.5)
    with Server(large(tmp_path)) as server, plug(server, room=4096) as slow:
        slow.sendall(ALL)
        assert slow.recv(4) == b"HTTP"
        until(lambda: not len(server.places))
        assert 0 < server.bytes < 16 * MB
    assert capfd.readouterr().err == ""


def test_who_says_nothing_or_says_it_too_slowly_is_given_up(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answering, "PATIENCE", 0.5)
    with (
        Server(folder) as server,
        plug(server) as silent,
        plug(server) as slow,
        plug(server) as rests,
    ):
        rests.sendall(b"GET /one.tar HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (silent.recv(1), rest_of(rests)[-1:]) == (b"", b"1")
        until(lambda: not taken(slow))  # a letter of a header now and then is no progress
        assert server.requests == 1


def test_clients_that_leave_are_no_matter(tmp_path: Path, capfd: Any) -> None:
    reset = struct.pack("ii", 1, 0)
    with Server(large(tmp_path)) as server:
        for words in (b"", b"GET", ALL[:-2], ALL, ALL + ALL):
            for kind in ("close", "reset", "half"):
                with plug(server, room=4096) as leaving:
                    leaving.sendall(words)
                    if words.startswith(ALL) and kind != "half":
                        assert leaving.recv(4) == b"HTTP"
                    if kind == "reset":
                        leaving.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
                    elif kind == "half":
                        leaving.shutdown(socket.SHUT_RDWR)
        until(lambda: not len(server.places))
        assert ask(server, "/large.tar", Range="bytes=0-0")[2] == bytes(1)
    assert capfd.readouterr().err == ""


def test_a_file_that_shrinks_while_it_is_sent_is_cut_off(tmp_path: Path) -> None:
    with Server(large(tmp_path)) as server, plug(server, room=4096) as client:
        client.sendall(ALL.replace(b"Connection: close\r\n", b""))
        assert client.recv(4) == b"HTTP"
        os.truncate(tmp_path / "large.tar", MB)
        head, _, body = rest_of(client).partition(b"\r\n\r\n")
        assert b"Content-Length: 16777216" in head
        assert MB <= len(body) < 16 * MB


def test_a_file_that_grows_while_it_is_sent_is_sent_as_it_was(tmp_path: Path) -> None:
    with Server(large(tmp_path)) as server, plug(server, room=4096) as client:
        client.sendall(ALL)
        assert client.recv(4) == b"HTTP"
        os.truncate(tmp_path / "large.tar", 17 * MB)
        assert len(rest_of(client).partition(b"\r\n\r\n")[2]) == 16 * MB


# --- the end ---------------------------------------------------------------------------------------------------------


def test_the_end_waits_for_answers_and_for_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "GRACE", 20.0)
    threads = set(threading.enumerate())
    with (
        Server(large(tmp_path)) as server,
        plug(server) as silent,
        plug(server, room=4096) as client,
    ):
        rests = connect(server)
        ask(rests, "/large.tar", Range="bytes=0-0")
        client.sendall(ALL)
        assert client.recv(4) == b"HTTP"
        with ThreadPoolExecutor(1) as pool:
            stopping = pool.submit(server.stop)
            assert silent.recv(1) == b""
            assert len(rest_of(client).partition(b"\r\n\r\n")[2]) == 16 * MB
            stopping.result(20)
        rests.close()
        with pytest.raises(ConnectionRefusedError):
            plug(server)
    until(lambda: set(threading.enumerate()) <= threads)


def test_the_end_does_not_wait_for_a_client_that_takes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "GRACE", 0.1)
    with Server(large(tmp_path)) as server, plug(server, room=4096) as slow:
        slow.sendall(ALL)
        assert slow.recv(4) == b"HTTP"
        server.stop()
        until(lambda: not len(server.places))
        assert len(rest_of(slow)) < 16 * MB


def test_a_server_that_never_began_ends_too(folder: Path) -> None:
    server = Server(folder)
    server.stop()
    server.stop()


# --- with the loader -------------------------------------------------------------------------------------------------


def test_a_loader_gets_from_the_server_what_the_disk_gives(tmp_path: Path) -> None:
    rows = ({"__key__": f"k{n:04d}", "bin": os.urandom(2000 + n), "cls": n % 3} for n in range(300))
    wt.pack(rows, str(tmp_path / "shards"), shard_bytes=200_000)

    def epoch(urls: str) -> list[Any]:
        loader = wt.Loader(urls, batch_size=16, tail="keep", shuffle_buffer=100)
        found = [(batch["__key__"], batch["bin"], batch["cls"]) for batch in loader.epoch(1)]
        loader.close()
        return found

    wanted = epoch(str(tmp_path / "shards"))
    last = len(list((tmp_path / "shards").glob("*.tar"))) - 1
    with Server(tmp_path) as server:
        assert last > 1
        for address in (
            "shards",
            "shards/",
            "shards/index.json",
            f"shards/train-{{000000..{last:06d}}}.tar",
        ):
            assert epoch(server.url + address) == wanted
        assert main(["verify", f"{server.url}shards"]) == 0


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_the_command_serves_until_it_is_ended_and_says_what_it_served(
    folder: Path, sent: signal.Signals
) -> None:
    words = ["--json"] if sent == signal.SIGTERM else []
    command = [sys.executable, "-m", "wdstrain", "serve", str(folder), "--port", "0", *words]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        found = re.fullmatch(
            r"serving (.*) at (http://127\.0\.0\.1:(\d+)/) \(Ctrl-C ends\)\n", line
        )
        assert found, line
        assert found[1] == str(folder.resolve())
        connection = http.client.HTTPConnection("127.0.0.1", int(found[3]), timeout=20)
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
        assert report == {"folder": found[1], "url": found[2], "requests": 1, "bytes": 5}
    else:
        assert re.fullmatch(r"served 1 request, 0\.0 MB, in \d+ s\n", out)


def test_the_verb_helps_with_an_example(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    assert "example: wdstrain serve " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "status", "sentence"),
    [
        (["absent"], 2, "absent: there is no such folder. Name the folder that holds the shards."),
        (["file"], 2, "file: this is no folder. Name the folder that holds the shards."),
        (
            [".", "--port", "{taken}"],
            1,
            "port {taken} of 127.0.0.1 is taken. Choose another port, or 0 for any free one.",
        ),
        (
            [".", "--host", "192.0.2.1"],
            2,
            "'192.0.2.1' with port 8000 is no address of this machine",
        ),
        ([".", "--host", "a..b"], 2, "'a..b' with port 8000 is no address of this machine"),
        ([".", "--port", "70000"], 2, "port 70000"),
        ([".", "--port", "-1"], 2, "port -1"),
    ],
)
def test_what_cannot_be_served_is_one_sentence(
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
    assert printed.err.count("\n") == 1
    assert printed.out == ""


def test_a_folder_that_others_can_read_is_said_to_be(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def ended(_: Server) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Server, "wait", ended)
    assert main(["serve", str(folder), "--host", "0.0.0.0", "--port", "0"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert re.search(r"at http://127\.0\.0\.1:\d+/ ", lines[0])
    assert re.match(r"Everyone who reaches this machine \(.+\) can read this folder", lines[1])
    assert main(["serve", str(folder), "--port", "0"]) == 0
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_names_and_new_addresses_are_listened_at(folder: Path) -> None:
    with Server(folder, "localhost") as server:
        assert server.url.startswith("http://127.0.0.1:")
        assert server.is_local
        assert ask(server, "/one.tar")[2] == b"1"
    try:
        newer = Server(folder, "::1")
    except UsageError:
        pytest.skip("this machine has no IPv6")
    with newer as server:
        assert server.url.startswith("http://[::1]:")
        assert ask(server, "/one.tar")[2] == b"1"


def test_an_address_is_taken_once(folder: Path) -> None:
    with Server(folder) as server:
        port = int(server.url.rsplit(":", 1)[1].strip("/"))
        with pytest.raises(StorageError, match="is taken"):
            Server(folder, port=port)
        ask(server, "/one.tar")
    with Server(folder, port=port) as server:  # at once, and not after the minutes of TIME_WAIT
        assert ask(server, "/one.tar")[2] == b"1"
